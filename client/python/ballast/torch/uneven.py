"""Uneven inputs, in torch.distributed.algorithms.join.Join (ddp.join()).

There a rank without further input has joined. It shadows the collectives of DistributedDataParallel until all have
joined, and makes no more steps. Here each rank owns a part of the weights, so a joined rank takes part in the steps
of the others. Before each iteration Join counts the ranks with input by an all-reduce. There they also announce a
step. One of them sends its settings, and sends each joined rank its part of the gradients."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

_joins: list[Join] = []  # Entered and not ended.
_optimizers: list[weakref.ref] = []
_wrapped = _answers = False


@dataclasses.dataclass
class Call:
    """A call of a rank with input, which joined ranks repeat. of: the first parameter of its optimizer, by its index
    among the join's. attempts: see Steps.attempts. begun: the step has begun, with those settings. settings: the
    current ones. clip: of an already sealed step; otherwise `given` has the parameters with a gradient, by their
    index in the job."""

    what: str  # "bind", "seal", "step" or "undo".
    of: int = 0
    attempts: tuple[int, list[int]] | None = None
    begun: bool = False
    begun_with: Any = None
    settings: Any = None
    loss_scale: float = 1.0
    clip: dict[str, Any] | None = None
    given: list[int] = dataclasses.field(default_factory=list)


def register(optimizer: Any) -> None:
    """Answers the calls of the same optimizer on other ranks. Of several over one parameter the last one answers."""
    global _wrapped
    _optimizers[:] = [each for each in _optimizers if each() is not None] + [weakref.ref(optimizer)]
    if not _wrapped:
        _wrapped = True
        Join.__enter__, Join.__exit__ = _enter(Join.__enter__), _exit(Join.__exit__)
        Join._get_num_nonjoined_procs = _count(Join._get_num_nonjoined_procs)


def call(parameters: Iterable[torch.Tensor], call_of: Callable[[], Call], gradients: Mapping[int, torch.Tensor] = {},
         places: Any = None) -> None:
    """In a join: makes joined ranks do the same. Called by all ranks that have not joined. gradients: by index in
    the job, for a call without a clip."""
    join, index = _join_of(parameters)
    if join is None or _answers:
        return
    group, ranks = join._process_group, dist.get_world_size(join._process_group)
    told = torch.full((1,), ranks + 1.0, device=join._device)
    dist.all_reduce(told, group=group)
    present = _present(told.item(), ranks)
    if present == ranks:
        return
    ours = dataclasses.replace(call_of(), of=index, given=sorted(gradients))
    calls = _exchanged(ours, group, ranks)
    if next(rank for rank, said in enumerate(calls) if said is not None) == join._rank:
        for rank in (rank for rank, said in enumerate(calls) if said is None):
            for parts in _parts(gradients, places, rank):
                flat = torch.cat([gradients[index].reshape(-1)[begin:end] for index, begin, end in parts])
                dist.send(flat.to(join._device), dist.get_global_rank(group or dist.group.WORLD, rank), group=group)


def is_joined(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether ranks with these parameters may have joined."""
    return _join_of(parameters)[0] is not None


def _present(told: float, ranks: int) -> int:
    """The number of ranks in a call of an optimizer; 0: none."""
    present, others = divmod(int(told), ranks + 1)
    if present and others:
        raise RuntimeError(f"{present} ranks are in the step of an optimizer, and {others} in a forward: in a join all "
                           "ranks that have input must make the same calls")
    return present


def _exchanged(ours: Any, group: Any, ranks: int) -> list[Any]:
    """By rank."""
    of_all: list[Any] = [None] * ranks
    dist.all_gather_object(of_all, ours, group=group)
    return of_all


def _parts(tensors: Mapping[int, torch.Tensor], places: Any, rank: int) -> list[list[tuple[int, int, int]]]:
    """By dtype, the rank's part of these: index, begin and end."""
    of_dtypes: dict[torch.dtype, list[tuple[int, int, int]]] = {}
    for index in sorted(tensors):
        begin, end = places.own_range(index, rank)
        if begin < end:
            of_dtypes.setdefault(tensors[index].dtype, []).append((index, begin, end))
    return list(of_dtypes.values())


def _receive(join: Join, source: int, parameters: Mapping[int, torch.Tensor], places: Any) -> dict[int, torch.Tensor]:
    """Gradients of these parameters. Only this rank's part has been written."""
    received = {index: torch.empty_like(parameter, memory_format=torch.contiguous_format)
                for index, parameter in parameters.items()}
    group = join._process_group
    for parts in _parts(parameters, places, join._rank):
        flat = torch.empty(sum(end - begin for _, begin, end in parts), dtype=parameters[parts[0][0]].dtype,
                           device=join._device)
        dist.recv(flat, dist.get_global_rank(group or dist.group.WORLD, source), group=group)
        for (index, begin, end), part in zip(parts, flat.split([end - begin for _, begin, end in parts])):
            received[index].view(-1)[begin:end] = part
    return received


# ------------------------------------------------------------ in Join

def _parameters_of(join: Join) -> list[torch.Tensor]:
    return [parameter for joinable in join._joinables if isinstance(joinable, DistributedDataParallel)
            for parameter in joinable.parameters()]


def _join_of(parameters: Iterable[torch.Tensor]) -> tuple[Join | None, int]:
    """The join that trains these, and the index of their first there."""
    ours = {id(parameter) for parameter in parameters} if _joins else set()
    for join in _joins:
        for index, parameter in enumerate(_parameters_of(join)):
            if id(parameter) in ours:
                return join, index
    return None, 0


def _optimizers_of(join: Join) -> list[Any]:
    living = [optimizer for each in _optimizers if (optimizer := each()) is not None]
    return [optimizer for optimizer in living if _join_of(optimizer._parameters())[0] is join]


def _enter(original):
    @functools.wraps(original)
    def __enter__(self):
        entered = original(self)
        if self._enable:
            _joins.append(self)
        return entered

    return __enter__


def _exit(original):
    @functools.wraps(original)
    def __exit__(self, *error):
        try:
            return original(self, *error)
        finally:
            if self in _joins:
                _joins.remove(self)

    return __exit__


def _count(original):
    """On a joined rank."""
    @functools.wraps(original)
    def _get_num_nonjoined_procs(self):
        ranks = dist.get_world_size(self._process_group)
        while _present(number := original(self), ranks):
            _answer(self, ranks)
        bound = {_join_of(optimizer._parameters())[1]: optimizer._binding.steps for optimizer in _optimizers_of(self)
                 if optimizer._binding is not None}
        for steps in bound.values():
            steps.end_shadow()
        if number == 0 and bound:  # All have joined.
            ours = {of: steps.attempts(at_end=True) for of, steps in bound.items()}
            of_all = _exchanged(ours, self._process_group, ranks)
            for of, steps in bound.items():
                steps.end_join([attempts[of] for attempts in of_all if of in attempts])
        return number

    return _get_num_nonjoined_procs


@torch.no_grad()
def _answer(join: Join, ranks: int) -> None:
    global _answers
    calls = _exchanged(None, join._process_group, ranks)
    source, said = next((rank, said) for rank, said in enumerate(calls) if said is not None)
    found = [optimizer for optimizer in _optimizers_of(join) if _join_of(optimizer._parameters())[1] == said.of]
    if not found:
        raise RuntimeError("ranks that have input make a step of an optimizer that this rank, which has joined, does not "
                           "have any more: keep it until the join ends")
    _answers = True
    try:
        found[-1]._shadow(said, functools.partial(_receive, join, source))
    finally:
        _answers = False
