"""What is the same of all optimizers whose state is on a service."""

from __future__ import annotations

import math
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import FailedPreconditionError, NotFoundError
from ..restore import Origin, is_one
from ..session import Decision, HyperParameters
from . import dcp, guard, owners, uneven
from .binding import Binding, Kept, NothingToResume
from .ddp import check_reduction, living_with, whole_on_several_ranks
from .description import check_group, not_held
from .groups import named, names_in, regrouped
from .moments import Moments, moments_of
from .reports import Logged
from .returning import check_overlap_weights
from .state import Handed, ParameterState

# A warning says the first skipped step, and from then on each of so many.
_SKIPS_A_WARNING = 100
_SCALES = "torch.amp.grad_scaler"
_MOST_NAMES = 8  # In a warning.
_NUMBERED = re.compile(r"param\.\d+")


class Remote(torch.optim.Optimizer):
    """AdamW and Adam are of this class. The hyper-parameters of a param group may change between steps, as LR
    schedulers do it, and so may the parameters: then the next step() derives another job from the one that there is.
    All ranks change them alike. Parameters of the same name and shape keep their moments, as frozen ones do that were
    trained before; others begin with the trainer's weights."""

    _binding: Binding | None = None
    _moments: list[Moments | None] | None = None  # By parameter: of a state that was loaded, until a job has them.
    _settings: dict[str, Any] | None = None  # While it is made.
    _settings_of_others: list[HyperParameters] | None = None  # While a rank that has joined is bound.
    _full_state = False
    _numbered = 0  # Parameters that there have been: no number is given twice.
    _own_step: tuple[str, int] | None = None  # Of which the param groups are, unless a state was loaded.
    _before: Binding | None = None  # It is closed: the job that comes next is derived from its own.

    def __init__(self, params, defaults: dict[str, Any], *, service: str | None, job: str | None,
                 max_norm: float | None, update: str, process_group, timeout: float,
                 reconnect_timeout: float, full_state: bool | None, overlap: bool, overlap_weights: bool, accumulation_steps: int | None,
                 module: torch.nn.Module | None, keep_previous: bool, on_abort: str, on_write: str,
                 credentials: dict[str, str | None]):
        self._forget_steps()
        self._kept = Kept()
        if max_norm is not None and not (math.isfinite(max_norm) and max_norm > 0):
            raise ValueError(f"Invalid max_norm value: {max_norm}")
        if update not in ("wait", "speculate"):
            raise ValueError(f"Invalid update value: {update!r}; expected 'wait' or 'speculate'")
        if on_abort not in ("redo", "skip"):
            raise ValueError(f"Invalid on_abort value: {on_abort!r}; expected 'redo' or 'skip'")
        if on_write not in ("error", "send"):
            raise ValueError(f"Invalid on_write value: {on_write!r}; expected 'error' or 'send'")
        if not reconnect_timeout > 0:
            raise ValueError(f"Invalid reconnect_timeout value: {reconnect_timeout}")
        if accumulation_steps is not None and accumulation_steps < 1:
            raise ValueError(f"Invalid accumulation_steps value: {accumulation_steps}")
        if service is not None and job is None:
            raise ValueError("a job of a service has a name: give job=")
        # Of the job that a state is of, and its step. In the param groups, so that torch.distributed.checkpoint
        # takes them along.
        super().__init__(named(params, module), defaults | dict(job_uid="", job_step=0))
        for group in self.param_groups:
            check_group(group)
            owners.made(group["params"])
        self._full_state = service is None if full_state is None else full_state
        self._fill_state()
        self._settings = dict(service=service, job=job or "trainer", max_norm=max_norm or 0.0, update=update,
                              process_group=process_group, timeout=timeout,
                              reconnect_timeout=reconnect_timeout, overlap=overlap,
                              overlap_weights=overlap_weights, accumulation_steps=accumulation_steps, module=module,
                              keep_previous=keep_previous, on_abort=on_abort, on_write=on_write,
                              credentials=credentials)
        # The rest is known when it is bound to its job.
        if overlap and isinstance(module, torch.nn.parallel.DistributedDataParallel):
            check_reduction(module)
        if overlap_weights:
            check_overlap_weights((name, parameter) for group in self.param_groups
                                  for name, parameter in zip(group["param_names"], group["params"])
                                  if parameter.requires_grad)
        uneven.register(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by GradScaler; to others that clip, it says that gradients are unscaled elsewhere. True: GradScaler
        hands over its scale and leaves the gradients as they are. The service divides them, and all ranks skip the step
        where one is not finite. So it is where GradScaler cannot: with DTensors each rank sees its own shards only, and
        torch unscales no fp16."""
        return sys._getframe(1).f_globals.get("__name__") == _SCALES and any(
            isinstance(parameter, DTensor) or parameter.dtype == torch.float16 for parameter in self._parameters())

    def _forget_steps(self) -> None:
        # Of the last step. No attributes of the class: Lightning's wrappers of optimizers would show those.
        self.grad_norm: float | None = None
        self.clip_coefficient: float | None = None
        self.skipped: str | None = None
        self._skips = 0
        self._logged = Logged()  # Of the next step.
        # Of the parameters that a job trains, by identity: their index there, and their planes.
        self._trained: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._offsets: dict[int, int] = {}  # By that: the job's steps that are none of the parameter's updates.
        self._stale: list[Handed] = []

    # ------------------------------------------------------------ a step

    @torch.no_grad()
    def step(self, closure=None):
        """One step of all ranks. Afterwards `grad_norm` has the norm of the whole gradient, before clipping by the
        service; `clip_coefficient` what it was multiplied with, the smallest of all groups; `skipped` why nothing was
        changed, or None. With overlap_weights the weights are then still coming: see `wait_for_weights`.

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
            self._end_step(binding.step(self._loss_scale(), self.param_groups))
        except Exception:
            raise
        except BaseException:
            binding.interrupted()
            self._tell_step()
            raise
        return loss

    def _end_step(self, decision: Decision) -> None:
        binding = self._binding
        self._logged.clear()
        self.grad_norm = decision.norm
        self.clip_coefficient = decision.clip_coefficient
        self.skipped = None if decision.applied else decision.skip_reason
        # A GradScaler tries scales until none is skipped, and needs no warning.
        if self.skipped is not None and not hasattr(self, "found_inf"):  # Which it sets around step().
            if self._skips % _SKIPS_A_WARNING == 0 and binding.rank == 0:
                warnings.warn(f"step {decision.step} changed nothing: {self.skipped} ({self._skips} skipped before; "
                              "optimizer.skipped is the reason of each step)", stacklevel=4)
            self._skips += 1
        self._tell_step()
        binding.forget_given()

    def _shadow(self, call: uneven.Call, receive: Callable[..., dict[int, torch.Tensor]]) -> None:
        """On a rank that has joined: what the others do. receive: see Binding.shadow."""
        self._settings_of_others = call.settings
        try:
            binding = self._bound(new=True)
        finally:
            self._settings_of_others = None
        if call.what == "undo":
            self.undo_step()
        elif call.what != "bind":
            decision = binding.shadow(call, receive, self.param_groups)
            if decision is not None:
                self._end_step(decision)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def log(self, **numbers: float | torch.Tensor) -> None:
        """Numbers of the step that comes next, such as loss=loss, tokens_per_second=n / seconds, **{"eval/loss": x}: the
        service keeps them in the job's history, and shows them on its page and as metrics. At any time before step(), on
        any rank: of those that log any, the lowest rank's count. Nothing is decided by them, and they may be NaN.

        A tensor of one element is copied where it is, and read by step() once the gradients have left, so a GPU is not
        waited for earlier than anyway. At most 16 names in a step, of letters, digits, ".", "_", "/" and "-"."""
        self._logged.add(numbers)

    @torch.no_grad()
    def undo_step(self) -> int:
        """With keep_previous: undoes the last step, exactly, for a loss that has just exploded. The service's state and
        the parameters are what they were before it, and so is the job's step, which is returned. All ranks call it,
        before the next step() and, with overlap, before its first backward. What torch has beside the optimizer (an LR
        scheduler, a GradScaler, the place in the data) is the trainer's to move. FailedPreconditionError, and nothing
        is changed: there is nothing to undo, since one step alone can be, or the next step has begun."""
        if self._binding is None:
            raise FailedPreconditionError("this optimizer has made no step that could be undone")
        self._binding.undo()
        self._tell_step()
        return self._binding.step_count

    @property
    def overlap(self) -> bool:
        """Whether gradients leave during backward: from the second step on, if that was asked for, and unless the trainer
        computes on every processor of the host."""
        return self._binding is not None and self._binding.stream is not None and self._binding.leaves_early

    @property
    def overlap_weights(self) -> bool:
        """Whether step() returns before the weights are there: from the first step on, if that was asked for, and unless
        ranks have weights from each other."""
        return self._binding is not None and self._binding.returning is not None

    @property
    def module(self) -> torch.nn.Module | None:
        """What was given as module=. It may be set before the first step(), attach() or load_state_dict(), after which
        that is a RuntimeError."""
        return (self._settings or {}).get("module")

    @module.setter
    def module(self, module: torch.nn.Module | None) -> None:
        if self._binding is not None:
            raise RuntimeError("module can be set before the first step(), attach() or load_state_dict() only: close() "
                               "the optimizer first")
        self._settings["module"] = module

    @torch.no_grad()
    def wait_for_weights(self) -> None:
        """With overlap_weights: returns when the weights of the last step() are in the parameters, for what reads their
        memory by an address that it has from before. All else waits by itself."""
        if self._binding is not None:
            self._binding.wait_for_weights()

    @torch.no_grad()
    def attach(self, create: bool = False, resume: bool | str = False, derive: bool = False) -> int:
        """Binds to the job as it is on the service, and puts its weights into the parameters: for a run that
        goes on, before the first forward, or after an AbortedError. Returns the job's step. It comes after whatever puts
        other parameters into the param groups, such as accelerator.prepare.

        create: if the job has no weights yet, it gets those of the parameters, and the step is 0; else that is a
        NotFoundError or FailedPreconditionError. resume: the same, but first the service looks for a checkpoint of the
        job's name (or of the one that is given: "gpt", "gpt/step-1000") and loads it. So it may stand there from the
        first start on. "gpt/step-1000" must be there, a job with weights have begun with it, and the optimizer not be
        bound yet. Where it goes on, it warns of the model's buffers and frozen parameters, which no service holds.

        derive, with resume: the job, or the checkpoint, may have other parameters (resized embeddings, for example). What
        has the same name and shape there is taken over, and the rest begins with the trainer's weights. The optimizer is
        not bound yet."""
        checkpoint = resume if isinstance(resume, str) else self._settings["job"] if resume else None
        if derive and not (resume and self._binding is None and self._moments is None and
                           not self.param_groups[0]["job_uid"]):
            raise ValueError("derive=True goes with resume=, on an optimizer that is not bound yet and has loaded no state")
        first = self._own_step is None
        binding = self._bound(new=create or bool(resume), attach=True, checkpoint=checkpoint,
                              origin=Origin() if derive else None)
        if resume and first and binding.step_count > 0 and binding.rank == 0:
            self._warn_of_what_is_not_held()
        return binding.step_count

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
        """Ends the session, and the service that was started for it. On a service that was not, the job stays, and so do
        its memory and its state. The weights stay in the parameters.

        job: closes the job, too, which frees its memory. save: the same, after the service has saved it in a new
        checkpoint, in the folder of the job's name; `attach(resume=True)` goes on from there. All ranks call it. If that
        is refused, it is an error on all ranks, and nothing is closed, unless the connection broke."""
        if save or job:
            if self._binding is None:
                raise FailedPreconditionError("this optimizer is bound to no job that could be "
                                              f"{'saved' if save else 'closed'}")
            self._binding.close_job(save)
        if self._binding is not None:
            try:
                if not self._binding.failed:
                    self._binding.settle()
                    self._binding.wait_for_weights()
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
        lost = bound is not None and bound.has_lost
        if self._is_changed() and checkpoint is None and (attach or not bound.failed):
            for group in self.param_groups:
                check_group(group)
            if uneven.is_joined(self._parameters()):
                raise RuntimeError("param groups cannot change inside ddp.join(), where a rank that has joined does not "
                                   "know of it: change them before, or after")
            if not attach:
                bound.check_the_same(self.param_groups)
                bound.leave()
            self._before = bound
            bound.close()
            self._binding = None
        elif attach and bound is not None:
            if checkpoint is not None and is_one(checkpoint) and not bound.failed:
                job = self._settings["job"]
                raise FailedPreconditionError(f"this optimizer is bound to job {job} already: `ballast load {job} "
                                              f"{checkpoint}` takes it there, or close() the optimizer first")
            if bound.failed or bound.peers is not None or not bound.has(self.param_groups):
                bound.close()
                self._binding = None
            else:
                bound.settle(again=True)
                self._tell_step()
        if self._binding is None:
            if not attach:
                uneven.call(self._parameters(), lambda: uneven.Call("bind", settings=self._current_hyper_parameters()))
            if self._before is not None:
                if self._before.has_others(self.param_groups):
                    origin = Origin(self._before.job_uid)
                else:  # It could not be, and they are what they were.
                    attach = True
            elif self._own_step is None or origin is None:  # Else names say what a job has.
                self._name_by_module()
            derives = origin is not None
            group = self.param_groups[0]
            resume = (group["job_uid"], int(group["job_step"])) if group["job_uid"] else None
            if derives or (attach and resume == self._own_step):  # Of this optimizer itself: nothing has been loaded.
                resume = None
            self._binding = Binding(
                self.param_groups, self._current_hyper_parameters,
                resume=resume, new=new or derives or self._moments is not None,
                attach=attach or derives or resume is not None, checkpoint=checkpoint, moments=self._moments,
                derive=origin, trained=self._trained, changed=self._is_changed, write_back=self._write_back,
                kept=self._kept, logged=self._logged, **self._settings)
            before, self._before = self._before, None
            self._moments, self._kept.begun = None, False
            owners.register(self, self._binding.parameters, _job_of)
            if lost:
                self._binding.lose()
            self._know_trained(is_new=not attach and not derives and resume is None, before=before)
            self._tell_step()
        return self._binding

    def _is_changed(self) -> bool:
        return self._binding is not None and self._binding.has_others(self.param_groups)

    def _name_again(self) -> None:
        """Where other code has changed a group's list of parameters: each that the job knows keeps its name."""
        bound = self._binding or self._before
        if bound is None or bound.has(self.param_groups):
            return
        known = {id(parameter): name for name, parameter in bound.of_name.items()}
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
        """Parameters that were given without names, as the module has them, or a DistributedDataParallel, if one is
        found."""
        if not any(_NUMBERED.fullmatch(name) for group in self.param_groups for name in group["param_names"]):
            return
        names = names_in(self._model())
        for group in self.param_groups:
            group["param_names"] = [
                names.get(id(parameter), name) if _NUMBERED.fullmatch(name) else name
                for name, parameter in zip(group["param_names"], group["params"])]

    def _model(self) -> torch.nn.Module | None:
        """What was given as module=, or else a DistributedDataParallel, if one is found."""
        parameters = self._parameters()
        if self.module is None and whole_on_several_ranks(parameters, self._settings["process_group"]):
            return next(iter(living_with(parameters)), None)
        return self.module

    def _know_trained(self, is_new: bool, before: Binding | None) -> None:
        """before: of the job from which that of this one is derived, if it is."""
        job, offsets = self._binding.session.job, {}
        if before is not None:
            offsets = {(name, parameter.shape): self._offsets.get(id(parameter), 0)
                       for name, parameter in zip(before.names, before.parameters) if id(parameter) in self._trained}
        index_of = {id(parameter): index for index, parameter in enumerate(self._binding.parameters)
                    if not job.parameters[index].frozen}
        self._trained = {id(parameter): (index_of[id(parameter)], _planes_of(group))
                         for group in self.param_groups for parameter in group["params"] if id(parameter) in index_of}
        self._offsets = {}
        if before is not None:
            self._offsets = {id(parameter): offsets.get((name, parameter.shape), self._binding.step_count)
                             for name, parameter in zip(self._binding.names, self._binding.parameters)}
        for parameter in self._binding.parameters:
            state = self.state.get(parameter)
            if is_new and type(state) is ParameterState and any(plane in dict.keys(state) for plane in _PLANES):
                name = self._binding.names[index_of.get(id(parameter), 0)]
                raise RuntimeError(f"state of parameter {name} was put in before the first step: give it by "
                                   "load_state_dict(), or after that step")

    def _tell_step(self) -> None:
        self._stale = [handed for handed in self._stale if not handed.is_gone]
        for parameter in self._binding.parameters:
            if id(parameter) in self._trained:
                self._stale += self._state_of(parameter).tell(self._updates_of(parameter))
        self._name_step()

    def _name_step(self) -> None:
        self._own_step = (self._binding.job_uid, self._binding.step_count)
        for group in self.param_groups:
            group["job_uid"], group["job_step"] = self._own_step

    def _state_of(self, parameter: torch.Tensor) -> ParameterState:
        """Of one that a job trains; bound to the job."""
        state = self.state.get(parameter)
        if type(state) is not ParameterState:
            state = self.state[parameter] = ParameterState(state or {})
        if not state.is_bound:
            state.bind(self._trained[id(parameter)][1], _reader(self, parameter))
        return state

    def _updates_of(self, parameter: torch.Tensor) -> int:
        """How often the parameter was updated, if each step did so that was made since the trainer last wrote it."""
        return max(self._binding.step_count - self._offsets.get(id(parameter), 0), 0)

    def _writes(self) -> dict[tuple, list[tuple[torch.Tensor, dict[str, torch.Tensor | None], int | None]]]:
        """What the trainer has put into the state, reset, or written to in place: by the planes, and whether there are
        update counts, those of which it is."""
        late = next((handed for handed in self._stale if handed.is_written), None)
        if late is not None:
            raise RuntimeError(f"{late.plane} was read from the optimizer's state before the last step, and written to "
                               "after it, which changes nothing: read it from optimizer.state again, and write that")
        writes = {}
        for parameter in self._binding.parameters:
            if id(parameter) not in self._trained:
                continue
            given = self.state.get(parameter)
            if type(given) is ParameterState and given.is_untouched:
                continue
            if given:
                planes, step = self._state_of(parameter).changes(self._updates_of(parameter))
            else:
                planes, step = dict.fromkeys(self._trained[id(parameter)][1]), 0  # As before its first update.
            if planes or step is not None:
                writes.setdefault((tuple(planes), step is None), []).append((parameter, planes, step))
        return writes

    def _write_back(self) -> None:
        """Of all ranks, before a step: that, to the service."""
        writes = self._writes()
        for (planes, _), members in writes.items():
            counts = [step for _, _, step in members]
            self._binding.write_state([self._trained[id(parameter)][0] for parameter, _, _ in members],
                                      {plane: [of[plane] for _, of, _ in members] for plane in planes},
                                      None if counts[0] is None else counts)
            for parameter, _, step in members:
                if step is not None:
                    self._offsets[id(parameter)] = self._binding.step_count - step
        if writes:
            self._tell_step()

    @torch.no_grad()
    def send_weights(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Has the service take the trainer's weights of these parameters, by default of all, and keep their moments:
        after a clamp, other pretrained weights, averages that were swapped in. Those of other optimizers are passed
        over. All ranks call it, between two steps, with the same weights of a parameter that is whole on several. The
        step before cannot be undone any more. The first step takes the weights as they are, without it."""
        if self._binding is None:
            return
        self._binding.settle()
        self._binding.wait_for_weights()
        chosen = None
        if parameters is not None:
            ours = {id(parameter): index for index, parameter in enumerate(self._binding.parameters)}
            given = [parameters] if torch.is_tensor(parameters) else list(parameters)
            chosen = sorted({ours[id(parameter)] for parameter in given if id(parameter) in ours})
            if not chosen and given and not {id(parameter) for parameter in given} & {id(p) for p in self._parameters()}:
                raise ValueError("none of the parameters that were given to send_weights() is this optimizer's")
        self._binding.send_weights(chosen)

    def _loss_scale(self) -> float:
        scale = getattr(self, "grad_scale", None)  # Set by GradScaler around step.
        return 1.0 if scale is None else float(scale)

    def _current_hyper_parameters(self) -> list[HyperParameters]:
        return self._settings_of_others or [self._hyper_parameters(group) for group in self.param_groups]

    def _hyper_parameters(self, group: dict[str, Any]) -> HyperParameters:
        for name in ("lr", "eps", "weight_decay"):  # Else the service refuses them, when the step has begun.
            if not 0.0 <= group[name] < math.inf:
                raise ValueError(f"Invalid {name} value: {float(group[name])}; set it in the optimizer's param_groups")
        for index, beta in enumerate(group["betas"]):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {float(beta)}; set it in the optimizer's "
                                 "param_groups")
        return HyperParameters(
            lr=float(group["lr"]), betas=tuple(float(beta) for beta in group["betas"]), eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled_weight_decay=bool(group["decoupled_weight_decay"]), amsgrad=bool(group["amsgrad"]), maximize=bool(group["maximize"]))

    # ------------------------------------------------------------ what torch asks of an optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also takes back what has left during backward passes since the last step."""
        super().zero_grad(set_to_none)
        if self._binding is not None:
            self._binding.discard(set_to_none)
            if self._own_step != (self._binding.job_uid, self._binding.step_count):  # After an interrupt.
                self._tell_step()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which is bound at its own first step."""
        return super().__getstate__() | {"_settings": self._settings, "_full_state": self._full_state,
                                         "_moments": self._moments, "_numbered": self._numbered}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # What was saved by an older torch lacks some.
            for name, value in {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
                                "differentiable": False, "fused": None, "decoupled_weight_decay": False}.items():
                group.setdefault(name, value)
        if "_settings" in state:  # load_state_dict comes here without.
            self._forget_steps()
            self._kept = Kept()
            uneven.register(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also after the first step(): then the next one derives another job."""
        if self._settings is not None:
            (param_group,) = named([param_group], self.module, self._numbered)
        super().add_param_group(param_group)
        self._numbered += len(self.param_groups[-1]["params"])
        if self._settings is not None:
            check_group(self.param_groups[-1])
        self._fill_state()

    def _fill_state(self) -> None:
        """A state for each parameter from the start: where there is none, torch.distributed.checkpoint calls
        step() to get one. Once there is a job, what the trainer has cleared is to be written there."""
        parameters = {parameter for group in self.param_groups for parameter in group["params"]}
        for parameter in list(self.state):
            if parameter not in parameters:  # Other code, such as accelerate, has put others in its place.
                del self.state[parameter]
        if self._binding is not None:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not self.state[parameter]:
                    self.state[parameter] = ParameterState(step=torch.tensor(0.0))
                if self._full_state and type(self.state.get(parameter)) is ParameterState:
                    self.state[parameter].bind(_planes_of(group), None)

    def state_dict(self) -> dict[str, Any]:
        """Small: hyper-parameters, and which step of which job they belong to. The weights and moments are on
        the service, which saves that step, too, if it has a --checkpoint-dir: in the background, while training
        goes on. So the trainer can go on from this state also when the job has gone on, or the service was started
        again. What the service has saved so stays until `Client.delete_checkpoint`: `TrainerCallback` and
        `LightningCallback` call that when the trainer deletes its own checkpoint.

        With full_state also the moments, and the masters of parameters that are not fp32, in fp32, sharded as the
        parameters: torch.optim goes on with them, and so does a new job (`load_state_dict`). Every rank reads them from
        the service, one parameter at a time."""
        dcp.load_without_ours()
        self._fill_state()
        if self._is_changed():  # Else the state is of a job that has not all of it.
            if self._binding.peers is not None:
                raise FailedPreconditionError("the param groups were changed since the last step(): call step(), or attach() "
                                              "on all ranks, before state_dict()")
            self._bound(new=True)
        if self._binding is not None:
            self._binding.settle_to_save()  # Else the state is of a step that may never be.
            if self._binding.peers is None:
                self._write_back()
            elif self._writes():
                raise FailedPreconditionError("the optimizer's state was written to, which goes to the service with all "
                                              "ranks' next step(): call that before state_dict()")
            self._tell_step()
        if self._binding is not None and not (self._full_state and self._settings["service"] is None):
            self._binding.save()
        with guard.reading_none():  # A state is there also where weights are not, and will not be.
            state = super().state_dict()
            state["state"] = {index: values.here() if type(values) is ParameterState else values
                              for index, values in state["state"].items()}
        parameters = self._parameters()
        if self._moments is not None:  # No service has them yet.
            for index, moments in enumerate(self._moments):
                if index in state["state"]:  # A parameter that is there twice counts where it is first.
                    state["state"][index] = state["state"][index] | (moments or {})
        elif self._full_state and (self._binding is not None or dcp.asks()):
            amsgrad = [group["amsgrad"] for group in self.param_groups for _ in group["params"]]
            for index, values in state["state"].items():
                if parameters[index].requires_grad:
                    state["state"][index] = values | self._planes(parameters[index], amsgrad[index])
        return state

    def _planes(self, parameter: torch.Tensor, amsgrad: bool) -> dict[str, torch.Tensor]:
        planes = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []),
                  *(["master"] if parameter.dtype != torch.float32 else [])]
        if self._binding is None:  # As torch.distributed.checkpoint wants it: places to load to.
            return {plane: torch.zeros_like(parameter, dtype=torch.float32) for plane in planes}
        read, updates = {}, 0
        for plane in planes:
            read[plane], updates = self._binding.read_state(parameter, plane)
        return read | {"step": torch.tensor(float(updates))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A state of ours: then attaches to the job that it is of, whose weights come into the parameters. Where the
        job is past the state's step, or the service was started again, it loads its checkpoint of that step. An error
        if it has none, or another job of that name, or the same parameters in another order or in other groups. Of a
        group whose names are others the parameters are found by their order, as in torch.

        A state of torch.optim with moments; or one of ours with full_state, if the service has nothing of that job:
        the moments are kept until the first step(), or attach(), with which a new job begins with them and with the
        weights that the parameters have then. A group's names say which parameter is which, or else, as in torch, the
        order. Until then the moments take 8 bytes a parameter on each rank (with FSDP2, of its shards). Each rank
        uploads its part, with the weights. At that step(): FailedPreconditionError if the job has weights already,
        BallastError if the service is older and takes no moments; then there is `ballast.torch.to_checkpoint`."""
        state_dict = regrouped(state_dict, self.param_groups)
        moments = moments_of(state_dict, self.param_groups)
        uid, step = (state_dict["param_groups"][0].get(name) for name in ("job_uid", "job_step"))
        if moments is None and self._settings["service"] is None and _has_planes(state_dict):
            uid = ""  # A full state, of no update: a new job begins as any other.
        bound = self._binding
        writes = bound is not None and (uid, step) != (bound.job_uid, bound.step_count)
        if writes and uid and moments is None:
            raise FailedPreconditionError(f"this state is of step {step} of a job, whose moments it has not, and this "
                                          "optimizer has already made steps; load it into a new one")
        if bound is None and uid and self._settings["service"] is None and moments is None:
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
        """Into the state, which goes to the job before its next step. The weights are the trainer's to load, and to
        send."""
        self._name_step()
        parameters = self._parameters()
        for parameter, values in zip(parameters, moments or [None] * len(parameters)):
            if id(parameter) in self._trained:
                planes = ("step", *self._trained[id(parameter)][1])
                self.state[parameter] = {name: values[name] for name in planes if name in values} if values else {}

    def _begin_again(self, names: list[list[str]], moments: list[Moments | None]) -> None:
        """The job that is made later has these moments, and is no other one's continuation."""
        for group, of_group in zip(self.param_groups, names):
            group.update(job_uid="", job_step=0, param_names=of_group)
        parameters = self._parameters()
        for parameter, values in zip(parameters, moments):
            if parameter in self.state:
                self.state[parameter]["step"] = torch.tensor(0.0) if values is None else values["step"].clone()


_PLANES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def _has_planes(state: dict[str, Any]) -> bool:
    return any("exp_avg" in values for values in state["state"].values())


def _planes_of(group: dict[str, Any]) -> tuple[str, ...]:
    return _PLANES if group["amsgrad"] else _PLANES[:2]


def _reader(optimizer: Remote, parameter: torch.Tensor) -> Callable[[str], torch.Tensor]:
    """Of a parameter's planes, for as long as there are both, and a job."""
    of, ours = weakref.ref(optimizer), weakref.ref(parameter)

    def read(plane: str) -> torch.Tensor:
        binding = None if of() is None else of()._binding
        if binding is None:
            raise FailedPreconditionError(f"{plane} is with a job that this optimizer has left")
        return binding.read_state(ours(), plane)[0]

    return read


def _job_of(optimizer: Remote) -> str:
    return "" if optimizer._binding is None else optimizer._binding.job
