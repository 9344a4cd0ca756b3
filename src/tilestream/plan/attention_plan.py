"""`AttentionPlan`: an immutable choice of kernel, tile and schedule for attention on a device, and its explanation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tilestream.core.device import DeviceProperties
from tilestream.core.grid import Grid
from tilestream.core.integers import cdiv
from tilestream.core.order import Raster
from tilestream.core.schedule import Kind, Schedule
from tilestream.plan.additions import KeyOrder, key_order
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.candidate import Refusal
from tilestream.plan.explain import number, promise_lines, table
from tilestream.plan.roofline import Floor


@dataclass(frozen=True)
class AttentionCandidate:
    """A way to run a problem, and its predicted time."""

    #: ``workers``, ``inline`` and ``persistent``: see `tilestream.plan.candidate.Candidate`. ``torch``: one call of
    #: torch's kernel in the calling thread, see `tilestream.plan.policy.cpu_attention`. Hopper: ``ordered`` if a
    #: worker's consumers take turns at starting their multiplications, else ``unordered``; ``strips``: see ``strips``.
    #: CDNA: ``direct`` if copies bypass the registers, else ``staged``.
    variant: str
    block: tuple[int, int]  # ``(block_m, block_n)``: rows of a tile, and keys of a block
    #: Dense: row tiles are query blocks, and column tiles the packs of heads of all sequences. Packed sequences: row
    #: tiles are positions in the call's list of tiles, longest first. Some positions are void.
    schedule: Schedule
    predicted: float  # seconds that the cost model expects, with everything arrived
    pack: int = 1  # query heads, of one head of keys, that share a tile's rows
    #: warps, stages: the warps of a worker, and the stages of its ring; 0 if the backend has none.
    warps: int = 0
    stages: int = 0
    shares: int = 1  # shares of a tile's keys; a second launch joins their outputs
    #: Of shares of keys that arrive: ``now`` and ``step`` of `tilestream.core.attention.late_bound` for the begin of
    #: each share and the end of the last, one pair behind the other. Empty: the shares are equal.
    late: tuple[int, ...] = ()
    downwards: bool = False  # whether the last block of keys is taken first
    #: strips: strips of the columns of V, each with a program of its own, after a launch for the scores of all keys and
    #: one for their weights; 0: values are taken with the keys.
    strips: int = 0


@dataclass(frozen=True, kw_only=True)
class AttentionPlan(AttentionCandidate):
    """All choices for running a problem. Those for the kernel are fields of `AttentionCandidate`.

    Attributes
    ----------
    backend
        The package of `tilestream.kernels` that runs it.
    why, refused
        The reason for this plan, and the alternatives that were refused.
    promise
        The cost of `tilestream.invariant` in words; empty without it.
    """

    problem: AttentionProblem
    device: DeviceProperties
    backend: str
    why: str
    refused: tuple[Refusal, ...] = ()
    promise: str = ""

    @property
    def key_order(self) -> KeyOrder:
        """The order in which a query's keys are taken."""
        return key_order(self.device, self.backend, self.problem, self)

    @property
    def positions(self) -> int:
        """Query positions of a tile."""
        return self.block[0] // self.pack

    @property
    def group(self) -> int:
        """Packs of heads whose K and V stay in L2 together."""
        return self.schedule.raster.group

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.schedule.workers

    @property
    def floor(self) -> Floor:
        """The lower bound of the time on this device."""
        return Floor.of(self.problem, self.device, self.workers)

    @property
    def label(self) -> str:
        """The plan in a line."""
        if self.variant in ("inline", "torch"):
            return f"{self.backend} inline" + ", by torch's kernel" * (self.variant == "torch")
        packed = f" of {self.pack} heads" if self.pack > 1 else ""
        if self.strips:
            return (
                f"{self.backend} strips, {self.block[0]} query rows{packed} x {self.block[1]} keys, values in "
                f"{self.strips} strips of {self.problem.head_dim_v // self.strips} columns"
            )
        return (
            f"{self.backend} {self.schedule.kind}, {self.workers} workers, {self.block[0]} query rows{packed} x "
            f"{self.block[1]} keys"
        )

    def explain(self) -> str:
        """The choices, the refused alternatives with their reasons, and the floor, as text."""
        return explain(self)


def of_candidate(
    problem: AttentionProblem, device: DeviceProperties, backend: str, found: AttentionCandidate, why: str,
    refused: tuple[Refusal, ...],
) -> AttentionPlan:  # fmt: skip
    """Make a plan of a candidate."""
    return AttentionPlan(**vars(found), problem=problem, device=device, backend=backend, why=why, refused=refused)


def packed_heads(problem: AttentionProblem, rows: int, most: int = sys.maxsize) -> int:
    """The number of query heads of one K/V head in a tile of ``rows``: the largest power of two that fits.

    It is at most ``most``, and ``rows``, for queries without rows too: a tile has a position. It is 1 if heads have
    scales, so that a tile has one scale.
    """
    pack, positions = 1, max(1, problem.seqlen_q)
    while problem.ratio % (2 * pack) == 0 and 2 * pack * positions <= rows and 2 * pack <= most:
        pack *= 2
    return 1 if problem.scaled else pack


