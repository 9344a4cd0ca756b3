"""Arguments of the ops across ranks: checked before anything is sent, whole, as the matmul will have them.

What a matmul asks of its operands is asked by the matmul itself: it is called once on tensors without memory, of the
shapes that it will be given, and what it would raise is raised before any rank hears of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tilestream.arrival.flat import check_deadline
from tilestream.distributed.dispatch import FORMS
from tilestream.distributed.group_state import Member
from tilestream.ops.operands import Options, multiply
from tilestream.plan.problem import dtype_name

#: Shape and dtype.
Kind = tuple[tuple[int, ...], torch.dtype]
Tensors = Sequence["torch.Tensor | None"]


class Operands(NamedTuple):
    """B and what belongs to each of them; all of one length."""

    bs: Sequence[torch.Tensor]
    biases: Tensors
    scales: Tensors
    activations: Sequence[str]


def as_lists(
    op: str,
    b: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Tensors | None,
    scale_b: torch.Tensor | Tensors | None,
    activation: str | Sequence[str | None] | None,
) -> Operands:
    """One B or several, as several. A bias or scale that is given for one B alone is in a list, too.

    Raises
    ------
    ValueError, TypeError
        If there is no B, or not one of each for each.
    """
    bs = [b] if isinstance(b, torch.Tensor) else b
    if not isinstance(bs, list | tuple) or not bs or not all(isinstance(x, torch.Tensor) for x in bs):
        raise TypeError(f"{op}: b is {type(b).__name__}; it is a tensor, or a list of at least one")

    def each(name: str, given: object) -> list[object]:
        if given is None or (isinstance(given, str) and name == "activation"):
            return [given] * len(bs)
        if isinstance(given, torch.Tensor):
            given = [given]
        if not isinstance(given, list | tuple) or len(given) != len(bs):
            what = "one tensor" if isinstance(given, torch.Tensor) else f"{given!r}"[:60]
            count = len(given) if isinstance(given, list | tuple) else what
            raise ValueError(f"{op}: {name}: {count} for {len(bs)} b; there is one for each, None where there is none")
        return list(given)

    for name, given in (("bias", bias), ("scale_b", scale_b)):
        for x in each(name, given):
            if x is not None and not isinstance(x, torch.Tensor):
                raise TypeError(f"{op}: {name} is a {type(x).__name__}; it is a torch.Tensor or None")
    activations = [x or "none" for x in each("activation", activation)]
    return Operands(list(bs), each("bias", bias), each("scale_b", scale_b), activations)  # type: ignore[arg-type]


def check_dim(op: str, name: str, dim: int, a: torch.Tensor, of: str = "a") -> int:
    """The dimension of ``a``, which the caller knows as ``of``, that is cut, counted from the front."""
    if not isinstance(a, torch.Tensor):
        raise TypeError(f"{op}: {of} is a {type(a).__name__}; it is a torch.Tensor")
    if a.dim() < 2:
        raise ValueError(f"{op}: {of} has {a.dim()} dimensions; it has at least 2: unsqueeze a vector")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -a.dim() <= dim < a.dim():
        raise ValueError(f"{op}: {name}={dim!r}; it is a dimension of {of}, {-a.dim()} to {a.dim() - 1}")
    try:
        dtype_name(a.dtype)
    except TypeError as error:
        raise TypeError(f"{op}: {of}: {error}") from None
    return dim % a.dim()


def check_form(op: str, form: str) -> None:
    """Raise unless it is one of `FORMS`."""
    if form not in FORMS:
        raise ValueError(f"{op}: form={form!r}; it is one of {', '.join(FORMS)}")


def check_devices(op: str, a: torch.Tensor, **others: Tensors) -> None:
    """Raise unless all are on ``a``'s device, which is the CPU or a GPU."""
    if a.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{op}: a is on {a.device}; ranks exchange tensors on the CPU and on GPUs")
    for name, tensors in others.items():
        for x in tensors:
            if x is not None and not isinstance(x, torch.Tensor):
                raise TypeError(f"{op}: {name} is a {type(x).__name__}; it is a torch.Tensor or None")
            if x is not None and x.device != a.device:
                raise ValueError(f"{op}: {name} is on {x.device}, a on {a.device}; all are on one device")


def seconds_of(deadline: float | None, member: Member, device: str) -> float:
    """The deadline; where the caller does not say, the group's own timeout."""
    return check_deadline(member.timeout(device) if deadline is None else deadline)


def rehearse(
    op: str, a: Kind, operands: Operands, scale_a: torch.Tensor | None, out_dtype: torch.dtype | None
) -> list[torch.dtype]:
    """Raise what the matmuls would; returns their results' dtypes.

    Parameters
    ----------
    a
        What each B is multiplied with, as it will be: ``[M, K]``.
    scale_a
        Of those rows: ``[M, 1]``, or of one element.
    """
    return [
        _rehearsed(
            op, a, _kind(b), None if bias is None else _kind(bias), None if scale_a is None else _kind(scale_a),
            None if scale is None else _kind(scale), activation, out_dtype,
        )
        for b, bias, scale, activation in zip(*operands, strict=True)
    ]  # fmt: skip


def _kind(x: torch.Tensor) -> Kind:
    return tuple(x.shape), x.dtype


@functools.lru_cache(1024)
def _rehearsed(
    op: str, a: Kind, b: Kind, bias: Kind | None, scale_a: Kind | None, scale_b: Kind | None, activation: str,
    out_dtype: torch.dtype | None,
) -> torch.dtype:  # fmt: skip
    if len(b[0]) != 2:
        raise ValueError(f"{op}: b has shape {list(b[0])}; it is a matrix: [{a[0][-1]}, N]")
    tensors = [None if kind is None else torch.empty(kind[0], dtype=kind[1], device="meta") for kind in (a, b)]
    rest = [
        None if kind is None else torch.empty(kind[0], dtype=kind[1], device="meta")
        for kind in (bias, scale_a, scale_b)
    ]
    options = Options(
        op, bias=rest[0], activation=None if activation == "none" else activation, out_dtype=out_dtype,
        scale_a=rest[1], scale_b=rest[2],
    )  # fmt: skip
    assert tensors[0] is not None
    assert tensors[1] is not None
    with torch.no_grad():
        return multiply(tensors[0], tensors[1], options).dtype
