"""Kernels that were compiled and checked, but never run on a GPU: plans take them only where they are asked for.

There was no AMD GPU to run `tilestream.kernels.cdna` on. The portable kernels have the same text on every GPU, run on
NVIDIA's and in Triton's interpreter. AMD GPUs therefore get those, though the model expects CDNA's to be faster: a
wrong number costs more than a slow one. ``backend=`` takes an experimental kernel for a plan, a variable of the
environment for the whole process. A kernel that has run is removed from `KERNELS`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

#: What a plan of such a kernel says of it.
NOT_RUN = "compiled and checked, not run on a GPU yet"


class Experimental(NamedTuple):
    """A kernel that was not run: the ``environment`` variable that takes it for all calls, and its name in words."""

    environment: str
    what: str


#: By the name that plans give them, and by which a plan is asked for them.
KERNELS = {"cdna": Experimental("TILESTREAM_CDNA", "the CDNA kernels")}
#: Copies of 4, 8 and 16 bytes by the portable kernel, where a stride or an extent is no multiple of 16 elements.
VECTORS = Experimental("TILESTREAM_VECTORS", "copies of a few elements")
#: Elements of 16 bits in such a copy, widest first.
WIDTHS = (8, 4, 2)


def opt_in(kernel: str) -> str:
    """Why ``kernel`` is not a default, and what takes it; empty if it has run."""
    found = KERNELS.get(kernel)
    return "" if found is None else f"{NOT_RUN}: backend={kernel!r} takes it, or {found.environment}=1 for all calls"


def refusal(kernel: str, backend: str | None) -> str:
    """Why the fast ``kernel`` is not taken: it was not run, and is not asked for; else empty.

    ``backend`` is what the caller forces, None for the plan's choice.

    Raises
    ------
    ValueError
        If the kernel's variable is neither 0 nor 1.
    """
    found = KERNELS.get(kernel)
    return "" if found is None or backend is not None or _of_environment(found) else opt_in(kernel)


def vector(itemsize: int, multiples: Callable[[int], bool]) -> int:
    """`tilestream.plan.problem.Problem.vector` of operands that are in ``multiples`` of so many; 1 if not opted in."""
    if itemsize != 2 or not _of_environment(VECTORS):
        return 1
    return next((width for width in WIDTHS if multiples(width)), 1)


@functools.cache
def _of_environment(kernel: Experimental) -> bool:
    """The kernel's variable at its first use; unset is 0."""
    text = os.environ.get(kernel.environment, "") or "0"
    if text not in ("0", "1"):
        raise ValueError(
            f"{kernel.environment}={text!r}: it is 1 to take {kernel.what}, which have never run, or 0; or unset it"
        )
    return text == "1"
