"""Seeded bugs of model 5: loops of the Hopper attention that are wrong in one place each.

They are the loops of `attention_protocol` with operations left out, moved or changed on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilestream_tools.verify.attention_protocol import (
    AttentionRing,
    Convert,
    ConvertPlaces,
    Copy,
    Done,
    Empty,
    Leave,
    LoadPlaces,
    Loop,
    Mark,
    MathPlaces,
    Pass,
    Start,
    convert_turn,
    load_turn,
    math_turn,
)
from tilestream_tools.verify.protocol import Arrive, Barrier, Expect, Fence, Put, Retire, WaitBarrier, k_steps


def _changed(loop: Loop, change: Callable[[Any], tuple[Any, ...]]) -> Loop:
    """``loop`` with each operation replaced by those that ``change`` makes of it."""
    try:
        op = next(loop)
        while True:
            answer = 0
            for other in change(op):
                told = yield other
                answer = told if other is op else answer
            op = loop.send(answer)
    except StopIteration as end:
        return end.value


def _at(op: Any, kind: type, name: str) -> bool:
    return isinstance(op, kind) and op.barrier.name == name  # type: ignore[attr-defined]


def _without(loop: Loop, kind: type, name: str) -> Loop:
    return _changed(loop, lambda op: () if _at(op, kind, name) else (op,))


def _before_retiring(loop: Loop, name: str) -> Loop:
    """``loop`` with each Arrive at ``name`` before the Retire that it follows."""
    held: list[Any] = []

    def change(op: Any) -> tuple[Any, ...]:
        if isinstance(op, Retire):
            held.append(op)
            return ()
        late = tuple(held)
        held.clear()
        return (op, *late) if _at(op, Arrive, name) else (*late, op)

    return _changed(loop, change)


def _at_the_start(loop: Loop, arrive: Arrive) -> Loop:
    """``loop`` with ``arrive`` when the queries have come, and not at the end."""
    moved: list[Any] = []

    def change(op: Any) -> tuple[Any, ...]:
        if _at(op, WaitBarrier, "q_full"):
            moved.append(op)
            return (op, arrive)
        return () if moved and op == arrive else (op,)

    return _changed(loop, change)


def keys_not_awaited(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """Keys are multiplied without a wait for their copy."""
    return _without(math_turn(ring, who, state), WaitBarrier, "k_full")


def queries_not_awaited(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """Queries are multiplied without a wait for their copy."""
    return _without(math_turn(ring, who, state), WaitBarrier, "q_full")


def keys_released_too_early(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """A stage of keys is given back before the multiplication that reads it is done."""
    return _before_retiring(math_turn(ring, who, state), "k_empty")


def values_released_too_early(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """A stage of values is given back before the multiplication that reads it is done."""
    return _before_retiring(math_turn(ring, who, state), "v_empty")


def queries_released_too_early(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """The room for queries is given back when they have come, and not when they have been read."""
    at = who * ring.queries + state.q.at
    return _at_the_start(math_turn(ring, who, state), Arrive(Barrier("q_empty", at)))


def slot_released_too_early(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """A slot is given back when the item has begun, and read again after that."""
    return _at_the_start(math_turn(ring, who, state), Arrive(Barrier("item_empty", state.slot.at)))


def queries_without_blocks_kept(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """The queries of an item without blocks are not given back."""
    started: list[Any] = []

    def change(op: Any) -> tuple[Any, ...]:
        if isinstance(op, Start):
            started.append(op)
        return (op,) if started or not _at(op, Arrive, "q_empty") else ()

    return _changed(math_turn(ring, who, state), change)


def turn_not_handed_on(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """A consumer does not hand the turn to the next."""
    return _without(math_turn(ring, who, state), Arrive, "order")


def _skipped(loop: Loop, name: str, before: Callable[[Any], bool]) -> Loop:
    """``loop`` without the waits at ``name`` that an operation of a sort follows."""
    held: list[Any] = []

    def change(op: Any) -> tuple[Any, ...]:
        if _at(op, WaitBarrier, name):
            held.append(op)
            return ()
        late = tuple(held)
        held.clear()
        return (op,) if late and before(op) else (*late, op)

    return _changed(loop, change)


def left_out_not_awaited(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """A stage of values that are left out is given back before it is filled."""
    return _skipped(math_turn(ring, who, state), "v_full", lambda op: isinstance(op, Leave))


def keys_left_out_not_awaited(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """A stage of keys that are left out is given back before it is filled."""
    return _skipped(math_turn(ring, who, state), "k_full", lambda op: _at(op, Arrive, "k_empty"))


def turn_lost_where_left_out(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """A consumer that leaves out a block does not wait for its turn at it, which it hands on."""
    return _skipped(math_turn(ring, who, state), "order", lambda op: _at(op, Arrive, "order"))


def item_not_finished(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """The accumulator is not taken as the item's result."""
    return _changed(math_turn(ring, who, state), lambda op: () if isinstance(op, Done) else (op,))


