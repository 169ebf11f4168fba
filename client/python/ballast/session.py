"""A rank's session with its job, in terms of whole parameters at addresses in this process."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Sequence

from . import _native
from .errors import BallastError, DeadlineError, FailedPreconditionError

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
UNUSED_POLICIES = {"error": 0, "skip": 1, "zero": 2}
UPDATE_MODES = {"wait": 0, "speculate": 1}
# A wait in the library lasts no longer, so that Python can handle signals.
_SLICE_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class HyperParameters:
    """Of a param group, named as in torch.optim.AdamW; see `client/ballast.h`."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled_weight_decay: bool = True
    bias_correction: bool = True
    amsgrad: bool = False
    maximize: bool = False

    def _native(self) -> _native.HyperParameters:
        return _native.HyperParameters(
            float(self.lr), float(self.betas[0]), float(self.betas[1]), float(self.eps),
            float(self.weight_decay), self.decoupled_weight_decay, self.bias_correction, self.amsgrad,
            self.maximize)


@dataclasses.dataclass(frozen=True)
class Group:
    """dtypes are "float32", "bfloat16" or "float16": of gradients on their way to the service, and of
    weights on their way back."""

    name: str
    hyper_parameters: HyperParameters
    wire_dtype: str = "float32"
    return_dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """group: the index of its group in the job. A frozen one is never updated."""

    name: str
    shape: tuple[int, ...]
    group: int = 0
    frozen: bool = False


@dataclasses.dataclass(frozen=True)
class Job:
    """max_norm: clipping by global norm, 0 for none. unused_policy, for parameters that no rank gave a
    gradient: "error", "skip" (as torch does) or "zero". update_mode: "wait" or "speculate"."""

    name: str
    groups: Sequence[Group]
    parameters: Sequence[Parameter]
    world_size: int = 1
    max_norm: float = 0.0
    unused_policy: str = "skip"
    update_mode: str = "wait"
    max_micro_steps: int = 0


@dataclasses.dataclass(frozen=True)
class Decision:
    """Of a step. norm: of the unscaled gradient over all groups. skip_reason: why nothing changed, "" if
    the step was applied."""

    step: int
    applied: bool
    norm: float
    clip_coefficient: float
    skip_reason: str


