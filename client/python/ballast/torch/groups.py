"""Param groups with names, as the optimizers want them."""

from __future__ import annotations

from typing import Any

import torch


def groups(model: torch.nn.Module, weight_decay: float = 1e-2, **options: Any) -> list[dict[str, Any]]:
    """Two param groups of the model's trainable parameters, by name: matrices and what else has two or more
    dimensions, with weight_decay; biases and norms, with none. `options` go into both. A parameter that
    several modules share is there once.

    >>> ballast.torch.AdamW(ballast.torch.groups(model, weight_decay=0.1), lr=3e-4)
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [pair for pair in named if pair[1].dim() >= 2]
    others = [pair for pair in named if pair[1].dim() < 2]
    return [dict(options, params=pairs, weight_decay=decay)
            for pairs, decay in ((decayed, weight_decay), (others, 0.0)) if pairs]
