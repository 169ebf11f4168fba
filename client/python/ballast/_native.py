"""client/ballast.h by ctypes, which releases the GIL during each call."""

from __future__ import annotations

import concurrent.futures
import ctypes as c
import functools
import json
import os
import threading
from typing import Any, Callable, Sequence, Union

from . import _files
from .errors import BallastError, error_of

API_VERSION = 12
OK = 0
DEADLINE_EXCEEDED = 4
Services = Union[str, Sequence[str]]  # An address, several with commas between, or a list or tuple of them.


class HyperParameters(c.Structure):
    _fields_ = [("rule", c.c_int32), ("lr", c.c_double), ("beta1", c.c_double), ("beta2", c.c_double),
                ("eps", c.c_double), ("weight_decay", c.c_double), ("decoupled_weight_decay", c.c_int32),
                ("bias_correction", c.c_int32), ("amsgrad", c.c_int32), ("momentum", c.c_double),
                ("dampening", c.c_double), ("nesterov", c.c_int32), ("lr_decay", c.c_double),
                ("initial_accumulator_value", c.c_double), ("maximize", c.c_int32), ("ns_steps", c.c_int32),
                ("ns_a", c.c_double), ("ns_b", c.c_double), ("ns_c", c.c_double), ("match_rms_adamw", c.c_int32)]


class Group(c.Structure):
    _fields_ = [("size", c.c_size_t), ("name", c.c_char_p), ("hyper_parameters", HyperParameters),
                ("wire_dtype", c.c_int32), ("return_dtype", c.c_int32), ("state", c.c_int32),
                ("state_fallback", c.c_int32)]


class Parameter(c.Structure):
    _fields_ = [("size", c.c_size_t), ("name", c.c_char_p), ("shape", c.POINTER(c.c_int64)),
                ("dimensions", c.c_int32), ("group", c.c_int32), ("frozen", c.c_int32),
                ("placements", c.POINTER(c.c_int32))]


class MeshDim(c.Structure):
    _fields_ = [("size", c.c_size_t), ("name", c.c_char_p), ("ranks", c.c_int32)]


class Job(c.Structure):
    _fields_ = [("size", c.c_size_t), ("name", c.c_char_p), ("groups", c.POINTER(Group)),
                ("group_count", c.c_size_t), ("parameters", c.POINTER(Parameter)),
                ("parameter_count", c.c_size_t), ("world_size", c.c_int32),
                ("bucket_elements", c.c_int64), ("chunk_elements", c.c_int64),
                ("unused_policy", c.c_int32), ("update_mode", c.c_int32), ("max_micro_steps", c.c_uint32),
                ("mesh", c.POINTER(MeshDim)), ("mesh_dimensions", c.c_size_t), ("on_abort", c.c_int32),
                ("keep_previous", c.c_int32), ("members", c.POINTER(c.c_char_p)), ("member_count", c.c_size_t),
                ("homes", c.POINTER(c.c_int32)), ("newton_schulz", c.c_int32)]


class Options(c.Structure):
    _fields_ = [("size", c.c_size_t), ("service", c.c_char_p), ("job", c.POINTER(Job)), ("rank", c.c_int32),
                ("process_id", c.c_char_p), ("job_uid", c.c_char_p), ("rejoin", c.c_int32),
                ("never_share_memory", c.c_int32), ("join_timeout_seconds", c.c_double),
                ("reconnect_timeout_seconds", c.c_double), ("wait_seconds", c.c_double),
                ("weights", c.POINTER(c.c_void_p)), ("tls_ca", c.c_char_p), ("tls_cert", c.c_char_p),
                ("tls_key", c.c_char_p), ("token_file", c.c_char_p), ("takes_no_steps", c.c_int32),
                ("derive_from_uid", c.c_char_p), ("derive_from_checkpoint", c.c_char_p)]


class Info(c.Structure):
    _fields_ = [("size", c.c_size_t), ("committed_step", c.c_uint64), ("generation_epoch", c.c_uint64),
                ("generation", c.c_uint64), ("awaiting_weights", c.c_int32), ("shares_memory", c.c_int32),
                ("last_step_applied", c.c_int32), ("job_uid", c.c_char_p), ("directions_step", c.c_uint64)]


class Chunk(c.Structure):
    _fields_ = [("index", c.c_int32), ("group", c.c_int32), ("begin", c.c_int64), ("elements", c.c_int64)]


class Piece(c.Structure):
    _fields_ = [("parameter", c.c_size_t), ("offset", c.c_int64), ("chunk_offset", c.c_int64),
                ("elements", c.c_int64)]


class Step(c.Structure):
    _fields_ = [("size", c.c_size_t), ("loss_scale", c.c_double), ("divisors", c.POINTER(c.c_double)),
                ("hyper_parameters", c.POINTER(HyperParameters)), ("trainer_state", c.c_char_p),
                ("trainer_state_bytes", c.c_size_t), ("expected_max_norm", c.c_double),
                ("expected_multipliers", c.POINTER(c.c_double))]


