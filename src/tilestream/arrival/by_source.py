"""`SourceArrival`: rows of several sources, sorted by group, whose counts arrive before them.

The words of a source lie side by side, so a producer signals a source by one contiguous write: first the word of its
counts, then a word for each group (`tilestream.core.sources`).
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final

from tilestream.arrival.arrival import Signalled, check_signals, make_signals
from tilestream.arrival.signals import Signals
from tilestream.core.arguments import is_whole
from tilestream.core.chunks import MOST_CHUNKS
from tilestream.core.errors import kind_of
from tilestream.core.grid import INT31
from tilestream.core.sources import counts_word, rows_word

if TYPE_CHECKING:
    import torch


class SourceArrival(Signalled):
    """The rows of several sources, which arrive in any order, and whose numbers are known only when they come.

    Source ``s`` has a place of ``capacity`` rows of the input ``[sources * capacity, K]``: from row ``s * capacity``
    on. Its rows lie there from the first on, sorted by group: ``counts[s, 0]`` of group 0, and so on. What lies behind
    them is not read.

    A producer writes a source's counts and calls `signal_counts`, and writes the rows of a group and calls
    `signal_rows`, in any order. ``ts.grouped_mm(..., arrival=...)`` starts at once and computes each tile when its
    source's counts and its group's rows have arrived. `advance` begins the next epoch of the same buffers.

    Parameters
    ----------
    counts
        int32 ``[sources, groups]``, contiguous, on the input's device. A call reads a source's counts after their
        signal, so they must stay as they are until the call has ended.
    capacity
        Rows of a source's place, at least 1. Rows that are not there cost nothing, so it may be large.
    pivot
        The source to start from, such as this rank's own; the others follow in order and wrap around.
    signals
        Your own signal words, ``[sources, groups + 1]`` of int32 or uint32 on the input's device: 0 is not arrived, any
        other number arrived. ``signals[s, 0]`` is for the counts of source s, ``signals[s, 1 + g]`` for its rows of
        group g. As for `Arrival.uniform` they serve one call, which zeroes them when it has seen all of them. So signal
        groups without rows, too. None: tilestream keeps its own words, which serve several calls.

    Attributes
    ----------
    sources, groups : int
        The shape of ``counts``.

    Raises
    ------
    ValueError
        If a number is out of range, or ``counts`` or ``signals`` have the wrong shape, strides or device.
    TypeError
        If ``counts`` or ``signals`` have the wrong dtype, or are no tensors.

    Examples
    --------
    >>> counts = torch.zeros(2, 3, dtype=torch.int32)
    >>> arrival = SourceArrival(counts, capacity=8)
    >>> counts[1] = torch.tensor([2, 0, 1])
    >>> arrival.signal_counts(1)
    >>> arrival.signal_rows(1)
    >>> arrival.arrived(1), arrival.arrived(1, group=2), arrival.arrived(0)
    (True, True, False)
    """

    _FINAL = ("counts", "capacity", "sources", "groups", "pivot", "signals")

    def __init__(
        self, counts: torch.Tensor, capacity: int, *, pivot: int = 0, signals: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        sources, groups = check_counts("SourceArrival", counts)
        if not is_whole(capacity) or capacity < 1:
            raise ValueError(f"capacity={capacity!r}: a source has a place of a positive whole number of rows")
        if sources * operator.index(capacity) >= INT31:
            raise ValueError(f"capacity={capacity}: {sources} sources of so many rows; rows are counted in 31 bits")
        if not is_whole(pivot) or not 0 <= pivot < sources:
            raise ValueError(f"pivot={pivot!r}: workers start from one of the {sources} sources, 0 to {sources - 1}")
        words = sources * (groups + 1)
        if words > MOST_CHUNKS:
            raise ValueError(f"counts: {list(counts.shape)} need {words} signals; there are at most {MOST_CHUNKS}")
        if signals is not None:
            check_signals(signals, (sources, groups + 1))
        self.counts: Final = counts
        self.capacity: Final = operator.index(capacity)
        self.sources: Final = sources
        self.groups: Final = groups
        self.pivot: Final = operator.index(pivot)
        self.signals: Final = signals
        made = make_signals(words, None if signals is None else signals.view(-1), counts.device)
        if made.device != str(counts.device) and counts.device.index is not None:
            raise ValueError(f"signals: on {made.device}, counts on {counts.device}; they are on one device")
        self._signals = self._named(made)

    def _named(self, signals: Signals) -> Signals:
        groups = self.groups
        signals.named = lambda word: (word // (groups + 1), word % (groups + 1) - 1)
        return signals

    def with_signals(self, signals: Signals) -> SourceArrival:
        """An arrival of the same, already checked, sources with other signals: ``sources * (groups + 1)`` words."""
        made = object.__new__(SourceArrival)
        made.__dict__.update(self.__dict__, _signals=self._named(signals))
        return made

    def signal_counts(self, source: int, *, epoch: int | None = None) -> None:
        """Signal that the counts of a source have arrived. Call it after they were written, from any thread.

        On a GPU it is issued on the current stream, behind the copy of the counts; see `Arrival.signal`.

        Raises
        ------
        IndexError
            If there is no such source.
        ValueError
            If ``epoch`` has not begun yet.
        """
        self._signals.set(counts_word(self._checked(source), self.groups), epoch)

    def signal_rows(self, source: int, group: int | None = None, *, epoch: int | None = None) -> None:
        """Signal that the rows of a group of a source have arrived; ``group`` None: the rows of all its groups.

        Call it after they were written. With tilestream's own words in eager calls, groups without rows need none.

        Raises
        ------
        IndexError
            If there is no such source or group.
        ValueError
            If ``epoch`` has not begun yet.
        """
        source = self._checked(source)
        for one in range(self.groups) if group is None else (self._checked(group, "group"),):
            self._signals.set(rows_word(source, one, self.groups), epoch)

    def arrived(self, source: int, group: int | None = None) -> bool:
        """Whether the counts of a source have arrived in this epoch; with ``group`` whether that group's rows have."""
        source = self._checked(source)
        if group is None:
            return self._signals.arrived(counts_word(source, self.groups))
        return self._signals.arrived(rows_word(source, self._checked(group, "group"), self.groups))

    def _checked(self, number: int, what: str = "source") -> int:
        count = self.sources if what == "source" else self.groups
        if not is_whole(number) or not 0 <= number < count:
            raise IndexError(f"{what}={number!r}; there are {count} {what}s, from 0")
        return operator.index(number)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "SourceArrival: it is not pickled, since its signals are words in this process's memory: make another one "
            "there, and signal it there"
        )

    def __repr__(self) -> str:
        return (
            f"SourceArrival(sources={self.sources}, groups={self.groups}, capacity={self.capacity}, "
            f"pivot={self.pivot}, device={self.device}, epoch={self.epoch})"
        )


def check_counts(op: str, counts: torch.Tensor) -> tuple[int, int]:
    """The numbers of sources and groups of counts; raise for what are none."""
    import torch

    if not isinstance(counts, torch.Tensor):
        raise TypeError(f"{op}: counts is {kind_of(counts)}; it must be a torch.Tensor [sources, groups]")
    if counts.dtype != torch.int32:
        raise TypeError(f"{op}: counts is {counts.dtype}; it must be torch.int32: counts.int()")
    if counts.dim() != 2 or 0 in counts.shape:
        raise ValueError(f"{op}: counts has shape {list(counts.shape)}; it must be [sources, groups], none of them 0")
    if not counts.is_contiguous():
        raise ValueError(f"{op}: counts has stride {counts.stride()}; it lies in one piece: counts.contiguous()")
    sources, groups = counts.shape
    return sources, groups
