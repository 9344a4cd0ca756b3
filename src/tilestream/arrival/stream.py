"""`stream_in`: producers that fill a tensor chunk by chunk, from a file, an iterator or another tensor."""

from __future__ import annotations

import functools
import math
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, final

import torch

from tilestream.arrival import lanes
from tilestream.arrival.arrival import Arrival, as_device
from tilestream.arrival.files import RangeReader, find_matrix
from tilestream.arrival.landing import DeviceLanding, Landing
from tilestream.arrival.signals import Signals
from tilestream.arrival.sources import Job, Source, file_source, ignore, iterator_source, row_count, tensor_source
from tilestream.core.arguments import is_one_of, is_whole
from tilestream.core.chunks import Chunks
from tilestream.core.errors import ProducerStopped
from tilestream.core.groups import by_load
from tilestream.core.schedule import MOST_QUEUES
from tilestream.runtime import shutdown
from tilestream.runtime.channel import check_device
from tilestream.runtime.streams import on_device

if TYPE_CHECKING:
    from tilestream.arrival.device import DeviceSignals
    from tilestream.arrival.kernel_copies import KernelCopies

#: Default size of a chunk of a file or a tensor: large enough for a disk's full speed, small enough to start early.
CHUNK_BYTES = 8 * 2**20

#: On a GPU a default chunk is a multiple of this many rows, whole tiles, so that none reads two chunks; or of a smaller
#: power of two, where there are too few rows.
GPU_ROWS = 256

#: Bytes a second that one copy brings from pinned memory over PCIe 5.0 (16 lanes), and seconds for which the link idles
#: between two chunks, at the signal. benchmarks/results/h100/stream.json: 268 MB (134 MB) take 4.84 ms (2.42) in one
#: copy, and 5.25 ms (2.69) in 32 (16) chunks, of which some 0.1 ms were the host's, before the first.
LINK_BYTES, CHUNK_SECONDS = 55e9, 10e-6

#: What `stream_in` takes.
Streamable = str | os.PathLike[str] | torch.Tensor | Iterable[torch.Tensor]


#: Streams that may not have filled their tensors yet, by the address of the tensor's memory.
open_streams: dict[int, weakref.ref[Stream]] = {}


#: See `_Filling`.
Order = Callable[[], tuple[Sequence[int], int]]


class Route(Protocol):
    """What a stream of experts is told of a step: see `tilestream.arrival.experts`."""

    #: Where the rows of this step's experts end; None where the host does not know.
    ends: Sequence[int] | None

    def __call__(self, source: Source, offsets: torch.Tensor, weights: torch.Tensor | None) -> Order:
        """The order of a step's chunks; ``weights``: what ``source`` brings from now on."""


