"""What the ranks of partners_test.py do."""

import os
import tempfile

import torch
import torch._dynamo  # Which torch otherwise imports when the ranks are separate.
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule

import ballast.torch
from partners_test import HuggingFaceTrainer, gpt2, text


def _begin(rank, world_size):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                   "MASTER_ADDR": "127.0.0.1",  # Which are connected already.
                   "OMP_NUM_THREADS": "1"}  # Else accelerate takes one for each core.
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerate(rank, world_size, service, job, sharded):
    """The losses of torch's optimizer, and of ours in several ways, and whether gradients left during backward."""
    def ours(number, **options):
        def make(model):
            return ballast.torch.AdamW(model.named_parameters(), lr=3e-3, service=service, job=f"{job}-{number}",
                                       **options)
        return make

    ways = [lambda model: torch.optim.AdamW(model.named_parameters(), lr=3e-3), ours(0), ours(1, overlap=True),
            ours(2, overlap=True, overlap_weights=True)]
    results = []
    for make in ways:
        _begin(rank, world_size)
        results.append(_train(make, sharded))
    return results


def _train(make, sharded):
    plugin = None
    if sharded:
        # It shards for accelerators alone; what it does there is the same on CPUs.
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    model = gpt2()
    optimizer = make(model)
    loader = torch.utils.data.DataLoader(text(12), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.is_fsdp2 == sharded, accelerator.distributed_type
    for module in model.modules():
        if isinstance(module, FSDPModule):  # Gloo has no average: its reduce-scatter would sum, and say nothing.
            module.set_force_sum_reduction_for_comms(True)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    overlaps = getattr(optimizer.optimizer, "overlap", False)
    if hasattr(optimizer.optimizer, "close"):
        optimizer.optimizer.wait_for_weights()
        optimizer.optimizer.close()
    return [losses, overlaps]


def trainer(rank, world_size, service, job):
    """Hugging Face's with DistributedDataParallel: the losses of torch's optimizer and of ours with overlap, and what
    is said where that cannot be."""
    def ours(model, **more):
        return ballast.torch.AdamW, HuggingFaceTrainer.theirs(model)[1] | {
            "service": service, "job": job, "overlap": True} | more

    results = []
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in (HuggingFaceTrainer.theirs, ours):
            _begin(rank, world_size)
            run = HuggingFaceTrainer.trainer(folder, optimizer, ddp_find_unused_parameters=False)
            run.train()
            assert isinstance(run.model_wrapped, torch.nn.parallel.DistributedDataParallel), run.model_wrapped
            results.append(HuggingFaceTrainer.losses(run))
        results.append(run.optimizer.optimizer.overlap)
        run.optimizer.optimizer.close()
        _begin(rank, world_size)
        try:
            HuggingFaceTrainer.trainer(folder, lambda model: ours(model, job=f"{job}-unused")).train()
            results.append("nothing")
        except ValueError as error:
            results.append(str(error))
    return results
