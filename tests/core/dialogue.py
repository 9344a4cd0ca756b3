"""One `take` of a worker, played by hand: what it asks, given the answers, and what it ends with."""

from __future__ import annotations

from tilestream.core.schedule import Cursor, Schedule, take


def dialogue(schedule: Schedule, worker: int, *answers, cursor: Cursor = Cursor()):  # noqa: B008
    """``(asked, end)``: the operations up to STOP or to the last answer, and the item and cursor; None before STOP."""
    turn, asked = take(schedule, worker, cursor), []
    try:
        for answer in (None, *answers):
            asked.append(turn.send(answer))  # noqa: PERF401  what was asked before STOP counts
    except StopIteration as end:
        return asked, end.value
    return asked, None
