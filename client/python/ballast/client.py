"""Looking at a running service: its jobs, and the optimizer state of their parameters."""

from __future__ import annotations

import json
import pathlib
import subprocess
import tempfile
from typing import TYPE_CHECKING, Any

from . import _files
from .errors import BallastError, UnavailableError

if TYPE_CHECKING:
    import numpy

PLANES = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Client:
    """Reads through the tool `ballast`, also while steps are made. BallastError with its one line if
    it cannot."""

    def __init__(self, service: str, timeout: float = 600.0):
        self.service, self.timeout = service, timeout

    def jobs(self) -> list[dict[str, Any]]:
        """Each with its name, uid, phase, committed_step, world_size and memory."""
        return self._json("jobs")["jobs"]

    def job(self, name: str) -> dict[str, Any]:
        """What `ballast job NAME --json` prints: who has sent what, and the last decisions."""
        return self._json("job", name)

    def groups(self, job: str) -> Any:
        """The param groups and their hyper-parameters."""
        return self._json("groups", job)

    def summary(self, job: str, parameter: str) -> Any:
        """Norm, extremes and magnitudes of every plane of a parameter, computed in the service."""
        return self._json("state", job, parameter)

    def state(self, job: str, parameter: str, plane: str = "master") -> numpy.ndarray:
        """A plane's values at the committed step: fp32, of the parameter's shape. torch.from_numpy makes a
        tensor of it. plane: one of PLANES."""
        import numpy

        if plane not in PLANES:
            raise ValueError(f"plane is {plane!r}; expected one of {', '.join(PLANES)}")
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "plane.npy")
            self._run("state", job, parameter, f"--plane={plane}", f"--out={file}")
            return numpy.load(file)

    def _json(self, *words: str) -> Any:
        return json.loads(self._run(*words, "--json"))

    def _run(self, *words: str) -> str:
        command = [_files.program("ballast"), *words, f"--service={self.service}", f"--timeout={self.timeout:g}"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            return done.stdout
        lines = done.stderr.strip().splitlines() or [f"ballast ended with {done.returncode}"]
        raise BallastError(lines[-1].removeprefix("ballast: "))


def connect(service: str = "127.0.0.1:7070", *, timeout: float = 600.0) -> Client:
    """A client of the service at "host:port" or "unix:/path". UnavailableError if none answers."""
    client = Client(service, timeout)
    try:
        client.jobs()
    except BallastError as error:
        raise UnavailableError(str(error)) from None
    return client
