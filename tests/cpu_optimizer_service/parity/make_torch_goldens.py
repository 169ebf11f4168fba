#!/usr/bin/python3
"""Makes torch_goldens.txt: what torch.optim makes of 100 steps, for every rule.

    python3 make_torch_goldens.py > torch_goldens.txt

Inputs are not stored: torch_parity_test.cc makes the same ones from a hash, in exact arithmetic (an
integer of 24 bits times a power of two). bias_correction=False has no peer in torch; the NumPy model
covers it.

Format, one line each:
    case NAME
    group RULE ELEMENTS SEED SCALE_EXPONENT HYPER_PARAMETER=VALUE... [rows=ROWS]
    PLANE HEX...    fp32 bits of each plane that the rule has
"""

import itertools
import sys

import numpy as np
import torch

STEPS = 100
ELEMENTS = 67
MATRIX_ELEMENTS = 84


def hashed(seed, step, elements):
    """splitmix64 of (seed, step, element)."""
    with np.errstate(over="ignore"):
        x = np.arange(elements, dtype=np.uint64)
        x += np.uint64(seed) * np.uint64(1 << 40) + np.uint64(step) * np.uint64(1 << 20)
        x += np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def values(seed, step, elements, exponent):
    """Within +-2^exponent; one in 16 is zero."""
    bits = hashed(seed, step, elements)
    mantissas = (bits >> np.uint64(40)).astype(np.int64) - (1 << 23)
    mantissas[bits % np.uint64(16) == 0] = 0
    return np.ldexp(mantissas.astype(np.float32), exponent - 23).astype(np.float32)


def gradient(seed, step, elements, scale_exponent):
    """The scale varies from step to step, over three orders of magnitude."""
    return values(seed, step, elements, scale_exponent + step * 7 % 11 - 5)


DEFAULTS = dict(
    adam=dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False),
    sgd=dict(lr=1e-2, weight_decay=0.0, momentum=0.0, dampening=0.0, nesterov=False, maximize=False),
    lion=dict(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0, maximize=False),
    adagrad=dict(lr=1e-2, eps=1e-10, weight_decay=0.0, lr_decay=0.0, initial_accumulator_value=0.0, maximize=False),
    signsgd=dict(lr=1e-3, weight_decay=0.0, maximize=False),
    muon=dict(lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ns_a=3.4445, ns_b=-4.775, ns_c=2.0315, eps=1e-7,
              ns_steps=5, match_rms_adamw=False),
)


def adam_cases():
    alone = dict(
        defaults={},
        weight_decay=dict(weight_decay=0.1),
        amsgrad=dict(amsgrad=True),
        maximize=dict(maximize=True),
        betas=dict(beta1=0.8, beta2=0.95),
        no_momentum=dict(beta1=0.0),
        eps=dict(eps=1e-3),
        tiny_eps=dict(eps=1e-15, scale=-20),
        lr=dict(lr=0.05),
        large_gradients=dict(scale=12),
        together=dict(
            lr=3e-3, beta1=0.85, beta2=0.98, eps=1e-6, weight_decay=0.05, amsgrad=True, maximize=True, scale=0
        ),
    )
    groups = [
        dict(lr=1e-2, weight_decay=0.1),
        dict(lr=3e-4, beta1=0.8, beta2=0.95, eps=1e-6, amsgrad=True, scale=3),
        dict(lr=2e-3, weight_decay=0.3, maximize=True, scale=-9),
        dict(lr=0.0, beta1=0.5),
    ]
    for kind, decoupled in (("adamw", True), ("adam", False)):
        for name, options in alone.items():
            yield f"{kind}_{name}", [dict(options, rule="adam", decoupled_weight_decay=decoupled)]
        yield f"{kind}_several_groups", [dict(group, rule="adam", decoupled_weight_decay=decoupled) for group in groups]


def other_cases():
    of_rule = dict(
        sgd=dict(
            defaults={},
            weight_decay=dict(weight_decay=0.1),
            momentum=dict(momentum=0.9),
            dampening=dict(momentum=0.9, dampening=0.3),
            nesterov=dict(momentum=0.95, nesterov=True),
            maximize=dict(momentum=0.5, maximize=True),
            together=dict(lr=3e-3, momentum=0.8, nesterov=True, weight_decay=0.05, maximize=True, scale=0),
        ),
        lion=dict(
            defaults={},
            weight_decay=dict(weight_decay=0.3, lr=1e-3),
            betas=dict(beta1=0.95, beta2=0.98),
            no_momentum=dict(beta1=0.0),
            maximize=dict(maximize=True, scale=4),
        ),
        adagrad=dict(
            defaults={},
            weight_decay=dict(weight_decay=0.1),
            lr_decay=dict(lr_decay=0.05),
            initial_accumulator_value=dict(initial_accumulator_value=0.7),
            eps=dict(eps=1e-3),
            together=dict(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1, weight_decay=0.02, maximize=True, scale=0),
        ),
        signsgd=dict(defaults={}, weight_decay=dict(weight_decay=0.2), maximize=dict(lr=0.01, maximize=True)),
        muon=dict(
            defaults={},
            # With lr so small a bf16 value that is rounded the other way is less than what the test allows.
            tall=dict(lr=1e-4, rows=12),
            row=dict(rows=1),
            weight_decay=dict(lr=1e-4, weight_decay=0.0),
            momentum=dict(lr=1e-4, momentum=0.8),
            no_nesterov=dict(lr=1e-4, nesterov=False, rows=12),
            ns=dict(ns_steps=3, ns_a=3.0, ns_b=-3.2, ns_c=1.2),
            eps=dict(eps=10.0),
            match_rms_adamw=dict(lr=1e-4, match_rms_adamw=True, rows=12),
            together=dict(
                lr=3e-4, weight_decay=0.5, momentum=0.9, nesterov=False, ns_steps=6, match_rms_adamw=True, scale=3
            ),
        ),
    )
    for rule, cases in of_rule.items():
        for name, options in cases.items():
            yield f"{rule}_{name}", [dict(options, rule=rule)]


