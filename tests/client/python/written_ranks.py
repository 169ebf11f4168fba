"""What the ranks of written_test.py do."""

import torch
import torch._dynamo  # Which torch otherwise imports when the ranks are separate.
from ranks_for_tests import LONGEST
from torch.distributed.fsdp import fully_shard

import ballast
import ballast.torch
from torch_ranks import backward, ddp, end_of, model_of


def like_torch(rank, world_size, service, job, sharded, **options):
    """Moments, update counts and weights that are written, beside torch.optim. How far the weights are apart."""
    ends = []
    for kind in (ballast.torch.AdamW, torch.optim.AdamW):
        model = model_of()
        parallel = fully_shard(model) if sharded else ddp(model)
        first, *_, last = (parameter for parameter in model.parameters() if parameter.requires_grad)
        if kind is ballast.torch.AdamW:
            module = {"module": parallel} if options.get("overlap_weights") else {}
            optimizer = kind(model.named_parameters(), lr=0.01, service=service, job=job, timeout=LONGEST, **module,
                             **options)
        else:
            optimizer = kind(model.parameters(), lr=0.01)
        for step in range(6):
            if step == 2:
                optimizer.state[first]["exp_avg"].zero_()
                optimizer.state[last]["exp_avg_sq"] = optimizer.state[last]["exp_avg_sq"] * 4
                optimizer.state[first]["step"] = torch.tensor(1.0)
            if step == 3:
                if kind is ballast.torch.AdamW:
                    optimizer.wait_for_weights()
                with torch.no_grad():
                    last.clamp_(-0.05, 0.05)
                if kind is ballast.torch.AdamW and options.get("on_write") != "send":
                    optimizer.send_weights([last])
            if step == 4:
                optimizer.state.clear()
            optimizer.zero_grad()
            backward(parallel, step, rank)
            optimizer.step()
        ends.append(end_of(model, optimizer))
    return max((one - other).abs().max().item() for one, other in zip(*ends))


def one_does_not(rank, world_size, service, job):
    """Rank 0 alone sends weights. The code of what each is told."""
    model = model_of()
    parallel = ddp(model)
    optimizer = ballast.torch.AdamW(model.named_parameters(), lr=0.01, service=service, job=job, timeout=LONGEST)
    backward(parallel, 0, rank)
    optimizer.step()
    try:
        if rank == 0:
            optimizer.send_weights()
        optimizer.step()  # Without a backward, in which the ranks would wait for each other.
    except ballast.FailedPreconditionError as error:
        return error.code
    return 0
