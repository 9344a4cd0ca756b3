"""Operands that are a `tilestream.Stream`, and tensors that one has not filled yet.

An op asks only where its operand is one (by ``type``: a tensor is slow to say what it is an instance of), or where one
is open. It does not look for open ones while torch compiles, which would compile anew for each.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.stream import Stream, open_streams


def operand(
    op: str, name: str, x: torch.Tensor | Stream, argument: str, arrival: Arrival | None
) -> tuple[torch.Tensor, Arrival | None]:
    """Operand ``x`` and its arrival: a stream's own, or what the caller gave as ``argument``.

    Raises
    ------
    ValueError
        If the stream's arrival is another; or if ``x`` is a stream's tensor, not filled yet, and has no arrival.
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
    """Raise for tensors of a call that do not arrive: a stream, or a stream's tensor that is not filled yet."""
    for name, x in operands.items():
        if isinstance(x, Stream):
            raise TypeError(f"{op}: {name} is a Stream, and {name} does not arrive; wait for it: stream.wait()")
        if _filling(x):
            raise ValueError(
                f"{op}: {name} is a tensor that ts.stream_in has not filled yet, and {name} does not arrive; wait "
                "until it is filled: stream.wait()"
            )


def refuse_keys(op: str, alone: bool, **operands: object) -> None:
    """As `refuse`, for keys and values, which arrive together; ``alone``: without an arrival."""
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


def _filling(x: object) -> bool:
    """Whether ``x`` is in memory that a stream has not filled for what is issued now."""
    if is_compiling() or not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
        return False
    try:
        found = open_streams.get(x.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # a tensor without memory: a transform's, a subclass's
        return False
    stream = None if found is None else found()
    return stream is not None and not stream.is_filled_here
