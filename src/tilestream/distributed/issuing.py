"""How repeated calls between ranks are issued: by the driver's operations, or by a graph.

TILESTREAM_RANK_CALLS, by each rank for itself:

- unset, or ``operations``: a repeated call asks the driver for each of its operations and launches.
- ``graphs``: a call that has come a few times becomes a CUDA graph, one for each of its slots. Later ones update what
  differs (addresses, the epoch), and launch it. Each call also marks in host memory that its kernel has ended, since an
  event inside a graph does not say so. What the driver refuses to make into a graph is issued as before, and logged.
  With CUDA_DEVICE_MAX_CONNECTIONS=1 none is made: a kernel could hold up the copies of its own graph that it waits for.
"""

from __future__ import annotations

import functools
import os

VARIABLE = "TILESTREAM_RANK_CALLS"
_BY_TEXT = {"": False, "operations": False, "graphs": True}


@functools.cache
def by_graphs() -> bool:
    """Whether repeated calls are graphs, by the environment at the first use.

    Raises
    ------
    ValueError
        If the variable has another value.
    """
    text = os.environ.get(VARIABLE, "")
    if text not in _BY_TEXT:
        raise ValueError(
            f"{VARIABLE}={text!r}: it says how repeated calls between ranks are issued: operations, or unset, for the "
            "driver's operations; graphs for CUDA graphs"
        )
    return _BY_TEXT[text] and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
