#!/usr/bin/env python3
"""ballast.torch on several ranks when something is not as it should be: one line on every rank, and nobody waits for
those who do not come."""

import tempfile
import unittest

from ranks_for_tests import RanksTest, run_ranks

import ballast

TOLERANCE = 1e-6  # As in torch_test.py.


class TorchRanksTest(RanksTest):
    MODULE = "torch_ranks"

    def assert_one_line_on_every_rank(self, errors, text):
        for kind, said, _ in errors:
            self.assertNotEqual(kind, "none", errors)
            self.assertNotIn("\n", said)
            self.assertIn(text, said)

    def test_ddp_trains_as_one_process(self):
        for world_size, options in ((2, {"service": None}), (3, {})):
            with self.subTest(world_size=world_size):
                (digests,) = self.ranks(world_size, ("trains_as_one_process", options))
                self.assertEqual(len(set(digests)), 1)

    def test_other_descriptions(self):
        texts = {"max_norm": "max_norm is 2.0, and on rank 0 0.0",
                 "update": "update_mode is speculate, and on rank 0 wait",
                 "lr": "group 0.float32 is",
                 "shape": "parameter 0.weight is (5, 4)",
                 "name": "this rank has parameter another where rank 0 has parameter 0.bias",
                 "missing": "things, and rank 0",
                 "frozen": "parameter 0.weight is (3, 4) group 0 frozen",
                 "groups": "this rank has group 1.float32 where rank 0 has parameter 0.weight",
                 "weights": "the sum of the bits of parameter 1.bias is",
                 "call": "the call is attach(), and on rank 0 step()"}
        later, begun, *results = self.ranks(2, ("agrees_at_last", {}), ("begins_alike", {}),
                                            *[("disagree", {"about": about}) for about in texts])
        self.assertEqual(later, [["FailedPreconditionError", 2], ["ValueError", 2]])
        self.assert_one_line_on_every_rank([refused for refused, _, _ in begun], "wrap the model in Distributed")
        self.assertEqual(len({weight for _, *weights in begun for weight in weights}), 1)
        for (about, text), errors in zip(texts.items(), results):
            with self.subTest(about=about):
                self.assert_one_line_on_every_rank(errors, text)

    def test_a_rank_that_cannot_go_on_tells_the_others(self):
        texts = {("lr", 2): "all ranks must begin a step with the same settings",
                 ("gradient", 2): "the gradient of parameter 0.weight is sparse",
                 ("weights", 0): "was changed since the last step"}
        results = self.ranks(3, *[("disagree_later", {"about": about, "culprit": culprit}) for about, culprit in texts])
        for ((about, culprit), text), of_case in zip(texts.items(), results):
            with self.subTest(about=about):
                self.assert_one_line_on_every_rank([first for first, _, _ in of_case], text)
                for rank, (first, again, steps) in enumerate(of_case):
                    self.assertEqual(steps, 3)
                    self.assertIn("attach()", again[1])
                    if about != "lr":  # There the first that begins is right.
                        self.assertEqual(first[1].startswith(f"rank {culprit}: "), rank != culprit, first)
                    self.assertNotEqual(again[0], "none")  # Nor does anybody hang in the next step.

    def test_waits_end(self):
        with tempfile.TemporaryDirectory() as saved, ballast.Service(memory_limit="1GiB", checkpoint_dir=saved) as saving:
            alone, interrupted, unread, stays, closes = self.ranks(
                2, ("comes_alone", {}), ("is_interrupted", {}), ("cannot_read", {}), ("closes_the_job", {"saves": False}),
                ("closes_the_job", {"saves": True, "service": saving.address}))
        self.assertEqual(stays, [["FailedPreconditionError", 3]] * 2)
        self.assertEqual(closes, [["none", 2, True]] * 2)
        self.assertEqual(alone[0][0], "DeadlineError")
        self.assertIn("only 1 of 2 ranks came within 1 s", alone[0][1])
        self.assertEqual(interrupted, ["KeyboardInterrupt", "did no step"])
        for at_attach, at_undo in unread:
            self.assert_one_line_on_every_rank([at_attach, at_undo], "the service does not give them")

    def test_a_service_that_goes_away(self):
        with ballast.Service(memory_limit="1GiB") as service:
            (errors,) = self.ranks(2, ("service_goes_away", {"service": service.address, "pid": service.pid}))
        for kind, said, seconds in errors:
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
