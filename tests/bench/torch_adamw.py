#!/usr/bin/python3
"""How fast torch.optim.AdamW updates on this CPU: the peer of kernel_bench.

    torch_adamw.py [--short] [--elements N] [--rounds N] [--threads N] [--json FILE]

fp32 parameters and gradients, as one flat tensor and as 100 tensors, with foreach and without, all
threads. The layouts are measured in turns, each half of its rounds at a time if there are many (the state of all at
once would need too much memory); figures are medians. run.sh runs it twice, with the allocator as it
comes and with the settings that the service has, and the best of both counts. Without torch it exits 3.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "deploy"))

from whole_file import write_whole  # noqa: E402

try:
    import torch
except ImportError:
    print("torch_adamw.py: python3-torch is not installed", file=sys.stderr)
    sys.exit(3)

LAYOUTS = (("torch_flat", 1, False), ("torch_flat_foreach", 1, True),
           ("torch_100", 100, False), ("torch_100_foreach", 100, True))


def make_optimizer(weights, gradients, tensors, foreach):
    """AdamW over views of two flat arrays, cut into `tensors` pieces."""
    parameters = []
    for weight, gradient in zip(weights.chunk(tensors), gradients.chunk(tensors)):
        parameter = torch.nn.Parameter(weight, requires_grad=True)
        parameter.grad = gradient
        parameters.append(parameter)
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, foreach=foreach)


def measure(elements, rounds):
    """Seconds of each step, by layout."""
    weights = torch.full((elements,), 0.5)
    gradients = torch.full((elements,), 0.01)
    seconds = {key: [] for key, _, _ in LAYOUTS}
    # Each turn makes the state anew, which takes as long as a few rounds.
    for turn_rounds in ((rounds + 1) // 2, rounds // 2) if rounds > 3 else (rounds,):
        for key, tensors, foreach in LAYOUTS:
            seconds[key] += measure_layout(weights, gradients, tensors, foreach, turn_rounds)
    return seconds


def measure_layout(weights, gradients, tensors, foreach, rounds):
    optimizer = make_optimizer(weights, gradients, tensors, foreach)
    if rounds > 0:
        optimizer.step()  # Makes the state, and warms up.
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def figures_of(seconds, elements):
    figures = {}
    for key, samples in seconds.items():
        speeds = [elements / taken / 1e9 for taken in samples]
        figures[key + "_gparam_s"] = {"median": statistics.median(speeds), "min": min(speeds),
                                      "max": max(speeds), "unit": "Gparam/s"}
    return figures


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="32M elements and 3 rounds")
    parser.add_argument("--elements", type=positive)
    parser.add_argument("--rounds", type=positive)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    elements = arguments.elements or (32_000_000 if arguments.short else 100_000_000)
    rounds = arguments.rounds or (3 if arguments.short else 10)

    torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        figures = figures_of(measure(elements, rounds), elements)
    for key, figure in figures.items():
        print(f"{key:32} {figure['median']:.3f} ({figure['min']:.3f} to {figure['max']:.3f})")
    if arguments.json:
        text = json.dumps({"name": "torch_adamw", "figures": figures,
                           "info": {"torch": torch.__version__, "elements": elements,
                                    "threads": torch.get_num_threads(), "rounds": rounds}}, indent=1)
        write_whole(arguments.json, text + "\n")


if __name__ == "__main__":
    main()
