"""The page on matmuls and collectives: gathers and sums, and the timelines. `blocks` and `rank_calls` have the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median

from benchmarks.core.records import Data, Row, load, paths, records
from benchmarks.distributed.dispatch_table import Decided, decided, shape_of, taken
from benchmarks.distributed.floors import PEERS, Judged, floor_of, judged
from benchmarks.report import blocks, rank_calls
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cells, device_of, geomean, table, versions
from benchmarks.report.timelines import Timelines, lanes_picture
from tilestream.trace import LaunchTrace

NOTES = Notes("distributed")
#: Means are told of shapes with so many rows and columns, and of all: the others are a few rows, or a transfer alone.
LARGE = 2048
Found = list[tuple[Row, Judged]]
TITLES = {"all_gather_matmul": "All-gather", "matmul_reduce_scatter": "Reduce-scatter"}


def picture(data: Data) -> str:
    """The name of the picture of a device's gathers and reduce-scatters."""
    return f"ranks_{data['folder']}.png"


def page(results: Path) -> list[str]:
    parts = [NOTES("page")]
    folders = {data["folder"]: data for data in records(results, "all_gather_x*")}
    parts += [NOTES("picture", device=data["device"], picture=picture(data)) for data in folders.values()]
    for op in TITLES:
        made = [part for data in records(results, "all_gather_x*") for part in of_op(data, op)]
        parts += [NOTES(op, explained=NOTES("explained")), *made] if made else []
    parts += blocks.sections(results) + rank_calls.sections(results)
    parts += TIMELINES.sections(results) + CAPTURED.sections(results)
    parts += [lanes(path) for path in paths(results, "mlp_timeline_x*.json")]
    return parts + [mixture(path) for path in paths(results, "moe_timeline_x*.json")]


def of_op(data: Data, op: str) -> list[str]:
    rows = [row for row in data["rows"] if row["op"] == op]
    found = [(row, told) for row in rows if (told := judged(row)) is not None]
    if not found:
        return []
    head = [
        "M x N x K", "matmul alone", "NCCL alone", "NCCL + mm", "torch fused", "torch native", "ours, fused, chunks",
        "ours, by itself", "best / by itself", "best / fused", "won", "host: NCCL + mm / ours",
    ]  # fmt: skip
    day = data | {name: rows[0].get(name, data[name]) for name in ("commit", "date")}
    said = NOTES("op record", title=TITLES[op], device=device_of(data), dtype=data["dtype"], versions=versions(day))
    parts = [said, *([data["note"]] if data.get("note") else [])]
    parts += [table(head, [_cells(row, told) for row, told in found]), _means(found)]
    if all("host ms" in row for row, _ in found):
        parts.append(_host(found))
    return parts + lost(data, op, found)


def _cells(row: Row, told: Judged) -> list[str]:
    ms, host = row["ms"], row.get("host ms", {})
    fused = {name: ms[name] for name in ms if name.startswith("fused ")}
    fastest = min(fused, key=fused.__getitem__) if fused else ""
    return [
        shape_of(row), f"{min(ms['mm'], ms['ours mm']):.3f}", f"{ms['nccl']:.3f}", *cells(ms, PEERS),
        f"{fused[fastest]:.3f}{way(fastest)}" if fused else "-",
        f"{row['decided']}, {ms['ours']:.3f}", f"{told.ratio:.3f}",
        f"{told.best / fused[fastest]:.3f}" if fused else "-", told.why or f"{told.win:.2f}",
        " / ".join(cells(host, ("nccl + mm", "ours"), ".2f")),
    ]  # fmt: skip


def way(form: str) -> str:
    """Which way, where it says so, and in how many chunks: of ``fused 2``, and of ``fused pull 2``."""
    *ways, chunks = form.split()[1:]
    return "".join([*(f" {way}," for way in ways), f" in {chunks}"])


def named(form: Decided, op: str) -> str:
    if not form.fused:
        return "NCCL and our matmul"
    how = f"{form.way}ed " if op == "all_gather_matmul" else ""
    return f"fused, {how}in {form.chunks} chunk{'s' * (form.chunks > 1)}"


def _means(found: Found) -> str:
    """Geometric means over the large shapes and over all, and what share of the way was won."""
    large = [min(row["m"], row["n"]) >= LARGE for row, _ in found]

    def of(ratio: Callable[[Row, Judged], float]) -> str:
        ratios = [ratio(row, told) for row, told in found]
        those = [x for x, is_large in zip(ratios, large, strict=True) if is_large]
        first = f"{geomean(those):.3f} over the {len(those)} with {LARGE} rows and columns or more, " if those else ""
        return f"{first}{geomean(ratios):.3f} over all {len(ratios)}"

    then = of(lambda row, told: told.best / taken(row["op"], row["ms"]))
    said = [NOTES("means", now=of(lambda _, told: told.ratio), then=then)]
    wins = [told.win for _, told in found if told.win is not None]
    if wins:
        said.append(NOTES("means won", count=len(wins), mean=mean(wins), median=median(wins)))
    if any(floor_of(row).handshake is None for row, _ in found):
        said.append(NOTES("means no handshake"))
    return " ".join(said)


