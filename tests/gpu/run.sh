#!/usr/bin/env bash
# All that only a machine with a GPU can show, in one command and under eight minutes: the tests on the
# GPU, the kernels under compute-sanitizer, training through the service against the local optimizer,
# two ranks on one GPU against one, and the benchmark.
#
#   tests/gpu/run.sh [--bin DIR] [--out DIR]
#
# --bin: the folder of the programs, or the build folder above it (default: bin beside this tree's
# tests, as in the bundle, or build/release). --out: where gpu.json and the logs go (default: out/gpu).
# Needs Python 3 and nothing of ours; looks for cuBLASLt and NCCL in LD_LIBRARY_PATH, CUDA_HOME,
# /usr/local/cuda and Python's own packages. Exits with 0 if all is well, 1 if something failed, 77
# where there is no GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

command -v python3 >/dev/null || {
  echo "run.sh: there is no python3; install one" >&2
  exit 1
}
exec python3 -B "$root/tests/gpu/prove.py" "$@"
