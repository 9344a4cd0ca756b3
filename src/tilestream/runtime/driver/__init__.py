"""What this package asks of a GPU's driver itself: streams and events of its own; copies, writes and waits in order.

Torch's build says whether that is CUDA's driver (`cuda`) or HIP's runtime (`hip`). No library is loaded, and no symbol
looked up, before something is asked. Handles of streams are of the current device; addresses are mapped there. Where
the driver refuses, each function raises `RuntimeError` with the driver's name of the error.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch

from tilestream.runtime.driver.base import Driver
from tilestream.runtime.driver.cuda import Cuda
from tilestream.runtime.driver.hip import Hip, library

#: What CUDA's driver answers where the thread has no context: `bind_context`, and ask again.
INVALID_CONTEXT = 201


@functools.cache
def _function(hip: bool, name: str, arguments: tuple[type, ...]) -> Callable[..., int]:
    """A function of HIP's library, or of CUDA's driver."""
    function: Callable[..., int] = getattr(ctypes.CDLL(library() if hip else "libcuda.so.1"), name)
    function.argtypes = arguments  # type: ignore[attr-defined]
    return function


_CUDA = Cuda(lambda name, arguments: _function(False, name, arguments))
_HIP = Hip(lambda name, arguments: _function(True, name, arguments))


def current() -> Driver:
    """The driver that torch was built for."""
    return _CUDA if torch.version.hip is None else _HIP


def cuda_function(name: str, *arguments: type) -> Callable[..., int]:
    """A function of CUDA's driver, which is called without the GIL and returns a code: see `error_name`."""
    return _function(False, name, arguments)


def hip_function(name: str, *arguments: type) -> Callable[..., int]:
    """As `cuda_function`, of HIP's runtime."""
    return _function(True, name, arguments)


def error_name(code: int) -> str:
    """The driver's name and description of an error: ``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""
    return current().error_name(code)


def bind_context() -> None:
    """Make the device's context this thread's own: a fresh thread has none until CUDA's runtime was used in it."""
    current().bind_context()


def create_stream() -> int:
    """The handle of a new stream of the current device, which the default stream does not wait for."""
    return current().create_stream()


def stream_write(stream: int, address: int, value: int) -> None:
    """Write a 32-bit word once all that ``stream`` has been given so far is done and visible.

    A reader that acquires the word sees, for one, a copy that came before the write in the stream. CUDA: no kernel is
    launched, so the word is written even where every SM is taken (invariant 10). HIP: a kernel of one lane writes, so
    workers that wait for it leave compute units free: `tilestream.plan.policy.cdna.workers_beside_producers`.

    Parameters
    ----------
    address
        Of a word in the device's memory, or in the host's that the device maps.
    """
    current().stream_write(stream, address, value)


def stream_wait(stream: int, address: int, value: int) -> None:
    """Hold ``stream`` until the 32-bit word at ``address`` is at least ``value``.

    For words that a peer GPU writes with `stream_write`: what came before that write in its stream is visible then. It
    has no bound: its caller has a watchdog that can write the word, whatever the driver waits for meanwhile (see
    `tilestream.distributed.host_flags`). CUDA compares cyclically, and holds no SM. HIP compares unsigned numbers, and
    may wait in a kernel of one lane.
    """
    current().stream_wait(stream, address, value)


def copy_in(stream: int, to: int, source: int, size: int) -> None:
    """Copy ``size`` bytes from pinned memory at ``source`` to ``to`` on the current device, in a stream's order.

    It costs the host a fifth of what torch's copy does. Both memories must live until the stream is past it.
    """
    current().copy_in(stream, to, source, size)


def copy_across(stream: int, to: int, source: int, size: int) -> None:
    """Copy ``size`` bytes between memories of GPUs that this process has mapped, in a stream's order.

    By a copy engine where one of them is another GPU's: no SM is needed. (HIP copies 16 KiB and less by a kernel.)
    """
    current().copy_across(stream, to, source, size)


def create_event() -> int:
    """The handle of a new event of the current device, which records no time. `destroy_event` lets go of it."""
    return current().create_event()


def destroy_event(event: int) -> None:
    """Let go of an event, which may still be to come: streams that wait for it go on waiting."""
    current().destroy_event(event)


def record_event(stream: int, event: int) -> None:
    """Move ``event`` behind what ``stream`` was given so far. Those who wait for it already wait as before."""
    current().record_event(stream, event)


def wait_event(stream: int, event: int) -> None:
    """Hold ``stream`` until ``event`` has come, as it is recorded now; one that was never recorded has come."""
    current().wait_event(stream, event)


def has_come(event: int) -> bool:
    """Whether ``event`` has come."""
    return current().has_come(event)


def await_event(event: int) -> None:
    """Have the host wait until ``event`` has come."""
    current().await_event(event)


def map_host_memory(address: int, size: int) -> int:
    """Have all GPUs of this process map ``size`` bytes of its memory, from a page on; returns their address of it.

    They stay mapped: a stream, of another process too, may still write there after the object that asked is gone.
    """
    return current().map_host_memory(address, size)


def capture_id(stream: int) -> int:
    """A number that is another for each capture; 0 where ``stream`` is in none."""
    return current().capture_id(stream)


def captured_nodes(stream: int) -> tuple[int, ...]:
    """Of the graph that ``stream`` is captured into: the nodes that what the stream is given next comes behind."""
    return current().captured_nodes(stream)


def follow_nodes(stream: int, nodes: Sequence[int], alone: bool) -> None:
    """Have what ``stream`` is given next come behind these nodes of its graph too; ``alone``: behind them only."""
    current().follow_nodes(stream, nodes, alone)


def call_when_gone(stream: int, function: int, argument: int) -> None:
    """Have a C function called, with ``argument``, when the graph that ``stream`` is captured into is gone.

    That is: the graph and all that was instantiated of it are destroyed, and the last replay has ended. The driver
    calls it in a thread of its own; it must not call the driver.
    """
    current().call_when_gone(stream, function, argument)


def context_id() -> int:
    """A number of the thread's current context that no other context ever has; 0 where contexts have none.

    A green context has a number, SMs and a default stream of its own. HIP has no green contexts.
    """
    return current().context_id()


def context_sms() -> int:
    """The SMs that kernels of the thread's current context may run on; 0 where the driver does not say."""
    return current().context_sms()
