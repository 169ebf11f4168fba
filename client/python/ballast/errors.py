"""The statuses of a service as exceptions, each a subclass of the matching Python exception."""

from __future__ import annotations


class BallastError(Exception):
    """One line that says what to do. `code` is the number of gRPC's status. `reason` is the name in ErrorReason
    (proto/ballast/v1/jobs.proto) that a program acts on, such as "NO_SUCH_JOB". If only attach() can continue with
    an optimizer, it is "INTERRUPTED" or "ENDED". Otherwise it is ""."""

    code = 2
    reason = ""


class InvalidArgumentError(BallastError, ValueError):
    code = 3


class DeadlineError(BallastError, TimeoutError):
    code = 4


class NotFoundError(BallastError, LookupError):
    code = 5


class PermissionDeniedError(BallastError, PermissionError):
    """The caller may not do that, or is not authenticated (code 16)."""

    code = 7


class ResourceExhaustedError(BallastError, MemoryError):
    code = 8


class FailedPreconditionError(BallastError, RuntimeError):
    code = 9


class AbortedError(BallastError, RuntimeError):
    """The session has ended for all ranks: open it again, and repeat the step."""

    code = 10


class UnavailableError(BallastError, ConnectionError):
    code = 14


_KINDS = {kind.code: kind for kind in (
    InvalidArgumentError, DeadlineError, NotFoundError, ResourceExhaustedError, FailedPreconditionError,
    AbortedError, PermissionDeniedError, UnavailableError)}
_KINDS[16] = PermissionDeniedError


def error_of(code: int, message: str, reason: str = "") -> BallastError:
    """The exception for a code that is not 0."""
    error = _KINDS.get(code, BallastError)(message)
    error.code, error.reason = code, reason
    return error
