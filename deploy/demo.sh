#!/usr/bin/env bash
# The main job, end to end: a service, workers that train a GPT on real text with it, then the same
# training with a local optimizer, and the proof that both end with the same weights to the bit.
# Installs what is missing, builds, runs; needs a Debian 12 machine and nothing else.
set -euo pipefail
caller=$PWD # Relative paths are meant from there.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'END'
usage: deploy/demo.sh [flags]

  --text FILE        text to train on (default: the licences in /usr/share/common-licenses)
  --workers N        worker processes (default 2)
  --members N        services that hold the job together, at most one a worker (default 1)
  --steps N          optimizer steps (default 100)
  --micro-steps N    backward passes a step (default 2)
  --update MODE      wait or speculate: when the service updates (default: speculate)
  --shared-memory M  auto or never: whether workers share memory with the service (default: auto)
  --out DIR          where the results go (default: a new folder under out/)
  --listen ADDR      where the service listens (default 127.0.0.1:0, a free port; or unix:/path)

BALLAST_BIN_DIR=DIR uses the binaries in DIR and neither installs nor builds.
END
}

job=demo
text="" workers=2 members=1 steps=100 micro_steps=2 update=speculate shared_memory=auto out="" listen=127.0.0.1:0
needed_kib=65536 # Two copies of the weights, two of the curves, and room to spare.

scratch=""   # Logs and the port files; kept when the demo fails.
partial=""   # Results under way, on the file system of --out.
made=()      # --out and its parents, as far as they were not there before; the innermost first.
service_pids=() addresses=()
child_pid="" # The launcher of the workers.

fail() {
  local message=$*
  [[ -z $scratch ]] || message+=" (logs in $scratch)"
  echo "demo.sh: $message" >&2
  exit 1
}

# Stops process $1 if it still runs, insisting after ten seconds.
stop() {
  kill -TERM "$1" 2>/dev/null || return 0
  for _ in {1..100}; do
    kill -0 "$1" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL "$1" 2>/dev/null || true
}

