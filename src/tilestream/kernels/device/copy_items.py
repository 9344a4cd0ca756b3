"""Copy items on the device: `tilestream_tools.verify.copies.copy_items`, in the same steps.

All threads of a worker copy, before it takes its first tile; a Hopper worker does so before its warps specialise. A
round has enough words a thread to keep enough bytes in flight (`tilestream.core.copy_items.block`). Loads bypass the
first-level cache, since the source is read once. Stores stay in L2, where the tiles read them.

*Order* (invariant 7). A piece's stores precede its count, by a drain, a barrier and a release (`count_in`). The count
of the last piece acquires those of the others. The signal is a release at system scope. A reader acquires the signal,
and fences before copies of the asynchronous proxy, as for any producer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import copy_items as rules
from tilestream.kernels.device.jit import device
from tilestream.kernels.device.schedule import count_in, part_begin, part_size

piece_chunk = device(rules.piece_chunk)

HEAD: tl.constexpr = tl.constexpr(rules.HEAD)
COUNTERS: tl.constexpr = tl.constexpr(rules.COUNTERS)


@triton.jit
def copy_items(copies, coming, workers, lanes, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Take a copy item if one is left, and copy pieces until none is left.

    Parameters
    ----------
    copies
        `tilestream.core.copy_items.CopyArguments`: pointers to words of ``VECTOR`` elements.
    coming
        The `tilestream.core.structs.Incoming` of the operand that is copied. If its epoch is 0, a chunk is there when
        its word is not 0.
    lanes
        int32 ``[BLOCK]``: 0, 1, ...; its layout is the caller's.
    """
    if copies.copiers != 0:
        number = tl.atomic_add(copies.words, 1, sem="relaxed")
        if number == workers - 1:
            tl.store(copies.words, 0)
        if number < copies.copiers:
            pieces = tl.load(copies.table)
            per_chunk = tl.load(copies.table + 1)
            chunks = tl.load(copies.table + 2)
            pivot = tl.load(copies.table + 3)
            row_words = tl.load(copies.table + 4)
            ticket = tl.atomic_add(copies.words + 1, 1, sem="relaxed")
            while ticket < pieces:
                chunk = piece_chunk(ticket, per_chunk, chunks, pivot)
                first = tl.load(copies.table + HEAD + chunk)
                held = (tl.load(copies.table + HEAD + chunk + 1) - first) * row_words
                part = ticket % per_chunk
                begin = first.to(tl.int64) * row_words + part_begin(held, per_chunk, part)
                size = part_size(held, per_chunk, part) * VECTOR
                copy_piece(copies.source + begin * VECTOR, copies.target + begin * VECTOR, size, lanes, BLOCK)
                if count_in(copies.words + COUNTERS + chunk, per_chunk):
                    epoch = tl.where(coming.epoch == 0, 1, coming.epoch)
                    tl.atomic_xchg(coming.signals + chunk, epoch, sem="release", scope="sys")
                ticket = tl.atomic_add(copies.words + 1, 1, sem="relaxed")
            if ticket == pieces + copies.copiers - 1:
                tl.store(copies.words + 1, 0)


@triton.jit
def copy_piece(source, target, size, lanes, BLOCK: tl.constexpr):
    """Copy ``size`` elements."""
    for at in range(0, size, BLOCK):
        here = at + lanes < size
        x = tl.load(source + at + lanes, mask=here, cache_modifier=".cg")
        tl.store(target + at + lanes, x, mask=here)
