"""torch.optim.AdamW and Adam over a session."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from .remote import Remote


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


class Adam(Remote):
    """torch.optim.Adam on a Ballast service: weight_decay is L2 regularisation, and 0 by default, unless
    decoupled_weight_decay makes it AdamW's. Everything else as in AdamW."""

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3,
                 betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, amsgrad: bool = False, *, foreach: bool | None = None,
                 maximize: bool = False, capturable: bool = False, differentiable: bool = False,
                 fused: bool | None = None, decoupled_weight_decay: bool = False, service: str | None = None,
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
        super().__init__(params, defaults, service=service, job=job, max_norm=max_norm, update=update,
                         process_group=process_group, timeout=timeout, reconnect_timeout=reconnect_timeout,
                         full_state=full_state, overlap=overlap,
                         overlap_weights=overlap_weights, accumulation_steps=accumulation_steps, module=module,
                         keep_previous=keep_previous, on_abort=on_abort, on_write=on_write,
                         credentials=dict(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token_file=token_file))


class AdamW(Adam):
    """torch.optim.AdamW on a Ballast service.

    params: as torch has them, best with names: model.named_parameters(), or `ballast.torch.groups`. Without, the names
    are those of module= or a DistributedDataParallel, or else numbers. lr, betas, eps,
    weight_decay, amsgrad, maximize: as in torch. foreach, fused: accepted, and without meaning here.

    service: "host:port" or "unix:/path"; None: the optimizers of this process share a service, which ends with the last of them. job: its
    name there. max_norm: clips the gradient to this global norm, as torch.nn.utils.clip_grad_norm_ does, but
    on the service. update: "speculate" updates before the norm is known, with the same bits. process_group:
    the ranks that train together, by default all. timeout: the longest wait for other ranks, in seconds.
    reconnect_timeout: how long a call waits for a service that went away, in seconds, before it raises an
    UnavailableError. full_state: state_dict has the moments, too; by default with service=None, whose state ends with
    the run. keep_previous: `undo_step` is possible, and the service keeps one more version of all state for it.
    on_abort: what becomes of a step that cannot be kept, because it was aborted on the service: with "redo" step() raises an AbortedError, and attach() goes on; with "skip" the same step() of all ranks
    changes nothing, `skipped` says why, and training goes on. on_write: what becomes of weights that the trainer has
    written between steps, which the service would undo. "error": step() raises, and names `send_weights` and `attach`.
    "send": step() has the service take them, also those written by .data; in one process for a copy of the weights and
    a look at them in each step, with several ranks by sending all weights before each step. tls_ca, tls_cert, tls_key, token_file: files, as for
    `ballast.connect`.

    overlap: from the second step on each gradient leaves as soon as backward has it. The bits are the same: what counts
    is what `.grad` has at step(), and what was changed after it had left leaves again then. Only
    torch.nn.utils.clip_grad_norm_ differs by rounding: without overlap torch clips `.grad`, with it the service clips.
    max_norm= has the same bits either way. In one process whose torch.get_num_threads() are as many as its processors,
    with a service on the same host and without accumulation_steps, they leave in step(), which takes less time there;
    the property overlap is False then.
    torch.nn.utils.clip_grad_norm_ has all ranks end the step's gradients, and returns their norm; step() clips, or
    zero_grad() leaves the step out. So do clip_grads_with_norm_ and GradScaler.unscale_; each takes whole param groups.
    What cannot be done any more raises an error that says so. zero_grad(), the optimizer's and the model's, takes back
    what has left. accumulation_steps: a promise how often each gradient comes in a step at most: in each backward that
    is not under no_sync(). The last time it leaves, and its `.grad` is freed, unless a DistributedDataParallel keeps it.
    By default that is as often as in the step before, and `.grad` stays. A DistributedDataParallel is found at the first
    step; where several have the parameters, module: the one that is trained.

    overlap_weights: step() returns when the step is decided, and the weights come back while the next forward runs.
    A parameter waits for its own before anything reads it; compiled modules, CUDA graphs and FSDP2 wait where they begin.
    The bits are the same. Where ranks have weights from each other (DDP, HSDP) they come in step(), and the property
    overlap_weights is False. Code that reads memory by an address that it has kept calls `wait_for_weights` first. An
    error while weights are coming is raised where they are awaited.

    The job is created, or joined, at the first step; then its weights are those of the parameters. The errors
    are those of torch for arguments, and `ballast.BallastError` for what the service refuses."""

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3,
                 betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
                 foreach: bool | None = None, capturable: bool = False, differentiable: bool = False,
                 fused: bool | None = None, service: str | None = None, job: str | None = None,
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
