"""Signals on the host: the words that show which chunks have arrived.

There are two kinds (invariant 4). Tilestream's own words are **epochs**: a chunk has arrived when its word is at least
the call's epoch. A new epoch is the next number, and no word is ever cleared. A caller's own words are **self-reset**:
a chunk has arrived when its word is nonzero, and the call that has seen all words writes zeros.

A waiting thread sleeps on a condition and does not spin. Others (another process, C++ code) can write a caller's own
words without a notification, so a waiting thread also polls these every `POLL_SECONDS`.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, MutableSequence, Sequence
from enum import Enum, auto

from tilestream.core.error_record import Told, sources
from tilestream.core.errors import ProducerStopped
from tilestream.core.forks import free_in_child

#: Seconds between two polls of a caller's own signal words: the first pause, and the longest.
POLL_SECONDS = (0.0002, 0.004)
#: Seconds that no copy takes to be issued, also one that waits for staging: 1 GB of pageable memory takes as long.
HELD_SECONDS = 0.25
#: Longest single sleep, within the range of the system's clocks; a longer wait sleeps several times.
_LONGEST_SLEEP = 3600.0


class Outcome(Enum):
    """The end of a wait."""

    ARRIVED = auto()
    FAILED = auto()  # the producer reported an exception
    OVER = auto()  # another worker has aborted the launch
    EXPIRED = auto()  # the deadline passed


class Signals:
    """The signal words of one input, and the bell that notifies of each change.

    Parameters
    ----------
    count
        Number of chunks.
    words
        The caller's own words (anything indexed like a list of ints); None for tilestream's own.
    bell
        The condition that notifies of changes, if the signals' owner keeps one.
    """

    #: The device of the words.
    device = "cpu"
    #: Whether a `tilestream.Stream` is the only producer.
    streamed = False
    #: For chunks from other ranks: from a chunk to this rank's number and a name of the chunk's source.
    whose: Callable[[int], tuple[int, str]] | None = None
    #: For rows by source: from a word to its source and group; -1 for the group: the word of the source's counts.
    named: Callable[[int], tuple[int, int]] | None = None
    #: Called when a launch that waited for these signals reports an expired deadline.
    gave_up: Callable[[], None] | None = None
    #: For chunks from other ranks: what has been raised of their group; None: these signals fail alone.
    told: Told | None = None
    #: Of this epoch's producer: the start of the copy that it is issuing, and the longest that one took to issue.
    issuing_since: float | None = None
    longest_issue = 0.0
    _error: tuple[int, BaseException] | None = None
    _keys = itertools.count(1)

    def __init__(
        self, count: int, words: MutableSequence[int] | None = None, bell: threading.Condition | None = None
    ) -> None:  # fmt: skip
        #: Number of chunks.
        self.count = count
        #: The present epoch: signals of earlier epochs do not count. Always 1 for a caller's own words.
        self.epoch = 1
        #: Whether the call that has seen all chunks writes zeros.
        self.self_reset = words is not None
        self._words: MutableSequence[int] = [0] * count if words is None else words
        self._bell = bell or free_in_child(threading.Condition())  # its lock is reentrant
        self._times: list[float | None] = [None] * count
        #: The epochs whose producer's exception has been raised.
        self.raised: set[int] = set()
        #: Names these signals in the arguments of a registered op, which takes integers; never reused.
        self.key = next(self._keys)
        sources[self.key] = self

    @classmethod
    def by_key(cls, key: int) -> Signals:
        """The live signals of ``key``; `KeyError` after their owner has dropped them."""
        found = sources[key]
        assert isinstance(found, Signals)
        return found

    @property
    def copied(self) -> int:
        """Bytes of a word of the kernel's copies of these chunks; 0 if no kernel copies them."""
        return 0

    @property
    def held(self) -> float:
        """See `tilestream.core.error_record.Source`."""
        since = self.issuing_since
        longest = max(self.longest_issue, 0.0 if since is None else time.perf_counter() - since)
        return longest if longest > HELD_SECONDS else 0.0

    @property
    def linked(self) -> bool:
        """See `tilestream.core.chunks.Incoming`."""
        return False

    def advance(self) -> int:
        """Begin a new epoch, in which no chunk has arrived yet; returns it.

        Tilestream's own words keep their values: a late signal of an earlier epoch is below the new epoch and does not
        count.
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
        """Signal that chunk ``chunk`` has arrived in epoch ``epoch`` (None: the present epoch).

        A thread that sees the signal sees all writes before it: both sides hold the bell's lock.
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

    def leave_out(self, chunk: int, epoch: int) -> None:
        """Note that chunk ``chunk`` is not brought in ``epoch``. It is signalled: calls on the CPU refuse its rows."""
        self.set(chunk, epoch)

    def _checked(self, chunk: int, epoch: int | None) -> int:
        """Check ``chunk`` and ``epoch``; the epoch to signal."""
        self._check(chunk)
        if epoch is not None and epoch > self.epoch:
            raise ValueError(f"signal: epoch={epoch}; the present epoch is {self.epoch}: advance() begins the next")
        return self.epoch if epoch is None else epoch

    def _check(self, chunk: int) -> None:
        if not 0 <= chunk < self.count:
            raise IndexError(f"signal: chunk={chunk}; there are {self.count} chunks, from 0")

    def begin_publishing(self) -> int:
        """Check that a matmul may signal each chunk of the present epoch; returns that epoch.

        Raises
        ------
        ValueError
            If a chunk of it is already signalled, since a reader would read rows while they are overwritten; or if a
            `tilestream.Stream` signals the chunks.
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
        """Report that the producer cannot continue: the call that waits for a missing chunk raises ``error``."""
        with self._bell:
            if epoch in (None, self.epoch) and self.error(self.epoch) is None:  # later errors follow from the first
                self._error = (self.epoch, error)
            self._bell.notify_all()

    def error(self, epoch: int) -> BaseException | None:
        """The exception that the producer of ``epoch`` reported, for inspection; `take_error` is for raising."""
        return self._error[1] if self._error is not None and self._error[0] == epoch else None

    def take_error(self, epoch: int) -> BaseException | None:
        """The exception that the producer of ``epoch`` reported, to be raised; None without one.

        The first call returns the exception itself, later calls a copy: a raised exception holds the frames that it
        passed, with the operands in them, and must not be kept here (invariant 8).
        """
        error = self.error(epoch)
        if error is None:
            return None
        self.raised.add(epoch)
        try:
            again = copy.copy(error)
            again.__cause__ = error.__cause__
        except Exception:  # a caller's exception that cannot be copied
            again = error
        with self._bell:
            if self._error == (epoch, error):
                self._error = (epoch, again)
        return error

    def failure(self, epoch: int) -> BaseException:
        """The exception for a wait that ended as `Outcome.FAILED`."""
        self.raised.add(epoch)
        return self.take_error(epoch) or ProducerStopped("the producer failed, and began anew")

    def reported(self) -> None:
        """Note that a launch has reported the producer's failure."""

    def arrived(self, chunk: int, epoch: int | None = None) -> bool:
        """Whether the chunk has arrived in epoch ``epoch`` (None: the present epoch)."""
        self._check(chunk)
        if self.self_reset:
            return int(self._words[chunk]) != 0
        return self._words[chunk] >= (self.epoch if epoch is None else epoch)

    def state(self) -> list[bool]:
        """Whether each chunk has arrived in this epoch."""
        return [self.arrived(chunk) for chunk in range(self.count)]

    @property
    def times(self) -> tuple[float | None, ...]:
        """The time of each chunk's `set` in this epoch (`time.perf_counter`); None for a chunk without one."""
        return tuple(self._times)

    def clear(self) -> None:
        """Write zeros into a caller's own words; tilestream's own are never cleared."""
        with self._bell:
            if self.self_reset:
                for chunk in range(self.count):
                    self._words[chunk] = 0

    def reset(self) -> None:
        """Zero a caller's own words, even if not all were seen."""
        self.clear()

    def ring(self) -> None:
        """Wake the waiting threads, so that each reads its abort word."""
        with self._bell:
            self._bell.notify_all()

    def wait(self, chunk: int, epoch: int, deadline: float, over: Callable[[], bool]) -> Outcome:
        """Wait until ``chunk`` arrives in epoch ``epoch``, its producer fails, the launch ends or the deadline passes.

        Parameters
        ----------
        deadline
            A time on `time.perf_counter`'s clock.
        over
            The launch's abort word. The launch calls `ring` after setting it.
        """
        return self.wait_any(((chunk,),), epoch, deadline, over)[0]

    def wait_any(
        self, sets: Sequence[Sequence[int]], epoch: int, deadline: float, over: Callable[[], bool]
    ) -> tuple[Outcome, int]:
        """Like `wait`, for all chunks of any of several sets. Also returns the first arrived set's index, or -1."""
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
