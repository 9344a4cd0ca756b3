"""Fused or not, the number of chunks, pushed or pulled: all ranks of a group must decide alike (invariant 11).

The decision is a pure function of values that all ranks know, and of the package's table. The table has measured
entries by shape class, and rates. If no entry matches, a model decides from the rates, and the reason says so.

The model: an unfused call costs transfer + matmul. A fused call costs the longer of the transfer with one tile after
it, and the matmul, which is a little slower. Each form has its own latency. A push has a lower latency than a pull,
since it needs no handshake, and slows the matmul more.
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

from tilestream.core.protocols.gather import Way
from tilestream.plan.explain import number

Op = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
Form = Literal["auto", "fused", "unfused"]
#: The values of ``form=``.
FORMS: tuple[Form, ...] = get_args(Form)
#: The directions in which shards travel.
WAYS: tuple[Way, ...] = get_args(Way)
_FILE = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class Case:
    """The values that all ranks of a call know."""

    op: Op
    #: rows, n, k: rows of one rank's shard (for a scatter: of the output's shard; for an all-reduce: all rows),
    #: including leading dimensions; columns of all B together; the length of the sums that one rank computes.
    rows: int
    n: int
    k: int
    width: int  # elements of a row that travels: K for a gather, N for a scatter
    world: int  # ranks
    #: dtype, itemsize: the dtype and the bytes of the elements that travel.
    dtype: str
    itemsize: int
    device: str  # ``"cpu"``, or a GPU's architecture: ``"sm_90"``

    @property
    def all_rows(self) -> int:
        """Rows of the matmul of each rank, after a gather or before its sum travels."""
        return self.rows if self.op == "matmul_all_reduce" else self.rows * self.world

    @property
    def shard_bytes(self) -> int:
        """Bytes that one rank sends to each peer in a fused call."""
        return self.rows * self.width * self.itemsize

    @property
    def unfused_bytes(self) -> float:
        """Bytes that one rank sends to each peer in an unfused call.

        An unfused all-reduce scatters sums, and gathers them: a share of the rows travels twice.
        """
        return self.shard_bytes * 2 / self.world if self.op == "matmul_all_reduce" else self.shard_bytes

    @property
    def shape_class(self) -> tuple[int, int, int]:
        """Rows, N and K: the exponents of the nearest powers of two."""
        rows, n, k = (round(math.log2(max(x, 1))) for x in (self.all_rows, self.n, self.k))
        return rows, n, k


@dataclass(frozen=True)
class Decision:
    """The result of `decide`."""

    fused: bool  # whether the transfer and the matmul overlap
    chunks: int  # chunks of a shard; at least 1
    why: str  # the reason, in words
    measured: bool = False  # whether an entry of the table decides, not the model or the caller
    way: Way = "push"  # the direction of a GPU gather's shards
    library: bool = False  # whether torch's matmul was measured to be faster for an unfused all-reduce

    def with_equal_chunks(self, rows: int) -> Decision:
        """The same decision with equal chunks: at most as many as before, in a number that divides ``rows``."""
        return replace(self, chunks=next(x for x in range(self.chunks, 0, -1) if rows % x == 0))


@functools.cache
def table() -> dict[str, Any]:
    """The table that ships with the package."""
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


@functools.cache
def table_hash() -> str:
    """The hash of the table, which the ranks compare."""
    return hashlib.sha256(json.dumps(table(), sort_keys=True).encode()).hexdigest()[:16]


_trial: tuple[bool, int, Way | None] | None = None


@contextlib.contextmanager
def trial(fused: bool, chunks: int, way: Way | None = None) -> Iterator[None]:
    """Override ``form="auto"`` inside the block, the same on each rank. Benchmarks measure the table's entries with it.

    ``way``: None keeps the decision's own.
    """
    global _trial
    before, _trial = _trial, (fused, chunks, way)
    try:
        yield
    finally:
        _trial = before


def on_trial() -> tuple[bool, int, Way | None] | None:
    """The override of `trial`; None outside."""
    return _trial


def decide(case: Case, form: Form = "auto") -> Decision:
    """The decision of a call: a function of the arguments, the table and `trial` alone."""
    rates = table()["rates"].get(case.device)
    chunks, entry = _chunks(case, rates), next((x for x in table()["entries"] if _matches(x, case)), None)
    # The parts of a reduce-scatter are always pulled.
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
    why = f"modelled: {number(overlapped * 1e3)} ms fused, {number(unfused * 1e3)} ms unfused ({rates['source']})"
    return Decision(wins, chunks if wins else 1, why, way=way)


def as_called(case: Case, decision: Decision) -> Decision:
    """``decision``, or the other form where calls one after another take less time in it.

    Called back to back, a call takes the longer of the host's part and the GPU's. Other numbers of ranks than the
    host's part was measured for keep ``decision``.
    """
    rates = table()["rates"].get(case.device, {})
    host = rates.get("host", {}).get(str(case.world))
    if host is None:
        return decision
    gpu = {"fused": _seconds(case, rates, decision.way), "unfused": _seconds(case, rates)}
    ours, other = ("fused", "unfused") if decision.fused else ("unfused", "fused")
    if decision.measured:  # that says more of the GPU's part than the model
        gpu[other] = max(gpu[other], gpu[ours])
    hosts = {form: host[form][case.op] for form in gpu}
    seconds = {form: max(gpu[form], hosts[form]) for form in gpu}
    if seconds[ours] <= seconds[other]:
        return decision
    ms, of_host = ({form: number(x[form] * 1e3) for form in gpu} for x in (seconds, hosts))
    why = (
        f"called back to back: {ms['fused']} ms fused, {ms['unfused']} ms unfused; the host takes {of_host['fused']} "
        f"and {of_host['unfused']} ms ({host['source']})"
    )
    return replace(decision, fused=not decision.fused, chunks=1, why=why)


def _matches(entry: dict[str, Any], case: Case) -> bool:
    other = replace(case, **{name: entry[name] for name in ("op", "rows", "n", "k", "world", "dtype", "device")})
    same = (other.op, other.world, other.dtype, other.device) == (case.op, case.world, case.dtype, case.device)
    return same and other.shape_class == case.shape_class


def _chunks(case: Case, rates: dict[str, Any] | None) -> int:
    if rates is None:
        return 1
    return max(1, min(int(rates["most_chunks"]), case.shard_bytes // int(rates["chunk_bytes"]), case.rows))


def _seconds(case: Case, rates: dict[str, Any], way: Way | None = None) -> float:
    """Modelled seconds of a call: fused with this ``way``; None: unfused."""
    flops: float = rates["flops"] * (2 if case.itemsize == 1 else 1)
    matmul = 2.0 * case.all_rows * case.n * case.k / flops
    name, sent = way or "unfused", case.shard_bytes if way else case.unfused_bytes
    transfer = (case.world - 1) * sent / _nearest(rates["gather"][name], case.world)
    # The parts of a sum are awaited, flagged and pulled in sequence; most of this overlaps with the matmul.
    kind = "sum" if way and case.op == "matmul_reduce_scatter" and "sum" in rates["latency"] else name
    latency = _nearest(rates["latency"][kind], case.world)
    if way is None:
        return transfer + matmul + latency
    tile: float = 2.0 * math.prod(rates["tile"]) * case.k * rates["workers"] / flops
    slower: float = rates["slower"][way]
    return max(transfer + min(tile, matmul), matmul * slower) + latency


def _nearest(by_world: dict[str, float], world: int) -> float:
    """The rate of the nearest known number of ranks."""
    return by_world[min(by_world, key=lambda known: abs(int(known) - world))]
