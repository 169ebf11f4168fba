"""A Slurm of the test's own: a controller in the test's namespace, and a slurmd on each of some hosts."""

import contextlib
import os
import re
import shutil
import socket
import subprocess

from processes import PATIENCE, await_, children_of, start, stop

PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
CONTROLLER = "10.77.0.254"  # The test's address on the bridge.
CORES = 4  # Of each node, whatever the machine has.

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({controller})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=15
ReturnToService=2
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2
{more}
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


def missing():
    """The Debian packages that are needed and not there."""
    return sorted(package for program, package in PACKAGES.items() if not shutil.which(program))


class Slurm:
    """Its files are in `folder`, which all nodes see. A node is a whole host, named gpu1 for the first one."""

    def __init__(self, folder, hosts, more=""):
        self.folder = folder
        self.names = [f"gpu{host.address.rpartition('.')[2]}" for host in hosts]
        self.processes = []
        self.daemons = {}  # By the node's name.
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "state").mkdir()
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
            f"{host.address} {name}\n" for host, name in zip(hosts, self.names)))
        self.nodes = "\n".join(f"NodeName={name} NodeAddr={host.address} CPUs={CORES}"
                               for host, name in zip(hosts, self.names))
        self.write_configuration(more)
        try:
            self.start_munge()
            self.controller = self.start(["slurmctld", "-D"], "slurmctld.log")
            for host in hosts:
                self.start_node(host)
            self.await_idle()
        except BaseException:
            self.stop()
            raise

    def write_configuration(self, more):
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(
            folder=self.folder, host=socket.gethostname(), controller=CONTROLLER, more=more, nodes=self.nodes))

    def configure(self, more=""):
        self.write_configuration(more)
        self.ask("scontrol", "reconfigure")

    def start(self, words, log):
        self.processes.append(start(words, self.folder / log, environment=self.environment))
        return self.processes[-1]

    def start_munge(self):
        key, files = self.folder / "munge.key", self.folder / "munge"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        munge = self.start(["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={files}",
                            *(f"--{file}-file={files}.{file}" for file in ("pid", "log", "seed"))], "munge.out")
        await_("munge", files.is_socket, munge)

    def start_node(self, host):
        """Also again, on a host that is new at this address."""
        host.do("mount", "--bind", self.folder / "hosts", "/etc/hosts")
        self.start_daemon(host)

    def start_daemon(self, host):
        name = f"gpu{host.address.rpartition('.')[2]}"
        self.daemons[name] = self.start([*host.words, "slurmd", "-D", "-N", name], f"slurmd-{name}.log")

    def kill_daemon(self, name):
        """SIGKILL for slurmd alone."""
        nsenter = self.daemons.pop(name)
        os.kill(children_of(nsenter.pid)[0], 9)
        nsenter.wait(PATIENCE)

    def ask(self, *words, environment=None):
        done = subprocess.run([str(word) for word in words], timeout=PATIENCE, check=False, cwd=self.folder, text=True,
                              env=os.environ | self.environment | (environment or {}), capture_output=True)
        if done.returncode != 0:
            raise AssertionError(f"{words}: {done.stderr.strip()}")
        return done.stdout.strip()

    def states(self):
        """Of the nodes, such as idle."""
        with contextlib.suppress(AssertionError):
            return self.ask("sinfo", "--noheader", "--Node", "--partition=low", "--format=%t").replace("*", "").split()
        return []

    def await_idle(self):
        await_("idle nodes", lambda: self.states() == ["idle"] * len(self.names), self.controller)

    def job(self, number):
        """What scontrol says of it, by field."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.ask("scontrol", "show", "job", number)))

    def stop(self):
        for process in reversed(self.processes):
            stop(process)
