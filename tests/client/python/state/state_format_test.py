#!/usr/bin/env python3
"""State in fewer bytes: state="8bit" and "bf16" of an optimizer, and of param groups."""

import pathlib
import sys
import tempfile
import unittest

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import ranks_for_tests  # noqa: E402, F401  It makes the package and the tests' support known.

import ballast  # noqa: E402
import ballast.torch  # noqa: E402
from messages import refused  # noqa: E402

STEPS = 40


def model_of(seed=3):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))


def train(model, optimizer, begin, end):
    """Learns a fixed map. Returns the last loss."""
    for step in range(begin, end):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.roll(1, dims=1).sin()).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


class StateFormatTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="ballast-state-")
        cls.addClassCleanup(folder.cleanup)
        cls.saved = pathlib.Path(folder.name)
        cls.service = ballast.Service(memory_limit="256MiB", threads=1, checkpoint_dir=cls.saved)
        cls.addClassCleanup(cls.service.stop)
        cls.client = ballast.connect(cls.service.address)

    def optimizer(self, model, job, kind="AdamW", **options):
        return getattr(ballast.torch, kind)(model.named_parameters(), service=self.service.address, job=job,
                                            **({"lr": 1e-2} | options))

    def test_training_goes_as_in_torch(self):
        for state, kind, options in (("8bit", "AdamW", {}), ("8bit", "AdamW", {"betas": (0.9, 0.95)}),
                                     ("bf16", "AdamW", {"betas": (0.9, 0.95)}), ("bf16", "SGD", {"momentum": 0.9, "lr": 0.5}),
                                     ("bf16", "Adagrad", {})):
            with self.subTest(state=state, kind=kind, **options):
                ours, theirs = model_of(), model_of()
                job = f"as-torch-{state}-{kind}-{len(options)}"
                mine = self.optimizer(ours, job, kind, state=state, **options)
                first = train(ours, mine, 0, 1)
                here = train(ours, mine, 1, STEPS)
                reference = getattr(torch.optim, kind)(theirs.parameters(), **({"lr": 1e-2} | options))
                there = train(theirs, reference, 0, STEPS)
                self.assertLess(abs(here - there), 0.02 * (first - there))
                (group,) = self.client.job(job)["groups"]
                self.assertEqual(group["state"], f"STATE_{state.upper()}")

    def test_every_mode_has_the_same_bits(self):
        weights = []
        for number, options in enumerate(({}, dict(update="speculate"), dict(overlap=True, overlap_weights=True),
                                          dict(keep_previous=True))):
            model = model_of()
            mine = self.optimizer(model, f"mode-{number}", state="8bit", max_norm=0.1, **options)
            train(model, mine, 0, 4)
            if "keep_previous" in options:
                train(model, mine, 50, 51)
                self.assertEqual(mine.undo_step(), 4)
            train(model, mine, 4, 6)
            mine.wait_for_weights()
            weights.append([parameter.detach().clone() for parameter in model.parameters()])
        for others in weights[1:]:
            self.assertTrue(all(map(torch.equal, weights[0], others)))

    def test_a_checkpoint_has_the_values_of_the_service(self):
        for state in ("8bit", "bf16"):
            with self.subTest(state=state):
                model, job = model_of(), f"saved-{state}"
                mine = self.optimizer(model, job, state=state, betas=(0.9, 0.95), full_state=True)
                train(model, mine, 0, 5)
                self.client.save(job)
                reference = torch.optim.AdamW(model.named_parameters())
                weights, moments = ballast.torch.from_checkpoint(self.saved / job, reference)
                of_service = mine.state_dict()["state"]
                for number, (name, parameter) in enumerate(model.named_parameters()):
                    self.assertTrue(torch.equal(weights[name], parameter), name)
                    for plane in ("exp_avg", "exp_avg_sq"):
                        self.assertTrue(torch.equal(moments["state"][number][plane], of_service[number][plane]),
                                        f"{plane} of {name}")
                self.assertGreater(of_service[0]["exp_avg_sq"].abs().max(), 0)
                sizes = {path.name: path.stat().st_size for path in (self.saved / job).glob("step-*/*.safetensors")}
                self.assertIn("master_remainder.safetensors", sizes)
                self.assertLess(sizes["exp_avg.safetensors"], 2 * 16384 * (1 if state == "8bit" else 2))

    def test_state_of_another_format_is_loaded_only_when_asked(self):
        model = model_of()
        train(model, self.optimizer(model, "source", state="8bit"), 0, 3)
        self.client.save("source")
        before = [parameter.detach().clone() for parameter in model.parameters()]
        other = model_of(seed=4)
        target = self.optimizer(other, "target")
        train(other, target, 0, 1)
        with refused(self, ballast.FailedPreconditionError):
            self.client.load("target", "source")
        self.client.load("target", "source", convert_state=True)
        target.attach()
        for one, two in zip(before, other.parameters()):
            self.assertTrue(torch.equal(one, two))

    def test_a_resume_converts_what_may_have_fallen_back(self):
        model = model_of()
        train(model, self.optimizer(model, "all-fp32"), 0, 3)
        self.client.save("all-fp32")
        for job, fallback in (("strict", False), ("resumed", True)):
            again = model_of(seed=4)
            mine = self.optimizer(again, job, state="8bit", state_fallback=fallback)
            if not fallback:
                with refused(self, ballast.FailedPreconditionError):
                    mine.attach(resume="all-fp32")
                continue
            self.assertEqual(mine.attach(resume="all-fp32"), 3)
            for one, two in zip(model.parameters(), again.parameters()):
                self.assertTrue(torch.equal(one, two))

    def test_a_state_dict_goes_from_one_format_to_the_other(self):
        model = model_of()
        exact = self.optimizer(model, "exact", full_state=True)
        train(model, exact, 0, 5)
        again = model_of()
        again.load_state_dict(model.state_dict())
        packed = self.optimizer(again, "packed", state="8bit", full_state=True)
        packed.load_state_dict(exact.state_dict())
        self.assertEqual(packed.param_groups[0]["state"], "8bit")
        train(again, packed, 5, 6)
        train(model, exact, 5, 6)
        moment, expected = (optimizer.state_dict()["state"][0]["exp_avg"] for optimizer in (packed, exact))
        self.assertLess((moment - expected).abs().max(), expected.abs().max() / 8)
        self.assertFalse(torch.equal(moment, expected))

    def test_groups_have_their_own(self):
        model = model_of()
        named = list(model.named_parameters())
        mine = ballast.torch.AdamW([{"params": named[:2], "state": "8bit"}, {"params": named[2:3], "rule": "muon"},
                                    {"params": named[3:]}], service=self.service.address, job="groups")
        train(model, mine, 0, 1)
        self.assertEqual([group["state"] for group in self.client.job("groups")["groups"]],
                         ["STATE_8BIT", "STATE_FP32", "STATE_FP32"])

    def test_what_a_rule_does_not_have_is_refused(self):
        model = model_of()
        for kind, options in (("AdamW", dict(state="bf16")), ("AdamW", dict(state="8bit", amsgrad=True)),
                              ("Lion", dict(state="8bit")), ("AdamW", dict(state="4bit"))):
            with self.subTest(kind=kind, **options):
                with refused(self, ValueError):
                    self.optimizer(model, "refused", kind, **options)
        mine = self.optimizer(model, "changed", state="bf16", betas=(0.9, 0.95))
        train(model, mine, 0, 1)
        mine.param_groups[0]["betas"] = (0.9, 0.999)
        with refused(self, ValueError):
            train(model, mine, 1, 2)
        mine.param_groups[0].update(betas=(0.9, 0.95), state="fp32")
        with refused(self, RuntimeError):
            train(model, mine, 1, 2)


if __name__ == "__main__":
    unittest.main()
