"""Ctrl-C at a chosen place of ballast.torch, and what the ranks of interrupts_test.py do."""

import contextlib
import inspect
import os
import random
import sys
from unittest import mock

import torch
import torch._dynamo  # Which torch otherwise imports when the ranks are separate.
import torch.distributed as dist
from ranks_for_tests import LONGEST
from torch.distributed.fsdp import fully_shard

import ballast
import ballast.torch
from ballast.torch.steps import Steps
from torch_ranks import backward, ddp, model_of

_HERE = os.path.dirname(ballast.__file__)
# Where the step is made, and no trainer knows.
_STEP = inspect.unwrap(ballast.torch.AdamW.step).__code__
_RETURNS = max(line for _, _, line in _STEP.co_lines() if line)
# Of an object's end, and of an attribute that torch's C++ code asks for: these ignore what is raised, or say INTERNAL ASSERT.
_LOST = ("__del__", "_get", "_at_once")


class AtLine:
    """Raises a KeyboardInterrupt before a line of the client that this thread executes, of those the `at`th."""

    def __init__(self, at=None):
        self.at, self.count = at, 0

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(_HERE) or frame.f_code.co_name in _LOST:
            return None
        if event == "line" and (frame.f_code is not _STEP or frame.f_lineno != _RETURNS):
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self._trace


class AfterCall:
    """The same when a call of the library has returned to the session."""

    def __init__(self, at=None):
        self.at, self.count = at, 0

    def __enter__(self):
        self._patches = contextlib.ExitStack()
        for name in ("_call", "_patiently", "give_gradient"):
            self._patches.enter_context(mock.patch.object(ballast.Session, name, self._after(getattr(ballast.Session, name))))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def _after(self, call):
        def called(*arguments, **options):
            result = call(*arguments, **options)
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
            return result

        return called


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
