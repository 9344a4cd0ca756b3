"""Producers: a native thread copies the experts of offsets that come late, over a driver that records its calls."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forked import forks, in_a_child
from tilestream.core.groups import by_load
from tilestream.runtime import driver as gpu
from tilestream.runtime import producer as module
from tilestream.runtime.extension import open_library
from tilestream.runtime.producer import End, Job, Producer

COPY_IN, WRITE, RECORD, WAIT_EVENT = 0, 2, 4, 5
COME, ILLEGAL, NOT_READY = 0, 700, 600
COPIED, LANDED, STREAM = 0xC0, 0xDE, 0x51
TO, SOURCE, WORDS = 0x7F0000000000, 0x7E0000000000, 0xD00D0000
SIZE, EPOCH, LONG = 32 << 20, 7, 300.0


class Asked:
    """What the fake driver was asked, and what it shall answer."""

    def __init__(self, driver: Any) -> None:
        self._driver, self._library = driver, driver.library
        self._library.fake_event.argtypes = (ctypes.c_uint64, ctypes.c_int)

    @property
    def operations(self) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = self._driver.operations()
        return found

    def come(self, event: int = COPIED, code: int = COME) -> None:
        self._library.fake_event(event, code)

    def refuse_one(self, after: int) -> None:
        self._library.fake_refuse_one(after, ILLEGAL)

    def refuse_all(self, after: int) -> None:
        self._library.fake_refuse_operations(after, ILLEGAL)

    def hold_behind(self, operations: int) -> None:
        """Let the driver block behind so many operations; negative: no more."""
        self._library.fake_hold_behind(operations)

    def forget(self) -> None:
        self._driver.forget()

    def thread(self, **given: Any) -> None:
        self._driver.thread(**given)

    @property
    def relaxed(self) -> int:
        return int(self._library.fake_relaxed())


@pytest.fixture(params=["CUDA", "HIP"])
def asked(request, libraries, driver, monkeypatch):
    path, *drivers = libraries
    fake = drivers[request.param == "HIP"]
    library = open_library(path, str(fake), str(fake))
    monkeypatch.setattr(module, "library", lambda: library)
    monkeypatch.setattr(torch.version, "hip", "7.0" if request.param == "HIP" else None)

    def function(_: bool, name: str, arguments: tuple[type, ...]):
        found = ctypes.CDLL(str(fake))[name]
        found.argtypes = arguments
        return found

    monkeypatch.setattr(gpu, "_function", function)
    made = type(driver)(fake)
    made.thread()
    made.forget()
    yield Asked(made)
    made.forget()
    open_library(path, str(drivers[0]), str(drivers[0]))


def job_of(ends: list[int], readers: tuple[int, ...] = (), epoch: int = EPOCH) -> tuple[Job, Any]:
    """A job, and the memory of its offsets."""
    memory = (ctypes.c_int32 * len(ends))(*ends)
    where = ctypes.addressof(memory)
    return Job(COPIED, where, len(ends), SIZE, TO, SOURCE, WORDS, epoch, STREAM, LANDED, readers), memory


def brought(expert: int, epoch: int = EPOCH) -> list[tuple[int, ...]]:
    """An expert's copy and its signal."""
    at = expert * SIZE
    return [(COPY_IN, STREAM, TO + at, SOURCE + at, SIZE), (WRITE, STREAM, WORDS + 4 * expert, epoch, 0)]


