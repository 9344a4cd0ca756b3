"""Gathers and sums on GPUs that CUDA graphs may hold: the device counts the calls, without the host.

::

    calling stream:  begin_call; the side stream; matmul with its gate, or await_parts and a sum; end_call
    side stream:     for each peer: mark; push a chunk into its slot; signal it there; repeat

`tilestream.core.protocols.replay`, which the checker explores, has the operations. This module maps each to a GPU's
operation, and records it (`tilestream.distributed.program`). Eager and captured calls are issued alike, so ranks may
mix them. The kernels are `tilestream.kernels.portable.rank_calls`. A matmul waits as it does for a caller's own words:
its last worker zeroes the signals, and the word that breaks the group is the signals' quarantine.

A gather pushes the caller's shard, or its copy in the own slot. A sum pushes products. A reduce-scatter pushes each
peer's part after its matmul, which overlaps with the next matmul. An all-reduce pushes its one product to all peers.

All calls use one slot, whose address the graphs hold; so a rank may replay a call that another rank makes eagerly.
Memory that a capture has used is never freed. A capture needs an earlier eager call of the same form, which makes its
memory; without one the plan is unfused, and says so. Calls are serial, in the same order on every rank. This module
orders the eager calls of several streams, and the calls of one capture; the user orders the replays of a graph.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import PeerSignals
from tilestream.core.errors import GroupBroken
from tilestream.core.protocols import gather, replay
from tilestream.distributed.call_queue import CallQueue, made_event
from tilestream.distributed.copy_engines import Prepared, abort_expired
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import Call, DistributedPlan
from tilestream.distributed.program import (
    CALLING,
    EPOCH,
    FIRST,
    Handlers,
    Host,
    Program,
    Recorder,
    issue,
    no_op,
    run_protocol,
)
from tilestream.distributed.request import Request
from tilestream.distributed.shards import Product, ScaledRows, Shards
from tilestream.distributed.slots import Form, copy, local_rows, place, push, slot_rows, slot_size, sources_of
from tilestream.distributed.symmetric import PeerMemory
from tilestream.runtime.driver import capture_id
from tilestream.runtime.sequence import CopyAcross, Record, WaitEvent
from tilestream.runtime.streams import lend_to

if TYPE_CHECKING:
    from tilestream.launch.portable.rank_calls import SlotWords

#: The most shapes of gathers for which a queue keeps arrivals.
_MOST_SHARDS = 1024
#: The side stream, as a value of an issue: captures have a separate one.
_SIDE = EPOCH
#: Objects whose addresses graphs hold.
_captured: list[object] = []


class GraphSignals(PeerSignals):
    """Signals that are 1 or 0, in memory that peers write, for launches that a graph may hold.

    Parameters
    ----------
    words
        ``int32[chunks]``.
    broken
        ``int32[1]``, in memory that peers write: nonzero if the group is broken.
    why
        Returns the exception that a call in a broken group raises.
    """

    def __init__(
        self, words: torch.Tensor, broken: torch.Tensor, device: torch.device, why: Callable[[], BaseException]
    ) -> None:
        super().__init__(words, device)
        self._theirs = self._flags = words
        self._quarantine, self.self_reset, self._why = broken, True, why

    def _enter_graph(self, graph: int) -> None:
        """Accept a further launch in a graph: the calls of a slot are serial, and each clears its signals."""

    def failure(self, epoch: int) -> BaseException:
        """See `Signals`: the group is broken."""
        return self._why()


def lose_capture(stream: torch.cuda.Stream) -> None:
    """Have the capture fail at its end, after an error in the midst of a call, which the user may catch in the capture.

    Each replay would make a part of the call: signals that are never cleared would be taken for the next call's.
    """
    with contextlib.suppress(RuntimeError):
        stream.synchronize()  # what a capture forbids: the driver invalidates it, and the end says so


def signals_of(arrival: Arrival) -> GraphSignals:
    """The signals of a call's arrival."""
    signals = arrival._signals
    assert isinstance(signals, GraphSignals)
    return signals


