#!/usr/bin/env python3
"""Runs COUNT processes of one command on this host, with the variables that torchrun sets.

    run_workers.py [--max-restarts N] COUNT LOG_DIR COMMAND [ARGUMENT...]

When one fails the others are stopped, by SIGTERM and five seconds later by SIGKILL; once none is left
all are started again, at most N times (default 0). Then the failed one's last words and exit code are
passed on. Only rank 0's output is shown; LOG_DIR/rank-K.log holds the other ranks' output and
LOG_DIR/rank-K.err what each wrote to stderr, of all starts. SIGTERM, SIGINT and SIGHUP stop the workers,
too; should this process be killed, the kernel sends them SIGTERM.

MASTER_PORT is a free port, another one in each start, unless it is set; should another process take it
meanwhile, one more is tried. The host's cores are shared out by OMP_NUM_THREADS and
OPENBLAS_NUM_THREADS unless they are set.
"""

import argparse
import ctypes
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

GRACE_SECONDS = 5
PORT_WAS_TAKEN = "choose another MASTER_PORT"
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOST_PEER = re.compile(r"lost rank (\d+); see why it ended")


def number(least, most):
    def parse(text):
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be {least} to {most}, not '{text}'")
        return int(text)
    return parse


def end_with_parent(libc, parent):
    """In a child before it becomes a worker."""
    pr_set_pdeathsig = 1
    libc.prctl(pr_set_pdeathsig, int(signal.SIGTERM))
    if os.getppid() != parent:  # It ended before the kernel was asked.
        os._exit(1)


class Worker:
    """One rank of one start."""

    def __init__(self, rank, command, log_dir, environment):
        self.rank = rank
        self.error_path = log_dir / f"rank-{rank}.err"
        libc, parent = ctypes.CDLL(None), os.getpid()
        with open(self.error_path, "ab") as error, open(log_dir / f"rank-{rank}.log", "ab") as output:
            self.words_begin = os.fstat(error.fileno()).st_size
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=None if rank == 0 else output, stderr=error,
                env=os.environ | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                preexec_fn=(lambda: end_with_parent(libc, parent)) if sys.platform == "linux" else None)

    def code(self):
        """As a shell says it; None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def words(self):
        return self.error_path.read_bytes()[self.words_begin:].decode(errors="replace")

    def last_words(self):
        return next((line for line in reversed(self.words().splitlines()) if line.strip()), "")

    def failure(self):
        words = self.last_words()
        if self.process.returncode < 0:
            return f"it was ended by signal {-self.process.returncode}" + (f"; its last line: {words}" if words else "")
        return words or f"it exited with code {self.code()} and wrote no message"


class Launcher:
    def __init__(self, flags):
        self.flags = flags
        self.workers = []
        self.starting = False
        self.ending = False
        self.stopped_by = 0  # A signal that came while workers were being started.
        self.chooses_port = not os.environ.get("MASTER_PORT")
        flags.log_dir.mkdir(parents=True, exist_ok=True)
        for rank in range(flags.count):  # Of an earlier run.
            for ending in ("log", "err"):
                (flags.log_dir / f"rank-{rank}.{ending}").unlink(missing_ok=True)

    def start(self, restart):
        environment = {
            "WORLD_SIZE": str(self.flags.count), "LOCAL_WORLD_SIZE": str(self.flags.count),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR") or "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_MAX_RESTARTS": str(self.flags.max_restarts)}
        threads = str(max(1, len(os.sched_getaffinity(0)) // self.flags.count))
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or threads
        environment["OPENBLAS_NUM_THREADS"] = (
            os.environ.get("OPENBLAS_NUM_THREADS") or environment["OMP_NUM_THREADS"])
        if self.chooses_port:
            # An old process, should one be left on another host, looks for its peers elsewhere.
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                environment["MASTER_PORT"] = str(free.getsockname()[1])
        self.workers = []
        self.starting = True  # No signal may come between the start of a process and its place in the list.
        for rank in range(self.flags.count):
            if self.stopped_by == 0:
                self.workers.append(Worker(rank, self.flags.command, self.flags.log_dir, environment))
        self.starting = False
        if self.stopped_by != 0:
            self.on_signal(self.stopped_by, None)

    def on_signal(self, number, _):
        if self.starting:
            self.stopped_by = number
        elif not self.ending:
            self.ending = True
            sys.exit(128 + number)

    def await_end(self):
        """The worker that failed first; None when all are done."""
        while True:
            codes = [worker.code() for worker in self.workers]
            failed = next((worker for worker, code in zip(self.workers, codes) if code), None)
            if failed or None not in codes:
                return failed
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # Leaves the code for code().
            if ended.si_pid not in [worker.process.pid for worker in self.workers]:
                os.waitpid(ended.si_pid, 0)  # A child of the program that exec'd this one: waitid would return it for ever.

    def culprit(self, worker):
        """Who failed first, if this one only noticed that another had ended."""
        for _ in self.workers:
            lost = LOST_PEER.search(worker.last_words())
            if not lost or int(lost[1]) >= len(self.workers):
                break
            other = self.workers[int(lost[1])]
            try:  # It may have closed its connections and not ended yet.
                other.process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                break
            if other.code() == 0:
                break
            worker = other
        return worker

    def stop(self):
        """None is left afterwards."""
        for worker in self.workers:
            if worker.code() is None:
                worker.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in self.workers:
            try:
                worker.process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    def run(self):
        """The exit code."""
        restart = 0
        ports_left = 1 if self.chooses_port else 0
        while True:
            self.start(restart)
            failed = self.await_end()
            if failed is None:
                return 0
            failed = self.culprit(failed)
            self.stop()
            if ports_left > 0 and PORT_WAS_TAKEN in self.workers[0].words():
                ports_left -= 1
                continue
            story = f"rank {failed.rank} of {self.flags.count} failed: {failed.failure()}"
            if restart == self.flags.max_restarts:
                print(story, file=sys.stderr)
                return failed.code()
            restart += 1
            print(f"{story}; all start again ({restart} of at most {self.flags.max_restarts} times)",
                  file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--max-restarts", type=number(0, 999999), default=0, metavar="N")
    parser.add_argument("count", type=number(1, 9999), metavar="COUNT")
    parser.add_argument("log_dir", type=pathlib.Path, metavar="LOG_DIR")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    flags = parser.parse_args()
    if not flags.command:
        parser.error("no command is given")
    try:
        launcher = Launcher(flags)
    except OSError as error:
        print(f"run_workers.py: {error}; choose another folder for the logs", file=sys.stderr)
        return 2
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # If it were ignored, the end of a worker would not be reported.
    for ending in STOPPING:
        signal.signal(ending, launcher.on_signal)
    try:
        return launcher.run()
    except OSError as error:
        print(f"run_workers.py: {error}", file=sys.stderr)
        return 2
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        launcher.stop()


if __name__ == "__main__":
    sys.exit(main())
