"""Workspaces of the GPU backends: queue counters, stream-K counts and partial results, kept from call to call.

Invariants 4 and 8. An eager launch uses the workspace of its (device, stream), whose launches run one after the other.
Counters are never cleared: each launch counts from a base above all that the previous launch can have counted to.
Buffers grow with the problems and are kept for default streams and for the `MOST_STREAMS` streams that were used last.
They come from no graph's pool (`tilestream.runtime.outliving`). Buffers of other streams go back to torch's allocator.
It gives them only to later work of the stream on which they were allocated, so nothing has to be waited for, and the
stream need not exist any more.

A captured launch is replayed in any order with eager launches and other graphs. So it has words of its own, which its
last worker restores. They come from a slab that was zeroed when the device's first workspace was made. Without a slab
(the very first call is captured), or when it is used up, they are zeroed under capture, by a memset node in the graph.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tilestream.core.schedule import Schedule
from tilestream.runtime.driver import context_id
from tilestream.runtime.outliving import outliving

#: 8-byte words from one counter to the next; `tilestream.kernels.device.schedule.LINE` says why.
LINE = 16
#: The number of streams whose workspaces are kept: far more than a program uses at the same time.
MOST_STREAMS = 64
#: 8-byte words of the slab: 2 MiB, about five thousand captured launches of one queue, or 120 of a queue a worker.
_SLAB = 2**18


class Words(NamedTuple):
    """The memory of one launch; None for each part that its schedule does not use."""

    #: ``int64``, `LINE` apart: a counter for each queue, the number of workers that have left, the abort word; behind
    #: them, side by side, those of rows by source.
    counters: torch.Tensor | None
    #: counts, partials: for stream-K, two ``int32`` a slot (one for each half of a tile) and ``float32``
    #: ``[block_m, block_n]``. Partials without counts: as many ``float32`` as were asked for.
    counts: torch.Tensor | None
    partials: torch.Tensor | None
    base: int  # the value that counters count from
    reset: int  # 1: the last worker to leave restores the counters
    #: Two of ``int32``: a list of packed sequences that the launch itself makes.
    listed: tuple[torch.Tensor, torch.Tensor] | None = None


NO_WORDS = Words(None, None, None, 0, 0)


def words_of(schedule: Schedule) -> int:
    """The number of a launch's 8-byte counters: see `Words`."""
    return (schedule.queues + 2) * LINE + schedule.packed


class DeviceWorkspace:
    """The words of one (device, stream). Hold `lock` from `open` until the launch has been issued.

    Two threads that launch on one stream must issue in the order of their bases: a launch whose counters are already
    above its last ticket would compute nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.used = 0  # the number of its last use, of `_uses`
        self._device = device
        self._base = 0
        self._counters: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._partials: torch.Tensor | None = None
        self._listed: tuple[torch.Tensor, torch.Tensor] | None = None

    def open(self, schedule: Schedule, block: Sequence[int], listed: int = 0, floats: int = 0) -> Words:
        """Words for a launch. All queues share one base, which rises by the tickets of the longest queue.

        ``floats``: partials that the launch needs with every schedule.
        """
        words = words_of(schedule)
        if self._counters is None or self._counters.numel() < words:
            self._counters = self._kept(torch.zeros, words, torch.int64)
        counts, partials = None, None
        if schedule.slots:
            if self._counts is None or self._counts.numel() < 2 * schedule.slots:
                self._counts = self._kept(torch.zeros, 2 * schedule.slots, torch.int32)
            counts = self._counts
        size = max(floats, schedule.slots * block[0] * block[1])
        if size:
            if self._partials is None or self._partials.numel() < size:
                self._partials = self._kept(torch.empty, size, torch.float32)
            partials = self._partials
        if listed and (self._listed is None or self._listed[0].numel() < listed):
            self._listed = outliving(self._device, lambda: _pair(listed, self._device))
        base = self._base
        self._base += schedule.most_tickets  # `queues.next_base` for the largest queue
        return Words(self._counters, counts, partials, base, 0, self._listed if listed else None)

    def _kept(self, make: Callable[..., torch.Tensor], count: int, dtype: torch.dtype) -> torch.Tensor:
        return outliving(self._device, lambda: make(count, dtype=dtype, device=self._device))


def _pair(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(count, dtype=torch.int32, device=device), torch.empty(count, dtype=torch.int32, device=device)


class _Slab:
    """Zeroed words for captured launches. None is taken back, since a graph may live as long as the process."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._words = outliving(device, lambda: torch.zeros(_SLAB, dtype=torch.int64, device=device))
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
    """The workspace of ``stream`` (a handle) of ``device``, the current device.

    The default streams of two contexts have the same handle but run concurrently, so their context is part of the key.
    """
    if device.type == "meta":  # for `tilestream.launch.compiling`: words without memory
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
    """Forget the workspace that was used longest ago. A thread that still has it may launch with it: see the module.

    Default streams keep theirs, since torch's allocator takes the default streams of all contexts for one.
    """
    streams = [key for key in _workspaces if key[1]]
    if streams:
        del _workspaces[min(streams, key=lambda key: _workspaces[key].used)]


def captured_words(
    device: torch.device, schedule: Schedule, block: Sequence[int], listed: int = 0, floats: int = 0
) -> Words:
    """Words of its own for a launch that is being captured. The scratch comes from the graph's memory pool."""
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
