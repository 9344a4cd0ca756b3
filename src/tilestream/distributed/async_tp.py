"""`async_tp`: run torch's fused tensor-parallel ops, for one group, on the ops of this package.

torch's compiler fuses an all-gather with the matmuls behind it, and a matmul with the reduce-scatter behind it, into
its own ops (``symm_mem.fused_all_gather_matmul``, ``fused_matmul_reduce_scatter``, and a scaled variant of each). This
module registers other implementations, also for the CPU, where torch has none. Calls with another group still run
torch's. The matmul in torch's own all-gather, which takes no group, is replaced by
`tilestream.distributed.async_input`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist

from tilestream.distributed import async_input
from tilestream.distributed.api import (
    all_gather_matmul,
    matmul_reduce_scatter,
    plan_all_gather_matmul,
    plan_matmul_reduce_scatter,
)
from tilestream.distributed.group_state import resolve, state_of
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.request import ReduceOp
from tilestream.distributed.unfused_report import UnfusedCollective, UnfusedPass

_KEYS = ("CPU", "CUDA", "Meta")


@dataclass
class Site:
    """Calls of one op on the same shapes; or collectives of one kind that torch's compiler has not fused.

    Attributes
    ----------
    op
        torch's name of the op.
    what
        Shapes and dtype.
    calls
        The number of calls so far; of unfused collectives, the number of places in compiled graphs.
    fused
        Whether transfer and matmul overlap.
    why
        Why they do, or do not.
    left
        Whether torch's compiler has left the collective unfused, so that it is not called here.
    """

    op: str
    what: str
    calls: int
    fused: bool
    why: str
    left: bool = False

    def __str__(self) -> str:
        if self.left:
            return f"{self.op} {self.what}: left in {self.calls} place{'s' * (self.calls != 1)}: {self.why}"
        form = "fused" if self.fused else "unfused"
        return f"{self.op} {self.what}: {self.calls} call{'s' * (self.calls != 1)}, {form}: {self.why}"


class AsyncTP:
    """A group whose fused ops run on this package. Made by `async_tp`; as a context manager it closes itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sites: dict[tuple[str, str], Site] = {}
        self._lock = threading.Lock()

    def report(self) -> list[Site]:
        """The calls so far, most first; then the collectives that torch's compiler has left unfused, and why.

        A graph from the compiler's cache is not reported.
        """
        with self._lock:
            return sorted(self._sites.values(), key=lambda site: (site.left, -site.calls))

    def close(self) -> None:
        """Give the group's calls back to torch.

        Graphs that were compiled meanwhile call the ops by name, so they now run torch's. Those return another memory
        layout if a dimension after the first is gathered, and such a graph raises: compile it again
        (`torch._dynamo.reset`).
        """
        _close(self._name, self)

    def _count(self, op: str, what: str, plan: Callable[[], DistributedPlan] | str) -> None:
        """Count a call. ``plan`` makes its plan, or is the reason why it has none."""
        with self._lock:
            site = self._sites.get((op, what))
            if site is None:
                fused, why = (False, plan) if isinstance(plan, str) else _form_and_reason(plan())
                site = self._sites[op, what] = Site(op, what, 0, fused, why)
            site.calls += 1

    def _count_unfused(self, found: UnfusedCollective) -> None:
        with self._lock:
            key = found.op, f"{found.what}: {found.why}"
            site = self._sites.setdefault(key, Site(found.op, found.what, 0, False, found.why, left=True))
            site.calls += 1

    def __enter__(self) -> AsyncTP:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _form_and_reason(plan: DistributedPlan) -> tuple[bool, str]:
    return plan.fused, plan.decision.why if plan.fused else "; ".join(refusal.why for refusal in plan.refused)


#: Why a reduce-scatter runs as torch's matmul, then the group's collective.
_COLUMNS = "columns are scattered: a rank's part is no rows of the product, so it is done one after the other"

_lock = threading.Lock()
_open: dict[str, AsyncTP] = {}
_library: torch.library.Library | None = None
_pass_before = False


def async_tp(group: dist.ProcessGroup | None = None) -> AsyncTP:
    """Run torch's fused tensor-parallel ops of ``group`` (None: the default group) on this package, until closed.

    Also enables the pass of torch's compiler that makes such ops from a model built with ``parallelize_module``, and
    enables symmetric memory for the group, without which that pass silently does nothing.

    Returns
    -------
    AsyncTP
        ``report()`` lists the calls, how they ran, and what the compiler left unfused; ``close()`` ends it.

    Raises
    ------
    ValueError
        If the group is open already, or `all_gather_matmul` does not take it.

    Examples
    --------
    >>> with async_tp(mesh["tp"].get_group()) as tp:  # doctest: +SKIP
    ...     torch.compile(model)(x)
    ...     for site in tp.report():
    ...         print(site)
    """
    state = state_of("async_tp", group)
    with _lock:
        if state.name in _open:
            raise ValueError(f"async_tp: group {state.name!r} is run by tilestream already; close() the first handle")
        if not _open:
            _install()
        from torch.distributed import _symmetric_memory as symmetric

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            symmetric.enable_symm_mem_for_group(state.name)
        handle = _open[state.name] = AsyncTP(state.name)
    return handle


