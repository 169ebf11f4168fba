"""Reads a running service: its jobs, and the optimizer state of their parameters."""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _native
from .errors import BallastError, FailedPreconditionError, PermissionDeniedError, UnavailableError
from .session import PLANES, number_of

if TYPE_CHECKING:
    import numpy

_WAIT = 10.0  # At most this many seconds for a service whose process restarts.
_AT_ONCE = 1e-3  # Seconds: no wait.
_SLICE_SECONDS = 0.2
_OF_SAVES = ("MAKING_SECOND_VERSIONS", "WRITING_CHECKPOINT")
_LEAVING_SECONDS = 2.0  # How long ended workers may take to be seen as gone.


class Client:
    """Reads a service, also during steps; of several, the first. Results are the messages of proto/ballast/v1 as JSON
    (client/README.md), with bare names of jobs and groups. If the service is unreachable, reads wait up to `wait`
    seconds, because its process may be restarting."""

    def __init__(self, service: _native.Services, timeout: float = 600.0, *, wait: float = _WAIT,
                 tls_ca: str | None = None, tls_cert: str | None = None, tls_key: str | None = None,
                 token_file: str | None = None):
        self.service, self.timeout, self.wait = service, timeout, wait
        self._files = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key, "token_file": token_file}

    def jobs(self) -> list[dict[str, Any]]:
        """Each with its name, uid, phase, committed_step, world_size and memory. If a job's phase is "BROKEN", it
        has stopped, and its problem says why and what to do."""
        return [_named(job) for job in self._read("JobService/ListJobs")["jobs"]]

    def is_saving(self, name: str, step: int) -> bool:
        """Whether the service is saving that step of the job of this name, or anything of one that has been closed."""
        listed, resource = self._read("JobService/ListJobs"), f"jobs/{name}"
        saves = [save for job in listed["jobs"] if job["name"] == resource for save in job["saves"]]
        return any(save["step"] == step for save in saves) or any(
            activity["job"] == resource and activity["kind"] in _OF_SAVES for activity in listed["activities"])

    def identity(self) -> tuple[str, str]:
        """What two clients of the same service have in common, and "host:port" at which other services reach it: its
        --advertise, or "" if it listens on unix sockets only. A host 0.0.0.0 or [::] is any address of its host."""
        answer = self._read("JobService/ListJobs")
        return answer["instance_id"], answer["advertised_address"]

    def job(self, name: str) -> dict[str, Any]:
        """A job as v1.Job: what each rank has sent, its groups, and the last decisions."""
        return self._job(name)

    def _job(self, name: str, uid: str = "") -> dict[str, Any]:
        return _named(self._read("JobService/GetJob", name=f"jobs/{name}", uid=uid))

    def groups(self, job: str) -> dict[str, Any]:
        """The job's "groups": the param groups and their hyper-parameters."""
        return {"job": job, "groups": self.job(job)["groups"]}

    def summary(self, job: str, parameter: str) -> dict[str, Any]:
        """Norm, extremes and magnitudes of every plane of a parameter, computed in the service."""
        return self._read("StateService/SummarizeState", name=_parameter(job, parameter))

    def state(self, job: str, parameter: str, plane: str = "master") -> numpy.ndarray:
        """A plane's values at the committed step: fp32, in the parameter's shape. torch.from_numpy makes a tensor of
        it. plane: one of PLANES."""
        import numpy

        number, name = number_of(PLANES, plane, "plane"), _parameter(job, parameter)
        known = self._read("JobService/GetJob", name=f"jobs/{job}", with_parameters=True)["parameters"]
        # If the parameter is missing, the service says so.
        shape = next((other["shape"] for other in known if other["name"] == name), [0])
        values = numpy.empty(shape, numpy.float32)
        step, updates = ctypes.c_uint64(), ctypes.c_int64()
        self._patiently_waiting(lambda options: _native.call(
            "ballast_read_state", ctypes.byref(options), name.encode(), number, values.ctypes.data,
            math.prod(shape), ctypes.byref(step), ctypes.byref(updates)))
        return values

    def save(self, job: str, name: str | None = None, *, background: bool = False) -> dict[str, Any]:
        """Saves the job's committed step in a new checkpoint under the service's --checkpoint-dir, while training
        goes on. `name`: the folder, by default the job's name. Returns directory, step and bytes. background:
        returns when the save has begun; `checkpoints` lists it once it is complete. It stays until
        `delete_checkpoint`, unless the service has --checkpoint-keep-asked."""
        return self._change("StateService/SaveJob", name=f"jobs/{job}", directory=name or "", background=background)

    def load(self, job: str, name: str | None = None, *, convert_state: bool = False) -> dict[str, Any]:
        """Replaces the job's state by the newest undamaged checkpoint in the folder `name` (by default the job's),
        or by a named one, "gpt/step-1000.2". The sessions of all ranks end. convert_state: of another format than
        the job's (ParamGroup.state), which else is a FailedPreconditionError."""
        return self._change("StateService/LoadJob", name=f"jobs/{job}", directory=name or "",
                            convert_state=convert_state)

    def import_weights(self, job: str, path: str) -> dict[str, Any]:
        """Restarts the job from weights in Hugging Face's safetensors, in a folder or file on the service's host.
        Moments are zeros, the step is 0. The sessions of all ranks end."""
        return self._change("StateService/LoadJob", name=f"jobs/{job}", directory=path, weights_only=True)

    def close_job(self, job: str, *, force: bool = False, here: bool = False, uid: str = "") -> None:
        """Deletes the job and all its state on the service, which frees its memory: `save` it first. BallastError
        while a trainer has a session with it; force: ends that session. here: of a job on several services only this
        one's part, whichever leads. uid: NotFoundError if another job has the name."""
        # The uid protects another job that has taken the name meanwhile.
        if not force:
            uid = self.uid_of_idle(job, uid=uid)
        self._change("JobService/CloseJob", name=f"jobs/{job}", uid=uid, here=here)

    def checkpoints(self, name: str | None = None) -> list[dict[str, Any]]:
        """The saved checkpoints in the folder `name`, or in all: each with its name, job, uid, step, generation,
        size_bytes, saved_unix_ms, and problem ("" if none is known). The newest of a job comes first."""
        return self._read("StateService/ListCheckpoints", directory=name or "")["checkpoints"]

    def verify(self, name: str) -> list[dict[str, Any]]:
        """The same after reading every byte. A problem then says why a checkpoint cannot be loaded."""
        return self._read("StateService/VerifyCheckpoints", directory=name)["checkpoints"]

    def delete_checkpoint(self, job: str, step: int, *, uid: str = "") -> list[dict[str, Any]]:
        """Deletes the requested checkpoints of this step in the folder `job`; with a uid only those of that job.
        Returns the deleted ones, in the form of `checkpoints`. NotFoundError: there were none.
        FailedPreconditionError, and nothing is deleted, while one is being saved, loaded or verified."""
        return self._change("StateService/DeleteCheckpoint", directory=f"{job}/step-{step}", uid=uid)["checkpoints"]

    def uid_of_idle(self, job: str, *, uid: str = "", in_step: bool = False) -> str:
        """The job's uid. FailedPreconditionError while a trainer has a session with it. in_step: ranks whose connection
        broke in the step in progress do not count; their gradients in it may be lost."""
        deadline = time.monotonic() + _LEAVING_SECONDS
        while True:
            now = self._job(job, uid)
            attached = sum(rank["attached"] and not (in_step and rank["left"]) for rank in now["ranks"])
            if attached == 0:
                return now["uid"]
            if time.monotonic() >= deadline:
                raise FailedPreconditionError(
                    f"job {job} is in training: {attached} of {now['world_size']} workers are attached, at step "
                    f"{now['committed_step']}; stop them, or close it and lose all its state: close_job(force=True)")
            time.sleep(0.05)

    def _change(self, method: str, **request: Any) -> Any:
        return self._patiently(_AT_ONCE, functools.partial(_native.call_service, method=method, request=request))

    def _read(self, method: str, **request: Any) -> Any:
        return self._patiently_waiting(functools.partial(_native.call_service, method=method, request=request))

    def _patiently_waiting(self, work: Callable[[_native.Options], Any]) -> Any:
        """For a read-only call."""
        begin = time.monotonic()
        try:
            return self._patiently(_AT_ONCE, work)
        except UnavailableError as error:
            left = self.wait - (time.monotonic() - begin)  # A host that does not answer has taken its time already.
            if left < 1:
                raise
            logging.getLogger("ballast").warning("%s; this is tried again for up to %.0f seconds", error, left)
        return self._patiently(left, work)

    def _patiently(self, wait: float, work: Callable[[_native.Options], Any]) -> Any:
        options = _native.service_options(self.service, self.timeout, wait, **self._files)
        running: concurrent.futures.Future = concurrent.futures.Future()
        _native.in_thread(running, lambda: work(options))
        while not running.done():
            concurrent.futures.wait([running], _SLICE_SECONDS)
        try:
            return running.result()
        finally:
            del running


def _parameter(job: str, parameter: str) -> str:
    return f"jobs/{job}/parameters/{parameter}"


def _named(job: dict[str, Any]) -> dict[str, Any]:
    """With the names that the methods take."""
    resource = job["name"]
    for group in job["groups"]:
        group["name"] = group["name"].removeprefix(f"{resource}/groups/")
    job["name"] = resource.removeprefix("jobs/")
    return job


def connect(service: _native.Services = "127.0.0.1:7070", *, timeout: float = 600.0, tls_ca: str | None = None,
            tls_cert: str | None = None, tls_key: str | None = None, token_file: str | None = None) -> Client:
    """A client of the service at "host:port" or "unix:/path"; of several, "a:7070,b:7070" or a list, of the first.
    UnavailableError at once if it does not answer, PermissionDeniedError if it refuses this caller.

    tls_ca: the authority of a service with TLS. tls_cert and tls_key, or token_file, identify this client. All are
    files. By default the variables BALLAST_TLS_CA, BALLAST_TLS_CERT, BALLAST_TLS_KEY and BALLAST_TOKEN_FILE name
    them."""
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
