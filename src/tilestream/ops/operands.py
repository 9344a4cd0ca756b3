"""Canonical operands of a matmul: the checked epilogue, the check for overlap with the output, the plan's problem."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from tilestream.arrival.flat import FlatArrival
from tilestream.core.chunks import Incoming
from tilestream.core.dtypes import dtype_name
from tilestream.core.operands import ACTIVATIONS, Epilogue, GemmOperands
from tilestream.ops.scales import FP8_DTYPES, check_scale_dtype
from tilestream.plan.problem import Problem


def problem_of(
    x: GemmOperands, rows: FlatArrival | None = None, columns: FlatArrival | None = None,
    publishes: Incoming | None = None,
) -> Problem:  # fmt: skip
    """The problem of operands, with or without a batch: the part that is the same on every device."""
    a, b, out, epilogue = x
    batch = a.shape[0] if a.dim() == 3 else 1
    (m, k), n = a.shape[-2:], b.shape[-1]
    shared = batch > 1 and a.stride(0) == 0
    return Problem(
        m, n, k, batch, dtype_name(a.dtype), dtype_name(out.dtype),
        None if rows is None else rows.incoming(m if shared else batch * m),
        None if columns is None else columns.incoming(n),
        shared_rows=shared,
        b_dtype=dtype_name(b.dtype) if b.dtype != a.dtype else "",
        scales=epilogue.scales,
        publishes=publishes,
    )  # fmt: skip


def epilogue_of(
    out: torch.Tensor, alpha: float = 1.0, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    beta: float = 1.0, activation: str = "none", scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> Epilogue:  # fmt: skip
    """The checked epilogue for an output ``[M, N]`` or ``[B, M, N]``. A residual times 0 is left out."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation={activation!r}; it must be one of {', '.join(name for name in ACTIVATIONS if name != 'none')}"
        )
    if bias is residual is scale_a is scale_b is None:
        return Epilogue(alpha, beta=beta, activation=activation)
    if bias is not None and tuple(bias.shape) != (out.shape[-1],):
        raise ValueError(f"bias: shape {list(bias.shape)}; it has one element a column: [{out.shape[-1]}]")
    if residual is not None and residual.shape != out.shape:
        raise ValueError(f"residual: shape {list(residual.shape)}; it has the output's: {list(out.shape)}")
    for name, tensor in (("bias", bias), ("residual", residual)):
        if tensor is not None:
            dtype_name(tensor.dtype)
            if tensor.dtype in FP8_DTYPES:
                raise TypeError(f"{name}: {tensor.dtype}; of 8 bits are operands only: {name}.to({out.dtype})")
            _check_device(name, tensor, out)
    for name, scale, end in (("scale_a", scale_a, (out.shape[-2], 1)), ("scale_b", scale_b, (1, out.shape[-1]))):
        if scale is not None:
            check_scale_dtype("gemm", name, scale)
            _check_device(name, scale, out)
            shape = (*out.shape[:-2], *end)
            if scale.numel() != 1 and tuple(scale.shape) != shape:
                raise ValueError(f"{name}: shape {list(scale.shape)}; it has one element, or {list(shape)}")
    if beta == 0:
        residual = None  # not read, so that NaN there has no effect
    elif residual is not None and residual.dim() == 2:
        residual = residual.unsqueeze(0)
    bias, residual, scale_a, scale_b = (None if t is None else t.detach() for t in (bias, residual, scale_a, scale_b))
    return Epilogue(alpha, bias, residual, beta, activation, scale_a, scale_b)


def _check_device(name: str, tensor: torch.Tensor, out: torch.Tensor) -> None:
    if tensor.device != out.device:
        raise ValueError(f"{name}: on {tensor.device}, the output on {out.device}; they are on one device")


# Results --------------------------------------------------------------------------------------------------------------

_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def untracked() -> AbstractContextManager[None]:
    """A block in which autograd does not track views, for the only view of a tensor that nothing else refers to.

    A tracked view that is made in `torch.no_grad` could not be changed in place once gradients are on.
    """
    return torch._C._ExcludeDispatchKeyGuard(_VIEWS)


def made_fresh() -> AbstractContextManager[object]:
    """`untracked` for a result of the registered ops, unless its derivative may have saved it."""
    tracked = torch.compiler.is_compiling() or torch.is_grad_enabled()
    return nullcontext() if tracked else untracked()


def unviewed(x: torch.Tensor) -> torch.Tensor:
    """What `made_fresh` makes of a view, in a graph of torch.compile, which sees no such block: no view."""
    is_graph = torch.compiler.is_compiling() and not torch.is_grad_enabled()
    return torch.ops.aten._unsafe_view(x, x.shape) if is_graph else x


def is_frozen(out: torch.Tensor) -> bool:
    """Whether torch forbids writing ``out``: it was made in inference mode, and this is outside of it."""
    return out.is_inference() and not torch.is_inference_mode_enabled()


# Overlap --------------------------------------------------------------------------------------------------------------


def refuse_overlap(x: GemmOperands) -> None:
    """Raise `ValueError` if the output overlaps an operand, so that one tile's store could change another's input.

    The residual may be the output itself: a tile reads only the elements that it writes.
    """
    e, out = x.epilogue, x.out
    read = {"a": x.a, "b": x.b, "bias": e.bias, "residual": e.residual, "scale_a": e.scale_a, "scale_b": e.scale_b}
    if e.residual is not None and out.numel() and _same_elements(e.residual, out):
        del read["residual"]
    refuse_shared(out, **read)


class Overlap(ValueError):
    """The output ``what`` shares memory with the operand ``read``."""

    def __init__(self, what: str, read: str) -> None:
        super().__init__(f"{what}: overlaps {read} in memory; give an output of its own")
        self.what, self.read = what, read


def refuse_shared(out: torch.Tensor, what: str = "out", /, **read: torch.Tensor | None) -> None:
    """Raise `ValueError` if elements of an output share memory, or if it shares memory with a tensor of ``read``."""
    if not out.numel():
        return
    if torch._debug_has_internal_overlap(out) == 1:
        raise ValueError(
            f"{what}: stride {out.stride()} for shape {list(out.shape)}: several elements share a place; pass "
            f"{what}.clone()"
        )
    for name, tensor in read.items():
        if tensor is not None and tensor.numel() and _may_meet(tensor, out):
            raise Overlap(what, name)


def _same_elements(x: torch.Tensor, y: torch.Tensor) -> bool:
    steps = [[(e, s) for e, s in zip(t.shape, t.stride(), strict=True) if e != 1] for t in (x, y)]
    return x.data_ptr() == y.data_ptr() and x.dtype == y.dtype and steps[0] == steps[1]


def _may_meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors may share a byte, by address, since storages may overlap, too.

    They do not if one ends before the other begins. They do not either if both are columns of rows of one length and
    their columns are disjoint: counted from y's first column, x begins after y's last and ends before the next row.
    """
    x_begin, y_begin = x.data_ptr(), y.data_ptr()
    if x_begin + span(x) <= y_begin or y_begin + span(y) <= x_begin:
        return False
    for extent, stride in zip(y.shape, y.stride(), strict=True):
        length = stride * y.element_size()
        if extent > 1 and length > 0:
            offset = (x_begin - y_begin) % length
            if span(y, length) <= offset and offset + span(x, length) <= length:
                return False
    return True


def span(tensor: torch.Tensor, length: int = 0) -> int:
    """Bytes from the first to the last, modulo rows of ``length`` bytes; 0: not modulo."""
    size = tensor.element_size()
    steps = [((e - 1) * s * size, s * size) for e, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return sum(step for step, stride in steps if not length or stride % length) + size
