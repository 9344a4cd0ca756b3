"""From canonical operands to a launch: what the registered ops and `Plan.run` share."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.signals import Outcome
from tilestream.kernels.cpu.gemm import GemmBody
from tilestream.kernels.cpu.launch import Awaited, Launch
from tilestream.kernels.epilogue import ACTIVATIONS, Epilogue
from tilestream.ops import gpu
from tilestream.ops.flat import DEFAULT_DEADLINE, FlatArrival, check_deadline
from tilestream.ops.overlap import refuse_overlap
from tilestream.plan.problem import Problem, dtype_name
from tilestream.runtime.errors import NO_ITEM, ArrivalTimeout
from tilestream.runtime.workspace import workspace
from tilestream.schedule.schedule import Schedule
from tilestream.trace.record import current as current_recorder

if TYPE_CHECKING:
    from tilestream.plan.plan import Plan


def problem_of(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    rows: FlatArrival | None = None,
    columns: FlatArrival | None = None,
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
    )  # fmt: skip


def execute(
    plan: Plan,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    rows: FlatArrival | None = None,
    columns: FlatArrival | None = None,
    deadline: float = DEFAULT_DEADLINE,
    op: str = "matmul",
) -> None:
    """Run ``plan`` on canonical operands; returns when ``out`` (``[B, M, N]``) is complete, or raises.

    Raises
    ------
    ArrivalTimeout
        If a chunk did not arrive in time; what was not computed is NaN.
    """
    incoming = tuple(Awaited(x.signals(op, a.device), x.epoch) if x is not None else None for x in (rows, columns))
    assert len(incoming) == 2
    end = time.perf_counter() + deadline
    recorder = current_recorder()
    if plan.schedule.grid.tiles:
        with workspace() as scratch:
            body = GemmBody(a, b, out, epilogue, plan.schedule, plan.block, scratch)
            if plan.variant == "inline" and recorder is None:
                _inline(plan.schedule, body)
            else:
                threads = torch.get_num_threads() if plan.variant == "inline" else 1
                Launch(
                    op, plan.schedule, plan.gate, body, scratch,
                    incoming=incoming, deadline=deadline, threads=threads, recorder=recorder, label=plan.label,
                ).run()  # fmt: skip
    arguments = ("arrival", "weight_arrival")
    for argument, arrival, waiting in zip(arguments, (rows, columns), incoming, strict=True):
        if arrival is not None and waiting is not None and waiting.signals.self_reset:
            _see_all(op, argument, arrival, waiting, end, deadline)


def _inline(schedule: Schedule, body: GemmBody) -> None:
    """A launch with nobody to share work or wait with: the schedule's items, one after the other."""
    with torch.inference_mode():  # so that a result that is an inference tensor can be written
        items = list(schedule.items())
        for done, item in enumerate(items):
            try:
                body.compute(item)
            except BaseException:
                for missing in items[done:]:
                    body.poison(missing)
                raise


def _see_all(op: str, argument: str, arrival: FlatArrival, waiting: Awaited, end: float, deadline: float) -> None:
    """See the signals that no tile had to wait for, too: only then may the words be zeroed (invariant 4).

    A chunk without rows, or an output without columns: a signal that comes after the zeroing would count for the next
    call.
    """
    for chunk in range(arrival.num_chunks):
        begin = time.perf_counter()
        outcome = waiting.signals.wait(chunk, waiting.epoch, end, lambda: False)
        if outcome is Outcome.FAILED:
            raise waiting.signals.failure(waiting.epoch)
        if outcome is Outcome.EXPIRED:
            waited = time.perf_counter() - begin
            raise ArrivalTimeout(op, 0, chunk, NO_ITEM, waited, deadline, argument=argument)


@functools.cache
def uncompiled_run_plan() -> Callable[..., torch.Tensor]:
    """`run_plan` for code that is being compiled: it schedules by itself, and nothing in it is for a compiler.

    Not a decorator: that imports torch's compiler, two seconds, for everybody who imports this package's ops.
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
    arrival: Arrival | None,
    weight_arrival: Arrival | None,
    deadline: float | None,
) -> torch.Tensor:
    """`Plan.run`."""
    for name, given in (("a", a), ("b", b), ("out", out), ("bias", bias), ("residual", residual)):
        if not isinstance(given, torch.Tensor) and (given is not None or name in ("a", "b")):
            raise TypeError(f"{name} is a {type(given).__name__}; it is a torch.Tensor")
    problem = plan.problem
    ndim = 3 if problem.batch != 1 or a.dim() == 3 else 2
    out_dtype = getattr(torch, problem.out_dtype)
    shapes = {"a": (problem.m, problem.k), "b": (problem.k, problem.n), "out": (problem.m, problem.n)}
    device = torch.device("cpu") if plan.backend == "cpu" else a.device
    if plan.backend != "cpu" and device.type != "cuda":
        raise ValueError(f"a: on {device}; the plan is for a GPU: {plan.device.name}")
    if out is None:
        out = torch.empty((problem.batch,) * (ndim - 2) + shapes["out"], dtype=out_dtype, device=device)
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        expected = (problem.batch,) * (ndim - 2) + shapes[name]
        dtype = out_dtype if name == "out" else getattr(torch, problem.dtype)
        if tuple(tensor.shape) != expected or tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"{name}: {list(tensor.shape)} {tensor.dtype} on {tensor.device}; the plan is for {list(expected)} "
                f"{dtype} on {device}"
            )
    epilogue = make_epilogue(out, bias, residual, alpha, beta, activation or "none")
    refuse_overlap(out, epilogue, a=a, b=b)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, out, bias, residual)):
        raise RuntimeError(
            "plan.run: has no autograd, and an operand requires a gradient; use tilestream.matmul, or torch.no_grad()"
        )
    rows = FlatArrival.of(arrival) if arrival is not None else None
    columns = FlatArrival.of(weight_arrival) if weight_arrival is not None else None
    if device.type == "cuda":
        if rows is not None or columns is not None or plan.gate is not None:
            _check_chunks(plan, a, b, rows, columns)
        gpu.run(
            a, b, out, epilogue, plan=plan, rows=rows, columns=columns, deadline=check_deadline(deadline), op="plan.run"
        )
        return out
    a3, b3, out3 = (t if ndim == 3 else t.unsqueeze(0) for t in (a, b, out))
    _check_chunks(plan, a3, b3, rows, columns)
    execute(plan, a3, b3, out3, epilogue, rows, columns, check_deadline(deadline), "plan.run")
    for flat in (rows, columns):
        if flat is not None:
            flat.signals("plan.run", device).clear()
    return out


def _check_chunks(
    plan: Plan, a: torch.Tensor, b: torch.Tensor, rows: FlatArrival | None, columns: FlatArrival | None
) -> None:
    a3, b3 = (t if t.dim() == 3 else t.unsqueeze(0) for t in (a, b))
    problem, asked = plan.problem, problem_of(a3, b3, a.dtype, rows, columns)
    if (asked.rows, asked.columns, asked.row_of_batch) != (problem.rows, problem.columns, problem.row_of_batch):
        raise ValueError("arrival: not the chunks and pivot that the plan was made for; make a plan with this arrival")


def make_epilogue(
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: str,
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
            if tensor.device != out.device:
                raise ValueError(f"{name}: on {tensor.device}, the output on {out.device}; they are on one device")
    if residual is not None and beta != 0:
        residual = residual.detach().unsqueeze(0) if residual.dim() == 2 else residual.detach()
    else:
        residual = None  # beta == 0: not read, so that what is not a number there does not count
    return Epilogue(alpha, bias.detach() if bias is not None else None, residual, beta, activation)
