"""Steps on the service: from gradients in `.grad`, or already sent, to a decision."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import FailedPreconditionError
from ..session import Decision, HyperParameters
from . import uneven
from .clipping import Sealed
from .flows import Flows
from .member import Member
from .recovery import Recovery
from .reports import Logged
from .streaming import seen

_WITHOUT = ("no parameter of this step() has a gradient, so nothing changes. If there was a backward, the model has other "
            "parameters than this optimizer: create it after what replaces them, such as fully_shard or to_empty")
_ALL_FROZEN = "no parameter of this optimizer requires a gradient, so step() changes nothing: see requires_grad_()"


class Steps:
    """Owns the settings of the next step, if it has begun, and its vote. hyper_parameters: the param groups' current
    ones. is_changed: whether the param groups are of another job. write_back: called before a step begins, with the
    trainer's writes of the state."""

    def __init__(self, member: Member, flows: Flows, recovery: Recovery, *,
                 hyper_parameters: Callable[[], list[HyperParameters]], is_changed: Callable[[], bool],
                 write_back: Callable[[], None], logged: Logged):
        self.member, self.flows, self.recovery = member, flows, recovery
        self._hyper_parameters, self.is_changed = _weakly(hyper_parameters), _weakly(is_changed)
        self._write_back, self._logged = _weakly(write_back), logged
        self._begun_with: list[HyperParameters] = []
        self._has_warned = False  # About a step without any gradient.
        self._own_gradients: list[torch.Tensor | None] | None = None  # While this rank has joined and holds others'
                                                                      # gradients.
        # The vote: as the last one.
        self._expected: dict[str, Any] = {"expected_max_norm": member.options.max_norm}

    def step(self, loss_scale: float, param_groups: list[dict[str, Any]]) -> Decision:
        """param_groups: the current ones. Their parameters must be the bound ones."""
        with self.member.notifying(of_interrupts=True):
            return self._step(loss_scale, param_groups)

    def _step(self, loss_scale: float, param_groups: list[dict[str, Any]]) -> Decision:
        member, flows, recovery = self.member, self.flows, self.recovery
        recovery.settle()
        member.described.check_now(param_groups, self._hyper_parameters())
        given = [seen(parameter.grad) for parameter in member.parameters]
        was_made = recovery.was_made(given)
        recovery.begin_step()
        if was_made:
            return Decision(member.step_count, True, math.nan, math.nan, "")
        recovery.check_not_lost()
        streamed = flows.begun
        if streamed:
            self._check_begun()
            outdated = self._is_outdated()
        elif not self._has_warned and all(gradient is None for gradient, _ in given):
            self._has_warned = True
            warnings.warn(_WITHOUT if any(p.requires_grad for p in member.parameters) else _ALL_FROZEN, stacklevel=4)
        flows.clock.lap("compute")
        with member.notifying():
            if streamed and outdated:
                streamed = self._take_back()
            if streamed and (flows.stream.sealed is not None or loss_scale != 1.0):
                decide = functools.partial(self._vote, flows.stream.seal(), loss_scale)
                self.call_joined("step", loss_scale)
            else:
                gradients = flows.gradients()  # An error in sending shows before the step begins.
                if not flows.begun:
                    self._prepare_begin(in_step=True)
                self.call_joined("step", loss_scale)
                decide = functools.partial(self._seal_and_vote, gradients, loss_scale)
            recovery.given = member.step_count, given
            with member.part():
                with member.waiting_in(member.step_count + 1):
                    decision = decide()
                self._end(decision)
            if flows.returning is not None:
                flows.returning.take_held()
        return decision

    def discard(self, set_to_none: bool) -> None:
        """With zero_grad(): takes back the gradients sent since the last step."""
        self.recovery.settle_alone()
        self.recovery.forget_given()
        if self.flows.stream is not None:
            self.flows.stream.discard()
            for index, parameter in enumerate(self.member.parameters):
                self.flows.stream.zero(index, parameter, set_to_none)

    def leave(self) -> None:
        """Before another job is derived from this one. Takes back the gradients sent for the next step: they are in
        .grad."""
        self.recovery.settle()
        if self.flows.begun:
            if self.flows.stream.sealed is not None:
                raise RuntimeError("the param groups were changed after clip_grad_norm_ or unscale_, with which all ranks "
                                   "ended the step; call zero_grad() and repeat the step's backward passes")
            if self.flows.has_freed:
                raise RuntimeError("the param groups were changed after gradients were sent and freed "
                                   "(accumulation_steps=): call zero_grad() and repeat the step's backward passes")
        self.recovery.wait_for_weights()
        with self.member.notifying():
            if self.member.peers is not None:
                self.member.peers.change(self.member.step_count + 1)
            if self.flows.begun:
                self.flows.stream.take_back()
            self._write_back()
            self.flows.check_untouched(all_of_it=True)

    # ------------------------------------------------------------ the begin

    def _prepare_begin(self, in_step: bool = False) -> None:
        """Finds errors before a step begins."""
        if self.flows.returning is not None:
            self.flows.returning.wait()
            self.flows.end_step()
        self._write_back()
        self.flows.check_untouched(all_of_it=in_step)
        self._begun_with = self._hyper_parameters()

    def begin_early(self) -> None:
        """Inside a backward."""
        self._prepare_begin()
        with self.member.notifying(), self.member.part():
            self._begin()

    def _begin(self, loss_scale: float = 1.0) -> None:
        self.member.session.begin_step([self._begun_with[index] for index in self.member.described.source],
                                       loss_scale=loss_scale, **self._expected)
        if self.flows.stream is not None:
            self.flows.stream.begun = True

    def _check_begun(self) -> None:
        """Checks that the sent gradients belong to the step."""
        stream, member = self.flows.stream, self.member
        stream.check_ended(by_itself=member.peers is None)
        edited = None if stream.sealed is None else stream.sealed.first_changed(
            [parameter.grad for parameter in member.parameters])
        if edited is not None:
            raise RuntimeError(f"the gradient of parameter {member.names[edited]} was changed after clip_grad_norm_ or "
                               "unscale_, with which all ranks ended the step; call zero_grad() and repeat the "
                               "step's backward passes")
        changed = next(iter(self.flows.watch.changed()), self.flows.watch.first_written())
        if changed is not None:
            raise RuntimeError(f"parameter {member.names[changed]} was changed during the step, which the service "
                               "cannot see: call zero_grad(), and change weights only between steps, with send_weights()")

    def _is_outdated(self) -> bool:
        """Whether .grad differs from the sent gradients. FailedPreconditionError if it cannot be sent again."""
        stream = self.flows.stream
        if stream.was_broken_off():
            return True
        changed = None if stream.sealed is not None else stream.first_changed(self.member.parameters)
        if changed is not None and stream.frees:
            raise FailedPreconditionError(
                f"the gradient of parameter {self.member.names[changed]} changed after it was sent and freed, because "
                f"accumulation_steps={self.member.options.accumulation_steps} promises no further backward: call "
                "zero_grad() and repeat the step's backward passes; if a step has more of them, create the optimizer "
                "without accumulation_steps")
        return changed is not None

    def _take_back(self) -> bool:
        """Takes back the sent gradients, so that step() sends all of .grad. True: the step is already decided, as a
        skip."""
        try:
            self.flows.stream.take_back()
        except FailedPreconditionError:
            return True
        return False

    # ------------------------------------------------------------ the end

    def seal(self) -> Sealed:
        """Seals a step whose gradients were sent during backward."""
        member, flows, stream = self.member, self.flows, self.flows.stream
        self.recovery.settle()
        self.recovery.check_not_lost()
        stream.check_ended(by_itself=member.peers is None)
        outdated = self._is_outdated()
        flows.clock.lap("compute")
        with member.notifying():
            begins = (outdated and not self._take_back()) or not stream.begun
            if begins:
                self._prepare_begin()
            gradients = flows.gradients()
            self.call_joined("seal")
            with member.part(), member.waiting_in(member.step_count + 1):
                if begins:
                    self._begin()
                flows.give(gradients)
                self._report()
                norm = member.session.seal(1)
                stream.sealed = Sealed(norm, [parameter.grad for parameter in member.parameters])
        flows.clock.lap("wait")
        return stream.sealed

    def _vote(self, sealed: Sealed, loss_scale: float) -> Decision:
        """loss_scale: a GradScaler's that has not unscaled yet."""
        source, max_norm = self.member.described.source, self.member.options.max_norm
        sealed.unscaling /= loss_scale
        if max_norm > 0:
            sealed.clip(range(len(source)), max_norm)
        ballot = sealed.ballot()
        # With multipliers the service cannot know the clipping in advance.
        self._expected = {"expected_max_norm": ballot.get("max_norm", 0.0)} if sealed.unscaling == 1 else {
            "expected_multipliers": len(source) * [sealed.unscaling]}
        self.member.session.report(self._logged.read())  # Including numbers logged since the seal.
        decision = self.member.session.vote(**ballot, hyper_parameters=self._overrides())
        coefficient = sealed.coefficient() if "multipliers" in ballot else decision.clip_coefficient
        return dataclasses.replace(decision, norm=decision.norm * sealed.unscaling, clip_coefficient=coefficient)

    def _seal_and_vote(self, gradients: dict[int, torch.Tensor], loss_scale: float) -> Decision:
        if not self.flows.begun:
            self._begin(loss_scale)
        self.flows.give(gradients)
        max_norm = self.member.options.max_norm
        self._expected = {"expected_max_norm": max_norm}
        self._report()
        return self.member.session.seal_and_vote(1, max_norm=max_norm, hyper_parameters=self._overrides())

    def _report(self) -> None:
        """Goes with the next seal. The gradients have been sent, so reading tensors now causes no longer wait."""
        self.flows.clock.lap("send")
        self.member.session.report(self._logged.read(), self.flows.clock.take())

    def _overrides(self) -> list[HyperParameters] | None:
        """Settings changed since the step began."""
        now = self._hyper_parameters()
        return None if now == self._begun_with else [now[index] for index in self.member.described.source]

    def _end(self, decision: Decision) -> None:
        member, flows = self.member, self.flows
        comes_later = flows.returning is not None and decision.applied
        if decision.applied and member.orthogonalizer is not None:
            flows.clock.lap("wait")
            member.orthogonalize()
            flows.clock.lap("compute")
        if not comes_later:
            member.session.receive_weights()
        flows.clock.lap("wait")
        member.step_count, flows.in_step = decision.step, comes_later
        if flows.stream is not None:
            flows.stream.finish()
        elif member.options.overlap:
            flows.start_stream(weakref.ref(self))
        if comes_later:
            flows.begin_coming(_weakly(self.recovery.take_coming))
        elif decision.applied:
            flows.take_weights()
            flows.clock.lap("reduce" if member.places.together else "wait")

    # ------------------------------------------------------------ in ddp.join(): see uneven

    def call_joined(self, what: str, loss_scale: float = 1.0) -> None:
        """In a join, makes joined ranks do the same."""
        member = self.member
        if member.peers is None:
            return
        sealed = None if self.flows.stream is None else self.flows.stream.sealed
        gradients = {} if sealed is not None or what == "undo" else {
            index: parameter.grad.detach() for index, parameter in enumerate(member.parameters)
            if not member.session.job.parameters[index].frozen and parameter.grad is not None}

        def call_of() -> uneven.Call:
            begun, now = self.flows.begun, self._hyper_parameters()
            return uneven.Call(what, attempts=self.attempts(), begun=begun, settings=now, loss_scale=loss_scale,
                               begun_with=self._begun_with if begun else now, clip=sealed and sealed.clip_so_far())

        uneven.call(member.parameters, call_of, gradients, member.places)

    def shadow(self, call: uneven.Call, receive: Callable[..., dict[int, torch.Tensor]],
               param_groups: list[dict[str, Any]]) -> Decision | None:
        """On a joined rank: seals, or makes the step, with the settings and gradients of the others. receive: gets
        the gradients of the given parameters. They are in `.grad` until the step ends."""
        own, stream, member = self._hyper_parameters, self.flows.stream, self.member
        self._hyper_parameters = lambda: call.begun_with
        try:
            if call.clip is None:
                self.end_shadow()  # The sealed gradients are not the step's.
                if stream is not None:
                    stream.catch_up(*call.attempts)
                self._take_over(receive({index: member.parameters[index] for index in call.given}, member.places))
                if call.begun and not stream.begun:
                    self.begin_early()
            else:
                stream.sealed.follow(call.clip)
            if call.what == "seal":
                stream.seal()
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
        """The step is decided or left out."""
        if self._own_gradients is not None:
            if self.flows.stream is not None and self.flows.stream.sealed is not None:
                self.flows.stream.discard()
            self._put_back()

    def attempts(self, at_end: bool = False) -> tuple[int, list[int]]:
        """Counts for the next step that must be equal on all ranks: how often sent gradients were discarded, and how
        often each gradient has come. at_end: of the join, which discards sent gradients."""
        stream = self.flows.stream
        return (0, []) if stream is None else (stream.discards + (at_end and stream.begun), stream.came)

    def end_join(self, of_ranks: list[tuple[int, list[int]]]) -> None:
        """All ranks have joined, with these counts. Gradients without a step are sent in the next step()."""
        if self.flows.stream is not None:
            self.flows.stream.catch_up(max(discards for discards, _ in of_ranks),
                                       [max(came) for came in zip(*(came for _, came in of_ranks))])

    def _take_over(self, gradients: dict[int, torch.Tensor]) -> None:
        """Except gradients sent in a backward of this rank itself."""
        self._own_gradients = [parameter.grad for parameter in self.member.parameters]
        left = () if self.flows.stream is None else self.flows.stream.left
        for index, parameter in enumerate(self.member.parameters):
            if index not in left:
                parameter.grad = gradients.get(index)

    def _put_back(self) -> None:
        for parameter, gradient in zip(self.member.parameters, self._own_gradients or ()):
            parameter.grad = gradient
        self._own_gradients = None


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method without a reference to its object, for users that live no longer than it."""
    reference = weakref.WeakMethod(method)
    return lambda *arguments: reference()(*arguments)
