"""Workers stay between launches, and no launch finds out."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import tilestream as ts
from error_rule import Maths, check, rand
from forked import forks, in_a_child
from streaming import (
    intra_op_threads_of_a_new_thread,
    new_workers,
    rest,
    run_together,
    threads_at_work,
    workers_at_work,
)
from tilestream.kernels.cpu.gemm import GemmBody
from tilestream.launch.cpu import workers
from tilestream.launch.cpu.workers import Crew, Worker
from tilestream.runtime import shutdown

pytestmark = pytest.mark.usefixtures("small_tiles")

M, N, K = 64, 40, 24
LONG = 300.0
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture
def pool(monkeypatch):
    """A pool of the test's own, without threads."""
    with new_workers(monkeypatch) as made:
        yield made


def multiply(count: int = 2, **how) -> None:
    a, b = rand(M, K), rand(K, N)
    check(ts.matmul(a, b, workers=count, schedule="dynamic", **how), Maths(a, b))


def multiply_at_once(count: int) -> None:
    """A launch whose workers are all at work at once, each in tiles of its own.

    Else a fast worker's thread can do the work of others before they start.
    """
    a, b, arrival, before = rand(M, K), rand(K, N), ts.Arrival.uniform(16, 4), len(workers_at_work())

    def bring() -> None:
        until(lambda: len(workers_at_work()) == before + count)
        for chunk in range(4):
            arrival.signal(chunk)

    late = threading.Thread(target=bring)
    late.start()
    made = ts.matmul(a, b, arrival=arrival, workers=count, schedule="static", deadline=LONG)
    late.join()
    assert len(workers_at_work()) == before
    check(made, Maths(a, b))


def until(condition, seconds: float = LONG) -> bool:
    """Whether it holds in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(condition())


def seen_in_workers(monkeypatch, look) -> list:
    """What ``look()`` gives in each tile's thread."""
    found, real = [], GemmBody.compute

    def compute(self, item):
        found.append(look())
        real(self, item)

    monkeypatch.setattr(GemmBody, "compute", compute)
    return found


class Together(threading.Barrier):
    """A barrier for tiles: each waits until ``parties`` tiles are at work at once, in as many threads."""

    def __init__(self, monkeypatch, parties: int) -> None:
        super().__init__(parties, timeout=LONG)
        real = GemmBody.compute

        def compute(body, item):
            self.wait()
            real(body, item)

        monkeypatch.setattr(GemmBody, "compute", compute)


# Reuse ----------------------------------------------------------------------------------------------------------------


def test_launches_one_after_the_other_have_the_same_threads(pool):
    multiply_at_once(3)
    first = {worker.thread for worker in pool.idle}
    assert len(first) == 3
    for count in (1, 2, 3) * 70:
        multiply(count)
        assert {worker.thread for worker in pool.idle} == first
    assert {thread for thread in threading.enumerate() if thread.name.startswith("tilestream-worker")} >= first


def test_no_thread_is_started_before_a_launch_needs_it(pool, monkeypatch):
    started, start = [], threading.Thread.start

    def counted(self):
        if self.name.startswith("tilestream-worker"):
            started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", counted)
    for count in (2, 2, 4, 3):
        multiply_at_once(count)
        assert len(started) == max(count, len(pool.idle))
    assert [thread for thread in started if not thread.daemon] == []


def test_memory_does_not_grow_with_launches(pool):
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("no /proc here")
    a, b, out = rand(M, K), rand(K, N), torch.empty(M, N)
    plan = ts.plan(M, N, K, tile=(16, 16), schedule="dynamic", workers=2)

    def resident() -> int:
        gc.collect()
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def launch(count: int) -> None:
        for _ in range(count):
            plan.run(a, b, out=out)

    launch(500)
    before = resident()
    launch(5000)
    # With threads of each launch's own it was 133 bytes a launch. An allocator may take a few pages.
    assert resident() - before < 5000 * 50


