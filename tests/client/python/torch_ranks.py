"""What the ranks of torch_ranks_test.py do."""

import contextlib
import hashlib
import os
import signal
import time
from unittest import mock

import torch
import torch._dynamo  # Which torch otherwise imports when the ranks are separate.
import torch.distributed as dist
from ranks_for_tests import LONGEST, kill_service

import ballast
import ballast.torch
from ballast.torch import binding


def model_of(width=3):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))


def end_of(model, optimizer):
    """The weights, whole, of a training that is over."""
    if isinstance(optimizer, ballast.torch.AdamW):
        optimizer.wait_for_weights()
    weights = [getattr(parameter, "full_tensor", lambda: parameter)().detach().clone() for parameter in model.parameters()]
    if isinstance(optimizer, ballast.torch.AdamW):
        optimizer.close()
    return weights


def backward(model, step, rank):
    torch.manual_seed(100 * step + rank)
    model(torch.randn(5, 4)).square().mean().backward()


def train(parallel, optimizer, rank, steps, begin=0):
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        backward(parallel, step, rank)
        optimizer.step()


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def error_of(work):
    """Kind and text of what it raises, and how long that took."""
    begun = time.monotonic()
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - begun, getattr(error, "reason", "")]
    return ["none", "", time.monotonic() - begun, ""]


def disagree(rank, world_size, service, job, about):
    """Ranks 1 and up differ from rank 0 in one thing."""
    other = rank > 0
    model = model_of(width=5 if other and about == "shape" else 3)
    options = dict(lr=0.01)
    parameters = list(model.named_parameters())
    if other:
        options |= {"max_norm": dict(max_norm=2.0), "lr": dict(lr=0.02),
                    "update": dict(update="speculate")}.get(about, {})
        if about == "name":
            parameters[1] = ("another", parameters[1][1])
        if about == "missing":
            parameters.pop()
        if about == "frozen":
            parameters[0][1].requires_grad_(False)
        if about == "weights":  # As a shard that is no DTensor has.
            with torch.no_grad():
                model[1].bias.add_(1)
        if about == "groups":
            parameters = [dict(params=parameters[:1]), dict(params=parameters[1:])]
    optimizer = ballast.torch.AdamW(parameters, service=service, job=job, timeout=LONGEST, **options)
    backward(model, 0, rank)
    return error_of(optimizer.attach if other and about == "call" else optimizer.step)


def disagree_later(rank, world_size, service, job, about, culprit):
    """After two steps that went well, one rank cannot make the third, and all attach again."""
    model = model_of()
    parallel = ddp(model)
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job, timeout=LONGEST)
    train(parallel, optimizer, rank, 2)
    backward(parallel, 2, rank)
    if rank == culprit:
        if about == "lr":
            optimizer.param_groups[0]["lr"] = 0.5
        if about == "gradient":
            model[0].weight.grad = model[0].weight.grad.to_sparse()
        if about == "weights":
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
    errors = [error_of(optimizer.step), error_of(optimizer.step)]
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.001
    optimizer.attach()
    train(parallel, optimizer, rank, 1)
    return [*errors, optimizer.param_groups[0]["job_step"]]


def comes_alone(rank, world_size, service, job):
    """Rank 1 makes no step: the other waits for as long as it said."""
    model = model_of()
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job, timeout=1.0)
    backward(model, 0, rank)
    return error_of(optimizer.step) if rank == 0 else None


def agrees_at_last(rank, world_size, service, job):
    """What was said in an earlier binding is not heard in the next, though rank 1 could: it asks first."""
    first = disagree(rank, world_size, service, job, "max_norm")
    model = model_of()
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job, timeout=LONGEST)
    if rank == 0:
        store = dist.PrefixStore(f"ballast/{job}/0", dist.distributed_c10d._get_default_store())
        earlier, deadline = store.get("hello/1"), time.monotonic() + 20
        dist.barrier()
        while store.get("hello/1") == earlier and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
    else:
        dist.barrier()
    optimizer.attach(create=True)
    train(ddp(model), optimizer, rank, 2)
    return [first[0], optimizer.param_groups[0]["job_step"]]


def begins_alike(rank, world_size, service, job):
    """What a job begins with is the same on all ranks; what they take from it need not be."""
    def attach(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 3)
        optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job)
        try:
            optimizer.attach(create=True)
            return model.weight.sum().item()
        finally:
            optimizer.close()

    return [error_of(lambda: attach(rank)), attach(7), attach(rank)]


