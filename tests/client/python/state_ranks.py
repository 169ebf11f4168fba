"""What the ranks of torch_state_test.py do."""

import atexit
import contextlib
import hashlib
import json
import os
import pathlib
import signal
import time
from unittest import mock

import torch
import torch._dynamo  # Which torch otherwise imports when the ranks are separate.
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ballast
import ballast.torch
from ballast.torch.member import Member
from ballast.torch.moments import part_of
from fsdp_ranks import TOLERANCE, Model, assert_near, batch, loss_of, mesh_of, named, shard, used_seldom, whole


def new(job, service, world_size, seed=None, **options):
    model = Model()
    if seed is not None:  # Other weights than those of the job, which has none that is frozen.
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape) if p.requires_grad else p)
    if world_size > 0:
        shard(model, mesh_of(world_size, 1))
    return model, ballast.torch.AdamW(named(model), lr=options.pop("lr", 0.02), service=service, job=job, **options)


def train(model, optimizer, rank, steps, begin=0):
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        loss_of(model, batch(step, rank), used_seldom(step)).backward()
        optimizer.step()


def digest(model):
    bits = hashlib.sha256()
    for _, p in named(model):
        bits.update(whole(p).detach().numpy().tobytes())
    return bits.hexdigest()


def goes_on_from_a_distributed_checkpoint(rank, world_size, service, job, folder, flatten=False, model_last=False,
                                          full=False):
    """Three steps, a checkpoint by torch.distributed.checkpoint, three more in new objects: as six in one go."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    straight, optimizer = new(f"{job}-straight", service, world_size)
    train(straight, optimizer, rank, 6)
    optimizer.close()

    model, optimizer = new(job, service, world_size, full_state=full)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    train(model, optimizer, rank, 3)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/checkpoint")
    small = sum(value.numel() for values in optimizer.state_dict()["state"].values() for value in values.values())
    optimizer.close()

    model, optimizer = new(job, service, world_size, seed=7, lr=0.5, full_state=full)
    weights, state = get_state_dict(model, optimizer, options=options)
    assert optimizer._binding is None, "taking the state of a new optimizer makes no step"
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/checkpoint")
    if model_last:  # The weights are written once more, and are those of the service.
        set_optimizer_state_dict(model, optimizer, state, options=options)
        model.load_state_dict(weights)
    else:
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["job_step"], optimizer._binding.member.step_count) == (0.02, 3, 3), group
    assert all(values["step"] == 3 for values in optimizer.state.values())
    assert schedule is not None
    train(model, optimizer, rank, 3, begin=3)
    optimizer.close()
    assert digest(model) == digest(straight), "other bits than in one go"
    return small


def takes_a_state_and_goes_on(rank, world_size, service, job, file):
    """Two steps, a state of each rank, two more steps, and the trainers die. The digest of six steps in one go."""
    straight, optimizer = new(f"{job}-straight", service, world_size)
    train(straight, optimizer, rank, 6)
    optimizer.close()
    model, optimizer = new(job, service, world_size)
    train(model, optimizer, rank, 2)
    torch.save(optimizer.state_dict(), f"{file}.{rank}")
    train(model, optimizer, rank, 2, begin=2)
    optimizer.close()
    return digest(straight)


def goes_on_from_its_state(rank, world_size, service, job, file, steps):
    """From the state of two steps, whatever the job has done since."""
    model, optimizer = new(job, service, world_size, seed=7)
    optimizer.load_state_dict(torch.load(f"{file}.{rank}", weights_only=True))
    assert optimizer._binding.member.step_count == 2, optimizer._binding.member.step_count
    train(model, optimizer, rank, steps, begin=2)
    optimizer.close()
    return digest(model)


def torch_goes_on_with_the_full_state(rank, world_size, service, job):
    """Three steps of ours, then two of torch's with the moments that ours had, beside ours."""
    sharded, ours = new(job, service, world_size, full_state=True, amsgrad=True, weight_decay=0.1)
    train(sharded, ours, rank, 3)
    state = get_optimizer_state_dict(sharded, ours)["state"]
    alone = Model()
    with torch.no_grad():
        for (_, p), (_, q) in zip(named(alone), named(sharded)):
            p.copy_(whole(q))
    theirs = torch.optim.AdamW(named(alone), lr=0.02, amsgrad=True, weight_decay=0.1)
    whole_state = theirs.state_dict()
    for index, (name, q) in enumerate(named(sharded)):
        if q.requires_grad and state[name]["step"] > 0:
            for plane in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                assert state[name][plane].placements == q.placements
            whole_state["state"][index] = {plane: whole(value) for plane, value in state[name].items()}
    # Of a module that is used now and then there are fewer updates, and of one that never is there are none.
    assert {name: int(state[name]["step"]) for name in ("layers.0.bias", "seldom.bias", "never.bias")} == {
        "layers.0.bias": 3, "seldom.bias": 1, "never.bias": 0}
    theirs.load_state_dict(whole_state)
    for step in (3, 4):
        ours.zero_grad()
        theirs.zero_grad()
        loss_of(sharded, batch(step, rank), used_seldom(step)).backward()
        for (_, p), (_, q) in zip(named(alone), named(sharded)):
            p.grad = None if q.grad is None else whole(q.grad).clone()
        ours.step()
        theirs.step()
        assert_near(alone, sharded, step)
    ours.close()
    return True


