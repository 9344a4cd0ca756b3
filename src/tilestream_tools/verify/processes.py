"""Protocols as processes: the local states of generator programs, found by replay.

A program is a generator function that yields operations, is sent their answers, and returns the state that it carries
to its next turn, or None when it leaves. So a process's local state is (carried state, answers so far in this turn):
the next operation follows from it by running the generator again up to there. Local states are interned as small
integers, so that the states of a model hash fast, and merge when they are equal.

With ``merge``, histories that leave the generator at the same place with the same variables are one local state: a
counter value that a worker has read and forgotten keeps no states apart. What a property depends on is kept apart all
the same (``remember``): the first answer of that kind in all turns. That merged histories go on the same way is
checked: up to `ALIASES` of them are carried along, and where one of them differs from the first, `Locals` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Turn = Callable[[Any], Generator[Any, Any, Any]]

#: The local state of a process that has left.
LEFT = 0

#: How many of the histories merged into one local state are replayed beside the first.
ALIASES = 1


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


class NotAlikeError(ValueError):
    """Processes of one group would do different things."""


class History(NamedTuple):
    """How a local state came about: whose, from which carried state, by which answers in this turn.

    ``past`` is what of the turns before is remembered.
    """

    first: int
    carried: Hashable
    answers: tuple[Any, ...]
    past: Hashable = None


class Locals:
    """The local states that occur, as integers; ``op[i]`` is what a process in local state ``i`` does next.

    Parameters
    ----------
    processes
        Whose.
    on_new
        Called with each new local state.
    merge
        See the module.
    remember
        What of an (operation, answer) keeps states apart though the program may have forgotten it; None: nothing. Of
        all of a process's life the first such thing.

    Raises
    ------
    NotAlikeError
        If two processes of one group would do different things.
    ValueError
        If two merged histories would.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        on_new: Callable[[int], None],
        merge: bool = False,
        remember: Callable[[Any, Any], Hashable] = lambda op, answer: None,
    ) -> None:
        self.op: list[Any] = [None]
        #: What is remembered, None if nothing.
        self.past: list[Hashable] = [None]
        self._histories: list[list[History]] = [[]]
        self._ids: dict[Hashable, int] = {}
        self._next: list[dict[Any, int]] = [{}]
        self._same: list[int] = []
        self._on_new = on_new
        self._merge = merge
        self._remember = remember
        self._processes = processes
        self._members: dict[Hashable, list[int]] = {}
        for pid, process in enumerate(processes):
            self._members.setdefault(process.group, []).append(pid)

    def start(self) -> list[int]:
        """The local state each process starts in."""
        entered = [self._enter(History(self._members[p.group][0], p.start, ())) for p in self._processes]
        return [self._same[local] if local < len(self._same) else local for local in entered]

    def next(self, local: int, answer: Any) -> int:
        """The local state after ``answer`` to the operation of ``local``."""
        known = self._next[local].get(answer)
        if known is None:
            first, *others = self._histories[local]
            known = self._next[local][answer] = self._enter(_extended(first, answer))
            for other in others:
                self._compare(other, answer, known)
        return known

    def minimise(self, domain: Callable[[Any, Hashable], Sequence[Any]], limit: int = 50_000) -> None:
        """Follow every local state through every answer of ``domain(op, past)``; merge those that always do the same.

        Moore's partition refinement: start from the operations, split while two states of a part go to different parts.
        Beyond ``limit`` local states nothing is merged.
        """
        self.start()
        local = 1
        while local < len(self.op):
            for answer in domain(self.op[local], self.past[local]):
                self.next(local, answer)
            local += 1
            if local > limit:
                return
        seeds: dict[Hashable, int] = {}
        part = [seeds.setdefault((type(op), op, past), len(seeds)) for op, past in zip(self.op, self.past, strict=True)]
        moves = [list(edges.items()) for edges in self._next]  # one operation and past, one domain: one order
        count = len(seeds)
        while True:
            seeds = {}
            part = [
                seeds.setdefault((part[i], *[part[target] for _, target in edges]), len(seeds))
                for i, edges in enumerate(moves)
            ]
            if len(seeds) == count:
                break
            count = len(seeds)
        first = [0] * count
        for i in range(len(part) - 1, -1, -1):
            first[part[i]] = i
        self._same = [first[p] for p in part]
        self._next = [{answer: self._same[target] for answer, target in edges.items()} for edges in self._next]

    def _compare(self, history: History, answer: Any, known: int) -> None:
        if self._enter(_extended(history, answer)) != known:
            raise ValueError(f"{history} was merged with another that goes on differently after {answer}")

    def _enter(self, history: History) -> int:
        """The local state of a history, new or merged."""
        if history in self._ids:
            return self._ids[history]
        ended, result, past, place = self._replay(history)
        if ended and result is None:
            local = LEFT
        elif ended:
            local = self._enter(History(history.first, result, (), past))
        else:
            key = (history.first, place, past) if self._merge and place is not None else history
            local = self._ids.setdefault(key, len(self.op))
            if local == len(self.op):
                self.op.append(result)
                self.past.append(past)
                self._histories.append([history])
                self._next.append({})
                self._on_new(local)
            elif len(self._histories[local]) <= ALIASES:
                self._histories[local].append(history)
                self._ids[history] = local
                if not _equal(self.op[local], result):
                    raise ValueError(f"{history} was merged with another that does {self.op[local]}, not {result}")
                for answer, known in list(self._next[local].items()):
                    self._compare(history, answer, known)
        self._ids[history] = local
        return local

    def _replay(self, history: History) -> tuple[bool, Any, Hashable, Hashable]:
        pids = self._members[self._processes[history.first].group]
        runs = [_run(self._processes[pid].turn, history, self._remember) for pid in pids]
        if any(run[0] != runs[0][0] or not _equal(run[1], runs[0][1]) for run in runs):
            names = ", ".join(self._processes[pid].name for pid in pids)
            raise NotAlikeError(f"{names} are of one group, but do different things after {history.answers}")
        return runs[0]


def _equal(a: Any, b: Any) -> bool:
    """Whether two operations, or carried states, are the same: as tuples, ``Count(item) == Reduce(item)``."""
    return type(a) is type(b) and a == b


def _extended(history: History, answer: Any) -> History:
    return history._replace(answers=(*history.answers, answer))


def _run(
    turn: Turn, history: History, remember: Callable[[Any, Any], Hashable]
) -> tuple[bool, Any, Hashable, Hashable]:
    """(False, next operation) or (True, carried to the next turn); what is remembered; the place in the program."""
    past = history.past
    generator = turn(history.carried)
    try:
        op = next(generator)
        for answer in history.answers:
            if past is None:
                past = remember(op, answer)
            op = generator.send(answer)
    except StopIteration as end:
        return True, end.value, past, None
    return False, op, past, _place(generator)


def _place(generator: Any) -> Hashable:
    """Where a suspended generator stands: position and variables, its own and its delegates'; None: no telling."""
    places: list[Hashable] = []
    while generator is not None:
        frame = generator.gi_frame
        variables = tuple(sorted(dict(frame.f_locals).items(), key=lambda pair: pair[0]))
        places.append((frame.f_code, frame.f_lasti, variables))
        generator = generator.gi_yieldfrom
    place = tuple(places)
    try:
        hash(place)
    except TypeError:
        return None
    return place