def closes_the_job(rank, world_size, service, job, saves):
    """At the end, by all ranks. Where it cannot be saved they are told so, and go on. A save takes longer than ranks
    wait for each other."""
    model = model_of()
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job)
    train(ddp(model), optimizer, rank, 2)
    session, peers = optimizer._binding.member.session, optimizer._binding.member.peers
    save, meet = session.save, peers.meet

    def save_for_long(directory):
        save(directory)
        time.sleep(0.2)

    def meet_and_be_late(where):
        meet(where)
        peers._timeout = 0.0

    if saves:
        session.save, peers.meet = save_for_long, meet_and_be_late
    refused = error_of(lambda: optimizer.close(save=True))
    if saves:
        again = model_of()
        resumed = ballast.torch.AdamW(again.named_parameters(), service=service, job=job)
        step = resumed.attach(resume=True)
        same = all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), again.parameters()))
        resumed.close()
        return [refused[0], step, same]
    train(ddp(model), optimizer, rank, 1)
    step = optimizer.param_groups[0]["job_step"]
    optimizer.close()
    return [refused[0], step]


def service_goes_away(rank, world_size, service, job, pid):
    model = model_of()
    parallel = ddp(model)
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job)
    train(parallel, optimizer, rank, 2)
    optimizer._binding.member.session.timeout = 3.0
    dist.barrier()
    if rank == 0:
        kill_service(pid)
    backward(parallel, 2, rank)
    return error_of(optimizer.step)


def leaves_early(rank, world_size):
    """Rank 0 has the service, and closes while the others still need it, though not their forks."""
    model = model_of()
    optimizer = ballast.torch.AdamW(model.named_parameters(), job="early")
    train(ddp(model), optimizer, rank, 1)
    if rank > 0:
        child = os.fork()
        if child == 0:
            optimizer.close()
            os._exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    if rank == 0:
        service = optimizer._kept.service._service
        with mock.patch.object(binding, "_LEAVE_SECONDS", LONGEST):  # It leaves when the others have.
            optimizer.close()
        return service.ended is not None
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        optimizer._binding.member.session.read_weights()
    optimizer.close()
    return True


def trains_as_one_process(rank, world_size, service, job):
    from ballast.torch import places
    from torch_test import Model, batch, loss_of, names

    model = Model()
    model.inner.weight.data = model.inner.weight.data.t().contiguous().t()
    gathered = []

    def gather(everything, own, gather=dist.all_gather_into_tensor, **options):
        gathered.append(everything.nbytes)
        gather(everything, own, **options)

    with mock.patch.object(places, "_PIECE_BYTES", 1000), mock.patch.object(dist, "all_gather_into_tensor", gather):
        _train_in_parallel(rank, model, service, job)
    assert max(gathered) <= 1000 and len(gathered) > 5, gathered
    alone = Model()
    reference = torch.optim.AdamW(names(alone), lr=0.01)
    for step in range(5):
        reference.zero_grad()
        (sum(loss_of(alone, batch(step, other)) for other in range(world_size)) / world_size).backward()
        reference.step()
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(value.numpy().tobytes())
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-5, atol=2e-6)
    return digest.hexdigest()


def _train_in_parallel(rank, model, service, job):
    from torch_test import batch, names
    from torch.nn import functional

    parallel = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = ballast.torch.AdamW(names(model), lr=0.01, service=service, job=job)
    for step in range(5):
        optimizer.zero_grad()
        tokens = batch(step, rank)
        logits = parallel(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    optimizer.close()


def is_interrupted(rank, world_size, service, job):
    """Ctrl-C in a wait for other ranks."""
    model = model_of()
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job)
    optimizer._bound(new=True)
    if rank == 1:
        return "did no step"
    backward(model, 0, rank)
    optimizer._binding.member.session._while_waiting = lambda: os.kill(os.getpid(), signal.SIGINT)
    try:
        optimizer.step()
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "no interrupt"


def cannot_read(rank, world_size, service, job):
    """Rank 1 does not get the weights that the ranks then gather from each other: at first, and after an undo."""
    model = model_of()
    parallel = ddp(model)
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job, keep_previous=True)

    def read_weights():
        if rank == 1:
            time.sleep(0.5)  # The other goes on meanwhile.
            raise ballast.UnavailableError("the service does not give them")

    def without(work):
        with mock.patch.object(ballast.Session, "read_weights", side_effect=read_weights):
            return error_of(work)

    at_attach = without(lambda: optimizer.attach(create=True))
    optimizer.attach(create=True)
    train(parallel, optimizer, rank, 2)
    at_undo = without(optimizer.undo_step)
    optimizer.close()
    return [at_attach, at_undo]


