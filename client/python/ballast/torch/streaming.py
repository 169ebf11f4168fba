"""Gradients that are sent during the backward pass.

`.grad` at step() counts, as for any optimizer: torch sums several backward passes there. So a gradient is sent once
in a step, when it has come as often as in the step before; in the first step that is once. If `.grad` changes after
that, by a further backward or by the trainer, all sent gradients are taken back, and sent in step().

With accumulation_steps a gradient is sent when it has come so often, and `.grad` is freed at once.
DistributedDataParallel keeps its buckets, so there `.grad` stays.

On a GPU a separate stream copies the gradient to pinned host memory. The stream itself notifies the library of the
copy's end, without a Python thread."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from .. import _native
from ..errors import FailedPreconditionError
from ..session import Session
from .clipping import Sealed
from .places import here_of
from .watch import Samples, sampled

if TYPE_CHECKING:
    from .steps import Steps

_engine = torch.autograd.Variable._execution_engine
_current_backward = torch._C._current_graph_task_id
Seen = "tuple[torch.Tensor | None, int]"  # See seen.
_forks = 0  # Forks from the importing process to this one: asking the system takes longer than a gradient.


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class GradientStream:
    """One session's. hooked: by index in the job, the parameters whose gradients are taken where autograd leaves
    them; None for the others. times: how often each comes in a step, at first. frees: times is a promise for all
    steps, and `.grad` is freed when it is sent. steps: begins the step on the service, and seals it with the unsent
    gradients. on_gpu: whether gradients are on a GPU."""

    def __init__(self, session: Session, hooked: Sequence[torch.nn.Parameter | None], times: int, frees: bool,
                 steps: weakref.ref[Steps], on_gpu: bool):
        self.begun = False
        self.discards = 0  # In this step; equal on all ranks.
        self.sealed: Sealed | None = None
        self.closed = False
        self.left: dict[int, Seen] = {}  # Sent in this step: `.grad` at that time, see seen.
        self.came = [0] * len(hooked)  # How often, in this step; equal on all ranks.
        self._leaves_at = [times] * len(hooked)
        self.frees = frees
        self._freed: set[int] = set()  # Since zero_grad().
        self._leaving: set[int] = set()  # Sent in the current backward.
        self._samples: list[Samples] = []  # Of gradients sent before.
        self._steps = steps
        self._stays = False  # Nothing is sent before the next step.
        self._forks = _forks
        self._cuda = torch.cuda.is_available()  # Asked once: it takes longer than a small gradient.
        self._lock = threading.RLock()  # A backward has a thread for each device.
        self._backwards: dict[int, int] = {}  # Unfinished backwards in which a gradient has come, and their thread.
        self._copies = _Copies() if on_gpu else None
        self.move_to(session)
        # Parameters may outlive an optimizer that was not closed: it must not keep taking their gradients.
        self.hooks = {index: parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))
                      for index, parameter in enumerate(hooked) if parameter is not None}

    def close(self) -> None:
        self.closed = True
        for index in list(self.hooks):
            self.unhook(index)
        if self._copies is not None:
            self._copies.close()
        self._forget()

    def unhook(self, index: int) -> None:
        """The parameter gives its gradients to another optimizer."""
        if index in self.hooks:
            self.hooks.pop(index).remove()

    def leave_session(self) -> None:
        """Call it before the session is closed, between steps. Nothing is given until `move_to`."""
        if self._copies is not None:
            self._copies.close()
        self._forget()
        self.discards = 0

    def move_to(self, session: Session) -> None:
        self._session = session
        if self._copies is not None:
            self._copies.open(session)

    def group_of(self, index: int) -> int:
        return self._session.job.parameters[index].group

    def seal(self) -> Sealed:
        """Once in a step, on all ranks. Sent gradients cannot change after that."""
        return self.sealed or self._steps().seal()

    def enter_backward(self, backward: int) -> None:
        """When the first gradient of a backward comes. The step cannot be sealed until `leave_backward`."""
        with self._lock:
            if backward in self._backwards:
                return
            if self._cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("gradients cannot be sent while a CUDA graph is captured: create the optimizer "
                                   "with overlap=False")
            if self.sealed is not None:
                raise FailedPreconditionError("backward ran after clip_grad_norm_, with which all ranks ended the step; "
                                              "call step() or zero_grad() first")
            self._backwards[backward] = threading.get_ident()
            self._stays = not self.begun and self._steps().is_changed()

    def leave_backward(self, backward: int) -> None:
        with self._lock:
            self._backwards.pop(backward, None)
            here = {index: self.left[index][0] for index in self._leaving}
            for index, gradient in here.items():
                if isinstance(gradient, DTensor):  # FSDP2's parameters share a version, and others have been written
                                                   # since.
                    self.left[index] = seen(gradient)
            self._samples += sampled(here)
            self._leaving.clear()

    def comes(self, index: int) -> bool:
        """A gradient has come. Returns whether to send it now."""
        with self._lock:
            self.came[index] += 1
            return self.came[index] == self._leaves_at[index] and not self._stays

    def give(self, index: int, gradient: torch.Tensor) -> None:
        """Gives this process's part of a parameter's gradient to the service, once in a step."""
        with self._lock:
            gradient = self._prepare(index, gradient)
            with self._session.part():
                self._give(index, gradient)

    def _prepare(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """The part to give, in the step that has begun then."""
        steps = self._steps()
        gradient = steps.flows.own_part(index, gradient)
        if gradient.device.type != "cpu" and not self._is_copied(gradient):
            raise RuntimeError(f"the gradient of parameter {self._session.job.parameters[index].name} is on "
                               f"{gradient.device}, from which none can be sent during backward: move the model before "
                               "the first step(), or create the optimizer with overlap=False")
        if not self.begun:
            steps.begin_early()
        return gradient

    def _is_copied(self, gradient: torch.Tensor) -> bool:
        return self._copies is not None and is_on_gpu(gradient)

    def _give(self, index: int, gradient: torch.Tensor) -> None:
        if self._is_copied(gradient):
            self._copies.start(index, gradient)
            return
        if self._cuda and gradient.is_pinned():
            # From FSDP2's CPUOffloadPolicy, whose hooks run when the copy has started.
            torch.cuda.current_stream().synchronize()
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
        # A tensor of no elements has no address, and None would mean no gradient.
        self._session.give_gradient(index, gradient.data_ptr() or 1, final=True)

    def has_left(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Whether the current `.grad` has been sent."""
        with self._lock:
            if self.frees:
                self._freed.add(index)
                parameter.grad = None
            else:
                self._leaving.add(index)
            self.left[index] = seen(parameter.grad)

    def first_changed(self, parameters: Sequence[torch.nn.Parameter]) -> int | None:
        """The first parameter whose `.grad` differs from the sent gradient. Autograd does not count writes to its
        `.data`, so some elements are compared."""
        for index, left in self.left.items():
            now = seen(parameters[index].grad)
            if now[0] is not left[0] or now[1] != left[1]:
                return index
        return next((index for samples in self._samples for index in samples.changed()), None)

    def was_broken_off(self) -> bool:
        """Whether a backward of this thread was interrupted and will never end."""
        return threading.get_ident() in self._backwards.values()

    def check_ended(self, by_itself: bool) -> None:
        """Before the step is sealed. by_itself: no other rank waits for the gradients of an interrupted backward. If
        they are in .grad, they can be sent again."""
        leave_again = by_itself and not self.frees
        if any(not leave_again or thread != threading.get_ident() for thread in self._backwards.values()):
            raise FailedPreconditionError("a backward pass did not end, and part of its gradients has been sent; call "
                                          "zero_grad() and repeat the step's backward passes")

    def finish(self) -> None:
        """The step is decided."""
        if not self.frees:
            self._leaves_at = [came or before for came, before in zip(self.came, self._leaves_at)]
        self._forget()
        self.discards = 0

    def _forget(self) -> None:
        self._forget_gradients()
        self.came = [0] * len(self.came)
        self._backwards.clear()

    def discard(self) -> None:
        """With zero_grad(): takes back the gradients given since the last step."""
        if self.take_back():
            self._forget()
        self._steps().recovery.forget_given()

    def take_back(self) -> bool:
        """The same for a step that continues with `.grad`. False: this is a fork, which has given nothing, or the
        session has failed."""
        if self._forks != _forks or self._steps().recovery.has_failed():
            return False
        if self._copies is not None:
            self._copies.wait()
        with self._session.part():
            if self.begun:
                self._discard()
            self._forget_gradients()
        return True

    def catch_up(self, discards: int, came: list[int]) -> None:
        """Counts another rank's gradients and discards as this rank's."""
        self.came = came
        while self.discards < discards and not self._steps().recovery.has_failed():
            with self._session.part():
                self._discard()
                self._forget_gradients()

    def _discard(self) -> None:
        self._session.discard()
        self.discards += 1

    def _forget_gradients(self) -> None:
        self.begun, self.sealed = False, None
        for each in (self.left, self._leaving, self._samples):
            each.clear()

    def zero(self, index: int, parameter: torch.nn.Parameter, set_to_none: bool) -> None:
        """zero_grad() for a freed `.grad`."""
        if index in self._freed:
            self._freed.discard(index)
            if not set_to_none and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    # ------------------------------------------------------------ inside a backward

    def take(self, index: int, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None or self._forks != _forks or self._session.torn:  # Then step() gives it.
            return
        backward = _current_backward()
        with self._lock:
            if backward not in self._backwards:
                self.enter_backward(backward)
                at_end_of_backward(functools.partial(self.leave_backward, backward))
            if self.comes(index):
                gradient = self._prepare(index, gradient)
                with self._session.part():
                    self._give(index, gradient)
                    self.has_left(index, parameter)


def seen(gradient: torch.Tensor | None) -> Seen:
    """Changes when the gradient is written or replaced. A replacement may have the old address."""
    if gradient is None:
        return None, 0
    return gradient, here_of(gradient)._version


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Inside a backward (a reentrant checkpoint has its own): calls this after all that autograd and DDP do at its
    end, if it does not fail."""
    # A callback that a callback queues comes last.
    _engine.queue_callback(functools.partial(_engine.queue_callback, call))


def _hook(stream: weakref.ref[GradientStream], index: int) -> Callable[[torch.nn.Parameter], None]:
    def take(parameter: torch.nn.Parameter) -> None:
        if torch.compiler.is_compiling():  # A backward, by compiled autograd: step() gives it.
            return
        living = stream()
        if living is not None:
            living.take(index, parameter)

    return take


class _Copies:
    """Copies from GPUs to the host, in order, with one stream for each GPU."""

    def __init__(self):
        self._driver = _load_driver()
        self._written = _native.address_of("ballast_gradient_written")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: list[int] = []

    def open(self, session: Session) -> None:
        self._session = session
        self._tickets = [session.gradient_ticket(index) for index in range(len(session.job.parameters))]
        for address, size in _whole_pages(session.gradient_memories()):
            # Once, and not inside a backward, where it would wait for the whole GPU.
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, size, 0)))
            self._pinned.append(address)

    def start(self, index: int, gradient: torch.Tensor) -> None:
        stream = self._streams.get(gradient.device)
        if stream is None:
            stream = self._streams[gradient.device] = torch.cuda.Stream(gradient.device)
        stream.wait_stream(torch.cuda.current_stream(gradient.device))
        ticket = self._tickets[index]
        places, ticket.attempt = self._session.gradient_places(index)
        ticket.final = True
        with torch.cuda.stream(stream):
            flat = gradient.reshape(-1)
            for address, offset, elements in places:
                _at(address, elements, gradient.dtype).copy_(flat[offset:offset + elements], non_blocking=True)
            code = self._driver.cuLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(self._written),
                                                 ctypes.byref(ticket))
        gradient.record_stream(stream)
        if code != 0:
            raise RuntimeError(f"cuLaunchHostFunc failed with CUDA error {code}")

    def wait(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        self.wait()
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _load_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _at(address: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * (elements * dtype.itemsize)).from_address(address), dtype=dtype)


def _whole_pages(memories: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, bytes) of the pages with these, each page once."""
    page, merged = os.sysconf("SC_PAGESIZE"), []
    for address, size in sorted(memories):
        begin, end = address // page * page, -(-(address + size) // page) * page
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [(begin, end - begin) for begin, end in merged]
