"""A rank as a member of its job: how it joins, with other ranks, on a service."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._native import services_of
from ..client import Client
from ..errors import AbortedError, BallastError, FailedPreconditionError, NotFoundError, error_of
from ..resize import OtherShape, other_shape
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
from ..session import HyperParameters, Job, Session, find_services
from . import patches
from .ddp import check_reduction, ddp_of, whole_on_several_ranks
from .description import Described, check_group, check_memory, lines, weights_in_lines
from .moments import Moments, digest, gather, upload
from .options import Options
from .orthogonal import Orthogonalizer
from .peers import Peers
from .places import Flats, Shards, local, mesh_of, placements_of
from .returning import check_overlap_weights
from .services.nodes import CLUSTER, NODE, kind_of, lasting, started
from .services.own_service import Kept, OwnService

# In one binding: each but the last ends because another rank is taken from an ended process.
MOST_SESSIONS = 6


class NothingToResume(NotFoundError):
    """The service has neither the state's job nor a checkpoint of that step."""


@dataclasses.dataclass(frozen=True)
class Begin:
    """new: if the service does not have the job, it is made with the parameters' weights; without new the job must
    exist. attach: the job may be past its first step, and its weights are put into the parameters. resume: the uid
    and step of a `state_dict`, which the job must have. checkpoint: the start of a job without weights. moments: by
    parameter of the param groups, added to the first weights of a job without weights; with resume NothingToResume
    if the service does not know that job. derive: the job continues from another one with other parameters: see
    Origin."""

    new: bool
    attach: bool
    resume: tuple[str, int] | None = None
    checkpoint: str | None = None
    moments: list[Moments | None] | None = None
    derive: Origin | None = None


class Ended(NamedTuple):
    """Why steps need attach() first: FailedPreconditionError of each call, with a reason. INTERRUPTED: a call was
    interrupted. ENDED: a call failed in the middle."""

    message: str = "the last call was interrupted; call attach() to take the job's weights and continue from its step"
    reason: str = "INTERRUPTED"

    def error(self) -> BallastError:
        return error_of(FailedPreconditionError.code, self.message, self.reason)


