#!/usr/bin/env python3
"""ballast.torch on several ranks whose job several services hold together: the same bits as on one service, also if
one of their processes is killed, and one line on every rank where that cannot be. Of service="node" and service=None
on several nodes: the homes of ranks, and nodes that cannot be linked. tests/cluster/nodes_test.py trains there."""

import concurrent.futures
import dataclasses
import itertools
import os
import pathlib
import signal
import socket
import tempfile
import unittest
import warnings
from unittest import mock

import numpy
from ranks_for_tests import RanksTest, run_ranks
from messages import refused, says

import ballast
import processes
from ballast import _files
from ballast.client import Client
from ballast.resize import other_shape
from ballast.session import Job
from ballast.torch import from_checkpoint
from ballast.torch.services import nodes
from ballast.torch.services.nodes import Node, goes_on, homes_of, host_towards, is_loopback, joined
from package_test import Rank

BOTH = {"overlap": True, "overlap_weights": True}
CASES = [("fsdp", {"overlap": False}), ("fsdp", {"update": "speculate", "accumulation": 2} | BOTH),
         ("ddp", {"overlap": False, "accumulation": 2}), ("ddp", {"overlap": True}),
         # With an optimizer that attaches in the middle.
         ("accumulates", {"overlap": True, "most": 2, "update": "speculate"}),
         ("accumulates", {"overlap": True, "most": 2, "sharded": True, "dtype": "bfloat16"})]

A, B, C = Node("a", "1", "a:7070"), Node("b", "2", "[fd00::2]:7070"), Node("c", "3", "10.0.0.3:7070")


