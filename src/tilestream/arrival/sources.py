"""Where a stream's rows come from: a file, an iterator of blocks, another tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from tilestream.arrival.files import RangeReader

Job = Callable[[], None]


class Source:
    """A place that rows come from, and the tensor that they go to.

    The producer asks for ranges of rows in the order in which they shall arrive, one call of `claim` at a time, and
    then does the jobs it was given, `readers` of them at once.
    """

    #: Arguments of `stream_in` that mean something for this source.
    takes: tuple[str, ...] = ()
    #: Jobs that may run at once; 0: there is nothing to do but to pass it on, which the caller's thread does.
    readers = 1
    tensor: torch.Tensor

    @property
    def how(self) -> str:
        """What it is and how it is read, for people."""
        raise NotImplementedError

    def claim(self, begin: int, end: int) -> Job:
        """What brings rows [begin, end); called in order."""
        raise NotImplementedError

    def end(self) -> None:
        """Every row has been brought: complain about what is left over."""

    def rewind(self) -> None:
        """Make ready for another epoch."""

    def close(self) -> None:
        """Let go of what was opened."""


class FileSource(Source):
    """A matrix in a file. Two reads under way at once, so that the disk never waits for a core that is multiplying."""

    takes = ("tensor", "direct")
    readers = 2

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        matrix = reader.matrix
        dtype: torch.dtype = getattr(torch, matrix.dtype)
        if not matrix.nbytes:
            self.tensor = _destination(matrix.shape, dtype)
        elif matrix.offset % matrix.itemsize:
            reader.close()
            raise ValueError(
                f"{matrix.path}: tensor {matrix.name!r} begins at byte {matrix.offset}, no multiple of its "
                f"{matrix.itemsize}-byte elements; write it anew with the safetensors library"
            )
        else:
            with torch.inference_mode(False):
                self.tensor = torch.frombuffer(reader.data, dtype=dtype).view(matrix.shape)
        self._row_bytes = matrix.shape[-1] * matrix.itemsize

    @property
    def how(self) -> str:
        """See `Source`."""
        matrix = self._reader.matrix
        return f"{matrix.path.name}: {matrix.name} {list(matrix.shape)} {matrix.dtype}, {self._reader.how}"

    def claim(self, begin: int, end: int) -> Job:
        """See `Source`."""
        return self._reader.claim(begin * self._row_bytes, end * self._row_bytes)

    def rewind(self) -> None:
        """See `Source`."""
        self._reader.again()

    def close(self) -> None:
        """See `Source`."""
        self._reader.close()


class TensorSource(Source):
    """A tensor that is copied; ``onward`` to a GPU, from where it is."""

    def __init__(self, source: torch.Tensor, onward: bool = False) -> None:
        if source.device.type != "cpu":
            raise ValueError(
                f"stream_in: the source is on {source.device}; what streams in is on the CPU: source.cpu()"
            )
        if source.layout != torch.strided:
            raise TypeError(
                f"stream_in: the source has layout {source.layout}; a dense tensor streams in: source.to_dense()"
            )
        if source.dim() < 2:
            raise ValueError(
                f"stream_in: the source has shape {list(source.shape)}; a matrix has at least 2 dimensions"
            )
        self._source = source.detach()
        self._onward = onward
        self.tensor = self._source if onward else _destination(source.shape, source.dtype)
        if onward and source.is_pinned():
            self.readers = 0

    @property
    def how(self) -> str:
        """See `Source`."""
        copied = "" if self._onward else ", copied"
        return f"a CPU tensor {list(self._source.shape)} {str(self._source.dtype)[6:]}{copied}"

    def claim(self, begin: int, end: int) -> Job:
        """See `Source`."""

        def copy() -> None:
            if self._onward:
                return
            with torch.inference_mode():  # the source may be an inference tensor
                as_rows(self.tensor)[begin:end].copy_(as_rows(self._source)[begin:end])

        return copy


class IteratorSource(Source):
    """Blocks of rows in order, of any number of rows each."""

    takes = ("shape", "dtype")

    def __init__(self, blocks: Iterable[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if len(shape) < 2 or min(shape) < 0:
            raise ValueError(f"stream_in: shape={list(shape)}; a matrix has at least 2 dimensions, none negative")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"stream_in: dtype={dtype!r}; it is a torch.dtype")
        self._blocks: Iterator[torch.Tensor] = iter(blocks)
        self._left: torch.Tensor | None = None  # rows that were yielded but not yet asked for
        self.tensor = _destination(shape, dtype)

    @property
    def how(self) -> str:
        """See `Source`."""
        return f"an iterator of blocks for {list(self.tensor.shape)} {str(self.tensor.dtype)[6:]}"

    def claim(self, begin: int, end: int) -> Job:
        """See `Source`."""
        return lambda: self._fill(as_rows(self.tensor), begin, end)

    def _fill(self, into: torch.Tensor, begin: int, end: int) -> None:
        while begin < end:
            block = self._next_block(into)
            count = min(end - begin, block.shape[0])
            with torch.inference_mode():  # the block may be an inference tensor
                into[begin : begin + count].copy_(block[:count])
            self._left = block[count:]
            begin += count

    def _next_block(self, into: torch.Tensor) -> torch.Tensor:
        if self._left is not None and self._left.shape[0]:
            return self._left
        for block in self._blocks:
            if not isinstance(block, torch.Tensor):
                raise TypeError(
                    f"stream_in: the iterator yielded a {type(block).__name__}; it yields tensors, blocks of rows"
                )
            if block.dim() == 0:
                raise ValueError("stream_in: the iterator yielded a single number; it yields blocks of rows")
            rows = as_rows(block.detach()) if block.dim() >= 2 else block.detach().unsqueeze(0)
            if rows.shape[1] != into.shape[1] or rows.dtype != into.dtype:
                raise ValueError(
                    f"stream_in: the iterator yielded a block {list(block.shape)} {block.dtype}; "
                    f"rows are {into.shape[1]} long, {into.dtype}"
                )
            if rows.shape[0]:
                return rows
        raise ValueError(f"stream_in: the iterator ended early; it was to yield {into.shape[0]} rows")

    def end(self) -> None:
        """See `Source`."""
        spare = 0 if self._left is None else self._left.shape[0]
        if spare:
            raise ValueError(f"stream_in: the iterator's last block has {spare} rows more than shape= says")

    def rewind(self) -> None:
        """See `Source`."""
        raise ValueError("stream_in: an iterator is read once; make a new stream")


def _destination(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor on the CPU, whatever torch's default device is; not an inference tensor."""
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def row_count(tensor: torch.Tensor) -> int:
    """Rows of a tensor seen as a matrix."""
    return math.prod(tensor.shape[:-1])


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor seen as a matrix: its leading dimensions are rows."""
    return tensor.reshape(row_count(tensor), tensor.shape[-1])
