"""torch.optim.AdamW and others over a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..rules import ADJUST_LR_FNS
from .remote import Remote

_WORDS = {"lr": "learning rate", "eps": "epsilon value"}  # In torch's errors.


def _check(foreach: bool | None, fused: bool | None, betas: Sequence[float | torch.Tensor] = (),
           **numbers: float | torch.Tensor) -> None:
    """The same checks as in torch."""
    if torch.is_tensor(numbers["lr"]) and numbers["lr"].numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    for name, value in numbers.items():
        if not 0.0 <= float(value):
            raise ValueError(f"Invalid {_WORDS.get(name, f'{name} value')}: {value}")
    for index, beta in enumerate(betas):
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if foreach and fused:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")


def _check_tensors(lr, betas, foreach: bool | None) -> None:
    """The same."""
    if torch.is_tensor(lr) and foreach:
        raise ValueError("lr as a Tensor is not supported for capturable=False and foreach=True")
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
    decoupled_weight_decay it is AdamW's. Everything else, and the other options, as in AdamW."""

    _rule = "adam"

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3,
                 betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, amsgrad: bool = False, *, foreach: bool | None = None,
                 maximize: bool = False, capturable: bool = False, differentiable: bool = False,
                 fused: bool | None = None, decoupled_weight_decay: bool = False, **options: Any):
        _check_tensors(lr, betas, foreach)
        _check(foreach, fused, betas, lr=lr, eps=eps, weight_decay=weight_decay)
        super().__init__(params, dict(
            lr=lr, betas=tuple(float(beta) for beta in betas), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
            maximize=maximize, foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=decoupled_weight_decay), options)


