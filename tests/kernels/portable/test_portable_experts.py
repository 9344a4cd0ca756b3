"""The kernels of a mixture of experts over ranks, in Triton's interpreter: step by step; in processes; on fake GPUs."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch
from expert_ranks import FORM, Ranks, Tokens, capture, expert_world
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import check, in_any_order, prepared, with_expiries

from tilestream.core.error_record import EXPIRED, QUARANTINED
from tilestream.core.errors import ArrivalTimeout, GroupBroken
from tilestream.core.protocols import experts as text
from tilestream.core.protocols.replay import BROKEN, MARKS, VOID, stamp
from tilestream.distributed import moe_experts
from tilestream.distributed.moe import _combined
from tilestream.kernels.portable import experts as kernels
from tilestream.launch.choices import sort
from tilestream.launch.layout import Layout
from tilestream.launch.portable import experts

SMALL = Layout(2, 2, 12, 8, 4)


@pytest.mark.parametrize(
    ("world", "e", "top_k", "counts", "width", "dtype", "workers"),
    [
        (2, 3, 2, (9, 5), 24, torch.float32, 3),
        (3, 2, 3, (7, 0, 40), 8, torch.float16, 1),
        (2, 1, 2, (40, 40), 40, torch.float16, 5),
        (3, 5, 1, (1, 33, 2), 16, torch.float32, 2),
    ],
)
@pytest.mark.parametrize("skew", [False, True])
def test_calls_one_behind_another(world, e, top_k, counts, width, dtype, workers, skew):
    layout = Layout(world, e, 40 * top_k, width, dtype.itemsize)
    ranks = Ranks(layout, dtype, workers)
    for call in range(2):
        tokens = [Tokens.random(10 * call + r, n, layout, top_k, dtype, skew) for r, n in enumerate(counts)]
        for found, one in zip(ranks.call(tokens, call == 1), tokens, strict=True):
            assert found.equal(one.expected(world * e))
        assert not any(x.any() for x in ranks.signals), "all signals are cleared"
        assert not any(local.done.any() or local.returned[:, 0].any() for local in ranks.local)
    assert ranks.broken() == [0] * world
    assert not any(ranks.records(rank) for rank in range(world))


def test_blocks_smaller_than_a_row_and_than_an_expert(monkeypatch):
    monkeypatch.setattr(kernels, "ROWS", 2)
    monkeypatch.setattr(kernels, "COLUMNS", 8)
    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(kernels, "ADDED", 16)
    layout = Layout(2, 3, 40, 20, 4)
    ranks = Ranks(layout)
    tokens = [Tokens.random(r, 20, layout, 2, torch.float32) for r in range(2)]
    assert all(map(torch.equal, ranks.call(tokens), [one.expected(6) for one in tokens]))


@pytest.mark.parametrize("workers", [1, 3])
def test_heads_are_signalled_first_and_an_experts_rows_when_all_have_landed(monkeypatch, workers):
    monkeypatch.setattr(kernels, "ROWS", 2)
    layout = Layout(2, 3, 16, 8, 4)
    ranks = Ranks(layout, workers=workers)
    tokens = Tokens(torch.randn(8, 8), torch.rand(8, 1), torch.tensor([3] * 5 + [4] * 3)[:, None])
    seen, real = [], kernels.count_landed

    def watched(count, parts, whole, **how):
        last = real(count, parts, whole, **how)
        signals, rows = ranks.signals[1].tolist(), ranks.rows(1, 0)
        landed = [rows[:5].equal(tokens.x[:5]), rows[5:8].equal(tokens.x[5:])]
        seen.append((signals[0], signals[2:5], landed))
        return last

    monkeypatch.setattr(kernels, "count_landed", watched)
    ranks.begin(0, tokens)
    assert ranks.signals[1].tolist()[:10] == [1, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    assert ranks.rows(1, 0)[:8].equal(tokens.x)
    assert len(seen) == 5, "blocks of two rows; the third has rows of both experts"
    for head, (first, second, none), landed in seen:
        assert first <= landed[0]
        assert second <= landed[1]
        if workers == 1:
            assert head == none == 1, "the rows for an expert without any have landed"


def test_a_choice_of_no_expert_makes_its_token_nan_and_no_other():
    layout = Layout(2, 2, 8, 8, 4)
    ranks = Ranks(layout)
    tokens = [Tokens.random(r, 4, layout, 2, torch.float32) for r in range(2)]
    tokens[0].choices[1, 0], tokens[0].choices[2, 1], tokens[1].choices[3] = 4, -1, 2**40
    for found, one, bad in zip(ranks.call(tokens), tokens, ([1, 2], [3]), strict=True):
        wanted = one.expected(4)
        assert wanted.isnan().any(1).nonzero().flatten().tolist() == bad
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert ranks.broken() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.float64])
def test_sums_have_the_bits_of_the_unfused_form(dtype, weights):
    layout = Layout(1, 4, 21, 1030, dtype.itemsize)
    tokens = Tokens.random(3, 7, layout, 3, dtype)
    chosen = sort(tokens.choices, 4)
    rows, out = torch.randn(21, 1030).to(dtype), torch.empty(7, 1030, dtype=dtype)
    given_weights = tokens.weights.to(weights)
    words = Ranks(layout, dtype).words(0)
    experts.add_results(words, rows, given_weights, chosen, out)
    wanted = _combined(rows[chosen.place].view(7, 3, 1030), given_weights).to(dtype)
    assert out.equal(wanted)
    words.control[VOID] = 1
    experts.add_results(words, rows, given_weights, chosen, out)
    assert out.isnan().all()


def test_gates_are_multiplied_as_by_torch_up_to_the_last_row():
    gate, up = torch.randn(2, 30, 600).half()
    wanted, ends = gate.clone(), torch.tensor([4, 4, 21], dtype=torch.int32)
    wanted[:21] *= up[:21]
    experts.multiply_rows(gate, up, ends)
    assert gate.equal(wanted)
    e = moe_experts.Experts(torch.randn(2, 5, 6), torch.randn(2, 6, 5), torch.randn(2, 5, 6), "silu")
    x, counts = torch.randn(9, 6), torch.tensor([3, 4])
    ends = moe_experts.ends_of(counts, x.device)
    found = moe_experts.through(e, x, ends, lambda a, b: experts.multiply_rows(a, b, ends))
    assert found[:7].equal(moe_experts.forward(e, x, counts)[:7])


def test_halves_of_one_tensor_are_one_product():
    w13, w2, x = torch.randn(2, 10, 6), torch.randn(2, 6, 5), torch.randn(9, 6)
    w1, w3 = w13.chunk(2, 1)
    assert moe_experts.stacked(w1, w3).equal(w13)
    assert moe_experts.stacked(w1, w3).data_ptr() == w13.data_ptr(), "nothing is copied"
    for one, other in ((w3, w1), (w1, w1), (w1, w3.clone()), (w1.contiguous(), w3.contiguous()), (w1, w13[:, 4:9])):
        assert moe_experts.stacked(one, other) is None
    counts = torch.tensor([3, 4])
    found = moe_experts.forward(moe_experts.Experts(w1, w2, w3, "silu"), x, counts)
    apart = moe_experts.forward(moe_experts.Experts(w1.clone(), w2, w3.clone(), "silu"), x, counts)
    torch.testing.assert_close(found, apart, rtol=1e-5, atol=1e-5)
    other = moe_experts.forward(moe_experts.Experts(w1, w2, w3, "relu"), x, counts)
    plain = moe_experts.forward(moe_experts.Experts(w1.clone(), w2, w3.clone(), "relu"), x, counts)
    assert other.equal(plain)


@pytest.mark.parametrize("what", ["head", "rows", "results"])
def test_what_does_not_come_voids_the_call_on_every_rank(what):
    ranks = Ranks(SMALL)
    tokens = [Tokens.random(r, 6, SMALL, 2, torch.float32) for r in range(2)]
    tokens[1].choices[0] = torch.tensor([0, 1])
    chosen = [ranks.begin(0, tokens[0])]
    if what != "head":
        ranks.begin(1, tokens[1])
    if what == "rows":
        ranks.signals[0][2 + 2 + 1] = 0  # of rank 1's rows for the second expert
    ranks.take(0, 0)
    ranks.give_back(0, 0)
    ranks.take(0, 1, 20.0 if what == "results" else 1e-3)
    if what != "results":
        assert ranks.local[0].taken[1, 0] == 0
        assert not ranks.local[0].ends[1, :2].any(), "nothing is computed"
        ranks.give_back(0, 1)
        assert not ranks.signals[1][2 * 3 :].any(), "nothing is sent back"
    out = ranks.end(0, tokens[0], chosen[0], 1e-3)
    assert out.isnan().all()
    assert ranks.broken() == [1, 1]
    why = [(record.why, record.chunk) for record in ranks.records(0)]
    assert why[0] == (EXPIRED, {"head": 1, "rows": 5, "results": 7}[what])
    assert all(one == QUARANTINED for one, _ in why[1:])
    # Now nobody pushes, computes or hands in.
    before = [x.clone() for x in ranks.memory]
    found = ranks.whole(1, tokens[1], 1e6)
    assert found.isnan().all()
    assert all(map(torch.equal, ranks.memory, before)) or what != "head"
    assert {record.why for record in ranks.records(1)} == {QUARANTINED}


def test_rows_of_another_form_are_neither_counted_nor_computed():
    ranks = Ranks(SMALL)
    tokens = [Tokens.random(r, 6, SMALL, 2, torch.float32) for r in range(2)]
    ranks.begin(0, tokens[0])
    ranks.begin(1, tokens[1], form=FORM + 1)
    ranks.take(0, 1)
    assert ranks.local[0].taken[1, 0] == 0
    assert ranks.broken() == [1, 1]
    assert [record.why for record in ranks.records(0)] == [QUARANTINED]
    assert int(ranks.control[0][MARKS + 1]) == stamp(1, FORM + 1)


def test_a_broken_group_takes_no_signal_that_an_earlier_call_left():
    ranks = Ranks(SMALL)
    tokens = Tokens.random(0, 6, SMALL, 2, torch.float32)
    ranks.begin(0, tokens)
    ranks.control[0][BROKEN] = 1
    ranks.take(0, 0, 1e6)
    assert ranks.local[0].taken[0, 0] == 0
    ranks.signals[0][6:] = 1
    experts.take_results(ranks.words(0), SMALL, 1e6)
    assert int(ranks.control[0][VOID]) == 1
    assert [record.why for record in ranks.records(0)] == [QUARANTINED] * 2


# Processes ------------------------------------------------------------------------------------------------------------

TURNS = Layout(3, 2, 20, 8, 4)


def _runs(ranks, rank, calls, pause, found):
    with torch.inference_mode():
        torch.set_num_threads(1)
        for call in range(calls):
            time.sleep(pause * ((rank + call) % 3))  # some order; nothing is waited for
            tokens = Tokens.random(10 * call + rank, 4 + rank, TURNS, 2, torch.float32, call == 1)
            out = ranks.whole(rank, tokens, 60.0)
            found.put((rank, call, out.equal(tokens.expected(6))))


def test_processes_that_share_memory_wait_for_each_other():
    fork, ranks = multiprocessing.get_context("fork"), Ranks(TURNS)
    found = fork.Queue()
    others = [fork.Process(target=_runs, args=(ranks, rank, 4, 0.02, found), daemon=True) for rank in range(3)]
    for one in others:
        one.start()
    try:
        said = sorted(found.get(timeout=850) for _ in range(12))
    finally:
        for one in others:
            one.join(300)
            one.kill()
    assert said == [(rank, call, True) for rank in range(3) for call in range(4)]
    assert ranks.broken() == [0, 0, 0]


def _loses(ranks, rank, found):
    torch.set_num_threads(1)
    tokens = Tokens.random(rank, 4, TURNS, 2, torch.float32)
    if rank == 2:
        ranks.begin(rank, tokens)  # it pushes its rows, and is gone
        return
    out = ranks.whole(rank, tokens, 2.0)
    found.put((rank, bool(out.isnan().all()), [record.why for record in ranks.records(rank)]))


def test_a_process_that_is_lost_ends_all_others_in_their_deadline():
    fork, ranks = multiprocessing.get_context("fork"), Ranks(TURNS)
    found = fork.Queue()
    processes = [fork.Process(target=_loses, args=(ranks, rank, found), daemon=True) for rank in range(3)]
    for one in processes:
        one.start()
    try:
        said = [found.get(timeout=850) for _ in range(2)]
    finally:
        for one in processes:
            one.join(300)
            one.kill()
    assert all(nan for _, nan, _ in said)
    assert any(EXPIRED in why for *_, why in said)
    assert ranks.broken() == [1, 1, 1]


# The whole call on fake GPUs ------------------------------------------------------------------------------------------

LAYOUTS = {2: Layout(2, 2, 12, 8, 4), 3: Layout(3, 1, 12, 8, 4)}


@pytest.mark.slow
@given(data=st.data(), size=st.sampled_from((2, 3)))
@settings(max_examples=8, deadline=None)
def test_each_call_is_of_its_own_rows_whichever_ranks_replay_it(data, size):
    with expert_world(LAYOUTS[size], 2) as (cuda, ranks):
        in_any_order(data, cuda, ranks, 4)


@pytest.mark.slow
@given(data=st.data(), size=st.sampled_from((2, 3)))
@settings(max_examples=10, deadline=None)
def test_expiries_yield_no_wrong_number_and_no_deadlock(data, size):
    with expert_world(LAYOUTS[size], 2) as (cuda, ranks):
        with_expiries(data, cuda, ranks, 40, 4)


def test_a_late_rank_is_waited_for_and_a_lost_one_is_named():
    with expert_world(LAYOUTS[3], 2) as (cuda, ranks):
        prepared(cuda, ranks)
        *others, late = ranks
        for rank in others:
            rank.next(True)
        cuda.run()
        assert [len(rank.results) for rank in ranks] == [1, 1, 1], "they wait for the last rank's rows"
        late.next(True)
        cuda.run()
        for rank in ranks:
            check(rank, 2)
        for rank in others:  # now it does not come
            rank.next(False)
        cuda.run()
        first, second = others
        first.impatient = True
        cuda.run()
        assert all(rank.results[-1].isnan().all() for rank in others)
        with pytest.raises(ArrivalTimeout, match="rank 2's rows"):
            first.channel.check()
        with pytest.raises(GroupBroken):
            second.channel.check()
        for rank in others:
            with pytest.raises(GroupBroken):
                rank.next(False)
        late.next(True)
        cuda.run()
        assert late.results[-1].isnan().all()
        with pytest.raises(GroupBroken):
            late.channel.check()


def test_streams_in_the_order_of_issue_alone_make_progress():
    """One hardware queue: a rank's streams are run one piece of work at a time, in the order in which it was issued."""
    with expert_world(LAYOUTS[3], 2) as (cuda, ranks):
        for rank in ranks:
            for stream in rank.streams:
                stream.give = lambda work, rank=rank: type(rank.calling).give(rank.calling, work)
        for _ in range(2):
            for rank in ranks:
                rank.next(False)
            cuda.run()
        for rank in ranks:
            check(rank)
            assert len(rank.results) == 2


def test_a_capture_wants_a_call_of_its_layout_before_it():
    with expert_world(LAYOUTS[2], 2) as (cuda, ranks):
        first = ranks[0]
        with pytest.raises(RuntimeError, match="call it once with these shapes before the capture"), capture(cuda):
            first.call()


def test_a_call_that_fails_half_issued_breaks_the_group_on_every_rank():
    with expert_world(LAYOUTS[2], 2) as (_, ranks):
        first, second = ranks
        real = first.queue.mix

        def fails(layout, pushers, alone, x, weights, chosen, compute, seconds, number):
            def no_memory(rows, ends):
                raise MemoryError("no room")

            return real(layout, pushers, alone, x, weights, chosen, no_memory, seconds, number)

        first.queue.mix = fails
        with pytest.raises(MemoryError):
            first.call()
        assert first.state.broken
        with pytest.raises(GroupBroken, match="a peer has given up"):
            second.call()


def test_turns_are_opposite_and_each_rank_has_one_source_at_a_time():
    for world in range(1, 9):
        for turn in range(world):
            assert sorted(text.turns(rank, world)[turn] for rank in range(world)) == list(range(world))
            for rank in range(world):
                assert text.turns(text.sources(rank, world)[turn], world)[turn] == rank