def a_state_is_placed_as_the_parameters(rank, world_size, service, job):
    """Whole or sharded, it comes as each rank has of whole and of sharded parameters."""
    mesh, values = mesh_of(world_size, 1), torch.arange(35.0).reshape(5, 7)
    placed = [values, *(distribute_tensor(values.clone(), mesh, [placement])
                        for placement in (Shard(0), Shard(1), Replicate()))]
    for value in placed:
        for parameter in placed:
            part = part_of(value.clone(), parameter)
            expected = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(part, expected), (value, parameter, part)
    return True


def goes_on_with_the_moments_of_torch(rank, world_size, service, job, sharded=True, joins_again=False):
    """Three steps of torch's, then two of a new job of ours that was given its moments, beside torch's. Without
    shards each rank has all, and the same gradients, as with DDP. joins_again: rank 1 alone, of a state that the ranks
    have to place otherwise."""
    model = shard(Model(), mesh_of(world_size, 1)) if sharded else Model()
    data = rank if sharded else 0
    theirs = torch.optim.AdamW(named(model), lr=0.02, amsgrad=True, weight_decay=0.1)
    train(model, theirs, data, 3)
    continued, ours = new(job, service, world_size if sharded else 0, seed=7, lr=0.5)
    state = theirs.state_dict()
    uploads = []
    if joins_again:
        state["state"] = {index: {plane: value.redistribute(placements=[Shard(1)]) if value.dim() == 2 else value
                                  for plane, value in values.items()} for index, values in state["state"].items()}

        def upload_by(session, *arguments, upload=ballast.Session.upload_by, **options):
            uploads.append(session)
            if (rank, len(uploads)) == (1, 1):
                raise ballast.AbortedError("another rank was taken")
            upload(session, *arguments, **options)

    ours.load_state_dict(state)
    continued.load_state_dict(model.state_dict())
    with mock.patch.object(ballast.Session, "upload_by", upload_by) if joins_again else contextlib.nullcontext():
        ours.attach(create=True)
    assert len(uploads) == (1 + rank if joins_again else 0), uploads
    for step in (3, 4):
        ours.zero_grad()
        loss_of(continued, batch(step, data), used_seldom(step)).backward()
        for (_, p), (_, q) in zip(named(model), named(continued)):
            p.grad = None if q.grad is None else q.grad.clone()
        ours.step()
        theirs.step()
        for (name, p), (_, q) in zip(named(model), named(continued)):
            assert_near_each(name, whole(p), whole(q), step)
    assert ours.param_groups[0]["job_step"] == 5, ours.param_groups[0]["job_step"]
    updates = {name: ours._binding.recovery.read_state(dict(named(continued))[name], "exp_avg")[1]
               for name in ("layers.0.bias", "seldom.bias", "never.bias")}
    assert updates == {"layers.0.bias": 5, "seldom.bias": 2, "never.bias": 0}, updates
    ours.close()
    return True


