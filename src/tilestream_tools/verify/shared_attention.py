"""Model 3 for CDNA's attention: a stage holds a block's keys and its values, which are read at different times.

The text is `attend_direct` and `attend_staged`, as in `tilestream.kernels.cdna.attention`. A block is a step of
`tilestream_tools.verify.shared_ring`, whose operations, machine and properties apply. Step 0 of an item is its queries,
which lie in the first stage until they are in registers; its blocks follow.
"""

from __future__ import annotations

from tilestream.core.ring import after, before
from tilestream_tools.verify.shared_ring import Copy, Fetch, Have, Item, Put, Read, SharedRing, Turn, WaitLoads, meet

#: Slots of a stage.
KEYS, VALUES, OPERANDS = 0, 1, 2


def copy_block(stage: int, item: Item, block: int) -> Turn:
    """The copies of a block, both of its operands."""
    yield Copy(stage * OPERANDS + KEYS, item, 1 + block)
    yield Copy(stage * OPERANDS + VALUES, item, 1 + block)


def read(stage: int, operand: int, item: Item, step: int) -> Turn:
    """Read a slot, and have it."""
    yield Read(stage * OPERANDS + operand, item, step)
    yield Have()


def attend_direct(ring: SharedRing, item: Item) -> Turn:
    """An item by copies past the registers: `tilestream.kernels.cdna.attention.attend_direct`."""
    a_block, last = OPERANDS * ring.loads, item.steps - 1
    for slot in (KEYS, VALUES):
        yield Copy(slot, item, 0)
    yield WaitLoads(0)
    yield from meet()
    for slot in (KEYS, VALUES):
        yield from read(0, slot, item, 0)
    yield from meet()
    for i in range(ring.depth - 1):
        yield from copy_block(i, item, min(i, last))
    stage = 0
    for block in range(item.steps):
        yield WaitLoads(a_block * (ring.depth - 2))
        yield from meet()
        yield Read(stage * OPERANDS + KEYS, item, 1 + block)
        yield from copy_block(before(stage, ring.depth), item, min(block + ring.depth - 1, last))
        yield Have()
        yield from read(stage, VALUES, item, 1 + block)
        stage = after(stage, ring.depth)
    # The kernel waits for all of them at once, which is equivalent: no later step reads the last of them.
    for i in range(ring.depth - 1):
        yield WaitLoads(a_block * (ring.depth - 2 - i))
    yield from meet()


def attend_staged(ring: SharedRing, item: Item) -> Turn:
    """An item by way of registers, where each operand is waited for alone: `attend_staged` of the kernel."""
    last = item.steps - 1
    yield Fetch(item, 0)
    yield WaitLoads(0)
    yield from meet()
    for slot in (KEYS, VALUES):
        yield Put(slot, item, 0)
    yield from meet()
    for slot in (KEYS, VALUES):
        yield from read(0, slot, item, 0)
    yield from meet()
    for operand in (KEYS, VALUES):
        yield Fetch(item, 1, operand)
    for block in range(item.steps):
        for operand in (KEYS, VALUES):
            yield WaitLoads(ring.loads)
            yield Put(operand, item, 1 + block, operand)
            yield Fetch(item, 1 + min(block + 1, last), operand)
            yield from meet()
            yield from read(0, operand, item, 1 + block)
    yield WaitLoads(0)
