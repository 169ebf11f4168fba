#!/usr/bin/env python3
"""Everything that only a GPU can show; see run.sh. Writes DIR/gpu.json:

    {"passed": true, "complete": true, "seconds": 431, "gpu": {...}, "host": {...},
     "checks": [...], "benchmark": [...]}

A check is {"name", "outcome", "seconds", "detail"}; its outcome is "passed", "failed", "left out" (the
machine has not what it takes) or "out of time". "passed": none failed; "complete": each was made. A
line of the benchmark is one training run; "of_local" is its rate as a share of the local optimizer's
in this same run. A run counts only if transport and mode were those of its name: its worker.json says
what was in force.

Beside gpu.json there are logs.tar.gz, with all that the programs wrote, and the timelines
trace-*.json.gz.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pathlib
import re
import signal
import statistics
import sys
import time

from checks import NO_GPU, Checks, LeftOut, clear, slug
from programs import ROOT, Failed, GpuMemory, OutOfTime, Programs, cores, find_tool, last_line

# What matters most comes first. Of the eight minutes, in seconds, as planned for an H200 with 16
# cores: tests 40, small trainings 55, 124M 5 x 12, 1.5B 5 x 50, both sanitizers at once 60.
BUDGET_SECONDS = 465
KERNELS = "*Kernels*:*Mma*"
TESTS = {  # In processes of their own: a kernel that goes wrong takes all after it with it.
    "kernels": KERNELS,
    "matrix products": "*CublasLtMatmul*",
    "model gradients": "*DeviceGpt*",
    "device and collectives": f"*-{KERNELS}:*CublasLtMatmul*:*DeviceGpt*:*Nccl*",
    "NCCL": "*Nccl*",
}
SANITIZERS = ("memcheck", "racecheck")

# Of a training that only shows that two ways agree: small enough to take seconds.
SMALL = ["--layers=2", "--width=256", "--heads=4", "--context=128", "--steps=6", "--micro-steps=2",
         "--batch=8", "--bucket-elements=65536", "--chunk-elements=16384"]
# Two ranks add the same numbers in another order, and round weights to bf16 after each step.
RANKS_TOLERANCE = 0.01

MODELS = {  # Of the steps the first UNMEASURED_STEPS are not measured.
    "gpt2-124M": dict(layers=12, width=768, context=1024, batch=32, micro_steps=4, steps=10,
                      least_seconds=10),
    "gpt2-1.5B": dict(layers=48, width=1600, context=1024, batch=8, micro_steps=8, steps=5,
                      least_seconds=30),
}
VOCABULARY = 50304
# Bytes on the GPU for each parameter, besides activations: fp32 weights 4, moments 8, gradients 4, bf16 weights 2; and
# what --optimizer=local has with --accumulate=worker, which reads gradients as they would travel, in bf16: 2 more.
ORDINARY_BYTES_PER_PARAMETER = 18
LOCAL_BYTES_PER_PARAMETER = 20
UNMEASURED_STEPS = 2
WAYS = {  # The two most telling are measured first, for every model.
    "local": ["--optimizer=local"],
    "speculate, shared memory": ["--update=speculate"],
    "wait, shared memory": ["--update=wait"],
    "speculate, TCP": ["--update=speculate", "--shared-memory=never"],
    "wait, TCP": ["--update=wait", "--shared-memory=never"],
}
FIRST_WAYS = list(WAYS)[:2]
TRACED_WAYS = [way for way in WAYS if "shared memory" in way]
# The norm of a fresh model's gradient is 4 to 14. Speculation is right while nothing is clipped, and
# pauses after it was wrong: with a norm of 1 every run would wait, whatever its name.
NEVER_CLIPS = "--max-norm=1e30"
ALWAYS_CLIPS = "--max-norm=0.01"


def operations_per_token(layers: int, width: int, context: int) -> float:
    """Multiplications and additions of forward and backward: each weight of a matrix takes part in
    three products; attention's two take half of the context, since it is causal."""
    matrices = 2 * (12 * layers * width * width + VOCABULARY * width)
    attention = layers * 2 * 2 * width * (context + 1) / 2
    return 3 * (matrices + attention)


