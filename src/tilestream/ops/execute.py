"""From canonical operands on the CPU to a launch; and `Plan.run`, which runs a given plan without a registered op."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.flat import DEFAULT_DEADLINE, Awaited, FlatArrival, check_deadline
from tilestream.arrival.signals import Outcome, Signals
from tilestream.arrival.stream import open_streams
from tilestream.core.chunks import Incoming
from tilestream.core.errors import NO_ITEM, ArrivalTimeout, kind_of
from tilestream.core.exchange import cluster_of
from tilestream.core.gate import Needs
from tilestream.core.operands import GemmOperands
from tilestream.core.schedule import Schedule
from tilestream.kernels.cpu.gemm import GemmBody, InlineBody, whole
from tilestream.launch.cpu.launch import Body, CpuLaunch
from tilestream.launch.cpu.publish import Publisher
from tilestream.launch.observe import observation
from tilestream.ops import gpu, streamed
from tilestream.ops.checks import as_number, check_strided, check_written, refuse_tangents
from tilestream.ops.operands import epilogue_of, problem_of, refuse_overlap
from tilestream.ops.scales import canonical_scales
from tilestream.plan import limit as limits
from tilestream.plan.api import SCALES
from tilestream.plan.candidate import ONE_TILE
from tilestream.plan.planner import plan_problem
from tilestream.runtime.workspace import Workspace, workspace
from tilestream.trace.record import current as current_recorder

if TYPE_CHECKING:
    from tilestream.plan.attention_plan import AttentionPlan
    from tilestream.plan.plan import Plan


def run(
    x: GemmOperands, how: gpu.How, rows: FlatArrival | None = None, columns: FlatArrival | None = None,
    publishes: FlatArrival | None = None, deadline: float = DEFAULT_DEADLINE, op: str = "matmul",
) -> None:  # fmt: skip
    """``out = epilogue(a @ b)`` on the CPU; returns when ``out`` is complete. Parameters as of `gpu.run`.

    ``publishes``: each chunk of the output's rows is signalled when it is complete. If this function raises, all chunks
    are signalled as failed.

    Raises
    ------
    ArrivalTimeout
        If a chunk did not arrive in time. Tiles that were not computed are NaN.
    """
    published = None if publishes is None else publishes.published(x.out.shape[:-1].numel())
    plan = plan_problem(
        problem_of(x, rows, columns, published), how.workers or None, how.schedule,
        default_workers=torch.get_num_threads(), limit=how.limit,
    )  # fmt: skip
    device = x.a.device
    awaited = Awaited.of(rows, columns, deadline, op, device)
    if publishes is None:
        _execute(plan, x, awaited, op)
    else:
        with _publishing(plan, x.out.shape[-2], publishes.signals(op, device)) as publisher:
            _execute(plan, x, awaited, op, publisher)


def _execute(plan: Plan, x: GemmOperands, awaited: Awaited | None, op: str, publisher: Publisher | None = None) -> None:
    if plan.variant == "inline":
        x = whole(x)
        if (seen := observation()) is not None:
            seen.launches.append(x)
        launch(op, plan, None, lambda scratch: InlineBody(x, scratch), awaited)
        return
    a, b, out, epilogue = x
    if a.dim() == 2:
        a, b, out = a.unsqueeze(0), b.unsqueeze(0), out.unsqueeze(0)

    def body_of(scratch: Workspace) -> Body:
        return GemmBody(a, b, out, epilogue, plan.schedule, plan.block, scratch, bool(plan.promise))

    launch(op, plan, plan.gate, body_of, awaited, publisher)


@contextlib.contextmanager
def _publishing(plan: Plan, m: int, signals: Signals) -> Iterator[Publisher]:
    """A block that signals chunks, at its end also those without a tile. Readers get an error of the block."""
    assert plan.problem.publishes is not None
    epoch = signals.begin_publishing()
    publisher = Publisher(
        plan.problem.publishes.chunks, plan.schedule.grid, plan.block[0], m, lambda chunk: signals.set(chunk, epoch)
    )
    try:
        yield publisher
    except BaseException as error:
        signals.fail(error, epoch=epoch)
        raise
    publisher.finish()


def launch(
    op: str, plan: Plan | AttentionPlan, gate: Needs | None, body_of: Callable[[Workspace], Body],
    awaited: Awaited | None, publisher: Publisher | None = None,
) -> None:  # fmt: skip
    """Run a plan's schedule, in the calling thread or by worker threads."""
    end = time.perf_counter() + (0.0 if awaited is None else awaited.deadline)
    recorder, inline = current_recorder(), plan.variant != "workers"
    if plan.schedule.grid.tiles:
        with workspace() as scratch:
            body = body_of(scratch)
            if inline and recorder is None:
                _run_inline(plan.schedule, body)
            else:
                CpuLaunch(
                    op, plan.schedule, gate, body, scratch, awaited=awaited, publisher=publisher, recorder=recorder,
                    threads=torch.get_num_threads() if inline else 1, label=plan.label,
                ).run()  # fmt: skip
    if awaited is not None:
        _see_all(awaited, end)


