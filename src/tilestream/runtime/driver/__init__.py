"""What this package asks of a GPU's driver itself: a stream of its own; copies, writes and waits in a stream's order.

`Driver` is all of it. CUDA's driver (`cuda`) and HIP's (`hip`) each do it in their way; which one is here, torch's
build says. No library is loaded, and no symbol looked up, before something is asked. The functions of this module ask
the one that is here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Protocol

import torch

from tilestream.runtime.driver.cuda import Cuda
from tilestream.runtime.driver.hip import Hip, library

#: What CUDA's driver answers where the thread has no context: `bind_context`, and ask again.
INVALID_CONTEXT = 201


class Driver(Protocol):
    """A GPU's driver. Handles of streams are of the current device; addresses are mapped there.

    What fails raises `RuntimeError`, which says what the driver calls the error.
    """

    def error_name(self, code: int) -> str:
        """What the driver calls an error, and says of it."""

    def bind_context(self) -> None:
        """Make the device's context this thread's own, where a driver has such."""

    def create_stream(self) -> int:
        """The handle of a new stream, which the default stream does not wait for."""

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """Write a 32-bit word once all that the stream has been given so far is done and visible."""

    def stream_wait(self, stream: int, address: int, value: int) -> None:
        """Hold the stream until a 32-bit word is at least ``value``."""

    def copy_in(self, stream: int, to: int, source: int, size: int) -> None:
        """Copy bytes from pinned memory to the device."""

    def copy_across(self, stream: int, to: int, source: int, size: int) -> None:
        """Copy bytes between memories of GPUs that this process has mapped."""

    def map_host_memory(self, address: int, size: int) -> int:
        """Have GPUs map whole pages of this process's memory; returns where they see them."""

    def capture_id(self, stream: int) -> int:
        """A number that is another for each capture; 0 where the stream is in none."""

    def context_id(self) -> int:
        """A number of the thread's current context that no other context ever has; 0 where there is none to be had."""

    def context_sms(self) -> int:
        """The SMs that kernels of the thread's current context may run on; 0 where the driver does not say."""


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


def error_name(code: int) -> str:
    """What the driver calls an error, and says of it: ``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""
    return current().error_name(code)


def bind_context() -> None:
    """Make the device's context this thread's own: a fresh thread has none until CUDA's runtime was used in it."""
    current().bind_context()


def create_stream() -> int:
    """The handle of a new stream of the current device, which the default stream does not wait for.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    return current().create_stream()


def stream_write(stream: int, address: int, value: int) -> None:
    """Write a 32-bit word once all that ``stream`` has been given so far is done and visible.

    CUDA: no kernel is launched, so it goes through where every SM is taken (invariant 10). HIP: a kernel of one lane
    writes, so workers that wait for it leave compute units free:
    `tilestream.plan.policy.cdna.workers_beside_producers`.

    Parameters
    ----------
    stream
        The handle of a stream of the current device.
    address
        Of a word in that device's memory, or in the host's that it maps.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    current().stream_write(stream, address, value)


def stream_wait(stream: int, address: int, value: int) -> None:
    """Hold ``stream`` until the 32-bit word at ``address`` is at least ``value``.

    For words that a peer GPU writes with `stream_write`: what came before that write in its stream is visible then. It
    has no bound: its caller has a watchdog that can write the word, whatever the driver waits for meanwhile (see
    `tilestream.distributed.host_flags`). CUDA compares cyclically, and holds no SM.
    HIP takes both for unsigned, and a kernel of one lane may do the waiting.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    current().stream_wait(stream, address, value)


def copy_in(stream: int, to: int, source: int, size: int) -> None:
    """Copy ``size`` bytes from pinned memory at ``source`` to ``to`` on the current device, in a stream's order.

    A fifth of what it costs the host to have torch do it. Both must live until the stream is past it.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    current().copy_in(stream, to, source, size)


def copy_across(stream: int, to: int, source: int, size: int) -> None:
    """Copy ``size`` bytes between memories of GPUs that this process has mapped, in a stream's order.

    By a copy engine where one of them is another GPU's: no SM is needed. (HIP copies 16 KiB and less by a kernel.)

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    current().copy_across(stream, to, source, size)


def map_host_memory(address: int, size: int) -> int:
    """Have all GPUs of this process map ``size`` bytes of its memory, from a page on; returns their address of it.

    For good: a stream, of another process too, may still write there after the object that asked is gone.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    return current().map_host_memory(address, size)


def capture_id(stream: int) -> int:
    """A number that is another for each capture; 0 where ``stream`` is in none.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    return current().capture_id(stream)


def context_id() -> int:
    """A number of the thread's current context that no other context ever has; 0 where there is none to be had.

    A green context is one of its own, with SMs of its own, and a default stream of its own. HIP has no such.
    """
    return current().context_id()


def context_sms() -> int:
    """The SMs that kernels of the thread's current context may run on; 0 where the driver does not say."""
    return current().context_sms()
