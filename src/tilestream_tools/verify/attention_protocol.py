"""The load loop and the math loops of one worker of the Hopper attention, operation by operation.

::

    load loop                                   math loop (two or three consumers)
      item, or STOP                               wait item_full[slot]; item = slots[slot]
      wait item_empty[slot]; slots[slot] = item   STOP: arrive item_empty[slot]; leave
      arrive item_full[slot]                      wait q_full
      STOP: leave                                 read the slot again, if there are blocks
                                                  leave out the first ones that none of its rows sees
                                                  wait k_full; start S of the first block; S is done; arrive k_empty
      for each consumer:                          for each block after it:
        wait q_empty; expect; load Q -> q_full      wait k_full (and order); start S of the block
      for each block, and one more time:            wait v_full; start P V of the block before; (arrive order)
        wait k_empty; expect; load K -> k_full      S is done; arrive k_empty; P V is done; arrive v_empty
        of the block before:                      arrive q_empty
          wait v_empty; expect; load V -> v_full  wait v_full; P V of the last block; arrive v_empty
                                                  read the slot again; leave out the last ones that none of
                                                    its rows sees
                                                  read the slot again; finish the item; arrive item_empty[slot]

To leave out a block: wait k_full; arrive k_empty; (wait order; arrive order); wait v_full; arrive v_empty. Consumers
leave out blocks of their own, up to one less than the item has.

If registers suffice, the kernel's load loop takes its next item before it loads V of the last block. Taking waits for
no barrier, so the barriers come in the same order.

Where keys arrive, the load loop asks whether the launch is over before it puts an item. If so, the item has no blocks
and is marked void. It also waits at the gate before it fills a block's first stage. Told "over" there, it marks the
item and fills the stages that consumers will wait for with nothing. The last of them follows the mark, so a consumer
that looks for the mark at the item's end finds it.

Values of 8 bits are converted: the load loop fills ``raw`` buffers instead of those of V. A convert loop between it and
the math loops follows the item ring, too::

    convert loop
      wait item_full[slot]; item = slots[slot]; arrive item_empty[slot]; STOP: leave
      for each block: wait raw_full; wait v_empty; convert; fence; arrive raw_empty; arrive v_full

*Fences.* Copies and multiplications read through the asynchronous proxy. So the convert loop fences between its writes
and its consumers' multiplications, the load loop between a chunk's arrival and its copies of the chunk, and a math loop
between writing a strip of the output and the strip's store, which is part of *Done*: strips go through buffers of the
consumer's own, as in `tilestream_tools.verify.buffers` for the GEMM.

This is `tilestream.kernels.hopper.attention` with `attention_load`, `attention_math` and `attention_convert`; a test
runs both texts and compares. An item may have no blocks. The slot is kept until the item's end, so the load loop is at
most one item ahead, and each consumer has room for the queries of ``queries`` items.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilestream.schedule import WorkItem
from tilestream_tools.verify.protocol import (
    Arrive,
    Barrier,
    Expect,
    Fence,
    Get,
    Next,
    Place,
    Put,
    Retire,
    WaitBarrier,
    k_steps,
)


class Copy(NamedTuple):
    """Start the copy of ``q``, or of block ``k`` of ``k`` or ``v``, of an item to a buffer; it ends at ``barrier``."""

    what: str
    at: int
    item: WorkItem
    k: int
    barrier: Barrier


class Start(NamedTuple):
    """Start a multiplication: of the queries at ``q`` by block ``k`` of ``k``; or by block ``k`` of ``v``, ``q`` -1."""

    what: str
    at: int
    item: WorkItem
    k: int
    q: int = -1


class Ask(NamedTuple):
    """Look at the abort word; 1 where the launch is over."""


class Pass(NamedTuple):
    """Wait at the gate for the chunks of block ``k`` of an item: 0 when they are there, 1 if the launch is over."""

    item: WorkItem
    k: int


class Mark(NamedTuple):
    """Write into a slot whether its item is void."""

    slot: int
    void: int


class Look(NamedTuple):
    """Whether the item in a slot is marked void."""

    slot: int


class Empty(NamedTuple):
    """Say at ``barrier`` that a buffer is filled, with nothing in it, in place of block ``k`` of ``what``."""

    what: str
    at: int
    item: WorkItem
    k: int
    barrier: Barrier


class Convert(NamedTuple):
    """Convert block ``k`` of an item's values, from one ``raw`` buffer to the one of V of the same number."""

    at: int
    item: WorkItem
    k: int


