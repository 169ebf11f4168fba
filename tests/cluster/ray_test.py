#!/usr/bin/env python3
"""ballast.ray on a real Ray: each host has a raylet, and what Ray runs is killed and stopped. Prints how long a fault
took. In an environment with Ray (tests/client/python/torch_environment.py)."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
import unittest

import decisions
from hosts import Network, enter_network_of_own
from processes import ROOT, await_, children_of, has_ended, read, start, stop, tail

PYTHON = ROOT / "client/python"
sys.path.insert(0, str(PYTHON))
from ballast import _files  # noqa: E402

TRAINER = pathlib.Path(__file__).with_name("ray_trainer.py")
EXAMPLE = PYTHON / "examples/ray_train.py"
STEPS, HOLD = 60, 40
PAUSE = 0.1  # After each step.
GCS = 6379
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
SESSION_LOGS = "/tmp/ray/session_latest/logs"
PATIENCE = 180


class RayHost:
    """A host with a /dev/shm of its own, and a raylet. The first one is the head."""

    def __init__(self, folder, network, head):
        self.host = network.add_host(whole=True)
        self.address, self.folder = self.host.address, folder
        self.head = head or self
        for kind, options, at in (("proc", "", "/proc"), ("tmpfs", "size=256m", "/dev/shm"), ("tmpfs", "", "/tmp/ray")):
            pathlib.Path(at).mkdir(exist_ok=True)
            self.host.do("mount", "-t", kind, *(["-o", options] if options else []), "host", at)
        self.environment = {"PYTHONPATH": str(PYTHON), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
                            "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0",
                            "RAY_process_group_cleanup_enabled": "0"}  # No orphan stays without it.
        self.start_ray()

    def start_ray(self):
        where = (["--head", f"--port={GCS}", "--include-dashboard=false"] if self.head is self
                 else [f"--address={self.head.address}:{GCS}"])
        self.run(*RAY, "start", *where, f"--node-ip-address={self.address}", "--num-cpus=4", f"--memory={1 << 30}",
                 f"--object-store-memory={80 << 20}", "--disable-usage-stats")

    def start(self, words, log, error=None):
        return start([*self.host.words, *words], log, error, environment=self.environment)

    def run(self, *words):
        """Its output."""
        log = self.folder / f"run-{time.monotonic_ns()}.log"
        error = log.with_suffix(".err")
        process = self.start(words, log, error)
        try:
            await_("its end", lambda: process.poll() is not None, seconds=PATIENCE)
        finally:
            end(process)
        if process.returncode != 0:
            raise AssertionError(f"{words}: code {process.returncode}:{tail(error, 30)}")
        return read(log)

    def drive(self, text):
        """What a driver here says, or its error."""
        lines = self.run(sys.executable, "-c", f"""
import ballast, ballast.ray, ray
ray.init("auto", log_to_driver=False)
def say(*words):
    print("SAID", *words)
try:
    {text}
except (ballast.BallastError, ValueError) as error:
    say(type(error).__name__, error)""").splitlines()
        return "\n".join(line.removeprefix("SAID ") for line in lines if line.startswith("SAID "))

    def processes(self, name):
        """Those on this host with this in their command line, as numbers of the test's namespace."""
        space = os.stat(f"/proc/{children_of(self.host.processes[0].pid)[0]}/ns/pid").st_ino
        found = []
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
            with contextlib.suppress(OSError):
                command = read(pathlib.Path(f"/proc/{pid}/cmdline"))
                if os.stat(f"/proc/{pid}/ns/pid").st_ino == space and name in command:
                    found.append(pid)
        return sorted(found)

    def actor(self):
        """The member's actor that has a ballastd."""
        return parent_of(self.holder())

    def holder(self):
        service = await_("a service", lambda: self.processes("/ballastd\0"))
        return next(pid for pid in service if parent_of(pid) not in service)

    def memory(self):
        return self.run("sh", "-c", "ls /dev/shm | grep ballast || true").split()

    def said(self, words):
        """Whether an actor here has."""
        return words in self.run("sh", "-c", f"cat {SESSION_LOGS}/worker-*.err")


