"""The load loop and the math loops of one worker of the Hopper GEMM, over an item ring and a ring of stages.

::

    load loop                                   math loop
      item = next item, its gate passed, or STOP  wait item_full[slot]
      wait item_empty[slot]                       item = slots[slot]
      slots[slot] = item                          arrive item_empty[slot]
      arrive item_full[slot]                      STOP: wait until no store reads a C buffer; leave
      STOP: leave                                 for k in the item's K steps:
      for k in the item's K steps:                  wait full[stage]
        wait empty[stage]                           mma on the stage
        expect bytes at full[stage]                 wait until 1 mma is in flight: the one before is done
        load into the stage -> full[stage]          arrive empty[the stage before]
                                                  wait until 0 are in flight; arrive empty[the last stage]
                                                  void item: NaN, and no stage is read
                                                  for strip in the tile's strips:
                                                    wait until 1 store reads (0, with one C buffer, and
                                                      where the store before used the same one of two)
                                                    fill the strip's C buffer; fence; store it

This models `tilestream.kernels.hopper.gemm` with `ring` and `epilogue`, operation by operation; a test runs the code of
both and compares. Both use the functions of `tilestream.core.ring` for places in a ring. Both loops process the same
items, and the math loop takes the K counts from the items. STOP has no K steps. A *void* item, whose gate found the
launch over, has a negative count: K runs backwards, so the load loop loads no step of it and the math loop waits for
none. A fence (`Acquired`) orders the gate's reads before the copies after it.

`Ring.consumers` gives the math loops:

- ``single``: one consumer;
- ``cooperative``: two, each with half of every tile: both read every stage, and ``empty`` counts 2;
- ``triple``: three, each with a third of every tile; ``empty`` counts 3;
- ``ping_pong``: two that take turns: a consumer does every other item and steps over the stages of the others. Order
  barriers pass the tensor cores on, so that one's epilogue overlaps with the other's mma.

An operation of a consumer stands for all its threads. Each thread performs a `WaitBarrier`. One thread performs an
`Arrive`, before which the compiler synchronises them (``bar.sync`` of the consumer's own barrier). The model omits
chained launches (each loop waits for the previous kernel, then begins) and the operands of an epilogue.

The loops are generators like `tilestream.core.loop.work`: one turn is one item.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tilestream.core.consumers import sharing
from tilestream.core.ring import before, skip, step
from tilestream.schedule import WorkItem

Consumers = Literal["single", "cooperative", "triple", "ping_pong"]


class Barrier(NamedTuple):
    """An mbarrier: ``full`` and ``empty`` of a stage, ``item_full`` and ``item_empty`` of a slot, ``order``."""

    name: str
    at: int

    def __str__(self) -> str:
        return f"{self.name}[{self.at}]"


class Next(NamedTuple):
    """Ask the schedule. Answer: a work item, or None for STOP."""


class Pass(NamedTuple):
    """Wait at the item's gate. Answer: 1 arrived, 0 the launch is over."""

    item: WorkItem


class Acquired(NamedTuple):
    """``fence.proxy.async.global``: later loads see the memory that the load loop has seen (invariant 7)."""


class WaitBarrier(NamedTuple):
    """``mbarrier.wait``: blocks while the barrier is in a phase of parity ``parity``."""

    barrier: Barrier
    parity: int


class Arrive(NamedTuple):
    """``mbarrier.arrive``: one of the arrivals that the barrier counts."""

    barrier: Barrier


class Expect(NamedTuple):
    """``mbarrier.expect``: one arrival, and the phase also waits for the bytes of one load."""

    barrier: Barrier


class Load(NamedTuple):
    """Start the copy of K step ``k`` of an item into a stage. When it lands, ``barrier`` gets its bytes."""

    stage: int
    item: WorkItem
    k: int
    barrier: Barrier


class Put(NamedTuple):
    """Write an item, or None for STOP, to a slot of the item ring."""

    slot: int
    item: WorkItem | None


class Get(NamedTuple):
    """Read a slot of the item ring. Answer: its content."""

    slot: int


class Mma(NamedTuple):
    """Start the asynchronous multiplication of a stage into the accumulator."""

    stage: int


class Retire(NamedTuple):
    """``warpgroup_mma_wait``: wait until at most ``in_flight`` multiplications have not finished."""

    in_flight: int


class Poisoned(NamedTuple):
    """Fill the accumulator with NaN: the product of a void item."""

    item: WorkItem


class Epilogue(NamedTuple):
    """Take the accumulator as the result of ``item``, and clear it."""

    item: WorkItem


class Fixup(NamedTuple):
    """Fixup a part of a tile. Answer: 1 if it was the last, and this consumer stores the tile.

    `tilestream_tools.verify.gpu_loop.fixup` is its protocol. For a worker's rings both answers are possible.
    """

    item: WorkItem


