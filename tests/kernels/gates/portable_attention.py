"""The compile gate of the portable attention: each row of `tilestream.plan.policy.portable_attention.TILES`.

By columns of a head and dtype, with what `HOWS` says: each part of the kernel is in one of them, and the ones that need
most registers are. Beside it the launch before a packed call, the one behind a call in shares, and the one that joins
two attentions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from gates.engine import AS_SM_100, DEVICES, NOT_RUN, Case, IsWanted, Rules, attention_layout
from gates.portable_gemm import common_rules
from tilestream.core.chunks import Chunks
from tilestream.kernels.device.varlen import list_sequences
from tilestream.kernels.portable.attention import attention
from tilestream.kernels.portable.attention_merge import merge_pair, merge_shares, merge_shares_of_rows
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.launch.portable.attention_arguments import (
    FEW_SHARES,
    MANY_ROWS,
    PAIR_WARPS,
    ROWS_WARPS,
    AttentionArguments,
    merge_shape,
    merged_rows,
    padded,
    pair_arguments,
)
from tilestream.plan.attention_plan import AttentionPlan, of_candidate
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy.portable_attention import candidates
from tilestream.plan.problem import Incoming
from tilestream_tools.isa.kernels import attention_operands, pointer

#: Shares of the merge that is compiled: the largest program.
MERGED = 16
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
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
COLUMNS = (64, 128, 256)
#: Columns of shares that are joined.
SHARES = (8, 64, 80, 128, 256)
#: Columns and dtypes of two attentions that are joined; 320: in two strips.
PAIRS = tuple(itertools.product((*SHARES, 320), ("bfloat16", "float32")))
QUICK = (
    "bfloat16 128 128x64 worst", "bfloat16 128 128x64 worst: the list", "gfx942 float8_e4m3fn 128 64x32 causal",
    "gfx950 float8_e4m3fn 128 128x64 causal", "sm_90a float8_e4m3fn 128 128x64 causal", "merge of 128 columns",
    "pair of 128 columns bfloat16", "sm_80 bfloat16 128 128x32 worst", "sm_100 bfloat16 128 128x32 worst",
    "sm_120 bfloat16 128 128x32 worst",
)  # fmt: skip
#: What AMD's compiler spills at most, in Triton 3.7: a row's worth of what is worked out before the loops.
AMD_SPILLS = {"vgpr_spill_count": 8, "private_segment_fixed_size": 32}


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    for arch, columns in itertools.product(DEVICES, SHARES):
        if (arch not in NOT_RUN or columns == 128) and is_wanted(arch, f"merge of {columns} columns"):
            yield Case(arch, f"merge of {columns} columns", None, None, (merge_source, columns))
        if arch == "sm_90a" and is_wanted(
            arch, f"merge of rows of {columns} columns"
        ):  # no other GPU has so few shares
            yield Case(arch, f"merge of rows of {columns} columns", None, None, (merge_rows_source, columns))
    for arch, (columns, dtype) in itertools.product(DEVICES, PAIRS):
        left_out = arch in NOT_RUN and (columns, dtype) != (128, "bfloat16")
        if not left_out and is_wanted(arch, f"pair of {columns} columns {dtype}"):
            yield Case(arch, f"pair of {columns} columns {dtype}", None, None, (pair_source, columns, dtype))
    for (arch, device), dtype, columns, how in itertools.product(DEVICES.items(), DTYPES, COLUMNS, HOWS):
        if dtype == "float16" and how != "causal":  # the same instructions but one
            continue
        if arch in NOT_RUN and not needs_most(arch, dtype, columns, how):
            continue
        dims = (columns - columns // 4, columns - columns // 4 - 8) if how == "padded" else (columns, columns)
        p = AttentionProblem(2, 8, 2, 4096, 4096, *dims, dtype=dtype, **HOWS[how], scaled=dtype == "float8_e4m3fn")
        for found in candidates(p, device, device.workers, kind="static" if how == "static" else "dynamic"):
            name = f"{dtype} {dims[0]} {found.block[0]}x{found.block[1]} {how}"
            names = [name]
            if p.varlen and found.block[0] == 128 and dtype == "bfloat16":
                names.append(f"{name}: the list")
            for one in names:
                if is_wanted(arch, one):
                    plan = of_candidate(p, device, "portable", found, "the gate's", ())
                    yield Case(arch, one, plan, layout_of(p))


def needs_most(arch: str, dtype: str, columns: int, how: str) -> bool:
    """Whether a case is compiled for an architecture on which nothing has run: what needs most of it.

    Each tile's worst; of bfloat16 also what is gathered, what arrives, and what is read an element at a time; of 8 bits
    what arrives for the most columns.
    """
    if dtype == "float8_e4m3fn" and arch == "sm_80":  # its plan refuses it
        return False
    if arch in AS_SM_100:
        return (dtype, columns, how) == ("bfloat16", 128, "worst")
    if dtype == "float8_e4m3fn" and columns == 256 and how == "arriving":
        return True
    return how == "worst" or (dtype == "bfloat16" and how in ("gathered", "arriving", "unaligned"))


def layout_of(p: AttentionProblem) -> AttentionLayout:
    scales = ((p.heads_q, 1), (p.heads_kv, 1), (p.heads_kv, 1)) if p.scaled else (None, None, None)
    made = attention_layout(p)
    return AttentionLayout(*made[:6], *scales)


def source(case: Case, trace: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if case.plan is None:
        make, *how = case.how
        return make(*how)
    if case.name.endswith(": the list"):
        return list_source(case.plan)
    return attention_source(case.plan, case.layout, trace)


def attention_source(
    plan: AttentionPlan, layout: AttentionLayout, trace: bool = False
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What its launch has compiled."""
    arguments = AttentionArguments(plan, layout, trace)
    address = 0 if plan.problem.aligned else 2
    given = attention_operands(arguments, address=address, log=pointer("int64", trace))
    return attention, arguments.pack(attention)(*given), arguments.options


