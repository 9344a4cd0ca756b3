"""The codec of `Arrival`; and the deadline.

The description of an arriving operand has four forms between ``ts.matmul(arrival=)`` and the lane that polls:

1. `Arrival`: the caller's object.
2. `FlatArrival`: integers and the caller's own signal words, the arguments of a registered op.
3. `Awaited`: the live signals that a launch waits for. A plan has only the chunks (`Incoming`).
4. The gate's addresses and numbers (`tilestream.launch.gate`), from which a kernel makes its ``Gate``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.by_source import SourceArrival
from tilestream.arrival.signals import Signals
from tilestream.core.chunks import Incoming, chunks_of
from tilestream.core.error_record import sources

#: Default limit in seconds of the sum of a call's waits.
DEFAULT_DEADLINE = 30.0


class FlatArrival(NamedTuple):
    """An `Arrival` as arguments of a registered op: integers, and the caller's own signal words."""

    key: int
    epoch: int
    pivot: int
    num_chunks: int
    rows_per_chunk: int
    bounds: tuple[int, ...]
    words: torch.Tensor | None

    @classmethod
    def of(cls, a: Arrival | SourceArrival) -> FlatArrival:
        """The flat form of an arrival in its present epoch. One by source has a chunk of no rows for each signal."""
        if isinstance(a, SourceArrival):
            return cls(a.key, a.epoch, a.pivot, a.sources * (a.groups + 1), 1, (), None)
        return cls(a.key, a.epoch, a.pivot, a.num_chunks, a.rows_per_chunk, a.bounds, a.signals)

    @classmethod
    def from_ints(cls, ints: Sequence[int], words: torch.Tensor | None) -> FlatArrival | None:
        """The inverse of `ints`; None for an empty list, which means that the operand does not arrive."""
        if not ints:
            return None
        key, epoch, pivot, num_chunks, rows_per_chunk, *bounds = ints
        return cls(key, epoch, pivot, num_chunks, rows_per_chunk, tuple(bounds), words)

    @property
    def ints(self) -> list[int]:
        """All fields except the words."""
        return [self.key, self.epoch, self.pivot, self.num_chunks, self.rows_per_chunk, *self.bounds]

    def incoming(self, rows: int) -> Incoming:
        """See `tilestream.core.chunks.Arriving`."""
        chunks = chunks_of(rows, self.num_chunks, self.rows_per_chunk, self.bounds)
        return Incoming(chunks, self.pivot, self.copied, linked=self.linked)

    def published(self, rows: int) -> Incoming:
        """See `tilestream.core.chunks.Arriving`."""
        chunks = chunks_of(rows, self.num_chunks, self.rows_per_chunk, self.bounds, "publish", "the result")
        return Incoming(chunks, self.pivot)

    @property
    def chunking(self) -> tuple[object, ...]:
        """The fields that stay the same in all epochs."""
        return self.pivot, self.num_chunks, self.rows_per_chunk, self.bounds, self.copied, self.linked

    @property
    def copied(self) -> int:
        """See `Incoming`. 0 if the signals' owner has dropped them; `signals` raises in that case."""
        found = sources.get(self.key)
        return found.copied if isinstance(found, Signals) else 0

    @property
    def linked(self) -> bool:
        """See `Incoming`; as for `copied`."""
        found = sources.get(self.key)
        return isinstance(found, Signals) and found.linked

    def signals(self, op: str, device: torch.device) -> Signals:
        """The live signals of an operand on ``device``: `DeviceSignals` on a GPU.

        Raises
        ------
        ValueError
            If their owner has dropped them, or they are on another device.
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


class Awaited(NamedTuple):
    """The live signals that a launch waits for."""

    #: rows, columns: the signals of A's rows (of attention's keys), and of B's columns: `Signals`, on a GPU
    #: `DeviceSignals`; None for an operand that does not arrive.
    rows: Any
    columns: Any = None
    #: Limit in seconds of all waits together; on a GPU from the start of each worker.
    deadline: float = DEFAULT_DEADLINE
    op: str = "matmul"  # for messages
    epochs: tuple[int, int] = (0, 0)  # the epochs that a CPU launch waits for; on a GPU it is the present epoch

    @classmethod
    def of(
        cls, rows: FlatArrival | None, columns: FlatArrival | None, deadline: float, op: str, device: torch.device
    ) -> Awaited | None:
        """The signals that a launch with operands on ``device`` waits for; None if no operand arrives.

        Raises
        ------
        ValueError
            See `FlatArrival.signals`.
        """
        if rows is None and columns is None:
            return None
        of_rows, of_columns = (None if flat is None else flat.signals(op, device) for flat in (rows, columns))
        epochs = (0 if rows is None else rows.epoch, 0 if columns is None else columns.epoch)
        return cls(of_rows, of_columns, deadline, op, epochs)

    @classmethod
    def for_gradient(
        cls, rows: FlatArrival | None, columns: FlatArrival | None, op: str, out: torch.Tensor
    ) -> Awaited | None:
        """The signals for `void_if_late` after a GPU launch; None on the CPU, where a late chunk raises."""
        if type(out) is not torch.Tensor or not out.is_cuda:
            return None
        found = cls.of(rows, columns, DEFAULT_DEADLINE, op, out.device)
        if found is None or not torch.cuda.is_current_stream_capturing():
            return found
        rows, columns = (None if signals is None else signals.of_captured for signals in found[:2])
        return found._replace(rows=rows, columns=columns, epochs=(0, 0))

    def void_if_late(self, grad: torch.Tensor, needs: torch.Tensor | None = None) -> torch.Tensor:
        """``grad``, a gradient of the launch's output; NaN if a chunk that the launch missed has not come since.

        ``needs``: of the columns' chunks, those that the launch waited for; None: all.
        """
        if self.rows is not None:
            grad = grad + self.rows.void_if_late(self.epochs[0])
        if self.columns is not None:
            grad = grad + self.columns.void_if_late(self.epochs[1], needs)
        return grad

    @property
    def operands(self) -> tuple[tuple[Signals, int] | None, ...]:
        """The signals and the epoch of each operand; None for an operand that does not arrive."""
        pairs = zip((self.rows, self.columns), self.epochs, strict=True)
        return tuple(None if signals is None else (signals, epoch) for signals, epoch in pairs)


def check_deadline(deadline: float | None) -> float:
    """The deadline in seconds.

    Raises
    ------
    ValueError
        If it is not positive and finite: a wait without a bound could hang.
    """
    if deadline is None:
        return DEFAULT_DEADLINE
    seconds = float(deadline) if hasattr(deadline, "__float__") else math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(
            f"deadline={deadline!r}; it must be a positive, finite number of seconds (default {DEFAULT_DEADLINE:g})"
        )
    return seconds
