#!/usr/bin/env python3
"""Workers that stop for a while and go on, old workers that wake up among new ones, and a service that
dies: who is told what, who ends, and that no bit changes."""

import os
import pathlib
import random
import signal
import tempfile
import time
import unittest

from cutting_proxy import CuttingProxy
from runs import (RANKS, TRANSPORTS, Run, Service, Training, await_, difference, read, result_of, state_of,
                  undisturbed_result)

# With more than one micro-step a rank that is held waits for an acknowledgement before it has sent all of a step.
TRAINING = Training(steps=60, micro_steps=1)
ENDLESS = Training(steps=100_000)
TOGETHER = ("weights", "state", "decisions")


def freeze(pid):
    os.kill(pid, signal.SIGSTOP)
    await_(f"the stop of {pid}", lambda: state_of(pid) == "T")


class StoppedWorkers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="ballast-stop-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.service = Service(cls.folder, "--seal-deadline-seconds=0.2")
        cls.addClassCleanup(cls.service.stop)
        cls.undisturbed = undisturbed_result(cls.folder, cls.service, "undisturbed", TRAINING)

    def setUp(self):
        self.seed = random.randrange(2**32)
        self.random = random.Random(self.seed)

    def run_(self, job, flags=(), **options):
        shared = self.random.choice(list(TRANSPORTS))
        run = Run(self.folder, self.service.address, job, TRAINING, flags=[f"--shared-memory={shared}", *flags],
                  **options)
        self.addCleanup(run.stop)
        return run

    def held_run(self, job, flags=()):
        """A run, and the proxy behind which its rank 1 is."""
        proxy = CuttingProxy(self.service.address, self.seed, cuts=0)
        self.addCleanup(proxy.stop)
        return self.run_(job, flags, of_rank_1=proxy.address), proxy

    def assert_same_bits(self, run, fields=None):
        problem = difference(result_of(run, self.service), self.undisturbed, fields)
        self.assertEqual(problem, "", f"seed {self.seed}{run.story()}")

    def stop_before_the_seal(self, run, proxy):
        """Stops rank 1 in a step of which the service has rank 0's seal and lacks its own. Elsewhere rank
        0 would wait for it in a collective, and the service would know of nobody who waits."""
        pid = run.pid(1)
        run.await_step(2)
        time.sleep(self.random.uniform(0, 0.01))
        proxy.hold()
        await_("a wait for rank 1", lambda: self.waits_for_rank_1(run), run.process)
        freeze(pid)
        return pid

    def waits_for_rank_1(self, run):
        """Also when asked again: what rank 1 sent before may not have been read at first."""
        answers = [self.service.job(run.job) for _ in range(2)]
        return all(job["ranks"][0]["sealed"] and not job["ranks"][1]["sealed"] for job in answers) \
            and answers[0]["committed_step"] == answers[1]["committed_step"]

    def waits(self, run):
        return [line for line in run.log(0).splitlines() if "the service waits for rank 1" in line]

    def test_the_others_are_told_again_and_again_and_a_late_seal_commits(self):
        run, proxy = self.held_run("late")
        pid = self.stop_before_the_seal(run, proxy)
        step = self.service.job("late")["committed_step"]
        await_("a second reminder", lambda: len(self.waits(run)) >= 2, run.process)
        self.assertIn(f"open; step {step + 1} waits for rank 1\n", self.service.ask("job", "late"))
        self.assertEqual(self.service.job("late")["committed_step"], step)
        proxy.release()
        os.kill(pid, signal.SIGCONT)
        self.assertEqual(run.wait(), 0, run.story())
        self.assertEqual(run.restarts(), 0)
        self.assertEqual(self.service.job("late")["generation"], {"epoch": 1, "count": 1})
        self.assert_same_bits(run)

    def test_the_trainers_own_limit_ends_the_wait_with_the_name_of_the_rank(self):
        run, proxy = self.held_run("limit", flags=["--seal-timeout=30s"])  # Longer than its looks take.
        self.stop_before_the_seal(run, proxy)
        self.assertNotEqual(run.wait(), 0)
        self.assertRegex(read(run.errors), r"(?m)^rank 0 of 2 failed: .*rank 1\b")
        # What was given up left nothing behind: new workers end as if nothing had been.
        again = self.run_("limit", out=run.out)
        self.assertEqual(again.wait(), 0, again.story())
        self.assert_same_bits(again, TOGETHER)

    def test_an_old_process_that_wakes_up_among_new_ones_touches_nothing(self):
        old, proxy = self.held_run("replaced")
        old.await_step(3)
        time.sleep(self.random.uniform(0, 0.02))
        proxy.hold()  # So that it is not over meanwhile.
        pid = old.pid(self.random.randrange(RANKS))
        # Their launcher first, which would end the stopped one some seconds after the other has failed.
        freeze(old.process.pid)
        self.addCleanup(old.process.send_signal, signal.SIGCONT)
        freeze(pid)
        proxy.release()
        new = self.run_("replaced")
        new.await_step(old.step() + 3)
        os.kill(pid, signal.SIGCONT)
        await_("the end of what woke up", lambda: state_of(pid) == "Z")  # Its launcher has not asked for its code yet.
        old.process.send_signal(signal.SIGCONT)
        self.assertNotEqual(old.wait(), 0, f"seed {self.seed}")
        self.assertRegex(read(old.errors), r"(?m)^rank [01] of 2 failed: .*another process has taken rank [01] ")
        self.assertLess(old.step(), TRAINING.steps)
        self.assertEqual(new.wait(), 0, new.story() + old.story())
        self.assert_same_bits(new, TOGETHER)


