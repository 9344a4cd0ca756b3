"""What a call launches, seen by `tilestream.launch.native`, which keeps it for the next call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


#: The public ops of a product, and the registered op that compiled graphs call, as csrc/ops.cpp numbers them.
PRODUCTS = ("matmul", "mm", "bmm", "addmm", "linear", "gemm")
#: What a launch is told of chunks that it waits for or publishes and that differs from call to call, in the order of
#: `Given::words` in csrc/recipe.h: see `tilestream.launch.gate`.
WORDS = (
    "row_signals", "row_quarantine", "column_signals", "column_quarantine", "row_epoch", "row_key", "column_epoch",
    "column_key", "allowed", "op", "out_signals", "out_counts", "out_epoch",
)  # fmt: skip


class Call(NamedTuple):
    """What a launch was given: a recipe has to reproduce it.

    Attributes
    ----------
    operands
        By the names of `tilestream.launch.native.OPERANDS`, as the caller gave them; ``out``: the result. None for one
        that is not given.
    factors
        Alpha and beta, of a product.
    words
        By the names of `WORDS`: what the call waits for, and what it publishes; empty for neither.
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
        Each kernel that went to the driver: its `tilestream.launch.launcher.Launcher`, and what varied. None for a
        kernel that only Triton can launch.
    """

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.issued: list[tuple[Any, tuple[Any, ...]] | None] = []


class _Here(threading.local):
    observation: Observation | None = None


_here = _Here()


def observation() -> Observation | None:
    """What observes this thread; None where nothing does."""
    return _here.observation


@contextlib.contextmanager
def observe() -> Iterator[Observation]:
    """Observe the launches of this block."""
    before, _here.observation = _here.observation, Observation()
    try:
        yield _here.observation
    finally:
        _here.observation = before
