"""Mixtures of experts on GPUs: kernels push rows and results, and no host learns how many; CUDA graphs may hold it.

::

    calling stream:  begin_call; for each source: take_rows, its products; take_results; end_call; add_results
    side stream:     push_rows; for each source behind its products: push_results

`tilestream.core.protocols.experts`, which the checker explores, has the operations. This module maps each to a kernel
of `tilestream.kernels.portable.experts`, and records them (`tilestream.distributed.program`). Eager and captured calls
are issued alike, as in `tilestream.distributed.graph_calls`, whose slot, words and failures these are.

Scattered rows are no work for copy engines: a copy a row costs more to issue than to move. So a part of the SMs pushes
them (`PUSHERS`), and all SMs where no product runs: the own rows before the first, the last source's results behind the
last. Products are of one source's rows: their bits do not depend on which source was there first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilestream.core.protocols import experts as text
from tilestream.core.protocols import replay
from tilestream.distributed import graph_calls
from tilestream.distributed.graph_calls import GraphQueue, GraphSignals
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.moe_experts import Experts, through
from tilestream.distributed.moe_plan import MoePlan
from tilestream.distributed.moe_repeats import MixtureRepeat, PlainMixture
from tilestream.distributed.program import CALLING, Handlers, Program, Recorder, no_op
from tilestream.launch.choices import Chosen, sort
from tilestream.launch.layout import Layout
from tilestream.plan.limit import limit, workers_in
from tilestream.runtime.properties import cuda_properties
from tilestream.runtime.sequence import Record, WaitEvent

if TYPE_CHECKING:
    from tilestream.launch.portable.experts import Local

#: The products of a source's rows ``[capacity, width]``, by where those of each expert end.
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Prepared(NamedTuple):
    """The program of calls of one layout, what their kernels count, and the signals of the sources and results."""

    program: Program
    local: Local
    signals: GraphSignals


class _Steps:
    """A text whose operations are performed up to the next of one kind."""

    def __init__(self, text_: Any, handlers: Handlers) -> None:
        self._text, self._handlers, self._op = text_, handlers, next(text_)

    def run(self, past: type | None, until: type) -> None:
        """Perform the operations from here on, one of ``past`` first if it is given, to the next of ``until``."""
        assert past is None or isinstance(self._op, past)
        try:
            while past is not None or not isinstance(self._op, until):
                past, self._op = None, self._text.send(self._handlers[type(self._op)](self._op))
        except StopIteration:
            pass


class GraphExperts(GraphQueue):
    """A group's mixtures of experts on one GPU. Hold the group's call."""

    op = "moe"

    def mix(
        self, layout: Layout, pushers: int, alone: int, x: torch.Tensor, weights: torch.Tensor, chosen: Chosen,
        compute: Compute, seconds: float, number: int, repeat: MixtureRepeat | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Issue or capture a call; the result is as ``x``.

        Parameters
        ----------
        pushers
            Workers that push beside products, from this rank.
        alone
            Workers that push where nothing else runs.
        x, weights
            ``[T, width]``, ``[T, top_k]``; contiguous.
        seconds
            The deadline of each wait for a peer.
        number
            `MoePlan.number`.
        repeat
            Learns to repeat the call.
        """
        from tilestream.launch.portable import experts, rank_calls  # imports Triton

        self.check()
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and (layout, 0) not in self._prepared:
            raise RuntimeError(f"{self.op}: call it once with these shapes before the capture")
        prepared: Prepared = self.prepared(layout, 0, self._prepare)
        local, words = prepared.local, self.words(prepared.signals.key, number)
        if capturing:
            graph_calls._captured.append(prepared)
        side = self._graph_side if capturing else self._side
        out, top_k, rank = torch.empty_like(x), weights.shape[1], self._rank
        size = layout.capacity * layout.width * layout.itemsize
        memory = self.memory.slot(rank, 0)
        rows = memory[: layout.world * size].view(x.dtype).view(layout.world, layout.capacity, layout.width)
        results = memory[layout.results : layout.results + size].view(x.dtype).view(layout.capacity, layout.width)
        *_, last = text.sources(rank, layout.world)
        computed: dict[int, torch.Tensor] = {}  # kept until the streams have joined, since the side stream reads them

        def push() -> None:
            with torch.cuda.stream(side):
                experts.push_rows(words, layout, local, x, top_k, chosen, pushers, alone - pushers)

        def multiply(source: int) -> None:
            computed[source] = compute(rows[source], local.ends[source, : layout.experts])

        def give_back(source: int) -> None:
            with torch.cuda.stream(side):
                workers = alone if source == last else pushers
                experts.push_results(words, layout, local, source, computed[source], workers)

        host: dict[str, Callable[[], object]] = {
            "begin": lambda: rank_calls.begin_call(words, seconds, 0, 1), "push": push,
            "collect": lambda: experts.take_results(words, layout, seconds),
            "add": lambda: experts.add_results(words, results, weights, chosen, out),
            "end": lambda: rank_calls.end_call(words),
        }  # fmt: skip
        for source in range(layout.world):
            host[f"take {source}"] = partial(experts.take_rows, words, layout, local, source, seconds)
            host[f"compute {source}"] = partial(multiply, source)
            host[f"return {source}"] = partial(give_back, source)
        if repeat is None or capturing:
            self.run(prepared.program, host)
        else:
            repeat.learn(prepared.program, host, self.run, prepared)
        return out

    def _prepare(self, layout: Layout, slot: int) -> Prepared:
        """Record a call, and make what its kernels count with."""
        recorder, rank, world = Recorder(slot), self._rank, self._world
        add, fork, join = recorder.add, self._fork.cuda_event, self._join.cuda_event

        def named(name: str) -> Callable[[Any], int]:
            def host(op: Any) -> int:
                recorder.host(name.format(source=getattr(op, "source", "")))
                return 1

            return host

        def follow(op: Any) -> int:  # the side stream goes on behind the calling stream's work so far
            add(Record(CALLING, fork))
            add(WaitEvent(graph_calls._SIDE, fork))
            return 1

        beside = _Steps(text.side(rank, world, 1), {
            replay.AwaitFork: follow, replay.Unbroken: named("push"), replay.Mark: no_op, text.Head: no_op,
            text.SignalHead: no_op, text.PushRows: no_op, text.PushedRows: no_op, text.SignalRows: no_op,
            text.AwaitHand: follow, text.PushResults: named("return {source}"), text.PushedResults: no_op,
            text.SignalResults: no_op, replay.Joined: lambda op: add(Record(graph_calls._SIDE, join)),
        })  # fmt: skip
        recorder.run(text.calling(rank, world, 1), {
            replay.Advance: named("begin"), replay.AwaitTaken: lambda op: 1,
            replay.Fork: lambda op: beside.run(None, text.AwaitHand),
            replay.Unbroken: lambda op: 1, text.AwaitHead: lambda op: 1, text.AwaitRows: lambda op: 1,
            text.Matches: lambda op: 1, text.ClearRows: named("take {source}"), text.Compute: named("compute {source}"),
            text.Computed: no_op, text.Hand: lambda op: beside.run(text.AwaitHand, text.AwaitHand),
            text.AwaitResults: lambda op: 1, text.ClearResults: named("collect"), text.Add: no_op,
            text.Added: _once(named("add")), replay.Intact: named("end"), replay.Taken: no_op,
            replay.HandIn: no_op, replay.AwaitJoin: lambda op: add(WaitEvent(CALLING, join)),
        })  # fmt: skip
        return Prepared(recorder.program(), self._made_local(layout), self._made_signals(layout))

    def _made_local(self, layout: Layout) -> Local:
        from tilestream.launch.portable.experts import Local  # imports Triton

        memory, world, device = self.memory, layout.world, self.device
        with torch.inference_mode(False):
            done = torch.zeros(world * layout.experts, dtype=torch.int32, device=device)
            returned, taken = torch.zeros(2, world, 4, dtype=torch.int32, device=device).unbind()
            ends = torch.zeros(world, -(-layout.experts // 4) * 4, dtype=torch.int32, device=device)
            first = [memory.address(rank, 0) for rank in range(world)]
            words = [memory.signal(rank, 0, 0) for rank in range(world)]
            slots = torch.tensor([*first, *words], dtype=torch.int64).to(device)
        torch.cuda.current_stream(device).synchronize()  # calls may be on any stream
        return Local(done, returned, taken, ends, slots)

    def _made_signals(self, layout: Layout) -> GraphSignals:
        rank, world, experts = self._rank, layout.world, layout.experts

        def whose(chunk: int) -> tuple[int, str]:
            if chunk >= world * (1 + experts):
                return rank, f"rank {chunk - world * (1 + experts)}'s results"
            return rank, f"rank {chunk if chunk < world else (chunk - world) // experts}'s rows"

        return self.signals_of(text.signals(world, experts), whose)


def _once(handler: Callable[[Any], int]) -> Callable[[Any], int]:
    """A handler for the first of several operations that one kernel performs."""
    done: list[object] = []

    def first(op: Any) -> int:
        if not done:
            done.append(op)
            handler(op)
        return 1

    return first


def workers_under(bound: int, pushers: int, everybody: int) -> tuple[int, int]:
    """Workers that push beside products, and where nothing else runs; at most ``bound``, but two at least.

    ``pushers``: a plan's. At least as many are left for the own rows, for which the first product waits.
    """
    alone = max(2, min(bound, everybody))
    return min(pushers, alone // 2), alone


def mix(
    state: GroupState, plan: MoePlan, x: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor, e: Experts,
    seconds: float, plain: PlainMixture | None = None,
) -> torch.Tensor:  # fmt: skip
    """The result ``[T, H]`` of `tilestream.distributed.moe`, non-blocking. Hold the group's call.

    The next call on this device, or with this group, raises later errors. ``plain``: the call, if equal ones can be
    repeated.
    """
    from tilestream.launch.portable.experts import multiply_rows  # imports Triton

    layout, repeat = plan.layout, None
    assert layout is not None

    def compute(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        multiply = multiply_rows if repeat is None else repeat.multiply
        return through(e, rows, ends, lambda gate, up: multiply(gate, up, ends))

    with torch.cuda.device(x.device):
        queue = GraphExperts.of(state, plan, "x", x.device, layout.size, text.signals(layout.world, layout.experts))
        chosen = sort(choices, layout.world * layout.experts)
        everybody = cuda_properties(x.device.index).workers
        pushers, alone = workers_under(workers_in(limit()) or everybody, plan.pushers, everybody)
        x, weights = x.contiguous(), weights.contiguous()
        repeat = None if plain is None else MixtureRepeat.of(plain, queue, layout, e)  # type: ignore[arg-type]
        out = queue.mix(layout, pushers, alone, x, weights, chosen, compute, seconds, plan.number, repeat)
        graph_calls.note_prepared(state, plan)
    return out
