"""`async_tp`: run torch's fused tensor-parallel ops, for one group, on the ops of this package.

Torch's compiler fuses an all-gather with the following matmuls, and a matmul with the following reduce-scatter, into
its own ops (``symm_mem.fused_all_gather_matmul``, ``fused_matmul_reduce_scatter``, and a scaled variant of each). This
module registers other implementations, also for the CPU, for which torch has none. Calls with another group still run
torch's implementations. `tilestream.distributed.async_input` replaces the matmul in torch's own all-gather, which takes
no group.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from tilestream.arrival.stream import open_streams
from tilestream.core.forks import free_in_child
from tilestream.distributed import async_input
from tilestream.distributed.api import (
    all_gather_matmul,
    matmul_reduce_scatter,
    plan_all_gather_matmul,
    plan_matmul_reduce_scatter,
)
from tilestream.distributed.counting import counting
from tilestream.distributed.dispatch import Form
from tilestream.distributed.group_state import resolve, state_of
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.request import ReduceOp, refuse_unfilled
from tilestream.distributed.unfused_report import UnfusedCollective, UnfusedPass
from tilestream.runtime.streams import is_capturing

_KEYS = ("CPU", "CUDA", "Meta")


@dataclass
class Site:
    """The calls of one op on the same shapes; or the collectives of a kind that torch's compiler has not fused.

    Attributes
    ----------
    op
        torch's name of the op.
    what
        The shapes and the dtype.
    calls
        The number of calls so far; for unfused collectives the number of places in compiled graphs.
    fused
        Whether transfer and matmul overlap.
    why
        The reason why they overlap, or do not.
    left
        Whether torch's compiler has left the collective unfused, so that these ops are not called.
    """

    op: str
    what: str
    calls: int
    fused: bool
    why: str
    left: bool = False

    def __str__(self) -> str:
        plural, form = "s" * (self.calls != 1), "fused" if self.fused else "unfused"
        how = f"left in {self.calls} place{plural}" if self.left else f"{self.calls} call{plural}, {form}"
        return f"{self.op} {self.what}: {how}: {self.why}"


class AsyncTP:
    """A group whose fused ops run on this package. Made by `async_tp`; as a context manager it closes itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sites: dict[tuple[object, ...], Site] = {}
        self._lock = threading.Lock()

    def report(self) -> list[Site]:
        """The calls so far, most frequent first; then the collectives that torch's compiler left unfused, with reasons.

        A graph from the compiler's cache is not reported.
        """
        with self._lock:
            return sorted(self._sites.values(), key=lambda site: (site.left, -site.calls))

    def close(self) -> None:
        """Give the group's calls back to torch.

        Graphs that were compiled meanwhile call the ops by name, so they then run torch's implementations, whose
        outputs have the same strides.
        """
        _close(self._name, self)

    def _count(
        self, op: str, a: torch.Tensor, bs: Sequence[torch.Tensor], dim: int, plan: Callable[[], DistributedPlan] | str
    ) -> None:
        """Count a call. ``plan`` is a function that makes its plan, or the reason why it has none."""
        key = op, a.shape, tuple(b.shape for b in bs), dim, a.dtype
        with self._lock:
            site = self._sites.get(key)
            if site is None:
                made = plan if isinstance(plan, str) else plan()
                if isinstance(made, str):
                    fused, why = False, made
                else:
                    fused, why = made.fused, "; ".join(x.why for x in made.refused) or made.decision.why
                site = self._sites[key] = Site(op, _shapes(a, bs, dim), 0, fused, why)
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


#: The reason to run a reduce-scatter as torch's matmul, then the group's collective.
_COLUMNS = "columns are scattered: a rank's part is no rows of the product, so it is done one after the other"

_lock = free_in_child(threading.Lock())
_open: dict[str, AsyncTP] = {}
_library: torch.library.Library | None = None
_pass_before = False


