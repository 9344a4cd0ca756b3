"""Rows by source on the device: `tilestream.core.sources.take`, in the same steps.

::

    for each source, from the pivot on, those that are finished left out:
        poll the word of its counts          acquire, system scope, one lane
        settle it                            acquire and release: counted, or lost where the launch is over
        read at once, one group a lane:      counts, tickets handed out, words of the rows
        tiles left of groups that are there: a group by `share_of`; ticket = add(its counter, 1); valid -> tile
    none of all sources:                     nap; abort word set, or deadline passed -> the launch is over

The tile then passes its gate (`pass_rows`), which polls the word of its group's rows with an acquire. The lanes' reads
of words only choose a tile. They see recent values, since an acquire has just invalidated the caches.

All threads that take tiles must choose the same one, although words change while they read. So there are at least as
many lanes as threads (`tilestream.launch.portable.sources`; on Hopper one warp): each word is read once, and shared.

``lane`` is int32 ``[LANES]``: 0, 1, ...; its layout is the caller's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import sources as rules
from tilestream.core.structs import Item, Passed, SourceItem, Span
from tilestream.kernels.device.clock import LONGEST, SHORTEST, latest, nap, present
from tilestream.kernels.device.gate import (
    ARRIVED,
    EXPIRED,
    FAILED,
    OVER,
    PENDING,
    end_launch,
    is_over,
    poll_signal,
    wait,
)
from tilestream.kernels.device.items import with_over, with_place
from tilestream.kernels.device.jit import device
from tilestream.kernels.device.schedule import cdiv, count_in, count_out, grouped, left, restore
from tilestream.kernels.device.trace import begin_span, chunk_span, ready_span

counts_word = device(rules.counts_word)
rows_word = device(rules.rows_word)
source_of_turn = device(rules.source_of_turn)
share_of = device(rules.share_of)

COUNTED, LOST = map(tl.constexpr, (rules.COUNTED, rules.LOST))


@triton.jit
def look_at(words, inside, other, C: tl.constexpr):
    """Words that others write, one a lane. On AMD Triton drops ``volatile``, and caches would answer."""
    if C.PAST_CACHES:
        found = tl.load(words, mask=inside, other=other, cache_modifier=".cv")
    else:
        found = tl.load(words, mask=inside, other=other, volatile=True)
    return found


@triton.jit
def settle(source, state, sources, base):
    """Settle a source as ``state`` if no worker has; returns its state. The word counts from ``base``."""
    at = sources.settled + source
    found = tl.atomic_max(at, base, sem="acq_rel")
    if found <= base:
        found = tl.atomic_cas(at, base, base + state, sem="acq_rel")
        if found == base:
            found = base + state
    return (found - base).to(tl.int32)


@triton.jit
def tiles_left(source, counted, over, sources, coming, base, num_n, worker, lane, C: tl.constexpr):
    """``(some, item, tiles, late)`` of a source that is settled.

    ``some``: whether groups whose rows are there have tiles left; ``item``, ``tiles``: the group among them that this
    worker draws from, its ticket not drawn yet, and the group's tiles. ``late``: the first other group that has tiles
    left, or ``LANES``.
    """
    inside = lane < sources.groups
    counts = look_at(sources.counts + source * sources.groups + lane, inside, 0, C)
    is_fit = tl.min((counts >= 0).to(tl.int32), 0) & (tl.sum(counts.to(tl.int64), 0) <= sources.capacity).to(tl.int32)
    valid = tl.where(counted != 0, is_fit, 0)
    counts = tl.where(valid != 0, counts, tl.where(lane == 0, sources.capacity, 0))
    sizes = cdiv(counts, C.BLOCK_M) * num_n
    queue = source * sources.groups + lane
    tickets = look_at(sources.tickets + queue, inside, 0, C)
    rest = left(sizes, (tl.maximum(tickets, base) - base).to(tl.int32))
    late = tl.cast(C.LANES, tl.int32)
    if C.ARRIVES:
        words = coming.signals + rows_word(source, lane, sources.groups)
        word = look_at(words, inside, 0, C)
        there = ((coming.epoch == 0) & (word != 0)) | (
            (coming.epoch > 0) & ((word >= coming.epoch) | (word == -coming.epoch))
        )
        there = there | (over != 0) | (valid == 0)
        late = tl.min(tl.where(there | (rest == 0), C.LANES, lane), 0)
        rest = tl.where(there, rest, 0)
    total = tl.sum(rest, 0)
    tile = share_of(worker, tl.maximum(total, 1))
    group = tl.sum((tl.cumsum(rest, 0) <= tile).to(tl.int32), 0)
    begin = source * sources.capacity + tl.sum(tl.where(lane < group, counts, 0), 0)
    rows = tl.sum(tl.where(lane == group, counts, 0), 0)
    tiles = tl.sum(tl.where(lane == group, sizes, 0), 0)
    item = SourceItem(source, group, group * 0, begin, rows, valid, tl.sum(sizes, 0))
    return total > 0, item, tiles, late


@triton.jit
def with_ticket(item, ticket):
    """``item`` with its ticket."""
    return SourceItem(item.source, item.group, ticket, item.begin, item.rows, item.valid, item.tiles)


@triton.jit
def give_up(state, word, waited, coming, gate, words, watch):
    """End the launch for a word that has not come: the record names it, and no tile."""
    end_launch(state, 0, word, coming.key, coming.epoch, (-1, -1, -1, -1), waited, gate, words, watch)


@triton.jit
def await_any(missing, since, pause, coming, gate, words, watch):
    """Nap once: ``(over, since, pause)``. ``since``: when this worker began to wait; 0: it has not."""
    over = tl.cast(0, tl.int32)
    if since == 0:
        since = present(watch.clock)
    nap(pause)
    now = latest(watch.clock)
    if is_over(words, watch):
        over = over * 0 + 1
    elif now - watch.begin > gate.allowed:
        over = over * 0 + 1
        give_up(EXPIRED, missing, now - since, coming, gate, words, watch)
    return over, since, tl.minimum(2 * pause, LONGEST)


@triton.jit
def take_from_source(finished, over, sources, num_n, words, gate, watch, lane, C: tl.constexpr):
    """``(found, item, finished, over)``: the worker's next tile; ``found`` is 0 for STOP.

    ``finished``: turns, from the first on, whose sources have no tile left.
    """
    coming: tl.constexpr = None
    if C.ARRIVES:
        coming = gate.rows
    zero = tl.cast(0, tl.int32)
    item = SourceItem(zero, zero, zero, zero, zero, zero, zero)
    found = tl.cast(0, tl.int32)
    waiting = tl.cast(1, tl.int32)
    pause = tl.cast(SHORTEST, tl.int32)
    since = tl.cast(0, tl.int64)
    while waiting != 0:
        waiting = waiting * 0
        drawn = tl.cast(0, tl.int32)
        missing = tl.cast(-1, tl.int32)
        turn = finished + 0
        while (turn < sources.count) & (drawn == 0):
            source = source_of_turn(turn, sources.pivot, sources.count)
            state = tl.cast(ARRIVED, tl.int32)
            word = counts_word(source, sources.groups)
            if C.ARRIVES:
                state = poll_signal(coming, word)
                if (state == FAILED) & (over == 0):
                    over = over * 0 + 1
                    give_up(FAILED, word, since * 0, coming, gate, words, watch)
            if (state != ARRIVED) & (over == 0):
                waiting = waiting * 0 + 1
                if missing < 0:
                    missing = word + 0
            else:
                settled = settle(source, tl.where(state == ARRIVED, COUNTED, LOST), sources, words.base)
                counted = (settled == COUNTED).to(tl.int32)
                some, its, tiles, late = tiles_left(
                    source, counted, over, sources, coming, words.base, num_n, watch.worker, lane, C
                )
                if some:
                    drawn = drawn * 0 + 1
                    at = sources.tickets + source * sources.groups + its.group
                    tl.atomic_max(at, words.base, sem="relaxed")
                    ticket = (tl.atomic_add(at, 1, sem="relaxed") - words.base).to(tl.int32)
                    if ticket < tiles:
                        found = found * 0 + 1
                        item = with_ticket(its, ticket)
                elif late < C.LANES:
                    waiting = waiting * 0 + 1
                    if missing < 0:
                        missing = rows_word(source, late, sources.groups)
                elif turn == finished:
                    finished += 1
            turn += 1
        if found != 0:
            waiting = waiting * 0
        elif drawn != 0:
            waiting = waiting * 0 + 1
        elif C.ARRIVES:
            if waiting != 0:
                over, since, pause = await_any(missing, since, pause, coming, gate, words, watch)
    return found, item, finished, over


@triton.jit
def pass_rows(item, passed, sources, words, gate, watch):
    """``passed``, after waiting for the rows of an item's group. ``passed.row_low``: the previous item's word."""
    over, row_low, row_high, column_low, column_high = passed
    if over == 0:
        over = is_over(words, watch).to(tl.int32)
    word = rows_word(item.source, item.group, sources.groups)
    if (over == 0) & (item.valid != 0) & (word != row_low):
        state, waited = wait(gate.rows, word, gate, words, watch)
        row_low = word + 0
        if state != ARRIVED:
            over = tl.cast(1, tl.int32)
            if state != OVER:
                give_up(state, word, waited, gate.rows, gate, words, watch)
    return Passed(over, row_low, row_high, column_low, column_high)


@triton.jit
def next_tile(finished, passed, sources, work, words, gate, watch, lane, C: tl.constexpr):
    """``(found, item, finished, passed)``: `take_from_source`, and the gate; the item is not valid if it is void."""
    found, item, finished, over = take_from_source(
        finished, passed.over, sources, work.num_n, words, gate, watch, lane, C
    )  # fmt: skip
    valid = item.valid
    if C.ARRIVES:
        passed = with_over(passed, over)
        if found != 0:
            passed = pass_rows(item, passed, sources, words, gate, watch)
            valid = tl.where(passed.over != 0, 0, valid)
    item = SourceItem(item.source, item.group, item.ticket, item.begin, item.rows, valid, item.tiles)
    return found, item, finished, passed


@triton.jit
def tile_of(its, k_steps, work, C: tl.constexpr):
    """``(item, span)``: the work item of a source's tile, in its group, and the group's rows."""
    zero = tl.cast(0, tl.int32)
    pm, pn = grouped(its.ticket, cdiv(its.rows, C.BLOCK_M), work.num_n, work.group)
    item = Item(its.group, pm, pn, zero, zero + k_steps, zero, zero + 1, zero - 1, zero)
    return item, Span(its.group, its.begin, its.begin + its.rows)


@triton.jit
def log_tile(item, its, began, sources, work, words, watch, lane, C: tl.constexpr):
    """``item`` with the place of its record, which is begun: the worker looked for a tile from ``began`` on.

    A source's records lie as its row tiles do, the groups' one behind the other.
    """
    counts = look_at(sources.counts + its.source * sources.groups + lane, lane < its.group, 0, C)
    first = its.source * (work.num_m // sources.count) + tl.sum(cdiv(counts, C.BLOCK_M), 0)
    place = (first + item.pm) * work.num_n + item.pn
    begin_span(words.log, place, watch.worker, began)
    if C.ARRIVES:
        chunk_span(words.log, place, rows_word(its.source, its.group, sources.groups))
    ready_span(words.log, place)
    return with_place(item, place)


# Publishing -----------------------------------------------------------------------------------------------------------


@triton.jit
def publish_tile(source, tiles, publishing):
    """Count a tile of a source that is stored; the worker that completes the count signals the source's rows."""
    if count_in(publishing.counts + source, tiles):
        tl.atomic_xchg(publishing.signals + source, publishing.epoch, sem="release", scope="sys")


