"""`tilestream.use_invariant_torch`: torch's own functions with the promise of `tilestream.invariant`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from tilestream.ops.attention_routes import attention_of_torch
from tilestream.ops.limit import invariant
from tilestream.ops.matmul import addmm, bmm, linear, matmul, mm

#: Columns that a program of `sum_rows` adds at a time.
_BLOCK = 1024
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class use_invariant_torch(TorchFunctionMode):  # noqa: N801 -- a block, as `use_attention` is
    """In this block a program's own calls of torch give each row the same bits, alone and in any batch.

    ``torch.mm``, ``addmm``, ``bmm``, ``matmul`` and ``@``, ``F.linear`` and ``F.scaled_dot_product_attention`` run as
    tilestream's ops under `tilestream.invariant`. ``sum``, ``mean``, ``softmax``, ``log_softmax``, ``F.rms_norm`` and
    ``F.layer_norm`` add each row in one order. So a model's logits for a prompt have the same bits in every batch.
    Elementwise functions stay torch's: a GPU computes an element to the same bits at every place. Other sums stay
    torch's, too, without the promise: ``var``, ``norm``, ``cumsum``, ``cross_entropy`` and the like.

    All of it has gradients. A weight's gradient is a sum over rows, so it depends on all of them.

    Raises
    ------
    NotImplementedError
        In the block, for functions without the promise: ``torch.einsum``, ``baddbmm``, ``mv`` and the like,
        convolutions, recurrent layers, grouped and scaled products, ``torch.nn.MultiheadAttention``, attention with a
        mask or dropout, batch norms. Use one of the functions above, or call them outside of the block.

    Examples
    --------
    >>> layer, x = torch.nn.Linear(16, 32), torch.randn(5, 16)
    >>> with use_invariant_torch():
    ...     torch.equal(layer(x)[2:3], layer(x[2:3]))
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[invariant] = []

    def __enter__(self) -> use_invariant_torch:
        block = invariant()
        block.__enter__()
        self._blocks.append(block)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._blocks.pop().__exit__(kind, error, trace)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        kwargs = kwargs or {}
        ours = _ROUTES.get(func)
        if (ours is None and func not in _REFUSED) or not any(map(_has_floats, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        if ours is None:
            name = getattr(func, "__name__", str(func))
            raise NotImplementedError(
                f"{name} under use_invariant_torch: the order in which it adds depends on the batch; write it as "
                "matmul, bmm, linear or scaled_dot_product_attention, or leave the block for it"
            )
        return ours(*args, **kwargs)


def _has_floats(x: object) -> bool:
    floats = isinstance(x, torch.Tensor) and x.is_floating_point()
    return floats or (isinstance(x, list | tuple) and any(map(_has_floats, x)))


# Rows -----------------------------------------------------------------------------------------------------------------


class _SumRows(torch.autograd.Function):
    """The sums of a float32 matrix's rows."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:  # row by row: torch cuts a sum of many rows by their number
            return torch.stack([row.clone().sum() for row in x.unbind()]) if len(x) else x.new_empty(0)
        from tilestream.kernels.portable.rows import sum_rows

        out = x.new_empty(len(x))
        if len(x):
            with torch.cuda.device(x.device):
                sum_rows[(len(x),)](x, out, x.shape[1], x.stride(0), BLOCK=_BLOCK, num_warps=4)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.columns = inputs[0].shape[1]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return _sums(x.movedim(in_dims[0], 0)).squeeze(-1), 0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad[:, None].expand(-1, ctx.columns)


def _sums(x: torch.Tensor) -> torch.Tensor:
    """float32 sums along the last dimension, which is kept with one element."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()
    return _SumRows.apply(rows).reshape(*x.shape[:-1], 1)  # type: ignore[no-untyped-call, no-any-return]


def _rowwise(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A function of rows ``[R, N]`` in float32. On the CPU row by row: elements of a vector's tail round otherwise."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).float()
    if x.is_cuda or not len(rows):
        return function(rows).reshape(x.shape)
    return torch.cat([function(row) for row in rows.split(1)]).reshape(x.shape)


def _checked(name: str, x: torch.Tensor) -> None:
    if x.dtype not in _FLOATS:
        raise NotImplementedError(
            f"{name} under use_invariant_torch: {x.dtype}; rows are added in float32: convert to float32 first"
        )


def _along(x: torch.Tensor, dim: int, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`_rowwise` along a dimension."""
    return _rowwise(x.movedim(dim, -1), function).movedim(-1, dim)


def _exponentials(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows minus their maxima, and the exponentials of these."""
    shifted = x - x.detach().amax(-1, keepdim=True)
    return shifted, shifted.exp()


def _log_softmax_of_rows(x: torch.Tensor) -> torch.Tensor:
    shifted, weights = _exponentials(x)
    return shifted - _sums(weights).log()


def _softmax_of_rows(x: torch.Tensor) -> torch.Tensor:
    return (weights := _exponentials(x)[1]) / _sums(weights)


def _of_softmax(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(
        input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if isinstance(_stacklevel, torch.dtype):  # torch.softmax and Tensor.softmax have the dtype third
            dtype = _stacklevel
        x = input if dtype is None else input.to(dtype)
        _checked(name, x)
        if dim is None:
            raise ValueError(f"{name} under use_invariant_torch: dim=None; name the dimension")
        return _along(x, dim, function).to(x.dtype)

    return run


def _of_sums(name: str, is_mean: bool) -> Callable[..., torch.Tensor]:
    def run(
        input: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *,
        dtype: torch.dtype | None = None, axis: int | Sequence[int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        x = input if dtype is None else input.to(dtype)
        _checked(name, x)
        found = _dimensions(x, dim if dim is not None else axis)
        if not x.dim():
            return x.clone()
        turned = x.movedim(found, list(range(-len(found), 0)))
        flat = turned.reshape(*turned.shape[: x.dim() - len(found)], math.prod(x.shape[i] for i in found)).float()
        made = _sums(flat).squeeze(-1)
        made = (made / flat.shape[-1] if is_mean else made).to(x.dtype)
        return made.reshape([1 if i in found else n for i, n in enumerate(x.shape)]) if keepdim else made

    run.__qualname__ = f"{name} under use_invariant_torch"  # Python's message for an unknown argument names it
    return run


def _dimensions(x: torch.Tensor, dims: int | Sequence[int] | None) -> list[int]:
    """The dimensions to add, in order. As in torch, None or an empty list means all."""
    given, count = [dims] if isinstance(dims, int) else list(dims or ()), max(x.dim(), 1)
    if any(not -count <= one < count for one in given):
        raise IndexError(f"dim={dims}; x has {x.dim()} dimensions: {list(x.shape)}")
    return sorted(one % count for one in given) if given else list(range(x.dim()))


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None,
) -> torch.Tensor:  # fmt: skip
    _checked("rms_norm", input)
    small = torch.finfo(torch.float32).eps if eps is None else eps  # of 16 bits, too: torch's, of what it computes in

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x * (_sums(x * x) / x.shape[-1] + small).rsqrt()

    made = _over(input, normalized_shape, normed)
    return (made if weight is None else made * weight).to(input.dtype)


def _layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True,
) -> torch.Tensor:  # fmt: skip
    _checked("layer_norm", input)

    def normed(x: torch.Tensor) -> torch.Tensor:
        centred = x - _sums(x) / x.shape[-1]
        return centred * (_sums(centred * centred) / x.shape[-1] + eps).rsqrt()

    made = _over(input, normalized_shape, normed)
    made = made if weight is None else made * weight
    return (made if bias is None else made + bias).to(input.dtype)


def _over(x: torch.Tensor, shape: Sequence[int], function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`_rowwise` over the last dimensions, float32."""
    if tuple(x.shape[-len(shape) :]) != tuple(shape):
        raise ValueError(f"normalized_shape={list(shape)}; input has shape {list(x.shape)}, which does not end so")
    return _rowwise(x.flatten(-len(shape)), function).reshape(x.shape)


# Routes ---------------------------------------------------------------------------------------------------------------


_tensor = torch.Tensor
_ROUTES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.mm, _tensor.mm), mm),
    **dict.fromkeys((torch.bmm, _tensor.bmm), bmm),
    **dict.fromkeys((torch.addmm, _tensor.addmm), addmm),
    **dict.fromkeys((torch.matmul, torch.linalg.matmul, _tensor.matmul, _tensor.__matmul__), matmul),
    _tensor.__rmatmul__: lambda x, other: matmul(other, x),
    F.linear: linear,
    F.scaled_dot_product_attention: attention_of_torch,
    **dict.fromkeys((torch.mean, _tensor.mean), _of_sums("mean", True)),
    **dict.fromkeys((torch.sum, _tensor.sum), _of_sums("sum", False)),
    **dict.fromkeys((torch.softmax, _tensor.softmax, F.softmax), _of_softmax("softmax", _softmax_of_rows)),
    **dict.fromkeys(
        (torch.log_softmax, _tensor.log_softmax, F.log_softmax), _of_softmax("log_softmax", _log_softmax_of_rows)
    ),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _rms_norm),
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _layer_norm),
}
#: Functions whose order of additions depends on the batch, or that multiply inside torch.
_REFUSED = {
    torch.einsum, torch.tensordot, torch.baddbmm, _tensor.baddbmm, torch.addbmm, _tensor.addbmm, torch.mv, _tensor.mv,
    torch.addmv, _tensor.addmv, torch.chain_matmul, torch.linalg.multi_dot, torch.inner, _tensor.inner, torch.dot,
    _tensor.dot, torch.vdot, _tensor.vdot, torch.linalg.vecdot, torch.bilinear, F.bilinear, F.conv1d, F.conv2d,
    F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.batch_norm, F.group_norm, F.instance_norm,
    torch.batch_norm, torch.group_norm, torch.instance_norm, F.multi_head_attention_forward, torch.lstm, torch.gru,
    torch.rnn_tanh, torch.rnn_relu, torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell,
    *(
        getattr(module, name)
        for module in (torch, F)
        for name in ("_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "grouped_mm", "scaled_mm", "scaled_grouped_mm")
        if hasattr(module, name)  # torch's versions differ in them
    ),
}  # fmt: skip
