#!/bin/sh
# Plays the kills of the service's process for as long as it is told to: see README.md.
#   tests/kill/long.sh --minutes N [--seed S]
exec python3 -B "$(dirname "$0")/long_run.py" "$@"
