#!/bin/sh
# Plays the kills of the service's process, or of a job's members, for as long as it is told to: see README.md.
#   tests/kill/long.sh [--members] --minutes N [--seed S]
program=long_run.py
if [ "$1" = --members ]; then
  shift
  program=../cluster/campaign.py
fi
exec python3 -B "$(dirname "$0")/$program" "$@"
