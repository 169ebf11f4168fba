#!/usr/bin/env python3
"""The Python environment with PyTorch and its trainers in which the tests of ballast.torch run.

    torch_environment.py --make          makes it, where there is none; one line if that cannot be done
    torch_environment.py --run FILE ...  runs FILE in it; exits with 77 if there is none, and with
                                         BALLAST_REQUIRE_PYPI=1 with 1

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
ATTEMPTS = 2
ATTEMPT_SECONDS = 360
NOT_THERE = 77
# The distribution's, which has the module venv.
PYTHON = "/usr/bin/python3"


def folder() -> pathlib.Path:
    version = "{}.{}".format(*sys.version_info)
    name = hashlib.sha256(" ".join((version, *PINS)).encode()).hexdigest()[:12]
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return cache / "ballast" / f"torch-{name}"


def ready() -> bool:
    return (folder() / "complete").exists()


def attempt(path: pathlib.Path) -> str:
    """Empty, or in one line why there is no environment now."""
    deadline = time.monotonic() + ATTEMPT_SECONDS
    shutil.rmtree(path, ignore_errors=True)
    for command in ([PYTHON, "-m", "venv", path],
                    [path / "bin/pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check", *PINS],
                    [path / "bin/python", "-c", "import torch"]):
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


def make() -> int:
    if ready():
        return 0
    path = folder()
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(ATTEMPTS):
        why = attempt(path)
        if not why:
            (path / "complete").touch()
            return 0
    shutil.rmtree(path, ignore_errors=True)
    print("tests/run.sh: PyTorch could not be installed, so ballast.torch, its examples and its wheel are not tested: "
          f"{why}")
    return 1


def main() -> int:
    words = sys.argv[1:]
    if words == ["--make"]:
        return make()
    if len(words) < 2 or words[0] != "--run":
        print(__doc__, file=sys.stderr)
        return 2
    if not ready():
        print("there is no environment with PyTorch; tests/run.sh makes it")
        return 1 if os.environ.get("BALLAST_REQUIRE_PYPI") == "1" else NOT_THERE
    python = str(folder() / "bin/python")  # By its path it finds its packages.
    os.execv(python, [python, "-B", *words[1:]])


if __name__ == "__main__":
    sys.exit(main())
