"""Random problems: what the board draws, and the classes that it counts them in. No torch, no GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.gemm.shapes import Shape

#: Extents are log-uniform between these.
LEAST, MOST = 16, 16384
#: Of what an extent is a multiple, and how often: half, a quarter, a quarter.
MULTIPLES = (128, 128, 8, 1)
#: Likewise dtypes, and layouts in BLAS's letters: ``"nt"`` is B as a weight ``[N, K]`` of a Linear lies.
DTYPES = ("bfloat16", "bfloat16", "float16", "float8_e4m3fn")
LAYOUTS = ("nn", "nt", "tn", "tt")
#: One problem in so many is a batch; of so many at most; bytes of operands and output, and operations, at most.
ONE_IN, MOST_BATCHES, MOST_BYTES, MOST_OPERATIONS = 10, 64, 4 << 30, 1 << 44
#: `torch._scaled_mm` takes extents of K and N in multiples of this.
FP8_MULTIPLE = 16

#: By the rows of A and B as they lie in memory, the worse of the two: multiples of how many elements these are, and a
#: name. TMA reads rows of 16 bytes and more; those of 128 bytes begin at cache lines.
ROWS = {64: "rows of 64", 8: "rows of 8", 2: "even rows", 1: "odd rows"}
#: The classes that a problem may be counted in, in the order of pages; see `classes`.
CLASSES = {
    "16-bit": "bf16 and fp16, all",
    "big": "M, N >= 1024, rows of A and B multiples of 64 elements",
    "rows of 64": "rows of A and B multiples of 64 elements",
    "rows of 8": "rows of A and B multiples of 8 elements, not both of 64",
    "even rows": "rows of A and B even, not both multiples of 8",
    "odd rows": "a row of A or B odd",
    "middle": "64 < M < 1024",
    "few rows": "M <= 64",
    "batched": "a batch of 2 to 64",
    "fp8": "fp8, one scale a tensor or a row",
}


class Draw(NamedTuple):
    """``[batch, M, K] @ [batch, K, N]``, as it was drawn."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    layout: str = "nt"
    batch: int = 1
    scales: str = "none"

    def __str__(self) -> str:
        parts = [f"{self.batch}x" if self.batch > 1 else "", f"{self.m}x{self.n}x{self.k}"]
        scales = "" if self.scales == "none" else f" {self.scales}"
        return f"{'*'.join(filter(None, parts))} {self.dtype} {self.layout}{scales}".replace("x*", "*")

    @property
    def itemsize(self) -> int:
        """Bytes of an element of A and B; the output's have two."""
        return 1 if self.dtype.startswith("float8") else 2

    @property
    def shape(self) -> Shape:
        """The extents; batches count as rows, so that operations are right."""
        return Shape(self.m * self.batch, self.n, self.k)

    @property
    def bytes(self) -> int:
        """Bytes of A, B and the output."""
        return self.batch * (self.itemsize * self.k * (self.m + self.n) + 2 * self.m * self.n)

    @property
    def pitches(self) -> tuple[int, int]:
        """Elements of a row of A and of B as they lie."""
        return self.k if self.layout[0] == "n" else self.m, self.n if self.layout[1] == "n" else self.k

    @property
    def rows(self) -> str:
        """Its name in `ROWS`."""
        return next(name for multiple, name in ROWS.items() if not any(pitch % multiple for pitch in self.pitches))

    @property
    def kind(self) -> str:
        """The one class that a picture shows it in: ``"fp8"``, or the name of its rows."""
        return "fp8" if self.itemsize == 1 else self.rows

    @property
    def classes(self) -> tuple[str, ...]:
        """All classes that it is counted in."""
        if self.itemsize == 1:
            return ("fp8",)
        big = min(self.m, self.n) >= 1024 and self.rows == "rows of 64"
        few = "few rows" if self.m <= 64 else "middle" if self.m < 1024 else ""
        found = ["16-bit", "big" if big else "", self.rows, few, "batched" if self.batch > 1 else ""]
        return tuple(filter(None, found))


def draws(seed: int, count: int) -> list[Draw]:
    """The first ``count`` problems of a seed; the first of more are the same."""
    endless = _endless(random.Random(seed))
    return [next(endless) for _ in range(count)]


def _endless(chance: random.Random) -> Iterator[Draw]:
    while True:
        # Drawn in one order whatever is used of it, so that a rule that changes one problem leaves the others.
        m, n, k = (_extent(chance) for _ in range(3))
        dtype, layout, scales = chance.choice(DTYPES), chance.choice(LAYOUTS), chance.choice(("tensor", "row"))
        batched, batch = chance.randrange(ONE_IN) == 0, round(_log_uniform(chance, 2, MOST_BATCHES))
        found = Draw(m, n, k, dtype, layout)
        if found.itemsize == 1:  # what torch._scaled_mm takes: no batch, both along K
            n, k = (-(-extent // FP8_MULTIPLE) * FP8_MULTIPLE for extent in (n, k))
            found = Draw(m, n, k, dtype, "nt", scales=scales)
        elif batched:
            found = found._replace(batch=batch)
        if found.bytes <= MOST_BYTES and found.shape.operations <= MOST_OPERATIONS:
            yield found


def _extent(chance: random.Random) -> int:
    value, multiple = _log_uniform(chance, LEAST, MOST), chance.choice(MULTIPLES)
    return max(multiple, round(value / multiple) * multiple)


def _log_uniform(chance: random.Random, least: float, most: float) -> float:
    return math.exp(chance.uniform(math.log(least), math.log(most)))