def end(process):
    """A process that nsenter has started, which is its child."""
    for pid in children_of(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    stop(process)


def parent_of(pid):
    return int(read(pathlib.Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1])


class Training:
    """A driver on the head, with two workers on two nodes."""

    def __init__(self, head, folder, *words, hold=False):
        self.folder, self.log = folder, folder / "driver.log"
        folder.mkdir()
        if hold:
            (folder / "hold").touch()
        self.driver = head.start([sys.executable, TRAINER, f"--results={folder}", f"--steps={STEPS}",
                                  f"--pause={PAUSE}", f"--hold={HOLD}", *words], self.log)

    def steps(self):
        """Those that are done, with their times."""
        return [(int(step), float(at)) for step, at in map(str.split, read(self.folder / "steps").splitlines())]

    def await_step(self, number):
        await_(f"step {number}", lambda: self.steps() and self.steps()[-1][0] >= number, self.driver, PATIENCE)

    def go(self):
        (self.folder / "hold").unlink()

    def end(self, code=0):
        await_("the end of the training", lambda: self.driver.poll() is not None, seconds=PATIENCE)
        if self.driver.returncode != code:
            raise AssertionError(f"the driver ended with code {self.driver.returncode}:{tail(self.log, 60)}")

    def results(self):
        self.end()
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(2)]


