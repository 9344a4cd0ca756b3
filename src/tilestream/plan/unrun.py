"""Kernels that nobody has run: one rule, asked by the plans of matmul and of attention.

`tilestream.kernels.cdna` was compiled, and what was compiled was checked; there was no AMD GPU to run it on. The
portable kernels' text is the same on every GPU, has been run on NVIDIA's, and runs in Triton's interpreter. So AMD GPUs
get the portable kernels, though the others are faster by the estimate: a wrong number costs more than a slow one. Who
asks gets the others, wherever they do the problem: for a plan by ``backend="cdna"``, for all that a process does by
TILESTREAM_CDNA=1.
"""

from __future__ import annotations

import functools
import os

ENVIRONMENT = "TILESTREAM_CDNA"

#: What a plan of such a kernel says of it.
NOT_RUN = "compiled and checked, not run on a GPU yet"
#: Why such a kernel is not what runs where nobody asks for it.
UNASKED = f"{NOT_RUN}: backend='cdna' takes it, or {ENVIRONMENT}=1 for all calls"


def unasked(kernel: str, backend: str | None) -> str:
    """Why ``kernel`` is not taken where it does a problem: it was not run, and nobody asks for it; else empty.

    Parameters
    ----------
    kernel
        The device's fast backend.
    backend
        What the caller forces; None where he leaves it to the plan.

    Raises
    ------
    ValueError
        If TILESTREAM_CDNA is neither 0 nor 1.
    """
    return UNASKED if kernel == "cdna" and backend is None and not _of_environment() else ""


@functools.cache
def _of_environment() -> bool:
    """TILESTREAM_CDNA as it was when it was first asked for; not set is 0."""
    text = os.environ.get(ENVIRONMENT, "") or "0"
    if text not in ("0", "1"):
        raise ValueError(
            f"{ENVIRONMENT}={text!r}: it is 1 where the CDNA kernels are to be taken, which nobody has run, or 0; or "
            "unset it"
        )
    return text == "1"
