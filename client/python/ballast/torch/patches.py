"""Adapts torch's own functions to sent gradients.

`torch.nn.utils.clip_grad_norm_` on parameters without `.grad` silently returns 0 and clips nothing.
`Module.zero_grad` cannot take back gradients from the service. A `GradScaler` finds no gradients. When the first
optimizer sends gradients during backward, these functions are wrapped in torch, once. For all other parameters they
do not change.

A clip ends the step for further gradients, on all ranks, and returns the norm of all; the vote in `step()` has the
factor. Clipping covers whole param groups, because the service multiplies by group."""

from __future__ import annotations

import collections
import functools
import math
import sys
import warnings
import weakref
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.weak import WeakTensorKeyDictionary

from .clipping import coefficient_of
from .streaming import GradientStream

# By parameter, with weak references: the stream that takes its gradients, and its index there.
_streams: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Each stream's number of parameters, by group.
_sizes: weakref.WeakKeyDictionary[GradientStream, collections.Counter[int]] = weakref.WeakKeyDictionary()
_originals: dict[str, object] = {}


def register(stream: GradientStream, parameters: Mapping[int, torch.nn.Parameter]) -> None:
    """The stream takes the gradients of these parameters. By their index in its job."""
    for index, parameter in parameters.items():
        _streams[parameter] = (weakref.ref(stream), index)
        _sizes.setdefault(stream, collections.Counter())[stream.group_of(index)] += 1
    if not _originals:
        _wrap()


def release(parameter: torch.Tensor) -> None:
    """No stream takes its gradients any more; the step() of its optimizer sends them."""
    stream, index = taker_of(parameter) or (None, -1)
    if stream is not None:
        del _streams[parameter]
        stream.unhook(index)


def taker_of(parameter: torch.Tensor) -> tuple[GradientStream, int] | None:
    """The stream that takes its gradients, and its index there."""
    found = _streams.get(parameter)
    stream = None if found is None else found[0]()
    return None if stream is None or stream.closed else (stream, found[1])


def _streams_of(parameters) -> dict[GradientStream, collections.Counter[int]]:
    """The streams that take their gradients, and how many of these parameters each has, by group."""
    found: dict[GradientStream, collections.Counter[int]] = {}
    for parameter in {id(parameter): parameter for parameter in parameters}.values():
        stream, index = taker_of(parameter) or (None, -1)
        if stream is not None:
            found.setdefault(stream, collections.Counter())[stream.group_of(index)] += 1
    return found


def _begun_streams(parameters) -> dict[GradientStream, collections.Counter[int]]:
    """Those that have given gradients in the step in progress."""
    return {stream: counts for stream, counts in _streams_of(parameters).items() if stream.begun}


def _listed(tensors) -> list:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _wrap() -> None:
    wrappers = {"clip_grad_norm_": _clip_by_norm, "clip_grads_with_norm_": _clip_with_norm,
                "get_total_norm": _norm_of_gradients, "clip_grad_value_": _clip_by_value}
    for name, wrapper in wrappers.items():
        original = getattr(torch.nn.utils, name, None)  # Some versions of torch lack some.
        if original is not None:
            _originals[name] = original
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                setattr(module, name, wrapper(original))
    # Code that has imported a function by name keeps calling that.
    names = {id(original): name for name, original in _originals.items()}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch."):
            continue
        for alias, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in names:
                warnings.warn(f"{module_name}.{alias} was imported before the optimizer's first step and does not see "
                              f"gradients that were sent already: call torch.nn.utils.{names[id(value)]}, or create the "
                              "optimizer with max_norm=", stacklevel=2)
    _originals["zero_grad"] = torch.nn.Module.zero_grad
    torch.nn.Module.zero_grad = _zero_grad(torch.nn.Module.zero_grad)
    torch.amp.GradScaler._unscale_grads_ = _unscale(torch.amp.GradScaler._unscale_grads_)


# ------------------------------------------------------------ clipping

def _clip_by_norm(original):
    @functools.wraps(original)
    def clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        parameters = _listed(parameters)
        groups = _groups("clip_grad_norm_", parameters)
        if not groups:
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        if norm_type != 2:
            raise ValueError(f"norm_type is {norm_type}, but gradients that were sent to the service can be clipped "
                             "only by their 2-norm; create the optimizer with overlap=False")
        _check_max_norm(max_norm)
        others = _gradients_of_others(parameters)
        norm = math.hypot(*(stream.seal().norm(of_stream) for stream, of_stream in groups.items()),
                          *(_whole(gradient.norm()).item() for gradient in others))
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm}, so it cannot be clipped; call zero_grad(), or "
                               "give error_if_nonfinite=False, and step() skips the step on all ranks")
        _clip(groups, others, max_norm, None if len(groups) == 1 and not others else norm)
        return _as_torch_returns_it(norm, parameters)

    return clip_grad_norm_


