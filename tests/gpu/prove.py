#!/usr/bin/env python3
"""Everything that only a GPU can show; see run.sh. Writes DIR/gpu.json:

    {"passed": true, "seconds": 431, "gpu": {...}, "checks": [...], "benchmark": [...]}

A check is {"name", "passed" (null: left out), "seconds", "detail"}. A line of the benchmark is one
training run; "of_local" is its rate as a share of the local optimizer's in this same run.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import threading
import time

from programs import ROOT, Failed, Programs, last_line

NO_GPU = 77
BUDGET_SECONDS = 465  # Of the eight minutes.
LEAST_OF_A_SANITIZER_SECONDS = 30
KERNEL_TESTS = "--gtest_filter=*Kernels*:*Mma*"

# Of a training that only shows that two ways agree: small enough to take seconds.
SMALL = ["--layers=2", "--width=256", "--heads=4", "--context=128", "--steps=6", "--micro-steps=2",
         "--batch=8", "--bucket-elements=65536", "--chunk-elements=16384"]
# Two ranks add the same numbers in another order, and round weights to bf16 after each step.
RANKS_TOLERANCE = 0.01

MODELS = {  # Of the steps the first UNMEASURED_STEPS are not measured.
    "gpt2-124M": dict(layers=12, width=768, context=1024, batch=32, micro_steps=4, steps=10,
                      least_seconds=20),
    "gpt2-1.5B": dict(layers=48, width=1600, context=1024, batch=8, micro_steps=8, steps=5,
                      least_seconds=60),
}
VOCABULARY = 50304
UNMEASURED_STEPS = 2
WAYS = {
    "local": ["--optimizer=local"],
    "speculate, shared memory": ["--update=speculate"],
    "wait, shared memory": ["--update=wait"],
    "speculate, TCP": ["--update=speculate", "--shared-memory=never"],
    "wait, TCP": ["--update=wait", "--shared-memory=never"],
}


def operations_per_token(layers: int, width: int, context: int) -> float:
    """Multiplications and additions of forward and backward: each weight of a matrix takes part in
    three products; attention's two take half of the context, since it is causal."""
    matrices = 2 * (12 * layers * width * width + VOCABULARY * width)
    attention = layers * 2 * 2 * width * (context + 1) / 2
    return 3 * (matrices + attention)


class GpuMemory:
    """The most that the GPU's memory was in use beyond what it was before, while this is entered."""

    def __enter__(self):
        self.before = self.used()
        self.most = self.before
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()

    def watch(self):
        while not self.stop.wait(0.25):
            self.most = max(self.most, self.used())

    @staticmethod
    def used() -> int:
        try:
            answer = subprocess.run(
                ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"],
                capture_output=True, text=True, timeout=10, check=True).stdout
            return int(answer.split()[0]) << 20
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return 0

    @property
    def bytes(self) -> int | None:
        return self.most - self.before if self.most > 0 else None


