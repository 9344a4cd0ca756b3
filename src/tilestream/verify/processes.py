"""Protocols as processes: the local states of generator programs, found by replay.

A program is a generator function that yields operations, is sent their answers, and returns the state it carries to
its next turn, or None when it leaves. So a process's local state is (carried state, answers so far in this turn): the
next operation follows from it by running the generator again up to there. Local states are interned as small
integers, so that the states of a model hash fast, and merge when they are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

Turn = Callable[[Any], Generator[Any, Any, Any]]

#: The local state of a process that has left.
LEFT = 0


@dataclass(frozen=True)
class Process:
    """One protocol that runs: a worker, or one of the loops of a worker.

    Attributes
    ----------
    name
        What traces call it.
    turn
        Carried state -> generator of one turn.
    start
        The first carried state.
    group
        Processes of one group are interchangeable: whatever one would do, the other would do. Not assumed: `Locals`
        runs the program of each of them and compares.
    """

    name: str
    turn: Turn
    start: Hashable
    group: Hashable


class Locals:
    """The local states that occur, as integers; ``op[i]`` is what a process in local state ``i`` does next.

    Raises
    ------
    ValueError
        If two processes of one group would do different things.
    """

    def __init__(self, processes: Sequence[Process], on_new: Callable[[int], None]) -> None:
        self.op: list[Any] = [None]
        self.past: list[tuple[tuple[Any, Any], ...]] = [()]
        self._keys: list[tuple[int, Hashable, tuple[Any, ...]]] = [(-1, None, ())]
        self._ids: dict[tuple[int, Hashable, tuple[Any, ...]], int] = {}
        self._next: list[dict[Any, int]] = [{}]
        self._on_new = on_new
        self._processes = processes
        self._members: dict[Hashable, list[int]] = {}
        for pid, process in enumerate(processes):
            self._members.setdefault(process.group, []).append(pid)

    def start(self) -> list[int]:
        """The local state each process starts in."""
        return [self._intern(self._members[p.group][0], p.start, ()) for p in self._processes]

    def next(self, local: int, answer: Any) -> int:
        """The local state after ``answer`` to the operation of ``local``."""
        known = self._next[local].get(answer)
        if known is None:
            first, carried, answers = self._keys[local]
            known = self._next[local][answer] = self._intern(first, carried, (*answers, answer))
        return known

    def _intern(self, first: int, carried: Hashable, answers: tuple[Any, ...]) -> int:
        key = (first, carried, answers)
        known = self._ids.get(key)
        if known is not None:
            return known
        ended, result, past = self._replay(first, carried, answers)
        if not ended:
            local = len(self.op)
            self.op.append(result)
            self.past.append(past)
            self._keys.append(key)
            self._next.append({})
            self._on_new(local)
        elif result is None:
            local = LEFT
        else:
            local = self._intern(first, result, ())
        self._ids[key] = local
        return local

    def _replay(
        self, first: int, carried: Hashable, answers: tuple[Any, ...]
    ) -> tuple[bool, Any, tuple[tuple[Any, Any], ...]]:
        runs = [_run(self._processes[pid].turn, carried, answers) for pid in self._members[self._processes[first].group]]
        if any(run[:2] != runs[0][:2] for run in runs):
            names = [self._processes[pid].name for pid in self._members[self._processes[first].group]]
            raise ValueError(f"{', '.join(names)} are of one group, but do different things after {answers}")
        return runs[0]


def _run(turn: Turn, carried: Hashable, answers: tuple[Any, ...]) -> tuple[bool, Any, tuple[tuple[Any, Any], ...]]:
    """(False, next operation) or (True, carried to the next turn), and what was done in this turn before."""
    past: list[tuple[Any, Any]] = []
    generator = turn(carried)
    try:
        op = next(generator)
        for answer in answers:
            past.append((op, answer))
            op = generator.send(answer)
    except StopIteration as end:
        return True, end.value, ()
    return False, op, tuple(past)
