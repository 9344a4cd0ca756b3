"""The gate of attention on the device: keys and values that arrive in chunks while a tile is at work on others.

A tile reads many chunks, one after the other, so it waits inside of the item: for what its next block of keys needs,
and then does all blocks that are there (invariant 2: each chunk is read only after waiting for that one). Words, waits
and the end of a launch are those of `tilestream.kernels.device.gate`.

A worker remembers a run of chunks that it has seen, and looks at none of them a second time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import attention
from tilestream.core import chunks as rules
from tilestream.kernels.device.gate import ARRIVED, OVER, end_launch, leave_gate, look_at_mark, wait
from tilestream.kernels.device.jit import device

chunk_of = device(rules.chunk_of)
halved = device(attention.halved)


@triton.jit
def chunk_at(row, coming, KEYS: tl.constexpr):
    """The chunk that brings ``row``."""
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
def look_at_keys(gate, words, watch):
    """Whether an earlier launch left signals behind that the host has not reset: `gate.quarantined`."""
    over = tl.cast(0, tl.int32)
    if gate.rows.epoch == 0:
        over = look_at_mark(over, gate.rows, 0, gate, words, watch)
    return over


@triton.jit
def pass_keys(row, end, seen, over, named, gate, words, watch, KEYS: tl.constexpr):
    """Wait for the chunks of rows [row, end).

    Parameters
    ----------
    seen
        ``(low, high)``: the chunks that the worker has seen.
    named
        ``(tile, batch, pm, pn)``: the item, in an error record.
    gate
        `tilestream.core.structs.Gate`; its ``rows`` are keys, their ``table`` the first row of each chunk.

    Returns
    -------
    (over, ready, seen_low, seen_high)
        ``ready`` is the row up to which, from ``row`` on, everything is known to be there.
    """
    seen_low, seen_high = seen
    ready = row
    while (ready < end) & (over == 0):
        chunk = chunk_at(ready, gate.rows, KEYS)
        if (chunk < seen_low) | (chunk > seen_high):
            state, waited = wait(gate.rows, chunk, gate, words, watch)
            if state == ARRIVED:
                seen_low = tl.where(chunk == seen_high + 1, seen_low, chunk)
                seen_high = chunk
            else:
                over = over * 0 + 1
                if state != OVER:
                    end_launch(
                        state, 0, chunk, gate.rows.key, gate.rows.epoch, named, waited, gate, words, watch
                    )  # fmt: skip
        ready = tl.where(over == 0, end_of(seen_high, gate.rows, KEYS), ready)
    return over, ready, seen_low, seen_high


@triton.jit
def leave_keys(work, words, gate, watch, over):
    """After STOP: `gate.leave_gate`. The last worker out looks at every chunk: a mask may have hidden any of them."""
    leave_gate(work, words, gate, watch, over, "uniform", "none")
