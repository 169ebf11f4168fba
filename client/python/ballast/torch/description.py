"""What a job is: its description by param groups, and what all ranks must have alike."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..session import Group, HyperParameters, Job, Parameter
from .places import local


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def of_job(parameter: torch.Tensor) -> bool:
    """Whether a job has it. What is frozen and of another dtype, such as quantised weights, no service knows."""
    return parameter.requires_grad or parameter.dtype in _DTYPES


def check_group(group: dict[str, Any]) -> None:
    """What a job can have. ValueError that names what it cannot."""
    if len(group["param_names"]) != len(group["params"]):
        raise ValueError(f"a param group has {len(group['params'])} parameters and {len(group['param_names'])} names: change "
                         "both alike, or make another optimizer")
    for name in ("capturable", "differentiable"):
        if group[name]:
            raise ValueError(f"{name} is not possible: the update is made on the service")
    for name, parameter in zip(group["param_names"], group["params"]):
        if getattr(parameter, "_fsdp_flattened", False):  # As FSDP1 marks what it has flattened.
            raise ValueError(f"parameter {name} is a part of what FullyShardedDataParallel (FSDP1) has flattened, "
                             "and whose shards cannot be read from it: call torch.distributed.fsdp.fully_shard (FSDP2)")
        if not of_job(parameter):
            continue
        if parameter.is_complex():
            raise ValueError(f"parameter {name} is complex, which is not supported")
        if parameter.dtype not in _DTYPES:
            raise ValueError(f"parameter {name} is {parameter.dtype}; expected float32, bfloat16 or float16")


def not_held(module: torch.nn.Module | None, param_groups: list[dict[str, Any]]) -> list[str]:
    """The names of what training may change and no service holds: persistent buffers, except statistics that count
    batches and have been loaded, and frozen parameters. Without a module: the frozen ones of the param groups."""
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
    """ValueError for a parameter without memory, and for two over the same: an update of one would write the other,
    which the service does not know."""
    areas: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    for name, parameter in named:
        here = local(parameter)
        if here.is_meta:
            raise ValueError(f"parameter {name} is on the meta device and has no weights: call model.to_empty(device=...) "
                             "and give it weights before the optimizer's first step(), attach() or load_state_dict()")
        if here.numel() > 0:
            if here.untyped_storage().nbytes() == 0:
                raise ValueError(f"the memory of parameter {name} was freed: it is a whole one that FSDP2 had gathered for "
                                 "a forward; create the optimizer before the first forward, or after model.reshard()")
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
                    raise ValueError(f"parameters {name} and {other_name} are two over the same memory, of which each "
                                     "would have weights of its own on the service: use one Parameter in both places, "
                                     "as in b.weight = a.weight")


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an element of them is the same: both may be columns of one matrix."""
    def at(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        of_storage = torch.zeros(size, dtype=torch.bool)
        of_storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
        return of_storage

    if one.element_size() != other.element_size():
        return True
    return bool((at(one) & at(other)).any())


class Described:
    """Param groups as a job has them: a param group becomes a group of the job for each dtype in it, a parameter with
    several names one of the job. `tensors` and `names`: by index in the job. `source`: by group of the job, the param
    group that it is of. trained: by identity, what the job before this one trained, and goes on to have moments, as in
    torch, if it is frozen now."""

    def __init__(self, param_groups: list[dict[str, Any]], hyper_parameters: list[HyperParameters],
                 trained: Collection[int] = ()):
        self.groups: list[Group] = []
        self.parameters: list[Parameter] = []
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.source: list[int] = []
        self.left_out: dict[str, torch.Tensor] = {}
        seen = set()
        for index, (group, values) in enumerate(zip(param_groups, hyper_parameters)):
            numbers: dict[torch.dtype, int] = {}
            for name, parameter in zip(group["param_names"], group["params"]):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                if not of_job(parameter):
                    self.left_out[name] = parameter
                    continue
                dtype = str(parameter.dtype).removeprefix("torch.")
                if parameter.dtype not in numbers:
                    numbers[parameter.dtype] = len(self.groups)
                    self.groups.append(Group(f"{index}.{dtype}", values, dtype, dtype))
                    self.source.append(index)
                self.parameters.append(Parameter(name, tuple(parameter.shape), numbers[parameter.dtype],
                                                 frozen=not (parameter.requires_grad or id(parameter) in trained)))
                self.tensors.append(parameter)
                self.names.append(name)


def lines(job: Job) -> list[tuple[str, str]]:
    """A job's description, entry by entry."""
    lines = [(name, str(getattr(job, name)))
             for name in ("world_size", "update_mode", "max_micro_steps", "mesh", "keep_previous", "on_abort")]
    for group in job.groups:
        lines.append((f"group {group.name}", f"{group.hyper_parameters} {group.wire_dtype}"))
    for parameter in job.parameters:
        lines.append((f"parameter {parameter.name}", f"{parameter.shape} group {parameter.group} "
                      f"{'frozen' if parameter.frozen else 'trainable'} {parameter.placements}"))
    return lines


def weights_in_lines(names: list[str], parameters: list[torch.Tensor]) -> list[tuple[str, str]]:
    """Of the weights that all ranks must have alike, since each uploads a part of them: a sum of their bits."""
    return [(f"the sum of the bits of parameter {name}", str(_sum_of_bits(local(parameter))))
            for name, parameter in zip(names, parameters) if parameter.requires_grad and
            (not isinstance(parameter, DTensor) or all(placement.is_replicate() for placement in parameter.placements))]


def _sum_of_bits(tensor: torch.Tensor) -> int:
    flat = tensor.contiguous().reshape(-1)
    if flat.data_ptr() % 8 != 0:
        flat = flat.clone()
    whole = flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()
    # By eight bytes, which goes as fast as memory.
    return flat[:whole].view(torch.int64).sum().item() + flat[whole:].view(torch.uint8).sum().item()
