#!/usr/bin/env python3
"""A service whose process gets no more memory while it trains: by its address space (RLIMIT_AS, as `ulimit -v` sets it)
or by a control group. The process ends, its parent starts another one, and the trainer, which is not started again, ends
with the weights of every step and the state of a life that nothing befell. And what would end each of these processes is
refused by its size: after it the same process serves.

The control group is one that the test makes; where the machine lets it make none, that part says so and is left out.
"""

import contextlib
import errno
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import threading

from instants_test import Life, Undisturbed
from runs import BIN, PATIENCE, ROOT, Service, await_, child_of, read, served, tail

sys.path.insert(0, str(ROOT / "tests/hostile"))

import ballast  # noqa: E402
import grpc  # noqa: E402
import wire  # noqa: E402

MEBI = 1 << 20
DEATHS = 3


class Group:
    """A control group of the test's own, of either version."""

    def __init__(self):
        groups = dict(line.split(":", 2)[1:] for line in read(pathlib.Path("/proc/self/cgroup")).splitlines())
        is_first = "memory" in groups
        mount = pathlib.Path("/sys/fs/cgroup", "memory" if is_first else "")
        own = mount / groups.get("memory" if is_first else "", "/").lstrip("/")
        self.path = (own if own.is_dir() else mount) / f"ballast-memory-test-{os.getpid()}"
        self.path.mkdir()
        self.most = self.path / ("memory.limit_in_bytes" if is_first else "memory.max")
        self.used = self.path / ("memory.usage_in_bytes" if is_first else "memory.current")
        self.unlimited = "-1" if is_first else "max"
        for name in ("memory.swappiness", "memory.swap.max"):
            with contextlib.suppress(OSError):
                (self.path / name).write_text("0")

    def needed(self):
        """What is in use without cached files, whose memory the kernel takes back first."""
        facts = dict(line.split() for line in read(self.path / "memory.stat").splitlines())
        return int(read(self.used)) - int(facts["active_file"]) - int(facts["inactive_file"])

    def move(self, pid):
        (self.path / "cgroup.procs").write_text(str(pid))

    def limit(self, bytes_):
        """False where the kernel finds that more is in use, as version 1 says."""
        try:
            self.most.write_text(str(bytes_))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    @contextlib.contextmanager
    def pressed(self, pid):
        """Another process takes all that the group has left, and the kernel ends this one for it. Its parent is not in
        the group: it might be the next one to be ended."""
        self.move(pid)
        pathlib.Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        with subprocess.Popen([sys.executable, "-c", "input(); held = bytearray(32 << 20); input()"],
                              stdin=subprocess.PIPE) as hungry:
            try:
                self.move(hungry.pid)
                await_("the limit", lambda: self.limit(self.needed() + 16 * MEBI))
                hungry.stdin.write(b"\n")
                hungry.stdin.flush()
                yield
            finally:
                self.limit(self.unlimited)
                hungry.kill()

    def remove(self):
        await_("the group's end", lambda: not read(self.path / "cgroup.procs").strip())
        self.path.rmdir()


def group_that_limits():
    """Or None, and why not in a line: one with less memory than a process takes ends it."""
    try:
        group = Group()
    except OSError as error:
        print(f"SKIPPED: no control group for memory can be made here ({error}); only ulimit -v is tested")
        return None
    code = None
    with contextlib.suppress(OSError):
        group.limit(16 * MEBI)
        code = subprocess.run(["sh", "-c", f'echo $$ > "{group.path}/cgroup.procs" && exec "$0" -c "bytearray(64 << 20)"',
                               sys.executable], stderr=subprocess.DEVNULL, check=False).returncode
        group.limit(group.unlimited)
    if code == -9:
        return group
    group.remove()
    print(f"SKIPPED: a control group here limits no memory (code {code}); only ulimit -v is tested")
    return None


class Starver:
    """In the place of a Killer: while gradients come and while it updates, the service's process gets no more memory."""

    def __init__(self, service, life, group):
        self.service, self.life, self.group = service, life, group
        self.deaths = 0
        self.thread, self.problem = None, None

    def during(self, aim):
        if aim not in ("gradients", "update") or not self.has_checkpoint():
            return
        self.stop()
        if self.deaths == DEATHS:
            return
        self.thread = threading.Thread(target=self.strike)
        self.thread.start()

    def has_checkpoint(self):
        with contextlib.suppress(ballast.BallastError):  # Perhaps the process is ending.
            return bool(self.life.client().checkpoints())
        return False

    def asks(self):
        """Reading all of a checkpoint takes threads and buffers."""
        with contextlib.suppress(ballast.BallastError):
            self.life.client().verify(self.life.job.name)
        return True

    def strike(self):
        try:
            pid, before = child_of(self.service), served(self.service)
            if self.group is None:
                resource.prlimit(pid, resource.RLIMIT_AS, (MEBI, resource.RLIM_INFINITY))
            with self.group.pressed(pid) if self.group is not None else contextlib.nullcontext():
                await_("its end", lambda: self.asks() and child_of(self.service) != pid)
            await_("the next process", lambda: served(self.service) > before, self.service.process)
            self.deaths += 1
        except BaseException as error:  # pylint: disable=broad-except
            self.problem = error

    def stop(self):
        if self.thread is not None:
            self.thread.join()
        if self.problem is not None:
            raise self.problem


