"""torch.optim.AdamW and Adam over a session."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import FailedPreconditionError, NotFoundError
from ..session import HyperParameters
from .binding import Binding, NothingToResume, check_overlap
from .moments import Moments, moments_of

# The first skipped step is told, and from then on each of so many.
_SKIPS_A_WARNING = 100


class _Remote(torch.optim.Optimizer):
    """What both have in common. The hyper-parameters of a param group may change between steps, as LR
    schedulers do it; the parameters may not, once the first step has been made."""

    # GradScaler hands over its scale and does not unscale: the service divides, and skips the step where
    # a gradient is not finite.
    _step_supports_amp_scaling = True
    _decoupled_weight_decay = True

    _binding: Binding | None = None
    _moments: list[Moments | None] | None = None  # By parameter: of a state that was loaded, until a job has them.
    _settings: dict[str, Any] | None = None  # While it is made.
    _full_state = False
    _own_step: tuple[str, int] | None = None  # Of which the param groups are, unless a state was loaded.

    def __init__(self, params, defaults: dict[str, Any], *, service: str | None, job: str | None,
                 max_norm: float | None, update: str, process_group, timeout: float, full_state: bool,
                 overlap: bool, accumulation_steps: int | None, module: torch.nn.Module | None,
                 keep_previous: bool, on_abort: str, credentials: dict[str, str | None]):
        self._forget_steps()
        if max_norm is not None and not (math.isfinite(max_norm) and max_norm > 0):
            raise ValueError(f"Invalid max_norm value: {max_norm}")
        if update not in ("wait", "speculate"):
            raise ValueError(f"Invalid update value: {update!r}; expected 'wait' or 'speculate'")
        if on_abort not in ("redo", "skip"):
            raise ValueError(f"Invalid on_abort value: {on_abort!r}; expected 'redo' or 'skip'")
        if accumulation_steps is not None and accumulation_steps < 1:
            raise ValueError(f"Invalid accumulation_steps value: {accumulation_steps}")
        if service is not None and job is None:
            raise ValueError("a job of a service has a name: give job=")
        # Of the job that a state is of, and its step. In the param groups, so that torch.distributed.checkpoint
        # takes them along.
        super().__init__(params, defaults | dict(job_uid="", job_step=0))
        for group in self.param_groups:
            _check_group(group)
        self._full_state = full_state
        self._settings = dict(service=service, job=job or "trainer", max_norm=max_norm or 0.0, update=update,
                              process_group=process_group, timeout=timeout, overlap=overlap,
                              accumulation_steps=accumulation_steps, module=module, keep_previous=keep_previous,
                              on_abort=on_abort, credentials=credentials)
        if overlap:
            check_overlap([p for group in self.param_groups for p in group["params"]], process_group, module)

    def _forget_steps(self) -> None:
        # Of the last step. No attributes of the class: Lightning's wrappers of optimizers would show those.
        self.grad_norm: float | None = None
        self.clip_coefficient: float | None = None
        self.skipped: str | None = None
        self._skips = 0

    # ------------------------------------------------------------ a step

    @torch.no_grad()
    def step(self, closure=None):
        """One step of all ranks. Afterwards `grad_norm` has the norm of the whole gradient, before clipping by the
        service; `clip_coefficient` what it was multiplied with, the smallest of all groups; `skipped` why nothing was
        changed, or None.

        closure: evaluates the model again and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("step() talks with the service, which a CUDA graph cannot record; capture forward and "
                               "backward only, and call step() after the replay")
        binding = self._bound(new=True)
        decision = binding.step(self._loss_scale())
        self.grad_norm = decision.norm
        self.clip_coefficient = decision.clip_coefficient
        self.skipped = None if decision.applied else decision.skip_reason
        # A GradScaler tries scales until none is skipped, and needs no warning.
        if self.skipped is not None and getattr(self, "grad_scale", None) is None:
            if self._skips % _SKIPS_A_WARNING == 0 and binding.rank == 0:
                warnings.warn(f"step {decision.step} changed nothing: {self.skipped} ({self._skips} skipped before; "
                              "optimizer.skipped says it of each step)", stacklevel=3)
            self._skips += 1
        self._tell_step()
        return loss

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
        """Whether gradients leave during backward: from the second step on, if that was asked for."""
        return self._binding is not None and self._binding.stream is not None

    @torch.no_grad()
    def attach(self, create: bool = False, resume: bool | str = False) -> int:
        """Binds to the job as it is on the service, and puts its weights into the parameters: for a run that
        goes on, before the first forward, or after an AbortedError. Returns the job's step.

        create: if the job has no weights yet, it gets those of the parameters, and the step is 0; else that is a
        NotFoundError or FailedPreconditionError. resume: the same, but first the service looks for a checkpoint of the
        job's name (or of the one that is given: "gpt", "gpt/step-1000") and loads it. So it may stand there from the
        first start on. "gpt/step-1000" must be there, and a job with weights have begun with it."""
        checkpoint = resume if isinstance(resume, str) else self._settings["job"] if resume else None
        return self._bound(new=create or bool(resume), attach=True, checkpoint=checkpoint).step_count

    def close(self) -> None:
        """Ends the session, and the service that was started for it. The weights stay in the parameters."""
        if self._binding is not None:
            self._binding.close()
            self._binding = None

    def _bound(self, new: bool, attach: bool = False, checkpoint: str | None = None) -> Binding:
        if attach and self._binding is not None and self._binding.failed:
            self.close()
        if self._binding is None:
            group = self.param_groups[0]
            resume = (group["job_uid"], int(group["job_step"])) if group["job_uid"] else None
            if attach and resume == self._own_step:  # Of this optimizer itself: nothing has been loaded.
                resume = None
            self._binding = Binding(
                self.param_groups, self._current_hyper_parameters,
                resume=resume, new=new or self._moments is not None, attach=attach or resume is not None,
                checkpoint=checkpoint, moments=self._moments, **self._settings)
            self._moments = None
            self._fill_state()
            self._tell_step()
        return self._binding

    def _tell_step(self) -> None:
        for parameter in self._binding.parameters:
            self.state[parameter]["step"].fill_(self._binding.step_count)
        for group in self.param_groups:
            group["job_uid"], group["job_step"] = self._binding.job_uid, self._binding.step_count
        self._own_step = (self._binding.job_uid, self._binding.step_count)

    def _loss_scale(self) -> float:
        scale = getattr(self, "grad_scale", None)  # Set by GradScaler around step.
        return 1.0 if scale is None else float(scale)

    def _current_hyper_parameters(self) -> list[HyperParameters]:
        return [self._hyper_parameters(group) for group in self.param_groups]

    def _hyper_parameters(self, group: dict[str, Any]) -> HyperParameters:
        return HyperParameters(
            lr=float(group["lr"]), betas=tuple(float(beta) for beta in group["betas"]), eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]), decoupled_weight_decay=self._decoupled_weight_decay,
            amsgrad=bool(group["amsgrad"]), maximize=bool(group["maximize"]))

    # ------------------------------------------------------------ what torch asks of an optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also takes back what has left during backward passes since the last step."""
        super().zero_grad(set_to_none)
        if self._binding is not None:
            self._binding.discard()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which is bound at its own first step."""
        return super().__getstate__() | {"_settings": self._settings, "_full_state": self._full_state,
                                         "_moments": self._moments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_settings" in state:  # load_state_dict comes here without.
            self._forget_steps()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._binding is not None:
            raise RuntimeError("parameters cannot be added after the first step: the job on the service has the "
                               "parameters that it was created with. Close it and create another optimizer")
        super().add_param_group(param_group)
        if self._settings is not None:
            _check_group(self.param_groups[-1])
        self._fill_state()

    def _fill_state(self) -> None:
        """A state for each parameter from the start: where there is none, torch.distributed.checkpoint calls
        step() to get one."""
        parameters = {parameter for group in self.param_groups for parameter in group["params"]}
        for parameter in list(self.state):
            if parameter not in parameters:  # Somebody, accelerate for one, has put others in its place.
                del self.state[parameter]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("step", torch.tensor(0.0))

    def state_dict(self) -> dict[str, Any]:
        """Small: hyper-parameters, and which step of which job they belong to. The weights and moments are on
        the service, which saves that step, too, if it has a --checkpoint-dir: in the background, while training
        goes on. So the trainer can go on from this state also when the job has gone on, or the service has begun
        anew, as long as that is one of the job's newest --checkpoint-keep.

        With full_state also the moments, and the masters of parameters that are not fp32, in fp32, sharded as the
        parameters: torch.optim goes on with them, and so does a new job (`load_state_dict`). Every rank reads them from
        the service, one parameter at a time."""
        self._fill_state()
        if self._binding is not None and not (self._full_state and self._settings["service"] is None):
            self._binding.save()
        state = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self._moments is not None:  # Nobody else has them yet.
            for index, moments in enumerate(self._moments):
                if index in state["state"]:  # A parameter that is there twice counts where it is first.
                    state["state"][index] = state["state"][index] | (moments or {})
        elif self._full_state:
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
        job is past the state's step, or the service has begun anew, it loads its checkpoint of that step. An error if
        it has none, or another job of that name.

        A state of torch.optim with moments; or one of ours with full_state, if the service has nothing of that job:
        the moments are kept until the first step(), or attach(), with which a new job begins with them and with the
        weights that the parameters have then. A group's names say which parameter is which, or else, as in torch, the
        order. Until then the moments take 8 bytes a parameter on each rank (with FSDP2, of its shards). They go
        through a file in the temporary folder of rank 0's host, where the service must run and let this user name
        paths, as it does over a unix socket of the user's own; for others there is `ballast.torch.to_checkpoint`.
        FailedPreconditionError, at that step(), if the job has weights already."""
        moments = moments_of(state_dict, self.param_groups, self._decoupled_weight_decay)
        uid, step = (state_dict["param_groups"][0].get(name) for name in ("job_uid", "job_step"))
        bound = self._binding
        if bound is not None and (uid, step) != (bound.job_uid, bound.step_count) and (uid or moments is not None):
            raise FailedPreconditionError("this optimizer has already made steps; load the state into a new one")
        if bound is None and uid and self._settings["service"] is None and moments is None:
            raise NotFoundError(f"this state is of step {step} of a job of another service, or of one that ended with "
                                "its run (service=None): give service= the address of a "
                                "ballast.Service(checkpoint_dir=...) or of a ballastd with a --checkpoint-dir. With "
                                "full_state=True a state has the moments, and a new job begins with them")
        names = [group["param_names"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.setdefault("job_uid", "")
            group.setdefault("job_step", 0)
        for parameter, values in self.state.items():
            self.state[parameter] = {name: value for name, value in values.items() if name == "step"}
        self._fill_state()
        self._own_step = None
        self._moments = None
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
            self._begin_anew(names, moments)

    def _begin_anew(self, names: list[list[str]], moments: list[Moments | None]) -> None:
        """The job that is made later has these moments, and is no other one's continuation."""
        for group, of_group in zip(self.param_groups, names):
            group.update(job_uid="", job_step=0, param_names=of_group)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, values in zip(parameters, moments):
            self.state[parameter]["step"] = torch.tensor(0.0) if values is None else values["step"].clone()


def _check_group(group: dict[str, Any]) -> None:
    if "param_names" not in group:
        raise ValueError("the service keeps state by name: give model.named_parameters(), or "
                         "ballast.torch.groups(model)")
    for name in ("capturable", "differentiable"):
        if group[name]:
            raise ValueError(f"{name} is not possible: the update is made on the service")
    for name, parameter in zip(group["param_names"], group["params"]):
        if parameter.is_complex():
            raise ValueError(f"parameter {name} is complex, which is not supported")
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"parameter {name} is {parameter.dtype}; expected float32, bfloat16 or float16")


def _check_tensors(lr, betas, foreach: bool | None) -> None:
    """As torch does, though here they could be anything."""
    if torch.is_tensor(lr):
        if foreach:
            raise ValueError("lr as a Tensor is not supported for capturable=False and foreach=True")
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
    if not (all(isinstance(beta, float) for beta in betas) or all(torch.is_tensor(beta) for beta in betas)):
        raise ValueError("betas must be either both floats or both Tensors")
    for index, beta in enumerate(betas):
        if torch.is_tensor(beta):
            if foreach:
                raise ValueError(f"betas[{index}] as a Tensor is not supported for capturable=False and foreach=True")
            if beta.numel() != 1:
                raise ValueError(f"Tensor betas[{index}] must be 1-element")


class AdamW(_Remote):
    """torch.optim.AdamW on a Ballast service.

    params: model.named_parameters(), or param groups with names (`ballast.torch.groups`). lr, betas, eps,
    weight_decay, amsgrad, maximize: as in torch. foreach, fused: accepted, and without meaning here.

    service: "host:port" or "unix:/path"; None starts a service for this run, which ends with it. job: its
    name there. max_norm: clips the gradient to this global norm, as torch.nn.utils.clip_grad_norm_ does, but
    on the service. update: "speculate" updates before the norm is known, with the same bits. process_group:
    the ranks that train together, by default all. timeout: the longest wait for other ranks, in seconds.
    full_state: state_dict has the moments, too. keep_previous: `undo_step` is possible, and the service keeps one more
    version of all state for it. on_abort: what becomes of a step that cannot be kept, because it was aborted on the
    service: with "redo" step() raises an AbortedError, and attach() goes on; with "skip" the same step() of all ranks
    changes nothing, `skipped` says why, and training goes on. tls_ca, tls_cert, tls_key, token_file: files, as for
    `ballast.connect`.

    overlap: from the second step on each gradient leaves as soon as backward has it, and `.grad` is None then. The
    bits are the same. torch.nn.utils.clip_grad_norm_ has all ranks end the step's gradients, and returns their norm;
    step() clips, or zero_grad() leaves the step out. So do clip_grads_with_norm_ and GradScaler.unscale_; each takes
    whole param groups. What cannot be done any more raises an error that says so. zero_grad(), the optimizer's and the
    model's, takes back what has left. accumulation_steps: backward passes in a step at most, by default any number;
    with the exact number the service begins earlier, and with 1 it needs 4 bytes a parameter less. module: the
    DistributedDataParallel, where there is one.

    The job is created, or joined, at the first step; then its weights are those of the parameters. The errors
    are those of torch for arguments, and `ballast.BallastError` for what the service refuses."""

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
                 amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
                 capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
                 service: str | None = None, job: str | None = None, max_norm: float | None = None,
                 update: str = "wait", process_group=None, timeout: float = 600.0, full_state: bool = False,
                 overlap: bool = False, accumulation_steps: int | None = None,
                 module: torch.nn.Module | None = None, keep_previous: bool = False, on_abort: str = "redo",
                 tls_ca: str | None = None, tls_cert: str | None = None, tls_key: str | None = None,
                 token_file: str | None = None):
        _check_tensors(lr, betas, foreach)
        if not 0.0 <= float(lr):
            raise ValueError(f"Invalid learning rate: {lr}")
        if not 0.0 <= eps:
            raise ValueError(f"Invalid epsilon value: {eps}")
        for index, beta in enumerate(betas):
            if not 0.0 <= float(beta) < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not 0.0 <= weight_decay:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        betas = tuple(float(beta) for beta in betas)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
                        foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused)
        super().__init__(params, defaults, service=service, job=job, max_norm=max_norm, update=update,
                         process_group=process_group, timeout=timeout, full_state=full_state, overlap=overlap,
                         accumulation_steps=accumulation_steps, module=module, keep_previous=keep_previous,
                         on_abort=on_abort, credentials=dict(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key,
                                                             token_file=token_file))


class Adam(AdamW):
    """torch.optim.Adam on a Ballast service: weight_decay is L2 regularisation, and 0 by default. Everything
    else as in AdamW."""

    _decoupled_weight_decay = False

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
                 amsgrad: bool = False, **options: Any):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