class Session:
    """A rank of a job on the service at `service` ("host:port" or "unix:/path"). `weights` are the addresses
    at which each parameter's weights are written, its elements row-major in the group's return dtype; the
    memory must stay until `close`. Only what this rank owns is written.

    Raises the errors of `ballast.errors`. Calls come one at a time, from any thread."""

    def __init__(self, service: str, job: Job, weights: Sequence[int | None], *, rank: int = 0,
                 job_uid: str | None = None, rejoin: bool = False, share_memory: bool = True,
                 join_timeout: float = 60.0, reconnect_timeout: float = 60.0, timeout: float = 600.0):
        if len(weights) != len(job.parameters):
            raise ValueError(f"{len(weights)} addresses were given for {len(job.parameters)} parameters")
        self.job, self.rank, self.timeout = job, rank, timeout
        self._handle = ctypes.c_void_p()
        self._lock = threading.Lock()
        self._abandoned: threading.Thread | None = None
        self._calling = False
        groups = (_native.Group * len(job.groups))(*[
            _native.sized(_native.Group, name=group.name.encode(), hyper_parameters=group.hyper_parameters._native(),
                          wire_dtype=_number(DTYPES, group.wire_dtype, "wire_dtype"),
                          return_dtype=_number(DTYPES, group.return_dtype, "return_dtype"))
            for group in job.groups])
        parameters = (_native.Parameter * len(job.parameters))(*[
            _native.sized(_native.Parameter, name=parameter.name.encode(),
                          shape=(ctypes.c_int64 * len(parameter.shape))(*parameter.shape),
                          dimensions=len(parameter.shape), group=parameter.group, frozen=parameter.frozen)
            for parameter in job.parameters])
        native_job = _native.sized(
            _native.Job, name=job.name.encode(), groups=groups, group_count=len(job.groups),
            parameters=parameters, parameter_count=len(job.parameters), world_size=job.world_size,
            max_norm=job.max_norm, unused_policy=_number(UNUSED_POLICIES, job.unused_policy, "unused_policy"),
            update_mode=_number(UPDATE_MODES, job.update_mode, "update_mode"),
            max_micro_steps=job.max_micro_steps)
        options = _native.sized(
            _native.Options, service=service.encode(), job=ctypes.pointer(native_job), rank=rank,
            job_uid=None if job_uid is None else job_uid.encode(), rejoin=rejoin,
            never_share_memory=not share_memory, join_timeout_seconds=join_timeout,
            reconnect_timeout_seconds=reconnect_timeout, wait_seconds=_SLICE_SECONDS,
            weights=_native.pointers(list(weights)))
        self._patiently("ballast_open", ctypes.byref(options), ctypes.byref(self._handle))
        # Before a service that this process started is stopped: it was registered earlier.
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Ends the session; the job stays. Closing again does nothing."""
        with self._lock:
            handle, self._handle = self._handle, ctypes.c_void_p()
            running = self._abandoned
        if not handle:
            return
        atexit.unregister(self._at_exit)
        if running is None or not running.is_alive():
            _native.library().ballast_close(handle)
        else:  # After Ctrl-C: nobody waits for it any more, and no call may run when a session is closed.
            threading.Thread(target=lambda: (running.join(), _native.library().ballast_close(handle))).start()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        if getattr(self, "_handle", None):
            self.close()

    # ------------------------------------------------------------ what it knows

    @property
    def committed_step(self) -> int:
        return self._info().committed_step

    @property
    def awaiting_weights(self) -> bool:
        """Whether the job has no weights yet."""
        return bool(self._info().awaiting_weights)

    @property
    def shares_memory(self) -> bool:
        return bool(self._info().shares_memory)

    @property
    def job_uid(self) -> str:
        return self._info().job_uid.decode()

    @property
    def trainer_state(self) -> bytes:
        """Of the step that was the last one committed when the session was opened."""
        size = ctypes.c_size_t()
        self._call("ballast_trainer_state", None, 0, ctypes.byref(size))
        state = ctypes.create_string_buffer(size.value or 1)
        self._call("ballast_trainer_state", state, size.value, ctypes.byref(size))
        return state.raw[:size.value]

    def place(self, parameter: int) -> tuple[int, int]:
        """The offset of a parameter in its group's flat space (-1 if it is frozen), and that space's elements."""
        offset, elements = ctypes.c_int64(), ctypes.c_int64()
        self._call("ballast_place", parameter, ctypes.byref(offset), ctypes.byref(elements))
        return offset.value, elements.value

    # ------------------------------------------------------------ what it does

    def upload_weights(self, addresses: Sequence[int | None]) -> None:
        """The first weights of what this rank owns, from fp32 at these addresses."""
        self._patiently("ballast_upload_weights", self._open(), _native.pointers(list(addresses)), len(addresses))

    def read_weights(self) -> None:
        """The committed weights, to the addresses given at the start."""
        self._patiently("ballast_read_weights", self._open())

    def begin_step(self, hyper_parameters: Sequence[HyperParameters] | None = None, *, loss_scale: float = 1.0,
                   divisors: Sequence[float] | None = None, trainer_state: bytes = b"") -> None:
        """hyper_parameters and divisors: one for each group; None: as they are, and 1."""
        groups = len(self.job.groups)
        for name, values in (("hyper_parameters", hyper_parameters), ("divisors", divisors)):
            if values is not None and len(values) != groups:
                raise ValueError(f"{len(values)} {name} were given for {groups} groups")
        step = _native.sized(_native.Step, loss_scale=loss_scale, trainer_state=trainer_state,
                             trainer_state_bytes=len(trainer_state))
        if hyper_parameters is not None:
            step.hyper_parameters = (_native.HyperParameters * groups)(*[h._native() for h in hyper_parameters])
        if divisors is not None:
            step.divisors = (ctypes.c_double * groups)(*divisors)
        self._call("ballast_begin_step", ctypes.byref(step))

    def push_gradients(self, addresses: Sequence[int | None], micro_step: int = 0) -> None:
        """A micro-step's gradients, row-major in the groups' wire dtypes; None: none for that parameter.
        The memory may be used again when this returns."""
        self._wait("ballast_push_gradients", micro_step, _native.pointers(list(addresses)), len(addresses))

    def seal(self, micro_steps: int = 1) -> Decision:
        """Waits for all ranks."""
        decision = _native.sized(_native.Decision)
        self._wait("ballast_seal", micro_steps, ctypes.byref(decision))
        applied = bool(decision.applied)
        return Decision(step=decision.step, applied=applied, norm=decision.norm,
                        clip_coefficient=decision.clip_coefficient,
                        skip_reason="" if applied else _native.message())

    def receive_weights(self) -> None:
        """Returns when this rank's weights of the decided step are in place."""
        self._wait("ballast_receive_weights")

    def save(self, directory: str) -> None:
        """Between steps, to a directory on the service's host."""
        self._patiently("ballast_save", self._open(), directory.encode())

    def load(self, directory: str) -> None:
        """From such a directory. It ends the sessions of all ranks, this one included."""
        self._patiently("ballast_load", self._open(), directory.encode())

    # ------------------------------------------------------------ inside

    def _open(self) -> ctypes.c_void_p:
        if not self._handle:
            raise FailedPreconditionError("the session is closed")
        if self._abandoned is not None:
            raise FailedPreconditionError("a call of this session was interrupted; open another session")
        return self._handle

    def _call(self, name: str, *arguments) -> None:
        self._calling = True
        try:
            _native.call(name, self._open(), *arguments)
        finally:
            self._calling = False

    def _patiently(self, name: str, *arguments) -> None:
        """A call that may wait long, and not in slices: in a thread, beside which Python sees signals. The
        interpreter does not end before the call, which its own time limit ends: the library must not be left
        in the middle of a call."""
        errors = []

        def run():
            try:
                _native.call(name, *arguments)
            except BallastError as error:
                errors.append(error)

        self._abandoned = threading.Thread(target=run)
        self._abandoned.start()
        while self._abandoned.is_alive():
            self._abandoned.join(_SLICE_SECONDS)
        self._abandoned = None
        if errors:
            raise errors[0]

    def _wait(self, name: str, *arguments) -> None:
        """In slices, between which Python sees signals."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return self._call(name, *arguments)
            except DeadlineError:
                if time.monotonic() >= deadline:
                    raise

    def _info(self) -> _native.Info:
        info = _native.sized(_native.Info)
        self._call("ballast_get_info", ctypes.byref(info))
        return info


def _close_at_exit(reference: weakref.ref) -> None:
    session = reference()
    if session is not None and not session._calling:  # Else a daemon thread is in the middle of it.
        session.close()


def _number(names: dict[str, int], name: str, what: str) -> int:
    if name not in names:
        raise ValueError(f"{what} is {name!r}; expected one of {', '.join(names)}")
    return names[name]
