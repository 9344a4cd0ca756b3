"""`Arrival`: the caller's description of an input that arrives in chunks."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, cast

from tilestream.arrival.signals import Signals
from tilestream.core.arguments import is_whole
from tilestream.core.chunks import MOST_CHUNKS, Chunks, Incoming, chunks_of

if TYPE_CHECKING:
    import torch


class Signalled:
    """What `Arrival` and `SourceArrival` share: their signals, which other threads and the device write."""

    #: Attributes that are kept for life.
    _FINAL: ClassVar[tuple[str, ...]] = ()
    _signals: Signals

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._FINAL and name in self.__dict__:
            kind = type(self).__name__
            raise AttributeError(f"{kind}: {name} is final: its signals were made by it; make another {kind}")
        super().__setattr__(name, value)

    @property
    def device(self) -> str:
        """The device of the signals: ``"cpu"``, ``"cuda:0"``."""
        return self._signals.device

    @property
    def key(self) -> int:
        """The number that names the signals in a registered op's arguments."""
        return self._signals.key

    @property
    def epoch(self) -> int:
        """The present epoch, which `advance` increments."""
        return self._signals.epoch

    @property
    def error(self) -> BaseException | None:
        """The exception that a producer of this epoch reported by `fail`, for inspection; None without one."""
        return self._signals.error(self._signals.epoch)

    def fail(self, error: BaseException, *, epoch: int | None = None) -> None:
        """Report that what is missing will not come: the call that waits for it raises ``error``.

        On a GPU the next call, or `tilestream.check`, raises it. There, launches that wait for a caller's own words,
        and captured launches, wait until their deadline.
        """
        self._signals.fail(error, epoch)

    def advance(self) -> int:
        """Begin the next epoch, in which nothing has arrived yet. Returns the epoch, for what signals.

        A caller's own words are zeroed. On a GPU this is done on the current stream, after the launches and signals
        that were issued so far, and before those issued later.
        """
        return self._signals.advance()

    def reset(self) -> None:
        """Recover from what was missed: zero a caller's own words and, on a GPU, the words of captured launches.

        On a GPU, launches that use these words return NaN and an error until the reset, because they could mistake a
        late signal for one of their own. Call it after the producers of the launch that missed something have stopped,
        on a stream that is ordered before the next launch. Tilestream's own signals in eager launches need no reset:
        each epoch has its own value.
        """
        self._signals.reset()

    def __copy__(self) -> Signalled:
        return self  # its attributes are final, and the signals cannot be copied


