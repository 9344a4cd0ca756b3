"""The page on what `tilestream.invariant` costs, and on the random pairs of calls that were compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.core.records import Data, Row, records
from benchmarks.report.notes import Notes
from benchmarks.report.tables import columns, geomean, incomplete, of, table

NOTES = Notes("invariance")
#: Few rows, and what products of so many are to reach of ours without the promise and of cuBLAS.
FEW_ROWS, LEAST = 128, 0.92
#: What a product is timed beside, in the order of columns; ours without the promise first.
BESIDE = ("free", "cublas", "batch_invariant_ops", "vllm", "sgemm-bi")


def page(results: Path) -> list[str]:
    parts = NOTES.page(SECTIONS, lambda name: records(results, f"invariance_{name}"))
    tried = [part for data in records(results, "strips_variants") for part in variants(data)]
    return [*parts, NOTES("design" if len(parts) > 1 else "none"), *tried]


def cost(data: Data) -> list[str]:
    """Means by rows, then every shape."""
    products = [row for row in data["rows"] if row["what"] == "product"]
    prefills, steps = attention(data)
    names = [name for name in BESIDE if any(name in row["us"] for row in products)]
    heads = [f"of {name}" for name in names]
    by_rows = {f"product, M = {m}": [row for row in products if _extents(row)[0] == m] for m in _rows(products)}
    kinds = by_rows | {"attention, prefill": prefills, "attention, decode": steps}
    figures = ("free", "invariant", *names[1:])
    return [
        NOTES.of(data, "cost"),
        *incomplete(data),
        table(
            ["", "shapes", *heads],
            [[kind, str(len(rows)), *(_mean(rows, name) for name in names)] for kind, rows in kinds.items() if rows],
        ),
        *below(products),
        columns(products, {
            "M x N x K": "{shape}", **of("us", figures, ".1f", ", us"), **of("ratios", names, suffix=" / invariant"),
            "plan": "{plan}",
        }),
        _of_attention([*prefills, *steps]),
    ]  # fmt: skip


def below(products: list[Row]) -> list[str]:
    """The products of few rows that do not reach `LEAST`, by what their plan is without the promise."""
    said: dict[str, list[str]] = {"splits": [], "same": [], "other": []}
    for row in products:
        short = {name: row["ratios"][name] for name in ("free", "cublas") if row["ratios"].get(name, 1.0) < LEAST}
        if _extents(row)[0] <= FEW_ROWS and short:
            free = row.get("expected", "")  # what the promise costs in the cost model, and the plan without it
            why = "splits" if "stream_k" in free else "same" if free.startswith("nothing") else "other"
            said[why].append(f"{row['shape']} ({', '.join(f'{x:.3f} of {name}' for name, x in short.items())})")
    others = said.pop("other")
    found = [NOTES(f"below {why}", rows=", ".join(rows)) for why, rows in said.items() if rows]
    found += [f"- {', '.join(others)}: the plan without the promise does not split K."] if others else []
    return [NOTES("below", least=LEAST, most=FEW_ROWS), "\n".join(found)] if found else []


def variants(data: Data) -> list[str]:
    """What kernels of strips take that were tried, and what follows."""
    us, launches = ({row["shape"]: row[key] for row in data["rows"]} for key in ("us", "launches_us"))
    few, many = launches["1x1x8192"], launches["1x1x32768"]
    blocks, empty = (32768 - 8192) // 128, data["empty_us"]
    block = {name: (many[f"3 {name}"] - few[f"3 {name}"]) / blocks for name in data["variants"] if f"3 {name}" in many}
    figures = {
        "us": us, "block": block, "ahead": many["12"], "alone": many["3 four"],
        "sum": many["12"] + many["3 four"] - empty,
        "chain": 256 * block["four"], "tma": 256 * block["beside_nofence"],
        "bandwidth": blocks * 128 * 8 * 128 * 2 / (many["1"] - few["1"]) / 1e6,
    }  # fmt: skip
    rows = [
        [f"{name}: {what}", *(f"{of_shape[name]:.1f}" for of_shape in us.values()),
         f"{block[name]:.3f}" if name in block else "-"]
        for name, what in data["variants"].items()
    ]  # fmt: skip
    more = {"repeats": data["repeats"], "empty": empty, "folder": data["folder"], "stem": data["stem"]}
    return [
        NOTES.of(data, "variants", **more),
        table(["variant: sequences x queries x keys", *us, "a block"], rows),
        NOTES("variants prose", **figures),
    ]


def _of_attention(rows: list[Row]) -> str:
    return columns(rows, {
        "sequences x queries x keys": "{shape}", **of("us", ("free", "invariant"), ".1f", ", us"),
        "free / invariant": "{ratios[free]:.3f}",
    })  # fmt: skip


def attention(data: Data) -> tuple[list[Row], list[Row]]:
    """Prefills, and steps of decoding."""
    rows = [row for row in data["rows"] if row["what"] == "attention"]
    return [row for row in rows if _extents(row)[1] > 1], [row for row in rows if _extents(row)[1] == 1]


def pairs(data: Data) -> list[str]:
    """How many pairs, how many differ, and how many calls there were of each kind."""
    total, *calls = data["rows"]
    counts = table(["calls", "number"], [[row["what"], f"{row['calls']:,}"] for row in calls])
    failed = [NOTES("failed", failures="; ".join(map(str, data["failures"])))] if data["failures"] else []
    figures = {name: f"{total[name]:,}" for name in ("pairs", "numbers", "differing")}
    return [NOTES.of(data, "pairs", **figures), *failed, counts]


def _extents(row: Row) -> tuple[int, ...]:
    return tuple(map(int, row["shape"].split("x")))


def _rows(products: list[Row]) -> list[int]:
    return sorted({_extents(row)[0] for row in products})


def _mean(rows: list[Row], name: str) -> str:
    """Geometric mean and worst of what ``name`` takes beside ours with the promise."""
    ratios = [row["ratios"][name] for row in rows if name in row["ratios"]]
    return f"{geomean(ratios):.3f} ({min(ratios):.3f})" if ratios else "-"


SECTIONS: dict[str, Callable[[Data], list[str]]] = {"cost": cost, "pairs": pairs}
