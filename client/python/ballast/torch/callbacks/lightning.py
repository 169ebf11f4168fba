"""For Lightning's Trainer."""

from __future__ import annotations

import functools
import os

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

from . import releasing


class LightningCallback(Callback):
    """When the Trainer deletes a checkpoint (save_top_k), deletes what the service saved for it. So the Trainer's
    checkpoints can be resumed, and no others are kept. A checkpoint that is moved elsewhere counts as deleted. If
    the service has roles, this takes the role operator.

    >>> trainer = lightning.Trainer(callbacks=[ModelCheckpoint(save_top_k=2, ...), ballast.torch.LightningCallback()])"""

    def setup(self, trainer, pl_module, stage):
        strategy = trainer.strategy
        if "save_checkpoint" in vars(strategy):  # From an earlier fit.
            return
        save = strategy.save_checkpoint

        # No hook gets a checkpoint's path.
        @functools.wraps(save)
        def saves(checkpoint, filepath, *more, **options):
            has_state = bool(checkpoint.get("optimizer_states"))
            save(checkpoint, filepath, *more, **options)
            # If the trainer saves in the background or to an object store, the file may be missing (yet).
            if has_state and trainer.is_global_zero and os.path.exists(filepath):
                releasing.saved(trainer.optimizers, _folder(trainer), filepath)

        strategy.save_checkpoint = saves

    def on_fit_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            releasing.ended(trainer.optimizers, _folder(trainer))


def _folder(trainer) -> str:
    first = trainer.checkpoint_callback
    return getattr(first, "dirpath", None) or trainer.default_root_dir