class Arrival(Signalled):
    """The chunks in which the rows of an input arrive, and one signal a chunk.

    Made by `uniform` or `ragged`, or by `stream_in` for a source that tilestream reads itself. Rows are the rows of the
    input as a matrix: a ``[B, M, K]`` activation has ``B * M`` rows.

    The producer calls `signal` after each chunk. ``ts.matmul(..., arrival=...)`` starts at once and computes each tile
    when its rows have arrived. A matmul that fills the input takes the same arrival as ``publish=``, and signals its
    chunks. `advance` begins the next epoch of the same buffers.

    Attributes
    ----------
    num_chunks : int
        Number of chunks.
    rows_per_chunk : int
        Rows of each chunk except the last; 0 for ragged chunks.
    bounds : tuple of int
        The bounds of ragged chunks; empty for uniform ones.
    pivot : int
        The chunk that the raster starts from.
    signals : torch.Tensor or None
        The caller's own signal words, if any.

    Examples
    --------
    >>> arrival = Arrival.uniform(rows_per_chunk=128, num_chunks=8, pivot=2)
    >>> arrival.signal(2)
    >>> arrival.arrived(2), arrival.arrived(3)
    (True, False)
    """

    _FINAL = ("num_chunks", "rows_per_chunk", "bounds", "pivot", "signals")

    def __init__(
        self,
        num_chunks: int,
        *,
        rows_per_chunk: int = 0,
        bounds: tuple[int, ...] = (),
        pivot: int = 0,
        signals: torch.Tensor | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if bool(rows_per_chunk) == bool(bounds) or (bounds and len(bounds) != num_chunks + 1):
            raise ValueError("Arrival: chunks are uniform or ragged; make one with Arrival.uniform or Arrival.ragged")
        if isinstance(pivot, bool) or not isinstance(pivot, int) or not 0 <= pivot < num_chunks:
            raise ValueError(
                f"pivot={pivot}: the raster starts from one of the {num_chunks} chunks, 0 to {num_chunks - 1}"
            )
        if signals is not None:
            check_signals(signals, (num_chunks,))
        self.num_chunks: Final = num_chunks
        self.rows_per_chunk: Final = rows_per_chunk
        self.bounds: Final = bounds
        self.pivot: Final = pivot
        self.signals: Final = signals
        self._signals = make_signals(num_chunks, signals, device)

    def with_signals(self, signals: Signals) -> Arrival:
        """An arrival of the same, already checked, chunks with other signals."""
        made = object.__new__(Arrival)
        made.__dict__.update(self.__dict__, _signals=signals)
        return made

    @classmethod
    def uniform(
        cls,
        rows_per_chunk: int,
        num_chunks: int,
        pivot: int = 0,
        signals: torch.Tensor | None = None,
        device: str | torch.device | None = None,
    ) -> Arrival:
        """``num_chunks`` chunks of ``rows_per_chunk`` rows; the last chunk has the remaining rows of the input.

        Parameters
        ----------
        rows_per_chunk
            Rows of a chunk, at least 1. Any number is allowed: it need not divide the input's rows or be a multiple of
            a tile.
        num_chunks
            Number of chunks, at least 1. Together they must cover the input's rows, each with at least one row.
        pivot
            The chunk to start from; the others follow in order and wrap around.
        signals
            Your own signal words, ``[num_chunks]`` of int32 or uint32 on the input's device: 0 is not arrived, any
            other number arrived. They serve one call: the call that has seen all words zeroes them, including the words
            of chunks without rows. After an `ArrivalTimeout` they keep their values: call `reset` when your producers
            have stopped. With ``publish=`` on a GPU each matmul zeroes them first, and a reader there begins after the
            matmul's end. None: tilestream keeps its own words, which serve several calls.
        device
            The input's device, which holds tilestream's own words: ``"cuda"``, ``"cuda:1"``; None: the device of
            ``signals``, or the CPU. On a GPU a signal is issued on the current stream, see `signal`.

        Raises
        ------
        ValueError
            If a number is out of range, or ``signals`` has the wrong shape or device.
        TypeError
            If ``signals`` has the wrong dtype.
        """
        for name, value in (("rows_per_chunk", rows_per_chunk), ("num_chunks", num_chunks)):
            if not is_whole(value) or value < 1:
                raise ValueError(f"{name}={value!r}: a uniform arrival has a positive whole number of them")
        if num_chunks > MOST_CHUNKS:
            raise ValueError(f"num_chunks={num_chunks}: an arrival has at most {MOST_CHUNKS} chunks; give larger ones")
        index = operator.index
        return cls(index(num_chunks), rows_per_chunk=index(rows_per_chunk), pivot=pivot, signals=signals, device=device)

    @classmethod
    def ragged(
        cls,
        bounds: Sequence[int],
        pivot: int = 0,
        signals: torch.Tensor | None = None,
        device: str | torch.device | None = None,
    ) -> Arrival:
        """Chunk ``c`` has rows ``bounds[c]`` to ``bounds[c + 1]``; chunks may be empty.

        Parameters
        ----------
        bounds
            ``num_chunks + 1`` row numbers: from 0, non-decreasing, the last is the number of rows of the input.
        pivot, signals, device
            See `uniform`.

        Raises
        ------
        ValueError, TypeError
            If the bounds do not begin at 0, decrease, or are not whole numbers; else as for `uniform`.
        """
        try:
            chunks = Chunks(tuple(operator.index(bound) for bound in bounds))
        except TypeError:
            raise TypeError(f"bounds={bounds!r}; they are whole numbers of rows") from None
        return cls(chunks.count, bounds=chunks.bounds, pivot=pivot, signals=signals, device=device)

    @property
    def times(self) -> tuple[float | None, ...]:
        """The time of each chunk's signal in this epoch, on `time.perf_counter`'s clock; None before the signal.

        On a GPU all are None: the GPU writes the signals without the host.
        """
        return self._signals.times

    def signal(self, chunk: int, *, epoch: int | None = None) -> None:
        """Signal that chunk ``chunk`` has arrived. Call it after its rows were written, from any thread.

        On a GPU: call it after the copy of its rows was issued, on the copy's stream, which must be the current stream.
        The GPU writes the signal after the stream's earlier work, without a kernel or an SM. Under capture the signal
        becomes a part of the graph. A kernel that waits for the chunk must run on another stream; note that
        ``torch.cuda.Stream()`` hands out 32 streams in turn.

        Parameters
        ----------
        epoch
            The epoch to signal, so that a late producer cannot signal for the next epoch; None: the present epoch.

        Raises
        ------
        IndexError
            If ``chunk`` is not the number of a chunk.
        ValueError
            If that epoch has not begun yet.
        """
        self._signals.set(chunk, epoch)

    def arrived(self, chunk: int) -> bool:
        """Whether chunk ``chunk`` has arrived in this epoch."""
        return self._signals.arrived(chunk)

    def chunks(self, rows: int) -> Chunks:
        """The chunks of an input of ``rows`` rows.

        Raises
        ------
        ValueError
            If this arrival does not cover exactly these rows.
        """
        return chunks_of(rows, self.num_chunks, self.rows_per_chunk, self.bounds)

    def incoming(self, rows: int) -> Incoming:
        """See `tilestream.core.chunks.Arriving`."""
        return Incoming(self.chunks(rows), self.pivot, self._signals.copied, linked=self._signals.linked)

    def published(self, rows: int) -> Incoming:
        """See `tilestream.core.chunks.Arriving`."""
        chunks = chunks_of(rows, self.num_chunks, self.rows_per_chunk, self.bounds, "publish", "the result")
        return Incoming(chunks, self.pivot, own_words=self.signals is not None)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "Arrival: it is not pickled, since its signals are words in this process's memory: send num_chunks, "
            "rows_per_chunk, bounds and pivot, make an Arrival of them there, and signal it there"
        )

    def __repr__(self) -> str:
        shape = f"rows_per_chunk={self.rows_per_chunk}" if self.rows_per_chunk else "ragged"
        # On a GPU the number of arrived chunks is left out: reading it would wait for the device.
        where = f"device={self.device}" if self.device != "cpu" else f"arrived={sum(self._signals.state())}"
        return f"Arrival({shape}, num_chunks={self.num_chunks}, pivot={self.pivot}, {where}, epoch={self.epoch})"


