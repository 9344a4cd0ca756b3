"""Checks that all ops share, before anything runs."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any

import torch
from torch.autograd import forward_ad

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.flat import check_deadline
from tilestream.core.dtypes import are_a_pair, dtype_name, pairs_text
from tilestream.core.errors import kind_of
from tilestream.ops.operands import is_frozen
from tilestream.ops.scales import FP8_DTYPES, check_scale_dtype

#: The largest factor of a product: it is applied in float32, unless the operands are float64.
FLOAT32_MAX = torch.finfo(torch.float32).max
#: The largest number of workers, and of keys or rows in an option. The sum of two still fits into 32 bits.
MOST = 2**30
#: Devices that an op takes: those of the backends (torch calls ROCm's GPUs "cuda"), and meta.
_DEVICES = ("cpu", "cuda", "meta")


def check_waiting(op: str, workers: object, deadline: float | None, **arrivals: object) -> None:
    """Raise for an invalid number of workers, arrival or deadline."""
    if workers is not None and (not isinstance(workers, int) or not 1 <= workers <= MOST):
        raise ValueError(
            f"{op}: workers={workers!r}; it must be a positive whole number, at most 2**30, or None for the "
            "device's own"
        )
    for name, arrival in arrivals.items():
        if arrival is not None and not isinstance(arrival, Arrival):
            raise TypeError(
                f"{op}: {name} is {kind_of(arrival)}; it must be a tilestream.Arrival (a Stream's is stream.arrival)"
            )
    if deadline is not None:
        if all(arrival is None for name, arrival in arrivals.items() if name != "publish"):
            raise ValueError(f"{op}: deadline={deadline} without arrival=; nothing is waited for")
        check_deadline(deadline)


def check_tensors(op: str, **tensors: object) -> None:
    """Raise `TypeError` for an argument that is not a tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            instead = ""
            if type(tensor).__name__ == "ndarray":
                instead = f": torch.from_numpy({name})"
            elif isinstance(getattr(tensor, "weight", None), torch.Tensor):  # a layer
                instead = f": {name}.weight"
            raise TypeError(f"{op}: {name} is {kind_of(tensor)}; it must be a torch.Tensor{instead}")


def check_dense(
    op: str,
    instead: str,
    tensors: Mapping[str, Any],
    required: int,
    check_dtype: Callable[[str, str, torch.Tensor], None],
    dense: str,
    nested: str = "",
) -> None:
    """Raise unless all are dense tensors of allowed dtypes on one device that has a backend.

    Parameters
    ----------
    instead
        The op for other devices, for the message.
    required
        How many of the first tensors must be given. The others may be None.
    check_dtype
        Raises for a dtype that the tensor may not have, given the op and the tensor's name.
    dense, nested
        The way out, for the message, for a tensor ``{name}`` that is not dense, or is nested.
    """
    device: torch.device | None = None
    for number, (name, tensor) in enumerate(tensors.items()):
        if tensor is None and number >= required:
            continue
        if not isinstance(tensor, torch.Tensor):
            check_tensors(op, **{name: tensor})
        if tensor.device.type not in _DEVICES:
            raise NotImplementedError(
                f"{op}: {name} is on {tensor.device}; this version computes on the CPU and on CUDA and ROCm GPUs: use "
                f"{instead} there, or {name}.cpu()"
            )
        check_strided(op, name, tensor, dense, nested)
        check_dtype(op, name, tensor)
        if device is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, the others on {device}; all are on one device")
        device = tensor.device


def check_strided(op: str, name: str, tensor: torch.Tensor, dense: str, nested: str = "") -> None:
    """Raise for a tensor without strides, or a quantized one. ``dense`` and ``nested`` as for `check_dense`."""
    if tensor.layout != torch.strided or tensor.is_nested:
        what = f"is nested{nested}" if tensor.is_nested else f"has layout {tensor.layout}"
        raise TypeError(f"{op}: {name} {what}; {dense.format(name=name)}")
    if tensor.is_quantized:
        raise TypeError(f"{op}: {name} is {tensor.dtype}, a quantized tensor: {name}.dequantize()")


def torch_op(op: str) -> str:
    """Torch's op of the same name."""
    return "torch.nn.functional.linear" if op == "linear" else f"torch.{op}"


