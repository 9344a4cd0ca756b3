"""The public ops on operands that arrive: forms, dtypes, out=, the caller's own signals, streams."""

from __future__ import annotations

import threading

import pytest
import torch

import tilestream as ts
from error_rule import DTYPES, Maths, check, nans, rand
from streaming import Feeder, fed, from_pivot, late, no_thread_left

pytestmark = pytest.mark.usefixtures("small_tiles")

SCHEDULES = ("static", "dynamic", "stream_k")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("schedule", ["auto", *SCHEDULES])
def test_matmul_of_rows_that_arrive(dtype, schedule):
    source, b = rand(50, 40, dtype=dtype), rand(40, 37, dtype=dtype)
    arrival, maths = ts.Arrival.uniform(12, 5, pivot=3), {"activation": "relu"}
    if dtype in DTYPES:
        maths |= {"bias": rand(37, dtype=dtype), "residual": rand(50, 37, dtype=dtype)}
    else:
        maths |= {"scale_a": rand(50, 1).exp(), "scale_b": rand(1, 37).exp()}
    with no_thread_left():
        answer = fed(
            lambda x: ts.matmul(x, b, **maths, arrival=arrival, schedule=schedule, workers=3),
            arrival, source, order=from_pivot(arrival), before=late(0),
        )  # fmt: skip
    check(answer, Maths(source, b, **maths))


