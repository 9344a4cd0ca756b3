"""The native call path of products, grouped products, attention and its merge: see `tilestream.launch.native`.

`product`, `grouped`, `attention` and `merge` ask the extension for the launch of an earlier equal call. They do not ask
where something between the caller and the kernel has to see the call: a gradient, a mode, a transform, a compiler, a
recording. Such calls go through the registered ops. Under autocast the operands are converted before the extension is
asked.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from numbers import Real
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import is_grad_enabled
from torch._C import _increment_version
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tilestream.core.operands import ACTIVATIONS, HALVES
from tilestream.launch.observe import PRODUCTS, Call, Observation, observe
from tilestream.ops import inline
from tilestream.ops.checks import FLOAT32_MAX, autocast, below_autocast
from tilestream.ops.inline import PLAIN
from tilestream.ops.operands import is_frozen
from tilestream.plan import limit as limits
from tilestream.plan.api import SCHEDULES
from tilestream.plan.attention_problem import LAYOUTS
from tilestream.runtime import shutdown
from tilestream.runtime.channel import check_device
from tilestream.runtime.properties import allows_tf32
from tilestream.trace.record import current

if TYPE_CHECKING:
    from tilestream.launch.native import Extension

_OPS = {name: i for i, name in enumerate(PRODUCTS)}
_ACTIVATIONS: dict[object, int] = {None: 0, **{name: i for i, name in enumerate((*ACTIVATIONS, *HALVES)) if i}}
_SCHEDULES: dict[object, int] = {"auto": 0, **{name: i for i, name in enumerate(SCHEDULES, 1) if name != "auto"}}
_DTYPES: dict[object, int] = {
    None: 0, torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float64: 4,
}  # fmt: skip
#: Bit offsets in the integer of options. Activations and schedules take 4 bits each.
_SCHEDULE, _DTYPE, _SLOW_ACCUM, _TF32, _TURNED = 4, 8, 16, 17, 18
_LAYOUTS: dict[object, int] = {name: i for i, name in enumerate(LAYOUTS)}
_DIAGONALS: dict[object, int] = {False: 0, True: 1, "bottom_right": 1, "top_left": 2}
#: Bit offsets in attention's integer of options. The layout takes 1 bit, the diagonal 2.
_DIAGONAL, _LSE, _SCALED, _ROUNDED, _ORDER, _CANONICAL = 1, 3, 4, 5, 6, 10
#: The tensors of `attention`, in order.
INPUTS = (
    "q", "k", "v", "sinks", "scale_q", "scale_k", "scale_v", "cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k",
)  # fmt: skip
_NUMBERS = (float, int)
_is_autocast_enabled, _autocast_dtype = torch._C._is_any_autocast_enabled, torch.get_autocast_dtype
#: Errors of the extension, which then has launched nothing. The Python path raises the same error with its own text.
REFUSALS = (RuntimeError, TypeError, ValueError, OverflowError)
#: The files whose functions call the extension.
FILES = {__file__}

Pair = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")


class _Loaded:
    """The extension, which the first GPU call loads; ``watched`` says whether a profiler hooks Triton's launches."""

    asked = False
    extension: Extension | None = None
    watched: Callable[[], bool]

    def stop_at_exit(self, timeout: float) -> None:
        """Keep threads out of the extension, and wait for those inside: see `tilestream.runtime.shutdown`."""
        self.extension = None
        end = time.monotonic() + timeout
        while _is_called_elsewhere() and time.monotonic() < end:
            time.sleep(0.001)


_loaded = _Loaded()


def _load() -> Extension | None:
    if not _loaded.asked:
        # The first GPU call imports Triton, not `import tilestream`.
        from tilestream.launch.launcher import watched
        from tilestream.launch.native import extension

        _loaded.watched = watched
        _loaded.extension = extension()
        _loaded.asked = True
        if _loaded.extension is not None:
            shutdown.register(_loaded)
    return _loaded.extension


