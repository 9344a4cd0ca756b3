"""The page on GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.core.records import Data, Row, load, paths, records
from benchmarks.gemm.shapes import GROUPS, group_of
from benchmarks.report.gemm_losses import losses, of_epilogue, of_fp8, of_quack
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cells, columns, geomean, incomplete, of, table, verdict

NOTES = Notes("gemm")
MARK = {"won": "won", "even": "even", "lost": "**lost**"}
#: Epilogues of K up to this one are counted apart.
SHORT_K = 2048
#: The host's, in records of what calls cost it.
CACHES = ("warm", "cold")
#: How a plan of the section `queues` gets its tiles: as records have it, and for people.
HANDED_OUT = {"static": "static", "queue": "one queue", "queues": "a queue each"}


def page(results: Path) -> list[str]:
    found = {name: records(results, "portable_gemm" if name == "portable" else f"gemm_{name}") for name in SECTIONS}
    found["host calls"] = native_calls(results)
    found["first calls"] = [load(path) for path in paths(results, "first_calls.json")]
    for data in found["suite"]:
        data["counters"] = _of_device(results, "gemm_counters", data)
    for data in found["quack"]:
        data["since"] = _of_device(results, "gemm_suite", data)["rows"]
    return NOTES.page(SECTIONS, found.__getitem__)


def picture(data: Data) -> str:
    return f"gemm_{data['folder']}.png"


def _of_device(results: Path, name: str, data: Data) -> Data:
    """The record of that name from the same device; one without rows where there is none."""
    return next((one for one in records(results, name) if one["folder"] == data["folder"]), {"rows": []})


def outcome(row: Row) -> str:
    return verdict(row["ratio"], row["band"])


# Beside cuBLAS --------------------------------------------------------------------------------------------------------


def suite(data: Data) -> list[str]:
    groups, every = by_group(data["rows"]), data["rows"]
    summary = [_of(f"{name}: {GROUPS.get(name, '')}".rstrip(": "), rows) for name, rows in groups.items()]
    summary.append(_of("all", every))
    summary += [_of(name, rows) for name, rows in by_rows(every).items() if rows]
    return [
        NOTES.of(data, "suite", flush=data["flush"], empty=data["empty_us"]),
        *incomplete(data),
        table(["class", "shapes", "ratio, geometric mean", "worst", "won / even / lost"], summary),
        *weights_read(every),
        *[f"**{name[0].upper()}{name[1:]}**\n\n{_group(name, rows)}" for name, rows in groups.items()],
        f"![Ratio to cuBLAS by shape, {data['device']}](../images/{picture(data)})",
        *losses(data, data["counters"]),
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


def marked(rows: Sequence[Row]) -> list[Row]:
    """Rows with their outcome as a word."""
    return [row | {"mark": MARK[outcome(row)]} for row in rows]


def _group(name: str, rows: Sequence[Row]) -> str:
    """One class's table: TFLOP/s, or for decoding microseconds beside a kernel that only reads the weights."""
    rates = {
        "cuBLAS, TFLOP/s": "{tflops[cublas]:.0f}", "ours, TFLOP/s": "{tflops[ours]:.0f}",
        "floor / ours": "{of_floor:.3f}",
    }  # fmt: skip
    if name == "decode":
        rates = {
            "weights read, us": "{weight_read[us]:.1f}", "ours, GB/s": "{gbps[ours]}",
            "weights read / ours": "{weight_read[of_ours]:.3f}",
        }  # fmt: skip
    named = [row | {"shape": f"{row['shape']} {row['name']}".strip()} for row in marked(rows)]
    return columns(named, {
        "M x N x K": "{shape}", "cuBLAS, us": "{us[cublas]:.1f}", "ours, us": "{us[ours]:.1f}", **rates,
        "ratio": "{ratio:.3f}", "quartiles": "{band[0]:.3f} to {band[1]:.3f}", "": "{mark}",
    })  # fmt: skip


# The other sections ---------------------------------------------------------------------------------------------------


def quack(data: Data) -> list[str]:
    ways = ["cublas", "quack", "quack dynamic", "quack tuned"]
    ratios = {way: [row["ratios"][way] for row in data["rows"] if way in row["ratios"]] for way in ways}
    means = ", ".join(f"{way} {geomean(found):.3f}" for way, found in ratios.items() if found)
    bests = [min(row["ratios"][way] for way in ways if way in row["ratios"]) for row in data["rows"]]
    rated = {way: f"{{tflops[{way}]:.0f}} ({{ratios[{way}]:.3f}})" for way in ways}
    return [
        NOTES.of(data, "quack", version=data["quack"], means=means, best=geomean(bests),
             worst=min(bests, default=float("nan"))),
        *incomplete(data),
        columns(marked(data["rows"]), {"M x N x K": "{shape}", "ours": "{tflops[ours]:.0f}", **rated, "": "{mark}"}),
        *of_quack(data["rows"], data["since"]),
    ]  # fmt: skip


