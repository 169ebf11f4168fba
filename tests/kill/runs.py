"""A service and training runs under deploy/run_workers.py, as real processes, for tests that kill, stop
and cut them, and then compare the results to the bit.

Nothing outlives the test: every process is stopped by its id when the test ends, however it ends,
and the kernel stops those whose test was killed.
"""

import collections
import contextlib
import csv
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import processes  # noqa: E402
from processes import PATIENCE, ROOT, Hangs, await_, children_of, read, start, state_of, stop, tail  # noqa: E402

BIN = pathlib.Path(os.environ.get("BALLAST_BIN_DIR", ROOT / "build/release/bin"))
TEXT = ROOT / "LICENSE"
RANKS = 2

# Writes its process id where the test finds it, then becomes the worker; rank 1 perhaps with an address of its own.
TELLS_ITS_PID = 'echo $$ >"$0/pid-$TORCHELASTIC_RESTART_COUNT-$RANK.new"; ' \
                'mv "$0/pid-$TORCHELASTIC_RESTART_COUNT-$RANK.new" "$0/pid-$TORCHELASTIC_RESTART_COUNT-$RANK"; ' \
                'if [ "$RANK" = 1 ] && [ -n "$SERVICE_OF_RANK_1" ]; then ' \
                'set -- "$@" --service "$SERVICE_OF_RANK_1"; fi; exec "$@"'


# How gradients and weights travel, by --shared-memory.
TRANSPORTS = {"auto": "shared memory", "never": "the connection"}
MAKERS = {"service": "BY_SERVICE", "workers": "BY_WORKERS"}  # By --newton-schulz.


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a training with Muon works. None has bits of its own: workers on CPUs make Newton-Schulz as the service does."""
    update: str
    shared_memory: str
    newton_schulz: str

    @classmethod
    def draw(cls, source):
        return cls(source.choice(["speculate", "wait"]), source.choice(list(TRANSPORTS)), source.choice(list(MAKERS)))

    def flags(self):
        return [f"--update={self.update}", f"--shared-memory={self.shared_memory}", f"--newton-schulz={self.newton_schulz}"]

    def check(self, run, job):
        """That it was in force."""
        if run.transport() != TRANSPORTS[self.shared_memory]:
            raise AssertionError(f"--shared-memory={self.shared_memory}, but all went through {run.transport()}")
        if job["newton_schulz"] != MAKERS[self.newton_schulz]:
            raise AssertionError(f"--newton-schulz={self.newton_schulz}, but the job has {job['newton_schulz']}")

    def __str__(self):
        return f"{self.update}, {TRANSPORTS[self.shared_memory]}, Newton-Schulz by {self.newton_schulz}"


class Service(processes.Service):
    """A ballastd and what the CLI says of it."""

    def __init__(self, folder, *flags, listen="127.0.0.1:0", program=BIN / "ballastd", group=False):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="service-", dir=folder))
        super().__init__(program, self.folder, "--memory-limit=1GiB", "--threads=2", "--allow-paths", *flags,
                         listen=listen, group=group)

    def ask(self, *words, service=None):
        """What the tool prints that asks this service, or the given one."""
        done = subprocess.run(
            [BIN / "ballast", *map(str, words), "--service", service or self.address], text=True,
            capture_output=True, timeout=PATIENCE, check=False)
        if done.returncode != 0:
            raise AssertionError(f"ballast {words}: {done.stderr}; the service said:{tail(self.log)}")
        return done.stdout

    def job(self, name):
        return json.loads(self.ask("job", name, "--json"))

    def state_hashes(self, job):
        """Of all planes of all parameters, by file of a checkpoint that the service saves."""
        saved = json.loads(self.ask("save", job, self.folder / f"checkpoint-{job}", "--json"))
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                for file in sorted(pathlib.Path(saved["directory"]).glob("*.safetensors"))}


def child_of(service):
    """The service's process, whose parent holds its memory; 0 while there is none."""
    return next(iter(children_of(service.process.pid)), 0)


def served(service):
    """How many processes have got as far as to listen."""
    return read(service.log).count("ballastd listening on")


# What a service's log says of what a process had died in; the first that fits.
RECOVERIES = {"second round": "the second round of step", "update": " was decided, and ",
              "gradients": "had been given", "load": ", and loads ",
              "first weights": "awaits first weights", "done again": "is done again by its ranks",
              "skipped": " is skipped: ", "idle": ""}


def recoveries(log):
    """How many jobs were taken over, by that."""
    found = collections.Counter()
    for line in re.findall("after a death: (.* is back at step .*)", log):
        found[next(kind for kind, words in RECOVERIES.items() if words in line)] += 1
    return found


@dataclasses.dataclass(frozen=True)
class Training:
    """A model as small as it goes, so that a step takes milliseconds: what is tested are the
    instants between messages, of which a small step has as many as a large one."""
    steps: int = 30
    micro_steps: int = 2
    rule: str = "adam"  # With "muon" steps have two rounds, and AdamW has what are no matrices.
    state: str = "fp32"  # Of the embeddings, and with "adam" of the largest matrices.

    def words(self):
        return [f"--steps={self.steps}", f"--micro-steps={self.micro_steps}", "--text", str(TEXT),
                "--layers=1", "--width=32", "--heads=2", "--context=16", "--batch=4",
                "--bucket-elements=8192", "--chunk-elements=1024",
                f"--optimizer-rule={self.rule}", f"--state={self.state}",
                # It clips some steps, so that some provisional updates fail and others hold.
                f"--max-norm={2.1 if self.rule == 'muon' else 1.8}"]


