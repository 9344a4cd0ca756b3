"""Kernels of a mixture of experts over ranks: rows pushed to the ranks of their experts, results pushed back and added.

::

    push_rows        for each rank: mark, head, signal there; then, some workers to the own rank, the others to the
                         others in turn, some blocks at a time
                         rows of x -> the rank's memory; landed: count them; an expert's last: signal it there
    take_rows        wait for a source's head and rows; its mark; clear their signals; where its experts' rows end
    multiply_rows    gate * up, of the rows that there are
    push_results     block by block: results -> the source's memory; landed: count; the last: signal it there
    take_results     wait for all ranks' results; clear their signals
    add_results      out[token] = sum of weight * result, in the order of the token's choices; NaN, if the call is void

The order is that of `tilestream.core.protocols.experts`. ``begin_call`` of `tilestream.kernels.portable.rank_calls`
precedes it, and ``end_call`` precedes ``add_results``. Only ``take_rows`` and ``take_results`` wait. Each is one
program of one warp; each wait has a deadline, and ends when the group is broken.

*Landed* (invariant 7). A drain, a barrier and a release at *system* scope order the stores of a block before its count,
because they go to another GPU's memory: each worker waits until its own stores have landed there. The count of the last
block acquires the other counts, and the signal is a release again. Later launches read the rows.

*Memory of a rank*, the same on all::

    rows     [WORLD, CAPACITY, WIDTH]    of each source, by expert
    results  [CAPACITY, WIDTH]           of the own choices, sorted by expert: each rank's in their places
    heads    int32 [WORLD, 1 + E]        of each source: where its results go there, and its rows for each expert

They have run in Triton's interpreter and, as compiled for AMD, on the emulator; not on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import error_record as record
from tilestream.core.protocols import replay
from tilestream.kernels.device.clock import LONGEST, SHORTEST, latest, nap, present
from tilestream.kernels.device.schedule import LINE, drain
from tilestream.kernels.portable.rank_calls import acquired, give_up, report, word_at

VOID, STAMP, MARKS = map(tl.constexpr, (replay.VOID, replay.STAMP, replay.MARKS))
EXPIRED, QUARANTINED = map(tl.constexpr, (record.EXPIRED, record.QUARANTINED))

#: Rows of a block, and columns of it that a worker copies at once: eight times 16 bytes of 16-bit elements for each of
#: its 256 threads.
ROWS, COLUMNS = 16, 1024
#: Elements that `push_results` copies at once, as many as `push_rows`; and those that `multiply_rows` handles at once.
PUSHED, BLOCK = ROWS * COLUMNS, 8192
#: Columns that a program of `add_results` adds at once.
ADDED = 1024
WARPS = 8


@triton.jit
def count_landed(count, parts, whole):
    """Count ``parts`` of ``whole`` that this worker has stored. Returns whether they were the last; restores the count.

    See "landed" in the module.
    """
    drain()
    tl.debug_barrier()
    last = tl.atomic_add(count, parts, sem="acq_rel", scope="sys") + parts == whole
    tl.debug_barrier()
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def words_of(slots, peer, WORLD: tl.constexpr):
    """The signals of a rank."""
    return tl.load(slots + WORLD + peer).to(tl.pointer_type(tl.int32))


@triton.jit
def elements_of(slots, peer, at, x):
    """A rank's memory from byte ``at`` on, a multiple of 256, as elements like those of ``x``."""
    return tl.multiple_of((tl.load(slots + peer) + at).to(tl.pointer_type(x.dtype.element_ty)), 16)


