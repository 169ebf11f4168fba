#!/usr/bin/env python3
"""ballast.torch against torch.optim: the same trajectory, the same habits, the same kinds of errors."""

import copy
import gc
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import unittest
import warnings
import weakref
from unittest import mock

import numpy
import torch
from torch.nn import functional

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests/support")]

import ballast  # noqa: E402
import ballast.torch  # noqa: E402
from messages import refused  # noqa: E402

# Of fp32 weights after some steps with the same gradients, as a share of a parameter's largest: both round, in
# another order.
TOLERANCE = 1e-6


class Model(torch.nn.Module):
    """Odd shapes, a tied weight, a frozen one and one that is used only now and then."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(31, 20)
        self.inner = torch.nn.Linear(20, 20)
        self.norm = torch.nn.LayerNorm(20)
        self.seldom = torch.nn.Parameter(torch.randn(5))
        self.frozen = torch.nn.Parameter(torch.randn(7), requires_grad=False)
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))
        self.head = torch.nn.Linear(20, 31, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens, seldom=False):
        x = self.norm(functional.gelu(self.inner(self.embedding(tokens)))) * self.scalar
        return self.head(x + functional.pad(self.seldom, (0, 15)) if seldom else x)


def batch(step, rank=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(31, (8, 12), generator=generator)


def loss_of(model, tokens, seldom=False):
    logits = model(tokens[:, :-1], seldom)
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def names(model):
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def furthest(a, b):
    """The largest difference, as a share of the largest magnitude of its parameter."""
    return max(((p.double() - q.double()).abs().max() / q.double().abs().max()).item()
               for p, q in zip(a.parameters(), b.parameters()))


class TorchTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.service = ballast.Service(memory_limit="1GiB")
        cls.addClassCleanup(cls.service.stop)

    def optimizer(self, model, kind="AdamW", **options):
        options = {"service": self.service.address, "job": self.id().rpartition(".")[2]} | options
        parameters = options.pop("params", None) or names(model)
        optimizer = getattr(ballast.torch, kind)(parameters, **options)
        self.addCleanup(lambda living: living() is None or living().close(), weakref.ref(optimizer))
        return optimizer

    def train(self, model, optimizer, steps, begin=0, **more):
        losses = []
        for step in range(begin, begin + steps):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step), **more)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def train_both(self, ours, mine, theirs, reference, steps, begin=0, **more):
        """Both with the gradients of theirs: what they differ in is the optimizer's."""
        for step in range(begin, begin + steps):
            theirs.zero_grad()
            loss_of(theirs, batch(step), **more).backward()
            for (_, p), (_, q) in zip(names(ours), names(theirs)):
                p.grad = None if q.grad is None else q.grad.clone()
            mine.step()
            reference.step()

    # ------------------------------------------------------------ the same trajectory

    def test_equals_torch_with_every_option(self):
        cases = [("AdamW", {}), ("AdamW", dict(lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)),
                 ("AdamW", dict(amsgrad=True, lr=0.01)), ("AdamW", dict(maximize=True)),
                 ("AdamW", dict(lr=torch.tensor(0.004))), ("Adam", dict(lr=0.01)),
                 ("Adam", dict(weight_decay=0.2, amsgrad=True)), ("AdamW", dict(weight_decay=0.0))]
        for index, (kind, options) in enumerate(cases):
            with self.subTest(kind=kind, **options):
                ours, theirs = Model(), Model()
                mine = self.optimizer(ours, kind, job=f"options{index}", **options)
                reference = getattr(torch.optim, kind)(names(theirs), **options)
                self.train_both(ours, mine, theirs, reference, 10, seldom=True)
                self.assertLess(furthest(ours, theirs), TOLERANCE)

    def test_speculation_gives_the_same_bits(self):
        results = []
        for update in ("wait", "speculate"):
            model = Model()
            self.train(model, self.optimizer(model, job=update, update=update), 8)
            results.append(model)
        for p, q in zip(results[0].parameters(), results[1].parameters()):
            self.assertTrue(torch.equal(p, q))

    def test_bf16_parameters_have_fp32_masters(self):
        ours, theirs = Model(torch.bfloat16), Model(torch.bfloat16)
        mine = self.optimizer(ours, lr=1e-3)
        # What a careful trainer writes by hand: fp32 copies that are updated, and rounded back.
        masters = [p.detach().float().requires_grad_() for _, p in names(theirs)]
        reference = torch.optim.AdamW(masters, lr=1e-3)
        for step in range(20):
            for model in (ours, theirs):
                model.zero_grad()
                loss_of(model, batch(step)).backward()
            mine.step()
            for master, (_, p) in zip(masters, names(theirs)):
                master.grad = None if p.grad is None else p.grad.float()
            reference.step()
            with torch.no_grad():
                for master, (_, p) in zip(masters, names(theirs)):
                    p.copy_(master)
        # One in a thousand may round the other way, by one step of bf16.
        for (name, p), (_, q) in zip(names(ours), names(theirs)):
            different = (p != q).float().mean().item()
            self.assertLess(different, 0.02, name)
            self.assertLess((p.double() - q.double()).abs().max().item(), 2 ** -7 * q.double().abs().max().item())
        client = ballast.connect(self.service.address)
        name = names(ours)[0][0]
        master = torch.from_numpy(client.state(mine._options.job, name))
        self.assertLess((master - masters[0].detach()).abs().max().item(), 1e-5)
        self.assertTrue(torch.equal(master.bfloat16(), names(ours)[0][1]))

    def test_groups_schedulers_and_mixed_dtypes(self):
        ours, theirs = Model(), Model()
        for model in (ours, theirs):
            model.inner.to(torch.bfloat16)
            model.forward = lambda tokens, seldom=False, m=model: m.head(
                m.inner(m.embedding(tokens).bfloat16()).float() * m.scalar)
        mine = self.optimizer(ours, params=ballast.torch.groups(ours, weight_decay=0.2), lr=0.01)
        self.assertEqual([group["weight_decay"] for group in mine.param_groups], [0.2, 0.0])
        self.assertEqual(sorted(name for group in mine.param_groups for name in group["param_names"]),
                         sorted(name for name, _ in names(ours)))
        reference = torch.optim.AdamW(ballast.torch.groups(theirs, weight_decay=0.2), lr=0.01)
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 10) for o in (mine, reference)]
        for step in range(10):
            for model, optimizer, schedule in ((ours, mine, schedules[0]), (theirs, reference, schedules[1])):
                self.train(model, optimizer, 1, step)
                schedule.step()
        self.assertLess(furthest(ours.embedding, theirs.embedding), 2e-2)  # Behind a layer in bf16.
        self.assertLess(furthest(ours.inner, theirs.inner), 2e-2)
        groups = ballast.connect(self.service.address).groups(mine._options.job)
        self.assertEqual([group["name"] for group in groups["groups"]],
                         ["0.float32", "0.bfloat16", "1.float32", "1.bfloat16"])

    def test_frozen_parameters_of_dtypes_that_no_job_has(self):
        """As quantised weights are, below adapters that are trained."""
        models = Model(), Model()
        for model in models:
            model.quantised = torch.nn.Parameter(torch.arange(5, dtype=torch.int8), requires_grad=False)
            model.exact = torch.nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
            model.phase = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
        mine = self.optimizer(models[0], params=list(models[0].named_parameters()))
        reference = torch.optim.AdamW([p for p in models[1].parameters() if p.requires_grad])
        self.train_both(models[0], mine, models[1], reference, 3)
        for (name, p), q in zip(models[0].named_parameters(), models[1].parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)
        self.assertEqual(mine.state_dict()["param_groups"][0]["job_step"], 3)
        models[0].exact.requires_grad_(True).grad = torch.ones(3, dtype=torch.float64)
        with refused(self, ValueError):
            mine.step()
        models[0].exact.requires_grad_(False)
        self.train(models[0], mine, 1, 3)

    def test_accumulation_and_gradients_that_are_missing_now_and_then(self):
        ours, theirs = Model(), Model()
        mine = self.optimizer(ours, weight_decay=0.1)
        reference = torch.optim.AdamW(names(theirs), weight_decay=0.1)
        for step in range(8):
            for optimizer in (mine, reference):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            for micro_step in range(3):
                loss_of(theirs, batch(10 * step + micro_step), seldom=step in (2, 5)).backward()
            for (_, p), (_, q) in zip(names(ours), names(theirs)):
                if q.grad is not None:  # Ours accumulates, where zero_grad left zeros.
                    p.grad = q.grad.clone() if p.grad is None else p.grad.add_(q.grad)
            mine.step()
            reference.step()
        self.assertLess(furthest(ours, theirs), TOLERANCE)
        self.assertTrue(torch.equal(ours.frozen, theirs.frozen))

    def test_autograd_is_told_that_weights_were_written(self):
        model = Model()
        optimizer = self.optimizer(model)
        self.train(model, optimizer, 1)
        loss = loss_of(model, batch(1))
        before = model.inner.weight._version
        optimizer.step()
        self.assertGreater(model.inner.weight._version, before)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()

    def test_closure(self):
        ours, theirs = Model(), Model()
        results = []
        for model, optimizer in ((ours, self.optimizer(ours)), (theirs, torch.optim.AdamW(names(theirs)))):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(model, batch(0))
                loss.backward()
                return loss

            results.append([optimizer.step(closure).item() for _ in range(3)])
        for a, b in zip(*results):
            self.assertAlmostEqual(a, b, places=5)

    # ------------------------------------------------------------ clipping and scaling

    def test_clips_like_clip_grad_norm(self):
        for inside in (True, False):
            ours, theirs = Model(), Model()
            mine = self.optimizer(ours, job=f"clips{inside}", lr=0.1, **({"max_norm": 0.05} if inside else {}))
            reference = torch.optim.AdamW(names(theirs), lr=0.1)
            for step in range(6):
                theirs.zero_grad()
                loss_of(theirs, batch(step)).backward()
                for (_, p), (_, q) in zip(names(ours), names(theirs)):
                    p.grad = None if q.grad is None else q.grad.clone()
                if not inside:
                    torch.nn.utils.clip_grad_norm_(ours.parameters(), 0.05)
                norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05).item()
                mine.step()
                reference.step()
                if inside:
                    self.assertAlmostEqual(mine.grad_norm, norm, places=5)
                    self.assertAlmostEqual(mine.clip_coefficient, min(1, 0.05 / (norm + 1e-6)), places=5)
                if step == 0:
                    self.assertGreater(norm, 0.05)
            self.assertLess(furthest(ours, theirs), 2 * TOLERANCE)

    def test_logged_numbers_go_with_their_step_and_move_no_bit(self):
        told = []
        real = ballast.Session.report

        def report(session, numbers=None, seconds=None):
            told.append((dict(numbers or {}), seconds))
            real(session, numbers, seconds)

        quiet, logging = Model(), Model()
        self.train(quiet, self.optimizer(quiet, job="quiet"), 3)
        with mock.patch.object(ballast.Session, "report", report):
            optimizer = self.optimizer(logging, job="logging", overlap=True)
            for step in range(3):
                optimizer.zero_grad()
                loss = loss_of(logging, batch(step))
                seen = loss.detach().clone()
                optimizer.log(loss=seen, **{"eval/step": numpy.float32(step)})
                seen.zero_()  # It was copied.
                loss.backward()
                if step == 2:  # Which seals the step: what is logged later goes with the vote.
                    torch.nn.utils.clip_grad_norm_(logging.parameters(), float("inf"))
                    optimizer.log(late=float("nan"))
                optimizer.step()
                numbers, _ = told[-1]
                self.assertEqual((numbers["loss"], numbers["eval/step"]), (loss.item(), step))
        self.assertEqual([sorted(numbers) for numbers, _ in told], 3 * [["eval/step", "loss"]] + [["eval/step", "late", "loss"]])
        self.assertEqual([seconds is None for _, seconds in told], [False, False, False, True])
        self.assertGreater(told[1][1][0], 0)  # It has computed,
        self.assertGreater(told[1][1][3], 0)  # and has waited for the step before.
        self.assertEqual(furthest(quiet, logging), 0)
        for numbers, error in (({"a b": 1}, ValueError), ({"x" * 65: 1}, ValueError), ({"loss": torch.zeros(2)}, ValueError),
                               ({"loss": "1"}, TypeError), ({"loss": 1j}, TypeError), ({"loss": torch.ones(1) * 1j}, TypeError),
                               ({"loss": 10**400}, ValueError), ({f"n{i}": i for i in range(17)}, ValueError)):
            with self.assertRaises(error):
                optimizer.log(**numbers)

    def test_a_step_that_is_not_finite_changes_nothing_and_says_why(self):
        model = Model()
        optimizer = self.optimizer(model)
        self.train(model, optimizer, 2)
        self.assertIsNone(optimizer.skipped)
        before = copy.deepcopy(model.state_dict())
        loss_of(model, batch(2)).backward()
        model.inner.weight.grad[3, 4] = torch.inf
        with self.assertWarnsRegex(UserWarning, r"step 3 changed nothing: .*inner.weight.* \(0 skipped before"):
            optimizer.step()
        self.assertIn("inner.weight", optimizer.skipped)
        with warnings.catch_warnings():  # One of a hundred is told.
            warnings.simplefilter("error")
            for _ in range(99):
                optimizer.step()
        with self.assertWarnsRegex(UserWarning, r"100 skipped before"):
            optimizer.step()
        for name, value in model.state_dict().items():
            self.assertTrue(torch.equal(value, before[name]), name)
        self.train(model, optimizer, 1)
        self.assertIsNone(optimizer.skipped)

    def test_grad_scaler(self):
        """It has unscaled in step() or before; a step that it skips is no news."""
        for unscales in (False, True):
            ours, theirs = Model(), Model()
            mine, reference = self.optimizer(ours, job=f"scaler{unscales}"), torch.optim.AdamW(names(theirs))
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
            for step in range(8):
                self.step_scaled(ours, mine, scaler, step, unscales)
                if step != 4:
                    self.train(theirs, reference, 1, step)
                self.assertEqual(mine._binding.member.step_count, step + (step < 4))
            self.assertEqual(scaler.get_scale(), 1024.0 * 2 / 2 * 2)  # Grown, halved, grown.
            self.assertLess(furthest(ours, theirs), TOLERANCE)

    def test_grad_scaler_of_fp16(self):
        """Which torch does not unscale: the service does."""
        scaled, plain = Model(torch.float16), Model(torch.float16)
        mine, reference = self.optimizer(scaled, job="scaled"), self.optimizer(plain, job="plain")
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        for step in range(6):
            self.step_scaled(scaled, mine, scaler, step, False)
            self.assertEqual(mine.skipped is None, step != 4)
            if step != 4:
                self.train(plain, reference, 1, step)
        self.assertEqual(scaler.get_scale(), 64.0 * 2 / 2)
        self.assertLess(furthest(scaled, plain), 4 * torch.finfo(torch.float16).eps)

    def step_scaled(self, model, optimizer, scaler, step, unscales):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(step))).backward()
        if step == 4:
            model.scalar.grad.fill_(torch.inf)
        if unscales:
            scaler.unscale_(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.step(optimizer)
        scaler.update()

    # ------------------------------------------------------------ state

    def test_goes_on_in_another_process_where_it_stopped(self):
        whole = Model()
        self.train(whole, self.optimizer(whole, job="whole"), 6)
        first = Model()
        optimizer = self.optimizer(first, job="parts")
        self.train(first, optimizer, 3)
        with tempfile.TemporaryDirectory() as folder:
            torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
            optimizer.close()
            state = torch.load(f"{folder}/optimizer.pt", weights_only=True)
        self.assertEqual(state["param_groups"][0]["job_step"], 3)
        second = Model()  # With other weights: those of the job are taken.
        again = self.optimizer(second, job="parts", lr=0.5)
        again.load_state_dict(state)
        self.assertEqual(again.param_groups[0]["lr"], 1e-3)
        self.assertEqual(furthest(second, first), 0)
        self.assertEqual(again.state[second.scalar]["step"], 3)
        self.train(second, again, 3, begin=3)
        self.assertEqual(furthest(second, whole), 0)

    def test_attach_takes_the_jobs_weights(self):
        first = Model()
        running = self.optimizer(first, job="attach")
        self.train(first, running, 1)
        second = Model()
        with refused(self, ballast.FailedPreconditionError):
            self.train(second, self.optimizer(second, job="attach"), 1)
        self.train(first, running, 1, begin=1)  # A run that is refused has taken nothing from it.
        optimizer = self.optimizer(second, job="attach")
        optimizer.attach()
        self.assertEqual(furthest(second, first), 0)
        self.train(second, optimizer, 1, begin=2)
        with refused(self, ballast.NotFoundError, varies=True):  # It lists the jobs that are there.
            self.optimizer(Model(), job="unknown").attach()
        self.assertNotIn("unknown", [job["name"] for job in ballast.connect(self.service.address).jobs()])

    def test_an_optimizer_that_is_bound_loads_no_checkpoint(self):
        model = Model()
        optimizer = self.optimizer(model, job="bound")
        self.train(model, optimizer, 1)
        with refused(self, ballast.FailedPreconditionError):
            optimizer.attach(resume="nothing/step-7")
        for resume in (True, "bound"):  # Of which a job that has weights goes on.
            self.assertEqual(optimizer.attach(resume=resume), 1)
        self.train(model, optimizer, 1, begin=1)

    def test_adam_is_refused_a_job_of_adamw(self):
        model = Model()
        running = self.optimizer(model, job="decoupled")
        self.train(model, running, 1)
        given = {"lr": 1e-3, "service": self.service.address, "job": "decoupled"}
        with refused(self, ballast.FailedPreconditionError, "OTHER_DESCRIPTION"):
            ballast.torch.Adam(names(Model()), **given).attach()
        self.train(model, running, 1, begin=1)  # Which goes on.

    def test_an_optimizer_that_has_lost_its_rank_attaches_again(self):
        first, second = Model(), Model()
        loser, taker = self.optimizer(first), self.optimizer(second)
        self.train(first, loser, 2)
        self.assertEqual(taker.attach(), 2)
        with refused(self, ballast.AbortedError, "STREAM_REPLACED"):
            self.train(first, loser, 1, begin=2)
        with refused(self, ballast.FailedPreconditionError, "INTERRUPTED"):
            loser.step()
        self.train(second, taker, 1, begin=2)
        taker.close()
        self.assertEqual(loser.attach(), 3)
        self.assertEqual(furthest(first, second), 0)
        self.train(first, loser, 1, begin=3)
        loser.close()
        self.assertEqual(taker.attach(), 4)  # Its own step is no state that was loaded.
        self.assertEqual(furthest(first, second), 0)

    def test_a_session_that_ends_before_the_step_has_begun_is_opened_again(self):
        model, call = Model(), ballast._native.call
        optimizer = self.optimizer(model)
        self.train(model, optimizer, 2)

        def gone(name, *arguments):
            if name == "ballast_begin_step":
                raise ballast.UnavailableError("the service has gone")
            return call(name, *arguments)

        with mock.patch.object(ballast._native, "call", gone), self.assertRaises(ballast.UnavailableError):
            self.train(model, optimizer, 1)
        session = optimizer._binding.member.session
        self.assertEqual(optimizer.attach(), 2)
        self.assertIsNot(optimizer._binding.member.session, session)
        self.train(model, optimizer, 1, begin=2)

    def test_an_exit_leaves_a_session_whose_thread_is_in_a_call(self):
        model = Model()
        with mock.patch("ballast.torch.binding.atexit.register") as register:
            optimizer = self.optimizer(model)
            self.train(model, optimizer, 1)
        (close,) = [call.args[0] for call in register.call_args_list if "binding" in call.args[0].__module__]
        session = optimizer._binding.member.session
        session._calling = True  # As in a daemon thread.
        close()
        self.assertTrue(session._handle)
        session._calling = False
        close()
        self.assertFalse(session._handle)

    def test_a_session_that_is_ended_while_it_begins_is_opened_again(self):
        model, read = Model(), ballast.Session.read_weights
        ended = [ballast.AbortedError("another rank was taken")]

        def read_weights(session):
            if ended:
                raise ended.pop()
            read(session)

        with mock.patch.object(ballast.Session, "read_weights", read_weights):
            self.train(model, self.optimizer(model, job="ended-once"), 1)
        self.assertEqual(ended, [])
        optimizer = self.optimizer(Model(), job="ended-always")
        with mock.patch.object(ballast.Session, "read_weights",
                               side_effect=ballast.AbortedError("another rank was taken")) as reads:
            with refused(self, ballast.AbortedError):
                optimizer.attach(create=True)
        self.assertEqual(reads.call_count, 6)
        self.assertEqual(optimizer.attach(create=True), 0)

    def test_state_of_another_job_or_step_is_refused(self):
        model = Model()
        optimizer = self.optimizer(model, job="mine")
        self.train(model, optimizer, 1)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)  # Of now: nothing is to be done.
        self.train(model, optimizer, 1)
        with refused(self, ballast.FailedPreconditionError):
            self.optimizer(Model(), job="mine").load_state_dict(state)
        with refused(self, ballast.NotFoundError):
            self.optimizer(Model(), job="other").load_state_dict(state)
        with refused(self, ballast.FailedPreconditionError):
            optimizer.load_state_dict(state)

    def test_a_state_gives_no_parameter_the_weights_of_another(self):
        def optimizer_of(groups, job, **values):
            made = {name: torch.nn.Parameter(torch.full((3,), value)) for name, value in values.items()}
            return made, self.optimizer(None, job=job, params=[{"params": [(name, made[name]) for name in group]}
                                                               for group in groups])

        for number, (saved, other) in enumerate([(["ab"], ["ba"]), (["a", "b"], ["b", "a"])]):
            with self.subTest(saved=saved):
                job = f"of-another-{number}"
                _, optimizer = optimizer_of(saved, job, a=1.0, b=2.0)
                optimizer.attach(create=True)
                state = optimizer.state_dict()
                optimizer.close()
                made, optimizer = optimizer_of(other, job, a=3.0, b=4.0)
                with refused(self, ballast.FailedPreconditionError, "OTHER_DESCRIPTION"):
                    optimizer.load_state_dict(state)
                self.assertEqual([made[name].tolist() for name in "ab"], [[3.0] * 3, [4.0] * 3])
                # Where the names are others, they are found by their order, as in torch.
                made, optimizer = optimizer_of([group.replace("a", "x").replace("b", "y") for group in saved], job,
                                               x=3.0, y=4.0)
                optimizer.load_state_dict(state)
                self.assertEqual([made[name].tolist() for name in "xy"], [[1.0] * 3, [2.0] * 3])
                optimizer.close()
        # A state that is of no job yet says nothing of names.
        _, optimizer = optimizer_of(["ab"], "not-made", a=1.0, b=2.0)
        state = optimizer.state_dict()
        made, optimizer = optimizer_of(["xy"], "of-its-own-names", x=3.0, y=4.0)
        optimizer.load_state_dict(state)
        optimizer.attach(create=True)
        self.assertEqual(ballast.connect(self.service.address).state("of-its-own-names", "y").tolist(), [4.0] * 3)

    # ------------------------------------------------------------ bad input

    def test_arguments_are_refused_as_torch_refuses_them(self):
        model = Model()
        for options in (dict(lr=-1.0), dict(eps=-1.0), dict(betas=(1.0, 0.9)), dict(betas=(0.9, -0.1)),
                        dict(weight_decay=-0.1)):
            with self.subTest(**options):
                with self.assertRaises(ValueError) as theirs:
                    torch.optim.AdamW(names(model), **options)
                with self.assertRaises(ValueError) as ours:
                    ballast.torch.AdamW(names(model), **options)
                self.assertEqual(str(ours.exception), str(theirs.exception))
        for parameters in ([], [("z", torch.zeros(2, dtype=torch.complex64, requires_grad=True))],
                           [("z", torch.zeros(2, dtype=torch.float64, requires_grad=True))],
                           [dict(params=[("a", model.scalar)]), dict(params=[("b", model.scalar)])]):
            with refused(self, ValueError):
                ballast.torch.AdamW(parameters)
        for options in (dict(differentiable=True), dict(max_norm=0.0), dict(update="later"), dict(service="x:1")):
            with refused(self, ValueError):
                ballast.torch.AdamW(names(model), **options)
        for service in (7070, ["a:7070", 7070], []):
            with refused(self, TypeError):
                ballast.torch.AdamW(names(model), service=service, job="x")
        for service in ("a:7070,b:7070", ["a:7070", "b:7070"], ("a:7070", "b:7070")):
            optimizer = ballast.torch.AdamW(names(model), service=service, job="x")
            self.assertEqual(optimizer._options.service, "a:7070,b:7070")

    def test_a_list_of_one_service_is_that_service(self):
        model = Model()
        optimizer = self.optimizer(model, service=[self.service.address])
        self.train(model, optimizer, 1)
        self.assertEqual([job["members"] for job in ballast.connect(self.service.address).jobs()
                          if job["name"] == optimizer._options.job], [[]])

    def test_it_says_who_it_is_with_the_files_that_it_is_given(self):
        model = Model()
        for options in (dict(token_file="/no/token"), dict(tls_ca="/no/ca.pem"), dict(tls_cert="/no/a.pem")):
            optimizer = ballast.torch.AdamW(names(model), service="127.0.0.1:1", job="x", **options)
            self.addCleanup(optimizer.close)
            with refused(self, ballast.InvalidArgumentError):
                self.train(model, optimizer, 1)

    def test_what_changes_behind_its_back_is_told(self):
        def trained(job):
            model = Model()
            optimizer = self.optimizer(model, job=job)
            self.train(model, optimizer, 2)
            return model, optimizer

        model, optimizer = trained("behind")
        with torch.no_grad():
            model.scalar.mul_(2)
        with refused(self, RuntimeError):
            self.train(model, optimizer, 1)
        model, optimizer = trained("moved")
        model.scalar.data = model.scalar.data * 3  # Autograd is not told of this one.
        with refused(self, RuntimeError):
            self.train(model, optimizer, 1)
        for number, write in enumerate((lambda p: p.data.clamp_(-0.01, 0.01), lambda p: p.data.zero_(),
                                        lambda p: p.data.fill_(torch.nan))):  # Nor of these.
            model, optimizer = trained(f"data{number}")
            before = model.inner.weight.detach().clone()
            write(model.inner.weight)
            with refused(self, RuntimeError):
                self.train(model, optimizer, 1)
            model.inner.weight.data.copy_(before)
            self.train(model, optimizer, 1)
        model, optimizer = trained("replaced")
        reference, other = trained("not-replaced")
        another = Model()
        optimizer.param_groups[0]["params"] = [parameter for _, parameter in names(another)]  # As accelerate does it.
        with refused(self, ballast.FailedPreconditionError):
            self.train(another, optimizer, 1, begin=2)
        self.assertEqual(optimizer.attach(), 2)
        self.train(another, optimizer, 1, begin=2)
        self.train(reference, other, 1, begin=2)
        self.assertEqual(furthest(another, reference), 0)
        for name in ("amsgrad", "decoupled_weight_decay"):
            then = optimizer.param_groups[0][name]
            optimizer.param_groups[0][name] = not then
            with refused(self, RuntimeError):
                self.train(another, optimizer, 1)
            optimizer.param_groups[0][name] = then
        self.train(another, optimizer, 1)
        model, optimizer = trained("captured")
        with mock.patch("torch.cuda.is_available", return_value=True), \
                mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
            with refused(self, RuntimeError):
                optimizer.step()
        self.train(model, optimizer, 1, begin=2)

    def test_a_gradient_that_cannot_be_sent_is_told_and_the_next_step_goes_on(self):
        for overlap in (False, True):
            model, reference = Model(), Model()
            optimizer = self.optimizer(model, params=list(model.named_parameters()), job=f"cannot{overlap}",
                                       overlap=overlap)
            other = self.optimizer(reference, params=list(reference.named_parameters()), job=f"could{overlap}")

            def sparse():
                model.seldom.grad = torch.sparse_coo_tensor([[0]], [1.0], (5,), check_invariants=True)

            def other_dtype():  # As p.grad_dtype allows.
                model.seldom.data = model.seldom.data.bfloat16()
                model.seldom.grad = torch.ones(5, dtype=torch.bfloat16)
                model.seldom.data = weights

            for step, spoil in enumerate((None, sparse, other_dtype)):
                weights = model.seldom.data
                if spoil is not None:
                    with self.subTest(overlap=overlap, spoiled=spoil.__name__):
                        for twice in range(2):
                            spoil()
                            with refused(self, RuntimeError):
                                optimizer.step()
                        optimizer.zero_grad()
                        model.seldom.grad = None
                for each, theirs in ((model, optimizer), (reference, other)):
                    self.train(each, theirs, 1, begin=step)
            self.assertEqual(furthest(model, reference), 0)
            self.assertEqual(optimizer.state[model.scalar]["step"], 3)

    def test_no_service_is_one_line_and_no_hang(self):
        model = Model()
        optimizer = self.optimizer(model, service="127.0.0.1:1", job="x", timeout=5.0)
        loss_of(model, batch(0)).backward()
        begun = time.monotonic()
        with refused(self, ballast.UnavailableError):
            optimizer.step()
        self.assertLess(time.monotonic() - begun, 60)

    # ------------------------------------------------------------ around it

    def test_starts_a_service_of_its_own(self):
        ours, theirs = Model(), Model()
        optimizer = self.optimizer(ours, service=None, job=None, full_state=False)
        self.train(ours, optimizer, 3)
        self.train(theirs, torch.optim.AdamW(names(theirs)), 3)
        self.assertLess(furthest(ours, theirs), TOLERANCE)
        self.assertTrue(optimizer._binding.member.session.shares_memory)
        pid = optimizer._kept.service.pid
        with self.assertWarnsRegex(UserWarning, "only within this run: .*checkpoint_dir"):
            state = optimizer.state_dict()
        optimizer.close()
        self.assertFalse(pathlib.Path("/proc", str(pid)).exists())
        with refused(self, ballast.NotFoundError):
            self.optimizer(Model(), service=None, job=None).load_state_dict(state)

    def test_a_service_of_its_own_outlives_a_step_that_was_interrupted(self):
        ours, theirs = Model(), Model()
        optimizer = self.optimizer(ours, service=None, job=None)
        self.train(ours, optimizer, 2)
        pid = optimizer._kept.service.pid
        with mock.patch.object(optimizer._binding.member.session, "seal_and_vote", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                self.train(ours, optimizer, 1)
        with mock.patch.object(ballast.Session, "read_weights", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                optimizer.attach()
        self.assertEqual(optimizer.attach(), 2)
        self.assertEqual(optimizer._kept.service.pid, pid)
        self.train(ours, optimizer, 2, begin=2)
        self.train(theirs, torch.optim.AdamW(names(theirs)), 4)
        self.assertLess(furthest(ours, theirs), TOLERANCE)
        # It ends with the optimizer, also with one that nobody closes.
        del optimizer
        gc.collect()
        self.assertFalse(pathlib.Path("/proc", str(pid)).exists())

    def test_two_optimizers_beside_each_other_and_data_loaders(self):
        models = [Model(), Model()]
        optimizers = [self.optimizer(model, job=f"beside{i}") for i, model in enumerate(models)]
        data = [batch(step)[0] for step in range(16)]
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)
        for tokens in loader:  # Its processes are forks of this one.
            for model, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                loss_of(model, tokens).backward()
                optimizer.step()
        self.assertEqual(furthest(*models), 0)

    def test_a_fork_cannot_open_sessions_of_its_own(self):
        model = Model()
        self.train(model, self.optimizer(model, job="parent"), 1)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # It must not hang.
            said = ""
            try:
                other = Model()
                optimizer = ballast.torch.AdamW(names(other), service=self.service.address, job="child")
                self.train(other, optimizer, 1)
            except RuntimeError as error:
                said = str(error)
            os._exit(0 if "spawn" in said and "\n" not in said else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)

    def test_threads_have_their_own_optimizers_and_may_hand_them_over(self):
        models = [Model() for _ in range(3)]
        optimizers = [self.optimizer(model, job=f"thread{i}") for i, model in enumerate(models)]
        errors = []

        def run(which, begin):
            try:
                self.train(models[which], optimizers[which], 4, begin=begin)
            except BaseException as error:
                errors.append(error)

        for begin in (0, 4):  # The second time by other threads.
            threads = [threading.Thread(target=run, args=(i, begin)) for i in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(errors, [])
        self.assertEqual([o.param_groups[0]["job_step"] for o in optimizers], [8] * 3)
        self.assertEqual(furthest(models[0], models[1]), 0)
        self.assertEqual(furthest(models[0], models[2]), 0)

    def test_many_steps_leave_nothing_behind(self):
        model = torch.nn.Linear(3, 2)
        optimizer = self.optimizer(model)

        def steps(count):
            for _ in range(count):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            gc.collect()

        def used():
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))

        steps(300)
        before = used()
        steps(2000)
        after = used()
        self.assertEqual(after[1], before[1])
        self.assertLess(after[0] - before[0], 4 << 20)


if __name__ == "__main__":
    unittest.main()