def check_operands(op: str, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """`check_dense` for the tensors of a matmul by the caller's names. The first two are the operands."""
    operands = tuple(tensors)[:2]

    def check_dtype(op: str, name: str, tensor: torch.Tensor) -> None:
        if name in ("scale_a", "scale_b"):
            check_scale_dtype(op, name, tensor)
            return
        try:
            dtype_name(tensor.dtype)
        except TypeError as error:
            raise TypeError(f"{op}: {name}: {error}") from None
        if tensor.dtype in FP8_DTYPES and name not in operands:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; of 8 bits are operands only: {name}.to(torch.bfloat16)")

    instead = torch_op(op)
    check_dense(
        op, instead, tensors, 2, check_dtype, f"dense tensors are multiplied: {{name}}.to_dense(), or {instead}"
    )


def check_pair(op: str, a: torch.Tensor, b: torch.Tensor, names: tuple[str, str] = ("a", "b")) -> None:
    """Raise unless the operands' dtypes can be multiplied: one dtype, or two of 8 bits of one kind."""
    if not are_a_pair(str(a.dtype).removeprefix("torch."), str(b.dtype).removeprefix("torch.")):
        raise TypeError(f"{op}: {names[0]} is {a.dtype}, {names[1]} is {b.dtype}; {pairs_text()}")
    dtype_name(a.dtype)


def refuse_gradients(
    op: str, *, a: object, b: object, scale_a: object, scale_b: object, names: tuple[str, str] = ("a", "b")
) -> None:
    """Raise if an operand of 8 bits, or a scale, requires a gradient: neither has one."""
    for name, tensor in zip(names, (a, b), strict=True):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.dtype in FP8_DTYPES:
            raise RuntimeError(
                f"{op}: {name} is {tensor.dtype} and requires a gradient; operands of 8 bits get none: pass "
                f"{name}.detach(), or use torch.no_grad()"
            )
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if isinstance(scale, torch.Tensor) and scale.requires_grad:
            raise RuntimeError(
                f"{op}: {name} requires a gradient; scales get none: pass {name}.detach(), or multiply by it outside"
            )


#: Why most ops refuse a tangent, and the way out.
_NO_TANGENT = (
    "scales, out= and publish= have no forward-mode derivative; multiply by the scale outside, or leave out= and "
    "publish= away"
)


def refuse_tangents(op: str, *tensors: torch.Tensor | None, why: str = _NO_TANGENT) -> None:
    """Raise for a tensor with a tangent: the op has no forward-mode derivative for it."""
    if forward_ad._current_level >= 0:
        refuse_given(op, *(None if x is None else forward_ad.unpack_dual(x).tangent for x in tensors), why=why)


def refuse_given(op: str, *tangents: torch.Tensor | None, why: str = _NO_TANGENT) -> None:
    """Raise if a tangent is given."""
    if any(tangent is not None for tangent in tangents):
        raise NotImplementedError(f"{op}: {why}")


def check_written(op: str, out: torch.Tensor) -> None:
    """Raise for an output that must not be written, or that no kernel can write."""
    if torch.compiler.is_compiling():
        return
    if out.is_neg():
        raise ValueError(f"{op}: out is a negated view; give a tensor of its own")
    if is_frozen(out):
        raise RuntimeError(
            f"{op}: out: Inplace update to inference tensor outside InferenceMode is not allowed; give an out that was "
            "made outside of torch.inference_mode(), or call inside of it"
        )


#: The dispatch keys of autocast, of all devices.
_AUTOCAST = functools.reduce(
    operator.or_,
    (torch._C.DispatchKeySet(key) for name, key in torch._C.DispatchKey.__members__.items() if "Autocast" in name),
)


def below_autocast() -> AbstractContextManager[None]:
    """A block in which autocast is off: for a call whose operands have been converted."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def as_number(value: object) -> float | None:
    """A number of Python or NumPy as a float, infinite if a float cannot hold it; None for anything else."""
    if not isinstance(value, int | float | Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def autocast(op: str, arriving: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands in autocast's dtype where autocast is on, as ``torch.matmul`` has it."""
    kind: str = tensors[0].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    if any(tensor.dtype in FP8_DTYPES for tensor in tensors):
        return tensors  # the caller has chosen them, and scales that belong to them
    dtype = torch.get_autocast_dtype(kind)
    converted = [x.dtype not in (dtype, torch.float64) and x.is_floating_point() for x in tensors]
    if arriving and any(converted):
        raise ValueError(
            f"{op}: autocast would convert an operand that has not arrived yet; stream it in as {dtype}, or leave "
            "autocast"
        )
    return tuple(_cast(x, kind, dtype) if differs else x for x, differs in zip(tensors, converted, strict=True))


def _cast(x: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """An operand in autocast's dtype. Of a weight it is the copy that torch keeps until the outermost block ends."""
    if torch.compiler.is_compiling() or kind == "cpu" or not (x.is_leaf and x.requires_grad):
        return x.to(dtype)
    # Autocast converts the operand of this op on a GPU, and the op returns a view of the converted operand.
    return torch.ops.aten.einsum.default("...->...", [x])  # type: ignore[no-any-return]
