"""What a service shows over HTTP, without a browser: who may look, how it starts, live and ready. And what the
tool makes of it: doctor and plan.

    http_test.py BALLASTD PROTO_FOLDER BALLAST
"""

import hashlib
import http.client
import json
import math
import os
import pathlib
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import grpc  # noqa: E402
from google.protobuf import json_format  # noqa: E402
from played_jobs import HANGING_RANK, HANGS_AFTER, PACE_SECONDS, played  # noqa: E402
from processes import PATIENCE, HeldPort, Service, await_, read  # noqa: E402
from status_pages import get, status_address  # noqa: E402


def ballast(*words):
    return subprocess.run([BALLAST, *map(str, words)], text=True, capture_output=True, timeout=PATIENCE)


def parts_of(path):
    """What `ballast doctor` has written, by title."""
    return dict(part.split("\n", 1) for part in path.read_text().split("\n==> ")[1:])


class Plans(unittest.TestCase):
    def test_a_size_is_enough(self):
        done = ballast("plan", "7B:bf16", "--memory=128GiB", "--world-size=8")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("7,000,000,000", done.stdout)
        rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("wait", "speculate"))]
        self.assertEqual([row[-1] for row in rows], ["yes"] * 3 + ["no"] + ["no"] * 4)
        # The README's table: 12 + 2 bytes at least, and all of it 12 + 2 + 4 + 12 + 4.
        self.assertAlmostEqual(float(rows[0][-2]), 14, delta=0.15)
        self.assertAlmostEqual(float(rows[-1][-2]), 34, delta=0.3)
        for rule, state in (("amsgrad", 16), ("lion", 8), ("adagrad", 8), ("sgd", 4), ("sgd:momentum", 8), ("signsgd", 4)):
            plan = json.loads(ballast("plan", f"10M:{rule}", "--json").stdout)
            self.assertAlmostEqual(float(plan["options"][0]["state_bytes"]), state * 1e7, delta=1e6)
        too_large = ballast("plan", "7B", "--memory=8GiB")
        self.assertIn("It does not fit: the service needs a --memory-limit of at least", too_large.stdout)
        self.assertEqual((too_large.returncode, too_large.stderr), (1, ""))

    def test_each_member_is_planned(self):
        def plan(*flags):
            done = ballast("plan", "1B:bf16", "--json", *flags)
            return done.returncode, json.loads(done.stdout)

        alone = plan("--memory=64GiB", "--world-size=4")[1]
        self.assertEqual(alone["members"], [])
        code, over = plan("--memory=64GiB", "--world-size=4", "--members=a:7070,b:7070,c:7070")
        self.assertEqual(code, 0)
        self.assertEqual([(member["address"], member["ranks"]) for member in over["members"]],
                         [("a:7070", [0, 1]), ("b:7070", [2]), ("c:7070", [3])])
        self.assertEqual((over["chunks"], over["elements"], over["checkpoint_bytes"]),
                         (alone["chunks"], alone["elements"], alone["checkpoint_bytes"]))
        for number, option in enumerate(over["options"]):
            of_member = [member["total_bytes"][number] for member in over["members"]]
            self.assertAlmostEqual(sum(of_member) / alone["options"][number]["total_bytes"], 1, delta=0.02)
            self.assertEqual(option["total_bytes"], of_member[0])  # It has twice the ranks.
        # The second one is short, whatever the others have.
        code, short = plan("--memory=64GiB,2GiB,64GiB", "--world-size=4", "--members=3")
        self.assertEqual((code, {option["fits"] for option in short["options"]}), (1, {False}))
        self.assertEqual(short["options"][0]["total_bytes"], short["members"][1]["total_bytes"][0])
        text = ballast("plan", "1B:bf16", "--memory=64GiB,2GiB,64GiB", "--members=3").stdout
        rows = {line.split()[0]: line for line in text.splitlines() if line and line[0].isdigit()}
        self.assertEqual({name: "is short of" in row for name, row in rows.items()}, {"0": False, "1": True, "2": False})
        self.assertIn("It does not fit", text)

    def test_what_is_no_plan(self):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write('{"nonsense": 1}')
            file.flush()
            for words, why in ((["nonsense"], "neither a size such as 7B:bf16 nor a file"), (["7B:int8"], "none of bf16, fp16, fp32"),
                               (["7B", "--memory=lots"], "such as 20GiB"), (["7B", "--memory=128"], "with its unit"), (["7B", "--world-size=0"], "whole number from 1"),
                               (["7B", "--members=0"], "number from 1"), (["7B", "--members=a:1,a:1"], "twice"),
                               (["7B", "--members=2", "--memory=1GiB,1GiB,1GiB"], "one for each"), (["7B", "--members=3", "--world-size=2"], "name at most 2"),
                               ([file.name], "is not a ballast.v1.Job in JSON"), (["0"], "neither a size"), (["900T"], "more than a job may have")):
                with self.subTest(words):
                    done = ballast("plan", *words)
                    self.assertEqual((done.returncode, done.stdout, len(done.stderr.splitlines())), (2, "", 1))
                    self.assertIn(why, done.stderr)


