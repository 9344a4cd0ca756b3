"""Ranks of a group on fake GPUs, in one process: what they share, their drivers, clock and watchdogs."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from fake_cuda import DEVICE, FakeCuda, Until
from tilestream.core.error_record import Told
from tilestream.core.errors import GroupBroken
from tilestream.core.protocols import gather
from tilestream.distributed import call_queue, copy_engines, gpu_reduce_scatter
from tilestream.distributed.call_queue import CallQueue
from tilestream.distributed.host_flags import LINE, RankFlags
from tilestream.runtime import driver


class Clock:
    """Time that passes only while a host sleeps; then the device runs."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.now, self._cuda = 0.0, cuda

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._cuda.run()


class Memory:
    """All ranks' slots, signals and flags."""

    def __init__(self, ranks: int, slot_bytes: int, chunks: int = 0) -> None:
        self.ranks, self.chunks, self.slot_bytes = ranks, chunks, 0
        self.signals = [torch.zeros(gather.SLOTS * chunks, dtype=torch.int32) for _ in range(ranks)]
        self.flags = torch.zeros(ranks * (ranks + 2) * LINE, dtype=torch.uint8)
        self._old: list[Any] = []
        self.grow(slot_bytes)

    def grow(self, slot_bytes: int) -> None:
        """New slots, unless they are as large; the old ones stay readable."""
        if slot_bytes > self.slot_bytes:
            self._old.append(getattr(self, "slots", None))
            self.slots = [torch.full((gather.SLOTS * slot_bytes,), 255, dtype=torch.uint8) for _ in range(self.ranks)]
            self.slot_bytes = slot_bytes

    def of(self, rank: int) -> RankMemory:
        return RankMemory(self, rank)


class RankMemory:
    """As `symmetric.PeerMemory`, of one rank."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self._memory, self._rank = memory, rank
        self.flags = RankFlags(memory.flags.data_ptr(), memory.flags.data_ptr(), rank, memory.ranks)
        self.chunks = memory.chunks

    @property
    def slot_bytes(self) -> int:
        return self._memory.slot_bytes

    def grow(self, slot_bytes: int, chunks: int) -> None:
        self._memory.grow(slot_bytes)

    def slot(self, of: int, number: int) -> torch.Tensor:
        return self._memory.slots[of][number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def address(self, of: int, number: int) -> int:
        return self.slot(of, number).data_ptr()

    def signals(self, number: int) -> torch.Tensor:
        return self._memory.signals[self._rank][self.chunks * number : self.chunks * (number + 1)]

    def signal(self, of: int, number: int, chunk: int) -> int:
        assert 0 <= chunk < self.chunks
        return self._memory.signals[of].data_ptr() + 4 * (self.chunks * number + chunk)


class GroupState:
    """As `group_state.GroupState`, as far as a call queue uses it."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.name, self.why, self.told = rank, world, "tp", None, Told()
        self.repeats: dict[object, object] = {}
        self.prepared: set[bytes] = set()
        self.repeated, self.broken_word = 0, ctypes.c_int64(0)

    @property
    def broken(self) -> bool:
        return self.why is not None

    def check(self) -> None:
        if self.why:
            raise GroupBroken(self.name, self.why)

    def break_(self, why: str) -> GroupBroken:
        self.why, self.broken_word.value = self.why or why, 1
        return GroupBroken(self.name, self.why)


class Rank:
    """A rank: its call queue and streams, and the result of each call (None: expired, or void)."""

    kind: type[CallQueue]

    def __init__(self, cuda: FakeCuda, memory: Memory, rank: int, streams: int = 1) -> None:
        self.cuda, self.rank, self.world = cuda, rank, memory.ranks
        self.state = GroupState(rank, memory.ranks)
        self.calling_streams = [cuda.stream() for _ in range(streams)]
        self.shapes: list[Any] = []
        self.results: dict[int, torch.Tensor | None] = {}
        with cuda.on(self.calling), self.here():
            self.queue = self.kind(self.state, DEVICE, memory.of(rank))
        self.queue._watchdog.wake = lambda: None  # the test polls
        self.side = self.queue._side

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Code of this rank runs."""
        yield

    @property
    def calling(self):
        """The stream of the next call."""
        return self.calling_streams[len(self.shapes) % len(self.calling_streams)]

    def watch(self) -> None:
        """The watchdog polls as often as it needs to be sure."""
        with self.here():
            for _ in range(gpu_reduce_scatter.POLLS + 1):
                self.queue.poll()

    def room(self) -> bool:
        """Whether the host of a real rank would go on: else it would wait, or raise."""
        return len(self.queue._under_way()) <= gather.AHEAD and not self.state.broken

    def run(self, data: st.DataObject, most: int) -> None:
        """Run some work of one of the rank's streams."""
        data.draw(st.sampled_from([*self.calling_streams, self.side])).run(data.draw(st.integers(1, most)))

    @property
    def idle(self) -> bool:
        return all(stream.query() for stream in (*self.calling_streams, self.side))


