#!/usr/bin/env python3
"""What a save costs the steps beside it, and how fast it writes against `dd` with as many streams.

    save_bench.py [--dir DIR] [--parameters N] [--rounds N] [--json FILE]

starts a ballastd that saves under DIR, which should be on the disk that is meant. Steps of `ballast-bench` with and
without saves one after another, and saves and dd by themselves, are measured in turn.
"""

import argparse
import array
import ctypes
import json
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "client/python")]

import processes  # noqa: E402

import ballast  # noqa: E402

BIN = pathlib.Path(os.environ.get("BALLAST_BIN_DIR", ROOT / "build/release/bin"))
STREAMS = 6  # Of a save, where it has as many files.


def steps(service, folder, arguments, saving):
    """The median seconds of a step, and what was saved meanwhile: (bytes, seconds)."""
    report = folder / "bench.json"
    log = folder / "bench.log"
    bench = processes.start([BIN / "ballast-bench", "worker", f"--service={service.address}", "--transport=unix",
                             f"--parameters={arguments.parameters}", f"--steps={arguments.steps}", "--warmup=3",
                             f"--json={report}"], log)
    saved = []

    def save():
        client = ballast.connect(service.address)
        while bench.poll() is None:
            job = next((job for job in client.jobs() if job["phase"] != "awaiting_weights"), None)
            begin = time.monotonic()
            try:
                if job is not None:
                    saved.append((client.save(job["name"], "beside")["bytes"], time.monotonic() - begin))
            except ballast.BallastError:  # The job has ended.
                pass

    saver = threading.Thread(target=save) if saving else None
    if saver:
        saver.start()
    if bench.wait() != 0:
        raise SystemExit(f"ballast-bench failed: {processes.last_line(processes.read(log))}")
    if saver:
        saver.join()
    figures = json.loads(report.read_text())["figures"]
    return figures["total_seconds"]["median"], saved


def dd(folder, size, streams):
    """Seconds."""
    count = size // streams >> 20
    begin = time.monotonic()
    writers = [processes.start(["dd", "if=/dev/zero", f"of={folder}/dd-{i}", "bs=1M", f"count={count}", "conv=fsync"],
                               os.devnull) for i in range(streams)]
    if any(writer.wait() for writer in writers):
        raise SystemExit("dd failed")
    seconds = time.monotonic() - begin
    for i in range(streams):
        (folder / f"dd-{i}").unlink()
    return seconds / (count * streams << 20)


def idle_job(service, parameters):
    """A job of the size that makes no steps; its session."""
    weights = (ctypes.c_float * parameters)()
    first = array.array("f", bytes(4 * parameters))
    job = ballast.Job("idle", [ballast.Group("g", ballast.HyperParameters())],
                      [ballast.Parameter(f"p{i}", (parameters // 64,)) for i in range(64)])
    session = ballast.Session(service.address, job, [ctypes.addressof(weights)] * 64, share_memory=False)
    session.upload_weights([first.buffer_info()[0]] * 64)
    return session


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=pathlib.Path, default=None)
    parser.add_argument("--parameters", type=int, default=40_000_000)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="save-bench-", dir=arguments.dir) as temporary:
        folder = pathlib.Path(temporary)
        service = processes.Service(BIN / "ballastd", folder, f"--checkpoint-dir={folder}/saved", "--checkpoint-keep-asked=1",
                                    listen=f"unix:{folder}/socket")
        try:
            alone, beside, rates, dd_rates, written = [], [], [], [], []
            for _ in range(arguments.rounds):
                alone.append(steps(service, folder, arguments, saving=False)[0])
                seconds, saved = steps(service, folder, arguments, saving=True)
                beside.append(seconds)
                written += [size / took for size, took in saved]
            session = idle_job(service, arguments.parameters)
            client = ballast.connect(service.address)
            for _ in range(arguments.rounds):
                begin = time.monotonic()
                saved = client.save("idle")
                rates.append(saved["bytes"] / (time.monotonic() - begin))
                files = len(list(pathlib.Path(saved["directory"]).glob("*.safetensors")))
                dd_rates.append(1 / dd(folder, saved["bytes"], min(files, STREAMS)))
            session.close()
        finally:
            service.stop()
    ratios = {"step beside saves / step": statistics.median(b / a for a, b in zip(alone, beside)),
              "save / dd": statistics.median(a / b for a, b in zip(rates, dd_rates))}
    figures = {"step_seconds": alone, "step_beside_saves_seconds": beside, "save_bytes_per_second": rates,
               "save_beside_steps_bytes_per_second": written, "dd_bytes_per_second": dd_rates}
    for name, values in figures.items():
        print(f"{name:36} " + (f"median {statistics.median(values):.4g}, {min(values):.4g} to {max(values):.4g}, of "
                               f"{len(values)}" if values else "none"))
    for name, value in ratios.items():
        print(f"{name:36} {value:.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"name": "save_bench", "ratios": ratios, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
