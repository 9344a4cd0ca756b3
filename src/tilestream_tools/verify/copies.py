"""Model 8: workers that copy the arriving operand themselves, before their tiles.

It explores `copy_items`, the protocol of the kernels, over several launches; a launch begins when the one before has
ended. What a worker stores of a piece is in flight until it counts the piece. Then it takes tiles, one a chunk, in the
order of the chunks, from one queue; each tile waits for its chunk's signal and reads the chunk. The deadline may expire
at any gate whose chunk has not arrived: that sets the abort word, and the tiles of workers that are told so become NaN.

Workers start at any time, with the others' copies half done or complete. Some may never run: then there is one launch,
and no worker may depend on them. Where words are reset (a replayed graph), a chunk's signal is any word but 0, and the
last worker out zeroes all signals.

Properties: a tile finds its whole chunk written, in this launch. Every worker that runs ends. When all have left,
whether the deadline expired or not, each piece was copied once, each chunk signalled, and all counts are zero.

Reductions: *Copy* and *Read* are eager. No process may read what a Copy stores before its worker's next count, and what
a Read needs only grows: done at once they show every piece that is copied twice, and every read before arrival. *End*
is eager, as in model 6.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Literal, NamedTuple

from tilestream.core.chunks import Chunks
from tilestream.core.copy_items import Pieces
from tilestream.core.loop import Poll
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory, Model
from tilestream_tools.verify.processes import Process

Turn = Generator[Any, int, Any]


class Draw(NamedTuple):
    """Add one to the count of copy items, or of pieces, that were taken (relaxed). Answer: the count before."""

    what: Literal["items", "pieces"]


class Copy(NamedTuple):
    """Copy a piece: loads and stores of all the worker's threads."""

    piece: int


class OfChunk(NamedTuple):
    """What an operation names: a chunk."""

    chunk: int


class CountPiece(OfChunk):
    """A piece of a chunk is there: add one to the chunk's count (acquire and release). Answer: the count before."""


class RestorePieces(OfChunk):
    """Write 0 to the count of a chunk, plainly."""


class Signal(OfChunk):
    """Write a chunk's signal (release, at system scope)."""


class Restore(NamedTuple):
    """Write 0 to the count of copy items, or of pieces, plainly."""

    what: Literal["items", "pieces"]


class AwaitLaunch(NamedTuple):
    """Wait until all workers have left ``launch``."""

    launch: int


class TakeTile(NamedTuple):
    """Add one to the queue's counter. Answer: the count before."""


class AwaitSignal(NamedTuple):
    """Wait for a chunk. Answer: 1 there, 0 the launch is over, or its deadline has passed."""

    chunk: int
    launch: int


class Read(NamedTuple):
    """Read a chunk."""

    chunk: int
    launch: int


class End(NamedTuple):
    """Leave ``launch``."""

    worker: int
    launch: int


class Peek(NamedTuple):
    """Read the count of pieces: half of a `Draw` that is none. Answer: the count."""


class Put(NamedTuple):
    """Write the count of pieces: the other half."""

    value: int


#: ``(pieces, copiers, workers, worker)`` -> what a worker does before its tiles.
Text = Callable[[Pieces, int, int, int], Generator[Any, int, None]]


def copy_items(pieces: Pieces, copiers: int, workers: int) -> Generator[Any, int, None]:
    """What a worker does before its first tile.

    ::

        number = add(copy items taken, 1);  the last worker of all: restore that count
        number < copiers:                                   # a copy item: the first to run have one
            until no piece is left:  piece = add(pieces taken, 1)
                copy it; count it for its chunk
                that was the chunk's last: restore the count; signal the chunk
            the last copier to find none: restore the count of pieces

    It waits for nothing, so it is done whatever becomes of the launch: where the deadline expires meanwhile, tiles
    become NaN, but the operand is copied to its end, all counts are 0 again, and the next launch finds it there.

    Parameters
    ----------
    copiers
        Copy items, at most one a worker: each copier finds out once that no piece is left, so the last to do so is
        known by its ticket.
    """
    number = yield Draw("items")
    if number == workers - 1:
        yield Restore("items")
    if number < copiers:
        ticket = yield Draw("pieces")
        while ticket < pieces.count:
            yield Copy(ticket)
            chunk = pieces.chunk(ticket)
            if (yield CountPiece(chunk)) == pieces.per_chunk - 1:
                yield RestorePieces(chunk)
                yield Signal(chunk)
            ticket = yield Draw("pieces")
        if ticket == pieces.count + copiers - 1:
            yield Restore("pieces")


