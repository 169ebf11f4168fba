#!/usr/bin/env python3
"""ballast.torch over a service whose process is killed again and again: the trainers notice a warning line, and end
with the weights of a run that nothing befell."""

import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import unittest

from ranks_for_tests import ROOT, run_ranks

sys.path.insert(0, str(ROOT / "tests/support"))

import processes  # noqa: E402
from processes import read, tail  # noqa: E402

CASES = [("fsdp", {"overlap": True}), ("fsdp", {"overlap": True, "accumulation": 4}), ("fsdp", {"overlap": False}),
         ("ddp", {"overlap": True, "accumulation": 3}), ("ddp", {"overlap": False})]
MOST_KILLS = 24  # Then the rest goes on undisturbed.
LONGEST_LIFE = 0.12  # Seconds from one death to the next, at most, once the service is back.


class ServiceDeathTest(unittest.TestCase):
    def kill(self, service, over):
        """Kills the service's process until `over`; counts."""
        self.kills = kills = 0
        parent = service.process.pid
        while not over.is_set() and kills < MOST_KILLS:
            served = read(service.log).count("listening on")
            time.sleep(LONGEST_LIFE * (kills % 5) / 4)
            children = read(pathlib.Path(f"/proc/{parent}/task/{parent}/children")).split()
            if not children:
                continue
            os.kill(int(children[0]), signal.SIGKILL)
            self.kills = kills = kills + 1
            while read(service.log).count("listening on") == served and not over.is_set():
                time.sleep(0.005)

    def test_trainers_go_on_and_end_with_the_same_weights(self):
        from ballast import _files
        with tempfile.TemporaryDirectory() as name:
            service = processes.Service(_files.program("ballastd"), pathlib.Path(name), "--memory-limit=1GiB",
                                        "--threads=2", "--most-deaths=0")
            self.addCleanup(service.stop)

            def train(prefix):
                return run_ranks("overlap_ranks", 2, [
                    (function, {"service": service.address, "job": f"{prefix}-{number}", **options})
                    for number, (function, options) in enumerate(CASES)])

            undisturbed = train("undisturbed")
            over = threading.Event()
            killer = threading.Thread(target=self.kill, args=(service, over))
            killer.start()
            try:
                disturbed = train("disturbed")
            except AssertionError as error:
                raise AssertionError(f"{error}\n  the service said:{tail(service.log, 20)}") from None
            finally:
                over.set()
                killer.join()
            self.assertEqual([[digest for digest, _ in of_case] for of_case in disturbed],
                             [[digest for digest, _ in of_case] for of_case in undisturbed])
            self.assertGreaterEqual(self.kills, 5)
            print(f"{self.kills} kills of the service, the same weights", file=sys.stderr)

    def test_who_only_looks_waits_for_the_next_process(self):
        import ballast
        import ballast.torch
        import torch
        from ballast import _files
        torch.manual_seed(1)
        with tempfile.TemporaryDirectory() as name:
            service = processes.Service(_files.program("ballastd"), pathlib.Path(name), "--memory-limit=1GiB",
                                        "--threads=2", "--most-deaths=0")
            self.addCleanup(service.stop)
            module = torch.nn.Linear(9, 5)
            optimizer = ballast.torch.AdamW(module.named_parameters(), service=service.address, job="looked-at",
                                            full_state=True)
            module(torch.ones(9)).sum().backward()
            optimizer.step()
            client = ballast.connect(service.address)
            client.wait = processes.PATIENCE

            def look():
                return [repr(optimizer.state_dict()["state"]), client.summary("looked-at", "weight"),
                        client.state("looked-at", "weight").tolist(), [job["name"] for job in client.jobs()]]

            first = look()
            over = threading.Event()
            killer = threading.Thread(target=self.kill, args=(service, over))
            killer.start()
            try:
                while killer.is_alive():
                    self.assertEqual(look(), first)
            finally:
                over.set()
                killer.join()
            self.assertEqual(self.kills, MOST_KILLS)
            optimizer.close()


if __name__ == "__main__":
    unittest.main()
