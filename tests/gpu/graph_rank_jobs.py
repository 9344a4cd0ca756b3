"""What ranks do in ``test_gpu_graph_ranks.py``. Each rank can make the random inputs of all ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from distributed_jobs import BF16, Worst, error_of_a_late_rank, finish, late_in_turn, random, stay_away

import tilestream as ts
from rank_checks import raised
from tilestream import distributed as tsd
from tilestream.distributed import all_gather, all_reduce, reduce_scatter
from tilestream.distributed.copy_engines import GatherQueue
from tilestream.distributed.counting import VARIABLE, counting
from tilestream.distributed.gpu_reduce_scatter import ReduceScatterQueue
from tilestream.distributed.graph_calls import GraphQueue
from tilestream.distributed.group_state import state_of
from tilestream.distributed.one_shot import AllReduceQueue
from tilestream.distributed.request import Request

DEADLINE = 20.0


class Op(NamedTuple):
    """An op on a static operand, which each call's data are copied to; and what a call with some data gives."""

    operand: torch.Tensor
    call: Callable[[], torch.Tensor]
    load: Callable[[torch.Tensor], object]
    expected: Callable[[torch.Tensor], torch.Tensor]
    plan: Callable[[], object]


def ops(rank: int, world: int, rows: int = 128, deadline: float = DEADLINE, group=None) -> dict[str, Op]:
    """Of ``whole``: ``[rows * world, 256]``, known to all ranks."""
    b, here = random(1, 256, 256), slice(rows * rank, rows * rank + rows)
    shard, whole = torch.empty(rows, 256, device="cuda", dtype=BF16), random(2, rows * world, 256)
    few = torch.empty(48, 256, device="cuda", dtype=BF16)
    how = {"form": "fused", "deadline": deadline, "group": group}
    plans = {"form": "fused", "group": group}
    return {
        "gather": Op(
            shard, lambda: tsd.all_gather_matmul(shard, b, **how), lambda x: shard.copy_(x[here]), lambda x: x @ b,
            lambda: tsd.plan_all_gather_matmul(shard, b, **plans),
        ),
        "sum": Op(
            whole, lambda: tsd.matmul_reduce_scatter(whole, b, **how), lambda x: whole.copy_(x),
            lambda x: world * (x @ b)[here].float(), lambda: tsd.plan_matmul_reduce_scatter(whole, b, **plans),
        ),
        "all_reduce": Op(
            few, lambda: tsd.matmul_all_reduce(few, b, **how), lambda x: few.copy_(x[:48]),
            lambda x: world * (x[:48] @ b).float(), lambda: tsd.plan_matmul_all_reduce(few, b, **plans),
        ),
    }  # fmt: skip


