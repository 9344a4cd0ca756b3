"""The gate of attention on the device: keys and values that arrive in chunks while a tile is at work on others.

A tile reads many chunks, one after the other. So it waits inside the item for what its next block of keys needs, and
then computes all blocks that are there (invariant 2: each chunk is read only after a wait for it). Words, waits and the
end of a launch are those of `tilestream.kernels.device.gate`; a worker begins and leaves as in
`tilestream.kernels.device.items`. A worker polls no chunk of the run that it has seen (`Passed`) a second time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import attention
from tilestream.core import chunks as rules
from tilestream.core.structs import Passed
from tilestream.kernels.device.gate import ARRIVED, OVER, end_launch, is_over, wait
from tilestream.kernels.device.items import with_over
from tilestream.kernels.device.jit import device

chunk_of = device(rules.chunk_of)
halved = device(attention.halved)


@triton.jit
def chunk_at(row, coming, KEYS: tl.constexpr):
    """The chunk of `Incoming` keys that brings ``row``. ``coming.table`` is of each ragged chunk the first row."""
    if KEYS == "uniform":
        chunk = chunk_of(row, coming.per_chunk)
    else:
        chunk = row * 0
        high = chunk + coming.chunks
        while high - chunk > 1:
            chunk, high = halved(chunk, high, tl.load(coming.table + (chunk + high) // 2), row)
    return chunk


@triton.jit
def end_of(chunk, coming, KEYS: tl.constexpr):
    """The row behind a chunk's last."""
    if KEYS == "uniform":
        end = (chunk + 1) * coming.per_chunk
    else:
        end = tl.load(coming.table + chunk + 1)
    return end


@triton.jit
def poll_over(passed, words, watch):
    """``passed``, with whether the launch is over: polled once an item."""
    over = passed.over
    if over == 0:
        over = is_over(words, watch).to(tl.int32)
    return with_over(passed, over)


@triton.jit
def pass_keys(row, end, passed, tile, work, words, gate, watch, KEYS: tl.constexpr):
    """Wait for the chunks of rows [row, end) of keys.

    Returns
    -------
    (passed, ready)
        ``ready`` is the row up to which, from ``row`` on, everything is known to be there.
    """
    ready = row
    over, low, high = passed.over, passed.row_low, passed.row_high
    none = tl.cast(-1, tl.int32)
    while (ready < end) & (over == 0):
        chunk = chunk_at(ready, gate.rows, KEYS)
        if (chunk < low) | (chunk > high):
            state, waited = wait(gate.rows, chunk, gate, words, watch)
            if state == ARRIVED:
                low = tl.where(chunk == high + 1, low, chunk)
                high = chunk
            else:
                over = over * 0 + 1
                if state != OVER:
                    named = (tile.pm * work.num_n + tile.pn, none, tile.pm, tile.pn)
                    end_launch(state, 0, chunk, gate.rows.key, gate.rows.epoch, named, waited, gate, words, watch)
        ready = tl.where(over == 0, end_of(high, gate.rows, KEYS), ready)
    return Passed(over, low, high, passed.column_low, passed.column_high), ready
