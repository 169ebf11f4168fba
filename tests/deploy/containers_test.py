#!/usr/bin/env python3
"""What the files for containers and Kubernetes tell the programs, the programs of a build do: with other folders and
ports, since this host has its own.

    containers_test.py BUILD_DIR
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/status")]

from certificates import Authority  # noqa: E402
from processes import PATIENCE, Service, await_  # noqa: E402
from status_pages import get, status_address, trusting  # noqa: E402

BUILD = pathlib.Path(sys.argv.pop()).resolve()
POD = (ROOT / "deploy/kubernetes/ballast.yaml").read_text()
IMAGE = (ROOT / "deploy/container/Containerfile").read_text()
FOLDERS = re.compile(r"/(?:var/lib|run|etc)/ballast\b|/state\b")


class Containers(unittest.TestCase):
    def setUp(self):
        # In memory, as a pod's volume for the state.
        self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(dir="/dev/shm")))
        for folder in ("var/lib/ballast", "run/ballast", "etc/ballast/tls", "etc/ballast/roles", "state"):
            (self.root / folder).mkdir(parents=True)

    def here(self, text):
        return FOLDERS.sub(lambda folder: f"{self.root}{folder[0]}", text).replace("$(POD)", "ballast-0")

    def service(self, *flags):
        """The program of the image with these flags, which listens on ports that the system chooses."""
        entry = json.loads(re.search(r"(?m)^ENTRYPOINT (.*)$", IMAGE)[1])
        self.assertEqual(entry.pop(0), "ballastd")
        config = self.root / "etc/ballast/ballastd.conf"
        config.write_text(self.here((ROOT / "deploy/systemd/ballastd.conf").read_text()))
        self.assertIn(f"--config={config}", [self.here(flag) for flag in entry])
        flags = [re.sub(r"0\.0\.0\.0:\d+", "0.0.0.0:0", self.here(flag)) for flag in (*entry, *flags)]
        listen = [flag.partition("=")[2] for flag in flags if flag.startswith("--listen=")]
        listen = listen or [re.search(r"(?m)^listen = (.*)$", config.read_text())[1]]
        service = Service(BUILD / "bin/ballastd", self.root, *(flag for flag in flags if not flag.startswith("--listen=")),
                          listen=listen[0])
        self.addCleanup(service.stop)
        return service

    def test_the_image_takes_packages_that_there_are(self):
        packages = re.findall(r"(?m)^ballast_package\(\w+ (\S+)", (ROOT / "deploy/debian/packages.cmake").read_text())
        patterns = re.search(r"(?m)^COPY (.*) /packages/$", IMAGE)[1].split()
        self.assertEqual(patterns, [f"{name}_*.deb" for name in packages if not name.startswith("lib")])

    def test_the_image_listens_where_no_other_host_is_and_its_health_check_sees_it(self):
        service = self.service()
        self.assertEqual(service.port_file.read_text().split(), [f"unix:{self.root}/run/ballast/ballastd.sock"])
        check = json.loads(re.search(r"(?m)^HEALTHCHECK (?:.*\\\n)?.*CMD (\[.*\])$", IMAGE)[1])

        def healthy():
            return subprocess.run([BUILD / "bin" / check[0], *map(self.here, check[1:])], check=False, timeout=PATIENCE,
                                  capture_output=True).returncode == 0

        self.assertTrue(healthy())
        service.stop()
        self.assertFalse(healthy())

    def test_the_pod_speaks_tls_answers_its_probes_and_shows_prometheus_what_nobody_else_may_see(self):
        authority = Authority(self.root)
        for kind, made in zip(("crt", "key"), authority.issue("ballast")):
            shutil.copy(made, self.root / f"etc/ballast/tls/tls.{kind}")
        shutil.copy(authority.certificate, self.root / "etc/ballast/tls/ca.crt")
        roles = re.search(r"(?m)^  roles: \|\n((?:    .*\n)+)", POD)[1]
        (self.root / "etc/ballast/roles/roles").write_text(re.sub(r"(?m)^    ", "", roles))

        flags = re.findall(r"(?m)^            - (--\S+)$", POD)
        ports = dict(re.findall(r"- \{name: (\w+), containerPort: (\d+)\}", POD))
        self.assertIn(f"--listen=0.0.0.0:{ports['grpc']},unix:/run/ballast/ballastd.sock", flags)
        self.assertIn(f"--metrics-listen=0.0.0.0:{ports['metrics']}", flags)
        self.assertEqual(re.findall(r"protocol: TCP, port: (\d+)", POD), [ports["grpc"], ports["metrics"]])
        service = self.service(*flags)
        base = status_address(service).replace("0.0.0.0", "127.0.0.1")
        self.assertRegex(base, "^https:")

        probes = re.findall(r"httpGet: \{path: (\S+), port: metrics, scheme: HTTPS\}", POD)
        self.assertEqual(probes, ["/ready", "/live"])
        anybody = trusting(authority.certificate)
        for path in probes:  # A kubelet asks by the pod's address.
            await_(f"an answer to {path}",
                   lambda path=path: get(base + path, tls=anybody, headers={"Host": "10.1.2.3:7071"})[0] == 200, service.process)
        self.assertEqual(get(base + "/metrics", tls=anybody)[0], 401)
        for name, code in (("prometheus", 200), ("gpt-trainer", 200), ("mallory", 403)):
            self.assertEqual(get(base + "/metrics", tls=trusting(authority.certificate, authority.issue(name)))[0], code, name)

        certificate, key = authority.issue("gpt-trainer")
        port = service.address.rpartition(":")[2]
        done = subprocess.run([BUILD / "bin/ballast", "jobs", f"--service=localhost:{port}"], check=False, timeout=PATIENCE,
                              text=True, capture_output=True, env=os.environ | {
                                  "BALLAST_TLS_CA": str(authority.certificate), "BALLAST_TLS_CERT": str(certificate),
                                  "BALLAST_TLS_KEY": str(key)})
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
