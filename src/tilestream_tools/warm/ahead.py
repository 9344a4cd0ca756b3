"""Calls on the meta device whose kernels are compiled, for a GPU that need not be here: what `tilestream warm` does.

The public ops bring such a call to canonical form as any other, and torch's dispatcher shows it here. A launch is made
of it as on that GPU, and called: it compiles what it would launch, under the same keys of Triton's cache.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import AsyncCompileMode

from tilestream.core.device import DeviceProperties
from tilestream.launch import compiling
from tilestream.ops import attention_library, grouped_library, grouped_sources, library

if TYPE_CHECKING:
    from tilestream_tools.warm.calls import Call


class _Ahead(TorchDispatchMode):
    """Compiles what calls on the meta device would launch on a device."""

    def __init__(self, device: DeviceProperties) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        if op in (library.gemm_op, library.gemm_arriving_op) and made.numel():
            library.compile_ahead(args, made, self._device, op is library.gemm_arriving_op)
        elif op in (attention_library.attention_op, attention_library.attention_arriving_op) and made[0].numel():
            arriving = op is attention_library.attention_arriving_op
            attention_library.compile_ahead(args, made, self._device, arriving)
        elif op is grouped_library.grouped_op and made.numel():
            grouped_library.compile_ahead(args, made, self._device)
        elif op is grouped_sources.by_source_op and made.numel():
            grouped_sources.compile_ahead(args, made, self._device)
        return made


@contextlib.contextmanager
def ahead(device: DeviceProperties) -> Iterator[None]:
    """In this block and thread, the ops' calls on the meta device compile their kernels for ``device``.

    Calls with ``arrival=`` compile the kernels of an arrival whose copies others make. Those that write into a given
    tensor compile nothing: a contiguous ``out=`` has the kernels of a call without it.

    Parameters
    ----------
    device
        A GPU's properties: `tilestream.core.gpu_specs.named`, or this machine's.
    """
    with compiling.ahead(device.arch), _Ahead(device):
        yield


class _Declined(Executor):
    """Compiles nothing: what Triton would have compiled is known by its key."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future that has failed."""
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("not compiled"))
        return future


def kernels_of(calls: Iterable[Call], device: DeviceProperties) -> dict[str, Call]:
    """The kernels that calls launch on a device: their keys in Triton's cache, each with the first call of it."""
    found: dict[str, Call] = {}
    with AsyncCompileMode(_Declined(), ignore_errors=True) as mode, ahead(device), torch.no_grad():
        for call in calls:
            call()
            for key in mode.future_kernels:
                found.setdefault(key, call)
    return found


def compile_call(call: Call, device: DeviceProperties) -> None:
    """Compile what a call launches on a device, into Triton's cache."""
    with ahead(device), torch.no_grad():
        call()


def compile_calls(calls: Sequence[Call], device: DeviceProperties, jobs: int, advance: Callable[[], object]) -> None:
    """Compile what calls launch, in ``jobs`` processes; ``advance`` is called after each call."""
    if len(calls) == 1 or jobs == 1:
        for call in calls:
            compile_call(call, device)
            advance()
    elif calls:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(calls)), mp_context=spawn) as pool:
            for done in as_completed([pool.submit(compile_call, call, device) for call in calls]):
                done.result()
                advance()