class MembersTest(RanksTest):
    MODULE = "members_ranks"

    def pool(self, count, *flags):
        services = []
        for _ in range(count):
            folder = tempfile.TemporaryDirectory()
            self.addCleanup(folder.cleanup)
            services.append(processes.Service(_files.program("ballastd"), pathlib.Path(folder.name),
                                              "--memory-limit=1GiB", "--threads=1", "--most-deaths=0", *flags))
            self.addCleanup(services[-1].stop)
        return services

    def nowhere(self):
        held = processes.HeldPort()
        self.addCleanup(held.close)
        return held.address

    def digests(self, world_size, service, cases):
        """By case and rank."""
        results = run_ranks("overlap_ranks", world_size, [
            (function, {"service": service, "job": f"{self._testMethodName}-{world_size}-{number}"} | options)
            for number, (function, options) in enumerate(cases)])
        return [[digest for digest, _ in of_case] for of_case in results]

    def test_trains_to_the_same_bits_as_one_service(self):
        for world_size, services, cases in ((2, 2, CASES), (3, 2, CASES[1:4]),
                                            (4, 4, [("fsdp", {"overlap": True, "replicas": 2}), *CASES[1:5]])):
            alone = self.digests(world_size, self.service.address, cases)
            for sharing in ("auto", "never") if world_size == 2 else ("auto",):
                with self.subTest(world_size=world_size, services=services, sharing=sharing):
                    pool = self.pool(services, f"--shared-memory={sharing}")
                    self.assertEqual(self.digests(world_size, [each.address for each in pool], cases), alone)

    def test_goes_on_from_deaths_of_the_lead_and_of_another(self):
        pool = self.pool(2)
        addresses = [each.address for each in pool]
        alone, *disturbed = self.digests(2, addresses, [
            ("fsdp_with_deaths", {"steps": 12} | which)
            for which in ({"service": self.service.address}, *({"holder": each.process.pid} for each in pool))])
        for number, digests in enumerate(disturbed):
            with self.subTest(number):
                self.assertEqual(digests, alone)

    def test_ranks_are_taken_from_the_dead(self):
        options = {"service": [each.address for each in self.pool(2)], "job": "taken"}
        run_ranks("state_ranks", 2, [("dies_in_a_step", options)], may_die=(0, 1))
        self.assertEqual(run_ranks("state_ranks", 2, [("takes_ranks_from_the_dead", options)]), [[2, 2]])

    def test_a_job_is_closed_on_all(self):
        addresses = [each.address for each in self.pool(2)]
        for closes, left in (({}, [2]), ({"job": True}, [])):
            (ends,) = run_ranks(self.MODULE, 2, [
                ("trains_and_closes", {"services": [addresses] * 2, "job": f"closed-{len(left)}", "closes": closes})])
            self.assertEqual(ends, [["none", "", 2]] * 2)
            for address in addresses:
                self.assertEqual([job["committed_step"] for job in ballast.connect(address).jobs()
                                  if job["name"] == f"closed-{len(left)}"], left)

    def test_state_is_put_together_from_all(self):
        pool = [each.address for each in self.pool(2)]
        for services in ([self.service.address] * 2, [pool] * 2):
            run_ranks(self.MODULE, 2, [("trains_and_closes", {"services": services, "job": "state", "closes": {}})])
        alone, together = ballast.connect(self.service.address), ballast.connect(pool)
        names = ("0.weight", "0.bias", "1.weight", "1.bias")
        for name, plane in itertools.product(names, ("master", "exp_avg", "exp_avg_sq")):
            with self.subTest(name, plane=plane):
                expected = alone.state("state", name, plane)
                self.assertGreater(abs(expected).max(), 0)
                numpy.testing.assert_array_equal(together.state("state", name, plane), expected)
        # A member that is asked alone finds the others.
        numpy.testing.assert_array_equal(ballast.connect(pool[1]).state("state", names[0]),
                                         alone.state("state", names[0]))
        for name, address in itertools.product(names, pool):
            self.assertEqual(ballast.connect(address).summary("state", name)["planes"],
                             alone.summary("state", name)["planes"])

    def test_a_job_goes_back_and_to_other_services(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)

        def saving(count, name):
            return [each.address for each in self.pool(count, f"--checkpoint-dir={folder.name}/{name}")]

        seen = []
        for name, here, there in (("alone", 1, 1), ("together", 2, 2), ("to one", 2, 1), ("to one and back", 2, 0)):
            service = saving(here, name)
            seen.append(run_ranks(self.MODULE, 2, [("goes_back_and_elsewhere", {
                "service": service, "job": "back", "elsewhere": saving(there, name) or service,
                "via": None if there else service[1:]})]))
        undone, loaded, resumed, _ = seen[0][0][0]
        self.assertEqual([undone[0], loaded[0], resumed], [3, 3, 3])
        for others in seen[1:]:
            self.assertEqual(others, seen[0])
        (alone, _), (together, _) = (from_checkpoint(f"{folder.name}/{name}/back") for name in ("alone", "together"))
        self.assertEqual(sorted(alone), sorted(together))
        for name, weights in alone.items():
            numpy.testing.assert_array_equal(together[name], weights)

    # ------------------------------------------------------------ other ranks

    def ranks(self, services, count, **options):
        spread = len(services) > 1
        return [Rank(services[rank % len(services)], "gpt", rank, count, options=options, members=services if spread else [],
                     homes=[rank % len(services) for rank in range(count)] if spread else []) for rank in range(count)]

    def train(self, services, count, steps, checkpoint=""):
        """So many ranks make steps of the job, which begins with the checkpoint, and end. Returns its state before and
        after."""
        if checkpoint:
            (first, *others) = self.ranks(services, count, takes_steps=False)
            first.session.load(checkpoint)
            for rank in (first, *others):
                rank.session.close()
        ranks = self.ranks(services, count)
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            list(pool.map(Rank.start, ranks))
            before = self.state(services)
            for _ in range(steps):
                list(pool.map(Rank.step, ranks))
        for rank in ranks:
            rank.session.close()
        return before, self.state(services)

    def state(self, services):
        client = ballast.connect(services)
        return [client.state("gpt", "w", plane).tobytes() for plane in ("master", "exp_avg", "exp_avg_sq")]

    def jobs(self, services):
        """Step and world size of those that each service has."""
        return [[(job["committed_step"], job["world_size"]) for job in Client(service).jobs()] for service in services]

    def way(self, services, count, wait=10.0):
        """Makes way for so many ranks. Returns the checkpoint to go on from; None: there is nothing in the way."""
        spread = dict(members=services, homes=list(range(count))) if len(services) > 1 else {}
        other = other_shape(Job("gpt", [], [], world_size=count, **spread), services,
                            lambda service: Client(service, timeout=wait, wait=wait))
        if other is None:
            return None
        checkpoint = other.save()
        other.close()
        return checkpoint

    def saving_pool(self, count):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        pool = self.pool(count, f"--checkpoint-dir={folder.name}")
        return pool, [each.address for each in pool]

    def test_other_ranks_continue_a_job(self):
        _, (one, other, third) = self.saving_pool(3)
        self.assertIsNone(self.way([one, other], 2))
        _, before = self.train([one, other], 2, 2)
        self.assertIsNone(self.way([one, other], 2))
        self.assertEqual(self.jobs([one, other]), [[(2, 2)]] * 2)
        for step, services, count in ((3, [one], 1), (4, [one], 2), (5, [other, one], 2), (6, [third, other], 2),
                                      (7, [third], 1)):
            with self.subTest(step):
                checkpoint = self.way(services, count)
                self.assertTrue(checkpoint.startswith(f"gpt/step-{step - 1}."), checkpoint)
                self.assertEqual(self.jobs([one, other, third]), [[]] * 3)
                begin, end = self.train(services, count, 1, checkpoint)
                self.assertEqual(begin, before)
                self.assertEqual(self.jobs(services), [[(step, count)]] * len(services))
                before = end

    def test_a_job_with_a_lost_part_continues_from_its_checkpoint(self):
        pool, (one, other) = self.saving_pool(2)
        self.train([one, other], 2, 2)
        pool[1].stop()
        for is_back in (False, True):
            if is_back:
                pool[1].start(other)
            for services, count in [([one], 1)] + [([one, other], 2), ([other, one], 2)] * is_back:
                with refused(self, ballast.FailedPreconditionError):
                    self.way(services, count, wait=10.0 if is_back else 0.5)
                self.assertEqual(self.jobs([one]), [[(2, 2)]])
        self.assertEqual(self.jobs([other]), [[]])
        ballast.connect(one).close_job("gpt", here=True)

        _, saved = self.train([one, other], 2, 2)
        ballast.connect(one).save("gpt")
        self.train([one, other], 2, 1)
        pool[1].stop()
        with self.assertWarns(UserWarning):
            checkpoint = self.way([one], 1, wait=0.5)
        self.assertEqual(self.jobs([one]), [[]])
        self.assertEqual(self.train([one], 1, 0, checkpoint)[0], saved)

    def test_a_part_that_comes_back_late_is_not_taken_for_the_job(self):
        pool, (one, other) = self.saving_pool(2)
        self.train([one, other], 2, 2)
        ballast.connect(one).save("gpt")
        os.kill(pool[1].process.pid, signal.SIGSTOP)
        (behind,) = processes.children_of(pool[1].process.pid)
        os.kill(behind, signal.SIGSTOP)
        with self.assertWarns(UserWarning):
            checkpoint = self.way([one], 1, wait=0.5)
        _, later = self.train([one], 1, 3, checkpoint)
        os.kill(behind, signal.SIGCONT)
        os.kill(pool[1].process.pid, signal.SIGCONT)
        self.assertEqual(self.jobs([other, one]), [[(2, 2)], [(5, 1)]])
        checkpoint = self.way([other, one], 2)
        self.assertEqual(self.jobs([other, one]), [[], []])
        begin, _ = self.train([other, one], 2, 1, checkpoint)
        self.assertEqual(begin, later)

    def test_several_whole_jobs_of_one_name_stay(self):
        _, (one, other) = self.saving_pool(2)
        self.train([one], 1, 2)
        checkpoint = ballast.connect(one).save("gpt")["directory"].rpartition("/")[2]
        for begins_with in ("", f"gpt/{checkpoint}"):  # The first may have gone on since.
            self.train([other], 1, 1, begins_with)
            step = 3 if begins_with else 1
            for services in ([one, other], [other, one]):
                with refused(self, ballast.FailedPreconditionError):
                    self.way(services, 2)
            self.assertEqual(self.jobs([one, other]), [[(2, 1)], [(step, 1)]])
            ballast.connect(other).close_job("gpt")

    def test_a_job_that_trains_or_cannot_be_saved_stays(self):
        one, other = (each.address for each in self.pool(2))
        ranks = self.ranks([one, other], 2)
        with refused(self, ballast.FailedPreconditionError):
            self.way([other], 1)
        for rank in ranks:
            rank.session.close()
        self.assertEqual(self.way([other], 1), "")  # It had no weights.
        self.assertEqual(self.jobs([one, other]), [[], []])
        self.train([one, other], 2, 1)
        with refused(self, ballast.FailedPreconditionError, "NO_CHECKPOINT_DIR"):
            self.way([other], 1)
        self.assertEqual(self.jobs([one, other]), [[(1, 2)]] * 2)

    # ------------------------------------------------------------ what cannot be

    def test_ranks_that_name_other_services(self):
        one, other, third = (each.address for each in self.pool(3))
        for number, services in enumerate(([[one, other], [one, third]], [[one, other], [other, one]],
                                           [one, [one, other]], [[one, other], one])):
            with self.subTest(number):
                (ends,) = run_ranks(self.MODULE, 2, [("trains_and_closes", {"services": services, "job": f"{number}"})])
                self.assertEqual([kind for kind, _, _ in ends], ["FailedPreconditionError", "ValueError"])
                says(self, *[said for _, said, _ in ends])
        first = Rank([one, other], "sessions", 0, 2)
        self.addCleanup(first.session.close)
        with refused(self, ballast.FailedPreconditionError, "OTHER_DESCRIPTION"):
            Rank([third, other], "sessions", 1, 2)

    def test_services_that_are_not_there_or_too_many(self):
        nowhere = self.nowhere()
        for member, services in enumerate(([nowhere, self.service.address], [self.service.address, nowhere])):
            with self.subTest(member):
                (ends,) = run_ranks(self.MODULE, 2, [("trains_and_closes", {
                    "services": [services] * 2, "job": f"nowhere-{member}", "timeout": 2.0})])
                self.assertEqual(ends[member][0], "UnavailableError")
                self.assertIn(nowhere, ends[member][1])
        (ends,) = run_ranks(self.MODULE, 2, [
            ("trains_and_closes", {"services": [[self.service.address, "a:7070", "b:7070"]] * 2, "job": "many"})])
        # A rank may hear of the other one's error before it has its own.
        own = [said for kind, said, _ in ends if kind == "InvalidArgumentError"]
        self.assertTrue(own)
        self.assertLessEqual({kind for kind, _, _ in ends}, {"InvalidArgumentError", "FailedPreconditionError"})
        says(self, own[0])


