"""What has not run on a GPU, or not long enough there: plans take it only where it is asked for.

The portable kernels have one text for all GPUs, which has run on NVIDIA's and in Triton's interpreter. Calls whose
faster kernel has hardly run get them, though the cost model expects the other to be faster: a wrong number costs more
than a slow one. ``backend=`` takes an experimental kernel for a plan, an environment variable for the whole process. A
kernel whose tests and whose speed on a GPU are on record is removed from `KERNELS`.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

#: What a plan of such a kernel says of it.
NOT_RUN = "compiled and checked, not run on a GPU yet"


class Experimental(NamedTuple):
    """A kernel that is not a default yet.

    Attributes
    ----------
    environment
        The variable that takes it for all calls.
    what
        Its name in words.
    """

    environment: str
    what: str


#: By the name that plans give them, and by which a plan is asked for them.
KERNELS = {
    "cdna": Experimental("TILESTREAM_CDNA", "the CDNA kernels"),
}


def opt_in(kernel: str) -> str:
    """Why ``kernel`` is not a default, and what takes it; empty for a default."""
    found = KERNELS.get(kernel)
    if found is None:
        return ""
    return f"{NOT_RUN}: backend={kernel!r} takes it, or {found.environment}=1 for all calls"


def refusal(kernel: str, backend: str | None) -> str:
    """Why the fast ``kernel`` is not taken: it is in `KERNELS`, and is not asked for; else empty.

    ``backend`` is what the caller forces, None for the plan's choice.

    Raises
    ------
    ValueError
        If the kernel's variable is neither 0 nor 1.
    """
    found = KERNELS.get(kernel)
    return "" if found is None or backend is not None or _of_environment(found) else opt_in(kernel)


@functools.cache
def _of_environment(kernel: Experimental) -> bool:
    """The kernel's variable at its first use; unset is 0."""
    text = os.environ.get(kernel.environment, "") or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{kernel.environment}={text!r}: it is 1 to take {kernel.what} ({NOT_RUN}), or 0; or unset it")
    return text == "1"
