#!/usr/bin/env python3
"""ballast.torch: state that goes through torch's checkpoints, trainers that die, and what long runs leave behind."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from ranks_for_tests import ROOT, RanksTest, run_ranks
from messages import says

_TORCHRUN_SECONDS = 300


class StatesTest(RanksTest):
    MODULE = "state_ranks"


class StateTest(StatesTest):
    def test_torch_distributed_checkpoint(self):
        for world_size in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                kinds = [{}, {"flatten": True}, {"model_last": True}, {"full": True}]
                cases = [("goes_on_from_a_distributed_checkpoint", {"folder": f"{folder}/{number}"} | options)
                         for number, options in enumerate(kinds)]
                made, *small, full = self.ranks(world_size, ("state_of_a_new_optimizer", {}), *cases)
                self.assertEqual(made, [True] * world_size)
                # A number for a parameter.
                self.assertEqual({size for of_case in small for size in of_case}, {12})
                self.assertGreater(min(full), 12 + 200)

    def test_torch_goes_on_with_the_full_state(self):
        self.ranks(2, ("torch_goes_on_with_the_full_state", {}), ("goes_on_with_the_moments_of_torch", {}),
                   ("goes_on_with_the_moments_of_torch", {"sharded": False}),
                   ("goes_on_with_the_moments_of_torch", {"joins_again": True}),
                   ("a_state_is_placed_as_the_parameters", {}))

    def test_moments_that_differ_by_rank(self):
        says(self, *self.ranks(2, ("moments_of_each_rank_are_refused", {}))[0])

    def test_weights_that_were_written_meanwhile(self):
        says(self, *self.ranks(2, ("written_weights_are_found", {}))[0])


class ElasticTest(StatesTest):
    def test_ranks_are_taken_from_the_dead(self):
        options = {"service": self.service.address, "job": "taken"}
        run_ranks("state_ranks", 2, [("dies_in_a_step", options)], may_die=(0, 1))
        self.assertEqual(run_ranks("state_ranks", 2, [("takes_ranks_from_the_dead", options)]), [[2, 2]])

    def test_a_rank_is_killed_under_torchrun(self):
        python, here = sys.executable, pathlib.Path(__file__).resolve().parent
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [python, "-B", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
                 "--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1", str(here / "state_ranks.py"), folder, self.service.address],
                # Gloo reads the addresses of the dead from a store that outlives them.
                env=os.environ | {"PYTHONPATH": f"{ROOT / 'client/python'}{os.pathsep}{here}", "OMP_NUM_THREADS": "1",
                                  "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                timeout=_TORCHRUN_SECONDS)
            self.assertEqual(done.returncode, 0, done.stdout[-4000:])
            ends = {file.name: file.read_text().split() for file in pathlib.Path(folder).iterdir()}
        self.assertEqual(sorted(ends), ["0-1", "1-1"], done.stdout[-4000:])  # The first attempt did not end.
        self.assertEqual([begin for begin, _ in ends.values()], ["2", "2"])
        (digests,) = self.ranks(2, ("alone", {}))
        self.assertEqual({bits for _, bits in ends.values()}, set(digests))  # As if nothing had been.


class LongTest(StatesTest):
    def test_many_steps_leave_nothing_behind(self):
        for of_rank in self.ranks(2, ("many_steps", {"steps": 2000}))[0]:
            memory, descriptors, threads = of_rank
            self.assertLess(memory, 8 << 20)
            self.assertEqual(descriptors, 0)
            self.assertLess(threads, 16)  # gRPC has some, and more when it has much to do.


if __name__ == "__main__":
    unittest.main()
