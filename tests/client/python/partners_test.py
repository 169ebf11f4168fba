#!/usr/bin/env python3
"""ballast.torch under the trainers that people use: the same losses as torch.optim.AdamW in the same run.

Each case trains twice, with a seed of its own, and the two runs differ in the optimizer alone.
"""

import functools
import logging
import os
import pathlib
import sys
import tempfile
import unittest
import warnings
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"  # Nothing here is to be fetched.
os.environ["TQDM_DISABLE"] = "1"

import torch  # noqa: E402
import transformers  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client/python"))

import ballast  # noqa: E402
import ballast.torch  # noqa: E402

sys.path.insert(0, str(ROOT / "tests/support"))
from processes import await_  # noqa: E402

# Of losses of about 5, after steps whose updates were rounded in another order.
PLACES = 4
CONTEXT = 32


def text(batches, size=4):
    """Token rows of a licence, as Hugging Face wants them."""
    data = torch.frombuffer(bytearray((ROOT / "LICENSE").read_bytes()), dtype=torch.uint8).long()
    rows = data[:batches * size * CONTEXT].view(-1, CONTEXT)
    return [{"input_ids": row, "labels": row} for row in rows]


def gpt2():
    transformers.set_seed(3)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=257, n_positions=CONTEXT,
                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


