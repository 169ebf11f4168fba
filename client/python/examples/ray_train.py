#!/usr/bin/env python3
"""Pretrains a small GPT with Ray Train on several nodes, with its optimizer on a Ballast service of these nodes.

    python ray_train.py --nodes 2 --shared /shared/folder      on a node of a Ray cluster

Start it again after an error, and it goes on from the service's memory. If a node is lost, first end what is left of the
service: `ballast.ray.Service.get("gpt").close(save=False)`. Then it goes on from the last checkpoint.
"""

import argparse
import pathlib
import sysconfig

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model

import ballast.ray
import ballast.torch
from gpt import GPT

CONTEXT, BATCH = 128, 8


def train(given):
    """In each worker."""
    text = b"".join(path.read_bytes() for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    torch.manual_seed(1)
    model = prepare_model(GPT(256, CONTEXT, layers=4, width=128, heads=4))
    optimizer = ballast.torch.AdamW(model.parameters(), lr=1e-3, max_norm=1.0, service=ballast.ray.node("gpt"),
                                    job="gpt")
    context = ray.train.get_context()
    for step in range(optimizer.attach(resume=True), given["steps"]):
        generator = torch.Generator().manual_seed(step * context.get_world_size() + context.get_world_rank())
        begins = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
        rows = torch.stack([text[begin:begin + CONTEXT + 1] for begin in begins]).long()
        optimizer.zero_grad()
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        if context.get_world_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    optimizer.close(save=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="of all nodes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shared", type=pathlib.Path, required=True, help="a folder that all nodes share")
    given = parser.parse_args()
    ray.init("auto", runtime_env={"working_dir": str(pathlib.Path(__file__).parent)})
    try:
        service = ballast.ray.Service.get("gpt")
    except ballast.UnavailableError:
        service = ballast.ray.Service(nodes=given.nodes, memory="512MiB", name="gpt",
                                      checkpoint_dir=given.shared / "saved", checkpoint_every="10min")
    trainer = TorchTrainer(
        train, train_loop_config={"steps": given.steps},
        scaling_config=ray.train.ScalingConfig(num_workers=given.workers, placement_strategy="SPREAD"),
        run_config=ray.train.RunConfig(storage_path=str(given.shared / "ray"),
                                       failure_config=ray.train.FailureConfig(max_failures=3)))
    trainer.fit()
    service.close()


if __name__ == "__main__":
    main()