@pytest.mark.parametrize("end", ["idle", "at exit"])
def test_idle_threads_end(end, pool, monkeypatch):
    if end == "idle":
        monkeypatch.setattr(workers, "IDLE_SECONDS", 0.05)
    multiply_at_once(3)
    threads = [worker.thread for worker in pool.idle]
    if end == "at exit":
        assert len(threads) == 3
        pool.stop_at_exit(LONG)
        assert not any(thread.is_alive() for thread in threads)
    assert until(lambda: not pool.idle and not any(thread.is_alive() for thread in threads))
    multiply(3)  # a launch that was under way at exit goes on, with new threads
    assert until(lambda: not pool.idle)


def test_an_idle_thread_uses_no_cpu(pool):
    multiply_at_once(3)
    threads = [worker.thread for worker in pool.idle]
    assert len(threads) == 3
    assert rest(threads), "a thread that polls takes some of it each time"


# Launches at once -----------------------------------------------------------------------------------------------------


def test_launches_at_once_have_threads_of_their_own(pool, monkeypatch):
    # The tiles of both launches wait for one another: with fewer threads than workers this does not end.
    together = Together(monkeypatch, 4)

    def task(i):
        a, b = rand(32, K, seed=i), rand(K, 16, seed=i)
        for _ in range(10):
            check(ts.plan(32, 16, K, tile=(16, 16), schedule="static", workers=2).run(a, b), Maths(a, b))

    run_together(2, task, LONG)
    assert not together.broken
    assert len(pool.idle) == 4


def test_a_launch_waits_for_no_other_that_waits(pool):
    # All idle threads are taken by a launch whose chunks come only after other launches.
    multiply_at_once(2)
    arrival, x, a, b = ts.Arrival.uniform(16, 4), rand(M, K), rand(M, K), rand(K, N)
    first = threading.Thread(target=lambda: ts.matmul(x, b, arrival=arrival, workers=2, deadline=LONG))
    first.start()
    assert until(lambda: len(workers_at_work()) == 2 and not pool.idle)
    for _ in range(5):
        check(ts.matmul(a, b, workers=2), Maths(a, b))
    for chunk in range(4):
        arrival.signal(chunk)
    first.join(LONG)
    assert not first.is_alive()
    assert 3 <= len(pool.idle) <= 4


def test_a_producer_launches_while_its_consumer_waits(pool):
    a, b, done = rand(M, K), rand(K, N), []

    def blocks():
        for begin in range(0, M, 16):
            done.append(ts.matmul(a[begin : begin + 16], b, workers=2))
            yield done[-1]

    w = rand(N, K)
    with ts.stream_in(blocks(), shape=(M, N), dtype=torch.float32, rows_per_chunk=16) as stream:
        made = ts.matmul(stream.tensor, w, arrival=stream.arrival, workers=2, deadline=LONG)
    check(made, Maths(torch.cat(done), w))


def test_a_worker_launches_itself(pool, monkeypatch):
    a, b, real, nested = rand(M, K), rand(K, N), GemmBody.compute, []

    def compute(self, item):
        if not nested:
            nested.append(threading.current_thread())
            check(ts.matmul(a, b, workers=2), Maths(a, b))
        real(self, item)

    monkeypatch.setattr(GemmBody, "compute", compute)
    multiply(2)
    assert len(nested) == 1
    assert not workers_at_work()


# What a launch could find of earlier ones -----------------------------------------------------------------------------


def test_modes_of_the_caller_and_of_earlier_launches_are_not_the_workers(pool, monkeypatch):
    def modes():
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    found = seen_in_workers(monkeypatch, modes)
    with torch.inference_mode(), torch.autocast("cpu"):
        ts.matmul(rand(M, K), rand(K, N), workers=2)
    with torch.no_grad():
        ts.matmul(rand(M, K), rand(K, N), workers=2)
    multiply()
    assert set(found) == {(False, True, False)}


