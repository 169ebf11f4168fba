"""What torch's own functions must know of gradients that have left.

`torch.nn.utils.clip_grad_norm_` on parameters without `.grad` returns 0 and clips nothing, without a word;
`Module.zero_grad` cannot take back what is with the service. Both are wrapped in torch, once, when the first
optimizer lets gradients leave during backward. For all other parameters they do what they did.
"""

from __future__ import annotations

import collections
import functools
import sys
import warnings
import weakref
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .streaming import GradientStream

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_streams: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # Of a parameter, by a weak reference.
_sizes: weakref.WeakKeyDictionary[GradientStream, int] = weakref.WeakKeyDictionary()  # How many parameters each has.
_originals: dict[str, object] = {}


def register(stream: GradientStream, parameters: Iterable[torch.nn.Parameter]) -> None:
    """The gradients of these leave through the stream."""
    for parameter in parameters:
        _streams[parameter] = weakref.ref(stream)
        _sizes[stream] = _sizes.get(stream, 0) + 1
    if not _originals:
        _wrap()


def stream_of(parameter: torch.Tensor) -> GradientStream | None:
    """The one that takes its gradients."""
    stream = _streams[parameter]() if parameter in _streams else None
    return None if stream is None or stream.closed else stream


def _begun_streams(parameters) -> collections.Counter[GradientStream]:
    """Those that have given gradients in the step that is under way, and how many of these parameters each has."""
    found = collections.Counter()
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    for parameter in {id(parameter): parameter for parameter in given}.values():
        stream = stream_of(parameter)
        if stream is not None and stream.begun:
            found[stream] += 1
    return found


def _wrap() -> None:
    for name in _CLIPS:
        original = _originals[name] = getattr(torch.nn.utils, name)
        wrapped = _clip(name, original)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            setattr(module, name, wrapped)
    _originals["zero_grad"] = torch.nn.Module.zero_grad
    torch.nn.Module.zero_grad = _zero_grad(torch.nn.Module.zero_grad)
    # Who has imported a function by its name goes on calling it.
    names = {id(_originals[name]): name for name in _CLIPS}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch."):
            continue
        for alias, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in names:
                warnings.warn(f"{module_name}.{alias} was imported before the optimizer's first step and does not see "
                              f"gradients that have left: call torch.nn.utils.{names[id(value)]}, or create the "
                              "optimizer with max_norm=", stacklevel=2)


def _clip(name: str, original):
    @functools.wraps(original)
    def clip(parameters, *arguments, **options):
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)
        if _begun_streams(parameters):
            raise RuntimeError(f"{name} comes too late: gradients have left for the service during backward. Create "
                               "the optimizer with max_norm=, or with overlap=False")
        return original(parameters, *arguments, **options)

    return clip


def _zero_grad(original):
    @functools.wraps(original)
    def zero_grad(self, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        for stream, of_module in _begun_streams(self.parameters()).items():
            if of_module < _sizes[stream]:
                raise RuntimeError("zero_grad() of a part of the model cannot take back gradients that have left for "
                                   "the service; call the optimizer's zero_grad(), or create it with overlap=False")
            stream.discard()

    return zero_grad
