#!/usr/bin/env python3
"""Runs COUNT processes of one command on this host, with the variables that torchrun sets.

    run_workers.py [--max-restarts N] COUNT LOG_DIR COMMAND [ARGUMENT...]

When one fails, the others are stopped, by SIGTERM and five seconds later by SIGKILL. Then all are
started again, at most N times (default 0). After that the failed one's last words and exit code are
passed on. Only rank 0's output is shown; LOG_DIR/rank-K.log holds the other ranks' output and
LOG_DIR/rank-K.err what each wrote to stderr, of all starts. SIGTERM, SIGINT and SIGHUP stop the
workers, too; if this process is killed, the kernel sends them SIGTERM.

MASTER_PORT is a free port, another one in each start, unless it is set. The host's cores are shared
out by OMP_NUM_THREADS and OPENBLAS_NUM_THREADS unless they are set.
"""

import argparse
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

GRACE_SECONDS = 5
PEER_LOST = 3  # The exit code of a ballast-worker that failed because another rank had ended.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LIBC = ctypes.CDLL(None)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def before_exec(parent):
    """In a child."""
    pr_set_pdeathsig = 1
    LIBC.prctl(pr_set_pdeathsig, int(signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    if os.getppid() != parent:  # It ended before the kernel was asked.
        os._exit(1)


def start(flags, restart, workers):
    """Adds a process for each rank to `workers`. Signals wait meanwhile, so that none misses a process."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // flags.count))
    environment = os.environ | {
        "WORLD_SIZE": str(flags.count), "LOCAL_WORLD_SIZE": str(flags.count),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT") or free_port(),
        "TORCHELASTIC_RESTART_COUNT": str(restart), "TORCHELASTIC_MAX_RESTARTS": str(flags.max_restarts),
        "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS") or threads}
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    for rank in range(flags.count):
        paths = [flags.log_dir / f"rank-{rank}.{ending}" for ending in ("log", "err")]
        with open(paths[0], "ab") as output, open(paths[1], "ab") as error:
            workers.append(subprocess.Popen(
                flags.command, stdin=subprocess.DEVNULL, stdout=None if rank == 0 else output, stderr=error,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                preexec_fn=lambda: before_exec(parent)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def await_end(workers):
    """The rank that fails first; None when all are done."""
    running = {worker.pid: rank for rank, worker in enumerate(workers)}
    while running:
        pid, status = os.wait()
        rank = running.pop(pid, None)  # None: a child of the program that exec'd this one.
        if rank is not None:
            workers[rank].returncode = os.waitstatus_to_exitcode(status)
            if status != 0:
                return rank
    return None


def culprit(workers, failed):
    """Who failed first. A rank that lost another one may end before it."""
    deadline = time.monotonic() + GRACE_SECONDS
    while workers[failed].returncode == PEER_LOST and time.monotonic() < deadline:
        codes = [worker.poll() for worker in workers]
        failed = next((rank for rank, code in enumerate(codes) if code not in (None, 0, PEER_LOST)), failed)
        if None not in codes:
            break
        time.sleep(0.01)
    return failed


def stop(workers):
    """None is left afterwards."""
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        try:
            worker.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def story(flags, rank, code):
    text = (flags.log_dir / f"rank-{rank}.err").read_text(errors="replace")
    words = next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
    ended = f"ended by signal {-code}: " if code < 0 else ""
    return f"rank {rank} of {flags.count} failed: {ended}{words}"


def run(flags, workers):
    """The exit code."""
    for restart in range(flags.max_restarts + 1):
        workers.clear()
        start(flags, restart, workers)
        failed = await_end(workers)
        if failed is None:
            return 0
        failed = culprit(workers, failed)
        code = workers[failed].returncode
        stop(workers)
        again = f"; all start again ({restart + 1} of at most {flags.max_restarts} times)"
        print(story(flags, failed, code) + (again if restart < flags.max_restarts else ""), file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N")
    parser.add_argument("count", type=int, metavar="COUNT")
    parser.add_argument("log_dir", type=pathlib.Path, metavar="LOG_DIR")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    flags = parser.parse_args()
    if flags.count < 1 or flags.max_restarts < 0 or not flags.command:
        parser.error("give a COUNT from 1 on, an N from 0 on, and a COMMAND")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # If it were ignored, the end of a worker would not be reported.
    for ending in STOPPING:
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    workers = []
    try:
        flags.log_dir.mkdir(parents=True, exist_ok=True)
        for rank in range(flags.count):
            for ending in ("log", "err"):
                (flags.log_dir / f"rank-{rank}.{ending}").unlink(missing_ok=True)
        return run(flags, workers)
    except OSError as error:
        print(f"run_workers.py: {error}", file=sys.stderr)
        return 2
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        stop(workers)


if __name__ == "__main__":
    sys.exit(main())