class Own(NamedTuple):
    """How many of an item's first and of its last blocks none of the consumer's rows sees."""

    item: WorkItem


class Leave(NamedTuple):
    """Go past block ``k`` of an item, of keys and of values."""

    item: WorkItem
    k: int


class Done(NamedTuple):
    """Take the accumulator as the result of ``item``; NaN if it is ``void``."""

    item: WorkItem
    void: int = 0


@dataclass(frozen=True)
class AttentionRing:
    """The shapes of the rings.

    Attributes
    ----------
    depth
        Stages, of K and of V each.
    queries
        Items whose queries there is room for.
    consumers
        Math loops.
    ordered
        Whether they take turns at starting multiplications.
    items
        Slots of the item ring.
    arriving
        Whether keys arrive in chunks.
    converting
        Whether values are converted.
    own
        Which blocks consumers leave out, that none of their own rows sees: an item's ``"first"``, its ``"last"``,
        ``"both"``; empty: none.
    """

    depth: int
    queries: int = 1
    consumers: int = 2
    ordered: bool = False
    items: int = 2
    arriving: bool = False
    converting: bool = False
    own: str = ""

    def barriers(self) -> dict[Barrier, int]:
        """Each barrier, and how many arrivals complete a phase of it."""
        counts: dict[Barrier, int] = {}
        for name, count, arrivals in (
            ("q_full", self.consumers * self.queries, 1), ("q_empty", self.consumers * self.queries, 1),
            ("k_full", self.depth, 1), ("k_empty", self.depth, self.consumers),
            ("v_full", self.depth, 1), ("v_empty", self.depth, self.consumers),
            ("raw_full", self.depth * self.converting, 1), ("raw_empty", self.depth * self.converting, 1),
            ("item_full", self.items, 1), ("item_empty", self.items, self.consumers + self.converting),
            ("order", self.consumers if self.ordered else 0, 1),
        ):  # fmt: skip
            counts |= {Barrier(name, at): arrivals for at in range(count)}
        return counts


class LoadPlaces(NamedTuple):
    """What the load loop carries from item to item; ``over``: whether it knows that the launch is."""

    q: Place = Place()
    k: Place = Place()
    v: Place = Place()
    slot: Place = Place()
    over: int = 0


class MathPlaces(NamedTuple):
    """What a math loop carries: where it is with its queries, in the rings, and in its turns."""

    q: Place = Place()
    stage: Place = Place()
    slot: Place = Place()
    turn: int = 0


class ConvertPlaces(NamedTuple):
    """What the convert loop carries."""

    stage: Place = Place()
    slot: Place = Place()


Loop = Generator[Any, Any, Any]
LoadTurn = Callable[[AttentionRing, LoadPlaces], Loop]
MathTurn = Callable[[AttentionRing, int, MathPlaces], Loop]
ConvertTurn = Callable[[AttentionRing, ConvertPlaces], Loop]


def load_turn(ring: AttentionRing, state: LoadPlaces) -> Loop:
    """One item of the load loop."""
    item = yield Next()
    q, k, v, slot, over = state
    if ring.arriving:
        over = over or (yield Ask())
        item = item._replace(k_end=item.k_begin) if over and item is not None else item
    yield WaitBarrier(Barrier("item_empty", slot.at), slot.phase ^ 1)
    yield Put(slot.at, item)
    if ring.arriving:
        yield Mark(slot.at, over)
    yield Arrive(Barrier("item_full", slot.at))
    if item is None:
        return None
    for who in range(ring.consumers):
        yield from _fill("q", who * ring.queries + q.at, q.phase, item, 0, 0)
    blocks = k_steps(item)
    for block in range(blocks + 1):
        if ring.arriving and block < blocks and not over:
            over = yield Pass(item, block)
            yield Fence()
            yield Mark(slot.at, over)
        if block < blocks:
            yield from _fill("k", k.at, k.phase, item, block, over)
            k = k.next(ring.depth)
        if block > 0:
            yield from _fill("raw" if ring.converting else "v", v.at, v.phase, item, block - 1, over)
            v = v.next(ring.depth)
    return LoadPlaces(q.next(ring.queries), k, v, slot.next(ring.items), over)


def _fill(what: str, at: int, phase: int, item: WorkItem, k: int, over: int) -> Loop:
    yield WaitBarrier(Barrier(f"{what}_empty", at), phase ^ 1)
    if over:
        yield Empty(what, at, item, k, Barrier(f"{what}_full", at))
    else:
        yield Expect(Barrier(f"{what}_full", at))
        yield Copy(what, at, item, k, Barrier(f"{what}_full", at))


