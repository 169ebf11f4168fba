"""Brings a job to a saved state: to the step of a trainer's state, or to its newest checkpoint."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

from .client import Client
from .errors import BallastError, FailedPreconditionError, NotFoundError
from .resize import OtherShape, found_on, has_weights
from .session import Job, Session


def restore(client: Client, job: Job, addresses: list[int], uid: str, step: int, timeout: float,
            credentials: dict[str, str | None], find_other: Callable[[], OtherShape | None], or_nothing: bool = False) -> str:
    """Called by one rank before any rank has a session. Returns the job's uid afterwards. find_other: see resize.py.
    or_nothing: return "" if the service has neither a job of that name with weights nor a checkpoint of that step.

    The job may be past that step, if the trainer crashed after its last checkpoint. Or the service may have
    restarted with only its checkpoints. Then it loads its own checkpoint of that step of that job, which it made
    when the state was taken (`Recovery.save`). If the job is unrelated to the state, it is not changed, and the
    session of that uid then fails."""
    other = find_other()
    now = found_on(client, job.name) if other is None else other.part
    begun = has_weights(now)
    is_there = begun and (now["uid"], now["committed_step"]) == (uid, step)
    if is_there and other is None:
        return uid
    deadline = time.monotonic() + timeout
    while client.is_saving(job.name, step) and time.monotonic() < deadline:
        time.sleep(0.05)  # The service is still saving the state's step in the background.
        now = found_on(client, job.name) if other is None else now

    def checkpoints() -> list[dict[str, Any]]:
        return [found for found in _checkpoints(client, job.name) if found["uid"] == uid]

    def find_of_step() -> dict[str, Any] | None:
        return next((found for found in checkpoints() if found["step"] == step and not found["problem"]), None)

    ours = not begun or uid in (now["uid"], now["resumed_uid"], *now["ancestors"])
    of_step = find_of_step() if ours else None
    if of_step is None and is_there and other.is_whole:
        other.save()
        of_step = find_of_step()
    if of_step is None:
        if or_nothing and not begun:
            return ""
        if now is None:
            raise NotFoundError(_nothing_of(client, job.name, uid, step))
        if now["uid"] != uid and uid not in now["ancestors"]:
            return uid
        steps = ", ".join(str(found["step"]) for found in checkpoints()) or "none"
        raise FailedPreconditionError(
            f"the loaded state is of step {step}, but job {job.name} is at step {now['committed_step']} and the "
            f"service has no checkpoint of step {step} (it has: {steps}); load a state of one of these steps")
    if other is not None:
        other.close()
        begun = False
    if begun:
        if uid not in now["ancestors"]:
            client.load(job.name, of_step["name"])
            return now["uid"]
        # It has other parameters now.
        with _session(client, job, addresses, timeout, derive_from_uid=now["uid"],
                      derive_from_checkpoint=of_step["name"], **credentials) as session:
            return session.job_uid
    # A new job: if this fails, nothing is lost.
    with _session(client, job, addresses, timeout, **credentials) as session:
        made = session.job_uid
        _load(client, session, of_step["name"])
    return made


def _load(client: Client, session: Session, name: str) -> None:
    if any(group.state_fallback for group in session.job.groups):
        # Which parameters fall back to fp32 depends on the number of ranks.
        client.load(session.job.name, name, convert_state=True)
    else:
        session.load(name)


def _session(client: Client, job: Job, addresses: list[int], timeout: float, **options: str | None) -> Session:
    return Session(client.service, job, addresses, join_timeout=min(60.0, timeout), timeout=timeout, takes_steps=False,
                   **options)


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a derived job: the job of the same name and this uid. A checkpoint that is not empty replaces
    it. Both empty: no origin."""

    uid: str = ""
    checkpoint: str = ""

    def found(self, client: Client, job: str, checkpoint: str | None) -> Origin:
        """Called by one rank before any rank has a session: this origin in its present form on the service. If this
        is empty: the job of that name, or a checkpoint."""
        now = found_on(client, job)
        begun = has_weights(now)
        if self.uid:
            # An earlier try has succeeded, unnoticed.
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


def is_one(name: str) -> bool:
    """Whether the name means one checkpoint, rather than a job's newest."""
    return "/step-" in name


