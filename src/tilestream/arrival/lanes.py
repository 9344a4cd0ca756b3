"""Lanes: a copy stream with the signal words that are written on it, kept for the next `tilestream.Stream`.

A `Stream` reuses an idle lane with the same number of chunks, and continues its epochs: no copy stream, event or word
is made, and no word is zeroed. A launch of the lane's earlier `Stream` may still wait. Its test is "at least its
epoch", and its signals were issued on the same copy stream, before all later ones. So it sees each chunk once that is
copied.

`DeviceSignals` leave their lane when nothing refers to them any more. The lane is dropped if a signal of the last epoch
is missing, was written on another stream, or has failed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

import torch

from tilestream.core.forks import free_in_child
from tilestream.runtime.producer import Producer
from tilestream.runtime.sequence import Event
from tilestream.runtime.streams import give_back, lend

logger = logging.getLogger(__name__)

#: The most kinds of idle lanes, and the most idle lanes of a kind.
_MOST_KINDS, _MOST_IDLE = 64, 8
_idle: dict[tuple[int | None, int], deque[Lane]] = {}
#: Lanes that a `Stream` has. The garbage collector may find a `Stream` in a cycle, and finalises what is in the garbage
#: in any order: a lane is never garbage, so its events are there for all of them, and for the lane's next `Stream`.
_lent: set[Lane] = set()


def event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event after the work of ``stream`` so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


class Words:
    """Tilestream's own words, zeroed on the stream that makes them."""

    def __init__(self, count: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.store = torch.zeros(2 * count + 1, dtype=torch.int32, device=device)
        #: ``int32[count]`` each for eager and for captured launches; ``int32[1]`` for quarantine.
        self.eager, self.captured, self.quarantine = self.store.split([count, count, 1])
        #: Of the first eager word.
        self.address: int = self.eager.data_ptr()
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            self.zeroed = event_on(stream)
        #: Handles of the streams that may use the words.
        self.streams = {stream.cuda_stream}


class Lane:
    """See the module."""

    _producer: Producer | None = None
    _has_no_producer = False

    def __init__(self, count: int, device: torch.device) -> None:
        self._kind = device.index, count
        self.words = Words(count, device)
        self.stream = lend(device)
        self.handle: int = self.stream.cuda_stream
        self.words.store.record_stream(self.stream)
        self.stream.wait_event(self.words.zeroed)
        self.words.streams.add(self.handle)
        #: Of the signals that have the lane.
        self.bell = free_in_child(threading.Condition())
        #: Events before the first copy of a filling, and after its last signal.
        self.ready, self.landed = Event(), Event()
        #: The stream that the last filling follows.
        self.behind = -1
        #: The last epoch; and the streams of launches that waited for it or for earlier epochs, by handle.
        self.epoch = 0
        #: Whether the last epoch left a chunk out, for which a launch may still wait.
        self.awaited = False
        self.users: dict[int, torch.cuda.Stream] = {}

    @property
    def producer(self) -> Producer | None:
        """Its native thread, which is started on first use; None without the extension."""
        if self._producer is None and not self._has_no_producer:
            try:
                self._producer = Producer()
            except RuntimeError as error:
                self._has_no_producer = True
                logger.debug("no native thread: %s", error)
        return self._producer

    def leave(self, whole: bool) -> None:
        """Give the lane up. ``whole``: the last epoch's signals were all issued, on its stream, and none failed."""
        _lent.discard(self)
        idle = _idle.get(self._kind)
        if idle is None and len(_idle) < _MOST_KINDS:
            idle = _idle.setdefault(self._kind, deque())
        if whole and idle is not None and len(idle) < _MOST_IDLE:
            idle.append(self)
        else:
            give_back(self.stream)


def drop(lane: Lane) -> None:
    """Give a lane up that no signals have taken; once, whether or not the signals' end has done so."""
    if lane in _lent:
        lane.leave(False)


def take(count: int, device: torch.device, behind: int) -> Lane:
    """A lane for ``count`` chunks.

    Parameters
    ----------
    behind
        The handle of the stream that the next filling follows. A lane whose last filling is in flight is taken only if
        that filling follows the same stream: another stream might wait for work that is issued later (invariant 10).
    """
    idle = _idle.get((device.index, count), deque())
    for _ in range(len(idle)):
        try:
            found = idle.pop()
        except IndexError:  # another thread was faster
            continue
        if found.behind == behind or (not found.awaited and found.landed.query()):
            break
        idle.appendleft(found)
    else:
        found = Lane(count, device)
    _lent.add(found)
    return found
