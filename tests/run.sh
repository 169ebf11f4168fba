#!/usr/bin/env bash
# Installs what is missing, builds the release preset and runs its tests. Arguments go on to CTest:
#
#   tests/run.sh -L unit        only the tests with the label unit
#   tests/run.sh -R ledger -V   only those whose name matches, with all output
#
# Closes with CTest's summary and exits with its code. BALLAST_SKIP_INSTALL=1 installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ${BALLAST_SKIP_INSTALL:-0} != 1 ]]; then
  deploy/install_packages.sh
fi

jobs=$(nproc)
cmake --preset release --log-level=WARNING
cmake --build --preset release --parallel "$jobs"

parallel=(--parallel "$jobs")
for argument in "$@"; do
  case $argument in
    -j* | --parallel | --parallel=*) parallel=() ;;
  esac
done
exec ctest --preset release "${parallel[@]}" "$@"
