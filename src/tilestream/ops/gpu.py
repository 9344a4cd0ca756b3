"""From canonical operands on a GPU to a launch, which is cached by `tilestream.launch.cache.signature`.

`_make` decides plan, layout and launch once a signature. Each call looks the launch up (`find`) and issues it
(`issue`).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilestream.arrival.device import SignalsAhead
from tilestream.arrival.flat import DEFAULT_DEADLINE, Awaited, FlatArrival
from tilestream.core.chunks import Incoming
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import GemmOperands
from tilestream.launch.cache import launch_cache, signature
from tilestream.ops.operands import problem_of
from tilestream.ops.scales import FP8_DTYPES
from tilestream.plan import tma
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import vector_of
from tilestream.runtime import collector
from tilestream.runtime.channel import check_device
from tilestream.runtime.properties import allows_tf32, cuda_properties
from tilestream.trace.record import current

if TYPE_CHECKING:
    from tilestream.launch.gemm_arguments import Layout
    from tilestream.launch.launch import GemmLaunch, Launch
    from tilestream.plan.plan import Plan

logger = logging.getLogger(__name__)


class How(NamedTuple):
    """A call's options for its launch."""

    #: schedule, workers: as for `tilestream.matmul`; 0 workers: one an SM.
    schedule: str = "auto"
    workers: int = 0
    fast_accum: bool = True  # see `tilestream.plan.problem.Problem`
    limit: int = 0  # of workers: see `tilestream.plan.limit`


def run(
    x: GemmOperands, how: How, plan: Plan | None = None, rows: FlatArrival | None = None,
    columns: FlatArrival | None = None, deadline: float = DEFAULT_DEADLINE, op: str = "matmul",
) -> None:  # fmt: skip
    """``out = epilogue(a @ b)`` on the current stream of the operands' device.

    Returns when the launch is issued. Raises the error of an earlier launch on this device.

    Parameters
    ----------
    plan
        The plan to run. None: a plan is made by ``how``.
    rows, columns
        How A's rows and B's columns arrive. None: they are there.
    deadline, op
        Seconds that the kernel may wait for them, and the op's name, for messages.
    """
    device = x.a.device
    check_device(device.index)
    awaited = Awaited.of(rows, columns, deadline, op, device)
    if awaited is not None:
        for operand, signals in ((x.a, awaited.rows), (x.b, awaited.columns)):
            if signals is not None and signals.by_matmul:  # that matmul may have allocated it on its own stream
                operand.record_stream(torch.cuda.current_stream(device))
    elif not x.out.numel():
        return
    issue(find(x, how, plan, rows, columns), x, awaited, op)


def issue(launch: Launch, x: Any, awaited: Awaited | None, op: str) -> None:
    """Launch on the operands' device. Inside a block of `tilestream.trace` the launch writes a log."""
    device = x[0].device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            issue(launch, x, awaited, op)
        return
    recorder = current()
    if recorder is None:
        launch(x, awaited)
        return
    from tilestream.launch.trace import captured, traced, untraced

    if why := untraced(launch.plan):
        logger.warning("%s: %s", op, why)
        launch(x, awaited)
    else:
        how = captured if torch.cuda.is_current_stream_capturing() else traced
        how(recorder, op, launch.plan, device, lambda log: launch(x, awaited, log))


def find(
    x: GemmOperands, how: How, plan: Plan | None = None, rows: FlatArrival | None = None,
    columns: FlatArrival | None = None, publishes: Incoming | None = None,
) -> GemmLaunch:  # fmt: skip
    """The launch for such operands, from the cache or a new one. Parameters as of `run`.

    ``publishes``: see `tilestream.plan.problem.Problem`.

    Raises
    ------
    NotImplementedError
        If no kernel publishes the chunks of such an output.
    """
    e = x.epilogue
    settings = (
        *how[:-1], id(plan), e.alpha != 1.0, e.activation,
        *(None if one is None else one.chunking for one in (rows, columns, publishes)),
    )  # fmt: skip
    tensors = (x.a, x.b, x.out, e.bias, e.residual, e.scale_a, e.scale_b)
    key = signature("gemm", tensors, settings, how.limit)
    launch: Any = launch_cache.get(key)
    if launch is None:
        generation = launch_cache.generation
        with collector.paused():  # the first launch imports the kernels
            launch = launch_cache.insert(key, _make(x, how, plan, rows, columns, publishes), generation)
    return launch  # type: ignore[no-any-return]


def compile_ahead(
    x: GemmOperands, how: How, device: DeviceProperties, rows: FlatArrival | None = None,
    columns: FlatArrival | None = None, plan: Plan | None = None,
) -> None:  # fmt: skip
    """Compile what a launch on ``device`` would launch, in a block of `tilestream.launch.compiling.ahead`.

    ``plan``: one that the caller has chosen.
    """
    _make(x, how, plan, rows, columns, device=device)(x, awaited_ahead(rows, columns))


def awaited_ahead(rows: FlatArrival | None, columns: FlatArrival | None = None) -> Awaited | None:
    """Stand-ins for the signals of operands that will arrive, for a launch that is compiled ahead."""
    if rows is None and columns is None:
        return None
    return Awaited(None if rows is None else SignalsAhead(), None if columns is None else SignalsAhead())


