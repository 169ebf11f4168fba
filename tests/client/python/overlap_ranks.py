"""What the ranks of overlap_test.py do."""

import contextlib
import copy
import gc
import hashlib
import itertools
import os
import pickle
import signal
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from fsdp_ranks import Model, batch, loss_of, mesh_of, shard, used_seldom
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import ballast
import ballast.torch


def digest(model):
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        sha.update(name.encode() + value.detach().float().numpy().tobytes())
    return sha.hexdigest()


def has_left(optimizer):
    """Whether what is in .grad, or was, has left before step()."""
    binding = optimizer._binding
    return (binding is not None and binding.flows.stream is not None and len(binding.flows.stream.left) > 0 and
            binding.flows.stream.first_changed(binding.member.parameters) is None)


def train(model, optimizer, rank, accumulation, syncs, averages=False):
    """syncs: called with whether the gradients of the next backward are reduced. averages: of the weights, are made by
    hand after each step, and are the weights in the end. Returns how many steps' gradients had left before step()."""
    left, average = 0, {name: p.detach().clone() for name, p in model.named_parameters()} if averages else {}
    for step in range(5):
        optimizer.zero_grad()
        for micro_step in range(accumulation):
            syncs(micro_step + 1 == accumulation)
            loss_of(model, batch(10 * step + micro_step, rank), used_seldom(step)).backward()
        left += has_left(optimizer)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters() if averages else ():
                average[name].lerp_(parameter, 0.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters() if averages else ():
            parameter.copy_(average[name])
    return left


def fsdp(rank, world_size, service, job, overlap, accumulation=1, no_sync=False, replicas=1, averages=False,
         **options):
    model = shard(Model(), mesh_of(world_size, replicas))
    optimizer = ballast.torch.AdamW(model.named_parameters(), lr=0.02, weight_decay=0.1, service=service, job=job,
                                    overlap=overlap, **options)
    left = train(model, optimizer, rank, accumulation,
                 model.set_requires_gradient_sync if no_sync else lambda _: None, averages)
    assert optimizer.overlap_weights == (options.get("overlap_weights", False) and replicas == 1)
    optimizer.close()
    return [digest(model), left]


def fsdp_with_deaths(rank, world_size, service, job, steps, holder=0):
    """FSDP2 with all that overlaps. In each step rank 0 kills the process that serves, the child of `holder`: before
    the gradients, between them, when all have left, or while weights come. Returns the digest and how many it killed."""
    from processes import await_, children_of

    model = shard(Model(), mesh_of(world_size, 1))
    optimizer = ballast.torch.AdamW(model.named_parameters(), lr=0.02, weight_decay=0.1, service=service, job=job,
                                    overlap=True, overlap_weights=True)
    killed = []

    def may_kill(step, instant):
        if rank == 0 and holder and step % 4 == instant:
            killed.append(await_("the next process", lambda: set(children_of(holder)) - set(killed[-1:])).pop())
            os.kill(killed[-1], signal.SIGKILL)

    for step in range(steps):
        may_kill(step, 0)
        for micro_step in range(2):
            loss_of(model, batch(10 * step + micro_step, rank), used_seldom(step)).backward()
            may_kill(step, 1 + micro_step)
        optimizer.step()
        may_kill(step, 3)
        optimizer.zero_grad()
    optimizer.close()
    return [digest(model), len(killed)]


def loss_of_ddp(model, tokens, scale=1):
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1) * scale, tokens.flatten())


class Checkpointed(torch.nn.Linear):
    def forward(self, x):
        return checkpoint(lambda y: torch.tanh(super(Checkpointed, self).forward(y)), x, use_reentrant=True)


