"""The page on inputs that arrive: copies beside a matmul, memory order, and what polling costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from benchmarks.core.records import Data, Row, records
from benchmarks.report.notes import Notes
from benchmarks.report.tables import by_clocks, cell, columns, incomplete, of, table
from benchmarks.report.timelines import Timelines
from tilestream.trace import LaunchTrace

NOTES = Notes("arrival")
#: A pause in which no worker polls, as `benchmarks.arrival.signals` has it, which imports Triton.
ASLEEP = 1_000_000
#: What copies of experts are to reach: so many times the longer of copy and multiply, and times as fast as by hand.
EXPERTS_OF_LARGER, EXPERTS_OF_BY_HAND = 1.05, 1.15


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


#: The times of a row on its page; and those ways of ours that are compared: by the way, the peer's way.
BY_HAND = ("copy", "multiply", "torch.mm", "by hand", "by hand, our chunks", "restarted", "streamed", "captured",
           "by hand, captured")  # fmt: skip
COMPARED = {"restarted": "by hand", "streamed": "by hand", "captured": "by hand, captured"}
#: A goal: at most so many times the larger of copy and matmul, and so many milliseconds.
OF_LARGER, LAUNCH_MS = 1.03, 0.06


def host_to_device(data: Data) -> list[str]:
    """Each way's time by both clocks; then ours beside the peer's, and beside the goal."""
    missing = f" Not measured: {', '.join(data['missing'])}." if data["missing"] else ""
    said = NOTES.of(data, "host_to_device", missing=missing, picture=picture(data))
    times, ratios = [], []
    for row in data["rows"]:
        clocks = row["ms"], row["gpu_ms"]
        goals = [OF_LARGER * max(ms["copy"], min(ms["multiply"], ms["torch.mm"])) + LAUNCH_MS for ms in clocks]
        beside = [[ms[way] / ms[peer] for ms in clocks] for way, peer in COMPARED.items()]
        over = [
            [1e3 * (ms[way] - goal) for ms, goal in zip(clocks, goals, strict=True)] for way in COMPARED
        ]  # fmt: skip
        times.append([
            row["shape"], str(row["chunks"][0]), *(by_clocks((ms[way] for ms in clocks), ".2f") for way in BY_HAND)
        ])  # fmt: skip
        ratios.append([
            row["shape"], *(by_clocks(one, ".3f") for one in beside), by_clocks(goals, ".2f"),
            *(by_clocks(one, "+.0f") for one in over),
        ])  # fmt: skip
    heads = [f"{way} / {peer}" for way, peer in COMPARED.items()]
    return [
        said, table(["M x N x K", "chunks", *(f"{way}, ms" for way in BY_HAND)], times),
        table(["M x N x K", *heads, "the goal, ms", *(f"{way} - goal, us" for way in COMPARED)], ratios),
    ]  # fmt: skip


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


def stream_experts(data: Data) -> list[str]:
    """Experts of a mixture copied as they are multiplied, by how many have rows."""
    rows = data["rows"]

    def where(is_kept: Callable[[Row], bool]) -> str:
        """With how many active experts a goal is kept in all rows."""
        counts = dict.fromkeys(row["active"] for row in rows)
        kept = [str(one) for one in counts if all(is_kept(row) for row in rows if row["active"] == one)]
        said = ", ".join(kept[:-1]) + (" and " if kept[1:] else "") + "".join(kept[-1:])
        return f"with {said} active experts" if kept else "with no number of experts"

    floor = where(lambda row: row["of_larger"]["restarted"] <= EXPERTS_OF_LARGER)
    faster = where(lambda row: row["of_by_hand"]["restarted"] >= EXPERTS_OF_BY_HAND)
    by_hand = [row["of_larger"]["by hand"] for row in rows]
    goals = {"times": EXPERTS_OF_LARGER, "floor": floor, "gain": EXPERTS_OF_BY_HAND, "faster": faster}
    figures = {**goals, "low": min(by_hand), "high": max(by_hand)}
    ways = list(dict.fromkeys(way for row in rows for way in row["ms"]))
    heads = ["active experts", "rows", *(f"{way}, ms" for way in ways), "restarted / copy", "by hand / restarted",
             "by hand / streamed"]  # fmt: skip
    lines = []
    for row in rows:
        clocks = [row[clock] for clock in ("ms", "gpu_ms") if clock in row]
        lines.append([
            str(row["active"]), str(row["rows"]), *(by_clocks((ms.get(way) for ms in clocks), ".2f") for way in ways),
            by_clocks(ms["restarted"] / ms["copy"] for ms in clocks),
            *(by_clocks(_times_of_by_hand(ms, way) for ms in clocks) for way in ("restarted", "streamed")),
        ])  # fmt: skip
    return [NOTES.of(data, "stream_experts", **figures), *incomplete(data), table(heads, lines)]


def _times_of_by_hand(ms: dict[str, float], way: str) -> float:
    """By hand / ``way``; with the host ahead by hand knows the ends."""
    return ms.get("by hand", ms.get("by hand, ends known", math.nan)) / ms[way]


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
    "stream_experts": stream_experts, "order": order, "polling": polling,
}  # fmt: skip
OWN_RECORDS = ("stream", "stream_copies", "stream_experts", "host_to_device", "chunk_cost")


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
