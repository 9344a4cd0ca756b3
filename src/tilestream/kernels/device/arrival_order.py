"""Arrival order on the device: `tilestream.core.schedule.take_ready`, in the same steps.

::

    until each queue was found empty:
        the queue of the item before, or else the first whose chunks have all arrived:
            none has:   nap, poll all again; abort word set, or deadline passed -> the first not found empty
        ticket = add(queue, 1); valid -> item

A queue holds the tiles that read the same chunks. An item costs a worker one atomic add, as with a single queue. A
queue costs it a poll of each of its chunks (acquire, system scope, one lane), an atomic max that raises its counter to
the launch's base, and the void ticket by which the worker finds it empty. A waiting worker polls the queues in turn.

The item then passes its gate like any other (`tilestream.kernels.device.gate`), which polls a chunk that the item
before did not read once more. The gate also finds and records an expiry: a worker whose deadline has passed takes an
item whose chunks may not be there, and its gate gives up at the first poll, naming item and chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core.structs import Item, Ready
from tilestream.kernels.device.clock import LONGEST, SHORTEST, latest, nap, present
from tilestream.kernels.device.gate import ARRIVED, PENDING, is_over, poll_signal
from tilestream.kernels.device.schedule import ITEM, LINE, READY, STOPPED, TOOK, add, note, tile_of_ticket, with_noted


@triton.jit
def chunks_state(queue, queues, coming, queue_table):
    """`ARRIVED` where all chunks of a queue have; else how the first that has not stands."""
    i = tl.load(queue_table + queues + 1 + queue)
    stop = tl.load(queue_table + queues + 2 + queue)
    state = tl.cast(ARRIVED, tl.int32)
    while (i < stop) & (state == ARRIVED):
        state = poll_signal(coming, tl.load(queue_table + i))
        i += 1
    return state


@triton.jit
def first_ready(empty, over, coming, work, words, gate, watch):
    """Wait for a queue: ``(queue, answer, waited)``, the answer -1 where the worker shall wait for none.

    ``waited`` is in nanoseconds. A chunk whose producer failed is as good as there: the gate says what becomes of it.
    """
    queue = tl.cast(-1, tl.int32)
    answer = tl.cast(-1, tl.int32)
    pause = tl.cast(SHORTEST, tl.int32)
    since = tl.cast(0, tl.int64)
    waited = tl.cast(0, tl.int64)
    while queue < 0:
        first = tl.cast(-1, tl.int32)
        other = tl.cast(0, tl.int32)
        while (other < work.queues) & (answer < 0):
            if ((empty >> other) & 1) == 0:
                if first < 0:
                    first = other + 0
                if over == 0:
                    if chunks_state(other, work.queues, coming, gate.queue_table) != PENDING:
                        answer = other + 0
            other += 1
        if answer >= 0:
            queue = answer + 0
        elif over != 0:
            queue = first + 0
        else:
            if since == 0:
                since = present(watch.clock)
            nap(pause)
            pause = tl.minimum(2 * pause, LONGEST)
            now = latest(watch.clock)
            waited = now - since
            if is_over(words, watch) | (now - watch.begin > gate.allowed):
                over = over * 0 + 1
    return queue, answer, waited


@triton.jit
def take_ready(progress, work, words, gate, watch, C: tl.constexpr):
    """``(found, item, waited, cursor, ready)``: the worker's next item, a whole tile; ``found`` is 0 for STOP.

    ``waited``: int64, nanoseconds, for whatever queue. Where the launch is over, the worker waits for nothing.
    """
    ORDER: tl.constexpr = C.ORDER
    queue, empty = progress.ready
    noted, over = progress.cursor.noted, progress.passed.over
    if C.ROW_CHUNKS != "none":
        coming = gate.rows
    else:
        coming = gate.columns
    waited = tl.cast(0, tl.int64)
    found = tl.cast(0, tl.int32)
    batch = tl.cast(0, tl.int32)
    pm = tl.cast(0, tl.int32)
    pn = tl.cast(0, tl.int32)
    one = tl.cast(1, tl.int32)
    every = tl.cast(-1, tl.int32)
    if work.queues < 32:
        every = (one << work.queues) - 1
    looking = tl.cast(1, tl.int32)
    while looking != 0:
        if empty == every:
            looking = looking * 0
        else:
            if queue < 0:
                queue, answer, waited = first_ready(empty, over, coming, work, words, gate, watch)
                noted = note(words, watch, noted, READY, (answer,), C.PROBE)
                tl.atomic_max(words.counters + queue * LINE, words.base, sem="relaxed")
            ticket = add(words, queue, 0)
            noted = note(words, watch, noted, TOOK, (queue, ticket), C.PROBE)
            position = tl.load(gate.queue_table + queue) + ticket
            if position < tl.load(gate.queue_table + queue + 1):
                batch, pm, pn = tile_of_ticket(0, position, work, "whole", ORDER, C.TRANSPOSED)
                found = found * 0 + 1
                looking = looking * 0
            else:
                empty = empty | (one << queue)
                queue = tl.cast(-1, tl.int32)
    if found != 0:
        batch = (batch + work.first_batch) % work.batches
        tile_id = (batch * work.num_m + pm) * work.num_n + pn
        noted = note(words, watch, noted, ITEM, (tile_id, 0, work.k_steps, 0, 1, -1), C.PROBE)
    else:
        noted = note(words, watch, noted, STOPPED, (), C.PROBE)
    zero = tl.cast(0, tl.int32)
    item = Item(batch, pm, pn, zero, zero + work.k_steps, zero, zero + 1, zero - 1, zero)
    return found, item, waited, with_noted(progress.cursor, noted), Ready(queue, empty)
