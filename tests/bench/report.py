#!/usr/bin/env python3
"""Puts the figures of one run of the benchmarks together: DIR/report.md and DIR/bench.json.

    report.py --out DIR            reads DIR/raw/*.json
    report.py --machine FILE       writes down what this machine is, which run.sh does first

`ratios` of bench.json, each within one run, since the machine drifts:

  kernel_to_roofline    the update's Gparam/s / those of the plainest loop with its memory traffic, all
                        threads; the median of ratios of neighbouring measurements
  kernel_to_torch_best  the update's Gparam/s, measured right before and right after torch (the mean of
                        both) / those of torch.optim.AdamW in its best layout, with the allocator as it
                        comes or with the settings that our processes have
  denormals             time of the update with all-denormal moments / with normal ones
  tensors_3000          time for 3,000 tensors / for one, with as many parameters: of the update alone, or
                        of a whole step over shared memory, whichever is worse
  step_shared_memory    median step over shared memory / time of the norm's pass and of the update for as
                        many parameters, its bound
  step_unix, step_tcp   median step over the socket / its bound; these three round by round, and of the
                        rounds the median. step_unix_raw and step_tcp_raw under `bounds_of_raw_sockets`
                        are the same with a raw socket in gRPC's place in the bound
  exposed_flatness      largest / smallest median exposed time over the model sizes, 10M to 400M: speculating,
                        clipping on and not firing, shared memory, at half the pace that the service takes;
                        not measured if a size is missing or any provisional update failed
  grpc_to_raw_tcp       GB/s through gRPC / through a raw socket over TCP: the least of up, down and both
  bytes_per_parameter   what a parameter adds to the service's resident memory, waiting, one micro-step,
                        gradients through a socket: the difference of two model sizes

The bound of a step over a socket. The steps wait: all gradients are up before the decision, and only
then come the update and the shards down. So the two directions follow each other, each as fast as
gRPC is with byte buffers on user memory when it has nothing else to do (what gRPC costs beside a raw
socket is grpc_to_raw_tcp). Both processes share the cores, so CPU seconds add:

  norm_s   = parameters / Gparam/s of the norm's pass over bf16 gradients, on all threads
  update_s = parameters / Gparam/s of the update, on all threads
  up_s     = max(GB / GB/s up, norm_s + GB * CPU-s/GB up / cores)
  down_s   = max(GB / GB/s down, update_s + GB * CPU-s/GB down / cores)
  bound    = up_s + down_s

with the GB of one direction. (A step that speculates would have both directions at once; none of these
does.) The wire is measured anew before each round of steps, the two passes in turn right before and right
after the steps of each transport, and the mean of both counts. No step can be faster than its bound: a
round in which one is by more than 3% was disturbed while its bound was measured; it is not used for that
transport, and `rounds_not_used` counts it.
"""

import argparse
import json
import math
import os
import pathlib
import platform
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "deploy"))

from whole_file import write_whole  # noqa: E402

RATIOS = ("kernel_to_roofline", "kernel_to_torch_best", "denormals", "tensors_3000",
          "step_shared_memory", "step_unix", "step_tcp", "exposed_flatness", "grpc_to_raw_tcp",
          "bytes_per_parameter")
GOALS = {"kernel_to_roofline": ">= 0.95", "kernel_to_torch_best": ">= 3", "denormals": "<= 1.10",
         "tensors_3000": "<= 1.03", "step_shared_memory": "<= 1.10", "step_unix": "<= 1.15",
         "step_tcp": "<= 1.15", "exposed_flatness": "<= 1.2", "grpc_to_raw_tcp": ">= 0.85",
         "bytes_per_parameter": "<= 14.28"}
LEAST_OF_BOUND = 0.97
REQUIRED = ("kernel", "wire", "step", "overlap", "growth")
OPTIONAL = {"torch_adamw": "torch_adamw.json is not there: run without --no-torch",
            "torch_adamw_tuned": "torch_adamw_tuned.json is not there: run without --no-torch",
            "kernel_before_torch": "kernel_before_torch.json is not there: run without --no-torch",
            "kernel_after_torch": "kernel_after_torch.json is not there: run without --no-torch",
            "wire_apis": "wire_apis.json is not there: run without --short",
            "trace": "trace.json is not there"}
