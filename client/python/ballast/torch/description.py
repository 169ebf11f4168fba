"""A job's description by param groups, and what must be equal on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import FailedPreconditionError
from ..session import Group, HyperParameters, Job, Parameter
from .groups import check_state
from .places import local


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OTHERS = ("the param groups have other parameters than when the optimizer was bound to its job, by attach(), "
           "load_state_dict() or the first step(): call attach() after what replaces parameters, such as "
           "accelerator.prepare or fully_shard; it puts the job's weights into them")


def of_job(parameter: torch.Tensor) -> bool:
    """Whether a job has it. The service does not know frozen parameters of other dtypes, such as quantised weights."""
    return parameter.requires_grad or parameter.dtype in _DTYPES


def check_group(group: dict[str, Any]) -> None:
    """ValueError that names what a job cannot have."""
    if len(group["param_names"]) != len(group["params"]):
        raise ValueError(f"a param group has {len(group['params'])} parameters and {len(group['param_names'])} names: change "
                         "both alike, or make another optimizer")
    if group.get("differentiable"):
        raise ValueError("differentiable is not supported: the service makes the update")
    check_state(group)
    for name, parameter in zip(group["param_names"], group["params"]):
        if getattr(parameter, "_fsdp_flattened", False):  # FSDP1 marks its flattened parameters so.
            raise ValueError(f"parameter {name} is part of a flat parameter of FullyShardedDataParallel (FSDP1), "
                             "whose shards cannot be read: use torch.distributed.fsdp.fully_shard (FSDP2)")
        if not of_job(parameter):
            continue
        if parameter.is_complex():
            raise ValueError(f"parameter {name} is complex, which is not supported")
        if group["rule"] == "muon" and parameter.ndim != 2:
            raise ValueError(f"parameter {name} has {parameter.ndim} dimensions, but rule muon takes matrices: put it into a "
                             "group of another rule")
        if parameter.dtype not in _DTYPES:
            raise ValueError(f"parameter {name} is {parameter.dtype}; expected float32, bfloat16 or float16")


def state_of(group: dict[str, Any]) -> tuple[str, bool]:
    """Format, and whether parameters whose shards cut its groups of elements are in fp32."""
    return group.get("state", "fp32"), bool(group.get("state_fallback", False))


def not_held(module: torch.nn.Module | None, param_groups: list[dict[str, Any]]) -> list[str]:
    """The names of state that training may change and the service does not keep: persistent buffers, except loaded
    statistics that count batches, and frozen parameters. Without a module: the frozen parameters of the param
    groups."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    names = []
    for prefix, submodule in () if module is None else module.named_modules():
        batches = getattr(submodule, "num_batches_tracked", None)
        if not torch.is_tensor(batches) or batches == 0:
            names += [f"{prefix}.{name}".lstrip(".") for name, buffer in submodule.named_buffers(recurse=False)
                      if name not in submodule._non_persistent_buffers_set and buffer.dtype != torch.bool]
    of_groups = {id(parameter): (name, parameter) for group in param_groups
                 for name, parameter in zip(group["param_names"], group["params"])}
    of_module = {} if module is None else {id(parameter): (name, parameter) for name, parameter in
                                           module.named_parameters()}
    return names + [name for name, parameter in (of_module | of_groups).values() if not parameter.requires_grad]


