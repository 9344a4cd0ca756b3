"""Late and dead producers, exceptions anywhere, interrupts: no worker stays at work, and no result is wrong."""

from __future__ import annotations

import contextlib
import gc
import pickle
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import tilestream as ts
from error_rule import Maths, check, nans, rand
from streaming import Feeder, intra_op_threads_of_a_new_thread, late, new_workers, no_thread_left, run_together
from tilestream.kernels.cpu.gemm import GemmBody
from tilestream.launch.cpu import threads as pinning

pytestmark = pytest.mark.usefixtures("small_tiles")

SCHEDULES = ("static", "dynamic", "stream_k")
LONG = 300.0  # seconds that only what waits for ever takes
M, N, K, TILE, ROWS = 64, 40, 24, 16, 16


@pytest.fixture(params=["own number", "changing the default"])
def _both_ways_to_pin(request, monkeypatch):
    """With libgomp's call that sets one thread's number, and without it, as a torch built otherwise has it."""
    if request.param == "changing the default":
        monkeypatch.setattr(pinning, "own_setters", lambda: None)


def four_chunks(**options) -> ts.Arrival:
    return ts.Arrival.uniform(ROWS, 4, **options)


def planned(arrival, schedule="dynamic", workers=3, order=None) -> ts.Plan:
    return ts.plan(M, N, K, tile=(TILE, TILE), schedule=schedule, workers=workers, arrival=arrival, order=order)


def first_wait_of(arrival, monkeypatch) -> threading.Event:
    """Set when somebody first waits for a chunk."""
    waits, sleep = threading.Event(), arrival._signals._bell.wait
    monkeypatch.setattr(arrival._signals._bell, "wait", lambda seconds: waits.set() or sleep(seconds))
    return waits


# Expiry ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("missing", range(4))
def test_invariant_5_a_chunk_that_never_comes(schedule, workers, missing):
    source, b, x, out = rand(M, K), rand(K, N), nans(M, K), torch.zeros(M, N)
    arrival = four_chunks()
    for chunk in range(4):
        if chunk != missing:
            x[16 * chunk : 16 * chunk + 16] = source[16 * chunk : 16 * chunk + 16]
            arrival.signal(chunk)
    mine, default = torch.get_num_threads(), intra_op_threads_of_a_new_thread()
    plan = planned(arrival, schedule, workers)
    begin = time.perf_counter()
    with no_thread_left(), pytest.raises(ts.ArrivalTimeout) as caught:
        plan.run(x, b, out=out, arrival=arrival, deadline=0.05)
    took = time.perf_counter() - begin
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert isinstance(error, ts.TilestreamError)
    assert (error.op, error.chunk, error.deadline, error.rank) == ("plan.run", missing, 0.05, None)
    assert 0 <= error.worker < workers
    assert 0 < error.waited <= took
    assert (torch.get_num_threads(), intra_op_threads_of_a_new_thread()) == (mine, default)
    # What was computed is right, the rest is NaN, and nothing else: tile by tile.
    correct = Maths(source, b).finer()
    for m in range(4):
        for n in range(0, N, TILE):
            tile, right = out[16 * m : 16 * m + 16, n : n + 16], correct[16 * m : 16 * m + 16, n : n + 16]
            if tile.isnan().any():
                assert tile.isnan().all()
                continue
            assert m != missing
            torch.testing.assert_close(tile.double(), right, rtol=1e-4, atol=1e-4)
    assert out[16 * missing : 16 * missing + 16].isnan().all()


