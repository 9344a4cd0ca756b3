"""`Plan`: an immutable choice of kernel, tile and schedule for a problem on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from tilestream.core.chunks import Arriving, Chunks
from tilestream.core.device import DeviceProperties
from tilestream.core.exchange import cluster_of
from tilestream.core.gate import Gate
from tilestream.plan.additions import Additions, additions
from tilestream.plan.candidate import ONE_TILE, Candidate, Refusal
from tilestream.plan.explain import number, promise_lines, table
from tilestream.plan.hooks import hooks
from tilestream.plan.policy.portable import sums_lose_bits
from tilestream.plan.problem import GroupedProblem, Problem, gate_of
from tilestream.plan.realign import realigned_text
from tilestream.plan.roofline import Floor

if TYPE_CHECKING:
    import torch

#: The operand that a kernel copies itself.
Copies = Literal["none", "rows", "columns"]
#: Workers that copy until no piece is left. From pinned memory one reaches 8 GB/s (32 KiB in flight, 4 us latency),
#: four reach 33, and 8, 16 or 32 reach 44, the most that workers get from an H200's link. Its copy engine reaches 49
#: (`benchmarks/results/h200/stream_copies.json`).
COPIERS = 8


def copied_operand(problem: Problem, backend: str) -> tuple[Copies, str]:
    """The operand that the kernel copies, and why an operand that a stream offers is left to a copy engine."""
    rows, columns = (incoming is not None and incoming.copied > 0 for incoming in (problem.rows, problem.columns))
    if not rows and not columns:
        return "none", ""
    if backend not in ("portable", "hopper"):
        return "none", f"the {backend} kernel takes no copy items: copy engines copy what arrives"
    if rows and columns:
        return "rows", "a kernel copies one operand: a copy engine copies the columns"
    return ("rows" if rows else "columns"), ""


@dataclass(frozen=True, kw_only=True)
class Plan(Candidate):
    """All choices for running a problem. Those for the kernel are fields of `Candidate`.

    Attributes
    ----------
    device
        The device that the plan is for.
    backend
        The package of `tilestream.kernels` that runs it.
    why, refused
        The reason for this plan, and the alternatives that were refused.
    copiers
        Workers that copy the operand in `copies`, until no piece is left.
    promise
        The cost of `tilestream.invariant` in words; empty without it.
    """

    problem: Problem
    device: DeviceProperties
    backend: str
    why: str
    refused: tuple[Refusal, ...] = ()
    copiers: int = 0
    promise: str = ""

    @property
    def floor(self) -> Floor:
        """The lower bound of the time on this device."""
        every = self.variant in ("inline", ONE_TILE)  # whether no SM, or core, is left out
        workers = self.device.workers if every else self.workers * self.ctas
        return Floor.of(self.problem, self.device, workers)

    @property
    def gate(self) -> Gate | None:
        """The chunks that items wait for; None, without gate code, if all operands are complete at launch."""
        return gate_of(self.problem, self.tile)

    @property
    def additions(self) -> Additions:
        """The order in which the products of an output are added."""
        return additions(self.problem, self.device, self.backend, self)

    @property
    def copies(self) -> Copies:
        """The operand whose copies the kernel makes itself."""
        return copied_operand(self.problem, self.backend)[0]

    @property
    def label(self) -> str:
        """The plan in a line."""
        schedule = self.schedule
        if self.variant == "inline":
            return f"{self.backend} inline"
        if self.variant == ONE_TILE:
            shares = f" of {schedule.grid.tiles}" * (schedule.kind == "stream_k")
            return f"{self.backend} {ONE_TILE}, {self.workers} programs, {self.tile[0]}x{self.tile[1]} tiles{shares}"
        each = schedule.split == "strides"
        queues = f", {schedule.queues} queues" if schedule.queues > 1 and not each else ""
        if schedule.split == "chunks":
            queues += " in arrival order"
        backend = f"{self.backend} {self.variant}" if self.backend in ("hopper", "cdna") else self.backend
        copied = f"{' and '.join(self.realigned.upper())} realigned, " * bool(self.realigned)
        return (
            f"{copied}{backend} {schedule.kind}{queues}, {self.workers} workers{' with a queue each' * each}"
            f"{f' of {self.ctas} CTAs' * (self.ctas > 1)}, "
            f"{self.tile[0]}x{self.tile[1]} tiles, {schedule.raster.order} raster"
        )

    def explain(self) -> str:
        """The choices, the refused alternatives with their reasons, and the floor, as text."""
        return explain(self)

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        activation: str | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        arrival: Arriving | None = None,
        weight_arrival: Arriving | None = None,
        deadline: float | None = None,
    ) -> torch.Tensor:
        """Run this plan on operands of its shape. See `tilestream.matmul` for the arguments; nothing is broadcast.

        The call is eager and without autograd. It is for benchmarks, and for callers that choose the plan.

        Parameters
        ----------
        a, b
            ``[m, k]`` and ``[k, n]``; ``[batch, m, k]`` and ``[batch, k, n]`` if the plan has several batches.
        scale_a, scale_b
            The plan's ``scales`` says their shapes: one element each, or one for each row of A and each column of B. A
            plan for scales of rows takes one element too, and a plan for scales takes None.

        Raises
        ------
        ValueError, TypeError
            If an operand does not match the plan.
        RuntimeError
            If an operand requires a gradient.
        NotImplementedError
            For a plan of `tilestream.grouped_plan`.
        ArrivalTimeout, Exception
            See `tilestream.matmul`.
        """
        if isinstance(self.problem, GroupedProblem):
            raise NotImplementedError(
                "plan.run: the plan is of groups, and it has no offsets: call tilestream.grouped_mm"
            )
        result: torch.Tensor = hooks.run_plan(
            self, a, b, out=out, bias=bias, residual=residual, alpha=alpha, beta=beta, activation=activation,
            scale_a=scale_a, scale_b=scale_b, arrival=arrival, weight_arrival=weight_arrival, deadline=deadline,
        )  # fmt: skip
        return result


def of_candidate(
    problem: Problem, device: DeviceProperties, backend: str, candidate: Candidate, why: str,
    refused: tuple[Refusal, ...] = (),
) -> Plan:  # fmt: skip
    """Make a plan of a candidate."""
    copied, _ = copied_operand(problem, backend)
    copiers = 0 if copied == "none" else min(COPIERS, candidate.workers)
    of_it = {field.name: getattr(candidate, field.name) for field in fields(Candidate)}
    return Plan(**of_it, problem=problem, device=device, backend=backend, why=why, refused=refused, copiers=copiers)


def explain(plan: Plan) -> str:
    """The choices, the refused alternatives with their reasons, and the floor, as text."""
    problem, floor = plan.problem, plan.floor
    a, b = problem.dtypes
    scaled = {
        "none": "", "tensor": ", one scale each", "row": ", a scale a row and column",
        "block": ", a scale a row and 128 of K, and for 128x128 of B",
    }[problem.scales]  # fmt: skip
    promoted = ", added up in float32 every 128 of K" if problem.promoted and sums_lose_bits(plan.device.arch) else ""
    dtypes = (a if a == b else f"{a} x {b}") + scaled + promoted
    work = f"{number(floor.operations / 1e9)} GFLOP, {number(floor.bytes / 1e6)} MB, {number(floor.intensity)} FLOP/B"
    return table(
        f"{problem.text}, {dtypes} -> {problem.out_dtype}", plan,
        [*_schedule(plan), *_arrivals(plan), *promise_lines(plan.promise, plan.additions)], work,
    )  # fmt: skip


def _schedule(plan: Plan) -> Iterator[tuple[str, str]]:
    schedule, grid, raster = plan.schedule, plan.schedule.grid, plan.schedule.raster
    if plan.variant == "inline":
        return
    queues = f", {schedule.queues} queue{'s' if schedule.queues > 1 else ''}" if schedule.kind != "static" else ""
    if schedule.packed:
        queues = ", a queue for each group of a source"
    if schedule.split == "strides":
        queues = ", a queue each: first a static grid's tiles, then those of other queues"
    remainder = ""
    if schedule.remainder:
        remainder = f"; {schedule.remainder} tiles split along K into {schedule.num_shares} shares"
    first = f" from {'column' if raster.transposed else 'row'} tile {raster.first}" if raster.first else ""
    if schedule.first_batch:
        first += f" from batch {schedule.first_batch}"
    most = ""
    if isinstance(problem := plan.problem, GroupedProblem):
        rows = problem.likely if problem.sources else problem.m
        mean = (rows if problem.along == "rows" else problem.k) / (problem.groups * max(1, problem.sources))
        of_rows = problem.along == "rows"
        most = "at most " * of_rows
        how = "the device counts the tiles" if of_rows else "the longest is begun first"
        of_group = f"{problem.groups} of {number(mean)} {'rows' if of_rows else 'of K'} on average"
        if problem.sources:
            of_group = f"{problem.sources} sources' {of_group}, if they bring {rows} rows in all"
        what = "counts" if problem.sources else "offsets"
        yield "groups", f"{of_group}; {what} are read on the device: {how}"
    if plan.realigned:
        yield "realigned", realigned_text(problem, plan.realigned)
    yield "tiles", f"{most}{grid.batch} x {grid.num_m} x {grid.num_n} of {plan.tile[0]}x{plan.tile[1]}"
    if plan.variant == ONE_TILE:
        shares = f"{schedule.num_shares // grid.tiles} shares of the K of each tile" if remainder else "each tile"
        shares += ", a cluster that adds them in shared memory" * (cluster_of(schedule) > 1)
        yield "schedule", f"none: a program for {shares}"
        return
    of_ctas = f" of {plan.ctas} CTAs" * (plan.ctas > 1)
    yield "schedule", f"{schedule.kind}, {schedule.workers} workers{of_ctas}{queues}{remainder}"
    if raster.table is None:
        yield "raster", f"{raster.order}{first}, group {raster.group}"
    else:
        yield "raster", f"a table of {len(raster.table)} tiles"
    if schedule.split == "chunks":
        cost = "an atomic add an item; for each queue and worker also a poll of each chunk and two atomics"
        yield "order", f"in arrival order, from the first queue whose chunks have arrived: costs {cost}"
    if any(plan.registers):
        load, math = plan.registers
        yield "registers", f"of a thread: {load} of the load warp, {math} of the math warps"


def _arrivals(plan: Plan) -> Iterator[tuple[str, str]]:
    problem = plan.problem
    for name, incoming in (("rows", problem.rows), ("columns", problem.columns)):
        if incoming is not None:
            what = f"{_cut(incoming.chunks, name)}, pivot {incoming.pivot}"
            yield "arrival", f"{name} in {what}; a tile waits for the chunks it reads"
    if isinstance(problem, GroupedProblem) and problem.arrives and problem.sources:
        how = "a group's tiles wait for its source's counts and for its own rows, and are taken as they come"
        yield "arrival", f"rows by source, from source {problem.pivot} on; {how}"
    elif isinstance(problem, GroupedProblem) and problem.arrives:
        how = "tiles of the group with most rows first, each waits for its own"
        yield "arrival", f"each group's matrix of B; {how}"
    if not problem.arriving:
        yield "arrival", "none: no gate code runs"
    operand, why = copied_operand(problem, plan.backend)
    if operand != "none":
        copiers = f"the first {plan.copiers} of {plan.workers} workers that run"
        yield "copies", f"{operand} by the kernel: {copiers} copy until no piece is left, and then take tiles"
    if why:
        yield "copies", why
    if (publishes := problem.publishes) is not None:
        begins = "; a launch that reads them here begins behind the first"
        if publishes.own_words:  # any program may write the caller's words, so no stream waits for one of them
            begins = "; a launch that reads them here begins behind the last, since the words are your own (signals=)"
        if plan.backend == "cpu":
            begins = ""
        what = f"rows in {_cut(publishes.chunks, '')}, from chunk {publishes.pivot} on"
        yield "publish", f"{what}; the worker that completes a chunk signals it{begins}"


def _cut(chunks: Chunks, name: str) -> str:
    size = f"{chunks.rows_per_chunk} {name}".strip() if chunks.rows_per_chunk else f"uneven {name or 'rows'}"
    return f"{chunks.count} chunks of {size}"
