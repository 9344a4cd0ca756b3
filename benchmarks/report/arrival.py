"""The page on inputs that arrive: copies beside a matmul, memory order, and what polling costs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.core.records import Data, records
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cell, cells, table, where

NOTES = Notes("arrival")
#: A pause in which no worker polls, as `benchmarks.arrival.signals` has it, which imports Triton.
ASLEEP = 1_000_000


def page(results: Path) -> list[str]:
    """The parts of the page."""
    parts = [NOTES("page")]
    for name, section in SECTIONS.items():
        found = records(results, name if name.startswith("stream") else "arrival")
        made = [part for data in found if data["folder"] != "cpu" for part in section(data)]
        parts += [NOTES(name), *made] if made else []
    return parts


def stream(data: Data) -> list[str]:
    """Copies by an engine while the input is multiplied."""
    ways = ("copy", "multiply", "torch.mm", "in turn", "by chunks", "streamed")
    rows = [
        [
            row["shape"], *cells(row["ms"], ways, ".2f"), f"{row['of_larger']:.3f}", f"{1 / row['of_in_turn']:.3f}",
            f"{row['ms']['by chunks'] / row['ms']['streamed']:.3f}",
        ]
        for row in data["rows"]
    ]  # fmt: skip
    over = ["streamed / the larger", "in turn / streamed", "by chunks / streamed"]
    links = [row["copy_gb_per_s"] for row in data["rows"]]
    return [
        NOTES("stream record", device=data["device"], dtype=data["dtype"], low=min(links), high=max(links),
              where=where(data)),
        table(["M x N x K", *(f"{name}, ms" for name in ways), *over], rows),
    ]  # fmt: skip


def stream_copies(data: Data) -> list[str]:
    """Copies by the kernel itself."""
    own = "by the kernel"
    counts = sorted({int(name.split()[3]) for row in data["rows"] for name in row["ms"] if name.startswith(f"{own},")})
    ways = {"copy": "copy", "multiply": "multiply", "engine": "streamed", "kernel": own}
    ways |= {f"{count} copiers": f"{own}, {count} copiers" for count in counts}
    rows = [
        [
            row["shape"], row["plan"].split()[0], row["copies"].split()[6],
            *cells(row["ms"], ways.values(), ".2f", ""), f"{row['of_larger']:.3f}",
            f"{row['of_larger_by_the_kernel']:.3f}",
        ]
        for row in data["rows"]
    ]  # fmt: skip
    head = ["M x N x K", "kernel", "its copiers", *(f"{name}, ms" for name in ways)]
    note = f" Its rows are {data['note']}." if "note" in data else ""
    return [
        NOTES("stream_copies record", device=data["device"], where=where(data), note=note),
        table([*head, "engine / the larger", "kernel / the larger"], rows),
    ]


def order(data: Data) -> list[str]:
    """What a signal announced, as TMA read it, with and without the fences of invariant 7."""
    rows = [
        [row["producer"], row["way"], f"{row['rounds']:,}", f"{row['wrong_rounds']:,}", f"{row['wrong_elements']:,}"]
        for row in data["rows"]
        if row["section"] == "order"
    ]
    if not rows:
        return []
    failed = [f"Not finished: {'; '.join(data['failures'])}."] if data["failures"] else []
    head = ["Producer", "Consumer", "rounds", "with a wrong element", "wrong elements"]
    return [NOTES("order record", device=data["device"], where=where(data)), table(head, rows), *failed]


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
    said = NOTES("polling record", device=data["device"], beside=beside, matmul=rows[0]["matmul"], where=where(data))
    return [said, table(head, lines)]


SECTIONS = {"stream": stream, "stream_copies": stream_copies, "order": order, "polling": polling}
