"""`Request`: the arguments of an op across ranks, checked before anything is sent.

The matmul checks its own operands: it is called once with tensors of the same shapes on the meta device, and raises
before anything is sent.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch.compiler import is_compiling

from tilestream.arrival.flat import check_deadline
from tilestream.core.errors import kind_of
from tilestream.distributed.dispatch import FORMS, Form, Op, on_trial
from tilestream.distributed.group_state import GroupState
from tilestream.ops import native, streamed
from tilestream.ops import request as matmul
from tilestream.ops.checks import autocast, refuse_tangents
from tilestream.ops.inline import PLAIN, unseen
from tilestream.plan.limit import is_invariant, limit
from tilestream.plan.problem import dtype_name
from tilestream.runtime import shutdown
from tilestream.runtime.channel import check_device

GATHER: Op = "all_gather_matmul"
REDUCE_SCATTER: Op = "matmul_reduce_scatter"
ALL_REDUCE: Op = "matmul_all_reduce"
ReduceOp = Literal["sum", "avg"]
REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)

_LISTS, _MAYBE_DTYPE = (list, tuple), (type(None), torch.dtype)
#: The parameters of `native.product` after the operands, with the values of a plain product.
_PLAIN_PRODUCT: tuple[tuple[str, object], ...] = (
    ("out", None), ("bias", None), ("residual", None), ("alpha", 1.0), ("beta", 1.0), ("activation", None),
    ("out_dtype", None), ("scale_a", None), ("scale_b", None), ("fast_accum", True), ("schedule", "auto"),
    ("workers", None),
)  # fmt: skip

#: A shape and a dtype.
Kind = tuple[tuple[int, ...], torch.dtype]
Tensors = Sequence["torch.Tensor | None"]
#: One value, or one for each B.
Bs = torch.Tensor | Sequence[torch.Tensor]
PerB = torch.Tensor | Tensors | None


class Request(NamedTuple):
    """The arguments of one call."""

    op: Op
    a: torch.Tensor  # the left operand; for a gather, this rank's shard of it
    #: bs, biases, scales_b, activations: the right operands and the options of each; all have one length.
    bs: Sequence[torch.Tensor]
    biases: Tensors
    activations: Sequence[str]
    scale_a: torch.Tensor | None
    scales_b: Tensors
    dim: int = 0  # the dimension of ``a`` that is gathered or scattered; unused by an all-reduce
    reduce_op: str = "sum"
    out_dtype: torch.dtype | None = None
    fast_accum: bool = True
    return_a: bool = False  # whether a gather returns the gathered ``a``
    form: Form = "auto"
    deadline: float | None = None  # seconds; None: the group's own timeout
    invariant: bool | None = None  # of a plan: `tilestream.invariant` as the caller says; None: as the context says

    @property
    def promises(self) -> bool:
        """Whether the call has the promise of `tilestream.invariant`."""
        return is_invariant(limit()) if self.invariant is None else self.invariant

    @property
    def b(self) -> torch.Tensor:
        """The right operand of an op that takes one."""
        return self.bs[0]

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of an op that takes one B."""
        return self.biases[0]

    @property
    def scale_b(self) -> torch.Tensor | None:
        """The scale of the right operand of an op that takes one B."""
        return self.scales_b[0]

    def divisor(self, world: int) -> float:
        """The divisor of the sum over all ranks."""
        return float(world if self.reduce_op == "avg" else 1)

    @property
    def cuts_last(self) -> bool:
        """Whether the last dimension of ``a`` is cut."""
        return self.dim == self.a.dim() - 1

    def key(self, state: GroupState) -> tuple[object, ...]:
        """The values that decide a call: equal calls differ only in contents, addresses and a deadline's length."""
        a = self.a
        return (
            self.op, _layout(a), tuple(map(_layout, self.bs)), tuple(map(_layout, self.biases)),
            tuple(self.activations), _layout(self.scale_a), tuple(map(_layout, self.scales_b)), self.dim,
            self.reduce_op, self.out_dtype, self.fast_accum, self.return_a, self.form, self.deadline is None,
            on_trial(), state.unreachable, self.promises, state.capture(a),
        )  # fmt: skip

    @property
    def kind(self) -> str:
        """What decides a call's kernels, beside shapes, strides and what ranks compare anyway, in words."""
        scales = " ".join("-" if x is None else str(x.numel()) for x in (self.scale_a, *self.scales_b))
        biases = "".join("-" if x is None else "b" for x in self.biases)
        parts = {
            "K": self.a.shape[-1], "columns": "+".join(str(b.shape[-1]) for b in self.bs),
            "scales": scales if scales.strip("- ") else "", "bias": biases.strip("-") and biases,
            "activation": "+".join(self.activations) if any(x != "none" for x in self.activations) else "",
            "out_dtype": "" if self.out_dtype is None else dtype_name(self.out_dtype),
            "fast_accum": self.fast_accum, "return_a": self.return_a,
        }  # fmt: skip
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value != "")

    def product(self, a: torch.Tensor, i: int = 0, **changes: Any) -> torch.Tensor:
        """``a @ bs[i]`` with the call's options, except ``changes``."""
        activation = None if self.activations[i] == "none" else self.activations[i]
        of_call = {
            "bias": self.biases[i], "activation": activation, "out_dtype": self.out_dtype, "scale_a": self.scale_a,
            "scale_b": self.scales_b[i], "fast_accum": self.fast_accum, **changes,
        }  # fmt: skip
        b, made = self.bs[i], None
        if of_call.get("arrival") is None:
            made = native.product("matmul", a, b, *[of_call.get(name, default) for name, default in _PLAIN_PRODUCT])
        return matmul.multiply(matmul.Request(self.op, a, b, **of_call)) if made is None else made

    def rehearse(self, rows: int, k: int, gathers_scales: bool = False) -> list[torch.dtype]:
        """Check the matmuls of ``[rows, k]`` without memory; returns the dtypes of their results.

        ``gathers_scales``: whether the matmul gets one scale a row even if the caller gave one scale.
        """
        scale = None if self.scale_a is None else _kind(self.scale_a)
        if self.scale_a is not None and (gathers_scales or self.scale_a.numel() > 1):
            scale = (rows, 1), self.scale_a.dtype
        each = zip(self.bs, self.biases, self.scales_b, self.activations, strict=True)
        return [
            _rehearsed(
                self.op, ((rows, k), self.a.dtype), _kind(b), None if bias is None else _kind(bias), scale,
                None if scale_b is None else _kind(scale_b), activation, self.out_dtype,
            )
            for b, bias, scale_b, activation in each
        ]  # fmt: skip

    def scales_of_rows(self) -> torch.Tensor | None:
        """``scale_a``, expanded to one scale a row: ``[..., 1]``."""
        if self.scale_a is None:
            return None
        scale, rows, name = self.scale_a, (*self.a.shape[:-1], 1), "a_shard" if self.op == GATHER else "a"
        try:
            return one_a_row(scale, rows)
        except RuntimeError:
            raise ValueError(
                f"{self.op}: scale_a has shape {list(scale.shape)}; it has one element, or one a row of {name}: what "
                f"broadcasts to {list(rows)}"
            ) from None

    def check_one_scale(self) -> None:
        """Raise if K is cut and there is more than one ``scale_a``."""
        if self.scale_a is not None and self.scale_a.numel() > 1:
            raise ValueError(
                f"{self.op}: scale_a has {self.scale_a.numel()} elements; with K cut (gather_dim={self.dim}) it has one"
            )

    def seconds(self, state: GroupState) -> float:
        """The deadline; by default the group's own timeout."""
        return check_deadline(state.timeout(self.a.device.type) if self.deadline is None else self.deadline)

    def begin(self, *states: GroupState) -> None:
        """Raise if an earlier call on the device has expired, or a group is broken."""
        if self.a.is_cuda:
            check_device(self.a.device.index)  # first, because an expiry says more than a broken group
        for state in states:
            state.check()

    def running(self, state: GroupState | None = None) -> contextlib.AbstractContextManager[None]:
        """The context of the call: see the function `running`."""
        return running(self.a.device.type, state)


