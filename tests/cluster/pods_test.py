#!/usr/bin/env python3
"""deploy/kubernetes without Kubernetes: what its files tell the programs, on hosts with the pods' names. Other folders stand
for the volumes. In an environment with PyYAML (tests/client/python/torch_environment.py)."""

import os
import pathlib
import re
import shutil
import signal
import tempfile
import unittest

import yaml
from hosts import Network, enter_network_of_own
from processes import PATIENCE, ROOT, await_, children_of, read, start, stop, tail  # In the folders where hosts looks.
from certificates import Authority

BIN = pathlib.Path(os.environ["BALLAST_BIN_DIR"])
FILES = ROOT / "deploy/kubernetes"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
VOLUMES = re.compile(r"/(?:var/lib|run|etc)/ballast\b|/state\b")


def objects_of(name):
    return {found["kind"]: found for found in yaml.safe_load_all((FILES / name).read_text())}


class Pods(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ballast-pods-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.authority = Authority(self.folder)
        self.network = Network(self.folder)
        self.addCleanup(self.network.close)
        self.names = self.folder / "hosts"
        self.names.write_text("127.0.0.1 localhost\n")

    def add_pod(self, *names):
        """A host that is found by these names, and whose /run is its own."""
        host = self.network.add_host(whole=True)
        host.do("mkdir", "/run/ballast")
        host.do("mount", "--bind", self.names, "/etc/hosts")
        with open(self.names, "a") as file:
            file.write(f"{host.address} {' '.join(names)}\n")
        return host

    def volumes(self, host, certificate, roles):
        """The folder in which the pod's volumes lie. Checkpoints are one volume of all pods."""
        root = self.folder / host.address
        for made, kind in zip(certificate, ("crt", "key")):
            (root / "etc/ballast/tls").mkdir(parents=True, exist_ok=True)
            shutil.copy(made, root / f"etc/ballast/tls/tls.{kind}")
        shutil.copy(self.authority.certificate, root / "etc/ballast/tls/ca.crt")
        (root / "etc/ballast/roles").mkdir()
        (root / "etc/ballast/roles/roles").write_text(roles.replace("user:7070", "user:root"))
        (root / "var/lib").mkdir(parents=True)
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        (root / "var/lib/ballast").symlink_to(self.folder / "checkpoints")
        state = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(dir="/dev/shm")))
        (root / "state").symlink_to(state)
        return root

    def run_container(self, host, root, container, program, fields, *flags):
        """Its process. fields: those of the pod that its variables may name, by their paths."""
        environment = {}
        for variable in container["env"]:
            value = variable["value"] if "value" in variable else fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            environment[variable["name"]] = self.here(root, value)
        words = [self.here(root, re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], word))
                 for word in container["args"]]
        words += ["--nostartup-benchmark"] if program == "ballastd" else []
        process = start([*host.words, BIN / program, *words, *flags], self.log(host, program), environment=environment)
        self.addCleanup(stop, process)
        return process

    def here(self, root, text):
        return VOLUMES.sub(lambda folder: folder[0] if folder[0] == "/run/ballast" else f"{root}{folder[0]}", text)

    def log(self, host, program):
        return self.folder / f"{program}-{host.address}.log"

    def start_services(self, hosts, roots, container, fields):
        """Their processes."""
        services = []
        for host, root, each in zip(hosts, roots, fields):
            services.append(self.run_container(host, root, container, "ballastd", each))
            await_("a service", lambda host=host: "listening on" in read(self.log(host, "ballastd")), services[-1])
        return services

    def assert_trains(self, hosts, roots, container, services):
        """The ranks come to their end."""
        self.assertEqual(container["command"], ["ballast-worker"])
        small = ["--layers=1", "--width=64", "--heads=2", "--context=32", "--batch=4", "--steps=3", "--decay-end=3"]
        container["args"] = [word for word in container["args"] if not word.startswith("--steps")]
        ranks = [self.run_container(host, root, container, "ballast-worker", {INDEX: str(rank)}, *small)
                 for rank, (host, root) in enumerate(zip(hosts, roots))]
        for host, rank in zip(hosts, ranks):
            self.assertEqual(rank.wait(PATIENCE), 0, tail(self.log(host, "ballast-worker")) + "".join(
                tail(self.log(service, "ballastd")) for service in services))

    def assert_saved(self):
        index = list((self.folder / "checkpoints/checkpoints/gpt").glob("step-3.*/index.json"))
        self.assertEqual(len(index), 1)
        parts = {file.name.split(".")[0] for file in index[0].parent.glob("master*")}
        self.assertEqual(parts, {"master-member-0", "master-member-1"})

    def test_the_services_of_a_stateful_set_hold_a_job_together(self):
        pods, training = objects_of("ballast.yaml"), objects_of("training.yaml")
        service, job = pods["StatefulSet"]["spec"], training["Job"]["spec"]
        names = [f"ballast-{number}" for number in range(service["replicas"])]
        domain = pods["Service"]["metadata"]["name"]
        self.assertEqual(service["serviceName"], domain)
        hosts = [self.add_pod(f"{name}.{domain}") for name in names]
        ranks = [self.add_pod(f"gpt-{rank}.{job['template']['spec']['subdomain']}") for rank in range(job["completions"])]
        own = self.authority.issue("ballast", hosts=("ballast", *(f"{name}.{domain}" for name in names)))
        roles = pods["ConfigMap"]["data"]["roles"]
        roots = [self.volumes(host, own, roles) for host in hosts]
        self.start_services(hosts, roots, service["template"]["spec"]["containers"][0],
                            [{"metadata.name": name} for name in names])
        theirs = self.authority.issue("gpt-trainer")
        self.assert_trains(ranks, [self.volumes(host, theirs, "") for host in ranks],
                           job["template"]["spec"]["containers"][0], hosts)
        self.assert_saved()

    def test_a_node_local_service_is_its_ranks_home(self):
        pods = objects_of("node_local.yaml")
        job_set = pods["JobSet"]["spec"]
        of_node = job_set["replicatedJobs"][0]["template"]["spec"]
        pod = of_node["template"]["spec"]
        names = [f"{pods['JobSet']['metadata']['name']}-node-0-{number}.{job_set['network']['subdomain']}"
                 for number in range(of_node["completions"])]
        hosts = [self.add_pod(name) for name in names]
        own = self.authority.issue("gpt-local", hosts=tuple(names))
        roots = [self.volumes(host, own, pods["ConfigMap"]["data"]["roles"]) for host in hosts]
        services = self.start_services(hosts, roots, pod["initContainers"][0],
                                       [{INDEX: str(number)} for number in range(len(hosts))])
        self.assert_trains(hosts, roots, pod["containers"][0], hosts)
        self.assertIn("shared memory", read(self.log(hosts[1], "ballast-worker")))
        for service in services[::-1]:  # As sidecars, when their ranks have ended.
            os.kill(children_of(service.pid)[0], signal.SIGTERM)
        for service in services:
            self.assertEqual(service.wait(PATIENCE), 0)
        self.assert_saved()


if __name__ == "__main__":
    enter_network_of_own()
    unittest.main(verbosity=2)
