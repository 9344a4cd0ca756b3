"""The schedule on the device: `tilestream.core.schedule.take`, in the same steps, on counters in global memory.

::

    a share in progress:  its next part
    static:               own position, no shared memory touched
    from its own queue until that is empty, then from where it has stolen until that is:
                          ticket = add(queue, 1); valid -> item
    until none is left anywhere:
                          read every other counter; ticket = add(the fullest, 1); valid -> item

All arithmetic is `tilestream.schedule`'s own functions, bound by `tilestream.kernels.device.jit.device`; here is only
what touches memory, and the order of the steps. With a probe, each step writes down what it asked and was told, so
that a test can lead the host's `take` through the same answers and compare.

Counters (invariant 4): one 64-bit word a queue, a cache line apart; behind them two words of the same kind, the count
of those who left and the abort word. Nothing clears them. A launch counts from
``base``: a worker raises a counter to it by an atomic max before its first add there, which the read of a victim's
counter does by itself. So ``add`` alone gives tickets, whatever launches before left behind, as long as it was at most
``base``. A captured launch owns its words and counts from 0; `leave` restores them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import integers, queues, raster, stream_k
from tilestream.kernels.device.jit import device

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

#: Words of 8 bytes from one counter to the next: two workers that take from two queues share no cache line.
LINE: tl.constexpr = tl.constexpr(16)

#: Values of a probe's record, and what the first says it is.
RECORD: tl.constexpr = tl.constexpr(8)
TOOK: tl.constexpr = tl.constexpr(0)
PEEKED: tl.constexpr = tl.constexpr(1)
ITEM: tl.constexpr = tl.constexpr(2)
STOPPED: tl.constexpr = tl.constexpr(3)
#: After an item: each chunk that it waited for (operand, chunk, how it ended); then whether the launch is over.
WAITED: tl.constexpr = tl.constexpr(4)
GATE: tl.constexpr = tl.constexpr(5)
#: In arrival order: the queue that was found ready, -1 if none.
READY: tl.constexpr = tl.constexpr(6)


# The probe -----------------------------------------------------------------------------------------------------------


@triton.jit
def note(probe, capacity, worker, noted, kind, x0, x1, x2, x3, x4, x5, PROBE: tl.constexpr):
    """Append a record to this worker's log; how many it has now. Nothing at all where PROBE is off."""
    if PROBE:
        if noted < capacity:
            at = probe + (worker.to(tl.int64) * capacity + noted) * RECORD
            tl.store(at, kind)
            tl.store(at + 1, x0)
            tl.store(at + 2, x1)
            tl.store(at + 3, x2)
            tl.store(at + 4, x3)
            tl.store(at + 5, x4)
            tl.store(at + 6, x5)
        noted = noted + 1
    return noted


# Queues --------------------------------------------------------------------------------------------------------------


@triton.jit
def add(counters, queue, base, asked=0):
    """Draw a ticket. The counter is at least ``base``: see the module. ``asked``: of no account, see `take`."""
    return (tl.atomic_add(counters + queue * LINE, 1, sem="relaxed") - base).to(tl.int32)


@triton.jit
def peek(counters, queue, base):
    """Tickets handed out so far; afterwards the counter is at least ``base``."""
    return (tl.maximum(tl.atomic_max(counters + queue * LINE, base, sem="relaxed"), base) - base).to(tl.int32)


@triton.jit
def queue_size(queue, queues, batch, num_m, num_n, tickets, SPLIT: tl.constexpr, PART_SIZE: tl.constexpr = part_size):
    """`Schedule.queue_size`; ``tickets`` are those of all queues where positions are split."""
    if SPLIT == "columns":
        size = batch * num_m * PART_SIZE(num_n, queues, queue)
    elif SPLIT == "rows":
        size = batch * PART_SIZE(num_m, queues, queue) * num_n
    else:
        size = PART_SIZE(tickets, queues, queue)
    return size


