"""What people write for train.sbatch in PyTorch: it goes on where the job stands."""

import os

import torch
import torch.distributed as dist

import ballast.torch

STEPS = 40

dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7)),
    find_unused_parameters=True)  # Otherwise the first step after a restart sums in another order.
optimizer = ballast.torch.AdamW(model.parameters(), lr=0.02, service="node", job=os.environ["BALLAST_JOB"])
for step in range(optimizer.attach(resume=True), STEPS):
    torch.manual_seed(1000 * step + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(16, 40)).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step + 1}/{STEPS}", flush=True)
        torch.save(model.module.state_dict(), f"{os.environ['OUT']}/weights.pt")
