"""Seeded bugs of model 6: ways to publish an item with one thing wrong each."""

from __future__ import annotations

from collections.abc import Iterable

from tilestream.core.loop import Announce, CountRows, Landed, RestoreRows, Share
from tilestream_tools.verify.publish import AwaitTaken, ReadCount, Turn, WriteCount


def signals_before_landed(item: int, shares: Iterable[Share]) -> Turn:
    """What is stored has left shared memory, and is not waited for until it is written."""
    for chunk, rows, due in shares:
        if (yield CountRows(chunk, rows)) + rows == due:
            yield RestoreRows(chunk)
            yield Announce(chunk)
    yield Landed(item)


def loses_counts(item: int, shares: Iterable[Share]) -> Turn:
    """The count is read and written, not added to: of two workers' rows one's are lost."""
    yield Landed(item)
    for chunk, rows, due in shares:
        before = yield ReadCount(chunk)
        yield WriteCount(chunk, before + rows)
        if before + rows == due:
            yield RestoreRows(chunk)
            yield Announce(chunk)


def first_chunk_only(item: int, shares: Iterable[Share]) -> Turn:
    """A tile is counted for the chunk of its first row alone: the next one's count never comes to its end."""
    yield Landed(item)
    for chunk, rows, due in list(shares)[:1]:
        if (yield CountRows(chunk, rows)) + rows == due:
            yield RestoreRows(chunk)
            yield Announce(chunk)


def waits_for_the_next_item(item: int, shares: Iterable[Share]) -> Turn:
    """An item is published when the next one has been begun: the last never is."""
    yield Landed(item)
    yield AwaitTaken(item + 1, 1)
    for chunk, rows, due in shares:
        if (yield CountRows(chunk, rows)) + rows == due:
            yield RestoreRows(chunk)
            yield Announce(chunk)


def restores_nothing(item: int, shares: Iterable[Share]) -> Turn:
    """The count is left as it is, for the next launch to find."""
    yield Landed(item)
    for chunk, rows, due in shares:
        if (yield CountRows(chunk, rows)) + rows == due:
            yield Announce(chunk)


def signals_each_item(item: int, shares: Iterable[Share]) -> Turn:
    """Whoever counts signals: the chunk is there when its first tile is."""
    yield Landed(item)
    for chunk, rows, due in shares:
        before = yield CountRows(chunk, rows)
        yield Announce(chunk)
        if before + rows == due:
            yield RestoreRows(chunk)
