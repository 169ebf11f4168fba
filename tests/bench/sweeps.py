#!/usr/bin/env python3
"""Runs `ballast-bench worker` over what the benchmarks vary, and writes one file of figures.

    sweeps.py step|overlap|growth --bin DIR --out FILE [--short | --tiny]

  step     a step of 100M parameters (and of 1B where memory allows) over every transport
  overlap  exposed time against model size, at half the pace that the service can take, and against pace
  growth   step time against parameters, tensors, groups, ranks and jobs; memory per parameter

The machine drifts, so what is compared runs in turn, several rounds, and the samples of all rounds are
taken together. --tiny shows that it works, and measures nothing.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "deploy"))

from whole_file import write_whole  # noqa: E402

TRANSPORTS = ("in-process", "shared-memory", "unix", "tcp")
RUN_LIMIT_SECONDS = 300


class Failed(Exception):
    """One line for whoever started this."""


def quantile(samples: list[float], fraction: float) -> float:
    """By nearest rank."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def median(samples: list[float]) -> float:
    ordered, middle = sorted(samples), len(samples) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def figure(samples: list[float], unit: str) -> dict:
    return {"median": median(samples), "min": min(samples), "max": max(samples),
            "p99": quantile(samples, 0.99), "unit": unit, "samples": len(samples)}


def available_bytes() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def needed_bytes(options: dict) -> int:
    """Of both processes together, roughly."""
    each = 12 + 2 + 2 + 2  # State, gradient; both once more, in shared memory or in the worker's.
    each += 12 if options.get("update") == "speculate" else 0
    each += 4 if options.get("micro-steps", 1) > 1 else 0
    if options["transport"] != "shared-memory":
        each += 2 if options.get("update") == "speculate" else 0
    return options["parameters"] * options.get("jobs", 1) * each + (1 << 29)


def merged(run: dict | None, more: dict) -> dict:
    """Several runs of the same options as one: the samples together, the median total of each run in
    `round_seconds`, the rest from the last."""
    seconds = more["figures"]["total_seconds"]["median"]
    if run is None:
        return more | {"round_seconds": [seconds]}
    if run["info"]["weights_sha256"] != more["info"]["weights_sha256"]:
        raise Failed(f"two runs of {more['info']['options']} end with different weights")
    result = {"name": more["name"], "info": more["info"], "figures": dict(more["figures"]),
              "round_seconds": run["round_seconds"] + [seconds]}
    for key, new in more["figures"].items():
        if "samples" in new:
            samples = run["figures"][key]["samples"] + new["samples"]
            result["figures"][key] = figure(samples, new["unit"]) | {"samples": samples}
    return result


class Sweep:
    def __init__(self, flags):
        self.bin, self.size = pathlib.Path(flags.bin), flags.size
        self.figures: dict[str, dict] = {}
        self.info: dict = {"skipped": [], "runs": []}

    def pick(self, full, short, tiny):
        return {"full": full, "short": short, "tiny": tiny}[self.size]

    def call(self, words: list[str]) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "figures.json")
            command = [*map(str, words), "--json", path]
            try:
                done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                      text=True, timeout=RUN_LIMIT_SECONDS)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Failed(f"{' '.join(command[:-2])}: {error}") from error
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise Failed(f"{' '.join(command[:-2])} exited with {done.returncode}: {last}")
            with open(path) as file:
                return json.load(file)

    def fits(self, options: dict) -> bool:
        needed, there = needed_bytes(options), available_bytes()
        if needed < 0.9 * there:
            return True
        line = (f"{options['parameters'] / 1e6:.0f}M parameters over {options['transport']}, "
                f"{options.get('update', 'wait')}: needs about {needed / 1e9:.1f} GB, "
                f"{there / 1e9:.1f} GB are available")
        if line not in self.info["skipped"]:
            self.info["skipped"].append(line)
            print(f"skipped: {line}", flush=True)
        return False

    def worker(self, options: dict) -> dict:
        words = [self.bin / "ballast-bench", "worker"]
        for name, value in options.items():
            words += [f"--{name}", value]
        return self.call(words)

    def rounds(self, cases: dict, rounds: int, before_round=lambda: None,
               after_case=lambda key: None) -> dict[object, dict]:
        """Runs all cases in turn, `rounds` times; those that do not fit are left out."""
        results: dict = {}
        for _ in range(rounds):
            before_round()
            for key, options in cases.items():
                if self.fits(options):
                    results[key] = merged(results.get(key), self.worker(options))
                    after_case(key)
        for result in results.values():
            self.info["runs"].append({"options": result["info"]["options"],
                                      "weights_sha256": result["info"]["weights_sha256"]})
        return results

    def add(self, key: str, run: dict, name: str) -> None:
        samples = run["figures"][name]["samples"]
        self.figures[key] = figure(samples, "s")

    def steps(self, parameters: int, a_second: float) -> int:
        """As many steps as take about so long, from the size alone, so that hashes can be compared."""
        seconds = self.pick(2.5, 0.8, 0)
        return max(self.pick(10, 6, 2), min(self.pick(60, 25, 2), int(seconds * a_second / parameters)))


