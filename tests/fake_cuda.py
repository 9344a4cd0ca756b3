"""A GPU for tests without one: streams are lists of work that the test does by hand, memory is the CPU's.

What is issued to a stream waits there until the test calls `Stream.run`. So a test can drive any order that a GPU could
take: a stream stuck behind a copy, the new epoch's signals before the old one's. Only what this package gives to the
driver itself is such work: stream writes, copies and waits, and the zeroing of signals. Torch's own happens at once.

Under capture work goes into a graph, and from there to a stream at each `Graph.replay`.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tilestream.arrival import device, device_words, landing, lanes, publishing
from tilestream.runtime import driver, graphs, producer, sequence, streams

#: The "device" of what is really in the CPU's memory.
DEVICE = torch.device("cpu")


class Until:
    """Work that is done when ``there`` says so: a stream's wait for a word, a kernel at its gate."""

    def __init__(self, there: Callable[[], bool]) -> None:
        self.there = there


class Stream:
    """Work in order. `run` does it, up to a wait for an event that has not come."""

    def __init__(self, cuda: FakeCuda, handle: int) -> None:
        self.cuda_stream, self.stream_id = handle, -handle  # torch's own: a caller's has its handle for a number
        self.device = DEVICE
        self._cuda = cuda
        self._work: list[Callable[[], object] | tuple[Stream, int]] = []
        self.issued = self.done = 0

    def give(self, work: Callable[[], object] | tuple[Stream, int]) -> None:
        """Issue ``work``: a function, or the (stream, position) to wait for."""
        if self._cuda.graph is not None:
            self._cuda.graph.add(self.cuda_stream, work)
            return
        self._work.append(work)
        self.issued += 1

    def run(self, count: int | None = None) -> int:
        """Do the next ``count`` pieces of work, or all; returns how many were done before one had to wait."""
        before = self.done
        while self._work and (count is None or self.done < before + count):
            work = self._work[0]
            if isinstance(work, Until):
                if not work.there():
                    break
            elif callable(work):
                work()
            elif work[0].done < work[1]:
                break
            del self._work[0]
            self.done += 1
        return self.done - before

    # As of torch.cuda.Stream ---------------------------------------------------------------------------------------

    def query(self) -> bool:
        return not self._cuda.over and self.done == self.issued

    def synchronize(self) -> None:
        self.run()
        assert self.query(), "waits for ever"

    def wait_event(self, event: Event) -> None:
        if event.at is not None:
            self.give(event.at)

    def wait_stream(self, other: Stream) -> None:
        self.give((other, other.issued))


class Event:
    """A place in a stream."""

    cuda: FakeCuda

    def __init__(self, blocking: bool = False) -> None:
        self.at: tuple[Stream, int] | None = None

    @property
    def cuda_event(self) -> int:
        """Its handle: another than those of the driver's events."""
        self.cuda.events.append(self)
        return -len(self.cuda.events)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.cuda.current
        self.at = stream, stream.issued

    def query(self) -> bool:
        return self.at is None or self.at[0].done >= self.at[1]

    def synchronize(self) -> None:
        self.cuda.run()
        assert self.query(), "waits for ever"


class Copy:
    """A copy: done at once as other work is, or begun and ended with other work between."""

    def __init__(self, to: int, source: int, size: int) -> None:
        self._to, self._source, self._size = to, source, size

    def __call__(self) -> None:
        self.end(self.begin())

    def begin(self) -> bytes:
        return ctypes.string_at(self._source, self._size)

    def end(self, read: bytes) -> None:
        ctypes.memmove(self._to, read, self._size)


