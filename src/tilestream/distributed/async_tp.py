"""`async_tp`: torch's own fused tensor-parallel ops, for one group, on this package's.

torch's compiler fuses an all-gather and the matmuls behind it, and a matmul and the reduce-scatter behind it, into ops
of its own (``symm_mem.fused_all_gather_matmul``, ``fused_matmul_reduce_scatter``, and a scaled form of each). They are
registered anew, for the CPU too, where torch has none; calls with another group go where they went before. So is the
product that its own all-gather is made of, which knows no group: see `tilestream.distributed.async_input`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist

from tilestream.distributed import async_input
from tilestream.distributed.all_gather import all_gather_matmul, plan_all_gather_matmul
from tilestream.distributed.group_state import member_of, resolve
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.reduce_scatter import matmul_reduce_scatter, plan_matmul_reduce_scatter

if TYPE_CHECKING:
    from tilestream.distributed.unfused_report import Place

_KEYS = ("CPU", "CUDA", "Meta")


@dataclass
class Site:
    """Calls of one sort: an op on shapes. Or collectives of one sort that torch's compiler has left as they were.

    Attributes
    ----------
    op
        torch's name of it.
    what
        Shapes and dtype.
    calls
        How many so far; of what was left, in how many places of compiled graphs.
    fused
        Whether transfer and matmul overlap.
    why
        Why they do, or do not.
    left
        Whether torch's compiler has left it, so that it is not called here.
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
    """A group whose fused ops run on this package's. Made by `async_tp`; a context manager, which closes it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sites: dict[tuple[str, str], Site] = {}
        self._lock = threading.Lock()

    def report(self) -> list[Site]:
        """What was called so far, most calls first; behind it the collectives that torch's compiler has left, and why.

        Of a graph that comes from the compiler's cache nobody knows what was left.
        """
        with self._lock:
            return sorted(self._sites.values(), key=lambda site: (site.left, -site.calls))

    def close(self) -> None:
        """Give the group's calls back to torch.

        Graphs that were compiled meanwhile call the ops by name, and so torch's. Where a dimension behind the first is
        gathered those lie otherwise in memory, and such a graph raises: compile it again (`torch._dynamo.reset`).
        """
        _close(self._name, self)

    def _count(self, op: str, what: str, plan: Callable[[], DistributedPlan] | str) -> None:
        """``plan``: makes it; or why there is none."""
        with self._lock:
            site = self._sites.get((op, what))
            if site is None:
                fused, why = (False, plan) if isinstance(plan, str) else _said(plan())
                site = self._sites[op, what] = Site(op, what, 0, fused, why)
            site.calls += 1

    def _leave(self, place: Place) -> None:
        with self._lock:
            key = place.op, f"{place.what}: {place.why}"
            site = self._sites.setdefault(key, Site(place.op, place.what, 0, False, place.why, left=True))
            site.calls += 1

    def __enter__(self) -> AsyncTP:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _said(plan: DistributedPlan) -> tuple[bool, str]:
    """Whether it is fused, and why, or why not."""
    return plan.fused, plan.decision.why if plan.fused else "; ".join(refusal.why for refusal in plan.refused)


#: Why a sum is torch's product, and then the group's reduce-scatter.
_COLUMNS = "columns are scattered: a rank's part is no rows of the product, so it is done one after the other"

_lock = threading.Lock()
_open: dict[str, AsyncTP] = {}
_library: torch.library.Library | None = None
_pass_before = False


def async_tp(group: dist.ProcessGroup | None = None) -> AsyncTP:
    """Run torch's fused tensor-parallel ops of ``group`` (None: the default one) on this package's, until closed.

    Also turns on the pass of torch's compiler that makes such ops of a model built with ``parallelize_module``, and
    tells torch that the group has symmetric memory, without which that pass does nothing and says nothing.

    Returns
    -------
    AsyncTP
        ``report()`` says what was called and how it ran, and what the compiler left; ``close()`` ends it.

    Raises
    ------
    ValueError
        If the group is already so, or is none that `all_gather_matmul` takes.

    Examples
    --------
    >>> with async_tp(mesh["tp"].get_group()) as tp:  # doctest: +SKIP
    ...     torch.compile(model)(x)
    ...     for site in tp.report():
    ...         print(site)
    """
    member = member_of("async_tp", group)
    with _lock:
        if member.name in _open:
            raise ValueError(f"async_tp: group {member.name!r} is run by tilestream already; close() the first handle")
        if not _open:
            _install()
        from torch.distributed import _symmetric_memory as symmetric

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            symmetric.enable_symm_mem_for_group(member.name)
        handle = _open[member.name] = AsyncTP(member.name)
    return handle


def _install() -> None:
    """Register our implementations over torch's, and turn the compiler's pass on."""
    global _library, _pass_before
    import torch._inductor.config as inductor
    import torch.distributed._symmetric_memory  # defines the ops

    _library = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is overridden: it is what we are here for
        for op, function in _IMPLEMENTATIONS.items():
            for key in _KEYS:
                _library.impl(op, function, key, allow_override=True)
        async_input.register(_library)
    _pass_before = inductor._micro_pipeline_tp
    inductor._micro_pipeline_tp = True
    from tilestream.distributed.unfused_report import Look

    inductor.post_grad_custom_post_pass = Look(_tell, inductor.post_grad_custom_post_pass)


def _tell(place: Place) -> None:
    handle = _open.get(place.group)
    if handle is not None:
        handle._leave(place)


def _close(name: str, handle: AsyncTP) -> None:
    global _library
    with _lock:
        if _open.get(name) is not handle:
            return
        del _open[name]
        if not _open and _library is not None:
            import torch._inductor.config as inductor

            from tilestream.distributed.unfused_report import Look

            inductor._micro_pipeline_tp = _pass_before
            look = inductor.post_grad_custom_post_pass
            if isinstance(look, Look):  # else somebody has put another in its place, which is theirs
                inductor.post_grad_custom_post_pass = look.before
            _library._destroy()
            _library = None


def _theirs(name: str, x: torch.Tensor) -> Callable[..., Any]:
    """Torch's own implementation: on a GPU the fused one, else that of plain collectives."""
    from torch.distributed import _symmetric_memory as symmetric

    found: Callable[..., Any] = getattr(symmetric, f"_{name}") if x.is_cuda else _plain(name)
    return found


