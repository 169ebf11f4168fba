"""What `tests/kill/long.sh --members` runs: trainings over members with faults, until the time is over or one fails.

    campaign.py --minutes N [--seed S] [--round R]

Each round has a cluster and a seed of its own. --round plays that one only, again and again.
"""

import argparse
import collections
import dataclasses
import itertools
import pathlib
import random
import signal
import sys
import tempfile
import time

from cluster_case import train_alone
from faults import CUTS, KILLS
from faults_test import WrongBits, one_run, words
from hosts import Network, enter_network_of_own
from members import Cluster
from runs import Training


@dataclasses.dataclass(frozen=True)
class LongUpdates(Training):
    """Large weights, few tokens and long messages: a good part of a step is its update."""

    def words(self):
        larger = {"--width": 256, "--context": 4, "--bucket-elements": 262144, "--chunk-elements": 65536}
        kept = [word for word in super().words() if str(word).partition("=")[0] not in larger]
        return kept + [f"{flag}={value}" for flag, value in larger.items()]


TRAININGS = (Training(steps=120), LongUpdates(steps=60, micro_steps=1))
REPORT_EVERY = 60  # Seconds.
RUNS_OF_A_ROUND = 3
# Kills are many, and a step is soon done again. A cut takes long.
KINDS = ((KILLS, 40), (CUTS, 6), (KILLS + CUTS, 20))
WIRES = ({}, {}, {"delay": 0.002}, {"loss": 0.01})
LONGEST = (0.3, 1.5, 4.0)  # Seconds that a cut takes.
# Longer than a connection lives that nothing comes from; in one of so many rounds.
VERY_LONG, VERY_LONG_IN = 50.0, 25


class Stopped(BaseException):
    """Somebody has told it to stop."""


def stop(*_):
    raise Stopped


class Campaign:
    def __init__(self, folder, network, seed):
        self.folder, self.network, self.seed = folder, network, seed
        self.done, self.recovered = collections.Counter(), collections.Counter()
        self.rounds = self.runs = 0
        self.begin = time.monotonic()
        self.undisturbed = {training: train_alone(folder, network, training) for training in TRAININGS}

    def play(self, number):
        seed = f"{self.seed}/{number}"
        draw = random.Random(seed)
        with tempfile.TemporaryDirectory(prefix="round-", dir=self.folder) as name:
            cluster = Cluster(pathlib.Path(name), self.network, draw.choice([2, 2, 3, 4]), **draw.choice(WIRES))
            try:
                for run in range(RUNS_OF_A_ROUND):
                    training = draw.choice(TRAININGS)
                    kinds, most = draw.choice(KINDS)
                    longest = draw.choice(LONGEST)
                    if draw.randrange(VERY_LONG_IN) == 0:
                        kinds, most, longest = CUTS, 1, VERY_LONG
                    done, recovered = one_run(cluster, training, self.undisturbed[training], kinds, most,
                                              f"{seed}/{run}", longest=longest)
                    self.done.update(done)
                    self.recovered.update(recovered)
                    self.runs += 1
            finally:
                cluster.stop()
        self.rounds += 1

    def report(self):
        print(f"after {(time.monotonic() - self.begin) / 60:.1f} minutes: {self.rounds} rounds, {self.runs} trainings "
              f"with the same bits; {words(self.done)}; died in: {words(self.recovered)}", flush=True)


def play(campaign, minutes, only):
    """The exit code."""
    reported = campaign.begin
    number = only
    try:
        for number in itertools.count() if only is None else itertools.repeat(only):
            if time.monotonic() - campaign.begin > 60 * minutes:
                break
            campaign.play(number)
            if time.monotonic() - reported > REPORT_EVERY:
                reported = time.monotonic()
                campaign.report()
    except Stopped:
        print("stopped")
    except AssertionError as error:
        campaign.report()
        wrong = "wrong bits, " if isinstance(error, WrongBits) else ""
        print(f"FAILED: {wrong}round {number} of seed {campaign.seed}: {error}")
        return 1
    campaign.report()
    return 0


def main():
    enter_network_of_own()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--round", type=int)
    flags = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    print(f"seed {flags.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ballast-cluster-") as name:
        network = Network(pathlib.Path(name))
        try:
            return play(Campaign(pathlib.Path(name), network, flags.seed), flags.minutes, flags.round)
        finally:
            network.close()


if __name__ == "__main__":
    sys.exit(main())
