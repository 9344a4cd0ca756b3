"""Arguments of the public ops: checked before anything runs, and brought to the registered ops' canonical form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.autograd import forward_ad

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.flat import FlatArrival, check_deadline
from tilestream.core.operands import ACTIVATIONS as KERNEL_ACTIVATIONS
from tilestream.ops import again
from tilestream.ops.library import (
    clear_signals_op,
    gemm_arriving_op,
    gemm_arriving_out_op,
    gemm_op,
    gemm_out_op,
    gemm_published_out_op,
    result_dtype,
)
from tilestream.ops.limit import limit
from tilestream.ops.scales import FP8_DTYPES, canonical_scales, check_pair, check_scale_dtype, refuse_gradients
from tilestream.plan.api import SCHEDULES, check_publish
from tilestream.plan.problem import dtype_name
from tilestream.runtime import shutdown

#: Public names of the activations.
ACTIVATIONS = tuple(name for name in KERNEL_ACTIVATIONS if name != "none")

#: Devices that an op takes: those of the backends (ROCm's GPUs are "cuda" to torch), and the one that computes nothing.
_DEVICES = ("cpu", "cuda", "meta")


@dataclass(frozen=True)
class Options:
    """What every op of this package takes beside its operands."""

    op: str
    out: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0
    activation: str | None = None
    out_dtype: torch.dtype | None = None
    arrival: Arrival | None = None
    weight_arrival: Arrival | None = None
    publish: Arrival | None = None
    schedule: str = "auto"
    workers: int | None = None
    deadline: float | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    fast_accum: bool = True

    def check(self) -> None:
        """Raise for what is wrong whatever the operands are."""
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(
                f"{self.op}: activation={self.activation!r}; it is None or one of {', '.join(ACTIVATIONS)}"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"{self.op}: schedule={self.schedule!r}; it is one of {', '.join(SCHEDULES)}")
        if self.workers is not None and (not isinstance(self.workers, int) or self.workers < 1):
            raise ValueError(
                f"{self.op}: workers={self.workers!r}; it is a positive whole number, or None for the device's own"
            )
        for name, factor in (("alpha", self.alpha), ("beta", self.beta)):
            if not isinstance(factor, int | float):
                raise TypeError(f"{self.op}: {name}={factor!r}; it is a number")
        if self.out_dtype is not None and not isinstance(self.out_dtype, torch.dtype):
            raise TypeError(f"{self.op}: out_dtype={self.out_dtype!r}; it is a torch.dtype")
        if not isinstance(self.fast_accum, bool):
            raise TypeError(f"{self.op}: use_fast_accum={self.fast_accum!r}; it is True or False")
        arrivals = {"arrival": self.arrival, "weight_arrival": self.weight_arrival, "publish": self.publish}
        for name, arrival in arrivals.items():
            if arrival is not None and not isinstance(arrival, Arrival):
                raise TypeError(
                    f"{self.op}: {name} is a {type(arrival).__name__}; it is a tilestream.Arrival (a Stream's is "
                    "stream.arrival)"
                )
        if self.publish is not None:
            check_publish(self.op, self.schedule, self.arriving)
        if self.deadline is not None:
            if not self.arriving:
                raise ValueError(f"{self.op}: deadline={self.deadline} without arrival=; nothing is waited for")
            check_deadline(self.deadline)

    @property
    def arriving(self) -> bool:
        """Whether an operand arrives."""
        return self.arrival is not None or self.weight_arrival is not None


def check_tensors(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise unless all are dense tensors on one device that there is a backend for, of dtypes that it multiplies."""
    device: torch.device | None = None
    theirs = "torch.nn.functional.linear" if op == "linear" else f"torch.{op}"
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} is a {type(tensor).__name__}; it is a torch.Tensor")
        if tensor.device.type not in _DEVICES:
            raise NotImplementedError(
                f"{op}: {name} is on {tensor.device}; this version computes on the CPU and on CUDA and ROCm GPUs: use "
                f"{theirs} there, or {name}.cpu()"
            )
        if tensor.layout != torch.strided or tensor.is_nested:
            what = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
            raise TypeError(f"{op}: {name} {what}; dense tensors are multiplied: {name}.to_dense(), or torch.{op}")
        if name in ("scale_a", "scale_b"):
            check_scale_dtype(op, name, tensor)
        else:
            _check_dtype(op, name, tensor)
        if device is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, the others on {device}; all are on one device")
        device = tensor.device


def _check_dtype(op: str, name: str, tensor: torch.Tensor) -> None:
    try:
        dtype_name(tensor.dtype)
    except TypeError as error:
        raise TypeError(f"{op}: {name}: {error}") from None
    if tensor.dtype in FP8_DTYPES and name not in ("a", "b"):
        raise TypeError(f"{op}: {name} is {tensor.dtype}; of 8 bits are operands only: {name}.to(torch.bfloat16)")


