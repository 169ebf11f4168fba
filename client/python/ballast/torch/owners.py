"""Which optimizer trains a parameter. Where two do, each undoes what the other has done, or takes its gradients."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import patches

# By the parameter's identity: it, and what tells the job of the optimizer that trains it, or "" once that does not.
_owners: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[torch.optim.Optimizer], Callable[[Any], str]]] = {}
_changes = 0  # In that.
_looked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # After which of them.
_hook = None


def register(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], job_of: Callable[[Any], str]) -> None:
    """The optimizer, bound to a job, trains these."""
    global _changes, _hook
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_look)
    _look(optimizer)
    for key in [key for key, (parameter, *_) in _owners.items() if parameter() is None]:
        del _owners[key]
    for parameter in parameters:
        _owners[id(parameter)] = weakref.ref(parameter), weakref.ref(optimizer), job_of
    _changes += 1


def made(parameters: Iterable[torch.Tensor]) -> None:
    """Another optimizer is made over these: their gradients stay where its backward leaves them, for the first step of
    it, too."""
    for parameter in parameters:
        if id(parameter) in _owners:
            patches.release(parameter)


def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before its step: warns once of each other optimizer that trains a parameter of it."""
    if _looked.get(optimizer) == _changes:
        return
    _looked[optimizer] = _changes
    warned = []
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            found, owner, job_of = _owners.get(id(parameter), (None, None, None))
            if found is None or found() is not parameter or not parameter.requires_grad:
                continue
            other = owner()
            job = "" if other is None or other is optimizer else job_of(other)
            if job:
                patches.release(parameter)  # From now on its gradients are where torch has them.
            if job and other not in warned:
                warned.append(other)
                name = (group.get("param_names") or {place: f"{place} of param group {index}"})[place]
                warnings.warn(f"{_name(optimizer)} steps on parameter {name}, which {_name(other)} trains with job "
                              f"{job}, too: each undoes what the other does. Call the close() of that, or delete it, "
                              "once it is not used any more", stacklevel=4)


def _name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__.removesuffix('.optimizers')}.{type(optimizer).__qualname__}"
