#!/usr/bin/env bash
# What fresh_root.sh --check package runs under the root's own systemd: the blocks of deploy/README.md, "In production", as
# they are written there; and between them the service stopped, started again, upgraded, reloaded, killed, hung,
# misconfigured, and at the end removed. Ends at the first thing that is not as it should be.
set -euo pipefail

socket=unix:/run/ballast/ballastd.sock
state=/var/lib/ballast/checkpoints
fault() {
  echo "FAILED: $*"
  journalctl --unit=ballastd --no-pager --lines=40 --output=cat
  exit 1
}
property() { systemctl show --property="$1" --value ballastd; }
# await SECONDS WHAT COMMAND...
await() {
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < deadline)) || fault "$what"
    sleep 0.1
  done
}
as() {
  local user=$1
  shift
  setpriv --reuid="$user" --regid="$user" --init-groups env HOME="/tmp/$user" "$@"
}
page() { # NUMBER USER FOLDER: a block of the page.
  local number=$1 user=$2 shell=(bash -euo pipefail)
  [[ $user == root ]] || shell=(as "$user" "${shell[@]}")
  (cd "$3" && umask 022 && "${shell[@]}" "/packages/page/$number") >"/tmp/page.$number" 2>&1 ||
    fault "block $number of the page: $(tail -n4 "/tmp/page.$number")"
}
train() { # STEPS OUT FLAGS...: two ranks, as a user who may reach the socket.
  local steps=$1 out=$2 rank pids=()
  shift 2
  for rank in 0 1; do
    as alice RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ballast-worker --steps="$steps" \
      --decay-end=12 --layers=1 --width=64 --heads=2 --context=32 --batch=4 --out="$out" "$@" >"$out.$rank.log" 2>&1 &
    pids+=($!)
  done
  for rank in 0 1; do wait "${pids[rank]}" || fault "rank $rank: $(tail -n1 "$out.$rank.log")"; done
}

[[ $(ls /packages/page) == "$(seq 8)" ]] || fault "the page has blocks that nothing here runs"

echo "1. installed as the page says, systemd has started it, as the user ballast, on its socket alone"
useradd --create-home alice
page 2 root /packages
await 30 "it is not active: $(property ActiveState)" systemctl is-active ballastd
[[ $(property UnitFileState) == enabled ]] || fault "it does not start with the machine"
status=$(property StatusText)
[[ $status == "listening on $socket" ]] || fault "its status is '$status'"
if bash -c ': <>/dev/tcp/127.0.0.1/7070' 2>/dev/null; then fault "it listens on a port that every user reaches"; fi
pid=$(property MainPID)
[[ $(stat -c %U "/proc/$pid") == ballast ]] || fault "it runs as $(stat -c %U "/proc/$pid")"
if bash -c 'echo -900 >/proc/self/oom_score_adj' 2>/dev/null; then
  [[ $(cat "/proc/$pid/oom_score_adj") == -900 ]] || fault "oom_score_adj is $(cat "/proc/$pid/oom_score_adj")"
  grep -q '^Max locked memory *unlimited' "/proc/$pid/limits" || fault "its locked memory is limited"
else
  echo "   no process of this machine can be protected from the OOM killer; what the unit asks for:"
  systemctl show --property=OOMScoreAdjust,LimitMEMLOCK ballastd | sed 's/^/   /'
fi
grep -q '^CapEff:\s*0*$' "/proc/$pid/status" || fault "it has capabilities"
grep -q '^Seccomp:\s*2$' "/proc/$pid/status" || fault "its system calls are not filtered"

echo "2. the group ballast reaches its socket, others do not"
adduser --system --group --quiet stranger
page 3 alice /home/alice
grep -q '^step  *20 committed' /tmp/page.3 || fault "the page's training did not end: $(cat /tmp/page.3)"
if as stranger ballast jobs --service "$socket" >/dev/null 2>&1; then fault "a stranger reaches its socket"; fi
as stranger test ! -r "$state" || fault "a stranger reads the checkpoints"

echo "3. two ranks train through it, to the same bits as with an optimizer of their own"
train 8 /tmp/service --service="$socket" --job=small
train 8 /tmp/local --optimizer=local
cmp /tmp/service/weights.bin /tmp/local/weights.bin || fault "the weights differ"
grep -q 'shared memory' /tmp/service.0.log && echo "   over shared memory" || echo "   over the socket"

