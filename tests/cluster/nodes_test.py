#!/usr/bin/env python3
"""torchrun on two nodes, with a service on each, which the run starts or which is there: weights and moments are those
of one service. In an environment with PyTorch (tests/client/python/torch_environment.py)."""

import hashlib
import json
import pathlib
import sys
import tempfile
import unittest

from hosts import Network, enter_network_of_own
from processes import ROOT, await_, read, start, stop, tail
from certificates import Authority, private  # In the folder of processes, where hosts looks.

PYTHON = ROOT / "client/python"
sys.path.insert(0, str(PYTHON))
from ballast import _files  # noqa: E402

TRAINER = pathlib.Path(__file__).with_name("nodes_trainer.py")
STEPS = 3
RANKS = 2  # On each node.
PORT, MASTER_PORT = 7070, 29400


class Run:
    """The trainer, by a torchrun on each host; the first one's is the master. Each host has a folder of its own for
    temporary files."""

    def __init__(self, folder, hosts, services, environment, launch):
        self.folder, self.hosts = folder, hosts
        self.agents = []
        try:
            for number, host in enumerate(hosts):
                self.temporary(host).mkdir(parents=True)
                self.agents.append(start(
                    [*host.words, sys.executable, "-B", "-m", "torch.distributed.run", f"--nnodes={len(hosts)}",
                     f"--nproc-per-node={RANKS}", *launch(number), TRAINER, f"--results={folder}", *services],
                    self.log(host), environment=environment | {
                        "TMPDIR": str(self.temporary(host)), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": str(PYTHON)}))
        except BaseException:
            self.stop()
            raise

    def temporary(self, host):
        return self.folder / f"tmp-{host.address}"

    def log(self, host):
        return self.folder / f"{host.address}.log"

    def results(self):
        """By service, what each rank has written."""
        await_("the end of the run", lambda: all(agent.poll() is not None for agent in self.agents))
        if any(agent.returncode for agent in self.agents):
            raise AssertionError("".join(f"{host.address}:{tail(self.log(host), 120)}\n" for host in self.hosts))
        of_ranks = [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(RANKS * len(self.hosts))]
        return {service: [rank[service] for rank in of_ranks] for service in of_ranks[0]}

    def stop(self):
        for agent in self.agents:
            stop(agent)


class Nodes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ballast-nodes-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        network = Network(self.folder)
        self.addCleanup(network.close)
        self.hosts = [network.add_host(whole=True) for _ in range(2)]
        self.addresses = [f"{host.address}:{PORT}" for host in self.hosts]

    def run_on(self, hosts, *services, environment=None):
        return self.run_by(lambda number: [f"--node-rank={number}", f"--master-addr={hosts[0].address}",
                                           f"--master-port={MASTER_PORT}"], hosts, f"--steps={STEPS}", *services,
                           environment=environment)

    def run_by(self, launch, hosts, *words, environment=None):
        """launch: torchrun's flags on a host, by its number. words: for the trainer."""
        run = Run(self.folder / f"run-{len(list(self.folder.glob('run-*')))}", hosts, words, environment or {}, launch)
        self.addCleanup(run.stop)
        return run

    def start_service(self, host, listen, flags=("--insecure",)):
        host.do("mkdir", "/run/ballast")
        log = self.folder / f"service-{host.address}.log"
        service = start([*host.words, _files.program("ballastd"), "--nostartup-benchmark", "--threads=1", *flags,
                         f"--listen=unix:/run/ballast/ballastd.sock,{listen}"], log)
        self.addCleanup(stop, service)
        await_("a service", lambda: "listening on" in read(log), service)

    def assert_spread(self, ranks, alone, **facts):
        for rank, reference in zip(ranks, alone):
            self.assertEqual(rank, reference | facts | {"members": rank["members"], "homes": [0, 0, 1, 1]})
            self.assertEqual(rank["members"], ranks[0]["members"])

    def test_the_state_is_that_of_one_service(self):
        self.start_service(self.hosts[0], f"0.0.0.0:{PORT}")
        self.start_service(self.hosts[1], self.addresses[1])
        run = self.run_on(self.hosts, "None", "node", self.addresses[0])
        results = run.results()
        self.assert_spread(results["None"], results[self.addresses[0]], shares_memory=True, is_open=[False] * 2)
        self.assert_spread(results["node"], results[self.addresses[0]], shares_memory=True, is_open=[True] * 2)
        self.assertEqual(results["node"][0]["members"], self.addresses)
        own = results["None"][0]["members"]
        self.assertEqual([address.rpartition(":")[0] for address in own], [host.address for host in self.hosts])
        self.assertTrue(set(own).isdisjoint(self.addresses))
        for host in self.hosts:  # What the run has started has ended.
            self.assertEqual(list(run.temporary(host).glob("ballast-*")), [])
        # Each rank is on the other node now, and has its home where it was.
        moved = self.run_on(self.hosts[::-1], "node", self.addresses[0])
        results = moved.results()
        self.assertEqual(results["node"][0]["step"], 2 * STEPS)
        self.assert_spread(results["node"], results[self.addresses[0]], shares_memory=False, is_open=[True] * 2)
        self.assertEqual(results["node"][0]["members"], self.addresses)
        for host in self.hosts:
            self.assertIn("go over the network", read(moved.log(host)))

    def test_services_of_a_run_outlive_its_ranks(self):
        self.start_service(self.hosts[0], self.addresses[0])
        run = self.run_by(lambda number: ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.hosts[0].address}:{MASTER_PORT}",
                                          f"--rdzv-conf=is_host={int(number == 0)}", "--max-restarts=3",
                                          f"--local-addr={self.hosts[number].address}", "--monitor-interval=0.1"],
                          self.hosts, f"--deaths={self.hosts[1].address}", "--steps=6", "None", self.addresses[0],
                          environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        results = run.results()
        self.assertEqual(len(list(run.folder.glob("death-*"))), 2)
        self.assert_spread(results["None"], results[self.addresses[0]], shares_memory=True, is_open=[False] * 2)
        for host in self.hosts:
            self.assertIn("go over the network", read(run.log(host)))  # Between the deaths.
            self.assertNotIn("was kept", read(run.log(host)))
            await_("the end of its service", lambda: not list(run.temporary(host).glob("ballast-*")))

    def test_with_tls_and_roles(self):
        authority, token = Authority(self.folder), private(self.folder / "token", "a-token-of-a-test\n")
        digest = hashlib.sha256(token.read_bytes().strip()).hexdigest()
        tokens = private(self.folder / "tokens", f"test {digest}\n")
        roles = private(self.folder / "roles", "trainer * token:test\nmember nodes cert:gpu1\nmember pool cert:gpu2\n")
        for host, address, name in zip(self.hosts, self.addresses, ("gpu1", "gpu2")):
            certificate, key = authority.issue(name, host.address)
            self.start_service(host, address, [
                f"--tls-cert={certificate}", f"--tls-key={key}", f"--tls-client-ca={authority.certificate}",
                f"--roles-file={roles}", f"--tokens-file={tokens}"])
        credentials = {"BALLAST_TLS_CA": str(authority.certificate), "BALLAST_TOKEN_FILE": str(token)}
        pool = ",".join(self.addresses[::-1])
        results = self.run_on(self.hosts, "None", "node", pool, self.addresses[0], environment=credentials).results()
        for service, shares_memory in (("None", True), ("node", True), (pool, False)):
            self.assert_spread(results[service], results[self.addresses[0]], shares_memory=shares_memory,
                               is_open=[False] * 2)
        moved = self.run_on(self.hosts[::-1], "node", self.addresses[0], environment=credentials).results()
        self.assert_spread(moved["node"], moved[self.addresses[0]], shares_memory=False, is_open=[False] * 2)


if __name__ == "__main__":
    enter_network_of_own()
    unittest.main(verbosity=2)