def _install() -> None:
    """Register the implementations over torch's, and enable the compiler's pass."""
    global _library, _pass_before
    import torch._inductor.config as inductor
    import torch.distributed._symmetric_memory  # defines the ops

    _library = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of overriding a kernel, which is intended
        for op, function in _IMPLEMENTATIONS.items():
            for key in _KEYS:
                _library.impl(op, function, key, allow_override=True)
        async_input.register(_library)
    _pass_before = inductor._micro_pipeline_tp
    inductor._micro_pipeline_tp = True
    inductor.post_grad_custom_post_pass = UnfusedPass(_report_unfused, inductor.post_grad_custom_post_pass)


def _report_unfused(found: UnfusedCollective) -> None:
    handle = _open.get(found.group)
    if handle is not None:
        handle._count_unfused(found)


def _close(name: str, handle: AsyncTP) -> None:
    global _library
    with _lock:
        if _open.get(name) is not handle:
            return
        del _open[name]
        if not _open and _library is not None:
            import torch._inductor.config as inductor

            inductor._micro_pipeline_tp = _pass_before
            installed = inductor.post_grad_custom_post_pass
            if isinstance(installed, UnfusedPass):  # otherwise it was replaced after `_install`, and stays
                inductor.post_grad_custom_post_pass = installed.before
            _library._destroy()
            _library = None


def _torch_fallback(name: str) -> Callable[..., Any]:
    """Torch's own implementation, with plain collectives."""
    from torch.distributed import _symmetric_memory as symmetric

    found: Callable[..., Any] = getattr(symmetric, f"_{name}_fallback")
    return found


def _torch_implementation(name: str, x: torch.Tensor) -> Callable[..., Any]:
    """Torch's own implementation: the fused one on a GPU, otherwise that with plain collectives."""
    from torch.distributed import _symmetric_memory as symmetric

    found: Callable[..., Any] = getattr(symmetric, f"_{name}") if x.is_cuda else _torch_fallback(name)
    return found


def _shapes(a: torch.Tensor, bs: Sequence[torch.Tensor], dim: int) -> str:
    return f"{list(a.shape)} @ {', '.join(str(list(b.shape)) for b in bs)}, dim {dim}, {a.dtype}".replace("torch.", "")


def _gathered_shape(a: torch.Tensor, dim: int, group: str) -> list[int]:
    shape = list(a.shape)
    shape[dim] *= resolve(group).size()
    return shape


def _part_shape(shape: list[int], dim: int, group: str) -> list[int]:
    shape[dim] //= resolve(group).size()
    return shape


