"""Streams of our own, which torch gives to no other code.

torch hands out its streams from a pool of 32, over and over: a stream for copies could be the one on which the caller's
kernel waits for them. So the driver makes ours. They are lent, come back when their borrower is gone, and are lent
again once they are idle. None is ever destroyed: torch's allocator remembers which streams used its memory.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch

from tilestream.core.forks import free_in_child
from tilestream.runtime.driver import create_stream

# Entered again by the thread that is inside: a borrower that the garbage collector finds there gives back.
_lock = free_in_child(threading.RLock())
_idle: dict[int, list[torch.cuda.Stream]] = {}


def is_torchs(stream: torch.cuda.Stream) -> bool:
    """Whether it is a stream of torch's own, or a default one: such are never gone."""
    return stream.stream_id != stream.cuda_stream or not stream.cuda_stream


def lend(device: torch.device) -> torch.cuda.Stream:
    """An idle stream of ``device``. Give it back with `give_back`, or tie it to its borrower with `lend_to`."""
    index = device.index
    with _lock:
        for i, stream in enumerate(_idle.get(index, [])):
            if stream.query():
                return _idle[index].pop(i)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the device's context
        return torch.cuda.ExternalStream(create_stream(), device=device)


def give_back(stream: torch.cuda.Stream) -> None:
    """The borrower needs ``stream`` no more; its work may still be under way."""
    with _lock:
        _idle.setdefault(stream.device.index, []).append(stream)


def lend_to(borrower: object, device: torch.device) -> torch.cuda.Stream:
    """`lend`, for as long as ``borrower`` is alive."""
    stream = lend(device)
    weakref.finalize(borrower, give_back, stream)
    return stream


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make ``device`` the current one, where it is not."""
    here = torch.cuda.current_device() == device.index
    return contextlib.nullcontext() if here else torch.cuda.device(device)


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Make an idle stream of our own the current one, for the length of the block."""
    stream = lend(device)
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:
        give_back(stream)
