#!/usr/bin/env python3
"""run.sh with stand-ins for the programs: what it finds out, writes and says."""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent

RATE = """
if os.environ.get("NO_GPU"):
    print("ballast-gpu-rate: there is no GPU", file=sys.stderr)
    sys.exit(77)
print(json.dumps(dict(gpu="GPU 0 (stand-in)", compute_capability=90, memory_bytes=1 << 30,
                      bf16_matrix_flops_per_second=1e12)))
"""

GPU_TESTS = """
if os.environ.get("HANG"):
    time.sleep(60)
report = next(w.split(":", 1)[1] for w in sys.argv if w.startswith("--gtest_output=json:"))
skipped = dict(classname="A", name="Skipped", result="SKIPPED")
done = dict(classname="A", name="Done", result="COMPLETED")
failed = dict(done, name="Wrong", failures=[dict(failure="1 is not 2")])
cases = dict(skip=[skipped], fail=[done, failed]).get(os.environ.get("TESTS"), [done, skipped])
with open(report, "w") as file:
    json.dump(dict(testsuites=[dict(testsuite=cases)]), file)
sys.exit(1 if failed in cases else 0)
"""

SERVICE = """
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if "=" in word)
pathlib.Path(os.environ["PIDS"]).open("a").write(f"{os.getpid()}\\n")
pathlib.Path(flags["port-file"]).write_text("127.0.0.1:1\\n")
time.sleep(60)
"""

WORKER = """
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
assert flags["device"] == "cuda" and pathlib.Path(flags["text"]).exists()
local = flags.get("optimizer") == "local"
assert local != ("service" in flags)
two = os.environ.get("WORLD_SIZE") == "2"
assert not two or flags["collective"] == "gloo"
if os.environ.get("RANK", "0") != "0":
    sys.exit(0)
if os.environ.get("WORKER_FAILS"):
    sys.exit("ballast-worker: GPU 0: no 9.00 GiB for activations")
out = pathlib.Path(flags["out"])
out.mkdir()
wrong = "update" in flags and os.environ.get("DIVERGE") == flags["update"]
loss = 5.0 * (1.5 if two and os.environ.get("RANKS_DIFFER") else 1)
rate = 1000 if local else 800
steps = int(flags["steps"])
(out / "weights.bin").write_bytes(b"")
(out / "worker.json").write_text(json.dumps(dict(
    weights_sha256="other" if wrong else "same", steps=steps, parameters=10, transport="memory")))
(out / "losses.csv").write_text("\\n".join(
    ["step,loss,norm,clip,tokens_per_second,seconds,compute,reduce,send,update,receive"]
    + [f"{s + 1},{loss},1,1,{rate if s > 1 else 1},2,1,0.1,0.2,0.3,0.4" for s in range(steps)]) + "\\n")
"""


class Run(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        self.out = self.dir / "out"
        (self.dir / "bin").mkdir()
        for name, text in (("ballast-gpu-rate", RATE), ("gpu_tests", GPU_TESTS), ("ballastd", SERVICE),
                           ("ballast-worker", WORKER)):
            program = self.dir / "bin" / name
            program.write_text("#!/usr/bin/env python3\nimport json, os, pathlib, sys, time\n" + text)
            program.chmod(0o755)
        (self.dir / "pids").touch()

    def prove(self, *flags, **environment):
        return subprocess.run(
            [HERE / "run.sh", "--bin", self.dir / "bin", "--out", self.out, *flags], text=True, timeout=60,
            capture_output=True, check=False,
            env=os.environ | {"PIDS": str(self.dir / "pids")} | environment)

    def result(self) -> dict:
        return json.loads((self.out / "gpu.json").read_text())

    def failed(self) -> list[str]:
        return [check["name"] for check in self.result()["checks"] if check["passed"] is False]

    def test_says_in_one_line_that_there_is_no_gpu(self):
        done = self.prove(NO_GPU="1")
        self.assertEqual(done.returncode, 77)
        self.assertEqual(done.stderr, "run.sh: nothing was tested: there is no GPU\n")
        self.assertFalse((self.out / "gpu.json").exists())

    def test_writes_what_it_measured_as_shares_of_local(self):
        done = self.prove()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        result = self.result()
        self.assertTrue(result["passed"])
        self.assertEqual(self.failed(), [])
        lines = [line for line in result["benchmark"] if line["model"] == "gpt2-124M"]
        self.assertEqual([line["way"] for line in lines][0], "local")
        self.assertEqual(len(lines), 5)
        for line in lines[1:]:  # The first steps, which were slow, are not among those measured.
            self.assertAlmostEqual(line["of_local"], 0.8)
            self.assertAlmostEqual(line["exposed_seconds"], 1.0)
            self.assertAlmostEqual(line["exposed_of_step"], 0.5)
        # 124M: 2 * 3 * (85.0M + 38.6M) and attention's 56.7M.
        self.assertAlmostEqual(lines[0]["of_matrix_rate"], 1000 * 798e6 / 1e12, delta=0.01)

    def test_leaves_no_service_behind(self):
        self.prove()
        pids = (self.dir / "pids").read_text().split()
        self.assertGreater(len(pids), 4)
        for pid in pids:
            self.assertFalse(pathlib.Path("/proc", pid).exists(), f"process {pid} was left behind")

    def test_names_the_way_whose_weights_differ(self):
        self.assertEqual(self.prove(DIVERGE="wait").returncode, 1)
        self.assertIn("service equals local", self.failed())
        detail = {check["name"]: check["detail"] for check in self.result()["checks"]}
        self.assertIn("wait, TCP", detail["service equals local"])
        self.assertNotIn("speculate", detail["service equals local"])

    def test_fails_where_two_ranks_learn_something_else(self):
        self.assertEqual(self.prove(RANKS_DIFFER="1").returncode, 1)
        self.assertEqual(self.failed(), ["two ranks on one GPU"])

    def test_fails_with_the_tests_and_where_all_were_skipped(self):
        self.assertEqual(self.prove(TESTS="fail").returncode, 1)
        self.assertEqual(self.failed(), ["tests on the GPU"])
        self.assertEqual(self.prove(TESTS="skip").returncode, 1)
        self.assertEqual(self.failed(), ["tests on the GPU"])

    def test_passes_on_the_last_words_of_a_worker(self):
        self.assertEqual(self.prove(WORKER_FAILS="1").returncode, 1)
        self.assertIn("no 9.00 GiB for activations", (self.out / "gpu.json").read_text())

    def test_ends_what_hangs(self):
        self.assertEqual(self.prove("--seconds=2", HANG="1").returncode, 1)
        self.assertIn("tests on the GPU", self.failed())
        self.assertIn("did not end within", (self.out / "gpu.json").read_text())

    def test_names_the_program_that_is_not_there(self):
        (self.dir / "bin/ballast-gpu-rate").unlink()
        done = self.prove()
        self.assertEqual(done.returncode, 1)
        self.assertIn("there is no ballast-gpu-rate", done.stderr)


if __name__ == "__main__":
    unittest.main()