def refuse_tangents(op: str, *tensors: torch.Tensor | None, instead: str = "") -> None:
    """Raise for forward-mode AD, which would otherwise pass through a registered op without a derivative, unseen."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{op}: no forward-mode derivative; use {instead or f'torch.{op}'} there, or reverse mode"
            )


def autocast(options: Options, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands in autocast's dtype where autocast is on, as ``torch.matmul`` has it."""
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    if any(tensor.dtype in FP8_DTYPES for tensor in tensors):
        return tensors  # somebody has chosen them, and scales that belong to them
    dtype = torch.get_autocast_dtype(kind)
    if all(tensor.dtype == dtype or tensor.dtype == torch.float64 for tensor in tensors):
        return tensors
    if options.arriving:
        raise ValueError(
            f"{options.op}: autocast would convert an operand that has not arrived yet; stream it in as {dtype}, "
            "or leave autocast"
        )
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def multiply(a: torch.Tensor, b: torch.Tensor, options: Options) -> torch.Tensor:
    """``a @ b`` with torch.matmul's rules for 1-D, 2-D and batched operands, through the registered ops."""
    if torch.compiler.is_compiling() or not isinstance(a, torch.Tensor) or not a.is_cuda:
        return _multiply(a, b, options)
    result = again.run(a, b, options)
    if result is None:
        result = _multiply(a, b, options)
        again.remember(a, b, options, result)
    return result


def _multiply(a: torch.Tensor, b: torch.Tensor, options: Options) -> torch.Tensor:
    options.check()
    op, out = options.op, options.out
    scale_a, scale_b = options.scale_a, options.scale_b
    check_tensors(op, a=a, b=b, bias=options.bias, residual=options.residual, out=out, scale_a=scale_a, scale_b=scale_b)
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError(f"{op}: a has {a.dim()} and b {b.dim()} dimensions; both have at least 1")
    refuse_tangents(op, a, b, options.bias, options.residual, scale_a, scale_b)
    if torch.is_grad_enabled():
        refuse_gradients(op, a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    a, b = autocast(options, a, b)
    check_pair(op, a, b)
    row, column = a.dim() == 1, b.dim() == 1
    a = a.unsqueeze(0) if row else a
    b = b.unsqueeze(1) if column else b
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"{op}: a {list(a.shape)} and b {list(b.shape)} differ in K: {a.shape[-1]} columns of a, {b.shape[-2]} "
            "rows of b"
        )
    batch = _batch(op, a.shape[:-2], b.shape[:-2])
    full = (*batch, a.shape[-2], b.shape[-1])
    shape = tuple(
        full[i] for i in range(len(full)) if not (row and i == len(full) - 2) and not (column and i == len(full) - 1)
    )
    if options.bias is not None and tuple(options.bias.shape) != (full[-1],):
        raise ValueError(f"{op}: bias has shape {list(options.bias.shape)}; it has one element a column: [{full[-1]}]")
    residual = _expand(op, options.residual, shape, full)
    dtype = result_dtype(a, options.out_dtype)
    if out is not None:
        _check_out(options, out, shape, dtype, a, b)
    # b is one matrix, and a's leading dimensions are rows: one large product rather than many small ones.
    folded = b.dim() == 2 and a.dim() != 2 and (_as_one(a, a.dim() - 1) or not options.arriving)
    canonical = (math.prod(full[:-1]), full[-1]) if folded or len(full) == 2 else (math.prod(batch), *full[-2:])
    batch_b = () if folded else batch
    scales = canonical_scales(op, scale_a, scale_b, (*batch, a.shape[-2]), batch_b, canonical)
    if folded:
        a = a.reshape(canonical[0], a.shape[-1])
    elif len(full) > 2:
        a, b = _batched(op, "a", a, batch, options.arrival), _batched(op, "b", b, batch, None)
    residual = residual.reshape(canonical) if residual is not None else None
    if torch.compiler.is_compiling():
        result = _call(a, b, residual, scales, canonical, options)
    else:
        with shutdown.call():
            result = _call(a, b, residual, scales, canonical, options)
    return out if out is not None else result.reshape(shape)


def _batch(op: str, of_a: torch.Size, of_b: torch.Size) -> torch.Size:
    """The batch dimensions of the product."""
    # torch.broadcast_shapes imports sympy: a second of a process's first call.
    if not of_a or not of_b:
        return of_a or of_b
    if all(type(extent) is int for extent in (*of_a, *of_b)) and of_a == of_b:
        return of_a
    try:
        both: torch.Size = torch.broadcast_shapes(of_a, of_b)
    except RuntimeError:
        raise ValueError(f"{op}: batch dimensions {list(of_a)} of a and {list(of_b)} of b do not broadcast") from None
    return both


