"""The binder: a plain integer function becomes what this backend's kernels can call.

The schedule's arithmetic is written once, in `tilestream.schedule`, and proved there. `device` hands the very function
object to Triton's compiler; under Triton's interpreter, where kernels run as Python, it hands it on as it is. Which of
the two is decided when this package is imported, by TRITON_INTERPRET, as Triton itself does for ``triton.jit``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

#: Whether kernels of this package run in Triton's interpreter.
INTERPRETED: bool = triton.knobs.runtime.interpret


def device(leaf: Callable[..., Any]) -> Any:
    """``leaf``, a leaf in the sense of `tilestream.schedule.integers`, as kernels call it."""
    return leaf if INTERPRETED else triton.jit(leaf)
