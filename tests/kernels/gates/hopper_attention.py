"""The compile gate of Hopper's attention: each tile of `tilestream.plan.policy.hopper_attention.TILES`.

Each of `HOWS` in the variant that the plan takes, and a few (`BOTH`) in the other one too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from gates.engine import RELEASE, SHARED, SLACK, VERSION, Case, IsWanted, Rules, attention_layout
from gates.hopper import DEVICE, Assembly, described
from tilestream.core.chunks import Chunks
from tilestream.kernels.hopper.attention import attend
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.launch.hopper.attention_arguments import HopperAttentionArguments
from tilestream.plan.attention_plan import AttentionPlan, of_candidate
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy import hopper_attention as policy
from tilestream.plan.problem import Incoming
from tilestream_tools.isa import sass
from tilestream_tools.isa.kernels import attention_operands, pointer

_PACKED = {"varlen": True, "tokens_q": 8192, "tokens_k": 8192}
_GROUPED = {"heads_q": 32, "heads_kv": 4, "seqlen_q": 16, "causal": True, "return_lse": True}
_WINDOW = {"window": (300, 20), "softcap": 30.0, "sinks": True}
_WORST = {
    "causal": True, "window": (300, None), "softcap": 30.0, "sinks": True, "varlen": True, "tokens_q": 8192,
    "page_size": 8, "pages": 4096, "lengths": True, "heads_q": 24, "heads_kv": 8, "seqlen_q": 32,
}  # fmt: skip
_RAGGED = {"keys": Incoming(Chunks((0, 5, 8192)))}
_FP8 = {"dtype": "float8_e4m3fn", "scaled": True}
#: What a problem has beside its extents.
HOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "return_lse": True},
    "window": {**_WINDOW, "return_lse": True},
    "alone": {"causal": True},  # no log-sum-exp
    "fp16": {"dtype": "float16", "causal": True, "return_lse": True},
    "capped": {"causal": True, "softcap": 30.0, "return_lse": True},
    "varlen": {**_PACKED, "causal": True, "return_lse": True},
    "paged": {"causal": True, "page_size": 16, "pages": 1024, "lengths": True},
    "packed": _GROUPED,
    "split": {**_GROUPED, "splits": 4},
    "split, worst": {**_WORST, "splits": 3},
    "arriving": {"causal": True, "return_lse": True, "keys": Incoming(Chunks.uniform(4 * 2048, 100))},
    "arriving, promised": {
        "causal": True,
        "return_lse": True,
        "keys": Incoming(Chunks.uniform(4 * 2048, 100)),
        "promises": True,
    },
    "arriving, window": {**_WINDOW, **_PACKED, **_RAGGED, "return_lse": True},
    "arriving, shares": {
        "causal": True,
        "return_lse": True,
        "keys": Incoming(Chunks.uniform(4 * 2048, 100)),
        "splits": 3,
    },
    "arriving, split": {**_WINDOW, **_PACKED, **_RAGGED, "splits": 3},
    "worst": {**_WORST, "return_lse": True},
    "fp8": {**_FP8, "causal": True, "return_lse": True},
    "fp8, full": {**_FP8, "scaled": False},
    "fp8, split": {**_GROUPED, **_FP8, "splits": 4},
    # All that the load warp may have to know, with blocks as large as there are.
    "fp8, pages": {**_WORST, **_FP8, "splits": 3, "window": (None, None), "softcap": 0.0},
    "fp8, worst": {**_WORST, **_FP8, "return_lse": True},
    "fp8, split, worst": {**_WORST, **_FP8, "splits": 3},
}
DIMS = ((64, 64), (128, 128), (256, 256), (192, 128), (80, 80), (128, 64), (64, 128))
#: Of 8 bits alone: boxes of keys are as wide as a head's columns there.
FP8_DIMS = DIMS[-2:]
#: In both variants: turns are two barriers and two waits, whatever else there is.
BOTH = ("causal", "worst", "fp8")
QUICK = (
    "128-128 causal unordered 2x128", "64-64 full ordered 3x128", "128-128 worst ordered 2x64",
    "256-256 causal unordered 2x64", "128-128 arriving unordered 2x128", "128-128 fp8 unordered 2x128",
)  # fmt: skip
#: Compiled by the trace's gate alone: the variant that the plan does not take.
_OTHER_VARIANT = ("128-128 arriving ordered 2x128",)
#: Bytes that are known to be spilled, by Triton and case: between a tile's loops, and in no loop over blocks. Nine
#: other forms of the text spilled there as well, or with the log-sum-exp, or in other tiles.
KNOWN = {("3.9.0", "64-64 alone ordered 3x128"): 72}


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    for dims, (how, more), variant in itertools.product(DIMS, HOWS.items(), ("ordered", "unordered")):
        base = {"batch": 8, "heads_q": 8, "heads_kv": 8, "seqlen_q": 1024, "seqlen_k": 1024, **more}
        how_planned = {"splits": base.pop("splits", 1), "promises": base.pop("promises", False)}
        p = AttentionProblem(**base, head_dim=dims[0], head_dim_v=dims[1])
        if policy.refusal(p, DEVICE) or (dims in FP8_DIMS and not policy.is_8bit(p)):
            continue
        for found in policy.candidates(p, DEVICE, 132, kind="dynamic", variant=variant, **how_planned):
            consumers = found.block[0] // policy.ROWS
            name = f"{dims[0]}-{dims[1]} {how} {variant} {consumers}x{found.block[1]}"
            is_picked = variant == policy.variant_of(p, consumers) or how in BOTH or name in _OTHER_VARIANT
            if is_picked and is_wanted("sm_90a", name):
                plan = of_candidate(p, DEVICE, "hopper", found, "the gate's", ())
                yield Case("sm_90a", name, plan, attention_layout(p, table=4))


def source(case: Case, trace: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    options, filled = fill(case.plan, case.layout, trace)
    return attend, filled, options


def fill(plan: AttentionPlan, layout: AttentionLayout, trace: bool = False) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What `tilestream.launch.hopper.attention_launch.AttentionLaunch` has compiled."""
    made, p = HopperAttentionArguments(plan, layout, trace), plan.problem
    stored = policy.share_dtype(p, plan.shares)
    maps = [described(m, stored if m is made.out else p.dtype) for m in (made.q, made.k, made.v, made.out)]
    given = attention_operands(made, maps, word=0, log=pointer("int64", trace))
    return made.options, made.pack(attend)(*given)


