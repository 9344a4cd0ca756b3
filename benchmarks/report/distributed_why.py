"""Why shapes between GPUs are lost, in words, with the figures of the record they are of. For `render_ranks`.

The words are written by hand; each figure in them is a field of the row they are said of (``{mm}``), and a shape that
has no words says that nobody has looked.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmarks.distributed.dispatch_table import shape_of

_FEW = "Next: parts of so few rows pushed by the kernel itself, which needs no stream to wait"
#: By ranks, op and shape. Fields are those of a row's ``ms``, with ``_`` for what is no letter.
WHY: dict[tuple[int, str, str], str] = {
    (2, "all_gather_matmul", "1024x3584x8192"): (
        "Beside so short a matmul the handshake ({handshake_push} ms) and a gate that is open ({gated_1} ms, {ours_mm} "
        "without) are not hidden. Next: signals that come with the copy, and a first tile that waits for nothing"
    ),
    (2, "matmul_reduce_scatter", "256x8192x3584"): (
        f"Fused it takes {{fused_1}} ms: a tile of rows a rank, so that nothing is left to overlap with. {_FEW}"
    ),
    (2, "matmul_reduce_scatter", "16384x8192x7168"): "The table of then had no measurement of this class",
    (4, "all_gather_matmul", "2048x3584x8192"): (
        "Pulled, a call with next to no bytes takes {handshake_pull} ms, pushed {handshake_push}. What is left is the "
        "gate: {gated_1} ms with all rows there, signals written, beside {ours_mm} without. Next: the same without the "
        "signals, to see whether it is they or the order of tiles, of which a rank's 512 rows have fewer than there "
        "are SMs"
    ),
    (4, "all_gather_matmul", "8192x1024x8192"): (
        "The transfer is the longer part: our copies, handshake included, take {copies_push} ms pushed and "
        "{copies_pull} pulled, NCCL's {nccl}. Next: see why two chunks a shard ({fused_push_2}) cost more than the "
        "shorter tail behind the last of them saves"
    ),
    (4, "all_gather_matmul", "256x3584x8192"): (
        "A call with next to no bytes takes {handshake_push} ms, a tile a rank leaves nothing to overlap with, and the "
        "table wants a fused form to be faster by a percent. Next: shards of so few rows read by the kernel from where "
        "they lie, as the all-reduce does"
    ),
    (4, "matmul_reduce_scatter", "256x8192x3584"): (
        f"Fused it takes {{fused_1}} ms: a tile has rows of two ranks, and three peers are to be heard from. {_FEW}"
    ),
}


def why(data: dict[str, Any], row: dict[str, Any]) -> str:
    """The words for a row, with its figures."""
    words = WHY.get((data["world"], row["op"], shape_of(row)))
    if words is None:
        return "Not looked into."
    fields = {"_".join(name.replace("+", "").split()): f"{ms:.3f}" for name, ms in row["ms"].items()}
    return f"{words.format_map(defaultdict(lambda: '-', fields))}."
