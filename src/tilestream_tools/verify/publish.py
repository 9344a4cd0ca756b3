"""Model 6: workers that publish their output by chunks, and readers that read each chunk after its signal.

It explores `tilestream.core.loop.publish` for tiles that may straddle chunks, over several launches. A launch begins
when all workers have left the previous one. Stores are in flight until their worker has waited for them. A worker's
earlier operations (multiplications, the epilogue) are private, and readers wait for signals only.

Properties: a reader finds its whole chunk written by the launch that it waits for. Each chunk is signalled in each
launch. The counts are zero between launches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tilestream.core import loop
from tilestream.core.chunks import chunk_of, rows_in
from tilestream.core.integers import cdiv
from tilestream.core.loop import Announce, CountRows, Landed, RestoreRows, Share
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory, Model
from tilestream_tools.verify.processes import Process

Turn = Generator[Any, int, Any]


class AwaitLaunch(NamedTuple):
    """Worker: wait until all workers have left ``launch``."""

    launch: int


class Take(NamedTuple):
    """Worker: begin an item. Its stores are in flight from now on."""

    item: int
    launch: int


class End(NamedTuple):
    """Worker: leave ``launch``."""

    worker: int
    launch: int


class AwaitSignal(NamedTuple):
    """Reader: wait until a chunk's signal is at least ``launch``."""

    chunk: int
    launch: int


class ReadChunk(NamedTuple):
    """Reader: read a chunk."""

    chunk: int
    launch: int


class AwaitTaken(NamedTuple):
    """Wait until an item has begun, which no worker may do."""

    item: int
    launch: int


class ReadCount(NamedTuple):
    """Read a chunk's count: the first half of a faulty `CountRows`. Answer: the count."""

    chunk: int


class WriteCount(NamedTuple):
    """Write a chunk's count: the second half."""

    chunk: int
    value: int


@dataclass(frozen=True)
class PublishCase:
    """One configuration of model 6.

    Attributes
    ----------
    rows, block, per_chunk, columns
        Rows of the output, of a tile and of a chunk; column tiles.
    workers, launches
        The numbers of workers and launches. Items go to the workers in turn.
    text
        The program that publishes an item.
    """

    rows: int = 2
    block: int = 1
    per_chunk: int = 2
    columns: int = 1
    workers: int = 2
    launches: int = 2
    text: Callable[[int, Iterable[Share]], Turn] = loop.publish

    @property
    def chunks(self) -> int:
        """The number of the output's chunks."""
        return cdiv(self.rows, self.per_chunk)

    @property
    def items(self) -> int:
        """The number of tiles."""
        return cdiv(self.rows, self.block) * self.columns

    def shares(self, item: int) -> list[Share]:
        """An item's rows for each of its chunks, by the kernels' arithmetic."""
        begin = item // self.columns * self.block
        end = min(self.rows, begin + self.block)
        chunks = range(chunk_of(begin, self.per_chunk), chunk_of(end - 1, self.per_chunk) + 1)
        return [Share(c, rows_in(begin, end, c, self.per_chunk), self.due(c)) for c in chunks]

    def due(self, chunk: int) -> int:
        """The complete count of a chunk."""
        return rows_in(0, self.rows, chunk, self.per_chunk) * self.columns

    def build(self, reduce: bool = True, symmetry: bool = True) -> PublishModel:
        """The model of this configuration."""
        return PublishModel(self, reduce)

    def __str__(self) -> str:
        words = [
            f"{self.workers} workers, {self.rows} rows in tiles of {self.block} and chunks of {self.per_chunk}, "
            f"{self.columns} column tiles, {self.launches} launches"
        ]
        words += [self.text.__name__] if self.text is not loop.publish else []
        return ", ".join(words)


def worker(case: PublishCase, number: int, at: tuple[int, int]) -> Turn:
    """One turn of a worker: an item, or the end of a launch. ``at``: the launch and the next item."""
    launch, item = at
    if item == number:
        yield AwaitLaunch(launch - 1)
    if item >= case.items:
        yield End(number, launch)
        return (launch + 1, number) if launch < case.launches else None
    yield Take(item, launch)
    yield from case.text(item, case.shares(item))
    return launch, item + case.workers


def reader(case: PublishCase, chunk: int, launch: int) -> Turn:
    """A reader of a chunk."""
    yield AwaitSignal(chunk, launch)
    yield ReadChunk(chunk, launch)
    return launch + 1 if launch < case.launches else None


