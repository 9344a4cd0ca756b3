"""From canonical operands of attention on a GPU to a cached launch, as `tilestream.ops.gpu` for matmul."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tilestream.arrival.flat import Awaited, FlatArrival
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import AttentionOperands
from tilestream.launch.cache import launch_cache, signature
from tilestream.ops.attention_operands import Settings, problem_of
from tilestream.ops.gpu import awaited_ahead, issue
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.policy.hopper_attention import refuse_strides
from tilestream.runtime import collector
from tilestream.runtime.channel import check_device
from tilestream.runtime.properties import allows_tf32, cuda_properties

if TYPE_CHECKING:
    from tilestream.launch.attention_arguments import AttentionLayout
    from tilestream.launch.launch import Launch
    from tilestream.plan.attention_plan import AttentionPlan


def run(x: AttentionOperands, s: Settings, keys: FlatArrival | None, deadline: float, limit: int = 0) -> None:
    """Issue attention on the current stream of the operands' device.

    Returns when the launch is issued. Raises the error of an earlier launch on this device. ``keys``: how keys and
    values arrive; ``deadline``: seconds that the kernel may wait for them; ``limit``: of workers.
    """
    device = x.q.device
    check_device(device.index)
    awaited = Awaited.of(keys, None, deadline, "attention", device)
    if awaited is None and not x.out.numel():
        return
    launch = find(x, s, keys, limit)
    if awaited is not None and awaited.rows.by_matmul:  # that matmul may have allocated them on its own stream
        for operand in (x.k, x.v):
            operand.record_stream(torch.cuda.current_stream(device))
    issue(launch, x, awaited, "attention")


def find(x: AttentionOperands, s: Settings, keys: FlatArrival | None = None, limit: int = 0) -> Launch:
    """The launch for such operands, from the cache or a new one. Parameters as of `run`."""
    tensors = (*x.inputs(), x.out, x.lse)
    key = signature("attention", tensors, (s, None if keys is None else keys.chunking), limit)
    launch: Any = launch_cache.get(key)
    if launch is None:
        generation = launch_cache.generation
        with collector.paused():  # the first launch imports the kernels
            launch = launch_cache.insert(key, _make(x, s, keys, limit), generation)
    return launch  # type: ignore[no-any-return]


def compile_ahead(
    x: AttentionOperands, s: Settings, limit: int, device: DeviceProperties, keys: FlatArrival | None = None
) -> None:
    """`tilestream.ops.gpu.compile_ahead` for attention."""
    _make(x, s, keys, limit, device)(x, awaited_ahead(keys))


def _make(
    x: AttentionOperands, s: Settings, keys: FlatArrival | None, limit: int, device: DeviceProperties | None = None
) -> Launch:
    # The first GPU call imports Triton, not `import tilestream`.
    from tilestream.launch import compiling

    compiling.prepare()
    device = device or cuda_properties(x.q.device.index)
    tf32 = x.q.dtype == torch.float32 and device.arch.startswith("sm_") and allows_tf32()
    layout, problem = layout_of(x), problem_of(x, s, keys, tf32=tf32)
    no_tma = refuse_strides(problem, layout.q, layout.k, layout.v, layout.out, x.out.data_ptr() % 16)
    plan = plan_attention(
        replace(problem, no_tma=no_tma), s.workers or None, s.schedule, device=device, limit=limit,
        splits=s.splits or None,
    )  # fmt: skip
    return launch_of(plan, layout, x.out.data_ptr() % 16 == 0)


def launch_of(plan: AttentionPlan, layout: AttentionLayout, aligned: bool = True) -> Launch:
    """The launch of a plan's backend. ``aligned``: whether the output's address is a multiple of 16."""
    if plan.backend == "cdna":
        from tilestream.launch.cdna.attention_launch import CdnaAttentionLaunch

        return CdnaAttentionLaunch(plan, layout, aligned)
    if plan.backend == "hopper":
        if plan.strips:
            from tilestream.launch.hopper.attention_strips import StripLaunch

            return StripLaunch(plan, layout)
        from tilestream.launch.hopper.attention_launch import HopperAttentionLaunch

        return HopperAttentionLaunch(plan, layout)
    from tilestream.launch.portable.attention_launch import AttentionLaunch

    return AttentionLaunch(plan, layout)


def layout_of(x: AttentionOperands) -> AttentionLayout:
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
    """Strides from one batch (page), row and head to the next."""
    *first, row, head, _ = tensor.stride()
    return (first[0] if first else 0), row, head
