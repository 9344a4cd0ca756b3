"""Sequences: copies, signals, waits and events of several streams, prepared once and issued by one native call.

A driver call costs the host microseconds, and the Python code around it more. So a sequence holds what a shape decides
(order, sizes, streams), and an issue passes what differs: addresses, stream handles, the epoch. Without the extension
`tilestream.runtime.driver` issues the same operations one by one.

>>> from tilestream.runtime.sequence import CopyIn, Sequence, Slot, Write
>>> STREAM, TO, FROM, WORDS, EPOCH = map(Slot, range(5))
>>> half = 1 << 20
>>> filling = Sequence(5, [
...     CopyIn(STREAM, TO, FROM, half), Write(STREAM, WORDS, EPOCH),
...     CopyIn(STREAM, TO + half, FROM + half, half), Write(STREAM, WORDS + 4, EPOCH),
... ])
>>> filling.issue(stream, to, source, words, epoch)  # doctest: +SKIP
"""

from __future__ import annotations

import ctypes
import logging
import struct
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tilestream.runtime import driver
from tilestream.runtime.extension import library, made

logger = logging.getLogger(__name__)

#: Of csrc/sequence.cpp.
_VERSION = 2
_OPERANDS = 4
#: The largest numbers of a sequence's operations and slots.
MOST_OPERATIONS, MOST_SLOTS = 1 << 16, 1 << 12


class Slot(NamedTuple):
    """The value of number ``index`` of an issue, plus a constant."""

    index: int  # type: ignore[assignment]
    plus: int = 0

    def __add__(self, more: int) -> Slot:  # type: ignore[override]
        return Slot(self.index, self.plus + more)


class Event:
    """An event of the current device that is recorded repeatedly. Torch makes a new one for each record."""

    def __init__(self) -> None:
        self._driver = driver.current()
        self.handle = self._driver.create_event()

    def __del__(self) -> None:
        if hasattr(self, "handle") and not sys.is_finalizing():
            self._driver.destroy_event(self.handle)

    def query(self) -> bool:
        """Whether the last record is complete; True before the first record."""
        return self._driver.has_come(self.handle)

    def synchronize(self) -> None:
        """Wait until the last record is complete."""
        self._driver.await_event(self.handle)

    def record(self, stream: int) -> None:
        """Record the event after all work issued so far on the stream with this handle."""
        self._driver.record_event(stream, self.handle)

    def hold(self, stream: int) -> None:
        """Let the stream with this handle wait for the event."""
        self._driver.wait_event(stream, self.handle)


#: An operand: a constant, or a value of the issue. Streams are handles.
Operand = int | Slot


class CopyIn(NamedTuple):
    """Copy ``size`` bytes from pinned memory to the device."""

    stream: Operand
    to: Operand
    source: Operand
    size: Operand


class CopyAcross(NamedTuple):
    """Copy ``size`` bytes inside a GPU, or between GPUs that this process has mapped."""

    stream: Operand
    to: Operand
    source: Operand
    size: Operand


class Write(NamedTuple):
    """Write the 32-bit word at ``address`` in stream order: see `tilestream.runtime.driver`."""

    stream: Operand
    address: Operand
    value: Operand


class Wait(NamedTuple):
    """Hold the stream until the 32-bit word at ``address`` is at least ``value``, compared cyclically."""

    stream: Operand
    address: Operand
    value: Operand


class Record(NamedTuple):
    """Record an event: an object that the sequence keeps alive, or a handle."""

    stream: Operand
    event: Operand | Event


class WaitEvent(NamedTuple):
    """Hold the stream until an event is complete."""

    stream: Operand
    event: Operand | Event


class AwaitEvent(NamedTuple):
    """Wait on the host until an event is complete. The GIL is not held."""

    event: Operand | Event


class Check(NamedTuple):
    """Stop the issue if one of ``words`` 64-bit words of host memory, ``stride`` bytes apart, is greater than ``most``.

    The words from ``address`` on belong to the caller, who keeps them.
    """

    address: Operand
    stride: Operand
    words: Operand
    most: Operand


class Stopped(RuntimeError):
    """A `Check` has stopped an issue."""


def _check(address: int, stride: int, count: int, most: int) -> None:
    for i in range(count):
        word = ctypes.c_int64.from_address(address + i * stride).value
        if word > most:
            raise Stopped(f"word {i} is {word}, and at most {most} would let the issue go on")


Operation = CopyIn | CopyAcross | Write | Wait | Record | WaitEvent | AwaitEvent | Check
#: By number in csrc/sequence.h: the operation, and a function with the same operands, or its name in
#: `tilestream.runtime.driver`.
_KINDS: tuple[tuple[type, str | Callable[..., None]], ...] = (
    (CopyIn, "copy_in"), (CopyAcross, "copy_across"), (Write, "stream_write"), (Wait, "stream_wait"),
    (Record, "record_event"), (WaitEvent, "wait_event"), (AwaitEvent, "await_event"), (Check, _check),
)  # fmt: skip
_NUMBERS = {kind: number for number, (kind, _) in enumerate(_KINDS)}


