#!/usr/bin/env python3
"""deploy/wheel.sh: the wheel of a build, installed where nothing else of ours is, trains.

    BALLAST_BIN_DIR=build/release/bin torch_environment.py --run wheel_test.py

The environment that it is installed into borrows PyTorch, and nothing else, from the one this runs in.
"""

import email
import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import unittest
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/support"))

from processes import Service  # noqa: E402

BUILD = pathlib.Path(os.environ["BALLAST_BIN_DIR"]).parent
LIMIT_BYTES = 25 << 20
NOT_THERE = 77
OURS = re.compile(r"/lib(ballast|grpc|protobuf|absl|re2|spdlog|fmt|tbb|hwloc|cares)[^/]*$")
NAMES_OF_LIBRARIES = """
def libraries(process):
    with open(f"/proc/{process}/maps") as maps:
        return {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
print(*libraries("self"), *libraries(optimizer._kept.service.pid), sep="\\n")
"""


def make(out, **environment):
    return subprocess.run([ROOT / "deploy/wheel.sh", "--out", out, "--build", BUILD], text=True, capture_output=True,
                          check=False, env=os.environ | environment)


def first_program(page):
    """The first Python that a reader of the page sees."""
    return re.search(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)[1]


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.dir = pathlib.Path(folder.name)
        done = make(cls.dir / "made")
        if done.returncode == NOT_THERE and os.environ.get("BALLAST_REQUIRE_PYPI") != "1":
            print(done.stderr.strip())
            sys.exit(NOT_THERE)
        assert done.returncode == 0, done.stderr
        [cls.wheel] = (cls.dir / "made").iterdir()
        print(done.stdout.strip())
        cls.installed = cls.dir / "installed"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", cls.installed], check=True)
        [packages] = cls.installed.glob("lib/python*/site-packages")
        # The wheel itself, by pip as a user has it, and only the wheel.
        subprocess.run([sys.executable, "-m", "pip", "--python", cls.installed, "install", "--quiet", "--no-index",
                        "--no-deps", cls.wheel], check=True, env={"PATH": os.environ["PATH"]})
        (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run_installed(self, program, *arguments):
        """From another folder, and with nothing of this shell's environment."""
        return subprocess.run([self.installed / "bin" / program, *arguments], text=True, capture_output=True,
                              check=False, cwd=self.dir, env={"PATH": "/usr/bin:/bin"})

    def test_is_for_every_python_and_small(self):
        self.assertRegex(self.wheel.name, r"^ballast-[0-9.]+-py3-none-manylinux_2_36_x86_64\.whl$")
        self.assertLessEqual(self.wheel.stat().st_size, LIMIT_BYTES)

    def test_says_what_it_is(self):
        project = re.search(r"^project\(ballast VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text(), re.M)[1]
        with zipfile.ZipFile(self.wheel) as wheel:
            names = wheel.namelist()
            metadata = email.message_from_bytes(wheel.read(f"ballast-{project}.dist-info/METADATA"))
        self.assertEqual(metadata["Version"], project)
        self.assertLessEqual({"torch", "ray"}, set(metadata.get_all("Provides-Extra")))
        self.assertIn("```python", metadata.get_payload())  # The README.
        for name in ("ballast/py.typed", f"ballast-{project}.dist-info/licenses/LICENSE",
                     f"ballast-{project}.dist-info/licenses/libraries/libprotobuf32"):
            self.assertIn(name, names)

    def test_five_lines_train_with_its_own_libraries_only(self):
        script = self.dir / "five_lines.py"
        script.write_text(first_program(ROOT / "README.md") + NAMES_OF_LIBRARIES)
        done = self.run_installed("python", script)
        self.assertEqual(done.returncode, 0, done.stderr)
        loss, *libraries = done.stdout.splitlines()
        self.assertLess(float(loss.removeprefix("loss ")), 0.6)  # 1 says that it has learned nothing.
        ours = [path for path in libraries if OURS.search(path)]
        self.assertGreater(len(ours), 30, libraries)
        for path in ours:
            self.assertTrue(pathlib.Path(path).is_relative_to(self.installed.resolve()), path)

    def test_its_commands_are_the_programs(self):
        service = Service(self.installed / "bin/ballastd", self.dir, "--log-level=warning",
                          environment={"BALLAST_BIN_DIR": ""})
        self.addCleanup(service.stop)
        done = self.run_installed("ballast", "jobs", "--service", service.address)
        self.assertEqual(done.returncode, 0, done.stderr)
        # No Python is left between the shell and it.
        program = pathlib.Path(f"/proc/{service.process.pid}/exe").resolve()
        self.assertTrue(program.is_relative_to(self.installed.resolve()), program)
        self.assertEqual(service.stop(signal.SIGTERM), 0)

    def test_says_when_its_tools_cannot_be_had(self):
        done = make(self.dir / "none", XDG_CACHE_HOME=str(self.dir / "cache"), PIP_INDEX_URL="http://127.0.0.1:1/",
                    PIP_RETRIES="0")
        self.assertEqual(done.returncode, NOT_THERE)
        self.assertRegex(done.stderr, r"^wheel.sh: the tools could not be installed, so there is no wheel: .+\n$")


if __name__ == "__main__":
    unittest.main()