def as_device(device: str | torch.device, name: str) -> torch.device:
    """The torch device of that name; `ValueError` if torch knows none."""
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"{name}={device!r}; it must be a device as torch names them: 'cpu', 'cuda', 'cuda:1'"
        ) from None


def make_signals(num_chunks: int, words: torch.Tensor | None, device: str | torch.device | None) -> Signals:
    """Signals on the input's device."""
    if words is None and (device is None or str(device) == "cpu"):
        return Signals(num_chunks)
    import torch

    asked = None if device is None else as_device(device, "device")
    where = words.device if words is not None else asked
    assert where is not None
    asked = asked or where
    if asked.type != where.type or asked.index not in (None, where.index):
        raise ValueError(f"device={str(device)!r}: the signals are on {where}; they are where the input is")
    if where.type == "cuda":
        from tilestream.arrival.device import DeviceSignals

        if not torch.cuda.is_available():
            raise NotImplementedError(f"device={str(device)!r}; torch sees no GPU here: leave device= away")
        if str(where) == "cuda":
            where = torch.device("cuda", torch.cuda.current_device())
        return DeviceSignals(num_chunks, where, None if words is None else words.view(torch.int32))
    if where.type != "cpu":
        raise NotImplementedError(f"device={str(device)!r}; inputs arrive on the CPU and on CUDA and ROCm GPUs")
    if words is None:
        return Signals(num_chunks)
    # Integers are read and written without torch, in any of torch's modes.
    integers = (ctypes.c_int32 * num_chunks).from_address(words.data_ptr())
    return Signals(num_chunks, cast("MutableSequence[int]", integers))


def check_signals(signals: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise for what are no signal words of a caller, one a chunk."""
    import torch

    if not isinstance(signals, torch.Tensor):
        raise TypeError(f"signals: {type(signals).__name__}; it must be a torch tensor of int32 or uint32")
    if signals.dtype not in (torch.int32, torch.uint32):
        raise TypeError(f"signals: dtype {signals.dtype}; signal words are torch.int32 or torch.uint32")
    if signals.device.type == "meta":
        raise ValueError("signals: on the meta device, which has no memory; they are on the input's device")
    if tuple(signals.shape) != shape:
        raise ValueError(f"signals: shape {tuple(signals.shape)}; there is one word a chunk: {shape}")
    if signals.numel() and not signals.is_contiguous():
        raise ValueError(f"signals: stride {signals.stride()}; the words lie side by side: pass signals.contiguous()")
