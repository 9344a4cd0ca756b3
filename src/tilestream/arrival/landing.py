"""Where a stream's rows land: in the tensor that the source fills, or beyond it, on a GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast

import torch

from tilestream.arrival.kernel_copies import KernelCopies
from tilestream.arrival.sources import as_rows
from tilestream.runtime.driver import copy_in
from tilestream.runtime.streams import lend_to

if TYPE_CHECKING:
    from tilestream.arrival.device import DeviceSignals
    from tilestream.arrival.signals import Signals
    from tilestream.core.chunks import Chunks


class Landing:
    """The rows are in place as soon as the source has brought them.

    Attributes
    ----------
    tensor
        What the stream fills.
    how
        For people; empty where nothing happens here.
    """

    how = ""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def begin(self) -> None:
        """A filling begins; called by the thread that begins it."""

    def issuing(self) -> AbstractContextManager[object]:
        """The block in which rows land and chunks are signalled."""
        return contextlib.nullcontext()

    def land(self, begin: int, end: int) -> None:
        """Rows [begin, end) have been brought."""

    def land_all(self, chunks: Chunks, order: Sequence[int], signals: Signals) -> bool:
        """All rows are there: land and signal them all, in this order of their chunks. False: nothing was done."""
        return False

    def end(self) -> None:
        """Everything has been brought and signalled."""

    def settled(self, timeout: float | None) -> bool:
        """Wait until what was landed is there, at most ``timeout`` seconds; whether it is."""
        return True


class DeviceLanding(Landing):
    """Rows go on to a GPU, by its copy engine, in the order of a stream of their own.

    A signal that is issued after a copy is written when the copy is done. Neither takes an SM (invariant 10). The
    copies overwrite the tensor behind what the stream that was current when the filling began was given to read it.
    """

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        with torch.inference_mode(False):
            super().__init__(torch.empty(host.shape, dtype=host.dtype, device=device))
        self._host = host
        self._device = device
        self.stream = lend_to(self, device)
        self._landed = torch.cuda.Event()
        # Freed, the memory is not handed out again before the copies into it are done (invariant 9).
        self.tensor.record_stream(self.stream)
        self.how = f"copied to {device}" + ("" if host.is_pinned() else " from memory that is not pinned")

    def begin(self) -> None:
        """See `Landing`."""
        # Once a filling: where rows are no view of the source, this is a copy of it.
        self._rows = as_rows(self._host)
        self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def issuing(self) -> AbstractContextManager[object]:
        """See `Landing`."""
        return torch.cuda.stream(self.stream)

    def land(self, begin: int, end: int) -> None:
        """See `Landing`."""
        with torch.inference_mode():
            as_rows(self.tensor)[begin:end].copy_(self._rows[begin:end], non_blocking=True)

    def land_all(self, chunks: Chunks, order: Sequence[int], signals: Signals) -> bool:
        """See `Landing`.

        Copies go to the driver without torch, which would take longer to issue one than a small chunk takes to copy.
        The last one is torch's, so that its allocator knows until when the source is in use (invariant 9).
        """
        if not self._rows.is_contiguous() or not self._rows.is_pinned():
            return False
        to, source, stream = self.tensor.data_ptr(), self._rows.data_ptr(), self.stream.cuda_stream
        size = self._rows.shape[1] * self._rows.element_size()
        signal, signalled = cast("DeviceSignals", signals).set_in_row(order)
        last = next((chunk for chunk in reversed(order) if chunks.bounds[chunk] < chunks.bounds[chunk + 1]), -1)
        for chunk in order:
            begin, end = chunks.range_of(chunk)
            if chunk == last:
                self.land(begin, end)
            elif begin < end:
                copy_in(stream, to + begin * size, source + begin * size, (end - begin) * size)
            signal(chunk)
        signalled()
        return True

    def end(self) -> None:
        """See `Landing`."""
        self._landed.record(self.stream)

    def offer(self, chunks: Chunks, pivot: int) -> KernelCopies:
        """The copies, for a kernel to make: they are made here if none does.

        Raises
        ------
        ValueError
            If a kernel cannot read the source.
        """
        rows = as_rows(self._host)
        if not rows.is_contiguous() or not rows.is_pinned():
            raise ValueError(
                f"stream_in: copies='kernel' of a source {list(self._host.shape)}, {self._host.dtype}, on "
                f"{self._host.device}, strides {self._host.stride()}, "
                f"{'pinned' if self._host.is_pinned() else 'not pinned'}; a kernel copies rows that lie one "
                "behind the other in pinned memory: source.contiguous().pin_memory(), or copies='engine'"
            )
        if rows.data_ptr() % 16:
            raise ValueError(
                f"stream_in: copies='kernel' of a source that begins at address {rows.data_ptr():#x}; a kernel copies "
                "from a multiple of 16 on: source.clone().pin_memory(), or copies='engine'"
            )
        order = [(pivot + step) % chunks.count for step in range(chunks.count)]

        def by_engine(signals: Signals) -> torch.cuda.Event:
            self.begin()
            try:
                with self.issuing():
                    self.land_all(chunks, order, signals)
            except BaseException:
                torch.cuda.current_stream(self._device).wait_stream(self.stream)
                raise
            self.end()
            return self._landed

        return KernelCopies(rows, as_rows(self.tensor), chunks, pivot, by_engine, self.stream)

    def settled(self, timeout: float | None) -> bool:
        """See `Landing`."""
        if timeout is None:
            self._landed.synchronize()
            return True
        end = time.perf_counter() + timeout
        while not self._landed.query():
            if time.perf_counter() >= end:
                return False
            time.sleep(0.0002)
        return True
