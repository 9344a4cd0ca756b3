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

This is `tilestream.kernels.hopper.gemm` with `ring` and `epilogue`, operation by operation; a test runs both texts and
compares. Places in a ring are arithmetic of `tilestream.core.ring`, the same functions here and there. Both loops walk
over the same items, and the math loop takes its K counts from the item that it is handed. STOP has no K steps. A *void*
item, whose gate said that the launch is over, has a negative count: K runs backwards, so the load loop loads no step of
it and the math loop waits for none. A fence (`Acquired`) orders what a gate has seen before the copies behind it.

`Ring.consumers` says which math loops there are:

- ``single``: one consumer;
- ``cooperative``: two, each with half of every tile: both read every stage, and ``empty`` counts 2;
- ``ping_pong``: two that take turns: a consumer does every other item and steps over the stages of the others. Order
  barriers hand the tensor cores over, so that one's epilogue runs under the other's mma.

An operation of a consumer stands for all its threads: each of them performs a `WaitBarrier`, and before an `Arrive`,
which one thread performs, the compiler makes them meet (``bar.sync`` of the consumer's own barrier). The text leaves
out chained launches (each loop waits for the kernel before, then begins) and the operands of an epilogue.

The loops are generators like `tilestream.core.loop.work`: one turn is one item.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tilestream.core.ring import before, skip, step
from tilestream.schedule import WorkItem

Consumers = Literal["single", "cooperative", "ping_pong"]


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
    """``fence.proxy.async.global``: what the load loop has seen in memory, loads that it starts see (invariant 7)."""


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
    """Start the copy of K step ``k`` of an item into a stage; when it has landed, ``barrier`` has its bytes."""

    stage: int
    item: WorkItem
    k: int
    barrier: Barrier


class Put(NamedTuple):
    """Write an item, or None for STOP, to a slot of the item ring."""

    slot: int
    item: WorkItem | None


class Get(NamedTuple):
    """Read a slot of the item ring. Answer: what is there."""

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

    What is behind it is `tilestream_tools.verify.gpu_loop.fixup`. To a worker's rings any answer may come.
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
    """``fence_async_shared``: what this consumer has written to shared memory, copies see."""


class Store(NamedTuple):
    """Start the copy of a strip of an item from a C buffer to the output: it reads the buffer until a `Drain`."""

    buffer: int
    item: WorkItem
    strip: int


@dataclass(frozen=True)
class Ring:
    """The shapes of both rings, and what a math loop does with its items.

    Attributes
    ----------
    depth
        Stages: two at least, or one where the form is ``promoted``.
    items
        Slots of the item ring.
    promoted
        fp8 without fast accumulation: a K step's product is waited for, and its stage given back, before the next.
    strips
        Strips in which a tile goes through C buffers; 0 where it is stored from registers.
    most_buffers
        C buffers of a math loop, if there are as many strips.
    ctas
        CTAs that load for each other, each with rings of its own, where ``empty`` has the arrivals of all their
        consumers: see `tilestream_tools.verify.pair`.
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
        """Math loops."""
        return 1 if self.consumers == "single" else 2

    @property
    def buffers(self) -> int:
        """C buffers of a math loop: two, if there are strips to take turns."""
        return max(1, min(self.most_buffers, self.strips))

    def pending(self, strip: int) -> int:
        """Stores that may still read when a strip's buffer is filled: all but those that read this one.

        With two buffers and an odd number of strips a tile begins with the buffer that the one before ended with.
        """
        return 0 if strip == 0 and self.strips % self.buffers else self.buffers - 1

    def owner(self, consumer: int) -> int:
        """Whose C buffers a consumer writes to: its own."""
        return consumer

    def barriers(self) -> dict[Barrier, int]:
        """Each barrier, and how many arrivals complete a phase of it."""
        readers = 2 if self.consumers == "cooperative" else 1
        counts = {Barrier("full", s): 1 for s in range(self.depth)}
        counts |= {Barrier("empty", s): readers * self.ctas for s in range(self.depth)}
        counts |= {Barrier("item_full", s): 1 for s in range(self.items)}
        counts |= {Barrier("item_empty", s): self.num_consumers for s in range(self.items)}
        if self.consumers == "ping_pong":
            counts |= {Barrier("order", c): 1 for c in range(2)}
        return counts


class Place(NamedTuple):
    """Where a loop stands in a ring: the stage or slot, and the parity of the round."""

    at: int = 0
    phase: int = 0

    def next(self, depth: int) -> Place:
        """The next place in a ring of ``depth``."""
        return Place(*step(self.at, self.phase, depth))

    def plus(self, count: int, depth: int) -> Place:
        """``count`` places on."""
        return Place(*skip(self.at, self.phase, count, depth))


class LoadState(NamedTuple):
    """What the load loop carries from item to item; ``source`` is whatever the source of items carries."""

    source: Any = None
    stage: Place = Place()
    slot: Place = Place()


class MathState(NamedTuple):
    """What a math loop carries from item to item; ``number`` counts items modulo 4 (``ping_pong``)."""

    stage: Place = Place()
    slot: Place = Place()
    number: int = 0


#: Where items come from: carried state -> (item whose gate was passed, or a void one, or None for STOP; carried state).
Source = Callable[[Any], Generator[Any, Any, "tuple[WorkItem | None, Any]"]]
#: What follows the K loop of an item.
Finish = Callable[[Ring, WorkItem], Generator[Any, Any, None]]


def k_steps(item: WorkItem | None) -> int:
    """K steps of an item, stages that both loops step through for it; of STOP none, of a void item fewer than none."""
    return 0 if item is None else item.k_end - item.k_begin


def voided(item: WorkItem) -> WorkItem:
    """The item as it is handed on when the launch is over: K runs from its end to its beginning."""
    return item._replace(k_begin=item.k_end, k_end=item.k_begin)


def gated(over: Any) -> Generator[Any, Any, tuple[WorkItem | None, Any]]:
    """The source of model 2: some item, or STOP; from when a gate has said that the launch is over, void items."""
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
            # A barrier that is new is in phase 0: the consumer that begins waits for the phase "before" it, and passes.
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
    """The K loop of one item, in the form that the ring has; the place behind it."""
    return (multiply_promoted if ring.promoted else multiply)(ring, consumer, stage, steps)


def multiply(ring: Ring, consumer: int, stage: Place, steps: int) -> Generator[Any, Any, Place]:
    """A stage is given back when the mma after it has been started and its own is done: so a ring has two at least."""
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
    """A K step's product is done, its stage given back and the product added, before the next is started."""
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
    """A tile on its way out, drained under what comes after it."""
    for strip in range(ring.strips):
        yield Drain(ring.pending(strip))
        yield Fill(strip % ring.buffers, item, strip)
        yield Fence()
        yield Store(strip % ring.buffers, item, strip)
