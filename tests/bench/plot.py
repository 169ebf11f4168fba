#!/usr/bin/env python3
"""Draws step.svg, overlap.svg and growth.svg from DIR/bench.json.

    plot.py --out DIR

Needs nothing beyond the standard library.
"""

import argparse
import html
import json
import math
import os
import pathlib
import sys

from report import Missing, Ratios

INK, MUTED, GRID = "#1f2933", "#66717d", "#e6e9ed"
FONT = "'Inter', 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"
COLOURS = ("#1d5fbf", "#e07b1a")
LINE_COLOURS = {"speculate": "#1d5fbf", "speculate, clipping on": "#2a9d6f", "wait": "#e07b1a",
                "wait, clipping on": "#a23b72"}
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 46, 52  # Margins of a panel.
HEAD = 92  # Of a picture, for its title.


class Picture:
    def __init__(self, width: int, height: int, title: str, subtitle: str):
        self.width, self.height = width, height
        self.parts: list[str] = []
        self.text(30, 40, title, 22, weight="600")
        self.text(30, 66, subtitle, 14, MUTED)

    def text(self, x, y, content, size=13, fill=INK, anchor="start", weight="400", extra=""):
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
            f'font-weight="{weight}"{extra}>{html.escape(content)}</text>')

    def line(self, x1, y1, x2, y2, stroke, width=1.0, dash=""):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
                          f'stroke="{stroke}" stroke-width="{width}"{dashes}/>')

    def rectangle(self, x, y, width, height, fill):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                          f'height="{max(0, height):.1f}" fill="{fill}"/>')

    def svg(self) -> str:
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{FONT}">',
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>', *self.parts,
            "</svg>", ""])


