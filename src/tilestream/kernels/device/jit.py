"""Compiling functions for kernels: plain integer functions that kernels call, and kernels' entries.

The schedule's arithmetic is written once, in `tilestream.core`, and checked there. `device` passes the same function
object to Triton's compiler; for Triton's interpreter, which runs kernels as Python, it returns it as it is. As in
``triton.jit``, TRITON_INTERPRET decides when this package is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

#: Whether kernels of this package run in Triton's interpreter.
INTERPRETED: bool = triton.knobs.runtime.interpret
#: Pointers without a known alignment: to the caller's own words, or to slices of ours.
_UNALIGNED = (
    "row_signals", "row_quarantine", "column_signals", "column_quarantine", "out_signals", "out_counts",
    "lse", "sinks", "scale_q", "scale_k", "scale_v", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "block_table",
    "starts", "order", "signals", "quarantine", "bounds",
)  # fmt: skip


def entry(
    jit: Any, specialised: Iterable[str], unaligned: tuple[str, ...] = (), first: str = "base"
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a kernel's entry. One compiled kernel serves all values of its numbers.

    Parameters
    ----------
    jit
        ``triton.jit`` or ``gluon.jit``.
    specialised
        Numbers that Triton specialises: a 1 is compiled in, and the compiler knows whether they are multiples of 16.
    unaligned
        Pointers that need no alignment, in addition to `_UNALIGNED`.
    first
        The first parameter that is a number; all behind it are numbers, or constexpr.
    """

    def jitted(function: Callable[..., Any]) -> Any:
        names = list(inspect.signature(function).parameters)
        others = {"records", "claims", "C", *_UNALIGNED, *specialised}
        numbers = [name for name in names[names.index(first) :] if name not in others]
        return jit(do_not_specialize=numbers, do_not_specialize_on_alignment=(*_UNALIGNED, *unaligned))(function)

    return jitted


def device(leaf: Callable[..., Any]) -> Any:
    """``leaf``, a leaf in the sense of `tilestream.core.integers`, for kernels, on scalars or vectors."""
    if INTERPRETED:
        return _with(leaf, _least, _most)
    return triton.jit(_with(leaf, tl.minimum, tl.maximum))


def _with(leaf: Any, least: Any, most: Any) -> Any:
    """``leaf`` with another `min` and `max`, since Python's own evaluate a vector's truth."""
    return FunctionType(leaf.__code__, {**leaf.__globals__, "min": least, "max": most}, leaf.__name__)


def _least(a: Any, b: Any) -> Any:
    return tl.minimum(a, b) if _is_vector(a) or _is_vector(b) else min(a, b)


def _most(a: Any, b: Any) -> Any:
    return tl.maximum(a, b) if _is_vector(a) or _is_vector(b) else max(a, b)


def _is_vector(x: Any) -> bool:
    return isinstance(x, tl.tensor) and bool(x.shape)