class _Words(NamedTuple):
    """The words of the slot, and their addresses on each rank: see `kernels.portable.rank_calls.begin_call`."""

    signals: torch.Tensor
    control: torch.Tensor
    places: torch.Tensor


class GraphQueue(CallQueue):
    """A group's calls of one op on one GPU that a graph may hold. Hold the group's call."""

    def __init__(self, state: GroupState, device: torch.device, memory: PeerMemory | None = None) -> None:
        super().__init__(state, device, memory or PeerMemory(state, device, self.op, slots=1))
        self._graph_side = lend_to(self, device)
        self._words: _Words | None = None
        #: The index of the first control word in the signals of the slot.
        self._control = 0
        #: Events: the side stream may begin; it has ended; a call has ended; a call of the last capture has ended. And
        #: the number of that capture.
        self._fork, self._join, self._ended, self._captured_end = (made_event() for _ in range(4))
        self._graph = 0

    def reserve(self, size: int, chunks: int = 0) -> bool:
        """See `CallQueue`; includes the words of `tilestream.core.protocols.replay`.

        Raises
        ------
        RuntimeError
            If memory would have to be made, and a graph is being captured.
        """
        count = replay.control_words(self._world)
        has_room = self.memory.slot_bytes >= size and self.memory.chunks >= chunks + count
        if torch.cuda.is_current_stream_capturing() and (self._words is None or not has_room):
            raise RuntimeError(f"{self.op}: call it once with these shapes before the capture")
        new = super().reserve(size, chunks + count)
        if new or self._words is None:
            self._control = self.memory.chunks - count
            self._words = self._made_words()
            torch.cuda.current_stream(self.device).synchronize()  # calls may be on any stream
        return new

    def drain(self) -> None:
        """See `CallQueue`; bounded, because each wait of a call has a deadline."""
        self._ended.synchronize()

    def _made_words(self) -> _Words:
        memory, at = self.memory, self._control
        words = memory.signals(0)
        with torch.inference_mode(False):
            words[at + replay.ONE] = 1
            first = [memory.signal(rank, 0, at) for rank in range(self._world)]
            broken = [memory.signal(rank, 0, at + replay.BROKEN) for rank in range(self._world)]
            places = torch.tensor([*first, *broken], dtype=torch.int64).to(self.device)
        return _Words(words[:at], words[at:], places)

    def signals_of(self, count: int, whose: Callable[[int], tuple[int, str]]) -> GraphSignals:
        """The first ``count`` signals, whose failure is the group's."""
        assert self._words is not None
        queue, of_group, op, name, told = weakref.ref(self), self._state, self.op, "", None
        if (state := of_group()) is not None:
            name, told = state.name, state.told

        def why() -> BaseException:
            state = of_group()
            if state is None:
                return GroupBroken(name, "it has been destroyed")
            return state.break_(f"{op}: a peer has given up waiting, or made another call")  # or the first reason

        broken = self._words.control[replay.BROKEN : replay.BROKEN + 1]
        found = GraphSignals(self._words.signals[:count], broken, self.device, why)
        found.whose, found.gave_up, found.told = whose, lambda: abort_expired(queue()), told
        return found

    def check(self) -> None:
        """Raise `GroupBroken` if the group is broken, or a peer has given up."""
        state = self._state()
        assert state is not None
        if self.flags.aborted():
            self.abort_group(f"{self.op}: a peer has given up waiting")
        state.check()

    def run(self, program: Program, host: Host, first: int = 0, second: int = 0) -> None:
        """Issue or capture a call after the last one."""
        calling = torch.cuda.current_stream(self.device)
        graph = capture_id(calling.cuda_stream) if torch.cuda.is_current_stream_capturing() else 0
        side, ended = (self._graph_side, self._captured_end) if graph else (self._side, self._ended)
        if graph:
            _captured.append((self._words, self.memory.kept()))
        if graph == 0 or graph == self._graph:
            calling.wait_event(ended)
        try:
            issue(program, (calling.cuda_stream, side.cuda_stream, first, second), host)
        except BaseException as error:
            if graph:
                lose_capture(calling)
            else:
                self.give_up(error, calling)
            raise
        self._graph = graph or self._graph
        ended.record(calling)

    @property
    def side(self) -> torch.cuda.Stream:
        """The other stream of eager calls."""
        return self._side

    @property
    def ended(self) -> torch.cuda.Event:
        """Recorded behind each eager call, for which the next one waits."""
        return self._ended

    def give_up(self, error: BaseException, calling: torch.cuda.Stream) -> None:
        """Break the group after an eager call that was issued in part."""
        self._abort_half_issued(error)
        calling.wait_stream(self._side)  # it may read the caller's tensors, and waits for no peer
        self._ended.record(calling)

    def record(
        self, recorder: Recorder, texts: tuple[gather.Operations, gather.Operations], pushes: Handlers
    ) -> Program:
        """Record a call.

        Parameters
        ----------
        texts
            The protocols of the calling stream and of the side stream.
        pushes
            The handlers of `replay.Mark`, called before the mark; of `replay.Push`; and of `replay.SignalPeer`, which
            returns an address.
        """
        memory, at, add = self.memory, self._control, recorder.add
        own, fork, join = memory.signal(self._rank, 0, at), self._fork.cuda_event, self._join.cuda_event

        def copy_word(to: int, word: int) -> None:
            add(CopyAcross(_SIDE, to, own + 4 * word, 4))

        def mark(op: replay.Mark) -> None:
            pushes[replay.Mark](op)
            copy_word(memory.signal(op.peer, 0, at + replay.MARKS + self._rank), replay.STAMP)

        side: Handlers = {
            replay.AwaitFork: lambda op: add(WaitEvent(_SIDE, fork)),
            replay.Mark: mark,
            replay.Push: pushes[replay.Push],
            replay.Pushed: no_op,
            replay.SignalPeer: lambda op: copy_word(pushes[replay.SignalPeer](op), replay.ONE),
            replay.Joined: lambda op: add(Record(_SIDE, join)),
        }

        def fork_off(op: replay.Fork) -> None:
            add(Record(CALLING, fork))
            run_protocol(texts[1], side)

        def host(name: str) -> Callable[[Any], int]:
            def named(op: Any) -> int:
                recorder.host(name)
                return 1

            return named

        calling: Handlers = {
            replay.Advance: host("begin"), replay.AwaitTaken: lambda op: 1,
            replay.Fork: fork_off,
            replay.Unbroken: host("read"),
            replay.Gate: lambda op: 1, replay.Read: no_op, replay.ReadDone: no_op, replay.Clear: no_op,
            replay.Intact: host("end"), replay.Taken: no_op,
            replay.HandIn: host("hand in"),
            replay.AwaitJoin: lambda op: add(WaitEvent(CALLING, join)),
        }  # fmt: skip
        recorder.run(texts[0], calling)
        return recorder.program()

    def fork_again(self, recorder: Recorder) -> None:
        """Record that the side stream waits for the calling stream's operations so far."""
        recorder.add(Record(CALLING, self._fork.cuda_event))
        recorder.add(WaitEvent(_SIDE, self._fork.cuda_event))

    def words(self, key: int, form: int) -> SlotWords:
        """The words for the kernels of a call of this form."""
        from tilestream.launch.portable.rank_calls import SlotWords  # imports Triton

        assert self._words is not None
        return SlotWords(*self._words, self._rank, self._world, self.op, key, form)


