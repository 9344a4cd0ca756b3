"""Signals: the words that say that a chunk has arrived, on the host.

Two kinds (invariant 4). Our own are **epochs**: a chunk has arrived when its word is at least the call's epoch, a new
one begins by counting up, and nothing is ever cleared. A caller's own tensor of words is **self-reset**: a
chunk has arrived when its word is not zero, and the call that has seen all of them writes zeros.

A waiting thread sleeps on a condition and does not spin. A caller's own words can be written from outside (another
process, C++ code) without a notification, so they are polled every `POLL_SECONDS` as well.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, MutableSequence, Sequence
from enum import Enum, auto

from tilestream.core.error_record import sources
from tilestream.core.errors import ProducerStopped
from tilestream.core.forks import free_in_child

#: Seconds between two polls of a caller's own signal words: at first, and at most.
POLL_SECONDS = (0.0002, 0.004)
#: Longest single sleep, within the range of the system's clocks; a longer wait sleeps again.
_LONGEST_SLEEP = 3600.0


class Outcome(Enum):
    """How a wait ended."""

    ARRIVED = auto()
    FAILED = auto()  # the producer reported an exception
    OVER = auto()  # another worker has aborted the launch
    EXPIRED = auto()  # the deadline passed


class Signals:
    """The signal words of one input, and the bell that is rung when one changes.

    Parameters
    ----------
    count
        Number of chunks.
    words
        The caller's own words (anything indexed like a list of ints); None for our own.
    """

    #: Where the words are.
    device = "cpu"
    _keys = itertools.count(1)

    def __init__(self, count: int, words: MutableSequence[int] | None = None) -> None:
        #: Number of chunks.
        self.count = count
        #: The present epoch: chunks signalled in an earlier one have not arrived. 1 for a caller's own words.
        self.epoch = 1
        #: Whether a call that has seen all chunks writes zeros.
        self.self_reset = words is not None
        #: Whether a `tilestream.Stream`, and nothing else, signals the chunks.
        self.streamed = False
        self._words: MutableSequence[int] = [0] * count if words is None else words
        self._bell = free_in_child(threading.Condition())  # its lock may be taken again by the thread that holds it
        self._error: tuple[int, BaseException] | None = None
        self._times: list[float | None] = [None] * count
        #: The epochs whose producer's exception was raised.
        self.raised: set[int] = set()
        #: Of chunks that other ranks send: (the rank that waits here, what to call a chunk's source), by chunk.
        self.whose: Callable[[int], tuple[int, str]] | None = None
        #: Called when an expiry is reported of a launch that waited for these.
        self.gave_up: Callable[[], None] | None = None
        #: Names these signals in the arguments of a registered op, which takes integers; never given twice.
        self.key = next(self._keys)
        sources[self.key] = self

    @classmethod
    def by_key(cls, key: int) -> Signals:
        """The live signals of that key. `KeyError` once their owner has dropped them."""
        found = sources[key]
        assert isinstance(found, Signals)
        return found

    @property
    def copied(self) -> int:
        """Bytes of the words in which a kernel copies what these signal; 0 where something else brings it."""
        return 0

    def advance(self) -> int:
        """Begin a new epoch, in which nothing has arrived yet; returns it.

        Our own words are not touched: a late signal of an earlier epoch stays below the new epoch and does not count.
        """
        with self._bell:
            if self.self_reset:
                self.clear()
                self._error = None
            else:
                self.epoch += 1
            self._times = [None] * self.count
            self._bell.notify_all()
            return self.epoch

    def set(self, chunk: int, epoch: int | None = None) -> None:
        """Chunk ``chunk`` has arrived (in epoch ``epoch``, the present one where None).

        A thread that sees the signal sees what was written before it: both sides hold the bell's lock.
        """
        with self._bell:
            value = self._checked(chunk, epoch)
            if self.self_reset:
                self._words[chunk] = 1
            else:
                self._words[chunk] = max(value, self._words[chunk])
            if value == self.epoch:
                self._times[chunk] = time.perf_counter()
            self._bell.notify_all()

    def _checked(self, chunk: int, epoch: int | None) -> int:
        """The epoch meant."""
        self._check(chunk)
        if epoch is not None and epoch > self.epoch:
            raise ValueError(f"signal: epoch={epoch}; the present epoch is {self.epoch}: advance() begins the next")
        return self.epoch if epoch is None else epoch

    def _check(self, chunk: int) -> None:
        if not 0 <= chunk < self.count:
            raise IndexError(f"signal: chunk={chunk}; there are {self.count} chunks, from 0")

    def begin_publishing(self) -> int:
        """A matmul is about to signal each chunk of the present epoch. Returns the epoch that it signals.

        Raises
        ------
        ValueError
            If a chunk of it is signalled already: a reader would take what is being overwritten. Or if a
            `tilestream.Stream` signals them.
        """
        with self._bell:
            self._check_unpublished([chunk for chunk, there in enumerate(self.state()) if there])
            return self.epoch

    def _check_unpublished(self, signalled: Sequence[int]) -> None:
        if self.streamed:
            raise ValueError(
                "publish: the arrival of a stream, which signals its chunks itself; give an Arrival of the output's own"
            )
        if signalled:
            way = "zero your words: arrival.reset()" if self.self_reset else "arrival.advance() begins the next one"
            raise ValueError(f"publish: chunk {signalled[0]} of epoch {self.epoch} is signalled already; {way}")

    def fail(self, error: BaseException, epoch: int | None = None) -> None:
        """The producer cannot go on: ``error`` is raised by the call that waits for what is missing."""
        with self._bell:
            if epoch in (None, self.epoch) and self.error(self.epoch) is None:  # later ones follow from the first
                self._error = (self.epoch, error)
            self._bell.notify_all()

    def error(self, epoch: int) -> BaseException | None:
        """What the producer of epoch ``epoch`` reported, if anything: to look at. To raise, `take_error`."""
        return self._error[1] if self._error is not None and self._error[0] == epoch else None

    def take_error(self, epoch: int) -> BaseException | None:
        """What the producer of epoch ``epoch`` reported, if anything, to be raised.

        The first call is given the exception itself, later ones a copy: an exception that was raised holds the frames
        it went through, with the operands in them, and must not be kept here (invariant 8).
        """
        error = self.error(epoch)
        if error is None:
            return None
        self.raised.add(epoch)
        try:
            again = copy.copy(error)
            again.__cause__ = error.__cause__
        except Exception:  # a caller's exception that cannot be copied is kept
            again = error
        with self._bell:
            if self._error == (epoch, error):
                self._error = (epoch, again)
        return error

    def failure(self, epoch: int) -> BaseException:
        """What a wait that ended as `Outcome.FAILED` shall raise."""
        self.raised.add(epoch)
        return self.take_error(epoch) or ProducerStopped("the producer failed, and began anew")

    def reported(self) -> None:
        """A launch has reported that the producer failed."""

    def arrived(self, chunk: int, epoch: int | None = None) -> bool:
        """Whether the chunk has arrived in epoch ``epoch`` (the present one where None)."""
        self._check(chunk)
        if self.self_reset:
            return int(self._words[chunk]) != 0
        return self._words[chunk] >= (self.epoch if epoch is None else epoch)

    def state(self) -> list[bool]:
        """Whether each chunk has arrived in this epoch."""
        return [self.arrived(chunk) for chunk in range(self.count)]

    @property
    def times(self) -> tuple[float | None, ...]:
        """When each chunk of this epoch was signalled (`time.perf_counter`); None where it was not, or not by `set`."""
        return tuple(self._times)

    def clear(self) -> None:
        """Write zeros into a caller's own words; our own are never cleared."""
        with self._bell:
            if self.self_reset:
                for chunk in range(self.count):
                    self._words[chunk] = 0

    def reset(self) -> None:
        """Zero a caller's own words, whatever was seen of them."""
        self.clear()

    def ring(self) -> None:
        """Wake the waiting threads, so that each looks at its abort word."""
        with self._bell:
            self._bell.notify_all()

    def wait(self, chunk: int, epoch: int, deadline: float, over: Callable[[], bool]) -> Outcome:
        """Wait until ``chunk`` has arrived in epoch ``epoch``, its producer failed, the launch is over or time is up.

        Parameters
        ----------
        deadline
            On `time.perf_counter`'s clock.
        over
            The launch's abort word. `ring` comes after setting it.
        """
        return self.wait_any(((chunk,),), epoch, deadline, over)[0]

    def wait_any(
        self, sets: Sequence[Sequence[int]], epoch: int, deadline: float, over: Callable[[], bool]
    ) -> tuple[Outcome, int]:
        """As `wait`, until all chunks of one of several sets have arrived; with that, the first such set, else -1."""
        pause = POLL_SECONDS[0] if self.self_reset else _LONGEST_SLEEP
        with self._bell:
            while True:
                for number, chunks in enumerate(sets):
                    if all(self.arrived(chunk, epoch) for chunk in chunks):
                        return Outcome.ARRIVED, number
                if self.error(epoch) is not None:
                    return Outcome.FAILED, -1
                if over():
                    return Outcome.OVER, -1
                remaining = deadline - time.perf_counter()
                if remaining <= 0:
                    return Outcome.EXPIRED, -1
                self._bell.wait(min(remaining, pause))
                if self.self_reset:
                    pause = min(2 * pause, POLL_SECONDS[1])
