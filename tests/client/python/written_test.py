#!/usr/bin/env python3
"""State and weights that a trainer writes between steps: as with torch.optim."""

import collections
import copy
import itertools
import unittest
import warnings

import torch
import torch._dynamo  # Which torch otherwise imports when the ranks are separate.
from ranks_for_tests import LONGEST, run_ranks
from messages import refused
from torch.distributed.fsdp import fully_shard
from torch_ranks import backward, ddp, end_of, model_of
from torch_test import Model, batch, furthest, loss_of, names, TOLERANCE

import ballast
import ballast.torch

_MODES = ({}, {"overlap": True}, {"overlap": True, "overlap_weights": True})


def planes_of(optimizer, parameter):
    return {plane: optimizer.state[parameter][plane].detach().clone() for plane in ("exp_avg", "exp_avg_sq")}


# What the ranks do.


def like_torch(rank, world_size, service, job, sharded, **options):
    """Moments, update counts and weights that are written, beside torch.optim. How far the weights are apart."""
    ends = []
    for kind in (ballast.torch.AdamW, torch.optim.AdamW):
        model = model_of()
        parallel = fully_shard(model) if sharded else ddp(model)
        first, *_, last = (parameter for parameter in model.parameters() if parameter.requires_grad)
        if kind is ballast.torch.AdamW:
            module = {"module": parallel} if options.get("overlap_weights") else {}
            optimizer = kind(model.named_parameters(), lr=0.01, service=service, job=job, timeout=LONGEST, **module,
                             **options)
        else:
            optimizer = kind(model.parameters(), lr=0.01)
        for step in range(6):
            if step == 2:
                optimizer.state[first]["exp_avg"].zero_()
                optimizer.state[last]["exp_avg_sq"] = optimizer.state[last]["exp_avg_sq"] * 4
                optimizer.state[first]["step"] = torch.tensor(1.0)
            if step == 3:
                if kind is ballast.torch.AdamW:
                    optimizer.wait_for_weights()
                with torch.no_grad():
                    last.clamp_(-0.05, 0.05)
                if kind is ballast.torch.AdamW and options.get("on_write") != "send":
                    optimizer.send_weights([last])
            if step == 4:
                optimizer.state.clear()
            optimizer.zero_grad()
            backward(parallel, step, rank)
            optimizer.step()
        ends.append(end_of(model, optimizer))
    return max((one - other).abs().max().item() for one, other in zip(*ends))


def one_does_not(rank, world_size, service, job):
    """Rank 0 alone sends weights. The code of what each is told."""
    model = model_of()
    parallel = ddp(model)
    optimizer = ballast.torch.AdamW(model.named_parameters(), lr=0.01, service=service, job=job, timeout=LONGEST)
    backward(parallel, 0, rank)
    optimizer.step()
    try:
        if rank == 0:
            optimizer.send_weights()
        optimizer.step()  # Without a backward, in which the ranks would wait for each other.
    except ballast.FailedPreconditionError as error:
        return error.code
    return 0


# ---------------------------------------------------------------- the tests


class WrittenTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.service = ballast.Service(memory_limit="1GiB")
        cls.addClassCleanup(cls.service.stop)

    def like_torch(self, write, steps=6, modes=_MODES, tolerance=TOLERANCE, amsgrad=False, **options):
        """write(optimizer, model, step), before each step. Both end alike. Yields the models and optimizers."""
        for number, mode in enumerate(modes):
            with self.subTest(mode):
                torch.manual_seed(0)
                model = Model()
                reference = copy.deepcopy(model)
                given = {"module": model} if "overlap_weights" in mode else {}
                ours = ballast.torch.AdamW(names(model), lr=0.01, amsgrad=amsgrad, service=self.service.address,
                                           job=f"{self.id().rpartition('.')[2]}-{number}", **mode, **given, **options)
                theirs = torch.optim.AdamW(names(reference), lr=0.01, amsgrad=amsgrad)
                for step in range(steps):
                    for each, optimizer in ((model, ours), (reference, theirs)):
                        write(optimizer, each, step)
                        optimizer.zero_grad()
                        loss_of(each, batch(step)).backward()
                        optimizer.step()
                ours.wait_for_weights()
                self.assertLess(furthest(model, reference), tolerance)
                for one, other in zip(model.parameters(), reference.parameters()):
                    if "exp_avg" not in theirs.state.get(other, {}):
                        continue
                    for plane in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
                        torch.testing.assert_close(ours.state[one][plane], theirs.state[other][plane], rtol=1e-4,
                                                   atol=1e-6)
                    self.assertEqual(float(ours.state[one]["step"]), float(theirs.state[other]["step"]))
                ours.close(job=True)

    # ------------------------------------------------------------ moments

    def test_moments_written_in_place_or_put(self):
        def write(optimizer, model, step):
            state = optimizer.state[model.inner.weight]
            if step == 2:
                state["exp_avg"].zero_()
                state["exp_avg_sq"] = torch.full_like(state["exp_avg_sq"], 0.25)
            if step == 3:
                state["exp_avg"] = state["exp_avg"] * 0.5
                optimizer.state[model.scalar]["exp_avg_sq"].fill_(2.0)

        self.like_torch(write)
        self.like_torch(write, amsgrad=True, modes=_MODES[:1])

    def test_update_counts_that_are_written(self):
        def write(optimizer, model, step):
            if step == 3:
                optimizer.state[model.inner.weight]["step"] = torch.tensor(1.0)
                optimizer.state[model.scalar]["step"].zero_()

        self.like_torch(write)

    def test_resets(self):
        def clears(optimizer, model, step):
            if step == 3:
                optimizer.state.clear()

        def another(optimizer, model, step):
            if step == 3:
                optimizer.state = collections.defaultdict(dict)

        def some(optimizer, model, step):
            """As ReLoRA."""
            if step == 3:
                for key in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[model.inner.weight][key].mul_(0.01)
                optimizer.state[model.scalar].clear()
                del optimizer.state[model.embedding.weight]

        def all_of_items(optimizer, model, step):
            if step == 3:
                for parameter in model.parameters():
                    for key, value in optimizer.state[parameter].items():
                        if key != "step":
                            value.zero_()

        for write in (clears, another, some, all_of_items):
            with self.subTest(write.__name__):
                self._testMethodName, name = f"{self._testMethodName}-{write.__name__}", self._testMethodName
                self.like_torch(write, modes=_MODES[:2])
                self._testMethodName = name

    def test_a_state_from_before_the_first_step_resets(self):
        kept = {}

        def write(optimizer, model, step):
            if step == 0:
                kept[optimizer] = optimizer.state_dict()
            if step == 3:
                optimizer.load_state_dict(kept[optimizer])

        self.like_torch(write, modes=_MODES[:2])

    def test_a_state_of_torchs_in_mid_run(self):
        other = Model()
        source = torch.optim.AdamW(names(other), lr=0.01)
        for step in range(2):
            loss_of(other, batch(10 + step)).backward()
            source.step()

        def write(optimizer, model, step):
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(source.state_dict()))

        self.like_torch(write)

    def test_what_was_read_before_a_step_and_is_written_after_it_is_an_error(self):
        model = Model()
        optimizer = ballast.torch.AdamW(names(model), service=self.service.address, job="late")
        self.addCleanup(optimizer.close)
        loss_of(model, batch(0)).backward()
        optimizer.step()
        kept = optimizer.state[model.scalar]["exp_avg"]
        optimizer.step()
        optimizer.step()  # Nothing was written.
        kept.zero_()
        with refused(self, RuntimeError):
            optimizer.step()
        del kept
        optimizer.step()

    def test_before_there_is_a_job(self):
        model = Model()
        optimizer = ballast.torch.AdamW(names(model), service=self.service.address, job="before")
        self.addCleanup(optimizer.close)
        with refused(self, KeyError):
            optimizer.state[model.scalar]["exp_avg"]
        self.assertEqual(optimizer.state[model.scalar].get("exp_avg", 3), 3)
        self.assertEqual(list(optimizer.state[model.scalar]), ["step"])
        optimizer.state[model.scalar]["exp_avg"] = torch.zeros(())
        loss_of(model, batch(0)).backward()
        with refused(self, RuntimeError):
            optimizer.step()

    def test_what_no_update_leaves_is_refused(self):
        model = Model()
        optimizer = ballast.torch.AdamW(names(model), service=self.service.address, job="refused", lr=0.01)
        self.addCleanup(optimizer.close)
        loss_of(model, batch(0)).backward()
        optimizer.step()
        before = planes_of(optimizer, model.inner.weight)
        for key, value in (("exp_avg_sq", -1.0), ("exp_avg", float("nan")), ("step", 9.0)):
            with self.subTest(key):
                optimizer.state[model.inner.weight][key] = torch.full_like(before["exp_avg"], value) \
                    if key != "step" else torch.tensor(value)
                with refused(self, ballast.InvalidArgumentError):
                    optimizer.step()
                optimizer.attach()
                self.assertTrue(all(torch.equal(before[plane], value)
                                    for plane, value in planes_of(optimizer, model.inner.weight).items()))

    # ------------------------------------------------------------ weights

    def weights_like_torch(self, write, modes=_MODES, **options):
        """write(model, step) after a step. Sent by a call, and by on_write."""
        for on_write in ("error", "send"):
            def write_and_send(optimizer, model, step):
                if step == 0:
                    return
                if isinstance(optimizer, ballast.torch.AdamW):
                    optimizer.wait_for_weights()
                parameters = write(model, step)
                if on_write == "error" and isinstance(optimizer, ballast.torch.AdamW) and parameters is not None:
                    optimizer.send_weights(parameters)

            with self.subTest(on_write=on_write):
                self._testMethodName, name = f"{self._testMethodName}-{on_write}", self._testMethodName
                self.like_torch(write_and_send, modes=modes, on_write=on_write, **options)
                self._testMethodName = name

    def test_clamped_weights(self):
        """As a WGAN's critic has them, after each step."""
        def clamp(model, step):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.05, 0.05)
            return model.parameters()

        self.weights_like_torch(clamp)

    def test_a_row_that_is_written_by_data(self):
        """As a codebook's that was not used; one row, which samples do not show."""
        def write(model, step):
            if step in (2, 4):
                model.embedding.weight.data[3] = 0.125
                return [model.embedding.weight]
            return None

        self.weights_like_torch(write)

    def test_other_weights_for_a_second_stage(self):
        torch.manual_seed(5)
        best = Model().state_dict()

        def write(model, step):
            if step == 3:
                model.load_state_dict(best)
                return model.parameters()
            return None

        self.weights_like_torch(write)

    def test_weights_that_are_written_and_not_sent_are_an_error_that_names_both_calls(self):
        model, reference = Model(), Model()
        reference.load_state_dict(model.state_dict())
        optimizer = ballast.torch.AdamW(names(model), lr=0.01, service=self.service.address, job="unsent")
        other = torch.optim.AdamW(names(reference), lr=0.01)
        self.addCleanup(optimizer.close)

        def train(each, its, step):
            its.zero_grad()
            loss_of(each, batch(step)).backward()
            its.step()

        train(model, optimizer, 0)
        train(reference, other, 0)
        with torch.no_grad():
            model.inner.weight.mul_(2)
        with refused(self, RuntimeError):
            train(model, optimizer, 1)
        optimizer.attach()  # The service's are back.
        self.assertLess(furthest(model, reference), TOLERANCE)
        with torch.no_grad():
            for each in (model, reference):
                each.inner.weight.mul_(2)
        optimizer.send_weights([model.inner.weight])
        for step in (1, 2):
            train(model, optimizer, step)
            train(reference, other, step)
        self.assertLess(furthest(model, reference), TOLERANCE)
        with refused(self, ValueError):
            optimizer.send_weights([torch.zeros(2)])

    def test_a_state_that_is_saved_after_a_write_has_it(self):
        model = Model()
        optimizer = ballast.torch.AdamW(names(model), lr=0.01, full_state=True, service=self.service.address,
                                        job="saved-after")
        self.addCleanup(optimizer.close)
        loss_of(model, batch(0)).backward()
        optimizer.step()
        optimizer.state[model.scalar]["exp_avg"].fill_(3.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = optimizer.state_dict()
        index = [id(p) for group in optimizer.param_groups for p in group["params"]].index(id(model.scalar))
        self.assertEqual(float(state["state"][index]["exp_avg"]), 3.0)
        self.assertIs(type(state["state"][index]), dict)

    # ------------------------------------------------------------ several ranks

    def test_all_ranks_write_alike(self):
        cases = [("like_torch", {"service": self.service.address, "job": f"ranks-{number}", "sharded": sharded,
                                 **options})
                 for number, (sharded, options) in enumerate(itertools.product((False, True), (
                     {}, {"overlap": True, "on_write": "send"}, {"overlap": True, "overlap_weights": True})))]
        cases.append(("one_does_not", {"service": self.service.address, "job": "alone"}))
        *alike, told = run_ranks("written_test", 2, cases)
        for of_ranks, case in zip(alike, cases):
            self.assertLess(max(of_ranks), TOLERANCE, case)
        self.assertEqual(told, [9, 9])  # FAILED_PRECONDITION; which reason depends on who is first.


if __name__ == "__main__":
    unittest.main()
