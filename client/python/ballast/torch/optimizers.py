"""torch.optim.AdamW and Adam over a session."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import FailedPreconditionError
from ..session import HyperParameters
from .binding import Binding


class _Remote(torch.optim.Optimizer):
    """What both have in common. The hyper-parameters of a param group may change between steps, as LR
    schedulers do it; the parameters may not, once the first step has been made."""

    # GradScaler hands over its scale and does not unscale: the service divides, and skips the step where
    # a gradient is not finite.
    _step_supports_amp_scaling = True
    _decoupled_weight_decay = True

    def __init__(self, params, defaults: dict[str, Any], *, service: str | None, job: str | None,
                 max_norm: float | None, update: str, process_group, timeout: float):
        if max_norm is not None and not (math.isfinite(max_norm) and max_norm > 0):
            raise ValueError(f"Invalid max_norm value: {max_norm}")
        if update not in ("wait", "speculate"):
            raise ValueError(f"Invalid update value: {update!r}; expected 'wait' or 'speculate'")
        if service is not None and job is None:
            raise ValueError("a job of a service has a name: give job=")
        self.grad_norm: float | None = None
        self.clip_coefficient: float | None = None
        self.skipped: str | None = None
        self._binding: Binding | None = None
        self._resume: dict[str, Any] | None = None
        self._settings = dict(service=service, job=job or "trainer", max_norm=max_norm or 0.0, update=update,
                              process_group=process_group, timeout=timeout)
        super().__init__(params, defaults)

    # ------------------------------------------------------------ a step

    @torch.no_grad()
    def step(self, closure=None):
        """One step of all ranks. Afterwards `grad_norm` has the norm of the whole gradient, before clipping;
        `clip_coefficient` what it was multiplied with; `skipped` why nothing was changed, or None.

        closure: evaluates the model again and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        binding = self._bound(new=True)
        decision = binding.step([self._hyper_parameters(group) for group in self.param_groups], self._loss_scale())
        self.grad_norm = decision.norm
        self.clip_coefficient = decision.clip_coefficient
        self.skipped = None if decision.applied else decision.skip_reason
        for parameter in binding.parameters:
            self.state[parameter]["step"].fill_(binding.step_count)
        return loss

    def attach(self) -> None:
        """Binds to the job as it is on the service, and puts its weights into the parameters: for a run that
        goes on, before the first forward. FailedPreconditionError if the job has no weights yet."""
        self._bound(new=False)

    def close(self) -> None:
        """Ends the session, and the service that was started for it. The weights stay in the parameters."""
        if self._binding is not None:
            self._binding.close()
            self._binding = None

    def _bound(self, new: bool) -> Binding:
        if self._binding is None:
            self._binding = Binding(
                self.param_groups, [self._hyper_parameters(group) for group in self.param_groups],
                resume=self._resume, new=new, **self._settings)
            for parameter in self._binding.parameters:
                self.state[parameter]["step"] = torch.tensor(float(self._binding.step_count))
        return self._binding

    def _loss_scale(self) -> float:
        scale = getattr(self, "grad_scale", None)  # Set by GradScaler around step.
        return 1.0 if scale is None else float(scale)

    def _hyper_parameters(self, group: dict[str, Any]) -> HyperParameters:
        return HyperParameters(
            lr=float(group["lr"]), betas=tuple(float(beta) for beta in group["betas"]), eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]), decoupled_weight_decay=self._decoupled_weight_decay,
            amsgrad=bool(group["amsgrad"]), maximize=bool(group["maximize"]))

    # ------------------------------------------------------------ what torch asks of an optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_binding", None) is not None:
            raise RuntimeError("parameters cannot be added after the first step: the job on the service has the "
                               "parameters that it was created with. Close it and create another optimizer")
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])

    def state_dict(self) -> dict[str, Any]:
        """Small: hyper-parameters, and which step of which job they belong to. The weights and moments are on
        the service, which saves them itself (`ballast save`)."""
        state = super().state_dict()
        if self._binding is not None:
            state["ballast"] = dict(job=self._settings["job"], job_uid=self._binding.session.job_uid,
                                    step=self._binding.step_count)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Then attaches to the job that the state is of: its weights come into the parameters. An error if the
        service has another job, or is at another step."""
        state_dict = dict(state_dict)
        resume = state_dict.pop("ballast", None)
        if resume is not None and self._binding is not None:
            raise FailedPreconditionError("this optimizer has already made steps; load the state into a new one")
        super().load_state_dict(state_dict)
        if resume is not None:
            self._resume = resume
            self.attach()


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
        if hasattr(parameter, "device_mesh"):
            raise ValueError(f"parameter {name} is a DTensor: parameters sharded by FSDP2 are not supported yet")


class AdamW(_Remote):
    """torch.optim.AdamW on a Ballast service.

    params: model.named_parameters(), or param groups with names (`ballast.torch.groups`). lr, betas, eps,
    weight_decay, amsgrad, maximize: as in torch. foreach, fused: accepted, and without meaning here.

    service: "host:port" or "unix:/path"; None starts a service for this run, which ends with it. job: its
    name there. max_norm: clips the gradient to this global norm, as torch.nn.utils.clip_grad_norm_ does, but
    on the service. update: "speculate" updates before the norm is known, with the same bits. process_group:
    the ranks that train together, by default all. timeout: the longest wait for other ranks, in seconds.

    The job is created, or joined, at the first step; then its weights are those of the parameters. The errors
    are those of torch for arguments, and `ballast.BallastError` for what the service refuses."""

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
                 amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
                 capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
                 service: str | None = None, job: str | None = None, max_norm: float | None = None,
                 update: str = "wait", process_group=None, timeout: float = 600.0):
        if not 0.0 <= float(lr):
            raise ValueError(f"Invalid learning rate: {lr}")
        if not 0.0 <= eps:
            raise ValueError(f"Invalid epsilon value: {eps}")
        for index, beta in enumerate(betas):
            if not 0.0 <= float(beta) < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not 0.0 <= weight_decay:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
                        foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused)
        super().__init__(params, defaults, service=service, job=job, max_norm=max_norm, update=update,
                         process_group=process_group, timeout=timeout)


class Adam(AdamW):
    """torch.optim.Adam on a Ballast service: weight_decay is L2 regularisation, and 0 by default. Everything
    else as in AdamW."""

    _decoupled_weight_decay = False

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
                 amsgrad: bool = False, **options: Any):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
