"""`stream_in`: producers that fill a tensor chunk by chunk, from a file, an iterator or another tensor."""

from __future__ import annotations

import functools
import math
import operator
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast, final

import torch

from tilestream.arrival import lanes, routed
from tilestream.arrival.arrival import Arrival, as_device
from tilestream.arrival.files import RangeReader, find_matrix
from tilestream.arrival.filling import Filling, Issued, Order, countdown
from tilestream.arrival.landing import Ahead, DeviceLanding, Landing, Prepared, filling
from tilestream.arrival.signals import Signals
from tilestream.arrival.sources import Source, file_source, iterator_source, pinned_source, row_count, tensor_source
from tilestream.core.arguments import is_one_of, is_whole
from tilestream.core.chunks import LINK_BYTES, Chunks
from tilestream.core.errors import kind_of
from tilestream.core.groups import by_load
from tilestream.core.schedule import MOST_QUEUES
from tilestream.runtime import streams
from tilestream.runtime.channel import check_device
from tilestream.runtime.streams import on_device

if TYPE_CHECKING:
    from tilestream.arrival.device import DeviceSignals
    from tilestream.arrival.kernel_copies import KernelCopies

#: Default bytes of a chunk of a file or a tensor: large enough for a disk's full speed, small enough to start early.
CHUNK_BYTES = 8 * 2**20

#: On a GPU the rows of a default chunk are a multiple of this number, so that no tile reads two chunks. If there are
#: too few rows they are a multiple of a smaller power of two.
GPU_ROWS = 256

#: Seconds for which the link idles between two chunks, at the signal. benchmarks/results/h100/stream.json: 268 MB (134
#: MB) take 4.84 ms (2.42) in one copy, and 5.25 ms (2.69) in 32 (16) chunks, about 0.1 ms of which is the host's time
#: before the first chunk.
CHUNK_SECONDS = 10e-6

#: The sources that `stream_in` takes.
Streamable = str | os.PathLike[str] | torch.Tensor | Iterable[torch.Tensor]


#: Streams whose tensors may not be filled yet, by the address of the tensor's memory.
open_streams: dict[int, weakref.ref[Stream]] = {}


class Route(Protocol):
    """The chunk order of a step of `stream_experts`: see `tilestream.arrival.experts`."""

    #: Where the rows of this step's experts end; None where the host does not know.
    ends: Sequence[int] | None

    def __call__(self, source: Source, offsets: torch.Tensor, weights: torch.Tensor | None) -> Order:
        """The order of a step's chunks; ``weights``, if given, become the data of ``source``."""


