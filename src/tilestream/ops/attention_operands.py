"""Canonical operands of attention (`AttentionOperands`): their checks, and the plan's problem."""

from __future__ import annotations

from typing import NamedTuple

from tilestream.arrival.flat import FlatArrival
from tilestream.core.operands import AttentionOperands
from tilestream.plan.attention_problem import (
    HEAD_DIM_STEP,
    MOST_HEAD_DIM,
    PAGE_SIZES,
    Alignment,
    AttentionLayout,
    AttentionProblem,
)


class Settings(NamedTuple):
    """The settings of the registered ops."""

    causal: bool
    alignment: Alignment
    #: left, right: keys of the window; -1: all.
    left: int
    right: int
    softcap: float  # 0: none
    scale: float
    #: max_seqlen_q, max_seqlen_k: of packed sequences; 0: unknown.
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    layout: AttentionLayout = "bshd"  # how the output lies in memory
    return_lse: bool = False
    schedule: str = "auto"
    #: workers, splits: 0 for the plan's choice.
    workers: int = 0
    splits: int = 0


def check_shapes(op: str, x: AttentionOperands) -> None:
    """Raise unless the inputs fit together. The public op, the registered op and its fake share this check."""
    q, k, v = x.q, x.k, x.v
    packed_q, packed_k = x.cu_seqlens_q is not None, x.cu_seqlens_k is not None
    if packed_k and not packed_q:
        raise ValueError(f"{op}: cu_seqlens_k= without cu_seqlens_q=; queries of packed keys are packed too")
    if packed_k and (x.block_table is not None or x.seqlens_k is not None):
        given = "block_table" if x.block_table is not None else "seqlens_k"
        raise ValueError(f"{op}: {given}= with cu_seqlens_k=; keys are packed, or dense and in pages with seqlens_k=")
    if x.block_table is not None and x.seqlens_k is None:
        raise ValueError(f"{op}: block_table= without seqlens_k=; pages do not say how many keys a sequence has")
    if q.dim() != 4 - packed_q or k.dim() != 4 - packed_k or v.dim() != k.dim():
        raise ValueError(
            f"{op}: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; dense ones have 4 dimensions, packed 3"
        )
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"{op}: q is {q.dtype}, k is {k.dtype}, v is {v.dtype}; they have one dtype")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{op}: k {list(k.shape)} and v {list(v.shape)} differ in more than the head dim")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{op}: q has head dim {q.shape[-1]}, k has {k.shape[-1]}; they must be equal")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        dim = tensor.shape[-1]
        if dim % HEAD_DIM_STEP or not 0 < dim <= MOST_HEAD_DIM:
            raise ValueError(
                f"{op}: {name} has head dim {dim}; it must be a multiple of {HEAD_DIM_STEP}, at most "
                f"{MOST_HEAD_DIM}: pad with zeros (torch.nn.functional.pad), and give scale="
            )
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(
                f"{op}: {name} has strides {list(tensor.stride())}; a head's elements must be contiguous: "
                f"{name}.contiguous()"
            )
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_q and (not heads_kv or heads_q % heads_kv):
        raise ValueError(
            f"{op}: q has {heads_q} heads, k has {heads_kv}; each head of keys serves the same number of query heads"
        )
    _check_lists(op, x, heads_q, heads_kv)


def _check_lists(op: str, x: AttentionOperands, heads_q: int, heads_kv: int) -> None:
    """Raise unless each list has an entry for each sequence, each head, or both."""
    batch = x.batch
    shapes = {
        "cu_seqlens_q": (batch + 1,), "cu_seqlens_k": (batch + 1,), "seqlens_k": (batch,), "sinks": (heads_q,),
        "scale_q": (batch, heads_q), "scale_k": (batch, heads_kv), "scale_v": (batch, heads_kv),
    }  # fmt: skip
    for name, shape in shapes.items():
        tensor = getattr(x, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            what = "an entry a sequence, and one more" if name.startswith("cu_") else "an entry each"
            raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}; it must be {list(shape)}: {what}")
    if x.cu_seqlens_q is not None and batch < 0:
        raise ValueError(f"{op}: cu_seqlens_q is empty; it has an entry a sequence, and one more")
    if x.block_table is None:
        if x.cu_seqlens_k is None and x.k.shape[0] != batch:
            raise ValueError(f"{op}: k has {x.k.shape[0]} sequences, q has {batch}; they have the same")
    elif x.block_table.dim() != 2 or x.block_table.shape[0] != batch:
        raise ValueError(
            f"{op}: block_table has shape {list(x.block_table.shape)}; it must be [{batch}, pages of a sequence]"
        )
    elif x.k.shape[1] not in PAGE_SIZES:
        raise ValueError(
            f"{op}: k {list(x.k.shape)} has pages of {x.k.shape[1]} keys; a page has a power of two, at most "
            f"{PAGE_SIZES[-1]}"
        )
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "sinks", "block_table"):
        tensor = getattr(x, name)
        if tensor is not None and tensor.numel() > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{op}: {name} has strides {list(tensor.stride())}; pass {name}.contiguous()")


def problem_of(
    x: AttentionOperands, s: Settings, keys: FlatArrival | None = None, *, tf32: bool = False
) -> AttentionProblem:
    """The plan's problem of operands, with or without an output."""
    packed_q, packed_k, paged = x.cu_seqlens_q is not None, x.cu_seqlens_k is not None, x.block_table is not None
    batch, longest, size = x.batch, x.keys_of_sequence, x.q.element_size()
    keys_in_rows = x.k.shape[0] if packed_k else batch * x.k.shape[1]
    return AttentionProblem(
        batch, x.q.shape[-2], x.k.shape[-2],
        (min(s.max_seqlen_q, x.q.shape[0]) or x.q.shape[0]) if packed_q else x.q.shape[1],
        (min(s.max_seqlen_k, longest) or longest) if packed_k else longest,
        x.q.shape[-1], x.v.shape[-1], str(x.q.dtype).removeprefix("torch."),
        s.causal, s.alignment, (None if s.left < 0 else s.left, None if s.right < 0 else s.right), s.softcap,
        x.sinks is not None, packed_q, x.q.shape[0] if packed_q else 0, x.k.shape[0] if packed_k else 0,
        x.k.shape[1] if paged else 0, x.k.shape[0] if paged else 0, x.seqlens_k is not None, s.return_lse,
        any(scale is not None for scale in (x.scale_q, x.scale_k, x.scale_v)), s.layout, s.scale > 0, tf32,
        all(
            y.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in y.stride()[:-1])
            for y in (x.q, x.k, x.v)
        ),
        keys=None if keys is None else keys.incoming(keys_in_rows),
    )  # fmt: skip
