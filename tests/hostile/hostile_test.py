"""Attacks on one ballastd, with an honest job beside them. After each family of attacks, the same questions:
does the honest job go on, and with the bits that it has without them; did memory stay below what the family may cost,
and does it return to within 64 MiB of where it was; is every error one line that a person can act on?

    hostile_test.py [FAMILY...] [--only TEXT] [--sanitized]
    hostile_test.py [FAMILY...] --pace [--flat-out]

--pace measures instead (pace.py). A service that is built --sanitized has memory of another size, and keeps freed memory
on purpose: it is not asked for it, nor attacked by amounts unless such a family is named.
"""

import argparse
import contextlib
import os
import pathlib
import re
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "support"))

try:
    import grpc  # noqa: F401
except ModuleNotFoundError:
    sys.exit(f"{sys.executable} has no grpc: install python3-grpcio (deploy/install_packages.sh does)")

import attacks  # noqa: E402
import connection_attacks  # noqa: E402
import disk_attacks  # noqa: E402
import frame_attacks  # noqa: E402
import host_attacks  # noqa: E402
import pace  # noqa: E402
import http_attacks  # noqa: E402
import processes  # noqa: E402
import size_attacks  # noqa: E402
import tls_attacks  # noqa: E402
from certificates import Guarded  # noqa: E402
from processes import ROOT, await_, read, start, stop, tail  # noqa: E402

BIN = pathlib.Path(os.environ.get("BALLAST_BIN_DIR", ROOT / "build/release/bin"))
MEBI = 1 << 20
GUARDED = {"tls": tls_attacks.family, "http-tls": http_attacks.tls_family}  # On a service that asks who calls.
PAGES = re.compile(r"status page at (https?)://127\.0\.0\.1:(\d+)/")
RETURNS_WITHIN = 64 * MEBI
SETTLES_WITHIN = 0.5  # Seconds in which what an attack has left is still counted as its own.
PATIENCE = 60  # Seconds until a service that still does not answer, or has not freed memory, is broken.

# What the service may have at once while a family attacks, in MiB beyond what it had before: what server/README.md
# says that a peer can cost. Messages that have not been handled: 512 MiB, at this memory limit of 1 GiB. Descriptions
# are read within that limit. A stream or connection: some 10 KB. The rest is room for the heap, 64 MiB.
BUFFERED, LIMIT, HEAP = 512, 1024, 64
PEAKS = {
    "malformed": HEAP,
    "moments": HEAP,
    "numbers": HEAP,
    "descriptions": LIMIT + HEAP,
    "fields": BUFFERED + HEAP,
    "size": BUFFERED + HEAP,
    "taking": BUFFERED,  # Its jobs have 200 MB.
    "disk": BUFFERED + HEAP,
    "host": BUFFERED + HEAP,
    "frames": 2 * HEAP,  # Of four connections: some 10 MB each.
    "connections": BUFFERED,
    "silence": HEAP,
    "http": 2 * HEAP,
    "tls": 2 * HEAP,
    "http-tls": 2 * HEAP,
}
FAMILIES = tuple(PEAKS)
# Attacks by amounts: for a sanitizer the same code as with a little, at several times the cost.
OF_AMOUNTS = {"descriptions", "fields", "size", "taking", "host", "connections"}

# What a library would say, or what blames nobody.
UNUSABLE = ("threadpool", "exception", "std::", "assert", "unknown error", "stack", "0x", "traceback", "protobuf",
            "http", "socket closed", "larger than max", "compression", "deadline exceeded", "cannot find field", "errno",
            "absl", "status_", "internal error", "syntax error", "zlib")
# What gRPC itself answers before a call reaches the service. Ballast's clients put it into words of theirs
# (proto/status.cc), and who does not speak HTTP/2 is no client.
OF_GRPC = (("RESOURCE_EXHAUSTED", r"Received message larger than max \(\d+ vs\. \d+\)"),
           ("UNIMPLEMENTED", r"Compression algorithm '\w+' is disabled\."),
           ("UNAVAILABLE", r"Failed parsing HTTP/2"), ("UNKNOWN", r"Missing :method header"))


