"""Where a peer of GEMM is ahead, counted from the records, with what is known of why from the notes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from benchmarks.core.records import Data, Row
from benchmarks.gemm.shapes import Shape
from benchmarks.report.notes import Notes
from benchmarks.report.tables import geomean, table

NOTES = Notes("gemm")
#: Ratios below this are explained.
EXPLAINED = 0.98
#: SMs of an H100 or H200.
SMS = 132


def losses(data: Data, counters: Data) -> list[str]:
    """The rows below `EXPLAINED`, the worst first, and what ``counters`` has of them; empty if there is none."""
    rows = sorted((row for row in data["rows"] if row["ratio"] < EXPLAINED), key=lambda row: row["ratio"])
    if not rows:
        return []
    head = [
        "M x N x K", "ratio", "tiles", "waves", "SMs busy", "bytes", "TB/s", "floor / ours, by", "why, and what next",
    ]  # fmt: skip
    said = NOTES("losses", explained=EXPLAINED, sms=SMS)
    return [said, table(head, [_line(row, data) for row in rows]), *(counted(counters) if counters["rows"] else ())]


def counted(data: Data) -> list[str]:
    """What the hardware counted in some of them, ours above cuBLAS's."""
    return [NOTES("counters", device=data["device"], commit=data["commit"]), readings(data["rows"], "M x N x K")]


def readings(rows: Iterable[Row], what: str, peer: str = "cuBLAS") -> str:
    """A table of counters, ours above the peer's; where a call has several kernels, with the microseconds of all."""
    head = [what, "", "us", "read, MB", "TB/s", "of memory", "through L2, MB", "hits", "SMs busy", "issue"]
    lines = []
    for row in rows:
        for name, side in (("ours", "ours"), ("cublas", peer)):
            found = row[name]
            more = f" of {found['us of all']:.1f}" if found["launches"] > 1 else ""
            lines.append([
                row["shape"] if name == "ours" else "", side, f"{found['us']:.1f}{more}",
                f"{found['dram read'] / 1e6:.0f}", f"{found['dram read'] / found['us'] * 1e-6:.2f}",
                f"{found['dram %']:.0f}%",
                f"{found['l2 read'] / 1e6:.0f}", f"{found['l2 hit %']:.0f}%", f"{found['sm active %']:.0f}%",
                f"{found['issue %']:.0f}%",
            ])  # fmt: skip
    return table(head, lines)


def why(row: Row, data: Data) -> str:
    """The words on a row, with its figures; that there are none, or none of its plan."""
    device = next((name for name in ("H100", "H200") if name in data["device"]), "")
    named = f"loss {device} {row['shape']} "
    known = next((part.removeprefix(named) for part in NOTES.parts if part.startswith(named)), None)
    if known is None:
        return NOTES("unknown")
    if f"{known} tiles" not in row["plan"]:
        return NOTES("unknown plan", known=known)
    return NOTES.line(f"{named}{known}", figures(row, data))


def figures(row: Row, data: Data) -> dict[str, str]:
    """What words on a row may name, as text; what its record has not is left out."""
    found, read, moved = _tiles(row), row.get("weight_read", {}), _shape(row).bytes()
    graph = "graph" if row.get("timed") == "graph" else "eager"
    named: dict[str, tuple[Any, str]] = {
        "tiles": (found, "d"), "waves": (found and found / SMS, ".1f"),
        "rate": (moved / row["us"]["ours"] * 1e-6, ".2f"), "peer_rate": (moved / row["us"]["cublas"] * 1e-6, ".2f"),
        "empty": (data.get("empty_us", {}).get(graph), ".1f"),
        "share": (read.get("of_ours"), ".2f"), "peer_share": (read.get("of_cublas"), ".2f"),
    }  # fmt: skip
    return {name: format(value, form) for name, (value, form) in named.items() if value is not None}


def _shape(row: Row) -> Shape:
    return Shape(*(int(extent) for extent in row["shape"].split("x")))


def _tiles(row: Row) -> int | None:
    found, shape = re.search(r"(\d+)x(\d+) tiles", row["plan"]), _shape(row)
    return -(-shape.m // int(found[1])) * -(-shape.n // int(found[2])) if found else None


def _line(row: Row, data: Data) -> list[str]:
    tiles = _tiles(row)
    waves = [str(tiles), f"{tiles / SMS:.2f}", f"{tiles / (-(-tiles // SMS) * SMS):.0%}"] if tiles else ["-"] * 3
    return [
        row["shape"], f"{row['ratio']:.3f}", *waves, f"{_shape(row).bytes() / 1e6:.0f} MB", figures(row, data)["rate"],
        f"{row['of_floor']:.2f}, {row['binds']}", why(row, data),
    ]  # fmt: skip


def of_fp8(rows: list[Row]) -> list[str]:
    """Where ``torch._scaled_mm`` is ahead, by what binds there."""
    lost = [row for row in rows if row["ratio"] < EXPLAINED]
    if not lost:
        return []
    lines = []
    for binds in ("bytes", "operations"):
        some = [row for row in lost if (row["binds"] == "bytes") == (binds == "bytes")]
        if some:
            floors = [row["of_floor"] for row in some]
            lines.append(NOTES(f"fp8 {binds}", count=len(some), least=min(row["ratio"] for row in some),
                               low=min(floors), high=max(floors), precise=_precise(rows)))  # fmt: skip
    return [NOTES("fp8 behind", percent=1 - EXPLAINED, lost=len(lost), rows=len(rows)), "\n".join(lines)]


def _precise(rows: list[Row]) -> str:
    """What precise sums cost either, where both kinds were measured."""
    us = {(row["shape"], row["scales"], row["fast_accum"]): row["us"] for row in rows}
    both = [(took, us[shape, scales, True]) for (shape, scales, fast), took in us.items()
            if not fast and (shape, scales, True) in us]  # fmt: skip
    if not both:
        return ""
    ours, theirs = (geomean(precise[name] / fast[name] for precise, fast in both) for name in ("ours", "scaled_mm"))
    conclusion = "" if ours > theirs else NOTES("fp8 innocent")
    return " " + NOTES("fp8 precise", ours=ours, theirs=theirs, conclusion=conclusion)


def of_epilogue(rows: list[Row]) -> list[str]:
    """Where ``torch.compile`` is ahead, and what the epilogue costs there."""
    said = []
    for row in (row for row in rows if row["ratio"] < 1):
        ours, product = row["us"]["ours"], row["us"]["ours, no epilogue"]
        said.append(NOTES.line("epilogue row", {
            "shape": row["shape"], "activation": row["activation"], "ratio": f"{row['ratio']:.3f}",
            "added": f"{ours - product:.0f}", "product": f"{product:.0f}",
        }))  # fmt: skip
    return [NOTES("epilogue behind", rows="; ".join(said))] if said else []


def of_quack(rows: list[Row], suite: list[Row]) -> list[str]:
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
    return [NOTES("quack ahead", percent=1 - EXPLAINED, rows="; ".join(said))] if said else []