# Millions of parameters that exposed_flatness must span, unless the sweep says that it was a trial.
FLAT_FROM, FLAT_TO = 10_000_000, 400_000_000


class Failed(Exception):
    """One line for whoever reads it."""


class Missing(Exception):
    """Why a ratio could not be had."""


def read(path: pathlib.Path) -> dict:
    try:
        text = json.loads(path.read_text())
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise Failed(f"{path}: not JSON: {error}") from error
    return text


def read_figures(path: pathlib.Path) -> dict:
    part = read(path)
    if not isinstance(part, dict) or not isinstance(part.get("figures"), dict) \
            or not isinstance(part.get("info", {}), dict):
        raise Failed(f"{path}: not figures: expected objects 'figures' and 'info'")
    for key, value in part["figures"].items():
        if not isinstance(value, dict) or not {"median", "min", "max", "unit"} <= value.keys():
            raise Failed(f"{path}: figure {key} lacks one of median, min, max, unit")
        for name in ("median", "min", "max"):
            number = value[name]
            if isinstance(number, bool) or not isinstance(number, (int, float)) \
                    or not math.isfinite(number):
                raise Failed(f"{path}: figure {key}: {name} is no finite number")
    return part


def read_parts(raw: pathlib.Path) -> dict[str, dict]:
    parts = {name: read_figures(raw / f"{name}.json") for name in REQUIRED}
    return parts | {name: read_figures(raw / f"{name}.json") for name in OPTIONAL
                    if (raw / f"{name}.json").exists()}


# ---------------------------------------------------------------- the ratios


