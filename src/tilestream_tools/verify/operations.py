"""The operations of model 1 in traces, and the operations of seeded bugs."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.core.gate import See, Wait
from tilestream.core.loop import Compute, Poll, Reduce
from tilestream.schedule import Peek, Ready, Take, WorkItem
from tilestream_tools.verify.gpu_loop import Poison, Quarantine, ReducePartials, Reset, Restore, Write
from tilestream_tools.verify.oracle import Oracle


class SetCounter(NamedTuple):
    """Write a queue's counter without an atomic. No answer."""

    queue: int
    value: int


class AwaitCount(NamedTuple):
    """Spin until the count of the item's tile is ``wanted``, without polling other words; then set it to 0."""

    item: WorkItem
    wanted: int


class AwaitTile(NamedTuple):
    """Spin until a tile is finished, without polling other words. The answer comes then."""

    tile: int


class WaitForever(NamedTuple):
    """Wait for a chunk with neither deadline nor abort word. The answer comes with its arrival."""

    operand: int
    chunk: int


class WaitAlone(NamedTuple):
    """Wait for a chunk until the deadline, without setting the abort word at its expiry. Answer: see `Wait`."""

    operand: int
    chunk: int


class PollAbort(NamedTuple):
    """Read the abort word, but not the signals' quarantine. Answer: see `Poll`."""


class ReduceNumbers(NamedTuple):
    """`Reduce` with an epilogue that turns NaN into a number, as ``max(x, 0)`` does on a GPU."""

    item: WorkItem


#: Operations whose answer waits for a signal, and operations that read the abort word.
WAITS: frozenset[type] = frozenset({Wait, See, WaitForever, WaitAlone})
POLLS: frozenset[type] = frozenset({Poll, PollAbort})
#: Operations without an answer.
SILENT: frozenset[type] = frozenset(
    {Compute, Poison, Write, Restore, Reduce, ReduceNumbers, ReducePartials, Reset, Quarantine, SetCounter}
)


def queues_of(op: Ready) -> list[int]:
    """The queues of a wait for one of them, first to last."""
    return [queue for queue in range(op.queues.bit_length()) if op.queues >> queue & 1]


def describe(op: Any, oracle: Oracle) -> str:
    """An operation in a trace."""
    name = type(op).__name__.lower()
    if isinstance(op, Take | Peek):
        return f"{name}(queue {op.queue})"
    if isinstance(op, Ready):
        return f"ready(queue {' or '.join(map(str, queues_of(op)))})"
    if isinstance(op, Wait | See):
        chunk = oracle.names(oracle.bit(op.operand, op.chunk)) or f"chunk {op.chunk}"
        return f"wait({chunk}, for tile {op.item.tile})" if isinstance(op, Wait) else f"see({chunk})"
    if isinstance(op, Reset):
        return f"reset(the counter of queue {op.queue})" if op.word == "counter" else f"reset({op.word})"
    if hasattr(op, "item"):
        item = op.item
        part = f", K steps {item.k_begin} to {item.k_end}, part {item.part} of {item.parts}" if item.parts > 1 else ""
        return f"{name}(tile {item.tile}{part})"
    return f"{name}({', '.join(f'{k} {v}' for k, v in op._asdict().items())})"


def describe_answer(op: Any, answer: Any) -> str:
    """An operation's answer in a trace."""
    if type(op) in SILENT:
        return ""
    if type(op) is Ready:
        answer = f"queue {answer}" if answer >= 0 else "the launch is over, or its deadline has passed"
    elif type(op) in WAITS:
        answer = "arrived" if answer else "the launch is over"
    elif type(op) in POLLS:
        answer = "the launch is over" if answer else "go on"
    return f" -> {answer}"
