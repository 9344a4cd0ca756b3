"""A worker's items, from the first to STOP: the schedule and the gate of every GEMM.

::

    progress, watch = begin_worker(...)          # the counters, the clock, chunks in quarantine
    while found:
        found, item, progress = next_item(...)   # schedule.take or arrival_order.take_ready; gate.pass_gate
        if found: multiply, finish
    finish_worker(...)                           # the words, as the next launch expects them

Only what happens to an item is a kernel's own. Triton and Gluon call the same functions. The configuration says what
arrives and how the schedule is cut, so that a kernel has no code of what it does not use.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core.structs import Item, Passed, Progress, Ready, Watch
from tilestream.kernels.device.arrival_order import take_ready
from tilestream.kernels.device.clock import present
from tilestream.kernels.device.gate import leave_gate, pass_gate, quarantined
from tilestream.kernels.device.schedule import LINE, add, enter, first_cursor, leave, pick_victim, take, with_noted
from tilestream.kernels.device.trace import begin_span, place_of, ready_span


@triton.jit
def begin_worker(worker, workers, work, words, gate, C: tl.constexpr):
    """``(progress, watch)`` of a worker that has taken nothing yet. ``C``: a `tilestream.kernels.config.GemmConfig`."""
    ROW_CHUNKS: tl.constexpr = C.ROW_CHUNKS
    COLUMN_CHUNKS: tl.constexpr = C.COLUMN_CHUNKS
    leaves = words.reset
    if C.GATED:
        # There are words that the last worker out zeroes: a captured launch's, a caller's own.
        leaves = tl.where((gate.rows.epoch == 0) | (gate.columns.epoch == 0), 1, words.reset)
    enter(work, words, worker, leaves, C.KIND == "static", C.GATED)
    if C.GATED:
        abort, clock = words.counters + (work.queues + 1) * LINE, gate.claims + LINE
        watch = Watch(worker, workers, leaves, abort, clock, present(clock))
        over = quarantined(gate, words, watch, ROW_CHUNKS, COLUMN_CHUNKS)
    else:
        # No address: a static launch has no words. (Triton 3.6 returns no None.)
        over = tl.cast(0, tl.int32)
        watch = Watch(worker, workers, leaves, over, over, tl.cast(0, tl.int64))
    zero = tl.cast(0, tl.int32)
    passed = Passed(over, zero, zero - 1, zero, zero - 1)
    return Progress(first_cursor(), Ready(zero - 1, zero), passed), watch


@triton.jit
def as_it_is(item, over):
    """What a launch that is over makes of an item: see `next_item`."""
    return item, over


@triton.jit
def next_item(
    progress, work, words, gate, watch, C: tl.constexpr, ADD: tl.constexpr = add, PICK: tl.constexpr = pick_victim,
    VOID: tl.constexpr = as_it_is,
):  # fmt: skip
    """``(found, item, progress)``: the worker's next item, whose chunks have arrived, or STOP where ``found`` is 0.

    Where the launch is over (``progress.passed.over``), the item is void, and is to be filled with NaN.

    Parameters
    ----------
    C
        A `tilestream.kernels.config.GemmConfig`.
    ADD, PICK
        How a ticket is drawn and a victim found: see `tilestream.kernels.device.schedule.take`.
    VOID
        ``(item, over)`` of an item behind its gate: how a kernel says that it is void, and what it fences.
    """
    cursor, ready, passed = progress
    waited = tl.cast(0, tl.int64)
    if C.SPLIT == "chunks":
        found, item, waited, cursor, ready = take_ready(progress, work, words, gate, watch, C)
    else:
        found, item, cursor = take(cursor, work, words, watch, C, ADD, PICK)
    place = item.place
    if C.TRACE:
        if found != 0:
            place = place_of(item, work)
            begin_span(words.log, place, watch.worker)
    if C.GATED:
        if found != 0:
            passed, noted = pass_gate(item, passed, work, words, gate, watch, cursor.noted, waited, C)
            item, over = VOID(item, passed.over)
            cursor, passed = with_noted(cursor, noted), with_over(passed, over)
    if C.TRACE:
        if found != 0:
            ready_span(words.log, place)
    return found, with_place(item, place), Progress(cursor, ready, passed)


@triton.jit
def with_place(item, place):
    """``item``, whose record in the trace is at ``place``."""
    return Item(
        item.batch, item.pm, item.pn, item.k_begin, item.k_end, item.part, item.parts, item.slot, place
    )  # fmt: skip


@triton.jit
def with_steps(item, k_begin, k_end):
    """``item``, with other K steps."""
    return Item(
        item.batch, item.pm, item.pn, k_begin, k_end, item.part, item.parts, item.slot, item.place
    )  # fmt: skip


@triton.jit
def with_over(passed, over):
    """``passed``, of a launch that is over or not."""
    return Passed(over, passed.row_low, passed.row_high, passed.column_low, passed.column_high)


@triton.jit
def finish_worker(passed, work, words, gate, watch, C: tl.constexpr):
    """After STOP: the words are left as the next launch expects them."""
    ROW_CHUNKS: tl.constexpr = C.ROW_CHUNKS
    COLUMN_CHUNKS: tl.constexpr = C.COLUMN_CHUNKS
    if C.GATED:
        leave_gate(work, words, gate, watch, passed.over, ROW_CHUNKS, COLUMN_CHUNKS)
    else:
        leave(work, words, watch, C.KIND == "static")
