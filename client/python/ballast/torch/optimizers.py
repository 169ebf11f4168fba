"""torch.optim.AdamW and Adam over a session."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from .._native import Services
from .options import Options
from .remote import Remote


def _check_tensors(lr, betas, foreach: bool | None) -> None:
    """The same checks as in torch."""
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


class Adam(Remote):
    """torch.optim.Adam on a Ballast service. weight_decay is L2 regularisation, by default 0; with
    decoupled_weight_decay it is AdamW's. Everything else as in AdamW."""

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3,
                 betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, amsgrad: bool = False, *, foreach: bool | None = None,
                 maximize: bool = False, capturable: bool = False, differentiable: bool = False,
                 fused: bool | None = None, decoupled_weight_decay: bool = False, service: Services | None = None,
                 job: str | None = None, max_norm: float | None = None, update: str = "wait",
                 process_group: dist.ProcessGroup | None = None, timeout: float = 600.0,
                 reconnect_timeout: float = 60.0, full_state: bool | None = None,
                 overlap: bool = False, overlap_weights: bool = False, accumulation_steps: int | None = None,
                 module: torch.nn.Module | None = None, keep_previous: bool = False, on_abort: str = "redo",
                 on_write: str = "error",
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
        if foreach and fused:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        defaults = dict(lr=lr, betas=tuple(float(beta) for beta in betas), eps=eps, weight_decay=weight_decay,
                        amsgrad=amsgrad, maximize=maximize, foreach=foreach, capturable=capturable,
                        differentiable=differentiable, fused=fused, decoupled_weight_decay=decoupled_weight_decay)
        super().__init__(params, defaults, Options(
            service=service, job=job, max_norm=max_norm, update=update, process_group=process_group, timeout=timeout,
            reconnect_timeout=reconnect_timeout, full_state=full_state, overlap=overlap, overlap_weights=overlap_weights,
            accumulation_steps=accumulation_steps, module=module, keep_previous=keep_previous, on_abort=on_abort,
            on_write=on_write, credentials=dict(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token_file=token_file)))


class AdamW(Adam):
    """torch.optim.AdamW on a Ballast service.

    params: as in torch, best with names: model.named_parameters(), or `ballast.torch.groups`. Without names they get
    those of module= or a DistributedDataParallel, else numbers. lr, betas, eps, weight_decay, amsgrad, maximize: as
    in torch. foreach, fused: accepted and ignored.

    service: "host:port" or "unix:/path". Several services hold the job together: "a:7070,b:7070" or a list, the same
    on all ranks. Each gets consecutive ranks in even shares. "node": each rank uses the lasting service of its node, at
    unix:/run/ballast/ballastd.sock or the unix socket in BALLAST_SERVICE; those of several nodes hold the job together.
    None: the first rank of each node starts a service there, which its optimizers share, and which ends with the last
    of them; with `torchrun --max-restarts` it ends with torchrun. job: its name there. max_norm: clips the gradient to this global norm, as
    torch.nn.utils.clip_grad_norm_, but on the service. update: "speculate" updates before the norm is known, with
    the same bits. process_group: the ranks that train together, by default all. timeout: the longest wait for other
    ranks, in seconds. reconnect_timeout: how long a call waits for an unreachable service, in seconds, before it
    raises UnavailableError. full_state: state_dict includes the moments; the default with service=None, whose state
    ends with the run. keep_previous: allows `undo_step`; the service keeps one more version of all state. tls_ca,
    tls_cert, tls_key, token_file: files, as in `ballast.connect`.

    on_abort: what happens to a step that is aborted on the service. "redo": step() raises AbortedError, and attach()
    continues. "skip": the same step() of all ranks changes nothing, `skipped` says why, and training goes on.

    on_write: what happens to weights that the trainer writes between steps. The service would undo them. "error":
    step() raises an error that names `send_weights` and `attach`. "send": step() sends them to the service,
    including writes by .data. In one process this costs a copy of the weights and a comparison in each step. With
    several ranks all weights are sent before each step.

    overlap: from the second step on each gradient is sent as soon as backward has it, with the same bits. `.grad` at
    step() counts: if a gradient changes after it was sent, it is sent again. Only torch.nn.utils.clip_grad_norm_
    differs by rounding: without overlap torch clips `.grad`, with it the service clips. max_norm= has the same bits
    either way. In one case gradients are sent in step(), which is faster, and the property overlap is False: one
    process with as many torch.get_num_threads() as processors, a service on the same host, and no
    accumulation_steps.

    With overlap torch.nn.utils.clip_grad_norm_ makes all ranks end the step's gradients, and returns their norm.
    step() then clips, or zero_grad() skips the step. clip_grads_with_norm_ and GradScaler.unscale_ do the same; each
    takes whole param groups. If an operation comes too late, it raises an error that says so. zero_grad() of the
    optimizer or the model takes back the sent gradients.

    accumulation_steps: a promise: each gradient comes at most so often in a step, that is in each backward that is
    not under no_sync(). At the last time it is sent, and its `.grad` is freed, unless a DistributedDataParallel
    keeps it. By default a gradient is expected as often as in the step before, and `.grad` stays. A
    DistributedDataParallel is found at the first step. If several have the parameters, module: the one that is
    trained.

    overlap_weights: step() returns when the step is decided, and the weights arrive during the next forward, with
    the same bits. A parameter waits for its weights before it is read; compiled modules, CUDA graphs and FSDP2 wait
    where they begin. If ranks get weights from each other (DDP, HSDP), the weights arrive in step(), and the
    property overlap_weights is False. Code that reads memory by a kept address calls `wait_for_weights` first. An
    error in receiving weights is raised where they are awaited.

    The job is created, or joined, at the first step; its first weights are those of the parameters. Errors are
    torch's for arguments, and `ballast.BallastError` for refusals of the service."""

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3,
                 betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
                 foreach: bool | None = None, capturable: bool = False, differentiable: bool = False,
                 fused: bool | None = None, service: Services | None = None, job: str | None = None,
                 max_norm: float | None = None, update: str = "wait",
                 process_group: dist.ProcessGroup | None = None, timeout: float = 600.0,
                 reconnect_timeout: float = 60.0, full_state: bool | None = None,
                 overlap: bool = False, overlap_weights: bool = False, accumulation_steps: int | None = None,
                 module: torch.nn.Module | None = None, keep_previous: bool = False, on_abort: str = "redo",
                 on_write: str = "error",
                 tls_ca: str | None = None, tls_cert: str | None = None, tls_key: str | None = None,
                 token_file: str | None = None):
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused, decoupled_weight_decay=True, service=service, job=job,
            max_norm=max_norm, update=update, process_group=process_group, timeout=timeout,
            reconnect_timeout=reconnect_timeout, full_state=full_state, overlap=overlap,
            overlap_weights=overlap_weights, accumulation_steps=accumulation_steps, module=module,
            keep_previous=keep_previous, on_abort=on_abort, on_write=on_write, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key,
            token_file=token_file)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # As torch does it, whatever the state is of.
            group["decoupled_weight_decay"] = True
