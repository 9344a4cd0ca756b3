"""What a grouped matmul is an answer to, a group at a time, for every test of one; sizes of groups by skew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from error_rule import Maths
from tilestream.core.operands import GroupedOperands


def offsets_of(sizes: Sequence[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def dequantized(x: GroupedOperands) -> GroupedOperands:
    """Operands of 8 bits times their scales of blocks: an element at a time, by where it is."""
    e, (rows, k), (groups, _, columns) = x.epilogue, x.a.shape, x.b.shape
    row, depth, column = (torch.arange(extent, device=x.a.device) for extent in (rows, k, columns))
    group = torch.arange(groups, device=x.a.device)
    of_a = e.scale_a[row[:, None], depth[None, :] // 128]
    of_b = e.scale_b[group[:, None, None], depth[None, :, None] // 128, column[None, None, :] // 128]
    return x._replace(a=x.a.float() * of_a, b=x.b.float() * of_b, epilogue=e._replace(scale_a=None, scale_b=None))


def expected(x: GroupedOperands) -> Iterator[tuple[torch.Tensor, Maths]]:
    """Each group's part of the output, and the maths that it answers."""
    if x.scales == "block":
        x = dequantized(x)
    e, begin = x.epilogue, 0
    activation = None if e.activation == "none" else e.activation

    def of(v: torch.Tensor | None, group: int, run: slice) -> torch.Tensor | None:
        return v if v is None or v.numel() == 1 else v[group] if v.dim() == 3 else v[run]

    for group, end in enumerate(x.offsets.tolist()):
        run = slice(begin, end)
        a, b, out = (
            (x.a[run], x.b[group], x.out[run]) if x.b.dim() == 3 else (x.a[:, run], x.b[run], x.out[group])
        )  # fmt: skip
        yield out, Maths(
            a, b, of(e.bias, group, run), activation=activation, out_dtype=x.out.dtype,
            scale_a=of(e.scale_a, group, run), scale_b=of(e.scale_b, group, run),
        )  # fmt: skip
        begin = end