def _make(
    x: GemmOperands, how: How, plan: Plan | None = None, rows: FlatArrival | None = None,
    columns: FlatArrival | None = None, publishes: Incoming | None = None, device: DeviceProperties | None = None,
) -> GemmLaunch:  # fmt: skip
    # The first GPU call imports Triton, not `import tilestream`.
    from tilestream.launch import compiling

    compiling.prepare()
    from tilestream.launch.gemm_arguments import Layout, is_aligned

    a, b, out, epilogue = x
    bias, residual = epilogue.bias, epilogue.residual
    layout = Layout(
        _strides(a), _strides(b), _strides(out), None if bias is None else bias.stride(0),
        None if residual is None else _strides(residual), epilogue.alpha != 1.0, epilogue.activation,
        _scale_strides(epilogue.scale_a, -2), _scale_strides(epilogue.scale_b, -1),
    )  # fmt: skip
    lie = [
        ((tensor.shape[-2], tensor.shape[-1]), strides[1:], strides[0], tensor.data_ptr())
        for tensor, strides in ((a, layout.a), (b, layout.b))
    ]
    unaligned = [named for named, how in zip((("a", a), ("b", b)), lie, strict=True) if not is_aligned(*how)]
    no_tma = _no_tma(a, b, layout)
    not_by_tma = tma.which(*no_tma)
    if plan is None:
        device = device or cuda_properties(a.device.index)
        problem = replace(
            problem_of(x, rows, columns, publishes),
            tf32=a.dtype == torch.float32 and device.arch.startswith("sm_") and allows_tf32(),
            aligned=not unaligned,
            vectors=(_vector_of(a, lie[0]), _vector_of(b, lie[1])),
            no_tma=no_tma[0] or no_tma[1], not_by_tma=not_by_tma, plain=epilogue.trivial and _by_tma(out, layout),
            fast_accum=how.fast_accum or a.dtype not in FP8_DTYPES,
            row_multiples=(_row_multiple(a, layout.a), _row_multiple(b, layout.b)),
        )  # fmt: skip
        backend = None if publishes is None else "hopper"  # only it publishes
        plan = plan_problem(problem, how.workers or None, how.schedule, device=device, limit=how.limit, backend=backend)
    elif plan.backend == "hopper":
        why = next((why for name, why in zip("ab", no_tma, strict=True) if why and name not in plan.realigned), "")
        if why:
            raise ValueError(
                f"plan.run: {why}; make the plan with layout= and operands as these are, or backend='portable'"
            )
    if plan.backend == "cdna":
        from tilestream.launch.cdna.launch import GemmLaunch as CdnaLaunch

        for name, tensor in unaligned:
            raise ValueError(
                f"plan.run: {name} of strides {tuple(tensor.stride())}: a stride, an extent or an address is no "
                "multiple of 16; take backend='portable'"
            )
        aligned = out.data_ptr() % 16 == 0, residual is None or residual.data_ptr() % 16 == 0
        return CdnaLaunch(plan, layout, aligned)
    if plan.backend == "hopper":
        from tilestream.launch.hopper.launch import GemmLaunch as HopperLaunch

        at_16 = [tensor.data_ptr() % 16 == 0 for tensor in (a, b, out)]
        return HopperLaunch(plan, layout, at_16[2], (at_16[0], at_16[1]))
    from tilestream.launch.portable.launch import launch_of

    return launch_of(plan, layout)


def _by_tma(out: torch.Tensor, layout: Layout) -> bool:
    """Whether TMA can address the output."""
    batch, *strides = layout.out
    major = tma.store_major_of((out.shape[-2], out.shape[-1]), (strides[0], strides[1]), batch, out.element_size())
    return major is not None and out.data_ptr() % 16 == 0


def _no_tma(a: torch.Tensor, b: torch.Tensor, layout: Layout) -> tuple[str, str]:
    """Why TMA cannot address A, and why not B; empty if it can."""
    (ab, *a_strides), (bb, *b_strides) = layout.a, layout.b
    along_k, size = tma.k_major_only(a.element_size()), a.element_size()
    return (
        tma.refuse("a", a.shape[-2:], a_strides, ab, size, a.data_ptr(), 1 if along_k else None),
        tma.refuse("b", b.shape[-2:], b_strides, bb, size, b.data_ptr(), 0 if along_k else None),
    )


def _vector_of(x: torch.Tensor, lies: tuple[tuple[int, int], tuple[int, int], int, int]) -> int:
    """The operand's of `Problem.vectors`; ``lies``: what `is_aligned` is told of it."""
    from tilestream.launch.gemm_arguments import is_aligned

    return vector_of(x.element_size(), lambda width: is_aligned(*lies, width))


def _row_multiple(x: torch.Tensor, strides: tuple[int, int, int]) -> int:
    """Bytes that the beginnings of an operand's rows are multiples of."""
    batch, rows, columns = strides
    return tma.row_multiple(batch * x.element_size(), (rows if columns == 1 else columns) * x.element_size())


def _scale_strides(scale: torch.Tensor | None, dim: int) -> tuple[int, int]:
    """Strides from one batch, and from one row (column), to the next; 0 where one scale is for all."""
    if scale is None or scale.numel() == 1:
        return 0, 0
    return scale.stride(0) if scale.dim() == 3 and scale.shape[0] > 1 else 0, scale.stride(dim)


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Strides of ``[B, rows, columns]``. A single batch has stride 0, as a matrix has."""
    rows, cols = tensor.stride()[-2:]
    if tensor.dim() == 2 or tensor.shape[0] == 1:
        return 0, rows, cols
    return tensor.stride(0), rows, cols
