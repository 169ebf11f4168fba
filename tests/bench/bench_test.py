#!/usr/bin/env python3
"""The benchmarks' programs with tiny sizes: that they run, what they write, that the weights are the same
to the bit over every transport, and what bad input gets. Speed decides nothing here."""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

from processes import Service  # noqa: E402

BIN = pathlib.Path(os.environ["BALLAST_BIN_DIR"])
TRANSPORTS = ("in-process", "shared-memory", "unix", "tcp")
TIMES = {"total_seconds", "exposed_seconds", "pace_seconds", "place_seconds", "push_seconds",
         "decision_seconds", "weights_seconds", "update_seconds"}
INFO = {"options", "shared_memory", "weights_sha256", "norm", "clip_coefficient", "wall_seconds",
        "payload_bytes_up", "payload_bytes_down", "socket_bytes_up", "socket_bytes_down",
        "worker_cpu_seconds", "service_cpu_seconds", "cpu_seconds_per_gb", "worker_idle_memory",
        "worker_memory", "service_idle_memory", "service_memory", "service_resident_bytes_per_parameter",
        "admitted_bytes", "admitted_bytes_per_parameter", "speculated_chunks", "published_chunks",
        "redone_chunks", "speculation_unavailable"}


class Bench(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)

    def start(self, *words) -> subprocess.CompletedProcess:
        return subprocess.run([str(word) for word in words], capture_output=True, text=True,
                              env=os.environ | {"TMPDIR": str(self.dir)})

    def worker(self, **options) -> dict:
        path = self.dir / "worker.json"
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        done = self.start(BIN / "ballast-bench", "worker", *flags, "--json", path)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("weights sha256", done.stdout)
        # Nothing is left of a service of its own.
        self.assertEqual([left.name for left in self.dir.iterdir()], ["worker.json"])
        return json.loads(path.read_text())

    def test_what_tls_costs_is_measured(self):
        done = self.start(sys.executable, "-B", HERE / "tls.py", "--bin", BIN, "--parameters=100000", "--steps=2",
                          "--rounds=1", "--json", self.dir / "tls.json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("times the processor", done.stdout)
        figures = json.loads((self.dir / "tls.json").read_text())
        self.assertEqual(figures.keys(), {"plain", "tls"})
        self.assertTrue(all(figure > 0 for kind in figures.values() for figure in kind.values()))

    def test_every_transport_and_mode_ends_with_the_same_weights(self):
        hashes = {}
        for transport, update in itertools.product(TRANSPORTS, ("wait", "speculate")):
            with self.subTest(transport=transport, update=update):
                run = self.worker(transport=transport, update=update, parameters=1_000_000, steps=3)
                info = run["info"]
                hashes[transport, update] = info["weights_sha256"]
                self.assertEqual(run["figures"].keys(), TIMES)
                self.assertEqual(info.keys(), INFO)
                self.assertEqual(len(run["figures"]["total_seconds"]["samples"]), 3)
                self.assertEqual(info["shared_memory"], transport == "shared-memory")
                self.assertEqual(info["payload_bytes_up"], 3 * 2 * 1_000_448)  # Two groups, padded.
                self.assertGreaterEqual(info["admitted_bytes_per_parameter"],
                                        14 if update == "wait" else 26)
                self.check_processes(transport, info)
        self.assertEqual(len(set(hashes.values())), 1, hashes)
        other = self.worker(transport="unix", parameters=1_000_000, steps=3, seed=2)
        self.assertNotEqual(other["info"]["weights_sha256"], hashes["unix", "wait"])

    def test_client_of_torch_is_measured(self):
        path = self.dir / "torch_client.json"
        environment = HERE.parent / "client/python/torch_environment.py"
        done = self.start("/usr/bin/python3", "-B", environment, "--run", HERE / "torch_client.py", "--short",
                          "--rounds=1", "--parameters=150000", "--layers=1", "--width=64", "--vocabulary=100",
                          "--tokens=16", "--json", path)
        if done.returncode == 77:
            self.skipTest(done.stdout.strip())
        self.assertEqual(done.returncode, 0, done.stderr)
        measured = json.loads(path.read_text())
        info = measured["info"]
        rows = {f"{dtype}_{name}" for dtype in ("fp32", "bf16") for name in (
            "torch_fused", "torch_foreach", "ballast", "ballast_overlap", "ballast_overlap_weights", "ballast_both",
            "ballast_leaves_early")}
        rows |= {"bf16_torch_masters", *{"fp32_deepspeed", "bf16_deepspeed"} - info["not_measured"].keys()}
        self.assertEqual(info["in_force"].keys(), rows)
        self.assertEqual({key for key, figure in measured["figures"].items() if figure["unit"] == "s"}, {
            *(f"{row}_{part}_seconds" for row in rows for part in ("forward", "backward", "step", "iteration")),
            "session_step_seconds", "client_step_seconds", "copies_seconds", "backward_with_hooks_seconds",
            "backward_without_hooks_seconds"})
        self.assertGreater(info["client_to_session"], 0)

    def test_steps_divide_their_gradients_by_different_numbers(self):
        norms = [self.worker(transport="unix", parameters=100_000, warmup=0, steps=steps)["info"]["norm"]
                 for steps in (1, 2, 3, 4)]
        for norm, divisor in zip(norms, (1, 1.5, 2.25, 1)):
            self.assertAlmostEqual(norms[0] / norm, divisor, places=9)

    def test_gradient_that_counts_twice_in_every_step_changes_the_weights(self):
        hashes = {self.worker(transport="unix", parameters=64, tensors=1, groups=1, steps=3,
                              micro_steps=micro_steps)["info"]["weights_sha256"] for micro_steps in (1, 2)}
        self.assertEqual(len(hashes), 2)

    def check_processes(self, transport: str, info: dict):
        """What is known of the service's process and of the sockets."""
        inside = transport == "in-process"
        self.assertEqual(info["service_cpu_seconds"] is None, inside)
        self.assertEqual(info["service_memory"] is None, inside)
        if not inside:
            self.assertGreater(info["service_memory"]["total_bytes"], 14_000_000)
        shared = 4_001_792 if transport == "shared-memory" else 0  # bf16 both ways, whole pages.
        self.assertGreaterEqual(info["admitted_bytes"]["shared"], shared)
        if transport == "tcp":
            self.assertGreaterEqual(info["socket_bytes_up"], info["payload_bytes_up"])
            self.assertGreaterEqual(info["socket_bytes_down"], info["payload_bytes_down"])
        elif transport == "shared-memory":  # Only words, no values.
            self.assertLess(info["socket_bytes_up"], 20_000)
            self.assertLess(info["socket_bytes_down"], 20_000)
        else:
            self.assertIsNone(info["socket_bytes_up"])

    def test_ranks_jobs_micro_steps_and_clipping_end_with_the_same_weights(self):
        hashes = set()
        for transport, update in (("in-process", "wait"), ("shared-memory", "speculate"),
                                  ("unix", "speculate")):
            info = self.worker(transport=transport, update=update, parameters=300_001, tensors=7, groups=3,
                               ranks=3, jobs=2, micro_steps=2, clip="firing", steps=2, warmup=1)["info"]
            hashes.add(info["weights_sha256"])
            self.assertLess(info["clip_coefficient"], 0.2)
        self.assertEqual(len(hashes), 1)

    def test_pace_hides_what_it_can(self):
        run = self.worker(transport="shared-memory", parameters=500_000, pace=1e7, steps=2, micro_steps=2,
                          clip="not-firing", update="speculate")
        # Two micro-steps of 50 ms: the generator waited for most of the time, and that is not exposed.
        figures = run["figures"]
        self.assertGreaterEqual(figures["total_seconds"]["min"], 0.1)
        self.assertLess(figures["exposed_seconds"]["min"], figures["total_seconds"]["min"] - 0.09)
        self.assertGreater(figures["pace_seconds"]["min"], 0)
        self.assertEqual(run["info"]["clip_coefficient"], 1)
        self.assertGreater(run["info"]["published_chunks"], 0)

    def test_running_service_is_used_and_left_clean(self):
        service = Service(BIN / "ballastd", self.dir, "--holder=none", "--log-level=off")
        try:
            done = self.start(BIN / "ballast-bench", "worker", "--service", service.address, "--parameters", 1000,
                              "--tensors", 3, "--steps", 2)
            self.assertEqual(done.returncode, 0, done.stderr)
            listed = self.start(BIN / "ballast", "jobs", "--service", service.address)
            self.assertEqual(listed.returncode, 0, listed.stderr)
            self.assertNotIn("ballast-bench", listed.stdout)
        finally:
            service.stop()

    def test_bad_input_gets_one_line(self):
        for words, code, expected in (
                ((), 2, "expected 'ballast-bench worker"),
                (("worker", "--parameters=0"), 2, "--parameters"),
                (("worker", "--transport=pigeon"), 2, "pigeon"),
                (("worker", "--pace", "-1"), 2, "--pace"),
                (("worker", "--steps"), 2, "--steps"),
                (("worker", "--colour=red"), 2, "--colour"),
                (("worker", "red"), 2, "red"),
                (("worker", "--parameters=10", "--tensors=11"), 2, "11 tensors"),
                (("worker", "--service=nowhere"), 1, "nowhere"),
                (("worker", "--transport=in-process", "--parameters=1000", "--tensors=1", "--groups=1",
                  "--json=/no/such/folder/file"), 1, "/no/such/folder")):
            with self.subTest(words=words):
                done = self.start(BIN / "ballast-bench", *words)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
                self.assertIn(expected, done.stderr)

    def test_wire_has_all_figures(self):
        path = self.dir / "wire.json"
        done = self.start(BIN / "wire_bench", "--tiny", "--json", path)
        self.assertEqual(done.returncode, 0, done.stderr)
        expected = set()
        for family, way in itertools.product(("tcp", "unix"), ("up", "down", "both")):
            expected.add(f"grpc_to_raw_{family}_{way}")
            for wire, unit in itertools.product(("raw", "grpc"), ("gb_s", "cpu_s_per_gb")):
                expected.add(f"{wire}_{family}_{way}_{unit}")
        figures = json.loads(path.read_text())["figures"]
        self.assertEqual(figures.keys(), expected)
        for name, figure in figures.items():
            self.assertGreater(figure["median"], 0, name)

    def test_sweeps_write_what_the_report_needs(self):
        raw = self.dir / "raw"
        raw.mkdir()
        for sweep in ("step", "overlap", "growth"):
            done = self.start(sys.executable, "-B", HERE / "sweeps.py", sweep, "--tiny", "--bin", BIN, "--out",
                              raw / f"{sweep}.json")
            self.assertEqual(done.returncode, 0, done.stderr)
        some = {"median": 1, "min": 1, "max": 1, "unit": ""}
        for name in ("kernel", "wire"):
            (raw / f"{name}.json").write_text(json.dumps({"figures": {"some": some}, "info": {}}))
        for words in (("report.py", "--machine", raw / "machine.json"), ("report.py", "--out", self.dir),
                      ("plot.py", "--out", self.dir)):
            done = self.start(sys.executable, "-B", HERE / words[0], *words[1:])
            self.assertEqual(done.returncode, 0, done.stderr)
        bench = json.loads((self.dir / "bench.json").read_text())
        measured = {name for name, value in bench["ratios"].items() if value is not None}
        # On a busy machine every round over a transport may be disturbed, which the report then says.
        disturbed = {name for name, reason in bench["not_measured"].items() if "faster than its bound" in reason}
        steps = {"step_shared_memory", "step_unix", "step_tcp"}
        self.assertLessEqual(disturbed, steps)
        self.assertEqual(measured | disturbed, steps | {"exposed_flatness", "bytes_per_parameter"},
                         bench["not_measured"])

    def test_sweep_fails_in_one_line_when_its_program_does(self):
        done = self.start(sys.executable, "-B", HERE / "sweeps.py", "growth", "--tiny", "--bin", self.dir,
                          "--out", self.dir / "growth.json")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertIn("ballast-bench", done.stderr)
        self.assertFalse((self.dir / "growth.json").exists())


if __name__ == "__main__":
    unittest.main()
