#!/usr/bin/env bash
# Installs the Debian 12 packages that Ballast is built, tested and shown with, as far as they are
# missing. Where nothing is missing it calls no package manager and needs neither root nor network.
#
#   deploy/install_packages.sh            install what is missing
#   deploy/install_packages.sh --missing  only name what is missing
set -euo pipefail

packages=(
  # To build. clang brings the C++ library's headers with it.
  git cmake ninja-build clang libclang-rt-14-dev lld llvm pkg-config ccache libc6-dev libstdc++-12-dev
  libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler
  libabsl-dev libc-ares-dev libre2-dev libssl-dev zlib1g-dev
  libtbb-dev libhwloc-dev libhwy-dev libdeflate-dev libspdlog-dev nlohmann-json3-dev libcli11-dev
  prometheus-cpp-dev libcpp-httplib-dev
  libgloo-dev libopenblas-pthread-dev
  # For cpack, which makes the Debian packages.
  dpkg-dev file
  # To test. PyTorch is not among them: tests/run.sh puts it into an environment of its own.
  libgtest-dev libgmock-dev openssl python3 python3-numpy python3-matplotlib python3-venv python3-pip python3-grpcio
  prometheus chromium chromium-driver
  iproute2 # For ip, with which tests make hosts.
  systemd # For systemd-analyze, which looks at the unit.
)

die() {
  echo "install_packages.sh: $*" >&2
  exit 1
}

case "${1:-}" in
  "" | --missing) ;;
  *) die "unknown argument '$1'; expected --missing or nothing" ;;
esac

command -v dpkg-query >/dev/null ||
  die "this is not Debian; install by hand what stands for: ${packages[*]}"

missing=()
for package in "${packages[@]}"; do
  state=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $state == installed ]] || missing+=("$package")
done

if [[ ${1:-} == --missing ]]; then
  ((${#missing[@]} == 0)) || printf '%s\n' "${missing[@]}"
  exit 0
fi
((${#missing[@]} > 0)) || exit 0

release=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release 2>/dev/null || true)
[[ $release == bookworm ]] ||
  die "this is '${release:-unknown}', not Debian 12 (bookworm); install by hand: ${missing[*]}"

as_root=()
if ((EUID != 0)); then
  command -v sudo >/dev/null ||
    die "not root and no sudo; as root run: apt-get install ${missing[*]}"
  as_root=(sudo)
fi

apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o Acquire::Retries=3 \
    -o DPkg::Lock::Timeout=300 "$@"
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "install_packages.sh: installing ${#missing[@]} packages: ${missing[*]}"
# apt-get update exits 0 when no mirror answers, so its warnings decide nothing: the install does.
apt update >"$log" 2>&1 ||
  die "apt-get update failed ($(grep -m1 '^E:' "$log" || tail -n1 "$log")); is there a network and a mirror?"
if ! apt install --yes --no-install-recommends "${missing[@]}" >"$log" 2>&1; then
  die "apt-get install failed ($(grep -m1 '^E:' "$log" || tail -n1 "$log")); is there a network and a mirror?"
fi
