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

from ranks_for_tests import run_ranks  # Which also lets the next ones be found.

import processes
from processes import read, tail

CASES = [("fsdp", {"overlap": True}), ("fsdp", {"overlap": True, "accumulation": 4}), ("fsdp", {"overlap": False}),
         ("ddp", {"overlap": True, "accumulation": 3}), ("ddp", {"overlap": False}),
         ("fsdp", {"overlap": True, "overlap_weights": True})]
MOST_KILLS = 24  # Then the rest goes on undisturbed.
LONGEST_LIFE = 0.12  # Seconds from one death to the next, at most, once the service is back: for four lives of five.


class ServiceDeathTest(unittest.TestCase):
    def start_service(self, memory_limit="1GiB"):
        """Its folder goes after it: the process that is started after the last death still writes there."""
        from ballast import _files
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        service = processes.Service(_files.program("ballastd"), pathlib.Path(folder.name),
                                    f"--memory-limit={memory_limit}", "--threads=2", "--most-deaths=0")
        self.addCleanup(service.stop)
        return service

    def kill(self, service, over, done):
        """Kills the service's process until `over`; counts. done: how much has got through. Each fifth life lasts
        until that is more: on a slow machine nothing may get through in a short one, and clients give up after a while."""
        self.kills = kills = 0
        while not over.is_set() and kills < MOST_KILLS:
            served = read(service.log).count("listening on")
            time.sleep(LONGEST_LIFE * (kills % 5) / 4)
            if kills % 5 == 4:
                before = done()
                while done() == before and not over.is_set():
                    time.sleep(0.01)
            children = processes.children_of(service.process.pid)
            if not children:
                continue
            os.kill(children[0], signal.SIGKILL)
            self.kills = kills = kills + 1
            while read(service.log).count("listening on") == served and not over.is_set():
                time.sleep(0.005)

    def test_trainers_go_on_and_end_with_the_same_weights(self):
        undisturbed, disturbed = self.train_twice("overlap_ranks", CASES)
        self.assertEqual([[digest for digest, _ in of_case] for of_case in disturbed],
                         [[digest for digest, _ in of_case] for of_case in undisturbed])

    def test_ranks_that_orthogonalize_go_on_and_end_with_the_same_weights(self):
        undisturbed, disturbed = self.train_twice("muon_test", [
            ("given_gradients", {"kind": kind, "steps": (0, 30), "newton_schulz": "workers"}) for kind in ("ddp", "fsdp")])
        self.assertEqual(disturbed, undisturbed)

    def train_twice(self, module, cases):
        """What two ranks return without kills, and with them."""
        import ballast
        service = self.start_service()

        def train(prefix):
            return run_ranks(module, 2, [
                (function, {"service": service.address, "job": f"{prefix}-{number}", **options})
                for number, (function, options) in enumerate(cases)])

        undisturbed = train("undisturbed")
        client = ballast.connect(service.address)
        over = threading.Event()
        killer = threading.Thread(target=self.kill, args=(
            service, over, lambda: [(job["name"], job["committed_step"]) for job in client.jobs()]))
        killer.start()
        try:
            disturbed = train("disturbed")
        except AssertionError as error:
            raise AssertionError(f"{error}\n  the service said:{tail(service.log, 20)}") from None
        finally:
            over.set()
            killer.join()
        self.assertGreaterEqual(self.kills, 5)
        print(f"{self.kills} kills of the service", file=sys.stderr)
        return undisturbed, disturbed

    def test_fsdp_goes_on_from_a_death_in_each_step(self):
        service = self.start_service()
        steps = {"service": service.address, "steps": 20}
        undisturbed, disturbed = run_ranks("overlap_ranks", 2, [
            ("fsdp_with_deaths", {"job": "undisturbed", **steps}),
            ("fsdp_with_deaths", {"job": "disturbed", "holder": service.process.pid, **steps})])
        self.assertEqual([digest for digest, _ in disturbed], [digest for digest, _ in undisturbed])
        self.assertEqual([kills for _, kills in disturbed], [20, 0])
        restarts = "the service ended by signal 9; it is started again"
        # The last one may die when all weights have left, which only its parent notices.
        processes.await_("the last restart", lambda: read(service.log).count(restarts) >= 20)
        self.assertEqual(read(service.log).count(restarts), 20)
        print("20 kills of the service, one in each step, the same weights", file=sys.stderr)

    def test_who_only_looks_waits_for_the_next_process(self):
        import ballast
        import ballast.torch
        import torch
        torch.manual_seed(1)
        service = self.start_service()
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

        first, looks = look(), 0
        over = threading.Event()
        killer = threading.Thread(target=self.kill, args=(service, over, lambda: looks))
        killer.start()
        try:
            while killer.is_alive():
                self.assertEqual(look(), first)
                looks += 1
        finally:
            over.set()
            killer.join()
        self.assertEqual(self.kills, MOST_KILLS)
        optimizer.close()

    def test_moments_arrive_whenever_it_is_killed(self):
        import ballast
        import ballast.torch
        import torch
        torch.manual_seed(1)
        service = self.start_service("2GiB")
        module = torch.nn.Linear(1000, 1000)
        theirs = torch.optim.AdamW(module.named_parameters())
        module(torch.ones(1000)).sum().backward()
        theirs.step()
        over = threading.Event()
        killer = threading.Thread(target=self.kill, args=(service, over, lambda: begun))
        begun = 0
        killer.start()
        try:
            while killer.is_alive():
                begun += 1
                optimizer = ballast.torch.AdamW(module.named_parameters(), service=service.address,
                                                job=f"moments-{begun}")
                optimizer.load_state_dict(theirs.state_dict())
                self.assertEqual(optimizer.attach(), 1)
                for parameter, state in theirs.state.items():
                    for plane in ("exp_avg", "exp_avg_sq"):
                        self.assertTrue(torch.equal(optimizer._binding.recovery.read_state(parameter, plane)[0],
                                                    state[plane]), (begun, plane))
                optimizer.close()
        finally:
            over.set()
            killer.join()
        self.assertEqual(self.kills, MOST_KILLS)
        print(f"{self.kills} kills of the service, {begun} jobs with their moments", file=sys.stderr)


if __name__ == "__main__":
    unittest.main()
