"""Parameters of torch bound to a job: what is sent from where, and what comes back to where.

One process: the service's weights are written to the parameters themselves, where they are contiguous and
in host memory, else to a copy in host memory first. Several processes (DDP): each rank gives and gets the
part of each group's flat space that it owns, and the ranks gather the weights from each other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import FailedPreconditionError
from ..service import Service
from ..session import Decision, Group, HyperParameters, Job, Parameter, Session

_BLOCK_ELEMENTS = 256  # Of the service's layout: a rank owns whole blocks.


class _Flat:
    """A group of the job in host memory: what is gathered from the ranks, and each parameter's view of it.
    members: the indices of its parameters."""

    def __init__(self, members: list[int], parameters: list[torch.Tensor], world_size: int):
        self.members = members
        elements = sum(parameter.numel() for parameter in parameters)
        row = world_size * _BLOCK_ELEMENTS
        self.shard_elements = -(-elements // row) * _BLOCK_ELEMENTS
        self.memory = torch.zeros(world_size * self.shard_elements, dtype=parameters[0].dtype)
        self.views, begin = [], 0
        for parameter in parameters:
            self.views.append(self.memory[begin:begin + parameter.numel()].view(parameter.shape))
            begin += parameter.numel()


class Binding:
    """new: the job is made if the service has none, with the weights of the parameters; else there must be one,
    and its weights are put into the parameters. resume: what `state_dict` said, which the job must be."""

    def __init__(self, param_groups: list[dict[str, Any]], hyper_parameters: list[HyperParameters], *,
                 service: str | None, job: str, max_norm: float, update: str, process_group, timeout: float,
                 overlap: bool, accumulation_steps: int | None, module: torch.nn.Module | None,
                 resume: dict[str, Any] | None, new: bool):
        self.group_of_ranks = process_group
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(process_group) if distributed else 0
        self.world_size = dist.get_world_size(process_group) if distributed else 1
        self.owned_service: Service | None = None
        self.session: Session | None = None
        self.parameters: list[torch.nn.Parameter] = []
        self.names: list[str] = []
        self.source: list[int] = []  # By group of the job: the param group that it is of.
        self.flats: list[_Flat] | None = None
        self._broken: str | None = None
        try:
            self._max_micro_steps = (accumulation_steps or 0) if overlap else 1
            self._open(param_groups, hyper_parameters, service, job, max_norm, update, timeout, resume, new)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
        if self.owned_service is not None:
            self.owned_service.stop()

    # ------------------------------------------------------------ binding

    def _open(self, param_groups, hyper_parameters, service, job, max_norm, update, timeout, resume, new):
        described = self._describe(param_groups, hyper_parameters, job, max_norm, update)
        places = self._places(described)
        self.session = Session(self._address(service), described, [place.data_ptr() for place in places],
                               rank=self.rank, job_uid=resume and resume["job_uid"],
                               join_timeout=min(60.0, timeout), timeout=timeout)
        self._places_of_weights = places
        if self.session.awaiting_weights:
            if not new:
                raise FailedPreconditionError(f"job {job} has no weights yet; the first step() uploads them")
            self._upload()
        elif new and resume is None:
            raise FailedPreconditionError(
                f"job {job} is already at step {self.session.committed_step}: call attach() before the first "
                "forward to go on with its weights, or give another job=")
        self.session.read_weights()
        self.step_count = self.session.committed_step
        if resume is not None and self.step_count != resume["step"]:
            raise FailedPreconditionError(f"job {job} is at step {self.step_count}, the state that was loaded at step "
                                          f"{resume['step']}; load the job's checkpoint of that step")
        self._take_weights()

    def _describe(self, param_groups, hyper_parameters, job, max_norm, update) -> Job:
        """A param group becomes a group of the job for each dtype in it."""
        groups, parameters = [], []
        for index, (group, values) in enumerate(zip(param_groups, hyper_parameters)):
            numbers: dict[torch.dtype, int] = {}
            for name, parameter in zip(group["param_names"], group["params"]):
                dtype = str(parameter.dtype).removeprefix("torch.")
                if parameter.dtype not in numbers:
                    numbers[parameter.dtype] = len(groups)
                    groups.append(Group(f"{index}.{dtype}", values, dtype, dtype))
                    self.source.append(index)
                parameters.append(Parameter(name, tuple(parameter.shape), numbers[parameter.dtype],
                                            frozen=not parameter.requires_grad))
                self.parameters.append(parameter)
                self.names.append(name)
        return Job(job, groups, parameters, world_size=self.world_size, max_norm=max_norm, unused_policy="skip",
                   update_mode=update, max_micro_steps=self._max_micro_steps)

    def _places(self, job: Job) -> list[torch.Tensor]:
        """Where the session writes weights."""
        if self.world_size == 1:
            return [parameter.detach() if _is_plain(parameter) else torch.empty(parameter.shape, dtype=parameter.dtype)
                    for parameter in self.parameters]
        self.flats = []
        places = [parameter.detach() for parameter in self.parameters]  # The frozen ones stay there.
        for number in range(len(job.groups)):
            members = [i for i, p in enumerate(job.parameters) if p.group == number and not p.frozen]
            if not members:
                continue
            flat = _Flat(members, [self.parameters[i] for i in members], self.world_size)
            self.flats.append(flat)
            for i, view in zip(members, flat.views):
                places[i] = view
        return places

    def _address(self, service: str | None) -> str:
        if service is not None:
            return service
        if self.rank == 0:
            self.owned_service = Service()
        address = [self.owned_service.address if self.owned_service else None]
        if self.world_size > 1:
            dist.broadcast_object_list(address, src=dist.get_global_rank(self.group_of_ranks, 0)
                                       if self.group_of_ranks else 0, group=self.group_of_ranks)
        return address[0]

    def _upload(self) -> None:
        masters = [parameter.detach().to(device="cpu", dtype=torch.float32).contiguous()
                   for parameter in self.parameters]
        self.session.upload_weights([master.data_ptr() for master in masters])

    # ------------------------------------------------------------ a step

    def step(self, hyper_parameters: list[HyperParameters], loss_scale: float) -> Decision:
        self._check_untouched()
        gradients = [self._gradient(i) for i in range(len(self.parameters))]
        self._broken = "the last step() was interrupted; create the optimizer again and attach()"
        self.session.begin_step([hyper_parameters[index] for index in self.source], loss_scale=loss_scale)
        self.session.push_gradients([None if g is None else g.data_ptr() for g in gradients])
        decision = self.session.seal()
        self.session.receive_weights()
        self.step_count = decision.step
        if decision.applied:
            self._take_weights()
        self._broken = None
        return decision

    def _check_untouched(self) -> None:
        if self._broken is not None:
            raise FailedPreconditionError(self._broken)
        for name, parameter, version in zip(self.names, self.parameters, self._versions):
            if parameter._version != version:
                raise RuntimeError(
                    f"parameter {name} was changed since the last step, and the service does not know: it keeps the "
                    "weights. Change weights before the first step, or through a new job")

    def _gradient(self, index: int) -> torch.Tensor | None:
        parameter, name = self.parameters[index], self.names[index]
        gradient = parameter.grad
        if gradient is None:
            return None
        if self.session.job.parameters[index].frozen == parameter.requires_grad:
            raise RuntimeError(f"parameter {name} was {'frozen' if parameter.requires_grad else 'trainable'} when the job "
                               "was made, and is not now; create another optimizer and another job")
        if not parameter.requires_grad:
            return None
        if gradient.is_sparse:
            raise RuntimeError(f"the gradient of parameter {name} is sparse, which is not supported")
        if gradient.dtype != parameter.dtype:
            raise RuntimeError(f"the gradient of parameter {name} is {gradient.dtype}, the parameter {parameter.dtype}")
        return gradient.detach().to("cpu").contiguous()

    def _take_weights(self) -> None:
        """From where the session wrote them to the parameters, which autograd is told."""
        if self.flats is None:
            for parameter, place in zip(self.parameters, self._places_of_weights):
                if not parameter.requires_grad:
                    continue
                if place.data_ptr() != parameter.data_ptr():
                    parameter.detach().copy_(place)
                else:
                    torch.autograd.graph.increment_version(parameter)
        else:
            for flat in self.flats:
                self._gather(flat)
        self._versions = [parameter._version for parameter in self.parameters]

    def _gather(self, flat: _Flat) -> None:
        device = self.parameters[flat.members[0]].device
        begin = self.rank * flat.shard_elements
        own = flat.memory[begin:begin + flat.shard_elements].to(device, copy=True)
        everything = torch.empty(flat.memory.shape, dtype=flat.memory.dtype, device=device)
        dist.all_gather_into_tensor(everything, own, group=self.group_of_ranks)
        begin = 0
        for index in flat.members:
            parameter = self.parameters[index]
            parameter.detach().copy_(everything[begin:begin + parameter.numel()].view(parameter.shape))
            begin += parameter.numel()


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether its elements lie row-major in host memory."""
    return parameter.device.type == "cpu" and parameter.is_contiguous()
