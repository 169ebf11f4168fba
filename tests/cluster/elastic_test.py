#!/usr/bin/env python3
"""torchrun with one or two nodes: a node is lost, and another comes. The job goes on with another number of ranks, from a
checkpoint of the services. In an environment with PyTorch (tests/client/python/torch_environment.py)."""

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import typing
import unittest

import decisions
from hosts import Network, enter_network_of_own
from processes import ROOT, await_, read, start, stop, tail  # In a folder where hosts looks.

PYTHON = ROOT / "client/python"
sys.path.insert(0, str(PYTHON))
from ballast import _files  # noqa: E402

TRAINER = pathlib.Path(__file__).with_name("elastic_trainer.py")
RANKS = 2  # On each node.
PORT, MEETING_PORT = 7070, 29400


class State(typing.NamedTuple):
    """Of a line that the trainer has written."""

    event: str
    step: str
    ranks: str
    digest: str


class Elastic(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ballast-elastic-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.network = Network(self.folder)
        self.addCleanup(self.network.close)
        self.agents = {}  # By host.

    def add_node(self, flags=()):
        """A host with a service and torchrun's agent."""
        host = self.network.add_host(whole=True)
        host.do("mkdir", "/run/ballast")
        log = self.folder / f"service-{len(self.agents)}.log"
        service = start([*host.words, _files.program("ballastd"), "--nostartup-benchmark", "--threads=1", "--insecure",
                         "--log-level=debug", f"--listen=unix:/run/ballast/ballastd.sock,{host.address}:{PORT}", *flags], log)
        self.addCleanup(stop, service)
        await_("a service", lambda: "listening on" in read(log), service)
        first = next(iter(self.agents), host)
        self.agents[host] = start(
            [*host.words, sys.executable, "-B", "-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={RANKS}",
             "--max-restarts=3", "--monitor-interval=0.1", "--rdzv-backend=c10d",
             f"--rdzv-endpoint={first.address}:{MEETING_PORT}", f"--local-addr={host.address}",
             f"--rdzv-conf=is_host={int(host is first)},last_call_timeout=3,keep_alive_interval=1", TRAINER, self.folder],
            self.log(host), environment={
                "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PYTHON),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        self.addCleanup(stop, self.agents[host])
        return host

    def log(self, host):
        return self.folder / f"{host.address}.log"

    def states(self):
        return [State(*line.split()) for line in read(self.folder / "states").splitlines()]

    def await_ranks(self, ranks, steps):
        """Until so many ranks have made so many steps together."""
        def are_there():
            made = 0
            for state in self.states():
                made = 0 if state.event == "attached" else made + 1
            return made >= steps and self.states()[-1].ranks == str(ranks)
        try:
            await_(f"{steps} steps of {ranks} ranks", are_there)
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(tail(self.log(host), 40) for host in self.agents)) from None

    @contextlib.contextmanager
    def timed(self, what):
        begin = time.monotonic()
        yield
        print(f"{what}: the next step after {time.monotonic() - begin:.1f} s", flush=True)

    def jobs(self, host):
        done = subprocess.run([*host.words, _files.program("ballast"), "jobs", "--json"], stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=30, check=True)
        return json.loads(done.stdout)["jobs"]

    def test_the_job_goes_on_with_another_number_of_ranks(self):
        flags = [f"--checkpoint-dir={self.folder}/saved", "--checkpoint-every=3steps", "--checkpoint-keep=1000"]
        first, second = self.add_node(flags), self.add_node(flags)
        self.await_ranks(2 * RANKS, 5)
        with self.timed("a node is lost"):
            second.close()  # With its agent, ranks and service. Its address stays taken.
            self.await_ranks(RANKS, 1)
        self.await_ranks(RANKS, 5)
        with self.timed("a node comes"):
            third = self.add_node(flags)
            self.await_ranks(2 * RANKS, 1)
        self.await_ranks(2 * RANKS, 3)
        self.assertEqual([len(job["members"]) for job in self.jobs(first) + self.jobs(third)], [2, 2])
        (self.folder / "enough").touch()
        for host in (first, third):
            self.assertEqual(self.agents[host].wait(60), 0, tail(self.log(host), 40))
            self.assertEqual(self.jobs(host), [])

        states = self.states()
        attached = [number for number, state in enumerate(states) if state.event == "attached"]
        attached = attached[-3:]  # At first a node may have begun alone.
        starts = [states[number] for number in attached]
        self.assertEqual([start.ranks for start in starts], ["4", "2", "4"])
        for number, start_ in zip(attached[1:], starts[1:]):
            made = [state.digest for state in states[:number] if state.step == start_.step]
            if made:  # The last step is committed before it is written here.
                self.assertEqual(made[-1], start_.digest)
            else:
                self.assertEqual(int(start_.step), int(states[number - 1].step) + 1)
        self.assertEqual(int(starts[1].step) % 3, 0)  # Of the newest checkpoint: the lost node had a part.
        self.assertGreaterEqual(int(starts[2].step), int(states[attached[2] - 1].step))  # Nothing is lost.
        self.assertGreaterEqual(decisions.check(map(read, self.folder.glob("service-*.log"))), int(states[-1].step))


if __name__ == "__main__":
    enter_network_of_own()
    unittest.main(verbosity=2)
