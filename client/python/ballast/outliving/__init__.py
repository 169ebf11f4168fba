"""A service for the ranks of a launcher that starts them again after a failure, such as `torchrun --max-restarts=3`. It
lives as long as the launcher's agent, which is the ranks' parent process."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import time

from .. import _files
from ..errors import FailedPreconditionError
from ..service import DONE, FILES, LOCK, PREFIX, USED, Exchange, Service

IDLE_SECONDS = 3600.0  # It also ends if no rank has used it for so long.
_KEEPER = pathlib.Path(__file__).with_name("keeper.py")


def is_wanted() -> bool:
    """Whether ranks of this run are started again."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


class OutlivingService(Service):
    """The service that this rank, or the rank that had its place before, has started; otherwise a new one. The rank's
    place is its agent's process, its run, and its number on the node. `stop` leaves the service as it is. host, exchange:
    see Service; it has one service with a host, and one without."""

    def __init__(self, host: str | None, exchange: Exchange):
        self._owner, self._folder = os.getpid(), _folder(host is not None)
        self._log = self._folder / "ballastd.log"
        self._hold()
        if _lives(self._folder):
            self._await_address(time.monotonic() + 30.0)
            if host is not None:
                self.trust(exchange)
        else:
            for name in FILES:
                if name != USED:
                    (self._folder / name).unlink(missing_ok=True)
            super().__init__(host=host, exchange=exchange)
        (self._folder / DONE).unlink(missing_ok=True)
        atexit.register(self._say_whether_done)

    def _hold(self) -> None:
        """From now on this process uses it."""
        while True:
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir(0o700)
            facts = self._folder.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
                raise FailedPreconditionError(f"{self._folder} is the place of this run's service, but no folder that only "
                                              "this user can enter: remove it, or set TMPDIR")
            self._used = os.open(self._folder / USED, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._used, fcntl.LOCK_SH)
            if (self._folder / USED).exists():
                return
            os.close(self._used)  # The keeper has removed it meanwhile.

    def _make_folder(self) -> pathlib.Path:
        return self._folder

    def _start(self, command: list[str], log, lock) -> None:
        agent = os.pidfd_open(os.getppid())
        try:
            subprocess.Popen([sys.executable, "-I", "-S", _KEEPER, self._folder, str(agent), str(lock.fileno()),
                              str(IDLE_SECONDS), _files.program("ballast"), *command], stdin=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, pass_fds=[agent, lock.fileno()], start_new_session=True)
        finally:
            os.close(agent)

    def _how_it_ended(self) -> str | None:
        return None if _lives(self._folder) else "its log has no error"

    def stop(self) -> None:
        if os.getpid() == self._owner and self._used >= 0:
            os.close(self._used)
            self._used = -1

    def _say_whether_done(self) -> None:
        if os.getpid() == self._owner and getattr(sys, "last_value", None) is None:
            with contextlib.suppress(OSError):
                (self._folder / DONE).touch()


def addresses() -> list[str]:
    """Of this rank's living services."""
    return [said[0] for folder in (_folder(False), _folder(True)) if _lives(folder)
            if (said := (folder / "address").read_text().split())]


def _folder(has_host: bool) -> pathlib.Path:
    agent = os.getppid()
    began = pathlib.Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    place = (boot, os.stat("/proc/self/ns/pid").st_ino, agent, began, os.environ.get("TORCHELASTIC_RUN_ID"),
             os.environ.get("LOCAL_RANK"), has_host)
    return pathlib.Path(tempfile.gettempdir(), PREFIX + hashlib.sha256(repr(place).encode()).hexdigest()[:12])


def _lives(folder: pathlib.Path) -> bool:
    """Whether a service holds its lock."""
    try:
        with open(folder / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False