def test_a_worker_begins_with_an_empty_context(pool, monkeypatch):
    import contextvars

    variable = contextvars.ContextVar("of the test", default=0)

    def look():
        before = variable.get()
        variable.set(before + 1)
        return before, threading.current_thread()

    found = seen_in_workers(monkeypatch, look)
    variable.set(100)
    for _ in range(5):
        found.clear()
        multiply(2)
        # Each worker's tiles count from 0, and a thread may have done the work of both.
        starts = [thread for at, thread in found if at == 0]
        assert {thread for _, thread in found} == set(starts)
        assert len(starts) <= 2


def test_intra_op_threads_are_set_for_each_launch(pool, monkeypatch):
    found = seen_in_workers(monkeypatch, torch.get_num_threads)
    mine = torch.get_num_threads()
    try:
        for count in (3, 1, 2):
            torch.set_num_threads(count)
            multiply(3)
            assert (torch.get_num_threads(), intra_op_threads_of_a_new_thread()) == (count, count)
    finally:
        torch.set_num_threads(mine)
    assert set(found) == {1}


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU does not flush denormals")
def test_workers_flush_denormals_where_the_caller_does(pool):
    a, b = torch.full((M, K), 1e-30), torch.full((K, N), 1e-12)
    assert ts.matmul(a, b, workers=2).ne(0).all()
    try:
        torch.set_flush_denormal(True)
        assert ts.matmul(a, b, workers=2).eq(0).all()
    finally:
        torch.set_flush_denormal(False)
    assert ts.matmul(a, b, workers=2).ne(0).all()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads have no CPUs of their own here")
def test_workers_run_on_the_callers_cpus(pool, monkeypatch):
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("one CPU")
    found = seen_in_workers(monkeypatch, lambda: frozenset(os.sched_getaffinity(0)))
    multiply_at_once(2)
    try:
        os.sched_setaffinity(0, {min(cpus)})
        multiply_at_once(2)
    finally:
        os.sched_setaffinity(0, cpus)
    multiply_at_once(2)
    assert set(found[:12] + found[24:]) == {frozenset(cpus)}
    assert set(found[12:24]) == {frozenset({min(cpus)})}


@pytest.mark.parametrize("kind", ["trace", "profile"])
def test_threading_traces_kept_threads_too(kind, pool):
    set_hook, get_own = getattr(threading, f"set{kind}"), getattr(sys, f"get{kind}")
    before = getattr(threading, f"get{kind}")()
    multiply_at_once(2)
    called, kept = set(), {worker.thread for worker in pool.idle}

    def hook(frame, event, argument):
        called.add((threading.current_thread(), frame.f_code.co_name))

    set_hook(hook)
    try:
        multiply_at_once(2)
    finally:
        set_hook(before)
    assert {thread for thread, name in called if name == "_worker"} == kept
    called.clear()
    multiply_at_once(2)
    assert not called, "a hook that was taken off is called no more"
    assert get_own() is not hook


# What is kept alive ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("ends", ["right", "in an exception", "in an expiry", "without a thread"])
def test_an_idle_thread_keeps_nothing_of_its_launch(ends, pool, monkeypatch):
    bodies, real = [], GemmBody.compute

    def compute(self, item):
        bodies.append(weakref.ref(self))
        if ends == "in an exception":
            raise ZeroDivisionError
        real(self, item)

    def offer(self, *more, real=workers.Pool.offer):
        if bodies:
            raise RuntimeError("can't start new thread")
        real(self, *more)
        assert until(lambda: bodies)

    monkeypatch.setattr(GemmBody, "compute", compute)
    if ends == "without a thread":
        monkeypatch.setattr(workers.Pool, "offer", offer)
    arrival = ts.Arrival.uniform(16, 4)
    arrival.signal(0)
    how = {"arrival": arrival, "deadline": 0.05} if ends == "in an expiry" else {}
    a, b = rand(M, K), rand(K, N)
    storage = weakref.ref(a.untyped_storage())
    try:
        ts.matmul(a, b, workers=2, **how)
    except (ZeroDivisionError, ts.ArrivalTimeout, RuntimeError):
        assert ends != "right"
    else:
        assert ends == "right"
    watched = weakref.ref(a)
    del a
    assert bodies
    assert pool.idle
    assert not any(body() for body in bodies)
    assert watched() is None
    assert storage() is None


