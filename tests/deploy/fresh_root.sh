#!/usr/bin/env bash
# The Debian packages in a root that has never seen them. Not one of ctest's: it needs root, a Debian mirror, debootstrap,
# and systemd-container or podman, and takes some minutes the first time, two or three with the same --root.
#
#   tests/deploy/fresh_root.sh --root DIR [--check package|slurm|container] [--build DIR] [--mirror URL]
#
# --root: a folder for the fresh root, made where there is none. Each check works in a layer above it that is thrown
# away; only what apt-get downloaded is kept there. --check:
#   package    fresh_root_package.sh under a real systemd: what deploy/README.md says, and the service to its end
#   slurm      fresh_root_slurm.sh under a real systemd: deploy/slurm on a Slurm of one machine
#   container  fresh_root_container.sh: deploy/container, built and run by podman on this root
# --build: a build folder of which cpack makes the packages. Without it they are built as deploy/README.md says.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tree=$(cd "$here/../.." && pwd)

fail() {
  echo "fresh_root.sh: $*" >&2
  exit 1
}

root="" check=package build="" mirror=http://deb.debian.org/debian
while (($# > 0)); do
  case $1 in
    --root | --check | --build | --mirror)
      (($# > 1)) || fail "$1 needs a value"
      declare "${1#--}=$2"
      shift
      ;;
    *) fail "unknown argument '$1'; expected --root DIR [--check package|slurm|container] [--build DIR] [--mirror URL]" ;;
  esac
  shift
done
[[ -n $root ]] || fail "where? give --root DIR"
((EUID == 0)) || fail "this needs root"

install=() later=() network=--private-network programs=(systemd-nspawn:systemd-container)
case $check in
  package)
    install=(systemd systemd-sysv openssl)
    later=(prometheus) # Installed as the page says, when systemd runs and there is no network.
    ;;
  slurm)
    install=(systemd systemd-sysv slurm-wlm munge iproute2)
    network=--network-veth # Slurm binds only where there is more than a loopback.
    ;;
  container) programs=(podman:podman) ;;
  *) fail "--check is package, slurm or container, not '$check'" ;;
esac
for program in debootstrap:debootstrap cpack:cmake openssl:openssl "${programs[@]}"; do
  command -v "${program%:*}" >/dev/null || fail "there is no ${program%:*}; apt-get install ${program#*:}"
done
root=$(realpath -m "$root")
mkdir -p "$(dirname "$root")"

layer=$(mktemp -d "$(dirname "$root")/fresh-root-XXXXXX")
cleanup() {
  ! mountpoint -q "$layer/root" || umount "$layer/root"
  rm -rf "$layer"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

echo "== packages"
"$here/page_blocks.sh" "$tree/deploy/README.md" "In production" "$layer/page"
if [[ -n $build ]]; then
  (cd "$build" && cpack -G DEB -B "$layer/packages" >"$layer/build.log" 2>&1) ||
    fail "cpack failed: $(tail -n3 "$layer/build.log")"
else
  (cd "$tree" && bash -euo pipefail "$layer/page/1" >"$layer/build.log" 2>&1) ||
    fail "the build failed: $(tail -n3 "$layer/build.log")"
  mkdir "$layer/packages"
  cp "$tree"/build/packages/*.deb "$layer/packages/"
fi

if [[ ! -e $root/etc/debian_version ]]; then
  echo "== a fresh root"
  debootstrap --variant=minbase bookworm "$root" "$mirror" >"$layer/debootstrap.log" 2>&1 ||
    fail "debootstrap failed: $(tail -n3 "$layer/debootstrap.log")"
fi
mkdir -p "$layer"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=$root,upperdir=$layer/upper,workdir=$layer/work" "$layer/root"
if [[ $check == container ]]; then
  echo "== podman: fresh_root_container.sh"
  unshare --mount "$here/fresh_root_container.sh" "$layer/root" "$layer/packages" "$layer" || fail "a check failed; the lines above say which"
  echo "fresh_root.sh: all is well"
  exit
fi

mkdir "$layer/root/packages"
for package in ballastd ballast ballast-worker; do cp "$layer/packages/${package}"_*.deb "$layer/root/packages/"; done
cp "$here/fresh_root_$check.sh" "$layer/root/packages/"
cp -r "$layer/page" "$layer/root/packages/"
cp /etc/resolv.conf "$layer/root/etc/resolv.conf"
# What a person answers to apt-get, and as few packages as will do.
printf '%s\n' 'APT::Get::Assume-Yes "true";' 'APT::Install-Recommends "false";' >"$layer/root/etc/apt/apt.conf.d/test"

echo "== apt-get install"
case $check in
  package) later+=(/packages/*.deb) ;;
  slurm) install+=(/packages/*.deb) ;;
esac
apt_get() { # MORE NAME...: a name may be a pattern of files in the root.
  DEBIAN_FRONTEND=noninteractive chroot "$layer/root" bash -c "apt-get -q install $*" >>"$layer/apt.log" 2>&1 ||
    fail "apt-get install failed: $(tail -n5 "$layer/apt.log")"
}
chroot "$layer/root" apt-get -q update >"$layer/apt.log" 2>&1 || fail "apt-get update failed: $(tail -n5 "$layer/apt.log")"
apt_get "" "${install[@]}"
((${#later[@]} == 0)) || apt_get --download-only "${later[@]}"
find "$layer/upper/var/cache/apt/archives" -name '*.deb' -exec cp {} "$root/var/cache/apt/archives/" \;

cat >"$layer/root/etc/systemd/system/check.service" <<UNIT
[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/bash -c 'timeout 900 bash /packages/fresh_root_$check.sh >/packages/log 2>&1; echo \$? >/packages/code; systemctl exit --no-block'
UNIT
mkdir "$layer/root/etc/systemd/system/default.target.wants"
ln -s ../check.service "$layer/root/etc/systemd/system/default.target.wants/check.service"

echo "== systemd: fresh_root_$check.sh"
timeout --kill-after=10 960 systemd-nspawn --quiet --register=no --keep-unit --boot "$network" \
  --directory "$layer/root" >"$layer/boot.log" 2>&1 </dev/null || true
cat "$layer/root/packages/log" || fail "systemd did not start the check: $(tail -n5 "$layer/boot.log")"
[[ $(cat "$layer/root/packages/code" 2>/dev/null) == 0 ]] || fail "a check failed; the lines above say which"
echo "fresh_root.sh: all is well"