class DeadService(unittest.TestCase):
    """The state is lost with the service: what is left is to say so, soon and once."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ballast-dead-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.listen = f"unix:{self.folder}/socket"
        self.service = Service(self.folder, listen=self.listen)
        self.addCleanup(self.service.stop)

    def start(self, reconnect_timeout):
        self.run_ = Run(self.folder, self.service.address, "orphan", ENDLESS,
                        flags=[f"--reconnect-timeout={reconnect_timeout}",
                               f"--shared-memory={random.choice(list(TRANSPORTS))}"])
        self.addCleanup(self.run_.stop)
        self.run_.await_step(3)

    def assert_ends_with(self, words):
        self.assertNotEqual(self.run_.wait(), 0)
        said = read(self.run_.errors).splitlines()
        self.assertEqual(len(said), 1, said)
        self.assertRegex(said[0], words)

    def test_workers_say_in_one_line_that_it_is_gone(self):
        self.start("2s")
        self.service.stop()
        self.assert_ends_with(r"^rank [01] of 2 failed: ballast-worker: .*the stream broke .*could not be "
                              "reopened within 2s")

    def test_a_service_that_came_back_empty_does_not_pass_for_the_old_one(self):
        self.start("60s")  # It is back before that, however slow the machine is.
        self.service.stop()
        empty = Service(self.folder, listen=self.listen)
        self.addCleanup(empty.stop)
        self.assert_ends_with(r"^rank [01] of 2 failed: ballast-worker: .*there is no job orphan; this service "
                              r"started (?:\d+m?s ago|just now), and unsaved jobs of an earlier one are lost")
        self.assertIn("no jobs", empty.ask("jobs"))

    def test_a_service_that_came_back_names_the_last_checkpoint(self):
        self.service.stop()
        saved = self.folder / "saved"
        flags = (f"--checkpoint-dir={saved}", "--checkpoint-every=2steps", "--checkpoint-keep=1000")
        self.service = Service(self.folder, *flags, listen=self.listen)
        self.addCleanup(self.service.stop)
        self.start("60s")
        await_("a checkpoint", lambda: (saved / "orphan/latest").exists(), self.run_.process)
        self.service.stop()  # Its parent, with which all that it held is gone.
        empty = Service(self.folder, *flags, listen=self.listen)
        self.addCleanup(empty.stop)
        last = max(int(path.name[len("step-"):-len(".1")]) for path in (saved / "orphan").glob("step-*.1"))
        self.assert_ends_with(rf"there is no job orphan; .* are lost; its last save is step {last}, in "
                              rf"{saved}/orphan/step-{last}\.1: start its workers with --resume=orphan\b")


if __name__ == "__main__":
    unittest.main()
