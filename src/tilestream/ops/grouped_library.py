"""The registered ops of grouped matmuls: schemas, CPU, GPU and fake implementations, derivatives, batching, FLOPs.

``tilestream::grouped_gemm``, ``tilestream::grouped_gemm_arriving`` (each group's matrix of b arrives) and their ``out``
forms take canonical operands (`tilestream.core.operands.GroupedOperands`): the offsets end groups of A's rows if B has
three dimensions, and groups of K if it has two. `tilestream.grouped_mm` makes views of torch's other forms. The
gradients of each kind are products of the other kinds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tilestream.arrival.flat import Awaited, FlatArrival, check_deadline
from tilestream.arrival.signals import Outcome
from tilestream.arrival.stream import open_streams
from tilestream.core.dtypes import dtype_name
from tilestream.core.errors import ArrivalTimeout
from tilestream.core.groups import Along, by_load
from tilestream.core.operands import HALVES, SCALE_BLOCK, Epilogue, GemmOperands, GroupedOperands
from tilestream.kernels.cpu.epilogue import wide_dtype
from tilestream.kernels.cpu.gemm import multiply
from tilestream.launch.cache import launch_cache, signature
from tilestream.ops import execute, gpu, streamed
from tilestream.ops.checks import check_pair, check_written, refuse_given, refuse_gradients
from tilestream.ops.flops import register_flop_formula
from tilestream.ops.gradients import Derivative, below_autograd, derivative, save, through_activation
from tilestream.ops.library import library, register, result_dtype
from tilestream.ops.operands import refuse_shared
from tilestream.ops.scales import FP8_DTYPES
from tilestream.plan import limit as limits
from tilestream.plan import tma
from tilestream.plan.grouped import check_schedule, plan_groups
from tilestream.plan.problem import GroupedProblem
from tilestream.runtime import collector
from tilestream.runtime.channel import check_device
from tilestream.runtime.properties import allows_tf32, cuda_properties
from tilestream.runtime.workspace import workspace

if TYPE_CHECKING:
    from tilestream.core.device import DeviceProperties
    from tilestream.launch.launch import Launch

_OP = "grouped_mm"
#: Bias ``[G, 1, N]``, or ``[M, 1]`` where groups divide the rows. Scales: of one element, or scale_a ``[M, 1]`` (along
#: K ``[G, M, 1]``) and scale_b ``[G, 1, N]``, or of blocks. column_major: whether the result's columns are contiguous.
_SCHEMA = (
    "(Tensor a, Tensor b, Tensor offsets, Tensor? bias, str activation, ScalarType? out_dtype, str schedule, "
    "int workers{more}, Tensor? scale_a=None, Tensor? scale_b=None, bool fast_accum=True, int worker_limit=0) -> "
)
_NUM_COMMON, _DEFAULTS = 8, (None, None, True, 0)
#: The tensors of an op, by name.
_OPERANDS = "a", "b", "offsets", "bias", "out", "scale_a", "scale_b"
_OF_ROWS = "it is of groups of rows, a [M, K] and b [G, K, N]"
#: Columns of ones that add up a group's rows, for the gradient of a bias: the fewest that are read in vectors.
_ONES = 16


def _shape(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, activation: str) -> tuple[Any, ...]:
    """The result's shape, of operands that fit together."""
    if a.dim() != 2 or b.dim() not in (2, 3) or offsets.dim() != 1:
        raise ValueError(
            f"grouped_gemm: a has {a.dim()}, b {b.dim()} and offsets {offsets.dim()} dimensions; they have 2, 2 or 3, 1"
        )
    check_pair("grouped_gemm", a, b)
    torch._check(a.shape[1] == b.shape[-2], lambda: f"grouped_gemm: a {list(a.shape)} and b {list(b.shape)}: K differs")
    if b.dim() == 3:
        torch._check(
            offsets.shape[0] == b.shape[0], lambda: f"grouped_gemm: offsets {list(offsets.shape)}: not b's groups"
        )
        return a.shape[0], b.shape[2] // (2 if activation in HALVES else 1)
    if activation in HALVES:
        raise ValueError(f"grouped_gemm: activation={activation!r} with groups of K: {_OF_ROWS}")
    return offsets.shape[0], a.shape[0], b.shape[1]