def nice_ticks(high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from 0 to `high` or just above it."""
    high = max(high, 1e-9)
    magnitude = 10.0 ** math.floor(math.log10(high / count))
    gap = next(m * magnitude for m in (1, 2, 5, 10) if high / (m * magnitude) <= count)
    return [i * gap for i in range(math.ceil(high / gap - 1e-9) + 1)]


class Panel:
    """Lines over x, from 0 up, in a part of a picture. With `log_x`, equal ratios are equally wide."""

    def __init__(self, picture: Picture, place: tuple, title: str, x_label: str, y_label: str,
                 series: dict[str, list[tuple]], log_x: bool = True):
        self.picture, self.log_x = picture, log_x
        self.left, self.top, width, height = place
        self.right, self.bottom = self.left + width - RIGHT, self.top + height - BOTTOM
        self.left, self.top = self.left + LEFT, self.top + TOP
        points = [point for line in series.values() for point in line]
        self.xs = sorted({x for x, _ in points})
        self.y_ticks = nice_ticks(max(y for _, y in points))
        picture.text(self.left - 34, self.top - 20, title, 15, weight="600")
        self.axes(x_label, y_label)
        for index, (label, line) in enumerate(series.items()):
            self.curve(label, sorted(line), LINE_COLOURS.get(label, COLOURS[0]), index,
                       named=len(series) > 1)

    def x(self, value: float) -> float:
        low, high = self.xs[0], self.xs[-1]
        if low == high:
            return (self.left + self.right) / 2
        if self.log_x:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.left + 12 + (value - low) / (high - low) * (self.right - self.left - 24)

    def y(self, value: float) -> float:
        return self.bottom - value / self.y_ticks[-1] * (self.bottom - self.top)

    def axes(self, x_label: str, y_label: str):
        gap = self.y_ticks[1]
        digits = max(0, -math.floor(math.log10(gap) + 1e-9))
        for tick in self.y_ticks:
            self.picture.line(self.left, self.y(tick), self.right, self.y(tick), GRID)
            self.picture.text(self.left - 8, self.y(tick) + 4, f"{tick:.{digits}f}", 12, MUTED, "end")
        last = -math.inf
        for value in self.xs:
            if self.x(value) - last < 30:
                continue
            last = self.x(value)
            self.picture.text(last, self.bottom + 18, f"{value:g}", 12, MUTED, "middle")
        self.picture.line(self.left, self.bottom, self.right, self.bottom, MUTED, 1.2)
        self.picture.text((self.left + self.right) / 2, self.bottom + 38, x_label, 12, MUTED, "middle")
        middle = (self.top + self.bottom) / 2
        x = self.left - 46
        self.picture.text(x, middle, y_label, 12, MUTED, "middle",
                          extra=f' transform="rotate(-90 {x:.1f} {middle:.1f})"')

    def curve(self, label: str, line: list[tuple], colour: str, index: int, named: bool):
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in line)
        self.picture.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" '
                                  'stroke-width="2.4" stroke-linejoin="round"/>')
        for x, y in line:
            self.picture.parts.append(f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3.4" '
                                      f'fill="{colour}" stroke="#ffffff"/>')
        if named:
            y = self.top + 6 + 17 * index
            self.picture.line(self.left + 14, y, self.left + 34, y, colour, 3)
            self.picture.text(self.left + 40, y + 4, label, 12)


def machine_line(bench: dict) -> str:
    machine = bench["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}"


# ---------------------------------------------------------------- the three


def draw_step(bench: dict) -> str:
    """A bar for each transport, a whisker to the 99th percentile, a stroke at the bound."""
    step = bench["raw"]["step"]
    millions = step["info"]["parameters"] // 1_000_000
    ratios = Ratios(bench["raw"], bench["machine"])
    bars = [(name, step["figures"].get(f"step_{name}_{millions}m_seconds"), bound_of(ratios, name))
            for name in ("in_process", "shared_memory", "unix", "tcp")]
    bars = [bar for bar in bars if bar[1] is not None]
    picture = Picture(860, 480, f"A step of {millions} million parameters", machine_line(bench))
    left, right, top, bottom = 84, 830, HEAD + 20, 420
    ticks = nice_ticks(max(1e3 * max(bar[1]["p99"], bar[2] or 0) for bar in bars))

    def y(ms: float) -> float:
        return bottom - ms / ticks[-1] * (bottom - top)

    for tick in ticks:
        picture.line(left, y(tick), right, y(tick), GRID)
        picture.text(left - 10, y(tick) + 4, f"{tick:g} ms", 12, MUTED, "end")
    slot = (right - left) / len(bars)
    for index, (name, figure, bound) in enumerate(bars):
        x, width = left + slot * (index + 0.25), slot * 0.5
        median, p99 = 1e3 * figure["median"], 1e3 * figure["p99"]
        picture.rectangle(x, y(median), width, bottom - y(median), COLOURS[0])
        picture.line(x + width / 2, y(median), x + width / 2, y(p99), INK, 1.6)
        picture.line(x + width / 2 - 8, y(p99), x + width / 2 + 8, y(p99), INK, 1.6)
        if bound is not None:
            picture.line(x - 14, y(1e3 * bound), x + width + 14, y(1e3 * bound), COLOURS[1], 2.6, "6 4")
        picture.text(x + width + 6, y(median) + 14, f"{median:.0f} ms", 13, weight="600")
        picture.text(x + width / 2, bottom + 22, name.replace("_", " "), 14, INK, "middle")
    picture.line(left, bottom, right, bottom, MUTED, 1.2)
    picture.text(left, 466, "bar: median; whisker: 99th percentile; dashed: the bound by arithmetic", 12,
                 MUTED)
    return picture.svg()


def bound_of(ratios: Ratios, name: str) -> float | None:
    try:
        return None if name == "in_process" else ratios.bound_seconds(name)
    except Missing:
        return None


def draw_overlap(bench: dict) -> str:
    info = bench["raw"]["overlap"]["info"]
    transports = list(info["capacity"])
    picture = Picture(1080, HEAD + 360 * len(transports), "Exposed time", "From the last gradient to "
                      "the last shard in the worker's memory; medians. " + machine_line(bench))
    for row, transport in enumerate(transports):
        sizes: dict[str, list] = {}
        for entry in info["against_size"]:
            if entry["transport"] == transport:
                clip = "" if entry["clip"] == "none" else ", clipping on"
                sizes.setdefault(entry["update"] + clip, []).append(
                    (entry["parameters"] / 1e6, 1e3 * entry["exposed_seconds"]["median"]))
        paces: dict[str, list] = {}
        for entry in info["against_pace"]:
            if entry["transport"] == transport:
                paces.setdefault(entry["update"], []).append(
                    (entry["pace_fraction"], 1e3 * entry["exposed_seconds"]["median"]))
        top = HEAD + 360 * row
        if sizes:
            Panel(picture, (0, top, 560, 350), f"{transport}: at half the pace that the service takes",
                  "million parameters", "exposed, ms", sizes)
        if paces:
            Panel(picture, (560, top, 500, 350), f"{transport}: against pace",
                  f"pace, of {info['capacity'][transport] / 1e9:.2f} Gparam/s", "exposed, ms", paces,
                  log_x=False)
    return picture.svg()


def draw_growth(bench: dict) -> str:
    picture = Picture(1080, HEAD + 2 * 300, "How a step grows", "Medians; one job of the same size "
                      "everywhere but in the first panel, half as large with jobs. " + machine_line(bench))
    axes = ("parameters", "tensors", "groups", "ranks", "jobs")
    growth = bench["raw"]["growth"]["info"]["growth"]
    for index, axis in enumerate(axes):
        scale = 1e-6 if axis == "parameters" else 1
        line = [(scale * entry["value"], 1e3 * entry["total_seconds"]["median"])
                for entry in growth if entry["axis"] == axis]
        if line:
            Panel(picture, (360 * (index % 3), HEAD + 300 * (index // 3), 350, 290),
                  f"against {axis}", "million parameters" if axis == "parameters" else axis,
                  "step, ms", {axis: line})
    draw_memory(picture, bench["raw"]["growth"]["info"].get("memory", {}))
    return picture.svg()


def draw_memory(picture: Picture, memory: dict) -> None:
    left, top = 2 * 360 + LEFT, HEAD + 300 + TOP
    picture.text(left - 34, top - 20, "service's memory, bytes a parameter", 15, weight="600")
    most = max((kind["service_resident"] for kind in memory.values()), default=1)
    for index, (name, kind) in enumerate(memory.items()):
        y = top + 44 * index
        picture.text(left - 34, y + 12, name.replace("_", " "), 12, MUTED)
        picture.rectangle(left - 34, y + 18, 250 * max(0, kind["service_resident"]) / most, 12, COLOURS[0])
        picture.text(left + 224, y + 29, f"{kind['service_resident']:.2f}", 13, weight="600")


PICTURES = {"step": draw_step, "overlap": draw_overlap, "growth": draw_growth}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=pathlib.Path)
    flags = parser.parse_args()
    try:
        bench = json.loads((flags.out / "bench.json").read_text())
        for name, draw in PICTURES.items():
            temporary = flags.out / f"{name}.svg.tmp"
            temporary.write_text(draw(bench))
            os.replace(temporary, flags.out / f"{name}.svg")
    except (OSError, KeyError, TypeError, ValueError) as error:
        print(f"plot.py: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