class Run:
    """The workers of one job under deploy/run_workers.py."""

    def __init__(self, folder, service_address, job, training, *, max_restarts=0, out=None, flags=(), of_rank_1="",
                 ranks=RANKS):
        self.training = training
        self.job = job
        self.ranks = ranks
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"run-{job}-", dir=folder))
        self.out = out or self.folder / "out"
        self.progress_file = self.folder / "progress"
        self.errors = self.folder / "errors"
        self.process = start(
            [processes.RUN_WORKERS, f"--max-restarts={max_restarts}", ranks, self.folder,
             "sh", "-c", TELLS_ITS_PID, self.folder, BIN / "ballast-worker", "--service",
             service_address, "--job", job, "--out", self.out, *training.words(), *flags],
            self.progress_file, self.errors,
            {"OMP_NUM_THREADS": "1", "MASTER_PORT": "", "SERVICE_OF_RANK_1": of_rank_1},
            at_parents_death=signal.SIGTERM)

    def step(self):
        """The last step that rank 0 has said to be done."""
        lines = read(self.progress_file).splitlines()
        steps = [line.split()[1].split("/")[0] for line in lines if line.startswith("step ")]
        return max(map(int, steps), default=0)

    def await_step(self, step):
        await_(f"step {step} of {self.job}", lambda: self.step() >= step, self.process)

    def restarts(self):
        return read(self.errors).count("; all start again")

    def pid(self, rank, restart=0):
        """Of the worker of that start, which may be gone."""
        file = self.folder / f"pid-{restart}-{rank}"
        return int(await_(f"the start of rank {rank}", lambda: read(file).strip(), self.process))

    def kill(self, rank, restart):
        """SIGKILL for that worker; False if it has ended already. Stopped first, it cannot end in between."""
        pid = self.pid(rank, restart)
        try:
            os.kill(pid, signal.SIGSTOP)
            await_("its stop", lambda: state_of(pid) in ("T", "Z", "X", ""))
            if state_of(pid) != "T":
                return False
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def log(self, rank):
        return read(self.folder / f"rank-{rank}.err")

    def wait(self):
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise Hangs(f"job {self.job} does not end") from error

    def stop(self):
        """Ends the workers, the stopped ones too, and those that somebody else should have ended."""
        pids = [int(read(file)) for file in self.folder.glob("pid-*-?")]
        if self.process.poll() is None:
            for pid in pids:  # A child of a process that still runs: the number is not another's.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return stop(self.process, signal.SIGTERM)

    def transport(self):
        """How gradients and weights travelled, as rank 0 says."""
        return json.loads((self.out / "worker.json").read_text())["transport"]

    def story(self):
        """For a failure: the last words of everybody."""
        text = f"\n  job {self.job}, step {self.step()}, run_workers.py said:{tail(self.errors)}"
        for rank in range(self.ranks):
            text += f"\n    rank {rank} said:{tail(self.folder / f'rank-{rank}.err', 20)}"
        return text


@dataclasses.dataclass(frozen=True)
class Result:
    """What must be the same in every run of a training, whatever befell it."""
    weights: str  # SHA-256.
    state: dict   # SHA-256 of every file of the checkpoint.
    losses: list  # Step, loss, norm and clip of every step, as losses.csv has them.
    decisions: list  # Step, norm, clip and hyper-parameters, as the service recorded them.


def result_of(run, service):
    with open(run.out / "losses.csv", newline="") as file:
        losses = [(row["step"], row["loss"], row["norm"], row["clip"]) for row in csv.DictReader(file)]
    job = service.job(run.job)
    decisions = [(step["step"], step["applied"], step["norm"], step["clip_coefficient"],
                  step["micro_steps"], step["hyper_parameters"]) for step in job["recent_steps"]]
    return Result(weights=hashlib.sha256((run.out / "weights.bin").read_bytes()).hexdigest(),
                  state=service.state_hashes(run.job), losses=losses, decisions=decisions)


def undisturbed_result(folder, service, name, training):
    run = Run(folder, service.address, name, training)
    try:
        if run.wait() != 0:
            raise AssertionError(f"the undisturbed run failed{run.story()}")
        result = result_of(run, service)
        if any("master_remainder" in file for file in result.state) != (training.state != "fp32"):
            raise AssertionError(f"no state in {training.state}: {', '.join(result.state)}")
        return result
    finally:
        run.stop()


def with_known(losses, undisturbed):
    """The losses, with the rows that nobody lived to write from the undisturbed run; and how many those are."""
    written = {row[0] for row in losses}
    unknown = [row for row in undisturbed if row[0] not in written]
    return sorted(losses + unknown, key=lambda row: int(row[0])), len(unknown)


def difference(result, undisturbed, fields=None, deaths=0):
    """What differs of these fields, or of all, for people; empty if nothing does. A death may cost a row
    of the losses."""
    losses, unknown = with_known(result.losses, undisturbed.losses)
    if unknown <= deaths:
        result = dataclasses.replace(result, losses=losses)
    found = []
    for field in dataclasses.fields(Result):
        if fields is not None and field.name not in fields:
            continue
        was, expected = getattr(result, field.name), getattr(undisturbed, field.name)
        if was == expected:
            continue
        if not isinstance(was, list):
            found.append(f"{field.name}: {was}, undisturbed {expected}")
            continue
        first = next((i for i, (a, b) in enumerate(zip(was, expected)) if a != b), min(len(was), len(expected)))
        found.append(f"{field.name}: {len(was)} rows, undisturbed {len(expected)}; first different: "
                     f"{was[first:first + 1]}, undisturbed {expected[first:first + 1]}")
    return "; ".join(found)
