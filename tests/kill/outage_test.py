#!/usr/bin/env python3
"""A service that goes away in every way while workers train, and with --minutes a PyTorch training too: its port refuses
connections, resets them or leaves them without an answer, its process is killed, upgraded, or started again with its
holder. TCP, TLS and a unix socket take turns. No trainer is started again, and the bits are those of an undisturbed run.

    outage_test.py [--runs N] [--minutes M] [--seed S]

prints one line a run, and at the end the pauses: from the end of each outage, or the kill, to the next step of each
training.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback

from cutting_proxy import OUTAGES, CuttingProxy
from runs import (BIN, PATIENCE, ROOT, Run, Service, Training, await_, child_of, difference, read, result_of, served,
                  stop, tail, undisturbed_result)

import certificates
import processes
from processes import HeldPort

sys.path.insert(0, str(ROOT / "tests/client/python"))

import torch_environment  # noqa: E402

WAYS = ("TCP", "TLS", "unix")
KINDS = (*OUTAGES, "cut", "killed", "upgraded", "started again")
SHORT = Training(steps=200, state="8bit")
LONG = Training(steps=600)
TORCH_STEPS = 1500
CALM = 0.3  # Seconds from a step after one disturbance to the next, at most.

pauses = collections.defaultdict(list)  # Seconds, by kind.


class TorchRun:
    """tests/kill/torch_trainer.py, which prints its steps and at its end the hash of its weights."""

    def __init__(self, folder, address, job):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"torch-{job}-", dir=folder))
        self.output, self.errors = self.folder / "output", self.folder / "errors"
        self.process = processes.start(
            [torch_environment.folder() / "bin/python", "-B", pathlib.Path(__file__).with_name("torch_trainer.py"),
             address, job, TORCH_STEPS], self.output, self.errors,
            {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "client/python"), "BALLAST_BIN_DIR": str(BIN)})

    def step(self):
        words = read(self.output).split()
        return int(words[-1]) if words and words[-1].isdigit() else TORCH_STEPS if words else 0

    def wait(self):
        return self.process.wait(PATIENCE)

    def result(self):
        return read(self.output).split()[-1]

    def story(self):
        return f"\n  torch, step {self.step()}, said:{tail(self.errors, 30)}"

    def stop(self):
        stop(self.process)


class Disturbed:
    """A service behind a proxy, over one way."""

    def __init__(self, folder, way, draw):
        self.draw, self.done = draw, collections.Counter()
        self.state = tempfile.mkdtemp(prefix="ballast-state-", dir="/dev/shm")
        self.port = HeldPort()
        self.socket_folder = tempfile.mkdtemp(prefix="ballast-outage-")
        listen = f"unix:{self.socket_folder}/socket" if way == "unix" else self.port.address
        flags = [f"--state-dir={self.state}", "--holder=parent", "--most-deaths=0"]
        self.environment = {}
        if way == "TLS":
            guarded = certificates.Guarded(pathlib.Path(self.socket_folder))
            flags += guarded.flags
            self.environment = guarded.environment
        os.environ.update(self.environment)
        self.service = Service(folder, *flags, listen=listen)
        self.proxy = CuttingProxy(self.service.address, draw.random(), 0)

    def disturb(self, trainings, kind):
        """Returns when all trainings that still run have taken a step since."""
        if kind in OUTAGES:
            self.proxy.begin_outage(kind)
            time.sleep(self.draw.uniform(0.2, 5 if len(trainings) > 1 else 1))
            self.proxy.end_outage()
        elif kind == "cut":
            self.proxy.begin_outage("reset")
            self.proxy.end_outage()
        else:
            self.replace(kind)
        begin = time.monotonic()
        self.done[kind] += 1
        waiting = {training: training.step() for training in trainings}
        while waiting:
            for training, step in list(waiting.items()):
                over = training.process.poll() is not None
                if training.step() > step:
                    pauses[kind].append(time.monotonic() - begin)
                if over or training.step() > step:
                    del waiting[training]
            if time.monotonic() - begin > PATIENCE:
                raise processes.Hangs(f"no step after: {kind}")
            time.sleep(0.002)

    def replace(self, kind):
        lines = served(self.service)
        if kind == "killed":
            with contextlib.suppress(ProcessLookupError):
                os.kill(child_of(self.service), signal.SIGKILL)
        elif kind == "upgraded":
            self.service.process.send_signal(signal.SIGHUP)
        else:
            self.service.stop(signal.SIGKILL)
            self.service.start(self.service.address)
        await_("a process that serves", lambda: served(self.service) > lines, self.service.process)

    def close(self):
        self.proxy.stop()
        self.service.stop(signal.SIGKILL)
        self.port.close()
        for name in self.environment:
            os.environ.pop(name)
        shutil.rmtree(self.state)
        shutil.rmtree(self.socket_folder)


def one_run(folder, way, training, undisturbed, torch_undisturbed, seed):
    draw = random.Random(seed)
    place = Disturbed(folder, way, draw)
    shared = draw.choice(["auto", "never"])
    run = Run(folder, place.proxy.address, "run", training, flags=[f"--shared-memory={shared}"])
    trainings = [run]
    try:
        if torch_undisturbed:
            trainings.append(TorchRun(folder, place.proxy.address, "torch"))
        for one in trainings:
            await_("its first step", lambda one=one: one.step() > 0, one.process)
        kinds = list(KINDS) if torch_undisturbed else draw.sample(KINDS[:3], 1) + draw.sample(KINDS[3:], 1)
        draw.shuffle(kinds)
        while any(one.process.poll() is None for one in trainings) and kinds:
            place.disturb(trainings, kinds.pop())
            if not kinds and torch_undisturbed:
                kinds = draw.sample(KINDS, len(KINDS))
            time.sleep(draw.uniform(0, CALM))
        for one in trainings:
            if one.wait() != 0:
                raise AssertionError(f"ended with code {one.process.returncode}")
        problem = difference(result_of(run, place.service), undisturbed)
        if torch_undisturbed and trainings[1].result() != torch_undisturbed:
            problem += "; the weights of the PyTorch training differ"
        if problem or run.restarts():
            raise AssertionError(f"{run.restarts()} starts again; {problem}")
        return f"{way}, --shared-memory={shared}: " + ", ".join(f"{n} x {kind}" for kind, n in place.done.items())
    except Exception as error:
        story = "".join(one.story() for one in trainings)
        raise AssertionError(f"{way}, {dict(place.done)}: {error}\n  the service said:{tail(place.service.log, 30)}{story}") from error
    finally:
        for one in trainings:
            one.stop()
        place.close()


def torch_result(folder, address):
    run = TorchRun(folder, address, "undisturbed-torch")
    try:
        if run.wait() != 0:
            raise AssertionError(f"the undisturbed run failed{run.story()}")
        return run.result()
    finally:
        run.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    flags = parser.parse_args()
    print(f"seed {flags.seed}", flush=True)
    training = LONG if flags.minutes else SHORT
    begin = time.monotonic()
    code = 0
    with tempfile.TemporaryDirectory(prefix="ballast-outage-") as name:
        folder = pathlib.Path(name)
        service = Service(folder)
        try:
            undisturbed = undisturbed_result(folder, service, "undisturbed", training)
            of_torch = torch_result(folder, service.address) if flags.minutes else None
        finally:
            service.stop()
        number = 0
        while code == 0 and (time.monotonic() - begin < 60 * flags.minutes or number < flags.runs):
            try:
                print(f"run {number}: " + one_run(folder, WAYS[number % len(WAYS)], training, undisturbed, of_torch,
                                                  f"{flags.seed}/{number}"), flush=True)
            except Exception as error:
                code = 1
                story = error if isinstance(error, AssertionError) else traceback.format_exc()
                print(f"run {number} of seed {flags.seed} FAILED: {story}", flush=True)
            number += 1
    for kind, seconds in sorted(pauses.items()):
        seconds.sort()
        print(f"{kind}: {len(seconds)} pauses, {seconds[len(seconds) // 2]:.2f} s in the middle, {seconds[-1]:.2f} s at most")
    return code


if __name__ == "__main__":
    sys.exit(main())