def keys_awaited_in_the_other_phase(ring: AttentionRing, state: LoadPlaces) -> Loop:
    """The load loop waits for a stage of keys in the other phase."""
    return _changed(
        load_turn(ring, state),
        lambda op: (op._replace(parity=op.parity ^ 1),) if _at(op, WaitBarrier, "k_empty") else (op,),
    )


def values_in_one_stage(ring: AttentionRing, state: LoadPlaces) -> Loop:
    """The load loop does not go on to the next stage of values."""

    def change(op: Any) -> tuple[Any, ...]:
        if _at(op, WaitBarrier, "v_empty"):
            return (WaitBarrier(Barrier("v_empty", 0), 1),)
        if _at(op, Expect, "v_full"):
            return (Expect(Barrier("v_full", 0)),)
        return (op._replace(at=0, barrier=Barrier("v_full", 0)),) if _at(op, Copy, "v_full") else (op,)

    return _changed(load_turn(ring, state), change)


def last_values_not_loaded(ring: AttentionRing, state: LoadPlaces) -> Loop:
    """The load loop ends with an item's last keys: their values come one step later, and do not come."""
    left = [0]

    def change(op: Any) -> tuple[Any, ...]:
        if isinstance(op, Put) and op.item is not None:
            left[0] = k_steps(op.item)
        if _at(op, WaitBarrier, "v_empty"):
            left[0] -= 1
        of_values = _at(op, WaitBarrier, "v_empty") or _at(op, Expect, "v_full") or _at(op, Copy, "v_full")
        return () if of_values and not left[0] else (op,)

    return _changed(load_turn(ring, state), change)


def stages_left_when_over(ring: AttentionRing, state: LoadPlaces) -> Loop:
    """Told at the gate that the launch is over, the load loop leaves the item's remaining stages as they are."""
    return _changed(load_turn(ring, state), lambda op: () if isinstance(op, Empty) else (op,))


def void_item_not_marked(ring: AttentionRing, state: LoadPlaces) -> Loop:
    """An item that the launch's end finds under way is not marked."""
    return _changed(
        load_turn(ring, state), lambda op: (op._replace(void=0),) if isinstance(op, Mark) and not state.over else (op,)
    )


def void_item_marked_too_late(ring: AttentionRing, state: LoadPlaces) -> Loop:
    """An item is marked when all its stages are filled."""
    held: list[Mark] = []
    loop = load_turn(ring, state)

    def change(op: Any) -> tuple[Any, ...]:
        if isinstance(op, Mark) and op.void and not state.over:
            held.append(op)
            return ()
        return (op,)

    told = yield from _changed(loop, change)
    for op in held:  # noqa: UP028 -- the search looks into the generators that a loop delegates to
        yield op
    return told


def mark_not_looked_at(ring: AttentionRing, who: int, state: MathPlaces) -> Loop:
    """A void item is stored as a valid one."""
    return _changed(math_turn(ring, who, state), lambda op: (op._replace(void=0),) if isinstance(op, Done) else (op,))


def gate_asked_once(ring: AttentionRing, state: LoadPlaces) -> Loop:
    """The gate is asked for an item's first block only."""
    return _changed(load_turn(ring, state), lambda op: () if isinstance(op, Pass) and op.k else (op,))


def raw_values_not_awaited(ring: AttentionRing, state: ConvertPlaces) -> Loop:
    """Values are converted that may not have come."""
    return _without(convert_turn(ring, state), WaitBarrier, "raw_full")


def values_converted_over_others(ring: AttentionRing, state: ConvertPlaces) -> Loop:
    """Values are converted to a buffer that a consumer may be at."""
    return _without(convert_turn(ring, state), WaitBarrier, "v_empty")


def converted_too_late(ring: AttentionRing, state: ConvertPlaces) -> Loop:
    """Values are given to the consumers before they are converted."""
    held: list[Any] = []

    def change(op: Any) -> tuple[Any, ...]:
        if isinstance(op, Convert):
            held.append(op)
            return ()
        return (op, held.pop()) if _at(op, Arrive, "v_full") else (op,)

    return _changed(convert_turn(ring, state), change)


def converted_not_fenced(ring: AttentionRing, state: ConvertPlaces) -> Loop:
    """Values are converted, and no fence is between that and their multiplication."""
    return _changed(convert_turn(ring, state), lambda op: () if isinstance(op, Fence) else (op,))


def arrived_not_fenced(ring: AttentionRing, state: LoadPlaces) -> Loop:
    """A chunk is seen to be there, and no fence is between that and its copy."""
    return _changed(load_turn(ring, state), lambda op: () if isinstance(op, Fence) else (op,))
