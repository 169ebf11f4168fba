"""torch_trainer.py SERVICE JOB STEPS: a small PyTorch training, for outage_test.py. Prints each step, and at the end a
hash of the weights."""

import hashlib
import sys

import torch

import ballast.torch


def main():
    service, job, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    optimizer = ballast.torch.AdamW(model.named_parameters(), lr=1e-3, service=service, job=job, overlap=True)
    for step in range(1, steps + 1):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x.flip(1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(step, flush=True)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest())
    optimizer.close()


if __name__ == "__main__":
    main()
