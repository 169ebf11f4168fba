"""A real etcd of a test, Debian's: one server, or several on hosts of their own."""

import base64
import json
import os
import signal
import subprocess
import sys

from hosts import NOT_THERE
from processes import await_, read, start, stop

CLIENTS, PEERS = 2379, 2380


def require():
    """Ends this program where etcd is not installed."""
    try:
        subprocess.run(["etcd", "--version"], check=True, capture_output=True)
    except OSError:
        required = os.environ.get("BALLAST_REQUIRE_NAMESPACES") == "1"
        print(f"{'FAILED' if required else 'SKIPPED'}: apt-get install etcd-server etcd-client", flush=True)
        sys.exit(1 if required else NOT_THERE)


class Etcd:
    """On these hosts. words: more flags. environment: what etcdctl needs beside."""

    def __init__(self, folder, hosts, *words, scheme="http", environment=None):
        self.folder, self.hosts, self.scheme, self.words = folder, hosts, scheme, words
        self.environment = environment or {}
        self.endpoints = ",".join(f"{host.address}:{CLIENTS}" for host in hosts)
        self.processes = []
        for number in range(len(hosts)):
            self.processes.append(None)
            self.start(number)
        await_("etcd", lambda: "is healthy" in self.control("endpoint", "health", check=False))

    def start(self, number):
        """Also again: over the data of before."""
        host, name = self.hosts[number], f"etcd{number}"
        peers = ",".join(f"etcd{other}=http://{peer.address}:{PEERS}" for other, peer in enumerate(self.hosts))
        clients = f"{self.scheme}://{host.address}:{CLIENTS}"
        self.processes[number] = start(
            [*host.words, "etcd", f"--name={name}", f"--data-dir={self.folder / name}", "--log-level=warn",
             f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}",
             f"--listen-peer-urls=http://{host.address}:{PEERS}", f"--initial-cluster={peers}", *self.words,
             f"--initial-advertise-peer-urls=http://{host.address}:{PEERS}", "--unsafe-no-fsync"],
            self.folder / f"{name}.log", environment={"ETCD_UNSUPPORTED_ARCH": os.uname().machine.replace("aarch64", "arm64")})

    def signal(self, number):
        for process in self.processes:
            process.send_signal(number)

    def stop(self):
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            stop(process)

    def control(self, *words, check=True):
        """What etcdctl prints, called on the last host."""
        host = self.hosts[-1]
        done = subprocess.run(
            [*host.words, "etcdctl", f"--endpoints={self.scheme}://{host.address}:{CLIENTS}", *words],
            env=os.environ | {"ETCDCTL_API": "3"} | self.environment, capture_output=True, text=True, timeout=60, check=False)
        if check and done.returncode != 0:
            raise AssertionError(f"etcdctl {words}: {done.stderr}")
        return done.stdout + done.stderr

    def values(self, prefix):
        """By key, as JSON."""
        listed = self.control("get", "--prefix", prefix, "-w", "json")
        found = json.loads(listed.partition("\n")[0]).get("kvs", [])  # Behind it may be a warning.
        return {base64.b64decode(each["key"]).decode(): json.loads(base64.b64decode(each["value"])) for each in found}
