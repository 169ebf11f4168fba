#!/usr/bin/env python3
"""One training of prove_torch.py, in a process of its own: so its peak of GPU memory is its own, and what ends it
ends nothing else. Prints one line of JSON.

    torch_training.py --capabilities
    torch_training.py --way WAY [--fsdp2] --model MODEL --device cuda|cpu --steps N --batch N --max-norm X

WAY: gpu, the optimizer on the GPU (FSDP2 on one rank, fp32 weights and moments beside bf16 passes, torch's fused
AdamW); offload, the same with CPUOffloadPolicy and torch's AdamW on the CPU; ballast, bf16 parameters and
ballast.torch.AdamW, in one process or, with --fsdp2, over FSDP2 on one rank. Every way begins with the same weights,
which bf16 has exactly, and sees the same tokens.
"""

import argparse
import inspect
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

SHAPES = {  # Layers, width, heads, context, vocabulary.
    "tiny": (2, 64, 2, 32, 256),
    "gpt2-124M": (12, 768, 12, 1024, 50304),
    "gpt2-1.5B": (48, 1600, 25, 1024, 50304),
}
ADAMW = dict(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
LEARNING_RATE = {"tiny": 3e-3}  # So large that a step shows in the next loss.


class SmallGpt(nn.Module):
    """Where there is no transformers: what the tiny model is then."""

    def __init__(self, layers, width, heads, context, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
                                       norm_first=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def logits(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[:tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return functional.linear(self.norm(x), self.embedding.weight)

    forward = logits


def make_model(name):
    """On the CPU, in bf16; and the modules that FSDP2 shards by themselves."""
    layers, width, heads, context, vocabulary = SHAPES[name]
    torch.manual_seed(1)
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        if name != "tiny":
            raise
        model = SmallGpt(layers, width, heads, context, vocabulary)
        return model.to(torch.bfloat16), list(model.blocks), "torch"
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=context, vocab_size=vocabulary,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0,
                        eos_token_id=0)
    config._attn_implementation = "sdpa"
    model = GPT2LMHeadModel(config)
    return model.to(torch.bfloat16), list(model.transformer.h), "transformers"


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    logits = getattr(logits, "logits", logits)
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def one_rank(device):
    """FSDP2 wants a process group, also of one."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)


def shard(model, blocks, device, offload=False):
    """Over one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    one_rank(device)
    options = dict(mesh=init_device_mesh(device, (1,)),
                   mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
                   offload_policy=CPUOffloadPolicy(pin_memory=device == "cuda") if offload else OffloadPolicy())
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


class Clock:
    """Seconds of the device between marks."""

    def __init__(self, device):
        self.device = device

    def mark(self):
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin, end):
        return end - begin if self.device == "cpu" else begin.elapsed_time(end) / 1000

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()


def train(options):
    device = options.device
    if device == "cpu":
        torch.set_num_threads(1)  # A test's, of a model for which more are in each other's way.
    model, blocks, library = make_model(options.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    adamw = dict(ADAMW, lr=LEARNING_RATE.get(options.model, 3e-4))
    facts = dict(way=options.way, model=options.model, made_by=library, parameters=parameters, torch=torch.__version__)
    if options.way == "ballast":
        import ballast.torch
        model.to(device)
        if options.fsdp2:
            shard(model, blocks, device)
        extra = {} if options.overlap is None else dict(overlap=options.overlap == "on", accumulation_steps=1)
        optimizer = ballast.torch.AdamW(model.named_parameters(), max_norm=options.max_norm, update=options.update,
                                        **extra, **adamw)
    else:
        model.to(torch.float32)
        offload = options.way == "offload"
        if not offload:
            model.to(device)
        shard(model, blocks, device, offload)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)
    facts["fsdp2"] = all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # Not of how the model got there.
    clock = Clock(device)
    tokens_of = torch.Generator().manual_seed(7)
    context = SHAPES[options.model][3]
    # A few of the tokens only, so that there is something to learn.
    losses, seconds, passes, clips = [], [], [], []
    for _ in range(options.steps):
        tokens = torch.randint(97, (options.batch, context), generator=tokens_of).to(device)
        clock.synchronize()
        begun, first = time.perf_counter(), clock.mark()
        loss = loss_of(model, tokens)
        loss.backward()
        passed = clock.mark()
        if options.way == "ballast":
            optimizer.step()
            if optimizer.skipped is not None:
                raise RuntimeError(f"a step was skipped: {optimizer.skipped}")
            clips.append(float(optimizer.clip_coefficient))
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            optimizer.step()
            clips.append(min(1.0, options.max_norm / (float(norm) + 1e-6)))
        optimizer.zero_grad(set_to_none=True)
        clock.synchronize()
        seconds.append(time.perf_counter() - begun)
        passes.append(clock.between(first, passed))
        losses.append(float(loss.detach()))
    facts |= dict(losses=losses, seconds=seconds, passes=passes, clips=clips, tokens=options.batch * context)
    if device == "cuda":
        facts |= dict(gpu_memory_bytes=torch.cuda.max_memory_allocated(),
                      gpu_memory_reserved_bytes=torch.cuda.max_memory_reserved())
    if options.way == "ballast":
        facts |= dict(update=options.update, overlap=in_force(optimizer))
        optimizer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return facts


def in_force(optimizer):
    """Whether gradients left during backward: "on", "off", or None where the optimizer knows of no such thing."""
    value = getattr(optimizer, "overlap", None)
    return None if value is None else "on" if value else "off"


def capabilities():
    facts = dict(torch=torch.__version__, python=sys.version.split()[0], cuda=torch.cuda.is_available())
    if facts["cuda"]:
        properties = torch.cuda.get_device_properties(0)
        facts |= dict(gpu=properties.name, uuid=f"GPU-{getattr(properties, 'uuid', '0')}",
                      memory_bytes=properties.total_memory)
    try:
        import transformers
        facts["transformers"] = transformers.__version__
    except ImportError:
        pass
    try:
        import ballast.torch
        facts["ballast"] = os.path.dirname(ballast.torch.__file__)
        facts["overlap"] = "overlap" in inspect.signature(ballast.torch.AdamW.__init__).parameters
    except Exception as error:  # It is left out then, and this is told.
        facts["no_ballast"] = f"{type(error).__name__}: {error}"
    return facts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--capabilities", action="store_true")
    parser.add_argument("--way", choices=("gpu", "offload", "ballast"))
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--update", choices=("wait", "speculate"), default="wait")
    parser.add_argument("--overlap", choices=("on", "off"))
    options = parser.parse_args()
    print(json.dumps(capabilities() if options.capabilities else train(options)), flush=True)


if __name__ == "__main__":
    main()