@pytest.mark.parametrize("order", ["arrival", "chunk_major"])
def test_the_record_of_an_expiry_names_the_first_item_not_taken(order):
    x, b, out = rand(M, K), rand(K, N), nans(M, N)
    arrival = four_chunks()
    for chunk in (0, 1, 3):
        arrival.signal(chunk)
    with pytest.raises(ts.ArrivalTimeout) as caught:
        planned(arrival, workers=1, order=order).run(x, b, out=out, arrival=arrival, deadline=0.3)
    # The first tile of row tile 2, and tile ids count columns first.
    assert caught.value.item == "tile 6 (row tile 2, column tile 0)"
    assert caught.value.worker == 0
    message = str(caught.value)
    for part in (
        "plan.run: arrival's chunk 2 did not arrive within the deadline of 0.3 s",
        "worker 0 waited",
        "tile 6",
        "What was not computed is NaN",
        "larger deadline=",
    ):
        assert part in message
    assert not out[:32].isnan().any()
    assert out[32:48].isnan().all()
    if order == "arrival":
        assert not out[48:].isnan().any(), "a late chunk holds up no tile but its own"
        assert caught.value.waited >= 0.05, "what it waited for several queues is counted"
    else:
        assert out[48:].isnan().all(), "one worker takes nothing behind the tile it could not do"


def test_an_expiry_can_be_pickled():
    error = ts.ArrivalTimeout("matmul", 2, 3, "tile 5", 0.5, 1.5, rank=4)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert "rank 4, worker 2" in str(error)


OPS = {
    "matmul": lambda **how: ts.matmul(rand(M, K), rand(K, N), **how),
    "mm": lambda **how: ts.mm(rand(M, K), rand(K, N), **how),
    "addmm": lambda **how: ts.addmm(rand(N), rand(M, K), rand(K, N), **how),
    "linear": lambda **how: ts.linear(rand(M, K), rand(N, K), **how),
}


@pytest.mark.parametrize("op", OPS)
def test_the_expiry_of_an_op_names_it(op):
    with pytest.raises(ts.ArrivalTimeout) as caught:
        OPS[op](arrival=four_chunks(), deadline=0.02)
    assert caught.value.op == op


def test_the_expiry_says_which_operand():
    x, w = rand(M, K), rand(N, K)
    rows, columns = four_chunks(), ts.Arrival.uniform(20, 2)
    for chunk in range(4):
        rows.signal(chunk)
    with pytest.raises(ts.ArrivalTimeout) as caught:
        ts.linear(x, w, arrival=rows, weight_arrival=columns, deadline=0.02)
    assert "weight" in str(caught.value)


def test_one_deadline_for_all_waits_together(monkeypatch):
    # Each chunk comes within the deadline of the one before, but all of them together do not.
    source, b, x = rand(M, K), rand(K, N), nans(M, K)
    arrival = four_chunks()
    waits = first_wait_of(arrival, monkeypatch)
    feeder = Feeder(arrival, x, source, before=lambda c: waits.wait(LONG) and time.sleep(0.2))
    with feeder, pytest.raises(ts.ArrivalTimeout):
        ts.matmul(x, b, arrival=arrival, deadline=0.45, workers=2)


def test_the_call_after_an_expiry_is_right():
    source, b, x = rand(M, K), rand(K, N), nans(M, K)
    for schedule in SCHEDULES:
        arrival = four_chunks()
        for _ in range(3):
            with pytest.raises(ts.ArrivalTimeout):
                planned(arrival, schedule).run(x, b, arrival=arrival, deadline=0.01)
            check(ts.matmul(source, b, workers=3, schedule=schedule), Maths(source, b))
            arrival.advance()
            x.fill_(float("nan"))
            with Feeder(arrival, x, source, before=late(1, 0.003)):
                check(planned(arrival, schedule).run(x, b, out=nans(M, N), arrival=arrival), Maths(source, b))
            arrival.advance()


def test_invariant_4_a_late_producer_does_not_speak_for_the_next_round():
    old, new, b, x = rand(M, K, seed=1), rand(M, K, seed=2), rand(K, N), nans(M, K)
    arrival = four_chunks()
    epoch = arrival.epoch
    with pytest.raises(ts.ArrivalTimeout):
        ts.matmul(x, b, arrival=arrival, deadline=0.02, workers=2)
    arrival.advance()
    for chunk in range(4):  # the old round's producer wakes up, and writes into a buffer of its own
        arrival.signal(chunk, epoch=epoch)
    assert not any(arrival.arrived(chunk) for chunk in range(4))
    arrival.fail(RuntimeError("of the old round"), epoch=epoch)
    assert arrival.error is None
    with Feeder(arrival, x, new, before=late(0, 0.02)):
        check(ts.matmul(x, b, arrival=arrival, workers=2), Maths(new, b))
    assert not torch.equal(old, new)


