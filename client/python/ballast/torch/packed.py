"""State in fewer bytes, as a checkpoint has it: cpu_optimizer_service/common/packed/codes.h has the formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

GROUP = 64  # Consecutive elements of a parameter that have one scale.
_SHIFT = 20
# By plane: the threshold's exponent, and the largest code.
_CODES = {"exp_avg": (-15, 127), "exp_avg_sq": (-31, 255)}
SCALES = {f"{plane}_scale" for plane in _CODES}


def values_of(planes: Mapping[str, Mapping[str, torch.Tensor]], parameter: Mapping[str, Any], plane: str) -> torch.Tensor:
    """A plane of a parameter in fp32. `planes`: what is stored, by plane and parameter. `parameter`: the index's."""
    name, state = parameter["name"], parameter.get("state", "fp32")
    stored = planes[plane][name]
    if state == "fp32":
        return stored
    if plane == "master":
        remainder = planes["master_remainder"][name].to(torch.int32)
        return ((stored.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)
    if state == "bf16":
        return stored.to(torch.float32)
    scale = planes[f"{plane}_scale"][name].repeat_interleave(GROUP)[:stored.numel()].view(stored.shape)
    exponent, largest = _CODES[plane]
    threshold = torch.tensor(2.0 ** exponent)
    bits = threshold.view(torch.int32)
    whole = ((bits + (largest << _SHIFT)).view(torch.float32)) - threshold
    codes = stored.to(torch.int32)
    parts = ((codes.abs() << _SHIFT) + bits).view(torch.float32) - threshold
    values = parts * (1 / whole) * scale
    values = torch.where(codes < 0, -values, values)
    return torch.where(values.abs() <= 2.0 ** -126, torch.zeros_like(values), values)


def shape_of(parameter: Mapping[str, Any], plane: str) -> list[int]:
    """Of what is stored."""
    return [math.ceil(parameter["elements"] / GROUP)] if plane in SCALES else parameter["shape"]
