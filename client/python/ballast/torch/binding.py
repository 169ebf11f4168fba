"""Parameters of torch bound to a job: what is sent from where, and what comes back to where.

One process gives and gets everything. FSDP2: each rank gives and gets its shards, whose mesh and placements
the DTensors name. Several processes with whole parameters (DDP): each rank gives and gets the part of each
group's flat space that it owns. What a rank does not get from the service it gets from the others.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import socket
import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from ..client import Client
from ..errors import (
    AbortedError,
    BallastError,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    error_of,
)
from ..restore import (
    Origin,
    awaits_weights,
    begin_from,
    begun_already,
    may_begin,
    refuse_a_begun_one,
    refuse_an_unknown_one,
    restore,
)
from ..session import Decision, HyperParameters, Job, Session
from . import patches, streaming, uneven
from .clipping import Sealed
from .ddp import check_reduction, ddp_of, hook_ddp, whole_on_several_ranks
from .description import Described, check_group, check_memory, lines, weights_in_lines
from .moments import Moments, digest, gather, part_of, upload
from .own_service import Kept, OwnService, own_service
from .peers import Peers
from .places import Flats, Shards, local, mesh_of, placements_of
from .reports import Clock, Logged
from .returning import ReturningWeights, check_overlap_weights
from .streaming import GradientStream, Seen, seen
from .watch import Watch

# Of one binding: each but the last ends because another rank is taken from a process that has ended.
_MOST_SESSIONS = 6
_INTERRUPTED = "the last call was interrupted; attach() takes the job's weights, and goes on from its step"
_WITHOUT = ("no parameter of this step() has a gradient, so nothing changes. If there was a backward, the model has other "
            "parameters than this optimizer: create it after what replaces them, such as fully_shard or to_empty")
_OTHERS = ("the param groups have other parameters than when the optimizer was bound to its job, by attach(), "
           "load_state_dict() or the first step(): call attach() after what replaces parameters, such as "
           "accelerator.prepare or fully_shard; it puts the job's weights into them")
_ALL_FROZEN = "no parameter of this optimizer requires a gradient, so step() changes nothing: see requires_grad_()"
# How long rank 0 keeps a service of its own for ranks that are behind.
_LEAVE_SECONDS = 10.0


class NothingToResume(NotFoundError):
    """The service has neither the job that a state is of nor a checkpoint of that step."""


class Binding:
    """new: the job is made if the service has none, with the weights of the parameters; else there must be one.
    attach: the job may be past its first step, and its weights are put into the parameters. resume: the uid and
    step that `state_dict` said, which the job must have. checkpoint: what a job without weights begins with. moments:
    by parameter of the param groups, what else a job without weights begins with, beside the weights of the parameters;
    with resume NothingToResume if the service has nothing of that job. derive: the job goes on from another one that
    has other parameters: see Origin. trained: see Described. changed: whether the param groups are of another job."""

    # Of one whose constructor has failed early.
    session: Session | None = None
    peers: Peers | None = None
    stream: GradientStream | None = None
    returning: ReturningWeights | None = None
    leaves_early = False  # Whether gradients leave during backward.
    _process = 0

    def __init__(self, param_groups: list[dict[str, Any]], hyper_parameters: Callable[[], list[HyperParameters]], *,
                 service: str | None, job: str, max_norm: float, update: str, process_group, timeout: float,
                 reconnect_timeout: float, overlap: bool, overlap_weights: bool, accumulation_steps: int | None,
                 module: torch.nn.Module | None, credentials: dict[str, str | None],
                 resume: tuple[str, int] | None, new: bool, attach: bool,
                 checkpoint: str | None = None, moments: list[Moments | None] | None = None,
                 derive: Origin | None = None, trained: Collection[int] = (), changed: Callable[[], bool],
                 keep_previous: bool = False, on_abort: str = "redo", on_write: str = "error",
                 write_back: Callable[[], None], kept: Kept, logged: Logged):
        self._keep_previous, self._on_abort = keep_previous, on_abort
        self._moments = moments and dict(zip((id(p) for group in param_groups for p in group["params"]), moments))
        self._credentials = credentials
        self._kept, self._logged, self._changed = kept, logged, _weakly(changed)
        self._in_step = False  # It is decided, and has not ended on the session.
        self._reopening = False  # In which an interrupt may come, too.
        self._lost = False  # Gradients that were freed when they left.
        # Of a step() that has not returned: the job's step before, and the gradients.
        self._given: tuple[int, list[Seen]] | None = None
        self._applied: list[tuple[int, ...]] | None = None  # Of these if the step was made all the same: see _print_of.
        self._hyper_parameters = _weakly(hyper_parameters)  # Of the param groups, as they are now.
        self._write_back = _weakly(write_back)  # Before a step begins: what the trainer has written of the state.
        self._sends = on_write == "send"
        self._begun_with: list[HyperParameters] = []
        self._has_warned = False  # Of a step without any gradient.
        self._own_gradients: list[torch.Tensor | None] | None = None  # While this rank, which has joined, has others'.
        self._saved_step: int | None = None
        self._undos = self._closings = 0  # That were asked for.
        self._overlap, self._accumulation_steps = overlap, accumulation_steps
        self._process = os.getpid()
        self._broken: str | None = None
        self._watch: Watch | None = None
        self._max_norm = max_norm  # Goes with the votes.
        self._expected: dict[str, Any] = {"expected_max_norm": max_norm}  # What the vote will say: as the last one.
        for group in param_groups:
            check_group(group)  # Its parameters may be others than when the optimizer was made.
        self._made_with = hyper_parameters()
        described = Described(param_groups, self._made_with, trained)
        self.parameters, self.names, self.source = described.tensors, described.names, described.source
        self._left_out = described.left_out
        check_memory(list(zip(self.names, self.parameters)))
        self._bound_to = _identities(param_groups)
        self._names_in = [list(group["param_names"]) for group in param_groups]
        for parameter in self.parameters:
            patches.release(parameter)
        # An accelerator, or a trainer, may have wrapped the module since the optimizer was made.
        if overlap and whole_on_several_ranks(self.parameters, process_group):
            module = ddp_of(self.parameters, module)
            check_reduction(module)
        self._module = module
        trained = {index: self.parameters[index] for index, parameter in enumerate(described.parameters)
                   if not parameter.frozen}
        self._untrained = [*self._left_out.values(), *(self.parameters[index] for index in range(len(self.parameters))
                                                       if index not in trained)]
        if overlap_weights:
            check_overlap_weights((self.names[index], parameter) for index, parameter in trained.items())
        self.mesh = mesh_of(self.names, self.parameters)
        ranks = self._ranks(process_group)
        self.world_size = len(ranks)
        self.rank = ranks.index(dist.get_rank()) if self.world_size > 1 else 0
        if self.world_size > 1:
            self.peers = Peers(job, ranks, timeout)
        _close_at_exit(self)
        try:
            with self._notifying():
                self._open(self._job_of(job, described, update), process_group, service, timeout, reconnect_timeout,
                           resume, new, attach, checkpoint, derive)
                self._moments = None
            if overlap_weights and not self.places.together:
                self.returning = ReturningWeights(trained, {index: self.names[index] for index in trained})
        except BaseException:
            self.close()
            raise

    def __del__(self):
        if self._process == os.getpid() and self.returning is not None and not self.failed:
            with contextlib.suppress(Exception):  # No weak reference finds it any more.
                if self.returning.has_readers():
                    self._take_coming(sorted(self.returning.coming), True)
        self.close(with_job=True)

    def close(self, with_job: bool = False) -> None:
        """Again where it was interrupted. with_job: also the job, if it is on a service of this run's own, where no one
        else finds it."""
        if os.getpid() != self._process:  # It is closed, or this is a fork, which has nothing of it.
            return
        failed = self.failed
        self._reopening = True  # Where an interrupt leaves it, another session goes on.
        if self.stream is not None:
            self.stream.close()
        if self.returning is not None:
            self.returning.close()
        own = self._kept.service
        if self.peers is not None:
            self.peers.leave(0.0 if own is None or failed else _LEAVE_SECONDS)
        if self.session is not None:
            if with_job and own is not None and own.is_here and own.has_others(self._kept) and not self.session.ended:
                with contextlib.suppress(BallastError):  # It goes with the service.
                    self.session.close_job()
            self.session.close()
        self._process = 0

    # ------------------------------------------------------------ binding

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

    def _job_of(self, name: str, described: Described, update: str) -> Job:
        mesh, parameters = [], described.parameters
        if self.mesh is not None:
            names = self.mesh.mesh_dim_names or [f"dim{d}" for d in range(self.mesh.ndim)]
            mesh = list(zip(names, self.mesh.mesh.shape))
            parameters = [dataclasses.replace(parameter, placements=placements_of(parameter.name, tensor, self.mesh))
                          for parameter, tensor in zip(parameters, self.parameters)]
        return Job(name, described.groups, parameters, world_size=self.world_size, unused_policy="skip",
                   update_mode=update, max_micro_steps=1, mesh=mesh,
                   keep_previous=self._keep_previous, on_abort=self._on_abort)

    def _open(self, job: Job, process_group, service, timeout, reconnect_timeout, resume, new, attach, checkpoint, derive):
        if self.peers is not None:
            self.peers.agree([("the call", "attach()" if attach else "step()"), ("the loaded state", str(resume)),
                              ("its moments", "none" if self._moments is None else
                               digest(self.parameters, self._moments) if self.mesh is None else "there"),
                              ("max_norm", str(self._max_norm)), *lines(job)])
        if self.mesh is None and self.world_size > 1:
            members = [[i for i, p in enumerate(job.parameters) if p.group == number and not p.frozen]
                       for number in range(len(job.groups))]
            self.places = Flats(self.parameters, members, process_group)
        else:
            self.places = Shards(self.parameters, self.mesh, [p.placements for p in job.parameters],
                                 [not p.frozen for p in job.parameters])
        address, job = self._address(service, job)
        self.job, self._client = job.name, Client(address, timeout, wait=min(30.0, timeout),
                                                 **self._credentials)
        places = [place.data_ptr() for place in self.places.places]
        uid, origin = None, Origin()
        if derive is not None:
            if self.rank == 0:
                origin = derive.found(self._client, job.name, checkpoint)
            if self.peers is not None:
                origin = Origin(*self.peers.from_first("derived from", f"{origin.uid}\n{origin.checkpoint}").split("\n"))
        elif resume is not None:
            uid = restore(self._client, job, places, *resume, timeout, self._credentials,
                          or_nothing=self._moments is not None) if self.rank == 0 else None
            uid = uid if self.peers is None else self.peers.from_first("uid", uid)
            if not uid:
                raise NothingToResume(f"the service has neither the job of which the loaded state is, {job.name}, nor a "
                                      "checkpoint of it: call load_state_dict() again, and a new job begins with it")
        elif checkpoint is not None:
            if self.rank == 0:
                begin_from(self._client, job, places, checkpoint, timeout, self._credentials)
            if self.peers is not None:
                self.peers.from_first("begun from", checkpoint)
        elif not attach and self._moments is None:
            # Before the rank is taken: any process that trains this job now goes on.
            if self.rank == 0 and self._kept.service is None and not self._kept.begun:
                refuse_a_begun_one(self._client, job.name)
            if self.peers is not None:
                self.peers.from_first("not begun", "")
            self._kept.begun = True
        elif not new:
            if self.rank == 0:
                refuse_an_unknown_one(self._client, job.name)
            if self.peers is not None:
                self.peers.from_first("known", "")
        if resume is None and self._moments is not None:
            begins = self.rank == 0 and may_begin(self._client, job.name, or_go_on=checkpoint is not None)
            if self.peers is not None:
                begins = self.peers.from_first("begins with moments", "yes" if begins else None) == "yes"
            if not begins:
                self._moments = None

        if resume is None and new:
            self._check_alike(unbegun=not attach or derive is not None)

        # It has no reference to the binding, which would keep it alive.
        self._open_session = functools.partial(
            Session, address, job, places, rank=self.rank, job_uid=uid, join_timeout=min(60.0, timeout),
            derive_from_uid=origin.uid or None, derive_from_checkpoint=origin.checkpoint or None,
            timeout=timeout, reconnect_timeout=reconnect_timeout,
            while_waiting=functools.partial(_listen, self.peers, self._kept.service),
            memory=self.places.places, **self._credentials)
        first = None
        if resume is None and self._moments is not None:
            first = gather(job, self.parameters, [self._moments[id(parameter)] for parameter in self.parameters])
        self._join(job.name, resume, new, attach, first)
        self._meet("weights read")
        self._take_weights()
        self._clock = Clock()  # What came before is part of no step.

    def _check_alike(self, unbegun: bool) -> None:
        """Where ranks that have the same parameters are about to upload a part each, that they have the same weights.
        unbegun: it is known that the job has none."""
        ours = [] if self.peers is None else weights_in_lines(self.names, self.parameters)
        if not ours:
            return
        uploads = self.rank == 0 and (unbegun or awaits_weights(self._client, self.job))
        if self.peers.from_first("uploads weights", "yes" if uploads else None) == "yes":
            self.peers.agree(ours, "weights", "a parameter that is no DTensor is whole and the same on every rank: "
                             "wrap the model in DistributedDataParallel first, or give the same seed; shard it with "
                             "fully_shard or parallelize_module, which say what its shards are")

    def _join(self, job: str, resume, new, attach, first) -> None:
        """Opens the session and begins; again where another rank is taken from a process that was in a step or has
        ended, which raises the job's generation and ends the sessions before it."""
        for attempt in range(_MOST_SESSIONS):
            self.session = self._open_session()
            # Asked when every rank has its first session: an ended one may still get weights before it is notified.
            ended = attempt == 0 and self.peers is not None and (
                self.peers.highest("joined", self.session.generation) > self.session.generation)
            if not ended:
                try:
                    self._begin_session(job, resume, new, attach, first)
                    return
                except AbortedError:
                    if attempt + 1 == _MOST_SESSIONS:
                        self.session.close()
                        raise
                attach = True  # What this run itself has uploaded is no reason not to go on.
            self.session.close()

    def _begin_session(self, job: str, resume, new, attach, first) -> None:
        """Gives the first weights, `first` if there are moments, or gets those of the job. A rank may do it again while
        others do not, so it is no collective."""
        self._check_owned()
        if self.session.awaiting_weights:
            if not new:
                raise FailedPreconditionError(f"job {job} has no weights yet; the first step() uploads them")
            upload(self.session, *(first or ([], {"master": [local(parameter) for parameter in self.parameters]})))
        elif not attach and not self._kept.begun:  # Since it was asked for, another run has begun it.
            raise FailedPreconditionError(begun_already(job, self.session.committed_step))
        self.session.read_weights()
        self.step_count, self.job_uid = self.session.committed_step, self.session.job_uid
        if resume is not None and self.step_count != resume[1]:
            raise FailedPreconditionError(f"job {job} is at step {self.step_count}, the state that was loaded at step "
                                          f"{resume[1]}; another trainer has it")

    def _meet(self, where: str) -> None:
        """Before a collective of _take_weights: in that no rank would hear that another one has failed."""
        if self.peers is not None and self.places.together:
            self.peers.meet(where)

    def _check_owned(self) -> None:
        """The library writes weights by its own arithmetic of shards; torch's must be the same."""
        if self.mesh is None:
            return
        for index, elements in enumerate(self.session.owned_elements()):
            if self.session.job.parameters[index].frozen:
                continue
            expected = local(self.parameters[index]).numel() if self.places.owned[index] else 0
            if elements != expected:
                raise RuntimeError(f"this rank has {expected} elements of parameter {self.names[index]}, and its "
                                   f"placements give it {elements}; please report this")

    def _address(self, service: str | None, job: Job) -> tuple[str, Job]:
        """Of the service; without one rank 0 has one of its own, for the ranks of its host, where the job may get
        another name."""
        if service is not None:
            return service, job
        own = self._kept.service
        if own is not None:
            own.check()
        elif self.rank == 0:
            own = self._kept.service = own_service()
        here, name = socket.gethostname(), own and own.name_for(self._kept, job.name)
        if self.peers is None:
            return own.address, dataclasses.replace(job, name=name)
        host, address, name = self.peers.from_first(
            "service", own and f"{here}\n{own.address}\n{name}").split("\n")
        if host != here:
            raise FailedPreconditionError(f"rank 0 started a service on {host}, which this rank on {here} does not "
                                          "reach; start ballastd and give service=")
        return address, dataclasses.replace(job, name=name)

    def has(self, param_groups: list[dict[str, Any]]) -> bool:
        """Whether their parameters are those that it is bound to."""
        return _identities(param_groups) == self._bound_to

    def has_others(self, param_groups: list[dict[str, Any]]) -> bool:
        """Whether they are of another job: parameters were added, left out, moved, resized or thawed. Others in the place
        of the same ones, such as accelerate.prepare puts there, are none."""
        if self._names_in != [list(group["param_names"]) for group in param_groups]:
            return True
        if self.has(param_groups):
            return any(parameter.requires_grad for parameter in self._untrained)
        return any(name in self.of_name and self.of_name[name].shape != parameter.shape for group in param_groups
                   for name, parameter in zip(group["param_names"], group["params"]))

    @property
    def of_name(self) -> dict[str, torch.Tensor]:
        return dict([*zip(self.names, self.parameters), *self._left_out.items()])

    def check_the_same(self, param_groups: list[dict[str, Any]]) -> None:
        """FailedPreconditionError if others are in the place of parameters, with their names and shapes."""
        of_name = self.of_name
        for group in param_groups:
            for name, parameter in zip(group["param_names"], group["params"]):
                if name in of_name and of_name[name] is not parameter and of_name[name].shape == parameter.shape:
                    raise FailedPreconditionError(_OTHERS)

    @property
    def has_lost(self) -> bool:
        """Whether gradients were freed that no step has."""
        return self._lost or (self.stream is not None and self.stream.frees and bool(self.stream.left))

    def leave(self) -> None:
        """Before another job is derived from this one. What has left of the step that comes next is taken back: it is
        in .grad."""
        self.settle()
        if self.stream is not None and self.stream.begun:
            if self.stream.sealed is not None:
                raise RuntimeError("the param groups were changed after clip_grad_norm_ or unscale_, which had all ranks "
                                   "end the step; call zero_grad() and do the step's backward passes again")
            if self.stream.frees and self.stream.left:
                raise RuntimeError("the param groups were changed when gradients had left and were freed, as "
                                   "accumulation_steps= has it: call zero_grad() and do the step's backward passes again")
        self.wait_for_weights()
        with self._notifying():
            if self.peers is not None:
                self.peers.change(self.step_count + 1)
            if self.stream is not None and self.stream.begun:
                self.stream.take_back()
            self._write_back()
            self._check_untouched(all_of_it=True)

    def lose(self) -> None:
        """Gradients were freed before this was bound: the next step is made after zero_grad()."""
        self._lost = True

    def _has_failed(self) -> bool:
        self._settle_alone()
        return self.failed

    @property
    def failed(self) -> bool:
        """Its session has ended, and it makes no further step."""
        if self._broken is not None or (self.is_torn and self.peers is not None):
            return True
        return self.session is not None and self.session.ended and not self.is_torn

    @property
    def is_torn(self) -> bool:
        return self._reopening or (self.session is not None and self.session.torn)

    def settle(self, again: bool = False) -> None:
        """Before whatever needs to know where the job stands. After an interrupt, or again: another session, with the
        job's step, and its weights in the parameters; what was given of the step in progress is given again.
        FailedPreconditionError where that is for all ranks to do."""
        if self._broken is None and self.peers is not None and self.is_torn:
            self._broken = _INTERRUPTED
        if self._broken is not None:
            raise FailedPreconditionError(self._broken)
        if not (again or self.is_torn):
            return
        before, given = self._given or (self.step_count, None)
        self._lost = self._lost or (self.stream is not None and self.stream.frees and bool(self.stream.left))
        with self._notifying():
            for tries in range(_MOST_SESSIONS):
                try:
                    self._open_again()
                    break
                except AbortedError:  # By what is left of the session that was interrupted.
                    if tries + 1 == _MOST_SESSIONS:
                        raise
        if self.step_count > before:
            self._applied, self._lost = given and _print_of([gradient for gradient, _ in given]), False
        self._given, self._reopening = None, False

    def _settle_alone(self) -> None:
        if self.is_torn and self.peers is None and self._broken is None:
            self.settle()

    def settle_to_save(self) -> None:
        """Before a state is taken, which says where the job stands, also where only attach() goes on from there."""
        if self._broken is None and not self.failed:
            self.settle()
            self.end_step()
            return
        if self._kept.service is not None:
            self._kept.service.check()
        job = next((job for job in self._client.jobs() if job["uid"] == self.job_uid), None)
        if job is None:
            raise NotFoundError(f"the service has no job {self.job} of this optimizer any more, so there is no state")
        self.step_count = job["committed_step"]

    @contextlib.contextmanager
    def _part(self):
        """See Session.part. What the service has refused in it, attach() alone can go on from."""
        try:
            with self.session.part():
                yield
        except BallastError:
            self._broken = self._broken or _INTERRUPTED
            raise

    def save(self) -> None:
        """With a state of the trainer's: has the service save the step that it is of, in the background, so that
        the trainer can go on from that state later, whatever becomes of the job. Once for a step, by rank 0."""
        if self.rank != 0 or self.step_count == self._saved_step:
            return
        first, self._saved_step = self._saved_step is None, self.step_count
        if self._kept.service is not None:
            if first:
                warnings.warn("this state can be gone on from only within this run: its service was started for the "
                              "run (service=None) and ends with it. Give the service= of a "
                              "ballast.Service(checkpoint_dir=...) or of a ballastd with a --checkpoint-dir",
                              stacklevel=3)
            return
        try:
            step = self._client.save(self.job, background=True)["step"]
            if step != self.step_count:
                raise BallastError(f"the job is at step {step}, this trainer at step {self.step_count}")
        except BallastError as error:
            warnings.warn(f"the service did not save step {self.step_count} of job {self.job} with this state, which "
                          f"can be gone on from only while the job is at that step: {error}", stacklevel=3)

    def close_job(self, save: bool) -> None:
        """Of all ranks: closes the job on the service, where it is saved before. The session of every rank has ended
        then."""
        self.settle()
        self.wait_for_weights()
        self._closings += 1
        with self._notifying():
            if self.peers is not None:  # One may still receive the weights of the step.
                self.peers.meet(f"closing {self._closings} begun")
            close = functools.partial(self._close_job, save)
            refused = _refusal(close, BallastError) if self.rank == 0 else ""
            if self.peers is not None:
                # A save takes as long as it takes.
                refused = self.peers.from_first(f"closing {self._closings}", refused, is_bounded=False)
        if refused:
            raise _error_of(refused)

    def _close_job(self, save: bool) -> None:
        if save and self._kept.service is not None:
            raise FailedPreconditionError("the service was started for this run (service=None) and has no place to save "
                                          "to: give service= the address of a ballast.Service(checkpoint_dir=...) or of "
                                          "a ballastd with a --checkpoint-dir")
        if save:
            self.session.save(self.job)
        with self.session.part():
            self.session.close_job()

    def read_state(self, parameter: torch.Tensor, plane: str) -> tuple[torch.Tensor, int]:
        """A plane of a parameter in fp32, placed as the parameter is, and how often that has been updated."""
        index = next(i for i, ours in enumerate(self.parameters) if ours is parameter)
        if self._broken is None and not self.failed:
            self.settle()
            whole = torch.empty(tuple(parameter.shape), dtype=torch.float32)
            _, updates = self.session.read_state(index, plane, whole.data_ptr(), memory=whole)
        else:  # The job can still be looked at.
            whole = torch.from_numpy(self._client.state(self.job, self.names[index], plane))
            updates = self._client.summary(self.job, self.names[index])["update_count"]
        whole = whole.to(parameter.device)
        if isinstance(parameter, DTensor):  # Each rank keeps its own part of what it has read.
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return whole, updates

    # ------------------------------------------------------------ a step

    def write_state(self, indices: list[int], planes: dict[str, list[torch.Tensor | None]],
                    update_counts: list[int] | None) -> None:
        """Of all ranks, between steps: these planes of these parameters, each placed as the parameter is, or None for
        zeros; and how often they were updated."""
        place_of = {index: place for place, index in enumerate(indices)}
        flat: dict[tuple[int, str], torch.Tensor] = {}

        def write(index: int, plane: str, offset: int, elements: int, address: int) -> None:
            value = planes[plane][place_of[index]]
            if value is None:
                return  # The memory is zero.
            if (index, plane) not in flat:
                flat.clear()
                flat[index, plane] = part_of(value, self.parameters[index]).detach().reshape(-1)
            place = torch.frombuffer((ctypes.c_float * elements).from_address(address), dtype=torch.float32)
            place.copy_(flat[index, plane][offset:offset + elements])

        with self._notifying(), self.session.part(), self._waiting_in(self.step_count + 1):
            self.session.write_state(indices, list(planes), write, update_counts=update_counts)
        self._saved_step = None  # The state of that step is another one now.

    @contextlib.contextmanager
    def _waiting_in(self, step: int):
        if self.peers is None:
            yield
            return
        self.peers.step = step
        try:
            yield
        finally:
            self.peers.step = None

    def send_weights(self, indices: list[int] | None) -> None:
        """Of all ranks, between steps: the weights of these parameters, by default of all that are trained, are the
        service's, too."""
        of_job = self.session.job.parameters
        chosen = [index for index in (range(len(of_job)) if indices is None else indices) if not of_job[index].frozen]
        if not chosen:
            return
        if self.stream is not None and self.stream.begun:
            raise FailedPreconditionError("the step has begun, in a backward: call zero_grad(), or step(), before "
                                          "send_weights()")
        self.write_state(chosen, {"master": [self.parameters[index] for index in chosen]}, None)
        for index in chosen:
            self.places.keep(index)
        self._watch.remember(chosen)

    def step(self, loss_scale: float, param_groups: list[dict[str, Any]]) -> Decision:
        """param_groups: as they are now; their parameters must be those that it is bound to."""
        with self._notifying(of_interrupts=True):
            return self._step(loss_scale, param_groups)

    def interrupted(self) -> None:
        """In a step(), by Ctrl-C: what the trainer saves then is all of one step."""
        with contextlib.suppress(Exception):
            self._settle_alone()
        if self._given is not None and self.step_count > self._given[0]:
            self._applied = _print_of([gradient for gradient, _ in self._given[1]])

    def _step(self, loss_scale: float, param_groups: list[dict[str, Any]]) -> Decision:
        self.settle()
        if not self.has(param_groups):
            raise FailedPreconditionError(_OTHERS)
        for number, (then, now) in enumerate(zip(self._made_with, self._hyper_parameters())):
            for name in ("amsgrad", "decoupled_weight_decay"):
                if getattr(then, name) != getattr(now, name):
                    raise RuntimeError(f"{name} of param group {number} was {getattr(then, name)} when the job was "
                                       f"made, and is {getattr(now, name)} now, which no job does: set it back, or "
                                       "create another optimizer and another job")
        given = [seen(parameter.grad) for parameter in self.parameters]
        was_made = self._was_made(given)
        self._given = self._applied = None
        if was_made:
            return Decision(self.step_count, True, math.nan, math.nan, "")
        self._check_not_lost()
        streamed = self.stream is not None and self.stream.begun
        if streamed:
            self._check_begun()
            outdated = self._is_outdated()
        elif not self._has_warned and all(gradient is None for gradient, _ in given):
            self._has_warned = True
            warnings.warn(_WITHOUT if any(p.requires_grad for p in self.parameters) else _ALL_FROZEN, stacklevel=4)
        self._clock.lap("compute")
        with self._notifying():
            if streamed and outdated:
                streamed = self._take_back()
            if streamed and (self.stream.sealed is not None or loss_scale != 1.0):
                decide = functools.partial(self._vote, self.stream.seal(), loss_scale)
                self._call_joined("step", loss_scale)
            else:
                gradients = self._gradients()  # What cannot be sent is found before the step begins.
                if self.stream is None or not self.stream.begun:
                    self._prepare_begin(in_step=True)
                self._call_joined("step", loss_scale)
                decide = functools.partial(self._seal_and_vote, gradients, loss_scale)
            self._given = self.step_count, given
            with self._part():
                with self._waiting_in(self.step_count + 1):
                    decision = decide()
                self._end(decision)
            if self.returning is not None:
                self.returning.take_held()
        return decision

    def _was_made(self, given: list[Seen]) -> bool:
        """Whether an interrupted step() had made the step of these gradients, so that they do not count twice."""
        if self._applied is not None:
            return self._applied == _print_of([gradient for gradient, _ in given])
        if self._given is None or self.step_count <= self._given[0]:
            return False
        # The interrupt came after that, before the trainer was told.
        return any(gradient is not None for gradient, _ in given) and all(
            one is other and version == before for (one, version), (other, before) in zip(given, self._given[1]))

    def _call_joined(self, what: str, loss_scale: float = 1.0) -> None:
        """In a join, has ranks that have joined do the same; see uneven."""
        if self.peers is None:
            return
        sealed = None if self.stream is None else self.stream.sealed
        gradients = {} if sealed is not None or what == "undo" else {
            index: parameter.grad.detach() for index, parameter in enumerate(self.parameters)
            if not self.session.job.parameters[index].frozen and parameter.grad is not None}

        def call_of() -> uneven.Call:
            begun, now = self.stream is not None and self.stream.begun, self._hyper_parameters()
            return uneven.Call(what, attempts=self.attempts(), begun=begun, settings=now, loss_scale=loss_scale,
                               begun_with=self._begun_with if begun else now, clip=sealed and sealed.clip_so_far())

        uneven.call(self.parameters, call_of, gradients, self.places)

    def shadow(self, call: uneven.Call, receive: Callable[..., dict[int, torch.Tensor]],
               param_groups: list[dict[str, Any]]) -> Decision | None:
        """Of a rank that has joined: seals, or makes the step, with the settings and the gradients of the others.
        receive: gets the gradients of the parameters that it is given. They lie in `.grad` until the step ends."""
        own = self._hyper_parameters
        self._hyper_parameters = lambda: call.begun_with
        try:
            if call.clip is None:
                self.end_shadow()  # What was sealed is not the step's.
                if self.stream is not None:
                    self.stream.catch_up(*call.attempts)
                self._take_over(receive({index: self.parameters[index] for index in call.given}, self.places))
                if call.begun and not self.stream.begun:
                    self._begin_early()
            else:
                self.stream.sealed.follow(call.clip)
            if call.what == "seal":
                self.stream.seal()
                return None
            self._hyper_parameters = lambda: call.settings
            decision = self.step(call.loss_scale, param_groups)
            self.end_shadow()
            return decision
        except BaseException:
            self._put_back()
            raise
        finally:
            self._hyper_parameters = own

    def end_shadow(self) -> None:
        """The step is decided, or left out."""
        if self._own_gradients is not None:
            if self.stream is not None and self.stream.sealed is not None:
                self.stream.discard()
            self._put_back()

    def attempts(self, at_end: bool = False) -> tuple[int, list[int]]:
        """At the step that comes next, as all ranks must have made them: how often what had left was discarded, and each
        gradient has come. at_end: of the join, where what has left is discarded."""
        if self.stream is None:
            return 0, []
        return self.stream.discards + (at_end and self.stream.begun), self.stream.came

    def end_join(self, of_ranks: list[tuple[int, list[int]]]) -> None:
        """All ranks have joined, with these attempts: what is not stepped on leaves in the next step()."""
        if self.stream is not None:
            self.stream.catch_up(max(discards for discards, _ in of_ranks),
                                 [max(came) for came in zip(*(came for _, came in of_ranks))])

    def _take_over(self, gradients: dict[int, torch.Tensor]) -> None:
        """Except of what has left in a backward of this rank itself."""
        self._own_gradients = [parameter.grad for parameter in self.parameters]
        left = () if self.stream is None else self.stream.left
        for index, parameter in enumerate(self.parameters):
            if index not in left:
                parameter.grad = gradients.get(index)

    def _put_back(self) -> None:
        for parameter, gradient in zip(self.parameters, self._own_gradients or ()):
            parameter.grad = gradient
        self._own_gradients = None

    def forget_given(self) -> None:
        """The trainer knows of the step, or has called zero_grad()."""
        self._given, self._applied, self._lost = None, None, False

    def _end(self, decision: Decision) -> None:
        comes_later = self.returning is not None and decision.applied
        if not comes_later:
            self.session.receive_weights()
        self._clock.lap("wait")
        self.step_count, self._in_step = decision.step, comes_later
        if self.stream is not None:
            self.stream.finish()
        elif self._overlap:
            self.stream = self._start_stream()
        if comes_later:
            self.places.notify()
            self._elsewhere = self.places.elsewhere()
            self.returning.begin(_weakly(self._take_coming), self._views_of)
        elif decision.applied:
            self._take_weights()
            self._clock.lap("reduce" if self.places.together else "wait")

    def wait_for_weights(self) -> None:
        """Returns when the weights of the last step are in the parameters."""
        if self.is_torn:
            self.settle()
        if self.returning is not None:
            self.returning.wait()
            self.end_step()

    def end_step(self) -> None:
        """Returns when the service has ended the step, whose weights may not be in the parameters yet."""
        if self._in_step:
            with self._waiting(), self._part():
                self.session.receive_weights()
                self._in_step = False

    def _take_coming(self, indices: list[int], at_end: bool) -> None:
        """See ReturningWeights.begin."""
        if self.is_torn:
            return self.settle()
        if at_end:
            self.end_step()
        with self._waiting():
            if self._in_step:
                self.session.await_weights(indices)
            with self._part():
                for index in indices:
                    if index in self._elsewhere:
                        self._elsewhere.pop(index).copy_(self.places.places[index])
                self.returning.arrived(indices)
                self._watch.remember(indices)

    def _views_of(self, index: int) -> list[torch.Tensor]:
        """The tensors that this has of the parameter's memory."""
        elsewhere = [self._elsewhere[index]] if index in self._elsewhere else []
        return [self.places.places[index], *elsewhere, *self._watch.views_of(index)]

    @contextlib.contextmanager
    def _waiting(self):
        """Around a wait for weights, which after Ctrl-C may be done again."""
        if self._broken is not None:
            raise FailedPreconditionError(self._broken)
        self._clock.lap("compute")
        with self._notifying():
            try:
                yield
                self._clock.lap("wait")
            except (BallastError, RuntimeError) as error:
                self._broken = self._broken or (_INTERRUPTED if isinstance(error, BallastError) else str(error))
                raise

    def undo(self) -> None:
        """Of all ranks: undoes the last step, and puts the weights of the one before into the parameters."""
        self.settle()
        self.wait_for_weights()
        with self._notifying():
            self._undos += 1
            self._call_joined("undo")
            if self.peers is not None:  # One may still receive the weights of the step.
                self.peers.meet(f"undo {self._undos} begun")
            with self._part():
                refused = "" if self.rank != 0 else _refusal(self.session.undo, FailedPreconditionError,
                                                             PermissionDeniedError)
                if self.peers is not None:
                    refused = self.peers.from_first(f"undo {self._undos}", refused)
                if not refused:
                    self._open_again()
                    self._reopening = False
        if refused:
            raise _error_of(refused)

    def _open_again(self) -> None:
        """The session of every rank has ended."""
        self._reopening = True
        if self.stream is not None and self.stream.closed:
            self.stream = None
        if self.stream is not None:
            self.stream.leave_session()
        if self.returning is not None:
            self.returning.close()
        self.session.close(wait=True)
        self.session, self._in_step = self._open_session(job_uid=self.job_uid), False
        if self.peers is not None:
            self.peers.meet(f"joined after undo {self._undos}")
        if self.stream is not None:
            self.stream.move_to(self.session)
        self.session.read_weights()
        self._meet(f"weights read after undo {self._undos}")
        self.step_count = self.session.committed_step
        if self._saved_step is not None and self._saved_step > self.step_count:  # It will be another one.
            self._saved_step = None
        self._take_weights()

    def _seal_and_vote(self, gradients: dict[int, torch.Tensor], loss_scale: float) -> Decision:
        if self.stream is None or not self.stream.begun:
            self._begin(loss_scale)
            if self.stream is not None:
                self.stream.begun = True
        if self.stream is None:
            self._push(gradients)
        else:
            self._give_rest(gradients)
        self._expected = {"expected_max_norm": self._max_norm}
        self._report()
        return self.session.seal_and_vote(1, max_norm=self._max_norm, hyper_parameters=self._overrides())

    def _seal(self) -> Sealed:
        """Of the step whose gradients have left during backward."""
        self.settle()
        self._check_not_lost()
        self.stream.check_ended(by_itself=self.peers is None)
        outdated = self._is_outdated()
        self._clock.lap("compute")
        with self._notifying():
            begins = (outdated and not self._take_back()) or not self.stream.begun
            if begins:
                self._prepare_begin()
            gradients = self._gradients()
            self._call_joined("seal")
            with self._part(), self._waiting_in(self.step_count + 1):
                if begins:
                    self._begin()
                    self.stream.begun = True
                self._give_rest(gradients)
                self._report()
                norm = self.session.seal(1)
                self.stream.sealed = Sealed(norm, [parameter.grad for parameter in self.parameters])
        self._clock.lap("wait")
        return self.stream.sealed

    def _vote(self, sealed: Sealed, loss_scale: float) -> Decision:
        """loss_scale: of a GradScaler that has not unscaled yet."""
        sealed.unscaling /= loss_scale
        if self._max_norm > 0:
            sealed.clip(range(len(self.source)), self._max_norm)
        ballot = sealed.ballot()
        # By multipliers the service cannot know what will be clipped.
        self._expected = {"expected_max_norm": ballot.get("max_norm", 0.0)} if sealed.unscaling == 1 else {
            "expected_multipliers": len(self.source) * [sealed.unscaling]}
        self.session.report(self._logged.read())  # What was logged since the seal, too.
        decision = self.session.vote(**ballot, hyper_parameters=self._overrides())
        coefficient = sealed.coefficient() if "multipliers" in ballot else decision.clip_coefficient
        return dataclasses.replace(decision, norm=decision.norm * sealed.unscaling, clip_coefficient=coefficient)

    def _report(self) -> None:
        """Goes with the seal that comes next. The gradients have left, so tensors that are read now are waited for no
        longer than those were."""
        self._clock.lap("send")
        self.session.report(self._logged.read(), self._clock.take())

    def _overrides(self) -> list[HyperParameters] | None:
        """What has been set since the step began."""
        now = self._hyper_parameters()
        return None if now == self._begun_with else [now[index] for index in self.source]

    def discard(self, set_to_none: bool) -> None:
        """With zero_grad(): takes back what has left since the last step."""
        self._settle_alone()
        self.forget_given()
        if self.stream is not None:
            self.stream.discard()
            for index, parameter in enumerate(self.parameters):
                self.stream.zero(index, parameter, set_to_none)

    def _gradients(self) -> dict[int, torch.Tensor]:
        """What this rank has in .grad and has not left, by index in the job. RuntimeError if it cannot be sent."""
        found, left = {}, () if self.stream is None else self.stream.left
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None or index in left or self.session.job.parameters[index].frozen:
                continue
            self._check_gradient(index, parameter.grad)
            found[index] = parameter.grad.detach()
        return found

    def _push(self, gradients: dict[int, torch.Tensor]) -> None:
        """All of them, of which one at a time is copied where it is not in host memory."""
        for index, gradient in gradients.items():
            part = self._own_part(index, gradient)
            begin, end = self.places.own_range(index)
            if begin == end:
                continue  # Those who own elements of it tell that it was used.
            own = part.reshape(-1)[begin:end].to("cpu").contiguous()
            # Where the first element of all would be. No other than the own ones are read.
            self.session.give_gradient(index, own.data_ptr() - begin * own.element_size(), final=True)
        self.session.end_gradients(final=True)

    def _give_rest(self, gradients: dict[int, torch.Tensor]) -> None:
        """What did not leave during backward."""
        for index, gradient in gradients.items():
            self.stream.give(index, gradient)
        self.session.end_gradients(final=True)

    def _prepare_begin(self, in_step: bool = False) -> None:
        """What may be found wrong before a step begins."""
        if self.returning is not None:
            self.returning.wait()
            self.end_step()
        self._write_back()
        self._check_untouched(all_of_it=in_step)
        self._begun_with = self._hyper_parameters()

    def _begin_early(self) -> None:
        """Inside a backward."""
        self._prepare_begin()
        with self._notifying(), self._part():
            self._begin()
            self.stream.begun = True

    def _begin(self, loss_scale: float = 1.0) -> None:
        self.session.begin_step([self._begun_with[index] for index in self.source], loss_scale=loss_scale,
                                **self._expected)

    def _check_not_lost(self) -> None:
        if self._lost:
            raise FailedPreconditionError("gradients had left and were freed, as accumulation_steps= has it, when the "
                                          "step was interrupted: call zero_grad() and do its backward passes again")

    def _is_outdated(self) -> bool:
        """Whether .grad is not what has left. FailedPreconditionError if that cannot leave again."""
        if self.stream.was_broken_off():
            return True
        changed = None if self.stream.sealed is not None else self.stream.first_changed(self.parameters)
        if changed is not None and self.stream.frees:
            raise FailedPreconditionError(
                f"the gradient of parameter {self.names[changed]} had left and was freed, as accumulation_steps="
                f"{self._accumulation_steps} promises that no more comes, and more came: call zero_grad() and do the "
                "step's backward passes again; if a step has more of them, create the optimizer without "
                "accumulation_steps")
        return changed is not None

    def _take_back(self) -> bool:
        """Takes back what has left, so that all of .grad leaves in step(). True: the step is decided already, as one that
        is skipped."""
        try:
            self.stream.take_back()
        except FailedPreconditionError:
            return True
        return False

    def _check_begun(self) -> None:
        """What has left is still the step's."""
        self.stream.check_ended(by_itself=self.peers is None)
        sealed = self.stream.sealed
        edited = None if sealed is None else sealed.first_changed([parameter.grad for parameter in self.parameters])
        if edited is not None:
            raise RuntimeError(f"the gradient of parameter {self.names[edited]} was changed after clip_grad_norm_ or "
                               "unscale_, which had all ranks end the step; call zero_grad() and do the step's "
                               "backward passes again")
        changed = next(iter(self._watch.changed()), self._watch.first_written())
        if changed is not None:
            raise RuntimeError(f"parameter {self.names[changed]} was changed during the step, and the service does "
                               "not know: call zero_grad(), and change weights between steps, with send_weights()")

    def _start_stream(self) -> GradientStream:
        trainable = [parameter for parameter in self.parameters if parameter.requires_grad]
        on_gpu = any(streaming.is_on_gpu(local(parameter)) for parameter in trainable)
        # A trainer that computes on every processor waits for those of its threads that copies and the service displace:
        # backward takes longer by more than step() gets shorter.
        self.leaves_early = (on_gpu or self.peers is not None or self._accumulation_steps is not None or
                             not self.session.shares_memory or
                             torch.get_num_threads() < len(os.sched_getaffinity(0)))
        # A parameter that is whole on every rank beside sharded ones is reduced by the trainer, after backward.
        hooked = [None if not parameter.requires_grad or not self.leaves_early or isinstance(self.places, Flats) or
                  (self.mesh is not None and not isinstance(parameter, DTensor)) else parameter
                  for parameter in self.parameters]
        frees = self._accumulation_steps is not None and not isinstance(self.places, Flats)
        stream = GradientStream(self.session, hooked, self._accumulation_steps or 1, frees, _weakly(self._own_part),
                                _weakly(self._begin_early), _weakly(self._seal), _weakly(self._has_failed),
                                _weakly(self.forget_given), self._changed, on_gpu)
        if isinstance(self.places, Flats):
            hook_ddp(self._module)
        patches.register(stream, {index: parameter for index, parameter in enumerate(self.parameters)
                                  if parameter.requires_grad})
        return stream

    def _own_part(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        self._check_gradient(index, gradient)
        here = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        return here.detach() if here.requires_grad else here  # It does with create_graph.

    @contextlib.contextmanager
    def _notifying(self, of_interrupts: bool = False):
        """Notifies the other ranks of an error that this one cannot go on from: they would wait for it. of_interrupts:
        of what is none of the kind that all ranks have."""
        try:
            yield
        except NothingToResume:  # On all ranks.
            raise
        except Exception if of_interrupts else ():
            raise
        except BaseException as error:
            if isinstance(error, AbortedError):
                if "has taken rank" in str(error):
                    error.args = (f"{error}; if that was no restart of this run, give each training a job= of its own",)
                self._broken = self._broken or _INTERRUPTED
            if self.peers is not None:
                self.peers.fail(error)
                self._broken = self._broken or (f"this optimizer ended with: {str(error) or type(error).__name__}; "
                                                "attach(), on all ranks, goes on from the job's weights")
            raise

    def _check_untouched(self, all_of_it: bool) -> None:
        """The service has the weights: what other code has written since would be lost. all_of_it: what autograd
        does not count, too, where that can be seen."""
        if self._sends:
            return self.send_weights(None if self.peers is not None else
                                     sorted({*self._watch.changed(), *self._watch.written()}))
        changed = self._watch.changed()
        same = {i: self.places.same(i) for i in changed}
        # Written in place: what was there is with the service.
        unknown = {i: local(self.parameters[i]).clone() for i in changed if same[i] is None}
        if unknown:
            self.session.read_weights()
            for i, written in unknown.items():
                same[i] = torch.equal(local(self.parameters[i]), written)
                local(self.parameters[i]).data.copy_(written)  # Autograd may have saved it.
        written = next((i for i in changed if not same[i]), self._watch.first_written() if all_of_it else None)
        if written is not None:
            raise RuntimeError(
                f"parameter {self.names[written]} was changed since the last step, and the service, which keeps the "
                "weights, does not know: call the optimizer's send_weights() after the change, or attach() to have the "
                "service's weights back")
        if changed:
            self._watch.remember()

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
        if self._watch is None:
            self._watch = Watch(self.parameters, exact=self._sends and self.peers is None)
        else:
            self._watch.remember()


def _listen(peers: Peers | None, own: OwnService | None) -> None:
    """While the service is awaited: raises what ends the wait."""
    if peers is not None:
        peers.listen()
    if own is not None:
        own.check()


def _refusal(call: Callable[[], Any], *kinds: type[BallastError]) -> str:
    """Status and text of an error of these kinds, which leaves everything as it was; or ""."""
    try:
        call()
    except AbortedError:
        raise
    except kinds as error:
        return f"{error.status} {error}"
    return ""


def _error_of(refusal: str) -> BallastError:
    status, _, why = refusal.partition(" ")
    return error_of(int(status), why)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same for what lives no longer than its object: with a reference to it that would be kept alive."""
    reference = weakref.WeakMethod(method)
    return lambda *arguments: reference()(*arguments)


def _print_of(gradients: list[torch.Tensor | None]) -> list[tuple[int, ...]] | None:
    """Of their bits: others have another one. None if there is none."""
    prints = []
    for gradient in gradients:
        if gradient is None:
            prints.append((0,))
            continue
        bits = local(gradient).reshape(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[gradient.element_size()])
        prints.append((id(gradient), int(bits.sum(dtype=torch.int64)), int(bits[::7].sum(dtype=torch.int64))))
    return prints if any(gradient is not None for gradient in gradients) else None


def _identities(param_groups: list[dict[str, Any]]) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in param_groups]


def _close_at_exit(binding: Binding) -> None:
    """Without keeping it until then."""
    here = weakref.ref(binding)

    def close():
        bound = here()
        # Else a daemon thread is in the middle of it.
        if bound is not None and not (bound.session is not None and bound.session._calling):
            bound.close()

    atexit.register(close)
    weakref.finalize(binding, atexit.unregister, close)
