"""Param groups with names."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ..rules import PARTS, RULES, check_has, rule_named
from ..session import STATES, HyperParameters, number_of

_HYPER_PARAMETERS = frozenset().union(*(rule.defaults for rule in RULES.values()))
_OTHERS = {"rule", "foreach", "capturable", "differentiable", "fused"}
_STATE = {"state", "state_fallback"}  # How the service stores a group's state; its values are the same in all.
_MOST_BETA2_OF_BF16, _MOST_BETA_OF_BF16 = 0.98, 0.99


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
    hyper-parameters. InvalidArgumentError if one of those is of another rule. Unmatched parts do not change."""
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
        if not alike:  # `completed` sees only one rule.
            for name, source in zip(group["param_names"], sources):
                check_trained_with(name, source, group)
        own = {key: value for key, value in group.items() if not key.startswith("job_")}
        result.append({**sources[0], **({} if alike else own), "param_names": group["param_names"],
                       "params": [found[name][0] for name in group["param_names"]]})
    return {**state, "param_groups": result}


def names_in(module: torch.nn.Module | None) -> dict[int, str]:
    """Names by the identity of the module's parameters. DistributedDataParallel may have wrapped the module."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    return {} if module is None else {id(parameter): name for name, parameter in module.named_parameters()}


# ---------------------------------------------------------------- rules


def with_rule(group: dict[str, Any], rule_of_defaults: str) -> dict[str, Any]:
    """torch.optim's argument for a param group. If it names another rule than the optimizer's defaults have, also with
    that rule's defaults. ValueError: there is no such rule, or it has no such hyper-parameter."""
    if not isinstance(group, dict) or "rule" not in group:
        return group
    check_has(group["rule"], _HYPER_PARAMETERS & group.keys())
    of_rule = {**RULES[group["rule"]].defaults, "state": "fp32", "state_fallback": False}
    return group if group["rule"] == rule_of_defaults else {**of_rule, **group}


def drop_others(group: dict[str, Any]) -> None:
    """Hyper-parameters that its rule does not have: torch.optim puts all defaults into each group."""
    for name in _HYPER_PARAMETERS & group.keys() - RULES[group["rule"]].defaults.keys():
        del group[name]


def hyper_parameters_of(group: dict[str, Any]) -> HyperParameters:
    """ValueError for what the service would refuse after the step has begun."""
    there = {name: group[name] for name in rule_named(group["rule"]).defaults if name in group}
    for name, value in there.items():
        if name in PARTS or name == "adjust_lr_fn":
            continue
        least = -sys.float_info.max if name == "dampening" else 0.0
        if not least <= value <= sys.float_info.max:
            raise ValueError(f"Invalid {name} value: {float(value)}; set it in the optimizer's param_groups")
    if there.get("ns_steps", 0) not in range(100):
        raise ValueError(f"ns_steps is {there['ns_steps']}, expected 0 to 99; set it in the optimizer's param_groups")
    coefficients = there.get("ns_coefficients", (0, 0, 0))
    if len(coefficients) != 3 or not all(map(math.isfinite, coefficients)):
        raise ValueError(f"ns_coefficients is {coefficients}, expected 3 finite values; set it in the optimizer's "
                         "param_groups")
    for index, beta in enumerate(there.get("betas", ())):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {float(beta)}; set it in the optimizer's "
                             "param_groups")
    if group["rule"] == "sgd" and there.get("nesterov") and (there["momentum"] == 0 or there["dampening"] != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening; set them in the optimizer's "
                         "param_groups")
    check_state(group)
    return HyperParameters(rule=group["rule"], **there)


def check_state(group: Mapping[str, Any]) -> None:
    """ValueError: the group's rule, or an option of it, has no state in that format."""
    state, rule = group.get("state", "fp32"), group["rule"]
    number_of(STATES, state, "state")
    if state != "fp32" and rule == "muon":
        raise ValueError(f"state {state} is not for muon: use fp32")
    if state == "8bit" and (rule != "adam" or group["amsgrad"]):
        raise ValueError(f"state 8bit is not for {rule}{' with amsgrad' if rule == 'adam' else ''}: use bf16 or fp32")
    if state == "bf16":
        decays = {"adam": (("beta1", _MOST_BETA_OF_BF16), ("beta2", _MOST_BETA2_OF_BF16)),
                  "lion": (("beta2", _MOST_BETA_OF_BF16),), "sgd": (("momentum", _MOST_BETA_OF_BF16),)}
        for name, most in decays.get(rule, ()):
            value = group["betas"][int(name[-1]) - 1] if name.startswith("beta") else group[name]
            if value > most:
                raise ValueError(f"state bf16 is not for a {name} of {value}, but for at most {most}: the moment would "
                                 "not follow the gradients; use fp32" + (" or 8bit" if rule == "adam" else ""))


def planes_of(group: Mapping[str, Any]) -> dict[str, float]:
    """See Rule.planes."""
    return RULES[group["rule"]].planes(group)


def _title_of(values: Mapping[str, Any]) -> str:
    return "AdamW" if values.get("decoupled_weight_decay") else RULES[values.get("rule", "adam")].title


def check_rule(what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """InvalidArgumentError if `theirs`, the hyper-parameters with which `what` was trained, are of another rule than
    `ours`. Those of torch.optim do not name it; then it shows in what they have."""
    named, own = theirs.get("rule"), ours.get("rule")
    if named and own:
        others = named != own
    else:
        others = _HYPER_PARAMETERS & (theirs.keys() - ours.keys() if own else
                                        ours.keys() - RULES[named].defaults.keys())
    if others:
        kind = _title_of(theirs) if named else f"an optimizer that has {', '.join(sorted(others))}"
        raise InvalidArgumentError(f"{what} was trained with {kind}: use that one, or a param group of its rule")


def check_trained_with(what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """The same, also if one is of Adam and the other of AdamW."""
    check_rule(what, theirs, ours)
    decoupled = theirs.get("decoupled_weight_decay")
    if decoupled is not None and ours.get("decoupled_weight_decay", decoupled) != decoupled:
        raise InvalidArgumentError(f"{what} was trained with {_title_of(theirs)}: use that optimizer, because the "
                                   "weight decay of Adam and AdamW differs")


def completed(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A state of an optimizer, whose param groups have what they lack. They get the rule of these groups. What an older
    torch did not have gets the rule's default, as in torch; decoupled_weight_decay is left to __setstate__. How the
    service stores the state remains.
    InvalidArgumentError if one is of another rule."""
    if len(state["param_groups"]) != len(groups):
        return state  # torch itself raises an error.
    complete = []
    for index, (theirs, ours) in enumerate(zip(state["param_groups"], groups)):
        check_rule(f"param group {index}", theirs, ours)
        own = {name: value for name, value in ours.items() if name in _OTHERS}
        defaults = {name: value for name, value in RULES[ours["rule"]].defaults.items()
                    if name in ours and name != "decoupled_weight_decay"}
        stored = {name: value for name, value in ours.items() if name in _STATE}
        complete.append({**own, **defaults, **theirs, **stored})
    return {**state, "param_groups": complete}
