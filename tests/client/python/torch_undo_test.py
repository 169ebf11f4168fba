#!/usr/bin/env python3
"""ballast.torch's undo_step: a step that was undone is as if it never had been, bit for bit, on every rank, and whoever
dies meanwhile of the service."""

import unittest

from ranks_for_tests import RanksTest
from messages import says


class TorchUndoTest(RanksTest):
    MODULE = "undo_ranks"

    def assert_refused(self, told):
        self.assertEqual([told[0], told[3]], ["FailedPreconditionError", ""])
        says(self, told[1])

    def assert_as_if_it_never_had_been(self, world_size, *cases):
        results = self.ranks(world_size, *[("trains", {"undoes": undoes} | options)
                                           for options in cases for undoes in (False, True)])
        for options, never, undone in zip(cases, results[::2], results[1::2]):
            for rank in range(world_size):
                with self.subTest(rank=rank, **options):
                    digest, step, told = undone[rank]
                    self.assertEqual([digest, step], never[rank][:2])
                    self.assertEqual((step, len(told)), (4, 4))
                    for went_back, refused in zip(told[::2], told[1::2]):
                        self.assertEqual(went_back, [True, 2, True, options.get("overlap", False), 2])
                        self.assert_refused(refused)

    def test_in_one_process(self):
        self.assert_as_if_it_never_had_been(1, {}, {"update": "speculate"}, {"overlap": True}, {"service": None})

    def test_on_several_ranks(self):
        self.assert_as_if_it_never_had_been(2, {}, {"overlap": True, "update": "speculate"},
                                            {"sharded": True, "overlap": True})

    def test_when_the_services_process_dies_before_and_meanwhile_and_after(self):
        self.assert_as_if_it_never_had_been(1, {"kills": self.service.pid})

    def test_a_refusal_changes_nothing(self):
        for world_size in (1, 2):
            (told,) = self.ranks(world_size, ("is_refused", {}))
            for too_early, without, unchanged, step in told:
                self.assert_refused(too_early)
                self.assert_refused(without)
                self.assertEqual([unchanged, step], [True, 2])

    def test_it_is_refused_in_the_middle_of_a_step(self):
        ((told,),) = self.ranks(1, ("is_asked_in_a_step", {}))
        self.assert_refused(told)


if __name__ == "__main__":
    unittest.main()
