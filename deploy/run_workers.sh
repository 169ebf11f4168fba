#!/usr/bin/env bash
# Starts COUNT processes of one command on this host, with the variables that torchrun sets, and
# waits for all. When one fails the others are stopped, and its last words and exit code are passed
# on. Only rank 0's output is shown; LOG_DIR/rank-K.log holds the other ranks' output and
# LOG_DIR/rank-K.err what each wrote to stderr.
#
#   deploy/run_workers.sh COUNT LOG_DIR COMMAND [ARGUMENT...]
#
# MASTER_PORT is a free port unless it is set; should another process take it meanwhile, one more is
# tried. The host's cores are shared out by OMP_NUM_THREADS and
# OPENBLAS_NUM_THREADS unless they are set.
set -euo pipefail

die() {
  echo "run_workers.sh: $*" >&2
  exit 2
}

(($# >= 3)) || die "usage: run_workers.sh COUNT LOG_DIR COMMAND [ARGUMENT...]"
count=$1
log_dir=$2
shift 2
[[ $count =~ ^[1-9][0-9]{0,3}$ ]] || die "the number of workers must be 1 to 9999, not '$count'"
mkdir -p "$log_dir" || die "cannot make $log_dir; choose another folder for the logs"

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
export WORLD_SIZE=$count LOCAL_WORLD_SIZE=$count
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
tries_left=0
if [[ -z ${MASTER_PORT:-} ]]; then
  tries_left=1
  MASTER_PORT=$(free_port)
fi
export MASTER_PORT
threads=$(($(nproc) / count))
((threads > 0)) || threads=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-$OMP_NUM_THREADS}

declare -A rank_of=()

# Stops the workers that still run: asks first, insists after five seconds.
stop_all() {
  local pid
  for pid in "${!rank_of[@]}"; do
    kill -TERM "$pid" 2>/dev/null || true
  done
  for _ in {1..50}; do
    for pid in "${!rank_of[@]}"; do
      kill -0 "$pid" 2>/dev/null || unset "rank_of[$pid]"
    done
    ((${#rank_of[@]} > 0)) || return 0
    sleep 0.1
  done
  for pid in "${!rank_of[@]}"; do
    kill -KILL "$pid" 2>/dev/null || true
  done
}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start_all() {
  local rank
  for ((rank = 0; rank < count; ++rank)); do
    if ((rank == 0)); then
      RANK=$rank LOCAL_RANK=$rank "$@" 2>"$log_dir/rank-$rank.err" &
    else
      RANK=$rank LOCAL_RANK=$rank "$@" >"$log_dir/rank-$rank.log" 2>"$log_dir/rank-$rank.err" &
    fi
    rank_of[$!]=$rank
  done
}

# Whether rank 0 found the port taken, which may have happened between choosing and binding it.
port_was_taken() {
  grep -q 'choose another MASTER_PORT' "$log_dir/rank-0.err"
}

start_all "$@"
while ((${#rank_of[@]} > 0)); do
  code=0
  wait -n -p pid "${!rank_of[@]}" || code=$?
  rank=${rank_of[$pid]}
  unset "rank_of[$pid]"
  if ((code != 0)); then
    if ((tries_left > 0)) && port_was_taken; then
      tries_left=0
      stop_all
      MASTER_PORT=$(free_port)
      start_all "$@"
      continue
    fi
    last=$(grep -v '^[[:space:]]*$' "$log_dir/rank-$rank.err" | tail -n 1 || true)
    echo "rank $rank of $count failed: ${last:-it said nothing and exited with code $code}" >&2
    exit "$code"
  fi
done