class Ratios:
    """A method for each ratio; one that cannot be had raises Missing."""

    def __init__(self, parts: dict[str, dict], machine: dict):
        self.parts, self.cores = parts, machine["cores"]

    def median(self, part: str, key: str) -> float:
        if part not in self.parts:
            raise Missing(OPTIONAL[part])
        if key not in self.parts[part]["figures"]:
            raise Missing(f"{part}.json has no figure {key}")
        return self.parts[part]["figures"][key]["median"]

    def parameters(self) -> int:
        if "parameters" not in self.parts["step"]["info"]:
            raise Missing("step.json does not say of how many parameters")
        return self.parts["step"]["info"]["parameters"]

    def bounds_and_ratios(self, transport: str) -> tuple[list[tuple[float, float]], int]:
        """Of each round that is used its bound and the step / the bound; and how many are not."""
        pairs = []
        for one in self.parts["step"]["info"].get("rounds", []):
            try:
                bound = self.round_bound(transport, one)
                pairs.append((bound, one[transport] / bound))
            except KeyError as error:
                raise Missing(f"a round of step.json has no {error} for {transport}") from error
        if not pairs:
            raise Missing("step.json has no rounds")
        used = [pair for pair in pairs if pair[1] >= LEAST_OF_BOUND]
        return used, len(pairs) - len(used)

    def of_rounds(self, transport: str, which: int) -> float:
        used, dropped = self.bounds_and_ratios(transport)
        if not used:
            raise Missing(f"in all {dropped} rounds the step over {transport} was faster than its bound")
        return statistics.median(pair[which] for pair in used)

    def rounds_not_used(self) -> dict[str, int]:
        counts = {}
        for transport in ("shared_memory", "unix", "tcp"):
            try:
                counts[transport] = self.bounds_and_ratios(transport)[1]
            except (Missing, ZeroDivisionError):
                continue
        return counts

    def round_bound(self, transport: str, one: dict, wire_of: str = "grpc") -> float:
        update = self.parameters() / (1e9 * one[f"{transport}_update_gparam_s"])
        norm = self.parameters() / (1e9 * one[f"{transport}_norm_gparam_s"])
        if transport == "shared_memory":
            return norm + update
        gb = 2e-9 * self.parameters()  # bf16, each way.
        wire = {way: gb / one[f"{wire_of}_{transport}_{way}_gb_s"] for way in ("up", "down")}
        busy = {way: gb * one[f"{wire_of}_{transport}_{way}_cpu_s_per_gb"] / self.cores for way in wire}
        return max(wire["up"], busy["up"] + norm) + max(wire["down"], update + busy["down"])

    def beside_raw_sockets(self) -> dict[str, float]:
        rounds = self.parts["step"]["info"].get("rounds", [])
        return {f"step_{transport}_raw": statistics.median(
            one[transport] / self.round_bound(transport, one, "raw") for one in rounds if transport in one)
            for transport in ("unix", "tcp") if any(transport in one for one in rounds)}

    def bound_seconds(self, transport: str) -> float:
        return self.of_rounds(transport, 0)

    def step(self, transport: str) -> float:
        return self.of_rounds(transport, 1)

    def kernel_to_roofline(self) -> float:
        return self.median("kernel", "kernel_to_roofline_all_threads")

    def kernel_to_torch_best(self) -> float:
        best = max(self.median(part, f"torch_{layout}_gparam_s")
                   for part in ("torch_adamw", "torch_adamw_tuned")
                   for layout in ("flat", "flat_foreach", "100", "100_foreach"))
        return statistics.mean(self.median(f"kernel_{when}_torch", "kernel_all_threads_gparam_s")
                               for when in ("before", "after")) / best

    def denormals(self) -> float:
        return self.median("kernel", "denormals_ratio")

    def tensors_3000(self) -> float:
        return max(self.median("kernel", "tensors_3000_ratio"),
                   self.median("growth", "step_tensors_3000_ratio"))

    def step_shared_memory(self) -> float:
        return self.step("shared_memory")

    def step_unix(self) -> float:
        return self.step("unix")

    def step_tcp(self) -> float:
        return self.step("tcp")

    def exposed_flatness(self) -> float:
        info = self.parts["overlap"]["info"]
        planned = info.get("flatness_sizes", [])
        if len(planned) < 2:
            raise Missing("overlap.json does not say which sizes were planned")
        if not info.get("trial") and (min(planned) > FLAT_FROM or max(planned) < FLAT_TO):
            raise Missing(f"sizes from {min(planned)} to {max(planned)} were planned, not 10M to 400M")
        entries = {entry["parameters"]: entry for entry in info.get("against_size", [])
                   if (entry["transport"], entry["update"], entry["clip"]) ==
                   ("shared-memory", "speculate", "not-firing")}
        missing = sorted(set(planned) - entries.keys())
        if missing:
            raise Missing(f"overlap.json has no {missing} parameters over shared memory, speculating, with "
                          "clipping on and not firing")
        for size, entry in sorted(entries.items()):
            if entry["redone_chunks"] > 0 or entry["speculation_unavailable"] \
                    or entry["speculated_chunks"] == 0:
                raise Missing(f"with {size} parameters {entry['speculated_chunks']} chunks were speculated, "
                              f"{entry['redone_chunks']} done again: {entry['speculation_unavailable']}")
        exposed = [entry["exposed_seconds"]["median"] for entry in entries.values()]
        if min(exposed) <= 0:
            raise Missing("an exposed time is not above 0")
        return max(exposed) / min(exposed)

    def grpc_to_raw_tcp(self) -> float:
        return min(self.median("wire", f"grpc_to_raw_tcp_{way}") for way in ("up", "down", "both"))

    def bytes_per_parameter(self) -> float:
        return self.median("growth", "memory_one_micro_step_service_resident")

    def all(self) -> tuple[dict, dict]:
        """The ratios, and why those that are null are."""
        values, reasons = {}, {}
        for name in RATIOS:
            try:
                values[name] = getattr(self, name)()
            except Missing as missing:
                values[name], reasons[name] = None, str(missing)
            except ZeroDivisionError:
                values[name], reasons[name] = None, "one of its figures is 0"
        return values, reasons


def check_weights(parts: dict[str, dict]) -> int:
    """How many runs trained the same as another one; Failed if two of those end with different weights,
    or if there are none."""
    seen: dict[str, list] = {}
    runs = [run for part in parts.values() for run in part.get("info", {}).get("runs", [])]
    for run in runs:
        same = dict(run["options"])
        same["clip"] = same["clip"] == "firing"
        for name in ("transport", "update", "pace", "threads"):
            same.pop(name)
        key = json.dumps(same, sort_keys=True)
        same_runs = seen.setdefault(key, [])
        same_runs.append(run)
        first, sha256 = same_runs[0]["options"], same_runs[0]["weights_sha256"]
        if sha256 != run["weights_sha256"]:
            raise Failed(f"the weights differ: {first} ends with {sha256[:16]}, "
                         f"{run['options']} with {run['weights_sha256'][:16]}")
    compared = sum(len(same_runs) for same_runs in seen.values() if len(same_runs) > 1)
    if compared == 0:
        raise Failed("no two runs trained the same: no weights were compared")
    return compared


