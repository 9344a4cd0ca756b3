"""The record that a kernel writes when it gives up waiting, and the exception that it becomes. No torch here.

A launch that gives up writes one record of `FIELDS` 64-bit words into a ring of `RECORDS` in host memory that is mapped
on the GPU. The first word is the record's number, from 1. It is written last, as a release. The others are the fields
of `Record`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tilestream.core.errors import NO_ITEM, ArrivalTimeout, ProducerStopped, TilestreamError, source_name, tile_name
from tilestream.core.forks import free_in_child

#: Words of a record, and records of the ring.
FIELDS, RECORDS = 16, 64

#: The reasons why a launch gives up.
EXPIRED, FAILED, QUARANTINED = 3, 4, 5

#: The ops, by the number that a record holds.
_OPS: dict[str, int] = {}
_ops_lock = free_in_child(threading.Lock())


def op_number(op: str) -> int:
    """The number of ``op`` in records."""
    with _ops_lock:
        return _OPS.setdefault(op, len(_OPS))


class Told:
    """What has been raised of a failure that many signals share: a group of ranks is broken as a whole.

    Attributes
    ----------
    upto
        Records up to this one had come when it was raised last.
    """

    upto = 0


class Source(Protocol):
    """What a record's key refers to: `tilestream.arrival.signals.Signals`."""

    raised: set[int]
    told: Told | None
    whose: Callable[[int], tuple[int, str]] | None
    named: Callable[[int], tuple[int, int]] | None
    gave_up: Callable[[], None] | None

    @property
    def held(self) -> float:
        """Seconds that the driver has held up a copy of this epoch's producer; 0: no longer than a copy takes."""

    @property
    def epoch(self) -> int:
        """The present epoch."""

    def error(self, epoch: int) -> BaseException | None:
        """The error of an epoch's producer; None if it has reported none."""

    def failure(self, epoch: int) -> BaseException:
        """The exception of a wait for a failed producer."""

    def reported(self) -> None:
        """Note that a launch has reported the failure."""


#: The live sources by key. Each registers itself.
sources: weakref.WeakValueDictionary[int, Source] = weakref.WeakValueDictionary()


class Record(NamedTuple):
    """A record's words after its number."""

    why: int  # `EXPIRED`, `FAILED` or `QUARANTINED`
    op: int  # see `op_number`
    worker: int  # the worker that gave up first
    operand: int  # 0: it waited for A's rows, 1: for B's columns
    chunk: int  # the chunk that had not arrived
    #: key, epoch: of the signals.
    key: int
    epoch: int
    #: tile, batch, pm, pn: the tile of the first item that this worker did not compute. ``tile`` is -1 without such an
    #: item, ``batch`` is -1 if there is only one.
    tile: int
    batch: int
    pm: int
    pn: int
    #: waited, allowed: nanoseconds of the wait for this chunk, and of the launch's deadline.
    waited: int
    allowed: int

    def error(self) -> BaseException | None:
        """The exception of this record; None if the failure has been raised elsewhere already."""
        op = next((name for name, number in _OPS.items() if number == self.op), "matmul")
        argument = "weight_arrival" if self.operand else "arrival"
        signals = sources.get(self.key)
        cause = signals.error(self.epoch or signals.epoch) if signals is not None else None
        if self.why == FAILED:
            if signals is None:
                return ProducerStopped(f"{op}: the producer of {argument} failed; its exception went with its Arrival")
            signals.reported()
            return None if self.epoch in signals.raised else signals.failure(self.epoch)
        if self.why == QUARANTINED and signals is not None and signals.gave_up is not None:
            return signals.failure(self.epoch)  # of ranks: their group is broken
        if self.why == QUARANTINED:
            return TilestreamError(
                f"{op}: an earlier launch that waited for these signals missed a chunk of {argument}, and what is "
                "left of them must not be taken for news; the result is NaN. When the producers of that launch have "
                "stopped, call arrival.reset()"
            )
        rank, item = None, NO_ITEM
        if self.tile >= 0:
            item = tile_name(self.tile, self.pm, self.pn, self.batch if self.batch >= 0 else None)
        if signals is not None and signals.whose is not None:
            rank, argument = signals.whose(self.chunk)
        source = None
        if signals is not None and signals.named is not None:
            source = signals.named(self.chunk)
            if self.tile < 0:
                item = source_name(*source)
        if signals is not None and signals.gave_up is not None:
            signals.gave_up()
        error = ArrivalTimeout(
            op, self.worker, self.chunk, item, self.waited * 1e-9, self.allowed * 1e-9, rank, argument, source,
            0.0 if signals is None else signals.held,
        )  # fmt: skip
        error.__cause__ = cause
        return error
