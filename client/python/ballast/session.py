"""A rank's session with its job, in terms of whole parameters at addresses in this process."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from . import _native
from .errors import AbortedError, BallastError, DeadlineError, FailedPreconditionError, UnavailableError, error_of

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
UNUSED_POLICIES = {"error": 0, "skip": 1, "zero": 2}
UPDATE_MODES = {"wait": 0, "speculate": 1}
ON_ABORT = {"redo": 0, "skip": 1}
PLANES = {"master": 1, "exp_avg": 2, "exp_avg_sq": 3, "max_exp_avg_sq": 4}
_REPLICATE = -1
# What the library keeps of a session's stream, and raises in every later call.
_FINAL = (AbortedError, UnavailableError)
# A wait in the library lasts no longer, so that Python can handle signals.
_SLICE_SECONDS = 0.1
_SLICE_IN_WORDS = re.compile(r"\b(within|for) 100ms\b")  # As the library then says.


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
    """group: the index of its group in the job. A frozen one is never updated. placements, of a job with a mesh:
    for each of its dimensions the dimension of the parameter that it cuts, or None; a frozen one has none."""

    name: str
    shape: tuple[int, ...]
    group: int = 0
    frozen: bool = False
    placements: tuple[int | None, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    """unused_policy, for parameters that no rank gave a
    gradient: "error", "skip" (as torch does) or "zero". update_mode: "wait" or "speculate". on_abort, for steps
    that cannot be kept: "redo" (sessions end with ABORTED) or "skip". keep_previous: `Session.undo` is possible, and
    the service keeps one more version of all state for it. mesh: the names and
    sizes of its dimensions, ranks in row-major order; then each rank has a shard of every parameter, and all
    addresses are those of its shards."""

    name: str
    groups: Sequence[Group]
    parameters: Sequence[Parameter]
    world_size: int = 1
    unused_policy: str = "skip"
    update_mode: str = "wait"
    max_micro_steps: int = 0
    mesh: Sequence[tuple[str, int]] = ()
    on_abort: str = "redo"
    keep_previous: bool = False


@dataclasses.dataclass(frozen=True)
class Decision:
    """Of a step. norm: of the unscaled gradient over all groups. skip_reason: why nothing changed, "" if
    the step was applied."""

    step: int
    applied: bool
    norm: float
    clip_coefficient: float
    skip_reason: str


@dataclasses.dataclass(frozen=True)
class Norm:
    """Of a step that all ranks have sealed, of the unscaled gradient. non_finite names the first element that is not
    finite, "" if all are. unused_parameters: how many no rank gave a gradient; unused_names has the first 64."""

    step: int
    norm: float
    group_norms: tuple[float, ...]
    non_finite: str
    unused_parameters: int
    unused_names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Summary:
    """A plane of a whole parameter in numbers. norm (L2), mean, min and max are of its finite elements, and 0 if there
    are none. magnitudes: counts of |x| by decade, [i] of those from 10^(i-12) to 10^(i-11); smaller ones that are not 0
    count in the first, larger ones in the last."""

    norm: float
    mean: float
    min: float
    max: float
    zeros: int
    non_finite: int
    magnitudes: tuple[int, ...]


class Session:
    """A rank of a job on the service at `service` ("host:port" or "unix:/path"). `weights` are the addresses
    at which each parameter's weights are written, its elements row-major in the group's return dtype; the
    memory must stay until `close`, for which the session keeps `memory`. Only what this rank owns is written.

    while_waiting is called about every 0.1 s while a call waits for other ranks or for the service; what it raises
    ends the wait, and the session with it.

    derive_from_uid: the job goes on from the state of the job of the same name and this uid, with other parameters.
    Those of the same name and shape keep weights, moments and update counts; `upload_weights` sends the others. All
    ranks say the same. Once all weights are there, it takes that job's place, in one act; NotFoundError: that one has
    gone on meanwhile, or is gone. derive_from_checkpoint: the state comes from there, as from `load`.

    takes_steps: False for a session that only uploads weights, saves or loads.

    tls_ca, tls_cert, tls_key, token_file: files, as for `ballast.connect`.

    Raises the errors of `ballast.errors`. Calls come one at a time, from any thread."""

    def __init__(self, service: str, job: Job, weights: Sequence[int | None], *, rank: int = 0,
                 job_uid: str | None = None, derive_from_uid: str | None = None,
                 derive_from_checkpoint: str | None = None, rejoin: bool = False, share_memory: bool = True,
                 join_timeout: float = 60.0, reconnect_timeout: float = 60.0, timeout: float = 600.0,
                 while_waiting: Callable[[], None] | None = None, takes_steps: bool = True, memory: object = None,
                 tls_ca: str | None = None, tls_cert: str | None = None, tls_key: str | None = None,
                 token_file: str | None = None):
        if len(weights) != len(job.parameters):
            raise ValueError(f"{len(weights)} addresses were given for {len(job.parameters)} parameters")
        self.job, self.rank, self.timeout, self._memory = job, rank, timeout, memory
        self._handle = ctypes.c_void_p()
        self._give = _native.library().ballast_give_gradient
        self._lock = threading.Lock()
        self._abandoned: concurrent.futures.Future | None = None  # The call of `_patiently` that is under way.
        self._failed = False
        self._calling = False
        self._parts = 0  # That were begun and have not ended, or never will.
        self._while_waiting = while_waiting or (lambda: None)
        groups = (_native.Group * len(job.groups))(*[
            _native.sized(_native.Group, name=group.name.encode(), hyper_parameters=group.hyper_parameters._native(),
                          wire_dtype=_number(DTYPES, group.wire_dtype, "wire_dtype"),
                          return_dtype=_number(DTYPES, group.return_dtype, "return_dtype"))
            for group in job.groups])
        parameters = (_native.Parameter * len(job.parameters))(*[
            _native.sized(_native.Parameter, name=parameter.name.encode(),
                          shape=(ctypes.c_int64 * len(parameter.shape))(*parameter.shape),
                          dimensions=len(parameter.shape), group=parameter.group, frozen=parameter.frozen,
                          placements=_native_placements(parameter, len(job.mesh)))
            for parameter in job.parameters])
        mesh = (_native.MeshDim * len(job.mesh))(*[
            _native.sized(_native.MeshDim, name=name.encode(), ranks=ranks) for name, ranks in job.mesh])
        native_job = _native.sized(
            _native.Job, name=job.name.encode(), groups=groups, group_count=len(job.groups),
            parameters=parameters, parameter_count=len(job.parameters), world_size=job.world_size,
            unused_policy=_number(UNUSED_POLICIES, job.unused_policy, "unused_policy"),
            update_mode=_number(UPDATE_MODES, job.update_mode, "update_mode"),
            max_micro_steps=job.max_micro_steps, mesh=mesh, mesh_dimensions=len(job.mesh),
            on_abort=_number(ON_ABORT, job.on_abort, "on_abort"), keep_previous=job.keep_previous)
        options = _native.sized(
            _native.Options, service=service.encode(), job=ctypes.pointer(native_job), rank=rank,
            job_uid=None if job_uid is None else job_uid.encode(), rejoin=rejoin,
            derive_from_uid=None if derive_from_uid is None else derive_from_uid.encode(),
            derive_from_checkpoint=None if derive_from_checkpoint is None else derive_from_checkpoint.encode(),
            never_share_memory=not share_memory, join_timeout_seconds=join_timeout,
            reconnect_timeout_seconds=reconnect_timeout, wait_seconds=_SLICE_SECONDS,
            weights=_native.pointers(list(weights)), tls_ca=_path(tls_ca), tls_cert=_path(tls_cert),
            tls_key=_path(tls_key), token_file=_path(token_file), takes_no_steps=not takes_steps)
        # Before a service that this process started is stopped: it was registered earlier.
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        try:
            self._patiently("ballast_open", ctypes.byref(options), ctypes.byref(self._handle))
        except BaseException:
            self.close()  # Once it is open: it would keep the rank.
            raise

    def close(self, *, wait: bool = False) -> None:
        """Ends the session; the job stays. Closing again does nothing. Where Ctrl-C has left a call of it, a thread
        closes it after that call. wait: first wait for such a call, which may write weights until then."""
        running = self._abandoned
        while wait and running is not None and not running.cancel() and not running.done():
            concurrent.futures.wait([running], _SLICE_SECONDS)
            self._while_waiting()
        with self._lock:
            handle, self._handle = self._handle, ctypes.c_void_p()
            running, self._abandoned = self._abandoned, None
        atexit.unregister(self._at_exit)
        if running is None or running.cancel() or running.done():
            _native.library().ballast_close(handle)
            return

        def close_later(_kept=self._memory):
            concurrent.futures.wait([running])
            _native.library().ballast_close(handle)  # Which an open that was interrupted has set only now.

        # No caller waits for it any more, and no call may run when a session is closed.
        threading.Thread(target=close_later).start()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        if getattr(self, "_handle", None):
            self.close()

    # ------------------------------------------------------------ what it knows

    @property
    def ended(self) -> bool:
        """Whether a call has shown that none can succeed any more: open another session."""
        return self._failed or self._abandoned is not None or not self._handle

    @property
    def torn(self) -> bool:
        """Whether an exception that is none of the service's, such as Ctrl-C, has ended a `part`, or a call: what was
        done of it is unknown, and another session goes on."""
        return not self._failed and (self._parts > 0 or self._abandoned is not None)

    @contextlib.contextmanager
    def part(self):
        """Around calls and what the caller notes of them, which are one."""
        self._parts += 1
        try:
            yield
        except BallastError:
            self._parts -= 1
            raise
        self._parts -= 1  # Not after others, which may come between any two instructions: Ctrl-C.

    @property
    def committed_step(self) -> int:
        return self._info().committed_step

    @property
    def generation(self) -> tuple[int, int]:
        """Of the job, when this session was opened: (epoch, count). Once the job has a higher one the session is over."""
        info = self._info()
        return info.generation_epoch, info.generation

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

    def owned_elements(self) -> list[int]:
        """How many elements of each parameter this rank owns: of those it gives the gradients and gets the
        weights."""
        owned = [0] * len(self.job.parameters)
        for chunk in self._list(_native.Chunk, "ballast_chunks", self.rank):
            for piece in self._list(_native.Piece, "ballast_pieces", chunk.index):
                owned[piece.parameter] += piece.elements
        return owned

    # ------------------------------------------------------------ what it does

    def upload_weights(self, addresses: Sequence[int | None], *, memory: object = None) -> None:
        """The first weights of what this rank owns, from fp32 at these addresses. memory: what must live as long as it
        is read, also where this call is interrupted."""
        self._patiently("ballast_upload_weights", self._open(), _native.pointers(list(addresses)), len(addresses),
                        keep=memory)

    def upload_state(self, step: int, update_counts: Sequence[int],
                     planes: dict[str, Sequence[int | None]], *, memory: object = None) -> None:
        """The same with moments: the job begins at `step`, as another optimizer left it. update_counts: of each
        parameter, 0 of a frozen one. planes: by PLANES the addresses as for `upload_weights`; None: zeros. All ranks
        give the same state."""
        of = {plane: _native.pointers(list(planes[plane])) for plane in PLANES}
        state = _native.sized(_native.FirstState, step=step,
                              update_counts=(ctypes.c_int64 * len(update_counts))(*update_counts),
                              weights=of["master"], exp_avg=of["exp_avg"], exp_avg_sq=of["exp_avg_sq"],
                              max_exp_avg_sq=of["max_exp_avg_sq"])
        self._patiently("ballast_upload_state", self._open(), ctypes.byref(state), len(update_counts), keep=memory)

    def upload_by(self, write: Callable[[int, str, int, int, int], None], *, step: int = 0,
                  update_counts: Sequence[int] = ()) -> None:
        """The first weights of what this rank owns, or with a step the first state, of values that are not all in
        memory at once. write(parameter, plane, offset, elements, address) puts elements [offset, offset + elements) of
        what this rank has of the parameter, row-major in fp32, to the address; it is called by another thread, in the
        order of declaration, and again for what a broken connection has lost. What it raises ends the upload, and is
        raised."""
        counts = (ctypes.c_int64 * len(update_counts))(*update_counts)
        self._by_values(write, "ballast_upload_by", step, counts, len(counts))

    def write_state(self, parameters: Sequence[int], planes: Sequence[str],
                    write: Callable[[int, str, int, int, int], None], *,
                    update_counts: Sequence[int] | None = None) -> None:
        """Writes these planes of these parameters between two steps, in place of what the last one has left; all ranks
        call it alike, and it returns when the whole is the job's state. write: as of upload_by. update_counts: of each
        of the parameters; None: they stay. That step cannot be undone any more. FailedPreconditionError: another rank
        writes something else, or has begun the next step. InvalidArgumentError: a value is not finite, or a square below
        zero. ResourceExhaustedError: the service has no room for the values beside the state. DeadlineError, after
        `timeout`, names the ranks that have brought nothing."""
        order = sorted(range(len(parameters)), key=parameters.__getitem__)
        numbers = sorted(_number(PLANES, plane, "plane") for plane in planes)
        given = _native.sized(_native.StateWrite, count=len(order), plane_count=len(numbers),
                              timeout_seconds=self.timeout,
                              parameters=(ctypes.c_size_t * len(order))(*[parameters[i] for i in order]),
                              planes=(ctypes.c_int32 * len(numbers))(*numbers))
        if update_counts is not None:
            given.update_counts = (ctypes.c_int64 * len(order))(*[update_counts[i] for i in order])
        self._by_values(write, "ballast_write_state", ctypes.byref(given))

    def _by_values(self, write: Callable[[int, str, int, int, int], None], name: str, *arguments) -> None:
        """A call that asks for values. What `write` raises is raised."""
        planes = {number: plane for plane, number in PLANES.items()}
        raised: list[BaseException] = []

        def values(_, parameter: int, plane: int, offset: int, elements: int, address: int) -> int:
            try:
                write(parameter, planes[plane], offset, elements, address)
            except BaseException as error:
                raised.append(error)
            return len(raised)

        try:
            self._patiently(name, self._open(), *arguments, _native.VALUES(values), None)
        except BallastError:
            if raised:
                raise raised[0] from None
            raise

    def read_weights(self) -> None:
        """The committed weights, to the addresses given at the start."""
        self._patiently("ballast_read_weights", self._open())

    def begin_step(self, hyper_parameters: Sequence[HyperParameters] | None = None, *, loss_scale: float = 1.0,
                   divisors: Sequence[float] | None = None, trainer_state: bytes = b"",
                   expected_max_norm: float = 0.0, expected_multipliers: Sequence[float] | None = None) -> None:
        """hyper_parameters and divisors: one for each group; None: as they are, and 1. expected_max_norm or
        expected_multipliers: what the vote will say, as far as it is known; only speed depends on it."""
        groups = len(self.job.groups)
        for name, values in (("hyper_parameters", hyper_parameters), ("divisors", divisors),
                             ("expected_multipliers", expected_multipliers)):
            if values is not None and len(values) != groups:
                raise ValueError(f"{len(values)} {name} were given for {groups} groups")
        step = _native.sized(_native.Step, loss_scale=loss_scale, trainer_state=trainer_state,
                             trainer_state_bytes=len(trainer_state), expected_max_norm=expected_max_norm)
        if hyper_parameters is not None:
            step.hyper_parameters = (_native.HyperParameters * groups)(*[h._native() for h in hyper_parameters])
        if divisors is not None:
            step.divisors = (ctypes.c_double * groups)(*divisors)
        if expected_multipliers is not None:
            step.expected_multipliers = (ctypes.c_double * groups)(*expected_multipliers)
        self._call("ballast_begin_step", ctypes.byref(step))

    def push_gradients(self, addresses: Sequence[int | None], micro_step: int = 0, *, final: bool = False) -> None:
        """A micro-step's gradients, row-major in the groups' wire dtypes; None: none for that parameter.
        The memory may be used again when this returns. final: it is the step's last micro-step; then the
        service begins its work before the seal."""
        self._wait("ballast_push_gradients", micro_step, _native.pointers(list(addresses)), len(addresses), final)

    def give_gradient(self, parameter: int, address: int | None, micro_step: int = 0, *, final: bool = False) -> None:
        """The same, one parameter at a time: what it completes leaves at once. `final` is the same in all calls of a
        micro-step. None: it was written to its `gradient_places`. From any thread."""
        # What _wait does, for a call that comes for each parameter in each backward, and seldom waits.
        self._calling = True
        try:
            status = self._give(self._open(), micro_step, parameter, address, final)
        finally:
            self._calling = False
        if status == _native.DEADLINE_EXCEEDED:
            self._while_waiting()
            self._wait("ballast_give_gradient", micro_step, parameter, address, final)
        elif status != _native.OK:
            error = error_of(status, _native.message())
            self._failed = self._failed or isinstance(error, _FINAL)
            raise error

    def gradient_places(self, parameter: int, micro_step: int = 0) -> tuple[list[tuple[int, int, int]], int]:
        """Where a gradient that is elsewhere, as on a GPU, is to be copied: (address, offset, elements) of each
        part, in the group's wire dtype; and the attempt, for its ticket."""
        count, attempt = ctypes.c_size_t(), ctypes.c_uint64()
        places = (_native.GradientPlace * 8)()
        while True:
            self._wait("ballast_gradient_places", micro_step, parameter, places, len(places), ctypes.byref(count),
                       ctypes.byref(attempt))
            if count.value <= len(places):
                return [(place.data, place.offset, place.elements) for place in places[:count.value]], attempt.value
            places = (_native.GradientPlace * count.value)()

    def gradient_ticket(self, parameter: int) -> _native.GradientTicket:
        """For `ballast_gradient_written`, which a CUDA stream calls behind a copy to `gradient_places`. It must stay
        until then."""
        return _native.GradientTicket(session=self._open().value, parameter=parameter)

    def gradient_memories(self) -> list[tuple[int, int]]:
        """(address, bytes) of all memory for gradients that is shared with the service; empty if none is."""
        memories = []
        for chunk in self._list(_native.Chunk, "ballast_chunks", self.rank):
            data, size = ctypes.c_void_p(), ctypes.c_size_t()
            self._call("ballast_gradient_memory", chunk.index, ctypes.byref(data), ctypes.byref(size))
            if data.value:
                memories.append((data.value, size.value))
        return memories

    def end_gradients(self, micro_step: int = 0, *, final: bool = False) -> None:
        """Ends the micro-step. Parameters that were not given have no gradient in it."""
        self._wait("ballast_end_gradients", micro_step, final)

    def report(self, numbers: Mapping[str, float] | None = None,
               seconds: tuple[float, float, float, float] | None = None) -> None:
        """For people who look at the job, in its history, its metrics and on the page: what goes with the next seal or
        vote. Nothing is decided by it. numbers: at most 16, whose names have 1 to 64 letters, digits, ".", "_", "/" and
        "-"; of ranks that report any the lowest counts. seconds: where this rank's time went from its last seal, or
        its start, to the next one: computing, waiting for collectives, giving gradients, and waiting for the decision
        and the weights."""
        for name, value in (numbers or {}).items():
            self._call("ballast_report_number", name.encode(), value)
        if seconds is not None:
            self._call("ballast_report_seconds", *seconds)

    def seal(self, micro_steps: int = 1) -> Norm:
        """Waits for all ranks. Nothing is decided before all of them vote."""
        groups = len(self.job.groups)
        norm, group_norms = _native.sized(_native.Norm), (ctypes.c_double * groups)()
        self._wait("ballast_seal", micro_steps, ctypes.byref(norm), group_norms, groups)
        non_finite = _native.message() if norm.non_finite else ""
        count = ctypes.c_size_t()
        self._call("ballast_unused", None, 0, ctypes.byref(count))
        unused = (ctypes.c_size_t * count.value)()
        self._call("ballast_unused", unused, count.value, ctypes.byref(count))
        return Norm(step=norm.step, norm=norm.norm, group_norms=tuple(group_norms), non_finite=non_finite,
                    unused_parameters=norm.unused_parameters,
                    unused_names=tuple(self.job.parameters[index].name for index in unused))

    def vote(self, *, apply: bool = True, max_norm: float = 0.0, multipliers: Sequence[float] | None = None,
             hyper_parameters: Sequence[HyperParameters] | None = None,
             trainer_state: bytes | None = None) -> Decision:
        """What becomes of the step that was sealed; waits for all ranks, which vote the same. max_norm: the gradient
        is clipped to this global norm, 0: it is not; or multipliers, one for each group. hyper_parameters, one for
        each group, and trainer_state: in place of those of begin_step."""
        return self._decide("ballast_vote", (), apply, max_norm, multipliers, hyper_parameters, trainer_state)

    def seal_and_vote(self, micro_steps: int = 1, *, apply: bool = True, max_norm: float = 0.0,
                      multipliers: Sequence[float] | None = None,
                      hyper_parameters: Sequence[HyperParameters] | None = None,
                      trainer_state: bytes | None = None) -> Decision:
        """Both at once, without a look at the norm and without its round trip."""
        return self._decide("ballast_seal_and_vote", (micro_steps,), apply, max_norm, multipliers, hyper_parameters,
                            trainer_state)

    def _decide(self, call, arguments, apply, max_norm, multipliers, hyper_parameters, trainer_state) -> Decision:
        groups = len(self.job.groups)
        for name, values in (("multipliers", multipliers), ("hyper_parameters", hyper_parameters)):
            if values is not None and len(values) != groups:
                raise ValueError(f"{len(values)} {name} were given for {groups} groups")
        ballot = _native.sized(_native.Ballot, abandon=not apply, max_norm=max_norm, trainer_state=trainer_state,
                               trainer_state_bytes=len(trainer_state or b""))
        if multipliers is not None:
            ballot.multipliers = (ctypes.c_double * groups)(*multipliers)
        if hyper_parameters is not None:
            ballot.hyper_parameters = (_native.HyperParameters * groups)(*[h._native() for h in hyper_parameters])
        decision = _native.sized(_native.Decision)
        self._wait(call, *arguments, ctypes.byref(ballot), ctypes.byref(decision))
        applied = bool(decision.applied)
        return Decision(step=decision.step, applied=applied, norm=decision.norm,
                        clip_coefficient=decision.clip_coefficient,
                        skip_reason="" if applied else _native.message())

    def discard(self) -> None:
        """Takes back what this rank has given in its attempt at the step; begin_step begins the next attempt. Every
        rank has to discard as often, each when it likes, before any may seal."""
        self._wait("ballast_discard")

    def receive_weights(self) -> None:
        """Returns when this rank's weights of the decided step are in place."""
        self._wait("ballast_receive_weights")

    def await_weights(self, parameters: Sequence[int]) -> None:
        """Returns when the weights of these parameters of the decided step are in place, while others may still come;
        `receive_weights` ends the step all the same."""
        self._wait("ballast_await_weights", (ctypes.c_size_t * len(parameters))(*parameters), len(parameters))

    def save(self, directory: str) -> None:
        """Between steps, to a directory on the service's host."""
        self._patiently("ballast_save", self._open(), directory.encode())

    def load(self, directory: str) -> None:
        """From such a directory. It ends the sessions of all ranks, this one included."""
        self._patiently("ballast_load", self._open(), directory.encode())

    def close_job(self) -> None:
        """Closes the job, of all ranks, which forgets its state: `save` it first. It ends the sessions of all ranks."""
        self._patiently("ballast_close_job", self._open())

    def undo(self) -> int:
        """Undoes the last committed step, exactly, of a job with keep_previous; returns its number. It ends the
        sessions of all ranks, this one included; opened again they are at the step before. FailedPreconditionError:
        some rank has begun the next step, or there is nothing to undo: one step alone can be."""
        step = ctypes.c_uint64()
        self._patiently("ballast_undo", self._open(), ctypes.byref(step))
        return step.value

    def read_state(self, parameter: int, plane: str, address: int, *, memory: object = None) -> tuple[int, int]:
        """Writes a plane of a whole parameter ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq") in fp32 to the
        address, whatever part of it this rank owns. memory: what must live as long as it is written to, which after
        Ctrl-C can be longer than this call. Returns the step that it is of, and how often the parameter has been
        updated."""
        step, updates = ctypes.c_uint64(), ctypes.c_int64()
        elements = math.prod(self.job.parameters[parameter].shape)
        self._patiently("ballast_read_state", self._open(), parameter, _number(PLANES, plane, "plane"), address,
                        elements, ctypes.byref(step), ctypes.byref(updates), keep=memory)
        return step.value, updates.value

    def summarise(self, parameter: int) -> tuple[dict[str, Summary], int, int]:
        """Each plane of a whole parameter by its name, as of read_state, in numbers that the service computes while
        training goes on; none of a frozen one. Then the step that they are of, and how often the parameter has been
        updated."""
        step, updates, count = ctypes.c_uint64(), ctypes.c_int64(), ctypes.c_size_t()
        planes = (_native.Summary * len(PLANES))()
        planes[0].size = ctypes.sizeof(_native.Summary)
        self._patiently("ballast_summarise", self._open(), parameter, planes, len(planes), ctypes.byref(count),
                        ctypes.byref(step), ctypes.byref(updates))
        names = {number: name for name, number in PLANES.items()}
        summaries = {names[plane.plane]: Summary(plane.norm, plane.mean, plane.min, plane.max, plane.zeros,
                                                 plane.non_finite, tuple(plane.magnitudes))
                     for plane in planes[:count.value]}
        return summaries, step.value, updates.value

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
        except _FINAL:
            self._failed = True
            raise
        finally:
            self._calling = False

    def _patiently(self, name: str, *arguments, keep: object = None) -> None:
        """A call that may wait long, and not in slices: in a thread, beside which Python sees signals. The
        interpreter does not end before the call, which its own time limit ends: the library must not be left
        in the middle of a call. Until then the thread has what is to be kept, and the weights' memory."""
        running = self._abandoned = concurrent.futures.Future()

        def run(_kept=(keep, self._memory)):
            if not running.set_running_or_notify_cancel():
                return
            try:
                _native.call(name, *arguments)
                running.set_result(None)
            except BaseException as error:
                running.set_exception(error.with_traceback(None))  # Which would keep what this keeps.

        threading.Thread(target=run).start()
        while not running.done():
            concurrent.futures.wait([running], _SLICE_SECONDS)
            if not running.done():
                self._while_waiting()
        self._abandoned = None
        try:
            running.result()
        except AbortedError:  # UNAVAILABLE is of this call alone, which does not go over the session's stream.
            self._failed = True
            raise
        finally:
            del running

    def _wait(self, name: str, *arguments) -> None:
        """In slices, between which Python sees signals."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return self._call(name, *arguments)
            except DeadlineError as error:
                if time.monotonic() >= deadline:
                    raise DeadlineError(_SLICE_IN_WORDS.sub(rf"\1 {self.timeout:g} s", str(error))) from None
                self._while_waiting()

    def _list(self, kind, name: str, which: int):
        count = ctypes.c_size_t()
        self._call(name, which, None, 0, ctypes.byref(count))
        entries = (kind * count.value)()
        self._call(name, which, entries, count.value, ctypes.byref(count))
        return entries

    def _info(self) -> _native.Info:
        info = _native.sized(_native.Info)
        self._call("ballast_get_info", ctypes.byref(info))
        return info


def _close_at_exit(reference: weakref.ref) -> None:
    session = reference()
    if session is not None and not session._calling:  # Else a daemon thread is in the middle of it.
        session.close()


def _native_placements(parameter: Parameter, dimensions: int):
    if parameter.placements is None:
        return None
    if len(parameter.placements) != dimensions:
        raise ValueError(f"parameter {parameter.name} has {len(parameter.placements)} placements, and the mesh "
                         f"{dimensions} dimensions")
    return (ctypes.c_int32 * dimensions)(*[_REPLICATE if dim is None else dim for dim in parameter.placements])


def _path(path: str | None) -> bytes | None:
    return None if path is None else os.fsencode(path)


def _number(names: dict[str, int], name: str, what: str) -> int:
    if name not in names:
        raise ValueError(f"{what} is {name!r}; expected one of {', '.join(names)}")
    return names[name]
