#!/usr/bin/env python3
"""How long the service is away when its process is killed, and with what, by the size of its state.

    recovery_bench.py [--gigabytes 1,2,4] [--rounds N] [--json FILE] [--svg FILE]

kills the process of a ballastd with one job, between steps and in updates, in turn. The parts of what follows:

    noticed     from the kill to the next process: the system takes the old one's memory apart meanwhile
    taken over  to the log's line that the job is back: started, memory mapped, a decided step carried out
    listening   to the line that it listens
    streams     to the client's line that its stream is back

The last lines say how much longer each terabyte makes it. --svg draws them (recovery_picture.py); --json keeps them, for another picture later.
"""

import argparse
import ctypes
import datetime
import json
import os
import pathlib
import re
import signal
import statistics
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/bench"), str(ROOT / "client/python"),
                str(ROOT / "deploy")]

import processes  # noqa: E402
import recovery_picture  # noqa: E402
from processes import await_, read  # noqa: E402
from whole_file import write_whole  # noqa: E402

import ballast  # noqa: E402

BIN = pathlib.Path(os.environ.get("BALLAST_BIN_DIR", ROOT / "build/release/bin"))
TENSORS = 64
STATE_BYTES = 12  # A parameter.
PARTS = tuple(recovery_picture.PARTS)
LINE = re.compile(r"^\[(\d+-\d+-\d+ \d+:\d+:\d+\.\d+)\] (.*)$", re.MULTILINE)


def said_at(text, words, after):
    """When, in the log, for the first time after that; None: it has not been said."""
    for time_of, line in LINE.findall(text):
        at = datetime.datetime.strptime(time_of, "%Y-%m-%d %H:%M:%S.%f").timestamp()
        if words in line and at >= after - 0.001:
            return at
    return None


def child_of(parent):
    children = read(pathlib.Path(f"/proc/{parent}/task/{parent}/children")).split()
    return int(children[0]) if children else 0


class Bench:
    def __init__(self, folder, gigabytes, client_log):
        self.client_log = client_log
        elements = int(gigabytes * 1e9 / STATE_BYTES / TENSORS)
        self.service = processes.Service(BIN / "ballastd", folder, f"--memory-limit={int(3 * gigabytes + 1)}GiB",
                                         "--most-deaths=0", listen=f"unix:{folder}/socket")
        # All of a size in one place: what they say does not matter.
        self.weights, self.gradient = (ctypes.create_string_buffer(2 * elements) for _ in range(2))
        first = (ctypes.c_float * elements)()
        group = ballast.Group("g", ballast.HyperParameters(lr=0.01), wire_dtype="bfloat16", return_dtype="bfloat16")
        job = ballast.Job("bench", [group], [ballast.Parameter(f"p{i}", (elements,)) for i in range(TENSORS)])
        self.session = ballast.Session(self.service.address, job, [ctypes.addressof(self.weights)] * TENSORS,
                                       share_memory=False)
        self.session.upload_weights([ctypes.addressof(first)] * TENSORS)
        self.session.read_weights()
        self.update_seconds = min(self.step() for _ in range(3))

    def begin(self):
        self.session.begin_step()
        self.session.push_gradients([ctypes.addressof(self.gradient)] * TENSORS, final=True)

    def end(self):
        """Seconds."""
        begin = time.monotonic()
        self.session.seal_and_vote()
        self.session.receive_weights()
        return time.monotonic() - begin

    def step(self):
        self.begin()
        return self.end()

    def death(self, fraction):
        """Of the process, after so much of an update's time; None: between steps. Seconds by part, and whether it
        was in an update."""
        before, log = child_of(self.service.process.pid), self.service.log
        step = None
        if fraction is not None:
            self.begin()
            step = threading.Thread(target=self.end)
            step.start()
            time.sleep(fraction * self.update_seconds)
        at = time.time()
        os.kill(before, signal.SIGKILL)
        await_("the next process", lambda: child_of(self.service.process.pid) not in (0, before))
        times = [at, time.time()]
        for text, words in ((log, "after a death: job"), (log, "ballastd listening on"),
                            (self.client_log, "the stream is back")):
            times.append(await_(words, lambda: said_at(read(text), words, at)))  # pylint: disable=cell-var-from-loop
        if step:
            step.join()
        story = [line for _, line in LINE.findall(read(log)) if "after a death: job" in line][-1]
        self.step()
        return {part: max(0.0, b - a) for part, a, b in zip(PARTS, times, times[1:])}, "carried out" in story


def machine_line():
    model = re.search(r"^model name\s*: (.*)$", read(pathlib.Path("/proc/cpuinfo")), re.MULTILINE)
    return f"{model[1] if model else os.uname().machine}, {os.cpu_count()} cores, Linux {'.'.join(os.uname().release.split('.')[:2])}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--svg", type=pathlib.Path)
    flags = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory(prefix="recovery-bench-") as name:
        client_log = pathlib.Path(name, "client.log")
        os.dup2(os.open(client_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        print(f"{'state':>6}  {'killed':14}  deaths  " + "".join(f"{part:>12}" for part in PARTS) + f"{'together':>12}")
        for gigabytes in map(float, flags.gigabytes.split(",")):
            folder = pathlib.Path(name, f"{gigabytes:g}")
            folder.mkdir()
            bench = Bench(folder, gigabytes, client_log)
            try:
                deaths = {"between steps": [], "in an update": []}
                for number in range(flags.rounds):
                    for fraction in (None, (number + 1) / (flags.rounds + 2)):
                        parts, in_update = bench.death(fraction)
                        if in_update or fraction is None:
                            deaths["in an update" if in_update else "between steps"].append(parts)
                bench.session.close()
            finally:
                bench.service.stop()
            for kind, all_parts in deaths.items():
                if not all_parts:
                    continue
                median = {part: statistics.median(parts[part] for parts in all_parts) for part in PARTS}
                median["together"] = statistics.median(sum(parts.values()) for parts in all_parts)
                figures[f"{gigabytes:g} GB, {kind}"] = median
                print(f"{gigabytes:4g} GB  {kind:14}  {len(all_parts):6}  "
                      + "".join(f"{seconds:10.3f} s" for seconds in median.values()), flush=True)
    for kind, rates in recovery_picture.seconds_per_terabyte(figures).items():
        print(f"a TB more  {kind:14}        " + "".join(f"{seconds:10.0f} s" for seconds in rates.values()), flush=True)
    if flags.json:
        flags.json.write_text(json.dumps({"name": "recovery_bench", "machine": machine_line(), "figures": figures},
                                         indent=1))
    if flags.svg:
        write_whole(flags.svg, recovery_picture.draw(figures, f"One job over a unix socket; medians. {machine_line()}"))


if __name__ == "__main__":
    main()
