"""Finds and runs Ballast's programs, for prove.py."""

import contextlib
import glob
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import sysconfig
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVICE_START_SECONDS = 30


class Failed(Exception):
    """One line that says what to do about it."""


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def library_path() -> str:
    """LD_LIBRARY_PATH with the folders in which Python's packages keep CUDA's libraries."""
    folders = [os.environ.get("LD_LIBRARY_PATH", "")]
    packages = {sysconfig.get_path("purelib"), *sys.path}
    for package in sorted(p for p in packages if p):
        folders += sorted(glob.glob(f"{package}/nvidia/*/lib"))
    return ":".join(folder for folder in folders if folder)


class Programs:
    """The programs under --bin, their logs and their environment."""

    def __init__(self, folder: pathlib.Path | None, logs: pathlib.Path):
        choices = [folder, folder / "bin", folder / "tests"] if folder else [
            ROOT / "bin", ROOT / "build/release/bin", ROOT / "build/release/tests"]
        if folder and folder.name == "bin":
            choices.append(folder.parent / "tests")
        self.folders = choices
        self.logs = logs
        self.environment = os.environ | {"LD_LIBRARY_PATH": library_path()}

    def path(self, name: str) -> pathlib.Path:
        for folder in self.folders:
            if (folder / name).is_file():
                return folder / name
        raise Failed(f"there is no {name} in {self.folders[0]}; build it, or name its folder with --bin")

    def run(self, log: str, command: list, seconds: float, **environment) -> subprocess.CompletedProcess:
        """Runs it to its end, in a process group that is ended after so long; keeps what it says."""
        with open(self.logs / f"{log}.log", "w+", encoding="utf-8", errors="replace") as file:
            process = subprocess.Popen(
                [str(word) for word in command], stdout=file, stderr=subprocess.STDOUT, text=True,
                env=self.environment | environment, start_new_session=True)
            try:
                code = process.wait(timeout=max(seconds, 1))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            file.seek(0)
            output = file.read()
        if code is None:
            raise Failed(f"{log} did not end within {seconds:.0f} s; see {self.logs / log}.log")
        return subprocess.CompletedProcess(command, code, output)

    @contextlib.contextmanager
    def service(self, name: str):
        """A service of its own, for one run; its address."""
        port_file = self.logs / f"{name}.address"
        port_file.unlink(missing_ok=True)
        with open(self.logs / f"{name}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [str(self.path("ballastd")), "--listen=127.0.0.1:0", f"--port-file={port_file}",
                 "--log-level=warning", "--nostartup-benchmark", "--drain-seconds=1"],
                stdout=log, stderr=subprocess.STDOUT)
            try:
                deadline = time.monotonic() + SERVICE_START_SECONDS
                while not (port_file.exists() and port_file.read_text().strip()):
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise Failed(f"ballastd did not start; see {self.logs / name}.log")
                    time.sleep(0.02)
                yield port_file.read_text().split()[0]
            finally:
                process.kill()
                process.wait()

    def train(self, name: str, flags: list, seconds: float, ranks: int = 1) -> dict:
        """A training run; its worker.json, with the rows of losses.csv under "rows"."""
        out = self.logs / name
        command = [self.path("ballast-worker"), "--device=cuda", f"--out={out}",
                   f"--text={ROOT / 'LICENSE'}", *flags]
        if ranks == 1:
            done = self.run(name, command, seconds)
        else:
            done = self._run_ranks(name, command, seconds, ranks)
        if done.returncode != 0:
            raise Failed(f"{name}: {last_line(done.stdout)}")
        result = json.loads((out / "worker.json").read_text())
        header, *rows = (out / "losses.csv").read_text().split()
        names = header.split(",")
        result["rows"] = [dict(zip(names, map(float, row.split(",")))) for row in rows]
        (out / "weights.bin").unlink()
        return result

    def _run_ranks(self, name: str, command: list, seconds: float, ranks: int):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shell = 'pids=(); for r in $(seq 0 $((RANKS - 1))); do RANK=$r LOCAL_RANK=$r "$@" & pids+=($!); done; ' \
                'code=0; for p in "${pids[@]}"; do wait "$p" || code=1; done; exit $code'
        return self.run(name, ["bash", "-c", shell, "ranks", *command], seconds, RANKS=str(ranks),
                        WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