echo "4. a stop saves the job, and a start goes on from it"
systemctl stop ballastd
[[ $(property Result) == success ]] || fault "the stop ended in $(property Result)"
saved=("$state"/small/step-8.*/index.json)
[[ -e ${saved[0]} && $(stat -c %U:%G "$state/small") == ballast:ballast ]] || fault "nothing was saved"
systemctl start ballastd
train 12 /tmp/resumed --service="$socket" --job=small --resume=small
train 12 /tmp/whole --optimizer=local
cmp /tmp/resumed/weights.bin /tmp/whole/weights.bin || fault "the weights differ after the restart"

echo "5. an upgrade of the package leaves it running, and a reload puts the new program in its place; the job stays as it was"
pid=$(property MainPID)
child() { # The process that serves.
  local first=""
  read -r first _ <"/proc/$pid/task/$pid/children" || true
  echo "$first"
}
job() { # Which job there is, at which step, and all bits of a parameter.
  local plane
  as alice ballast job small --service "$socket" | grep -E '^(uid|step) ' || return
  for plane in master exp_avg exp_avg_sq; do
    as alice ballast state small h.0.attn.c_attn.weight --plane "$plane" --service "$socket" --out /tmp/plane.npy >/dev/null || return
    sha256sum /tmp/plane.npy && rm /tmp/plane.npy || return
  done
}
before=$(job) || fault "the job cannot be looked at"
served=$(child)
is_kept() { # WHAT: after something has happened to the process that served.
  another() { [[ -n $(child) && $(child) != "$served" ]] && job; }
  await 30 "$1: nothing took over the job" another
  [[ $(job) == "$before" ]] || fault "$1: the job was $before and is $(job)"
  [[ $(property MainPID) == "$pid" && $(property NRestarts) == 0 ]] || fault "$1: systemd started it again"
  systemctl is-active --quiet ballastd || fault "$1: it is $(property ActiveState)"
  served=$(child)
}
dpkg -i /packages/ballastd_*.deb >/tmp/dpkg.log 2>&1 || fault "dpkg: $(tail -n1 /tmp/dpkg.log)"
grep -q 'still runs version' /tmp/dpkg.log || fault "dpkg did not say that it still runs"
[[ $(property MainPID) == "$pid" && $(child) == "$served" ]] || fault "the upgrade restarted it"
[[ $(readlink "/proc/$served/exe") == *'(deleted)' ]] || fault "the upgrade replaced nothing"
[[ $(job) == "$before" ]] || fault "the upgrade changed the job"
systemctl reload ballastd || fault "the reload failed"
is_kept "a reload"
[[ $(readlink "/proc/$served/exe") == /usr/bin/ballastd ]] || fault "what serves is $(readlink "/proc/$served/exe")"

echo "6. one that dies goes on with its job, which trains on; one that is stopped is ended and started again"
kill -KILL "$served"
is_kept "a death"
train 16 /tmp/after --service="$socket" --job=small --resume=small
train 16 /tmp/longer --optimizer=local
cmp /tmp/after/weights.bin /tmp/longer/weights.bin || fault "the weights differ after the reload and the death"
mkdir -p /etc/systemd/system/ballastd.service.d
printf '[Service]\nWatchdogSec=2s\n' >/etc/systemd/system/ballastd.service.d/watchdog.conf
systemctl daemon-reload
systemctl restart ballastd
pid=$(property MainPID)
sleep 5 # Longer than the watchdog waits: one that is not stuck stays.
[[ $(property MainPID) == "$pid" ]] || fault "the watchdog ended one that was not stuck"
systemctl kill --signal=STOP ballastd
await 30 "the watchdog did not end it" test "$(property NRestarts)" != 0 -o ! -e "/proc/$pid"
await 30 "it was not started again" systemctl is-active ballastd
[[ $(property MainPID) != "$pid" ]] || fault "the one that hangs is still there"

echo "7. a mistake in its flags is one line, and not tried again and again"
config=/etc/ballast/ballastd.conf
echo 'memory-limit = lots' >>$config
if ballastd --config=$config --check-config 2>/dev/null; then fault "--check-config takes it"; fi
pid=$(property MainPID)
served=$(child)
if systemctl reload ballastd 2>/dev/null; then fault "a reload takes it"; fi
systemctl is-active --quiet ballastd && [[ $(property MainPID) == "$pid" && $(child) == "$served" ]] ||
  fault "it does not go on as it was after a reload that failed"