def _empty(a: torch.Tensor, shape: tuple[Any, ...], dtype: torch.dtype, column_major: bool) -> torch.Tensor:
    if column_major:
        return a.new_empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).mT
    return a.new_empty(shape, dtype=dtype)


def _fake(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, *others: Any) -> torch.Tensor:
    return _empty(a, _shape(a, b, offsets, others[1]), result_dtype(a, others[2]), others[5])


def _fake_out(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, *others: Any) -> None:
    shape, out = _shape(a, b, offsets, others[1]), others[5]
    if tuple(out.shape) != shape or out.dtype != result_dtype(a, others[2]):
        raise ValueError(
            f"out: {list(out.shape)} {out.dtype}; the result is {list(shape)} {result_dtype(a, others[2])}"
        )


def _real(*args: Any) -> torch.Tensor:
    out = _fake(*args)
    _run(out, args[:_NUM_COMMON], args[_NUM_COMMON + 1 :])
    return out


def _real_out(*args: Any) -> None:
    _into(args[_NUM_COMMON], args[:_NUM_COMMON], args[_NUM_COMMON + 1 :])


def _into(
    out: torch.Tensor, args: tuple[Any, ...], optional: tuple[Any, ...], late: tuple[Sequence[int], float] | None = None
) -> None:
    _fake_out(*args, out)
    check_written("grouped_gemm", out)
    names = ("a", "b", "offsets", "bias", "scale_a", "scale_b")
    tensors = (*args[:4], *optional[:2], None, None)
    refuse_shared(out, **dict(zip(names, tensors, strict=False)))
    _run(out, args, optional, late)
    torch._C._increment_version((out,))  # autograd knows nothing of what a kernel writes


def _real_arriving(*args: Any) -> torch.Tensor:
    late = args[_NUM_COMMON + 1 : _NUM_COMMON + 3]
    out = _fake(*args[: _NUM_COMMON + 1])
    _run(out, args[:_NUM_COMMON], args[_NUM_COMMON + 3 :], late)
    return out


def _real_arriving_out(*args: Any) -> None:
    arrival, deadline, out = args[_NUM_COMMON : _NUM_COMMON + 3]
    _into(out, args[:_NUM_COMMON], args[_NUM_COMMON + 3 :], (arrival, deadline))


def _fake_arriving_out(*args: Any) -> None:
    _fake_out(*args[:_NUM_COMMON], args[_NUM_COMMON + 2])


def _canonical(out: torch.Tensor, args: tuple[Any, ...], optional: tuple[Any, ...]) -> tuple[GroupedOperands, gpu.How]:
    """The operands and options of a launch, from the ops' arguments."""
    a, b, offsets, bias, activation, _, schedule, workers = args
    rest: Any = (*optional, *_DEFAULTS[len(optional) :])
    scale_a, scale_b, fast_accum, worker_limit = rest
    check_schedule(_OP, schedule)
    bias, scale_a, scale_b = (None if t is None else t.detach() for t in (bias, scale_a, scale_b))
    epilogue = Epilogue(1.0, bias, None, 1.0, activation, scale_a, scale_b)
    x = GroupedOperands(a.detach(), b.detach(), out.detach(), epilogue, offsets)
    if activation in HALVES and b.shape[2] % 2:
        raise ValueError(f"{_OP}: activation={activation!r}: b has {b.shape[2]} columns; each half has as many")
    how = gpu.How(schedule, workers, fast_accum, limits.tighter(worker_limit, limits.limit()))
    return x, how


def compile_ahead(args: tuple[Any, ...], out: torch.Tensor, device: DeviceProperties) -> None:
    """Compile what `grouped_op`, called with ``args``, would launch on ``device`` for ``out``."""
    x, how = _canonical(out, args[:_NUM_COMMON], args[_NUM_COMMON + 1 :])
    make(x, how, device)(x)


def _run(
    out: torch.Tensor, args: tuple[Any, ...], optional: tuple[Any, ...], late: tuple[Sequence[int], float] | None = None
) -> None:
    """Run an op. ``late``: how b's matrices arrive, one a chunk, and the deadline."""
    if open_streams:
        operands = (*args[:4], out, *optional)
        streamed.refuse_unfilled("grouped_gemm", _OPERANDS, operands, () if late is None else ("b",))
    x, how = _canonical(out, args, optional)
    awaited = None
    if late is not None:
        awaited = Awaited.of(None, FlatArrival.from_ints(late[0], None), check_deadline(late[1]), _OP, out.device)
    if out.is_cuda:
        _on_gpu(x, how, awaited)
    else:
        _on_cpu(x, how, awaited)


