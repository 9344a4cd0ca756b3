"""Seeded bugs of model 2: load loops, math loops and rings that are wrong in one place each.

Most are the loops of `protocol` with some operations left out, moved or changed on their way: what is wrong is then the
few lines that stand here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from tilestream.core.gate import Gate
from tilestream.core.loop import WorkerState
from tilestream.schedule import Schedule, WorkItem, take
from tilestream_tools.verify.product import handed_on
from tilestream_tools.verify.protocol import (
    Acquired,
    Arrive,
    Barrier,
    Expect,
    Finish,
    Get,
    Load,
    LoadState,
    MathState,
    Mma,
    Next,
    Pass,
    Place,
    Poisoned,
    Put,
    Retire,
    Ring,
    Source,
    WaitBarrier,
    gated,
    k_loop,
    k_steps,
    load_turn,
    math_turn,
    voided,
)  # fmt: skip

Loop = Generator[Any, Any, Any]


def rewritten(loop: Loop, change: Callable[[Any], Any]) -> Loop:
    """``loop`` with each operation replaced by what ``change`` makes of it; None leaves it out."""
    try:
        op = next(loop)
        while True:
            other = change(op)
            op = loop.send(0 if other is None else (yield other))
    except StopIteration as end:
        return end.value


def _is(op: Any, kind: type, name: str) -> bool:
    return isinstance(op, kind) and getattr(op, "barrier", Barrier("", 0)).name == name


# Phases and arrivals --------------------------------------------------------------------------------------------------


def load_phase_wrong(ring: Ring, source: Source, state: LoadState) -> Loop:
    """The load loop waits for ``empty`` with the phase of ``full``: a new ring looks full."""
    return rewritten(
        load_turn(ring, source, state),
        lambda op: op._replace(parity=op.parity ^ 1) if _is(op, WaitBarrier, "empty") else op,
    )


def math_phase_wrong(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """The math loop waits for ``full`` with the phase of ``empty``: it passes before anything has landed."""
    return rewritten(
        math_turn(ring, finish, consumer, state),
        lambda op: op._replace(parity=op.parity ^ 1) if _is(op, WaitBarrier, "full") else op,
    )


def phase_never_flips(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """The math loop's phase does not flip when it comes round the ring."""
    return rewritten(
        math_turn(ring, finish, consumer, state),
        lambda op: op._replace(parity=0) if _is(op, WaitBarrier, "full") else op,
    )


def phase_restarts(ring: Ring, source: Source, state: LoadState) -> Generator[Any, Any, LoadState | None]:
    """The load loop begins every item at stage 0 in phase 0: loop-carried state that was not carried."""
    after = yield from load_turn(ring, source, state)
    return None if after is None else after._replace(stage=Place())