# ---------------------------------------------------------------- a step


class Limits:
    """What the bounds of steps are computed from, a dictionary a round: the wire, measured before its steps, and the
    passes of the update and the norm, measured between the steps of one transport and those of the next."""

    def __init__(self, sweep: Sweep):
        self.sweep = sweep
        self.rounds: list[dict[str, float]] = []
        self.last: dict[str, float] = {}

    def begin_round(self) -> None:
        wire = self.sweep.call([self.sweep.bin / "wire_bench", "--benchmark_filter=(raw|grpc)_.*_(up|down)",
                                self.sweep.pick("--short", "--short", "--tiny")])
        self.rounds.append({key: figures["median"] for key, figures in wire["figures"].items()})
        self.last = self.passes()

    def after(self, transport: str) -> None:
        """The mean of the seconds right before and right after this transport's steps."""
        now = self.passes()
        for key, speed in now.items():
            self.rounds[-1][f"{name_of(transport)}_{key}"] = 2 / (1 / self.last[key] + 1 / speed)
        self.last = now

    def passes(self) -> dict[str, float]:
        kernel = self.sweep.call([self.sweep.bin / "kernel_bench", "--only-kernel",
                                  *self.sweep.pick((), ("--short",), ("--elements", "1000000", "--rounds", "2"))])
        return {name: kernel["figures"][figure]["median"] for name, figure in
                (("update_gparam_s", "kernel_all_threads_gparam_s"), ("norm_gparam_s", "sums_gparam_s"))}


def name_of(transport: str) -> str:
    return transport.replace("-", "_")


def step_sweep(sweep: Sweep) -> None:
    sizes = {sweep.pick(100_000_000, 100_000_000, 100_000): sweep.pick(3, 2, 1)}
    if sweep.size == "full":
        sizes[1_000_000_000] = 1
    sweep.info["parameters"] = next(iter(sizes))
    for parameters, rounds in sizes.items():
        steps = sweep.pick(30, 12, 2) if rounds > 1 else sweep.pick(5, 3, 2)
        cases = {transport: {"transport": transport, "parameters": parameters, "groups": 2,
                             "tensors": 100, "steps": steps, "warmup": 2}
                 for transport in TRANSPORTS}
        limits = Limits(sweep)
        if parameters == sweep.info["parameters"]:
            results = sweep.rounds(cases, rounds, limits.begin_round, limits.after)
        else:
            results = sweep.rounds(cases, rounds)
        if parameters == sweep.info["parameters"]:
            sweep.info["rounds"] = [limit | {
                name_of(transport): run["round_seconds"][i] for transport, run in results.items()
                if len(run["round_seconds"]) == rounds} for i, limit in enumerate(limits.rounds)]
        for transport, run in results.items():
            name = f"{name_of(transport)}_{parameters // 1_000_000}m"
            sweep.add(f"step_{name}_seconds", run, "total_seconds")
            sweep.figures[f"step_{name}_cpu_s_per_gb"] = figure(
                [run["info"]["cpu_seconds_per_gb"]], "CPU-s/GB, update included")
            sweep.info[name] = {key: run["info"][key] for key in (
                "cpu_seconds_per_gb", "payload_bytes_up", "payload_bytes_down", "socket_bytes_up",
                "socket_bytes_down", "worker_memory", "service_memory", "admitted_bytes",
                "weights_sha256")} | {"steps": steps, "parts": {
                    part: run["figures"][part]["median"] for part in run["figures"]}}


# ---------------------------------------------------------------- overlap


def point(run: dict, **more) -> dict:
    options = run["info"]["options"]
    return {"transport": options["transport"], "update": options["update"], "clip": options["clip"],
            "parameters": options["parameters"], "pace": options["pace"],
            "exposed_seconds": figure(run["figures"]["exposed_seconds"]["samples"], "s"),
            "total_seconds": figure(run["figures"]["total_seconds"]["samples"], "s"),
            "stalls": {name: run["figures"][name]["median"] for name in
                       ("push_seconds", "place_seconds", "decision_seconds", "weights_seconds")},
            "redone_chunks": run["info"]["redone_chunks"],
            "speculated_chunks": run["info"]["speculated_chunks"],
            "speculation_unavailable": run["info"]["speculation_unavailable"]} | more


