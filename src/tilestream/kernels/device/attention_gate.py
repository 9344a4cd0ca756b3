"""The gate of attention on the device: keys and values that arrive in chunks while a tile is at work on others.

A tile reads many chunks, one after the other, so it waits inside of the item: for what its next block of keys needs,
and then does all blocks that are there (invariant 2: each chunk is read only after waiting for that one). Words, waits
and the end of a launch are those of `tilestream.kernels.device.gate`.

A worker remembers a run of chunks that it has seen (`KeyProgress`), and polls none of them a second time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import attention
from tilestream.core import chunks as rules
from tilestream.core.attention_structs import KeyProgress, KeyWatch
from tilestream.kernels.device.clock import present
from tilestream.kernels.device.gate import ARRIVED, OVER, end_launch, is_over, leave_gate, look_at_mark, wait
from tilestream.kernels.device.jit import device
from tilestream.kernels.device.schedule import LINE

chunk_of = device(rules.chunk_of)
halved = device(attention.halved)


@triton.jit
def chunk_at(row, gate, KEYS: tl.constexpr):
    """The chunk that brings ``row``."""
    if KEYS == "uniform":
        chunk = chunk_of(row, gate.rows_per_chunk)
    else:
        chunk = row * 0
        high = chunk + gate.chunks
        while high - chunk > 1:
            chunk, high = halved(chunk, high, tl.load(gate.bounds + (chunk + high) // 2), row)
    return chunk


@triton.jit
def end_of(chunk, gate, KEYS: tl.constexpr):
    """The row behind a chunk's last."""
    if KEYS == "uniform":
        end = (chunk + 1) * gate.rows_per_chunk
    else:
        end = tl.load(gate.bounds + chunk + 1)
    return end


@triton.jit
def begin_keys(worker, queue, gate):
    """``(watch, progress)`` of a worker that begins; over where an earlier launch left signals that nobody has reset."""
    clock = gate.claims + LINE
    watch = KeyWatch(queue.counters + (queue.queues + 1) * LINE, queue.base, clock, present(clock), worker)
    zero = tl.cast(0, tl.int32)
    over = zero
    if gate.epoch == 0:
        over = look_at_mark(
            over, gate.quarantine, 0, worker, gate.key, watch.abort, watch.base, gate.records, gate.claims, gate.op,
            gate.allowed,
        )  # fmt: skip
    return watch, KeyProgress(over, zero, zero - 1)


@triton.jit
def poll_over(progress, watch):
    """Whether the launch is over: polled once an item."""
    over = progress.over
    if over == 0:
        over = is_over(watch.abort, watch.base).to(tl.int32)
    return KeyProgress(over, progress.low, progress.high)


@triton.jit
def pass_keys(row, end, progress, gate, watch, pm, pn, num_n, KEYS: tl.constexpr):
    """Wait for the chunks of rows [row, end).

    Returns
    -------
    (progress, ready)
        ``ready`` is the row up to which, from ``row`` on, everything is known to be there.
    """
    ready = row
    over, low, high = progress.over, progress.low, progress.high
    none = tl.cast(-1, tl.int32)
    while (ready < end) & (over == 0):
        chunk = chunk_at(ready, gate, KEYS)
        if (chunk < low) | (chunk > high):
            state, waited = wait(
                gate.signals, chunk, gate.epoch, watch.abort, watch.base, watch.clock, watch.begin, gate.allowed
            )
            if state == ARRIVED:
                low = tl.where(chunk == high + 1, low, chunk)
                high = chunk
            else:
                over = over * 0 + 1
                if state != OVER:
                    end_launch(
                        state, watch.abort, watch.base, gate.records, gate.claims, gate.op, watch.worker, 0, chunk,
                        gate.key, gate.epoch, pm * num_n + pn, none, pm, pn, waited, gate.allowed,
                    )  # fmt: skip
        ready = tl.where(over == 0, end_of(high, gate, KEYS), ready)
    return KeyProgress(over, low, high), ready


@triton.jit
def leave_keys(counts_out, over, queue, gate, watch):
    """After STOP: `gate.leave_gate`. The last worker out polls every chunk: a mask may have hidden any of them."""
    leave_gate(
        counts_out, queue.reset, over, watch.worker, tl.num_programs(0), queue.queues, queue.counters, queue.base,
        watch.abort, watch.clock, watch.begin, gate.allowed, gate.records, gate.claims, gate.op, 1, 0, 0, gate.signals,
        gate.epoch, gate.key, gate.quarantine, None, gate.chunks, gate.chunks, 0,
        None, 1, 0, None, None, 0, 0, "uniform", "none",
    )  # fmt: skip
