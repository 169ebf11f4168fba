#!/usr/bin/env python3
"""report.py, plot.py and the arithmetic of sweeps.py on figures that can be computed by hand, and on files
that are not right."""

import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

import sweeps

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "support"))
from processes import start, stop  # noqa: E402


def figure(median: float, unit: str = "") -> dict:
    return {"median": median, "min": 0.9 * median, "max": 1.1 * median, "p99": 1.1 * median, "unit": unit}


def part(name: str, figures: dict, info: dict | None = None) -> dict:
    return {"name": name, "info": info or {}, "figures": {
        key: figure(value, "s" if key.endswith("_seconds") else "") for key, value in figures.items()}}


def exposed(transport: str, update: str, clip: str, parameters: int, seconds: float) -> dict:
    return {"transport": transport, "update": update, "clip": clip, "parameters": parameters,
            "pace": 1e9, "redone_chunks": 0, "speculated_chunks": 9, "speculation_unavailable": "", "exposed_seconds": figure(seconds), "total_seconds": figure(2 * seconds)}


def run(sha256: str, **options) -> dict:
    return {"weights_sha256": sha256, "options": {
        "transport": "tcp", "update": "wait", "clip": "none", "pace": 0, "threads": 0,
        "parameters": 1000, "steps": 3, "warmup": 1, "seed": 1} | options}


def step_round(slower: float, **more) -> dict:
    passes = {f"{transport}_{key}": speed / slower for transport in ("shared_memory", "unix", "tcp")
              for key, speed in (("update_gparam_s", 4.0), ("norm_gparam_s", 20 / 3))}
    return passes | {
        "grpc_unix_up_gb_s": 2.5 / slower, "grpc_unix_up_cpu_s_per_gb": 0.9 * slower,
        "grpc_unix_down_gb_s": 4.0 / slower, "grpc_unix_down_cpu_s_per_gb": 0.3 * slower,
        "grpc_tcp_up_gb_s": 5.0 / slower, "grpc_tcp_up_cpu_s_per_gb": 0.2 * slower,
        "grpc_tcp_down_gb_s": 1.0 / slower, "grpc_tcp_down_cpu_s_per_gb": 0.2 * slower,
        "raw_unix_up_gb_s": 5 / slower, "raw_unix_up_cpu_s_per_gb": 0.45 * slower,
        "raw_unix_down_gb_s": 8 / slower, "raw_unix_down_cpu_s_per_gb": 0.15 * slower,
        "raw_tcp_up_gb_s": 5.0 / slower, "raw_tcp_up_cpu_s_per_gb": 0.2 * slower,
        "raw_tcp_down_gb_s": 1.0 / slower, "raw_tcp_down_cpu_s_per_gb": 0.2 * slower,
        "in_process": 0.1 * slower,
        "shared_memory": 0.044 * slower, "unix": 0.192 * slower, "tcp": 0.264 * slower} | more


def good_parts() -> dict[str, dict]:
    against_size = [exposed("shared-memory", "speculate", "not-firing", 10_000_000, 0.002),
                    exposed("shared-memory", "speculate", "not-firing", 40_000_000, 0.0024),
                    exposed("shared-memory", "speculate", "not-firing", 400_000_000, 0.003),
                    # Not what exposed_flatness is about.
                    exposed("shared-memory", "wait", "not-firing", 10_000_000, 0.010),
                    exposed("shared-memory", "speculate", "none", 10_000_000, 0.001),
                    exposed("unix", "speculate", "not-firing", 10_000_000, 0.050)]
    growth = [{"axis": axis, "value": value, "total_seconds": figure(0.01 * value),
               "parameters": 10, "admitted_bytes_per_parameter": 14}
              for axis in ("parameters", "tensors", "groups", "ranks", "jobs") for value in (1, 4)]
    return {
        "kernel": part("kernel", {"kernel_to_roofline_all_threads": 0.96, "denormals_ratio": 1.05,
                                  "tensors_3000_ratio": 1.02, "kernel_all_threads_gparam_s": 2.0}),
        "torch_adamw": part("torch_adamw", {"torch_flat_gparam_s": 0.2, "torch_flat_foreach_gparam_s": 0.3,
                                            "torch_100_gparam_s": 0.4, "torch_100_foreach_gparam_s": 0.5}),
        "torch_adamw_tuned": part("torch_adamw", {
            "torch_flat_gparam_s": 0.1, "torch_flat_foreach_gparam_s": 0.1, "torch_100_gparam_s": 0.1,
            "torch_100_foreach_gparam_s": 0.6}),
        "kernel_before_torch": part("kernel", {"kernel_all_threads_gparam_s": 2.2}),
        "kernel_after_torch": part("kernel", {"kernel_all_threads_gparam_s": 2.6}),
        "wire": part("wire", {"grpc_to_raw_tcp_up": 0.9, "grpc_to_raw_tcp_down": 0.95,
                              "grpc_to_raw_tcp_both": 0.88}),
        "step": part("step", {"step_shared_memory_100m_seconds": 0.044, "step_unix_100m_seconds": 0.150,
                              "step_tcp_100m_seconds": 0.230},
                     {"parameters": 100_000_000, "runs": [run("aa"), run("aa", transport="unix")],
                      # The machine was half as fast in the second of these, with all that it did.
                      "rounds": [step_round(1), step_round(2), step_round(1, tcp=9.0)]}),
        "overlap": part("overlap", {}, {
            "against_size": against_size, "flatness_sizes": [10_000_000, 40_000_000, 400_000_000],
            "capacity": {"shared-memory": 2e9}, "skipped": ["1B: no room"],
            "runs": [run("aa", update="speculate", clip="not-firing", pace=1e9), run("bb", clip="firing")],
            "against_pace": [exposed("shared-memory", "wait", "none", 10, 0.1) | {"pace_fraction": 0.5}]}),
        "growth": part("growth", {"memory_one_micro_step_service_resident": 14.1,
                                  "step_tensors_3000_ratio": 1.025},
                       {"growth": growth, "memory": {"one_micro_step": {"service_resident": 14.1}}}),
    }


