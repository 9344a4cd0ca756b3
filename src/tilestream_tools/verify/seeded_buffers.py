"""Seeded bugs of model 2 in how a tile goes out: through C buffers that stores still read."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from tilestream.schedule import WorkItem
from tilestream_tools.verify.protocol import (
    Drain,
    Epilogue,
    Fence,
    Fill,
    Finish,
    MathState,
    Ring,
    Settle,
    Store,
    math_turn,
    store,
)
from tilestream_tools.verify.seeded_ring import Loop, rewritten

Way = Generator[Any, Any, None]


def one_store_too_many(ring: Ring, item: WorkItem) -> Way:
    """Before a buffer is filled as many stores may read as there are buffers: this one's, too."""
    yield Epilogue(item)
    yield from rewritten(
        store(ring, item), lambda op: op._replace(in_flight=ring.buffers) if isinstance(op, Drain) else op
    )


def odd_strips_not_waited_for(ring: Ring, item: WorkItem) -> Way:
    """One store may always read: also where a tile begins with the buffer that the one before ended with."""
    yield Epilogue(item)
    yield from rewritten(
        store(ring, item), lambda op: op._replace(in_flight=ring.buffers - 1) if isinstance(op, Drain) else op
    )


def stored_before_filled(ring: Ring, item: WorkItem) -> Way:
    """A strip's store is started, then its buffer is filled."""
    yield Epilogue(item)
    for strip in range(ring.strips):
        yield Drain(ring.pending(strip))
        yield Store(strip % ring.buffers, item, strip)
        yield Fill(strip % ring.buffers, item, strip)
        yield Fence()


def fence_forgotten(ring: Ring, item: WorkItem) -> Way:
    """A buffer is filled and stored with no fence between the two: the store may read what was there before."""
    yield Epilogue(item)
    yield from rewritten(store(ring, item), lambda op: None if isinstance(op, Fence) else op)


def stores_every_part(ring: Ring, item: WorkItem) -> Way:
    """A part of a tile is stored whether it is the last or not."""
    yield Epilogue(item)
    if item.parts > 1:
        yield Settle(item)
    yield from store(ring, item)


def last_strip_forgotten(ring: Ring, item: WorkItem) -> Way:
    """The strips are counted by pairs, and a last one without a second is left out."""
    yield Epilogue(item)
    yield from rewritten(
        store(ring, item), lambda op: None if isinstance(op, Fill | Store) and op.strip == ring.strips // 2 * 2 else op
    )


def leaves_while_stores_read(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """At STOP the consumer leaves, and the kernel ends, before its stores have read their buffers."""
    return rewritten(
        math_turn(ring, finish, consumer, state), lambda op: None if isinstance(op, Drain) and not op.in_flight else op
    )


@dataclass(frozen=True)
class SharedBuffers(Ring):
    """Both consumers write to the C buffers of the first."""

    def owner(self, consumer: int) -> int:
        """Whose C buffers a consumer writes to."""
        return 0
