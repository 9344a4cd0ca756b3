"""The compile gate of CDNA's attention: see `cdna_gate`. ``python cdna_attention_gate.py quick|all [processes]``.

What is compiled of each tile of `tilestream.plan.policy.cdna_attention.TILES`: see `HOWS`; a tile for busy scores
has only those that are.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from cdna_gate import DEVICES, ring_order, triton, waits_then_barriers

from tilestream.core.integers import cdiv
from tilestream.kernels.cdna.attention import attend
from tilestream.kernels.cdna.ring import fetch_layout
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.launch.cdna.attention_arguments import CdnaAttentionArguments
from tilestream.plan.attention_plan import AttentionCandidate, AttentionPlan, of_candidate, packed_heads, schedule_of
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy.cdna_attention import (
    TILES,
    Parts,
    Tile,
    block_loads,
    gathers,
    instruction,
    is_busy,
    parts_of,
    shared_bytes,
    turned,
    why_not,
)
from tilestream.plan.policy.cdna_tiles import LANES
from tilestream_tools.isa import amdgcn
from tilestream_tools.isa.build import Pointer, build

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
#: One of each that is told apart: architecture, columns, warps, copies, how.
QUICK = (
    ("gfx942", (128, 128), 8, "staged", "causal"),
    ("gfx942", (128, 128), 8, "staged", "gathered"),
    ("gfx950", (128, 128), 8, "direct", "varlen"),
)


class Configuration(NamedTuple):
    """A launch, and what its kernel is."""

    name: str
    arch: str
    plan: AttentionPlan


def configurations(what: str) -> Iterator[Configuration]:
    """Those of ``"all"``, or of ``"quick"``; or whose name has ``what`` in it."""
    for arch, device in DEVICES.items():
        for tile in TILES[arch]:
            for dims in DIMS[tile.columns]:
                keys, values = (parts_of(columns, arch) for columns in dims)
                for how, more in HOWS.items():
                    base = {"batch": 4, "heads_q": 8, "heads_kv": 8, "seqlen_q": 2048, "seqlen_k": 2048, **more}
                    p = AttentionProblem(**base, head_dim=dims[0], head_dim_v=dims[1])
                    if tile.copies == "direct" and gathers(p, tile):
                        continue
                    if tile.busy not in (None, is_busy(p, tile)) or why_not(tile, keys, values, arch, device.shared):
                        continue
                    name = f"{arch} {dims[0]}-{dims[1]} {tile.rows}x{tile.block} {tile.copies} {how}"
                    quick = (arch, dims, tile.warps, tile.copies, how) in QUICK
                    if what == "all" or (what == "quick" and quick) or (what not in ("all", "quick") and what in name):
                        pack = packed_heads(p, tile.rows)
                        schedule = schedule_of(p, tile.rows // pack, pack, 2, "dynamic", device.workers, device.xcds)
                        found = AttentionCandidate(
                            tile.copies, (tile.rows, tile.block), schedule, 0.0, pack, tile.warps, tile.stages
                        )  # fmt: skip
                        yield Configuration(name, arch, of_candidate(p, device, "cdna", found, "the gate's", ()))


def layout_of(p: AttentionProblem) -> AttentionLayout:
    """Of contiguous operands."""

    def lying(rows: int, heads: int, columns: int) -> tuple[int, int, int]:
        return (rows * heads * columns, heads * columns, columns)

    rows_q = 0 if p.varlen else p.seqlen_q
    rows_k = p.page_size or (0 if p.tokens_k else p.seqlen_k)
    return AttentionLayout(
        lying(rows_q, p.heads_q, p.head_dim), lying(rows_k, p.heads_kv, p.head_dim),
        lying(rows_k, p.heads_kv, p.head_dim_v), lying(rows_q, p.heads_q, p.head_dim_v),
        (0, p.heads_q, 1) if p.return_lse else None, 64 if p.page_size else 0,
    )  # fmt: skip


def fill(plan: AttentionPlan) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What `tilestream.launch.cdna.attention_launch` has compiled: options, and arguments of no address."""
    p = plan.problem
    made = CdnaAttentionArguments(plan, layout_of(p))

    def there(dtype: str, needed: object) -> Pointer | None:
        return Pointer(dtype, 4) if needed else None

    given = (
        *[Pointer(p.dtype)] * 4, there("float32", p.return_lse), there("float32", p.sinks), None, None, None,
        there("int32", p.varlen), there("int32", p.tokens_k), there("int32", p.lengths), there("int32", p.page_size),
        there("int32", p.varlen), there("int32", p.varlen), Pointer("int64"), None,
    )  # fmt: skip
    return made.options, made.pack(attend)((*given, 0, 0, *made.scales(0.125)))


