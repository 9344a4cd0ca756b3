"""What was compiled and checked, but never run on a GPU: plans take it only where it is asked for.

There was no AMD GPU to run `tilestream.kernels.cdna` on. The portable kernels have the same text on every GPU, run on
NVIDIA's and in Triton's interpreter. AMD GPUs therefore get those, though the model expects CDNA's to be faster: a
wrong number costs more than a slow one. ``backend=`` takes an experimental kernel for a plan, a variable of the
environment for the whole process. What has run is removed from `KERNELS`.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

#: What a plan of such a kernel says of it.
NOT_RUN = "compiled and checked, not run on a GPU yet"


class Experimental(NamedTuple):
    """Kernels that were not run."""

    environment: str  # the variable that takes them for all calls
    what: str  # their name in words
    backend: bool = True  # whether ``backend=`` takes them for one


#: By the name that plans give them, and by which a plan is asked for them.
KERNELS = {
    "cdna": Experimental("TILESTREAM_CDNA", "the CDNA kernels"),
    "graph_ranks": Experimental(
        "TILESTREAM_GRAPH_RANKS", "calls between ranks that CUDA graphs may hold", backend=False
    ),
}


def opt_in(kernel: str) -> str:
    """Why ``kernel`` is not a default, and what takes it; empty if it has run."""
    found = KERNELS.get(kernel)
    if found is None:
        return ""
    one = f"backend={kernel!r} takes it, or " if found.backend else "taken with "
    return f"{NOT_RUN}: {one}{found.environment}=1 for all calls"


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


def takes(kernel: str) -> bool:
    """Whether the process takes ``kernel``: it has run, or its variable says so."""
    return not refusal(kernel, None)


@functools.cache
def _of_environment(kernel: Experimental) -> bool:
    """The kernel's variable at its first use; unset is 0."""
    text = os.environ.get(kernel.environment, "") or "0"
    if text not in ("0", "1"):
        raise ValueError(
            f"{kernel.environment}={text!r}: it is 1 to take {kernel.what}, which have never run, or 0; or unset it"
        )
    return text == "1"