def ddp(rank, world_size, service, job, overlap, accumulation=1, no_sync=False, beside=False,
        checkpoints=False, optimizers=1, **options):
    """beside: with a parameter that is not the module's, whose gradient the trainer averages itself. checkpoints: with
    reentrant ones, in whose backwards, inside the backward, some buckets are complete. optimizers: how many share the
    module."""
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 300),
                                 *[Checkpointed(300, 300) for _ in range(3 * checkpoints)], torch.nn.Tanh(),
                                 torch.nn.Linear(300, 7))
    # Small buckets, so that there are several.
    model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.001, **options)
    scale = torch.nn.Parameter(torch.ones(()))
    named = [*module.named_parameters(), *([("scale", scale)] if beside else [])]
    made = [ballast.torch.AdamW(named[number::optimizers], lr=0.02, service=service, job=f"{job}-{number}",
                                overlap=overlap) for number in range(optimizers)]

    def syncs(reduced):
        model.require_backward_grad_sync = reduced or not no_sync  # As no_sync() sets it.

    left = 0
    for step in range(5):
        for optimizer in made:
            optimizer.zero_grad()
        for micro_step in range(accumulation):
            syncs(micro_step + 1 == accumulation)
            tokens = batch(10 * step + micro_step, rank)
            loss_of_ddp(model, tokens, scale).backward()
        if beside:
            dist.all_reduce(scale.grad.div_(world_size))
        left += all(has_left(optimizer) for optimizer in made)
        for optimizer in made:
            optimizer.step()
    for optimizer in made:
        optimizer.close()
    return [digest(module) + str(scale.item()) * beside, left]


def patterns(most, promised=None):
    """Which of a step's backwards reduce gradients: all patterns of up to so many. promised: of those that reduce there
    are at most so many, and nothing after the last of them."""
    return [pattern for backwards in range(1, most + 1)
            for pattern in itertools.product((True, False), repeat=backwards)
            if promised is None or sum(pattern) < promised or (sum(pattern) == promised and pattern[-1])]


class Small(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.seldom = torch.nn.Embedding(7, 60), torch.nn.Linear(60, 60)
        self.head = torch.nn.Linear(60, 7)
        self.to(dtype)

    def forward(self, tokens, seldom):
        x = self.embedding(tokens)
        logits = self.head(torch.tanh(self.seldom(x)) if seldom else x)
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def accumulates(rank, world_size, service, job, overlap, sharded=False, dtype="float32", view=False, most=3,
                promised=None, **options):
    """Steps of all patterns, each of them twice, in the second one with zeros in .grad. With overlap it attaches to the
    job in the middle. Returns the digest of each step's weights, and in which of them gradients had left."""
    module = Small(getattr(torch, dtype))
    if sharded:
        mesh = mesh_of(world_size, 1)
        for each in (module.seldom, module):
            fully_shard(each, mesh=mesh).set_force_sum_reduction_for_comms(True)
        model = module
    else:  # Small buckets, so that there are several.
        if view:
            module.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.001, gradient_as_bucket_view=view)

    def made():
        return ballast.torch.AdamW(module.named_parameters(), lr=0.02, service=service, job=job, overlap=overlap,
                                   **options)

    optimizer, digests, left = made(), [], []
    steps = [pattern for pattern in patterns(most, promised) for _ in range(2)]
    for step, pattern in enumerate(steps):
        if overlap and step == len(steps) // 2:
            optimizer.close()
            optimizer = made()
            assert optimizer.attach() == step
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for number, reduces in enumerate(pattern):
            if sharded:
                model.set_requires_gradient_sync(reduces)
            else:
                model.require_backward_grad_sync = reduces  # As no_sync() sets it.
            model(batch(10 * step + number, rank), not sharded or used_seldom((step + number) % 4)).backward()
        left.append(has_left(optimizer))
        optimizer.step()
        sha = hashlib.sha256()
        for parameter in module.parameters():
            here = parameter._local_tensor if sharded else parameter
            sha.update(here.detach().float().numpy().tobytes())
        digests.append(sha.hexdigest())
    optimizer.close()
    return [digests, left]


