#!/usr/bin/env python3
"""deploy/demo.sh and deploy/run_workers.py with stand-ins for the binaries: what they start, what they
leave behind, and what bad input gets."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

from processes import PATIENCE, await_, read, start, state_of  # noqa: E402

# Binds its address as ballastd does, says it, and stays until SIGTERM.
SERVICE = """#!/usr/bin/env python3
import os, signal, socket, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
open(os.environ["PIDS"], "a").write(f"{os.getpid()}\\n")
host, port = flags["--listen"].rsplit(":", 1)
server = socket.socket()
try:
    server.bind((host, int(port)))
except OSError as error:
    sys.exit(f"cannot listen on {host}:{port}: {error.strerror}; choose another address")
with open(flags["--port-file"] + ".tmp", "w") as file:
    file.write(f"{host}:{server.getsockname()[1]}\\n")
os.rename(flags["--port-file"] + ".tmp", flags["--port-file"])
signal.sigwait([signal.SIGTERM])
"""

# Writes what ballast-worker writes. Environment variables make it fail in one way or another.
WORKER = """#!/usr/bin/env python3
import json, os, pathlib, struct, sys, time
open(os.environ["PIDS"], "a").write(f"{os.getpid()}\\n")
words = [part for word in sys.argv[1:] for part in word.split("=", 1)]
flags = dict(zip(words[0::2], words[1::2]))
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
local = flags["--optimizer"] == "local"
assert local or flags["--service"]
if os.environ.get("HANG"):
    time.sleep(600)
if os.environ.get("KILL_SERVICE") and rank == 0:
    service = int(open(os.environ["PIDS"]).read().split()[0])
    os.kill(service, 9)
    sys.exit("the stream broke")
if os.environ.get("FAIL_RANK") == str(rank):
    sys.exit("loss is not finite; lower the learning rate")
if os.environ.get("FAIL_RANK"):
    time.sleep(600)
print(f"rank {rank} of {world} done" + ("" if local else f" over {flags['--service']}"))
if rank == 0:
    out = pathlib.Path(flags["--out"])
    out.mkdir(exist_ok=True)
    try:
        (out / "filler.bin").write_bytes(bytes(int(os.environ.get("FILL", "0"))))
    except OSError as error:
        sys.exit(f"cannot write {out}: {error.strerror}; make room")
    (out / "filler.bin").unlink()
    weights = [1.0] * 8
    if local and os.environ.get("DIVERGE"):
        weights[5] = 2.0
    (out / "weights.bin").write_bytes(b"".join(struct.pack("<f", w)[2:] for w in weights))
    (out / "losses.csv").write_text("step,loss\\n1,5.5\\n2,5.0\\n")
    (out / "worker.json").write_text(json.dumps(dict(
        steps=int(flags["--steps"]), workers=world, micro_steps=int(flags["--micro-steps"]),
        parameters=8, groups=2, first_loss=5.5, last_loss=5.0, tokens_per_second=100.0,
        step_seconds_median=0.1, redone_chunks=3,
        transport="the connection" if flags.get("--shared-memory") == "never" else "shared memory",
        coverage_complete_steps=int(flags["--steps"]) - int(os.environ.get("INCOMPLETE", "0")),
        speculated_chunks=0 if flags.get("--update") == "wait" else 12, tensors=[dict(name="a", begin=0, elements=4),
                                          dict(name="b", begin=4, elements=4)])))
