"""Ballast's programs as processes of a test: started with a log, awaited, and ended by their id.

Python's standard library only: deploy/bundle.sh takes this file along for tests/gpu.
"""

import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUN_WORKERS = ROOT / "deploy/run_workers.py"  # What starts the ranks of a training, in tests too.
PATIENCE = 120  # Seconds. What takes longer hangs.


class Hangs(AssertionError):
    pass


class Ended(AssertionError):
    """A process ended before what was awaited of it."""


def read(path):
    """Empty where nothing is; so are the files in /proc of a process that ends just now."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def tail(path, lines=12):
    text = read(path).splitlines()[-lines:]
    return "".join(f"\n      {line}" for line in text) if text else " (empty)"


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def await_(what, condition, process=None, seconds=PATIENCE):
    """The first value of `condition()` that counts as true. Fails if `process` ends before, or after
    `seconds`."""
    begin = time.monotonic()
    while True:
        over = process is not None and process.poll() is not None  # Asked first: its last words count.
        value = condition()
        if value:
            return value
        if over:
            raise Ended(f"process {process.pid} ended with code {process.returncode} before {what}")
        waited = time.monotonic() - begin
        if waited > seconds:
            raise Hangs(f"{what} did not come within {seconds} seconds")
        time.sleep(0.001 if waited < 1 else 0.02)


def start(words, output, error=None, environment=None, at_parents_death=signal.SIGKILL, group=False):
    """A process whose output is appended to these files, or to the first of them only. The kernel ends it
    with the thread that started it. With `group` it leads a process group, which `end_group` ends."""
    libc = ctypes.CDLL(None)
    pr_set_pdeathsig = 1
    with open(output, "ab") as out, open(error or output, "ab") as err:
        return subprocess.Popen(
            [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            env=os.environ | (environment or {}), start_new_session=group,
            preexec_fn=lambda: libc.prctl(pr_set_pdeathsig, int(at_parents_death)))


def stop(process, number=signal.SIGKILL):
    """Ends a process that was started here and waits for it."""
    if process.poll() is None:
        process.send_signal(number)
    return process.wait(PATIENCE)


def end_group(process):
    """Ends a process that was started with `group`, and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def state_of(pid):
    """Its letter in /proc ("T" is stopped); empty if it is gone."""
    stat = read(pathlib.Path("/proc", str(pid), "stat"))
    return stat.rpartition(")")[2].split()[0] if stat else ""


def children_of(pid):
    return [int(child) for child in read(pathlib.Path(f"/proc/{pid}/task/{pid}/children")).split()]


def has_ended(pid):
    """All its threads have, and with them its files are closed; whether or not its parent has asked for its code."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) <= 1 and state_of(pid) in ("Z", "X", "")
    except FileNotFoundError:
        return True


class HeldPort:
    """A port of the loopback that no other test is given, also while the process that listens there is started again."""

    def __init__(self):
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As the process that is to listen there.
        self.socket.bind(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.socket.getsockname()[1]

    def close(self):
        self.socket.close()


class Service:
    """A `ballastd` that listens. It keeps its log and its port file in `folder`; `self.address` is where
    it is reached."""

    def __init__(self, program, folder, *flags, listen="127.0.0.1:0", environment=None, seconds=PATIENCE, group=False):
        self.log = folder / "ballastd.log"
        self.port_file = folder / "port"
        self.words = [program, f"--port-file={self.port_file}", "--nostartup-benchmark", *flags]
        self.environment = environment
        self.group = group
        self.start(listen)
        try:
            self.address = await_("the service's address", lambda: read(self.port_file).strip(), self.process,
                                  seconds).split()[0]
        except AssertionError as error:
            self.stop()
            raise type(error)(f"{error}; it printed:{tail(self.log)}") from error

    def start(self, listen):
        """Also again, after its end, where it listened. Returns before it listens. listen: None where its
        configuration says it."""
        listens = [] if listen is None else [f"--listen={listen}"]
        self.process = start([*self.words, *listens], self.log, environment=self.environment, group=self.group)

    def stop(self, number=signal.SIGKILL):
        """Returns when the process that serves behind it has ended, too, which is a little later."""
        behind = []
        if self.process.poll() is None and number == signal.SIGKILL:
            self.process.send_signal(signal.SIGSTOP)  # So that it starts no other.
            await_("its stop", lambda: state_of(self.process.pid) in ("T", "Z"))
            behind = children_of(self.process.pid)
        code = stop(self.process, number)
        await_(f"the end of {behind}", lambda: all(map(has_ended, behind)))
        return code


@contextlib.contextmanager
def written_to_stderr():
    """What this process writes to file descriptor 2 meanwhile, its libraries included: a function of no arguments."""
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+b") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        said = []
        try:
            yield lambda: said[0]
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
