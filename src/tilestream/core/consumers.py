"""The Hopper kernel's consumers, by variant."""

from __future__ import annotations


def sharing(consumers: str) -> int:
    """The number of consumers that share a tile's rows."""
    return {"cooperative": 2, "triple": 3}.get(consumers, 1)
