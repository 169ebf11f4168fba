"""Attacks on one ballastd, with an honest job beside them. After each family of attacks, the same questions:
does the honest job go on, and with the bits that it has without them; does memory return to within 64 MiB of
where it was; is every error one line that a person can act on?

    hostile_test.py [FAMILY...] [--pace [--yield-cores]] [--only TEXT] [--sanitized]

--pace also prints how fast the honest job was, beside itself alone. Speed decides nothing here. On a machine whose
cores all of them share, the attackers take the honest job's: with --yield-cores they have only what it and the service
leave, as far as nice 19 goes, like attackers with a machine of their own. A service that is built --sanitized keeps
freed memory on purpose, and is not asked for it.
"""

import argparse
import contextlib
import os
import pathlib
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "support"))

import attacks  # noqa: E402
import processes  # noqa: E402
import tls_attacks  # noqa: E402
from certificates import Guarded  # noqa: E402
from processes import ROOT, await_, read, start, stop, tail  # noqa: E402

BIN = pathlib.Path(os.environ.get("BALLAST_BIN_DIR", ROOT / "build/release/bin"))
MEBI = 1 << 20
TLS = "tls"
FAMILIES = attacks.FAMILIES | {TLS: tls_attacks.family}
RETURNS_WITHIN = 64 * MEBI
PATIENCE = 60  # Seconds until a service that still does not answer, or has not freed memory, is broken.
# What a library would say, or what blames nobody.
UNUSABLE = ("threadpool", "exception", "std::", "assert", "unknown error", "stack", "0x", "traceback")


def resident_bytes(pid):
    for line in read(pathlib.Path("/proc", str(pid), "status")).splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def complaint(code, message):
    """What is wrong with an error; empty if nothing is."""
    if not message:
        return f"{code} without a message"
    if "\n" in message or "\x1b" in message or not message.isprintable():
        return f"{code} in more than a line of text: {message!r}"
    if len(message) > 1100:
        return f"{code} in {len(message)} characters"
    if len(message.split()) < 3:
        return f"{code} in fewer words than a person needs: {message!r}"
    for word in UNUSABLE:
        if word in message.lower():
            return f"{code} in a library's words: {message!r}"
    return ""


class Honest:
    """The honest job's process and the file of its steps."""

    def __init__(self, address, folder, *flags):
        self.file, self.log = folder / "steps", folder / "honest.log"
        self.process = start([sys.executable, "-B", HERE / "honest.py", address, self.file, *flags], self.log)

    def lines(self):
        return read(self.file).splitlines(keepends=True)

    def steps(self):
        """{step: CRC}, of whole lines, and when each was done."""
        found, times = {}, []
        for line in self.lines():
            words = line.split()
            if line.endswith("\n") and len(words) == 3:
                found[int(words[0])] = words[1]
                times.append(float(words[2]))
        return found, times

    def broken(self):
        return sum(line == "broken\n" for line in self.lines())

    def await_progress(self, what, steps=3):
        before = len(self.steps()[0])
        try:
            await_(f"{steps} more steps of the honest job {what}",
                   lambda: len(self.steps()[0]) >= before + steps, self.process, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}; the honest job said:{tail(self.log)}") from error


