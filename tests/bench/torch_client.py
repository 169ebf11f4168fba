#!/usr/bin/env python3
"""An iteration of a GPT with ballast.torch beside other optimizers, and what ballast.torch costs beside C++.

    BALLAST_BIN_DIR=build/release/bin tests/client/python/torch_environment.py --run tests/bench/torch_client.py
        [--short] [--parameters N] [--layers N] [--width N] [--vocabulary N] [--tokens N] [--rounds N] [--json FILE]

Iteration: forward, backward and step() of a GPT in fp32 and in bf16, with torch's fused and foreach AdamW, with bf16
parameters and fp32 masters by hand, with DeepSpeedCPUAdam if the environment has it, and with ballast.torch in its four
modes and with gradients that leave in backward in any case, which have to end with the same weights. Bytes: what the
process grows by with the optimizer, without parameters and gradients.

Overhead: step() with gradients that are there, for bf16 parameters in 150 tensors over shared memory, against
`ballast-bench worker`, which sends and receives as many bytes. That has its gradients where they are sent from, and
leaves the weights where they arrive; what it takes to copy both, by one thread, is measured beside it.

Hooks: backward of 150 small tensors whose gradients leave in it, and of the same tensors without an optimizer.

What is compared is measured in turns.
"""

import argparse
import json
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
from report import describe_machine  # noqa: E402
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


def cores():
    return len(os.sched_getaffinity(0))


class Masters:
    """What a trainer of bf16 parameters does by hand: torch's AdamW on fp32 copies."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True)

    def step(self):
        for master, parameter in zip(self.masters, self.parameters):
            master.grad = parameter.grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def deepspeed(parameters):
    """DeepSpeed compiles it at its first use."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    return DeepSpeedCPUAdam(parameters, adamw_mode=True)


MODES = {"ballast": {}, "ballast_overlap": {"overlap": True}, "ballast_overlap_weights": {"overlap_weights": True},
         "ballast_both": {"overlap": True, "overlap_weights": True},
         "ballast_leaves_early": {"overlap": True, "accumulation_steps": 1}}
MAKERS = {"torch_fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
          "torch_foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
          "torch_masters": lambda model: Masters(model.parameters()),
          "deepspeed": lambda model: deepspeed(model.parameters())} | {
    name: lambda model, mode=mode: ballast.torch.AdamW(model.named_parameters(), **mode)
    for name, mode in MODES.items()}
PARTS = ("forward", "backward", "step", "iteration")


