"""Where cuBLAS is ahead, counted from the record of the suite, with what is known of why. For `render_gemm`."""

from __future__ import annotations

import re
from typing import Any

from gemm_shapes import Shape

#: Ratios below this are explained.
EXPLAINED = 0.98
#: SMs of an H100 or H200.
SMS = 132

_NEXT = (
    "Next: have the tensor maps fetched, and the ring's first copies started, before the launch ahead has quite ended"
)
_ONE_WAVE = (
    "one wave, and none of it hidden: launch, filling the ring and the epilogue are some 6 us of it by the cost model. "
    + _NEXT
)
#: By shape: what was found, and the next idea.
WHY = {
    "256x6144x4096": (
        "tiles of 128 x 128 leave 36 SMs idle. 128 tiles of 128 x 96 took 25.8 us beside 28.2 on an H200, where cuBLAS "
        "took 24.2: the cost model charged the narrow part too much, and takes them now"
    ),
    "256x57344x8192": (
        "memory binds, at 2.5 TB/s; cuBLAS reaches 2.7. Two workers read each tile of B, the second from L2 if it "
        "comes soon after the first, which one queue does not promise; a queue each took 1.2 % off, and is the default "
        "now. Next: tiles of all 256 rows, which read B once"
    ),
    "64x6144x4096": (
        "memory binds, and a worker's copies under way do not make up for the SMs that have none. Next: cut K in two "
        "inside pairs of workers, the partial results through distributed shared memory"
    ),
    "64x4096x4096": "as 64x6144x4096, with half of the SMs",
    "64x10240x8192": (
        "80 tiles of 64 x 128 are SMs enough for an H100's memory, not for an H200's; cuBLAS's are of 80 x 64, on 88 % "
        "of the SMs (ncu). Next: tiles of 64 x 64 with K cut in two, where the model says that SMs are idle and bytes "
        "bind"
    ),
    "1024x1024x1024": (
        "an empty kernel reads 3.2 us of it; its operands come from memory cold, and 8 K steps of 128 are over before "
        "the ring is full. Of 14 plans measured none was faster (H200: 10.7 us, cuBLAS 10.5). " + _NEXT
    ),
    "2048x2048x2048": _ONE_WAVE,
    "256x8192x8192": _ONE_WAVE,
    "256x10240x8192": _ONE_WAVE,
    "256x8192x28672": (
        "three quarters of what memory gives; 448 K steps in one wave, and the slowest of 128 workers decides. Next: "
        "see with ncu which of L2 and memory it waits for"
    ),
    "1024x10240x8192": (
        "two waves of 256 x 160: a narrow part of 32 columns takes x from registers. Ping-pong with 128 x 128 takes as "
        "long. Next: clusters of two CTAs that share B's tile, once the oldest Triton compiles multicast right"
    ),
}  # fmt: skip


def losses(data: dict[str, Any], counters: dict[str, Any], table: Any) -> str:
    """The rows below `EXPLAINED`, the worst first, and what ``counters`` has of them; empty if there is none."""
    rows = sorted((row for row in data["rows"] if row["ratio"] < EXPLAINED), key=lambda row: row["ratio"])
    if not rows:
        return ""
    head = [
        "M x N x K", "ratio", "tiles", "waves", "SMs busy", "bytes", "TB/s", "floor / ours, by", "why, and what next",
    ]  # fmt: skip
    return "\n\n".join([
        "**Where cuBLAS is ahead**",
        f"Shapes whose ratio is below {EXPLAINED}, with what can be counted: tiles, waves of them on {SMS} SMs, the "
        "share of the SMs' time that has a tile, bytes that must move and the rate at which ours moves them.",
        table(head, [_line(row) for row in rows]),
        *(counted(counters, table) if counters["rows"] else ()),
    ])  # fmt: skip


def counted(data: dict[str, Any], table: Any) -> list[str]:
    """What the hardware counted in some of them, ours above cuBLAS's."""
    head = ["M x N x K", "", "us", "read, MB", "TB/s", "of memory", "through L2, MB", "hits", "SMs busy", "issue"]
    lines = []
    for row in data["rows"]:
        for name in ("ours", "cublas"):
            found = row[name]
            lines.append([
                row["shape"] if name == "ours" else "", {"cublas": "cuBLAS"}.get(name, name), f"{found['us']:.1f}",
                f"{found['dram read'] / 1e6:.0f}", f"{found['dram read'] / found['us'] * 1e-6:.2f}",
                f"{found['dram %']:.0f}%", f"{found['l2 read'] / 1e6:.0f}", f"{found['l2 hit %']:.0f}%",
                f"{found['sm active %']:.0f}%", f"{found['issue %']:.0f}%",
            ])  # fmt: skip
    return [
        f"The same under `ncu` ({data['device']}, commit `{data['commit']}`; clocks as they are, L2 flushed before): "
        "what the largest kernel of a call read from memory and through L2, the share of SMs' cycles that had a CTA, "
        "and of cycles that issued. (`benchmarks/gemm_counters.py`)",
        table(head, lines),
    ]


def _line(row: dict[str, Any]) -> list[str]:
    m, n, k = (int(extent) for extent in row["shape"].split("x"))
    found = re.search(r"(\d+)x(\d+) tiles", row["plan"])
    counted = ["-"] * 3
    if found:
        tiles = -(-m // int(found[1])) * -(-n // int(found[2]))
        counted = [str(tiles), f"{tiles / SMS:.2f}", f"{tiles / (-(-tiles // SMS) * SMS):.0%}"]
    moved = Shape(m, n, k).bytes()
    rate = f"{moved / row['us']['ours'] * 1e-6:.2f}"
    return [
        row["shape"], f"{row['ratio']:.3f}", *counted, f"{moved / 1e6:.0f} MB", rate,
        f"{row['of_floor']:.2f}, {row['binds']}", WHY.get(row["shape"], "not looked into"),
    ]  # fmt: skip
