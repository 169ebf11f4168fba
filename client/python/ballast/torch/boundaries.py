"""Waits where code begins that reads parameters without asking them: compiled code, a CUDA graph, FSDP's gathering,
a fork. It waits for the needed weights if they are known, else for all."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from . import guard

_attended = False


def attend() -> None:
    """Once in a process."""
    global _attended
    if _attended:
        return
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    _attended = True
    # FSDP reads its own memory of the shards, ahead of the forwards that need it. On a GPU its streams wait only for
    # the root's forward. So all weights are awaited there.
    _wait_before(FSDPState, "_root_pre_forward")
    _wait_before(FSDPParamGroup, "unshard")
    for name in ("capture_begin", "replay"):
        _wait_before(torch.cuda.CUDAGraph, name)
    _attend_to_compiled()
    os.register_at_fork(before=_before_fork)


def _wait_before(owner: type, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def waits_before(*arguments: Any, **options: Any) -> Any:
        _wait_for_all()
        return original(*arguments, **options)

    setattr(owner, name, waits_before)


def _attend_to_compiled() -> None:
    """Compiled code gets parameters unchanged. Each call of it, whenever it was compiled, looks for hooks that come
    before it."""
    def hooks(context: Any) -> list[Callable[[], Any]]:
        frame = sys._getframe(1)
        if guard.waits() and frame.f_code.co_name != "__init__":  # While it is made.
            module = _module_of(frame.f_locals.get("fn"))
            _wait_for_all() if module is None else guard.read(module.parameters())
        return context.__dict__["enter_exit_hooks"]

    def set_hooks(context: Any, value: list[Callable[[], Any]]) -> None:
        context.__dict__["enter_exit_hooks"] = value

    torch._dynamo.eval_frame._TorchDynamoContext.enter_exit_hooks = property(hooks, set_hooks)


def _module_of(compiled: Any) -> torch.nn.Module | None:
    """The module that it is, or whose method it is."""
    function = inspect.unwrap(compiled) if callable(compiled) else None
    module = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    return module if isinstance(module, torch.nn.Module) else None


def _wait_for_all() -> None:
    for wait in guard.waits():
        wait()


def _before_fork() -> None:
    for wait in guard.waits():
        try:
            wait()
        except Exception:  # The child gets the error when it reads them, and so does this process.
            pass
