"""Starts a service, and ends it with another process: `ballastd` for the ranks that an agent starts again. A program of
its own, which imports nothing of the package: see OutlivingService."""

import contextlib
import ctypes
import fcntl
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import time

_LOOK_SECONDS = 5.0
_STOP_SECONDS = 15  # As in service.py.
_PR_SET_PDEATHSIG = 1


def main(folder: pathlib.Path, agent: int, lock: int, idle_seconds: float, tool: str, command: list[str]) -> None:
    """agent: its pidfd. lock: a descriptor of the folder's lock, which the service alone holds from here on. Nobody has
    used it for idle_seconds: then it ends, too. tool: the path of `ballast`."""
    libc = ctypes.CDLL(None)
    with open(folder / "ballastd.log", "ab") as log:
        service = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock],
                                   preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM)))
    os.close(lock)
    used = open(folder / "used", "rb")
    last_used = time.monotonic()
    while not select.select([agent], [], [], min(_LOOK_SECONDS, idle_seconds))[0]:
        idle_for = time.monotonic() - last_used
        if not _locks(used):
            last_used = time.monotonic()
        elif idle_for >= (idle_seconds if service.poll() is None else 0):
            break  # Whoever comes now waits for the lock.
        else:
            fcntl.flock(used, fcntl.LOCK_UN)
    with contextlib.suppress(OSError, ValueError, KeyError, subprocess.SubprocessError):
        _tell(folder, tool)
    service.terminate()
    try:
        service.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        service.kill()
        service.wait()
    with contextlib.suppress(OSError), open(folder / "lock", "rb") as of_service:
        if _locks(of_service):  # Otherwise another service has the folder.
            shutil.rmtree(folder, ignore_errors=True)


def _locks(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _tell(folder: pathlib.Path, tool: str) -> None:
    """The jobs that end now, unless the ranks had come to their end."""
    if (folder / "done").exists():
        return
    addresses = (folder / "address").read_text().split()
    listed = subprocess.run([tool, "jobs", "--json", f"--service={addresses[0]}"], stdin=subprocess.DEVNULL,
                            capture_output=True, timeout=_STOP_SECONDS, check=True)
    for job in json.loads(listed.stdout)["jobs"]:
        leads = not job["members"] or job["members"][0]["address"] in addresses
        if leads and job["phase"] != "AWAITING_WEIGHTS":
            print(f"job {job['name'].removeprefix('jobs/')} was kept at step {job['committed_step']} for ranks that start "
                  "again, and ends now with its run (service=None)", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5], sys.argv[6:])