def moments_of_each_rank_are_refused(rank, world_size, service, job):
    """Without shards each rank would upload a part of its own."""
    model = Model()
    theirs = torch.optim.AdamW(named(model), lr=0.02)
    train(model, theirs, rank, 1)
    _, ours = new(job, service, 0)
    ours.load_state_dict(theirs.state_dict())
    try:
        ours.attach()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "attached"


def assert_near_each(name, theirs, ours, step):
    far = ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()).item()
    assert far <= TOLERANCE, (step, name, far)


def state_of_a_new_optimizer(rank, world_size, service, job):
    """Taking it makes no step, and no job."""
    model, optimizer = new(job, service, world_size)
    state = get_optimizer_state_dict(model, optimizer)
    assert all(values == {"step": torch.tensor(0.0)} for values in state["state"].values()), state["state"]
    assert optimizer._binding is None
    assert all(p.grad is None for p in model.parameters())
    return sorted(state["state"]) == sorted(name for name, p in named(model) if p.requires_grad)


def written_weights_are_found(rank, world_size, service, job):
    """Those that are the same are taken, others are an error; also where a rank has no part of the parameter."""
    model, optimizer = new(job, service, world_size)
    train(model, optimizer, rank, 1)
    model.load_state_dict({name: value.detach().clone() for name, value in model.state_dict().items()})
    train(model, optimizer, rank, 1, begin=1)
    for p in model.parameters():  # To another place, with the same values.
        if rank == 0:
            p._local_tensor = p._local_tensor.clone() if world_size > 0 else p
    train(model, optimizer, rank, 1, begin=2)
    before = digest(model)
    with torch.no_grad():
        model.embedding.weight.mul_(1.5)
    changed = digest(model)
    assert changed != before
    try:
        train(model, optimizer, rank, 1, begin=3)
    except RuntimeError as error:
        assert digest(model) == changed, "an error has left the weights as they were"
        return str(error)
    return "no error"


def until(service, job, rank, what):
    """Its service, of several, says that the rank has attached, or begun a step."""
    home = service if isinstance(service, str) else service[rank]
    deadline = time.monotonic() + 60
    while not any(each[what] for each in ballast.connect(home).job(job)["ranks"] if each["rank"] == rank):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def dies_in_a_step(rank, world_size, service, job):
    """Rank 1 ends in the middle of a step that rank 0 has not begun."""
    model, optimizer = new(job, service, world_size)
    train(model, optimizer, rank, 2)
    dist.barrier()
    if rank == 1:
        optimizer._binding.member.session.begin_step()
        until(service, job, 1, "begun")
        os._exit(0)
    optimizer.close()
    os._exit(0)


def takes_ranks_from_the_dead(rank, world_size, service, job):
    """Rank 1 takes its rank from a process that was in a step, which ends the session that rank 0 has opened."""
    model, optimizer = new(job, service, world_size, seed=5)
    if rank == 1:
        here = Member._home
        with mock.patch.object(Member, "_home", lambda *given: until(service, job, 0, "attached") or here(*given)):
            begin = optimizer.attach()
    else:
        read = ballast.Session.read_weights

        def reads_before_it_is_told(session):
            with contextlib.suppress(ballast.AbortedError):
                read(session)

        with mock.patch.object(ballast.Session, "read_weights", reads_before_it_is_told):
            begin = optimizer.attach()
    train(model, optimizer, rank, 1, begin=begin)
    optimizer.close()
    return begin


# ---------------------------------------------------------------- by torchrun


