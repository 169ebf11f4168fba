#!/usr/bin/env python3
"""ballast.torch on several ranks when something is not as it should be: one line on every rank, and nobody waits for
those who do not come."""

import tempfile
import unittest

from ranks_for_tests import RanksTest, run_ranks
from messages import says

import ballast

TOLERANCE = 1e-6  # As in torch_test.py.


class TorchRanksTest(RanksTest):
    MODULE = "torch_ranks"

    def assert_refused(self, errors, *kinds):
        self.assertEqual([(told, its_reason) for told, _, _, its_reason in errors], [(kind, "") for kind in kinds])
        says(self, *[said for _, said, *_ in errors])

    def test_ddp_trains_as_one_process(self):
        for world_size, options in ((2, {"service": None}), (3, {})):
            with self.subTest(world_size=world_size):
                (digests,) = self.ranks(world_size, ("trains_as_one_process", options))
                self.assertEqual(len(set(digests)), 1)

    def test_other_descriptions(self):
        all_about = ("max_norm", "update", "lr", "shape", "name", "missing", "frozen", "groups", "weights", "call")
        later, begun, *results = self.ranks(2, ("agrees_at_last", {}), ("begins_alike", {}),
                                            *[("disagree", {"about": about}) for about in all_about])
        self.assertEqual(later, [["FailedPreconditionError", 2], ["ValueError", 2]])
        self.assert_refused([refused for refused, _, _ in begun], "FailedPreconditionError", "ValueError")
        self.assertEqual(len({weight for _, *weights in begun for weight in weights}), 1)
        for about, errors in zip(all_about, results):
            with self.subTest(about=about):
                self.assert_refused(errors, "FailedPreconditionError", "ValueError")

    def test_a_rank_that_cannot_go_on_tells_the_others(self):
        cases = (("lr", 2), ("gradient", 2), ("weights", 0))
        results = self.ranks(3, *[("disagree_later", {"about": about, "culprit": culprit}) for about, culprit in cases])
        for (about, culprit), of_case in zip(cases, results):
            with self.subTest(about=about):
                kinds = ["FailedPreconditionError"] * 3
                if about == "lr":  # There the first that begins is right.
                    self.assertEqual([first[0] for first, _, _ in of_case], kinds)
                else:
                    kinds[culprit] = "RuntimeError"
                    self.assert_refused([first for first, _, _ in of_case], *kinds)
                for rank, (_, again, steps) in enumerate(of_case):
                    self.assertEqual(steps, 3)
                    self.assertEqual(again[3], "ENDED" if rank == culprit and about != "lr" else "INTERRUPTED")
                    self.assertNotEqual(again[0], "none")  # Nor does anybody hang in the next step.

    def test_waits_end(self):
        with tempfile.TemporaryDirectory() as saved, ballast.Service(memory_limit="1GiB", checkpoint_dir=saved) as saving:
            alone, interrupted, unread, stays, closes = self.ranks(
                2, ("comes_alone", {}), ("is_interrupted", {}), ("cannot_read", {}), ("closes_the_job", {"saves": False}),
                ("closes_the_job", {"saves": True, "service": saving.address}))
        self.assertEqual(stays, [["FailedPreconditionError", 3]] * 2)
        self.assertEqual(closes, [["none", 2, True]] * 2)
        self.assert_refused(alone[:1], "DeadlineError")
        self.assertEqual(interrupted, ["KeyboardInterrupt", "did no step"])
        for told, kind in zip(unread, ("FailedPreconditionError", "UnavailableError")):
            self.assert_refused(told, kind, kind)

    def test_a_service_that_goes_away(self):
        with ballast.Service(memory_limit="1GiB") as service:
            (errors,) = self.ranks(2, ("service_goes_away", {"service": service.address, "pid": service.pid}))
        for kind, said, seconds, _ in errors:
            self.assertLess(seconds, 60)  # After three.
            self.assertNotIn("\n", said)
            self.assertIn(kind, ("UnavailableError", "DeadlineError", "FailedPreconditionError"), said)

    def test_the_first_ranks_service_stays_for_those_behind(self):
        self.assertEqual(run_ranks("torch_ranks", 3, [("leaves_early", {})]), [[True] * 3])

    def test_jobs_beside_each_other(self):
        steps, sums = self.ranks(4, ("two_jobs", {}), ("subset_of_ranks", {}))
        self.assertEqual(steps, [[4, 2]] * 4)
        self.assertEqual(sums[0], sums[1])
        self.assertEqual(sums[2], sums[3])
        self.assertNotEqual(sums[0], sums[2])

    def test_uneven_inputs_are_joined_as_in_torch(self):
        plain, overlap, overlap_weights = {}, {"overlap": True}, {"overlap": True, "overlap_weights": True}
        cases = [("plain", [2, 3, 1], mode) for mode in (plain, overlap, overlap_weights)]
        cases += [("clips", [1, 1, 2], plain), ("accumulates", [2, 1, 2], overlap_weights), ("scales", [1, 2, 1], overlap),
                  ("leaves out", [2, 4, 1], overlap), ("undoes", [1, 3, 1], plain), ("plain", [2, 0, 0], overlap_weights)]
        *results, thrown, thrown_with_overlap = self.ranks(
            3, *[("joins", {"how": how, "inputs": inputs} | mode) for how, inputs, mode in cases],
            ("throws_early", plain), ("throws_early", overlap_weights))
        for (how, inputs, mode), of_ranks in zip(cases, results):
            with self.subTest(how, inputs=inputs, **mode):
                made = [number for number in range(max(inputs)) if how not in ("leaves out", "undoes") or number % 2 == 0]
                self.assertEqual({step for step, _, _ in of_ranks}, {2 * len(made) + 2})
                self.assertLess(max(difference for _, difference, _ in of_ranks), TOLERANCE)
        self.assertEqual(len({bits for of_ranks in results[:3] for _, _, bits in of_ranks}), 1)
        for of_ranks in (thrown, thrown_with_overlap):
            for (kind, said, *steps), expected in zip(of_ranks, ["Rank 0 exhausted all inputs", *2 * ["at least one rank"]]):
                self.assertEqual((kind, steps), ("RuntimeError", [3, 5]))
                self.assertIn(expected, said)


if __name__ == "__main__":
    unittest.main()
