"""What the ranks of interrupts_test.py do."""

import random
from unittest import mock

import torch
import torch._dynamo  # Which torch otherwise imports when the ranks are separate.
import torch.distributed as dist
from ranks_for_tests import LONGEST
from torch.distributed.fsdp import fully_shard

import ballast
import ballast.torch
from interrupts import AtLine
from ballast.torch.steps import Steps
from torch_ranks import backward, ddp, model_of

_STEPS = 6


def at_line(at, call):
    def called(*arguments):
        with AtLine(at):
            return call(*arguments)

    return called


def goes_on_after_interrupts(rank, world_size, service, job, sharded, overlap, seed):
    """Each rank is interrupted in a step(), if at all, at a line of its own. Then all attach. The weights at the end, and
    how many interrupts there were."""
    chosen = random.Random(f"{seed} {rank}")
    interrupts = 0

    def train(job, disturbs):
        nonlocal interrupts
        model = model_of()
        parallel = ddp(model) if not sharded else fully_shard(model)
        optimizer = ballast.torch.AdamW(model.named_parameters(), lr=0.01, service=service, job=job, timeout=LONGEST,
                                        overlap=overlap)
        disturbed = {1, 3, 4} if disturbs else set()
        while optimizer.param_groups[0]["job_step"] < _STEPS:
            optimizer.zero_grad()
            step = optimizer.param_groups[0]["job_step"]
            backward(parallel, step, rank)
            goes_on = torch.ones(1)
            try:
                at = chosen.randrange(1, 300) if step in disturbed else None
                disturbed.discard(step)
                with mock.patch.object(Steps, "_step", at_line(at, Steps._step)):
                    optimizer.step()
            except (KeyboardInterrupt, ballast.BallastError) as error:
                interrupts += isinstance(error, KeyboardInterrupt)
                goes_on.zero_()
            dist.all_reduce(goes_on, dist.ReduceOp.MIN)
            if not goes_on:
                optimizer.attach()
        optimizer.close()
        return [getattr(p, "full_tensor", lambda p=p: p)().detach().tolist() for p in model.parameters()]

    disturbed = train(f"{job}-disturbed", True)
    assert disturbed == train(f"{job}-alone", False), "other bits"
    return interrupts