def _run_inline(schedule: Schedule, body: Body) -> None:
    """Run the schedule's items one after the other in the calling thread."""
    with torch.inference_mode():  # the result may be an inference tensor
        items = list(schedule.items())
        for done, item in enumerate(items):
            try:
                body.compute(item)
            except BaseException:
                for missing in items[done:]:
                    body.poison(missing)
                raise


def _see_all(awaited: Awaited, end: float) -> None:
    """Wait for the caller's own signals that no tile waited for: only then may they be zeroed (invariant 4).

    No tile waits for a chunk without rows, nor for an output without columns. A signal that came after the zeroing
    would count for the next call.
    """
    for argument, incoming in zip(("arrival", "weight_arrival"), awaited.operands, strict=True):
        if incoming is None or not incoming[0].self_reset:
            continue
        signals, epoch = incoming
        for chunk in range(signals.count):
            begin = time.perf_counter()
            outcome = signals.wait(chunk, epoch, end, lambda: False)
            if outcome is Outcome.FAILED:
                raise signals.failure(epoch)
            if outcome is Outcome.EXPIRED:
                waited = time.perf_counter() - begin
                raise ArrivalTimeout(awaited.op, 0, chunk, NO_ITEM, waited, awaited.deadline, argument=argument)


# Plan.run -------------------------------------------------------------------------------------------------------------


@functools.cache
def uncompiled_run_plan() -> Callable[..., torch.Tensor]:
    """`run_plan` for code that is being compiled: torch.compile leaves it out of its graphs.

    A decorator would import torch's compiler, two seconds, with this package's ops.
    """
    disabled: Callable[..., torch.Tensor] = torch.compiler.disable(run_plan)
    return disabled


