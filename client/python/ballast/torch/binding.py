"""Parameters of torch bound to a job: where gradients come from, and where weights go.

One process sends and gets everything. FSDP2: each rank sends and gets its shards; the DTensors name mesh and
placements. Several processes with whole parameters (DDP): each rank sends and gets its own part of each group's flat
space. A rank gets all other weights from the other ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Collection
from typing import Any

from ..errors import BallastError
from ..session import HyperParameters
from .flows import Flows
from .member import Begin, Member
from .options import Options
from .recovery import Recovery
from .services.own_service import Kept
from .steps import Steps

# How long a rank keeps its own service for ranks that are behind.
_LEAVE_SECONDS = 10.0


class Binding:
    """Owns four parts and ends them together: the job (`member`), what flows to it and back (`flows`), recovery
    after an interrupt (`recovery`), and its steps (`steps`). No part refers to the binding, or to a part made after
    it, so all end with the optimizer's last reference. For trained, hyper_parameters and the rest see the parts."""

    _process = 0  # If the constructor has failed early.

    def __init__(self, param_groups: list[dict[str, Any]], hyper_parameters: Callable[[], list[HyperParameters]],
                 options: Options, begin: Begin, kept: Kept, trained: Collection[int] = (), **of_steps: Any):
        self.member = Member(param_groups, hyper_parameters, options, trained, kept)
        self.flows = Flows(self.member)
        self.recovery = Recovery(self.member, self.flows)
        self.steps = Steps(self.member, self.flows, self.recovery, hyper_parameters=hyper_parameters, **of_steps)
        self._process = os.getpid()
        _close_at_exit(self)
        try:
            with self.member.notifying():
                self.member.open(begin)
                self.flows.open()
        except BaseException:
            self.close()
            raise

    def __del__(self):
        if self._process == os.getpid() and self.flows.returning is not None and not self.member.failed:
            with contextlib.suppress(Exception):  # No weak reference finds it any more.
                if self.flows.returning.has_readers():
                    self.recovery.take_coming(sorted(self.flows.returning.coming), True)
        self.close(with_job=True, is_asked=False)

    def close(self, with_job: bool = False, is_asked: bool = True) -> None:
        """Continues if it was interrupted. with_job: also closes the job, if it is on this run's own service, which
        no other run can find. A service that outlives the ranks does it later if nobody has asked for it, or while an
        exception is handled: it may end this rank."""
        if os.getpid() != self._process:  # It is closed, or this is a fork, which has no part of it.
            return
        member, own = self.member, self.member.kept.service
        failed = member.failed
        member.reopening = True  # If an interrupt leaves it, another session continues.
        self.flows.close()
        if member.peers is not None:
            member.peers.leave(0.0 if own is None or failed else _LEAVE_SECONDS)
        if member.session is not None:
            if with_job and own is not None and own.is_here and member.rank == 0 and not member.session.ended:
                if own.outlives and not (is_asked and sys.exc_info()[0] is None):
                    own.close_later(member.name)
                elif own.outlives or own.has_others(member.kept):
                    with contextlib.suppress(BallastError):  # It ends with the service.
                        member.session.close_job()
            member.session.close()
        self._process = 0


def _close_at_exit(binding: Binding) -> None:
    """Does not keep it alive until then."""
    here = weakref.ref(binding)

    def close():
        bound = here()
        # Otherwise a daemon thread is in the middle of a call.
        if bound is not None and not (bound.member.session is not None and bound.member.session._calling):
            bound.close()

    atexit.register(close)
    weakref.finalize(binding, atexit.unregister, close)
