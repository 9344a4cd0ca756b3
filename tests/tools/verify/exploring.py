"""What a model explores, and as what the violation of a case is found."""

from __future__ import annotations

from functools import partial

from tilestream_tools.verify.gpu_loop import work_through
from tilestream_tools.verify.report import explore


def kind_of(case, model="workers"):
    violation = explore(model, case).violation
    return violation and violation.kind


def explored(model) -> tuple[set, set[str]]:
    """All states that a model reaches, and the lines that its steps write."""
    frontier, states, lines = [model.start()], set(), set()
    while frontier:
        state = frontier.pop()
        if state not in states:
            states.add(state)
            log = []
            frontier += [target for target, _ in model.steps(state, log)]
            lines |= {line for step in log for line in step}
    return states, lines


def split(text):
    """A program that holds the parts of a tile and hands them in so."""

    def finish(done):
        if done.item.parts == 1:
            yield done
        else:
            yield done._replace(held=True)
            yield from text(done.item)

    return named(text.__name__, finish=finish)


def named(name, **how):
    """`work_through` with some of its arguments, called so."""
    program = partial(work_through, **how)
    program.__name__ = name
    return program
