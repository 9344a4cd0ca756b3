"""What a generator of operations does: a turn of `tilestream.core.loop` or of the checker's protocols."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any


def operations(turn: Generator[Any, Any, Any], answer: Callable[[Any], Any] = lambda _: 0) -> tuple[list[Any], Any]:
    """The operations that a turn yields, each answered, and what it returns."""
    found: list[Any] = []
    given = None
    while True:
        try:
            found.append(turn.send(given))
        except StopIteration as end:
            return found, end.value
        given = answer(found[-1])
