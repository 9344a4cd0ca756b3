"""A caller's own words that a matmul publishes: every order in which the streams of a GPU could run what was issued.

What is issued is what `DeviceSignals` issues, on a fake GPU; then each order of the streams is gone through, and in
none of them does a reader see what is not there, expire, hold an SM that the matmul needs, or wait for ever. Without
any one of the rules of `tilestream.arrival.publishing` some order does one of these.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fake_cuda import DEVICE, FakeCuda, Stream, Until, fake_cuda
from tilestream.arrival import device_words
from tilestream.arrival.device import DeviceSignals
from tilestream.arrival.publishing import Publishing

CHUNKS = 2


class Gate(Until):
    """A kernel's wait: it has a deadline. A stream's has none."""


class World:
    """A buffer of `CHUNKS` chunks, the caller's words beside it, and who writes and reads them on which stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.words = torch.zeros(CHUNKS, dtype=torch.int32)
        self.signals = DeviceSignals(CHUNKS, DEVICE, self.words)
        self.data = [0] * CHUNKS  # whose it is
        self.found: set[str] = set()
        self._streams: dict[str, Stream] = {}

    def on(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = self.cuda.stream()
        return self._streams[name]

    def publish(self, number: int, stream: str, chunks: int = CHUNKS, kernel: bool = True, fails: bool = False) -> None:
        """A matmul in one launch, or in one a chunk (of so many chunks), which then fails or does not."""
        at = self.on(stream)
        with self.cuda.on(at):
            words = self.signals.publish().signals
            for chunk in range(chunks):
                at.give(lambda chunk=chunk: self.data.__setitem__(chunk, number))
                if kernel:
                    at.give(lambda chunk=chunk: words.__setitem__(chunk, 1))
                else:
                    self.signals.set(chunk)
            if fails:
                self.signals.fail(MemoryError("no room"))
            else:
                self.signals.published(0 if kernel else None)

    def copy(self, number: int, stream: str) -> None:
        """Copies, and their signals."""
        at = self.on(stream)
        with self.cuda.on(at):
            for chunk in range(CHUNKS):
                at.give(lambda chunk=chunk: self.data.__setitem__(chunk, number))
                self.signals.set(chunk)

    def read(self, number: int, stream: str, matmul: bool = True) -> None:
        """A launch that reads what ``number`` writes (a matmul here), and zeroes the words when it has seen all."""
        at = self.on(stream)

        def begins() -> None:
            if matmul and self.data != [number] * CHUNKS:
                self.found.add("holds SMs")

        def reads(chunk: int) -> None:
            if self.data[chunk] != number:
                self.found.add("wrong numbers")

        with self.cuda.on(at):
            self.signals.use()
            at.give(begins)
            for chunk in range(CHUNKS):
                at.give(Gate(lambda chunk=chunk: bool(self.words[chunk])))
                at.give(lambda chunk=chunk: reads(chunk))
            at.give(self.words.zero_)

    def advance(self, stream: str) -> None:
        with self.cuda.on(self.on(stream)):
            self.signals.advance()

    def wipe(self, stream: str, behind: str) -> None:
        """The caller zeroes the words."""
        self.on(stream).wait_stream(self.on(behind))
        self.on(stream).give(self.words.zero_)

    # Every order ---------------------------------------------------------------------------------------------------

    def orders(self) -> set[str]:
        """What goes wrong in any order of the streams."""
        streams = self.cuda.streams
        work = [list(stream._work) for stream in streams]
        before = [stream.done for stream in streams]
        start = (*(0 for _ in streams), *self.words.tolist(), *self.data)
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            moved = False
            for stream in streams:
                self._restore(state, work, before)
                if not stream.run(1):
                    continue
                moved = True
                after = (*(s.done - b for s, b in zip(streams, before, strict=True)), *self.words.tolist(), *self.data)
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
            if not moved:
                heads = [work[i][state[i]] for i in range(len(streams)) if state[i] < len(work[i])]
                if any(isinstance(head, Gate) for head in heads):
                    self.found.add("expires")
                elif heads:
                    self.found.add("held for ever")
        assert len(seen) > 10, "orders"
        return self.found

    def _restore(self, state: tuple[int, ...], work: list[list], before: list[int]) -> None:
        count = len(work)
        for stream, done, todo, base in zip(self.cuda.streams, state[:count], work, before, strict=True):
            stream._work, stream.done = todo[done:], base + done
        self.words.copy_(torch.tensor(state[count : count + CHUNKS], dtype=torch.int32))
        self.data[:] = state[count + CHUNKS :]


Script = Callable[[World], object]

#: What is issued, in this order; the streams run in any.
SCRIPTS: dict[str, list[Script]] = {
    "two epochs, two readers": [
        lambda w: w.publish(1, "P"), lambda w: w.read(1, "R"), lambda w: w.publish(2, "P"), lambda w: w.read(2, "S"),
    ],
    "no launch reads the first": [
        lambda w: w.publish(1, "P"), lambda w: w.publish(2, "Q"), lambda w: w.read(2, "R"),
    ],
    "advance on another stream": [
        lambda w: w.publish(1, "P"), lambda w: w.read(1, "R"), lambda w: w.advance("X"), lambda w: w.publish(2, "Q"),
        lambda w: w.read(2, "S"),
    ],
    "one fails half way": [
        lambda w: w.publish(1, "P", chunks=1, kernel=False, fails=True), lambda w: w.publish(2, "Q", kernel=False),
        lambda w: w.read(2, "R"),
    ],
    "one fails behind its launch": [
        lambda w: w.publish(1, "P", fails=True), lambda w: w.publish(2, "Q"), lambda w: w.read(2, "R"),
    ],
    "copies after an unread one": [
        lambda w: w.publish(1, "P"), lambda w: w.advance("X"),
        lambda w: w.on("Y").wait_stream(w.on("P")),  # for the buffer, which is the caller's
        lambda w: w.copy(2, "Y"), lambda w: w.read(2, "R", matmul=False),
    ],
    "a matmul after copies": [
        lambda w: w.copy(1, "Y"), lambda w: w.read(1, "R", matmul=False), lambda w: w.advance("X"),
        lambda w: w.publish(2, "P"), lambda w: w.read(2, "S"),
    ],
}  # fmt: skip
#: Neither old numbers nor a stream that waits without a bound (invariant 5): the chunks never come.
EXPIRE: dict[str, list[Script]] = {
    "it reads what failed": [
        lambda w: w.publish(1, "P"), lambda w: w.publish(2, "P", chunks=0, fails=True),
        lambda w: w.read(2, "R", matmul=False),
    ],
    "the caller zeroes the words": [
        lambda w: w.publish(1, "P"), lambda w: w.wipe("X", behind="P"), lambda w: w.read(1, "R"),
    ],
}  # fmt: skip


def explore(script: str, break_it: Callable[[pytest.MonkeyPatch], object] = id) -> set[str]:
    with fake_cuda() as cuda, pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        world = World(cuda)
        for issue in (SCRIPTS | EXPIRE)[script]:
            issue(world)
        return world.orders()


@pytest.mark.parametrize("script", SCRIPTS)
def test_in_no_order_does_anything_go_wrong(script):
    assert explore(script) == set()


@pytest.mark.parametrize("script", EXPIRE)
def test_a_reader_whose_chunks_never_come_expires_and_is_told(script):
    assert explore(script) == {"expires"}


def _waits_for_a_word(patch: pytest.MonkeyPatch) -> None:
    issued = Publishing.published

    def published(self: Publishing, first: int | None) -> None:
        issued(self, first)
        assert self._theirs is not None
        assert self._published is not None
        self._published = self._published._replace(first=(self._theirs.data_ptr(), 1))

    patch.setattr(Publishing, "published", published)


#: How a rule is broken, in which script that shows, and as what.
RULES = {
    "words begin as zeros": (
        lambda patch: patch.setattr(device_words, "zero", lambda words: None), "it reads what failed", "wrong numbers",
    ),
    "they are zeroed behind all who used them": (
        lambda patch: patch.setattr(DeviceSignals, "_come_behind_all", lambda self, stream: None),
        "advance on another stream", "expires",
    ),
    "their next use comes behind that": (
        lambda patch: patch.setattr(DeviceSignals, "_settle", lambda self, stream: None),
        "copies after an unread one", "expires",
    ),
    "what a failed one did issue is known": (
        lambda patch: patch.setattr(Publishing, "stopped", lambda self: setattr(self, "_underway", None)),
        "one fails behind its launch", "wrong numbers",
    ),
    "a reader comes behind the matmul": (
        lambda patch: patch.setattr(Publishing, "_known", lambda self: False), "no launch reads the first", "holds SMs",
    ),
    "no stream waits for a word": (_waits_for_a_word, "the caller zeroes the words", "held for ever"),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_without_any_one_of_the_rules_something_does(rule):
    break_it, script, wrong = RULES[rule]
    assert wrong in explore(script, break_it)
