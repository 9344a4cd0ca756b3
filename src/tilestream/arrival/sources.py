"""The sources of a stream's rows: a file, an iterator of blocks, another tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tilestream.arrival.files import RangeReader

Job = Callable[[], None]


def ignore() -> None:
    """The job that does nothing."""


@dataclass
class Source:
    """A source of rows, and the tensor that they go to.

    The producer claims ranges of rows in the order of their arrival, one call of `claim` at a time. It then does the
    jobs, up to `readers` of them at the same time.
    """

    tensor: torch.Tensor  # the destination
    describe: Callable[[], str]  # a description of the source and of how it is read
    claim: Callable[[int, int], Job]  # the job that reads rows [begin, end); called in order
    end: Callable[[], None] = ignore  # called after the last row; raises if rows are left over
    rewind: Callable[[], None] = ignore  # prepares another epoch
    close: Callable[[], None] = ignore  # closes what was opened
    takes: tuple[str, ...] = ()  # arguments of `stream_in` that this source uses
    readers: int = 1  # jobs at the same time; 0: the rows are in place, and the caller's thread lands them


def file_source(reader: RangeReader) -> Source:
    """A matrix in a file. Two reads are in flight, so that the disk never waits for a core that multiplies."""
    matrix = reader.matrix
    dtype: torch.dtype = getattr(torch, matrix.dtype)
    row_bytes = matrix.shape[-1] * matrix.itemsize
    if not matrix.nbytes:
        tensor = _destination(matrix.shape, dtype)
    else:
        with torch.inference_mode(False):
            tensor = torch.frombuffer(reader.data, dtype=dtype).view(matrix.shape)
    return Source(
        tensor,
        lambda: f"{matrix.path.name}: {matrix.name} {list(matrix.shape)} {matrix.dtype}, {reader.how}",
        lambda begin, end: reader.claim(begin * row_bytes, end * row_bytes),
        rewind=reader.again,
        close=reader.close,
        takes=("tensor", "direct"),
        readers=2,
    )


def tensor_source(source: torch.Tensor, onward: bool = False) -> Source:
    """A tensor that is copied; ``onward``: directly from its memory to a GPU."""
    if source.device.type != "cpu":
        raise ValueError(f"stream_in: the source is on {source.device}; what streams in is on the CPU: source.cpu()")
    if source.layout != torch.strided or source.is_nested:
        what = "is nested" if source.is_nested else f"has layout {source.layout}"
        raise TypeError(f"stream_in: the source {what}; a dense tensor streams in: source.to_dense()")
    if source.dim() < 2:
        raise ValueError(f"stream_in: the source has shape {list(source.shape)}; a matrix has at least 2 dimensions")
    if source.requires_grad:
        source = source.detach()
    if onward:
        return pinned_source(source, int(not source.is_pinned()))
    describe = _description(source)
    tensor = _destination(source.shape, source.dtype)
    places = unversioned(tensor)

    def copy(begin: int, end: int) -> None:
        with torch.inference_mode():  # the source may be an inference tensor
            places[begin:end].copy_(as_rows(source)[begin:end])

    return Source(tensor, lambda: f"{describe()}, copied", lambda begin, end: lambda: copy(begin, end))


def pinned_source(source: torch.Tensor, readers: int = 0) -> Source:
    """A tensor on the CPU whose rows are copied directly from its memory to a GPU."""
    return Source(source, _description(source), claim_nothing, readers=readers)


def claim_nothing(begin: int, end: int) -> Job:
    """The claim of rows that are in place."""
    return ignore


def _description(source: torch.Tensor) -> Callable[[], str]:
    shape, dtype = source.shape, source.dtype
    return lambda: f"a CPU tensor {list(shape)} {str(dtype)[6:]}"


def iterator_source(blocks: Iterable[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Source:
    """Blocks of rows in order, each with any number of rows."""
    if len(shape) < 2 or min(shape) < 0:
        raise ValueError(f"stream_in: shape={list(shape)}; a matrix has at least 2 dimensions, none negative")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"stream_in: dtype={dtype!r}; it must be a torch.dtype")
    tensor = _destination(shape, dtype)
    queue, places = _Blocks(iter(blocks), row_count(tensor), shape[-1], dtype), unversioned(tensor)

    def end() -> None:
        if queue.left.shape[0]:
            raise ValueError(
                f"stream_in: the iterator's last block has {queue.left.shape[0]} rows more than shape= says"
            )

    def rewind() -> None:
        raise ValueError("stream_in: an iterator is read once; make a new stream")

    return Source(
        tensor,
        lambda: f"an iterator of blocks for {list(shape)} {str(dtype)[6:]}",
        lambda begin, end: lambda: queue.fill(places[begin:end]),
        end,
        rewind,
        takes=("shape", "dtype"),
    )


class _Blocks:
    """An iterator's blocks, and the unused rows of the last one."""

    def __init__(self, blocks: Iterator[torch.Tensor], rows: int, row: int, dtype: torch.dtype) -> None:
        self._blocks, self._rows, self._row, self._dtype = blocks, rows, row, dtype
        self.left = _destination((0, row), dtype)

    def fill(self, into: torch.Tensor) -> None:
        """Fill ``into`` with the next rows."""
        while into.shape[0]:
            block = self.left if self.left.shape[0] else self._next()
            count = min(into.shape[0], block.shape[0])
            with torch.inference_mode():  # the block may be an inference tensor
                into[:count].copy_(block[:count])
            self.left, into = block[count:], into[count:]

    def _next(self) -> torch.Tensor:
        for block in self._blocks:
            if not isinstance(block, torch.Tensor):
                raise TypeError(
                    f"stream_in: the iterator yielded a {type(block).__name__}; it yields tensors, blocks of rows"
                )
            if block.dim() == 0:
                raise ValueError("stream_in: the iterator yielded a single number; it yields blocks of rows")
            rows = as_rows(block.detach()) if block.dim() >= 2 else block.detach().unsqueeze(0)
            if rows.shape[1] != self._row or rows.dtype != self._dtype:
                raise ValueError(
                    f"stream_in: the iterator yielded a block {list(block.shape)} {block.dtype}; "
                    f"rows are {self._row} long, {self._dtype}"
                )
            return rows  # perhaps none, then the next block follows
        raise ValueError(f"stream_in: the iterator ended early; it was to yield {self._rows} rows")


def _destination(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor on the CPU, independent of torch's default device; not an inference tensor."""
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def row_count(tensor: torch.Tensor) -> int:
    """The number of rows of a tensor as a matrix."""
    return math.prod(tensor.shape[:-1])


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a matrix: its leading dimensions are rows."""
    return tensor.reshape(row_count(tensor), tensor.shape[-1])


def unversioned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a matrix, with a version counter of its own: autograd does not count what is written into it.

    A launch saves the tensor for its gradient before all of its chunks have come. They are what it waited for, and no
    modification behind it; `tilestream.Stream.restart` counts as one.
    """
    return as_rows(tensor).data
