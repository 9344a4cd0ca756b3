"""Where cuBLAS is ahead, counted from the record of the suite, with what is known of why. For `render_gemm`."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from benchmarks.gemm.shapes import Shape, geomean

#: Ratios below this are explained.
EXPLAINED = 0.98
#: SMs of an H100 or H200.
SMS = 132

_NEXT = (
    "Next: have the tensor maps fetched, and the ring's first copies started, before the launch ahead has quite ended"
)
_ONE_WAVE = (
    f"{{tiles}} tiles are one wave, and nothing hides the launch, the filling of the ring and the epilogue. {_NEXT}"
)
_TWO_READ = (
    "ours moves {rate} TB/s, cuBLAS {peer_rate}. Two workers read each tile of B, the second from L2 if it comes soon "
    "after the first. Next: tiles of all 256 rows, which read B once"
)
_OF_READING = "({share} of the rate of a kernel that only reads the weights; cuBLAS {peer_share})"
_IDLE = (
    "{tiles} tiles: SMs that have none load nothing, and the copies of the others do not make up for it "
    f"{_OF_READING}. Next: K cut in two inside pairs of workers, the partial results through distributed shared memory"
)
_SECOND_WAVE = (
    "{tiles} tiles are {waves} waves, and in the second of them SMs are idle while bytes bind "
    f"{_OF_READING}. Next: tiles of half as many columns"
)
_COLD = (
    "an empty kernel reads {empty} us of it; its operands come from memory cold, and its steps of K are over before "
    f"the ring is full. {_NEXT}"
)
_TWO_WAVES = (
    "two waves of tiles whose narrow part, 32 columns, takes x from registers. Next: clusters of two CTAs that share "
    "B's tile, once the oldest Triton compiles multicast right"
)


class Why(NamedTuple):
    """Words on a loss, written by hand.

    Attributes
    ----------
    tiles
        Those of the plan that they are of: of another one they say nothing.
    words
        With `figures` for fields: what is a number is of the record.
    """

    tiles: str
    words: str


#: By device and shape: what was found, and the next idea.
WHY = {
    ("H100", "1024x1024x1024"): Why("64x128", _COLD),
    ("H100", "256x57344x8192"): Why("128x224", _TWO_READ),
    ("H100", "64x6144x4096"): Why("64x64", _IDLE),
    ("H100", "64x4096x4096"): Why("64x64", _IDLE),
    ("H100", "256x6144x4096"): Why("128x96", _ONE_WAVE),
    ("H100", "256x10240x8192"): Why("128x160", _ONE_WAVE),
    ("H100", "1024x10240x8192"): Why("256x160", _TWO_WAVES),
    ("H200", "256x4096x14336"): Why("128x128", (
        "K is cut between workers of {tiles} tiles; an H100's plan has tiles of 64 x 128, one a worker, and "
        "is ahead there. Next: that plan here, and what the cost model says of the two"
    )),
    ("H200", "64x10240x8192"): Why("64x128", (
        "{tiles} tiles are SMs enough for an H100's memory, not for an H200's: {rate} TB/s, cuBLAS {peer_rate}. Next: "
        "tiles of 64 x 64 with K cut in two, where the model says that SMs are idle and bytes bind"
    )),
    ("H200", "1x28672x4096"): Why("16x128", _SECOND_WAVE),
    ("H200", "16x28672x4096"): Why("16x128", _SECOND_WAVE),
    ("H200", "64x57344x8192"): Why("64x256", _SECOND_WAVE),
    ("H200", "256x4096x4096"): Why("64x128", _ONE_WAVE),
    ("H200", "256x10240x8192"): Why("128x160", _ONE_WAVE),
    ("H200", "2048x2048x2048"): Why("128x256", _ONE_WAVE),
    ("H200", "1024x1024x1024"): Why("64x128", _COLD),
    ("H200", "256x57344x8192"): Why("128x224", _TWO_READ),
    ("H200", "64x4096x4096"): Why("64x64", _IDLE),
    ("H200", "64x6144x4096"): Why("64x64", _IDLE),
    ("H200", "1x6144x4096"): Why("16x64", _IDLE),
    ("H200", "16x6144x4096"): Why("16x64", _IDLE),
    ("H200", "1x8192x8192"): Why("16x64", _ONE_WAVE),
    ("H200", "16x8192x8192"): Why("16x64", _ONE_WAVE),
    ("H200", "1024x10240x8192"): Why("256x160", _TWO_WAVES),
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
        "share of the SMs' time that has a tile, bytes that must move and the rate at which ours moves them. The words "
        "are written by hand (`benchmarks/render_losses.py`), for a device and a plan; their figures are the record's.",
        table(head, [_line(row, data) for row in rows]),
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


def why(row: dict[str, Any], data: dict[str, Any]) -> str:
    """The words on a row, with its figures; that there are none, or none of its plan."""
    device = next((name for name in ("H100", "H200") if name in data["device"]), "")
    found = WHY.get((device, row["shape"]))
    if found is None:
        return "not looked into"
    if f"{found.tiles} tiles" not in row["plan"]:
        return f"not looked into: what is known is of {found.tiles} tiles"
    return found.words.format_map(figures(row, data))


def figures(row: dict[str, Any], data: dict[str, Any]) -> dict[str, str]:
    """What words on a row may name, as text."""
    found, read = _tiles(row), row.get("weight_read", {})
    moved = _shape(row).bytes()
    graph = "graph" if row.get("timed") == "graph" else "eager"
    shares = {"share": read.get("of_ours"), "peer_share": read.get("of_cublas")}
    return {
        "tiles": str(found or "-"), "waves": f"{found / SMS:.1f}" if found else "-",
        "rate": f"{moved / row['us']['ours'] * 1e-6:.2f}", "peer_rate": f"{moved / row['us']['cublas'] * 1e-6:.2f}",
        "empty": f"{data['empty_us'][graph]:.1f}" if "empty_us" in data else "-",
        **{name: "-" if value is None else f"{value:.2f}" for name, value in shares.items()},
    }  # fmt: skip


def _shape(row: dict[str, Any]) -> Shape:
    return Shape(*(int(extent) for extent in row["shape"].split("x")))


def _tiles(row: dict[str, Any]) -> int | None:
    found, shape = re.search(r"(\d+)x(\d+) tiles", row["plan"]), _shape(row)
    return -(-shape.m // int(found[1])) * -(-shape.n // int(found[2])) if found else None


def _line(row: dict[str, Any], data: dict[str, Any]) -> list[str]:
    tiles, moved = _tiles(row), _shape(row).bytes()
    counted = [str(tiles), f"{tiles / SMS:.2f}", f"{tiles / (-(-tiles // SMS) * SMS):.0%}"] if tiles else ["-"] * 3
    return [
        row["shape"], f"{row['ratio']:.3f}", *counted, f"{moved / 1e6:.0f} MB", figures(row, data)["rate"],
        f"{row['of_floor']:.2f}, {row['binds']}", why(row, data),
    ]  # fmt: skip


def of_fp8(rows: list[dict[str, Any]]) -> list[str]:
    """Where ``torch._scaled_mm`` is ahead, by what binds there."""
    lost = [row for row in rows if row["ratio"] < EXPLAINED]
    if not lost:
        return []
    few, many = ([row for row in lost if (row["binds"] == "bytes") == bytes_bind] for bytes_bind in (True, False))
    lines = []
    if few:
        lines.append(
            f"- bytes bind: {len(few)}, down to {min(row['ratio'] for row in few):.3f}. With few tiles nothing hides "
            f"the launch, the filling of the ring and the epilogue. {_NEXT}."
        )
    if many:
        shares = [row["of_floor"] for row in many]
        lines.append(
            f"- operations bind: {len(many)}, down to {min(row['ratio'] for row in many):.3f}, at {min(shares):.2f} to "
            f"{max(shares):.2f} of the floor.{_precise(rows)} What holds them was not looked into. Next: ncu on the "
            "largest of them, beside torch's."
        )
    return [f"**Behind** by more than {1 - EXPLAINED:.0%} in {len(lost)} of {len(rows)} rows:", "\n".join(lines)]


def _precise(rows: list[dict[str, Any]]) -> str:
    """What precise sums cost either, where both kinds were measured."""
    us = {(row["shape"], row["scales"], row["fast_accum"]): row["us"] for row in rows}
    both = [(took, us[shape, scales, True]) for (shape, scales, fast), took in us.items()
            if not fast and (shape, scales, True) in us]  # fmt: skip
    if not both:
        return ""
    ours, theirs = (geomean(precise[name] / fast[name] for precise, fast in both) for name in ("ours", "scaled_mm"))
    found = "" if ours > theirs else ", so it is not they that lose"
    return f" Precise sums take {ours:.3f} of the time of fast ones, torch's {theirs:.3f}{found}."


def of_epilogue(rows: list[dict[str, Any]]) -> list[str]:
    """Where ``torch.compile`` is ahead, and what the epilogue costs there."""
    said = []
    for row in (row for row in rows if row["ratio"] < 1):
        us = row["us"]
        said.append(
            f"{row['shape']}, {row['activation']} ({row['ratio']:.3f}): the epilogue adds "
            f"{us['ours'] - us['ours, no epilogue']:.0f} us to the product's {us['ours, no epilogue']:.0f}, by the "
            "warps that multiply. Next: two groups in turn, one's epilogue beside the other's products, at long K too"
        )
    return [f"**Behind**: {'; '.join(said)}."] if said else []


def of_quack(rows: list[dict[str, Any]], suite: list[dict[str, Any]]) -> list[str]:
    """Where quack is ahead, with what the suite has measured of the shape since, beside cuBLAS."""
    since = {row["shape"]: row for row in suite}
    said = []
    for row in rows:
        peers = {name: ratio for name, ratio in row["ratios"].items() if name.startswith("quack")}
        name = min(peers, key=peers.__getitem__, default="")
        if not name or peers[name] >= EXPLAINED:
            continue
        text = f"{row['shape']} ({peers[name]:.3f}, {name})"
        if (other := since.get(row["shape"])) is not None and "cublas" in row["ratios"]:
            text += f", {row['ratios']['cublas']:.3f} of cuBLAS then and {other['ratio']:.3f} in the suite's record"
        said.append(text)
    if not said:
        return []
    return [
        f"**quack is ahead** by more than {1 - EXPLAINED:.0%}: {'; '.join(said)}. Next: this table with the plans of "
        "today, then what its kernel does otherwise."
    ]
