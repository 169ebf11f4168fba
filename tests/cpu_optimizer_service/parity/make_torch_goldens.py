#!/usr/bin/python3
"""Makes torch_goldens.txt: what torch.optim.Adam and AdamW make of 100 steps.

    /usr/bin/python3 make_torch_goldens.py > torch_goldens.txt    (Debian: python3-torch)

Inputs are not stored: adam_parity_test.cc makes the same ones from a hash, in exact arithmetic (an
integer of 24 bits times a power of two). bias_correction=False has no peer in torch; the NumPy model
covers it.

Format, one line each:
    case NAME
    group LR BETA1 BETA2 EPS WEIGHT_DECAY DECOUPLED AMSGRAD MAXIMIZE ELEMENTS SEED SCALE_EXPONENT
    PLANE HEX...    fp32 bits: master, exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq
"""

import sys

import numpy as np
import torch

STEPS = 100
ELEMENTS = 67


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
    lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False, scale=-3
)


def cases():
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
    for kind in ("adamw", "adam"):
        for name, options in alone.items():
            yield f"{kind}_{name}", kind, [options]
        yield f"{kind}_several_groups", kind, groups


def run_case(name, kind, groups, seed):
    groups = [dict(DEFAULTS, **group, seed=seed + i) for i, group in enumerate(groups)]
    optimizer_class = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    parameters = [torch.nn.Parameter(torch.from_numpy(values(g["seed"], 0, ELEMENTS, 0))) for g in groups]
    optimizer = optimizer_class(
        [
            dict(
                params=[parameter],
                lr=g["lr"],
                betas=(g["beta1"], g["beta2"]),
                eps=g["eps"],
                weight_decay=g["weight_decay"],
                amsgrad=g["amsgrad"],
                maximize=g["maximize"],
                foreach=False,
            )
            for g, parameter in zip(groups, parameters)
        ]
    )
    for step in range(1, STEPS + 1):
        for g, parameter in zip(groups, parameters):
            parameter.grad = torch.from_numpy(gradient(g["seed"], step, ELEMENTS, g["scale"]))
        optimizer.step()

    print("case", name)
    for g, parameter in zip(groups, parameters):
        print(
            "group", *(repr(float(g[key])) for key in ("lr", "beta1", "beta2", "eps", "weight_decay")),
            int(kind == "adamw"), int(g["amsgrad"]), int(g["maximize"]), ELEMENTS, g["seed"], g["scale"],
        )  # fmt: skip
        state = optimizer.state[parameter]
        planes = dict(master=parameter.detach(), exp_avg=state["exp_avg"], exp_avg_sq=state["exp_avg_sq"])
        if g["amsgrad"]:
            planes["max_exp_avg_sq"] = state["max_exp_avg_sq"]
        for plane, tensor in planes.items():
            print(plane, *(f"{bits:08x}" for bits in tensor.numpy().view(np.uint32)))


def main():
    torch.set_num_threads(1)
    print(f"# torch {torch.__version__}, made by {sys.argv[0].split('/')[-1]}")
    seed = 1
    for name, kind, groups in cases():
        run_case(name, kind, groups, seed)
        seed += len(groups)


if __name__ == "__main__":
    main()
