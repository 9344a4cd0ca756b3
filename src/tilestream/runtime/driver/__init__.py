"""Direct calls of a GPU's driver: streams and events of our own; copies, writes and waits in stream order.

Torch's build decides between CUDA's driver (`cuda`) and HIP's runtime (`hip`). The first call loads the library. Stream
handles belong to the current device, and addresses are mapped there. If the driver refuses, each function raises
`RuntimeError` with the driver's name of the error.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from tilestream.runtime.driver.base import RELAXED, Driver
from tilestream.runtime.driver.cuda import Cuda
from tilestream.runtime.driver.hip import Hip, library

#: CUDA's error code for a thread without a context: call `bind_context` and repeat.
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
    """A function of CUDA's driver. It runs without the GIL and returns a code: see `error_name`."""
    return _function(False, name, arguments)


def hip_function(name: str, *arguments: type) -> Callable[..., int]:
    """`cuda_function` for HIP's runtime."""
    return _function(True, name, arguments)


def error_name(code: int) -> str:
    """The driver's name and description of an error: ``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""
    return current().error_name(code)


def bind_context() -> None:
    """Make the device's context current in this thread. A new thread has none until it uses CUDA's runtime."""
    current().bind_context()


def create_stream() -> int:
    """The handle of a new stream of the current device. It does not synchronise with the default stream."""
    return current().create_stream()


def stream_write(stream: int, address: int, value: int) -> None:
    """Write a 32-bit word once all earlier work of ``stream`` is complete and visible.

    A reader that acquires the word sees, for example, a copy that precedes the write in the stream. On CUDA no kernel
    is launched, so the word is written even if every SM is busy (invariant 10). On HIP a kernel of one lane writes, so
    workers that wait for it leave compute units free: `tilestream.plan.policy.cdna.workers_beside_producers`.

    Parameters
    ----------
    address
        Address of a word in device memory, or in mapped host memory.
    """
    current().stream_write(stream, address, value)


def stream_wait(stream: int, address: int, value: int) -> None:
    """Hold ``stream`` until the 32-bit word at ``address`` is at least ``value``.

    It is for words that a peer GPU writes with `stream_write`; all that precedes that write in its stream is then
    visible. The wait has no bound, so its caller has a watchdog that can write the word while the driver blocks (see
    `tilestream.distributed.host_flags`). CUDA compares cyclically and occupies no SM. HIP compares unsigned numbers and
    may wait in a kernel of one lane.
    """
    current().stream_wait(stream, address, value)


def copy_in(stream: int, to: int, source: int, size: int) -> None:
    """Copy ``size`` bytes from pinned memory at ``source`` to ``to`` on the current device, in stream order.

    It costs the host a fifth of torch's copy. Both memories must live until the copy is complete.
    """
    current().copy_in(stream, to, source, size)


def copy_out(stream: int, to: int, source: int, size: int) -> None:
    """Copy ``size`` bytes from ``source`` on the current device to pinned memory at ``to``, in stream order.

    Torch does not know of it: both memories must live until the copy is complete, in a graph until the graph is gone.
    """
    current().copy_out(stream, to, source, size)


def copy_across(stream: int, to: int, source: int, size: int) -> None:
    """Copy ``size`` bytes between mapped memories of GPUs, in stream order.

    Between two GPUs a copy engine copies, so no SM is needed. HIP copies 16 KiB and less by a kernel.
    """
    current().copy_across(stream, to, source, size)


def create_event() -> int:
    """The handle of a new event of the current device, without timing. Free it with `destroy_event`."""
    return current().create_event()


def destroy_event(event: int) -> None:
    """Free an event. It may be pending: streams that wait for it keep waiting."""
    current().destroy_event(event)


def record_event(stream: int, event: int) -> None:
    """Record ``event`` after all work issued so far on ``stream``. Earlier waits are not affected."""
    current().record_event(stream, event)


def wait_event(stream: int, event: int) -> None:
    """Hold ``stream`` until the last record of ``event`` is complete. An event without a record is complete."""
    current().wait_event(stream, event)


def has_come(event: int) -> bool:
    """Whether ``event`` is complete."""
    return current().has_come(event)


def await_event(event: int) -> None:
    """Wait on the host until ``event`` is complete."""
    current().await_event(event)


def map_host_memory(address: int, size: int) -> int:
    """Map ``size`` bytes of this process's memory, from a page boundary on, on all its GPUs. Returns their address.

    The memory stays mapped: a stream, also one of another process, may write there after its owner is gone.
    """
    return current().map_host_memory(address, size)


def capture_id(stream: int) -> int:
    """The number of the capture that ``stream`` is in, different for each capture; 0: none."""
    return current().capture_id(stream)


def captured_nodes(stream: int) -> tuple[int, ...]:
    """The nodes that the next work of ``stream`` will follow, in the graph into which it is captured."""
    return current().captured_nodes(stream)


def relax_captures() -> None:
    """Let this thread query events, and wait for them, while another thread captures a graph.

    Otherwise such a query ends every capture in the default mode.
    """
    current().relax_captures()


def exchange_capture_mode(mode: int) -> int:
    """Set this thread's mode of captures, a number of `cudaStreamCaptureMode`; the mode before."""
    return current().exchange_capture_mode(mode)


@contextlib.contextmanager
def captures_relaxed() -> Iterator[None]:
    """A block in which this thread, which may be capturing, allocates pinned memory: that may ask about events."""
    before = exchange_capture_mode(RELAXED)
    try:
        yield
    finally:
        exchange_capture_mode(before)


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
    """The number of the thread's current context, which is never used again; 0 if contexts have no numbers.

    A green context has its own number, SMs and default stream. HIP has no green contexts.
    """
    return current().context_id()


def context_sms() -> int:
    """The number of SMs of the thread's current context; 0 if the driver does not report it."""
    return current().context_sms()
