"""Ctrl-C at a chosen place of ballast.torch."""

import contextlib
import inspect
import os
import sys
from unittest import mock

import ballast
import ballast.torch

_HERE = os.path.dirname(ballast.__file__)
# Where the step is made, and no trainer knows.
_STEP = inspect.unwrap(ballast.torch.AdamW.step).__code__
_RETURNS = max(line for _, _, line in _STEP.co_lines() if line)
# Of an object's end, and of an attribute that torch's C++ code asks for: these ignore what is raised, or say INTERNAL ASSERT.
_LOST = ("__del__", "_get", "_at_once")


class AtLine:
    """Raises a KeyboardInterrupt before a line of the client that this thread executes, of those the `at`th."""

    def __init__(self, at=None):
        self.at, self.count = at, 0

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(_HERE) or frame.f_code.co_name in _LOST:
            return None
        if event == "line" and (frame.f_code is not _STEP or frame.f_lineno != _RETURNS):
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self._trace


class AfterCall:
    """The same when a call of the library has returned to the session."""

    def __init__(self, at=None):
        self.at, self.count = at, 0

    def __enter__(self):
        self._patches = contextlib.ExitStack()
        for name in ("_call", "_patiently", "give_gradient"):
            self._patches.enter_context(mock.patch.object(ballast.Session, name, self._after(getattr(ballast.Session, name))))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def _after(self, call):
        def called(*arguments, **options):
            result = call(*arguments, **options)
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
            return result

        return called