def two_jobs(rank, world_size, service, job):
    """Two optimizers in turns, as of a generator and its judge, each with a job of its own."""
    models = [model_of(), model_of(4)]
    parallels = [ddp(model) for model in models]
    optimizers = [ballast.torch.AdamW(model.named_parameters(), service=service, job=f"{job}-{i}", lr=0.01)
                  for i, model in enumerate(models)]
    for step in range(4):
        for parallel, optimizer in list(zip(parallels, optimizers))[:1 + step % 2]:
            train(parallel, optimizer, rank, 1, begin=step)
    return [optimizer.param_groups[0]["job_step"] for optimizer in optimizers]


def subset_of_ranks(rank, world_size, service, job):
    """Two groups of ranks, each with its own job."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    model = model_of()
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=halves[mine])
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=f"{job}-{mine}",
                                    process_group=halves[mine])
    train(parallel, optimizer, rank, 3)
    return [p.double().sum().item() for p in model.parameters()]


def joins(rank, world_size, service, job, inputs, how="plain", **options):
    """Two epochs in which each rank has as many batches as `inputs` says, with a step of all after each, beside torch.
    how: "accumulates", "clips", "leaves out" a step for its norm, "scales", "undoes" a step. Returns the job's step, the
    largest difference from torch in what the model had, as a share of each tensor's largest, and its parameters' bits."""
    last = max(range(world_size), key=lambda other: (inputs[other], other))

    def step(model, parallel, optimizer, scaler, number):
        torch.manual_seed(100 * number + rank)
        optimizer.zero_grad()
        for micro_step in range(3 if how == "accumulates" else 1):
            with parallel.no_sync() if micro_step == 1 else contextlib.nullcontext():
                scaler.scale(parallel(torch.randn(5, 4)).square().mean()).backward()
        odd, is_ours = number % 2 == 1, isinstance(optimizer, ballast.torch.AdamW)
        if how in ("clips", "leaves out"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if odd and (how == "leaves out" or (how == "undoes" and not is_ours)):
            return
        scaler.step(optimizer)
        scaler.update()
        if odd and how == "undoes":
            optimizer.undo_step()

    def train(made):
        model, seen = torch.nn.Sequential(torch.nn.BatchNorm1d(4), *model_of()), []
        model[1].weight.data = model[1].weight.data.t().contiguous().t()
        parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001)
        optimizer = made(model, parallel)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=how == "scales")
        for epoch in range(2):
            with parallel.join(divide_by_initial_world_size=epoch == 0):
                for number in range(inputs[rank]):
                    optimizer.param_groups[0]["lr"] = 0.02 / (1 + number)  # As a schedule, which stops with the input.
                    step(model, parallel, optimizer, scaler, 20 * epoch + number)
            optimizer.param_groups[0]["lr"] = 0.02
            if not isinstance(optimizer, ballast.torch.AdamW):  # torch leaves the moments of joined ranks behind.
                states = [optimizer.state_dict()]
                dist.broadcast_object_list(states, last)
                optimizer.load_state_dict(states[0])
            seen.append({name: value.clone() for name, value in model.state_dict().items()})
            step(model, parallel, optimizer, scaler, 20 * epoch + 18)
            if isinstance(optimizer, ballast.torch.AdamW):
                optimizer.wait_for_weights()
            seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return seen, optimizer

    def ours(model, parallel):
        return ballast.torch.AdamW(model.named_parameters(), service=service, job=job, keep_previous=how == "undoes",
                                   module=parallel, **options)

    seen, optimizer = train(ours)
    assert optimizer.overlap == options.get("overlap", False)
    optimizer.close()
    expected, _ = train(lambda model, _: torch.optim.AdamW(model.parameters()))
    furthest = max(((one - theirs[name]).abs().max() / theirs[name].abs().max()).item()
                   for here, theirs in zip(seen, expected) for name, one in here.items())
    bits = hashlib.sha256(b"".join(value.numpy().tobytes() for here in seen for name, value in here.items()
                                   if name.endswith(("weight", "bias"))))  # A rank's statistics are its own at first.
    return [optimizer.param_groups[0]["job_step"], furthest, bits.hexdigest()]


def throws_early(rank, world_size, service, job, **options):
    """As soon as one rank has no input. Returns what each is told, and the steps then and after some more."""
    model = model_of()
    parallel = ddp(model)
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job, module=parallel, **options)

    def epoch():
        with parallel.join(throw_on_early_termination=True):
            train(parallel, optimizer, rank, 3 + rank)

    told = error_of(epoch)
    steps = optimizer.param_groups[0]["job_step"]
    train(parallel, optimizer, rank, 2)
    optimizer.wait_for_weights()
    optimizer.close()
    return [*told[:2], steps, optimizer.param_groups[0]["job_step"]]