class PublishModel(Model):
    """See the module.

    Memory: for each item the launch that took it, and the launch whose stores have landed; for each chunk its count and
    signal; for each worker the launch that it has left.
    """

    eager: ClassVar[frozenset[type]] = frozenset({End})
    delayed: frozenset[type] = frozenset()
    progress: ClassVar[frozenset[type]] = frozenset({Take, ReadChunk})

    def __init__(self, case: PublishCase, reduce: bool = True) -> None:
        self.case = case
        turns = [
            Process(f"worker {i}", lambda at, i=i: worker(case, i, at), (1, i), ("worker", i))  # type: ignore[misc]
            for i in range(case.workers)
        ]
        turns += [
            Process(f"reader of chunk {c}", lambda at, c=c: reader(case, c, at), 1, ("reader", c))  # type: ignore[misc]
            for c in range(case.chunks)
        ]
        self._taken = len(turns)
        self._landed = self._taken + case.items
        self._counts = self._landed + case.items
        self._signals = self._counts + case.chunks
        self._left = self._signals + case.chunks
        super().__init__(turns, reduce)

    def memory(self) -> Memory:
        """See `Model.memory`."""
        return [0] * (2 * self.case.items + 2 * self.case.chunks + self.case.workers)

    def domain(self, op: Any, past: Any) -> Sequence[Any]:
        """See `Model.domain`."""
        return range(self.case.due(op.chunk) + 1) if isinstance(op, CountRows | ReadCount) else (0,)

    def _all_left(self, m: Memory) -> int:
        """The last launch that all workers have left."""
        return int(min(m[self._left : self._left + self.case.workers]))

    def _take(self, pid: int, op: Take, answer: int, m: Memory) -> None:
        m[self._taken + op.item] = op.launch

    def _land(self, pid: int, op: Landed, answer: int, m: Memory) -> None:
        m[self._landed + op.item] = m[self._taken + op.item]

    def _count(self, pid: int, op: CountRows, answer: int, m: Memory) -> None:
        m[self._counts + op.chunk] += op.rows
        if m[self._counts + op.chunk] > self.case.due(op.chunk):
            raise Fault("count not restored", f"chunk {op.chunk} comes to more rows than it has")

    def _write(self, pid: int, op: WriteCount, answer: int, m: Memory) -> None:
        m[self._counts + op.chunk] = op.value

    def _restore(self, pid: int, op: RestoreRows, answer: int, m: Memory) -> None:
        m[self._counts + op.chunk] = 0

    def _announce(self, pid: int, op: Announce, answer: int, m: Memory) -> None:
        # The signalled items belong to this launch: none of the next launch is taken before all have left.
        m[self._signals + op.chunk] = max(m[self._taken : self._taken + self.case.items])

    def _end(self, pid: int, op: End, answer: int, m: Memory) -> None:
        m[self._left + op.worker] = op.launch
        if self._all_left(m) == op.launch:
            for chunk in range(self.case.chunks):
                if m[self._counts + chunk]:
                    raise Fault("count not restored", f"launch {op.launch} leaves rows of chunk {chunk} counted")

    def _read(self, pid: int, op: ReadChunk, answer: int, m: Memory) -> None:
        for item in range(self.case.items):
            mine = any(share.chunk == op.chunk for share in self.case.shares(item))
            if mine and m[self._landed + item] < op.launch:
                raise Fault("read before arrival", f"chunk {op.chunk} is read, and item {item} of it is not written")

    asked: ClassVar[dict[type, Callable[..., Sequence[Any]]]] = {
        **dict.fromkeys((CountRows, ReadCount), lambda self, pid, op, m: (m[self._counts + op.chunk],)),
        AwaitLaunch: lambda self, pid, op, m: (0,) if self._all_left(m) >= op.launch else (),
        AwaitSignal: lambda self, pid, op, m: (0,) if m[self._signals + op.chunk] >= op.launch else (),
        AwaitTaken: lambda self, pid, op, m: (0,) if m[self._taken + op.item] >= op.launch else (),
    }
    performed: ClassVar[dict[type, Callable[..., None]]] = {
        Take: _take, Landed: _land, CountRows: _count, RestoreRows: _restore, Announce: _announce, End: _end,
        ReadChunk: _read, WriteCount: _write,
    }  # fmt: skip
