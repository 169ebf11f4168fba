"""Gradients that are sent as DistributedDataParallel reduces them, bucket by bucket."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from . import patches
from .streaming import GradientStream, _current_backward, at_end_of_backward

_hooked: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def whole_on_several_ranks(parameters: Sequence[torch.Tensor], process_group: dist.ProcessGroup | None) -> bool:
    """Whether several ranks train these, unsharded."""
    return (dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1 and
            not any(isinstance(parameter, DTensor) for parameter in parameters))


def ddp_of(parameters: Sequence[torch.Tensor], module: torch.nn.Module | None) -> DistributedDataParallel:
    """The module, if it is a DistributedDataParallel, or else the living one that has some of these parameters:
    trainers wrap a model after its optimizer is made. ValueError unless there is exactly one."""
    if isinstance(module, DistributedDataParallel):
        return module
    found = living_with(parameters)
    if len(found) != 1:
        raise ValueError(f"overlap with several processes needs one DistributedDataParallel, but {len(found)} have "
                         "these parameters: wrap the model in one, or shard it with fully_shard, before the first "
                         "step(), attach() or load_state_dict(); or set optimizer.module to the one that is trained")
    return found[0]


def living_with(parameters: Sequence[torch.Tensor]) -> list[DistributedDataParallel]:
    """Those that have some of these parameters."""
    ours = {id(parameter) for parameter in parameters}
    return [other for other in gc.get_objects() if issubclass(type(other), DistributedDataParallel) and
            any(id(parameter) in ours for parameter in other.parameters())]


def check_reduction(module: DistributedDataParallel) -> None:
    """ValueError if it cannot report when gradients are reduced."""
    if module.find_unused_parameters or module.static_graph:
        raise ValueError("overlap needs a DistributedDataParallel without find_unused_parameters and static_graph: "
                         "with these it reports unused parameters only after backward; give Hugging Face's "
                         "TrainingArguments ddp_find_unused_parameters=False")
    if getattr(module, "_comm_hooks", None) and module not in _hooked:
        raise ValueError("the DistributedDataParallel already has a communication hook and takes only one; wrap the "
                         "model again, or create the optimizer with overlap=False")


def hook_ddp(module: DistributedDataParallel) -> None:
    """Averages like DDP itself, and gives each average to the stream that takes the parameter's gradients, if there
    is one. Hooks of parameters would see only one rank's gradients. A module takes one hook in its life, which
    serves all its optimizers, one after the other or at the same time. It keeps none of them alive."""
    if module in _hooked:
        return
    module.register_comm_hook(None, _averaging(module))
    _hooked.add(module)


def _averaging(module: DistributedDataParallel):
    group, division = module.process_group, _Division(module)
    # The current backward's. Autograd may nest several: reentrant checkpoints.
    given: list[tuple[GradientStream, int, torch.nn.Parameter]] = []
    streams: weakref.WeakSet[GradientStream] = weakref.WeakSet()
    failed: list[BaseException] = []
    backward = id(given)

    def end() -> None:
        """DDP has written .grad."""
        if failed:
            given.clear()
            raise failed.pop(0)
        for stream, index, parameter in given:
            stream.has_left(index, parameter)
        given.clear()
        for stream in streams:
            stream.leave_backward(backward)

    def average(_, bucket):  # torch looks at annotations, which must not be strings.
        if not _in_backward():  # A joined rank (see uneven) gives zeros, and takes its gradients in step().
            return dist.all_reduce(division.divide(bucket), group=group, async_op=True).get_future().then(
                lambda future: future.value()[0])
        if bucket.index() == 0:  # Buckets come in order.
            given.clear()
            streams.clear()
            failed.clear()
        taken = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            stream, index = patches.taker_of(parameter) or (None, -1)
            if stream is not None and index not in stream.hooks:
                stream.enter_backward(backward)
                streams.add(stream)
                if stream.comes(index):
                    given.append((stream, index, parameter))
                    taken.append((stream, index, _laid_out(gradient, parameter)))
        if bucket.is_last():
            # In the innermost backward, at whose end DDP writes .grad.
            at_end_of_backward(end)
        reduced = dist.all_reduce(division.divide(bucket), group=group, async_op=True).get_future()

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


def _laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """In a bucket DDP lays out gradients like their parameters, if those are dense; the bucket always claims
    row-major."""
    elements = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape)):
        if size != 1 and stride != elements:
            return gradient
        elements *= size
    return gradient.as_strided(parameter.shape, parameter.stride())


def _in_backward() -> bool:
    return _current_backward() >= 0


class _Division:
    """Divides by the number of ranks, or in a join by those that have input, if configured, with DDP's bits. DDP
    multiplies the gradients that it copies into a bucket. It divides those that are already there, because `.grad`
    is a view of the bucket and existed before the backward."""

    def __init__(self, module: DistributedDataParallel):
        self._module = weakref.ref(module)
        self._ranks = module.process_group.size()
        memory = self._memory = {}  # By parameter, the address of the memory in which autograd has accumulated.

        def accumulated(parameter: torch.nn.Parameter) -> None:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                memory[id(parameter)] = parameter.grad.untyped_storage().data_ptr()

        for parameter in module.parameters() if module.gradient_as_bucket_view else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(accumulated)

    def divide(self, bucket: dist.GradBucket) -> torch.Tensor:
        if bucket.index() == 0:
            self._count()
        buffer = bucket.buffer()
        here = buffer.untyped_storage().data_ptr()
        inside = [self._memory.get(id(parameter)) == here for parameter in bucket.parameters()]
        if not any(inside):
            return buffer.mul_(1 / self._ranks)
        for gradient, is_inside in zip(bucket.gradients(), inside):
            gradient.div_(self._ranks) if is_inside else gradient.mul_(1 / self._ranks)
        return buffer

    def _count(self) -> None:
        module = self._module()
        if module._join_config.enable and not module._divide_by_initial_world_size:
            ranks = torch.full((1,), float(_in_backward()), device=module.device)
            dist.all_reduce(ranks, group=module.process_group)
            self._ranks = int(ranks.item())
