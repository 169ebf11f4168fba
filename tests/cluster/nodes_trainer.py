"""A trainer as people start it on several nodes, by torchrun: one line of it is Ballast's. It trains once on each of the
services that it is given; "None" is none. With --deaths ranks die in it, and torchrun starts them again."""

import argparse
import hashlib
import json
import os
import pathlib
import signal
import unittest.mock

import torch
import torch.distributed as dist

import ballast.torch


def is_open(address):
    """Whether it lets those in who have no credentials."""
    with unittest.mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("BALLAST_")]:
            del os.environ[name]
        try:
            ballast.connect(address, timeout=5)
        except ballast.UnavailableError:
            return False
        return True


class Deaths:
    """Rank 1 dies in step 2, and all ranks of the second node in step 4. Between the two the nodes have each other's ranks,
    and the second node is the master. The folder is one for all ranks."""

    def __init__(self, folder, second_node, ranks_of_node):
        self.folder, self.ranks_of_node = folder, ranks_of_node
        self.counted = len(list(folder.glob("death-*")))
        if self.counted == 1:
            os.environ["MASTER_ADDR"] = second_node
            os.environ["RANK"] = str((int(os.environ["RANK"]) + ranks_of_node) % int(os.environ["WORLD_SIZE"]))

    def may_come(self, step):
        dying = {(0, 2): [1], (1, 4): [self.ranks_of_node + rank for rank in range(self.ranks_of_node)]}
        if (self.counted, step) not in dying:
            return
        (self.folder / f"death-{self.counted}").touch()
        dist.barrier()
        if dist.get_rank() in dying[self.counted, step]:
            os.kill(os.getpid(), signal.SIGKILL)


def train(service, steps, deaths):
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7)),
        find_unused_parameters=bool(deaths))  # Otherwise the first step after a restart sums in another order.
    if service == "None":
        optimizer, begin = ballast.torch.AdamW(model.parameters(), lr=0.02), 0
        if deaths:
            begin = optimizer.attach(create=True)
            steps -= begin
    else:
        job = {"node": "nodes"}.get(service, "pool" if "," in service else "alone")
        optimizer = ballast.torch.AdamW(model.parameters(), lr=0.02, service=service, job=job)
        begin = optimizer.attach(create=True)
    for step in range(begin, begin + steps):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(5, 40)).square().mean().backward()
        if deaths:
            deaths.may_come(step)
        optimizer.step()
        optimizer.zero_grad()
    member = optimizer._binding.member
    job = member.client.job(member.session.job.name)
    members = [each["address"] for each in job["members"]]
    values = [*model.parameters(), *(optimizer.state[parameter]["exp_avg"] for parameter in model.parameters())]
    facts = {"members": members, "homes": job["homes"], "shares_memory": member.session.shares_memory,
             "is_open": [is_open(address) for address in members]}
    optimizer.close()
    state = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values))
    return facts | {"step": begin + steps, "state": state.hexdigest()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--deaths", metavar="SECOND_NODE")
    parser.add_argument("services", nargs="+")
    given = parser.parse_args()
    deaths = Deaths(given.results, given.deaths, int(os.environ["LOCAL_WORLD_SIZE"])) if given.deaths else None
    dist.init_process_group("gloo")
    results = {service: train(service, given.steps, deaths) for service in given.services}
    (given.results / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
