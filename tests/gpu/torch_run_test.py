#!/usr/bin/env python3
"""run.sh --torch: its findings with a stand-in for the trainings; and, where there is PyTorch, on the CPU."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from prove_torch import ways_of  # noqa: E402

TRAINER = """
import json, os, sys, time
flags = dict((word.removeprefix("--") + "=").split("=")[:2] for word in sys.argv[1:])
fault = os.environ.get("FAULT", "")
if "--capabilities" in sys.argv:
    if fault == "no torch":
        sys.exit("ModuleNotFoundError: No module named 'torch'")
    facts = dict(torch="2.11.0", python="3.12.1", cuda=fault != "no GPU", gpu="stand-in", uuid="GPU-1",
                 transformers="5", overlap="HOOKS" in os.environ)
    facts |= dict(no_ballast="OSError: libballast.so.1") if fault == "no ballast" else dict(ballast="/b")
    print("a warning")
    print(json.dumps(facts))
    sys.exit()
way, model, steps = flags["way"], flags["model"], int(flags["steps"])
fsdp2 = way != "ballast" or "fsdp2" in flags
here = os.environ.get("WHERE", "ballast") == way + (", FSDP2" if way == "ballast" and fsdp2 else "")
if fault == "fails" and here:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory")
if fault == "hangs" and here:
    time.sleep(600)
seconds = [5.0, 5.0] + [dict(gpu=2.0, ballast=2.5, offload=4.0)[way]] * (steps - 2)
facts = dict(way=way, model=model, made_by="transformers", parameters=10, tokens=100,
             losses=[9 - 0.1 * i for i in range(steps)], seconds=seconds, passes=[1.5] * steps,
             clips=[0.3] * steps, gpu_memory_bytes=dict(gpu=300, ballast=160, offload=120)[way],
             overlap=flags.get("overlap"), fsdp2=fsdp2)
if here:
    if fault == "other loss":
        facts["losses"][2] *= 1.02
    if fault == "not a number":
        facts["losses"][1] = float("nan")
    if fault == "rounding":
        facts["losses"] = [loss * 1.001 for loss in facts["losses"]]
    if fault == "not clipped":
        facts["clips"] = [1.0] * steps
    if fault == "another way":
        facts["way"] = "gpu" if way != "gpu" else "offload"
    if fault == "another model":
        facts |= dict(made_by="torch")
    if fault == "sharded otherwise":
        facts["fsdp2"] = not fsdp2
    if fault == "hooks":
        facts["overlap"] = "off" if flags.get("overlap") == "on" else "on"
    if fault == "silent":
        facts.pop(os.environ["KEY"])
print(json.dumps(facts))
"""
SANITIZER = """#!/bin/sh
case "$SANITIZER" in
  finds) echo "========= ERROR SUMMARY: 2 errors"; exit 1 ;;
  silent) exit 0 ;;
  unsupported) echo "========= Error: Device not supported"; exit 1 ;;