def capacity(sweep: Sweep, transport: str) -> float:
    """Parameters a second that the service takes when all gradients are there at once."""
    parameters = sweep.pick(100_000_000, 50_000_000, 200_000)
    run = sweep.worker({"transport": transport, "parameters": parameters, "update": "speculate",
                        "clip": "not-firing", "warmup": 2, "steps": sweep.pick(15, 6, 2)})
    return parameters / run["figures"]["total_seconds"]["median"]


def against_size(sweep: Sweep, transport: str, pace: float) -> list[dict]:
    sizes = sweep.pick((10, 25, 50, 100, 200, 400), (10, 40, 160, 400), (0.1, 0.2))
    modes = [("speculate", "not-firing"), ("wait", "none"), ("speculate", "none"), ("wait", "not-firing")]
    if transport != "shared-memory":  # Slower, and less in question.
        sizes, modes = (10, 100), modes[:2]
    if sweep.size == "short":
        modes = modes[:2]
    if transport == "shared-memory":
        sweep.info["flatness_sizes"] = [int(millions * 1e6) for millions in sizes]
    cases = {}
    for millions in sizes:
        parameters = int(millions * 1e6)
        for update, clip in modes:
            if sweep.size == "short" and millions > 160 and update == "wait":
                continue
            if (update, clip) not in modes[:2] and millions not in (10, 100, 400):
                continue  # The other two of the four show at three sizes that clipping is not what counts.
            cases[parameters, update, clip] = {
                "transport": transport, "parameters": parameters, "update": update, "clip": clip,
                "pace": pace, "warmup": 2,
                "steps": sweep.steps(parameters, 1e9 if update == "speculate" else 4e8)}
    return [point(run) for run in sweep.rounds(cases, 1).values()]


def against_pace(sweep: Sweep, transport: str, most: float) -> list[dict]:
    parameters = sweep.pick(100_000_000, 40_000_000, 200_000)
    fractions = sweep.pick((0.25, 0.5, 0.75, 1.0, 1.5), (0.5, 1.0), (0.5,))
    if transport != "shared-memory":
        fractions = (0.5, 1.0)
    cases = {(fraction, update): {"transport": transport, "parameters": parameters,
                                  "update": update, "pace": fraction * most, "warmup": 2,
                                  "steps": sweep.pick(12, 6, 2)}
             for fraction in fractions for update in ("wait", "speculate")}
    results = sweep.rounds(cases, 1)
    return [point(run, pace_fraction=key[0]) for key, run in results.items()]


def overlap_sweep(sweep: Sweep) -> None:
    sweep.info |= {"against_size": [], "against_pace": [], "capacity": {}, "trial": sweep.size == "tiny"}
    for transport in sweep.pick(("shared-memory", "unix"), ("shared-memory",), ("shared-memory",)):
        most = capacity(sweep, transport)
        sweep.info["capacity"][transport] = most
        sweep.info["against_size"] += against_size(sweep, transport, most / 2)
        sweep.info["against_pace"] += against_pace(sweep, transport, most)
    for entry in sweep.info["against_size"]:
        key = "_".join(("exposed", entry["transport"], entry["update"], "clip", entry["clip"],
                        f"{entry['parameters'] / 1e6:g}m", "seconds"))
        sweep.figures[key.replace("-", "_")] = entry["exposed_seconds"]
    for entry in sweep.info["against_pace"]:
        key = "_".join(("exposed", entry["transport"], entry["update"], "at_pace",
                        f"{entry['pace_fraction']:g}", "seconds"))
        sweep.figures[key.replace("-", "_")] = entry["exposed_seconds"]


# ---------------------------------------------------------------- growth


def growth_cases(sweep: Sweep) -> dict:
    base = {"transport": "shared-memory", "warmup": 2, "steps": sweep.pick(15, 6, 2),
            "parameters": sweep.pick(20_000_000, 10_000_000, 100_000)}
    axes = {
        "parameters": sweep.pick((1_000_000, 4_000_000, 10_000_000, 40_000_000, 100_000_000, 400_000_000),
                                 (1_000_000, 10_000_000, 40_000_000), (50_000, 100_000)),
        "tensors": sweep.pick((1, 100, 3000, 30000), (1, 3000), (1, 3000)),
        "groups": sweep.pick((1, 4, 16, 64), (1, 16), (1, 2)),
        "ranks": sweep.pick((1, 2, 4, 8, 16), (1, 4, 16), (1, 2)),
        "jobs": sweep.pick((1, 2, 4, 8), (1, 4), (1, 2)),
    }
    cases = {}
    for axis, values in axes.items():
        for value in values:
            options = base | {axis: value}
            if axis == "tensors":
                options["groups"] = 1
                options["steps"] = sweep.pick(25, 20, 2)
            if axis == "groups":
                options["tensors"] = max(100, value)
            if axis == "jobs":  # Together as large as one of the other axes.
                options["parameters"] = base["parameters"] // 2
            if axis == "parameters":
                options["steps"] = sweep.steps(value, 1e9)
            cases[axis, value] = options
    return cases


