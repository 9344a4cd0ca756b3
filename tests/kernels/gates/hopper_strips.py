"""The compile gate of attention whose values are taken in strips: its three kernels, by columns and by what is masked.

The weights' kernel has as many exponentials and shuffles as the Hopper kernel has for a block. The strips' kernel has
the instructions of one block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from gates.engine import Case, IsWanted, Rules, attention_layout
from gates.hopper import DEVICE, Assembly
from tilestream.core.integers import cdiv
from tilestream.launch.hopper.strip_arguments import Scratch, StripArguments
from tilestream.plan.attention_plan import of_candidate
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy import hopper_attention, hopper_strips
from tilestream.plan.policy.hopper_strips import copied_rows
from tilestream_tools.isa.kernels import attention_operands, pointer

KERNELS = ("score_blocks", "weigh_blocks", "chain_strips")
#: What a problem has beside its columns.
HOWS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "return_lse": True},
    "full": {"seqlen_q": 16},
    "fp16": {"dtype": "float16", "causal": True},
    "many": {"batch": 64, "causal": True},
    "window": {"causal": True, "window": (300, None), "sinks": True, "return_lse": True},
    "lengths": {"causal": True, "lengths": True, "seqlen_q": 4},
    "pages": {"causal": True, "page_size": 16, "pages": 4096, "lengths": True, "return_lse": True},
    "large pages": {"page_size": 256, "pages": 1024, "lengths": True, "sinks": True},
}
DIMS = ((128, 128), (64, 64), (80, 80), (128, 64))
#: What a problem has whose V has strides that are multiples of 8 elements, and not of 16; and the stride of its rows.
ODD_ROW = 1032
ODD: dict[str, dict[str, Any]] = {
    "odd sequences": {"causal": True, "seqlen_k": 8191},
    "odd pages": HOWS["pages"],
    "odd large pages": HOWS["large pages"],
    "odd pages of a block": HOWS["large pages"] | {"page_size": 128},
}
QUICK = tuple(f"128-128 causal {kernel}" for kernel in KERNELS)


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    every = [*itertools.product(DIMS, HOWS, enumerate(KERNELS)), *((DIMS[0], how, (2, KERNELS[2])) for how in ODD)]
    for dims, how, (number, kernel) in every:
        name = f"{dims[0]}-{dims[1]} {how} {kernel}"
        if is_wanted("sm_90a", name):
            given = {"batch": 2, "heads_q": 32, "heads_kv": 8, "seqlen_q": 1, "seqlen_k": 8192} | (HOWS | ODD)[how]
            p = AttentionProblem(**given, head_dim=dims[0], head_dim_v=dims[1])
            unsplit = hopper_attention.candidates(p, DEVICE, 132, kind="dynamic", splits=1, promises=True)
            found = next(hopper_strips.candidates(p, DEVICE, 132, [next(unsplit).block[1]], kind="dynamic"))
            plan = of_candidate(p, DEVICE, "hopper", found, "the gate's", ())
            layout = attention_layout(p, table=4)
            if how in ODD:
                rows = p.page_size * ODD_ROW + 8 if p.page_size else p.seqlen_k * ODD_ROW
                layout = layout._replace(v=(rows, ODD_ROW, dims[1]))
            yield Case("sm_90a", name, plan, layout, number)


def source(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    made, p = StripArguments(case.plan, case.layout), case.plan.problem
    given, _ = attention_operands(made, log=None)
    scratch = Scratch(*[pointer("float32")] * 2, pointer(p.dtype), *[pointer("float32")] * 3)
    kernel, _, options = made.kernels()[case.how]
    return kernel, made.pack(kernel)(given, scratch), options


def rules(case: Case, kernel: Any, said: str) -> Rules:
    found, (rows, block), p = Assembly(kernel, said), case.plan.block, case.plan.problem
    wanted: Rules = {
        "spills": (found.spills, (0, 0, 0)),
        "shared memory": (kernel.metadata.shared, range(DEVICE.shared + 1)),
    }
    if case.how == 1:
        scores = hopper_attention.ROWS * block // 128
        wanted |= {
            # Of a thread's weights, and of the factors of its two rows.
            "exponentials": (found.count_sass(r"\bMUFU\.EX2"), scores + 2),
            # Maxima of earlier blocks and of this one, and sums, of two rows: two steps each among four threads.
            "shuffles": (found.count_ptx(r"\bshfl\.sync\.bfly"), 3 * 2 * 2),
            "products": (found.count_sass(r"\b(HMMA|HGMMA)"), 0),
            "waits for the launch before": (found.count_ptx(r"\bgriddepcontrol\.wait"), 1),
        }
        return wanted
    if case.how == 2:
        width, ahead = p.head_dim_v // case.plan.strips, case.plan.stages - 2
        # A thread copies 16 bytes at a time, of all blocks that are copied ahead and of the loop's one.
        copies = (1 + ahead) * (cdiv(block * width, 8 * 128) + cdiv(copied_rows(p, case.plan.pack) * block, 8 * 128))
        return wanted | {
            # An instruction of four warps has 64 rows, and 16 of the sum's terms.
            "products": (found.count_sass(r"\bHGMMA"), block // 16),
            "copies of 16 bytes": (found.count_ptx(r"\bcp\.async\.cg\S+[^\n]*, 0x10,"), copies),
            "fences": (found.count_ptx(r"\bfence\.proxy\.async"), 2),
            "waits for the launch before": (found.count_ptx(r"\bgriddepcontrol\.wait"), 1),
        }
    # An instruction of a warp has 16 rows, 16 of the sum's terms and 8 columns; one of four warps has 64 rows.
    terms = 1 << (p.head_dim - 1).bit_length()
    of_four = rows == hopper_attention.ROWS
    each = terms // 16 if of_four else terms * block * rows // (16 * 16 * 8 * 4)
    return wanted | {
        "products": ((found.count_sass(r"\bHMMA"), found.count_sass(r"\bHGMMA")), (0, each) if of_four else (each, 0)),
        "copies": ("LDGSTS" in found.sass, False),
        "waits for the launch before": (found.count_ptx(r"\bgriddepcontrol\.wait"), 1),
    }
