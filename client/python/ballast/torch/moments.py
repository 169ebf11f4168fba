"""Moments of a loaded state, and how a new job begins with them: each rank uploads its part with the first weights."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import FailedPreconditionError, InvalidArgumentError
from ..rules import RULES
from ..session import PLANES, Job, Session
from .groups import check_trained_with, planes_of
from .places import local

# A parameter's planes, with torch.optim's names, and `step`.
Moments = "dict[str, torch.Tensor]"


def moments_of(state: dict[str, Any], groups: list[dict[str, Any]]) -> list[Moments | None] | None:
    """The moments that a state_dict of torch.optim, or a full one of Ballast, has for each parameter of these param
    groups, in their order. It is a copy, because an optimizer that continues changes its own. None if the state has
    no moments; None for a parameter without an update. Within a group parameters are matched by name if both sides
    have the same names, else by order, as in torch. state: `completed`."""
    theirs_by_group = state["param_groups"]
    if not has_planes(state) or \
            [len(group["params"]) for group in theirs_by_group] != [len(group["params"]) for group in groups]:
        return None  # torch itself raises an error for other lengths.
    found = []
    for index, (theirs, group) in enumerate(zip(theirs_by_group, groups)):
        check_trained_with(f"param group {index}", theirs, group)
        names = theirs.get("param_names", [])
        by_name = sorted(names) == sorted(group["param_names"])
        for place, (name, parameter) in enumerate(zip(group["param_names"], group["params"])):
            values = state["state"].get(theirs["params"][names.index(name) if by_name else place], {})
            found.append(_copied(name, parameter, values, theirs))
    return None if all(values is None for values in found) else found


def has_planes(state: dict[str, Any]) -> bool:
    """Whether it is a full one. Before a first update a momentum_buffer is there as None."""
    return any(plane in values for values in state["state"].values() for plane in PLANES)


def updates_in(name: str, values: Moments, rule: str) -> int:
    """A parameter's number of updates in a state. Optimizers such as torch.optim.SGD do not count: the first update
    makes the planes. FailedPreconditionError if the rule needs the number."""
    if "step" in values:
        return int(values["step"])
    updated = any(values.get(plane) is not None for plane in PLANES if plane != "master")
    if updated and RULES[rule].counts:
        raise FailedPreconditionError(f"the state has no step of {name}, which {RULES[rule].title} needs")
    return int(updated)


def _copied(name: str, parameter: torch.Tensor, values: Moments, group: dict[str, Any]) -> Moments | None:
    updates = updates_in(name, values, group["rule"])
    if not parameter.requires_grad or updates == 0:
        return None
    copies = {"step": torch.tensor(float(updates))}
    for plane in [*planes_of(group), *(["master"] if "master" in values else [])]:
        if values.get(plane) is None:
            raise FailedPreconditionError(f"the loaded state has no {plane} of {name}")
        value = values[plane].detach()
        if tuple(value.shape) != tuple(parameter.shape):
            raise FailedPreconditionError(f"{name} has shape {list(value.shape)} in the loaded state and "
                                          f"{list(parameter.shape)} in the model")
        if not bool(torch.isfinite(local(value)).all()):
            raise InvalidArgumentError(f"{plane} of {name} has a value that is not finite in the loaded state")
        copies[plane] = value.clone() if isinstance(value, DTensor) else value.to("cpu", torch.float32, copy=True)
    return copies


# By plane: this rank's part of each parameter, or what all its elements are; None if it has none.
Parts = "dict[str, list[torch.Tensor | float | None]]"


def gather(job: Job, parameters: list[torch.Tensor], moments: list[Moments | None]) -> tuple[list[int], Parts]:
    """The start of a job: each parameter's number of updates, and the planes. All ranks call it together, because
    state with another placement goes from rank to rank. No rank may repeat it alone."""
    counts = [0 if spec.frozen or values is None else int(values["step"])
              for spec, values in zip(job.parameters, moments)]
    parts: Parts = {plane: [] for plane in PLANES}
    for spec, parameter, values in zip(job.parameters, parameters, moments):
        initial = {} if spec.frozen else {"master": None, **job.groups[spec.group].hyper_parameters.planes}
        for plane, found in parts.items():
            value = None
            if plane in initial:
                value = _master(parameter.detach(), values) if plane == "master" else (values or {}).get(plane)
            found.append(initial.get(plane) if value is None else part_of(value, parameter))
    return counts, parts


def upload(session: Session, counts: list[int], parts: Parts) -> None:
    """Uploads this rank's part of that."""
    # If all parameters with moments are frozen now, nothing is uploaded.
    session.upload_by(writing(lambda parameter, plane: parts[plane][parameter]), step=max(counts, default=0),
                      update_counts=counts)


def writing(part: Callable[[int, str], torch.Tensor | float]) -> Callable[[int, str, int, int, int], None]:
    """`write` for Session.upload_by and write_state, one parameter after another, without a copy of all. part: this
    rank's part of a parameter and a plane, or what all its elements are."""
    flat: dict[tuple[int, str], torch.Tensor] = {}

    def write(parameter: int, plane: str, offset: int, elements: int, address: int) -> None:
        place = torch.frombuffer((ctypes.c_float * elements).from_address(address), dtype=torch.float32)
        if (parameter, plane) not in flat:
            flat.clear()
            value = part(parameter, plane)
            if isinstance(value, float):
                place.fill_(value)
                return
            flat[parameter, plane] = value.reshape(-1)  # A copy if its elements are not in order.
        place.copy_(flat[parameter, plane][offset:offset + elements])

    return write


def digest(parameters: list[torch.Tensor], moments: dict[int, Moments | None]) -> str:
    """A digest of what all ranks must have in common if each uploads a part: moments by the identity of their
    parameters."""
    seen = hashlib.sha256()
    for parameter in parameters:
        for plane, value in sorted((moments[id(parameter)] or {}).items()):
            seen.update(plane.encode())
            if not isinstance(value, DTensor):  # Each rank has its own part of a DTensor.
                seen.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    return seen.hexdigest()


def part_of(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a state's tensor."""
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
    """In fp32 if the state has that, unless other weights have replaced it since."""
    master = None if values is None else values.get("master")
    if master is None or isinstance(master, DTensor) != isinstance(weights, DTensor):
        return weights
    ours, theirs = local(weights), local(master)
    same = ours.shape == theirs.shape and torch.equal(theirs.to(ours.device, ours.dtype), ours)
    return master if same else weights
