"""Kernels that were compiled and checked, but never run on a GPU: plans take them only where they are asked for.

There was no AMD GPU to run `tilestream.kernels.cdna` on, and no GPU since the Hopper grouped kernel took SwiGLU and
scales of blocks. The portable kernels have the same text on every GPU, run on NVIDIA's and in Triton's interpreter.
Those calls therefore get these, though the model expects the others to be faster: a wrong number costs more than a slow
one. ``backend=`` takes an experimental kernel for a plan, a variable of the environment for the whole process. A kernel
that has run is removed from `KERNELS`.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

#: What a plan of such a kernel says of it.
NOT_RUN = "compiled and checked, not run on a GPU yet"


class Experimental(NamedTuple):
    """A kernel that was not run: the ``environment`` variable that takes it for all calls, and its name in words.

    ``backend``: what a plan is asked for to take it, where that is not the kernel's own name.
    """

    environment: str
    what: str
    backend: str = ""


#: By the name that plans give them, and by which a plan is asked for them.
KERNELS = {
    "cdna": Experimental("TILESTREAM_CDNA", "the CDNA kernels"),
    "hopper_experts": Experimental(
        "TILESTREAM_HOPPER_EXPERTS", "the Hopper kernels of SwiGLU and of blocks' scales", "hopper"
    ),
}


def opt_in(kernel: str) -> str:
    """Why ``kernel`` is not a default, and what takes it; empty if it has run."""
    found = KERNELS.get(kernel)
    backend = kernel if found is None else found.backend or kernel
    return "" if found is None else f"{NOT_RUN}: backend={backend!r} takes it, or {found.environment}=1 for all calls"


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


@functools.cache
def _of_environment(kernel: Experimental) -> bool:
    """The kernel's variable at its first use; unset is 0."""
    text = os.environ.get(kernel.environment, "") or "0"
    if text not in ("0", "1"):
        raise ValueError(
            f"{kernel.environment}={text!r}: it is 1 to take {kernel.what}, which have never run, or 0; or unset it"
        )
    return text == "1"