class Lion(torch.optim.Optimizer):
    """Listing 2 of Chen et al. 2023, line by line: torch has no Lion."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = -parameter.grad if group["maximize"] else parameter.grad
                momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                update = momentum * group["beta1"] + gradient * (1 - group["beta1"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(torch.sign(update) * group["lr"])
                momentum.mul_(group["beta2"]).add_(gradient * (1 - group["beta2"]))


class SignSGD(torch.optim.Optimizer):
    """Algorithm 1 of Bernstein et al. 2018, with the decay of torch.optim.AdamW."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = -parameter.grad if group["maximize"] else parameter.grad
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(torch.sign(gradient) * group["lr"])


def exact_newton_schulz(grad, ns_coefficients, ns_steps, eps):
    """torch's lines in fp64. torch runs them in bf16, whose three digits would hide what is to be compared."""
    a, b, c = ns_coefficients
    x = grad.bfloat16().double()
    x = x.T if grad.size(0) > grad.size(1) else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.T if grad.size(0) > grad.size(1) else x).bfloat16()


def make_optimizer(groups, parameters):
    """groups: of one rule."""
    given = []
    for group, parameter in zip(groups, parameters):
        values = {name: value for name, value in group.items() if name in DEFAULTS[group["rule"]]}
        if group["rule"] == "adam":
            values["betas"] = (values.pop("beta1"), values.pop("beta2"))
        if group["rule"] == "muon":
            values["ns_coefficients"] = tuple(values.pop(name) for name in ("ns_a", "ns_b", "ns_c"))
            values["adjust_lr_fn"] = "match_rms_adamw" if values.pop("match_rms_adamw") else None
        given.append(dict(values, params=[parameter]))
    rule = groups[0]["rule"]
    if rule == "lion":
        return Lion(given, {})
    if rule == "signsgd":
        return SignSGD(given, {})
    if rule == "muon":
        return torch.optim.Muon(given)
    if rule == "adam":
        kind = torch.optim.AdamW if groups[0]["decoupled_weight_decay"] else torch.optim.Adam
        return kind(given, foreach=False)
    if rule == "sgd":
        return torch.optim.SGD(given, foreach=False)
    # The accumulators are made with the optimizer's value, not the group's.
    return torch.optim.Adagrad(given, initial_accumulator_value=groups[0]["initial_accumulator_value"], foreach=False)


def run_case(name, groups, seed):
    groups = [dict(dict(DEFAULTS[g["rule"]], scale=-3), **g, seed=seed + i) for i, g in enumerate(groups)]
    elements = MATRIX_ELEMENTS if groups[0]["rule"] == "muon" else ELEMENTS
    shape = (groups[0].setdefault("rows", 7), -1) if groups[0]["rule"] == "muon" else (-1,)
    parameters = [torch.nn.Parameter(torch.from_numpy(values(g["seed"], 0, elements, 0)).reshape(shape)) for g in groups]
    optimizer = make_optimizer(groups, parameters)
    for step in range(1, STEPS + 1):
        for g, parameter in zip(groups, parameters):
            parameter.grad = torch.from_numpy(gradient(g["seed"], step, elements, g["scale"])).reshape(shape)
        optimizer.step()

    print("case", name)
    for g, parameter in zip(groups, parameters):
        print("group", g["rule"], elements, g["seed"], g["scale"],
              *(f"{key}={float(value)!r}" for key, value in g.items() if key not in ("rule", "seed", "scale")))
        state = optimizer.state[parameter]
        planes = dict(master=parameter.detach(), **{key: value for key, value in state.items() if key != "step"})
        for plane, tensor in planes.items():
            if tensor is not None:
                print(plane, *(f"{bits:08x}" for bits in tensor.numpy().reshape(-1).view(np.uint32)))


def main():
    torch.set_num_threads(1)
    torch.optim._muon._zeropower_via_newtonschulz = exact_newton_schulz
    print(f"# torch {torch.__version__}, made by {sys.argv[0].split('/')[-1]}")
    seed = 1
    for name, groups in itertools.chain(adam_cases(), other_cases()):
        run_case(name, groups, seed)
        seed += len(groups)


if __name__ == "__main__":
    main()