class Graph:
    """What was captured: nodes of work, each behind others."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.work: list[Any] = []
        #: What each node is behind; by stream: what its next node will be behind.
        self.behind: list[set[int]] = []
        self.heads: dict[int, set[int]] = {}
        self._when_gone: list[tuple[int, int]] = []

    def add(self, handle: int, work: Any) -> None:
        self.behind.append(set(self.heads.get(handle, ())))
        self.heads[handle] = {len(self.work)}
        self.work.append(work)

    def replay(self, stream: Stream) -> None:
        """Do the nodes in the order of their capture."""
        for work in self.work:
            stream.give(work)

    def destroy(self) -> None:
        for function, argument in self._when_gone:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
        self._when_gone.clear()

    def call_when_gone(self, function: int, argument: int) -> None:
        self._when_gone.append((function, argument))


class Driver:
    """What this package asks of a driver, as work of a stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._events: list[tuple[Stream, int] | None] = []
        self._alive: set[int] = set()
        #: The functions that were called, by name.
        self.calls: list[str] = []

    def stream_write(self, stream: int, address: int, value: int) -> None:
        self._give("stream_write", stream, lambda: setattr(ctypes.c_int32.from_address(address), "value", value))

    def stream_wait(self, stream: int, address: int, value: int) -> None:
        self._give("stream_wait", stream, Until(lambda: ctypes.c_int32.from_address(address).value >= value))

    def copy_in(self, stream: int, to: int, source: int, size: int) -> None:
        self._give("copy_in", stream, Copy(to, source, size))

    copy_across = copy_in

    def captured_nodes(self, stream: int) -> tuple[int, ...]:
        return tuple(self._graph.heads.get(stream, ()))

    def follow_nodes(self, stream: int, nodes: tuple[int, ...], alone: bool) -> None:
        heads = self._graph.heads
        heads[stream] = set(nodes) | (set() if alone else heads.get(stream, set()))

    def call_when_gone(self, stream: int, function: int, argument: int) -> None:
        self._graph.call_when_gone(function, argument)

    @property
    def _graph(self) -> Graph:
        assert self._cuda.graph is not None, "nothing is captured"
        return self._cuda.graph

    def create_event(self) -> int:
        self._events.append(None)
        self._alive.add(len(self._events) - 1)
        return len(self._events) - 1

    def destroy_event(self, event: int) -> None:
        self._alive.remove(event)

    def _at(self, event: int) -> tuple[Stream, int] | None:
        assert event in self._alive, "the event is destroyed"
        return self._events[event]

    def record_event(self, stream: int, event: int) -> None:
        self.calls.append("record_event")
        self._at(event)
        here = self._cuda.streams[stream]
        self._events[event] = here, here.issued

    def wait_event(self, stream: int, event: int) -> None:
        at = self._at(event) if event >= 0 else self._cuda.events[-1 - event].at
        if at is not None:
            self._give("wait_event", stream, at)

    def bind_context(self) -> None:
        """Every thread has the one context."""

    def context_id(self) -> int:
        return 0

    def error_name(self, code: int) -> str:
        return f"code {code}"

    def has_come(self, event: int) -> bool:
        at = self._at(event)
        return self._cuda.over or at is None or at[0].done >= at[1]

    def await_event(self, event: int) -> None:
        if self._cuda.over:
            return
        self._cuda.run()
        assert self.has_come(event), "waits for ever"

    def _give(self, name: str, stream: int, work: Any) -> None:
        self.calls.append(name)
        self._cuda.streams[stream].give(work)


class FakeCuda:
    """The device: its streams, the one that is current in each thread, the capture under way, and pinned memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.streams = [Stream(self, 0)]
        self.graph: Graph | None = None
        #: Torch's events whose handles were asked for.
        self.events: list[Event] = []
        #: Its block has ended: a stream that is given back after that is not lent again.
        self.over = False
        self._recorded: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._captures = 0
        self._pinned: list[torch.Tensor] = []
        self._here = threading.local()
        self._patch(patch)

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "Event", type("Event", (Event,), {"cuda": self}))
        patch.setattr(torch.cuda, "ExternalStream", lambda handle, device: self.streams[handle])
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.graph is not None)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: self._record(x, stream))
        patch.setattr(torch.Tensor, "is_pinned", lambda x: _storage(x) in map(_storage, self._pinned))
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: self.current.cuda_stream, raising=False)
        patch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
        #: What is asked of the driver.
        self.driver = Driver(self)
        patch.setattr(driver, "current", lambda: self.driver)
        for module in (sequence, producer):
            patch.setattr(module, "library", lambda: None)
        landing.filling.cache_clear()
        patch.setattr(landing, "_kept", deque())
        patch.setattr(landing, "_spare", {})
        patch.setattr(streams, "_identity", None)
        patch.setattr(streams, "current_device", lambda: DEVICE.index)
        for module in (device, publishing):
            patch.setattr(module, "capture_id", lambda handle: 0 if self.graph is None else self.graph.number)
        patch.setattr(lanes, "_idle", {})
        patch.setattr(lanes, "_lent", set())
        for module in (device, device_words):
            patch.setattr(module, "zero", lambda words: self.current.give(words.zero_))
        patch.setattr(device_words, "_captured_stores", [])
        patch.setattr(graphs, "_kept", {})
        patch.setattr(device.DeviceSignals, "_failed", {})
        patch.setattr(streams, "create_stream", lambda: self.stream().cuda_stream)
        patch.setattr(streams, "_idle", {})

    def _record(self, x: torch.Tensor, stream: Stream) -> None:
        """As torch's allocator does: the memory is not freed while the stream may have work for it; here, never."""
        self._recorded[_storage(x), stream.cuda_stream] = x.untyped_storage()

    @property
    def current(self) -> Stream:
        """The current stream of this thread."""
        found: Stream = getattr(self._here, "stream", self.streams[0])
        return found

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        before, self._here.stream = self.current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def stream(self) -> Stream:
        """A new stream."""
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

    def run(self) -> None:
        """Do everything on all streams, as far as it can be done."""
        while sum(stream.run() for stream in self.streams):
            pass

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """What is issued goes into a graph, from whatever stream."""
        self._captures += 1
        self.graph = graph = Graph(self._captures)
        try:
            yield graph
        finally:
            self.graph = None

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        """Take ``x``'s memory for pinned."""
        self._pinned.append(x)
        return x

    def records(self, x: torch.Tensor, stream: Stream) -> bool:
        """Whether torch's allocator was told that ``stream`` uses ``x``'s memory."""
        return (_storage(x), stream.cuda_stream) in self._recorded


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """A fake GPU in place of torch's, for the length of the block."""
    with pytest.MonkeyPatch.context() as patch:
        made = FakeCuda(patch)
        try:
            yield made
        finally:
            made.over = True
