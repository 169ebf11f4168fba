"""What the ranks of partners_test.py's FSDP2 do."""

import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule

import ballast.torch
from partners_test import gpt2, text


def losses(rank, world_size, service, job):
    """Of both optimizers, step by step."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                   "MASTER_ADDR": "127.0.0.1"}  # Which are connected already.
    return [_train(lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)),
            _train(lambda parameters: ballast.torch.AdamW(parameters, lr=3e-3, service=service, job=job))]


def _train(make):
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    # It shards for accelerators alone; what it does there is the same on CPUs.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]))
    model = gpt2()
    optimizer = make(list(model.named_parameters()))
    loader = torch.utils.data.DataLoader(text(12), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.is_fsdp2, accelerator.distributed_type
    for module in model.modules():
        if isinstance(module, FSDPModule):  # Gloo has no average: its reduce-scatter would sum, and say nothing.
            module.set_force_sum_reduction_for_comms(True)
    results = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
            optimizer.zero_grad()
        results.append(accelerator.reduce(loss.detach(), "mean").item())
    if hasattr(optimizer.optimizer, "close"):
        optimizer.optimizer.close()
    return results
