"""The statuses of a service as exceptions. Each is also what Python itself would raise."""

from __future__ import annotations


class BallastError(Exception):
    """One line that says what to do. `status` is the number of gRPC's status."""

    status = 2


class InvalidArgumentError(BallastError, ValueError):
    status = 3


class DeadlineError(BallastError, TimeoutError):
    status = 4


class NotFoundError(BallastError, LookupError):
    status = 5


class PermissionDeniedError(BallastError, PermissionError):
    """Who calls may not do that, or has not said who they are (status 16)."""

    status = 7


class ResourceExhaustedError(BallastError, MemoryError):
    status = 8


class FailedPreconditionError(BallastError, RuntimeError):
    status = 9


class AbortedError(BallastError, RuntimeError):
    """The session has ended, for all ranks: open it again, and do the step again."""

    status = 10


class UnavailableError(BallastError, ConnectionError):
    status = 14


_KINDS = {kind.status: kind for kind in (
    InvalidArgumentError, DeadlineError, NotFoundError, ResourceExhaustedError, FailedPreconditionError,
    AbortedError, PermissionDeniedError, UnavailableError)}
_KINDS[16] = PermissionDeniedError


def error_of(status: int, message: str) -> BallastError:
    """The exception for a status that is not 0."""
    error = _KINDS.get(status, BallastError)(message)
    error.status = status
    return error
