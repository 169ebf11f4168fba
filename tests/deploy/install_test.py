#!/usr/bin/env python3
"""`cmake --install`: what a stranger's project finds, builds against and trains with; the unit of systemd.

    install_test.py BUILD_DIR
"""

import gzip
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

from processes import PATIENCE, Service  # noqa: E402

BUILD = pathlib.Path(sys.argv.pop()).resolve()
LIMIT_SECONDS = 500  # A compiler may have little of a processor.
EXPOSURE = 3.0  # As systemd-analyze counts it, at most.
PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(stranger LANGUAGES C)
find_package(ballast 0.1 REQUIRED COMPONENTS c)
add_executable(c_trainer c_example.c)
target_link_libraries(c_trainer PRIVATE ballast::c)
find_package(ballast QUIET COMPONENTS client)
if(ballast_FOUND)
  message(FATAL_ERROR "C++ works without C++")
endif()

enable_language(CXX)
find_package(ballast REQUIRED)
add_library(headers OBJECT headers.cc)
target_link_libraries(headers PRIVATE ballast::client)
if(NOT EXISTS ${ballast_PROTO_DIR}/ballast/v1/jobs.proto)
  message(FATAL_ERROR "there is no protocol in ${ballast_PROTO_DIR}")
endif()

find_package(ballast QUIET COMPONENTS c wings)
if(ballast_FOUND)
  message(FATAL_ERROR "a part that does not exist was found")
endif()
find_package(ballast 9 QUIET)
if(ballast_FOUND)
  message(FATAL_ERROR "another version was found")
