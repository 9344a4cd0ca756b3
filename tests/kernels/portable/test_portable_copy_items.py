"""Copy items in Triton's interpreter: the kernel fills the operand that it reads, from the first word to the last.

Programs run one after the other there: the first that has a copy item makes all copies. Who does what otherwise is the
checker's matter (`tests/tools/verify`), and the GPU's.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, KINDS, Copied, crossed, nan_like, run, small_tiles

from error_rule import Maths, check, rand
from tilestream.arrival.flat import Awaited
from tilestream.core.chunks import Chunks
from tilestream.core.copy_items import COUNTERS, Pieces
from tilestream.core.errors import ArrivalTimeout, TilestreamError
from tilestream.plan.plan import Plan
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import Incoming as Chunked
from tilestream.plan.problem import Problem
from tilestream.runtime.channel import channel
from tilestream.runtime.device_workspace import DeviceWorkspace, captured_words

CPU = torch.device("cpu")
CHUNKS = {
    "tiles": Chunks.uniform(70, 16),
    "odd": Chunks.uniform(70, 13),
    "one": Chunks.uniform(70, 70),
    "ragged": Chunks((0, 5, 5, 37, 38, 70)),
    "empty ends": Chunks((0, 0, 33, 70, 70)),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_tiles(monkeypatch)


@pytest.fixture(autouse=True)
def _nothing_pending():
    yield
    assert not channel(CPU).pending


def offered(source: torch.Tensor, chunks: Chunks, pivot: int = 0, per_chunk: int = 3, word: int = 0, **how) -> Copied:
    """The rows of ``source``, for a kernel to copy: NaN where they shall be."""
    row_bytes = source.shape[1] * source.element_size()
    word = word or next(size for size in (16, 8, 4, 2) if row_bytes % size == 0)
    pieces = Pieces(chunks, pivot, row_bytes // word, per_chunk)
    target = torch.full_like(source, float("nan"))
    return Copied(chunks.count, source=source, target=target, pieces=pieces, **how)


def plan_for(
    m: int, n: int, k: int, kind: str = "dynamic", *, rows: Copied | None = None, columns: Copied | None = None,
    workers: int = 3, batch: int = 1,
) -> Plan:  # fmt: skip
    made = [
        None if words is None else Chunked(words.pieces.chunks, words.pieces.pivot, words.word)
        for words in (rows, columns)
    ]
    problem = Problem(m, n, k, batch, "float32", "float32", *made)
    return plan_problem.__wrapped__(problem, workers, kind, device=DEVICE)


def incoming(rows: Copied | None, columns: Copied | None = None, deadline: float = 5.0) -> Awaited:
    return Awaited(rows, columns, deadline, "matmul")


def check_copied(words: Copied, epoch: int) -> None:
    """All is there, every chunk is signalled, those without rows too, and what counted is 0 again."""
    assert torch.equal(words.target, words.source)
    assert words.words.tolist() == [epoch] * words.chunks
    assert words.counts.tolist() == [0] * (COUNTERS + words.chunks)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_every_pivot_and_two_launches_on_the_same_words(chunks):
    cut, b = CHUNKS[chunks], rand(24, 17)
    for pivot in range(cut.count):
        words = offered(rand(70, 24, seed=pivot), cut, pivot, per_chunk=1 + pivot)
        plan = plan_for(70, 17, 24, rows=words)
        for epoch in (1, 2):
            words.source.copy_(rand(70, 24, seed=10 * epoch + pivot))
            words.target.fill_(float("nan"))
            words.epoch = epoch
            out = nan_like(words.target, b)
            run(plan, words.target, b, out, incoming=incoming(words))
            check_copied(words, epoch)
            check(out, Maths(words.source, b))


@crossed("kind, workers", KINDS, [1, 2, 5])
def test_any_number_of_workers_and_copiers(kind, workers):
    b = rand(24, 17)
    for copiers in range(1, workers + 1):
        words = offered(rand(70, 24), CHUNKS["odd"], 2, copiers=copiers)
        out = nan_like(words.target, b)
        run(plan_for(70, 17, 24, kind, rows=words, workers=workers), words.target, b, out, incoming=incoming(words))
        check_copied(words, 1)
        check(out, Maths(words.source, b))


@pytest.mark.parametrize("word", [16, 8, 4, 2, 1])
def test_words_of_every_width(word):
    words = offered(rand(70, 24), CHUNKS["ragged"], 1, per_chunk=4, word=word)
    b = rand(24, 20)
    out = nan_like(words.target, b)
    run(plan_for(70, 20, 24, rows=words), words.target, b, out, incoming=incoming(words))
    check_copied(words, 1)
    check(out, Maths(words.source, b))


def test_more_words_than_a_round_has(monkeypatch):
    monkeypatch.setattr("tilestream.core.copy_items.WORDS_A_THREAD", 1)  # 128 words a round
    words = offered(rand(70, 100), CHUNKS["one"], per_chunk=2, word=4)
    b = rand(100, 16)
    out = nan_like(words.target, b)
    run(plan_for(70, 16, 100, rows=words), words.target, b, out, incoming=incoming(words))
    check_copied(words, 1)
    check(out, Maths(words.source, b))


def test_a_weights_rows_and_a_batch():
    a, words = rand(30, 24), offered(rand(70, 24), CHUNKS["ragged"], 2)
    out = torch.full((30, 70), float("nan"))
    run(plan_for(30, 70, 24, columns=words), a, words.target.mT, out, incoming=incoming(None, words))
    check_copied(words, 1)
    check(out, Maths(a, words.source.mT))
    words, b = offered(rand(60, 24), Chunks.uniform(60, 13), 1), rand(3, 24, 20)
    out = torch.full((3, 20, 20), float("nan"))
    plan = plan_for(20, 20, 24, rows=words, batch=3)
    run(plan, words.target.view(3, 20, 24), b, out, incoming=incoming(words))
    check_copied(words, 1)
    check(out, Maths(words.source.view(3, 20, 24), b))


def test_a_later_launch_of_the_epoch_copies_nothing():
    words, b = offered(rand(70, 24), CHUNKS["tiles"]), rand(24, 17)
    plan, out = plan_for(70, 17, 24, rows=words), torch.full((70, 17), float("nan"))
    run(plan, words.target, b, out, incoming=incoming(words))
    copied, words.copiers = words.source.clone(), 0
    words.source.fill_(float("nan"))
    run(plan, words.target, b, out.fill_(float("nan")), incoming=incoming(words))
    assert torch.equal(words.target, copied)
    check(out, Maths(copied, b))


def test_where_nobody_copies_the_deadline_ends_it():
    """The launch that was to make the copies was never issued, say."""
    words, b = offered(rand(70, 24), CHUNKS["tiles"], copiers=0), rand(24, 17)
    out = torch.zeros(70, 17)
    run(plan_for(70, 17, 24, rows=words), words.target, b, out, incoming=incoming(words, deadline=0.05))
    assert out.isnan().all()
    with pytest.raises(ArrivalTimeout):
        channel(CPU).check()
    words.copiers = 99
    run(plan_for(70, 17, 24, rows=words), words.target, b, out, incoming=incoming(words))
    check_copied(words, 1)
    check(out, Maths(words.source, b))


def test_copies_are_made_to_their_end_where_the_other_operand_never_comes():
    from interpreted import Words

    rows, columns = offered(rand(70, 24), CHUNKS["tiles"]), Words(2).arrive(1)
    problem = Problem(
        70, 17, 24, 1, "float32", "float32", Chunked(CHUNKS["tiles"], 0, rows.word), Chunked(Chunks.uniform(17, 9))
    )
    plan = plan_problem.__wrapped__(problem, 3, "dynamic", device=DEVICE)
    b, out = rand(24, 17), torch.zeros(70, 17)
    run(plan, rows.target, b, out, incoming=Awaited(rows, columns, 0.05, "matmul"))
    assert out[:, 16:].isnan().all()
    check_copied(rows, 1)
    with pytest.raises(ArrivalTimeout) as caught:
        channel(CPU).check()
    assert (caught.value.chunk, caught.value.argument) == (1, "weight_arrival")


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_launch_copies_anew_at_each_replay_and_leaves_all_words_at_zero(kind, monkeypatch):
    words, b = offered(rand(70, 24), CHUNKS["ragged"], 1, epoch=0), rand(24, 17)
    plan = plan_for(70, 17, 24, kind, rows=words)
    own, space = captured_words(CPU, plan.schedule, plan.block), DeviceWorkspace(CPU)
    monkeypatch.setattr(space, "open", lambda *_: own)
    monkeypatch.setattr("tilestream.launch.launch.device_workspace", lambda *_: space)
    for seed in range(3):
        words.source.copy_(rand(70, 24, seed=seed))
        words.target.fill_(float("nan"))
        out = nan_like(words.target, b)
        run(plan, words.target, b, out, incoming=incoming(words))
        check_copied(words, 0)
        check(out, Maths(words.source, b))
        assert not own.counters.any()
    words.quarantine.fill_(1)  # as an expiry leaves it
    run(plan, words.target, b, out, incoming=incoming(words))
    assert out.isnan().all()
    assert torch.equal(words.target, words.source)
    assert not words.counts.any()
    with pytest.raises(TilestreamError, match=r"call arrival\.reset"):
        channel(CPU).check()
    words.quarantine.zero_()
    words.words.zero_()
    run(plan, words.target, b, out, incoming=incoming(words))
    check_copied(words, 0)
    check(out, Maths(words.source, b))
