"""All-gather + matmul on GPUs, by copy engines over symmetric memory."""
from __future__ import annotations
import torch
from tilestream.distributed.members import Member
def refuse(member: Member, x: torch.Tensor) -> str:
    return "not yet"
