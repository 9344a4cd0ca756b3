"""The swizzle: the places of a row's elements in shared memory, so that lanes that read a column use different banks.

A row of a stage consists of *cells*. One lane reads one cell at a time. The cells of a row are permuted by an exclusive
or with a number of the row: ``cell ^ (row // every) % period``. The permutation is its own inverse, so one function
maps a logical cell to its place and a place to its logical cell.

Copies that write shared memory linearly (CDNA's copies that bypass the registers, which put each lane's bytes after
those of the previous lane) produce a swizzled stage this way: the *global* address is permuted and the place is not, so
no data crosses lanes. `tilestream.kernels.cdna.ring` has the cell that each lane copies.

`swizzled` is a leaf in the sense of `tilestream.core.integers`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Bytes of a bank.
BANK = 4
#: Banks of shared memory, by architecture.
BANKS = {"gfx942": 32, "gfx950": 64, "sm_90": 32}


def swizzled(row: int, cell: int, every: int, period: int) -> int:
    """The place of cell ``cell`` in row ``row``, or the cell at place ``cell``: the function is its own inverse."""
    return cell ^ ((row // every) % period)


@dataclass(frozen=True)
class Swizzle:
    """A permutation of the cells of each row.

    Parameters
    ----------
    vector
        Elements of a cell.
    period
        The number of different permutations, a power of two. 1: no permutation.
    shift
        ``2**shift`` successive rows have the same permutation.
    """

    vector: int
    period: int
    shift: int = 0

    def __post_init__(self) -> None:
        if self.vector < 1 or self.shift < 0:
            raise ValueError(
                f"Swizzle: vector={self.vector}, shift={self.shift}; a cell has an element at least, and shift is not "
                "negative"
            )
        if self.period < 1 or self.period & (self.period - 1):
            raise ValueError(
                f"Swizzle: period={self.period}; cells are permuted by an exclusive or, so it is a power of two"
            )

    @classmethod
    def of_row(cls, row_bytes: int, lane_bytes: int, banks: int, itemsize: int) -> Swizzle:
        """The swizzle of rows of ``row_bytes``, read down a column of cells, ``lane_bytes`` a lane.

        The ``banks``, of 4 bytes each, are so many bytes wide together, read at once by so many lanes. Rows that begin
        at different places of that width need no permutation among each other: there are ``width / gcd(row_bytes,
        width)`` of them, one after the other, and then the places come again. Each such round gets a number of its
        own, as many as there are lanes for. Both are powers of two that divide the row, so any whole number of rows
        is a bijection; and lanes that read one cell of as many rows as are read at once, from a multiple of that on,
        meet each bank once (tests count it for every row).

        Rows of 128 bytes in chunks of 16, over 32 banks, give Hopper's TMA swizzle, the chunk's index exclusive or
        the row mod 8; rows of 64 and 32 bytes give TMA's other two.

        Raises
        ------
        ValueError
            If cells do not fill a row, or are no vectors of elements, or do not divide the banks' width.
        """
        width = banks * BANK
        if min(row_bytes, lane_bytes, itemsize) < 1 or row_bytes % lane_bytes or lane_bytes % itemsize:
            raise ValueError(
                f"lane_bytes={lane_bytes}: rows of {row_bytes} bytes of {itemsize}-byte elements; a row has a whole "
                "number of cells, and a cell of elements: take fewer bytes a lane"
            )
        if width % lane_bytes or banks & (banks - 1):
            raise ValueError(
                f"lane_bytes={lane_bytes}, banks={banks}: the banks are a power of two, and {width} bytes wide, of "
                "which a lane takes a whole part"
            )
        alike = math.gcd(row_bytes, width)
        return cls(lane_bytes // itemsize, max(1, alike // lane_bytes), (width // alike).bit_length() - 1)

    @property
    def every(self) -> int:
        """Rows in a row that have the same number."""
        return 1 << self.shift

    def fits(self, row_elements: int) -> bool:
        """Whether it is a bijection on rows of so many elements: whole cells, a whole number of periods."""
        return row_elements % (self.vector * self.period) == 0

    def check(self, row_elements: int) -> None:
        """Raise `ValueError` unless `fits`."""
        if not self.fits(row_elements):
            raise ValueError(
                f"Swizzle: a row of {row_elements} elements; cells of {self.vector} and a period of {self.period} "
                f"permute rows of a multiple of {self.vector * self.period}: take `Swizzle.of_row` of this row"
            )

    def place(self, row: int, column: int) -> int:
        """Where element ``column`` of a row lies in it. Its own inverse: which element lies there."""
        cell = swizzled(row, column // self.vector, self.every, self.period)
        return cell * self.vector + column % self.vector
