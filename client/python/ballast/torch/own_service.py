"""This process's service for optimizers without one."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref

from ..errors import UnavailableError
from ..service import Service

_lock = threading.Lock()
_living: weakref.ref[OwnService] | None = None


class OwnService:
    """Ends with its last user."""

    def __init__(self):
        self._service, self._owner = Service(), os.getpid()
        self._jobs: weakref.WeakValueDictionary[str, Kept] = weakref.WeakValueDictionary()
        self._names: set[str] = set()  # All names so far.
        weakref.finalize(self, self._service.stop).atexit = False  # The service has its own atexit.

    @property
    def address(self) -> str:
        return self._service.address

    @property
    def pid(self) -> int:
        return self._service.pid

    @property
    def is_here(self) -> bool:
        """Whether it lives, and this process is not a fork of the starting one."""
        return os.getpid() == self._owner and self._service.ended is None

    def has_others(self, kept: Kept) -> bool:
        return any(other is not kept for other in self._jobs.values())

    def check(self) -> None:
        """UnavailableError if it has ended."""
        why = self._service.ended
        if why is not None:
            raise UnavailableError("the service that was started for this run has ended, and its jobs with it "
                                   f"({why}): load a state into another optimizer")

    def name_for(self, kept: Kept, job: str) -> str:
        """The job's name. If another optimizer has, or had, a job of this name, a number is added."""
        number, name = 1, job
        while name in self._names and self._jobs.get(name) is not kept:
            number += 1
            name = f"{job}-{number}"
        self._names.add(name)
        self._jobs[name] = kept
        return name


def own_service() -> OwnService:
    """The living service, or a new one."""
    global _living
    with _lock:
        service = _living() if _living is not None else None
        if service is None or not service.is_here:
            service = OwnService()
            _living = weakref.ref(service)
        return service


@dataclasses.dataclass(eq=False)
class Kept:
    """An optimizer's state beyond one binding, also if the making of a binding is interrupted."""

    service: OwnService | None = None  # On the rank that has it.
    begun: bool = False  # This optimizer makes the job, and its binding has not succeeded yet.
