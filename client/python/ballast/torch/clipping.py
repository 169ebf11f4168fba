"""Clipping of gradients that are on the service: the vote about a sealed step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..session import Norm


_CLIP = ("unscaling", "_coefficients", "_max_norm", "_clipped", "_abandoned")


def coefficient_of(max_norm: float, norm: float) -> float:
    """As in torch.nn.utils.clip_grad_norm_. NaN if the norm is NaN."""
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1 else coefficient


class Sealed:
    """A step whose gradients, of all ranks, are on the service, undecided. gradients: those still in .grad. Groups
    are numbered as in the job."""

    def __init__(self, norm: Norm, gradients: Sequence[torch.Tensor | None]):
        self.finite = math.isfinite(norm.norm)
        self.unscaling = 1.0  # A GradScaler's factor.
        self._norms = norm.group_norms
        self._coefficients = [1.0] * len(norm.group_norms)
        self._gradients = _versions(gradients)
        self._max_norm = 0.0  # The only clip's, if it covers everything.
        self._clipped = self._abandoned = False

    def norm(self, groups: Collection[int]) -> float:
        """The norm after the clips so far."""
        return math.hypot(*(self._norms[g] * self.unscaling * self._coefficients[g] for g in groups))

    def clip(self, groups: Collection[int], max_norm: float, norm: float | None = None) -> None:
        """norm: compared with max_norm, by default that of these groups. If other gradients' norm is not finite,
        this step is also skipped."""
        if math.isinf(max_norm) or not self.finite:
            return
        of_all = norm is None and len(groups) == len(self._norms)
        if norm is None:
            norm = self.norm(groups)
        if not math.isfinite(norm):
            self._abandoned = True
            return
        # The service itself can clip once, with the bits of max_norm=.
        self._max_norm = max_norm if of_all and not self._clipped else 0.0
        self._clipped = True
        for group in groups:
            self._coefficients[group] *= coefficient_of(max_norm, norm)

    def first_changed(self, gradients: Sequence[torch.Tensor | None]) -> int | None:
        """The first gradient that differs from the seal's."""
        pairs = enumerate(zip(self._gradients, _versions(gradients)))
        return next((index for index, (then, now) in pairs if then != now), None)

    def ballot(self) -> dict[str, Any]:
        """For Session.vote."""
        if self._abandoned:
            return {"apply": False}
        if self.unscaling == 1 and (self._max_norm or not self._clipped):
            return {"max_norm": self._max_norm}
        return {"multipliers": [coefficient * self.unscaling for coefficient in self._coefficients]}

    def clip_so_far(self) -> dict[str, Any]:
        """For follow(), on a joined rank."""
        return {name: getattr(self, name) for name in _CLIP}

    def follow(self, clip: dict[str, Any]) -> None:
        """Clips like another rank."""
        vars(self).update(clip)

    def coefficient(self) -> float:
        """The smallest factor."""
        return min(self._coefficients)


def _versions(gradients: Sequence[torch.Tensor | None]) -> list[tuple[int, int] | None]:
    return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]
