"""Ballast: the optimizer of a training run as a service on CPUs.

>>> import ballast.torch
>>> optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-4)

`ballast.torch` has the optimizers for PyTorch. `Service` starts a service for a script or a test, `ballast.ray.Service`
on the nodes of a Ray cluster. `connect` reads the jobs and the optimizer state of a running service."""

from .client import Client, connect
from .errors import (
    AbortedError,
    BallastError,
    DeadlineError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from .service import Service
from .session import Decision, Group, HyperParameters, Job, Norm, Parameter, Session

__all__ = [
    "AbortedError",
    "BallastError",
    "Client",
    "DeadlineError",
    "Decision",
    "FailedPreconditionError",
    "Group",
    "HyperParameters",
    "InvalidArgumentError",
    "Job",
    "Norm",
    "NotFoundError",
    "Parameter",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "Service",
    "Session",
    "UnavailableError",
    "connect",
]
__version__ = "0.1.0"
