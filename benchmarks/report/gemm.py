"""The page on GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.core.records import Data, Row, records
from benchmarks.gemm.shapes import GROUPS, group_of
from benchmarks.report.gemm_losses import losses, of_epilogue, of_fp8, of_quack
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cells, geomean, incomplete, table, verdict, where

NOTES = Notes("gemm")
MARK = {"won": "won", "even": "even", "lost": "**lost**"}
#: Epilogues of K up to this one are counted apart.
SHORT_K = 2048
#: How a plan of the section `queues` gets its tiles: as records have it, and for people.
HANDED_OUT = {"static": "static", "queue": "one queue", "queues": "a queue each"}


def page(results: Path) -> list[str]:
    """The parts of the page."""
    parts = [NOTES("page")]
    for name, section in SECTIONS.items():
        found = records(results, "portable_gemm" if name == "portable" else f"gemm_{name}")
        if found:
            parts.append(NOTES(name))
        for data in found:
            parts += section(data)
            if name == "suite":
                parts.append(f"![Ratio to cuBLAS by shape, {data['device']}](../images/{picture(data)})")
                parts += losses(data, _of_device(results, "gemm_counters", data))
            if name == "quack":
                parts += of_quack(data["rows"], _of_device(results, "gemm_suite", data)["rows"])
    return parts


def picture(data: Data) -> str:
    """The file of a suite's plot."""
    return f"gemm_{data['folder']}.png"


def _of_device(results: Path, name: str, data: Data) -> Data:
    """The record of that name from the same device; one without rows where there is none."""
    return next((one for one in records(results, name) if one["folder"] == data["folder"]), {"rows": []})


def outcome(row: Row) -> str:
    """``won``, ``even``, ``lost``."""
    return verdict(row["ratio"], row["band"])


# Beside cuBLAS --------------------------------------------------------------------------------------------------------


def suite(data: Data) -> list[str]:
    """Every shape beside cuBLAS, by class."""
    groups, every = by_group(data["rows"]), data["rows"]
    summary = [_of(f"{name}: {GROUPS.get(name, '')}".rstrip(": "), rows) for name, rows in groups.items()]
    summary.append(_of("all", every))
    summary += [_of(name, rows) for name, rows in by_rows(every).items() if rows]
    return [
        NOTES("suite record", device=data["device"], where=where(data), flush=data["flush"], empty=data["empty_us"]),
        *incomplete(data),
        table(["class", "shapes", "ratio, geometric mean", "worst", "won / even / lost"], summary),
        *weights_read(every),
        *[f"**{name[0].upper()}{name[1:]}**\n\n{_group(name, rows)}" for name, rows in groups.items()],
    ]


def by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by class, in the classes' order, those of a weight together; without the classes that have none."""
    group = [group_of(extents(row)[0]) if row["name"] else row["group"] for row in rows]
    names = [*GROUPS, *dict.fromkeys(name for name in group if name not in GROUPS)]
    found = {
        name: sorted((row for row, its in zip(rows, group, strict=True) if its == name), key=_place) for name in names
    }
    return {name: found[name] for name in names if found[name]}


def by_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by M alone, whatever they are of."""
    big = [row for row in rows if extents(row)[0] >= 1024]
    return {
        "**big**: M of 1024 and more": big,
        "**big**, without the odd shapes": [row for row in big if row["group"] != "odd"],
        "**middle**: M of 65 to 1023": [row for row in rows if 64 < extents(row)[0] < 1024],
        "**few rows**: M of 1 to 64": [row for row in rows if extents(row)[0] <= 64],
    }


def weights_read(rows: Sequence[Row]) -> list[str]:
    """The mean share of decoding in the rate of a kernel that only reads the weights."""
    found = [row["weight_read"] for row in rows if "of_cublas" in row.get("weight_read", {})]
    if not found:
        return []
    ours, peer = (sum(read[name] for read in found) / len(found) for name in ("of_ours", "of_cublas"))
    return [NOTES("weights", count=len(found), ours=ours, least=min(read["of_ours"] for read in found), peer=peer)]


def extents(row: Row) -> tuple[int, ...]:
    """M, N and K."""
    return tuple(int(extent) for extent in row["shape"].split("x"))


def _place(row: Row) -> tuple[object, ...]:
    model, m, n, k = row["name"].partition(" ")[0], *extents(row)
    return len(model), model, n * k, row["name"], n, k, m


def _of(name: str, rows: Sequence[Row]) -> list[str]:
    """A class in a line."""
    if not rows:
        return [name, "0", *["-"] * 3]
    ratios, found = [row["ratio"] for row in rows], [outcome(row) for row in rows]
    counts = " / ".join(str(found.count(one)) for one in MARK)
    return [name, str(len(rows)), f"{geomean(ratios):.3f}", f"{min(ratios):.3f}", counts]


def _group(name: str, rows: Sequence[Row]) -> str:
    """One class's table: TFLOP/s, or for decoding microseconds beside a kernel that only reads the weights."""
    decode = name == "decode"
    more = ["weights read, us", "ours, GB/s", "weights read / ours"] if decode else [
        "cuBLAS, TFLOP/s", "ours, TFLOP/s", "floor / ours"
    ]  # fmt: skip
    body = []
    for row in rows:
        read = row.get("weight_read", {})
        figures = [
            *cells(read, ["us"], ".1f"), f"{row['gbps']['ours']}", *cells(read, ["of_ours"])
        ] if decode else [*cells(row["tflops"], ["cublas", "ours"], ".0f"), f"{row['of_floor']:.3f}"]  # fmt: skip
        low, high = row["band"]
        body.append([
            f"{row['shape']} {row['name']}".strip(), *cells(row["us"], ["cublas", "ours"], ".1f"), *figures,
            f"{row['ratio']:.3f}", f"{low:.3f} to {high:.3f}", MARK[outcome(row)],
        ])  # fmt: skip
    return table(["M x N x K", "cuBLAS, us", "ours, us", *more, "ratio", "quartiles", ""], body)