class Drain(NamedTuple):
    """``tma.store_wait``: wait until at most ``in_flight`` of this consumer's stores have yet to read their buffer."""

    in_flight: int


class Fill(NamedTuple):
    """Write a strip of an item's result to a C buffer of this consumer."""

    buffer: int
    item: WorkItem
    strip: int


class Fence(NamedTuple):
    """``fence_async_shared``: copies see this consumer's writes to shared memory."""


class Store(NamedTuple):
    """Start the copy of a strip of an item from a C buffer to the output. It reads the buffer until a `Drain`."""

    buffer: int
    item: WorkItem
    strip: int


@dataclass(frozen=True)
class Ring:
    """The shapes of both rings, and the form of the math loops.

    Attributes
    ----------
    depth
        Number of stages: at least two, or one if ``promoted``.
    items
        Number of slots of the item ring.
    promoted
        fp8 without fast accumulation: the loop waits for a K step's product, and releases its stage, before the next.
    strips
        Number of a tile's strips, each stored from a C buffer; 0 if a tile is stored from registers.
    most_buffers
        The most C buffers of a math loop. There are no more than strips.
    ctas
        CTAs that load for each other. Each has its own rings, whose ``empty`` barriers have the arrivals of the
        consumers of all CTAs: see `tilestream_tools.verify.pair`.
    """

    depth: int
    items: int = 2
    consumers: Consumers = "single"
    promoted: bool = False
    strips: int = 0
    most_buffers: int = 2
    ctas: int = 1

    @property
    def num_consumers(self) -> int:
        """The number of math loops."""
        return max(sharing(self.consumers), 2 if self.consumers == "ping_pong" else 1)

    @property
    def buffers(self) -> int:
        """The number of C buffers of a math loop: two if a tile has several strips."""
        return max(1, min(self.most_buffers, self.strips))

    def pending(self, strip: int) -> int:
        """The number of stores that may be in flight when a strip's buffer is filled: those that read other buffers.

        With two buffers and an odd number of strips a tile begins with the last buffer of the previous tile.
        """
        return 0 if strip == 0 and self.strips % self.buffers else self.buffers - 1

    def owner(self, consumer: int) -> int:
        """The consumer whose C buffers ``consumer`` writes: itself."""
        return consumer

    def barriers(self) -> dict[Barrier, int]:
        """Each barrier, with the number of arrivals that complete a phase of it."""
        readers = sharing(self.consumers)
        counts = {Barrier("full", s): 1 for s in range(self.depth)}
        counts |= {Barrier("empty", s): readers * self.ctas for s in range(self.depth)}
        counts |= {Barrier("item_full", s): 1 for s in range(self.items)}
        counts |= {Barrier("item_empty", s): self.num_consumers for s in range(self.items)}
        if self.consumers == "ping_pong":
            counts |= {Barrier("order", c): 1 for c in range(2)}
        return counts


class Place(NamedTuple):
    """A loop's place in a ring: the stage or slot, and the parity of the round."""

    at: int = 0
    phase: int = 0

    def next(self, depth: int) -> Place:
        """The next place in a ring of ``depth``."""
        return Place(*step(self.at, self.phase, depth))

    def plus(self, count: int, depth: int) -> Place:
        """The place ``count`` places later."""
        return Place(*skip(self.at, self.phase, count, depth))


class LoadState(NamedTuple):
    """The load loop's state between items; ``source`` is the state of the source of items."""

    source: Any = None
    stage: Place = Place()
    slot: Place = Place()


class MathState(NamedTuple):
    """A math loop's state between items; ``number`` counts items modulo 4 (``ping_pong``)."""

    stage: Place = Place()
    slot: Place = Place()
    number: int = 0


#: The source of items: state -> (an item whose gate was passed, or a void item, or None for STOP; the new state).
Source = Callable[[Any], Generator[Any, Any, "tuple[WorkItem | None, Any]"]]
#: The step after the K loop of an item.
Finish = Callable[[Ring, WorkItem], Generator[Any, Any, None]]


def k_steps(item: WorkItem | None) -> int:
    """The number of an item's K steps, which are its stages: 0 for STOP, negative for a void item."""
    return 0 if item is None else item.k_end - item.k_begin


def voided(item: WorkItem) -> WorkItem:
    """The void form of an item, for a launch that is over: K runs from its end to its beginning."""
    return item._replace(k_begin=item.k_end, k_end=item.k_begin)


def gated(over: Any) -> Generator[Any, Any, tuple[WorkItem | None, Any]]:
    """The source of model 2: any item or STOP. After a gate that finds the launch over, all items are void."""
    item = yield Next()
    if item is not None:
        over = over or not (yield Pass(item))
        yield Acquired()
        item = voided(item) if over else item
    return item, over


