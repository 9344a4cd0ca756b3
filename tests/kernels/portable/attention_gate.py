"""The compile gate of the portable attention: see `gate`, whose stand-ins it takes.

``python attention_gate.py quick|all sm_90a|gfx942|gfx950 [...]`` prints one JSON object a line: of each row of
`tilestream.plan.policy.portable_attention.TILES`, by columns of a head and dtype, what `HOWS` says. Each part of the
kernel is in one of them, and the ones that need most registers are.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from gate import DEVICES, Pointer, compiled, report

from tilestream.core.chunks import Chunks
from tilestream.kernels.device.varlen import list_sequences
from tilestream.kernels.portable.attention import attention
from tilestream.kernels.portable.attention_merge import merge_shares
from tilestream.launch.attention_arguments import NO_KEY_GATE, AttentionLayout, KeyGate
from tilestream.launch.portable.attention_arguments import AttentionArguments, padded
from tilestream.launch.portable.attention_launch import MERGE_WARPS, TOGETHER
from tilestream.plan.attention_plan import AttentionPlan, of_candidate
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy.portable_attention import candidates
from tilestream.plan.problem import Incoming

#: What a problem has beside its extents.
HOWS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "return_lse": True},
    "full": {},
    "worst": {
        "window": (512, 64), "softcap": 30.0, "sinks": True, "return_lse": True, "varlen": True, "tokens_q": 8192,
        "tokens_k": 8192, "positive": False,
    },
    "gathered": {
        "window": (512, 0), "return_lse": True, "varlen": True, "tokens_q": 8192, "page_size": 16, "pages": 1024,
        "lengths": True, "sinks": True,
    },
    "paged": {"causal": True, "return_lse": True, "page_size": 128, "pages": 128, "lengths": True},
    "arriving": {"causal": True, "return_lse": True, "keys": Incoming(Chunks.uniform(2 * 4096, 512))},
    "arriving ragged": {"window": (512, 0), "return_lse": True, "keys": Incoming(Chunks((0, 5, 5, 2 * 4096)))},
    "static": {"causal": True},
    "unaligned": {"causal": True, "return_lse": True, "aligned": False},
    "padded": {"causal": True, "return_lse": True},
}  # fmt: skip
#: Dtype, and what of `HOWS`: of heads of 128 columns, each in the first row of the table.
QUICK = (("bfloat16", "worst"), ("float8_e4m3fn", "causal"))
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
COLUMNS = (64, 128, 256)


def configurations(target: str, what: str) -> Iterator[tuple[str, AttentionPlan, AttentionLayout]]:
    """``(name, plan, layout)``."""
    device = DEVICES[target]
    for dtype, columns, how in itertools.product(DTYPES, COLUMNS, HOWS):
        if what != "all" and ((dtype, how) not in QUICK or columns != 128):
            continue
        if dtype == "float16" and how != "causal":  # the same instructions but one
            continue
        extra = dict(HOWS[how])
        dims = (columns, columns)
        if how == "padded":
            dims = (columns - columns // 4, columns - columns // 4 - 8)
        if dtype == "float8_e4m3fn":
            extra["scaled"] = True
        problem = AttentionProblem(2, 8, 2, 4096, 4096, *dims, dtype=dtype, **extra)
        kind = "static" if how == "static" else "dynamic"
        for i, found in enumerate(candidates(problem, device, device.workers, kind=kind)):
            if what == "all" or not i:
                plan = of_candidate(problem, device, "portable", found, "the gate's", ())
                yield f"{dtype} {dims[0]} {plan.block[0]}x{plan.block[1]} {how}", plan, layout_of(problem)


def layout_of(p: AttentionProblem) -> AttentionLayout:
    """Of contiguous operands; strides of an odd number of elements where rows are not aligned."""
    odd = 0 if p.aligned else 1

    def lying(rows: int, heads: int, columns: int) -> tuple[int, int, int]:
        row = heads * columns + odd
        return (rows * row, row, columns)

    rows_q = 0 if p.varlen else p.seqlen_q
    rows_k = p.page_size or (0 if p.tokens_k else p.seqlen_k)
    lse = (0, p.heads_q, 1) if p.varlen else (p.heads_q * p.seqlen_q, 1, p.seqlen_q)
    scales = ((p.heads_q, 1), (p.heads_kv, 1), (p.heads_kv, 1)) if p.scaled else (None, None, None)
    return AttentionLayout(
        lying(rows_q, p.heads_q, p.head_dim), lying(rows_k, p.heads_kv, p.head_dim),
        lying(rows_k, p.heads_kv, p.head_dim_v), lying(rows_q, p.heads_q, p.head_dim_v),
        lse if p.return_lse else None, 64 if p.page_size else 0, *scales,
    )  # fmt: skip


def pointers(p: AttentionProblem) -> tuple[Pointer | None, ...]:
    """The operands of a call, without a device."""
    at = 0 if p.aligned else 2

    def given(dtype: str, there: bool) -> Pointer | None:
        return Pointer(dtype, 4) if there else None

    scales = (given("float32", p.scaled),) * 3
    return (
        *(Pointer(p.dtype, at) for _ in range(3)), Pointer(p.out_dtype), given("float32", p.return_lse),
        given("float32", p.sinks), *scales, given("int32", p.varlen), given("int32", p.tokens_k > 0),
        given("int32", p.lengths), given("int32", p.page_size > 0),
    )  # fmt: skip


def build(plan: AttentionPlan, layout: AttentionLayout, target: str, trace: bool = False) -> tuple[Any, str]:
    """Compile, by way of the kernel's own launch path."""
    arguments, p = AttentionArguments(plan, layout, trace), plan.problem
    listed = (Pointer("int32", 4),) * 2 if p.varlen else (None, None)
    counters = None if plan.schedule.kind == "static" and p.keys is None else Pointer("int64")
    gate = NO_KEY_GATE
    if p.keys is not None:
        bounds = None if p.keys.chunks.rows_per_chunk else Pointer("int32", 4)
        gate = KeyGate(Pointer("int32", 4), Pointer("int32", 4), bounds, Pointer("int64"), Pointer("int64"))
    log = Pointer("int64") if trace else None
    filled = arguments.pack(attention)((*pointers(p), *listed, counters, log, 0, 0, *arguments.scales(0.125)), gate)
    return compiled(attention, filled, arguments.options, target)


