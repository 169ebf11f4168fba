"""The optimizers' arguments beside torch's own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist

from .._native import Services, services_of


@dataclasses.dataclass
class Options:
    """Named and explained as in AdamW. ValueError for invalid values, TypeError for a service that is no address."""

    service: Services | None = None  # A str from __post_init__ on.
    job: str | None = None
    max_norm: float | None = None
    update: str = "wait"
    process_group: dist.ProcessGroup | None = None
    timeout: float = 600.0
    reconnect_timeout: float = 60.0
    full_state: bool | None = None
    overlap: bool = False
    overlap_weights: bool = False
    accumulation_steps: int | None = None
    module: torch.nn.Module | None = None
    keep_previous: bool = False
    on_abort: str = "redo"
    on_write: str = "error"
    newton_schulz: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    token_file: str | None = None

    def __post_init__(self):
        if self.max_norm is not None and not (math.isfinite(self.max_norm) and self.max_norm > 0):
            raise ValueError(f"Invalid max_norm value: {self.max_norm}")
        for name, choices in (("update", ("wait", "speculate")), ("on_abort", ("redo", "skip")),
                              ("on_write", ("error", "send"))):
            if getattr(self, name) not in choices:
                expected = " or ".join(map(repr, choices))
                raise ValueError(f"Invalid {name} value: {getattr(self, name)!r}; expected {expected}")
        if self.newton_schulz not in (None, "service", "workers"):
            raise ValueError(f"Invalid newton_schulz value: {self.newton_schulz!r}; expected 'service', 'workers' or None")
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

    @property
    def credentials(self) -> dict[str, str | None]:
        return {name: getattr(self, name) for name in ("tls_ca", "tls_cert", "tls_key", "token_file")}


def options_of(optimizer: str, given: dict[str, Any]) -> Options:
    """TypeError for an argument that neither torch's optimizer nor Options has."""
    names = {field.name for field in dataclasses.fields(Options)}
    for name in given:
        if name not in names:
            raise TypeError(f"{optimizer}() has no argument {name!r}; beside torch's it has {', '.join(sorted(names))}")
    return Options(**given)
