"""What flows between parameters and the service: gradients out, weights in, and the trainer's writes of state."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from ..errors import BallastError, FailedPreconditionError
from . import patches, streaming
from .ddp import hook_ddp
from .member import Ended, Member
from .moments import part_of, writing
from .places import Flats, here_of, local
from .reports import Clock
from .returning import ReturningWeights
from .streaming import GradientStream
from .watch import Watch

if TYPE_CHECKING:
    from .steps import Steps


class Flows:
    """Owns the stream of gradients during backward, if any, the weights on their way, and the watch over weights in
    place."""

    def __init__(self, member: Member):
        self.member = member
        self.stream: GradientStream | None = None
        self.returning: ReturningWeights | None = None
        self.leaves_early = False  # Whether gradients are sent during backward.
        self.in_step = False  # A step is decided, and has not ended on the session.
        self.watch: Watch | None = None

    def open(self) -> None:
        """The session has written the job's weights."""
        self.take_weights()
        self.clock = Clock()  # Earlier time belongs to no step.
        trained = self.member.described.trained
        if self.member.options.overlap_weights and not self.member.places.together:
            self.returning = ReturningWeights(trained, {index: self.member.names[index] for index in trained})

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
        if self.returning is not None:
            self.returning.close()

    @property
    def begun(self) -> bool:
        """Whether the stream has begun the next step."""
        return self.stream is not None and self.stream.begun

    @property
    def has_freed(self) -> bool:
        """Whether sent and freed gradients belong to no step yet."""
        return self.stream is not None and self.stream.frees and bool(self.stream.left)

    # ------------------------------------------------------------ gradients

    def start_stream(self, steps: weakref.ref[Steps]) -> None:
        member, options = self.member, self.member.options
        is_flat = isinstance(member.places, Flats)
        trainable = {index: parameter for index, parameter in enumerate(member.parameters) if parameter.requires_grad}
        on_gpu = any(streaming.is_on_gpu(local(parameter)) for parameter in trainable.values())
        # If a trainer computes on every processor, copies and the service displace its threads, and it waits for them:
        # backward gets longer by more than step() gets shorter.
        self.leaves_early = (on_gpu or member.peers is not None or options.accumulation_steps is not None or
                             not member.session.shares_memory or
                             torch.get_num_threads() < len(os.sched_getaffinity(0)))
        # The trainer reduces whole parameters beside sharded ones itself, after backward.
        hooked = [None if index not in trainable or not self.leaves_early or is_flat or
                  (member.mesh is not None and not isinstance(parameter, DTensor)) else parameter
                  for index, parameter in enumerate(member.parameters)]
        frees = options.accumulation_steps is not None and not is_flat
        stream = GradientStream(member.session, hooked, options.accumulation_steps or 1, frees, steps, on_gpu)
        if is_flat:
            hook_ddp(member.module)
        patches.register(stream, trainable)
        self.stream = stream

    def gradients(self) -> dict[int, torch.Tensor]:
        """This rank's unsent gradients in .grad, by index in the job. RuntimeError if one cannot be sent."""
        found, left = {}, () if self.stream is None else self.stream.left
        for index, parameter in enumerate(self.member.parameters):
            if parameter.grad is None or index in left or self.member.session.job.parameters[index].frozen:
                continue
            self._check_gradient(index, parameter.grad)
            found[index] = parameter.grad.detach()
        return found

    def give(self, gradients: dict[int, torch.Tensor]) -> None:
        """Gives the step's unsent gradients. Without a stream, gradients outside host memory are copied one at a
        time."""
        for index, gradient in gradients.items():
            if self.stream is not None:
                self.stream.give(index, gradient)
                continue
            part = self.own_part(index, gradient)
            begin, end = self.member.places.own_range(index)
            if begin == end:
                continue  # The owners of its elements report that it was used.
            own = part.reshape(-1)[begin:end].to("cpu").contiguous()
            # The address of the first of all elements. Only own elements are read.
            self.member.session.give_gradient(index, own.data_ptr() - begin * own.element_size(), final=True)
        self.member.session.end_gradients(final=True)

    def own_part(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        self._check_gradient(index, gradient)
        here = here_of(gradient)
        return here.detach() if here.requires_grad else here  # With create_graph it does.

    def _check_gradient(self, index: int, gradient: torch.Tensor) -> None:
        parameter, name = self.member.parameters[index], self.member.names[index]
        if gradient.is_sparse:
            raise RuntimeError(f"the gradient of parameter {name} is sparse, which is not supported")
        if gradient.dtype != parameter.dtype:
            raise RuntimeError(f"the gradient of parameter {name} is {gradient.dtype}, the parameter {parameter.dtype}")
        if isinstance(parameter, DTensor) and getattr(gradient, "placements", None) != parameter.placements:
            raise RuntimeError(f"the gradient of parameter {name} is placed as "
                               f"{getattr(gradient, 'placements', None)}, the parameter as {parameter.placements}; "
                               "redistribute it")

    # ------------------------------------------------------------ weights

    def take_weights(self) -> None:
        self.member.places.deliver()
        if self.watch is None:
            self.watch = Watch(self.member.parameters,
                               exact=self.member.options.on_write == "send" and self.member.peers is None)
        else:
            self.watch.remember()

    def begin_coming(self, take: Callable[[list[int], bool], None]) -> None:
        """take: see ReturningWeights.begin."""
        self.member.places.notify()
        self._elsewhere = self.member.places.elsewhere()
        self.returning.begin(take, self._views_of)

    def take_coming(self, indices: list[int], at_end: bool) -> None:
        """See ReturningWeights.begin."""
        if at_end:
            self.end_step()
        with self._waiting():
            if self.in_step:
                self.member.session.await_weights(indices)
            with self.member.part():
                for index in indices:
                    if index in self._elsewhere:
                        self._elsewhere.pop(index).copy_(self.member.places.places[index])
                self.returning.arrived(indices)
                self.watch.remember(indices)

    def end_step(self) -> None:
        """Returns when the service has ended the step. Its weights may still be on their way to the parameters."""
        if self.in_step:
            with self._waiting(), self.member.part():
                self.member.session.receive_weights()
                self.in_step = False

    def _views_of(self, index: int) -> list[torch.Tensor]:
        """This object's tensors of the parameter's memory."""
        elsewhere = [self._elsewhere[index]] if index in self._elsewhere else []
        return [self.member.places.places[index], *elsewhere, *self.watch.views_of(index)]

    @contextlib.contextmanager
    def _waiting(self):
        """Around a wait for weights; after Ctrl-C the wait may be repeated."""
        self.member.check()
        self.clock.lap("compute")
        with self.member.notifying():
            try:
                yield
                self.clock.lap("wait")
            except (BallastError, RuntimeError) as error:
                self.member.ended = self.member.ended or (Ended() if isinstance(error, BallastError) else
                                                          Ended(str(error), "ENDED"))
                raise

    # ------------------------------------------------------------ the trainer's writes

    def check_untouched(self, all_of_it: bool) -> None:
        """The service has the weights: later writes of other code would be lost. all_of_it: including writes that
        autograd does not count, where they can be seen."""
        member = self.member
        if member.options.on_write == "send":
            return self.send_weights(None if member.peers is not None else
                                     sorted({*self.watch.changed(), *self.watch.written()}))
        changed = self.watch.changed()
        same = {i: member.places.same(i) for i in changed}
        # Written in place: the service has the earlier contents.
        unknown = {i: local(member.parameters[i]).clone() for i in changed if same[i] is None}
        if unknown:
            member.session.read_weights()
            for i, written in unknown.items():
                same[i] = torch.equal(local(member.parameters[i]), written)
                local(member.parameters[i]).data.copy_(written)  # Autograd may have saved it.
        written = next((i for i in changed if not same[i]), self.watch.first_written() if all_of_it else None)
        if written is not None:
            raise RuntimeError(
                f"parameter {member.names[written]} was changed since the last step, but the service keeps the "
                "weights and has not seen it: call the optimizer's send_weights() after the change, or attach() to "
                "restore the service's weights")
        if changed:
            self.watch.remember()

    def write_state(self, indices: list[int], planes: dict[str, list[torch.Tensor | float]],
                    update_counts: list[int] | None) -> None:
        """All ranks, between steps: writes these planes of these parameters, each placed as the parameter, or what all
        its elements are; and their numbers of updates."""
        member, place_of = self.member, {index: place for place, index in enumerate(indices)}

        def part(index: int, plane: str) -> torch.Tensor | float:
            value = planes[plane][place_of[index]]
            return value if isinstance(value, float) else part_of(value, member.parameters[index]).detach()

        with member.notifying(), member.session.part(), member.waiting_in(member.step_count + 1):
            member.session.write_state(indices, list(planes), writing(part), update_counts=update_counts)
        member.saved_step = None  # The state of that step has changed.

    def send_weights(self, indices: list[int] | None) -> None:
        """All ranks, between steps: sends the weights of these parameters, by default of all trained ones, to the
        service."""
        of_job = self.member.session.job.parameters
        chosen = [index for index in (range(len(of_job)) if indices is None else indices) if not of_job[index].frozen]
        if not chosen:
            return
        if self.begun:
            raise FailedPreconditionError("the step has begun, in a backward: call zero_grad(), or step(), before "
                                          "send_weights()")
        self.write_state(chosen, {"master": [self.member.parameters[index] for index in chosen]}, None)
        for index in chosen:
            self.member.places.keep(index)
        self.watch.remember(chosen)