def is_watched() -> bool:
    """Whether a profiler hooks Triton's launches. Asked when the extension is loaded."""
    return _loaded.watched()


def loaded() -> Extension | None:
    """The extension; None before `wanted` or `wanted_attention` has loaded it."""
    return _loaded.extension


def _is_called_elsewhere() -> bool:
    """Whether another thread runs a function of `FILES`, which may be inside the extension."""
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top
        while frame is not None and thread != threading.get_ident():
            if frame.f_code.co_filename in FILES:
                return True
            frame = frame.f_back
    return False


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
    """The product, launched by the extension, on the CPU by `inline`; None if no earlier call equals this one.

    Parameters
    ----------
    op
        The public op. For ``linear``, ``b`` is the weight. All other arguments are the caller's, not checked yet.

    Raises
    ------
    ArrivalTimeout, Exception
        The error of an earlier launch on this device: see `tilestream.check`.
    """
    if is_compiling():  # first: torch.compile would guard on everything read before it
        return None
    extension = _loaded.extension
    if extension is None or _is_seen(a, b, out, bias):
        return inline.product(
            op, a, b, out, bias, residual, alpha, beta, activation, out_dtype, scale_a, scale_b, fast_accum, schedule,
            workers,
        )  # fmt: skip
    if _is_autocast_enabled():
        others = residual, alpha, beta, activation, out_dtype, scale_a, scale_b, fast_accum, schedule, workers
        a, b = _converted(op, a, b)
        with below_autocast():
            return product(op, a, b, out, bias, *others)
    arguments: tuple[Any, ...] | None = a, b, bias
    call, into = extension.try_plain[op], extension.try_plain_out[op]
    if not (
        residual is scale_a is scale_b is None and activation is None and out_dtype is None and workers is None
        and schedule == "auto" and type(alpha) is type(beta) is float and alpha == beta == 1.0 and fast_accum is True
        and a.dtype is not torch.float32 and not limits.limit()
    ):  # fmt: skip
        arguments = _arguments(
            op, a, b, bias, residual, alpha, beta, activation, out_dtype, scale_a, scale_b, fast_accum, schedule,
            workers,
        )  # fmt: skip
        call, into = extension.try_matmul, extension.try_matmul_out
    if arguments is None:
        return None
    check_device(a.get_device())
    try:
        if out is None:
            made: torch.Tensor | None = call(*arguments)
            return made
        if into(out, *arguments):
            _increment_version((out,))
            return out
    except REFUSALS:
        pass
    return None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, scale_q: torch.Tensor | None,
    scale_k: torch.Tensor | None, scale_v: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None, block_table: torch.Tensor | None, seqlens_k: torch.Tensor | None,
    out: torch.Tensor | None, layout: str, causal: bool | str, window: Any, softcap: float | None, scale: float | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, return_lse: bool, workers: int | None, schedule: str,
    splits: int | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """The result of `tilestream.attention`, launched by the extension; None if no earlier call equals this one.

    Parameters
    ----------
    q, ..., splits
        The fields of `tilestream.ops.attention_request.AttentionRequest` up to ``splits``, not checked yet.

    Raises
    ------
    ArrivalTimeout, Exception
        The error of an earlier launch on this device: see `tilestream.check`.
    """
    if is_compiling():  # first, as in `product`
        return None
    extension = _loaded.extension
    if extension is None or _is_seen(q, k, out, v):
        if not (
            sinks is scale_q is scale_k is scale_v is cu_seqlens_q is cu_seqlens_k is block_table is seqlens_k is window
            is softcap is max_seqlen_q is max_seqlen_k is workers is splits is None
        ):  # fmt: skip
            return None
        return inline.attention(q, k, v, out, layout, causal, scale, return_lse, schedule)
    if _is_autocast_enabled():
        others = scale_q, scale_k, scale_v, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, out, layout, causal
        more = window, softcap, scale, max_seqlen_q, max_seqlen_k, return_lse, workers, schedule, splits
        q, k, v = _converted("attention", q, k, v)
        with below_autocast():
            return attention(q, k, v, sinks, *others, *more)
    arguments: tuple[Any, ...] | None
    plain = (
        sinks is scale_q is scale_k is scale_v is cu_seqlens_q is cu_seqlens_k is block_table is seqlens_k is None
        and window is softcap is scale is max_seqlen_q is max_seqlen_k is workers is splits is None
        and return_lse is False and schedule == "auto" and q.dtype is not torch.float32 and not limits.limit()
    )  # fmt: skip
    if plain:
        options = _options_of_mask(layout, causal)
        arguments = None if options is None else (q, k, v, options)
    else:
        arguments = _attention_arguments(
            q, k, v, sinks, scale_q, scale_k, scale_v, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, layout,
            causal, window, softcap, scale, max_seqlen_q, max_seqlen_k, return_lse, workers, schedule, splits,
        )  # fmt: skip
    if arguments is None:
        return None
    check_device(q.get_device())
    lse = None
    try:
        if plain and out is None:
            made = extension.try_plain_attention(*arguments)
        elif plain:
            made = out if extension.try_plain_attention_out(out, *arguments) else None
        elif out is None:
            made, lse = extension.try_attention(*arguments)
        else:
            launched, lse = extension.try_attention_out(out, *arguments)
            made = out if launched else None
    except REFUSALS:
        return None
    if made is not None and out is not None:
        _increment_version((out,))
    return made if lse is None else (made, lse)


