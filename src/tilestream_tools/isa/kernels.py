"""The kernels that `tilestream isa` knows, by name: a table that a new kernel joins by one line.

An entry says which archs it compiles for and names the function ``(request) -> Source`` that makes what is compiled;
the function is imported on demand. A kernel outside this package joins by `register`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.core.gpu_specs import named
from tilestream.core.schedule import Kind
from tilestream.plan.attention_plan import of_candidate
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.grouped import plan_groups
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import FP8, ITEMSIZE, GroupedProblem, Incoming, Problem, dtype_name, result_name
from tilestream.plan.tma import refuse_contiguous

if TYPE_CHECKING:
    from tilestream.core.copy_items import CopyArguments
    from tilestream.launch.attention_arguments import AttentionArguments, AttentionLayout, KeyGate
    from tilestream.launch.gate import GateArguments
    from tilestream.launch.gemm_arguments import Layout
    from tilestream.plan.attention_plan import AttentionCandidate, AttentionPlan
    from tilestream.plan.plan import Plan
    from tilestream_tools.isa.build import Pointer

#: The GPU that stands for an arch.
DEVICES = {
    "sm_90a": "h100", "gfx942": "mi300x", "gfx950": "mi355x", "sm_80": "a100", "sm_89": "l40s", "sm_100": "b200",
    "sm_103": "b300", "sm_110": "thor", "sm_120": "rtx5090",
}  # fmt: skip
LAYOUTS = ("nn", "nt", "tn", "tt")


@dataclass(frozen=True)
class CompileRequest:
    """What is to be compiled.

    Attributes
    ----------
    arch
        One of `DEVICES`.
    m, n, k
        The problem's extents; of attention queries, keys, and columns of a head.
    dtype
        Of the operands.
    layout
        How they lie: see `tilestream.plan`.
    tile, schedule, stages
        Forced; None, ``"auto"``: the plan's choice.
    """

    arch: str
    m: int = 8192
    n: int = 8192
    k: int = 8192
    dtype: str = "bfloat16"
    layout: str = "nt"
    tile: tuple[int, int] | None = None
    schedule: str = "auto"
    stages: int | None = None

    @property
    def device(self) -> DeviceProperties:
        """The GPU that stands for the arch.

        Raises
        ------
        ValueError
            If none does.
        """
        found = named(DEVICES.get(self.arch, ""))
        if found is None:
            raise ValueError(f"arch={self.arch!r}; kernels are compiled for {', '.join(DEVICES)}")
        return found

    @property
    def problem(self) -> Problem:
        """The problem that a plan is asked for.

        Raises
        ------
        ValueError, TypeError
            If there is no such problem.
        """
        dtype = dtype_name(self.dtype)
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r}; it must be one of {', '.join(LAYOUTS)}")
        return Problem(
            self.m, self.n, self.k, 1, dtype, result_name(dtype, None),
            aligned=not (self.m % 16 or self.n % 16 or self.k % 16),
            no_tma=refuse_contiguous(self.m, self.n, self.k, self.layout, (dtype, dtype)),
            scales="tensor" if dtype in FP8 else "none", plain=dtype not in FP8,
        )  # fmt: skip


class Source(NamedTuple):
    """What is compiled.

    Attributes
    ----------
    kernel, filled, options
        See `tilestream_tools.isa.build.build`.
    warps
        Waves of a worker.
    plan
        What it was made for; None where there is none.
    """

    kernel: Any
    filled: Sequence[Any]
    options: dict[str, Any]
    warps: int
    plan: Plan | AttentionPlan | None = None


class Entry(NamedTuple):
    """A kernel by name.

    Attributes
    ----------
    archs
        That it compiles for.
    make
        ``"module:function"``, a function of a `CompileRequest` that gives a `Source`.
    what
        In a few words.
    k
        Of the request; the default.
    """

    archs: tuple[str, ...]
    make: str
    what: str
    k: int = 8192


KERNELS: dict[str, Entry] = {
    "portable-gemm": Entry(tuple(DEVICES), f"{__name__}:portable_gemm", "the Triton kernel, for any GPU"),
    "portable-grouped": Entry(
        tuple(DEVICES), f"{__name__}:portable_grouped", "Triton, any GPU; M rows of 64 groups, as a layer's lie"
    ),
    "cdna-gemm": Entry(
        ("gfx942", "gfx950"), f"{__name__}:cdna_gemm", "Gluon: a ring without mbarriers, inverse swizzle, MFMA"
    ),
    "cdna-attention": Entry(
        ("gfx942", "gfx950"),
        f"{__name__}:cdna_attention",
        "Gluon: keys and values in that ring; M queries, N keys",
        128,
    ),
    "hopper-gemm": Entry(("sm_90a",), f"{__name__}:hopper_gemm", "Gluon: TMA, warp specialisation, wgmma"),
    "hopper-grouped": Entry(
        ("sm_90a",), f"{__name__}:hopper_grouped", "Gluon: the same; M rows of 64 groups, as a layer's lie"
    ),
    "portable-attention": Entry(
        tuple(DEVICES), f"{__name__}:portable_attention", "Triton, any GPU; M queries, N keys", 128
    ),
    "hopper-attention": Entry(
        ("sm_90a",), f"{__name__}:hopper_attention", "Gluon: TMA, warp specialisation; M queries, N keys", 128
    ),
}


def register(name: str, archs: tuple[str, ...], make: str, what: str) -> None:
    """Add a kernel: see `Entry`. One of the same name is replaced."""
    KERNELS[name] = Entry(archs, make, what)


def source(name: str, request: CompileRequest) -> Source:
    """What is compiled for a request to the kernel ``name``.

    Raises
    ------
    ValueError
        If there is no such kernel, or it does not compile for the arch.
    NotImplementedError
        If it does not do such a problem.
    """
    entry = KERNELS.get(name)
    if entry is None:
        raise ValueError(f"KERNEL {name!r}; there are {', '.join(KERNELS)}")
    if request.arch not in entry.archs:
        raise ValueError(f"arch={request.arch!r}; {name} compiles for {', '.join(entry.archs)}")
    module, _, function = entry.make.partition(":")
    made: Source = getattr(importlib.import_module(module), function)(request)
    return made


def contiguous(request: CompileRequest, batch_stride: int = 0) -> Layout:
    """The operands' layout, without gaps, and no epilogue."""
    from tilestream.launch.gemm_arguments import Layout

    (m, n, k), letters = (request.m, request.n, request.k), request.layout
    a = (batch_stride, k, 1) if letters[0] == "n" else (batch_stride, 1, m)
    b = (batch_stride, n, 1) if letters[1] == "n" else (batch_stride, 1, k)
    return Layout(a, b, (batch_stride, n, 1))


