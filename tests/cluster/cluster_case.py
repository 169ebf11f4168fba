"""A test case with a network of its own, and the result of a training on one service to compare with."""

import pathlib
import sys
import tempfile
import unittest

from hosts import Network, enter_network_of_own
from members import Cluster
from runs import Training, difference

TRAINING = Training(steps=15)


class ClusterCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="ballast-cluster-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.network = Network(cls.folder)
        cls.addClassCleanup(cls.network.close)
        cls.undisturbed = train_alone(cls.folder, cls.network, TRAINING)

    def cluster(self, count, **wire):
        cluster = Cluster(self.folder, self.network, count, **wire)
        self.addCleanup(cluster.check_decisions)
        self.addCleanup(cluster.stop)  # This one is first.
        return cluster

    def start(self, cluster, job, **options):
        run = cluster.run(job, TRAINING, **options)
        self.addCleanup(run.stop)
        return run

    def assert_same_bits(self, result, fields=None):
        self.assertEqual(difference(result, self.undisturbed, fields), "")


def train_alone(folder, network, training):
    """The result of one service."""
    cluster = Cluster(folder, network, 1)
    try:
        return cluster.train("alone", training)
    finally:
        cluster.stop()


def main():
    enter_network_of_own()
    unittest.main(verbosity=2, argv=sys.argv)
