"""Matmuls that overlap with a collective, between GPUs, and between processes on the CPU: the public names."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tilestream.core.errors import GroupBroken

if TYPE_CHECKING:
    from tilestream.distributed.api import (
        all_gather_matmul,
        matmul_all_reduce,
        matmul_reduce_scatter,
        plan_all_gather_matmul,
        plan_matmul_all_reduce,
        plan_matmul_reduce_scatter,
    )
    from tilestream.distributed.async_tp import AsyncTP, async_tp
    from tilestream.distributed.modules import ColumnParallelLinear, RowParallelLinear
    from tilestream.distributed.moe import moe, plan_moe

_MODULES = {
    "tilestream.distributed.modules": ("ColumnParallelLinear", "RowParallelLinear"),
    "tilestream.distributed.async_tp": ("AsyncTP", "async_tp"),
    "tilestream.distributed.moe": ("moe", "plan_moe"),
    "tilestream.distributed.api": (
        "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "plan_all_gather_matmul",
        "plan_matmul_all_reduce", "plan_matmul_reduce_scatter",
    ),
}  # fmt: skip
_LAZY = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AsyncTP", "ColumnParallelLinear", "GroupBroken", "RowParallelLinear", "all_gather_matmul", "async_tp",
    "matmul_all_reduce", "matmul_reduce_scatter", "moe", "plan_all_gather_matmul", "plan_matmul_all_reduce",
    "plan_matmul_reduce_scatter", "plan_moe",
]  # fmt: skip


class _Package(ModuleType):
    """`moe` and `async_tp` stay functions: an import of the module of such a name binds the module to it."""

    def __setattr__(self, name: str, value: Any) -> None:
        function = getattr(value, name, None) if isinstance(value, ModuleType) and name in _LAZY else None
        super().__setattr__(name, value if function is None else function)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tilestream.distributed' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
