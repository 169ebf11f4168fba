#!/usr/bin/env python3
"""What ballast.torch takes of its process's memory. In a process of its own, where nothing else comes and goes."""

import ctypes
import pathlib
import sys
import unittest

import torch

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client/python"))

import ballast  # noqa: E402
import ballast.torch  # noqa: E402


def private(of):
    """VmRSS or VmHWM, in bytes, without what this process shares with the service: in one look, since its threads touch
    more of that meanwhile."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    kib = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines if line.endswith(" kB"))}
    return 1024 * (kib[of] - kib["RssShmem"])


def most_memory(work):
    """How much more this process has meanwhile than before, at most."""
    ctypes.CDLL(None).malloc_trim(0)  # What was freed before is no room for what comes.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = private("VmRSS")
    work()
    return private("VmHWM") - before


class MemoryTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.service = ballast.Service(memory_limit="1GiB")
        cls.addClassCleanup(cls.service.stop)

    def optimizer(self, model, job):
        for p in model:
            p.grad = torch.ones(p.shape, dtype=p.dtype).t().contiguous().t()
        optimizer = ballast.torch.AdamW(model.named_parameters(), service=self.service.address, job=job)
        self.addCleanup(optimizer.close)
        return optimizer

    def test_one_parameter_at_a_time_is_copied(self):
        """Where it does not lie as it is sent."""
        self.optimizer(torch.nn.ParameterList([torch.randn(8, 8)]), "small").step()  # What only the first one needs.
        model = torch.nn.ParameterList([torch.randn(2048, 512).bfloat16() for _ in range(32)])
        elements = sum(p.numel() for p in model)
        optimizer = self.optimizer(model, "large")
        self.assertLess(most_memory(lambda: optimizer.attach(create=True)), 4 * elements / 2)
        # Where the service is late with a place in shared memory, the session keeps what it is to send: not in each step.
        self.assertLess(min(most_memory(optimizer.step) for _ in range(5)), 2 * elements * 3 / 4)
        self.assertTrue(optimizer._binding.member.session.shares_memory)


if __name__ == "__main__":
    unittest.main()
