"""For Hugging Face's Trainer."""

from __future__ import annotations

import os

import transformers

from . import releasing


class TrainerCallback(transformers.TrainerCallback):
    """When the Trainer deletes a checkpoint (save_total_limit), deletes what the service saved for it. So the
    Trainer's checkpoints, including the best one, can be resumed, and no others are kept. A checkpoint that is moved
    out of output_dir counts as deleted. If the service has roles, this takes the role operator.

    >>> trainer = transformers.Trainer(model, arguments, callbacks=[ballast.torch.TrainerCallback()], ...)"""

    def on_save(self, args, state, control, optimizer=None, **_):
        # Its trials save elsewhere.
        if state.is_world_process_zero and not state.is_hyper_param_search:
            path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            releasing.saved([optimizer], args.output_dir, path)

    def on_train_end(self, args, state, control, optimizer=None, **_):
        if state.is_world_process_zero and not state.is_hyper_param_search:
            releasing.ended([optimizer], args.output_dir)
