"""The schedule on the device: `tilestream.core.schedule.take`, in the same steps, on counters in global memory.

::

    a share in progress:  its next part
    static:               the worker's own position, without shared memory
    from its own queue until that is empty, then from the victim until that is empty:
                          ticket = add(queue, 1); valid -> item
    until all queues are empty:
                          read every other counter; ticket = add(the fullest, 1); valid -> item

The arithmetic is `tilestream.core`'s own functions, bound by `tilestream.kernels.device.jit.device`. This module has
the memory operations and the order of the steps. With a probe, each step records its operation and the answer, so that
a test can give the host's `take` the same answers and compare.

Counters (invariant 4): one 64-bit word a queue, a cache line apart; then two further words of this kind, the number of
workers that have left and the abort word. They are never cleared. A launch counts from ``base``. Before its first add
to a counter a worker raises it to ``base`` by an atomic max; the read of a victim's counter is such a max. So ``add``
alone gives tickets if earlier launches have left the counter at most at ``base``. A captured launch owns its words and
counts from 0; `leave` restores them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from tilestream.core import integers, queues, raster, stream_k
from tilestream.core.structs import Cursor, Item
from tilestream.kernels.device.jit import INTERPRETED, device

cdiv = device(integers.cdiv)
part_begin = device(integers.part_begin)
part_size = device(integers.part_size)
part_of = device(integers.part_of)
row_major = device(raster.row_major)
grouped = device(raster.grouped)
chunk_major = device(raster.chunk_major)
longest_first = device(raster.longest_first)
home_queue = device(queues.home_queue)
left = device(queues.left)
rank = device(queues.rank)
ranked = device(queues.ranked)
share_part = device(stream_k.share_part)
slot_of = device(stream_k.slot)

#: 8-byte words from one counter to the next, so that workers of two queues share no cache line.
LINE: tl.constexpr = tl.constexpr(16)

#: Values of a probe's record.
RECORD: tl.constexpr = tl.constexpr(8)
# The first value is the kind of record. After an item: each chunk that it waited for (operand, chunk, outcome), then
# whether the launch is over. In arrival order: the queue that was found ready, or -1.
TOOK, PEEKED, ITEM, STOPPED, WAITED, GATE, READY = map(tl.constexpr, range(7))


# The probe -----------------------------------------------------------------------------------------------------------


@triton.jit
def note(words, watch, noted, kind, values, PROBE: tl.constexpr):
    """Append a record of at most 6 ``values`` to this worker's log. Returns the number of records.

    Without PROBE there is no code for it.
    """
    if PROBE:
        if noted < words.capacity:
            at = words.log + (watch.worker.to(tl.int64) * words.capacity + noted) * RECORD
            tl.store(at, kind)
            for i in tl.static_range(len(values)):
                tl.store(at + 1 + i, values[i])
            for i in tl.static_range(len(values), 6):
                tl.store(at + 1 + i, 0)
        noted = noted + 1
    return noted


# Queues --------------------------------------------------------------------------------------------------------------


@triton.jit
def add(words, queue, asked):
    """Draw a ticket. The counter is at least ``base``: see the module. ``asked`` is not used here: see `take`."""
    return (tl.atomic_add(words.counters + queue * LINE, 1, sem="relaxed") - words.base).to(tl.int32)


@triton.jit
def peek(words, queue):
    """The number of tickets handed out so far. Raises the counter to ``base``."""
    count = tl.atomic_max(words.counters + queue * LINE, words.base, sem="relaxed")
    return (tl.maximum(count, words.base) - words.base).to(tl.int32)


@triton.jit
def queue_size(queue, work, tickets, SPLIT: tl.constexpr, PART_SIZE: tl.constexpr = part_size):
    """`Schedule.queue_size`; ``tickets`` is the number of all queues' tickets if positions are divided."""
    if SPLIT == "columns":
        size = work.batches * work.num_m * PART_SIZE(work.num_n, work.queues, queue)
    elif SPLIT == "rows":
        size = work.batches * PART_SIZE(work.num_m, work.queues, queue) * work.num_n
    else:
        size = PART_SIZE(tickets, work.queues, queue)
    return size