class _Filling:
    """One filling of the tensor: the threads that bring its chunks, and land and signal them in order.

    In order also where a later one is there first: a page that two chunks share is read with the earlier one, so that
    the later is complete only when that is, too.

    ``order``: asked by the first thread: the order of the chunks, and how many of them have rows that are wanted. The
    others are signalled behind these, and not brought. None: all, from the pivot's on.
    """

    def __init__(
        self, arrival: Arrival, chunks: Chunks, source: Source, landing: Landing, order: Order | None = None
    ) -> None:  # fmt: skip
        self._arrival, self._chunks, self._source, self._landing = arrival, chunks, source, landing
        self._epoch = arrival.epoch
        self._order: Sequence[int] = [(arrival.pivot + step) % chunks.count for step in range(chunks.count)]
        self._wanted, self._ask = chunks.count, order
        self._lock = threading.Lock()
        self._claimed = 0
        self._brought: set[int] = set()
        self._signalled = 0
        self.stop = threading.Event()
        self.cpu_seconds = 0.0
        readers = min(source.readers, chunks.count)
        self._running = max(readers, 1)
        self.threads: list[threading.Thread] = []
        landing.begin()
        if not readers:
            self._run()
            return
        shutdown.register(self)
        try:
            for i in range(readers):
                thread = threading.Thread(target=self._run, name=f"tilestream-producer-{i}", daemon=True)
                thread.start()
                self.threads.append(thread)
        except BaseException:  # no thread to be had: those that run must not outlive the source
            self.stop.set()
            self.join(None)
            raise

    def halt(self) -> None:
        """Have the threads end after the chunks that they are at."""
        self.stop.set()

    def stop_at_exit(self, timeout: float) -> None:
        """See `tilestream.runtime.shutdown`."""
        self.stop.set()
        self.join(timeout)

    def finish_issuing(self) -> None:
        """Wait for the threads, not for the copies that they have issued."""
        for thread in self.threads:
            thread.join()

    @property
    def issued(self) -> bool:
        """Whether the threads have ended."""
        return not any(thread.is_alive() for thread in self.threads)

    @property
    def done(self) -> bool:
        """Whether what the threads issued is done, too."""
        return self.issued and self._landing.settled(0.0)

    def join(self, timeout: float | None) -> bool:
        """Wait for the threads, and for what they issued; whether all have ended.

        A thread of this filling waits for the others only.
        """
        left = _countdown(timeout)
        others = [thread for thread in self.threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(left())
        return not any(thread.is_alive() for thread in others) and self._landing.settled(left())

    def _run(self) -> None:
        cpu = time.thread_time()
        try:
            while (claim := self._claim()) is not None:
                step, job = claim
                job()
                self._deliver(step)
        except BaseException as error:  # whatever it is, the caller that waits for the rest shall see it
            try:
                self._arrival.fail(error, epoch=self._epoch)  # before another reader can say that it was stopped
            finally:
                self.stop.set()
        finally:
            with self._lock:
                self.cpu_seconds += time.thread_time() - cpu
                self._running -= 1
                if not self._running:
                    self._landing.end()
                    self._source.close()  # a stream that is not closed keeps no file open

    def _claim(self) -> tuple[int, Job] | None:
        with self._lock:
            if self._ask is not None:
                (self._order, self._wanted), self._ask = self._ask(), None
            step = self._claimed
            if step == self._chunks.count:
                return None
            chunk = self._order[step]
            if self.stop.is_set():
                raise ProducerStopped(f"stream_in: closed before chunk {chunk} was delivered")
            self._claimed += 1
            return step, self._source.claim(*self._chunks.range_of(chunk)) if step < self._wanted else ignore

    def _deliver(self, step: int) -> None:
        with self._lock:
            self._brought.add(step)
            with self._landing.issuing():
                while self._signalled in self._brought:
                    chunk = self._order[self._signalled]
                    if self._signalled < self._wanted:
                        self._landing.land(*self._chunks.range_of(chunk))
                    self._arrival.signal(chunk, epoch=self._epoch)
                    self._signalled += 1
            last = self._signalled == self._chunks.count
        if last:
            self._source.end()


class _Issued:
    """A filling whose copies and signals were all issued when it began."""

    cpu_seconds, issued = 0.0, True

    def __init__(self, landing: Landing) -> None:
        self._landing = landing

    @property
    def done(self) -> bool:
        """Whether the copies are done."""
        return self._landing.settled(0.0)

    def join(self, timeout: float | None) -> bool:
        """Wait for the copies; whether they are done."""
        return self._landing.settled(timeout)

    def halt(self) -> None:
        """Nothing is left to be stopped."""


def _countdown(timeout: float | None) -> Callable[[], float | None]:
    """What is left of ``timeout`` seconds, at each call; None where there is no bound."""
    if timeout is not None and not (hasattr(timeout, "__float__") and math.isfinite(timeout)):
        raise ValueError(f"stream_in: timeout={timeout!r}; it is a finite number of seconds, or None for no bound")
    end = time.perf_counter() + (timeout or 0.0)
    return lambda: None if timeout is None else max(0.0, end - time.perf_counter())


@final
class Stream:
    """A tensor that is being filled, and the arrival that says how far it is. Made by `stream_in`.

    A context manager: leaving it stops the producer. `restart` fills the same tensor once more. `tilestream.matmul` and
    its kin take the stream itself as the operand that arrives. Its tensor without its arrival they refuse, before
    anything is launched, until it is filled.

    Attributes
    ----------
    tensor : torch.Tensor
        The destination. Read a chunk's rows only after its signal, as ``ts.matmul(..., arrival=...)`` does.
    arrival : Arrival
        The chunks and their signals.
    started : float
        When the producer was started, on `time.perf_counter`'s clock.
    """

    def __init__(
        self, arrival: Arrival, source: Source, landing: Landing | None = None, by_kernel: bool = False,
        order: Order | None = None, route: Route | None = None, turned: bool = False,
    ) -> None:  # fmt: skip
        self._source, self._landing = source, landing or Landing(source.tensor)
        self._order, self._route = order, route
        self.tensor = self._landing.tensor.mT if turned else self._landing.tensor
        self.arrival = arrival
        arrival._signals.streamed = True
        self._memory = self.tensor.untyped_storage().data_ptr()
        self._self = weakref.ref(self)
        self._chunks = arrival.chunks(row_count(self._landing.tensor))
        self._copies: KernelCopies | None = None
        if by_kernel and self.tensor.numel():
            self._copies = cast("DeviceLanding", self._landing).offer(self._chunks, arrival.pivot)
            cast("DeviceSignals", arrival._signals).copies = self._copies
        self._begin()

    def __del__(self) -> None:
        if hasattr(self, "_self"):
            self._shut()

    def _shut(self) -> None:
        """It is open no more."""
        if open_streams.get(self._memory) is self._self:
            open_streams.pop(self._memory, None)

    def _open(self) -> None:
        """From here on its tensor without its arrival is refused, until it is filled."""
        if self._memory:
            open_streams[self._memory] = self._self

    def _begin(self) -> None:
        self.started = time.perf_counter()
        self._open()
        self._filling: _Filling | _Issued | None = None
        if self._copies is not None:
            return
        if self._source.readers or self._order is not None or not self._fill():
            if isinstance(self._landing, DeviceLanding):
                cast("DeviceSignals", self.arrival._signals).retire()  # launches on the lane before
            self._filling = _Filling(self.arrival, self._chunks, self._source, self._landing, self._order)

    def _fill(self) -> bool:
        """Issue all at once, where the source's rows can be copied from where they are; whether they can."""
        signals = self.arrival._signals
        try:
            if not self._landing.fill(self._chunks, self.arrival.pivot, signals):
                return False
        except Exception as error:  # the call that waits for the rest shall see it
            cast("DeviceSignals", signals).retire()
            self.arrival.fail(error)
        self._filling = _Issued(self._landing)
        return True

    @property
    def cpu_seconds(self) -> float:
        """CPU time the producer took, once it has ended."""
        return 0.0 if self._filling is None else self._filling.cpu_seconds

    @property
    def done(self) -> bool:
        """Whether the producer has ended."""
        return self._joined(0.0) if self._filling is None else self._filling.done

    @property
    def is_filled_here(self) -> bool:
        """Whether what is issued now finds every row: all have come, or a launch in front of it waits for them."""
        signals = self.arrival._signals
        if isinstance(self._landing, DeviceLanding):
            signals = cast("DeviceSignals", signals)
            if torch.cuda.is_current_stream_capturing():
                return signals.is_read_in_graph is not False  # else: for the owner of the graph to say
            if signals.awaited_here or (self._copies is not None and self._copies.captured):
                return True
            filled = self.done and signals.error(signals.epoch) is None
        else:
            filled = all(signals.state())
        if filled:
            self._shut()
        return filled

    def _joined(self, timeout: float | None) -> bool:
        """Wait until what was begun has ended, at most ``timeout`` seconds; whether it has."""
        if self._filling is not None:
            return self._filling.join(timeout)
        return self._copies is None or self._copies.settled(timeout)

    def explain(self) -> str:
        """Where the data comes from, and how; with ``copies="kernel"``, what made this epoch's copies."""
        onward = f", {self._landing.how}" if self._landing.how else ""
        if self._copies is not None:
            onward += {
                None: " by the kernel that reads it first, if that can, else by a copy engine",
                "kernel": " by the kernel that read it first",
                "engine": " by a copy engine: its first reader makes no copies",
            }[self._copies.maker]
        if isinstance(self._landing, DeviceLanding) and cast("DeviceSignals", self.arrival._signals).is_in_graphs:
            onward += ", in CUDA graphs at each replay (not run on a GPU yet)"
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
            What the producer raised, if it did; on a GPU, what that device has reported: see `tilestream.check`.
        """
        if isinstance(self._landing, DeviceLanding) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("stream_in: wait() while a CUDA graph is captured; give the Stream to what reads it")
        left, signals = _countdown(timeout), self.arrival._signals
        begun = self._copies is None or self._copies.by_engine(signals, timeout)
        if not begun or not self._joined(left()):
            missing = [c for c, there in enumerate(signals.state()) if not there]
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
        """Whether it was made by `stream_experts`: a chunk is an expert's matrix."""
        return self._route is not None

    def check_brings(self, op: str, offsets: object) -> None:
        """Raise `ValueError` if ``offsets`` give rows to an expert that this step does not bring. CPU only."""
        ends = None if self._route is None else self._route.ends
        if ends is None or type(offsets) is not torch.Tensor or offsets.device.type != "cpu":
            return
        theirs: list[int] = offsets.detach().flatten().tolist()
        brought, wanted = (set(order[:count]) for order, count in map(by_load, (ends, theirs)))
        if len(theirs) == len(ends) and wanted - brought:
            raise ValueError(
                f"{op}: offsets={theirs} give rows to expert {min(wanted - brought)}, which the stream of offsets="
                f"{list(ends)} does not bring; give both the same: stream.restart(offsets)"
            )

    def restart(self, offsets: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> None:
        """Fill the same tensor from the beginning: the next epoch, in which nothing has arrived yet.

        The producer must have ended, and nothing may still read the tensor, a backward pass included (autograd does not
        see that a file is read into it). On a GPU it may be called at once where the source is pinned: the copies come
        behind those before them, and behind what the current stream was given so far, which must include the readers of
        the tensor; the caller waits for neither.

        Under capture the filling becomes a part of the graph: each replay copies what the pinned source then holds, and
        the launches that are captured behind it wait for its chunks. Eager fillings, and other graphs', are apart from
        it. The graph keeps the source and the tensor alive.

        Parameters
        ----------
        offsets, weights
            Of `stream_experts`, and of such a stream alone: where the rows of this step's experts end; and their
            weights where they are others, of another layer, say, that lie as the first ones do.

        Raises
        ------
        RuntimeError
            If the producer is still at work; or if a CUDA graph is captured, and the source is no pinned tensor, or a
            kernel makes the copies (``copies="kernel"``), which its graph makes at each replay without this.
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
            self._landing.fill_in_graph(self._chunks, self.arrival.pivot, cast("DeviceSignals", self.arrival._signals))
            self._open()
            return
        if self.of_experts and isinstance(self._filling, _Filling):
            self._filling.finish_issuing()  # it waits for the router of the step before, not for copies
        if self._filling is not None and not self._filling.issued:
            raise RuntimeError("stream_in: restart() while the producer is at work; wait() for it or close() it first")
        if self._route is not None:
            assert offsets is not None
            self._order = self._route(self._source, offsets, weights)
            if weights is not None and isinstance(self._landing, DeviceLanding):
                self._landing.take(self._source.tensor)
        self._source.rewind()
        if isinstance(self._filling, _Issued):
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
        """Stop the producer after the chunk it is at, and let go of the source. True once it has ended.

        A producer that is blocked in foreign code (an iterator that never yields) cannot be stopped from outside: after
        ``timeout`` seconds it is left to end by itself; its thread keeps the tensor alive as long (invariant 9).
        """
        _countdown(timeout)  # checks it
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
        # An exception does not wait long for a producer that cannot be stopped.
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
    """Start filling a tensor from ``source``, chunk by chunk, in threads of its own; returns at once.

    On a GPU the chunks are copied by its copy engine, in a stream of their own, each followed by its signal, which the
    GPU writes. A pinned tensor needs no thread: all copies are issued when this returns, none is waited for.

    Parameters
    ----------
    source
        A ``.safetensors`` or ``.npy`` file; a CPU tensor; or an iterable of tensors, blocks of rows in order (from the
        pivot's first row on). It is asked for as many rows as ``shape`` says; a block with more than those is an error.
    tensor
        File: the tensor's name, needed where the file holds several matrices.
    rows_per_chunk, bounds
        How rows are divided into chunks: uniform, or ragged (see `Arrival`). Default: uniform, about 8 MiB a chunk; to
        a GPU as few as the size is worth, between one and 32.
    pivot
        The chunk that is delivered first, and that the matmul starts from.
    shape, dtype
        Iterable: the shape of the whole, at least 2-D, its leading dimensions counted as rows; and its dtype.
    device
        Where the tensor is to be: ``"cpu"``, or a GPU; None: the current GPU for a pinned tensor, else the CPU.
    copies
        To a GPU: ``"engine"``, its copy engine, beside the kernel that waits for the chunks: it costs no SM.
        ``"kernel"``, of a pinned tensor: a few workers of the matmul that reads the tensor first copy it before their
        tiles. For busy copy engines, and for streams that may run one after the other. A CUDA graph that captures that
        matmul copies at each replay (keep the `Stream` for as long as the graph). Where the kernel cannot, or the host
        reads by `Stream.wait`, the engine copies; ``plan(...).explain()`` says which.
    direct
        File: read past the page cache (True: where possible), through it (False), or whichever is better (None).

    Returns
    -------
    Stream
        It goes to ``ts.matmul``, or its ``tensor`` and its ``arrival`` do.

    Raises
    ------
    FileNotFoundError, ValueError, TypeError
        If the source or the chunks are refused. An error of the producer is raised by the call that waits for the
        chunk.

    Examples
    --------
    >>> with ts.stream_in("activations.safetensors", tensor="x") as x:  # doctest: +SKIP
    ...     y = ts.matmul(x, w)
    """
    if not is_one_of(copies, ("engine", "kernel")):
        raise ValueError(f"stream_in: copies={copies!r}; it is 'engine' or 'kernel'")
    target = target_of("stream_in", source, device)
    if copies == "kernel" and (target.type == "cpu" or not isinstance(source, torch.Tensor)):
        raise ValueError(
            f"stream_in: copies='kernel' of a {type(source).__name__} to {target}; a kernel copies a pinned CPU tensor "
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
            raise TypeError(f"stream_in: shape={shape!r}; it is a sequence of whole numbers") from None
        made = iterator_source(source, extents, dtype)
    else:
        raise TypeError(
            f"stream_in: source is a {type(source).__name__}; it is a file's path, a CPU tensor or an iterable of "
            "tensors"
        )
    try:
        for name, value in (("tensor", tensor), ("shape", shape), ("dtype", dtype), ("direct", direct)):
            if value is not None and name not in made.takes:
                raise ValueError(f"stream_in: {name}={value!r} means nothing for {made.describe()}")
        of = made.tensor
        if not is_whole(pivot):
            raise ValueError(f"stream_in: pivot={pivot!r}; it is the number of a chunk")
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
        return onto(target, made, arrival, copies == "kernel")
    except BaseException:
        made.close()
        raise


def onto(device: torch.device, source: Source, chunked: Arrival, by_kernel: bool, **more: Any) -> Stream:
    """A stream to a GPU, in chunks as of ``chunked``; ``more``: see `Stream`."""
    from tilestream.arrival.device import DeviceSignals

    with on_device(device):
        lane = lanes.take(chunked.num_chunks, device, torch._C._cuda_getCurrentRawStream(device.index))
        signals = DeviceSignals(chunked.num_chunks, device, lane=lane)
        return Stream(
            chunked.with_signals(signals), source, DeviceLanding(source.tensor, device, lane), by_kernel, **more
        )


def target_of(op: str, source: Streamable, device: str | torch.device | None) -> torch.device:
    """Where the tensor is to be. ``op``: the function that is called, for messages."""
    if device is None:
        pinned = isinstance(source, torch.Tensor) and source.device.type == "cpu" and source.is_pinned()
        device = "cuda" if pinned else "cpu"
    target = as_device(device, f"{op}: device")
    if target.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{op}: device={str(device)!r}; tensors stream to the CPU and to GPUs")
    if target.type == "cpu":
        return target
    if not torch.cuda.is_available():
        raise NotImplementedError(f"{op}: device={str(device)!r}; torch sees no GPU here: stream to the CPU")
    if torch.cuda.is_current_stream_capturing():
        again = "and call its restart() in it: each replay copies then"
        if op != "stream_in":
            again = "and call its restart() outside of the capture, too: the host reads the offsets"
        raise RuntimeError(f"{op}: a CUDA graph is being captured; make the Stream before the capture, {again}")
    return target if target.index is not None else torch.device("cuda", torch.cuda.current_device())


@functools.lru_cache(maxsize=256, typed=True)
def _uniform(rows: int, row_bytes: int, rows_per_chunk: int | None, pivot: int, on_gpu: bool) -> Arrival:
    """Uniform chunks, checked; the signals are not used."""
    if rows_per_chunk is None:
        rows_per_chunk = (gpu_rows_per_chunk if on_gpu else default_rows_per_chunk)(rows, row_bytes)
    return Arrival.uniform(rows_per_chunk, Chunks.uniform(rows, rows_per_chunk).count, pivot)


def default_rows_per_chunk(rows: int, row_bytes: int) -> int:
    """Rows of a chunk of about `CHUNK_BYTES`; between 4 and 1024 chunks where there are rows enough."""
    count = math.ceil(rows * row_bytes / CHUNK_BYTES)
    return max(1, math.ceil(rows / min(max(count, 4), 1024)))


def gpu_rows_per_chunk(rows: int, row_bytes: int) -> int:
    """Rows of a chunk to a GPU: as few chunks as the size is worth.

    A chunk costs the link `CHUNK_SECONDS`. The last one's tiles begin when all else is there, and at worst (a matmul as
    fast as the link) take as long as its copy. So ``n`` chunks of ``t`` seconds in all cost about
    ``n * CHUNK_SECONDS + t / n`` beside the copy itself, least for ``n = sqrt(t / CHUNK_SECONDS)``.
    """
    if not rows * row_bytes:
        return max(rows, 1)
    seconds = rows * row_bytes / LINK_BYTES
    # With more queues than there are, tiles would be taken in the raster's order.
    count = min(max(1.0, math.sqrt(seconds / CHUNK_SECONDS)), MOST_QUEUES, rows)
    step = min(GPU_ROWS, 1 << int(rows / count).bit_length() - 1)

    def cost(per: int) -> float:
        return math.ceil(rows / per) * CHUNK_SECONDS + seconds * per / rows

    exact = math.ceil(rows / count)
    while True:
        above = step * math.ceil(exact / step)
        fitting = [per for per in (above - step, above) if per and math.ceil(rows / per) <= MOST_QUEUES]
        best = min(min(fitting, key=cost), rows)
        # Whole tiles are worth a half more; a single row is `exact` itself.
        if step == 1 or cost(best) <= 1.5 * cost(exact):
            return best
        step //= 2
