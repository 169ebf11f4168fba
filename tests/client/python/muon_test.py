#!/usr/bin/env python3
"""Muon, with AdamW for what are no matrices, against torch.optim, alone and on several ranks."""

import concurrent.futures
import copy
import functools
import os
import pathlib
import signal
import tempfile
import unittest
from unittest import mock

import torch
from fsdp_ranks import (
    STEPS,
    assert_near,
    backward_of_all,
    give_gradients,
    mesh_of,
    named,
    shard,
    take_gradients,
    used_seldom,
    whole,
)
from overlap_ranks import digest, loss_of_ddp
from ranks_for_tests import RanksTest, run_ranks
from torch_test import TOLERANCE, Model, batch, furthest, loss_of, names

import ballast
import ballast.torch
import ballast.torch.orthogonal
import fsdp_ranks
import rules_test
from messages import refused


def newton_schulz(grad, ns_coefficients, ns_steps, eps):
    """torch.optim.Muon's, in fp64 from bf16 to bf16. torch's own is bf16 throughout, and so has three digits."""
    a, b, c = ns_coefficients
    x = grad.bfloat16().double()
    x = x.T if grad.size(0) > grad.size(1) else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.T if grad.size(0) > grad.size(1) else x).bfloat16()


class Both:
    """torch.optim.Muon for matrices and torch.optim.AdamW for the rest."""

    def __init__(self, pairs, muon, adamw):
        self.both = (torch.optim.Muon(matrices(pairs), **muon), torch.optim.AdamW(others(pairs), **adamw))

    def step(self):
        for optimizer in self.both:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.both:
            optimizer.zero_grad()


def matrices(pairs):
    return [(name, p) for name, p in pairs if p.ndim == 2]


def others(pairs):
    return [(name, p) for name, p in pairs if p.ndim != 2]


MUON, ADAMW = dict(lr=1e-4, weight_decay=0.1), dict(lr=0.02, weight_decay=0.1)


def groups(pairs):
    return [{"params": matrices(pairs)}, {"params": others(pairs), "rule": "adam", **ADAMW}]


def parallel(model, kind, world_size, find_unused_parameters=True):
    """The model to train, and the one to call. kind: "whole", "ddp", "fsdp" or "hsdp"."""
    if kind in ("fsdp", "hsdp"):
        model = shard(model, mesh_of(world_size, 2 if kind == "hsdp" else 1))
    if kind != "ddp":
        return model, model
    return model, torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused_parameters)


def trains_as_one_process(rank, world_size, service, job, kind, max_norm=None, **options):
    torch.optim._muon._zeropower_via_newtonschulz = ballast.torch.orthogonal.newton_schulz = newton_schulz
    model, called = parallel(fsdp_ranks.Model(), kind, world_size)
    alone = fsdp_ranks.Model()
    ours = ballast.torch.Muon(groups(named(model)), **MUON, service=service, job=job, max_norm=max_norm, **options)
    theirs = Both(named(alone), MUON, ADAMW)
    for step in range(STEPS):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        fsdp_ranks.loss_of(called, fsdp_ranks.batch(step, rank), used_seldom(step)).backward()
        backward_of_all(alone, step, world_size)
        take_gradients(alone, model)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
        ours.step()
        theirs.step()
        ours.wait_for_weights()
        assert_near(alone, model, (rank, world_size, step))
    if max_norm is not None:
        assert ours.clip_coefficient < 1
    ours.close()
    return digest(model)


def given_gradients(rank, world_size, service, job, kind, steps=(0, 4), resume=False, save=False, **options):
    """The digest after steps with gradients that have the same bits everywhere."""
    model, _ = parallel(fsdp_ranks.Model(), kind, world_size)
    optimizer = ballast.torch.Muon(groups(named(model)), lr=0.02, service=service, job=job, **options)
    if resume:
        assert optimizer.attach(resume=True) == steps[0]
    for step in range(*steps):
        give_gradients(model, step)
        optimizer.step()
    result = digest(model)
    optimizer.close(save=save)
    return result