@triton.jit
def publish_empty(sources, publishing, worker, workers, lane):
    """Signal the sources without rows, of which no tile is stored: one worker each."""
    for source in range(worker, sources.count, workers):
        inside = lane < sources.groups
        counts = tl.load(sources.counts + source * sources.groups + lane, mask=inside, other=0)
        if tl.max(tl.where(counts != 0, 1, 0), 0) == 0:
            tl.atomic_xchg(publishing.signals + source, publishing.epoch, sem="release", scope="sys")


# Ends -----------------------------------------------------------------------------------------------------------------


@triton.jit
def see_words(over, sources, gate, words, watch, lane, C: tl.constexpr):
    """Wait until all signals are set, also those of groups without rows; whether the launch is over."""
    pause = tl.cast(SHORTEST, tl.int32)
    since = tl.cast(0, tl.int64)
    source = tl.cast(0, tl.int32)
    while (source < sources.count) & (over == 0):
        first = counts_word(source, sources.groups)
        missing = first + 0
        state = poll_signal(gate.rows, first)
        if state != PENDING:
            inside = lane < sources.groups
            word = look_at(gate.rows.signals + first + 1 + lane, inside, 1, C)
            late = tl.min(tl.where(word == 0, lane, C.LANES), 0)
            missing = tl.where(late < C.LANES, first + 1 + late, -1)
        if missing < 0:
            source += 1
        else:
            over, since, pause = await_any(missing, since, pause, gate.rows, gate, words, watch)
    return over


