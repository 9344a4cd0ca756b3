"""What `tilestream.kernels.portable.attention.attention` is launched with, as far as a plan and a layout decide it."""

from __future__ import annotations

from typing import Any

from tilestream.kernels.attention_config import PortableAttentionConfig
from tilestream.launch.attention_arguments import AttentionLayout, Pack, Strides, config_fields, numbers, scales_of
from tilestream.launch.portable.arguments import registers
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.policy.portable import has_fp8_units
from tilestream.plan.problem import ITEMSIZE

_INT31 = 2**31
#: Columns of a head that the matrix units take at least.
_LEAST_COLUMNS = 16


class AttentionArguments:
    """The kernel's arguments for one plan and one layout, but for addresses and what changes from call to call.

    Attributes
    ----------
    options
        How the kernel is compiled.
    """

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout, trace: bool = False) -> None:
        self.plan, self.layout, self._trace = plan, layout, trace
        self.options = {"num_warps": plan.warps, "num_stages": plan.stages, **registers(plan.device.arch, plan.warps)}

    def scales(self, scale: float) -> tuple[float, float]:
        """The kernel's ``scale`` and ``softcap_scale`` for a scale of scores."""
        return scales_of(self.plan.problem, scale)

    def pack(self, kernel: Any) -> Pack:
        """How the kernel's arguments are packed."""
        s = self.layout
        strides = {
            f"stride_{x}{of}": value
            for x, each in (("q", s.q), ("k", s.k), ("v", s.v), ("o", s.out))
            for of, value in zip("brh", each, strict=True)
        } | {
            f"stride_s{x}{of}": value
            for x, each in (("q", s.scale_q), ("k", s.scale_k), ("v", s.scale_v))
            for of, value in zip("bh", each or (0, 0), strict=True)
        }
        batch_rows = {"batch_rows_k": 0, "batch_rows_v": 0}
        return Pack(kernel, {**numbers(self.plan, s), **strides, **batch_rows, "C": self.config()})

    def config(self) -> PortableAttentionConfig:
        """What is compiled in."""
        plan, layout, problem = self.plan, self.layout, self.plan.problem
        scaled = any(strides is not None for strides in (layout.scale_q, layout.scale_k))
        return PortableAttentionConfig(
            **config_fields(plan, self._trace),
            D=problem.head_dim,
            DV=problem.head_dim_v,
            BLOCK_D=padded(problem.head_dim),
            BLOCK_DV=padded(problem.head_dim_v),
            ALIGN=_alignment(problem.dtype, layout.q, layout.k, layout.v),
            ALIGN_OUT=_alignment(problem.out_dtype, layout.out),
            OFFSETS_64BIT=_offsets_64bit(plan, layout),
            POSITIVE=problem.positive and not scaled,
            PRECISION="tf32" if problem.dtype == "float32" and problem.tf32 else "ieee",
            CONVERT=problem.dtype == "float8_e4m3fn" and not has_fp8_units(plan.device.arch),
        )


def padded(columns: int) -> int:
    """Columns of a head as the matrix units see them: a power of two."""
    return max(_LEAST_COLUMNS, 1 << (columns - 1).bit_length())


def _alignment(dtype: str, *strides: Strides) -> int:
    """Elements of 16 bytes where strides are multiples of that, else 1. Of addresses Triton finds out by itself."""
    elements = 16 // ITEMSIZE[dtype]
    return elements if all(stride % elements == 0 for each in strides for stride in each) else 1


def _offsets_64bit(plan: AttentionPlan, layout: AttentionLayout) -> bool:
    """Whether an offset inside a tile or a block leaves 31 bits: never in a tensor that is not a strange view."""
    rows, heads = max(plan.block), plan.problem.heads_q
    each = (layout.q, layout.out, layout.k, layout.v)
    return any(rows * strides[1] + heads * strides[2] >= _INT31 for strides in each)
