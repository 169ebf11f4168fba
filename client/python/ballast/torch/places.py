"""Where a rank's weights are, and how the other ranks get them."""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

_PIECE_BYTES = 64 << 20  # Bytes of weights that ranks gather from each other at once.
_BLOCK_ELEMENTS = 256  # In the service's layout without a mesh a rank owns whole blocks.


def here_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The same, outside autograd."""
    return here_of(tensor).detach()


class Shards:
    """Each rank has its shards of the parameters, or all of them if it is the only one. If parameters are contiguous
    and in host memory, the session writes to them; otherwise to a copy in host memory. One replica of each parameter
    is the owner (_owners); the other replicas get the weights from it.

    placements: by parameter; None for one that is whole on every rank. trained: by parameter, from the job; a
    trainer may freeze some."""

    def __init__(self, parameters: list[torch.Tensor], mesh, placements: list[tuple[int | None, ...] | None],
                 trained: list[bool]):
        self.parameters, self.mesh = parameters, mesh
        owners = _owners(mesh, parameters, placements, trained)
        self.owned = [owner is None or all(at in (None, here) for at, here in zip(owner, mesh.get_coordinate()))
                      for owner in owners]
        self._written = [is_trained and owned for is_trained, owned in zip(trained, self.owned)]
        self.places = [local(p) if _is_plain(local(p)) else torch.empty(local(p).shape, dtype=p.dtype)
                       for p in parameters]
        self._addresses = [place.data_ptr() for place in self.places]
        self._replicas: dict[tuple, list[int]] = {}
        for index, of in enumerate(placements):
            if not trained[index] or of is None:
                continue
            if any(mesh.size(d) > 1 for d, cut in enumerate(of) if cut is None) and local(parameters[index]).numel() > 0:
                key = (owners[index], parameters[index].dtype, local(parameters[index]).device)
                self._replicas.setdefault(key, []).append(index)

    @property
    def together(self) -> bool:
        """Whether all ranks must deliver at the same time."""
        return bool(self._replicas)

    def own_range(self, index: int) -> tuple[int, int]:
        """The elements that this rank owns in its part of the parameter: [begin, end), possibly empty."""
        return 0, local(self.parameters[index]).numel() if self.owned[index] else 0

    def deliver(self) -> None:
        """Puts the weights that the session has written into all parameters, and notifies autograd."""
        self.notify()
        for index, here in self.elsewhere().items():
            here.copy_(self.places[index])
        for (owner, _, _), members in self._replicas.items():
            self._broadcast(owner, members)

    def notify(self) -> None:
        """Tells autograd that its saved tensors have old weights."""
        written = [parameter for parameter, is_written in zip(self.parameters, self._written) if is_written]
        torch.autograd.graph.increment_version(
            written + [parameter._local_tensor for parameter in written if isinstance(parameter, DTensor)])

    def elsewhere(self) -> dict[int, torch.Tensor]:
        """This rank's parts of the parameters to whose memory the session does not write."""
        return {index: local(parameter) for index, parameter in enumerate(self.parameters)
                if self._written[index] and here_of(parameter).data_ptr() != self._addresses[index]}

    def _broadcast(self, owner: tuple[int | None, ...], members: list[int]) -> None:
        # After the last dimension all have the owner's weights: on the way ranks pass on what they have so far.
        here = [local(self.parameters[index]) for index in members]
        flat = torch.cat([tensor.reshape(-1) for tensor in here]).to(self.mesh.device_type)
        for dim, at in enumerate(owner):
            if at is not None and self.mesh.size(dim) > 1:
                # Not the group's order of ranks, which need not be the mesh's.
                source = list(self.mesh.get_coordinate())
                source[dim] = at
                dist.broadcast(flat, int(self.mesh.mesh[tuple(source)]), group=self.mesh.get_group(dim))
        begin = 0
        for index, tensor in zip(members, here):
            if not self.owned[index]:
                tensor.copy_(flat[begin:begin + tensor.numel()].view(tensor.shape))
            begin += tensor.numel()

    def keep(self, index: int) -> None:
        """The parameter has the delivered weights."""
        here, place = local(self.parameters[index]), self.places[index]
        if here.data_ptr() != place.data_ptr():
            place.copy_(here)

    def same(self, index: int) -> bool | None:
        """Whether the parameter has the delivered weights. None: only reading them again shows it. For another
        rank's replica, that rank answers."""
        if not self.owned[index]:
            return True
        here, place = local(self.parameters[index]), self.places[index]
        if here.data_ptr() == place.data_ptr():
            return None
        return torch.equal(here.cpu(), place)


