"""A matmul's description for the planner: extents, dtypes and arrivals, without data."""

from __future__ import annotations

from collections.abc import Callable
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
    "are_a_pair", "dtype_name", "gate_of", "pairs_text", "result_name", "vector_of",
]  # fmt: skip


#: Elements of 16 bits in a copy of 16, 8 and 4 bytes.
VECTORS = (8, 4, 2)


@dataclass(frozen=True)
class Problem:
    """``out[batch, m, n] = a[batch, m, k] @ b[batch, k, n]``."""

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "float32"
    out_dtype: str = "float32"
    #: rows, columns: how A's rows and B's columns arrive; None if they are complete at launch.
    rows: Incoming | None = None
    columns: Incoming | None = None
    #: Whether the batches share one A. The chunks then bring ``m`` rows instead of ``batch * m``.
    shared_rows: bool = False
    #: Whether float32 operands may be rounded to tf32 for the matrix units, as ``torch.backends`` says.
    tf32: bool = False
    #: Whether a GPU can read A and B in vectors of 16 bytes: one stride is 1; the other strides, the extent along the
    #: stride of 1 and the address are multiples of 16.
    aligned: bool = True
    #: Elements of a vector of 4, 8 or 16 bytes, by which a GPU reads A and B of 16 bits that are not both ``aligned``:
    #: see `vector_of`. 1: none.
    vectors: tuple[int, int] = (1, 1)
    no_tma: str = ""  # why TMA cannot address A or B; empty if it can
    not_by_tma: str = ""  # which of them: ``"a"``, ``"b"`` or ``"ab"``
    #: Whether the output is the plain product and TMA can address it. This epilogue takes the fewest registers.
    plain: bool = True
    b_dtype: str = ""  # B's dtype if it differs from A's: both have 8 bits then, and are of one kind
    scales: Scales = "none"  # the scales of the products
    #: Whether the matrix units may add up 8-bit products in their own accumulator. Hopper's keeps fewer bits than
    #: float32's. If False, it is added to a float32 sum at least every 128 of K.
    fast_accum: bool = True
    #: The chunks of the output's rows (of all batches) that are signalled on completion, and the first chunk of the
    #: raster; None if no chunk is signalled. A problem that publishes has no arriving operand.
    publishes: Incoming | None = None
    #: The multiples of bytes at which A's rows, and B's rows, begin in memory, up to L2's line: see
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
        """The dtypes of A and B."""
        return self.dtype, self.b_dtype or self.dtype

    @property
    def vector(self) -> int:
        """Elements of a vector by which both operands can be read: see `vectors`."""
        return min(self.vectors)

    @property
    def arriving(self) -> int:
        """The number of operands that arrive."""
        return (self.rows is not None) + (self.columns is not None)

    @property
    def divides_k(self) -> bool:
        """Whether groups divide K."""
        return False

    @property
    def fp8(self) -> bool:
        """Whether the operands have 8 bits."""
        return self.dtype in FP8

    @property
    def promoted(self) -> bool:
        """Whether sums of 8-bit products are promoted to float32 every 128 of K (two-level accumulation)."""
        return self.fp8 and not self.fast_accum

    @property
    def kind(self) -> str:
        """The matrix units' input: the operands' dtype, ``"fp8"`` for all dtypes of 8 bits, or ``"tf32"``."""
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
        """The number of operations; a multiply-add is two."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def out_rows(self) -> int:
        """The rows that are written."""
        return self.batch * self.m

    @property
    def out_columns(self) -> int:
        """The number of the output's columns."""
        return self.n

    @property
    def bytes(self) -> int:
        """The least number of bytes to move: A and B are read once, the output is written once."""
        size, out = ITEMSIZE[self.dtype], ITEMSIZE[self.out_dtype]
        a = self.m * self.k * (1 if self.shared_rows else self.batch)
        return size * (a + self.batch * self.k * self.n) + out * self.batch * self.m * self.n

    @property
    def is_empty(self) -> bool:
        """Whether an extent is 0, so that nothing is loaded."""
        return 0 in (self.m, self.n, self.k, self.batch)

    def unfit(self, most: int) -> str:
        """Why no GPU's fast kernel supports the problem, with extents below ``most``; empty if one may."""
        if self.is_empty:
            return "there is nothing to load"
        for name in ("m", "n", "k"):
            if getattr(self, name) >= most:
                return f"{name}={getattr(self, name)}; it counts rows, columns and K in 31 bits"
        return ""

    @property
    def row_of_batch(self) -> tuple[int, ...]:
        """The first row of each batch among the rows that arrive; empty for a single batch and for a shared A."""
        if self.batch == 1 or self.shared_rows or not self.m:
            return ()
        return tuple(range(0, self.batch * self.m, self.m))


