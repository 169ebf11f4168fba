#!/usr/bin/env python3
"""Draws step.svg, overlap.svg and growth.svg from DIR/bench.json.

    plot.py --out DIR

Needs nothing beyond the standard library.
"""

import argparse
import json
import math
import pathlib
import sys

from report import Missing, Ratios

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "deploy"))

from svg import INK, MUTED, Axes, Picture, nice_ticks  # noqa: E402
from whole_file import write_whole  # noqa: E402

COLOURS = ("#1d5fbf", "#e07b1a")
LINE_COLOURS = {"speculate": "#1d5fbf", "speculate, clipping on": "#2a9d6f", "wait": "#e07b1a",
                "wait, clipping on": "#a23b72"}
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 46, 52  # Margins of a panel.
HEAD = 92  # Of a picture, for its title.


def titled(width: int, height: int, title: str, subtitle: str) -> Picture:
    picture = Picture(width, height)
    picture.text(30, 40, title, 22, weight="600")
    picture.text(30, 66, subtitle, 14, MUTED)
    return picture


def ticks_from_zero(high: float) -> list[float]:
    return nice_ticks(0, max(high, 1e-3), count=5)


def draw_panel(picture: Picture, place: tuple, title: str, x_label: str, y_label: str,
               series: dict[str, list[tuple]], log_x: bool = True):
    """Lines over x, from 0 up, in a part of a picture."""
    left, top, width, height = place
    points = [point for line in series.values() for point in line]
    xs = sorted({x for x, _ in points})
    axes = Axes(picture, left + LEFT, top + TOP, left + width - RIGHT, top + height - BOTTOM,
                (xs[0], xs[-1]), ticks_from_zero(max(y for _, y in points)), log_x, inset=12)
    picture.text(axes.left - 34, axes.top - 20, title, 15, weight="600")
    axes.grid(12, 8)
    axes.names(x_label, y_label, 12, 38, 46)
    last = -math.inf
    for value in xs:
        if axes.x(value) - last >= 30:
            last = axes.x(value)
            picture.text(last, axes.bottom + 18, f"{value:g}", 12, MUTED, "middle")
    for index, (label, line) in enumerate(series.items()):
        colour = LINE_COLOURS.get(label, COLOURS[0])
        drawn = axes.points(sorted(line))
        picture.curve(drawn, colour, 2.4)
        for x, y in drawn:
            picture.dot(x, y, colour, 3.4)
        if len(series) > 1:
            y = axes.top + 6 + 17 * index
            picture.line(axes.left + 14, y, axes.left + 34, y, colour, 3)
            picture.text(axes.left + 40, y + 4, label, 12)


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
    picture = titled(860, 480, f"A step of {millions} million parameters", machine_line(bench))
    axes = Axes(picture, 84, HEAD + 20, 830, 420, (0, len(bars)),
                ticks_from_zero(max(1e3 * max(bar[1]["p99"], bar[2] or 0) for bar in bars)))
    axes.grid(12, 10, " ms")
    slot = axes.x(1) - axes.x(0)
    for index, (name, figure, bound) in enumerate(bars):
        x, width = axes.x(index + 0.25), slot * 0.5
        median, p99 = 1e3 * figure["median"], 1e3 * figure["p99"]
        picture.rectangle(x, axes.y(median), width, axes.bottom - axes.y(median), COLOURS[0])
        picture.line(x + width / 2, axes.y(median), x + width / 2, axes.y(p99), INK, 1.6)
        picture.line(x + width / 2 - 8, axes.y(p99), x + width / 2 + 8, axes.y(p99), INK, 1.6)
        if bound is not None:
            picture.line(x - 14, axes.y(1e3 * bound), x + width + 14, axes.y(1e3 * bound), COLOURS[1], 2.6, "4 6")
        picture.text(x + width + 6, axes.y(median) + 14, f"{median:.0f} ms", 13, weight="600")
        picture.text(x + width / 2, axes.bottom + 22, name.replace("_", " "), 14, INK, "middle")
    picture.text(axes.left, 466, "bar: median; whisker: 99th percentile; dashed: the bound by arithmetic", 12,
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
    picture = titled(1080, HEAD + 360 * len(transports), "Exposed time", "From the last gradient to "
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
            draw_panel(picture, (0, top, 560, 350), f"{transport}: at half the pace that the service takes",
                       "million parameters", "exposed, ms", sizes)
        if paces:
            draw_panel(picture, (560, top, 500, 350), f"{transport}: against pace",
                       f"pace, of {info['capacity'][transport] / 1e9:.2f} Gparam/s", "exposed, ms", paces,
                       log_x=False)
    return picture.svg()


def draw_growth(bench: dict) -> str:
    picture = titled(1080, HEAD + 2 * 300, "How a step grows", "Medians; one job of the same size "
                     "everywhere but in the first panel, half as large with jobs. " + machine_line(bench))
    axes = ("parameters", "tensors", "groups", "ranks", "jobs")
    growth = bench["raw"]["growth"]["info"]["growth"]
    for index, axis in enumerate(axes):
        scale = 1e-6 if axis == "parameters" else 1
        line = [(scale * entry["value"], 1e3 * entry["total_seconds"]["median"])
                for entry in growth if entry["axis"] == axis]
        if line:
            draw_panel(picture, (360 * (index % 3), HEAD + 300 * (index // 3), 350, 290),
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
            write_whole(flags.out / f"{name}.svg", draw(bench))
    except (OSError, KeyError, TypeError, ValueError) as error:
        print(f"plot.py: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