def run_plan(
    plan: Plan, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor | None, alpha: float, beta: float, activation: str | None, scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None, arrival: Arrival | None, weight_arrival: Arrival | None, deadline: float | None,
) -> torch.Tensor:  # fmt: skip
    """`Plan.run`."""
    op, problem = "plan.run", plan.problem
    optional = {"out": out, "bias": bias, "residual": residual, "scale_a": scale_a, "scale_b": scale_b}
    for name, given in (("a", a), ("b", b), *optional.items()):
        if not isinstance(given, torch.Tensor) and (given is not None or name in ("a", "b")):
            raise TypeError(f"{name} is {kind_of(given)}; it must be a torch.Tensor")
        if given is not None:
            check_strided(op, name, given, "tensors are dense")
    if open_streams:
        streamed.operand(op, "a", a, "arrival", arrival)
        streamed.operand(op, "b", b, "weight_arrival", weight_arrival)
        streamed.refuse(op, **optional)
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if as_number(factor) is None:
            raise TypeError(f"{op}: {name}={factor!r}; it must be a number")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, *optional.values())):
        raise RuntimeError(
            "plan.run: has no autograd, and an operand requires a gradient; use tilestream.matmul, or torch.no_grad()"
        )
    refuse_tangents(op, a, b, *optional.values(), why="it has no forward-mode derivative; use tilestream.matmul")
    _check_limit(plan)
    if problem.publishes is not None:
        raise ValueError(
            "plan.run: the plan signals the chunks of its result, and no signals are given: call tilestream.matmul "
            "with publish="
        )
    device = torch.device("cpu") if plan.backend == "cpu" else a.device
    if plan.backend != "cpu" and device.type != "cuda":
        raise ValueError(f"a: on {device}; the plan is for a GPU: {plan.device.name}")
    batch = (problem.batch,) if problem.batch != 1 or a.dim() == 3 else ()
    dtypes = [getattr(torch, name) for name in (*problem.dtypes, problem.out_dtype)]
    shapes = [(*batch, *of) for of in ((problem.m, problem.k), (problem.k, problem.n), (problem.m, problem.n))]
    if out is None:
        out = torch.empty(shapes[2], dtype=dtypes[2], device=device)
    check_written(op, out)
    for name, tensor, expected, dtype in zip(("a", "b", "out"), (a, b, out), shapes, dtypes, strict=True):
        if tuple(tensor.shape) != expected or tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"{name}: {list(tensor.shape)} {tensor.dtype} on {tensor.device}; the plan is for {list(expected)} "
                f"{dtype} on {device}"
            )
    scales = canonical_scales(op, scale_a, scale_b, a.shape[:-1], b.shape[:-2], out.shape)
    epilogue = epilogue_of(out, float(alpha), bias, residual, float(beta), activation or "none", *scales)
    if SCALES.index(epilogue.scales) > SCALES.index(problem.scales):
        raise ValueError(
            f"scale_a, scale_b: for scales={epilogue.scales!r}, the plan is for scales={problem.scales!r}; make a plan "
            f"with scales={epilogue.scales!r}"
        )
    x = GemmOperands(a, b, out, epilogue)
    refuse_overlap(x)
    rows, columns = (None if one is None else FlatArrival.of(one) for one in (arrival, weight_arrival))
    if rows is not None or columns is not None or plan.gate is not None:
        _check_chunks(plan, x, rows, columns)
    seconds = check_deadline(deadline)
    if device.type == "cuda":
        gpu.run(x, gpu.How(), plan, rows, columns, seconds, op)
        return out
    _execute(plan, x, Awaited.of(rows, columns, seconds, op, device), op)
    for flat in (rows, columns):
        if flat is not None:
            flat.signals(op, device).clear()
    return out


def _check_limit(plan: Plan) -> None:
    """Raise if the plan, whose workers and order of additions are fixed, does not meet the limits in force."""
    limit, workers = limits.limit(), torch.get_num_threads() if plan.variant == "inline" else plan.workers
    if limits.is_invariant(limit) and not plan.promise:
        raise ValueError(
            f"plan.run: under tilestream.invariant, and the plan promises nothing ({plan.additions}); make it there, "
            "or with invariant=True"
        )
    limit = limits.workers_in(limit)
    if limit and workers > limit:
        raise ValueError(
            f"plan.run: the plan has {workers} workers, and the limit is {limit} (worker_limit, or "
            f"{limits.ENVIRONMENT}); make the plan where the limit holds"
        )
    if 0 < limit < plan.device.workers and plan.variant == ONE_TILE and cluster_of(plan.schedule) > 1:
        raise ValueError(
            f"plan.run: the plan's programs are CTAs of clusters, which begin together, and the limit of {limit} "
            f"(worker_limit, or {limits.ENVIRONMENT}) says that SMs may be held; make the plan where the limit holds"
        )


def _check_chunks(plan: Plan, x: GemmOperands, rows: FlatArrival | None, columns: FlatArrival | None) -> None:
    """Raise unless the arrivals have the chunks, the pivot and the copies that the plan was made for."""
    asked, planned = problem_of(x, rows, columns), plan.problem
    of_asked, of_planned = (
        (*(one and replace(one, copied=0, linked=False) for one in (p.rows, p.columns)), p.row_of_batch)
        for p in (asked, planned)
    )
    if of_asked != of_planned:
        raise ValueError("arrival: not the chunks and pivot that the plan was made for; make a plan with this arrival")
    pairs = {"arrival": (asked.rows, planned.rows), "weight_arrival": (asked.columns, planned.columns)}
    for name, (one, other) in pairs.items():
        if one is not None and other is not None and one.copied != other.copied:
            raise ValueError(
                f"{name}: {_copies(one)}, and the plan was made for {_copies(other)}; make a plan with this arrival"
            )


def _copies(incoming: Incoming) -> str:
    return f"copies offered to the kernel, in words of {incoming.copied} bytes" if incoming.copied else "others' copies"
