"""The compile gate of the Hopper attention kernel: see `hopper_gate`, whose build and stand-ins it takes.

``python hopper_attention_gate.py quick|all [processes]`` prints one JSON object a line.

What is compiled of each tile of `tilestream.plan.policy.hopper_attention.TILES`: each of `HOWS` in the variant that
the plan takes, and a few (`BOTH`) in the other one too.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from hopper_gate import DEVICE, Pointer, build, described, sass, triton

from releases import release
from tilestream.core.chunks import Chunks
from tilestream.kernels.hopper.attention import attend
from tilestream.launch.attention_arguments import NO_KEY_GATE, AttentionLayout, KeyGate
from tilestream.launch.hopper.attention_arguments import HopperAttentionArguments
from tilestream.plan.attention_plan import AttentionPlan, of_candidate
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy import hopper_attention
from tilestream.plan.problem import Incoming


def layout_of(p: AttentionProblem, table: int = 4) -> AttentionLayout:
    """Of contiguous operands."""

    def lying(rows: int, heads: int, columns: int) -> tuple[int, int, int]:
        return (0 if rows == 0 else rows * heads * columns, heads * columns, columns)

    rows_q = 0 if p.varlen else p.seqlen_q
    rows_k = p.page_size or (0 if p.tokens_k else p.seqlen_k)
    lse = (0, p.heads_q, 1) if p.varlen else (p.heads_q * p.seqlen_q, 1, p.seqlen_q)
    return AttentionLayout(
        lying(rows_q, p.heads_q, p.head_dim), lying(rows_k, p.heads_kv, p.head_dim),
        lying(rows_k, p.heads_kv, p.head_dim_v), lying(rows_q, p.heads_q, p.head_dim_v),
        lse if p.return_lse else None, table if p.page_size else 0,
    )  # fmt: skip


def fill(plan: AttentionPlan, layout: AttentionLayout, trace: bool = False) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What `tilestream.launch.hopper.attention_launch.AttentionLaunch` has compiled."""
    made, p = HopperAttentionArguments(plan, layout, trace), plan.problem
    stored = hopper_attention.share_dtype(p, plan.shares)
    maps = [described(m, stored if m is made.out else p.dtype) for m in (made.q, made.k, made.v, made.out)]
    ints = Pointer("int32")
    given = (
        Pointer("float32") if p.return_lse or plan.shares > 1 else None,
        Pointer("float32") if p.sinks and plan.shares == 1 else None,
        *(Pointer("float32") if p.scaled else None for _ in range(3)),
        ints if p.varlen else None, ints if p.tokens_k else None, ints if p.lengths else None,
        ints if p.page_size else None, ints if p.varlen else None, ints if p.varlen else None,
        None if plan.schedule.kind == "static" and p.keys is None else Pointer("int64"),
        Pointer("int64") if trace else None,
    )  # fmt: skip
    gate = NO_KEY_GATE
    if p.keys is not None:
        bounds = None if p.keys.chunks.rows_per_chunk else ints
        gate = KeyGate(ints, ints, bounds, Pointer("int64"), Pointer("int64"), 2, 3, 4, 5)
    return made.options, made.pack(attend)((*maps, *given, 0, 0, *made.scales(0.125)), gate)


class Configuration(NamedTuple):
    name: str
    plan: AttentionPlan


