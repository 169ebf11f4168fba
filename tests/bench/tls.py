#!/usr/bin/env python3
"""What TLS costs: steps of `ballast-bench worker` over plain TCP and over TLS, in turn, to one service each.

    tls.py --bin DIR [--parameters N] [--steps N] [--rounds N] [--json FILE]

Prints, of each: gigabytes of payload a second, both ways together, and processor seconds of worker and service
together for each of them. Worker and service share the machine, so where there are few processors the first
figure falls as the second one rises. TLS is 1.3 with what the two agree on, AES-GCM where processors have it.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from certificates import Guarded  # noqa: E402
from processes import Service  # noqa: E402

RUN_LIMIT_SECONDS = 300


def cpu_seconds(pid: int) -> float:
    fields = pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(words, service: Service, environment: dict[str, str], out: pathlib.Path) -> tuple[float, float]:
    """(GB/s, CPU-s/GB) of one run."""
    before = cpu_seconds(service.process.pid)
    done = subprocess.run(
        [words.bin / "ballast-bench", "worker", f"--service={service.address}", "--transport=tcp",
         f"--parameters={words.parameters}",
         f"--steps={words.steps}", f"--json={out}"],
        env=os.environ | environment, capture_output=True, text=True, timeout=RUN_LIMIT_SECONDS, check=False)
    if done.returncode != 0:
        sys.exit(f"tls.py: {(done.stderr.strip().splitlines() or ['ballast-bench said nothing'])[-1]}")
    info = json.loads(out.read_text())["info"]
    gigabytes = (info["payload_bytes_up"] + info["payload_bytes_down"]) * 1e-9
    used = info["worker_cpu_seconds"] + cpu_seconds(service.process.pid) - before
    return gigabytes / info["wall_seconds"], used / gigabytes


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tls-bench-") as name:
        folder = pathlib.Path(name)
        guarded = Guarded(folder)
        services, found = {}, {}
        try:
            for kind, flags in (("plain", []), ("tls", guarded.flags)):
                (folder / kind).mkdir()
                services[kind] = Service(words.bin / "ballastd", folder / kind, "--holder=none", "--shared-memory=never", *flags)
            for _ in range(words.rounds):
                for kind, service in services.items():
                    environment = guarded.environment if kind == "tls" else {}
                    found.setdefault(kind, []).append(run(words, service, environment, folder / "run.json"))
        finally:
            for service in services.values():
                service.stop()
    figures = {kind: {"gb_per_second": statistics.median(rate for rate, _ in runs),
                      "cpu_seconds_per_gb": statistics.median(used for _, used in runs)}
               for kind, runs in found.items()}
    for kind, of in figures.items():
        print(f"{kind:6} {of['gb_per_second']:.3f} GB/s  {of['cpu_seconds_per_gb']:.2f} CPU-s/GB")
    print(f"TLS moves {figures['tls']['gb_per_second'] / figures['plain']['gb_per_second']:.2f} times as much a second, "
          f"with {figures['tls']['cpu_seconds_per_gb'] / figures['plain']['cpu_seconds_per_gb']:.2f} times the processor")
    if words.json:
        words.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
