"""Weights that return during the next forward pass. A guard blocks each parameter until its weights are there. So a
forward begins with the first layers while the last ones are still being updated."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import FailedPreconditionError
from . import boundaries, guard, streaming

_OWN_REFERENCES = 3  # The binding's list, the dictionary here, and the call that counts.


class ReturningWeights:
    """One optimizer's. parameters, names: of the trained ones, by their index in the job."""

    def __init__(self, parameters: Mapping[int, torch.Tensor], names: Mapping[int, str]):
        self.coming: set[int] = set()  # Parameters whose weights have not been taken.
        self._parameters = parameters
        # Parameters of one module, by their names: they are read one after the other, and each wait has a cost.
        of_module: dict[str, set[int]] = {}
        for index, name in names.items():
            of_module.setdefault(name.rpartition(".")[0] or name, set()).add(index)
        self._together = {index: indices for indices in of_module.values() for index in indices}
        self._held: list[int] = []
        self._take: Callable[[list[int], bool], None] | None = None
        self._lock = threading.RLock()
        self._forks = streaming._forks
        self._fsdp = _fsdp_of(parameters)

    def close(self) -> None:
        """The parameters do not change."""
        self.coming, self._take = set(), None
        for parameter in self._parameters.values():
            guard.remove(parameter)

    def begin(self, take: Callable[[list[int], bool], None], ours: Callable[[int], list[torch.Tensor]]) -> None:
        """A step is decided, and its weights are on their way. take: waits for those of these parameters, or for the
        end of the step, and reports here which `arrived`. ours: this optimizer's own tensors of a parameter's
        memory."""
        self._take, self.coming = take, set(self._parameters)
        self._held = [index for index, parameter in self._parameters.items()
                      if guard.put(parameter, self.wait, index, ours(index) + self._of_fsdp(index))]

    def take_held(self) -> None:
        """Waits for weights that could be read past their guards."""
        if self._held:
            self.wait(self._held)

    def wait(self, indices: Collection[int] | None = None) -> None:
        """Waits for the weights of these parameters, by default of all."""
        if self._forks != streaming._forks:
            if self.coming:
                raise FailedPreconditionError("this process is a fork of one whose weights were still coming; call "
                                              "wait_for_weights() before processes are started")
            return
        with self._lock:
            wanted = self.coming
            if indices is not None:
                wanted = wanted & set().union(*(self._together[index] for index in indices))
            if wanted:
                self._take(sorted(wanted), indices is None)
        if indices is None:
            self.arrived(self._parameters)

    def arrived(self, indices: Collection[int]) -> None:
        """These have their weights."""
        self.coming = self.coming.difference(indices)
        for index in indices:
            guard.remove(self._parameters[index])
        if not self.coming:
            self._take = None

    def has_readers(self) -> bool:
        """Whether any waiting parameter outlives the optimizer, which ends here."""
        return any(sys.getrefcount(self._parameters[index]) > _OWN_REFERENCES for index in self.coming)

    def _of_fsdp(self, index: int) -> list[torch.Tensor]:
        of_parameter = self._fsdp.get(index)
        of_parameter = None if of_parameter is None else of_parameter()
        return [] if of_parameter is None else [of_parameter._sharded_param_data]


def check_overlap_weights(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """ValueError if readers of the weights would not be noticed."""
    boundaries.attend()
    for name, parameter in named:
        guard.check(name, parameter)


def _fsdp_of(parameters: Mapping[int, torch.Tensor]) -> dict[int, weakref.ref[Any]]:
    """FSDP2's object for each: an FSDPParam."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    index_of = {id(parameter): index for index, parameter in parameters.items() if isinstance(parameter, DTensor)}
    if not index_of:
        return {}
    return {index_of[id(other.sharded_param)]: weakref.ref(other) for other in gc.get_objects()
            if type(other) is FSDPParam and id(other.sharded_param) in index_of}