def portable_gemm(request: CompileRequest) -> Source:
    """The portable kernel as its plan would launch it."""
    plan = plan_problem(
        request.problem, None, request.schedule, request.tile, device=request.device, backend="portable"
    )
    if request.stages is not None:
        plan = replace(plan, stages=request.stages)
    gemm, filled, options = portable_source(plan, contiguous(request), plan.problem.aligned)
    return Source(gemm, filled, options, plan.warps, plan)


#: Groups of a request to a grouped product.
GROUPS = 64


def grouped_of(request: CompileRequest, backend: str) -> tuple[Plan, Layout, tuple[Any, ...]]:
    """The plan of groups of rows, their layout, and what follows the operands of a launch, without addresses.

    Raises
    ------
    ValueError
        If they do not lie as a layer's.
    """
    from tilestream.launch.gemm_arguments import Layout

    (m, n, k), plain = (request.m, request.n, request.k), request.problem
    if request.layout != "nt":
        raise ValueError(f"layout={request.layout!r}; groups of rows lie as a layer's do: 'nt'")
    problem = GroupedProblem(
        m, n, k, 1, plain.dtype, plain.out_dtype, aligned=plain.aligned, no_tma=plain.no_tma, scales=plain.scales,
        plain=plain.plain, groups=GROUPS, along="rows",
    )  # fmt: skip
    plan = plan_groups(problem, None, request.schedule, request.tile, device=request.device, backend=backend)
    if request.stages is not None:
        plan = replace(plan, stages=request.stages)
    scale, counters = pointer("float32", problem.scales != "none", 4), plan.schedule.kind != "static"
    more = (
        pointer("int32", address=4), pointer(problem.out_dtype), None, None, scale, scale, None, None,
        pointer("int64", counters), None, None, 0, 0, 1.0, 1.0,
    )  # fmt: skip
    return plan, Layout((0, k, 1), (n * k, 1, k), (0, n, 1)), more


