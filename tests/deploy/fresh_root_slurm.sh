#!/usr/bin/env bash
# What fresh_root.sh --check slurm runs: deploy/slurm/train.sbatch as the package has it, for a user of a Slurm of this
# machine alone. tests/cluster/slurm_test.py stops trainings in all ways. Ends at the first thing that is not as it should
# be.
set -euo pipefail

fault() {
  echo "FAILED: $*"
  tail -n 20 /tmp/runs/*.out /tmp/runs/ballast-*/*.log /var/log/slurm/*.log 2>/dev/null
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

echo "1. a Slurm of one machine"
systemctl stop ballastd # The job has its own.
host=$(hostname)
ip address add 192.0.2.1/24 dev host0
ip link set host0 up
echo "127.0.0.1 $host" >>/etc/hosts
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=slurm
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ReturnToService=2
MailProg=/bin/true
AuthInfo=cred_expire=5
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
CONF
systemctl restart munge slurmctld slurmd
await 60 "the node is not idle: $(sinfo 2>&1)" bash -c 'sinfo --noheader --format=%t | grep -q idle'

adduser --system --group --quiet --shell /bin/bash trainer
adduser --system --group --quiet stranger
as() {
  local user=$1
  shift
  setpriv --reuid="$user" --regid="$user" --init-groups "$@"
}
mkdir -p /tmp/runs && chown trainer /tmp/runs
cd /tmp/runs
model=(--layers=1 --width=64 --heads=2 --context=32 --batch=4 --steps=400)

echo "2. a training of two tasks that only its user reaches"
job=$(as trainer sbatch --parsable --job-name=two --ntasks=2 --overcommit --output=/tmp/runs/two.out \
  /usr/share/ballast/slurm/train.sbatch ballast-worker "${model[@]}")
await 120 "the training did not begin" grep -q '^step 20/' ballast-two/rank-0.log
folder=/tmp/ballast-$job-$host address=unix:$folder/socket
[[ $(stat -c %U:%a "$folder") == trainer:700 ]] || fault "others may enter $folder"
[[ -z $(ss --no-header --listening --tcp --processes | grep ballastd) ]] || fault "the service listens on a port, too"
as trainer ballast job two --service="$address" >/dev/null || fault "its own user does not reach it"
if as stranger ballast jobs --service="$address" >/dev/null 2>&1; then fault "another user of the node reaches it"; fi

echo "3. it is stopped, queued again, and goes on to the bits of a local optimizer"
scancel --signal=USR1 --batch "$job"
await 60 "it was not stopped and saved" grep -q 'stopped and saved' two.out
await 240 "job $job did not complete" bash -c "scontrol show job $job | grep -q JobState=COMPLETED"
[[ $(scontrol show job "$job" | grep -o 'Restarts=[0-9]*') == Restarts=1 ]] || fault "it was not started again"
[[ -z $(compgen -G '/tmp/ballast-*') ]] || fault "the folder of a socket is left"
pids=()
for rank in 0 1; do
  RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ballast-worker --optimizer=local "${model[@]}" \
    --out=/tmp/local >"/tmp/local.$rank.log" 2>&1 &
  pids+=($!)
done
wait "${pids[0]}" && wait "${pids[1]}" || fault "the local run: $(tail -n1 /tmp/local.*.log)"
cmp ballast-two/weights.bin /tmp/local/weights.bin || fault "the weights differ"
