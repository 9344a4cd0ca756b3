"""`Arrival`: bad values raise before anything runs, naming argument, value and rule; rounds; what it says of itself."""

# ruff: noqa: E501  (tables of messages: each in one piece, so that it can be searched for)

from __future__ import annotations

import re
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilestream import Arrival
from tilestream.arrival import Chunks, Signals
from tilestream.core.chunks import chunks_of

words = torch.zeros(3, dtype=torch.int32)


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


class TestRefused:
    @pytest.mark.parametrize("value", [0, -1, -128, 2.5, 2.0, "4", None])
    def test_rows_per_chunk(self, value):
        with refused(ValueError, f"rows_per_chunk={value!r}: a uniform arrival has a positive whole number of them"):
            Arrival.uniform(value, 3)

    @pytest.mark.parametrize("value", [0, -1, 1.5, "3", None])
    def test_num_chunks(self, value):
        with refused(ValueError, f"num_chunks={value!r}: a uniform arrival has a positive whole number of them"):
            Arrival.uniform(4, value)

    @pytest.mark.parametrize("pivot", [-1, 3, 4, 10**9])
    @pytest.mark.parametrize("make", [lambda p: Arrival.uniform(4, 3, p), lambda p: Arrival.ragged([0, 1, 2, 3], p)])
    def test_pivot(self, make, pivot):
        with refused(ValueError, f"pivot={pivot}: the raster starts from one of the 3 chunks, 0 to 2"):
            make(pivot)

    @pytest.mark.parametrize("pivot", [0.5, 1.0, "1", None])
    def test_pivot_that_is_no_whole_number(self, pivot):
        with refused(ValueError, f"pivot={pivot}: the raster starts from one of the 3 chunks, 0 to 2"):
            Arrival.uniform(4, 3, pivot)

    @pytest.mark.parametrize(
        ("bounds", "message"),
        [
            ([], "bounds=[]: no chunk; give the first row of each chunk and then the number of rows"),
            ([0], "bounds=[0]: no chunk; give the first row of each chunk and then the number of rows"),
            ([2, 5], "bounds=[2, 5]: they begin with 2; the first chunk begins at row 0"),
            ([0, 5, 3, 9], "bounds=[0, 5, 3, 9]: chunk 1 would end at row 3, before its first row 5"),
            ([0, 2**31], "bounds=[0, 2147483648]: 2147483648 rows; rows are counted in 31 bits"),
        ],
    )
    def test_bounds(self, bounds, message):
        with refused(ValueError, message):
            Arrival.ragged(bounds)

    @pytest.mark.parametrize("bounds", [[0, 2.7, 5], [0, 5.0], "012", [0, None]])
    def test_bounds_that_are_no_whole_numbers(self, bounds):
        with refused(TypeError, f"bounds={bounds!r}; they are whole numbers of rows"):
            Arrival.ragged(bounds)

    @pytest.mark.parametrize(
        ("signals", "error", "message"),
        [
            ([0, 0, 0], TypeError, "signals: list; it is a torch tensor of int32 or uint32"),
            (words.long(), TypeError, "signals: dtype torch.int64; signal words are torch.int32 or torch.uint32"),
            (words.float(), TypeError, "signals: dtype torch.float32; signal words are torch.int32 or torch.uint32"),
            (words.bool(), TypeError, "signals: dtype torch.bool; signal words are torch.int32 or torch.uint32"),
            (words[:2], ValueError, "signals: shape (2,); there is one word a chunk: (3,)"),
            (words.view(1, 3), ValueError, "signals: shape (1, 3); there is one word a chunk: (3,)"),
            (words[0], ValueError, "signals: shape (); there is one word a chunk: (3,)"),
            (torch.zeros(6, dtype=torch.int32)[::2], ValueError, "signals: stride (2,); the words lie side by side: pass signals.contiguous()"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize(
        "make", [lambda s: Arrival.uniform(4, 3, 0, s), lambda s: Arrival.ragged([0, 1, 2, 3], 0, s)]
    )
    def test_signals(self, make, signals, error, message):
        with refused(error, message):
            make(signals)

    def test_signals_on_a_device_without_memory(self):
        with refused(ValueError, "signals: on the meta device, which has no memory; they are on the input's device"):
            Arrival.uniform(4, 3, signals=torch.zeros(3, dtype=torch.int32, device="meta"))

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (8, "arrival: 3 chunks of 4 rows bring 9 to 12 rows, the input has 8; it takes num_chunks=2"),
            (13, "arrival: 3 chunks of 4 rows bring 9 to 12 rows, the input has 13; it takes num_chunks=4"),
            (0, "arrival: 3 chunks of 4 rows bring 9 to 12 rows, the input has 0; it takes num_chunks=1"),
        ],
    )
    def test_uniform_chunks_that_do_not_cover_the_rows(self, rows, message):
        with refused(ValueError, message):
            Arrival.uniform(4, 3).chunks(rows)

    @pytest.mark.parametrize("rows", [0, 4, 6])
    def test_bounds_that_do_not_cover_the_rows(self, rows):
        message = f"arrival: its bounds end at row 5, the input has {rows} rows; the last bound is the number of rows"
        with refused(ValueError, message):
            Arrival.ragged([0, 2, 5]).chunks(rows)

    @pytest.mark.parametrize("chunk", [-1, 3, 100])
    def test_signal_of_no_chunk(self, chunk):
        with refused(IndexError, f"signal: chunk={chunk}; there are 3 chunks, from 0"):
            Arrival.uniform(4, 3).signal(chunk)

    @pytest.mark.parametrize("chunk", [-1, 3])
    def test_asking_for_no_chunk(self, chunk):
        arrival = Arrival.uniform(4, 3)
        arrival.signal(2)
        with refused(IndexError, f"signal: chunk={chunk}; there are 3 chunks, from 0"):
            arrival.arrived(chunk)


class TestChunks:
    @pytest.mark.parametrize("rows", [9, 10, 11, 12])
    def test_uniform(self, rows):
        arrival = Arrival.uniform(4, 3, pivot=2)
        assert arrival.chunks(rows) == Chunks((0, 4, 8, rows), 4)
        assert (arrival.num_chunks, arrival.rows_per_chunk, arrival.bounds, arrival.pivot) == (3, 4, (), 2)

    def test_ragged(self):
        arrival = Arrival.ragged([0, 3, 3, 7], pivot=1)
        assert arrival.chunks(7) == Chunks((0, 3, 3, 7))
        assert (arrival.num_chunks, arrival.rows_per_chunk, arrival.bounds, arrival.pivot) == (3, 0, (0, 3, 3, 7), 1)

    def test_bounds_may_be_a_tensor_or_numpy(self):
        assert Arrival.ragged(torch.tensor([0, 3, 7])).bounds == (0, 3, 7)
        assert Arrival.ragged(torch.tensor([0, 3, 7]).numpy()).bounds == (0, 3, 7)

    @given(st.integers(1, 10**6), st.integers(1, 10**4))
    def test_chunks_of_takes_just_the_number_that_covers(self, rows, size):
        count = -(-rows // size)
        if count > 5000:
            return
        assert chunks_of(rows, count, size, ()).rows == rows
        for wrong in {count - 1, count + 1} - {0}:
            with pytest.raises(ValueError, match=f"it takes num_chunks={count}$"):
                chunks_of(rows, wrong, size, ())


class TestRounds:
    @pytest.fixture(params=["own", "caller's"])
    def arrival(self, request):
        return Arrival.uniform(4, 3, signals=None if request.param == "own" else torch.zeros(3, dtype=torch.int32))

    def test_a_chunk_has_arrived_once_it_is_signalled_and_no_other_has(self, arrival):
        arrival.signal(1)
        assert [arrival.arrived(c) for c in range(3)] == [False, True, False]

    def test_nothing_has_arrived_in_the_next_round(self, arrival):
        for chunk in range(3):
            arrival.signal(chunk)
        arrival.advance()
        assert not any(arrival.arrived(c) for c in range(3))
        assert arrival.times == (None, None, None)

    def test_a_failure_belongs_to_its_round(self, arrival):
        error = OSError("disk")
        arrival.fail(error)
        assert arrival.error is error
        arrival.advance()
        assert arrival.error is None

    def test_times_are_when_each_chunk_was_signalled(self, arrival):
        arrival.signal(2)
        arrival.signal(0)
        assert arrival.times[1] is None
        assert arrival.times[2] <= arrival.times[0]

    def test_a_late_signal_of_an_earlier_round_does_not_count(self):
        arrival = Arrival.uniform(4, 3)
        before = arrival.epoch
        now = arrival.advance()
        arrival.signal(0, epoch=before)
        arrival.fail(OSError("late"), epoch=before)
        assert now == arrival.epoch == before + 1
        assert not arrival.arrived(0)
        assert arrival.times[0] is None
        assert arrival.error is None

    def test_a_late_signal_does_not_take_back_one_of_this_round(self):
        arrival = Arrival.uniform(4, 3)
        arrival.advance()
        arrival.signal(0)
        arrival.signal(0, epoch=1)
        assert arrival.arrived(0)

    def test_a_caller_s_words_are_his(self):
        mine = torch.zeros(3, dtype=torch.int32)
        arrival = Arrival.uniform(4, 3, signals=mine)
        assert arrival.signals is mine
        arrival.signal(1)
        assert mine.tolist() == [0, 1, 0]
        mine[2] = -7  # anything but zero
        assert arrival.arrived(2)
        assert arrival.epoch == 1
        assert arrival.advance() == 1, "self-reset words have no epochs"
        assert mine.tolist() == [0, 0, 0]

    def test_words_that_are_set_before_the_arrival_is_made_count(self):
        assert Arrival.uniform(4, 2, signals=torch.tensor([0, 5], dtype=torch.int32)).arrived(1)

    def test_signals_from_many_threads(self):
        arrival = Arrival.uniform(1, 200)
        threads = [threading.Thread(target=lambda w=w: [arrival.signal(c) for c in range(w, 200, 8)]) for w in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(arrival.arrived(c) for c in range(200))
        assert None not in arrival.times


def test_own_arrivals_share_no_words():
    first, second = Arrival.uniform(4, 3), Arrival.uniform(4, 3)
    first.signal(0)
    assert not second.arrived(0)
    assert first.key != second.key


def test_key_finds_the_signals_as_long_as_the_arrival_lives():
    arrival = Arrival.uniform(4, 3)
    key = arrival.key
    arrival.signal(1)
    assert Signals.by_key(key).arrived(1)
    del arrival
    with pytest.raises(KeyError):
        Signals.by_key(key)


def test_repr_says_how_far_it_is():
    arrival = Arrival.uniform(4, 3, pivot=1)
    arrival.signal(1)
    assert repr(arrival) == "Arrival(rows_per_chunk=4, num_chunks=3, pivot=1, arrived=1, epoch=1)"
    assert repr(Arrival.ragged([0, 5])) == "Arrival(ragged, num_chunks=1, pivot=0, arrived=0, epoch=1)"