def build_list(plan: AttentionPlan, target: str) -> tuple[Any, str]:
    """Compile the launch before, of a packed call."""
    *_, cu_seqlens_q, cu_seqlens_k, seqlens_k, _ = pointers(plan.problem)
    lists = (cu_seqlens_q, cu_seqlens_k, seqlens_k, Pointer("int32"), Pointer("int32"))
    p = plan.problem
    numbers = (p.batch + 1, p.tokens_q, p.tokens_k, p.seqlen_k, p.heads_q, plan.positions)
    return compiled(list_sequences, (*lists, *numbers), {}, target)


def build_merge(dim: int, target: str) -> Any:
    """Compile the kernel that joins shares of keys, of so many columns."""
    given = (*[Pointer("float32")] * 2, Pointer("bfloat16"), Pointer("float32"), Pointer("float32"))
    numbers = (7, 128, 4, 32, 4096, 4096, dim, 128, 32, 4, dim, padded(dim), TOGETHER)
    return compiled(merge_shares, (*given, *numbers), {"num_warps": MERGE_WARPS}, target)


def main() -> None:
    what, *targets = sys.argv[1:]
    for target in targets:
        for dim in (128,) if what == "quick" else (8, 64, 80, 128, 256):
            report(target, f"shares of {dim} columns", functools.partial(build_merge, dim, target))
        for name, plan, layout in configurations(target, what):
            report(target, name, functools.partial(build, plan, layout, target))
            if plan.problem.varlen and plan.block[0] == 128 and plan.problem.dtype == "bfloat16":
                report(target, f"{name}: the list", functools.partial(build_list, plan, target))


if __name__ == "__main__":
    main()
