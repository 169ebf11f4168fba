"""What the ranks of torch_members_test.py do besides what those of other tests do."""

import os
import socket
import tempfile

import ballast.torch
from torch_ranks import ddp, error_of, model_of, train


def trains_and_closes(rank, world_size, services, job, timeout=60.0, closes=None):
    """Over the services that this rank names. Returns kind and text of its error, and what step it has reached."""
    model = model_of()
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=services[rank], job=job, timeout=timeout)

    def work():
        train(ddp(model), optimizer, rank, 2)
        optimizer.close(**closes or {})

    return [*error_of(work)[:2], optimizer.param_groups[0]["job_step"]]


def on_nodes(rank, world_size, services, job, sockets=None, temporary=None, **options):
    """The same on a host that has a name, a service and a folder for temporary files of its own."""
    socket.gethostname = lambda: f"gpu{rank}"
    if sockets is not None:
        os.environ["BALLAST_SERVICE"] = sockets[rank]
    tempfile.tempdir = None if temporary is None else temporary[rank]
    return trains_and_closes(rank, world_size, services, job, **options)
