#!/usr/bin/env python3
"""Jobs over members that are not created, and how they are closed: nothing of them is left at any member."""

from cluster_case import TRAINING, ClusterCase, main
from processes import await_


class Creation(ClusterCase):
    def assert_fails(self, run):
        """Returns what all its ranks said."""
        self.assertEqual(run.wait(), 1, run.story())
        return "".join(run.log(rank) for rank in range(run.ranks))

    def test_a_job_that_trains_has_no_second_lead(self):
        cluster = self.cluster(3)
        first = self.start(cluster, "gpt", services=cluster.addresses(0, 1))
        first.await_step(1)
        uids = [cluster.members[member].job("gpt")["uid"] for member in (0, 1)]
        # A member of it, and another service, which is to lead a member of it.
        for services in (cluster.addresses(1, 0), cluster.addresses(2, 1)):
            self.assert_fails(self.start(cluster, "gpt", services=services))
            self.assertEqual([cluster.members[member].job("gpt")["uid"] for member in (0, 1)], uids)
            self.assertEqual(cluster.members[2].jobs(), [])
        self.assert_same_bits(cluster.end(first))

    def test_a_member_that_is_not_there_is_named_and_nothing_is_kept(self):
        cluster = self.cluster(2)
        with self.network.cut(cluster.members[1].host):
            said = self.assert_fails(self.start(cluster, "gpt"))
            self.assertEqual(cluster.lead.jobs(), [])
        lines = [line for line in said.splitlines() if "ballast-worker:" in line and "waiting for rank" not in line]
        self.assertEqual({cluster.members[1].address in line for line in lines}, {True}, said)
        self.assertEqual(cluster.members[1].jobs(), [])
        self.assert_same_bits(cluster.train("gpt", TRAINING))

    def test_it_is_closed_through_any_member(self):
        cluster = self.cluster(2)
        for asked in cluster.members:
            run = self.start(cluster, "gpt")
            self.assertEqual(run.wait(), 0, run.story())
            asked.ask("close", "gpt", "--force")
            self.assertEqual([member.jobs() for member in cluster.members], [[]] * 2)
            for member in cluster.members:
                await_("its memory", lambda: member.memory_used() == 0)


if __name__ == "__main__":
    main()