# The other sections ---------------------------------------------------------------------------------------------------


def quack(data: Data) -> list[str]:
    """Beside quack's three ways, and cuBLAS."""
    ways = ["cublas", "quack", "quack dynamic", "quack tuned"]
    rows = [
        [
            row["shape"], f"{row['tflops']['ours']:.0f}",
            *(f"{row['tflops'][way]:.0f} ({row['ratios'][way]:.3f})" if way in row["ratios"] else "-" for way in ways),
            MARK[outcome(row)],
        ]
        for row in data["rows"]
    ]  # fmt: skip
    ratios = {way: [row["ratios"][way] for row in data["rows"] if way in row["ratios"]] for way in ways}
    means = ", ".join(f"{way} {geomean(found):.3f}" for way, found in ratios.items() if found)
    bests = [min(row["ratios"][way] for way in ways if way in row["ratios"]) for row in data["rows"]]
    return [
        NOTES("quack record", version=data["quack"], device=data["device"], dtype=data["dtype"], where=where(data),
              means=means, best=geomean(bests), worst=min(bests, default=float("nan"))),
        *incomplete(data),
        table(["M x N x K", "ours", *ways, ""], rows),
    ]  # fmt: skip


def fp8(data: Data) -> list[str]:
    """Beside torch._scaled_mm."""
    rows = [
        [
            row["shape"], f"{row['scales']}, {'fast' if row['fast_accum'] else 'precise'}",
            *cells(row["us"], ["scaled_mm", "ours"], ".1f"), *cells(row["tflops"], ["scaled_mm", "ours"], ".0f"),
            f"{row['ratio']:.3f}", MARK[outcome(row)],
        ]
        for row in data["rows"]
    ]  # fmt: skip

    def mean(**like: object) -> str:
        found = (row["ratio"] for row in data["rows"] if all(row[name] == value for name, value in like.items()))
        return f"{geomean(found):.3f}"

    kinds = dict.fromkeys((row["scales"], row["fast_accum"]) for row in data["rows"])
    means = ", ".join(
        f"{scales}, {'fast' if fast else 'precise'} {mean(scales=scales, fast_accum=fast)}" for scales, fast in kinds
    )
    whole = ", ".join(f"{scales}-wise {mean(scales=scales)}" for scales in dict.fromkeys(kind[0] for kind in kinds))
    head = ["M x N x K", "scales, sum", "_scaled_mm, us", "ours, us", "_scaled_mm, TFLOP/s", "ours, TFLOP/s", "ratio"]
    return [
        NOTES("fp8 record", device=data["device"], dtype=data["dtype"], where=where(data), whole=whole, means=means),
        *incomplete(data),
        table([*head, ""], rows),
        *of_fp8(data["rows"]),
    ]


def epilogue(data: Data) -> list[str]:
    """Beside torch.compile."""
    rows = [
        [
            row["shape"], row["activation"], f"{row['us']['torch']:.0f}",
            f"{row['us'][row['best']]:.0f} ({row['best'].removeprefix('compile, ').partition('-no')[0]})",
            *cells(row["us"], ["ours", "ours, no epilogue"], ".0f"), f"{row['ratio']:.3f}", MARK[outcome(row)],
        ]
        for row in data["rows"]
    ]  # fmt: skip
    means = [f"{geomean(row['ratio'] for row in data['rows']):.3f}"]
    for text, short in ((f"K of {SHORT_K} and less", True), ("longer K", False)):
        some = [row["ratio"] for row in data["rows"] if (extents(row)[2] <= SHORT_K) == short]
        means += [f"{geomean(some):.3f} of the {len(some)} with {text}"] if some else []
    head = ["M x N x K", "activation", "torch, us", "torch.compile's best, us", "ours, us", "ours without, us", "ratio"]
    said = NOTES(
        "epilogue record", device=data["device"], dtype=data["dtype"], where=where(data), means=", ".join(means)
    )
    return [said, *incomplete(data), table([*head, ""], rows), *of_epilogue(data["rows"])]


