"""The actor of ballast.ray: a `ballastd` on its node. The two end with each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import ray

from .. import _files, service
from ..client import Client
from ..errors import FailedPreconditionError, UnavailableError

_MEMORY = pathlib.Path("/dev/shm")
_PAUSE_SECONDS = 5.0  # Between two attempts to start over memory.


def folder_of(name: str) -> pathlib.Path:
    """Of the service's member on this node: what it finds when it is started again. Ray's session is the cluster's."""
    return _MEMORY / f"ballast-{name}@{ray.get_runtime_context().get_session_name().removeprefix('session_')}"


class Member:
    def __init__(self, name: str, members: int, flags: list[str]):
        self._name, self._members, self._flags, self._folder = name, members, flags, folder_of(name)
        self._socket, self._host = f"unix:{self._folder / 'socket'}", ray.util.get_node_ip_address()
        self._serves, self._said = False, "it printed nothing"
        if not (self._folder / "address").exists():
            self._say(f"{self!r} begins without jobs")
        while (self._folder / "address").exists() and not self._serves:  # Ray has started the actor again.
            try:
                self._start()
            except UnavailableError as error:  # For example, another program has its port.
                self._say(str(error))
                time.sleep(_PAUSE_SECONDS)

    def __repr__(self) -> str:  # Ray puts it before each line of the log.
        return f"the member of service {self._name} on node {self._host}"

    def _say(self, line: str) -> None:
        self._said = line.strip()
        print(self._said, file=sys.stderr, flush=True)

    def prepare(self) -> str:
        """Its certificate. Removes what earlier sessions of Ray have left."""
        for left in _MEMORY.glob(f"ballast-{self._name}@*"):
            with contextlib.suppress(OSError), open(left / "lock", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
        try:
            self._folder.mkdir(0o700)
        except FileExistsError:
            raise FailedPreconditionError(f"{self!r} needs {self._folder}, which another one has: the members of a "
                                          "service need hosts of their own") from None
        return service.make_identity(self._socket, self._host)

    def serve(self, trusted: list[str]) -> None:
        if not self._serves:
            pathlib.Path(service.tls_files(self._socket)["tls_ca"]).write_text("".join(trusted))
            self._start()

    def _start(self) -> None:
        kept, new, lock = self._folder / "address", self._folder / "address.new", open(self._folder / "lock", "wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._say(f"{self!r} waits for the end of an earlier process of it, which has its memory")
            fcntl.flock(lock, fcntl.LOCK_EX)
        new.unlink(missing_ok=True)
        listen = self.address() if kept.exists() else f"[{self._host}]:0" if ":" in self._host else f"{self._host}:0"
        self._process = subprocess.Popen(
            [_files.program("ballastd"), f"--listen={self._socket},{listen}", f"--port-file={new}",
             f"--state-dir={self._folder / 'jobs'}", "--nostartup-benchmark", *service.tls_flags(self._socket),
             *self._flags],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            pass_fds=[lock.fileno()], preexec_fn=service.end_with_parent(signal.SIGKILL))  # It keeps the lock.
        lock.close()
        watch = threading.Thread(target=self._watch, daemon=True)
        watch.start()
        while not (new.exists() and new.read_text().endswith("\n")):
            if not watch.is_alive():
                raise UnavailableError(f"{self!r} did not start: {self._said}")
            time.sleep(0.005)
        new.rename(kept)  # Its port stays.
        self._serves = True
        if not watch.is_alive():
            os._exit(1)

    def _watch(self) -> None:
        for line in self._process.stdout:
            self._say(line)
        self._process.wait()
        if self._serves:
            os._exit(1)  # Ray starts the actor again.

    def address(self) -> str:
        """Where others reach it."""
        kept = self._folder / "address"
        if not kept.exists():
            raise FailedPreconditionError(f"{self!r} has lost its memory, as its host was started again: "
                                          "close(save=False), and load the last checkpoint into another service")
        return kept.read_text().split()[1]

    def save(self, members: int) -> None:
        """The jobs that it leads. members: those that Ray has."""
        if not any(flag.startswith("--checkpoint-dir=") for flag in self._flags):
            return
        if members < self._members:
            raise UnavailableError(f"a member of service {self._name} was ended by hand, so its jobs cannot be saved: "
                                   "close(save=False)")
        client = Client(self._socket)
        for job in client.jobs():
            leads = not job["members"] or job["members"][0]["address"] == self.address()
            if leads and job["phase"] != "AWAITING_WEIGHTS":
                client.save(job["name"])

    def end(self) -> None:
        if self._serves:
            self._serves = False
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(FileNotFoundError), open(self._folder / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Now its last process has ended.
            shutil.rmtree(self._folder / "jobs", ignore_errors=True)  # While others see the lock.
            shutil.rmtree(self._folder)