def schedule_of(
    problem: AttentionProblem, positions: int, pack: int, group: int, kind: Kind, workers: int, queues: int = 1,
    shares: int = 1,
) -> Schedule:  # fmt: skip
    """The schedule of tiles of ``positions`` query positions and ``pack`` heads: see `AttentionPlan`.

    Several queues split the heads, so that tiles with the same K and V share a queue. Each share of a sequence's keys
    has its own columns. The columns of the first share, for all heads, precede those of the next.
    """
    heads = problem.heads_q // pack
    if shares > 1:
        group = min(group, heads)
    heads *= shares
    if problem.varlen:
        # Each sequence has at most one partial tile. So have the rows that belong to no sequence.
        bound = (problem.tokens_q + (problem.batch + 1) * (positions - 1)) // positions
        return Schedule(kind, Grid(1, bound * heads, 1), Raster(group=max(1, min(group, heads))), workers)
    grid = Grid(1, cdiv(problem.seqlen_q, positions), problem.batch * heads)
    raster = Raster("longest_first", group=max(1, min(group, grid.num_n)))
    if kind == "dynamic" and 1 < queues <= grid.num_n:
        return Schedule(kind, grid, raster, workers, queues, "columns")
    return Schedule(kind, grid, raster, workers)


def explain(plan: AttentionPlan) -> str:
    """The choices, the refused alternatives with their reasons, and the floor, as text."""
    p, floor = plan.problem, plan.floor
    longest = " at most" if p.varlen or p.lengths else ""
    shape = f"{p.batch} x {p.heads_q} heads ({p.heads_kv} of keys), {p.seqlen_q} x {p.seqlen_k}{longest}"
    columns = f"{p.head_dim}" if p.head_dim == p.head_dim_v else f"({p.head_dim}, {p.head_dim_v})"
    chosen = [
        ("keys", _keys(p)), ("mask", _mask(p)), *_schedule(plan), ("arrival", _arrival(p)),
        *promise_lines(plan.promise, plan.key_order),
    ]  # fmt: skip
    work = f"{number(floor.operations / 1e9)} GFLOP, {number(floor.bytes / 1e6)} MB"
    return table(f"attention {shape}, head {columns}, {p.dtype} -> {p.out_dtype}", plan, chosen, work)


def _keys(p: AttentionProblem) -> str:
    if p.page_size:
        return f"in {p.pages} pages of {p.page_size}"
    if p.tokens_k:
        return f"packed, {p.tokens_k} rows"
    return "dense, with a length each" if p.lengths else "dense"


def _mask(p: AttentionProblem) -> str:
    left, right = ("all" if side is None else side for side in p.window)
    parts = {
        "causal": p.causal, f"window ({left}, {right})": p.window != (None, None),
        p.alignment.replace("_", " "): p.masked, f"soft cap {p.softcap:g}": p.softcap, "sinks": p.sinks,
    }  # fmt: skip
    return ", ".join(part for part, there in parts.items() if there) or "none"


def _schedule(plan: AttentionPlan) -> Iterator[tuple[str, str]]:
    schedule, grid = plan.schedule, plan.schedule.grid
    if plan.variant == "torch":
        yield "kernel", "torch's flash attention for CPUs, one call for all heads"
    if plan.variant in ("inline", "torch"):
        return
    heads, each = "heads", ""
    if plan.pack > 1:
        heads, each = "packs", f"{plan.positions} positions x {plan.pack} heads, "
    tiles = f"{grid.num_m} query blocks x {grid.num_n // plan.shares} {heads}"
    if plan.problem.varlen:
        tiles = f"at most {grid.num_m}, from a list made of the lengths by the call"
    if plan.strips:
        blocks = -(-plan.problem.seqlen_k // plan.block[1])
        yield "scores", f"of {blocks} key blocks, each a program; so are their weights, in a second launch"
        width = plan.problem.head_dim_v // plan.strips
        yield "values", f"in {plan.strips} strips of {width} columns, each a program, in a third launch"
        return
    queues = f", {schedule.queues} queue{'s' if schedule.queues > 1 else ''}" if schedule.kind == "dynamic" else ""
    yield "tiles", f"{tiles}, each of {each}{plan.block[0]} rows; {plan.block[1]} keys a block"
    if plan.shares > 1:
        uneven = ""
        if plan.late:
            ends = (f"{at / 256:.2f}" for at in plan.late[2::2])
            uneven = f" that end at {', '.join(ends)} of its keys, later ones of later tiles"
        yield "split", f"keys of a tile in {plan.shares} shares{uneven}, whose outputs a second launch joins"
    yield "schedule", f"{schedule.kind}, {schedule.workers} workers{queues}"
    yield "raster", f"longest first, {plan.group} {heads} at a time"


def _arrival(p: AttentionProblem) -> str:
    if p.keys is None:
        return "none: no gate code runs"
    chunks = p.keys.chunks
    size = f"of {chunks.rows_per_chunk} rows" if chunks.rows_per_chunk else "of uneven rows"
    engine = "; copy engines copy them: attention takes no copy items" if p.keys.copied else ""
    return f"keys and values in {chunks.count} chunks {size}; a tile waits for the chunks it reads{engine}"