class OnRay(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="ballast-ray-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.network = Network(cls.folder)
        cls.addClassCleanup(cls.network.close)
        cls.head = RayHost(cls.folder, cls.network, None)
        cls.second = RayHost(cls.folder, cls.network, cls.head)
        service = cls.head.start([_files.program("ballastd"), "--nostartup-benchmark", "--insecure", "--threads=1",
                                  "--listen=0.0.0.0:7070"], cls.folder / "alone.log")
        alone = Training(cls.head, cls.folder / "alone", f"--address={cls.head.address}:7070")
        try:
            cls.state = alone.results()[0]["state"]
        finally:
            end(alone.driver)
            end(service)
            await_("its end", lambda: not cls.head.processes("/ballastd\0"))

    def setUp(self):
        self.saved = self.folder / f"saved-{self._testMethodName}"

    def serve(self, **options):
        options = {"nodes": 2, "memory": "64MiB", "name": "gpt", "checkpoint_dir": str(self.saved),
                   "flags": ["--log-level=debug"]} | options
        said = self.head.drive(f"say(len(ballast.ray.Service(**{options}).addresses))")
        self.assertEqual(said, str(options["nodes"]))
        self.addCleanup(self.check_decisions)
        self.addCleanup(self.close)

    def check_decisions(self):
        logs = [host.run("sh", "-c", "cat /tmp/ray/session_2*/logs/worker-*.err") for host in (self.head, self.second)]
        return decisions.check(logs)

    def close(self):
        self.head.drive("ballast.ray.Service.get('gpt').close(save=False)")

    def train(self, *words, **options):
        training = Training(self.head, self.folder / f"run-{time.monotonic_ns()}", *words, **options)
        self.addCleanup(end, training.driver)
        return training

    def assert_same_bits(self, results):
        self.assertEqual([rank["state"] for rank in results], [self.state] * 2)

    def report(self, what, begin):
        print(f"    {what}: {time.time() - begin:.1f} s", flush=True)

    def assert_nothing_left(self):
        for host in (self.head, self.second):
            self.assertEqual((host.memory(), host.processes("/ballastd\0")), ([], []))

    def test_a_training_has_the_bits_of_one_service(self):
        for host in (self.head, self.second):
            host.run("sh", "-c", "mkdir /dev/shm/ballast-gpt@earlier && touch /dev/shm/ballast-gpt@earlier/lock")
        self.serve()
        self.assertEqual([len(host.memory()) for host in (self.head, self.second)], [1, 1])
        results = self.train().results()
        self.assert_same_bits(results)
        self.assertEqual([rank["shares_memory"] for rank in results], [True] * 2)
        self.assertEqual([results[0]["members"][home].partition(":")[0] for home in results[0]["homes"]],
                         [rank["host"] for rank in results])
        self.assertEqual(self.head.drive("ballast.ray.Service.get('gpt').close()"), "")
        self.assertTrue(list((self.saved / "gpt").glob("step-60*/index.json")))
        self.assertGreaterEqual(self.check_decisions(), STEPS)
        self.assert_nothing_left()

    def test_the_example(self):
        said = self.head.run(sys.executable, EXAMPLE, "--steps=3", f"--shared={self.folder / 'example'}")
        self.assertIn("step 3: loss", said)
        self.assertTrue(list((self.folder / "example/saved/gpt").glob("step-3.*/index.json")))
        self.assert_nothing_left()

    def test_processes_that_are_killed(self):
        self.serve()
        training = self.train()
        training.await_step(10)
        for what, host, victim in (("an actor", self.second, RayHost.actor),
                                   ("the lead's ballastd", self.head, RayHost.holder),
                                   ("the lead's actor", self.head, RayHost.actor)):
            pid, service = victim(host), host.processes("/ballastd\0")
            done, begin = training.steps()[-1][0], time.time()
            os.kill(pid, signal.SIGKILL)
            await_("its end", lambda: all(has_ended(each) for each in service))
            training.await_step(done + 2)
            self.report(f"{what} was killed, and the step after the next was done", begin)
        self.assert_same_bits(training.results())
        self.assertEqual(self.head.drive("ballast.ray.Service.get('gpt').close()"), "")
        self.assert_nothing_left()

    def test_a_raylet_that_is_killed(self):
        self.serve()
        training = self.train("--failures=3", hold=True)
        training.await_step(HOLD)
        actor, services = self.second.actor(), self.second.processes("/ballastd\0")
        os.kill(actor, signal.SIGSTOP)  # So that it outlives the raylet.
        raylet, = self.second.processes("/raylet\0")
        begin = time.time()
        os.kill(raylet, signal.SIGKILL)
        await_("its end", lambda: self.dead() == [self.second.address], seconds=PATIENCE)
        self.report("a raylet was killed, and Ray had noticed", begin)
        self.assertEqual(self.second.processes("/ballastd\0"), services)
        begin = time.time()
        self.second.start_ray()
        await_("a second actor", lambda: self.second.said("waits for the end of an earlier"), seconds=PATIENCE)
        self.report("Ray was started again there, and the second actor waited", begin)
        self.assertEqual(self.second.processes("/ballastd\0"), services)
        begin = time.time()
        os.kill(actor, signal.SIGKILL)
        await_("the end of the first service", lambda: all(has_ended(pid) for pid in services))
        self.second.actor()
        self.report("the first actor was killed, and the second one served", begin)
        training.go()
        training.await_step(HOLD + 1)
        self.report("the first actor was killed, and the next step was done", begin)
        results = training.results()
        self.assertEqual(results[0]["begin"], HOLD)
        self.assert_same_bits(results)

    def test_a_raylet_that_is_stopped(self):
        self.serve()
        training = self.train("--failures=3", hold=True)
        training.await_step(HOLD)
        raylet, = self.second.processes("/raylet\0")
        services = self.second.processes("/ballastd\0")
        begin = time.time()
        os.kill(raylet, signal.SIGSTOP)
        await_("its end", lambda: self.dead() == [self.second.address], seconds=PATIENCE)
        self.report("a raylet was stopped, and Ray counted it as dead", begin)
        self.assertEqual(self.second.processes("/ballastd\0"), services)
        os.kill(raylet, signal.SIGCONT)
        begin = time.time()
        await_("the end of its service", lambda: all(has_ended(pid) for pid in services), seconds=PATIENCE)
        self.report("it went on, and its service ended", begin)
        begin = time.time()
        self.second.start_ray()
        self.second.actor()
        self.report("Ray was started again there, and the service was back", begin)
        training.go()
        results = training.results()
        self.report("the same, and the training had ended", begin)
        self.assertEqual(results[0]["begin"], HOLD)
        self.assert_same_bits(results)

    def test_a_host_that_is_lost(self):
        self.serve(checkpoint_every="10steps")
        training = self.train("--patience=10", hold=True)
        training.await_step(HOLD)
        await_("a checkpoint", lambda: list((self.saved / "gpt").glob(f"step-{HOLD}.*/index.json")))
        begin, address = time.time(), self.second.address
        self.network.remove_host(self.second.host)
        training.go()
        training.end(1)
        self.report("a host was lost, and the training had ended", begin)
        self.assertRegex(read(training.log), f"{address}(.|\n)*died")
        alone = self.train("--patience=10", f"--host={self.head.address}")  # Its job has a member that is lost.
        alone.end(1)
        self.assertRegex(read(alone.log), "FailedPreconditionError: .*job gpt")
        self.assertRegex(self.head.drive("ballast.ray.Service.get('gpt').close()"), f"UnavailableError .*{address}")
        type(self).second = RayHost(self.folder, self.network, self.head)  # The same, after a start.
        self.assertEqual(self.second.address, address)
        await_("its actor", lambda: self.second.said("begins without jobs"))
        self.assertRegex(self.head.drive("ballast.ray.Service.get('gpt').close()"),
                         f"FailedPreconditionError .*{address}")
        self.assertEqual(self.head.drive("ballast.ray.Service.get('gpt').close(save=False)"), "")
        self.assert_nothing_left()
        self.serve(nodes=1)
        host = self.head if self.head.memory() else self.second
        results = self.train("--attach=resume", f"--host={host.address}").results()
        self.assertEqual(results[0]["begin"], HOLD)
        self.assert_same_bits(results)

    def test_mistakes(self):
        for options, error in ((
                "nodes=3, memory='64MiB', timeout=5", "ResourceExhaustedError .* 3 nodes with 1 CPU, 67,108,864 memory "
                f"free: (.*; |){self.second.address} has 4 CPU, 1,073,741,824 memory"), (
                "nodes=2, memory='64GiB', timeout=5", "ResourceExhaustedError "), (
                "nodes=2, memory='64 GB'", "ValueError .*64 GB"), (
                "nodes=2, memory='64MiB', checkpoint_every='10min'", "ValueError .*checkpoint_dir"), (
                "nodes=2, memory='64MiB', flags=['--nonsense']", "UnavailableError .*: unknown flag '--nonsense'")):
            self.assertRegex(self.head.drive(f"ballast.ray.Service(name='gpt', {options})"), error)
            self.assert_nothing_left()
        self.assertRegex(self.head.drive("ballast.ray.Service.get('gpt')"), "^UnavailableError .*no service gpt")
        self.serve(nodes=1)
        self.assertRegex(self.head.drive("ballast.ray.Service(nodes=1, memory='64MiB', name='gpt')"),
                         "^FailedPreconditionError .*Service.get")
        other = self.second if self.head.memory() else self.head
        self.assertRegex(other.drive("ballast.ray.node('gpt')"), f"UnavailableError node {other.address} has no")
        self.assertEqual(self.second.drive("import pickle; say(len(pickle.loads(pickle.dumps("
                                           "ballast.ray.Service.get('gpt'))).addresses))"), "1")

    def test_two_drivers_with_one_name(self):
        at = time.time() + 15
        race = f"import time; time.sleep({at} - time.time()); say(ballast.ray.Service(1, '64MiB', 'gpt').addresses)"
        with concurrent.futures.ThreadPoolExecutor() as threads:
            said = list(threads.map(lambda host: host.drive(race), (self.head, self.second)))
        self.addCleanup(self.close)
        self.assertEqual(sorted("gpt" in each for each in said), [False, True])  # An error names it.
        self.assertEqual(len(self.head.memory() + self.second.memory()), 1)

    def test_a_node_without_room(self):
        self.serve(memory="500MiB")
        self.addCleanup(self.second.run, "rm", "-f", "/dev/shm/filler")
        self.second.run("fallocate", "-l", "220M", "/dev/shm/filler")  # Of 256.
        training = self.train("--width=200000")
        training.end(1)
        self.assertRegex(read(training.log), "ResourceExhaustedError: .*(jobs|/dev/shm)")

    def dead(self):
        """The addresses of nodes that Ray has given up, and of no others."""
        return eval(self.head.drive("""
    nodes = ray.nodes()
    alive = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    say(sorted({node["NodeManagerAddress"] for node in nodes} - alive))""".strip()))


if __name__ == "__main__":
    enter_network_of_own()
    unittest.main(verbosity=2)
