"""`SeededBug`: a protocol that is wrong in one place, and where to look for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilestream_tools.verify.faults import KINDS
from tilestream_tools.verify.report import Result, explore
from tilestream_tools.verify.sweep import Case


@dataclass(frozen=True)
class SeededBug:
    """A bug put in on purpose.

    Attributes
    ----------
    name
        What to call it.
    kind
        The kind of violation it must be found as: a key of `tilestream_tools.verify.faults.KINDS`.
    model
        The model that finds it.
    says
        What is wrong.
    cases
        Configurations with the bug, in growing order.
    """

    name: str
    kind: str
    model: str
    says: str
    cases: tuple[Case, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"SeededBug: kind={self.kind!r}; it is one of {', '.join(KINDS)}")

    def find(self) -> Result:
        """Explore growing sizes until the bug shows; the last result, with no violation, if it never does."""
        states, seconds = 0, 0.0
        for case in self.cases:
            result = explore(self.model, case)
            states, seconds = states + result.states, seconds + result.seconds
            if result.violation is not None:
                break
        return replace(result, states=states, seconds=seconds)


def says(of: object) -> str:
    """What is wrong with a text: the first line of what is said of it."""
    return (of.__doc__ or "").strip().split("\n")[0]


def with_slots(slots: int) -> Callable[[Any], Any]:
    """A change, for `rewritten`, that has ranks use so many slots."""
    return lambda op: op._replace(slot=op.epoch % slots) if hasattr(op, "slot") else op