endif()
"""


def run(*words, **options):
    """Fails with what it said."""
    done = subprocess.run([str(word) for word in words], text=True, check=False, timeout=LIMIT_SECONDS,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.dir = pathlib.Path(folder.name)
        run("cmake", "--install", BUILD, "--prefix", cls.dir / "first")
        cls.prefix = cls.dir / "moved"  # What finds its parts only where it was put would fail.
        (cls.dir / "first").rename(cls.prefix)

    def project(self):
        """A folder with the installed examples."""
        project = pathlib.Path(tempfile.mkdtemp(dir=self.dir))
        for example in (self.prefix / "share/doc/libballast-dev/examples").iterdir():
            shutil.copy(example, project)
        return project

    def assert_trains(self, program, **environment):
        """From the first step on, with a service that has no job."""
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.dir))
        service = Service(self.prefix / "bin/ballastd", folder)
        self.addCleanup(service.stop)
        said = run(program, service.address, env=os.environ | environment)
        self.assertRegex(said, r"step (200|400): (w\[0\] = 1\.0000, w\[511\] = 1\.0000|"
                               r"loss 0\.000000, w = 2\.000 -3\.000 0\.500, b = 1\.000)")

    def test_a_strangers_project_finds_it_with_cmake_and_trains(self):
        project = self.project()
        (project / "CMakeLists.txt").write_text(PROJECT)
        include = self.prefix / "include"
        self.assertEqual(os.listdir(include), ["ballast"])  # In /usr/include nothing else is ours.
        for front in (ROOT / "client").glob("*.h"):
            folder = include / "ballast" / ("" if front.name == "ballast.h" else "client")
            self.assertTrue((folder / front.name).exists(), f"{front.name} is not installed")
        # Each header that is installed finds all that it includes.
        (project / "headers.cc").write_text("".join(
            f'#include "{header.relative_to(include)}"\n' for header in sorted(include.rglob("*.h"))))
        self.build(project)
        self.assert_trains(project / "build/c_trainer")

    def build(self, project):
        run("cmake", "-S", project, "-B", project / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={self.prefix}",
            "-DCMAKE_C_COMPILER=clang", "-DCMAKE_CXX_COMPILER=clang++", "-DCMAKE_BUILD_TYPE=Release")
        run("cmake", "--build", project / "build")

    def test_the_project_in_the_readme_builds_and_trains(self):
        project = self.project()
        [lists] = re.findall(r"(?ms)^```cmake\n(.*?)^```", (ROOT / "README.md").read_text())
        (project / "CMakeLists.txt").write_text(lists)
        (project / "example_main.cc").rename(project / "trainer.cc")
        self.build(project)
        self.assert_trains(project / "build/trainer")

    def test_a_strangers_makefile_finds_it_with_pkg_config_and_trains(self):
        project = self.project()
        environment = os.environ | {"PKG_CONFIG_PATH": str(self.prefix / "lib/pkgconfig")}

        def flags(package):
            return run("pkg-config", "--cflags", "--libs", package, env=environment).split()

        run("clang", project / "c_example.c", "-o", project / "c_trainer", *flags("ballast"))
        self.assert_trains(project / "c_trainer", LD_LIBRARY_PATH=str(self.prefix / "lib"))
        run("clang++", project / "example_main.cc", "-o", project / "trainer", *flags("ballast-client"))
        self.assert_trains(project / "trainer")

    def test_the_library_tells_its_version_and_nothing_but_its_interface(self):
        library = self.prefix / "lib/libballast.so"
        self.assertEqual(os.readlink(library), "libballast.so.1")
        self.assertIn("Library soname: [libballast.so.1]", run("readelf", "--dynamic", library))
        symbols = run("nm", "--dynamic", "--defined-only", "--format=posix", library).splitlines()
        self.assertGreater(len(symbols), 20)
        self.assertEqual([symbol for symbol in symbols if not symbol.startswith("ballast_")], [])

    def test_nothing_knows_where_it_was_built(self):
        found = [path for path in self.prefix.rglob("*") if path.is_file() and not path.is_symlink()]
        self.assertGreater(len(found), 30)
        for path in found:
            self.assertNotIn(str(ROOT).encode(), path.read_bytes(), path)

    def test_manual_pages_say_what_the_programs_say(self):
        commands = re.findall(r"(?m)^  ([a-z-]+) +\S", run(self.prefix / "bin/ballast", "help"))
        self.assertIn("doctor", commands)
        for page, *command in (("man8/ballastd.8", "ballastd", "--help"), ("man1/ballast.1", "ballast", "help"),
                               *(("man1/ballast.1", "ballast", "help", each) for each in commands if each != "help"),
                               ("man1/ballast-worker.1", "ballast-worker", "--help")):
            text = gzip.decompress((self.prefix / "share/man" / f"{page}.gz").read_bytes()).decode()
            self.assertNotIn(str(ROOT), text)
            self.assertRegex(text, r'^\.TH "BALLAST')
            done = subprocess.run([self.prefix / "bin" / command[0], *command[1:]], text=True, capture_output=True,
                                  check=False, timeout=PATIENCE)
            self.assertGreater(len(done.stdout), 100)
            self.assertIn(done.stdout.strip(), text.replace("\\-", "-").replace("\\e", "\\").replace("\n\\&", "\n"))

    def test_commands_of_the_page_have_flags_that_there_are(self):
        blocks = "".join(re.findall(r"(?ms)^```\n(.*?)^```", (ROOT / "deploy/README.md").read_text()))
        blocks = re.sub(r"(?m)(^|\s)#.*$", "", blocks.replace("\\\n", " ")).replace("podman exec ballast ", "")
        commands = re.findall(r"(?:^|[\s/])(ballastd|ballast-worker|ballast)[ \t]([^&|\n]*)", blocks)
        checked = 0
        for program, rest in commands:
            flags = [flag[2:].replace("-", "[-_]") for flag in re.findall(r"--[a-z-]+", rest) if flag != "--help"]
            if flags:
                words = ["help", rest.split()[0]] if program == "ballast" else ["--help"]
                known = subprocess.run([self.prefix / "bin" / program, *words], text=True, capture_output=True,
                                       check=False, timeout=PATIENCE).stdout
                for flag in flags:
                    self.assertRegex(known, rf"--{flag}\b", f"{program} {rest}")
                    checked += 1
        self.assertGreater(checked, 30)


class Unit(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.unit = pathlib.Path(folder.name, "ballastd.service")
        # Where the program is installed is the machine's.
        self.unit.write_text(re.sub(r"^(Exec\w+=)ballastd ", rf"\1{BUILD}/bin/ballastd ",
                                    (ROOT / "deploy/systemd/ballastd.service").read_text(), flags=re.MULTILINE))
        self.config = pathlib.Path(folder.name, "ballastd.conf")
        self.config.write_text((ROOT / "deploy/systemd/ballastd.conf").read_text().replace("/var/lib/ballast", folder.name))

    def test_has_no_fault_and_little_exposure(self):
        self.assertEqual(run("systemd-analyze", "verify", "--man=no", self.unit), "")
        said = run("systemd-analyze", "security", "--offline=true", "--no-pager", self.unit)
        level = re.search(r"Overall exposure level for ballastd.service: ([\d.]+)", said)
        self.assertLess(float(level.group(1)), EXPOSURE, said)

    def test_variables_within_a_word_are_in_braces(self):
        # Others systemd passes on as they are written.
        self.assertEqual(re.findall(r"(?m)^Exec.*\S\$\w.*", self.unit.read_text()), [])

    def test_its_configuration_is_taken(self):
        run(BUILD / "bin/ballastd", f"--config={self.config}", "--check-config", f"--user={os.getuid()}")
        # By itself it lets in the socket's group alone.
        lines = self.config.read_text()
        self.assertEqual(re.findall(r"(?m)^[a-z-]*listen = .*", lines), ["listen = unix:/run/ballast/ballastd.sock"])
        # Where other hosts are let in, what it needs are files, and nothing that is not known.
        lines = re.sub(r"(?m)^listen = .*\n", "", lines)
        self.config.write_text(re.sub(r"(?m)^# (?=[a-z-]+ = )", "", lines))
        done = subprocess.run([BUILD / "bin/ballastd", f"--config={self.config}", "--check-config", f"--user={os.getuid()}"], text=True,
                              capture_output=True, check=False, timeout=PATIENCE)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertRegex(done.stderr, r"/etc/ballast/\S+ cannot be read: No such file")


if __name__ == "__main__":
    unittest.main()