class Meeting:
    """Peers of which this rank has heard all."""

    def __init__(self, meeting_host, gathered, recorded=""):
        self.meeting_host, self.gathered, self.recorded = meeting_host, gathered, recorded

    def gather(self, what, value):
        return self.gathered.get(what, [value])

    def from_first(self, what, value):
        return self.recorded if value is None else value


class HomesTest(unittest.TestCase):
    def test_members_come_in_the_order_of_their_first_ranks(self):
        self.assertEqual(homes_of([A, A, B, A, C, B], ""), (["a:7070", "[fd00::2]:7070", "10.0.0.3:7070"],
                                                            [0, 0, 1, 0, 2, 1]))

    def test_ranks_on_one_node_need_no_members(self):
        for address in ("a:7070", "127.0.0.1:7070", ""):
            self.assertEqual(homes_of([A._replace(address=address)] * 3, ""), ([], []))

    def test_ranks_that_see_the_same_sockets_are_on_one_node(self):
        seen = ["host/tree host/tmp", "container/tree host/tmp", "other/tree other/tmp", "host/tree host/tmp-of-a-rank",
                "other/tree none/tmp"]
        self.assertEqual([node.key for node in joined([A._replace(key=places) for places in seen])],
                         ["0", "0", "2", "0", "2"])

    def test_nodes_that_cannot_be_linked_are_named(self):
        for one, other in ((A, B._replace(address="")), (A._replace(address="127.0.0.1:7070"), B),
                           (A, B._replace(address="[::1]:7070")), (A, B._replace(address="a:7070"))):
            with refused(self, ballast.FailedPreconditionError):
                homes_of([one, other], "do this")

    def test_loopback_addresses(self):
        for address in ("127.0.0.1", "127.3.2.1:7070", "::1", "[::1]:7070", "localhost:7070"):
            self.assertTrue(is_loopback(address), address)
        for address in ("10.0.0.1", "10.0.0.1:7070", "fd00::1", "[fd00::1]:7070", "gpu1:7070", "fe80::1%eth0"):
            self.assertFalse(is_loopback(address), address)

    def test_the_host_where_ranks_meet_has_its_address_towards_another(self):
        self.assertEqual(host_towards("127.0.0.1"), "127.0.0.1")
        self.assertEqual(host_towards("::1", socket.AF_INET), "")
        self.assertEqual(host_towards("no-such-host.invalid"), "")
        ways = {"gpu1": "127.0.1.1", "10.0.0.2": "10.0.0.1"}
        with mock.patch.object(nodes, "host_towards", lambda host, family: ways.get(host, "")):
            self.assertEqual(nodes._own_host(Meeting("gpu1", {"hosts": ["127.0.1.1", "", "10.0.0.2"]})), "10.0.0.1")
            self.assertEqual(nodes._own_host(Meeting("gpu1", {"hosts": ["127.0.1.1"] * 2})), "127.0.1.1")
            self.assertEqual(nodes._own_host(Meeting("", {"hosts": ["", ""]})), "")

    def test_a_rank_that_moved_has_its_home_where_the_job_has_it(self):
        job = Job("gpt", [], [], world_size=2)
        client = mock.Mock(service="unix:/own", **{"identity.return_value": ("2", "b:7070")})
        for recorded, service in ((["a:7070", "b:7070"], "a:7070"), (["b:7070", "a:7070"], "unix:/own")):
            client.jobs.return_value = [{"name": "gpt", "world_size": 2, "homes": [0, 1],
                                         "members": [{"address": address} for address in recorded]}]
            peers = Meeting("", {"nodes": [Node("b", "2", "b:7070"), Node("a", "1", "a:7070")]})
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                home, found = nodes.lasting(job, 0, peers, lambda address: client)
            self.assertEqual((home, found.members, found.homes), (service, recorded, [0, 1]))
            self.assertEqual(len(warned), service == "a:7070")

    def test_what_ranks_before_a_restart_have_left(self):
        both = ["a:7070", "b:7070"]
        on_a = {"uid": "1", "world_size": 2, "committed_step": 6, "members": both, "phase": "READY"}
        on_b = on_a | {"committed_step": 7}
        moved, fewer = (Job("gpt", [], [], world_size=size, members=members) for size, members in ((2, both[::-1]), (1, [])))
        self.assertTrue(goes_on(moved, [[on_b], [on_a]], None))
        self.assertTrue(goes_on(moved, [[on_b], [on_a]], ("1", 7)))
        for loaded in (("1", 6), ("2", 7), ("", 0)):  # Its moments begin a new job.
            self.assertFalse(goes_on(moved, [[on_b], [on_a]], loaded))
        for job, left in ((fewer, [[on_b]]), (moved, [[on_b], []]), (moved, [[], [on_a]]),
                          (moved, [[on_b], [on_a | {"uid": "2"}]]), (dataclasses.replace(moved, members=["b:7070", "c:7070"]), [[on_b]] * 2)):
            with self.subTest(left):
                self.assertFalse(goes_on(job, left, ("1", 7)))
                unbegun = [[each | {"phase": "AWAITING_WEIGHTS"} for each in of_node] for of_node in left]
                self.assertFalse(goes_on(job, unbegun, None))
                with refused(self, ballast.FailedPreconditionError):
                    goes_on(job, left, None)