journalctl --unit=ballastd --output=cat | grep -q "flag --memory-limit: bad value 'lots'" || fault "the journal does not say why"
if systemctl restart ballastd 2>/dev/null; then fault "it started with a flag that is wrong"; fi
[[ $(property ExecMainStatus) == 2 && $(property ActiveState) == failed ]] ||
  fault "it is $(property ActiveState), exit code $(property ExecMainStatus)"
journalctl --unit=ballastd --output=cat | grep -q "flag --memory-limit: bad value 'lots'" || fault "the journal does not say why"
sed -i 's/^memory-limit = lots/memory-limit = 1GiB/' $config
ballastd --config=$config --check-config | grep -q 'for the user ballast$' || fault "--check-config refuses it"
chmod 600 $config
if ballastd --config=$config --check-config 2>/dev/null; then fault "--check-config takes what only root can read"; fi
chmod 644 $config
systemctl restart ballastd
journalctl --unit=ballastd --output=cat | grep -q 'memory limit 1.00 GiB' || fault "the flag is not in force"

echo "8. another host trains over TLS and Prometheus scrapes, as the page says; others do not"
echo '127.0.0.1 gpu1.example' >>/etc/hosts
adduser --system --group --quiet trainer
install -d -m 700 /tmp/authority /tmp/host /tmp/watch
install -d -m 700 -o trainer /tmp/trainer
page 4 root /tmp/authority
cp /tmp/authority/{ca.pem,gpu1.example.pem,gpu1.example.key} /tmp/host/
cp /tmp/authority/{ca.pem,trainer.pem,trainer.key} /tmp/trainer/
cp -r /tmp/authority/{ca.pem,prometheus.pem,prometheus.key} /usr/share/ballast/monitoring /tmp/watch/
chown trainer /tmp/trainer/*
page 5 root /tmp/host
[[ $(property StatusText) == "listening on 0.0.0.0:7070, $socket" ]] || fault "its status is '$(property StatusText)'"
page 6 trainer /tmp/trainer
grep -q '^step  *20 committed' /tmp/page.6 || fault "the page's training did not end: $(cat /tmp/page.6)"
as alice RANK=0 WORLD_SIZE=1 ballast-worker --optimizer=local --steps=20 --out=/tmp/alone >/tmp/alone.log 2>&1 ||
  fault "the local run: $(tail -n1 /tmp/alone.log)"
cmp /tmp/trainer/gpt/weights.bin /tmp/alone/weights.bin || fault "the weights differ over TLS"
page 7 root /tmp/watch
scraped() { # The page's last block, which has an answer after some seconds.
  bash -euo pipefail /packages/page/8 >/tmp/page.8 && grep -q '^ballast_committed_step{.*job_name="gpt".*} => 20 ' /tmp/page.8
}
await 30 "Prometheus does not know the job" scraped

cd /tmp/trainer
if as trainer ballast jobs --service=gpu1.example:7070 --timeout=5 >/dev/null 2>&1; then fault "it answers without TLS"; fi
if as trainer BALLAST_TLS_CA=ca.pem ballast job gpt --service=gpu1.example:7070 --timeout=5 >/dev/null 2>&1; then
  fault "it answers without a certificate"
fi
answer() { # PATH: the first line, to who has no certificate.
  printf 'GET %s HTTP/1.1\r\nHost: gpu1.example\r\nConnection: close\r\n\r\n' "$1" |
    openssl s_client -quiet -CAfile ca.pem -verify_return_error -connect gpu1.example:7071 2>/dev/null | head -n1
}
[[ $(answer /metrics) == *' 401 '* ]] || fault "without a certificate /metrics answers '$(answer /metrics)'"
[[ $(answer /ready) == *' 200 '* ]] || fault "without a certificate /ready answers '$(answer /ready)'"
as alice ballast job gpt --service "$socket" >/dev/null || fault "alice, an operator by the roles, cannot see the job"
systemctl stop ballastd

echo "9. it leaves, and checkpoints stay"
DEBIAN_FRONTEND=noninteractive apt-get -q purge --yes ballastd >/tmp/purge.log 2>&1 || fault "purge: $(tail -n1 /tmp/purge.log)"
[[ ! -e /usr/bin/ballastd && ! -e /run/ballast && -e ${saved[0]} ]] || fault "what is left is wrong"
grep -q '/var/lib/ballast is left' /tmp/purge.log || fault "it does not say what it leaves: $(cat /tmp/purge.log)"
grep -q '/etc/ballast is left' /tmp/purge.log || fault "it does not say that it leaves keys: $(cat /tmp/purge.log)"