# Threads that fail, or are interrupted --------------------------------------------------------------------------------


def test_an_exception_that_leaves_the_work_ends_its_thread_alone(pool, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))

    def work(number):
        if number == 1:
            raise ZeroDivisionError

    crew = Crew(work, 3)
    crew.start()
    crew.wait()
    assert until(lambda: raised)
    assert raised == [ZeroDivisionError]
    assert until(lambda: len(pool.idle) >= 1)
    multiply(3)


def test_a_thread_that_dies_while_it_is_idle_gets_no_offer(pool, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    class Deadly(Crew):
        def serve(self, rest):
            rest()
            raise MemoryError

    pool.offer(Deadly(lambda number: None, 1), workers._inherited())
    assert until(lambda: not [one for one in threading.enumerate() if one.name == "tilestream-worker-0"])
    assert not pool.idle
    multiply()


def test_a_thread_that_was_claimed_and_got_no_offer_ends(pool, monkeypatch):
    # As by an interrupt between the two. The thread serves no one, but does not stay either.
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.05)
    add_idle, claimed = pool.add_idle, []

    def and_claim(worker):  # before it sleeps, which it does not do for long
        add_idle(worker)
        claimed.extend([worker] * pool.withdraw(worker))

    monkeypatch.setattr(pool, "add_idle", and_claim)
    multiply()
    worker = claimed[-1]
    worker.thread.join(LONG)
    assert not worker.thread.is_alive()
    assert worker.has_ended


def test_an_offer_to_a_thread_that_has_just_ended_goes_to_a_new_one(pool):
    served = []
    ended = Worker(pool, workers._inherited())
    ended.has_ended = True
    pool.add_idle(ended)
    crew = Crew(served.append, 1)
    crew.start()
    crew.wait()
    assert served == [0]
    assert ended not in pool.idle


def test_an_offer_in_the_last_moment_is_served_once(pool, monkeypatch):
    # The thread gives up, and a launch that had claimed it offers before the thread looks for the last time.
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.0)
    served, worker = [], Worker(pool, workers._inherited())
    crew = Crew(served.append, 1)
    real = pool.withdraw

    def withdraw(one):
        found = real(one)
        if one is worker and not served and not found:
            worker.offers.put(crew)
            pool.offer(crew, worker.inherited)  # as if it had seen that the thread has ended
        return found

    monkeypatch.setattr(pool, "withdraw", withdraw)
    worker.thread.start()
    crew.wait()
    worker.thread.join(LONG)
    assert served == [0]


def test_a_crew_that_is_closed_begins_no_more(pool):
    served, hold, begun = [], threading.Event(), threading.Event()

    def work(number):
        served.append(number)
        begun.set()
        hold.wait(LONG)

    crew = Crew(work, 2)
    pool.offer(crew, workers._inherited())
    assert begun.wait(LONG)
    closing = threading.Thread(target=crew.close)
    closing.start()
    assert until(lambda: crew._closed)
    pool.offer(crew, workers._inherited())
    assert until(lambda: len(pool.idle) == 1)
    assert closing.is_alive(), "it waits for the worker that has begun"
    hold.set()
    closing.join(LONG)
    assert served == [0]


# Forks ----------------------------------------------------------------------------------------------------------------


