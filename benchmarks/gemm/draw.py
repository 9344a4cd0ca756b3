"""Random problems: what the board draws, and the classes that it counts them in. No torch, no GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

#: Extents are log-uniform between these.
LEAST, MOST = 16, 16384
#: Of what an extent is a multiple, and how often: half, a quarter, a quarter.
MULTIPLES = (128, 128, 8, 1)
#: Likewise dtypes, and layouts in BLAS's letters: ``"nt"`` is B as a weight ``[N, K]`` of a Linear lies.
DTYPES = ("bfloat16", "bfloat16", "float16", "float8_e4m3fn")
LAYOUTS = ("nn", "nt", "tn", "tt")
#: How the products of fp8 are scaled.
SCALES = ("tensor", "row")
#: One problem in so many is a batch; of so many at most; and the bytes of operands and output that a problem may have.
ONE_IN, MOST_BATCHES, MOST_BYTES = 10, 64, 4 << 30
#: `torch._scaled_mm` takes extents of K and N in multiples of this.
FP8_MULTIPLE = 16

#: How rows of A and B lie in memory: of how many elements both are multiples, and the name of that. Of 16 bits, rows of
#: 64 begin at cache lines of 128 bytes, and TMA reads rows of 8.
ROWS = {64: "rows of 64", 8: "rows of 8", 2: "even rows", 1: "odd rows"}
#: The classes that a problem may be counted in, in the order of pages; see `classes`.
CLASSES = {
    "16-bit": "bfloat16 and float16",
    "big": "M, N of 1024 and more, rows of 64",
    "rows of 64": "rows of A and B in memory are multiples of 64 elements",
    "rows of 8": "of 8, not both of 64",
    "even rows": "of 2, not both of 8",
    "odd rows": "one of them is odd",
    "middle": "M of 65 to 1023",
    "few rows": "M of 1 to 64",
    "batched": "a batch of 2 to 64",
    "fp8": "one scale a tensor, or a row",
}


class Draw(NamedTuple):
    """``[batch, M, K] @ [batch, K, N]``, as it was drawn. What `Shape` says of itself it says, too."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    layout: str = "nt"
    batch: int = 1
    scales: str = "none"

    def __str__(self) -> str:
        batch = f"{self.batch}*" if self.batch > 1 else ""
        scales = f" {self.scales}" if self.scales != "none" else ""
        return f"{batch}{self.m}x{self.n}x{self.k} {self.dtype} {self.layout}{scales}"

    @property
    def itemsize(self) -> int:
        """Bytes of an element of A and B; the output's have two."""
        return 1 if self.dtype.startswith("float8") else 2

    @property
    def outputs(self) -> int:
        """Rows of the output, of all batches."""
        return self.batch * self.m

    @property
    def operations(self) -> int:
        """Multiply-adds, counted two each."""
        return 2 * self.outputs * self.n * self.k

    def read(self, itemsize: int = 2) -> int:
        """Bytes of A and B, each read once."""
        return self.batch * itemsize * self.k * (self.m + self.n)

    def bytes(self, itemsize: int = 2, out: int = 2) -> int:
        """Bytes that must move at least."""
        return self.read(itemsize) + out * self.outputs * self.n

    @property
    def lies(self) -> str:
        """How the rows of A and B lie: a name of `ROWS`."""
        a, b = self.k if self.layout[0] == "n" else self.m, self.n if self.layout[1] == "n" else self.k
        return next(name for multiple, name in ROWS.items() if not (a % multiple or b % multiple))

    @property
    def kind(self) -> str:
        """The one class that a picture shows it in: ``"fp8"``, or how its rows lie."""
        return "fp8" if self.itemsize == 1 else self.lies

    @property
    def classes(self) -> list[str]:
        """All classes that it is counted in: names of `CLASSES`."""
        if self.itemsize == 1:
            return ["fp8"]
        found = {
            "16-bit": True,
            "big": min(self.m, self.n) >= 1024 and self.lies == "rows of 64",
            self.lies: True,
            "middle": 64 < self.m < 1024,
            "few rows": self.m <= 64,
            "batched": self.batch > 1,
        }
        return [name for name, there in found.items() if there]

    def small(self) -> Draw:
        """A small one of its kind, for a dry run."""
        m, n, k = (max(1, extent // 64) for extent in self[:3])
        return self._replace(m=m, n=n, k=k).as_taken()

    def as_taken(self) -> Draw:
        """With extents that torch's call takes: `torch._scaled_mm` wants multiples, along K, and no batch."""
        if self.itemsize > 1:
            return self
        n, k = (-(-extent // FP8_MULTIPLE) * FP8_MULTIPLE for extent in (self.n, self.k))
        return self._replace(n=n, k=k, layout="nt", batch=1)


#: The seeds of the published boards. The cost model is fitted to seeds from `FITTED_FROM` on, never to these.
PUBLISHED, FITTED_FROM = (1, 2), 1000
#: What the cost model is fitted to: problems of so many operations at least, since of smaller ones the launch is most;
#: of so many bytes at most; and the share of each kind.
LEAST_OPERATIONS, FITTED_BYTES = 4 * 10**9, 1 << 30
SHARES = {"rows of 64": 0.4, "rows of 8": 0.3, "few rows": 0.15, "fp8": 0.15}
#: What the portable kernels' models are fitted to: problems of so many operations and bytes at most, and of each kind
#: so many. Rows that TMA does not address are theirs wherever a copy costs too much.
SMALL_OPERATIONS, SMALL_BYTES = 8 * 10**9, 1 << 28
SMALL_SHARES = {"rows of 64": 0.25, "rows of 8": 0.2, "even rows": 0.15, "odd rows": 0.25, "fp8": 0.15}


def fit_draws(seed: int, count: int) -> list[Draw]:
    """Problems that the cost model may be fitted to, of each kind of `SHARES` its share, in random order.

    They are bfloat16 or fp8 with a scale a tensor, and lie as a Linear's operands do: the model knows neither layouts,
    nor scales, nor which 16 bits, and each has kernels of its own, which take longer to compile than to measure.

    Parameters
    ----------
    seed
        Counted from `FITTED_FROM`.
    """

    def kind_of(problem: Draw) -> str:
        few = problem.itemsize == 2 and problem.m <= 64
        fits = problem.operations >= LEAST_OPERATIONS and problem.bytes(problem.itemsize) <= FITTED_BYTES
        # Few rows that TMA does not address are the portable kernels': see `small_draws`.
        if not fits or problem.batch > 1 or (few and problem.lies not in SHARES):
            return ""
        return "few rows" if few else problem.kind

    return _shared_out(random.Random(FITTED_FROM + seed), count, SHARES, kind_of, "nt")


def small_draws(seed: int, count: int) -> list[Draw]:
    """Problems that the portable kernels' models may be fitted to: `fit_draws` of few operations, in all layouts.

    Parameters
    ----------
    seed
        Counted from `FITTED_FROM`.
    """

    def kind_of(problem: Draw) -> str:
        fits = problem.operations <= SMALL_OPERATIONS and problem.bytes(problem.itemsize) <= SMALL_BYTES
        return problem.kind if fits else ""

    return _shared_out(random.Random(f"small {FITTED_FROM + seed}"), count, SMALL_SHARES, kind_of)


def _shared_out(
    chance: random.Random, count: int, shares: dict[str, float], kind_of: Callable[[Draw], str], layout: str = ""
) -> list[Draw]:
    """Different problems in random order, of each kind its share; of those without a kind none."""
    places = {kind: round(share * count) for kind, share in shares.items()}
    places["rows of 64"] += count - sum(places.values())
    found: dict[Draw, None] = {}
    for drawn in _endless(chance):
        dtype, scales = ("bfloat16", "none") if drawn.itemsize == 2 else (drawn.dtype, "tensor")
        problem = drawn._replace(dtype=dtype, scales=scales, layout=layout or drawn.layout)
        kind = kind_of(problem)
        if places.get(kind) and problem not in found:
            places[kind] -= 1
            found[problem] = None
        if not any(places.values()):
            break
    order = list(found)
    chance.shuffle(order)
    return order


def draws(seed: int, count: int) -> list[Draw]:
    """The first ``count`` problems of a seed, none of them twice; the first of more are the same."""
    found: dict[Draw, None] = {}
    for problem in _endless(random.Random(seed)):
        found.setdefault(problem)
        if len(found) >= count:
            break
    return list(found)


def one_named(name: str, drawn: Callable[[int, int], list[Draw]]) -> Draw:
    """A problem by name: ``"MxNxK"``, a Linear's in bfloat16; or of ``drawn``: seed, count, number: ``"1:200:17"``."""
    if "x" in name:
        return Draw(*map(int, name.split("x")))
    seed, count, number = map(int, name.split(":"))
    return drawn(seed, count)[number]


def _endless(chance: random.Random) -> Iterator[Draw]:
    while True:
        # Drawn in one order whatever is used of it, so that a rule that changes one problem leaves the others.
        extents = [_extent(chance) for _ in range(3)]
        dtype, layout, scales = chance.choice(DTYPES), chance.choice(LAYOUTS), chance.choice(SCALES)
        batched, batch = chance.randrange(ONE_IN) == 0, round(_log_uniform(chance, 2, MOST_BATCHES))
        found = Draw(*extents, dtype, layout, batch if batched else 1).as_taken()
        if found.itemsize == 1:
            found = found._replace(scales=scales)
        if found.bytes(found.itemsize) <= MOST_BYTES:
            yield found


def _extent(chance: random.Random) -> int:
    value, multiple = _log_uniform(chance, LEAST, MOST), chance.choice(MULTIPLES)
    return max(multiple, round(value / multiple) * multiple)


def _log_uniform(chance: random.Random, least: float, most: float) -> float:
    return math.exp(chance.uniform(math.log(least), math.log(most)))
