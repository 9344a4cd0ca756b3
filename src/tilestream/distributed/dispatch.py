"""Fused or not, in how many chunks, pushed or pulled: what all ranks of a group must decide alike (invariant 11).

A pure function of what they all know, and of the table that ships with the package: entries that were measured, by
shape class, and rates. Where no entry speaks of a class a model decides, from rates, and says so.

The model: unfused costs transfer + matmul, one after the other; fused the longer of the two, where behind the transfer
there is a tile still to do, and the matmul is a little slower. Each has a latency of its own. Shards that are pushed
come after a shorter one than those that are pulled (no handshake), and disturb the matmul more.
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

from tilestream.distributed.protocol import Way

Op = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
Form = Literal["auto", "fused", "unfused"]
#: What a caller may ask for as ``form=``.
FORMS: tuple[Form, ...] = get_args(Form)
#: How shards travel.
WAYS: tuple[Way, ...] = get_args(Way)
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
    way
        Of a gather on GPUs: how the shards travel.
    library
        Of an all-reduce that is not fused: whether torch's own matmul was measured to be the faster one there.
    """

    fused: bool
    chunks: int
    why: str
    measured: bool = False
    way: Way = "push"
    library: bool = False

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


_trial: tuple[bool, int, Way | None] | None = None


@contextlib.contextmanager
def trial(fused: bool, chunks: int, way: Way | None = None) -> Iterator[None]:
    """Inside, ``form="auto"`` is this, on each rank alike: how a benchmark measures what the table shall say.

    ``way`` None: as it would be otherwise.
    """
    global _trial
    before, _trial = _trial, (fused, chunks, way)
    try:
        yield
    finally:
        _trial = before


def on_trial() -> tuple[bool, int, Way | None] | None:
    """What `trial` says; None outside."""
    return _trial


def decide(case: Case, form: Form = "auto") -> Decision:
    """Fused or not, in how many chunks a shard, pushed or pulled. Depends on its arguments and the table alone."""
    rates = table()["rates"].get(case.device)
    chunks, entry = _chunks(case, rates), next((x for x in table()["entries"] if _speaks_of(x, case)), None)
    # A sum's parts are always pulled.
    ways = WAYS if case.op == "all_gather_matmul" else WAYS[1:]
    costs = {} if rates is None else {way: _seconds(case, rates, way) for way in ways if way in rates["slower"]}
    way = min(costs, key=costs.__getitem__, default=WAYS[0]) if entry is None else entry.get("way", WAYS[1])
    if _trial is not None and form == "auto":
        fused, chunks, tried = _trial
        return Decision(fused, max(1, min(chunks, case.rows)), "on trial, by a benchmark", way=tried or way)
    if form == "fused":
        return Decision(True, chunks, 'the caller asks for form="fused"', way=way)
    if form == "unfused":
        return Decision(False, 1, 'the caller asks for form="unfused"')
    if entry is not None:
        why = f"measured for this shape class: {entry['source']}"
        return Decision(entry["fused"], entry["chunks"], why, True, way, entry.get("library", False))
    if rates is None:
        return Decision(False, 1, f"modelled: no rates of {case.device} are known")
    overlapped, unfused = costs[way], _seconds(case, rates)
    wins = overlapped < unfused
    why = f"modelled: {overlapped * 1e3:.3g} ms fused, {unfused * 1e3:.3g} ms unfused ({rates['source']})"
    return Decision(wins, chunks if wins else 1, why, way=way)


def _speaks_of(entry: dict[str, Any], case: Case) -> bool:
    other = replace(case, **{name: entry[name] for name in ("op", "rows", "n", "k", "world", "dtype", "device")})
    same = (other.op, other.world, other.dtype, other.device) == (case.op, case.world, case.dtype, case.device)
    return same and other.shape_class == case.shape_class


def _chunks(case: Case, rates: dict[str, Any] | None) -> int:
    if rates is None:
        return 1
    return max(1, min(int(rates["most_chunks"]), case.shard_bytes // int(rates["chunk_bytes"]), case.rows))


def _seconds(case: Case, rates: dict[str, Any], way: Way | None = None) -> float:
    """What a call costs by the model: fused, the shards travelling this way; None: unfused."""
    flops: float = rates["flops"] * (2 if case.itemsize == 1 else 1)
    # A gather's matmul has the rows of all ranks, and so has a scatter's, before they are added.
    matmul = 2.0 * case.rows * case.world * case.n * case.k / flops
    name = way or "unfused"
    transfer = (case.world - 1) * case.shard_bytes / _nearest(rates["gather"][name], case.world)
    # Of a sum each part is waited for, told of and pulled, one after the other, but most of that beside the matmul.
    kind = "sum" if way and case.op == "matmul_reduce_scatter" and "sum" in rates["latency"] else name
    latency = _nearest(rates["latency"][kind], case.world)
    if way is None:
        return transfer + matmul + latency
    tile: float = 2.0 * math.prod(rates["tile"]) * case.k * rates["workers"] / flops
    slower: float = rates["slower"][way]
    return max(transfer + min(tile, matmul), matmul * slower) + latency


def _nearest(by_world: dict[str, float], world: int) -> float:
    """Of the number of ranks that is the nearest of those that are known."""
    return by_world[min(by_world, key=lambda known: abs(int(known) - world))]
