"""Environment variables of calls between ranks; `tilestream.distributed.counting` has one of its own.

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
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")
VARIABLE = "TILESTREAM_RANK_CALLS"
_WAYS = {"": False, "operations": False, "graphs": True}


def chosen(variable: str, by_text: Mapping[str, T], says: str) -> T:
    """What a variable's text stands for, or the empty text without it; `ValueError` that ``says`` what it means."""
    text = os.environ.get(variable, "")
    if text not in by_text:
        raise ValueError(f"{variable}={text!r}: it says {says}")
    return by_text[text]


def has_one_queue() -> bool:
    """Whether all of a GPU's streams share a queue, so that one that waits may hold up another."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


@functools.cache
def by_graphs() -> bool:
    """Whether repeated calls are graphs, by the environment at the first use; `ValueError` of another value."""
    says = "how repeated calls between ranks are issued: operations, or unset, for the driver's operations; graphs for "
    return chosen(VARIABLE, _WAYS, f"{says}CUDA graphs") and not has_one_queue()