def accumulates(rank, world_size, service, job, kind, **options):
    """Two backwards in each step."""
    # With overlap DistributedDataParallel has to reach all parameters.
    torch.manual_seed(1)
    plain = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 20), torch.nn.Tanh(), torch.nn.Linear(20, 7))
    model, called = parallel(plain if kind == "ddp" else fsdp_ranks.Model(), kind, world_size, find_unused_parameters=False)
    optimizer = ballast.torch.Muon(groups(named(model)), lr=0.02, service=service, job=job,
                                   module=called if kind == "ddp" else None, **options)
    for step in range(4):
        optimizer.zero_grad()
        for micro_step in range(2):
            tokens = fsdp_ranks.batch(10 * step + micro_step, rank)
            (loss_of_ddp(called, tokens) if kind == "ddp" else fsdp_ranks.loss_of(called, tokens, used_seldom(step))).backward()
        optimizer.step()
    optimizer.wait_for_weights()
    result = digest(model)
    optimizer.close()
    return result


def dies_in_the_second_round(rank, world_size, service, job, kind):
    """All ranks, once they have the directions of step 2, and some have given O."""
    model, _ = parallel(fsdp_ranks.Model(), kind, world_size)
    optimizer = ballast.torch.Muon(groups(named(model)), lr=0.02, service=service, job=job, newton_schulz="workers")
    give_gradients(model, 0)
    optimizer.step()
    of_session = ballast.Session.give_orthogonal

    def die(*arguments):
        if rank == 1:
            of_session(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    ballast.Session.give_orthogonal = die
    give_gradients(model, 1)
    optimizer.step()


def ends_the_round_of_the_dead(rank, world_size, service, job, kind):
    model, _ = parallel(fsdp_ranks.Model(), kind, world_size)
    optimizer = ballast.torch.Muon(groups(named(model)), lr=0.02, service=service, job=job, newton_schulz="workers")
    begin = optimizer.attach()
    for step in range(begin, 4):
        give_gradients(model, step)
        optimizer.step()
    result = [begin, digest(model)]
    optimizer.close()
    return result


def trains_and_undoes(rank, world_size, service, job, kind, **options):
    """The digest after four steps, between which two are made and undone."""
    model, called = parallel(fsdp_ranks.Model(), kind, world_size)
    optimizer = ballast.torch.Muon(groups(named(model)), lr=0.02, service=service, job=job, keep_previous=True,
                                   **options)

    def train(step):
        optimizer.zero_grad()
        fsdp_ranks.loss_of(called, fsdp_ranks.batch(step, rank), used_seldom(step)).backward()
        optimizer.step()

    for step in range(4):
        if step in (1, 3):
            before = digest(model)
            train(40 + step)
            assert digest(model) != before
            assert optimizer.undo_step() == step
            assert digest(model) == before
        train(step)
    result = [digest(model), whole(optimizer.state[model.layers[0].weight]["momentum_buffer"]).sum().item()]
    optimizer.close()
    return result


# ---------------------------------------------------------------- the tests

def in_odd_steps(step):
    return step % 2 == 1


train = functools.partial(rules_test.train, seldom=in_odd_steps)
train_both = functools.partial(rules_test.train_both, seldom=in_odd_steps)


class MuonTest(unittest.TestCase):
    NEWTON_SCHULZ = "service"

    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.service = ballast.Service(memory_limit="1GiB", checkpoint_dir=cls.folder)
        cls.addClassCleanup(cls.service.stop)

    def optimizer(self, params, job="", **options):
        optimizer = ballast.torch.Muon(params, **{"service": self.service.address, "lr": MUON["lr"],
                                                  "newton_schulz": self.NEWTON_SCHULZ,
                                                  "job": self.id().rpartition(".")[2] + job, **options})
        self.addCleanup(optimizer.close)
        return optimizer

    def exact(self):
        self.enterContext(mock.patch.object(torch.optim._muon, "_zeropower_via_newtonschulz", newton_schulz))
        self.enterContext(mock.patch.object(ballast.torch.orthogonal, "newton_schulz", newton_schulz))

    def test_equals_torchs_with_every_option(self):
        self.exact()
        for number, options in enumerate((
                dict(), dict(lr=2e-4, weight_decay=0.5), dict(momentum=0.7, nesterov=False), dict(momentum=0.0),
                dict(ns_coefficients=(2.0, -1.5, 0.5), ns_steps=7), dict(ns_steps=0), dict(eps=5.0),
                dict(adjust_lr_fn="match_rms_adamw"), dict(adjust_lr_fn="original"))):
            with self.subTest(**options):
                ours, theirs = Model(), Model()
                mine = self.optimizer(groups(names(ours)), str(number), **options)
                train_both(ours, mine, theirs, Both(names(theirs), {**dict(lr=1e-4), **options}, ADAMW), 0, 20)
                self.assertLess(furthest(ours, theirs), TOLERANCE)

    def test_is_as_near_to_torchs_own_as_bf16_allows(self):
        ours, theirs, first = Model(), Model(), Model()
        mine = self.optimizer(groups(names(ours)), lr=0.05, weight_decay=0.0)
        train_both(ours, mine, theirs, Both(names(theirs), dict(lr=0.05, weight_decay=0.0), ADAMW), 0, 20)
        for (name, p), (_, q), (_, start) in zip(matrices(names(ours)), matrices(names(theirs)), matrices(names(first))):
            moved = (q - start).norm().item()
            self.assertGreater(moved, 0.1 * start.norm().item())
            self.assertLess((p - q).norm().item(), 0.02 * moved, name)

    def test_values_change_as_torchs(self):
        self.exact()
        ours, theirs = Model(), Model()
        mine = self.optimizer(groups(names(ours)))
        reference = Both(names(theirs), MUON, ADAMW)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (mine, *reference.both)]
        for step in range(4):
            train_both(ours, mine, theirs, reference, step, step + 1)
            for scheduler in schedulers:
                scheduler.step()
            for group in (mine.param_groups[0], reference.both[0].param_groups[0]):
                group.update(momentum=0.5, ns_steps=3 + step, adjust_lr_fn="match_rms_adamw", ns_coefficients=(3.0, -3.2, 1.2))
        self.assertLess(furthest(ours, theirs), TOLERANCE)

    def test_every_mode_has_the_same_bits(self):
        models = rules_test.models_of_every_mode(
            lambda model, job, **options: self.optimizer(groups(names(model)), job, **options), in_odd_steps)
        for model in models[1:]:
            self.assertEqual(furthest(model, models[0]), 0)

    def test_scaled_gradients(self):
        self.exact()
        ours, theirs = Model(), Model()
        mine, reference = self.optimizer(groups(names(ours))), Both(names(theirs), MUON, ADAMW)
        for model, optimizers in ((ours, [mine]), (theirs, reference.both)):
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            for step in range(4):
                model.zero_grad()
                scaler.scale(loss_of(model, batch(step))).backward()
                if step == 1:  # In a parameter of each optimizer of torch, which decide each for itself.
                    model.scalar.grad.fill_(torch.inf)
                    model.inner.weight.grad[3, 4] = torch.nan
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
        self.assertLess(furthest(ours, theirs), TOLERANCE)

    def test_a_state_goes_on_here_and_in_torch(self):
        """Of matrices alone, so that torch has one optimizer."""
        self.exact()

        def of(model, kind, job):
            if kind == "torch":
                return torch.optim.Muon(matrices(names(model)), **MUON)
            return self.optimizer(matrices(names(model)), job, **MUON, full_state=True)

        straight = Model()
        train(straight, of(straight, "torch", ""), 0, 6)
        for number, (first, second) in enumerate((("torch", "ours"), ("ours", "torch"), ("ours", "ours"))):
            with self.subTest(first=first, second=second):
                before, after = Model(), Model()
                one, two = of(before, first, f"{number}a"), of(after, second, f"{number}b")
                train(before, one, 0, 3)
                state = copy.deepcopy(one.state_dict())
                after.load_state_dict(before.state_dict())
                two.load_state_dict(state)
                train(after, two, 3, 6)
                self.assertLess(furthest(after, straight), TOLERANCE)
        # Before any step torch's state has no buffers; ours has zeros.
        state = self.optimizer(matrices(names(Model())), "early", full_state=True)
        state.attach(create=True)
        early = torch.optim.Muon(matrices(names(before)), **MUON)
        early.load_state_dict(copy.deepcopy(state.state_dict()))
        train(before, early, 0, 1)

    def test_checkpoints(self):
        self.exact()
        theirs, ours, straight, again = Model(), Model(), Model(), Model()
        reference = torch.optim.Muon(matrices(names(straight)), **MUON)
        train(straight, reference, 0, 6)
        reference = torch.optim.Muon(matrices(names(theirs)), **MUON)
        train(theirs, reference, 0, 2)
        mine = self.optimizer(matrices(names(ours)), **MUON)
        ballast.torch.to_checkpoint(self.folder / "test_checkpoints", mine, theirs.state_dict(), reference.state_dict())
        self.assertEqual(mine.attach(resume=True), 1)  # torch.optim.Muon does not count.
        train(ours, mine, 2, 4)
        mine.close(save=True)
        client = ballast.connect(self.service.address)
        self.assertEqual({found["problem"] for found in client.verify("test_checkpoints")}, {""})
        reference = torch.optim.Muon(matrices(names(again)), adjust_lr_fn="match_rms_adamw")
        weights, state = ballast.torch.from_checkpoint(self.folder / "test_checkpoints", reference)
        again.load_state_dict(weights, strict=False)
        reference.load_state_dict(state)
        self.assertEqual(reference.param_groups[0]["adjust_lr_fn"], "original")
        train(again, reference, 4, 6)
        self.assertLess(furthest(again, straight), TOLERANCE)

    def test_a_matrix_without_a_finite_direction_keeps_its_weights(self):
        """Coefficients that let Newton-Schulz overflow."""
        model = Model()
        mine = self.optimizer(groups(names(model)))
        train(model, mine, 0, 1)
        before = {name: p.detach().clone() for name, p in names(model)}
        mine.param_groups[0].update(ns_coefficients=(1e30, 1e30, 1e30))
        train(model, mine, 1, 2)
        for name, p in names(model):
            self.assertEqual(torch.equal(p, before[name]), p.ndim == 2, name)
        self.assertIsNone(mine.skipped)
        mine.param_groups[0].update(ns_coefficients=(3.4445, -4.775, 2.0315))
        train(model, mine, 2, 3)
        self.assertFalse(torch.equal(model.inner.weight, before["inner.weight"]))

    def test_what_is_refused(self):
        vector, matrix = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 2))
        for params, options in (([("w", vector)], {}), ([("w", matrix)], {"lr": -1}), ([("w", matrix)], {"momentum": -0.1}),
                                ([("w", matrix)], {"adjust_lr_fn": "other"}), ([("w", matrix)], {"weight_decay": -1}),
                                ([{"params": [("w", matrix)], "dampening": 0.5, "rule": "muon"}], {})):
            with self.subTest(**options), refused(self, ValueError):
                ballast.torch.Muon(params, **options)
        for options in ({"ns_steps": 100}, {"ns_steps": 2.5}, {"eps": -1.0}, {"ns_coefficients": (1.0, float("inf"), 0.0)},
                        {"ns_coefficients": (1.0, 2.0)}):
            mine = self.optimizer([("w", matrix)], **options)
            matrix.grad = torch.ones(2, 2)
            with self.subTest(**options), refused(self, ValueError):
                mine.step()
        mine = self.optimizer([("w", torch.nn.Parameter(torch.ones(2, 2)))])
        others = torch.optim.AdamW([("w", torch.nn.Parameter(torch.ones(2, 2)))])
        with refused(self, ballast.InvalidArgumentError):
            mine.load_state_dict(others.state_dict())


