#!/usr/bin/env python3
"""What ballast.torch costs beside a session in C++, and a step of a GPT beside torch.optim.

    BALLAST_BIN_DIR=build/release/bin tests/client/python/torch_environment.py --run tests/bench/torch_client.py
        [--short] [--parameters N] [--layers N] [--width N] [--vocabulary N] [--rounds N] [--json FILE]

Overhead: step() with gradients that are there, for bf16 parameters in 150 tensors over shared memory, against
`ballast-bench worker`, which sends and receives as many bytes. That has its gradients where they are sent from, and
leaves the weights where they arrive; what it takes to copy both, by one thread, is measured beside it.

Hooks: backward of 150 small tensors whose gradients leave in it, and of the same tensors without an optimizer.

Return: step() and the forward after it, with weights that come back in step() and in that forward.

GPT: step() for the fp32 parameters of a GPT (by default GPT-2's 124M), ballast.torch with a service of its own
against torch.optim.AdamW, foreach and fused. Memory: what the process grows by with the optimizer, without
parameters and gradients. What is compared is measured in turns.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "client/python/examples"), str(ROOT / "tests/bench"),
                str(ROOT / "deploy")]

import ballast.torch  # noqa: E402
from gpt import GPT  # noqa: E402
from torch_adamw import positive  # noqa: E402
from whole_file import write_whole  # noqa: E402

TENSORS = 150


def timed(step, steps):
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def anonymous_bytes():
    """Of this process's memory, what is its own: shared memory and files are not in it."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def session_steps(parameters, steps):
    """Seconds of each step of a C++ session with the same traffic."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "worker.json")
        subprocess.run([pathlib.Path(os.environ["BALLAST_BIN_DIR"], "ballast-bench"), "worker",
                        "--transport=shared-memory", "--groups=1", f"--tensors={TENSORS}",
                        f"--parameters={parameters}", f"--steps={steps}", "--json", path], check=True,
                       stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())["figures"]["total_seconds"]["samples"]


def overhead(parameters, steps, turns):
    tensors = [torch.nn.Parameter(torch.full((parameters // TENSORS,), 0.5, dtype=torch.bfloat16))
               for _ in range(TENSORS)]
    for tensor in tensors:
        tensor.grad = torch.full_like(tensor, 0.01)
    optimizer = ballast.torch.AdamW([(f"tensor{i}", tensor) for i, tensor in enumerate(tensors)])
    timed(optimizer.step, 3)
    elsewhere = [torch.zeros_like(tensor) for tensor in tensors]

    def copy():
        for tensor, other in zip(tensors, elsewhere):
            other.copy_(tensor.grad)
        for tensor, other in zip(tensors, elsewhere):
            tensor.grad.copy_(other)

    client, session, copies = [], [], []
    for _ in range(turns):
        session += session_steps(parameters // TENSORS * TENSORS, steps)
        client += timed(optimizer.step, steps)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        copies += timed(copy, steps)
        torch.set_num_threads(threads)
    optimizer.close()
    return {"session_step_seconds": session, "client_step_seconds": client, "copies_seconds": copies}


def hooks(steps, turns):
    """Backward with and without hooks; step() is not timed."""
    def tensors_of(optimizer_of):
        tensors = [torch.nn.Parameter(torch.full((256,), 0.5)) for _ in range(TENSORS)]
        return tensors, optimizer_of(tensors)

    with_hooks, optimizer = tensors_of(lambda tensors: ballast.torch.AdamW(
        [(f"tensor{i}", tensor) for i, tensor in enumerate(tensors)], overlap=True, accumulation_steps=1))
    without, _ = tensors_of(lambda tensors: None)

    def backward_of(tensors):
        loss = sum(tensor.sum() for tensor in tensors)
        begin = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - begin
        if tensors is with_hooks:
            optimizer.step()
        for tensor in tensors:
            tensor.grad = None
        return seconds

    for _ in range(3):
        backward_of(with_hooks)
    if not optimizer.overlap:
        raise RuntimeError("gradients did not leave during backward, which was to be measured")
    seconds = {"backward_with_hooks_seconds": [], "backward_without_hooks_seconds": []}
    for _ in range(turns):
        for key, tensors in zip(seconds, (with_hooks, without)):
            seconds[key] += [backward_of(tensors) for _ in range(steps)]
    optimizer.close()
    return seconds


def returns(parameters, steps, turns):
    """The backward before step() is not timed."""
    width = math.isqrt(parameters // 24)
    batch = torch.randn(64, width)

    def trainer_of(overlap_weights):
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(24)])
        optimizer = ballast.torch.AdamW(model.named_parameters(), overlap_weights=overlap_weights)

        def seconds():
            model(batch).square().mean().backward()
            begin = time.perf_counter()
            optimizer.step()
            model(batch)
            return time.perf_counter() - begin

        seconds()
        return seconds, optimizer

    trainers = {"step_and_forward_seconds": trainer_of(False),
                "step_and_forward_with_overlap_weights_seconds": trainer_of(True)}
    samples = {key: [] for key in trainers}
    for _ in range(turns):
        for key, (seconds, _) in trainers.items():
            samples[key] += [seconds() for _ in range(steps)]
    for _, optimizer in trainers.values():
        optimizer.close()
    return samples


def gpt_steps(args, steps, turns):
    seconds, grown = {}, {}

    def prepared(name, make):
        model = GPT(args.vocabulary, 1024, args.layers, args.width, max(args.width // 64, 1))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        before = anonymous_bytes()
        optimizer = make(model)
        timed(optimizer.step, 2)
        elements = sum(parameter.numel() for parameter in model.parameters())
        grown[name] = (anonymous_bytes() - before) / elements
        return optimizer, elements

    makers = {
        "gpt_ballast": lambda model: ballast.torch.AdamW(model.named_parameters()),
        "gpt_torch_foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
        "gpt_torch_fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True)}
    optimizers = {name: prepared(name, make) for name, make in makers.items()}
    for _ in range(turns):
        for name, (optimizer, _) in optimizers.items():
            seconds.setdefault(f"{name}_step_seconds", []).extend(timed(optimizer.step, steps))
    optimizers["gpt_ballast"][0].close()
    return seconds, grown, optimizers["gpt_ballast"][1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="few rounds")
    parser.add_argument("--parameters", type=positive, default=100_000_000)
    parser.add_argument("--layers", type=positive, default=12)
    parser.add_argument("--width", type=positive, default=768)
    parser.add_argument("--vocabulary", type=positive, default=50257)
    parser.add_argument("--rounds", type=positive)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    steps, turns = (args.rounds or (4 if args.short else 10)), (2 if args.short else 4)

    seconds, grown, elements = gpt_steps(args, steps, turns)
    seconds |= overhead(args.parameters, steps, turns) | hooks(steps, turns)
    seconds |= returns(args.parameters // 4, steps, turns)
    figures = {key: {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "unit": "s"}
               for key, samples in seconds.items()}
    hook = (figures["backward_with_hooks_seconds"]["median"] -
            figures["backward_without_hooks_seconds"]["median"]) / TENSORS * 1e6
    figures["hook_us_per_parameter"] = {"median": hook, "min": hook, "max": hook, "unit": "us"}
    for name, bytes_each in grown.items():
        figures[f"{name}_bytes_per_parameter"] = {
            "median": bytes_each, "min": bytes_each, "max": bytes_each, "unit": "bytes"}
    for key, figure in figures.items():
        print(f"{key:46} {figure['median']:.4f} ({figure['min']:.4f} to {figure['max']:.4f}) {figure['unit']}")
    median = {key: figure["median"] for key, figure in figures.items()}
    session = median["session_step_seconds"]
    ratios = {"client_to_session": median["client_step_seconds"] / session,
              "client_to_session_and_copies": median["client_step_seconds"] / (session + median["copies_seconds"])}
    for kind in ("foreach", "fused"):
        theirs = median[f"gpt_torch_{kind}_step_seconds"]
        ratios[f"torch_{kind}_to_ballast"] = theirs / median["gpt_ballast_step_seconds"]
    for key, ratio in ratios.items():
        print(f"{key:46} {ratio:.2f}")
    if args.json:
        write_whole(args.json, json.dumps({
            "name": "torch_client", "figures": figures,
            "info": ratios | {
                "torch": torch.__version__, "threads": torch.get_num_threads(), "gpt_elements": elements,
                "overhead_elements": args.parameters, "tensors": TENSORS, "steps": steps, "turns": turns}},
            indent=1) + "\n")


if __name__ == "__main__":
    main()
