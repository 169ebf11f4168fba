"""A trainer as people write it for Ray Train: one line of it is Ballast's. In it two workers train on two nodes, on a
service of `ballast.ray`, or at an address."""

import argparse
import hashlib
import json
import pathlib
import time

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

import ballast.ray
import ballast.torch


def train(given):
    """In each worker."""
    folder = pathlib.Path(given["results"])
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(40, given["width"]), torch.nn.Tanh(), torch.nn.Linear(given["width"], 7)),
        find_unused_parameters=True)  # Otherwise the first step after a restart sums in another order.
    service = given["address"] or ballast.ray.node(given["name"])
    optimizer = ballast.torch.AdamW(model.parameters(), lr=0.02, service=service, job="gpt",
                                    reconnect_timeout=given["patience"])
    begin = optimizer.attach(**{given["attach"]: True})
    for step in range(begin, given["steps"]):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(5, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with open(folder / "steps", "a") as steps:
                steps.write(f"{step + 1} {time.time()}\n")
        time.sleep(given["pause"])
        while step + 1 == given["hold"] and (folder / "hold").exists():
            time.sleep(0.05)
    member = optimizer._binding.member
    job = member.client.job("gpt")
    values = [*model.parameters(), *(optimizer.state[parameter]["exp_avg"] for parameter in model.parameters())]
    facts = {"begin": begin, "members": [each["address"] for each in job["members"]], "homes": job["homes"],
             "host": ray.util.get_node_ip_address(), "shares_memory": member.session.shares_memory,
             "state": hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest()}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(facts))
    optimizer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--address", default="")
    parser.add_argument("--name", default="gpt")
    parser.add_argument("--attach", default="create")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--hold", type=int, help="there it waits, as long as the results have a file 'hold'")
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument("--failures", type=int, default=0)
    parser.add_argument("--host", help="both workers are there; by default each is on a node of its own")
    parser.add_argument("--width", type=int, default=300)
    given = parser.parse_args()
    ray.init(address="auto")
    trainer = ray.train.torch.TorchTrainer(
        train, train_loop_config=vars(given) | {"results": str(given.results)},
        scaling_config=ray.train.ScalingConfig(
            num_workers=2, placement_strategy="STRICT_PACK" if given.host else "STRICT_SPREAD",
            resources_per_worker={"CPU": 1, **({f"node:{given.host}": 0.001} if given.host else {})}),
        run_config=ray.train.RunConfig(storage_path=str(given.results / "ray"),
                                       failure_config=ray.train.FailureConfig(max_failures=given.failures)))
    trainer.fit()


if __name__ == "__main__":
    main()
