#!/usr/bin/env python3
"""Members whose processes are killed and stopped, and whose links are cut, while ranks train: no worker notices more
than a wait, and all ends with the bits of a training on one service that nothing befell.

    faults_test.py [--seed S]

prints one line a run. The seed chooses the faults and their instants; what they hit is the machine's mood.
"""

import argparse
import collections
import pathlib
import random
import sys
import tempfile

from cluster_case import train_alone
from faults import CUTS, KILLS, Faults
from hosts import Network, enter_network_of_own
from members import Cluster
from runs import Training, difference

TRAINING = Training(steps=60)  # A second or two.
# Of each run: how many members, which faults, and how many at most.
RUNS = ((2, KILLS, 14), (3, KILLS, 14), (2, CUTS, 6), (3, KILLS + CUTS, 8))
LEAST_KILLS = 24
MOST_RUNS = 20
# What must have been hit, be it in other runs.
NEEDED = ("kills of the lead", "kills of a member", "hosts cut off", "one-way cuts", "links cut", "stops")


class WrongBits(AssertionError):
    pass


def one_run(cluster, training, undisturbed, kinds, most, seed, **options):
    """The faults that there were, and what the processes had died in."""
    draw = random.Random(seed)
    mode = draw.choice(["speculate", "wait"])
    before = cluster.recoveries()
    run = cluster.run("gpt", training, flags=[f"--update={mode}"])
    faults = Faults(cluster, run, draw, **options)
    try:
        faults.play(kinds, most)
        problem = difference(cluster.end(run), undisturbed)
        if problem:
            raise WrongBits(problem)
        return faults.done, cluster.recoveries() - before
    except Exception as error:
        kind = WrongBits if isinstance(error, WrongBits) else AssertionError
        raise kind(f"{error}\n  seed {seed}, {mode}, faults: {dict(faults.done)}{cluster.story(run)}") from error
    finally:
        run.stop()


def words(counts):
    return ", ".join(f"{what} {count}" for what, count in counts.most_common()) or "none"


def play(folder, network, seed):
    """The exit code."""
    undisturbed = train_alone(folder, network, TRAINING)
    done, recovered = collections.Counter(), collections.Counter()

    def missed():
        kills = done["kills of the lead"] + done["kills of a member"]
        return [what for what in NEEDED if not done[what]] + (["enough kills"] if kills < LEAST_KILLS else [])

    number = 0
    while number < len(RUNS) or (missed() and number < MOST_RUNS):
        count, kinds, most = RUNS[number % len(RUNS)]
        cluster = Cluster(folder, network, count)
        try:
            there, died_in = one_run(cluster, TRAINING, undisturbed, kinds, most, f"{seed}/{number}")
        finally:
            cluster.stop()
        print(f"run {number} over {count} members: {words(there)}; died in: {words(died_in)}; same bits", flush=True)
        done.update(there)
        recovered.update(died_in)
        number += 1
    print(f"all: {words(done)}; died in: {words(recovered)}")
    if missed():
        print(f"FAILED: there was too little of: {', '.join(missed())}")
        return 1
    if not recovered["gradients"]:
        print("FAILED: nobody was killed in the middle of a step")
        return 1
    return 0


def main():
    enter_network_of_own()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    flags = parser.parse_args()
    print(f"seed {flags.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ballast-faults-") as name:
        network = Network(pathlib.Path(name))
        try:
            return play(pathlib.Path(name), network, flags.seed)
        except AssertionError as error:
            print(f"FAILED, seed {flags.seed}: {error}")
            return 1
        finally:
            network.close()


if __name__ == "__main__":
    sys.exit(main())