def portable_grouped(request: CompileRequest) -> Source:
    """The portable grouped kernel as its plan would launch it: groups of rows."""
    from tilestream.kernels.portable.grouped import grouped_gemm
    from tilestream.launch.grouped_arguments import Bias
    from tilestream.launch.portable.grouped import GroupedArguments

    plan, layout, more = grouped_of(request, "portable")
    arguments, problem = GroupedArguments(plan, layout, Bias()), plan.problem
    filled = arguments.fill((*[pointer(problem.dtype, address=0 if problem.aligned else 2)] * 2, *more))
    return Source(grouped_gemm, filled, arguments.options, plan.warps, plan)


def hopper_grouped(request: CompileRequest) -> Source:
    """The Hopper grouped kernel as its plan would launch it: groups of rows."""
    import torch

    from tilestream.kernels.hopper.grouped import grouped_gemm
    from tilestream.launch.grouped_arguments import Bias
    from tilestream.launch.hopper.grouped import HopperGroupedArguments
    from tilestream.launch.hopper.maps import described_by

    plan, layout, more = grouped_of(request, "hopper")
    arguments, problem = HopperGroupedArguments(plan, layout, Bias()), plan.problem
    *inputs, out = arguments.maps
    maps = [(one, problem.dtype) for one in inputs] + [(out, problem.out_dtype)]
    described = (None if one is None else described_by(one, getattr(torch, dtype)) for one, dtype in maps)
    return Source(grouped_gemm, arguments.fill((*described, *more)), arguments.options, plan.warps, plan)


def portable_source(plan: Plan, layout: Layout, aligned: bool) -> tuple[Any, list[Any], dict[str, Any]]:
    """The portable kernel of a plan, what it is compiled with, and how: its launch's arguments, of no address.

    Parameters
    ----------
    aligned
        Whether the operands' addresses are multiples of 16.
    """
    from tilestream.launch.portable.arguments import arguments_of

    arguments = arguments_of(plan, layout)
    inputs = [pointer(dtype, address=0 if aligned else 2) for dtype in plan.problem.dtypes]
    filled = arguments.fill(operands(plan, layout, inputs), gate=gate_arguments(plan), copies=copy_arguments(plan))
    return arguments.kernel, filled, arguments.options


def pointer(dtype: str, is_given: object = True, address: int = 0) -> Pointer | None:
    """An operand at an address that is this modulo 16; None where it is not given."""
    from tilestream_tools.isa.build import Pointer

    return Pointer(dtype, address) if is_given else None


def operands(
    plan: Plan, layout: Layout, inputs: Iterable[Any], *, scale_address: int = 4, out_address: int = 0, log: Any = None
) -> tuple[Any, ...]:  # fmt: skip
    """What a GEMM's launch is given for its operands and scratch: pointers, without addresses."""
    problem, schedule = plan.problem, plan.schedule
    addend = "bfloat16" if problem.fp8 else problem.dtype
    scale = pointer("float32", problem.scales != "none", scale_address)
    return (
        *inputs, pointer(problem.out_dtype, address=out_address), pointer(addend, layout.bias is not None),
        pointer(addend, layout.residual is not None), scale, scale, pointer("float32", schedule.slots),
        pointer("int32", schedule.slots), pointer("int64", schedule.kind != "static" or plan.gate is not None),
        pointer("int32", schedule.raster.table is not None), log, 0, 0, 1.5, 0.5,
    )  # fmt: skip


