"""Cutting integer ranges into parts: the arithmetic of all schedules.

The functions here and in `raster`, `queues`, `ring`, `stream_k` and `swizzle` are *leaves*: arithmetic on integers
(``//``, ``%``, ``^``, ``min``, ``max``, comparisons) whose values stay in [0, 2**31), where Python's division and a
device's agree. ``triton.jit(fn)`` or ``gluon.jit(fn)`` compiles the same function objects for devices. So a leaf calls
no other function, has one return, and uses only Python that those compilers support. ``and`` is not lazy on a device:
both sides are computed and must be harmless.
"""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up. ``a + b`` must stay in 31 bits."""
    return (a + b - 1) // b


def part_begin(total: int, parts: int, part: int) -> int:
    """First element of ``part`` when ``total`` elements are cut into ``parts`` parts whose sizes differ by at most one.

    ``part == parts`` gives ``total``. The formula avoids ``part * total``, which may exceed 31 bits.
    """
    return (total // parts) * part + min(part, total % parts)


def part_size(total: int, parts: int, part: int) -> int:
    """Number of elements in ``part``: ``part_begin(part + 1) - part_begin(part)``."""
    size = total // parts
    if part < total % parts:
        size = size + 1
    return size


def part_of(total: int, parts: int, x: int) -> int:
    """The part of element ``x``: the inverse of `part_begin`."""
    small = total // parts
    cut = total - (parts - total % parts) * small  # the end of the larger parts
    if x < cut:
        part = x // (small + 1)
    else:
        # If small is 0, every element lies before the cut; max() avoids a division by zero in the other branch.
        part = total % parts + (x - cut) // max(small, 1)
    return part
