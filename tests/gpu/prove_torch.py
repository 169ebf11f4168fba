#!/usr/bin/env python3
"""What PyTorch on a GPU shows: ballast.torch.AdamW beside torch's own ways; see run.sh --torch. Writes
DIR/torch.json, in the form of prove.py's gpu.json, and torch-logs.tar.gz beside it.

A line of the benchmark is one training run in a process of its own (torch_training.py). Its "exposed_seconds" are
what a step takes beyond the passes of the run with the optimizer on the GPU; "gpu_memory_bytes" is torch's own peak;
"saved_per_parameter" is what that run's peak is more, beside ORDINARY_BYTES_PER_PARAMETER, which a trainer in bf16
ordinarily holds: 4 of fp32 weights, 8 of moments, 4 of gradients, 2 of bf16 weights. A run counts only if it was what
its name says; losses of all ways agree within the rounding of bf16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import signal
import statistics
import sys
import time

from checks import NO_GPU, Checks, LeftOut, clear, slug
from programs import ROOT, Failed, OutOfTime, Programs, find_tool, last_line

HERE = pathlib.Path(__file__).resolve().parent
# In seconds, as planned for an H200 with 16 cores: capabilities 10, tiny models 6 x 10, the sanitizer 45, 124M 6 x 20,
# 1.5B 4 x 55; the last two, FSDP2 with 1.5B, if there is time.
BUDGET_SECONDS = 465
MODELS = {  # Of the steps the first UNMEASURED_STEPS are not measured.
    "tiny": dict(batch=4, steps=4, seconds=150, least_seconds=1),
    "gpt2-124M": dict(batch=16, steps=7, seconds=120, least_seconds=15),
    "gpt2-1.5B": dict(batch=8, steps=5, seconds=200, least_seconds=40),
}
UNMEASURED_STEPS = 2
MAX_NORM = 1.0  # Below the norms of a fresh model: every way clips.
# Of a loss: the rounding of bf16, in which all ways compute.
LOSS_TOLERANCE = 2 ** -8
ORDINARY_BYTES_PER_PARAMETER = 18
ON_GPU = "AdamW on the GPU"
OFFLOAD = "CPU offload"


def ways_of(capabilities: dict) -> dict[str, list[str]]:
    """The cheapest and most telling first. Hooks are an axis only where the package has a switch for them."""
    def ballast(name: str, *flags: str) -> dict[str, list[str]]:
        hooks = {"": []}
        if capabilities.get("overlap"):
            hooks = {f", hooks {value}": [f"--overlap={value}"] for value in ("on", "off")}
        return {name + which: ["--way=ballast", *flags, *switch] for which, switch in hooks.items()}

    return {ON_GPU: ["--way=gpu"], **ballast("ballast"), OFFLOAD: ["--way=offload"],
            **ballast("ballast with FSDP2", "--fsdp2")}


class TorchProof(Checks):
    def __init__(self, programs: Programs, file: pathlib.Path, deadline: float, only: str, device: str,
                 models: list[str], trainer: pathlib.Path, python: str):
        super().__init__(file, deadline, only)
        self.programs = programs
        self.device = device
        self.models = models
        self.command = [python, "-B", trainer]
        self.capabilities = {}
        self.environment = {}
        self.longest = {}
        self.results = {}  # By model and way.

    # ------------------------------------------------------------ what there is

    def look(self) -> str | None:
        """Why nothing can be tested, or None."""
        package = self.package()
        done = self.programs.run("capabilities", [*self.command, "--capabilities"], 150, **self.environment)
        if done.returncode != 0:
            return f"PyTorch cannot be used: {last_line(done.stdout)}"
        self.capabilities = json.loads(last_line(done.stdout))
        if self.device == "cuda" and not self.capabilities["cuda"]:
            return "there is no GPU that PyTorch sees"
        self.gpu = self.capabilities
        self.check("package", lambda: self.package_is(package), always=True)
        return None

    def package(self) -> str:
        """Makes ballast.torch importable: the bundle's wheel, or this tree's sources. Which, or why not."""
        wheels = sorted(ROOT.glob("wheel/ballast*.whl"))
        if not wheels:
            source = ROOT / "client/python"
            if not (source / "ballast").is_dir():
                return "there is no wheel"
            self.environment = dict(PYTHONPATH=str(source),
                                    BALLAST_BIN_DIR=str(self.programs.path("ballastd").parent))
            return "the sources"
        folder = self.programs.logs.parent / "torch-package"
        done = self.programs.run("pip", [self.command[0], "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
                                         "--disable-pip-version-check", "--target", folder, wheels[-1]], 90)
        if done.returncode != 0:
            return f"{wheels[-1].name} cannot be installed: {last_line(done.stdout)}"
        self.environment = dict(PYTHONPATH=str(folder))
        return wheels[-1].name

    def package_is(self, package: str) -> str:
        if "ballast" in self.capabilities:
            return f"{package}, torch {self.capabilities['torch']}, Python {self.capabilities['python']}"
        why = self.capabilities.get("no_ballast", "")
        if package == "there is no wheel":
            raise LeftOut(f"{package} in the bundle")
        raise Failed(f"{package}: {why}")

    # ------------------------------------------------------------ training

    def train(self, model: str, way: str) -> dict:
        flags = ways_of(self.capabilities)[way]
        if "--way=ballast" in flags and "ballast" not in self.capabilities:
            raise LeftOut("there is no ballast.torch")
        shape = MODELS[model]
        name = f"{model}-{slug(way)}"
        done = self.programs.run(name, [
            *self.command, *flags, f"--model={model}", f"--device={self.device}", f"--steps={shape['steps']}",
            f"--batch={shape['batch']}", f"--max-norm={MAX_NORM}"], shape["seconds"], **self.environment)
        if done.returncode != 0:
            raise Failed(f"{name}: {last_line(done.stdout)}")
        return self.in_force(way, model, flags, json.loads(last_line(done.stdout)))

    def in_force(self, way: str, model: str, flags: list[str], result: dict) -> dict:
        """`result`, if it is of a run that did what `way` says."""
        def expect(right: bool, fault: str):
            if not right:
                raise Failed(f"{way}: {fault}")

        shape = MODELS[model]
        ran = result.get("way")
        expect(f"--way={ran}" in flags, f"it was a run of {ran}")
        expect(result.get("fsdp2") == (ran != "ballast" or "--fsdp2" in flags),
               f"parameters were {'' if result.get('fsdp2') else 'not '}sharded by FSDP2")
        expect(result.get("model") == model, f"it trained {result.get('model')}")
        if model != "tiny":
            expect(result.get("made_by") == "transformers", f"the model was made by {result.get('made_by')}")
        for key in ("losses", "seconds", "passes", "clips"):
            expect(len(result.get(key, [])) == shape["steps"],
                   f"it told {key} of {len(result.get(key, []))} of {shape['steps']} steps")
        expect(all(map(math.isfinite, result["losses"])), "a loss is not finite")
        expect(min(result["clips"]) < 1, "nothing was clipped")
        asked = next((flag.split("=")[1] for flag in flags if flag.startswith("--overlap=")), None)
        if asked is not None:
            expect(result.get("overlap") == asked, f"hooks were {result.get('overlap')}")
        if self.device == "cuda":
            expect(result.get("gpu_memory_bytes", 0) > 0, "it does not tell its GPU memory")
        return result

    def same_losses(self, model: str, way: str, result: dict) -> float:
        """The largest difference from the first way of the model."""
        first, reference = next(((w, r) for (m, w), r in self.results.items() if m == model), (way, result))
        worst = max(abs(a - b) / b for a, b in zip(result["losses"], reference["losses"]))
        if not worst <= LOSS_TOLERANCE:
            raise Failed(f"losses differ from {first} by {worst:.2%}, {LOSS_TOLERANCE:.2%} is bf16's rounding")
        return worst

    def measure(self, model: str, way: str) -> str:
        shape = MODELS[model]
        self.expect_time(1.2 * self.longest.get(model, shape["least_seconds"]))
        begun = time.monotonic()
        result = self.train(model, way)
        self.longest[model] = max(self.longest.get(model, 0), time.monotonic() - begun)
        line = self.line(model, way, result)
        worst = self.same_losses(model, way, result)  # What trains something else is not measured.
        self.results[model, way] = result
        self.benchmark.append(line)
        parts = [f"{line['tokens_per_second']:.0f} tokens/s", f"losses differ by {worst:.3%} at most"]
        if line["exposed_of_step"] is not None:
            parts.append(f"{line['exposed_of_step']:.1%} of a step exposed")
        if line["gpu_memory_bytes"] is not None:
            parts.append(f"{line['gpu_memory_bytes'] / 2 ** 30:.1f} GiB")
        return ", ".join(parts)

    def line(self, model: str, way: str, result: dict) -> dict:
        on_gpu = result if way == ON_GPU else self.results.get((model, ON_GPU))
        seconds = statistics.median(result["seconds"][UNMEASURED_STEPS:])
        passes = statistics.median(on_gpu["passes"][UNMEASURED_STEPS:]) if on_gpu else None
        memory, ordinary = result.get("gpu_memory_bytes"), on_gpu and on_gpu.get("gpu_memory_bytes")
        exposed = None if passes is None else max(seconds - passes, 0)
        return dict(
            model=model, way=way, tokens_per_second=result["tokens"] / seconds, step_seconds=seconds,
            passes_seconds=passes, exposed_seconds=exposed,
            exposed_of_step=None if exposed is None else exposed / seconds,
            of_gpu=statistics.median(on_gpu["seconds"][UNMEASURED_STEPS:]) / seconds if on_gpu else None,
            gpu_memory_bytes=memory, gpu_memory_reserved_bytes=result.get("gpu_memory_reserved_bytes"),
            gpu_memory_per_parameter=memory / result["parameters"] if memory else None,
            saved_per_parameter=(ordinary - memory) / result["parameters"] if memory and ordinary else None,
            ordinary_bytes_per_parameter=ORDINARY_BYTES_PER_PARAMETER, hooks=result.get("overlap"),
            parameters=result["parameters"], losses=result["losses"])

    def sanitizer(self) -> str:
        """Pins, hooks, host functions and streams of the tiny model."""
        if "ballast" not in self.capabilities:
            raise LeftOut("there is no ballast.torch")
        program = find_tool("compute-sanitizer")
        if program is None:
            raise LeftOut("there is no compute-sanitizer")
        self.expect_time(20)
        flags = next(flags for way, flags in ways_of(self.capabilities).items() if way.startswith("ballast"))
        done = self.programs.run("memcheck", [
            program, "--tool=memcheck", "--error-exitcode=1", *self.command, *flags, "--model=tiny", "--steps=3",
            f"--device={self.device}"], 240, **self.environment)
        if "Device not supported" in done.stdout:
            raise LeftOut("compute-sanitizer cannot look into this machine's GPU")
        summary = [line.strip("= ") for line in done.stdout.splitlines() if "SUMMARY:" in line]
        if not summary:
            raise Failed(f"memcheck ended with {done.returncode} and without a summary: {last_line(done.stdout)}")
        if done.returncode != 0:
            raise Failed(f"{summary[-1]}; see memcheck.log")
        return summary[-1]

    def all(self):
        for model in self.models:
            if model == self.models[-1]:  # The longest.
                self.check("memcheck", self.sanitizer)
            for way in ways_of(self.capabilities):
                self.check(f"{'training' if model == 'tiny' else 'benchmark'} {model}, {way}",
                           lambda m=model, w=way: self.measure(m, w))


def prove(arguments) -> int:
    why = clear(arguments.out, "torch-logs", "torch-package", "torch.json", "torch-logs.tar.gz")
    if why:
        print(f"run.sh: {why}", file=sys.stderr)
        return 1
    logs = (arguments.out / "torch-logs").resolve()
    logs.mkdir()
    deadline = time.monotonic() + arguments.seconds
    programs = Programs(arguments.bin and arguments.bin.resolve(), logs, deadline)
    proof = TorchProof(programs, arguments.out / "torch.json", deadline, arguments.only, arguments.device,
                       arguments.models, arguments.trainer.resolve(), arguments.python)
    try:
        missing = proof.look()
        if missing is not None:
            print(f"run.sh: nothing was tested: {missing}", file=sys.stderr)
            return NO_GPU
        proof.all()
    except (Failed, OutOfTime) as failure:
        print(f"run.sh: {failure}", file=sys.stderr)
        return 1
    finally:
        proof.pack_logs(logs)
    return proof.verdict_of_all("run.sh")


def main() -> int:
    parser = argparse.ArgumentParser(prog="run.sh --torch", description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out/gpu")
    parser.add_argument("--only", default="", metavar="NAME", help="the checks with this in their name")
    parser.add_argument("--python", default=os.environ.get("BALLAST_TORCH_PYTHON", sys.executable),
                        help="an interpreter that has torch")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--trainer", type=pathlib.Path, default=HERE / "torch_training.py", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help=argparse.SUPPRESS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return prove(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