def arrive_forgotten(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """The math loop never gives a stage back."""
    return rewritten(math_turn(ring, finish, consumer, state), lambda op: None if _is(op, Arrive, "empty") else op)


def slot_not_returned(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """The math loop never gives a slot of the item ring back."""
    return rewritten(math_turn(ring, finish, consumer, state), lambda op: None if _is(op, Arrive, "item_empty") else op)


def bytes_not_expected(ring: Ring, source: Source, state: LoadState) -> Loop:
    """The load loop arrives at ``full`` without telling it to wait for the bytes."""
    return rewritten(load_turn(ring, source, state), lambda op: Arrive(op.barrier) if isinstance(op, Expect) else op)


def empty_not_awaited(ring: Ring, source: Source, state: LoadState) -> Loop:
    """The load loop does not wait until a stage is empty."""
    return rewritten(load_turn(ring, source, state), lambda op: None if _is(op, WaitBarrier, "empty") else op)


def slot_not_awaited(ring: Ring, source: Source, state: LoadState) -> Loop:
    """The load loop does not wait until a slot of the item ring has been read."""
    return rewritten(load_turn(ring, source, state), lambda op: None if _is(op, WaitBarrier, "item_empty") else op)


@dataclass(frozen=True)
class OneReaderRing(Ring):
    """A cooperative ring whose ``empty`` barriers count one consumer, as if there were one."""

    def barriers(self) -> dict[Barrier, int]:
        """Each barrier, and how many arrivals complete a phase of it."""
        return {barrier: 1 if barrier.name == "empty" else count for barrier, count in super().barriers().items()}


# The ring of stages ---------------------------------------------------------------------------------------------------


def released_too_early(
    ring: Ring, finish: Finish, consumer: int, state: MathState
) -> Generator[Any, Any, MathState | None]:
    """After ``Retire(1)`` the stage of the mma still in flight is given back, not the one before it."""
    slot, phase = state.slot
    yield WaitBarrier(Barrier("item_full", slot), phase)
    item = yield Get(slot)
    yield Arrive(Barrier("item_empty", slot))
    if item is None:
        return None
    for k in range(k_steps(item)):
        here = state.stage.plus(k, ring.depth)
        yield WaitBarrier(Barrier("full", here.at), here.phase)
        yield Mma(here.at)
        yield Retire(1)
        yield Arrive(Barrier("empty", here.at))
    yield Retire(0)
    yield from finish(ring, item)
    return MathState(state.stage.plus(k_steps(item), ring.depth), state.slot.next(ring.items))


def product_not_waited_for(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """In the precise form a stage is given back, and its product added, while the mma is still at it."""
    return rewritten(
        math_turn(ring, finish, consumer, state), lambda op: op._replace(in_flight=1) if isinstance(op, Retire) else op
    )


def epilogue_too_early(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """The last ``Retire(0)`` is left out: the epilogue takes an accumulator that an mma still writes."""
    return rewritten(
        math_turn(ring, finish, consumer, state), lambda op: None if isinstance(op, Retire) and not op.in_flight else op
    )


# What is handed on ----------------------------------------------------------------------------------------------------


def load_skips_items(ring: Ring, source: Source, state: LoadState) -> Loop:
    """Load and math disagree on items: the load loop hands an item of one K step on, and does not load it."""
    slot = state.slot
    loop = load_turn(ring, source, state)
    short: list[bool] = [False]

    def change(op: Any) -> Any:
        if isinstance(op, Put):
            short[0] = op.item is not None and k_steps(op.item) == 1
        stage_op = isinstance(op, Expect | Load) or _is(op, WaitBarrier, "empty")
        return None if stage_op and short[0] else op

    after = yield from rewritten(loop, change)
    return (
        None
        if after is None
        else after._replace(stage=state.stage if short[0] else after.stage, slot=slot.next(ring.items))
    )


def item_not_awaited(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """Load and math disagree on items: the math loop reads the slot without waiting, and may find the item before."""
    return rewritten(
        math_turn(ring, finish, consumer, state), lambda op: None if _is(op, WaitBarrier, "item_full") else op
    )


def both_take_even(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """Ping-pong, where both consumers take the even items."""
    return math_turn(ring, finish, 0, state)


def other_items_not_stepped_over(
    ring: Ring, finish: Finish, consumer: int, state: MathState
) -> Generator[Any, Any, MathState | None]:
    """Ping-pong, where a consumer forgets that the other's items use stages too."""
    after = yield from math_turn(ring, finish, consumer, state)
    return after._replace(stage=state.stage) if after is not None and state.number % 2 != consumer else after


def order_phase_wrong(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """Ping-pong, where neither consumer may begin."""
    return rewritten(
        math_turn(ring, finish, consumer, state),
        lambda op: op._replace(parity=state.number // 2) if _is(op, WaitBarrier, "order") else op,
    )


def fixed_k_count(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Generator[Any, Any, MathState | None]:
    """Load and math disagree on K counts: the math loop takes the K count of the whole problem, 2, for every item."""
    slot, phase = state.slot
    yield WaitBarrier(Barrier("item_full", slot), phase)
    item = yield Get(slot)
    yield Arrive(Barrier("item_empty", slot))
    if item is None:
        return None
    yield from k_loop(ring, consumer, state.stage, 2)
    yield from finish(ring, item)
    return MathState(state.stage.plus(2, ring.depth), state.slot.next(ring.items))


def load_rounds_down(ring: Ring, source: Source, state: LoadState) -> Loop:
    """Load and math disagree on K counts: the load loop leaves out the last K step of an odd count (a ragged tail)."""
    item: list[WorkItem | None] = [None]

    def change(op: Any) -> Any:
        if isinstance(op, Put):
            item[0] = op.item
        if isinstance(op, Load) and item[0] is not None and k_steps(item[0]) % 2 and op.k == item[0].k_end - 1:
            return None
        return op

    return rewritten(load_turn(ring, source, state), change)


def handed_on_before_gate(ring: Ring, source: Source, state: LoadState) -> Generator[Any, Any, LoadState | None]:
    """The item is handed on, then its gate is asked: after an expiry the math loop waits for stages that never come."""
    item = yield Next()
    slot, phase = state.slot
    yield WaitBarrier(Barrier("item_empty", slot), phase ^ 1)
    yield Put(slot, item)
    yield Arrive(Barrier("item_full", slot))
    if item is None:
        return None
    stage = state.stage
    over = not (yield Pass(item))
    yield Acquired()
    if not over:
        stage = yield from _loaded(ring, stage, item)
    return LoadState(over, stage, state.slot.next(ring.items))


def _loaded(ring: Ring, stage: Place, item: WorkItem) -> Generator[Any, Any, Place]:
    """The loads of `load_turn`; the place behind them."""
    for k in range(item.k_begin, item.k_end):
        yield WaitBarrier(Barrier("empty", stage.at), stage.phase ^ 1)
        yield Expect(Barrier("full", stage.at))
        yield Load(stage.at, item, k, Barrier("full", stage.at))
        stage = stage.next(ring.depth)
    return stage


def stop_not_handed_on(ring: Ring, source: Source, state: LoadState) -> Generator[Any, Any, LoadState | None]:
    """The load loop leaves without handing STOP on."""
    item, carried = yield from source(state.source)
    if item is None:
        return None

    def known(_: Any) -> Generator[Any, Any, Any]:
        yield from ()
        return item, carried

    return (yield from load_turn(ring, known, state))


# The launch is over ---------------------------------------------------------------------------------------------------


def void_item_loaded(ring: Ring, source: Source, state: LoadState) -> Loop:
    """A void item is handed on, and loaded all the same: nobody multiplies its stages, and gives them back."""
    put: list[WorkItem | None] = [None]

    def change(op: Any) -> Any:
        if isinstance(op, Put):
            put[0] = op.item
        return op

    after = yield from rewritten(load_turn(ring, source, state), change)
    if put[0] is not None and k_steps(put[0]) < 0:
        stage = yield from _loaded(ring, state.stage, voided(put[0]))
        after = after._replace(stage=stage)
    return after


def stop_lost_after_expiry(ring: Ring, source: Source, state: LoadState) -> Generator[Any, Any, LoadState | None]:
    """The load loop of a launch that is over leaves without handing STOP on."""
    turn = stop_not_handed_on if state.source else load_turn
    after: LoadState | None = yield from turn(ring, source, state)
    return after


def unmarked(over: Any) -> Generator[Any, Any, tuple[WorkItem | None, Any]]:
    """An item of a launch that is over is handed on as it is, and loaded: from rows that are not there."""
    item, over = yield from gated(over)
    return (voided(item) if k_steps(item) < 0 and item is not None else item), over


def unfenced(over: Any) -> Generator[Any, Any, tuple[WorkItem | None, Any]]:
    """The load loop fences before its gate: what it sees there, copies need not see."""
    item = yield Next()
    if item is not None:
        yield Acquired()
        over = over or not (yield Pass(item))
        item = voided(item) if over else item
    return item, over


def void_item_awaited(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """The math loop multiplies a void item as any other: it waits for stages that never come."""
    loop = math_turn(ring, finish, consumer, state)
    try:
        op = next(loop)
        while True:
            answer = yield op
            if isinstance(op, Get) and k_steps(answer) < 0:
                answer = voided(answer)
            op = loop.send(answer)
    except StopIteration as end:
        return end.value


def void_item_taken_for_stop(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """The math loop takes fewer than no K steps for none, and leaves: what comes after the void item is not done."""
    left = [False]

    def change(op: Any) -> Any:
        left[0] = left[0] or isinstance(op, Poisoned)
        return None if left[0] else op

    after = yield from rewritten(math_turn(ring, finish, consumer, state), change)
    return None if left[0] else after


def not_poisoned(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """The result of a void item is what the accumulator happens to hold."""
    return rewritten(math_turn(ring, finish, consumer, state), lambda op: None if isinstance(op, Poisoned) else op)


def order_kept_by_a_void_item(ring: Ring, finish: Finish, consumer: int, state: MathState) -> Loop:
    """Ping-pong, where a consumer that has a void item does not hand the tensor cores over."""
    multiplied = [False]

    def change(op: Any) -> Any:
        multiplied[0] = multiplied[0] or isinstance(op, Mma)
        return None if _is(op, Arrive, "order") and not multiplied[0] else op

    return rewritten(math_turn(ring, finish, consumer, state), change)


def handed_on_unfenced(schedule: Schedule, gate: Gate | None, worker: int) -> Callable[[Any], Generator[Any, Any, Any]]:
    """Product: what the load loop sees at its gate it does not fence."""
    source = handed_on(schedule, gate, worker)
    return lambda state: rewritten(source(state), lambda op: None if isinstance(op, Acquired) else op)


def left_void_on_the_way(
    schedule: Schedule, gate: Gate | None, worker: int
) -> Callable[[Any], Generator[Any, Any, Any]]:
    """Product: a load loop that is told that the launch is over hands STOP on: items that nobody has taken stay so."""
    source = handed_on(schedule, gate, worker)

    def leaving(state: WorkerState) -> Generator[Any, Any, tuple[WorkItem | None, WorkerState]]:
        item, after = yield from source(state)
        return (None if k_steps(item) < 0 else item), after

    return leaving


def handed_on_ungated(schedule: Schedule, gate: Gate | None, worker: int) -> Callable[[Any], Generator[Any, Any, Any]]:
    """Product: items are handed on, and loaded, with no gate at all."""

    def source(state: WorkerState) -> Generator[Any, Any, tuple[WorkItem | None, WorkerState]]:
        item, cursor = yield from take(schedule, worker, state.cursor)
        return item, WorkerState(cursor, state.seen)

    return source
