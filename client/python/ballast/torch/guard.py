"""A parameter whose weights are on their way has another class, which waits before anything can read it.

To ask an object of that class for an attribute, operator or conversion, Python has to call the class. C++ has to
call it to ask whether the object is a tensor. The class waits, gives the parameter its own class back, and then
answers. A few attributes do not depend on weights, and are answered at once. So readers need not know. Two kinds of
readers escape this: other tensors of the memory, and C++ that has the parameter already. `put` finds them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .places import here_of

_NO_WEIGHTS = frozenset(("grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "__dict__", "_fix_weakref",
                         "__torch_function__"))
_NO_WEIGHTS_TO_WRITE = frozenset(("grad", "requires_grad"))
_KEPT = frozenset(("__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__",
                   "__getattr__", "__setattr__", "__delattr__", "__hash__", "__torch_function__"))
_class = object.__dict__["__class__"]
_at_once = torch._C.DisableTorchFunctionSubclass  # Otherwise a getter of torch asks for more attributes.

Wait = "Callable[[list[int] | None], None]"  # Waits for the weights of parameters by these indices, or of all.

_guards: dict[type, type] = {}
_own_classes: dict[type, type] = {}  # By guard.
_waits: dict[int, tuple[Wait, int]] = {}  # By the identity of each guarded parameter: with its index.
_asked = threading.local()


def put(parameter: torch.Tensor, wait: Wait, index: int, ours: Iterable[torch.Tensor]) -> bool:
    """From now on every reader of the parameter first calls `wait` with its index. Returns True if its weights could
    be read without that: by another tensor of its memory than `ours`, by another process, or from C++ that has the
    parameter."""
    here = here_of(parameter)
    storage = here.untyped_storage()
    shared = here.device.type == "cpu" and storage.is_shared()
    known = {id(tensor): tensor for one in (here, *ours) for tensor in (one, one._base)
             if tensor is not None and tensor.untyped_storage()._cdata == storage._cdata}
    node = _node_of(here)
    _waits[id(parameter)] = wait, index
    if type(parameter) not in _own_classes:
        _class.__set__(parameter, _guard_of(type(parameter)))
    return (shared or torch._C._storage_Use_Count(storage._cdata) > len(known) + 1 or  # `storage` itself counts.
            torch.Tensor._use_count(here) > (1 if node is None else 2))


def _node_of(tensor: torch.Tensor) -> Any:
    """Autograd's node that sums its gradients and refers to it: at most one. None if only Python refers to it."""
    if not tensor.requires_grad or torch.Tensor._use_count(tensor) == 1:
        return None
    with torch.enable_grad():
        return tensor.expand_as(tensor).grad_fn.next_functions[0][0]


def remove(parameter: torch.Tensor) -> None:
    _waits.pop(id(parameter), None)
    own = _own_classes.get(type(parameter))
    if own is not None:
        _class.__set__(parameter, own)


def read(parameters: Iterable[torch.Tensor]) -> None:
    """Waits for those of their weights that are on their way."""
    found: dict[Wait, list[int]] = {}
    parameters = list(parameters)
    for parameter in parameters:
        wait, index = _waits.get(id(parameter), (None, -1))
        if wait is not None:
            found.setdefault(wait, []).append(index)
    for wait, indices in found.items():
        wait(indices)
    for parameter in parameters:
        remove(parameter)


def waits() -> set[Wait]:
    """The waits of all guarded parameters."""
    return {wait for wait, _ in _waits.values()}


@contextlib.contextmanager
def reading_none() -> Iterator[None]:
    """In this thread isinstance() does not wait: the caller reads no weights."""
    _asked.reads_none = True
    try:
        yield
    finally:
        _asked.reads_none = False


def check(name: str, parameter: torch.Tensor) -> None:
    """ValueError if the parameter's class cannot be replaced."""
    own = type(parameter)
    try:
        if own not in _own_classes:
            _class.__set__(parameter, _guard_of(own))
            _class.__set__(parameter, own)
    except TypeError as error:
        raise ValueError(f"overlap_weights cannot see who reads parameter {name}, a {own.__name__} ({error}): create "
                         "the optimizer with overlap_weights=False") from None


# ------------------------------------------------------------ the class

def _guard_of(own: type) -> type:
    """Python's isinstance(), which C++ uses too, takes an object's real class, and if that fails the attribute
    `__class__`. So isinstance() must not see torch.Tensor as a base of the guard, though it is one for the memory's
    layout."""
    found = _guards.get(own)
    if found is not None:
        return found
    methods = {name: _reader(own, name) for name in dir(own)
               if name.startswith("__") and name.endswith("__") and name not in _KEPT and callable(getattr(own, name))}
    methods |= {"__slots__": (), "__module__": own.__module__, "__hash__": own.__hash__, "__new__": _new(own),
                "__getattribute__": _get, "__setattr__": _set, "__delattr__": _delete,
                "__torch_function__": classmethod(_torch_function)}
    kind = type("_Guard", (type(own),), {"mro": _mro})
    made = kind(own.__name__, (own,), methods)
    made.hides_tensor = True  # Only now: torch makes no class without that base.
    made.__bases__ = made.__bases__  # This computes the order of bases again.
    if issubclass(made, torch.Tensor):
        raise TypeError("its bases cannot be hidden")
    _guards[own], _own_classes[made] = made, own
    return made


def _mro(guard: type) -> list[type]:
    bases = type.mro(guard)
    if "hides_tensor" not in guard.__dict__:
        return bases
    return [base for base in bases if base is guard or not issubclass(base, torch.Tensor)]


def _get(self: torch.Tensor, name: str) -> Any:
    if name in _NO_WEIGHTS:
        with _at_once():
            return object.__getattribute__(self, name)
    guard, waits = type(self), _waits.get(id(self))
    if name == "__class__" and getattr(_asked, "reads_none", False):
        return _own_classes.get(guard, guard)
    read([self])
    if name != "__class__" or guard not in _own_classes:
        return getattr(self, name)
    # isinstance() refuses the real class as an answer: the next caller finds that.
    if waits is not None:
        _waits[id(self)] = waits
    _class.__set__(self, guard)
    return _own_classes[guard]


def _set(self: torch.Tensor, name: str, value: Any) -> None:
    if name in _NO_WEIGHTS_TO_WRITE:
        with _at_once():
            object.__setattr__(self, name, value)
        return
    read([self])
    setattr(self, name, value)


def _delete(self: torch.Tensor, name: str) -> None:
    if name in _NO_WEIGHTS_TO_WRITE:
        with _at_once():
            object.__delattr__(self, name)
        return
    read([self])
    delattr(self, name)


def _torch_function(_: type, function: Callable[..., Any], __: Any, arguments: tuple[Any, ...] = (),
                    options: dict[str, Any] | None = None) -> Any:
    found = list(_guarded_in((arguments, options)))
    if found:
        read(found)
    else:  # If only the function itself finds it.
        for wait in waits():
            wait()
    return function(*arguments, **options or {})


def _guarded_in(values: Any) -> Iterator[torch.Tensor]:
    if type(values) in _own_classes:
        yield values
    elif isinstance(values, (list, tuple, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _guarded_in(value)


def _reader(own: type, name: str) -> Callable[..., Any]:
    """Python looks for operators in the class."""
    def call(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        read([self])
        return getattr(own, name)(self, *arguments, **options)

    return call


def _new(own: type) -> Callable[..., torch.Tensor]:
    def new(_: type, *arguments: Any, **options: Any) -> torch.Tensor:
        return own(*arguments, **options)

    return new
