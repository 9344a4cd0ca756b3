"""`AttentionRequest`: a call of attention. It is validated once and brought to the registered ops' canonical form."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.flat import FlatArrival, check_deadline
from tilestream.core.arguments import is_one_of
from tilestream.core.operands import AttentionOperands
from tilestream.kernels.cpu.epilogue import wide_dtype
from tilestream.ops import attention_library as library
from tilestream.ops import gated, inline, native
from tilestream.ops.attention_operands import Settings, check_shapes
from tilestream.ops.checks import (
    MOST,
    as_number,
    autocast,
    below_autocast,
    check_dense,
    check_waiting,
    check_written,
    refuse_tangents,
)
from tilestream.ops.gradients import is_differentiated
from tilestream.ops.limit import limit
from tilestream.ops.operands import made_fresh, unviewed
from tilestream.ops.request import clear_signals
from tilestream.ops.scales import check_scale_dtype
from tilestream.ops.sharding import dtensor_views, is_dtensor, refuse_dtensors
from tilestream.plan.attention_planner import ATTENTION_SCHEDULES, check_splits
from tilestream.plan.attention_problem import ATTENTION_DTYPES, LAYOUTS, Alignment, AttentionLayout
from tilestream.runtime import shutdown

logger = logging.getLogger(__name__)

Causal = bool | Literal["bottom_right", "top_left"]
Window = Sequence[int | None] | None
#: The output; with ``return_lse`` the output and the log-sum-exp.
Answer = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

#: No model has more heads. A tensor with more heads than this and than rows has heads and rows swapped.
MOST_HEADS = 256
_NAMES = {"bshd": "[B, S, H, D]", "bhsd": "[B, H, S, D]"}
_DTYPES = tuple(getattr(torch, name) for name in ATTENTION_DTYPES)
_OP, _INSTEAD = "attention", "torch.nn.functional.scaled_dot_product_attention"


class AttentionRequest(NamedTuple):
    """The arguments of a call of `tilestream.attention`. `attend` validates them once and runs it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None
    scale_q: torch.Tensor | None = None
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None
    out: torch.Tensor | None = None
    layout: AttentionLayout = "bshd"
    causal: Causal = False
    window: Window = None
    softcap: float | None = None
    scale: float | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    return_lse: bool = False
    workers: int | None = None
    schedule: str = "auto"
    splits: int | None = None
    arrival: Arrival | None = None
    deadline: float | None = None

    def check(self) -> None:
        """Raise for wrong options, and for tensors of a wrong kind."""
        check_waiting(_OP, self.workers, self.deadline, arrival=self.arrival)
        if not is_one_of(self.schedule, ATTENTION_SCHEDULES):
            raise ValueError(f"{_OP}: schedule={self.schedule!r}; it must be one of {', '.join(ATTENTION_SCHEDULES)}")
        check_splits(f"{_OP}: ", self.splits)
        tensors = dict(zip(self._fields, self[:12], strict=False))
        check_dense(_OP, _INSTEAD, tensors, 3, _check_dtype, "tensors are dense", ": pack it, and pass cu_seqlens_q=")
        if not isinstance(self.return_lse, bool):
            raise TypeError(f"{_OP}: return_lse={self.return_lse!r}; it must be True or False")
        if self.out is not None:
            check_written(_OP, self.out)
        others = () if self.out is None else (self.q, self.k, self.v, self.sinks, self.out)
        refuse_tangents(_OP, self.scale_q, self.scale_k, self.scale_v, *others)
        if not is_one_of(self.layout, LAYOUTS):
            raise ValueError(f"{_OP}: layout={self.layout!r}; it must be one of {', '.join(LAYOUTS)}")
        if self.arrival is not None:
            refuse_dtensors(_OP, q=self.q, k=self.k, v=self.v, out=self.out)
        if self.arrival is not None and self.block_table is not None:
            raise ValueError(
                f"{_OP}: arrival= with block_table=; keys in pages arrive in no order of rows: wait for them before "
                "the call"
            )