class AdamW(Adam):
    """torch.optim.AdamW on a Ballast service.

    The arguments are torch's, and `options`, which all optimizers here have. Their defaults: service=None,
    job="trainer", max_norm=None, update="wait", state="fp32",
    state_fallback=False, process_group=None, timeout=600.0, reconnect_timeout=60.0, full_state=None,
    overlap=False, overlap_weights=False, accumulation_steps=None, module=None, keep_previous=False, on_abort="redo",
    on_write="error", newton_schulz=None, and None for tls_ca, tls_cert, tls_key and token_file. Another one is a TypeError.

    params: as in torch, best with names: model.named_parameters(), or `ballast.torch.groups`. Without names they get
    those of module= or a DistributedDataParallel, else numbers. lr, betas, eps, weight_decay, amsgrad, maximize: as
    in torch. foreach, fused, capturable: accepted and ignored. differentiable: a ValueError if True.

    A param group may name another rule than the optimizer's: {"params": ..., "rule": "sgd", "momentum": 0.9}. The rules
    are "adam", "sgd", "lion", "adagrad", "signsgd" and "muon". What such a group does not give, lr too, has the default
    of SGD, Lion, Adagrad, SignSGD or Muon here, and for "adam" that of AdamW. One job has all groups, with one norm. The rule,
    amsgrad, initial_accumulator_value, and whether momentum is 0 are fixed when the job is made. ValueError: there is
    no such rule, or it has no such hyper-parameter.

    state: how the service stores it: "fp32", 12 bytes a parameter with the master weights, "bf16", 8 bytes, or "8bit", 6.2
    bytes. Also a param group may say it. "bf16" takes "adam" with a beta2 of at most 0.98, and otherwise betas and momentum
    of at most 0.99, without "muon"; "8bit" takes "adam" without amsgrad. Master weights are fp32 in each. Parameters with
    one dimension or fewer than 4,096 elements have fp32 state.
    state_fallback: so have parameters whose shards cut groups of 64 elements; else the service refuses them.

    service: "host:port" or "unix:/path". Several services hold the job together: "a:7070,b:7070" or a list, the same
    on all ranks. Each gets consecutive ranks in even shares. "node": each rank uses the lasting service of its node, at
    unix:/run/ballast/ballastd.sock or the unix socket in BALLAST_SERVICE; those of several nodes hold the job together.
    None: the first rank of each node starts a service there, which its optimizers share, and which ends with the last
    of them; with `torchrun --max-restarts` it ends with torchrun. job: its name there. max_norm: clips the gradient to
    this global norm, as torch.nn.utils.clip_grad_norm_, but on the service. update: "speculate" updates before the norm
    is known, with the same bits. process_group: the ranks that train together, by default all. timeout: the longest wait for other
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
                 fused: bool | None = None, **options: Any):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach,
                         capturable=capturable, differentiable=differentiable, fused=fused, decoupled_weight_decay=True,
                         **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # As torch does it, whatever the state is of.
            if group["rule"] == "adam":
                group["decoupled_weight_decay"] = True


class SGD(Remote):
    """torch.optim.SGD on a Ballast service: 8 bytes a parameter there, without momentum 4. The options, and
    groups of other rules, as in AdamW."""

    _rule = "sgd"

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3, momentum: float = 0.0,
                 dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False,
                 foreach: bool | None = None, differentiable: bool = False, fused: bool | None = None, **options: Any):
        _check(foreach, fused, lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        super().__init__(params, dict(
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
            maximize=maximize, foreach=foreach, differentiable=differentiable, fused=fused), options)


class Adagrad(Remote):
    """torch.optim.Adagrad on a Ballast service: 8 bytes a parameter there. The options, and groups of other rules, as
    in AdamW."""

    _rule = "adagrad"

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-2, lr_decay: float = 0.0,
                 weight_decay: float = 0.0, initial_accumulator_value: float = 0.0, eps: float = 1e-10,
                 foreach: bool | None = None, *, maximize: bool = False, differentiable: bool = False,
                 fused: bool | None = None, **options: Any):
        numbers = dict(lr=lr, lr_decay=lr_decay, weight_decay=weight_decay,
                       initial_accumulator_value=initial_accumulator_value, eps=eps)
        _check(foreach, fused, **numbers)
        super().__init__(params, dict(numbers, maximize=maximize, foreach=foreach, differentiable=differentiable,
                                      fused=fused), options)


class Lion(Remote):
    """Lion (arXiv 2302.06675) on a Ballast service: 8 bytes a parameter there. A step moves each weight by lr, up or
    down, by the sign of lerp(exp_avg, gradient, 1 - beta1); then exp_avg = lerp(exp_avg, gradient, 1 - beta2).
    weight_decay is decoupled. The options, and groups of other rules, as in AdamW."""

    _rule = "lion"

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-4,
                 betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.99), weight_decay: float = 0.0, *,
                 maximize: bool = False, foreach: bool | None = None, fused: bool | None = None,
                 capturable: bool = False, differentiable: bool = False, **options: Any):
        _check(foreach, fused, betas, lr=lr, weight_decay=weight_decay)
        super().__init__(params, dict(
            lr=lr, betas=tuple(float(beta) for beta in betas), weight_decay=weight_decay, maximize=maximize,
            foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused), options)


class SignSGD(Remote):
    """A step moves each weight by lr against the gradient's sign. It is on a Ballast service: 4 bytes a parameter
    there. weight_decay is decoupled. The options, and groups of other rules, as in AdamW."""

    _rule = "signsgd"

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3, weight_decay: float = 0.0, *,
                 maximize: bool = False, foreach: bool | None = None, fused: bool | None = None,
                 capturable: bool = False, differentiable: bool = False, **options: Any):
        _check(foreach, fused, lr=lr, weight_decay=weight_decay)
        super().__init__(params, dict(
            lr=lr, weight_decay=weight_decay, maximize=maximize, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused), options)


class Muon(Remote):
    """torch.optim.Muon on a Ballast service, for matrices: 8 bytes a parameter there, and 4 for directions and what
    becomes of them. Other parameters go into groups of another rule of the same optimizer:
    {"params": ..., "rule": "adam"}. The options as in AdamW.

    newton_schulz: who makes the Newton-Schulz iteration. For an m x n matrix, m <= n, it takes about
    ns_steps * (4 * m + 2 * m * m / n) operations a parameter. "workers": the ranks, on the matrices' devices, in bf16 as
    in torch; each matrix is made by one rank. All ranks are in that exchange, in step(). "service": the service, in
    fp32, on its processors. So the weights have the same bits for any number of ranks. A step that takes longer than
    `timeout` is an error; the service ends it all the same. None: "workers" if a matrix is on an accelerator.

    If the iteration's result is not finite, the matrix keeps its weights in that step. The log says so. All of the job
    has to be on one service."""

    _rule = "muon"

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3, weight_decay: float = 0.1,
                 momentum: float = 0.95, nesterov: bool = True,
                 ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315), eps: float = 1e-7,
                 ns_steps: int = 5, adjust_lr_fn: str | None = None, **options: Any):
        _check(None, None, lr=lr, momentum=momentum, weight_decay=weight_decay)
        if adjust_lr_fn not in ADJUST_LR_FNS:
            raise ValueError(f"Adjust learning rate function {adjust_lr_fn} is not supported")
        super().__init__(params, dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_coefficients=ns_coefficients,
            eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn), options)
