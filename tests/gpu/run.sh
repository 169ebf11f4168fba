#!/usr/bin/env bash
# All that only a machine with a GPU can show, in one command and under eight minutes. What matters most
# comes first: the tests on the GPU, training through the service against the local optimizer, two ranks
# on one GPU against one, the benchmark, the kernels under compute-sanitizer. What the time does not
# suffice for is told as such, and can be run alone.
#
#   tests/gpu/run.sh [--bin DIR] [--out DIR] [--only NAME] [--memory-limit SIZE]
#   tests/gpu/run.sh --torch [--bin DIR] [--out DIR] [--only NAME] [--python PROGRAM]
#
# The second measures the PyTorch package, from the bundle's wheel, beside torch's own optimizers, in as much time:
# torch.json and torch-logs.tar.gz. It takes a Python with torch 2.11 and transformers.
#
# --bin: the folder of the programs, or the build folder above it (default: bin beside this tree's
# tests, as in the bundle, or build/release). --out: where gpu.json, logs.tar.gz and two timelines go
# (default: out/gpu).
# --only: the checks with NAME in their name, "memcheck" say. --memory-limit: what the service may take,
# 100GiB say, where the machine tells less than it has; gpt2-1.5B takes about 50 to speculate.
# Needs Python 3 and nothing of ours; looks for cuBLASLt, NCCL and compute-sanitizer in
# LD_LIBRARY_PATH and PATH, CUDA_HOME, /usr/local/cuda and Python's own packages.
# Exits with 0 if all is well, 1 if something failed, 2 if nothing failed but not all was run, 77 where
# there is no GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

command -v python3 >/dev/null || {
  echo "run.sh: there is no python3; install one" >&2
  exit 1
}
if [[ ${1-} == --torch ]]; then
  shift
  exec python3 -B "$root/tests/gpu/prove_torch.py" "$@"
fi
exec python3 -B "$root/tests/gpu/prove.py" "$@"
