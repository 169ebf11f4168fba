#!/usr/bin/python3
"""Draws the loss curves of a run with the service and of its local twin as one SVG.

    plot_loss.py --service DIR/losses.csv --local DIR/local/losses.csv --out DIR/loss.svg
                 --summary DIR/summary.json

Needs Debian's python3-matplotlib. A losses.csv has a header with at least `step` and `loss`.
"""

import argparse
import csv
import json
import math
import os
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"

from matplotlib import pyplot  # noqa: E402


def read_losses(path: str) -> tuple[list[int], list[float]]:
    with open(path, newline="") as file:
        rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    rows = [(step, loss) for step, loss in rows if math.isfinite(loss)]
    if not rows:
        raise ValueError(f"{path} has no finite losses")
    return tuple(map(list, zip(*rows)))


def smoothed(losses: list[float]) -> list[float]:
    """Centred means over about an eighth of the curve, over less where an end is near."""
    half = max(1, len(losses) // 16)
    result = []
    for i in range(len(losses)):
        reach = min(half, i, len(losses) - 1 - i)
        window = losses[i - reach:i + reach + 1]
        result.append(sum(window) / len(window))
    return result


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def draw(service, local, run: dict, path: str) -> None:
    figure, axes = pyplot.subplots(figsize=(10, 5.8), layout="constrained")
    for (steps, losses), name, style in ((service, "with the service", "C0-"), (local, "local optimizer", "C1:")):
        axes.plot(steps, smoothed(losses), style, linewidth=3, label=f"{name}, smoothed; at the end {losses[-1]:.4f}")
    axes.plot(*service, "C0-", linewidth=1, alpha=0.4, label="with the service, each step")
    axes.set(xlabel="step", ylabel="training loss, nats per byte")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.4)
    axes.legend(frameon=False)
    same = "bit-identical" if run["bit_identical"] else "NOT the same"
    axes.set_title(f"A GPT of {run['parameters'] / 1e6:.1f} million parameters learns to read\n"
                   f"{counted(run['workers'], 'worker')}, {counted(run['micro_steps'], 'micro-step')} a step; after "
                   f"{counted(run['steps'], 'step')} the weights with and without the service are {same}", loc="left")
    figure.savefig(f"{path}.tmp", format="svg")
    os.replace(f"{path}.tmp", path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("--service", "--local", "--out", "--summary"):
        parser.add_argument(flag, required=True)
    flags = parser.parse_args()
    try:
        with open(flags.summary) as file:
            run = json.load(file)
        draw(read_losses(flags.service), read_losses(flags.local), run, flags.out)
    except (OSError, KeyError, ValueError) as error:
        print(f"plot_loss.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
