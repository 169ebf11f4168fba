#!/usr/bin/env python3
"""Draws the loss curves of a run with the service and of its local twin as one SVG.

    plot_loss.py --service DIR/losses.csv --local DIR/local/losses.csv --out DIR/loss.svg
                 --summary DIR/summary.json

Needs nothing beyond the standard library. A losses.csv has a header with at least `step` and `loss`.
"""

import argparse
import csv
import html
import json
import math
import os
import sys

WIDTH, HEIGHT = 1000, 580
LEFT, RIGHT, TOP, BOTTOM = 84, 132, 104, 72  # Margins around the axes.

INK, MUTED, GRID = "#1f2933", "#66717d", "#e6e9ed"
SERVICE, SERVICE_RAW, LOCAL = "#1d5fbf", "#a9c7f0", "#e07b1a"
FONT = "'Inter', 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"


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


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that cover [low, high] with about `count` gaps."""
    if high - low < 1e-6:  # One step, or a loss that never moved.
        low, high = low - 0.5, high + 0.5
    span = high - low
    magnitude = 10.0 ** math.floor(math.log10(span / count))
    gap = next(m * magnitude for m in (1, 2, 5, 10) if span / (m * magnitude) <= count)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [i * gap for i in range(first, last + 1)]


class Chart:
    """Turns data into SVG elements; x is steps, y is loss."""

    def __init__(self, steps: tuple[int, int], losses: tuple[float, float]):
        self.x_range = (steps[0], max(steps[1], steps[0] + 1))
        self.y_ticks = nice_ticks(*losses, count=6)
        self.y_range = (self.y_ticks[0], self.y_ticks[-1])
        self.parts: list[str] = []

    def x(self, step: float) -> float:
        low, high = self.x_range
        return LEFT + (step - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, loss: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (loss - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def text(self, x, y, content, size=14, fill=INK, anchor="start", weight="400", extra=""):
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
            f'font-weight="{weight}"{extra}>{html.escape(content)}</text>')

    def line(self, x1, y1, x2, y2, stroke, width=1.0, dash=""):
        dashes = f' stroke-dasharray="{dash}" stroke-linecap="round"' if dash else ""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
                          f'stroke="{stroke}" stroke-width="{width}"{dashes}/>')

    def curve(self, points, stroke, width, dash=""):
        path = " ".join(f"{self.x(s):.2f},{self.y(v):.2f}" for s, v in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" '
                          f'stroke-width="{width}" stroke-linejoin="round" '
                          f'stroke-linecap="round"{dashes}/>')

    def dot(self, point, fill, radius=4.5):
        self.parts.append(f'<circle cx="{self.x(point[0]):.2f}" cy="{self.y(point[1]):.2f}" '
                          f'r="{radius}" fill="{fill}" stroke="#ffffff" stroke-width="1.5"/>')

    def axes(self):
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        gap = self.y_ticks[1] - self.y_ticks[0]
        digits = max(0, -math.floor(math.log10(gap) + 1e-9))
        for tick in self.y_ticks:
            self.line(LEFT, self.y(tick), right, self.y(tick), GRID)
            self.text(LEFT - 12, self.y(tick) + 4.5, f"{tick:.{digits}f}", 13, MUTED, "end")
        for tick in nice_ticks(*self.x_range, count=8):
            if tick == int(tick) and self.x_range[0] <= tick <= self.x_range[1]:
                self.line(self.x(tick), bottom, self.x(tick), bottom + 6, MUTED)
                self.text(self.x(tick), bottom + 24, f"{tick:.0f}", 13, MUTED, "middle")
        self.line(LEFT, bottom, right, bottom, MUTED, 1.2)
        self.text((LEFT + right) / 2, HEIGHT - 20, "step", 14, MUTED, "middle")
        middle = (TOP + bottom) / 2
        self.text(26, middle, "training loss, nats per byte", 14, MUTED, "middle",
                  extra=f' transform="rotate(-90 26 {middle:.1f})"')

    def chance(self):
        """The loss of a model that knows nothing about bytes, where it is in sight."""
        level = math.log(256)
        if self.y_range[0] < level < self.y_range[1]:
            self.line(LEFT, self.y(level), WIDTH - RIGHT, self.y(level), MUTED, 1, "2 5")
            self.text(WIDTH - RIGHT - 6, self.y(level) - 7, "a uniform guess: ln 256", 12, MUTED,
                      "end")

    def legend(self, entries):
        x, y = WIDTH - RIGHT - 6, TOP + 26
        level = self.y(math.log(256))
        if TOP < level < TOP + 90:  # Below the line of chance.
            y = level + 32
        for label, stroke, width, dash in entries:
            self.line(x - 34, y - 4.5, x, y - 4.5, stroke, width, dash)
            self.text(x - 44, y, label, 13, INK, "end")
            y += 23

    def svg(self) -> str:
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="{FONT}">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', *self.parts, "</svg>", ""])


def draw(service, local, title: str, subtitle: str) -> str:
    values = [loss for _, loss in service + local]
    chart = Chart((min(service[0][0], local[0][0]), max(service[-1][0], local[-1][0])),
                  (min(values), max(values)))
    chart.text(LEFT, 42, title, 23, INK, weight="600")
    chart.text(LEFT, 70, subtitle, 15, MUTED)
    chart.axes()
    chart.chance()
    trend = smoothed(service)
    chart.curve(service, SERVICE_RAW, 1.4)
    chart.curve(trend, SERVICE, 3)
    chart.curve(smoothed(local), LOCAL, 3.4, "0.1 11")
    chart.legend([("with the service, smoothed", SERVICE, 3, ""),
                  ("with the service, each step", SERVICE_RAW, 1.4, ""),
                  ("local optimizer, smoothed", LOCAL, 3.4, "0.1 11")])

    first, last = service[0], service[-1]
    chart.dot(last, SERVICE)
    x, y = chart.x(last[0]) + 14, min(chart.y(last[1]), HEIGHT - BOTTOM - 44)
    chart.text(x, y - 2, f"{last[1]:.4f}", 16, SERVICE, weight="600")
    chart.text(x, y + 14, "service", 12, SERVICE)
    chart.text(x, y + 36, f"{local[-1][1]:.4f}", 16, LOCAL, weight="600")
    chart.text(x, y + 52, "local", 12, LOCAL)
    if len(service) > 1:
        chart.dot(first, SERVICE)
        chart.text(chart.x(first[0]) + 12, chart.y(first[1]) + 20, f"{first[1]:.3f}", 13, SERVICE,
                   weight="600")
    return chart.svg()


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
        picture = draw(read_losses(flags.service), read_losses(flags.local),
                       *captions(flags.summary))
        temporary = flags.out + ".tmp"
        with open(temporary, "w") as file:
            file.write(picture)
        os.replace(temporary, flags.out)
    except (OSError, KeyError, ValueError) as error:
        print(f"plot_loss.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
