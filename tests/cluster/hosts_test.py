#!/usr/bin/env python3
"""What hosts.py promises: cuts cut, in the direction that they say, and end; slow wires are slow, lossy ones lose."""

import contextlib
import pathlib
import sys
import tempfile
import time
import unittest

from hosts import Network, enter_network_of_own
from processes import await_, read, start, stop

ECHO = """
import socket, sys
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.bind((sys.argv[1], 7))
print("ready", flush=True)
while True:
    packet, sender = here.recvfrom(100)
    here.sendto(packet, sender)
    print("heard", flush=True)
"""
# Sends packets for so long; each answer's delay in a line.
SEND = """
import socket, sys, time
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.settimeout(0.1)
for number in range(int(sys.argv[2])):
    begin = time.monotonic()
    here.sendto(b"%d" % number, (sys.argv[1], 7))
    try:
        while here.recv(100) != b"%d" % number: pass
        print(time.monotonic() - begin, flush=True)
    except TimeoutError:
        pass
"""


class Hosts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ballast-hosts-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.network = Network(self.folder)
        self.addCleanup(self.network.close)

    def start(self, host, name, program, *words):
        log = self.folder / f"{name}-{time.monotonic_ns()}"
        process = start([*host.words, sys.executable, "-c", program, *words], log)
        self.addCleanup(stop, process)
        return process, log

    def two(self, **wire):
        """A host that asks, one that answers, and the log of the second."""
        asks, answers = self.network.add_host(**wire), self.network.add_host()
        process, log = self.start(answers, "echo", ECHO, answers.address)
        await_("the echo", lambda: "ready" in read(log), process)
        return asks, answers, log

    def answered(self, asks, answers, packets):
        """The delays of what was answered."""
        process, log = self.start(asks, "send", SEND, answers.address, packets)
        process.wait(60)
        return [float(line) for line in read(log).splitlines()]

    def test_a_wire_carries_packets(self):
        asks, answers, _ = self.two()
        self.assertEqual(len(self.answered(asks, answers, 20)), 20)

    def test_a_cut_host_is_cut_until_it_is_not(self):
        asks, answers, heard = self.two()
        self.assertTrue(self.answered(asks, answers, 1))
        for cut in (self.network.cut(answers), self.network.cut(asks), self.network.apart(asks, answers)):
            count = read(heard).count("heard")
            with cut:
                self.assertEqual(self.answered(asks, answers, 3), [])
                self.assertEqual(read(heard).count("heard"), count)
            await_("an answer after the cut", lambda: self.answered(asks, answers, 1))

    def test_a_one_way_cut_leaves_the_other_way(self):
        asks, answers, heard = self.two()
        self.assertTrue(self.answered(asks, answers, 1))
        with self.network.one_way(answers, asks):
            count = read(heard).count("heard")
            self.assertEqual(self.answered(asks, answers, 3), [])
            self.assertEqual(read(heard).count("heard"), count + 3)

    def test_a_slow_wire_is_slow(self):
        asks, answers, _ = self.two(delay=0.02)
        delays = self.answered(asks, answers, 20)
        self.assertTrue(delays)
        self.assertGreaterEqual(min(delays), 0.02)

    def test_a_lossy_wire_loses_some(self):
        asks, answers, _ = self.two(loss=0.1)
        self.assertIn(len(self.answered(asks, answers, 100)), range(50, 100))

    def test_a_host_that_is_removed_makes_room_for_another(self):
        for wire in ({}, {"delay": 0.001}):
            asks, answers, _ = self.two(**wire)
            self.assertTrue(self.answered(asks, answers, 3))
            with contextlib.ExitStack() as gone:
                for host in (asks, answers):
                    gone.callback(self.network.remove_host, host)


if __name__ == "__main__":
    enter_network_of_own()
    unittest.main(verbosity=2)