class GraphGather(GraphQueue):
    """A group's gathers that a graph may hold."""

    op = "all_gather_matmul"

    def __init__(self, state: GroupState, device: torch.device, memory: PeerMemory | None = None) -> None:
        super().__init__(state, device, memory)
        self._arrivals: dict[Shards, Arrival] = {}

    def reserve(self, size: int, chunks: int = 0) -> bool:
        """See `CallQueue`; makes the arrivals again for new signals."""
        new = super().reserve(size, chunks)
        if new:
            self._arrivals = {shards: self._made(shards) for shards in self._arrivals}
        return new

    def arrival(self, shards: Shards) -> Arrival:
        """The arrival that a call's kernel waits for.

        Raises
        ------
        RuntimeError
            If it does not exist yet, and a graph is being captured.
        """
        found = self._arrivals.get(shards)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{self.op}: call it once with these shapes before the capture")
            if len(self._arrivals) >= _MOST_SHARDS:
                self._arrivals.clear()
                if (state := self._state()) is not None:
                    state.unprepare()
            found = self._arrivals[shards] = self._made(shards)
        return found

    def _made(self, shards: Shards) -> Arrival:
        rank, made = self._rank, shards.arrival(self._rank)
        made._signals = self.signals_of(
            made.num_chunks, lambda chunk: (rank, f"rank {shards.rank_of(chunk)}'s part of a_shard")
        )
        return made

    def gather(
        self, shards: Shards, shard: ScaledRows, gathered: torch.Tensor | None,
        compute: Callable[[ScaledRows, Arrival], list[torch.Tensor]], seconds: float, number: int,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Issue or capture a call. For parameters and result see `copy_engines.GatherQueue.issue`.

        ``number``: `DistributedPlan.number`.
        """
        from tilestream.launch.portable import rank_calls  # imports Triton

        from_slot, rank = not shard.data.is_contiguous(), self._rank
        form = Form(shards, shard.data.dtype, shard.scales is not None, "push", from_slot)
        if shard.scales is not None:  # they are few, and often one expanded number
            shard = shard._replace(scales=shard.scales.contiguous())
        self.check()
        arrival = self.arrival(shards)
        signals = signals_of(arrival)
        prepared: Prepared = self.prepared(form, 0, self._prepare)
        words, rows, outs = self.words(signals.key, number), prepared.slot, list[torch.Tensor]()
        own = None if from_slot else local_rows(rank, shards, shard.data, rows.data)
        if torch.cuda.is_current_stream_capturing():
            _captured.append(arrival)
        signals.begin(1)

        def begin() -> None:
            rank_calls.begin_call(words, seconds, shards.batches, shards.parts)
            if from_slot:
                place(rank, rows.data, shard.data)
            if rows.scales is not None and shard.scales is not None:
                place(rank, rows.scales, shard.scales)

        def read() -> None:
            outs.extend(compute(rows, arrival))
            if gathered is not None:
                copy(gathered, rows.data)
                if own is not None:
                    place(rank, gathered, shard.data)

        def hand_in() -> None:
            for out in outs[1:] if gathered is None else [*outs[1:], gathered]:
                rank_calls.void_out(words, out)

        # The last kernel makes the first result NaN where the call is void: mostly there is no other result.
        host = {"begin": begin, "read": read, "end": lambda: rank_calls.end_call(words, outs[0]), "hand in": hand_in}
        scales = 0 if shard.scales is None else shard.scales.data_ptr()
        signals.local_rows = own
        try:
            self.run(prepared.program, host, shard.data.data_ptr(), scales)
        finally:
            signals.local_rows = None  # drops the reference to the caller's tensor
        return outs

    def _prepare(self, form: Form, slot: int) -> Prepared:
        """Record a call."""
        recorder, memory, shards, rank = Recorder(slot), self.memory, form.shards, self._rank
        mine, sources = list(shards.of_rank(rank)), list(sources_of(memory, rank, form, slot))

        def push_chunk(op: replay.Push) -> None:
            for one in push(memory, sources, shards, rank, mine[op.chunk], op.peer, slot, _SIDE):
                recorder.add(one)

        of_call = rank, self._world, slot, len(mine), 1
        program = self.record(recorder, (replay.calling(*of_call), replay.side(*of_call)), {
            replay.Mark: no_op, replay.Push: push_chunk,
            replay.SignalPeer: lambda op: memory.signal(op.peer, slot, mine[op.chunk].chunk),
        })  # fmt: skip
        return Prepared(program, slot_rows(memory, rank, slot, form))


class SumForm(NamedTuple):
    """The values that decide a sum's operations: bytes of a part, and whether each peer gets a different part."""

    part_bytes: int
    scatters: bool


class GraphSum(GraphQueue):
    """A group's sums that a graph may hold. The slot has a part of each rank, in the order of the ranks."""

    _signals: GraphSignals | None = None

    def reserve(self, size: int, chunks: int = 0) -> bool:
        """See `CallQueue`; there is one signal a rank."""
        new, rank = super().reserve(size, self._world), self._rank
        if new or self._signals is None:
            self._signals = self.signals_of(self._world, lambda chunk: (rank, f"rank {chunk}'s part of the sum"))
        return new

    def reduce(
        self, out: torch.Tensor, parts: torch.Tensor | None, product: Callable[[int, torch.Tensor], object],
        bias: torch.Tensor | None, divisor: float, seconds: float, number: int,
    ) -> None:  # fmt: skip
        """Issue or capture a call.

        Parameters
        ----------
        out
            ``[rows, N]``, contiguous: the sum.
        parts
            ``[world, rows, N]``: memory for the peers' parts; None: all peers get the own part.
        product
            ``product(rank, part)`` issues the matmul of a rank's part; without ``parts``, of this rank's part.
        number
            `DistributedPlan.number`.
        """
        from tilestream.launch.portable import add, rank_calls  # imports Triton

        self.check()
        rank, world, signals = self._rank, self._world, self._signals
        assert signals is not None
        size = out.numel() * out.element_size()
        prepared: Prepared = self.prepared(SumForm(size, parts is not None), 0, self._prepare)
        if torch.cuda.is_current_stream_capturing():
            _captured.append(signals)
        words = self.words(signals.key, number)
        own = self.memory.slot(rank, 0)[: world * size].view(out.dtype).view(world, 1, *out.shape)
        void = words.control[replay.VOID : replay.VOID + 1]

        def begin() -> None:
            rank_calls.begin_call(words, seconds, 0, 1)
            if parts is None:
                product(rank, own[rank, 0])

        def read() -> None:
            if parts is not None:
                product(rank, own[rank, 0])
            rank_calls.await_parts(words, seconds, 1)
            add.add_parts(own.transpose(0, 1), own, out.unsqueeze(0), bias, void, rank, 1, divisor)

        host: dict[str, Callable[[], object]] = {
            "begin": begin, "read": read, "end": lambda: rank_calls.end_call(words, out), "hand in": lambda: None,
        }  # fmt: skip
        if parts is not None:
            host |= {f"multiply {peer}": functools.partial(product, peer, parts[peer]) for peer in range(world)}
        self.run(prepared.program, host, 0 if parts is None else parts.data_ptr())

    def _prepare(self, form: SumForm, slot: int) -> Prepared:
        """Record a call."""
        recorder, memory, rank, size = Recorder(slot), self.memory, self._rank, form.part_bytes

        def multiply(op: replay.Mark) -> None:
            if form.scatters:
                recorder.host(f"multiply {op.peer}")
                self.fork_again(recorder)

        def push_part(op: replay.Push) -> None:
            source = FIRST + op.peer * size if form.scatters else memory.address(rank, slot) + rank * size
            recorder.add(CopyAcross(_SIDE, memory.address(op.peer, slot) + rank * size, source, size))

        of_call = rank, self._world, slot, 1, 1
        program = self.record(recorder, (replay.adding(*of_call), replay.side(*of_call)), {
            replay.Mark: multiply, replay.Push: push_part,
            replay.SignalPeer: lambda op: memory.signal(op.peer, slot, rank),
        })  # fmt: skip
        return Prepared(program, ScaledRows(memory.slot(rank, slot), None))


class GraphScatter(GraphSum):
    """A group's reduce-scatters that a graph may hold."""

    op = "matmul_reduce_scatter"


class GraphAllReduce(GraphSum):
    """A group's all-reduces that a graph may hold."""

    op = "matmul_all_reduce"


def note_prepared(state: GroupState, plan: Call) -> None:
    """Note that an eager call of this kind has made what a capture needs."""
    if not torch.cuda.is_current_stream_capturing():
        state.prepared.add(plan.handshake)


def gather_matmul(
    state: GroupState, plan: DistributedPlan, shards: Shards, shard: ScaledRows, products: Sequence[Product],
    seconds: float, return_a: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """See `copy_engines.gather_matmul`."""
    device, x = shard.data.device, shard.data
    with torch.cuda.device(device):
        gathered = x.new_empty(shards.shape) if return_a else None
        queue = GraphGather.of(state, plan, "a_shard", device, slot_size(shards, x.dtype), shards.chunks)

        def compute(rows: ScaledRows, arrival: Arrival) -> list[torch.Tensor]:
            a = rows.data.view(shards.total, shards.width)
            scales = None if rows.scales is None else rows.scales.view(shards.total, 1)
            first, *others = products
            own = signals_of(arrival).local_rows
            if others and own is not None:  # after the first, all rows are in the slot
                own.bring()
            return [first(a, scales, arrival, seconds), *(one(a, scales, None, seconds) for one in others)]

        outs = queue.gather(shards, shard, gathered, compute, seconds, plan.number)
        note_prepared(state, plan)
    return x if gathered is None else gathered, outs


def matmul_scatter(
    state: GroupState, plan: DistributedPlan, shards: Shards, request: Request, a: torch.Tensor, dtype: torch.dtype,
    seconds: float,
) -> torch.Tensor:  # fmt: skip
    """See `gpu_reduce_scatter.matmul_scatter`. ``a``: ``[batches, world, rows, K]``."""
    device, scale = a.device, request.scale_a
    of_rows = None if scale is None or scale.numel() == 1 else scale.reshape(*shards.shape[:-1], 1)
    shape = shards.batches * shards.rows, shards.width

    def product(rank: int, into: torch.Tensor) -> None:
        scale_a = scale if of_rows is None else of_rows[:, rank].reshape(-1, 1)
        rows = a[:, rank].reshape(shape[0], -1)
        request.product(rows, bias=None, out_dtype=dtype, out=into, scale_a=scale_a)

    with torch.cuda.device(device):
        out = torch.empty(shape, dtype=dtype, device=device)
        parts = torch.empty((shards.world, *shape), dtype=dtype, device=device)
        queue = GraphScatter.of(state, plan, "a", device, shards.world * out.numel() * dtype.itemsize)
        _reduce(queue, request, out, parts, product, seconds, plan.number)
        note_prepared(state, plan)
    return out


def matmul_reduce(state: GroupState, plan: DistributedPlan, request: Request, dtype: torch.dtype) -> torch.Tensor:
    """See `one_shot.matmul_reduce`."""
    a, seconds = request.a, request.seconds(state)
    whole = *a.shape[:-1], request.b.shape[-1]

    def product(rank: int, into: torch.Tensor) -> None:
        request.product(a, bias=None, out_dtype=dtype, out=into.view(whole))

    with torch.cuda.device(a.device):
        out = torch.empty((math.prod(whole[:-1]), whole[-1]), dtype=dtype, device=a.device)
        queue = GraphAllReduce.of(state, plan, "a", a.device, state.world * out.numel() * dtype.itemsize)
        _reduce(queue, request, out, None, product, seconds, plan.number)
        note_prepared(state, plan)
    return out.view(whole)


def _reduce(
    queue: GraphSum, request: Request, out: torch.Tensor, parts: torch.Tensor | None,
    product: Callable[[int, torch.Tensor], object], seconds: float, number: int,
) -> None:  # fmt: skip
    bias = None if request.bias is None else request.bias.contiguous()  # the kernel takes no strides
    queue.reduce(out, parts, product, bias, request.divisor(queue._world), seconds, number)
