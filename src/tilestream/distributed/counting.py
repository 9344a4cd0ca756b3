"""The calls between ranks that the device counts, so that CUDA graphs may hold them.

TILESTREAM_GRAPH_RANKS, the same on all ranks:

- unset, or ``captured``: captured calls. Before the first eager call of each kind the device makes it, too, for what a
  capture needs: slots, words and loaded kernels. The host counts all eager calls whose results are given, which costs
  it less.
- ``1``: all calls. A rank may then replay a call that another rank makes eagerly.
- ``0``: none. A captured call is unfused, and nothing is made for captures.

Ranks compare it with each call that symmetric memory could carry.
"""

from __future__ import annotations

import functools
from typing import Literal

from tilestream.distributed.environment import chosen

#: What is counted by the device.
Counting = Literal["none", "captured", "all"]
VARIABLE = "TILESTREAM_GRAPH_RANKS"
#: The reason why no capture holds a fused call.
NONE_COUNTED = f"the device counts no calls, because {VARIABLE} is 0"
_BY_TEXT: dict[str, Counting] = {"": "captured", "captured": "captured", "1": "all", "0": "none"}


@functools.cache
def counting() -> Counting:
    """What the device counts, by the environment at the first use.

    Raises
    ------
    ValueError
        If the variable has another value.
    """
    return chosen(
        VARIABLE, _BY_TEXT,
        "which calls between ranks the device counts: captured, or unset, for those that CUDA graphs hold; 1 for all; "
        "0 for none",
    )  # fmt: skip
