"""Finds and runs Ballast's programs, for prove.py; and watches the GPU's memory meanwhile."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import processes  # noqa: E402
from processes import ROOT, last_line  # noqa: E402

SERVICE_START_SECONDS = 30
LEAST_SECONDS = 1  # Nothing is begun for less.


class Failed(Exception):
    """One line with the remedy."""


class OutOfTime(Exception):
    """What was not done, or not to its end, because all the time is over."""


def package_folders(pattern: str) -> list[str]:
    """Folders in which Python's packages keep parts of CUDA."""
    packages = {sysconfig.get_path("purelib"), *sys.path}
    return [folder for package in sorted(p for p in packages if p)
            for folder in sorted(glob.glob(f"{package}/nvidia/{pattern}"))]


def library_path() -> str:
    """LD_LIBRARY_PATH with the folders in which Python's packages keep CUDA's libraries."""
    folders = [os.environ.get("LD_LIBRARY_PATH", ""), *package_folders("*/lib")]
    return ":".join(folder for folder in folders if folder)


def find_tool(name: str) -> str | None:
    """A tool of CUDA's toolkit."""
    folders = [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin",
               "/usr/local/cuda/bin", *package_folders("*/bin"), *package_folders(f"*/{name}")]
    return shutil.which(name, path=":".join(folder for folder in folders if folder))


def cores() -> int:
    """Those that this process may use: a control group may allow less than there are."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, math.ceil(int(quota) / int(period)))
    return max(count, 1)


class Running:
    """A program that runs in a process group of its own, with its output in a log."""

    def __init__(self, name: str, log: pathlib.Path, command: list, environment: dict, deadline: float):
        self.name, self.log, self.deadline = name, log, deadline
        if self.left() < LEAST_SECONDS:
            raise OutOfTime(f"{name} was not begun")
        log.unlink(missing_ok=True)
        self.process = processes.start(command, log, environment=environment, group=True)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def end(self):
        processes.end_group(self.process)

    def output(self) -> str:
        return processes.read(self.log)

    def wait(self, seconds: float) -> int:
        """Its exit code. What takes longer than these seconds hangs; the deadline may come before."""
        left = self.left()
        try:
            return self.process.wait(timeout=max(min(seconds, left), 0))
        except subprocess.TimeoutExpired:
            if left < seconds:
                raise OutOfTime(f"{self.name} was not done when the time was over") from None
            raise Failed(f"{self.name} did not end within {seconds:.0f} s; see {self.log}") from None
        finally:
            self.end()


class Programs:
    """The programs under --bin, their logs and their environment. None runs past the deadline."""

    def __init__(self, folder: pathlib.Path | None, logs: pathlib.Path, deadline: float = math.inf):
        choices = [folder, folder / "bin", folder / "tests"] if folder else [
            ROOT / "bin", ROOT / "build/release/bin", ROOT / "build/release/tests"]
        if folder and folder.name == "bin":
            choices.append(folder.parent / "tests")
        self.folders = choices
        self.logs = logs
        self.deadline = deadline
        self.service_flags = [f"--threads={cores()}"]
        self.environment = {"LD_LIBRARY_PATH": library_path()}

    def path(self, name: str) -> pathlib.Path:
        for folder in self.folders:
            if (folder / name).is_file():
                return folder / name
        raise Failed(f"there is no {name} in {self.folders[0]}; build it, or name its folder with --bin")

    def start(self, name: str, command: list, **environment) -> Running:
        return Running(name, self.logs / f"{name}.log", command, self.environment | environment,
                       self.deadline)

    def run(self, name: str, command: list, seconds: float, **environment) -> subprocess.CompletedProcess:
        """To its end, which comes within these seconds, or it hangs."""
        running = self.start(name, command, **environment)
        code = running.wait(seconds)
        return subprocess.CompletedProcess(command, code, running.output())

    @contextlib.contextmanager
    def service(self, name: str):
        """A service of its own, for one run; its address."""
        folder = self.logs / name
        folder.mkdir()
        try:
            service = processes.Service(
                self.path("ballastd"), folder, "--log-level=warning", "--drain-seconds=1",
                *self.service_flags, environment=self.environment, seconds=SERVICE_START_SECONDS)
        except AssertionError:
            said = last_line(processes.read(folder / "ballastd.log"))
            raise Failed(f"ballastd did not start: {said}") from None
        try:
            yield service.address
        finally:
            service.stop()

    def train(self, name: str, flags: list, seconds: float, ranks: int = 1) -> dict:
        """A training run; its worker.json, with the rows of losses.csv under "rows" and the weights' hash."""
        out = self.logs / name
        command = [self.path("ballast-worker"), "--device=cuda", f"--out={out}", f"--text={ROOT / 'LICENSE'}", *flags]
        environment = {}
        if ranks > 1:
            command = [sys.executable, processes.RUN_WORKERS, ranks, self.logs / f"{name}-ranks", *command]
            environment["MASTER_PORT"] = ""  # It chooses one that is free.
        done = self.run(name, command, seconds, **environment)
        if done.returncode != 0:
            raise Failed(f"{name}: {last_line(done.stdout)}")
        result = json.loads((out / "worker.json").read_text())
        result["weights_sha256"] = hashlib.sha256((out / "weights.bin").read_bytes()).hexdigest()
        (out / "weights.bin").unlink()  # Gigabytes.
        header, *rows = (out / "losses.csv").read_text().split()
        names = header.split(",")
        result["rows"] = [dict(zip(names, map(float, row.split(",")))) for row in rows]
        return result


class GpuMemory:
    """The most that the memory of a GPU was in use beyond what it was before, while this is entered.
    One process of nvidia-smi reports it all the time: starting one costs far more than asking."""

    COMMAND = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def __init__(self, gpu: str):
        self.command = [*self.COMMAND, f"--id={gpu}"]
        self.before = 0
        self.most = None
        self.process = None

    def __enter__(self):
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
            self.before = int(subprocess.run(
                self.command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0])
            # Its output is read as it comes, from a pipe.
            self.process = subprocess.Popen([*self.command, "--loop-ms=250"], stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, text=True)
            self.thread = threading.Thread(target=self.watch)
            self.thread.start()
        return self

    def __exit__(self, *_):
        if self.process is not None:
            self.process.kill()
            self.thread.join()
            self.process.wait()

    def watch(self):
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self.most = max(self.most or 0, int(line))

    @property
    def bytes(self) -> int | None:
        return None if self.most is None else (self.most - self.before) << 20
