"""Copy items in Triton's interpreter: the kernel fills the operand that it reads, from the first word to the last.

Programs run one after the other there: the first that has a copy item makes all copies. Who does what otherwise is the
checker's matter (`tests/tools/verify`), and the GPU's.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import KINDS, Copied, Words, awaited, captured, check_product, crossed, plan_of, voided

from error_rule import rand
from tilestream.core.chunks import Chunks
from tilestream.core.copy_items import COUNTERS, Pieces
from tilestream.core.errors import ArrivalTimeout, TilestreamError
from tilestream.plan.plan import Plan
from tilestream.runtime.channel import channel

CPU = torch.device("cpu")
CHUNKS = {
    "tiles": Chunks.uniform(70, 16),
    "odd": Chunks.uniform(70, 13),
    "one": Chunks.uniform(70, 70),
    "ragged": Chunks((0, 5, 5, 37, 38, 70)),
    "empty ends": Chunks((0, 0, 33, 70, 70)),
}


def offered(source: torch.Tensor, chunks: Chunks, pivot: int = 0, per_chunk: int = 3, word: int = 0, **how) -> Copied:
    """The rows of ``source``, for a kernel to copy: NaN where they shall be."""
    row_bytes = source.shape[1] * source.element_size()
    word = word or next(size for size in (16, 8, 4, 2) if row_bytes % size == 0)
    pieces = Pieces(chunks, pivot, row_bytes // word, per_chunk)
    target = torch.full_like(source, float("nan"))
    return Copied(chunks.count, source=source, target=target, pieces=pieces, **how)


def check_copied(plan: Plan, words: Copied, b: torch.Tensor, epoch: int = 1, a: torch.Tensor | None = None) -> None:
    """A launch copies all rows, signals every chunk, those without rows too, restores what counted, and is right.

    The rows are A's; where ``a`` is given they are the weight's, and ``b`` is a view of them.
    """
    rows, columns = (words, None) if a is None else (None, words)
    if a is None:
        a = words.target.view(*b.shape[:-2], plan.problem.m, -1)
    check_product(plan, a, b, incoming=awaited(rows, columns, 5.0))
    assert torch.equal(words.target, words.source)
    assert words.words.tolist() == [epoch] * words.chunks
    assert words.counts.tolist() == [0] * (COUNTERS + words.chunks)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_every_pivot_and_two_launches_on_the_same_words(chunks):
    cut, b = CHUNKS[chunks], rand(24, 17)
    for pivot in range(cut.count):
        words = offered(rand(70, 24, seed=pivot), cut, pivot, per_chunk=1 + pivot)
        plan = plan_of(70, 17, 24, rows=words)
        for epoch in (1, 2):
            words.source.copy_(rand(70, 24, seed=10 * epoch + pivot))
            words.target.fill_(float("nan"))
            words.epoch = epoch
            check_copied(plan, words, b, epoch)


@crossed("kind, workers", KINDS, [1, 2, 5])
def test_any_number_of_workers_and_copiers(kind, workers):
    for copiers in range(1, workers + 1):
        words = offered(rand(70, 24), CHUNKS["odd"], 2, copiers=copiers)
        check_copied(plan_of(70, 17, 24, kind, rows=words, workers=workers), words, rand(24, 17))


@pytest.mark.parametrize("word", [16, 8, 4, 2, 1])
def test_words_of_every_width(word):
    words = offered(rand(70, 24), CHUNKS["ragged"], 1, per_chunk=4, word=word)
    check_copied(plan_of(70, 20, 24, rows=words), words, rand(24, 20))


def test_more_words_than_a_round_has(monkeypatch):
    monkeypatch.setattr("tilestream.core.copy_items.WORDS_A_THREAD", 1)  # 128 words a round
    words = offered(rand(70, 100), CHUNKS["one"], per_chunk=2, word=4)
    check_copied(plan_of(70, 16, 100, rows=words), words, rand(100, 16))


def test_a_weights_rows_and_a_batch():
    words = offered(rand(70, 24), CHUNKS["ragged"], 2)
    check_copied(plan_of(30, 70, 24, columns=words), words, words.target.mT, a=rand(30, 24))
    words = offered(rand(60, 24), Chunks.uniform(60, 13), 1)
    check_copied(plan_of(20, 20, 24, rows=words, batch=3), words, rand(3, 24, 20))


def test_a_later_launch_of_the_epoch_copies_nothing():
    words, b = offered(rand(70, 24), CHUNKS["tiles"]), rand(24, 17)
    plan = plan_of(70, 17, 24, rows=words)
    check_copied(plan, words, b)
    copied, words.copiers = words.source.clone(), 0
    words.source.fill_(float("nan"))
    check_product(plan, words.target, b, incoming=awaited(words, deadline=5.0))
    assert torch.equal(words.target, copied)


def test_where_nobody_copies_the_deadline_ends_it():
    """The launch that was to make the copies was never issued, say."""
    words, b = offered(rand(70, 24), CHUNKS["tiles"], copiers=0), rand(24, 17)
    plan = plan_of(70, 17, 24, rows=words)
    assert voided(plan, words.target, b, incoming=awaited(words)).isnan().all()
    with pytest.raises(ArrivalTimeout):
        channel(CPU).check()
    words.copiers = 99
    check_copied(plan, words, b)


def test_copies_are_made_to_their_end_where_the_other_operand_never_comes():
    rows, columns = offered(rand(70, 24), CHUNKS["tiles"]), Words(2).arrive(1)
    plan = plan_of(70, 17, 24, rows=rows, columns=Chunks.uniform(17, 9))
    out = voided(plan, rows.target, rand(24, 17), incoming=awaited(rows, columns))
    assert out[:, 16:].isnan().all()
    assert torch.equal(rows.target, rows.source)
    assert rows.words.tolist() == [1] * rows.chunks
    assert not rows.counts.any()
    with pytest.raises(ArrivalTimeout) as caught:
        channel(CPU).check()
    assert (caught.value.chunk, caught.value.argument) == (1, "weight_arrival")


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_launch_copies_anew_at_each_replay_and_leaves_all_words_at_zero(kind, monkeypatch):
    words, b = offered(rand(70, 24), CHUNKS["ragged"], 1, epoch=0), rand(24, 17)
    plan = plan_of(70, 17, 24, kind, rows=words)
    own = captured(monkeypatch, plan)
    for seed in range(3):
        words.source.copy_(rand(70, 24, seed=seed))
        words.target.fill_(float("nan"))
        check_copied(plan, words, b, 0)
        assert not own.counters.any()
    words.quarantine.fill_(1)  # as an expiry leaves it
    assert voided(plan, words.target, b, incoming=awaited(words, deadline=5.0)).isnan().all()
    assert torch.equal(words.target, words.source)
    assert not words.counts.any()
    with pytest.raises(TilestreamError, match=r"call arrival\.reset"):
        channel(CPU).check()
    words.quarantine.zero_()
    words.words.zero_()
    check_copied(plan, words, b, 0)
