"""A trainer as people start it on several nodes, by torchrun: one line of it is Ballast's. It trains once on each of the
services that it is given; "None" is none."""

import argparse
import hashlib
import json
import pathlib

import torch
import torch.distributed as dist

import ballast.torch


def train(service, steps):
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7)))
    if service == "None":
        optimizer, begin = ballast.torch.AdamW(model.parameters(), lr=0.02), 0
    else:
        job = "nodes" if service == "node" else "alone"
        optimizer = ballast.torch.AdamW(model.parameters(), lr=0.02, service=service, job=job)
        begin = optimizer.attach(create=True)
    for step in range(begin, begin + steps):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(5, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session = optimizer._binding.member.session
    values = [*model.parameters(), *(optimizer.state[parameter]["exp_avg"] for parameter in model.parameters())]
    facts = {"members": list(session.job.members), "homes": list(session.job.homes),
             "shares_memory": session.shares_memory}
    optimizer.close()
    state = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values))
    return facts | {"step": begin + steps, "state": state.hexdigest()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("services", nargs="+")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    results = {service: train(service, given.steps) for service in given.services}
    (given.results / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
