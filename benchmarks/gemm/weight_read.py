"""The yardstick of decoding: how fast a kernel goes that only reads the weights.

Programs stay resident and stride through the bytes, each with several blocks of 16-byte loads in flight. Sums are kept,
so that the compiler leaves nothing out; they are checked.
"""

from __future__ import annotations

import functools

import torch
import triton
from triton import language as tl

#: Words of a load, loads in flight, warps, programs an SM. The fastest is the yardstick.
VARIANTS = ((4096, 2, 8, 4), (4096, 4, 8, 2), (2048, 4, 4, 4), (8192, 2, 8, 2), (2048, 2, 4, 8))
Variant = tuple[int, int, int, int]


@triton.jit
def _read(words, sums, count, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    stride = tl.num_programs(0) * BLOCK * STEPS
    # The count of words fits 31 bits; an index in a stride beyond the end may not.
    for begin in range(pid.to(tl.int64) * BLOCK * STEPS, count, stride):
        for step in tl.static_range(STEPS):
            at = begin + step * BLOCK + lanes
            total += tl.load(words + at, mask=at < count, other=0)
    tl.store(sums + pid, tl.sum(total, 0))


def read(weight: torch.Tensor, variant: Variant) -> torch.Tensor:
    """Sums of the programs' shares of a contiguous tensor's 32-bit words."""
    block, steps, warps, resident = variant
    programs = _workers(weight.device) * resident
    words = weight.view(torch.int32)
    sums = torch.empty(programs, dtype=torch.int32, device=weight.device)
    _read[(programs,)](words, sums, words.numel(), BLOCK=block, STEPS=steps, num_warps=warps)
    return sums


def check(weight: torch.Tensor, variant: Variant) -> None:
    """Raise if not every word was read once."""
    got = read(weight, variant).sum(dtype=torch.int64)
    want = weight.view(torch.int32).sum(dtype=torch.int64)
    if (got - want).item() % 2**32:
        raise AssertionError(f"weight_read {variant}: wrong sum")


@functools.cache
def _workers(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
