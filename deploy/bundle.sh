#!/usr/bin/env bash
# Makes one archive of the programs with the shared libraries that they need, for machines that have
# none of our packages: x86-64 Linux with glibc 2.36 or newer. The GPU's driver, cuBLASLt and NCCL come
# from there. Unpack it anywhere; bin/ finds lib/ next to it.
#
#   deploy/bundle.sh --out DIR [--build DIR] [--wheel FILE]
#
# Writes DIR/ballast-VERSION-linux-x86_64.tar.gz, of at most 60 MiB. --build: a build folder whose
# programs are taken as they are; without it the release preset is built first. --wheel: the Python
# package's, which tests/gpu/run.sh --torch installs from the bundle.
set -euo pipefail
caller=$PWD # Relative paths are meant from there.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

limit_mib=${BALLAST_BUNDLE_MIB:-60}
scratch="" partial=""
fail() {
  echo "bundle.sh: $*" >&2
  exit 1
}
cleanup() {
  [[ -z $scratch ]] || rm -rf "$scratch"
  [[ -z $partial ]] || rm -f "$partial"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
source deploy/libraries.sh

from_caller() {
  if [[ $1 == /* ]]; then echo "$1"; else echo "$caller/$1"; fi
}

out="" build="" wheel=""
while (($# > 0)); do
  case $1 in
    --out | --build | --wheel)
      (($# > 1)) || fail "$1 needs a path"
      declare "${1#--}=$2"
      shift
      ;;
    --out=*) out=${1#--out=} ;;
    --build=*) build=${1#--build=} ;;
    --wheel=*) wheel=${1#--wheel=} ;;
    *) fail "unknown argument '$1'; expected --out DIR [--build DIR] [--wheel FILE]" ;;
  esac
  shift
done
[[ -n $out ]] || fail "where to? give --out DIR"
out=$(from_caller "$out")
mkdir -p "$out" 2>/dev/null || fail "cannot make $out; choose another --out"
out=$(cd "$out" && pwd)

if [[ -z $build ]]; then
  build=build/release
  deploy/install_packages.sh || fail "the packages are not installed; the line above says why"
  cmake --preset release --log-level=WARNING || fail "cmake failed; the lines above say why"
  cmake --build --preset release --parallel "$(nproc)" || fail "the build failed; the lines above say where"
else
  build=$(from_caller "$build")
fi

version=$(sed -n 's/^project(ballast VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
name=ballast-$version-linux-x86_64
scratch=$(mktemp -d "${TMPDIR:-/tmp}/ballast-bundle-XXXXXX")
tree=$scratch/$name
mkdir -p "$tree"/{bin,lib,deploy,licenses,tests/{gpu,support}}

programs=(bin/ballastd bin/ballast bin/ballast-worker)
if [[ -e $build/tests/gpu_tests ]]; then
  programs+=(bin/ballast-gpu-rate tests/gpu_tests)
else
  echo "bundle.sh: built without CUDA, so ballast-worker has --device=cpu only"
fi
for program in "${programs[@]}"; do
  [[ -x $build/$program ]] || fail "there is no $build/$program; build it, or name another --build"
  cp "$build/$program" "$tree/bin/"
done
cp deploy/{run_workers,compare_runs,whole_file}.py "$tree/deploy/"
cp tests/gpu/{run.sh,checks.py,prove.py,prove_torch.py,programs.py,torch_training.py} "$tree/tests/gpu/"
cp tests/support/processes.py "$tree/tests/support/"
cp LICENSE "$tree/"
if [[ -n $wheel ]]; then
  wheel=$(from_caller "$wheel")
  [[ -f $wheel && $wheel == *.whl ]] || fail "--wheel: there is no wheel $wheel; deploy/wheel.sh --out DIR makes one"
  mkdir "$tree/wheel"
  cp "$wheel" "$tree/wheel/"
fi

libraries_of "${programs[@]/#/$build/}"
for library in "${!libraries[@]}"; do
  cp --dereference "${libraries[$library]}" "$tree/lib/$library"
done
chmod u+w "$tree"/lib/* "$tree"/bin/*
strip --strip-unneeded "$tree"/lib/* "$tree"/bin/* || fail "strip failed; the lines above say why"

licenses_to "$tree/licenses"

archive=$out/$name.tar.gz
partial=$out/.$name.partial
tar --create --directory "$scratch" --sort=name --owner=0 --group=0 --numeric-owner "$name" |
  gzip -n >"$partial" || fail "cannot write to $out; make room, or choose another --out"
bytes=$(stat --format %s "$partial")
((bytes <= limit_mib << 20)) ||
  fail "the archive has $((bytes >> 20)) MiB, at most $limit_mib are allowed; see what grew:" \
    "$(cd "$tree" && find . -type f -printf '%s %p\n' | sort -rn | head -n 3 | tr '\n' ' ')"
mv "$partial" "$archive"
partial=""
echo "$archive: $((bytes >> 20)) MiB, ${#libraries[@]} libraries"
