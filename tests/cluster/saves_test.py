#!/usr/bin/env python3
"""Checkpoints of a job over several members: they load onto any other ones, and a service that is told to end saves."""

import signal
import threading

from cluster_case import TRAINING, ClusterCase, main
from processes import await_

STATE = ("weights", "state")  # Of what was lost, the losses are, too.


class Saves(ClusterCase):
    def resume(self, saved, count, checkpoint):
        cluster = self.cluster(count, saved=saved)
        self.assert_same_bits(cluster.train("gpt", TRAINING, flags=[f"--resume={checkpoint}"]), STATE)

    def test_every_five_steps_and_load_onto_other_members(self):
        cluster = self.cluster(3, flags=["--checkpoint-every=5steps", "--checkpoint-keep=10"])
        self.assert_same_bits(cluster.train("gpt", TRAINING))
        checkpoint = cluster.saved / "gpt" / "step-5.1"
        self.assertEqual({file.name.split(".")[0] for file in checkpoint.glob("master*")},
                         {"master-member-0", "master-member-1", "master-member-2"})
        for count in (1, 2):
            with self.subTest(members=count):
                self.resume(cluster.saved, count, "gpt/step-5.1")

    def test_what_is_damaged_is_named_and_nothing_begins(self):
        cluster = self.cluster(2, flags=["--checkpoint-every=5steps"])
        self.assert_same_bits(cluster.train("gpt", TRAINING))
        damaged = cluster.saved / "gpt" / "step-15.1" / "exp_avg-member-1.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        run = self.start(cluster, "gpt", flags=["--resume=gpt/step-15.1"])
        self.assertEqual(run.wait(), 1, run.story())
        self.assertIn(str(damaged), run.log(0))
        self.assertEqual(cluster.lead.jobs(), [])

    def test_when_all_services_are_told_to_end(self):
        for order in ("together", "the lead last"):
            with self.subTest(order):
                cluster = self.cluster(2)
                run = self.start(cluster, "gpt")
                run.await_step(4)
                run.stop()
                members = cluster.members if order == "together" else cluster.members[::-1]
                threads = []
                for member in members:
                    threads.append(threading.Thread(target=member.stop, args=(signal.SIGTERM,)))
                    threads[-1].start()
                    if order != "together":
                        threads[-1].join()
                for thread in threads:
                    thread.join()
                for member in members:
                    self.assertEqual(member.process.returncode, 0, member.log.read_text()[-2000:])
                await_("a checkpoint", lambda: list((cluster.saved / "gpt").glob("step-*/index.json")))
                self.resume(cluster.saved, 2, "gpt")


if __name__ == "__main__":
    main()
