"""The calls between ranks that the device counts, so that CUDA graphs may hold them.

TILESTREAM_GRAPH_RANKS, the same on all ranks:

- unset, or ``0``: none. A captured call is unfused.
- ``captured``: captured calls, and the first eager call of each kind. That call makes what a capture needs: slots,
  words and loaded kernels. The host counts all other eager calls, which costs it less.
- ``1``: all calls. A rank may then replay a call that another rank makes eagerly.
"""

from __future__ import annotations

import functools
import os
from typing import Literal

#: What is counted by the device.
Counting = Literal["none", "captured", "all"]
VARIABLE = "TILESTREAM_GRAPH_RANKS"
#: The reason why no capture holds a fused call.
NONE_COUNTED = f"the device counts no calls; it counts captured ones with {VARIABLE}=captured on all ranks"
_BY_TEXT: dict[str, Counting] = {"": "none", "0": "none", "captured": "captured", "1": "all"}


@functools.cache
def counting() -> Counting:
    """What the device counts, by the environment at the first use.

    Raises
    ------
    ValueError
        If the variable has another value.
    """
    text = os.environ.get(VARIABLE, "")
    if text not in _BY_TEXT:
        raise ValueError(
            f"{VARIABLE}={text!r}: it says which calls between ranks the device counts: captured, or 1 for all; 0, or "
            "unset, for none"
        )
    return _BY_TEXT[text]