@needs_fork
@forks
class TestFork:
    def test_a_child_starts_workers_of_its_own(self):
        multiply_at_once(3)
        idle = len(workers.pool.idle)
        assert idle >= 3

        def task() -> None:
            assert not workers.pool.idle
            for _ in range(2):
                multiply_at_once(2)
                assert len(workers.pool.idle) == 2

        assert in_a_child(task, LONG) == 0
        assert len(workers.pool.idle) == idle
        multiply(3)
        assert len(workers.pool.idle) == idle

    def test_a_child_of_a_child(self):
        multiply(2)

        def task() -> None:
            multiply(2)
            assert in_a_child(lambda: multiply(2), LONG) == 0
            multiply(2)

        assert in_a_child(task, LONG) == 0

    def test_children_while_another_thread_launches(self):
        end, begun = threading.Event(), threading.Event()
        a, b = rand(M, K), rand(K, N)

        def launch() -> None:
            while not end.is_set():
                ts.matmul(a, b, workers=2)
                begun.set()

        def fork() -> None:
            try:
                assert begun.wait(LONG)
                for _ in range(12):
                    assert in_a_child(multiply, LONG) == 0
            finally:
                end.set()

        run_together(2, lambda i: (launch, fork)[i](), 4 * LONG)


# Processes that end ---------------------------------------------------------------------------------------------------

ENDS = {
    "idle workers": "ts.matmul(a, a, workers=3)",
    "idle workers, and a launch that waits": """
ts.matmul(a, a, workers=3)
arrival = ts.Arrival.uniform(50, 2)
threading.Thread(target=lambda: ts.matmul(a, a, arrival=arrival, workers=2), daemon=True).start()
time.sleep(0.3)
""",
    "a child, of a parent that has a launch": """
import os, sys
arrival = ts.Arrival.uniform(50, 2)
ts.matmul(a, a, workers=3)
threading.Thread(target=lambda: ts.matmul(a, a, arrival=arrival, workers=2, deadline=600), daemon=True).start()
time.sleep(0.3)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:  # one that waits for threads that it does not have does so until the test's bound
    from tilestream.runtime import shutdown
    shutdown.GRACE_SECONDS = 1e5
    sys.exit(0)
""",
    "a child with workers of its own": """
import os, sys
ts.matmul(a, a, workers=3)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    torch.set_num_threads(1)
    ts.matmul(a, a, workers=2)
    sys.exit(0)
""",
    "a signal that the program waits for": """
import os, signal
ts.matmul(a, a, workers=3)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
assert signal.sigwait([signal.SIGTERM]) == signal.SIGTERM
""",
}


@pytest.mark.parametrize("program", ENDS)
def test_processes_end_in_order(program):
    if "fork" in ENDS[program] and not hasattr(os, "fork"):
        pytest.skip("no fork here")
    first = "import threading, time, warnings, torch, tilestream as ts\nwarnings.simplefilter('ignore')\n"
    paths = [str(Path(ts.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    # No threads of OpenMP, nor of numpy's OpenBLAS, which take a signal that the main thread blocks.
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
    begin = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", f"{first}torch.set_num_threads(1)\na = torch.randn(100, 100)\n{ENDS[program]}"],
        capture_output=True, text=True, timeout=850, env=variables,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    assert time.monotonic() - begin < LONG


def test_at_exit_a_launch_has_stopped_when_its_workers_have_left(pool, monkeypatch):
    registered, inside, begun, errors = [], [], threading.Event(), []

    def compute(self, item):
        inside.append(item)
        begun.set()
        time.sleep(0.3)
        inside.remove(item)

    def launch():
        try:
            ts.matmul(rand(M, K), rand(K, N), workers=2)
        except ts.TilestreamError as error:
            errors.append(str(error))

    monkeypatch.setattr(GemmBody, "compute", compute)
    monkeypatch.setattr(shutdown, "register", registered.append)
    thread = threading.Thread(target=launch)
    thread.start()
    assert begun.wait(LONG)
    registered[0].stop_at_exit(LONG)
    assert not inside
    thread.join(LONG)
    assert "the interpreter exits" in errors[0]


def test_no_worker_is_at_work_between_launches():
    before = threads_at_work()
    multiply(3)
    assert threads_at_work() == before