def convert_turn(ring: AttentionRing, state: ConvertPlaces) -> Loop:
    """One item of the convert loop."""
    stage, slot = state
    yield WaitBarrier(Barrier("item_full", slot.at), slot.phase)
    item = yield Get(slot.at)
    yield Arrive(Barrier("item_empty", slot.at))
    if item is None:
        return None
    for block in range(k_steps(item)):
        yield WaitBarrier(Barrier("raw_full", stage.at), stage.phase)
        yield WaitBarrier(Barrier("v_empty", stage.at), stage.phase ^ 1)
        yield Convert(stage.at, item, block)
        yield Fence()
        yield Arrive(Barrier("raw_empty", stage.at))
        yield Arrive(Barrier("v_full", stage.at))
        stage = stage.next(ring.depth)
    return ConvertPlaces(stage, slot.next(ring.items))


def math_turn(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """One item of a math loop."""
    q, stage, slot, turn = state
    yield WaitBarrier(Barrier("item_full", slot.at), slot.phase)
    item = yield Get(slot.at)
    if item is None:
        yield Arrive(Barrier("item_empty", slot.at))
        return None
    q_at = who * ring.queries + q.at
    yield WaitBarrier(Barrier("q_full", q_at), q.phase)
    blocks = k_steps(item)
    begin, end = 0, blocks
    if blocks:
        yield Get(slot.at)
        if ring.own:
            before, after = yield Own(item)
            begin, end = before, blocks - after
        stage, turn = yield from _left_out(ring, who, item, range(begin), stage, turn)
        yield WaitBarrier(Barrier("k_full", stage.at), stage.phase)
        yield Start("k", stage.at, item, begin, q_at)
        yield Retire(0)
        yield Arrive(Barrier("k_empty", stage.at))
    for block in range(begin + 1, end):
        ahead = stage.next(ring.depth)
        yield WaitBarrier(Barrier("k_full", ahead.at), ahead.phase)
        if ring.ordered:
            # A barrier that is new is in phase 0: the consumer that begins waits for the phase "before" it, and passes.
            yield WaitBarrier(Barrier("order", who), turn ^ (who == 0))
        yield Start("k", ahead.at, item, block, q_at)
        yield WaitBarrier(Barrier("v_full", stage.at), stage.phase)
        yield Start("v", stage.at, item, block - 1)
        if ring.ordered:
            yield Arrive(Barrier("order", (who + 1) % ring.consumers))
        yield Retire(1)
        yield Arrive(Barrier("k_empty", ahead.at))
        yield Retire(0)
        yield Arrive(Barrier("v_empty", stage.at))
        stage, turn = ahead, turn ^ 1
    yield Arrive(Barrier("q_empty", q_at))
    if blocks:
        yield WaitBarrier(Barrier("v_full", stage.at), stage.phase)
        yield Start("v", stage.at, item, end - 1)
        yield Retire(0)
        yield Arrive(Barrier("v_empty", stage.at))
        stage = stage.next(ring.depth)
        if ring.own in ("last", "both"):
            yield Get(slot.at)
            stage, turn = yield from _left_out(ring, who, item, range(end, blocks), stage, turn)
    yield Get(slot.at)
    void = (yield Look(slot.at)) if ring.arriving else 0
    yield Done(item, void)
    yield Arrive(Barrier("item_empty", slot.at))
    return MathPlaces(q.next(ring.queries), stage, slot.next(ring.items), turn)


def _left_out(ring: AttentionRing, who: int, item: WorkItem, blocks: range, stage: Place, turn: int) -> Loop:
    """Blocks that a math loop does not look at; where it is in the ring then, and in its turns."""
    for block in blocks:
        yield WaitBarrier(Barrier("k_full", stage.at), stage.phase)
        yield Arrive(Barrier("k_empty", stage.at))
        if ring.ordered:
            yield WaitBarrier(Barrier("order", who), turn ^ (who == 0))
            yield Arrive(Barrier("order", (who + 1) % ring.consumers))
        yield WaitBarrier(Barrier("v_full", stage.at), stage.phase)
        yield Leave(item, block)
        yield Arrive(Barrier("v_empty", stage.at))
        stage, turn = stage.next(ring.depth), turn ^ 1
    return stage, turn
