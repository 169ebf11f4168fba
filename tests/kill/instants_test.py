#!/usr/bin/env python3
"""A service whose process is killed at chosen instants: while first weights come, while gradients do, in an update, in a
save beside steps, in a load, and while the one before is being taken over. The trainer, a session of Python, ends with the
weights of every step and the state of a life that nothing befell, and every complete checkpoint is whole.

    instants_test.py [--rounds N] [--seed S]

prints one line a round. There are more than N, up to twenty times as many, until each kind of instant was hit.
"""

import argparse
import collections
import contextlib
import ctypes
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

from runs import BIN, PATIENCE, ROOT, Service, await_, child_of, read, recoveries, served, tail

sys.path.insert(0, str(ROOT / "client/python"))

import ballast  # noqa: E402

TENSORS, ELEMENTS = 8, 1 << 16  # Each of a chunk; an update takes a millisecond.
STEPS = 12
ASKED_AT, LOADED_AT = 5, 7  # After these steps it is saved by name, and the checkpoint is loaded.
FIRST = (ctypes.c_float * ELEMENTS)(*(0.001 * (i % 997) for i in range(ELEMENTS)))
GRADIENTS = [(ctypes.c_float * ELEMENTS)(*(0.5 - 0.01 * ((i + 31 * t) % 89) for i in range(ELEMENTS)))
             for t in range(TENSORS)]

# Where it is killed: how long from the beginning of that to the kill, at most, and how often of a hundred.
AIMS = {"first weights": (0.01, 50), "gradients": (0.01, 10), "update": (0.006, 20), "idle": (0.002, 4),
        "save": (0.01, 15), "asked save": (0.01, 50), "load": (0.02, 70)}
AIMED_ONCE = ("first weights", "asked save", "load")
AGAIN = 25  # Of a hundred deaths are followed by one while the next process takes over,
LONGEST_TAKING_OVER = 0.12  # so soon.


class WrongBits(AssertionError):
    pass


class Killer:
    """Kills the service's process once it is in what it is told."""

    def __init__(self, service, folder, source):
        self.service, self.folder, self.random = service, folder, source
        self.kills = collections.Counter()
        self.left = set()  # By saves that were killed before.
        self.thread = None
        self.doing = ""

    def partial(self):
        """What a save has half written by now."""
        return set(self.folder.glob("*/*.partial-*")) - self.left

    def reads_checkpoint(self):
        with contextlib.suppress(OSError):  # It, or a descriptor of it, is gone.
            return any(os.readlink(file.path).endswith(".safetensors")
                       for file in os.scandir(f"/proc/{child_of(self.service)}/fd"))
        return False

    def strike(self, aim, delay, again):
        has_begun = {"save": self.partial, "asked save": self.partial, "load": self.reads_checkpoint}.get(aim)
        if has_begun is not None:  # It begins when it likes.
            deadline = time.monotonic() + 0.5
            while not has_begun() and time.monotonic() < deadline:
                time.sleep(0.0002)
        time.sleep(delay)
        count, pid = served(self.service), child_of(self.service)
        if not self.kill(pid):
            return
        partial = self.partial()
        self.kills["save" if partial else self.doing] += 1
        self.left |= partial
        if not again:
            return
        time.sleep(again)
        next_pid = child_of(self.service)
        if next_pid != pid and served(self.service) == count and self.kill(next_pid):
            self.kills["recovery"] += 1

    @staticmethod
    def kill(pid):
        """False if it is not there, or its parent has found it dead."""
        with contextlib.suppress(ProcessLookupError):
            if pid != 0:
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def during(self, aim):
        """What follows is this; perhaps it is killed in it."""
        if aim in AIMED_ONCE:  # There are not many of them.
            self.stop()
        self.doing = aim
        if self.thread is not None and self.thread.is_alive():
            return
        longest, often = AIMS[aim]
        if self.random.randrange(100) < often:
            again = self.random.uniform(0, LONGEST_TAKING_OVER) if self.random.randrange(100) < AGAIN else 0
            self.thread = threading.Thread(target=self.strike, args=(aim, self.random.uniform(0, longest), again))
            self.thread.start()

    def stop(self):
        if self.thread is not None:
            self.thread.join()


class Quiet:
    """In the place of a Killer, of the life that nothing befalls."""

    kills = collections.Counter()

    def during(self, aim):
        pass

    def stop(self):
        pass


