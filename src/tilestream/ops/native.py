"""Calls of the matmul ops and of attention that the native call path may know: see `tilestream.launch.native`.

`product` and `attention` ask it first. They do not ask where something between the caller and the kernel has to see the
call: a gradient, autocast, a mode, a transform, a compiler, a recording. Those calls go through the registered ops.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from tilestream.core.operands import ACTIVATIONS
from tilestream.launch.cache import PLAIN
from tilestream.launch.observe import Call, Observation
from tilestream.ops import inline
from tilestream.plan import limit as limits
from tilestream.plan.api import SCHEDULES
from tilestream.plan.attention_problem import LAYOUTS
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
_LAYOUTS: dict[object, int] = {name: i for i, name in enumerate(LAYOUTS)}
_DIAGONALS: dict[object, int] = {False: 0, True: 1, "bottom_right": 1, "top_left": 2}
#: Where each of attention's stands: a diagonal above 2 layouts, the rest above 4 diagonals.
_DIAGONAL, _LSE, _SCALED, _ROUNDED, _ORDER = 1, 3, 4, 5, 6
#: Where a call of attention has its output.
_OUT = 11
_NUMBERS = (float, int)


#: Attention is compared with Python's launches byte for byte, and has not run on a GPU this way: only where asked for.
ATTENTION = os.environ.get("TILESTREAM_NATIVE_ATTENTION") == "1"


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
    if torch.compiler.is_compiling():
        return None
    if _loaded.extension is None or not (isinstance(a, torch.Tensor) and a.is_cuda):
        return inline.product(
            op, a, b, out, bias, residual, alpha, beta, activation, out_dtype, scale_a, scale_b, fast_accum, schedule,
            workers,
        )  # fmt: skip
    arguments = _arguments(
        op, a, b, out, bias, residual, alpha, beta, activation, out_dtype, scale_a, scale_b, fast_accum, schedule,
        workers,
    )  # fmt: skip
    if arguments is None:
        return None
    check_device(a.get_device())
    try:
        if out is None:
            made: torch.Tensor | None = _loaded.extension.try_matmul(*arguments)
            return made
        return out if _loaded.extension.try_matmul_out(out, *arguments) else None
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None  # nothing was launched; what is wrong (no memory, say) is wrong Python's way, too, which says what


def attention(*call: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """The answer of `tilestream.attention`, launched by the extension; None for a call that goes Python's way.

    Parameters
    ----------
    call
        The fields of `tilestream.ops.attention_request.AttentionRequest` up to ``splits``, not checked yet.

    Raises
    ------
    ArrivalTimeout, Exception
        What an earlier launch on this device has reported: see `tilestream.check`.
    """
    extension = _loaded.extension
    if extension is None or not ATTENTION or torch.compiler.is_compiling():
        return None
    arguments = _attention_arguments(*call)
    if arguments is None:
        return None
    check_device(call[0].get_device())
    out = call[_OUT]
    try:
        if out is None:
            made, lse = extension.try_attention(*arguments)
        else:
            launched, lse = extension.try_attention_out(out, *arguments)
            made = out if launched else None
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None  # as in `product`
    return made if lse is None else (made, lse)


def wanted_attention(*call: Any) -> tuple[Any, ...] | None:
    """What the extension would be asked for a call with the parameters of `attention`; None if it is none for it."""
    if not ATTENTION or type(call[0]) not in PLAIN or _load() is None or torch.cuda.is_current_stream_capturing():
        return None
    return _attention_arguments(*call)


def wanted(op: str, a: Any, b: Any, *others: Any) -> tuple[Any, ...] | None:
    """What the extension would be asked for a call with the parameters of `product`; None if it is none for it."""
    # Asked before anything is loaded: a tensor that only looks like a GPU's needs no Triton.
    if op not in _OPS or type(a) not in PLAIN or type(b) not in PLAIN or _load() is None:
        return None
    return None if torch.cuda.is_current_stream_capturing() else _arguments(op, a, b, *others)


def remember(call: Call, into: bool, seen: Observation, arguments: tuple[Any, ...]) -> None:
    """Have the extension make the next equal call.

    Parameters
    ----------
    into
        Whether the caller gave the output.
    seen
        What was observed of this call.
    arguments
        What `wanted`, or `wanted_attention`, said.
    """
    result = call.operands["out"]
    if _loaded.extension is not None and seen.launches and result is not None:
        stream = torch._C._cuda_getCurrentRawStream(result.device.index)
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
    if out is not None and (type(out) not in PLAIN or out.is_neg() or (gradients and out.requires_grad)):
        return None
    limit = limits.limit()
    if (
        bias is residual is scale_a is scale_b is activation is out_dtype is workers is None
        and type(schedule) is str and schedule == "auto"
        and type(alpha) is type(beta) is float and alpha == beta == 1.0
        and fast_accum is True and not limit and a.dtype is not torch.float32
    ):  # fmt: skip
        return _OPS[op], a, b  # the schemas' defaults are left out: each argument costs time
    for x in (bias, residual, scale_a, scale_b):
        if x is not None and (type(x) not in PLAIN or (gradients and x.requires_grad)):
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
    if options or limit or workers or alpha != 1 or beta != 1 or residual is not None or scale_a is not None:
        return (
            _OPS[op], a, b, bias, residual, scale_a, scale_b, float(alpha), float(beta), options, workers or 0, limit
        )  # fmt: skip
    if scale_b is not None:
        return _OPS[op], a, b, bias, None, None, scale_b
    return (_OPS[op], a, b) if bias is None else (_OPS[op], a, b, bias)


def _attention_arguments(
    q: Any, k: Any, v: Any, sinks: Any, scale_q: Any, scale_k: Any, scale_v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    block_table: Any, seqlens_k: Any, out: Any, layout: Any, causal: Any, window: Any, softcap: Any, scale: Any,
    max_seqlen_q: Any, max_seqlen_k: Any, return_lse: Any, workers: Any, schedule: Any, splits: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Arguments of the extension's ops; None for a call that is none for it, or that may be wrong."""
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN or not q.is_cuda or not _unseen():
        return None
    gradients = torch.is_grad_enabled()
    if gradients and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    dense = (
        sinks is scale_q is scale_k is scale_v is cu_seqlens_q is cu_seqlens_k is block_table is seqlens_k is None
    )  # fmt: skip
    if not dense:
        for x in (sinks, scale_q, scale_k, scale_v, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k):
            if x is not None and (type(x) not in PLAIN or (gradients and x.requires_grad)):
                return None
    if out is not None and (type(out) not in PLAIN or out.is_neg() or (gradients and out.requires_grad)):
        return None
    if type(return_lse) is not bool or type(causal) not in (bool, str):
        return None
    try:
        options = (
            _LAYOUTS[layout] | _DIAGONALS[causal] << _DIAGONAL | return_lse << _LSE | _SCHEDULES[schedule] << _ORDER
        )
    except (KeyError, TypeError):
        return None
    if q.dtype is torch.float32 and allows_tf32():
        options |= 1 << _ROUNDED
    limit = limits.limit()
    if dense and not limit and window is softcap is scale is max_seqlen_q is max_seqlen_k is workers is splits is None:
        # The schemas' defaults are left out: each argument costs time.
        return (q, k, v, options) if options else (q, k, v)
    left = right = None
    if window is not None:
        if type(window) is not tuple or len(window) != 2:
            return None
        left, right = window
    least = ((left, -1), (right, -1), (max_seqlen_q, 0), (max_seqlen_k, 0), (workers, 1), (splits, 1))
    if any(number is not None and (type(number) is not int or number < lowest) for number, lowest in least):
        return None
    if scale is not None:
        options |= 1 << _SCALED
    if any(number is not None and type(number) not in _NUMBERS for number in (scale, softcap)) or softcap == 0:
        return None
    numbers = (-1 if number is None else number for number in (left, right, max_seqlen_q, max_seqlen_k))
    return (
        q, k, v, options, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, sinks, scale_q, scale_k, scale_v,
        float(scale or 0), float(softcap or 0), *numbers, workers or 0, splits or 0, limit,
    )  # fmt: skip


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
