"""The problem as the plan sees it: extents, dtypes and arrivals; no data."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.core.chunks import Incoming
from tilestream.core.dtypes import (
    FNUZ,
    FP8,
    FP8_RESULT,
    ITEMSIZE,
    OCP,
    GroupedScales,
    Scales,
    are_a_pair,
    dtype_name,
    pairs_text,
    result_name,
)
from tilestream.core.gate import Gate
from tilestream.core.groups import MOST_GROUPS, Along

__all__ = [
    "FNUZ", "FP8", "FP8_RESULT", "ITEMSIZE", "OCP", "GroupedProblem", "GroupedScales", "Incoming", "Problem", "Scales",
    "are_a_pair", "dtype_name", "gate_of", "pairs_text", "result_name",
]  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """``out[batch, m, n] = a[batch, m, k] @ b[batch, k, n]``."""

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "float32"
    out_dtype: str = "float32"
    #: rows, columns: how A's rows and B's columns arrive; None where all is there at launch.
    rows: Incoming | None = None
    columns: Incoming | None = None
    #: Whether the batches share one A, so that the chunks bring ``m`` rows and not ``batch * m``.
    shared_rows: bool = False
    #: Whether float32 operands may be rounded to tf32 for the matrix units, as ``torch.backends`` says.
    tf32: bool = False
    #: Whether a GPU can read A and B in vectors of 16 bytes: one stride is 1, and the others, the extent along it and
    #: the address are multiples of 16.
    aligned: bool = True
    #: Elements of a vector of 4, 8 or 16 bytes in which a GPU can read operands of 16 bits that are not ``aligned``: as
    #: there, with multiples of so many. 1: none, or not asked for (`tilestream.plan.experimental`).
    vector: int = 1
    no_tma: str = ""  # what of A and B TMA cannot address, and why; empty where it can
    #: Whether the output is the product and nothing else, and TMA can address it: that takes the fewest registers.
    plain: bool = True
    b_dtype: str = ""  # B's dtype where it is not A's: both are of 8 bits then, and of one kind
    scales: Scales = "none"  # what the products are scaled by
    #: Whether the matrix units may add up 8-bit products in their own accumulator, which on Hopper keeps fewer bits
    #: than float32's; otherwise it is emptied into float32 at least every 128 of K.
    fast_accum: bool = True
    #: The chunks of the output's rows (of all batches) that are signalled when they are complete, and the one that the
    #: raster begins with; None where the end of the launch says it all. Nothing arrives then.
    publishes: Incoming | None = None
    #: Bytes that the beginnings of A's rows, and of B's, as they lie are multiples of, up to L2's line: see
    #: `tilestream.plan.tma.row_multiple`.
    row_multiples: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        if self.b_dtype and not are_a_pair(self.dtype, self.b_dtype):
            raise TypeError(f"b_dtype={self.b_dtype!r}: A is {self.dtype}; {pairs_text()}")
        for name in ("m", "n", "k", "batch"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}; an extent is not negative")
        rows = self.m if self.shared_rows else self.m * self.batch
        for name, incoming, extent in (("arrival", self.rows, rows), ("weight_arrival", self.columns, self.n)):
            if incoming is not None and incoming.chunks.rows != extent:
                raise ValueError(f"{name}: its chunks bring {incoming.chunks.rows} rows, the operand has {extent}")
        if self.publishes is not None and self.publishes.chunks.rows != self.m * self.batch:
            raise ValueError(
                f"publishes: chunks of {self.publishes.chunks.rows} rows for {self.batch} outputs of {self.m} rows; "
                "they are all of their rows"
            )
        if self.publishes is not None and self.arriving:
            raise ValueError("publishes: an operand arrives, too; what is NaN after an expiry would be published")

    @property
    def dtypes(self) -> tuple[str, str]:
        """A's and B's."""
        return self.dtype, self.b_dtype or self.dtype

    @property
    def arriving(self) -> int:
        """How many of the operands arrive."""
        return (self.rows is not None) + (self.columns is not None)

    @property
    def fp8(self) -> bool:
        """Whether the operands are of 8 bits."""
        return self.dtype in FP8

    @property
    def promoted(self) -> bool:
        """Whether sums of 8-bit products are promoted to float32 every 128 of K (two-level accumulation)."""
        return self.fp8 and not self.fast_accum

    @property
    def kind(self) -> str:
        """What the matrix units are fed with: the operands' dtype, ``"fp8"`` for each of 8 bits, or ``"tf32"``."""
        if self.fp8:
            return "fp8"
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype

    @property
    def text(self) -> str:
        """The product in words."""
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"matmul {batch}[{self.m}, {self.k}] @ [{self.k}, {self.n}]"

    @property
    def operations(self) -> int:
        """Multiply-adds, counted two each."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Bytes that must move at least: A and B read once, the output written once."""
        size, out = ITEMSIZE[self.dtype], ITEMSIZE[self.out_dtype]
        a = self.m * self.k * (1 if self.shared_rows else self.batch)
        return size * (a + self.batch * self.k * self.n) + out * self.batch * self.m * self.n

    @property
    def is_empty(self) -> bool:
        """Whether an extent is 0: there is nothing to load."""
        return 0 in (self.m, self.n, self.k, self.batch)

    def unfit(self, most: int) -> str:
        """Why no fast kernel that counts in extents below ``most`` does this, on any GPU; empty if one may."""
        if self.is_empty:
            return "there is nothing to load"
        for name in ("m", "n", "k"):
            if getattr(self, name) >= most:
                return f"{name}={getattr(self, name)}; it counts rows, columns and K in 31 bits"
        return ""

    @property
    def row_of_batch(self) -> tuple[int, ...]:
        """Where each batch begins in the rows that arrive; empty where there is one, or all share them."""
        if self.batch == 1 or self.shared_rows or not self.m:
            return ()
        return tuple(range(0, self.batch * self.m, self.m))