class Member:
    """Owns a binding's part of its job: the description, the peers, the session and the places where it writes
    weights, the step, and whether the session can continue. trained: see Described."""

    def __init__(self, param_groups: list[dict[str, Any]], hyper_parameters: Callable[[], list[HyperParameters]],
                 options: Options, trained: Collection[int], kept: Kept):
        self.options, self.kept = options, kept
        self.session: Session | None = None
        self.peers: Peers | None = None
        self.ended: Ended | None = None
        self.reopening = False  # An interrupt may come during that, too.
        self.saved_step: int | None = None
        self._rounds = 0  # See _end_second_round.
        for group in param_groups:
            check_group(group)  # Its parameters may have changed since the optimizer was made.
        self.described = Described(param_groups, hyper_parameters(), trained)
        self.parameters, self.names = self.described.parameters, self.described.names
        check_memory(list(zip(self.names, self.parameters)))
        for parameter in self.parameters:
            patches.release(parameter)
        self.orthogonalizer: Orthogonalizer | None = None
        self.module = options.module
        # An accelerator, or a trainer, may have wrapped the module since the optimizer was made.
        if options.overlap and whole_on_several_ranks(self.parameters, options.process_group):
            self.module = ddp_of(self.parameters, self.module)
            check_reduction(self.module)
        if options.overlap_weights:
            check_overlap_weights((self.names[index], parameter) for index, parameter in self.described.trained.items())
        self.mesh = mesh_of(self.names, self.parameters)
        ranks = self._ranks()
        self.rank = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
        if len(ranks) > 1:
            self.peers = Peers(options.job, ranks, options.timeout)

    # ------------------------------------------------------------ errors

    @property
    def failed(self) -> bool:
        """Its session has ended, and it makes no further step."""
        if self.ended is not None or (self.is_torn and self.peers is not None):
            return True
        return self.session is not None and self.session.ended and not self.is_torn

    @property
    def is_torn(self) -> bool:
        return self.reopening or (self.session is not None and self.session.torn)

    def check(self) -> None:
        """FailedPreconditionError if it has ended."""
        if self.ended is not None:
            raise self.ended.error()

    @contextlib.contextmanager
    def notifying(self, of_interrupts: bool = False):
        """Notifies the other ranks of an error that this rank cannot continue from: they would wait for it.
        of_interrupts: also of exceptions that not all ranks get."""
        try:
            yield
        except NothingToResume:  # On all ranks.
            raise
        except Exception if of_interrupts else ():
            raise
        except BaseException as error:
            if isinstance(error, AbortedError):
                self.ended = self.ended or Ended()
            if self.peers is not None:
                self.peers.fail(error)
                self.ended = self.ended or Ended(f"this optimizer ended with: {str(error) or type(error).__name__}; "
                                                 "attach(), on all ranks, goes on from the job's weights", "ENDED")
            raise

    @contextlib.contextmanager
    def part(self):
        """See Session.part. If the service refuses a call in it, only attach() can continue."""
        try:
            with self.session.part():
                yield
        except BallastError:
            self.ended = self.ended or Ended()
            raise

    @contextlib.contextmanager
    def waiting_in(self, step: int):
        if self.peers is None:
            yield
            return
        self.peers.step = step
        try:
            yield
        finally:
            self.peers.step = None

    def meet(self, where: str) -> None:
        """Before a collective that takes weights: ranks in it would not hear that another one has failed."""
        if self.peers is not None and self.places.together:
            self.peers.meet(where)

    def from_first(self, what: str, call: Callable[[], str | None], is_bounded: bool = True) -> str:
        """The result of the call, which only rank 0 makes. is_bounded: see Peers.from_first."""
        said = call() if self.rank == 0 else None
        return said or "" if self.peers is None else self.peers.from_first(what, said, is_bounded)

    # ------------------------------------------------------------ joining

    def open(self, begin: Begin) -> None:
        """The session, with the job's weights at its places."""
        options, kept = self.options, self.kept
        job = self._job()
        moments = begin.moments and dict(zip((one for group in self.described.of_groups for one in group), begin.moments))
        if self.peers is not None:
            self.peers.agree([("the call", "attach()" if begin.attach else "step()"), ("service", kind_of(options.service)),
                              ("the loaded state", str(begin.resume)),
                              ("its moments", "none" if moments is None else
                               digest(self.parameters, moments) if self.mesh is None else "there"),
                              ("max_norm", str(options.max_norm)), *lines(job)])
        if self.mesh is None and self.peers is not None:
            members = [[i for i, p in enumerate(job.parameters) if p.group == number and not p.frozen]
                       for number in range(len(job.groups))]
            self.places = Flats(self.parameters, members, options.process_group)
        else:
            self.places = Shards(self.parameters, self.mesh, [p.placements for p in job.parameters],
                                 [not p.frozen for p in job.parameters])
        address, job, self._credentials = self._home(
            job, None if moments is None or begin.checkpoint is not None else begin.resume or ("", 0))
        self.name = job.name
        self.client = Client(job.lead(self.rank, address), options.timeout, wait=min(30.0, options.timeout),
                             **self._credentials)
        places = [place.data_ptr() for place in self.places.places]
        uid, origin = self._origin(begin, job, places, or_nothing=moments is not None)
        if begin.resume is None and moments is not None and not self.from_first("begins with moments", lambda: may_begin(
                self.client, job.name, or_go_on=begin.checkpoint is not None) and "yes"):
            moments = None
        if begin.resume is None and begin.new:
            self._check_alike(unbegun=not begin.attach or begin.derive is not None)
        # It has no reference to the binding, which would keep it alive.
        self._open_session = functools.partial(
            Session, address, job, places, rank=self.rank, job_uid=uid, join_timeout=min(60.0, options.timeout),
            derive_from_uid=origin.uid or None, derive_from_checkpoint=origin.checkpoint or None,
            timeout=options.timeout, reconnect_timeout=options.reconnect_timeout,
            while_waiting=functools.partial(_listen, self.peers, kept.service),
            memory=self.places.places, **self._credentials)
        first = ([], {"master": [local(parameter) for parameter in self.parameters]})
        if begin.resume is None and moments is not None:
            first = gather(job, self.parameters, [moments[id(parameter)] for parameter in self.parameters])
        self._make_orthogonalizer(job)
        self._join(begin, first)
        self._end_second_round()
        self.meet("weights read")

    def open_again(self, where: str) -> None:
        """Another session of the same job, whose sessions have all ended. where: all ranks meet there."""
        self.session = self._open_session(job_uid=self.job_uid)
        if self.peers is not None:
            self.peers.meet(f"joined after {where}")
        if not self._end_second_round():
            self.session.read_weights()

    def _ranks(self) -> list[int]:
        """The ranks of the job in its order, with torch's numbers in the world."""
        if not (dist.is_available() and dist.is_initialized()):
            return [0]
        ranks = dist.get_process_group_ranks(self.options.process_group or dist.group.WORLD)
        if self.mesh is None:
            return ranks
        of_mesh = self.mesh.mesh.flatten().tolist()
        if sorted(of_mesh) != sorted(ranks):
            raise ValueError(f"the parameters are on {self.mesh} of {len(of_mesh)} ranks, and {len(ranks)} ranks train "
                             "together: give process_group= the ranks of the mesh, and each such group a job= of its "
                             "own")
        return of_mesh

    def _job(self) -> Job:
        mesh, parameters, options = [], self.described.specs, self.options
        if self.mesh is not None:
            names = self.mesh.mesh_dim_names or [f"dim{d}" for d in range(self.mesh.ndim)]
            mesh = list(zip(names, self.mesh.mesh.shape))
            parameters = [dataclasses.replace(spec, placements=placements_of(spec.name, parameter, self.mesh))
                          for spec, parameter in zip(parameters, self.parameters)]
        return Job(options.job, self.described.groups, parameters,
                   world_size=1 if self.peers is None else self.peers.world_size, unused_policy="skip",
                   update_mode=options.update, max_micro_steps=1, mesh=mesh,
                   keep_previous=options.keep_previous, on_abort=options.on_abort,
                   newton_schulz=options.newton_schulz or self._who_orthogonalizes())

    def _who_orthogonalizes(self) -> str:
        """By default: where the matrices are."""
        on_host = all(local(parameter).device.type == "cpu" for parameter in self._matrices().values())
        return "service" if on_host else "workers"

    def _matrices(self) -> dict[int, torch.Tensor]:
        """Those that Muon trains, by index in the job."""
        return {index: parameter for index, parameter in self.described.trained.items()
                if self.described.groups[self.described.specs[index].group].hyper_parameters.rule == "muon"
                and parameter.numel() > 0}

    def _make_orthogonalizer(self, job: Job) -> None:
        matrices = self._matrices()
        if job.newton_schulz == "workers" and matrices:
            self.orthogonalizer = Orthogonalizer(
                list(matrices), [job.parameters[index].group for index in matrices], self.parameters, self.places,
                self.peers, self._ranks(), self.rank, self.options.process_group)

    def orthogonalize(self, knows: bool = True) -> None:
        """All ranks, in an applied step: the second round, if they make it. knows: this rank's session is in it."""
        if self.orthogonalizer is not None:
            self.orthogonalizer.run(self.session if knows else None)

    def _end_second_round(self) -> bool:
        """All ranks have joined: ends the round that was outstanding. False: there is none."""
        if self.orthogonalizer is None:
            return False
        is_due = knows = self.session.directions_step > 0
        if self.peers is not None:  # An operator may have ended it when some had joined.
            self._rounds += 1
            is_due = bool(self.peers.highest(f"second round {self._rounds}", (int(knows),))[0])
        if is_due:
            self.orthogonalize(knows)
            self.session.receive_weights() if knows else self.session.read_weights()
        return is_due

    def _home(self, job: Job, loaded: tuple[str, int] | None) -> tuple[str, Job, dict[str, str | None]]:
        """Where this rank reaches its home, the job with its members, and the credentials for all of them. A job on
        services of this run may get another name. loaded: see started."""
        options, credentials = self.options, self.options.credentials
        if options.service == NODE:
            return *lasting(job, self.rank, self.peers, functools.partial(
                Client, timeout=options.timeout, wait=min(10.0, options.timeout), **credentials)), credentials
        if options.service is not None and options.service.startswith(CLUSTER):
            return self.from_first("services", lambda: find_services(
                options.service, job, options.timeout, **credentials)), job, credentials
        if options.service is not None:
            return options.service, job, credentials
        return started(job, self.rank, self.peers, self.kept, loaded)

    def _origin(self, begin: Begin, job: Job, places: list[int], or_nothing: bool) -> tuple[str | None, Origin]:
        """Before any rank has a session: the job's uid, and its origin if it is derived. An error if the job does
        not fit `begin`."""
        timeout, credentials = self.options.timeout, self._credentials
        find_other = functools.partial(self._other_shape, job)
        if begin.derive is not None:
            found = self.from_first("derived from", lambda: "\n".join(dataclasses.astuple(
                begin.derive.found(self.client, job.name, begin.checkpoint))))
            return None, Origin(*found.split("\n"))
        if begin.resume is not None:
            uid = self.from_first("uid", lambda: restore(self.client, job, places, *begin.resume, timeout, credentials,
                                                         find_other, or_nothing=or_nothing), is_bounded=False)
            if not uid:
                raise NothingToResume(f"the service has neither job {job.name}, to which the loaded state belongs, nor a "
                                      "checkpoint of it: call load_state_dict() again to start a new job from it")
            return uid, Origin()
        if begin.checkpoint is not None:
            self.from_first("begun from", lambda: begin_from(self.client, job, places, begin.checkpoint, timeout,
                                                             credentials, find_other), is_bounded=False)
        elif not begin.attach and not or_nothing:
            # Before the rank is taken: until then another process may train this job.
            self.from_first("not begun", lambda: not self.kept.begun and refuse_a_begun_one(self.client, job.name))
            self.kept.begun = True
        elif not begin.new:
            self.from_first("known", lambda: refuse_an_unknown_one(self.client, job.name))
        return None, Origin()

    def _other_shape(self, job: Job) -> OtherShape | None:
        options = self.options
        if self.kept.service is not None:  # Nothing can be saved: see nodes.goes_on.
            return None
        return other_shape(job, job.members or services_of(self.client.service).split(","), functools.partial(
            Client, timeout=options.timeout, wait=self.client.wait, **self._credentials))

    def _check_alike(self, unbegun: bool) -> None:
        """If ranks with the same parameters are about to upload a part each: checks that they have the same weights.
        unbegun: the job is known to have no weights."""
        ours = [] if self.peers is None else weights_in_lines(self.names, self.parameters)
        if ours and self.from_first("uploads weights", lambda: "yes" if unbegun or
                                    awaits_weights(self.client, self.name) else ""):
            self.peers.agree(ours, "weights", "a parameter that is no DTensor is whole and the same on every rank: "
                             "wrap the model in DistributedDataParallel first, or give the same seed; shard it with "
                             "fully_shard or parallelize_module, which say what its shards are")

    def _join(self, begin: Begin, first: tuple) -> None:
        """Opens the session and begins. Retries if another rank is taken from a process that was in a step or has
        ended: that raises the job's generation and ends the sessions before it."""
        attach = begin.attach
        for attempt in range(MOST_SESSIONS):
            self.session = self._open_session()
            # Asked when every rank has its first session: an ended one may still get weights before it is notified.
            ended = attempt == 0 and self.peers is not None and (
                self.peers.highest("joined", self.session.generation) > self.session.generation)
            if not ended:
                try:
                    self._begin_session(begin, attach, first)
                    return
                except AbortedError:
                    if attempt + 1 == MOST_SESSIONS:
                        self.session.close()
                        raise
                attach = True  # Weights that this run itself uploaded do not prevent it from continuing.
            self.session.close()

    def _begin_session(self, begin: Begin, attach: bool, first: tuple) -> None:
        """Uploads the first weights and moments, or gets the job's weights. A rank may repeat it alone, so it is not
        a collective."""
        self._check_owned()
        if self.session.awaiting_weights:
            if not begin.new:
                raise FailedPreconditionError(f"job {self.name} has no weights yet; the first step() uploads them")
            upload(self.session, *first)
        elif not attach and not self.kept.begun:  # Another run has begun it since the request.
            raise FailedPreconditionError(begun_already(self.name, self.session.committed_step))
        # A step's second round is ended when all ranks have joined.
        in_round = self.session.directions_step
        if not in_round:
            self.session.read_weights()
        self.step_count, self.job_uid = in_round or self.session.committed_step, self.session.job_uid
        if begin.resume is not None and self.step_count != begin.resume[1]:
            raise FailedPreconditionError(f"the loaded state is of step {begin.resume[1]}, but job {self.name} is at step "
                                          f"{self.step_count}; another trainer has it")

    def _check_owned(self) -> None:
        """The library writes weights by its own arithmetic of shards; torch's must agree."""
        if self.mesh is None:
            return
        for index, elements in enumerate(self.session.owned_elements()):
            if self.session.job.parameters[index].frozen:
                continue
            expected = local(self.parameters[index]).numel() if self.places.owned[index] else 0
            if elements != expected:
                raise RuntimeError(f"this rank has {expected} elements of parameter {self.names[index]}, and its "
                                   f"placements give it {elements}; please report this")


def _listen(peers: Peers | None, own: OwnService | None) -> None:
    """While waiting for the service: raises what ends the wait."""
    if peers is not None:
        peers.listen()
    if own is not None:
        own.check()