def _plain(name: str) -> Callable[..., Any]:
    """Torch's own, of plain collectives."""
    from torch.distributed import _symmetric_memory as symmetric

    found: Callable[..., Any] = getattr(symmetric, f"_{name}_fallback")
    return found


def _shapes(a: torch.Tensor, bs: Sequence[torch.Tensor], dim: int) -> str:
    return f"{list(a.shape)} @ {', '.join(str(list(b.shape)) for b in bs)}, dim {dim}, {a.dtype}".replace("torch.", "")


def _whole(a: torch.Tensor, dim: int, group: str) -> list[int]:
    shape = list(a.shape)
    shape[dim] *= resolve(group).size()
    return shape


def _gather(
    a: torch.Tensor, bs: list[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    handle = _open.get(group_name)
    if handle is None:
        theirs: tuple[torch.Tensor | None, list[torch.Tensor]] = _theirs("fused_all_gather_matmul", a)(
            a, bs, gather_dim, group_name, return_A=return_A
        )
        return theirs
    if a.is_meta:
        shape = _whole(a, gather_dim, group_name)
        outs = [a.new_empty((*shape[:-1], b.shape[1])) for b in bs]
        return a.new_empty(shape) if return_A else None, outs
    group = resolve(group_name)
    handle._count(
        "fused_all_gather_matmul", _shapes(a, bs, gather_dim),
        lambda: plan_all_gather_matmul(a, bs, gather_dim=gather_dim, group=group),
    )  # fmt: skip
    result: Any = all_gather_matmul(a, list(bs), gather_dim=gather_dim, group=group, return_a=return_A)
    return result if return_A else (None, result)


def _scaled_gather(
    a: torch.Tensor, bs: list[torch.Tensor], a_scale: torch.Tensor, b_scales: list[torch.Tensor], gather_dim: int,
    group_name: str, biases: list[torch.Tensor | None], result_scales: list[torch.Tensor | None],
    out_dtypes: list[torch.dtype | None], use_fast_accum: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    handle = _open.get(group_name)
    from torch.distributed import _symmetric_memory as symmetric

    # A schema's list of dtypes brings them as numbers. None would be a result of 8 bits.
    dtypes = symmetric._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    if handle is None or None in dtypes or any(x is not None for x in result_scales):
        theirs: tuple[torch.Tensor, list[torch.Tensor]] = _theirs("fused_all_gather_scaled_matmul", a)(
            a, bs, a_scale, b_scales, gather_dim, group_name, biases, result_scales, out_dtypes, use_fast_accum
        )
        return theirs
    whole = _whole(a, gather_dim, group_name)
    if a.is_meta:
        outs = [a.new_empty((*whole[:-1], b.shape[1]), dtype=x) for b, x in zip(bs, dtypes, strict=True)]
        return a.new_empty(whole), outs
    group = resolve(group_name)
    scale = a_scale
    if a_scale.numel() > 1 and list(a_scale.shape[:-1]) == whole[:-1] != list(a.shape[:-1]):
        scale = a_scale.chunk(group.size(), gather_dim)[group.rank()]  # each rank has all rows' scales: its own travel
    handle._count(
        "fused_all_gather_scaled_matmul", _shapes(a, bs, gather_dim),
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
    handle = _open.get(group_name)
    if handle is None:
        theirs: torch.Tensor = _theirs("fused_matmul_reduce_scatter", a)(a, b, reduce_op, scatter_dim, group_name)
        return theirs
    if a.is_meta:
        return a.new_empty(_part([*a.shape[:-1], b.shape[1]], scatter_dim, group_name))
    if _is_last(a.dim(), scatter_dim):
        handle._count("fused_matmul_reduce_scatter", _shapes(a, [b], scatter_dim), _COLUMNS)
        columns: torch.Tensor = _plain("fused_matmul_reduce_scatter")(a, b, reduce_op, scatter_dim, group_name)
        return columns
    group = resolve(group_name)
    handle._count(
        "fused_matmul_reduce_scatter", _shapes(a, [b], scatter_dim),
        lambda: plan_matmul_reduce_scatter(a, b, scatter_dim=scatter_dim, group=group),
    )  # fmt: skip
    return matmul_reduce_scatter(a, b, scatter_dim=scatter_dim, reduce_op=_reduction(reduce_op), group=group)


def _is_last(dims: int, dim: int) -> bool:
    return dim % dims == dims - 1


def _reduction(op: str) -> Literal["sum", "avg"]:
    return cast(Literal["sum", "avg"], op)  # what it may be is checked there


def _part(shape: list[int], dim: int, group: str) -> list[int]:
    shape[dim] //= resolve(group).size()
    return shape


def _scaled_scatter(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, reduce_op: str,
    orig_scatter_dim: int, scatter_dim_after_maybe_reshape: int, group_name: str, output_shape: list[int] | None,
    bias: torch.Tensor | None = None, result_scale: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    handle = _open.get(group_name)
    if handle is None or result_scale is not None or output_shape is None or out_dtype is None:
        theirs: torch.Tensor = _theirs("fused_scaled_matmul_reduce_scatter", a)(
            a, b, a_scale, b_scale, reduce_op, orig_scatter_dim, scatter_dim_after_maybe_reshape, group_name,
            output_shape, bias, result_scale, out_dtype, use_fast_accum,
        )  # fmt: skip
        return theirs
    if a.is_meta:
        return a.new_empty(_part([*output_shape[:-1], b.shape[1]], orig_scatter_dim, group_name), dtype=out_dtype)
    if _is_last(len(output_shape), orig_scatter_dim):
        handle._count("fused_scaled_matmul_reduce_scatter", _shapes(a, [b], orig_scatter_dim), _COLUMNS)
        columns: torch.Tensor = _plain("fused_scaled_matmul_reduce_scatter")(
            a, b, a_scale, b_scale, reduce_op, orig_scatter_dim, scatter_dim_after_maybe_reshape, group_name,
            output_shape, bias, result_scale, out_dtype, use_fast_accum,
        )  # fmt: skip
        return columns
    group = resolve(group_name)
    rows = a.reshape(*output_shape[:-1], a.shape[-1])
    scale = a_scale if a_scale.numel() == 1 else a_scale.reshape(*output_shape[:-1], 1)
    if bias is not None and reduce_op == "sum":
        bias = bias * group.size()  # theirs is a part of each rank's product
    handle._count(
        "fused_scaled_matmul_reduce_scatter", _shapes(rows, [b], orig_scatter_dim),
        lambda: plan_matmul_reduce_scatter(rows, b, scatter_dim=orig_scatter_dim, group=group),
    )  # fmt: skip
    return matmul_reduce_scatter(
        rows, b, scatter_dim=orig_scatter_dim, reduce_op=_reduction(reduce_op), group=group, bias=bias, scale_a=scale,
        scale_b=b_scale, out_dtype=out_dtype, use_fast_accum=use_fast_accum,
    )  # fmt: skip


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "fused_all_gather_matmul": _gather,
    "fused_all_gather_scaled_matmul": _scaled_gather,
    "fused_matmul_reduce_scatter": _scatter,
    "fused_scaled_matmul_reduce_scatter": _scaled_scatter,
}
