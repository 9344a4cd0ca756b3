"""The board of random problems: `tilestream.matmul` beside torch's call on problems that a seed draws, each checked."""

from __future__ import annotations

import functools
from typing import Any

import torch

import tilestream as ts
from benchmarks.core.records import Record
from benchmarks.core.timing import Call, host_microseconds
from benchmarks.gemm.bench import Bench, Row
from benchmarks.gemm.draw import Draw, draws
from benchmarks.gemm.plans import planned
from benchmarks.gemm.sections import compared, timed
from benchmarks.report import gemm_random
from benchmarks.report.notes import Section
from tilestream.plan import Plan
from tilestream_tools.sweep.check import Check, poison

#: Problems, where no other number is given.
COUNT = 200
#: Seconds of samples of a problem: 200 problems, with their operands and checks, in 200 seconds.
SAMPLING = 0.2
#: What a call costs the host is measured of problems whose floor is below this: behind others the host waits.
HOST_BELOW = 200e-6


def random(bench: Bench) -> None:
    """The problems of ``--seed``, those of ``--resume`` left out."""
    seed = bench.options.seed
    every = {problem.small() if bench.dry else problem: number
             for number, problem in enumerate(draws(seed, bench.options.count or COUNT))}  # fmt: skip
    record = bench.gemm_record(f"random_{seed}", seed=seed, dtype="as drawn", planned=len(every))
    left = bench.unmeasured(record, every)
    bench.compile_ahead("random", [f"{seed}:{number}" for number in left.values()])
    try:
        bench.rows(record, left, lambda problem: random_row(bench, problem))
    finally:
        tell(record, gemm_random.board)


def tell(record: Record, section: Section) -> None:
    """Print what the page will have of a record."""
    if record.rows:
        print(*section({**record.data, "folder": record.path.parent.name, "stem": record.path.stem}), sep="\n\n")


def random_row(bench: Bench, problem: Draw) -> Row:
    """One problem: its classes, its plan with the reasons, and the figures of both calls by both clocks."""
    a, b, given = operands(problem, bench.device)
    functions: dict[str, Call] = {"torch": peer(a, b, given), "ours": lambda: ts.matmul(a, b, **given)}
    check = checked(a, b, given, functions["torch"]())
    poison(problem.outputs, problem.n, torch.bfloat16, bench.device)
    errors = check(functions["ours"]())
    timing = timed(bench, problem, functions, check, problem.itemsize, sampling=SAMPLING)
    plan = planned(problem, bench.device)
    row = {"classes": problem.classes, "kind": problem.kind, "plan": plan.label, "why": reasons(plan),
           "expected_us": round(1e6 * plan.predicted, 2)}  # fmt: skip
    row |= compared(bench, problem, timing, "torch", problem.itemsize) | {"errors": errors}
    if bench.peaks.floor(problem, problem.itemsize)[0] < HOST_BELOW:
        row["host_us"], _ = host_microseconds(functions, batch=16, batches=5, synchronize=bench.clock.synchronize)
    return row


def operands(problem: Draw, device: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """A ``[M, K]`` and B ``[K, N]`` of each batch, as the layout says; and what fp8's call has beside them."""
    dtype, fp8 = getattr(torch, problem.dtype), problem.itemsize == 1
    generator = None if device == "meta" else torch.Generator(device).manual_seed(sum(problem[:3]))

    def make(rows: int, columns: int, letter: str) -> torch.Tensor:
        extents = (rows, columns) if letter == "n" else (columns, rows)
        batches = (problem.batch,) if problem.batch > 1 else ()
        made = torch.empty(*batches, *extents, device=device, dtype=torch.bfloat16 if fp8 else dtype)
        if generator is not None:
            made.normal_(generator=generator)
        made = made.to(dtype)
        return made if letter == "n" else made.transpose(-1, -2)

    a, b = make(problem.m, problem.k, problem.layout[0]), make(problem.k, problem.n, problem.layout[1])
    if not fp8:
        return a, b, {}
    sizes = ((problem.m, 1), (1, problem.n)) if problem.scales == "row" else ((1,), (1,))
    scale_a, scale_b = (torch.empty(size, device=device) for size in sizes)
    if generator is not None:
        for scale in (scale_a, scale_b):
            scale.uniform_(0.5, 1.5, generator=generator)
    return a, b, {"scale_a": scale_a, "scale_b": scale_b, "use_fast_accum": True, "out_dtype": torch.bfloat16}


def peer(a: torch.Tensor, b: torch.Tensor, given: dict[str, Any]) -> Call:
    """Torch's call of the product."""
    if given:
        return lambda: torch._scaled_mm(a, b, **given)
    return functools.partial(torch.mm if a.dim() == 2 else torch.bmm, a, b)


def checked(a: torch.Tensor, b: torch.Tensor, given: dict[str, Any], answer: torch.Tensor) -> Check:
    """The error rule, with torch's ``answer`` as the peer's."""
    if not given:
        return Check.of_product(a, b, answer)
    scale_a, scale_b = given["scale_a"].double(), given["scale_b"].double()
    by_row = scale_a.numel() > 1
    return Check.of_product(
        a.float(), b.float(), answer, lambda x, rows: x * scale_b * (scale_a[rows] if by_row else scale_a)
    )


def reasons(plan: Plan) -> str:
    """Why this plan, and why not the others, in a line."""
    others = (f"{refusal.what}: {refusal.why}" for refusal in plan.refused if refusal.what != "portable")
    return "; ".join([plan.why, *others])


def on_meta(seed: int, number: int) -> Call:
    """The call of a seed's problem, on the meta device."""

    def call() -> None:
        a, b, given = operands(draws(seed, number + 1)[number], "meta")
        ts.matmul(a, b, **given)

    return call