def report(made: Configuration, kernel: Any) -> dict[str, Any]:
    """What a test asserts on, of each of the loops over key blocks; and what it should be."""
    text = amdgcn.parse(kernel.asm["amdgcn"])
    multiplying = [loop for loop in text.loops if any(one.mfma for one in loop.instructions)]
    inner = [loop for loop in multiplying if not any(other.body < loop.body for other in multiplying)]
    return {
        "name": made.name,
        "triton": triton.__version__,
        "spilled": text.spilled,
        "registers": text.vgprs,
        "accumulators": text.agprs,
        "scratch": sum(one.kind == "scratch" for one in text.instructions),
        "shared": kernel.metadata.shared,
        "loops": [
            {
                "mfma": dict(loop.mfma),
                "counts": dict(loop.counts),
                "waits": [wait["vmcnt"] for wait in loop.waits if "vmcnt" in wait],
                "order": ring_order(loop.instructions),
                "branches": loop.counts["branch"],
            }
            for loop in inner
        ],
        "order": waits_then_barriers(list(text.instructions)),
        "expected": expected(made),
    }  # fmt: skip


def expected(made: Configuration) -> dict[str, Any]:
    """By what the plan says."""
    plan, p, arch = made.plan, made.plan.problem, made.arch
    arguments = CdnaAttentionArguments(plan, layout_of(p))
    tile, keys, values = arguments.tile, arguments.keys, arguments.values
    m, n, k = instruction(arch)
    loads = block_loads(tile, keys, values, arch)
    config = arguments.config()
    lanes = [columns.LANE * 16 for columns in (config.K, config.V)]
    copies: Counter[str] = Counter()
    for parts, wide in zip((keys, values), lanes, strict=True):
        if wide:
            copies[f"load_to_lds {wide}"] += parts.parts * 16 * tile.block * parts.width // (64 * tile.warps * wide)
    return {
        "mfma": {
            f"{m}x{n}x{k}_{'f16' if p.dtype == 'float16' else 'bf16'}": tile.block // n * (keys.columns // k)
            + values.columns // n * (tile.block // k)
        },
        "loops": 2 + (p.left is not None),
        "load_to_lds": dict(copies),
        "waits": [loads * (tile.stages - 2)] if tile.copies == "direct" else None,
        # Through registers, keys are put while the values' loads are in flight, and the other way round.
        "least": 1 if tile.copies == "direct" else min(fetches(tile, keys, values, arch)),
        "barriers": 1 if tile.copies == "direct" else 2,
        # Of the largest of a row's two lanes: what has an instruction for that on gfx950 goes by way of LDS on gfx942,
        # where all that crosses from a lane to the one 32 on is LDS and the matrix units: docs/amd.md counts both.
        "shuffles": 1 if arch == "gfx942" else 0,
        "shared": shared_bytes(tile, keys, values),
    }


def fetches(tile: Tile, keys: Parts, values: Parts, arch: str) -> tuple[int, int]:
    """Loads of a lane that fetch a block of keys into registers, and one of values."""
    counts = []
    for parts, across in ((keys, False), (values, turned(arch, tile.copies))):
        layout = getattr(fetch_layout, "fn", fetch_layout)
        made = layout(parts.width, tile.block, False, True, 8, tile.warps).size_per_thread[1] if across else 8
        counts.append(parts.parts * cdiv(tile.block * parts.width, LANES * tile.warps * made))
    return counts[0], counts[1]


def one(made: Configuration) -> dict[str, Any]:
    """Compiled, and reported on."""
    try:
        options, filled = fill(made.plan)
        return report(made, build(attend, filled, options, made.arch)[0])
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return {"name": made.name, "error": f"{type(error).__name__}: {error}"[-600:]}


def main() -> None:
    what, processes = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for found in pool.imap_unordered(one, configurations(what), 4):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
