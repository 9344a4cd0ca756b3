"""Observes the launches of a call for `tilestream.launch.native`, which repeats them in the next equal call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from tilestream.launch.cache import launch_cache

if TYPE_CHECKING:
    import torch


#: The public ops of a product, and the registered op of compiled graphs, in the order of csrc/ops.cpp.
PRODUCTS = ("matmul", "mm", "bmm", "addmm", "linear", "gemm")
ATTENTION_OPERANDS = (
    "q", "k", "v", "lse", "sinks", "scale_q", "scale_k", "scale_v", "cu_seqlens_q", "cu_seqlens_k", "block_table",
    "seqlens_k",
)  # fmt: skip
MERGED_OPERANDS = ("o_a", "lse_a", "o_b", "lse_b")
#: The operands of all ops, in the order of `Operand` in csrc/recipe.h.
OPERANDS = (
    "a", "b", "out", "bias", "residual", "scale_a", "scale_b", *ATTENTION_OPERANDS, *MERGED_OPERANDS, "offsets",
    "local",
)  # fmt: skip
#: A launch's arguments for arriving and published chunks that differ from call to call, in the order of `Given::words`
#: in csrc/recipe.h: see `tilestream.launch.gate`.
WORDS = (
    "row_signals", "row_quarantine", "column_signals", "column_quarantine", "row_epoch", "row_key", "column_epoch",
    "column_key", "allowed", "op", "out_signals", "out_counts", "out_epoch",
)  # fmt: skip


class Call(NamedTuple):
    """The arguments of a call, which a recipe has to reproduce.

    Attributes
    ----------
    operands
        The caller's operands by the names of `OPERANDS`; ``out`` is the result. None for one that is not given.
    factors
        Alpha and beta of a product.
    words
        The gate's arguments by the names of `WORDS`; empty if nothing arrives or is published.
    """

    operands: Mapping[str, torch.Tensor | None]
    factors: tuple[float, ...] = ()
    words: Mapping[str, int] = MappingProxyType({})


class Observation:
    """The launches of one block in one thread.

    Attributes
    ----------
    launches
        Each `tilestream.launch.launch.Launch` that was called; on the CPU, the operands of each inline call.
    issued
        For each kernel its `tilestream.launch.launcher.Launcher` and its varying arguments. None for a kernel that only
        Triton can launch.
    generation
        The launch cache's generation before the first look-up.
    """

    def __init__(self) -> None:
        self.generation = launch_cache.generation
        self.launches: list[Any] = []
        self.issued: list[tuple[Any, tuple[Any, ...]] | None] = []


class _Here(threading.local):
    observation: Observation | None = None


_here = _Here()


def observation() -> Observation | None:
    """The present observation of this thread; None if there is none."""
    return _here.observation


@contextlib.contextmanager
def observe() -> Iterator[Observation]:
    """Observe the launches of this block."""
    before, _here.observation = _here.observation, Observation()
    try:
        yield _here.observation
    finally:
        _here.observation = before
