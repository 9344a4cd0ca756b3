"""Kernels around a call between ranks that a CUDA graph may hold: see `tilestream.core.protocols.replay`.

::

    begin_call     count the call; wait until the peers have read the rows of the last one; signal the own chunks
    await_parts    a sum: wait for all parts, clear their signals
    end_call       look at the marks; tell the peers that their rows are read
    void_out       NaN, where the call has failed
    end_or_void    both, for one result: a graph's kernels begin one after the other, and each begin takes time

All but `void_out` are one program of one warp. Each wait has the call's deadline, and ends when the group is broken.
All but `end_or_void` run between two H200; all run in Triton's interpreter in the tests.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import error_record as record
from tilestream.core.protocols import replay
from tilestream.kernels.device.clock import LONGEST, SHORTEST, latest, nap, present
from tilestream.kernels.device.schedule import LINE

COUNT, VOID, STAMP, MARKS = map(tl.constexpr, (replay.COUNT, replay.VOID, replay.STAMP, replay.MARKS))
EXPIRED, QUARANTINED = map(tl.constexpr, (record.EXPIRED, record.QUARANTINED))
RECORDS, FIELDS = map(tl.constexpr, (record.RECORDS, record.FIELDS))

#: Elements that a program of `void_out` writes at once, and those that the one program of `end_or_void` does.
BLOCK, BLOCK_OF_ONE = 4096, 1024


@triton.jit
def acquired(word):
    """Load a word that peers write. Later reads see what they wrote before it."""
    return tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def word_at(places, i):
    """The word whose address is entry ``i`` of ``places``: see `begin_call`."""
    return tl.load(places + i).to(tl.pointer_type(tl.int32))


@triton.jit
def give_up(places, WORLD: tl.constexpr):
    """Break the group on every rank."""
    for r in tl.static_range(WORLD):
        tl.atomic_xchg(word_at(places, WORLD + r), 1, sem="release", scope="sys")


@triton.jit
def report(why, chunk, waited, records, claims, allowed, op, key):
    """Write a record: `tilestream.core.error_record`."""
    number = tl.atomic_add(claims, 1, sem="relaxed")
    at = records + (number % RECORDS) * FIELDS
    tl.store(at + 1, why)
    tl.store(at + 2, op)
    tl.store(at + 3, 0)
    tl.store(at + 4, 0)
    tl.store(at + 5, chunk)
    tl.store(at + 6, key)
    for i in tl.static_range(7, 12):  # no epoch, and no tile
        tl.store(at + i, 0 if i == 7 else -1)
    tl.store(at + 12, waited)
    tl.store(at + 13, allowed)
    tl.debug_barrier()
    tl.atomic_xchg(at, number + 1, sem="release", scope="sys")


@triton.jit
def await_word(word, least, broken, clock, begin, allowed):
    """Wait until ``word`` is at least ``least``, compared cyclically: 0, or why it is waited for no more."""
    over = tl.cast(0, tl.int32)
    there = acquired(word) - least >= 0
    pause = tl.cast(SHORTEST, tl.int32)
    while (there == 0) & (over == 0):
        nap(pause)
        pause = tl.minimum(2 * pause, LONGEST)
        there = acquired(word) - least >= 0
        if there == 0:
            if acquired(broken) != 0:
                over = tl.cast(QUARANTINED, tl.int32)
            elif latest(clock) - begin > allowed:
                over = tl.cast(EXPIRED, tl.int32)
    return over


@triton.jit(do_not_specialize=("allowed", "op", "key", "rank", "batches", "parts", "form"))
def begin_call(
    signals, control, places, records, claims, allowed: tl.int64, op, key, rank, batches, parts, form,
    WORLD: tl.constexpr,
):  # fmt: skip
    """Count a call and wait until its slots are free.

    Parameters
    ----------
    signals, control
        Of the call's slot: ``int32``, a signal a chunk; and the words of `tilestream.core.protocols.replay`.
    places
        ``int64[2 * WORLD]``: where ``control`` is on each rank, then where the word is that breaks the group there.
    allowed
        The deadline in nanoseconds.
    key
        By which a record knows the signals.
    batches, parts
        Of the own rows, whose chunks are signalled here; no batches: there are none.
    form
        Of the call: `tilestream.core.protocols.replay.form_number`.
    """
    clock = claims + LINE
    begin = present(clock)
    call = tl.load(control + COUNT) + 1
    broken = word_at(places, WORLD + rank)
    over = tl.cast(0, tl.int32)
    late = tl.cast(0, tl.int32)
    for r in range(WORLD):
        if (r != rank) & (over == 0):
            over = await_word(control + MARKS + WORLD + r, call - 1, broken, clock, begin, allowed)
            late = late * 0 + r
    if over == EXPIRED:
        give_up(places, WORLD)
        report(over, late * parts, present(clock) - begin, records, claims, allowed, op, key)
    tl.store(control + COUNT, call)
    tl.store(control + STAMP, call ^ form)
    for i in range(batches * parts):
        tl.store(signals + (i // parts * WORLD + rank) * parts + i % parts, 1)


@triton.jit(do_not_specialize=("allowed", "op", "key", "rank", "parts"))
def await_parts(
    signals, control, places, records, claims, allowed: tl.int64, op, key, rank, parts, WORLD: tl.constexpr
):  # fmt: skip
    """Wait for all chunks of the peers, ``parts`` each, and clear their signals; else the call is void."""
    clock = claims + LINE
    begin = present(clock)
    broken = word_at(places, WORLD + rank)
    over = tl.cast(0, tl.int32)
    late = tl.cast(0, tl.int32)
    if acquired(broken) != 0:
        over = tl.cast(QUARANTINED, tl.int32)
    for chunk in range(WORLD * parts):
        if (chunk // parts != rank) & (over == 0):
            over = await_word(signals + chunk, 1, broken, clock, begin, allowed)
            late = late * 0 + chunk
    if over == 0:
        for chunk in range(WORLD * parts):
            tl.store(signals + chunk, 0)
    else:
        if over == EXPIRED:
            give_up(places, WORLD)
        report(over, late, present(clock) - begin, records, claims, allowed, op, key)
    tl.store(control + VOID, (over != 0).to(tl.int32))


@triton.jit
def end(control, places, records, claims, op, key, rank, WORLD: tl.constexpr):
    """See `end_call`; whether the call is void."""
    call = tl.load(control + COUNT)
    stamp = tl.load(control + STAMP)
    over = acquired(word_at(places, WORLD + rank)) != 0
    for r in range(WORLD):
        if r != rank:
            over = over | (acquired(control + MARKS + r) != stamp)
    if over:
        give_up(places, WORLD)
        none = tl.cast(0, tl.int64)
        report(QUARANTINED, 0, none, records, claims, none, op, key)
    tl.store(control + VOID, over.to(tl.int32))
    for r in range(WORLD):
        if r != rank:
            tl.atomic_xchg(word_at(places, r) + MARKS + WORLD + rank, call, sem="release", scope="sys")
    return over


@triton.jit
def fill(out, count, first, step, NAN: tl.constexpr, BLOCK: tl.constexpr):
    """Fill every ``step``-th block of ``out`` with ``NAN``, from element ``first`` on: see `void_out`."""
    for at in range(first, count, step):
        i = at + tl.arange(0, BLOCK)
        tl.store(out + i, tl.full((BLOCK,), NAN, out.dtype.element_ty), mask=i < count)


@triton.jit(do_not_specialize=("op", "key", "rank"))
def end_call(control, places, records, claims, op, key, rank, WORLD: tl.constexpr):
    """After the call's readers: note whether the call is void, and tell the peers that their rows are read."""
    end(control, places, records, claims, op, key, rank, WORLD)


@triton.jit(do_not_specialize=("op", "key", "rank"))
def end_or_void(
    control, places, records, claims, out, op, key, rank, count, WORLD: tl.constexpr, NAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`end_call`, then `void_out` by the same program, which is slow where a call is void, and seldom has to be."""
    if end(control, places, records, claims, op, key, rank, WORLD):
        zero = tl.cast(0, tl.int64)
        fill(out, count, zero, zero + BLOCK, NAN, BLOCK)


@triton.jit
def void_out(out, control, count, NAN: tl.constexpr, BLOCK: tl.constexpr):
    """Fill ``out`` with ``NAN`` if the call is void.

    Parameters
    ----------
    out
        Integers as wide as the result's elements, ``count`` of them.
    NAN
        The bits of a NaN.
    """
    if tl.load(control + VOID) != 0:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        fill(out, count, first, tl.num_programs(0).to(tl.int64) * BLOCK, NAN, BLOCK)