def test_invariant_4_after_an_expiry_a_callers_words_are_left_alone():
    words = torch.zeros(4, dtype=torch.int32)
    arrival = four_chunks(signals=words)
    words[1] = 5
    with pytest.raises(ts.ArrivalTimeout):
        ts.matmul(nans(M, K), rand(K, N), arrival=arrival, deadline=0.02, workers=2)
    assert words.tolist() == [0, 5, 0, 0]
    # And after an expiry in the last look, at a chunk that no tile reads.
    words = torch.tensor([1, 0, 1], dtype=torch.int32)
    ragged = ts.Arrival.ragged([0, 20, 20, 50], signals=words)
    with pytest.raises(ts.ArrivalTimeout) as caught:
        ts.matmul(rand(50, K), rand(K, N), arrival=ragged, deadline=0.1, workers=2)
    assert caught.value.chunk == 1
    assert "no tile reads" in caught.value.item
    assert words.tolist() == [1, 0, 1]


def test_chunks_that_come_after_the_expiry_serve_the_same_round():
    source, b, x = rand(M, K), rand(K, N), nans(M, K)
    arrival = four_chunks()
    with pytest.raises(ts.ArrivalTimeout):
        ts.matmul(x, b, arrival=arrival, deadline=0.01, workers=2)
    with Feeder(arrival, x, source):
        check(ts.matmul(x, b, arrival=arrival, workers=2), Maths(source, b))


# Producers that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("error", [ValueError("disk on fire"), KeyboardInterrupt(), MemoryError()], ids=repr)
def test_a_producers_exception_is_raised_in_the_caller(error, schedule, workers):
    source, b, x, out = rand(M, K), rand(K, N), nans(M, K), torch.zeros(M, N)
    arrival = four_chunks()
    x[:16] = source[:16]
    arrival.signal(0)
    timer = threading.Timer(0.01, lambda: arrival.fail(error))
    begin = time.perf_counter()
    with no_thread_left():
        timer.start()
        with pytest.raises(type(error)) as caught:
            planned(arrival, schedule, workers).run(x, b, out=out, arrival=arrival, deadline=2 * LONG)
        timer.join()
    assert caught.value is error
    assert time.perf_counter() - begin < LONG, "waited for the deadline although the producer had failed"
    assert out[16:].isnan().all()


@pytest.mark.parametrize("workers", [None, 1, 3])
def test_a_stream_whose_iterator_raises(workers):
    class Broken(Exception):
        pass

    error = Broken("second block")

    def blocks():
        yield rand(20, K)
        raise error

    with no_thread_left(), ts.stream_in(blocks(), shape=(M, K), dtype=torch.float32, rows_per_chunk=16) as stream:
        with pytest.raises(Broken) as caught:
            ts.matmul(stream.tensor, rand(K, N), arrival=stream.arrival, workers=workers)
        assert caught.value is error
        with pytest.raises(Broken):
            stream.wait(300)


def test_a_stream_that_is_closed_while_somebody_waits():
    hold = threading.Event()

    def blocks():
        yield rand(16, K)
        hold.wait(300)
        yield rand(M - 16, K)

    with no_thread_left():
        stream = ts.stream_in(blocks(), shape=(M, K), dtype=torch.float32, rows_per_chunk=16)
        closer, releaser = threading.Timer(0.03, stream.close), threading.Timer(0.1, hold.set)
        closer.start()
        releaser.start()
        # Whatever the producer was at when it was told to stop, the caller hears of it long before the deadline.
        begin = time.perf_counter()
        with pytest.raises(ts.ProducerStopped, match="closed before chunk"):
            ts.matmul(stream.tensor, rand(K, N), arrival=stream.arrival, workers=2, deadline=2 * LONG)
        assert time.perf_counter() - begin < LONG
        closer.join()
        releaser.join()
        stream.close()


