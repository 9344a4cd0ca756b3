"""Lanes: a copy stream with the signal words that are written on it, kept for the next `tilestream.Stream`.

A stream of as many chunks takes a lane that an earlier one has left, and counts on from its epoch: no stream, event or
word is made, and none is zeroed. An earlier stream's launch may still be waiting: its words say "at least", and what
signals it was issued on this very stream, in front of everything later. So it finds each chunk when that was copied.

A lane is left by the `DeviceSignals` that had it, when nothing refers to them any more. It is dropped where a signal
of the last epoch is missing, was written on another stream, or has failed.
"""

from __future__ import annotations

from collections import deque

import torch

from tilestream.runtime.sequence import Event
from tilestream.runtime.streams import give_back, lend

#: Lanes that wait for a stream: kinds of them, and of each kind.
_MOST_KINDS, _MOST_IDLE = 64, 8
_idle: dict[tuple[int | None, int], deque[Lane]] = {}


def event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind what ``stream`` was given so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


class Words:
    """Words of our own: zeroed on the stream that makes them."""

    def __init__(self, count: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.store = torch.zeros(2 * count + 1, dtype=torch.int32, device=device)
        #: ``int32[count]`` twice, of eager and of captured launches; ``int32[1]``.
        self.eager, self.captured, self.quarantine = self.store.split([count, count, 1])
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            self.zeroed = event_on(stream)
        #: Handles of the streams that may touch them.
        self.streams = {stream.cuda_stream}


class Lane:
    """See the module."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._kind = device.index, count
        self.words = Words(count, device)
        self.stream = lend(device)
        self.handle: int = self.stream.cuda_stream
        self.words.store.record_stream(self.stream)
        self.stream.wait_event(self.words.zeroed)
        self.words.streams.add(self.handle)
        #: Before the first copy of a filling, and behind its last signal.
        self.ready, self.landed = Event(), Event()
        #: The stream behind which the last filling comes.
        self.behind = -1
        #: The last epoch that was signalled; streams of launches that waited for it or for earlier ones, by handle.
        self.epoch = 0
        self.users: dict[int, torch.cuda.Stream] = {}

    def leave(self, whole: bool) -> None:
        """Its signals are gone. ``whole``: all of the last epoch were issued, in its stream, and none has failed."""
        idle = _idle.get(self._kind)
        if idle is None and len(_idle) < _MOST_KINDS:
            idle = _idle.setdefault(self._kind, deque())
        if whole and idle is not None and len(idle) < _MOST_IDLE:
            idle.append(self)
        else:
            give_back(self.stream)


def take(count: int, device: torch.device, behind: int) -> Lane:
    """A lane for ``count`` chunks.

    Parameters
    ----------
    behind
        The handle of the stream that the next filling comes behind. A lane is taken while its last filling is under way
        only where that came behind the same stream: another one might wait for what is issued later (invariant 10).
    """
    idle = _idle.get((device.index, count), deque())
    for _ in range(len(idle)):
        try:
            found = idle.pop()
        except IndexError:  # another thread was faster
            break
        if found.behind == behind or found.landed.query():
            return found
        idle.appendleft(found)
    return Lane(count, device)
