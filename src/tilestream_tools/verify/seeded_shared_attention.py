"""Seeded bugs of model 3 for attention: see `tilestream_tools.verify.shared_attention`."""

from __future__ import annotations

from tilestream.core.ring import after, before
from tilestream_tools.verify.seeded_shared_ring import changed, done, operations
from tilestream_tools.verify.shared_attention import (
    KEYS,
    OPERANDS,
    VALUES,
    attend_direct,
    attend_staged,
    copy_block,
    read,
)
from tilestream_tools.verify.shared_ring import Have, Item, Put, Read, SharedRing, Turn, WaitLoads, meet


def one_buffer_without_barrier(ring: SharedRing, item: Item) -> Turn:
    """One stage, read past the compiler's own waits: nothing keeps the next block's copies from others' reads."""
    for block in range(item.steps):
        yield from copy_block(0, item, block)
        yield WaitLoads(0)
        yield from meet()
        yield from read(0, KEYS, item, 1 + block)
        yield from read(0, VALUES, item, 1 + block)


def waits_count_groups(ring: SharedRing, item: Item) -> Turn:
    """A wait is told how many blocks may be in flight, where the hardware counts instructions."""
    a_block = OPERANDS * ring.loads
    return changed(
        attend_direct(ring, item), lambda op: WaitLoads(op.left // a_block) if isinstance(op, WaitLoads) else op
    )


def waits_leave_values_out(ring: SharedRing, item: Item) -> Turn:
    """A wait lets a block's values be in flight: by the time they are read, nobody has said that they are there."""
    return changed(
        attend_direct(ring, item),
        lambda op: WaitLoads(op.left + ring.loads) if isinstance(op, WaitLoads) and op.left else op,
    )


def values_overwritten(ring: SharedRing, item: Item) -> Turn:
    """The block ahead is copied to the stage that is at work: its keys have been read, its values are being read."""
    a_block, last = OPERANDS * ring.loads, item.steps - 1
    for i in range(ring.depth - 1):
        yield from copy_block(i, item, min(i, last))
    stage = 0
    for block in range(item.steps):
        yield WaitLoads(a_block * (ring.depth - 2))
        yield from meet()
        yield from read(stage, KEYS, item, 1 + block)
        yield Read(stage * OPERANDS + VALUES, item, 1 + block)
        yield from copy_block(stage, item, min(block + ring.depth - 1, last))
        yield Have()
        stage = after(stage, ring.depth)


def copies_before_the_barrier(ring: SharedRing, item: Item) -> Turn:
    """The copies ahead are started before the block's barrier: others still read the values of the block before."""
    a_block, last = OPERANDS * ring.loads, item.steps - 1
    for i in range(ring.depth - 1):
        yield from copy_block(i, item, min(i, last))
    stage = 0
    for block in range(item.steps):
        yield WaitLoads(a_block * (ring.depth - 2))
        yield from copy_block(before(stage, ring.depth), item, min(block + ring.depth - 1, last))
        yield from meet()
        yield from read(stage, KEYS, item, 1 + block)
        yield from read(stage, VALUES, item, 1 + block)
        stage = after(stage, ring.depth)
    yield WaitLoads(0)


def no_barrier_behind_queries(ring: SharedRing, item: Item) -> Turn:
    """A warp has its queries, and starts copies to where others still read theirs."""
    ops = operations(attend_direct(ring, item))
    barriers = [i for i, op in enumerate(ops) if op is None]
    for i, op in enumerate(ops):
        if i != barriers[1]:
            yield from done(op)


def no_barrier_between_items(ring: SharedRing, item: Item) -> Turn:
    """A warp brings the next item's queries while others read the last blocks of this one."""
    for op in operations(attend_direct(ring, item))[:-1]:
        yield from done(op)


def values_put_without_barrier(ring: SharedRing, item: Item) -> Turn:
    """Through registers: a warp reads values of which others have not put their shares."""
    return _put_without_barrier(ring, item, VALUES)


def keys_put_without_barrier(ring: SharedRing, item: Item) -> Turn:
    """Through registers: the same of keys."""
    return _put_without_barrier(ring, item, KEYS)


def _put_without_barrier(ring: SharedRing, item: Item, operand: int) -> Turn:
    ops = operations(attend_staged(ring, item))
    for i, op in enumerate(ops):
        before_read = [x.stage for x in ops[max(i - 2, 0) : i] if isinstance(x, Put) and x.step] == [operand]
        if op is not None or not before_read:
            yield from done(op)