def test_chunks_that_arrived_before_the_failure_are_enough_for_who_needs_no_more():
    arrival = four_chunks()
    for chunk in range(4):
        arrival.signal(chunk)
    arrival.fail(ValueError("after the last chunk"))
    x, b = rand(M, K), rand(K, N)
    check(ts.matmul(x, b, arrival=arrival, workers=2, deadline=1), Maths(x, b))


# Workers that fail ----------------------------------------------------------------------------------------------------


class Boom(BaseException):
    """Not an Exception: nothing may catch it by accident."""


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_exception_in_a_worker_is_raised_and_the_rest_is_nan(schedule, workers, monkeypatch):
    source, b, out = rand(M, K), rand(K, N), torch.zeros(M, N)
    error, real = Boom("tile 5"), GemmBody.compute

    def compute(self, item):
        if item.tile == 5:
            raise error
        real(self, item)

    monkeypatch.setattr(GemmBody, "compute", compute)
    plan = ts.plan(M, N, K, tile=(TILE, TILE), schedule=schedule, workers=workers)
    with no_thread_left(), pytest.raises(Boom) as caught:
        plan.run(source, b, out=out)
    assert caught.value is error
    correct = Maths(source, b).finer()
    for m in range(4):
        for n in range(3):
            tile = out[16 * m : 16 * m + 16, 16 * n : 16 * n + 16]
            if not tile.isnan().all():
                right = correct[16 * m : 16 * m + 16, 16 * n : 16 * n + 16]
                torch.testing.assert_close(tile.double(), right, rtol=1e-4, atol=1e-4)
    assert out[16:32, 32:].isnan().all()
    monkeypatch.undo()
    check(plan.run(source, b, out=nans(M, N)), Maths(source, b))


def test_an_exception_wakes_those_who_wait_at_the_gate(monkeypatch):
    x, b = rand(M, K), rand(K, N)
    arrival = four_chunks()
    arrival.signal(0)

    def compute(self, item):
        raise Boom("while the others wait")

    monkeypatch.setattr(GemmBody, "compute", compute)
    begin = time.perf_counter()
    with no_thread_left(), pytest.raises(Boom):
        planned(arrival, "static", 4).run(x, b, arrival=arrival, deadline=2 * LONG)
    assert time.perf_counter() - begin < LONG


def test_an_exception_in_the_blas(monkeypatch):
    real, calls = torch.mm, iter(range(10**6))

    def mm(*args, **kwargs):
        if next(calls) == 3:
            raise RuntimeError("no memory")
        return real(*args, **kwargs)

    a, b, out = rand(M, K), rand(K, N), torch.zeros(M, N)
    monkeypatch.setattr(torch, "mm", mm)
    with no_thread_left(), pytest.raises(RuntimeError, match="no memory"):
        ts.matmul(a, b, out=out, workers=2, schedule="dynamic")
    assert out.isnan().any()


