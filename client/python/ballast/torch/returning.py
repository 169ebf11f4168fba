"""Weights that come back while the next forward pass runs.

A hook before the forward of each submodule waits for the weights of its own parameters, and what reads all of them
(`state_dict`, an evaluation, a copy of the model, the next step) for all. So a forward begins with its first layers
while the last ones are still updated. Code that reads parameters where no hook sees it calls `wait_for_weights`.

A backward through parameters whose forward no hook has seen is an error: it may have read old weights.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import FailedPreconditionError
from . import streaming

# Their forwards read the parameters of submodules that they do not call.
_READERS_OF_CHILDREN = (torch.nn.MultiheadAttention, torch.nn.DataParallel)
_LEAVE_IT_OUT = "or create the optimizer with overlap_weights=False"

_all: weakref.WeakSet[ReturningWeights] = weakref.WeakSet()
_of_parameter: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # Weak references to them.
_wrapped = False


class ReturningWeights:
    """Of one optimizer. parameters, names: those that are trained, by their index in the job. take: waits for the
    weights of these parameters, or for the end of the step, and puts them into these parameters; it is kept while
    weights are coming. together: the ranks take their weights in one call, which takes all."""

    def __init__(self, module: torch.nn.Module, parameters: Mapping[int, torch.Tensor], names: Mapping[int, str],
                 together: bool):
        self.coming: set[int] = set()  # Whose weights have not been taken.
        self._unread: set[int] = set()  # Those, and what was taken although no forward had asked for it.
        self._take: Callable[[list[int], bool], None] | None = None
        self._names, self._together = names, together
        self._sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
        self._lock = threading.RLock()
        self._forks = streaming._forks
        index_of = {id(parameter): index for index, parameter in parameters.items()}
        self._hooks = []
        for reader, read in readers(module, parameters.values(), names.values()).items():
            indices = None if read is None else {index_of[id(parameter)] for parameter in read}
            # Before FSDP's own, which gathers them.
            self._hooks.append(reader.register_forward_pre_hook(_Hook(self._before_forward, indices), prepend=True))
        for submodule in module.modules():
            self._hooks += [submodule.register_state_dict_pre_hook(_Hook(self._before_state)),
                            submodule.register_load_state_dict_pre_hook(_Hook(self._before_state))]
        for index, parameter in parameters.items():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_check(weakref.ref(self), index)))
            _of_parameter[parameter] = weakref.ref(self)
        _all.add(self)
        _wrap()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.forget()

    def begin(self, take: Callable[[list[int], bool], None]) -> None:
        """A step is decided, whose weights are coming."""
        self.coming, self._unread = set(self._names), set(self._names)
        self._take = take

    def wait(self, indices: Collection[int] | None = None, *, together: bool = False, read: bool = True) -> None:
        """Until the weights of these parameters, by default of all, are there. together: all ranks call it. read: what
        comes next may read them."""
        if self._forks != streaming._forks:
            if self.coming:
                raise FailedPreconditionError("this process is a fork of one whose weights were still coming; call "
                                              "wait_for_weights() before processes are started")
            return
        with self._lock:
            whole = indices is None or self._together
            wanted = set(self.coming) if whole else self.coming & set(indices)
            if wanted:
                if self._together and not together:
                    raise FailedPreconditionError(
                        "weights of the last step() are still coming, and the ranks gather them from each other: call "
                        "the optimizer's wait_for_weights() on all ranks before anything but a training forward of "
                        f"the whole module reads them, {_LEAVE_IT_OUT}")
                # No others: a forward that is under way has read those, which autograd would notice.
                self._take(sorted(wanted), whole)
                self.coming = self.coming - wanted
                if not self.coming:
                    self._take = None  # Which keeps the session; the optimizer may have gone.
            if read:
                self._unread = set() if whole else self._unread - set(indices)

    def none_read(self) -> bool:
        """Whether weights came back and nothing has read any."""
        return bool(self._unread) and len(self._unread) == len(self._names)

    def forget(self) -> None:
        self.coming, self._unread, self._take = set(), set(), None

    # ------------------------------------------------------------ hooks

    def _before_forward(self, indices: set[int] | None, module: torch.nn.Module, _: Any) -> None:
        if not self._unread:
            return
        if getattr(module, "_is_replica", False):
            raise RuntimeError("the weights were read by a DataParallel that is not the optimizer's module=: give "
                               f"that, {_LEAVE_IT_OUT}")
        if self.coming and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot wait for weights: call the optimizer's wait_for_weights() before "
                               f"the capture and before each replay, {_LEAVE_IT_OUT}")
        trains = torch.is_grad_enabled()
        # After a forward without a backward there is no way to find what it has read.
        together = isinstance(module, FSDPModule) or (
            trains and (self._sharded or isinstance(module, DistributedDataParallel)))
        self.wait(indices if trains else None, together=together)

    def _before_state(self, *_: Any) -> None:
        self.wait()

    def check_read(self, index: int) -> None:
        """Of a parameter that has just been given a gradient."""
        if index in self._unread and self._forks == streaming._forks:
            raise RuntimeError(
                f"parameter {self._names[index]} has a gradient, and no forward of the submodule that has it was seen "
                "since the last step(), so it may be of old weights (a submodule that is used without being called, "
                "a compiled or captured model): call the optimizer's wait_for_weights() before such a forward, "
                f"{_LEAVE_IT_OUT}")


def _check(returning: weakref.ref[ReturningWeights], index: int) -> Callable[[torch.Tensor], None]:
    """A hook, into which Python's garbage collector does not look."""
    def check(_: torch.Tensor) -> None:
        living = returning()
        if living is not None:
            living.check_read(index)

    return check