def attend(r: AttentionRequest) -> Answer:
    """Run a request through the registered ops.

    The next equal call is launched by the extension, or on the CPU by `inline`.
    """
    if torch.compiler.is_compiling() or not isinstance(r.q, torch.Tensor):
        return _attend(r)
    if r.arrival is not None or r.deadline is not None:
        gate = None
        if r.q.is_cuda:
            gate = gated.Gate.of(_OP, r.q.get_device(), r.arrival, None, None, r.deadline)
        return gated.attention(r[:-2], gate, lambda: _attend(r))
    if torch._C._is_any_autocast_enabled() and isinstance(r.k, torch.Tensor) and isinstance(r.v, torch.Tensor):
        q, k, v = autocast(_OP, False, r.q, r.k, r.v)
        r = r._replace(q=q, k=k, v=v)
        with below_autocast():
            made = native.attention(*r[:-2])
            return attend(r) if made is None else made
    others = (*r[3:11], r.window, r.softcap, r.max_seqlen_q, r.max_seqlen_k, r.workers, r.splits)
    with dtensor_views(r.q):
        if r.q.is_cuda:
            return native.observed_attention(r[:-2], lambda: _attend(r))
        if any(x is not None for x in others):
            return _attend(r)
        return inline.first_attention(
            (r.q, r.k, r.v, r.out), (r.layout, r.causal, r.scale, r.return_lse, r.schedule), lambda: _attend(r)
        )


def _attend(r: AttentionRequest) -> Answer:
    """Check a call and run it."""
    r.check()
    x, s = _canonical(r)
    if torch.compiler.is_compiling():
        return _call(r, x, s)
    with shutdown.call():
        return _call(r, x, s)


def _canonical(r: AttentionRequest) -> tuple[AttentionOperands, Settings]:
    """The canonical operands, with the output if it is given, and the op's settings."""
    is_causal, alignment = _alignment(r.causal)
    left, right = _window(r.window)
    q, k, v = _to_rows_first(r, *autocast(_OP, r.arrival is not None, r.q, r.k, r.v))
    batch = r.cu_seqlens_q.numel() - 1 if r.cu_seqlens_q is not None else q.shape[0]
    scale_q, scale_k, scale_v = (
        None if scale is None else _canonical_scale(name, scale, batch, y.shape[-2])
        for name, scale, y in (("scale_q", r.scale_q, q), ("scale_k", r.scale_k, k), ("scale_v", r.scale_v, v))
    )
    sinks = None if r.sinks is None else _sinks_of_op(r.sinks, q, k, v)
    if torch.is_grad_enabled():
        _check_gradients(r)
    s = Settings(
        is_causal, alignment, left, right,
        0.0 if r.softcap is None else _number("softcap", r.softcap, positive=True),
        1 / math.sqrt(max(q.shape[-1], 1)) if r.scale is None else _number("scale", r.scale, positive=False),
        _most("max_seqlen_q", r.max_seqlen_q, r.cu_seqlens_q, "cu_seqlens_q"),
        _most("max_seqlen_k", r.max_seqlen_k, r.cu_seqlens_k, "cu_seqlens_k"),
        r.layout, r.return_lse, r.schedule, r.workers or 0, r.splits or 0,
    )  # fmt: skip
    x = AttentionOperands(
        q, k, v, scale=s.scale, sinks=sinks, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v,
        cu_seqlens_q=r.cu_seqlens_q, cu_seqlens_k=r.cu_seqlens_k, block_table=r.block_table, seqlens_k=r.seqlens_k,
    )  # fmt: skip
    if r.out is None:
        return x, s
    _resize(r.out, x, s)
    lse = q.new_empty(library.lse_shape(x), dtype=wide_dtype(q.dtype)) if s.return_lse else None
    return x._replace(out=_outermost(r, r.out), lse=lse), s


