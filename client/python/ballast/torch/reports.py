"""What a trainer logs of a step, and how a rank spends its time, for people who look at the job."""

from __future__ import annotations

import re
import time
from numbers import Real
from typing import Any

import torch

from .places import local

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,64}")
_MOST_NUMBERS = 16


class Logged:
    """Numbers of the next step, by name. Tensors are copied on their device and read when they are sent, so a GPU is
    not awaited earlier."""

    def __init__(self):
        self._values: dict[str, Any] = {}

    def add(self, numbers: dict[str, Any]) -> None:
        """Adds all of them, or raises an error and adds none."""
        taken = {}
        for name, value in numbers.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"a logged number is called {name!r}; its name has 1 to 64 letters, digits, '.', '_', "
                                 "'/' and '-'")
            if torch.is_tensor(value):
                if local(value).numel() != 1:
                    raise ValueError(f"{name} is logged as a tensor of {local(value).numel()} elements, not of one; log "
                                     "its mean(), for example")
                if value.is_complex():
                    raise TypeError(f"{name} is logged as a tensor of complex numbers; log its abs(), for example")
                taken[name] = value
            elif isinstance(value, Real):  # Including numpy's.
                try:
                    taken[name] = float(value)
                except OverflowError as error:
                    raise ValueError(f"{name} is logged as a number that no float holds; log a smaller one") from error
            else:
                raise TypeError(f"{name} is logged as a {type(value).__name__}; log a number, or a tensor of one element")
        if len(self._values.keys() | taken.keys()) > _MOST_NUMBERS:
            raise ValueError(f"a step has at most {_MOST_NUMBERS} logged numbers")
        for name, value in taken.items():
            self._values[name] = local(value).detach().clone() if torch.is_tensor(value) else value

    def read(self) -> dict[str, float]:
        """Waits for the GPU if there are tensors of it."""
        return {name: float(value) for name, value in self._values.items()}

    def clear(self) -> None:
        self._values.clear()


class Clock:
    """How this rank spends its time: each lap is a part."""

    def __init__(self):
        self._at = time.perf_counter()
        self._parts = dict(compute=0.0, reduce=0.0, send=0.0, wait=0.0)

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[part] += now - self._at
        self._at = now

    def take(self) -> tuple[float, ...]:
        """The parts since the last call, in the order of `Session.report`."""
        parts = tuple(self._parts.values())
        self._parts = dict.fromkeys(self._parts, 0.0)
        return parts