class _Hook:
    """Calls with these arguments first; nothing in a copy of what it is the hook of."""

    def __init__(self, call: Callable[..., None] | None = None, *first: Any):
        self._call, self._first = call, first

    def __call__(self, *arguments: Any) -> None:
        if self._call is not None:
            self._call(*self._first, *arguments)

    def __reduce__(self):
        return _Hook, ()


def readers(module: torch.nn.Module, parameters: Iterable[torch.Tensor], names: Iterable[str]
            ) -> dict[torch.nn.Module, list[torch.Tensor] | None]:
    """The submodules whose forward reads parameters, and which; None: any of them. ValueError if none reads one.

    FSDP2 gathers those of the next submodules ahead, and on a GPU on streams that wait for the root's forward alone:
    there all are awaited first."""
    named = {id(parameter): (parameter, name) for parameter, name in zip(parameters, names)}
    found: dict[torch.nn.Module, list[torch.Tensor] | None] = {}
    for submodule in module.modules():
        own = [parameter for parameter in _read_by(submodule) if id(parameter) in named]
        if own and _has_forward(submodule):
            found[submodule] = own
    seen = {id(parameter) for of_module in found.values() for parameter in of_module}
    for key, (_, name) in named.items():
        if key not in seen:
            raise ValueError(f"parameter {name} is in no submodule of module= that has a forward: give the module "
                             f"whose forward uses all parameters, {_LEAVE_IT_OUT}")
    sharded = [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]
    if sharded or isinstance(module, DistributedDataParallel):
        return dict.fromkeys([module, *sharded, *found])
    return found


def _read_by(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    if isinstance(module, _READERS_OF_CHILDREN):
        yield from module.parameters()
        return
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not _has_forward(child):  # A list of parameters, or of modules with some of their own.
            yield from child.parameters(recurse=False)
            yield from _read_by(child)


def _has_forward(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def check_overlap_weights(named: Mapping[str, torch.Tensor], module: Any) -> None:
    """ValueError if it would not be seen who reads the weights."""
    if not isinstance(module, torch.nn.Module):
        raise ValueError("overlap_weights needs to see when weights are read: give module= the model")
    for submodule in module.modules():
        if isinstance(submodule, (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)) or \
                submodule._compiled_call_impl is not None:
            raise ValueError(f"overlap_weights cannot see what {type(submodule).__name__} reads, which is compiled; "
                             "create the optimizer with overlap_weights=False")
    readers(module, named.values(), named)


# ------------------------------------------------------------ what reads parameters in torch itself

def _wait_for(parameters: Iterable[torch.Tensor]) -> None:
    if not any(returning.coming for returning in _all):
        return
    for returning in {_of_parameter[parameter] for parameter in parameters if parameter in _of_parameter}:
        if returning() is not None:
            returning().wait()


def _wrap() -> None:
    global _wrapped
    if _wrapped:
        return
    _wrapped = True
    _Hook.__call__ = torch.compiler.disable(_Hook.__call__)  # It would keep what is coming when it looks.
    for owner, name, read in (
            (torch.nn.Parameter, "__deepcopy__", lambda parameter, *_: [parameter]),
            (torch.nn.Parameter, "__reduce_ex__", lambda parameter, *_: [parameter]),
            (DTensor, "__deepcopy__", lambda parameter, *_: [parameter]),  # Of which a Parameter has the type.
            (DTensor, "__reduce_ex__", lambda parameter, *_: [parameter]),
            (torch.nn.Module, "_apply", lambda module, *_, **__: module.parameters()),
            (AveragedModel, "update_parameters", lambda _, model: model.parameters()),
            (FSDPModule, "unshard", lambda module, *_, **__: module.parameters())):
        setattr(owner, name, _after_weights(getattr(owner, name), read))
    os.register_at_fork(before=_before_fork)


def _after_weights(original, read: Callable[..., Iterable[torch.Tensor]]):
    @functools.wraps(original)
    def wrapped(*arguments, **options):
        _wait_for(read(*arguments, **options))
        return original(*arguments, **options)

    return wrapped


def _before_fork() -> None:
    for returning in list(_all):
        try:
            returning.wait(read=False)
        except Exception:  # The child gets the error when it reads them, and so does this process.
            pass
