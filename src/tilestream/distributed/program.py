"""`Program`: what a call gives the driver, recorded once for a form and a slot, and issued at each call.

The texts of `tilestream.core.protocols` are the only source of the order. Each is run once for a slot, with handlers
that record the driver's operation in place of performing it. What differs from call to call is a `Slot` of the
sequence: the calling stream, the epoch, addresses of the caller's tensors. What only the host can do (a launch, a copy
of strided rows) is a name in the program. So a call issues the operations of its text, in the order of its text, by a
few native calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilestream.core.protocols.gather import SLOTS, Operations
from tilestream.runtime.sequence import Operation, Sequence, Slot

#: What performs, or records, each operation of a protocol, by its type.
Handlers = dict[type, Callable[[Any], Any]]
#: Sequences, and names of what the host does between them.
Program = tuple[Sequence | str, ...]

#: What the host does, by the names of a program.
Host = Mapping[str, Callable[[], object]]

#: The values of an issue: the calling stream's handle, the call's epoch, and two that the op gives.
CALLING, EPOCH, FIRST, SECOND = map(Slot, range(4))
_VALUES = 4


class Recorder:
    """A program in the making, of calls in one slot."""

    def __init__(self, slot: int) -> None:
        #: A call of that slot, for the texts.
        self.epoch = slot + SLOTS
        self._parts: list[Sequence | str] = []
        self._operations: list[Operation] = []

    def add(self, operation: Operation) -> None:
        """Record an operation of the driver."""
        self._operations.append(operation)

    def host(self, name: str) -> None:
        """Record that the host does ``name`` here."""
        self._close()
        self._parts.append(name)

    def epoch_of(self, op: Any) -> Slot:
        """The epoch that an operation of the text names, as a value of the issue."""
        found: Slot = EPOCH + (op.epoch - self.epoch)
        return found

    def run(self, text: Operations, handlers: Handlers) -> None:
        """Record all operations of a protocol whose answers decide nothing."""
        run_protocol(text, handlers)

    def program(self) -> Program:
        """What was recorded."""
        self._close()
        return tuple(self._parts)

    def _close(self) -> None:
        if self._operations:
            self._parts.append(Sequence(_VALUES, self._operations))
            self._operations = []


def issue(program: Program, values: tuple[int, int, int, int], host: Host) -> None:
    """Issue a program.

    Parameters
    ----------
    values
        Of `CALLING`, `EPOCH`, `FIRST` and `SECOND`.
    host
        Does what the program names.
    """
    for part in program:
        if isinstance(part, str):
            host[part]()
        else:
            part.issue(*values)


def run_protocol(text: Operations, handlers: Handlers) -> int | None:
    """Give each operation that a protocol yields to its handler; returns what the protocol returns."""
    try:
        op = next(text)
        while True:
            op = text.send(handlers[type(op)](op))
    except StopIteration as end:
        result: int | None = end.value
        return result


def no_op(op: object) -> None:
    """An operation that the order of its stream implies."""
