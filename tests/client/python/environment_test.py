#!/usr/bin/env python3
"""torch_environment.py where nothing can be had from PyPI: a line that says so, and CI fails."""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import torch_environment


class Environment(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.cache = folder.name

    def test_says_in_one_line_what_is_not_tested(self):
        said = io.StringIO()
        with (mock.patch.object(torch_environment, "ATTEMPTS", 1), contextlib.redirect_stdout(said),
              mock.patch.dict(os.environ, XDG_CACHE_HOME=self.cache, PIP_INDEX_URL="http://127.0.0.1:1/",
                              PIP_FIND_LINKS="", PIP_RETRIES="0")):
            self.assertEqual(torch_environment.make(), 1)
        self.assertRegex(said.getvalue(),
                         r"^tests/run.sh: PyTorch could not be installed, so ballast.torch.* not tested: .+\n$")
        self.assertEqual(os.listdir(f"{self.cache}/ballast"), [])

    def test_a_test_is_skipped_and_in_ci_fails(self):
        for required, code in (("", 77), ("1", 1)):
            environment = os.environ | {"XDG_CACHE_HOME": self.cache, "BALLAST_REQUIRE_PYPI": required}
            done = subprocess.run([sys.executable, "-B", torch_environment.__file__, "--run", __file__],
                                  stdout=subprocess.DEVNULL, check=False, timeout=60, env=environment)
            self.assertEqual(done.returncode, code)


if __name__ == "__main__":
    unittest.main()
