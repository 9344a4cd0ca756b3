"""A worker's loop over its items, from the first to STOP: the schedule and the gate of every GEMM.

::

    progress, watch = begin_worker(...)          # the counters, the clock, chunks in quarantine
    while found:
        found, item, progress = next_item(...)   # schedule.take or arrival_order.take_ready; gate.pass_gate
        if found: multiply, finish
    finish_worker(...)                           # the words, as the next launch expects them

A kernel adds only what it does with an item. Triton and Gluon call the same functions. The configuration says what
arrives and how the schedule is divided, so that a kernel has no code that it does not use.
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
    """``(progress, watch)`` of a worker before its first item. ``C``: a `tilestream.kernels.config.GemmConfig`."""
    ROW_CHUNKS: tl.constexpr = C.ROW_CHUNKS
    COLUMN_CHUNKS: tl.constexpr = C.COLUMN_CHUNKS
    leaves = words.reset
    if C.GATED:
        # The last worker to leave zeroes words: a captured launch's counters, the caller's own signals.
        leaves = tl.where((gate.rows.epoch == 0) | (gate.columns.epoch == 0), 1, words.reset)
    enter(work, words, worker, leaves, C.KIND == "static", C.GATED)
    if C.GATED:
        abort, clock = words.counters + (work.queues + 1) * LINE, gate.claims + LINE
        watch = Watch(worker, workers, leaves, abort, clock, present(clock))
        over = quarantined(gate, words, watch, ROW_CHUNKS, COLUMN_CHUNKS)
    else:
        # A static launch has no words. (Triton 3.6 cannot return None.)
        over = tl.cast(0, tl.int32)
        watch = Watch(worker, workers, leaves, over, over, tl.cast(0, tl.int64))
    zero = tl.cast(0, tl.int32)
    passed = Passed(over, zero, zero - 1, zero, zero - 1)
    return Progress(first_cursor(), Ready(zero - 1, zero), passed), watch


@triton.jit
def as_it_is(item, over):
    """The item unchanged: the default of ``VOID`` of `next_item`."""
    return item, over


@triton.jit
def next_item(
    progress, work, words, gate, watch, C: tl.constexpr, ADD: tl.constexpr = add, PICK: tl.constexpr = pick_victim,
    VOID: tl.constexpr = as_it_is,
):  # fmt: skip
    """``(found, item, progress)``: the worker's next item, whose chunks have arrived; STOP if ``found`` is 0.

    If the launch is over (``progress.passed.over``), the item is void, and the kernel fills it with NaN.

    Parameters
    ----------
    C
        A `tilestream.kernels.config.GemmConfig`.
    ADD, PICK
        Functions that draw a ticket and find a victim: see `tilestream.kernels.device.schedule.take`.
    VOID
        A function of ``(item, over)``, called after the item's gate: it marks a void item, and fences.
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
    """``item`` with its trace record at ``place``."""
    return Item(
        item.batch, item.pm, item.pn, item.k_begin, item.k_end, item.part, item.parts, item.slot, place
    )  # fmt: skip


@triton.jit
def with_steps(item, k_begin, k_end):
    """``item`` with other K steps."""
    return Item(
        item.batch, item.pm, item.pn, k_begin, k_end, item.part, item.parts, item.slot, item.place
    )  # fmt: skip


@triton.jit
def with_over(passed, over):
    """``passed`` with another ``over``."""
    return Passed(over, passed.row_low, passed.row_high, passed.column_low, passed.column_high)


@triton.jit
def finish_worker(passed, work, words, gate, watch, C: tl.constexpr):
    """After STOP: leave the words as the next launch expects them."""
    ROW_CHUNKS: tl.constexpr = C.ROW_CHUNKS
    COLUMN_CHUNKS: tl.constexpr = C.COLUMN_CHUNKS
    if C.GATED:
        leave_gate(work, words, gate, watch, passed.over, ROW_CHUNKS, COLUMN_CHUNKS)
    else:
        leave(work, words, watch, C.KIND == "static")
