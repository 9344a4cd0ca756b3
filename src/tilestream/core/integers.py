"""Cutting integer ranges into parts: the arithmetic every schedule is made of.

Every function here and in `raster`, `queues`, `ring`, `stream_k` and `swizzle` is a leaf in integers (``//``, ``%``,
``^``, ``min``, ``max``, comparisons), with all values in [0, 2**31) where Python's division and a device's agree. The
same function objects are compiled for devices, through ``triton.jit(fn)`` or ``gluon.jit(fn)``: so none calls another,
each has one return, and none uses a Python feature that those compilers lack. ``and`` is not lazy there: both sides are
computed, and must be harmless.
"""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up; ``a + b`` stays in 31 bits."""
    return (a + b - 1) // b


def part_begin(total: int, parts: int, part: int) -> int:
    """First element of ``part`` when ``total`` elements are cut into ``parts`` parts whose sizes differ by at most one.

    Written without ``part * total``, which may leave 31 bits. ``part == parts`` gives ``total``.
    """
    return (total // parts) * part + min(part, total % parts)


def part_size(total: int, parts: int, part: int) -> int:
    """Number of elements in ``part``: ``part_begin(part + 1) - part_begin(part)``."""
    size = total // parts
    if part < total % parts:
        size = size + 1
    return size


def part_of(total: int, parts: int, x: int) -> int:
    """The part that holds element ``x``: the inverse of `part_begin`."""
    small = total // parts
    cut = total - (parts - total % parts) * small  # where the larger parts end
    if x < cut:
        part = x // (small + 1)
    else:
        # Where small is 0 every element lies before the cut; max() keeps the untaken branch free of a division by zero.
        part = total % parts + (x - cut) // max(small, 1)
    return part
