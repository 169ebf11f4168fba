#!/usr/bin/env python3
"""Measures a step of the service, of one build or of two beside each other.

    tests/bench/run.py [--before FOLDER] [--parameters N] [--rounds N] [--json FILE] FOLDER

FOLDER holds `ballastd` and `ballast-bench`, as build/release/bin does. Let nothing else run meanwhile. A machine's memory
changes its speed by a third within minutes, so both builds run in turn: compare ratios, not times. Runs that train the same
must end with the same weights, whatever the build, transport or mode; otherwise the program fails.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

# By name: the options of `ballast-bench worker`.
CASES = {
    "shared memory": ["--transport=shared-memory"],
    "unix socket": ["--transport=unix"],
    "TCP": ["--transport=tcp"],
    "3,000 tensors": ["--transport=shared-memory", "--tensors=3000"],
    "two micro-steps": ["--transport=shared-memory", "--micro-steps=2"],
    "state in bf16": ["--transport=shared-memory", "--state=bf16"],
    "state in 8bit": ["--transport=shared-memory", "--state=8bit"],
    "Muon but for Newton-Schulz": ["--transport=shared-memory", "--rule=muon"],
    "speculating, clipped": ["--transport=shared-memory", "--update=speculate", "--clip=not-firing"],
}
SECONDS = ("total_seconds", "update_seconds")


class Failed(Exception):
    """One line for whoever started this."""


def called(*words) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, words))}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout


def step(folder: pathlib.Path, options: list[str]) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        called(folder / "ballast-bench", "worker", *options, f"--json={file.name}")
        return json.loads(pathlib.Path(file.name).read_text())


def check_weights(hashes: dict, options: dict, weights: str) -> None:
    """Only tensors, groups, micro-steps, rule, state and clipping change the weights; here, all but groups and clipping."""
    key = options["micro_steps"], options["tensors"], options["rule"], options["state"]
    if hashes.setdefault(key, weights) != weights:
        raise Failed(f"the weights differ: {hashes[key][:16]}, but {weights[:16]} with {options}")


def measured(flags, builds: dict) -> dict:
    """By build, figure and case: the samples of all rounds."""
    samples, hashes = {}, {}

    def add(build, figure, case, values):
        samples.setdefault(build, {}).setdefault(figure, {}).setdefault(case, []).extend(values)

    for _ in range(flags.rounds):
        for build, folder in builds.items():
            rows = {}  # With all threads, which come before one.
            limit = max(1 << 26, 32 * flags.parameters)  # For as many parameters in all formats.
            for line in called(folder / "ballastd", "--self-benchmark", f"--memory-limit={limit >> 20}MiB").splitlines():
                if row := re.fullmatch(r"(AdamW.*?) +\d+ threads? .* ([\d.]+) Gparam/s +([\d.]+)", line):
                    rows.setdefault(row[1], row)
            for name, row in rows.items():
                add(build, "update, Gparam/s", name, [float(row[2])])
                add(build, "update, of the memory's limit", name, [float(row[3])])
        for case, options in CASES.items():
            for build, folder in builds.items():
                run = step(folder, [*options, f"--parameters={flags.parameters}", f"--steps={flags.steps}"])
                check_weights(hashes, run["info"]["options"], run["info"]["weights_sha256"])
                for name in SECONDS:
                    figure = run["figures"][name]
                    add(build, name, case, figure.get("samples", [figure["median"]]))
                add(build, "bytes a parameter", case, [run["info"]["admitted_bytes_per_parameter"]])
    return samples


def table(samples: dict) -> str:
    builds = list(samples)
    lines = ["| figure | case | " + " | ".join(builds) + (" | ratio |" if len(builds) == 2 else " |"),
             "|---" * (len(builds) + 2 + (len(builds) == 2)) + "|"]
    for figure, cases in samples[builds[0]].items():
        for case in cases:
            medians = [statistics.median(samples[build][figure][case]) for build in builds]
            row = [figure, case, *(f"{median:.4g}" for median in medians)]
            if len(builds) == 2:
                row.append(f"{medians[1] / medians[0]:.3f}" if medians[0] > 0 else "")
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--before", type=pathlib.Path, help="the folder of the build to compare with")
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="that are measured of each case in a round")
    parser.add_argument("--json", type=pathlib.Path, help="a file for all samples")
    flags = parser.parse_args()
    builds = ({"before": flags.before} if flags.before else {}) | {"after" if flags.before else "now": flags.folder}
    try:
        samples = measured(flags, builds)
        print(table(samples))
        if flags.json:
            flags.json.write_text(json.dumps(samples, indent=1) + "\n")
    except (Failed, OSError, subprocess.TimeoutExpired) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
