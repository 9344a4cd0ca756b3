"""The configurations that are explored: quick (seconds each) and full, in growing order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Literal, get_args

from tilestream.core.chunks import Chunks
from tilestream.core.gate import Gate
from tilestream.core.order import Order
from tilestream.core.schedule import Kind, Split
from tilestream.schedule import Grid, Raster, Schedule
from tilestream_tools.verify import arrival_order, cluster, copies, dispatch, experts, one_shot, pair, replay, sources
from tilestream_tools.verify.attention import AttentionCase
from tilestream_tools.verify.attention_protocol import AttentionRing
from tilestream_tools.verify.cluster import ClusterCase
from tilestream_tools.verify.copies import CopyCase
from tilestream_tools.verify.dispatch import DispatchCase
from tilestream_tools.verify.experts import ExpertsCase
from tilestream_tools.verify.gather import GatherCase
from tilestream_tools.verify.one_shot import OneShotCase
from tilestream_tools.verify.pair import PairCase
from tilestream_tools.verify.product import ProductCase
from tilestream_tools.verify.protocol import Consumers, Ring
from tilestream_tools.verify.publish import PublishCase
from tilestream_tools.verify.replay import ReplayCase
from tilestream_tools.verify.ring import RingCase
from tilestream_tools.verify.shared_attention import OPERANDS, attend_direct, attend_staged
from tilestream_tools.verify.shared_ring import SharedCase, SharedRing, direct, staged
from tilestream_tools.verify.sources import SourcesCase
from tilestream_tools.verify.sums import SumCase
from tilestream_tools.verify.words import Drain
from tilestream_tools.verify.workers import Program, WorkersCase

Level = Literal["quick", "full"]
Case = (
    WorkersCase | RingCase | ProductCase | SharedCase | AttentionCase | GatherCase | SumCase | PublishCase | CopyCase
    | OneShotCase | ReplayCase | DispatchCase | ExpertsCase | SourcesCase | ClusterCase | PairCase
)  # fmt: skip
MODELS = (
    "workers", "ring", "product", "shared", "attention", "gather", "publish", "sums", "copies", "reduce", "replay",
    "dispatch", "experts", "sources", "cluster", "pair",
)  # fmt: skip

#: What queues split where no chunk decides it: `tilestream_tools.verify.arrival_order` has the rest.
SPLITS: tuple[Split, ...] = ("items", "columns", "rows")

#: Rows in chunks, under row tiles of 2: alike, straddling tiles, one chunk in the middle of a tile, one without rows.
LAYOUTS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((0, 2), (0, 1, 2)),
    2: ((0, 2, 4), (0, 3, 4), (0, 1, 3, 4)),
    3: ((0, 2, 4, 6), (0, 3, 5), (0, 1, 5, 6)),
    4: ((0, 4, 6, 8), (0, 3, 6, 8), (0, 1, 2, 7), (0, 5, 5, 8)),
    7: ((0, 4, 9, 14),),
    8: ((0, 5, 10, 15),),
}

#: Chunks that no tile reads, before, between and behind those that one does.
UNREAD: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((0, 0, 2), (0, 2, 2)),
    2: ((0, 3, 3, 4),),
    3: ((0, 0, 3, 5), (0, 4, 6, 6)),
}


def matmul(
    kind: Kind,
    workers: int,
    num_m: int,
    num_n: int = 1,
    *,
    bounds: tuple[int, ...] = (),
    pivot: int = 0,
    k: int = 1,
    queues: int = 1,
    split: Split = "items",
    shares: int = 0,
    order: Order = "row_major",
    weight: bool = False,
    batch: int = 1,
    running: tuple[int, ...] = (),
    drain: Drain = "leave",
    program: Program | None = None,
    quarantined: bool = False,
    fixup: bool = False,
) -> WorkersCase:
    """A configuration of model 1: ``num_m`` x ``num_n`` tiles; rows (``weight``: columns) arrive by ``bounds``.

    Tiles are 2 rows high and 2 columns wide, less what the bounds leave out at the tail. With bounds the raster is
    chunk-major from the pivot's row tile.
    """
    gate, raster = None, Raster(order, group=2 if order in ("grouped", "longest_first") else 1)
    if bounds:
        chunks = Chunks(bounds)
        tiles = num_n if weight else num_m
        first = chunks.pivot_tile(pivot, 2, tiles)
        raster = Raster("chunk_major", first=first, band=max(1, tiles // chunks.count), transposed=weight)
        if weight:
            gate = Gate(2 * num_m, bounds[-1], 2, 2, columns=chunks)
        else:
            rows = bounds[-1] // batch
            gate = Gate(
                rows,
                2 * num_n,
                2,
                2,
                rows=chunks,
                row_of_batch=tuple(b * rows for b in range(batch)) if batch > 1 else (),
            )
    first_batch = bounds[pivot] * batch // bounds[-1] if bounds else 0
    schedule = Schedule(kind, Grid(batch, num_m, num_n, k), raster, workers, queues, split, shares, first_batch)
    return WorkersCase(schedule, gate, running, drain, program, quarantined, fixup)


def configurations(model: str, level: Level) -> list[Case]:
    """The configurations of ``model`` (one of `MODELS`), smallest first."""
    if level not in get_args(Level):
        raise ValueError(f"level={level!r}; it must be one of {', '.join(get_args(Level))}")
    if model == "workers":
        return list(dict.fromkeys(workers(level)))  # pivots of chunks without a tile of their own are alike
    if model == "ring":
        return list(rings(level))
    if model == "attention":
        return list(attentions(level))
    if model == "product":
        return list(products(level))
    if model == "shared":
        return list(shared_rings(level))
    if model == "gather":
        return list(gathers(level))
    if model == "publish":
        return list(publishes(level))
    if model == "sums":
        return list(sums(level))
    if model == "copies":
        return list(copies.configurations(level == "full"))
    if model == "reduce":
        return list(one_shot.configurations(level == "full"))
    if model == "replay":
        return list(replay.configurations(level == "full"))
    if model == "dispatch":
        return list(dispatch.configurations(level == "full"))
    if model == "experts":
        return list(experts.configurations(level == "full"))
    if model == "sources":
        return list(sources.configurations(level == "full"))
    if model == "cluster":
        return list(cluster.configurations(level == "full"))
    if model == "pair":
        return list(pair.configurations(level == "full"))
    raise ValueError(f"model={model!r}; it must be one of {', '.join(MODELS)}")


def workers(level: Level) -> Iterator[WorkersCase]:
    """Model 1. Full: up to 4 workers, 8 items, 3 chunks, every pivot, schedule, number of queues and split."""
    full = level == "full"
    # Everything is there: coverage by every raster, split and number of workers.
    orders: tuple[Order, ...] = ("row_major", "grouped", "longest_first")
    for w, (num_m, num_n), order in product((1, 2, 3), ((1, 1), (2, 2), (3, 2)), orders):
        yield matmul("static", w, num_m, num_n, order=order)
        yield matmul("stream_k", w, num_m, num_n, order=order, k=2)
        for queues, split in product((1, 2, 3), SPLITS):
            yield matmul("dynamic", w, num_m, num_n, order=order, queues=queues, split=split)
    # Rows or columns arrive; 1 to 3 workers.
    for w, num_m in product((1, 2, 3), (1, 2, 3, 4) if full else (1, 2, 3)):
        for bounds in LAYOUTS[num_m]:
            for pivot in range(len(bounds) - 1):
                yield matmul("static", w, num_m, bounds=bounds, pivot=pivot)
                yield matmul("dynamic", w, num_m, bounds=bounds, pivot=pivot)
                yield matmul("stream_k", w, num_m, bounds=bounds, pivot=pivot, k=3)
                if w > 1:
                    yield matmul("dynamic", w, num_m, 2, bounds=bounds, pivot=pivot, queues=2, split="columns")
                    yield matmul(
                        "dynamic", w, 2, num_m, bounds=bounds, pivot=pivot, queues=2, split="rows", weight=True
                    )
    yield from arrival_order.configurations(full)
    yield from _fewer_running(full)
    yield from _drained(full)
    yield from _fixups(full)
    yield matmul("dynamic", 2, 2, batch=2, bounds=(0, 3, 5, 8), pivot=1)
    yield matmul("static", 3, 2, batch=2, bounds=(0, 3, 5, 8), pivot=2)
    # Plans begin with the pivot's batch: the last of three, and the second, from which the order wraps around.
    for kind, pivot in product(get_args(Kind), (1, 2)):
        yield matmul(kind, 2, 2, batch=3, bounds=(0, 5, 9, 12), pivot=pivot, k=1 + (kind == "stream_k"), drain="reset")
    yield matmul("dynamic", 2, 2, 2, batch=2, bounds=(0, 3, 5, 8), pivot=2, queues=2, split="columns")
    # 4 workers, 8 items, 3 chunks.
    for bounds in LAYOUTS[4] if full else LAYOUTS[4][1:2]:
        for pivot in range(3):
            yield matmul("static", 4, 4, 2, bounds=bounds, pivot=pivot)
            yield matmul("dynamic", 4, 4, 2, bounds=bounds, pivot=pivot)
            if full:
                yield matmul("dynamic", 4, 4, 2, bounds=bounds, pivot=pivot, queues=2)
                yield matmul("dynamic", 4, 4, 2, bounds=bounds, pivot=pivot, queues=2, split="columns")
            if full and pivot == 1:
                yield matmul("dynamic", 4, 2, 4, bounds=bounds, pivot=pivot, queues=2, split="rows", weight=True)
    for bounds in LAYOUTS[7] + LAYOUTS[8]:
        for pivot in range(3):
            yield matmul("stream_k", 4, (bounds[-1] + 1) // 2, bounds=bounds, pivot=pivot, k=2, shares=4)
    if full:
        for pivot in range(3):
            yield matmul("stream_k", 4, 6, bounds=(0, 4, 7, 12), pivot=pivot, k=3)
            yield matmul("stream_k", 4, 5, bounds=(0, 3, 7, 9), pivot=pivot, k=3)
            yield matmul("stream_k", 4, 3, bounds=(0, 1, 3, 6), pivot=pivot, k=4, shares=5)
        for pivot in range(3):
            yield matmul("dynamic", 4, 4, 2, bounds=(0, 3, 6, 8), pivot=pivot, queues=3)
            yield matmul("dynamic", 4, 4, 2, bounds=(0, 3, 6, 8), pivot=pivot, queues=3, split="columns")
        # The mirror image of the columns' split: the same states, so one pivot will do.
        yield matmul("dynamic", 4, 2, 4, bounds=(0, 3, 6, 8), pivot=1, queues=3, split="rows", weight=True)


def _fewer_running(full: bool) -> Iterator[WorkersCase]:
    """Only some of the workers ever run: no worker may depend on the others."""
    some: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2))
    for running in some:
        for bounds in ((), (0, 3, 5)):
            yield matmul("static", 3, 3, bounds=bounds, running=running)
            yield matmul("stream_k", 3, 4, bounds=bounds and (0, 3, 7), running=running, k=3)
            yield matmul("stream_k", 4, 3, bounds=bounds, running=running, k=2)
            for queues in (1, 2, 3):
                yield matmul("dynamic", 3, 3, bounds=bounds, running=running, queues=queues)
            yield matmul("dynamic", 3, 3, 2, bounds=bounds, running=running, queues=3, split="strides")
    if full:
        some = ((0,), (3,), (0, 1), (1, 3), (0, 1, 3), (1, 2, 3))
        for running in some:
            for pivot in range(3):
                yield matmul("static", 4, 4, 2, bounds=(0, 3, 6, 8), pivot=pivot, running=running)
                yield matmul("dynamic", 4, 4, 2, bounds=(0, 3, 6, 8), pivot=pivot, running=running, queues=2)
                yield matmul("stream_k", 4, 7, bounds=(0, 4, 9, 14), pivot=pivot, running=running, k=2)


def _drained(full: bool) -> Iterator[WorkersCase]:
    """Launches that are worked through, and whose last worker resets the words: 1 to 3 workers, in full 4 too."""
    for w, queues in ((1, 1), (2, 1), (2, 2), (3, 2)):
        yield matmul("dynamic", w, 3, queues=queues, drain="reset")
    for w, num_m in product((1, 2, 3), (1, 2, 3)):
        for bounds in (*LAYOUTS[num_m], *UNREAD[num_m]):
            for pivot in range(len(bounds) - 1):
                yield matmul("static", w, num_m, bounds=bounds, pivot=pivot, drain="reset")
                yield matmul("dynamic", w, num_m, bounds=bounds, pivot=pivot, drain="reset")
                if full or (w > 1 and w * num_m < 6):
                    yield matmul("stream_k", w, num_m, bounds=bounds, pivot=pivot, k=3 if full else 2, drain="reset")
                if (full and w > 1) or w == num_m == 2:
                    yield matmul(
                        "dynamic", w, num_m, 2, bounds=bounds, pivot=pivot, queues=2, split="columns", drain="reset"
                    )
                if full and w > 1:
                    yield matmul(
                        "dynamic", w, 2, num_m, bounds=bounds, pivot=pivot, queues=2, split="rows", weight=True,
                        drain="reset",
                    )  # fmt: skip
        if w < 3 and num_m < 3:
            for kind in get_args(Kind):
                yield _columns_too(matmul(kind, w, num_m, 2, bounds=LAYOUTS[num_m][-1], k=2, drain="reset"))
    yield matmul("static", 4, 4, bounds=(0, 3, 6, 8), pivot=1, drain="reset")
    yield matmul("dynamic", 4, 4, bounds=(0, 3, 6, 8), pivot=1, drain="reset")
    # What the last worker out writes when a launch has expired is what the next begins with.
    for kind, w, bounds in product(get_args(Kind), (1, 2, 3), (*LAYOUTS[2], *UNREAD[2])):
        for drain in get_args(Drain)[1:]:
            yield matmul(kind, w, 2, bounds=bounds, pivot=1, k=2, drain=drain, quarantined=True)
    # Words that are not reset: no worker misses those that never run.
    some: tuple[tuple[int, ...], ...] = ((0,), (2,), (0, 1), (1, 2)) if full else ((1,), (0, 2))
    for running, pivot in product(some, range(2)):
        yield matmul("static", 3, 3, bounds=(0, 3, 5), pivot=pivot, running=running, drain="poison")
        yield matmul("stream_k", 3, 4, bounds=(0, 3, 7), pivot=pivot, running=running, k=3, drain="poison")
        for queues in (1, 2):
            yield matmul("dynamic", 3, 3, bounds=(0, 3, 5), pivot=pivot, running=running, queues=queues, drain="poison")
    if full:
        for bounds in LAYOUTS[4]:
            for pivot in range(3):
                yield matmul("static", 4, 4, 2, bounds=bounds, pivot=pivot, drain="reset")
                yield matmul("dynamic", 4, 4, 2, bounds=bounds, pivot=pivot, drain="reset")
                yield matmul("stream_k", 4, 5, bounds=(*bounds[:-1], 10), pivot=pivot, k=2, drain="reset")


def _fixups(full: bool) -> Iterator[WorkersCase]:
    """Parts that are held and fixed up: 2 to 4 contributors, shares over several tiles, workers that poison theirs."""
    sizes: tuple[tuple[int, int, int, int], ...] = (
        # workers, tiles, K steps, shares: one a worker; fewer, each over several tiles; more, several a worker
        (2, 1, 2, 0), (2, 3, 3, 0), (3, 1, 3, 0), (3, 2, 2, 0), (3, 5, 3, 0), (4, 3, 2, 2), (4, 3, 3, 2), (2, 1, 3, 3),
        (2, 1, 4, 4), (3, 2, 2, 4),
    )  # fmt: skip
    for w, tiles, k, shares in sizes + (((4, 1, 4, 0), (4, 3, 4, 0), (4, 7, 3, 5)) if full else ()):
        yield matmul("stream_k", w, tiles, k=k, shares=shares, drain="reset", fixup=True)
        for running in ((0,), (1,), (0, 1)):
            if len(running) < w:
                yield matmul("stream_k", w, tiles, k=k, shares=shares, running=running, drain="poison", fixup=True)
    for w, tiles, k, shares in (
        (2, 1, 2, 0),
        (2, 3, 2, 0),
        (3, 2, 2, 0),
        *(((3, 1, 3, 0), (4, 3, 2, 2)) if full else ()),
    ):
        for bounds in (*LAYOUTS[tiles], *UNREAD[tiles]):
            for pivot in range(len(bounds) - 1):
                yield matmul(
                    "stream_k", w, tiles, bounds=bounds, pivot=pivot, k=k, shares=shares, drain="reset", fixup=True
                )
    yield matmul("stream_k", 3, 1, bounds=(0, 1, 2), k=3, drain="poison", fixup=True)
    yield matmul("stream_k", 2, 1, bounds=(0, 1, 2), k=2, drain="reset", fixup=True, quarantined=True)


def _columns_too(case: WorkersCase) -> WorkersCase:
    """Rows arrive in ``case``; two tiles of columns, too, and a chunk without any."""
    assert case.gate is not None
    return replace(case, gate=replace(case.gate, columns=Chunks((0, 3, 3, 4))))


def rings(level: Level) -> Iterator[RingCase]:
    """Model 2. Full: up to 4 stages, 1 or 2 slots, 1 to 5 K steps in any order, every way of consuming and storing."""
    full = level == "full"
    every: tuple[Consumers, ...] = ("single", "cooperative", "ping_pong")
    for depth, items, consumers in product((1, 2, 3), (1, 2), every):
        if full or depth < 3 or items == 2:
            yield RingCase(Ring(depth, items, consumers, promoted=depth == 1), (1, 2))
    # One K step at a time; C buffers.
    for depth, consumers in product((2, 3) if full else (2,), every):
        yield RingCase(Ring(depth, 2, consumers, promoted=True), (1, 2))
        for strips, most in ((1, 2), (2, 1), (2, 2), (3, 2), (4, 2)) if full else ((1, 2), (2, 2), (3, 2)):
            ring = Ring(depth, 2, consumers, strips=strips, most_buffers=most)
            yield RingCase(ring, (1, 2) if full and depth == 2 else (1,), split=True)
        yield RingCase(Ring(depth, 2, consumers, promoted=True, strips=3), (1,), split=full)
    # Three consumers take whole tiles that do not arrive, and differ from two by one.
    for depth, items in ((1, 1), (2, 1), *(((1, 2), (2, 2), (3, 1), (3, 2)) if full else ())):
        yield RingCase(Ring(depth, items, "triple", promoted=depth == 1), (1, 2))
    for strips in (1, 2, 3) if full else (3,):
        yield RingCase(Ring(2, 1, "triple", strips=strips), (1,))
    # The launch is over: void items, from any on.
    for consumers in every:
        yield RingCase(Ring(1, 2, consumers, promoted=True), (1, 2) if full else (1,), expires=True)
        yield RingCase(Ring(2, 2, consumers), (1, 2) if full or consumers == "single" else (2,), expires=True)
        if full or consumers == "single":
            yield RingCase(Ring(2, 2, consumers, strips=3), (1,), split=True, expires=True)
        if full:
            yield RingCase(Ring(2, 1, consumers), (1, 2), expires=True)
            yield RingCase(Ring(3, 2, consumers), (1, 2), expires=True)
            yield RingCase(Ring(2, 2, consumers, promoted=True), (1, 2), expires=True)
    for consumers in every:
        yield RingCase(Ring(1, 2, consumers, promoted=True), (1, 2, 3, 4, 5))
        yield RingCase(Ring(2, 2, consumers), (1, 3, 4))
        yield RingCase(Ring(4, 2, consumers), (1, 5))
        yield RingCase(Ring(4, 2, consumers), (3, 4))
    if full:
        for depth, items, consumers in product((1, 2, 3, 4), (1, 2), every):
            yield RingCase(Ring(depth, items, consumers, promoted=depth == 1), (1, 2, 3, 4, 5))
        for depth, consumers in product((2, 3, 4), every):
            yield RingCase(Ring(depth, 2, consumers, promoted=True), (1, 2, 3, 4, 5))


def products(level: Level) -> Iterator[ProductCase]:
    """Both models together: 2 workers, 2 K steps."""
    yield ProductCase(matmul("dynamic", 1, 2, bounds=(0, 2, 4), k=2, drain="reset"), Ring(2, 1))
    # Parts are fixed up, as by the Hopper kernel; one worker's consumers may hold parts of one tile.
    alone: tuple[tuple[Consumers, tuple[int, ...]], ...] = (("single", ()), ("ping_pong", (0,)))
    for consumers, running in alone:
        yield ProductCase(matmul("stream_k", 2, 1, k=3, shares=3, running=running, fixup=True), Ring(2, 2, consumers))
        yield ProductCase(matmul("stream_k", 2, 1, k=2, running=running, fixup=True), Ring(2, 2, consumers))
    gated = matmul("stream_k", 2, 1, bounds=(0, 1, 2), k=2, drain="reset", fixup=True)
    yield ProductCase(gated, Ring(1, 1, promoted=True))
    chunked = arrival_order.ordered(2 if level == "full" else 1, 2, bounds=(0, 2, 4), pivot=1, drain="reset")
    yield ProductCase(chunked, Ring(2, 1))
    if level == "full":
        yield ProductCase(matmul("stream_k", 2, 1, k=2, fixup=True), Ring(2, 2, "ping_pong"))
        yield ProductCase(gated, Ring(2, 2))
        yield ProductCase(replace(gated, quarantined=True), Ring(2, 2))
    for kind in get_args(Kind):
        for num_m, bounds in ((1, (0, 1, 2)), (2, (0, 3, 4)), (3, (0, 3, 6))):
            if level == "full" or kind != "stream_k" or num_m != 3:
                for depth, items in ((1, 2), (2, 1), (2, 2)):
                    largest = kind == "dynamic" and num_m == 3 and depth == 2
                    if level == "full" or (items == 2 and not largest):
                        yield ProductCase(
                            matmul(kind, 2, num_m, bounds=bounds, pivot=1, k=2, drain="reset"),
                            Ring(depth, items, promoted=depth == 1),
                        )
    if level == "full":
        yield ProductCase(
            matmul("dynamic", 2, 2, 2, bounds=(0, 3, 4), pivot=1, k=2, queues=2, split="columns", drain="reset"),
            Ring(2, 2),
        )
        yield ProductCase(matmul("dynamic", 2, 4, bounds=(0, 3, 6, 8), pivot=1, k=2, drain="reset"), Ring(2, 2))
        yield ProductCase(matmul("dynamic", 2, 3, bounds=(0, 3, 6), pivot=1, k=2, drain="reset"), Ring(3, 2))
        yield ProductCase(matmul("stream_k", 2, 3, bounds=(0, 1, 3, 6), pivot=2, k=2, drain="reset"), Ring(2, 2))


def shared_rings(level: Level) -> Iterator[SharedCase]:
    """Model 3: items of fewer steps than are under way, of as many and of more, with a rest of K and without."""
    few = (((1, False),), ((4, True), (1, False)), ((0, True), (3, False)))
    many = (((2, True), (3, True), (5, False)), ((6, False), (1, True), (2, False)))
    full = level == "full"
    for depth, warps, items in product((3, 4, 5) if full else (3, 4), (2, 3) if full else (2,), few + many * full):
        yield SharedCase(SharedRing(depth, 2, warps), items, direct)
    for warps, items in product((2, 3) if full else (2,), few + many * full):
        yield SharedCase(SharedRing(2, 2, warps), items, staged)
    # Attention: keys and values of a block, and no rest.
    blocks: tuple[tuple[int, ...], ...] = ((1, 2), (3, 1), (3, 2, 5), (4, 1)) if full else ((1, 2), (3, 1))
    for warps, counts in product((2, 3) if full else (2,), blocks):
        attended = tuple((count, False) for count in counts)
        for depth in (3, 4) if full else (3,):
            yield SharedCase(SharedRing(depth, 2, warps, OPERANDS), attended, attend_direct)
        yield SharedCase(SharedRing(1, 2, warps, OPERANDS), attended, attend_staged, exact=False)


def attentions(level: Level) -> Iterator[AttentionCase]:
    """The rings of attention. Full: up to 3 blocks an item, three consumers, queries of two items."""
    yield AttentionCase(AttentionRing(1), (0, 1))
    for depth, queries, ordered in ((2, 1, False), (2, 2, False), (2, 1, True)):
        yield AttentionCase(AttentionRing(depth, queries, ordered=ordered), (1,))
        yield AttentionCase(AttentionRing(depth, queries, ordered=ordered), (2,))
    yield AttentionCase(AttentionRing(1, consumers=1, arriving=True), (2,))
    yield AttentionCase(AttentionRing(2, arriving=True), (1,))
    yield AttentionCase(AttentionRing(1, consumers=1, converting=True), (0, 1))
    yield AttentionCase(AttentionRing(2, converting=True), (2,))
    yield AttentionCase(AttentionRing(2, ordered=True, converting=True), (1,))
    yield AttentionCase(AttentionRing(2, own="both"), (2,))
    yield AttentionCase(AttentionRing(2, ordered=True, own="first"), (2,))
    if level == "full":
        yield AttentionCase(AttentionRing(1, 2), (0, 1))
        yield AttentionCase(AttentionRing(2, 1, 3, ordered=True), (2,))
        yield AttentionCase(AttentionRing(2, 2), (0, 2))
        yield AttentionCase(AttentionRing(2, 2, ordered=True), (1, 3))
        yield AttentionCase(AttentionRing(2), (0, 1, 2))
        yield AttentionCase(AttentionRing(1, consumers=1, arriving=True), (0, 2))
        yield AttentionCase(AttentionRing(2, arriving=True), (2,))
        yield AttentionCase(AttentionRing(2, 2, arriving=True), (1,))
        yield AttentionCase(AttentionRing(2, ordered=True, arriving=True), (2,))
        yield AttentionCase(AttentionRing(1, converting=True), (0, 1))
        yield AttentionCase(AttentionRing(2, 2, converting=True), (2,))
        yield AttentionCase(AttentionRing(2, converting=True), (1, 3))
        yield AttentionCase(AttentionRing(2, ordered=True, converting=True), (2,))
        yield AttentionCase(AttentionRing(2, 2, own="both"), (1, 3))
        yield AttentionCase(AttentionRing(2, 1, 3, ordered=True, own="both"), (2,))
        yield AttentionCase(AttentionRing(2, arriving=True, own="last"), (2,))


def gathers(level: Level) -> Iterator[GatherCase]:
    """The ranks of a gather. Quick: 2 of them; full: 3, more calls, chunks, kernels that expire and ranks lost."""
    for epochs in (1, 2, 3, 4, 5):
        yield GatherCase(epochs=epochs)
    yield GatherCase(chunks=(2,), epochs=3)
    yield GatherCase(chunks=(2, 1), epochs=4)
    yield GatherCase(world=3, epochs=1)
    yield GatherCase(epochs=4, strided=True)
    yield GatherCase(epochs=4, local=True)
    yield GatherCase(epochs=4, brought=True)
    yield GatherCase(epochs=3, streams=2, local=True, ways=("push", "pull"))
    yield GatherCase(epochs=1, expires=((0, 1), (1, 1)), lost=1, local=True)
    yield GatherCase(epochs=3, ways=("pull",))
    yield GatherCase(epochs=4, chunks=(2, 1), ways=("pull", "push", "pull"))
    yield GatherCase(epochs=3, streams=2, ways=("pull", "push"))
    yield GatherCase(epochs=1, expires=((0, 1),), ways=("pull",))
    yield GatherCase(epochs=1, expires=((0, 1), (1, 1)), lost=1, ways=("pull",))
    yield GatherCase(epochs=2, expires=((0, 2),), ways=("push", "pull"))
    yield GatherCase(epochs=3, streams=2)
    yield GatherCase(world=3, epochs=1, strided=True)
    yield GatherCase(epochs=1, expires=((0, 1),))
    yield GatherCase(epochs=1, expires=((0, 1), (1, 1)), lost=1)
    yield GatherCase(epochs=2, expires=((0, 2),))
    if level == "full":
        yield GatherCase(epochs=4, streams=2)
        yield GatherCase(world=3, epochs=2, local=True)
        yield GatherCase(epochs=4, streams=2, local=True)
        yield GatherCase(epochs=3, streams=2, brought=True, expires=((0, 2),))
        yield GatherCase(epochs=3, chunks=(2, 1), local=True, expires=((0, 2),))
        yield GatherCase(epochs=3, local=True, expires=((0, 1), (0, 2), (0, 3)), lost=1)
        yield GatherCase(chunks=(2, 1, 3), epochs=6)
        yield GatherCase(world=3, epochs=2, strided=True)
        yield GatherCase(world=3, epochs=2, ways=("pull", "push"))
        yield GatherCase(epochs=4, streams=2, ways=("pull", "push", "push"))
        yield GatherCase(epochs=2, expires=((0, 1),))
        yield GatherCase(epochs=2, expires=((0, 1),), ways=("pull",))
        yield GatherCase(epochs=2, expires=((0, 1), (0, 2)), lost=1)
        yield GatherCase(epochs=2, expires=((0, 1), (0, 2)), lost=1, ways=("pull", "push"))
        yield GatherCase(epochs=2, expires=((0, 1), (0, 2), (1, 1), (1, 2)))
        yield GatherCase(epochs=2, chunks=(2,), expires=((0, 2),))
        for epoch in (1, 2, 3):
            yield GatherCase(epochs=3, expires=((0, epoch),))
            yield GatherCase(epochs=3, expires=((0, epoch),), ways=("pull", "push"))
            yield GatherCase(epochs=3, expires=((0, epoch),), ways=("push", "pull", "pull"))
        yield GatherCase(epochs=3, expires=((0, 2), (1, 2)))
        yield GatherCase(epochs=4, strided=True, expires=((0, 1), (0, 2)))
        yield GatherCase(epochs=4, expires=((0, 2),))
        yield GatherCase(epochs=5, strided=True, expires=((0, 2),))
        yield GatherCase(epochs=3, expires=((0, 2),), streams=2)
        yield GatherCase(epochs=3, expires=((0, 2),), streams=2, ways=("pull", "push"))
        yield GatherCase(epochs=4, strided=True, expires=((0, 1), (0, 2)), ways=("pull", "push"))
        yield GatherCase(epochs=3, expires=((0, 1), (0, 2), (0, 3)), lost=1)


def publishes(level: Level) -> Iterator[PublishCase]:
    """Workers that publish. Full: three workers, three chunks, tiles that straddle them, three launches."""
    for workers in (1, 2):
        yield PublishCase(workers=workers)
        yield PublishCase(3, 2, 2, workers=workers)
        yield PublishCase(3, 2, 1, workers=workers)
        yield PublishCase(2, 1, 1, 2, workers=workers)
    if level == "full":
        yield PublishCase(3, 1, 2, workers=3)
        yield PublishCase(5, 2, 3, workers=2)
        yield PublishCase(3, 2, 1, 2, workers=3)
        yield PublishCase(3, 2, 2, workers=2, launches=3)


def sums(level: Level) -> Iterator[SumCase]:
    """The ranks of a sum. Quick: 2 of them, and 3 once; full: more calls, chunks, patience that ends and ranks lost."""
    for epochs in (1, 2, 3):
        yield SumCase(epochs=epochs)
    yield SumCase(chunks=2, epochs=2)
    yield SumCase(epochs=2, streams=2)
    yield SumCase(world=3, epochs=1)
    yield SumCase(epochs=1, expires=((0, 1),))
    yield SumCase(epochs=1, expires=((0, 1), (1, 1)), lost=1)
    if level == "full":
        yield SumCase(epochs=4)
        yield SumCase(epochs=2, expires=((0, 1),))
        yield SumCase(epochs=2, expires=((0, 2),))
        yield SumCase(epochs=2, expires=((0, 1), (0, 2)), lost=1)
        yield SumCase(epochs=3, expires=((0, 2),))
        yield SumCase(epochs=3, streams=2)