"""

CLI = """#!/bin/sh
echo "$@" >>"$ASKED"
echo "answer to $1"
"""

ENDED = ("Z", "X", "")  # Who starts it may have ended before asking for its code; then that is init's to do.

SUMMARY_FIELDS = [
    "steps", "workers", "micro_steps", "parameters", "groups", "first_loss", "last_loss",
    "weights_sha256_service", "weights_sha256_local", "bit_identical", "tokens_per_second",
    "step_seconds_median", "coverage_complete_steps", "transport", "speculated_chunks", "redone_chunks"]


class Demo(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        self.out = self.dir / "out"
        for name, text in (("ballastd", SERVICE), ("ballast-worker", WORKER), ("ballast", CLI)):
            binary = self.dir / "bin" / name
            binary.parent.mkdir(exist_ok=True)
            binary.write_text(text)
            binary.chmod(0o755)
        (self.dir / "pids").touch()
        (self.dir / "tmp").mkdir()
        self.environment = os.environ | {
            "BALLAST_BIN_DIR": str(self.dir / "bin"), "PIDS": str(self.dir / "pids"),
            "ASKED": str(self.dir / "asked"), "TMPDIR": str(self.dir / "tmp")}

    def demo(self, *flags, out=None, **environment):
        return subprocess.run(
            [ROOT / "deploy/demo.sh", "--out", out or self.out, *flags], text=True, timeout=PATIENCE,
            capture_output=True, check=False, env=self.environment | environment)

    def assert_refused(self, result, words):
        """One line that says `words`, a code that is not zero, nothing half written, nobody left."""
        self.assertNotEqual(result.returncode, 0)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertIn(words, result.stderr)
        self.assertFalse(self.out.exists(), "something was left under --out")
        self.assert_nobody_left()

    def assert_nobody_left(self):
        for pid in (self.dir / "pids").read_text().split():
            self.assertIn(state_of(pid), ENDED, f"process {pid} was left behind")

    def test_writes_all_results_and_leaves_nobody(self):
        result = self.demo("--workers", "3", "--steps=2", "--micro-steps", "4")
        self.assertEqual(result.returncode, 0, result.stderr)
        summary = json.loads((self.out / "summary.json").read_text())
        self.assertEqual(list(summary), SUMMARY_FIELDS)
        self.assertEqual((summary["workers"], summary["steps"], summary["micro_steps"]), (3, 2, 4))
        self.assertEqual(summary["coverage_complete_steps"], 2)
        self.assertEqual((summary["speculated_chunks"], summary["redone_chunks"]), (12, 3))
        self.assertTrue(summary["bit_identical"])
        self.assertEqual(summary["weights_sha256_service"], summary["weights_sha256_local"])
        self.assertIn("</svg>", (self.out / "loss.svg").read_text())
        self.assertTrue((self.out / "local/weights.bin").exists())
        self.assertEqual([p.name for p in self.out.iterdir() if p.name.startswith(".")], [])
        self.assertEqual(list((self.dir / "tmp").iterdir()), [])
        asked = (self.dir / "asked").read_text()
        for question in ("job demo", "groups demo", "state demo h.0.attn.c_attn.weight", "close demo"):
            self.assertIn(question, asked)
        self.assertIn("rank 0 of 3 done", result.stdout)
        self.assertNotIn("rank 1 of 3 done", result.stdout)
        self.assert_nobody_left()

    def test_trains_over_several_services(self):
        result = self.demo("--members=2")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, r"rank 0 of 2 done over 127\.0\.0\.1:\d+,127\.0\.0\.1:\d+\n")
        self.assertEqual(len((self.dir / "pids").read_text().split()), 2 + 2 + 2)
        self.assert_nobody_left()

    def test_refuses_services_that_cannot_be(self):
        self.assert_refused(self.demo("--members", "3"), "--members is '3', expected a whole number from 1 to 2")
        self.assert_refused(self.demo("--members", "2", "--listen=127.0.0.1:7070"), "--listen is '127.0.0.1:7070'")

    def test_passes_the_update_mode_on(self):
        self.assertEqual(self.demo("--update=wait", "--shared-memory=never").returncode, 0)
        self.assertEqual(json.loads((self.out / "summary.json").read_text())["speculated_chunks"], 0)

    def test_refuses_an_unknown_update_mode(self):
        self.assert_refused(self.demo("--update", "guess"), "--update is 'guess', expected wait or speculate")
        self.assert_refused(self.demo("--shared-memory=always"), "--shared-memory is 'always', expected auto or never")

    def test_says_where_the_weights_part(self):
        result = self.demo(DIVERGE="1")
        self.assertEqual(result.returncode, 1)
        self.assertIn("part first in b, element 1 of 4: 1.0 with the service, 2.0", result.stderr)
        self.assertFalse(json.loads((self.out / "summary.json").read_text())["bit_identical"])

    def test_refuses_steps_whose_gradients_were_not_complete(self):
        self.assert_refused(self.demo("--steps=5", INCOMPLETE="1"), "complete gradients in 4 of 5 steps")

    def test_passes_on_what_the_failed_worker_said_and_stops_the_rest(self):
        result = self.demo("--workers", "3", FAIL_RANK="1")
        self.assert_refused(result, "rank 1 of 3 failed: loss is not finite; lower the learning rate")

    def test_says_that_the_service_died(self):
        result = self.demo("--workers", "1", KILL_SERVICE="1")
        self.assert_refused(result, "the service died during the training")

    def test_refuses_a_missing_text(self):
        self.assert_refused(self.demo("--text", "/nowhere.txt"), "--text /nowhere.txt does not exist")

    def test_refuses_an_empty_text(self):
        self.assert_refused(self.demo("--text", "/dev/null"), "--text /dev/null is empty")

    def test_refuses_counts_that_are_no_positive_numbers(self):
        for value in ("0", "-1", "two", "1.5", "", "99999999999999999999", "65"):
            with self.subTest(value):
                self.assert_refused(self.demo("--workers", value), f"--workers is '{value}', expected")

    def test_refuses_an_unknown_flag_and_a_flag_without_value(self):
        self.assert_refused(self.demo("--worker", "2"), "unknown flag '--worker'")
        self.assert_refused(self.demo("--steps"), "--steps needs a value")

    def test_refuses_a_taken_port(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            self.assert_refused(self.demo("--listen", address), f"cannot listen on {address}: ")

    def test_refuses_an_out_that_cannot_be_made(self):
        (self.dir / "file").touch()
        out = self.dir / "file/out"
        self.assert_refused(self.demo(out=out), f"cannot make {out}; choose another")

    def test_replaces_nothing_but_the_results_of_an_earlier_demo(self):
        precious = self.out / "local" / "precious"
        precious.parent.mkdir(parents=True)
        precious.write_text("years of work")
        result = self.demo()
        self.assertNotEqual(result.returncode, 0)
        self.assertIn(f"{self.out} is there and is not a demo's results; choose a new folder", result.stderr)
        self.assertEqual(precious.read_text(), "years of work")
        again = self.dir / "again"
        again.mkdir()
        for _ in range(2):
            result = self.demo(out=again)
            self.assertEqual(result.returncode, 0, result.stderr)

    def test_takes_relative_paths_from_the_callers_folder(self):
        (self.dir / "text").write_text("some text")
        result = subprocess.run(
            [ROOT / "deploy/demo.sh", "--text", "text", "--out", "results/run"], text=True, timeout=PATIENCE,
            capture_output=True, check=False, cwd=self.dir,
            env=self.environment | {"BALLAST_BIN_DIR": "bin"})
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue((self.dir / "results/run/summary.json").exists())

    def test_a_failure_takes_the_folders_away_that_it_made(self):
        out = self.dir / "results/of/run"
        self.assert_refused(self.demo(out=out, FAIL_RANK="1"), "rank 1 of 2 failed")
        self.assertFalse((self.dir / "results").exists())

    def test_stops_everybody_when_it_is_stopped(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            (self.dir / "pids").write_text("")
            with self.subTest(number), start([ROOT / "deploy/demo.sh", "--out", self.out], self.dir / "log",
                                             environment=self.environment | {"HANG": "1"}) as process:
                await_("the service and two workers", lambda: len(read(self.dir / "pids").split()) == 3, process)
                process.send_signal(number)
                self.assertEqual(process.wait(PATIENCE), 128 + number)
                self.assert_nobody_left()
                self.assertFalse(self.out.exists())
                self.assertEqual(list((self.dir / "tmp").iterdir()), [])

    def on_small_disk(self, mebibytes, **environment):
        """Runs the demo with --out on a file system of that size; skips where none can be mounted."""
        disk = self.dir / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", disk]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
            self.skipTest("needs to mount a tmpfs")
        try:
            result = self.demo(out=disk / "out", **environment)
            self.assertEqual(list(disk.iterdir()), [], "something was left on the full disk")
        finally:
            subprocess.run(["umount", disk], check=True)
        return result

    def test_refuses_a_disk_that_is_too_small(self):
        self.assert_refused(self.on_small_disk(1), "1 MiB free, the demo needs 64")

    def test_leaves_nothing_when_the_disk_fills_up(self):
        result = self.on_small_disk(70, FILL=str(80 << 20))
        self.assert_refused(result, "No space left on device; make room")


class Launcher(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.logs = pathlib.Path(folder.name)

    def command(self, count, script, *flags):
        return [ROOT / "deploy/run_workers.py", *flags, count, self.logs, "bash", "-c", script]

    def launch(self, count, script, *flags, **environment):
        return subprocess.run(self.command(count, script, *flags), capture_output=True, text=True,
                              timeout=PATIENCE, check=False, env=os.environ | environment)

    def read(self, name):
        path = self.logs / name
        return path.read_text() if path.exists() else ""

    def await_lines(self, name, count):
        """The first `count` lines that the workers wrote to a file, once they are there."""
        await_(f"{count} lines of {name}", lambda: self.read(name).count("\n") >= count)
        return self.read(name).split()

    def test_sets_what_torchrun_sets(self):
        variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        script = "echo " + " ".join(f"${name}" for name in variables)
        result = self.launch("2", script, MASTER_PORT="1234")
        self.assertEqual(result.stdout, "0 0 2 2 127.0.0.1 1234\n")

    def test_returns_the_code_of_the_first_that_fails(self):
        result = self.launch("3", 'if [ $RANK = 2 ]; then echo "no disk" >&2; exit 7; fi; exec sleep 600')
        self.assertEqual((result.returncode, result.stderr), (7, "rank 2 of 3 failed: no disk\n"))

    def test_names_the_one_that_failed_not_the_one_that_lost_it(self):
        script = (f'cd {self.logs}; if [ $RANK = 0 ]; then echo "lost rank 1" >&2; touch lost; exit 3; fi; '
                  'until [ -e lost ]; do sleep 0.01; done; sleep 0.2; echo "no disk" >&2; exit 7')
        result = self.launch("2", script)
        self.assertEqual((result.returncode, result.stderr), (7, "rank 1 of 2 failed: no disk\n"))

    def test_refuses_counts_that_cannot_be(self):
        for words in (("0", "true"), ("1", "true", "--max-restarts=-1"), ("many", "true")):
            self.assertEqual(self.launch(*words).returncode, 2)

    def test_starts_all_again_with_another_port_until_none_fails(self):
        script = (f"cd {self.logs}; N=$TORCHELASTIC_RESTART_COUNT; "
                  "echo start $N of $RANK >&2; echo shown by $RANK; echo $RANK $N $MASTER_PORT >>starts; "
                  "[ $N = 2 ] && exit 0; until [ $(grep -c \" $N \" starts) = 3 ]; do sleep 0.01; done; "
                  "[ $RANK = 1 ] && exit 7; exec sleep 600")
        result = self.launch("3", script, "--max-restarts", "5", MASTER_PORT="")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr,
                         "rank 1 of 3 failed: start 0 of 1; all start again (1 of at most 5 times)\n"
                         "rank 1 of 3 failed: start 1 of 1; all start again (2 of at most 5 times)\n")
        starts = [line.split() for line in self.read("starts").splitlines()]
        self.assertEqual(sorted(start[:2] for start in starts),
                         sorted([str(rank), str(start)] for start in range(3) for rank in range(3)))
        ports = {(start, port) for _, start, port in starts}
        self.assertEqual(len(ports), 3, "one port for all ranks of a start, another in each")
        self.assertEqual(len({port for _, port in ports}), 3)
        self.assertEqual(self.read("rank-2.log"), "shown by 2\n" * 3)
        self.assertEqual(self.read("rank-0.err"), "".join(f"start {n} of 0\n" for n in range(3)))

    def test_gives_up_after_the_last_restart_with_the_code_of_the_one_that_failed(self):
        script = f"[ $RANK = 0 ] && exec sleep 600; echo x >>{self.logs}/starts; exit 7"
        result = self.launch("2", script, "--max-restarts=2")
        self.assertEqual(result.returncode, 7)
        self.assertEqual(len(result.stderr.splitlines()), 3, result.stderr)
        self.assertEqual(self.read("starts"), "x\n" * 3)

    def test_keeps_the_port_that_it_was_given(self):
        result = self.launch("1", f"echo $MASTER_PORT >>{self.logs}/starts; exit 1", "--max-restarts=1",
                             MASTER_PORT="1234")
        self.assertEqual((result.returncode, self.read("starts")), (1, "1234\n1234\n"))

    def test_starts_again_only_when_no_process_of_the_start_before_is_left(self):
        # Rank 0 does not hear SIGTERM; rank 1 fails once rank 0 is deaf.
        script = (f"cd {self.logs}; if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then "
                  '  [ $RANK = 0 ] && for p in $(cat pids); do [ -e /proc/$p ] && echo $p >>left; done; '
                  "  exit 0; fi; "
                  "if [ $RANK = 0 ]; then trap '' TERM; echo $$ >>pids; while :; do sleep 0.1; done; fi; "
                  "until [ -s pids ]; do sleep 0.01; done; exit 1")
        result = self.launch("2", script, "--max-restarts=1")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(len(self.read("pids").split()), 1)
        self.assertEqual(self.read("left"), "")

    def test_a_killed_worker_is_a_failed_one(self):
        script = f"echo $$ >>{self.logs}/pids; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 600"
        with start(self.command("2", script, "--max-restarts=1"), self.logs / "log") as process:
            os.kill(int(self.await_lines("pids", 2)[0]), signal.SIGKILL)
            process.wait(PATIENCE)
        error = self.read("log")
        self.assertEqual(process.returncode, 0, error)
        self.assertRegex(error, r"^rank [01] of 2 failed: ended by signal 9: no message; all "
                                r"start again \(1 of at most 1 times\)\n$")

    def test_reaps_children_that_are_no_workers(self):
        # A shell that becomes the launcher leaves it a child; rank 0 waits until that is reaped.
        launch = " ".join(f"'{word}'" for word in self.command(
            "1", f"while [ -e /proc/$(cat {self.logs}/stranger) ]; do sleep 0.02; done; echo reaped"))
        result = subprocess.run(
            ["bash", "-c", f"sleep 0.5 & echo $! >{self.logs}/stranger; exec {launch}"],
            capture_output=True, text=True, timeout=PATIENCE, check=False)
        self.assertEqual((result.returncode, result.stdout), (0, "reaped\n"), result.stderr)

    def test_hears_of_workers_where_their_ends_were_ignored(self):
        result = subprocess.run(self.command("1", "exit 7"), capture_output=True, text=True, timeout=PATIENCE,
                                check=False, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
        self.assertEqual(result.returncode, 7, result.stderr)

    def test_its_workers_do_not_outlive_it(self):
        with start(self.command("2", f"echo $$ >>{self.logs}/pids; exec sleep 600"), self.logs / "log") as process:
            pids = self.await_lines("pids", 2)
            process.kill()
        for pid in pids:
            await_(f"the end of {pid}", lambda: state_of(pid) in ENDED)

    def test_stops_the_workers_when_it_is_stopped(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(number):
                (self.logs / "pids").unlink(missing_ok=True)
                with start(self.command("2", f"echo $$ >>{self.logs}/pids; exec sleep 600", "--max-restarts=3"),
                           self.logs / "log") as process:
                    pids = self.await_lines("pids", 2)
                    process.send_signal(number)
                    self.assertEqual(process.wait(PATIENCE), 128 + number)
                for pid in pids:
                    self.assertIn(state_of(pid), ENDED, f"{pid} was left behind")


if __name__ == "__main__":
    if shutil.which("bash") is None:
        raise SystemExit("bash is not installed")
    unittest.main()
