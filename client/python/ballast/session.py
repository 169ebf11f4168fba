"""A rank's session with its job, with whole parameters at addresses in this process."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _native
from .errors import AbortedError, BallastError, DeadlineError, FailedPreconditionError, UnavailableError
from .rules import ADJUST_LR_FNS, PARTS, RULES, check_has

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
UNUSED_POLICIES = {"error": 0, "skip": 1, "zero": 2}
UPDATE_MODES = {"wait": 0, "speculate": 1}
ON_ABORT = {"redo": 0, "skip": 1}
NEWTON_SCHULZ = {"service": 0, "workers": 1}
STATES = {"fp32": 0, "bf16": 1, "8bit": 2}  # Formats of a group's state.
PLANES = {"master": 1, "exp_avg": 2, "exp_avg_sq": 3, "max_exp_avg_sq": 4, "momentum_buffer": 5, "sum": 6}
_REPLICATE = -1
# Errors that the library keeps and raises in every later call of the session.
_FINAL = (AbortedError, UnavailableError)
_CLOSE_SECONDS = 300.0  # How long the service may take to free a job's memory.
# A wait in the library lasts no longer, so that Python can handle signals.
_SLICE_SECONDS = 0.1
_SLICE_IN_WORDS = re.compile(r"\b(within|for) 100ms\b")  # The library's words for that.


@dataclasses.dataclass(frozen=True)
class HyperParameters:
    """A param group's, named as in torch.optim; see `client/ballast.h`. rule: "adam" (also AdamW), "sgd", "lion",
    "adagrad", "signsgd" or "muon". What is not given has the rule's default (`ballast.rules`); for "adam" that of AdamW. What a
    rule does not have is None. ValueError: it was given, or there is no such rule."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    decoupled_weight_decay: bool | None = None
    bias_correction: bool | None = None
    amsgrad: bool | None = None
    maximize: bool | None = None
    rule: str = "adam"
    momentum: float | None = None
    dampening: float | None = None
    nesterov: bool | None = None
    lr_decay: float | None = None
    initial_accumulator_value: float | None = None
    ns_coefficients: tuple[float, float, float] | None = None
    ns_steps: int | None = None
    adjust_lr_fn: str | None = None

    def __post_init__(self):
        check_has(self.rule, {name for name, value in vars(self).items() if value is not None and name != "rule"})
        for name, default in RULES[self.rule].defaults.items():
            value = default if getattr(self, name) is None else getattr(self, name)
            if name in PARTS:
                value = tuple(map(float, value))
            elif default is not None:
                value = type(default)(value)
            object.__setattr__(self, name, value)
        if self.adjust_lr_fn not in ADJUST_LR_FNS:
            raise ValueError(f"adjust_lr_fn is {self.adjust_lr_fn!r}; expected one of {ADJUST_LR_FNS}")

    def __str__(self) -> str:
        return f"{self.rule} " + " ".join(f"{name}={value}" for name, value in self.fields().items())

    @property
    def planes(self) -> dict[str, float]:
        """The planes of a parameter beside "master", and what each holds before the first update."""
        return RULES[self.rule].planes(vars(self))

    def fields(self) -> dict[str, float | bool]:
        """The rule's, as the service names them."""
        values = {name: getattr(self, name) for name in RULES[self.rule].defaults}
        for name, parts in PARTS.items():
            if name in values:
                values.update(zip(parts, values.pop(name), strict=True))
        if "adjust_lr_fn" in values:
            values["match_rms_adamw"] = values.pop("adjust_lr_fn") == "match_rms_adamw"
        return values

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> HyperParameters:
        """From the rule, and its fields."""
        values = dict(fields)
        for name, parts in PARTS.items():
            if parts[0] in values:
                values[name] = tuple(values.pop(part) for part in parts)
        if "match_rms_adamw" in values:
            values["adjust_lr_fn"] = "match_rms_adamw" if values.pop("match_rms_adamw") else "original"
        return cls(**values)

    def _native(self) -> _native.HyperParameters:
        return _native.HyperParameters(rule=RULES[self.rule].number, **self.fields())

    @classmethod
    def _of_native(cls, given: _native.HyperParameters) -> HyperParameters:
        rule = next(name for name, row in RULES.items() if row.number == given.rule)
        return cls.of_fields({"rule": rule, **{name: getattr(given, name) for name in cls(rule=rule).fields()}})


