"""`Arrival`: bad values raise before anything runs, naming argument, value and rule; epochs; what it says of itself."""

# ruff: noqa: E501  (tables of messages: each in one piece, so that it can be searched for)

from __future__ import annotations

import copy
import pickle
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


def both_kinds(**how):
    """Three chunks, uniform and ragged."""
    yield lambda: Arrival.uniform(4, 3, **how)
    yield lambda: Arrival.ragged([0, 1, 2, 3], **how)


NO_CHUNK = "no chunk; give the first row of each chunk and then the number of rows"
DTYPES = "signal words are torch.int32 or torch.uint32"


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "value"),
        [("rows_per_chunk", x) for x in (0, -1, -128, 2.5, 2.0, "4", None)] + [("num_chunks", x) for x in (0, -1, 1.5, "3", None)],
    )  # fmt: skip
    def test_numbers(self, name, value):
        with refused(ValueError, f"{name}={value!r}: a uniform arrival has a positive whole number of them"):
            Arrival.uniform(**{"rows_per_chunk": 4, "num_chunks": 3, name: value})

    @pytest.mark.parametrize("pivot", [-1, 3, 4, 10**9, 0.5, 1.0, "1", None])
    def test_pivot(self, pivot):
        for make in both_kinds(pivot=pivot):
            with refused(ValueError, f"pivot={pivot}: the raster starts from one of the 3 chunks, 0 to 2"):
                make()

    @pytest.mark.parametrize(
        ("bounds", "error", "message"),
        [
            ([], ValueError, f"bounds=[]: {NO_CHUNK}"),
            ([0], ValueError, f"bounds=[0]: {NO_CHUNK}"),
            ([2, 5], ValueError, "bounds=[2, 5]: they begin with 2; the first chunk begins at row 0"),
            ([0, 5, 3, 9], ValueError, "bounds=[0, 5, 3, 9]: chunk 1 would end at row 3, before its first row 5"),
            ([0, 2**31], ValueError, "bounds=[0, 2147483648]: 2147483648 rows; rows are counted in 31 bits"),
            ([0, 2.7, 5], TypeError, "bounds=[0, 2.7, 5]; they are whole numbers of rows"),
            ([0, 5.0], TypeError, "bounds=[0, 5.0]; they are whole numbers of rows"),
            ("012", TypeError, "bounds='012'; they are whole numbers of rows"),
            ([0, None], TypeError, "bounds=[0, None]; they are whole numbers of rows"),
        ],
    )
    def test_bounds(self, bounds, error, message):
        with refused(error, message):
            Arrival.ragged(bounds)

    @pytest.mark.parametrize(
        ("signals", "error", "message"),
        [
            ([0, 0, 0], TypeError, "list; it must be a torch tensor of int32 or uint32"),
            (words.long(), TypeError, f"dtype torch.int64; {DTYPES}"),
            (words.float(), TypeError, f"dtype torch.float32; {DTYPES}"),
            (words.bool(), TypeError, f"dtype torch.bool; {DTYPES}"),
            (words[:2], ValueError, "shape (2,); there is one word a chunk: (3,)"),
            (words.view(1, 3), ValueError, "shape (1, 3); there is one word a chunk: (3,)"),
            (words[0], ValueError, "shape (); there is one word a chunk: (3,)"),
            (torch.zeros(6, dtype=torch.int32)[::2], ValueError, "stride (2,); the words lie side by side: pass signals.contiguous()"),
            (words.to("meta"), ValueError, "on the meta device, which has no memory; they are on the input's device"),
        ],
    )  # fmt: skip
    def test_signals(self, signals, error, message):
        for make in both_kinds(signals=signals):
            with refused(error, f"signals: {message}"):
                make()

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (8, "arrival: 3 chunks of 4 rows bring 9 to 12 rows, the input has 8; it takes num_chunks=2"),
            (13, "arrival: 3 chunks of 4 rows bring 9 to 12 rows, the input has 13; it takes num_chunks=4"),
            (0, "arrival: 3 chunks of 4 rows bring 9 to 12 rows, the input has 0; it takes num_chunks=1"),
        ],
    )
    def test_chunks_that_do_not_cover_the_rows(self, rows, message):
        with refused(ValueError, message):
            Arrival.uniform(4, 3).chunks(rows)
        message = f"arrival: its bounds end at row 5, the input has {rows} rows; the last bound is the number of rows"
        with refused(ValueError, message):
            Arrival.ragged([0, 2, 5]).chunks(rows)

    @pytest.mark.parametrize("chunk", [-1, 3, 100])
    def test_a_chunk_that_does_not_exist(self, chunk):
        arrival = Arrival.uniform(4, 3)
        for ask in (arrival.signal, arrival.arrived):
            with refused(IndexError, f"signal: chunk={chunk}; there are 3 chunks, from 0"):
                ask(chunk)