class WorkersMuonTest(MuonTest):
    """The same, and more, where the trainer's process makes the iteration."""

    NEWTON_SCHULZ = "workers"

    def test_the_iteration_is_torchs(self):
        for shape in ((16, 40), (40, 16), (7, 7), (1, 9)):
            direction = torch.randn(shape)
            ours, theirs = (iteration(direction, (3.4445, -4.775, 2.0315), 5, 1e-7) for iteration in (
                ballast.torch.orthogonal.newton_schulz, torch.optim._muon._zeropower_via_newtonschulz))
            self.assertTrue(torch.equal(ours, theirs), shape)

    def test_an_interrupted_round_is_ended(self):
        straight, model = Model(), Model()
        train(straight, self.optimizer(groups(names(straight)), "straight"), 0, 3)
        mine = self.optimizer(groups(names(model)))
        train(model, mine, 0, 1)
        with mock.patch.object(ballast.torch.orthogonal, "newton_schulz", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                train(model, mine, 1, 2)
        mine.step()  # It has been made.
        train(model, mine, 2, 3)
        self.assertEqual(furthest(model, straight), 0)

    def test_the_service_makes_an_aborted_round(self):
        self.exact()
        straight, model = Model(), Model()
        train(straight, self.optimizer(groups(names(straight)), "straight"), 0, 3)
        mine = self.optimizer(groups(names(model)))
        train(model, mine, 0, 1)
        client = ballast.connect(self.service.address)

        def abort(direction, *_):
            if client.job("test_the_service_makes_an_aborted_round")["phase"] == "DIRECTIONS":
                client._change("JobService/AbortStep", name="jobs/test_the_service_makes_an_aborted_round")
            return torch.zeros_like(direction)

        with mock.patch.object(ballast.torch.orthogonal, "newton_schulz", abort):
            train(model, mine, 1, 2)
        train(model, mine, 2, 3)
        self.assertLess(furthest(model, straight), TOLERANCE)

    def test_a_rank_that_gives_nothing_is_named(self):
        matrix = ballast.Parameter("w", (512, 2))
        job = ballast.Job("test_a_rank_that_gives_nothing_is_named",
                          [ballast.Group("m", ballast.HyperParameters(rule="muon"), "bfloat16", "bfloat16")], [matrix],
                          world_size=2, newton_schulz="workers")
        weights = [torch.zeros(512, 2, dtype=torch.bfloat16) for _ in range(2)]
        sessions = [ballast.Session(self.service.address, job, [weights[rank].data_ptr()], rank=rank, timeout=3.0,
                                    memory=weights) for rank in range(2)]
        first = torch.ones(512, 2)
        for session in sessions:
            session.upload_weights([first.data_ptr()])
        changed = ballast.HyperParameters(rule="muon", ns_steps=3, adjust_lr_fn="match_rms_adamw")
        for session in sessions:
            session.begin_step(hyper_parameters=[changed])
            session.push_gradients([weights[0].data_ptr()], final=True)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            self.assertTrue(all(decision.applied for decision in pool.map(ballast.Session.seal_and_vote, sessions)))
        place = torch.zeros(512, 2, dtype=torch.bfloat16)
        self.assertEqual(sessions[0].read_directions([place.data_ptr()]), [changed])
        with refused(self, ballast.FailedPreconditionError):
            sessions[0].receive_weights()
        sessions[0].give_orthogonal([place.data_ptr()])
        with refused(self, ballast.DeadlineError):
            sessions[0].receive_weights()
        self.assertTrue(sessions[1].read_directions([place.data_ptr()]))
        sessions[1].give_orthogonal([place.data_ptr()])
        for session in sessions:
            session.receive_weights()
            session.close()


class MuonRanksTest(RanksTest):
    MODULE = "muon_test"
    NEWTON_SCHULZ = "service"

    @classmethod
    def setUpClass(cls):
        cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.service = ballast.Service(memory_limit="1GiB", checkpoint_dir=cls.folder)
        cls.addClassCleanup(cls.service.stop)

    def ranks(self, world_size, *cases):
        return super().ranks(world_size, *[(function, {"newton_schulz": self.NEWTON_SCHULZ, **options})
                                           for function, options in cases])

    def all_ranks_agree(self, results):
        for of_case in results:
            self.assertTrue(all(result == of_case[0] for result in of_case), of_case)
        return [of_case[0] for of_case in results]

    def test_trains_as_one_process(self):
        self.all_ranks_agree(self.ranks(2, *[("trains_as_one_process", {"kind": kind, **options}) for kind, options in (
            ("ddp", {}), ("fsdp", {"max_norm": 0.5}), ("fsdp", {"overlap": True, "overlap_weights": True}))]))
        self.all_ranks_agree(self.ranks(4, ("trains_as_one_process", {"kind": "hsdp"})))

    def test_the_same_bits_for_any_number_of_ranks(self):
        results = []
        for world_size, kinds in ((1, ["whole"]), (2, ["fsdp", "whole"]), (4, ["hsdp"])):
            results += self.all_ranks_agree(
                self.ranks(world_size, *[("given_gradients", {"kind": kind}) for kind in kinds]))
        self.assertEqual(len(set(results)), 1, results)

    def test_goes_on_at_another_world_size(self):
        ((straight,),) = self.ranks(1, ("given_gradients", {"kind": "whole", "job": "straight"}))
        self.ranks(2, ("given_gradients", {"kind": "fsdp", "job": "moves", "steps": (0, 2), "save": True}))
        ((once,),) = self.ranks(1, ("given_gradients", {"kind": "whole", "job": "moves", "steps": (2, 3), "resume": True,
                                                        "save": True}))
        (twice,) = self.ranks(2, ("given_gradients", {"kind": "fsdp", "job": "moves", "steps": (3, 4), "resume": True}))
        self.assertEqual(set(twice), {straight})
        self.assertNotEqual(once, straight)

    def test_overlap_and_accumulation_change_no_bit(self):
        for kind in ("ddp", "fsdp"):
            modes = ({}, {"overlap": True}, {"overlap": True, "accumulation_steps": 2, "overlap_weights": True})
            results = self.all_ranks_agree(self.ranks(2, *[
                ("accumulates", {"kind": kind, "job": f"{kind}-{number}", **mode}) for number, mode in enumerate(modes)]))
            self.assertEqual(len(set(results)), 1, (kind, results))

    def test_undo(self):
        results = self.all_ranks_agree(self.ranks(2, *[("trains_and_undoes", {"kind": kind}) for kind in ("ddp", "fsdp")]))
        self.assertEqual(len(results), 2)


class WorkersMuonRanksTest(MuonRanksTest):
    """The same, and more, where the ranks make the iteration."""

    NEWTON_SCHULZ = "workers"

    def test_the_next_ranks_end_the_round_of_the_dead(self):
        for kind in ("ddp", "fsdp"):
            (straight,) = self.ranks(2, ("given_gradients", {"kind": kind, "job": f"straight-{kind}"}))
            options = {"service": self.service.address, "job": f"dies-{kind}", "kind": kind}
            run_ranks(self.MODULE, 2, [("dies_in_the_second_round", options)], may_die=(0, 1))
            (job,) = [job for job in ballast.connect(self.service.address).jobs() if job["name"] == f"dies-{kind}"]
            self.assertEqual(job["phase"], "DIRECTIONS")
            self.assertEqual(run_ranks(self.MODULE, 2, [("ends_the_round_of_the_dead", options)]),
                             [[[2, digest_of_rank] for digest_of_rank in straight]])


if __name__ == "__main__":
    unittest.main()