def fp8(data: Data) -> list[str]:
    rows = [row | {"sum": "fast" if row["fast_accum"] else "precise"} for row in marked(data["rows"])]

    def mean(*kind: str) -> str:
        ratios = (row["ratio"] for row in rows if kind in ((row["scales"],), (row["scales"], row["sum"])))
        return f"{geomean(ratios):.3f}"

    kinds = dict.fromkeys((row["scales"], row["sum"]) for row in rows)
    whole = ", ".join(f"{scales}-wise {mean(scales)}" for scales in dict.fromkeys(kind[0] for kind in kinds))
    return [
        NOTES.of(data, "fp8", whole=whole, means=", ".join(f"{', '.join(kind)} {mean(*kind)}" for kind in kinds)),
        *incomplete(data),
        columns(rows, {
            "M x N x K": "{shape}", "scales, sum": "{scales}, {sum}",
            "_scaled_mm, us": "{us[scaled_mm]:.1f}", "ours, us": "{us[ours]:.1f}",
            "_scaled_mm, TFLOP/s": "{tflops[scaled_mm]:.0f}", "ours, TFLOP/s": "{tflops[ours]:.0f}",
            "ratio": "{ratio:.3f}", "": "{mark}",
        }),
        *of_fp8(data["rows"]),
    ]  # fmt: skip


def epilogue(data: Data) -> list[str]:
    means = [f"{geomean(row['ratio'] for row in data['rows']):.3f}"]
    for text, short in ((f"K of {SHORT_K} and less", True), ("longer K", False)):
        some = [row["ratio"] for row in data["rows"] if (extents(row)[2] <= SHORT_K) == short]
        means += [f"{geomean(some):.3f} of the {len(some)} with {text}"] if some else []
    rows = [
        row | {"peer": row["us"][row["best"]], "mode": row["best"].removeprefix("compile, ").partition("-no")[0]}
        for row in marked(data["rows"])
    ]
    return [
        NOTES.of(data, "epilogue", means=", ".join(means)),
        *incomplete(data),
        columns(rows, {
            "M x N x K": "{shape}", "activation": "{activation}", "torch, us": "{us[torch]:.0f}",
            "torch.compile's best, us": "{peer:.0f} ({mode})", "ours, us": "{us[ours]:.0f}",
            "ours without, us": "{us[ours, no epilogue]:.0f}", "ratio": "{ratio:.3f}", "": "{mark}",
        }),
        *of_epilogue(data["rows"]),
    ]  # fmt: skip


def search(data: Data) -> list[str]:
    shares = [row["of_best"] for row in data["rows"]]
    wrong = sum(len(row["wrong"]) for row in data["rows"])
    return [
        NOTES.of(data, "search", mean=geomean(shares), worst=min(shares, default=float("nan")),
             wrong=" " + NOTES("search wrong", count=wrong) if wrong else ""),
        *incomplete(data),
        columns(data["rows"], {
            "M x N x K": "{shape}", "plans": "{space}", "plan, us": "{us[plan]:.1f}", "best, us": "{us[best]:.1f}",
            "best / plan": "{of_best:.3f}", "cuBLAS / plan": "{ratio:.3f}", "plan": "{plan}", "best": "{best}",
        }),
    ]  # fmt: skip


def host(data: Data) -> list[str]:
    calls = [row for row in data["rows"] if row["what"] == "call"]
    firsts = [row for row in data["rows"] if row["what"] == "first call"]
    names = dict.fromkeys(name for row in calls for name in row["us"])
    parts = [
        NOTES.of(data, "host", batch=data["batch"], batches=data["batches"]),
        *incomplete(data),
        columns(calls, {"M x N x K": "{shape}", **of("us", names, ".1f")}),
    ]
    if firsts:
        shapes = {one["shape"]: f"{{shapes[{i}][first_s]:.3f}}" for i, one in enumerate(firsts[0]["shapes"])}
        parts += [NOTES("host first"), columns(firsts, {"Triton's cache": "{name}", **shapes})]
    return parts


