"""Versions as numbers. For the compile gates too, which run where there is no pytest."""

from __future__ import annotations


def release(version: str) -> tuple[int, ...]:
    """``"3.10.0+git"`` as ``(3, 10)``, to be compared."""
    return tuple(map(int, version.split(".")[:2]))