def test_an_exception_in_an_inline_call_leaves_no_old_numbers(monkeypatch):
    a, b, out = rand(4, 10, K), rand(4, K, 9), torch.zeros(4, 10, 9)
    assert ts.plan(10, 9, K, batch=4).variant == "inline"
    monkeypatch.setattr(torch, "bmm", lambda *operands, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ts.bmm(a, b, out=out)
    assert out.isnan().all()


@pytest.mark.usefixtures("_both_ways_to_pin")
def test_threads_that_cannot_be_started(monkeypatch):
    real, starts = threading.Thread.start, []

    def start(self):
        if self.name.startswith("tilestream-worker"):
            starts.append(self)
            if len(starts) == 3:
                raise RuntimeError("can't start new thread")
        real(self)

    a, b, out, arrival = rand(M, K), rand(K, N), torch.zeros(M, N), four_chunks()
    mine, default = torch.get_num_threads(), intra_op_threads_of_a_new_thread()
    monkeypatch.setattr(threading.Thread, "start", start)
    with new_workers(monkeypatch):
        with no_thread_left(), pytest.raises(RuntimeError, match="can't start new thread"):
            # Nothing arrives: a worker that ends could do the work of those that are started after it.
            ts.matmul(a, b, out=out, workers=4, arrival=arrival, deadline=2 * LONG)
        assert len(starts) == 3
        assert out.isnan().all()
        assert (torch.get_num_threads(), intra_op_threads_of_a_new_thread()) == (mine, default)
        check(ts.matmul(a, b, workers=4), Maths(a, b))
        assert len(starts) <= 5, "the two threads that were started serve the next launch, too"


# Interrupts -----------------------------------------------------------------------------------------------------------


interrupts_this_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_kill"),
    reason="signals are handled in the main thread",
)


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.fixture
def _interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Slow:
    """Tiles that take their time: those that workers are inside of."""

    def __init__(self, monkeypatch, seconds: float) -> None:
        self.inside, self.entered, real = [], threading.Event(), GemmBody.compute

        def compute(body, item):
            self.inside.append(item.tile)
            self.entered.set()
            try:
                time.sleep(seconds)  # with one worker and one thread, this is the caller's own: it is interrupted here
                real(body, item)
            finally:
                self.inside.remove(item.tile)

        monkeypatch.setattr(GemmBody, "compute", compute)

    def wait(self) -> None:
        """Until no worker is inside of a tile any more."""
        deadline = time.monotonic() + LONG
        while self.inside and time.monotonic() < deadline:
            time.sleep(0.01)


@interrupts_this_thread
@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_an_interrupt_of_a_waiting_caller_leaves_no_thread(workers, monkeypatch):
    x, b, out = rand(M, K), rand(K, N), torch.zeros(M, N)
    arrival = four_chunks()
    arrival.signal(0)
    mine, default = torch.get_num_threads(), intra_op_threads_of_a_new_thread()
    waits = first_wait_of(arrival, monkeypatch)
    later = threading.Thread(target=lambda: (waits.wait(LONG), time.sleep(0.15), interrupt()))
    with no_thread_left(grace=LONG):  # when just they are gone: see the test after this one
        later.start()
        begin = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            planned(arrival, "dynamic", workers).run(x, b, out=out, arrival=arrival, deadline=2 * LONG)
        later.join()
    assert time.perf_counter() - begin < LONG
    assert out[16:].isnan().all()
    assert (torch.get_num_threads(), intra_op_threads_of_a_new_thread()) == (mine, default)
    for chunk in range(4):
        arrival.signal(chunk)
    check(planned(arrival, "dynamic", workers).run(x, b, arrival=arrival), Maths(x, b))