class Partner(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        for name in ("lightning.pytorch", "transformers"):
            logging.getLogger(name).setLevel(logging.ERROR)
        cls.service = ballast.Service(memory_limit="1GiB")
        cls.addClassCleanup(cls.service.stop)

    def job(self):
        return {"service": self.service.address, "job": self.id().rpartition(".")[2]}

    def folder(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return folder.name

    def saving_service(self, **options):
        """One that saves with every state_dict, and which steps it has when none is being saved."""
        service = ballast.Service(memory_limit="1GiB", threads=1, checkpoint_dir=self.folder(), **options)
        self.addCleanup(service.stop)

        def steps():
            client = ballast.connect(service.address)
            await_("the saves", lambda: not client.job("kept")["saves"])
            return sorted({found["step"] for found in client.checkpoints("kept")})

        return {"service": service.address, "job": "kept"}, steps

    def assert_same_losses(self, ours, theirs, steps, places=PLACES):
        self.assertEqual((len(ours), len(theirs)), (steps, steps))
        self.assertLess(min(theirs[steps // 2:]), theirs[0] - 0.1)  # It trains.
        for step, (a, b) in enumerate(zip(ours, theirs)):
            self.assertAlmostEqual(a, b, places=places, msg=f"step {step}")


class HuggingFaceTrainer(Partner):
    STEPS = 8

    class StopAt(transformers.TrainerCallback):
        def __init__(self, step):
            self.step = step

        def on_step_end(self, args, state, control, **_):
            if state.global_step == self.step:
                control.should_save = control.should_training_stop = True

    @staticmethod
    def trainer(folder, optimizer, *callbacks, **more):
        """optimizer: from a model, class and arguments for the optimizer."""
        model = gpt2()
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=HuggingFaceTrainer.STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=3,
            max_grad_norm=0.7, lr_scheduler_type="cosine", warmup_steps=2, logging_steps=1,
            report_to=[], use_cpu=True, seed=3, disable_tqdm=True, dataloader_pin_memory=False,
            **{"save_strategy": "no"} | more)
        trainer = transformers.Trainer(model, arguments, train_dataset=text(40), eval_dataset=text(1),
                                       callbacks=list(callbacks),
                                       optimizer_cls_and_kwargs=optimizer(model))
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    def ours(self, model, **more):
        return ballast.torch.AdamW, self.theirs(model)[1] | self.job() | more

    @staticmethod
    def theirs(model):
        return torch.optim.AdamW, {"params": ballast.torch.groups(model, weight_decay=0.1), "lr": 3e-3}

    @staticmethod
    def losses(trainer, what="loss"):
        return [entry[what] for entry in trainer.state.log_history if what in entry]

    def test_clipping_accumulation_and_a_schedule(self):
        def overlapping(model):
            return self.ours(model, job="overlapping", overlap=True)

        runs = [self.trainer(self.folder(), optimizer) for optimizer in (self.theirs, self.ours, overlapping)]
        for run in runs:
            run.train()
        losses, norms = ([self.losses(run, what) for run in runs] for what in ("loss", "grad_norm"))
        self.assertTrue(runs[2].optimizer.optimizer.overlap)
        self.assertGreater(max(norms[0]), 0.7)  # It clips.
        for ours in (1, 2):
            self.assert_same_losses(losses[ours], losses[0], self.STEPS)
            for a, b in zip(norms[ours], norms[0]):
                self.assertAlmostEqual(a, b, places=3)

    def test_clipping_on_the_service(self):
        run = self.trainer(self.folder(), lambda model: self.ours(model, max_norm=0.7))
        run.args.max_grad_norm = 0
        reference = self.trainer(self.folder(), self.theirs)
        for trainer in (run, reference):
            trainer.train()
        self.assert_same_losses(self.losses(run), self.losses(reference), self.STEPS)

    def test_saves_and_goes_on(self):
        folder = self.folder()
        first = self.trainer(folder, self.ours, self.StopAt(4))
        first.train()
        first.optimizer.optimizer.close()
        second = self.trainer(folder, self.ours)
        second.train(resume_from_checkpoint=True)
        whole = self.trainer(self.folder(), self.theirs)
        whole.train()
        self.assertEqual(second.state.global_step, self.STEPS)
        self.assert_same_losses(self.losses(second), self.losses(whole), self.STEPS)

    def test_the_best_checkpoint_goes_on_and_the_service_has_those_of_the_trainer(self):
        job, saved = self.saving_service()
        folder = pathlib.Path(self.folder())

        def train(**options):
            # The one with the highest loss is the best: the oldest.
            trainer = self.trainer(
                folder, functools.partial(self.ours, **job), ballast.torch.TrainerCallback(), save_strategy="steps",
                eval_strategy="steps", save_steps=1, eval_steps=1, save_total_limit=2, load_best_model_at_end=True,
                metric_for_best_model="loss", greater_is_better=True)
            with warnings.catch_warnings(record=True) as warned:
                trainer.train(**options)
            said = [str(warning.message) for warning in warned]
            self.assertEqual([text for text in said if "stay on the service" in text], [])
            self.assertEqual(saved(), sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*")))
            self.assertEqual(saved(), [1, self.STEPS])
            trainer.optimizer.optimizer.close()
            last = folder / f"checkpoint-{self.STEPS}/model.safetensors"
            weights = last.read_bytes()
            last.unlink()  # It is to be written anew.
            return weights, self.losses(trainer)

        weights, losses = train()
        # Without times the Trainer takes its own newest for the oldest, and deletes it before it says that it has saved.
        with mock.patch("os.path.getmtime", return_value=0.0):
            self.assertEqual(train(resume_from_checkpoint=str(folder / "checkpoint-1")), (weights, losses))


class Accelerate(Partner):
    STEPS = 6

    def setUp(self):
        from accelerate.state import AcceleratorState, GradientState, PartialState
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    def prepare(self, make):
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        model = gpt2()
        optimizer = make(list(model.named_parameters()))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * self.STEPS)
        loader = torch.utils.data.DataLoader(text(3 * self.STEPS), batch_size=4)
        return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)

    def train(self, accelerator, model, optimizer, loader, schedule, skip=0):
        losses, total = [], 0.0
        for batch in accelerator.skip_first_batches(loader, skip):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total += loss.item() / 3
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.7)
                    losses.append(total)
                    total = 0.0
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            self.assertFalse(accelerator.optimizer_step_was_skipped)
        return losses

    def ours(self, parameters, **more):
        return ballast.torch.AdamW(parameters, lr=3e-3, **self.job(), **more)

    def theirs(self, parameters):
        return torch.optim.AdamW(parameters, lr=3e-3)

    def test_accumulation_clipping_and_a_schedule(self):
        ours, theirs = (self.train(*self.prepare(make))
                        for make in (functools.partial(self.ours, overlap=True), self.theirs))
        self.assert_same_losses(ours, theirs, self.STEPS)

    def test_saves_and_goes_on(self):
        folder = self.folder()
        accelerator, *prepared = self.prepare(self.ours)
        prepared[2].dataset[3 * 2 * 4:] = []  # Two steps of three batches of four.
        losses = self.train(accelerator, *prepared)
        accelerator.save_state(folder)
        prepared[1].optimizer.close()
        self.setUp()
        accelerator, *prepared = self.prepare(self.ours)
        accelerator.load_state(folder)
        losses += self.train(accelerator, *prepared, skip=6)
        self.setUp()
        self.assert_same_losses(losses, self.train(*self.prepare(self.theirs)), self.STEPS)

    def test_ranks(self):
        """FSDP2, DistributedDataParallel, and Hugging Face's Trainer with it, each wrapped after the optimizer is
        made."""
        from ranks_for_tests import run_ranks
        job = self.job()
        *of_accelerate, of_trainer = run_ranks("accelerate_ranks", 2, [
            ("accelerate", job | {"sharded": True, "job": "fsdp2"}),
            ("accelerate", job | {"sharded": False, "job": "ddp"}), ("trainer", job)])
        for ranks in of_accelerate:
            for (theirs, _), *ours in ranks:
                for losses, _ in ours:
                    self.assert_same_losses(losses, theirs, 6)
                self.assertEqual([overlaps for _, overlaps in ours], [False, True, True])
        for theirs, ours, overlaps, refused in of_trainer:
            self.assert_same_losses(ours, theirs, HuggingFaceTrainer.STEPS)
            self.assertTrue(overlaps)
            self.assertIn("ddp_find_unused_parameters=False", refused)


class Lightning(Partner):
    STEPS = 6

    def module(self, make, manual=False):
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = gpt2()
                self.losses = []
                self.automatic_optimization = not manual

            def training_step(self, batch, number):
                loss = self.model(**batch).loss
                self.losses.append(loss.item())
                self.log("loss", loss)
                if manual:
                    optimizer = self.optimizers()
                    self.manual_backward(loss / 3)
                    if number % 3 == 2:
                        self.clip_gradients(optimizer, gradient_clip_val=0.7, gradient_clip_algorithm="norm")
                        optimizer.step()
                        optimizer.zero_grad()
                        self.lr_schedulers().step()
                return loss

            def configure_optimizers(self):
                self.optimizer = make(list(self.named_parameters()))
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 12)
                return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        return Module()

    def fit(self, module, epochs=3, checkpoint=None, precision=None, callbacks=()):
        import lightning
        mixed = [] if precision is None else [lightning.pytorch.plugins.MixedPrecision(
            precision, "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0) if precision == "16-mixed" else None)]
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, logger=False, callbacks=list(callbacks),
            enable_checkpointing=bool(callbacks),
            enable_progress_bar=False, enable_model_summary=False, plugins=mixed,
            **({"accumulate_grad_batches": 3, "gradient_clip_val": 0.7} if module.automatic_optimization else {}))
        # Lightning goes on at the beginning of an epoch; this one has two steps.
        loader = torch.utils.data.DataLoader(text(3 * 2), batch_size=4)
        trainer.fit(module, loader, ckpt_path=checkpoint)
        return trainer

    def ours(self, parameters):
        return ballast.torch.AdamW(parameters, lr=3e-3, **self.job())

    def theirs(self, parameters):
        return torch.optim.AdamW(parameters, lr=3e-3)

    def test_accumulation_clipping_and_a_schedule(self):
        modules = [self.module(make) for make in (self.ours, self.theirs)]
        for module in modules:
            self.fit(module)
        self.assert_same_losses(modules[0].losses, modules[1].losses, 3 * self.STEPS)

    def test_a_backbone_that_thaws(self):
        import lightning
        from lightning.pytorch.callbacks import BackboneFinetuning

        class Module(lightning.LightningModule):
            def __init__(self, make):
                super().__init__()
                torch.manual_seed(3)
                self.backbone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU())
                self.head = torch.nn.Linear(16, 4)
                self.make, self.losses = make, []

            def training_step(self, batch, number):
                loss = torch.nn.functional.mse_loss(self.head(self.backbone(batch)), batch[:, :4])
                self.losses.append(loss.item())
                return loss

            def configure_optimizers(self):
                self.optimizer = self.make([p for p in self.parameters() if p.requires_grad])
                return self.optimizer

        modules = [Module(make) for make in (self.ours, self.theirs)]
        for module in modules:
            trainer = lightning.Trainer(
                accelerator="cpu", devices=1, max_epochs=8, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False,
                callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=3, backbone_initial_lr=1e-3)])
            torch.manual_seed(4)
            trainer.fit(module, torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=4))
        self.assert_same_losses(modules[0].losses, modules[1].losses, 24)
        self.assertEqual(len(modules[0].optimizer.param_groups), 2)

    def test_manual_optimization(self):
        def ours(parameters):
            return ballast.torch.AdamW(parameters, lr=3e-3, overlap=True, **self.job())

        modules = [self.module(make, manual=True) for make in (ours, self.theirs)]
        for module in modules:
            self.fit(module)
        self.assert_same_losses(modules[0].losses, modules[1].losses, 3 * self.STEPS)
        # What the step was like can be read where the module has it.
        self.assertGreater(modules[0].optimizers().grad_norm, 0)

    def test_mixed_precision_with_clipping(self):
        for precision in ("bf16-mixed", "16-mixed"):
            for manual in (False, True):
                theirs = self.module(self.theirs, manual)
                self.fit(theirs, precision=precision)
                for overlap in (False, True):
                    with self.subTest(precision=precision, manual=manual, overlap=overlap):
                        options = self.job() | {"job": f"{precision}-{manual}-{overlap}", "overlap": overlap}
                        module = self.module(lambda named: ballast.torch.AdamW(named, lr=3e-3, **options), manual)
                        self.fit(module, precision=precision)
                        # A weight that differs in its last bit may be another bf16 in the forward.
                        places = 3 if precision == "bf16-mixed" else PLACES
                        self.assert_same_losses(module.losses, theirs.losses, 3 * self.STEPS, places)

    def test_saves_and_goes_on(self):
        checkpoint = os.path.join(self.folder(), "checkpoint")
        first = self.module(self.ours)
        self.fit(first, 1).save_checkpoint(checkpoint)
        first.optimizer.close()
        second = self.module(self.ours)
        self.fit(second, checkpoint=checkpoint)
        whole = self.module(self.theirs)
        self.fit(whole)
        self.assert_same_losses(first.losses + second.losses, whole.losses, 3 * self.STEPS)

    def test_the_best_checkpoint_goes_on_and_the_service_has_those_of_the_trainer(self):
        from lightning.pytorch.callbacks import ModelCheckpoint
        job, saved = self.saving_service()
        folder = self.folder()

        def train(checkpoint=None):
            module = self.module(lambda parameters: ballast.torch.AdamW(parameters, lr=3e-3, **job))
            # One keeps the highest loss, which is the first; the other the lowest. An epoch has two steps.
            self.fit(module, 3, checkpoint, callbacks=[ballast.torch.LightningCallback(), *(
                ModelCheckpoint(folder, mode + "-{step}", monitor="loss", mode=mode, save_on_train_epoch_end=True)
                for mode in ("max", "min"))])
            self.assertEqual(sorted(path.name for path in pathlib.Path(folder).glob("*.ckpt")),
                             ["max-step=2.ckpt", "min-step=6.ckpt"])
            self.assertEqual(saved(), [2, self.STEPS])
            module.optimizer.close()
            return module

        whole = train()
        os.remove(os.path.join(folder, "min-step=6.ckpt"))  # By hand, which is seen at the next save.
        again = train(os.path.join(folder, "max-step=2.ckpt"))
        self.assertEqual(again.losses, whole.losses[6:])
        for name, weights in whole.state_dict().items():
            self.assertTrue(torch.equal(weights, again.state_dict()[name]), name)


if __name__ == "__main__":
    unittest.main()