def merge(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor, layout: str) -> Pair | None:
    """The result of `tilestream.merge_attention`, launched by the extension; None if no earlier call equals this one.

    Errors as for `attention`.
    """
    if is_compiling():
        return None
    extension = _loaded.extension
    if extension is None or _is_seen(o_a, o_b, lse_a, lse_b):
        return None
    if _is_autocast_enabled():  # autocast converts nothing of a merge
        with below_autocast():
            return merge(o_a, lse_a, o_b, lse_b, layout)
    check_device(o_a.get_device())
    try:
        out, lse = extension.try_merge_attention(o_a, lse_a, o_b, lse_b, _LAYOUTS[layout])
    except (KeyError, *REFUSALS):
        return None
    return None if out is None else (out, lse)


def grouped(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None, out: torch.Tensor | None, bias: torch.Tensor | None,
    activation: str | None, out_dtype: torch.dtype | None, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None,
    fast_accum: bool, schedule: str, workers: int | None,
) -> torch.Tensor | None:  # fmt: skip
    """The answer of `tilestream.grouped_mm`, launched by the extension; None for a call that goes Python's way.

    Parameters are those of the public op, not checked yet; errors as of `product`.
    """
    if is_compiling():
        return None
    extension = _loaded.extension
    if extension is None or _is_seen(a, b, out, bias):
        return None
    arguments = _grouped_arguments(
        a, b, offsets, bias, activation, out_dtype, scale_a, scale_b, fast_accum, schedule, workers
    )
    if arguments is None:
        return None
    check_device(a.get_device())
    try:
        if out is None:
            made: torch.Tensor | None = extension.try_grouped(*arguments)
            return made
        if extension.try_grouped_out(out, *arguments):
            _increment_version((out,))
            return out
    except REFUSALS:
        pass
    return None


