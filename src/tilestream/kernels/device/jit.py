"""The binder: a plain integer function becomes what this backend's kernels can call.

The schedule's arithmetic is written once, in `tilestream.schedule`, and proved there. `device` hands the very function
object to Triton's compiler; under Triton's interpreter, where kernels run as Python, it hands it on as it is. Which of
the two is decided when this package is imported, by TRITON_INTERPRET, as Triton itself does for ``triton.jit``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

#: Whether kernels of this package run in Triton's interpreter.
INTERPRETED: bool = triton.knobs.runtime.interpret


def device(leaf: Callable[..., Any]) -> Any:
    """``leaf``, a leaf in the sense of `tilestream.core.integers`, as kernels call it, on scalars or vectors."""
    if INTERPRETED:
        return _with(leaf, _least, _most)
    return triton.jit(_with(leaf, tl.minimum, tl.maximum))


def _with(leaf: Any, least: Any, most: Any) -> Any:
    """``leaf`` with another `min` and `max`: Python's own ask a vector whether it is true."""
    return FunctionType(leaf.__code__, {**leaf.__globals__, "min": least, "max": most}, leaf.__name__)


def _least(a: Any, b: Any) -> Any:
    return tl.minimum(a, b) if _is_vector(a) or _is_vector(b) else min(a, b)


def _most(a: Any, b: Any) -> Any:
    return tl.maximum(a, b) if _is_vector(a) or _is_vector(b) else max(a, b)


def _is_vector(x: Any) -> bool:
    return isinstance(x, tl.tensor) and bool(x.shape)
