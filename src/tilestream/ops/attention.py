"""`tilestream.attention` and `tilestream.merge_attention`: attention prefill, and the join of two parts of it."""

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
    """``softmax(mask(scale * q @ k^T)) @ v``, a head at a time; by default of ``[batch, rows, heads, head dim]``.

    That is FlashAttention's layout. ``F.scaled_dot_product_attention`` has ``[batch, heads, rows, head dim]``, which is
    ``layout="bhsd"`` here.

    Parameters
    ----------
    q, k, v
        ``[B, Sq, Hq, D]``, ``[B, Sk, Hkv, D]`` and ``[B, Sk, Hkv, Dv]``, any strides whose last is 1. Each head of keys
        serves ``Hq // Hkv`` neighbouring query heads. One dtype of bfloat16, float16, float32, float8_e4m3fn (bfloat16
        comes out), on the CPU float64 too; D and Dv multiples of 8, at most 256.
    layout
        ``"bshd"``, or ``"bhsd"`` for ``[B, H, S, D]``, as ``F.scaled_dot_product_attention`` has it: of q, k and v, and
        of the output. It is not guessed.
    causal
        True: a query sees no key behind its own place, counted **from the end** (the last query sees the last key, as
        FlashAttention has it since 2.1). ``"top_left"``: from the beginning, as torch's ``is_causal`` has it.
    window
        ``(left, right)``: keys seen on either side of the diagonal, which is where ``causal`` has it; None for all.
    softcap
        ``softcap * tanh(scores / softcap)``, before the mask.
    scale
        Of the scores; default ``1 / sqrt(D)``.
    sinks
        ``[Hq]``: one more score in each row of a head, which has no value.
    scale_q, scale_k, scale_v
        float32, of one element, one a head (of q, of k), ``[H]``, or one a sequence and head, ``[B, H]``: what the
        operands are multiplied by.
    cu_seqlens_q, cu_seqlens_k
        int32 ``[B + 1]``: q is ``[T, Hq, D]``, sequence behind sequence, k and v likewise; the first rows of the
        sequences, and behind the last. On a GPU only the kernel reads them. Rows of q behind the last give 0.
    max_seqlen_q, max_seqlen_k
        Bounds of their lengths; of use to the plan.
    block_table, seqlens_k
        int32 ``[B, n]`` and ``[B]``: k and v are pages ``[P, page, Hkv, D]`` (``[P, Hkv, page, D]``), those of a
        sequence in order, and how many keys it has. A page has a power of two of keys, at most 256. ``seqlens_k``
        alone: a dense k's first keys.
    arrival
        How k's and v's rows come in, where they are not there yet: chunks and signals. Rows are those of all sequences,
        ``B * Sk`` of them. Each tile is computed as soon as the chunks that it reads are signalled.
    return_lse
        Also the log of the sum of each row's exponentials, the sink's too: natural, float32, ``[B, Hq, Sq]``, packed
        ``[T, Hq]``.
    out
        Where to write the result; of its dtype, and of its shape with any strides, or of no elements: then it is
        resized, as torch does. Where the last stride is not 1 the result is computed apart and copied, which
        ``arrival`` excludes. No gradient flows through it.
    deadline, workers, schedule
        As for `tilestream.matmul`; the schedule is ``"static"``, ``"dynamic"`` or ``"auto"``.
    splits
        Into how many shares the keys of a tile are split, which are then computed side by side and joined; None: the
        plan splits them where few queries over many keys leave workers idle. 1: not at all. Where that is not done,
        ``attention_plan(...).explain()`` says why.

    Returns
    -------
    torch.Tensor, or a pair of them
        As q is, with Dv columns; with ``return_lse`` the log-sum-exp behind it. A row that sees no key is 0, and its
        log-sum-exp is -inf, or the sink.

    Raises
    ------
    ValueError, TypeError
        For arguments that do not fit, before anything is computed. On a GPU the lengths in tensors are not looked at:
        the kernel keeps inside of the operands whatever they say.
    RuntimeError
        If a gradient is asked for that nothing computes: of keys in pages, of 8-bit operands, of scales; or through
        ``out``.
    NotImplementedError
        For tensors on a device that this version has no backend for.
    ArrivalTimeout
        As from `tilestream.matmul`.

    Notes
    -----
    The backward pass computes the scores once more, in torch's own operations: right, and bounded in memory, but not
    fast. It keeps q, k, v, the output and the log-sum-exp. Second derivatives and forward mode are exact, in torch's
    own operations too. Under ``torch.func.vmap`` dense sequences are one call of all of them.

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
    if arrival is None and deadline is None:
        made = native.attention(
            q, k, v, sinks, scale_q, scale_k, scale_v, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, out, layout,
            causal, window, softcap, scale, max_seqlen_q, max_seqlen_k, return_lse, workers, schedule, splits,
        )  # fmt: skip
        if made is not None:
            return made
    return attend(AttentionRequest(
        q, k, v, sinks, scale_q, scale_k, scale_v, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, out, layout,
        causal, window, softcap, scale, max_seqlen_q, max_seqlen_k, return_lse, workers, schedule, splits, arrival,
        deadline,
    ))  # fmt: skip


def merge_attention(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    layout: AttentionLayout = "bshd",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join two attentions of the same queries to different keys into the one to all of them.

    Parameters
    ----------
    o_a, o_b
        Outputs of `attention`, ``[B, S, H, D]``, ``[B, H, S, D]`` with ``layout="bhsd"``, or packed ``[T, H, D]``.
    lse_a, lse_b
        Their log-sum-exps, ``[B, H, S]``, packed ``[T, H]``. What is -inf saw no key, and its output does not count,
        whatever is in it. Sinks count in each: give them to one of the two.

    Returns
    -------
    (out, lse)
        In the dtypes of ``o_a`` and ``lse_a``; where both saw nothing, 0 and -inf.

    Raises
    ------
    ValueError
        If shapes do not fit, or devices differ.
    ArrivalTimeout, Exception
        What an earlier launch on this GPU has reported: see `tilestream.check`.

    Notes
    -----
    On a GPU one kernel reads both parts once, of float16, bfloat16 and float32, and any strides whose last is 1. Other
    dtypes and layouts, and what `torch.compile` and `torch.func` trace, are computed by torch's operations.

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
                f"merge_attention: {name} is {x.dtype}; it is of a floating-point dtype of 16 bits or more, as "
                "attention gives it"
            )
    if not is_one_of(layout, LAYOUTS):
        raise ValueError(f"merge_attention: layout={layout!r}; it is one of {', '.join(LAYOUTS)}")
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
