"""Streams of our own, which torch does not hand out.

Torch hands out its pool of 32 streams repeatedly, so a stream for copies could be the one on which the caller's kernel
waits for them. Our streams come from the driver. They are lent, return when their borrower is gone, and are lent again
once they are idle. None is destroyed, since torch's allocator remembers which streams used its memory.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from tilestream.core.forks import free_in_child
from tilestream.runtime.driver import create_stream

# Reentrant: the garbage collector may finalise a borrower, which gives its stream back, inside a locked section.
_lock = free_in_child(threading.RLock())
_idle: dict[int, list[torch.cuda.Stream]] = {}


def is_torchs(stream: torch.cuda.Stream) -> bool:
    """Whether it is a stream of torch's pool, or a default stream. Both exist as long as the process."""
    return stream.stream_id != stream.cuda_stream or not stream.cuda_stream


#: Torch's objects of streams, by what identifies a stream in torch. They are kept, since making one costs the host more
#: than asking for its identity.
_objects: dict[tuple[int, int, int], torch.cuda.Stream] = {}
_MOST_OBJECTS = 256
_identity = getattr(torch._C, "_cuda_getCurrentStream", None)  # None in a torch without CUDA


#: The index of the current device: torch's own function without the question whether CUDA is initialised.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Torch's current stream of ``device``, which has an index."""
    if _identity is None:
        return torch.cuda.current_stream(device)
    key = _identity(device.index)
    found = _objects.get(key)
    if found is None:
        if len(_objects) >= _MOST_OBJECTS:
            _objects.clear()
        found = _objects[key] = torch.cuda.current_stream(device)
    return found


def lend(device: torch.device) -> torch.cuda.Stream:
    """An idle stream of ``device``. Give it back with `give_back`, or tie it to its borrower with `lend_to`."""
    index = device.index
    with _lock:
        for i, stream in enumerate(_idle.get(index, [])):
            if stream.query():
                return _idle[index].pop(i)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # creates the device's context
        return torch.cuda.ExternalStream(create_stream(), device=device)


def give_back(stream: torch.cuda.Stream) -> None:
    """Return a stream. Its work may still be in progress."""
    with _lock:
        _idle.setdefault(stream.device.index, []).append(stream)


def lend_to(borrower: object, device: torch.device) -> torch.cuda.Stream:
    """`lend` for as long as ``borrower`` is alive."""
    stream = lend(device)
    weakref.finalize(borrower, give_back, stream)
    return stream


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A block in which ``device`` is the current device."""
    here = torch.cuda.current_device() == device.index
    return contextlib.nullcontext() if here else torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is being captured. It need not be the current device."""
    with on_device(device) if device.type == "cuda" else contextlib.nullcontext():
        return torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A block in which an idle stream of our own is the current stream."""
    stream = lend(device)
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:
        give_back(stream)
