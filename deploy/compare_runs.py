#!/usr/bin/env python3
"""Compares the final weights of a run with the service with those of its local twin.

    compare_runs.py --service DIR --local DIR --summary DIR/summary.json

Each DIR has the weights.bin (bf16, all parameters in order) and worker.json of one run. Says in one line whether the weights
are the same to the bit and where they part first, and writes the summary of both runs. Exits with 0
if they are the same, with 3 if not, with another code if the runs cannot be compared.
"""

import argparse
import hashlib
import json
import pathlib
import struct
import sys

from whole_file import write_whole

BF16_BYTES = 2


def first_difference(a: bytes, b: bytes) -> int | None:
    """The first element in which two equally long arrays of bf16 differ."""
    if a == b:
        return None
    begin, size = 0, len(a)
    while size > BF16_BYTES:  # Halves the range that holds the first difference.
        half = size // (2 * BF16_BYTES) * BF16_BYTES
        if a[begin:begin + half] == b[begin:begin + half]:
            begin, size = begin + half, size - half
        else:
            size = half
    return begin // BF16_BYTES


def bf16(data: bytes, element: int) -> float:
    raw = data[element * BF16_BYTES:(element + 1) * BF16_BYTES]
    return struct.unpack("<f", b"\0\0" + raw)[0]


def place_of(element: int, tensors: list[dict]) -> str:
    """Names the parameter that holds `element` of weights.bin, and the element in it."""
    for tensor in tensors:
        if tensor["begin"] <= element < tensor["begin"] + tensor["elements"]:
            return f"{tensor['name']}, element {element - tensor['begin']} of {tensor['elements']}"
    return f"element {element} of weights.bin, which worker.json says nothing about"


def compare(service: bytes, local: bytes, tensors: list[dict]) -> tuple[bool, str]:
    if len(service) != len(local):
        return False, (f"the weights are NOT the same: {len(service)} bytes with the service, "
                       f"{len(local)} bytes with the local optimizer")
    element = first_difference(service, local)
    if element is None:
        return True, f"bit-identical: all {len(service) // BF16_BYTES:,} bf16 weights are the same"
    differing = sum(service[i:i + BF16_BYTES] != local[i:i + BF16_BYTES]
                    for i in range(0, len(service), BF16_BYTES))
    return False, (f"the weights are NOT the same: they part first in {place_of(element, tensors)}: "
                   f"{bf16(service, element)!r} with the service, {bf16(local, element)!r} with the "
                   f"local optimizer; {differing:,} of {len(service) // BF16_BYTES:,} differ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("--service", "--local", "--summary"):
        parser.add_argument(flag, required=True, type=pathlib.Path)
    flags = parser.parse_args()
    try:
        run = json.loads((flags.service / "worker.json").read_text())
        service = (flags.service / "weights.bin").read_bytes()
        local = (flags.local / "weights.bin").read_bytes()
        if run["coverage_complete_steps"] != run["steps"]:
            raise ValueError(f"the service counted complete gradients in {run['coverage_complete_steps']} of "
                             f"{run['steps']} steps; the job did other steps than this run's")
        identical, verdict = compare(service, local, run.get("tensors", []))
        summary = {name: run[name] for name in (
            "steps", "workers", "micro_steps", "parameters", "groups", "first_loss", "last_loss")}
        summary |= {
            "weights_sha256_service": hashlib.sha256(service).hexdigest(),
            "weights_sha256_local": hashlib.sha256(local).hexdigest(),
            "bit_identical": identical,
            "tokens_per_second": run["tokens_per_second"],
            "step_seconds_median": run["step_seconds_median"],
            "coverage_complete_steps": run["coverage_complete_steps"],
            "transport": run.get("transport"),
            "speculated_chunks": run["speculated_chunks"],
            "redone_chunks": run["redone_chunks"],
        }
        write_whole(flags.summary, json.dumps(summary, indent=2) + "\n")
    except KeyError as error:
        print(f"compare_runs.py: worker.json of the service run has no {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"compare_runs.py: {error}", file=sys.stderr)
        return 2
    print(verdict)
    return 0 if identical else 3


if __name__ == "__main__":
    sys.exit(main())