# CPU ------------------------------------------------------------------------------------------------------------------


def _on_cpu(x: GroupedOperands, how: gpu.How, awaited: Awaited | None = None) -> None:
    """A product a group, one after the other; each when its matrix of b is there, where these arrive."""
    x = dequantized(x) if x.scales == "block" else x
    a, b, out, e, offsets = x
    along_rows = b.dim() == 3
    extent, ends = a.shape[0 if along_rows else 1], offsets.tolist()
    begins = [0, *ends][: len(ends)]
    if any(not 0 <= begin <= end <= extent for begin, end in zip(begins, ends, strict=True)):
        raise ValueError(f"{_OP}: offsets={ends}; they do not fall, and go from 0 to {extent} at most")
    with torch.inference_mode():  # so that a result that is an inference tensor can be written
        for group in range(len(ends)) if awaited is None else _as_they_come(out, ends, awaited):
            run = slice(begins[group], ends[group])
            vectors = [of_group(v, group, run) for v in (e.bias, e.scale_a, e.scale_b)]
            mine = Epilogue(1.0, vectors[0], None, 1.0, e.activation, *vectors[1:])
            operands = (a[run], b[group], out[run]) if along_rows else (a[:, run], b[run], out[group])
            if operands[2].numel():
                (halves if e.activation in HALVES else product)(GemmOperands(*operands, mine), how)
        if along_rows:
            out[ends[-1] if ends else 0 :].zero_()


def _as_they_come(out: torch.Tensor, ends: list[int], awaited: Awaited) -> Iterator[int]:
    """The groups that have rows, each when its chunk is there: of several, the one with most rows.

    Raises
    ------
    ArrivalTimeout, BaseException
        If one does not come in time, or as its producer reported; the rows of those that are left are NaN.
    """
    (_, coming), deadline = awaited.operands, awaited.deadline
    assert coming is not None
    (signals, epoch), end = coming, time.perf_counter() + deadline
    order, used = by_load(ends)
    left = order[:used]
    while left:
        begin = time.perf_counter()
        outcome, i = signals.wait_any([(group,) for group in left], epoch, end, lambda: False)
        if outcome is Outcome.ARRIVED:
            yield left.pop(i)
            continue
        for group in left:
            out[ends[group - 1] if group else 0 : ends[group]].fill_(float("nan"))
        if outcome is Outcome.FAILED:
            raise signals.failure(epoch)
        waited, item = time.perf_counter() - begin, f"group {left[0]}"
        raise ArrivalTimeout(awaited.op, 0, left[0], item, waited, deadline, argument="weight_arrival")


def of_group(v: torch.Tensor | None, group: int, run: slice) -> torch.Tensor | None:
    """A group's bias or scales, as they broadcast to its output."""
    if v is None or v.numel() == 1:
        return v if v is None else v.reshape(())
    return v[group] if v.dim() == 3 else v[run]


def dequantized(x: GroupedOperands) -> GroupedOperands:
    """Operands times their scales of blocks, in float32, which adds up their products."""
    e = x.epilogue
    assert e.scale_a is not None
    assert e.scale_b is not None
    k, n = x.b.shape[1:]
    of_a = e.scale_a.repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    of_b = e.scale_b.repeat_interleave(SCALE_BLOCK, 1)[:, :k].repeat_interleave(SCALE_BLOCK, 2)[..., :n]
    return x._replace(a=x.a.float() * of_a, b=x.b.float() * of_b, epilogue=e._replace(scale_a=None, scale_b=None))


def halves(x: GemmOperands, how: gpu.How) -> None:
    """A product whose activation is of two halves of its columns: the whole of it, and then that."""
    wide = x.out.new_empty(x.a.shape[0], x.b.shape[1], dtype=wide_dtype(x.a.dtype))
    product(x._replace(out=wide, epilogue=x.epilogue._replace(activation="none")), how)
    gate, up = wide.chunk(2, 1)
    if limits.is_invariant(how.limit):
        for row in gate:  # torch shares numbers out to threads, and computes the last of a share in another way
            torch.nn.functional.silu(row, inplace=True)
    else:
        gate = torch.nn.functional.silu(gate)
    x.out.copy_(gate.mul_(up))