def optimizers_of_one_module(rank, world_size, service, job):
    """One that is forgotten, torch's own, and one that has to attach again. Returns the steps of the last one, whether
    the first one is gone, and how often each took gradients that had not left before step()."""
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7))
    model = torch.nn.parallel.DistributedDataParallel(module)

    def step(optimizer, number, interferes=lambda: None):
        optimizer.zero_grad()
        loss_of_ddp(model, batch(number, rank)).backward()
        interferes()
        seen = not (isinstance(optimizer, ballast.torch.AdamW) and has_left(optimizer))
        optimizer.step()
        return seen

    def overlapping(name):
        return ballast.torch.AdamW(module.named_parameters(), lr=0.02, service=service, job=f"{job}-{name}",
                                   overlap=True, module=model)

    optimizer = overlapping("first")
    seen = [sum(step(optimizer, number) for number in range(3))]
    stream = weakref.ref(optimizer._binding.flows.stream)
    del optimizer
    gc.collect()
    gone = stream() is None
    dist.barrier()
    theirs = torch.optim.SGD(module.parameters(), lr=0.1)
    seen.append(sum(step(theirs, number) for number in range(3)))
    optimizer = overlapping("second")
    seen.append(sum(step(optimizer, number) for number in range(3)))

    def abort():
        from processes import await_

        dist.barrier()
        if rank == 0:
            client, name = ballast.connect(service), f"{job}-second"
            await_("the begins of the step", lambda: all(each["begun"] for each in client.job(name)["ranks"]))
            client._change("JobService/AbortStep", name=f"jobs/{name}")

    try:
        step(optimizer, 3, abort)
    except ballast.AbortedError:
        seen.append(optimizer.attach())
    seen.append(sum(step(optimizer, number) for number in range(3, 6)))
    steps = optimizer.param_groups[0]["job_step"]
    optimizer.close()
    return [gone, seen, steps]


def aborted_in_backward(rank, world_size, service, job):
    """What zero_grad() or a backward of DistributedDataParallel raises then, and the steps when it has attached and
    later; and the same when rank 1 alone cannot begin a step."""
    from processes import await_

    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7))
    model = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = ballast.torch.AdamW(module.named_parameters(), service=service, job=job, overlap=True, module=model)

    def backward(number):
        loss_of_ddp(model, batch(number, rank)).backward()

    def steps():
        for number in range(2):
            backward(number)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.param_groups[0]["job_step"]

    steps()
    backward(2)
    dist.barrier()
    if rank == 0:
        client = ballast.connect(service)
        await_("the begins of the step", lambda: all(each["begun"] for each in client.job(job)["ranks"]))
        client._change("JobService/AbortStep", name=f"jobs/{job}")
    dist.barrier()
    said, told = "nothing", torch.zeros(())
    while not told:  # Each hears of it in its own time.
        for work in (optimizer.zero_grad, lambda: backward(3)):
            try:
                work()
            except Exception as error:
                said = type(error).__name__
        told.fill_(said != "nothing")
        dist.all_reduce(told, op=dist.ReduceOp.MIN)
    optimizer.zero_grad()
    attached = optimizer.attach()
    seen = [said, attached, steps()]
    failing = ballast.UnavailableError("the service has gone")
    with mock.patch.object(optimizer._binding.member.session, "begin_step", side_effect=failing) if rank == 1 else \
            contextlib.nullcontext():
        try:
            steps()
        except ballast.BallastError as error:
            seen.append(type(error).__name__)
    optimizer.zero_grad()
    seen += [optimizer.attach(), steps()]
    optimizer.close()
    return seen


def _clips(model, optimizer, loss_at):
    """Steps that are clipped, and one that is left out for its norm."""
    norms, types = [], set()
    for step in (0, 1, 77, 2, 3):
        (loss_at(step) * (1000 if step == 77 else 1)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        types.add(type(norm).__name__)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        if norms[-1] < 10:
            optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [torch.cat([value.detach().flatten() for value in values]).tolist(), norms, sorted(types)]


def fsdp_clips(rank, world_size, overlap, service, job):
    model = shard(Model(), mesh_of(world_size, 1))
    optimizer = ballast.torch.AdamW(model.named_parameters(), lr=0.02, service=service, job=job, overlap=overlap)
    return _clips(model, optimizer, lambda step: loss_of(model, batch(step, rank), used_seldom(step)))


def ddp_clips(rank, world_size, overlap, service, job):
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 30), torch.nn.Tanh(),
                                 torch.nn.Linear(30, 7))
    model = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = ballast.torch.AdamW(module.named_parameters(), lr=0.02, service=service, job=job, overlap=overlap,
                                    module=model if overlap else None)
    return _clips(model, optimizer, lambda step: loss_of_ddp(model, batch(step, rank)))


