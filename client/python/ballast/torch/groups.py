"""Param groups with names, as the optimizers want them."""

from __future__ import annotations

import itertools
from typing import Any

import torch


def groups(model: torch.nn.Module, weight_decay: float = 1e-2, **options: Any) -> list[dict[str, Any]]:
    """Two param groups of the model's trainable parameters, by name: matrices and what else has two or more
    dimensions, with weight_decay; biases and norms, with none. `options` go into both. A parameter that
    several modules share is there once.

    >>> ballast.torch.AdamW(ballast.torch.groups(model, weight_decay=0.1), lr=3e-4)
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [pair for pair in named if pair[1].dim() >= 2]
    others = [pair for pair in named if pair[1].dim() < 2]
    return [dict(options, params=pairs, weight_decay=decay)
            for pairs, decay in ((decayed, weight_decay), (others, 0.0)) if pairs]


def named(params: Any, module: torch.nn.Module | None, begin: int = 0) -> Any:
    """What torch.optim takes as parameters, each with a name: one that has none gets that of names_in, or "param.N"
    for the Nth of all, counted from begin. Where some have names they stay as they are, and torch.optim has its error."""
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
        return groups  # With names, of all or of some.
    names, number = names_in(module), itertools.count(begin)
    return [{**group, "params": [(names.get(id(entry), f"param.{index}"), entry)
                                 for entry, index in zip(group["params"], number)]} for group in groups]


def regrouped(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A state of an optimizer, in these param groups if its own are others: by the parameters' names, or, where it has
    none, without its empty groups. A group whose parameters were in several has its own hyper-parameters. What cannot be
    matched stays."""
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
    """By the identity of its parameters, as a module has them that DistributedDataParallel may have wrapped."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    return {} if module is None else {id(parameter): name for name, parameter in module.named_parameters()}
