"""What the ranks of torch_members_test.py do besides what those of other tests do."""

import copy
import os
import socket
import tempfile

import ballast.torch
from ballast.torch.services import nodes
from torch_ranks import ddp, error_of, model_of, train


def trains_and_closes(rank, world_size, services, job, timeout=60.0, closes=None):
    """Over the services that this rank names. Returns kind and text of its error, and what step it has reached."""
    model = model_of()
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=services[rank], job=job, timeout=timeout)

    def work():
        train(ddp(model), optimizer, rank, 2)
        optimizer.close(**closes or {})

    return [*error_of(work)[:2], optimizer.param_groups[0]["job_step"]]


def goes_back_and_elsewhere(rank, world_size, service, job, elsewhere, via=None):
    """By an undo, to a state that the service saved, and then to other services: after a save, or, by the same state on
    the services `via`, which have a part of the job. Returns the weights on the way."""
    model, seen = model_of(), []
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job, keep_previous=True)
    train(ddp(model), optimizer, rank, 2)
    state, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    train(ddp(model), optimizer, rank, 2)
    seen.append([optimizer.undo_step(), [p.flatten().tolist() for p in model.parameters()]])
    train(ddp(model), optimizer, rank, 1)
    optimizer.close()
    model.load_state_dict(weights)
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=service, job=job, keep_previous=True)
    optimizer.load_state_dict(state)
    train(ddp(model), optimizer, rank, 1)
    seen.append([optimizer.param_groups[0]["job_step"], [p.flatten().tolist() for p in model.parameters()]])
    optimizer.close(save=via is None)
    if via is not None:
        model.load_state_dict(weights)
        optimizer = ballast.torch.AdamW(model.named_parameters(), service=via, job=job, keep_previous=True)
        optimizer.load_state_dict(state)
        train(ddp(model), optimizer, rank, 1)
        seen[-1] = [optimizer.param_groups[0]["job_step"], [p.flatten().tolist() for p in model.parameters()]]
        optimizer.close()
    model = model_of()
    optimizer = ballast.torch.AdamW(model.named_parameters(), service=elsewhere, job=job)
    seen.append(optimizer.attach(resume=True))
    train(ddp(model), optimizer, rank, 1)
    seen.append([p.flatten().tolist() for p in model.parameters()])
    optimizer.close(job=True)
    return seen


def on_nodes(rank, world_size, services, job, sockets=None, temporary=None, apart=False, **options):
    """The same on a host that has a name and sockets of its own; apart: also where it starts one."""
    socket.gethostname = lambda: f"gpu{rank}"
    if sockets is not None:
        os.environ["BALLAST_SERVICE"] = sockets[rank]
    seen = nodes._places_of_sockets
    nodes._places_of_sockets = lambda: [f"{rank}/{place}" if apart else place for place in seen()]
    tempfile.tempdir = temporary and temporary[rank]
    return trains_and_closes(rank, world_size, services, job, **options)
