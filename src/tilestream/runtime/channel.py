"""The error channel: a kernel reports that it gave up waiting, and the host does not wait for the kernel.

Each device has a ring of records in pinned host memory, which GPUs write directly, and a counter of records in device
memory. The host reads one word at each call on that device and at `check` (invariant 5), and raises a new record.
`tilestream.core.error_record` describes the words of a record.
"""

from __future__ import annotations

import collections
import ctypes
import threading
import time
import warnings
from collections.abc import Collection

import torch

from tilestream.core.error_record import EXPIRED, FIELDS, QUARANTINED, RECORDS, Record, sources
from tilestream.core.forks import free_in_child
from tilestream.runtime.device_workspace import LINE
from tilestream.runtime.outliving import outliving

_Words = ctypes.c_int64 * (FIELDS * RECORDS)

#: Seconds between two reads of a record that a kernel may be overwriting, which takes microseconds.
_SETTLED = 1e-3


class Channel:
    """The records of one device, made on first use.

    Attributes
    ----------
    records
        ``int64[RECORDS * FIELDS]`` in pinned host memory, an argument of kernels.
    claims
        ``int64`` on the device: the number of records claimed, and a cache line further the clock of the gates.
    """

    def __init__(self, device: torch.device) -> None:
        gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self.records = torch.zeros(FIELDS * RECORDS, dtype=torch.int64, pin_memory=gpu, device="cpu")
        self.claims = outliving(device, lambda: torch.zeros(2 * LINE, dtype=torch.int64, device=device))
        if gpu:
            torch.cuda.current_stream(device).synchronize()  # launches may be on any stream
        self._words = _Words.from_address(self.records.data_ptr())
        self._raised = 0
        self._lost = 0  # records overwritten before they were read, since the last warning
        self._posted: collections.deque[tuple[BaseException, int | None, int]] = collections.deque()
        #: By the key of its signals: the newest record whose failure has been raised, as a record or a posted error.
        self._newest_of: dict[int, int] = {}
        self._told: set[int] = set()
        self._lock = free_in_child(threading.Lock())

    @property
    def raised(self) -> int:
        """The number of the newest record that has been raised, or passed over."""
        return self._raised

    @property
    def pending(self) -> bool:
        """Whether a record has not been raised yet. Reads one word."""
        return self._words[self._raised % RECORDS * FIELDS] > self._raised

    def take(self) -> tuple[int, Record] | None:
        """The oldest record that has not been raised yet, and its number; None if there is none.

        Records that were overwritten are passed over. A kernel writes a record's number last, so a record that is being
        overwritten has its old number and another record's words. If so many records are unread that this one may be
        the next to be overwritten, it is read twice.
        """
        with self._lock:
            while (number := self._pass_lost()) > self._raised:
                at = self._raised % RECORDS * FIELDS
                words = self._words[at : at + 1 + len(Record._fields)]
                if self.newest >= number + RECORDS // 2:
                    time.sleep(_SETTLED)
                if words[0] == number and self._words[at : at + len(words)] == words:  # not overwritten meanwhile
                    self._raised = number
                    return number, Record(*words[1:])
            return None

    def _pass_lost(self) -> int:
        """Count and skip the records that were overwritten unread. Returns the number in the next record's place."""
        while (number := self._words[self._raised % RECORDS * FIELDS]) > self._raised + 1:
            self._lost += number - RECORDS - self._raised
            self._raised = number - RECORDS
        return number

    def _warn_of_lost(self) -> None:
        with self._lock:
            self._pass_lost()
            lost, self._lost = self._lost, 0
        if lost:
            warnings.warn(
                f"tilestream: lost reports of launches that gave up: {lost}. More than {RECORDS} came before one was "
                "raised: call ts.check() more often",
                RuntimeWarning,
                stacklevel=4,
            )

    @property
    def newest(self) -> int:
        """The number of the newest record."""
        return max(self._words[::FIELDS])

    def heard(self, after: int, keys: Collection[int]) -> tuple[int, bool]:
        """Whether a launch that waited for signals with one of these keys has reported since record ``after``.

        The answer is certain for launches that have ended, and does not depend on whether the record was raised. If
        records since ``after`` have been overwritten, the answer is True.

        Returns
        -------
        upto, reported
            ``upto`` is the record to ask from the next time; a record that is still being written may precede others.
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
        """Raise the oldest record that has not been raised yet, or else the oldest posted error."""
        while self.pending:
            self._warn_of_lost()
            taken = self.take()
            error = None if taken is None else taken[1].error()
            if taken is not None and error is not None and self._is_news(*taken):
                raise error
        posted = self._next_posted()
        if posted is not None:
            raise posted

    def _is_news(self, number: int, record: Record) -> bool:
        """Whether the record's failure has not been raised yet, by a posted error (see `post`) or by another record.

        Each launch in a broken group reports, and each replay has several: what they had reported when the group's
        failure was raised is told by that. Otherwise the next call of any op would raise it once more, for each record.
        """
        source = sources.get(record.key)
        told = None if source is None else source.told
        with self._lock:
            if told is not None:
                if record.why == QUARANTINED and number <= told.upto:
                    return False
                told.upto = self._written_upto(number)
            if record.key in self._told:
                return False
            if record.why != EXPIRED and any(key == record.key and number > since for _, key, since in self._posted):
                return False
            self._newest_of[record.key] = number
            return True

    def _written_upto(self, number: int) -> int:
        """The last record up to which all have been written, from record ``number`` on, which has been."""
        numbers = set(self._words[::FIELDS])
        while number + 1 in numbers:
            number += 1
        return number

    def _next_posted(self) -> BaseException | None:
        """The oldest posted error whose failure has not been raised by a record."""
        if not self._posted:
            return None
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
        """Raise ``error``, which the host has found, at the next check, as if a kernel had reported it.

        ``key``: the key of signals that a kernel may wait for. One failure is raised once: either the expiry that a
        kernel has reported since record ``since``, or this error.
        """
        with self._lock:
            self._posted.append((error, key, since))


_lock = free_in_child(threading.Lock())
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
    """Raise the errors that the device with this index has reported. No channel is made for it."""
    found = _channels.get(index)
    if found is not None and (found._posted or found.pending):
        found.check()


def check() -> None:
    """Raise the oldest error that a GPU has reported and that has not been raised yet.

    A launch on a GPU returns before it has run. If a chunk does not arrive before its deadline, the rows that were not
    computed become NaN, the kernel ends and reports the error. The next call of an op on that device raises it, or this
    function. It waits for nothing: call ``torch.cuda.synchronize()`` first to cover all launches. If errors were
    overwritten before they were raised, a `RuntimeWarning` gives their number.

    Raises
    ------
    ArrivalTimeout
        A chunk did not arrive.
    TilestreamError
        A captured launch was replayed on signals that an expired launch had left set.
    Exception
        The error of a chunk's producer.

    Examples
    --------
    >>> check()
    """
    for found in list(_channels.values()):
        found.check()
