"""A Gluon layout's own map, asked of Triton without a GPU: which element lies where, which lane holds what."""

from __future__ import annotations

import functools
from typing import Any

from triton._C.libtriton import gluon_ir, ir
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget


@functools.cache
def _builder() -> Any:
    context = ir.context()
    ir.load_dialects(context)
    HIPBackend(GPUTarget("hip", "gfx942", 64)).load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    builder.create_module()
    _kept.append(context)  # the builder does not keep it
    return builder


_kept: list[Any] = []


def linear(layout: Any, shape: list[int]) -> Any:
    """The linear map of a layout, as `gl.to_linear_layout` has it in a kernel."""
    return _builder().to_linear_layout(layout._to_ir(_builder()), shape)


def sums(bases: list[list[int]]) -> list[tuple[int, int]]:
    """Of each index the exclusive or of the bases of its bits."""
    points = [(0, 0)]
    for row, column in bases:
        points += [(r ^ row, c ^ column) for r, c in points]
    return points


def elements(layout: Any, shape: list[int]) -> list[tuple[int, int]]:
    """Of a shared layout: the element ``(row, column)`` at each offset."""
    return sums(linear(layout, shape).offset_bases)


def holdings(layout: Any, shape: list[int]) -> list[list[list[tuple[int, int]]]]:
    """Of a distributed layout, by warp, lane and register: the element."""
    made = linear(layout, shape)
    registers, lanes, warps = sums(made.reg_bases), sums(made.lane_bases), sums(made.warp_bases)
    return [[[(w[0] ^ n[0] ^ r[0], w[1] ^ n[1] ^ r[1]) for r in registers] for n in lanes] for w in warps]
