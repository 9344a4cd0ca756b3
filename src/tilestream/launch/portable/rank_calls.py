"""Launches of the kernels around a call between ranks that a CUDA graph may hold, on the current stream."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilestream.kernels.portable import rank_calls
from tilestream.launch.gate import bounds_of
from tilestream.launch.launch import records_of
from tilestream.launch.portable.add import launch_keyed

_ONE = (1, 1, 1)
#: Programs of `void_out` at most: where nothing is void, each reads one word.
_MOST_PROGRAMS = 1024


class SlotWords(NamedTuple):
    """The words of a slot of one rank, and how records name it."""

    signals: torch.Tensor  # ``int32[chunks]``
    #: control, places: see `tilestream.kernels.portable.rank_calls.begin_call`.
    control: torch.Tensor
    places: torch.Tensor
    rank: int
    world: int
    op: str
    key: int
    form: int = 0  # of the call: see `tilestream.core.protocols.replay.form_number`


def begin_call(words: SlotWords, seconds: float, batches: int, parts: int) -> None:
    """Count a call, and wait until its slot is free. ``batches``, ``parts``: of the own chunks to signal."""
    allowed, op = bounds_of(seconds, words.op)
    launch_keyed(
        rank_calls.begin_call, _ONE, (*words[:3], *records_of(words.signals.device)),
        (allowed, op, words.key, words.rank, batches, parts, words.form), (words.world,), num_warps=1,
    )  # fmt: skip


def await_parts(words: SlotWords, seconds: float, parts: int) -> None:
    """Wait for ``parts`` chunks of each peer."""
    allowed, op = bounds_of(seconds, words.op)
    launch_keyed(
        rank_calls.await_parts, _ONE, (*words[:3], *records_of(words.signals.device)),
        (allowed, op, words.key, words.rank, parts), (words.world,), num_warps=1,
    )  # fmt: skip


def end_call(words: SlotWords, out: torch.Tensor | None = None) -> None:
    """Decide whether the call is void; tell the peers that their rows are read; then as `void_out`."""
    before = *words[1:3], *records_of(words.signals.device)
    numbers = bounds_of(0.0, words.op)[1], words.key, words.rank
    if out is None or not out.numel():
        launch_keyed(rank_calls.end_call, _ONE, before, numbers, (words.world,), num_warps=1)
        return
    integers, nan = _as_integers(out)
    behind = out.numel(), words.world, nan, rank_calls.BLOCK_OF_ONE
    launch_keyed(rank_calls.end_or_void, _ONE, (*before, integers), numbers, behind, num_warps=1)


def void_out(words: SlotWords, out: torch.Tensor) -> None:
    """Fill ``out``, contiguous, with NaN if the call is void."""
    if count := out.numel():
        integers, nan = _as_integers(out)
        grid = min(-(-count // rank_calls.BLOCK), _MOST_PROGRAMS), 1, 1
        launch_keyed(rank_calls.void_out, grid, (integers, words.control), (), (count, nan, rank_calls.BLOCK))


def _as_integers(out: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The elements as integers, and the bits of a NaN."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[out.element_size()]
    return out.view(bits), torch.iinfo(bits).max
