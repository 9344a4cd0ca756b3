"""`FlatArrival`: an `Arrival` as a registered op takes it; and the deadline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilestream.arrival.arrival import Arrival, chunks_of
from tilestream.arrival.signals import Signals
from tilestream.plan.problem import Incoming

#: Seconds that all of a call's waits together may take, where the caller does not say.
DEFAULT_DEADLINE = 30.0


@dataclass(frozen=True)
class FlatArrival:
    """An `Arrival` as a registered op takes it: integers, and the caller's own signal words."""

    key: int
    epoch: int
    pivot: int
    num_chunks: int
    rows_per_chunk: int
    bounds: tuple[int, ...]
    words: torch.Tensor | None

    @classmethod
    def of(cls, arrival: Arrival) -> FlatArrival:
        """Take ``arrival`` as it is now: its present epoch."""
        return cls(
            arrival.key,
            arrival.epoch,
            arrival.pivot,
            arrival.num_chunks,
            arrival.rows_per_chunk,
            arrival.bounds,
            arrival.signals,
        )

    @classmethod
    def from_ints(cls, ints: Sequence[int], words: torch.Tensor | None) -> FlatArrival | None:
        """The inverse of `ints`; None for an empty list: that operand does not arrive."""
        if not ints:
            return None
        key, epoch, pivot, num_chunks, rows_per_chunk, *bounds = ints
        return cls(key, epoch, pivot, num_chunks, rows_per_chunk, tuple(bounds), words)

    @property
    def ints(self) -> list[int]:
        """All but the words."""
        return [self.key, self.epoch, self.pivot, self.num_chunks, self.rows_per_chunk, *self.bounds]

    def incoming(self, rows: int) -> Incoming:
        """What the plan must know, checked against the operand's rows."""
        chunks = chunks_of(rows, self.num_chunks, self.rows_per_chunk, self.bounds)
        return Incoming(chunks, self.pivot, self.copied)

    def published(self, rows: int) -> Incoming:
        """As `incoming`, of an output's rows, where its chunks are signalled by the matmul that computes them."""
        chunks = chunks_of(rows, self.num_chunks, self.rows_per_chunk, self.bounds, "publish", "the result")
        return Incoming(chunks, self.pivot)

    @property
    def chunking(self) -> tuple[object, ...]:
        """What does not change from epoch to epoch."""
        return self.pivot, self.num_chunks, self.rows_per_chunk, self.bounds, self.copied

    @property
    def copied(self) -> int:
        """See `tilestream.plan.problem.Incoming`."""
        try:
            return Signals.by_key(self.key).copied
        except KeyError:  # `signals` says so
            return 0

    def signals(self, op: str, device: torch.device) -> Signals:
        """The live signals of an operand on ``device``; where that is a GPU, `DeviceSignals`.

        Raises
        ------
        ValueError
            If they are no more, or elsewhere.
        """
        try:
            found = Signals.by_key(self.key)
        except KeyError:
            raise ValueError(
                f"{op}: no arrival with key {self.key} is alive; keep the Arrival (or the Stream) until the call has "
                "returned"
            ) from None
        if found.device != str(device):
            raise ValueError(
                f"{op}: the arrival's signals are on {found.device}, the operands on {device}; make the arrival with "
                f'device="{device}", as ts.stream_in(..., device="{device}") does'
            )
        return found


def check_deadline(deadline: float | None) -> float:
    """The deadline in seconds.

    Raises
    ------
    ValueError
        Unless it is positive and finite: a wait without bound is what hangs.
    """
    if deadline is None:
        return DEFAULT_DEADLINE
    seconds = float(deadline) if hasattr(deadline, "__float__") else math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(
            f"deadline={deadline!r}; it is a positive, finite number of seconds (default {DEFAULT_DEADLINE:g})"
        )
    return seconds