@triton.jit
def pick_victim(work, words, watch, tickets, noted, SPLIT: tl.constexpr, PROBE: tl.constexpr):
    """``(best, noted)``: the rank of the best victim. Reads all counters but the worker's own, one after the other."""
    home = home_queue(watch.worker, work.queues)
    best = tl.cast(0, tl.int32)
    for other in range(work.queues):
        if other != home:
            taken = peek(words, other)
            noted = note(words, watch, noted, PEEKED, (other, taken), PROBE)
            rest = left(queue_size(other, work, tickets, SPLIT), taken)
            best = tl.maximum(best, rank(rest, other, home))
    return best, noted


@triton.jit
def source_queue(source, home):
    """The queue of a cursor's ``source``."""
    return tl.where(source == 0, home, source - 1)


@triton.jit
def draw(
    cursor, work, words, watch, tickets, SPLIT: tl.constexpr, STEAL: tl.constexpr, PROBE: tl.constexpr,
    ADD: tl.constexpr, PICK: tl.constexpr,
):  # fmt: skip
    """``(found, queue, ticket, source, noted)``: a ticket of the worker's present queue, or else of the fullest."""
    source, noted = cursor.source, cursor.noted
    home = home_queue(watch.worker, work.queues)
    queue = home
    if STEAL:
        queue = source_queue(source, home)
    ticket = tl.cast(0, tl.int32)
    found = tl.cast(0, tl.int32)
    if source <= work.queues:
        ticket = ADD(words, queue, cursor.asked)
        noted = note(words, watch, noted, TOOK, (queue, ticket), PROBE)
        found = (ticket < queue_size(queue, work, tickets, SPLIT)).to(tl.int32)
    if STEAL:
        looking = 1 - found
        while looking != 0:
            best, noted = PICK(work, words, watch, tickets, noted, SPLIT, PROBE)
            victim, some = ranked(best, home)
            looking = looking * some
            if looking != 0:
                ticket = add(words, victim, 0)
                noted = note(words, watch, noted, TOOK, (victim, ticket), PROBE)
                if ticket < queue_size(victim, work, tickets, SPLIT):
                    found = found * 0 + 1
                    queue = victim
                    source = victim + 1
                    looking = looking * 0
    if found == 0:
        source = work.queues + 1
    return found, queue, ticket, source, noted


@triton.jit
def enter(work, words, worker, leaves, STATIC: tl.constexpr, GATED: tl.constexpr):
    """Raise this worker's counter to ``base``, and the number of workers that have left if it is used."""
    if not STATIC:
        tl.atomic_max(words.counters + home_queue(worker, work.queues) * LINE, words.base, sem="relaxed")
    if GATED:
        if leaves != 0:
            tl.atomic_max(words.counters + work.queues * LINE, words.base, sem="relaxed")


@triton.jit
def count_out(work, words, base, workers):
    """Count this worker as gone. Returns whether it was the last.

    The add is a release of all that the worker did to the words, and for the last worker an acquire. No worker touches
    the words after it has counted itself. Drained workers count, too.
    """
    return tl.atomic_add(words.counters + work.queues * LINE, 1, sem="acq_rel") - base == workers - 1


@triton.jit
def _drain_on_device():
    """Wait until the stores of each wave are in the cache that all compute units of its die share.

    It is for AMD, where a release waits only for the stores of the wave that executes it, and a barrier for none. On
    NVIDIA a release is cumulative: it covers all stores that the barrier before it has ordered.
    """
    if not is_cuda():
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\n\ts_mov_b32 $0, 0", "=s", [], dtype=tl.int32, is_pure=False, pack=1
        )


def _drain_on_host():
    pass


