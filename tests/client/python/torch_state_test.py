#!/usr/bin/env python3
"""ballast.torch: state that goes through torch's checkpoints, trainers that die, and what long runs leave behind."""

import json
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
        (digests,) = self.ranks(2, ("alone", {}))
        for service in ([self.service.address], []):
            with self.subTest(service):
                returncode, log, ends = torchrun("elastic", *service)
                self.assertEqual(returncode, 0, log)
                self.assertEqual(sorted(ends), ["0-1", "1-1"], log)  # The first attempt did not end.
                ends = [end.split() for end in ends.values()]
                self.assertEqual([begin for begin, _ in ends], ["2", "2"])
                self.assertEqual({bits for _, bits in ends}, set(digests))  # As if nothing had been.
                self.assertNotIn("was kept", log)

    def test_no_restart_helps(self):
        returncode, log, ends = torchrun("elastic_in_vain")
        self.assertNotEqual(returncode, 0)
        said = {name: json.loads(text) for name, text in ends.items()}
        self.assertEqual(said["0-1"], said["0-0"], log)  # The same step of a new job; the old one is gone.
        self.assertEqual(said["0-0"][1], [3])
        self.assertEqual(said["1-1"], said["1-0"])
        says(self, *said["0-2"], *said["1-2"])
        self.assertIn("job elastic was kept at step 3", log)

    def test_jobs_of_optimizers_that_are_gone(self):
        self.assertEqual(self.ranks(1, ("jobs_of_optimizers_that_are_gone", {})),
                         [[[["trainer"], ["trainer-2"], ["trainer-2"], ["trainer-3"], []]]])


def torchrun(*arguments):
    """The exit code of this run of state_ranks, its log, and what its ranks have written. Nothing else may be left."""
    here = pathlib.Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as temporary:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
             "--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1", str(here / "state_ranks.py"), arguments[0],
             folder, *arguments[1:]],
            # Gloo reads the addresses of the dead from a store that outlives them.
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'client/python'}{os.pathsep}{here}", "OMP_NUM_THREADS": "1",
                              "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TMPDIR": temporary},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=_TORCHRUN_SECONDS)  # This waits until whatever has the pipe has ended.
        left = list(pathlib.Path(temporary).glob("ballast*"))
        if left:
            raise AssertionError(f"{left} is left: {done.stdout[-4000:]}")
        return done.returncode, done.stdout[-4000:], {
            file.name: file.read_text() for file in pathlib.Path(folder).iterdir() if file.name[0].isdigit()}


class LongTest(StatesTest):
    def test_many_steps_leave_nothing_behind(self):
        for of_rank in self.ranks(2, ("many_steps", {"steps": 2000}))[0]:
            memory, descriptors, threads = of_rank
            self.assertLess(memory, 8 << 20)
            self.assertEqual(descriptors, 0)
            self.assertLess(threads, 16)  # gRPC has some, and more when it has much to do.


if __name__ == "__main__":
    unittest.main()
