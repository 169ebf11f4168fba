#!/usr/bin/env python3
"""recovery_picture.py on figures that are made up, whose bars can be measured."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import recovery_picture  # noqa: E402
from recovery_picture import PARTS, draw  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
FIGURES = {"1 GB, between steps": dict(zip((*PARTS, "together"), (0.1, 0.02, 0.03, 0.05, 0.21))),
           "10 GB, in an update": dict(zip((*PARTS, "together"), (0.8, 0.2, 0.0, 0.4, 1.5)))}


def bars(text):
    """By row, top to bottom, the bars' colours, and where they begin and how long they are, in pixels."""
    rows = {}
    for rectangle in xml.etree.ElementTree.fromstring(text).iter(f"{SVG}rect"):
        if float(rectangle.get("height", 0)) == recovery_picture.BAR:
            rows.setdefault(float(rectangle.get("y")), []).append(
                (rectangle.get("fill"), float(rectangle.get("x")), float(rectangle.get("width"))))
    return [rows[y] for y in sorted(rows)]


class RecoveryPictureTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_script(self, figures):
        path = self.folder / "figures.json"
        path.write_text(figures)
        return subprocess.run([sys.executable, "-B", HERE / "recovery_picture.py", path, self.folder / "picture.svg"],
                              capture_output=True, text=True, timeout=60, check=False)

    def test_bars_are_as_long_as_their_parts_one_after_the_other(self):
        rows = bars(draw(FIGURES))
        self.assertEqual(len(rows), 2)
        pixels_a_second = sum(width for _, _, width in rows[1]) / 1.4
        for row, parts in zip(rows, FIGURES.values()):
            self.assertEqual([colour for colour, _, _ in row], [colour for _, colour in PARTS.values()])
            end = recovery_picture.LEFT
            for (_, begin, width), part in zip(row, PARTS):
                self.assertAlmostEqual(begin, end, delta=0.2)
                self.assertAlmostEqual(width, pixels_a_second * parts[part], delta=0.3)
                end = begin + width
            self.assertLess(end, recovery_picture.WIDTH - recovery_picture.RIGHT + 1)

    def test_a_terabyte_takes_what_the_sizes_say_together(self):
        def parts(*seconds):
            return dict(zip((*PARTS, "together"), seconds))

        figures = {f"{size:g} GB, in an update": parts(0.1, 0.02 * size + noise, 0, 0.05 * size, 0.1 + 0.07 * size)
                   for size, noise in ((1, 0.01), (2, -0.02), (3, 0.01))}
        rates = recovery_picture.seconds_per_terabyte({**figures, "1 GB, between steps": parts(1, 1, 1, 1, 4)})
        self.assertEqual(list(rates), ["in an update"])  # Of one size alone there is none.
        for part, expected in zip((*PARTS, "together"), (0, 20, 0, 50, 70)):
            self.assertAlmostEqual(rates["in an update"][part], expected)

    def test_it_says_what_was_measured(self):
        picture = xml.etree.ElementTree.fromstring(draw(FIGURES, "Some CPU"))
        texts = [element.text for element in picture.iter(f"{SVG}text")]
        for expected in ("Some CPU", "1 GB, between steps", "210 ms", "10 GB, in an update", "1.50 s", "seconds",
                         *(words for words, _ in PARTS.values())):
            self.assertIn(expected, texts)

    def test_the_file_that_the_bench_writes_is_drawn(self):
        done = self.run_script(json.dumps({"name": "recovery_bench", "machine": "Some CPU", "figures": FIGURES}))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual((self.folder / "picture.svg").read_text(), draw(FIGURES, "Some CPU"))

    def test_what_are_no_figures_gets_one_line_and_no_picture(self):
        lacking = {"1 GB": {part: 1 for part in PARTS}}
        for figures in ("", "[]", '{"figures": {}}', json.dumps({"figures": lacking}),
                        json.dumps({"figures": {"1 GB": {**FIGURES["1 GB, between steps"], "streams": -1}}}),
                        json.dumps({"figures": {"1 GB": {**FIGURES["1 GB, between steps"], "streams": float("nan")}}})):
            with self.subTest(figures=figures):
                done = self.run_script(figures)
                self.assertEqual(done.returncode, 1)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
                self.assertFalse((self.folder / "picture.svg").exists())


if __name__ == "__main__":
    unittest.main()
