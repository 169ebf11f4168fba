#!/usr/bin/env python3
"""The programs of client/python/examples, small and for a few steps."""

import csv
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "client/python/examples"
sys.path.insert(0, str(ROOT / "client/python"))

import ballast  # noqa: E402

SMALL = ("--batch=4", "--context=32", "--layers=1", "--width=32", "--heads=2")
STEPS = 6


class Examples(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)

    def run_example(self, name, *arguments, launcher=(), out="out", steps=STEPS):
        """The losses that it wrote, by step."""
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'client/python'}", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, *launcher, EXAMPLES / name, f"--steps={steps}", f"--out={self.dir / out}", *arguments],
            text=True, capture_output=True, check=False, cwd=self.dir, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"{steps}/{steps}", done.stderr + done.stdout)  # The progress bar.
        self.assertTrue((self.dir / out / "loss.png").read_bytes().startswith(b"\x89PNG"))
        with open(self.dir / out / "losses.csv") as file:
            return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}

    def test_pretrain_is_the_same_with_ddp_and_fsdp2_and_in_two_parts(self):
        # While the learning rate rises, it does not depend on --steps.
        common = (*SMALL, f"--warmup={STEPS}")
        launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
        ranks = [self.run_example("pretrain.py", *common, *way, launcher=launcher, out="".join(("ranks", *way)))
                 for way in ((), ("--shard",))]
        with ballast.Service(memory_limit="1GiB") as service:
            common += ("--micro-steps=2", f"--service={service.address}")
            parts = self.run_example("pretrain.py", *common, steps=STEPS // 2)
            parts |= self.run_example("pretrain.py", *common, "--resume")
        steps = list(range(1, STEPS + 1))
        for losses in ranks:
            self.assertEqual((list(losses), list(parts)), (steps, steps))
            for step in steps:
                self.assertAlmostEqual(losses[step], parts[step], places=4, msg=f"step {step}")
        self.assertLess(parts[STEPS], parts[1] - 0.02)

    def test_pretrain_with_muon(self):
        losses = self.run_example("pretrain.py", *SMALL, "--muon", "--warmup=2", steps=8)
        self.assertLess(losses[8], losses[1] - 0.02)

    def test_fine_tune(self):
        new = self.run_example("fine_tune.py", "--batch=4", "--context=32", "--lr=3e-3", steps=20)
        self.assertLess(new[20], new[1] - 0.1)
        tuned = self.run_example("fine_tune.py", "--batch=4", "--context=32", f"--model={self.dir / 'out'}",
                                 f"--text={ROOT / 'LICENSE'}", out="tuned")
        self.assertLess(tuned[1], new[1] - 0.1)  # It begins with what it has learned.


if __name__ == "__main__":
    unittest.main()
