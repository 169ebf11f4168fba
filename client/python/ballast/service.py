"""A service for one script or test: `ballastd` as a child of this process."""

from __future__ import annotations

import atexit
import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import threading
import time

from . import _files
from .errors import UnavailableError

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
# From SIGTERM to its end: the time that ballastd gives a step in progress, and a little more.
_STOP_SECONDS = 15


def _end_with_parent():
    """For the child: it gets SIGTERM when this process dies, also by SIGKILL. The kernel means the thread,
    so only the main one's children can have it; others are ended by atexit."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


class Service:
    """Starts `ballastd` on a unix socket that only this user reaches, and ends it with `stop`, with the
    process, or at the end of a `with` block. Its state is lost with it: save it, or run a service of
    its own for what should last.

    >>> with ballast.Service() as service:
    ...     optimizer = ballast.torch.AdamW(model.named_parameters(), service=service.address)

    memory_limit: for all jobs together, "8GiB" say. threads: for updates, 0 for one a core. UnavailableError
    with the last line of its log if it does not start within start_timeout seconds."""

    def __init__(self, *, memory_limit: str | None = None, threads: int = 0, start_timeout: float = 30.0):
        program = _files.program("ballastd")
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="ballast-"))
        self._owner = os.getpid()
        self._log = self._folder / "ballastd.log"
        port_file = self._folder / "address"
        flags = [f"--listen=unix:{self._folder / 'socket'}", f"--port-file={port_file}", "--nostartup-benchmark",
                 "--log-level=warning", f"--threads={threads}"]
        if memory_limit is not None:
            flags.append(f"--memory-limit={memory_limit}")
        with open(self._log, "wb") as log:
            # A group of its own: Ctrl-C is for the script, which may still want to save.
            self._process = subprocess.Popen([program, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                             start_new_session=True, preexec_fn=_end_with_parent())
        atexit.register(self.stop)
        deadline = time.monotonic() + start_timeout
        while True:
            ended = self._process.poll() is not None
            written = port_file.read_text() if port_file.exists() else ""
            if written.endswith("\n"):
                break
            if ended or time.monotonic() > deadline:
                lines = self._log.read_text(errors="replace").splitlines() or ["it said nothing"]
                self.stop()
                raise UnavailableError(f"ballastd did not start: {lines[-1]}")
            time.sleep(0.005)
        self.address = written.split()[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Ends the service, with SIGKILL if it does not end by itself. Stopping again does nothing; a fork
        of the process that started it stops nothing."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.stop)
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_) -> None:
        self.stop()