def list_source(plan: AttentionPlan) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The launch before a packed call."""
    p = plan.problem
    numbers = (p.batch + 1, p.tokens_q, p.tokens_k, p.seqlen_k, p.heads_q, plan.positions)
    lengths = (pointer("int32", given, 4) for given in (p.varlen, p.tokens_k, p.lengths))
    return list_sequences, (*lengths, pointer("int32"), pointer("int32"), *numbers), {}


def merge_source(columns: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The launch that joins shares of keys, of so many columns."""
    given = (*[pointer("float32")] * 2, pointer("bfloat16"), pointer("float32"), pointer("float32"))
    together, warps = merge_shape(MERGED, padded(columns))
    numbers = (MERGED, 128, 4, 32, 4096, 4096, columns, 128, 32, 4, columns, padded(columns), together)
    return merge_shares, (*given, *numbers), {"num_warps": warps}


def merge_rows_source(columns: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The launch that joins the most shares of many rows, of so many columns."""
    given = (*[pointer("float32")] * 2, pointer("bfloat16"), pointer("float32"), pointer("float32"))
    rows = merged_rows(MANY_ROWS, FEW_SHARES, padded(columns))
    numbers = (FEW_SHARES, 128, 4, 32, 4096, 4096, columns, 128, 32, 4, columns, padded(columns), rows)
    return merge_shares_of_rows, (*given, *numbers), {"num_warps": ROWS_WARPS}


def pair_source(columns: int, dtype: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The launch that joins two attentions ``[2, 4096, 32, columns]``."""
    given = (pointer(dtype), pointer("float32", address=4)) * 3
    outputs, sums = (4096 * 32 * columns, 32 * columns, columns), (32 * 4096, 1, 4096)
    _, numbers = pair_arguments((2, 4096, 32), columns, (outputs,) * 3, (sums,) * 3)
    return merge_pair, (*given, *numbers), {"num_warps": PAIR_WARPS}


#: What moves 16 bytes of a thread, by the kind of assembly.
WIDE = {
    "ptx": re.compile(r"(ld|st)\.global\S*\.v4\.b32"), "amdgcn": re.compile(r"(global|buffer)_(load|store)_dwordx4")
}  # fmt: skip


def rules(case: Case, kernel: Any, said: str) -> Rules:
    found = common_rules(case, kernel, said, {} if case.arch.startswith("sm_") else AMD_SPILLS)
    if case.name.startswith("pair"):
        text, wide = next((kernel.asm[kind], wide) for kind, wide in WIDE.items() if kind in kernel.asm)
        # Of each part and of the output: 8 elements of a lane of 64, 16 of one of 32.
        bytes_of_lane = (16 if case.arch.startswith("sm_") else 8) * (4 if case.name.endswith("float32") else 2)
        found["accesses of 16 bytes"] = (len(wide.findall(text)), 3 * bytes_of_lane // 16)
    return found