def _gather(
    a: torch.Tensor, bs: list[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    name, handle = "fused_all_gather_matmul", _open.get(group_name)
    if handle is None:
        theirs: tuple[torch.Tensor | None, list[torch.Tensor]] = _torch_implementation(name, a)(
            a, bs, gather_dim, group_name, return_A=return_A
        )
        return theirs
    if a.is_meta:
        shape = _gathered_shape(a, gather_dim, group_name)
        outs = [a.new_empty((*shape[:-1], b.shape[1])) for b in bs]
        return a.new_empty(shape) if return_A else None, outs
    group = resolve(group_name)
    handle._count(
        name, _shapes(a, bs, gather_dim), lambda: plan_all_gather_matmul(a, bs, gather_dim=gather_dim, group=group)
    )
    result: Any = all_gather_matmul(a, list(bs), gather_dim=gather_dim, group=group, return_a=return_A)
    return result if return_A else (None, result)


def _scaled_gather(
    a: torch.Tensor, bs: list[torch.Tensor], a_scale: torch.Tensor, b_scales: list[torch.Tensor], gather_dim: int,
    group_name: str, biases: list[torch.Tensor | None], result_scales: list[torch.Tensor | None],
    out_dtypes: list[torch.dtype | None], use_fast_accum: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    name, handle = "fused_all_gather_scaled_matmul", _open.get(group_name)
    from torch.distributed import _symmetric_memory as symmetric

    # A schema passes a list of dtypes as numbers. None would be a result of 8 bits.
    dtypes = symmetric._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    if handle is None or None in dtypes or any(x is not None for x in result_scales):
        theirs: tuple[torch.Tensor, list[torch.Tensor]] = _torch_implementation(name, a)(
            a, bs, a_scale, b_scales, gather_dim, group_name, biases, result_scales, out_dtypes, use_fast_accum
        )
        return theirs
    shape = _gathered_shape(a, gather_dim, group_name)
    if a.is_meta:
        outs = [a.new_empty((*shape[:-1], b.shape[1]), dtype=x) for b, x in zip(bs, dtypes, strict=True)]
        return a.new_empty(shape), outs
    group = resolve(group_name)
    scale = a_scale
    if a_scale.numel() > 1 and list(a_scale.shape[:-1]) == shape[:-1] != list(a.shape[:-1]):
        scale = a_scale.chunk(group.size(), gather_dim)[group.rank()]  # of all rows; this rank's are gathered
    handle._count(
        name, _shapes(a, bs, gather_dim),
        lambda: plan_all_gather_matmul(a, bs, gather_dim=gather_dim, group=group, scale_a=scale),
    )  # fmt: skip
    each = list(zip(bs, biases, b_scales, dtypes, use_fast_accum, strict=True))
    alike = len({(dtype, fast) for *_, dtype, fast in each}) == 1
    outs, gathered = [], None
    for some in [each] if alike else [[one] for one in each]:
        gathered, out = all_gather_matmul(
            a, [x[0] for x in some], gather_dim=gather_dim, group=group, bias=[x[1] for x in some], scale_a=scale,
            scale_b=[x[2] for x in some], out_dtype=some[0][3], use_fast_accum=some[0][4], return_a=True,
        )  # fmt: skip
        outs += out
    assert gathered is not None
    return gathered, outs


def _scatter(a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> torch.Tensor:
    name, handle = "fused_matmul_reduce_scatter", _open.get(group_name)
    if handle is None:
        theirs: torch.Tensor = _torch_implementation(name, a)(a, b, reduce_op, scatter_dim, group_name)
        return theirs
    if a.is_meta:
        return a.new_empty(_part_shape([*a.shape[:-1], b.shape[1]], scatter_dim, group_name))
    shapes = _shapes(a, [b], scatter_dim)
    if scatter_dim % a.dim() == a.dim() - 1:
        handle._count(name, shapes, _COLUMNS)
        columns: torch.Tensor = _torch_fallback(name)(a, b, reduce_op, scatter_dim, group_name)
        return columns
    group, reduction = resolve(group_name), cast(ReduceOp, reduce_op)  # checked by the op
    handle._count(name, shapes, lambda: plan_matmul_reduce_scatter(a, b, scatter_dim=scatter_dim, group=group))
    return matmul_reduce_scatter(a, b, scatter_dim=scatter_dim, reduce_op=reduction, group=group)


def _scaled_scatter(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, reduce_op: str,
    orig_scatter_dim: int, scatter_dim_after_maybe_reshape: int, group_name: str, output_shape: list[int] | None,
    bias: torch.Tensor | None = None, result_scale: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    name, handle, dim = "fused_scaled_matmul_reduce_scatter", _open.get(group_name), orig_scatter_dim
    given = (
        a, b, a_scale, b_scale, reduce_op, dim, scatter_dim_after_maybe_reshape, group_name, output_shape, bias,
        result_scale, out_dtype, use_fast_accum,
    )  # fmt: skip
    if handle is None or result_scale is not None or output_shape is None or out_dtype is None:
        theirs: torch.Tensor = _torch_implementation(name, a)(*given)
        return theirs
    if a.is_meta:
        return a.new_empty(_part_shape([*output_shape[:-1], b.shape[1]], dim, group_name), dtype=out_dtype)
    if dim % len(output_shape) == len(output_shape) - 1:
        handle._count(name, _shapes(a, [b], dim), _COLUMNS)
        columns: torch.Tensor = _torch_fallback(name)(*given)
        return columns
    group, reduction = resolve(group_name), cast(ReduceOp, reduce_op)  # checked by the op
    rows = a.reshape(*output_shape[:-1], a.shape[-1])
    scale = a_scale if a_scale.numel() == 1 else a_scale.reshape(*output_shape[:-1], 1)
    if bias is not None and reduce_op == "sum":
        bias = bias * group.size()  # torch adds it to each rank's product
    handle._count(
        name, _shapes(rows, [b], dim), lambda: plan_matmul_reduce_scatter(rows, b, scatter_dim=dim, group=group)
    )
    return matmul_reduce_scatter(
        rows, b, scatter_dim=dim, reduce_op=reduction, group=group, bias=bias, scale_a=scale, scale_b=b_scale,
        out_dtype=out_dtype, use_fast_accum=use_fast_accum,
    )  # fmt: skip


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "fused_all_gather_matmul": _gather,
    "fused_all_gather_scaled_matmul": _scaled_gather,
    "fused_matmul_reduce_scatter": _scatter,
    "fused_scaled_matmul_reduce_scatter": _scaled_scatter,
}
