"""Fused or not, and in how many chunks: what all ranks of a group must decide alike (invariant 11).

A pure function of what they all know, and of the table that ships with the package: entries that were measured, by
shape class, and rates. Where no entry speaks of a class a model decides, from rates, and says so.

The model: unfused costs transfer + matmul, one after the other; fused the longer of the two, where behind the transfer
there is a tile still to do, and the matmul is a little slower. Either has a latency of its own: the handshake.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

Op = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
Form = Literal["auto", "fused", "unfused"]
#: What a caller may ask for as ``form=``.
FORMS: tuple[Form, ...] = get_args(Form)
_FILE = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class Case:
    """What the ranks of a call know alike.

    Attributes
    ----------
    rows, n, k
        Rows of one rank's shard (of the output's, for a scatter), leading dimensions counted; columns of all B
        together; the length of the sums that one rank computes.
    width
        Elements of a row that travels: K of a gather, N of a scatter.
    world
        Ranks.
    dtype, itemsize
        Of what travels.
    device
        ``"cpu"``, or what a GPU's code is compiled for: ``"sm_90"``.
    """

    op: Op
    rows: int
    n: int
    k: int
    width: int
    world: int
    dtype: str
    itemsize: int
    device: str

    @property
    def shard_bytes(self) -> int:
        """Bytes that one rank has for each other."""
        return self.rows * self.width * self.itemsize

    @property
    def shape_class(self) -> tuple[int, int, int]:
        """Rows, N and K, each to the nearest power of two, as its exponent."""
        rows, n, k = (round(math.log2(max(x, 1))) for x in (self.rows * self.world, self.n, self.k))
        return rows, n, k


@dataclass(frozen=True)
class Decision:
    """What `decide` says.

    Attributes
    ----------
    fused
        Whether the transfer and the matmul overlap.
    chunks
        Chunks of a shard, at least 1.
    why
        For people.
    measured
        Whether an entry of the table says so; else the model, or the caller.
    """

    fused: bool
    chunks: int
    why: str
    measured: bool = False

    def alike(self, rows: int) -> Decision:
        """The same, in as many chunks at most, all with as many of ``rows``."""
        return replace(self, chunks=next(x for x in range(self.chunks, 0, -1) if rows % x == 0))


@functools.cache
def table() -> dict[str, Any]:
    """The table that ships with the package."""
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


@functools.cache
def table_hash() -> str:
    """What two ranks with the same table have alike."""
    return hashlib.sha256(json.dumps(table(), sort_keys=True).encode()).hexdigest()[:16]


_trial: Decision | None = None


@contextlib.contextmanager
def trial(fused: bool, chunks: int) -> Iterator[None]:
    """Inside, ``form="auto"`` is this, on each rank alike: how a benchmark measures what the table shall say."""
    global _trial
    before, _trial = _trial, Decision(fused, chunks, "on trial, by a benchmark")
    try:
        yield
    finally:
        _trial = before


def on_trial() -> Decision | None:
    """What `trial` says; None outside."""
    return _trial


def decide(case: Case, form: Form = "auto") -> Decision:
    """Fused or not, and in how many chunks a shard. Depends on nothing but its arguments and the table."""
    if _trial is not None and form == "auto":
        return replace(_trial, chunks=max(1, min(_trial.chunks, case.rows)))
    rates = table()["rates"].get(case.device)
    chunks = _chunks(case, rates)
    if form == "fused":
        return Decision(True, chunks, 'the caller asks for form="fused"')
    if form == "unfused":
        return Decision(False, 1, 'the caller asks for form="unfused"')
    for entry in table()["entries"]:
        if _speaks_of(entry, case):
            why = f"measured for this shape class: {entry['source']}"
            return Decision(entry["fused"], entry["chunks"], why, measured=True)
    if rates is None:
        return Decision(False, 1, f"modelled: no rates of {case.device} are known")
    fused, unfused = _seconds(case, rates, fused=True), _seconds(case, rates, fused=False)
    wins = fused < unfused
    why = f"modelled: {fused * 1e3:.3g} ms fused, {unfused * 1e3:.3g} ms unfused ({rates['source']})"
    return Decision(wins, chunks if wins else 1, why)


def _speaks_of(entry: dict[str, Any], case: Case) -> bool:
    other = replace(case, **{name: entry[name] for name in ("op", "rows", "n", "k", "world", "dtype", "device")})
    same = (other.op, other.world, other.dtype, other.device) == (case.op, case.world, case.dtype, case.device)
    return same and other.shape_class == case.shape_class


def _chunks(case: Case, rates: dict[str, Any] | None) -> int:
    if rates is None:
        return 1
    return max(1, min(int(rates["most_chunks"]), case.shard_bytes // int(rates["chunk_bytes"]), case.rows))


def _seconds(case: Case, rates: dict[str, Any], *, fused: bool) -> float:
    """What a call costs by the model."""
    flops: float = rates["flops"] * (2 if case.itemsize == 1 else 1)
    # A gather's matmul has the rows of all ranks, and so has a scatter's, before they are added.
    matmul = 2.0 * case.rows * case.world * case.n * case.k / flops
    form = "fused" if fused else "unfused"
    link = rates.get("gather" if case.op == "all_gather_matmul" else "scatter", rates["gather"])[form]
    nearest = min(link, key=lambda world: abs(int(world) - case.world))
    transfer: float = (case.world - 1) * case.shard_bytes / link[nearest]
    latency: float = rates["latency"][form]
    if not fused:
        return transfer + matmul + latency
    tile: float = 2.0 * math.prod(rates["tile"]) * case.k * rates["workers"] / flops
    slower: float = rates["slower"]
    last = min(tile, matmul)
    return max(transfer + last, matmul * slower) + latency
