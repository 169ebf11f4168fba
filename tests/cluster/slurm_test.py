#!/usr/bin/env python3
"""deploy/slurm/train.sbatch on a Slurm of two nodes, which are hosts of the test. However a training is stopped,
its weights are those of the local optimizer, bit for bit, and so are its losses. By hand, as it takes ten minutes."""

import csv
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "client/python"))

import decisions
import torch_environment
from hosts import NOT_THERE, Network, enter_network_of_own
from processes import PATIENCE, ROOT, await_, read, start, tail
from slurm import Slurm, missing

BIN = pathlib.Path(os.environ.get("BALLAST_BIN_DIR", ROOT / "build/release/bin"))
TRAINER = pathlib.Path(__file__).with_name("slurm_trainer.py")
RANKS = 4
WORKER = ["ballast-worker", "--layers=1", "--width=64", "--heads=2", "--context=32", "--batch=4", "--steps=150",
          f"--text={ROOT / 'LICENSE'}"]
SOME = 20  # A step in the midst of it.
ONE_NODE_OR_TWO = ("--nodes=1-2", f"--ntasks={RANKS}")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
USER_SIGNAL = "SlurmctldParameters=preempt_send_user_signal"
SMALL_STEPS = {"BALLASTD_FLAGS": "--checkpoint-every=10steps"}


def losses(folder):
    with open(folder / "losses.csv", newline="") as file:
        return [(row["step"], row["loss"], row["norm"], row["clip"]) for row in csv.DictReader(file)]


class Training:
    """A Slurm job of train.sbatch."""

    def __init__(self, slurm, name, *flags, command=WORKER, folder=None, **environment):
        self.slurm, self.name = slurm, name
        self.folder = folder or slurm.folder / f"ballast-{name}"
        self.output = slurm.folder / f"{name}.out"
        environment["BALLASTD_FLAGS"] = f"--log-level=debug {environment.get('BALLASTD_FLAGS', '')}"
        self.number = slurm.ask("sbatch", "--parsable", f"--job-name={name}", f"--output={self.output}",
                                *(flags or ("--nodes=2", "--ntasks-per-node=2")), "train.sbatch", *command,
                                environment=environment)

    def log(self, part):
        return read(self.folder / f"{part}.log")

    def fields(self):
        return self.slurm.job(self.number)

    def await_(self, what, condition):
        """Returns the seconds that it took."""
        begun = time.monotonic()
        try:
            await_(what, condition)
        except AssertionError as error:
            raise AssertionError(f"{error}{self.story()}") from None
        return time.monotonic() - begun

    def await_state(self, *states):
        return self.await_(f"state {' or '.join(states)}", lambda: self.fields()["JobState"] in states)

    def await_step(self, step=SOME, start=0):
        return self.await_(f"step {step} of start {start}",
                           lambda: len(self.steps()) > start and self.steps()[start][-1:] >= [step])

    def freeze(self):
        """Stops the ranks, so that they do not end before something that takes Slurm a while."""
        self.await_step()
        steps = self.slurm.ask("squeue", "--steps", "--noheader", f"--jobs={self.number}", "--format=%i %j")
        self.slurm.ask("scancel", "--signal=STOP", re.search("(.*) bash", steps)[1])

    def steps(self):
        """Those that rank 0 has told, of each of its starts."""
        return [[int(step) for step in re.findall(r"(?m)^step (\d+)/", text)]
                for text in self.log("rank-0").split("gradients and weights travel")[1:]]

    def saved(self):
        """The steps of which the services have said so, in order."""
        return self.told("saved")

    def told(self, what):
        logs = "".join(map(read, self.folder.glob("ballastd-*.log")))
        return sorted(set(map(int, re.findall(rf": {what} step (\d+) ", logs))))

    def story(self):
        files = [self.output, *sorted(self.folder.glob("*.log"))]
        return f"\n{self.slurm.ask('scontrol', 'show', 'job', self.number)}" + "".join(
            f"\n  {file.name}:{tail(file, 30)}" for file in files)