@triton.jit
def clear_words(sources, gate, lane):
    """Zero the signals."""
    for source in range(sources.count):
        first = counts_word(source, sources.groups)
        tl.store(gate.rows.signals + first, 0)
        tl.store(gate.rows.signals + first + 1 + lane, lane * 0, mask=lane < sources.groups)


@triton.jit
def restore_sources(sources, lane):
    """Zero a captured launch's counters by source."""
    zero = (lane * 0).to(tl.int64)
    for source in range(sources.count):
        queue = source * sources.groups + lane
        tl.store(sources.tickets + queue, zero, mask=lane < sources.groups)
        tl.store(sources.settled + source, tl.cast(0, tl.int64))


@triton.jit
def leave_sources(sources, work, words, gate, watch, lane, C: tl.constexpr):
    """After STOP: the last worker out zeroes signals whose epoch is 0, or puts them under quarantine, and the counters.

    As `tilestream.kernels.device.gate.leave_gate`, and `tilestream.kernels.device.schedule.leave` without a gate.
    """
    if watch.leaves != 0:
        if count_out(work, words, words.base, watch.workers):
            if C.ARRIVES:
                if gate.rows.epoch == 0:
                    over = is_over(words, watch).to(tl.int32)
                    over = see_words(over, sources, gate, words, watch, lane, C)
                    if over == 0:
                        clear_words(sources, gate, lane)
                    else:
                        tl.store(gate.rows.quarantine, 1)
            if words.reset != 0:
                restore_sources(sources, lane)
                restore(work, words, C.ARRIVES)
