"""Which optimizer trains a parameter. If two do, each undoes the other's work, or takes its gradients."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import patches

# By the parameter's identity: the parameter, and the optimizer that trains or trained it.
_owners: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[torch.optim.Optimizer]]] = {}
_changes = 0  # Changes of that.
_looked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # The change after which
                                                                                              # each looked.
_hook = None


def register(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """The optimizer, now bound to a job, trains these."""
    global _changes, _hook
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_look)
    _look(optimizer)
    for key in [key for key, (parameter, _) in _owners.items() if parameter() is None]:
        del _owners[key]
    for parameter in parameters:
        _owners[id(parameter)] = weakref.ref(parameter), weakref.ref(optimizer)
    _changes += 1


def made(parameters: Iterable[torch.Tensor]) -> None:
    """Another optimizer is made over these. Their gradients stay in `.grad`, also for its first step."""
    for parameter in parameters:
        if id(parameter) in _owners:
            patches.release(parameter)


def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before its step: warns once about each other optimizer that trains a parameter of it."""
    if _looked.get(optimizer) == _changes:
        return
    _looked[optimizer] = _changes
    warned = []
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            found, owner = _owners.get(id(parameter), (None, None))
            if found is None or found() is not parameter or not parameter.requires_grad:
                continue
            other = owner()
            if other is None or other is optimizer or other._binding is None:
                continue
            patches.release(parameter)  # From now on its gradients stay in `.grad`.
            if other not in warned:
                warned.append(other)
                name = (group.get("param_names") or {place: f"{place} of param group {index}"})[place]
                warnings.warn(f"{_name(optimizer)} steps on parameter {name}, which {_name(other)} trains with job "
                              f"{other._binding.member.name}, too: each undoes what the other does. Call the close() "
                              "of that, or delete it, once it is not used any more", stacklevel=4)


def _name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__.removesuffix('.optimizers')}.{type(optimizer).__qualname__}"
