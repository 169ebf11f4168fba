"""Rules: the formula by which a service updates parameters, for each its hyper-parameters and its planes. As in
cpu_optimizer_service/common/rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
    number: int  # ballast_rule in client/ballast.h.
    title: str  # For people.
    defaults: dict[str, Any]  # By hyper-parameter.
    # Beside the master weights, with torch.optim's names: what each holds before a parameter's first update.
    planes: Callable[[Mapping[str, Any]], dict[str, float]]
    counts: bool = False  # Whether its formula has the number of updates. Otherwise a state may lack `step`.


def _adam_planes(values: Mapping[str, Any]) -> dict[str, float]:
    return dict.fromkeys(("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if values["amsgrad"] else [])), 0.0)


RULES = {
    "adam": Rule(0, "Adam", dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, decoupled_weight_decay=True,
                                 bias_correction=True, amsgrad=False, maximize=False), _adam_planes, True),
    "sgd": Rule(1, "SGD", dict(lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False),
                lambda values: {"momentum_buffer": 0.0} if values["momentum"] else {}),
    "lion": Rule(2, "Lion", dict(lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False),
                 lambda values: {"exp_avg": 0.0}),
    "adagrad": Rule(3, "Adagrad", dict(lr=1e-2, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0,
                                       eps=1e-10, maximize=False),
                    lambda values: {"sum": float(values["initial_accumulator_value"])}, True),
    "signsgd": Rule(4, "SignSGD", dict(lr=1e-3, weight_decay=0.0, maximize=False), lambda values: {}),
    "muon": Rule(5, "Muon", dict(lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True,
                                 ns_coefficients=(3.4445, -4.775, 2.0315), eps=1e-7, ns_steps=5, adjust_lr_fn=None),
                 lambda values: {"momentum_buffer": 0.0}),
}
# Hyper-parameters that the service has one by one.
PARTS = {"betas": ("beta1", "beta2"), "ns_coefficients": ("ns_a", "ns_b", "ns_c")}
ADJUST_LR_FNS = (None, "original", "match_rms_adamw")  # None is "original".


def rule_named(name: object) -> Rule:
    """ValueError for an unknown name."""
    if name not in RULES:
        raise ValueError(f"rule is {name!r}; expected one of {', '.join(RULES)}")
    return RULES[name]


def check_has(name: str, given: set[str]) -> None:
    """ValueError if the rule of this name lacks one of these hyper-parameters."""
    others = given - rule_named(name).defaults.keys()
    if others:
        raise ValueError(f"rule {name} has no {', '.join(sorted(others))}; it has {', '.join(RULES[name].defaults)}")