def attention_operands(
    arguments: AttentionArguments, matrices: Sequence[Any] = (), *, address: int = 0, word: int = 4, log: Any = None
) -> tuple[tuple[Any, ...], KeyGate]:  # fmt: skip
    """What attention's launch is given, without addresses, and what it is told of keys that arrive.

    Parameters
    ----------
    matrices
        q, k, v and the output; else pointers, the inputs at ``address`` modulo 16.
    word
        Where other operands lie, modulo 16.
    """
    from tilestream.launch.attention_arguments import NO_KEY_GATE, KeyGate

    plan, p = arguments.plan, arguments.plan.problem
    lengths = (p.varlen, p.tokens_k, p.lengths, p.page_size, p.varlen, p.varlen)
    sinks = p.dtype if ITEMSIZE[p.dtype] == 2 else "float32"  # as a model of that dtype has them
    given = (
        *(matrices or (*[pointer(p.dtype, address=address)] * 3, pointer(p.out_dtype))),
        pointer("float32", p.return_lse or plan.shares > 1, word),
        pointer(sinks, p.sinks and plan.shares == 1, word), *[pointer("float32", p.scaled, word)] * 3,
        *[pointer("int32", one, word) for one in lengths],
        pointer("int64", plan.schedule.kind != "static" or p.keys is not None), log, 0, 0, *arguments.scales(0.125),
    )  # fmt: skip
    if p.keys is None:
        return given, NO_KEY_GATE
    words, records = pointer("int32", address=word), pointer("int64")
    bounds = pointer("int32", not p.keys.chunks.rows_per_chunk, word)
    return given, KeyGate(words, words, bounds, records, records, 2, 3, 4, 5)


def copy_arguments(plan: Plan) -> CopyArguments:
    """What a launch would be told of the copies it makes, of no address."""
    from tilestream.core.copy_items import CopyArguments, word_dtype

    incoming = {"none": None, "rows": plan.problem.rows, "columns": plan.problem.columns}[plan.copies]
    if incoming is None:
        return CopyArguments()
    word, table = pointer(word_dtype(incoming.copied)), pointer("int32")
    return CopyArguments(word, word, table, table, 1)


def gate_arguments(plan: Plan) -> GateArguments:
    """What a launch would be told of what arrives, of no address and no alignment."""
    from tilestream.launch.gate import GateArguments

    def words(incoming: Incoming | None) -> tuple[Any, Any, Any]:
        if incoming is None:
            return None, None, None
        signals = pointer("int32", address=4)
        return signals, signals, pointer("int32", not incoming.chunks.rows_per_chunk)

    channel, queues = pointer("int64", plan.gate), pointer("int32", plan.schedule.split == "chunks")
    return GateArguments(*words(plan.problem.rows), *words(plan.problem.columns), channel, channel, queues)


def cdna_gemm(request: CompileRequest) -> Source:
    """The CDNA kernel as its plan would launch it."""
    from tilestream.kernels.cdna.gemm import gemm
    from tilestream.launch.cdna.arguments import Arguments

    plan = plan_problem(
        request.problem, None, request.schedule, request.tile, device=request.device, backend="cdna",
        stages=request.stages,
    )  # fmt: skip
    layout = contiguous(request)
    arguments = Arguments(plan, layout)
    filled = arguments.fill(operands(plan, layout, map(pointer, plan.problem.dtypes)))
    return Source(gemm, filled, arguments.options, plan.warps, plan)


#: Sequences, and heads of each, of a request to attention.
ATTENTION_HEADS = (16, 16)


