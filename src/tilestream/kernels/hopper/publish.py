"""Publishing in the Hopper kernel: a chunk of the output's rows is signalled when all of it is visible.

::

    an item is finished (a consumer's half of it):
        wait until its stores have landed: this thread's TMA stores, then the consumer's other threads
        for each chunk of its rows: add its rows to the chunk's count     (acquire and release, at device scope)
        the count is complete: restore it; signal                         (release, at system scope)

The protocol is `tilestream.core.loop.publish`, which the checker explores. A consumer waits only for its own stores,
never for a later item or another worker.

*Order* (invariant 7). ``tma.store_wait`` only waits until shared memory was read. Here the wait is for the writes
(``cp.async.bulk.wait_group`` without ``.read``). It orders them before this thread's next operations in the generic
proxy. After the barrier, one thread's release covers all stores of the consumer. Through the count, the release of the
consumer that completes it covers all consumers that have counted before. So the signal's release, at system scope,
covers all tiles of the chunk, for copy engines, other kernels and other GPUs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.core import chunks
from tilestream.kernels.device.sources import publish_tile as count_tile
from tilestream.kernels.hopper.compat import barrier, device

chunk_of = device(chunks.chunk_of)
rows_in = device(chunks.rows_in)


@gluon.jit
def landed(value):
    """``value``, after the writes of this thread's copies out of shared memory have completed."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def publish(row, count, rows, publishing):
    """Publish rows [row, row + count) of ``rows``, which this consumer has stored; see the module.

    ``publishing``: `tilestream.core.structs.Publishing`.
    """
    row = landed(row)
    barrier()
    end = gl.minimum(row + count, rows)
    if row < end:
        per_chunk = publishing.per_chunk
        for chunk in range(chunk_of(row, per_chunk), chunk_of(end - 1, per_chunk) + 1):
            here = rows_in(row, end, chunk, per_chunk)
            due = rows_in(0, rows, chunk, per_chunk) * publishing.times
            before = gl.atomic_add(publishing.counts + chunk, here, sem="acq_rel", scope="gpu")
            if before + here == due:
                gl.store(publishing.counts + chunk, 0)
                gl.atomic_xchg(publishing.signals + chunk, publishing.epoch, sem="release", scope="sys")


@gluon.jit
def publish_tile(publishing, e, item, row, C: gl.constexpr):
    """Publish a consumer's part of a tile, which begins at ``row`` of the accumulator."""
    if C.PUBLISH == "rows":
        publish(row, C.HALF_ROWS, e.rows, publishing)
    elif C.PUBLISH == "columns":  # with ``SWAP_AB`` the accumulator's columns are the output's rows
        publish(item.pn * C.COLUMNS, C.COLUMNS, e.columns, publishing)


@gluon.jit
def publish_source(source, parts, publishing):
    """Count this consumer's part of a tile of a source, which has so many; the consumer of the last one signals it."""
    count_tile(landed(source), parts, publishing)