@dataclasses.dataclass(frozen=True)
class Group:
    """wire_dtype: of gradients to the service. return_dtype: of weights back. "float32", "bfloat16" or "float16".
    state: how the service stores the state, "fp32", "bf16" or "8bit". state_fallback: parameters whose shards cut their
    groups of 64 elements are in fp32, not refused."""

    name: str
    hyper_parameters: HyperParameters
    wire_dtype: str = "float32"
    return_dtype: str = "float32"
    state: str = "fp32"
    state_fallback: bool = False


@dataclasses.dataclass(frozen=True)
class Parameter:
    """group: the index of its group in the job. A frozen parameter is never updated. placements, in a job with a
    mesh: for each dimension of the mesh the dimension of the parameter that it cuts, or None. A frozen parameter has
    none."""

    name: str
    shape: tuple[int, ...]
    group: int = 0
    frozen: bool = False
    placements: tuple[int | None, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    """unused_policy, for parameters without a gradient from any rank: "error", "skip" (as torch does) or "zero".
    update_mode: "wait" or "speculate". on_abort, for lost steps: "redo" (sessions end with ABORTED) or "skip".
    keep_previous: allows `Session.undo`; the service keeps one more version of all state. newton_schulz: who
    orthogonalizes the directions of groups with the rule "muon": "service" or "workers" (`Session.read_directions`).
    mesh: names and sizes of its dimensions, ranks in row-major order. With a mesh each rank has a shard of every
    parameter, and all addresses are those of its shards. members: addresses of the services that hold the job together, as they reach each other.
    homes: by rank, the index of the member that holds its part."""

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
    members: Sequence[str] = ()
    homes: Sequence[int] = ()
    newton_schulz: str = "service"

    def lead(self, rank: int, service: str) -> str:
        """Where this rank, which reaches its home at `service`, reaches the member that leads: rank 0's home."""
        return self.members[self.homes[0]] if self.members and self.homes[rank] != self.homes[0] else service

    def _native(self) -> _native.Job:
        groups = (_native.Group * len(self.groups))(*[
            _native.sized(_native.Group, name=group.name.encode(), hyper_parameters=group.hyper_parameters._native(),
                          wire_dtype=number_of(DTYPES, group.wire_dtype, "wire_dtype"),
                          return_dtype=number_of(DTYPES, group.return_dtype, "return_dtype"),
                          state=number_of(STATES, group.state, "state"), state_fallback=group.state_fallback)
            for group in self.groups])
        parameters = (_native.Parameter * len(self.parameters))(*[
            _native.sized(_native.Parameter, name=parameter.name.encode(),
                          shape=(ctypes.c_int64 * len(parameter.shape))(*parameter.shape),
                          dimensions=len(parameter.shape), group=parameter.group, frozen=parameter.frozen,
                          placements=_native_placements(parameter, len(self.mesh)))
            for parameter in self.parameters])
        mesh = (_native.MeshDim * len(self.mesh))(*[
            _native.sized(_native.MeshDim, name=name.encode(), ranks=ranks) for name, ranks in self.mesh])
        return _native.sized(
            _native.Job, name=self.name.encode(), groups=groups, group_count=len(self.groups),
            parameters=parameters, parameter_count=len(self.parameters), world_size=self.world_size,
            unused_policy=number_of(UNUSED_POLICIES, self.unused_policy, "unused_policy"),
            update_mode=number_of(UPDATE_MODES, self.update_mode, "update_mode"),
            max_micro_steps=self.max_micro_steps, mesh=mesh, mesh_dimensions=len(self.mesh),
            on_abort=number_of(ON_ABORT, self.on_abort, "on_abort"), keep_previous=self.keep_previous,
            newton_schulz=number_of(NEWTON_SCHULZ, self.newton_schulz, "newton_schulz"),
            members=(ctypes.c_char_p * len(self.members))(*[address.encode() for address in self.members]),
            member_count=len(self.members), homes=(ctypes.c_int32 * len(self.homes))(*self.homes))


@dataclasses.dataclass(frozen=True)
class Decision:
    """A step's decision. norm: of the unscaled gradient over all groups. skip_reason: why nothing changed; "" if the
    step was applied."""

    step: int
    applied: bool
    norm: float
    clip_coefficient: float
    skip_reason: str


@dataclasses.dataclass(frozen=True)
class Norm:
    """The norm of the unscaled gradient in a step that all ranks have sealed. non_finite names the first non-finite
    element; "" if all are finite. unused_parameters: the number of parameters without a gradient from any rank;
    unused_names has the first 64."""

    step: int
    norm: float
    group_norms: tuple[float, ...]
    non_finite: str
    unused_parameters: int
    unused_names: tuple[str, ...] = ()


def find_services(service: str, job: Job, timeout: float, **credentials: str | None) -> str:
    """For one rank, which tells the others: the services of the job in a cluster ("etcd://HOST:PORT/PREFIX"), as
    `Session` takes them. Those of the job's record; for a new job the fewest that have room, or as many as "?members=N"
    or "?members=all" says. ResourceExhaustedError: none have. NotFoundError: no service is registered."""
    files = {name: credentials.get(name) for name in ("tls_ca", "tls_cert", "tls_key", "token_file")}
    return _native.find_services(_native.service_options(service, timeout, timeout, **files,
                                                         job=ctypes.pointer(job._native())))


class Session:
    """A rank of a job on the service at `service` ("host:port" or "unix:/path"). Several services hold a job
    together: "a:7070,b:7070" or a list, the same on all ranks. Each gets consecutive ranks in even shares. If the job
    has members, `service` is how this rank reaches its home.

    weights: the addresses at which each parameter's weights are written, row-major in the group's return dtype. Only
    elements that this rank owns are written. The memory must stay until `close`; the session keeps `memory` for that.

    while_waiting is called about every 0.1 s while a call waits for other ranks or for the service. If it raises an
    exception, the wait and the session end.

    derive_from_uid: the job continues from the state of the job with the same name and this uid, with other
    parameters. Parameters of the same name and shape keep weights, moments and update counts; `upload_weights` sends
    the others. All ranks give the same uid. Once all weights have arrived, the new job replaces the other one
    atomically. NotFoundError: the other job has changed meanwhile, or is gone. derive_from_checkpoint: the state
    comes from this checkpoint, as in `load`.

    takes_steps: False for a session that only uploads weights, saves or loads.

    tls_ca, tls_cert, tls_key, token_file: files, as in `ballast.connect`.

    Raises the errors of `ballast.errors`. Calls come one at a time, from any thread."""

    def __init__(self, service: _native.Services, job: Job, weights: Sequence[int | None], *, rank: int = 0,
                 job_uid: str | None = None, derive_from_uid: str | None = None,
                 derive_from_checkpoint: str | None = None, rejoin: bool = False, share_memory: bool = True,
                 join_timeout: float = 60.0, reconnect_timeout: float = 60.0, timeout: float = 600.0,
                 while_waiting: Callable[[], None] | None = None, takes_steps: bool = True, memory: object = None,
                 tls_ca: str | None = None, tls_cert: str | None = None, tls_key: str | None = None,
                 token_file: str | None = None):
        if len(weights) != len(job.parameters):
            raise ValueError(f"{len(weights)} addresses were given for {len(job.parameters)} parameters")
        if len(job.homes) != (job.world_size if job.members else 0):
            raise ValueError(f"{len(job.homes)} homes were given for {job.world_size} ranks on {len(job.members)} members")
        self.job, self.rank, self.timeout, self._memory = job, rank, timeout, memory
        self._handle = ctypes.c_void_p()
        self._give = _native.library().ballast_give_gradient
        self._lock = threading.Lock()
        self._abandoned: concurrent.futures.Future | None = None  # The running call of `_patiently`.
        self._failed = False
        self._calling = False
        self._parts = 0  # Parts that have begun and not ended.
        self._while_waiting = while_waiting or (lambda: None)
        files = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key, "token_file": token_file}
        self._service = _native.service_options(job.lead(rank, service), max(reconnect_timeout, _CLOSE_SECONDS), reconnect_timeout,
                                                **files)
        options = _native.service_options(
            service, _SLICE_SECONDS, reconnect_timeout, **files, job=ctypes.pointer(job._native()), rank=rank,
            job_uid=None if job_uid is None else job_uid.encode(), rejoin=rejoin,
            derive_from_uid=None if derive_from_uid is None else derive_from_uid.encode(),
            derive_from_checkpoint=None if derive_from_checkpoint is None else derive_from_checkpoint.encode(),
            never_share_memory=not share_memory, join_timeout_seconds=join_timeout,
            weights=_native.pointers(list(weights)), takes_no_steps=not takes_steps)
        # Closes before a service that this process started, because that was registered earlier.
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        try:
            self._patiently("ballast_open", ctypes.byref(options), ctypes.byref(self._handle))
        except BaseException:
            self.close()  # If it is open already, it would keep the rank.
            raise

    def close(self, *, wait: bool = False) -> None:
        """Ends the session; the job stays. Closing again has no effect. If Ctrl-C has interrupted a call, a thread
        closes the session after that call. wait: wait for such a call first; until then it may write weights."""
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
            _native.library().ballast_close(handle)  # An interrupted open may have set it only now.

        # No caller waits any more, and a session must not be closed during a call.
        threading.Thread(target=close_later).start()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        if getattr(self, "_handle", None):
            self.close()

    # ------------------------------------------------------------ properties

    @property
    def ended(self) -> bool:
        """Whether no call can succeed any more: open another session."""
        return self._failed or self._abandoned is not None or not self._handle

    @property
    def torn(self) -> bool:
        """Whether an exception from elsewhere, such as Ctrl-C, has ended a `part` or a call. Its effect is unknown,
        and another session has to continue."""
        return not self._failed and (self._parts > 0 or self._abandoned is not None)

    @contextlib.contextmanager
    def part(self):
        """Around calls and the caller's notes of them, which belong together."""
        self._parts += 1
        try:
            yield
        except BallastError:
            self._parts -= 1
            raise
        self._parts -= 1  # Not after other exceptions: Ctrl-C may come between any two instructions.

    @property
    def committed_step(self) -> int:
        return self._info().committed_step

    @property
    def directions_step(self) -> int:
        """Not 0: the directions of this step are to be orthogonalized. If it is so when a session was opened:
        read_directions, give_orthogonal and receive_weights, before anything else. Then committed_step is the step."""
        return self._info().directions_step

    @property
    def generation(self) -> tuple[int, int]:
        """The job's, when this session was opened: (epoch, count). Once the job has a higher one, the session is
        over."""
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
        """The trainer's state of the last committed step when the session was opened."""
        return self._list(ctypes.c_char, "ballast_trainer_state").raw

    def owned_elements(self) -> list[int]:
        """The number of elements of each parameter that this rank owns. It gives their gradients and gets their
        weights."""
        owned = [0] * len(self.job.parameters)
        for chunk in self._list(_native.Chunk, "ballast_chunks"):
            for piece in self._list(_native.Piece, "ballast_pieces", chunk.index):
                owned[piece.parameter] += piece.elements
        return owned

    # ------------------------------------------------------------ calls

    def upload_weights(self, addresses: Sequence[int | None], *, memory: object = None) -> None:
        """Uploads the first weights of the elements that this rank owns, from fp32 at these addresses. memory: kept
        alive as long as it is read, also if this call is interrupted."""
        self._patiently("ballast_upload_weights", self._open(), _native.pointers(list(addresses)), len(addresses),
                        keep=memory)

    def upload_by(self, write: Callable[[int, str, int, int, int], None], *, step: int = 0,
                  update_counts: Sequence[int] = ()) -> None:
        """Uploads the first weights of the elements that this rank owns, for values that are not all in memory at
        once. With a step it uploads the first state, with moments. write(parameter, plane, offset, elements,
        address) writes elements [offset, offset + elements) of this rank's part of the parameter to the address,
        row-major in fp32. Another thread calls it, in the order of declaration, and again for the part that a broken
        connection has lost. If it raises an exception, the upload ends with that."""
        counts = (ctypes.c_int64 * len(update_counts))(*update_counts)
        self._by_values(write, "ballast_upload_by", step, counts, len(counts))

    def write_state(self, parameters: Sequence[int], planes: Sequence[str],
                    write: Callable[[int, str, int, int, int], None], *,
                    update_counts: Sequence[int] | None = None) -> None:
        """Writes these planes of these parameters between two steps. All ranks make the same call. It returns when
        the write is the job's state. write: as in upload_by. update_counts: one for each parameter; None: no change.
        The last step cannot be undone afterwards. FailedPreconditionError: another rank writes something else, or
        has begun the next step. InvalidArgumentError: a value is not finite, or one of exp_avg_sq, max_exp_avg_sq or
        sum is negative. ResourceExhaustedError: the values do not fit beside the state. DeadlineError, after
        `timeout`, names the missing ranks."""
        order = sorted(range(len(parameters)), key=parameters.__getitem__)
        numbers = sorted(number_of(PLANES, plane, "plane") for plane in planes)
        given = _native.sized(_native.StateWrite, count=len(order), plane_count=len(numbers),
                              timeout_seconds=self.timeout,
                              parameters=(ctypes.c_size_t * len(order))(*[parameters[i] for i in order]),
                              planes=(ctypes.c_int32 * len(numbers))(*numbers))
        if update_counts is not None:
            given.update_counts = (ctypes.c_int64 * len(order))(*[update_counts[i] for i in order])
        self._by_values(write, "ballast_write_state", ctypes.byref(given))

    def _by_values(self, write: Callable[[int, str, int, int, int], None], name: str, *arguments) -> None:
        """Makes a call that asks for values. Raises what `write` raises."""
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
        """Reads the committed weights into the addresses given at the start."""
        self._patiently("ballast_read_weights", self._open())

    def begin_step(self, hyper_parameters: Sequence[HyperParameters] | None = None, *, loss_scale: float = 1.0,
                   divisors: Sequence[float] | None = None, trainer_state: bytes = b"",
                   expected_max_norm: float = 0.0, expected_multipliers: Sequence[float] | None = None) -> None:
        """hyper_parameters and divisors: one for each group; None: no change, and 1. expected_max_norm or
        expected_multipliers: the expected clipping in the vote; it affects only speed."""
        self._call("ballast_begin_step", ctypes.byref(_native.sized(
            _native.Step, loss_scale=loss_scale, trainer_state=trainer_state, trainer_state_bytes=len(trainer_state),
            expected_max_norm=expected_max_norm, **self._by_group(hyper_parameters, divisors=divisors,
                                                                  expected_multipliers=expected_multipliers))))

    def push_gradients(self, addresses: Sequence[int | None], micro_step: int = 0, *, final: bool = False) -> None:
        """Gives a micro-step's gradients, row-major in the groups' wire dtypes; None: no gradient for that
        parameter. The memory may be reused when this returns. final: it is the step's last micro-step; the service
        then begins its work before the seal."""
        self._wait("ballast_push_gradients", micro_step, _native.pointers(list(addresses)), len(addresses), final)

    def give_gradient(self, parameter: int, address: int | None, micro_step: int = 0, *, final: bool = False) -> None:
        """The same for one parameter. Each chunk that it completes is sent at once. `final` is the same in all calls
        of a micro-step. address None: the gradient has been written to its `gradient_places`. From any thread."""
        # Does what _wait does. This call comes for each parameter in each backward, and seldom waits.
        self._calling = True
        try:
            status = self._give(self._open(), micro_step, parameter, address, final)
        finally:
            self._calling = False
        if status == _native.DEADLINE_EXCEEDED:
            self._while_waiting()
            self._wait("ballast_give_gradient", micro_step, parameter, address, final)
        elif status != _native.OK:
            error = _native.raised(status)
            self._failed = self._failed or isinstance(error, _FINAL)
            raise error

    def gradient_places(self, parameter: int, micro_step: int = 0) -> tuple[list[tuple[int, int, int]], int]:
        """Where to copy a gradient from elsewhere, for example from a GPU: (address, offset, elements) of each part,
        in the group's wire dtype. Also the attempt, for its ticket."""
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
        alive until then."""
        return _native.GradientTicket(session=self._open().value, parameter=parameter)

    def gradient_memories(self) -> list[tuple[int, int]]:
        """(address, bytes) of all memory for gradients that is shared with the service."""
        memories = []
        for chunk in self._list(_native.Chunk, "ballast_chunks"):
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
        """For people who look at the job (its history, metrics, page): goes with the next seal or vote, and affects
        no decision. numbers: at most 16, with names of 1 to 64 letters, digits, ".", "_", "/" and "-". The lowest
        rank that reports any counts. seconds: how this rank spent its time from its last seal, or its start, to the
        next: computing, waiting for collectives, giving gradients, waiting for the decision and the weights."""
        for name, value in (numbers or {}).items():
            self._call("ballast_report_number", name.encode(), value)
        if seconds is not None:
            self._call("ballast_report_seconds", *seconds)

    def seal(self, micro_steps: int = 1) -> Norm:
        """Waits for all ranks. The step is undecided until all of them vote."""
        groups = len(self.job.groups)
        norm, group_norms = _native.sized(_native.Norm), (ctypes.c_double * groups)()
        self._wait("ballast_seal", micro_steps, ctypes.byref(norm), group_norms, groups)
        non_finite = _native.message() if norm.non_finite else ""
        return Norm(step=norm.step, norm=norm.norm, group_norms=tuple(group_norms), non_finite=non_finite,
                    unused_parameters=norm.unused_parameters,
                    unused_names=tuple(self.job.parameters[index].name for index in self._list(ctypes.c_size_t, "ballast_unused")))

    def vote(self, *, apply: bool = True, max_norm: float = 0.0, multipliers: Sequence[float] | None = None,
             hyper_parameters: Sequence[HyperParameters] | None = None,
             trainer_state: bytes | None = None) -> Decision:
        """Decides about the sealed step; waits for all ranks, which must vote the same. max_norm: clip the gradient
        to this global norm; 0: no clipping. Or multipliers, one for each group. hyper_parameters (one for each
        group) and trainer_state replace those of begin_step."""
        return self._decide("ballast_vote", (), apply, max_norm, multipliers, hyper_parameters, trainer_state)

    def seal_and_vote(self, micro_steps: int = 1, *, apply: bool = True, max_norm: float = 0.0,
                      multipliers: Sequence[float] | None = None,
                      hyper_parameters: Sequence[HyperParameters] | None = None,
                      trainer_state: bytes | None = None) -> Decision:
        """`seal` and `vote` at once, without the norm and its round trip."""
        return self._decide("ballast_seal_and_vote", (micro_steps,), apply, max_norm, multipliers, hyper_parameters,
                            trainer_state)

    def _decide(self, call, arguments, apply, max_norm, multipliers, hyper_parameters, trainer_state) -> Decision:
        ballot = _native.sized(_native.Ballot, abandon=not apply, max_norm=max_norm, trainer_state=trainer_state,
                               trainer_state_bytes=len(trainer_state or b""),
                               **self._by_group(hyper_parameters, multipliers=multipliers))
        decision = _native.sized(_native.Decision)
        self._wait(call, *arguments, ctypes.byref(ballot), ctypes.byref(decision))
        applied = bool(decision.applied)
        return Decision(step=decision.step, applied=applied, norm=decision.norm,
                        clip_coefficient=decision.clip_coefficient,
                        skip_reason="" if applied else _native.message())

    def _by_group(self, hyper_parameters: Sequence[HyperParameters] | None,
                  **numbers: Sequence[float] | None) -> dict[str, Any]:
        """Arrays with one entry for each group, without those that are None. ValueError for another length."""
        native = hyper_parameters and [values._native() for values in hyper_parameters]
        arrays, groups = {}, len(self.job.groups)
        for name, values in {"hyper_parameters": native, **numbers}.items():
            if values is not None and len(values) != groups:
                raise ValueError(f"{len(values)} {name} were given for {groups} groups")
            if values is not None:
                arrays[name] = ((ctypes.c_double if name in numbers else _native.HyperParameters) * groups)(*values)
        return arrays

    def discard(self) -> None:
        """Takes back what this rank has given in its attempt at the step. begin_step begins the next attempt. All
        ranks have to discard equally often, each at any time, before one can seal."""
        self._wait("ballast_discard")

    def read_directions(self, addresses: Sequence[int | None]) -> list[HyperParameters]:
        """In a job with newton_schulz "workers", after each applied decision and before `receive_weights`. Waits for
        the directions of parameters with the rule "muon", and writes this rank's elements of them to the addresses,
        row-major in bfloat16; None for parameters of other rules. Ranks put matrices together from their elements, and
        orthogonalize them. Returns the step's hyper-parameters, by group of the job: O is made with them. Empty:
        nothing is to be given, because the step changes no matrix, or an operator has ended the round."""
        wanted = ctypes.c_int32()
        values = (_native.HyperParameters * len(self.job.groups))()
        self._wait("ballast_read_directions", _native.pointers(list(addresses)), len(addresses), values,
                   ctypes.byref(wanted))
        return [HyperParameters._of_native(of_group) for of_group in values] if wanted.value else []

    def give_orthogonal(self, addresses: Sequence[int | None]) -> None:
        """What became of the directions: this rank's elements, in bfloat16. The memory may be reused afterwards."""
        self._wait("ballast_give_orthogonal", _native.pointers(list(addresses)), len(addresses))

    def receive_weights(self) -> None:
        """Returns when this rank's weights of the decided step are in place."""
        self._wait("ballast_receive_weights")

    def await_weights(self, parameters: Sequence[int]) -> None:
        """Returns when the weights of these parameters in the decided step are in place. Others may still arrive.
        `receive_weights` is still needed to end the step."""
        self._wait("ballast_await_weights", (ctypes.c_size_t * len(parameters))(*parameters), len(parameters))

    def save(self, directory: str) -> None:
        """Saves between steps, to a directory on the service's host."""
        self._patiently("ballast_save", self._open(), directory.encode())

    def load(self, directory: str) -> None:
        """Loads from such a directory. It ends the sessions of all ranks, including this one."""
        self._patiently("ballast_load", self._open(), directory.encode())

    def close_job(self) -> None:
        """Closes the job of all ranks and deletes its state: `save` it first. It ends the sessions of all ranks."""
        self._open()
        self._patiently(_native.call_service, self._service, "JobService/CloseJob",
                        {"name": f"jobs/{self.job.name}", "uid": self.job_uid})

    def undo(self) -> int:
        """Undoes the last committed step of a job with keep_previous, exactly, and returns its number. It ends the
        sessions of all ranks, including this one; reopened sessions are at the step before. FailedPreconditionError:
        a rank has begun the next step, or no step can be undone, because only one can."""
        step = ctypes.c_uint64()
        self._patiently("ballast_undo", self._open(), ctypes.byref(step))
        return step.value

    def read_state(self, parameter: int, plane: str, address: int, *, memory: object = None) -> tuple[int, int]:
        """Writes a plane of a whole parameter, one of PLANES that its rule has, to the address in fp32, whichever part
        this rank owns. memory: kept alive as long as it is written to; after Ctrl-C that may
        be longer than this call. Returns the plane's step and the parameter's number of updates."""
        step, updates = ctypes.c_uint64(), ctypes.c_int64()
        elements = math.prod(self.job.parameters[parameter].shape)
        self._open()
        name = f"jobs/{self.job.name}/parameters/{self.job.parameters[parameter].name}"
        self._patiently("ballast_read_state", ctypes.byref(self._service), name.encode(),
                        number_of(PLANES, plane, "plane"), address, elements, ctypes.byref(step), ctypes.byref(updates),
                        keep=memory)
        return step.value, updates.value

    # ------------------------------------------------------------ internal

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

    def _patiently(self, call: str | Callable[..., Any], *arguments, keep: object = None) -> None:
        """Makes a call that may wait long and not in slices: by name, or in this process (`_native.in_thread`). It
        also keeps the weights' memory alive."""
        running = self._abandoned = concurrent.futures.Future()
        call = functools.partial(_native.call, call) if isinstance(call, str) else call
        _native.in_thread(running, functools.partial(call, *arguments), (keep, self._memory))
        while not running.done():
            concurrent.futures.wait([running], _SLICE_SECONDS)
            if not running.done():
                self._while_waiting()
        self._abandoned = None
        try:
            running.result()
        except AbortedError:  # UNAVAILABLE affects only this call, which does not use the session's stream.
            self._failed = True
            raise
        finally:
            del running

    def _wait(self, name: str, *arguments) -> None:
        """Waits in slices, so that Python sees signals in between."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return self._call(name, *arguments)
            except DeadlineError as error:
                if time.monotonic() >= deadline:
                    raise DeadlineError(_SLICE_IN_WORDS.sub(rf"\1 {self.timeout:g} s", str(error))) from None
                self._while_waiting()

    def _list(self, kind, name: str, *which: int):
        count = ctypes.c_size_t()
        self._call(name, *which, None, 0, ctypes.byref(count))
        entries = (kind * count.value)()
        self._call(name, *which, entries, count.value, ctypes.byref(count))
        return entries

    def _info(self) -> _native.Info:
        info = _native.sized(_native.Info)
        self._call("ballast_get_info", ctypes.byref(info))
        return info


def _close_at_exit(reference: weakref.ref) -> None:
    session = reference()
    if session is not None and not session._calling:  # Otherwise a daemon thread is in the middle of a call.
        session.close()


def _native_placements(parameter: Parameter, dimensions: int):
    if parameter.placements is None:
        return None
    if len(parameter.placements) != dimensions:
        raise ValueError(f"parameter {parameter.name} has {len(parameter.placements)} placements, and the mesh "
                         f"{dimensions} dimensions")
    return (ctypes.c_int32 * dimensions)(*[_REPLICATE if dim is None else dim for dim in parameter.placements])


def number_of(names: dict[str, int], name: str, what: str) -> int:
    if name not in names:
        raise ValueError(f"{what} is {name!r}; expected one of {', '.join(names)}")
    return names[name]