def product(x: GemmOperands, how: gpu.How) -> None:
    """A product, by the caller's threads or by as many workers as were asked for."""
    e = x.epilogue
    if how.workers or how.limit:
        if e.bias is not None:  # workers take a bias along the columns; one along the rows is a residual
            along = e.bias.shape == (1, x.out.shape[1])
            e = e._replace(bias=e.bias[0]) if along else e._replace(bias=None, residual=e.bias.expand(1, *x.out.shape))
        execute.run(x._replace(epilogue=e), how, op=_OP)
        return
    with workspace() as scratch:
        multiply(x.a, x.b, x.out, e, x.out.dtype, scratch)


# GPU ------------------------------------------------------------------------------------------------------------------


def _on_gpu(x: GroupedOperands, how: gpu.How, awaited: Awaited | None = None) -> None:
    device = x.a.device
    check_device(device.index)
    if not x.out.numel():
        return
    if not x.offsets.numel():
        x.out.zero_()
        return
    gpu.issue(find(x, how, awaited is not None), x, awaited, _OP)


def find(x: GroupedOperands, how: gpu.How, arrives: bool = False) -> Launch:
    """The launch for such operands: an earlier one's, or a new one; ``arrives``: each group's matrix of b."""
    e = x.epilogue
    tensors = (x.a, x.b, x.out, e.bias, e.scale_a, e.scale_b, x.offsets)
    key = signature("grouped", tensors, (*how[:-1], e.activation, arrives), how.limit)
    launch: Any = launch_cache.get(key)
    if launch is None:
        generation = launch_cache.generation
        with collector.paused():  # the first one imports the kernels
            launch = launch_cache.insert(key, make(x, how, arrives=arrives), generation)
    return launch  # type: ignore[no-any-return]


def problem_of(x: GroupedOperands, fast_accum: bool = True) -> GroupedProblem:
    """The problem of operands, as far as it is the same on every device.

    Of rows by source, one place of rows is expected: so many come if each source divides its own among as many ranks.
    """
    a, b, out, e, offsets = x
    along: Along = "rows" if b.dim() == 3 else "k"
    sources = offsets.shape[0] if offsets.dim() == 2 else 0
    return GroupedProblem(
        a.shape[0], b.shape[-1], a.shape[1], 1, dtype_name(a.dtype), dtype_name(out.dtype),
        aligned=_is_aligned(x), no_tma=_no_tma(x), b_dtype=dtype_name(b.dtype) if b.dtype != a.dtype else "",
        scales=x.scales, plain=e.trivial or (x.scales == "block" and e._replace(scale_a=None, scale_b=None).trivial),
        fast_accum=fast_accum or a.dtype not in FP8_DTYPES, groups=offsets.shape[-1], along=along,
        two_halves=e.activation in HALVES, sources=sources, likely=a.shape[0] // max(1, sources),
    )  # fmt: skip


def _is_aligned(x: GroupedOperands) -> bool:
    """Whether a group's part of an operand can be read in vectors, wherever in the operand it begins.

    So what groups divide is not the contiguous dimension.
    """
    a, b = x.a, x.b
    if any(tensor.data_ptr() % 16 for tensor in (a, b)):
        return False
    if b.dim() == 2:
        return _is_vector(a.t()) and _is_vector(b)
    return _is_vector(a) and b.stride(0) % 16 == 0 and (_is_vector(b[0]) or _is_vector(b[0].t()))


def _no_tma(x: GroupedOperands) -> str:
    """Which operand TMA cannot address, and why; else empty. A copy along K does not end at a group's end."""
    a, b = x.a, x.b
    if b.dim() == 3 and a.stride(1) != 1:
        # On an H100 such a launch ended with CUDA_ERROR_ILLEGAL_INSTRUCTION.
        return "a is not contiguous along K: a group would begin anywhere inside of TMA's contiguous dimension"
    batch, size = b.stride(0) if b.dim() == 3 else 0, a.element_size()
    along_k = 1 if tma.k_major_only(size) else None if b.dim() == 3 else 0
    return tma.refuse("a", a.shape, a.stride(), 0, size, a.data_ptr(), along_k) or tma.refuse(
        "b", b.shape[-2:], b.stride()[-2:], batch, size, b.data_ptr(), None if along_k is None else 1 - along_k
    )


