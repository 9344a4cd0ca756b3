"""GPU kernels that stay resident and take work as it becomes possible: the public names.

Names that compute import torch, on first use. Schedules, plans and the checker do not need it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from tilestream import distributed, schedule, trace
from tilestream._version import __version__
from tilestream.arrival.arrival import Arrival
from tilestream.arrival.by_source import SourceArrival
from tilestream.core.errors import ArrivalTimeout, GroupBroken, ProducerStopped, TilestreamError
from tilestream.plan import Plan, attention_plan, grouped_plan, plan
from tilestream.plan.hooks import register as _register
from tilestream.runtime.collector import paused as _collector_paused
from tilestream.runtime.shutdown import call as _inside_at_exit

if TYPE_CHECKING:
    from tilestream.arrival.experts import stream_experts
    from tilestream.arrival.stream import Stream, stream_in
    from tilestream.ops import (
        addmm,
        attention,
        bmm,
        grouped_mm,
        linear,
        matmul,
        merge_attention,
        mm,
        register_attention,
        use_attention,
        use_invariant_torch,
    )
    from tilestream.ops.limit import invariant, worker_limit
    from tilestream.runtime.channel import check

_MODULES = {
    "tilestream.arrival.experts": ("stream_experts",),
    "tilestream.arrival.stream": ("Stream", "stream_in"),
    "tilestream.ops": (
        "addmm", "attention", "bmm", "grouped_mm", "linear", "matmul", "merge_attention", "mm", "register_attention",
        "use_attention", "use_invariant_torch",
    ),
    "tilestream.ops.limit": ("invariant", "worker_limit"),
    "tilestream.runtime.channel": ("check",),
}  # fmt: skip
_LAZY = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Arrival", "ArrivalTimeout", "GroupBroken", "Plan", "ProducerStopped", "SourceArrival", "Stream", "TilestreamError",
    "__version__", "addmm", "attention", "attention_plan", "bmm", "check", "distributed", "grouped_mm", "grouped_plan",
    "invariant", "linear", "matmul", "merge_attention", "mm", "plan", "register_attention", "schedule",
    "stream_experts", "stream_in", "trace", "use_attention", "use_invariant_torch", "worker_limit",
]  # fmt: skip


def _run_plan(*operands: Any, **options: Any) -> Any:
    import torch

    from tilestream.ops.execute import run_plan, uncompiled_run_plan

    return (uncompiled_run_plan() if torch.compiler.is_compiling() else run_plan)(*operands, **options)


def _cuda_properties(index: int | None) -> Any:
    from tilestream.runtime.properties import cuda_properties

    return cuda_properties(index)


def _allows_tf32() -> bool:
    from tilestream.runtime.properties import allows_tf32

    return allows_tf32()


# `tilestream.plan` is the function; what else the subpackage of that name has is an attribute of it.
_package = sys.modules["tilestream.plan"]
vars(plan).update({name: getattr(_package, name) for name in _package.__all__ if name != "plan"})
_register(run_plan=_run_plan, cuda_properties=_cuda_properties, allows_tf32=_allows_tf32)


def _prepare() -> None:
    """If the process already uses a GPU, begin the work that its first launch waits for."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and importlib.util.find_spec("triton") is not None:
        from tilestream.launch.compiling import prepare

        prepare()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tilestream' has no attribute {name!r}")
    with _inside_at_exit(), _collector_paused():  # a thread that imports torch's modules is inside its C++ code, too
        value = getattr(importlib.import_module(_LAZY[name]), name)
        _prepare()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
