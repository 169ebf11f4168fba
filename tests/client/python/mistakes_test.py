#!/usr/bin/env python3
"""What goes wrong in a training script and is told at once, or is no mistake at all; and what such a script leaves."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest
import warnings

import torch
from torch_test import ROOT, TOLERANCE, Model, batch, furthest, loss_of, names

import ballast.torch

import processes  # noqa: E402
from messages import refused  # noqa: E402

_MODES = ({}, {"overlap": True}, {"overlap": True, "overlap_weights": True})
_FOLDER = """
import sys
sys.path.insert(0, sys.argv[1])
import ballast
service = ballast.Service()
print(service._folder, service.pid, flush=True)
sys.stdin.read()
"""


def optimizer_of(model, **options):
    return ballast.torch.AdamW(names(model), lr=0.01, **options)


def train(model, optimizer, begin, end):
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()


class MistakesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)

    def each_mode(self):
        for options in _MODES:
            with self.subTest(options):
                model, reference = Model(), Model()
                mine, theirs = optimizer_of(model, **options), torch.optim.AdamW(names(reference), lr=0.01)
                yield model, mine, reference, theirs
                mine.close()
                self.assertLess(furthest(model, reference), TOLERANCE)

    def test_a_learning_rate_that_is_no_number(self):
        for model, mine, reference, theirs in self.each_mode():
            for each, optimizer in ((model, mine), (reference, theirs)):
                train(each, optimizer, 0, 3)
                loss_of(each, batch(3)).backward()
            for name, value in (("lr", float("nan")), ("weight_decay", -1.0), ("betas", (0.9, 1.0))):
                before = mine.param_groups[0][name]
                mine.param_groups[0][name] = value
                with refused(self, ValueError):
                    mine.step()
                mine.param_groups[0][name] = before
            for each, optimizer in ((model, mine), (reference, theirs)):
                optimizer.step()
                train(each, optimizer, 4, 6)

    def test_a_step_without_any_gradient(self):
        for model, mine, reference, theirs in self.each_mode():
            for each, optimizer in ((model, mine), (reference, theirs)):
                train(each, optimizer, 0, 2)
                optimizer.zero_grad()
            with self.assertWarnsRegex(UserWarning, "has a gradient"):
                mine.step()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                mine.step()
            for each, optimizer in ((model, mine), (reference, theirs)):
                train(each, optimizer, 2, 4)

    def test_a_model_that_is_frozen(self):
        model = Model().requires_grad_(False)
        optimizer = ballast.torch.AdamW(model.named_parameters())
        with self.assertWarnsRegex(UserWarning, "requires a gradient"):
            optimizer.step()
        optimizer.close()

    def test_parameters_without_names(self):
        for model, mine, reference, theirs in self.each_mode():
            unnamed = ballast.torch.AdamW(model.parameters(), lr=0.01)
            for each, optimizer in ((model, unnamed), (reference, theirs)):
                train(each, optimizer, 0, 3)
            self.assertEqual(unnamed._binding.member.names, [f"param.{n}" for n in range(len(list(model.parameters())))])
            unnamed.close()

    def test_parameters_that_the_module_names(self):
        model = Model()
        optimizer = ballast.torch.AdamW([{"params": [model.inner.weight]}, {"params": [model.norm.weight], "lr": 0.5}],
                                        module=model)
        train(model, optimizer, 0, 1)
        self.assertEqual(optimizer._binding.member.names, ["inner.weight", "norm.weight"])
        optimizer.close()

    def test_parameters_that_cannot_be_trained(self):
        meta = torch.nn.Linear(3, 3, device="meta")
        memory = torch.zeros(10)
        one, other, apart = (torch.nn.Parameter(memory[begin:begin + 4]) for begin in (0, 3, 4))
        columns = torch.zeros(4, 4)
        left, right = torch.nn.Parameter(columns[:, :2]), torch.nn.Parameter(columns[:, 2:])
        for named in (meta.named_parameters(), [("a", one), ("b", other)]):
            optimizer = ballast.torch.AdamW(named)
            with refused(self, ValueError):
                optimizer.attach(create=True)
            optimizer.close()
        for named in ([("a", one), ("b", apart)], [("left", left), ("right", right)]):
            optimizer = ballast.torch.AdamW(named)
            self.assertEqual(optimizer.attach(create=True), 0)
            optimizer.close()

    def test_parameters_that_fsdp_had_gathered(self):
        with tempfile.TemporaryDirectory() as folder:
            torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
            self.addCleanup(torch.distributed.destroy_process_group)
            model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
            torch.distributed.fsdp.fully_shard(model[0])
            torch.distributed.fsdp.fully_shard(model)
            model(torch.ones(3))
            optimizer = ballast.torch.AdamW(model.named_parameters())
            model(torch.ones(3)).sum().backward()
            with refused(self, ValueError):
                optimizer.step()
            optimizer.close()

    def test_a_compiled_backward(self):
        for model, mine, reference, theirs in self.each_mode():
            for each, optimizer in ((model, mine), (reference, theirs)):
                for step in range(4):
                    optimizer.zero_grad()
                    loss = loss_of(each, batch(step))
                    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
                        loss.backward()
                    optimizer.step()
            torch._dynamo.reset()

    # ------------------------------------------------------------ what is left

    def test_a_service_of_its_own_that_is_killed(self):
        for options in _MODES:
            with self.subTest(options):
                model = Model()
                optimizer = optimizer_of(model, **options)
                train(model, optimizer, 0, 3)
                holder = optimizer._kept.service.pid
                children = pathlib.Path(f"/proc/{holder}/task/{holder}/children").read_text().split()
                for pid in [holder, *map(int, children)]:
                    os.kill(pid, signal.SIGKILL)
                optimizer._options.reconnect_timeout = 1e9  # It is not waited for.
                with refused(self, ballast.UnavailableError):
                    for step in range(3, 5):
                        train(model, optimizer, step, step + 1)
                optimizer.close()

    def test_a_job_is_closed_where_no_one_needs_it(self):
        with ballast.Service() as service:
            client = ballast.connect(service.address)
            for number, options in enumerate(_MODES):
                model = Model()
                optimizer = optimizer_of(model, service=service.address, job=f"job{number}", **options)
                train(model, optimizer, 0, 2)
                with refused(self, ballast.FailedPreconditionError):
                    client.close_job(f"job{number}")
                optimizer.close(job=True)
                self.assertEqual(client.jobs(), [])
            with refused(self, ballast.FailedPreconditionError):
                optimizer_of(Model(), service=service.address, job="none").close(job=True)
            optimizer = optimizer_of(model, service=service.address, job="left")
            train(model, optimizer, 0, 1)
            optimizer.close()
            client.close_job("left")
            self.assertEqual(client.jobs(), [])

    def test_folders_of_trainers_that_were_killed(self):
        trainer = subprocess.Popen([sys.executable, "-c", _FOLDER, str(ROOT / "client/python")], text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.addCleanup(trainer.communicate)
        folder, pid = trainer.stdout.readline().split()
        with ballast.Service():
            self.assertTrue(os.path.exists(folder))  # One that lives.
        trainer.kill()
        processes.await_("the end of its service", lambda: processes.state_of(int(pid)) in ("", "Z"))
        with ballast.Service():
            self.assertFalse(os.path.exists(folder))


if __name__ == "__main__":
    unittest.main()
