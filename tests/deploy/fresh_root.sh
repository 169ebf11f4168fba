#!/usr/bin/env bash
# The Debian packages in a root that has never seen them, under a real systemd. Not one of ctest's: it needs root, a
# Debian mirror, debootstrap and systemd-container, and takes some minutes the first time, one or two with the same
# --root.
#
#   tests/deploy/fresh_root.sh --root DIR [--check package|slurm] [--build DIR] [--mirror URL]
#
# --root: a folder for the fresh root, made where there is none. What is done in it is done in a layer above and thrown
# away; only what apt-get downloaded is kept there. --check: fresh_root_package.sh, the service from its installation
# to its end; fresh_root_slurm.sh, deploy/slurm on a Slurm of one machine. --build: a build folder of which cpack makes
# the packages (default: build/release).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
  echo "fresh_root.sh: $*" >&2
  exit 1
}

root="" check=package build=$here/../../build/release mirror=http://deb.debian.org/debian
while (($# > 0)); do
  case $1 in
    --root | --check | --build | --mirror)
      (($# > 1)) || fail "$1 needs a value"
      declare "${1#--}=$2"
      shift
      ;;
    *) fail "unknown argument '$1'; expected --root DIR [--check package|slurm] [--build DIR] [--mirror URL]" ;;
  esac
  shift
done
[[ -n $root ]] || fail "where? give --root DIR"
((EUID == 0)) || fail "this needs root"
for program in debootstrap systemd-nspawn cpack; do
  command -v "$program" >/dev/null || fail "there is no $program; apt-get install debootstrap systemd-container cmake"
done
packages=(ballastd ballast ballast-worker)
network=--private-network
case $check in
  package) others=(systemd systemd-sysv openssl) ;;
  slurm)
    others=(systemd systemd-sysv slurm-wlm munge iproute2)
    network=--network-veth # Slurm binds only where there is more than a loopback.
    ;;
  *) fail "--check is package or slurm, not '$check'" ;;
esac
root=$(realpath -m "$root")

layer=$(mktemp -d "$(dirname "$root")/fresh-root-XXXXXX")
cleanup() {
  ! mountpoint -q "$layer/root" || umount "$layer/root"
  rm -rf "$layer"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

echo "== packages"
(cd "$build" && cpack -G DEB -B "$layer/packages" >"$layer/cpack.log" 2>&1) ||
  fail "cpack failed: $(tail -n3 "$layer/cpack.log")"

if [[ ! -e $root/etc/debian_version ]]; then
  echo "== a fresh root"
  debootstrap --variant=minbase bookworm "$root" "$mirror" >"$layer/debootstrap.log" 2>&1 ||
    fail "debootstrap failed: $(tail -n3 "$layer/debootstrap.log")"
fi

mkdir -p "$layer"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=$root,upperdir=$layer/upper,workdir=$layer/work" "$layer/root"
mkdir "$layer/root/packages"
for package in "${packages[@]}"; do cp "$layer/packages/${package}"_*.deb "$layer/root/packages/"; done
cp "$here/fresh_root_$check.sh" "$here"/../../deploy/slurm/* "$layer/root/packages/"
cp /etc/resolv.conf "$layer/root/etc/resolv.conf"

echo "== apt-get install"
DEBIAN_FRONTEND=noninteractive chroot "$layer/root" bash -c 'apt-get -q update &&
  apt-get -q install --yes --no-install-recommends "$@" /packages/*.deb' install "${others[@]}" >"$layer/apt.log" 2>&1 ||
  fail "apt-get install failed: $(tail -n5 "$layer/apt.log")"
find "$layer/upper/var/cache/apt/archives" -name '*.deb' -exec cp {} "$root/var/cache/apt/archives/" \;

cat >"$layer/root/etc/systemd/system/check.service" <<UNIT
[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/bash -c 'timeout 400 bash /packages/fresh_root_$check.sh >/packages/log 2>&1; echo \$? >/packages/code; systemctl exit --no-block'
UNIT
mkdir "$layer/root/etc/systemd/system/default.target.wants"
ln -s ../check.service "$layer/root/etc/systemd/system/default.target.wants/check.service"

echo "== systemd: fresh_root_$check.sh"
timeout --kill-after=10 450 systemd-nspawn --quiet --register=no --keep-unit --boot "$network" \
  --directory "$layer/root" >"$layer/boot.log" 2>&1 </dev/null || true
cat "$layer/root/packages/log" || fail "systemd did not come so far: $(tail -n5 "$layer/boot.log")"
[[ $(cat "$layer/root/packages/code" 2>/dev/null) == 0 ]] || fail "a check failed; the lines above say which"
echo "fresh_root.sh: all is well"
