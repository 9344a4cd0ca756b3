"""From canonical operands to a launch: what the registered ops and `Plan.run` share."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.flat import Awaited, FlatArrival, check_deadline
from tilestream.arrival.signals import Outcome, Signals
from tilestream.core.errors import NO_ITEM, ArrivalTimeout
from tilestream.core.gate import Needs
from tilestream.core.operands import ACTIVATIONS, Epilogue, GemmOperands
from tilestream.core.schedule import Schedule
from tilestream.kernels.cpu.gemm import GemmBody
from tilestream.launch.cpu.launch import Body, Launch
from tilestream.launch.cpu.publish import Publisher
from tilestream.ops import gpu
from tilestream.ops.overlap import refuse_overlap
from tilestream.ops.scales import FP8_DTYPES, canonical_scales, check_scale_dtype
from tilestream.plan import limit as limits
from tilestream.plan.api import SCALES
from tilestream.plan.problem import Incoming, Problem, Scales, dtype_name
from tilestream.runtime.workspace import Workspace, workspace
from tilestream.trace.record import current as current_recorder

if TYPE_CHECKING:
    from tilestream.plan.attention_plan import AttentionPlan
    from tilestream.plan.plan import Plan


def problem_of(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    rows: FlatArrival | None = None,
    columns: FlatArrival | None = None,
    scales: Scales = "none",
    publishes: FlatArrival | None = None,
) -> Problem:
    """The problem of canonical operands: ``a`` ``[B, M, K]``, ``b`` ``[B, K, N]``."""
    batch, m, k = a.shape
    n = b.shape[2]
    shared = batch > 1 and a.stride(0) == 0
    return Problem(
        m, n, k, batch, dtype_name(a.dtype), dtype_name(out_dtype),
        rows.incoming(m if shared else batch * m) if rows is not None else None,
        columns.incoming(n) if columns is not None else None,
        shared,
        b_dtype=dtype_name(b.dtype) if b.dtype != a.dtype else "",
        scales=scales,
        publishes=publishes.published(batch * m) if publishes is not None else None,
    )  # fmt: skip


def execute(
    plan: Plan, x: GemmOperands, awaited: Awaited | None = None, op: str = "matmul",
    publishes: FlatArrival | None = None,
) -> None:  # fmt: skip
    """Run ``plan`` on canonical operands with a batch; returns when ``out`` is complete, or raises.

    ``publishes``: where each chunk of its rows is signalled when it is there; if this raises, as one that has failed.

    Raises
    ------
    ArrivalTimeout
        If a chunk did not arrive in time; what was not computed is NaN.
    """
    end = time.perf_counter() + (0.0 if awaited is None else awaited.deadline)

    def body_of(scratch: Workspace) -> Body:
        return GemmBody(*x, plan.schedule, plan.block, scratch)

    if publishes is None:
        launch(op, plan, plan.gate, body_of, awaited)
    else:
        with _publishing(plan, x.out, publishes.signals(op, x.a.device)) as publisher:
            launch(op, plan, plan.gate, body_of, awaited, publisher)
    if awaited is not None:
        see_all(awaited, end)


def launch(
    op: str, plan: Plan | AttentionPlan, gate: Needs | None, body_of: Callable[[Workspace], Body],
    awaited: Awaited | None, publisher: Publisher | None = None,
) -> None:  # fmt: skip
    """Perform a plan's schedule, in the calling thread or by workers of its own."""
    recorder, inline = current_recorder(), plan.variant == "inline"
    if not plan.schedule.grid.tiles:
        return
    with workspace() as scratch:
        body = body_of(scratch)
        if inline and recorder is None:
            run_inline(plan.schedule, body)
            return
        Launch(
            op, plan.schedule, gate, body, scratch, awaited=awaited, publisher=publisher, recorder=recorder,
            threads=torch.get_num_threads() if inline else 1, label=plan.label,
        ).run()  # fmt: skip


@contextlib.contextmanager
def _publishing(plan: Plan, out: torch.Tensor, signals: Signals) -> Iterator[Publisher]:
    """A block that signals chunks; those without a tile are signalled at its end. Its error reaches the readers."""
    assert plan.problem.publishes is not None
    epoch = signals.begin_publishing()
    publisher = Publisher(
        plan.problem.publishes.chunks, plan.schedule.grid, plan.block[0], out.shape[1],
        lambda chunk: signals.set(chunk, epoch),
    )  # fmt: skip
    try:
        yield publisher
    except BaseException as error:
        signals.fail(error, epoch=epoch)
        raise
    publisher.finish()