def text(pieces: Pieces, copiers: int, workers: int, worker: int) -> Generator[Any, int, None]:
    """`copy_items`, to which it makes no difference which worker it is."""
    yield from copy_items(pieces, copiers, workers)


@dataclass(frozen=True)
class CopyCase:
    """One configuration of model 8.

    Attributes
    ----------
    workers, copiers, launches
        How many.
    bounds, pivot, per_chunk
        The chunks, the first of them, and the pieces of each.
    running
        The workers that ever run; empty for all.
    expires
        Whether the deadline may expire.
    reset
        Whether the last worker out zeroes the signals.
    text
        What a worker does before its tiles.
    """

    workers: int = 2
    copiers: int = 1
    launches: int = 2
    bounds: tuple[int, ...] = (0, 1, 2)
    pivot: int = 0
    per_chunk: int = 2
    running: tuple[int, ...] = ()
    expires: bool = False
    reset: bool = False
    text: Text = text

    @property
    def pieces(self) -> Pieces:
        """The pieces of all chunks."""
        return Pieces(Chunks(self.bounds), self.pivot, 1, self.per_chunk)

    @property
    def chunks(self) -> int:
        """Chunks, and tiles."""
        return len(self.bounds) - 1

    def build(self, reduce: bool = True, symmetry: bool = True) -> CopyModel:
        """The model of this configuration."""
        return CopyModel(self, reduce)

    def __str__(self) -> str:
        words = [
            f"{self.workers} workers, {self.copiers} copiers, chunks {list(self.bounds)} from {self.pivot} in "
            f"{self.per_chunk} pieces, {self.launches} launches"
        ]
        words += [f"running {list(self.running)}"] if self.running else []
        words += ["the deadline may expire"] if self.expires else []
        words += ["words are reset"] if self.reset else []
        words += [self.text.__name__] if self.text is not text else []
        return ", ".join(words)


def turn(case: CopyCase, worker: int, at: tuple[int, bool]) -> Turn:
    """One turn of a worker. ``at``: the launch, and whether it has come to its tiles."""
    launch, tiles = at
    if not tiles:
        yield AwaitLaunch(launch - 1)
        yield from case.text(case.pieces, case.copiers, case.workers, worker)
        return launch, True
    ticket = yield TakeTile()
    if ticket >= case.chunks:
        yield End(worker, launch)
        return (launch + 1, False) if launch < case.launches else None
    chunk = (case.pivot + ticket) % case.chunks
    if (yield AwaitSignal(chunk, launch)):
        yield Read(chunk, launch)
    return at


