"""`optimizer.state[parameter]`: read from the service on access. Changes are written there before the next step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .places import local

_MOVES = "lightning_utilities.core.apply_func"  # Moves all of a state to a device.
_LOADS = "torch.distributed.checkpoint.state_dict"  # It finds this also before there is a job.


class ParameterState(dict):
    """A parameter's state: `step`, and the planes of its group, as in torch.optim. It holds `step` and the planes
    that were read or put here; to its users it has all. read(plane): from the service; None while there is no job."""

    def __init__(self, *values: Any, **named: Any):
        super().__init__(*values, **named)
        self._planes: tuple[str, ...] = ()
        self._read: Callable[[str], torch.Tensor] | None = None
        self._told: tuple[torch.Tensor, int] | None = None  # The tensor that `step` was, and its version.
        self._handed: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # Planes that were read, and their contents.

    @property
    def is_bound(self) -> bool:
        return self._read is not None

    def bind(self, planes: Iterable[str], read: Callable[[str], torch.Tensor] | None) -> None:
        self._planes, self._read = tuple(planes), read

    # ------------------------------------------------------------ a mapping

    def __missing__(self, key: str) -> torch.Tensor:
        if self._read is None:
            raise KeyError(f"{key} does not exist before the optimizer's first step or attach()")
        if key not in self._planes or super().__len__() == 0:  # It was cleared.
            raise KeyError(key)
        value = self._read(key)
        super().__setitem__(key, value)
        self._handed[key] = value, value.clone()
        return value

    def _all(self) -> list[str]:
        there = list(super().__iter__())
        asks = sys._getframe(2).f_globals.get("__name__")
        if not there or asks == _MOVES or (self._read is None and asks != _LOADS):
            return there
        return there + [plane for plane in self._planes if not super(ParameterState, self).__contains__(plane)]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (self._read is not None and super().__len__() > 0 and key in self._planes)

    def __iter__(self):
        return iter(self._all())

    def __len__(self) -> int:
        there = super().__len__()
        return there if self._read is None or there == 0 else len(self._all())

    def keys(self):
        return self._all()

    def values(self):
        return [self[key] for key in self._all()]

    def items(self):
        return [(key, self[key]) for key in self._all()]

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def here(self) -> dict[str, Any]:
        """Without what only the service has."""
        return {key: super(ParameterState, self).__getitem__(key) for key in super().__iter__()}

    def __reduce__(self):
        return dict, (self.here(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: value.clone() if torch.is_tensor(value) else value for key, value in self.here().items()}

    # ------------------------------------------------------------ what was changed

    def tell(self, step: int) -> list[Handed]:
        """The service has this step, so planes that were read are outdated. Returns the old contents."""
        value = dict.get(self, "step")
        if not torch.is_tensor(value) or value.numel() != 1:
            value = torch.tensor(0.0)
            super().__setitem__("step", value)
        value.fill_(step)
        self._told = value, value._version
        if super().__len__() == 1:
            return []
        old = [Handed(plane, value) for plane, (value, _) in self._handed.items()]
        for plane in self._planes:
            self.pop(plane, None)
        self._handed.clear()
        return old

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has changed, by a cheap check."""
        value = dict.get(self, "step")
        return super().__len__() == 1 and self._told is not None and value is self._told[0] and \
            value._version == self._told[1]

    def changes(self, step: int) -> tuple[dict[str, torch.Tensor | float], int | None]:
        """Planes that were changed since they were read or put here; and `step`, unless it is this one. As in
        torch.optim.SGD, a momentum_buffer of None makes the next update a first one."""
        if "momentum_buffer" in self._planes and dict.get(self, "momentum_buffer", self) is None:
            return {"momentum_buffer": 0.0}, 0
        planes = {}
        for plane in self._planes:
            value = dict.get(self, plane)
            if value is None:
                continue
            read, before = self._handed.get(plane, (None, None))
            if value is not read or not torch.equal(local(value), local(before)):
                planes[plane] = value
        now = dict.get(self, "step")
        return planes, None if now is None or int(now) == step else int(now)


class Handed:
    """A plane that was read before a step: later writes to it would be lost."""

    def __init__(self, plane: str, value: torch.Tensor):
        self.plane, self._value, self._version = plane, weakref.ref(value), value._version

    @property
    def is_written(self) -> bool:
        value = self._value()
        return value is not None and value._version != self._version

    @property
    def is_gone(self) -> bool:
        return self._value() is None