class Ballot(c.Structure):
    _fields_ = [("size", c.c_size_t), ("abandon", c.c_int32), ("max_norm", c.c_double),
                ("multipliers", c.POINTER(c.c_double)), ("hyper_parameters", c.POINTER(HyperParameters)),
                ("trainer_state", c.c_char_p), ("trainer_state_bytes", c.c_size_t)]


class Norm(c.Structure):
    _fields_ = [("size", c.c_size_t), ("step", c.c_uint64), ("norm", c.c_double), ("non_finite", c.c_int32),
                ("unused_parameters", c.c_uint64)]


class Decision(c.Structure):
    _fields_ = [("size", c.c_size_t), ("step", c.c_uint64), ("applied", c.c_int32), ("norm", c.c_double),
                ("clip_coefficient", c.c_double)]


class StateWrite(c.Structure):
    _fields_ = [("size", c.c_size_t), ("parameters", c.POINTER(c.c_size_t)), ("count", c.c_size_t),
                ("planes", c.POINTER(c.c_int32)), ("plane_count", c.c_size_t),
                ("update_counts", c.POINTER(c.c_int64)), ("timeout_seconds", c.c_double)]


class GradientPlace(c.Structure):
    _fields_ = [("data", c.c_void_p), ("offset", c.c_int64), ("elements", c.c_int64)]


class GradientTicket(c.Structure):
    _fields_ = [("session", c.c_void_p), ("parameter", c.c_size_t), ("attempt", c.c_uint64), ("final", c.c_int32)]


# ballast_values: context, parameter, plane, offset, elements, out.
VALUES = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_size_t, c.c_int32, c.c_int64, c.c_int64, c.c_void_p)
_POINTERS = c.POINTER(c.c_void_p)
_FUNCTIONS = {
    "ballast_open": [c.POINTER(Options), _POINTERS],
    "ballast_get_info": [c.c_void_p, c.POINTER(Info)],
    "ballast_trainer_state": [c.c_void_p, c.c_char_p, c.c_size_t, c.POINTER(c.c_size_t)],
    "ballast_chunks": [c.c_void_p, c.POINTER(Chunk), c.c_size_t, c.POINTER(c.c_size_t)],
    "ballast_pieces": [c.c_void_p, c.c_int32, c.POINTER(Piece), c.c_size_t, c.POINTER(c.c_size_t)],
    "ballast_upload_weights": [c.c_void_p, _POINTERS, c.c_size_t],
    "ballast_write_state": [c.c_void_p, c.POINTER(StateWrite), VALUES, c.c_void_p],
    "ballast_upload_by": [c.c_void_p, c.c_uint64, c.POINTER(c.c_int64), c.c_size_t, VALUES, c.c_void_p],
    "ballast_read_weights": [c.c_void_p],
    "ballast_gradient_memory": [c.c_void_p, c.c_int32, _POINTERS, c.POINTER(c.c_size_t)],
    "ballast_begin_step": [c.c_void_p, c.POINTER(Step)],
    "ballast_push_gradients": [c.c_void_p, c.c_uint32, _POINTERS, c.c_size_t, c.c_int32],
    "ballast_give_gradient": [c.c_void_p, c.c_uint32, c.c_size_t, c.c_void_p, c.c_int32],
    "ballast_end_gradients": [c.c_void_p, c.c_uint32, c.c_int32],
    "ballast_gradient_places": [c.c_void_p, c.c_uint32, c.c_size_t, c.POINTER(GradientPlace), c.c_size_t,
                                c.POINTER(c.c_size_t), c.POINTER(c.c_uint64)],
    "ballast_report_number": [c.c_void_p, c.c_char_p, c.c_double],
    "ballast_report_seconds": [c.c_void_p, c.c_double, c.c_double, c.c_double, c.c_double],
    "ballast_seal": [c.c_void_p, c.c_uint32, c.POINTER(Norm), c.POINTER(c.c_double), c.c_size_t],
    "ballast_unused": [c.c_void_p, c.POINTER(c.c_size_t), c.c_size_t, c.POINTER(c.c_size_t)],
    "ballast_vote": [c.c_void_p, c.POINTER(Ballot), c.POINTER(Decision)],
    "ballast_seal_and_vote": [c.c_void_p, c.c_uint32, c.POINTER(Ballot), c.POINTER(Decision)],
    "ballast_discard": [c.c_void_p],
    "ballast_read_directions": [c.c_void_p, _POINTERS, c.c_size_t, c.POINTER(HyperParameters), c.POINTER(c.c_int32)],
    "ballast_give_orthogonal": [c.c_void_p, _POINTERS, c.c_size_t],
    "ballast_receive_weights": [c.c_void_p],
    "ballast_await_weights": [c.c_void_p, c.POINTER(c.c_size_t), c.c_size_t],
    "ballast_save": [c.c_void_p, c.c_char_p],
    "ballast_load": [c.c_void_p, c.c_char_p],
    "ballast_undo": [c.c_void_p, c.POINTER(c.c_uint64)],
    "ballast_find_services": [c.POINTER(Options), c.POINTER(c.c_char_p)],
    "ballast_make_identity": [c.c_char_p, c.POINTER(c.c_char_p), c.POINTER(c.c_char_p)],
    "ballast_call": [c.POINTER(Options), c.c_char_p, c.c_char_p, c.POINTER(c.c_char_p)],
    "ballast_read_state": [c.POINTER(Options), c.c_char_p, c.c_int32, c.c_void_p, c.c_int64, c.POINTER(c.c_uint64),
                           c.POINTER(c.c_int64)],
}


