"""Operations across GPUs, and across processes on the CPU, that overlap what they send with what they compute.

The public names. The protocols of this package, which `tilestream_tools.verify` explores, import no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tilestream.core.errors import GroupBroken

if TYPE_CHECKING:
    from tilestream.distributed.all_gather import all_gather_matmul, plan_all_gather_matmul
    from tilestream.distributed.all_reduce import matmul_all_reduce, plan_matmul_all_reduce
    from tilestream.distributed.async_tp import AsyncTP, async_tp
    from tilestream.distributed.modules import ColumnParallelLinear, RowParallelLinear
    from tilestream.distributed.reduce_scatter import matmul_reduce_scatter, plan_matmul_reduce_scatter

_LAZY = {
    "ColumnParallelLinear": "tilestream.distributed.modules",
    "RowParallelLinear": "tilestream.distributed.modules",
    "AsyncTP": "tilestream.distributed.async_tp",
    "async_tp": "tilestream.distributed.async_tp",
    "all_gather_matmul": "tilestream.distributed.all_gather",
    "matmul_all_reduce": "tilestream.distributed.all_reduce",
    "plan_matmul_all_reduce": "tilestream.distributed.all_reduce",
    "matmul_reduce_scatter": "tilestream.distributed.reduce_scatter",
    "plan_all_gather_matmul": "tilestream.distributed.all_gather",
    "plan_matmul_reduce_scatter": "tilestream.distributed.reduce_scatter",
}

__all__ = [
    "AsyncTP",
    "ColumnParallelLinear",
    "GroupBroken",
    "RowParallelLinear",
    "all_gather_matmul",
    "async_tp",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "plan_all_gather_matmul",
    "plan_matmul_all_reduce",
    "plan_matmul_reduce_scatter",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tilestream.distributed' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