def _is_vector(x: torch.Tensor) -> bool:
    """Whether a matrix's rows are contiguous and begin at multiples of 16."""
    return bool(x.stride(1) == 1 and x.shape[1] % 16 == 0 and x.stride(0) % 16 == 0)


def make(
    x: GroupedOperands, how: gpu.How, device: DeviceProperties | None = None, arrives: bool = False, pivot: int = 0
) -> Launch:  # fmt: skip
    """The launch for such operands; ``device``: see `tilestream.ops.gpu.compile_ahead`."""
    from tilestream.launch import compiling

    compiling.prepare()

    device = device or cuda_properties(x.a.device.index)
    tf32 = x.a.dtype == torch.float32 and device.arch.startswith("sm_") and allows_tf32()
    problem = replace(problem_of(x, how.fast_accum), tf32=tf32, arrives=arrives, pivot=pivot)
    plan = plan_groups(problem, how.workers or None, how.schedule, device=device, limit=how.limit)
    return launch_of(plan, x)


def launch_of(plan: Any, x: GroupedOperands) -> Launch:
    """The launch of a plan, for operands that lie like these."""
    from tilestream.launch.gemm_arguments import Layout
    from tilestream.launch.grouped_arguments import Bias

    e = x.epilogue

    def strides(t: torch.Tensor) -> tuple[int, int, int]:
        return (0, *t.stride()) if t.dim() == 2 else t.stride()  # type: ignore[return-value]

    def of_scale(scale: torch.Tensor | None, dim: int) -> tuple[int, int]:
        if scale is None or scale.numel() == 1:
            return 0, 0
        return scale.stride(0) if scale.dim() == 3 else 0, scale.stride(dim)

    scale_k = (0, 0)
    if x.scales == "block":
        assert e.scale_a is not None
        assert e.scale_b is not None
        scale_k = e.scale_a.stride(1), e.scale_b.stride(1)
    layout = Layout(
        strides(x.a), strides(x.b), strides(x.out), activation=e.activation, scale_a=of_scale(e.scale_a, -2),
        scale_b=of_scale(e.scale_b, -1), scale_k=scale_k,
    )  # fmt: skip
    bias = Bias()
    if e.bias is not None:
        bias = (
            Bias("columns", e.bias.stride(0), e.bias.stride(2))
            if e.bias.dim() == 3
            else Bias("rows", 0, e.bias.stride(0))
        )
    aligned, publishes = x.out.data_ptr() % 16 == 0, e.publish is not None
    if plan.backend == "hopper" and plan.problem.sources:
        from tilestream.launch.hopper.sources import HopperSourcesLaunch

        return HopperSourcesLaunch(plan, layout, bias, aligned, publishes)
    if plan.backend == "hopper":
        from tilestream.launch.hopper.grouped import HopperGroupedLaunch

        return HopperGroupedLaunch(plan, layout, bias, aligned)
    if plan.problem.sources:
        from tilestream.launch.portable.sources import SourcesLaunch

        return SourcesLaunch(plan, layout, bias, publishes)
    from tilestream.launch.portable.grouped import GroupedLaunch

    return GroupedLaunch(plan, layout, bias)


# Ops ------------------------------------------------------------------------------------------------------------------

register("grouped_gemm", _SCHEMA.format(more=", bool column_major") + "Tensor", _real, _fake)
register("grouped_gemm_out", _SCHEMA.format(more=", Tensor(a!) out") + "()", _real_out, _fake_out)
register(
    "grouped_gemm_arriving", _SCHEMA.format(more=", bool column_major, SymInt[] arrival, float deadline") + "Tensor",
    _real_arriving, lambda *args: _fake(*args[: _NUM_COMMON + 1]), alone=True,
)  # fmt: skip
register(
    "grouped_gemm_arriving_out", _SCHEMA.format(more=", SymInt[] arrival, float deadline, Tensor(a!) out") + "()",
    _real_arriving_out, _fake_arriving_out, alone=True,
)  # fmt: skip
grouped_arriving_op = torch.ops.tilestream.grouped_gemm_arriving.default
grouped_arriving_out_op = torch.ops.tilestream.grouped_gemm_arriving_out.default
grouped_op = torch.ops.tilestream.grouped_gemm.default
grouped_out_op = torch.ops.tilestream.grouped_gemm_out.default