MACHINE = {"cpu": "a <processor>", "cores": 2, "memory_bytes": 24 << 30, "kernel": "6.1",
           "transparent_huge_pages": "always [madvise] never"}


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name)
        (self.out / "raw").mkdir()
        self.parts = good_parts()

    def run_script(self, name: str):
        for old in (self.out / "raw").iterdir():
            old.unlink()
        (self.out / "raw" / "machine.json").write_text(json.dumps(MACHINE))
        for part_name, content in self.parts.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (self.out / "raw" / f"{part_name}.json").write_text(text)
        return subprocess.run([sys.executable, "-B", HERE / name, "--out", self.out],
                              capture_output=True, text=True, timeout=60)

    def report(self) -> dict:
        done = self.run_script("report.py")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads((self.out / "bench.json").read_text())

    def fails_with(self, *words: str):
        done = self.run_script("report.py")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertFalse((self.out / "bench.json").exists())

    def test_ratios_are_those_computed_by_hand(self):
        bench = self.report()
        expected = {
            "kernel_to_roofline": 0.96, "denormals": 1.05, "tensors_3000": 1.025, "grpc_to_raw_tcp": 0.88,
            "kernel_to_torch_best": 2.4 / 0.6,
            "step_shared_memory": 0.044 / 0.040,  # 100M at 2.5 Gparam/s, the faster.
            # Up 0.2 GB x 0.9 CPU-s/GB / 2 = 90 ms, more than 0.2 GB / 2.5 GB/s = 80; down 40 ms and
            # 0.2 GB x 0.3 CPU-s/GB / 2 = 30 ms, more than 0.2 GB / 4 GB/s = 50.
            "step_unix": 0.192 / 0.160,
            # Up 0.2 GB / 5 GB/s = 40 ms, more than 20; down 0.2 GB / 1 GB/s = 200 ms, more than 40 + 20.
            "step_tcp": 0.264 / 0.240,
            "exposed_flatness": 0.003 / 0.002, "bytes_per_parameter": 14.1}
        self.assertEqual(list(bench["ratios"]), list(bench["goals"]))
        self.assertEqual(bench["ratios"].keys(), expected.keys())
        for name, value in expected.items():
            self.assertAlmostEqual(bench["ratios"][name], value, msg=name)
        self.assertEqual(bench["not_measured"], {})
        self.assertEqual(bench["raw"], self.parts)
        self.assertEqual(bench["runs_with_equal_weights"], 3)  # Nothing trained as the clipped one did.
        self.assertEqual(bench["rounds_not_used"], {"shared_memory": 0, "unix": 0, "tcp": 0})

    def test_the_worse_of_update_and_step_counts_for_many_tensors(self):
        self.parts["kernel"]["figures"]["tensors_3000_ratio"] = figure(1.2)
        self.assertEqual(self.report()["ratios"]["tensors_3000"], 1.2)

    def test_round_faster_than_its_bound_is_not_used_and_counted(self):
        rounds = self.parts["step"]["info"]["rounds"]
        rounds[0]["unix"] = 0.96 * 0.160
        rounds[1]["unix"] = 2 * 0.98 * 0.160
        rounds[2]["unix"] = 1.1 * 0.160
        for one in rounds:
            one["tcp"] = 0.1
        bench = self.report()
        self.assertAlmostEqual(bench["ratios"]["step_unix"], (0.98 + 1.1) / 2)
        self.assertIsNone(bench["ratios"]["step_tcp"])
        self.assertIn("all 3 rounds", bench["not_measured"]["step_tcp"])
        self.assertEqual(bench["rounds_not_used"], {"shared_memory": 0, "unix": 1, "tcp": 3})
        self.assertIn("1 over unix, 3 over tcp", (self.out / "report.md").read_text())

    def test_flatness_needs_every_size_and_every_provisional_update(self):
        def without(size):
            info = self.parts["overlap"]["info"]
            info["against_size"] = [entry for entry in info["against_size"] if entry["parameters"] != size]

        def spoil(**values):
            self.parts["overlap"]["info"]["against_size"][1].update(values)
        for spoiled in (lambda: without(400_000_000), lambda: without(10_000_000),
                        lambda: spoil(redone_chunks=1), lambda: spoil(speculation_unavailable="no room"),
                        lambda: spoil(speculated_chunks=0),
                        lambda: self.parts["overlap"]["info"]["flatness_sizes"].pop(),
                        lambda: self.parts["overlap"]["info"].pop("flatness_sizes")):
            self.parts = good_parts()
            spoiled()
            self.assertIn("exposed_flatness", self.report()["not_measured"])

    def test_weights_that_were_never_compared_fail(self):
        for content in self.parts.values():
            for i, one in enumerate(content["info"].get("runs", [])):
                one["options"]["seed"] = (content["name"], i)
        self.fails_with("no weights were compared")

    def test_table_names_the_machine_and_every_figure(self):
        self.report()
        text = (self.out / "report.md").read_text()
        for expected in ("a <processor>", "2 cores, 24 GiB, Linux 6.1", "| ratio | step_unix | **1.200** |",
                         "| step | bound over unix | 160 |", "| step | step_unix_100m | 150 | 135 to 165",
                         "1B: no room"):
            self.assertIn(expected, text)

    def test_what_was_not_measured_is_null_with_a_reason(self):
        del self.parts["torch_adamw"]
        del self.parts["step"]["info"]["rounds"][1]["grpc_unix_up_gb_s"]
        self.parts["overlap"]["info"]["against_size"] = []
        bench = self.report()
        missing = {name for name, value in bench["ratios"].items() if value is None}
        self.assertEqual(missing, {"kernel_to_torch_best", "step_unix", "exposed_flatness"})
        self.assertEqual(bench["not_measured"].keys(), missing)
        self.assertIn("grpc_unix_up_gb_s", bench["not_measured"]["step_unix"])

    def test_missing_file_is_named_in_one_line(self):
        for name in ("kernel", "wire", "step", "overlap", "growth"):
            with self.subTest(missing=name):
                self.parts = good_parts()
                del self.parts[name]
                self.fails_with(f"{name}.json", "No such file")

    def test_malformed_file_is_named_in_one_line(self):
        for broken in ("{", "[]", "{}", '{"figures": []}', '{"figures": {"a": 1}}',
                       '{"figures": {}, "info": 1}', '{"figures": {}, "info": {"runs": [1]}}',
                       '{"figures": {}, "info": {"runs": 1}}'):
            with self.subTest(text=broken):
                self.parts = good_parts() | {"step": broken}
                self.fails_with()

    def test_figure_without_a_finite_number_is_refused(self):
        for value in (None, "1", True, float("nan"), float("inf")):
            with self.subTest(value=value):
                self.parts = copy.deepcopy(good_parts())
                self.parts["wire"]["figures"]["grpc_to_raw_tcp_up"]["median"] = value
                self.fails_with("wire.json", "grpc_to_raw_tcp_up")

    def test_different_weights_of_the_same_training_fail(self):
        self.parts["step"]["info"]["runs"].append(run("cc", transport="shared-memory"))
        self.fails_with("the weights differ", "shared-memory")

    def test_weights_of_different_trainings_may_differ(self):
        self.parts["step"]["info"]["runs"] += [run("cc", parameters=2000), run("dd", steps=4)]
        self.report()

    def test_pictures_are_drawn(self):
        self.report()
        done = self.run_script("plot.py")
        self.assertEqual(done.returncode, 0, done.stderr)
        for name, words in (("step", "150 ms"), ("overlap", "shared-memory: against pace"),
                            ("growth", "against ranks")):
            text = (self.out / f"{name}.svg").read_text()
            xml.etree.ElementTree.fromstring(text)
            self.assertIn(words, text)


