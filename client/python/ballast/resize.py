"""Carries a job over to ranks that cannot continue it as it is: there are more or fewer of them, or they have other
services. A checkpoint brings its state into a new job."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from .client import Client
from .errors import BallastError, FailedPreconditionError, NotFoundError, UnavailableError, error_of
from .session import Job

_MOST_AT_ONCE = 32  # Services that are asked at the same time.
_MOST_SAVES = 3


@dataclasses.dataclass(frozen=True)
class Part:
    """A service's part of a job of the wanted name. job: as Client.jobs has it."""

    service: str
    job: dict[str, Any]


class OtherShape:
    """A job of the name of `job` whose number of ranks or services differ. To go on: `save`, `close`, and load a checkpoint into
    a new job. Called by one rank before any rank has a session."""

    def __init__(self, parts: list[Part], job: Job, services: Sequence[str], client_of: Callable[[str], Client]):
        """parts: those of the services that are to hold `job`. FailedPreconditionError: several of them have a job of
        that name, and not one continues the others; or it trains."""
        self._name, self._job, self._services, self._client_of = job.name, job, services, client_of
        newest = _newest_of(parts)
        self.part, self.uid = newest.job, newest.job["uid"]
        self._stale = [part for part in parts if part.job["uid"] != self.uid]
        # As they are reached from here, where they have answered; else as the members reach each other.
        self._holders = [member["address"] for member in self.part["members"]] or [newest.service]
        for part in parts:
            if part.job["uid"] == self.uid and part.job["members"]:
                self._holders[part.job["answering_member"]] = part.service
        self._has_weights, self._step = has_weights(self.part), None  # The step that `save` has saved.
        for part in self._stale:
            client_of(part.service).uid_of_idle(self._name, uid=part.job["uid"], in_step=True)
        why = _at_once(self._why_lost, self._holders)
        self._lost = {holder: reason for holder, reason in zip(self._holders, why) if reason}

    def _why_lost(self, holder: str) -> str:
        """Why the service does not have its part any more; "" if it has."""
        client = self._client_of(holder)
        client.wait = client.timeout  # It may be taking over its jobs, which is not bounded. So it counts as lost late.
        try:
            client.uid_of_idle(self._name, uid=self.uid, in_step=True)
        except NotFoundError:
            return "it answers, and does not have it"
        except UnavailableError as error:
            return str(error)
        return ""

    @property
    def is_whole(self) -> bool:
        """Whether no service has lost its part."""
        return not self._lost

    def save(self) -> str:
        """The name of a new checkpoint with its state; "" if it has no weights. If a service has lost its part: of the
        newest one, with a warning."""
        if not self._has_weights:
            return ""
        return self._newest_checkpoint() if self._lost else self._saved()

    def close(self) -> None:
        """Frees its memory. If a part is lost, the other ones go, so the job never decides a step again.
        FailedPreconditionError: it has trained since `save`."""
        if self._lost:
            for holder in {*self._holders} - self._lost.keys():
                self._close_part(holder, self.uid)
        else:
            lead = self._client_of(self._holders[0])
            lead.uid_of_idle(self._name, uid=self.uid, in_step=True)
            if self._step is not None and lead.job(self._name)["committed_step"] != self._step:
                raise FailedPreconditionError(f"job {self._name} has trained since it was saved at step {self._step}")
            lead.close_job(self._name, force=True, uid=self.uid)
        for part in self._stale:
            self._close_part(part.service, part.job["uid"])

    def _close_part(self, service: str, uid: str) -> None:
        with contextlib.suppress(NotFoundError):  # A service may have two addresses.
            self._client_of(service).close_job(self._name, force=True, here=True, uid=uid)

    def _saved(self) -> str:
        client = self._client_of(self._holders[0])
        try:
            for _ in range(_MOST_SAVES):
                self._step = client.save(self._name)["step"]
                if client.job(self._name)["committed_step"] == self._step:
                    break  # Otherwise a step was decided whose ranks have gone.
        except FailedPreconditionError as error:
            before, after = _shape(self.part["world_size"], self._holders), _shape(self._job.world_size, self._services)
            raise error_of(error.code, f"job {self._name} has {before}, and would now have {after}: it continues only from "
                           f"a checkpoint, and {error}", error.reason) from None
        return next(saved["name"] for saved in client.checkpoints(self._name)
                    if (saved["uid"], saved["step"]) == (self.uid, self._step))

    def _newest_checkpoint(self) -> str:
        name, step = self._name, self.part["committed_step"]
        where = "; ".join(f"{holder} ({why})" for holder, why in self._lost.items())
        try:
            saved = self._client_of(self._services[0]).checkpoints(name)
        except BallastError as error:
            if error.reason != "NO_CHECKPOINT_DIR" and not isinstance(error, NotFoundError):
                raise
            saved = []
        good = [found for found in saved if not found["problem"]]
        newest = next((found for uids in ({self.uid}, _ancestors(self.part)) for found in good if found["uid"] in uids), None)
        if newest is None:
            raise FailedPreconditionError(
                f"job {name} is at step {step}, it has no checkpoint, and its part is lost at {where}. If that service does "
                f"not return, `ballast close {name} --here --force` on each other one gives the job up")
        warnings.warn(f"job {name} was at step {step}, and continues from its checkpoint of step {newest['step']}: its part is "
                      f"lost at {where}", stacklevel=2)
        return newest["name"]


