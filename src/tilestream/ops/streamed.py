"""Operands that are a `tilestream.Stream`, and tensors that a stream has not filled yet.

An op calls this module only if an operand is a `Stream` (by ``type``: `isinstance` of a tensor is slow) or if a stream
is open. While torch.compile traces, open streams are not looked for: each would cause a recompilation. So the
registered ops look for them, too, by `refuse_unfilled`, each time a compiled graph runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.stream import Stream, open_streams

_is_wrapped, _unwrapped = torch._C._functorch.is_functorch_wrapped_tensor, torch._C._functorch.get_unwrapped


class _Derivative(threading.local):
    """Whether the thread computes a derivative of a call that has waited for its operands."""

    of_awaited = False


_derivative = _Derivative()


def operand(
    op: str, name: str, x: torch.Tensor | Stream, argument: str, arrival: Arrival | None
) -> tuple[torch.Tensor, Arrival | None]:
    """Operand ``x`` and its arrival: the stream's own, or what the caller gave as ``argument``.

    Raises
    ------
    ValueError
        If both are given and differ; or if ``x`` is the tensor of a stream that has not filled it, and no arrival is
        given.
    """
    if isinstance(x, Stream):
        if arrival is not None and arrival is not x.arrival:
            raise ValueError(f"{op}: {name} is a Stream, and {argument}= is another's; leave {argument}= away")
        return x.tensor, x.arrival
    if arrival is None and _filling(x):
        raise ValueError(
            f"{op}: {name} is a tensor that ts.stream_in has not filled yet; give the Stream itself in its place, or "
            f"{argument}=stream.arrival, or wait until it is filled: stream.wait()"
        )
    return x, arrival


def refuse(op: str, **operands: object) -> None:
    """Raise if an operand that cannot arrive is a stream, or a tensor that a stream has not filled yet."""
    for name, x in operands.items():
        if isinstance(x, Stream):
            raise TypeError(f"{op}: {name} is a Stream, and {name} does not arrive; wait for it: stream.wait()")
        if _filling(x):
            raise ValueError(
                f"{op}: {name} is a tensor that ts.stream_in has not filled yet, and {name} does not arrive; wait "
                "until it is filled: stream.wait()"
            )


def refuse_keys(op: str, alone: bool, **operands: object) -> None:
    """`refuse` for keys and values, which arrive together. ``alone``: the call has no arrival."""
    for name, x in operands.items():
        if isinstance(x, Stream):
            raise TypeError(
                f"{op}: {name} is a Stream; keys and values arrive together: give their tensors, and the arrival= of "
                "both"
            )
        if alone and _filling(x):
            raise ValueError(
                f"{op}: {name} is a tensor that ts.stream_in has not filled yet; give the arrival= of keys and values, "
                "or wait until it is filled: stream.wait()"
            )


def refuse_unfilled(op: str, names: Sequence[str], operands: Iterable[object], arriving: Sequence[str] = ()) -> None:
    """Raise if an operand of a registered op is a tensor that a stream has not filled yet.

    Public ops have checked an eager call by the caller's names. This is the check of the calls that a compiled graph
    makes, and of ``torch.ops.tilestream``.

    Parameters
    ----------
    names, operands
        The operands by name, of any type.
    arriving
        The names of those that the call waits for.
    """
    if _derivative.of_awaited:
        return
    for name, x in zip(names, operands, strict=False):
        if name not in arriving and (found := _stream_of(x)) is not None and not found.is_filled_for_op:
            raise ValueError(
                f"{op}: {name} is a tensor that ts.stream_in has not filled yet, and the call does not wait for it; "
                "give the Stream itself in its place, or its arrival, or wait until it is filled: stream.wait()"
            )


@contextlib.contextmanager
def derivative_of_awaited() -> Iterator[None]:
    """A block with a derivative of a call that has waited: it is NaN where rows did not come, and is not refused."""
    before, _derivative.of_awaited = _derivative.of_awaited, True
    try:
        yield
    finally:
        _derivative.of_awaited = before


def _filling(x: object) -> bool:
    """Whether ``x`` lies in memory that a stream has not filled for calls on the current stream."""
    found = _stream_of(x)
    return found is not None and not found.is_filled_here


def _stream_of(x: object) -> Stream | None:
    """The open stream in whose memory ``x`` lies."""
    if is_compiling() or not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
        return None
    while _is_wrapped(x):  # by a transform of torch.func
        x = _unwrapped(x)
    try:
        found = open_streams.get(x.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # a tensor without memory, as of a subclass
        return None
    return None if found is None else found()
