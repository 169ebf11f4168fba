#!/usr/bin/env python3
"""ballastd under a service manager: what it says to NOTIFY_SOCKET, and when.

    service_manager_test.py BIN_DIR
"""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))

from messages import says  # noqa: E402
from processes import PATIENCE, Service  # noqa: E402

BIN = pathlib.Path(sys.argv.pop())


class ServiceManager(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(self.socket.close)
        self.socket.settimeout(PATIENCE)

    def serve(self, address, *flags, **environment):
        """A service that tells what it does at `address`."""
        self.socket.bind(address.replace("@", "\0"))
        service = Service(BIN / "ballastd", self.dir, *flags, environment={"NOTIFY_SOCKET": address, **environment})
        self.addCleanup(service.stop)
        return service

    def next_told(self):
        return self.socket.recv(4096).decode().splitlines()

    def forget(self):
        """What it has told so far: the kernel keeps ten messages, and drops what comes then."""
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.next_told()
        self.socket.settimeout(PATIENCE)

    def told_until(self, wanted):
        """What it tells up to the first message with the line `wanted`, or one of which that is true."""
        is_wanted = wanted if callable(wanted) else wanted.__eq__
        told = []
        while not any(map(is_wanted, told)):
            told += self.next_told()
        return told

    def test_is_ready_once_it_listens_and_says_when_it_stops(self):
        service = self.serve(str(self.dir / "notify"))
        # Its address was written before, and nothing was told before that.
        self.assertEqual(self.next_told(), ["READY=1", f"STATUS=listening on {service.address}"])
        service.process.send_signal(signal.SIGTERM)
        self.assertEqual(self.next_told(), ["STATUS=saving all jobs"])
        # A manager that waits for less than a save takes would kill it.
        self.assertRegex(self.next_told()[0], "^EXTEND_TIMEOUT_USEC=30000000$")
        self.assertIn("STATUS=stopped", self.told_until("STOPPING=1"))
        self.assertEqual(service.process.wait(PATIENCE), 0)

    def test_an_abstract_address_and_a_watchdog(self):
        service = self.serve(f"@ballast-{os.getpid()}", WATCHDOG_USEC="12000000")
        self.told_until("READY=1")
        # Eight times in the watchdog's time; a service that is stuck ends after six.
        self.assertEqual([self.next_told() for _ in range(8)], [["WATCHDOG=1"]] * 8)
        self.assertIsNone(service.process.poll())

    def test_a_stop_that_it_refuses_ends_nothing_and_can_be_asked_for_again(self):
        checkpoints = self.dir / "checkpoints"
        # With a watchdog of 12 seconds it asks for more time every 3, otherwise every 10.
        service = self.serve(str(self.dir / "notify"), f"--checkpoint-dir={checkpoints}", WATCHDOG_USEC="12000000")
        subprocess.run([BIN / "ballast-example", service.address], check=True, capture_output=True, timeout=PATIENCE)
        for found in checkpoints.iterdir():
            found.unlink()
        checkpoints.rmdir()
        checkpoints.write_text("in the way")
        self.forget()
        service.process.send_signal(signal.SIGTERM)
        told = self.told_until(lambda line: line.startswith("STATUS=not stopped, because not saved: job "))
        self.assertIn(str(checkpoints), told[-1])
        # A manager does not take that back, and would end the service by force, with its jobs.
        self.assertNotIn("STOPPING=1", told)
        for _ in range(3):
            self.told_until("EXTEND_TIMEOUT_USEC=30000000")
        checkpoints.unlink()
        checkpoints.mkdir()
        service.process.send_signal(signal.SIGTERM)
        self.told_until("STOPPING=1")
        self.assertEqual(service.process.wait(PATIENCE), 0)

    def test_says_in_one_line_what_is_wrong_with_its_environment(self):
        manager = self.dir / "manager"
        self.socket.bind(str(manager))
        for environment in ({"NOTIFY_SOCKET": "relative"}, {"NOTIFY_SOCKET": "/" + "n" * 200},
                            {"NOTIFY_SOCKET": str(self.dir / "none")},
                            {"NOTIFY_SOCKET": str(manager), "WATCHDOG_USEC": "-1"},
                            {"NOTIFY_SOCKET": str(manager), "WATCHDOG_USEC": "soon"}):
            done = subprocess.run([BIN / "ballastd", "--listen=127.0.0.1:0"], text=True, capture_output=True,
                                  timeout=PATIENCE, check=False, env=os.environ | environment)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
            says(self, done.stderr.rstrip())


if __name__ == "__main__":
    unittest.main()
