"""The table of which tiles of a GEMM add alike on AMD's matrix units: by kernel and dtype, a row an order."""

from __future__ import annotations

import tilestream as ts
from benchmarks.core.paths import RESULTS
from benchmarks.core.records import Row, load
from benchmarks.report.notes import Notes
from benchmarks.report.tables import columns

#: What ``python tests/tools/emulator/executed alike --record`` writes.
RECORD = RESULTS / "amd" / "alike.json"
#: What decides an order; with the extent of K that is padded.
ORDER = ("instruction", "rows", "span", "pattern", "modes")
_KERNEL = ("backend", "arch", "dtype")
#: Problems whose cost under the promise the page has: M, N, K.
COSTS = tuple((m, n, k) for n, k in ((1024, 4096), (8192, 8192), (28672, 8192)) for m in (16, 300, 4096))


def orders(rows: list[Row]) -> list[Row]:
    """An order each of a kernel and dtype: its ``tiles``, the ``ways`` that were compiled, and the ``digests``."""
    found: dict[tuple[object, ...], Row] = {}
    digests: dict[tuple[object, ...], set[str]] = {}
    for row in rows:
        kernel = tuple(row[name] for name in _KERNEL)
        if "digest" in row:
            digests.setdefault((*kernel, row["tile"]), set()).add(row["digest"])
        else:
            key = (*kernel, *(row.get(name, row.get("fault")) for name in ORDER))
            one = found.setdefault(key, {**row, "tiles": [], "ways": 0})
            one["ways"] += 1
            if row["tile"] not in one["tiles"]:
                one["tiles"].append(row["tile"])
    for one in found.values():
        kernel = tuple(one[name] for name in _KERNEL)
        one["digests"] = set().union(*(digests.get((*kernel, tile), set()) for tile in one["tiles"]))
    return list(found.values())


def alike() -> str:
    """The table and what it says."""
    record = load(RECORD)
    rows = sorted(orders(record["rows"]), key=lambda one: [one[name] for name in _KERNEL])
    count = sum("digest" not in row for row in record["rows"])
    text = Notes("amd")("alike", triton=record["triton"], count=count, digests=len(record["rows"]) - count)
    table = columns(map(_shown, rows), {
        "kernel": "{backend}, {dtype}", "arch": "{arch}", "tiles": "{names}", "compiled": "{ways}",
        "instruction": "`v_mfma_{instruction}`", "K of one instruction; of the next": "{pattern}",
        "with an epilogue": "{bits}",
    })  # fmt: skip
    return "\n\n".join((text, table, Notes("amd")("costs"), _costs()))


def _costs() -> str:
    """What the promise costs by the cost model."""
    rows = []
    for device in ("mi300x", "mi350x"):
        for m, n, k in COSTS:
            how = {"dtype": "bfloat16", "layout": "nt", "device": device}
            kept, free = ts.plan(m, n, k, invariant=True, **how), ts.plan(m, n, k, **how)
            rows.append({
                "device": device, "shape": f"{m} x {n} x {k}", "tile": "{}x{}".format(*kept.tile),
                "kept": kept.predicted * 1e6, "free": free.predicted * 1e6, "more": kept.predicted / free.predicted - 1,
                "plan": f"{free.schedule.kind}, {free.tile[0]}x{free.tile[1]}",
            })  # fmt: skip
    return columns(rows, {
        "device": "{device}", "M x N x K": "{shape}", "promised, us": "{kept:.0f}", "its tile": "{tile}",
        "free, us": "{free:.0f}", "its schedule and tile": "{plan}", "costs": "{more:.0%}",
    })  # fmt: skip


def _shown(one: Row) -> Row:
    bits = {0: "-", 1: "same bits"}.get(len(one["digests"]), f"{len(one['digests'])} kinds of bits")
    names = ", ".join(one["tiles"])
    if "fault" in one:
        return one | {"names": names, "bits": "-", "instruction": "-", "pattern": f"not read: {one['fault']}"}
    return one | {"names": names, "bits": bits}
