"""Arguments of `tilestream.attention`: checked before anything runs, and brought to the registered ops' form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch

from tilestream.arrival.flat import FlatArrival
from tilestream.ops.checks import check_dense
from tilestream.ops.scales import check_scale_dtype
from tilestream.plan.attention_problem import (
    ATTENTION_DTYPES,
    HEAD_DIM_STEP,
    LAYOUTS,
    MOST_HEAD_DIM,
    PAGE_SIZES,
    Alignment,
    AttentionLayout,
    AttentionProblem,
)

#: More heads than any model has: where there are more of them than rows, heads and rows have changed places.
MOST_HEADS = 256
_DTYPES = tuple(getattr(torch, name) for name in ATTENTION_DTYPES)


class Tensors(NamedTuple):
    """The registered ops' tensors: `tilestream.core.operands.AttentionOperands` says what each is."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None
    scale_q: torch.Tensor | None = None
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def keys_of_sequence(self) -> int:
        """Keys that a sequence can have at most: a bound, where only the device knows."""
        if self.block_table is not None:
            return self.block_table.shape[1] * self.k.shape[1]
        return self.k.shape[0] if self.cu_seqlens_k is not None else self.k.shape[1]


class Settings(NamedTuple):
    """The registered ops' other arguments.

    Attributes
    ----------
    left, right
        Of the window; -1: all.
    softcap
        0: none.
    max_seqlen_q, max_seqlen_k
        Of packed sequences; 0: not known.
    layout
        How the output lies in memory.
    workers, splits
        0: the plan's choice.
    """

    causal: bool
    alignment: Alignment
    left: int
    right: int
    softcap: float
    scale: float
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    layout: AttentionLayout = "bshd"
    return_lse: bool = False
    schedule: str = "auto"
    workers: int = 0
    splits: int = 0


# What a caller says ---------------------------------------------------------------------------------------------------


def alignment_of(op: str, causal: object) -> tuple[bool, Alignment]:
    """``causal=`` as whether, and where the diagonal is."""
    if isinstance(causal, bool):
        return causal, "bottom_right"
    if causal == "bottom_right":
        return True, "bottom_right"
    if causal == "top_left":
        return True, "top_left"
    raise ValueError(
        f"{op}: causal={causal!r}; it is False, True (the same as 'bottom_right'), 'bottom_right' or 'top_left'"
    )


def window_of(op: str, window: object) -> tuple[int, int]:
    """``window=`` as keys left and right of the diagonal, -1 for all."""
    if window is None:
        return -1, -1
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        raise ValueError(f"{op}: window={window!r}; it is (left, right): keys on either side of the diagonal, or None")
    sides: list[int] = []
    for side in window:
        if side is None:
            sides.append(-1)
        elif not _is_whole(side) or side < -1:
            raise ValueError(
                f"{op}: window={tuple(window)!r}; a side is a whole number of keys, not negative, or None (or -1) for "
                "all"
            )
        else:
            sides.append(side)
    return sides[0], sides[1]


def _is_whole(value: object) -> TypeGuard[int]:
    """Whether a whole number, as torch.compile knows them too."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def number(op: str, name: str, value: object, *, positive: bool) -> float:
    """A finite number; ``positive`` where only such will do."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{op}: {name}={value!r}; it is a number, or None")
    if not math.isfinite(value) or (positive and value <= 0):
        raise ValueError(f"{op}: {name}={value}; it is finite{' and positive' if positive else ''}, or None")
    return float(value)


def most(op: str, name: str, value: object, packed: torch.Tensor | None, lengths: str) -> int:
    """``max_seqlen_q=`` and ``max_seqlen_k=``; 0 by default."""
    if value is None:
        return 0
    if packed is None:
        raise ValueError(f"{op}: {name}={value} without {lengths}=; it belongs to packed sequences: leave it away")
    if not _is_whole(value) or value < 0:
        raise ValueError(f"{op}: {name}={value!r}; it is a whole number of rows, not negative, or None")
    return value


def check_kinds(op: str, **tensors: torch.Tensor | None) -> None:
    """`check_dense` for the tensors of attention."""
    check_dense(op, "torch.nn.functional.scaled_dot_product_attention", tensors, _check_dtype, _dense)


def _dense(op: str, name: str, nested: bool) -> str:
    return (": pack it, and pass cu_seqlens_q=" if nested else "") + "; tensors are dense"


