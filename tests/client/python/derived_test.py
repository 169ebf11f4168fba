#!/usr/bin/env python3
"""Parameters that are added, thawed, frozen, resized or left out in the middle of a training: as with torch.optim."""

import copy
import itertools
import tempfile
import unittest
import warnings

import torch
from ranks_for_tests import run_ranks
from messages import refused
from torch_test import TOLERANCE, Model, batch, furthest, loss_of, names

import ballast.torch

_MODES = ({}, {"overlap": True}, {"overlap": True, "overlap_weights": True})
_numbers = itertools.count()


def unfrozen(model):
    return [(name, parameter) for name, parameter in model.named_parameters() if name != "frozen"]


def parts_of(model):
    """By name, in two."""
    named = unfrozen(model)
    return named[:2], named[2:]


def bare(params):
    """Without names."""
    return [dict(part, params=[p for _, p in part["params"]]) if isinstance(part, dict) else part[1] for part in params]


def add(optimizer, named, **options):
    """A group. torch refuses names where the other groups have none."""
    ours = isinstance(optimizer, ballast.torch.AdamW)
    optimizer.add_param_group({"params": named if ours else bare(named), **options})


def train(model, optimizer, *steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()


class DerivedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.service = ballast.Service(memory_limit="1GiB", checkpoint_dir=folder.name)
        cls.addClassCleanup(cls.service.stop)
        cls.client = ballast.Client(cls.service.address)

    def job_of(self, name):
        return next(job for job in self.client.jobs() if job["name"] == name)

    def ours(self, model, params, name, mode=None, **options):
        mode = mode or {}
        given = {"module": model} if "overlap_weights" in mode else {}
        return ballast.torch.AdamW(params, lr=0.01, service=self.service.address, job=name, **mode, **given, **options)

    def like_torch(self, change, begin=names, steps=7, derived=1, modes=_MODES, clip=None, after_backward=False):
        """change(optimizer, model, step), before each step, or between its backward and step(). Both end alike, with the
        state of each parameter, and the job was derived so often."""
        for mode in modes:
            with self.subTest(mode):
                torch.manual_seed(0)
                model = Model()
                reference = copy.deepcopy(model)
                job = f"{self.id().rpartition('.')[2]}-{next(_numbers)}"
                ours = self.ours(model, begin(model), job, mode)
                theirs = torch.optim.AdamW(bare(begin(reference)), lr=0.01)
                uids = []
                for step in range(steps):
                    for each, optimizer in ((model, ours), (reference, theirs)):
                        optimizer.zero_grad()
                        if not after_backward:
                            change(optimizer, each, step)
                        loss_of(each, batch(step), seldom=step % 3 == 0).backward()
                        if after_backward:
                            change(optimizer, each, step)
                        if clip:
                            torch.nn.utils.clip_grad_norm_(
                                [p for group in optimizer.param_groups for p in group["params"]], clip)
                        optimizer.step()
                    ours.wait_for_weights()
                    uids.append(self.job_of(job)["uid"])
                self.assertLess(furthest(model, reference), TOLERANCE)
                for one, other in zip(model.parameters(), reference.parameters()):
                    if "exp_avg" not in theirs.state.get(other, {}) or id(one) not in ours._trained:
                        continue
                    for plane in ("exp_avg", "exp_avg_sq"):
                        torch.testing.assert_close(ours.state[one][plane], theirs.state[other][plane], rtol=1e-4,
                                                   atol=1e-6)
                self.assertEqual(len(set(uids)), 1 + derived)
                now = self.job_of(job)
                self.assertEqual((now["committed_step"], now["applied_steps"]), (steps, steps))
                self.assertEqual(ours.param_groups[-1]["job_step"], steps)
                self.assertEqual(ours.param_groups[0]["job_uid"], now["uid"])
                if mode.get("overlap"):
                    self.assertTrue(ours.overlap)
                ours.close(job=True)

    # ------------------------------------------------------------ what is trained changes

    def test_a_group_that_is_added(self):
        def change(optimizer, model, step):
            if step == 2:
                add(optimizer, parts_of(model)[1], lr=0.02, weight_decay=0.1)

        self.like_torch(change, lambda model: parts_of(model)[0])
        self.like_torch(change, lambda model: parts_of(model)[0], modes=_MODES[:2], clip=0.1)
        # Its gradients are there, and those of the others have left.
        self.like_torch(change, lambda model: parts_of(model)[0], after_backward=True)

    def test_several_that_are_added_one_after_the_other(self):
        def change(optimizer, model, step):
            if step in (1, 3, 4):
                add(optimizer, [names(model)[{1: 1, 3: 2, 4: 3}[step]]])

        self.like_torch(change, lambda model: names(model)[:1], derived=3)

    def test_parameters_that_thaw(self):
        def frozen(model):
            for name, parameter in parts_of(model)[1]:
                parameter.requires_grad_(False)
            return unfrozen(model)

        def change(optimizer, model, step):
            if step == 2:
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(name != "frozen")

        self.like_torch(change, frozen)
        self.like_torch(change, frozen, modes=_MODES[:2], clip=0.1)

    def test_adapters_that_take_turns(self):
        """As PEFT's set_adapter: what is frozen keeps its moments, and goes on with them."""
        def change(optimizer, model, step):
            if step in (2, 4, 6):
                ours, others = parts_of(model)
                for _, parameter in ours:
                    parameter.requires_grad_(step == 4)
                for _, parameter in others:
                    parameter.requires_grad_(step != 4)

        def begin(model):
            for _, parameter in parts_of(model)[1]:
                parameter.requires_grad_(False)
            return unfrozen(model)

        self.like_torch(change, begin)

    def test_freezing_alone_derives_nothing(self):
        def change(optimizer, model, step):
            if step in (2, 4):
                model.inner.weight.requires_grad_(step == 4)

        self.like_torch(change, derived=0)
        self.like_torch(change, derived=0, after_backward=True)  # What was frozen since has a gradient, which counts.

    def test_a_group_that_is_left_out(self):
        def change(optimizer, model, step):
            if step == 3:
                optimizer.param_groups.pop()

        self.like_torch(change, lambda model: [{"params": part} for part in parts_of(model)])

    def test_an_embedding_that_grows(self):
        def change(optimizer, model, step):
            if step != 3:
                return
            old = model.embedding.weight
            torch.manual_seed(7)
            grown = torch.nn.Parameter(torch.cat([old.detach(), torch.randn(3, 20)]))
            model.embedding.weight = model.head.weight = grown
            for group in optimizer.param_groups:
                group["params"] = [grown if p is old else p for p in group["params"]]

        self.like_torch(change)

    # ------------------------------------------------------------ around it

    def test_without_names_and_with_a_service_of_its_own(self):
        torch.manual_seed(0)
        model = Model()
        reference = copy.deepcopy(model)
        ours = ballast.torch.AdamW(bare(parts_of(model)[0]), lr=0.01)
        theirs = torch.optim.AdamW(bare(parts_of(reference)[0]), lr=0.01)
        for step in range(5):
            for each, optimizer in ((model, ours), (reference, theirs)):
                if step == 2:
                    optimizer.add_param_group({"params": bare(parts_of(each)[1])})
                train(each, optimizer, step)
        self.assertLess(furthest(model, reference), TOLERANCE)
        self.assertEqual(len(ballast.Client(ours._binding.member.kept.service.address).jobs()), 1)
        state = ours.state_dict()  # With its moments: a new job begins with it.
        torch.testing.assert_close(state["state"][3]["exp_avg"], theirs.state_dict()["state"][3]["exp_avg"])
        self.assertEqual(float(state["state"][3]["step"]), 3.0)
        ours.close()

    def test_a_number_of_one_that_left_is_given_to_no_other(self):
        old, new = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        stays = torch.nn.Linear(3, 3)
        ours = self.ours(stays, [{"params": list(old.parameters())}, {"params": list(stays.parameters())}], "numbers")
        for model in (old, stays):
            model(torch.ones(1, 3)).sum().backward()
        ours.step()
        ours.param_groups.pop(0)
        ours.add_param_group({"params": list(new.parameters())})
        before = new.weight.detach().clone()
        ours.step()
        self.assertTrue(torch.equal(new.weight, before))  # Not the old one's.
        name = ours.param_groups[1]["param_names"][0]
        self.assertEqual(self.client.summary("numbers", name)["update_count"], 0)
        ours.close(job=True)

    def test_attach_after_a_change_takes_the_weights_of_the_service(self):
        model = Model()
        ours = self.ours(model, parts_of(model)[0], "attached", overlap=True)
        for step in range(2):
            ours.zero_grad()
            loss_of(model, batch(step)).backward()
            if step == 0:
                ours.step()
        before = model.scalar.detach().clone()
        with torch.no_grad():
            model.scalar.fill_(9.0)
        ours.add_param_group({"params": parts_of(model)[1]})
        self.assertEqual(ours.attach(), 1)
        self.assertTrue(torch.equal(model.scalar, before))
        ours.step()
        self.assertEqual(ours.param_groups[0]["job_step"], 2)
        ours.close(job=True)

    def test_a_state_of_a_derived_job_is_gone_on_from(self):
        model = Model()
        ours = self.ours(model, parts_of(model)[0], "gone-on")
        for step in range(5):
            if step == 2:
                ours.add_param_group({"params": parts_of(model)[1]})
            if step == 4:
                state, weights = copy.deepcopy(ours.state_dict()), copy.deepcopy(model.state_dict())
            train(model, ours, step)
        ours.close(job=True)
        again = Model()
        again.load_state_dict(weights)
        other = self.ours(again, parts_of(again)[0], "gone-on")
        other.add_param_group({"params": parts_of(again)[1]})
        other.load_state_dict(state)
        loss_of(again, batch(4)).backward()
        other.step()
        self.assertEqual(furthest(again, model), 0.0)
        other.close(job=True)

    def test_a_checkpoint_is_gone_on_from_with_other_parameters(self):
        model = Model()
        ours = self.ours(model, parts_of(model)[0], "other-parameters")
        train(model, ours, 0, 1)
        moments = ours.state[parts_of(model)[0][0][1]]["exp_avg"].clone()
        ours.close(save=True)
        again = Model()
        torch.nn.init.constant_(again.inner.weight, 0.25)
        other = self.ours(again, names(again), "other-parameters")
        with self.assertRaises(ballast.FailedPreconditionError):
            other.attach(resume=True)
        with self.assertRaises(ValueError):
            other.attach(create=True, derive=True)
        other = self.ours(again, names(again), "other-parameters")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.client.close_job("other-parameters")  # Which the first try has made.
            self.assertEqual(other.attach(resume=True, derive=True), 2)
        for (name, one), (_, before) in zip(parts_of(again)[0], parts_of(model)[0]):
            self.assertTrue(torch.equal(one, before), name)
        torch.testing.assert_close(other.state[parts_of(again)[0][0][1]]["exp_avg"], moments, rtol=0, atol=0)
        self.assertEqual(self.client.summary("other-parameters", "norm.weight")["update_count"], 0)
        loss_of(again, batch(2)).backward()
        other.step()
        # And from a job that is there.
        other.close()
        larger = torch.nn.ModuleList([again, torch.nn.Linear(2, 2)])
        third = self.ours(larger, [*names(again), *larger[1].named_parameters(prefix="more")], "other-parameters")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.assertEqual(third.attach(resume=True, derive=True), 3)
        third.step()
        third.close(job=True)

    def test_one_that_does_not_fit_leaves_the_old_job(self):
        with ballast.Service(memory_limit="16MiB") as service:
            small, large = torch.nn.Linear(8, 8), torch.nn.Linear(1024, 1024)
            ours = ballast.torch.AdamW(small.named_parameters(prefix="small"), lr=0.01, service=service.address, job="fits")

            def step():
                ours.zero_grad()
                small(torch.ones(1, 8)).sum().backward()
                ours.step()

            step()
            ours.add_param_group({"params": large.named_parameters(prefix="large")})
            with self.assertRaises(ballast.ResourceExhaustedError):
                step()
            (job,) = ballast.Client(service.address).jobs()
            self.assertEqual((job["phase"], job["committed_step"]), ("READY", 1))
            ours.param_groups.pop()
            ours.attach()
            step()
            self.assertEqual(ours.param_groups[0]["job_step"], 2)
            ours.close()

    def test_gradients_that_were_freed_are_not_lost_without_a_word(self):
        model = Model()
        ours = self.ours(model, parts_of(model)[0], "freed", overlap=True, accumulation_steps=1)
        for step in range(3):
            ours.zero_grad()
            loss_of(model, batch(step)).backward()
            if step == 2:
                ours.add_param_group({"params": parts_of(model)[1]})
                with refused(self, RuntimeError):
                    ours.step()
                ours.zero_grad()
                loss_of(model, batch(step)).backward()
            ours.step()
        self.assertEqual(ours.param_groups[0]["job_step"], 3)
        ours.close(job=True)

    # ------------------------------------------------------------ what must not go wrong without a word

    def linears(self, count=3):
        models = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(count)])
        for number, model in enumerate(models):
            torch.nn.init.constant_(model.weight, number + 1.0)
        return models

    def step(self, models, optimizer):
        optimizer.zero_grad()
        sum(model(torch.ones(1, 3)).sum() for model in models).backward()
        optimizer.step()

    def begun(self, name, **options):
        """Three layers, all their parameters, and an optimizer of the first one's, which has made a step."""
        models = self.linears()
        named = list(models.named_parameters())
        ours = self.ours(models, named[:2], name, **options)
        self.step(models, ours)
        return models, named, ours

    def test_a_list_of_parameters_that_is_changed_in_place(self):
        models = self.linears()
        ours = self.ours(models, list(models.named_parameters()), "in-place")
        self.step(models, ours)
        before = [model.weight.detach().clone() for model in models]
        del ours.param_groups[0]["params"][0]
        ours.param_groups[0]["params"].append(extra := torch.nn.Parameter(torch.full((3,), 5.0)))
        ours.zero_grad()
        ours.step()
        for model, weight in zip(models, before):
            self.assertTrue(torch.equal(model.weight, weight))
        self.assertTrue(torch.equal(extra, torch.full((3,), 5.0)))
        self.assertEqual(ours.param_groups[0]["param_names"][:2], ["0.bias", "1.weight"])
        ours.close(job=True)

    def test_groups_of_different_planes_change_places(self):
        for first in (True, False):
            models = self.linears()
            groups = [{"params": list(model.named_parameters(prefix=str(n))), "amsgrad": (n == 0) == first}
                      for n, model in enumerate(models)]
            ours = self.ours(models, groups, f"planes-{first}")
            self.step(models, ours)
            ours.param_groups.pop(0)
            self.step(models, ours)
            self.client.save(f"planes-{first}")
            ours.param_groups.pop(0)
            self.step(models, ours)
            found = self.client.verify(f"planes-{first}")
            self.assertTrue(found and not any(each["problem"] for each in found))
            self.assertEqual(self.job_of(f"planes-{first}")["committed_step"], 3)
            ours.close(job=True)

    def test_a_session_that_has_ended_derives_nothing_by_itself(self):
        models, named, ours = self.begun("ended")
        other = self.ours(models, named[:2], "ended")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other.attach()
            self.step(models, other)
            ours.add_param_group({"params": named[2:]})
            for _ in range(2):  # The first one finds out.
                with self.assertRaises(ballast.BallastError):
                    self.step(models, ours)
        self.assertEqual(self.job_of("ended")["committed_step"], 2)
        other.close(job=True)

    def test_freed_gradients_are_missed_after_attach_too(self):
        models, named, ours = self.begun("missed", overlap=True, accumulation_steps=1)
        self.step(models, ours)
        ours.zero_grad()
        sum(model(torch.ones(1, 3)).sum() for model in models).backward()
        ours.add_param_group({"params": named[2:]})
        ours.attach()
        with self.assertRaises(ballast.FailedPreconditionError):
            ours.step()
        self.step(models, ours)
        ours.close(job=True)

    def test_a_checkpoint_that_is_named_begins_once(self):
        models, named, ours = self.begun("begins-once")
        ours.close(save=True)
        for expected in (1, 2):
            ours = self.ours(models, named, "begins-once")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.assertEqual(ours.attach(resume="begins-once/step-1", derive=True), expected)
            self.step(models, ours)
            ours.close()
        other = self.ours(models, named, "another")
        self.step(models, other)
        other.close()
        other = self.ours(models, named, "another")
        with self.assertRaises(ballast.FailedPreconditionError):
            other.attach(resume="begins-once/step-1", derive=True)
        for job in ("begins-once", "another"):
            self.client.close_job(job, force=True)

    def test_a_state_from_before_is_gone_on_from_beside_the_derived_job(self):
        models, named, ours = self.begun("from-before")
        state = copy.deepcopy(ours.state_dict())
        for end in (4, 6):
            ours.add_param_group({"params": named[end - 2:end]})
            self.step(models, ours)
        ours.close()
        again = self.ours(models, named[:2], "from-before")
        again.load_state_dict(state)
        self.assertEqual(again.param_groups[0]["job_step"], 1)
        self.step(models, again)
        again.close(job=True)

    def test_a_state_between_a_change_and_the_next_step(self):
        models, named, ours = self.begun("between")
        ours.add_param_group({"params": named[2:]})
        state = copy.deepcopy(ours.state_dict())
        ours.close()
        again = self.ours(models, [{"params": named[:2]}, {"params": named[2:]}], "between")
        again.load_state_dict(state)
        self.step(models, again)
        again.close(job=True)

    def test_others_in_the_place_of_parameters_are_named_beside_a_change(self):
        models, named, ours = self.begun("beside")
        ours.param_groups[0]["params"][0] = torch.nn.Parameter(torch.full((3, 3), 7.0))
        ours.add_param_group({"params": named[2:]})
        with self.assertRaises(ballast.FailedPreconditionError):
            self.step(models, ours)
        ours.attach()
        self.assertLess(ours.param_groups[0]["params"][0].max().item(), 2.0)
        ours.close(job=True)

    def test_what_has_nothing_in_common_is_refused(self):
        models = self.linears()
        ours = self.ours(models, list(models[0].named_parameters()), "in-common")
        self.step(models, ours)
        ours.close(save=True)
        ours = self.ours(models, list(models[1].named_parameters(prefix="module")), "in-common")
        with self.assertRaises(ballast.FailedPreconditionError):
            ours.attach(resume=True, derive=True)
        ours.close()

    # ------------------------------------------------------------ several ranks

    def test_several_ranks(self):
        kinds = [(False, {}), (False, {"overlap": True}), (True, {}),
                 (True, {"overlap": True, "overlap_weights": True})]
        ends = run_ranks("derived_ranks", 2, [
            ("like_torch", {"service": self.service.address, "job": f"ranks-{number}", "sharded": sharded, **options})
            for number, (sharded, options) in enumerate(kinds)])
        for kind, of_ranks in zip(kinds, ends):
            self.assertLess(max(of_ranks), TOLERANCE, kind)

    def test_ranks_that_do_not_change_alike_are_told(self):
        (told,) = run_ranks("derived_ranks", 2, [("one_does_not", {"service": self.service.address, "job": "not-alike"})])
        self.assertTrue(all(told), told)

    def test_ranks_go_on_after_a_derivation_that_failed(self):
        (steps,) = run_ranks("derived_ranks", 2, [("after_a_failure", {"service": self.service.address, "job": "failed"})])
        self.assertEqual(steps, [2, 2])


if __name__ == "__main__":
    unittest.main()
