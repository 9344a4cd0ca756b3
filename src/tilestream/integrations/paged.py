"""Attention of a packed batch to keys in a serving engine's pages, for all engines."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from tilestream.ops.attention import attention
from tilestream.plan.attention_problem import HEAD_DIM_STEP, MOST_HEAD_DIM, PAGE_SIZES

logger = logging.getLogger(__name__)

#: 8-bit caches have scales of the engine's own kind.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.lru_cache(maxsize=256)
def say_once(engine: str, why: str) -> None:
    """Log why a call stays with the engine's own attention."""
    logger.info("%s runs its own attention: %s", engine, why)


def heads_refused(heads: int, kv_heads: int, *dims: int) -> str:
    """Why heads of these numbers and columns are not computed here; empty if they are."""
    if any(dim % HEAD_DIM_STEP or not 0 < dim <= MOST_HEAD_DIM for dim in dims):
        return f"head dim {max(dims)}; here it is a multiple of {HEAD_DIM_STEP}, at most {MOST_HEAD_DIM}"
    if not kv_heads or heads % kv_heads:
        return f"{heads} query heads on {kv_heads} heads of keys"
    return ""


def pages_refused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Why queries ``[T, H, D]`` and pages ``[P, page, Hkv, D]`` are not computed here; empty if they are."""
    if q.dtype not in _DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"queries are {q.dtype}, keys {k.dtype}, values {v.dtype}; here all are one of 16 or 32 bits"
    if k.shape[1] not in PAGE_SIZES:
        return f"pages of {k.shape[1]} keys; here a page has a power of two, at most {PAGE_SIZES[-1]}"
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return "a head dim that is not contiguous"
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured, whose replays have other lengths"
    return ""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, *, starts: torch.Tensor,
    lengths: torch.Tensor, most_queries: int, most_keys: int, scale: float, left: int = -1, softcap: float = 0.0,
    sinks: torch.Tensor | None = None, out: torch.Tensor | None = None,
    run: Callable[..., torch.Tensor] = attention,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of packed queries to keys in pages.

    Parameters
    ----------
    q, k, v
        ``[T, H, D]``, ``[P, page, Hkv, D]`` and ``[P, page, Hkv, Dv]``.
    table
        int32 ``[B, n]``: the pages of a sequence, in order.
    starts, lengths
        int32 ``[B + 1]`` and ``[B]``: the sequences' first rows of q, and how many keys each has.
    most_queries, most_keys
        Bounds of one sequence's rows and keys. They are rounded up to a power of two, so that batches of an engine,
        which all differ, have few plans.
    left
        Keys that a query sees before its own; -1: all.
    softcap
        0: none.
    """
    pages = -(-_power_of_two(most_keys) // k.shape[1])
    return run(
        q, k, v, cu_seqlens_q=starts, max_seqlen_q=_power_of_two(most_queries), block_table=table[:, :pages],
        seqlens_k=lengths, causal=True, window=None if left < 0 else (left, 0), softcap=softcap or None, scale=scale,
        sinks=sinks, out=out,
    )  # fmt: skip


def _power_of_two(count: int) -> int:
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()
