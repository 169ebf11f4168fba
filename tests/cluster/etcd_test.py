#!/usr/bin/env python3
"""Services that register in a real etcd, and trainers and tools that find services and jobs there."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

import etcd
from certificates import Authority
from cluster_case import TRAINING, ClusterCase, main
from etcd import Etcd
from processes import ROOT, await_, read
from runs import BIN, child_of, result_of

PREFIX = "/ballast"
LEASE = 15  # Seconds, as the service has it.


class EtcdCase(ClusterCase):
    SERVERS = 1

    def setUp(self):
        hosts = [self.network.add_host() for _ in range(self.SERVERS)]
        for host in hosts:
            self.addCleanup(self.network.remove_host, host)
        self.etcd = self.serve(hosts)
        self.addCleanup(self.etcd.stop)
        self.address = f"etcd://{self.etcd.endpoints}{PREFIX}"

    def serve(self, hosts):
        return Etcd(self.make_folder(), hosts)

    def make_folder(self):
        return pathlib.Path(tempfile.mkdtemp(prefix="etcd-", dir=self.folder))

    def registered(self, count, *flags):
        return self.cluster(count, flags=(f"--cluster={self.address}", *flags))

    def ask(self, cluster, *words, service=None):
        return cluster.lead.ask(*words, service=service or self.address)

    def records(self):
        """By name of the job."""
        found = self.etcd.values(f"{PREFIX}/jobs/")
        return {key.removeprefix(f"{PREFIX}/jobs/"): value for key, value in found.items()}

    def services(self):
        return [value["address"] for value in self.etcd.values(f"{PREFIX}/services/").values()]


class Registered(EtcdCase):
    def test_a_job_is_trained_and_found_by_its_name(self):
        cluster = self.registered(2)
        run = self.start(cluster, "gpt", services=f"{self.address}?members=all")
        self.assertEqual(run.wait(), 0, cluster.story(run))
        record = self.records()["gpt"]
        job = json.loads(self.ask(cluster, "job", "gpt", "--json"))
        self.assertEqual((record["uid"], str(record["epoch"])), (job["uid"], str(job["generation"]["epoch"])))
        self.assertEqual(sorted(record["members"]), sorted(member.address for member in cluster.members))
        self.assertEqual(record["lead"], job["members"][job["homes"][0]]["address"])
        listed = json.loads(self.ask(cluster, "jobs", "--json"))
        self.assertEqual([each["uid"] for each in listed["jobs"]], [job["uid"]])
        lead = next(member for member in cluster.members if member.address == record["lead"])
        self.assert_same_bits(result_of(run, lead))
        self.assertEqual(cluster.check_decisions(), TRAINING.steps)
        self.ask(cluster, "close", "gpt", "--force")
        await_("no record", lambda: self.records() == {})

    def test_a_new_job_gets_the_fewest_services_that_have_room(self):
        cluster = self.registered(3)
        run = self.start(cluster, "gpt", services=self.address)
        self.assertEqual(run.wait(), 0, cluster.story(run))
        self.assertEqual(self.records()["gpt"]["members"], [])
        self.assertEqual(sum(len(member.jobs()) for member in cluster.members), 1)

    def test_what_has_room_nowhere_is_refused_in_one_line(self):
        cluster = self.registered(2, "--memory-limit=1MiB")
        run = self.start(cluster, "gpt", services=self.address)
        self.assertEqual(run.wait(), 1)
        self.assertIn("has no room", run.story())
        self.assertEqual(self.records(), {})

    def test_training_goes_on_without_etcd_and_new_jobs_wait(self):
        cluster = self.registered(2)
        run = self.start(cluster, "gpt", services=f"{self.address}?members=all")
        run.await_step(1)
        self.etcd.signal(signal.SIGSTOP)
        self.assertEqual(run.wait(), 0, cluster.story(run))
        lead = next(member for member in cluster.members if member.jobs() and member.job("gpt")["answering_member"] == 0)
        await_("a line about etcd", lambda: "training goes on" in read(lead.log))
        other = self.start(cluster, "other", services=self.address)
        self.assertEqual(other.wait(), 1)
        self.assertIn("etcd does not answer", other.story())
        saved = lead.save("gpt")
        time.sleep(60)  # etcd's clock goes on, so leases end.
        saved_later = lead.save("gpt")
        self.etcd.signal(signal.SIGCONT)
        for directory in (saved, saved_later):
            self.assertTrue((directory / "index.json").exists())
        await_("both again", lambda: len(self.services()) == 2)
        self.assertEqual(self.records()["gpt"]["uid"], lead.job("gpt")["uid"])
        self.assertIn("the lease of", read(lead.log))

    def test_an_etcd_that_comes_back_empty_gets_the_records_again(self):
        cluster = self.registered(1)
        run = self.start(cluster, "gpt", services=self.address)
        self.assertEqual(run.wait(), 0, cluster.story(run))
        before = self.records()
        self.etcd.control("del", "--prefix", PREFIX)
        found = await_("a record", self.records)
        self.assertEqual({name: record["uid"] for name, record in found.items()},
                         {name: record["uid"] for name, record in before.items()})
        self.assertEqual(found["gpt"]["epoch"], before["gpt"]["epoch"])

    def test_a_name_is_of_one_service(self):
        cluster = self.registered(2)
        one, other = cluster.members
        run = self.start(cluster, "gpt", services=one.address)
        self.assertEqual(run.wait(), 0, cluster.story(run))
        second = self.start(cluster, "gpt", services=other.address)
        self.assertEqual(second.wait(), 1)
        self.assertIn(f"is led by {one.address}", second.story())
        self.assertEqual(other.jobs(), [])

    def test_a_name_is_free_when_the_service_has_stopped(self):
        cluster = self.registered(2)
        run = self.start(cluster, "gpt", services=self.address)
        self.assertEqual(run.wait(), 0, cluster.story(run))
        lead = next(member for member in cluster.members if member.jobs())
        lead.stop(signal.SIGTERM)
        self.assertEqual((self.records(), len(self.services())), ({}, 1))
        again = self.start(cluster, "gpt", services=self.address, flags=["--resume=gpt"])
        self.assertEqual(again.wait(), 0, cluster.story(again))


class OfThree(EtcdCase):
    SERVERS = 3

    def test_the_servers_that_are_together_are_enough(self):
        cluster = self.registered(2)
        alone, second, third = self.etcd.hosts
        before = len(self.services())
        with self.network.apart(alone, second), self.network.apart(alone, third):  # Services reach all three.
            run = self.start(cluster, "gpt", services=f"{self.address}?members=all")
            self.assertEqual(run.wait(), 0, cluster.story(run))
            self.assertEqual(len(self.records()["gpt"]["members"]), 2)
            time.sleep(LEASE + 1)
            self.assertEqual((before, len(self.services())), (2, 2))
            with self.network.cut(second):
                other = self.start(cluster, "other", services=self.address)
                self.assertEqual(other.wait(), 1)
                self.assertIn("etcd does not answer", other.story())
        lead = next(member for member in cluster.members if member.address == self.records()["gpt"]["lead"])
        self.assert_same_bits(result_of(run, lead))
        again = self.start(cluster, "other", services=self.address)
        self.assertEqual(again.wait(), 0, cluster.story(again))


class Lost(EtcdCase):
    """A host is lost, or only cut off."""

    def trained(self, members):
        """A cluster with one service to spare, in which a job over so many has been saved at step 7 of 15."""
        cluster = self.registered(members + 1)
        first = dataclasses.replace(TRAINING, steps=7)
        run = cluster.run("gpt", first, services=f"{self.address}?members={members}", flags=["--decay-end=15"])
        self.addCleanup(run.stop)
        self.assertEqual(run.wait(), 0, cluster.story(run))
        self.ask(cluster, "save", "gpt")
        lead = next(member for member in cluster.members if member.address == self.records()["gpt"]["lead"])
        return cluster, lead, run

    def go_on(self, cluster, first):
        """The bits of a training that was never disturbed."""
        run = self.start(cluster, "gpt", services=self.address, flags=["--resume=gpt"])
        self.assertEqual(run.wait(), 0, cluster.story(run))
        run.out.joinpath("losses.csv").write_text(
            read(first.out / "losses.csv") + read(run.out / "losses.csv").partition("\n")[2])
        lead = next(member for member in cluster.members if member.address == self.records()["gpt"]["lead"])
        self.assert_same_bits(result_of(run, lead), ("weights", "state", "losses"))
        return lead

    def restore(self, cluster, *words):
        return json.loads(self.ask(cluster, "restore", "gpt", "--json", *words))

    def test_a_job_goes_on_from_its_checkpoint_when_its_lead_is_lost(self):
        cluster, lead, first = self.trained(2)
        with self.assertRaisesRegex(AssertionError, "is whole"):
            self.restore(cluster)
        epoch = self.records()["gpt"]["epoch"]
        lead.stop(signal.SIGKILL)
        await_("its lease", lambda: len(self.services()) == 2)
        restored = self.restore(cluster)
        self.assertEqual((len(restored["ended"]), len(restored["unknown"]), restored["step"]), (1, 1, 7))
        self.assertGreater(restored["epoch"], epoch)
        self.go_on(cluster, first)
        self.assertGreater(self.records()["gpt"]["epoch"], restored["epoch"])

    def test_an_old_lead_that_was_only_cut_off_serves_nothing_more(self):
        cluster, lead, first = self.trained(1)
        old = lead.job("gpt")
        with self.network.cut(lead.host):
            await_("its lease", lambda: len(self.services()) == 1)
            with self.assertRaisesRegex(AssertionError, "may still train"):
                self.restore(cluster)
            self.assertEqual(self.records()["gpt"]["uid"], old["uid"])
            restored = self.restore(cluster, "--force")
            self.assertEqual(restored["ended"], [])
            new = self.go_on(cluster, first)
        job = await_("what it has learned", lambda: [lead.job("gpt")] if lead.job("gpt")["phase"] == "BROKEN" else None)[0]
        self.assertEqual(job["uid"], old["uid"])
        self.assertIn("has gone on elsewhere", read(lead.log))
        late = self.start(cluster, "gpt", services=lead.address)
        self.assertEqual(late.wait(), 1)
        self.assertIn("of epoch", late.story())
        child = child_of(lead)
        os.kill(child, signal.SIGKILL)  # A later process knows it, too.
        await_("another process", lambda: child_of(lead) not in (0, child))
        self.assertEqual(await_("its job", lambda: lead.jobs() and lead.job("gpt"))["phase"], "BROKEN")
        lead.ask("close", "gpt", "--here", "--force")
        self.assertEqual(lead.jobs(), [])
        self.assertEqual(self.records()["gpt"]["lead"], new.address)


class WithPython(EtcdCase):
    def test_ranks_of_torch_train_on_services_that_the_first_one_finds(self):
        cluster = self.registered(2)
        script = self.make_folder() / "train.py"
        script.write_text(f"""