def memory_cases(sweep: Sweep) -> dict:
    """Two sizes each, so that what does not depend on the model drops out of the difference. Both pass
    the client's window of 64 MiB, so that the transport's buffers are as large as they get."""
    sizes = sweep.pick((50_000_000, 350_000_000), (40_000_000, 200_000_000), (100_000, 1_000_000))
    socket = {"transport": "unix", "steps": 3, "warmup": 1}
    kinds = {"one_micro_step": socket, "several_micro_steps": socket | {"micro-steps": 2},
             "speculate": socket | {"update": "speculate"},
             "shared_memory": socket | {"transport": "shared-memory"}}
    return {(kind, size): options | {"parameters": size}
            for kind, options in kinds.items() for size in sizes}


def growth_sweep(sweep: Sweep) -> None:
    sweep.info["growth"] = []
    cases = growth_cases(sweep)
    by_tensors = {key: options for key, options in cases.items() if key[0] == "tensors"}
    rest = {key: options for key, options in cases.items() if key[0] != "tensors"}
    # The difference looked for is small, so several rounds.
    runs = sweep.rounds(by_tensors, sweep.pick(7, 3, 1)) | sweep.rounds(rest, 1)
    if {("tensors", 1), ("tensors", 3000)} <= runs.keys():
        many, one = (runs["tensors", count]["round_seconds"] for count in (3000, 1))
        sweep.figures["step_tensors_3000_ratio"] = figure([a / b for a, b in zip(many, one)], "")
    for (axis, value), run in runs.items():
        total = figure(run["figures"]["total_seconds"]["samples"], "s")
        sweep.figures[f"growth_{axis}_{value}_seconds"] = total
        sweep.info["growth"].append({
            "axis": axis, "value": value, "total_seconds": total,
            "parameters": run["info"]["options"]["parameters"],
            "admitted_bytes_per_parameter": run["info"]["admitted_bytes_per_parameter"],
            "cpu_seconds_per_gb": run["info"]["cpu_seconds_per_gb"]})
    sweep.info["memory"] = {}
    by_kind: dict[str, list] = {}
    for (kind, size), info in memory_runs(sweep).items():
        by_kind.setdefault(kind, []).append((size, info))
    for kind, runs in by_kind.items():
        if len(runs) == 2:
            sweep.info["memory"][kind] = memory_slopes(*runs)
            for part, value in sweep.info["memory"][kind].items():
                sweep.figures[f"memory_{kind}_{part}"] = figure([value], "B/parameter")


def memory_runs(sweep: Sweep) -> dict[tuple, dict]:
    """What each case said in the run with the middle memory: the transport's buffers end up larger or
    smaller by some 30 MB from run to run."""
    cases = memory_cases(sweep)
    found: dict[tuple, list] = {}
    for repeat in range(sweep.pick(3, 3, 1)):
        for key, options in cases.items():
            # The other kinds decide no ratio.
            if sweep.fits(options) and (repeat == 0 or sweep.size == "full" or key[0] == "one_micro_step"):
                found.setdefault(key, []).append(sweep.worker(options)["info"])
    return {key: sorted(infos, key=lambda info: info["service_memory"]["total_bytes"])[len(infos) // 2]
            for key, infos in found.items()}


def memory_slopes(small: tuple, large: tuple) -> dict[str, float]:
    elements = large[0] - small[0]

    def slope(read) -> float:
        return (read(large[1]) - read(small[1])) / elements

    return {
        "service_resident": slope(lambda info: info["service_memory"]["total_bytes"]),
        "service_anonymous": slope(lambda info: info["service_memory"]["anonymous_bytes"]),
        "service_shared": slope(lambda info: info["service_memory"]["shared_bytes"]),
        "worker_resident": slope(lambda info: info["worker_memory"]["total_bytes"]),
        "admitted": slope(lambda info: info["admitted_bytes"]["total"]),
        "shared_said": slope(lambda info: info["admitted_bytes"]["shared"]),
    }


SWEEPS = {"step": step_sweep, "overlap": overlap_sweep, "growth": growth_sweep}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", choices=sorted(SWEEPS))
    parser.add_argument("--bin", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--short", dest="size", action="store_const", const="short", default="full")
    parser.add_argument("--tiny", dest="size", action="store_const", const="tiny")
    flags = parser.parse_args()
    sweep = Sweep(flags)
    try:
        SWEEPS[flags.sweep](sweep)
        write_whole(flags.out,
                    json.dumps({"name": flags.sweep, "figures": sweep.figures, "info": sweep.info}, indent=1))
    except (Failed, OSError, KeyError, ValueError) as error:
        what = error if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        print(f"sweeps.py: {flags.sweep}: {what}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
