#!/usr/bin/env python3
"""The Python environment with PyTorch and its trainers in which the tests of ballast.torch run.

    torch_environment.py --make          makes it, where there is none; one line if that cannot be done
    torch_environment.py --run FILE ...  runs FILE in it; exits with 77 if there is none, and with
                                         BALLAST_REQUIRE_PYPI=1 with 1
    torch_environment.py --run-with-ray FILE ...  the same in one that also has Ray, which it makes; 530 MB

It lies outside the tree, under the user's cache folder, and is made once: its name has a hash of the versions in
it. At most two attempts of six minutes.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

PINS = ("torch==2.11.0", "numpy==2.2.6", "transformers==5.23.0", "accelerate==1.15.0", "lightning==2.6.6",
        "tqdm==4.70.1", "matplotlib==3.11.2")
RAY = ("ray[train]==2.60.0", "pandas==3.1.1", "pyarrow==26.0.1")
ATTEMPTS = 2
ATTEMPT_SECONDS = 360
NOT_THERE = 77
# The distribution's, which has the module venv.
PYTHON = "/usr/bin/python3"


def folder(kind: str = "torch") -> pathlib.Path:
    version = "{}.{}".format(*sys.version_info)
    name = hashlib.sha256(" ".join((version, *PINS, *(RAY if kind == "ray" else ()))).encode()).hexdigest()[:12]
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return cache / "ballast" / f"{kind}-{name}"


def ready(kind: str = "torch") -> bool:
    return (folder(kind) / "complete").exists()


def attempt(path: pathlib.Path, kind: str) -> str:
    """Empty, or in one line why there is no environment now."""
    deadline = time.monotonic() + ATTEMPT_SECONDS
    shutil.rmtree(path, ignore_errors=True)
    packages = "lib/python{}.{}/site-packages".format(*sys.version_info)
    # A line of a .pth file is a folder with more packages.
    shared = [["sh", "-c", f"echo {folder() / packages} >{path / packages / 'torch.pth'}"]] if kind == "ray" else []
    for command in ([PYTHON, "-m", "venv", path], *shared,
                    [path / "bin/pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check",
                     *(RAY if kind == "ray" else PINS)],
                    [path / "bin/python", "-c", f"import torch, {kind}"]):
        try:
            done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, check=False,
                                  timeout=max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            return f"{command[-1]} was not there after {ATTEMPT_SECONDS} s"
        except OSError as error:
            return str(error)
        if done.returncode != 0:
            return (done.stdout.strip().splitlines() or [f"{command[0]} failed"])[-1]
    return ""


def make(kind: str = "torch") -> int:
    if ready(kind):
        return 0
    path = folder(kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(ATTEMPTS):
        why = attempt(path, kind)
        if not why:
            (path / "complete").touch()
            return 0
    shutil.rmtree(path, ignore_errors=True)
    untested = "ballast.torch, its examples and its wheel are" if kind == "torch" else "ballast.ray is"
    missing = "PyTorch" if kind == "torch" else "Ray"
    print(f"tests/run.sh: {missing} could not be installed, so {untested} not tested: {why}")
    return 1


def main() -> int:
    words = sys.argv[1:]
    if words == ["--make"]:
        return make()
    if len(words) < 2 or words[0] not in ("--run", "--run-with-ray"):
        print(__doc__, file=sys.stderr)
        return 2
    if not ready():
        print("there is no environment with PyTorch; tests/run.sh makes it")
        return 1 if os.environ.get("BALLAST_REQUIRE_PYPI") == "1" else NOT_THERE
    kind = "ray" if words[0] == "--run-with-ray" else "torch"
    if make(kind) != 0:
        return 1
    python = str(folder(kind) / "bin/python")  # By its path it finds its packages.
    os.execv(python, [python, "-B", *words[1:]])


if __name__ == "__main__":
    sys.exit(main())