def async_tp(group: dist.ProcessGroup | None = None) -> AsyncTP:
    """Run torch's fused tensor-parallel ops of ``group`` (None: the default group) on this package, until closed.

    It also enables the pass of torch's compiler that makes these ops from a model built with ``parallelize_module``,
    and symmetric memory for the group, without which the pass silently does nothing.

    Returns
    -------
    AsyncTP
        ``report()`` lists the calls, their form, and the collectives that the compiler left unfused. ``close()`` ends
        it.

    Raises
    ------
    ValueError
        If the group is already open, or `all_gather_matmul` does not take it.

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
        warnings.simplefilter("ignore", UserWarning)  # the warning of an overridden kernel, which is intended
        for op, of_op in _IMPLEMENTATIONS.items():
            for key in _KEYS:
                _library.impl(op, _implementation(op, *of_op), key, allow_override=True)
        async_input.register(_library)
    _pass_before = inductor._micro_pipeline_tp
    inductor._micro_pipeline_tp = True
    _leave_out(True)
    inductor.post_grad_custom_post_pass = UnfusedPass(_report_unfused, inductor.post_grad_custom_post_pass)


def _leave_out(of_graphs: bool) -> None:
    """Have torch's compiler cut its own CUDA graphs at the ops, as at ours, or capture them again.

    ``torch._inductor.config.custom_should_partition_ops`` does not do: by that the graph behind an op gets the op's
    results in one tuple, and replays with those of the capture (torch 2.11).
    """
    if (tag := getattr(torch.Tag, "cudagraph_unsafe", None)) is None:
        return
    for op in _IMPLEMENTATIONS:
        tags = getattr(torch.ops.symm_mem, op).default.tags
        if of_graphs:
            tags.append(tag)
        else:
            tags.remove(tag)


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
            _leave_out(False)
            installed = inductor.post_grad_custom_post_pass
            if isinstance(installed, UnfusedPass):  # otherwise it was replaced after `_install`, and stays
                inductor.post_grad_custom_post_pass = installed.before
            _library._destroy()
            _library = None


def _torch_implementation(name: str, fused: bool) -> Callable[..., Any]:
    """Torch's own implementation: the fused one, or the one with plain collectives."""
    from torch.distributed import _symmetric_memory as symmetric

    found: Callable[..., Any] = getattr(symmetric, f"_{name}" if fused else f"_{name}_fallback")
    return found


def _shapes(a: torch.Tensor, bs: Sequence[torch.Tensor], dim: int) -> str:
    return f"{list(a.shape)} @ {', '.join(str(list(b.shape)) for b in bs)}, dim {dim}, {a.dtype}".replace("torch.", "")


# The ops, with the arguments of torch's ops. Each returns NotImplemented for a call that it leaves to torch.
#
# Torch gathers a dimension d before the last as the first dimension of `movedim(d, 0)`. It returns A and the products
# as views of the result, and a compiled graph asserts their strides. Its compiler makes the moved shard contiguous.