class Trainer:
    """A GPT with one optimizer. bytes: that the optimizer takes in this process, for each parameter."""

    def __init__(self, name, dtype, args):
        torch.manual_seed(1)
        self.mode = MODES.get(name)
        self.model = GPT(args.vocabulary, 1024, args.layers, args.width, max(args.width // 64, 1)).to(dtype)
        # Without instructions for it a processor multiplies bf16 slowly.
        tokens = args.tokens if dtype == torch.float32 else max(args.tokens // 16, 1)
        self.tokens = torch.randint(args.vocabulary, (2, tokens), generator=torch.Generator().manual_seed(2))
        self.elements = sum(parameter.numel() for parameter in self.model.parameters())
        self.model(*self.tokens.unsqueeze(1)).backward()
        before = anonymous_bytes()
        self.optimizer = MAKERS[name](self.model)
        self.optimizer.step()
        self.bytes = (anonymous_bytes() - before) / self.elements
        self.optimizer.zero_grad()

    def iteration(self):
        begin = time.perf_counter()
        loss = self.model(*self.tokens.unsqueeze(1))
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.check("left", "overlap")
        step = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        self.check("coming", "overlap_weights")
        zero = time.perf_counter()
        self.optimizer.zero_grad()
        parts = {"forward": forward - begin, "backward": backward - forward, "step": end - step}
        return parts | {"iteration": sum(parts.values()) + time.perf_counter() - zero}

    def check(self, what, option):
        """That gradients have left, or weights are still coming, if the optimizer says so, and only then."""
        if self.mode is None:
            return
        binding = self.optimizer._binding
        found = {"left": binding.stream and binding.stream.left,
                 "coming": binding.returning and binding.returning.coming}[what]
        if bool(found) != getattr(self.optimizer, option):
            raise RuntimeError(f"{option} was not in force as asked for: {self.mode}")

    def turn(self, iterations):
        """The first of them is not counted: it begins with all weights there."""
        measured = [self.iteration() for _ in range(iterations + 1)][1:]
        if self.mode is not None:
            self.optimizer.wait_for_weights()
        return measured

    def in_force(self):
        if self.mode is None:
            return "in the trainer"
        if not self.optimizer._binding.session.shares_memory:
            raise RuntimeError("the gradients did not go through shared memory")
        if (self.optimizer.overlap_weights != self.mode.get("overlap_weights", False) or
                self.optimizer.overlap != ("accumulation_steps" in self.mode or
                                           "overlap" in self.mode and torch.get_num_threads() < cores())):
            raise RuntimeError(f"another mode was in force than {self.mode}")
        leave = "gradients leave in " + ("backward" if self.optimizer.overlap else "step()")
        come = "weights come in " + ("forward" if self.optimizer.overlap_weights else "step()")
        return f"shared memory, {leave}, {come}"


def iterations(dtype, args, steps, turns, seconds, info):
    """Adds to both. The rows of one dtype are measured in turns."""
    of_dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    trainers = {}
    for name in MAKERS:
        if name == "torch_masters" and dtype == torch.float32:
            continue
        try:
            trainers[f"{of_dtype}_{name}"] = Trainer(name, dtype, args)
        except Exception as error:
            if name != "deepspeed":
                raise
            why = str(error) or type(error).__name__
            info["not_measured"][f"{of_dtype}_{name}"] = f"DeepSpeed {why.splitlines()[0]}; pip install deepspeed"
    for trainer in trainers.values():
        trainer.turn(2)
    for _ in range(turns):
        for name, trainer in trainers.items():
            for measured in trainer.turn(steps):
                for part in PARTS:
                    seconds.setdefault(f"{name}_{part}_seconds", []).append(measured[part])
    for name, trainer in trainers.items():
        info["in_force"][name] = trainer.in_force()
        info["bytes_per_parameter"][name] = trainer.bytes
    info["gpt_elements"] = trainers[f"{of_dtype}_torch_fused"].elements
    ours = [trainer for trainer in trainers.values() if trainer.mode is not None]
    for other in ours[1:]:
        if not all(map(torch.equal, ours[0].model.parameters(), other.model.parameters())):
            raise RuntimeError(f"with {other.mode} the weights are others than without")
    for trainer in ours:
        trainer.optimizer.close()


def table(figures, info):
    """By row: milliseconds, and how many times torch's fused AdamW."""
    print(f"\n{info['machine']['cpu']}, {info['machine']['cores']} cores; torch {info['torch']}, "
          f"{info['threads']} threads; a GPT of {info['gpt_elements'] / 1e6:.0f}M parameters, {info['tokens']} tokens, "
          "in bf16 a sixteenth")
    print(f"{'ms (times fused)':30}" + "".join(f"{part:>18}" for part in PARTS))
    for name, force in info["in_force"].items():
        cells, fused = "", f"{name.partition('_')[0]}_torch_fused"
        for part in PARTS:
            ours, theirs = (figures[f"{row}_{part}_seconds"]["median"] for row in (name, fused))
            cells += f"{ours * 1e3:10.1f} ({ours / theirs:5.2f})"
        print(f"{name:30}{cells}  {force}; {info['bytes_per_parameter'][name]:.1f} bytes a parameter here")
    for name, why in info["not_measured"].items():
        print(f"{name:30} not measured: {why}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="few rounds")
    parser.add_argument("--parameters", type=positive, default=100_000_000)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=768)
    parser.add_argument("--vocabulary", type=positive, default=16384)
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--rounds", type=positive)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    steps, turns = (args.rounds or (4 if args.short else 6)), (2 if args.short else 5)

    info = {"machine": describe_machine(), "torch": torch.__version__, "threads": torch.get_num_threads(),
            "tokens": args.tokens, "overhead_elements": args.parameters, "tensors": TENSORS, "steps": steps,
            "turns": turns, "in_force": {}, "not_measured": {}, "bytes_per_parameter": {}}
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        iterations(dtype, args, steps, turns, seconds, info)
    seconds |= overhead(args.parameters, steps, turns) | hooks(steps, turns)
    figures = {key: {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "unit": "s"}
               for key, samples in seconds.items()}
    hook = (figures["backward_with_hooks_seconds"]["median"] -
            figures["backward_without_hooks_seconds"]["median"]) / TENSORS * 1e6
    figures["hook_us_per_parameter"] = {"median": hook, "min": hook, "max": hook, "unit": "us"}
    in_table = {f"{name}_{part}_seconds" for name in info["in_force"] for part in PARTS}
    for key, figure in figures.items():
        if key in in_table:
            continue
        print(f"{key:46} {figure['median']:.4f} ({figure['min']:.4f} to {figure['max']:.4f}) {figure['unit']}")
    median = {key: figure["median"] for key, figure in figures.items()}
    session = median["session_step_seconds"]
    info |= {"client_to_session": median["client_step_seconds"] / session,
             "client_to_session_and_copies": median["client_step_seconds"] / (session + median["copies_seconds"])}
    for key in ("client_to_session", "client_to_session_and_copies"):
        print(f"{key:46} {info[key]:.2f}")
    table(figures, info)
    if args.json:
        write_whole(args.json, json.dumps({"name": "torch_client", "figures": figures, "info": info}, indent=1) + "\n")


if __name__ == "__main__":
    main()
