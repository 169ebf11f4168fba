"""Gradients that leave as DistributedDataParallel reduces them, bucket by bucket."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from . import patches
from .streaming import GradientStream, at_end_of_backward

_hooked: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def whole_on_several_ranks(parameters: Sequence[torch.Tensor], process_group: dist.ProcessGroup | None) -> bool:
    """Whether several ranks train these, and none is sharded."""
    return (dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1 and
            not any(isinstance(parameter, DTensor) for parameter in parameters))


def ddp_of(parameters: Sequence[torch.Tensor], module: torch.nn.Module | None) -> DistributedDataParallel:
    """The module, if it is a DistributedDataParallel, or else the living one that has some of these parameters: trainers
    wrap a model after its optimizer is made. ValueError if that is not just one."""
    if isinstance(module, DistributedDataParallel):
        return module
    ours = {id(parameter) for parameter in parameters}
    found = [other for other in gc.get_objects() if issubclass(type(other), DistributedDataParallel) and
             any(id(parameter) in ours for parameter in other.parameters())]
    if len(found) != 1:
        raise ValueError(f"overlap with several processes goes with a DistributedDataParallel, and {len(found)} have "
                         "these parameters: wrap the model in one, or shard it with fully_shard, before the first "
                         "step(), attach() or load_state_dict(); or set optimizer.module to the one that is trained")
    return found[0]


def check_reduction(module: DistributedDataParallel) -> None:
    """ValueError if it does not tell when gradients are reduced."""
    if module.find_unused_parameters or module.static_graph:
        raise ValueError("overlap needs a DistributedDataParallel without find_unused_parameters and static_graph: "
                         "with these it says only after backward which parameters were unused. Hugging Face's "
                         "TrainingArguments take ddp_find_unused_parameters=False")
    if getattr(module, "_comm_hooks", None) and module not in _hooked:
        raise ValueError("the DistributedDataParallel has a communication hook, and takes no second one; wrap the "
                         "model again, or create the optimizer with overlap=False")


def hook_ddp(module: DistributedDataParallel) -> None:
    """Averages as DDP itself does, and gives each average to the stream that takes the parameter's gradients then, if
    one does. Hooks of parameters would see what one rank has. A module takes one hook in its life, which serves all
    optimizers that it has one after the other, or beside each other; it keeps none of them."""
    if module in _hooked:
        return
    module.register_comm_hook(None, _averaging(module.process_group))
    _hooked.add(module)


def _averaging(group: dist.ProcessGroup):
    # Of the backward that is under way, which may be several for autograd, one inside the other: reentrant checkpoints.
    given: list[torch.Tensor] = []
    streams: weakref.WeakSet[GradientStream] = weakref.WeakSet()
    failed: list[BaseException] = []
    backward = id(given)

    def end() -> None:
        """DDP has put into .grad what has left."""
        for parameter in given:
            parameter.grad = None
        given.clear()
        if failed:
            raise failed.pop(0)
        for stream in streams:
            stream.end_micro_step()
            stream.leave_backward(backward)

    def average(_, bucket):  # torch looks at annotations, which must not be strings.
        if bucket.index() == 0:  # Buckets come in order.
            given.clear()
            streams.clear()
            failed.clear()
        taken = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            stream, index = patches.taker_of(parameter) or (None, -1)
            if stream is not None and index not in stream.hooked:
                stream.enter_backward(backward)
                streams.add(stream)
                given.append(parameter)
                taken.append((stream, index, gradient))
        if bucket.is_last():
            # In the backward, of those that it may be, at whose end DDP writes .grad.
            at_end_of_backward(end)
        buffer = bucket.buffer().mul_(1 / group.size())  # In these bits, DDP's own.
        reduced = dist.all_reduce(buffer, group=group, async_op=True).get_future()

        def give(future: torch.futures.Future) -> torch.Tensor:
            while taken:  # DDP may keep this longer than an optimizer lives.
                stream, index, gradient = taken.pop()
                try:
                    stream.give(index, gradient)
                except BaseException as error:  # Torch would make a RuntimeError of it.
                    failed.append(error)
                    taken.clear()
            return future.value()[0]

        return reduced.then(give)

    return average