class Proof(Checks):
    def __init__(self, programs: Programs, file: pathlib.Path, deadline: float, only: str = ""):
        super().__init__(file, deadline, only)
        self.programs = programs
        self.longest = {}  # Training of each model, in seconds.
        self.sanitizers = {}

    # ------------------------------------------------------------ what there is

    def find_gpu(self) -> str | None:
        """Why there is no GPU. If there is one it is known then, and its rate if that can be had."""
        done = self.programs.run("gpu-rate", [self.programs.path("ballast-gpu-rate")], 120)
        if done.returncode == NO_GPU:
            return last_line(done.stdout).removeprefix("ballast-gpu-rate: ")
        self.check("matrix rate", lambda: self.matrix_rate(done), always=True)
        return None

    def matrix_rate(self, done) -> str:
        if done.returncode != 0:
            raise Failed(last_line(done.stdout))
        self.gpu = json.loads(last_line(done.stdout))
        return f"{self.gpu['gpu']}, {self.gpu['bf16_matrix_flops_per_second'] / 1e12:.0f} TFLOP/s in bf16"

    # ------------------------------------------------------------ tests

    def report_of(self, name: str) -> pathlib.Path:
        return self.programs.logs / f"{name.replace(' ', '-')}.json"

    def tests(self, name: str, tests: str) -> list:
        return [self.programs.path("gpu_tests"), f"--gtest_filter={tests}",
                f"--gtest_output=json:{self.report_of(name)}"]

    def verdict(self, name: str, code: int, output: str) -> str:
        """Of tests that have ended: that there are some, and all ran and passed."""
        report = self.report_of(name)
        if not report.exists():
            raise Failed(f"gpu_tests ended with {code} and without a report: {last_line(output)}")
        cases = [case for suite in json.loads(report.read_text())["testsuites"]
                 for case in suite["testsuite"]]
        failed = [case for case in cases if case.get("failures")]
        if failed:
            names = ", ".join(f"{case['classname']}.{case['name']}" for case in failed[:5])
            why = " ".join(failed[0]["failures"][0]["failure"].split())[:400]
            raise Failed(f"{len(failed)} of {len(cases)} failed: {names}; the first: {why}")
        if code != 0:
            raise Failed(f"gpu_tests ended with {code}: {last_line(output)}")
        skipped = sum(case.get("result") != "COMPLETED" for case in cases)
        if skipped or not cases:  # On a GPU none has a reason to.
            why = re.search(r": Skipped\n(.*)", output)
            raise Failed(f"not tested: {skipped} of {len(cases)} tests skipped"
                         + (f": {why.group(1)}" if why else ""))
        return f"{len(cases)} tests"

    def gpu_tests(self, name: str) -> str:
        done = self.programs.run(f"gpu_tests-{name.replace(' ', '-')}", self.tests(name, TESTS[name]), 150)
        return self.verdict(name, done.returncode, done.stdout)

    def start_sanitizers(self):
        """All at once: they wait for the processor, not for the GPU."""
        program = find_tool("compute-sanitizer")
        if program is None:
            raise LeftOut("there is no compute-sanitizer")
        for tool in SANITIZERS:
            if self.only in tool and tool not in self.sanitizers:
                self.sanitizers[tool] = self.programs.start(
                    tool, [program, "--tool", tool, "--error-exitcode=1", *self.tests(tool, KERNELS)])

    def sanitizer(self, tool: str) -> str:
        self.start_sanitizers()
        code = self.sanitizers[tool].wait(240)
        output = self.sanitizers[tool].output()
        if "Device not supported" in output:
            raise LeftOut("compute-sanitizer cannot look into this machine's GPU")
        summary = [line.strip("= ") for line in output.splitlines() if "SUMMARY:" in line]
        if not summary:
            raise Failed(f"{tool} ended with {code} and without a summary: {last_line(output)}")
        try:
            tests = self.verdict(tool, code, output)
        except Failed as failure:
            raise Failed(f"{summary[-1]}; {failure}; see {tool}.log") from None
        return f"{summary[-1]}; {tests}"

    # ------------------------------------------------------------ training

    def train(self, name: str, flags: list, seconds: float, **more) -> dict:
        """With the optimizer of the flags, and a service for it where it is not local."""
        if "--optimizer=local" in flags:
            return self.programs.train(name, flags, seconds, **more)
        with self.programs.service(f"{name}-service") as address:
            return self.programs.train(name, [*flags, f"--service={address}"], seconds, **more)

    def in_force(self, way: str, result: dict, clips=False) -> dict:
        """`result`, if it is of a run that did what `way` says; clips: every step was to be clipped."""
        def expect(right: bool, fault: str):
            if not right:
                raise Failed(f"{way}: {fault}")

        clipped = sum(row["clip"] < 1 for row in result["rows"])
        steps = len(result["rows"])
        expect(steps > 0, "no step was written down")
        expect(clipped == (steps if clips else 0), f"{clipped} of {steps} steps were clipped")
        if way == "local":
            expect("transport" not in result, f"it went through {result.get('transport')}")
            return result
        missing = [key for key in ("transport", "speculated_chunks", "redone_chunks") if key not in result]
        expect(not missing, f"worker.json does not say {', '.join(missing)}")
        transport = "shared memory" if "shared memory" in way else "the connection"
        expect(result["transport"] == transport, f"it went through {result['transport']}")
        if "speculate" in way:
            expect(result["speculated_chunks"] > 0, "nothing was speculated")
            redone = result["redone_chunks"]
            expect(redone > 0 if clips else redone == 0, f"{redone} chunks were updated again")
        else:
            expect(result["speculated_chunks"] == 0, f"{result['speculated_chunks']} chunks were speculated")
        return result

    def service_equals_local(self, name: str, norm: str) -> str:
        clips = norm == ALWAYS_CLIPS
        small = [*SMALL, norm]
        local = self.train(f"{name}-local", small + WAYS["local"], 60)
        wanted = self.in_force("local", local, clips)["weights_sha256"]
        wrong = []
        for way, flags in WAYS.items():
            if way == "local":
                continue
            try:
                result = self.in_force(way, self.train(f"{name}-{slug(way)}", small + flags, 60), clips)
            except Failed as failure:  # One way's, and the others are still worth knowing.
                wrong.append(str(failure) if str(failure).startswith(way) else f"{way}: {failure}")
                continue
            except OutOfTime:
                if not wrong:
                    raise
                break
            if result["weights_sha256"] != wanted:
                wrong.append(f"{way}: other weights than the local optimizer's")
        if wrong:
            raise Failed("; ".join(wrong))
        return f"the same weights to the bit in {len(WAYS)} runs"

    def two_ranks_on_one_gpu(self) -> str:
        one = self.train("one-rank", [*SMALL, NEVER_CLIPS, "--optimizer=local"], 60)
        two = self.train("two-ranks", [*SMALL, NEVER_CLIPS, "--optimizer=local", "--collective=gloo"], 60,
                         ranks=2)
        worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(two["rows"], one["rows"]))
        if len(two["rows"]) != len(one["rows"]) or not worst <= RANKS_TOLERANCE:
            raise Failed(f"losses differ by {worst:.2%}, {RANKS_TOLERANCE:.0%} is allowed")
        return f"losses differ by {worst:.3%} at most"

    def muon(self) -> str:
        """Newton-Schulz on the GPU, in bf16, and by the service, in fp32: the same curve. The GPU's bits are its own."""
        small = [*SMALL, NEVER_CLIPS, "--optimizer-rule=muon"]
        ways = {"service": ["--newton-schulz=service"], "GPU": [], "GPU, TCP": ["--shared-memory=never"],
                "two ranks": ["--collective=gloo"]}
        results = {}
        for way, flags in ways.items():
            result = self.train(f"muon-{slug(way)}", small + flags, 60, ranks=2 if way == "two ranks" else 1)
            maker = "service" if way == "service" else "workers"
            if (result.get("rule"), result.get("newton_schulz")) != ("muon", maker):
                raise Failed(f"{way}: {result.get('rule')} with Newton-Schulz by {result.get('newton_schulz')}")
            results[way] = result
        if results["GPU"]["weights_sha256"] != results["GPU, TCP"]["weights_sha256"]:
            raise Failed("over TCP the weights are others than over shared memory")
        losses = [row["loss"] for row in results["service"]["rows"]]
        worst = max(abs(row["loss"] - loss) / loss
                    for way in ways for row, loss in zip(results[way]["rows"], losses, strict=True))
        if not worst <= RANKS_TOLERANCE:
            raise Failed(f"losses differ by {worst:.2%}, {RANKS_TOLERANCE:.0%} is allowed")
        return f"losses differ by {worst:.3%} at most; the GPU's weights have the same bits over TCP"

    def muons_cost(self) -> str:
        """Of a step of Muon on the GPU, beside the same step of AdamW."""
        model, way = "gpt2-124M", "speculate, shared memory"
        adam = next((line for line in self.benchmark if (line["model"], line["way"]) == (model, way)), None)
        if adam is None:
            raise LeftOut(f"there is no run of {model}, {way}")
        shape = MODELS[model]
        self.expect_time(1.2 * shape["least_seconds"])
        result = self.train("muon-124M", [
            f"--model={model}", f"--batch={shape['batch']}", f"--micro-steps={shape['micro_steps']}",
            f"--steps={shape['steps']}", "--accumulate=worker", "--bucket-elements=8388608", f"--threads={cores()}",
            NEVER_CLIPS, "--optimizer-rule=muon", *WAYS[way]], 150)
        if result.get("newton_schulz") != "workers":
            raise Failed(f"Newton-Schulz by {result.get('newton_schulz')}")
        rows = result["rows"][UNMEASURED_STEPS:]
        seconds, update = (statistics.median(row[name] for row in rows) for name in ("seconds", "update"))
        return (f"{1e3 * seconds:.1f} ms a step, {1e3 * update:.1f} of them in updates and the second round; AdamW "
                f"{1e3 * adam['step_seconds']:.1f}")

    # ------------------------------------------------------------ benchmark

    def measure(self, model: str, way: str) -> str:
        shape = MODELS[model]
        expected = 1.2 * self.longest.get(model, shape["least_seconds"])
        self.expect_time(expected)
        flags = [f"--model={model}", f"--batch={shape['batch']}", f"--micro-steps={shape['micro_steps']}",
                 f"--steps={shape['steps']}", "--accumulate=worker", "--bucket-elements=8388608",
                 f"--threads={cores()}", NEVER_CLIPS, *WAYS[way]]
        begun = time.monotonic()
        with GpuMemory(self.gpu.get("uuid", "0")) as memory:
            result = self.in_force(way, self.train(f"{model}-{slug(way)}", flags, 150))
        self.longest[model] = max(self.longest.get(model, 0), time.monotonic() - begun)
        line = self.line(model, way, result, memory.bytes)
        self.benchmark.append(line)
        first = next(other for other in self.benchmark if other["model"] == model)
        if line["weights_sha256"] != first["weights_sha256"]:
            raise Failed(f"it ended with other weights than {first['way']}")
        parts = [f"{line['tokens_per_second']:.0f} tokens/s"]
        if line["of_matrix_rate"] is not None:
            parts.append(f"{line['of_matrix_rate']:.1%} of the matrix rate")
        if line["of_local"] is not None:
            parts.append(f"{line['of_local']:.3f} of local")
        return ", ".join([*parts, f"{line['exposed_of_step']:.1%} of a step exposed"])

    def line(self, model: str, way: str, result: dict, gpu_bytes: int | None) -> dict:
        shape = MODELS[model]
        local = next((line for line in self.benchmark
                      if line["model"] == model and line["way"] == "local"), None)
        rows = result["rows"][UNMEASURED_STEPS:]
        tokens = statistics.median(row["tokens_per_second"] for row in rows)
        exposed = statistics.median(
            row["reduce"] + row["send"] + row["update"] + row["receive"] for row in rows)
        seconds = statistics.median(row["seconds"] for row in rows)
        operations = tokens * operations_per_token(shape["layers"], shape["width"], shape["context"])
        matrix_rate = self.gpu.get("bf16_matrix_flops_per_second")
        saved = ((local["gpu_memory_bytes"] - gpu_bytes) / result["parameters"]
                 if local and gpu_bytes and local["gpu_memory_bytes"] else None)
        return dict(
            model=model, way=way, tokens_per_second=tokens, step_seconds=seconds,
            compute_seconds=statistics.median(row["compute"] for row in rows),
            exposed_seconds=exposed, exposed_of_step=exposed / seconds,
            of_matrix_rate=operations / matrix_rate if matrix_rate else None,
            of_local=(1.0 if way == "local" else
                      tokens / local["tokens_per_second"] if local else None),
            gpu_memory_bytes=gpu_bytes,
            gpu_memory_saved_per_parameter=saved,
            # The measured run with the optimizer here holds a little more than a trainer in bf16 ordinarily does.
            saved_of_ordinary_per_parameter=(
                None if saved is None else saved - (LOCAL_BYTES_PER_PARAMETER - ORDINARY_BYTES_PER_PARAMETER)),
            ordinary_bytes_per_parameter=ORDINARY_BYTES_PER_PARAMETER,
            transport=result.get("transport"), parameters=result["parameters"],
            weights_sha256=result["weights_sha256"])

    def all(self):
        for name in TESTS:
            self.check(name, lambda n=name: self.gpu_tests(n))
        self.check("service equals local", lambda: self.service_equals_local("small", NEVER_CLIPS))
        self.check("service equals local when clipped",
                   lambda: self.service_equals_local("clipped", ALWAYS_CLIPS))
        self.check("two ranks on one GPU", self.two_ranks_on_one_gpu)
        self.check("Muon", self.muon)
        for ways in (FIRST_WAYS, [way for way in WAYS if way not in FIRST_WAYS]):
            for model in MODELS:
                for way in ways:
                    self.check(f"benchmark {model}, {way}", lambda m=model, w=way: self.measure(m, w))
        self.check("what Muon costs", self.muons_cost)
        for way in TRACED_WAYS:
            self.check(f"timeline, {way}", lambda w=way: self.timeline(w))
        for tool in SANITIZERS:
            self.check(tool, lambda t=tool: self.sanitizer(t))

    def timeline(self, way: str) -> str:
        """Of a short run of its own: what is measured has no timeline to write."""
        name = f"timeline-{slug(way)}"
        file = self.programs.logs / f"{name}.json"
        shape = MODELS["gpt2-124M"]
        self.in_force(way, self.train(name, [
            "--model=gpt2-124M", f"--batch={shape['batch']}", "--micro-steps=2", "--steps=3",
            "--accumulate=worker", "--bucket-elements=8388608", f"--threads={cores()}", NEVER_CLIPS,
            f"--trace={file}", *WAYS[way]], 60))
        if not file.exists():
            raise Failed("the worker wrote no timeline")
        packed = self.file.parent / f"trace-{slug(way)}.json.gz"
        packed.write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
        return packed.name

    def end(self):
        for running in self.sanitizers.values():
            running.end()