def begin_from(client: Client, job: Job, addresses: list[int], name: str, timeout: float,
               credentials: dict[str, str | None], find_other: Callable[[], OtherShape | None]) -> None:
    """Called by one rank before any rank has a session. A job without weights begins with the newest undamaged
    checkpoint of that name; if there is none, from scratch. A job with weights continues with them. A single
    checkpoint, NAME/step-STEP or NAME/step-STEP.GENERATION, must exist, and a job with weights must have begun with
    it. find_other: see resize.py. A job of another shape goes on only from checkpoints of its own name."""
    one = is_one(name)
    other = find_other() if name == job.name else None
    if other is not None:
        saved = other.save()
        if saved and not _checkpoints(client, saved):
            raise FailedPreconditionError(f"job {job.name} is saved in {saved}, which {client.service} does not see: give all "
                                          "services the same --checkpoint-dir, on a file system that they share")
        name = saved or name
        other.close()
    now = found_on(client, job.name)
    begun = has_weights(now)
    if begun and not one:
        return
    found = _must_be_there(client, name) if one else _checkpoints(client, name)
    if begun:
        return _refuse_another_begin(now, found, name)
    if not found:
        print(f"job {job.name} begins at step 0: the service has no checkpoint of the name {name}", file=sys.stderr)
        return
    with _session(client, job, addresses, timeout, **credentials) as session:
        _load(client, session, name)


def _must_be_there(client: Client, name: str) -> list[dict[str, Any]]:
    found = _checkpoints(client, name)
    if not found:
        there = ", ".join(other["name"] for other in _checkpoints(client, name.partition("/")[0])) or "none"
        raise NotFoundError(f"there is no checkpoint {name} (there are: {there})")
    return found


def _refuse_another_begin(now: dict[str, Any], found: list[dict[str, Any]], name: str) -> None:
    """FailedPreconditionError if the job, which has weights, did not begin with one of these."""
    if not {now["resumed_uid"], *now["ancestors"]} & {checkpoint["uid"] for checkpoint in found}:
        job = now["name"]
        raise FailedPreconditionError(
            f"job {job} is at step {now['committed_step']} and did not start from {name}: attach() continues it as it "
            f"is, `ballast load {job} {name}` loads the checkpoint first, and another job= starts from it")


def refuse_an_unknown_one(client: Client, job: str) -> None:
    """Called by one rank before any rank has a session, because a session would create the job. NotFoundError if it
    does not exist."""
    names = [other["name"] for other in client.jobs()]
    if job not in names:
        raise NotFoundError(f"there is no job {job} (there are: {', '.join(names) or 'none'}); attach(create=True) "
                            "makes it, and attach(resume=True) loads its newest checkpoint first")


def _nothing_of(client: Client, job: str, uid: str, step: int) -> str:
    others = [other["name"] for other in client.jobs() if uid in (other["uid"], other["resumed_uid"])]
    if others:
        return f"the loaded state is of job {others[0]}, not of job {job}: give job={others[0]!r}"
    return (f"the service has neither job {job} nor its checkpoint of step {step}, to which the loaded state belongs: "
            "give the job= and the service= that it was made with. A service without a --checkpoint-dir loses "
            "its jobs when it ends")


def refuse_a_begun_one(client: Client, job: str) -> None:
    """Called by one rank before any rank has a session, because a session would take the ranks from a run that
    trains the job. FailedPreconditionError if the job has weights."""
    now = found_on(client, job)
    if has_weights(now):
        raise FailedPreconditionError(begun_already(job, now["committed_step"]))


def begun_already(job: str, step: int) -> str:
    return (f"job {job} is already at step {step}: call attach() before the first forward to go on with its weights, "
            "which ends the run that trains it now, or give another job=")


def may_begin(client: Client, job: str, or_go_on: bool) -> bool:
    """Called by one rank before any rank has a session: whether the job has no weights yet. or_go_on: weights are
    not an error."""
    now = found_on(client, job)
    if not has_weights(now):
        return True
    if or_go_on:
        return False
    raise FailedPreconditionError(
        f"job {job} is at step {now['committed_step']} and has its own moments, but those of the loaded state are for "
        "a new job: give another job=, or create the optimizer again and attach() without a state")


def awaits_weights(client: Client, job: str) -> bool:
    """Whether the job has no weights yet, or does not exist."""
    return not has_weights(found_on(client, job))


def _checkpoints(client: Client, job: str) -> list[dict[str, Any]]:
    try:
        return client.checkpoints(job)
    except NotFoundError:
        return []
    except BallastError as error:
        if error.reason == "NO_CHECKPOINT_DIR":
            return []
        raise
