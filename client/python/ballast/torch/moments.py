"""Moments that a loaded state has, and how a new job begins with them: each rank uploads its part, with the first
weights."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import FailedPreconditionError, InvalidArgumentError
from ..session import PLANES, Job, Session

# Of a parameter: its planes, as torch.optim names them, and `step`.
Moments = "dict[str, torch.Tensor]"


def moments_of(state: dict[str, Any], groups: list[dict[str, Any]]) -> list[Moments | None] | None:
    """What a state_dict of torch.optim, or a full one of ours, has of each parameter of these param groups, in their
    order: a copy, since an optimizer that goes on changes what it has given. None if it has nothing; None for a
    parameter without an update. Within a group parameters are found by name, where both sides have the same names,
    and else by their order, as in torch."""
    theirs_by_group = state["param_groups"]
    if not any("exp_avg" in values for values in state["state"].values()) or \
            [len(group["params"]) for group in theirs_by_group] != [len(group["params"]) for group in groups]:
        return None  # torch itself has an error for other lengths.
    found = []
    for index, (theirs, group) in enumerate(zip(theirs_by_group, groups)):
        decoupled = group["decoupled_weight_decay"]
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


# By plane what this rank has of each parameter, None where that is nothing.
Parts = "dict[str, list[torch.Tensor | None]]"


def gather(job: Job, parameters: list[torch.Tensor], moments: list[Moments | None]) -> tuple[list[int], Parts]:
    """What a job begins with: how often each of its parameters was updated, and the planes. All ranks call it together,
    and none of them again by itself: state that is placed otherwise goes from rank to rank."""
    counts = [0 if spec.frozen or values is None else int(values["step"])
              for spec, values in zip(job.parameters, moments)]
    parts: dict[str, list[torch.Tensor | None]] = {plane: [] for plane in PLANES}
    for spec, parameter, values in zip(job.parameters, parameters, moments):
        amsgrad = job.groups[spec.group].hyper_parameters.amsgrad
        for plane, found in parts.items():
            value = None if values is None or spec.frozen else values.get(plane)
            if plane == "master":
                value = None if spec.frozen else _master(parameter.detach(), values)
            elif plane == "max_exp_avg_sq" and not amsgrad:
                value = None
            found.append(None if value is None else part_of(value, parameter))
    return counts, parts


def upload(session: Session, counts: list[int], parts: Parts) -> None:
    """What this rank owns of that, a part of a parameter after the other: no copy of all is made."""
    flat: dict[tuple[int, str], torch.Tensor] = {}

    def write(parameter: int, plane: str, offset: int, elements: int, address: int) -> None:
        value = parts[plane][parameter]
        if value is None:
            return  # Zeros.
        if (parameter, plane) not in flat:
            flat.clear()
            flat[parameter, plane] = value.reshape(-1)  # A copy where its elements do not lie in order.
        place = torch.frombuffer((ctypes.c_float * elements).from_address(address), dtype=torch.float32)
        place.copy_(flat[parameter, plane][offset:offset + elements])

    # If all that have moments are frozen by now, there are none.
    session.upload_by(write, step=max(counts, default=0), update_counts=counts)


def digest(parameters: list[torch.Tensor], moments: dict[int, Moments | None]) -> str:
    """Of what all ranks must have alike where each uploads a part: moments by the identity of their parameters."""
    seen = hashlib.sha256()
    for parameter in parameters:
        for plane, value in sorted((moments[id(parameter)] or {}).items()):
            seen.update(plane.encode())
            if not isinstance(value, DTensor):  # Of those a rank has its own part.
                seen.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    return seen.hexdigest()


def part_of(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Of a state's tensor, as this rank has of the parameter."""
    kept = value
    if isinstance(value, DTensor) and not (isinstance(parameter, DTensor) and value.placements == parameter.placements
                                           and value.device_mesh == parameter.device_mesh):
        value = value.full_tensor()
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements,
                                  src_data_rank=None)
    here = value.to_local() if isinstance(value, DTensor) else value
    return here if value is kept else here.to("cpu")  # Not all of it on a GPU at once.


def _master(weights: torch.Tensor, values: Moments | None) -> torch.Tensor:
    """In fp32 where the state has that, unless other weights have been put in place since."""
    master = None if values is None else values.get("master")
    if master is None or isinstance(master, DTensor) != isinstance(weights, DTensor):
        return weights
    ours, theirs = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (weights, master))
    same = ours.shape == theirs.shape and torch.equal(theirs.to(ours.device, ours.dtype), ours)
    return master if same else weights
