#!/usr/bin/env bash
# What fresh_root.sh --check slurm runs: deploy/slurm/train.sbatch on a Slurm of this machine alone. A training from its
# beginning to its end; one that is stopped on its way, queued again, and ends with the same bits; and others that Slurm stops.
# Ends at the first thing that is not as it should be.
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
SchedulerParameters=requeue_delay=1
SlurmctldParameters=preempt_send_user_signal
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
model=(--layers=1 --width=64 --heads=2 --context=32 --batch=4 --decay-end=400)
submit() { # NAME FLAGS...
  local name=$1
  shift
  as trainer sbatch --parsable --job-name="$name" --ntasks=2 --overcommit \
    --output="/tmp/runs/$name.out" /usr/share/ballast/slurm/train.sbatch ballast-worker "${model[@]}" "$@"
}
local_run() { # STEPS: the same with an optimizer in the ranks.
  local rank pids=()
  for rank in 0 1; do
    RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ballast-worker --optimizer=local --steps="$1" \
      "${model[@]}" --out="/tmp/local-$1" >"/tmp/local-$1.$rank.log" 2>&1 &
    pids+=($!)
  done
  wait "${pids[0]}" && wait "${pids[1]}" || fault "the local run: $(tail -n1 "/tmp/local-$1".*.log)"
}
over() { [[ $(scontrol show job "$1" | grep -o 'JobState=[A-Z]*') == "JobState=$2" ]]; }

echo "2. two tasks train from the beginning to the end"
job=$(submit short --steps=10)
await 120 "job $job did not complete" over "$job" COMPLETED
local_run 10
cmp ballast-short/weights.bin /tmp/local-10/weights.bin || fault "the weights differ"
compgen -G "ballast-short/checkpoints/short/step-*/index.json" >/dev/null || fault "nothing was saved at the end"

echo "3. one that is stopped on its way is queued again, and goes on to the same bits"
job=$(submit long --steps=400)
await 120 "the training did not begin" grep -q '^step 20/' ballast-long/rank-0.log
address=$(cat "ballast-long/service-$job")
folder=$(dirname "${address#unix:}")
[[ $address == unix:* && $(stat -c %U:%a "$folder") == trainer:700 ]] || fault "the service listens on $address"
[[ -z $(ss --no-header --listening --tcp --processes | grep ballastd) ]] || fault "the service listens on a port, too"
as trainer ballast job long --service="$address" >/dev/null || fault "its own user does not reach it"
if as stranger ballast jobs --service="$address" >/dev/null 2>&1; then fault "another user of the node reaches it"; fi
scancel --signal=USR1 --batch "$job"
await 60 "it was not stopped and saved" grep -q 'stopped and saved' long.out
saved=$(grep -o 'job long: saved step [0-9]*' ballast-long/ballastd.log | grep -o '[0-9]*$')
((saved >= 20 && saved < 400)) || fault "saved at step $saved"
await 240 "job $job did not complete" over "$job" COMPLETED
[[ $(scontrol show job "$job" | grep -o 'Restarts=[0-9]*') == Restarts=1 ]] || fault "it was not started again"
grep -q "^step $((saved + 1))/" ballast-long/rank-0.log || fault "it did not go on after step $saved"
[[ ! -e $folder && -z $(compgen -G '/tmp/ballast-*') ]] || fault "a folder of a socket is left"
local_run 400
cmp ballast-long/weights.bin /tmp/local-400/weights.bin || fault "the weights differ after the restart"
echo "   stopped at step $saved of 400"

echo "4. scancel and scontrol requeue save, also a job whose save takes longer than its signals are apart"
for how in scancel "scontrol requeue"; do
  for size in small large; do
    flags=("${model[@]}")
    [[ $size == small ]] || flags=(--layers=12 --width=768 --heads=12 --context=32 --batch=1) # 85 million parameters.
    name=${how%% *}-$size
    job=$(as trainer sbatch --parsable --job-name="$name" --ntasks=2 --overcommit --output="/tmp/runs/$name.out" \
      /usr/share/ballast/slurm/train.sbatch ballast-worker --steps=100000 "${flags[@]}")
    await 120 "the training did not begin" grep -q '^step 2/' "ballast-$name/rank-0.log"
    $how "$job"
    await 60 "$how of $name did not save" grep -q 'stopped and saved' "$name.out"
    grep -q "job $name: saved step [0-9]* in" "ballast-$name/ballastd.log" || fault "$name was not saved"
    if grep -q 'train.sbatch: the service' "$name.out"; then fault "$how of $name: $(cat "$name.out")"; fi
    scancel --full --signal=KILL "$job" || true
    scancel "$job" || true
    await 60 "job $job does not end" bash -c "! squeue --noheader --job=$job 2>/dev/null | grep -q ."
  done
done

echo "5. a rank that fails fails the job, and what the service had is saved"
job=$(submit wrong --steps=10 --nonsense)
await 60 "job $job did not fail" over "$job" FAILED
grep -q 'a rank ended with' wrong.out || fault "it does not say why"