#: It precedes the barrier of each hand-over in which one lane publishes the stores of all waves of a worker.
drain = _drain_on_host if INTERPRETED else _drain_on_device


@triton.jit
def count_in(count, parts):
    """Count a part that this worker has stored. Returns whether it was the last of ``parts``; that restores the count.

    With `drain` and the barriers one thread's add (a release and acquire at device scope) covers the whole worker: its
    stores before and its loads after.
    """
    drain()
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == parts - 1
    tl.debug_barrier()
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def restore(work, words, GATED: tl.constexpr):
    """Zero a captured launch's words: the counters, the number of workers that have left, and the abort word."""
    count = work.queues + 1
    if GATED:
        count += 1
    for word in range(count):
        tl.store(words.counters + word * LINE, tl.cast(0, tl.int64))


@triton.jit
def leave(work, words, watch, STATIC: tl.constexpr):
    """After STOP: the last worker to leave restores the words of a captured launch."""
    if not STATIC:
        if words.reset != 0:
            if count_out(work, words, 0, watch.workers):
                restore(work, words, False)


@triton.jit
def first_cursor():
    """The cursor of a worker before its first item."""
    zero = tl.cast(0, tl.int32)
    return Cursor(zero, zero, zero - 1, zero, zero, zero, tl.cast(0, tl.int64))


@triton.jit
def with_asked(cursor, asked):
    """``cursor`` with a prefetched ticket: see `tilestream.kernels.hopper.queues`."""
    return Cursor(cursor.ticket, cursor.source, cursor.share, cursor.unit, cursor.unit_end, cursor.noted, asked)


@triton.jit
def with_noted(cursor, noted):
    """``cursor`` with the number of records that the worker's probe has written."""
    return Cursor(cursor.ticket, cursor.source, cursor.share, cursor.unit, cursor.unit_end, noted, cursor.asked)


# Rasters and items ---------------------------------------------------------------------------------------------------


@triton.jit
def in_order(t, num_m, num_n, work, ORDER: tl.constexpr):
    """The raster's tile at position ``t``, not transposed."""
    if ORDER == "grouped":
        pm, pn = grouped(t, num_m, num_n, work.group)
    elif ORDER == "chunk_major":
        pm, pn = chunk_major(t, num_m, num_n, work.first, work.band, work.group)
    elif ORDER == "longest_first":
        pm, pn = longest_first(t, num_m, num_n, work.group)
    else:
        pm, pn = row_major(t, num_m, num_n)
    return pm, pn


@triton.jit
def tile_at(t, num_m, num_n, work, ORDER: tl.constexpr, TRANSPOSED: tl.constexpr):
    """`Raster.tile` of a grid of ``num_m`` by ``num_n`` tiles."""
    if ORDER == "table":
        pm, pn = row_major(tl.load(work.table + t), num_m, num_n)
    elif TRANSPOSED:
        pn, pm = in_order(t, num_n, num_m, work, ORDER)
    else:
        pm, pn = in_order(t, num_m, num_n, work, ORDER)
    return pm, pn


@triton.jit
def tile_of_ticket(queue, ticket, work, SPLIT: tl.constexpr, ORDER: tl.constexpr, TRANSPOSED: tl.constexpr):
    """``(batch, pm, pn)`` of a ticket that is a whole tile: `Schedule.ticket`."""
    rows = work.num_m
    cols = work.num_n
    if SPLIT == "columns":
        cols = part_size(work.num_n, work.queues, queue)
    if SPLIT == "rows":
        rows = part_size(work.num_m, work.queues, queue)
    if SPLIT == "items":
        position = part_begin(work.full_tiles, work.queues, queue) + ticket
    elif SPLIT == "strides":
        position = queue + ticket * work.queues
    else:
        position = ticket
    batch = position // (rows * cols)
    pm, pn = tile_at(position % (rows * cols), rows, cols, work, ORDER, TRANSPOSED)
    if SPLIT == "columns":
        pn = pn + part_begin(work.num_n, work.queues, queue)
    if SPLIT == "rows":
        pm = pm + part_begin(work.num_m, work.queues, queue)
    return batch, pm, pn


