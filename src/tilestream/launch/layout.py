"""`Layout`: the memory that a rank of a mixture of experts gives to the other ranks' kernels."""

from __future__ import annotations

from typing import NamedTuple


class Layout(NamedTuple):
    """A rank's memory, the same on all ranks: see `tilestream.kernels.portable.experts`."""

    world: int
    experts: int  # of a rank
    #: Rows that one rank may send to one rank: all its choices, as a token may choose one expert several times. It
    #: sends as many to all ranks together, which is the number of its results.
    capacity: int
    width: int
    itemsize: int

    @property
    def results(self) -> int:
        """Bytes in front of the results."""
        return _aligned(self.world * self.capacity * self.width * self.itemsize)

    @property
    def heads(self) -> int:
        """Bytes in front of the heads."""
        return self.results + _aligned(self.capacity * self.width * self.itemsize)

    @property
    def size(self) -> int:
        """Bytes of it all."""
        return self.heads + 4 * self.world * (1 + self.experts)


def _aligned(size: int) -> int:
    """``size``, rounded up to a multiple of 256."""
    return -(-size // 256) * 256