#: What a problem has beside its extents.
HOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "return_lse": True},
    "window": {"window": (300, 20), "softcap": 30.0, "sinks": True, "return_lse": True},
    "alone": {"causal": True},  # no log-sum-exp
    "fp16": {"dtype": "float16", "causal": True, "return_lse": True},
    "capped": {"causal": True, "softcap": 30.0, "return_lse": True},
    "varlen": {"causal": True, "varlen": True, "tokens_q": 8192, "tokens_k": 8192, "return_lse": True},
    "paged": {"causal": True, "page_size": 16, "pages": 1024, "lengths": True},
    "packed": {"heads_q": 32, "heads_kv": 4, "seqlen_q": 16, "causal": True, "return_lse": True},
    "split": {"heads_q": 32, "heads_kv": 4, "seqlen_q": 16, "causal": True, "return_lse": True, "splits": 4},
    "split, worst": {
        "causal": True, "window": (300, None), "softcap": 30.0, "sinks": True, "varlen": True, "tokens_q": 8192,
        "page_size": 8, "pages": 4096, "lengths": True, "heads_q": 24, "heads_kv": 8, "seqlen_q": 32, "splits": 3,
    },
    "arriving": {"causal": True, "return_lse": True, "keys": Incoming(Chunks.uniform(4 * 2048, 100))},
    "arriving, window": {
        "window": (300, 20), "softcap": 30.0, "sinks": True, "return_lse": True, "varlen": True, "tokens_q": 8192,
        "tokens_k": 8192, "keys": Incoming(Chunks((0, 5, 8192))),
    },
    "arriving, split": {
        "window": (300, 20), "softcap": 30.0, "sinks": True, "varlen": True, "tokens_q": 8192, "tokens_k": 8192,
        "keys": Incoming(Chunks((0, 5, 8192))), "splits": 3,
    },
    "worst": {
        "causal": True, "window": (300, None), "softcap": 30.0, "sinks": True, "varlen": True, "tokens_q": 8192,
        "page_size": 8, "pages": 4096, "lengths": True, "return_lse": True, "heads_q": 24, "heads_kv": 8,
        "seqlen_q": 32,
    },
}  # fmt: skip
_NARROW = {"dtype": "float8_e4m3fn", "scaled": True}
HOWS |= {
    "fp8": {**_NARROW, "causal": True, "return_lse": True},
    "fp8, full": {**_NARROW, "scaled": False},
    "fp8, split": {**HOWS["split"], **_NARROW},
    # All that the load warp may have to know, with blocks as large as there are.
    "fp8, pages": {**HOWS["split, worst"], **_NARROW, "window": (None, None), "softcap": 0.0},
    "fp8, worst": {**HOWS["worst"], **_NARROW},
    "fp8, split, worst": {**HOWS["split, worst"], **_NARROW},
}
DIMS = ((64, 64), (128, 128), (256, 256), (192, 128), (80, 80), (128, 64), (64, 128))
#: Of 8 bits alone: boxes of keys are as wide as a head's columns there.
NARROW_DIMS = DIMS[-2:]
#: In both variants: turns are two barriers and two waits, whatever else there is.
BOTH = ("causal", "worst", "fp8")
QUICK = (
    "128-128 causal apart 2x128", "64-64 full turns 3x128", "128-128 worst turns 2x64", "256-256 causal apart 2x64",
    "128-128 arriving apart 2x128", "128-128 fp8 apart 2x128",
)  # fmt: skip


def configurations(what: str) -> Iterator[Configuration]:
    """Those of ``"all"``, of ``"quick"``, or whose name begins so."""
    for dims, (how, more), variant in itertools.product(DIMS, HOWS.items(), ("turns", "apart")):
        base = {"batch": 8, "heads_q": 8, "heads_kv": 8, "seqlen_q": 1024, "seqlen_k": 1024, **more}
        splits = base.pop("splits", 1)
        problem = AttentionProblem(**base, head_dim=dims[0], head_dim_v=dims[1])
        if hopper_attention.refusal(problem, DEVICE) or (
            dims in NARROW_DIMS and not hopper_attention.is_narrow(problem)
        ):
            continue
        for found in hopper_attention.candidates(problem, DEVICE, 132, kind="dynamic", variant=variant, splits=splits):
            consumers = found.block[0] // hopper_attention.ROWS
            name = f"{dims[0]}-{dims[1]} {how} {variant} {consumers}x{found.block[1]}"
            picked = variant == hopper_attention.variant_of(problem, consumers)
            taken = what == "all" and (picked or how in BOTH)
            if taken or name.startswith(what) or (what == "quick" and name in QUICK):
                yield Configuration(name, of_candidate(problem, DEVICE, "hopper", found, "the gate's", ()))


def report(made: Configuration, kernel: Any, said: str) -> dict[str, Any]:
    """What a test asserts on."""
    ptx, (code, usage) = kernel.asm["ptx"], sass.disassembled(kernel.asm["cubin"])
    return {
        "name": made.name,
        "triton": triton.__version__,
        "spilled": sass.spilled_bytes(said),
        "stack": sass.stack_bytes(usage),
        "local": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "notes": sorted(set(re.findall(r"C7[56]\d\d|[^\n]*ignored[^\n]*", said))),
        "registers": sorted(set(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)))),
        "wgmma": sorted(sass.wgmma_shapes(ptx)),
        "exponentials": len(re.findall(r"\bMUFU\.EX2", code)),
        "loads": len(re.findall(r"\bUTMALDG", code)),
        "stores": len(re.findall(r"\bUTMASTG", code)),
        # Loops over key blocks: what is started first in a step is left in flight while the rest of it is done.
        "key_loops": [
            {
                **loop,
                "mbarrier": sass.loop_counts(body).get("mbarrier", 0),
                # Weights, rounded two at a time; and what is taken apart and put together.
                "rounded": sum(text.startswith("F2FP") for text in body),
                "permuted": sum(text.startswith("PRMT") for text in body),
                "local": sass.loop_counts(body).get("local", 0),
            }
            for loop, body in zip(sass.k_loops(code), sass.loop_texts(code), strict=True)
            if loop["in_flight"] > 0
        ],
        # Of the gate: looks at signals, pauses between them, fences before copies. Of the rest: fences of what was
        # written to shared memory before copies and multiplications read it.
        "looks": sass.looks(ptx),
        "naps": len(re.findall(r"\bnanosleep\.", ptx)),
        "fences": [len(re.findall(rf"\bfence\.proxy\.async\.{of}", ptx)) for of in ("global", "shared::cta")],
        "lazily": lazily(ptx),
        "shared": kernel.metadata.shared,
        "reused": sass.reused_barriers(ptx),
        "expected": expected(made),
    }


