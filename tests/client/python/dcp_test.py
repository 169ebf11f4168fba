#!/usr/bin/env python3
"""States of torch.optim that ballast.torch goes on from, and the other way round, by torch.distributed.checkpoint and
by state_dict(), in other param groups, too."""

import copy
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch_test import TOLERANCE, Model, batch, furthest, loss_of, names

import ballast.torch


def train(model, optimizer, begin, end):
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_of(model, batch(step), True).backward()
        optimizer.step()


def thirds(model, decay=0.1):
    """Three param groups, the last with none."""
    pairs = names(model)
    return [{"params": pairs[:2], "weight_decay": decay}, {"params": pairs[2:], "weight_decay": decay}]


class DcpTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)

    def straight(self, make=torch.optim.AdamW, dtype=torch.float32, **options):
        model = Model(dtype)
        train(model, make(names(model), lr=0.01, **options), 0, 6)
        return model

    def passed(self, before, after, first, second, options):
        """Three steps of the one, through a checkpoint, three of the other."""
        train(before, first, 0, 3)
        with tempfile.TemporaryDirectory() as folder:
            model, optimizer = get_state_dict(before, first, options=options)
            dcp.save({"app": {"model": model, "optim": optimizer}}, checkpoint_id=folder, no_dist=True)
            model, optimizer = get_state_dict(after, second, options=options)
            state = {"app": {"model": model, "optim": optimizer}}
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        set_state_dict(after, second, model_state_dict=state["app"]["model"], optim_state_dict=state["app"]["optim"],
                       options=options)
        self.assertEqual(second.param_groups[0]["lr"], 0.01)
        train(after, second, 3, 6)
        return after

    def test_a_state_of_torch_goes_on_here(self):
        for named in (True, False):
            for flat in (False, True):
                for dtype in (torch.float32, torch.bfloat16):
                    with self.subTest(named=named, flat=flat, dtype=dtype):
                        before, after = Model(dtype), Model(dtype)
                        parameters = names(before) if named else [parameter for _, parameter in names(before)]
                        mine = ballast.torch.AdamW(names(after), lr=0.5)
                        self.passed(before, after, torch.optim.AdamW(parameters, lr=0.01), mine,
                                    StateDictOptions(flatten_optimizer_state_dict=flat))
                        self.assertEqual(mine.state_dict()["state"][0]["step"], 6)
                        mine.close()
                        if dtype == torch.float32:
                            self.assertLess(furthest(after, self.straight()), TOLERANCE)
                        else:  # As ours begins with the masters that torch has: the weights in bf16.
                            self.assertLess(furthest(after, self.straight(dtype=dtype)), 0.02)

    def test_a_state_of_ours_goes_on_in_torch(self):
        for flat in (False, True):
            with self.subTest(flat=flat):
                before, after = Model(), Model()
                self.passed(before, after, ballast.torch.AdamW(names(before), lr=0.01),
                            torch.optim.AdamW(names(after), lr=0.5), StateDictOptions(flatten_optimizer_state_dict=flat))
                self.assertLess(furthest(after, self.straight()), TOLERANCE)

    def test_a_state_of_ours_goes_on_here(self):
        for flat in (False, True):
            with self.subTest(flat=flat):
                before, after = Model(), Model()
                self.passed(before, after, ballast.torch.AdamW(names(before), lr=0.01),
                            ballast.torch.AdamW(names(after), lr=0.5), StateDictOptions(flatten_optimizer_state_dict=flat))
                self.assertLess(furthest(after, self.straight()), TOLERANCE)

    def test_a_default_run_goes_on_from_its_state(self):
        before, after = Model(), Model()
        first = ballast.torch.AdamW(names(before), lr=0.01)
        train(before, first, 0, 3)
        state = copy.deepcopy((before.state_dict(), first.state_dict()))
        first.close()
        after.load_state_dict(state[0])
        second = ballast.torch.AdamW(names(after), lr=0.5)
        second.load_state_dict(state[1])
        train(after, second, 3, 6)
        self.assertLess(furthest(after, self.straight()), TOLERANCE)

    def test_a_state_of_no_update_goes_on(self):
        """As one that was saved after attach(create=True), or a first step that was skipped."""
        for skips in (False, True):
            with self.subTest(skips=skips):
                before, after = Model(), Model()
                after.load_state_dict(before.state_dict())
                first = ballast.torch.AdamW(names(before), lr=0.01)
                first.attach(create=True)
                if skips:
                    before.scalar.grad = torch.full_like(before.scalar, torch.inf)
                    with self.assertWarnsRegex(UserWarning, "step 1 changed nothing"):
                        first.step()
                second = ballast.torch.AdamW(names(after), lr=0.5)
                second.load_state_dict(first.state_dict())
                first.close()
                train(after, second, 0, 6)
                self.assertLess(furthest(after, self.straight()), TOLERANCE)

    def test_a_state_of_the_same_names_in_other_places(self):
        def swapped(model):
            pairs = names(model)
            return [{"params": pairs[3:]}, {"params": pairs[:3]}]

        before = Model()
        first = torch.optim.AdamW([{"params": names(before)[:3]}, {"params": names(before)[3:]}], lr=0.01)
        train(before, first, 0, 3)
        after = copy.deepcopy(before)
        second = ballast.torch.AdamW(swapped(after), lr=0.01)
        second.load_state_dict(first.state_dict())
        train(after, second, 3, 6)
        self.assertLess(furthest(after, self.straight()), TOLERANCE)

    def test_entries_of_others_are_still_missed(self):
        before = Model()
        train(before, ballast.torch.AdamW(names(before), lr=0.01), 0, 1)
        ballast.torch.AdamW(names(before)).state_dict()
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"optimizer": {"state": {"w": {"exp_avg": torch.zeros(2)}}}}, checkpoint_id=folder, no_dist=True)
            with self.assertRaisesRegex(dcp.api.CheckpointException, "(?s)Missing key.*optimizer.state.w.master"):
                dcp.load({"optimizer": {"state": {"w": {"exp_avg": torch.ones(2), "master": torch.ones(2)}}}},
                         checkpoint_id=folder, no_dist=True)

    def test_a_state_of_other_groups(self):
        """By name; one without names in the same groups but for empty ones."""
        cases = (
            (lambda model: thirds(model), lambda model: names(model)),
            (lambda model: names(model), lambda model: thirds(model)),
            (lambda model: [{"params": [p for _, p in names(model)]}, {"params": []}], lambda model: names(model)))
        for of_torch, of_ours in cases:
            with self.subTest():
                before = Model()
                first = torch.optim.AdamW(of_torch(before), lr=0.01, weight_decay=0.1)
                train(before, first, 0, 3)
                after = copy.deepcopy(before)
                second = ballast.torch.AdamW(of_ours(after), lr=0.5, weight_decay=0.1)
                second.load_state_dict(first.state_dict())
                for group in second.param_groups:
                    group["lr"] = 0.01
                train(after, second, 3, 6)
                self.assertLess(furthest(after, self.straight(weight_decay=0.1)), TOLERANCE)


if __name__ == "__main__":
    unittest.main()