def captured(one: Op, count: int = 1, pool=None) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A graph of so many calls, and their results; each was called before. ``pool``: of memory, that graphs share."""
    one.call()
    finish()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        said = one.plan().explain()
        outs = [one.call() for _ in range(count)]
    assert "fused:" in said.splitlines()[1], said
    assert "counted" in said, said
    return graph, outs


@contextlib.contextmanager
def fused_calls(at_least: int = 1, by_host: bool = False) -> Iterator[None]:
    """A block with so many calls between ranks, or more, that raises unless the device counts each, so it is fused.

    A replay is no call. The calls' arguments are not kept, since they may be memory of a graph of torch's compiler.
    ``by_host``: the host counts eager calls; those that are repeated are fused, as their first one is.
    """
    counts: Counter[str] = Counter()

    def counted(owner: object, name: str, what: str):
        original = getattr(owner, name)

        def run(*args, **how):
            # Before a kind's first eager call the device makes it for captures.
            is_first = by_host and owner is GraphQueue and not torch.cuda.is_current_stream_capturing()
            counts["first" if is_first else what] += 1
            return original(*args, **how)

        return mock.patch.object(owner, name, run)

    with contextlib.ExitStack() as stack:
        for module in (all_gather, all_reduce, reduce_scatter):
            stack.enter_context(counted(module, "run", "calls"))
        stack.enter_context(counted(GraphQueue, "run", "fused"))
        if by_host:
            for queue, name in ((GatherQueue, "issue"), (ReduceScatterQueue, "issue"), (AllReduceQueue, "reduce")):
                stack.enter_context(counted(queue, name, "fused"))
        before = state_of("test", None).repeated
        yield
        repeated = state_of("test", None).repeated - before
    assert counts["calls"] == counts["fused"], counts
    assert at_least <= counts["calls"] + repeated, counts
    assert by_host or not repeated, f"{repeated} calls were repeated, which the host counts"


def unprepared(rank, world):
    """A capture without a call before it is unfused and says so; behind a call it is not."""
    one = ops(rank, world)["gather"]
    tsd.all_gather_matmul(one.operand, random(1, 256, 256), form="unfused", deadline=DEADLINE)
    finish()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said = one.plan().explain()
        torch.zeros(1, device="cuda")
    captured(one)
    return said


def other_counts(rank, world):
    """The last rank counts no calls by its device: what two fused calls raise; and whether an unfused one is right.

    float32 is not carried by symmetric memory, so ranks need not agree there.
    """
    os.environ[VARIABLE] = "0" if rank == world - 1 else ""
    counting.cache_clear()
    x, b = random(5, 128, 256), random(1, 256, 256)
    calls = tsd.matmul_all_reduce, tsd.all_gather_matmul
    said = [raised(lambda call=call: call(x, b, deadline=DEADLINE)) for call in calls]
    out = tsd.all_gather_matmul(x.float(), b.float(), deadline=DEADLINE)
    finish()
    return *said, torch.allclose(out, torch.cat([x] * world).float() @ b.float(), atol=0.1)


def replays(rank, world, name, count, mixed):
    """Replays of other data each, ranks late in turn; ``mixed``: eager calls between, on other ranks than replays.

    The error is infinite where a result has other bits than the first eager call of its data. This is compared on the
    GPU, because a rank that waited for the answer would never be far ahead of its peers.
    """
    one, worst = ops(rank, world)[name], Worst()
    graph, (static,) = captured(one)
    wholes = [random(100 + i, 128 * world, 256) for i in range(6)]
    expected, bits = [one.expected(whole) for whole in wholes], list[torch.Tensor]()
    for whole, right in zip(wholes, expected, strict=True):
        one.load(whole)
        eager = one.call()
        worst.add(eager, right)
        bits.append(eager.view(torch.int16))
    for i in range(count):
        late_in_turn(i, rank)
        one.load(wholes[i % 6])
        if mixed and (i + rank) % 3 == 0:
            out = one.call()
        else:
            graph.replay()
            out = static
        worst.add(out, expected[i % 6], right=(out.view(torch.int16) == bits[i % 6]).all())
    return worst.get()


def same_bits(rank, world, name, count):
    """Replays give the bits of eager calls."""
    one = ops(rank, world)[name]
    graph, (static,) = captured(one)
    for i in range(count):
        one.load(random(100 + i, 128 * world, 256))
        eager = one.call().clone()
        graph.replay()
        if not eager.view(torch.int16).equal(static.view(torch.int16)):
            return False
    finish()
    return True


def by_turns(rank, world, name, count):
    """Replays and eager calls by turns on all ranks; late ranks, no barrier.

    Returns
    -------
    tuple
        The largest error; whether both have the same bits at the same data; how many eager calls were repeated.
    """
    one, worst = ops(rank, world)[name], Worst()
    said, before = one.plan().explain(), state_of("test", None).repeated
    assert "in graphs fused" in said, said
    graph, (static,) = captured(one)
    for i in range(count):
        late_in_turn(i, rank)
        whole = random(100 + i % 6, 128 * world, 256)
        one.load(whole)
        for _ in range(1 + i % 3):
            graph.replay()
        worst.add(static, one.expected(whole))
        worst.add(one.call(), one.expected(whole))
    one.load(random(7, 128 * world, 256))
    graph.replay()
    is_same = one.call().view(torch.int16).equal(static.view(torch.int16))
    return worst.get(), is_same, state_of("test", None).repeated - before


def kinds(rank, world):
    """Calls of several kinds, each called once and then captured; the largest error."""
    x, worst = random(5 + rank, 128, 256), Worst()
    gathered = torch.cat([random(5 + r, 128, 256) for r in range(world)])
    b, other, bias = random(1, 256, 256), random(2, 256, 128), random(3, 1, 256)[0]
    wide, small = random(40 + rank, 128 * world, 512), random(60 + rank, 128 * world, 128)
    long, short = random(7, 512, 256), random(8, 128, 256)
    how = {"form": "fused", "deadline": DEADLINE}

    def summed(a: int, k: int, w):
        total = sum((random(a + r, 128 * world, k) @ w).float() for r in range(world))
        return total[128 * rank : 128 * rank + 128]

    calls = [
        (lambda: tsd.all_gather_matmul(x, b, **how), gathered @ b),
        (lambda: tsd.all_gather_matmul(x, b, bias=bias, **how), gathered @ b + bias),
        (lambda: torch.cat(tsd.all_gather_matmul(x, [other, b[:, :128]], **how), 1),
         torch.cat([gathered @ other, gathered @ b[:, :128]], 1)),
        (lambda: tsd.matmul_reduce_scatter(wide, long, **how), summed(40, 512, long)),
        (lambda: tsd.matmul_reduce_scatter(small, short, **how), summed(60, 128, short)),
        (lambda: tsd.matmul_reduce_scatter(small, short, bias=bias, **how), summed(60, 128, short) + bias),
    ]  # fmt: skip
    for call, _ in calls:
        call()
    finish()
    for call, right in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        for _ in range(3):
            graph.replay()
            worst.add(out, right)
    return worst.get()


def traced(rank, world, name, count):
    """Replays of a call that was captured with its trace: what is wrong with its launches' traces, and the error."""
    one, worst, wrong = ops(rank, world)[name], Worst(), []
    one.load(random(1, 128 * world, 256))
    with ts.trace.record() as recorder:
        graph, (static,) = captured(one)
    eager, before = recorder.launches, 0.0  # the launches of the call before the capture
    for i in range(count):
        whole = random(100 + i, 128 * world, 256)
        one.load(whole)
        late_in_turn(i, rank)
        graph.replay()
        worst.add(static, one.expected(whole))
        launches = recorder.replayed()
        if len(launches) != len(eager):
            wrong.append(f"{len(launches)} launches are captured; an eager call has {len(eager)}")
        for launch, other in zip(launches, eager, strict=False):
            if (launch.tiles_done, launch.workers) != (launch.tiles, other.workers):
                wrong.append(f"replay {i}: {launch.tiles_done} of {launch.tiles} tiles, {launch.workers} workers")
            if {operand: len(of) for operand, of in launch.arrivals.items()} != {
                operand: len(of) for operand, of in other.arrivals.items()
            }:
                wrong.append(f"replay {i}: it waits for other chunks than an eager call: {launch.arrivals}")
            if not before - 1e-6 <= launch.begin < launch.end:
                wrong.append(f"replay {i}: it begins at {launch.begin}, behind a launch that ended at {before}")
            before = launch.end
    del recorder, launches
    for i in range(4):  # the graph goes on recording
        whole = random(200 + i, 128 * world, 256)
        one.load(whole)
        graph.replay()
        worst.add(static, one.expected(whole))
    return wrong, worst.get()


