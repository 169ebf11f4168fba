#!/usr/bin/env python3
"""A training over several members has the bits of one over one service, also on slow wires and on those that lose
packets. So has its state, whichever member is asked for it."""

import hashlib
import os
import struct
import unittest.mock

from cluster_case import TRAINING, ClusterCase, main
from members import RANKS
from runs import Run, Service

from certificates import Guarded, private


class Equality(ClusterCase):
    def assert_same_over(self, count, flags=(), **wire):
        self.assert_same_bits(self.cluster(count, **wire).train("gpt", TRAINING, flags=flags))

    def test_over_two_members(self):
        self.assert_same_over(2)

    def test_over_four_members_that_wait_for_the_decision(self):
        self.assert_same_over(4, flags=["--update=wait"])

    def test_on_wires_of_20_milliseconds(self):
        self.assert_same_over(2, delay=0.02)

    def test_what_is_read_at_any_member(self):
        cluster = self.cluster(3)
        run = self.start(cluster, "gpt")
        run.await_step(1)
        names = [name.split(" ", 1) for name in self.undisturbed.state]
        for plane, name in names[:6]:  # While it trains.
            for member in cluster.members:
                self.read(member, plane, name)
                member.ask("state", "gpt", name)
        self.assertEqual(run.wait(), 0, run.story())
        for member in cluster.members:
            read = {f"{plane} {name}": self.read(member, plane, name) for plane, name in names}
            self.assertEqual(read, self.undisturbed.state)
            shown = member.job("gpt")["members"]
            self.assertEqual([(each["linked"], each["memory_bytes"] > 0) for each in shown], [(True, True)] * 3)
        summaries = {member.ask("state", "gpt", name, "--json") for member in cluster.members for _, name in names[:1]}
        self.assertEqual(len(summaries), 1)
        gone = cluster.members[2]
        with self.network.cut(gone.host):
            with self.assertRaisesRegex(AssertionError, f"member {gone.address} "):
                self.read(cluster.members[1], *names[0])

    def test_what_is_read_over_tls(self):
        """With the tool's own certificates and token at all members."""
        guarded = Guarded(self.folder)
        private(guarded.roles, "operator * token:test\nmember * cert:service\n")
        members = [Service(self.folder, *guarded.flags) for _ in range(2)]
        for member in members:
            self.addCleanup(member.stop)
        with unittest.mock.patch.dict(os.environ, guarded.environment):
            run = Run(self.folder, ",".join(member.address for member in members), "gpt", TRAINING, ranks=RANKS)
            self.addCleanup(run.stop)
            self.assertEqual(run.wait(), 0, run.story())
            plane, name = next(iter(self.undisturbed.state)).split(" ", 1)
            for member in members:
                self.assertEqual(self.read(member, plane, name), self.undisturbed.state[f"{plane} {name}"])
                self.assertEqual([each["problem"] for each in member.job("gpt")["members"]], ["", ""])
                member.ask("state", "gpt", name)
            members[1].ask("close", "gpt", "--force")

    def read(self, member, plane, name):
        """The hash of a plane of a parameter."""
        file = self.folder / "plane.npy"
        member.ask("state", "gpt", name, "--plane", plane, "--out", file)
        data = file.read_bytes()
        file.unlink()
        length, = struct.unpack_from("<H", data, 8)
        return hashlib.sha256(data[10 + length:]).hexdigest()

    def test_on_wires_that_lose_one_packet_in_a_hundred(self):
        self.assert_same_over(2, loss=0.01)


if __name__ == "__main__":
    main()
