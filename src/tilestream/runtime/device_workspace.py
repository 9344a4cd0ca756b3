"""Workspaces of the GPU backends: queue counters, stream-K counts and partial results, kept from call to call.

Invariants 4 and 8. An eager launch uses the workspace of its (device, stream), whose launches run one after the other.
Counters are never cleared: each launch counts from a base past what the launch before can have reached. Buffers grow
when a larger problem comes, and are then kept: of the `MOST_STREAMS` streams that were used last, and of default
streams. Others' buffers go back to torch's allocator. They were allocated on the stream that they served, and the
allocator gives them to later work of that stream alone: so nothing has to be waited for, and the stream may be gone.

A captured launch is replayed in any order with eager ones and with other graphs, so it gets words of its own, which its
last worker restores. They are cut from a slab that was zeroed when the device's first workspace was made: zeroed under
capture, they would put a memset into the graph. That happens only where there is no slab (the very first call is
captured) or it is used up.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tilestream.core.schedule import Schedule
from tilestream.runtime.driver import context_id

#: 8-byte words from one counter to the next; `tilestream.kernels.device.schedule.LINE` says why.
LINE = 16
#: Streams whose workspaces are kept: far more than a program uses side by side.
MOST_STREAMS = 64
#: 8-byte words of the slab: 2 MiB, about five thousand captured launches of one queue, or 120 of a queue a worker.
_SLAB = 2**18


class Words(NamedTuple):
    """What one launch works on; None where its schedule has no use for it."""

    #: ``int64``, `LINE` apart: a counter a queue, one of the workers that have left, the abort word.
    counters: torch.Tensor | None
    #: counts, partials: stream_k: two ``int32`` (the halves of a tile may be counted apart) and ``[block_m, block_n]``
    #: of ``float32`` a slot. Partials without counts: as many ``float32`` as were asked for.
    counts: torch.Tensor | None
    partials: torch.Tensor | None
    base: int  # what the counters are counted from
    reset: int  # 1 where the last worker out restores them, else 0
    #: Two of ``int32``: a list that the launch makes for itself, of packed sequences.
    listed: tuple[torch.Tensor, torch.Tensor] | None = None


NO_WORDS = Words(None, None, None, 0, 0)


def words_of(schedule: Schedule) -> int:
    """8-byte words that a launch counts with: see `Words`."""
    return (schedule.queues + 2) * LINE


class DeviceWorkspace:
    """The words of one (device, stream). Hold `lock` from `open` until the launch has been issued.

    Two threads that launch on one stream must issue in the order in which they were given bases: a launch that finds
    the counters past its own last ticket would compute nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.used = 0  # when it was used last, in `_uses`
        self._device = device
        self._base = 0
        self._counters: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._partials: torch.Tensor | None = None
        self._listed: tuple[torch.Tensor, torch.Tensor] | None = None

    def open(self, schedule: Schedule, block: Sequence[int], listed: int = 0, floats: int = 0) -> Words:
        """Words for a launch. One base serves all queues: it rises by the most that any of them can.

        ``floats``: partials that the launch asks for whatever its schedule.
        """
        words = words_of(schedule)
        if self._counters is None or self._counters.numel() < words:
            self._counters = torch.zeros(words, dtype=torch.int64, device=self._device)
        counts, partials = None, None
        if schedule.slots:
            if self._counts is None or self._counts.numel() < 2 * schedule.slots:
                self._counts = torch.zeros(2 * schedule.slots, dtype=torch.int32, device=self._device)
            counts = self._counts
        size = max(floats, schedule.slots * block[0] * block[1])
        if size:
            if self._partials is None or self._partials.numel() < size:
                self._partials = torch.empty(size, dtype=torch.float32, device=self._device)
            partials = self._partials
        if listed and (self._listed is None or self._listed[0].numel() < listed):
            self._listed = _pair(listed, self._device)
        base = self._base
        self._base += schedule.most_tickets  # `queues.next_base` for the largest queue
        return Words(self._counters, counts, partials, base, 0, self._listed if listed else None)


def _pair(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(count, dtype=torch.int32, device=device), torch.empty(count, dtype=torch.int32, device=device)


class _Slab:
    """Zeroed words for captured launches: handed out once, never taken back, since a graph may live for ever."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._words = torch.zeros(_SLAB, dtype=torch.int64, device=device)
        self._used = 0
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # replays may run on any stream

    def take(self, words: int) -> torch.Tensor | None:
        with self._lock:
            words = -(-words // LINE) * LINE
            if self._used + words > _SLAB:
                return None
            self._used += words
            return self._words[self._used - words : self._used]


_lock = threading.Lock()
_uses = itertools.count()
_workspaces: dict[tuple[int | None, int, int], DeviceWorkspace] = {}
_slabs: dict[int | None, _Slab] = {}


def device_workspace(device: torch.device, stream: int) -> DeviceWorkspace:
    """The workspace of ``stream`` (its handle) of ``device``, which is the current one.

    The default streams of two contexts have one handle, and run beside each other: so the context counts there.
    """
    if device.type == "meta":  # nothing runs there, and the words have no memory: see `tilestream.launch.compiling`
        return DeviceWorkspace(device)
    key = (device.index, stream, 0 if stream else context_id())
    found = _workspaces.get(key)
    if found is None:
        with _lock:
            found = _workspaces.setdefault(key, DeviceWorkspace(device))
            found.used = next(_uses)
            if len(_workspaces) > MOST_STREAMS:
                _let_go_of_oldest()
            if device.index not in _slabs:
                _slabs[device.index] = _Slab(device)
    found.used = next(_uses)
    return found


def _let_go_of_oldest() -> None:
    """Forget the workspace that was used longest ago. A thread that has it still may launch with it: see the module.

    Default streams keep theirs: torch's allocator takes those of all contexts for one stream.
    """
    streams = [key for key in _workspaces if key[1]]
    if streams:
        del _workspaces[min(streams, key=lambda key: _workspaces[key].used)]


def captured_words(
    device: torch.device, schedule: Schedule, block: Sequence[int], listed: int = 0, floats: int = 0
) -> Words:
    """Words for a launch that is being captured, its own. The scratch comes from the graph's memory."""
    slab, size = _slabs.get(device.index), max(floats, schedule.slots * block[0] * block[1])

    def zeros(words: int) -> torch.Tensor:
        taken = slab.take(words) if slab is not None else None
        return torch.zeros(words, dtype=torch.int64, device=device) if taken is None else taken

    return Words(
        zeros(words_of(schedule)),
        zeros(schedule.slots).view(torch.int32) if schedule.slots else None,  # two to a word
        torch.empty(size, dtype=torch.float32, device=device) if size else None,
        0,
        1,
        _pair(listed, device) if listed else None,
    )
