"""Breadth-first search through all states of a model, and the shortest path to a fault."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from tilestream_tools.verify.faults import Fault, Violation
from tilestream_tools.verify.model import Model, State


@dataclass(frozen=True)
class Outcome:
    """The result of a search: the explored ``states``; ``complete`` unless it stopped at its limit or a violation."""

    states: int
    steps: int
    fault: Fault | None
    trace: tuple[str, ...]
    complete: bool


def search(model: Model, limit: int | None = None) -> Outcome:
    """Explore all states of ``model``, nearest first, up to ``limit`` states or the first fault.

    In addition to the faults that operations raise, a state without steps must be a good end (``model.at_rest``), and
    each circle of states must take new work, so that each state leads to an end.
    """
    first = model.canonical(model.start())
    index: dict[State, int] = {first: 0}
    order: list[State] = [first]
    parent = array("q", [-1])
    targets = array("q")
    begins = array("q", [0])
    at = 0
    while at < len(order):
        state = order[at]
        try:
            steps = model.steps(state)
        except Fault as fault:
            return Outcome(len(order), len(targets), fault, _trace(model, order, parent, at, fault), False)
        for target, progressed in steps:
            target = model.canonical(target)
            known = index.get(target)
            if known is None:
                known = index[target] = len(order)
                order.append(target)
                parent.append(at)
            if not progressed:
                targets.append(known)
        begins.append(len(targets))
        at += 1
        if limit is not None and len(order) > limit:
            return Outcome(len(order), len(targets), None, (), False)
    circle = _on_a_circle(targets, begins)
    if circle is not None:
        round_ = Fault("livelock", "from the last state shown the steps can come back to it without new work")
        return Outcome(len(order), len(targets), round_, _trace(model, order, parent, circle, round_), False)
    return Outcome(len(order), len(targets), None, (), True)


def check(build: Callable[[bool], Model], configuration: str, limit: int | None = None) -> tuple[Violation | None, int]:
    """Search with reductions. If that finds a fault, search again without them for the shortest trace.

    Parameters
    ----------
    build
        Makes the model; the argument says whether with reductions.
    configuration
        The configuration in the violation's text.
    limit
        The number of states at which the search without reductions gives up.

    Returns
    -------
    (violation, states)
        The violation, if any, and the states of the search with reductions.
    """
    found = search(build(True))
    if found.fault is None:
        return None, found.states
    plain = search(build(False), limit)
    best = plain if plain.fault is not None else found
    assert best.fault is not None
    violation = Violation(best.fault.kind, best.fault.message, configuration, best.trace, shortest=best is plain)
    return violation, found.states


def _on_a_circle(targets: array[int], begins: array[int]) -> int | None:
    """A state on a circle, or None. States without incoming steps are removed until nothing changes (Kahn)."""
    count = len(begins) - 1
    incoming = array("q", bytes(8 * count))
    for target in targets:
        incoming[target] += 1
    ready = [state for state in range(count) if not incoming[state]]
    gone = 0
    while ready:
        state = ready.pop()
        gone += 1
        for i in range(begins[state], begins[state + 1]):
            target = targets[i]
            incoming[target] -= 1
            if not incoming[target]:
                ready.append(target)
    if gone == count:
        return None
    # The remaining states are on a circle or behind one. Walking back among them ends on a circle.
    back = {
        target: state
        for state in range(count)
        if incoming[state]
        for target in targets[begins[state] : begins[state + 1]]
        if incoming[target]
    }
    state, seen = next(iter(back)), set[int]()
    while state not in seen:
        seen.add(state)
        state = back[state]
    return state


def _trace(model: Model, order: list[State], parent: array[int], at: int, fault: Fault) -> tuple[str, ...]:
    """The lines from the start to state ``at``, then the step of the fault.

    States on the path are representatives, in which interchangeable processes may have changed places. So the path is
    walked again from the start with fixed names of processes: at each state some step leads to a state with the next
    representative.
    """
    path = [at]
    while parent[path[-1]] >= 0:
        path.append(parent[path[-1]])
    lines: list[str] = []
    state = model.start()
    for goal in reversed(path[:-1]):
        log: list[list[str]] = []
        steps = model.steps(state, log)
        pick = next(i for i, (target, _) in enumerate(steps) if model.canonical(target) == order[goal])
        state = steps[pick][0]
        lines += log[pick]
    if fault.kind != "livelock":
        try:
            model.steps(state, [])
        except Fault as again:
            lines += again.step
            fault.message = again.message  # with the names of this walk
    return tuple(lines)