def _sinks_of_op(sinks: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """The sinks as the op takes them: of the log-sum-exp's dtype, or on a GPU without a gradient of 16 bits.

    A converted copy would have another address in each call, and none of these calls could be launched natively. On
    ``meta`` calls are compiled ahead for a GPU.
    """
    is_read = (
        (sinks.is_cuda or sinks.is_meta) and sinks.dtype in (torch.float16, torch.bfloat16) and sinks.is_contiguous()
        and not torch.compiler.is_compiling()
    )  # fmt: skip
    return sinks if is_read and not is_differentiated((sinks, *operands)) else sinks.to(wide_dtype(operands[0].dtype))


def _resize(out: torch.Tensor, x: AttentionOperands, s: Settings) -> None:
    """Resize an output of no elements to the result's shape, as torch's ops do. The op refuses other wrong shapes."""
    shape = library.as_given((*x.q.shape[:-1], x.v.shape[-1]), s)
    if list(out.shape) == shape or torch.compiler.is_compiling() or out.numel():
        return
    check_shapes(_OP, x)
    if out.dtype == library.result_dtype(x.q):
        out.resize_(shape)


def _call(r: AttentionRequest, x: AttentionOperands, s: Settings) -> Answer:
    """Call the registered op."""
    late: tuple[Any, ...] = ()
    if r.arrival is not None:
        flat = FlatArrival.of(r.arrival)
        late = (flat.words, flat.ints, check_deadline(r.deadline))
    out, lse = x.out, x.lse
    if r.out is not None and is_dtensor(r.out):  # its placements may differ from the result's
        library.check_outputs(x, s)
        made, lse = library.attention_op(*x.inputs(), *s, limit())
        out.copy_(made)
    elif r.out is None:
        out, lse = (library.attention_arriving_op if late else library.attention_op)(*x.inputs(), *s, *late, limit())
    else:
        (library.attention_arriving_out_op if late else library.attention_out_op)(
            *x.inputs(), *s, *late, out, lse, limit()
        )
    clear_signals(*late[:1])
    if r.out is not None:
        out = r.out
    else:
        with made_fresh():
            out = unviewed(_outermost(r, out))
    return (out, lse) if r.return_lse and lse is not None else out


def _outermost(r: AttentionRequest, out: torch.Tensor) -> torch.Tensor:
    """An output from the caller's layout to the op's, ``"bshd"``, or back."""
    return out.transpose(1, 2) if r.layout == "bhsd" and out.dim() == 4 else out


# Checks ---------------------------------------------------------------------------------------------------------------


def _check_dtype(op: str, name: str, tensor: torch.Tensor) -> None:
    dtype = tensor.dtype
    if name in ("q", "k", "v"):
        if dtype not in _DTYPES:
            raise TypeError(f"{op}: {name} is {dtype}; attention takes {', '.join(ATTENTION_DTYPES)}: convert first")
        if dtype == torch.float64 and tensor.is_cuda:
            raise TypeError(f"{op}: {name} is {dtype} on a GPU; only the CPU takes it: {name}.float()")
    elif name.startswith("scale_"):
        check_scale_dtype(op, name, tensor)
    elif name == "sinks":
        if not tensor.is_floating_point():
            raise TypeError(f"{op}: sinks is {dtype}; sinks are scores, of a floating-point dtype")
    elif name != "out" and dtype != torch.int32:
        raise TypeError(f"{op}: {name} is {dtype}; it must be torch.int32: {name}.int()")


def _alignment(causal: object) -> tuple[bool, Alignment]:
    """``causal=`` as a flag and the alignment of the diagonal."""
    if isinstance(causal, bool):
        return causal, "bottom_right"
    if is_one_of(causal, ("bottom_right", "top_left")):
        return True, "top_left" if causal == "top_left" else "bottom_right"
    raise ValueError(
        f"{_OP}: causal={causal!r}; it must be False, True (the same as 'bottom_right'), 'bottom_right' or 'top_left'"
    )


def _window(window: object) -> tuple[int, int]:
    """``window=`` as the numbers of keys left and right of the diagonal; -1: all."""
    if window is None:
        return -1, -1
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        raise ValueError(
            f"{_OP}: window={window!r}; it must be (left, right): keys on either side of the diagonal, or None"
        )
    left, right = (-1 if side is None else side for side in window)
    if not all(_is_whole(side) and -1 <= side <= MOST for side in (left, right)):
        raise ValueError(
            f"{_OP}: window={tuple(window)!r}; a side is a whole number of keys, not negative and at most 2**30, or "
            "None (or -1) for all"
        )
    return left, right


def _is_whole(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an integer, or a symbolic one of torch.compile."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _number(name: str, value: object, *, positive: bool) -> float:
    """A finite number; with ``positive`` a positive one. Raise for others."""
    number = None if isinstance(value, bool) else as_number(value)
    if number is None:
        raise TypeError(f"{_OP}: {name}={value!r}; it must be a number, or None")
    # By comparing, which torch.compile can do with a symbolic number.
    if not -math.inf < number < math.inf or (positive and number <= 0):
        raise ValueError(f"{_OP}: {name}={value}; it must be finite{' and positive' if positive else ''}, or None")
    return number


def _most(name: str, value: object, packed: torch.Tensor | None, lengths: str) -> int:
    """``max_seqlen_q=`` or ``max_seqlen_k=``, checked; 0 for None."""
    if value is None:
        return 0
    if packed is None:
        raise ValueError(f"{_OP}: {name}={value} without {lengths}=; it belongs to packed sequences: leave it away")
    if not _is_whole(value) or not 0 <= value <= MOST:
        raise ValueError(
            f"{_OP}: {name}={value!r}; it must be a whole number of rows, not negative and at most 2**30, or None"
        )
    return value


def _to_rows_first(
    r: AttentionRequest, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views in the layout ``"bshd"``. Raise for extents that fit only the other layout."""
    packed_q, packed_k, shape = r.cu_seqlens_q is not None, r.cu_seqlens_k is not None, _NAMES[r.layout]
    if r.layout == "bhsd" and (packed_q or packed_k):
        raise ValueError(f"{_OP}: layout='bhsd' with packed sequences; they are [T, H, D]: leave layout= away")
    for name, tensor, packed in (("q", q, packed_q), ("k", k, packed_k), ("v", v, packed_k)):
        if tensor.dim() != 4 - packed:
            said = "[T, H, D]" if packed else f"{shape}; packed sequences need cu_seqlens_q= and cu_seqlens_k="
            raise ValueError(f"{_OP}: {name} has shape {list(tensor.shape)}; it must be {said}")
    rows, heads = (-3, -2) if r.layout == "bshd" else (-2, -3)
    mine, theirs = q.shape[heads], k.shape[heads]
    fits = not theirs or mine % theirs == 0
    if not (packed_q or packed_k) and (mine > MOST_HEADS or not fits):
        swapped = (
            f"{_OP}: layout={r.layout!r} is {shape}, so q {list(q.shape)} has {mine} heads of {q.shape[rows]} rows"
        )
        way = f"pass layout={'bhsd' if r.layout == 'bshd' else 'bshd'!r}, or transpose(1, 2)"
        if mine > MOST_HEADS and mine > q.shape[rows]:
            raise ValueError(
                f"{swapped}; these have changed places: {way} (of that many heads, pass {MOST_HEADS} at a time)"
            )
        if not fits and k.shape[rows] and q.shape[rows] % k.shape[rows] == 0:
            raise ValueError(
                f"{swapped}, and k {list(k.shape)} has {theirs}, which does not divide them; rows and heads seem to "
                f"have changed places: {way}"
            )
    if r.layout == "bhsd":
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if not (packed_q or torch.compiler.is_compiling()):
        if q.shape[1] == q.shape[2] > 1 and (q.shape == k.shape or q.stride(1) < q.stride(2)):
            _point_out(_AS_MANY)
        elif q.shape[2] > q.shape[1] > 1 and q.shape == k.shape and q.is_contiguous():
            _point_out(_FEWER)
    return q, k, v


#: Whatever the extents, so that each is said once: a prompt that short is rare, but right.
_FEWER = "q has more heads than rows"
_AS_MANY = "q has as many rows as heads, so that either layout fits"


@functools.lru_cache(maxsize=256)
def _point_out(what: str) -> None:
    """Warn once that rows and heads may be swapped."""
    logger.warning(
        "%s: layout='bshd' is [B, S, H, D], and %s; if it is [B, H, S, D], as scaled_dot_product_attention has "
        "it, pass layout='bhsd'",
        _OP, what,
    )  # fmt: skip


def _canonical_scale(name: str, scale: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """A scale of one element, one a head, or one a sequence and head, as ``[B, H]``."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(batch, heads)
    if tuple(scale.shape) in ((heads,), (batch, heads)):
        return scale.expand(batch, heads)
    raise ValueError(
        f"{_OP}: {name} has shape {list(scale.shape)}; it has one element, or one a head, [{heads}], or one a sequence "
        f"and head, [{batch}, {heads}]"
    )


def _check_gradients(r: AttentionRequest) -> None:
    """Raise for an operand that requires a gradient and has none."""
    asked = [name for name, x in zip(r._fields, r[:11], strict=False) if x is not None and x.requires_grad]
    for name in asked:
        if name.startswith("scale_"):
            raise RuntimeError(f"{_OP}: {name} requires a gradient; scales get none: pass {name}.detach()")
    if r.out is not None and (asked or r.out.requires_grad):
        raise RuntimeError(
            f"{_OP}: out= has no gradient, and an operand requires one; leave out= away, or use torch.no_grad()"
        )
    if asked and r.block_table is not None:
        raise RuntimeError(
            f"{_OP}: {asked[0]} requires a gradient, and keys are in pages; those get none: gather them first, or use "
            "torch.no_grad()"
        )
    if asked and r.q.dtype == torch.float8_e4m3fn:
        raise RuntimeError(
            f"{_OP}: {asked[0]} requires a gradient and q is {r.q.dtype}; operands of 8 bits get none: use "
            "torch.no_grad()"
        )
