"""The second round of Muon's steps on the ranks' devices: matrices from their pieces, Newton-Schulz, pieces again."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from ..session import HyperParameters, Session
from .peers import Peers
from .places import Flats, Shards, local

# Elements of the matrices that ranks exchange at once, of all ranks together.
_BATCH_ELEMENTS = 1 << 27


def newton_schulz(direction: torch.Tensor, coefficients: tuple[float, float, float], steps: int,
                  eps: float) -> torch.Tensor:
    """torch.optim.Muon's iteration, in bf16: x = a * x + (b * g + c * g @ g) @ x, where g = x @ x.T, from x with a norm
    of at most 1."""
    a, b, c = coefficients
    is_tall = direction.shape[0] > direction.shape[1]
    x = direction.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class _Piece(NamedTuple):
    """A rank's elements of a matrix: of rows and columns from here on, or, without columns, of its flat elements."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """The view of them."""
        if len(self.begin) == 1:
            return matrix.view(-1)[self.begin[0]:self.end[0]]
        return matrix[self.begin[0]:self.end[0], self.begin[1]:self.end[1]]

    def numel(self) -> int:
        return math.prod(end - begin for begin, end in zip(self.begin, self.end))


class Orthogonalizer:
    """Of the matrices of a job with newton_schulz "workers". `values`: see run. Each matrix is made by one rank.
    indices: of the matrices in the job; groups: of the job, by them. ranks: the job's, with torch's numbers in the
    world."""

    def __init__(self, indices: list[int], groups: list[int], parameters: list[torch.Tensor], places: Flats | Shards,
                 peers: Peers | None, ranks: list[int], rank: int, process_group):
        self._groups = groups
        self._shapes = [tuple(parameters[index].shape) for index in indices]
        self._device = local(parameters[indices[0]]).device
        self._peers, self._rank, self._process_group = peers, rank, process_group
        own = [_piece_of(parameters[index], places, index, rank) for index in indices]
        if peers is None:
            self._pieces = [own]
        else:  # Boxes of other ranks are theirs to say.
            self._pieces = [[_Piece(*map(tuple, piece)) for piece in of_rank]
                            for of_rank in peers.gather("pieces of matrices", own)]
        # all_to_all has the group's order of ranks, which need not be the job's.
        self._order = [0] if peers is None else sorted(
            range(len(ranks)), key=lambda number: dist.get_group_rank(process_group or dist.group.WORLD, ranks[number]))
        self._owners = self._balance(len(ranks))
        elements = [piece.numel() for piece in own]
        self._host = torch.zeros(1 + sum(elements), dtype=torch.bfloat16, pin_memory=self._device.type == "cuda")
        self._views = list(self._host[1:].split(elements))
        # The session takes the address of the first of all elements where a rank has a range of the flat ones.
        self._addresses: list[int | None] = [None] * len(parameters)
        address = self._host.data_ptr() + self._host.element_size()
        for index, piece in zip(indices, own):
            self._addresses[index] = address - (piece.begin[0] * self._host.element_size() if len(piece.begin) == 1 else 0)
            address += piece.numel() * self._host.element_size()

    def run(self, session: Session | None) -> None:
        """All ranks, once a step is decided and applied: gives what they have orthogonalized. Also without a session in
        the round, or if an operator ends it meanwhile: others may be in the exchange."""
        values = [] if session is None else session.read_directions(self._addresses)
        for batch in self._batches():
            self._run(batch, values)
        if values:
            session.give_orthogonal(self._addresses)

    def _batches(self) -> Iterator[list[int]]:
        """Places in the list of matrices: the same on all ranks."""
        batch, elements = [], 0
        for place, (rows, columns) in enumerate(self._shapes):
            if batch and elements + rows * columns > _BATCH_ELEMENTS:
                yield batch
                batch, elements = [], 0
            batch.append(place)
            elements += rows * columns
        yield batch

    def _run(self, batch: list[int], values: list[HyperParameters]) -> None:
        """values: by group of the job; empty: no O counts."""
        own = [place for place in batch if self._owners[place] == self._rank]
        matrices = {place: torch.empty(self._shapes[place], dtype=torch.bfloat16, device=self._device) for place in own}
        # By rank, in the order of all_to_all.
        to_owners = [[place for place in batch if self._owners[place] == rank] for rank in self._order]
        mine = self._pieces[self._rank]
        given = [torch.cat([self._views[place] for place in places]) if places else self._host[:0]
                 for places in to_owners]
        pieces = [[(place, self._pieces[rank][place]) for place in own] for rank in self._order]
        got = self._exchange(given, [sum(piece.numel() for _, piece in of_rank) for of_rank in pieces])
        for of_rank, values_of_rank in zip(pieces, got):
            for (place, piece), part in zip(of_rank, values_of_rank.split([piece.numel() for _, piece in of_rank])):
                view = piece.of(matrices[place])
                view.copy_(part.view(view.shape))
        for place in own if values else []:
            value = values[self._groups[place]]
            matrices[place] = newton_schulz(matrices[place], value.ns_coefficients, value.ns_steps, value.eps).contiguous()
        back = self._exchange([torch.cat([piece.of(matrices[place]).reshape(-1) for place, piece in of_rank])
                               if of_rank else self._host[:0] for of_rank in pieces],
                              [sum(mine[place].numel() for place in places) for places in to_owners])
        for places, values_of_rank in zip(to_owners, back):
            for place, part in zip(places, values_of_rank.split([mine[place].numel() for place in places])):
                self._views[place].copy_(part)

    def _exchange(self, given: list[torch.Tensor], elements: list[int]) -> list[torch.Tensor]:
        """To each rank its part, and from each rank so many elements."""
        sent = torch.cat(given).to(self._device)
        if self._peers is None:
            return [sent]
        got = torch.empty(sum(elements), dtype=torch.bfloat16, device=self._device)
        # As bytes, which every backend moves.
        dist.all_to_all_single(got.view(torch.uint8), sent.view(torch.uint8), [2 * count for count in elements],
                               [2 * part.numel() for part in given], group=self._process_group)
        return list(got.split(elements))

    def _balance(self, ranks: int) -> list[int]:
        """By matrix, the rank that makes it: the one with the least work so far, the largest matrices first."""
        heap, owners = [(0, rank) for rank in range(ranks)], [0] * len(self._shapes)

        def cost(place: int) -> int:
            rows, columns = self._shapes[place]
            return min(rows, columns) ** 2 * max(rows, columns)

        for place in sorted(range(len(self._shapes)), key=lambda place: (-cost(place), place)):
            work, owners[place] = heap[0]
            heapq.heapreplace(heap, (work + cost(place), owners[place]))
        return owners


def _piece_of(parameter: torch.Tensor, places: Flats | Shards, index: int, rank: int) -> _Piece:
    """What this rank owns."""
    if isinstance(places, Flats):
        begin, end = places.own_range(index, rank)
        return _Piece((begin,), (end,))
    if not places.owned[index]:
        return _Piece((0, 0), (0, 0))
    begin, end = [0, 0], list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):  # As torch.chunk.
                cut = placement.dim % parameter.ndim
                each = -(-(end[cut] - begin[cut]) // mesh.size(dim))
                first = min(begin[cut] + each * mesh.get_local_rank(dim), end[cut])
                begin[cut], end[cut] = first, min(first + each, end[cut])
    if [last - first for first, last in zip(begin, end)] != list(local(parameter).shape):
        raise RuntimeError(f"this rank's part of a matrix has shape {tuple(local(parameter).shape)}, and its placements "
                           f"{parameter.placements} say otherwise; please report this")
    return _Piece(tuple(begin), tuple(end))