class CopyModel(Model):
    """See the module.

    Its memory: by piece the launch that copied it, and the one whose stores of it are written; by worker the piece that
    it has stored and not counted, and the launch that it has left; by chunk its count and its signal; the counts of
    copy items, of pieces and of tiles that were taken; the abort word.
    """

    eager: ClassVar[frozenset[type]] = frozenset({Copy, Read, End})
    delayed: frozenset[type] = frozenset()
    progress: ClassVar[frozenset[type]] = frozenset({TakeTile, Copy})

    def __init__(self, case: CopyCase, reduce: bool = True) -> None:
        self.case = case
        self._workers = case.running or tuple(range(case.workers))
        turns = [
            Process(f"worker {w}", lambda at, w=w: turn(case, w, at), (1, False), ("worker", w))  # type: ignore[misc]
            for w in self._workers
        ]
        count, chunks = case.pieces.count, case.chunks
        sizes = (count, count, case.workers, case.workers, chunks, chunks, 1, 1, 1, 1)
        places = [len(turns)]
        for size in sizes:
            places.append(places[-1] + size)
        (
            self._copied, self._written, self._held, self._left, self._counts, self._signals, self._items, self._drawn,
            self._tickets, self._abort, self._end,
        ) = places  # fmt: skip
        super().__init__(turns, reduce)

    def memory(self) -> Memory:
        """See `Model.memory`."""
        return [0] * (self._end - self._copied)

    def domain(self, op: Any, past: Any) -> Sequence[Any]:
        """See `Model.domain`."""
        case = self.case
        if isinstance(op, Draw | Peek):
            items = isinstance(op, Draw) and op.what == "items"
            return range((case.workers if items else case.pieces.count + case.workers) + 1)
        if isinstance(op, TakeTile):
            return range(case.chunks + case.workers)
        if isinstance(op, CountPiece):
            return range(case.per_chunk)
        return (0, 1) if isinstance(op, AwaitSignal | Poll) else (0,)

    # What the operations mean ---------------------------------------------------------------------------------------

    def _over(self, launch: int, m: Memory) -> bool:
        """Whether all workers have left a launch."""
        return not launch or all(m[self._left + w] >= launch for w in self._workers)

    def _now(self, m: Memory) -> int:
        """The launch that runs: none begins before all have left the one before."""
        return 1 + int(min(m[self._left + w] for w in self._workers))

    def _there(self, chunk: int, launch: int, m: Memory) -> bool:
        word = m[self._signals + chunk]
        return bool(word) if self.case.reset else word >= launch

    def _await(self, pid: int, op: AwaitSignal, m: Memory) -> Sequence[int]:
        if self._there(op.chunk, op.launch, m):
            return (1,)
        return (0,) if m[self._abort] or self.case.expires else ()

    def _expire(self, pid: int, op: AwaitSignal, answer: int, m: Memory) -> None:
        if not answer:
            m[self._abort] = 1

    def _draw(self, pid: int, op: Draw, answer: int, m: Memory) -> None:
        m[self._items if op.what == "items" else self._drawn] += 1
        if answer > self.case.pieces.count + self.case.workers:
            raise Fault("count not restored", f"{answer} {op.what} were taken, and more are asked for")

    def _put(self, pid: int, op: Put, answer: int, m: Memory) -> None:
        m[self._drawn] = op.value

    def _zero(self, pid: int, op: Restore, answer: int, m: Memory) -> None:
        m[self._items if op.what == "items" else self._drawn] = 0

    def _copy(self, pid: int, op: Copy, answer: int, m: Memory) -> None:
        name, now = self.processes[pid].name, self._now(m)
        if m[self._copied + op.piece] == now:
            raise Fault("double work", f"{name} copies piece {op.piece} again")
        m[self._copied + op.piece] = now
        m[self._held + self._workers[pid]] = op.piece + 1

    def _count(self, pid: int, op: CountPiece, answer: int, m: Memory) -> None:
        self._write(pid, m)
        m[self._counts + op.chunk] += 1
        if m[self._counts + op.chunk] > self.case.per_chunk:
            raise Fault("count not restored", f"chunk {op.chunk} comes to more pieces than it has")

    def _write(self, pid: int, m: Memory) -> None:
        """What this worker has stored is written: a release."""
        held = self._held + self._workers[pid]
        if m[held]:
            m[self._written + m[held] - 1] = self._now(m)
            m[held] = 0

    def _restore(self, pid: int, op: RestorePieces, answer: int, m: Memory) -> None:
        m[self._counts + op.chunk] = 0

    def _signal(self, pid: int, op: Signal, answer: int, m: Memory) -> None:
        self._write(pid, m)
        m[self._signals + op.chunk] = 1 if self.case.reset else self._now(m)

    def _take(self, pid: int, op: TakeTile, answer: int, m: Memory) -> None:
        m[self._tickets] += 1

    def _read(self, pid: int, op: Read, answer: int, m: Memory) -> None:
        for piece in range(self.case.pieces.count):
            if self.case.pieces.chunk(piece) == op.chunk and m[self._written + piece] < op.launch:
                raise Fault(
                    "read before arrival",
                    f"{self.processes[pid].name} reads chunk {op.chunk}, and piece {piece} of it is not written",
                )

    def _leave(self, pid: int, op: End, answer: int, m: Memory) -> None:
        m[self._left + op.worker] = op.launch
        if self._over(op.launch, m):
            if not self.case.running:
                self._check_end(op.launch, m)
            m[self._tickets] = m[self._abort] = 0
            if self.case.reset:
                m[self._signals : self._signals + self.case.chunks] = [0] * self.case.chunks

    asked: ClassVar[dict[type, Callable[..., Sequence[Any]]]] = {
        AwaitLaunch: lambda self, pid, op, m: (0,) if self._over(op.launch, m) else (),
        Draw: lambda self, pid, op, m: (m[self._items if op.what == "items" else self._drawn],),
        Peek: lambda self, pid, op, m: (m[self._drawn],),
        CountPiece: lambda self, pid, op, m: (m[self._counts + op.chunk],),
        TakeTile: lambda self, pid, op, m: (m[self._tickets],),
        AwaitSignal: _await,
        Poll: lambda self, pid, op, m: (m[self._abort],),
    }
    performed: ClassVar[dict[type, Callable[..., None]]] = {
        Draw: _draw, Put: _put, Copy: _copy, CountPiece: _count, RestorePieces: _restore, Signal: _signal,
        Restore: _zero, TakeTile: _take, AwaitSignal: _expire, Read: _read, End: _leave,
    }  # fmt: skip

    def _check_end(self, launch: int, m: Memory) -> None:
        """All workers ran, and have left a launch."""
        for piece in range(self.case.pieces.count):
            if m[self._written + piece] != launch:
                raise Fault("missing work", f"launch {launch} leaves piece {piece} uncopied")
        for chunk in range(self.case.chunks):
            if not self._there(chunk, launch, m):
                raise Fault("missing work", f"launch {launch} leaves chunk {chunk} without its signal")
            if m[self._counts + chunk]:
                raise Fault("count not restored", f"launch {launch} leaves pieces of chunk {chunk} counted")
        for name, at in (("copy items", self._items), ("pieces", self._drawn)):
            if m[at]:
                raise Fault("count not restored", f"launch {launch} leaves {m[at]} {name} taken")


def configurations(full: bool) -> Iterator[CopyCase]:
    """1 to 3 workers, of which some may never run, every number of copiers. Full: more launches, pieces and chunks."""
    for workers in (1, 2, 3):
        for copiers in range(1, workers + 1):
            for expires, reset in product((False, True), (False, True)):
                yield CopyCase(workers, copiers, expires=expires, reset=reset)
                if full:
                    yield CopyCase(workers, copiers, 3, expires=expires, reset=reset)
                    yield CopyCase(workers, copiers, bounds=(0, 2, 2, 3), pivot=1, expires=expires, reset=reset)
            for pivot, per_chunk in product((0, 1), (1, 3)):
                yield CopyCase(workers, copiers, 1, pivot=pivot, per_chunk=per_chunk)
    for workers, running in ((2, (0,)), (2, (1,)), (3, (2,)), (3, (0, 2)), (3, (1, 2)), (4, (1, 3))):
        for copiers in range(1, workers + 1):
            yield CopyCase(workers, copiers, 1, running=running)
    if full:
        for copiers, expires in product((1, 2, 4), (False, True)):
            yield CopyCase(4, copiers, expires=expires)
