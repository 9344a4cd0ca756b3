"""Ranks on fake GPUs whose calls the device counts: eager calls, captures and replays, and the kernels around them."""

from __future__ import annotations

import contextlib
import ctypes
import math

import pytest
import torch
from fake_ranks import GroupState, patch_driver

from fake_cuda import DEVICE, Event, FakeCuda, Stream, Until, fake_cuda
from tilestream.core.error_record import EXPIRED, FIELDS, QUARANTINED, RECORDS, Record, op_number
from tilestream.core.protocols.replay import COUNT, MARKS, STAMP, VOID, stamp
from tilestream.distributed import call_queue, graph_calls, slots
from tilestream.distributed.graph_calls import GraphAllReduce, GraphGather, GraphScatter
from tilestream.distributed.host_flags import LINE, RankFlags
from tilestream.distributed.shards import ScaledRows, Shards
from tilestream.launch.portable import add, rank_calls
from tilestream.runtime.channel import Channel


class Graph:
    """What a capture has issued: work by stream. Places in a stream count from the beginning of a replay."""

    def __init__(self, number: int) -> None:
        self.number, self.lost = number, False
        self.work: list[tuple[Stream, object]] = []

    def issued(self, stream: Stream) -> int:
        return sum(one is stream for one, _ in self.work)

    def replay(self) -> None:
        base = {stream: stream.issued for stream, _ in self.work}
        for stream, work in self.work:
            stream.give((work[0], base.get(work[0], 0) + work[1]) if isinstance(work, tuple) else work)


@contextlib.contextmanager
def capture(cuda: FakeCuda):
    """What is issued inside goes into a graph, each stream's in its own order.

    A stream that is synchronised invalidates the capture, as the driver does.
    """
    give, record = Stream.give, Event.record
    cuda._captures += 1
    graph = cuda.graph = Graph(cuda._captures)

    def recorded(event: Event, stream: Stream | None = None) -> None:
        stream = stream or cuda.current
        event.at = stream, graph.issued(stream)

    def synchronized(stream: Stream) -> None:
        graph.lost = True
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "synchronize", synchronized)
        patch.setattr(Stream, "give", lambda stream, work: graph.work.append((stream, work)))
        patch.setattr(Event, "record", recorded)
        try:
            yield graph
        finally:
            cuda.graph = None
    assert (Stream.give, Event.record) == (give, record)
    if graph.lost:
        raise RuntimeError("operation failed due to a previous error during capture")