def compiled(rank, world, name, by_host=False):
    """As `replays`, of a function that torch compiles with CUDA graphs of its own."""
    one, worst = ops(rank, world)[name], Worst()
    step = torch.compile(lambda: one.call() * 2, mode="reduce-overhead", dynamic=False)
    with fused_calls(12, by_host):
        for i in range(12):
            late_in_turn(i, rank)
            whole = random(100 + i, 128 * world, 256)
            one.load(whole)
            torch.compiler.cudagraph_mark_step_begin()
            worst.add(step(), 2 * one.expected(whole))
    return worst.get()


def compiled_and_captured(rank, world, name, by_host=False):
    """As `replays`, of a function that torch compiles without graphs, and that is captured: fused in one graph."""
    one, worst = ops(rank, world)[name], Worst()
    step = torch.compile(lambda: one.call() * 2, dynamic=False)
    with fused_calls(4, by_host):
        for _ in range(2):
            step()
        graph, (static,) = captured(one._replace(call=step))
    for i in range(12):
        late_in_turn(i, rank)
        whole = random(100 + i, 128 * world, 256)
        one.load(whole)
        graph.replay()
        worst.add(static, 2 * one.expected(whole))
    return worst.get()


#: Rows of a rank, and K and N, at which the table has torch's fused ops fused, sums too.
_ROWS, _WIDTH = 4096, 2048