class Flats:
    """Each rank has all parameters, and gets a part of each group's flat space from the service. The ranks gather
    the weights from each other. members: by group of the job, the indices of its trainable parameters."""

    def __init__(self, parameters: list[torch.Tensor], members: list[list[int]], group_of_ranks):
        self.parameters, self._group = parameters, group_of_ranks
        self.owned = [True] * len(parameters)
        self.places = [parameter.detach() for parameter in parameters]  # The frozen ones stay there.
        self._flats = []
        self._rank, self._ranks = dist.get_rank(group_of_ranks), dist.get_world_size(group_of_ranks)
        for of_group in members:
            if not of_group:
                continue
            flat = _Flat(of_group, parameters, self._ranks)
            self._flats.append(flat)
            for index in of_group:
                self.places[index] = flat.view(index)

    together = True

    def deliver(self) -> None:
        for flat in self._flats:
            self._gather(flat, self.parameters[flat.members[0]].device)

    def _gather(self, flat: _Flat, device: torch.device) -> None:
        """The ranks' parts of the flat space, piece by piece, without another copy of all."""
        elsewhere = set()
        most = min(max(_PIECE_BYTES // flat.memory.element_size() // self._ranks, 1), flat.shard_elements)
        everything = torch.empty(self._ranks * most, dtype=flat.memory.dtype, device=device)
        for begin in range(0, flat.shard_elements, most or 1):
            elements = min(most, flat.shard_elements - begin)
            own = flat.shard(self._rank)[begin:begin + elements].to(device)
            of_all = everything[:self._ranks * elements]
            dist.all_gather_into_tensor(of_all, own, group=self._group)
            for rank in range(self._ranks):
                here = of_all[rank * elements:(rank + 1) * elements]
                for index, at, piece in flat.parts(rank * flat.shard_elements + begin, here):
                    to = self.parameters[index].detach()
                    if not to.is_contiguous():
                        elsewhere.add(index)
                        to = flat.view(index)
                    to.view(-1)[at:at + piece.numel()].copy_(piece)
        for index in elsewhere:
            self.parameters[index].detach().copy_(flat.view(index))

    def own_range(self, index: int, rank: int | None = None) -> tuple[int, int]:
        """As Shards.own_range. rank: whose range."""
        flat = next(flat for flat in self._flats if index in flat.begins)
        first = (self._rank if rank is None else rank) * flat.shard_elements
        begin = max(first - flat.begins[index], 0)
        end = min(first + flat.shard_elements - flat.begins[index], self.parameters[index].numel())
        return (begin, end) if begin < end else (0, 0)

    def keep(self, index: int) -> None:
        """As Shards.keep."""
        self.places[index].copy_(self.parameters[index].detach())

    def same(self, index: int) -> bool:
        """As Shards.same, for what this rank got from the service: other ranks check the rest."""
        begin, end = self.own_range(index)
        here = self.parameters[index].detach().reshape(-1)[begin:end].cpu()
        return torch.equal(here, self.places[index].reshape(-1)[begin:end])


class _Flat:
    """A group's flat space in host memory, with an equal part for every rank."""

    def __init__(self, members: list[int], parameters: list[torch.Tensor], world_size: int):
        self.members, self._shapes = members, {index: parameters[index].shape for index in members}
        self.begins, elements = {}, 0
        for index in members:
            self.begins[index] = elements
            elements += parameters[index].numel()
        self._starts = list(self.begins.values())
        row = world_size * _BLOCK_ELEMENTS
        self.shard_elements = -(-elements // row) * _BLOCK_ELEMENTS
        self.memory = torch.zeros(world_size * self.shard_elements, dtype=parameters[members[0]].dtype)

    def view(self, index: int) -> torch.Tensor:
        shape = self._shapes[index]
        return self.memory[self.begins[index]:self.begins[index] + shape.numel()].view(shape)

    def parts(self, begin: int, values: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Splits values that begin there by parameter: its index, the position in it, and the values."""
        first = bisect.bisect_right(self._starts, begin) - 1
        for index in self.members[max(first, 0):]:
            start = self.begins[index]
            if start >= begin + values.numel():
                return
            low = max(start, begin)
            high = min(start + self._shapes[index].numel(), begin + values.numel())
            if low < high:
                yield index, low - start, values[low - begin:high - begin]

    def shard(self, rank: int) -> torch.Tensor:
        return self.memory[rank * self.shard_elements:(rank + 1) * self.shard_elements]


def mesh_of(names: list[str], parameters: list[torch.Tensor]):
    """The mesh of the DTensors, or None. ValueError if there are several."""
    mesh = first = None
    for name, parameter in zip(names, parameters):
        if not isinstance(parameter, DTensor):
            continue
        if mesh is None:
            mesh, first = parameter.device_mesh, name
        elif parameter.device_mesh != mesh:
            raise ValueError(f"parameter {name} is on {parameter.device_mesh}, and {first} on {mesh}; give each mesh "
                             "an optimizer and a job of its own")
    return mesh


def placements_of(name: str, parameter: torch.Tensor, mesh) -> tuple[int | None, ...]:
    """For each dimension of the mesh the parameter's dimension that it cuts, or None. A parameter that is not a
    DTensor is whole on every rank. NotImplementedError for placements other than shards and replicas."""
    if not isinstance(parameter, DTensor):
        return (None,) * mesh.ndim
    cuts = []
    for placement in parameter.placements:
        if type(placement) is Shard:
            cuts.append(placement.dim % parameter.dim())
        elif type(placement) is Replicate:
            cuts.append(None)
        else:
            raise NotImplementedError(f"parameter {name} is placed as {placement}, which is not supported; shard it "
                                      "with Shard and Replicate only, the outermost dimension of the mesh first")
    return tuple(cuts)


def _owners(mesh, parameters: list[torch.Tensor], placements: list[tuple[int | None, ...] | None],
            trained: list[bool]) -> list[tuple[int | None, ...] | None]:
    """By parameter the coordinates of the replica that owns it; None where the mesh cuts. None: there are no replicas.
    The same rule as the service's (proto/ballast/v1/jobs.proto, "Mesh")."""
    owned: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # By the dimensions that replicate: a heap.
    owners: list[tuple[int | None, ...] | None] = []
    for parameter, of, is_trained in zip(parameters, placements, trained):
        if mesh is None or of is None:
            owners.append(None)
            continue
        dims = tuple(d for d, cut in enumerate(of) if cut is None)
        replica = 0
        if is_trained:
            count = math.prod(mesh.size(d) for d in dims)
            heap = owned.setdefault(dims, [(0, number) for number in range(count)])
            elements, replica = heap[0]
            heapq.heapreplace(heap, (elements + parameter.numel(), replica))
        owner: list[int | None] = [None] * len(of)
        for d in reversed(dims):
            replica, owner[d] = divmod(replica, mesh.size(d))
        owners.append(tuple(owner))
    return owners


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are row-major in host memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()
