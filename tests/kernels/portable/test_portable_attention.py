"""The portable attention in Triton's interpreter: masks, lists of lengths, pages, keys that arrive or do not."""

from __future__ import annotations

import dataclasses
import itertools

import key_order
import numpy as np
import pytest
import torch
from attention_operands import prepared
from interpreted import DEVICE, Words, captured, recorded

from attention_maths import FEATURES, MIXES, Case
from mutants.engine import at, mutated, replace
from tilestream.arrival.flat import Awaited
from tilestream.core.chunks import Chunks
from tilestream.core.error_record import op_number
from tilestream.core.errors import ArrivalTimeout, ProducerStopped, TilestreamError
from tilestream.launch.trace import SpanLog
from tilestream.ops.attention_gpu import layout_of
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.policy import portable_attention
from tilestream.runtime.channel import channel
from tilestream.trace import faults

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    tile = portable_attention.AttentionTile(16, 16, 4, 2, 0.5)
    for table in ("TILES", "UNALIGNED"):
        monkeypatch.setattr(portable_attention, table, dict.fromkeys(getattr(portable_attention, table), (tile,)))


class Launched:
    """A case, and the launch that is to answer it."""

    def __init__(self, case: Case, kind="dynamic", workers=3, chunks: Chunks | None = None) -> None:
        from tilestream.launch.portable.attention_launch import AttentionLaunch

        self.given = prepared(case, chunks)
        self.operands = self.given.operands
        self.out, self.lse = self.operands.out, self.operands.lse
        self.plan: AttentionPlan = plan_attention.__wrapped__(
            self.given.problem, workers, kind, device=DEVICE, backend="portable"
        )
        self.launch = AttentionLaunch(self.plan, layout_of(self.operands))

    def run(self, words: Words | None = None, deadline: float = 0.05, log: SpanLog | None = None) -> Launched:
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        self.launch(self.operands, None if words is None else Awaited(words, None, deadline, "attention"), log)
        return self

    def check(self) -> None:
        self.given.check()


def dense(rows: int, keys: int, **more) -> Case:
    return Case((rows,), (keys, keys), **more)


@pytest.mark.parametrize(
    ("lengths", "features"), [*(((20, 40), name) for name in FEATURES), ((33, 9), "causal"), ((33, 9), "all")]
)
def test_dense(lengths, features):
    Launched(dense(*lengths, features=features)).run().check()


@pytest.mark.parametrize("features", ["causal", "window"])
@pytest.mark.parametrize("how", ["packed", "packed paged", "paged", "lengths"])
def test_several_sequences(how, features):
    queries, keys = MIXES[0]
    queries = queries if how.startswith("packed") else (20,)
    Launched(Case(queries, keys, (2, 1), features=features, how=how, page=8, extra=3)).run().check()


@pytest.mark.parametrize("page", [4, 64])
def test_pages_smaller_and_larger_than_a_block(page):
    Launched(Case((20, 5), (30, 17), features="causal", how="packed paged", page=page)).run().check()


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_heads_share_the_rows_of_short_queries(rows):
    launched = Launched(Case((rows,), (20,), (8, 2), features="causal"))
    assert launched.plan.pack == {1: 4, 4: 4, 5: 2}[rows]
    launched.run().check()
    Launched(Case((rows,), (20,), (8, 2), features="sinks", how="packed")).run().check()


def test_every_small_mask(monkeypatch):
    for rows, keys, left, right in itertools.product((1, 17), (33,), (None, 5), (None, 0)):
        monkeypatch.setitem(FEATURES, "this", {"window": (left, right)})
        Launched(Case((rows,), (keys,), (1, 1), (8, 8), "this")).run().check()


@pytest.mark.parametrize("dims", [(8, 8), (24, 40), (48, 16), (16, 72)], ids=str)
def test_columns(dims):
    Launched(dense(20, 33, dims=dims, features="softcap")).run().check()


def test_what_lies_behind_a_heads_columns_is_not_read():
    def beside_nan(x: torch.Tensor) -> torch.Tensor:
        room = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype)
        return room[..., : x.shape[-1]].copy_(x)

    made = Launched(dense(20, 40, dims=(24, 40)))
    q, k, v = map(beside_nan, made.operands[:3])
    made.operands = made.operands._replace(q=q, k=k, v=v)
    made.launch = type(made.launch)(made.plan, layout_of(made.operands))
    made.run().check()


