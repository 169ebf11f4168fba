"""Brings a job to what was saved of it: to the step that a trainer's state is of, or to its newest checkpoint."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from .client import Client
from .errors import BallastError, FailedPreconditionError, NotFoundError
from .session import Job, Session


def restore(client: Client, job: Job, addresses: list[int], uid: str, step: int, timeout: float,
            credentials: dict[str, str | None], or_nothing: bool = False) -> str:
    """Called by one rank before any has a session. Returns the uid that the job has then. or_nothing: "" if the
    service has neither a job of that name with weights nor a checkpoint of that step.

    The job may be past that step, because the trainer died after its last checkpoint; or the service may have
    been started again, and know only what was saved. Then it loads its own checkpoint of that step of that job, which
    it made when the state was taken (`Binding.save`). A job that has nothing to do with the state is left alone: the
    session of that uid then fails."""
    now = _found(client, job.name)
    begun = _has_weights(now)
    if begun and (now["uid"], now["committed_step"]) == (uid, step):
        return uid
    ours = not begun or uid in (now["uid"], now["resumed_uid"], *now["ancestors"])
    saved = [found for found in _checkpoints(client, job.name) if found["uid"] == uid] if ours else []
    of_step = next((found for found in saved if found["step"] == step and not found["problem"]), None)
    if of_step is None:
        if or_nothing and not begun:
            return ""
        if now is None:
            raise NotFoundError(_nothing_of(client, job.name, uid, step))
        if now["uid"] != uid and uid not in now["ancestors"]:
            return uid
        steps = ", ".join(str(found["step"]) for found in saved) or "none"
        raise FailedPreconditionError(
            f"job {job.name} is at step {now['committed_step']}, the state that was loaded at step {step}, and the "
            f"service has no checkpoint of that step (it has: {steps}); load a state of one of these steps")
    if begun:
        if uid not in now["ancestors"]:
            client.load(job.name, of_step["name"])
            return now["uid"]
        # It has other parameters by now.
        with Session(client.service, job, addresses, join_timeout=min(60.0, timeout), timeout=timeout, takes_steps=False,
                     derive_from_uid=now["uid"], derive_from_checkpoint=of_step["name"], **credentials) as session:
            return session.job_uid
    # A new job, which is no loss if this fails.
    with Session(client.service, job, addresses, join_timeout=min(60.0, timeout), timeout=timeout,
                 takes_steps=False, **credentials) as session:
        made = session.job_uid
        session.load(of_step["name"])
    return made


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a job is derived from: the job of the same name and this uid, and a checkpoint in its stead, if that is not
    empty. Both empty: nothing."""

    uid: str = ""
    checkpoint: str = ""

    def found(self, client: Client, job: str, checkpoint: str | None) -> Origin:
        """Called by one rank before any has a session: this one, as it is on the service now. If this is empty: what is
        there, of a job of that name, or of a checkpoint."""
        now = _found(client, job)
        begun = _has_weights(now)
        if self.uid:
            # An earlier try had come to its end, unnoticed.
            return Origin(now["uid"]) if begun and self.uid in now["ancestors"] else self
        saved = []
        if checkpoint is not None and is_one(checkpoint):
            saved = _must_be_there(client, checkpoint)
            if begun:
                _refuse_another_begin(now, saved, checkpoint)
        elif checkpoint is not None and not begun:
            saved = _checkpoints(client, checkpoint)
        if begun:
            return Origin(now["uid"])
        return Origin("", checkpoint) if saved else self


def _found(client: Client, job: str) -> dict[str, Any] | None:
    """The job of that name, as it is on the service now."""
    return next((other for other in client.jobs() if other["name"] == job), None)


def _has_weights(now: dict[str, Any] | None) -> bool:
    return now is not None and now["phase"] != "awaiting_weights"


def is_one(name: str) -> bool:
    """Whether the name is of one checkpoint, and not of a job, of whose checkpoints the newest is meant."""
    return "/step-" in name


