"""Holds UpdateByRule on every instruction set to the NumPy model, bit for bit (NaN as NaN).

    /usr/bin/python3 numpy_adam_test.py path/to/run_adam    (Debian: python3-numpy)
"""

import itertools
import struct
import subprocess
import sys

try:
    import numpy as np
except ImportError:
    sys.exit("numpy is missing: install python3-numpy")

import numpy_adam

DTYPES = ("bf16", "fp16", "fp32")  # In the order of enum DType.
SPECIAL = np.array(
    [0.0, 1.0, 2.0**-149, 2.0**-126, 2.0**-126 - 2.0**-149, 2.0**-126 + 2.0**-149, 1.5 * 2.0**-126,
     2.0**-125, 2.0**-63, 2.0**-63 * (1 + 2.0**-23), 2.0**-24, 2.0**-25, 65504.0, 65520.0,
     3.3895314e38, 3.4028235e38, np.inf, np.nan],
    dtype=np.float32,
)  # fmt: skip


def random_values(random, elements):
    ordinary = np.ldexp(random.uniform(-1, 1, elements), random.integers(-30, 10, elements))
    special = random.choice(SPECIAL, elements) * random.choice(np.array([1, -1], np.float32), elements)
    return np.where(random.random(elements) < 0.25, special, ordinary.astype(np.float32))


def encode(x, dtype):
    if dtype == "bf16":
        return numpy_adam.to_bfloat16(x)
    return numpy_adam.to_float16(x) if dtype == "fp16" else x


def decode(x, dtype):
    if dtype == "bf16":
        return numpy_adam.from_bfloat16(x)
    return numpy_adam.from_float16(x) if dtype == "fp16" else x


def make_cases():
    random = np.random.default_rng(1)
    flags = itertools.product((False, True), repeat=4)
    options = itertools.product(flags, (0.0, 0.1), DTYPES, DTYPES)
    for (decoupled, bias_correction, amsgrad, maximize), weight_decay, dtype, shard_dtype in options:
        elements = int(random.integers(1, 700))
        planes = [random_values(random, elements) for _ in range(5)]
        yield dict(
            lr=float(random.choice([1e-3, 0.1, 1e-45])),
            beta1=float(random.choice([0.9, 0.0, 0.99999])),
            beta2=float(random.choice([0.999, 0.95, 0.0])),
            eps=float(random.choice([1e-8, 1e-15, 0.0, 1e-40])),
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled,
            bias_correction=bias_correction,
            amsgrad=amsgrad,
            maximize=maximize,
            update_count=int(random.integers(1, 2000)),
            multiplier=np.float32(random.choice([1.0, 0.37, 2.0**-16, 3.0, 1e-40])),
            gradient_dtype=dtype,
            shard_dtype=shard_dtype,
            gradient=encode(planes[0], dtype),
            state=[planes[1], planes[2], np.abs(planes[3]), np.abs(planes[4])],
        )


def to_bytes(case):
    header = struct.pack(
        "<5d4B2Bxx2qf4x",
        *(case[key] for key in ("lr", "beta1", "beta2", "eps", "weight_decay")),
        *(case[key] for key in ("decoupled_weight_decay", "bias_correction", "amsgrad", "maximize")),
        DTYPES.index(case["gradient_dtype"]),
        DTYPES.index(case["shard_dtype"]),
        case["update_count"],
        len(case["gradient"]),
        case["multiplier"],
    )
    return header + case["gradient"].tobytes() + b"".join(plane.tobytes() for plane in case["state"])


def expect_same(what, actual, expected):
    if actual.dtype == np.uint16:
        raise TypeError("decode first")
    differs = (actual.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(actual) & np.isnan(expected))
    if differs.any():
        i = int(np.argmax(differs))
        sys.exit(f"{what}, element {i}: {actual[i]!r}, not {expected[i]!r} ({int(differs.sum())} differ)")


def check(target, case, output, offset):
    """Compares one case and returns the offset of the next."""
    elements = len(case["gradient"])

    def take(dtype):
        nonlocal offset
        array = np.frombuffer(output, dtype, elements, offset)
        offset += array.nbytes
        return array

    old = case["state"]
    gradient = decode(case["gradient"], case["gradient_dtype"])
    with np.errstate(all="ignore"):
        expected = numpy_adam.update(
            case, case["update_count"], case["multiplier"], gradient, *old[:3], old[3] if case["amsgrad"] else None
        )
    settings = {key: value for key, value in case.items() if key not in ("gradient", "state")}
    planes = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    for plane, new in zip(planes[: 4 if case["amsgrad"] else 3], expected):
        expect_same(f"{target}, {plane} of {settings}", take(np.float32), new)
    dtype = case["shard_dtype"]
    shard = take(np.float32 if dtype == "fp32" else np.uint16)
    with np.errstate(all="ignore"):
        rounded = decode(encode(expected[0], dtype), dtype)
    expect_same(f"{target}, shard of {settings}", decode(shard, dtype), rounded)
    return offset


def main():
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} path/to/run_adam")
    run_adam = sys.argv[1]
    targets = subprocess.run([run_adam], check=True, capture_output=True, text=True).stdout.split()
    with np.errstate(all="ignore"):
        cases = list(make_cases())
    data = b"".join(to_bytes(case) for case in cases)
    for target in targets:
        output = subprocess.run([run_adam, target], input=data, check=True, capture_output=True).stdout
        offset = 0
        for case in cases:
            offset = check(target, case, output, offset)
        if offset != len(output):
            sys.exit(f"{target}: {len(output) - offset} bytes more than expected")
        print(f"{target}: {len(cases)} updates equal the model bit for bit")
    if not targets:
        sys.exit("run_adam named no instruction set")


if __name__ == "__main__":
    main()