def check_memory(named: list[tuple[str, torch.Tensor]]) -> None:
    """ValueError for a parameter without memory, and for two over the same memory: an update of one would write the
    other, and the service would not know."""
    areas: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    for name, parameter in named:
        here = local(parameter)
        if here.is_meta:
            raise ValueError(f"parameter {name} is on the meta device and has no weights: call model.to_empty(device=...) "
                             "and give it weights before the optimizer's first step(), attach() or load_state_dict()")
        if here.numel() > 0:
            if here.untyped_storage().nbytes() == 0:
                raise ValueError(f"the memory of parameter {name} was freed: FSDP2 had gathered it for a forward; create "
                                 "the optimizer before the first forward, or after model.reshard()")
            begin = here.storage_offset() * here.element_size()
            last = sum((size - 1) * stride for size, stride in zip(here.shape, here.stride()))
            areas.setdefault(here.untyped_storage().data_ptr(), []).append(
                (begin, begin + (last + 1) * here.element_size(), name, here))
    for of_storage in areas.values():
        of_storage.sort(key=lambda area: area[:2])
        for index, (_, end, name, tensor) in enumerate(of_storage):
            for begin, _, other_name, other in of_storage[index + 1:]:
                if begin >= end:
                    break
                if _share(tensor, other):
                    raise ValueError(f"parameters {name} and {other_name} share memory, but the service would keep "
                                     "separate weights for each: use one Parameter in both places, as in b.weight = "
                                     "a.weight")


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they share an element: both may be columns of one matrix."""
    def at(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        of_storage = torch.zeros(size, dtype=torch.bool)
        of_storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
        return of_storage

    if one.element_size() != other.element_size():
        return True
    return bool((at(one) & at(other)).any())


class Described:
    """Param groups as a job has them. A param group becomes a group of the job for each dtype in it. A parameter
    with several names becomes one of the job. `specs`, `parameters` and `names`: by index in the job. `trained`:
    those that are not frozen there. `source`: by group of the job, its param group. trained: by identity, the
    parameters that the previous job trained. If frozen now, they keep their moments, as in torch."""

    def __init__(self, param_groups: list[dict[str, Any]], hyper_parameters: list[HyperParameters],
                 trained: Collection[int] = ()):
        self._made_with, self.of_groups = hyper_parameters, _identities(param_groups)
        self._states = [state_of(group) for group in param_groups]
        self._names_of_groups = [list(group["param_names"]) for group in param_groups]
        self.groups: list[Group] = []
        self.specs: list[Parameter] = []
        self.parameters: list[torch.Tensor] = []
        self.names: list[str] = []
        self.source: list[int] = []
        self._left_out: dict[str, torch.Tensor] = {}
        seen = set()
        for index, (group, values) in enumerate(zip(param_groups, hyper_parameters)):
            numbers: dict[torch.dtype, int] = {}
            for name, parameter in zip(group["param_names"], group["params"]):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                if not of_job(parameter):
                    self._left_out[name] = parameter
                    continue
                dtype = str(parameter.dtype).removeprefix("torch.")
                if parameter.dtype not in numbers:
                    numbers[parameter.dtype] = len(self.groups)
                    self.groups.append(Group(f"{index}.{dtype}", values, dtype, dtype, *state_of(group)))
                    self.source.append(index)
                self.specs.append(Parameter(name, tuple(parameter.shape), numbers[parameter.dtype],
                                            frozen=not (parameter.requires_grad or id(parameter) in trained)))
                self.parameters.append(parameter)
                self.names.append(name)

    @functools.cached_property
    def trained(self) -> dict[int, torch.Tensor]:
        return {index: self.parameters[index] for index, spec in enumerate(self.specs) if not spec.frozen}

    @property
    def of_name(self) -> dict[str, torch.Tensor]:
        """Also of parameters outside the job."""
        return dict([*zip(self.names, self.parameters), *self._left_out.items()])

    def has(self, param_groups: list[dict[str, Any]]) -> bool:
        """Whether their parameters are the job's."""
        return _identities(param_groups) == self.of_groups

    def has_others(self, param_groups: list[dict[str, Any]]) -> bool:
        """Whether they need another job: parameters were added, left out, moved, resized or thawed. Replacements of
        the same parameters, such as those of accelerate.prepare, do not."""
        if self._names_of_groups != [list(group["param_names"]) for group in param_groups]:
            return True
        if self.has(param_groups):
            return any(parameter.requires_grad for parameter in self._untrained)
        of_name = self.of_name
        return any(name in of_name and of_name[name].shape != parameter.shape for group in param_groups
                   for name, parameter in zip(group["param_names"], group["params"]))

    def check_the_same(self, param_groups: list[dict[str, Any]]) -> None:
        """FailedPreconditionError if parameters were replaced by others with the same names and shapes."""
        of_name = self.of_name
        for group in param_groups:
            for name, parameter in zip(group["param_names"], group["params"]):
                if name in of_name and of_name[name] is not parameter and of_name[name].shape == parameter.shape:
                    raise FailedPreconditionError(_OTHERS)

    def check_now(self, param_groups: list[dict[str, Any]], hyper_parameters: list[HyperParameters]) -> None:
        """An error if the job cannot make a step with these."""
        if not self.has(param_groups):
            raise FailedPreconditionError(_OTHERS)
        for number, (then, group) in enumerate(zip(self._states, param_groups)):
            if then != (now := state_of(group)):
                raise RuntimeError(f"state and state_fallback of param group {number} were {then[0]} and {then[1]} when "
                                   f"the job was made, and are {now[0]} and {now[1]} now: set them back, or create "
                                   "another optimizer and another job")
        for number, (then, now) in enumerate(zip(self._made_with, hyper_parameters)):
            for name in ("rule", "amsgrad", "decoupled_weight_decay", "initial_accumulator_value", "momentum"):
                changed = getattr(then, name) != getattr(now, name)
                if changed and (name != "momentum" or then.planes != now.planes):
                    raise RuntimeError(f"{name} of param group {number} was {getattr(then, name)} when the job was "
                                       f"made, and is {getattr(now, name)} now: set it back, or create another "
                                       "optimizer and another job")

    @functools.cached_property
    def _untrained(self) -> list[torch.Tensor]:
        return [*self._left_out.values(),
                *(parameter for spec, parameter in zip(self.specs, self.parameters) if spec.frozen)]


def _identities(param_groups: list[dict[str, Any]]) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in param_groups]


def lines(job: Job) -> list[tuple[str, str]]:
    """A job's description, entry by entry."""
    lines = [(name, str(getattr(job, name)))
             for name in ("world_size", "update_mode", "max_micro_steps", "mesh", "keep_previous", "on_abort",
                          "newton_schulz")]
    for group in job.groups:
        lines.append((f"group {group.name}", f"{group.hyper_parameters} {group.wire_dtype} state={group.state} "
                      f"state_fallback={group.state_fallback}"))
    for parameter in job.parameters:
        lines.append((f"parameter {parameter.name}", f"{parameter.shape} group {parameter.group} "
                      f"{'frozen' if parameter.frozen else 'trainable'} {parameter.placements}"))
    return lines


def weights_in_lines(names: list[str], parameters: list[torch.Tensor]) -> list[tuple[str, str]]:
    """All ranks must have the same weights, because each uploads a part: a line has the sum of a weight's bits."""
    return [(f"the sum of the bits of parameter {name}", str(_sum_of_bits(local(parameter))))
            for name, parameter in zip(names, parameters) if parameter.requires_grad and
            (not isinstance(parameter, DTensor) or all(placement.is_replicate() for placement in parameter.placements))]


def _sum_of_bits(tensor: torch.Tensor) -> int:
    flat = tensor.contiguous().reshape(-1)
    if flat.data_ptr() % 8 != 0:
        flat = flat.clone()
    whole = flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()
    # By eight bytes, which runs at memory speed.
    return flat[:whole].view(torch.int64).sum().item() + flat[whole:].view(torch.uint8).sum().item()