@triton.jit
def tell_peer(starts, control, places, slots, rank, peer, E, HEADS, WORLD: tl.constexpr, BLOCK_E: tl.constexpr):
    """Mark, head, and its signal. Experts without rows are signalled here: none of their rows will be counted."""
    first = tl.load(starts + peer * E)
    head = (tl.load(slots + peer) + HEADS).to(tl.pointer_type(tl.int32)) + rank * (1 + E)
    signals = words_of(slots, peer, WORLD)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < E
    at = starts + peer * E + expert
    count = tl.load(at + 1, mask=inside, other=0) - tl.load(at, mask=inside, other=0)
    if peer != rank:
        tl.store(word_at(places, peer) + MARKS + rank, tl.load(control + STAMP))
    tl.store(head, first)
    tl.store(head + 1 + expert, count, mask=inside)
    tl.store(signals + WORLD + rank * E + expert, tl.full((BLOCK_E,), 1, tl.int32), mask=inside & (count == 0))
    drain()  # more experts than lanes are several waves' stores
    tl.debug_barrier()
    tl.atomic_xchg(signals + rank, 1, sem="release", scope="sys")


@triton.jit
def count_rows(starts, done, slots, rank, peer, expert, low, high, E, WORLD: tl.constexpr):
    """Count rows [low, high) of the choices as landed, from ``expert`` on. Returns the expert of the last."""
    signals = words_of(slots, peer, WORLD) + WORLD + rank * E
    begin = low
    while begin < high:
        end = tl.load(starts + peer * E + expert + 1)
        while end <= begin:
            expert += 1
            end = tl.load(starts + peer * E + expert + 1)
        stop = tl.minimum(end, high)
        whole = end - tl.load(starts + peer * E + expert)
        if count_landed(done + peer * E + expert, stop - begin, whole):
            tl.atomic_xchg(signals + expert, 1, sem="release", scope="sys")
        begin = stop
    return expert


