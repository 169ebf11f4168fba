"""What the ranks of torch_members_test.py do besides what those of other tests do."""

import os
import socket
import tempfile

import ballast.torch
from ballast.torch import nodes
from torch_ranks import ddp, error_of, model_of, train


def trains_and_closes(rank, world_size, services, job, timeout=60.0, closes=None):
    """Over the services that this rank names. Returns kind and text of its error, and what step it has reached."""
    model = model_of()
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=services[rank], job=job, timeout=timeout)

    def work():
        train(ddp(model), optimizer, rank, 2)
        optimizer.close(**closes or {})

    return [*error_of(work)[:2], optimizer.param_groups[0]["job_step"]]


def on_nodes(rank, world_size, services, job, sockets=None, temporary=None, apart=False, **options):
    """The same on a host that has a name and sockets of its own; apart: also where it starts one."""
    socket.gethostname = lambda: f"gpu{rank}"
    if sockets is not None:
        os.environ["BALLAST_SERVICE"] = sockets[rank]
    seen = nodes._places_of_sockets
    nodes._places_of_sockets = lambda: [f"{rank}/{place}" if apart else place for place in seen()]
    tempfile.tempdir = temporary and temporary[rank]
    return trains_and_closes(rank, world_size, services, job, **options)
