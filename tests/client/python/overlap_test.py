#!/usr/bin/env python3
"""ballast.torch with gradients that leave during backward: the bits of a run in which they leave in step()."""

import contextlib
import ctypes
import functools
import itertools
import os
import subprocess
import sys
import threading
import time
import unittest
import warnings
from unittest import mock

import torch
from overlap_ranks import has_left, patterns
from ranks_for_tests import run_ranks
from processes import await_  # Found by the line before.
from messages import refused, says
from torch.utils.checkpoint import checkpoint
from torch_test import Model, batch, furthest, loss_of, names

import ballast
import ballast.torch


_numbers = itertools.count()


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class OverlapTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.service = ballast.Service(memory_limit="1GiB")
        cls.addClassCleanup(cls.service.stop)

    def optimizer(self, model, overlap, **options):
        job = f"{self.id().rpartition('.')[2]}-{next(_numbers)}"
        optimizer = ballast.torch.AdamW(
            options.pop("groups", names)(model), **{"lr": 0.01, "service": self.service.address, "job": job} | options, overlap=overlap)
        self.addCleanup(optimizer.close)
        return optimizer

    def assert_same(self, step_of, steps=5, model_of=Model, **options):
        """step_of(model, optimizer, step) with and without overlap. Returns the model and optimizer that have it."""
        models, optimizers = [], []
        for overlap in (True, False):
            torch.manual_seed(3)
            models.append(model_of())
            optimizers.append(self.optimizer(models[-1], overlap, **options))
            for step in range(steps):
                step_of(models[-1], optimizers[-1], step)
        for (name, one), other in zip(weights(models[0]).items(), weights(models[1]).values()):
            self.assertTrue(torch.equal(one, other), name)
        return models[0], optimizers[0]

    # ------------------------------------------------------------ the same bits

    def test_same_bits_where_the_trainer_computes_on_every_processor(self):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.addCleanup(torch.set_num_threads, 1)
        left, norms = [], []

        def step_of(model, optimizer, step):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            left.append(has_left(optimizer))
            if step == 3:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
            optimizer.step()

        _, optimizer = self.assert_same(step_of)
        self.assertFalse(optimizer.overlap)
        self.assertFalse(any(left))
        self.assertTrue(torch.allclose(*norms), norms)

    def test_same_bits(self):
        left, freed = [], []

        def step_of(model, optimizer, step):
            optimizer.zero_grad()
            loss_of(model, batch(step), seldom=step % 2 == 0).backward()
            left.append(has_left(optimizer))
            freed.append(all(p.grad is None for p in model.parameters()))
            optimizer.step()

        for options in ({}, {"update": "speculate"}, {"max_norm": 0.1}, {"accumulation_steps": 1},
                        {"accumulation_steps": 1, "update": "speculate", "max_norm": 1000.0}):
            with self.subTest(options):
                left.clear()
                freed.clear()
                _, optimizer = self.assert_same(step_of, **options)
                self.assertTrue(optimizer.overlap)
                # All from the second step on; none where they leave in step().
                self.assertEqual(left, [False] + 4 * [True] + 5 * [False])
                self.assertEqual(freed, left if "accumulation_steps" in options else 10 * [False])

    def test_same_bits_with_accumulation(self):
        """Of 1 to 3 backwards, with zeros in .grad now and then, and without zero_grad() at the end."""
        left = []

        def step_of(model, optimizer, step):
            backwards = (3, 3, 3, 1, 2, 2, 2, 1, 1, 1, 3, 1, 2)[step]
            for micro_step in range(backwards):
                (loss_of(model, batch(10 * step + micro_step), seldom=micro_step == 1) / 3).backward()
            left.append(has_left(optimizer))
            optimizer.step()
            if step < 11:
                optimizer.zero_grad(set_to_none=step % 3 != 1)

        for dtype, options in ((torch.float32, {"update": "speculate"}), (torch.float32, {"accumulation_steps": 4}),
                               (torch.bfloat16, {"max_norm": 0.1}), (torch.float16, {})):
            with self.subTest(dtype=dtype, **options):
                left.clear()
                self.assert_same(step_of, 13, functools.partial(Model, dtype), **options)
                # Those that have as many as the one before.
                self.assertEqual([step for step in range(13) if left[step]],
                                 [] if "accumulation_steps" in options else [2, 5, 6, 8, 9])
        with self.subTest("freed"):
            left.clear()

            def freed(model, optimizer, step):
                for micro_step in range(2):
                    loss_of(model, batch(10 * step + micro_step), seldom=step == 2).backward()
                left.append(has_left(optimizer))
                optimizer.step()
                (optimizer if step % 2 else model).zero_grad(set_to_none=step in (0, 4))

            self.assert_same(freed, 7, functools.partial(Model, torch.bfloat16), accumulation_steps=2)
            self.assertEqual(left, [False] + 6 * [True] + 7 * [False])

    def test_what_is_in_grad_at_the_step_counts(self):
        """Whatever is done with it after it has left."""
        def replace(model):
            model.scalar.grad = torch.ones_like(model.scalar)

        def begin_again(model):
            for parameter in model.parameters():
                parameter.grad = None
            loss_of(model, batch(50)).backward()

        for number, change in enumerate((
                lambda model: model.inner.weight.grad.mul_(3), replace, begin_again,
                lambda model: model.inner.zero_grad(), lambda model: model.inner.zero_grad(set_to_none=False),
                lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
                lambda model: model.inner.weight.grad.data.mul_(3))):
            def step_of(model, optimizer, step):
                optimizer.zero_grad()
                loss_of(model, batch(step)).backward()
                if step in (2, 4):
                    change(model)
                optimizer.step()

            with self.subTest(number):
                self.assert_same(step_of, update=("wait", "speculate")[number % 2])

    def test_an_aborted_step_is_skipped_as_if_it_had_not_been(self):
        client = ballast.connect(self.service.address)

        def run(aborts, clips, options):
            torch.manual_seed(3)
            model = Model()
            optimizer = self.optimizer(model, True, on_abort="skip", **options)
            for step in range(5):
                if step == 2 and not aborts:
                    continue
                # The third one has no promise to break, and adds to what has left. The gradients of the next step stay
                # then, and torch clips those itself, which has other bits.
                for micro_step in range(3 if step == 2 and "accumulation_steps" not in options and not clips else 2):
                    loss_of(model, batch(10 * step + micro_step)).backward()
                    if step == 2 and micro_step == 1:
                        name = optimizer._options.job
                        await_("the step's begin", lambda: client.job(name)["ranks"][0]["begun"])
                        client._change("JobService/AbortStep", name=f"jobs/{name}")
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                before = weights(model)
                if step == 2:
                    with self.assertWarnsRegex(UserWarning, "could not be kept"):
                        optimizer.step()
                    self.assertIn("could not be kept", optimizer.skipped)
                    self.assertTrue(all(torch.equal(before[name], after) for name, after in weights(model).items()))
                else:
                    optimizer.step()
                    self.assertIsNone(optimizer.skipped)
                optimizer.zero_grad()
            return weights(model)

        for clips, options in ((False, {}), (True, {}), (False, {"max_norm": 0.1, "accumulation_steps": 2}),
                               (False, {"update": "speculate", "accumulation_steps": 2})):
            with self.subTest(clips=clips, **options):
                one, other = run(True, clips, options), run(False, clips, options)
                for name in one:
                    self.assertTrue(torch.equal(one[name], other[name]), name)

    def test_a_gradient_that_comes_twice_in_one_backward(self):
        """Reentrant checkpoints of one layer: its hook fires for each, within the backward of the last."""
        class Twice(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.inner, self.last = (torch.nn.Linear(6, 6) for _ in range(3))

            def forward(self, x):
                x = self.first(x)
                for _ in range(3):
                    x = checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=True)
                return self.last(x)

        def step_of(model, optimizer, step):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()

        self.assert_same(step_of, model_of=Twice)

    def test_nested_backwards_are_one_micro_step(self):
        """What is trained lies in reentrant checkpoints alone, as adapters of a frozen model do."""
        class Adapters(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(4)])
                self.head = torch.nn.Linear(6, 2).requires_grad_(False)

            def forward(self, x):
                for layer in self.layers:
                    x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=True)
                return self.head(x)

        def step_of(model, optimizer, step):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(4, 6, requires_grad=True)).square().sum().backward()
            optimizer.step()

        self.assert_same(step_of, model_of=Adapters, accumulation_steps=1)

    def test_weights_that_are_swapped_out_and_in(self):
        """As for an evaluation with averaged weights: autograd's own copies of them stay good."""
        def step_of(model, optimizer, step):
            optimizer.zero_grad()
            with torch.no_grad():
                kept = weights(model)
                for parameter in model.parameters():
                    parameter.zero_()
                for name, parameter in model.named_parameters():
                    parameter.copy_(kept[name])
            loss_of(model, batch(step)).backward()
            optimizer.step()

        self.assert_same(step_of)

    def test_closure_and_gradients_set_by_hand(self):
        def step_of(model, optimizer, step):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(model, batch(step))
                loss.backward()
                # One that did not come from a backward pass is the last part of the sum.
                model.seldom.grad = torch.full_like(model.seldom, step - 1.5)
                return loss

            self.assertGreater(optimizer.step(closure).item(), 0)

        self.assert_same(step_of)

    def test_two_optimizers_of_which_one_gets_the_others_gradients(self):
        """As generator and discriminator do it: what the discriminator gets in the generator's turn is thrown away."""
        ends = []
        for overlap in (True, False):
            torch.manual_seed(5)
            generator, critic = torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)
            optimizers = [self.optimizer(generator, overlap),
                          self.optimizer(critic, overlap)]
            for step in range(5):
                noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
                optimizers[1].zero_grad()
                critic(generator(noise).detach()).square().mean().backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                (-critic(generator(noise)).mean()).backward()
                optimizers[0].step()
            ends.append([*weights(generator).values(), *weights(critic).values()])
        for one, other in zip(*ends):
            self.assertTrue(torch.equal(one, other))

    def test_copies_on_a_gpus_stream(self):
        """The path of a GPU, whose copies end in their own time, with the CPU in its place: no GPU is needed to see
        that every gradient gets to its places and is told once."""
        threads, registered = [], []

        class Stream:
            cuda_stream = 1

            def __init__(self, device):
                pass

            def wait_stream(self, other):
                pass

            def synchronize(self):
                for thread in threads:
                    thread.join()

        class Driver:
            def cuLaunchHostFunc(self, stream, function, ticket):
                written = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value)
                threads.append(threading.Thread(target=written, args=(ctypes.addressof(ticket._obj),)))
                threads[-1].start()
                return 0

        class Runtime:
            def cudaHostRegister(self, address, size, flags):
                registered.append(address)
                return 0

            def cudaHostUnregister(self, address):
                registered.remove(address)

        def step_of(model, optimizer, step):
            for micro_step in range(2):
                loss_of(model, batch(10 * step + micro_step), seldom=micro_step == 1).backward()
                if step == 2:
                    optimizer.zero_grad()
                    loss_of(model, batch(10 * step + micro_step)).backward()
            optimizer.step()
            optimizer.zero_grad()

        streaming = "ballast.torch.streaming"
        with contextlib.ExitStack() as stack:
            for name, value in ((f"{streaming}.is_on_gpu", lambda gradient: True),
                                (f"{streaming}._load_driver", Driver),
                                ("torch.cuda.Stream", Stream), ("torch.cuda.cudart", Runtime),
                                ("torch.cuda.check_error", lambda code: None),
                                ("torch.cuda.stream", contextlib.nullcontext),
                                ("torch.cuda.current_stream", lambda device: None),
                                ("torch.Tensor.record_stream", lambda tensor, stream: None)):
                stack.enter_context(mock.patch(name, value))
            _, optimizer = self.assert_same(step_of)
            self.assertGreater(len(threads), 20)
            self.assertGreater(len(registered), 0)
            optimizer.close()
            self.assertEqual(registered, [])

    # ------------------------------------------------------------ clipping and scaling

    def assert_like_torch(self, step_of, steps=5, **options):
        """step_of(model, optimizer, step), which returns norms, with overlap and as torch clips without it: what they
        differ in is rounding. Returns the norms."""
        models, norms = [], []
        for overlap in (True, False):
            torch.manual_seed(3)
            models.append(Model())
            optimizer = self.optimizer(models[-1], overlap, **options)
            norms.append([value for step in range(steps) for value in step_of(models[-1], optimizer, step)])
            self.assertIsNone(optimizer.skipped)
        self.assertLess(furthest(*models), 1e-4)
        for one, other in zip(*norms):
            self.assertAlmostEqual(one / other, 1, delta=1e-4)
        return norms[0]

    def test_clips_like_torch(self):
        utils = torch.nn.utils

        def once(model):
            return [utils.clip_grad_norm_(model.parameters(), 0.05)]

        def twice(model):
            return [utils.clip_grad_norm_(model.parameters(), max_norm) for max_norm in (0.2, 0.05)]

        def by_group(model):
            rest = [p for p in model.parameters() if p is not model.embedding.weight]
            return [utils.clip_grad_norm_([model.embedding.weight], 0.04), utils.clip_grad_norm_(rest, 0.1),
                    utils.clip_grad_norm_(model.parameters(), 0.05)]

        def with_norm(model):
            norm = utils.clip_grad_norm_(model.parameters(), torch.inf)
            utils.clip_grads_with_norm_(model.parameters(), 0.05, 2 * norm)
            return [norm]

        def those_with_gradients(model):
            return [utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.05)]

        def groups(model):
            return [{"params": [(name, p) for name, p in names(model) if ("embedding" in name) == first]}
                    for first in (True, False)]

        for clip, options in ((once, {}), (once, {"update": "speculate"}), (once, {"max_norm": 0.02}), (twice, {}),
                              (by_group, {"groups": groups}), (with_norm, {}), (those_with_gradients, {})):
            def step_of(model, optimizer, step):
                for micro_step in range(2):
                    loss_of(model, batch(10 * step + micro_step), seldom=step % 2 == 0).backward()
                norms = [norm.item() for norm in clip(model)]
                optimizer.step()
                optimizer.zero_grad()
                return norms

            with self.subTest(clip.__name__, **options):
                self.assertGreater(max(self.assert_like_torch(step_of, **options)), 0.05)

    def test_one_clip_has_the_bits_of_max_norm(self):
        for update in ("wait", "speculate"):
            models, seen = [], []
            for max_norm in (0.1, None):
                torch.manual_seed(3)
                models.append(Model())
                optimizer = self.optimizer(models[-1], True, max_norm=max_norm, update=update)
                for step in range(5):
                    # Torch itself clips in the first step: nothing, because this is below it.
                    (loss_of(models[-1], batch(step)) * (1e-3 if step == 0 else 1)).backward()
                    if max_norm is None:
                        norm = torch.nn.utils.clip_grad_norm_(models[-1].parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append((optimizer.grad_norm, optimizer.clip_coefficient))
                self.assertLess(optimizer.clip_coefficient, 1)
            self.assertAlmostEqual(norm.item(), optimizer.grad_norm, places=6)
            self.assertEqual(seen[:5], seen[5:])
            for one, other in zip(*(weights(model).values() for model in models)):
                self.assertTrue(torch.equal(one, other))

    def test_a_clip_over_several_optimizers(self):
        """Two of ours and one of torch's."""
        ends, norms = [], []
        for overlap in (True, False):
            torch.manual_seed(5)
            layers = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
            optimizers = [*(self.optimizer(layers[i], overlap) for i in range(2)),
                          torch.optim.AdamW(layers[2].parameters(), lr=0.01)]
            for step in range(4):
                layers(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
                norms.append(torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.5).item())
                for optimizer in optimizers:
                    optimizer.step()
                layers.zero_grad()
            ends.append(layers)
        self.assertLess(furthest(*ends), 1e-4)
        self.assertGreater(min(norms), 0.5)
        for one, other in zip(norms[:4], norms[4:]):
            self.assertAlmostEqual(one / other, 1, delta=1e-4)

    def test_a_step_that_is_left_out_for_its_norm(self):
        model, reference = Model(), Model()
        optimizer, other = self.optimizer(model, True), self.optimizer(reference, True)
        for step in range(4):
            if step == 2:
                before = weights(model)
                (1000 * loss_of(model, batch(77))).backward()
                self.assertGreater(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), 10)
                optimizer.zero_grad()
                for name, value in weights(model).items():
                    self.assertTrue(torch.equal(value, before[name]), name)
            for each, theirs in ((model, optimizer), (reference, other)):
                loss_of(each, batch(step)).backward()
                self.assertLess(torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0), 10)
                theirs.step()
                theirs.zero_grad()
        for one, other in zip(weights(model).values(), weights(reference).values()):
            self.assertTrue(torch.equal(one, other))

    def test_a_norm_that_is_not_finite(self):
        model, optimizer = self.begun()
        optimizer.zero_grad()
        before = weights(model)
        (loss_of(model, batch(2)) * torch.inf).backward()
        with self.assertRaisesRegex(RuntimeError, "cannot be clipped"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        self.assertFalse(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite())
        optimizer.step()
        self.assertRegex(optimizer.skipped, "gradient of .* is (nan|-?inf)")
        for name, value in weights(model).items():
            self.assertTrue(torch.equal(value, before[name]), name)

    def test_grad_scaler(self):
        for clip in (None, "scaled", "unscaled", "max_norm"):
            def step_of(model, optimizer, step):
                if step == 0:
                    self.scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=3)
                if step == 2:  # An overflow.
                    self.scaler.scale(loss_of(model, batch(70)) * torch.inf).backward()
                    scale = self.scaler.get_scale()
                    if clip == "unscaled":
                        self.scaler.unscale_(optimizer)
                    self.scaler.step(optimizer)
                    self.scaler.update()
                    self.assertEqual(self.scaler.get_scale(), scale / 2)
                    optimizer.zero_grad()
                self.scaler.scale(loss_of(model, batch(step))).backward()
                norms = []
                if clip == "unscaled":
                    self.scaler.unscale_(optimizer)
                if clip in ("scaled", "unscaled"):
                    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
                self.scaler.step(optimizer)
                self.scaler.update()
                optimizer.zero_grad()
                return [*norms, self.scaler.get_scale(), *([] if norms else [optimizer.grad_norm])]

            for update in ("wait", "speculate"):
                with self.subTest(clip=clip, update=update):
                    self.assert_like_torch(step_of, 7, update=update, **({"max_norm": 0.05} if clip == "max_norm" else {}))

    def test_hyper_parameters_that_are_set_after_backward(self):
        def step_of(model, optimizer, step):
            loss_of(model, batch(step)).backward()
            if step == 3:
                torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            optimizer.step()
            optimizer.zero_grad()

        self.assert_same(step_of)
        self.assert_same(step_of, update="speculate")

    # ------------------------------------------------------------ what is taken back

    def test_zero_grad_without_step_takes_everything_back(self):
        def step_of(zero):
            def run(model, optimizer, step):
                if step == 2:
                    for again in range(2):
                        loss_of(model, batch(50 + again)).backward()
                        zero(model, optimizer)
                loss_of(model, batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return run

        for number, zero in enumerate((lambda model, optimizer: optimizer.zero_grad(),
                                       lambda model, optimizer: model.zero_grad())):
            for update in ("wait", "speculate"):
                with self.subTest(number=number, update=update):
                    self.assert_same(step_of(zero), update=update)

    def test_zero_grad_takes_back_what_came_and_did_not_leave(self):
        def step_of(model, optimizer, step):
            if step == 2:
                loss_of(model, batch(50)).backward()
                model.zero_grad()
            for micro_step in range(2):
                loss_of(model, batch(10 * step + micro_step)).backward()
            optimizer.step()
            optimizer.zero_grad()

        self.assert_same(step_of, accumulation_steps=2)

    def test_a_backward_that_failed(self):
        class Failing(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x.clone()

            @staticmethod
            def backward(context, gradient):
                raise RuntimeError("on purpose")

        begun = []

        def step_of(model, optimizer, step):
            """Of the third step .grad has what came before the error, as torch has it; of the fourth it is taken back."""
            if step in (2, 3):
                fails = Failing.apply(model.embedding.weight).sum()
                with self.assertRaisesRegex(RuntimeError, "on purpose"):
                    (loss_of(model, batch(77)) + fails).backward()
                begun.append(has_left(optimizer))
                if step == 3:
                    optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

        self.assert_same(step_of, 6)
        self.assertEqual(begun[2:], [False, False])

    # ------------------------------------------------------------ what cannot be done any more, is told

    def begun(self, **options):
        """After its first step, with gradients that have left."""
        model = Model()
        optimizer = self.optimizer(model, True, **options)
        loss_of(model, batch(0)).backward()
        optimizer.step()
        loss_of(model, batch(1)).backward()
        return model, optimizer

    def test_clipping_that_the_service_cannot_do(self):
        model, optimizer = self.begun(accumulation_steps=1)
        other = torch.nn.Linear(2, 2)
        other(torch.ones(2)).sum().backward()
        utils = torch.nn.utils
        for error, clip in (
                (RuntimeError, lambda: utils.clip_grad_value_(model.parameters(), 1.0)),
                (RuntimeError, lambda: utils.clip_grad_norm_((p for p in [model.scalar]), 1.0)),
                (RuntimeError, lambda: utils.clip_grads_with_norm_(model.scalar, 1.0, 2.0)),
                (ValueError, lambda: utils.clip_grad_norm_(model.parameters(), 1.0, float("inf"))),
                (ValueError, lambda: utils.clip_grad_norm_(model.parameters(), 0)),
                (RuntimeError, lambda: utils.clip_grad_norm_(
                    [p for p in model.parameters() if p.grad is not None], 1.0)),
                (RuntimeError, lambda: utils.get_total_norm([p.grad for p in model.parameters()]))):
            with refused(self, error):
                clip()
        optimizer.step()
        self.assertIsNone(optimizer.skipped)
        self.assertEqual(optimizer.clip_coefficient, 1)
        self.assertGreater(torch.nn.utils.get_total_norm([other.weight.grad]), 0)
        self.assertGreater(torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1), 0.1)
        self.assertLess(other.weight.grad.norm(), 0.11)

    def test_what_comes_after_a_clip(self):
        model, optimizer = self.begun()
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), 0.1)
        clip()
        with refused(self, ballast.FailedPreconditionError):
            loss_of(model, batch(2)).backward()
        with refused(self, RuntimeError):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, batch(2)).backward()
        clip()
        optimizer.step()
        self.assertIsNone(optimizer.skipped)
        self.assertLess(optimizer.clip_coefficient, 1)

    def test_a_clip_function_under_another_name_is_told(self):
        code = """
import sys, warnings; sys.path[:0] = %r
import torch
from torch.nn.utils import clip_grad_norm_
import ballast.torch.patches as patches
warnings.simplefilter("error")
try:
    patches.register(None, {})
except UserWarning as warning:
    print(warning)
""" % sys.path
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                              check=True).stdout
        says(self, said)

    def test_zero_grad_of_a_part(self):
        model, optimizer = self.begun(accumulation_steps=1)
        with refused(self, RuntimeError):
            model.inner.zero_grad()
        optimizer.step()
        model.inner.zero_grad()
        self.assertIsNone(optimizer.skipped)

    def test_gradients_that_cannot_be_sent(self):
        embedding = torch.nn.Embedding(5, 3, sparse=True)
        dense = torch.nn.Linear(3, 2)
        module = torch.nn.ModuleDict({"embedding": embedding, "dense": dense})
        optimizer = self.optimizer(module, True)
        dense(torch.ones(3)).sum().backward()
        optimizer.step()
        with refused(self, RuntimeError):
            dense(embedding(torch.tensor([1, 2]))).sum().backward()
        with refused(self, RuntimeError):
            optimizer._binding.flows.stream.give(optimizer._binding.member.names.index("dense.bias"), torch.ones(2, device="meta"))
        optimizer.zero_grad()
        dense(torch.ones(3)).sum().backward()
        optimizer.step()
        self.assertEqual(optimizer.param_groups[0]["job_step"], 2)

    def test_more_backwards_than_were_promised(self):
        model, optimizer = self.begun(accumulation_steps=1)
        loss_of(model, batch(2)).backward()
        with refused(self, ballast.FailedPreconditionError):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, batch(2)).backward()
        optimizer.step()
        self.assertIsNone(optimizer.skipped)

    def test_a_fork_gives_nothing(self):
        model, optimizer = self.begun()
        before = dict(optimizer._binding.flows.stream.left)
        child = os.fork()
        if child == 0:
            loss_of(model, batch(9)).backward()
            os._exit(0 if model.scalar.grad is not None else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(optimizer._binding.flows.stream.left, before)
        optimizer.step()
        self.assertIsNone(optimizer.skipped)

    @staticmethod
    def has_ended(optimizer):
        """Whether the library has heard of it; of which the optimizer is told nothing."""
        try:
            ballast._native.call("ballast_read_weights", optimizer._binding.member.session._handle)
        except ballast.AbortedError:
            return True
        except ballast.BallastError:
            pass
        return False

    def test_a_session_that_ends_outside_of_step_is_opened_again(self):
        def backward(model, optimizer):
            loss_of(model, batch(2), seldom=True).backward()  # Of all parameters, which completes a chunk.

        ways = {"its begin": backward, "a gradient": backward,
                "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
                "zero_grad of the model": lambda model, optimizer: model.zero_grad()}
        for number, (way, work) in enumerate(ways.items()):
            with self.subTest(way):
                model, optimizer = self.begun(job=f"ends-{number}")
                if way == "its begin":
                    optimizer.step()
                elif way == "a gradient":  # Others have not left.
                    optimizer.zero_grad()
                    model.scalar.square().backward()
                step = optimizer.param_groups[0]["job_step"]
                other = self.optimizer(Model(), True, job=f"ends-{number}")
                self.assertEqual(other.attach(), step)  # It takes the rank.
                other.close()
                await_("the end of the session that had it", lambda: self.has_ended(optimizer))
                with self.assertRaises(ballast.AbortedError):
                    work(model, optimizer)
                optimizer.zero_grad()
                model.zero_grad()
                self.assertEqual(optimizer.attach(), step)
                for _ in range(2):
                    backward(model, optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
                self.assertEqual(optimizer.param_groups[0]["job_step"], step + 2)

    # ------------------------------------------------------------ several ranks

    def assert_ranks_same(self, world_size, *cases):
        """Each (function, options) with and without overlap."""
        played = [(function, options | dict(overlap=overlap, service=self.service.address, job=f"{world_size}-{number}"
                                            f"-{function}-{overlap}"))
                  for number, (function, options) in enumerate(cases) for overlap in (True, False)]
        results = run_ranks("overlap_ranks", world_size, played)
        for (function, options), with_overlap, without in zip(cases, results[::2], results[1::2]):
            with self.subTest(function=function, **options):
                # Until the second step has shown how many backwards a step has, a gradient leaves in the first one.
                several = options.get("accumulation", 1) > 1 and not options.get("no_sync")
                self.assertEqual([left for _, left in with_overlap], world_size * [3 if several else 4])
                self.assertEqual([left for _, left in without], world_size * [0])
                self.assertEqual(len({digest for digest, _ in with_overlap + without}), 1)

    def test_two_ranks(self):
        self.assert_ranks_same(
            2, ("fsdp", {}), ("fsdp", {"accumulation": 2}), ("fsdp", {"accumulation": 2, "no_sync": True}),
            ("ddp", {}), ("ddp", {"accumulation": 2, "no_sync": True}), ("ddp", {"beside": True}),
            ("ddp", {"optimizers": 2}), ("ddp", {"checkpoints": True}))

    def test_more_ranks(self):
        self.assert_ranks_same(3, ("fsdp", {"update": "speculate"}), ("ddp", {"gradient_as_bucket_view": True}))
        self.assert_ranks_same(4, ("fsdp", {"replicas": 2}))

    def test_accumulation_on_ranks(self):
        """Every pattern of backwards with and without reduction, with an optimizer that attaches in the middle."""
        def cases(ways, **kind):
            return [kind | way for way in ({"overlap": False}, *ways)]

        fast, sharded = {"update": "speculate"}, {"sharded": True, "most": 2}
        self.assert_ranks_same_in_each_step(3, [
            *cases([fast], view=False), *cases([{}], view=True), *cases([{}], view=True, dtype="bfloat16", most=2)])
        self.assert_ranks_same_in_each_step(2, [
            *cases([fast, {"accumulation_steps": 2}], **sharded), *cases([{}], **sharded, dtype="bfloat16"),
            *cases([{"accumulation_steps": 1}], **sharded, promised=1)])

    def assert_ranks_same_in_each_step(self, world_size, cases):
        """Each case as the last one without overlap before it."""
        results = run_ranks("overlap_ranks", world_size, [
            ("accumulates", {"overlap": True, "service": self.service.address, "job": f"{world_size}-{number}"} | case)
            for number, case in enumerate(cases)])
        for case, of_ranks in zip(cases, results):
            with self.subTest(**case):
                steps = patterns(case.get("most", 3), case.get("promised"))
                if "overlap" in case:
                    without = [digests for digests, _ in of_ranks]
                for (digests, left), expected in zip(of_ranks, without):
                    self.assertEqual([steps[number // 2] for number, digest in enumerate(digests)
                                      if digest != expected[number]], [])
                    if "view" in case and "overlap" not in case:
                        # Of a pattern that comes again, unless the last backward adds to what has left.
                        self.assertEqual(left[1::2], [pattern[-1] for pattern in steps])

    def test_ranks_clip_like_torch(self):
        cases = [(function, dict(overlap=overlap, service=self.service.address, job=f"{function}-{overlap}"))
                 for function in ("fsdp_clips", "ddp_clips") for overlap in (True, False)]
        results = run_ranks("overlap_ranks", 2, cases)
        for ours, theirs in (results[:2], results[2:]):
            for (weights, norms, types), (their_weights, their_norms, their_types) in zip(ours, theirs):
                self.assertEqual((types, len(types)), (their_types, 1))
                self.assertGreater(max(norms), 10)
                for one, other in zip(weights + norms, their_weights + their_norms):
                    self.assertAlmostEqual(one, other, delta=1e-4 * max(1, abs(other)))

    def test_ranks_that_differ_or_begin_again(self):
        differently, come_and_go, aborted, refused = run_ranks("overlap_ranks", 2, [
            (function, dict(service=self.service.address, job=function))
            for function in ("clip_differently", "optimizers_of_one_module", "aborted_in_backward", "refusals")])
        for said in differently:
            self.assertRegex(said, "max_norm 0.[12] where others have 0.[12]")
        self.assertEqual(come_and_go, 2 * [[True, [1, 3, 1, 3, 1], 6]])
        self.assertEqual(aborted, [["AbortedError", 2, 4, said, 4, 6]
                                   for said in ("FailedPreconditionError", "UnavailableError")])
        for said in refused:
            self.assertEqual(len(said), 13)
            says(self, *said)


if __name__ == "__main__":
    warnings.simplefilter("error", ResourceWarning)
    unittest.main()
