#!/usr/bin/env bash
# What fresh_root.sh --check container runs, in a mount namespace of its own: deploy/container, built and run as
# deploy/README.md, "Containers", says, by podman. Debian's slim image is stood in for by a fresh root. Ends at the
# first thing that is not as it should be.
#
#   fresh_root_container.sh ROOT PACKAGES SCRATCH
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$1 packages=$2 scratch=$3
readme=$here/../../deploy/README.md

fault() {
  echo "FAILED: $*"
  for container in $(podman ps --all --format='{{.Names}}' 2>/dev/null); do podman logs "$container" 2>&1 | tail -n5; done
  exit 1
}
# await SECONDS WHAT COMMAND...
await() {
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < deadline)) || fault "$what"
    sleep 0.2
  done
}
block() { # NUMBER: of the page, in the folder of the tree's stand-in.
  bash -euo pipefail "$scratch/containers/$1" >"$scratch/block.log" 2>&1 ||
    fault "block $1 of the page: $(tail -n4 "$scratch/block.log")"
}
jobs() { podman exec "$1" ballast jobs --service=unix:/run/ballast/ballastd.sock; }

if [[ ${4-} != run ]]; then
  # Images, containers and volumes of this check alone. A container gets the limits that this process has: not every
  # machine lets it have more.
  mkdir -p "$scratch/tree/build"
  cp -r "$here/../../deploy" "$scratch/tree/"
  cp -r "$packages" "$scratch/tree/build/packages"
  printf '[storage]\ndriver = "overlay"\ngraphroot = "%s"\nrunroot = "%s"\n' "$scratch/storage" "$scratch/run" >"$scratch/storage.conf"
  printf '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n[engine]\ncgroup_manager = "cgroupfs"\n' \
    >"$scratch/containers.conf"
  export CONTAINERS_STORAGE_CONF=$scratch/storage.conf CONTAINERS_CONF=$scratch/containers.conf BUILDAH_ISOLATION=chroot
  # crun takes one kind of control groups, not both.
  ! mountpoint -q /sys/fs/cgroup/unified || umount -l /sys/fs/cgroup/unified
  "$here/page_blocks.sh" "$readme" "In production" "$scratch/production"
  "$here/page_blocks.sh" "$readme" Containers "$scratch/containers"
  [[ $(ls "$scratch/containers") == "$(seq 2)" ]] || fault "the page has blocks that nothing here runs"

  echo "1. podman builds it as the page says"
  tar -C "$root" --exclude='./var/cache/apt/archives/*.deb' -c . | podman import --quiet - docker.io/library/debian:12-slim >/dev/null
  cd "$scratch/tree"
  block 1
  # From here on without the machine's network.
  exec unshare --net "$0" "$root" "$packages" "$scratch" run
fi

trap 'podman rm --all --force --time=0 >/dev/null 2>&1' EXIT
exec 2> >(grep -v 'systemd connection' >&2) # Podman looks for timers, which it may do without.
cd "$scratch/tree"
ip link set lo up

echo "2. without more it listens on a socket in the container alone, not as root"
podman run --detach --name=alone ballast:0.1.0 >/dev/null
await 60 "it does not answer" jobs alone
[[ -z $(podman exec alone cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == "0A"') ]] || fault "it listens on a port"
[[ $(podman exec alone id -u) == 7070 ]] || fault "it runs as $(podman exec alone id)"
podman healthcheck run alone || fault "it is not healthy"
podman stop alone >/dev/null
[[ $(podman inspect --format='{{.State.ExitCode}}' alone) == 0 ]] || fault "it ended with an error"
if podman run --rm ballast:0.1.0 --listen=0.0.0.0:7070 2>"$scratch/refused"; then fault "it listens for all without TLS"; fi
grep -q -- --insecure "$scratch/refused" || fault "it does not say why not: $(cat "$scratch/refused")"

echo "3. with the page's files another host trains over TLS, and others do not"
mkdir conf authority
(cd authority && bash -euo pipefail "$scratch/production/4") 2>/dev/null
# Step 5 of the page, as far as it writes files: here to conf.
sed -e '/^ballastd/,$d' -e 's/ -g ballast//' -e 's#\(^install .* \|^cat >\)/etc/ballast/#\1../conf/#' "$scratch/production/5" >"$scratch/files"
(cd authority && bash -euo pipefail "$scratch/files")
block 2
await 60 "it is not healthy" podman healthcheck run ballast
mkdir trainer
cp authority/{ca.pem,trainer.pem,trainer.key} trainer/
chown -R 7070 trainer
from_outside() { # PROGRAM FLAGS...: in the network of this host, to which the ports are published.
  local program=$1
  shift
  podman run --rm --network=host --add-host=gpu1.example:127.0.0.1 --volume="$PWD/trainer:/trainer" --workdir=/trainer \
    "${secure[@]}" --entrypoint="$program" ballast:0.1.0 --service=gpu1.example:7070 "$@" 2>&1
}
secure=(--env=BALLAST_TLS_CA=ca.pem --env=BALLAST_TLS_CERT=trainer.pem --env=BALLAST_TLS_KEY=trainer.key --env=RANK=0 --env=WORLD_SIZE=1)
said=$(from_outside ballast-worker --job=gpt --steps=4 --layers=1 --width=64 --heads=2 --context=32 --batch=4 --out=run) ||
  fault "the training: $(tail -n2 <<<"$said")"
page() { # PATH FLAGS...: the first line of the answer.
  printf 'GET %s HTTP/1.1\r\nHost: gpu1.example\r\nConnection: close\r\n\r\n' "$1" |
    openssl s_client -quiet -CAfile authority/ca.pem -verify_return_error -connect 127.0.0.1:7071 "${@:2}" 2>/dev/null | head -n1
}
[[ $(page /metrics -cert authority/prometheus.pem -key authority/prometheus.key) == *' 200 '* ]] || fault "no metrics for Prometheus"
[[ $(page /metrics) == *' 401 '* ]] || fault "metrics for anybody"
[[ $(page /ready) == *' 200 '* ]] || fault "it is not ready"
secure=(--env=BALLAST_TLS_CA=ca.pem)
if said=$(from_outside ballast job gpt --timeout=5); then fault "it answers without a certificate"; fi

echo "4. a stop saves the job, and a start finds it"
podman stop ballast >/dev/null
[[ $(podman inspect --format='{{.State.ExitCode}}' ballast) == 0 ]] || fault "the stop"
podman start ballast >/dev/null
await 60 "it does not start again" podman healthcheck run ballast
[[ $(podman exec ballast ls /var/lib/ballast/checkpoints/gpt) == *step-4.* ]] || fault "nothing was saved"
