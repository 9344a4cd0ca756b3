"""Equal unfused calls on GPUs: NCCL's collective and a matmul, with few steps of Python. See `repeats`."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import AllreduceOptions, ReduceScatterOptions

from tilestream.distributed.collective import as_bytes, on_this_stream
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.repeats import NO_EXTRAS, Gathered, PlainCall, Repeat
from tilestream.kernels.cpu.epilogue import wide_dtype
from tilestream.ops import native
from tilestream.ops.request import Request, multiply

#: The groups' collectives read them, and change nothing.
_GATHER, _SCATTER, _REDUCE = AllgatherOptions(), ReduceScatterOptions(), AllreduceOptions()


def can_repeat(plan: DistributedPlan, call: PlainCall) -> bool:
    """Whether an unfused call can be repeated: its rows are those of a contiguous matrix, and NCCL moves them.

    Without elements the usual way calls no collective. A captured call may be unfused where eager ones are not.
    """
    a = call.a
    if call.state.capture(a):
        return False
    is_plain = plan.transport == "collective" and a.dim() == 2 and call.dim == 0 and a.is_contiguous()
    has_elements = all(x.numel() for x in (a, *call.bs))
    return is_plain and has_elements and call.state.world > 1 and call.state.backend("cuda") == "nccl"


def finished(
    total: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None, divisor: int | None = None
) -> torch.Tensor:
    """The result from a sum over all ranks: the sum, over ``divisor`` for an average, plus the bias."""
    if divisor is None and bias is None:
        return total.to(dtype)
    total = total.to(wide_dtype(dtype))
    if divisor is not None:
        total /= divisor
    if bias is not None:
        total += bias
    return total.to(dtype)


class _Unfused(Repeat):
    """An unfused call, with the options of its products.

    Parameters
    ----------
    library
        Whether torch computes the product.
    """

    def __init__(
        self, device: torch.device, out_dtype: torch.dtype | None, fast_accum: bool, library: bool = False
    ) -> None:
        super().__init__(device)
        self._out_dtype, self._fast_accum, self._library = out_dtype, fast_accum, library

    def product(
        self, a: torch.Tensor, call: PlainCall, i: int = 0, *, scale_a: torch.Tensor | None = None, sums: bool = False
    ) -> torch.Tensor:
        """``a @ bs[i]`` with the call's options, in a sum (``sums``) without its bias."""
        b, extras = call.bs[i], call.extras
        if self._library:
            return torch.matmul(a, b)
        # A call with the default options has the fewest steps.
        out_dtype = None if self._out_dtype is a.dtype else self._out_dtype
        if out_dtype is None and extras is NO_EXTRAS and self._fast_accum:
            made = native.product("matmul", a, b)
            return multiply(Request("matmul", a, b)) if made is None else made
        of_call = {
            "out_dtype": out_dtype, "fast_accum": self._fast_accum, "activation": extras.activations[i],
            "bias": None if sums else extras.biases[i], "scale_a": scale_a, "scale_b": extras.scales_b[i],
        }  # fmt: skip
        made = native.product("matmul", a, b, **of_call)  # type: ignore[arg-type]
        return multiply(Request("matmul", a, b, **of_call)) if made is None else made  # type: ignore[arg-type]


class UnfusedGather(_Unfused):
    """Equal unfused gathers along the first dimension.

    Parameters
    ----------
    return_a
        Whether the caller gets all ranks' rows.
    """

    def __init__(
        self, device: torch.device, out_dtype: torch.dtype | None, fast_accum: bool, return_a: bool = False
    ) -> None:
        super().__init__(device, out_dtype, fast_accum)
        self._return_a = return_a

    def issue(self, call: PlainCall) -> Gathered:
        """See `Repeat`: all ranks' rows, None without ``return_a``, and the products."""
        a, state = call.a, call.state
        scales, gathered = call.scales_of_rows(), self._gather(state, a)
        of_all = None if scales is None else self._gather(state, scales)
        outs = [self.product(gathered, call, i, scale_a=of_all) for i in range(len(call.bs))]
        return gathered if self._return_a else None, outs

    @staticmethod
    def _gather(state: GroupState, x: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty((x.shape[0] * state.world, x.shape[1]), dtype=x.dtype, device=x.device)
        pair = (as_bytes(gathered), as_bytes(x)) if x.element_size() == 1 else (gathered, x)
        on_this_stream(state.group._allgather_base, *pair, options=_GATHER)
        return gathered


class UnfusedSum(_Unfused):
    """Equal unfused sums along the first dimension."""

    def issue(self, call: PlainCall) -> torch.Tensor:
        """See `Repeat`: the sum."""
        whole, state = self.product(call.a, call, scale_a=call.extras.scale_a, sums=True), call.state
        out = torch.empty((whole.shape[0] // state.world, whole.shape[1]), dtype=whole.dtype, device=whole.device)
        on_this_stream(state.group._reduce_scatter_base, out, whole, options=_SCATTER)
        bias = call.extras.biases[0]
        return out if bias is None else finished(out, out.dtype, bias)


class UnfusedAllReduce(_Unfused):
    """Equal unfused all-reduces."""

    def issue(self, call: PlainCall) -> torch.Tensor:
        """See `Repeat`: the sum."""
        whole, bias = self.product(call.a, call, scale_a=call.extras.scale_a, sums=True), call.extras.biases[0]
        on_this_stream(call.state.group.allreduce, [whole], options=_REDUCE)
        return whole if bias is None else (whole + bias).to(whole.dtype)
