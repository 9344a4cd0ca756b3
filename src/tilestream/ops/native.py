"""Calls of the matmul ops that the native call path may know: see `tilestream.launch.native`.

`product` asks it first. It does not ask where something between the caller and the kernel would have to see the call: a
gradient, autocast, a mode, a transform, a compiler, a recording. Those calls go through the registered ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from tilestream.core.operands import ACTIVATIONS
from tilestream.launch.cache import PLAIN
from tilestream.launch.observe import Call, Observation
from tilestream.plan import limit as limits
from tilestream.plan.api import SCHEDULES
from tilestream.runtime.channel import check_device
from tilestream.runtime.properties import allows_tf32
from tilestream.trace.record import current

if TYPE_CHECKING:
    from tilestream.launch.native import Extension

_OPS = {name: i for i, name in enumerate(("matmul", "mm", "bmm", "addmm", "linear"))}
_ACTIVATIONS: dict[object, int] = {None: 0, **{name: i for i, name in enumerate(ACTIVATIONS) if i}}
_SCHEDULES: dict[object, int] = {"auto": 0, **{name: i for i, name in enumerate(SCHEDULES, 1) if name != "auto"}}
_DTYPES: dict[object, int] = {
    None: 0, torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float64: 4,
}  # fmt: skip
#: Where each stands in the integer of options: a schedule above 16 activations, a dtype above 16 schedules.
_SCHEDULE, _DTYPE, _SLOW_ACCUM, _TF32 = 4, 8, 16, 17
_NUMBERS = (float, int)


class _Loaded:
    """The extension, once a GPU has computed something; and whether a profiler watches Triton's launches."""

    asked = False
    extension: Extension | None = None
    watched: Callable[[], bool]


_loaded = _Loaded()


def _load() -> Extension | None:
    if not _loaded.asked:
        # Triton is imported when a GPU computes something, not before.
        from tilestream.launch.launcher import watched
        from tilestream.launch.native import extension

        _loaded.watched = watched
        _loaded.extension = extension()
        _loaded.asked = True
    return _loaded.extension


def product(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    fast_accum: bool = True,
    schedule: str = "auto",
    workers: int | None = None,
) -> torch.Tensor | None:
    """The result, launched by the extension; None for a call that goes Python's way.

    Parameters
    ----------
    op
        The public op; of ``linear``, ``b`` is the weight. The others are the public op's own, not checked yet.

    Raises
    ------
    ArrivalTimeout, Exception
        What an earlier launch on this device has reported: see `tilestream.check`.
    """
    if torch.compiler.is_compiling() or _loaded.extension is None:
        return None
    arguments = _arguments(
        op, a, b, out, bias, residual, alpha, beta, activation, out_dtype, scale_a, scale_b, fast_accum, schedule,
        workers,
    )  # fmt: skip
    if arguments is None:
        return None
    check_device(a.device.index)
    try:
        if out is None:
            made: torch.Tensor | None = _loaded.extension.try_matmul(*arguments)
            return made
        return out if _loaded.extension.try_matmul_out(out, *arguments) else None
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None  # nothing was launched; what is wrong (no memory, say) is wrong Python's way, too, which says what


def wanted(op: str, a: Any, b: Any, *others: Any) -> tuple[Any, ...] | None:
    """What the extension would be asked for a call with the parameters of `product`; None if it is none for it."""
    if op not in _OPS or _load() is None or torch.cuda.is_current_stream_capturing():
        return None
    return _arguments(op, a, b, *others)


def remember(call: Call, into: bool, seen: Observation, arguments: tuple[Any, ...]) -> None:
    """Have the extension make the next equal call.

    Parameters
    ----------
    into
        Whether the caller gave the output.
    seen
        What was observed of this call.
    arguments
        What `wanted` said.
    """
    device = arguments[1].device
    if _loaded.extension is not None and seen.launches:
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        _loaded.extension.remember(seen, call, stream, into, arguments)


def _arguments(
    op: str, a: Any, b: Any, out: Any, bias: Any, residual: Any, alpha: Any, beta: Any, activation: Any,
    out_dtype: Any, scale_a: Any, scale_b: Any, fast_accum: Any, schedule: Any, workers: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Arguments of the extension's ops; None for a call that is none for it, or that may be wrong."""
    if type(a) not in PLAIN or type(b) not in PLAIN or not a.is_cuda or not _unseen():
        return None
    gradients = torch.is_grad_enabled()
    if gradients and (a.requires_grad or b.requires_grad):
        return None
    for x in (bias, residual, scale_a, scale_b, out):
        if x is not None and (type(x) not in PLAIN or (gradients and x.requires_grad)):
            return None
    if out is not None and out.is_neg():
        return None
    try:
        options = _ACTIVATIONS[activation] | _SCHEDULES[schedule] << _SCHEDULE | _DTYPES[out_dtype] << _DTYPE
    except (KeyError, TypeError):
        return None
    if type(alpha) not in _NUMBERS or type(beta) not in _NUMBERS or type(fast_accum) is not bool:
        return None
    if workers is not None and (type(workers) is not int or workers < 1):
        return None
    options |= (not fast_accum) << _SLOW_ACCUM
    if a.dtype is torch.float32 and allows_tf32():
        options |= 1 << _TF32
    limit = limits.limit()
    if options or limit or workers or alpha != 1 or beta != 1 or residual is not None or scale_a is not None:
        return (
            _OPS[op], a, b, bias, residual, scale_a, scale_b, float(alpha), float(beta), options, workers or 0, limit
        )  # fmt: skip
    # The schemas' defaults are left out: each argument costs time.
    if scale_b is not None:
        return _OPS[op], a, b, bias, None, None, scale_b
    return (_OPS[op], a, b) if bias is None else (_OPS[op], a, b, bias)


def _unseen() -> bool:
    """Whether nothing but torch's dispatcher would see a call of this thread."""
    return not (
        current() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cuda")
        or forward_ad._current_level >= 0
        or _loaded.watched()
    )