# ---------------------------------------------------------------- the files


def describe_machine() -> dict:
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo")
                  if line.startswith("model name")), platform.machine())
    memory = next(int(line.split()[1]) * 1024 for line in open("/proc/meminfo")
                  if line.startswith("MemTotal"))
    try:
        huge = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        huge = "unknown"
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_bytes": memory,
            "kernel": platform.release(), "transparent_huge_pages": huge}


def table(machine: dict, ratios: Ratios, values: dict, reasons: dict, compared: int) -> str:
    lines = [
        f"# Benchmarks on {machine['cpu']}", "",
        f"{machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, Linux "
        f"{machine['kernel']}, transparent huge pages {machine['transparent_huge_pages']}. "
        f"{compared} runs that trained the same ended with the same weights to the bit.", "",
        "| part | figure | median | min to max | unit | target |", "|---|---|---|---|---|---|"]
    for name in RATIOS:
        shown = f"**{values[name]:.3f}**" if values[name] is not None else "not measured"
        lines.append(f"| ratio | {name} | {shown} | {reasons.get(name, '')} | | {GOALS[name]} |")
    for transport in ("shared_memory", "unix", "tcp"):
        try:
            bound = ratios.bound_seconds(transport)
        except (Missing, ZeroDivisionError):
            continue
        lines.append(f"| step | bound over {transport} | {number(1e3 * bound)} | | ms | |")
    for part, content in ratios.parts.items():
        for key, value in sorted(content["figures"].items()):
            scale, unit = (1e3, "ms") if value["unit"] == "s" else (1, value["unit"])
            lines.append(f"| {part} | {key.removesuffix('_seconds')} | {number(scale * value['median'])} | "
                         f"{number(scale * value['min'])} to {number(scale * value['max'])}"
                         + (f", p99 {number(scale * value['p99'])}" if unit == "ms" and "p99" in value
                            else "") + f" | {unit} | |")
    not_used = {name: count for name, count in ratios.rounds_not_used().items() if count > 0}
    if not_used:
        lines += ["", "Rounds not used, since the step was faster than its bound, which was therefore "
                  "measured too low: " + ", ".join(f"{count} over {name}" for name, count in not_used.items())
                  + "."]
    sizes = ratios.parts["overlap"]["info"].get("flatness_sizes", [])
    if sizes:
        lines += ["", "exposed_flatness is over " +
                  ", ".join(f"{size / 1e6:g}M" for size in sizes) + " parameters."]
    skipped = [line for part in ratios.parts.values() for line in part["info"].get("skipped", [])]
    if skipped:
        lines += ["", "Left out for want of memory:", "", *(f"- {line}" for line in skipped)]
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def report(out: pathlib.Path) -> None:
    raw = out / "raw"
    machine = read(raw / "machine.json")
    if not isinstance(machine, dict) or not {"cpu", "cores", "memory_bytes", "kernel",
                                             "transparent_huge_pages"} <= machine.keys():
        raise Failed(f"{raw / 'machine.json'}: not what --machine writes")
    parts = read_parts(raw)
    try:
        compared = check_weights(parts)
        ratios = Ratios(parts, machine)
        values, reasons = ratios.all()
        text = table(machine, ratios, values, reasons, compared)
    except (KeyError, TypeError, AttributeError) as error:
        raise Failed(f"{raw}: a file lacks {error}") from error
    write_whole(out / "bench.json", json.dumps(
        {"machine": machine, "ratios": values, "not_measured": reasons, "goals": GOALS,
         "bounds_of_raw_sockets": ratios.beside_raw_sockets(), "runs_with_equal_weights": compared, "rounds_not_used": ratios.rounds_not_used(),
         "raw": parts}, indent=1) + "\n")
    write_whole(out / "report.md", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=pathlib.Path)
    what.add_argument("--machine", type=pathlib.Path)
    flags = parser.parse_args()
    try:
        if flags.machine:
            write_whole(flags.machine, json.dumps(describe_machine(), indent=1) + "\n")
        else:
            report(flags.out)
    except (Failed, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
