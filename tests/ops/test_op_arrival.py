"""The public ops on operands that arrive: forms, dtypes, out=, the caller's own signals, streams."""

from __future__ import annotations

import threading

import pytest
import torch

import tilestream as ts
from error_rule import DTYPES, Maths, check, nans, rand
from streaming import Feeder, late, no_thread_left

pytestmark = [pytest.mark.usefixtures("small_tiles"), pytest.mark.timeout(60)]

SCHEDULES = ("static", "dynamic", "stream_k")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule", ["auto", *SCHEDULES])
def test_matmul_of_rows_that_arrive(dtype, schedule):
    source, b, bias, residual = (rand(*s, dtype=dtype) for s in ((50, 40), (40, 37), (37,), (50, 37)))
    x = nans(50, 40, dtype=dtype)
    arrival = ts.Arrival.uniform(12, 5, pivot=3)
    with no_thread_left(), Feeder(arrival, x, source, order=[3, 4, 0, 1, 2], before=late(0)):
        answer = ts.matmul(
            x, b, bias=bias, residual=residual, activation="relu", arrival=arrival, schedule=schedule, workers=3
        )
    check(answer, Maths(source, b, bias, residual, activation="relu"))


def activation_of(kind: str) -> torch.Tensor:
    """A [3, 20, 24] activation, all NaN, that lies in memory as ``kind`` says."""
    return {
        "contiguous": lambda: nans(3, 20, 24),
        "every other row": lambda: nans(3, 40, 24)[:, ::2],
        "columns of a wider one": lambda: nans(3, 20, 48)[..., 12:36],
        "first rows of longer ones": lambda: nans(3, 33, 24)[:, :20],
        "sequence first": lambda: nans(20, 3, 24).transpose(0, 1),
        "K outermost": lambda: nans(24, 3, 20).permute(1, 2, 0),
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        "contiguous",
        "every other row",
        "columns of a wider one",
        "first rows of longer ones",
        "sequence first",
        "K outermost",
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_3d_activations_whatever_their_strides(kind, schedule):
    source, weight, bias = rand(3, 20, 24), rand(18, 24), rand(18)
    x = activation_of(kind)
    arrival = ts.Arrival.uniform(13, 5, pivot=2)
    with Feeder(arrival, x, source, order=[2, 3, 4, 0, 1], before=late(1)):
        answer = ts.linear(x, weight, bias, arrival=arrival, schedule=schedule, workers=2)
    check(answer, Maths(source, weight.t(), bias))


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 20, 33, 60])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bmm_with_arrival(schedule, rows_per_chunk):
    source, b = rand(3, 20, 24), rand(3, 24, 18)
    x = nans(3, 20, 24)
    count = -(-60 // rows_per_chunk)
    for pivot in {0, count - 1}:
        x.fill_(float("nan"))
        arrival = ts.Arrival.uniform(rows_per_chunk, count, pivot=pivot)
        order = [(pivot + i) % count for i in range(count)]
        with Feeder(arrival, x, source, order=order, before=late(count // 2)):
            answer = ts.bmm(x, b, arrival=arrival, schedule=schedule, workers=2)
        check(answer, Maths(source, b))


def test_matmul_of_4d_batches_with_arrival():
    source, b = rand(2, 3, 20, 24), rand(2, 3, 24, 18)
    x = nans(2, 3, 20, 24)
    arrival = ts.Arrival.uniform(25, 5)
    with Feeder(arrival, x, source):
        answer = ts.matmul(x, b, arrival=arrival, workers=2)
    check(answer, Maths(source, b))


def test_bmm_of_one_row_batches_with_arrival():
    source, b = rand(5, 1, 24), rand(5, 24, 18)
    x = nans(5, 1, 24)
    arrival = ts.Arrival.uniform(2, 3)
    with Feeder(arrival, x, source, before=late(1)):
        answer = ts.bmm(x, b, arrival=arrival, workers=2)
    check(answer, Maths(source, b))


@pytest.mark.parametrize("pivot", range(3))
@pytest.mark.parametrize("dims", [2, 3])
def test_one_activation_that_arrives_for_all_batches_of_weights(dims, pivot):
    source, b = rand(40, 24), rand(3, 24, 18)
    x = nans(40, 24)
    arrival = ts.Arrival.uniform(16, 3, pivot=pivot)
    with Feeder(arrival, x, source, order=[(pivot + i) % 3 for i in range(3)], before=late((pivot + 1) % 3)):
        answer = ts.matmul(x if dims == 2 else x.unsqueeze(0), b, arrival=arrival, workers=2)
    check(answer, Maths(source, b))


@pytest.mark.parametrize("shape_x", [(24,), (20, 24), (2, 10, 24)], ids=str)
@pytest.mark.parametrize("pivot", range(4))
def test_weight_arrival(shape_x, pivot):
    x, weights, bias = rand(*shape_x), rand(37, 24), rand(37)
    weight = nans(37, 24)
    arrival = ts.Arrival.uniform(10, 4, pivot=pivot)
    with Feeder(arrival, weight, weights, order=[(pivot + i) % 4 for i in range(4)], before=late((pivot + 2) % 4)):
        answer = ts.linear(x, weight, bias, weight_arrival=arrival, workers=2)
    check(answer, Maths(x, weights.t(), bias))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ragged", [False, True])
def test_both_arrive_at_once(schedule, ragged):
    source, weights = rand(50, 24), rand(37, 24)
    for late_row in range(4):
        for late_column in range(3):
            x, w = nans(50, 24), nans(37, 24)
            rows = ts.Arrival.ragged([0, 1, 1, 30, 50], pivot=2) if ragged else ts.Arrival.uniform(13, 4, pivot=2)
            columns = ts.Arrival.ragged([0, 20, 36, 37]) if ragged else ts.Arrival.uniform(13, 3, pivot=1)
            with (
                Feeder(rows, x, source, before=late(late_row, 0.003)),
                Feeder(columns, w, weights, before=late(late_column, 0.003)),
            ):
                answer = ts.linear(x, w, arrival=rows, weight_arrival=columns, schedule=schedule, workers=3)
            check(answer, Maths(source, weights.t()))


def test_vectors_arrive():
    source, b = rand(24), rand(24, 18)
    x = nans(24)
    arrival = ts.Arrival.uniform(1, 1)
    with Feeder(arrival, x.unsqueeze(0), source.unsqueeze(0), before=late(0)):
        check(ts.matmul(x, b, arrival=arrival, workers=2), Maths(source, b))
    rows = nans(50, 24)
    arrival = ts.Arrival.uniform(20, 3)
    with Feeder(arrival, rows, rand(50, 24), before=late(2)):
        check(ts.matmul(rows, b[:, 0], arrival=arrival, workers=2), Maths(rand(50, 24), b[:, 0]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arrival_into_out_that_is_the_residual(schedule):
    source, b = rand(50, 24), rand(24, 37)
    x, buffer = nans(50, 24), rand(37, 60)
    out = buffer[:, 5:55].t()
    maths = Maths(source, b, None, out.clone(), alpha=0.5, beta=2.0)
    arrival = ts.Arrival.uniform(20, 3)
    with Feeder(arrival, x, source, before=late(1)):
        result = ts.addmm(out, x, b, alpha=0.5, beta=2, out=out, arrival=arrival, schedule=schedule, workers=2)
    assert result is out
    check(out, maths)


def test_transposed_operand_that_arrives_by_its_rows():
    # b is stored [N, K]; a is a view of a [K, M] buffer: a's rows are that buffer's columns.
    source, b = rand(50, 24), rand(24, 37)
    x = nans(24, 50).t()
    arrival = ts.Arrival.uniform(20, 3)
    with Feeder(arrival, x, source, before=late(1)):
        check(ts.matmul(x, b, arrival=arrival, workers=2), Maths(source, b))


# Rounds ---------------------------------------------------------------------------------------------------------------


def test_invariant_4_epochs_of_our_own_signals():
    source, b = rand(50, 24), rand(24, 37)
    x = nans(50, 24)
    arrival = ts.Arrival.uniform(20, 3)
    for epoch in range(1, 6):
        assert arrival.epoch == epoch
        assert not any(arrival.arrived(c) for c in range(3))
        fresh = rand(50, 24, seed=epoch)
        x.fill_(float("nan"))
        with Feeder(arrival, x, fresh, before=late(epoch % 3, 0.003)):
            check(ts.matmul(x, b, arrival=arrival, workers=2), Maths(fresh, b))
        assert all(arrival.arrived(c) for c in range(3)), "our own words are never cleared"
        arrival.advance()
    assert not source.isnan().any()


def test_a_second_call_of_the_same_round_waits_for_nothing():
    source, b, c = rand(50, 24), rand(24, 37), rand(24, 20)
    x = nans(50, 24)
    arrival = ts.Arrival.uniform(20, 3)
    with Feeder(arrival, x, source):
        check(ts.matmul(x, b, arrival=arrival, workers=2), Maths(source, b))
    check(ts.matmul(x, c, arrival=arrival, workers=2, deadline=1.0), Maths(source, c))


@pytest.mark.parametrize("raw", [False, True], ids=["signal()", "raw write"])
def test_invariant_4_a_callers_own_words_are_zeroed_by_the_call_that_saw_them(raw):
    b = rand(24, 37)
    x, words = nans(50, 24), torch.zeros(3, dtype=torch.int32)
    arrival = ts.Arrival.uniform(20, 3, signals=words)
    for call in range(4):
        fresh = rand(50, 24, seed=call)
        x.fill_(float("nan"))

        def feed(fresh=fresh):
            for chunk in (2, 0, 1):
                x[20 * chunk : 20 * chunk + 20] = fresh[20 * chunk : 20 * chunk + 20]
                if raw:
                    words[chunk] = 7  # as another process would: no word to us
                else:
                    arrival.signal(chunk)

        thread = threading.Timer(0.002, feed)
        thread.start()
        check(ts.matmul(x, b, arrival=arrival, workers=2, deadline=20), Maths(fresh, b))
        thread.join()
        assert words.tolist() == [0, 0, 0]


@pytest.mark.parametrize("columns", [0, 37])
def test_invariant_4_words_are_zeroed_only_after_all_were_seen(columns):
    # Chunk 1 has no rows, so no tile waits for it; with no columns, no tile waits at all. The call does.
    x, words = rand(50, 24), torch.zeros(3, dtype=torch.int32)
    arrival = ts.Arrival.ragged([0, 20, 20, 50], signals=words)
    b = rand(24, columns)
    words[0] = words[2] = 1
    seen = []

    def signal():
        seen.append(words.tolist())
        arrival.signal(1)

    timer = threading.Timer(0.05, signal)
    timer.start()
    answer = ts.matmul(x, b, arrival=arrival, workers=2, deadline=20)
    timer.join()
    assert seen == [[1, 0, 1]], "zeroed before chunk 1 was seen"
    assert words.tolist() == [0, 0, 0]
    check(answer, Maths(x, b))


def test_words_that_already_stand_are_enough():
    words = torch.full((3,), -1, dtype=torch.int32)  # anything but zero
    arrival = ts.Arrival.uniform(20, 3, signals=words)
    x, b = rand(50, 24), rand(24, 37)
    check(ts.matmul(x, b, arrival=arrival, workers=2, deadline=1), Maths(x, b))
    assert words.tolist() == [0, 0, 0]


def test_self_reset_words_of_both_operands():
    x, w = rand(50, 24), rand(37, 24)
    first, second = torch.ones(3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    answer = ts.linear(
        x, w, arrival=ts.Arrival.uniform(20, 3, signals=first), weight_arrival=ts.Arrival.uniform(20, 2, signals=second)
    )
    check(answer, Maths(x, w.t()))
    assert first.tolist() == [0, 0, 0]
    assert second.tolist() == [0, 0]


# Streams --------------------------------------------------------------------------------------------------------------


def test_stream_of_a_tensor_restarted():
    source, b = rand(50, 24), rand(24, 37)
    with ts.stream_in(source, rows_per_chunk=7, pivot=3) as stream:
        for _ in range(3):
            check(ts.matmul(stream.tensor, b, arrival=stream.arrival, workers=2), Maths(source, b))
            stream.wait(10)
            stream.tensor.fill_(float("nan"))
            stream.restart()
        stream.wait(10)


def test_a_producer_that_itself_multiplies():
    # Re-entrancy: the iterator's blocks are products of this package, made while the outer call waits for them.
    base, inner, outer = rand(60, 24), rand(24, 24), rand(24, 37)

    def blocks():
        for row in range(0, 60, 12):
            part = ts.stream_in(base[row : row + 12], rows_per_chunk=5)
            yield ts.matmul(part.tensor, inner, arrival=part.arrival, workers=2)

    with no_thread_left():
        stream = ts.stream_in(blocks(), shape=(60, 24), dtype=torch.float32, rows_per_chunk=10)
        answer = ts.matmul(stream.tensor, outer, arrival=stream.arrival, workers=2, deadline=20)
        stream.wait(10)
        stream.close()
    through = ts.matmul(base, inner)
    check(answer, Maths(through, outer))


def test_zero_sized_operands_with_arrival():
    for m, n, k in ((0, 5, 4), (6, 0, 4), (6, 5, 0)):
        arrival = ts.Arrival.uniform(6, 1)
        arrival.signal(0)
        answer = ts.matmul(torch.zeros(m, k), torch.zeros(k, n), arrival=arrival, deadline=2.0, workers=2)
        assert torch.equal(answer, torch.zeros(m, n))


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0)], ids=str)
def test_zero_sized_batches_with_arrival(shape):
    arrival = ts.Arrival.uniform(12, 1)
    arrival.signal(0)
    b = torch.zeros(shape[0], shape[2], 7)
    assert torch.equal(ts.bmm(torch.zeros(shape), b, arrival=arrival, deadline=2.0), torch.zeros(*shape[:2], 7))