def _check_dtype(op: str, name: str, tensor: torch.Tensor) -> None:
    dtype = tensor.dtype
    if name in ("q", "k", "v"):
        if dtype not in _DTYPES:
            raise TypeError(f"{op}: {name} is {dtype}; attention takes {', '.join(ATTENTION_DTYPES)}: convert first")
        if dtype == torch.float64 and tensor.is_cuda:
            raise TypeError(f"{op}: {name} is {dtype} on a GPU; only the CPU takes it: {name}.float()")
    elif name.startswith("scale_"):
        check_scale_dtype(op, name, tensor)
    elif name == "sinks":
        if not tensor.is_floating_point():
            raise TypeError(f"{op}: sinks is {dtype}; sinks are scores, of a floating-point dtype")
    elif name in ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k") and dtype != torch.int32:
        raise TypeError(f"{op}: {name} is {dtype}; it is torch.int32: {name}.int()")


def to_rows_first(
    op: str, layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed_q: bool, packed_k: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views with heads behind rows, whatever the layout.

    Raises
    ------
    ValueError
        For extents that can only be right in the other layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: layout={layout!r}; it is one of {', '.join(LAYOUTS)}")
    if layout == "bhsd" and (packed_q or packed_k):
        raise ValueError(f"{op}: layout='bhsd' with packed sequences; they are [T, H, D]: leave layout= away")
    for name, tensor, packed in (("q", q, packed_q), ("k", k, packed_k), ("v", v, packed_k)):
        dims, names = (3, "[T, H, D]") if packed else (4, "[B, S, H, D]" if layout == "bshd" else "[B, H, S, D]")
        if tensor.dim() != dims:
            way = "" if packed else "; packed sequences need cu_seqlens_q= and cu_seqlens_k="
            raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}; it is {names}{way}")
    heads = -2 if layout == "bshd" else -3
    _check_layout(op, layout, q, k, heads, packed_q or packed_k)
    if layout == "bhsd":
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, k, v


def _check_layout(op: str, layout: str, q: torch.Tensor, k: torch.Tensor, heads: int, packed: bool) -> None:
    other = "bhsd" if layout == "bshd" else "bshd"
    rows = -5 - heads
    mine, theirs = q.shape[heads], k.shape[heads]
    if not packed and (mine > MOST_HEADS or (theirs and mine % theirs)):
        names = "[B, S, H, D]" if layout == "bshd" else "[B, H, S, D]"
        swapped = f"{op}: layout={layout!r} is {names}, so q {list(q.shape)} has {mine} heads of {q.shape[rows]} rows"
        way = f"pass layout={other!r}, or transpose(1, 2)"
        if mine > MOST_HEADS and mine > q.shape[rows]:
            raise ValueError(
                f"{swapped}; these have changed places: {way} (of that many heads, pass {MOST_HEADS} at a time)"
            )
        if theirs and mine % theirs and k.shape[rows] and q.shape[rows] % k.shape[rows] == 0:
            raise ValueError(
                f"{swapped}, and k {list(k.shape)} has {theirs}, which does not divide them; rows and heads seem to "
                f"have changed places: {way}"
            )
    if (theirs and mine % theirs) or (mine and not theirs):
        raise ValueError(
            f"{op}: q has {mine} heads, k has {theirs}; each head of keys serves the same number of query heads"
        )


def canonical_scale(op: str, name: str, scale: torch.Tensor | None, batch: int, heads: int) -> torch.Tensor | None:
    """A scale as ``[B, H]``: of one element, one a head, or one a sequence and head."""
    if scale is None:
        return None
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(batch, heads)
    if tuple(scale.shape) in ((heads,), (batch, heads)):
        return scale.expand(batch, heads)
    raise ValueError(
        f"{op}: {name} has shape {list(scale.shape)}; it has one element, or one a head, [{heads}], or one a sequence "
        f"and head, [{batch}, {heads}]"
    )


# What fits together ---------------------------------------------------------------------------------------------------


def check_shapes(op: str, t: Tensors) -> None:
    """Raise unless canonical tensors fit together: the one text for the public op, the real and the fake one."""
    q, k, v = t.q, t.k, t.v
    if t.cu_seqlens_k is not None and t.cu_seqlens_q is None:
        raise ValueError(f"{op}: cu_seqlens_k= without cu_seqlens_q=; queries of packed keys are packed too")
    if t.cu_seqlens_k is not None and (t.block_table is not None or t.seqlens_k is not None):
        given = "block_table" if t.block_table is not None else "seqlens_k"
        raise ValueError(f"{op}: {given}= with cu_seqlens_k=; keys are packed, or dense and in pages with seqlens_k=")
    if t.block_table is not None and t.seqlens_k is None:
        raise ValueError(f"{op}: block_table= without seqlens_k=; pages do not say how many keys a sequence has")
    packed_q, packed_k = t.cu_seqlens_q is not None, t.cu_seqlens_k is not None
    if q.dim() != 4 - packed_q or k.dim() != 4 - packed_k or v.dim() != k.dim():
        raise ValueError(
            f"{op}: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; dense ones have 4 dimensions, packed 3"
        )
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"{op}: q is {q.dtype}, k is {k.dtype}, v is {v.dtype}; they have one dtype")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{op}: k {list(k.shape)} and v {list(v.shape)} differ in more than the head's columns")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{op}: q has {q.shape[-1]} columns a head, k has {k.shape[-1]}; they have the same")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        dim = tensor.shape[-1]
        if dim % HEAD_DIM_STEP or not 0 < dim <= MOST_HEAD_DIM:
            raise ValueError(
                f"{op}: {name} has {dim} columns a head; a head has a multiple of {HEAD_DIM_STEP}, at most "
                f"{MOST_HEAD_DIM}: pad with zeros (torch.nn.functional.pad), and give scale="
            )
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(
                f"{op}: {name} has strides {list(tensor.stride())}; a head's columns lie side by side: "
                f"{name}.contiguous()"
            )
    _check_lists(op, t)