class TestChunks:
    def test_uniform_and_ragged(self):
        uniform, ragged = Arrival.uniform(4, 3, pivot=2), Arrival.ragged([0, 3, 3, 7], pivot=1)
        for rows in (9, 10, 11, 12):
            assert uniform.chunks(rows) == Chunks((0, 4, 8, rows), 4)
        assert ragged.chunks(7) == Chunks((0, 3, 3, 7))
        for arrival, told in ((uniform, (3, 4, (), 2)), (ragged, (3, 0, (0, 3, 3, 7), 1))):
            assert (arrival.num_chunks, arrival.rows_per_chunk, arrival.bounds, arrival.pivot) == told
        for bounds in (torch.tensor([0, 3, 7]), torch.tensor([0, 3, 7]).numpy()):
            assert Arrival.ragged(bounds).bounds == (0, 3, 7)

    @given(st.integers(1, 10**6), st.integers(1, 10**4))
    def test_chunks_of_takes_just_the_number_that_covers(self, rows, size):
        count = -(-rows // size)
        if count > 5000:
            return
        assert chunks_of(rows, count, size, ()).rows == rows
        for wrong in {count - 1, count + 1} - {0}:
            with pytest.raises(ValueError, match=f"it takes num_chunks={count}$"):
                chunks_of(rows, wrong, size, ())


class TestEpochs:
    """More on them: `test_signals.py`."""

    @pytest.mark.parametrize("mine", [None, torch.zeros(3, dtype=torch.int32)], ids=["ours", "a caller's"])
    def test_what_was_signalled_belongs_to_its_epoch(self, mine):
        arrival, error = Arrival.uniform(4, 3, signals=mine), OSError("disk")
        arrival.signal(2)
        arrival.signal(0)
        arrival.fail(error)
        assert [arrival.arrived(c) for c in range(3)] == [True, False, True]
        assert arrival.times[1] is None
        assert arrival.times[2] <= arrival.times[0]
        assert arrival.error is error
        arrival.advance()
        assert not any(arrival.arrived(c) for c in range(3))
        assert arrival.times == (None, None, None)
        assert arrival.error is None

    def test_a_late_signal_neither_counts_nor_takes_one_back(self):
        arrival = Arrival.uniform(4, 3)
        before = arrival.epoch
        assert arrival.advance() == arrival.epoch == before + 1
        for arrived in (False, True):
            if arrived:
                arrival.signal(0)
            arrival.signal(0, epoch=before)
            arrival.fail(OSError("late"), epoch=before)
            assert arrival.arrived(0) is arrived
            assert (arrival.times[0] is not None) is arrived
            assert arrival.error is None

    def test_a_callers_words(self):
        mine = torch.tensor([0, 0, 5], dtype=torch.int32)
        arrival = Arrival.uniform(4, 3, signals=mine)
        assert arrival.signals is mine
        assert arrival.arrived(2), "set before the arrival was made"
        arrival.signal(1)
        assert mine.tolist() == [0, 1, 5]
        mine[0] = -7  # anything but zero
        assert arrival.arrived(0)
        assert arrival.epoch == 1
        assert arrival.advance() == 1, "self-reset words have no epochs"
        assert mine.tolist() == [0, 0, 0]
        mine[1] = 1
        arrival.reset()
        assert mine.tolist() == [0, 0, 0]

    def test_signals_from_many_threads(self):
        arrival = Arrival.uniform(1, 200)
        threads = [threading.Thread(target=lambda w=w: [arrival.signal(c) for c in range(w, 200, 8)]) for w in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(arrival.arrived(c) for c in range(200))
        assert None not in arrival.times


def test_each_arrival_has_words_and_a_key_of_its_own_as_long_as_it_lives():
    first, second = Arrival.uniform(4, 3), Arrival.uniform(4, 3)
    first.signal(0)
    assert not second.arrived(0)
    key = first.key
    assert key != second.key
    assert Signals.by_key(key).arrived(0)
    del first
    with pytest.raises(KeyError):
        Signals.by_key(key)


def test_repr_says_how_far_it_is():
    arrival = Arrival.uniform(4, 3, pivot=1)
    arrival.signal(1)
    assert repr(arrival) == "Arrival(rows_per_chunk=4, num_chunks=3, pivot=1, arrived=1, epoch=1)"
    assert repr(Arrival.ragged([0, 5])) == "Arrival(ragged, num_chunks=1, pivot=0, arrived=0, epoch=1)"


@pytest.mark.parametrize("name", ["num_chunks", "rows_per_chunk", "bounds", "pivot", "signals"])
def test_what_signals_were_made_by_is_final(name):
    arrival = Arrival.uniform(4, 3)
    with pytest.raises(AttributeError, match=f"^Arrival: {name} is final: its signals were made by it"):
        setattr(arrival, name, 2)


@pytest.mark.parametrize("through", [pickle.dumps, copy.deepcopy])
def test_an_arrival_that_is_pickled_says_why_not(through):
    with pytest.raises(TypeError, match=r"words in this process's memory: send num_chunks, rows_per_chunk"):
        through(Arrival.uniform(4, 2))