def sized(structure, **values):
    """A structure with its size and these values."""
    return structure(size=c.sizeof(structure), **values)


def pointers(addresses: list[int | None]):
    """An array of pointers; 0 and None are null."""
    return (c.c_void_p * len(addresses))(*addresses)


@functools.lru_cache(maxsize=None)
def library() -> c.CDLL:
    path = _files.library()
    loaded = c.CDLL(path)
    version = loaded.ballast_api_version()
    if version != API_VERSION:
        raise BallastError(f"{path} speaks version {version} of the interface, this package version "
                           f"{API_VERSION}; install both from the same release")
    loaded.ballast_message.restype = loaded.ballast_reason.restype = c.c_char_p
    loaded.ballast_close.argtypes = [c.c_void_p]
    loaded.ballast_close.restype = None
    for name, arguments in _FUNCTIONS.items():
        getattr(loaded, name).argtypes = arguments
        getattr(loaded, name).restype = c.c_int32
    return loaded


def address_of(function: str) -> int:
    """The address of a library function, for callers without Python."""
    return c.cast(getattr(library(), function), c.c_void_p).value


def message() -> str:
    """The message of this thread's last call that had one."""
    return library().ballast_message().decode(errors="replace")


def raised(status: int) -> BallastError:
    """The exception for a status, not OK, that this thread's last call returned."""
    return error_of(status, message(), library().ballast_reason().decode())


def call(name: str, *arguments) -> None:
    """Raises an exception if the function does not return OK."""
    status = getattr(library(), name)(*arguments)
    if status != OK:
        raise raised(status)


def call_service(options: Options, method: str, request: dict[str, Any]) -> Any:
    """A call without a session, "JobService/GetJob", and its answer; both as JSON of the messages of
    proto/ballast/v1."""
    answer = c.c_char_p()
    call("ballast_call", c.byref(options), method.encode(), json.dumps(request).encode(), c.byref(answer))
    return json.loads(answer.value)


def find_services(options: Options) -> str:
    """The services of options.job in the cluster options.service: "a:7070,b:7070"."""
    services = c.c_char_p()
    call("ballast_find_services", c.byref(options), c.byref(services))
    return services.value.decode()


def make_identity(host: str) -> tuple[str, str]:
    """A certificate, and its key, of a service that is reached at this IP address."""
    certificate, key = c.c_char_p(), c.c_char_p()
    call("ballast_make_identity", host.encode(), c.byref(certificate), c.byref(key))
    return certificate.value.decode(), key.value.decode()


def services_of(service: Services) -> str:
    """As the library takes them: with commas between, without spaces. TypeError if it is no Services."""
    addresses = service.split(",") if isinstance(service, str) else service
    is_list = isinstance(addresses, (list, tuple)) and len(addresses) > 0
    if not is_list or not all(isinstance(address, str) for address in addresses):
        raise TypeError(f"service is {service!r}; expected an address, such as \"host:7070\", or a list of addresses")
    return ",".join(address.strip() for address in addresses)


def service_options(service: Services, timeout: float, wait: float, tls_ca: str | None, tls_cert: str | None,
                    tls_key: str | None, token_file: str | None, **more) -> Options:
    """timeout: of one call. wait: how long a read-only call is retried. Files as in ballast.connect."""
    def path(file):
        return None if file is None else os.fsencode(file)

    return sized(Options, service=services_of(service).encode(), wait_seconds=timeout,
                 reconnect_timeout_seconds=wait, tls_ca=path(tls_ca), tls_cert=path(tls_cert), tls_key=path(tls_key),
                 token_file=path(token_file), **more)


def in_thread(running: concurrent.futures.Future, work: Callable[[], Any], kept: object = None) -> None:
    """Makes a long call, without slices, in a thread, so that Python sees signals meanwhile. `running` gets its
    result or exception. The interpreter does not exit before the call ends by its own time limit, because the
    library must not be interrupted. Until then the thread keeps `kept` alive."""
    def run(_kept=kept):
        if not running.set_running_or_notify_cancel():
            return
        try:
            running.set_result(work())
        except BaseException as error:
            running.set_exception(error.with_traceback(None))  # The traceback would keep alive what this keeps.

    threading.Thread(target=run).start()