def play_training(folder, undisturbed, mode, shared, group):
    saved = pathlib.Path(tempfile.mkdtemp(prefix="saved-", dir=folder))
    service = Service(folder, f"--checkpoint-dir={saved}", "--checkpoint-every=2steps", "--most-deaths=0", group=True)
    try:
        life = Life(service, saved, "gpt", shared, mode, undisturbed.known)
        starver = Starver(service, life, group)
        life.live(starver)
        if starver.deaths != DEATHS:
            raise AssertionError(f"the process ended {starver.deaths} times by memory, and was to {DEATHS} times")
        if life.state() != undisturbed.state:
            raise AssertionError("the state differs from that of the life that nothing befell")
        # A stack that cannot grow ends a process without a word.
        ends = [line for line in read(service.log).splitlines() if "the system gives it no more" in line]
        life.check_checkpoints()
    except BaseException:
        print(f"the service said:{tail(service.log, 60)}", file=sys.stderr)
        raise
    finally:
        service.stop()
    print(f"{mode}, {'shared memory' if shared else 'the connection'}, by "
          f"{'ulimit -v' if group is None else 'a control group'}: {DEATHS} ends, same bits"
          + (f"; it said: {ends[0]}" if ends else ""))


def expect_refused(what, code, words):
    if "RESOURCE_EXHAUSTED" not in code and "INVALID_ARGUMENT" not in code or words not in code:
        raise AssertionError(f"{what}: {code}")


def refusal(connection, method, request, streams=False):
    try:
        if streams:
            list(connection.unary_stream(method)(request, timeout=PATIENCE))
        else:
            wire.unary(connection, method, request, PATIENCE)
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "taken"


def play_refusals(folder):
    """Under a limit of little more than the process has; each of these takes more once it is parsed or laid out."""
    saved = folder / "large"
    (saved / "gpt/step-1.1").mkdir(parents=True)
    parameter = '{"name":"p","shape":[1],"group":"g","elements":1,"update_count":1}'
    (saved / "gpt/step-1.1/index.json").write_text(
        '{"format":"ballast-checkpoint","version":1,"job":"gpt","uid":"u","step":1,"epoch":1,"generation":1,"saved_unix_ms":1,'
        f'"parameters":[{",".join([parameter] * 500_000)}]}}')
    service = Service(folder, "--memory-limit=256MiB", f"--checkpoint-dir={saved}", "--threads=1")
    try:
        pid = child_of(service)
        with contextlib.closing(wire.channel(service.address)) as connection:
            first = wire.message((1, wire.job("first", 256, 256)))
            wire.unary(connection, wire.JOBS + "CreateJob", first)
            service.ask("jobs")
            used = 1024 * int(read(pathlib.Path(f"/proc/{pid}/status")).partition("VmSize:")[2].split()[0])
            resource.prlimit(pid, resource.RLIMIT_AS, (used + 96 * MEBI, resource.RLIM_INFINITY))
            for what, method, request, words in (
                    ("a million chunks in thirty bytes", wire.JOBS + "CreateJob",
                     wire.message((1, wire.job("chunks", 1 << 28, 256))), "laying out a job does not fit"),
                    ("a million parameters", wire.JOBS + "CreateJob",
                     wire.message((1, wire.job("parameters", 0) + b"\x22\x00" * (1 << 20))), "parameters"),
                    ("chunks to read without an end", wire.TRAIN + "ReadWeights",
                     wire.message((1, "jobs/first"), (4, bytes(30 * MEBI))), ""),
                    ("names to look at without an end", wire.STATE + "ReadState",
                     wire.message((1, "jobs/first"), (2, "x" * (30 * MEBI))), "")):
                code = refusal(connection, method, request, streams="Read" in method)
                expect_refused(what, code, words)
        listed = subprocess.run([BIN / "ballast", "verify", "gpt", "--json", "--service", service.address], text=True,
                                capture_output=True, timeout=PATIENCE, check=False)
        problem = json.loads(listed.stdout)["checkpoints"][0]["problem"] if listed.stdout else listed.stderr
        if "does not fit" not in problem:
            raise AssertionError(f"an index of half a million parameters: {problem}")
        if child_of(service) != pid or "is started again" in read(service.log):
            raise AssertionError("the process has ended")
    except BaseException:
        print(f"the service said:{tail(service.log, 60)}", file=sys.stderr)
        raise
    finally:
        service.stop()
    print("what would have ended the process is refused by its size, and the same process serves")


def main():
    with tempfile.TemporaryDirectory(prefix="ballast-memory-") as temporary:
        folder = pathlib.Path(temporary)
        play_refusals(folder)
        undisturbed = Undisturbed(folder)
        play_training(folder, undisturbed, "speculate", False, None)
        group = group_that_limits()
        if group is not None:
            try:
                play_training(folder, undisturbed, "wait", True, group)
            finally:
                group.remove()


if __name__ == "__main__":
    main()
