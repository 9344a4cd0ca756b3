"""The page on inputs that arrive: copies beside a matmul, memory order, and what polling costs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.core.records import Data, records
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cell, columns, of, table
from benchmarks.report.timelines import Timelines
from tilestream.trace import LaunchTrace

NOTES = Notes("arrival")
#: A pause in which no worker polls, as `benchmarks.arrival.signals` has it, which imports Triton.
ASLEEP = 1_000_000


def page(results: Path) -> list[str]:
    def found(section: str) -> list[Data]:
        some = records(results, section if section in OWN_RECORDS else "arrival")
        return [data for data in some if data["folder"] != "cpu"]

    return NOTES.page(SECTIONS, found) + CAPTURED.sections(results)


def stream(data: Data) -> list[str]:
    ways = of("ms", ("copy", "multiply", "torch.mm", "in turn", "by chunks", "streamed"), ".2f", ", ms")
    rows = [
        row | {"turn": 1 / row["of_in_turn"], "chunks": row["ms"]["by chunks"] / row["ms"]["streamed"]}
        for row in data["rows"]
    ]
    links = [row["copy_gb_per_s"] for row in rows]
    return [NOTES.of(data, "stream", low=min(links), high=max(links)), columns(rows, {
        "M x N x K": "{shape}", **ways, "streamed / the larger": "{of_larger:.3f}",
        "in turn / streamed": "{turn:.3f}", "by chunks / streamed": "{chunks:.3f}",
    })]  # fmt: skip


def picture(data: Data) -> str:
    """The name of a record's picture."""
    return f"streams_{data['folder']}.png"


def host_to_device(data: Data) -> list[str]:
    def of_by_hand(row: Data, clock: str, way: str) -> float:
        return float(row[clock][way] / row[clock]["by hand"])

    rows = [
        row | {
            "count": row["chunks"][0], "kept": of_by_hand(row, "ms", "restarted"),
            "new": of_by_hand(row, "ms", "streamed"), "kept_gpu": of_by_hand(row, "gpu_ms", "restarted"),
        }
        for row in data["rows"]
    ]  # fmt: skip
    missing = f" Not measured: {', '.join(data['missing'])}." if data["missing"] else ""
    in_graphs = all("captured" in row["ms"] for row in rows)  # older records have none
    return [NOTES.of(data, "host_to_device", missing=missing, picture=picture(data)), columns(rows, {
        "M x N x K": "{shape}", "chunks": "{count}",
        **of("ms", ("copy", "multiply", "by hand", "by hand, our chunks", "restarted", "streamed"), ".2f", ", ms"),
        "restarted / by hand": "{kept:.3f}", "streamed / by hand": "{new:.3f}",
        "restarted / by hand, GPU's clock": "{kept_gpu:.3f}",
        **({"restarted / by hand, both captured": "{of_by_hand[captured]:.3f}"} if in_graphs else {}),
    })]  # fmt: skip


def chunk_cost(data: Data) -> list[str]:
    heads = ["between two chunks", *(f"{count} chunks, ms" for count in data["rows"][0]["ms"]), "us a chunk"]
    lines = [
        [row["between"], *(f"{ms:.3f}" for ms in row["ms"].values()), f"{row['us_a_chunk']:.1f}"]
        for row in data["rows"]
    ]  # fmt: skip
    return [NOTES.of(data, "chunk_cost", bytes=data["bytes"] / 1e6), table(heads, lines)]


def stream_copies(data: Data) -> list[str]:
    own = "by the kernel"
    counts = sorted({int(name.split()[3]) for row in data["rows"] for name in row["ms"] if name.startswith(f"{own},")})
    ways = {"copy": "copy", "multiply": "multiply", "engine": "streamed", "kernel": own}
    ways |= {f"{count} copiers": f"{own}, {count} copiers" for count in counts}
    rows = [row | {"kernel": row["plan"].split()[0], "own": row["copies"].split()[6]} for row in data["rows"]]
    note = f" Its rows are {data['note']}." if "note" in data else ""
    return [NOTES.of(data, "stream_copies", note=note), columns(rows, {
        "M x N x K": "{shape}", "kernel": "{kernel}", "its copiers": "{own}",
        **{f"{head}, ms": f"{{ms[{way}]:.2f}}" for head, way in ways.items()},
        "engine / the larger": "{of_larger:.3f}", "kernel / the larger": "{of_larger_by_the_kernel:.3f}",
    }, "")]  # fmt: skip


def order(data: Data) -> list[str]:
    """What a signal announced, as TMA read it, with and without the fences of invariant 7."""
    rows = [row for row in data["rows"] if row["section"] == "order"]
    if not rows:
        return []
    failed = [f"Not finished: {'; '.join(data['failures'])}."] if data["failures"] else []
    return [NOTES.of(data, "order"), columns(rows, {
        "Producer": "{producer}", "Consumer": "{way}", "rounds": "{rounds:,}",
        "with a wrong element": "{wrong_rounds:,}", "wrong elements": "{wrong_elements:,}",
    }), *failed]  # fmt: skip


def polling(data: Data) -> list[str]:
    """A worker an SM that waits, by the pause between two polls."""
    rows = [row for row in data["rows"] if row["section"] == "polling"]
    if not rows:
        return []
    asleep = next((row["ms"] for row in rows if row["pause_ns"] == ASLEEP), None)
    names = {None: "no worker waits", ASLEEP: "as good as asleep"}
    lines = [
        [
            names.get(row["pause_ns"], str(row["pause_ns"])), cell(row["looks_per_us_and_poller"]),
            cell(row["watts"], ".0f", "not readable"), f"{row['ms']:.3f}",
            cell(None if asleep is None else asleep / row["ms"]),
        ]
        for row in rows
    ]  # fmt: skip
    beside = max(row["pollers_beside"] for row in rows)
    head = ["Pause, ns", "polls a microsecond", "power, W", "matmul, ms", "of its speed"]
    return [NOTES.of(data, "polling", beside=beside, matmul=rows[0]["matmul"]), table(head, lines)]


SECTIONS = {
    "stream": stream, "host_to_device": host_to_device, "chunk_cost": chunk_cost, "stream_copies": stream_copies,
    "order": order, "polling": polling,
}  # fmt: skip
OWN_RECORDS = ("stream", "stream_copies", "host_to_device", "chunk_cost")


def timeline(launch: LaunchTrace, record: str, picture: str) -> str:
    """Of a replay: when its chunks came, and what its workers waited."""
    there = [when for when in launch.arrivals[0] if when is not None]
    begin, end = launch.begin, launch.end
    head, _, plan = launch.label.partition(": ")
    return NOTES(
        "timeline", head=head, plan=plan, tiles=launch.tiles_done, ms=1e3 * (end - begin), record=record,
        chunks=len(launch.arrivals[0]), last=1e3 * (max(there) - begin),
        waited=launch.waited / ((end - begin) * launch.workers), picture=picture,
    )  # fmt: skip


#: Of the section `captured_timeline`.
CAPTURED = Timelines("trace_captured_stream", "captured_stream", 190, timeline)