def _clip_with_norm(original):
    @functools.wraps(original)
    def clip_grads_with_norm_(parameters, max_norm, total_norm, foreach=None):
        parameters = _listed(parameters)
        groups = _groups("clip_grads_with_norm_", parameters)
        if not groups:
            return original(parameters, max_norm, total_norm, foreach)
        _check_max_norm(max_norm)
        _clip(groups, _gradients_of_others(parameters), max_norm, float(_whole(torch.as_tensor(total_norm))))

    return clip_grads_with_norm_


def _norm_of_gradients(original):
    @functools.wraps(original)
    def get_total_norm(tensors, *arguments, **options):
        tensors = _listed(tensors)
        if not tensors or any(tensor is None for tensor in tensors):
            _check_none_left("get_total_norm", "the norm is clip_grad_norm_(parameters, float('inf'))")
        return original(tensors, *arguments, **options)

    return get_total_norm


def _clip_by_value(original):
    @functools.wraps(original)
    def clip_grad_value_(parameters, *arguments, **options):
        parameters = _listed(parameters)
        if any(stream.frees for stream in _begun_streams(parameters)):
            raise RuntimeError("clip_grad_value_ comes too late: gradients were sent to the service during backward; "
                               "clip by the norm, or create the optimizer without accumulation_steps")
        return original(parameters, *arguments, **options)

    return clip_grad_value_


def _groups(name: str, parameters: list[torch.Tensor]) -> dict[GradientStream, list[int]]:
    """The groups that these parameters form, among those with sent gradients."""
    if not parameters:
        _check_none_left(name, "give it the parameters, whether they have .grad or not")
    found = _begun_streams(parameters)
    given = {id(parameter) for parameter in parameters}
    for stream, counts in found.items():
        for group, count in counts.items():
            if count < _sizes[stream][group] and not given.issuperset(_with_gradient(stream, group)):
                raise RuntimeError(f"{name} was given {count} of the {_sizes[stream][group]} parameters of a param "
                                   "group, but the service clips whole groups of sent gradients: give it all of the "
                                   "group, or make these a param group of their own")
    return {stream: sorted(counts) for stream, counts in found.items()}


def _with_gradient(stream: GradientStream, group: int) -> list[int]:
    """The group's parameters with a gradient in this step, in `.grad` or freed."""
    return [id(parameter) for parameter, (taker, index) in _streams.items()
            if taker() is stream and stream.group_of(index) == group and
            (parameter.grad is not None or index in stream.left)]


def _check_none_left(name: str, what_to_do: str) -> None:
    if any(stream.begun and stream.frees and not stream.closed for stream in _sizes):
        raise RuntimeError(f"{name} was given no gradient, because gradients were sent to the service during "
                           f"backward: {what_to_do}")


def _check_max_norm(max_norm: float) -> None:
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, but must be positive for gradients that were sent to the service")


def _gradients_of_others(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of parameters without a stream."""
    return [parameter.grad for parameter in parameters
            if parameter.grad is not None and not _begun_streams([parameter])]


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _as_torch_returns_it(norm: float, parameters: list[torch.Tensor]) -> torch.Tensor:
    """A DTensor, if some parameters are DTensors."""
    mesh = next((parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)), None)
    value = torch.tensor(norm, dtype=torch.float32, device=parameters[0].device)
    return value if mesh is None else DTensor.from_local(value, mesh, mesh.ndim * [Replicate()], run_check=False)


def _clip(groups: dict[GradientStream, list[int]], others: list[torch.Tensor], max_norm: float,
          norm: float | None) -> None:
    for stream, of_stream in groups.items():
        stream.seal().clip(of_stream, max_norm, norm)
    for gradient in others:
        gradient.detach().mul_(coefficient_of(max_norm, norm))


# ------------------------------------------------------------ others

def _zero_grad(original):
    @functools.wraps(original)
    def zero_grad(self, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        for stream, of_module in _streams_of(self.parameters()).items():
            if sum(of_module.values()) == sum(_sizes[stream].values()):
                stream.discard()  # Including those that have come and are not sent.
            elif stream.begun and stream.frees:  # Otherwise step() sees what is in .grad.
                raise RuntimeError("zero_grad() of a part of the model cannot take back gradients that were sent to "
                                   "the service; call the optimizer's zero_grad(), or create it without "
                                   "accumulation_steps")
        for parameter in self.parameters():
            stream, index = taker_of(parameter) or (None, -1)
            if stream is not None:
                stream.zero(index, parameter, set_to_none)

    return zero_grad


def _unscale(original):
    """For a GradScaler: what unscale_ does, and what step does without a call of it."""
    @functools.wraps(original)
    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        streams = _begun_streams(parameter for group in optimizer.param_groups for parameter in group["params"])
        if not streams:
            return original(self, optimizer, inv_scale, found_inf, allow_fp16)
        for stream in streams:  # One: a parameter gives its gradients to one optimizer.
            sealed = stream.seal()
            sealed.unscaling *= inv_scale.item()
            found_inf.fill_(float(not sealed.finite))
        return {found_inf.device: found_inf}

    return _unscale_grads_