def _check_lists(op: str, t: Tensors) -> None:
    batch = t.batch
    heads_q, heads_kv = t.q.shape[-2], t.k.shape[-2]
    if heads_q and (not heads_kv or heads_q % heads_kv):
        raise ValueError(
            f"{op}: q has {heads_q} heads, k has {heads_kv}; each head of keys serves the same number of query heads"
        )
    for name, tensor, shape in (
        ("cu_seqlens_q", t.cu_seqlens_q, (batch + 1,)),
        ("cu_seqlens_k", t.cu_seqlens_k, (batch + 1,)),
        ("seqlens_k", t.seqlens_k, (batch,)),
        ("sinks", t.sinks, (heads_q,)),
        ("scale_q", t.scale_q, (batch, heads_q)),
        ("scale_k", t.scale_k, (batch, heads_kv)),
        ("scale_v", t.scale_v, (batch, heads_kv)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            what = "an entry a sequence, and one more" if name.startswith("cu_") else "an entry each"
            raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}; it is {list(shape)}: {what}")
    if t.cu_seqlens_q is not None and batch < 0:
        raise ValueError(f"{op}: cu_seqlens_q is empty; it has an entry a sequence, and one more")
    if t.block_table is None:
        if t.cu_seqlens_k is None and t.k.shape[0] != batch:
            raise ValueError(f"{op}: k has {t.k.shape[0]} sequences, q has {batch}; they have the same")
    else:
        if t.block_table.dim() != 2 or t.block_table.shape[0] != batch:
            raise ValueError(
                f"{op}: block_table has shape {list(t.block_table.shape)}; it is [{batch}, pages of a sequence]"
            )
        if t.k.shape[1] not in PAGE_SIZES:
            raise ValueError(
                f"{op}: k {list(t.k.shape)} has pages of {t.k.shape[1]} keys; a page has a power of two, at most "
                f"{PAGE_SIZES[-1]}"
            )
    for name, tensor in (
        ("cu_seqlens_q", t.cu_seqlens_q), ("cu_seqlens_k", t.cu_seqlens_k), ("seqlens_k", t.seqlens_k),
        ("sinks", t.sinks), ("block_table", t.block_table),
    ):  # fmt: skip
        if tensor is not None and tensor.numel() > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{op}: {name} has strides {list(tensor.stride())}; pass {name}.contiguous()")


def problem_of(t: Tensors, s: Settings, keys: FlatArrival | None = None, *, tf32: bool = False) -> AttentionProblem:
    """The problem of canonical tensors."""
    packed_q, packed_k, paged = t.cu_seqlens_q is not None, t.cu_seqlens_k is not None, t.block_table is not None
    batch, longest = t.batch, t.keys_of_sequence
    keys_in_rows = t.k.shape[0] if packed_k else batch * t.k.shape[1]
    size = t.q.element_size()
    return AttentionProblem(
        batch, t.q.shape[-2], t.k.shape[-2],
        (min(s.max_seqlen_q, t.q.shape[0]) or t.q.shape[0]) if packed_q else t.q.shape[1],
        (min(s.max_seqlen_k, longest) or longest) if packed_k else longest,
        t.q.shape[-1], t.v.shape[-1], str(t.q.dtype).removeprefix("torch."),
        s.causal, s.alignment, (None if s.left < 0 else s.left, None if s.right < 0 else s.right), s.softcap,
        t.sinks is not None, packed_q, t.q.shape[0] if packed_q else 0, t.k.shape[0] if packed_k else 0,
        t.k.shape[1] if paged else 0, t.k.shape[0] if paged else 0, t.seqlens_k is not None, s.return_lse,
        t.scale_q is not None or t.scale_k is not None or t.scale_v is not None, s.layout, s.scale > 0, tf32,
        all(
            x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:-1])
            for x in (t.q, t.k, t.v)
        ),
        keys=None if keys is None else keys.incoming(keys_in_rows),
    )  # fmt: skip
