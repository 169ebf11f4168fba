"""Notes the saved steps of a trainer's own checkpoints. The service then deletes steps without such a checkpoint. If
a step is saved again after a load of an older one, both are deleted together.

For each job a file beside the checkpoints has the notes, ballast-JOB.json, which outlives the trainer's process.
Errors are warnings: a failed deletion is retried with the next save."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
import warnings
from typing import Callable, Tuple

import torch

from ...client import Client
from ...errors import FailedPreconditionError, NotFoundError
from ..remote import Remote

_SAVE_SECONDS = 60.0  # The longest wait, at the end of a training, for unfinished saves.
_Saved = Tuple[str, int]  # A job's uid and step.


def saved(optimizers: list[torch.optim.Optimizer], folder: str, path: str) -> None:
    """The trainer has made its checkpoint `path`, a file or a folder, at the optimizers' current step, and may have
    deleted older ones. folder: where the notes are. Deletes on the service what has no checkpoint of the trainer any
    more."""
    def note_and_release(notes: _Notes) -> None:
        notes.add(path)
        notes.release()

    _for_each(optimizers, folder, note_and_release)


def ended(optimizers: list[torch.optim.Optimizer], folder: str) -> None:
    """At the end of a training, after the trainer's last deletion."""
    def release(notes: _Notes) -> None:
        deadline = time.monotonic() + _SAVE_SECONDS
        while notes.release() and time.monotonic() < deadline:
            time.sleep(0.1)

    _for_each(optimizers, folder, release)


def _for_each(optimizers: list[torch.optim.Optimizer], folder: str, work: Callable[[_Notes], None]) -> None:
    for optimizer in optimizers:
        while optimizer is not None and not isinstance(optimizer, Remote):  # As accelerate wraps it.
            optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is None or optimizer._binding is None or optimizer._options.service is None:
            continue
        member = optimizer._binding.member
        try:
            work(_Notes(pathlib.Path(folder), member.client, member.name, (member.job_uid, member.step_count)))
        except Exception as error:  # The training is more important.
            warnings.warn(f"checkpoints of job {member.name} that the trainer has deleted stay on the service: {error}",
                          stacklevel=3)


class _Notes:
    def __init__(self, folder: pathlib.Path, client: Client, job: str, now: _Saved):
        self._folder, self._client, self._job, self._now = folder, client, job, now
        self._file = folder / f"ballast-{job}.json"

    def add(self, path: str) -> None:
        notes = self._read()
        note = (os.path.relpath(path, self._folder), self._now)
        self._write([other for other in notes if other != note] + [note])

    def release(self) -> bool:
        """Whether there is more to delete that is still in use."""
        notes = self._read()
        newest = dict(notes)  # The path's earlier checkpoint is gone, too.
        living = {path: of for path, of in newest.items() if not self._is_gone(path)}
        waiting = set()
        for uid, step in sorted({of for _, of in notes}.difference(living.values())):
            try:
                self._client.delete_checkpoint(self._job, step, uid=uid)
            except NotFoundError:
                pass
            except FailedPreconditionError:
                waiting.add((uid, step))
        left = [(path, of) for path, of in notes if of in waiting or living.get(path) == of]
        if left != notes:
            self._write(left)
        return bool(waiting)

    def _is_gone(self, path: str) -> bool:
        """Deleted, rather than out of reach, as on an unmounted disk."""
        whole = self._folder / path
        try:
            whole.stat()
        except FileNotFoundError:
            return whole.parent.is_dir()
        except OSError:
            pass
        return False

    def _read(self) -> list[tuple[str, _Saved]]:
        with contextlib.suppress(FileNotFoundError):
            return [(note["path"], (note["uid"], note["step"]))
                    for note in json.loads(self._file.read_text())["checkpoints"]]
        return []

    def _write(self, notes: list[tuple[str, _Saved]]) -> None:
        text = json.dumps({"checkpoints": [{"path": path, "uid": uid, "step": step} for path, (uid, step) in notes]},
                          indent=1)
        made = self._file.with_suffix(".new")
        made.write_text(text + "\n")
        os.replace(made, self._file)