@dataclass(frozen=True)
class GroupedProblem(Problem):
    """One product for each group. A group is a run of A's rows, or of K, whose length only the device knows.

    ``along="rows"``: ``out[m, n]`` has the rows of group g times ``b[g, k, n]``. ``along="k"``: ``out[g, m, n]`` is the
    product over group g's part of K.
    """

    scales: GroupedScales = "none"  # type: ignore[assignment]
    groups: int = 1
    along: Along = "rows"
    two_halves: bool = False  # whether an output column combines a column of each half of B: it has ``n // 2``
    #: Whether the groups' matrices of B arrive one by one, that with the most rows first. By source: whether rows do.
    arrives: bool = False
    #: sources, likely: of rows by source, the number of sources, each with a place of ``m // sources`` rows, and the
    #: rows to expect of all of them, for costs. 0 sources: offsets say where groups end.
    sources: int = 0
    likely: int = 0
    pivot: int = 0  # the source that each worker looks at first

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.along == "k" and (self.two_halves or self.scales == "block"):
            what = "an activation of two halves" if self.two_halves else "scales='block'"
            raise ValueError(f"{what}: groups divide K; that is of groups of rows")
        if self.two_halves and self.n % 2:
            raise ValueError(f"n={self.n}; of an activation of two halves B has an even number of columns")
        if self.scales == "block" and not self.fp8:
            raise TypeError(f"scales='block': operands are {self.dtype}; they are of {', '.join(FP8)}")
        if self.sources and (self.along == "k" or self.m % self.sources):
            raise ValueError(f"sources={self.sources}: groups by source divide rows, {self.m} in equal places")
        if not 1 <= self.groups <= MOST_GROUPS:
            raise ValueError(
                f"groups={self.groups}; there are 1 to {MOST_GROUPS}: make several calls, of fewer groups each"
            )

    @property
    def arriving(self) -> int:
        """The number of operands that arrive: 1 if B does, or rows by source do, else 0."""
        return int(self.arrives)

    @property
    def operations(self) -> int:
        """See `Problem`. By source of the rows to expect."""
        return 2 * self.likely * self.n * self.k if self.sources else super().operations

    @property
    def divides_k(self) -> bool:
        """See `Problem`."""
        return self.along == "k"

    @property
    def text(self) -> str:
        """The product in words."""
        halves = ", swiglu of two halves" * self.two_halves
        if self.sources:
            rows = f"{self.sources} x {self.m // self.sources}"
            return f"grouped_mm [{rows}, {self.k}] @ [{self.groups}, {self.k}, {self.n}] by source{halves}"
        if self.along == "rows":
            return f"grouped_mm [{self.m}, {self.k}] @ [{self.groups}, {self.k}, {self.n}] by rows{halves}"
        return f"grouped_mm [{self.m}, {self.k}] @ [{self.k}, {self.n}] by K, {self.groups} groups"

    @property
    def promoted(self) -> bool:
        """See `Problem`. Scales of blocks need this too: each applies to a sum over at most 128 of K."""
        return super().promoted or self.scales == "block"

    @property
    def out_columns(self) -> int:
        """See `Problem`."""
        return self.n // 2 if self.two_halves else self.n

    @property
    def out_rows(self) -> int:
        """See `Problem`. By source the rows to expect."""
        return self.likely if self.sources else self.groups * self.m if self.divides_k else self.m

    @property
    def bytes(self) -> int:
        """See `Problem`. Each group is taken to have rows (a part of K)."""
        size, out = ITEMSIZE[self.dtype], ITEMSIZE[self.out_dtype]
        if self.along == "rows":
            rows = self.likely if self.sources else self.m
            used = min(self.groups, rows)
            return size * (rows * self.k + used * self.k * self.n) + out * rows * self.out_columns
        return size * self.k * (self.m + self.n) + out * self.groups * self.m * self.n


def vector_of(itemsize: int, multiples: Callable[[int], bool]) -> int:
    """One of `Problem.vectors`: the widest of `VECTORS` of which ``multiples`` says that strides are; else 1."""
    return next((width for width in VECTORS if itemsize == 2 and multiples(width)), 1)


def gate_of(problem: Problem, tile: tuple[int, int]) -> Gate | None:
    """The chunks that items of ``tile`` rows and columns wait for; None if all operands are complete at launch."""
    rows, columns = (None if operand is None else operand.chunks for operand in (problem.rows, problem.columns))
    return Gate(problem.m, problem.n, *tile, rows, columns, problem.row_of_batch) if problem.arriving else None