class Life:
    """A job from its first weights to its last step, with a load in between."""

    def __init__(self, service, folder, name, shared, mode, known):
        self.service, self.folder, self.known = service, folder, known
        self.job = ballast.Job(name, [ballast.Group("g", ballast.HyperParameters(lr=0.01))],
                               [ballast.Parameter(f"p{i}", (ELEMENTS,)) for i in range(TENSORS)], update_mode=mode)
        self.weights = [(ctypes.c_float * ELEMENTS)() for _ in range(TENSORS)]
        self.shared = shared
        self.session = None

    def open(self):
        self.session = ballast.Session(self.service.address, self.job, [ctypes.addressof(w) for w in self.weights],
                                       share_memory=self.shared)

    def check(self, step):
        digest = hashlib.sha256(b"".join(map(bytes, self.weights))).hexdigest()
        if self.known.setdefault(step, digest) != digest:
            raise WrongBits(f"step {step} has other weights than in the life that nothing befell")

    def step(self, step, killer):
        killer.during("gradients")
        self.session.begin_step(divisors=[float(step)])
        self.session.push_gradients([ctypes.addressof(g) for g in GRADIENTS], micro_step=0)
        self.session.push_gradients([ctypes.addressof(g) for g in reversed(GRADIENTS)], micro_step=1, final=True)
        killer.during("update")
        self.session.seal_and_vote(micro_steps=2, max_norm=200.0 if step % 3 == 0 else 0.0)
        self.session.receive_weights()
        self.check(step)
        killer.during("idle" if step % 2 else "save")

    def client(self):
        return ballast.Client(self.service.address, PATIENCE, wait=0)

    def until_done(self, killer, aim, call, *arguments):
        """A call that a death cuts off is made again."""
        deadline = time.monotonic() + PATIENCE
        while True:
            killer.during(aim)
            try:
                return call(*arguments)
            except ballast.BallastError as error:
                if time.monotonic() > deadline or error.reason == "NO_SUCH_JOB":
                    raise

    def live(self, killer):
        self.open()
        killer.during("first weights")
        self.session.upload_weights([ctypes.addressof(FIRST)] * TENSORS)
        self.session.read_weights()
        self.check(0)
        for step in range(1, ASKED_AT + 1):
            self.step(step, killer)
        asked = self.until_done(killer, "asked save", self.client().save, self.job.name,
                                str(self.folder / f"asked-{self.job.name}"))["directory"]
        for step in range(ASKED_AT + 1, LOADED_AT + 1):
            self.step(step, killer)
        self.until_done(killer, "load", self.client().load, self.job.name, asked)
        self.session.close()
        self.open()
        self.session.read_weights()
        if self.session.committed_step != ASKED_AT:
            raise WrongBits(f"it was loaded at step {ASKED_AT}, and is at {self.session.committed_step}")
        self.check(ASKED_AT)
        for step in range(ASKED_AT + 1, STEPS + 1):
            self.step(step, killer)
        killer.stop()
        self.session.close()

    def state(self):
        """Of all planes, as a checkpoint has them."""
        saved = self.until_done(Quiet(), "idle", self.client().save, self.job.name)
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                for file in sorted(pathlib.Path(saved["directory"]).glob("*.safetensors"))}

    def check_checkpoints(self):
        """All that have their names are whole; returns how many there are. A save that is still under way may remove
        one between its being listed and read."""
        await_("the end of saves", lambda: not self.client().job(self.job.name)["saves"])
        found = self.client().verify(self.job.name)
        problems = [checkpoint["problem"] for checkpoint in found if checkpoint["problem"]]
        if problems:
            raise WrongBits(f"checkpoints: {problems}")
        return len(found)


class Undisturbed:
    """The life that nothing befell, by update mode: no mode has bits of its own."""

    def __init__(self, folder):
        self.known = {}
        saved = folder / "undisturbed"
        saved.mkdir()
        service = Service(folder, f"--checkpoint-dir={saved}")
        try:
            life = Life(service, saved, "undisturbed", False, "wait", self.known)
            life.live(Quiet())
            self.state = life.state()
        finally:
            service.stop()


def one_round(folder, undisturbed, seed, totals):
    """One service and one life on it, or more where nobody was there to be killed."""
    source = random.Random(seed)
    saved = pathlib.Path(tempfile.mkdtemp(prefix="saved-", dir=folder))
    shared, mode = source.choice([True, False]), source.choice(["wait", "speculate"])
    service = Service(folder, f"--checkpoint-dir={saved}", "--checkpoint-every=2steps", "--most-deaths=0",
                      "--log-level=debug", group=True)
    killer = Killer(service, saved, source)
    life = Life(service, saved, "gpt", shared, mode, undisturbed.known)
    try:
        life.live(killer)
        state = life.state()
        if state != undisturbed.state:
            raise WrongBits(f"the state differs: {state}, undisturbed {undisturbed.state}")
        checkpoints = life.check_checkpoints()
        found = recoveries(read(service.log))
        totals["kills"].update(killer.kills)
        totals["recoveries"].update(found)
        return (f"{mode}, {'shared memory' if shared else 'the connection'}, killed in "
                f"{', '.join(f'{kind} x{n}' for kind, n in sorted(killer.kills.items())) or 'nothing'}; "
                f"{checkpoints} checkpoints, all whole; same bits")
    except Exception as error:
        kind = WrongBits if isinstance(error, WrongBits) else AssertionError
        raise kind(f"{error}\n  killed: {dict(killer.kills)}; the service said:{tail(service.log, 80)}") from error
    finally:
        killer.stop()
        service.stop()


def missed(totals):
    """What this test is for."""
    return [kind for kind in ("save", "load", "first weights", "update", "gradients") if not totals["kills"][kind]]


def lines_of(totals):
    return [f"{sum(counts.values())} {what}: {', '.join(f'{kind} {n}' for kind, n in counts.most_common())}"
            for what, counts in totals.items()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    flags = parser.parse_args()
    print(f"seed {flags.seed}", flush=True)
    totals = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory(prefix="ballast-instants-") as name:
        folder = pathlib.Path(name)
        undisturbed = Undisturbed(folder)
        number = 0
        while number < flags.rounds or (missed(totals) and number < 20 * flags.rounds):
            print(f"round {number}: {one_round(folder, undisturbed, f'{flags.seed}/{number}', totals)}", flush=True)
            number += 1
    for line in lines_of(totals):
        print(line)
    if missed(totals):
        print(f"FAILED: nobody was killed in: {', '.join(missed(totals))}")
        sys.exit(1)


if __name__ == "__main__":
    main()