class Run(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)

    def start(self, *words):
        return subprocess.run([HERE / "run.sh", *words], capture_output=True, text=True, timeout=60,
                              env=os.environ | {"BALLAST_BIN_DIR": str(self.dir)})

    def test_bad_arguments_get_one_line(self):
        for words, expected in (((), "--out"), (("--out",), "--out"), (("--fast",), "--fast"),
                                (("--out", "/proc/no/such"), "/proc/no/such")):
            with self.subTest(words=words):
                done = self.start(*words)
                self.assertEqual(done.returncode, 1)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
                self.assertIn(expected, done.stderr)

    def test_what_a_part_has_started_ends_with_the_script(self):
        alive = self.dir / "alive"
        os.mkfifo(alive)
        program = self.dir / "kernel_bench"
        program.write_text(f"#!/bin/sh\nexec 3>{alive}\necho begun >&3\nsleep 300\n")
        program.chmod(0o755)
        script = start([HERE / "run.sh", "--short", "--no-torch", "--out", self.dir / "out"], os.devnull,
                       environment={"BALLAST_BIN_DIR": str(self.dir)})
        try:
            with open(alive) as file:
                self.assertEqual(file.readline(), "begun\n")
                script.terminate()
                self.assertEqual(script.wait(timeout=30), 143)
                self.assertEqual(file.read(), "")  # The end: every process that could write is gone.
        finally:
            stop(script)

    def test_part_that_fails_is_named_and_nothing_old_is_left(self):
        program = self.dir / "kernel_bench"
        program.write_text("#!/bin/sh\necho no memory >&2\nexit 3\n")
        program.chmod(0o755)
        out = self.dir / "out"
        (out / "raw").mkdir(parents=True)
        for old in ("bench.json", "raw/wire.json"):
            (out / old).write_text("{}")
        done = self.start("--short", "--no-torch", "--out", str(out))
        self.assertEqual(done.returncode, 1)
        self.assertIn("run.sh: kernel failed: no memory", done.stderr)
        self.assertEqual(sorted(file.name for file in out.iterdir()), ["raw"])
        self.assertEqual(sorted(file.name for file in (out / "raw").iterdir()),
                         ["kernel.log", "machine.json"])