def _converted(op: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands in autocast's dtype."""
    dtype = _autocast_dtype("cuda")
    for x in tensors:
        if x.dtype is not dtype:
            return autocast(op, False, *tensors)
    return tensors


def observed(call: tuple[Any, ...], run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run a call on the Python path; the extension, on the CPU `inline`, launches the next equal one.

    Parameters
    ----------
    call
        The arguments of `product`, which has returned None.
    run
        Runs the call on the Python path.
    """
    if not call[1].is_cuda:
        return inline.first_product(call, run)
    arguments = wanted(*call)
    if arguments is None:
        return run()
    with observe() as seen:
        result = run()
    _, a, b, out, bias, residual, alpha, beta, _, _, scale_a, scale_b, *_ = call
    operands = {
        "a": a, "b": b, "out": result, "bias": bias, "residual": residual, "scale_a": scale_a, "scale_b": scale_b,
    }  # fmt: skip
    remember(Call(operands, (float(alpha), float(beta))), out is not None, seen, arguments)
    return result


def observed_attention(call: tuple[Any, ...], run: Callable[[], T], canonical: bool = False) -> T:
    """`observed` for a call of `attention`, or of the registered op, whose operands are ``canonical``."""
    arguments = wanted_attention(*call)
    if arguments is None:
        return run()
    with observe() as seen:
        answer = run()
    arguments = _of_op(arguments) if canonical else arguments
    remember(Call(operands_of(call, answer)), call[len(INPUTS)] is not None, seen, arguments)
    return answer


def operands_of(call: tuple[Any, ...], answer: Any) -> dict[str, torch.Tensor | None]:
    """The operands and outputs of a call of `attention`, by name."""
    outputs = answer if isinstance(answer, tuple) else (answer, None)
    return dict(zip((*INPUTS, "out", "lse"), (*call[: len(INPUTS)], *outputs), strict=True))


def observed_grouped(call: tuple[Any, ...], run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """As `observed`: a call of `grouped`."""
    a, b, offsets, out, bias, *others = call
    if type(a) not in PLAIN or type(b) not in PLAIN or not a.is_cuda or _load() is None or _is_seen(a, b, out, bias):
        return run()
    arguments = None if _is_seen_by_torch() else _grouped_arguments(a, b, offsets, bias, *others)
    if arguments is None:
        return run()
    with observe() as seen:
        result = run()
    names = ("a", "b", "offsets", "", "bias", "scale_a", "scale_b")
    given = dict(zip(names, arguments, strict=False))
    operands = {name: given.get(name) for name in names if name} | {"out": result}
    remember(Call(operands), out is not None, seen, arguments)
    return result


def observed_merge(call: tuple[Any, ...], run: Callable[[], Pair]) -> Pair:
    """`observed` for a call of `merge` whose arguments have been checked."""
    o_a, lse_a, o_b, lse_b, layout = call
    if not o_a.is_cuda or _load() is None or _is_seen(o_a, o_b, lse_a, lse_b) or _is_seen_by_torch():
        return run()
    with observe() as seen:
        out, lse = run()
    operands = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b, "out": out, "lse": lse}
    remember(Call(operands), False, seen, (*call[:4], _LAYOUTS[layout]))
    return out, lse


def attention_op(call: tuple[Any, ...], run: Callable[[], Pair | None]) -> Pair | None:
    """The result of the registered op, which compiled graphs call, launched by the extension where that is possible.

    Parameters
    ----------
    call
        The arguments of `attention`, without an output, in the layout ``"bshd"``.
    run
        Runs the call on the Python path.
    """
    q, k, v = call[:3]
    extension = _loaded.extension
    if extension is not None and not _is_seen(q, k, None, v):
        others = call[3 : len(INPUTS)], call[len(INPUTS) + 1 :]
        arguments = _attention_arguments(q, k, v, *others[0], *others[1])
        if arguments is not None:
            check_device(q.get_device())
            with contextlib.suppress(*REFUSALS):
                out, lse = extension.try_attention(*_of_op(arguments))
                if out is not None and lse is not None:
                    return out, lse
    return observed_attention(call, run, canonical=True)


def _of_op(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of the extension's op, marked as those of the registered op."""
    q, k, v, options, *others = arguments
    return q, k, v, options | 1 << _CANONICAL, *others


def wanted(op: str, a: Any, b: Any, out: Any, bias: Any, *others: Any) -> tuple[Any, ...] | None:
    """The extension's arguments for a call of `product`; None if the extension does not launch such calls."""
    # Before anything is loaded: a fake tensor of a GPU must not import Triton.
    if op not in _OPS or type(a) not in PLAIN or type(b) not in PLAIN or not a.is_cuda:
        return None
    if _load() is None or _is_seen(a, b, out, bias):
        return None
    return None if _is_seen_by_torch() else _arguments(op, a, b, bias, *others)


def wanted_attention(
    q: Any, k: Any, v: Any, sinks: Any, scale_q: Any, scale_k: Any, scale_v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    block_table: Any, seqlens_k: Any, out: Any, *others: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """The extension's arguments for a call of `attention`; None if the extension does not launch such calls."""
    if type(q) not in PLAIN or not q.is_cuda or _load() is None or _is_seen(q, k, out, v) or _is_seen_by_torch():
        return None
    return _attention_arguments(
        q, k, v, sinks, scale_q, scale_k, scale_v, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, *others
    )


def remember(call: Call, into: bool, seen: Observation, arguments: tuple[Any, ...]) -> None:
    """Let the extension launch the next equal call.

    Parameters
    ----------
    into
        Whether the caller gave the output.
    seen
        The launches that were observed in this call.
    arguments
        The arguments of the extension's op.
    """
    result = call.operands["out"]
    if _loaded.extension is not None and seen.launches and result is not None:
        stream = torch._C._cuda_getCurrentRawStream(result.device.index)
        _loaded.extension.remember(seen, call, stream, into, arguments)


def _is_seen(a: Any, b: Any, out: Any, third: Any) -> bool:
    """Whether something above torch's dispatcher has to see the call: autograd, a recorder, a profiler of Triton.

    ``out`` and ``third`` are tensors or None, not checked yet. The extension itself declines what else the dispatcher
    has to see.
    """
    if type(a) not in PLAIN or type(b) not in PLAIN or not a.is_cuda:
        return True
    if is_grad_enabled():
        if a.requires_grad or b.requires_grad:
            return True
        if third is not None and (type(third) not in PLAIN or third.requires_grad):
            return True
        if out is not None and (type(out) not in PLAIN or out.requires_grad):
            return True
    elif (third is not None and type(third) not in PLAIN) or (out is not None and type(out) not in PLAIN):
        return True
    if out is not None and is_frozen(out):
        return True
    return forward_ad._current_level >= 0 or current() is not None or _loaded.watched()


def _is_seen_by_torch() -> bool:
    """Whether the extension would decline every call of this thread, or the current stream is being captured."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_any_autocast_enabled()
        or torch.cuda.is_current_stream_capturing()
    )


def _are_plain(tensors: Iterable[Any]) -> bool:
    """Whether each is None, or a tensor of torch's own type that requires no gradient."""
    gradients = is_grad_enabled()
    return all(x is None or (type(x) in PLAIN and not (gradients and x.requires_grad)) for x in tensors)


def _arguments(
    op: str, a: Any, b: Any, bias: Any, residual: Any, alpha: Any, beta: Any, activation: Any, out_dtype: Any,
    scale_a: Any, scale_b: Any, fast_accum: Any, schedule: Any, workers: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """The arguments of the extension's op; None for a call that it does not launch, or whose arguments may be wrong."""
    if not _are_plain((residual, scale_a, scale_b)):
        return None
    try:
        options = _ACTIVATIONS[activation] | _SCHEDULES[schedule] << _SCHEDULE | _DTYPES[out_dtype] << _DTYPE
    except (KeyError, TypeError):
        return None
    if not (_is_number(alpha) and _is_number(beta)) or type(fast_accum) is not bool or alpha == 0:
        return None
    if workers is not None and (type(workers) is not int or workers < 1):
        return None
    options |= (not fast_accum) << _SLOW_ACCUM
    if a.dtype is torch.float32 and allows_tf32():
        options |= 1 << _TF32
    return (
        _OPS[op], a, b, bias, residual, scale_a, scale_b, float(alpha), float(beta), options, workers or 0,
        limits.limit(),
    )  # fmt: skip


def _grouped_arguments(
    a: Any, b: Any, offsets: Any, bias: Any, activation: Any, out_dtype: Any, scale_a: Any, scale_b: Any,
    fast_accum: Any, schedule: Any, workers: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """As `_arguments`, of a grouped product; those behind the last one that is given are left out."""
    turned = a.dim() == 3
    if type(offsets) not in PLAIN or (turned and b.dim() == 3):
        return None
    first = (b, a, offsets) if turned else (a, b, offsets)
    limit = limits.limit()
    if (
        bias is scale_a is scale_b is activation is out_dtype is workers is None and fast_accum is True
        and schedule == "auto" and a.dtype is not torch.float32 and not limit
    ):  # fmt: skip
        return (*first, 1 << _TURNED) if turned else first
    made = _arguments(
        "mm", *first[:2], bias, None, 1.0, 1.0, activation, out_dtype, scale_a, scale_b, fast_accum, schedule, workers
    )
    if made is None:
        return None
    scales = (scale_b, scale_a) if turned else (scale_a, scale_b)
    # Turned operands may lie as others do that are not: of [K, N] and [G, N, K] both are a product.
    return (*first, made[-3] | turned << _TURNED, bias, *scales, *made[-2:])


def _options_of_mask(layout: Any, causal: Any) -> int | None:
    """Layout and diagonal as options; None for unknown ones."""
    if type(causal) not in (bool, str):
        return None
    try:
        return _LAYOUTS[layout] | _DIAGONALS[causal] << _DIAGONAL
    except (KeyError, TypeError):
        return None


def _attention_arguments(
    q: Any, k: Any, v: Any, sinks: Any, scale_q: Any, scale_k: Any, scale_v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    block_table: Any, seqlens_k: Any, layout: Any, causal: Any, window: Any, softcap: Any, scale: Any,
    max_seqlen_q: Any, max_seqlen_k: Any, return_lse: Any, workers: Any, schedule: Any, splits: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """`_arguments` for attention.

    Trailing arguments that have their defaults are left out, since each costs time.
    """
    options = _options_of_mask(layout, causal)
    if options is None or type(return_lse) is not bool or type(schedule) is not str or schedule not in _SCHEDULES:
        return None
    for x in (cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k):
        if x is not None and type(x) not in PLAIN:
            return None
    options |= return_lse << _LSE | _SCHEDULES[schedule] << _ORDER
    if q.dtype is torch.float32 and allows_tf32():
        options |= 1 << _ROUNDED
    most_q, most_k = _checked(max_seqlen_q, 0, -1), _checked(max_seqlen_k, 0, -1)
    if most_q is None or most_k is None:
        return None
    limit = limits.limit()
    first = q, k, v, options, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, most_q, most_k
    if (
        sinks is scale_q is scale_k is scale_v is window is softcap is scale is workers is splits is None
        and not limit
    ):  # fmt: skip
        return first
    others = sinks, scale_q, scale_k, scale_v
    if not _are_plain(others) or (window is not None and (type(window) is not tuple or len(window) != 2)):
        return None
    left, right = (None, None) if window is None else window
    if scale is not None:
        options |= 1 << _SCALED
    if any(number is not None and not _is_number(number) for number in (scale, softcap)) or softcap == 0:
        return None
    sides = _checked(left, -1, -1), _checked(right, -1, -1)
    counts = _checked(workers, 1, 0), _checked(splits, 1, 0)
    if None in sides or None in counts:
        return None
    return (*first[:3], options, *first[4:], float(scale or 0), float(softcap or 0), *sides, *others, *counts, limit)


def _is_number(x: Any) -> bool:
    """Whether ``x`` is a number of Python or NumPy in float32's range.

    The Python path raises for a larger one. It also sees each bool: matmul takes one as a number, attention does not.
    """
    is_number = type(x) in _NUMBERS or (isinstance(x, Real) and not isinstance(x, bool))
    return is_number and bool(-FLOAT32_MAX <= x <= FLOAT32_MAX)


def _checked(number: Any, least: int, default: int) -> int | None:
    """``number`` if it is an integer of at least ``least``; ``default`` for None; None for anything else."""
    if number is None:
        return default
    return number if type(number) is int and number >= least else None
