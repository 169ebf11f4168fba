#!/usr/bin/env python3
"""ballast.torch with FSDP2: what ranks with shards train is what one process trains with torch.optim."""

import unittest

from ranks_for_tests import RanksTest
from messages import says


class FsdpTest(RanksTest):
    MODULE = "fsdp_ranks"

    def test_shards_train_as_one_process(self):
        for world_size in (1, 2, 3, 4):
            with self.subTest(world_size=world_size):
                self.ranks(world_size, *[("trains_as_one_process", {"reshard_after_forward": again, "max_norm": limit})
                                         for again, limit in ((True, None), (False, 0.05))])

    def test_clipping_by_torch_and_fp32_masters_of_bf16(self):
        self.ranks(3, ("clips_with_torchs_function", {}), ("bf16_has_fp32_masters", {}))

    def test_columns_policies_and_scaling(self):
        *_, scaled = self.ranks(2, ("columns_and_whole_parameters", {}), ("offloads_and_casts", {}),
                                ("scaled_gradients", {}))
        self.assertEqual(scaled, [[[False, False, True, False], 128.0]] * 2)

    def test_what_cannot_be_is_refused_on_every_rank(self):
        for said in self.ranks(4, ("refusals", {}))[0]:
            self.assertEqual(len(said), 6)
            says(self, *said)

    def test_replicas_of_shards(self):
        self.ranks(4, ("trains_as_one_process", {"replicas": 2, "max_norm": 0.05}),
                   ("trains_as_one_process", {"replicas": 4}),
                   ("trains_as_one_process", {"replicas": 2, "mixed": True}))

    def test_the_same_bits_with_any_sharding(self):
        digests = []
        for world_size, kinds in ((1, [{}, {"kind": "whole"}]), (2, [{}, {"kind": "whole"}]), (3, [{}]),
                                  (4, [{}, {"replicas": 2}])):
            for of_case in self.ranks(world_size, *[("digest_with_given_gradients", kind) for kind in kinds]):
                digests += of_case
        self.assertEqual(len(digests), 2 * 1 + 2 * 2 + 3 + 2 * 4)
        self.assertEqual(len(set(digests)), 1, digests)


if __name__ == "__main__":
    unittest.main()
