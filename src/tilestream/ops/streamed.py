"""Operands that are a `tilestream.Stream`, and tensors that a stream has not filled yet.

An op calls this module only if an operand is a `Stream` (by ``type``: `isinstance` of a tensor is slow) or if a stream
is open. While torch.compile traces, open streams are not looked for: each would cause a recompilation.
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


def _filling(x: object) -> bool:
    """Whether ``x`` lies in memory that a stream has not filled for calls on the current stream."""
    if is_compiling() or not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
        return False
    try:
        found = open_streams.get(x.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # a tensor without memory, as of a transform or a subclass
        return False
    stream = None if found is None else found()
    return stream is not None and not stream.is_filled_here