class OneHostTest(RanksTest):
    """Nodes that are none: ranks with several unix sockets on one host."""

    MODULE = "members_ranks"

    def ends(self, services, **options):
        (ends,) = run_ranks(self.MODULE, 2, [("on_nodes", {"services": services, "job": self._testMethodName,
                                                           "timeout": 3.0} | options)])
        return ends

    def test_ranks_on_one_node_share_its_service(self):
        ends = self.ends(["node"] * 2, sockets=[self.service.address] * 2)
        self.assertEqual(ends, [["none", "", 2]] * 2)
        job = ballast.connect(self.service.address).job(self._testMethodName)
        self.assertEqual((job["committed_step"], job["members"]), (2, []))

    def test_what_cannot_be_is_one_line_on_all(self):
        one, other = self.service.address, ballast.Service(memory_limit="256MiB")
        self.addCleanup(other.stop)
        near = [ballast.Service(memory_limit="256MiB", host="127.0.0.1") for _ in range(2)]
        for service in near:
            self.addCleanup(service.stop)
        for name, services, options in (
                ("modes", ["node", one], {"sockets": [one] * 2}),
                ("no service", ["node"] * 2, {"sockets": [one, "unix:/no/such/socket"]}),
                ("unix sockets only", ["node"] * 2, {"sockets": [one, other.address]}),
                ("loopback", ["node"] * 2, {"sockets": [service.address for service in near]}),
                ("no network", [None] * 2, {"apart": True})):
            with self.subTest(name):
                ends = self.ends(services, **options)
                self.assertNotIn("none", [kind for kind, _, _ in ends])
                # A rank may hear of the other one's error before it has its own.
                (line,) = {said.split(": ", 1)[1] if said.startswith("rank ") else said for _, said, _ in ends}
                says(self, line)

    def test_ranks_with_other_folders_share_the_service_of_the_first(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(self.ends([None] * 2, temporary=[None, folder]), [["none", "", 2]] * 2)


if __name__ == "__main__":
    unittest.main()
