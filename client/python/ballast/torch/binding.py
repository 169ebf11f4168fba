"""Parameters of torch bound to a job: what is sent from where, and what comes back to where.

One process gives and gets everything. FSDP2: each rank gives and gets its shards, whose mesh and placements
the DTensors name. Several processes with whole parameters (DDP): each rank gives and gets the part of each
group's flat space that it owns. What a rank does not get from the service it gets from the others.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import socket
import tempfile
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from ..client import Client
from ..errors import AbortedError, BallastError, FailedPreconditionError, PermissionDeniedError, error_of
from ..restore import (
    begin_from,
    begin_with,
    begun_already,
    may_begin,
    refuse_a_begun_one,
    refuse_an_unknown_one,
    restore,
)
from ..service import Service
from ..session import Decision, Group, HyperParameters, Job, Parameter, Session
from . import patches, streaming
from .clipping import Sealed
from .ddp import hook_ddp
from .moments import Moments, write
from .peers import Peers
from .places import Flats, Shards, local, mesh_of, placements_of, seen
from .streaming import GradientStream

# Sessions that end while others take their ranks from processes that are no more.
_JOIN_ATTEMPTS = 5
_INTERRUPTED = "the last step() was interrupted; attach() takes the job's weights, and goes on from its step"
# How long rank 0 keeps a service of its own for ranks that are behind.
_LEAVE_SECONDS = 10.0


class NothingToResume(Exception):
    """The service has neither the job that a state is of nor a checkpoint of that step."""


class Binding:
    """new: the job is made if the service has none, with the weights of the parameters; else there must be one.
    attach: the job may be past its first step, and its weights are put into the parameters. resume: the uid and
    step that `state_dict` said, which the job must have. checkpoint: what a job without weights begins with. moments:
    by parameter of the param groups, what else a job without weights begins with, beside the weights of the parameters;
    with resume NothingToResume if the service has nothing of that job."""

    def __init__(self, param_groups: list[dict[str, Any]], hyper_parameters: Callable[[], list[HyperParameters]], *,
                 service: str | None, job: str, max_norm: float, update: str, process_group, timeout: float,
                 overlap: bool, accumulation_steps: int | None, module: torch.nn.Module | None,
                 credentials: dict[str, str | None], resume: tuple[str, int] | None, new: bool, attach: bool,
                 checkpoint: str | None = None, moments: list[Moments | None] | None = None,
                 keep_previous: bool = False, on_abort: str = "redo"):
        self._keep_previous, self._on_abort = keep_previous, on_abort
        self._moments = moments and dict(zip((id(p) for group in param_groups for p in group["params"]), moments))
        self._credentials = credentials
        self.owned_service: Service | None = None
        self.session: Session | None = None
        self.peers: Peers | None = None
        self.parameters: list[torch.Tensor] = []
        self.names: list[str] = []
        self.source: list[int] = []  # By group of the job: the param group that it is of.
        self.stream: GradientStream | None = None
        self._hyper_parameters = hyper_parameters  # Of the param groups, as they are now.
        self._begun_with: list[HyperParameters] = []
        self._saved_step = 0
        self._undos = 0  # That were asked for.
        self._overlap, self._module = overlap, module
        self._process = os.getpid()
        self._broken: str | None = None
        self._max_norm = max_norm  # Goes with the votes.
        self._expected: dict[str, Any] = {"expected_max_norm": max_norm}  # What the vote will say: as the last one.
        groups, parameters = self._collect(param_groups, hyper_parameters())
        for name, parameter in zip(self.names, self.parameters):
            if patches.stream_of(parameter) is not None:
                raise FailedPreconditionError(f"parameter {name} still gives its gradients to another optimizer; "
                                              "close() that first")
        if overlap:
            check_overlap(self.parameters, process_group, module)
        self.mesh = mesh_of(self.names, self.parameters)
        ranks = self._ranks(process_group)
        self.world_size = len(ranks)
        self.rank = ranks.index(dist.get_rank()) if self.world_size > 1 else 0
        if self.world_size > 1:
            self.peers = Peers(job, ranks, timeout)
        _close_at_exit(self)
        try:
            with self._telling():
                described = self._describe(job, groups, parameters, update,
                                           (accumulation_steps or 0) if overlap else 1)
                self._open(described, process_group, service, timeout, resume, new, attach, checkpoint)
                self._moments = None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if os.getpid() != self._process:  # A fork, which has nothing of this.
            return
        if self.stream is not None:
            self.stream.close()
        if self.session is not None:
            self.session.close()
        peers, self.peers = self.peers, None
        if peers is not None:
            peers.leave(0.0 if self.owned_service is None or self._broken is not None else _LEAVE_SECONDS)
        if self.owned_service is not None:
            self.owned_service.stop()

    # ------------------------------------------------------------ binding

    def _collect(self, param_groups, hyper_parameters) -> tuple[list[Group], list[Parameter]]:
        """A param group becomes a group of the job for each dtype in it, a parameter with several names one of
        the job."""
        groups, parameters, seen = [], [], set()
        for index, (group, values) in enumerate(zip(param_groups, hyper_parameters)):
            numbers: dict[torch.dtype, int] = {}
            for name, parameter in zip(group["param_names"], group["params"]):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                dtype = str(parameter.dtype).removeprefix("torch.")
                if parameter.dtype not in numbers:
                    numbers[parameter.dtype] = len(groups)
                    groups.append(Group(f"{index}.{dtype}", values, dtype, dtype))
                    self.source.append(index)
                parameters.append(Parameter(name, tuple(parameter.shape), numbers[parameter.dtype],
                                            frozen=not parameter.requires_grad))
                self.parameters.append(parameter)
                self.names.append(name)
        return groups, parameters

    def _ranks(self, process_group) -> list[int]:
        """The ranks of the job in its order, as torch numbers them in the world."""
        if not (dist.is_available() and dist.is_initialized()):
            return [0]
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        if self.mesh is None:
            return ranks
        of_mesh = self.mesh.mesh.flatten().tolist()
        if sorted(of_mesh) != sorted(ranks):
            raise ValueError(f"the parameters are on {self.mesh} of {len(of_mesh)} ranks, and {len(ranks)} ranks train "
                             "together: give process_group= the ranks of the mesh, and each such group a job= of its "
                             "own")
        return of_mesh

    def _describe(self, job: str, groups: list[Group], parameters: list[Parameter], update: str,
                  max_micro_steps: int) -> Job:
        mesh = []
        if self.mesh is not None:
            names = self.mesh.mesh_dim_names or [f"dim{d}" for d in range(self.mesh.ndim)]
            mesh = list(zip(names, self.mesh.mesh.shape))
            parameters = [dataclasses.replace(parameter, placements=placements_of(parameter.name, tensor, self.mesh))
                          for parameter, tensor in zip(parameters, self.parameters)]
        return Job(job, groups, parameters, world_size=self.world_size, unused_policy="skip",
                   update_mode=update, max_micro_steps=max_micro_steps, mesh=mesh,
                   keep_previous=self._keep_previous, on_abort=self._on_abort)

    def _open(self, job: Job, process_group, service, timeout, resume, new, attach, checkpoint):
        if self.peers is not None:
            self.peers.agree([("the call", "attach()" if attach else "step()"), ("the loaded state", str(resume)),
                              ("its moments", "none" if self._moments is None else "there"),
                              ("max_norm", str(self._max_norm)), *_lines(job)])
        if self.mesh is None and self.world_size > 1:
            members = [[i for i, p in enumerate(job.parameters) if p.group == number and not p.frozen]
                       for number in range(len(job.groups))]
            self.places = Flats(self.parameters, members, process_group)
        else:
            self.places = Shards(self.parameters, self.mesh, [p.placements for p in job.parameters])
        address = self._address(service)
        self._job, self._client = job.name, Client(address, timeout, wait=min(30.0, timeout),
                                                 **self._credentials)
        places = [place.data_ptr() for place in self.places.places]
        uid = None
        if resume is not None:
            uid = restore(self._client, job, places, *resume, timeout, self._credentials,
                          or_nothing=self._moments is not None) if self.rank == 0 else None
            uid = uid if self.peers is None else self.peers.from_first("uid", uid)
            if not uid:
                raise NothingToResume
        elif checkpoint is not None:
            if self.rank == 0:
                begin_from(self._client, job, places, checkpoint, timeout, self._credentials)
            if self.peers is not None:
                self.peers.from_first("begun from", checkpoint)
        elif not attach and self._moments is None:
            # Before the rank is taken: whoever trains this job now goes on.
            if self.rank == 0 and self.owned_service is None:
                refuse_a_begun_one(self._client, job.name)
            if self.peers is not None:
                self.peers.from_first("not begun", "")
        elif not new:
            if self.rank == 0:
                refuse_an_unknown_one(self._client, job.name)
            if self.peers is not None:
                self.peers.from_first("known", "")
        begun = resume is None and self._moments is not None and \
            self._begin_with_moments(job, places, timeout, or_go_on=checkpoint is not None)

        # Of the binding it has nothing: else that would live on.
        open_session = self._open_session = functools.partial(
            Session, address, job, places, rank=self.rank, job_uid=uid, join_timeout=min(60.0, timeout),
            timeout=timeout, while_waiting=self.peers and self.peers.listen, **self._credentials)
        self.session = open_session()
        if self.peers is not None:
            self.peers.meet("joined")
        self._check_owned()
        for attempt in range(_JOIN_ATTEMPTS):
            try:
                # What this run itself has uploaded is no reason not to go on.
                self._join(job.name, resume, new, attach or begun or attempt > 0)
                break
            except AbortedError:  # A rank has been taken from a process that has ended, which ends all sessions.
                self.session.close()
                if attempt + 1 == _JOIN_ATTEMPTS:
                    raise
                self.session = open_session()
        self._take_weights()

    def _begin_with_moments(self, job: Job, places: list[int], timeout: float, or_go_on: bool) -> bool:
        begins = self.rank == 0 and may_begin(self._client, job.name, or_go_on)
        if self.peers is not None:
            begins = self.peers.from_first("begins with moments", "yes" if begins else None) == "yes"
        if not begins:
            return False
        with tempfile.TemporaryDirectory(prefix="ballast-") as folder:
            path = write(folder if self.rank == 0 else None, job, self.parameters,
                         [self._moments[id(parameter)] for parameter in self.parameters])
            if path is not None:
                begin_with(self._client, job, places, str(path), timeout, self._credentials)
        if self.peers is not None:
            self.peers.from_first("has moments", None)
        return True

    def _join(self, job: str, resume, new, attach) -> None:
        """Gives the first weights, or gets those of the job."""
        if self.session.awaiting_weights:
            if not new:
                raise FailedPreconditionError(f"job {job} has no weights yet; the first step() uploads them")
            masters = [local(parameter).to(device="cpu", dtype=torch.float32).contiguous()
                       for parameter in self.parameters]
            self.session.upload_weights([master.data_ptr() for master in masters])
        elif not attach:  # Since it was asked for, another run has begun it.
            raise FailedPreconditionError(begun_already(job, self.session.committed_step))
        self.session.read_weights()
        self.step_count, self.job_uid = self.session.committed_step, self.session.job_uid
        if resume is not None and self.step_count != resume[1]:
            raise FailedPreconditionError(f"job {job} is at step {self.step_count}, the state that was loaded at step "
                                          f"{resume[1]}; another trainer has it")

    def _check_owned(self) -> None:
        """The library writes weights by its own arithmetic of shards; torch's must be the same."""
        if self.mesh is None:
            return
        for index, elements in enumerate(self.session.owned_elements()):
            if not self.parameters[index].requires_grad:
                continue
            expected = local(self.parameters[index]).numel() if self.places.owned[index] else 0
            if elements != expected:
                raise RuntimeError(f"this rank has {expected} elements of parameter {self.names[index]}, and its "
                                   f"placements give it {elements}; please report this")

    def _address(self, service: str | None) -> str:
        """Of the service; without one rank 0 starts it, for the ranks of its host."""
        if service is not None:
            return service
        if self.rank == 0:
            self.owned_service = Service()
        if self.peers is None:
            return self.owned_service.address
        here = socket.gethostname()
        host, _, address = self.peers.from_first(
            "service", f"{here}\n{self.owned_service.address}" if self.owned_service else None).partition("\n")
        if host != here:
            raise FailedPreconditionError(f"rank 0 started a service on {host}, which this rank on {here} does not "
                                          "reach; start ballastd and give service=")
        return address

    @property
    def failed(self) -> bool:
        """Its session has ended, and it makes no further step."""
        return self._broken is not None

    def save(self) -> None:
        """With a state of the trainer's: has the service save the step that it is of, in the background, so that
        the trainer can go on from that state later, whatever becomes of the job. Once for a step, by rank 0."""
        if self.rank != 0 or self.step_count in (0, self._saved_step):
            return
        first, self._saved_step = self._saved_step == 0, self.step_count
        if self.owned_service is not None:
            if first:
                warnings.warn("this state can be gone on from only within this run: its service was started for the "
                              "run (service=None) and ends with it. Give the service= of a "
                              "ballast.Service(checkpoint_dir=...) or of a ballastd with a --checkpoint-dir",
                              stacklevel=3)
            return
        try:
            step = self._client.save(self._job, background=True)["step"]
            if step != self.step_count:
                raise BallastError(f"the job is at step {step}, this trainer at step {self.step_count}")
        except BallastError as error:
            warnings.warn(f"the service did not save step {self.step_count} of job {self._job} with this state, which "
                          f"can be gone on from only while the job is at that step: {error}", stacklevel=3)

    def read_state(self, parameter: torch.Tensor, plane: str) -> tuple[torch.Tensor, int]:
        """A plane of a parameter in fp32, placed as the parameter is, and how often that has been updated."""
        index = next(i for i, ours in enumerate(self.parameters) if ours is parameter)
        whole = torch.empty(tuple(parameter.shape), dtype=torch.float32)
        _, updates = self.session.read_state(index, plane, whole.data_ptr())
        whole = whole.to(parameter.device)
        if isinstance(parameter, DTensor):  # Each rank keeps its own part of what it has read.
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return whole, updates

    # ------------------------------------------------------------ a step

    def step(self, loss_scale: float) -> Decision:
        if self._broken is not None:
            raise FailedPreconditionError(self._broken)
        streamed = self.stream is not None and self.stream.begun
        if streamed:
            self._check_begun()
        with self._telling():
            if streamed and (self.stream.sealed is not None or loss_scale != 1.0):
                decision = self._vote(self.stream.seal(), loss_scale)
            else:
                decision = self._seal_and_vote(loss_scale)
            self.session.receive_weights()
            self.step_count = decision.step
            if decision.applied:
                self._take_weights()
            if self.stream is not None:
                self.stream.finish()
            elif self._overlap:
                self.stream = self._start_stream()
        self._broken = None
        return decision

    def undo(self) -> None:
        """Of all ranks: undoes the last step, and puts the weights of the one before into the parameters."""
        if self._broken is not None:
            raise FailedPreconditionError(self._broken)
        with self._telling():
            self._undos += 1
            if self.peers is not None:  # One may still receive the weights of the step.
                self.peers.meet(f"undo {self._undos} begun")
            refused = self._undo_on_service() if self.rank == 0 else ""
            if self.peers is not None:
                refused = self.peers.from_first(f"undo {self._undos}", refused)
            if not refused:
                self._broken = _INTERRUPTED
                self._open_anew()
                self._broken = None
        if refused:
            status, _, why = refused.partition(" ")
            raise error_of(int(status), why)

    def _undo_on_service(self) -> str:
        """Status and text of a refusal, which leaves everything as it was; or ""."""
        try:
            self.session.undo()
        except (FailedPreconditionError, PermissionDeniedError) as error:
            return f"{error.status} {error}"
        return ""

    def _open_anew(self) -> None:
        """The session of every rank has ended."""
        if self.stream is not None:
            self.stream.leave_session()
        self.session.close()
        self.session = self._open_session(job_uid=self.job_uid)
        if self.peers is not None:
            self.peers.meet(f"joined after undo {self._undos}")
        if self.stream is not None:
            self.stream.move_to(self.session)
        self.session.read_weights()
        self.step_count = self.session.committed_step
        if self._saved_step > self.step_count:  # It will be another one.
            self._saved_step = -1
        self._take_weights()

    def _seal_and_vote(self, loss_scale: float) -> Decision:
        if self.stream is None or not self.stream.begun:
            self._begin(loss_scale)
            if self.stream is not None:
                self.stream.begun = True
        if self.stream is None:
            gradients = [self._gradient(i) for i in range(len(self.parameters))]
            self._broken, micro_steps = _INTERRUPTED, 1
            self.session.push_gradients([None if g is None else g.data_ptr() for g in gradients], final=True)
        else:
            self._broken = _INTERRUPTED
            micro_steps = self._give_rest()
        self._expected = {"expected_max_norm": self._max_norm}
        return self.session.seal_and_vote(micro_steps, max_norm=self._max_norm, hyper_parameters=self._overrides())

    def _seal(self) -> Sealed:
        """Of the step whose gradients have left during backward."""
        if self._broken is not None:
            raise FailedPreconditionError(self._broken)
        self.stream.check_ended()
        with self._telling():
            self._broken = _INTERRUPTED
            norm = self.session.seal(self._give_rest())
        self._broken = None
        return Sealed(norm, [parameter.grad for parameter in self.parameters])

    def _vote(self, sealed: Sealed, loss_scale: float) -> Decision:
        """loss_scale: of a GradScaler that has not unscaled yet."""
        self._broken = _INTERRUPTED
        sealed.unscaling /= loss_scale
        if self._max_norm > 0:
            sealed.clip(range(len(self.source)), self._max_norm)
        ballot = sealed.ballot()
        # By multipliers the service cannot know what will be clipped.
        self._expected = {"expected_max_norm": ballot.get("max_norm", 0.0)} if sealed.unscaling == 1 else {
            "expected_multipliers": len(self.source) * [sealed.unscaling]}
        decision = self.session.vote(**ballot, hyper_parameters=self._overrides())
        coefficient = sealed.coefficient() if "multipliers" in ballot else decision.clip_coefficient
        return dataclasses.replace(decision, norm=decision.norm * sealed.unscaling, clip_coefficient=coefficient)

    def _overrides(self) -> list[HyperParameters] | None:
        """What has been set since the step began."""
        now = self._hyper_parameters()
        return None if now == self._begun_with else [now[index] for index in self.source]

    def discard(self) -> None:
        """Takes back what has left since the last step."""
        if self.stream is not None and self._broken is None:
            self.stream.discard()

    def _give_rest(self) -> int:
        """What did not leave during backward, and the end of the last micro-step. Returns how many there were."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                continue
            self._check_as_made(index)
            if parameter.requires_grad:
                self.stream.give(index, parameter.grad.detach())
        self.stream.end_micro_step()
        if self.stream.micro_steps == 0:  # No gradient at all, which the service must know, too.
            self.session.end_gradients(0)
        return max(self.stream.micro_steps, 1)

    def _begin(self, loss_scale: float = 1.0) -> None:
        self._check_untouched()
        self._begun_with = self._hyper_parameters()
        self.session.begin_step([self._begun_with[index] for index in self.source], loss_scale=loss_scale,
                                **self._expected)

    def _check_begun(self) -> None:
        """What has left is still the step's."""
        self.stream.check_ended()
        sealed = self.stream.sealed
        edited = None if sealed is None else sealed.first_changed([parameter.grad for parameter in self.parameters])
        if edited is not None:
            raise RuntimeError(f"the gradient of parameter {self.names[edited]} was changed after clip_grad_norm_ or "
                               "unscale_, which had all ranks end the step; call zero_grad() and do the step's "
                               "backward passes again")
        changed = self._changed()
        if changed:
            raise RuntimeError(f"parameter {self.names[changed[0]]} was changed during the step, and the service does "
                               "not know; call zero_grad(), and change weights before the first step only")

    def _start_stream(self) -> GradientStream:
        trainable = [parameter for parameter in self.parameters if parameter.requires_grad]
        on_gpu = any(streaming.is_on_gpu(local(parameter)) for parameter in trainable)
        # A parameter that is whole on every rank beside sharded ones is reduced by the trainer, after backward.
        hooked = [None if not parameter.requires_grad or isinstance(self.places, Flats) or
                  (self.mesh is not None and not isinstance(parameter, DTensor)) else parameter
                  for parameter in self.parameters]
        stream = GradientStream(self.session, hooked, self._part, self._begin, self._seal, on_gpu)
        if isinstance(self.places, Flats):
            hook_ddp(self._module, stream, self.parameters)
        patches.register(stream, {index: parameter for index, parameter in enumerate(self.parameters)
                                  if parameter.requires_grad})
        return stream

    def _part(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        self._check_gradient(index, gradient)
        here = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        return here.detach() if here.requires_grad else here  # It does with create_graph.

    @contextlib.contextmanager
    def _telling(self):
        """What this rank cannot go on for, the others are told: they would wait for it."""
        try:
            yield
        except NothingToResume:  # On all ranks.
            raise
        except BaseException as error:
            if isinstance(error, AbortedError):
                if "has taken rank" in str(error):
                    error.args = (f"{error}; if that was no restart of this run, give each training a job= of its own",)
                self._broken = self._broken or _INTERRUPTED
            if self.peers is not None:
                self.peers.fail(error)
                self._broken = self._broken or f"this optimizer ended with: {error}"
            raise

    def _changed(self) -> list[int]:
        return [i for i, parameter in enumerate(self.parameters)
                if parameter.requires_grad and seen(parameter) != self._seen[i]]

    def _check_untouched(self) -> None:
        """The service has the weights: what somebody else has written since would be lost."""
        changed = self._changed()
        if not changed:
            return
        same = {i: self.places.same(i) for i in changed}
        # Written in place: what was there is with the service.
        unknown = {i: local(self.parameters[i]).clone() for i in changed if same[i] is None}
        if unknown:
            self.session.read_weights()
            for i, written in unknown.items():
                same[i] = torch.equal(local(self.parameters[i]), written)
                local(self.parameters[i]).data.copy_(written)  # Autograd may have saved it.
        for i in changed:
            if not same[i]:
                raise RuntimeError(
                    f"parameter {self.names[i]} was changed since the last step, and the service does not know: it "
                    "keeps the weights. Change weights before the first step, or through a new job")
        self._remember()

    def _gradient(self, index: int) -> torch.Tensor | None:
        parameter = self.parameters[index]
        gradient = parameter.grad
        if gradient is None:
            return None
        self._check_as_made(index)
        if not parameter.requires_grad:
            return None
        part = self._part(index, gradient)
        if not self.places.owned[index] or part.numel() == 0:
            return None  # Those who own elements of it tell that it was used.
        return part.to("cpu").contiguous()

    def _check_as_made(self, index: int) -> None:
        parameter, name = self.parameters[index], self.names[index]
        if self.session.job.parameters[index].frozen == parameter.requires_grad:
            raise RuntimeError(f"parameter {name} was {'frozen' if parameter.requires_grad else 'trainable'} when the "
                               "job was made, and is not now; create another optimizer and another job")

    def _check_gradient(self, index: int, gradient: torch.Tensor) -> None:
        parameter = self.parameters[index]
        if gradient.is_sparse:
            raise RuntimeError(f"the gradient of parameter {self.names[index]} is sparse, which is not supported")
        if gradient.dtype != parameter.dtype:
            raise RuntimeError(f"the gradient of parameter {self.names[index]} is {gradient.dtype}, the parameter "
                               f"{parameter.dtype}")
        if isinstance(parameter, DTensor) and getattr(gradient, "placements", None) != parameter.placements:
            raise RuntimeError(f"the gradient of parameter {self.names[index]} is placed as "
                               f"{getattr(gradient, 'placements', None)}, the parameter as {parameter.placements}; "
                               "redistribute it")

    def _take_weights(self) -> None:
        self.places.deliver()
        self._remember()

    def _remember(self) -> None:
        self._seen = [seen(parameter) for parameter in self.parameters]


def check_overlap(parameters: list[torch.Tensor], process_group, module) -> None:
    """ValueError if nothing tells when gradients that several ranks have are reduced."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1:
        return
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return
    if module is None:
        raise ValueError("overlap with several processes needs to see how gradients are reduced: give module= the "
                         "DistributedDataParallel, or shard the parameters with fully_shard first")
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise ValueError(f"module is {type(module).__name__}; expected the DistributedDataParallel")
    if module.find_unused_parameters or module.static_graph:
        raise ValueError("overlap needs a DistributedDataParallel without find_unused_parameters and static_graph: "
                         "with these it says only after backward which parameters were unused")
    if getattr(module, "_comm_hooks", None):
        raise ValueError("the DistributedDataParallel has a communication hook, and takes no second one; wrap the "
                         "model anew, or create the optimizer with overlap=False")


def _lines(job: Job) -> list[tuple[str, str]]:
    """A job's description, entry by entry."""
    lines = [(name, str(getattr(job, name)))
             for name in ("world_size", "update_mode", "max_micro_steps", "mesh", "keep_previous", "on_abort")]
    for group in job.groups:
        lines.append((f"group {group.name}", f"{group.hyper_parameters} {group.wire_dtype}"))
    for parameter in job.parameters:
        lines.append((f"parameter {parameter.name}", f"{parameter.shape} group {parameter.group} "
                      f"{'frozen' if parameter.frozen else 'trainable'} {parameter.placements}"))
    return lines


def _close_at_exit(binding: Binding) -> None:
    """Without keeping it until then."""
    here = weakref.ref(binding)

    def close():
        bound = here()
        if bound is not None:
            bound.close()

    atexit.register(close)
    weakref.finalize(binding, atexit.unregister, close)
