"""What the ranks of torch_undo_test.py do."""

import hashlib
import os
import pathlib
import signal
import threading
import time

import fsdp_ranks
import torch
from torch.distributed.tensor import DTensor
from torch_ranks import ddp, error_of, model_of, train

import ballast
import ballast.torch


def digest(model):
    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest()


def optimizer_of(model, parallel, service, job, overlap=False, **options):
    module = parallel if overlap and parallel is not model else None
    return ballast.torch.AdamW(model.named_parameters(), lr=0.05, service=service, job=job, overlap=overlap,
                               module=module, **options)


def kill_behind(pid, service):
    """SIGKILL to the process that serves behind ballastd. Returns when its successor answers."""
    def served_by():
        return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    def answers():
        try:
            return bool(ballast.connect(service).jobs())
        except ballast.UnavailableError:
            return False

    killed, deadline = served_by(), time.monotonic() + 60
    os.kill(int(killed[0]), signal.SIGKILL)
    while served_by() in (killed, []) or not answers():
        if time.monotonic() > deadline:
            raise AssertionError("the service did not come back")
        time.sleep(0.005)


def undo_while_it_dies(optimizer, pid, service):
    """The process that serves behind ballastd does not get to the request any more."""
    (served_by,) = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(served_by), signal.SIGSTOP)
    killer = threading.Timer(0.1, kill_behind, (pid, service))
    killer.start()
    try:
        return optimizer.undo_step()
    finally:
        killer.join()


def trains(rank, world_size, service, job, undoes, sharded=False, kills=None, **options):
    """Four steps; undoes: and, after two of them, one of a learning rate that is far too high, twice, each undone.
    kills: the process that serves behind this ballastd dies before the first undo, in the second one, and after each;
    the optimizer notices nothing."""
    model = model_of()
    if sharded:
        parallel = model = fsdp_ranks.fully_shard(model, mesh=fsdp_ranks.mesh_of(world_size, 1))
        model.set_force_sum_reduction_for_comms(True)  # As fsdp_ranks.shard does it.
    else:
        parallel = ddp(model) if world_size > 1 else model
    optimizer = optimizer_of(model, parallel, service, job, keep_previous=True, **options)
    train(parallel, optimizer, rank, 2)
    told = []
    for begin in (70, 80) if undoes else ():
        before = digest(model)
        optimizer.param_groups[0]["lr"] = 50.0
        train(parallel, optimizer, rank, 1, begin=begin)
        optimizer.param_groups[0]["lr"] = 0.05
        exploded = digest(model) != before
        if kills is not None and begin == 70:
            kill_behind(kills, service)
        in_it = kills is not None and begin == 80
        undone = undo_while_it_dies(optimizer, kills, service) if in_it else optimizer.undo_step()
        told.append([exploded, undone, digest(model) == before, optimizer.overlap,
                     optimizer.state[model[0].weight]["step"].item()])
        if kills is not None:
            kill_behind(kills, service)
        told.append(error_of(optimizer.undo_step))
    train(parallel, optimizer, rank, 2, begin=2)
    step = optimizer.state[model[0].weight]["step"].item()
    optimizer.close()
    return [digest(model), step, told]


def is_refused(rank, world_size, service, job):
    """Nothing is changed by that: the optimizer goes on."""
    model = model_of()
    parallel = ddp(model) if world_size > 1 else model
    optimizer = optimizer_of(model, parallel, service, job)
    too_early = error_of(optimizer.undo_step)
    train(parallel, optimizer, rank, 1)
    before = digest(model)
    without = error_of(optimizer.undo_step)
    unchanged = digest(model) == before
    train(parallel, optimizer, rank, 1, begin=1)
    step = optimizer.state[model[0].weight]["step"].item()
    optimizer.close()
    return [too_early, without, unchanged, step]


def is_asked_in_a_step(rank, world_size, service, job):
    """The first gradients of the next step have left."""
    model = model_of()
    optimizer = optimizer_of(model, model, service, job, overlap=True, keep_previous=True)
    train(model, optimizer, rank, 2)
    model(torch.ones(1, 4)).sum().backward()
    return error_of(optimizer.undo_step)
