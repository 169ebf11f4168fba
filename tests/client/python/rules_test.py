#!/usr/bin/env python3
"""The rules beside Adam's, alone and in one optimizer, against torch.optim, or where that has none the formula."""

import copy
import math
import pathlib
import re
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp
from ranks_for_tests import RanksTest
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch_test import TOLERANCE, Model, batch, furthest, loss_of, names

import ballast
import ballast.torch
from ballast import _native, rules, session
from messages import refused

STEPS = 30
HEADER = pathlib.Path(__file__).resolve().parents[3] / "client/ballast.h"
# One of each rule: five param groups of one optimizer, with what a group gives, in the order of _parts.
RULES = [{"lr": 0.01}, {"rule": "sgd", "momentum": 0.9, "lr": 0.05}, {"rule": "lion", "weight_decay": 0.1},
         {"rule": "adagrad", "initial_accumulator_value": 0.1}, {"rule": "signsgd"}]


class Lion(torch.optim.Optimizer):
    """As in its paper, algorithm 2."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = -p.grad if group["maximize"] else p.grad
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (m * beta1 + g * (1 - beta1)).sign())
                m.mul_(beta2).add_(g * (1 - beta2))


class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, weight_decay=0.0, maximize=False):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, maximize=maximize))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    sign = -p.grad.sign() if group["maximize"] else p.grad.sign()
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * sign)


REFERENCES = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Lion": Lion, "Adagrad": torch.optim.Adagrad,
              "SignSGD": SignSGD}


def parts(model):
    """A group's parameters for each of RULES."""
    pairs = names(model)
    return [pairs[number::len(RULES)] for number in range(len(RULES))]


def groups(model):
    return [{"params": pairs, **rule} for pairs, rule in zip(parts(model), RULES)]


def references(model):
    """Five optimizers of torch that do the same."""
    return [reference(pairs, **{name: value for name, value in rule.items() if name != "rule"})
            for reference, pairs, rule in zip(REFERENCES.values(), parts(model), RULES)]


def train(model, optimizer, begin, end, seldom=lambda step: True):
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_of(model, batch(step), seldom(step)).backward()
        optimizer.step()


def train_both(ours, mine, theirs, reference, begin, end, seldom=lambda step: True, max_norm=None):
    """Both with the gradients of theirs."""
    for step in range(begin, end):
        theirs.zero_grad()
        loss_of(theirs, batch(step), seldom(step)).backward()
        for (_, p), (_, q) in zip(names(ours), names(theirs)):
            p.grad = None if q.grad is None else q.grad.clone()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        for optimizer in (mine, *(reference if isinstance(reference, list) else [reference])):
            optimizer.step()


def models_of_every_mode(make_optimizer, seldom=lambda step: True):
    """Trained alike. make_optimizer(model, job, **options): the optimizer of a mode."""
    models = []
    for number, options in enumerate(({}, dict(update="speculate"), dict(overlap=True, overlap_weights=True),
                                      dict(overlap=True, accumulation_steps=1), dict(keep_previous=True))):
        model = Model()
        mine = make_optimizer(model, str(number), max_norm=0.5, **options)
        train(model, mine, 0, 4, seldom)
        if "keep_previous" in options:
            train(model, mine, 40, 41, seldom)
            assert mine.undo_step() == 4
        train(model, mine, 4, 6, seldom)
        mine.wait_for_weights()
        models.append(model)
    return models


class RulesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.service = ballast.Service(memory_limit="1GiB", checkpoint_dir=cls.folder)
        cls.addClassCleanup(cls.service.stop)

    def optimizer(self, kind, params, job="", **options):
        optimizer = getattr(ballast.torch, kind)(
            params, **{"service": self.service.address, "job": self.id().rpartition(".")[2] + job, **options})
        self.addCleanup(optimizer.close)
        return optimizer

    def same(self, ours, theirs):
        """To so much of the largest weight."""
        far, largest = (max(tensor.abs().max().item() for tensor in tensors) for tensors in (
            [p.detach() - q.detach() for p, q in zip(ours.parameters(), theirs.parameters())], list(theirs.parameters())))
        self.assertLess(far, TOLERANCE * largest)

    def same_bits(self, ours, theirs):
        self.assertEqual(furthest(ours, theirs), 0)

    # ------------------------------------------------------------ the same trajectory

    def test_equals_its_reference_with_every_option(self):
        cases = [("SGD", dict(lr=0.1)), ("SGD", dict(momentum=0.9, weight_decay=0.1, maximize=True)),
                 ("SGD", dict(momentum=0.9, dampening=0.5)),
                 ("SGD", dict(momentum=0.9, nesterov=True, weight_decay=0.1)), ("Adagrad", dict(lr_decay=0.1)),
                 ("Adagrad", dict(weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-3, maximize=True)),
                 ("Lion", dict()), ("Lion", dict(lr=0.003, betas=(0.8, 0.95), weight_decay=0.3, maximize=True)),
                 ("SignSGD", dict()), ("SignSGD", dict(lr=0.003, weight_decay=0.3, maximize=True))]
        for number, (kind, options) in enumerate(cases):
            with self.subTest(kind=kind, **options):
                ours, theirs = Model(), Model()
                mine = self.optimizer(kind, names(ours), str(number), **options)
                train_both(ours, mine, theirs, REFERENCES[kind](names(theirs), **options), 0, STEPS,
                           seldom=lambda step: step % 3 == 1)
                self.same(ours, theirs)

    def test_one_optimizer_has_groups_of_all_rules(self):
        ours, theirs = Model(), Model()
        mine, reference = self.optimizer("AdamW", groups(ours), max_norm=0.5), references(theirs)
        train_both(ours, mine, theirs, reference, 0, 10, max_norm=0.5)
        self.same(ours, theirs)
        self.assertLess(mine.clip_coefficient, 1)
        self.assertEqual([group["lr"] for group in mine.param_groups], [0.01, 0.05, 1e-4, 1e-2, 1e-3])
        self.assertEqual([sorted(mine.state[group["params"][0]]) for group in mine.param_groups],
                         [["exp_avg", "exp_avg_sq", "step"], ["momentum_buffer", "step"], ["exp_avg", "step"],
                          ["step", "sum"], ["step"]])
        # Values change: by a scheduler, and by hand.
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (mine, *reference)]
        for optimizer, number in ((mine, 1), (reference[1], 0)):
            optimizer.param_groups[number].update(momentum=0.5, dampening=0.2)
        for step in range(10, 13):
            train_both(ours, mine, theirs, reference, step, step + 1, max_norm=0.5)
            for scheduler in schedulers:
                scheduler.step()
        self.same(ours, theirs)
        # A group more, of a rule that another optimizer has.
        for model, optimizer in ((ours, mine), (theirs, reference[1])):
            model.more = torch.nn.Parameter(torch.ones(3))
            rule = {"rule": "sgd"} if optimizer is mine else {"dampening": 0.0}
            optimizer.add_param_group({"params": [("more", model.more)], "lr": 0.1, "momentum": 0.9, **rule})
            model.zero_grad()
            model.more.grad = torch.full((3,), 2.0)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for optimizer in (mine, *reference):
            optimizer.step()
        self.same(ours, theirs)
        self.assertEqual(mine.param_groups[-1]["dampening"], 0)

    def test_a_group_has_the_defaults_of_the_rule_that_it_names(self):
        one, two, three = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        mine = self.optimizer("SGD", [{"params": [("one", one)]}, {"params": [("two", two)], "rule": "adam"},
                                      {"params": [("three", three)], "rule": "sgd"}], lr=0.3, weight_decay=0.2)
        self.assertEqual([(group["lr"], group["weight_decay"]) for group in mine.param_groups],
                         [(0.3, 0.2), (1e-3, 1e-2), (0.3, 0.2)])
        self.assertTrue(mine.param_groups[1]["decoupled_weight_decay"])
        self.assertNotIn("momentum", mine.param_groups[1])

    def test_the_tables_are_those_of_the_header(self):
        header = HEADER.read_text()

        def numbers(enum):
            inside = re.search(rf"typedef enum {enum} {{(.*?)}}", header, re.DOTALL)[1]
            return {name: int(number) for name, number in re.findall(r"BALLAST_(\w+) = (\d+)", inside)}

        self.assertEqual({name.lower(): number for name, number in numbers("ballast_plane").items()}, session.PLANES)
        of_rule = numbers("ballast_rule")
        self.assertEqual({name.lower().replace("_", ""): number for name, number in of_rule.items()},
                         {name: rule.number for name, rule in rules.RULES.items()})
        given = {name: [each.strip() for each in values.split(",")] for name, values in re.findall(
            r"#define BALLAST_(\w+)_DEFAULTS\s*{(.*?)}", header.replace("\\\n", "\n"), re.DOTALL)}
        self.assertEqual(given.keys(), {*of_rule, "ADAMW"})
        fields = [name for name, _ in _native.HyperParameters._fields_]
        for name in given.keys() - {"ADAM"}:
            rule = "adam" if name == "ADAMW" else name.lower().replace("_", "")
            self.assertEqual(len(given[name]), len(fields))
            values = dict(zip(fields, given[name]))
            self.assertEqual(values.pop("rule"), "BALLAST_ADAM" if name == "ADAMW" else f"BALLAST_{name}")
            self.assertEqual({field: float(value) for field, value in values.items()},
                             dict.fromkeys(values, 0) | ballast.HyperParameters(rule=rule).fields(), name)

    # ------------------------------------------------------------ as with AdamW

    def test_every_mode_has_the_same_bits(self):
        models = models_of_every_mode(
            lambda model, job, **options: self.optimizer("AdamW", groups(model), job, **options))
        for model in models[1:]:
            self.same_bits(model, models[0])

    def test_it_goes_on_where_it_was_saved(self):
        straight, model, again = Model(), Model(), Model()
        mine = self.optimizer("AdamW", groups(straight), "straight")
        train(straight, mine, 0, 4)
        mine = self.optimizer("AdamW", groups(model))
        train(model, mine, 0, 2)
        mine.close(save=True)
        mine = self.optimizer("AdamW", groups(again))
        self.assertEqual(mine.attach(resume=True), 2)
        train(again, mine, 2, 4)
        self.same_bits(again, straight)

    def test_scaled_gradients(self):
        ours, theirs = Model(), Model()
        mine, reference = self.optimizer("SGD", names(ours), momentum=0.9), torch.optim.SGD(names(theirs), momentum=0.9)
        for model, optimizer in ((ours, mine), (theirs, reference)):
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, batch(step))).backward()
                if step == 1:
                    model.scalar.grad.fill_(torch.inf)
                scaler.step(optimizer)
                scaler.update()
        self.same(ours, theirs)

    def test_state_that_the_trainer_writes(self):
        model = Model()
        mine = self.optimizer("Adagrad", names(model), initial_accumulator_value=0.25)
        train(model, mine, 0, 2, seldom=lambda step: False)
        self.assertTrue(torch.equal(mine.state[model.seldom]["sum"], torch.full((5,), 0.25)))
        mine.state[model.scalar].clear()
        mine.state[model.norm.bias]["sum"].fill_(4.0)
        mine.zero_grad()
        model.seldom.grad = torch.zeros(5)
        mine.step()
        self.assertEqual(mine.state[model.scalar]["sum"], 0.25)
        self.assertTrue(torch.equal(mine.state[model.norm.bias]["sum"], torch.full((20,), 4.0)))

    def test_a_momentum_that_the_trainer_resets(self):
        """The next update is a first one, which dampening does not change."""
        ours, theirs, options = Model(), Model(), dict(lr=0.1, momentum=0.9, dampening=0.5)
        mine, reference = self.optimizer("SGD", names(ours), **options), torch.optim.SGD(names(theirs), **options)
        train_both(ours, mine, theirs, reference, 0, 2)
        for model, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.state[model.norm.bias]["momentum_buffer"].fill_(4.0)
            optimizer.state[model.norm.bias]["momentum_buffer"] = None
            optimizer.state[model.scalar] = {"momentum_buffer": None}
        train_both(ours, mine, theirs, reference, 2, 5)
        self.same(ours, theirs)
        self.assertEqual([mine.state[each]["step"] for each in (ours.scalar, ours.norm.weight)], [3, 5])

    # ------------------------------------------------------------ states

    def passed(self, kind, options, whose, by_dcp):
        """Three steps with the one optimizer, three with the other, as six with torch's. whose: "ours" or "torch"."""
        straight, before, after = Model(), Model(), Model()
        train(straight, REFERENCES[kind](names(straight), **options), 0, 6, seldom=lambda step: step > 3)
        first, second = (
            REFERENCES[kind](names(side), **options) if each == "torch" else
            self.optimizer(kind, names(side), f"{number}", full_state=True, **options)
            for number, (each, side) in enumerate(zip(whose, (before, after))))
        train(before, first, 0, 3, seldom=lambda step: False)
        if by_dcp:
            with tempfile.TemporaryDirectory() as folder:
                dcp.save(dict(zip("mo", get_state_dict(before, first))), checkpoint_id=folder, no_dist=True)
                getattr(first, "close", lambda job: None)(job=True)
                state = dict(zip("mo", get_state_dict(after, second)))
                dcp.load(state, checkpoint_id=folder, no_dist=True)
            set_state_dict(after, second, model_state_dict=state["m"], optim_state_dict=state["o"])
        else:
            state = copy.deepcopy(first.state_dict())
            getattr(first, "close", lambda job: None)(job=True)
            after.load_state_dict(before.state_dict())
            second.load_state_dict(state)
        train(after, second, 3, 6, seldom=lambda step: step > 3)
        self.same(after, straight)
        getattr(second, "close", lambda job: None)(job=True)

    def test_a_state_goes_on_here_and_in_torch(self):
        for kind, options in (("SGD", dict(lr=0.1)), ("SGD", dict(lr=0.1, momentum=0.9, dampening=0.5)),
                              ("Adagrad", dict(lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1)),
                              ("Lion", dict(weight_decay=0.1)), ("SignSGD", dict(lr=0.002))):
            for whose in (("torch", "ours"), ("ours", "torch"), ("ours", "ours")):
                # By DCP a buffer is zeros before a first update, where dampening makes a difference.
                for by_dcp in (False, True) if kind in ("SGD", "Adagrad") and "dampening" not in options else (False,):
                    with self.subTest(kind=kind, whose=whose, by_dcp=by_dcp, **options):
                        self.passed(kind, options, whose, by_dcp)

    def test_a_state_of_all_rules_goes_on(self):
        straight, model, again = Model(), Model(), Model()
        train(straight, self.optimizer("AdamW", groups(straight), "straight"), 0, 4)
        mine = self.optimizer("AdamW", groups(model), "before", full_state=True)
        train(model, mine, 0, 2)
        state = copy.deepcopy(mine.state_dict())
        again.load_state_dict(model.state_dict())
        mine.close(job=True)
        mine = self.optimizer("AdamW", groups(again), "after", full_state=True)
        mine.load_state_dict(state)
        train(again, mine, 2, 4)
        self.same_bits(again, straight)
        mine.load_state_dict(state)  # An early state, into the job.
        again.load_state_dict(model.state_dict())
        mine.send_weights()
        train(again, mine, 2, 4)
        self.same_bits(again, straight)

    def test_checkpoints(self):
        for kind, options in (("SGD", dict(lr=0.1, momentum=0.9, nesterov=True)), ("SGD", dict(lr=0.1)),
                              ("Adagrad", dict(lr=0.1, initial_accumulator_value=0.1)), ("Lion", dict(weight_decay=0.1))):
            with self.subTest(kind=kind, **options):
                name = f"{kind}{len(options)}"
                theirs, ours, again = Model(), Model(), Model()
                reference = REFERENCES[kind](names(theirs), **options)
                train(theirs, reference, 0, 3, seldom=lambda step: False)
                mine = self.optimizer(kind, names(ours), job=name, **options)
                mine._options.job = name
                ballast.torch.to_checkpoint(self.folder / name, mine, theirs.state_dict(), reference.state_dict())
                mine.attach(resume=True)
                train(ours, mine, 3, 5)
                mine.close(save=True)
                reference = REFERENCES[kind](names(again))
                weights, state = ballast.torch.from_checkpoint(self.folder / name, reference)
                again.load_state_dict(weights, strict=False)
                reference.load_state_dict(state)
                train(again, reference, 5, 7)
                straight = Model()
                reference = REFERENCES[kind](names(straight), **options)
                train(straight, reference, 0, 3, seldom=lambda step: False)
                train(straight, reference, 3, 7)
                self.same(again, straight)

    def test_a_full_state_before_the_first_update_begins_a_job(self):
        model = Model()
        mine = self.optimizer("SGD", names(model), service=None, momentum=0.9)
        mine.attach(create=True)
        state = copy.deepcopy(mine.state_dict())
        mine.close()
        mine = self.optimizer("SGD", names(model), service=None, momentum=0.9)
        mine.load_state_dict(state)
        train(model, mine, 0, 1)
        self.assertEqual(mine.param_groups[0]["job_step"], 1)

    def test_an_optimizer_whose_groups_name_no_rule(self):
        """It was pickled before there were rules."""
        for kind, rule in (("AdamW", "adam"), ("Adam", "adam"), ("SGD", "sgd")):
            mine = getattr(ballast.torch, kind)(names(Model()), lr=0.5)
            state = mine.__getstate__()
            for values in (state["defaults"], *state["param_groups"]):
                del values["rule"]
            again = copy.deepcopy(mine)
            again.add_param_group({"params": [("more", torch.nn.Parameter(torch.ones(2)))]})
            for group in again.param_groups:
                self.assertEqual((group["rule"], group["lr"]), (rule, 0.5))

    def test_a_checkpoint_of_all_rules(self):
        model, again = Model(), Model()
        mine = self.optimizer("AdamW", groups(model))
        train(model, mine, 0, 2)
        name = mine._options.job
        mine.close(save=True)
        client = ballast.connect(self.service.address)
        self.assertEqual([found["problem"] for found in client.verify(name)], [""])
        mine = self.optimizer("AdamW", groups(again), "again")
        weights, state = ballast.torch.from_checkpoint(self.folder / name, mine)
        ballast.torch.to_checkpoint(self.folder / f"{name}again", mine, weights, state)
        self.assertEqual([found["problem"] for found in client.verify(f"{name}again")], [""])
        self.assertEqual(mine.attach(resume=True), 2)
        straight = Model()
        train(again, mine, 2, 4)
        train(straight, self.optimizer("AdamW", groups(straight), "straight"), 0, 4)
        self.same_bits(again, straight)

    def test_a_checkpoint_of_dcp_without_counts(self):
        """It is whole for a rule that does not count."""
        for kind, options in (("SGD", {"momentum": 0.9}), ("AdamW", {})):
            with self.subTest(kind=kind), tempfile.TemporaryDirectory() as folder:
                theirs, ours = Model(), Model()
                reference = REFERENCES[kind](names(theirs), **options)
                train(theirs, reference, 0, 3)
                model, state = get_state_dict(theirs, reference)
                for values in state["state"].values():
                    values.pop("step", None)
                dcp.save({"m": model, "o": state}, checkpoint_id=folder, no_dist=True)
                mine = self.optimizer(kind, names(ours), full_state=True, **options)
                state = dict(zip("mo", get_state_dict(ours, mine)))
                if kind == "AdamW":
                    with self.assertRaisesRegex(dcp.api.CheckpointException, r"Missing key.*step"):
                        dcp.load(state, checkpoint_id=folder, no_dist=True)
                    continue
                dcp.load(state, checkpoint_id=folder, no_dist=True)
                set_state_dict(ours, mine, model_state_dict=state["m"], optim_state_dict=state["o"])
                train_both(ours, mine, theirs, reference, 3, 5)
                self.same(ours, theirs)

    # ------------------------------------------------------------ errors

    def test_what_is_refused(self):
        def group(**values):
            return [{"params": [("w", torch.nn.Parameter(torch.ones(2)))], **values}]

        for kind, values, options in (
                ("AdamW", {"rule": "rmsprop"}, {}), ("AdamW", {"rule": "sgd", "betas": (0.9, 0.9)}, {}),
                ("SGD", {}, {"momentum": 0.9, "nesterov": True, "dampening": 0.1}), ("SGD", {}, {"lr": -1}),
                ("Lion", {}, {"betas": (0.9, 1.0)}), ("Lion", {}, {"weight_decay": -0.1}), ("SignSGD", {}, {"lr": -1}),
                ("Adagrad", {}, {"initial_accumulator_value": -1}), ("Adagrad", {}, {"eps": -1}),
                ("SignSGD", {}, {"differentiable": True})):
            with self.subTest(kind=kind, **values, **options), refused(self, ValueError):
                getattr(ballast.torch, kind)(group(**values), **options)
        with refused(self, TypeError):
            ballast.torch.SGD(group(), servce="host:7070")
        with refused(self, ValueError):
            ballast.HyperParameters(rule="sgd", eps=1e-8)
        for kind in ("SGD", "Adagrad", "Lion", "SignSGD"):
            getattr(ballast.torch, kind)(group(), foreach=True)
            with self.assertRaises(RuntimeError):
                getattr(ballast.torch, kind)(group(), foreach=True, fused=True)

    def test_what_cannot_change(self):
        model = Model()
        mine = self.optimizer("AdamW", groups(model))
        train(model, mine, 0, 1)
        for number, name, value in ((1, "momentum", 0.0), (1, "rule", "signsgd"), (3, "initial_accumulator_value", 1.0)):
            then = mine.param_groups[number][name]
            mine.param_groups[number][name] = value
            with refused(self, RuntimeError):
                train(model, mine, 1, 2)
            mine.param_groups[number][name] = then
        for name, value in (("dampening", math.inf), ("momentum", -0.1)):
            then = mine.param_groups[1][name]
            mine.param_groups[1][name] = value
            with refused(self, ValueError):
                train(model, mine, 1, 2)
            mine.param_groups[1][name] = then
        train(model, mine, 1, 2)

    def test_states_of_other_rules(self):
        theirs = Model()
        states = {}
        for kind in ("AdamW", "SGD", "Adagrad"):
            reference = REFERENCES[kind](names(theirs), **({"momentum": 0.9} if kind == "SGD" else {}))
            train(theirs, reference, 0, 1)
            states[kind] = reference.state_dict()
        model = Model()
        for kind in ("AdamW", "SGD", "Adagrad", "Lion", "SignSGD"):
            mine = getattr(ballast.torch, kind)(names(model), service=self.service.address, job="none")
            for other, state in states.items():
                if other != kind:
                    with self.subTest(kind=kind, other=other), refused(self, ballast.InvalidArgumentError):
                        mine.load_state_dict(copy.deepcopy(state))
        for kind in ("AdamW", "Adagrad"):  # Their updates count.
            state = copy.deepcopy(states[kind])
            for values in state["state"].values():
                del values["step"]
            mine = getattr(ballast.torch, kind)(names(model), service=self.service.address, job="none")
            with refused(self, ballast.FailedPreconditionError):
                mine.load_state_dict(state)
            with refused(self, ballast.FailedPreconditionError):
                ballast.torch.to_checkpoint(self.folder / "none", mine, theirs.state_dict(), state)
        pairs = names(model)
        for first, second in (("adam", "lion"), ("sgd", "adagrad")):
            two = ballast.torch.AdamW([{"params": pairs[:1], "rule": first}, {"params": pairs[1:], "rule": second}])
            for merged in (first, second):
                mine = ballast.torch.AdamW([{"params": pairs, "rule": merged}], service=self.service.address, job="none")
                with self.subTest(first=first, second=second, merged=merged), refused(self, ballast.InvalidArgumentError):
                    mine.load_state_dict(two.state_dict())
        mixed = ballast.torch.AdamW(groups(model), service=self.service.address, job="none")
        state = mixed.state_dict()
        state["param_groups"][1] = {**state["param_groups"][2], "params": state["param_groups"][1]["params"]}
        with refused(self, ballast.InvalidArgumentError):
            mixed.load_state_dict(state)
        with refused(self, ballast.InvalidArgumentError):
            ballast.torch.to_checkpoint(self.folder / "none", ballast.torch.SGD(names(model)), theirs.state_dict(),
                                        states["AdamW"])


class RulesRanksTest(RanksTest):
    MODULE = "fsdp_ranks"

    def test_the_same_bits_with_any_sharding(self):
        digests = [digest for world_size in (1, 2) for of_case in self.ranks(
            world_size, *[("digest_with_given_gradients", {"kind": kind, "rules": RULES}) for kind in ("sharded", "whole")])
            for digest in of_case]
        self.assertEqual(len(digests), 6)
        self.assertEqual(len(set(digests)), 1, digests)


if __name__ == "__main__":
    unittest.main()
