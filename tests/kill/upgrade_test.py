#!/usr/bin/env python3
"""A service whose program and configuration are replaced while it trains: nothing is lost, no worker
notices more than a warning line, and what would not do changes nothing."""

import ctypes
import os
import pathlib
import pty
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import unittest

from runs import (BIN, PATIENCE, Run, Service, Training, await_, child_of, difference, read, result_of, served, tail,
                  undisturbed_result)
from save_test import ELEMENTS, JOB, TENSORS, Trainer

import ballast

UPGRADES = 5
TRAINING = Training(steps=300)  # Many more than there are between the upgrades.
PROTOCOL, FORMAT = 1, 3  # Of this version (server/holder/holder_table.h, kept_job.h).


class PatientTrainer(Trainer):
    known = {}

    def open(self):
        return ballast.Session(self.address, JOB, [ctypes.addressof(w) for w in self.weights], share_memory=False,
                               reconnect_timeout=PATIENCE, join_timeout=PATIENCE)


def upgrade(process, program=BIN / "ballastd"):
    """Exit code and what it said."""
    done = subprocess.run([program, f"--upgrade={process}"], text=True, capture_output=True, timeout=PATIENCE,
                          check=False)
    return done.returncode, done.stdout + done.stderr


class Upgrades(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ballast-upgrade-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.program = self.folder / "ballastd"
        self.replace_program()
        self.seed = random.randrange(2**32)
        self.random = random.Random(self.seed)

    def copy_program(self, name="ballastd.new"):
        return pathlib.Path(shutil.copy(BIN / "ballastd", self.folder / name))

    def replace_program(self, text=None):
        """What package managers do: another file under the same name."""
        if text is None:
            new = self.copy_program()
        else:
            new = self.folder / "ballastd.new"
            new.write_text(text)
            new.chmod(0o755)
        new.replace(self.program)

    def serve(self, *flags, **options):
        """Without a terminal, like a service of systemd. One death would be its end. It has said all of its start."""
        service = Service(self.folder, "--most-deaths=1", *flags, program=self.program, group=True, **options)
        self.addCleanup(service.stop)
        await_("its readiness", lambda: self.check_state(service.process.pid)[0] == 0, service.process)
        return service

    def hang_up(self, service):
        """As `kill -HUP` or `systemctl reload`; returns once the new process serves."""
        before, lines = child_of(service), served(service)
        service.process.send_signal(signal.SIGHUP)
        await_("the new process", lambda: served(service) > lines, service.process)
        self.assertNotIn(child_of(service), (0, before))

    def assert_upgraded(self, service):
        before = child_of(service)
        code, said = upgrade(service.process.pid)
        self.assertEqual(code, 0, said + tail(service.log))
        after = child_of(service)
        self.assertEqual(said, f"ballastd: upgraded: process {after} serves in the place of {before}, with all "
                               "that it had\n")
        self.assertNotEqual(after, before)

    def assert_refused(self, service, words):
        """It goes on as it was, and says why in one line; so does who asked for it."""
        before, lines = child_of(service), len(read(service.log).splitlines())
        code, said = upgrade(service.process.pid)
        self.assertEqual(code, 1, said)
        self.assertRegex(said, rf"^ballastd: not upgraded, and the service goes on as it was: {words}\n$")
        self.assertEqual(child_of(service), before)
        self.assertEqual(read(service.log).splitlines()[lines:], said.splitlines())

    def program_of(self, service):
        found = os.stat(f"/proc/{child_of(service)}/exe")
        return found.st_dev, found.st_ino

    def test_workers_train_on_with_the_same_bits(self):
        quiet = Service(self.folder)
        self.addCleanup(quiet.stop)
        undisturbed = undisturbed_result(self.folder, quiet, "undisturbed", TRAINING)
        service = self.serve("--log-level=debug")
        # Copied before the run, which ends by itself: a copy may take as long as many steps.
        programs = [self.copy_program(f"ballastd.{i}") for i in range(UPGRADES)]
        run = Run(self.folder, service.address, "upgraded", TRAINING)
        self.addCleanup(run.stop)
        for i, program in enumerate(programs):
            run.await_step(run.step() + self.random.randrange(1, 6))
            self.assertIsNone(run.process.poll(), f"the run was over; seed {self.seed}")
            program.replace(self.program)
            if i % 2 == 0:
                self.hang_up(service)
            else:
                self.assert_upgraded(service)
            on_disk = os.stat(self.program)
            self.assertEqual(self.program_of(service), (on_disk.st_dev, on_disk.st_ino))
        self.assertEqual(run.wait(), 0, run.story())
        self.assertEqual(run.restarts(), 0)
        self.assertEqual(difference(result_of(run, service), undisturbed), "", run.story() + tail(service.log, 40))
        self.assertEqual(read(service.log).count("after an upgrade: job upgraded is back at step"), UPGRADES)
        self.assertNotIn("the service ended", read(service.log))

    def test_a_session_of_python_trains_on_with_the_same_bits(self):
        quiet = Service(self.folder)
        self.addCleanup(quiet.stop)
        service = self.serve()
        for address, upgrades in ((quiet.address, 0), (service.address, UPGRADES)):
            trainer = PatientTrainer(address)
            self.assertEqual(trainer.begin(load=False), 0)
            for step in range(1, 31):
                trainer.step(step)  # Compares with the other one's.
                if upgrades and step % (30 // upgrades) == 0:
                    service.process.send_signal(signal.SIGHUP)
            trainer.session.close()
        await_("the last upgrade", lambda: served(service) > 1, service.process)

    def test_a_program_that_would_not_do_changes_nothing(self):
        service = self.serve()
        trainer = PatientTrainer(service.address)
        trainer.begin(load=False)
        trainer.step(1)
        programs = {
            "#!/bin/sh\nexit 1\n": "the program on disk ended with code 1 when it was tried",
            "#!/bin/sh\nexit 0\n": "the program on disk ended with code 0 when it was tried",
            "#!/bin/sh\necho first >&2\necho second\nkill -SEGV $$\n": "first",
            "no program": "cannot start the service: Exec format error",
        }
        for text, words in programs.items():
            self.replace_program(text)
            self.assert_refused(service, words)
        self.program.unlink()
        self.assert_refused(service, f"{re.escape(str(self.program))}: No such file or directory")
        trainer.step(2)
        # One that passes, and does not serve then: the one before does.
        self.replace_program(f'#!/bin/sh\nfor word; do [ "$word" != --check-state=held ] || exec {BIN}/ballastd "$@"; '
                             "done\nexit 3\n")
        before, program = child_of(service), self.program_of(service)
        code, said = upgrade(service.process.pid)
        self.assertEqual(code, 1)
        self.assertRegex(said, "^ballastd: not upgraded, .*: the program on disk ended before it served, and the one "
                               "before is started again\n$")
        trainer.step(3)
        self.assertNotEqual(child_of(service), before)
        self.assertEqual(self.program_of(service), program)
        self.replace_program()
        self.assert_upgraded(service)
        trainer.step(4)
        trainer.session.close()

    def test_reads_its_configuration_anew_and_refuses_a_wrong_one(self):
        config, certificate = self.folder / "config", self.folder / "certificate"
        config.write_text("seal-deadline-seconds = 30\n")
        service = self.serve(f"--config={config}")
        trainer = PatientTrainer(service.address)
        trainer.begin(load=False)
        trainer.step(1)
        certificate.write_text("none\n")
        certificate.chmod(0o600)
        for text, words in {
                "thread = 2\n": ".*config, line 1: there is no key 'thread'; did you mean threads.*",
                "threads = many\n": ".*config, line 1, threads: bad value 'many'.*",
                f"tls-cert = {certificate}\ntls-key = {certificate}\n": f".*{certificate}.*",
                f"checkpoint-dir = {config}\n": f"flag --checkpoint-dir={config}: .*",
        }.items():
            config.write_text(text)
            self.assert_refused(service, words)
        config.write_text("seal-deadline-seconds = 31\n")
        self.hang_up(service)
        trainer.step(2)
        trainer.session.close()

    def test_listens_on_the_addresses_that_its_configuration_has_by_now(self):
        config = self.folder / "config"
        taken = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(taken.close)
        one, two = (f"unix:{self.folder}/{name}" for name in ("one", "two"))
        config.write_text(f"listen = {one}\nmemory-limit = 256MiB\n")
        port_file = self.folder / "ports"
        log = self.folder / "log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [self.program, f"--config={config}", f"--port-file={port_file}", "--nostartup-benchmark"],
                stderr=output, start_new_session=True)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        await_("its address", lambda: read(port_file), process)
        trainer = PatientTrainer(one)
        trainer.begin(load=False)
        trainer.step(1)
        trainer.session.close()
        config.write_text(f"listen = {one},127.0.0.1:{taken.getsockname()[1]}\n")
        code, said = upgrade(process.pid)
        self.assertEqual(code, 1)
        self.assertIn(f"cannot listen on 127.0.0.1:{taken.getsockname()[1]}: it is taken", said)
        # Less memory than there is in use, too: what is there stays.
        config.write_text(f"listen = {two}\nmemory-limit = 1MiB\n")
        code, said = upgrade(process.pid)
        self.assertEqual(code, 0, said + tail(log))
        self.assertFalse((self.folder / "one").exists())
        listed = subprocess.run([BIN / "ballast", "jobs", f"--service={two}"], text=True, capture_output=True,
                                timeout=PATIENCE, check=True).stdout
        self.assertRegex(listed, r"(?m)^gpt\b")
        self.assertIn("after an upgrade: job gpt is back at step 1", read(log))

    def test_a_terminal_that_closes_ends_it_and_who_asks_still_upgrades(self):
        master, slave = pty.openpty()
        self.addCleanup(os.close, master)
        log = self.folder / "log"
        port_file = self.folder / "ports"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                ["sh", "-c", 'exec "$0" "$@" <"$TERMINAL"', self.program, "--listen=127.0.0.1:0",
                 f"--port-file={port_file}", "--nostartup-benchmark"],
                stderr=output, start_new_session=True, env=os.environ | {"TERMINAL": os.ttyname(slave)})
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        os.close(slave)
        await_("its address", lambda: read(port_file), process)
        code, said = upgrade(process.pid)
        self.assertEqual(code, 0, said)
        process.send_signal(signal.SIGHUP)
        self.assertEqual(process.wait(PATIENCE), 0)
        self.assertIn(f"signal {int(signal.SIGHUP)}: refusing new steps", read(log))

    def test_does_not_end_with_who_reads_what_it_says(self):
        reader, writer = os.pipe()
        port_file = self.folder / "ports"
        process = subprocess.Popen([self.program, "--listen=127.0.0.1:0", f"--port-file={port_file}",
                                    "--nostartup-benchmark"], stderr=writer, start_new_session=True)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        os.close(writer)
        await_("its address", lambda: read(port_file), process)
        os.close(reader)
        self.replace_program("#!/bin/sh\nexit 1\n")
        self.assertEqual(upgrade(process.pid)[0], 1)  # The holder has said so to nobody.
        self.replace_program()
        self.assertEqual(upgrade(process.pid)[0], 0)

    def test_says_what_it_cannot_upgrade(self):
        alone = Service(self.folder, "--holder=none", group=True)
        self.addCleanup(alone.stop)
        service = self.serve()
        gone = subprocess.Popen(["true"])
        gone.wait()
        for process, words in {
                alone.process.pid: r"process \d+ is no ballastd that holds a service's memory: .*--holder=none.*",
                child_of(service): r"process \d+ is no ballastd that holds a service's memory: name the parent.*",
                gone.pid: rf"there is no process {gone.pid}",
        }.items():
            code, said = upgrade(process)
            self.assertEqual(code, 1, said)
            self.assertRegex(said, rf"^ballastd: {words}\n$")
        code, said = upgrade("it")
        self.assertEqual((code, said), (2, "ballastd: flag --upgrade: 'it' is no process id; give that of the "
                                           "service's parent\n"))
        alone.process.send_signal(signal.SIGHUP)  # Nobody would hold what it has.
        self.assertEqual(alone.process.wait(PATIENCE), 0)

    def check_state(self, process):
        done = subprocess.run([BIN / "ballastd", f"--check-state={process}"], text=True, capture_output=True,
                              timeout=PATIENCE, check=False)
        return done.returncode, done.stdout + done.stderr

    def test_says_whether_it_reads_what_a_service_keeps(self):
        service = self.serve()
        pid = service.process.pid
        self.assertEqual(self.check_state(pid), (0, f"ballastd: process {pid} keeps its jobs in format {FORMAT}, "
                                                    "which this ballastd reads\n"))
        # This process passes for holders of other versions.
        table = os.memfd_create("ballastd-holder", os.MFD_CLOEXEC)
        self.addCleanup(os.close, table)
        os.ftruncate(table, 4 << 20)
        for protocol, format_, words in (
                (PROTOCOL, FORMAT + 1, f"process {os.getpid()} keeps its jobs in format {FORMAT + 1}, and this ballastd "
                                       f"reads format {FORMAT}: stop the service, which saves its jobs, .*"),
                (PROTOCOL + 1, FORMAT, rf"process {os.getpid()} is a ballastd of another version \(it speaks "
                                       rf"{PROTOCOL + 1}, here {PROTOCOL}\) .*"),
                (PROTOCOL, 0, f"the service of process {os.getpid()} has not served yet; try again"),
        ):
            os.pwrite(table, struct.pack("=II", protocol, format_), 0)
            code, said = self.check_state(os.getpid())
            self.assertEqual(code, 2, said)
            self.assertRegex(said, f"^ballastd: {words}\n$")


if __name__ == "__main__":
    unittest.main()
