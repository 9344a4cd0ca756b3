"""`Pack`: brings a kernel's arguments, given by name, into the order of its entry.

Neither this module nor its users need torch: the compile gate, and the tools that fill a cache without a GPU, make the
same arguments from shapes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def named(prefix: str, extents: Sequence[str], strides: Sequence[int]) -> dict[str, int]:
    """Strides by the names of their parameters: a prefix and an extent."""
    return {prefix + extent: stride for extent, stride in zip(extents, strides, strict=True)}


class Pack:
    """All arguments of a kernel: those of each call, and those that a plan and a layout fix.

    The kernel's entry is the only list of its parameters. Names that it does not have are ignored.

    Parameters
    ----------
    kernel
        The jitted kernel.
    fixed
        Values by name. For a name of a group: its value in calls that leave the group out.
    groups
        The names of a call's arguments in their order: tensors, addresses, tensor maps, numbers, or stand-ins for them.
        Calls may leave out the last groups. A tensor map ``x_map`` may be given as ``x``.
    """

    def __init__(self, kernel: Any, fixed: Mapping[str, Any], *groups: Sequence[str]) -> None:
        position = {name: i for i, name in enumerate(itertools.chain(*groups))}
        starts = list(itertools.accumulate(map(len, groups)))
        self._filled: list[Any] = []
        places = []  # (position in `given`, position in the entry)
        for at, parameter in enumerate(inspect.signature(kernel.fn).parameters):
            name = parameter if parameter in position or parameter in fixed else parameter.removesuffix("_map")
            if name in position:
                places.append((position[name], at))
            self._filled.append(fixed.get(name) if name in position else fixed[name])
        self._runs: list[tuple[int, slice, slice]] = []
        for start, at in sorted(places):
            _, of, to = self._runs[-1] if self._runs else (0, slice(-1), slice(-1))
            if (start, at) == (of.stop, to.stop) and start not in starts:  # neighbours are copied as one slice
                self._runs[-1] = (of.start, slice(of.start, start + 1), slice(to.start, at + 1))
            else:
                self._runs.append((start, slice(start, start + 1), slice(at, at + 1)))

    def __call__(self, given: tuple[Any, ...], more: tuple[Any, ...] = ()) -> list[Any]:
        """All arguments, from the values of the first groups: ``given``, then ``more``."""
        given += more
        filled, count = self._filled.copy(), len(given)
        for start, of, to in self._runs:
            if start >= count:
                break
            filled[to] = given[of]
        return filled
