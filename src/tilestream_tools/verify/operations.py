"""The operations of model 1 in traces, and the operations that only seeded bugs use."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.core.gate import See, Wait
from tilestream.core.loop import Compute, Poll, Reduce
from tilestream.schedule import Peek, Ready, Take, WorkItem
from tilestream_tools.verify.gpu_loop import Poison, Quarantine, ReducePartials, Reset, Restore, Write
from tilestream_tools.verify.oracle import Oracle


class SetCounter(NamedTuple):
    """Write a queue's counter, plainly. No answer."""

    queue: int
    value: int


class AwaitCount(NamedTuple):
    """Spin until the count of the item's tile is ``wanted``, watching nothing else; then set it back to 0."""

    item: WorkItem
    wanted: int


class AwaitTile(NamedTuple):
    """Spin until a tile is finished, watching nothing else. Answered when it is."""

    tile: int


class WaitForever(NamedTuple):
    """Wait for a chunk with neither deadline nor abort word. Answered when it has arrived."""

    operand: int
    chunk: int


class WaitAlone(NamedTuple):
    """Wait for a chunk under the deadline, whose expiry sets no abort word. Answer: as that of `Wait`."""

    operand: int
    chunk: int


class PollAbort(NamedTuple):
    """Read the abort word, and not whether the signals are in quarantine. Answer: as that of `Poll`."""


class ReduceNumbers(NamedTuple):
    """As `Reduce`, through an epilogue that makes a number of NaN, as ``max(x, 0)`` does on a GPU."""

    item: WorkItem


#: Operations that are answered when a signal is up, and those that read the abort word.
WAITS: frozenset[type] = frozenset({Wait, See, WaitForever, WaitAlone})
POLLS: frozenset[type] = frozenset({Poll, PollAbort})
#: Operations without an answer.
SILENT: frozenset[type] = frozenset(
    {Compute, Poison, Write, Restore, Reduce, ReduceNumbers, ReducePartials, Reset, Quarantine, SetCounter}
)


def queues_of(op: Ready) -> list[int]:
    """The queues of which one is waited for, first to last."""
    return [queue for queue in range(op.queues.bit_length()) if op.queues >> queue & 1]


def say(op: Any, oracle: Oracle) -> str:
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


def say_answer(op: Any, answer: Any) -> str:
    """What an operation was answered, behind it in a trace."""
    if type(op) in SILENT:
        return ""
    if type(op) is Ready:
        answer = f"queue {answer}" if answer >= 0 else "the launch is over, or its deadline has passed"
    elif type(op) in WAITS:
        answer = "arrived" if answer else "the launch is over"
    elif type(op) in POLLS:
        answer = "the launch is over" if answer else "go on"
    return f" -> {answer}"