@triton.jit
def take(cursor, work, words, watch, C: tl.constexpr, ADD: tl.constexpr = add, PICK: tl.constexpr = pick_victim):
    """``(found, item, cursor)``: the worker's next work item, or STOP if ``found`` is 0; the cursor after it.

    Parameters
    ----------
    cursor, work, words, watch
        Structs of their names: see `tilestream.core.structs`.
    C
        A `tilestream.kernels.config.ScheduleConfig`.
    ADD, PICK
        Functions that draw a ticket from the queue of ``cursor.source``, and that find a victim. ``cursor.asked`` is
        for an ``ADD`` that was begun before: see `tilestream.kernels.hopper.queues`.
    """
    ORDER: tl.constexpr = C.ORDER
    SPLIT: tl.constexpr = C.SPLIT
    ticket, source, share, unit, unit_end, noted = (
        cursor.ticket, cursor.source, cursor.share, cursor.unit, cursor.unit_end, cursor.noted
    )  # fmt: skip
    found = tl.cast(1, tl.int32)
    batch = tl.cast(0, tl.int32)
    pm = tl.cast(0, tl.int32)
    pn = tl.cast(0, tl.int32)
    k_begin = tl.cast(0, tl.int32)
    k_end = k_begin + work.k_steps
    part = tl.cast(0, tl.int32)
    parts = tl.cast(1, tl.int32)
    slot = tl.cast(-1, tl.int32)
    if C.KIND == "static":
        position = watch.worker + ticket * watch.workers
        found = (position < work.full_tiles).to(tl.int32)
        if found != 0:
            batch, pm, pn = tile_of_ticket(0, position, work, "whole", ORDER, C.TRANSPOSED)
            ticket = ticket + 1
    elif C.KIND == "dynamic":
        found, queue, drawn, source, noted = draw(
            cursor, work, words, watch, work.full_tiles, SPLIT, C.STEAL, C.PROBE, ADD, PICK
        )
        if found != 0:
            batch, pm, pn = tile_of_ticket(queue, drawn, work, SPLIT, ORDER, C.TRANSPOSED)
    else:
        if unit >= unit_end:
            found, queue, drawn, source, noted = draw(
                cursor, work, words, watch, work.full_tiles + work.shares, "items", False, C.PROBE, ADD, PICK
            )
            share = tl.cast(-1, tl.int32)
            if found != 0:
                if drawn >= work.full_tiles:
                    share = drawn - work.full_tiles
                    unit = part_begin(work.units, work.shares, share)
                    unit_end = unit + part_size(work.units, work.shares, share)
            position = drawn
        else:
            position = tl.cast(0, tl.int32)
        if found != 0:
            if share >= 0:
                tile, k_begin, k_end = share_part(unit, unit_end, work.k_steps)
                unit = unit + k_end - k_begin
                position = work.full_tiles + tile
                first_share = part_of(work.units, work.shares, tile * work.k_steps)
                parts = part_of(work.units, work.shares, (tile + 1) * work.k_steps - 1) - first_share + 1
                if parts > 1:
                    part = share - first_share
                    slot = slot_of(share, tile)
            batch, pm, pn = tile_of_ticket(0, position, work, "whole", ORDER, C.TRANSPOSED)
    if found != 0:
        batch = (batch + work.first_batch) % work.batches
        tile_id = (batch * work.num_m + pm) * work.num_n + pn
        noted = note(words, watch, noted, ITEM, (tile_id, k_begin, k_end, part, parts, slot), C.PROBE)
    else:
        noted = note(words, watch, noted, STOPPED, (), C.PROBE)
    item = Item(batch, pm, pn, k_begin, k_end, part, parts, slot, tl.cast(0, tl.int32))
    return found, item, Cursor(ticket, source, share, unit, unit_end, noted, cursor.asked)
