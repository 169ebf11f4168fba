#!/usr/bin/env python3
"""Pretrains a small GPT on text, byte by byte, with its optimizer on a Ballast service.

    python pretrain.py                                        one process
    torchrun --standalone --nproc-per-node 2 pretrain.py      DDP; with --shard FSDP2
"""

import argparse
import contextlib
import math
import os
import pathlib
import sysconfig

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import ballast.torch
import curve
from gpt import GPT


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=pathlib.Path, help="default: the sources of Python's standard library")
    parser.add_argument("--service", help="host:port, unix:/path or node; default: one of its own")
    parser.add_argument("--job", default="pretrain")
    parser.add_argument("--resume", action="store_true", help="go on with the job, or its newest checkpoint")
    parser.add_argument("--shard", action="store_true", help="ranks share the model (FSDP2)")
    parser.add_argument("--muon", action="store_true", help="Muon for the blocks' matrices")
    parser.add_argument("--out", default="pretrain-out")
    for name, default in (("steps", 200), ("micro-steps", 1), ("batch", 8), ("context", 128), ("layers", 4),
                          ("width", 128), ("heads", 4), ("warmup", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-norm", type=float, default=1.0)
    return parser.parse_args()


def read_text(file):
    if file is not None:
        return file.read_bytes()
    return b"".join(path.read_bytes() for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")))


def batch_of(text, number, args, device):
    """Batch `number` of the whole run, for any rank and micro-step."""
    generator = torch.Generator().manual_seed(number)
    begins = torch.randint(len(text) - args.context, (args.batch,), generator=generator)
    rows = torch.stack([text[begin:begin + args.context + 1] for begin in begins]).long().to(device)
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(args.steps - args.warmup, 1)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def groups(model, muon):
    if not muon:
        return ballast.torch.groups(model, weight_decay=0.1)
    pairs = list(model.named_parameters())
    matrices = [pair for pair in pairs if pair[0].startswith("blocks.") and pair[1].dim() == 2]
    others = [pair for pair in pairs if pair not in matrices]
    return [{"params": others}, {"params": matrices, "rule": "muon", "adjust_lr_fn": "match_rms_adamw"}]


def parallelize(model, shard):
    if not shard:
        return DistributedDataParallel(model)
    for module in (*model.blocks, model):
        fully_shard(module)
        if dist.get_backend() == "gloo":  # It has no average: its reduce-scatter would silently sum.
            module.set_force_sum_reduction_for_comms(True)
    return model


def synchronizing(model, last):
    """In a micro-step: gradients are reduced only in the last one."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def main():
    args = arguments()
    several = "RANK" in os.environ  # By torchrun.
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    if several:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)

    torch.manual_seed(1)
    text = torch.frombuffer(bytearray(read_text(args.text)), dtype=torch.uint8)
    model = GPT(256, args.context, args.layers, args.width, args.heads).to(device)
    parallel = parallelize(model, args.shard) if several else model
    optimizer = ballast.torch.AdamW(groups(model, args.muon), betas=(0.9, 0.95), max_norm=args.max_norm,
                                    service=args.service, job=args.job)
    first = 0
    if args.resume:
        optimizer.attach(resume=True)  # Now the model has the job's weights, or those of its newest checkpoint.
        first = int(next(iter(optimizer.state.values()))["step"])

    losses = {}
    progress = tqdm(range(first, args.steps), initial=first, total=args.steps, disable=rank != 0, unit="step")
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        optimizer.zero_grad()
        mean = torch.zeros((), device=device)
        for micro_step in range(args.micro_steps):
            last = micro_step == args.micro_steps - 1
            number = (step * args.micro_steps + micro_step) * ranks + rank
            with synchronizing(parallel, last):
                loss = parallel(*batch_of(text, number, args, device)) / args.micro_steps
                loss.backward()
            mean += loss.detach()
        optimizer.step()
        if several:
            dist.all_reduce(mean)
        losses[step + 1] = mean.item() / ranks
        progress.set_postfix(loss=f"{losses[step + 1]:.3f}", norm=f"{optimizer.grad_norm:.2f}")

    if rank == 0:
        curve.write(args.out, losses, f"{sum(p.numel() for p in model.parameters()):,} parameters, {ranks} ranks")
    if several:
        dist.barrier()  # The service that rank 0 started serves all.
    optimizer.close()
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