class Starts(unittest.TestCase):
    def refused(self, address, *more):
        done = subprocess.run([BALLASTD, "--listen=127.0.0.1:0", "--nostartup-benchmark", f"--metrics-listen={address}", *more],
                              text=True, capture_output=True, timeout=PATIENCE)
        lines = [line for line in done.stderr.splitlines() if "[ballastd]" not in line]
        self.assertEqual((done.returncode, len(lines)), (2, 1), done.stderr)
        self.assertRegex(lines[0], r"^ballastd: flag --metrics-listen=.*: ")
        return lines[0]

    def test_a_taken_port_ends_it_with_one_line(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            line = self.refused(f"127.0.0.1:{taken.getsockname()[1]}")
        self.assertRegex(line, "the address is in use; stop the other process or choose another")

    def test_addresses_that_cannot_be(self):
        for address in ("nonsense", "127.0.0.1", "127.0.0.1:99999", "::1:7071", "unix:/tmp/x"):
            with self.subTest(address):
                self.assertRegex(self.refused(address), "expected PORT, or HOST:PORT")

    def test_other_hosts_reach_it_only_where_that_is_said(self):
        for address in ("0.0.0.0:0", "[::]:0", "host.example:7071"):
            self.assertRegex(self.refused(address), "use a loopback address or --metrics-insecure")

    def test_it_listens_on_ipv6_too(self):
        with tempfile.TemporaryDirectory() as folder:
            service = Service(BALLASTD, pathlib.Path(folder), "--holder=none", "--metrics-listen=[::1]:0")
            try:
                base = status_address(service)
                self.assertRegex(base, r"^http://\[::1\]:\d+$")
                self.assertEqual(get(base + "/live")[:2], (200, "live\n"))
            finally:
                service.stop()

    def test_check_config_finds_an_address_that_will_not_do(self):
        for address, why in (("0.0.0.0:7071", "--metrics-insecure"), ("nonsense", "expected PORT, or HOST:PORT")):
            self.assertRegex(self.refused(address, "--check-config"), why)


class Upgrades(unittest.TestCase):
    """The address in another configuration, of a service that has jobs."""

    def setUp(self):
        port = HeldPort()
        self.addCleanup(port.close)
        self.address, self.folder = port.address, pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.config = self.folder / "config"
        self.configure(f"metrics-listen = {self.address}")
        self.service = Service(BALLASTD, self.folder, f"--config={self.config}", "--memory-limit=1GiB")
        self.addCleanup(self.service.stop)
        self.base = f"http://{self.address}"

    def configure(self, *lines):
        self.config.write_text("".join(line + "\n" for line in lines))

    def upgrade(self):
        return subprocess.run([BALLASTD, f"--upgrade={self.service.process.pid}"], text=True, capture_output=True, timeout=PATIENCE)

    def process(self):
        """Of the service; none while it starts."""
        return json.loads(get(self.base + "/api/service")[1]).get("process_id")

    def next_process(self, before):
        return await_("the next process", lambda: (now := self.process()) != before and now, self.service.process)

    def test_an_address_that_will_not_do_is_no_upgrade(self):
        before = self.process()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            for address, why in (("0.0.0.0:0", "--metrics-insecure"),
                                 (f"127.0.0.1:{taken.getsockname()[1]}", "the address is in use; stop the other process")):
                self.configure(f"metrics-listen = {address}")
                done = self.upgrade()
                self.assertEqual(done.returncode, 1)
                self.assertIn(why, done.stderr)
                self.assertEqual(self.process(), before)

    def test_at_the_same_address_no_connection_is_refused(self):
        before = self.process()
        answers, over = [], threading.Event()

        def ask():
            while not over.is_set():
                try:
                    answers.append(get(self.base + "/live")[0])
                except ConnectionRefusedError:
                    answers.append("refused")
                except (OSError, http.client.HTTPException):  # The process that had this connection has ended.
                    pass

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            done = self.upgrade()
            self.assertEqual(done.returncode, 0, done.stderr)
            upgraded = self.next_process(before)
            os.kill(upgraded, signal.SIGKILL)
            self.next_process(upgraded)
        finally:
            over.set()
            asking.join()
        self.assertEqual(set(answers), {200})

    def test_one_that_is_not_free_yet_is_tried_again(self):
        self.configure("metrics-listen = 0.0.0.0:" + self.address.rpartition(":")[2], "metrics-insecure = true")
        before = self.process()
        # The process before has the port on loopback until the new one serves.
        done = self.upgrade()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("no status page and no metrics for now", read(self.service.log))

        def is_there():
            try:
                return self.process() not in (before, None)
            except (OSError, http.client.HTTPException):
                return False

        await_("the status page", is_there, self.service.process)
        await_("the line about it", lambda: "status page at http://0.0.0.0:" in read(self.service.log))


class Roles(unittest.TestCase):
    def test_a_trainers_doctor_does_not_see_the_whole_service(self):
        with tempfile.TemporaryDirectory() as folder:
            roles, path = pathlib.Path(folder, "roles"), pathlib.Path(folder, "report.txt")
            roles.write_text(f"trainer * user:{pwd.getpwuid(os.getuid()).pw_name}\n")
            service = Service(BALLASTD, pathlib.Path(folder), f"--roles-file={roles}", "--metrics-listen=0",
                              listen=f"unix:{folder}/socket")
            try:
                with played(service.address, PROTO):
                    done = ballast("doctor", "stuck", f"--service={service.address}", f"--out={path}")
                log = read(service.log)
            finally:
                service.stop()
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("operator", done.stdout)
            parts = parts_of(path)
        self.assertIn("job stuck", parts)
        self.assertIn("missing", parts)
        self.assertFalse(parts.keys() & {"service", "log, the last lines", "metrics", "/proc/self/limits"})
        self.assertIn("--roles-file without --tokens-file does not hold for --metrics-listen", log)


class Tokens(unittest.TestCase):
    """A service with tokens: of a viewer of all jobs, of one of a single job, of nobody."""

    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.roles, cls.tokens = folder / "roles", folder / "tokens"
        cls.roles.write_text(f"operator * user:{pwd.getpwuid(os.getuid()).pw_name}\nviewer * token:all\nviewer stuck token:one\n")
        cls.tokens.touch(mode=0o600)
        cls.tokens.write_text("".join(f"{name} {hashlib.sha256(name.encode() * 8).hexdigest()}\n" for name in ("all", "one", "none")))
        cls.service = Service(BALLASTD, folder, f"--roles-file={cls.roles}", f"--tokens-file={cls.tokens}", "--metrics-listen=0",
                              "--holder=none", "--memory-limit=1GiB", listen=f"unix:{folder}/socket")
        cls.addClassCleanup(cls.service.stop)
        cls.base = status_address(cls.service)
        cls.enterClassContext(played(cls.service.address, PROTO))

    def get(self, path, token=None):
        return get(self.base + path, headers=None if token is None else {"Authorization": f"Bearer {token * 8}"})

    def test_without_one_nothing_is_said_of_jobs(self):
        for path in ("/metrics", "/api/service", "/api/jobs", "/api/job?job=stuck", "/api/parameters?job=stuck", "/api/nothing",
                     f"/metrics?token={'all' * 8}", f"/metrics?access_token={'all' * 8}"):
            for code, text, headers in (self.get(path), self.get(path, "wrong"), self.get(path, ""),
                                        get(self.base + path, headers={"Authorization": "all" * 8}),
                                        get(self.base + path, headers={"Authorization": "Basic " + "all" * 8})):
                self.assertEqual((code, headers["WWW-Authenticate"]), (401, 'Bearer realm="ballast"'), path)
                self.assertNotIn("stuck", text)
                self.assertIn("token", json.loads(text)["error"])
        for path in ("/metrics", "/api/service", "/api/job?job=stuck"):
            code, text, _ = self.get(path, "none")
            self.assertEqual(code, 403, path)
            self.assertIn("token:none does not have the role viewer for any job", json.loads(text)["error"])

    def test_probes_and_the_page_itself_take_none(self):
        for path in ("/live", "/ready", "/", "/page.js", "/page.css"):
            self.assertEqual(self.get(path)[0], 200, path)

    def test_a_viewer_sees_the_jobs_that_it_is_a_viewer_of(self):
        for token, jobs in (("all", ["steady", "stuck"]), ("one", ["stuck"])):
            code, text, _ = self.get("/api/jobs", token)
            self.assertEqual((code, [job["name"] for job in json.loads(text)["jobs"]]), (200, [f"jobs/{name}" for name in jobs]))
            code, text, _ = self.get("/metrics", token)
            self.assertEqual(code, 200)
            self.assertEqual('job_name="steady"' in text, "steady" in jobs)
            self.assertIn('ballast_ranks{job_name="stuck"} 3', text)
            self.assertIn(f"\nballast_jobs {len(jobs)}\n", text)
            self.assertEqual(self.get("/api/job?job=stuck", token)[0], 200)
            for path in ("job?", "parameters?", "distribution?parameter=h.1.mlp.weight&", "timeline?"):
                self.assertEqual(self.get(f"/api/{path}job=steady", token)[0], 200 if token == "all" else 403, path)

    def test_z_a_token_that_is_gone_sees_nothing_more(self):
        self.tokens.write_text("".join(line for line in self.tokens.read_text().splitlines(True) if not line.startswith("all ")))
        await_("the new tokens", lambda: self.get("/api/service", "all")[0] == 401, self.service.process)
        self.assertEqual(self.get("/api/service", "one")[0], 200)


class Deaths(unittest.TestCase):
    def figures(self, base):
        found = re.findall(r"(?m)^(ballast_(?:child_deaths_total|recovery_seconds|ready|generation_epoch)\S*) (\S+)$",
                           get(base + "/metrics")[1])
        return {name: float(value) for name, value in found}

    def test_the_deaths_of_the_service_are_counted_and_what_taking_over_took_is_told(self):
        port = HeldPort()
        self.addCleanup(port.close)
        base = f"http://{port.address}"
        with tempfile.TemporaryDirectory() as folder:
            service = Service(BALLASTD, pathlib.Path(folder), f"--metrics-listen={base.removeprefix('http://')}", "--memory-limit=1GiB")
            try:
                with played(service.address, PROTO):
                    self.assertEqual(self.figures(base), {
                        "ballast_child_deaths_total": 0, "ballast_recovery_seconds": 0, "ballast_ready": 1,
                        'ballast_generation_epoch{job_name="steady"}': 1, 'ballast_generation_epoch{job_name="stuck"}': 1})
                for deaths in (1, 2):
                    process = json.loads(get(base + "/api/service")[1])["process_id"]
                    os.kill(process, signal.SIGKILL)
                    await_("the next process", lambda: self.ready_after(base, process), service.process)
                    now = self.figures(base)
                    self.assertEqual((now["ballast_child_deaths_total"], now["ballast_ready"]), (deaths, 1))
                    self.assertGreater(now["ballast_recovery_seconds"], 0)
                    self.assertLess(now["ballast_recovery_seconds"], PATIENCE)
                self.assertEqual(json.loads(get(base + "/api/service")[1])["child_deaths"], 2)
            finally:
                service.stop()

    def ready_after(self, base, process):
        """Whatever it answers meanwhile: it lives, and nothing that says that it is ready comes before it is."""
        try:
            code, text, _ = get(base + "/ready")
            if code == 503:
                self.assertEqual(text, "not ready: the service is starting and is still recovering its jobs\n")
                self.assertEqual(get(base + "/live")[0], 200)
                return False
            return json.loads(get(base + "/api/service")[1])["process_id"] != process
        except (OSError, http.client.HTTPException):  # Between the two.
            return False


class Saves(unittest.TestCase):
    def figures(self):
        """Of the job "stuck": (complete, failed, when, step of the checkpoint), None where there is no such series."""
        text = get(self.base + "/metrics")[1]
        series = ('saves_total{job_name="stuck",outcome="complete"}', 'saves_total{job_name="stuck",outcome="failed"}',
                  'last_save_timestamp_seconds{job_name="stuck"}', 'checkpoint_step{job_name="stuck"}')
        found = [re.search(rf"(?m)^ballast_{re.escape(each)} (\S+)$", text) for each in series]
        return tuple(match and float(match[1]) for match in found)

    def test_saves_are_counted_and_their_time_told(self):
        port = HeldPort()
        self.addCleanup(port.close)
        self.base = f"http://{port.address}"
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        saved = folder / "saved"
        service = Service(BALLASTD, folder, f"--metrics-listen={port.address}", "--memory-limit=1GiB",
                          f"--checkpoint-dir={saved}")
        self.addCleanup(service.stop)
        with played(service.address, PROTO):
            self.assertEqual(self.figures(), (0, 0, 0, None))
            begin = time.time()
            self.assertEqual(ballast("save", "stuck", f"--service={service.address}").returncode, 0)
            await_("the save", lambda: self.figures()[0] == 1)
            at = self.figures()[2]
            self.assertEqual(self.figures(), (1, 0, at, HANGS_AFTER))
            self.assertTrue(begin - 1 <= at <= time.time() + 1, at)
            shutil.rmtree(saved / "stuck")
            (saved / "stuck").write_text("in the way")
            self.assertEqual(ballast("save", "stuck", f"--service={service.address}").returncode, 1)
            await_("the failure", lambda: self.figures() == (1, 1, at, HANGS_AFTER))
            # A process that takes the job over reads when it was saved.
            (saved / "stuck").unlink()
            self.assertEqual(ballast("save", "stuck", f"--service={service.address}").returncode, 0)
            at = await_("another save", lambda: self.figures()[0] == 2 and self.figures()[2])
            process = json.loads(get(self.base + "/api/service")[1])["process_id"]
            os.kill(process, signal.SIGKILL)
            await_("the next process", self.next_process(process), service.process)
            self.assertEqual(self.figures(), (0, 0, at, HANGS_AFTER))
            # A job that is not there has no series.
            self.assertEqual(ballast("close", "stuck", f"--service={service.address}").returncode, 0)
            await_("its end", lambda: self.figures() == (None, None, None, None))

    def next_process(self, before):
        def is_there():
            try:
                return get(self.base + "/ready")[0] == 200 and json.loads(get(self.base + "/api/service")[1])["process_id"] != before
            except (OSError, http.client.HTTPException):
                return False
        return is_there


class Versions(unittest.TestCase):
    def test_a_client_of_another_release_is_told_so_in_one_line(self):
        with tempfile.TemporaryDirectory() as folder:
            service = Service(BALLASTD, pathlib.Path(folder), "--holder=none", "--metrics-listen=0")
            try:
                version = json.loads(get(status_address(service) + "/api/service")[1])["version"]
                major, minor = map(int, version.split(".")[:2])
                for agent, works in ((f"ballast/{major}.{minor + 1}.7", True), (f"ballast/{major}.{minor}.0", True), ("", True),
                                     (f"ballast/{major}.{minor + 2}.0", False), (f"ballast/{major + 1}.{minor}.0", False)):
                    with self.subTest(agent):
                        code, text = self.list_jobs(service, agent)
                        self.assertEqual(code, "OK" if works else "FAILED_PRECONDITION")
                        if not works:
                            self.assertEqual(text.split(";")[0], f"Ballast client {agent[8:]} and service {version} are "
                                             "incompatible: minor versions may differ by one")
                self.assertEqual(ballast("jobs", f"--service={service.address}").returncode, 0)
            finally:
                service.stop()

    def list_jobs(self, service, agent):
        channel = grpc.insecure_channel(service.address, options=[("grpc.primary_user_agent", agent)] if agent else [])
        with channel:
            try:
                channel.unary_unary("/ballast.v1.JobService/ListJobs")(b"", timeout=30)
            except grpc.RpcError as error:
                return error.code().name, error.details()
        return "OK", ""


class Looks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        # Records of what outlives a process are beside what `ballast plan` counts: half a MiB a job.
        cls.service = Service(BALLASTD, folder, "--metrics-listen=localhost:0", "--memory-limit=1GiB", "--holder=none",
                              f"--checkpoint-dir={folder / 'saved'}", "--drain-seconds=600")
        cls.addClassCleanup(cls.service.stop)
        cls.base = status_address(cls.service)
        cls.jobs = cls.enterClassContext(played(cls.service.address, PROTO))

    def json(self, path):
        code, text, headers = get(self.base + path)
        self.assertEqual((code, headers["Content-Type"]), (200, "application/json"), text)
        return json.loads(text)

    def test_only_looking_is_possible(self):
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "NONSENSE"):
            for path in ("/", "/metrics", "/api/job?job=stuck"):
                code, _, headers = get(self.base + path, method)
                # What is no method of HTTP's the library itself refuses.
                self.assertIn(code, (400, 405, 501), f"{method} {path}")
                if code == 405:
                    self.assertEqual(headers["Allow"], "GET, HEAD")
        self.assertEqual(self.json("/api/job?job=stuck")["committed_step"], HANGS_AFTER)

    def test_a_head_has_no_body(self):
        code, text, headers = get(self.base + "/metrics", "HEAD")
        self.assertEqual((code, text), (200, ""))
        self.assertGreater(int(headers["Content-Length"]), 1000)

    def test_another_sites_page_cannot_look(self):
        for host in ("evil.example", "evil.example:7071", "localhost.evil.example"):
            self.assertEqual(get(self.base + "/api/service", headers={"Host": host})[0], 403, host)
        for host in ("localhost:9", "LocalHost", "127.0.0.1", "192.0.2.7:80"):
            self.assertEqual(get(self.base + "/api/service", headers={"Host": host})[0], 200, host)
        headers = get(self.base + "/")[2]
        self.assertIn("default-src 'none'", headers["Content-Security-Policy"])
        self.assertEqual(headers["X-Content-Type-Options"], "nosniff")
        self.assertIsNone(headers["Access-Control-Allow-Origin"])

    def test_what_is_not_there(self):
        for path in ("/nothing", "/../etc/passwd", "/%2e%2e/etc/passwd", "/api/nothing", "/api/job?job=nobody",
                     "/api/distribution?job=stuck&parameter=none"):
            self.assertEqual(get(self.base + path)[0], 404, path)
        for name in ("", "a%0ab", "n" * 1000, "..", "a/b"):
            code, text, _ = get(f"{self.base}/api/job?job={name}")
            self.assertEqual(code, 400, name)
            self.assertIn("is not 1 to 128 letters", json.loads(text)["error"])
            self.assertLess(len(text), 400)

    def test_what_is_no_request(self):
        host, port = self.base.removeprefix("http://").split(":")
        for data, code in ((b"nonsense\r\n\r\n", 400), (b"GET /\r\n\r\n", 400), (b"GET / HTTP/2\r\n\r\n", 400),
                           (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
                           (b"GET / HTTP/1.1\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n", 400),
                           (b"GET /" + b"a" * 10000 + b" HTTP/1.1\r\n\r\n", 414), (b"GET / HTTP/1.1\r\nA: " + b"a" * 20000, 400),
                           (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10000, 400)):
            with self.subTest(data[:30]), socket.create_connection((host, port), timeout=PATIENCE) as peer:
                peer.sendall(data)
                head, _, text = b"".join(iter(lambda: peer.recv(65536), b"")).partition(b"\r\n\r\n")
                self.assertEqual(head.split()[:2], [b"HTTP/1.1", str(code).encode()])
                self.assertEqual(text.count(b"\n"), 1)
        # A part of an answer, or a compressed one, is not made: the whole one is right, too.
        asked = {"Range": "bytes=0-1", "Accept-Encoding": "gzip, br"}
        self.assertEqual(get(self.base + "/live", headers=asked)[:2], (200, "live\n"))

    def test_who_has_sent_what_and_who_is_awaited(self):
        job = self.json("/api/job?job=stuck")
        self.assertEqual((job["phase"], job["attached_ranks"], job["chunk_count"]), ("OPEN", 3, sum(rank["chunks"] for rank in job["ranks"])))
        self.assertGreater(job["seconds_open"], job["seconds_since_first_seal"])
        self.assertGreater(job["seconds_since_first_seal"], 0)
        ranks = {rank["rank"]: rank for rank in job["ranks"]}
        self.assertEqual([ranks[r]["sealed"] for r in range(3)], [True, False, True])
        self.assertLess(ranks[HANGING_RANK]["chunks_complete"], ranks[HANGING_RANK]["chunks"])
        self.assertTrue(ranks[HANGING_RANK]["missing_parameters"])
        self.assertGreaterEqual(min(job["gradient_bytes"], job["weight_bytes"]), HANGS_AFTER * 39936 * 2)
        [glance] = [job for job in self.json("/api/jobs")["jobs"] if job["name"] == "jobs/stuck"]
        self.assertEqual([(rank["rank"], rank["sealed"]) for rank in glance["ranks"]], [(HANGING_RANK, False)])
        self.assertEqual([step["step"] for step in glance["recent_steps"]], list(range(1, HANGS_AFTER + 1)))

    def test_the_history_has_what_ranks_tell(self):
        history = self.json("/api/history?job=stuck&entries=100")
        self.assertEqual([entry["first_step"] for entry in history["entries"]], list(range(1, HANGS_AFTER + 1)))
        means = {(column["source"], column["name"]): column["mean"] for column in history["columns"]}
        self.assertGreater(min(means["FROM_SERVICE", "gathering_seconds"]), 0.99 * PACE_SECONDS)  # The fastest rank's backward.
        for parts in zip(*(means["FROM_SERVICE", f"{part}_seconds"] for part in ("awaiting", "deciding", "updating"))):
            self.assertTrue(parts[0] > 0 and 0 <= parts[1] < PATIENCE and 0 <= parts[2] < PATIENCE)
        # Of the ranks' losses the lowest rank's, of their seconds those of the last, which computes longest.
        self.assertAlmostEqual(means["FROM_TRAINER", "loss"][0], 2 + 3 * math.exp(-1 / 20), 5)
        self.assertEqual([entry["slowest_rank"] for entry in history["entries"]], HANGS_AFTER * [2])
        self.assertAlmostEqual(means["FROM_RANK", "compute"][0], 3 * PACE_SECONDS, 5)
        norms = [means[source] for source in (("FROM_SERVICE", "norm"), ("FROM_GROUP", "decay"), ("FROM_GROUP", "no_decay"))]
        for norm, decay, no_decay in zip(*norms):
            self.assertAlmostEqual(math.hypot(decay, no_decay) / norm, 1, 5)
        joined = self.json("/api/history?job=stuck&first=2&last=5&entries=2")
        self.assertEqual([(entry["first_step"], entry["last_step"]) for entry in joined["entries"]], [(2, 3), (4, 5)])

    def test_a_distribution_counts_every_element(self):
        parameter = self.json("/api/distribution?job=steady&parameter=h.1.mlp.weight")
        self.assertEqual([plane["plane"] for plane in parameter["planes"]], ["MASTER", "EXP_AVG", "EXP_AVG_SQ"])
        for plane in parameter["planes"]:
            self.assertEqual(sum(plane["magnitude_histogram"]) + plane["zeros"], 4096)
        found = self.json("/api/parameters?job=steady&match=mlp.b")
        self.assertEqual((found["matches"], len(found["parameters"])), (4, 4))
        self.assertEqual(self.json("/api/job?job=steady")["parameter_count"], 17)

    def test_a_timeline_has_the_parts_of_a_step_and_a_job_that_hangs_has_none(self):
        kinds = set()
        for _ in range(2):  # Every 25th step is skipped, and updates nothing.
            kinds |= {event["kind"] for event in self.json("/api/timeline?job=steady")["events"]}
        self.assertLessEqual({"BEGUN", "ARRIVED", "DECIDED", "UPDATED", "COMMITTED"}, kinds)
        self.assertIn("no step of job stuck", self.json("/api/timeline?job=stuck&patience=1")["unavailable"])

    def test_slow_peers_hold_up_neither_training_nor_for_long_the_page(self):
        before = self.json("/api/job?job=steady")["committed_step"]
        slow = [socket.create_connection(self.base.removeprefix("http://").split(":")) for _ in range(60)]
        for connection in slow:
            connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        try:
            await_("an answer", self.answers)
            await_("another step", lambda: self.json("/api/job?job=steady")["committed_step"] > before)
        finally:
            for connection in slow:
                connection.close()

    def answers(self):
        try:
            return get(self.base + "/live")[0] == 200
        except OSError:
            return False

    def test_a_doctors_file_has_what_a_report_needs(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "report.txt")
            done = ballast("doctor", "stuck", f"--service={self.service.address}", f"--out={path}")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual([*pathlib.Path(folder).iterdir()], [path])
            parts = parts_of(path)
        self.assertNotIn("missing", parts)
        self.assertEqual(json.loads(parts["the same as JSON"])["committed_step"], HANGS_AFTER)
        self.assertIn("--drain-seconds=600", parts["service"])
        self.assertRegex(parts["what is under way in each job"], r"(?m)^stuck: open; 0 readers, .* 0 calls wait$")
        self.assertIn("status page at", parts["log, the last lines"])
        self.assertIn('ballast_ranks_awaited{job_name="stuck"} 1', parts["metrics"])
        self.assertIn("Max open files", parts["/proc/self/limits"])
        self.assertIn("(ballastd) ", parts["/proc/self/task"])

    def test_a_doctor_of_no_job_writes_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "report.txt")
            done = ballast("doctor", "stucc", f"--service={self.service.address}", f"--out={path}")
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (1, 1))
            self.assertIn("stuck", done.stderr)  # Did you mean it?
            self.assertFalse(path.exists())

    def test_a_plan_has_the_bytes_that_the_service_allocates(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "job.json")
            path.write_text(json_format.MessageToJson(self.jobs[1].describe()))
            done = ballast("plan", path, "--memory=1MiB", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        plan = json.loads(done.stdout)
        memory = self.json("/api/job?job=stuck")["memory"]
        [row] = [row for row in plan["options"]
                 if (row["update"], row["several_micro_steps"], row["shared_memory"]) == ("WAIT", True, False)]
        self.assertEqual(
            {kind: row[f"{name}_bytes"] for kind, name in {"state": "state", "gradients": "gradient", "other": "other",
                                                           "accumulators": "accumulator"}.items()},
            {"state": memory["state_bytes"], "gradients": memory["gradient_bytes"], "accumulators": memory["accumulator_bytes"],
             "other": memory["total_bytes"] - sum(memory[f"{kind}_bytes"] for kind in (
                 "state", "gradient", "accumulator", "speculation", "previous"))})
        self.assertEqual((plan["world_size"], plan["elements"], row["fits"]), (3, 39808, True))
        [most] = [row for row in plan["options"] if row["update"] == "SPECULATE" and row["several_micro_steps"]
                  and row["shared_memory"]]
        self.assertFalse(most["fits"])

    def test_z_while_it_drains_it_is_live_and_not_ready(self):
        self.assertEqual(get(self.base + "/ready")[:2], (200, "ready\n"))
        self.service.process.send_signal(signal.SIGTERM)  # It waits for the step that is open.
        await_("the drain", lambda: get(self.base + "/ready")[0] == 503, self.service.process)
        self.assertEqual(get(self.base + "/live")[0], 200)
        self.assertIn("\nballast_ready 0\n", get(self.base + "/metrics")[1])
        done = ballast("abort-step", "stuck", f"--service={self.service.address}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.service.process.wait(PATIENCE), 0)


if __name__ == "__main__":
    BALLASTD, PROTO, BALLAST = sys.argv[1:4]
    unittest.main(argv=sys.argv[:1] + sys.argv[4:], verbosity=2)
