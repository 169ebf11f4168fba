"""What the ranks of fsdp_test.py do."""

import hashlib
import re

import torch
import torch._dynamo  # Which torch otherwise imports when the ranks are separate.
import torch.distributed as dist
from ranks_for_tests import LONGEST
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

import ballast
import ballast.torch

TOLERANCE = 1e-6
STEPS = 4


class Model(torch.nn.Module):
    """Dimensions of 1, 5 and 7, that most numbers of ranks do not divide; a tied weight, a frozen one, and a module
    that is used now and then."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(7, 5)
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(5, 7), torch.nn.Linear(7, 1), torch.nn.Linear(1, 5), torch.nn.Linear(5, 5)])
        self.layers[3].weight.requires_grad_(False)
        self.seldom = torch.nn.Linear(5, 5)
        self.never = torch.nn.Linear(3, 2)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens, seldom):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x) if layer.in_features == layer.out_features else torch.tanh(layer(x))
        if seldom:
            x = self.seldom(x)
        return self.head(x)


def batch(step, rank):
    return torch.randint(7, (6, 4), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, tokens, seldom):
    return functional.cross_entropy(model(tokens, seldom).float().flatten(0, 1), tokens.flatten())


def used_seldom(step):
    return step in (1, 3)


def mesh_of(world_size, replicas, mixed=False):
    """mixed: the last ranks are the first replica."""
    if mixed:
        ranks = torch.arange(world_size).view(replicas, -1).flip(0)
        return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    if replicas == 1:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))


def shard(model, mesh, **options):
    for module in (*model.layers, model.seldom, model.never, model):
        fully_shard(module, mesh=mesh, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # Gloo has no average: its reduce-scatter would sum, and say nothing.
            module.set_force_sum_reduction_for_comms(True)
    return model


def named(model):
    return list(model.named_parameters())


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def backward_of_all(model, step, world_size):
    """The gradients of one process that has the batches of all ranks."""
    sum(loss_of(model, batch(step, rank), used_seldom(step)) for rank in range(world_size)).div(world_size).backward()


def take_gradients(model, sharded, bound=1e-5):
    """Those of the sharded model, after a look whether they are the model's own, up to the order of sums."""
    for (name, p), (_, q) in zip(named(model), named(sharded)):
        if q.grad is None:
            assert p.grad is None, name
            continue
        gradient = whole(q.grad)
        assert (gradient - p.grad).abs().max() <= bound * max(p.grad.abs().max(), 0.1), (name, gradient, p.grad)
        p.grad = gradient.clone()


def assert_near(model, sharded, where):
    for (name, p), (_, q) in zip(named(model), named(sharded)):
        far = ((whole(q).double() - p.double()).abs().max() / p.double().abs().max()).item()
        assert far <= TOLERANCE, (where, name, far)


def trains_as_one_process(rank, world_size, service, job, replicas=1, mixed=False, max_norm=None, **options):
    """The sharded model with ours beside a whole one with torch's, which gets the same gradients."""
    sharded = shard(Model(), mesh_of(world_size, replicas, mixed), **options)
    whole_model = Model()
    ours = ballast.torch.AdamW(named(sharded), lr=0.02, weight_decay=0.1, service=service, job=job, max_norm=max_norm)
    theirs = torch.optim.AdamW(named(whole_model), lr=0.02, weight_decay=0.1)
    for step in range(STEPS):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        loss_of(sharded, batch(step, rank), used_seldom(step)).backward()
        backward_of_all(whole_model, step, world_size)
        take_gradients(whole_model, sharded)
        norm = torch.nn.utils.clip_grad_norm_(whole_model.parameters(), max_norm or torch.inf).item()
        ours.step()
        theirs.step()
        assert abs(ours.grad_norm - norm) <= 1e-5 * norm, (ours.grad_norm, norm)
        if max_norm is not None:
            assert ours.clip_coefficient < 1
        assert_near(whole_model, sharded, (rank, world_size, step))
    frozen = next(p for name, p in named(sharded) if name == "layers.3.weight")
    assert torch.equal(whole(frozen), Model().layers[3].weight)
    ours.close()
    return ours.param_groups[0]["job_step"]


