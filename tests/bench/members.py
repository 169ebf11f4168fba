#!/usr/bin/env python3
"""Measures what a step costs more over two services than over one, on one machine and with the same two ranks.

    tests/bench/members.py [--parameters N] [--rounds N] [--steps N] [--json FILE] FOLDER

FOLDER holds `ballastd` and `ballast-bench`, as build/release/bin does. Let nothing else run meanwhile. One service has all
processors; each of two has half of them, one rank and half of the parameters. They run in turn. A run that was not what it
was to be, or ends with other weights, ends the program.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

from run import Failed, check_weights, step

CASES = [(transport, update) for transport in ("shared-memory", "tcp") for update in ("wait", "speculate")]
MEMBERS = (1, 2)
TINY = 2000  # Parameters. So small a step is only messages.


def in_force(info: dict) -> dict:
    """As the run itself found it."""
    over_tcp = (info["socket_bytes_up"] or 0) >= info["payload_bytes_up"]
    return {"members": info["members"], "transport": "shared-memory" if info["shared_memory"] else "tcp" if over_tcp else "",
            "update": "speculate" if info["speculated_chunks"] > 0 else "wait"}


def measured(flags) -> dict:
    """By figure and case, for each number of members and round: the time from step to step, in milliseconds; one rank of
    two members may begin before the other's end. And of each run the median of a round trip."""
    samples, hashes = {}, {}
    processors = len(os.sched_getaffinity(0))
    for figure, parameters, steps in (("step", flags.parameters, flags.steps), ("tiny step", TINY, 20 * flags.steps)):
        for transport, update in CASES:
            by_members = samples.setdefault(figure, {}).setdefault(f"{transport}, {update}", {})
            for _ in range(flags.rounds):
                for members in MEMBERS:
                    run = step(flags.folder, [
                        "--ranks=2", f"--members={members}", f"--threads={max(processors // members, 1)}",
                        f"--transport={transport}", f"--update={update}", "--clip=not-firing",
                        f"--parameters={parameters}", f"--tensors={min(parameters // 1000, 100)}", f"--steps={steps}"])
                    info = run["info"]
                    wanted = {"members": members, "transport": transport, "update": update}
                    if in_force(info) != wanted:
                        raise Failed(f"asked for {wanted}, but it was {in_force(info)} {info['speculation_unavailable']}")
                    check_weights(hashes, info["options"], info["weights_sha256"])
                    by_members.setdefault(members, []).append(1e3 * info["wall_seconds"] / steps)
                    round_trip = run["figures"]["round_trip_seconds"]["median"]
                    by_members.setdefault("round trip", []).append(1e3 * round_trip)
    return samples


def table(samples: dict) -> str:
    """Ratios and differences are medians over the rounds, with the smallest and the largest."""
    lines = ["| figure | transport, update | one service | two services | ratio | added | a round trip |", "|---" * 7 + "|"]
    for figure, cases in samples.items():
        for case, by_members in cases.items():
            one, two = (by_members[members] for members in MEMBERS)
            ratios = [b / a for a, b in zip(one, two)]
            added = [b - a for a, b in zip(one, two)]
            lines.append(f"| {figure} | {case} | {statistics.median(one):.3g} ms | {statistics.median(two):.3g} ms | "
                         f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f}) | "
                         f"{statistics.median(added):.2f} ms ({min(added):.2f} to {max(added):.2f}) | "
                         f"{statistics.median(by_members['round trip']):.2f} ms |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="that are measured in each run; 20 times as many tiny ones")
    parser.add_argument("--json", type=pathlib.Path, help="a file for all samples")
    flags = parser.parse_args()
    try:
        samples = measured(flags)
        print(table(samples))
        if flags.json:
            flags.json.write_text(json.dumps(samples, indent=1) + "\n")
    except (Failed, OSError, subprocess.TimeoutExpired) as error:
        print(f"members.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
