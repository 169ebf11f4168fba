"""The metrics as a real Prometheus scrapes them, while jobs train; the alerts, and the queries of the dashboard.

    metrics_test.py BALLASTD PROTO_FOLDER

prometheus and promtool are Debian's. Without them the test says so in one line and is skipped.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.parse
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MONITORING = ROOT / "deploy/monitoring"
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from played_jobs import HANGS_AFTER, PACE_SECONDS, played  # noqa: E402
from processes import PATIENCE, HeldPort, Service, await_, read, start, stop  # noqa: E402
from status_pages import get, status_address  # noqa: E402

SKIPPED = 77
NAME = re.compile(r"\b(?:ballast|process)_[a-z_]+\b")
# Nothing is saved in these jobs' first seconds, and the service speaks no TLS, so of these there is nothing to see.
MAY_BE_EMPTY = ("ballast_checkpoint_step", "ballast_last_save_timestamp_seconds",
                "ballast_tls_certificate_expiry_timestamp_seconds")


def queries():
    """Every query of the dashboard, by its panel, with its variables filled in."""
    dashboard = json.loads((MONITORING / "grafana_dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in {"$instance": ".*", "$job_name": ".*", "$__rate_interval": "1m"}.items():
                expression = expression.replace(name, value)
            yield panel["title"], expression
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], re.fullmatch(r"label_values\((\w+), \w+\)", variable["query"]["query"])[1]


class Metrics(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.service = Service(BALLASTD, folder, "--metrics-listen=0", "--memory-limit=1GiB")
        cls.addClassCleanup(cls.service.stop)
        cls.base = status_address(cls.service)
        cls.enterClassContext(played(cls.service.address, PROTO))
        config = (MONITORING / "prometheus.yml").read_text()
        config = config.replace("127.0.0.1:7071", cls.base.removeprefix("http://")).replace("5s", "500ms")
        config = config.replace("ballast_rules.yml", str(MONITORING / "ballast_rules.yml"))
        (folder / "prometheus.yml").write_text(config)
        cls.log = folder / "prometheus.log"
        port = HeldPort()
        cls.addClassCleanup(port.close)
        cls.prometheus = f"http://{port.address}"
        process = start(["prometheus", f"--config.file={folder / 'prometheus.yml'}", "--log.level=warn",
                         f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={port.address}"], cls.log)
        cls.addClassCleanup(stop, process)
        # Two scrapes at least, or there are no rates.
        await_("Prometheus' scrapes", lambda: cls.scraped() >= 4, process)

    @classmethod
    def scraped(cls):
        try:
            found = cls.query("count_over_time(ballast_ready[1m])")
        except (OSError, json.JSONDecodeError):  # It has not started.
            return 0
        return float(found[0]["value"][1]) if found else 0

    @classmethod
    def query(cls, expression):
        url = f"{cls.prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {json.load(error)['error']}") from error

    def found(self, expression):
        """What there is; a scrape that was late has left nothing until the next."""
        return await_(expression, lambda: self.query(expression))

    def value(self, expression):
        found = self.found(expression)
        self.assertEqual(len(found), 1, expression)
        return float(found[0]["value"][1])

    def test_the_text_is_clean(self):
        checked = subprocess.run(["promtool", "check", "metrics"], input=get(self.base + "/metrics")[1], text=True,
                                 capture_output=True, timeout=PATIENCE)
        self.assertEqual((checked.returncode, checked.stdout + checked.stderr), (0, ""))

    def test_prometheus_sees_what_the_jobs_do(self):
        await_(f"a scrape: {read(self.log)}", lambda: self.value('up{job="ballast"}') == 1)
        of_stuck = '{job_name="stuck"}'
        self.assertEqual(self.value('ballast_steps_total{job_name="stuck", outcome="applied"}'), HANGS_AFTER)
        self.assertEqual(self.value(f"ballast_committed_step{of_stuck}"), HANGS_AFTER)
        self.assertEqual(self.value(f"ballast_ranks{of_stuck}"), 3)
        self.assertEqual(self.value(f"ballast_ranks_awaited{of_stuck}"), 1)
        self.assertGreater(self.value(f"ballast_awaiting_seconds{of_stuck}"), 0.5)
        self.assertEqual(self.value('ballast_job_phase{job_name="stuck"} == 1'), 1)
        for part in ("gathering", "awaiting", "deciding", "updating"):
            self.assertEqual(self.value(f'ballast_step_part_seconds_count{{job_name="stuck", part="{part}"}}'), HANGS_AFTER)
        # A backward pass of the slowest rank takes twice that of the fastest.
        self.assertGreater(self.value(f"sum(ballast_step_part_seconds_sum{of_stuck})") / HANGS_AFTER, 1.99 * PACE_SECONDS)
        # Every step brings a gradient and takes a weight of each of 39,936 elements, in bf16, padding included.
        for name in ("gradient", "weight"):
            sent = self.value(f'ballast_{name}_bytes_total{{job_name="stuck", path="stream"}}')
            self.assertEqual(sent % 512, 0)
            self.assertGreaterEqual(sent, HANGS_AFTER * 39936 * 2)
            self.assertLess(sent, (HANGS_AFTER + 1) * 40448 * 2)
            self.assertEqual(self.value(f'ballast_{name}_bytes_total{{job_name="stuck", path="shared_memory"}}'), 0)
        # What ranks tell of the last step: the lowest one's numbers, the slowest one's seconds.
        self.assertAlmostEqual(self.value('ballast_trainer_number{job_name="stuck", name="tokens_per_second"}'), 1000 + HANGS_AFTER)
        self.assertAlmostEqual(self.value('ballast_rank_seconds{job_name="stuck", part="compute"}'), 3 * PACE_SECONDS)
        self.assertEqual(self.value(f"ballast_slowest_rank{of_stuck}"), 2)
        self.assertEqual(len(self.found(f"ballast_group_gradient_norm{of_stuck}")), 2)
        # Of "steady", step 9 was skipped for its infinity, or will be.
        await_("a skipped step", lambda: self.value('ballast_skipped_steps_total{job_name="steady", cause="gradient"}') >= 1)
        self.assertEqual(self.value('sum(ballast_skipped_steps_total{cause!="gradient"})'), 0)
        memory = self.found('ballast_job_memory_bytes{job_name="stuck"}')
        kinds = {entry["metric"]["kind"]: float(entry["value"][1]) for entry in memory}
        # Three fp32 planes of AdamW and two of SGD, against bf16.
        self.assertEqual(kinds["state"], 6 * kinds["gradients"] - 4096)
        self.assertEqual(self.value("ballast_memory_limit_bytes"), 2**30)

    def test_every_query_of_the_dashboard_names_what_there_is(self):
        exist = set(NAME.findall(get(self.base + "/metrics")[1]))
        asked = list(queries())
        self.assertGreater(len(asked), 30)
        for panel, expression in asked:
            with self.subTest(panel=panel, expression=expression):
                names = set(NAME.findall(expression)) - set(MAY_BE_EMPTY)
                self.assertEqual(names - exist, set(), "no such metric")
                if not any(name in expression for name in MAY_BE_EMPTY):
                    self.found(expression)

    def test_the_alerts_name_what_there_is_and_fire(self):
        exist = set(NAME.findall(get(self.base + "/metrics")[1]))
        rules = (MONITORING / "ballast_rules.yml").read_text()
        expressions = re.findall(r"expr: (?:>-\n)?((?:.+\n)+?)(?= +(?:for|labels):)", rules)
        self.assertEqual(len(expressions), rules.count("- alert:"))
        for expression in expressions:
            self.assertEqual(set(NAME.findall(expression)) - set(MAY_BE_EMPTY) - exist, set(), expression)
        tested = (HERE / "ballast_rules_test.yml").read_text()
        for alert in re.findall(r"- alert: (\w+)", rules):
            self.assertRegex(tested, rf"alertname: {alert}\n[^{{]*exp_alerts:\n", f"{alert} fires in no test")
        for words in (["check", "rules", MONITORING / "ballast_rules.yml"], ["test", "rules", HERE / "ballast_rules_test.yml"],
                      ["check", "config", MONITORING / "prometheus.yml"]):
            done = subprocess.run(["promtool", *words], text=True, capture_output=True, timeout=PATIENCE)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    absent = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    if absent:
        print(f"skipped: {' and '.join(absent)} not found: apt-get install prometheus")
        sys.exit(SKIPPED)
    BALLASTD, PROTO = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
