"""Gradients that leave as DistributedDataParallel reduces them, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .streaming import GradientStream


def hook_ddp(module: torch.nn.parallel.DistributedDataParallel, stream: GradientStream,
             parameters: Sequence[torch.Tensor]) -> None:
    """Averages as DDP itself does, and gives each average to the stream. Hooks of parameters would see what one rank
    has. parameters: by their index in the job. A module takes one hook in its life; a stream that is closed is given
    nothing."""
    index_of = {id(parameter): index for index, parameter in enumerate(parameters) if parameter.requires_grad}
    given: set[int] = set()  # In the backward that is under way.

    def forget() -> None:
        for index in given:
            parameters[index].grad = None
        given.clear()

    def average(_, bucket):  # torch looks at annotations, which must not be strings.
        taken = [] if stream.closed else [
            (index_of[id(parameter)], gradient)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients()) if id(parameter) in index_of]
        if taken:
            stream.enter_backward(ended=forget)
            given.update(index for index, _ in taken)
        buffer = bucket.buffer().mul_(1 / module.process_group.size())  # In these bits, DDP's own.
        reduced = dist.all_reduce(buffer, group=module.process_group, async_op=True).get_future()

        def give(future: torch.futures.Future) -> torch.Tensor:
            for index, gradient in taken:
                stream.give(index, gradient)
            return future.value()[0]

        return reduced.then(give)

    module.register_comm_hook(None, average)
