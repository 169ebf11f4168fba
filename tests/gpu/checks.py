"""Checks with their outcomes, as prove.py and prove_torch.py write them down."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import re
import shutil
import sys
import tarfile
import time

from programs import Failed, OutOfTime, cores

NOT_ALL_WAS_RUN = 2
NO_GPU = 77


class LeftOut(Exception):
    """Why a check cannot be made on this machine."""


OUTCOMES = {Failed: "failed", LeftOut: "left out", OutOfTime: "out of time"}


def host() -> dict:
    """The machine without the GPU."""
    cpu = re.search(r"model name\s*:\s*(.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return dict(cpu=cpu.group(1) if cpu else platform.machine(), cores=cores(),
                memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def slug(way: str) -> str:
    return way.replace(",", "").replace(" ", "-")


# What the two parts of run.sh leave in --out.
_OURS = ("gpu.json", "logs", "logs.tar.gz", "trace-*.json.gz",
         "torch.json", "torch-logs", "torch-package", "torch-logs.tar.gz")


def clear(out: pathlib.Path, *names: str) -> str:
    """Nothing of an earlier run may pass for this one's: removes these patterns from `out`. Empty, or why not."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        # A folder with other files is somebody's, and so may its "logs" be.
        others = [file for file in out.iterdir() if not any(file.match(ours) for ours in _OURS)]
        if others and not any((out / result).exists() for result in ("gpu.json", "torch.json")):
            return f"{out} has other files and no results of an earlier run; choose another --out"
        for name in names:
            for old in out.glob(name):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
    except OSError as error:
        return f"{out}: {error.strerror}; choose another --out"
    return ""


class Checks:
    """only: the checks with this in their name. deadline: of time.monotonic, for all."""

    def __init__(self, file: pathlib.Path, deadline: float, only: str = ""):
        self.file = file
        self.begun = time.monotonic()
        self.deadline = deadline
        self.only = only
        self.gpu = {}
        self.checks = []
        self.benchmark = []

    def check(self, name: str, what, always=False):
        """what() returns a description of what it saw, or raises one of OUTCOMES."""
        if self.only not in name and not always:
            return
        begun = time.monotonic()
        try:
            outcome, detail = "passed", what()
        except tuple(OUTCOMES) as reason:
            outcome, detail = OUTCOMES[type(reason)], str(reason)
        except Exception as error:  # The other checks, and what they measure, are not lost with it.
            outcome, detail = "failed", f"{type(error).__name__}: {error}"
        self.checks.append(dict(name=name, outcome=outcome, detail=detail,
                                seconds=round(time.monotonic() - begun, 1)))
        print(f"{outcome if outcome != 'failed' else 'FAILED':11} {name}: {detail}", flush=True)
        self.write()

    def expect_time(self, seconds: float):
        """Before what takes so long."""
        left = self.deadline - time.monotonic()
        if left < seconds:
            raise OutOfTime(f"not begun: {max(left, 0):.0f} s were left, it may take {seconds:.0f}")

    def passed(self) -> bool:
        return all(check["outcome"] != "failed" for check in self.checks)

    def complete(self) -> bool:
        return all(check["outcome"] in ("passed", "failed") for check in self.checks)

    def write(self):
        """After each check, so that whatever ends this leaves what there is."""
        result = dict(passed=self.passed(), complete=self.complete(),
                      seconds=round(time.monotonic() - self.begun), gpu=self.gpu, host=host(),
                      checks=self.checks, benchmark=self.benchmark)
        self.file.write_text(json.dumps(result, indent=2) + "\n")

    def pack_logs(self, logs: pathlib.Path):
        """One file beside the result, because many come back slowly from a machine that was lent."""
        with tarfile.open(self.file.parent / f"{logs.name}.tar.gz", "w:gz") as archive:
            archive.add(logs, logs.name)

    def verdict_of_all(self, program: str) -> int:
        """The exit code, after a line that says why."""
        if all(self.only not in check["name"] for check in self.checks):
            print(f"{program}: no check is named {self.only}; see tests/gpu", file=sys.stderr)
            return 1
        if not self.passed():
            print(f"FAILED: {self.file}")
            return 1
        if not self.complete():
            left = [check["name"] for check in self.checks if check["outcome"] != "passed"]
            print(f"not all was run: {'; '.join(left)}. --only NAME runs one alone. {self.file}")
            return NOT_ALL_WAS_RUN
        print(f"passed: {self.file}")
        return 0
