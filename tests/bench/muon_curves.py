#!/usr/bin/env python3
"""The loss of a small GPT with torch.optim.Muon and AdamW, and with ballast.torch.Muon, for three seeds.

    torch_environment.py --run tests/bench/muon_curves.py [--steps N] [--out FILE.png]

trains the model of client/python/examples/pretrain.py on Python's standard library, one process, on the CPU. It draws all
six curves, and prints how far the two are apart beside how far the seeds are.
"""

import argparse
import pathlib
import statistics
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "client/python/examples")]

import ballast  # noqa: E402
import ballast.torch  # noqa: E402
import pretrain  # noqa: E402
from gpt import GPT  # noqa: E402
from matplotlib import pyplot  # noqa: E402

SEEDS = (1, 2, 3)
MUON, ADAMW = dict(lr=0.02, weight_decay=0.1), dict(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))


def optimizers(kind, model, service, job):
    pairs = list(model.named_parameters())
    matrices = [(name, p) for name, p in pairs if p.ndim == 2 and name.startswith("blocks.")]
    others = [(name, p) for name, p in pairs if p.ndim != 2 or not name.startswith("blocks.")]
    if kind == "torch":
        return [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW)]
    groups = [{"params": matrices}, {"params": others, "rule": "adam", **ADAMW}]
    return [ballast.torch.Muon(groups, **MUON, service=service, job=job)]


def losses(kind, seed, args, text, service):
    torch.manual_seed(seed)
    model = GPT(256, args.context, 4, 128, 4)
    made = optimizers(kind, model, service, f"muon-{seed}")
    result = []
    for step in range(args.steps):
        for optimizer in made:
            optimizer.zero_grad()
        loss = model(*pretrain.batch_of(text, 1_000_000 * seed + step, args, "cpu"))
        loss.backward()
        for optimizer in made:
            optimizer.step()
        result.append(loss.item())
    if kind == "ballast":
        made[0].close(job=True)
    return result


def smooth(values, window=10):
    return [statistics.fmean(values[max(0, i - window + 1):i + 1]) for i in range(len(values))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="muon_curves.png")
    args = parser.parse_args()
    args.context, args.batch = 128, 8
    text = torch.frombuffer(bytearray(pretrain.read_text(None)), dtype=torch.uint8)
    service = ballast.Service(memory_limit="2GiB")
    curves = {(kind, seed): smooth(losses(kind, seed, args, text, service.address))
              for seed in SEEDS for kind in ("torch", "ballast")}
    service.stop()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (kind, seed), values in curves.items():
        axes.plot(values, color=f"C{seed}", linestyle="-" if kind == "torch" else ":", linewidth=1 if kind == "torch" else 2,
                  label=f"{kind}, seed {seed}")
    axes.set(xlabel="step", ylabel="loss, mean of 10 steps", title="Muon for matrices, AdamW for the rest")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(args.out, dpi=100)
    for step in (args.steps // 3, 2 * args.steps // 3, args.steps):
        of = {key: values[step - 1] for key, values in curves.items()}
        apart = [abs(of["torch", seed] - of["ballast", seed]) for seed in SEEDS]
        of_torch = [of["torch", seed] for seed in SEEDS]
        print(f"step {step}: loss {statistics.fmean(of_torch):.4f}; torch and ballast are apart by "
              f"{', '.join(f'{each:.4f}' for each in apart)}; seeds by {max(of_torch) - min(of_torch):.4f}")


if __name__ == "__main__":
    main()