def memory_of(pid, what):
    """VmRSS or VmHWM, in bytes."""
    for line in read(pathlib.Path("/proc", str(pid), "status")).splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak(pid):
    pathlib.Path("/proc", str(pid), "clear_refs").write_text("5", encoding="ascii")


def complaint(code, message):
    """What is wrong with an error; empty if nothing is."""
    if any(code == of_code and re.fullmatch(pattern, message or "") for of_code, pattern in OF_GRPC):
        return ""
    if not message:
        return f"{code} without a message"
    if "\n" in message or "\x1b" in message or not message.isprintable():
        return f"{code} in more than a line of text: {message!r}"
    if len(message) > 1100:
        return f"{code} in {len(message)} characters"
    if len(message.split()) < 3:
        return f"{code} in fewer words than a person needs: {message!r}"
    for word in UNUSABLE:
        # Only answers over HTTP have a number for a code; those may say what HTTP wants.
        if word in message.lower() and not (word == "http" and code.isdigit()):
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
        checkpoints, unix = folder / "checkpoints", f"unix:{folder}/socket"
        self.service = processes.Service(
            BIN / "ballastd", folder, "--holder=none", "--memory-limit=1GiB", "--threads=2",
            "--metrics-listen=127.0.0.1:0",
            *(more.flags if guarded else [f"--checkpoint-dir={checkpoints}"]),
            listen="127.0.0.1:0" if guarded else f"127.0.0.1:0,{unix}")
        self.target = attacks.Target(self.service.address)
        url = await_("the status page's address", lambda: PAGES.search(read(self.service.log)), self.service.process)
        self.target.pages, self.target.pages_speak_tls = ("127.0.0.1", int(url[2])), url[1] == "https"
        self.target.kept = []
        self.silence = None
        self.honest = Honest(self.service.address, folder, *(pace.HONEST if words.pace else ["--pause=0.1"]))
        self.honest.await_progress("before all attacks", 10)
        if guarded:
            self.families = GUARDED
        else:
            self.silence = connection_attacks.Silence(self.target)
            self.families = {**attacks.FAMILIES, **size_attacks.FAMILIES, "disk": disk_attacks.Disk(checkpoints).family,
                             "host": host_attacks.Host(unix).family, "frames": frame_attacks.family,
                             "connections": connection_attacks.connections_family, "silence": self.silence.family,
                             "http": http_attacks.common_family}
        self.before = memory_of(self.service.process.pid, "VmRSS")
        self.attacked = 0

    def stop(self):
        if self.silence is not None:
            self.silence.stop()
        stop(self.honest.process)
        self.service.stop()
        for name in ("BALLAST_TLS_CA", "BALLAST_TOKEN_FILE"):
            os.environ.pop(name, None)

    def attacks_of(self, name):
        for what, attack in self.families[name]():
            if self.words.only in what:
                yield what, attack

    def run_family(self, name):
        begin = time.monotonic()
        pid = self.service.process.pid
        count, peak, worst = 0, 0, ""
        attack_before = "the other families"
        for what, attack in self.attacks_of(name):
            count += 1
            if self.words.verbose:
                print(f"  {what}", flush=True)
            forget_peak(pid)
            begin_bytes = memory_of(pid, "VmRSS")
            self.attack(name, what, attack)
            self.settle()
            most = memory_of(pid, "VmHWM")
            if self.words.verbose:
                print(f"      memory {begin_bytes // MEBI} to {most // MEBI} MiB", flush=True)
            if most > peak:
                # A call that its attacker has given up may still be worked on.
                peak, worst = most, f'{what} (it began at {begin_bytes // MEBI} MiB, after "{attack_before}")'
            attack_before = what
        if peak > self.before + PEAKS[name] * MEBI and not self.words.sanitized:
            self.failures.append(f"{name}: {worst}: the service had {peak // MEBI} MiB, of which it had "
                                 f"{self.before // MEBI} before, and {PEAKS[name]} more are what it may cost")
        end = time.monotonic()
        self.attacked += count
        self.honest.await_progress(f"after {name}")
        returned = self.await_memory(name)
        print(f"{name}: {count} attacks in {end - begin:.1f} s, memory {self.before // MEBI} to {peak // MEBI} and "
              f"back to {returned // MEBI} MiB in {time.monotonic() - end:.1f} s, honest stream broken "
              f"{self.honest.broken()} times", flush=True)

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
                                 f"it printed:{tail(self.service.log)}")

    def settle(self):
        """What an attack costs, or leaves, after its end would otherwise be taken for the next one's."""
        pid, end = self.service.process.pid, time.monotonic() + (0 if self.words.sanitized else SETTLES_WITHIN)
        while memory_of(pid, "VmRSS") > self.before + RETURNS_WITHIN and time.monotonic() < end:
            time.sleep(0.05)

    def await_memory(self, name):
        pid = self.service.process.pid
        most = self.before + RETURNS_WITHIN
        with contextlib.suppress(processes.Hangs):
            await_("memory", lambda: memory_of(pid, "VmRSS") <= most, seconds=0 if self.words.sanitized else PATIENCE)
        after = memory_of(pid, "VmRSS")
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


