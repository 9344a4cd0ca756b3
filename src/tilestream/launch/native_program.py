"""`NativeProgram`: a call's sequences and launches, one behind another, issued by one native call.

`tilestream.runtime.sequence` prepares the driver's operations, and `tilestream.launch.native` the launches of equal
calls. A call between ranks needs both in turn: operations before the kernel, the kernel, operations behind it. A
program holds all of them. Its launches were issued before: `keeping` keeps those that the extension issues, and
`Launched.of_kernel` prepares the launch of a kernel that Python has issued. A `Patch` says which address or word of a
launch is a value of the issue.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tilestream.launch.observe import OPERANDS, WORDS
from tilestream.runtime.driver import error_name
from tilestream.runtime.extension import library, made
from tilestream.runtime.sequence import Sequence, Slot

#: Of csrc/program.cpp.
_PROGRAM_VERSION = 2
_SEQUENCE, _LAUNCH = range(2)
#: Why an issue ended, beside the driver's codes.
_DECLINED, _STOPPED = -1, -3
_BEGIN = ctypes.c_int64(0)
#: The value that is the handle of the caller's stream.
_CALLER = Slot(0)


class Patch(NamedTuple):
    """What a launch is given at each issue.

    Attributes
    ----------
    name
        An operand, by its name in `tilestream.launch.observe.OPERANDS`; or one of `tilestream.launch.observe.WORDS`; or
        a parameter of the kernel of `Launched.of_kernel`.
    value
        A value of the issue, or a constant.
    """

    name: str
    value: Slot | int


class Launched:
    """A launch that was issued before, and can be issued again.

    Parameters
    ----------
    handle
        The extension's launch.
    places
        By the names that patches have: whether it is a word, and its number among the words or the addresses.
    given
        Patches of each issue that gives no others.
    keep
        What has to live as long.
    """

    def __init__(
        self, handle: int, places: Mapping[str, tuple[bool, int]], given: Iterable[Patch] = (), keep: object = None
    ) -> None:
        self._library, self._places, self._given, self._keep = _extension(), places, tuple(given), keep
        self.handle = handle

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the modules that this needs may be gone
            self._library.tilestream_launch_free(ctypes.c_void_p(self.handle))

    def integers(self, patches: Iterable[Patch], stream: Slot = _CALLER) -> list[int]:
        """The launch as a part of a program; see `Program` in csrc/program.h. ``stream``: the value of its handle."""
        by_name = {one.name: one for one in (*self._given, *patches)}
        made = [_LAUNCH, self.handle, stream.index, len(by_name)]
        for name, value in by_name.values():
            is_word, index = self._places[name]
            slot, constant = (value.index, value.plus) if isinstance(value, Slot) else (-1, value)
            made += [int(is_word), index, slot, constant]
        return made

    @classmethod
    def of_kernel(cls, issued: tuple[Any, tuple[Any, ...]]) -> Launched:
        """The launch of a kernel that Python has issued, as `tilestream.launch.observe.Observation.issued` has it.

        Its patches go by the names of the kernel's parameters. Those that have none keep what they were given.

        Raises
        ------
        ValueError
            If it has more varying arguments than a launch takes, or one that is no address and no integer.
        """
        from tilestream.launch.native import recipe_of_kernel  # imports Triton

        recipe, places, given = recipe_of_kernel(*issued)
        return cls(
            made(_extension(), "tilestream_launch_make", recipe),
            places,
            [Patch(*one) for one in given.items()],
            issued[0],
        )


#: A part of a program: a sequence, or a launch with its patches, and its stream if that is not the caller's.
Part = Sequence | tuple[Launched, Iterable[Patch]] | tuple[Launched, Iterable[Patch], Slot]
#: The places of operands and words in a launch that the extension has issued.
_PLACES = {name: (False, i) for i, name in enumerate(OPERANDS)} | {name: (True, i) for i, name in enumerate(WORDS)}


@contextlib.contextmanager
def keeping() -> Iterator[list[Launched]]:
    """The launches that the extension issues in this block and thread, once the block has ended."""
    found, launches = library(), list[Launched]()
    if found is None:
        yield launches
        return
    take = found.tilestream_take_kept
    take.restype = ctypes.c_void_p
    found.tilestream_keep_launches(1)
    try:
        yield launches
        while handle := take():
            launches.append(Launched(handle, _PLACES))
    finally:
        found.tilestream_keep_launches(0)


class ProgramError(RuntimeError):
    """The driver refused a part of a program.

    Attributes
    ----------
    parts : int
        The parts that were issued. Of the next one, a sequence, operations may have been issued.
    """

    def __init__(self, message: str, parts: int) -> None:
        super().__init__(message)
        self.parts = parts


class NativeProgram:
    """See the module.

    Parameters
    ----------
    values
        The number of values of an issue. The first is the handle of the caller's stream.
    parts
        In order: sequences, each of which gets as many values as it has slots; and launches with their patches.

    Attributes
    ----------
    first_launch : int
        The number of the first part that is a launch; the number of parts if none is.
    progress : ctypes.Array or None
        How far the native call has come in the last issue. Have it be None before an issue that `recover` may follow:
        an interrupt may come before the issue begins.

    Raises
    ------
    ValueError
        If a patch or a sequence wants a value that is not there, if Python issues a sequence, or if there is no
        extension.
    """

    def __init__(self, values: int, parts: Iterable[Part]) -> None:
        self._parts, self._library = tuple(parts), _extension()
        integers = [_PROGRAM_VERSION, values, len(self._parts)]
        for part in self._parts:
            if not isinstance(part, Sequence):
                integers += part[0].integers(*part[1:])
            elif part.handle is None:
                raise ValueError("a program: Python issues one of its sequences")
            else:
                integers += [_SEQUENCE, part.handle, 0]
        kinds = [isinstance(part, Sequence) for part in self._parts]
        self.first_launch = kinds.index(False) if False in kinds else len(kinds)
        self._packed, self._stopped = struct.Struct(f"={values}Q").pack, ctypes.c_int64 * 3
        self._count = len(self._parts)
        self.progress: ctypes.Array[ctypes.c_int64] | None = None
        self._handle = ctypes.c_void_p(made(self._library, "tilestream_program_make", integers))
        # Without types of arguments, and with a packed string, a call costs the host half as much.
        self._issue = self._library.tilestream_program_issue
        self._issue.restype = ctypes.c_int64

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_handle") and not is_finalizing():
            self._library.tilestream_program_free(self._handle)

    def __len__(self) -> int:
        return self._count

    def issue(self, device: int, *values: int) -> bool:
        """Issue all parts, without the GIL, on the device with this index, which is the current one.

        ``values`` are not negative.

        Returns
        -------
        bool
            False if nothing was issued, and the call is Python's: the stream is captured, or lacks the words that a
            launch needs, the thread has no context yet, or a `tilestream.runtime.sequence.Check` of the first part has
            stopped it.

        Raises
        ------
        ProgramError
            If the driver refuses a part.
        """
        given, stopped, first = self._packed(*values), self._stopped(), _BEGIN
        self.progress = stopped
        while True:
            parts = self._issue(self._handle, given, device, first, stopped)
            if parts == self._count:
                return True
            operations, code, _ = stopped
            if code in (_DECLINED, _STOPPED) and not parts:
                return False
            part = self._parts[parts]
            if not isinstance(part, Sequence):
                why = error_name(code) if code > 0 else "it lacks a tensor map or words"
                raise ProgramError(f"launch {parts} of {len(self)} parts was not issued: {why}", parts)
            try:
                part.issue_rest(operations, *values[: part.slots])
            except RuntimeError as error:
                raise ProgramError(str(error), parts) from error
            first = ctypes.c_int64(parts + 1)

    def recover(self, error: BaseException) -> int:
        """The number of parts that were issued before ``error`` came out of `issue`, or right behind it.

        An interrupt comes when the native call has returned, and what that says is lost but for `progress`.
        """
        if isinstance(error, ProgramError):
            return error.parts
        return 0 if self.progress is None else self.progress[2]


def _extension() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise ValueError("a program: there is no extension")
    return found
