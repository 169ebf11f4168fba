"""Optimizers for PyTorch whose state lives on a Ballast service.

>>> optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-4, service="host:7070", job="gpt2")

AdamW and Adam take torch's arguments with torch's defaults, and serve one process, DDP and FSDP2. Weights and
both moments are kept in fp32 on the service, whatever dtype the parameters have.
"""

from .checkpoints import from_checkpoint, to_checkpoint
from .groups import groups
from .optimizers import Adam, AdamW

__all__ = ["Adam", "AdamW", "from_checkpoint", "groups", "to_checkpoint"]
