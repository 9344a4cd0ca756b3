"""Checks that all ops share, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.autograd import forward_ad

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.flat import check_deadline
from tilestream.core.dtypes import dtype_name
from tilestream.ops.scales import FP8_DTYPES, check_scale_dtype

#: Devices that an op takes: those of the backends (ROCm's GPUs are "cuda" to torch), and the one that computes nothing.
_DEVICES = ("cpu", "cuda", "meta")


def check_waiting(op: str, workers: object, deadline: float | None, **arrivals: object) -> None:
    """Raise for a number of workers, arrivals or a deadline that are none."""
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"{op}: workers={workers!r}; it is a positive whole number, or None for the device's own")
    for name, arrival in arrivals.items():
        if arrival is not None and not isinstance(arrival, Arrival):
            raise TypeError(
                f"{op}: {name} is a {type(arrival).__name__}; it is a tilestream.Arrival (a Stream's is stream.arrival)"
            )
    if deadline is not None:
        if all(arrival is None for name, arrival in arrivals.items() if name != "publish"):
            raise ValueError(f"{op}: deadline={deadline} without arrival=; nothing is waited for")
        check_deadline(deadline)


def check_dense(
    op: str,
    instead: str,
    tensors: Mapping[str, torch.Tensor | None],
    check_dtype: Callable[[str, str, torch.Tensor], None],
    dense: Callable[[str, str, bool], str],
) -> None:
    """Raise unless all are dense tensors on one device that there is a backend for, of dtypes that they may have.

    Parameters
    ----------
    instead
        What computes on other devices.
    check_dtype
        Raises for a dtype that a tensor of this op and name may not have.
    dense
        What to do with a tensor that is not dense: of this op and name, and whether it is nested.
    """
    device: torch.device | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} is a {type(tensor).__name__}; it is a torch.Tensor")
        if tensor.device.type not in _DEVICES:
            raise NotImplementedError(
                f"{op}: {name} is on {tensor.device}; this version computes on the CPU and on CUDA and ROCm GPUs: use "
                f"{instead} there, or {name}.cpu()"
            )
        if tensor.layout != torch.strided or tensor.is_nested:
            what = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
            raise TypeError(f"{op}: {name} {what}{dense(op, name, tensor.is_nested)}")
        check_dtype(op, name, tensor)
        if device is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, the others on {device}; all are on one device")
        device = tensor.device


def check_operands(op: str, **tensors: torch.Tensor | None) -> None:
    """`check_dense` for the tensors of a matmul."""
    check_dense(op, "torch.nn.functional.linear" if op == "linear" else f"torch.{op}", tensors, _check_dtype, _dense)


def _dense(op: str, name: str, nested: bool) -> str:
    return f"; dense tensors are multiplied: {name}.to_dense(), or torch.{op}"


def _check_dtype(op: str, name: str, tensor: torch.Tensor) -> None:
    if name in ("scale_a", "scale_b"):
        check_scale_dtype(op, name, tensor)
        return
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


def autocast(op: str, arriving: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands in autocast's dtype where autocast is on, as ``torch.matmul`` has it."""
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    if any(tensor.dtype in FP8_DTYPES for tensor in tensors):
        return tensors  # the caller has chosen them, and scales that belong to them
    dtype = torch.get_autocast_dtype(kind)
    if all(tensor.dtype == dtype or tensor.dtype == torch.float64 for tensor in tensors):
        return tensors
    if arriving:
        raise ValueError(
            f"{op}: autocast would convert an operand that has not arrived yet; stream it in as {dtype}, or leave "
            "autocast"
        )
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
