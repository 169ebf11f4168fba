#!/usr/bin/env python3
"""Shows that each check passes on a good tree and fails on a tree made bad on purpose."""

import pathlib
import tempfile
import unittest

from check_build_paths import binaries_with, main as check_build_paths
from check_folders import MOST_FILES, MOST_FILES_IN_TESTS, MOST_SOURCES_WITHOUT_README, folder_faults
from check_includes import wrong_includes
from check_memory import fatal_without_memory
from check_tests_registered import unregistered_tests
from check_top_level import REQUIRED, top_level_faults


class Tree(unittest.TestCase):
    """A tree in a temporary folder, without git."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def write(self, path: str, text: str = "") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)


class RegisteredTests(Tree):
    def setUp(self):
        super().setUp()
        self.write("tests/CMakeLists.txt", "foreach(folder server)\nendforeach()\n")
        self.write("tests/server/CMakeLists.txt", "ballast_test(a SOURCES a_test.cc b_fuzz.cc)\n")
        self.write("tests/server/a_test.cc")
        self.write("tests/server/b_fuzz.cc")

    def test_pass_when_all_are_named(self):
        self.assertEqual(unregistered_tests(self.root), [])

    def test_fail_when_one_is_named_nowhere(self):
        for name in ("c_test.cc", "c_fuzz.cc", "c_test.py"):
            with self.subTest(name):
                self.write(f"tests/server/{name}")
                self.assertRegex(unregistered_tests(self.root)[0], rf"^tests/server/{name}: ")
                (self.root / "tests/server" / name).unlink()

    def test_fail_when_named_only_in_a_comment_or_inside_another_word(self):
        self.write("tests/server/CMakeLists.txt", "f(xa_test.cc b_fuzz.cc) # a_test.cc\n")
        self.assertEqual(len(unregistered_tests(self.root)), 1)

    def test_pass_when_named_through_a_function_and_fail_when_it_is_not_called(self):
        function = "function(my_test name)\nf(${name}_test.cc b_fuzz.cc)\nendfunction()\n"
        self.write("tests/server/CMakeLists.txt", function + "my_test(a unit)\n")
        self.assertEqual(unregistered_tests(self.root), [])
        self.write("tests/server/CMakeLists.txt", function + "my_test(other unit)\n")
        self.assertRegex(unregistered_tests(self.root)[0], "^tests/server/a_test.cc: ")

    def test_pass_when_named_through_a_function_with_a_room_and_fail_in_another_room(self):
        function = "function(my_test room name)\nf(${room}/${name}_test.cc)\nendfunction()\n"
        self.write("tests/server/CMakeLists.txt",
                   function + "f(a_test.cc b_fuzz.cc)\nmy_test(deep c unit)\n")
        self.write("tests/server/deep/c_test.cc")
        self.assertEqual(unregistered_tests(self.root), [])
        self.write("tests/server/other/c_test.cc")
        self.assertRegex(unregistered_tests(self.root)[0], "^tests/server/other/c_test.cc: ")

    def test_fail_when_another_folder_names_a_test_of_the_same_name(self):
        self.write("tests/client/a_test.cc")
        self.assertRegex(unregistered_tests(self.root)[0], "^tests/client/a_test.cc: no ")

    def test_fail_when_the_folder_is_not_added(self):
        self.write("tests/CMakeLists.txt", "foreach(folder client)\nendforeach()\n")
        self.assertRegex(unregistered_tests(self.root)[0], "does not add")

    def test_pass_when_an_outer_file_names_the_path(self):
        self.write("tests/server/deep/c_test.cc")
        self.write("tests/server/CMakeLists.txt", "f(a_test.cc b_fuzz.cc deep/c_test.cc)\n")
        self.assertEqual(unregistered_tests(self.root), [])


class Includes(Tree):
    ALLOWED = (
        ("server/a.cc", '"proto/convert.h"'),
        ("server/a.cc", '"cpu_optimizer_service/job/job.h"'),
        ("server/a.cc", "<grpcpp/grpcpp.h>"),
        ("client/a.cc", '"proto/frame.h"'),
        ("client/a.cc", '"ballast/v1/ballast.pb.h"'),
        ("client/a.cc", '"cpu_optimizer_service/common/layout.h"'),
        ("client/pinned_staging.cc", "<cuda_runtime.h>"),
        ("gpu_worker/a.cc", '"client/session.h"'),
        ("gpu_worker/nccl_collective.cc", "<nccl.h>"),
        ("gpu_worker/run/nccl_run.cc", '"gpu_worker/cuda/stream.h"'),
        ("gpu_worker/worker_main.cc", '"server/service.h"'),
        ("client/cli/ballast_main.cc", '"absl/flags/flag.h"'),
        ("cpu_optimizer_service/a.cc", '"cpu_optimizer_service/common/layout.h"'),
        ("cpu_optimizer_service/a.cc", '"hwy/highway.h"'),
        ("cpu_optimizer_service/a.cc", '"absl/status/status.h"'),
        ("tests/integration/a_test.cc", '"server/service.h"'),
        ("cpu_optimizer_service/job/a.cc", '"cpu_optimizer_service/state/chunk_store.h"'),
        ("cpu_optimizer_service/engine.h", '"cpu_optimizer_service/job/job.h"'),
        ("client/session.cc", '"client/session/session_impl.h"'),
        ("client/session/a.h", '"client/session.h"'),
        ("gpu_worker/cuda/kernels/a.cu", '"gpu_worker/cuda/launch.cuh"'),
        ("gpu_worker/run/a.h", '"gpu_worker/training/trainer.h"'),
    )
    FORBIDDEN = (
        ("server/a.cc", '"client/session.h"'),
        ("server/a.cc", '"gpu_worker/training/model.h"'),
        ("client/a.cc", '"server/service.h"'),
        ("client/a.cc", '"gpu_worker/training/model.h"'),
        ("client/a.cc", '"cpu_optimizer_service/job/job.h"'),
        ("client/a.cc", "<cuda_runtime.h>"),
        ("gpu_worker/a.cc", '"server/service.h"'),
        ("gpu_worker/a.cc", '"cpu_optimizer_service/kernels/kernels.h"'),
        ("proto/a.cc", '"server/service.h"'),
        ("proto/a.cc", '"client/session.h"'),
        ("proto/a.cc", '"cpu_optimizer_service/job/job.h"'),
        ("cpu_optimizer_service/a.cc", '"proto/frame.h"'),
        ("cpu_optimizer_service/a.cc", '"ballast/v1/ballast.pb.h"'),
        ("cpu_optimizer_service/a.cc", "<grpcpp/grpcpp.h>"),
        ("cpu_optimizer_service/a.cc", "<google/protobuf/message.h>"),
        ("cpu_optimizer_service/a.cc", '"absl/flags/flag.h"'),
        ("cpu_optimizer_service/a_main.cc", "<grpcpp/grpcpp.h>"),
        ("cpu_optimizer_service/a.cc", "<cuda.h>"),
        ("cpu_optimizer_service/common/a.h", '"cpu_optimizer_service/job/job.h"'),
        ("server/a.cc", "<nccl.h>"),
        ("server/a.cc", '"service.h"'),
        ("server/a.cc", '"../client/session.h"'),
        ("cpu_optimizer_service/state/a.h", '"cpu_optimizer_service/job/job.h"'),
        ("cpu_optimizer_service/job/a.h", '"cpu_optimizer_service/engine.h"'),
        ("client/session.h", '"client/session/session_impl.h"'),
        ("client/transport/a.cc", '"client/session/log.h"'),
        ("server/train/a.cc", '"server/jobs/job_message.h"'),
        ("gpu_worker/cuda/a.h", '"gpu_worker/cuda/kernels/adam.h"'),
        ("gpu_worker/base/a.h", '"gpu_worker/attic/a.h"'),
    )

    def findings_for(self, file: str, target: str) -> list[str]:
        self.write(file, f"// A file.\n#include {target}\n")
        findings = wrong_includes(self.root)
        (self.root / file).unlink()
        return findings

    def test_pass_where_they_point_the_right_way(self):
        for file, target in self.ALLOWED:
            with self.subTest(f"{file} {target}"):
                self.assertEqual(self.findings_for(file, target), [])

    def test_fail_where_they_point_the_wrong_way(self):
        for file, target in self.FORBIDDEN:
            with self.subTest(f"{file} {target}"):
                findings = self.findings_for(file, target)
                self.assertEqual(len(findings), 1)
                self.assertTrue(findings[0].startswith(f"{file}:2: "), findings[0])


class Memory(Tree):
    FATAL = ("absl::flat_hash_map<int, int> a;", "absl::node_hash_set<int> a;", "absl::StrFormat(a);",
             '#include "absl/container/flat_hash_set.h"', '#include "absl/strings/str_format.h"',
             "std::filesystem::directory_iterator a;", "std::filesystem::remove_all(a);")

    def test_pass_on_what_lets_the_call_end_and_outside_the_service(self):
        self.write("server/a.cc", "std::unordered_map<int, int> a;  // Not absl::flat_hash_map.\n")
        self.write("cpu_optimizer_service/self_benchmark.cc", "absl::StrFormat(a);\n")
        self.write("client/a.cc", "\n".join(self.FATAL))
        self.assertEqual(fatal_without_memory(self.root), [])

    def test_fail_on_each_that_ends_the_process(self):
        for line in self.FATAL:
            for file in ("server/train/a.h", "cpu_optimizer_service/common/a.cc"):
                with self.subTest(f"{file} {line}"):
                    self.write(file, f"// A file.\n{line}\n")
                    self.assertRegex(fatal_without_memory(self.root)[0], f"^{file}:2: .* ends the process")
                    (self.root / file).unlink()


class TopLevel(Tree):
    def setUp(self):
        super().setUp()
        for name in REQUIRED:
            self.write(name if "." in name or name == "LICENSE" else f"{name}/README.md")

    def test_pass_on_the_entries_that_it_names(self):
        self.write(".gitignore")
        self.write("build/release/CMakeCache.txt")
        self.assertEqual(top_level_faults(self.root), [])

    def test_fail_on_another_entry(self):
        self.write("scripts/run.sh")
        self.assertRegex(top_level_faults(self.root)[0], "^scripts: ")

    def test_fail_on_a_missing_entry(self):
        (self.root / "LICENSE").unlink()
        self.assertRegex(top_level_faults(self.root)[0], "^LICENSE: ")


class Folders(Tree):
    def fill(self, folder: str, count: int, ending: str = ".h") -> None:
        for i in range(count):
            self.write(f"{folder}/file_{i}{ending}")

    def test_pass_at_the_limit_whatever_else_describes_the_folder(self):
        self.fill("server", MOST_FILES)
        self.fill("server/deep", MOST_SOURCES_WITHOUT_README)
        self.fill("tests/server", MOST_FILES_IN_TESTS)
        self.write("tests/server/README.md")
        self.write("server/README.md")
        self.write("server/CMakeLists.txt")
        self.assertEqual(folder_faults(self.root), [])

    def test_fail_on_one_file_more(self):
        self.fill("server", MOST_FILES + 1)
        self.write("server/README.md")
        self.assertRegex(folder_faults(self.root)[0], f"^server: holds {MOST_FILES + 1} files")
        self.fill("tests/server", MOST_FILES_IN_TESTS + 1, ".txt")
        self.assertRegex(folder_faults(self.root)[1], "^tests/server: holds ")

    def test_fail_on_many_sources_without_a_readme(self):
        self.fill("client/cli", MOST_SOURCES_WITHOUT_README + 1)
        self.assertRegex(folder_faults(self.root)[0], "^client/cli: .* no README.md")
        self.write("client/README.md")  # Its parent's is not enough.
        self.assertEqual(len(folder_faults(self.root)), 1)
        self.write("client/cli/README.md")
        self.assertEqual(folder_faults(self.root), [])
        self.fill("tests/client/cli", MOST_SOURCES_WITHOUT_README + 1, "_test.cc")
        self.write("tests/README.md")
        self.assertRegex(folder_faults(self.root)[0], "^tests/client/cli: .* no README.md")
        self.write("tests/client/cli/README.md")
        self.assertEqual(folder_faults(self.root), [])


class BuildPaths(Tree):
    def test_pass_without_the_path_and_fail_with_it_or_without_the_binaries(self):
        source = pathlib.Path("/home/somebody/ballast")
        self.write("bin/ballast", "server/main.cc")
        self.assertEqual(check_build_paths(source, self.root / "bin"), 1)
        self.write("bin/ballastd", "server/main.cc")
        self.assertEqual(check_build_paths(source, self.root / "bin"), 0)
        self.write("bin/ballastd", f"Flags from {source}/server/main.cc")
        self.assertEqual(binaries_with(str(source).encode(), self.root / "bin"), ["ballastd"])
        self.assertEqual(check_build_paths(source, self.root / "bin"), 1)


if __name__ == "__main__":
    unittest.main()