def elastic(folder, service=None):
    """What torchrun runs: rank 1 of the first attempt dies in its third step, between its gradients and the end."""
    rank, attempt, model, optimizer = begin_attempt(service)
    begin = optimizer.attach(create=True)
    if rank == 1 and attempt == 0:
        session = optimizer._binding.member.session
        seal_and_vote = session.seal_and_vote

        def die(*arguments, **options):
            if session.committed_step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return seal_and_vote(*arguments, **options)

        session.seal_and_vote = die
    train(model, optimizer, rank, 5 - begin, begin=begin)
    pathlib.Path(folder, f"{rank}-{attempt}").write_text(f"{begin} {digest(model)}")
    if service is not None:  # The job of a service that the run starts ends with the run.
        optimizer.close()
    dist.destroy_process_group()


def elastic_in_vain(folder):
    """The same: no attempt ends. The second one loads a state of an earlier step than the service's. The third one has fewer
    ranks at first, and then does not say where it goes on."""
    said = []
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "2" and os.environ["RANK"] == "0":
        model, optimizer = new("elastic", None, 0)
        said.append(refusal(lambda: optimizer.attach(create=True)))
        optimizer.close()
    rank, attempt, model, optimizer = begin_attempt(None)
    at = f"{folder}/state-{rank}"
    if attempt == 0:
        train(model, optimizer, rank, 1)
        torch.save((model.state_dict(), optimizer.state_dict()), at)
    elif attempt == 1:
        weights, state = torch.load(at, weights_only=False)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    if attempt < 2:
        train(model, optimizer, rank, 2, begin=1)
        said.append(digest(model))
        if rank == 0:
            said.append([job["committed_step"] for job in ballast.connect(optimizer._kept.service.address).jobs()])
    else:
        said.append(refusal(lambda: train(model, optimizer, rank, 1)))
    pathlib.Path(folder, f"{rank}-{attempt}").write_text(json.dumps(said))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def refusal(call):
    try:
        call()
    except ballast.FailedPreconditionError as error:
        return str(error)


def begin_attempt(service):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = new("elastic", service, world_size, seed=None if attempt == 0 else 9, timeout=60.0)
    return rank, attempt, model, optimizer


def jobs_of_optimizers_that_are_gone(rank, world_size, service, job):
    """The names of the jobs on a service that outlives its ranks."""
    names = []

    def see():
        names.append([job["name"] for job in client.jobs()])

    with mock.patch.dict(os.environ, {"TORCHELASTIC_MAX_RESTARTS": "1"}):
        model, optimizer = new(None, None, 0)
        train(model, optimizer, rank, 1)
        client = ballast.connect(optimizer._kept.service.address)
        try:
            raise ValueError
        except ValueError:  # This may end the rank.
            optimizer.close()
        see()
        model, optimizer = new(None, None, 0)
        train(model, optimizer, rank, 1)
        see()
        del optimizer
        see()
        model, optimizer = new(None, None, 0)
        train(model, optimizer, rank, 1)
        see()
        optimizer.close()
        see()
    return names


def alone(rank, world_size, service, job):
    model, optimizer = new(job, service, world_size)
    train(model, optimizer, rank, 5)
    optimizer.close()
    return digest(model)


# ---------------------------------------------------------------- nothing is left behind


def used_by_process():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def many_steps(rank, world_size, service, job, steps):
    model, optimizer = new(job, service, world_size)
    loss_of(model, batch(0, rank), True).backward()
    gradients = {p: p.grad for p in model.parameters()}

    def run(count):
        for _ in range(count):
            for p, gradient in gradients.items():
                p.grad = gradient
            optimizer.step()

    run(200)
    before = used_by_process()
    run(steps)
    after = used_by_process()
    return [after[0] - before[0], after[1] - before[1], after[2] - before[2]]


if __name__ == "__main__":
    import sys

    with contextlib.suppress(KeyboardInterrupt):
        globals()[sys.argv[1]](*sys.argv[2:])
    # Without the interpreter's end, in which a thread of Gloo may drop a tensor: torch alone ends then by SIGABRT, with FSDP2
    # and destroy_process_group(), about once in fifty times on a busy machine (torch 2.11).
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)
