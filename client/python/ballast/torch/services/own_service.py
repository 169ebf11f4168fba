"""This process's service for optimizers without one: of all ranks of its node."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ... import outliving
from ...client import Client
from ...errors import BallastError, UnavailableError
from ...service import Exchange, Service

_lock = threading.Lock()
_living: dict[str | None, Callable[[], OwnService | None]] = {}  # By host.


class OwnService:
    """Ends with its last user, unless it outlives this process. host, exchange: see Service."""

    def __init__(self, host: str | None, exchange: Exchange):
        self.outlives = outliving.is_wanted()
        kind = outliving.OutlivingService if self.outlives else Service
        self._service, self._owner = kind(host=host, exchange=exchange), os.getpid()
        self._jobs: weakref.WeakValueDictionary[str, Kept] = weakref.WeakValueDictionary()
        self._names: set[str] = set()  # All names so far.
        self._later: list[str] = []  # Jobs to close.
        weakref.finalize(self, self._service.stop).atexit = False  # The service has its own atexit.

    @property
    def address(self) -> str:
        return self._service.address

    @property
    def address_for_others(self) -> str:
        return self._service.address_for_others

    def trust(self, exchange: Exchange) -> None:
        self._service.trust(exchange)

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

    def free_name(self, kept: Kept, job: str) -> str:
        """The job's name. If another optimizer has, or had, a job of this name, a number is added."""
        number, name = 1, job
        while name in self._names and self._jobs.get(name) is not kept:
            number += 1
            name = f"{job}-{number}"
        return name

    def left(self) -> list[dict[str, Any]]:
        """The jobs of the ranks before this one's restart, and those of this process. Each also with the service's
        address."""
        addresses = outliving.addresses() if self.outlives else []
        return [{"service": address, "members": [member["address"] for member in job["members"]],
                 **{field: job[field] for field in ("name", "uid", "phase", "committed_step", "world_size", "homes")}}
                for address in addresses for job in Client(address).jobs()]

    def close_later(self, job: str) -> None:
        """Its optimizer is gone, and perhaps this process ends: then ranks after a restart go on with the job."""
        self._later.append(job)

    def close_earlier(self) -> None:
        """This process did not end then."""
        while self._later:
            with contextlib.suppress(BallastError):  # It ends with the run.
                Client(self.address).close_job(self._later.pop(), force=True)

    def take_name(self, kept: Kept, name: str) -> None:
        self._names.add(name)
        self._jobs[name] = kept


def own_service(host: str | None, exchange: Exchange) -> OwnService:
    """The living service that listens there, or a new one. host, exchange: see Service."""
    with _lock:
        service = _living[host]() if host in _living else None
        if service is None or not service.is_here:
            service = OwnService(host, exchange)
            # One that outlives keeps the names that it has given.
            _living[host] = (lambda kept=service: kept) if service.outlives else weakref.ref(service)
        elif host is not None:
            service.trust(exchange)
        return service


@dataclasses.dataclass(eq=False)
class Kept:
    """An optimizer's state beyond one binding, also if the making of a binding is interrupted."""

    service: OwnService | None = None  # On the rank that has it: the first of each node.
    begun: bool = False  # This optimizer makes the job, and its binding has not succeeded yet.