def one_a_row(scale: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """A scale of one element, or one a row, as ``rows``: ``[..., 1]``; `RuntimeError` if it does not broadcast."""
    if scale.numel() == 1:
        return scale.view(()).expand(rows)
    return (scale.unsqueeze(-1) if scale.dim() == 1 else scale).expand(rows)


@contextlib.contextmanager
def running(kind: str, state: GroupState | None) -> Iterator[None]:
    """The context of a call on this kind of device: serialised in ``state``, without autograd and autocast."""
    call = contextlib.nullcontext() if state is None else state.call()
    # Making an autocast block costs more than testing whether it is needed.
    autocasts = torch._C._is_any_autocast_enabled()
    with (
        shutdown.call(), call, torch.no_grad(),
        torch.autocast(kind, enabled=False) if autocasts else contextlib.nullcontext(),
    ):  # fmt: skip
        yield


def given_request(
    op: Op, a: Any, b: Any, *, dim: Any = 0, reduce_op: Any = "sum", bias: Any = None, activation: Any = None,
    scale_a: Any = None, scale_b: Any = None, out_dtype: Any = None, fast_accum: Any = True, return_a: Any = False,
    form: Any = "auto", deadline: Any = None,
) -> Request | None:  # fmt: skip
    """The arguments in the form of `check_request`, unchecked; None for a call that must go to the registered op.

    They are valid if an equal call, by `Request.key`, has been made. A call must go to the registered op if autograd, a
    mode, a subclass of tensors, a transform, a compiler, autocast or a profiler has to see it.
    """
    if is_compiling():
        return None
    bs = [b] if type(b) in PLAIN else b
    if type(bs) not in _LISTS or type(a) not in PLAIN or type(dim) is not int:
        return None
    count = len(bs)
    biases, scales_b = ([x] * count if x is None else [x] if type(x) in PLAIN else x for x in (bias, scale_b))
    activations = [activation] * count if activation is None or type(activation) is str else activation
    if any(type(x) not in _LISTS or len(x) != count for x in (biases, scales_b, activations)):
        return None
    gradients = torch.is_grad_enabled()
    for x in (a, *bs, *biases, *scales_b, scale_a):
        if x is not None and (type(x) not in PLAIN or (gradients and x.requires_grad)):
            return None
    if type(fast_accum) is not bool or type(return_a) is not bool or not -a.dim() <= dim < a.dim():
        return None
    if type(form) is not str or type(reduce_op) is not str or type(out_dtype) not in _MAYBE_DTYPE:
        return None
    if deadline is not None and not (type(deadline) in (int, float) and 0 < deadline < math.inf):
        return None
    if not unseen() or any(x is not None and type(x) is not str for x in activations):
        return None
    names = [x or "none" for x in activations]
    return Request(
        op, a, bs, biases, names, scale_a, scales_b, dim % a.dim(), reduce_op, out_dtype, fast_accum, return_a,
        cast("Form", form), deadline,
    )  # fmt: skip


def refuse_unfilled(op: str, **given: object) -> None:
    """Raise if a tensor of a call, or of a list of them, is one that a stream has not filled yet.

    Call it only if a stream is open. Other ranks may have sent already, as if any argument of this rank's were wrong.
    """
    for name, x in given.items():
        each = {f"{name}[{i}]": one for i, one in enumerate(x)} if isinstance(x, list | tuple) else {name: x}
        streamed.refuse(op, **each)


def check_request(
    op: Op, a: torch.Tensor, b: Bs, *, dim: int = 0, reduce_op: str = "sum", bias: PerB = None,
    activation: str | Sequence[str | None] | None = None, scale_a: torch.Tensor | None = None, scale_b: PerB = None,
    out_dtype: torch.dtype | None = None, fast_accum: bool = True, return_a: bool = False, form: str = "auto",
    deadline: float | None = None,
) -> Request:  # fmt: skip
    """The caller's arguments as a `Request`: one B becomes a list of one, and autocast converts the operands.

    Raises
    ------
    ValueError, TypeError
        If an argument is wrong by itself.
    """
    name, cut = ("a_shard", "gather_dim") if op == GATHER else ("a", "scatter_dim")
    if op != GATHER and not isinstance(b, torch.Tensor):
        raise TypeError(
            f"{op}: b is {kind_of(b)}; it must be one torch.Tensor: torch.cat(b, -1), or a call for each of them"
        )
    bs = [b] if isinstance(b, torch.Tensor) else b
    if not isinstance(bs, list | tuple) or not bs or not all(isinstance(x, torch.Tensor) for x in bs):
        raise TypeError(f"{op}: b is {type(b).__name__}; it must be a tensor, or a list of at least one")
    biases, scales_b = (_tensors(op, *given, len(bs)) for given in (("bias", bias), ("scale_b", scale_b)))
    activations = [str(x or "none") for x in _each(op, "activation", activation, len(bs))]
    dim = _check_dim(op, cut, dim, a, name)
    if form not in FORMS:
        raise ValueError(f"{op}: form={form!r}; it must be one of {', '.join(FORMS)}")
    if reduce_op not in REDUCE_OPS:
        raise ValueError(f"{op}: reduce_op={reduce_op!r}; it must be one of {', '.join(REDUCE_OPS)}")
    _check_devices(op, a, b=bs, bias=biases, scale_a=[scale_a], scale_b=scales_b)
    refuse_tangents(
        op, a, *bs, *biases, scale_a, *scales_b,
        why="it has no forward-mode derivative; gather, or sum, by torch.distributed's functional collectives, and "
        "multiply by tilestream.matmul",
    )  # fmt: skip
    a, *bs = autocast(op, False, a, *bs)
    return Request(
        op, a, bs, biases, activations, scale_a, scales_b, dim, reduce_op, out_dtype, fast_accum, return_a,
        form, None if deadline is None else check_deadline(deadline),
    )  # fmt: skip


def _each(op: str, name: str, given: object, count: int) -> list[object]:
    """A list with one value for each B. A single tensor becomes a list of one; one activation serves all."""
    if given is None or (isinstance(given, str) and name == "activation"):
        return [given] * count
    if isinstance(given, torch.Tensor):
        given = [given]
    if not isinstance(given, list | tuple) or len(given) != count:
        what = len(given) if isinstance(given, list | tuple) else f"{given!r}"[:60]
        raise ValueError(f"{op}: {name}: {what} for {count} b; there is one for each, None where there is none")
    return list(given)


def _tensors(op: str, name: str, given: object, count: int) -> list[torch.Tensor | None]:
    found = _each(op, name, given, count)
    for x in found:
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{op}: {name} is {kind_of(x)}; it must be a torch.Tensor or None")
    return cast("list[torch.Tensor | None]", found)


def _check_dim(op: str, cut: str, dim: int, a: torch.Tensor, name: str) -> int:
    """The cut dimension of ``a``, counted from the front; ``cut`` and ``name`` are the caller's argument names."""
    if not isinstance(a, torch.Tensor):
        raise TypeError(f"{op}: {name} is {kind_of(a)}; it must be a torch.Tensor")
    if a.dim() < 2:
        raise ValueError(f"{op}: {name} has {a.dim()} dimensions; it has at least 2: unsqueeze a vector")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -a.dim() <= dim < a.dim():
        raise ValueError(f"{op}: {cut}={dim!r}; it must be a dimension of {name}, {-a.dim()} to {a.dim() - 1}")
    try:
        dtype_name(a.dtype)
    except TypeError as error:
        raise TypeError(f"{op}: {name}: {error}") from None
    return dim % a.dim()


def _check_devices(op: str, a: torch.Tensor, **others: Tensors) -> None:
    """Raise if a tensor is not on ``a``'s device, or that is neither the CPU nor a GPU."""
    if a.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{op}: a is on {a.device}; ranks exchange tensors on the CPU and on GPUs")
    for name, tensors in others.items():
        for x in tensors:
            if x is not None and not isinstance(x, torch.Tensor):
                raise TypeError(f"{op}: {name} is {kind_of(x)}; it must be a torch.Tensor or None")
            if x is not None and x.device != a.device:
                raise ValueError(f"{op}: {name} is on {x.device}, a on {a.device}; all are on one device")


def _layout(x: torch.Tensor | None) -> object:
    """A tensor's layout. Its dispatch keys tell, for example, a negated view from a plain tensor."""
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, x.device, torch._C._dispatch_keys(x).raw_repr()


def _kind(x: torch.Tensor) -> Kind:
    return tuple(x.shape), x.dtype


@functools.lru_cache(1024)
def _rehearsed(
    op: str, a: Kind, b: Kind, bias: Kind | None, scale_a: Kind | None, scale_b: Kind | None, activation: str,
    out_dtype: torch.dtype | None,
) -> torch.dtype:  # fmt: skip
    if len(b[0]) != 2:
        raise ValueError(f"{op}: b has shape {list(b[0])}; it must be a matrix: [{a[0][-1]}, N]")
    kinds = (bias, scale_a, scale_b)
    added, of_a, of_b = (None if x is None else torch.empty(x[0], dtype=x[1], device="meta") for x in kinds)
    left, right = (torch.empty(x[0], dtype=x[1], device="meta") for x in (a, b))
    request = matmul.Request(
        op, left, right, bias=added, activation=None if activation == "none" else activation, out_dtype=out_dtype,
        scale_a=of_a, scale_b=of_b,
    )  # fmt: skip
    with torch.no_grad():
        return matmul.multiply(request).dtype
