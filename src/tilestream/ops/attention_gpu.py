"""GPU operands of attention to a launch. What a problem and a layout decide is looked up, not worked out."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, cast

import torch

from tilestream.arrival.flat import Awaited, FlatArrival
from tilestream.core.operands import Operands
from tilestream.ops.attention_operands import Settings, Tensors, problem_of
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.policy.hopper_attention import refuse_strides
from tilestream.runtime.channel import check_device
from tilestream.runtime.properties import allows_tf32, context_units, cuda_properties
from tilestream.trace.record import current

if TYPE_CHECKING:
    from tilestream.launch.attention_arguments import AttentionLayout
    from tilestream.launch.cdna.attention_launch import CdnaAttentionLaunch
    from tilestream.launch.hopper.attention_launch import HopperAttentionLaunch
    from tilestream.launch.portable.attention_launch import AttentionLaunch
    from tilestream.plan.attention_plan import AttentionPlan

    AnyLaunch: TypeAlias = AttentionLaunch | CdnaAttentionLaunch | HopperAttentionLaunch

logger = logging.getLogger(__name__)

#: Launches made so far. They hold plans and compiled kernels, no tensor of a caller.
_launches: dict[object, AnyLaunch] = {}
_MOST_LAUNCHES = 4096


def run(operands: Operands, t: Tensors, s: Settings, keys: FlatArrival | None, deadline: float, limit: int = 0) -> None:
    """Issue attention on the current stream of the operands' device.

    Returns when the launch is issued. What an earlier one on this device has reported is raised instead.

    Parameters
    ----------
    keys
        How keys and values arrive; None where they are there.
    deadline
        Seconds that the kernel may wait for them.
    limit
        On the workers: see `tilestream.plan.limit`.

    Raises
    ------
    ArrivalTimeout, Exception
        What an earlier launch on this device has reported: see `tilestream.check`.
    """
    device = operands.q.device
    check_device(device.index)
    if keys is None and not operands.out.numel():
        return
    launch = find(operands, t, s, keys, limit)
    awaited = Awaited.of(keys, None, deadline, "attention", device)
    if awaited is not None and awaited.rows.by_matmul:  # they may be of that matmul's stream
        for operand in (operands.k, operands.v):
            operand.record_stream(torch.cuda.current_stream(device))
    if device.index == torch.cuda.current_device():
        _issue(launch, operands, awaited)
    else:
        with torch.cuda.device(device):
            _issue(launch, operands, awaited)


def _issue(launch: AnyLaunch, operands: Operands, awaited: Awaited | None) -> None:
    """Launch; where somebody records, with a log of who did which item when."""
    recorder = current()
    if recorder is None:
        launch(operands, awaited)
        return
    from tilestream.launch.trace import traced, untraced

    if why := untraced(launch.plan.backend):
        logger.warning("attention: %s", why)
        launch(operands, awaited)
        return
    writes = cast("AttentionLaunch | HopperAttentionLaunch", launch)
    traced(recorder, "attention", launch.plan, operands.q.device, lambda log: writes(operands, awaited, log))


def find(x: Operands, t: Tensors, s: Settings, keys: FlatArrival | None, limit: int = 0) -> AnyLaunch:
    """The launch for such operands: an earlier one's, or a new one. Parameters as of `run`."""
    key = (
        *((y.shape, y.stride(), y.data_ptr() % 16) for y in (x.q, x.k, x.v, x.out)), x.q.dtype, x.q.device,
        None if x.lse is None else x.lse.stride(),
        *(None if y is None else (y.shape, y.stride()) for y in t[3:]),
        context_units(x.q.device.index) if x.q.device.type == "cuda" else 0,  # a plan is for so many
        s, limit, x.q.dtype == torch.float32 and allows_tf32(), None if keys is None else keys.chunking,
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = _make(x, t, s, keys, limit)
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    return launch


def _make(x: Operands, t: Tensors, s: Settings, keys: FlatArrival | None, limit: int) -> AnyLaunch:
    # Triton is imported when a GPU computes something, not before.
    device = cuda_properties(x.q.device.index)
    tf32 = x.q.dtype == torch.float32 and device.arch.startswith("sm_") and allows_tf32()
    layout = layout_of(x)
    problem = problem_of(t, s, keys, tf32=tf32)
    no_tma = refuse_strides(problem, layout.q, layout.k, layout.v, layout.out, x.out.data_ptr() % 16)
    plan = plan_attention(
        replace(problem, no_tma=no_tma), s.workers or None, s.schedule, device=device, limit=limit,
        splits=s.splits or None,
    )  # fmt: skip
    return launch_of(plan, layout, x.out.data_ptr() % 16 == 0)


def launch_of(plan: AttentionPlan, layout: AttentionLayout, aligned: bool = True) -> AnyLaunch:
    """The launch of a plan's backend. ``aligned``: whether the output's address is a multiple of 16."""
    if plan.backend == "cdna":
        from tilestream.launch.cdna.attention_launch import CdnaAttentionLaunch

        return CdnaAttentionLaunch(plan, layout, aligned)
    if plan.backend == "hopper":
        from tilestream.launch.hopper.attention_launch import HopperAttentionLaunch

        return HopperAttentionLaunch(plan, layout)
    from tilestream.launch.portable.attention_launch import AttentionLaunch

    return AttentionLaunch(plan, layout)


def layout_of(x: Operands) -> AttentionLayout:
    """The strides of canonical operands."""
    from tilestream.launch.attention_arguments import AttentionLayout

    lse = None
    if x.lse is not None:  # [B, H, S], packed [T, H]
        batch, head, row = x.lse.stride() if x.lse.dim() == 3 else (0, x.lse.stride(1), x.lse.stride(0))
        lse = (batch, row, head)
    scales = (
        None if scale is None else (scale.stride(0), scale.stride(1)) for scale in (x.scale_q, x.scale_k, x.scale_v)
    )
    table = 0 if x.block_table is None else x.block_table.stride(0)
    q, k, v, out = (_strides(y) for y in (x.q, x.k, x.v, x.out))
    return AttentionLayout(q, k, v, out, lse, table, *scales)


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """From one batch (page), row and head to the next."""
    *first, row, head, _ = tensor.stride()
    return (first[0] if first else 0), row, head