def _host(found: Found) -> str:
    """What issuing calls costs the host."""

    def span(name: str) -> str:
        of = [row["host ms"][name] for row, _ in found if name in row["host ms"]]
        return f"{min(of):.2f} to {max(of):.2f} ms"

    behind = sum(row["host ms"]["ours"] > row["ms"]["ours"] for row, _ in found)
    conclusion = NOTES("host hidden")
    if behind:
        gated = all("gated 1" in row["host ms"] for row, _ in found)
        conclusion = NOTES(
            "host behind",
            many="every shape" if behind == len(found) else f"{behind} of the {len(found)} shapes",
            alone=" " + NOTES("host alone", matmul=span("ours mm"), gated=span("gated 1")) if gated else "",
        )
    return NOTES("host", ours=span("ours"), nccl=span("nccl + mm"), conclusion=conclusion)


def lost(data: Data, op: str, found: Found) -> list[str]:
    """The shapes that are behind the best, by itself, and why as far as the record shows."""
    behind = sorted(((row, told) for row, told in found if told.ratio < 1), key=lambda one: one[1].ratio)
    if not behind:
        return [NOTES("no loss")]
    lines = []
    for row, told in behind:
        now = decided(row["ms"])
        then = Decided(row["decided"] == "fused", row["chunks"], row.get("way") or now.way)
        same = then == now or not (then.fused or now.fused)
        what = "the same form, on trial," if same else f"{named(now, op)}, which the table takes since,"
        took = taken(row["op"], row["ms"])
        text = f"{named(then, op)}, {told.ratio:.3f}; {what} took {took:.3f} ms, {told.best / took:.3f}"
        lines.append(f"- {shape_of(row)}: {text}. {why(data, row)}")
    return [NOTES("behind"), "\n".join(lines)]


def why(data: Data, row: Row) -> str:
    """The words on a row, with its figures: the fields are those of ``ms``, with ``_`` for what is no letter."""
    part = f"why {data['world']} {row['op']} {shape_of(row)}"
    fields = {"_".join(name.replace("+", "").split()): f"{ms:.3f}" for name, ms in row["ms"].items()}
    return NOTES.line(part if part in NOTES.parts else "unknown", fields)


# Timelines ------------------------------------------------------------------------------------------------------------


def timeline(launch: LaunchTrace, record: str, picture: str, part: str = "timeline") -> str:
    """Of a call: what its transfer and its tiles had of each other's time. ``part``: of the notes."""
    there = [when for when in launch.arrivals[0] if when is not None]
    begin, end, spent = launch.begin, launch.end, (launch.end - launch.begin) * launch.workers
    head, _, plan = launch.label.partition(": ")
    ways = {"_push": "rows are pushed, ", "_pull": "rows are pulled, "}  # by the record's name
    return NOTES(
        part, how=next((text for way, text in ways.items() if way in record), ""), head=head, plan=plan,
        tiles=launch.tiles_done, ms=1e3 * (end - begin), record=record, last=1e3 * (max(there) - begin),
        waited=launch.waited / spent, picture=picture,
    )  # fmt: skip


#: Of the section `gather_timeline`.
TIMELINES = Timelines("trace_gather", "gather", 190, timeline)
#: Of the section `captured_timeline`.
CAPTURED = Timelines("trace_captured_gather", "captured_gather", 190, partial(timeline, part="timeline captured"))


def lanes(path: Path) -> str:
    """Of a block: how much of its copies lies beside a matmul."""
    data = load(path)
    mine = {row["lane"]: row["spans"] for row in data["rows"] if row["rank"] == 0}
    matmuls = [span for lane in ("gather: w1, w3", "w2, and publish") for span in mine[lane]]
    copies = [span for lane in ("rows of others", "sums of others") for span in mine[lane]]
    beside = sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in copies for b, e in matmuls)
    copied = sum(end - begin for begin, end in copies)
    record = f"benchmarks/results/{data['folder']}/{path.name}"
    return NOTES("lanes", **{**data, "device": device_of(data)}, record=record, copied=copied / 1e3,
                 beside=beside / copied, picture=lanes_picture(path))  # fmt: skip


def mixture(path: Path) -> str:
    """Of a mixture: what each of its parts took on each rank, and how much of the pushes lies beside products."""
    data = load(path)
    ranks: dict[int, dict[str, list[list[float]]]] = {}
    for row in data["rows"]:
        ranks.setdefault(row["rank"], {})[row["lane"]] = row["spans"]
    parts = []
    for rank, lane in ranks.items():
        took = {name: sum(end - begin for begin, end in spans) for name, spans in lane.items()}
        products = [span for name in ("own rows", "rows of others") for span in lane[name]]
        pushes = [span for name in ("push rows", "push results") for span in lane[name]]
        beside = sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in pushes for b, e in products)
        first = min(begin for begin, _ in lane["own rows"])
        pushed = took["push rows"] + took["push results"]
        parts.append(NOTES(
            "lanes moe rank", rank=rank, received=data["rows_received"][rank], first=first, own=took["own rows"],
            others=took["rows of others"], wait=took["wait"], pushed=pushed, beside=beside / pushed,
            rest=took["sort, add"],
        ))  # fmt: skip
    record = f"benchmarks/results/{data['folder']}/{path.name}"
    return NOTES("lanes moe", **{**data, "device": device_of(data)}, record=record, parts="\n".join(parts),
                 picture=lanes_picture(path))  # fmt: skip