@interrupts_this_thread
@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("interrupts", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_invariant_9_an_interrupted_call_returns_only_when_no_worker_writes_any_more(interrupts, workers, monkeypatch):
    # Ctrl-C while workers are inside a tile. (Before CPython 3.13 an interrupted Thread.join() takes a thread that
    # still runs for one that has ended, so that joining it once more does not wait: gh-90882.)
    a, b, out, slow = rand(M, K), rand(K, N), torch.zeros(M, N), Slow(monkeypatch, 0.5)

    def several():
        slow.entered.wait(300)
        time.sleep(0.05)  # until all are: for an interrupt while they are being started, see the next test
        for _ in range(interrupts):
            interrupt()
            time.sleep(0.1)

    thread = threading.Thread(target=several)
    thread.start()
    still, caught = [], 0
    try:
        while thread.is_alive() or not caught:
            try:
                if not caught:
                    ts.matmul(a, b, out=out, workers=workers, schedule="dynamic")
                time.sleep(0.01)
            except KeyboardInterrupt:
                still, caught = (list(slow.inside) if not caught else still), caught + 1
    finally:
        slow.wait()
    assert caught
    assert not still, f"the call had returned while workers were still inside tiles {still}"
    assert out.isnan().any()


@interrupts_this_thread
@pytest.mark.usefixtures("_interruptible")
def test_invariant_9_interrupted_while_workers_are_started_and_once_more_while_they_leave(monkeypatch):
    # The second thread exists, but has not run its first line when the first interrupt comes (real signals hit that in
    # 4 of 60 tries; here a ghost starts it later). The second comes while the first worker is still inside a tile.
    a, b, out, slow = rand(M, K), rand(K, N), torch.zeros(M, N), Slow(monkeypatch, 0.6)
    start, started, ghosts, still = threading.Thread.start, [], [], []

    def interrupted(self):
        if self.name.startswith("tilestream-worker"):
            started.append(self)
        if len(started) != 2 or self is not started[1]:
            start(self)
            return
        slow.entered.wait(300)
        ghosts.append(threading.Thread(target=lambda: (time.sleep(0.05), start(self)), name="ghost"))
        start(ghosts[0])
        raise KeyboardInterrupt

    again = threading.Thread(target=lambda: (slow.entered.wait(300), time.sleep(0.2), interrupt()))
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with new_workers(monkeypatch) as pool:
        try:
            again.start()
            with pytest.raises(KeyboardInterrupt):
                ts.matmul(a, b, out=out, workers=2, schedule="dynamic")
            still = list(slow.inside)
            again.join(300)
            ghosts[0].join(300)
            end = time.monotonic() + LONG
            while len(pool.idle) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            assert len(pool.idle) == 2, "the late thread finds no work, and is idle"
        finally:
            monkeypatch.undo()
            slow.wait()
    assert not still, f"the call had returned while workers were still inside tiles {still}"


# What is kept alive ---------------------------------------------------------------------------------------------------


class Owned(np.ndarray):
    """An array that can be watched: each tensor made of it keeps it alive."""


def owned(rows: int, columns: int) -> tuple[torch.Tensor, weakref.ref]:
    array = np.ones((rows, columns), dtype=np.float32).view(Owned)
    return torch.from_numpy(array), weakref.ref(array)


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("how", [{}, {"workers": 2}, {"workers": 2, "schedule": "stream_k"}], ids=str)
def test_invariant_8_no_cache_keeps_a_tensor_alive(how):
    watched = [owned(M, K), owned(K, N), owned(M, N), owned(M, N)]
    a, b, residual, out = (tensor for tensor, _ in watched)
    arrival = four_chunks()
    for chunk in range(4):
        arrival.signal(chunk)
    ts.matmul(a, b, residual=residual, out=out, activation="gelu", **how)
    ts.matmul(a, b, residual=residual, out=out, arrival=arrival, **how)
    ts.matmul(a, b, out_dtype=torch.float16, **how)
    refs = [ref for _, ref in watched]
    del a, b, residual, out, watched
    assert [ref() is None for ref in refs] == [True] * 4


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("what", ["an expiry", "an exception in a worker", "a producer's exception"])
def test_invariant_9_what_goes_wrong_keeps_nothing_alive(what, monkeypatch):
    a, ref = owned(M, K)
    arrival, how = four_chunks(), {}
    if what == "an exception in a worker":
        monkeypatch.setattr(GemmBody, "compute", lambda self, item: 1 / 0)
    else:
        how = {"arrival": arrival, "deadline": 0.02}
    if what == "a producer's exception":
        arrival.fail(ValueError("disk on fire"))
    with contextlib.suppress(ts.ArrivalTimeout, ZeroDivisionError, ValueError):
        ts.matmul(a, rand(K, N), workers=2, **how)
    del a
    if what == "a producer's exception":
        gc.collect()
    assert ref() is None


# Many at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_both_ways_to_pin")
@pytest.mark.parametrize("threads", [2, 4, 8])
def test_calls_from_several_threads_at_once(threads):
    mine, default = torch.get_num_threads(), intra_op_threads_of_a_new_thread()

    def task(i):
        a, b = rand(M, K, seed=i), rand(K, N, seed=i + 100)
        for call in range(6):
            schedule = SCHEDULES[(i + call) % 3]
            check(ts.matmul(a, b, schedule=schedule, workers=1 + (i + call) % 4), Maths(a, b))
            assert torch.get_num_threads() == default

    with no_thread_left():
        run_together(threads, task)
    assert (torch.get_num_threads(), intra_op_threads_of_a_new_thread()) == (mine, default)


def test_arriving_failing_and_plain_calls_at_once():
    def task(i):
        a, b = rand(M, K, seed=i), rand(K, N, seed=i + 100)
        for call in range(4):
            arrival, x = four_chunks(pivot=i % 4), nans(M, K)
            kind = (i + call) % 3
            if kind == 0:
                with Feeder(arrival, x, a, before=late(call % 4, 0.003)):
                    check(ts.matmul(x, b, arrival=arrival, workers=2), Maths(a, b))
            elif kind == 1:
                with pytest.raises(ts.ArrivalTimeout):
                    ts.matmul(x, b, arrival=arrival, workers=3, deadline=0.01)
            else:
                check(ts.matmul(a, b, workers=2, schedule="stream_k"), Maths(a, b))

    with no_thread_left():
        run_together(6, task)


def test_several_calls_wait_for_one_arrival():
    source, x = rand(M, K), nans(M, K)
    arrival = four_chunks()
    weights = [rand(K, N, seed=i) for i in range(4)]
    with Feeder(arrival, x, source, before=lambda c: time.sleep(0.01)):
        run_together(
            4, lambda i: check(ts.matmul(x, weights[i], arrival=arrival, workers=2), Maths(source, weights[i]))
        )


@pytest.mark.usefixtures("_both_ways_to_pin")
def test_the_number_of_intra_op_threads_is_left_alone():
    a, b = rand(M, K), rand(K, N)
    mine = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for how in ({}, {"workers": 3}, {"workers": 1}, {"workers": 2, "schedule": "stream_k"}):
                ts.matmul(a, b, **how)
                assert torch.get_num_threads() == count
                assert intra_op_threads_of_a_new_thread() == count
    finally:
        torch.set_num_threads(mine)


def test_a_torch_with_openmp_sets_one_threads_number(monkeypatch):
    setters = pinning.own_setters.__wrapped__
    assert (setters() is not None) == ("ATen parallel backend: OpenMP" in torch.__config__.parallel_info())
    monkeypatch.setattr(torch.__config__, "parallel_info", lambda: "ATen parallel backend: native thread pool")
    assert setters() is None


@pytest.mark.usefixtures("_both_ways_to_pin")
def test_workers_multiply_with_one_intra_op_thread_each(monkeypatch):
    found = []
    real = GemmBody.compute

    def compute(self, item):
        found.append(torch.get_num_threads())
        real(self, item)

    monkeypatch.setattr(GemmBody, "compute", compute)
    mine = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        ts.matmul(rand(M, K), rand(K, N), workers=3)
        ts.matmul(rand(M, K), rand(K, N), workers=1)
    finally:
        torch.set_num_threads(mine)
    assert set(found) == {1}


def test_a_waiting_worker_does_not_spin(monkeypatch):
    arrival, waits = four_chunks(), []
    sleep = arrival._signals._bell.wait
    monkeypatch.setattr(arrival._signals._bell, "wait", lambda seconds: waits.append(seconds) or sleep(seconds))
    with pytest.raises(ts.ArrivalTimeout):
        ts.matmul(rand(M, K), rand(K, N), arrival=arrival, workers=4, deadline=1.0)
    assert 1 <= len(waits) <= 4 * 5, "a worker waits for the deadline, and is woken at most by each that gives up"


def test_words_that_no_tile_waits_for_are_named_by_their_argument_too():
    # No rows of x, so no tile: the weight's words are seen all the same before they are zeroed.
    words = torch.zeros(2, dtype=torch.int32)
    columns = ts.Arrival.uniform(20, 2, signals=words)
    with pytest.raises(ts.ArrivalTimeout) as caught:
        ts.linear(rand(0, K), rand(40, K), weight_arrival=columns, deadline=0.02)
    assert (caught.value.argument, caught.value.chunk) == ("weight_arrival", 0)