def clips_with_torchs_function(rank, world_size, service, job):
    sharded, whole_model = shard(Model(), mesh_of(world_size, 1)), Model()
    ours = ballast.torch.AdamW(named(sharded), lr=0.02, service=service, job=job)
    theirs = torch.optim.AdamW(named(whole_model), lr=0.02)
    for step in range(STEPS):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        loss_of(sharded, batch(step, rank), used_seldom(step)).backward()
        backward_of_all(whole_model, step, world_size)
        take_gradients(whole_model, sharded)
        norms = [whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)) for model in (sharded, whole_model)]
        assert norms[0] > 0.1 and abs(norms[0] - norms[1]) <= 1e-5 * norms[1], norms
        take_gradients(whole_model, sharded)
        ours.step()
        theirs.step()
        assert abs(ours.grad_norm - 0.1) < 1e-4, ours.grad_norm  # Of what was clipped.
        assert_near(whole_model, sharded, (rank, world_size, step))
    ours.close()
    return True


def bf16_has_fp32_masters(rank, world_size, service, job):
    """All in bf16 but one layer, against masters in fp32 as a careful trainer keeps them by hand."""
    sharded, whole_model = Model(torch.bfloat16), Model(torch.bfloat16)
    for model in (sharded, whole_model):
        model.layers[1].float()
        model.layers[1].register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
        model.layers[1].register_forward_hook(lambda _, inputs, output: output.bfloat16())
    shard(sharded, mesh_of(world_size, 1))
    ours = ballast.torch.AdamW(named(sharded), lr=1e-3, service=service, job=job)
    masters = [p.detach().float().requires_grad_() for _, p in named(whole_model)]
    theirs = torch.optim.AdamW(masters, lr=1e-3)
    for step in range(8):
        for optimizer in (ours, whole_model):
            optimizer.zero_grad()
        loss_of(sharded, batch(step, rank), used_seldom(step)).backward()
        backward_of_all(whole_model, step, world_size)
        take_gradients(whole_model, sharded, bound=0.05)
        for master, (_, p) in zip(masters, named(whole_model)):
            master.grad = None if p.grad is None else p.grad.float()
        ours.step()
        theirs.step()
        with torch.no_grad():
            for (name, p), (_, q), master in zip(named(sharded), named(whole_model), masters):
                # What lies between two values of bf16 may go to the other one.
                got = whole(p)
                step_size = torch.finfo(got.dtype).eps if got.dtype == torch.bfloat16 else TOLERANCE
                far = (got.float() - master).abs().max()
                assert far <= step_size * master.abs().max(), (name, far)
                q.copy_(got)
    ours.close()
    return True