class Memory:
    """What ranks share: slots and signals, made anew each time all of them grow; and flags."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.made: list[tuple[int, int, list[torch.Tensor], list[torch.Tensor]]] = []
        self.flags = torch.zeros(ranks * (ranks + 2) * LINE, dtype=torch.uint8)


class RankMemory:
    """As `symmetric.PeerMemory` with one slot, of one rank."""

    slot_bytes = chunks = 0

    def __init__(self, memory: Memory, rank: int) -> None:
        self._memory, self._rank, self._grown = memory, rank, 0
        self.flags = RankFlags(memory.flags.data_ptr(), memory.flags.data_ptr(), rank, memory.ranks)

    def grow(self, size: int, chunks: int) -> None:
        ranks, made = range(self._memory.ranks), self._memory.made
        if len(made) == self._grown:
            slots = [torch.full((size,), 255, dtype=torch.uint8) for _ in ranks]
            made.append((size, chunks, slots, [torch.zeros(chunks, dtype=torch.int32) for _ in ranks]))
        self._grown += 1
        self.slot_bytes, self.chunks, self._slots, self._signals = made[self._grown - 1]
        assert self.slot_bytes >= size
        assert self.chunks >= chunks

    def kept(self) -> object:
        return self._slots, self._signals

    def slot(self, of: int, number: int) -> torch.Tensor:
        assert number == 0
        return self._slots[of]

    def address(self, of: int, number: int) -> int:
        return self.slot(of, number).data_ptr()

    def signals(self, number: int) -> torch.Tensor:
        assert number == 0
        return self._signals[self._rank]

    def signal(self, of: int, number: int, chunk: int) -> int:
        assert number == 0
        assert 0 <= chunk < self.chunks
        return self._signals[of].data_ptr() + 4 * chunk


def word_at(places: torch.Tensor, i: int, plus: int = 0) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(int(places[i]) + 4 * plus)


class Device:
    """The kernels of `tilestream.launch.portable.rank_calls` on a rank's fake GPU."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.channel = cuda, Channel(DEVICE)
        #: Whether each wait ends at once that would wait.
        self.impatient = False

    def report(self, why: int, chunk: int, key: int, op: str) -> None:
        number = int(self.channel.claims[0])
        self.channel.claims[0] += 1
        at = number % RECORDS * FIELDS
        for i, word in enumerate(Record(why, op_number(op), 0, 0, chunk, key, 0, -1, -1, -1, -1, 10**9, 10**9)):
            self.channel.records[at + 1 + i] = word
        self.channel.records[at] = number + 1

    def give_up(self, words: rank_calls.SlotWords) -> None:
        for rank in range(words.world):
            word_at(words.places, words.world + rank).value = 1

    def broken(self, words: rank_calls.SlotWords) -> bool:
        return word_at(words.places, words.world + words.rank).value != 0

    def begin_call(self, words, seconds, batches, parts) -> None:
        peers = [rank for rank in range(words.world) if rank != words.rank]

        def begun() -> bool:
            call = int(words.control[COUNT]) + 1
            late = [rank for rank in peers if int(words.control[MARKS + words.world + rank]) < call - 1]
            if late and not self.broken(words):
                if not self.impatient:
                    return False
                self.give_up(words)
                self.report(EXPIRED, late[0] * parts, words.key, words.op)
            words.control[COUNT], words.control[STAMP] = call, stamp(call, words.form)
            for i in range(batches * parts):
                words.signals[(i // parts * words.world + words.rank) * parts + i % parts] = 1
            return True

        self.cuda.current.give(Until(begun))

    def await_parts(self, words, seconds, parts) -> None:
        others = [chunk for chunk in range(words.world * parts) if chunk // parts != words.rank]
        state = {"over": None}

        def there() -> bool:
            if state["over"] is None:
                state["over"] = self.broken(words)
            missing = [chunk for chunk in others if not int(words.signals[chunk])]
            over = state["over"] or (bool(missing) and self.broken(words))
            if missing and not over and not self.impatient:
                return False
            if not over and not missing:
                words.signals[: words.world * parts] = 0
            else:
                if not over:
                    self.give_up(words)
                self.report(QUARANTINED if over else EXPIRED, (missing or [0])[0], words.key, words.op)
            words.control[VOID] = int(over or bool(missing))
            state["over"] = None  # for the next replay
            return True

        self.cuda.current.give(Until(there))

    def end_call(self, words, out=None) -> None:
        def ended() -> None:
            call, mark = int(words.control[COUNT]), int(words.control[STAMP])
            others = [rank for rank in range(words.world) if rank != words.rank]
            over = self.broken(words) or any(int(words.control[MARKS + rank]) != mark for rank in others)
            if over:
                self.give_up(words)
                self.report(QUARANTINED, 0, words.key, words.op)
            words.control[VOID] = int(over)
            for rank in others:
                word_at(words.places, rank, MARKS + words.world + words.rank).value = call

        self.cuda.current.give(ended)
        if out is not None:  # later than the peers are told, as in the kernel
            self.void_out(words, out)

    def void_out(self, words, out) -> None:
        self.cuda.current.give(lambda: out.fill_(math.nan) if int(words.control[VOID]) else None)

    def add_parts(self, whole, received, out, bias, void, rank, epoch, divisor) -> None:
        """Under way while a peer may overwrite what it reads: two pieces of work."""
        taken: list[torch.Tensor] = []

        def first() -> None:
            taken[:] = [received[0, 0].clone() if rank else whole[0, 0].clone()]

        def rest() -> None:
            total = taken[0] + sum((whole[0, r] if r == rank else received[r, 0]) for r in range(1, len(received)))
            total = total / divisor if bias is None else total / divisor + bias
            out.copy_(torch.full_like(total, math.nan) if int(void) else total)

        self.cuda.current.give(first)
        self.cuda.current.give(rest)


class GraphRank:
    """A rank whose calls all have one shape; a graph of one call; the result of each call, NaN where it failed."""

    def __init__(self, cuda: FakeCuda, memory: Memory, rank: int, kind: type, shards: Shards) -> None:
        self.cuda, self.rank, self.world, self.kind, self.shards = cuda, rank, memory.ranks, kind, shards
        self.state, self.gpu, self.calling = GroupState(rank, memory.ranks), Device(cuda), cuda.stream()
        self.state.queue = lambda kind, device: self.queue
        with cuda.on(self.calling), self.here():
            self.queue = kind(self.state, DEVICE, RankMemory(memory, rank))
            self.queue.reserve(8 * math.prod(shards.shape) + 256, shards.chunks)
        self.tensor = torch.zeros(shards.batches, shards.rows, shards.width)
        self.results: list[torch.Tensor] = []
        self.issued = 0
        #: The number of the calls' form; whether a gather gives all ranks' rows, too.
        self.form, self.gives_rows = 5, False
        self._kept: list[object] = []
        if kind is not GraphGather:
            self.keep_parts()
        self.graph: Graph | None = None

    @property
    def streams(self) -> list[Stream]:
        return [self.calling, self.queue._side, self.queue._graph_side]

    @contextlib.contextmanager
    def here(self):
        """All ranks are on one fake device: inside, its kernels are this rank's."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("begin_call", "await_parts", "end_call", "void_out"):
                patch.setattr(rank_calls, name, getattr(self.gpu, name))
            patch.setattr(add, "add_parts", self.gpu.add_parts)
            yield

    def keep_parts(self) -> None:
        """As torch's allocator does, what a sum sends is not reused before its streams are past it."""
        reduce = self.queue.reduce
        self.queue.reduce = lambda out, parts, *more: (self._kept.append(parts), reduce(out, parts, *more))

    def value(self, rank: int, call: int, peer: int) -> float:
        """What a rank's part for a peer is made of."""
        return 100.0 * rank + call + (1000.0 * peer if self.kind is GraphScatter else 0)

    def expected(self, call: int) -> torch.Tensor:
        if self.kind is GraphGather:
            rows = torch.empty(self.shards.shape)
            for rank in range(self.world):
                rows[:, rank] = self.value(rank, call, 0)
            return rows
        total = sum(self.value(rank, call, self.rank) for rank in range(self.world))
        return torch.full((self.shards.rows, self.shards.width), float(total))

    def call(self) -> torch.Tensor:
        """Issue a call, or capture it. Returns its result."""
        with self.cuda.on(self.calling), self.here():
            return self._gather() if self.kind is GraphGather else self._sum()

    def _gather(self) -> torch.Tensor:
        out = torch.empty(self.shards.shape)

        def compute(rows: ScaledRows, arrival) -> list[torch.Tensor]:
            self.await_rows(rows.data, arrival, out)
            return [out]

        gathered = torch.empty(self.shards.shape) if self.gives_rows else None
        self.queue.gather(self.shards, ScaledRows(self.tensor, None), gathered, compute, 1.0, self.form)
        return out

    def await_rows(self, rows: torch.Tensor, arrival, out: torch.Tensor) -> None:
        """A matmul's launch: reads ``rows`` as they arrive into ``out``, and clears their signals."""
        signals = arrival._signals
        words, key = signals.use(local_rows=True), signals.key
        own, state = signals.local_rows, {"begun": None}

        def read() -> bool:
            if state["begun"] is None:  # every worker looks at the mark once, before its first item
                state["begun"] = int(words.quarantine[0])
            missing = [i for i, word in enumerate(words.words.tolist()) if not word]
            if missing and not state["begun"] and not self.gpu.impatient:
                return False
            over = bool(state["begun"]) or bool(missing)
            if over:
                why = QUARANTINED if state["begun"] else EXPIRED
                self.gpu.report(why, -1 if state["begun"] else missing[0], key, "all_gather_matmul")
                words.quarantine[0] = 1
            state.update(begun=None, over=over)
            out.copy_(rows) if not over else out.fill_(math.nan)
            return True

        def rest() -> None:  # a row that a peer overwrites meanwhile is read torn
            if not state["over"]:
                torn = out != rows
                out.copy_(torch.where(torn, -1.0, out))
                if own is not None:
                    mine = out.view(self.shards.shape)[:, self.rank]
                    mine.copy_(own.rows.view(mine.shape))
                words.words.zero_()

        self.cuda.current.give(Until(read))
        self.cuda.current.give(rest)

    def _sum(self) -> torch.Tensor:
        rows, width = self.shards.rows, self.shards.width
        out = torch.empty(rows, width)
        parts = torch.empty(self.world, rows, width) if self.kind is GraphScatter else None

        def product(rank: int, into: torch.Tensor) -> None:
            more = 1000.0 * rank if parts is not None else 0.0
            self.cuda.current.give(lambda: into.copy_(self.tensor[0] + more))

        self.queue.reduce(out, parts, product, None, 1.0, 1.0, self.form)
        return out

    def capture(self) -> None:
        """Capture a call, of the shape of an eager one before it."""
        with capture(self.cuda) as self.graph:
            self.out = self.call()

    def next(self, replays: bool) -> None:
        """The caller writes its tensor, and calls or replays; then reads the result."""
        self.issued += 1
        value = self.value(self.rank, self.issued, 0)
        self.calling.give(lambda: self.tensor.fill_(value))
        if replays:
            assert self.graph is not None
            self.graph.replay()
            out = self.out
        else:
            out = self.call()
        self.calling.give(lambda: self.results.append(out.clone()))

    @property
    def idle(self) -> bool:
        return all(stream.query() for stream in self.streams)


@contextlib.contextmanager
def graph_world(world: int, kind: type, shards: Shards):
    """A fake device and the ranks on it, each of which has captured a call."""
    with fake_cuda() as cuda, pytest.MonkeyPatch.context() as patch:
        patch_driver(cuda, patch)
        patch.setattr(slots, "copy", later := lambda to, source: cuda.current.give(lambda: to.copy_(source)))
        patch.setattr(graph_calls, "copy", later)
        patch.setattr(graph_calls, "lend_to", lambda borrower, device: cuda.stream())
        patch.setattr(graph_calls, "capture_id", lambda handle: cuda.graph.number)
        patch.setattr(graph_calls, "_captured", [])
        patch.setattr(call_queue, "agree", lambda state, plan, device: None)
        memory = Memory(world)
        yield cuda, [GraphRank(cuda, memory, rank, kind, shards) for rank in range(world)]


KINDS = (GraphGather, GraphScatter, GraphAllReduce)
