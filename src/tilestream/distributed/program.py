"""`Program`: the driver's operations of a call, recorded once for a form and a slot, and issued at each call.

The texts of `tilestream.core.protocols` are the only source of the order. Each text is run once for a slot, with
handlers that record the driver's operations instead of performing them. The values that differ between calls (the
calling stream, the epoch, addresses of the caller's tensors) are each a `Slot` of the sequence. The host's actions (a
launch, a copy of strided rows) are names in the program. So a call issues the operations of its text, in the text's
order, by a few native calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilestream.core.protocols.gather import SLOTS, Operations
from tilestream.runtime.sequence import MOST_OPERATIONS, Operation, Sequence, Slot

#: The functions that perform, or record, a protocol's operations, by their types.
Handlers = dict[type, Callable[[Any], Any]]
#: Sequences, and the names of the host's actions between them.
Program = tuple[Sequence | str, ...]

#: The host's actions, by their names in a program.
Host = Mapping[str, Callable[[], object]]

#: The values of an issue: the calling stream's handle, the call's epoch, and two values of the op.
CALLING, EPOCH, FIRST, SECOND = map(Slot, range(4))
_VALUES = 4


def more(number: int) -> Slot:
    """The value ``number`` of those that follow, in an issue by a `tilestream.launch.native_program.NativeProgram`."""
    return Slot(_VALUES + number)


class Recorder:
    """Records the program of calls in one slot. ``values``: their number, more than those of `issue` if native."""

    def __init__(self, slot: int, values: int = _VALUES) -> None:
        #: The epoch of a call of that slot, for the texts.
        self.epoch, self._values = slot + SLOTS, values
        self._parts: list[Sequence | str] = []
        self._operations: list[Operation] = []

    def add(self, operation: Operation) -> None:
        """Record an operation of the driver."""
        if len(self._operations) == MOST_OPERATIONS:
            self._close()
        self._operations.append(operation)

    def host(self, name: str) -> None:
        """Record the host's action ``name``."""
        self._close()
        self._parts.append(name)

    def epoch_of(self, op: Any) -> Slot:
        """The epoch that an operation of the text names, as a value of the issue."""
        found: Slot = EPOCH + (op.epoch - self.epoch)
        return found

    def run(self, text: Operations, handlers: Handlers) -> None:
        """Record all operations of a protocol that does not depend on answers."""
        run_protocol(text, handlers)

    def program(self) -> Program:
        """The recorded program."""
        self._close()
        return tuple(self._parts)

    def _close(self) -> None:
        if self._operations:
            self._parts.append(Sequence(self._values, self._operations))
            self._operations = []


def issue(program: Program, values: tuple[int, int, int, int], host: Host) -> None:
    """Issue a program.

    Parameters
    ----------
    values
        The values of `CALLING`, `EPOCH`, `FIRST` and `SECOND`.
    host
        The host's actions by name.
    """
    for part in program:
        if isinstance(part, str):
            host[part]()
        else:
            part.issue(*values)


def run_protocol(text: Operations, handlers: Handlers) -> int | None:
    """Pass each operation of a protocol to its handler; returns the protocol's result."""
    try:
        op = next(text)
        while True:
            op = text.send(handlers[type(op)](op))
    except StopIteration as end:
        result: int | None = end.value
        return result


def no_op(op: object) -> None:
    """The handler of an operation that the order of its stream implies."""