def search(data: Data) -> list[str]:
    """The plan beside the best of its space."""
    rows = [
        [
            row["shape"], str(row["space"]), *cells(row["us"], ["plan", "best"], ".1f"), f"{row['of_best']:.3f}",
            f"{row['ratio']:.3f}", row["plan"], row["best"],
        ]
        for row in data["rows"]
    ]  # fmt: skip
    shares = [row["of_best"] for row in data["rows"]]
    wrong = sum(len(row["wrong"]) for row in data["rows"])
    said = NOTES("search record", device=data["device"], where=where(data), mean=geomean(shares),
                 worst=min(shares, default=float("nan")),
                 wrong=" " + NOTES("search wrong", count=wrong) if wrong else "")  # fmt: skip
    head = ["M x N x K", "plans", "plan, us", "best, us", "best / plan", "cuBLAS / plan", "plan", "best"]
    return [said, *incomplete(data), table(head, rows)]


def host(data: Data) -> list[str]:
    """Microseconds of a call, seconds of the first."""
    calls = [row for row in data["rows"] if row["what"] == "call"]
    firsts = [row for row in data["rows"] if row["what"] == "first call"]
    names = list(dict.fromkeys(name for row in calls for name in row["us"]))
    parts = [
        NOTES("host record", device=data["device"], batch=data["batch"], batches=data["batches"], where=where(data)),
        *incomplete(data),
        table(["M x N x K", *names], [[row["shape"], *cells(row["us"], names, ".1f")] for row in calls]),
    ]
    if firsts:
        shapes = [one["shape"] for one in firsts[0]["shapes"]]
        rows = [[row["name"], *(f"{one['first_s']:.3f}" for one in row["shapes"])] for row in firsts]
        parts += [NOTES("host first"), table(["Triton's cache", *shapes], rows)]
    return parts


def queues(data: Data) -> list[str]:
    """How tiles are handed out to workers: each way with the raster's group that suits it best on an idle device."""
    rows = []
    for row in data["rows"]:
        idle, held = row["us"], row["held_us"]
        for tile in dict.fromkeys(" ".join(name.split()[:2]) for name in idle if name != "cublas"):
            best = [
                min((name for name in idle if name.startswith(f"{tile} {way} ")), key=idle.__getitem__)
                for way in HANDED_OUT
            ]
            rows.append([
                row["shape"], tile.replace("_", "-"), f"{idle['cublas']:.1f}",
                *(f"{idle[name]:.1f} ({name.split()[-1]})" for name in best), *cells(held, ["cublas", *best], ".1f"),
            ])  # fmt: skip
    drawn = NOTES("queues early", early=data["early"]) if data["early"] else NOTES("queues late")
    said = NOTES("queues record", device=data["device"], dtype=data["dtype"], held=data["held"], drawn=drawn,
                 where=where(data))  # fmt: skip
    head = ["M x N x K", "tile", "cuBLAS", *HANDED_OUT.values(), "held: cuBLAS", *HANDED_OUT.values()]
    return [said, *incomplete(data), table(head, rows)]


def cluster(data: Data) -> list[str]:
    """Workers of two CTAs that share a tile's columns."""
    ways = ["torch.mm", "one CTA", "two CTAs"]
    rows = [
        [
            row["shape"], *cells(row["us"], ways, ".1f"), f"{row['us']['one CTA'] / row['us']['two CTAs']:.3f}",
            row["plans"]["two CTAs"].partition(", ")[2].replace(", grouped raster", ""),
        ]
        for row in data["rows"]
    ]  # fmt: skip
    return [NOTES("cluster record", **data), table(["M x N x K", *ways, "one / two", "the two"], rows)]


def portable(data: Data) -> list[str]:
    """The portable kernel, by schedule."""
    kinds = list(data["rows"][0]["of_cublas"])
    rows = [
        [f"{row['shape']} {row['layout']}", *cells(row["tflops"], ["cublas", "auto"], ".0f"),
         *cells(row["of_cublas"], kinds)]
        for row in data["rows"]
    ]  # fmt: skip
    host = ", ".join(f"{name} {microseconds:.1f}" for name, microseconds in data["host_us"].items())
    return [
        NOTES("portable record", device=data["device"], dtype=data["dtype"], where=where(data)),
        table(["M x N x K", "cuBLAS, TFLOP/s", "auto, TFLOP/s", *(f"{kind}, ratio" for kind in kinds)], rows),
        NOTES("portable host", host=host),
    ]


SECTIONS = {
    "suite": suite, "quack": quack, "fp8": fp8, "epilogue": epilogue, "search": search, "host": host,
    "queues": queues, "cluster": cluster, "portable": portable,
}  # fmt: skip
