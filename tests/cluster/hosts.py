"""Hosts of a test: network namespaces on one bridge.

All of it lies in a network namespace of the test's own, where the test's process has the bridge's address. A
namespace lives as long as a process in it, and every process here ends with the test. So nothing is left behind,
however the test ends.
"""

import contextlib
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))

from processes import await_, children_of, read, start, stop  # noqa: E402

NOT_THERE = 77  # CTest counts it as skipped.
WIRE = pathlib.Path(__file__).with_name("wire.py")
NOBODY = "02:00:00:00:00:fe"  # No host's hardware address.
MARK = "BALLAST_IN_NETWORK_OF_OWN"


def do(*words):
    done = subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=30, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


def enter_network_of_own():
    """Starts this program again, in a network namespace of its own: call it first. Exits where none can be made: with
    77, and with BALLAST_REQUIRE_NAMESPACES=1 with 1."""
    if os.environ.get(MARK) == str(os.getpid()):
        return
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
    try:
        with open("/dev/net/tun", "r+b", buffering=0):  # Of wire.py.
            pass
        do(*unshare, "sh", "-c", "ip link add bridge type bridge && ip link add port type veth peer name eth0")
    except (AssertionError, OSError) as error:
        required = os.environ.get("BALLAST_REQUIRE_NAMESPACES") == "1"
        print(f"{'FAILED' if required else 'SKIPPED'}: no network namespaces can be made here: {error}", flush=True)
        sys.exit(1 if required else NOT_THERE)
    os.environ[MARK] = str(os.getpid())  # exec keeps it.
    os.execvp(unshare[0], [*unshare, sys.executable, "-B", *sys.argv])


class Host:
    """A namespace with an address on the bridge. What it sends arrives `delay` seconds later; of its packets the share
    `loss` does not. whole: it also has a name, a /run and processes of its own, which end with it."""

    def __init__(self, folder, number, delay=0.0, loss=0.0, whole=False):
        self.address = f"10.77.0.{number}"
        self.port = f"port{number}"  # The bridge's end of its wire.
        self.log = folder / f"host-{number}.log"
        self.processes = []
        try:
            self.open(f"02:00:00:00:00:{number:02x}", f"end{number}", delay, loss, whole)
            if whole:
                self.do(sys.executable, "-c", f"import socket; socket.sethostname('gpu{number}')")
                self.do("mount", "-t", "tmpfs", "run", "/run")
                with contextlib.suppress(AssertionError):  # In a user namespace it may be refused.
                    self.do("mount", "-t", "proc", "proc", "/proc")
        except BaseException:
            self.close()
            raise

    def open(self, hardware_address, end, delay, loss, whole):
        self.log.unlink(missing_ok=True)  # Of an earlier host of this number.
        more = ["--mount", "--uts", "--pid", "--fork", "--kill-child"] if whole else []
        # The shell of a whole host stays, and reaps orphans as init does.
        stays = "sleep infinity; exit" if whole else "exec sleep infinity"
        holder = start(["unshare", "--net", *more, "sh", "-c", f"echo made; {stays}"], self.log)
        self.processes.append(holder)
        await_("a namespace", lambda: "made" in read(self.log), holder)
        self.words = ["nsenter", f"--net=/proc/{holder.pid}/ns/net", "--"]  # Before a command: runs it here.
        if whole:
            self.words = ["nsenter", f"--target={children_of(holder.pid)[0]}", "--net", "--mount", "--uts", "--pid",
                          f"--wd={os.getcwd()}", "--"]
        if delay or loss:
            self.processes.append(start([sys.executable, "-B", WIRE, end, self.port, delay, loss], self.log))
            await_("a wire", lambda: "wire is open" in read(self.log), self.processes[-1])
        else:
            do("ip", "link", "add", self.port, "type", "veth", "peer", "name", end)
        do("ip", "link", "set", end, "netns", holder.pid, "name", "eth0", "address", hardware_address)
        do("ip", "link", "set", self.port, "master", "bridge", "up")
        self.do("ip", "link", "set", "lo", "up")
        self.do("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.do("ip", "link", "set", "eth0", "up")

    def do(self, *words):
        do(*self.words, *words)

    def close(self):
        """The kernel removes the namespace a little later."""
        for process in self.processes:
            stop(process)
        with contextlib.suppress(AssertionError):  # The wire's process has taken it along.
            do("ip", "link", "del", self.port)


class Network:
    def __init__(self, folder):
        self.folder = folder
        self.hosts = {}  # By number.
        do("ip", "link", "set", "lo", "up")
        do("ip", "link", "add", "bridge", "type", "bridge")
        do("ip", "address", "add", "10.77.0.254/24", "dev", "bridge")
        do("ip", "link", "set", "bridge", "up")

    def close(self):
        for host in self.hosts.values():
            host.close()
        do("ip", "link", "del", "bridge")

    def add_host(self, **options):
        number = next(number for number in range(1, 200) if number not in self.hosts)
        self.hosts[number] = Host(self.folder, number, **options)
        return self.hosts[number]

    def remove_host(self, host):
        host.close()
        self.hosts = {number: other for number, other in self.hosts.items() if other is not host}

    @contextlib.contextmanager
    def cut(self, host):
        """Nothing reaches the host, and nothing that it sends arrives: its cable is out."""
        do("ip", "link", "set", host.port, "down")
        try:
            yield
        finally:
            do("ip", "link", "set", host.port, "up")

    @contextlib.contextmanager
    def one_way(self, silent, other):
        """What `silent` sends to `other` does not arrive. The other direction is whole."""
        silent.do("ip", "neighbor", "replace", other.address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
        try:
            yield
        finally:
            silent.do("ip", "neighbor", "del", other.address, "dev", "eth0")

    @contextlib.contextmanager
    def apart(self, one, other):
        """Nothing passes between the two; others reach both."""
        with self.one_way(one, other), self.one_way(other, one):
            yield