def _gather(
    handle: AsyncTP, a: torch.Tensor, bs: list[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> Any:
    if a.is_meta:
        gathered, outs = _empty_gathered(a, bs, gather_dim, group_name, [a.dtype] * len(bs))
        return gathered if return_A else None, outs
    moved = _Moved.of(a, gather_dim)
    group = _count_gather(handle, "fused_all_gather_matmul", a, bs, gather_dim, group_name, moved)
    result: Any = all_gather_matmul(
        moved.first(a), list(bs), gather_dim=moved.to, group=group, return_a=return_A, form=_form(a)
    )
    whole, products = result if return_A else (None, result)
    return None if whole is None else moved.back(whole), [moved.back(out) for out in products]


def _scaled_gather(
    handle: AsyncTP, a: torch.Tensor, bs: list[torch.Tensor], a_scale: torch.Tensor, b_scales: list[torch.Tensor],
    gather_dim: int, group_name: str, biases: list[torch.Tensor | None], result_scales: list[torch.Tensor | None],
    out_dtypes: list[torch.dtype | None], use_fast_accum: list[bool],
) -> Any:  # fmt: skip
    from torch.distributed import _symmetric_memory as symmetric

    # A schema passes a list of dtypes as numbers. None would mean an 8-bit result.
    dtypes = symmetric._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    if None in dtypes or any(x is not None for x in result_scales):
        return NotImplemented
    if a.is_meta:
        return _empty_gathered(a, bs, gather_dim, group_name, dtypes)
    group, rows = resolve(group_name), list(a.shape[:-1])
    of_all_rows = _gathered_shape(a, gather_dim, group_name)[:-1]
    if a_scale.numel() > 1 and list(a_scale.shape[:-1]) == of_all_rows != rows:
        a_scale = a_scale.chunk(group.size(), gather_dim)[group.rank()]  # this rank's scales are gathered
    moved = _Moved.of(a, gather_dim)
    if a_scale.dim() == a.dim() and a_scale.numel() > 1:
        a_scale = moved.first(a_scale)
    _count_gather(handle, "fused_all_gather_scaled_matmul", a, bs, gather_dim, group_name, moved, a_scale)
    each = list(zip(bs, biases, b_scales, dtypes, use_fast_accum, strict=True))
    alike = len({(dtype, fast) for *_, dtype, fast in each}) == 1
    outs: list[torch.Tensor] = []
    gathered = None
    for some in [each] if alike else [[one] for one in each]:
        gathered, out = all_gather_matmul(
            moved.first(a), [x[0] for x in some], gather_dim=moved.to, group=group, bias=[x[1] for x in some],
            scale_a=a_scale, scale_b=[x[2] for x in some], out_dtype=some[0][3], use_fast_accum=some[0][4],
            return_a=True, form=_form(a),
        )  # fmt: skip
        outs += out
    return None if gathered is None else moved.back(gathered), [moved.back(out) for out in outs]


def _form(x: torch.Tensor) -> Form:
    """The form of a call: unfused in the graphs that torch's compiler makes, which each rank makes for itself.

    A rank may capture such a graph anew while its peers replay theirs, whose slots may be older ones. `_install` has
    the compiler cut its graphs at these ops; a torch that does not cut captures them. Captures by hand, such as those
    of vLLM and SGLang, are the same on all ranks. Where the device counts all calls the user has chosen other graphs.
    """
    captured = x.is_cuda and counting() == "captured" and is_capturing(x.device)
    return "unfused" if captured and _is_compilers(x.device) else "auto"


def _is_compilers(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is the one on which torch's compiler captures its graphs."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        manager = trees.get_manager(device.index, create_if_none_exists=False)
    except AssertionError:  # of torch up to 2.11 in a thread that has run no graph of its compiler
        return False
    return manager is not None and torch.cuda.current_stream(device) == manager.stream


class _Moved(NamedTuple):
    """The gathered dimension ``dim``, and the place ``to`` which it is moved for the gather: the first.

    The last dimension, which cuts K, stays in its place.
    """

    dim: int
    to: int

    @classmethod
    def of(cls, a: torch.Tensor, dim: int) -> _Moved:
        return cls(dim, dim if dim % a.dim() == a.dim() - 1 else 0)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with the gathered dimension in its place for the gather."""
        return x if self.dim == self.to else x.movedim(self.dim, self.to)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """The gathered rows, or a product of them, with the dimensions in torch's order."""
        return x if self.dim == self.to else x.movedim(self.to, self.dim)


def _gathered_shape(a: torch.Tensor, dim: int, group_name: str) -> list[int]:
    shape = list(a.shape)
    shape[dim] *= resolve(group_name).size()
    return shape


def _empty_gathered(
    a: torch.Tensor, bs: list[torch.Tensor], dim: int, group_name: str, dtypes: Sequence[torch.dtype | None]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    moved = _Moved.of(a, dim)
    shape = _gathered_shape(moved.first(a), moved.to, group_name)
    outs = [a.new_empty((*shape[:-1], b.shape[1]), dtype=dtype) for b, dtype in zip(bs, dtypes, strict=True)]
    return moved.back(a.new_empty(shape)), [moved.back(out) for out in outs]


def _count_gather(
    handle: AsyncTP, op: str, a: torch.Tensor, bs: list[torch.Tensor], dim: int, group_name: str, moved: _Moved,
    scale_a: torch.Tensor | None = None,
) -> dist.ProcessGroup:  # fmt: skip
    """Count a call, and return its group."""
    group = resolve(group_name)

    def plan() -> DistributedPlan:
        return plan_all_gather_matmul(moved.first(a), bs, gather_dim=moved.to, group=group, scale_a=scale_a)

    handle._count(op, a, bs, dim, plan)
    return group


def _scatter(
    handle: AsyncTP, a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Any:
    given = a, b, reduce_op, scatter_dim, group_name
    return _scatter_rows(handle, "fused_matmul_reduce_scatter", given, a, b, reduce_op, scatter_dim, group_name)


def _scaled_scatter(
    handle: AsyncTP, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, reduce_op: str,
    orig_scatter_dim: int, scatter_dim_after_maybe_reshape: int, group_name: str, output_shape: list[int] | None,
    bias: torch.Tensor | None = None, result_scale: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:  # fmt: skip
    if result_scale is not None or output_shape is None or out_dtype is None:
        return NotImplemented
    given = (
        a, b, a_scale, b_scale, reduce_op, orig_scatter_dim, scatter_dim_after_maybe_reshape, group_name, output_shape,
        bias, result_scale, out_dtype, use_fast_accum,
    )  # fmt: skip
    rows = a.reshape(*output_shape[:-1], a.shape[-1])
    if a_scale.numel() > 1:
        a_scale = a_scale.reshape(*output_shape[:-1], 1)
    if bias is not None and reduce_op == "sum":
        bias = bias * resolve(group_name).size()  # torch adds it to each rank's product
    return _scatter_rows(
        handle, "fused_scaled_matmul_reduce_scatter", given, rows, b, reduce_op, orig_scatter_dim, group_name,
        bias=bias, scale_a=a_scale, scale_b=b_scale, out_dtype=out_dtype, use_fast_accum=use_fast_accum,
    )  # fmt: skip


def _scatter_rows(
    handle: AsyncTP, op: str, given: tuple[Any, ...], rows: torch.Tensor, b: torch.Tensor, reduce_op: str, dim: int,
    group_name: str, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Scatter rows; for columns run torch's op with its arguments ``given``."""
    group = resolve(group_name)
    if rows.is_meta:
        shape = [*rows.shape[:-1], b.shape[1]]
        shape[dim] //= group.size()
        return rows.new_empty(shape, dtype=options.get("out_dtype"))
    if dim % rows.dim() == rows.dim() - 1:
        handle._count(op, rows, [b], dim, _COLUMNS)
        if open_streams:
            refuse_unfilled(op, a=rows, b=b)
        columns: torch.Tensor = _torch_implementation(op, fused=False)(*given)
        return columns
    handle._count(op, rows, [b], dim, lambda: plan_matmul_reduce_scatter(rows, b, scatter_dim=dim, group=group))
    reduction = cast(ReduceOp, reduce_op)  # checked by the op
    form = _form(rows)
    return matmul_reduce_scatter(rows, b, scatter_dim=dim, reduce_op=reduction, group=group, form=form, **options)


def _implementation(name: str, ours: Callable[..., Any], group_at: int) -> Callable[..., Any]:
    """The registered function: ``ours``, if the group is open and ``ours`` takes the call; or else torch's."""

    def run(*given: Any, **options: Any) -> Any:
        handle = _open.get(given[group_at])
        result = NotImplemented if handle is None else ours(handle, *given, **options)
        if result is NotImplemented:
            result = _torch_implementation(name, fused=given[0].is_cuda)(*given, **options)
        return result

    return run


#: Each op's implementation, and the position of the group's name in its arguments.
_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "fused_all_gather_matmul": (_gather, 3),
    "fused_all_gather_scaled_matmul": (_scaled_gather, 5),
    "fused_matmul_reduce_scatter": (_scatter, 4),
    "fused_scaled_matmul_reduce_scatter": (_scaled_scatter, 7),
}