@contextlib.contextmanager
def limited_service(folder, limit, *flags):
    folder.mkdir()
    limited = folder / "limited"
    limited.write_text(f'#!/bin/sh\nulimit {limit}\nexec {BIN / "ballastd"} "$@"\n', encoding="ascii")
    limited.chmod(0o700)
    service = processes.Service(limited, folder, "--memory-limit=64MiB", "--threads=1", *flags)
    try:
        yield service, attacks.Target(service.address)
    finally:
        service.stop()


def await_answer(what, service, method, request):
    """Of a new connection."""
    await_(f"an answer after {what}",
           lambda: not attacks.Target(service.address).errors(attacks.JOBS + method, request, seconds=2),
           service.process, PATIENCE)


def check_descriptors(folder):
    """A service with few descriptors is asked for more connections than it can have; then it still answers."""
    try:
        with limited_service(folder, "-n 64", "--holder=none") as (service, target):
            for _ in range(2):
                connection_attacks.idle_connections(target, 80, b"")
            await_answer("80 connections with 64 descriptors", service, "ListJobs", b"")
            if "out of file descriptors" not in read(service.log):
                return [f"descriptors: no warning that they are out; the service said:{tail(service.log)}"]
    except AssertionError as error:
        return [f"descriptors: {error}"]
    return []


def check_memory(folder):
    """A stranger opens streams until the service has no more memory. It ends, and the next process has its jobs."""
    try:
        with limited_service(folder, "-v 400000") as (service, target), target.job() as (name, uid, _):
            connection_attacks.streams_without_end(target)
            await_answer("a flood of streams", service, "GetJob", attacks.message((1, f"jobs/{name}"), (3, uid)))
            if "started again" not in read(service.log):
                return [f"memory: the service has not run out of it; it said:{tail(service.log)}"]
    except AssertionError as error:
        return [f"memory: {error}"]
    return []


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--pace", action="store_true")
    parser.add_argument("--flat-out", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--sanitized", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    words = parser.parse_args()
    if not words.families:
        words.families = [name for name in FAMILIES if not (words.sanitized and name in OF_AMOUNTS)]
    if unknown := set(words.families) - set(FAMILIES):
        parser.error(f"there is no family {unknown.pop()}; there are {', '.join(FAMILIES)}")
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        folder = pathlib.Path(folder)
        attacked, failures = 0, []
        if words.pace:
            pace.print_header()
        else:
            failures += check_descriptors(folder / "descriptors")
            if not words.sanitized:  # It maps more than any limit.
                failures += check_memory(folder / "memory")
        for guarded in (False, True):
            families = [name for name in words.families if (name in GUARDED) == guarded]
            if families:
                suite = Suite(folder / ("guarded" if guarded else "plain"), words, guarded)
                try:
                    for name in families:
                        if not words.pace:
                            suite.run_family(name)
                        elif name != "silence":  # Which does nothing.
                            pace.measure(suite, name, words.flat_out)
                    if not words.pace:
                        suite.check_bits()
                except AssertionError as error:  # What failed before it is said as well.
                    print(f"{name}: {error}", flush=True)
                    suite.failures.append(f"{name}: {error}")
                finally:
                    suite.stop()
                attacked, failures = attacked + suite.attacked, failures + suite.failures
    for failure in failures:
        print(f"FAILED {failure[:600]}")
    print(f"{attacked} attacks, {len(failures)} failures")
    return 1 if failures or attacked == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
