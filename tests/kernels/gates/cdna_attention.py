"""The compile gate of CDNA's attention: each tile of `tilestream.plan.policy.cdna_attention.TILES`, and `HOWS`.

A tile for busy scores has only problems whose scores are. Nothing of it was run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from gates.cdna import DEVICES, loop_rules, spills, waits_then_barriers
from gates.engine import Case, IsWanted, Rules, attention_layout, shared_memory
from tilestream.core.integers import cdiv
from tilestream.kernels.cdna.attention import attend
from tilestream.kernels.cdna.ring import fetch_layout
from tilestream.launch.cdna.attention_arguments import CdnaAttentionArguments
from tilestream.plan.attention_plan import AttentionCandidate, of_candidate, packed_heads, schedule_of
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy import cdna_attention as policy
from tilestream.plan.policy.cdna_tiles import LANES
from tilestream_tools.isa import amdgcn
from tilestream_tools.isa.kernels import attention_operands

#: What a problem has beside its extents.
HOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "return_lse": True},
    "half": {"causal": True, "dtype": "float16"},
    "varlen": {"causal": True, "varlen": True, "tokens_q": 8192, "tokens_k": 8192, "return_lse": True, "sinks": True},
    "paged": {"causal": True, "page_size": 128, "pages": 1024, "lengths": True},
    "gathered": {"causal": True, "page_size": 16, "pages": 1024, "lengths": True},
    "packed": {"heads_q": 32, "heads_kv": 4, "seqlen_q": 16, "causal": True, "return_lse": True},
    "window": {"window": (300, 20), "softcap": 30.0, "sinks": True, "return_lse": True},
    "worst": {
        "causal": True, "window": (300, None), "softcap": 30.0, "sinks": True, "varlen": True, "tokens_q": 8192,
        "page_size": 128, "pages": 4096, "lengths": True, "return_lse": True, "heads_q": 24, "heads_kv": 8,
        "seqlen_q": 32,
    },
}  # fmt: skip
#: Columns of keys and values, by a tile's.
DIMS = {64: ((64, 64), (40, 64)), 128: ((128, 128), (96, 96)), 192: ((192, 128),), 256: ((256, 256),)}
QUICK = (
    "gfx942 128-128 256x32 staged causal", "gfx942 128-128 256x32 staged gathered",
    "gfx950 128-128 256x64 direct varlen",
)  # fmt: skip


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    for arch, device in DEVICES.items():
        tiles = ((tile, dims) for tile in policy.TILES[arch] for dims in DIMS[tile.columns])
        for (tile, dims), (how, more) in itertools.product(tiles, HOWS.items()):
            keys, values = (policy.parts_of(columns, arch) for columns in dims)
            base = {"batch": 4, "heads_q": 8, "heads_kv": 8, "seqlen_q": 2048, "seqlen_k": 2048, **more}
            p = AttentionProblem(**base, head_dim=dims[0], head_dim_v=dims[1])
            if tile.copies == "direct" and policy.gathers(p, tile):
                continue
            if tile.busy not in (None, policy.is_busy(p, tile)):
                continue
            if policy.why_not(tile, keys, values, arch, device.shared):
                continue
            name = f"{dims[0]}-{dims[1]} {tile.rows}x{tile.block} {tile.copies} {how}"
            if is_wanted(arch, name):
                pack = packed_heads(p, tile.rows)
                schedule = schedule_of(p, tile.rows // pack, pack, 2, "dynamic", device.workers, device.xcds)
                block = (tile.rows, tile.block)
                found = AttentionCandidate(tile.copies, block, schedule, 0.0, pack, tile.warps, tile.stages)
                plan = of_candidate(p, device, "cdna", found, "the gate's", ())
                yield Case(arch, name, plan, attention_layout(p))


def source(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    made = CdnaAttentionArguments(case.plan, case.layout)
    return attend, made.pack(attend)(*attention_operands(made)), made.options


# What must be true of it ----------------------------------------------------------------------------------------------


def rules(case: Case, kernel: Any, _: str) -> Rules:
    parsed, p, arch = amdgcn.parse(kernel.asm["amdgcn"]), case.plan.problem, case.arch
    multiplying = [loop for loop in parsed.loops if any(one.mfma for one in loop.instructions)]
    loops = [loop for loop in multiplying if not any(other.body < loop.body for other in multiplying)]
    arguments = CdnaAttentionArguments(case.plan, case.layout)
    tile, keys, values = arguments.tile, arguments.keys, arguments.values
    m, n, k = policy.instruction(arch)
    products = tile.block // n * (keys.columns // k) + values.columns // n * (tile.block // k)
    config, direct = arguments.config(), tile.copies == "direct"
    copies: Counter[str] = Counter()
    for parts, lane in ((keys, 16 * config.K.LANE), (values, 16 * config.V.LANE)):
        if lane:
            copies[f"load_to_lds {lane}"] += parts.parts * 16 * tile.block * parts.width // (64 * tile.warps * lane)
    waits = [policy.block_loads(tile, keys, values, arch) * (tile.stages - 2)] if direct else None
    # Through registers, keys are put while the values' loads are in flight, and the other way round.
    least = 1 if direct else min(_fetches(tile, keys, values, arch))
    found: Rules = {
        "loops": (len(loops), 2 + (p.left is not None)),
        # Triton 3.9 reserves memory that no instruction touches.
        "spills": ((sum(one.kind == "scratch" for one in parsed.instructions), spills(parsed)[1]), (0, 0)),
        "order": (waits_then_barriers(list(parsed.instructions)), []),
        "shared memory": shared_memory(kernel, arch, policy.shared_bytes(tile, keys, values)),
    }
    for number, loop in enumerate(loops):
        of_a_loop = {
            **loop_rules(loop, dict(copies), waits, least),
            "instructions of the matrix units": (
                dict(loop.mfma), {f"{m}x{n}x{k}_{'f16' if p.dtype == 'float16' else 'bf16'}": products}
            ),
            # Of the largest of a row's two lanes: what has an instruction for that on gfx950 goes by way of LDS on
            # gfx942, where all that crosses from a lane to the one 32 on is LDS and the matrix units: docs/amd.md
            # counts both.
            "shuffles": (loop.counts.get("shuffle 32", 0), 1 if arch == "gfx942" else 0),
        }  # fmt: skip
        found |= {f"{rule} of loop {number}": pair for rule, pair in of_a_loop.items() if rule not in known(case.name)}
    return found


def known(name: str) -> tuple[str, ...]:
    """Rules that a case does not keep.

    Columns that are cut off, of rows that are gathered from pages: LLVM unpacks one element of a block of keys where it
    is fetched, and waits there.
    """
    drains = ("a full drain", "what waits leave of the other operand")
    return drains if name.startswith("40-") and name.endswith(" gathered") else ()


def _fetches(tile: policy.Tile, keys: policy.Parts, values: policy.Parts, arch: str) -> tuple[int, int]:
    """Loads of a lane that fetch a block of keys into registers, and one of values."""
    counts = []
    for parts, across in ((keys, False), (values, policy.turned(arch, tile.copies))):
        layout = getattr(fetch_layout, "fn", fetch_layout)
        made = layout(parts.width, tile.block, False, True, 8, tile.warps).size_per_thread[1] if across else 8
        counts.append(parts.parts * cdiv(tile.block * parts.width, LANES * tile.warps * made))
    return counts[0], counts[1]