def clip_differently(rank, world_size, service, job):
    """What each rank is told."""
    model = shard(Model(), mesh_of(world_size, 1))
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job, overlap=True)
    said = "nothing"
    try:
        for step in range(2):
            loss_of(model, batch(step, rank), False).backward()
            if step == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 * (rank + 1))
            optimizer.step()
    except ballast.BallastError as error:
        said = str(error)
    dist.barrier()
    optimizer.close()
    return said


def refusals(rank, world_size, service, job):
    """Of an optimizer that cannot see how the ranks reduce their gradients."""
    wrap = torch.nn.parallel.DistributedDataParallel
    modules = [torch.nn.Linear(3, 2, bias=False) for _ in range(6)]
    hooked = wrap(modules[4])
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    wraps = [None, None, wrap(modules[2], find_unused_parameters=True), wrap(modules[3], static_graph=True), hooked,
             [wrap(modules[5]) for _ in range(2)]]
    said = []
    for number, (module, wrapped) in enumerate(zip(modules, wraps)):
        for given in (None, module if isinstance(wrapped, list) else wrapped or module):
            torch.nn.init.ones_(module.weight)
            module(torch.ones(3)).sum().backward()
            try:
                optimizer = ballast.torch.AdamW(module.named_parameters(), service=service, job=f"{job}{len(said)}",
                                                overlap=True, module=given)
                optimizer.step()
                said.append("nothing")
            except ValueError as error:
                said.append(str(error))
    dist.barrier()
    optimizer.module = wraps[5][0]
    optimizer.attach(create=True)
    try:
        optimizer.module = None
    except RuntimeError as error:
        said.append(str(error))
    optimizer.close()
    return said


def reads_shards_alone(rank, world_size, service, job):
    """How many weights are awaited still after each way to read them, all of them, on one rank alone."""
    model = shard(Model(), mesh_of(world_size, 1))
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job, overlap=True,
                                    overlap_weights=True)
    left = []
    for name, read in {"a state": model.state_dict, "a wait": optimizer.wait_for_weights,
                       "copies": lambda: copy.deepcopy(list(model.parameters())),
                       "pickles": lambda: pickle.dumps(list(model.parameters())),
                       "parts": lambda: [p.to_local() for p in model.parameters()],
                       "their memory": lambda: [p._local_tensor.data_ptr() for p in model.parameters()],
                       "data": lambda: [p.data for p in model.parameters()],
                       "norms": lambda: [p.detach().square() for p in model.parameters()],
                       "an average": lambda: torch._foreach_mul(list(model.parameters()), 0.5),
                       "unshard": lambda: model.unshard()}.items():
        for step in range(2):
            loss_of(model, batch(step, rank), False).backward()
            optimizer.step()
            optimizer.zero_grad()
        coming = optimizer._binding.flows.returning.coming
        assert len(coming) == sum(p.requires_grad for p in model.parameters()), (name, coming)
        if rank == 0 or name == "unshard":  # Which gathers.
            with torch.no_grad():
                read()
            left.append(len(optimizer._binding.flows.returning.coming))
        model.reshard()
        dist.barrier()
        optimizer.wait_for_weights()
    optimizer.close()
    return left


def reads_replicas_alone(rank, world_size, service, job, overlap_weights):
    """With DDP, rank 0 alone reads after each step: a state, an evaluation, an average made by hand. What it had, and
    whether weights come after the step."""
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7))
    model = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = ballast.torch.AdamW(module.named_parameters(), service=service, job=f"{job}-{overlap_weights}",
                                    overlap_weights=overlap_weights)
    average = [torch.zeros(p.shape) for p in module.parameters()]
    sha, losses = hashlib.sha256(), []
    for step in range(3):
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with torch.no_grad():
                torch._foreach_lerp_(average, list(module.parameters()), 0.5)
                losses.append(module(batch(9, 0)).square().mean().item())
            for value in [*module.state_dict().values(), *average]:
                sha.update(value.numpy().tobytes())
    state = optimizer.state_dict() if rank == 0 else None
    overlaps = optimizer.overlap_weights
    if rank == 0:
        optimizer.close()
    dist.barrier()
    optimizer.close()
    return [losses, sha.hexdigest(), state and state["param_groups"][0]["job_step"], overlaps]
