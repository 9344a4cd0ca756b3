"""Kernels that nobody has run: one rule, asked by the plans of matmul and of attention.

`tilestream.kernels.cdna` was compiled, and what was compiled was checked; there was no AMD GPU to run it on. The
portable kernels' text is the same on every GPU, has been run on NVIDIA's, and runs in Triton's interpreter. So AMD GPUs
get the portable kernels, though the others are faster by the estimate: a wrong number costs more than a slow one. The
same holds for any kernel that has not run yet. Who asks gets such a kernel, wherever it does the problem: for a plan by
``backend=``, for all that a process does by a variable of its environment. A kernel that has run is taken out of
`KERNELS`, and there is no more to it.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

#: What a plan of such a kernel says of it.
NOT_RUN = "compiled and checked, not run on a GPU yet"


class Unrun(NamedTuple):
    """A kernel that was not run.

    Attributes
    ----------
    environment
        The variable that takes it for all calls, where it is 1.
    what
        It, in words.
    """

    environment: str
    what: str


#: By the name that plans give them, and by which a plan is asked for them.
KERNELS = {
    "cdna": Unrun("TILESTREAM_CDNA", "the CDNA kernels"),
}


def to_ask(kernel: str) -> str:
    """Why ``kernel`` is not what runs where nobody asks for it, and how it is asked for; empty if it has run."""
    found = KERNELS.get(kernel)
    return "" if found is None else f"{NOT_RUN}: backend={kernel!r} takes it, or {found.environment}=1 for all calls"


def unasked(kernel: str, backend: str | None) -> str:
    """Why ``kernel`` is not taken where it does a problem: it was not run, and nobody asks for it; else empty.

    Parameters
    ----------
    kernel
        The device's fast kernel for the problem.
    backend
        What the caller forces; None where he leaves it to the plan.

    Raises
    ------
    ValueError
        If the kernel's variable is neither 0 nor 1.
    """
    found = KERNELS.get(kernel)
    return "" if found is None or backend is not None or _of_environment(found) else to_ask(kernel)


@functools.cache
def _of_environment(kernel: Unrun) -> bool:
    """The kernel's variable as it was when it was first asked for; not set is 0."""
    text = os.environ.get(kernel.environment, "") or "0"
    if text not in ("0", "1"):
        raise ValueError(
            f"{kernel.environment}={text!r}: it is 1 where {kernel.what} are to be taken, which nobody has run, or 0; "
            "or unset it"
        )
    return text == "1"