class SlurmJobs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="ballast-slurm-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        shutil.copy(ROOT / "deploy/slurm/train.sbatch", cls.folder)
        cls.network = Network(cls.folder)
        cls.addClassCleanup(cls.network.close)
        cls.hosts = [cls.network.add_host(whole=True) for _ in range(2)]
        cls.slurm = Slurm(cls.folder, cls.hosts, USER_SIGNAL)
        cls.addClassCleanup(cls.slurm.stop)
        # /run is each host's own, unlike /tmp.
        cls.slurm.environment |= {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "TMPDIR": "/run"}
        cls.undisturbed = cls.folder / "undisturbed"
        ranks = [start([BIN / WORKER[0], *WORKER[1:], "--optimizer=local", f"--out={cls.undisturbed}"],
                       cls.folder / "undisturbed.out", environment={
                           "RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": "29400", "OMP_NUM_THREADS": "1"}) for rank in range(RANKS)]
        if any([rank.wait(PATIENCE) for rank in ranks]):
            raise AssertionError(f"the local optimizer:{tail(cls.folder / 'undisturbed.out')}")

    def setUp(self):
        self.addCleanup(self.check_decisions)
        self.addCleanup(self.slurm.await_idle)
        self.addCleanup(self.slurm.ask, "scancel", "--user=root")

    def check_decisions(self):
        """Returns their number, of all trainings until now."""
        return decisions.check(map(read, self.folder.glob("ballast-*/ballastd-*.log")))

    def submit(self, *flags, name=None, **options):
        return Training(self.slurm, name or self.id().rpartition(".test_")[2], *flags, **options)

    def processes(self, host):
        """Ballast's, there."""
        return subprocess.run([*host.words, "pgrep", "--runstates=RSDT", "ballast"], capture_output=True, text=True,
                              check=False, timeout=PATIENCE).stdout.split()

    def tell(self, *facts):
        print(f"\n    {'; '.join(facts)}", flush=True)

    def assert_same_bits(self, training, starts):
        """Also: each start goes on after what was saved, and decides each step once."""
        training.await_state(*OVER)
        self.assertEqual(training.fields()["JobState"], "COMPLETED", training.story())
        weights, undisturbed = ((folder / "weights.bin").read_bytes() for folder in (training.folder, self.undisturbed))
        self.assertEqual(weights, undisturbed)
        told, undisturbed = losses(training.folder), losses(self.undisturbed)
        self.assertEqual(told, [row for row in undisturbed if row in told])
        self.assertLess(len(undisturbed) - len(told), starts)  # A death may cost a row.
        self.assertEqual(len(training.steps()), starts, training.story())
        self.assertEqual([steps[0] - 1 for steps in training.steps()], [0, *training.told("loaded")])
        for steps in training.steps():
            self.assertEqual(steps, list(range(steps[0], steps[-1] + 1)))
        self.assert_nothing_left(training)

    def assert_nothing_left(self, training):
        """But the folder of a socket, after SIGKILL."""
        self.slurm.await_idle()
        self.assertEqual(list(training.folder.glob("tls-*")), [])
        for host in self.hosts:
            training.await_("the end of all processes", lambda host=host: not self.processes(host))

    def assert_stops_and_goes_on(self, training, stop):
        """And is saved at the step where it stops."""
        training.await_step()
        stop()
        begun = time.monotonic()
        training.await_("a save", lambda: "stopped and saved" in read(training.output))
        saved = time.monotonic() - begun
        again = training.await_step(1, start=1)
        self.tell(f"saved after {saved:.1f} s; took the next step {again:.1f} s later")
        self.assertGreaterEqual(training.saved()[0], training.steps()[0][-1])
        self.assertEqual(training.steps()[1][0], training.saved()[0] + 1)

    def lose(self, number):
        """The node with all that runs there, until the test's end."""
        host = self.hosts[number]
        self.network.remove_host(host)

        def bring_back():
            self.hosts[number] = self.network.add_host(whole=True)
            self.assertEqual(self.hosts[number].address, host.address)
            self.slurm.start_node(self.hosts[number])
        self.addCleanup(bring_back)

    def assert_survives_loss_of_node(self, training, lose):
        """It goes on from the last checkpoint, on the node that is left."""
        training.freeze()
        lose()
        found = training.await_("the loss", lambda: "down" in self.slurm.states())
        again = training.await_step(1, start=1)
        self.tell(f"found after {found:.1f} s; took the next step {again:.1f} s later")
        self.assertEqual(training.fields()["NumNodes"], "1")

    # ----------------------------------------------------------------

    def test_from_beginning_to_end(self):
        training = self.submit()
        training.await_step()
        tls = training.folder / f"tls-{training.number}"
        self.assertEqual(tls.stat().st_mode & 0o777, 0o700)
        for host, name in zip(self.hosts, self.slurm.names):
            run = f"/run/ballast-{training.number}-{name}"
            socket = f"{run}/socket"
            self.slurm.ask("srun", f"--jobid={training.number}", "--overlap", f"--nodelist={name}", "--ntasks=1",
                           "ballast", "job", training.name, f"--service=unix:{socket}")
            host.do("sh", "-c", f"test $(stat -c %a {run}) = 700")
            address, = re.findall(rf"listening on unix:{socket}, ({name}:\d+),", training.log(f"ballastd-{name}"))
            host.do(BIN / "ballast", "jobs", f"--service={address}", *(f"--tls-{flag}={tls / file}" for flag, file in (
                ("ca", "cert"), ("cert", "cert"), ("key", "key"))))
            with self.assertRaises(AssertionError):
                host.do(BIN / "ballast", "jobs", f"--service={address}", f"--tls-ca={tls / 'cert'}")
        self.assert_same_bits(training, 1)
        self.assertEqual({path.name for path in training.folder.glob("checkpoints/*/step-150.*/master*")},
                         {"master-member-0.safetensors", "master-member-1.safetensors"})
        self.assertGreaterEqual(self.check_decisions(), 150)

    def test_time_limit(self):
        """One minute, of which Slurm takes ten seconds and what its clock is too coarse for."""
        training = self.submit("--nodes=2", "--ntasks-per-node=2", "--time=1", "--signal=B:USR1@10")

        def wait_for_it():
            training.freeze()
            training.await_("USR1", lambda: "forcing job termination" in read(training.output))
        self.assert_stops_and_goes_on(training, wait_for_it)
        self.assert_same_bits(training, 2)

    def preempt(self):
        self.slurm.ask("sbatch", "--nodes=2", "--exclusive", "--partition=high", "--output=/dev/null", "--wrap=sleep 1")

    def test_preemption(self):
        training = self.submit()
        self.assert_stops_and_goes_on(training, self.preempt)
        self.assert_same_bits(training, 2)

    def test_preemption_that_the_script_is_not_told_of(self):
        self.addCleanup(self.slurm.configure, USER_SIGNAL)
        self.slurm.configure()
        training = self.submit()
        self.assert_stops_and_goes_on(training, self.preempt)
        self.assert_same_bits(training, 2)

    def test_requeue(self):
        training = self.submit()
        self.assert_stops_and_goes_on(training, lambda: self.slurm.ask("scontrol", "requeue", training.number))
        self.assert_same_bits(training, 2)

    def test_scancel(self):
        for start, stop in enumerate((["scancel"], ["scancel", "--batch", "--signal=TERM"])):
            training = self.submit()
            training.await_step(SOME * (start + 1), start)
            before = len(training.saved())
            self.slurm.ask(*stop, training.number)
            took = training.await_("a save", lambda: len(training.saved()) > before)
            self.tell(f"{' '.join(stop)}: saved after {took:.1f} s")
            self.slurm.await_idle()
        self.assert_same_bits(self.submit(), 3)

    @unittest.skipUnless(torch_environment.ready(), "torch_environment.py --make")
    def test_pytorch(self):
        weights = []
        for name in ("undisturbed", "stopped"):
            out = self.folder / f"pytorch-{name}"
            out.mkdir()
            training = self.submit(name=out.name, command=[torch_environment.folder() / "bin/python", "-B", TRAINER],
                                   OUT=str(out), PYTHONPATH=str(ROOT / "client/python"), BALLAST_BIN_DIR=str(BIN),
                                   GLOO_SOCKET_IFNAME="eth0")
            if name == "stopped":
                training.await_("step 10", lambda: "step 10/" in training.log("rank-0"))
                self.slurm.ask("scancel", "--batch", "--signal=USR1", training.number)
                training.await_("a restart", lambda: training.fields()["Restarts"] == "1")
            training.await_state(*OVER)
            self.assertEqual(training.fields()["JobState"], "COMPLETED", training.story())
            weights.append((out / "weights.pt").read_bytes())
        self.assertEqual(*weights)
        self.assertEqual(training.told("loaded"), training.saved()[:1])

    def test_a_service_that_crashes(self):
        """Its parent starts it again over its memory."""
        training = self.submit()
        training.await_step()
        for host, name in zip(self.hosts, self.slurm.names):
            host.do("sh", "-c", "kill -KILL $(pgrep -x ballastd-serve)")
            took = training.await_("another process", lambda: "after a death" in training.log(f"ballastd-{name}"))
            self.tell(f"back after {took:.1f} s")
        self.assert_same_bits(training, 1)
        self.assertEqual(training.fields()["Restarts"], "0")

    def test_slurmd_that_is_killed_and_comes_back(self):
        training = self.submit()
        training.await_step()
        self.slurm.kill_daemon("gpu2")
        training.await_step(2 * SOME)
        self.slurm.start_daemon(self.hosts[1])
        self.assert_same_bits(training, 1)
        self.assertEqual(training.fields()["Restarts"], "0")

    def test_slurmd_that_is_killed_and_stays_away(self):
        """What it has left on its node lives on until it is back, and does no harm."""
        for host, name in zip(self.hosts, self.slurm.names):
            with self.subTest(name):
                training = self.submit(*ONE_NODE_OR_TWO, **SMALL_STEPS, name=f"without-slurmd-of-{name}")
                self.assert_survives_loss_of_node(training, lambda: self.slurm.kill_daemon(name))
                training.await_state(*OVER)
                self.slurm.start_daemon(host)
                self.assert_same_bits(training, 2)

    def test_the_first_node_is_lost(self):
        training = self.submit(*ONE_NODE_OR_TWO, **SMALL_STEPS)
        self.assert_survives_loss_of_node(training, lambda: self.lose(0))
        training.await_state(*OVER)
        self.doCleanups()
        self.assert_same_bits(training, 2)

    def test_another_node_is_lost(self):
        training = self.submit(*ONE_NODE_OR_TWO, **SMALL_STEPS)
        self.assert_survives_loss_of_node(training, lambda: self.lose(1))
        training.await_state(*OVER)
        self.doCleanups()
        self.assert_same_bits(training, 2)

    def test_a_save_that_takes_longer_than_the_signals_are_apart(self):
        training = self.submit(command=[*WORKER, "--layers=8", "--width=512", "--steps=1000"])
        training.await_step(2)
        self.slurm.ask("scancel", training.number)
        took = training.await_("a save", lambda: "stopped and saved" in read(training.output))
        self.tell(f"saved after {took:.1f} s")
        self.assertNotIn("a service failed", read(training.output))
        self.assertGreaterEqual(training.saved()[0], 2)
        self.assert_nothing_left(training)

    def assert_fails(self, training, line):
        """In one line of the script, which leaves nothing behind."""
        training.await_state(*OVER)
        self.assertEqual(training.fields()["JobState"], "FAILED", training.story())
        said = [said for said in read(training.output).splitlines() if not said.startswith(("srun:", "slurmstepd"))]
        self.assertRegex("\n".join(said), line)
        self.assert_nothing_left(training)
        for host in self.hosts:
            host.do("sh", "-c", f"! ls -d /run/ballast-{training.number}-*")

    def test_a_rank_that_fails(self):
        worker = " ".join(WORKER)
        training = self.submit(command=[
            "bash", "-c", f"((RANK != 3)) || set -- --nonsense; exec {worker} --service=node --job=$BALLAST_JOB $*"])
        self.assert_fails(training, r"^train.sbatch: the ranks ended with \d+; .*$")
        self.assertIn("task 3: Exited with exit code", read(training.output))
        self.assertEqual(len(training.log("rank-3").splitlines()), 1)

    def test_flags_that_no_service_takes(self):
        training = self.submit(BALLASTD_FLAGS="--nonsense")
        self.assert_fails(training, "^ballastd: unknown flag '--nonsense'.*\n.*$")
        self.assertEqual(training.steps(), [])

    def test_a_name_that_no_job_may_have(self):
        training = self.submit(name="my job")
        self.assert_fails(training, "^train.sbatch: the job's name 'my job' .*$")
        self.assertFalse(training.folder.exists())

    def test_a_service_that_cannot_start(self):
        training = self.submit(BALLASTD_FLAGS="--metrics-listen=192.0.2.1:1")
        self.assert_fails(training, "^train.sbatch: a service failed; .*$")

    def test_memory_is_short(self):
        training = self.submit(BALLASTD_FLAGS="--memory-limit=1MiB")
        self.assert_fails(training, r"^train.sbatch: the ranks ended with \d+; .*$")
        self.assertRegex(training.log("rank-0"), "ballast-worker: .* member gpu1:.* is short")
        self.assertEqual(list(training.folder.glob("checkpoints/*/step-*")), [])

    def test_two_jobs_in_one_folder(self):
        first = self.submit()
        first.await_step()
        self.assert_fails(self.submit(), f"^train.sbatch: Slurm job {first.number} trains in .*$")
        self.assert_same_bits(first, 1)

    def test_an_array_and_a_folder_with_a_space(self):
        training = self.submit("--array=0-1", "--nodes=1", "--ntasks=2")
        spaced = self.folder / "a folder"
        other = self.submit("--nodes=2", "--ntasks=1", folder=spaced, BALLAST_DIR=str(spaced))
        for each in (training, other):
            each.await_state(*OVER)
        self.slurm.await_idle()
        names = sorted(path.parent.name for path in self.folder.glob("ballast-an_array*/weights.bin"))
        self.assertEqual([name[-2:] for name in names], ["-0", "-1"])
        self.assertTrue((other.folder / "weights.bin").exists())


def main():
    if packages := missing():
        print(f"SKIPPED: Slurm is not there; apt-get install --no-install-recommends {' '.join(packages)}")
        sys.exit(NOT_THERE)
    if os.geteuid() != 0:
        print("SKIPPED: Slurm's daemons need root")
        sys.exit(NOT_THERE)
    enter_network_of_own()
    unittest.main(verbosity=2, argv=sys.argv)


if __name__ == "__main__":
    main()
