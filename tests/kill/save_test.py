#!/usr/bin/env python3
"""A service that is killed again and again while it saves: what it has said to be complete is complete and loads
with the bits of its step, nothing of it goes but what is too old, and what is left half written goes with the next save.

    save_test.py [--kills N] [--seed S]
"""

import argparse
import array
import ctypes
import hashlib
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "client/python")]

import processes  # noqa: E402
from processes import PATIENCE, await_, tail  # noqa: E402

import ballast  # noqa: E402

BIN = pathlib.Path(os.environ.get("BALLAST_BIN_DIR", ROOT / "build/release/bin"))
ELEMENTS = 1 << 17
TENSORS = 4
KEEP = 3
LONGEST = 0.25  # Seconds from the first step to the kill; some tens of saves.
JOB = ballast.Job("gpt", [ballast.Group("g", ballast.HyperParameters(lr=0.01))],
                  [ballast.Parameter(f"p{i}", (ELEMENTS // TENSORS,)) for i in range(TENSORS)])


class Service(processes.Service):
    def __init__(self, folder, saved, *more):
        super().__init__(BIN / "ballastd", folder, "--memory-limit=256MiB", "--threads=1", "--nostartup-benchmark",
                         f"--checkpoint-dir={saved}", "--checkpoint-every=1steps", f"--checkpoint-keep={KEEP}", *more,
                         listen=f"unix:{folder}/socket")

    def ask(self, *words):
        return subprocess.run([BIN / "ballast", *words, "--service", self.address], text=True, capture_output=True,
                              timeout=PATIENCE, check=False)


class Trainer:
    """Of the job on a service: the same steps in every life, whose weights are known by their digests."""

    known = {}

    def __init__(self, address):
        self.weights = [(ctypes.c_float * (ELEMENTS // TENSORS))() for _ in range(TENSORS)]
        self.first = array.array("f", (0.001 * (i % 997) for i in range(ELEMENTS // TENSORS)))
        self.gradient = array.array("f", (0.5 - 0.01 * (i % 89) for i in range(ELEMENTS // TENSORS)))
        self.address = address

    def open(self):
        return ballast.Session(self.address, JOB, [ctypes.addressof(w) for w in self.weights], share_memory=False,
                               reconnect_timeout=PATIENCE, join_timeout=PATIENCE)

    def begin(self, load):
        """Returns the step that the job begins with."""
        session = self.open()
        if load:
            session.load("gpt")
        else:
            session.upload_weights([self.first.buffer_info()[0]] * TENSORS)
        session.close()
        return self.join()

    def join(self):
        """The job as it is; returns its step."""
        self.session = self.open()
        self.session.read_weights()
        self.check(self.session.committed_step)
        return self.session.committed_step

    def check(self, step):
        digest = hashlib.sha256(b"".join(bytes(w) for w in self.weights)).hexdigest()
        if self.known.setdefault(step, digest) != digest:
            raise AssertionError(f"step {step} has other weights than in another life")

    def step(self, step):
        self.session.begin_step(divisors=[float(step)])
        self.session.push_gradients([self.gradient.buffer_info()[0]] * TENSORS, final=True)
        self.session.seal_and_vote()
        self.session.receive_weights()
        self.check(step)


def complete(saved):
    """The checkpoints that have their names: their indexes were written before."""
    folder = saved / "gpt"
    return {path.name for path in folder.iterdir() if path.name.startswith("step-") and "partial" not in path.name} \
        if folder.exists() else set()


def leftovers(saved):
    return {path.name for path in (saved / "gpt").iterdir() if ".partial-" in path.name} \
        if (saved / "gpt").exists() else set()


def life(folder, saved, number, source, tally):
    service = Service(folder, saved)
    try:
        before, left = complete(saved), leftovers(saved)
        tally["in a save"] += bool(left)
        newest = 0
        if before:
            verified = service.ask("verify", "gpt", "--json")
            found = json.loads(verified.stdout)["checkpoints"]
            problems = [checkpoint["problem"] for checkpoint in found if checkpoint["problem"]]
            if problems or {checkpoint["name"] for checkpoint in found} != {f"gpt/{name}" for name in before}:
                raise AssertionError(f"life {number}: of {sorted(before)}: {verified.stdout}")
            newest = found[0]["step"]
        trainer = Trainer(service.address)
        step = trainer.begin(load=bool(before))
        if step != newest:
            raise AssertionError(f"life {number} began with step {step}, and {newest} was there")
        tally["begun from a checkpoint"] += step > 0
        following = itertools.count(step + 1)
        trainer.step(next(following))

        def is_removed():
            # A save leaves alone what the killed process, which may take a while to end, still has.
            trainer.step(next(following))
            return not left & leftovers(saved)

        if left:
            await_("the end of what was left", is_removed, service.process)
        deadline = time.monotonic() + source.uniform(0, LONGEST)
        while time.monotonic() < deadline:
            trainer.step(next(following))
        service.stop()  # SIGKILL.
        gone = before - complete(saved)
        if gone:  # Of other lives, which are other jobs.
            raise AssertionError(f"life {number}: {sorted(gone)} went with a job that they are not of")
        if len(complete(saved) - before) > KEEP + 1:  # One may be about to be deleted.
            raise AssertionError(f"life {number}: {sorted(complete(saved) - before)} were left of one job")
        trainer.session.close()
    except BaseException:
        print(f"the service said:{tail(service.log)}", file=sys.stderr)
        raise
    finally:
        service.stop()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    tally = {"in a save": 0, "begun from a checkpoint": 0}
    with tempfile.TemporaryDirectory(prefix="ballast-save-") as temporary:
        saved = pathlib.Path(temporary, "saved")
        for number in range(arguments.kills):
            folder = pathlib.Path(temporary, f"life-{number}")
            folder.mkdir()
            life(folder, saved, number, source, tally)
        said = ", ".join(f"{count} {what}" for what, count in tally.items())
        print(f"seed {arguments.seed}: {arguments.kills} kills, {said}; last step {max(Trainer.known)}")
    if tally["in a save"] == 0 or tally["begun from a checkpoint"] == 0:
        raise AssertionError("no kill hit a save, or no life went on from a checkpoint: the test shows nothing")


if __name__ == "__main__":
    main()