def begin_from(client: Client, job: Job, addresses: list[int], name: str, timeout: float,
               credentials: dict[str, str | None]) -> None:
    """Called by one rank before any has a session: a job that has no weights yet begins with the newest good
    checkpoint of that name; with none, as if nothing had been asked. A job that has weights goes on with them. One
    checkpoint, NAME/step-STEP or NAME/step-STEP.GENERATION, must be there, and a job that has weights must have begun
    with it."""
    one = is_one(name)
    now = _found(client, job.name)
    begun = _has_weights(now)
    if begun and not one:
        return
    found = _must_be_there(client, name) if one else _checkpoints(client, name)
    if begun:
        return _refuse_another_begin(now, found, name)
    if not found:
        print(f"job {job.name} begins at step 0: the service has no checkpoint of the name {name}", file=sys.stderr)
        return
    with Session(client.service, job, addresses, join_timeout=min(60.0, timeout), timeout=timeout,
                 takes_steps=False, **credentials) as session:
        session.load(name)


def _must_be_there(client: Client, name: str) -> list[dict[str, Any]]:
    found = _checkpoints(client, name)
    if not found:
        there = ", ".join(other["name"] for other in _checkpoints(client, name.partition("/")[0])) or "none"
        raise NotFoundError(f"there is no checkpoint {name} (there are: {there})")
    return found


def _refuse_another_begin(now: dict[str, Any], found: list[dict[str, Any]], name: str) -> None:
    """FailedPreconditionError if the job, which has weights, has not begun with one of these."""
    if not {now["resumed_uid"], *now["ancestors"]} & {checkpoint["uid"] for checkpoint in found}:
        job = now["name"]
        raise FailedPreconditionError(
            f"job {job} is at step {now['committed_step']} and did not begin with {name}: attach() goes on with it as it is, "
            f"`ballast load {job} {name}` takes it there first, and another job= begins there")


def refuse_an_unknown_one(client: Client, job: str) -> None:
    """Called by one rank before any has a session, which would make the job: NotFoundError if there is none."""
    names = [other["name"] for other in client.jobs()]
    if job not in names:
        raise NotFoundError(f"there is no job {job} (there are: {', '.join(names) or 'none'}); attach(create=True) "
                            "makes it, and attach(resume=True) loads its newest checkpoint first")


def _nothing_of(client: Client, job: str, uid: str, step: int) -> str:
    others = [other["name"] for other in client.jobs() if uid in (other["uid"], other["resumed_uid"])]
    if others:
        return f"the state that was loaded is of job {others[0]}, and not of {job}: give job={others[0]!r}"
    return (f"the service has neither job {job} nor a checkpoint of step {step} of it, of which the state is that was "
            "loaded: give the job= and the service= that it was made with. A service without a --checkpoint-dir loses "
            "its jobs when it ends")


def refuse_a_begun_one(client: Client, job: str) -> None:
    """Called by one rank before any has a session, which would take the ranks from a run that trains the job now:
    FailedPreconditionError if the job has weights."""
    now = _found(client, job)
    if _has_weights(now):
        raise FailedPreconditionError(begun_already(job, now["committed_step"]))


def begun_already(job: str, step: int) -> str:
    return (f"job {job} is already at step {step}: call attach() before the first forward to go on with its weights, "
            "which ends the run that trains it now, or give another job=")


def may_begin(client: Client, job: str, or_go_on: bool) -> bool:
    """Called by one rank before any has a session: whether the job has no weights yet. or_go_on: that it has some
    is no error."""
    now = _found(client, job)
    if not _has_weights(now):
        return True
    if or_go_on:
        return False
    raise FailedPreconditionError(
        f"job {job} is at step {now['committed_step']} and has its own moments, and those of the state that was loaded "
        "are for a new job: give another job=, or create the optimizer again and attach() without a state")


def awaits_weights(client: Client, job: str) -> bool:
    """Whether the job has no weights yet, or is not there."""
    return not _has_weights(_found(client, job))


def _checkpoints(client: Client, job: str) -> list[dict[str, Any]]:
    try:
        return client.checkpoints(job)
    except NotFoundError:
        return []
    except BallastError as error:
        if "under the service's --checkpoint-dir, and it has none" in str(error):
            return []
        raise
