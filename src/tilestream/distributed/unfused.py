"""Equal unfused calls on GPUs: NCCL's collective and a matmul, with few steps of Python. See `repeats`."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import AllreduceOptions, ReduceScatterOptions

from tilestream.distributed.collective import on_this_stream
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.repeats import Gathered, PlainCall, Repeat
from tilestream.ops import native
from tilestream.ops.request import Request, multiply


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

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """``a @ b``."""
        if self._library:
            return torch.matmul(a, b)
        of_call = {"out_dtype": self._out_dtype, "fast_accum": self._fast_accum}
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
        gathered = torch.empty((a.shape[0] * state.world, a.shape[1]), dtype=a.dtype, device=a.device)
        on_this_stream(state.group._allgather_base, gathered, a, options=AllgatherOptions())
        outs = [self.product(gathered, b) for b in call.bs]
        return gathered if self._return_a else None, outs


class UnfusedSum(_Unfused):
    """Equal unfused sums along the first dimension."""

    def issue(self, call: PlainCall) -> torch.Tensor:
        """See `Repeat`: the sum."""
        whole, state = self.product(call.a, call.bs[0]), call.state
        out = torch.empty((whole.shape[0] // state.world, whole.shape[1]), dtype=whole.dtype, device=whole.device)
        on_this_stream(state.group._reduce_scatter_base, out, whole, options=ReduceScatterOptions())
        return out


class UnfusedAllReduce(_Unfused):
    """Equal unfused all-reduces."""

    def issue(self, call: PlainCall) -> torch.Tensor:
        """See `Repeat`: the sum."""
        whole = self.product(call.a, call.bs[0])
        on_this_stream(call.state.group.allreduce, [whole], options=AllreduceOptions())
        return whole
