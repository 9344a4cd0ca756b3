"""Sequences, issued by the library and, operation by operation, by Python: a driver records what it is asked."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from typing import Any

import pytest
import torch

from tilestream.runtime import driver as gpu
from tilestream.runtime import sequence
from tilestream.runtime.extension import open_library
from tilestream.runtime.sequence import (
    AwaitEvent,
    Check,
    CopyAcross,
    CopyIn,
    Event,
    Record,
    Sequence,
    SequenceError,
    Slot,
    Stopped,
    Wait,
    WaitEvent,
    Write,
)  # fmt: skip

COPY_IN, COPY_ACROSS, WRITE, WAIT, RECORD, WAIT_EVENT = range(6)
STREAM, SIDE, TO, FROM, WORDS, EPOCH = map(Slot, range(6))
VALUES = 0x51, 0x52, 0x7F0000000000, 0x7E0000000000, 0xD00D0000, 7
ILLEGAL = 700


class Asked:
    """What the fake driver was asked, and what it shall answer."""

    def __init__(self, driver: Any, native: bool, hip: bool) -> None:
        self._driver, self._library, self.native, self.hip = driver, driver.library, native, hip

    @property
    def operations(self) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = self._driver.operations()
        return found

    def refuse_after(self, operations: int) -> None:
        self._library.fake_refuse_operations(operations, ILLEGAL)

    def thread(self, **given: Any) -> None:
        self._driver.thread(**given)

    def capturing(self, captured: bool) -> None:
        self._driver.state(capturing=captured)

    @property
    def waited(self) -> list[int]:
        """The events that the host has waited for."""
        found = (ctypes.c_uint64 * 8)()
        return list(found[: self._library.fake_waited(found, 8)])

    @property
    def batches(self) -> int:
        """The calls that took several writes and waits."""
        return 0 if self.hip else int(self._library.fake_batches())

    def forget(self) -> None:
        self._driver.forget()

    @property
    def destroyed(self) -> int:
        return int(self._library.fake_destroyed())


@pytest.fixture(params=["native", "by Python", "HIP, native", "HIP, by Python"])
def asked(request, libraries, driver, monkeypatch):
    """The fake driver, reached as the parameter says."""
    path, *drivers = libraries
    hip = "HIP" in request.param
    fake = str(drivers[hip])
    library = open_library(path, fake, fake)
    native = "native" in request.param
    monkeypatch.setattr(sequence, "library", lambda: library if native else None)
    monkeypatch.setattr(torch.version, "hip", "7.0" if hip else None)

    def function(_: bool, name: str, arguments: tuple[type, ...]):
        found = ctypes.CDLL(fake)[name]
        found.argtypes = arguments
        return found

    monkeypatch.setattr(gpu, "_function", function)
    made = type(driver)(drivers[hip])
    made.library.fake_destroyed.restype = ctypes.c_int64
    made.thread()
    made.state()
    made.forget()
    yield Asked(made, native, hip)
    gc.collect()  # events of a test that failed on purpose, while the driver is there
    made.state()
    open_library(path, str(drivers[0]), str(drivers[0]))


def all_kinds(event: Event) -> list[Any]:
    return [
        Record(STREAM, event),
        WaitEvent(SIDE, event),
        CopyIn(SIDE, TO + 4096, FROM + 8192, 100),
        CopyAcross(SIDE, TO, 0xABC0, 1 << 33),
        Write(SIDE, WORDS + 4, EPOCH),
        Write(SIDE, WORDS, EPOCH + -8),
        Wait(STREAM, 0xF00, EPOCH + 3),
    ]


def seen(event: Event, values: tuple[int, ...] = VALUES) -> list[tuple[int, ...]]:
    stream, side, to, source, words, epoch = values
    return [
        (RECORD, stream, event.handle, 0, 0),
        (WAIT_EVENT, side, event.handle, 0, 0),
        (COPY_IN, side, to + 4096, source + 8192, 100),
        (COPY_ACROSS, side, to, 0xABC0, 1 << 33),
        (WRITE, side, words + 4, epoch & 0xFFFFFFFF, 0),
        (WRITE, side, words, (epoch - 8) & 0xFFFFFFFF, 0),
        (WAIT, stream, 0xF00, epoch + 3 & 0xFFFFFFFF, 0),
    ]


def test_the_driver_is_asked_in_order_for_slots_plus_constants(asked):
    event = Event()
    made = Sequence(6, all_kinds(event))
    assert (made._native is not None) == asked.native
    for values in (VALUES, (0, 0x99, 1 << 47, 64, 128, 0xFFFFFFFF)):
        before = len(asked.operations)
        made.issue(*values)
        assert asked.operations[before:] == seen(event, values)
    assert len(made) == 7


def test_writes_and_waits_of_one_stream_that_follow_each_other_are_one_call(asked):
    """Others, and those of HIP and of Python, are asked for one by one."""
    same = [Write(STREAM, 8, EPOCH), Wait(STREAM, 12, EPOCH + 1), Write(STREAM, 16, -1)]
    operations = [*same, Write(SIDE, 20, 1), *same[:2], Record(STREAM, 0xE0), same[0]]
    made = Sequence(6, [*operations, *[Write(SIDE, 8 * i, i) for i in range(70)]])
    asked.forget()
    made.issue(*VALUES)
    numbers = {Write: WRITE, Wait: WAIT, Record: RECORD}
    assert [one[0] for one in asked.operations] == [numbers[type(one)] for one in operations] + [WRITE] * 70
    assert [one[1:4] for one in asked.operations[:3]] == [(0x51, 8, 7), (0x51, 12, 8), (0x51, 16, 0xFFFFFFFF)]
    assert [one[2:4] for one in asked.operations[8:]] == [(8 * i, i) for i in range(70)]
    assert asked.batches == (2 + 3 if asked.native and not asked.hip else 0), "a batch has at most 32"


@pytest.mark.parametrize("done", range(5))
def test_of_a_refused_batch_nothing_was_issued(asked, done):
    made = Sequence(6, [Record(STREAM, 0xE0), *[Write(SIDE, 4 * i, i) for i in range(3)], Wait(SIDE, 64, EPOCH)])
    asked.refuse_after(done)
    with pytest.raises(SequenceError) as refused:
        made.issue(*VALUES)
    assert refused.value.done == done, "Python asks for each by itself"
    assert len(asked.operations) == done


def test_events_may_be_handles_and_are_kept_by_the_sequence(asked):
    made = Sequence(2, [Record(Slot(0), Event()), WaitEvent(Slot(1), Slot(0, 5)), Record(3, 0xE5)])
    assert asked.destroyed == 0
    made.issue(8, 9)
    assert [one[:3] for one in asked.operations[1:]] == [(WAIT_EVENT, 9, 13), (RECORD, 3, 0xE5)]
    del made
    assert asked.destroyed == 1


@pytest.mark.parametrize("done", range(7))
def test_a_refusal_says_how_far_it_came_and_why(asked, done):
    event = Event()
    made = Sequence(6, all_kinds(event))
    asked.refuse_after(done)
    with pytest.raises(
        SequenceError, match=r"(_ILLEGAL_ADDRESS|IllegalAddress) \(an illegal memory access\)"
    ) as refused:
        made.issue(*VALUES)
    assert refused.value.done == done
    name = type(all_kinds(event)[done]).__name__
    assert str(refused.value).endswith(f"this is operation {done} of 7, {name}")
    assert asked.operations == seen(event)[:done]
    asked.refuse_after(-1)
    made.issue(*VALUES)  # it is whole as before
    assert asked.operations[done:] == seen(event)


def test_a_thread_without_a_context_is_given_one(asked, monkeypatch):
    """CUDA: the driver refuses the first operation, Python binds the context, and goes on where it stopped."""
    made = Sequence(6, all_kinds(Event()))
    bound = []

    def bind(_: Any) -> None:
        bound.append(threading.get_ident())
        asked.thread()

    monkeypatch.setattr(type(gpu.current()), "bind_context", bind)

    def elsewhere() -> None:
        asked.thread(context=None)
        made.issue(*VALUES)

    if asked.hip:
        asked.thread()  # HIP binds nothing: each thread has the device's one context
        made.issue(*VALUES)
    else:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert thread.ident in bound
    assert len(asked.operations) == 7


def test_captured_streams_take_operations_but_for_the_writes_of_hip(asked):
    made = Sequence(6, all_kinds(Event()))
    asked.capturing(True)
    if not asked.hip:
        made.issue(*VALUES)
        assert len(asked.operations) == 7
        return
    with pytest.raises(SequenceError, match="the stream write is not captured: HIP makes it at once") as refused:
        made.issue(*VALUES)
    assert (refused.value.done, len(asked.operations)) == (4, 4)


def test_threads_issue_one_sequence_with_values_of_their_own(asked):
    made = Sequence(2, [Write(Slot(0), Slot(1), Slot(0)), Write(Slot(0), Slot(1, 4), Slot(0, 1))])

    def issue(number: int) -> None:
        asked.thread()
        for i in range(50):
            made.issue(number, 64 * i)

    threads = [threading.Thread(target=issue, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [(WRITE, n, 64 * i + 4 * j, n + j, 0) for n in range(1, 5) for i in range(50) for j in range(2)]
    assert sorted(asked.operations) == sorted(expected)
    for number in range(1, 5):
        assert [one for one in asked.operations if one[1] == number] == [one for one in expected if one[1] == number]


@pytest.mark.parametrize(
    ("slots", "operations", "error", "message"),
    [
        (2, [Write(0, 64, 1), Write(Slot(2), 64, 1)], ValueError,
         "operation 1, Write: stream is of slot 2; there are 2 slots, from 0"),
        (2, [Wait(0, Slot(-1), 1)], ValueError, "operation 0, Wait: address is of slot -1; there are 2 slots"),
        (0, [CopyIn(0, 64, 64, 0)], ValueError, "operation 0, CopyIn: size=0; a copy has at least one byte: leave it"),
        (0, [CopyAcross(0, 64, 64, -8)], ValueError, "operation 0, CopyAcross: size=-8; a copy has at least one byte"),
        (0, [(0, 64, 64)], TypeError, "operation 0 is a tuple; it must be one of this module's"),
        (-1, [], ValueError, "-1 slots and 0 operations; there are at most 4096 and 65536: make several sequences"),
        (4097, [], ValueError, "4097 slots"),
        (0, [Write(0, 64, 1)] * 65537, ValueError, "65537 operations; there are at most"),
    ],
)  # fmt: skip
def test_a_bad_sequence_is_refused_before_anything_is_asked(asked, slots, operations, error, message):
    with pytest.raises(error, match=f"^sequence: .*{message}|^sequence: {message}"):
        Sequence(slots, operations)
    assert asked.operations == []


@pytest.mark.parametrize("values", [(), (1,), (1, 2, 3)])
def test_an_issue_gives_one_value_a_slot(asked, values):
    made = Sequence(2, [Write(Slot(0), Slot(1), 1)])
    with pytest.raises(ValueError, match=f"{len(values)} values for 2 slots; give one a slot"):
        made.issue(*values)
    assert asked.operations == []


def test_a_sequence_may_have_nothing_to_do(asked):
    Sequence(0, []).issue()
    assert asked.operations == []


@pytest.mark.parametrize(
    ("integers", "why"),
    [
        ([], "another length"),
        ([1, 0, 2], "another length"),
        ([1, 0], "another version"),
        ([2, -1], "too many slots"),
        ([2, 1 << 13], "too many slots"),
        ([2, 0, 8, *[-1, 0] * 4], "a kind of operation is unknown"),
        ([2, 0, -1, *[-1, 0] * 4], "a kind of operation is unknown"),
        ([2, 2, 2, -1, 0, 2, 0, *[-1, 0] * 2], "an operand is of a slot that is not there"),
        ([2, 0, *[2, *[-1, 0] * 4] * ((1 << 16) + 1)], "too many operations"),
    ],
)
def test_the_library_refuses_integers_of_no_sequence(loaded, integers, why):
    make = loaded._library.tilestream_sequence_make
    make.restype, said = ctypes.c_void_p, ctypes.c_char_p()
    assert make((ctypes.c_int64 * len(integers))(*integers), len(integers), ctypes.byref(said)) is None
    assert said.value.decode() == f"sequence: {why}"


def test_a_forked_process_asks_the_driver_itself(asked):
    """The library issues nothing there. A real driver answers that it is not initialised."""
    made = Sequence(1, [Write(1, Slot(0), 1)])
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            done, code = -1, ctypes.c_int32()
            if made._native is not None:
                done = made._issue(made._native, made._given(64), 0, ctypes.addressof(code))
            os.write(write, str(done).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    answer = os.read(read, 16).decode()
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    assert answer == ("0" if asked.native else "-1")


def test_what_is_no_operation_is_refused_by_its_place():
    with pytest.raises(TypeError, match=r"^sequence: operation 3 is a tuple; it must be one of this module's"):
        sequence._checked(3, 1, (1, 2))


def test_a_check_stops_the_issue_at_a_word_that_is_too_large(asked):
    words = (ctypes.c_int64 * 6)(3, 99, 5, 99, 4, 99)
    address, most = ctypes.addressof(words), Slot(0)
    made = Sequence(1, [Write(1, 2, 3), Check(address, 16, 3, most), Write(4, 5, 6)])
    made.issue(5)
    assert [one[0] for one in asked.operations] == [WRITE, WRITE]
    with pytest.raises(SequenceError, match="word 1 is 5, and at most 4 would") as raised:
        made.issue(4)
    assert raised.value.done == 1
    assert isinstance(raised.value.__cause__, Stopped)
    assert len(asked.operations) == 3, "what stands behind the check is not issued"
    words[2] = -1
    made.issue(4)


def test_the_host_waits_for_an_event(asked, monkeypatch):
    event = Event()
    made = Sequence(0, [AwaitEvent(event), Write(1, 2, 3)])
    made.issue()
    assert asked.waited == [event.handle]
