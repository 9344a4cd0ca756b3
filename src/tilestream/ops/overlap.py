"""Whether an output shares memory with what is read to compute it."""

from __future__ import annotations

import torch

from tilestream.core.operands import Epilogue


def refuse_overlap(out: torch.Tensor, epilogue: Epilogue, **operands: torch.Tensor) -> None:
    """Raise if a tile that is written would change what another tile still reads.

    The residual may be the output itself: a tile reads just the elements that it writes.

    Raises
    ------
    ValueError
        If ``out`` shares memory with an operand, or with itself.
    """
    if not out.numel():
        return
    scales = {"scale_a": epilogue.scale_a, "scale_b": epilogue.scale_b}
    residual = epilogue.residual
    if residual is not None and _same_elements(residual, out):
        residual = None
    read = {**operands, "bias": epilogue.bias, "residual": residual, **scales}
    refuse_shared(out, **{name: tensor for name, tensor in read.items() if tensor is not None})


def refuse_shared(out: torch.Tensor, what: str = "out", /, **read: torch.Tensor) -> None:
    """Raise if an output shares memory with itself, or with what is read.

    Raises
    ------
    ValueError
        If it does.
    """
    if not out.numel():
        return
    if torch._debug_has_internal_overlap(out) == 1:
        raise ValueError(
            f"{what}: stride {out.stride()} for shape {list(out.shape)}: several elements share a place; pass "
            f"{what}.clone()"
        )
    for name, tensor in read.items():
        if tensor.numel() and _meet(tensor, out):
            raise ValueError(f"{what}: overlaps {name} in memory; give an output of its own")


def _same_elements(x: torch.Tensor, y: torch.Tensor) -> bool:
    steps = [[(e, s) for e, s in zip(t.shape, t.stride(), strict=True) if e != 1] for t in (x, y)]
    return x.data_ptr() == y.data_ptr() and x.dtype == y.dtype and steps[0] == steps[1]


def _meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors may share a byte: no only where that is certain. By address: storages may overlap, too.

    Certain where one ends before the other begins; and where both lie in rows of one length, in columns that do not
    meet: counted from y's first column, x begins behind y's last and ends before the next row.
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
    """Bytes from the first to the last, modulo rows of ``length`` bytes (0: not modulo anything)."""
    size = tensor.element_size()
    steps = [((e - 1) * s * size, s * size) for e, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return sum(step for step, stride in steps if not length or stride % length) + size
