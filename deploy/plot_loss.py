#!/usr/bin/env python3
"""Draws the loss curves of a run with the service and of its local twin as one SVG.

    plot_loss.py --service DIR/losses.csv --local DIR/local/losses.csv --out DIR/loss.svg
                 --summary DIR/summary.json

Needs nothing beyond the standard library. A losses.csv has a header with at least `step` and `loss`.
"""

import argparse
import csv
import json
import math
import sys

from svg import INK, MUTED, Axes, Picture, nice_ticks
from whole_file import write_whole

WIDTH, HEIGHT = 1000, 580
LEFT, RIGHT, TOP, BOTTOM = 84, 132, 104, 72  # Margins around the axes.
SERVICE, SERVICE_RAW, LOCAL = "#1d5fbf", "#a9c7f0", "#e07b1a"


def read_losses(path: str) -> list[tuple[int, float]]:
    with open(path, newline="") as file:
        rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    rows = [(step, loss) for step, loss in rows if math.isfinite(loss)]
    if not rows:
        raise ValueError(f"{path} has no finite losses")
    return rows


def smoothed(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Centred means over about an eighth of the curve, over less where an end is near."""
    half = max(1, len(points) // 16)
    result = []
    for i, (step, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        window = [loss for _, loss in points[i - reach:i + reach + 1]]
        result.append((step, sum(window) / len(window)))
    return result


def draw_chance(axes: Axes):
    """The loss of a model that knows nothing about bytes, where it is in sight."""
    level = math.log(256)
    if axes.y_ticks[0] < level < axes.y_ticks[-1]:
        axes.picture.line(LEFT, axes.y(level), axes.right, axes.y(level), MUTED, 1, "2 5")
        axes.picture.text(axes.right - 6, axes.y(level) - 7, "a uniform guess: ln 256", 12, MUTED, "end")


def draw_legend(axes: Axes, entries):
    x, y = axes.right - 6, TOP + 26
    level = axes.y(math.log(256))
    if TOP < level < TOP + 90:  # Below the line of chance.
        y = level + 32
    for label, stroke, width, dash in entries:
        axes.picture.line(x - 34, y - 4.5, x, y - 4.5, stroke, width, dash)
        axes.picture.text(x - 44, y, label, 13, INK, "end")
        y += 23


def draw_steps(axes: Axes):
    low, high = axes.x_range
    for tick in nice_ticks(low, high, count=8):
        if tick == int(tick) and low <= tick <= high:
            axes.picture.line(axes.x(tick), axes.bottom, axes.x(tick), axes.bottom + 6, MUTED)
            axes.picture.text(axes.x(tick), axes.bottom + 24, f"{tick:.0f}", 13, MUTED, "middle")


def draw(service, local, title: str, subtitle: str) -> str:
    picture = Picture(WIDTH, HEIGHT)
    picture.text(LEFT, 42, title, 23, INK, weight="600")
    picture.text(LEFT, 70, subtitle, 15, MUTED)
    first_step, last_step = min(service[0][0], local[0][0]), max(service[-1][0], local[-1][0])
    losses = [loss for _, loss in service + local]
    axes = Axes(picture, LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM,
                (first_step, max(last_step, first_step + 1)), nice_ticks(min(losses), max(losses), count=6))
    axes.grid(13, 12)
    axes.names("step", "training loss, nats per byte", 14, 52, 58)
    draw_steps(axes)
    draw_chance(axes)
    picture.curve(axes.points(service), SERVICE_RAW, 1.4)
    picture.curve(axes.points(smoothed(service)), SERVICE, 3)
    picture.curve(axes.points(smoothed(local)), LOCAL, 3.4, "0.1 11")
    draw_legend(axes, [("with the service, smoothed", SERVICE, 3, ""),
                       ("with the service, each step", SERVICE_RAW, 1.4, ""),
                       ("local optimizer, smoothed", LOCAL, 3.4, "0.1 11")])

    first, last = service[0], service[-1]
    picture.dot(axes.x(last[0]), axes.y(last[1]), SERVICE, 4.5)
    x, y = axes.x(last[0]) + 14, min(axes.y(last[1]), axes.bottom - 44)
    picture.text(x, y - 2, f"{last[1]:.4f}", 16, SERVICE, weight="600")
    picture.text(x, y + 14, "service", 12, SERVICE)
    picture.text(x, y + 36, f"{local[-1][1]:.4f}", 16, LOCAL, weight="600")
    picture.text(x, y + 52, "local", 12, LOCAL)
    if len(service) > 1:
        picture.dot(axes.x(first[0]), axes.y(first[1]), SERVICE, 4.5)
        picture.text(axes.x(first[0]) + 12, axes.y(first[1]) + 20, f"{first[1]:.3f}", 13, SERVICE,
                     weight="600")
    return picture.svg()


def captions(summary_path: str) -> tuple[str, str]:
    """Title and subtitle."""
    with open(summary_path) as file:
        run = json.load(file)
    return (f"A GPT of {run['parameters'] / 1e6:.1f} million parameters learns to read",
            f"{counted(run['workers'], 'worker')}, {counted(run['micro_steps'], 'micro-step')} a step; "
            f"after {counted(run['steps'], 'step')} the weights with and without the service are "
            + ("bit-identical" if run["bit_identical"] else "NOT the same"))


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--service", required=True)
    parser.add_argument("--local", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--summary", required=True)
    flags = parser.parse_args()
    try:
        write_whole(flags.out, draw(read_losses(flags.service), read_losses(flags.local),
                                    *captions(flags.summary)))
    except (OSError, KeyError, ValueError) as error:
        print(f"plot_loss.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
