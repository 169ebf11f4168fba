#!/usr/bin/env python3
"""Ctrl-C anywhere in a training with ballast.torch: it goes on, and costs no more than the step in progress."""

import itertools
import os
import random
import tempfile
import traceback
import unittest

import torch
from ranks_for_tests import run_ranks
from torch_test import Model, batch, loss_of, names

import ballast
import ballast.torch
from interrupts_ranks import AfterCall, AtLine

_STEPS = 4
# Of all modes: BALLAST_INTERRUPTS=500 says more, in some minutes, and has all calls, not every third.
_LINES = int(os.environ.get("BALLAST_INTERRUPTS", 60))
_CALLS = 1 if "BALLAST_INTERRUPTS" in os.environ else 3
_MODES = {"plain": {}, "overlap": {"overlap": True}, "freed": {"overlap": True, "accumulation_steps": 1},
          "overlap_weights": {"overlap": True, "overlap_weights": True}, "derives": {"overlap": True}}
_FIRST = 3  # So many parameters are trained from the first step on, where the job is derived.
_numbers = itertools.count()


def place_of(error):
    last = traceback.extract_tb(error.__traceback__)[-2:]
    return [f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in last]


class InterruptsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.service = ballast.Service(memory_limit="4GiB")
        cls.addClassCleanup(cls.service.stop)

    def training(self, mode, **options):
        model = Model()
        options = {"service": self.service.address, "job": f"{mode}-{next(_numbers)}"} | _MODES[mode] | options
        return model, ballast.torch.AdamW(names(model)[:_FIRST] if mode == "derives" else names(model), lr=0.01, **options)

    def train(self, model, optimizer, until=_STEPS, zeroes=None):
        """Step by step, each with the batch that its number has. zeroes: the optimizer, or the model."""
        while True:
            (zeroes or optimizer).zero_grad()
            step = optimizer.param_groups[0]["job_step"]
            if step == until:
                return
            if step >= 2 and len(optimizer.param_groups[0]["params"]) == _FIRST and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": names(model)[_FIRST:]})
                optimizer.zero_grad()  # Theirs, too.
            loss_of(model, batch(step)).backward()
            optimizer.step()

    def weights(self, model):
        return [parameter.detach().clone() for parameter in model.parameters()]

    def weights_by_step(self, mode):
        model, optimizer = self.training(mode)
        result = [self.weights(model)]
        for until in range(1, _STEPS + 1):
            self.train(model, optimizer, until)
            result.append(self.weights(model))
        optimizer.close()
        return result

    def undisturbed(self, mode, disturbance):
        """Its weights, and how many events there are in it."""
        model, optimizer = self.training(mode)
        with disturbance() as events:
            self.train(model, optimizer)
            optimizer.close()
        return self.weights(model), events.count

    def check(self, mode, disturbance, chosen):
        """Of the events those that are chosen are interrupts, each in a training of its own."""
        self.undisturbed(mode, disturbance)  # With what is done once in a process.
        expected, events = self.undisturbed(mode, disturbance)
        self.assertGreater(events, 40)
        for at in chosen(range(1, events + 1)):
            model, optimizer = self.training(mode)
            event, place = disturbance(at), None
            try:
                with event:
                    self.train(model, optimizer, zeroes=(model, optimizer)[at % 2])
                    optimizer.close()
            except KeyboardInterrupt as interrupt:
                place = place_of(interrupt)
            with self.subTest(mode=mode, event=at, place=place):
                self.assertEqual(place is not None, event.count >= at)  # Its waits may have fewer lines.
                if at % 4 > 1:
                    optimizer.attach(create=True)
                self.train(model, optimizer, zeroes=(model, optimizer)[at % 2])
                optimizer.close()
                for (name, parameter), other in zip(model.named_parameters(), expected):
                    self.assertTrue(torch.equal(parameter, other), name)
            optimizer.close()

    def test_a_step_that_is_called_again_counts_once(self):
        for mode in ("plain", "overlap", "overlap_weights"):
            model, optimizer = self.training(mode)
            retried = 0
            for step in itertools.count():
                at = 3 * step + 1
                loss_of(model, batch(step)).backward()
                event = AtLine(at)
                try:
                    with event:
                        optimizer.step()
                except KeyboardInterrupt as interrupt:
                    retried += 1
                    place = place_of(interrupt)
                    optimizer.step()
                self.assertEqual(optimizer.param_groups[0]["job_step"], step + 1, place)
                optimizer.zero_grad()
                if event.count < at:
                    break
            self.assertGreater(retried, 50)
            model_of_reference, reference = self.training(mode)
            for other in range(step + 1):
                loss_of(model_of_reference, batch(other)).backward()
                reference.step()
                reference.zero_grad()
            optimizer.close()
            reference.close()
            for (name, parameter), other in zip(model.named_parameters(), model_of_reference.parameters()):
                self.assertTrue(torch.equal(parameter, other), f"{mode}: {name}")

    def test_a_state_saved_in_its_handler_is_gone_on_from(self):
        with tempfile.TemporaryDirectory() as folder, ballast.Service(checkpoint_dir=folder) as service:
            for mode in ("plain", "overlap_weights"):
                self.undisturbed(mode, AtLine)
                expected, events = self.undisturbed(mode, AtLine)
                steps = self.weights_by_step(mode)
                for at in random.Random(2).sample(range(1, events + 1), 15):
                    model, optimizer = self.training(mode, service=service.address)
                    try:
                        with AtLine(at):
                            self.train(model, optimizer)
                            optimizer.close()
                    except KeyboardInterrupt:
                        if optimizer._binding is None:  # Of no job.
                            continue
                        saved = self.weights(model)  # As trainers do: before the optimizer's.
                        state = optimizer.state_dict()
                    else:  # Its waits had fewer lines.
                        continue
                    job = optimizer._options.job
                    with self.subTest(mode=mode, event=at):
                        for one, other in zip(saved, steps[state["param_groups"][0]["job_step"]]):
                            self.assertTrue(torch.equal(one, other))
                        # The job goes on, so only what was saved with the state is left of that step.
                        self.train(model, optimizer, _STEPS + 1)
                        optimizer.close()
                        model, optimizer = self.training(mode, service=service.address, job=job)
                        optimizer.load_state_dict(state)
                        self.train(model, optimizer)
                        optimizer.close()
                        for (name, parameter), other in zip(model.named_parameters(), expected):
                            self.assertTrue(torch.equal(parameter, other), name)

    def test_after_calls_of_the_library(self):
        for number, mode in enumerate(_MODES):
            self.check(mode, AfterCall, lambda events: events[number % _CALLS::_CALLS])

    def test_at_random_lines(self):
        for mode in _MODES:
            self.check(mode, AtLine, lambda events: random.Random(26).sample(events, _LINES // len(_MODES)))

    def test_of_several_ranks(self):
        """Then all of them attach."""
        cases = [("goes_on_after_interrupts", {"service": self.service.address, "job": f"ranks-{number}", "seed": number,
                                               "sharded": number % 2 == 1, "overlap": number % 4 > 1})
                 for number in range(8)]
        self.assertGreater(sum(map(sum, run_ranks("interrupts_ranks", 2, cases))), 8)


if __name__ == "__main__":
    unittest.main()
