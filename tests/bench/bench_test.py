#!/usr/bin/env python3
"""The benchmarks' programs with tiny sizes: that they run, what they write, and that the weights are the same
to the bit over every transport. Speed decides nothing here."""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
BIN = pathlib.Path(os.environ["BALLAST_BIN_DIR"])
TRANSPORTS = ("in-process", "shared-memory", "unix", "tcp")
TIMES = {"total_seconds", "exposed_seconds", "pace_seconds", "place_seconds", "push_seconds",
         "decision_seconds", "round_seconds", "weights_seconds", "update_seconds", "round_trip_seconds"}
INFO = {"options", "shared_memory", "members", "weights_sha256", "norm", "clip_coefficient", "wall_seconds",
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

    def test_the_lead_reads_all_words_and_answers_every_member(self):
        done = self.start(BIN / "ballast-bench", "lead")
        self.assertEqual(done.returncode, 0, done.stderr)
        runs = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual({run["info"]["members"] for run in runs}, {2, 8, 64})
        for run in runs:
            figures, info = run["figures"], run["info"]
            # An update count for each tensor to each member, and the elements of half a block for each cut one.
            self.assertGreater(figures["bytes_out"]["median"], info["members"] * info["parameters"] * 8)
            self.assertGreater(figures["bytes_in"]["median"], info["members"] * info["cut_blocks"] * 128 * 4)

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

    def test_state_in_fewer_bytes_ends_with_the_same_weights_over_each_transport(self):
        options = {"parameters": 4_096_000, "steps": 3}  # Tensors of whole blocks: no padding.
        fp32 = self.worker(transport="tcp", **options)["info"]
        for state, saved_bytes in (("bf16", 4), ("8bit", 12 - 6.125)):
            with self.subTest(state=state):
                runs = [self.worker(transport=transport, state=state, **options)["info"]
                        for transport in ("shared-memory", "tcp")]
                self.assertEqual({run["options"]["state"] for run in runs}, {state})
                self.assertEqual(len({run["weights_sha256"] for run in runs}), 1)
                self.assertAlmostEqual(fp32["admitted_bytes_per_parameter"] - runs[1]["admitted_bytes_per_parameter"],
                                       saved_bytes, delta=0.02)
        done = self.start(BIN / "ballast-bench", "worker", "--state=8bit", "--parameters=1000000", "--tensors=1000")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("4096 elements", done.stderr)

    def test_muons_rounds_end_with_the_same_weights_over_each_transport(self):
        hashes = {}
        for transport in TRANSPORTS:
            run = self.worker(transport=transport, rule="muon", parameters=1_000_000, steps=3)
            info = run["info"]
            hashes[transport] = info["weights_sha256"]
            self.assertGreater(run["figures"]["round_seconds"]["median"], 0)
            # Directions and O beside gradients and weights.
            self.assertEqual(info["payload_bytes_up"], 2 * 3 * 2 * 1_000_448)
            if transport == "shared-memory":
                self.assertLess(info["socket_bytes_up"] + info["socket_bytes_down"], 60_000)
        self.assertEqual(len(set(hashes.values())), 1, hashes)

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

    def test_two_builds_are_compared(self):
        done = self.start(sys.executable, "-B", HERE / "run.py", "--before", BIN, "--parameters=500000", "--rounds=1",
                          "--steps=2", "--json", self.dir / "samples.json", BIN)
        self.assertEqual(done.returncode, 0, done.stderr)
        samples = json.loads((self.dir / "samples.json").read_text())
        self.assertEqual(samples.keys(), {"before", "after"})
        self.assertEqual(len(samples["after"]["total_seconds"]["TCP"]), 2)
        self.assertEqual(samples["after"]["update, Gparam/s"].keys(), {"AdamW", "AdamW bf16", "AdamW 8bit"})
        self.assertEqual(len(samples["after"]), 5)

    def test_two_services_are_compared_with_one(self):
        done = self.start(sys.executable, "-B", HERE / "members.py", "--parameters=300000", "--rounds=1", "--steps=2",
                          "--json", self.dir / "samples.json", BIN)
        self.assertEqual(done.returncode, 0, done.stderr)
        samples = json.loads((self.dir / "samples.json").read_text())
        self.assertEqual(samples.keys(), {"step", "tiny step"})
        for cases in samples.values():
            self.assertEqual(len(cases), 4)
            for by_members in cases.values():
                self.assertEqual(by_members.keys(), {"1", "2", "round trip"})

    def test_more_services_than_ranks_are_refused(self):
        done = self.start(BIN / "ballast-bench", "worker", "--members=2", "--parameters=1000", "--tensors=2")
        self.assertEqual(done.returncode, 1)
        self.assertIn("2 services are named for 1 rank", done.stderr)


if __name__ == "__main__":
    unittest.main()
