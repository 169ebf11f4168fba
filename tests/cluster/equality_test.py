#!/usr/bin/env python3
"""A training over several members has the bits of one over one service, also on slow wires and on those that lose
packets."""

from cluster_case import TRAINING, ClusterCase, main


class Equality(ClusterCase):
    def assert_same_over(self, count, flags=(), **wire):
        self.assert_same_bits(self.cluster(count, **wire).train("gpt", TRAINING, flags=flags))

    def test_over_two_members(self):
        self.assert_same_over(2)

    def test_over_four_members_that_wait_for_the_decision(self):
        self.assert_same_over(4, flags=["--update=wait"])

    def test_on_wires_of_20_milliseconds(self):
        self.assert_same_over(2, delay=0.02)

    def test_on_wires_that_lose_one_packet_in_a_hundred(self):
        self.assert_same_over(2, loss=0.01)


if __name__ == "__main__":
    main()
