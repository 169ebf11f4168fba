#!/usr/bin/env python3
"""run.sh with stand-ins for the programs: its findings, files and output."""

import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import programs  # noqa: E402
from processes import await_, state_of  # noqa: E402
from prove import TESTS, Proof  # noqa: E402

PATIENCE = 400  # Seconds; a run that is not ended by its own limit hangs.

RATE = """
if os.environ.get("NO_GPU"):
    print("ballast-gpu-rate: there is no GPU", file=sys.stderr)
    sys.exit(77)
if os.environ.get("NO_RATE"):
    sys.exit("ballast-gpu-rate: libcublasLt.so.13 cannot be loaded")
print(json.dumps(dict(gpu="GPU 0 (stand-in)", uuid="GPU-1", compute_capability=90, memory_bytes=1 << 30,
                      bf16_matrix_flops_per_second=1e12)))
"""

GPU_TESTS = """
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
filter = flags["gtest_filter"]
if os.environ.get("HANG"):
    time.sleep(600)
if os.environ.get("CRASH") == filter:
    os.abort()
report = flags["gtest_output"].removeprefix("json:")
skipped = dict(classname="A", name="Skipped", result="SKIPPED")
done = dict(classname="A", name="Done", result="COMPLETED")
failed = dict(done, name="Wrong", failures=[dict(failure="a.cc:1\\n1 is not 2")])
kind = os.environ.get("TESTS")
if kind == "skip under a sanitizer":
    kind = "skip" if "SANITIZED" in os.environ else None
cases = dict(skip=[skipped, done], fail=[done, failed], none=[]).get(kind, [done])
if skipped in cases:
    print("a.cc:2: Skipped\\nthere is no NCCL")
with open(report, "w") as file:
    json.dump(dict(testsuites=[dict(testsuite=cases)]), file)
sys.exit(1 if failed in cases else 0)
"""

SANITIZER = """
import subprocess
tool = sys.argv[sys.argv.index("--tool") + 1]
program = next(i for i, word in enumerate(sys.argv) if word.endswith("gpu_tests"))
if os.environ.get("SANITIZER") == "unsupported":
    sys.exit("========= Error: Device not supported")
code = subprocess.call(sys.argv[program:], env=os.environ | {"SANITIZED": "1"})
errors = 3 if os.environ.get("SANITIZER") == tool else 0
if os.environ.get("SANITIZER") != "silent":
    print(f"========= ERROR SUMMARY: {errors} errors")
sys.exit(1 if errors else code)
"""

SERVICE = """
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if "=" in word)
pathlib.Path(os.environ["PIDS"]).open("a").write(f"{os.getpid()}\\n")
assert flags.get("memory-limit") == os.environ.get("MEMORY_LIMIT")
pathlib.Path(flags["port-file"]).write_text("127.0.0.1:1\\n")
time.sleep(600)
"""

WORKER = """
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if "=" in word)
assert "--nowrite-weights" in sys.argv
pathlib.Path(os.environ["PIDS"]).open("a").write(f"{os.getpid()}\\n")
assert flags["device"] == "cuda" and pathlib.Path(flags["text"]).exists()
local = flags.get("optimizer") == "local"
assert local != ("service" in flags)
two = os.environ.get("WORLD_SIZE") == "2"
assert not two or flags["collective"] == "gloo"
if os.environ.get("RANK", "0") != "0":
    sys.exit(0)
fails = os.environ.get("WORKER_FAILS")
if fails and fails in flags["out"]:
    sys.exit("ballast-worker: GPU 0: no 9.00 GiB for activations")
out = pathlib.Path(flags["out"])
out.mkdir()
wrong = "update" in flags and os.environ.get("DIVERGE") == flags["update"]
loss = 5.0 * (1.5 if two and os.environ.get("RANKS_DIFFER") else 1)
rate = 1000 if local else 800
steps = int(flags["steps"])
(out / "begun").write_bytes(b"")
if flags["out"].endswith(os.environ.get("ONLY_OF", "")):
    time.sleep(float(os.environ.get("TRAINING_SECONDS", 0)))
clipped = float(flags["max-norm"]) < 4 and not os.environ.get("NEVER_CLIPS")
speculates = flags.get("update") == "speculate" and not os.environ.get("NEVER_SPECULATES")
facts = dict(weights_sha256="other" if wrong else "same", steps=steps, parameters=10)
if not local:
    shared = "shared-memory" not in flags and not os.environ.get("NEVER_SHARES")
    facts |= dict(transport="shared memory" if shared else "the connection",
                  speculated_chunks=5 * speculates,
                  redone_chunks=5 * bool(speculates and (clipped or os.environ.get("GUESSES_WRONG"))))
facts.pop(os.environ.get("SILENT_ABOUT"), None)
(out / "worker.json").write_text(json.dumps(facts))
if "trace" in flags and not os.environ.get("NO_TRACE"):
    pathlib.Path(flags["trace"]).write_text("[]")
clip = 0.5 if clipped or os.environ.get("CLIPS") else 1
(out / "losses.csv").write_text("\\n".join(
    ["step,loss,norm,clip,tokens_per_second,seconds,compute,reduce,send,update,receive"]
    + [f"{s + 1},{loss},1,{clip},{rate if s > 1 else 1},2,1,0.1,0.2,0.3,0.4" for s in range(steps)]) + "\\n")
"""


