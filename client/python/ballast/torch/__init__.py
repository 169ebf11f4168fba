"""Optimizers for PyTorch whose state lives on a Ballast service.

>>> optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-4, service="host:7070", job="gpt2")

AdamW, Adam, SGD, Adagrad and Muon take torch's arguments with torch's defaults; Lion and SignSGD are not in torch. All work
in one process, with DDP and with FSDP2. A param group may have a rule of its own. The service keeps weights and moments
in fp32, whatever dtype the parameters have."""

try:
    import torch as _torch
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ImportError("ballast.torch needs PyTorch 2.6 or newer: pip install torch") from None
if tuple(int(_number) for _number in _torch.__version__.split(".")[:2]) < (2, 6):
    raise ImportError(f"ballast.torch needs PyTorch 2.6 or newer, whose optimizers know their parameters' names, and this "
                      f"is {_torch.__version__}: pip install --upgrade torch")

import importlib as _importlib  # noqa: E402

from .checkpoints import from_checkpoint, to_checkpoint  # noqa: E402
from .groups import groups  # noqa: E402
from .optimizers import SGD, Adagrad, Adam, AdamW, Lion, Muon, SignSGD  # noqa: E402

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "Muon", "SignSGD", "from_checkpoint", "groups", "to_checkpoint"]

# Callbacks need trainers that may be missing, so `import *` leaves them out.
_CALLBACKS = {"LightningCallback": ".callbacks.lightning", "TrainerCallback": ".callbacks.trainer"}


def __getattr__(name: str):
    if name not in _CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(_CALLBACKS[name], __name__), name)
