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
def chunk_at(row, rows_per_chunk, bounds, chunks, KEYS: tl.constexpr):
    """The chunk that brings ``row``."""
    if KEYS == "uniform":
        chunk = chunk_of(row, rows_per_chunk)
    else:
        chunk = row * 0
        high = chunk + chunks
        while high - chunk > 1:
            chunk, high = halved(chunk, high, tl.load(bounds + (chunk + high) // 2), row)
    return chunk


@triton.jit
def end_of(chunk, rows_per_chunk, bounds, KEYS: tl.constexpr):
    """The row behind a chunk's last."""
    if KEYS == "uniform":
        end = (chunk + 1) * rows_per_chunk
    else:
        end = tl.load(bounds + chunk + 1)
    return end


@triton.jit
def look_at_keys(worker, epoch, quarantine, key, abort, base, records, claims, op, allowed):
    """Whether an earlier launch left signals behind that nobody has reset: `gate.quarantined`."""
    over = tl.cast(0, tl.int32)
    if epoch == 0:
        over = look_at_mark(over, quarantine, 0, worker, key, abort, base, records, claims, op, allowed)
    return over


@triton.jit
def pass_keys(
    row, end, signals, epoch, key, rows_per_chunk, bounds, chunks, seen_low, seen_high, over,
    abort, base, clock, begun, allowed, records, claims, op, worker, tile, pm, pn, KEYS: tl.constexpr,
):  # fmt: skip
    """Wait for the chunks of rows [row, end).

    Returns
    -------
    (over, ready, seen_low, seen_high)
        ``ready`` is the row up to which, from ``row`` on, everything is known to be there.
    """
    ready = row
    none = tl.cast(-1, tl.int32)
    while (ready < end) & (over == 0):
        chunk = chunk_at(ready, rows_per_chunk, bounds, chunks, KEYS)
        if (chunk < seen_low) | (chunk > seen_high):
            state, waited = wait(signals, chunk, epoch, abort, base, clock, begun, allowed)
            if state == ARRIVED:
                seen_low = tl.where(chunk == seen_high + 1, seen_low, chunk)
                seen_high = chunk
            else:
                over = over * 0 + 1
                if state != OVER:
                    end_launch(
                        state, abort, base, records, claims, op, worker, 0, chunk, key, epoch, tile, none, pm, pn,
                        waited, allowed,
                    )  # fmt: skip
        ready = tl.where(over == 0, end_of(seen_high, rows_per_chunk, bounds, KEYS), ready)
    return over, ready, seen_low, seen_high


@triton.jit
def leave_keys(
    counts_out, reset, over, worker, workers, queues, counters, base, abort, clock, begun, allowed,
    records, claims, op, signals, epoch, key, quarantine, chunks,
):  # fmt: skip
    """After STOP: `gate.leave_gate`. The last worker out looks at every chunk: a mask may have hidden any of them."""
    leave_gate(
        counts_out, reset, over, worker, workers, queues, counters, base, abort, clock, begun, allowed,
        records, claims, op, 1, 0, 0, signals, epoch, key, quarantine, None, chunks, chunks, 0,
        None, 1, 0, None, None, 0, 0, "uniform", "none",
    )  # fmt: skip