import json
import sys
import torch
import torch.distributed as dist
import ballast
import ballast.torch

dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
service = sys.argv[1] + "?members=2"
optimizer = ballast.torch.AdamW(model.parameters(), lr=0.1, service=service, job="torch")
print(f"begins at {{optimizer.attach(resume=True)}}\\n", end="", flush=True)
for _ in range(3):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
client = ballast.connect(sys.argv[1])
print(json.dumps([[job["name"], job["committed_step"], len(job["members"])] for job in client.jobs()]))
print("is at", client.job("torch")["committed_step"], client.state("torch", "weight").shape, flush=True)
dist.barrier()
optimizer.close(save=True)
""")
        for begins, ends in ((0, 3), (3, 6)):
            done = subprocess.run(
                [sys.executable, "-B", "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29411", script,
                 self.address], env=os.environ | {"PYTHONPATH": str(ROOT / "client/python"), "OMP_NUM_THREADS": "1"},
                capture_output=True, text=True, timeout=120)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stdout.count(f"begins at {begins}\n"), 2, done.stdout)
            self.assertEqual(done.stdout.count(f'[["torch", {ends}, 2]]'), 2, done.stdout)
            self.assertIn(f"is at {ends} (4, 8)", done.stdout)


class Guarded(EtcdCase):
    def test_a_user_and_its_password_are_needed_where_etcd_says_so(self):
        password = self.make_folder() / "password"
        password.write_text("secret")
        password.chmod(0o600)
        self.etcd.control("user", "add", "root:secret")
        self.etcd.control("auth", "enable")
        self.etcd.environment = {"ETCDCTL_USER": "root:secret"}
        with self.assertRaisesRegex(AssertionError, "give the user"):
            self.registered(1)
        cluster = self.registered(1, "--etcd-user=root", f"--etcd-password-file={password}")
        self.assertEqual(self.services(), [cluster.lead.address])
        with self.assertRaisesRegex(AssertionError, "give the user"):
            self.ask(cluster, "jobs")
        with mock.patch.dict(os.environ, {"BALLAST_ETCD_USER": "root", "BALLAST_ETCD_PASSWORD_FILE": str(password)}):
            run = self.start(cluster, "gpt", services=self.address)
            self.assertEqual(run.wait(), 0, cluster.story(run))
            self.assertIn("gpt", self.ask(cluster, "jobs"))


class OverTls(EtcdCase):
    def serve(self, hosts):
        folder = self.make_folder()
        authority = Authority(folder)
        (server, server_key), (self.certificate, self.key) = (
            authority.issue(name, hosts[0].address) for name in ("etcd", "client"))
        self.authority = authority.certificate
        return Etcd(folder, hosts, f"--cert-file={server}", f"--key-file={server_key}", "--client-cert-auth",
                    f"--trusted-ca-file={self.authority}", scheme="https", environment={
                        "ETCDCTL_CACERT": str(self.authority), "ETCDCTL_CERT": str(self.certificate),
                        "ETCDCTL_KEY": str(self.key)})

    def test_both_ends_show_certificates(self):
        files = {"CA": self.authority, "CERT": self.certificate, "KEY": self.key}
        with self.assertRaisesRegex(AssertionError, "etcd does not answer"):
            self.registered(1, f"--etcd-ca={self.authority}")
        cluster = self.registered(1, *(f"--etcd-{name.lower()}={path}" for name, path in files.items()))
        self.assertEqual(self.services(), [cluster.lead.address])
        with mock.patch.dict(os.environ, {f"BALLAST_ETCD_{name}": str(path) for name, path in files.items()}):
            run = self.start(cluster, "gpt", services=self.address)
            self.assertEqual(run.wait(), 0, cluster.story(run))
            self.assertIn("gpt", self.ask(cluster, "jobs"))
        with self.assertRaisesRegex(AssertionError, "etcd does not answer"):
            self.ask(cluster, "jobs")


class Wrong(EtcdCase):
    def refused(self, *flags):
        """What a service prints that does not start."""
        host = self.network.add_host()
        self.addCleanup(self.network.remove_host, host)
        done = subprocess.run([*host.words, BIN / "ballastd", "--nostartup-benchmark", "--insecure",
                               f"--listen={host.address}:7070", *flags], capture_output=True, text=True, timeout=60)
        self.assertIn(done.returncode, (1, 2))
        lines = done.stderr.splitlines()
        self.assertEqual(len(lines), 1, done.stderr)
        return lines[0]

    def test_what_is_wrong_is_said_in_one_line(self):
        self.etcd.control("put", "/registry/pods/x", "{}")
        nobody = "etcd://10.77.0.199:2379/ballast"
        for flags, expected in (
                ([f"--cluster=etcd://{self.etcd.endpoints}/registry"], "is not Ballast's"),
                ([f"--cluster={nobody}"], "etcd does not answer"),
                ([f"--cluster=etcd://{self.etcd.endpoints}"], "it has no prefix"),
                ([f"--cluster={self.address}", "--etcd-user=root"], "give both"),
                ([f"--cluster={self.address}", "--etcd-ca=/none"], "/none")):
            self.assertIn(expected, self.refused(*flags))
        self.assertEqual(self.services(), [])

    def test_two_services_of_one_address_are_told(self):
        one, other = self.registered(2, "--advertise=10.77.0.50:7070").members
        await_("a line", lambda: "has registered as 10.77.0.50:7070" in read(one.log) + read(other.log))


if __name__ == "__main__":
    etcd.require()
    main()
