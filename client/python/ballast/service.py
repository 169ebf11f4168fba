"""A service for one script or test: `ballastd` as a child of this process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time

from . import _files
from .errors import BallastError, UnavailableError

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PREFIX, _LOCK = "ballast-service-", "lock"  # Of its folder, and in it.
_FILES = (_LOCK, "lock.new", "socket", "address", "ballastd.log")  # Nothing else is ever in it.
# From SIGTERM to its end: the time that ballastd gives a step in progress, and a little more.
_STOP_SECONDS = 15


def _end_with_parent():
    """For the child: it gets SIGTERM when this process dies, also by SIGKILL. The kernel means the thread,
    so only the main one's children can have it; others are ended by atexit."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _remove_left_folders() -> None:
    """Of services that have ended without the process that started them, which was killed."""
    for folder in pathlib.Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # Another user's, or one that lives.
            held = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            stack.callback(os.close, held)
            facts = os.fstat(held)
            if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in _FILES:
                    (folder / name).unlink(missing_ok=True)
                folder.rmdir()


class Service:
    """Starts `ballastd` on a unix socket that only this user reaches, and ends it with `stop`, with the
    process, or at the end of a `with` block. Without checkpoint_dir its state is lost with it.

    >>> with ballast.Service() as service:
    ...     optimizer = ballast.torch.AdamW(model.named_parameters(), service=service.address)

    memory_limit: for all jobs together, "8GiB" say. threads: for updates, 0 for one a usable processor. checkpoint_dir: where
    its jobs are saved when it ends, every `checkpoint_every` ("1000steps", "10min"), and with every `state_dict` of
    their optimizers. Of each job checkpoint_keep stay of those that the service saves by itself, and all others, or
    checkpoint_keep_asked, if that is not 0. UnavailableError with the last line of its log if it does
    not start within start_timeout seconds."""

    def __init__(self, *, memory_limit: str | None = None, threads: int = 0,
                 checkpoint_dir: str | os.PathLike | None = None, checkpoint_every: str | None = None,
                 checkpoint_keep: int = 3, checkpoint_keep_asked: int = 0, start_timeout: float = 30.0):
        if checkpoint_every is not None and checkpoint_dir is None:
            raise ValueError("checkpoint_every needs a place to save to: give checkpoint_dir=")
        program = _files.program("ballastd")
        _remove_left_folders()
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._owner = os.getpid()
        self._log = self._folder / "ballastd.log"
        port_file = self._folder / "address"
        flags = [f"--listen=unix:{self._folder / 'socket'}", f"--port-file={port_file}", "--nostartup-benchmark",
                 "--log-level=warning", f"--threads={threads}"]
        if memory_limit is not None:
            flags.append(f"--memory-limit={memory_limit}")
        if checkpoint_dir is not None:
            flags += [f"--checkpoint-dir={os.path.abspath(checkpoint_dir)}", f"--checkpoint-keep={checkpoint_keep}",
                      f"--checkpoint-keep-asked={checkpoint_keep_asked}",
                      f"--checkpoint-every={checkpoint_every or ''}"]
        self._saves = checkpoint_dir is not None
        with open(self._log, "wb") as log, open(self._folder / "lock.new", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # As long as the child lives, which inherits it.
            os.rename(lock.name, self._folder / _LOCK)
            # A group of its own: Ctrl-C is for the script, which may still want to save.
            self._process = subprocess.Popen([program, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                             pass_fds=[lock.fileno()], start_new_session=True,
                                             preexec_fn=_end_with_parent())
        atexit.register(self.stop)
        deadline = time.monotonic() + start_timeout
        while True:
            ended = self._process.poll() is not None
            written = port_file.read_text() if port_file.exists() else ""
            if written.endswith("\n"):
                break
            if ended or time.monotonic() > deadline:
                lines = self._log.read_text(errors="replace").splitlines() or ["it printed nothing"]
                self.stop()
                raise UnavailableError(f"ballastd did not start: {lines[-1]}")
            time.sleep(0.005)
        self.address = written.split()[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> str | None:
        """Why, as far as is known, if it has ended."""
        if self._process.poll() is None:
            return None
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return next((line for line in reversed(lines) if "error" in line), f"exit code {self._process.returncode}")

    def stop(self) -> None:
        """Ends the service, with SIGKILL if it does not end by itself. With a checkpoint_dir it saves first, however
        long that takes; BallastError, after it has been killed, if it could not. Stopping again does nothing; a
        fork of the process that started it stops nothing."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.stop)
        failed = None
        if self._process.poll() is None:
            self._process.terminate()
            while not self._wait(_STOP_SECONDS):
                failed = self._not_saved()
                if failed is not None or not self._saves:
                    self._process.kill()
                    self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        if failed is not None:
            raise BallastError(f"the service was stopped, and its jobs were not saved: {failed}")

    def _wait(self, seconds: float) -> bool:
        """Whether it has ended, or, before that, printed that it does not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (not self._saves or self._not_saved() is None):
            try:
                self._process.wait(0.05)
                return True
            except subprocess.TimeoutExpired:
                pass
        return self._process.poll() is not None

    def _not_saved(self) -> str | None:
        """Why it does not end: a save has failed."""
        lines = self._log.read_text(errors="replace").splitlines()
        if not any("the service does not stop" in line for line in lines):
            return None
        return next((line for line in lines if "not saved" in line), lines[-1])

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_) -> None:
        self.stop()
