"""The HTTP port of a service with a certificate: who is answered, who is not, and what holds up nobody.

    tls_test.py BALLASTD PROTO_FOLDER
"""

import contextlib
import json
import pathlib
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import unittest
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
MONITORING = HERE.parents[1] / "deploy/monitoring"
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from certificates import Authority, Guarded  # noqa: E402
from processes import HeldPort, Service, await_, read, start, stop  # noqa: E402
from status_pages import get, status_address, trusting  # noqa: E402

SECONDS = 60
HALF_OPEN = 60  # More than there are threads.


def address_of(base):
    host, port = base.removeprefix("https://").split(":")
    return host, int(port)


def first_bytes_of_a_handshake():
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = trusting().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


class Encrypted(unittest.TestCase):
    """Tokens and clients' certificates, over TLS."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.guarded = Guarded(cls.folder, role="viewer")
        with cls.guarded.roles.open("a") as roles:
            roles.write("viewer * cert:grafana\n")
        cls.authority = cls.guarded.authority
        cls.service = Service(BALLASTD, cls.folder, *cls.guarded.flags, "--metrics-listen=0", "--holder=none",
                              "--memory-limit=1GiB", listen=f"unix:{cls.folder}/socket")
        cls.addClassCleanup(cls.service.stop)
        cls.base = status_address(cls.service)
        cls.tls = trusting(cls.authority.certificate)
        cls.bearer = {"Authorization": f"Bearer {cls.guarded.token.read_text().strip()}"}

    def get(self, path, tls=None, **more):
        return get(self.base + path, tls=tls or self.tls, **more)

    def served_certificate(self):
        with socket.create_connection(address_of(self.base), timeout=30) as plain:
            with self.tls.wrap_socket(plain, server_hostname="localhost") as connection:
                return connection.getpeercert(binary_form=True)

    def test_who_trusts_its_authority_is_answered(self):
        self.assertRegex(self.base, "^https://")
        self.assertEqual(self.get("/live")[:2], (200, "live\n"))
        await_("that it is ready", lambda: self.get("/ready")[:2] == (200, "ready\n"), self.service.process)
        self.assertIn("<html", self.get("/")[1])
        self.assertEqual(self.get("/live", method="HEAD")[:2], (200, ""))
        # The certificate says who it is.
        self.assertEqual(self.get("/live", headers={"Host": "ballast.example"})[0], 200)

    def test_who_trusts_another_authority_is_not_deceived(self):
        with tempfile.TemporaryDirectory() as folder:
            for tls in (trusting(Authority(pathlib.Path(folder)).certificate), trusting()):
                with self.assertRaises(ssl.SSLCertVerificationError):
                    self.get("/live", tls)
        self.assertEqual(self.get("/live")[0], 200)

    def test_an_old_version_of_tls_is_refused(self):
        old = trusting(self.authority.certificate)
        old.set_ciphers("DEFAULT:@SECLEVEL=0")
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with self.assertRaises(ssl.SSLError):
            self.get("/live", old)

    def test_plain_http_is_told_so_and_nothing_else(self):
        plain = self.base.replace("https", "http")
        for path in ("/live", "/metrics", "/api/service"):
            code, text, _ = get(plain + path, headers=self.bearer)
            self.assertEqual((code, text), (400, "this port speaks TLS: ask for https://\n"))
        with socket.create_connection(address_of(self.base), timeout=30) as other:
            other.sendall(b"nonsense\r\n\r\n")
            answer = b"".join(iter(lambda: other.recv(4096), b""))
        self.assertNotIn(b"HTTP", answer)  # Nothing, or an alert of TLS.

    def test_a_token_is_taken(self):
        self.assertEqual(self.get("/metrics")[0], 401)
        self.assertEqual(self.get("/api/service", headers={"Authorization": "Bearer wrong"})[0], 401)
        code, text, _ = self.get("/metrics", headers=self.bearer)
        self.assertEqual(code, 200)
        self.assertIn("\nballast_jobs 0\n", text)

    def expiry(self):
        """As the metrics have it."""
        text = self.get("/metrics", headers=self.bearer)[1]
        return float(re.search(r"(?m)^ballast_tls_certificate_expiry_timestamp_seconds (\S+)$", text)[1])

    def test_the_metrics_say_when_the_certificate_expires(self):
        done = subprocess.run(["openssl", "x509", "-enddate", "-noout", "-in", self.folder / "service.pem"],
                              capture_output=True, text=True, check=True)
        self.assertEqual(self.expiry(), ssl.cert_time_to_seconds(done.stdout.strip().removeprefix("notAfter=")))

    def test_a_certificate_says_who_looks_too(self):
        known, unknown = (trusting(self.authority.certificate, self.authority.issue(name))
                          for name in ("grafana", "mallory"))
        self.assertEqual(self.get("/metrics", known)[0], 200)
        self.assertEqual(self.get("/metrics", unknown)[0], 403)
        # Whoever gives a token means it.
        self.assertEqual(self.get("/metrics", known, headers={"Authorization": "Bearer wrong"})[0], 401)
        self.assertEqual(self.get("/metrics", unknown, headers=self.bearer)[0], 200)
        with tempfile.TemporaryDirectory() as folder:
            other = trusting(self.authority.certificate, Authority(pathlib.Path(folder)).issue("grafana"))
            with self.assertRaises(OSError):  # An alert, or the end.
                self.get("/live", other)

    def test_handshakes_that_stop_hold_up_nobody_for_long(self):
        begin = first_bytes_of_a_handshake()
        self.assertGreater(len(begin), 100)
        with contextlib.ExitStack() as stack:
            for i in range(HALF_OPEN):
                stopped = stack.enter_context(socket.create_connection(address_of(self.base)))
                stopped.sendall(begin[:i])
            self.assertEqual(self.get("/live", seconds=SECONDS)[0], 200)

    def test_z_a_new_certificate_is_taken_and_a_wrong_one_is_not(self):
        before, expiry = self.served_certificate(), self.expiry()
        key = self.folder / "service.key"
        good = key.read_text()
        key.write_text("no key\n")
        said = r"cannot read the certificate of 127\S+ again, .*service.key has no PEM private key"
        await_("the complaint", lambda: re.search(said, read(self.service.log)), self.service.process, SECONDS)
        self.assertEqual(self.served_certificate(), before)
        key.write_text(good)
        self.authority.issue("service")
        await_("the new certificate", lambda: self.served_certificate() != before, self.service.process, SECONDS)
        self.assertEqual(self.get("/live")[0], 200)
        # gRPC's is read by a watch of its own.
        await_("its expiry in the metrics", lambda: self.expiry() > expiry, self.service.process, SECONDS)

    def test_prometheus_scrapes_it_with_its_token(self):
        self.assert_scraped("scheme", "tls_config", "ca_file", "authorization", "credentials_file")

    def test_prometheus_scrapes_it_with_its_certificate(self):
        self.assert_scraped("scheme", "tls_config", "ca_file", "cert_file", "key_file")

    @unittest.skipUnless(shutil.which("prometheus"), "there is no prometheus here")
    def assert_scraped(self, *names):
        """With these lines of the configuration, which are comments otherwise."""
        config = (MONITORING / "prometheus.yml").read_text()
        config, lines = re.subn(rf"(?m)^(\s+)# ((?:  )?(?:{'|'.join(names)}):.*)$", r"\1\2", config)
        self.assertEqual(lines, len(names))
        certificate, key = self.authority.issue("grafana")
        for old, new in {"127.0.0.1:7071": self.base.removeprefix("https://"), "5s": "500ms",
                         "ballast_rules.yml": MONITORING / "ballast_rules.yml",
                         "/etc/prometheus/ballast-ca.pem": self.authority.certificate,
                         "/etc/prometheus/ballast.pem": certificate, "/etc/prometheus/ballast.key": key,
                         "/etc/prometheus/ballast.token": self.guarded.token}.items():
            self.assertIn(old, config)
            config = config.replace(old, str(new))
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        path = folder / "prometheus.yml"
        path.write_text(config)
        checked = subprocess.run(["promtool", "check", "config", path], capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(checked.returncode, 0, checked.stderr)
        port = HeldPort()
        self.addCleanup(port.close)
        process = start(["prometheus", f"--config.file={path}", "--log.level=warn",
                         f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={port.address}"],
                        folder / "prometheus.log")
        self.addCleanup(stop, process)
        await_("Prometheus' scrapes", lambda: self.is_up(port.address), process, SECONDS)

    def is_up(self, address):
        try:
            query = f"http://{address}/api/v1/query?query=ballast_ready"
            with urllib.request.urlopen(query, timeout=30) as answer:
                found = json.load(answer)["data"]["result"]
        except (OSError, json.JSONDecodeError):  # It has not started.
            return False
        return [row["value"][1] for row in found] == ["1"]


class Certificates(unittest.TestCase):
    """Without roles whoever has a certificate may look, and nobody else."""

    def test_without_one_there_are_only_probes_and_the_empty_page(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        authority = Authority(folder)
        certificate, key = authority.issue("service")
        service = Service(BALLASTD, folder, f"--tls-cert={certificate}", f"--tls-key={key}",
                          f"--tls-client-ca={authority.certificate}", "--metrics-listen=0.0.0.0:0", "--holder=none")
        self.addCleanup(service.stop)
        base = status_address(service).replace("0.0.0.0", "127.0.0.1")
        nobody = trusting(authority.certificate)
        await_("that it is ready", lambda: get(base + "/ready", tls=nobody)[0] == 200, service.process)
        for path in ("/metrics", "/api/service"):
            code, text, _ = get(base + path, tls=nobody)
            self.assertEqual(code, 401)
            self.assertIn("--tls-client-ca", json.loads(text)["error"])
            self.assertEqual(get(base + path, tls=trusting(authority.certificate, authority.issue("anybody")))[0], 200)


class Starts(unittest.TestCase):
    def test_what_others_could_see_is_refused(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        guarded = Guarded(folder)
        tls, tokens = guarded.flags[:2], guarded.flags[3:]
        readable = "others could read the tokens of --tokens-file on their way; give --tls-cert and --tls-key"
        for flags, why in ((tokens, readable), ([*tokens, "--metrics-insecure"], readable),
                           (tls, "without authentication; give --tls-client-ca or --tokens-file"),
                           ([], "without encryption; give --tls-cert, --tls-key")):
            with self.subTest(flags):
                done = subprocess.run([BALLASTD, f"--listen=unix:{folder}/socket", "--nostartup-benchmark",
                                       "--holder=none", "--metrics-listen=0.0.0.0:0", *flags],
                                      text=True, capture_output=True, timeout=SECONDS)
                lines = [line for line in done.stderr.splitlines() if "[ballastd]" not in line]
                self.assertEqual((done.returncode, len(lines)), (2, 1), done.stderr)
                begin = "ballastd: flag --metrics-listen=0.0.0.0:0: refusing to listen on 0.0.0.0:0: "
                self.assertEqual(lines[0][:len(begin)], begin)
                self.assertIn(why, lines[0])


if __name__ == "__main__":
    BALLASTD = sys.argv[1]
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
