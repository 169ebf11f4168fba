"""Detects other writes of the weights, which the service would not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from .places import local

_SAMPLES = 16  # The number of compared elements of a parameter, about.


class Watch:
    """Watches parameters whose weights the service has. Autograd counts writes to a parameter, and the address shows
    replaced memory. A write to `.data` leaves no trace, so some elements are compared; with `exact` all, with a copy
    of them."""

    def __init__(self, parameters: Sequence[torch.Tensor], exact: bool = False):
        self._parameters = parameters
        self._copies: list[torch.Tensor | None] | None = [None] * len(parameters) if exact else None
        self._seen: list[tuple[int, int] | None] = [None] * len(parameters)
        self._samples: list[Samples] = []
        self._kept: dict[int, Samples] = {}
        self.remember()

    def remember(self, indices: Sequence[int] | None = None) -> None:
        """The weights of these, by default of all, are correct now."""
        moved = False
        if self._copies is not None:
            return self._copy(range(len(self._parameters)) if indices is None else indices)
        for index in range(len(self._parameters)) if indices is None else indices:
            now = _seen(self._parameters[index])
            moved = moved or self._seen[index] is None or now[1] != self._seen[index][1]
            self._seen[index] = now
        if moved:
            self._sample()
        elif indices is None:
            for samples in self._samples:
                samples.keep()
        else:
            for index in indices:
                if index in self._kept:
                    self._kept[index].keep_one(index)

    def changed(self) -> list[int]:
        """Parameters with writes that autograd counts, or with other memory, since then."""
        return [index for index, parameter in enumerate(self._parameters)
                if parameter.requires_grad and _seen(parameter) != self._seen[index]]

    def views_of(self, index: int) -> list[torch.Tensor]:
        """Its tensors of the parameter's memory."""
        return [self._kept[index].view_of(index)] if index in self._kept else []

    def _copy(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._seen[index] = _seen(self._parameters[index])
            here, copy = local(self._parameters[index]), self._copies[index]
            if copy is None or copy.shape != here.shape or copy.device != here.device:
                self._copies[index] = here.clone()
            else:
                copy.copy_(here)

    def written(self) -> list[int]:
        """Parameters with any changed element, if it is exact."""
        return [] if self._copies is None else [
            index for index, parameter in enumerate(self._parameters)
            if parameter.requires_grad and not torch.equal(local(parameter), self._copies[index])]

    def first_written(self) -> int | None:
        """A parameter whose elements have changed, by any write. On a GPU this waits for it."""
        if self._copies is not None:
            return next(iter(self.written()), None)
        for samples in self._samples:
            for index in samples.changed():
                if self._parameters[index].requires_grad:
                    return index
        return None

    def _sample(self) -> None:
        self._samples = sampled({index: parameter for index, parameter in enumerate(self._parameters)
                                 if parameter.requires_grad})
        self._kept = {index: samples for samples in self._samples for index in samples.places}


def sampled(tensors: Mapping[int, torch.Tensor]) -> list[Samples]:
    """Some elements of each."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for index, tensor in tensors.items():
        here = local(tensor)
        if here.is_contiguous() and here.numel() > 0:
            few = here.view(-1)[::max(here.numel() // _SAMPLES, 1)]
            kinds.setdefault((here.device, here.dtype), {})[index] = few
    return [Samples(views) for views in kinds.values()]


class Samples:
    """Samples of tensors of one kind, as one tensor. views: of their memory, by index."""

    def __init__(self, views: dict[int, torch.Tensor]):
        self._views = views
        self.places: dict[int, slice] = {}
        end = 0
        for index, view in views.items():
            self.places[index] = slice(end, end + view.numel())
            end += view.numel()
        self._values = torch.cat(list(views.values()))

    def keep(self) -> None:
        torch.cat(list(self._views.values()), out=self._values)

    def keep_one(self, index: int) -> None:
        self._values[self.places[index]] = self._views[index]

    def view_of(self, index: int) -> torch.Tensor:
        return self._views[index]

    def changed(self) -> list[int]:
        now = _bits(torch.cat(list(self._views.values())))
        then = _bits(self._values)
        if torch.equal(now, then):
            return []
        return [index for index, place in self.places.items() if not torch.equal(now[place], then[place])]


def _bits(values: torch.Tensor) -> torch.Tensor:
    """As integers: unlike NaNs they are equal to themselves."""
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


def _seen(parameter: torch.Tensor) -> tuple[int, int]:
    """Changes when the parameter is written in a way that autograd counts, or gets other memory; the memory is the
    last part."""
    if isinstance(parameter, DTensor):
        return parameter._version + parameter._local_tensor._version, parameter._local_tensor.data_ptr()
    return parameter._version, parameter.data_ptr()
