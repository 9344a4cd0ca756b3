"""Workspaces of the GPU backends: queue counters, stream-K counts and partial results, kept from call to call.

Invariants 4 and 8. An eager launch uses the workspace of its (device, stream), whose launches run one after the other.
Counters are never cleared: each launch counts from a base past what the launch before can have reached. Buffers grow
when a larger problem comes, and are then kept.

A captured launch is replayed in any order with eager ones and with other graphs, so it gets words of its own, which its
last worker restores. They are cut from a slab that was zeroed when the device's first workspace was made: zeroed under
capture, they would put a memset into the graph. That happens only where there is no slab (the very first call is
captured) or it is used up.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tilestream.core.schedule import Schedule
from tilestream.runtime.driver import context_id

#: 8-byte words from one counter to the next; `tilestream.kernels.device.schedule.LINE` says why.
LINE = 16
#: 8-byte words of the slab: 2 MiB, about five thousand captured launches of one queue, or 120 of a queue a worker.
_SLAB = 2**18


class Words(NamedTuple):
    """What one launch works on; None where its schedule has no use for it.

    Attributes
    ----------
    counters
        ``int64``, `LINE` apart: a counter a queue, one of the workers that have left, the abort word.
    counts, partials
        stream_k: two ``int32`` (the halves of a tile may be counted apart) and ``[block_m, block_n]`` of ``float32`` a
        slot. Partials without counts: as many ``float32`` as were asked for.
    base
        What the counters are counted from.
    reset
        1 where the last worker out restores them, else 0.
    listed
        Two of ``int32``: a list that the launch makes for itself, of packed sequences.
    """

    counters: torch.Tensor | None
    counts: torch.Tensor | None
    partials: torch.Tensor | None
    base: int
    reset: int
    listed: tuple[torch.Tensor, torch.Tensor] | None = None


NO_WORDS = Words(None, None, None, 0, 0)


def words_of(schedule: Schedule) -> int:
    """8-byte words that a launch counts with: see `Words`."""
    return (schedule.queues + 2) * LINE


def _floats_of(schedule: Schedule, block: Sequence[int], floats: int) -> int:
    """Elements of the partials."""
    return max(floats, schedule.slots * block[0] * block[1])


class DeviceWorkspace:
    """The words of one (device, stream). Hold `lock` from `open` until the launch has been issued.

    Two threads that launch on one stream must issue in the order in which they were given bases: a launch that finds
    the counters past its own last ticket would compute nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self._device = device
        self._base = 0
        self._kept: dict[str, torch.Tensor] = {}

    def _room(self, what: str, size: int, dtype: torch.dtype, zeroed: bool = False) -> torch.Tensor:
        """What is kept under this name; made anew where it is too small."""
        found = self._kept.get(what)
        if found is None or found.numel() < size:
            make = torch.zeros if zeroed else torch.empty
            found = self._kept[what] = make(size, dtype=dtype, device=self._device)
        return found

    def open(self, schedule: Schedule, block: Sequence[int], listed: int = 0, floats: int = 0) -> Words:
        """Words for a launch. One base serves all queues: it rises by the most that any of them can.

        ``floats``: partials that the launch asks for whatever its schedule.
        """
        room, size, base = self._room, _floats_of(schedule, block, floats), self._base
        self._base += schedule.most_tickets  # `queues.next_base` for the largest queue
        return Words(
            room("counters", words_of(schedule), torch.int64, zeroed=True),
            room("counts", 2 * schedule.slots, torch.int32, zeroed=True) if schedule.slots else None,
            room("partials", size, torch.float32) if size else None,
            base,
            0,
            (room("places", listed, torch.int32), room("sequences", listed, torch.int32)) if listed else None,
        )


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
_workspaces: dict[tuple[int | None, int, int], DeviceWorkspace] = {}
_slabs: dict[int | None, _Slab] = {}


def device_workspace(device: torch.device, stream: int) -> DeviceWorkspace:
    """The workspace of ``stream`` (its handle) of ``device``, which is the current one.

    The default streams of two contexts have one handle, and run beside each other: so the context counts there.
    """
    key = (device.index, stream, 0 if stream else context_id())
    found = _workspaces.get(key)
    if found is None:
        with _lock:
            found = _workspaces.setdefault(key, DeviceWorkspace(device))
            if device.index not in _slabs:
                _slabs[device.index] = _Slab(device)
    return found


def captured_words(
    device: torch.device, schedule: Schedule, block: Sequence[int], listed: int = 0, floats: int = 0
) -> Words:
    """Words for a launch that is being captured, its own. The scratch comes from the graph's memory."""
    slab, size = _slabs.get(device.index), _floats_of(schedule, block, floats)

    def zeros(words: int) -> torch.Tensor:
        taken = slab.take(words) if slab is not None else None
        return torch.zeros(words, dtype=torch.int64, device=device) if taken is None else taken

    def scratch(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    return Words(
        zeros(words_of(schedule)),
        zeros(schedule.slots).view(torch.int32) if schedule.slots else None,  # two to a word
        scratch(size, torch.float32) if size else None,
        0,
        1,
        (scratch(listed, torch.int32), scratch(listed, torch.int32)) if listed else None,
    )
