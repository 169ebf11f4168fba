#!/usr/bin/env python3
"""ballast-worker --service=node: the workers of two nodes find each other's services, and the bits are those of one
service."""

import dataclasses
import os
import pathlib
import signal
import tempfile

from cluster_case import TRAINING, ClusterCase, main
from members import PORT, RANKS, Member
from processes import PATIENCE, start, stop
from runs import BIN, read, result_of, tail

SOCKET = "unix:/run/ballast/ballastd.sock"


class Node(Member):
    """A host with a name, whose service also listens at the usual socket. everywhere: and at all addresses."""

    def __init__(self, folder, host, *flags, everywhere=False):
        self.everywhere = everywhere
        host.do("mkdir", "/run/ballast")
        super().__init__(folder, host, *flags)
        self.address = f"{host.address}:{PORT}"

    def start(self, listen):
        super().start(f"{f'0.0.0.0:{PORT}' if self.everywhere else listen},{SOCKET}")

    def stop(self, number=signal.SIGKILL):
        """What is behind nsenter ends with the host."""
        stop(self.process, number)


class Workers:
    """The workers of a job, one rank after the other on the next of these hosts."""

    def __init__(self, folder, hosts, job, services, *words):
        self.job, self.folder = job, pathlib.Path(tempfile.mkdtemp(prefix=f"run-{job}-", dir=folder))
        self.out = self.folder / "out"
        self.processes = []
        for rank in range(RANKS):
            host = hosts[rank % len(hosts)]
            # LeakSanitizer finds no threads where a process has another number in /proc than for itself.
            environment = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": hosts[0].address, "MASTER_PORT": 29400,
                           "OMP_NUM_THREADS": 1,
                           "ASAN_OPTIONS": f"{os.environ.get('ASAN_OPTIONS', '')}:detect_leaks=0"}
            self.processes.append(start(
                [*host.words, BIN / "ballast-worker", f"--service={services[rank % len(services)]}", f"--job={job}",
                 f"--out={self.out}", "--peer-timeout=60s", "--seal-timeout=30s", *words],
                self.folder / f"rank-{rank}.err", environment={key: str(value) for key, value in environment.items()}))

    def log(self, rank):
        return read(self.folder / f"rank-{rank}.err")

    def wait(self):
        """Their exit codes."""
        return [process.wait(PATIENCE) for process in self.processes]

    def story(self):
        return "".join(f"\n  rank {rank}:{tail(self.folder / f'rank-{rank}.err')}" for rank in range(RANKS))

    def stop(self):
        for process in self.processes:
            stop(process)


class WorkerNodes(ClusterCase):
    def setUp(self):
        self.hosts, self.nodes = [], []
        saved = tempfile.mkdtemp(prefix="saved-", dir=self.folder)
        for everywhere in (True, False):
            self.hosts.append(self.network.add_host(whole=True))
            self.addCleanup(self.network.remove_host, self.hosts[-1])
            self.nodes.append(Node(self.folder, self.hosts[-1], f"--checkpoint-dir={saved}", everywhere=everywhere))
            self.addCleanup(self.nodes[-1].stop)

    def run_on(self, hosts, *services, steps=TRAINING.steps):
        words = [*dataclasses.replace(TRAINING, steps=steps).words(), f"--decay-end={TRAINING.steps}"]
        run = Workers(self.folder, hosts, "gpt", services, *words)
        self.addCleanup(run.stop)
        return run

    def train(self, hosts, **options):
        run = self.run_on(hosts, "node", **options)
        self.assertEqual(run.wait(), [0] * RANKS, run.story())
        return run

    def test_each_rank_has_its_home_on_its_node_and_keeps_it(self):
        first = self.train(self.hosts, steps=7)
        job = self.nodes[0].job("gpt")
        self.assertEqual([member["address"] for member in job["members"]], [node.address for node in self.nodes])
        self.assertEqual(job["homes"], [0, 1, 0, 1])
        self.assertIn("shared memory", read(first.out / "worker.json"))
        # Each rank is on the other node now.
        moved = self.train(self.hosts[::-1])
        self.assertEqual(self.nodes[0].job("gpt")["homes"], job["homes"])
        for rank in range(RANKS):
            self.assertIn("go over the network", moved.log(rank))
        moved.out.joinpath("losses.csv").write_text(
            read(first.out / "losses.csv") + read(moved.out / "losses.csv").partition("\n")[2])
        self.assert_same_bits(result_of(moved, self.nodes[0]))

    def test_on_one_node_the_job_has_one_service(self):
        self.train(self.hosts[:1])
        self.assertEqual(self.nodes[0].job("gpt")["members"], [])

    def test_ranks_that_name_other_services_end_with_one_line(self):
        both = f"{self.nodes[0].address},{self.nodes[1].address}"
        for services in ((both, self.nodes[0].address), ("node", both), (both, "node")):
            run = self.run_on(self.hosts, *services)
            self.assertEqual(run.wait(), [1] * RANKS, run.story())
            for rank in range(RANKS):
                self.assertIn("rank 1 and rank 0 differ in --service", run.log(rank))
            for node in self.nodes:
                self.assertEqual(node.jobs(), [])


if __name__ == "__main__":
    main()
