"""Tensors that say they are on a GPU, for what asks and computes nothing."""

from __future__ import annotations

import torch


class OnGpu(torch.Tensor):
    """A tensor of the CPU whose device is a GPU."""

    device = torch.device("cuda", 0)
    is_cuda = True


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Zeros."""
    return torch.zeros(*shape, dtype=dtype).as_subclass(OnGpu)