def failed(experts: list[int], readers: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Experts that do not come, behind the launches of earlier epochs."""
    waits = [(WAIT_EVENT, STREAM, reader, 0, 0) for reader in (*readers, COPIED)]
    return [*waits, *((WRITE, STREAM, WORDS + 4 * expert, -EPOCH & 0xFFFFFFFF, 0) for expert in experts)]


LANDS = [(RECORD, STREAM, LANDED, 0, 0)]


def ran(producer: Producer, ends: list[int], readers: tuple[int, ...] = ()):
    """The outcome of a job that is not held up."""
    job, memory = job_of(ends, readers)
    producer.start(job)
    assert producer.wait(LONG)
    assert memory is not None
    return producer.outcome()


def test_experts_with_rows_are_copied_by_load_each_with_its_signal(asked):
    producer = Producer()
    asked.come()

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, 4), min_size=1, max_size=40) | st.lists(st.integers(0, 1 << 20), min_size=1))
    def check(sizes: list[int]) -> None:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        order, wanted = by_load(ends)
        asked.forget()
        asked.come()
        outcome = ran(producer, ends)
        assert outcome[:3] == (End.ISSUED, wanted, "")
        assert asked.operations == [*(one for expert in order[:wanted] for one in brought(expert)), *LANDS]

    check()


def test_nothing_is_issued_before_the_offsets_have_come(asked):
    producer = Producer()
    for round_ in range(3):
        asked.forget()
        for _ in range(round_):
            producer.wake()
        job, memory = job_of([0, 0, 0, 0])
        producer.start(job)
        assert not producer.wait(0.02)
        assert producer.is_busy
        memory[:] = 1, 1, 6, 8  # as the router's copy writes them
        assert asked.operations == []
        asked.come()
        assert producer.wait(LONG)
        assert not producer.is_busy
        assert producer.outcome()[:3] == (End.ISSUED, 3, "")
        assert asked.operations == [*brought(2), *brought(3), *brought(0), *LANDS], round_


def test_a_wait_sleeps_in_the_extension(asked, monkeypatch):
    """The offsets come in its second wait, so a loop that only asks whether the job has ended would not end."""
    producer, waits = Producer(), []
    sleep = producer._library.tilestream_producer_wait

    def wait(handle: Any, nanoseconds: int) -> None:
        waits.append(nanoseconds)
        if len(waits) == 2:
            asked.come()
        sleep(handle, nanoseconds)

    monkeypatch.setattr(producer._library, "tilestream_producer_wait", wait)
    job, _memory = job_of([1, 2])
    producer.start(job)
    assert producer.wait(300.0), "seconds after which it fails"
    assert 0 < max(waits) <= 1e9 * module._LONGEST_WAIT, "Python handles signals between two"


@pytest.mark.parametrize("ends", [[3, 2, 3, 4], [-1, 2, 3, 4], [0, 0, 0, -5], [2**31 - 1, -(2**31), 0, 0]])
def test_offsets_that_fall_fail_every_expert(asked, ends):
    asked.come()
    outcome = ran(Producer(), ends, (0xAA, 0xBB))
    assert outcome[:3] == (End.BAD_ENDS, 0, "")
    assert asked.operations == [*LANDS, *failed([0, 1, 2, 3], (0xAA, 0xBB))]


def test_the_largest_offsets_are_no_overflow(asked):
    asked.come()
    assert ran(Producer(), [0, 2**31 - 1]).end is End.ISSUED
    assert asked.operations == [*brought(1), *LANDS]


@pytest.mark.parametrize("done", range(7))
def test_a_refusal_says_what_was_refused_and_fails_the_rest(asked, done):
    asked.come()
    asked.refuse_one(done)
    outcome = ran(Producer(), [1, 1, 6, 8], (0xAA,))
    issued = [*brought(2), *brought(3), *brought(0)][:done]
    assert (outcome.end, outcome.experts) == (End.REFUSED, done // 2)
    how = "recorded no event" if done == 6 else "refused the stream write" if done % 2 else "refused the copy to the d"
    assert outcome.error.startswith(f"the driver {how}")
    assert outcome.error.endswith("(an illegal memory access)")
    rest = [2, 3, 0, 1][done // 2 :] if done >= 2 else [0, 1, 2, 3]
    assert asked.operations == [*issued, *LANDS[done == 6 :], *failed(rest, (0xAA,))]


def test_a_driver_that_refuses_everything_ends_the_job(asked):
    asked.come()
    asked.refuse_all(2)
    producer = Producer()
    outcome = ran(producer, [1, 1, 6, 8], (0xAA,))
    assert (outcome.end, outcome.experts) == (End.REFUSED, 1)
    assert asked.operations == brought(2)
    asked.forget()
    asked.come()
    assert ran(producer, [1, 1]).end is End.ISSUED


def test_an_event_that_fails_is_reported(asked):
    asked.come(code=ILLEGAL)
    outcome = ran(Producer(), [1, 2])
    assert (outcome.end, outcome.experts) == (End.REFUSED, 0)
    assert outcome.error.startswith("the driver does not say whether an event has come")
    assert asked.operations == [*LANDS, *failed([0, 1])]


def test_it_is_stopped_while_it_waits(asked):
    producer = Producer()
    job, _memory = job_of([1, 2], (0xAA,))
    producer.start(job)
    producer.stop()
    assert producer.wait(LONG), "the event never comes"
    assert producer.outcome()[:2] == (End.STOPPED, 0)
    assert asked.operations == [*LANDS, *failed([0, 1], (0xAA,))]
    asked.forget()
    asked.come()
    assert ran(producer, [1, 2]).end is End.ISSUED, "the next job is not stopped"


def test_it_is_stopped_between_two_experts(asked):
    producer = Producer()
    asked.come()
    asked.hold_behind(1)  # the driver blocks in the first signal
    job, _memory = job_of([1, 1, 6, 8])
    producer.start(job)
    while len(asked.operations) < 1:
        time.sleep(0.001)
    producer.stop()
    assert not producer.wait(0.02)
    asked.hold_behind(-1)
    assert producer.wait(LONG)
    assert producer.outcome()[:2] == (End.STOPPED, 1)
    assert asked.operations == [*brought(2), *LANDS, *failed([3, 0, 1])]


def test_a_job_that_is_under_way_and_what_is_none_are_refused(asked):
    producer = Producer()
    job, _memory = job_of([1, 2])
    producer.start(job)
    with pytest.raises(RuntimeError, match=r"^producer: a job is under way$"):
        producer.start(job)
    producer.stop()
    assert producer.wait(LONG)
    for wrong in (job._replace(experts=0), job._replace(size=0)):
        with pytest.raises(RuntimeError, match=r"^producer: there are no experts$"):
            producer.start(wrong)
    assert not producer.is_busy


def test_a_thread_without_a_context_starts_nothing(asked):
    producer, said = Producer(), []

    def start() -> None:
        asked.thread(context=None)
        job, _memory = job_of([1, 2])
        with pytest.raises(RuntimeError, match=r"^producer: the thread has no context$"):
            producer.start(job)
        said.append(True)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert said
    assert not producer.is_busy


def threads() -> set[str]:
    """The lanes' threads by their numbers: one of a test before may still be at its end."""
    return {task.name for task in Path("/proc/self/task").iterdir() if name_of(task) == "tilestream-lane"}


def name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text(encoding="ascii").strip()
    except OSError:  # it has ended
        return ""


def test_the_thread_lets_captures_be_and_ends_with_its_object(asked):
    before, relaxed = threads(), asked.relaxed
    producers = [Producer() for _ in range(3)]
    asked.come()
    for one in producers:
        assert ran(one, [1]).end is End.ISSUED
    assert len(threads() - before) == 3
    assert asked.relaxed == relaxed + 3
    busy, _memory = job_of([1])
    asked.forget()
    producers[0].start(busy)
    del producers, one  # one of them waits for offsets that do not come
    end = time.monotonic() + LONG
    while threads() - before:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_jobs_of_several_threads_do_not_wait_for_one_another(asked):
    first, second = Producer(), Producer()
    job, _memory = job_of([1])
    first.start(job._replace(copied=0xC1))
    asked.come()
    assert ran(second, [1, 3]).end is End.ISSUED
    assert first.is_busy
    asked.come(0xC1)
    assert first.wait(LONG)
    assert first.outcome().end is End.ISSUED


@forks
@pytest.mark.parametrize("waits", [True, False])
def test_a_forked_child_does_not_hang(asked, waits):
    """The thread is in the driver, or holds its lock, or sleeps: the child has none, and takes no lock."""
    producer = Producer()
    job, _memory = job_of([1, 2])
    if waits:
        producer.start(job)

    def child() -> None:
        nonlocal producer
        assert not producer.is_busy
        assert producer.wait(None)
        assert producer.outcome().end is End.LOST
        producer.stop()
        producer.wake()
        with pytest.raises(RuntimeError, match=r"^producer: the process was forked$"):
            producer.start(job)
        with pytest.raises(RuntimeError, match=r"^producer: the process was forked$"):
            Producer()
        del producer

    assert in_a_child(child) == 0
    producer.stop()
    assert producer.wait(LONG)


def test_without_the_extension_there_is_none(monkeypatch):
    monkeypatch.setattr(module, "library", lambda: None)
    with pytest.raises(RuntimeError, match="producer: there is no native extension"):
        Producer()
    monkeypatch.setattr(module, "library", lambda: ctypes.CDLL(None))
    with pytest.raises(RuntimeError, match="producer: the native extension is older"):
        Producer()


PROGRAM = """
import ctypes, sys
sys.path.insert(0, {here!r})
from tilestream.runtime import extension, producer
from test_native_producer import job_of
path, fake = {path!r}, {fake!r}
library = extension.open_library({path!r}, fake, fake)
producer.library = lambda: library
ctypes.CDLL(fake).fake_thread(0, 1, 1, None)
made = producer.Producer()
job, memory = job_of([1, 2])
made.start(job)
{how}
"""


@pytest.mark.parametrize("how", ["", "del made", "made.stop()", "sys.exit(0)"])
def test_a_process_ends_in_the_middle_of_a_job(asked, libraries, how):
    path, fake, _ = libraries
    program = PROGRAM.format(here=str(Path(__file__).parent), path=str(path), fake=str(fake), how=how)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