class Proof:
    def __init__(self, programs: Programs, file: pathlib.Path, budget_seconds: float):
        self.programs = programs
        self.file = file
        self.begun = time.monotonic()
        self.budget = budget_seconds
        self.gpu = {}
        self.checks = []
        self.benchmark = []

    def left(self) -> float:
        return self.budget - (time.monotonic() - self.begun)

    def check(self, name: str, what):
        """what() says in words what it saw; raises Failed; returns None if it was left out."""
        begun = time.monotonic()
        try:
            passed, detail = True, what()
        except Failed as failure:
            passed, detail = False, str(failure)
        except Exception as error:  # The other checks, and what they measure, are not lost with it.
            passed, detail = False, f"{type(error).__name__}: {error}"
        if isinstance(detail, LeftOut):
            passed, detail = None, str(detail)
        self.checks.append(dict(name=name, passed=passed, detail=detail,
                                seconds=round(time.monotonic() - begun, 1)))
        word = {True: "passed", False: "FAILED", None: "left out"}[passed]
        print(f"{word:9} {name}: {detail}", flush=True)
        self.write()

    def passed(self) -> bool:
        return all(check["passed"] is not False for check in self.checks)

    def write(self):
        """After each check, so that whatever ends this leaves what there is."""
        result = dict(passed=self.passed(), seconds=round(time.monotonic() - self.begun), gpu=self.gpu,
                      checks=self.checks, benchmark=self.benchmark)
        self.file.write_text(json.dumps(result, indent=2) + "\n")

    # ------------------------------------------------------------ what there is

    def find_gpu(self) -> str | None:
        """None, and the GPU is known; or why there is none."""
        done = self.programs.run("gpu-rate", [self.programs.path("ballast-gpu-rate")], 120)
        if done.returncode == NO_GPU:
            return last_line(done.stdout).removeprefix("ballast-gpu-rate: ")
        if done.returncode != 0:
            raise Failed(f"ballast-gpu-rate: {last_line(done.stdout)}")
        self.gpu = json.loads(last_line(done.stdout))
        print(f"on        {self.gpu['gpu']}, "
              f"{self.gpu['bf16_matrix_flops_per_second'] / 1e12:.0f} TFLOP/s in bf16 products", flush=True)
        return None

    # ------------------------------------------------------------ tests

    def gpu_tests(self) -> str:
        report = self.programs.logs / "gpu_tests.json"
        done = self.programs.run("gpu_tests", [self.programs.path("gpu_tests"),
                                               f"--gtest_output=json:{report}"], min(150, self.left()))
        if not report.exists():
            raise Failed(f"gpu_tests ended without a report: {last_line(done.stdout)}")
        cases = [case for suite in json.loads(report.read_text())["testsuites"]
                 for case in suite["testsuite"]]
        failed = [f"{case['classname']}.{case['name']}" for case in cases if case.get("failures")]
        ran = [case for case in cases if case.get("result") == "COMPLETED"]
        if failed or done.returncode != 0:
            raise Failed(f"{len(failed)} of {len(cases)} failed: {', '.join(failed[:5])}")
        if not ran:
            raise Failed("all tests were skipped")
        return f"{len(ran)} ran, {len(cases) - len(ran)} were skipped"

    def sanitizer(self, tool: str):
        program = shutil.which("compute-sanitizer") or shutil.which(
            "compute-sanitizer", path="/usr/local/cuda/bin")
        if program is None:
            return LeftOut("there is no compute-sanitizer")
        if self.left() < LEAST_OF_A_SANITIZER_SECONDS:
            return LeftOut("no time was left")
        done = self.programs.run(
            tool, [program, "--tool", tool, "--error-exitcode=1", self.programs.path("gpu_tests"),
                   KERNEL_TESTS], min(90, self.left()))
        if "Device not supported" in done.stdout:
            return LeftOut("compute-sanitizer cannot look into this machine's GPU")
        if done.returncode != 0:
            raise Failed(f"{last_line(done.stdout)}; see {tool}.log")
        return last_line(done.stdout).strip("= ")

    # ------------------------------------------------------------ training

    def train(self, name: str, flags: list, seconds: float, **more) -> dict:
        """With the optimizer that the flags say, and a service for it where it is not local."""
        seconds = min(seconds, self.left())
        if "--optimizer=local" in flags:
            return self.programs.train(name, flags, seconds, **more)
        with self.programs.service(f"{name}-service") as address:
            return self.programs.train(name, [*flags, f"--service={address}"], seconds, **more)

    def service_equals_local(self) -> str:
        results = {way: self.train(f"small-{slug(way)}", SMALL + flags, 60) for way, flags in WAYS.items()}
        wanted = results["local"]["weights_sha256"]
        other = [way for way, result in results.items() if result["weights_sha256"] != wanted]
        if other:
            raise Failed(f"other weights than the local optimizer's: {'; '.join(other)}")
        return f"the same weights to the bit in {len(results)} runs of {results['local']['steps']} steps"

    def two_ranks_on_one_gpu(self) -> str:
        one = self.train("one-rank", [*SMALL, "--optimizer=local"], 60)
        two = self.train("two-ranks", [*SMALL, "--optimizer=local", "--collective=gloo"], 60, ranks=2)
        worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(two["rows"], one["rows"]))
        if len(two["rows"]) != len(one["rows"]) or not worst <= RANKS_TOLERANCE:
            raise Failed(f"losses differ by {worst:.2%}, {RANKS_TOLERANCE:.0%} is allowed")
        return f"losses differ by {worst:.3%} at most"

    # ------------------------------------------------------------ benchmark

    def measure(self, model: str) -> str:
        shape = MODELS[model]
        flags = [f"--model={model}", f"--batch={shape['batch']}", f"--micro-steps={shape['micro_steps']}",
                 f"--steps={shape['steps']}", "--accumulate=worker", "--bucket-elements=8388608",
                 f"--threads={os.cpu_count()}"]
        lines, longest, left_out = {}, shape["least_seconds"], []
        for way, way_flags in WAYS.items():
            if self.left() < 1.3 * longest:
                left_out.append(way)
                continue
            begun = time.monotonic()
            with GpuMemory() as memory:
                result = self.train(f"{model}-{slug(way)}", flags + way_flags, 150)
            longest = max(longest, time.monotonic() - begun)
            lines[way] = self.line(model, way, shape, result, memory.bytes, lines.get("local"))
            self.benchmark.append(lines[way])
        if not lines:
            return LeftOut("no time was left")
        wrong = {line["weights_sha256"] for line in lines.values()}
        if len(wrong) > 1:
            raise Failed("the runs ended with different weights")
        said = "; ".join(f"{way}: {line['tokens_per_second']:.0f} tokens/s" for way, line in lines.items())
        return said + (f"; no time was left for {', '.join(left_out)}" if left_out else "")

    def line(self, model, way, shape, result, gpu_bytes, local) -> dict:
        rows = result["rows"][UNMEASURED_STEPS:]
        tokens = statistics.median(row["tokens_per_second"] for row in rows)
        exposed = statistics.median(
            row["reduce"] + row["send"] + row["update"] + row["receive"] for row in rows)
        seconds = statistics.median(row["seconds"] for row in rows)
        rate = tokens * operations_per_token(shape["layers"], shape["width"], shape["context"])
        return dict(
            model=model, way=way, tokens_per_second=tokens, step_seconds=seconds,
            compute_seconds=statistics.median(row["compute"] for row in rows),
            exposed_seconds=exposed, exposed_of_step=exposed / seconds,
            of_matrix_rate=rate / self.gpu["bf16_matrix_flops_per_second"],
            of_local=tokens / local["tokens_per_second"] if local else 1.0,
            gpu_memory_bytes=gpu_bytes,
            gpu_memory_saved_per_parameter=(
                (local["gpu_memory_bytes"] - gpu_bytes) / result["parameters"]
                if local and gpu_bytes and local["gpu_memory_bytes"] else None),
            transport=result.get("transport"), parameters=result["parameters"],
            weights_sha256=result["weights_sha256"])

    def all(self):
        self.check("tests on the GPU", self.gpu_tests)
        self.check("service equals local", self.service_equals_local)
        self.check("two ranks on one GPU", self.two_ranks_on_one_gpu)
        for model in MODELS:
            self.check(f"benchmark {model}", lambda m=model: self.measure(m))
        self.check("memcheck", lambda: self.sanitizer("memcheck"))
        self.check("racecheck", lambda: self.sanitizer("racecheck"))


class LeftOut(str):
    """Why a check was not made."""


def slug(way: str) -> str:
    return way.replace(",", "").replace(" ", "-")


def main() -> int:
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out/gpu")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logs = arguments.out / "logs"
    try:  # Nothing of an earlier run may pass for this one's.
        if logs.exists():
            shutil.rmtree(logs)
        logs.mkdir(parents=True)
        (arguments.out / "gpu.json").unlink(missing_ok=True)
    except OSError as error:
        print(f"run.sh: {arguments.out}: {error.strerror}; choose another --out", file=sys.stderr)
        return 1
    proof = Proof(Programs(arguments.bin and arguments.bin.resolve(), logs.resolve()),
                  arguments.out / "gpu.json", arguments.seconds)
    try:
        missing = proof.find_gpu()
        if missing is not None:
            print(f"run.sh: nothing was tested: {missing}", file=sys.stderr)
            return NO_GPU
        proof.all()
    except Failed as failure:
        print(f"run.sh: {failure}", file=sys.stderr)
        return 1
    print(f"{'passed' if proof.passed() else 'FAILED'}: {proof.file}")
    return 0 if proof.passed() else 1


if __name__ == "__main__":
    sys.exit(main())
