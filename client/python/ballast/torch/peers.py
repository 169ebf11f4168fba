"""How the ranks of a job tell each other what the service cannot tell them."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from typing import Any

import torch.distributed as dist

from ..errors import DeadlineError, FailedPreconditionError

_POLL_SECONDS = 0.02
_LISTEN_SECONDS = 1.0


class Peers:
    """Uses the store by which torch.distributed has found its ranks. So a waiting rank needs no collective, in which
    no error could reach it. ranks: their numbers in the world. DeadlineError if some rank does not make its Peers
    within the time limit."""

    def __init__(self, job: str, ranks: list[int], timeout: float):
        self.rank, self.world_size = ranks.index(dist.get_rank()), len(ranks)
        self._timeout = timeout
        self._next_listen = 0.0
        self.step: int | None = None  # In which this rank waits for the others.
        self._changed = 0  # Before this step this rank changes its param groups.
        common = dist.PrefixStore(f"ballast/{job}/{ranks[0]}", dist.distributed_c10d._get_default_store())
        # After a restart of the ranks the store may be the old one, with all earlier entries. So new entries have their
        # own names.
        token = self._answer(common) if self.rank == 0 else self._ask(common)
        self._store = dist.PrefixStore(f"ballast/{job}/{ranks[0]}/{token}",
                                       dist.distributed_c10d._get_default_store())

    def _answer(self, store) -> str:
        token, absent = secrets.token_hex(8), set(range(1, self.world_size))
        for _ in self._polls(lambda: f"only {self.world_size - len(absent)} of {self.world_size} ranks came"):
            for rank in sorted(absent):
                if store.check([f"{token}/{rank}"]):
                    absent.discard(rank)
                elif store.check([f"hello/{rank}"]):
                    store.set(f"answer/{rank}", f"{store.get(f'hello/{rank}').decode()} {token}")
            if not absent:
                return token

    def _ask(self, store) -> str:
        hello = secrets.token_hex(8)
        store.set(f"hello/{self.rank}", hello)
        for _ in self._polls(lambda: "rank 0 did not come"):
            if store.check([f"answer/{self.rank}"]):
                said, token = store.get(f"answer/{self.rank}").decode().split()
                if said == hello:
                    store.set(f"{token}/{self.rank}", "")
                    return token

    def _polls(self, what_is_missing, is_bounded: bool = True):
        deadline = time.monotonic() + (self._timeout if is_bounded else math.inf)
        while True:
            yield
            if time.monotonic() >= deadline:
                raise DeadlineError(f"{what_is_missing()} within {self._timeout:g} s; every rank must make the same "
                                    "calls")
            time.sleep(_POLL_SECONDS)

    def fail(self, error: BaseException) -> None:
        """Notifies the others why this rank cannot continue. All get the first rank's reason."""
        line = f"rank {self.rank}: {' '.join(str(error).split()) or type(error).__name__}"
        try:
            self._store.compare_set("error", "", line)
        except RuntimeError:  # No other rank is left.
            pass

    def listen(self) -> None:
        """FailedPreconditionError with another rank's reason, or if others have changed their param groups before
        the step in which this rank waits for them."""
        if time.monotonic() < self._next_listen:
            return
        self._next_listen = time.monotonic() + _LISTEN_SECONDS
        self._raise_error()
        if self.step is not None and self.step != self._changed and self._store.check([f"changed before {self.step}"]):
            raise FailedPreconditionError(f"other ranks have changed their param groups before step {self.step}, and rank "
                                          f"{self.rank} has not: all ranks change them alike")

    def change(self, step: int) -> None:
        """Before this step all ranks change their param groups. Waits until all have come here."""
        self._changed = step
        self.meet(f"changed before {step}")

    def meet(self, where: str) -> None:
        """Waits until all have come here."""
        self._store.add(where, 1)
        for _ in self._polls(lambda: f"only {self._store.add(where, 0)} of {self.world_size} ranks came"):
            self._raise_error()
            if self._store.add(where, 0) == self.world_size:
                return

    def highest(self, where: str, values: tuple[int, ...]) -> tuple[int, ...]:
        """The maximum of the ranks' values, all of the same number. Waits until all have come here."""
        ours, before = " ".join(f"{value:020d}" for value in values), ""
        while (found := self._store.compare_set(f"{where}, highest", before, ours).decode()) < ours:
            before = found
        self.meet(where)
        return tuple(int(value) for value in self._store.get(f"{where}, highest").decode().split())

    def from_first(self, what: str, value: str | None, is_bounded: bool = True) -> str:
        """Rank 0's value. is_bounded: within the time limit; otherwise waits until rank 0 has it, or has failed."""
        if self.rank == 0:
            self._store.set(what, value or "")
            return value or ""
        for _ in self._polls(lambda: "rank 0 did not come", is_bounded):
            self._raise_error()
            if self._store.check([what]):
                return self._store.get(what).decode()

    def gather(self, what: str, value: Any) -> list[Any]:
        """The values of all ranks, by rank; they go through JSON. Waits until all have come here."""
        self._store.set(f"{what} of {self.rank}", json.dumps(value))
        values = []
        for rank in range(self.world_size if self.rank == 0 else 0):
            for _ in self._polls(lambda: f"only {len(values)} of {self.world_size} ranks came"):
                self._raise_error()
                if self._store.check([f"{what} of {rank}"]):
                    values.append(json.loads(self._store.get(f"{what} of {rank}")))
                    break
        return json.loads(self.from_first(what, json.dumps(values)))

    @property
    def meeting_host(self) -> str:
        """Where the ranks of torch.distributed find each other, as MASTER_ADDR says; "" if they do that by a file."""
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return getattr(store, "host", "")

    def agree(self, description: list[tuple[str, str]], of: str = "job",
              advice: str = "all ranks must train with the same job") -> None:
        """ValueError, on all ranks, that names the first entry in which a rank differs from rank 0, and ends with
        the advice. of: the subject, different in each call."""
        text = json.dumps(description)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self.rank == 0:
            self._store.set(f"{of}, whole", text)
        if self.from_first(f"{of}, digest", digest) != digest:
            theirs = [tuple(entry) for entry in json.loads(self._store.get(f"{of}, whole"))]
            raise ValueError(f"{_first_difference(description, theirs)}; {advice}")
        self.meet(f"{of} agreed")

    def leave(self, wait_seconds: float = 0.0) -> None:
        """Says that this rank is finished, and waits until all others are, or for the given time."""
        try:
            self._store.add("left", 1)
            deadline = time.monotonic() + wait_seconds
            while time.monotonic() < deadline and self._store.add("left", 0) < self.world_size:
                time.sleep(_POLL_SECONDS)
        except RuntimeError:  # No other rank is left.
            pass

    def _raise_error(self) -> None:
        try:
            error = self._store.get("error").decode() if self._store.check(["error"]) else ""
        except RuntimeError:  # The store has gone: other waits end by themselves.
            return
        if error and not error.startswith(f"rank {self.rank}: "):
            raise FailedPreconditionError(error)


def _first_difference(ours: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> str:
    for (name, value), (their_name, their_value) in zip(ours, theirs):
        if name != their_name:
            return f"this rank has {name} where rank 0 has {their_name}"
        if value != their_value:
            return f"{name} is {value} here and {their_value} on rank 0"
    return f"this rank describes {len(ours)} settings, and rank 0 {len(theirs)}"
