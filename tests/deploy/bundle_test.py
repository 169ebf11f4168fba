#!/usr/bin/env python3
"""deploy/bundle.sh: the archive of a build, unpacked elsewhere, runs by itself.

    bundle_test.py BUILD_DIR
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

from processes import Service  # noqa: E402

BUILD = pathlib.Path(sys.argv.pop())
LIMIT_BYTES = 60 << 20
# What every Linux has: the C library's family and the kernel's own page.
SYSTEM = re.compile(
    r"(linux-vdso|ld-linux-x86-64|libc|libm|libdl|libpthread|librt|libresolv|libutil|libanl)\.so")


def bundle(*flags, **environment):
    return subprocess.run([ROOT / "deploy/bundle.sh", *flags], text=True, capture_output=True, check=False,
                          timeout=300, env=os.environ | environment)


class Bundle(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.dir = pathlib.Path(cls.folder.name)
        # What a wheel holds is its own test's.
        wheel = cls.dir / "ballast-0.1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr("ballast/__init__.py", "")
            packed.writestr("ballast-0.1.0.dist-info/METADATA",
                            "Metadata-Version: 2.1\nName: ballast\nVersion: 0.1.0\n")
            packed.writestr("ballast-0.1.0.dist-info/WHEEL",
                            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            packed.writestr("ballast-0.1.0.dist-info/RECORD", "")
        done = bundle("--out", cls.dir / "made", "--build", BUILD, "--wheel", wheel)
        assert done.returncode == 0, done.stderr
        cls.archives = list((cls.dir / "made").iterdir())
        with tarfile.open(cls.archives[0]) as archive:
            archive.extractall(cls.dir / "elsewhere")
        cls.tree = next((cls.dir / "elsewhere").iterdir())

    def run_in_bundle(self, *command, **environment):
        """From another folder, and with nothing of this shell's environment."""
        return subprocess.run([self.tree / command[0], *command[1:]], text=True, capture_output=True,
                              check=False, timeout=120, cwd="/", env=environment)

    def test_is_one_archive_of_at_most_60_mib(self):
        self.assertEqual(len(self.archives), 1)
        self.assertRegex(self.archives[0].name, r"^ballast-[0-9.]+-linux-x86_64\.tar\.gz$")
        self.assertLessEqual(self.archives[0].stat().st_size, LIMIT_BYTES)

    def test_programs_take_every_library_from_it(self):
        for program in (self.tree / "bin").iterdir():
            listed = self.run_in_bundle(f"bin/{program.name}", LD_TRACE_LOADED_OBJECTS="1").stdout
            found = [line.split() for line in listed.splitlines() if "=>" in line]
            self.assertGreater(len(found), 3, listed)
            for name, _, path, *_ in found:
                if not SYSTEM.match(name):
                    self.assertTrue(os.path.realpath(path).startswith(str(self.tree.resolve())),
                                    f"{program.name} takes {name} from {path}")

    def test_trains_from_another_folder(self):
        done = self.run_in_bundle(
            "bin/ballast-worker", "--optimizer=local", "--steps=2", "--layers=1", "--width=32", "--heads=1",
            "--context=16", "--batch=2", f"--text={self.tree / 'LICENSE'}", f"--out={self.dir / 'run'}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue((self.dir / "run/worker.json").exists())

    def test_serves_and_answers(self):
        service = Service(self.tree / "bin/ballastd", self.dir, "--log-level=warning",
                          environment={"LD_LIBRARY_PATH": ""})
        self.addCleanup(service.stop)
        done = self.run_in_bundle("bin/ballast", "jobs", "--service", service.address)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(service.stop(signal.SIGTERM), 0)

    def test_scripts_find_what_they_import(self):
        for script in ("run_workers.py", "compare_runs.py"):
            done = self.run_in_bundle(f"deploy/{script}", "--help", PATH=os.environ["PATH"])
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_proof_for_a_gpu_finds_all_its_parts(self):
        for part in ([], ["--torch"]):
            done = self.run_in_bundle("tests/gpu/run.sh", *part, "--help", PATH=os.environ["PATH"])
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_proof_installs_the_wheel_that_is_in_it(self):
        # A trainer that only says what it can import.
        trainer = self.dir / "trainer.py"
        trainer.write_text(
            "import json, os, sys, ballast\n"
            "print(json.dumps(dict(torch='2', python='3', cuda=True, ballast=os.path.dirname(ballast.__file__))))\n"
            "sys.exit('--capabilities' not in sys.argv)\n")
        out = self.dir / "proof"
        done = self.run_in_bundle("tests/gpu/run.sh", "--torch", "--out", out, "--only=package", "--trainer", trainer,
                                  "--python", sys.executable, PATH=os.environ["PATH"])
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        result = json.loads((out / "torch.json").read_text())
        self.assertEqual(result["gpu"]["ballast"], str(out / "torch-package/ballast"))
        self.assertIn("ballast-0.1.0-py3-none-any.whl", result["checks"][0]["detail"])

    def test_names_the_wheel_that_is_not_there(self):
        done = bundle("--out", self.dir / "none", "--build", BUILD, "--wheel", self.dir / "no.whl")
        self.assertEqual(done.returncode, 1)
        self.assertIn("no.whl", done.stderr)

    def test_says_what_this_machine_lacks_for_a_gpu(self):
        done = self.run_in_bundle("bin/ballast-worker", "--device=cuda", "--optimizer=local",
                                  CUDA_VISIBLE_DEVICES="-1")
        self.assertEqual(done.returncode, 1)
        lines = [line for line in done.stderr.splitlines() if line.startswith("ballast-worker: ")]
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertIn("--device=cpu", lines[0])

    def test_refuses_what_is_too_large(self):
        done = bundle("--out", self.dir / "small", "--build", BUILD, BALLAST_BUNDLE_MIB="1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("at most 1 are allowed", done.stderr)
        self.assertEqual(list((self.dir / "small").iterdir()), [])

    def test_names_what_was_not_built(self):
        done = bundle("--out", self.dir / "none", "--build", self.dir)
        self.assertEqual(done.returncode, 1)
        self.assertIn("bin/ballastd; build it", done.stderr)


if __name__ == "__main__":
    unittest.main()
