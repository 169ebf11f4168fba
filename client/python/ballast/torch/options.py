"""The optimizers' arguments beside torch's own."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist

from .._native import Services, services_of


@dataclasses.dataclass
class Options:
    """Named and explained as in AdamW. ValueError for invalid values, TypeError for a service that is no address."""

    service: Services | None  # A str from __post_init__ on.
    job: str | None
    max_norm: float | None
    update: str
    process_group: dist.ProcessGroup | None
    timeout: float
    reconnect_timeout: float
    full_state: bool | None
    overlap: bool
    overlap_weights: bool
    accumulation_steps: int | None
    module: torch.nn.Module | None
    keep_previous: bool
    on_abort: str
    on_write: str
    credentials: dict[str, str | None]

    def __post_init__(self):
        if self.max_norm is not None and not (math.isfinite(self.max_norm) and self.max_norm > 0):
            raise ValueError(f"Invalid max_norm value: {self.max_norm}")
        for name, choices in (("update", ("wait", "speculate")), ("on_abort", ("redo", "skip")),
                              ("on_write", ("error", "send"))):
            if getattr(self, name) not in choices:
                expected = " or ".join(map(repr, choices))
                raise ValueError(f"Invalid {name} value: {getattr(self, name)!r}; expected {expected}")
        if not self.reconnect_timeout > 0:
            raise ValueError(f"Invalid reconnect_timeout value: {self.reconnect_timeout}")
        if self.accumulation_steps is not None and self.accumulation_steps < 1:
            raise ValueError(f"Invalid accumulation_steps value: {self.accumulation_steps}")
        if self.service is not None:
            self.service = services_of(self.service)  # NODE stays.
            if self.job is None:
                raise ValueError("a job on a service needs a name: give job=")
        self.job, self.max_norm = self.job or "trainer", self.max_norm or 0.0
        if self.full_state is None:
            self.full_state = self.service is None
