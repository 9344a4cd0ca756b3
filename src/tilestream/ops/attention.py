"""`tilestream.attention`, attention prefill, and `tilestream.merge_attention`, which joins two parts of one."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch.compiler import is_compiling

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.stream import open_streams
from tilestream.core.arguments import is_one_of
from tilestream.ops import native, streamed
from tilestream.ops.attention_merge import merge
from tilestream.ops.attention_request import Answer, AttentionRequest, Causal, Window, attend
from tilestream.ops.checks import check_strided, check_tensors
from tilestream.plan.attention_problem import LAYOUTS, AttentionLayout


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layout: AttentionLayout = ..., causal: Causal = ...,
    window: Window = ..., softcap: float | None = ..., scale: float | None = ..., sinks: torch.Tensor | None = ...,
    scale_q: torch.Tensor | None = ..., scale_k: torch.Tensor | None = ..., scale_v: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ..., cu_seqlens_k: torch.Tensor | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., block_table: torch.Tensor | None = ..., seqlens_k: torch.Tensor | None = ...,
    arrival: Arrival | None = ..., return_lse: Literal[False] = ..., out: torch.Tensor | None = ...,
    deadline: float | None = ..., workers: int | None = ..., schedule: str = ..., splits: int | None = ...,
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layout: AttentionLayout = ..., causal: Causal = ...,
    window: Window = ..., softcap: float | None = ..., scale: float | None = ..., sinks: torch.Tensor | None = ...,
    scale_q: torch.Tensor | None = ..., scale_k: torch.Tensor | None = ..., scale_v: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ..., cu_seqlens_k: torch.Tensor | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., block_table: torch.Tensor | None = ..., seqlens_k: torch.Tensor | None = ...,
    arrival: Arrival | None = ..., return_lse: Literal[True], out: torch.Tensor | None = ...,
    deadline: float | None = ..., workers: int | None = ..., schedule: str = ..., splits: int | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layout: AttentionLayout = "bshd", causal: Causal = False,
    window: Window = None, softcap: float | None = None, scale: float | None = None,
    sinks: torch.Tensor | None = None, scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    block_table: torch.Tensor | None = None, seqlens_k: torch.Tensor | None = None, arrival: Arrival | None = None,
    return_lse: bool = False, out: torch.Tensor | None = None, deadline: float | None = None,
    workers: int | None = None, schedule: str = "auto", splits: int | None = None,
) -> Answer:  # fmt: skip
    """``softmax(mask(scale * q @ k^T)) @ v`` for each head.

    The default layout is FlashAttention's: ``[batch, rows, heads, head dim]``. ``layout="bhsd"`` is that of
    ``F.scaled_dot_product_attention``: ``[batch, heads, rows, head dim]``.

    Parameters
    ----------
    q, k, v
        ``[B, Sq, Hq, D]``, ``[B, Sk, Hkv, D]`` and ``[B, Sk, Hkv, Dv]``. The last stride is 1; the others are free.
        Each head of keys and values serves ``Hq // Hkv`` neighbouring query heads. All have one dtype: bfloat16,
        float16, float32, float8_e4m3fn (the output is bfloat16), or on the CPU float64. D and Dv are multiples of 8, at
        most 256.
    layout
        The layout of q, k, v and the output: ``"bshd"``, or ``"bhsd"`` for ``[B, H, S, D]``. It is not guessed.
    causal
        True: the mask is aligned to the **bottom right**, so the last query sees all keys (FlashAttention since 2.1).
        ``"top_left"``: the first query sees the first key alone (torch's ``is_causal``).
    window
        ``(left, right)``: the number of keys that a query sees on either side of the diagonal; None for all. The
        diagonal is aligned as ``causal`` says.
    softcap
        Scores become ``softcap * tanh(scores / softcap)`` before the mask.
    scale
        Factor of the scores; default ``1 / sqrt(D)``.
    sinks
        ``[Hq]``: attention sinks. Each adds one score without a value to all rows of its head.
    scale_q, scale_k, scale_v
        float32 factors of the operands: one element, one a head (``[H]``), or one a sequence and head (``[B, H]``).
    cu_seqlens_q, cu_seqlens_k
        int32 ``[B + 1]``, for packed sequences: q is ``[T, Hq, D]``, k and v likewise. The entries are the first row of
        each sequence and the end of the last. On a GPU only the kernel reads them. Rows of q past the last sequence
        give 0.
    max_seqlen_q, max_seqlen_k
        Upper bounds of the sequences' lengths; the plan uses them.
    block_table, seqlens_k
        int32 ``[B, n]`` and ``[B]``, for keys in pages: k and v are ``[P, page, Hkv, D]``, with ``layout="bhsd"``
        ``[P, Hkv, page, D]``. ``block_table`` has the pages of each sequence in order, ``seqlens_k`` its number of
        keys. The keys of a page are a power of two, at most 256. ``seqlens_k`` alone: the first keys of a dense k.
    arrival
        How the rows of k and v arrive: their chunks and signals. The rows are those of all sequences, ``B * Sk``. Each
        tile is computed as soon as the chunks that it reads are signalled.
    return_lse
        Whether to return the natural log-sum-exp of each row's scores, sinks included, too: float32, ``[B, Hq, Sq]``,
        or ``[T, Hq]`` for packed sequences.
    out
        The output. It has the result's dtype, and its shape with any strides. An output of no elements is resized, as
        torch does. If the last stride is not 1, the result is computed into a new tensor and copied; with ``arrival``
        such an output is refused. No gradient flows through it.
    deadline, workers, schedule
        As for `tilestream.matmul`; the schedule is ``"static"``, ``"dynamic"`` or ``"auto"``.
    splits
        The number of parts that a tile's keys are split into; the parts are computed at the same time and then joined.
        Default: the plan splits them where few queries over many keys would leave workers idle. 1: no split. Where keys
        cannot be split, ``attention_plan(...).explain()`` says why.

    Returns
    -------
    torch.Tensor, or a pair of them
        The output, of q's shape with Dv columns; with ``return_lse`` the output and the log-sum-exp. A row that sees no
        key is 0, and its log-sum-exp is -inf, or the sink.

    Raises
    ------
    ValueError, TypeError
        If arguments do not fit together. Raised before anything is computed. On a GPU the lengths inside tensors are
        not checked; the kernel reads no memory outside the operands for any lengths.
    RuntimeError
        If keys in pages, operands of 8 bits or scales require a gradient; or any operand of a call with ``out``.
    NotImplementedError
        If the tensors are on a device without a backend.
    ArrivalTimeout
        As from `tilestream.matmul`.

    Notes
    -----
    The backward pass recomputes the scores by torch's own operations. It is exact and bounded in memory, but not fast.
    It keeps q, k, v, the output and the log-sum-exp. Second derivatives and forward mode are exact, too, by torch's own
    operations. Under ``torch.func.vmap`` dense sequences become one call.

    Examples
    --------
    >>> q, k, v = torch.ones(1, 3, 4, 8), torch.ones(1, 5, 2, 8), torch.ones(1, 5, 2, 8)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([1, 3, 4, 8])
    """
    if not is_compiling() and open_streams:
        streamed.refuse(
            "attention", q=q, sinks=sinks, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table, seqlens_k=seqlens_k,
            out=out,
        )  # fmt: skip
        streamed.refuse_keys("attention", arrival is None, k=k, v=v)
    call = (
        q, k, v, sinks, scale_q, scale_k, scale_v, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, out, layout,
        causal, window, softcap, scale, max_seqlen_q, max_seqlen_k, return_lse, workers, schedule, splits,
    )  # fmt: skip
    if arrival is None and deadline is None:
        made = native.attention(*call)
        if made is not None:
            return made
    return attend(AttentionRequest(*call, arrival=arrival, deadline=deadline))


def merge_attention(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    layout: AttentionLayout = "bshd",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join two attentions of the same queries over different keys: the result is the attention over all keys.

    Parameters
    ----------
    o_a, o_b
        Outputs of `attention`: ``[B, S, H, D]``, with ``layout="bhsd"`` ``[B, H, S, D]``, or packed ``[T, H, D]``.
    lse_a, lse_b
        Their log-sum-exps: ``[B, H, S]``, or packed ``[T, H]``. A row of -inf has seen no key, and its output is
        ignored. Sinks count in each part: pass them to one of the two calls only.

    Returns
    -------
    (out, lse)
        In the dtypes of ``o_a`` and ``lse_a``. A row that has seen no key in either part is 0 and -inf.

    Raises
    ------
    ValueError
        If shapes do not fit, or devices differ.
    ArrivalTimeout, Exception
        The error of an earlier launch on this GPU: see `tilestream.check`.

    Notes
    -----
    On a GPU one kernel reads both parts once, for float16, bfloat16 and float32 and for strides whose last is 1. Other
    dtypes and layouts, and calls that `torch.compile` or `torch.func` trace, are computed by torch's operations.

    Examples
    --------
    >>> q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    >>> first = attention(q, k[:, :5], v[:, :5], return_lse=True)
    >>> rest = attention(q, k[:, 5:], v[:, 5:], return_lse=True)
    >>> out, lse = merge_attention(*first, *rest)
    >>> torch.allclose(out, attention(q, k, v), atol=1e-5)
    True
    """
    if not is_compiling() and open_streams:
        streamed.refuse("merge_attention", o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)
    made = native.merge(o_a, lse_a, o_b, lse_b, layout)
    if made is not None:
        return made
    check_tensors("merge_attention", o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)
    for name, x in (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        check_strided("merge_attention", name, x, "tensors are dense")
        if not x.is_floating_point() or x.element_size() < 2:
            raise TypeError(
                f"merge_attention: {name} is {x.dtype}; it must be of a floating-point dtype of 16 bits or more, as "
                "attention gives it"
            )
    if not is_one_of(layout, LAYOUTS):
        raise ValueError(f"merge_attention: layout={layout!r}; it must be one of {', '.join(LAYOUTS)}")
    if o_a.shape != o_b.shape or o_a.dim() not in (3, 4):
        raise ValueError(
            f"merge_attention: o_a {list(o_a.shape)} and o_b {list(o_b.shape)}; they are alike, [B, S, H, D] or "
            "[T, H, D]"
        )
    swapped = o_a.dim() == 4 and layout == "bshd"
    rows = (o_a.shape[0], o_a.shape[2], o_a.shape[1]) if swapped else tuple(o_a.shape[:-1])
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tuple(lse.shape) != rows:
            raise ValueError(f"merge_attention: {name} has shape {list(lse.shape)}; of such outputs it is {list(rows)}")
    return merge(o_a, lse_a, o_b, lse_b, layout)
