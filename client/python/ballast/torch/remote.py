"""The common part of all optimizers with their state on a service."""

from __future__ import annotations

import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import outliving
from ..errors import FailedPreconditionError, NotFoundError
from ..restore import Origin, is_one
from ..session import PLANES, Decision, HyperParameters
from . import dcp, guard, owners, uneven
from .binding import Binding
from .ddp import check_reduction, living_with, whole_on_several_ranks
from .description import check_group, not_held
from .groups import (completed, drop_others, hyper_parameters_of, named, names_in, planes_of, regrouped,
                     with_rule)
from .member import Begin, NothingToResume
from .moments import Moments, has_planes, moments_of
from .options import Options, options_of
from .reports import Logged
from .returning import check_overlap_weights
from .services.own_service import Kept
from .state import Handed, ParameterState

# A warning reports the first skipped step, and then every so many.
_SKIPS_A_WARNING = 100
_SCALES = "torch.amp.grad_scaler"
_MOST_NAMES = 8  # At most so many names in a warning.
_NUMBERED = re.compile(r"param\.\d+")


class Remote(torch.optim.Optimizer):
    """Base class of AdamW and the others. A param group's hyper-parameters may change between steps, for example by LR
    schedulers. Its parameters may change, too; the next step() then derives another job. All ranks make the same
    changes. Parameters of the same name and shape keep their moments, and so do frozen ones that were trained
    before. Other parameters begin with the trainer's weights."""

    _rule: str  # Of groups that name none.
    _binding: Binding | None = None
    _moments: list[Moments | None] | None = None  # By parameter: a loaded state's, until a job has them.
    _options: Options | None = None  # While it is being made.
    _settings_of_others: list[HyperParameters] | None = None  # While a joined rank is being bound.
    _numbered = 0  # Parameters so far: no number is given twice.
    _own_step: tuple[str, int] | None = None  # That of the param groups, unless a state was loaded.
    _before: Binding | None = None  # Closed; the next job is derived from its job.

    def __init__(self, params, defaults: dict[str, Any], options: dict[str, Any]):
        state = dict(state=options.pop("state", "fp32"), state_fallback=options.pop("state_fallback", False))
        options = options_of(type(self).__name__, options)
        self._forget_steps()
        self._kept = Kept()
        # The job and step of a state. It is in the param groups, so that torch.distributed.checkpoint saves it.
        super().__init__(named(params, options.module), defaults | state | dict(rule=self._rule, job_uid="", job_step=0))
        for group in self.param_groups:
            check_group(group)
            owners.made(group["params"])
        self._options = options
        self._fill_state()
        # The rest is known when it is bound to its job.
        if options.overlap and isinstance(options.module, torch.nn.parallel.DistributedDataParallel):
            check_reduction(options.module)
        if options.overlap_weights:
            check_overlap_weights((name, parameter) for group in self.param_groups
                                  for name, parameter in zip(group["param_names"], group["params"])
                                  if parameter.requires_grad)
        uneven.register(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks this. To other code that clips it says that gradients are unscaled elsewhere. True:
        GradScaler passes its scale and does not change the gradients. The service divides them, and all ranks skip
        the step if one is not finite. This also works where GradScaler cannot: with DTensors each rank sees only its
        own shards, and torch does not unscale fp16."""
        return sys._getframe(1).f_globals.get("__name__") == _SCALES and any(
            isinstance(parameter, DTensor) or parameter.dtype == torch.float16 for parameter in self._parameters())

    def _forget_steps(self) -> None:
        # About the last step. Not attributes of the class: Lightning's wrappers of optimizers would show those.
        self.grad_norm: float | None = None
        self.clip_coefficient: float | None = None
        self.skipped: str | None = None
        self._skips = 0
        self._logged = Logged()  # For the next step.
        # The parameters that a job trains, by identity: their index there, and their planes with first values.
        self._trained: dict[int, tuple[int, dict[str, float]]] = {}
        self._offsets: dict[int, int] = {}  # By index: steps of the job that did not update the parameter.
        self._stale: list[Handed] = []

    # ------------------------------------------------------------ a step

    @torch.no_grad()
    def step(self, closure=None):
        """One step of all ranks. Afterwards `grad_norm` is the norm of the whole gradient before the service's
        clipping. `clip_coefficient` is its factor, the smallest of all groups. `skipped` says why nothing changed,
        or is None. With overlap_weights the weights are still arriving: see `wait_for_weights`.

        closure: evaluates the model again and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("step() talks with the service, which a CUDA graph cannot record; capture forward and "
                               "backward only, and call step() after the replay")
        binding = self._bound(new=True)
        try:
            self._end_step(binding.steps.step(self._loss_scale(), self.param_groups))
        except Exception:
            raise
        except BaseException:
            binding.recovery.interrupted()
            self._tell_step()
            raise
        return loss

    def _end_step(self, decision: Decision) -> None:
        binding = self._binding
        self._logged.clear()
        self.grad_norm = decision.norm
        self.clip_coefficient = decision.clip_coefficient
        self.skipped = None if decision.applied else decision.skip_reason
        # A GradScaler tries scales until a step is applied, without a warning.
        if self.skipped is not None and not hasattr(self, "found_inf"):  # GradScaler sets it around step().
            if self._skips % _SKIPS_A_WARNING == 0 and binding.member.rank == 0:
                warnings.warn(f"step {decision.step} changed nothing: {self.skipped} ({self._skips} skipped before; "
                              "optimizer.skipped is the reason of each step)", stacklevel=4)
            self._skips += 1
        self._tell_step()
        binding.recovery.forget_given()

    def _shadow(self, call: uneven.Call, receive: Callable[..., dict[int, torch.Tensor]]) -> None:
        """On a joined rank: repeats what the others do. receive: see Steps.shadow."""
        self._settings_of_others = call.settings
        try:
            binding = self._bound(new=True)
        finally:
            self._settings_of_others = None
        if call.what == "undo":
            self.undo_step()
        elif call.what != "bind":
            decision = binding.steps.shadow(call, receive, self.param_groups)
            if decision is not None:
                self._end_step(decision)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def log(self, **numbers: float | torch.Tensor) -> None:
        """Numbers of the next step, such as loss=loss, tokens_per_second=n / seconds, **{"eval/loss": x}. The
        service keeps them in the job's history, and shows them on its page and as metrics. Call it at any time
        before step(), on any rank; the lowest rank that logs any counts. They affect no decision, and may be NaN.

        A tensor of one element is copied on its device. step() reads it once the gradients have been sent, so it
        causes no additional wait for a GPU. At most 16 names in a step, of letters, digits, ".", "_", "/" and "-"."""
        self._logged.add(numbers)

    @torch.no_grad()
    def undo_step(self) -> int:
        """With keep_previous: undoes the last step exactly, for example after the loss has exploded. The service's
        state, the parameters and the job's step are those before it; returns that step. All ranks call it, before
        the next step() and, with overlap, before its first backward. The trainer itself has to reset its other state
        (an LR scheduler, a GradScaler, the place in the data). FailedPreconditionError, and nothing changes, if the
        next step has begun, or if no step can be undone, because only one can."""
        if self._binding is None:
            raise FailedPreconditionError("this optimizer has no step to undo")
        steps = self._binding.steps
        self._binding.recovery.undo(lambda: steps.call_joined("undo"))
        self._tell_step()
        return self._binding.member.step_count

    @property
    def overlap(self) -> bool:
        """Whether gradients are sent during backward: from the second step on, if requested, unless the trainer
        computes on every processor of the host."""
        return self._binding is not None and self._binding.flows.stream is not None and self._binding.flows.leaves_early

    @property
    def overlap_weights(self) -> bool:
        """Whether step() returns before the weights arrive: from the first step on, if requested, unless ranks get
        weights from each other."""
        return self._binding is not None and self._binding.flows.returning is not None

    @property
    def module(self) -> torch.nn.Module | None:
        """The argument module=. It may be set before the first step(), attach() or load_state_dict(); later that is
        a RuntimeError."""
        return None if self._options is None else self._options.module

    @module.setter
    def module(self, module: torch.nn.Module | None) -> None:
        if self._binding is not None:
            raise RuntimeError("module can be set only before the first step(), attach() or load_state_dict(): close() "
                               "the optimizer first")
        self._options.module = module

    @torch.no_grad()
    def wait_for_weights(self) -> None:
        """With overlap_weights: returns when the parameters have the weights of the last step(). Needed only by code
        that reads their memory by an address from before."""
        if self._binding is not None:
            self._binding.recovery.wait_for_weights()

    @torch.no_grad()
    def attach(self, create: bool = False, resume: bool | str = False, derive: bool = False) -> int:
        """Binds to the job on the service and puts its weights into the parameters: for a resumed run, before the
        first forward, or after an AbortedError. Returns the job's step. Call it after everything that puts other
        parameters into the param groups, such as accelerator.prepare.

        create: if the job has no weights yet, it gets those of the parameters, and the step is 0. Without create
        that is a NotFoundError or FailedPreconditionError.

        resume: like create, but first the service looks for a checkpoint of the job's name (or of the given name:
        "gpt", "gpt/step-1000") and loads it. So the call may be in a script from the first start on. If the name is
        "gpt/step-1000", three conditions hold: the checkpoint must exist, a job with weights must have begun with
        it, and the optimizer must not be bound yet. When it resumes, it warns about the model's buffers and frozen
        parameters, which the service does not keep.

        derive, with resume: the job, or the checkpoint, may have other parameters (resized embeddings, for example).
        Parameters of the same name and shape keep their state, and the rest begins with the trainer's weights. The
        optimizer must not be bound yet."""
        checkpoint = resume if isinstance(resume, str) else self._options.job if resume else None
        if derive and not (resume and self._binding is None and self._moments is None and
                           not self.param_groups[0]["job_uid"]):
            raise ValueError("derive=True goes with resume=, on an optimizer that is not bound yet and has loaded no state")
        first = self._own_step is None
        binding = self._bound(new=create or bool(resume), attach=True, checkpoint=checkpoint,
                              origin=Origin() if derive else None)
        if resume and first and binding.member.step_count > 0 and binding.member.rank == 0:
            self._warn_of_what_is_not_held()
        return binding.member.step_count

    def _warn_of_what_is_not_held(self) -> None:
        names = not_held(self._model(), self.param_groups)
        if names:
            more = len(names) - _MOST_NAMES
            listed = ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
            warnings.warn(f"the service holds neither buffers nor frozen parameters: attach() has not restored {listed}. "
                          "If training changes them (running statistics, an EMA), load the model's own state_dict() "
                          "from your checkpoint", stacklevel=4)

    @torch.no_grad()
    def close(self, save: bool = False, job: bool = False) -> None:
        """Ends the session, and the service if the optimizer started it; a service that outlives the ranks closes the
        job. On another service the job stays, with its memory and state. The weights stay in the parameters.

        job: closes the job, too, which frees its memory. save: the same, after the service has saved it in a new
        checkpoint, in the folder of the job's name; `attach(resume=True)` resumes from there. All ranks call it. If
        it is refused, all ranks get an error and nothing is closed, unless the connection broke."""
        if save or job:
            if self._binding is None:
                raise FailedPreconditionError(f"this optimizer has no job to {'save' if save else 'close'}")
            self._binding.recovery.close_job(save)
        if self._binding is not None:
            try:
                if not self._binding.member.failed:
                    self._binding.recovery.settle()
                    self._binding.recovery.wait_for_weights()
            except Exception:
                self._release()
                raise
        self._release()

    def _release(self) -> None:
        self._before = None
        if self._binding is not None:
            self._binding.close(with_job=True)
            self._binding = None
        self._kept = Kept()

    def _bound(self, new: bool, attach: bool = False, checkpoint: str | None = None,
               origin: Origin | None = None) -> Binding:
        bound = self._binding
        self._name_again()
        lost = bound is not None and bound.recovery.has_lost
        if self._is_changed() and checkpoint is None and (attach or not bound.member.failed):
            for group in self.param_groups:
                check_group(group)
            if uneven.is_joined(self._parameters()):
                raise RuntimeError("param groups cannot change inside ddp.join(), where a rank that has joined does not "
                                   "know of it: change them before, or after")
            if not attach:
                bound.member.described.check_the_same(self.param_groups)
                bound.steps.leave()
            self._before = bound
            bound.close()
            self._binding = None
        elif attach and bound is not None:
            if checkpoint is not None and is_one(checkpoint) and not bound.member.failed:
                job = self._options.job
                raise FailedPreconditionError(f"this optimizer is already bound to job {job}: run `ballast load {job} "
                                              f"{checkpoint}`, or close() the optimizer first")
            if bound.member.failed or bound.member.peers is not None or not bound.member.described.has(self.param_groups):
                bound.close()
                self._binding = None
            else:
                bound.recovery.settle(again=True)
                self._tell_step()
        if self._binding is None:
            if not attach:
                uneven.call(self._parameters(), lambda: uneven.Call("bind", settings=self._current_hyper_parameters()))
            if self._before is not None:
                if self._before.member.described.has_others(self.param_groups):
                    origin = Origin(self._before.member.job_uid)
                else:  # It could not, and they are unchanged.
                    attach = True
            elif self._own_step is None or origin is None:  # Otherwise names show what a job has.
                self._name_by_module()
            derives = origin is not None
            group = self.param_groups[0]
            resume = (group["job_uid"], int(group["job_step"])) if group["job_uid"] else None
            if derives or (attach and resume == self._own_step):  # This optimizer's own: no state was loaded.
                resume = None
            begin = Begin(new=new or derives or self._moments is not None, attach=attach or derives or resume is not None,
                          resume=resume, checkpoint=checkpoint, moments=self._moments, derive=origin)
            self._binding = Binding(self.param_groups, self._current_hyper_parameters, self._options, begin, self._kept,
                                    self._trained, is_changed=self._is_changed, write_back=self._write_back,
                                    logged=self._logged)
            before, self._before = self._before, None
            self._moments, self._kept.begun = None, False
            owners.register(self, self._binding.member.parameters)
            if lost:
                self._binding.recovery.lose()
            self._know_trained(is_new=not attach and not derives and resume is None, before=before)
            self._tell_step()
        return self._binding

    def _is_changed(self) -> bool:
        return self._binding is not None and self._binding.member.described.has_others(self.param_groups)

    def _name_again(self) -> None:
        """If other code has changed a group's list of parameters, the parameters that the job knows keep their
        names."""
        bound = self._binding or self._before
        if bound is None or bound.member.described.has(self.param_groups):
            return
        known = {id(parameter): name for name, parameter in bound.member.described.of_name.items()}
        kept = {known[id(parameter)] for parameter in self._parameters() if id(parameter) in known}
        for group in self.param_groups:
            names = list(group["param_names"])
            fits, group["param_names"] = len(names) == len(group["params"]), []
            for place, parameter in enumerate(group["params"]):
                name = known.get(id(parameter), names[place] if fits and names[place] not in kept else None)
                if name is None:
                    name, self._numbered = f"param.{self._numbered}", self._numbered + 1
                group["param_names"].append(name)

    def _name_by_module(self) -> None:
        """Parameters without names get those of the module, or of a DistributedDataParallel, if one is found."""
        if not any(_NUMBERED.fullmatch(name) for group in self.param_groups for name in group["param_names"]):
            return
        names = names_in(self._model())
        for group in self.param_groups:
            group["param_names"] = [
                names.get(id(parameter), name) if _NUMBERED.fullmatch(name) else name
                for name, parameter in zip(group["param_names"], group["params"])]

    def _model(self) -> torch.nn.Module | None:
        """The argument module=, or else a DistributedDataParallel, if one is found."""
        parameters = self._parameters()
        if self.module is None and whole_on_several_ranks(parameters, self._options.process_group):
            return next(iter(living_with(parameters)), None)
        return self.module

    def _know_trained(self, is_new: bool, before: Binding | None) -> None:
        """before: the job from which this one is derived, if it is derived."""
        member, offsets = self._binding.member, {}
        if before is not None:
            offsets = {(name, parameter.shape): self._offsets.get(id(parameter), 0) for name, parameter
                       in zip(before.member.names, before.member.parameters) if id(parameter) in self._trained}
        index_of = {id(parameter): index for index, parameter in member.described.trained.items()}
        self._trained = {id(parameter): (index_of[id(parameter)], planes_of(group))
                         for group in self.param_groups for parameter in group["params"] if id(parameter) in index_of}
        self._offsets = {}
        if before is not None:
            self._offsets = {id(parameter): offsets.get((name, parameter.shape), member.step_count)
                             for name, parameter in zip(member.names, member.parameters)}
        for parameter in member.parameters:
            state = self.state.get(parameter)
            if is_new and type(state) is ParameterState and any(plane in dict.keys(state) for plane in PLANES):
                name = member.names[index_of.get(id(parameter), 0)]
                raise RuntimeError(f"state of parameter {name} was set before the first step: pass it to "
                                   "load_state_dict(), or set it after that step")

    def _tell_step(self) -> None:
        self._stale = [handed for handed in self._stale if not handed.is_gone]
        for parameter in self._binding.member.parameters:
            if id(parameter) in self._trained:
                self._stale += self._state_of(parameter).tell(self._updates_of(parameter))
        self._name_step()

    def _name_step(self) -> None:
        self._own_step = (self._binding.member.job_uid, self._binding.member.step_count)
        for group in self.param_groups:
            group["job_uid"], group["job_step"] = self._own_step

    def _state_of(self, parameter: torch.Tensor) -> ParameterState:
        """The state of a parameter that a job trains; bound to the job."""
        state = self.state.get(parameter)
        if type(state) is not ParameterState:
            state = self.state[parameter] = ParameterState(state or {})
        if not state.is_bound:
            state.bind(self._trained[id(parameter)][1], _reader(self, parameter))
        return state

    def _updates_of(self, parameter: torch.Tensor) -> int:
        """The parameter's number of updates, if each step since the trainer's last write updated it."""
        return max(self._binding.member.step_count - self._offsets.get(id(parameter), 0), 0)

    def _writes(self) -> dict[tuple, list[tuple[torch.Tensor, dict[str, torch.Tensor | float], int | None]]]:
        """What the trainer has written to the state, replaced, or reset: parameters by their planes, and whether
        there are update counts."""
        late = next((handed for handed in self._stale if handed.is_written), None)
        if late is not None:
            raise RuntimeError(f"{late.plane} was read from the optimizer's state before the last step and written after "
                               "it, which has no effect: read it from optimizer.state again and write that")
        writes = {}
        for parameter in self._binding.member.parameters:
            if id(parameter) not in self._trained:
                continue
            given = self.state.get(parameter)
            if type(given) is ParameterState and given.is_untouched:
                continue
            if given:
                planes, step = self._state_of(parameter).changes(self._updates_of(parameter))
            else:
                planes, step = self._trained[id(parameter)][1], 0  # As before its first update.
            if planes or step is not None:
                writes.setdefault((tuple(planes), step is None), []).append((parameter, planes, step))
        return writes

    def _write_back(self) -> None:
        """All ranks, before a step: sends these writes to the service."""
        writes = self._writes()
        for (planes, _), members in writes.items():
            counts = [step for _, _, step in members]
            self._binding.flows.write_state([self._trained[id(parameter)][0] for parameter, _, _ in members],
                                            {plane: [of[plane] for _, of, _ in members] for plane in planes},
                                            None if counts[0] is None else counts)
            for parameter, _, step in members:
                if step is not None:
                    self._offsets[id(parameter)] = self._binding.member.step_count - step
        if writes:
            self._tell_step()

    @torch.no_grad()
    def send_weights(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Sends the trainer's weights of these parameters, by default of all, to the service, and keeps their
        moments: after a clamp, other pretrained weights, or swapped-in averages. Parameters of other optimizers are
        ignored. All ranks call it, between two steps. If several ranks have a whole parameter, their weights must be
        the same. The step before cannot be undone afterwards. The first step needs no such call."""
        if self._binding is None:
            return
        self._binding.recovery.settle()
        self._binding.recovery.wait_for_weights()
        chosen = None
        if parameters is not None:
            ours = {id(parameter): index for index, parameter in enumerate(self._binding.member.parameters)}
            given = [parameters] if torch.is_tensor(parameters) else list(parameters)
            chosen = sorted({ours[id(parameter)] for parameter in given if id(parameter) in ours})
            if not chosen and given and not {id(parameter) for parameter in given} & {id(p) for p in self._parameters()}:
                raise ValueError("none of the parameters that were given to send_weights() is this optimizer's")
        self._binding.flows.send_weights(chosen)

    def _loss_scale(self) -> float:
        scale = getattr(self, "grad_scale", None)  # Set by GradScaler around step.
        return 1.0 if scale is None else float(scale)

    def _current_hyper_parameters(self) -> list[HyperParameters]:
        return self._settings_of_others or [hyper_parameters_of(group) for group in self.param_groups]

    # ------------------------------------------------------------ torch's interface of an optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also takes back the gradients sent in backward passes since the last step."""
        super().zero_grad(set_to_none)
        if self._binding is not None:
            self._binding.steps.discard(set_to_none)
            if self._own_step != (self._binding.member.job_uid, self._binding.member.step_count):  # After an interrupt.
                self._tell_step()

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, which is bound at its own first step."""
        return super().__getstate__() | {"_options": self._options, "_moments": self._moments,
                                         "_numbered": self._numbered}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.setdefault("rule", self._rule)
        for group in self.param_groups:  # As in `completed`.
            group.setdefault("rule", self._rule)
            group.setdefault("state", "fp32")
            group.setdefault("state_fallback", False)
            if group["rule"] == "adam":
                group.setdefault("decoupled_weight_decay", False)
        if "_options" in state:  # load_state_dict comes here without it.
            self._forget_steps()
            self._kept = Kept()
            uneven.register(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Allowed also after the first step(): then the next one derives another job. rule: see AdamW."""
        if self._options is not None:
            (param_group,) = named([param_group], self.module, self._numbered)
        super().add_param_group(with_rule(param_group, self._rule))
        if self.param_groups[-1]["rule"] != self._rule:
            drop_others(self.param_groups[-1])
        self._numbered += len(self.param_groups[-1]["params"])
        if self._options is not None:
            check_group(self.param_groups[-1])
        self._fill_state()

    def _fill_state(self) -> None:
        """A state for each parameter from the start: if one is missing, torch.distributed.checkpoint calls step() to
        get it. Once there is a job, entries that the trainer has cleared are written there."""
        parameters = {parameter for group in self.param_groups for parameter in group["params"]}
        for parameter in list(self.state):
            if parameter not in parameters:  # Other code, such as accelerate, has replaced them.
                del self.state[parameter]
        if self._binding is not None:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not self.state[parameter]:
                    self.state[parameter] = ParameterState(step=torch.tensor(0.0))
                if self._options is not None and self._options.full_state and type(self.state.get(parameter)) is ParameterState:
                    self.state[parameter].bind(planes_of(group), None)

    def state_dict(self) -> dict[str, Any]:
        """Small: hyper-parameters, and the job and step of the state. The service has the weights and moments. If it
        has a --checkpoint-dir, it also saves that step, in the background, while training goes on. So the trainer
        can resume from this state even if the job has advanced, or the service has restarted. These checkpoints stay
        until `Client.delete_checkpoint`. `TrainerCallback` and `LightningCallback` call that when the trainer
        deletes its own checkpoint.

        With full_state it also has the moments, and the fp32 masters of parameters of other dtypes, sharded as the
        parameters. torch.optim can continue with them, and so can a new job (`load_state_dict`). Every rank reads
        them from the service, one parameter at a time."""
        dcp.load_without_ours()
        self._fill_state()
        if self._is_changed():  # Otherwise the state would be of a job that lacks parts of it.
            if self._binding.member.peers is not None:
                raise FailedPreconditionError("the param groups were changed since the last step(): call step(), or attach() "
                                              "on all ranks, before state_dict()")
            self._bound(new=True)
        if self._binding is not None:
            self._binding.recovery.settle_to_save()  # Otherwise the state could be of a step that never happens.
            if self._binding.member.peers is None:
                self._write_back()
            elif self._writes():
                raise FailedPreconditionError("the optimizer's state was written to, which goes to the service with all "
                                              "ranks' next step(): call that before state_dict()")
            self._tell_step()
        if self._binding is not None and not (self._options.full_state and self._options.service is None):
            self._binding.recovery.save()
        with guard.reading_none():  # The state exists even if weights are missing.
            state = super().state_dict()
            state["state"] = {index: values.here() if type(values) is ParameterState else values
                              for index, values in state["state"].items()}
        parameters = self._parameters()
        if self._moments is not None:  # No service has them yet.
            for index, moments in enumerate(self._moments):
                if index in state["state"]:  # If a parameter is there twice, the first counts.
                    state["state"][index] = state["state"][index] | (moments or {})
        elif self._options.full_state and (self._binding is not None or dcp.asks()):
            groups = [group for group in self.param_groups for _ in group["params"]]
            for index, values in state["state"].items():
                if parameters[index].requires_grad:
                    values = values | self._planes(parameters[index], planes_of(groups[index]))
                    is_first = int(values["step"]) == 0 and groups[index]["rule"] == "sgd"
                    if is_first and "momentum_buffer" in values and not dcp.asks():
                        values["momentum_buffer"] = None  # As torch.optim.SGD knows a first update.
                    state["state"][index] = values
        return state

    def _planes(self, parameter: torch.Tensor, planes: Iterable[str]) -> dict[str, torch.Tensor]:
        # Without any other plane the master shows that the state is a full one.
        planes = [*planes, *(["master"] if parameter.dtype != torch.float32 or not planes else [])]
        if self._binding is None:  # torch.distributed.checkpoint needs places to load to.
            return {plane: torch.zeros_like(parameter, dtype=torch.float32) for plane in planes}
        read, updates = {}, 0
        for plane in planes:
            read[plane], updates = self._binding.recovery.read_state(parameter, plane)
        return read | {"step": torch.tensor(float(updates))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """With a state of ballast.torch: attaches to the state's job, and puts its weights into the parameters. If
        the job is past the state's step, or the service has restarted, the service loads its checkpoint of that
        step. It is an error if there is no such checkpoint, if another job has the name, or if the parameters have
        another order or other groups. In a group with other names parameters are matched by order, as in torch.

        With a state of torch.optim with moments, or one of ballast.torch with full_state whose job the service does
        not know: keeps the moments until the first step() or attach(). That begins a new job with these moments and
        the parameters' weights. A group's names say which parameter is which; without names the order does, as in
        torch. Until then AdamW's moments take 8 bytes a parameter on each rank (with FSDP2, of its shards). Each rank
        uploads its part with the weights. If the job has weights already, that step() raises
        FailedPreconditionError. A state of another rule is an InvalidArgumentError."""
        state_dict = completed(regrouped(state_dict, self.param_groups), self.param_groups)
        moments = moments_of(state_dict, self.param_groups)
        uid, step = (state_dict["param_groups"][0].get(name) for name in ("job_uid", "job_step"))
        if moments is None and self._options.service is None and has_planes(state_dict):
            uid = ""  # A full state without updates: a new job begins as usual.
        bound = self._binding
        writes = bound is not None and (uid, step) != (bound.member.job_uid, bound.member.step_count)
        if writes and uid and moments is None:
            raise FailedPreconditionError(f"this state is of step {step} of a job and has no moments, but this optimizer "
                                          "has already made steps; load it into a new one")
        if bound is None and uid and self._options.service is None and moments is None and not outliving.is_wanted():
            raise NotFoundError(f"this state is of step {step} of a job of another service, or of one that ended with "
                                "its run (service=None): give service= the address of a "
                                "ballast.Service(checkpoint_dir=...) or of a ballastd with a --checkpoint-dir. With "
                                "full_state=True a state has the moments, and a new job begins with them")
        names = [group["param_names"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        own = {name for of_group in names for name in of_group}
        for group, of_group in zip(self.param_groups, names):
            # torch has put the state's names there, as if its parameters were in this order.
            if bound is not None or not uid or own.issuperset(group["param_names"]):
                group["param_names"] = of_group
            if not uid:
                group.update(job_uid="", job_step=0)
        for parameter, values in self.state.items():
            self.state[parameter] = {name: value for name, value in values.items() if name == "step"}
        self._fill_state()
        self._own_step = None
        self._moments = None
        if writes:
            return self._put(moments)
        if bound is not None:
            return self._tell_step()
        self._moments = moments
        if uid:
            try:
                self.attach()
                return
            except NothingToResume:
                pass
        if moments is not None:
            self._begin_again(names, moments)

    def _put(self, moments: list[Moments | None] | None) -> None:
        """Puts them into the state, which goes to the job before its next step. The trainer has to load and send the
        weights."""
        self._name_step()
        parameters = self._parameters()
        for parameter, values in zip(parameters, moments or [None] * len(parameters)):
            if id(parameter) in self._trained:
                planes = ("step", *self._trained[id(parameter)][1])
                self.state[parameter] = {name: values[name] for name in planes if name in values} if values else {}

    def _begin_again(self, names: list[list[str]], moments: list[Moments | None]) -> None:
        """The job that is made later has these moments, and continues no other job."""
        for group, of_group in zip(self.param_groups, names):
            group.update(job_uid="", job_step=0, param_names=of_group)
        parameters = self._parameters()
        for parameter, values in zip(parameters, moments):
            if parameter in self.state:
                self.state[parameter]["step"] = torch.tensor(0.0) if values is None else values["step"].clone()


def _reader(optimizer: Remote, parameter: torch.Tensor) -> Callable[[str], torch.Tensor]:
    """Reads a parameter's planes, as long as optimizer and job exist."""
    of, ours = weakref.ref(optimizer), weakref.ref(parameter)

    def read(plane: str) -> torch.Tensor:
        binding = None if of() is None else of()._binding
        if binding is None:
            raise FailedPreconditionError(f"{plane} is with a job that this optimizer has left")
        return binding.recovery.read_state(ours(), plane)[0]

    return read
