"""What the ranks of derived_test.py do."""

import torch
import torch._dynamo  # Which torch otherwise imports when the ranks are separate.
from ranks_for_tests import LONGEST
from torch.distributed.fsdp import fully_shard

import ballast
import ballast.torch
from torch_ranks import backward, ddp, end_of, model_of


def _optimizer(kind, named, service, job, **options):
    if kind is torch.optim.AdamW:
        return kind([parameter for _, parameter in named], lr=0.01)
    return kind(named, lr=0.01, service=service, job=job, timeout=LONGEST, **options)


def like_torch(rank, world_size, service, job, sharded, **options):
    """A group that is added, beside torch.optim. How far the weights are apart."""
    ends = []
    for kind in (ballast.torch.AdamW, torch.optim.AdamW):
        model = model_of()
        parallel = fully_shard(model) if sharded else ddp(model)
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        module = {"module": parallel} if options.get("overlap_weights") else {}
        optimizer = _optimizer(kind, named[:1], service, job, **module, **options)
        for step in range(6):
            optimizer.zero_grad()
            if step in (2, 4):
                added = named[1:3] if step == 2 else named[3:]
                optimizer.add_param_group({"params": added if kind is ballast.torch.AdamW else [p for _, p in added]})
            backward(parallel, step, rank)
            optimizer.step()
        ends.append(end_of(model, optimizer))
    return max((one - other).abs().max().item() for one, other in zip(*ends))


def _begun(rank, service, job):
    """A step of the first parameter."""
    model = model_of()
    parallel, named = ddp(model), list(model.named_parameters())
    optimizer = _optimizer(ballast.torch.AdamW, named[:1], service, job)
    backward(parallel, 0, rank)
    optimizer.step()
    return parallel, named, optimizer


def one_does_not(rank, world_size, service, job):
    """Rank 0 alone adds a group. What each is told."""
    parallel, named, optimizer = _begun(rank, service, job)
    if rank == 0:
        optimizer.add_param_group({"params": named[1:]})
    try:
        optimizer.step()  # Without a backward, in which the ranks would wait for each other.
    except ballast.BallastError as error:
        return str(error)
    return ""


def after_a_failure(rank, world_size, service, job):
    """First weights that cannot be; then others. The job's step at the end."""
    parallel, named, optimizer = _begun(rank, service, job)
    bad = torch.nn.Parameter(torch.full((3000,), float("nan")))
    optimizer.add_param_group({"params": [("bad", bad)]})
    try:
        optimizer.step()
    except ballast.BallastError:
        optimizer.param_groups.pop()
        optimizer.add_param_group({"params": named[1:]})
        optimizer.zero_grad()
        backward(parallel, 1, rank)
        optimizer.step()
    step = optimizer.param_groups[0]["job_step"]
    optimizer.close()
    return step
