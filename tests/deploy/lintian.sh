#!/usr/bin/env bash
# lintian on the Debian packages of a build folder: no error and no warning that deploy/debian does not override with a
# reason. Not one of ctest's: it takes half a minute, and lintian, which nothing else needs.
#
#   tests/deploy/lintian.sh [BUILD]      default: build/release, where deploy/README.md builds the packages
set -euo pipefail
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${1:-$tree/build/release}

if ! command -v lintian >/dev/null; then
  echo "lintian.sh: SKIPPED: there is no lintian; apt-get install lintian" >&2
  exit 77
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
(cd "$build" && cpack -G DEB -B "$scratch" >"$scratch/log" 2>&1) || {
  tail -n3 "$scratch/log"
  echo "lintian.sh: cpack failed; build the target packages in $build" >&2
  exit 1
}
root=()
((EUID != 0)) || root=(--allow-root)
lintian "${root[@]}" --fail-on error,warning "$scratch"/*.deb
echo "lintian.sh: all packages are clean"
