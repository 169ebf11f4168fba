#!/usr/bin/env python3
"""Draws what recovery_bench.py has measured: a bar for each size of state and kind of death, made of its parts.

    recovery_picture.py FIGURES.json PICTURE.svg

Needs nothing beyond the standard library.
"""

import argparse
import json
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "deploy"))

from svg import GRID, INK, MUTED, Picture, nice_ticks  # noqa: E402
from whole_file import write_whole  # noqa: E402

# In the order in which they follow each other, with what happens in each.
PARTS = {"noticed": ("the death is noticed", "#1d5fbf"),
         "taken over": ("memory is mapped, a decided step redone", "#2a9d6f"),
         "listening": ("the service listens", "#e07b1a"),
         "streams": ("streams are back", "#a23b72")}
TOGETHER = "together"
LEFT, RIGHT, TOP, BAR, GAP, BOTTOM, WIDTH = 190, 90, 128, 26, 16, 60, 960
PIXELS_A_CHARACTER = 6.2  # Of text of size 12, about.


def seconds_per_terabyte(figures):
    """By kind of death and part, how much longer each terabyte makes it: the slope of the line that fits the figures
    best, of two sizes at least. {"between steps": {part: seconds, ..., "together": seconds}}"""
    by_kind = {}
    for name, parts in figures.items():
        size, kind = name.split(" GB, ")
        by_kind.setdefault(kind, []).append((float(size) / 1000, parts))
    rates = {}
    for kind, sizes in by_kind.items():
        mean = sum(size for size, _ in sizes) / len(sizes)
        spread = sum((size - mean) ** 2 for size, _ in sizes)
        if spread > 0:
            rates[kind] = {part: sum((size - mean) * parts[part] for size, parts in sizes) / spread
                           for part in (*PARTS, TOGETHER)}
    return rates


def seconds_text(seconds):
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def draw_legend(picture):
    x = LEFT
    for words, colour in PARTS.values():
        picture.rectangle(x, 86, 12, 12, colour)
        picture.text(x + 18, 96, words, 12)
        x += 18 + PIXELS_A_CHARACTER * len(words) + 22


def draw(figures, subtitle=""):
    """The picture of figures {"1 GB, between steps": {part: seconds, ..., "together": seconds}}, top to bottom. A bar
    is as long as its parts are together; the number beside it is the median of all deaths, which medians of parts need
    not add up to. ValueError: there are none, or one is not a time."""
    if not figures:
        raise ValueError("there are no figures")
    for name, parts in figures.items():
        for part in (*PARTS, TOGETHER):
            if not (isinstance(parts[part], (int, float)) and math.isfinite(parts[part]) and parts[part] >= 0):
                raise ValueError(f"{name}: {part} is {parts[part]!r}, which is no time")
    picture = Picture(WIDTH, TOP + len(figures) * (BAR + GAP) + BOTTOM)
    picture.text(30, 40, "Away after the service's process dies", 22, weight="600")
    picture.text(30, 66, subtitle, 14, MUTED)
    draw_legend(picture)
    longest = max(sum(parts[part] for part in PARTS) for parts in figures.values())
    ticks = nice_ticks(0, max(longest, 1e-3), count=6)
    bottom = picture.height - BOTTOM

    def x_of(seconds):
        return LEFT + seconds / ticks[-1] * (WIDTH - LEFT - RIGHT)

    for tick in ticks:
        picture.line(x_of(tick), TOP - 12, x_of(tick), bottom, GRID)
        picture.text(x_of(tick), bottom + 18, f"{tick:g}", 12, MUTED, "middle")
    picture.text(x_of(ticks[-1] / 2), bottom + 40, "seconds", 12, MUTED, "middle")
    for row, (name, parts) in enumerate(figures.items()):
        y, begin = TOP + row * (BAR + GAP), 0.0
        picture.text(LEFT - 12, y + 18, name, 13, INK, "end")
        for part, (_, colour) in PARTS.items():
            picture.rectangle(x_of(begin), y, x_of(begin + parts[part]) - x_of(begin), BAR, colour)
            begin += parts[part]
        picture.text(x_of(begin) + 8, y + 18, seconds_text(parts[TOGETHER]), 13, weight="600")
    return picture.svg()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path)
    flags = parser.parse_args()
    try:
        measured = json.loads(flags.figures.read_text())
        write_whole(flags.picture, draw(measured["figures"], measured.get("machine", "")))
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        print(f"recovery_picture.py: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
