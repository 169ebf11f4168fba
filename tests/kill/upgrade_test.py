#!/usr/bin/env python3
"""A service whose program and configuration are replaced while it trains: nothing is lost, no worker
notices more than a warning line, and what would not do changes nothing."""

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

from runs import (BIN, PATIENCE, ROOT, Run, Service, Training, await_, child_of, difference, read, result_of, served,
                  tail, undisturbed_result)
from save_test import Trainer

import processes
from processes import end_group, start

UPGRADES = 5
TRAINING = Training(steps=300, state="bf16")  # Many more than there are between the upgrades.


def number_in(header, name):
    """The value of a constant of this version."""
    return int(re.search(rf"\b{name} = (\d+);", (ROOT / header).read_text())[1])


PROTOCOL = number_in("server/holder/holder_table.h", "kHolderProtocol")
FORMAT = number_in("cpu_optimizer_service/job/kept/kept_job.h", "kKeptFormat")


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
        upgrades, runs = 0, 0
        while upgrades < UPGRADES:
            runs += 1
            self.assertLessEqual(runs, 2 * UPGRADES, f"{upgrades} upgrades fell into runs; seed {self.seed}")
            # Copied before the run, which ends by itself: a copy may take as long as many steps.
            programs = [self.copy_program(f"ballastd.{i}") for i in range(UPGRADES - upgrades)]
            run = Run(self.folder, service.address, f"upgraded-{runs}", TRAINING)
            self.addCleanup(run.stop)
            fell = self.upgrade_during(run, service, programs)
            upgrades += fell
            self.assertEqual(run.wait(), 0, run.story())
            # The last one may have come when the run was over, and its job still there.
            self.assertIn(read(service.log).count(f"after an upgrade: job {run.job} is back at step"), (fell, fell + 1))
            self.assertEqual(run.restarts(), 0)
            for rank in range(2):
                self.assertNotIn("another process of the service", run.log(rank))
                self.assertGreaterEqual(run.log(rank).count("has restarted as planned"), fell)
            self.assertEqual(difference(result_of(run, service), undisturbed), "", run.story() + tail(service.log, 40))
        self.assertNotIn("cannot be taken over", read(service.log))
        self.assertNotIn("the service ended", read(service.log))

    def upgrade_during(self, run, service, programs):
        """To each of these programs while the run lasts. Returns how many of them it has outlasted: on a busy machine
        an upgrade may take longer than all of its steps."""
        for i, program in enumerate(programs):
            try:
                run.await_step(run.step() + self.random.randrange(1, 6))
            except processes.Ended:
                return i
            program.replace(self.program)
            if i % 2 == 0:
                self.hang_up(service)
            else:
                self.assert_upgraded(service)
            on_disk = os.stat(self.program)
            self.assertEqual(self.program_of(service), (on_disk.st_dev, on_disk.st_ino))
            if run.process.poll() is not None:
                return i
        return len(programs)

    def test_who_asks_while_another_upgrade_is_under_way_gets_the_program_that_is_there_then(self):
        service = self.serve()
        for _ in range(UPGRADES):
            before = child_of(service)
            later = self.copy_program("ballastd.later")
            self.replace_program()
            service.process.send_signal(signal.SIGHUP)
            await_("the next process", lambda: child_of(service) not in (0, before), service.process)
            later.replace(self.program)
            code, said = upgrade(service.process.pid)
            self.assertEqual(code, 0, said + tail(service.log))
            on_disk = os.stat(self.program)
            self.assertEqual(self.program_of(service), (on_disk.st_dev, on_disk.st_ino), said)

    def test_a_session_of_python_trains_on_with_the_same_bits(self):
        quiet = Service(self.folder)
        self.addCleanup(quiet.stop)
        service = self.serve()
        for address, upgrades in ((quiet.address, 0), (service.address, UPGRADES)):
            trainer = Trainer(address)
            self.assertEqual(trainer.begin(load=False), 0)
            for step in range(1, 31):
                trainer.step(step)  # Compares with the other one's.
                if upgrades and step % (30 // upgrades) == 0:
                    service.process.send_signal(signal.SIGHUP)
            trainer.session.close()
        await_("the last upgrade", lambda: served(service) > 1, service.process)

    def test_a_program_that_would_not_do_changes_nothing(self):
        service = self.serve()
        trainer = Trainer(service.address)
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
        trainer = Trainer(service.address)
        trainer.begin(load=False)
        trainer.step(1)
        certificate.write_text("none\n")
        certificate.chmod(0o600)
        for text, words in {
                "thread = 2\n": ".*config, line 1: there is no key 'thread'; did you mean threads.*",
                "threads = many\n": ".*config, line 1: --threads: bad value 'many'.*",
                f"tls-cert = {certificate}\ntls-key = {certificate}\n": f".*{certificate}.*",
                f"checkpoint-dir = {config}\n": f"flag --checkpoint-dir={config}: .*",
        }.items():
            config.write_text(text)
            self.assert_refused(service, words)
        config.write_text("seal-deadline-seconds = 31\n")
        self.hang_up(service)
        trainer.step(2)
        trainer.session.close()

    def serve_as_configured(self, text):
        """Its process, its configuration and its log."""
        config = self.folder / "config"
        config.write_text(text)
        service = self.serve_alone(self.program, f"--config={config}", listen=None)
        return service.process, config, service.log

    def serve_alone(self, program, *flags, **options):
        """With no flags that the tests of this folder share."""
        service = processes.Service(program, self.folder, *flags, group=True, **options)
        self.addCleanup(service.stop)
        return service

    def test_listens_on_the_addresses_that_its_configuration_has_by_now(self):
        taken = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(taken.close)
        one, two = (f"unix:{self.folder}/{name}" for name in ("one", "two"))
        process, config, log = self.serve_as_configured(f"listen = {one}\nmemory-limit = 256MiB\n")
        trainer = Trainer(one)
        trainer.begin(load=False)
        trainer.step(1)
        trainer.session.close()
        config.write_text(f"listen = {one},127.0.0.1:{taken.getsockname()[1]}\n")
        code, said = upgrade(process.pid)
        self.assertEqual(code, 1)
        self.assertIn(f"cannot listen on 127.0.0.1:{taken.getsockname()[1]}: the address is in use", said)
        # Less memory than there is in use, too: what is there stays.
        config.write_text(f"listen = {two}\nmemory-limit = 1MiB\n")
        code, said = upgrade(process.pid)
        self.assertEqual(code, 0, said + tail(log))
        self.assertFalse((self.folder / "one").exists())
        listed = subprocess.run([BIN / "ballast", "jobs", f"--service={two}"], text=True, capture_output=True,
                                timeout=PATIENCE, check=True).stdout
        self.assertRegex(listed, r"(?m)^gpt\b")
        self.assertIn("after an upgrade: job gpt is back at step 1", read(log))

    def test_goes_on_in_its_directory_of_state_and_in_no_other(self):
        folder = tempfile.TemporaryDirectory(prefix="ballast-upgrade-", dir="/dev/shm")
        self.addCleanup(folder.cleanup)
        one, two, listen = f"{folder.name}/one", f"{folder.name}/two", f"listen = unix:{self.folder}/socket\n"
        process, config, log = self.serve_as_configured(f"{listen}state-dir = {one}\n")
        trainer = Trainer(f"unix:{self.folder}/socket")
        trainer.begin(load=False)
        trainer.step(1)
        for other, words in ((f"state-dir = {two}\n", f", and not in {two}"), ("", "")):
            config.write_text(listen + other)
            code, said = upgrade(process.pid)
            self.assertEqual(code, 1)
            self.assertIn(f"flag --state-dir: the service's jobs lie in {one}{words}; an upgrade moves no job: leave "
                          "--state-dir as it was", said)
            self.assertFalse(pathlib.Path(two).exists())
        config.write_text(f"{listen}state-dir = {one}\n")
        code, said = upgrade(process.pid)
        self.assertEqual(code, 0, said + tail(log))
        trainer.step(2)
        trainer.session.close()

    def test_moves_no_job_from_its_parent_to_a_directory_of_state(self):
        folder = tempfile.TemporaryDirectory(prefix="ballast-upgrade-", dir="/dev/shm")
        self.addCleanup(folder.cleanup)
        state, listen = f"{folder.name}/state", f"listen = unix:{self.folder}/socket\n"
        process, config, log = self.serve_as_configured(listen)
        trainer = Trainer(f"unix:{self.folder}/socket")
        trainer.begin(load=False)
        trainer.step(1)
        config.write_text(f"{listen}state-dir = {state}\n")
        code, said = upgrade(process.pid)
        self.assertEqual(code, 1)
        self.assertIn(f"the service's jobs lie in its parent's memory, and not in {state}; an upgrade moves no job", said)
        trainer.step(2)
        trainer.session.close()
        subprocess.run([BIN / "ballast", "close", "gpt", f"--service=unix:{self.folder}/socket"], check=True,
                       timeout=PATIENCE)
        code, said = upgrade(process.pid)
        self.assertEqual(code, 0, said + tail(log))

    def test_addresses_that_overlap_take_each_others_place(self):
        taken = socket.create_server(("127.0.0.2", 0))
        self.addCleanup(taken.close)
        port = taken.getsockname()[1]
        process, config, log = self.serve_as_configured(f"listen = 127.0.0.1:{port}\n")
        trainer = Trainer(f"127.0.0.1:{port}")
        trainer.begin(load=False)
        trainer.step(1)
        config.write_text(f"listen = 0.0.0.0:{port}\ninsecure = true\n")
        code, said = upgrade(process.pid)
        self.assertEqual(code, 1)
        self.assertIn(f"cannot listen on 0.0.0.0:{port}: the address is in use", said)
        trainer.step(2)
        taken.close()
        for step, host in ((3, "0.0.0.0"), (4, "127.0.0.1")):
            config.write_text(f"listen = {host}:{port}\ninsecure = true\n")
            code, said = upgrade(process.pid)
            self.assertEqual(code, 0, said + tail(log))
            trainer.step(step)
            elsewhere = socket.socket()
            self.addCleanup(elsewhere.close)
            self.assertEqual(elsewhere.connect_ex(("127.0.0.2", port)) == 0, host == "0.0.0.0")
        trainer.session.close()

    def test_a_terminal_that_closes_ends_it_and_who_asks_still_upgrades(self):
        master, slave = pty.openpty()
        self.addCleanup(os.close, master)
        on_terminal = self.folder / "on_terminal"
        on_terminal.write_text(f'#!/bin/sh\nexec {self.program} "$@" <{os.ttyname(slave)}\n')
        on_terminal.chmod(0o755)
        service = self.serve_alone(on_terminal)
        process = service.process
        os.close(slave)
        code, said = upgrade(process.pid)
        self.assertEqual(code, 0, said)
        process.send_signal(signal.SIGHUP)
        self.assertEqual(process.wait(PATIENCE), 0)
        self.assertIn(f"signal {int(signal.SIGHUP)}: refusing new steps", read(service.log))

    def test_does_not_end_with_who_reads_what_it_says(self):
        fifo, port_file = self.folder / "errors", self.folder / "ports"
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        process = start([self.program, "--listen=127.0.0.1:0", f"--port-file={port_file}", "--nostartup-benchmark"],
                        self.folder / "output", fifo, group=True)
        self.addCleanup(end_group, process)
        await_("its address", lambda: read(port_file), process)
        os.close(reader)
        self.replace_program("#!/bin/sh\nexit 1\n")
        self.assertEqual(upgrade(process.pid)[0], 1)  # The holder has written that where no process reads.
        self.replace_program()
        self.assertEqual(upgrade(process.pid)[0], 0)

    def test_says_what_it_cannot_upgrade(self):
        alone = Service(self.folder, "--holder=none", group=True)
        self.addCleanup(alone.stop)
        service = self.serve()
        gone = start(["true"], os.devnull)
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
        alone.process.send_signal(signal.SIGHUP)  # No process would hold what it has.
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
                (PROTOCOL, FORMAT + 1,
                 f"process {os.getpid()} keeps its jobs in format {FORMAT + 1}, and this ballastd reads "
                 f"format {FORMAT}: stop the service, which saves its jobs, .*"),
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