@pytest.fixture
def _exact(monkeypatch):
    """The interpreter's products are exact, and rounded once."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    def product(self, a, b, d, *more, dot=Builder.create_dot):
        made = dot(self, a, b, d, *more)
        made.data = (a.data.astype(np.float64) @ b.data.astype(np.float64) + d.data).astype(np.float32)
        return made

    monkeypatch.setattr(Builder, "create_dot", product)


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("features", ["full", "causal", "window"])
def test_keys_are_taken_in_the_order_that_the_plan_says(features, arrives, monkeypatch):
    from tilestream.kernels.portable import attention as text

    monkeypatch.setitem(FEATURES, "window", {"window": (60, 3)})
    chunks = Chunks.uniform(100, 20) if arrives else None
    launched = Launched(Case((17,), (100,), features=features, dtype=torch.float16), chunks=chunks)
    order, case = launched.plan.key_order, key_order.prepare(launched.given)
    assert (order.block, order.downwards, order.shares) == (16, False, 1)

    def made() -> np.ndarray:
        launched.run(Words(chunks.count).arrive() if arrives else None)
        return launched.out.double().numpy()[None]

    found = made()
    assert np.array_equal(found, key_order.outputs(case, order))
    for other in (dataclasses.replace(order, downwards=True), dataclasses.replace(order, block=32)):
        assert not np.array_equal(found, key_order.outputs(case, other))
    last_first = replace("start = block * C.BLOCK", "start = (begin + end - 1 - block) * C.BLOCK")
    at_blocks = f"{text.__name__}:add_blocks"
    monkeypatch.setattr(text, "add_blocks", mutated(at_blocks, at(at_blocks, last_first)))
    assert not np.array_equal(made(), key_order.outputs(case, order)), "another text is seen"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("features", ["causal", "all"])
def test_dtypes(features, dtype):
    Launched(dense(20, 33, heads=(4, 2), features=features, dtype=dtype)).run().check()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("workers", [7])
def test_every_number_of_workers(kind, workers):
    Launched(dense(33, 20, features="causal"), kind, workers).run().check()
    Launched(Case((5, 20), (20, 17), features="causal", how="packed"), kind, workers).run().check()


def test_launches_one_after_the_other_clear_nothing():
    launched = Launched(Case((5, 0, 17), (20, 7, 9), features="causal", how="packed", extra=2))
    for _ in range(2):
        launched.run().check()


def test_a_captured_launch_restores_its_words(monkeypatch):
    launched = Launched(dense(20, 33), chunks=Chunks.uniform(66, 16))
    own = captured(monkeypatch, launched.plan)
    words = Words(5, 0)
    for _ in range(2):
        launched.run(words.arrive()).check()
        assert not own.counters.any()
        assert not words.words.any(), "seen, and zeroed"


CHUNKINGS = {
    "blocks": Chunks.uniform(66, 16),
    "odd": Chunks.uniform(66, 7),
    "wide": Chunks.uniform(66, 40),
    "ragged": Chunks((0, 5, 5, 34, 35, 66)),
    "empty ends": Chunks((0, 0, 33, 66, 66)),
}


@pytest.mark.parametrize(
    ("chunking", "features"),
    [
        ("blocks", "causal"),
        ("odd", "window"),
        ("wide", "causal"),
        ("ragged", "full"),
        ("ragged", "window"),
        ("empty ends", "causal"),
    ],
)
def test_keys_that_have_arrived(chunking, features):
    chunks = CHUNKINGS[chunking]
    Launched(dense(10, 33, features=features), chunks=chunks).run(Words(chunks.count, 3).arrive()).check()
    packed = Case((10, 7), (40, 26), (1, 1), features=features, how="packed")
    Launched(packed, chunks=chunks).run(Words(chunks.count, 3).arrive()).check()


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_chunk_that_does_not_come_ends_the_launch(missing):
    op_number("matmul")  # ops are numbered as they come: attention's number is not 0
    # Longest first: the tile that is taken first reads all chunks, and from there on the only worker hands in NaN.
    launched = Launched(Case((40,), (48,), (1, 1)), workers=1, chunks=Chunks.uniform(48, 12))
    launched.run(Words(4, 2).arrive(missing))
    assert launched.out.isnan().all()
    assert launched.lse.isnan().all()
    with pytest.raises(ArrivalTimeout, match=f"attention: arrival's chunk {missing} did not arrive") as caught:
        channel(CPU).check()
    assert caught.value.chunk == missing


def test_a_tile_that_reads_no_late_chunk_is_right():
    # Top left: the only tile sees keys 0 to 15.
    launched = Launched(Case((16,), (64,), (1, 1), features="top left"), workers=1, chunks=Chunks.uniform(64, 16))
    for x in (launched.operands.k, launched.operands.v):
        x[0, 16:] = float("nan")
    launched.run(Words(4, 2).arrive(1, 2, 3))
    launched.check()


def test_every_signal_is_seen_before_words_are_zeroed():
    launched = Launched(Case((16,), (64,), (1, 1), features="top left"), workers=2, chunks=Chunks.uniform(64, 16))
    words = Words(4, 0).arrive(3)  # no tile reads it
    launched.run(words)
    launched.check()
    assert words.words.tolist() == [1, 1, 1, 0]
    with pytest.raises(ArrivalTimeout, match="no tile reads"):
        channel(CPU).check()
    launched.run(words.arrive())
    assert launched.out.isnan().all(), "what is left may be of the launch that missed a chunk"
    with pytest.raises(TilestreamError, match=r"call arrival\.reset"):
        channel(CPU).check()
    words.quarantine.zero_()
    launched.run(words)
    launched.check()
    assert not words.words.any()


def test_a_failed_producer_ends_the_launch_at_once():
    launched = Launched(Case((16,), (64,), (1, 1)), workers=1, chunks=Chunks.uniform(64, 16))
    words = Words(4, 4).arrive()
    words.words[2] = -4
    launched.run(words, deadline=1000.0)
    assert launched.out.isnan().all()
    assert launched.lse.isnan().all()
    with pytest.raises(ProducerStopped, match="its exception went with its Arrival"):
        channel(CPU).check()


def test_lists_that_lead_outside_stay_inside():
    """Lengths and pages are not looked at by the host: what they say beyond the operands is cut."""
    launched = Launched(Case((5, 20), (20, 33), features="causal", how="packed paged", page=8))
    launched.operands.block_table.fill_(2**30)
    launched.operands.seqlens_k.fill_(2**30)
    launched.operands.cu_seqlens_q[1:] = torch.tensor([-5, 2**30], dtype=torch.int32)
    launched.run()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_each_item_of_a_trace_once_and_its_worker(kind):
    launched = Launched(dense(33, 20, features="causal"), kind)
    launch = recorded("attention", launched.plan, lambda log: launched.run(log=log))
    launched.check()
    assert not faults(launch, launched.plan.schedule)
    assert launch.tiles_done == launched.plan.schedule.grid.tiles > 3
    assert {span.worker for span in launch.spans} <= set(range(3))
    assert {span.chunk for span in launch.spans} == {-1}
    assert not launch.arrivals


def test_a_trace_says_which_chunk_an_item_waited_for():
    # A window and no diagonal: three blocks of 16 queries, whose first keys come with the chunks 0, 0 and 1.
    launched = Launched(Case((48,), (48,), (1, 1), features="window"), workers=1, chunks=Chunks.uniform(48, 12))
    launch = recorded("attention", launched.plan, lambda log: launched.run(Words(4, 2).arrive(), log=log))
    launched.check()
    tiles = {span.pm: span.chunk for span in launch.spans if span.kind == "tile"}
    assert tiles == expected_chunks(launched)
    assert launch.arrivals == {0: (None,) * 4}


def expected_chunks(launched: Launched) -> dict[int, int]:
    """Of each query block: the chunk of the last key of its first key block, as far as one of its rows sees it."""
    p, found = launched.plan.problem, {}
    for block in range(launched.plan.schedule.grid.num_m):
        rows = range(16 * block, 16 * block + 16)
        seen = [j for j in range(p.seqlen_k) if any(i - p.left <= j <= i + p.right for i in rows)]
        first = min(seen) // 16 * 16
        found[block] = max(j for j in seen if j < first + 16) // 12
    return found


def test_an_item_of_a_trace_that_is_void_only_waited():
    launched = Launched(Case((16,), (64,), (1, 1)), workers=1, chunks=Chunks.uniform(64, 16))
    launch = recorded("attention", launched.plan, lambda log: launched.run(Words(4, 2).arrive(2), log=log))
    (span,) = launch.spans
    assert (span.kind, span.chunk) == ("wait", 0)
    with pytest.raises(ArrivalTimeout):
        channel(CPU).check()
