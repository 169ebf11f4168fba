"""Param groups with names."""

from __future__ import annotations

import itertools
from typing import Any

import torch


def groups(model: torch.nn.Module, weight_decay: float = 1e-2, **options: Any) -> list[dict[str, Any]]:
    """Two param groups of the model's trainable parameters, by name. Parameters with two or more dimensions, such as
    matrices, have weight_decay; biases and norms have none. `options` go into both. A parameter that several modules
    share appears once.

    >>> ballast.torch.AdamW(ballast.torch.groups(model, weight_decay=0.1), lr=3e-4)"""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [pair for pair in named if pair[1].dim() >= 2]
    others = [pair for pair in named if pair[1].dim() < 2]
    return [dict(options, params=pairs, weight_decay=decay)
            for pairs, decay in ((decayed, weight_decay), (others, 0.0)) if pairs]


def named(params: Any, module: torch.nn.Module | None, begin: int = 0) -> Any:
    """torch.optim's argument for parameters, each with a name. A parameter without a name gets that of names_in, or
    "param.N" for the Nth of all, counted from begin. If only some have names, they do not change, and torch.optim
    raises its error."""
    if isinstance(params, (torch.Tensor, set, dict)):
        return params
    groups = list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    if any(isinstance(group.get("params"), (set, type(None))) for group in groups):
        return groups
    groups = [{**group, "params": [group["params"]] if torch.is_tensor(group["params"]) else list(group["params"])}
              for group in groups]
    if not all(torch.is_tensor(entry) for group in groups for entry in group["params"]):
        return groups  # All or some have names.
    names, number = names_in(module), itertools.count(begin)
    return [{**group, "params": [(names.get(id(entry), f"param.{index}"), entry)
                                 for entry, index in zip(group["params"], number)]} for group in groups]


def regrouped(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A state of an optimizer, in these param groups if its own differ. Parameters are matched by name, or, without
    names, by order without empty groups. If a group's parameters were in several groups, it keeps its own
    hyper-parameters. Unmatched parts do not change."""
    theirs = state["param_groups"]
    found = {name: (index, group) for group in theirs for name, index in zip(group.get("param_names", []), group["params"])}
    names = [name for group in groups for name in group["param_names"]]
    if sorted(found) != sorted(names):
        sizes = [len(group["params"]) for group in groups]
        if [len(group["params"]) for group in theirs if group["params"]] == sizes:
            return {**state, "param_groups": [group for group in theirs if group["params"]]}
        return state
    if [group["param_names"] for group in theirs] == [group["param_names"] for group in groups]:
        return state
    result = []
    for group in groups:
        sources = [found[name][1] for name in group["param_names"]]
        alike = all(source is sources[0] for source in sources)
        own = {key: value for key, value in group.items() if not key.startswith("job_")}
        result.append({**sources[0], **({} if alike else own), "param_names": group["param_names"],
                       "params": [found[name][0] for name in group["param_names"]]})
    return {**state, "param_groups": result}


def names_in(module: torch.nn.Module | None) -> dict[int, str]:
    """Names by the identity of the module's parameters. DistributedDataParallel may have wrapped the module."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    return {} if module is None else {id(parameter): name for name, parameter in module.named_parameters()}