def call_in_any_order(data: st.DataObject, cuda: FakeCuda, ranks: list[Any], calls: list[Any], **how: Any) -> None:
    """All ranks make all calls, their streams run in any order; every result is of its own call, and none expires."""
    while any(len(rank.results) < len(calls) for rank in ranks):
        rank = data.draw(st.sampled_from(ranks))
        if data.draw(st.integers(0, 2)) == 0 and len(rank.shapes) < len(calls) and rank.room():
            rank.call(calls[len(rank.shapes)], **how)
        else:
            rank.run(data, 5)
        if data.draw(st.integers(0, 9)) == 0:
            cuda.run()
            for each in ranks:
                if len(each.shapes) < len(calls) and each.room():
                    each.call(calls[len(each.shapes)], **how)
    check_results(ranks, *range(1, len(calls) + 1))
    for rank in ranks:
        rank.watch()
        assert not rank.state.broken, "the watchdog gave up without reason"


def call_all(ranks: Iterable[Any], *given: Any, **how: Any) -> None:
    """Every rank issues the same call."""
    for rank in ranks:
        rank.call(*given, **how)


def check_results(ranks: Iterable[Any], *calls: int) -> None:
    """Every rank has the results of these calls."""
    for rank in ranks:
        for call in calls:
            assert rank.results[call].equal(rank.expected(call)), (rank.rank, call)


def call_again_after_memory_error(cuda: FakeCuda, ranks: list[Any], shape: object, name: str) -> None:
    """Two ranks call. The second's ``queue.name`` finds no memory before its call is counted, and it calls again."""
    first, second = ranks
    first.call(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second.queue, name, raises(MemoryError("no room")))
        with pytest.raises(MemoryError):
            second.call(shape)
    second.shapes.clear()
    second.call(shape)
    cuda.run()
    assert not any(rank.state.broken for rank in ranks)
    check_results(ranks, 1)


def raises(error: BaseException) -> Any:
    """A function that raises ``error``."""

    def function(*args: Any, **kwargs: Any) -> None:
        raise error

    return function


def patch_driver(cuda: FakeCuda, patch: pytest.MonkeyPatch) -> Clock:
    """The fake device performs what ranks give to the driver. Returns the hosts' clock."""

    def write(stream: int, address: int, value: int) -> None:
        cuda.streams[stream].give(lambda: setattr(ctypes.c_int32.from_address(address), "value", value))

    def wait(stream: int, address: int, value: int) -> None:
        cuda.streams[stream].give(Until(lambda: ctypes.c_int32.from_address(address).value >= value))

    clock, events = Clock(cuda), []

    class Event(torch.cuda.Event):
        """As torch's: sequences know it by a handle, its place among the world's events."""

        cuda_event = 0

        def __init__(self) -> None:
            super().__init__()
            self.cuda_event = len(events)
            events.append(self)

    performed = {
        "stream_write": write, "stream_wait": wait, "copy_across": cuda.driver.copy_across,
        "copy_in": cuda.driver.copy_in,
        "record_event": lambda stream, event: events[event].record(cuda.streams[stream]),
        "wait_event": lambda stream, event: cuda.streams[stream].wait_event(events[event]),
    }  # fmt: skip
    for name, does in performed.items():
        patch.setattr(driver, name, does)
    patch.setattr(torch.cuda, "Event", Event)
    for module in (call_queue, copy_engines, gpu_reduce_scatter):
        patch.setattr(module, "time", clock)
    # Never lent: a queue of an earlier world, found by the garbage collector, would return its stream to this one.
    patch.setattr(call_queue, "lend_to", lambda borrower, device: cuda.stream())
    patch.setattr(call_queue, "POLL_SECONDS", 0.01)
    patch.setattr(call_queue, "barrier", lambda state, device: None)
    return clock
