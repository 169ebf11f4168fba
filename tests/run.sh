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

# While the compilers run. What could not be installed is told, and what it was for is not tested.
torch=
if [[ ${BALLAST_SKIP_INSTALL:-0} != 1 ]]; then
  /usr/bin/python3 -B tests/client/python/torch_environment.py --make &
  torch=$!
fi

jobs=$(nproc)
cmake --preset release --log-level=WARNING
cmake --build --preset release --parallel "$jobs"

[[ -z $torch ]] || wait "$torch" || true

parallel=(--parallel "$((jobs + 1))")  # Many a test waits more than it computes.
for argument in "$@"; do
  case $argument in
    -j* | --parallel | --parallel=*) parallel=() ;;
  esac
done
exec ctest --preset release "${parallel[@]}" "$@"