@final
class Stream:
    """A tensor that is being filled, and the arrival that shows its progress. Made by `stream_in`.

    It is a context manager: leaving it stops the producer. `restart` fills the same tensor again. `tilestream.matmul`
    and the other ops take the stream itself as an arriving operand. Until the tensor is filled they refuse it without
    its arrival, before anything is launched.

    Attributes
    ----------
    tensor : torch.Tensor
        The destination. Read a chunk's rows only after its signal, as ``ts.matmul(..., arrival=...)`` does.
    arrival : Arrival
        The chunks and their signals.
    started : float
        The producer's start, on `time.perf_counter`'s clock.
    """

    def __init__(
        self, arrival: Arrival, source: Source, landing: Landing | None = None, by_kernel: bool = False,
        order: Order | None = None, route: Route | None = None, turned: bool = False, ahead: Ahead | None = None,
        started: float | None = None, chunks: Chunks | None = None,
    ) -> None:  # fmt: skip
        self._source, self._landing = source, landing or Landing(source.tensor)
        self._order, self._route = order, route
        self.tensor = self._landing.tensor.mT if turned else self._landing.tensor
        self.arrival = arrival
        arrival._signals.streamed = True
        self._memory = self.tensor.untyped_storage().data_ptr()
        self._self = weakref.ref(self)
        self._chunks = chunks or arrival.chunks(row_count(self._landing.tensor))
        self._copies: KernelCopies | None = None
        if by_kernel and self.tensor.numel():
            self._copies = cast("DeviceLanding", self._landing).offer(self._chunks, arrival.pivot)
            cast("DeviceSignals", arrival._signals).copies = self._copies
        self._begin(ahead, started)

    def __del__(self) -> None:
        if hasattr(self, "_self"):
            self._shut()
        if isinstance(getattr(self, "_filling", None), routed.Routed):
            routed.hear_all()

    def _shut(self) -> None:
        """Remove this stream from the open ones."""
        if open_streams.get(self._memory) is self._self:
            open_streams.pop(self._memory, None)

    def _open(self) -> None:
        """From here on its tensor without its arrival is refused, until it is filled."""
        if self._memory:
            open_streams[self._memory] = self._self

    def _begin(self, ahead: Ahead | None = None, started: float | None = None) -> None:
        self.started = time.perf_counter() if started is None else started
        self._open()
        self._filling: Filling | Issued | routed.Routed | None = None
        if self._copies is not None:
            return
        if not self._source.readers and self._order is None and self._fill(ahead):
            return
        if isinstance(self._landing, DeviceLanding):
            if isinstance(self._order, routed.OffsetsCopy):
                self._filling = routed.begin(self.arrival, self._chunks, self._landing, self._order)
                if self._filling is not None:
                    return
                self._order.record()
            cast("DeviceSignals", self.arrival._signals).retire()  # the lane's earlier launches
        self._filling = Filling(self.arrival, self._chunks, self._source, self._landing, self._order)

    def _fill(self, ahead: Ahead | None) -> bool:
        """Issue all copies at once, if the driver can copy the source's rows directly; whether it can."""
        signals = self.arrival._signals
        try:
            if not self._landing.fill(self._chunks, self.arrival.pivot, signals, ahead):
                return False
        except Exception as error:  # the error must reach the call that waits for the rest
            cast("DeviceSignals", signals).retire()
            self.arrival.fail(error)
        self._filling = Issued(self._landing)
        return True

    @property
    def cpu_seconds(self) -> float:
        """The producer's CPU time, complete once it has ended."""
        return 0.0 if self._filling is None else self._filling.cpu_seconds

    @property
    def done(self) -> bool:
        """Whether the producer has ended."""
        return self._joined(0.0) if self._filling is None else self._filling.done

    @property
    def is_filled_here(self) -> bool:
        """Whether work issued now finds every row: all have arrived, or an earlier launch waits for them."""
        signals = self.arrival._signals
        if isinstance(self._landing, DeviceLanding):
            signals = cast("DeviceSignals", signals)
            if torch.cuda.is_current_stream_capturing():
                return signals.is_read_in_graph is not False  # without a filling the graph's owner decides
            # A launch of experts waits for those that its offsets give rows, which the host does not know.
            if (signals.awaited_here and not self.of_experts) or (self._copies is not None and self._copies.captured):
                return True
            filled = self.done and signals.error(signals.epoch) is None
        else:
            filled = all(signals.state())
        if filled:
            self._shut()
        return filled

    @property
    def is_filled_for_op(self) -> bool:
        """`is_filled_here` for a registered op, which may be a derivative of the launch that read the experts.

        That launch has waited for the experts that have rows; those without do not come.
        """
        if self.is_filled_here:
            return True
        if not self.of_experts:
            return False
        signals = self.arrival._signals
        if isinstance(self._landing, DeviceLanding):
            return cast("DeviceSignals", signals).awaited_here
        left_out = () if self._filling is None else self._filling.left_out
        return all(there or chunk in left_out for chunk, there in enumerate(signals.state()))

    def _joined(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds for the filling to end; whether it has."""
        if self._filling is not None:
            return self._filling.join(timeout)
        return self._copies is None or self._copies.settled(timeout)

    def explain(self) -> str:
        """The source of the data, and how it is read; with ``copies="kernel"``, the maker of this epoch's copies."""
        onward = f", {self._landing.how}" if self._landing.how else ""
        if self._copies is not None:
            onward += {
                None: " by the kernel that reads it first, if that can, else by a copy engine",
                "kernel": " by the kernel that read it first",
                "engine": " by a copy engine: its first reader makes no copies",
            }[self._copies.maker]
        if isinstance(self._landing, DeviceLanding) and cast("DeviceSignals", self.arrival._signals).is_in_graphs:
            onward += ", in CUDA graphs at each replay"
        if self.of_experts:
            return f"{self._source.describe()}{onward}; those with rows alone, most rows first"
        return f"{self._source.describe()}{onward}; {self._chunks.rows} rows in {self._chunks.count} chunks"

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Wait for the whole tensor and return it.

        Raises
        ------
        TimeoutError
            If it takes longer than ``timeout`` seconds.
        ValueError
            If ``timeout`` is not finite.
        RuntimeError
            If a CUDA graph is captured: no replay waits for the host.
        Exception
            The producer's exception, if it raised one; on a GPU, an error that the device has reported: see
            `tilestream.check`.
        """
        if isinstance(self._landing, DeviceLanding) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("stream_in: wait() while a CUDA graph is captured; give the Stream to what reads it")
        left, signals = countdown(timeout), self.arrival._signals
        begun = self._copies is None or self._copies.by_engine(signals, timeout)
        if not begun or not self._joined(left()):
            left_out = () if self._filling is None else self._filling.left_out
            missing = [c for c, there in enumerate(signals.state()) if not there and c not in left_out]
            what = f"{len(missing)} chunks not delivered, the first of them {missing[0]}" if missing else "not ended"
            raise TimeoutError(f"stream_in: after {timeout} s {what}")
        error = signals.take_error(signals.epoch)
        if error is not None:
            raise error
        if self.tensor.is_cuda:
            check_device(self.tensor.device.index)
        self._shut()
        return self.tensor

    @property
    def of_experts(self) -> bool:
        """Whether it was made by `stream_experts`, so that a chunk is an expert's matrix."""
        return self._route is not None

    def check_brings(self, op: str, offsets: object) -> None:
        """Raise `ValueError` if ``offsets`` give rows to an expert that this step does not bring. CPU only."""
        ends = None if self._route is None else self._route.ends
        if ends is None or type(offsets) is not torch.Tensor or offsets.device.type != "cpu":
            return
        if offsets.is_nested or offsets.layout != torch.strided:
            return  # it has no list of numbers; the op refuses it
        theirs: list[int] = offsets.detach().flatten().tolist()
        brought, wanted = (set(order[:count]) for order, count in map(by_load, (ends, theirs)))
        if len(theirs) == len(ends) and wanted - brought:
            raise ValueError(
                f"{op}: offsets={theirs} give rows to expert {min(wanted - brought)}, which the stream of offsets="
                f"{list(ends)} does not bring; give both the same: stream.restart(offsets)"
            )

    def restart(self, offsets: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> None:
        """Fill the same tensor from the beginning, in the next epoch, in which no chunk has arrived yet.

        The producer must have ended, and nothing may still read the tensor. A backward pass that needs the earlier
        contents raises: to autograd this call modifies the tensor in place, and the copies themselves do not. On a GPU
        with a pinned source it may be called while copies are in flight, and does not wait for them: the new copies
        follow the earlier ones and the current stream's earlier work, which must include the readers of the tensor.

        Under capture the filling becomes a part of the graph: each replay copies the pinned source's present contents,
        and the launches that are captured after it wait for its chunks. Eager fillings, and fillings of other graphs,
        are independent of it. The graph keeps the source and the tensor alive.

        Parameters
        ----------
        offsets, weights
            For a stream of `stream_experts` only. ``offsets``: the ends of this step's experts' rows. ``weights``: new
            weights, for example of another layer, with the shape, strides and dtype of the first ones; None: the same
            weights.

        Raises
        ------
        RuntimeError
            If the producer has not ended; or if a CUDA graph is captured, and the source is not a pinned tensor, or the
            stream is of `stream_experts`, or a kernel makes the copies (``copies="kernel"``): the kernel's graph makes
            them at each replay without `restart`.
        NotImplementedError
            If a HIP graph is captured.
        ValueError
            If the source can be read only once (an iterator).
        ValueError, TypeError
            If ``offsets`` or ``weights`` do not fit.
        """
        if self._route is None and (offsets is not None or weights is not None):
            raise TypeError("stream_in: restart(offsets, weights) is of ts.stream_experts; this stream has none")
        if self._route is not None and offsets is None:
            raise TypeError("stream_experts: restart() without offsets; they say which experts this step needs")
        if isinstance(self._landing, DeviceLanding) and torch.cuda.is_current_stream_capturing():
            self._check_capturable(self._landing)
            torch._C._increment_version((self.tensor,))
            self._landing.fill_in_graph(self._chunks, self.arrival.pivot, cast("DeviceSignals", self.arrival._signals))
            self._open()
            return
        if self.of_experts and self._filling is not None:
            self._filling.finish_issuing()  # it waits for the router of the step before, not for copies
        if self._filling is not None and not self._filling.issued:
            raise RuntimeError("stream_in: restart() while the producer is at work; wait() for it or close() it first")
        if self._route is not None:
            assert offsets is not None
            self._order = self._route(self._source, offsets, weights)
            if weights is not None and isinstance(self._landing, DeviceLanding):
                self._landing.take(self._source.tensor)
        self._source.rewind()
        torch._C._increment_version((self.tensor,))
        if isinstance(self._filling, Issued | routed.Routed):
            cast("DeviceSignals", self.arrival._signals).advance_at_once()
        else:
            self.arrival.advance()
        if self._copies is not None:
            self._copies.begin()
        self._begin()

    def _check_capturable(self, landing: DeviceLanding) -> None:
        """Raise unless a graph can fill the tensor at each replay."""
        if self._copies is not None:
            raise RuntimeError(
                "stream_in: restart() while a CUDA graph is captured; with copies='kernel' the graph makes the copies "
                "at each replay, without it"
            )
        if self._route is not None:
            raise RuntimeError(
                "stream_experts: restart() while a CUDA graph is captured; the host reads the offsets: call it outside "
                "of the capture"
            )
        if self._source.readers or not landing.in_place:
            raise RuntimeError(
                f"stream_in: restart() while a CUDA graph is captured, from {self._source.describe()}; a replay copies "
                "from a contiguous pinned tensor: give source.contiguous().pin_memory()"
            )
        if torch.version.hip is not None:
            raise NotImplementedError(
                "stream_in: restart() while a HIP graph is captured, which has no branches for copies; make the Stream "
                "with copies='kernel': its graph makes the copies at each replay, without restart()"
            )

    def close(self, timeout: float = 5.0) -> bool:
        """Stop the producer after its present chunk, and release the source. True if it has ended.

        A producer that is blocked in foreign code (an iterator that never yields) cannot be stopped: after ``timeout``
        seconds `close` returns, and the producer's thread keeps the tensor alive until it ends (invariant 9).
        """
        countdown(timeout)  # checks it
        if self._filling is None:
            return self._copies is None or self._copies.pending or self._joined(timeout)
        self._filling.halt()
        ended = self._filling.join(timeout)
        if ended:
            self._shut()
        return ended

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception the wait for a producer that cannot be stopped is short.
        self.close(5.0 if kind is None else 0.2)

    def __repr__(self) -> str:
        return f"Stream({list(self.tensor.shape)}, {self.tensor.dtype}, {self.arrival!r})"


def stream_in(
    source: Streamable,
    *,
    tensor: str | None = None,
    rows_per_chunk: int | None = None,
    bounds: Sequence[int] | None = None,
    pivot: int = 0,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    direct: bool | None = None,
    device: str | torch.device | None = None,
    copies: Literal["engine", "kernel"] = "engine",
) -> Stream:
    """Start filling a tensor from ``source``, chunk by chunk, in separate threads; returns at once.

    A GPU's copy engine copies the chunks on a separate stream. Each copy is followed by its signal, which the GPU
    writes. A pinned tensor needs no thread: all copies are issued when this returns, and are in flight.

    Parameters
    ----------
    source
        A ``.safetensors`` or ``.npy`` file; a CPU tensor; or an iterable of tensors, blocks of rows in order (from the
        pivot's first row on). An iterable is asked for the rows of ``shape``; extra rows in the last block that it
        yields are an error.
    tensor
        File: the tensor's name, needed if the file holds several matrices.
    rows_per_chunk, bounds
        The division of the rows into chunks: uniform, or ragged (see `Arrival`). Default: uniform, about 8 MiB a chunk;
        for a GPU between one and 32 chunks, depending on the size.
    pivot
        The chunk that is delivered first, and that the matmul starts from.
    shape, dtype
        Iterable: the shape of the whole tensor, at least 2-D, whose leading dimensions are rows; and its dtype.
    device
        The tensor's device: ``"cpu"``, or a GPU; None: the current GPU for a pinned source, else the CPU.
    copies
        For a GPU: ``"engine"``: the copy engine copies, in parallel to the kernel that waits for the chunks, without an
        SM. ``"kernel"``, for a pinned tensor: a few workers of the matmul that first reads the tensor copy it before
        their tiles. This suits busy copy engines, and streams that may run one after the other. A CUDA graph that
        captures that matmul copies at each replay (keep the `Stream` as long as the graph). If the kernel cannot copy,
        or the host reads by `Stream.wait`, the engine copies; ``plan(...).explain()`` reports which.
    direct
        File: bypass the page cache. True or None: if the file system allows it; False: never.

    Returns
    -------
    Stream
        The stream, for ``ts.matmul``, which also takes its ``tensor`` with its ``arrival``.

    Raises
    ------
    FileNotFoundError, ValueError, TypeError
        If the source or the chunks are refused. The call that waits for a chunk raises the producer's errors.

    Examples
    --------
    >>> with ts.stream_in("activations.safetensors", tensor="x") as x:  # doctest: +SKIP
    ...     y = ts.matmul(x, w)
    """
    alike = None
    # Written out: the link is idle until the first copy, and each step here is a part of that time.
    if (
        type(source) is torch.Tensor and isinstance(copies, str) and copies == "engine" and tensor is None
        and bounds is None and shape is None and dtype is None and direct is None
    ):  # fmt: skip
        alike = _alike(source, rows_per_chunk, pivot, device)
        if alike is not None and (made_again := _again(alike, source)) is not None:
            return made_again
    if not is_one_of(copies, ("engine", "kernel")):
        raise ValueError(f"stream_in: copies={copies!r}; it must be 'engine' or 'kernel'")
    target = target_of("stream_in", source, device)
    if copies == "kernel" and (target.type == "cpu" or not isinstance(source, torch.Tensor)):
        raise ValueError(
            f"stream_in: copies='kernel' of {kind_of(source)} to {target}; a kernel copies a pinned CPU tensor "
            "to its GPU: give one, or copies='engine'"
        )
    if isinstance(source, torch.Tensor):
        made = tensor_source(source, onward=target.type != "cpu")
    elif isinstance(source, str | os.PathLike):
        made = file_source(RangeReader(find_matrix(source, tensor), direct))
    elif isinstance(source, Iterable):
        if shape is None or dtype is None:
            raise ValueError("stream_in: an iterable source does not say how large it is: give shape= and dtype=")
        try:
            extents = tuple(map(operator.index, shape))
        except TypeError:
            raise TypeError(f"stream_in: shape={shape!r}; it must be a sequence of whole numbers") from None
        made = iterator_source(source, extents, dtype)
    else:
        raise TypeError(
            f"stream_in: source is {kind_of(source)}; it must be a file's path, a CPU tensor or an iterable of tensors"
        )
    try:
        for name, value in (("tensor", tensor), ("shape", shape), ("dtype", dtype), ("direct", direct)):
            if value is not None and name not in made.takes:
                raise ValueError(f"stream_in: {name}={value!r} means nothing for {made.describe()}")
        of = made.tensor
        if not is_whole(pivot):
            raise ValueError(f"stream_in: pivot={pivot!r}; it must be the number of a chunk")
        if bounds is None:
            if rows_per_chunk is not None and (not is_whole(rows_per_chunk) or rows_per_chunk < 1):
                raise ValueError(f"stream_in: rows_per_chunk={rows_per_chunk!r}; a chunk has at least one row")
            row_bytes = of.shape[-1] * of.element_size()
            arrival = _uniform(row_count(of), row_bytes, rows_per_chunk, pivot, target.type != "cpu")
        elif rows_per_chunk is None:
            arrival = Arrival.ragged(bounds, pivot)
        else:
            raise ValueError("stream_in: rows_per_chunk and bounds; chunks are uniform or ragged, not both")
        if target.type == "cpu":
            return Stream(arrival.with_signals(Signals(arrival.num_chunks)), made)
        if alike is not None and not made.readers and of.is_contiguous():
            if len(_made) >= _MOST_MADE:
                _made.clear()
            chunks = arrival.chunks(row_count(of))
            _made[alike] = _Kind(arrival, target, chunks, filling(chunks, arrival.pivot, row_bytes))
        return onto(target, made, arrival, copies == "kernel")
    except BaseException:
        made.close()
        raise


def onto(device: torch.device, source: Source, chunked: Arrival, by_kernel: bool, **more: Any) -> Stream:
    """A stream to a GPU with the chunks of ``chunked``; ``more``: see `Stream`."""
    with on_device(device):
        return _onto(device, source.tensor, lambda: source, chunked, by_kernel, **more)


def _onto(
    device: torch.device, host: torch.Tensor, source_of: Callable[[], Source], chunked: Arrival, by_kernel: bool,
    kind: _Kind | None = None, **more: Any,
) -> Stream:  # fmt: skip
    """As `onto`, to the current device. ``kind``: a pinned ``host`` in one piece is of it, and is copied at once."""
    behind = torch._C._cuda_getCurrentRawStream(device.index)
    lane = lanes.take(chunked.num_chunks, device, behind)
    try:
        if kind is None:
            landing = DeviceLanding(host, device, lane)
        else:
            landing = DeviceLanding(host, device, lane, kind.prepared)
            more["started"] = time.perf_counter()
            more["ahead"] = landing.issue(kind.prepared, lane.words.address, lane.epoch + 1, behind)
            more["chunks"] = kind.chunks
        from tilestream.arrival.device import DeviceSignals

        signals = DeviceSignals(chunked.num_chunks, device, lane=lane)
    except BaseException:
        lanes.drop(lane)
        raise
    return Stream(chunked.with_signals(signals), source_of(), landing, by_kernel, **more)


#: Shape and dtype of a pinned source; its rows of a chunk, pivot and device as they were given; the current device.
_Alike = tuple[torch.Size, torch.dtype, int | None, int, str | torch.device | None, int]


class _Kind(NamedTuple):
    """What streams of pinned tensors that are alike share. It is final, as what it depends on is."""

    arrival: Arrival  # its signals are not used
    device: torch.device
    chunks: Chunks
    prepared: Prepared


#: The kinds of streams of pinned tensors that were made.
_made: dict[_Alike, _Kind] = {}
_MOST_MADE = 256


def _alike(source: torch.Tensor, rows_per_chunk: object, pivot: object, device: object) -> _Alike | None:
    """What decides the chunks of a whole dense tensor; None if `stream_in` has to look at the arguments."""
    if (
        (rows_per_chunk is not None and type(rows_per_chunk) is not int) or type(pivot) is not int
        or not (device is None or type(device) in (str, torch.device)) or source.is_nested or source.requires_grad
        or source.layout is not torch.strided or source.device.type != "cpu" or not torch.cuda.is_initialized()
    ):  # fmt: skip
        return None
    return source.shape, source.dtype, rows_per_chunk, pivot, device, streams.current_device()  # type: ignore[return-value]


def _again(alike: _Alike, source: torch.Tensor) -> Stream | None:
    """The stream of a pinned tensor that is like an earlier stream's, which `stream_in` has checked; None for another.

    The copies are issued first, and everything that the host needs is made while the first of them is under way.
    """
    found = _made.get(alike)
    if found is None:
        return None
    device = found.device
    if (
        device.index != alike[-1] or not source.is_contiguous() or not source.is_pinned()
        or torch.cuda.is_current_stream_capturing()
    ):  # fmt: skip
        return None
    return _onto(device, source, lambda: pinned_source(source), found.arrival, False, found)


def target_of(op: str, source: Streamable, device: str | torch.device | None) -> torch.device:
    """The device of the tensor. ``op``: the function that is called, for messages."""
    if device is None:
        pinned = isinstance(source, torch.Tensor) and source.device.type == "cpu" and source.is_pinned()
        device = "cuda" if pinned else "cpu"
    target = as_device(device, f"{op}: device")
    if target.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{op}: device={str(device)!r}; tensors stream to the CPU and to GPUs")
    if target.type == "cpu":
        return target
    # The first question is cheap, and a pinned source has answered it.
    if not torch.cuda.is_initialized() and not torch.cuda.is_available():
        raise NotImplementedError(f"{op}: device={str(device)!r}; torch sees no GPU here: stream to the CPU")
    if torch.cuda.is_current_stream_capturing():
        again = "and call its restart() in it: each replay copies then"
        if op != "stream_in":
            again = "and call its restart() outside of the capture, too: the host reads the offsets"
        raise RuntimeError(f"{op}: a CUDA graph is being captured; make the Stream before the capture, {again}")
    return target if target.index is not None else torch.device("cuda", torch.cuda.current_device())


@functools.lru_cache(maxsize=256, typed=True)
def _uniform(rows: int, row_bytes: int, rows_per_chunk: int | None, pivot: int, on_gpu: bool) -> Arrival:
    """Uniform chunks, checked; the arrival's signals are not used."""
    if rows_per_chunk is None:
        rows_per_chunk = (gpu_rows_per_chunk if on_gpu else default_rows_per_chunk)(rows, row_bytes)
    return Arrival.uniform(rows_per_chunk, Chunks.uniform(rows, rows_per_chunk).count, pivot)


def default_rows_per_chunk(rows: int, row_bytes: int) -> int:
    """Rows of a chunk of about `CHUNK_BYTES`; with enough rows there are between 4 and 1024 chunks."""
    count = math.ceil(rows * row_bytes / CHUNK_BYTES)
    return max(1, math.ceil(rows / min(max(count, 4), 1024)))


def gpu_rows_per_chunk(rows: int, row_bytes: int) -> int:
    """Rows of a chunk to a GPU, for the least total time.

    A chunk costs the link `CHUNK_SECONDS`. The last chunk's tiles begin when all others are done, and take at most as
    long as its copy, if the matmul is as fast as the link. So ``n`` chunks of ``t`` seconds in total cost about
    ``n * CHUNK_SECONDS + t / n`` more than the copy itself. The minimum is at ``n = sqrt(t / CHUNK_SECONDS)``.
    """
    if not rows * row_bytes:
        return max(rows, 1)
    seconds = rows * row_bytes / LINK_BYTES
    # With more chunks than queues, tiles would be taken in the raster's order.
    count = min(max(1.0, math.sqrt(seconds / CHUNK_SECONDS)), MOST_QUEUES, rows)
    step = min(GPU_ROWS, 1 << int(rows / count).bit_length() - 1)

    def cost(per: int) -> float:
        return math.ceil(rows / per) * CHUNK_SECONDS + seconds * per / rows

    exact = math.ceil(rows / count)
    while True:
        above = step * math.ceil(exact / step)
        fitting = [per for per in (above - step, above) if per and math.ceil(rows / per) <= MOST_QUEUES]
        best = min(min(fitting, key=cost), rows)
        # Whole tiles are worth a half more cost; a step of one row gives `exact`.
        if step == 1 or cost(best) <= 1.5 * cost(exact):
            return best
        step //= 2
