#!/usr/bin/env bash
# Runs all benchmarks and puts their figures together:
#
#   tests/bench/run.sh [--short] [--no-torch] --out DIR
#
# DIR/report.md, DIR/bench.json, DIR/{step,overlap,growth}.svg, and each program's figures and log in
# DIR/raw. The full run takes under fifteen minutes, the short one under three, once everything is
# built; a part that takes ten minutes is ended, and the run fails. Nothing else should run meanwhile. --no-torch leaves the comparison with PyTorch out, for which
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

# bounded SECONDS COMMAND...: in a process group of its own, which is ended after so long, or with this
# script.
bounded() {
  local seconds=$1 code=0
  shift
  timeout -k 10 "$seconds" "$@" &
  wait $! || code=$?
  return $code
}
end_child() {
  local children child
  children=$(jobs -p)  # Also of one that has begun just now, whose number nobody has taken yet.
  # timeout(1) leads a group of all that it started. It hands the signal on, but not if it comes in the instant
  # of its fork; before it leads the group, it just ends.
  for child in $children; do
    { kill -TERM "$child" || true; kill -TERM -- "-$child" || true; wait "$child" || true; } 2>/dev/null
  done
}
trap end_child EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

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
  ((EUID == 0)) || as_root=(sudo -n)
  echo "installing python3-torch for the comparison; --no-torch does without"
  apt_get() {
    bounded 900 "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get -q -y -o DPkg::Lock::Timeout=60 "$@" >>"$raw/torch_install.log" 2>&1
  }
  { apt_get update && apt_get --no-install-recommends install python3-torch; } ||
    die "python3-torch could not be installed ($raw/torch_install.log); run with --no-torch"
fi

# part NAME COMMAND...: runs a benchmark, says how long it took and what it skipped.
part() {
  local name=$1 begun=$SECONDS code=0
  shift
  echo "$name ..."
  bounded 600 "$@" >"$raw/$name.log" 2>&1 || code=$?
  ((code != 124 && code != 137)) || die "$name was ended after ten minutes; $raw/$name.log"
  ((code == 0)) || die "$name failed: $(tail -n1 "$raw/$name.log"); all of it in $raw/$name.log"
  echo "$name: $((SECONDS - begun)) s"
  sed -n "s/^skipped: /$name skipped: /p" "$raw/$name.log"
}
skip() {
  echo "$1 skipped: $2"
}

started=$SECONDS
$python "$here/report.py" --machine "$raw/machine.json"
part kernel "$bin/kernel_bench" "${size[@]}" --json "$raw/kernel.json"
if ((torch)); then
  # What cpu_optimizer_service/common/system/heap_settings.cc sets, and huge pages, which our arenas have.
  tunables=(MALLOC_MMAP_THRESHOLD_=$((32 << 20)) MALLOC_TRIM_THRESHOLD_=$((512 << 20))
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1)
  kernel=("$bin/kernel_bench" --only-kernel "${size[@]}" --json)
  adamw=($python "$here/torch_adamw.py" "${size[@]}" --json)
  part kernel_before_torch "${kernel[@]}" "$raw/kernel_before_torch.json"
  part torch_adamw "${adamw[@]}" "$raw/torch_adamw.json"
  part torch_adamw_tuned env "${tunables[@]}" "${adamw[@]}" "$raw/torch_adamw_tuned.json"
  part kernel_after_torch "${kernel[@]}" "$raw/kernel_after_torch.json"
else
  skip torch_adamw "--no-torch"
fi
part wire "$bin/wire_bench" "${size[@]}" --json "$raw/wire.json"
if ((${#size[@]} > 0)); then
  skip wire_apis "--short"
elif [[ -x $bin/wire_apis ]]; then
  part wire_apis "$bin/wire_apis" --json "$raw/wire_apis.json"
else
  skip wire_apis "no $bin/wire_apis"
fi
if [[ -x $bin/layout_bench ]]; then
  part layout "$bin/layout_bench" "${size[@]}" --json "$raw/layout.json"
else
  skip layout "no $bin/layout_bench"
fi
if [[ -x $bin/norm_bench ]]; then
  part norm "$bin/norm_bench" "${size[@]}" --json "$raw/norm.json"
else
  skip norm "no $bin/norm_bench"
fi
if [[ -x $bin/trace_bench ]]; then
  part trace "$bin/trace_bench" "${size[@]}" --json "$raw/trace.json"
else
  skip trace "no $bin/trace_bench"
fi
for sweep in step overlap growth; do
  part $sweep $python -B "$here/sweeps.py" $sweep "${size[@]}" --bin "$bin" --out "$raw/$sweep.json"
done
$python -B "$here/report.py" --out "$out"
$python -B "$here/plot.py" --out "$out"
echo "$out/report.md and bench.json after $((SECONDS - started)) s:"
grep '^| ratio' "$out/report.md"
