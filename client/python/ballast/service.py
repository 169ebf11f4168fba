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
from collections.abc import Callable

from . import _files, _native
from .errors import BallastError, UnavailableError

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
PREFIX = "ballast-service-"  # Of the folder's name.
LOCK, USED, DONE = "lock", "used", "done"  # Files in it. The last two: of an outliving service.
_ADDRESS, _CERTIFICATE, _KEY, _TRUSTED = "address", "certificate.pem", "key.pem", "trusted.pem"
FILES = (LOCK, "lock.new", USED, DONE, "socket", _ADDRESS, "ballastd.log", _CERTIFICATE, _KEY, _TRUSTED,
         f"{_TRUSTED}.new")  # The only files in it.
Exchange = Callable[[str], list[str]]  # From a certificate, PEM, to those that are trusted.
# From SIGTERM to its end: ballastd's time for a step in progress, plus a margin.
_STOP_SECONDS = 15


def end_with_parent(number: int = signal.SIGTERM):
    """For the child: it gets this signal when this process ends, also by SIGKILL. The kernel ties this to the thread,
    so only children of the main thread can use it. atexit ends the others."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, int(number))


def _remove_left_folders() -> None:
    """Removes folders of services whose starting process was killed."""
    for folder in pathlib.Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # Another user's folder, or a living
                                                                             # service's.
            for name in (LOCK, USED) if (folder / USED).exists() else (LOCK,):
                held = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                stack.callback(os.close, held)
                facts = os.fstat(held)
                if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                    raise PermissionError
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in FILES:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()


def _write_private(path: pathlib.Path, text: str) -> None:
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)


def tls_files(address: str) -> dict[str, str]:
    """Of the service at this unix socket, if it was started with a host: credentials for this user's calls to it and to
    all services that it trusts, which trust it."""
    folder = pathlib.Path(address.removeprefix("unix:")).parent
    return {"tls_ca": str(folder / _TRUSTED), "tls_cert": str(folder / _CERTIFICATE), "tls_key": str(folder / _KEY)}


def tls_flags(address: str) -> list[str]:
    """Of `ballastd` at this unix socket, with these files."""
    files = tls_files(address)
    return [f"--tls-cert={files['tls_cert']}", f"--tls-key={files['tls_key']}", f"--tls-client-ca={files['tls_ca']}"]


def make_identity(address: str, host: str) -> str:
    """Writes the key and the certificate of these files, and returns the certificate, PEM. host: an IP address."""
    certificate, key = _native.make_identity(host.partition("%")[0])
    files = tls_files(address)
    _write_private(pathlib.Path(files["tls_key"]), key)
    _write_private(pathlib.Path(files["tls_cert"]), certificate)
    return certificate


def saving_flags(checkpoint_dir: str | os.PathLike | None, checkpoint_every: str | None) -> list[str]:
    """Of `ballastd`, from the arguments of Service."""
    if checkpoint_dir is None and checkpoint_every is not None:
        raise ValueError("checkpoint_every needs a place to save to: give checkpoint_dir=")
    if checkpoint_dir is None:
        return []
    return [f"--checkpoint-dir={os.path.abspath(checkpoint_dir)}", f"--checkpoint-every={checkpoint_every or ''}"]


class Service:
    """Starts `ballastd` on a unix socket that only this user reaches. The service ends with `stop`, with the
    process, or at the end of a `with` block. Without checkpoint_dir its state is lost then.

    >>> with ballast.Service() as service:
    ...     optimizer = ballast.torch.AdamW(model.named_parameters(), service=service.address)

    memory_limit: for all jobs together, for example "8GiB". threads: for updates; 0: one for each usable processor.
    checkpoint_dir: where jobs are saved: when the service ends, every `checkpoint_every` ("1000steps", "10min"), and
    with every `state_dict` of their optimizers. The service keeps checkpoint_keep scheduled checkpoints of each job.
    It keeps all requested ones, or checkpoint_keep_asked of them, if that is not 0. host: an IP address of this host, at
    which the service also listens over TCP, so that it can hold jobs together with services on other hosts. There it
    has TLS, with a key of its own. Only those connect whose certificates `exchange` returns; it gets this service's
    before the service starts. If the service does not start within start_timeout seconds: UnavailableError with the
    last line of its log."""

    def __init__(self, *, memory_limit: str | None = None, threads: int = 0,
                 checkpoint_dir: str | os.PathLike | None = None, checkpoint_every: str | None = None,
                 checkpoint_keep: int = 3, checkpoint_keep_asked: int = 0, host: str | None = None,
                 exchange: Exchange = lambda own: [own], start_timeout: float = 30.0):
        saving = saving_flags(checkpoint_dir, checkpoint_every)
        program = _files.program("ballastd")
        _remove_left_folders()
        self._folder = self._make_folder()
        self._owner = os.getpid()
        self._log = self._folder / "ballastd.log"
        port_file = self._folder / _ADDRESS
        listen = f"unix:{self._folder / 'socket'}"
        if host is not None:
            listen += f",[{host}]:0" if ":" in host else f",{host}:0"
        flags = [f"--listen={listen}", f"--port-file={port_file}", "--nostartup-benchmark", "--log-level=warning",
                 f"--threads={threads}"]
        if memory_limit is not None:
            flags.append(f"--memory-limit={memory_limit}")
        self._saves = bool(saving)
        if self._saves:
            flags += [*saving, f"--checkpoint-keep={checkpoint_keep}",
                      f"--checkpoint-keep-asked={checkpoint_keep_asked}"]
        with open(self._log, "wb") as log, open(self._folder / "lock.new", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # The child inherits it, so it lasts as long as the child lives.
            os.rename(lock.name, self._folder / LOCK)
            try:
                if host is not None:
                    flags += self._identify(host, exchange)
                self._start([program, *flags], log, lock)
            except BaseException:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise
        self._await_address(time.monotonic() + start_timeout)

    def _make_folder(self) -> pathlib.Path:
        return pathlib.Path(tempfile.mkdtemp(prefix=PREFIX))

    def _start(self, command: list[str], log, lock) -> None:
        # A separate process group: Ctrl-C is for the script, which may still want to save.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                         pass_fds=[lock.fileno()], start_new_session=True, preexec_fn=end_with_parent())
        atexit.register(self.stop)

    def _await_address(self, deadline: float) -> None:
        port_file = self._folder / _ADDRESS
        while True:
            ended = self._how_it_ended() is not None
            written = port_file.read_text() if port_file.exists() else ""
            if written.endswith("\n"):
                break
            if ended or time.monotonic() > deadline:
                lines = self._log.read_text(errors="replace").splitlines() or ["it printed nothing"]
                self.stop()
                raise UnavailableError(f"ballastd did not start: {lines[-1]}")
            time.sleep(0.005)
        self.address, self.address_for_others = (*written.split(), "")[:2]  # "unix:PATH" and, with a host, "HOST:PORT".

    def _identify(self, host: str, exchange: Exchange) -> list[str]:
        """The flags of TLS. Their files are there when the service starts."""
        address = f"unix:{self._folder / 'socket'}"
        make_identity(address, host)
        self.trust(exchange)
        return tls_flags(address)

    def trust(self, exchange: Exchange) -> None:
        """With a host: from now on also those connect whose certificates `exchange` returns; a running service needs
        some seconds for that."""
        trusted, new = self._folder / _TRUSTED, self._folder / f"{_TRUSTED}.new"
        known = trusted.read_text() if trusted.exists() else ""
        more = [other for other in exchange((self._folder / _CERTIFICATE).read_text()) if other not in known]
        if more:
            _write_private(new, known + "".join(more))
            os.rename(new, trusted)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> str | None:
        """Why it has ended, if it has, as far as is known."""
        how = self._how_it_ended()
        lines = self._log.read_text(errors="replace").splitlines() if how and self._log.exists() else []
        return next((line for line in reversed(lines) if "error" in line), how)

    def _how_it_ended(self) -> str | None:
        return None if self._process.poll() is None else f"exit code {self._process.returncode}"

    def stop(self) -> None:
        """Ends the service, with SIGKILL if needed. With a checkpoint_dir it saves first, however long that takes.
        If a save fails, the service is killed, and stop raises BallastError. Stopping again has no effect. In a fork
        of the starting process it has no effect."""
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
        """Whether it has ended, or has printed that it will not end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (not self._saves or self._not_saved() is None):
            try:
                self._process.wait(0.05)
                return True
            except subprocess.TimeoutExpired:
                pass
        return self._process.poll() is not None

    def _not_saved(self) -> str | None:
        """Why it does not end: a failed save."""
        lines = self._log.read_text(errors="replace").splitlines()
        if not any("the service does not stop" in line for line in lines):
            return None
        return next((line for line in lines if "not saved" in line), lines[-1])

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_) -> None:
        self.stop()