def native_calls(results: Path) -> list[Data]:
    """The records of what calls cost the host; a row a call, with the ratios of native calls to torch's."""
    found = []
    for path in paths(results, "host_calls.json"):
        data = load(path)
        data["rows"] = [
            {"call": name, **{way: dict(zip(CACHES, us, strict=True)) for way, us in ways.items()}}
            for name, ways in data["warm_and_cold_microseconds"].items()
        ]
        for row in data["rows"]:
            row["ratio"] = {caches: row["native"][caches] / row["torch"][caches] for caches in CACHES}
        found.append(data)
    return found


def behind_torch(data: Data) -> str:
    """The native calls that cost more than torch's, with their ratios; empty if there are none."""
    more = {
        caches: [f"`{row['call']}` {row['ratio'][caches]:.2f}" for row in data["rows"] if row["ratio"][caches] > 1]
        for caches in CACHES
    }
    return "; ".join(f"{caches}: {', '.join(calls)}" for caches, calls in more.items() if calls)


def host_calls(data: Data) -> list[str]:
    means = [f"{geomean(row['ratio'][caches] for row in data['rows']):.2f} {caches}" for caches in CACHES]
    ways = {
        f"{way}, {caches}": f"{{{way}[{caches}]:.1f}}" for way in ("torch", "native", "python") for caches in CACHES
    }
    ratios = {f"native / torch, {caches}": f"{{ratio[{caches}]:.2f}}" for caches in CACHES}
    more = behind_torch(data)
    return [
        NOTES("host calls record", **data, means=", ".join(means)),
        columns(data["rows"], {"call": "{call}", **ways, **ratios}),
        *([NOTES("host calls behind", calls=more)] if more else []),
    ]


def first_calls(data: Data) -> list[str]:
    steps = next(iter(data["seconds"].values()))
    rows = [[name, *(f"{row[step]:.2f}" for step in steps)] for name, row in data["seconds"].items()]
    rounds = len(next(iter(data["samples"].values())))
    return [NOTES("first calls record", **data, rounds=rounds), table(["first call of a process", *steps], rows)]


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
    head = ["M x N x K", "tile", "cuBLAS", *HANDED_OUT.values(), "held: cuBLAS", *HANDED_OUT.values()]
    return [NOTES.of(data, "queues", held=data["held"], drawn=drawn), *incomplete(data), table(head, rows)]


def cluster(data: Data) -> list[str]:
    rows = [
        row | {"over": row["us"]["one CTA"] / row["us"]["two CTAs"],
               "two": row["plans"]["two CTAs"].partition(", ")[2].replace(", grouped raster", "")}
        for row in data["rows"]
    ]  # fmt: skip
    ways = of("us", ("torch.mm", "one CTA", "two CTAs"), ".1f")
    fields = {"M x N x K": "{shape}", **ways, "one / two": "{over:.3f}", "the two": "{two}"}
    return [NOTES("cluster record", **data), columns(rows, fields)]


def pitch(data: Data) -> list[str]:
    """Tiles by the pitch of rows that TMA reads; and copies of a few elements of the others."""
    by_tma = [row for row in data["rows"] if "plan" in row["us"]]
    others = [row for row in data["rows"] if "plan" not in row["us"]]
    fields = {"M x N x K": "{shape}", "pitch, mod 128 bytes": "{pitch}", "cuBLAS, TFLOP/s": "{tflops[cublas]:.0f}"}
    tables = [
        columns(rows, fields | of("ratio", [name for name in names if name != "cublas"], ".2f", suffix=", ratio"))
        for rows in (by_tma, others)
        if (names := dict.fromkeys(name for row in rows for name in row["ratio"]))
    ]
    return [NOTES.of(data, "pitch"), *incomplete(data), *tables]


def portable(data: Data) -> list[str]:
    rates = {"cuBLAS, TFLOP/s": "{tflops[cublas]:.0f}", "auto, TFLOP/s": "{tflops[auto]:.0f}"}
    ratios = of("of_cublas", data["rows"][0]["of_cublas"], suffix=", ratio")
    host = ", ".join(f"{name} {microseconds:.1f}" for name, microseconds in data["host_us"].items())
    return [
        NOTES.of(data, "portable"),
        columns(data["rows"], {"M x N x K": "{shape} {layout}", **rates, **ratios}),
        NOTES("portable host", host=host),
    ]


SECTIONS = {
    "suite": suite, "quack": quack, "fp8": fp8, "epilogue": epilogue, "search": search, "host": host,
    "host calls": host_calls, "first calls": first_calls,
    "queues": queues, "cluster": cluster, "pitch": pitch, "portable": portable,
}  # fmt: skip