def run_inline(schedule: Schedule, body: Body) -> None:
    """Perform the schedule's items one after the other, in the calling thread."""
    with torch.inference_mode():  # so that a result that is an inference tensor can be written
        items = list(schedule.items())
        for done, item in enumerate(items):
            try:
                body.compute(item)
            except BaseException:
                for missing in items[done:]:
                    body.poison(missing)
                raise


def see_all(awaited: Awaited, end: float) -> None:
    """See a caller's own signals that no tile had to wait for, too: only then may they be zeroed (invariant 4).

    A chunk without rows, or an output without columns: a signal that comes after the zeroing would count for the next
    call.
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


@functools.cache
def uncompiled_run_plan() -> Callable[..., torch.Tensor]:
    """`run_plan` for code that is being compiled: it schedules by itself, and nothing in it is for a compiler.

    Not a decorator: that imports torch's compiler, which takes two seconds, whenever this package's ops are imported.
    """
    disabled: Callable[..., torch.Tensor] = torch.compiler.disable(run_plan)
    return disabled


def run_plan(
    plan: Plan,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: str | None,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    arrival: Arrival | None,
    weight_arrival: Arrival | None,
    deadline: float | None,
) -> torch.Tensor:
    """`Plan.run`."""
    tensors = {"out": out, "bias": bias, "residual": residual, "scale_a": scale_a, "scale_b": scale_b}
    for name, given in (("a", a), ("b", b), *tensors.items()):
        if not isinstance(given, torch.Tensor) and (given is not None or name in ("a", "b")):
            raise TypeError(f"{name} is a {type(given).__name__}; it is a torch.Tensor")
    _check_limit(plan)
    problem = plan.problem
    if problem.publishes is not None:
        raise ValueError(
            "plan.run: the plan signals the chunks of its result, for which nobody is given: call tilestream.matmul "
            "with publish="
        )
    ndim = 3 if problem.batch != 1 or a.dim() == 3 else 2
    out_dtype = getattr(torch, problem.out_dtype)
    shapes = {"a": (problem.m, problem.k), "b": (problem.k, problem.n), "out": (problem.m, problem.n)}
    device = torch.device("cpu") if plan.backend == "cpu" else a.device
    if plan.backend != "cpu" and device.type != "cuda":
        raise ValueError(f"a: on {device}; the plan is for a GPU: {plan.device.name}")
    if out is None:
        out = torch.empty((problem.batch,) * (ndim - 2) + shapes["out"], dtype=out_dtype, device=device)
    dtypes = (*(getattr(torch, name) for name in problem.dtypes), out_dtype)
    for (name, tensor), dtype in zip((("a", a), ("b", b), ("out", out)), dtypes, strict=True):
        expected = (problem.batch,) * (ndim - 2) + shapes[name]
        if tuple(tensor.shape) != expected or tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"{name}: {list(tensor.shape)} {tensor.dtype} on {tensor.device}; the plan is for {list(expected)} "
                f"{dtype} on {device}"
            )
    scales = canonical_scales("plan.run", scale_a, scale_b, a.shape[:-1], b.shape[:-2], out.shape)
    epilogue = make_epilogue(out, bias, residual, alpha, beta, activation or "none", *scales)
    if SCALES.index(epilogue.scales) > SCALES.index(problem.scales):
        raise ValueError(
            f"scale_a, scale_b: for scales={epilogue.scales!r}, the plan is for scales={problem.scales!r}; make a plan "
            f"with scales={epilogue.scales!r}"
        )
    refuse_overlap(out, epilogue, a=a, b=b)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, *tensors.values(), out)):
        raise RuntimeError(
            "plan.run: has no autograd, and an operand requires a gradient; use tilestream.matmul, or torch.no_grad()"
        )
    rows = FlatArrival.of(arrival) if arrival is not None else None
    columns = FlatArrival.of(weight_arrival) if weight_arrival is not None else None
    if device.type == "cuda":
        if rows is not None or columns is not None or plan.gate is not None:
            _check_chunks(plan, a, b, rows, columns)
        gpu.run(
            GemmOperands(a, b, out, epilogue), gpu.How(), plan, rows, columns, check_deadline(deadline), "plan.run"
        )  # fmt: skip
        return out
    a3, b3, out3 = (t if ndim == 3 else t.unsqueeze(0) for t in (a, b, out))
    _check_chunks(plan, a3, b3, rows, columns)
    awaited = Awaited.of(rows, columns, check_deadline(deadline), "plan.run", device)
    execute(plan, GemmOperands(a3, b3, out3, epilogue), awaited, "plan.run")
    for flat in (rows, columns):
        if flat is not None:
            flat.signals("plan.run", device).clear()
    return out


def _check_limit(plan: Plan) -> None:
    """A plan is frozen, and so is its number of workers."""
    limit, workers = limits.limit(), torch.get_num_threads() if plan.variant == "inline" else plan.workers
    if limit and workers > limit:
        raise ValueError(
            f"plan.run: the plan has {workers} workers, and the limit is {limit} (worker_limit, or "
            f"{limits.ENVIRONMENT}); make the plan where the limit holds"
        )


def _check_chunks(
    plan: Plan, a: torch.Tensor, b: torch.Tensor, rows: FlatArrival | None, columns: FlatArrival | None
) -> None:
    a3, b3 = (t if t.dim() == 3 else t.unsqueeze(0) for t in (a, b))
    problem, asked = plan.problem, problem_of(a3, b3, a.dtype, rows, columns)
    there, planned = ((_as_brought(one.rows), _as_brought(one.columns), one.row_of_batch) for one in (asked, problem))
    if there != planned:
        raise ValueError("arrival: not the chunks and pivot that the plan was made for; make a plan with this arrival")
    for name, one, other in (
        ("arrival", asked.rows, problem.rows),
        ("weight_arrival", asked.columns, problem.columns),
    ):
        if one is not None and other is not None and one.copied != other.copied:
            raise ValueError(
                f"{name}: {_copies(one)}, and the plan was made for {_copies(other)}; make a plan with this arrival"
            )


def _copies(incoming: Incoming) -> str:
    """For people."""
    return f"copies offered to the kernel, in words of {incoming.copied} bytes" if incoming.copied else "others' copies"


def _as_brought(incoming: Incoming | None) -> Incoming | None:
    """Without what makes the copies."""
    return None if incoming is None else replace(incoming, copied=0)


def make_epilogue(
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: str,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> Epilogue:
    """The epilogue for an output ``[M, N]`` or ``[B, M, N]``, its tensors checked and brought to canonical form."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation={activation!r}; it is one of {', '.join(name for name in ACTIVATIONS if name != 'none')}"
        )
    if bias is not None and tuple(bias.shape) != (out.shape[-1],):
        raise ValueError(f"bias: shape {list(bias.shape)}; it has one element a column: [{out.shape[-1]}]")
    if residual is not None and residual.shape != out.shape:
        raise ValueError(f"residual: shape {list(residual.shape)}; it has the output's: {list(out.shape)}")
    for name, tensor in (("bias", bias), ("residual", residual)):
        if tensor is not None:
            dtype_name(tensor.dtype)
            if tensor.dtype in FP8_DTYPES:
                raise TypeError(f"{name}: {tensor.dtype}; of 8 bits are operands only: {name}.to({out.dtype})")
            if tensor.device != out.device:
                raise ValueError(f"{name}: on {tensor.device}, the output on {out.device}; they are on one device")
    for name, scale, extents in (("scale_a", scale_a, (-2, 1)), ("scale_b", scale_b, (1, -1))):
        if scale is not None:
            _check_scale(name, scale, out, extents)
    if residual is not None and beta != 0:
        residual = residual.detach().unsqueeze(0) if residual.dim() == 2 else residual.detach()
    else:
        residual = None  # beta == 0: not read, so that what is not a number there does not count
    bias, scale_a, scale_b = (None if t is None else t.detach() for t in (bias, scale_a, scale_b))
    return Epilogue(alpha, bias, residual, beta, activation, scale_a, scale_b)


def _check_scale(name: str, scale: torch.Tensor, out: torch.Tensor, extents: tuple[int, int]) -> None:
    """``extents``: of its last two dimensions, negative ones the output's."""
    check_scale_dtype("gemm", name, scale)
    if scale.device != out.device:
        raise ValueError(f"{name}: on {scale.device}, the output on {out.device}; they are on one device")
    shape = (*out.shape[:-2], *(out.shape[extent] if extent < 0 else extent for extent in extents))
    if scale.numel() != 1 and tuple(scale.shape) != shape:
        raise ValueError(f"{name}: shape {list(scale.shape)}; it has one element, or {list(shape)}")
