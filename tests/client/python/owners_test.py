#!/usr/bin/env python3
"""Several optimizers of ballast.torch in a process: one after the other, beside each other, and over the same
parameters."""

import gc
import os
import pathlib
import threading
import unittest
import warnings
import weakref

import torch
import ranks_for_tests  # noqa: F401
from processes import await_  # Found by the line before.
from messages import refused
from torch_test import Model, batch, furthest, loss_of, names, TOLERANCE

import ballast.torch

_MODES = ({}, {"overlap": True}, {"overlap": True, "accumulation_steps": 1}, {"overlap": True, "overlap_weights": True})


def services():
    """Of this process."""
    children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(child) for child in children if pathlib.Path(f"/proc/{child}/comm").read_text().strip() == "ballastd"]


def optimizer_of(model, **options):
    return ballast.torch.AdamW(names(model), lr=0.01, **options)


def train(model, optimizer, steps=3, begin=0):
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()


class OwnersTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)

    def tearDown(self):
        self.assertEqual(services(), [])

    def reference(self, steps=3):
        model = Model()
        train(model, torch.optim.AdamW(names(model), lr=0.01), steps)
        return model

    def test_one_that_no_one_has_ends_without_the_garbage_collector(self):
        for options in _MODES:
            with self.subTest(options):
                model = Model()
                optimizer = optimizer_of(model, **options)
                schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
                train(model, optimizer)
                self.assertEqual(len(services()), 1)
                living = [weakref.ref(optimizer), weakref.ref(optimizer._binding), weakref.ref(optimizer._binding.member.session)]
                del optimizer, schedule
                self.assertEqual([reference() for reference in living], [None, None, None])
                self.assertEqual(services(), [])
                self.assertEqual([parameter for parameter in model.parameters() if parameter._post_accumulate_grad_hooks],
                                 [])
                self.assertLess(furthest(model, self.reference()), TOLERANCE)

    def test_several_have_one_service_and_a_job_each(self):
        models = [Model() for _ in range(5)]
        optimizers = [optimizer_of(model, overlap=True) for model in models]
        for model, optimizer in zip(models, optimizers):
            train(model, optimizer)
        self.assertEqual(len(services()), 1)
        client = ballast.connect(optimizers[0]._kept.service.address)
        self.assertEqual(sorted(job["name"] for job in client.jobs()),
                         ["trainer", "trainer-2", "trainer-3", "trainer-4", "trainer-5"])
        optimizers[1].close()
        del optimizers[2:4], optimizer
        self.assertEqual(sorted(job["name"] for job in client.jobs()), ["trainer", "trainer-5"])
        for model, optimizer in ((models[0], optimizers[0]), (models[4], optimizers[2])):
            train(model, optimizer, 2, begin=3)
            self.assertLess(furthest(model, self.reference(5)), TOLERANCE)

    def test_a_job_of_one_that_the_garbage_collector_has_ended_is_no_others(self):
        """As trainers have it, which are in cycles with their optimizers."""
        lives = optimizer_of(Model())
        train(Model(), lives)
        for _ in range(2):
            model = Model()
            gone = optimizer_of(model)
            gone.trainer = gone
            train(model, gone)
            del gone
            gc.collect()
        model = Model()
        another = optimizer_of(model)
        train(model, another)
        self.assertLess(furthest(model, self.reference()), TOLERANCE)
        client = ballast.connect(lives._kept.service.address)
        self.assertEqual(len(client.jobs()), 2)
        another.close()
        lives.close()

    def test_a_hundred_leave_nothing(self):
        """Of descriptors, threads, jobs and the service's memory, beside one that lives."""
        lives, model = optimizer_of(Model()), Model()
        train(Model(), lives)
        client = ballast.connect(lives._kept.service.address)

        def left():
            (job,) = client.jobs()
            return (len(os.listdir("/proc/self/fd")), threading.active_count(), job["memory"]["total_bytes"],
                    len(model.inner.weight._post_accumulate_grad_hooks or ()))

        def make(number):
            optimizer = optimizer_of(model, **_MODES[number % len(_MODES)])
            train(model, optimizer, 1)

        for number in range(4):
            make(number)
        before = left()
        for number in range(100):
            make(number)
        await_("the threads' end", lambda: left() == before)
        lives.close()

    def test_another_over_the_same_parameters_is_told(self):
        for options in _MODES:
            with self.subTest(options):
                model = Model()
                first = optimizer_of(model, **options)
                train(model, first)
                second = torch.optim.SGD(model.parameters(), lr=0.01)
                loss_of(model, batch(3)).backward()
                with self.assertWarnsRegex(UserWarning, "torch.optim.sgd.SGD steps on parameter .*embedding|0 of param"
                                           ".* which ballast.torch.AdamW trains with job trainer"):
                    second.step()
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    for _ in range(2):
                        second.zero_grad()
                        loss_of(model, batch(4)).backward()
                        self.assertIsNotNone(model.inner.weight.grad)
                        second.step()
                with refused(self, RuntimeError):
                    first.step()
                first.close()

    def test_a_second_one_takes_over(self):
        """The first is still there, as a trainer's attribute."""
        for options in _MODES:
            with self.subTest(options):
                model, reference = Model(), Model()
                first = optimizer_of(model, **options)
                train(model, first)
                second = optimizer_of(model, **options)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    train(model, second)
                self.assertEqual(len([1 for warning in caught if "trains with job" in str(warning.message)]), 1)
                for _ in range(2):
                    train(reference, torch.optim.AdamW(names(reference), lr=0.01))
                second.close()
                first.close()
                self.assertLess(furthest(model, reference), TOLERANCE)


if __name__ == "__main__":
    unittest.main()