def _relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """In the Frobenius norm; ``exact`` is in double precision."""
    return ((ours.double() - exact).norm() / exact.norm()).item()


def torchs_ops(rank, world):
    """torch's fused ops as engines capture them: a graph of two of them, one of another, an eager sum between.

    Gathers along both dimensions of a batch, and a sum. Returns the largest relative error of replays of late ranks.
    """
    group, torchs = dist.group.WORLD, torch.ops.symm_mem
    name, b, w = group.group_name, random(3, _WIDTH, _WIDTH), random(4, _WIDTH, _WIDTH)
    shard, total = random(5 + rank, 2, _ROWS // 2, _WIDTH), random(6, _ROWS * world, _WIDTH)
    worst, here = 0.0, slice(_ROWS * rank, _ROWS * rank + _ROWS)

    def gather(dim: int):
        return torchs.fused_all_gather_matmul(shard, [b, w[:, :256]], dim, name)

    def scatter() -> torch.Tensor:
        return torchs.fused_matmul_reduce_scatter(total, w, "sum", 0, name)

    def captured_ops(*calls):
        for call in calls:
            call()  # once, as engines warm up
        finish()
        graph = torch.cuda.CUDAGraph()
        with fused_calls(len(calls)), torch.cuda.graph(graph):
            return graph, [call() for call in calls]

    with tsd.async_tp(group):
        first, (rows, summed) = captured_ops(lambda: gather(0), scatter)
        second, (columns,) = captured_ops(lambda: gather(1))
        for i in range(16):
            late_in_turn(i, rank)
            every = [random(1000 + 10 * i + r, 2, _ROWS // 2, _WIDTH) for r in range(world)]
            shard.copy_(every[rank])
            total.copy_(random(500 + i, _ROWS * world, _WIDTH))
            first.replay()
            between = scatter()
            second.replay()
            exact = world * (total[here].double() @ w.double())
            worst = max(worst, _relative(summed, exact), _relative(between, exact))
            for dim, (gathered, outs) in enumerate((rows, columns)):
                whole = torch.cat(every, dim)
                assert gathered.equal(whole), f"replay {i}: rows along dimension {dim}"
                for out, right in zip(outs, (b, w[:, :256]), strict=True):
                    worst = max(worst, _relative(out, whole.double() @ right.double()))
    return worst


def torchs_ops_compiled(rank, world):
    """A function with torch's fused ops, compiled with graphs of torch's own, which are cut there: relative error."""
    group, torchs, worst = dist.group.WORLD, torch.ops.symm_mem, 0.0
    name, b, w = group.group_name, random(3, _WIDTH, _WIDTH), random(4, _WIDTH, _WIDTH)

    def function(x):
        _, (made,) = torchs.fused_all_gather_matmul(x * 2, [b], 0, name)
        return torchs.fused_matmul_reduce_scatter(made / 16, w, "sum", 0, name) + 1

    with tsd.async_tp(group), torch.no_grad():
        step = torch.compile(function, mode="reduce-overhead", dynamic=False)
        with fused_calls(2 * 12, by_host=True):
            for i in range(12):
                late_in_turn(i, rank)
                every = [random(1000 + 10 * i + r, _ROWS, _WIDTH) for r in range(world)]
                torch.compiler.cudagraph_mark_step_begin()
                ours = step(every[rank])
                made = (2 * torch.cat(every).double()) @ b.double() / 16
                exact = world * made[_ROWS * rank : _ROWS * rank + _ROWS] @ w.double() + 1
                worst = max(worst, _relative(ours, exact))
    return worst


def layers(rank, world):
    """Two graphs of several ops each, of the default group and of another one; both are captured on two streams.

    In a graph the calls are by turns on one stream and the other, which waits for the first. The graphs are replayed by
    turns, each on a stream of its own, which waits for the other's: the user orders the replays of a rank.
    """
    groups, made = [None, dist.new_group(list(range(world)))], []
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for group, (first, second) in zip(groups, (streams, streams[::-1]), strict=True):
        each = ops(rank, world, group=group)
        for one in each.values():
            one.load(random(7, 128 * world, 256))
            one.call()
        finish()
        graph, outs = torch.cuda.CUDAGraph(), list[list[torch.Tensor]]()
        with fused_calls(at_least=2 * len(each)), torch.cuda.graph(graph, stream=first):
            for one in each.values():
                out = one.call()
                second.wait_stream(first)
                with torch.cuda.stream(second):
                    outs.append([out, one.call()])
                first.wait_stream(second)
        made.append((graph, each, outs, first, second))
    worst = Worst()
    finish()
    for i in range(20):
        for graph, each, outs, stream, other in made:
            stream.wait_stream(other)
            with torch.cuda.stream(stream):
                late_in_turn(i, rank)
                whole = random(200 + i, 128 * world, 256)
                for one in each.values():
                    one.load(whole)
                graph.replay()
                for one, both in zip(each.values(), outs, strict=True):
                    for out in both:
                        worst.add(out, one.expected(whole))
    return worst.get()


def piecewise(rank, world):
    """Steps cut into graphs, as engines capture a model: a gather, an eager all-reduce, a sum, an eager product."""
    each, worst = ops(rank, world), Worst()
    pieces = {name: captured(each[name]) for name in ("gather", "sum")}
    b = random(1, 256, 256)
    for i in range(30):
        whole = random(300 + i, 128 * world, 256)
        for one in each.values():
            one.load(whole)
        late_in_turn(i, rank)
        pieces["gather"][0].replay()
        reduced = each["all_reduce"].call()
        product = ts.matmul(pieces["gather"][1][0], b)
        late_in_turn(i, world - 1 - rank)
        pieces["sum"][0].replay()
        worst.add(pieces["gather"][1][0], each["gather"].expected(whole))
        worst.add(reduced, each["all_reduce"].expected(whole))
        worst.add(pieces["sum"][1][0], each["sum"].expected(whole))
        # The product of what was gathered: relative, since it is 16 times as large.
        worst.add(product / 16, (whole @ b).float() @ b.float() / 16)
    return worst.get()


def destroyed(rank, world, name):
    """A graph is destroyed while its replay is under way, and another one of new memory goes on."""
    one, worst = ops(rank, world)[name], Worst()
    whole = random(5, 128 * world, 256)
    for _ in range(3):
        graph, _ = captured(one)
        one.load(whole)
        if rank == 0:
            torch.cuda._sleep(20_000_000)
        graph.replay()
        del graph
        worst.add(one.call(), one.expected(whole))
    larger = ops(rank, world, rows=1024)[name]
    whole = random(6, 1024 * world, 256)
    graph, (static,) = captured(larger)
    larger.load(whole)
    graph.replay()
    worst.add(static, larger.expected(whole))
    return worst.get()


def pooled(rank, world, name):
    """Graphs share a pool of memory; in turn one is destroyed under way, and another captured from the pool."""
    one, worst, pool = ops(rank, world)[name], Worst(), torch.cuda.graph_pool_handle()
    made = [captured(one, 2, pool) for _ in range(2)]
    for i in range(16):
        for place in range(2):
            graph, outs = made[place]
            whole = random(400 + 2 * i + place, 128 * world, 256)
            one.load(whole)
            late_in_turn(i, rank)
            graph.replay()
            for out in outs:
                worst.add(out, one.expected(whole))
        if i % 4 == 3:
            graph, outs = made.pop(0)
            whole = random(500 + i, 128 * world, 256)
            one.load(whole)
            if rank == 0:
                torch.cuda._sleep(20_000_000)
            graph.replay()
            for out in outs:
                worst.add(out, one.expected(whole))
            del graph, outs
            made.append(captured(one, 2, pool))
    return worst.get()


def crossed(rank, world, name):
    """Two graphs of calls of other shapes, which the last rank replays in another order. Returns what was raised."""
    both = [ops(rank, world, rows=rows, deadline=2.0)[name] for rows in (128, 256)]
    if name == "all_reduce":
        short = both[1].operand[:24].clone()
        b = random(1, 256, 256)
        both[1] = both[0]._replace(
            operand=short, call=lambda: tsd.matmul_all_reduce(short, b, form="fused", deadline=2.0),
            plan=lambda: tsd.plan_matmul_all_reduce(short, b, form="fused"),
        )  # fmt: skip
    for one in both:
        one.operand.fill_(1.0)
    for one in reversed(both):  # the largest slots first: memory for one is not made anew for the other
        one.call()
    finish()
    graphs = [torch.cuda.CUDAGraph() for _ in both]
    outs = [torch.empty(0)] * 2
    for i in (0, 1) if rank == 0 else (1, 0):  # captured in another order, which does not matter
        with torch.cuda.graph(graphs[i]):
            outs[i] = both[i].call()
    for graph in graphs:
        graph.replay()
    finish()
    assert all(out.isfinite().all() for out in outs)
    dist.barrier()
    graph, out = graphs[rank == world - 1], outs[rank == world - 1]
    begin = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    assert out.isnan().any(), "rows of another call"
    return raised(ts.check), time.monotonic() - begin


def half_captured(rank, world):
    """A call fails in a capture, whose user catches the error. Returns what the capture's end raises."""
    one, worst = ops(rank, world)["all_reduce"], Worst()
    graph, (static,) = captured(one)

    def capture() -> None:
        failing = mock.patch.object(Request, "product", side_effect=MemoryError("no room"))
        with torch.cuda.graph(torch.cuda.CUDAGraph()), failing:
            assert raised(one.call).startswith("MemoryError")

    said = raised(capture)
    for seed in (5, 6):
        whole = random(seed, 128 * world, 256)
        one.load(whole)
        graph.replay()
        worst.add(static, one.expected(whole))
    return said, worst.get()


def expires(rank, world, name, absent):
    """The last rank does not replay, is stopped, or dies. Returns as `distributed_jobs.give_up_on_the_last_rank`."""
    patient, one = ops(rank, world)[name], ops(rank, world, deadline=0.5)[name]
    for each in (patient, one):
        each.load(random(5, 128 * world, 256))
    graph, (static,) = captured(one)
    for _ in range(3):
        dist.barrier()
        graph.replay()
        finish()
    dist.barrier()
    if rank == world - 1:
        stay_away(absent, 8)
        return "", error_of_a_late_rank(graph.replay), True, 0.0, 0.0
    begin = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    first = time.monotonic() - begin
    assert static[-1].isnan().all(), "what did not come is NaN"
    error, told, begin = raised(ts.check), raised(ts.check), time.monotonic()
    assert told == "nothing", told  # one failure is raised once
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    rest = time.monotonic() - begin
    assert static.isnan().all(), "a broken group computes nothing"
    again = raised(patient.call)
    a, b = random(1, 256, 256), random(2, 256, 256)
    product = ts.matmul(a, b)
    torch.cuda.synchronize()
    works = torch.allclose(product.float(), (a @ b).float(), atol=1.0)
    return error, again, works, first, rest