def other_shape(job: Job, services: Sequence[str], client_of: Callable[[str], Client]) -> OtherShape | None:
    """Called by one rank before any rank has a session. services: those that are to hold the job. None: they have no job
    of that name, or these ranks continue it as it is. Errors: see OtherShape."""
    if len(services) > job.world_size or len(set(services)) < len(services):
        return None  # The session refuses that.
    found = _at_once(lambda service: found_on(client_of(service), job.name), services)
    parts = [Part(service, each) for service, each in zip(services, found) if each is not None]
    if not parts or all(part.job["phase"] == "CREATING" for part in parts) or _fits(parts, job, services):
        return None
    return OtherShape(parts, job, services, client_of)


def found_on(client: Client, name: str) -> dict[str, Any] | None:
    """The job of that name on the service."""
    return next((job for job in client.jobs() if job["name"] == name), None)


def has_weights(job: dict[str, Any] | None) -> bool:
    return job is not None and job["phase"] not in ("AWAITING_WEIGHTS", "CREATING")


def _ancestors(job: dict[str, Any]) -> set[str]:
    return {job["resumed_uid"], *job["ancestors"]} - {""}


def _newest_of(parts: list[Part]) -> Part:
    """The one that continues all others, of those with weights. The others are parts, which decide no step by
    themselves."""
    candidates = [part for part in parts if has_weights(part.job)] or parts

    def continues(part: Part, other: Part) -> bool:
        return part.job["uid"] == other.job["uid"] or bool(
            other.job["uid"] in _ancestors(part.job) and other.job["members"])

    newest = [part for part in candidates if all(continues(part, other) for other in candidates)]
    if newest:
        return newest[0]
    name = parts[0].job["name"]
    where = "; ".join(f"{part.service} has one at step {part.job['committed_step']}" for part in candidates)
    raise FailedPreconditionError(f"several services have a job {name}, and it is not known which one is newer: {where}. "
                                  f"`ballast close {name} --here --force` there ends an old one")


def _fits(parts: list[Part], job: Job, services: Sequence[str]) -> bool:
    """Whether so many ranks on these services continue it."""
    first = parts[0].job
    members = [member["address"] for member in first["members"]]
    if len(services) == 1 or not members:
        held = len(services) == 1 and not members
    else:
        is_whole = [part.job["uid"] for part in parts] == [first["uid"]] * len(services)
        held = members == list(services) and (not job.homes or first["homes"] == list(job.homes)) and (
            is_whole or not any(has_weights(part.job) for part in parts))
    return held and first["world_size"] == job.world_size


def _shape(ranks: int, services: Sequence[str]) -> str:
    where = f" on {', '.join(services)}" if len(services) > 1 else ""
    return f"{ranks} rank{'s' if ranks > 1 else ''}{where}"


def _at_once(ask: Callable[[str], Any], services: Sequence[str]) -> list[Any]:
    pool = concurrent.futures.ThreadPoolExecutor(min(len(services), _MOST_AT_ONCE))
    try:
        return list(pool.map(ask, services))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
