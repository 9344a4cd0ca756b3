"""`Plan.explain`: a plan in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilestream.plan.copies import copied_operand

if TYPE_CHECKING:
    from tilestream.plan.plan import Plan


def explain(plan: Plan) -> str:
    """What was chosen, what was refused and why, and the floor."""
    problem, device, floor = plan.problem, plan.device, plan.floor
    batch = f"{problem.batch} x " if problem.batch > 1 else ""
    shape = f"{batch}[{problem.m}, {problem.k}] @ [{problem.k}, {problem.n}]"
    lines = [
        ("device", f"{device.name}, {device.workers} workers ({device.source})"),
        ("backend", f"{plan.backend}, variant {plan.variant}: {plan.why}"),
    ]
    if plan.variant != "inline":
        lines += _schedule(plan)
    lines += _arrivals(plan)
    work = f"{floor.operations / 1e9:.3g} GFLOP, {floor.bytes / 1e6:.3g} MB, {floor.intensity:.3g} FLOP/B"
    lines += [
        ("floor", f"{work}: {floor.seconds * 1e3:.3g} ms, bound by {floor.binds}"),
        ("expected", f"{plan.predicted * 1e3:.3g} ms by the cost model, with everything arrived"),
    ]
    if device.arch.startswith("gfx"):
        lines.append(("checked", "compiled and checked, not run: nobody has run this on an AMD GPU yet"))
    lines += [("refused", f"{refusal.what}: {refusal.why}") for refusal in plan.refused]
    head = f"matmul {shape}, {_dtypes(plan)} -> {problem.out_dtype}"
    return "\n".join([head, *(f"  {name:<9} {text}" for name, text in lines)])


def _dtypes(plan: Plan) -> str:
    problem = plan.problem
    a, b = problem.dtypes
    scaled = {"none": "", "tensor": ", one scale each", "row": ", a scale a row and column"}[problem.scales]
    precise = problem.fp8 and not problem.fast_accum and not plan.device.arch.startswith("gfx")
    emptied = ", added up in float32 every 128 of K" if precise else ""
    return (a if a == b else f"{a} x {b}") + scaled + emptied


def _schedule(plan: Plan) -> list[tuple[str, str]]:
    schedule, grid, raster = plan.schedule, plan.schedule.grid, plan.schedule.raster
    queues = f", {schedule.queues} queue{'s' if schedule.queues > 1 else ''}" if schedule.kind != "static" else ""
    if schedule.split == "strides":
        queues = " with a queue each: what a static grid would give them, and then others' tiles"
    remainder = ""
    if schedule.remainder:
        remainder = f"; {schedule.remainder} tiles split along K into {schedule.num_shares} shares"
    first = f" from {'column' if raster.transposed else 'row'} tile {raster.first}" if raster.first else ""
    if schedule.first_batch:
        first += f" from batch {schedule.first_batch}"
    order = f"{raster.order}{first}, group {raster.group}"
    if raster.table is not None:
        order = f"a table of {len(raster.table)} tiles"
    ordered = []
    if schedule.split == "chunks":
        cost = "an atomic add an item, and for each queue and worker a look at each chunk, an atomic max, a void ticket"
        ordered = [("order", f"in arrival order, from the first queue whose chunks were seen: {cost}")]
    split = []
    if any(plan.registers):
        load, math = plan.registers
        split = [("registers", f"of a thread: {load} of the load warp, {math} of the math warps")]
    return [
        ("tiles", f"{grid.batch} x {grid.num_m} x {grid.num_n} of {plan.tile[0]}x{plan.tile[1]}"),
        ("schedule", f"{schedule.kind}, {schedule.workers} workers{queues}{remainder}"),
        ("raster", order),
        *ordered,
        *split,
    ]


def _arrivals(plan: Plan) -> list[tuple[str, str]]:
    lines = []
    for name, incoming in (("rows", plan.problem.rows), ("columns", plan.problem.columns)):
        if incoming is not None:
            chunks = incoming.chunks
            size = f"of {chunks.rows_per_chunk} {name}" if chunks.rows_per_chunk else f"of uneven {name}"
            what = f"{name} in {chunks.count} chunks {size}, pivot {incoming.pivot}"
            lines.append(("arrival", f"{what}; a tile waits for the chunks it reads"))
    lines = lines or [("arrival", "none: no gate code runs")]
    operand, why = copied_operand(plan.problem, plan.backend)
    if operand != "none":
        who = f"the first {plan.copiers} of {plan.workers} workers that run"
        what = f"{operand} by the kernel: {who} copy until no piece is left, and then take tiles"
        lines.append(("copies", what))
    if why:
        lines.append(("copies", why))
    if (publishes := plan.problem.publishes) is not None:
        chunks = publishes.chunks
        size = f"of {chunks.rows_per_chunk}" if chunks.rows_per_chunk else "of uneven rows"
        what = f"rows in {chunks.count} chunks {size}, from chunk {publishes.pivot} on"
        begins = "; a launch that reads them here begins behind the first"
        if publishes.own_words:  # which anybody may write: no stream waits for one
            begins = "; a launch that reads them here begins behind the last, since the words are your own (signals=)"
        if plan.backend == "cpu":
            begins = ""
        lines.append(("publish", f"{what}; whoever completes a chunk signals it{begins}"))
    return lines