@triton.jit(do_not_specialize=("rank", "pushers", "blocks", "own_blocks"))
def push_rows(
    x, order, starts, done, control, places, slots, rank, pushers, blocks, own_blocks,
    E, TOP_K, CAPACITY, WIDTH, HEADS, WORLD: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Push the rows of ``x`` to the ranks of their experts.

    So many ``pushers`` push to the other ranks, one after the other. They hold their SMs from the beginning, and go on
    beside the products. All other workers push to the own rank: no product can begin before, so no SM is idle.

    To wait until stores have landed takes as long as many copies, so a worker counts several blocks at once.

    Parameters
    ----------
    x
        ``[T, WIDTH]``, contiguous.
    order, starts
        Choices sorted by expert, ``int64[T * TOP_K]``; where each expert's begin, ``int32[WORLD * E + 1]``.
    done
        ``int32[WORLD * E]``, zeros: how many rows for each expert have landed.
    control, places
        See `tilestream.kernels.portable.rank_calls.begin_call`.
    slots
        ``int64[2 * WORLD]``: where each rank's memory begins, then its signals.
    blocks, own_blocks
        Blocks of `ROWS` that a worker copies before it counts them, for other ranks and for the own.
    HEADS
        Bytes in front of the heads.
    """
    worker = tl.program_id(0)
    own = worker >= pushers
    worker = tl.where(own, worker - pushers, worker)
    workers = tl.where(own, tl.num_programs(0) - pushers, pushers)
    begin, turns = tl.where(own, 0, 1), tl.where(own, 1, WORLD)
    if acquired(word_at(places, WORLD + rank)) == 0:
        for turn in range(begin + worker, turns, workers):
            tell_peer(starts, control, places, slots, rank, (rank + turn) % WORLD, E, HEADS, WORLD, BLOCK_E)
        step = ROWS * tl.where(own, own_blocks, blocks)
        for turn in range(begin, turns):
            peer = (rank + turn) % WORLD
            first = tl.load(starts + peer * E)
            end = tl.load(starts + (peer + 1) * E)
            target = elements_of(slots, peer, 0, x) + rank.to(tl.int64) * CAPACITY * WIDTH
            expert = tl.cast(0, tl.int32)
            for low in range(first + worker * step, end, workers * step):
                high = tl.minimum(low + step, end)
                for at in range(low, high, ROWS):
                    row = at + tl.arange(0, ROWS)
                    inside = row < high
                    token = (tl.load(order + row, mask=inside, other=0) // TOP_K).to(tl.int64)
                    for column in range(0, WIDTH, COLUMNS):
                        columns = column + tl.arange(0, COLUMNS)
                        mask = inside[:, None] & (columns < WIDTH)[None, :]
                        found = tl.load(x + token[:, None] * WIDTH + columns[None, :], mask=mask)
                        into = (row - first).to(tl.int64)[:, None] * WIDTH + columns[None, :]
                        tl.store(target + into, found, mask=mask)
                expert = count_rows(starts, done, slots, rank, peer, expert, low, high, E, WORLD)


@triton.jit
def await_all(words, mask, broken, clock, begin, allowed):
    """Wait until all ``words`` under ``mask`` are set: 0, or why they are waited for no more, and the missing ones."""
    none = tl.zeros_like(mask.to(tl.int32))
    missing = mask & (tl.atomic_add(words, none, mask=mask, sem="acquire", scope="sys") == 0)
    left = tl.sum(missing.to(tl.int32))
    over = tl.cast(0, tl.int32)
    if acquired(broken) != 0:
        over = tl.cast(QUARANTINED, tl.int32)
    pause = tl.cast(SHORTEST, tl.int32)
    while (left != 0) & (over == 0):
        nap(pause)
        pause = tl.minimum(2 * pause, LONGEST)
        missing = mask & (tl.atomic_add(words, none, mask=mask, sem="acquire", scope="sys") == 0)
        left = tl.sum(missing.to(tl.int32))
        if left != 0:
            if acquired(broken) != 0:
                over = tl.cast(QUARANTINED, tl.int32)
            elif latest(clock) - begin > allowed:
                over = tl.cast(EXPIRED, tl.int32)
    return over, missing


@triton.jit(do_not_specialize=("allowed", "op", "key", "rank", "source"))
def take_rows(
    signals, control, places, slots, taken, ends, records, claims, allowed: tl.int64, op, key, rank, source,
    E, HEADS, WORLD: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Wait for the rows of ``source``.

    Parameters
    ----------
    taken
        ``int32[2]``: whether the source's rows may be computed, and where its results go there.
    ends
        ``int32[E]``: where the rows of each expert end; zeros, if they may not.
    """
    clock = claims + LINE
    begin = present(clock)
    broken = word_at(places, WORLD + rank)
    i = tl.arange(0, BLOCK_E)
    inside = i < E
    rows = WORLD + source * E + i
    over, missing = await_all(signals + source + 0 * i, i == 0, broken, clock, begin, allowed)
    late = source
    if over == 0:
        over, missing = await_all(signals + rows, inside, broken, clock, begin, allowed)
        if over != 0:
            late = late * 0 + tl.min(tl.where(missing, rows, WORLD + WORLD * E))
    if over == 0:
        if (source != rank) & (acquired(control + MARKS + source) != tl.load(control + STAMP)):
            over = tl.cast(QUARANTINED, tl.int32)
    if over != 0:
        if (over == EXPIRED) | (acquired(broken) == 0):
            give_up(places, WORLD)
        report(over, late, present(clock) - begin, records, claims, allowed, op, key)
        tl.store(taken, 0)
        tl.store(ends + i, tl.zeros((BLOCK_E,), tl.int32), mask=inside)
    else:
        head = (tl.load(slots + rank) + HEADS).to(tl.pointer_type(tl.int32)) + source * (1 + E)
        count = tl.load(head + 1 + i, mask=inside, other=0)
        tl.store(ends + i, tl.cumsum(count), mask=inside)
        tl.store(taken + 1, tl.load(head))
        tl.store(taken, 1)
        tl.store(signals + source, 0)
        tl.store(signals + rows, tl.zeros((BLOCK_E,), tl.int32), mask=inside)


@triton.jit
def multiply_rows(gate, up, ends, E, WIDTH, BLOCK: tl.constexpr):
    """``gate *= up`` of the rows up to ``ends[E - 1]``; both ``[rows, WIDTH]``, contiguous."""
    count = tl.load(ends + E - 1).to(tl.int64) * WIDTH
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for at in range(tl.program_id(0).to(tl.int64) * BLOCK, count, step):
        i = at + tl.arange(0, BLOCK)
        inside = i < count
        product = tl.load(gate + i, mask=inside).to(tl.float32) * tl.load(up + i, mask=inside).to(tl.float32)
        tl.store(gate + i, product.to(gate.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("rank", "source"))
def push_results(
    results, taken, ends, done, slots, rank, source, E, WIDTH, RESULTS, WORLD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Push the results of a source's rows to their places there.

    Parameters
    ----------
    results
        ``[rows, WIDTH]``, contiguous.
    taken, ends
        See `take_rows`.
    done
        ``int32[1]``, 0: how many workers have stored their results.
    RESULTS
        Bytes in front of the results in a rank's memory.
    """
    workers = tl.num_programs(0)
    if tl.load(taken) != 0:
        count = tl.load(ends + E - 1).to(tl.int64) * WIDTH
        target = elements_of(slots, source, RESULTS, results) + tl.load(taken + 1).to(tl.int64) * WIDTH
        step = workers.to(tl.int64) * BLOCK
        for at in range(tl.program_id(0).to(tl.int64) * BLOCK, count, step):
            i = at + tl.arange(0, BLOCK)
            inside = i < count
            tl.store(target + i, tl.load(results + i, mask=inside), mask=inside)
        if count_landed(done, 1, workers):
            tl.atomic_xchg(words_of(slots, source, WORLD) + WORLD * (1 + E) + rank, 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=("allowed", "op", "key", "rank"))
def take_results(
    signals, control, places, records, claims, allowed: tl.int64, op, key, rank, E, WORLD: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Wait for the results of all ranks, and clear their signals; else the call is void."""
    clock = claims + LINE
    begin = present(clock)
    broken = word_at(places, WORLD + rank)
    i = tl.arange(0, BLOCK_W)
    inside = i < WORLD
    chunk = WORLD * (1 + E) + i
    over, missing = await_all(signals + chunk, inside, broken, clock, begin, allowed)
    if over == 0:
        tl.store(signals + chunk, tl.zeros((BLOCK_W,), tl.int32), mask=inside)
    else:
        if over == EXPIRED:
            give_up(places, WORLD)
        late = tl.min(tl.where(missing, chunk, WORLD * (2 + E)))
        report(over, late, present(clock) - begin, records, claims, allowed, op, key)
    tl.store(control + VOID, (over != 0).to(tl.int32))


@triton.jit(do_not_specialize=("tokens",))
def add_results(
    results, weights, place, starts, control, out, tokens, CHOICES, WIDTH, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``out[token] = sum of weight * result``, in the order of its choices; NaN, if the call is void.

    Each product is rounded before it is added, as torch's is: compile it without fused multiply-adds.

    Parameters
    ----------
    results
        ``[rows, WIDTH]``, sorted by expert.
    weights
        ``[T, TOP_K]``, contiguous.
    place
        ``int64[T * TOP_K]``: the row of each choice's result.
    starts
        ``int32[CHOICES + 1]``: entry ``CHOICES``, of all ranks' experts, ends the rows. A choice behind them is of an
        expert that does not exist: its token becomes NaN.
    tokens
        T. No other argument depends on it, so that any number of tokens has one compiled kernel.
    """
    rows = tl.load(starts + CHOICES)
    if tl.load(control + VOID) != 0:
        rows = rows * 0
    blocks = tl.cdiv(WIDTH, BLOCK)
    for item in range(tl.program_id(0), tokens * blocks, tl.num_programs(0)):
        token = (item // blocks).to(tl.int64)
        column = item % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        acc = tl.zeros((BLOCK,), tl.float32)
        for choice in tl.static_range(TOP_K):
            row = tl.load(place + token * TOP_K + choice)
            exists = row < rows
            found = tl.load(results + row * WIDTH + column, mask=inside & exists, other=0.0).to(tl.float32)
            weighted = found * tl.load(weights + token * TOP_K + choice).to(tl.float32)
            acc += tl.where(exists, weighted, float("nan"))
        tl.store(out + token * WIDTH + column, acc.to(out.dtype.element_ty), mask=inside)
