"""The search itself, on toy protocols small enough to count by hand."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tilestream_tools.verify.faults import KINDS, Fault, Violation
from tilestream_tools.verify.model import Model
from tilestream_tools.verify.processes import LEFT, Locals, NotAlikeError, Process
from tilestream_tools.verify.search import check, search


class Step(NamedTuple):
    name: str


class Lock(NamedTuple):
    name: int


class Unlock(NamedTuple):
    name: int


class Look(NamedTuple):
    """Answer: whether the lock is free. Never blocks."""

    name: int


class Hidden:
    """Where a program must not keep anything."""

    memory = 0


class Toy(Model):
    """Processes and two locks."""

    progress = frozenset({Step})

    def __init__(self, *turns, groups=(), **how):
        self.size = len(turns)
        processes = [Process(f"p{i}", t, 0, groups[i] if groups else i) for i, t in enumerate(turns)]
        super().__init__(processes, **how)

    def memory(self):
        return [0, 0]

    def answers_of(self, op):
        at = self.size + op.name if isinstance(op, Lock | Look) else 0
        if isinstance(op, Lock):
            return lambda pid, op, m: () if m[at] else (0,)
        if isinstance(op, Look):
            return lambda pid, op, m: (1 - m[at],)
        return None

    def performer_of(self, op):
        if isinstance(op, Lock | Unlock):
            return lambda pid, op, answer, m: m.__setitem__(self.size + op.name, int(isinstance(op, Lock)))
        return None

    def at_rest(self, m):
        stuck = [p.name for pid, p in enumerate(self.processes) if m[pid] != LEFT]
        if stuck:
            raise Fault("deadlock", ", ".join(stuck))

    def describe(self, op):
        return f"{type(op).__name__}({op.name})"


def takes(*locks):
    def turn(state):
        for lock in locks:
            yield Lock(lock)
        for lock in reversed(locks):
            yield Unlock(lock)

    return turn


def steps(count):
    def turn(state):
        yield Step("once")
        return state + 1 if state + 1 < count else None

    return turn


def test_every_interleaving_is_explored():
    # Two processes of 3 steps each: every pair of positions is a state, and each step of either is a way between two.
    outcome = search(Toy(steps(3), steps(3), reduce=False))
    assert (outcome.states, outcome.complete, outcome.fault) == (16, True, None)


def test_same_order_of_locks_is_sound_and_opposite_orders_deadlock():
    assert search(Toy(takes(0, 1), takes(0, 1))).fault is None
    violation, states = check(lambda reduce: Toy(takes(0, 1), takes(1, 0), reduce=reduce), "two locks")
    assert violation == Violation("deadlock", "p0, p1", "two locks", ("p0: Lock(0)", "p1: Lock(1)"))
    assert states > 2


def test_spinning_is_a_livelock_unless_it_takes_new_work():
    def spins(state):
        yield Lock(0)
        while (yield Look(1)):
            pass

    def turns_for_ever(state):
        yield Look(0)
        return state

    def works_for_ever(state):
        yield Step("new work")
        return state

    assert search(Toy(spins)).fault.kind == "livelock"
    assert search(Toy(turns_for_ever)).fault.kind == "livelock"
    assert search(Toy(works_for_ever)).fault is None


def test_limit_stops_a_search():
    outcome = search(Toy(steps(50), steps(50), reduce=False), limit=100)
    assert not outcome.complete
    assert 100 < outcome.states < 200


def test_groups_are_checked_not_believed():
    with pytest.raises(NotAlikeError, match="p0, p1 are of one group"):
        search(Toy(takes(0), takes(1), groups=("same", "same")))


def test_merged_histories_are_checked_not_believed():
    def forgets(state):  # the same place and the same variables, and still another future: memory outside the generator
        Hidden.memory = yield Look(0)
        yield Step("same")
        yield Step("one" if Hidden.memory else "other")

    table = Locals([Process("p", forgets, 0, 0)], lambda local: None, merge=True)
    (start,) = table.start()
    table.next(start, 0)
    table.next(start, 1)
    with pytest.raises(ValueError, match="was merged with another that"):
        table.next(table.next(start, 0), 0)


def test_minimise_merges_what_no_answer_can_tell_apart():
    def remembers_in_vain(state):
        first = yield Look(0)
        second = yield Look(1)
        yield Step("end")
        return None if first + second < 5 else 0

    table = Locals([Process("p", remembers_in_vain, 0, 0)], lambda local: None, merge=True)
    table.minimise(lambda op, past: (0, 1) if isinstance(op, Look) else (0,))
    (start,) = table.start()
    after = {table.next(table.next(start, a), b) for a in (0, 1) for b in (0, 1)}
    assert len(after) == 1


def test_faults_have_known_kinds():
    with pytest.raises(ValueError, match="kind='mishap'"):
        Fault("mishap", "")
    assert all(says and not says.endswith(".") for says in KINDS.values())


def test_operations_that_are_equal_as_tuples_are_not_taken_for_one():
    # As tuples Lock(1) == Unlock(1), and both go on alike: merged, one would be done in the place of the other.
    assert Lock(1) == Unlock(1)

    def turn(state):
        if (yield Look(0)):
            yield Unlock(1)
        else:
            yield Lock(1)

    def other(state):
        yield Lock(0)

    for first, second in ((turn, other), (other, turn)):
        toys = [Toy(first, second, reduce=reduce) for reduce in (False, True)]
        for toy in toys:
            toy.domain = lambda op, past: (0, 1) if isinstance(op, Look) else (0,)
        ends = []
        for toy in toys:
            found, todo = set(), [toy.start()]
            while todo:
                state = todo.pop()
                steps = toy.steps(state)
                found |= set() if steps else {state[2:]}
                todo += [target for target, _ in steps]
            ends.append(found)
        assert ends[0] == ends[1] == {(1, 0), (1, 1)}


def test_interchangeable_processes_do_operations_of_one_type():
    turns = [takes(0), lambda state: (yield Unlock(0))]
    with pytest.raises(NotAlikeError):
        search(Toy(*turns, groups=("same", "same")))
