"""The load loop and the math loop of one worker, as the Hopper kernels are to be written: over an item ring and a ring.

::

    load loop                                   math loop
      item = next item, its gate passed, or STOP  wait item_full[slot]
      wait item_empty[slot]                       item = slots[slot]
      slots[slot] = item                          arrive item_empty[slot]
      arrive item_full[slot]                      STOP: leave
      STOP: leave                                 for k in the item's K steps:
      for k in the item's K steps:                  wait full[stage]
        wait empty[stage]                           mma on the stage
        expect bytes at full[stage]                 wait until 1 mma is in flight: the one before is done
        load into the stage -> full[stage]          arrive empty[the stage before]
                                                  wait until 0 are in flight; arrive empty[the last stage]
                                                  epilogue

Both loops walk over the same items, and the math loop takes its K counts from the item it is handed. A barrier is
waited for by the parity of a phase: every `Place` counts rounds of its ring, and its phase flips with each.

Who is in the math loop (`Ring.consumers`):

- ``single``: one consumer;
- ``cooperative``: two, each with half of every tile: both read every stage, and ``empty`` counts 2;
- ``ping_pong``: two, which take turns: a consumer does every other item, and steps over the stages of the others. Order
  barriers hand the tensor cores over, so that one's epilogue runs under the other's mma.

The loops are generators like `tilestream.kernels.loop.work`: one turn is one item.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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


class Epilogue(NamedTuple):
    """Take the accumulator as the result of ``item``, and clear it."""

    item: WorkItem


@dataclass(frozen=True)
class Ring:
    """The shapes of both rings. ``depth``: stages; ``items``: slots of the item ring."""

    depth: int
    items: int = 2
    consumers: Consumers = "single"

    @property
    def num_consumers(self) -> int:
        """Math loops."""
        return 1 if self.consumers == "single" else 2

    def barriers(self) -> dict[Barrier, int]:
        """Each barrier, and how many arrivals complete a phase of it."""
        readers = 2 if self.consumers == "cooperative" else 1
        counts = {Barrier("full", s): 1 for s in range(self.depth)}
        counts |= {Barrier("empty", s): readers for s in range(self.depth)}
        counts |= {Barrier("item_full", s): 1 for s in range(self.items)}
        counts |= {Barrier("item_empty", s): self.num_consumers for s in range(self.items)}
        if self.consumers == "ping_pong":
            counts |= {Barrier("order", c): 1 for c in range(2)}
        return counts


class Place(NamedTuple):
    """Where a loop stands in a ring: the stage or slot, and the parity of the round."""

    at: int = 0
    phase: int = 0

    def plus(self, count: int, depth: int) -> Place:
        """``count`` places on, in a ring of ``depth``."""
        ahead = self.at + count
        return Place(ahead % depth, (self.phase + ahead // depth) % 2)


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


#: Where items come from: carried state -> (item whose gate has been passed, or None for STOP; carried state).
Source = Callable[[Any], Generator[Any, Any, "tuple[WorkItem | None, Any]"]]
#: What follows the K loop of an item.
Finish = Callable[[WorkItem], Generator[Any, Any, None]]


def k_steps(item: WorkItem) -> int:
    """K steps of an item: stages that both loops step through for it."""
    return item.k_end - item.k_begin


def gated(state: Any) -> Generator[Any, Any, tuple[WorkItem | None, Any]]:
    """The source of model 2: some item, or STOP; and STOP too where the gate says that the launch is over."""
    item = yield Next()
    if item is not None and not (yield Pass(item)):
        item = None
    return item, state


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
        stage = stage.plus(1, ring.depth)
    return LoadState(carried, stage, state.slot.plus(1, ring.items))


def epilogue(item: WorkItem) -> Generator[Any, Any, None]:
    """The finish of model 2."""
    yield Epilogue(item)


def math_turn(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Generator[Any, Any, MathState | None]:
    """One item of a math loop."""
    slot, phase = state.slot
    yield WaitBarrier(Barrier("item_full", slot), phase)
    item = yield Get(slot)
    yield Arrive(Barrier("item_empty", slot))
    if item is None:
        return None
    if ring.consumers != "ping_pong":
        yield from multiply(ring, state.stage, k_steps(item))
        yield from finish(item)
    elif state.number % 2 == consumer:
        # A barrier that is new is in phase 0: the consumer that begins waits for the phase "before" it, and passes.
        yield WaitBarrier(Barrier("order", consumer), state.number // 2 ^ (consumer == 0))
        yield from multiply(ring, state.stage, k_steps(item), then=Barrier("order", 1 - consumer))
        yield from finish(item)
    return MathState(
        state.stage.plus(k_steps(item), ring.depth), state.slot.plus(1, ring.items), (state.number + 1) % 4
    )


def multiply(ring: Ring, stage: Place, steps: int, then: Barrier | None = None) -> Generator[Any, Any, None]:
    """The K loop of the math side; ``then`` is arrived at when the last mma has been started."""
    if ring.depth == 1:
        # With one stage there is no stage before: the next load needs the stage that is being read.
        for k in range(steps):
            here = stage.plus(k, 1)
            yield WaitBarrier(Barrier("full", 0), here.phase)
            yield Mma(0)
            if then is not None and k == steps - 1:
                yield Arrive(then)
            yield Retire(0)
            yield Arrive(Barrier("empty", 0))
        return
    for k in range(steps):
        here = stage.plus(k, ring.depth)
        yield WaitBarrier(Barrier("full", here.at), here.phase)
        yield Mma(here.at)
        yield Retire(1)
        if k > 0:
            yield Arrive(Barrier("empty", (here.at - 1) % ring.depth))
    if then is not None:
        yield Arrive(then)
    yield Retire(0)
    yield Arrive(Barrier("empty", stage.plus(steps - 1, ring.depth).at))
