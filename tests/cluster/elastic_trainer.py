"""A trainer for torchrun with a changing number of nodes. It trains on its nodes' services until the file `enough` exists,
and rank 0 writes the state that it attached with, and that of each step, into the file `states`."""

import argparse
import datetime
import hashlib
import os
import pathlib

import torch
import torch.distributed as dist

import ballast.torch

LOST_SECONDS = 30  # Then a node that does not answer is lost: nothing says that it is.


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LOST_SECONDS))
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7)))
    optimizer = ballast.torch.AdamW(model.parameters(), lr=0.02, service="node", job="gpt", timeout=LOST_SECONDS,
                                    reconnect_timeout=5)

    def write(event, step):
        values = [*model.parameters(), *(optimizer.state[parameter]["exp_avg"] for parameter in model.parameters())]
        state = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest()
        if dist.get_rank() == 0:
            with open(folder / "states", "a") as file:
                file.write(f"{event} {step} {dist.get_world_size()} {state}\n")

    step = optimizer.attach(resume=True)
    write("attached", step)
    while True:
        enough = torch.tensor(float((folder / "enough").exists()))
        dist.broadcast(enough, 0)
        if enough:
            break
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(5, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        write("made", step)
    optimizer.close(save=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
