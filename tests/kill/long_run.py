"""What long.sh runs: rounds of instants_test.py and runs of service_test.py, one after the other, each with a seed of
its own, until the time is over or one fails."""

import argparse
import collections
import pathlib
import random
import signal
import sys
import tempfile
import time

import instants_test
import service_test
from kill_test import TRAINING
from runs import Service, undisturbed_result

REPORT_EVERY = 60  # Seconds.


class Stopped(BaseException):
    """Somebody has told it to stop."""


def stop(*_):
    raise Stopped


class Campaign:
    def __init__(self, folder, seed):
        self.folder, self.seed = folder, seed
        self.totals = collections.defaultdict(collections.Counter)
        self.rounds = 0
        self.undisturbed = instants_test.Undisturbed(folder)
        quiet = Service(folder)
        try:
            self.trained = undisturbed_result(folder, quiet, "undisturbed", TRAINING)
        finally:
            quiet.stop()

    def play(self):
        """One round of each kind: their folders go with it."""
        seed = f"{self.seed}/{self.rounds}"
        with tempfile.TemporaryDirectory(prefix="round-", dir=self.folder) as name:
            instants_test.one_round(pathlib.Path(name), self.undisturbed, seed, self.totals)
        before = sum(service_test.kills_done)
        with tempfile.TemporaryDirectory(prefix="round-", dir=self.folder) as name:
            service_test.one_run(pathlib.Path(name), None, self.trained, f"workers-{self.rounds}", seed)
        self.totals["kills"]["workers' steps"] += sum(service_test.kills_done) - before
        self.totals["recoveries"].update(service_test.recovered)
        service_test.recovered.clear()
        self.rounds += 1

    def report(self, begin, wrong=0):
        print(f"after {(time.monotonic() - begin) / 60:.1f} minutes, {self.rounds} rounds: "
              f"{'; '.join(instants_test.lines_of(self.totals))}; wrong bits {wrong}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    flags = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    begin = time.monotonic()
    print(f"seed {flags.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ballast-long-") as name:
        campaign = Campaign(pathlib.Path(name), flags.seed)
        reported = begin
        try:
            while time.monotonic() - begin < 60 * flags.minutes:
                campaign.play()
                if time.monotonic() - reported > REPORT_EVERY:
                    reported = time.monotonic()
                    campaign.report(begin)
        except Stopped:
            print("stopped")
        except AssertionError as error:
            campaign.report(begin, wrong=1)
            print(f"FAILED in round {campaign.rounds} of seed {flags.seed}: {error}")
            return 1
        campaign.report(begin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
