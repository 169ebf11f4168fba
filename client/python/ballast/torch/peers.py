"""The ranks that share a job, as they tell each other what the service cannot tell them."""

from __future__ import annotations

import collections
import hashlib
import json
import time

import torch.distributed as dist

from ..errors import DeadlineError, FailedPreconditionError

_POLL_SECONDS = 0.02
_LISTEN_SECONDS = 1.0
# How often each job's ranks have met in this process: so that what they say is told from what they said before.
_meetings: collections.Counter[tuple[str, int]] = collections.Counter()


class Peers:
    """Through the store by which torch.distributed has found its ranks: a rank that waits needs no collective,
    in which nothing could be told to it. ranks: their numbers in the world. All make theirs equally often."""

    def __init__(self, job: str, ranks: list[int], timeout: float):
        self.rank, self.world_size = ranks.index(dist.get_rank()), len(ranks)
        _meetings[job, ranks[0]] += 1
        prefix = f"ballast/{job}/{ranks[0]}/{_meetings[job, ranks[0]]}"
        self._store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self._timeout = timeout
        self._next_listen = 0.0

    def fail(self, error: BaseException) -> None:
        """Tells the others why this rank does not go on. What the first rank says is what all get."""
        line = f"rank {self.rank}: {' '.join(str(error).split()) or type(error).__name__}"
        try:
            self._store.compare_set("error", "", line)
        except RuntimeError:  # Nobody is there any more.
            pass

    def listen(self) -> None:
        """FailedPreconditionError with what another rank has said."""
        if time.monotonic() < self._next_listen:
            return
        self._next_listen = time.monotonic() + _LISTEN_SECONDS
        self._raise_error()

    def meet(self, where: str) -> None:
        """Waits until all are there. DeadlineError if they are not within the time limit."""
        self._store.add(where, 1)
        deadline = time.monotonic() + self._timeout
        while (there := self._store.add(where, 0)) < self.world_size:
            self._raise_error()
            if time.monotonic() >= deadline:
                raise DeadlineError(f"only {there} of {self.world_size} ranks came to {where} within "
                                    f"{self._timeout:g} s; every rank must make the same calls")
            time.sleep(_POLL_SECONDS)
        self._raise_error()

    def from_first(self, what: str, value: str | None) -> str:
        """The value that rank 0 gives."""
        if self.rank == 0:
            self._store.set(what, value or "")
            return value or ""
        deadline = time.monotonic() + self._timeout
        while not self._store.check([what]):
            self._raise_error()
            if time.monotonic() >= deadline:
                raise DeadlineError(f"rank 0 did not come within {self._timeout:g} s; every rank must make the "
                                    "same calls")
            time.sleep(_POLL_SECONDS)
        return self._store.get(what).decode()

    def agree(self, description: list[tuple[str, str]]) -> None:
        """ValueError, on all ranks, that names the first entry in which a rank differs from rank 0."""
        text = json.dumps(description)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self.rank == 0:
            self._store.set("whole description", text)
        if self.from_first("description", digest) != digest:
            theirs = [tuple(entry) for entry in json.loads(self._store.get("whole description"))]
            raise ValueError(_first_difference(description, theirs))
        self.meet("the first step")

    def leave(self, wait_seconds: float = 0.0) -> None:
        """Says that this rank needs nothing more, and waits until no other does, or for the time given."""
        try:
            self._store.add("left", 1)
            deadline = time.monotonic() + wait_seconds
            while time.monotonic() < deadline and self._store.add("left", 0) < self.world_size:
                time.sleep(_POLL_SECONDS)
        except RuntimeError:  # Nobody is there any more.
            pass

    def _raise_error(self) -> None:
        try:
            told = self._store.get("error").decode() if self._store.check(["error"]) else ""
        except RuntimeError:  # The store has gone: other waits have an end of their own.
            return
        if told and not told.startswith(f"rank {self.rank}: "):
            raise FailedPreconditionError(told)


def _first_difference(ours: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> str:
    for (name, value), (their_name, their_value) in zip(ours, theirs):
        if name != their_name:
            return f"this rank has {name} where rank 0 has {their_name}; all ranks must train with the same job"
        if value != their_value:
            return f"{name} is {value}, and on rank 0 {their_value}; all ranks must train with the same job"
    return f"this rank describes {len(ours)} things, and rank 0 {len(theirs)}; all ranks must train with the same job"
