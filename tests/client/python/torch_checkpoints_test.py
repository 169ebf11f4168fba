#!/usr/bin/env python3
"""ballast.torch: trainers and services that die and go on from what was saved, and files of torch and Hugging Face."""

import contextlib
import copy
import gc
import io
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import threading
import unittest
import warnings
import weakref
import zlib
from unittest import mock

from ranks_for_tests import ROOT, run_ranks  # Which also lets ballast be found.

import safetensors.torch
import torch

import ballast.torch
from ballast import _native
from ballast.torch import checkpoints
from ballast.torch.callbacks import releasing

sys.path.insert(0, str(ROOT / "tests/support"))
from messages import refused  # noqa: E402
from processes import PATIENCE, Service, await_, written_to_stderr  # noqa: E402


def new_model():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3, bias=False))


def train(model, optimizer, steps):
    """Steps by their numbers, each with its own batch."""
    for step in steps:
        batch = torch.Generator().manual_seed(step)
        loss = model(torch.rand(5, 4, generator=batch)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def await_checkpoint(service, job, step):
    client = ballast.connect(service.address)
    await_(f"the checkpoint of step {step}", lambda: step in [found["step"] for found in _saved(client, job)])


def _saved(client, job):
    try:
        return client.checkpoints(job)
    except ballast.BallastError:
        return []


class Code:
    """What a file must not make happen."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class CheckpointsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.saved = self.folder / "saved"
        warnings.simplefilter("error")
        self.addCleanup(warnings.resetwarnings)

    def service(self, **options):
        service = ballast.Service(memory_limit="256MiB", threads=1, checkpoint_dir=self.saved, **options)
        self.addCleanup(service.stop)
        return service

    def optimizer(self, model, service, job="gpt", **options):
        optimizer = ballast.torch.AdamW(model.named_parameters(), lr=0.02, service=service.address, job=job, **options)
        self.addCleanup(optimizer.close)
        return optimizer

    def weights(self, model):
        return {name: tensor.tolist() for name, tensor in model.state_dict().items()}

    def undisturbed(self, service, steps):
        model = new_model()
        optimizer = self.optimizer(model, service, job="undisturbed")
        train(model, optimizer, steps)
        optimizer.close()
        return self.weights(model)

    def test_a_trainer_goes_on_from_its_last_state_whatever_became_of_the_job(self):
        service = self.service(checkpoint_keep=1)
        expected = self.undisturbed(service, range(8))
        model = new_model()
        optimizer = self.optimizer(model, service)
        train(model, optimizer, range(3))
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.state_dict()  # Once for a step.
        train(model, optimizer, range(3, 5))  # The trainer dies after these.
        optimizer.close()
        await_checkpoint(service, "gpt", 3)
        await_("the hint", (self.saved / "gpt/latest").exists)  # Which comes after what it names.
        self.assertEqual(len(os.listdir(self.saved / "gpt")), 2)

        def goes_on(service, steps):
            model = new_model()
            model.load_state_dict(state[0])
            optimizer = self.optimizer(model, service)
            optimizer.load_state_dict(state[1])
            self.assertEqual(int(next(iter(optimizer.state.values()))["step"]), 3)
            train(model, optimizer, steps)
            optimizer.close()
            return model

        self.assertEqual(self.weights(goes_on(service, range(3, 8))), expected)
        service.stop()  # Which saves step 8.
        second = self.service(checkpoint_keep=1)
        goes_on(second, range(3, 6))  # Dies again, without a state of its own.
        self.assertEqual(self.weights(goes_on(second, range(3, 8))), expected)

    def test_sharded_ranks_go_on_from_their_states_on_a_service_that_has_begun_anew(self):
        def ranks(service, *cases):
            return run_ranks("state_ranks", 2, [
                (function, {"service": service.address, "job": "sharded", "file": str(self.folder / "state")} | options)
                for function, options in cases])

        service = self.service()
        ((expected, same), died) = ranks(service, ("takes_a_state_and_goes_on", {}),
                                         ("goes_on_from_its_state", {"steps": 1}))
        self.assertEqual(expected, same)
        self.assertNotIn(expected, died)
        service.stop()
        self.assertEqual(ranks(self.service(), ("goes_on_from_its_state", {"steps": 4})), [[expected] * 2])

    def test_states_stay_until_they_are_released(self):
        service = self.service(checkpoint_keep=1, checkpoint_every="1steps")
        client = ballast.connect(service.address)
        model = new_model()
        optimizer = self.optimizer(model, service)
        states = []
        for step in range(5):
            train(model, optimizer, [step])
            states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
            await_checkpoint(service, "gpt", step + 1)
        optimizer.close()
        uid = states[0][1]["param_groups"][0]["job_uid"]

        def asked_for():
            return sorted(found["step"] for found in client.checkpoints("gpt") if found["asked_for"])

        await_("the last save", lambda: asked_for() == [1, 2, 3, 4, 5])
        self.assertEqual([found["step"] for found in client.delete_checkpoint("gpt", 3)], [3])
        for step, job in ((3, uid), (4, "another")):
            with self.assertRaises(ballast.NotFoundError):
                client.delete_checkpoint("gpt", step, uid=job)
        self.assertEqual(len(client.delete_checkpoint("gpt", 4, uid=uid)), 1)
        self.assertEqual(asked_for(), [1, 2, 5])
        again = new_model()
        optimizer = self.optimizer(again, service)
        optimizer.load_state_dict(states[0][1])
        self.assertEqual(self.weights(again), {name: tensor.tolist() for name, tensor in states[0][0].items()})
        train(again, optimizer, range(1, 5))
        self.assertEqual(self.weights(again), self.weights(model))

    def test_what_the_trainer_has_deleted_goes_and_nothing_else(self):
        service = self.service()
        client = ballast.connect(service.address)
        model = new_model()
        optimizer = self.optimizer(model, service)
        theirs = self.folder / "theirs"
        theirs.mkdir()
        notes = theirs / "ballast-gpt.json"
        steps = iter(range(100))

        def save(name):
            train(model, optimizer, [next(steps)])
            optimizer.state_dict()
            await_checkpoint(service, "gpt", optimizer._binding.member.step_count)
            path = theirs / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
            releasing.saved([optimizer], str(theirs), str(path))

        def kept():
            return sorted(found["step"] for found in _saved(client, "gpt"))

        save("a")
        save("b")
        releasing.saved([optimizer], str(theirs), str(theirs / "same as b"))  # Which is not there.
        save("a")  # Of another step: the first one has no file any more.
        self.assertEqual(kept(), [2, 3])
        (theirs / "copy of a").touch()
        releasing.saved([optimizer], str(theirs), str(theirs / "copy of a"))
        (theirs / "a").unlink()
        save("other/c")
        self.assertEqual(kept(), [2, 3, 4])
        (theirs / "other").rename(self.folder / "not mounted")
        (theirs / "b").unlink()
        releasing.ended([optimizer], str(theirs))
        self.assertEqual(kept(), [3, 4])
        (self.folder / "not mounted").rename(theirs / "other")
        (theirs / "other/c").unlink()

        # Errors warn, and what could not be deleted is tried again, by another process, too.
        delete = ballast.client.Client.delete_checkpoint
        for error in (ballast.UnavailableError("no service answers at x"), OSError("disk full")):
            with mock.patch.object(ballast.client.Client, "delete_checkpoint", side_effect=error), \
                    self.assertWarnsRegex(UserWarning, f"of job gpt that the trainer has deleted stay .*: {error}"):
                releasing.ended([optimizer], str(theirs))
        in_use = [ballast.FailedPreconditionError("gpt/step-4 is in use: ...")] * 2

        def busy_at_first(*arguments, **options):
            if in_use:
                raise in_use.pop()
            return delete(*arguments, **options)

        with mock.patch.object(ballast.client.Client, "delete_checkpoint", autospec=True, side_effect=busy_at_first):
            releasing.saved([optimizer], str(theirs), str(theirs / "none"))
            self.assertEqual(kept(), [3, 4])
            releasing.ended([optimizer], str(theirs))
        self.assertEqual(kept(), [3])
        self.assertEqual([note["path"] for note in json.loads(notes.read_text())["checkpoints"]], ["copy of a"])
        notes.write_text("damaged")
        with self.assertWarnsRegex(UserWarning, "of job gpt that the trainer has deleted stay"):
            releasing.ended([optimizer], str(theirs))
        optimizer.close()
        releasing.ended([optimizer], str(theirs))  # Which knows no service any more.

    def test_a_state_whose_step_is_not_there_any_more_names_those_that_are(self):
        service = self.service(checkpoint_keep_asked=1)
        model = new_model()
        optimizer = self.optimizer(model, service)
        train(model, optimizer, range(1))
        state = copy.deepcopy(optimizer.state_dict())
        await_checkpoint(service, "gpt", 1)
        train(model, optimizer, range(1, 3))
        optimizer.state_dict()
        await_checkpoint(service, "gpt", 3)
        # The older one goes after the newer one has come.
        await_("its end", lambda: len(os.listdir(self.saved / "gpt")) == 2)
        train(model, optimizer, range(3, 4))
        optimizer.close()
        with refused(self, ballast.FailedPreconditionError):
            self.optimizer(new_model(), service).load_state_dict(state)

    def test_without_a_place_to_save_to_a_state_says_so(self):
        service = ballast.Service(memory_limit="256MiB", threads=1)
        self.addCleanup(service.stop)
        model = new_model()
        optimizer = self.optimizer(model, service)
        train(model, optimizer, range(1))
        with self.assertWarnsRegex(UserWarning, "did not save step 1 of job gpt .*--checkpoint-dir"):
            optimizer.state_dict()
        optimizer.close()

    def test_a_service_that_ends_is_resumed(self):
        service = self.service(checkpoint_every="2steps")
        expected = self.undisturbed(service, range(6))
        model = new_model()
        optimizer = self.optimizer(model, service)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(optimizer.attach(resume=True), 0)
        self.assertIn("job gpt begins at step 0: the service has no checkpoint of the name gpt", said.getvalue())
        train(model, optimizer, range(3))
        optimizer.close()
        service.stop()
        second = self.service()
        forgets = self.optimizer(new_model(), second)
        with written_to_stderr() as said:
            forgets.attach(create=True)
        self.assertIn("has a checkpoint of an earlier one at step 3", said())
        forgets.close(job=True)
        model = new_model()
        optimizer = self.optimizer(model, second)
        with written_to_stderr() as said:
            self.assertEqual(optimizer.attach(resume=True), 3)
        self.assertNotIn("begins at step 0", said())  # It loads what that line would be about.
        train(model, optimizer, range(3, 6))
        self.assertEqual(self.weights(model), expected)
        optimizer.close()
        model = new_model()
        optimizer = self.optimizer(model, second, job="branch")
        with refused(self, ballast.NotFoundError):
            optimizer.attach(resume="gpt/step-1.9")
        with refused(self, ballast.NotFoundError):
            optimizer.attach(resume="gpt/step-1")
        with refused(self, ballast.InvalidArgumentError):
            optimizer.attach(resume="gpt/step-x")
        self.assertEqual(optimizer.attach(resume="gpt/step-2"), 2)
        train(model, optimizer, range(2, 6))
        self.assertEqual(self.weights(model), expected)
        optimizer.close()
        self.assertEqual(self.optimizer(new_model(), second, job="branch").attach(resume="gpt/step-2.1"), 6)
        self.optimizer(new_model(), second, job="other").attach(create=True)
        with refused(self, ballast.FailedPreconditionError):
            self.optimizer(new_model(), second, job="other").attach(resume="gpt/step-2.1")

    def test_a_resume_warns_of_what_the_service_does_not_hold(self):
        service, steps = self.service(), range(2)

        class Counting(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("queue", torch.zeros(3))
                self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
                self.register_buffer("angles", torch.ones(3), persistent=False)

            def forward(self, x):
                return x

        def model():
            target = torch.nn.Linear(3, 3).requires_grad_(False)
            return torch.nn.Sequential(*new_model(), torch.nn.BatchNorm1d(3), target, Counting())

        def attach(model, module, only_trained=False):
            named = [(name, p) for name, p in model.named_parameters() if p.requires_grad or not only_trained]
            optimizer = ballast.torch.AdamW(named, lr=0.02, service=service.address, module=module,
                                            job="trained" if only_trained else "all")
            self.addCleanup(optimizer.close)
            with warnings.catch_warnings(record=True) as said, written_to_stderr():
                warnings.simplefilter("always")
                optimizer.attach(resume=True)
                optimizer.attach(resume=True)
            train(model, optimizer, steps)
            optimizer.close()
            return [re.search("has not restored (.*)[.] If", str(each.message))[1] for each in said]

        first = model()
        self.assertEqual(attach(first, first), [])  # There is nothing to go on from.
        self.assertEqual(attach(model(), None), ["4.weight, 4.bias"])
        again = model()
        self.assertEqual(attach(again, again), ["3.running_mean, 3.running_var, 3.num_batches_tracked, 5.queue, "
                                                "4.weight, 4.bias"])
        with torch.no_grad():
            again = model()
            again.load_state_dict(first.state_dict())  # Of which the statistics tell that they have been loaded.
        self.assertEqual(attach(again, again), ["5.queue, 4.weight, 4.bias"])
        for number in range(2):
            self.assertEqual(attach(model(), None, only_trained=True), [], number)

    def test_a_service_that_cannot_save_says_so_when_it_is_stopped(self):
        service = self.service()
        model = new_model()
        optimizer = self.optimizer(model, service)
        train(model, optimizer, range(1))
        optimizer.close()
        self.saved.rename(self.folder / "away")
        with refused(self, ballast.BallastError):
            service.stop()

    def test_what_torch_saved_becomes_a_checkpoint_and_back(self):
        service = self.service()
        theirs = new_model()
        groups = [{"params": list(theirs[0].parameters()), "weight_decay": 0.3},
                  {"params": [theirs[2].weight], "amsgrad": True, "lr": 0.01}]
        adam = torch.optim.AdamW(groups, lr=0.02)
        train(theirs, adam, range(3))
        file = self.folder / "trained.pt"
        torch.save({"model": theirs.state_dict(), "optimizer": adam.state_dict()}, file)

        ours = new_model()
        named = [{"params": [(f"0.{name}", p) for name, p in ours[0].named_parameters()]},
                 {"params": [("2.weight", ours[2].weight)], "amsgrad": True}]
        optimizer = ballast.torch.AdamW(named, service=service.address, job="gpt")
        self.addCleanup(optimizer.close)
        made = ballast.torch.to_checkpoint(self.saved / "gpt", optimizer, file, file)
        self.assertEqual(made.name, "step-3.0")
        client = ballast.connect(service.address)
        self.assertEqual([found["problem"] for found in client.verify("gpt")], [""])
        self.assertEqual(optimizer.attach(resume=True), 3)
        self.assertEqual(self.weights(ours), self.weights(theirs))
        for group in optimizer.param_groups:
            group["lr"] = 0.005
        for group in adam.param_groups:
            group["lr"] = 0.005
        optimizer.param_groups[0]["weight_decay"] = 0.3
        train(theirs, adam, range(3, 6))
        train(ours, optimizer, range(3, 6))
        for name, tensor in ours.state_dict().items():
            torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-5, atol=1e-7)

        # And back: torch goes on with it.
        client.save("gpt")
        again = new_model()
        named = [{"params": [(f"0.{name}", p) for name, p in again[0].named_parameters()]},
                 {"params": [("2.weight", again[2].weight)], "amsgrad": True}]
        adam = torch.optim.AdamW(named)
        older, _ = ballast.torch.from_checkpoint(made)
        weights, state = ballast.torch.from_checkpoint(self.saved / "gpt", adam)  # The newest.
        self.assertFalse(torch.equal(older["2.weight"], weights["2.weight"]))
        renamed = made.rename(made.with_name("step-99.0"))  # Which makes it no newer.
        os.mkfifo(made.with_name("step-100.0"))
        with self.assertWarnsRegex(UserWarning, "step-99.0 was renamed: its index calls it step-"):
            newest, _ = ballast.torch.from_checkpoint(self.saved / "gpt")
        self.assertTrue(torch.equal(newest["2.weight"], weights["2.weight"]))
        renamed.rename(made)
        made.with_name("step-100.0").unlink()
        again.load_state_dict(weights)
        adam.load_state_dict(state)
        self.assertEqual([group["weight_decay"] for group in adam.param_groups], [0.3, 0.01])
        train(again, adam, range(6, 9))
        train(ours, optimizer, range(6, 9))
        for name, tensor in ours.state_dict().items():
            torch.testing.assert_close(tensor, again.state_dict()[name], rtol=1e-5, atol=1e-7)

    def test_a_checkpoint_of_adamw_makes_no_state_of_adam(self):
        kinds = {"Adam": "AdamW", "AdamW": "Adam"}
        for kind, other in kinds.items():
            model = new_model()
            made = ballast.torch.to_checkpoint(
                self.folder / kind, getattr(ballast.torch, kind)(model.named_parameters(), lr=0.02), model.state_dict())
            with refused(self, ballast.InvalidArgumentError):
                ballast.torch.from_checkpoint(made, getattr(torch.optim, other)(model.named_parameters()))
            _, state = ballast.torch.from_checkpoint(made, getattr(torch.optim, kind)(model.named_parameters()))
            self.assertEqual(state["param_groups"][0]["lr"], 0.02)

    def test_what_is_being_converted_is_left_alone_by_a_service_that_saves_there(self):
        service = self.service()
        model = new_model()
        optimizer = self.optimizer(model, service)
        train(model, optimizer, range(1))
        other = ballast.torch.AdamW(new_model().named_parameters(), lr=1e-3, service=service.address, job="other")

        def saves_meanwhile(*arguments):
            optimizer.state_dict()  # Saved by the service, which removes what killed saves left.
            return write_safetensors(*arguments)

        write_safetensors = checkpoints._write_safetensors
        with mock.patch.object(checkpoints, "_write_safetensors", saves_meanwhile):
            written = ballast.torch.to_checkpoint(self.saved / "gpt", other, model.state_dict())
        self.assertTrue((written / "master.safetensors").is_file())
        self.assertEqual(sorted(os.listdir(written)), sorted(
            ["exp_avg.safetensors", "exp_avg_sq.safetensors", "index.json", "master.safetensors"]))
        await_checkpoint(service, "gpt", 1)  # It is saved in the background.
        # It is the newest whatever the clock says.
        with mock.patch("time.time_ns", return_value=1_000_000_000):
            again = ballast.torch.to_checkpoint(self.saved / "gpt", other, model.state_dict())
        saved = {path.parent: json.loads(path.read_text())["saved_unix_ms"]
                 for path in (self.saved / "gpt").glob("*/index.json")}
        self.assertIn(written, saved)
        self.assertEqual(saved.pop(again), max(saved.values()) + 1)
        optimizer.close()

    def test_close_leaves_the_job_and_with_save_it_closes_that_too(self):
        service = self.service()
        client = ballast.connect(service.address)
        model = new_model()
        optimizer = self.optimizer(model, service)
        with self.assertRaises(ballast.FailedPreconditionError):  # It is bound to no job.
            optimizer.close(save=True)
        train(model, optimizer, range(3))
        optimizer.close()
        self.assertEqual([job["committed_step"] for job in client.jobs()], [3])
        optimizer.attach()
        optimizer.close(save=True)
        self.assertEqual(client.jobs(), [])
        self.assertEqual([found["step"] for found in client.checkpoints("gpt")], [3])
        resumed = new_model()
        self.assertEqual(self.optimizer(resumed, service).attach(resume=True), 3)
        self.assertEqual(self.weights(resumed), self.weights(model))

    def test_moments_of_torch_begin_a_new_job(self):
        service = ballast.Service(memory_limit="256MiB", threads=1)  # No --checkpoint-dir.
        self.addCleanup(service.stop)
        theirs = new_model()
        adam = torch.optim.AdamW([{"params": list(theirs[0].named_parameters()), "weight_decay": 0.3},
                                  {"params": [("weight", theirs[2].weight)], "amsgrad": True, "lr": 0.01}], lr=0.02)
        train(theirs, adam, range(3))
        ours = new_model()
        # The first group by name, in another order; the second, which has other names, by the order.
        named = [{"params": [("bias", ours[0].bias), ("weight", ours[0].weight)]},
                 {"params": [("last", ours[2].weight)]}]
        optimizer = ballast.torch.AdamW(named, service=service.address, job="gpt")
        self.addCleanup(optimizer.close)
        optimizer.load_state_dict(adam.state_dict())
        given = {plane: adam.state[theirs[0].weight][plane].tolist() for plane in ("exp_avg", "exp_avg_sq")}
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # In either order.
        self.assertEqual(ballast.connect(service.address).jobs(), [])
        kept, of_torch = optimizer.state_dict(), copy.deepcopy(adam.state_dict())  # Nobody else has them.
        self.assertEqual(kept["state"][1]["exp_avg"].tolist(), given["exp_avg"])
        train(theirs, adam, range(3, 4))  # Which changes what it has given.
        self.assertEqual([int(optimizer.state[p]["step"]) for p in ours.parameters()], [3, 3, 3])
        self.assertEqual(optimizer.attach(), 3)
        self.assertIsNone(optimizer._moments)
        client = ballast.connect(service.address)
        self.assertEqual({plane: client.state("gpt", "weight", plane).tolist() for plane in given}, given)
        train(ours, optimizer, range(3, 4))

        def follows_torch(steps):
            train(theirs, adam, steps)
            train(ours, optimizer, steps)
            for name, tensor in ours.state_dict().items():
                torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-5, atol=1e-7)

        follows_torch(range(0))
        follows_torch(range(4, 7))
        self.assertEqual(optimizer.param_groups[1]["job_step"], 7)
        adam.load_state_dict(of_torch)
        optimizer.load_state_dict(kept)  # Which has the moments: they go to the job that is there.
        follows_torch(range(7, 9))
        self.assertEqual([int(optimizer.state[p]["step"]) for p in ours.parameters()], [5, 5, 5])

    def test_a_full_state_begins_a_new_job_where_its_own_has_gone(self):
        for dtype in (torch.float32, torch.bfloat16):
            service = ballast.Service(memory_limit="256MiB", threads=1)
            self.addCleanup(service.stop)

            def steps(model, optimizer, numbers):
                for step in numbers:
                    batch = torch.rand(5, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
                    optimizer.zero_grad()
                    model(batch).float().square().sum().backward()
                    optimizer.step()

            model = new_model().to(dtype)
            optimizer = self.optimizer(model, service, full_state=True)
            steps(model, optimizer, range(3))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # That the service saves nothing.
                state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            steps(model, optimizer, range(3, 6))
            masters = {name: optimizer._binding.recovery.read_state(p, "master")[0].tolist()
                       for name, p in model.named_parameters()}
            optimizer.close()
            with self.assertRaises(RuntimeError):  # It is there, and has gone on.
                self.optimizer(new_model().to(dtype), service, full_state=True).load_state_dict(state[1])
            service.stop()
            second = ballast.Service(memory_limit="256MiB", threads=1)
            self.addCleanup(second.stop)
            for where in (dict(service=second.address), dict(service=second.address, job="other"), dict(service=None)):
                model = new_model().to(dtype)
                optimizer = ballast.torch.AdamW(model.named_parameters(), lr=0.5, **{"job": "gpt"} | where)
                self.addCleanup(optimizer.close)
                optimizer.load_state_dict(state[1])
                model.load_state_dict(state[0])
                steps(model, optimizer, range(3, 6))
                self.assertEqual(masters, {name: optimizer._binding.recovery.read_state(p, "master")[0].tolist()
                                           for name, p in model.named_parameters()}, (dtype, where))
                optimizer.close()

    def test_a_full_state_that_did_not_reach_the_service_is_loaded_again(self):
        first = ballast.Service(memory_limit="256MiB", threads=1)
        self.addCleanup(first.stop)
        model = new_model()
        optimizer = self.optimizer(model, first, full_state=True)
        train(model, optimizer, range(1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That the service saves nothing.
            state = copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        second = ballast.Service(memory_limit="256MiB", threads=1)
        self.addCleanup(second.stop)
        again = self.optimizer(model, second, full_state=True)
        with mock.patch("ballast.torch.member.restore", side_effect=ballast.UnavailableError("it does not run")), \
                self.assertRaisesRegex(ballast.UnavailableError, "it does not run"):
            again.load_state_dict(state)
        for go_on in (again.attach, lambda: train(model, again, range(1, 2))):
            with refused(self, ballast.torch.member.NothingToResume):
                go_on()
        again.load_state_dict(state)
        self.assertEqual(again.attach(), 1)
        train(model, again, range(1, 2))

    def test_moments_of_what_is_frozen_by_now(self):
        service = ballast.Service(memory_limit="256MiB", threads=1)
        self.addCleanup(service.stop)
        theirs = new_model()
        theirs[2].weight.requires_grad_(False)
        adam = torch.optim.AdamW(theirs.parameters())
        train(theirs, adam, range(2))
        ours = new_model()
        optimizer = self.optimizer(ours, service)
        optimizer.load_state_dict(adam.state_dict())
        for parameter in ours[0].parameters():
            parameter.requires_grad_(False)
        train(ours, optimizer, range(1))
        self.assertEqual(optimizer.param_groups[0]["job_step"], 1)

    def test_an_upload_that_is_interrupted_reads_memory_that_is_still_there(self):
        theirs = new_model()
        adam = torch.optim.AdamW(theirs.named_parameters())
        train(theirs, adam, range(1))
        for state in (adam.state_dict(), None):
            service = ballast.Service(memory_limit="256MiB", threads=1)
            self.addCleanup(service.stop)
            goes_on, uploads = threading.Event(), []
            self.addCleanup(goes_on.set)

            def call(function, *arguments, call=_native.call, goes_on=goes_on, uploads=uploads):
                if function == "ballast_upload_by":
                    uploads.append(threading.current_thread())
                    os.kill(os.getpid(), signal.SIGINT)
                    goes_on.wait()
                return call(function, *arguments)

            model = new_model().bfloat16()
            given = {parameter.data_ptr() for parameter in model.parameters()}
            expected = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
            optimizer = ballast.torch.AdamW(model.named_parameters(), service=service.address, job="gpt")
            if state is not None:
                optimizer.load_state_dict(state)
            with mock.patch.object(_native, "call", call):
                with self.assertRaises(KeyboardInterrupt):
                    optimizer.attach(create=True)
                del optimizer, model
                gc.collect()
                there = [weakref.ref(of) for of in gc.get_objects() if type(of) is torch.Tensor
                         and of.data_ptr() in given]
                self.assertEqual({of().data_ptr() for of in there}, given)
                goes_on.set()
                uploads[0].join(PATIENCE)
            client = ballast.connect(service.address)
            for name, values in expected.items():
                self.assertTrue(torch.equal(torch.from_numpy(client.state("gpt", name)), values), name)
            gc.collect()
            self.assertEqual([of() for of in there], [None] * len(there))

    def test_moments_that_cannot_be_given_are_refused(self):
        service = ballast.Service(memory_limit="256MiB", threads=1)
        self.addCleanup(service.stop)
        theirs = new_model()
        adam = torch.optim.AdamW(theirs.named_parameters())
        train(theirs, adam, range(1))

        def changed(change):
            state = copy.deepcopy(adam.state_dict())
            change(state)
            return state

        def fill(state):
            state["state"][2]["exp_avg"][1, 2] = float("inf")

        for kind, state in (
                (ballast.FailedPreconditionError, changed(lambda state: state["state"][0].pop("exp_avg_sq"))),
                (ballast.FailedPreconditionError,
                 changed(lambda state: state["state"][0].update(exp_avg=torch.zeros(9)))),
                (ballast.InvalidArgumentError, changed(fill)),
                (ballast.InvalidArgumentError,
                 changed(lambda state: state["param_groups"][0].update(decoupled_weight_decay=False))),
                (ValueError, changed(lambda state: state["param_groups"][0]["params"].pop()))):
            optimizer = self.optimizer(new_model(), service)
            with refused(self, kind):
                optimizer.load_state_dict(state)
            self.assertIsNone(optimizer._moments)
        # The job has its own.
        train(model := new_model(), optimizer := self.optimizer(model, service), range(2))
        optimizer.close()
        late = self.optimizer(model, service)
        late.load_state_dict(adam.state_dict())
        with refused(self, ballast.FailedPreconditionError):
            train(model, late, range(1))
        self.assertEqual(late.attach(resume=True), 2)  # Which goes on where there is something.
        late.close()
        # What the service finds; a good state then begins the job.
        optimizer = self.optimizer(model, service, job="other")
        optimizer.load_state_dict(changed(lambda state: state["state"][2]["exp_avg_sq"][1, 2].fill_(-1)))
        with refused(self, ballast.InvalidArgumentError):
            train(model, optimizer, range(1))
        optimizer.close()
        self.assertEqual(ballast.connect(service.address).job("other")["phase"], "AWAITING_WEIGHTS")
        optimizer = self.optimizer(model, service, job="other")
        optimizer.load_state_dict(adam.state_dict())
        self.assertEqual(optimizer.attach(), 1)

    def test_moments_go_to_a_service_on_another_host(self):
        """Over TCP, to one that takes no paths: with the bits of a checkpoint that is loaded."""
        there = Service(ballast._files.program("ballastd"), self.folder, "--memory-limit=256MiB", "--threads=1")
        self.addCleanup(there.stop)
        self.assertNotIn("unix:", there.address)
        here = self.service()
        theirs = new_model()
        groups = [{"params": list(theirs[0].named_parameters())},
                  {"params": [("last", theirs[2].weight)], "amsgrad": True, "lr": 0.01}]
        adam = torch.optim.AdamW(groups, lr=0.02)
        train(theirs, adam, range(2))
        theirs[2].weight.requires_grad_(False)
        train(theirs, adam, range(2, 4))  # Of which one parameter has not had all.
        theirs[2].weight.requires_grad_(True)

        def begun(service, job):
            model = new_model()
            named = [{"params": list(model[0].named_parameters())},
                     {"params": [("last", model[2].weight)], "amsgrad": True, "lr": 0.01}]
            optimizer = ballast.torch.AdamW(named, lr=0.02, service=service.address, job=job)
            self.addCleanup(optimizer.close)
            return model, optimizer

        def state_of(service, job):
            client = ballast.connect(service.address)
            planes = {(name, plane): client.state(job, name, plane).tobytes()
                      for name in ("weight", "bias", "last")
                      for plane in ("master", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if name == "last" else []))}
            return planes, {name: client.summary(job, name)["update_count"] for name in ("weight", "bias", "last")}

        first, loads = begun(here, "gpt")
        weights = {name.replace("0.", "").replace("2.weight", "last"): tensor
                   for name, tensor in theirs.state_dict().items()}
        ballast.torch.to_checkpoint(self.saved / "gpt", loads, weights, adam.state_dict())
        self.assertEqual(loads.attach(resume=True), 4)
        second, uploads = begun(there, "gpt")
        second.load_state_dict(copy.deepcopy(theirs.state_dict()))
        uploads.load_state_dict(adam.state_dict())
        self.assertEqual(uploads.attach(), 4)
        self.assertEqual(state_of(there, "gpt"), state_of(here, "gpt"))
        self.assertEqual(state_of(there, "gpt")[1], {"weight": 4, "bias": 4, "last": 2})
        for model, optimizer in ((first, loads), (second, uploads), (theirs, adam)):
            train(model, optimizer, range(4, 7))
        self.assertEqual(state_of(there, "gpt"), state_of(here, "gpt"))
        for ours, tensor in zip(second.parameters(), theirs.parameters()):
            torch.testing.assert_close(ours, tensor, rtol=1e-5, atol=1e-7)

    def test_hugging_faces_files_are_imported_and_made(self):
        service = self.service()
        client = ballast.connect(service.address)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            theirs = new_model().to(dtype)
            folder = self.folder / str(dtype)
            folder.mkdir()
            safetensors.torch.save_file(theirs.state_dict() | {"buffer": torch.arange(3)}, folder / "model.safetensors",
                                        metadata={"format": "pt"})
            ours = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3, bias=False))
            optimizer = self.optimizer(ours, service, job=str(dtype))
            optimizer.attach(create=True)
            train(ours, optimizer, range(1))
            optimizer.close()
            self.assertEqual(client.import_weights(str(dtype), str(folder))["step"], 0)
            optimizer = self.optimizer(ours, service, job=str(dtype))
            self.assertEqual(optimizer.attach(), 0)
            self.assertEqual(self.weights(ours), self.weights(theirs.float()))
            train(ours, optimizer, range(2))
            weights, _ = ballast.torch.from_checkpoint(client.save(str(dtype))["directory"])
            safetensors.torch.save_file(weights, folder / "made.safetensors")
            self.assertEqual({name: tensor.tolist() for name, tensor in
                              safetensors.torch.load_file(folder / "made.safetensors").items()}, self.weights(ours))
            path = ballast.torch.to_checkpoint(self.saved / "hf", self.optimizer(new_model(), service, job="hf"),
                                               folder / "model.safetensors")
            self.assertEqual(path.name.split(".")[0], "step-0")

    def test_no_code_of_a_file_is_run_and_what_does_not_fit_is_refused(self):
        service = self.service()
        optimizer = self.optimizer(new_model(), service)
        evil, made = self.folder / "evil.pt", self.folder / "made"
        torch.save({"model": new_model().state_dict(), "x": Code(str(made))}, evil)
        with refused(self, ballast.InvalidArgumentError, varies=True):  # It ends with torch's.
            ballast.torch.to_checkpoint(self.saved / "gpt", optimizer, evil)
        self.assertFalse(made.exists())
        weights = new_model().state_dict()
        cut = self.folder / "cut.safetensors"
        safetensors.torch.save_file(weights, cut)
        cut.write_bytes(cut.read_bytes()[:-4])
        adam = torch.optim.AdamW([{"params": list(new_model().parameters())}])
        for kind, state, moments in (
                (ballast.NotFoundError, self.folder / "nowhere.pt", None),
                (ballast.InvalidArgumentError, cut, None),
                (ballast.FailedPreconditionError, {"0.weight": weights["0.weight"]}, None),
                (ballast.FailedPreconditionError, weights | {"0.bias": torch.zeros(9)}, None),
                (ballast.InvalidArgumentError, weights | {"0.bias": torch.full((8,), float("nan"))}, None),
                (ballast.InvalidArgumentError, weights, {"model": 1}),
                (ballast.FailedPreconditionError, weights, {"state": {}, "param_groups": []}),
                (ballast.FailedPreconditionError, weights, {"state": {}, "param_groups": [{"params": [0]}]})):
            with refused(self, kind):
                ballast.torch.to_checkpoint(self.saved / "gpt", optimizer, state, moments)
        self.assertFalse((self.saved / "gpt").exists())
        path = ballast.torch.to_checkpoint(self.saved / "gpt", optimizer, weights, adam.state_dict())
        master = path / "master.safetensors"
        master.write_bytes(master.read_bytes()[:-1] + b"\x7f")
        with refused(self, ballast.FailedPreconditionError):
            ballast.torch.from_checkpoint(path)

    def test_a_checkpoint_of_an_unknown_format_is_refused_and_stays(self):
        weights = new_model().state_dict()
        path = ballast.torch.to_checkpoint(self.folder / "gpt", self.optimizer(new_model(), self.service()), weights)
        index = json.loads((path / "index.json").read_text())
        self.assertEqual((index["version"], index["files"][0]["crc32"]),
                         (1, f"{zlib.crc32((path / 'master.safetensors').read_bytes()):08x}"))
        index["version"] = 2
        index["sha256"] = checkpoints._sign(index)
        (path / "index.json").write_text(json.dumps(index))
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        with refused(self, ballast.FailedPreconditionError):
            ballast.torch.from_checkpoint(path)
        self.assertEqual({file.name: file.read_bytes() for file in path.iterdir()}, before)


if __name__ == "__main__":
    unittest.main()