class SequenceError(RuntimeError):
    """The driver refused an operation.

    Attributes
    ----------
    done : int
        The number of the operation. All operations before it were issued, and none after it.
    """

    def __init__(self, message: str, done: int) -> None:
        super().__init__(message)
        self.done = done


class Sequence:
    """Operations in order, on any streams.

    Parameters
    ----------
    slots
        The number of values of an issue.
    operations
        The operations in the order of issue.

    Raises
    ------
    ValueError, TypeError
        If an operation is unknown, has an unknown slot or copies 0 bytes, or if there are too many.
    """

    def __init__(self, slots: int, operations: Iterable[Operation]) -> None:
        self._operations = tuple(operations)
        if not 0 <= slots <= MOST_SLOTS or len(self._operations) > MOST_OPERATIONS:
            raise ValueError(
                f"sequence: {slots} slots and {len(self._operations)} operations; there are at most {MOST_SLOTS} and "
                f"{MOST_OPERATIONS}: make several sequences"
            )
        self._calls = [_checked(number, slots, one) for number, one in enumerate(self._operations)]
        self._given = ctypes.c_uint64 * slots
        self._pack = struct.Struct(f"={slots}Q").pack
        self._slots = slots
        self._library = library()
        self._native = self._made()

    def _made(self) -> int | None:
        """The extension's sequence; None without an extension, or if its driver lacks a function."""
        if self._library is None:
            return None
        integers = [_VERSION, self._slots]
        for kind, operands in self._calls:
            integers.append(kind)
            for slot, plus in (*operands, *((-1, 0),) * (_OPERANDS - len(operands))):
                integers += slot, plus
        try:
            found: int | None = made(self._library, "tilestream_sequence_make", integers)
        except ValueError as error:
            found = None
            logger.debug("no native sequence: %s", error)
        self._issue = self._library.tilestream_sequence_issue
        self._issue.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        self._issue.restype = ctypes.c_int64
        return found

    def __del__(self) -> None:
        if getattr(self, "_native", None) is not None and self._library is not None:
            self._library.tilestream_sequence_free(ctypes.c_void_p(self._native))

    def __len__(self) -> int:
        return len(self._operations)

    @property
    def slots(self) -> int:
        """The number of values of an issue."""
        return self._slots

    @property
    def handle(self) -> int | None:
        """The extension's sequence, which lives as long as this object; None if Python issues the operations."""
        return self._native

    def issue(self, *values: int) -> None:
        """Issue all operations, without the GIL. The current device is that of the streams.

        Parameters
        ----------
        values
            One for each slot: addresses, handles of streams and events, epochs. They are taken modulo 2**64, words
            that are written modulo 2**32.

        Raises
        ------
        SequenceError
            If the driver refuses an operation. The operations before it are issued.
        ValueError
            If there are more or fewer values than slots.
        """
        if len(values) != self._slots:
            raise ValueError(f"sequence: {len(values)} values for {self._slots} slots; give one a slot")
        done = 0
        if self._native is not None:
            code = ctypes.c_int32()
            try:  # a quarter of the time of an array
                given: object = self._pack(*values)
            except struct.error:  # a value is negative or larger than 64 bits
                given = self._given(*values)
            done = self._issue(self._native, given, 0, ctypes.addressof(code))
        self.issue_rest(done, *values)

    def issue_rest(self, done: int, *values: int) -> None:
        """Issue the operations from number ``done`` on, by Python.

        The extension has not issued them: the thread may not have had a context yet. If the driver refuses again, its
        function raises why. Values and errors are those of `issue`.
        """
        for number in range(done, len(self._calls)):
            kind, operands = self._calls[number]
            found = _KINDS[kind][1]
            function = getattr(driver, found) if isinstance(found, str) else found
            try:
                function(*[plus if slot < 0 else values[slot] + plus for slot, plus in operands])
            except RuntimeError as error:
                raise SequenceError(
                    f"{error}; this is operation {number} of {len(self)}, {_KINDS[kind][0].__name__}", number
                ) from error


def _checked(number: int, slots: int, operation: Operation) -> tuple[int, tuple[tuple[int, int], ...]]:
    """The operation's kind, and for each operand a slot (or -1) and a constant."""
    kind = _NUMBERS.get(type(operation))
    if kind is None:
        raise TypeError(
            f"sequence: operation {number} is a {type(operation).__name__}; it must be one of this module's"
        )
    made = []
    for name, operand in zip(operation._fields, operation, strict=True):
        if isinstance(operand, Event):
            made.append((-1, operand.handle))
        elif isinstance(operand, Slot):
            if not 0 <= operand.index < slots:
                raise ValueError(
                    f"sequence: operation {number}, {type(operation).__name__}: {name} is of slot {operand.index}; "
                    f"there are {slots} slots, from 0"
                )
            made.append((operand.index, operand.plus))
        elif name == "size" and operand <= 0:
            raise ValueError(
                f"sequence: operation {number}, {type(operation).__name__}: size={operand}; a copy has at least one "
                "byte: leave it out"
            )
        else:
            made.append((-1, operand))
    return kind, tuple(made)
