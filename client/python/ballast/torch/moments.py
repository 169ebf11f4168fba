"""Moments that a loaded state has, and how a new job begins with them: a checkpoint in a temporary folder, which the
service loads."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import FailedPreconditionError, InvalidArgumentError
from ..session import Job
from . import checkpoints

# Of a parameter: its planes, as torch.optim names them, and `step`.
Moments = "dict[str, torch.Tensor]"


def moments_of(state: dict[str, Any], groups: list[dict[str, Any]], decoupled: bool) -> list[Moments | None] | None:
    """What a state_dict of torch.optim, or a full one of ours, has of each parameter of these param groups, in their
    order: a copy, since an optimizer that goes on changes what it has given. None if it has nothing; None for a
    parameter without an update. Within a group parameters are found by name, where both sides have the same names,
    and else by their order, as in torch. decoupled: of AdamW's weight decay."""
    told = state["param_groups"]
    if not any("exp_avg" in values for values in state["state"].values()) or \
            [len(group["params"]) for group in told] != [len(group["params"]) for group in groups]:
        return None  # Of the lengths torch tells itself.
    found = []
    for index, (theirs, group) in enumerate(zip(told, groups)):
        if theirs.get("decoupled_weight_decay", decoupled) != decoupled:
            raise InvalidArgumentError(f"param group {index} is of the other of Adam and AdamW: their weight decay "
                                       "differs")
        names = theirs.get("param_names", [])
        by_name = sorted(names) == sorted(group["param_names"])
        for place, (name, parameter) in enumerate(zip(group["param_names"], group["params"])):
            values = state["state"].get(theirs["params"][names.index(name) if by_name else place], {})
            wants = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if theirs.get("amsgrad") else [])]
            found.append(_copied(name, parameter, values, wants))
    return None if all(values is None for values in found) else found


def _copied(name: str, parameter: torch.Tensor, values: Moments, wants: list[str]) -> Moments | None:
    if not parameter.requires_grad or int(values.get("step", 0)) == 0:
        return None
    copies = {"step": torch.tensor(float(values["step"]))}
    for plane in [*wants, *(["master"] if "master" in values else [])]:
        if plane not in values:
            raise FailedPreconditionError(f"the state that was loaded has no {plane} of {name}")
        value = values[plane].detach()
        if tuple(value.shape) != tuple(parameter.shape):
            raise FailedPreconditionError(f"{name} has shape {list(value.shape)} in the state that was loaded and "
                                          f"{list(parameter.shape)} in the model")
        here = value.to_local() if isinstance(value, DTensor) else value
        if not bool(torch.isfinite(here).all()):
            raise InvalidArgumentError(f"{plane} of {name} has a value that is not finite in the state that was loaded")
        copies[plane] = value.clone() if isinstance(value, DTensor) else value.to("cpu", torch.float32, copy=True)
    return copies


def write(folder: str | os.PathLike | None, job: Job, parameters: list[torch.Tensor],
          moments: list[Moments | None]) -> pathlib.Path | None:
    """The checkpoint of a job that begins with the weights of its parameters, and these moments. Called by all ranks,
    which have parts of them; a folder is only the first one's."""
    planes = _planes(job, parameters, moments)
    try:
        return None if folder is None else checkpoints.write(pathlib.Path(folder), _index(job, moments), planes)
    finally:
        for _ in planes:  # A rank that cannot write goes on gathering with the others.
            pass


def _index(job: Job, moments: list[Moments | None]) -> dict[str, Any]:
    counts = [0 if values is None else int(values["step"]) for values in moments]
    return checkpoints.index_of(
        job.name, max(counts, default=0),
        groups=[{"name": group.name, "hyper_parameters": checkpoints.json_of(group.hyper_parameters)}
                for group in job.groups],
        parameters=[{"name": parameter.name, "shape": list(parameter.shape),
                     "group": job.groups[parameter.group].name, "elements": torch.Size(parameter.shape).numel(),
                     "update_count": count}
                    for parameter, count in zip(job.parameters, counts) if not parameter.frozen])


def _planes(job: Job, parameters: list[torch.Tensor],
            moments: list[Moments | None]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """One after the other, whole."""
    for plane in checkpoints.PLANES:
        whole = {}
        for spec, parameter, values in zip(job.parameters, parameters, moments):
            if spec.frozen or plane == "max_exp_avg_sq" and not job.groups[spec.group].hyper_parameters.amsgrad:
                continue
            if plane == "master":
                value = _master(parameter.detach(), values)
            else:
                value = None if values is None else values.get(plane)
            if isinstance(value, DTensor):
                value = value.full_tensor()
            value = torch.zeros(spec.shape) if value is None else value
            whole[spec.name] = value.to("cpu", torch.float32).contiguous()
        if whole:
            yield plane, whole


def _master(weights: torch.Tensor, values: Moments | None) -> torch.Tensor:
    """In fp32 where the state has that, unless other weights have been put in place since."""
    master = None if values is None else values.get("master")
    if master is None or isinstance(master, DTensor) != isinstance(weights, DTensor):
        return weights
    ours, theirs = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (weights, master))
    same = ours.shape == theirs.shape and torch.equal(theirs.to(ours.device, ours.dtype), ours)
    return master if same else weights
