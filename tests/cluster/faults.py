"""What may befall members while they train, drawn from a seed. Each fault is over when its function returns."""

import collections
import contextlib
import os
import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "kill"))

from runs import await_, child_of, served, state_of  # noqa: E402
from service_test import kill_child  # noqa: E402

KILLS = ("kill_lead", "kill_member", "kill_all")
CUTS = ("cut", "one_way", "apart", "freeze", "kill_apart")

FIRST_AT = (0, 1, 2, 5)  # The steps that the first fault may follow. 0: nothing of the training is there yet.
LONGEST_PAUSE = 0.25  # Seconds between two faults.
LONGEST_STEP = 0.03   # Or from a step's end to the next fault.
LONGEST_FAULT = 1.0   # Seconds that a cut or a stop takes.
SOON = 0.2            # The share of kills after which the next fault does not wait for the next process.


class Faults:
    """Of one run. `done` counts them by kind."""

    def __init__(self, cluster, run, draw, longest=LONGEST_FAULT):
        self.cluster, self.run, self.draw = cluster, run, draw
        self.network = cluster.network
        self.longest = longest
        self.done = collections.Counter()
        self.killed = {}  # How many processes of a member had served by its last kill.

    # ---------------------------------------------------------------- one fault each

    def kill(self, members):
        """The serving processes, whose parents keep their memory."""
        for member in members:
            count = kill_child(member)
            if count is not None:
                self.killed[member] = count
                self.done[f"kills of {'the lead' if member is self.cluster.lead else 'a member'}"] += 1
        if self.draw.random() >= SOON:
            self.await_all()

    def kill_lead(self):
        self.kill([self.cluster.lead])

    def kill_member(self):
        self.kill([self.draw.choice(self.cluster.members[1:])])

    def kill_all(self):
        self.kill(self.draw.sample(self.cluster.members, len(self.cluster.members)))

    def cut(self):
        """A host from all others, the trainer's too."""
        self.hold("hosts cut off", self.network.cut(self.any().host))

    def one_way(self):
        silent, other = self.two()
        self.hold("one-way cuts", self.network.one_way(silent.host, other.host))

    def apart(self):
        one, other = self.two()
        self.hold("links cut", self.network.apart(one.host, other.host))

    def kill_apart(self):
        """One of two that do not reach each other."""
        one, other = self.two()
        with self.network.apart(one.host, other.host):
            self.done["links cut"] += 1
            time.sleep(self.draw.uniform(0, self.longest))
            self.kill([one])

    def freeze(self):
        self.hold("stops", stopped(child_of(self.any())))

    # ---------------------------------------------------------------- and many

    def play(self, kinds, most):
        """Until the run is over or `most` have been: each kind once, then each again. The first at its start, or as
        soon as it is in one of its first steps."""
        self.run.await_step(self.draw.choice(FIRST_AT))
        left = []
        while sum(self.done.values()) < most:
            left = left or self.draw.sample(kinds, len(kinds))
            self.pause()
            if self.run.process.poll() is not None:
                break
            getattr(self, left.pop())()
        self.await_all()

    # ----------------------------------------------------------------

    def pause(self):
        """Some time; or until some instant after the end of a step. Soon after a kill all processes die alike: while
        their ranks come back."""
        if self.draw.random() < 0.5:
            time.sleep(self.draw.uniform(0, LONGEST_PAUSE))
            return
        step = self.run.step()
        await_("another step", lambda: self.run.step() > step or self.run.process.poll() is not None)
        time.sleep(self.draw.uniform(0, LONGEST_STEP))

    def any(self):
        return self.draw.choice(self.cluster.members)

    def two(self):
        """One of them is the lead: other members have no link."""
        pair = [self.cluster.lead, self.draw.choice(self.cluster.members[1:])]
        return self.draw.sample(pair, 2)

    def hold(self, what, fault):
        with fault:
            self.done[what] += 1
            time.sleep(self.draw.uniform(0, self.longest))

    def await_all(self):
        for member, count in self.killed.items():
            await_(f"a process at {member.address}", lambda: served(member) > count, member.process)


@contextlib.contextmanager
def stopped(pid):
    """A process; or nothing, where it has ended."""
    try:
        process = os.pidfd_open(pid)  # No later process of this number.
    except (OSError, ValueError):
        yield
        return
    try:
        tell(process, signal.SIGSTOP)
        await_("its stop", lambda: state_of(pid) in ("T", "Z", "X", ""))
        yield
    finally:
        tell(process, signal.SIGCONT)
        os.close(process)


def tell(process, number):
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)