def make_stand_ins(folder):
    (folder / "bin").mkdir()
    for name, text in (("ballast-gpu-rate", RATE), ("gpu_tests", GPU_TESTS), ("ballastd", SERVICE),
                       ("ballast-worker", WORKER), ("compute-sanitizer", SANITIZER)):
        program = folder / "bin" / name
        program.write_text(f"#!{sys.executable} -SE\nimport json, os, pathlib, sys, time\n" + text)
        program.chmod(0o755)
    (folder / "pids").touch()


def start(folder, out, *flags, **environment):
    paths = {"PIDS": str(folder / "pids"), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    # Ended by what it tests, and read by communicate().
    return subprocess.Popen([HERE / "run.sh", "--bin", folder / "bin", "--out", out, *flags], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | paths | environment)


class Run(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """Begins what waits for the end of its time, beside all other tests."""
        cls.timed = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        make_stand_ins(cls.timed)
        limit = "--seconds=30"
        cls.runs = {name: start(cls.timed, cls.timed / name, *flags, **environment) for name, flags, environment in (
            ("hangs", [limit], dict(HANG="1")),
            ("no rate", [limit], dict(NO_RATE="1", HANG="1")),
            # One way fails, and the next is not done when the time is over.
            ("one way", [limit, "--only=equals"], dict(TRAINING_SECONDS="600", ONLY_OF="-wait-shared-memory",
                                                       WORKER_FAILS="small-speculate-shared")))}
        for run in cls.runs.values():
            cls.addClassCleanup(run.communicate, timeout=PATIENCE)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        self.out = self.dir / "out"
        make_stand_ins(self.dir)

    def start(self, *flags, **environment):
        return start(self.dir, self.out, *flags, **environment)

    def prove(self, *flags, **environment):
        process = self.start(*flags, **environment)
        output, errors = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(flags, process.returncode, output, errors)

    def result(self) -> dict:
        return json.loads((self.out / "gpu.json").read_text())

    def outcomes(self) -> dict[str, str]:
        return {check["name"]: check["outcome"] for check in self.result()["checks"]}

    def having(self, outcome: str) -> list[str]:
        return [name for name, found in self.outcomes().items() if found == outcome]

    def detail(self, name: str) -> str:
        return {check["name"]: check["detail"] for check in self.result()["checks"]}[name]

    def expect_nothing_left(self, at_least: int):
        pids = (self.dir / "pids").read_text().split()
        self.assertGreaterEqual(len(pids), at_least)
        for pid in pids:
            self.assertIn(state_of(pid), ("Z", "X", ""), f"process {pid} was left behind")

    def test_says_in_one_line_that_there_is_no_gpu(self):
        done = self.prove(NO_GPU="1")
        self.assertEqual(done.returncode, 77)
        self.assertEqual(done.stderr, "run.sh: nothing was tested: there is no GPU\n")
        self.assertFalse((self.out / "gpu.json").exists())

    def test_what_matters_most_comes_first(self):
        done = self.prove()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        result = self.result()
        self.assertTrue(result["passed"] and result["complete"])
        names = [check["name"] for check in result["checks"]]
        self.assertEqual(names[:9], [
            "matrix rate", "kernels", "matrix products", "model gradients", "device and collectives",
            "NCCL", "service equals local", "service equals local when clipped", "two ranks on one GPU"])
        self.assertEqual(names[9:13], [
            "benchmark gpt2-124M, local", "benchmark gpt2-124M, speculate, shared memory",
            "benchmark gpt2-1.5B, local", "benchmark gpt2-1.5B, speculate, shared memory"])
        self.assertEqual(names[-4:], ["timeline, speculate, shared memory", "timeline, wait, shared memory",
                                      "memcheck", "racecheck"])
        with tarfile.open(self.out / "logs.tar.gz") as logs:
            self.assertIn("logs/gpt2-1.5B-wait-TCP/worker.json", logs.getnames())
        beside = {path.name for path in self.out.iterdir() if path.is_file()}
        self.assertEqual(beside, {"gpu.json", "logs.tar.gz", "trace-speculate-shared-memory.json.gz",
                                  "trace-wait-shared-memory.json.gz"})
        self.assertGreaterEqual(result["host"]["cores"], 1)
        self.expect_nothing_left(5)  # No service, and no worker.

    def test_writes_what_it_measured_as_shares_of_local(self):
        self.assertEqual(self.prove("--only=benchmark").returncode, 0)
        lines = [line for line in self.result()["benchmark"] if line["model"] == "gpt2-124M"]
        self.assertEqual([line["way"] for line in lines][0], "local")
        self.assertEqual(len(lines), 5)
        for line in lines[1:]:  # The first steps, which were slow, are not among those measured.
            self.assertAlmostEqual(line["of_local"], 0.8)
            self.assertAlmostEqual(line["exposed_seconds"], 1.0)
            self.assertAlmostEqual(line["exposed_of_step"], 0.5)
        # 124M: 2 * 3 * (85.0M + 38.6M) and attention's 56.7M.
        self.assertAlmostEqual(lines[0]["of_matrix_rate"], 1000 * 798e6 / 1e12, delta=0.01)

    def test_memory_saved_is_told_beside_the_local_run_and_an_ordinary_trainer(self):
        proof = Proof(None, self.dir / "gpu.json", 0)
        row = dict(tokens_per_second=1, reduce=0, send=0, update=0, receive=0, seconds=1, compute=1)
        result = dict(rows=[row] * 3, parameters=100, weights_sha256="")
        proof.benchmark.append(proof.line("gpt2-124M", "local", result, 3000))
        line = proof.line("gpt2-124M", "wait, TCP", result, 1800)
        self.assertEqual(line["gpu_memory_saved_per_parameter"], 12)
        # The local run holds 20 bytes of state, an ordinary trainer 18.
        self.assertEqual(line["saved_of_ordinary_per_parameter"], 10)
        self.assertEqual(line["ordinary_bytes_per_parameter"], 18)

    def test_measures_without_a_rate_to_compare_with(self):
        self.assertEqual(self.prove("--only=local", NO_RATE="1").returncode, 1)
        self.assertEqual(self.having("failed"), ["matrix rate"])
        self.assertIn("libcublasLt.so.13", self.detail("matrix rate"))
        lines = self.result()["benchmark"]
        self.assertEqual(len(lines), 2)
        self.assertIsNone(lines[0]["of_matrix_rate"])

    def test_one_check_can_be_run_alone(self):
        self.assertEqual(self.prove("--only=wait, TCP").returncode, 0)
        self.assertEqual(list(self.outcomes()), ["matrix rate", "benchmark gpt2-124M, wait, TCP",
                                                 "benchmark gpt2-1.5B, wait, TCP"])
        self.assertIsNone(self.result()["benchmark"][0]["of_local"])
        done = self.prove("--only=memchek")
        self.assertEqual(done.returncode, 1)
        self.assertIn("no check is named memchek", done.stderr)

    def test_the_service_gets_the_memory_that_it_may_take(self):
        done = self.prove("--only=equals", "--memory-limit=7GiB", MEMORY_LIMIT="7GiB")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    # ------------------------------------------------------------ what fails

    def test_names_the_way_whose_weights_differ(self):
        self.assertEqual(self.prove(DIVERGE="wait").returncode, 1)
        self.assertEqual(self.having("failed"), [
            "service equals local", "service equals local when clipped",
            "benchmark gpt2-124M, wait, shared memory", "benchmark gpt2-124M, wait, TCP",
            "benchmark gpt2-1.5B, wait, shared memory", "benchmark gpt2-1.5B, wait, TCP"])
        self.assertIn("wait, TCP", self.detail("service equals local"))
        self.assertNotIn("speculate", self.detail("service equals local"))

    def expect_mislabelled(self, only: str, fault: str, ways: list[str], **environment):
        """Every run of these ways is refused with this fault, and none of the others."""
        self.assertEqual(self.prove(f"--only={only}", **environment).returncode, 1)
        failed = self.having("failed")
        self.assertEqual(failed, [name for name in self.outcomes() if any(way in name for way in ways)])
        self.assertTrue(failed)
        for name in failed:
            self.assertIn(fault, self.detail(name))
        for line in self.result()["benchmark"]:  # What a run was not is not measured as that.
            self.assertNotIn(line["way"], ways)

    def test_a_run_that_did_not_speculate_is_none_that_speculates(self):
        self.expect_mislabelled("gpt2-124M", "nothing was speculated", ["speculate, shared memory", "speculate, TCP"],
                                NEVER_SPECULATES="1")
        self.expect_mislabelled("gpt2-124M", "5 chunks were updated again",
                                ["speculate, shared memory", "speculate, TCP"], GUESSES_WRONG="1")

    def test_a_run_that_fell_back_to_the_connection_is_none_over_shared_memory(self):
        self.expect_mislabelled("gpt2-124M", "it went through the connection",
                                ["speculate, shared memory", "wait, shared memory"], NEVER_SHARES="1")

    def test_a_run_that_was_clipped_measures_nothing(self):
        self.expect_mislabelled("gpt2-124M", "steps were clipped",
                                ["local", "speculate", "wait"], CLIPS="1")

    def test_a_run_that_was_to_be_clipped_and_was_not_proves_nothing(self):
        self.expect_mislabelled("equals", "0 of 6 steps were clipped", ["when clipped"], NEVER_CLIPS="1")

    def test_a_result_that_is_not_told_is_not_taken_for_right(self):
        for key in ("transport", "speculated_chunks", "redone_chunks"):
            self.expect_mislabelled("TCP", f"worker.json does not say {key}", ["TCP"], SILENT_ABOUT=key)

    def test_a_timeline_that_was_not_written_fails(self):
        self.expect_mislabelled("timeline", "wrote no timeline", ["timeline"], NO_TRACE="1")

    def test_fails_where_two_ranks_learn_something_else(self):
        self.assertEqual(self.prove("--only=ranks", RANKS_DIFFER="1").returncode, 1)
        self.assertEqual(self.having("failed"), ["two ranks on one GPU"])

    def test_fails_with_the_tests_and_says_how(self):
        self.assertEqual(self.prove("--only=kernels", TESTS="fail").returncode, 1)
        self.assertEqual(self.detail("kernels"), "1 of 2 failed: A.Wrong; the first: a.cc:1 1 is not 2")

    def test_tests_that_were_skipped_are_no_proof(self):
        self.assertEqual(self.prove("--only=kernels", TESTS="skip").returncode, 1)
        self.assertEqual(self.detail("kernels"),
                         "not tested: 1 of 2 tests skipped: there is no NCCL")
        self.assertEqual(self.prove("--only=kernels", TESTS="none").returncode, 1)
        self.assertEqual(self.detail("kernels"), "not tested: 0 of 0 tests skipped")
        self.assertEqual(self.prove("--only=check", TESTS="skip under a sanitizer").returncode, 1)
        self.assertEqual(self.having("failed"), ["memcheck", "racecheck"])
        self.assertIn("not tested", self.detail("memcheck"))

    def test_a_crash_takes_no_other_tests_with_it(self):
        self.assertEqual(self.prove(CRASH="*CublasLtMatmul*").returncode, 1)
        self.assertEqual(self.having("failed"), ["matrix products"])
        self.assertIn("without a report", self.detail("matrix products"))

    def test_a_sanitizer_that_finds_something_or_says_nothing_fails(self):
        self.assertEqual(self.prove("--only=check", SANITIZER="racecheck").returncode, 1)
        self.assertEqual(self.having("failed"), ["racecheck"])
        self.assertIn("3 errors", self.detail("racecheck"))
        self.assertEqual(self.prove("--only=check", SANITIZER="silent").returncode, 1)
        self.assertEqual(self.having("failed"), ["memcheck", "racecheck"])
        self.assertIn("without a summary", self.detail("memcheck"))

    def test_one_way_that_fails_leaves_the_others(self):
        self.assertEqual(self.prove(WORKER_FAILS="wait-TCP").returncode, 1)
        self.assertEqual(self.having("failed"), [
            "service equals local", "service equals local when clipped", "benchmark gpt2-124M, wait, TCP",
            "benchmark gpt2-1.5B, wait, TCP"])
        self.assertIn("no 9.00 GiB for activations", self.detail("benchmark gpt2-124M, wait, TCP"))

    def test_ends_what_hangs_and_says_so(self):
        program = programs.Programs(self.dir / "bin", self.dir)
        with self.assertRaisesRegex(programs.Failed, "did not end within 1 s"):
            program.run("hangs", ["sleep", "60"], 1)

    def test_names_the_program_that_is_not_there(self):
        (self.dir / "bin/ballast-gpu-rate").unlink()
        done = self.prove()
        self.assertEqual(done.returncode, 1)
        self.assertIn("there is no ballast-gpu-rate", done.stderr)

    # ------------------------------------------------------------ what is not run

    def test_removes_nothing_of_a_folder_that_is_somebodys(self):
        (self.out / "logs").mkdir(parents=True)
        (self.out / "logs" / "mine").touch()
        (self.out / "paper.tex").touch()
        done = self.prove()
        self.assertEqual(done.returncode, 1)
        self.assertIn("has other files and no results of an earlier run; choose another --out", done.stderr)
        self.assertTrue((self.out / "logs" / "mine").exists())

    def test_what_the_time_is_over_for_has_not_failed(self):
        done = self.prove("--seconds=200", "--least-seconds-of-the-largest=1000")
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        result = self.result()
        self.assertTrue(result["passed"])
        self.assertFalse(result["complete"])
        self.assertEqual(self.having("failed"), [])
        self.assertEqual(self.outcomes()["two ranks on one GPU"], "passed")
        # What is planned for the first of a model is not there.
        self.assertEqual(self.outcomes()["benchmark gpt2-1.5B, local"], "out of time")
        self.assertIn("not begun", self.detail("benchmark gpt2-1.5B, local"))
        self.assertIn("not all was run: benchmark", done.stdout)

    def test_what_the_time_ends_has_not_failed_and_a_failure_is_told_nevertheless(self):
        for run in self.runs.values():
            run.wait(PATIENCE)
        self.assertEqual({name: run.returncode for name, run in self.runs.items()}, {"hangs": 2, "no rate": 1, "one way": 1})
        self.out = self.timed / "hangs"
        self.assertEqual(self.having("failed"), [])
        self.assertEqual(self.outcomes()["kernels"], "out of time")
        self.assertIn("was not done when the time was over", self.detail("kernels"))
        self.assertEqual(len(self.outcomes()), 23)
        for name in ("service equals local", "benchmark gpt2-124M, local", "memcheck"):
            self.assertEqual(self.outcomes()[name], "out of time")
        self.out = self.timed / "no rate"
        self.assertEqual(self.having("failed"), ["matrix rate"])
        self.out = self.timed / "one way"
        self.assertIn("no 9.00 GiB", self.detail("service equals local"))

    def test_what_the_machine_lacks_is_left_out_and_told(self):
        self.assertEqual(self.prove("--only=check", SANITIZER="unsupported").returncode, 2)
        self.assertEqual(self.having("left out"), ["memcheck", "racecheck"])
        self.assertTrue(self.result()["passed"])
        self.assertFalse(self.result()["complete"])

    def test_ended_from_outside_leaves_what_there_is_and_nothing_running(self):
        process = self.start(TRAINING_SECONDS="60")
        await_("a training", (self.out / "logs/small-local/begun").exists, process)
        process.terminate()
        process.communicate(timeout=PATIENCE)
        self.assertEqual(self.having("passed"), ["matrix rate", *TESTS])
        self.expect_nothing_left(1)


if __name__ == "__main__":
    unittest.main()