class _Grouped(Derivative):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        return _Grouped.compute(ctx, grouped_op, args, args)

    @staticmethod
    def compute(ctx: Any, op: Any, given: tuple[Any, ...], args: tuple[Any, ...]) -> torch.Tensor:
        """Call ``op`` with what it is given; ``args``: of `grouped_op`."""
        a, b, offsets, bias, activation, _, schedule, workers, column_major, *more = args
        scale_a, scale_b, fast_accum, worker_limit = more
        refuse_gradients("grouped_gemm", a=a, b=b, scale_a=scale_a, scale_b=scale_b)
        scaled = scale_a is not None or scale_b is not None
        if scaled and any(x is not None and x.requires_grad for x in (a, b, bias)):
            raise RuntimeError(
                f"{_OP}: scale_a or scale_b, and an operand requires a gradient; scaled operands get none: multiply by "
                "the scales outside"
            )
        output: torch.Tensor = below_autograd(op, *given)
        again = bias if activation not in ("none", "relu") else None
        save(ctx, a, b, offsets, output if activation == "relu" else None, again)
        ctx.how, ctx.more = (schedule, workers), (None, None, fast_accum, worker_limit)
        ctx.activation, ctx.dtype, ctx.column_major = activation, output.dtype, column_major
        ctx.bias = None if bias is None else (bias.dtype, bias.shape)
        ctx.scaled, ctx.awaited = scaled, None
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        none = [None] * len(ctx.needs_input_grad)
        if grad is None:
            return tuple(none)
        a, b, offsets, output, bias = ctx.saved_tensors
        grad = _through(ctx, _void_if_late(ctx, grad, offsets), a, b, offsets, output, bias)
        product = grad.to(a.dtype)
        if b.dim() == 3:
            product = product.contiguous()  # else both products read it across: `_is_aligned`, `_no_tma`
        needs_a, needs_b, _, needs_bias, *_ = ctx.needs_input_grad
        found: list[torch.Tensor | None] = none  # type: ignore[assignment]
        if b.dim() == 3:
            if needs_a:
                found[0] = _plain(ctx, product, b.mT, offsets, _is_column_major(a))
            if needs_b:
                found[1] = _plain(ctx, a.mT, product, offsets, _is_column_major(b))
        else:  # a column of a, and a row of b, belong to a group
            if needs_a:
                found[0] = _plain(ctx, b, product.mT, offsets, not _is_column_major(a)).mT
            if needs_b:
                found[1] = _plain(ctx, a.mT, product, offsets, _is_column_major(b))
        if needs_bias:
            found[3] = _bias_gradient(ctx, grad, b.dim() == 3, offsets)
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        refuse_given("grouped_gemm", *tangents[4:])
        if ctx.scaled:
            refuse_given("grouped_gemm", *tangents[:4], why="scaled operands have no forward-mode derivative")
        a, b, offsets, output, bias = ctx.saved_tensors
        of_a, of_b, _, of_bias = tangents[:4]
        wide = wide_dtype(a.dtype)
        pairs = [(x, y) for x, y in ((of_a, b), (a, of_b)) if x is not None and y is not None]
        pairs = pairs or [(a[:, :0], b[..., :0, :])]
        if b.dim() == 2 and of_a is of_b is None:
            pairs = [(torch.zeros_like(a), b)]
        found = None
        for x, y in pairs:
            one = grouped_op(x, y, offsets, of_bias, "none", wide, *ctx.how, ctx.column_major, *ctx.more)
            found, of_bias = one if found is None else found + one, None
        assert found is not None
        if ctx.activation in HALVES:
            before = grouped_op(a, b, offsets, bias, "none", wide, *ctx.how, False, *ctx.more)
            (gate, up), (of_gate, of_up) = before.chunk(2, 1), found.chunk(2, 1)
            through: torch.Tensor = through_activation("silu", of_gate * up, gate) + gate * torch.sigmoid(gate) * of_up
        else:
            through = _through(ctx, found, a, b, offsets, output, bias)
        return _void_if_late(ctx, through.to(ctx.dtype), offsets)


