"""Looking at a running service: its jobs, and the optimizer state of their parameters."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import subprocess
import tempfile
from typing import TYPE_CHECKING, Any

from . import _files
from .errors import (BallastError, FailedPreconditionError, InvalidArgumentError, NotFoundError, PermissionDeniedError,
                     UnavailableError)

if TYPE_CHECKING:
    import numpy

_WAIT = 10.0  # Seconds, at most, for a service whose process is being started again.
PLANES = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_CHANGE = ("save", "load", "import", "close", "delete-checkpoint")  # Commands.
# The tool has no number for a status: what these are known by in its line.
_SAID = {
    UnavailableError: ("no service answers at ", "the connection to the service at "),
    PermissionDeniedError: (" has no role of ", " takes a role of ", "the service does not know who calls",
                            "the service knows no such token", "tokens are taken over TLS", " has no token: "),
    NotFoundError: ("there is no job ", "there is no checkpoint "),
    FailedPreconditionError: (" is in use: ",),
}


class Client:
    """Reads through the tool `ballast`, also while steps are made. BallastError with its one line if it cannot. While
    the service cannot be reached, reads wait for it for up to `wait` seconds: its process may be about to be started
    again."""

    def __init__(self, service: str, timeout: float = 600.0, *, wait: float = _WAIT, tls_ca: str | None = None,
                 tls_cert: str | None = None, tls_key: str | None = None, token_file: str | None = None):
        self.service, self.timeout, self.wait = service, timeout, wait
        given = {"tls-ca": tls_ca, "tls-cert": tls_cert, "tls-key": tls_key, "token-file": token_file}
        self._credentials = [f"--{flag}={os.fspath(file)}" for flag, file in given.items() if file is not None]

    def jobs(self) -> list[dict[str, Any]]:
        """Each with its name, uid, phase, committed_step, world_size and memory. One whose phase is "broken" does
        no more, and its problem is why and what to do."""
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

    def save(self, job: str, name: str | None = None, *, background: bool = False) -> dict[str, Any]:
        """Saves the job's committed step in a new checkpoint under the service's --checkpoint-dir, in the folder
        `name` (by default the job's), while training goes on. Its directory, step and bytes. background: returns
        when the save has begun; `checkpoints` has it once it is complete. It stays until `delete_checkpoint`, unless
        the service has a --checkpoint-keep-asked."""
        return self._json("save", job, *([name] if name else []), *(["--background"] if background else []))

    def load(self, job: str, name: str | None = None) -> dict[str, Any]:
        """Replaces the job's state by the newest good checkpoint in the folder `name` (by default the job's), or by
        the one that is named, "gpt/step-1000.2". The sessions of all ranks end."""
        return self._json("load", job, *([name] if name else []))

    def import_weights(self, job: str, path: str) -> dict[str, Any]:
        """Begins the job again with the weights of Hugging Face's safetensors, in a folder or file on the service's
        host: moments are zeros, the step is 0. The sessions of all ranks end."""
        return self._json("import", job, path)

    def close_job(self, job: str, *, force: bool = False) -> None:
        """The service forgets the job and all its state, which frees its memory: `save` it first. BallastError while a
        trainer has a session with it, unless force: then that ends."""
        self._run("close", job, *(["--force"] if force else []))

    def checkpoints(self, name: str | None = None) -> list[dict[str, Any]]:
        """What is saved, in the folder `name` or in all: each with its name, job, uid, step, generation, bytes,
        saved_unix_ms, and problem ("" if nothing is known against it). Of a job the newest comes first."""
        return self._json("checkpoints", *([name] if name else []))["checkpoints"]

    def verify(self, name: str) -> list[dict[str, Any]]:
        """The same after every byte has been read; a problem then says why one cannot be loaded."""
        return self._json("verify", name)["checkpoints"]

    def delete_checkpoint(self, job: str, step: int, *, uid: str = "") -> list[dict[str, Any]]:
        """Deletes what saves that were asked for have made of this step, in the folder `job`; with a uid those of that
        job alone. The checkpoints that are gone, as `checkpoints` has them. NotFoundError: there was none.
        FailedPreconditionError, and nothing is deleted: one is being saved, loaded or verified."""
        return self._json("delete-checkpoint", f"{job}/step-{step}", f"--uid={uid}")["checkpoints"]

    def _json(self, *words: str) -> Any:
        return json.loads(self._run(*words, "--json"))

    def _run(self, *words: str) -> str:
        try:
            return self._run_once(*words)
        except UnavailableError as error:
            # One that changes something was done, perhaps: it is for the caller to look.
            if self.wait <= 0 or words[0] in _CHANGE:
                raise
            logging.getLogger("ballast").warning("%s; this is tried again for up to %g seconds", error, self.wait)
        return self._run_once(*words, f"--wait={self.wait:g}")

    def _run_once(self, *words: str) -> str:
        command = [_files.program("ballast"), *words, f"--service={self.service}", f"--timeout={self.timeout:g}",
                   *self._credentials]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            return done.stdout
        lines = done.stderr.strip().splitlines() or [f"ballast ended with {done.returncode}"]
        message = lines[-1].removeprefix("ballast: ")
        if done.returncode == 2:  # Wrong usage.
            raise InvalidArgumentError(message)
        kinds = (kind for kind, said in _SAID.items() if any(part in message for part in said))
        raise next(kinds, BallastError)(message)


def connect(service: str = "127.0.0.1:7070", *, timeout: float = 600.0, tls_ca: str | None = None,
            tls_cert: str | None = None, tls_key: str | None = None, token_file: str | None = None) -> Client:
    """A client of the service at "host:port" or "unix:/path". UnavailableError at once if none answers,
    PermissionDeniedError if it does not take this caller.

    tls_ca: the authority of a service with TLS. tls_cert and tls_key, or token_file, say who this is. All are
    files; without them those that BALLAST_TLS_CA, BALLAST_TLS_CERT, BALLAST_TLS_KEY and BALLAST_TOKEN_FILE
    name."""
    client = Client(service, timeout, wait=0, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key,
                    token_file=token_file)
    try:
        client.jobs()
        client.wait = _WAIT  # There is a service.
    except PermissionDeniedError:
        raise
    except BallastError as error:
        raise UnavailableError(str(error)) from None
    return client