class Sweeps(unittest.TestCase):
    def test_statistics_are_those_of_the_samples(self):
        samples = [float(i) for i in range(200, 0, -1)]
        self.assertEqual(sweeps.quantile(samples, 0.99), 198)
        self.assertEqual(sweeps.quantile([7.0], 0.99), 7)
        self.assertEqual(sweeps.median(samples), 100.5)
        self.assertEqual(sweeps.median([3, 1, 2]), 2)

    def test_rounds_are_taken_together_if_their_weights_are_the_same(self):
        def worker(sha256: str, *samples: float) -> dict:
            return {"name": "worker", "info": {"weights_sha256": sha256, "options": {}},
                    "figures": {"total_seconds": sweeps.figure(samples, "s") | {"samples": list(samples)},
                                "push_seconds": figure(2, "s")}}
        first = sweeps.merged(None, worker("aa", 1, 2))
        both = sweeps.merged(first, worker("aa", 6))
        self.assertEqual(both["round_seconds"], [1.5, 6])
        self.assertEqual(both["figures"]["total_seconds"]["samples"], [1, 2, 6])
        self.assertEqual(both["figures"]["total_seconds"]["median"], 2)
        with self.assertRaisesRegex(sweeps.Failed, "different weights"):
            sweeps.merged(first, worker("bb", 1))

    def test_memory_is_the_difference_of_two_sizes(self):
        def info(elements: int) -> dict:
            memory = {"total_bytes": 50_000_000 + 14 * elements, "anonymous_bytes": 12 * elements,
                      "shared_bytes": 2 * elements}
            return {"service_memory": memory, "worker_memory": memory,
                    "admitted_bytes": {"total": 14 * elements, "shared": 0}}
        slopes = sweeps.memory_slopes((1000, info(1000)), (5000, info(5000)))
        self.assertEqual(slopes, {"service_resident": 14, "service_anonymous": 12, "service_shared": 2,
                                  "worker_resident": 14, "admitted": 14, "shared_said": 0})


if __name__ == "__main__":
    unittest.main()