def attention_of(
    request: CompileRequest, backend: str, candidates: Callable[..., Iterable[AttentionCandidate]]
) -> tuple[AttentionPlan, AttentionLayout]:
    """The plan and the layout of whole sequences without a mask.

    Raises
    ------
    ValueError
        If the kernel has no such tile, or there is no such problem.
    """
    from tilestream.launch.attention_arguments import AttentionLayout

    device, (batch, heads) = request.device, ATTENTION_HEADS
    problem = AttentionProblem(batch, heads, heads, request.m, request.n, request.k, dtype=dtype_name(request.dtype))
    kind: Kind = "static" if request.schedule == "static" else "dynamic"
    found = [
        one
        for one in candidates(problem, device, device.workers, kind=kind)
        if request.tile in (None, one.block) and request.stages in (None, one.stages)
    ]
    if not found:
        raise ValueError(f"tile={request.tile}, stages={request.stages}; it has no such tile for {request.k} columns")
    best = min(found, key=lambda one: one.predicted)
    plan = of_candidate(problem, device, backend, best, "asked for", ())
    q, k = ((rows * heads * request.k, heads * request.k, request.k) for rows in (request.m, request.n))
    return plan, AttentionLayout(q, k, k, q)


def cdna_attention(request: CompileRequest) -> Source:
    """CDNA's attention as its plan would launch it: see `attention_of`."""
    from tilestream.kernels.cdna.attention import attend
    from tilestream.launch.cdna.attention_arguments import CdnaAttentionArguments
    from tilestream.plan.policy.cdna_attention import candidates

    plan, layout = attention_of(request, "cdna", candidates)
    arguments = CdnaAttentionArguments(plan, layout)
    return Source(attend, arguments.pack(attend)(*attention_operands(arguments)), arguments.options, plan.warps, plan)


def portable_attention(request: CompileRequest) -> Source:
    """The portable attention as its plan would launch it: see `attention_of`."""
    from tilestream.kernels.portable.attention import attention
    from tilestream.launch.portable.attention_arguments import AttentionArguments
    from tilestream.plan.policy.portable_attention import candidates

    plan, layout = attention_of(request, "portable", candidates)
    arguments = AttentionArguments(plan, layout)
    filled = arguments.pack(attention)(*attention_operands(arguments))
    return Source(attention, filled, arguments.options, plan.warps, plan)


def hopper_attention(request: CompileRequest) -> Source:
    """Hopper's attention as its plan would launch it, its keys in one share: see `attention_of`."""
    import torch

    from tilestream.kernels.hopper.attention import attend
    from tilestream.launch.hopper.attention_arguments import HopperAttentionArguments
    from tilestream.launch.hopper.maps import described_by
    from tilestream.plan.policy.hopper_attention import candidates

    plan, layout = attention_of(request, "hopper", functools.partial(candidates, splits=1))
    arguments, problem = HopperAttentionArguments(plan, layout), plan.problem
    kinds = ((arguments.q, problem.dtype), (arguments.k, problem.dtype), (arguments.v, problem.dtype),
             (arguments.out, problem.out_dtype))  # fmt: skip
    maps = [None if made is None else described_by(made, getattr(torch, dtype)) for made, dtype in kinds]
    filled = arguments.pack(attend)(*attention_operands(arguments, maps, word=0))
    return Source(attend, filled, arguments.options, plan.warps, plan)


def hopper_gemm(request: CompileRequest) -> Source:
    """The Hopper kernel as its plan would launch it."""
    import torch

    from tilestream.kernels.hopper.gemm import gemm
    from tilestream.launch.hopper.arguments import Arguments
    from tilestream.launch.hopper.maps import described_by

    plan = plan_problem(
        request.problem, None, request.schedule, request.tile, device=request.device, backend="hopper",
        stages=request.stages,
    )  # fmt: skip
    problem, layout = plan.problem, contiguous(request)
    arguments = Arguments(plan, layout)
    x, y = problem.dtypes[::-1] if plan.swap_ab else problem.dtypes
    parts = ((arguments.x, x), (None, x), *((part, y) for part in arguments.y), (arguments.out, problem.out_dtype))
    maps = [None if made is None else described_by(made, getattr(torch, dtype)) for made, dtype in parts]
    filled = arguments.fill(operands(plan, layout, maps, scale_address=0))
    return Source(gemm, filled, arguments.options, plan.warps, plan)