def prove(arguments) -> int:
    why = clear(arguments.out, "logs", "gpu.json", "logs.tar.gz", "trace-*.json.gz")
    if why:
        print(f"run.sh: {why}", file=sys.stderr)
        return 1
    logs = arguments.out / "logs"
    logs.mkdir()
    deadline = time.monotonic() + arguments.seconds
    programs = Programs(arguments.bin and arguments.bin.resolve(), logs.resolve(), deadline)
    if arguments.least_seconds_of_the_largest is not None:
        MODELS["gpt2-1.5B"]["least_seconds"] = arguments.least_seconds_of_the_largest
    if arguments.memory_limit:
        programs.service_flags.append(f"--memory-limit={arguments.memory_limit}")
    proof = Proof(programs, arguments.out / "gpu.json", deadline, arguments.only)
    try:
        missing = proof.find_gpu()
        if missing is not None:
            print(f"run.sh: nothing was tested: {missing}", file=sys.stderr)
            return NO_GPU
        proof.all()
    except (Failed, OutOfTime) as failure:
        print(f"run.sh: {failure}", file=sys.stderr)
        return 1
    finally:
        proof.end()
        proof.pack_logs(logs)
    return proof.verdict_of_all("run.sh")


def main() -> int:
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out/gpu")
    parser.add_argument("--only", default="", metavar="NAME", help="the checks with this in their name")
    parser.add_argument("--memory-limit", metavar="SIZE", help="the service's, as ballastd has it")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--least-seconds-of-the-largest", type=float, help=argparse.SUPPRESS)
    # What is being run must not stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return prove(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
