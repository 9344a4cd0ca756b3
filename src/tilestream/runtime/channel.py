"""The error channel: how a kernel tells the host that it gave up waiting, without the host waiting for the kernel.

One a device: a ring of records in pinned host memory, which GPUs write directly, and a counter of records on the
device. The host looks at one word of it at each call on that device and at `check` (invariant 5), and raises what it
finds. `tilestream.core.error_record` describes a record's words.
"""

from __future__ import annotations

import collections
import ctypes
import threading
from collections.abc import Collection

import torch

from tilestream.core.error_record import EXPIRED, FIELDS, RECORDS, Record
from tilestream.runtime.device_workspace import LINE

_Words = ctypes.c_int64 * (FIELDS * RECORDS)


class Channel:
    """The records of one device. Made on first use.

    Attributes
    ----------
    records
        ``int64[RECORDS * FIELDS]`` in pinned host memory: what a kernel is given.
    claims
        ``int64`` on the device: records claimed so far, and a cache line further the clock of the gates.
    """

    def __init__(self, device: torch.device) -> None:
        gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self.records = torch.zeros(FIELDS * RECORDS, dtype=torch.int64, pin_memory=gpu, device="cpu")
            self.claims = torch.zeros(2 * LINE, dtype=torch.int64, device=device)
        if gpu:
            torch.cuda.current_stream(device).synchronize()  # launches may be on any stream
        self._words = _Words.from_address(self.records.data_ptr())
        self._raised = 0
        self._posted: collections.deque[tuple[BaseException, int | None, int]] = collections.deque()
        #: By the key of its signals: the newest record that was raised, and whose failure a posted error has told.
        self._newest_of: dict[int, int] = {}
        self._told: set[int] = set()
        self._lock = threading.Lock()

    @property
    def pending(self) -> bool:
        """Whether there is a record that was not raised yet. Reads one word."""
        return self._words[self._raised % RECORDS * FIELDS] > self._raised

    def take(self) -> tuple[int, Record] | None:
        """The oldest record that was not raised yet, and its number; None where there is none.

        Where more than `RECORDS` have come since: the oldest of those that are left.
        """
        with self._lock:
            while True:
                at = self._raised % RECORDS * FIELDS
                number = self._words[at]
                if number <= self._raised:
                    return None
                if number > self._raised + 1:  # overwritten: go on with the oldest that is left
                    self._raised = number - RECORDS
                    continue
                record = Record(*self._words[at + 1 : at + 1 + len(Record._fields)])
                if self._words[at] == number:  # else it was overwritten meanwhile
                    self._raised = number
                    return number, record

    @property
    def newest(self) -> int:
        """The number of the newest record."""
        return max(self._words[::FIELDS])

    def heard(self, after: int, keys: Collection[int]) -> tuple[int, bool]:
        """Whether a launch that waited for signals with one of these keys has reported, since record ``after``.

        Raised or not: of launches that have ended it is certain. Where records since then have been overwritten, the
        answer is yes.

        Returns
        -------
        upto, reported
            ``upto``: the record to ask from the next time. One that is still being written may stand before others.
        """
        numbers = self._words[::FIELDS]
        if max(numbers) <= after:
            return after, False
        newer = {number: i * FIELDS for i, number in enumerate(numbers) if number > after}
        upto = after
        while upto + 1 in newer:
            upto += 1
        key = 1 + Record._fields.index("key")
        return upto, max(newer) > after + RECORDS or any(self._words[at + key] in keys for at in newer.values())

    def check(self) -> None:
        """Raise the oldest record that was not raised yet; then what was posted."""
        while self.pending:
            taken = self.take()
            error = None if taken is None else taken[1].error()
            if taken is not None and error is not None and self._is_news(*taken):
                raise error
        posted = self._next_posted()
        if posted is not None:
            raise posted

    def _is_news(self, number: int, record: Record) -> bool:
        """Whether a record is raised, rather than what the host has found of that failure: see `post`."""
        with self._lock:
            if record.key in self._told:
                return False
            if record.why != EXPIRED and any(key == record.key and number > since for _, key, since in self._posted):
                return False
            self._newest_of[record.key] = number
            return True

    def _next_posted(self) -> BaseException | None:
        """The oldest error that was posted, of whose failure no record was raised."""
        with self._lock:
            while self._posted:
                error, key, since = self._posted.popleft()
                if key is None:
                    return error
                if self._newest_of.get(key, 0) <= since:
                    self._told.add(key)
                    return error
            return None

    def post(self, error: BaseException, key: int | None = None, since: int = 0) -> None:
        """Have ``error``, which the host has found, raised as a kernel's report is.

        ``key``: of signals that a kernel may wait for. One failure is raised once: what the kernel has reported since
        record ``since``, if it is an expiry, and has been raised first; else this.
        """
        with self._lock:
            self._posted.append((error, key, since))


_lock = threading.Lock()
_channels: dict[int | None, Channel] = {}


def channel(device: torch.device) -> Channel:
    """The channel of ``device``."""
    found = _channels.get(device.index)
    if found is None:
        with _lock:
            found = _channels.get(device.index)
            if found is None:
                found = _channels[device.index] = Channel(device)
    return found


def check_device(index: int | None) -> None:
    """Raise what the device with this index has reported. A device on which nothing was launched gets no channel."""
    found = _channels.get(index)
    if found is not None:
        found.check()


def check() -> None:
    """Raise what a GPU has reported: the oldest report that was not raised yet.

    A launch on a GPU returns before it has run. If a chunk does not arrive before its deadline, what was not computed
    becomes NaN, the kernel ends, and it leaves a report, which is raised by the next call of an op on that device, or
    here. This looks at what was reported so far and waits for nothing: after ``torch.cuda.synchronize()`` it speaks for
    all that was launched.

    Raises
    ------
    ArrivalTimeout
        A chunk did not arrive.
    TilestreamError
        A captured launch was replayed on signals that an expiry had left behind.
    Exception
        What the producer of a chunk reported.

    Examples
    --------
    >>> check()
    """
    for found in list(_channels.values()):
        found.check()