def lazily(ptx: str) -> bool | None:
    """Whether a thread's sums, where they may be left as they are, are multiplied in place by what is theirs.

    By the order in which `tilestream.kernels.hopper.attention_softmax.lazy_product` takes them: two columns of a
    row, two of the other, and so on, of which each row's is looked at. None where no sums may be left.
    """
    texts = re.findall(r"\{ \.reg \.pred other, any;(.*?)DONE: \}", ptx, re.S)
    found = []
    for text in texts:
        looked_at = re.findall(r"setp\.neu(?:\.or)?\.f32 other, ([^,]+),", text)
        products = re.findall(r"mul\.f32 (\S+), (\S+), (\S+);", text)
        found.append(
            len(set(looked_at)) == 2
            and all(to == of and by == looked_at[i // 2 % 2] for i, (to, of, by) in enumerate(products))
        )
    return all(found) if found else None


def expected(made: Configuration) -> dict[str, Any]:
    """By what the plan says."""
    plan, p = made.plan, made.plan.problem
    consumers, block = plan.block[0] // hopper_attention.ROWS, plan.block[1]
    columns, parts = hopper_attention.columns_of(p), hopper_attention.parts_of(p)
    math, load = hopper_attention.registers(consumers, columns, block, p.keys is not None)
    narrow = hopper_attention.is_narrow(p)
    # A page that holds less than a block is a copy of its own, and the compiler unrolls the loop over them.
    # An item's last block of values is copied at a place of its own, if the load warp has registers for that.
    ahead = not p.page_size and p.left is None
    boxes = (parts + (1 + ahead) * (columns // 64)) * max(1, block // (p.page_size or block))
    kind = "f16" if p.dtype == "float16" else "bf16"
    products = {f"m64n{width}k16.f32.{kind}.{kind}" for width in (block, columns)}
    # Before the partitions begin, while they wait, and what they then have; the first one what the others leave of 504,
    # or of 512 where there are four partitions.
    registers = {256, 120, 504 - math - load, math, load} if consumers == 2 else {256, 80, math, load}
    if narrow:
        registers = {256, 80, *hopper_attention.NARROW_REGISTERS}
        products = {f"m64n{block}k32.f32.e4m3.e4m3", f"m64n{columns}k16.f32.f16.f16"}
    queries = hopper_attention.queries_of(p, consumers, block, plan.stages, plan.device.shared, plan.shares)
    shared = hopper_attention.shared_bytes(p, consumers, block, plan.stages, queries, plan.shares)
    # The first block's, and a loop for each run; where blocks are taken from the first on, the last may be ragged.
    softmaxes = 2 + (p.right is not None or p.keys is not None) + (p.left is not None)
    scores = hopper_attention.ROWS * block // 128
    # A row's two shrinks, of the two rows that a thread has; and a cap has an exponential too.
    exponentials = softmaxes * (scores * (2 if p.softcap else 1) + 2)
    ordered, arriving = plan.variant == "turns", p.keys is not None
    stores = consumers * columns // (32 if plan.shares > 1 else 64)
    width = hopper_attention.width(p)
    return {
        "registers": sorted(registers),
        "wgmma": sorted(products),
        # Of the loop over key blocks the compiler may take out the first step, which loads keys and no values.
        "loads": [consumers * parts + boxes, consumers * parts + boxes + parts],
        "stores": stores,
        "exponentials": consumers * exponentials,
        "key_loops": consumers * (softmaxes - 1),
        "key_loop": {
            "gmma": parts * width // (32 if narrow else 16) + block // 16, "in_flight": 1,
            # Waits for keys and for values, and two arrivals; and those of a turn.
            "mbarrier": 4 + 2 * ordered,
            "rounded": scores // 2,
            # Where there are registers for it weights are carried two to a register.
            **({} if p.softcap or p.left is not None else {"permuted": 0}),
        },
        # Of a consumer's warps, before each arrival. Triton 3.9 has one less.
        "barriers": (2 if release(triton.__version__) >= (3, 9) else 3) + ordered,
        # A block's chunks are waited for, and the last worker out waits too; each looks, and then naps and looks.
        "looks": (4 * arriving, 0),
        "naps": 2 * arriving,
        "fences": [int(arriving), stores + narrow],
        "lazily": True if columns > 128 else None,
        "shared": shared,
    }  # fmt: skip


def one(made: Configuration) -> dict[str, Any]:
    """Compiled, and reported on."""
    start = time.perf_counter()
    try:
        found = report(made, *build(*fill(made.plan, layout_of(made.plan.problem)), kernel=attend))
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        found = {"name": made.name, "error": f"{type(error).__name__}: {error}"[-1500:]}
    return {**found, "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    what, processes = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    if processes == 1:
        for made in configurations(what):
            print(json.dumps(one(made)), flush=True)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for found in pool.imap_unordered(one, configurations(what), 1):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