# What must be true of it ----------------------------------------------------------------------------------------------


def rules(case: Case, kernel: Any, said: str) -> Rules:
    plan, p, found = case.plan, case.plan.problem, Assembly(kernel, said)
    consumers, block = plan.block[0] // policy.ROWS, plan.block[1]
    columns, parts = policy.columns_of(p), policy.parts_of(p)
    is_fp8, is_ordered, arriving = policy.is_8bit(p), plan.variant == "ordered", p.keys is not None
    math, load = policy.registers(consumers, columns, block, arriving)
    # A page that holds less than a block is a copy of its own, and the compiler unrolls the loop over them. An item's
    # last block of values is copied at a place of its own, if the load warp has registers for that.
    ahead = not p.page_size and p.left is None
    loads = consumers * parts + (parts + (1 + ahead) * (columns // 64)) * max(1, block // (p.page_size or block))
    kind = "f16" if p.dtype == "float16" else "bf16"
    products = {f"m64n{width}k16.f32.{kind}.{kind}" for width in (block, columns)}
    # Before the partitions begin, while they wait, and what they then have; the first one what the others leave of 504,
    # or of 512 where there are four partitions.
    registers = {256, 120, 504 - math - load, math, load} if consumers == 2 else {256, 80, math, load}
    if is_fp8:
        registers = {256, 80, *policy.REGISTERS_8BIT}
        products = {f"m64n{block}k32.f32.e4m3.e4m3", f"m64n{columns}k16.f32.f16.f16"}
    stores = consumers * columns // (32 if plan.shares > 1 else 64)
    queries = policy.queries_of(p, consumers, block, plan.stages, plan.device.shared, plan.shares)
    shared = policy.shared_bytes(p, consumers, block, plan.stages, queries, plan.shares)
    # The first block's, and a loop for each run; where blocks are taken from the first on, the last may be ragged.
    softmaxes = 2 + (p.right is not None or not plan.downwards) + (p.left is not None)
    scores = policy.ROWS * block // 128
    # A row's two rescalings, of the two rows that a thread has; and a cap has an exponential too.
    exponentials = consumers * softmaxes * (scores * (2 if p.softcap else 1) + 2)
    loops = key_loops(found.sass)
    loop = {
        "gmma": parts * policy.width(p) // (32 if is_fp8 else 16) + block // 16,
        "in_flight": 1,
        # Waits for keys and for values, and two arrivals; and those of a turn.
        "mbarrier": 4 + 2 * is_ordered,
        # Weights, two at a time.
        "rounded": scores // 2,
    }
    if not p.softcap and p.left is None:  # where there are registers for it weights are carried two to a register
        loop["permuted"] = 0
    wanted = {
        **found.rules(
            registers=registers,
            products=products,
            # The compiler may take the first step out of the loop over key blocks: it loads keys and no values.
            loads=frozenset((loads, loads + parts)),
            stores=stores,
            # A block's chunks are waited for, and the last worker out waits too; each looks, then naps and looks.
            looks=4 * arriving,
            naps=2 * arriving,
        ),
        "spills in a loop over key blocks": (sum(each["local"] for each in loops), 0),
        "loops over key blocks": (
            [{name: each[name] for name in loop} for each in loops], [loop] * consumers * (softmaxes - 1)
        ),
        # Of a consumer's warps, before each arrival. Triton 3.9 has one less.
        "barriers of a key block": (
            {each["barriers"] for each in loops}, {(2 if RELEASE >= (3, 9) else 3) + is_ordered}
        ),
        # Of the gate, before copies; and of what was written to shared memory before copies and products read it.
        "fences": (
            [found.count_ptx(rf"\bfence\.proxy\.async\.{of}") for of in ("global", "shared::cta")],
            [int(arriving), stores + is_fp8],
        ),
        # The sinks' two exponentials a row are beside the loops.
        "exponentials": (found.count_sass(r"\bMUFU\.EX2"), range(exponentials, exponentials + 13)),
        "sums that are left as they are": (rescales_lazily(found.ptx), True if columns > 128 else None),
        "shared memory": (kernel.metadata.shared, range(shared - SLACK, min(shared, SHARED[case.arch]) + 1)),
    }  # fmt: skip
    known = KNOWN.get((VERSION, case.name))
    if known is not None:
        wanted["spills"] = (found.spills[0], range(known + 1))
    return wanted


def key_loops(code: str) -> list[dict[str, Any]]:
    """The loops over key blocks: those in which what is started first in a step is left in flight."""
    return [
        {
            **loop,
            "mbarrier": sass.loop_counts(body).get("mbarrier", 0),
            "rounded": sum(text.startswith("F2FP") for text in body),
            "permuted": sum(text.startswith("PRMT") for text in body),  # taken apart and put together
            "local": sass.loop_counts(body).get("local", 0),
        }
        for loop, body in zip(sass.k_loops(code), sass.loop_texts(code), strict=True)
        if loop["in_flight"] > 0
    ]


def rescales_lazily(ptx: str) -> bool | None:
    """Whether each of a thread's sums, where they may be left as they are, is multiplied in place by its row's factor.

    By the order of `tilestream.kernels.hopper.attention_softmax.lazy_product`: two columns of a row, two of the other,
    and so on; the factors of both rows are compared with 1. None where no sums may be left.
    """
    texts = re.findall(r"\{ \.reg \.pred other, any;(.*?)DONE: \}", ptx, re.S)
    found = []
    for text in texts:
        factors = re.findall(r"setp\.neu(?:\.or)?\.f32 other, ([^,]+),", text)
        products = re.findall(r"mul\.f32 (\S+), (\S+), (\S+);", text)
        found.append(
            len(set(factors)) == 2
            and all(to == of and by == factors[i // 2 % 2] for i, (to, of, by) in enumerate(products))
        )
    return all(found) if found else None
