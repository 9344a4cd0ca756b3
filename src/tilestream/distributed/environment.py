"""Environment variables of calls between ranks: see `tilestream.distributed.counting`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def chosen(variable: str, by_text: Mapping[str, T], says: str) -> T:
    """What a variable's text stands for, or the empty text without it; `ValueError` that ``says`` what it means."""
    text = os.environ.get(variable, "")
    if text not in by_text:
        raise ValueError(f"{variable}={text!r}: it says {says}")
    return by_text[text]


def has_one_queue() -> bool:
    """Whether all of a GPU's streams share a queue, so that one that waits may hold up another."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
