"""Faults and their reports: `Fault` inside a model, `Violation` outside."""

from __future__ import annotations

from dataclasses import dataclass

#: The kinds of violations, with their texts.
KINDS: dict[str, str] = {
    "deadlock": "no process can go on, and no event from outside can help",
    "livelock": "steps go round in a circle without new work",
    "missing work": "all have left, and a tile is not finished",
    "double work": "a K step of a tile is done twice",
    "read before arrival": "rows, a stage or a C buffer are read before their data is there",
    "overwritten while read": "a stage, a slot or a C buffer gets new data while the old is still needed",
    "freed memory": "memory is read or written before it is there, or when it has been freed",
    "wrong data": "what is read or handed over is not what was meant",
    "other order": "a tile's products are added in another order than its plan states",
    "partial not visible": "partial results are added before they are visible",
    "count not restored": "a count is not zero when the launch is over",
    "counter out of bounds": "a counter passes the base of the next launch",
    "signal out of range": "a wait for a chunk that does not exist",
    "idle beside work": "a worker waits, and an item is left whose chunks have arrived",
    "gate ignored": "an item is done although its gate said that the launch is over",
    "poisoned in vain": "an item is poisoned by a worker that was not told that the launch is over",
    "poison lost": "a tile with a poisoned part is stored as a number",
    "reset too early": "a word is zeroed while a worker or a producer may still use it",
    "not reset": "all have left, and the words are not as the next launch has to find them",
    "not told": "a rank has given up, and a peer does not know",
    "not drained": "an expiry is not followed by all workers leaving",
    "barrier broken": "more arrivals at a barrier than it counts",
    "left too early": "all have left, and a store still reads shared memory, or a copy is in flight",
    "drained in vain": "a wait is for copies that only a later step needs",
    "ring in use": "all have left, and a stage, a slot or a barrier is not as it was",
}


class Fault(Exception):
    """Raised by a model if an operation breaks a property. ``kind`` is a key of `KINDS`."""

    def __init__(self, kind: str, message: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"Fault: kind={kind!r}; it must be one of {', '.join(KINDS)}")
        super().__init__(message)
        self.kind = kind
        self.message = message
        #: The operations of the faulty step, as readable lines.
        self.step: list[str] = []


@dataclass(frozen=True)
class Violation:
    """A property that does not hold, and a trace that leads to the fault.

    Attributes
    ----------
    kind
        A key of `KINDS`.
    message
        A description of this case.
    configuration
        The size of the model: the smallest that fails.
    trace
        The operations that lead to the fault, in order. It is the shortest trace, unless the configuration was too
        large for the search without reductions (``shortest`` is then False).
    """

    kind: str
    message: str
    configuration: str
    trace: tuple[str, ...]
    shortest: bool = True

    def __str__(self) -> str:
        width = len(str(len(self.trace)))
        lines = [f"{self.kind}: {self.message}", f"  in {self.configuration}"]
        lines += [f"  {n:>{width}}. {line}" for n, line in enumerate(self.trace, 1)]
        if not self.shortest:
            lines.append("  (a shorter order may exist: the search without reductions was stopped at its limit)")
        return "\n".join(lines)
