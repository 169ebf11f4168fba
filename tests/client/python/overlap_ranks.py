"""What the ranks of overlap_test.py do."""

import hashlib

import torch
import torch.distributed as dist
from fsdp_ranks import Model, batch, loss_of, mesh_of, shard, used_seldom
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.tensor import DTensor

import ballast
import ballast.torch


def digest(model):
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        sha.update(name.encode() + value.detach().float().numpy().tobytes())
    return sha.hexdigest()


def train(model, optimizer, rank, accumulation, syncs):
    """syncs: called with whether the gradients of the next backward are reduced. Returns how many steps' gradients
    had left before step()."""
    left = 0
    for step in range(5):
        optimizer.zero_grad()
        for micro_step in range(accumulation):
            syncs(micro_step + 1 == accumulation)
            loss_of(model, batch(10 * step + micro_step, rank), used_seldom(step)).backward()
        left += all(p.grad is None for p in model.parameters())
        optimizer.step()
    return left


def fsdp(rank, world_size, service, job, overlap, accumulation=1, no_sync=False, replicas=1, **options):
    model = shard(Model(), mesh_of(world_size, replicas))
    optimizer = ballast.torch.AdamW(model.named_parameters(), lr=0.02, weight_decay=0.1, service=service, job=job,
                                    overlap=overlap, **options)
    left = train(model, optimizer, rank, accumulation,
                 model.set_requires_gradient_sync if no_sync else lambda _: None)
    optimizer.close()
    return [digest(model), left]


def ddp(rank, world_size, service, job, overlap, accumulation=1, no_sync=False, beside=False, **options):
    """beside: with a parameter that is not the module's, whose gradient the trainer averages itself."""
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 300), torch.nn.Tanh(),
                                 torch.nn.Linear(300, 7))
    # Small buckets, so that there are several.
    model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.001, **options)
    scale = torch.nn.Parameter(torch.ones(()))
    named = [*module.named_parameters(), *([("scale", scale)] if beside else [])]
    optimizer = ballast.torch.AdamW(named, lr=0.02, service=service, job=job, overlap=overlap,
                                    module=model if overlap else None)

    def syncs(reduced):
        model.require_backward_grad_sync = reduced or not no_sync  # As no_sync() sets it.

    left = 0
    for step in range(5):
        optimizer.zero_grad()
        for micro_step in range(accumulation):
            syncs(micro_step + 1 == accumulation)
            tokens = batch(10 * step + micro_step, rank)
            torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1) * scale, tokens.flatten()).backward()
        if beside:
            dist.all_reduce(scale.grad.div_(world_size))
        left += all(p.grad is None for p in module.parameters())
        optimizer.step()
    optimizer.close()
    return [digest(module) + str(scale.item()) * beside, left]


def _clips(model, optimizer, loss_at):
    """Steps that are clipped, and one that is left out for its norm."""
    norms = []
    for step in (0, 1, 77, 2, 3):
        (loss_at(step) * (1000 if step == 77 else 1)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        if norms[-1] < 10:
            optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [torch.cat([value.detach().flatten() for value in values]).tolist(), norms]


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
    return _clips(model, optimizer, lambda step: torch.nn.functional.cross_entropy(
        model(batch(step, rank)).flatten(0, 1), batch(step, rank).flatten()))


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
    module = torch.nn.Linear(3, 2)
    wrap = torch.nn.parallel.DistributedDataParallel
    hooked = wrap(module)
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    said = []
    for number, given in enumerate((None, module, wrap(module, find_unused_parameters=True),
                                    wrap(module, static_graph=True), hooked)):
        try:
            ballast.torch.AdamW(module.named_parameters(), service=service, job=f"{job}{number}", overlap=True,
                                module=given)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    dist.barrier()
    return said