@triton.jit
def look(
    counters, base, worker, home, queues, batch, num_m, num_n, tickets, probe, capacity, noted,
    SPLIT: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """``(best, noted)``: the rank of the best victim. Reads every counter but the worker's own, one after the other."""
    best = tl.cast(0, tl.int32)
    for other in range(queues):
        if other != home:
            taken = peek(counters, other, base)
            noted = note(probe, capacity, worker, noted, PEEKED, other, taken, 0, 0, 0, 0, PROBE)
            rest = left(queue_size(other, queues, batch, num_m, num_n, tickets, SPLIT), taken)
            best = tl.maximum(best, rank(rest, other, home))
    return best, noted


@triton.jit
def source_queue(source, home):
    """The queue that a cursor's ``source`` stands for."""
    return tl.where(source == 0, home, source - 1)


@triton.jit
def draw(
    counters, base, worker, source, queues, batch, num_m, num_n, tickets, asked,
    probe, capacity, noted, SPLIT: tl.constexpr, STEAL: tl.constexpr, PROBE: tl.constexpr, ADD: tl.constexpr,
    LOOK: tl.constexpr,
):  # fmt: skip
    """``(found, queue, ticket, source, noted)``: a ticket from where the worker takes, then from the fullest."""
    home = home_queue(worker, queues)
    queue = home
    if STEAL:
        queue = source_queue(source, home)
    ticket = tl.cast(0, tl.int32)
    found = tl.cast(0, tl.int32)
    if source <= queues:
        ticket = ADD(counters, queue, base, asked)
        noted = note(probe, capacity, worker, noted, TOOK, queue, ticket, 0, 0, 0, 0, PROBE)
        found = (ticket < queue_size(queue, queues, batch, num_m, num_n, tickets, SPLIT)).to(tl.int32)
    if STEAL:
        looking = 1 - found
        while looking != 0:
            best, noted = LOOK(
                counters, base, worker, home, queues, batch, num_m, num_n, tickets, probe, capacity, noted, SPLIT, PROBE
            )
            victim, some = ranked(best, home)
            looking = looking * some
            if looking != 0:
                ticket = add(counters, victim, base)
                noted = note(probe, capacity, worker, noted, TOOK, victim, ticket, 0, 0, 0, 0, PROBE)
                if ticket < queue_size(victim, queues, batch, num_m, num_n, tickets, SPLIT):
                    found = found * 0 + 1
                    queue = victim
                    source = victim + 1
                    looking = looking * 0
    if found == 0:
        source = queues + 1
    return found, queue, ticket, source, noted


@triton.jit
def enter(counters, base, worker, queues, counts_out, STATIC: tl.constexpr, GATED: tl.constexpr):
    """Raise to ``base`` what this worker adds to: its own counter, and where it is used the count of those who left."""
    if not STATIC:
        tl.atomic_max(counters + home_queue(worker, queues) * LINE, base, sem="relaxed")
    if GATED:
        if counts_out != 0:
            tl.atomic_max(counters + queues * LINE, base, sem="relaxed")


@triton.jit
def count_out(counters, queues, base, workers):
    """Count oneself as gone; whether one was the last.

    The add is a release of all that a worker did to the words and, for the last one, an acquire: nobody touches them
    after he has counted himself. Drained workers count too.
    """
    return tl.atomic_add(counters + queues * LINE, 1, sem="acq_rel") - base == workers - 1


@triton.jit
def count_in(count, parts):
    """Count a part that this worker has stored, of so many; whether it was the last. He restores the count.

    The barriers make one thread's add (a release at the device's scope, and an acquire) speak for the whole worker:
    for its stores before, for its loads after.
    """
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == parts - 1
    tl.debug_barrier()
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def restore(counters, queues, GATED: tl.constexpr):
    """Zero a captured launch's words: the counters, the count of those who left, and the abort word behind them."""
    words = queues + 1
    if GATED:
        words += 1
    for word in range(words):
        tl.store(counters + word * LINE, tl.cast(0, tl.int64))


@triton.jit
def leave(counters, queues, reset, workers, STATIC: tl.constexpr):
    """After STOP: where the words are a captured launch's own, the last worker out restores them."""
    if not STATIC:
        if reset != 0:
            if count_out(counters, queues, 0, workers):
                restore(counters, queues, False)


# Rasters and items ---------------------------------------------------------------------------------------------------


@triton.jit
def in_order(t, num_m, num_n, group, first, band, ORDER: tl.constexpr):
    """The raster's tile at position ``t``, rows as rows."""
    if ORDER == "grouped":
        pm, pn = grouped(t, num_m, num_n, group)
    elif ORDER == "chunk_major":
        pm, pn = chunk_major(t, num_m, num_n, first, band, group)
    elif ORDER == "longest_first":
        pm, pn = longest_first(t, num_m, num_n, group)
    else:
        pm, pn = row_major(t, num_m, num_n)
    return pm, pn


@triton.jit
def tile_at(t, num_m, num_n, table, group, first, band, ORDER: tl.constexpr, TRANSPOSED: tl.constexpr):
    """`Raster.tile`."""
    if ORDER == "table":
        pm, pn = row_major(tl.load(table + t), num_m, num_n)
    elif TRANSPOSED:
        pn, pm = in_order(t, num_n, num_m, group, first, band, ORDER)
    else:
        pm, pn = in_order(t, num_m, num_n, group, first, band, ORDER)
    return pm, pn


@triton.jit
def tile_of_ticket(
    queue, ticket, queues, num_m, num_n, tickets, table, group, first, band,
    SPLIT: tl.constexpr, ORDER: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The tile of a ticket that is a whole tile: `Schedule.ticket`."""
    rows = num_m
    cols = num_n
    if SPLIT == "columns":
        cols = part_size(num_n, queues, queue)
    if SPLIT == "rows":
        rows = part_size(num_m, queues, queue)
    if SPLIT == "items":
        position = part_begin(tickets, queues, queue) + ticket
    elif SPLIT == "strides":
        position = queue + ticket * queues
    else:
        position = ticket
    batch = position // (rows * cols)
    pm, pn = tile_at(position % (rows * cols), rows, cols, table, group, first, band, ORDER, TRANSPOSED)
    if SPLIT == "columns":
        pn = pn + part_begin(num_n, queues, queue)
    if SPLIT == "rows":
        pm = pm + part_begin(num_m, queues, queue)
    return batch, pm, pn


@triton.jit
def take(
    worker, workers, ticket, source, share, unit, unit_end,
    counters, base, queues, batches, num_m, num_n, k_steps, full_tiles, shares, units, table, group, first, band,
    first_batch, probe, capacity, noted,
    KIND: tl.constexpr, SPLIT: tl.constexpr, STEAL: tl.constexpr, ORDER: tl.constexpr, TRANSPOSED: tl.constexpr,
    PROBE: tl.constexpr, asked=0, ADD: tl.constexpr = add, LOOK: tl.constexpr = look,
):  # fmt: skip
    """The worker's next work item, and its cursor behind it; ``found`` is 0 for STOP.

    Parameters
    ----------
    asked, ADD, LOOK
        How a ticket is drawn from the queue of ``source``, and how all queues are looked at. ``asked`` is for ``ADD``,
        which may have been begun before; see `tilestream.kernels.hopper.queues`.

    Returns
    -------
    (found, batch, pm, pn, k_begin, k_end, part, parts, slot, ticket, source, share, unit, unit_end, noted)
    """
    found = tl.cast(1, tl.int32)
    batch = tl.cast(0, tl.int32)
    pm = tl.cast(0, tl.int32)
    pn = tl.cast(0, tl.int32)
    k_begin = tl.cast(0, tl.int32)
    k_end = k_begin + k_steps
    part = tl.cast(0, tl.int32)
    parts = tl.cast(1, tl.int32)
    slot = tl.cast(-1, tl.int32)
    if KIND == "static":
        position = worker + ticket * workers
        found = (position < full_tiles).to(tl.int32)
        if found != 0:
            batch, pm, pn = tile_of_ticket(
                0, position, 1, num_m, num_n, full_tiles, table, group, first, band, "items", ORDER, TRANSPOSED
            )
            ticket = ticket + 1
    elif KIND == "dynamic":
        found, queue, drawn, source, noted = draw(
            counters, base, worker, source, queues, batches, num_m, num_n, full_tiles, asked,
            probe, capacity, noted, SPLIT, STEAL, PROBE, ADD, LOOK,
        )  # fmt: skip
        if found != 0:
            batch, pm, pn = tile_of_ticket(
                queue, drawn, queues, num_m, num_n, full_tiles, table, group, first, band, SPLIT, ORDER, TRANSPOSED
            )
    else:
        if unit >= unit_end:
            found, queue, drawn, source, noted = draw(
                counters, base, worker, source, queues, batches, num_m, num_n, full_tiles + shares, asked,
                probe, capacity, noted, "items", False, PROBE, ADD, LOOK,
            )  # fmt: skip
            share = tl.cast(-1, tl.int32)
            if found != 0:
                if drawn >= full_tiles:
                    share = drawn - full_tiles
                    unit = part_begin(units, shares, share)
                    unit_end = unit + part_size(units, shares, share)
            position = drawn
        else:
            position = tl.cast(0, tl.int32)
        if found != 0:
            if share >= 0:
                tile, k_begin, k_end = share_part(unit, unit_end, k_steps)
                unit = unit + k_end - k_begin
                position = full_tiles + tile
                first_share = part_of(units, shares, tile * k_steps)
                parts = part_of(units, shares, (tile + 1) * k_steps - 1) - first_share + 1
                if parts > 1:
                    part = share - first_share
                    slot = slot_of(share, tile)
            batch, pm, pn = tile_of_ticket(
                0, position, 1, num_m, num_n, full_tiles, table, group, first, band, "items", ORDER, TRANSPOSED
            )
    if found != 0:
        batch = (batch + first_batch) % batches
        noted = note(
            probe, capacity, worker, noted, ITEM, (batch * num_m + pm) * num_n + pn, k_begin, k_end, part, parts, slot,
            PROBE,
        )  # fmt: skip
    else:
        noted = note(probe, capacity, worker, noted, STOPPED, 0, 0, 0, 0, 0, 0, PROBE)
    return found, batch, pm, pn, k_begin, k_end, part, parts, slot, ticket, source, share, unit, unit_end, noted