def load_turn(ring: Ring, source: Source, state: LoadState) -> Generator[Any, Any, LoadState | None]:
    """One item of the load loop."""
    item, carried = yield from source(state.source)
    slot, phase = state.slot
    yield WaitBarrier(Barrier("item_empty", slot), phase ^ 1)
    yield Put(slot, item)
    yield Arrive(Barrier("item_full", slot))
    if item is None:
        return None
    stage = state.stage
    for k in range(item.k_begin, item.k_end):
        yield WaitBarrier(Barrier("empty", stage.at), stage.phase ^ 1)
        yield Expect(Barrier("full", stage.at))
        yield Load(stage.at, item, k, Barrier("full", stage.at))
        stage = stage.next(ring.depth)
    return LoadState(carried, stage, state.slot.next(ring.items))


def math_turn(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Generator[Any, Any, MathState | None]:
    """One item of a math loop."""
    slot, phase = state.slot
    yield WaitBarrier(Barrier("item_full", slot), phase)
    item = yield Get(slot)
    yield Arrive(Barrier("item_empty", slot))
    steps = k_steps(item)
    if not steps:
        if ring.strips:
            yield Drain(0)
        return None
    stage, number = state.stage, state.number
    if ring.consumers != "ping_pong" or number % 2 == consumer:
        if ring.consumers == "ping_pong":
            # A new barrier is in phase 0: the first consumer waits for the phase "before" it, and passes.
            yield WaitBarrier(Barrier("order", consumer), (number // 2) ^ (1 - consumer))
        if steps > 0:
            stage = yield from k_loop(ring, consumer, stage, steps)
        else:
            yield from poison(ring, consumer, item)
        yield from finish(ring, item)
    else:
        stage = stage.plus(max(steps, 0), ring.depth)
    if ring.consumers == "ping_pong":
        number = (number + 1) % 4
    return MathState(stage, state.slot.next(ring.items), number)


def k_loop(ring: Ring, consumer: int, stage: Place, steps: int) -> Generator[Any, Any, Place]:
    """The K loop of one item, in the ring's form. Returns the place after it."""
    return (multiply_promoted if ring.promoted else multiply)(ring, consumer, stage, steps)


def multiply(ring: Ring, consumer: int, stage: Place, steps: int) -> Generator[Any, Any, Place]:
    """A stage is released when its mma is done and the next mma has started. So a ring has at least two stages."""
    yield WaitBarrier(Barrier("full", stage.at), stage.phase)
    yield Mma(stage.at)
    yield Retire(1)
    stage = stage.next(ring.depth)
    for _ in range(1, steps):
        yield WaitBarrier(Barrier("full", stage.at), stage.phase)
        yield Mma(stage.at)
        yield Retire(1)
        yield Arrive(Barrier("empty", before(stage.at, ring.depth)))
        stage = stage.next(ring.depth)
    if ring.consumers == "ping_pong":
        yield Arrive(Barrier("order", 1 - consumer))
    yield Retire(0)
    yield Arrive(Barrier("empty", before(stage.at, ring.depth)))
    return stage


def multiply_promoted(ring: Ring, consumer: int, stage: Place, steps: int) -> Generator[Any, Any, Place]:
    """A K step's product is finished, its stage released and the product added, before the next one starts."""
    for k in range(steps):
        yield WaitBarrier(Barrier("full", stage.at), stage.phase)
        yield Mma(stage.at)
        if ring.consumers == "ping_pong" and k == steps - 1:
            yield Arrive(Barrier("order", 1 - consumer))
        yield Retire(0)
        yield Arrive(Barrier("empty", stage.at))
        stage = stage.next(ring.depth)
    return stage


def poison(ring: Ring, consumer: int, item: WorkItem) -> Generator[Any, Any, None]:
    """NaN for the product of a void item: nothing was loaded for it."""
    if ring.consumers == "ping_pong":
        yield Arrive(Barrier("order", 1 - consumer))
    yield Poisoned(item)


def epilogue(ring: Ring, item: WorkItem) -> Generator[Any, Any, None]:
    """The finish of model 2."""
    yield Epilogue(item)
    if item.parts == 1 or (yield Fixup(item)):
        yield from store(ring, item)


def store(ring: Ring, item: WorkItem) -> Generator[Any, Any, None]:
    """Store a tile. Its stores drain during later operations."""
    for strip in range(ring.strips):
        yield Drain(ring.pending(strip))
        yield Fill(strip % ring.buffers, item, strip)
        yield Fence()
        yield Store(strip % ring.buffers, item, strip)