class _Arriving(_Grouped):
    """NaN where a matrix of b has not come by then."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with streamed.derivative_of_awaited():
            return _Grouped.backward(ctx, grad)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        with streamed.derivative_of_awaited():
            return _Grouped.jvp(ctx, *tangents)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        before, (arrival, _), optional = args[: _NUM_COMMON + 1], args[_NUM_COMMON + 1 :][:2], args[_NUM_COMMON + 3 :]
        output = _Grouped.compute(ctx, grouped_arriving_op, args, (*before, *optional))
        ctx.awaited = Awaited.for_gradient(None, FlatArrival.from_ints(arrival, None), _OP, output)
        return output


def _void_if_late(ctx: Any, change: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A gradient, or a tangent; NaN if the matrix of a group with rows, which the launch missed, has not come since."""
    if ctx.awaited is None:
        return change
    needs = offsets.diff(prepend=offsets.new_zeros(1)) > 0
    return ctx.awaited.void_if_late(change, needs)  # type: ignore[no-any-return]


def _plain(
    ctx: Any, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, column_major: bool
) -> torch.Tensor:  # fmt: skip
    """A product of a derivative."""
    made: torch.Tensor = grouped_op(a, b, offsets, None, "none", None, *ctx.how, column_major, *ctx.more)
    return made


def _through(
    ctx: Any, change: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor,
    output: torch.Tensor | None, bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """A gradient, or a tangent, times the slope of the activation, whose input is computed once more."""
    if ctx.activation == "none":
        return change
    if output is not None:
        return torch.ops.aten.threshold_backward(change.to(output.dtype), output, 0)  # type: ignore[no-any-return]
    before = grouped_op(a, b, offsets, bias, "none", wide_dtype(a.dtype), *ctx.how, False, *ctx.more)
    change = change.to(before.dtype)
    if ctx.activation in HALVES:
        gate, up = before.chunk(2, 1)
        return torch.cat([through_activation("silu", change * up, gate), change * gate * torch.sigmoid(gate)], 1)
    return through_activation(ctx.activation, change, before)


def _bias_gradient(ctx: Any, grad: torch.Tensor, along_rows: bool, offsets: torch.Tensor) -> torch.Tensor:
    """The sum of the gradients of all rows (columns) that an element of the bias was added to."""
    dtype, shape = ctx.bias
    if not along_rows:
        return grad.sum(1, keepdim=True, dtype=dtype)
    if len(shape) == 2:  # one element a row; rows of no group have none
        rows = torch.arange(grad.shape[0], device=grad.device).unsqueeze(1)
        total = grad.sum(1, keepdim=True, dtype=dtype)
        return torch.where(rows < offsets[-1], total, 0) if offsets.numel() else torch.zeros_like(total)
    ones = grad.new_ones(grad.shape[0], _ONES)
    sums = grouped_op(ones.t(), grad, offsets, None, "none", None, *ctx.how, False, *ctx.more)
    return sums[:, :1].to(dtype)  # type: ignore[no-any-return]


def _is_column_major(x: torch.Tensor) -> bool:
    """Whether a matrix, or each of several, has contiguous columns, without a gap."""
    return bool(x.stride(-2) == 1 and x.stride(-1) == x.shape[-2] and x.shape[-1] > 1)


def _batched(info: Any, dims: Sequence[int | None], *args: Any) -> tuple[torch.Tensor, int]:
    """A launch for each of the calls."""

    def call(i: int) -> list[Any]:
        return [x if d is None else x.select(d, i) for x, d in zip(args, dims, strict=True)]

    return torch.stack([grouped_op(*call(i)) for i in range(info.batch_size)]), 0


derivative(library, grouped_op, _Grouped)
derivative(library, grouped_arriving_op, _Arriving)
torch.library.register_vmap("tilestream::grouped_gemm", _batched, lib=library)


@register_flop_formula(
    [op.overloadpacket for op in (grouped_op, grouped_out_op, grouped_arriving_op, grouped_arriving_out_op)]
)
def _flops(a_shape: Sequence[int], b_shape: Sequence[int], *args: Any, **kwargs: Any) -> int:
    # As torch counts its own: every row, every column of K, in one group.
    return 2 * a_shape[0] * a_shape[1] * b_shape[-1]
