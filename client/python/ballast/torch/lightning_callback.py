"""For the Trainer of Lightning."""

from __future__ import annotations

import functools

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

from . import releasing


class LightningCallback(Callback):
    """Deletes on the service what it has saved for checkpoints that the Trainer has deleted (save_top_k): those that
    the Trainer has can be resumed, and no others are kept. A checkpoint that is moved elsewhere counts as deleted. Where
    the service has roles, this takes the role operator.

    >>> trainer = lightning.Trainer(callbacks=[ModelCheckpoint(save_top_k=2, ...), ballast.torch.LightningCallback()])"""

    def setup(self, trainer, pl_module, stage):
        strategy = trainer.strategy
        if "save_checkpoint" in vars(strategy):  # Of an earlier fit.
            return
        save = strategy.save_checkpoint

        # No hook is told where a checkpoint is.
        @functools.wraps(save)
        def saves(checkpoint, filepath, *more, **options):
            has_state = bool(checkpoint.get("optimizer_states"))
            save(checkpoint, filepath, *more, **options)
            if has_state and trainer.is_global_zero:
                releasing.saved(trainer.optimizers, _folder(trainer), filepath)

        strategy.save_checkpoint = saves

    def on_fit_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            releasing.ended(trainer.optimizers, _folder(trainer))


def _folder(trainer) -> str:
    first = trainer.checkpoint_callback
    return getattr(first, "dirpath", None) or trainer.default_root_dir