cleanup() {
  local code=$?
  trap - EXIT INT TERM
  [[ -z $child_pid ]] || stop "$child_pid"
  local pid
  for pid in "${service_pids[@]}"; do stop "$pid"; done
  [[ -z $partial ]] || rm -rf "$partial"
  if ((code == 0 || code > 128)); then # A signal leaves no reason to look for.
    [[ -z $scratch ]] || rm -rf "$scratch"
  fi
  if ((code != 0 && ${#made[@]} > 0)); then
    rmdir "${made[@]}" 2>/dev/null || true
  fi
  exit "$code"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The last line that was written to the files $@, for an error message.
last_words() {
  cat "$@" 2>/dev/null | grep -v '^[[:space:]]*$' | tail -n 1 || true
}

# $1 as seen from the caller's directory.
from_caller() {
  if [[ $1 == /* ]]; then echo "$1"; else echo "$caller/$1"; fi
}

parse_flags() {
  local flag value
  while (($# > 0)); do
    flag=${1%%=*}
    case $flag in
      --help | -h)
        usage
        exit 0
        ;;
      --text | --workers | --members | --steps | --micro-steps | --update | --shared-memory | --out | --listen) ;;
      *) fail "unknown flag '$1'; see deploy/demo.sh --help" ;;
    esac
    if [[ $1 == *=* ]]; then
      value=${1#*=}
      shift
    else
      (($# >= 2)) || fail "$flag needs a value; see deploy/demo.sh --help"
      value=$2
      shift 2
    fi
    case $flag in
      --text) text=${value:+$(from_caller "$value")} ;;
      --workers) workers=$value ;;
      --members) members=$value ;;
      --steps) steps=$value ;;
      --micro-steps) micro_steps=$value ;;
      --update) update=$value ;;
      --shared-memory) shared_memory=$value ;;
      --out) out=${value:+$(from_caller "$value")} ;;
      --listen) listen=$value ;;
    esac
  done
}

check_number() { # FLAG VALUE LARGEST
  if ! [[ $2 =~ ^[1-9][0-9]{0,8}$ ]] || (($2 > $3)); then
    fail "$1 is '$2', expected a whole number from 1 to $3"
  fi
}

check_flags() {
  check_number --workers "$workers" 64
  check_number --members "$members" "$workers"
  ((members == 1)) || [[ $listen == *:0 ]] ||
    fail "--listen is '$listen', which $members services cannot share; leave it out"
  check_number --steps "$steps" 1000000
  check_number --micro-steps "$micro_steps" 4096
  [[ $update == wait || $update == speculate ]] ||
    fail "--update is '$update', expected wait or speculate"
  [[ $shared_memory == auto || $shared_memory == never ]] ||
    fail "--shared-memory is '$shared_memory', expected auto or never"
  if [[ -n $text ]]; then
    [[ -e $text ]] || fail "--text $text does not exist; name a file with text to train on"
    [[ -r $text ]] || fail "--text $text cannot be read; allow it, or name another file"
    [[ -d $text || -s $text ]] || fail "--text $text is empty; name a file with text to train on"
  fi
}

prepare_folders() {
  local available_kib
  [[ -n $out ]] || out=out/demo-$(date +%Y%m%d-%H%M%S)-$$
  # What lies there is replaced by the demo's results at its end, so it has to be an earlier demo's.
  if [[ -e $out && ! -e $out/summary.json ]]; then
    [[ -d $out && -z $(ls -A "$out") ]] ||
      fail "$out is there and is not a demo's results; choose a new folder with --out"
  fi
  local folder=$out
  while [[ ! -e $folder ]]; do
    made+=("$folder")
    folder=$(dirname "$folder")
  done
  mkdir -p "$out" 2>/dev/null || fail "cannot make $out; choose another folder with --out"
  out=$(cd "$out" && pwd)
  available_kib=$(df --output=avail -k "$out" | tail -n 1)
  ((available_kib >= needed_kib)) ||
    fail "$out has $((available_kib / 1024)) MiB free, the demo needs $((needed_kib / 1024)); make" \
      "room or choose another folder with --out"
  partial=$(mktemp -d "$out/.partial-XXXXXX" 2>/dev/null) ||
    fail "cannot write to $out; choose another folder with --out"
  scratch=$(mktemp -d "${TMPDIR:-/tmp}/ballast-demo-XXXXXX" 2>/dev/null) ||
    fail "cannot write to ${TMPDIR:-/tmp}; set TMPDIR to a folder with room"
}

build() {
  if [[ -n ${BALLAST_BIN_DIR:-} ]]; then
    bin=$(cd "$(from_caller "$BALLAST_BIN_DIR")" 2>/dev/null && pwd) || fail "no folder BALLAST_BIN_DIR=$BALLAST_BIN_DIR"
    return
  fi
  deploy/install_packages.sh || fail "the packages are not installed; the line above says why"
  cmake --preset release --log-level=WARNING >"$scratch/configure.log" 2>&1 ||
    fail "cmake failed: $(grep -m1 -A1 'Error' "$scratch/configure.log" | tr -s '\n ' ' ')"
  cmake --build --preset release --parallel "$(nproc)" --target ballastd ballast ballast-worker ||
    fail "the build failed; the lines above say where"
  bin=$PWD/build/release/bin
}

# start_service NAME: whose log is NAME.log.
start_service() {
  local name=$1 code=0 address
  "$bin/ballastd" --listen "$listen" --port-file "$scratch/$name.address" --log-level warning \
    >"$scratch/$name.log" 2>&1 &
  local pid=$!
  service_pids+=("$pid")
  for _ in {1..600}; do
    if read -r address 2>/dev/null <"$scratch/$name.address"; then
      addresses+=("$address")
      echo "service   $address, process $pid" \
        "(look in: ${bin#"$PWD"/}/ballast job $job --service $address)"
      return
    fi
    if ! kill -0 "$pid" 2>/dev/null; then
      wait "$pid" || code=$?
      unset "service_pids[-1]"
      fail "the service did not start: $(last_words "$scratch/$name.log")"
    fi
    sleep 0.05
  done
  fail "the service did not report its address within 30 seconds"
}

# Whether all services live.
services_live() {
  local pid
  for pid in "${service_pids[@]}"; do kill -0 "$pid" 2>/dev/null || return 1; done
}

# train NAME OUT FLAG...: all workers, to the end. In the background, so that bash handles a signal at once.
train() {
  local name=$1 out_dir=$2 code=0
  shift 2
  local flags=(--job "$job" --steps "$steps" --micro-steps "$micro_steps" --out "$out_dir" "$@")
  [[ -z $text ]] || flags+=(--text "$text")
  deploy/run_workers.py "$workers" "$scratch/$name" "$bin/ballast-worker" "${flags[@]}" \
    2>"$scratch/$name.err" &
  child_pid=$!
  # Bash would add a line of its own should the service be killed meanwhile.
  wait "$child_pid" 2>/dev/null || code=$?
  child_pid=""
  ((code != 0)) || return 0
  # One that has just been killed may not be gone yet. Here, too, Bash would add a line of its own.
  for _ in {1..20}; do
    services_live || fail "the service died during the training: $(last_words "$scratch"/ballastd*.log "$scratch/$name.err")"
    sleep 0.05 &
    wait "$!" 2>/dev/null || true
  done
  fail "training ($name) stopped: $(last_words "$scratch/$name.err")"
}

# ask NAME ARGUMENT...: a question to the service through the CLI, shown and kept in NAME.txt.
ask() {
  local name=$1
  shift
  echo
  echo "\$ ballast $*"
  "$bin/ballast" "$@" --service "${addresses[0]}" >"$partial/$name.txt" 2>"$scratch/cli.err" ||
    fail "ballast $* failed: $(last_words "$scratch/cli.err" "$partial/$name.txt")"
  cat "$partial/$name.txt"
}

# Stops the services as an operator would: first the job, then the processes, which then have nothing
# to lose and say so by their exit codes.
stop_services() {
  local pid code=0
  "$bin/ballast" close "$job" --force --service "${addresses[0]}" >/dev/null 2>"$scratch/cli.err" ||
    fail "ballast close $job failed: $(last_words "$scratch/cli.err")"
  for pid in "${service_pids[@]}"; do
    stop "$pid"
    wait "$pid" || code=$?
  done
  service_pids=()
  ((code == 0)) || fail "the service ended with exit code $code: $(last_words "$scratch"/ballastd*.log)"
}

publish() {
  local file
  rm -rf "$out/local" "$out/summary.json"
  for file in "$partial"/*; do
    [[ $file == */summary.json ]] || mv -f "$file" "$out/"
  done
  mv "$partial/summary.json" "$out/" # Last: where it is, all is.
}

parse_flags "$@"
check_flags
prepare_folders
build

echo "training  $workers workers, $steps steps of $micro_steps micro-steps, on ${text:-the licences that Debian has}"
for ((member = 0; member < members; ++member)); do start_service "ballastd$member"; done
train service "$partial" --service "$(IFS=,; echo "${addresses[*]}")" --optimizer=service --update "$update" \
  --shared-memory "$shared_memory"
echo
echo "the same  with the optimizer in the workers, by the scalar reference"
train local "$partial/local" --optimizer=local

verdict=0
proof=$(deploy/compare_runs.py --service "$partial" --local "$partial/local" \
  --summary "$partial/summary.json" 2>"$scratch/compare.err") || verdict=$?
((verdict == 0 || verdict == 3)) || fail "the runs cannot be compared: $(last_words "$scratch/compare.err")"

ask job job "$job"
ask groups groups "$job"
ask state state "$job" h.0.attn.c_attn.weight
stop_services

deploy/plot_loss.py --service "$partial/losses.csv" --local "$partial/local/losses.csv" \
  --out "$partial/loss.svg" --summary "$partial/summary.json" 2>"$scratch/plot.err" ||
  fail "the curve cannot be drawn: $(last_words "$scratch/plot.err")"
publish || fail "cannot write to $out; make room or choose another folder with --out"

echo
((verdict == 0)) || fail "$proof; both runs are in $out"
echo "$proof"
echo "results   $out: loss.svg, summary.json, losses.csv, weights.bin, local/"