class Suite:
    def __init__(self, folder, words, guarded):
        """guarded: the service speaks TLS and asks who calls, and the honest job says so."""
        folder.mkdir()
        self.words, self.folder = words, folder
        self.failures = []
        more = Guarded(folder) if guarded else None
        if guarded:
            os.environ.update(more.environment)
        self.service = processes.Service(BIN / "ballastd", folder, "--holder=none", "--memory-limit=1GiB", "--threads=2",
                                         *(more.flags if guarded else []))
        self.target = attacks.Target(self.service.address)
        self.target.kept = []
        self.honest = Honest(self.service.address, folder, *([] if words.pace else ["--pause=0.1"]))
        self.honest.await_progress("before all attacks", 10)
        self.before = resident_bytes(self.service.process.pid)
        self.attacked = 0

    def stop(self):
        stop(self.honest.process)
        self.service.stop()
        for name in ("BALLAST_TLS_CA", "BALLAST_TOKEN_FILE"):
            os.environ.pop(name, None)

    def set_niceness(self, niceness):
        """Of the attackers, which are this process's threads."""
        if self.words.yield_cores:
            for thread in pathlib.Path("/proc/self/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)

    def pace(self, begin, end):
        """Steps a second."""
        times = self.honest.steps()[1]
        return sum(begin <= at < end for at in times) / max(end - begin, 1e-9)

    def run_family(self, name, family):
        if self.words.pace:
            time.sleep(3)
        begin = time.monotonic()
        alone = self.pace(begin - 3, begin)
        self.set_niceness(19)
        most = 0
        count = 0
        for what, attack in family():
            if self.words.only and self.words.only not in what:
                continue
            count += 1
            if self.words.verbose:
                print(f"  {what}", flush=True)
            self.attack(name, what, attack)
            most = max(most, resident_bytes(self.service.process.pid))
        end = time.monotonic()
        self.set_niceness(0)
        self.attacked += count
        self.honest.await_progress(f"after {name}")
        returned = self.await_memory(name)
        label = " with attackers that yield their cores" if self.words.yield_cores else ""
        pace = f", pace{label} {self.pace(begin, end):.1f} of {alone:.1f} steps/s" if self.words.pace else ""
        print(f"{name}: {count} attacks in {end - begin:.1f} s, memory {self.before // MEBI} to {most // MEBI} and "
              f"back to {returned // MEBI} MiB in {time.monotonic() - end:.1f} s, honest stream broken "
              f"{self.honest.broken()} times{pace}", flush=True)

    def attack(self, family, what, attack):
        try:
            errors = attack(self.target)
        except Exception as error:  # An attack that could not be made is a failure as well.
            self.failures.append(f"{family}: {what}: {type(error).__name__}: {error}")
            errors = []
        for code, message in errors:
            if self.words.verbose:
                print(f"      {code}: {message[:300]}", flush=True)
            if found := complaint(code, message):
                self.failures.append(f"{family}: {what}: {found}")
        if self.service.process.poll() is not None:
            raise AssertionError(f"the service ended with {self.service.process.returncode} under {family}: {what}; "
                                 f"it said:{tail(self.service.log)}")

    def await_memory(self, name):
        pid = self.service.process.pid
        most = self.before + RETURNS_WITHIN
        with contextlib.suppress(processes.Hangs):
            await_("memory", lambda: resident_bytes(pid) <= most, seconds=0 if self.words.sanitized else PATIENCE)
        after = resident_bytes(pid)
        if after > most and not self.words.sanitized:
            self.failures.append(f"{name}: memory went from {self.before // MEBI} to {after // MEBI} MiB and stayed")
        return after

    def check_bits(self):
        """Plays the honest job's steps once more, alone and over plain TCP."""
        stop(self.honest.process)
        folder = self.folder / "alone"
        for name in ("BALLAST_TLS_CA", "BALLAST_TOKEN_FILE"):
            os.environ.pop(name, None)
        found = {step: crc for step, crc in self.honest.steps()[0].items() if crc != "None"}
        folder.mkdir()
        service = processes.Service(BIN / "ballastd", folder, "--holder=none", "--memory-limit=1GiB", "--threads=2")
        try:
            alone = Honest(service.address, folder, f"--steps={max(found)}")
            if alone.process.wait(PATIENCE * 10) != 0:
                raise AssertionError(f"the honest job alone failed:{tail(alone.log)}")
            expected = alone.steps()[0]
        finally:
            service.stop()
        wrong = [step for step, crc in found.items() if expected[step] != crc]
        if wrong:
            self.failures.append(f"{len(wrong)} of {len(found)} honest steps have other bits, from step {wrong[0]} on")
        print(f"{len(found)} honest steps have the bits that they have alone", flush=True) if not wrong else None


def check_descriptors(folder):
    """A service with few descriptors is asked for more connections than it can have; then it still answers."""
    folder.mkdir()
    limited = folder / "limited"
    limited.write_text(f'#!/bin/sh\nulimit -n 64\nexec {BIN / "ballastd"} "$@"\n', encoding="ascii")
    limited.chmod(0o700)
    service = processes.Service(limited, folder, "--holder=none", "--memory-limit=64MiB", "--threads=1")
    try:
        target = attacks.Target(service.address)
        for _ in range(2):
            attacks.idle_connections(target, 80, b"")
        def answers():
            return not attacks.Target(service.address).errors(attacks.JOBS + "ListJobs", b"", seconds=2)
        await_("an answer after 80 connections with 64 descriptors", answers, service.process, PATIENCE)
        if "out of file descriptors" not in read(service.log):
            return [f"descriptors: no warning that they are out; the service said:{tail(service.log)}"]
    except AssertionError as error:
        return [f"descriptors: {error}"]
    finally:
        service.stop()
    return []


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--pace", action="store_true")
    parser.add_argument("--yield-cores", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--sanitized", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        folder = pathlib.Path(folder)
        attacked, failures = 0, check_descriptors(folder / "descriptors")
        for guarded in (False, True):
            families = [name for name in words.families if (name == TLS) == guarded]
            if families:
                suite = Suite(folder / ("guarded" if guarded else "plain"), words, guarded)
                try:
                    for name in families:
                        suite.run_family(name, FAMILIES[name])
                    suite.check_bits()
                finally:
                    suite.stop()
                attacked, failures = attacked + suite.attacked, failures + suite.failures
    for failure in failures:
        print(f"FAILED {failure[:600]}")
    print(f"{attacked} attacks, {len(failures)} failures")
    return 1 if failures or attacked == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
