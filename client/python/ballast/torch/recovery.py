"""How a binding continues after its session has ended, and how its job is saved, read and undone."""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import (
    AbortedError,
    BallastError,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    error_of,
)
from .flows import Flows
from .member import MOST_SESSIONS, Ended, Member
from .places import local
from .streaming import Seen


class Recovery:
    """Owns what an unfinished step() was given, which shows whether that step counts. Opens the session again."""

    def __init__(self, member: Member, flows: Flows):
        self.member, self.flows = member, flows
        self._lost = False  # Freed when they were sent.
        # For an unfinished step(): the job's step before, and the gradients.
        self.given: tuple[int, list[Seen]] | None = None
        self._applied: list[tuple[int, ...]] | None = None  # Gradients of a step that was made nevertheless: see
                                                            # _print_of.
        self._undos = self._closings = 0  # Requests.

    # ------------------------------------------------------------ after an interrupt

    def settle(self, again: bool = False) -> None:
        """Call it before anything needs to know where the job stands. After an interrupt, or with again: opens
        another session, puts the job's weights into the parameters, and gives the gradients of the step in progress
        again. FailedPreconditionError if all ranks have to do that."""
        member = self.member
        if member.ended is None and member.peers is not None and member.is_torn:
            member.ended = Ended()
        member.check()
        if not (again or member.is_torn):
            return
        before, given = self.given or (member.step_count, None)
        self._lost = self.has_lost
        with member.notifying():
            for tries in range(MOST_SESSIONS):
                try:
                    self._open_again()
                    break
                except AbortedError:  # From the rest of the interrupted session.
                    if tries + 1 == MOST_SESSIONS:
                        raise
        if member.step_count > before:
            self._applied, self._lost = given and _print_of(given), False
        self.given, member.reopening = None, False

    def _open_again(self) -> None:
        """The session of every rank has ended."""
        member, flows, where = self.member, self.flows, f"undo {self._undos}"
        member.reopening = True
        if flows.stream is not None and flows.stream.closed:
            flows.stream = None
        if flows.stream is not None:
            flows.stream.leave_session()
        if flows.returning is not None:
            flows.returning.close()
        member.session.close(wait=True)
        flows.in_step = False
        member.open_again(where)
        if flows.stream is not None:
            flows.stream.move_to(member.session)
        member.meet(f"weights read after {where}")
        member.step_count = member.session.committed_step
        if member.saved_step is not None and member.saved_step > member.step_count:  # It will be another step.
            member.saved_step = None
        flows.take_weights()

    def settle_alone(self) -> None:
        if self.member.is_torn and self.member.peers is None and self.member.ended is None:
            self.settle()

    def has_failed(self) -> bool:
        self.settle_alone()
        return self.member.failed

    def interrupted(self) -> None:
        """In a step(), by Ctrl-C: everything that the trainer saves then belongs to one step."""
        with contextlib.suppress(Exception):
            self.settle_alone()
        if self.given is not None and self.member.step_count > self.given[0]:
            self._applied = _print_of(self.given[1])

    def was_made(self, given: list[Seen]) -> bool:
        """Whether an interrupted step() had made the step of these gradients, so that they do not count twice."""
        if self._applied is not None:
            return self._applied == _print_of(given)
        if self.given is None or self.member.step_count <= self.given[0]:
            return False
        # The interrupt came after that, before the trainer was told.
        return any(gradient is not None for gradient, _ in given) and all(
            one is other and version == before for (one, version), (other, before) in zip(given, self.given[1]))

    def begin_step(self) -> None:
        """Without gradients so far."""
        self.given = self._applied = None

    def forget_given(self) -> None:
        """The trainer knows the step, or has called zero_grad()."""
        self.given, self._applied, self._lost = None, None, False

    @property
    def has_lost(self) -> bool:
        """Whether freed gradients belong to no step."""
        return self._lost or self.flows.has_freed

    def lose(self) -> None:
        """Gradients were freed before this was bound: the next step needs zero_grad() first."""
        self._lost = True

    def check_not_lost(self) -> None:
        if self._lost:
            raise FailedPreconditionError("the step was interrupted after gradients were sent and freed "
                                          "(accumulation_steps=): call zero_grad() and repeat its backward passes")

    # ------------------------------------------------------------ weights on their way

    def wait_for_weights(self) -> None:
        """Returns when the parameters have the weights of the last step."""
        if self.member.is_torn:
            self.settle()
        if self.flows.returning is not None:
            self.flows.returning.wait()
            self.flows.end_step()

    def take_coming(self, indices: list[int], at_end: bool) -> None:
        """See ReturningWeights.begin."""
        self.settle() if self.member.is_torn else self.flows.take_coming(indices, at_end)

    # ------------------------------------------------------------ the job

    def undo(self, tell: Callable[[], None]) -> None:
        """All ranks: undoes the last step, and puts the weights of the one before into the parameters. tell: makes
        joined ranks do the same."""
        self.settle()
        self.wait_for_weights()
        member = self.member
        with member.notifying():
            self._undos += 1
            tell()
            if member.peers is not None:  # One may still be receiving the step's weights.
                member.peers.meet(f"undo {self._undos} begun")
            with member.part():
                refused = member.from_first(f"undo {self._undos}", functools.partial(
                    _refusal, member.session.undo, FailedPreconditionError, PermissionDeniedError))
                if not refused:
                    self._open_again()
                    member.reopening = False
        if refused:
            raise error_of(*json.loads(refused))

    def close_job(self, save: bool) -> None:
        """All ranks: closes the job on the service, with save after saving it. Then the session of every rank has
        ended."""
        self.settle()
        self.wait_for_weights()
        self._closings += 1
        with self.member.notifying():
            if self.member.peers is not None:  # One may still be receiving the step's weights.
                self.member.peers.meet(f"closing {self._closings} begun")
            # A save is not bounded in time.
            refused = self.member.from_first(f"closing {self._closings}", functools.partial(
                _refusal, functools.partial(self._close_job, save), BallastError), is_bounded=False)
        if refused:
            raise error_of(*json.loads(refused))

    def _close_job(self, save: bool) -> None:
        member = self.member
        if save and member.kept.service is not None:
            raise FailedPreconditionError("the service was started for this run (service=None) and has no place to save "
                                          "to: give service= the address of a ballast.Service(checkpoint_dir=...) or of "
                                          "a ballastd with a --checkpoint-dir")
        if save:
            member.session.save(member.name)
        with member.session.part():
            member.session.close_job()

    def save(self) -> None:
        """With a trainer's state: the service saves the state's step in the background. So the trainer can resume
        from that state later, whatever happens to the job. Once for a step, by rank 0."""
        member = self.member
        if member.rank != 0 or member.step_count == member.saved_step:
            return
        first, member.saved_step = member.saved_step is None, member.step_count
        if member.kept.service is not None:
            if first:
                warnings.warn("this state can be gone on from only within this run: its service was started for the "
                              "run (service=None) and ends with it. Give the service= of a "
                              "ballast.Service(checkpoint_dir=...) or of a ballastd with a --checkpoint-dir",
                              stacklevel=3)
            return
        try:
            step = member.client.save(member.name, background=True)["step"]
            if step != member.step_count:
                raise BallastError(f"the job is at step {step}, this trainer at step {member.step_count}")
        except BallastError as error:
            warnings.warn(f"the service did not save step {member.step_count} of job {member.name} with this state, "
                          f"which can be gone on from only while the job is at that step: {error}", stacklevel=3)

    def settle_to_save(self) -> None:
        """Call it before a state is taken, which says where the job stands; also if only attach() can continue."""
        member = self.member
        if not member.failed:
            self.settle()
            self.flows.end_step()
            return
        if member.kept.service is not None:
            member.kept.service.check()
        job = next((job for job in member.client.jobs() if job["uid"] == member.job_uid), None)
        if job is None:
            raise NotFoundError(f"the service has no job {member.name} of this optimizer any more, so there is no state")
        member.step_count = job["committed_step"]

    def read_state(self, parameter: torch.Tensor, plane: str) -> tuple[torch.Tensor, int]:
        """A plane of a parameter in fp32, placed as the parameter, and the parameter's number of updates."""
        member = self.member
        index = next(i for i, ours in enumerate(member.parameters) if ours is parameter)
        if not member.failed:
            self.settle()
            whole = torch.empty(tuple(parameter.shape), dtype=torch.float32)
            _, updates = member.session.read_state(index, plane, whole.data_ptr(), memory=whole)
        else:  # The job can still be read.
            whole = torch.from_numpy(member.client.state(member.name, member.names[index], plane))
            updates = member.client.summary(member.name, member.names[index])["update_count"]
        whole = whole.to(parameter.device)
        if isinstance(parameter, DTensor):  # Each rank keeps its own part.
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return whole, updates


def _refusal(call: Callable[[], object], *kinds: type[BallastError]) -> str:
    """For the other ranks: an error of these kinds, which changes nothing; or ""."""
    try:
        call()
    except AbortedError:
        raise
    except kinds as error:
        return json.dumps([error.code, str(error), error.reason])
    return ""


def _print_of(given: list[Seen]) -> list[tuple[int, ...]] | None:
    """A fingerprint of the bits of these gradients. None without gradients."""
    prints = []
    for gradient, _ in given:
        if gradient is None:
            prints.append((0,))
            continue
        bits = local(gradient).reshape(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[gradient.element_size()])
        prints.append((id(gradient), int(bits.sum(dtype=torch.int64)), int(bits[::7].sum(dtype=torch.int64))))
    return prints if any(gradient is not None for gradient, _ in given) else None