def _call(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor | None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    canonical: tuple[int, ...],
    options: Options,
) -> torch.Tensor:
    operands = (
        a, b, options.bias, residual, float(options.alpha), float(options.beta), options.activation or "none",
        options.out_dtype, options.schedule, options.workers or 0,
    )  # fmt: skip
    publish = FlatArrival.of(options.publish) if options.publish is not None else None
    if publish is not None:
        publish.published(math.prod(canonical[:-1]))
        _refuse_published_gradients(options, a, b)
    optional = (*scales, options.fast_accum, limit())
    out = options.out
    into = None if out is None else _view(out, canonical)
    result: torch.Tensor
    if publish is not None:
        result = a.new_empty(canonical, dtype=result_dtype(a, options.out_dtype)) if into is None else into
        gemm_published_out_op(*operands, publish.words, publish.ints, options.op, result, *optional)
    elif options.arriving:
        arriving: list[object] = []
        for arrival in (options.arrival, options.weight_arrival):
            flat = FlatArrival.of(arrival) if arrival is not None else None
            arriving += [flat.words, flat.ints] if flat is not None else [None, []]
        deadline = check_deadline(options.deadline)
        if into is None:
            result = gemm_arriving_op(*operands, *arriving, deadline, options.op, *optional)
        else:
            gemm_arriving_out_op(*operands, *arriving, deadline, options.op, into, *optional)
            result = into
        for words in (arriving[0], arriving[2]):
            if isinstance(words, torch.Tensor) and not words.is_cuda:  # there the launch does it
                clear_signals_op(words)
    elif into is None:
        result = gemm_op(*operands, *optional)
    else:
        gemm_out_op(*operands, into, *optional)
        result = into
    return result


def _refuse_published_gradients(options: Options, *operands: torch.Tensor) -> None:
    tensors = (*operands, options.bias, options.residual)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{options.op}: publish= has no gradient, and an operand requires one; leave publish= away, or use "
            "torch.no_grad()"
        )


def _view(out: torch.Tensor, canonical: tuple[int, ...]) -> torch.Tensor:
    try:
        return out.view(canonical)
    except RuntimeError:
        raise ValueError(
            f"out: stride {out.stride()} for shape {list(out.shape)}: its leading dimensions cannot be seen as one; "
            "give a contiguous output and copy it"
        ) from None


def _as_one(x: torch.Tensor, dims: int) -> bool:
    """Whether ``x``'s first ``dims`` dimensions can be seen as one without a copy, which would read too early."""
    steps = [(x.shape[i], x.stride(i)) for i in range(dims) if x.shape[i] != 1]
    return not x.numel() or all(outer == extent * inner for (_, outer), (extent, inner) in pairwise(steps))


def _batched(op: str, name: str, x: torch.Tensor, batch: torch.Size, arrival: Arrival | None) -> torch.Tensor:
    """``x`` as ``[B, rows, columns]``, repeated where the other operand has more batches."""
    count = math.prod(batch)
    if x.dim() == 2 or math.prod(x.shape[:-2]) == 1:
        return x.reshape(1, *x.shape[-2:]).expand(count, -1, -1)
    if arrival is not None and (x.shape[:-2] != batch or not _as_one(x, x.dim() - 2)):
        raise ValueError(
            f"{op}: {name} {list(x.shape)} arrives and would have to be copied for the batches {list(batch)}; "
            "arriving operands have all of them, in one piece"
        )
    return x.expand(*batch, *x.shape[-2:]).reshape(count, *x.shape[-2:])


def _expand(
    op: str, residual: torch.Tensor | None, shape: tuple[int, ...], full: tuple[int, ...]
) -> torch.Tensor | None:
    if residual is None:
        return None
    try:
        return residual.expand(shape).reshape(full)
    except RuntimeError:
        raise ValueError(
            f"{op}: residual has shape {list(residual.shape)}; it broadcasts to the result's {list(shape)}"
        ) from None


def _check_out(
    options: Options, out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor
) -> None:
    if not torch.compiler.is_compiling() and out.is_neg():
        raise ValueError(f"{options.op}: out is a negated view; give a tensor of its own")
    if tuple(out.shape) != shape:
        raise ValueError(f"{options.op}: out has shape {list(out.shape)}; the result has {list(shape)}")
    if out.dtype != dtype:
        raise TypeError(
            f"{options.op}: out is {out.dtype}, the result {dtype}; pass out_dtype={out.dtype} to have it so"
        )
    operands = (out, a, b, options.bias, options.residual)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        raise RuntimeError(
            f"{options.op}: out= has no gradient, and an operand requires one; leave out= away, or use torch.no_grad()"
        )
