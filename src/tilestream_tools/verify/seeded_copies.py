"""Seeded bugs of model 8: ways to copy before the first tile with one thing wrong each."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tilestream.core.copy_items import Copy, CountPiece, Draw, Pieces, Restore, RestorePieces, Signal
from tilestream.core.loop import Poll
from tilestream_tools.verify.copies import Peek, Put, Text

Turn = Generator[Any, int, None]


def _finish_piece(pieces: Pieces, ticket: int) -> Turn:
    """Count a piece that was copied; the last of its chunk signals: as it should be."""
    chunk = pieces.chunk(ticket)
    if (yield CountPiece(chunk)) == pieces.per_chunk - 1:
        yield RestorePieces(chunk)
        yield Signal(chunk)


def _enlist(workers: int) -> Generator[Any, int, int]:
    """Take a copy item: as it should be."""
    number = yield Draw("items")
    if number == workers - 1:
        yield Restore("items")
    return number


def _dismiss(pieces: Pieces, copiers: int, ticket: int) -> Turn:
    """The last copier to find no piece left: as it should be."""
    if ticket == pieces.count + copiers - 1:
        yield Restore("pieces")


def counts_before_it_copies(pieces: Pieces, copiers: int, workers: int, worker: int) -> Turn:
    """A piece is counted when it is taken: the chunk is signalled before its last piece is there."""
    if (yield from _enlist(workers)) < copiers:
        ticket = yield Draw("pieces")
        while ticket < pieces.count:
            yield from _finish_piece(pieces, ticket)
            yield Copy(ticket)
            ticket = yield Draw("pieces")
        yield from _dismiss(pieces, copiers, ticket)


def signals_each_piece(pieces: Pieces, copiers: int, workers: int, worker: int) -> Turn:
    """Whoever has copied a piece signals: the chunk is there when its first piece is."""
    if (yield from _enlist(workers)) < copiers:
        ticket = yield Draw("pieces")
        while ticket < pieces.count:
            yield Copy(ticket)
            before = yield CountPiece(pieces.chunk(ticket))
            yield Signal(pieces.chunk(ticket))
            if before == pieces.per_chunk - 1:
                yield RestorePieces(pieces.chunk(ticket))
            ticket = yield Draw("pieces")
        yield from _dismiss(pieces, copiers, ticket)


def copiers_by_name(pieces: Pieces, copiers: int, workers: int, worker: int) -> Turn:
    """The workers with the first numbers copy: a tile waits for pieces that nobody takes, where they never run."""
    if worker < copiers:
        ticket = yield Draw("pieces")
        while ticket < pieces.count:
            yield Copy(ticket)
            yield from _finish_piece(pieces, ticket)
            ticket = yield Draw("pieces")
        yield from _dismiss(pieces, copiers, ticket)


def shares_by_number(pieces: Pieces, copiers: int, workers: int, worker: int) -> Turn:
    """Each copier has a share of the pieces of its own, and the last of them may come too late, or never."""
    number = yield from _enlist(workers)
    if number < copiers:
        for ticket in range(number, pieces.count, copiers):
            yield Copy(ticket)
            yield from _finish_piece(pieces, ticket)


def reads_then_writes(pieces: Pieces, copiers: int, workers: int, worker: int) -> Turn:
    """A piece is taken by a read and a write, not by one atomic add: two workers copy it."""
    if (yield from _enlist(workers)) < copiers:
        ticket = yield Peek()
        yield Put(ticket + 1)
        while ticket < pieces.count:
            yield Copy(ticket)
            yield from _finish_piece(pieces, ticket)
            ticket = yield Peek()
            yield Put(ticket + 1)
        yield from _dismiss(pieces, copiers, ticket)


def leaves_the_last_piece(pieces: Pieces, copiers: int, workers: int, worker: int) -> Turn:
    """The last piece is taken for a void ticket: nobody copies it."""
    if (yield from _enlist(workers)) < copiers:
        ticket = yield Draw("pieces")
        while ticket < pieces.count - 1:
            yield Copy(ticket)
            yield from _finish_piece(pieces, ticket)
            ticket = yield Draw("pieces")
        yield from _dismiss(pieces, copiers, ticket + 1)


def restores_no_chunk(pieces: Pieces, copiers: int, workers: int, worker: int) -> Turn:
    """A chunk's count is left as it is, for the next epoch to find."""
    if (yield from _enlist(workers)) < copiers:
        ticket = yield Draw("pieces")
        while ticket < pieces.count:
            yield Copy(ticket)
            if (yield CountPiece(pieces.chunk(ticket))) == pieces.per_chunk - 1:
                yield Signal(pieces.chunk(ticket))
            ticket = yield Draw("pieces")
        yield from _dismiss(pieces, copiers, ticket)


def restores_at_the_first_void(pieces: Pieces, copiers: int, workers: int, worker: int) -> Turn:
    """The first copier to find no piece left restores the count, and another begins anew."""
    if (yield from _enlist(workers)) < copiers:
        ticket = yield Draw("pieces")
        while ticket < pieces.count:
            yield Copy(ticket)
            yield from _finish_piece(pieces, ticket)
            ticket = yield Draw("pieces")
        if ticket == pieces.count:
            yield Restore("pieces")


def stops_when_it_is_over(pieces: Pieces, copiers: int, workers: int, worker: int) -> Turn:
    """A copier that finds the launch over takes no more: the operand stays half copied, with pieces counted."""
    if (yield from _enlist(workers)) < copiers:
        ticket = yield Draw("pieces")
        while ticket < pieces.count and not (yield Poll()):
            yield Copy(ticket)
            yield from _finish_piece(pieces, ticket)
            ticket = yield Draw("pieces")
        yield from _dismiss(pieces, copiers, ticket)


def frees_its_item(pieces: Pieces, copiers: int, workers: int, worker: int) -> Turn:
    """The first to take a copy item restores their count: each who comes later is a copier, too."""
    number = yield Draw("items")
    if number == 0:
        yield Restore("items")
    if number < copiers:
        ticket = yield Draw("pieces")
        while ticket < pieces.count:
            yield Copy(ticket)
            yield from _finish_piece(pieces, ticket)
            ticket = yield Draw("pieces")
        yield from _dismiss(pieces, copiers, ticket)


#: Name, what it is found as, and the text.
SEEDS: tuple[tuple[str, str, Text], ...] = (
    ("piece counted before it is copied", "read before arrival", counts_before_it_copies),
    ("signalled by its first piece", "read before arrival", signals_each_piece),
    ("copiers by name", "deadlock", copiers_by_name),
    ("pieces shared out beforehand", "deadlock", shares_by_number),
    ("piece taken by a read and a write", "double work", reads_then_writes),
    ("last piece left", "deadlock", leaves_the_last_piece),
    ("count of pieces not restored", "count not restored", restores_no_chunk),
    ("pieces begun anew", "double work", restores_at_the_first_void),
    ("copier that stops with the launch", "missing work", stops_when_it_is_over),
    ("copy items taken without end", "double work", frees_its_item),
)