@dataclass(frozen=True)
class GroupedProblem(Problem):
    """A product a group, of runs of A's rows or of K whose lengths only the device knows.

    ``along="rows"``: ``out[m, n]``, the rows of group g times ``b[g, k, n]``. ``along="k"``: ``out[g, m, n]``, of the
    part of K that is group g's.
    """

    scales: GroupedScales = "none"  # type: ignore[assignment]
    groups: int = 1
    along: Along = "rows"
    two_halves: bool = False  # whether the output has a column for a column of each half of B's: half of ``n``
    arrives: bool = False  # whether each group's matrix of B arrives by itself, most rows first

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.along == "k" and (self.two_halves or self.scales == "block"):
            what = "an activation of two halves" if self.two_halves else "scales='block'"
            raise ValueError(f"{what}: groups divide K; that is of groups of rows")
        if self.two_halves and self.n % 2:
            raise ValueError(f"n={self.n}; of an activation of two halves B has an even number of columns")
        if self.scales == "block" and not self.fp8:
            raise TypeError(f"scales='block': operands are {self.dtype}; they are of {', '.join(FP8)}")
        if not 1 <= self.groups <= MOST_GROUPS:
            raise ValueError(
                f"groups={self.groups}; there are 1 to {MOST_GROUPS}: make several calls, of fewer groups each"
            )

    @property
    def arriving(self) -> int:
        """As of `Problem`."""
        return int(self.arrives)

    @property
    def text(self) -> str:
        """The product in words."""
        if self.along == "rows":
            halves = ", swiglu of two halves" * self.two_halves
            return f"grouped_mm [{self.m}, {self.k}] @ [{self.groups}, {self.k}, {self.n}] by rows{halves}"
        return f"grouped_mm [{self.m}, {self.k}] @ [{self.k}, {self.n}] by K, {self.groups} groups"

    @property
    def promoted(self) -> bool:
        """As of `Problem`; scales of blocks are of products that K steps of 128 at most have added up."""
        return super().promoted or self.scales == "block"

    @property
    def out_columns(self) -> int:
        """The output's."""
        return self.n // 2 if self.two_halves else self.n

    @property
    def bytes(self) -> int:
        """As of `Problem`, where each group has rows (a part of K)."""
        size, out = ITEMSIZE[self.dtype], ITEMSIZE[self.out_dtype]
        if self.along == "rows":
            used = min(self.groups, self.m)
            return size * (self.m * self.k + used * self.k * self.n) + out * self.m * self.out_columns
        return size * self.k * (self.m + self.n) + out * self.groups * self.m * self.n


def gate_of(problem: Problem, tile: tuple[int, int]) -> Gate | None:
    """What items of ``tile`` rows and columns wait for; None where all is there at launch."""
    rows, columns = (None if operand is None else operand.chunks for operand in (problem.rows, problem.columns))
    return Gate(problem.m, problem.n, *tile, rows, columns, problem.row_of_batch) if problem.arriving else None