#: [3, 20, 24] activations, all NaN, by how they lie in memory.
LAYOUTS = {
    "contiguous": lambda: nans(3, 20, 24),
    "every other row": lambda: nans(3, 40, 24)[:, ::2],
    "columns of a wider one": lambda: nans(3, 20, 48)[..., 12:36],
    "first rows of longer ones": lambda: nans(3, 33, 24)[:, :20],
    "sequence first": lambda: nans(20, 3, 24).transpose(0, 1),
    "K outermost": lambda: nans(24, 3, 20).permute(1, 2, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_3d_activations_whatever_their_strides(layout, schedule):
    source, weight, bias = rand(3, 20, 24), rand(18, 24), rand(18)
    arrival = ts.Arrival.uniform(13, 5, pivot=2)
    answer = fed(
        lambda x: ts.linear(x, weight, bias, arrival=arrival, schedule=schedule, workers=2),
        arrival, source, LAYOUTS[layout](), order=from_pivot(arrival), before=late(1),
    )  # fmt: skip
    check(answer, Maths(source, weight.t(), bias))


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 20, 33, 60])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bmm_with_arrival(schedule, rows_per_chunk):
    source, b = rand(3, 20, 24), rand(3, 24, 18)
    count = -(-60 // rows_per_chunk)
    for pivot in {0, count - 1}:
        arrival = ts.Arrival.uniform(rows_per_chunk, count, pivot=pivot)
        answer = fed(
            lambda x, arrival=arrival: ts.bmm(x, b, arrival=arrival, schedule=schedule, workers=2),
            arrival, source, order=from_pivot(arrival), before=late(count // 2),
        )  # fmt: skip
        check(answer, Maths(source, b))


#: Shapes of the operand that arrives and of the other, and its chunks; the first three bring a row of all batches.
FORMS = {
    "4-D batches": ((2, 3, 20, 24), (2, 3, 24, 18), (25, 5)),
    "batches of one row": ((5, 1, 24), (5, 24, 18), (2, 3)),
    "a matrix for a vector": ((50, 24), (24,), (20, 3)),
    "one matrix for all batches": ((40, 24), (3, 24, 18), (16, 3)),
    "one batch for all": ((1, 40, 24), (3, 24, 18), (16, 3)),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_arrive(form):
    shape_a, shape_b, chunks = FORMS[form]
    source, b = rand(*shape_a), rand(*shape_b)
    for pivot in range(chunks[1]):
        arrival = ts.Arrival.uniform(*chunks, pivot=pivot)
        answer = fed(
            lambda x, arrival=arrival: ts.matmul(x, b, arrival=arrival, workers=2),
            arrival, source, order=from_pivot(arrival), before=late((pivot + 1) % chunks[1]),
        )  # fmt: skip
        check(answer, Maths(source, b))


def test_a_vector_arrives():
    source, b = rand(24), rand(24, 18)
    x, arrival = nans(24), ts.Arrival.uniform(1, 1)
    with Feeder(arrival, x.unsqueeze(0), source.unsqueeze(0), before=late(0)):
        check(ts.matmul(x, b, arrival=arrival, workers=2), Maths(source, b))


@pytest.mark.parametrize("shape_x", [(24,), (20, 24), (2, 10, 24)], ids=str)
@pytest.mark.parametrize("pivot", range(4))
def test_weight_arrival(shape_x, pivot):
    x, weights, bias = rand(*shape_x), rand(37, 24), rand(37)
    arrival = ts.Arrival.uniform(10, 4, pivot=pivot)
    answer = fed(
        lambda weight: ts.linear(x, weight, bias, weight_arrival=arrival, workers=2),
        arrival, weights, order=from_pivot(arrival), before=late((pivot + 2) % 4),
    )  # fmt: skip
    check(answer, Maths(x, weights.t(), bias))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ragged", [False, True])
def test_both_arrive_at_once(schedule, ragged):
    source, weights = rand(50, 24), rand(37, 24)
    for late_row in range(4):
        for late_column in range(3):
            rows = ts.Arrival.ragged([0, 1, 1, 30, 50], pivot=2) if ragged else ts.Arrival.uniform(13, 4, pivot=2)
            columns = ts.Arrival.ragged([0, 20, 36, 37]) if ragged else ts.Arrival.uniform(13, 3, pivot=1)
            how = {"arrival": rows, "weight_arrival": columns, "schedule": schedule, "workers": 3}
            w = nans(37, 24)
            with Feeder(columns, w, weights, before=late(late_column, 0.003)):
                answer = fed(
                    lambda x, w=w, how=how: ts.linear(x, w, **how), rows, source, before=late(late_row, 0.003)
                )  # fmt: skip
            check(answer, Maths(source, weights.t()))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arrival_into_out_that_is_the_residual(schedule):
    source, b, buffer = rand(50, 24), rand(24, 37), rand(37, 60)
    out = buffer[:, 5:55].t()
    maths = Maths(source, b, None, out.clone(), alpha=0.5, beta=2.0)
    arrival = ts.Arrival.uniform(20, 3)
    how = {"alpha": 0.5, "beta": 2, "out": out, "arrival": arrival, "schedule": schedule, "workers": 2}
    assert fed(lambda x: ts.addmm(out, x, b, **how), arrival, source, before=late(1)) is out
    check(out, maths)


def test_transposed_operand_that_arrives_by_its_rows():
    # b is stored [N, K]; a is a view of a [K, M] buffer: a's rows are that buffer's columns.
    source, b, arrival = rand(50, 24), rand(24, 37), ts.Arrival.uniform(20, 3)
    answer = fed(
        lambda x: ts.matmul(x, b, arrival=arrival, workers=2), arrival, source, nans(24, 50).t(), before=late(1)
    )
    check(answer, Maths(source, b))


# Rounds ---------------------------------------------------------------------------------------------------------------


def test_invariant_4_epochs_of_our_own_signals():
    b, c, x, arrival = rand(24, 37), rand(24, 20), nans(50, 24), ts.Arrival.uniform(20, 3)
    for epoch in range(1, 6):
        assert arrival.epoch == epoch
        assert not any(arrival.arrived(c) for c in range(3))
        fresh = rand(50, 24, seed=epoch)
        x.fill_(float("nan"))
        answer = fed(
            lambda x: ts.matmul(x, b, arrival=arrival, workers=2), arrival, fresh, x, before=late(epoch % 3, 0.003)
        )
        check(answer, Maths(fresh, b))
        assert all(arrival.arrived(c) for c in range(3)), "our own words are never cleared"
        # A second call of the same round waits for nothing.
        check(ts.matmul(x, c, arrival=arrival, workers=2, deadline=1.0), Maths(fresh, c))
        arrival.advance()


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
        check(ts.matmul(x, b, arrival=arrival, workers=2, deadline=600), Maths(fresh, b))
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
    answer = ts.matmul(x, b, arrival=arrival, workers=2, deadline=600)
    timer.join()
    assert seen == [[1, 0, 1]], "zeroed before chunk 1 was seen"
    assert words.tolist() == [0, 0, 0]
    check(answer, Maths(x, b))


def test_words_that_already_stand_are_enough():
    x, w = rand(50, 24), rand(37, 24)
    first, second = torch.full((3,), -1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)  # anything but zero
    rows, columns = ts.Arrival.uniform(20, 3, signals=first), ts.Arrival.uniform(20, 2, signals=second)
    check(ts.linear(x, w, arrival=rows, weight_arrival=columns, workers=2, deadline=1), Maths(x, w.t()))
    assert [first.tolist(), second.tolist()] == [[0, 0, 0], [0, 0]]


# Streams --------------------------------------------------------------------------------------------------------------


def test_stream_of_a_tensor_restarted():
    source, b = rand(50, 24), rand(24, 37)
    with ts.stream_in(source, rows_per_chunk=7, pivot=3) as stream:
        for _ in range(3):
            check(ts.matmul(stream.tensor, b, arrival=stream.arrival, workers=2), Maths(source, b))
            stream.wait(300)
            stream.tensor.fill_(float("nan"))
            stream.restart()
        stream.wait(300)


def test_a_producer_that_itself_multiplies():
    # Re-entrancy: the iterator's blocks are products of this package, made while the outer call waits for them.
    base, inner, outer = rand(60, 24), rand(24, 24), rand(24, 37)

    def blocks():
        for row in range(0, 60, 12):
            part = ts.stream_in(base[row : row + 12], rows_per_chunk=5)
            yield ts.matmul(part.tensor, inner, arrival=part.arrival, workers=2)

    with no_thread_left():
        stream = ts.stream_in(blocks(), shape=(60, 24), dtype=torch.float32, rows_per_chunk=10)
        answer = ts.matmul(stream.tensor, outer, arrival=stream.arrival, workers=2, deadline=600)
        stream.wait(300)
        stream.close()
    through = ts.matmul(base, inner)
    check(answer, Maths(through, outer))


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        *(((m, k), (k, n)) for m, n, k in ((0, 5, 4), (6, 0, 4), (6, 5, 0))),
        *(((batch, m, k), (batch, k, 7)) for batch, m, k in ((0, 4, 5), (3, 0, 5), (3, 4, 0))),
    ],
    ids=str,
)
def test_nothing_to_compute_with_arrival(shape_a, shape_b):
    arrival = ts.Arrival.uniform(12, 1)
    arrival.signal(0)
    answer = ts.matmul(torch.zeros(shape_a), torch.zeros(shape_b), arrival=arrival, deadline=2.0, workers=2)
    assert torch.equal(answer, torch.zeros(*shape_a[:-1], shape_b[-1]))
