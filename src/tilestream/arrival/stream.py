"""`stream_in`: producers that fill a tensor chunk by chunk, from a file, an iterator or another tensor."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.chunks import Chunks
from tilestream.arrival.files import RangeReader, find_matrix
from tilestream.runtime.errors import ProducerStopped

#: Default size of a chunk of a file or a tensor: large enough for a disk's full speed, small enough to start early.
CHUNK_BYTES = 8 * 2**20

Source = str | os.PathLike[str] | torch.Tensor | Iterable[torch.Tensor]
Fill = Callable[[int, int], None]  # brings rows [begin, end)


class Stream:
    """A tensor that is being filled, and the arrival that says how far it is. Made by `stream_in`.

    A context manager: leaving it stops the producer. `restart` fills the same tensor once more.

    Attributes
    ----------
    tensor : torch.Tensor
        The destination. Read a chunk's rows only after its signal, as ``ts.matmul(..., arrival=...)`` does.
    arrival : Arrival
        The chunks and their signals.
    """

    def __init__(self, tensor: torch.Tensor, arrival: Arrival, source: _Source) -> None:
        self.tensor = tensor
        self.arrival = arrival
        self._chunks = arrival.chunks(_rows(tensor))
        self._source = source
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._started = 0.0
        self._cpu = 0.0
        self._start()

    def _start(self) -> None:
        self._stop = threading.Event()
        self._started = time.perf_counter()
        self._thread = threading.Thread(
            target=self._run, args=(self.arrival.epoch, self._stop), name="tilestream-producer", daemon=True
        )
        self._thread.start()

    def _run(self, epoch: int, stop: threading.Event) -> None:
        cpu = time.thread_time()
        try:
            fill = self._source.begin()
            for step in range(self._chunks.count):
                chunk = (self.arrival.pivot + step) % self._chunks.count
                if stop.is_set():
                    raise ProducerStopped(f"stream_in: closed before chunk {chunk} was delivered")
                fill(*self._chunks.range_of(chunk))
                self.arrival.signal(chunk, epoch=epoch)
            self._source.end()
        except BaseException as error:  # whatever it is, the caller that waits for the rest shall see it
            self.arrival.fail(error, epoch=epoch)
        finally:
            self._cpu = time.thread_time() - cpu

    @property
    def started(self) -> float:
        """When the producer was started, on `time.perf_counter`'s clock."""
        return self._started

    @property
    def cpu_seconds(self) -> float:
        """CPU time the producer took, once it has ended."""
        return self._cpu

    @property
    def done(self) -> bool:
        """Whether the producer has ended."""
        return self._thread is None or not self._thread.is_alive()

    def explain(self) -> str:
        """Where the data comes from, and how."""
        rows = self._chunks.rows
        return f"{self._source.how}; {rows} rows in {self._chunks.count} chunks"

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Wait for the whole tensor and return it.

        Raises
        ------
        TimeoutError
            If it takes longer than ``timeout`` seconds.
        Exception
            What the producer raised, if it did.
        """
        if self._thread is not None:
            self._thread.join(timeout)
        if not self.done:
            missing = [c for c in range(self._chunks.count) if not self.arrival.arrived(c)]
            raise TimeoutError(
                f"stream_in: {len(missing)} chunks not delivered after {timeout} s, the first of them {missing[0]}"
            )
        error = self.arrival.error
        if error is not None:
            raise error
        return self.tensor

    def restart(self) -> None:
        """Fill the same tensor from the beginning: the next round, in which nothing has arrived yet.

        Nobody may still read the tensor, and the round before must have ended.

        Raises
        ------
        RuntimeError
            If the producer is still at work.
        ValueError
            If the source can be read only once (an iterator).
        """
        if not self.done:
            raise RuntimeError("stream_in: restart() while the producer is at work; wait() for it or close() it first")
        self._source.rewind()
        self.arrival.advance()
        self._start()

    def close(self, timeout: float = 5.0) -> bool:
        """Stop the producer after the chunk it is at, and let go of the source. True once it has ended.

        A producer that is blocked in foreign code (an iterator that never yields) cannot be stopped from outside: after
        ``timeout`` seconds it is left to end by itself; its thread keeps the tensor alive as long (invariant 9).
        """
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if self.done:
            self._source.close()
        return self.done

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Stream({list(self.tensor.shape)}, {self.tensor.dtype}, {self.arrival!r})"


def stream_in(
    source: Source,
    *,
    tensor: str | None = None,
    rows_per_chunk: int | None = None,
    bounds: Sequence[int] | None = None,
    pivot: int = 0,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    direct: bool | None = None,
) -> Stream:
    """Start filling a tensor from ``source``, chunk by chunk, in a thread of its own; returns at once.

    Parameters
    ----------
    source
        A ``.safetensors`` or ``.npy`` file; a CPU tensor; or an iterable of tensors, blocks of rows in order (from the
        pivot's first row on).
    tensor
        File: the tensor's name, needed where the file holds several matrices.
    rows_per_chunk, bounds
        How rows are divided into chunks: uniform, or ragged (see `Arrival`). Default: uniform, about 8 MiB a chunk.
    pivot
        The chunk that is delivered first, and that the matmul starts from.
    shape, dtype
        Iterable: the shape of the whole, at least 2-D, its leading dimensions counted as rows; and its dtype.
    direct
        File: read past the page cache (True: where possible), through it (False), or whichever is better (None).

    Returns
    -------
    Stream
        Its ``tensor`` and its ``arrival`` go to ``ts.matmul``.

    Raises
    ------
    FileNotFoundError, ValueError, TypeError
        If the source or the chunks are not what they should be. What happens later, in the thread, is raised by the
        call that waits for the chunk.

    Examples
    --------
    >>> with ts.stream_in("activations.safetensors", tensor="x") as x:  # doctest: +SKIP
    ...     y = ts.matmul(x.tensor, w, arrival=x.arrival)
    """
    made: _Source
    if isinstance(source, torch.Tensor):
        made = _TensorSource(source)
    elif isinstance(source, str | os.PathLike):
        made = _FileSource(RangeReader(find_matrix(source, tensor), direct))
    elif isinstance(source, Iterable):
        if shape is None or dtype is None:
            raise ValueError("stream_in: an iterable source does not say how large it is: give shape= and dtype=")
        made = _IteratorSource(source, tuple(shape), dtype)
    else:
        raise TypeError(
            f"stream_in: source is a {type(source).__name__}; it is a file's path, a CPU tensor or an iterable of "
            "tensors"
        )
    _refuse_unused(made, tensor=tensor, shape=shape, dtype=dtype, direct=direct)
    rows = _rows(made.tensor)
    if bounds is not None and rows_per_chunk is not None:
        raise ValueError("stream_in: rows_per_chunk and bounds; chunks are uniform or ragged, not both")
    if bounds is not None:
        arrival = Arrival.ragged(bounds, pivot)
    else:
        if rows_per_chunk is None:
            rows_per_chunk = default_rows_per_chunk(rows, made.tensor.shape[-1] * made.tensor.element_size())
        elif rows_per_chunk < 1:
            raise ValueError(f"stream_in: rows_per_chunk={rows_per_chunk}; a chunk has at least one row")
        arrival = Arrival.uniform(rows_per_chunk, Chunks.uniform(rows, rows_per_chunk).count, pivot)
    return Stream(made.tensor, arrival, made)


def default_rows_per_chunk(rows: int, row_bytes: int) -> int:
    """Rows of a chunk of about `CHUNK_BYTES`; between 4 and 1024 chunks where there are rows enough."""
    count = math.ceil(rows * row_bytes / CHUNK_BYTES)
    count = min(max(count, 4), 1024)
    return max(1, math.ceil(rows / count))


class _Source:
    """Where rows come from: `tensor` is the destination, `begin` gives what brings a range of rows."""

    how = ""
    takes: tuple[str, ...] = ()
    tensor: torch.Tensor

    def begin(self) -> Fill:
        raise NotImplementedError

    def end(self) -> None:
        """Every row was asked for: complain about what is left over."""

    def rewind(self) -> None:
        """Make ready for another round."""

    def close(self) -> None:
        """Let go of what was opened."""


class _FileSource(_Source):
    takes = ("tensor", "direct")

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        matrix = reader.matrix
        dtype: torch.dtype = getattr(torch, matrix.dtype)
        if not matrix.nbytes:
            self.tensor = torch.empty(matrix.shape, dtype=dtype)
        elif matrix.offset % matrix.itemsize:
            raise ValueError(
                f"{matrix.path}: tensor {matrix.name!r} begins at byte {matrix.offset}, no multiple of its "
                f"{matrix.itemsize}-byte "
                "elements; write it anew with the safetensors library"
            )
        else:
            self.tensor = torch.frombuffer(reader.data, dtype=dtype).view(matrix.shape)
        self._row_bytes = matrix.shape[-1] * matrix.itemsize

    @property
    def how(self) -> str:  # type: ignore[override]
        matrix = self._reader.matrix
        return f"{matrix.path.name}: {matrix.name} {list(matrix.shape)} {matrix.dtype}, {self._reader.how}"

    def begin(self) -> Fill:
        return lambda begin, end: self._reader.read(begin * self._row_bytes, end * self._row_bytes)

    def rewind(self) -> None:
        self._reader.again()

    def close(self) -> None:
        self._reader.close()


class _TensorSource(_Source):
    def __init__(self, source: torch.Tensor) -> None:
        if source.device.type != "cpu":
            raise ValueError(
                f"stream_in: the source is on {source.device}; what streams in is on the CPU: source.cpu()"
            )
        if source.dim() < 2:
            raise ValueError(
                f"stream_in: the source has shape {list(source.shape)}; a matrix has at least 2 dimensions"
            )
        self._source = source.detach()
        self.tensor = torch.empty(source.shape, dtype=source.dtype)
        self.how = f"a CPU tensor {list(source.shape)} {str(source.dtype)[6:]}, copied"

    def begin(self) -> Fill:
        rows, into = _as_rows(self._source), _as_rows(self.tensor)

        def fill(begin: int, end: int) -> None:
            into[begin:end].copy_(rows[begin:end])

        return fill


class _IteratorSource(_Source):
    takes = ("shape", "dtype")

    def __init__(self, blocks: Iterable[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if len(shape) < 2 or min(shape) < 0:
            raise ValueError(f"stream_in: shape={list(shape)}; a matrix has at least 2 dimensions, none negative")
        self._blocks: Iterator[torch.Tensor] = iter(blocks)
        self._left: torch.Tensor | None = None  # rows that were yielded but not yet asked for
        self.tensor = torch.empty(shape, dtype=dtype)
        self.how = f"an iterator of blocks for {list(shape)} {str(dtype)[6:]}"

    def begin(self) -> Fill:
        into = _as_rows(self.tensor)

        def fill(begin: int, end: int) -> None:
            while begin < end:
                block = self._next_block(into)
                count = min(end - begin, block.shape[0])
                into[begin : begin + count].copy_(block[:count])
                self._left = block[count:]
                begin += count

        return fill

    def _next_block(self, into: torch.Tensor) -> torch.Tensor:
        if self._left is not None and self._left.shape[0]:
            return self._left
        for block in self._blocks:
            if not isinstance(block, torch.Tensor):
                raise TypeError(
                    f"stream_in: the iterator yielded a {type(block).__name__}; it yields tensors, blocks of rows"
                )
            rows = _as_rows(block.detach()) if block.dim() >= 2 else block.detach().unsqueeze(0)
            if rows.shape[1] != into.shape[1] or rows.dtype != into.dtype:
                raise ValueError(
                    f"stream_in: the iterator yielded a block {list(block.shape)} {block.dtype}; "
                    f"rows are {into.shape[1]} long, {into.dtype}"
                )
            if rows.shape[0]:
                return rows
        raise ValueError(f"stream_in: the iterator ended early; it was to yield {into.shape[0]} rows")

    def end(self) -> None:
        spare = 0 if self._left is None else self._left.shape[0]
        if spare:
            raise ValueError(f"stream_in: the iterator's last block has {spare} rows more than shape= says")

    def rewind(self) -> None:
        raise ValueError("stream_in: an iterator is read once; make a new stream")


def _rows(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[:-1])


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(_rows(tensor), tensor.shape[-1])


def _refuse_unused(source: _Source, **given: Any) -> None:
    for name, value in given.items():
        if value is not None and name not in source.takes:
            raise ValueError(f"stream_in: {name}={value!r} means nothing for {source.how}")
