#!/usr/bin/env bash
# Runs all benchmarks and puts their figures together:
#
#   tests/bench/run.sh [--short] [--no-torch] --out DIR
#
# DIR/report.md, DIR/bench.json, DIR/{step,overlap,growth}.svg, and each program's figures and log in
# DIR/raw. The full run takes under fifteen minutes, the short one under three, once everything is
# built. Nothing else should run meanwhile. --no-torch leaves the comparison with PyTorch out, for which
# Debian's python3-torch, which is large, is installed otherwise. BALLAST_BIN_DIR=DIR builds nothing and
# takes the programs from there.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
# Debian's, for which python3-torch is.
python=/usr/bin/python3

die() {
  echo "run.sh: $*" >&2
  exit 1
}

size=() torch=1 out=
while (($# > 0)); do
  case $1 in
    --short) size=(--short) ;;
    --no-torch) torch=0 ;;
    --out) (($# > 1)) || die "--out needs a folder" && out=$2 && shift ;;
    --out=*) out=${1#--out=} ;;
    *) die "unknown argument '$1'; expected [--short] [--no-torch] --out DIR" ;;
  esac
  shift
done
[[ -n $out ]] || die "where to? give --out DIR"
mkdir -p "$out/raw" 2>/dev/null || die "cannot make $out/raw"
out=$(cd "$out" && pwd)
raw=$out/raw
# Nothing of an earlier run may pass for this one's.
rm -f "$raw"/*.json "$raw"/*.log "$out"/{bench.json,report.md,step.svg,overlap.svg,growth.svg}

if [[ -n ${BALLAST_BIN_DIR:-} ]]; then
  bin=$BALLAST_BIN_DIR
else
  bin=$root/build/release/bin
  (cd "$root" && cmake --preset release --log-level=WARNING &&
    cmake --build --preset release --parallel "$(nproc)" --target bench) >"$raw/build.log" 2>&1 ||
    die "the build failed: $(tail -n1 "$raw/build.log"); all of it in $raw/build.log"
fi

if ((torch)) && ! $python -c 'import torch' 2>/dev/null; then
  as_root=()
  ((EUID == 0)) || as_root=(sudo)
  echo "installing python3-torch for the comparison; --no-torch does without"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends \
    install python3-torch >"$raw/torch_install.log" 2>&1 ||
    die "python3-torch could not be installed ($raw/torch_install.log); run with --no-torch"
fi

# part NAME COMMAND...: runs a benchmark, says how long it took.
part() {
  local name=$1 begun=$SECONDS
  shift
  echo "$name ..."
  "$@" >"$raw/$name.log" 2>&1 ||
    die "$name failed: $(tail -n1 "$raw/$name.log"); all of it in $raw/$name.log"
  echo "$name: $((SECONDS - begun)) s"
}

started=$SECONDS
$python "$here/report.py" --machine "$raw/machine.json"
part kernel "$bin/kernel_bench" "${size[@]}" --json "$raw/kernel.json"
((!torch)) || part torch_adamw $python "$here/torch_adamw.py" "${size[@]}" --json "$raw/torch_adamw.json"
part wire "$bin/wire_bench" "${size[@]}" --json "$raw/wire.json"
[[ ! -x $bin/trace_bench ]] || part trace "$bin/trace_bench" "${size[@]}" --json "$raw/trace.json"
for sweep in step overlap growth; do
  part $sweep $python -B "$here/sweeps.py" $sweep "${size[@]}" --bin "$bin" --out "$raw/$sweep.json"
done
$python -B "$here/report.py" --out "$out"
$python -B "$here/plot.py" --out "$out"
echo "$out/report.md and bench.json after $((SECONDS - started)) s:"
grep '^| ratio' "$out/report.md"
