"""Gradients that leave while the backward pass runs.

What counts is what `.grad` has at step(), as for any optimizer: torch sums several backward passes there. So a gradient
leaves once in a step, when it has come as often as in the step before; at first that is once. Where `.grad` is changed
after that, by a further backward or by the trainer, all that has left is taken back, and leaves in step().

With accumulation_steps it leaves when it has come so often, and `.grad` is freed at once; not that of
DistributedDataParallel, whose buckets stay.

On a GPU a stream of its own copies the gradient to pinned host memory; the stream itself notifies the
library of the copy's end, without a Python thread.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from .. import _native
from ..errors import FailedPreconditionError
from ..session import Session
from .clipping import Sealed
from .watch import Samples, sampled

_engine = torch.autograd.Variable._execution_engine
_current_backward = torch._C._current_graph_task_id
Seen = "tuple[torch.Tensor | None, int]"  # See seen.
_forks = 0  # That led from the process that imported this to this one: asking the system takes longer than a gradient.


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class GradientStream:
    """Of one session. `hooked`: by their index in the job, the parameters whose gradients are taken where autograd
    leaves them; None for the others. `times`: how often each comes in a step, at first. `frees`: that is a promise for
    all steps, and `.grad` is freed as it leaves. `part`: of a gradient, by its index, what this process has; it raises
    where that cannot be sent. `begin`: begins the step on the service, with the hyper-parameters of now, and notes it
    here. `seal`: gives what has not left, waits for all ranks, and notes it here. `failed`: whether no step can be
    made any more. `forgotten`: notes that nothing counts that was given since the last step. `changed`: whether the
    next step is of another job, which takes all of `.grad`. `on_gpu`: whether gradients are there."""

    def __init__(self, session: Session, hooked: Sequence[torch.nn.Parameter | None], times: int, frees: bool,
                 part: Callable[[int, torch.Tensor], torch.Tensor], begin: Callable[[], None],
                 seal: Callable[[], Sealed], failed: Callable[[], bool], forgotten: Callable[[], None],
                 changed: Callable[[], bool], on_gpu: bool):
        self.begun = False
        self.discards = 0  # In this step, of which all ranks must have as many.
        self.sealed: Sealed | None = None
        self.closed = False
        self.left: dict[int, Seen] = {}  # In this step: `.grad` as it was then, see seen.
        self.came = [0] * len(hooked)  # How often, in this step; on all ranks alike.
        self._leaves_at = [times] * len(hooked)
        self.frees = frees
        self._freed: set[int] = set()  # Since zero_grad().
        self._leaving: set[int] = set()  # Of what has left, in the backward that is under way.
        self._samples: list[Samples] = []  # Of what has left before.
        self._part, self._begin, self._seal, self._failed, self._forgotten = part, begin, seal, failed, forgotten
        self._changed, self._stays = changed, False  # Whether nothing leaves before the next step.
        self._forks = _forks
        self._cuda = torch.cuda.is_available()  # Asked once: it takes longer than a small gradient.
        self._lock = threading.RLock()  # A backward has a thread for each device.
        self._backwards: dict[int, int] = {}  # In which a gradient has come, and that have not ended, and their thread.
        self.hooked = frozenset(index for index, parameter in enumerate(hooked) if parameter is not None)
        self._on_gpu = on_gpu
        self.move_to(session)
        # Parameters outlive an optimizer that was not closed: it must not go on taking what they get.
        self._hooks = {index: parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))
                       for index, parameter in enumerate(hooked) if parameter is not None}

    def close(self) -> None:
        self.closed = True
        for index in list(self._hooks):
            self.unhook(index)
        if self._copies is not None:
            self._copies.close()
        self._forget()

    def unhook(self, index: int) -> None:
        """The parameter gives its gradients to another optimizer."""
        if index in self._hooks:
            self._hooks.pop(index).remove()

    def leave_session(self) -> None:
        """Before the session is closed. Between steps; nothing is given until `move_to`."""
        if self._copies is not None:
            self._copies.close()
            self._copies = None
        self._forget()
        self.discards = 0

    def move_to(self, session: Session) -> None:
        self._session = session
        self._copies = _Copies(session) if self._on_gpu else None

    def group_of(self, index: int) -> int:
        return self._session.job.parameters[index].group

    def seal(self) -> Sealed:
        """Once in a step, by all ranks; what has left cannot be added to then."""
        return self.sealed or self._seal()

    def enter_backward(self, backward: int) -> None:
        """When the first gradient of a backward comes. Until `leave_backward` the step cannot be sealed."""
        with self._lock:
            if backward in self._backwards:
                return
            if self._cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("gradients cannot leave from a CUDA graph that is captured: create the optimizer "
                                   "with overlap=False")
            if self.sealed is not None:
                raise FailedPreconditionError("a backward after clip_grad_norm_, which had all ranks end the step; "
                                              "call step() or zero_grad() first")
            self._backwards[backward] = threading.get_ident()
            self._stays = not self.begun and self._changed()

    def leave_backward(self, backward: int) -> None:
        with self._lock:
            self._backwards.pop(backward, None)
            here = {index: self.left[index][0] for index in self._leaving}
            for index, gradient in here.items():
                if isinstance(gradient, DTensor):  # FSDP2's share their version, and others have been written since.
                    self.left[index] = seen(gradient)
            self._samples += sampled(here)
            self._leaving.clear()

    def comes(self, index: int) -> bool:
        """A gradient has come; whether it leaves now."""
        with self._lock:
            self.came[index] += 1
            return self.came[index] == self._leaves_at[index] and not self._stays

    def give(self, index: int, gradient: torch.Tensor) -> None:
        """What this process has of a parameter's gradient goes to the service, once in a step."""
        with self._lock:
            gradient = self._prepare(index, gradient)
            with self._session.part():
                self._give(index, gradient)

    def _prepare(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """What of it is given, in the step that has begun then."""
        gradient = self._part(index, gradient)
        if gradient.device.type != "cpu" and not self._is_copied(gradient):
            raise RuntimeError(f"the gradient of parameter {self._session.job.parameters[index].name} is on "
                               f"{gradient.device}, from where none leaves during backward: move the model before the "
                               "first step(), or create the optimizer with overlap=False")
        if not self.begun:
            self._begin()
        return gradient

    def _is_copied(self, gradient: torch.Tensor) -> bool:
        return self._copies is not None and is_on_gpu(gradient)

    def _give(self, index: int, gradient: torch.Tensor) -> None:
        if self._is_copied(gradient):
            self._copies.start(index, gradient)
            return
        if self._cuda and gradient.is_pinned():
            # From FSDP2's CPUOffloadPolicy, whose hooks run when the copy has been started.
            torch.cuda.current_stream().synchronize()
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
        # A tensor of no elements has no address, and None would be no gradient.
        self._session.give_gradient(index, gradient.data_ptr() or 1, final=True)

    def has_left(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Of what `.grad` has now."""
        with self._lock:
            if self.frees:
                self._freed.add(index)
                parameter.grad = None
            else:
                self._leaving.add(index)
            self.left[index] = seen(parameter.grad)

    def first_changed(self, parameters: Sequence[torch.nn.Parameter]) -> int | None:
        """Whose `.grad` is not what has left. Autograd does not count writes to its `.data`: some elements are
        compared."""
        for index, left in self.left.items():
            now = seen(parameters[index].grad)
            if now[0] is not left[0] or now[1] != left[1]:
                return index
        return next((index for samples in self._samples for index in samples.changed()), None)

    def was_broken_off(self) -> bool:
        """Whether a backward of this thread has not ended, and never will."""
        return threading.get_ident() in self._backwards.values()

    def check_ended(self, by_itself: bool) -> None:
        """Before the step is sealed. by_itself: no other rank waits for the gradients of a backward that was broken
        off, which can leave once more if they are in .grad."""
        leave_again = by_itself and not self.frees
        if any(not leave_again or thread != threading.get_ident() for thread in self._backwards.values()):
            raise FailedPreconditionError("a backward pass did not end, and part of its gradients has been sent; call "
                                          "zero_grad() and do the step's backward passes again")

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
        """With zero_grad(): takes back what was given since the last step."""
        if self.take_back():
            self._forget()
        self._forgotten()

    def take_back(self) -> bool:
        """The same for a step that goes on with what is in `.grad`. False: this is a fork, which has given nothing, or
        the session has failed."""
        if self._forks != _forks or self._failed():
            return False
        if self._copies is not None:
            self._copies.wait()
        with self._session.part():
            if self.begun:
                self._discard()
            self._forget_gradients()
        return True

    def catch_up(self, discards: int, came: list[int]) -> None:
        """As if what has come on another rank, and been discarded there, had been so here."""
        self.came = came
        while self.discards < discards and not self._failed():
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
        """What zero_grad() makes of a `.grad` that was freed."""
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
    """Changes when it is written, or is another one, which may have its address once it is gone."""
    if gradient is None:
        return None, 0
    return gradient, (gradient._local_tensor if isinstance(gradient, DTensor) else gradient)._version


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Inside a backward, of which a reentrant checkpoint's is one of its own: calls this once all that autograd and DDP
    do at its end is done, if it does not fail."""
    # A callback that is queued by a callback comes last.
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
    """From GPUs to the host, one stream for each GPU, in order."""

    def __init__(self, session: Session):
        self._session = session
        self._driver = _load_driver()
        self._written = _native.address_of("ballast_gradient_written")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: list[int] = []
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
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _load_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _at(address: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * (elements * dtype.itemsize)).from_address(address), dtype=dtype)


def _whole_pages(memories: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, bytes) of the pages that hold these, each page once."""
    page, merged = os.sysconf("SC_PAGESIZE"), []
    for address, size in sorted(memories):
        begin, end = address // page * page, -(-(address + size) // page) * page
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [(begin, end - begin) for begin, end in merged]