class Columns(torch.nn.Module):
    """Two layers that are cut by columns, and a scale that is whole on every rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.layers(x).mean() * self.scale.sum()


def columns_and_whole_parameters(rank, world_size, service, job):
    """Shard(1), accumulated over two backwards of which the first is not reduced, and a plain parameter that FSDP is
    told to leave alone."""
    sharded, whole_model = Columns(), Columns()
    fully_shard(sharded, mesh=mesh_of(world_size, 1), ignored_params={sharded.scale},
                shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0))
    sharded.set_force_sum_reduction_for_comms(True)
    assert sharded.layers[0].weight.placements == (Shard(1),)
    ours = ballast.torch.Adam(named(sharded), lr=0.02, service=service, job=job)
    theirs = torch.optim.Adam(named(whole_model), lr=0.02)
    inputs = torch.arange(32.0).view(2, 4, 4).sin()
    for step in range(STEPS):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        for part in range(2):  # All ranks have the same, so that the whole parameter's gradient is the same, too.
            sharded.set_requires_gradient_sync(part == 1)
            for model in (sharded, whole_model):
                model(inputs[part] + step).backward()
        take_gradients(whole_model, sharded)
        ours.step()
        theirs.step()
        assert_near(whole_model, sharded, (rank, world_size, step))
    for name, p in named(sharded):  # The service has them in the order of the whole parameter.
        assert torch.equal(torch.from_numpy(ballast.connect(service).state(job, name)), whole(p)), name
    ours.close()
    return True


def offloads_and_casts(rank, world_size, service, job):
    """FSDP2's own policies: parameters in host memory, and bf16 for forward and backward."""
    sharded = shard(Model(), mesh_of(world_size, 1), offload_policy=CPUOffloadPolicy(pin_memory=False),
                    mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    whole_model = Model()
    ours = ballast.torch.AdamW(named(sharded), lr=0.02, service=service, job=job)
    theirs = torch.optim.AdamW(named(whole_model), lr=0.02)
    for step in range(STEPS):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        loss_of(sharded, batch(step, rank), used_seldom(step)).backward()
        for (_, p), (_, q) in zip(named(whole_model), named(sharded)):
            p.grad = None if q.grad is None else whole(q.grad).clone()
        ours.step()
        theirs.step()
        assert_near(whole_model, sharded, (rank, world_size, step))
    ours.close()
    return True


def scaled_gradients(rank, world_size, service, job):
    """GradScaler: an infinity in one rank's shard is skipped by all, and all scale the same afterwards."""
    sharded = shard(Model(), mesh_of(world_size, 1))
    ours = ballast.torch.AdamW(named(sharded), lr=0.02, service=service, job=job)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    skipped = []
    for step in range(4):
        ours.zero_grad()
        scaler.scale(loss_of(sharded, batch(step, rank), used_seldom(step))).backward()
        if step == 2 and rank == world_size - 1:
            sharded.embedding.weight.grad._local_tensor[0, 0] = torch.inf
        before = whole(sharded.layers[0].weight).clone()
        scaler.step(ours)
        scaler.update()
        skipped.append(ours.skipped is not None)
        assert torch.equal(before, whole(sharded.layers[0].weight)) == skipped[-1]
    ours.close()
    return [skipped, scaler.get_scale()]


def refusals(rank, world_size, service, job):
    """What cannot be, each with what is said about it."""
    said = []

    def refused(kind, make):
        try:
            make().step()
        except kind as error:
            said.append(re.sub(r"^rank \d+: ", "", str(error)))  # Another rank may have been faster.
        else:
            said.append("nothing")

    def optimizer(parameters, **options):
        return ballast.torch.AdamW(parameters, service=service, job=f"{job}-{len(said)}", timeout=LONGEST, **options)

    def parameter(mesh, placements, shape=(8, 4)):
        p = torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh, placements))
        p.grad = distribute_tensor(torch.ones(shape), mesh, placements)
        return p

    mesh, half = mesh_of(world_size, 1), mesh_of(world_size, 2)
    p = parameter(mesh, [Shard(0)])
    refused(ValueError, lambda: optimizer([("a", p), ("b", parameter(half, [Shard(0), Shard(1)]))]))
    odd = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Partial()]))
    refused(NotImplementedError, lambda: optimizer([("odd", odd)]))
    p.grad = distribute_tensor(torch.ones(8, 4), mesh, [Replicate()])
    refused(RuntimeError, lambda: optimizer([("a", p)]))
    pair = dist.new_group([0, 1])
    refused(ValueError, lambda: optimizer([("a", p)], process_group=pair) if rank < 2 else optimizer(
        [("a", p)], process_group=dist.new_group([2, 3], use_local_synchronization=True)))
    for original in (True, False):
        flat = FullyShardedDataParallel(torch.nn.Linear(8, 4), use_orig_params=original, device_id=torch.device("cpu"))
        refused(ValueError, lambda: optimizer(flat.named_parameters()))
    q = parameter(half, [Shard(1), Shard(0)])  # Fine, and unlike what fully_shard makes.
    good = optimizer([("a", q)], lr=0.5)
    good.step()
    assert whole(q).shape == (8, 4) and abs(whole(q).detach() - (1 - 0.5 * 0.01 - 0.5)).max() < 1e-6
    good.close()
    return said


def give_gradients(model, step):
    """Gradients of the step that have the same bits everywhere."""
    generator = torch.Generator().manual_seed(step)
    for name, p in named(model):
        gradient = torch.randn(p.shape, generator=generator)
        if not p.requires_grad or name.startswith("never"):
            continue
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient


def digest_with_given_gradients(rank, world_size, service, job, replicas=1, kind="sharded", rules=()):
    """Of all weights and norms after some steps with gradients that have the same bits everywhere. rules: what the param
    groups have beside parameters; by default there is one group."""
    model = Model()
    if kind == "sharded":
        shard(model, mesh_of(world_size, replicas))
    groups = [{"params": named(model)[number::len(rules)], **rule} for number, rule in enumerate(rules)]
    optimizer = ballast.torch.AdamW(groups or named(model), lr=0.02, service=service, job=job, max_norm=0.5)
    digest = hashlib.sha256()
    for step in range(STEPS):
        give_gradients(model, step)
        optimizer.step()
        digest.update(f"{optimizer.grad_norm!r} {optimizer.clip_coefficient!r}".encode())
        for _, p in named(model):
            digest.update(whole(p).detach().numpy().tobytes())
    optimizer.close()
    return digest.hexdigest()