esac
echo "========= ERROR SUMMARY: 0 errors"
"""
NAMES = ["AdamW on the GPU", "ballast", "CPU offload", "ballast with FSDP2"]


class WithStandIns(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        self.out = self.dir / "out"
        (self.dir / "bin").mkdir()
        for name, text in (("compute-sanitizer", SANITIZER), ("ballastd", "#!/bin/sh\n")):
            (self.dir / "bin" / name).write_text(text)
            (self.dir / "bin" / name).chmod(0o755)
        (self.dir / "trainer.py").write_text(TRAINER)

    def prove(self, *flags, trainer=None, python=sys.executable, bin_dir=None, **environment):
        path = {"PATH": f"{self.dir / 'bin'}:{os.environ['PATH']}"}
        return subprocess.run(
            [HERE / "run.sh", "--torch", "--bin", bin_dir or self.dir / "bin", "--out", self.out, "--python", python,
             "--trainer", trainer or self.dir / "trainer.py", *flags],
            text=True, capture_output=True, check=False, env=os.environ | path | environment)

    def result(self):
        return json.loads((self.out / "torch.json").read_text())

    def having(self, outcome):
        return [check["name"] for check in self.result()["checks"] if check["outcome"] == outcome]

    def detail(self, name):
        return {check["name"]: check["detail"] for check in self.result()["checks"]}[name]


class TorchRun(WithStandIns):
    def test_what_is_cheap_and_telling_comes_first(self):
        done = self.prove()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(
            self.having("passed"),
            ["package", *[f"training tiny, {way}" for way in NAMES], *[f"benchmark gpt2-124M, {way}" for way in NAMES],
             "memcheck", *[f"benchmark gpt2-1.5B, {way}" for way in NAMES]])
        self.assertEqual({path.name for path in self.out.iterdir() if path.is_file()},
                         {"torch.json", "torch-logs.tar.gz"})

    def test_measures_against_the_optimizer_on_the_gpu(self):
        self.assertEqual(self.prove("--only=124M").returncode, 0)
        gpu, ballast, offload, sharded = self.result()["benchmark"]
        self.assertEqual({key: sharded[key] for key in sharded if key != "way"},
                         {key: ballast[key] for key in ballast if key != "way"})
        self.assertEqual(ballast["tokens_per_second"], 40)
        # Beyond the 1.5 s of that run's passes; the first steps, which were slow, are not measured.
        self.assertEqual([line["exposed_seconds"] for line in (gpu, ballast, offload)], [0.5, 1.0, 2.5])
        self.assertEqual([line["saved_per_parameter"] for line in (gpu, ballast, offload)], [0, 14, 18])
        self.assertEqual(ballast["of_gpu"], 0.8)
        self.assertEqual(ballast["ordinary_bytes_per_parameter"], 18)
        self.assertEqual(self.prove("--only=124M, ballast").returncode, 0)
        self.assertIsNone(self.result()["benchmark"][0]["exposed_seconds"])

    def test_hooks_are_an_axis_only_where_there_is_a_switch(self):
        self.assertEqual(list(ways_of({})), NAMES)
        done = self.prove("--only=tiny", HOOKS="1")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual([line["hooks"] for line in self.result()["benchmark"]],
                         [None, "on", "off", None, "on", "off"])
        self.assertEqual(self.prove("--only=tiny", HOOKS="1", FAULT="hooks").returncode, 1)
        self.assertEqual(self.having("failed"),
                         ["training tiny, ballast, hooks on", "training tiny, ballast, hooks off"])
        self.assertIn("hooks were off", self.detail("training tiny, ballast, hooks on"))

    # ------------------------------------------------------------ what fails

    def expect_fault(self, fault, says, only="tiny", way="ballast", **environment):
        self.assertEqual(self.prove(f"--only={only}", FAULT=fault, **environment).returncode, 1)
        failed = self.having("failed")
        self.assertEqual(len(failed), 1, failed)
        self.assertTrue(failed[0].endswith(way))
        self.assertIn(says, self.detail(failed[0]))
        self.assertEqual(len(self.result()["benchmark"]), 3)  # What a run was not is not measured as that.

    def test_a_run_that_is_not_what_its_name_says_is_not_measured(self):
        self.expect_fault("other loss", "losses differ from AdamW on the GPU by 2.00%")
        self.expect_fault("other loss", "losses differ", way="CPU offload", WHERE="offload")
        self.expect_fault("not a number", "a loss is not finite")
        self.expect_fault("not clipped", "nothing was clipped")
        self.expect_fault("another way", "it was a run of gpu")
        self.expect_fault("sharded otherwise", "parameters were sharded by FSDP2")
        self.expect_fault("sharded otherwise", "parameters were not sharded by FSDP2", way="ballast with FSDP2",
                          WHERE="ballast, FSDP2")
        self.expect_fault("other loss", "losses differ", way="ballast with FSDP2", WHERE="ballast, FSDP2")
        self.expect_fault("another model", "the model was made by torch", only="124M")
        for key, says in (("losses", "it told losses of 0 of 4 steps"), ("clips", "it told clips"),
                          ("model", "it trained None"), ("gpu_memory_bytes", "does not tell its GPU memory")):
            self.expect_fault("silent", says, KEY=key)
        self.assertEqual(self.prove("--only=tiny", FAULT="rounding").returncode, 0)

    def test_one_way_that_fails_leaves_the_others(self):
        self.expect_fault("fails", "CUDA out of memory")
        self.assertEqual(self.prove("--only=tiny", "--seconds=25", FAULT="hangs").returncode, 2)
        self.assertEqual(self.having("out of time"),
                         [f"training tiny, {way}" for way in NAMES if way != "AdamW on the GPU"])

    def test_the_sanitizer_that_finds_something_or_says_nothing_fails(self):
        for how, says in (("finds", "2 errors"), ("silent", "without a summary")):
            self.assertEqual(self.prove("--only=memcheck", SANITIZER=how).returncode, 1)
            self.assertIn(says, self.detail("memcheck"))
        self.assertEqual(self.prove("--only=memcheck", SANITIZER="unsupported").returncode, 2)
        self.assertEqual(self.having("left out"), ["memcheck"])

    def test_a_package_that_cannot_be_used_fails_and_torchs_own_ways_are_measured(self):
        self.assertEqual(self.prove("--only=tiny", FAULT="no ballast").returncode, 1)
        self.assertEqual(self.having("failed"), ["package"])
        self.assertIn("libballast.so.1", self.detail("package"))
        self.assertEqual(self.having("left out"), ["training tiny, ballast", "training tiny, ballast with FSDP2"])
        self.assertEqual(len(self.result()["benchmark"]), 2)

    def test_says_in_one_line_that_there_is_no_gpu_or_no_pytorch(self):
        for fault, says in (("no GPU", "there is no GPU that PyTorch sees"), ("no torch", "No module named 'torch'")):
            done = self.prove(FAULT=fault)
            self.assertEqual(done.returncode, 77)
            self.assertIn(says, done.stderr)
            self.assertEqual(len(done.stderr.splitlines()), 1)


class TorchTraining(WithStandIns):
    """On the CPU, with PyTorch: registered as a test of its own."""

    def test_the_tiny_model_learns_the_same_in_every_way(self):
        done = self.prove("--models", "tiny", "--device=cpu", "--only=training", "--seconds=1000", trainer=HERE / "torch_training.py",
                          bin_dir=os.environ["BALLAST_BIN_DIR"])
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        ways = ["AdamW on the GPU", "ballast, hooks on", "ballast, hooks off", "CPU offload",
                "ballast with FSDP2, hooks on", "ballast with FSDP2, hooks off"]
        self.assertEqual(self.having("passed"), ["package", *[f"training tiny, {way}" for way in ways]])
        for line in self.result()["benchmark"]:
            self.assertLess(line["losses"][-1], line["losses"][0])


if __name__ == "__main__":
    unittest.main()
