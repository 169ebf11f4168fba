"""Attacks by way of the service's checkpoints: the family "disk". Who attacks reaches the calls, and, in a few of these,
the disk; the service has a --checkpoint-dir."""

import contextlib
import os
import pathlib
import random

from attacks import at_once
from size_attacks import fields
from wire import MEBI, STATE, channel, fields_of, message

# None of these is a name of checkpoints, and a path only its own users may give.
OTHER_PLACES = {"the root": "/", "a path": "/etc", "a path that leads out": "../../../etc", "dots": "gpt/../../etc",
                "a checkpoint's name that leads out": "../step-1.1", "a name with a NUL": b"gpt\x00", "an empty part": "gpt//",
                "a name of a MiB": "g" * MEBI, "a name with a line's end": "gpt\nstep-1.1", "a hidden one": ".hidden"}


def save(target, name, directory=""):
    return target.ask(STATE + "SaveJob", message((1, f"jobs/{name}"), *([(2, directory)] if directory else [])))


def must_fail(errors, what):
    if not errors:
        raise AssertionError(f"{what} was taken")
    return errors


def elsewhere(method, number, directory):
    """Each method that takes a directory, given another place."""
    def attack(target):
        with target.job() as (name, _, _):
            first = [] if number == 1 else [(1, f"jobs/{name}")]
            return must_fail(target.errors(STATE + method, message(*first, (number, directory))), repr(directory)[:80])
    return attack


class Disk:
    """The attacks that put something there."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def load(self, target, make):
        """Of a checkpoint of the attacker's job, when `make` has changed its directory."""
        with target.job() as (name, _, _):
            error, answer = save(target, name)
            if error:
                raise AssertionError(f"the attacker's own save: {error}")
            make(pathlib.Path(fields_of(answer)[1][0].decode()))
            errors = must_fail(target.errors(STATE + "LoadJob", message((1, f"jobs/{name}"))), "what is no checkpoint")
            error, answer = target.ask(STATE + "VerifyCheckpoints", message((1, name)))
            if error is None:
                problems = [fields_of(one).get(10, [b""])[0].decode() for one in fields_of(answer).get(1, [])]
                if not any(problems):
                    raise AssertionError("it verifies")
                errors += [("PROBLEM", problem) for problem in problems if problem]
            if listing := target.errors(STATE + "ListCheckpoints", b""):
                raise AssertionError(f"the checkpoints cannot be listed: {listing}")
            return errors

    def many_saves(self, target):
        """More at once than a job may have, and none of them in the way of the others."""
        with target.job(elements=MEBI, chunk_elements=262144) as (name, _, _):
            def one():
                with contextlib.closing(channel(target.address)) as connection:
                    return target.errors(STATE + "SaveJob", message((1, f"jobs/{name}")), connection=connection)
            return at_once(32, one)[:3]

    def many_looks(self, target):
        def one():
            with contextlib.closing(channel(target.address)) as connection:
                return target.errors(STATE + "ListCheckpoints", b"", connection=connection)
        errors = at_once(32, one)
        if listing := target.errors(STATE + "ListCheckpoints", b""):
            raise AssertionError(f"the checkpoints cannot be listed any more: {listing}")
        return errors[:3]

    def of_another(self, target):
        """The honest job's checkpoint, into a job of other parameters."""
        error, _ = save(target, "honest")
        if error:
            raise AssertionError(f"a save of the honest job: {error}")
        with target.job() as (name, _, _):
            return must_fail(target.errors(STATE + "LoadJob", message((1, f"jobs/{name}"), (2, "honest"))),
                             "another job's checkpoint")

    def pages(self, target):
        """Names that fill more than one page, as somebody left them there."""
        folder = self.folder / ("p" * 100)
        for step in range(9000):
            (folder / f"step-{step}.1").mkdir(parents=True, exist_ok=True)
        token, names, pages = b"", [], 0
        while True:
            error, answer = target.ask(STATE + "ListCheckpoints", message((2, token)))
            if error:
                raise AssertionError(f"page {pages} of the checkpoints: {error}")
            if len(answer) > 4 * MEBI:
                raise AssertionError(f"a page of {len(answer)} bytes")
            found = fields_of(answer)
            names += [fields_of(one)[2][0] for one in found.get(1, [])]
            token, pages = found.get(2, [b""])[0], pages + 1
            if not token:
                break
        if len(names) != len(set(names)) or len(names) < 9000 or pages < 2:
            raise AssertionError(f"{len(names)} names, {len(set(names))} different ones, in {pages} pages")
        return target.errors(STATE + "ListCheckpoints", message((2, "nobody/step-1.1")))

    def family(self):
        for method, number in (("SaveJob", 2), ("LoadJob", 2), ("ListCheckpoints", 1), ("VerifyCheckpoints", 1),
                               ("DeleteCheckpoint", 1)):
            for what, directory in OTHER_PLACES.items():
                yield f"{method} of {what}", elsewhere(method, number, directory)
        yield "an index that is a FIFO", lambda target: self.load(
            target, lambda place: ((place / "index.json").unlink(), os.mkfifo(place / "index.json")))
        yield "planes that are a FIFO", lambda target: self.load(
            target, lambda place: ((place / "master.safetensors").unlink(), os.mkfifo(place / "master.safetensors")))
        yield "an index that leads to /dev/zero", lambda target: self.load(
            target, lambda place: ((place / "index.json").unlink(), os.symlink("/dev/zero", place / "index.json")))
        yield "an index of 4 GiB of nothing", lambda target: self.load(
            target, lambda place: os.truncate(place / "index.json", 4 << 30))
        yield "an index of 10,000 brackets", lambda target: self.load(
            target, lambda place: (place / "index.json").write_bytes(b"[" * 10_000 * 100))
        yield "an index of noise", lambda target: self.load(
            target, lambda place: (place / "index.json").write_bytes(random.Random(3).randbytes(MEBI)))
        yield "planes of noise", lambda target: self.load(
            target, lambda place: (place / "exp_avg.safetensors").write_bytes(random.Random(4).randbytes(10_000)))
        yield "32 saves at once", self.many_saves
        yield "32 looks at once", self.many_looks
        yield "a checkpoint of another job", self.of_another
        yield "9,000 names of checkpoints", self.pages
        yield "16 requests of 31 MiB to save", lambda target: at_once(16, lambda: fields(
            target, STATE + "SaveJob", message((1, "jobs/honest")) + b"\x7a\x00" * (15 * MEBI)))[:3]
