"""The page on inputs that arrive: copies beside a matmul, memory order, and what polling costs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.core.records import Data, records
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cell, columns, of, table

NOTES = Notes("arrival")
#: A pause in which no worker polls, as `benchmarks.arrival.signals` has it, which imports Triton.
ASLEEP = 1_000_000


def page(results: Path) -> list[str]:
    def found(section: str) -> list[Data]:
        some = records(results, section if section.startswith("stream") else "arrival")
        return [data for data in some if data["folder"] != "cpu"]

    return NOTES.page(SECTIONS, found)


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


SECTIONS = {"stream": stream, "stream_copies": stream_copies, "order": order, "polling": polling}
