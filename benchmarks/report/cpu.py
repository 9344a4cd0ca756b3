"""The page on the CPU backend, and on what a process's first call does without a GPU."""

from __future__ import annotations

from pathlib import Path

from benchmarks.core.records import Data, records
from benchmarks.report.notes import Notes
from benchmarks.report.tables import columns, of, table, versions, where

NOTES = Notes("cpu")


def page(results: Path) -> list[str]:
    parts = [NOTES("page")]
    for name, section in SECTIONS.items():
        parts += [part for data in records(results, name) if data["folder"] == "cpu" for part in section(data)]
    return parts


def matmul(data: Data) -> list[str]:
    rows = [row | {"shape": "x".join(map(str, row["shape"]))} for row in data["rows"]]
    ratios = of("ratio", rows[0]["ratio"], suffix=", ratio")
    fields = {"M x N x K": "{shape}", "torch.mm, ms": "{ms[torch.mm]:.2f}", **ratios}
    return [NOTES("matmul", where=where(data)), columns(rows, fields)]


def stream(data: Data) -> list[str]:
    ways = of("ms", ("read", "multiply", "in turn", "streamed"), ".0f", ", ms")
    m, _, k = data["rows"][0]["shape"]
    said = NOTES("stream", m=m, k=k, size=data["bytes"] / 2**20, where=where(data))
    fields = {
        "N": "{shape[1]}", **ways, "in turn / streamed": "{speedup:.2f}", "hidden": "{hidden:.0%}",
        "of the bound": "{of_bound:.3f}",
    }  # fmt: skip
    return [said, columns(data["rows"], fields), NOTES("stream plot")]


def first_call(data: Data) -> list[str]:
    before = data["before"]["seconds"]
    rows = [[row["step"], row["whose"], f"{before[row['step']]:.2f}", f"{row['seconds']:.2f}"] for row in data["rows"]]
    total = f"{sum(before.values()):.2f}", f"{sum(row['seconds'] for row in data['rows']):.2f}"
    call = data["rows"][-1]
    said = NOTES("first_call", **data, versions=versions(data), then=before[call["step"]], now=call["seconds"])
    return [said, table(["step", "whose", "before, s", "now, s"], [*rows, ["all", "", *total]])]


def planning(data: Data) -> list[str]:
    before = data["before"]["ms"]
    rows = [row | {"before": before[row["what"]]} for row in data["rows"]]
    fields = {"op": "{what}", "shapes": "{shapes}"}
    fields |= {f"{name}, ms": f"{{ms[{name}]:.2f}}" for name in ("25 %", "median", "75 %", "95 %")}
    fields |= {f"before, {name}, ms": f"{{before[{name}]:.2f}}" for name in ("median", "95 %")}
    said = NOTES("planning", **data | {"gpu": data["gpu"].upper()}, versions=versions(data))
    return [said, columns(rows, fields)]


def calls(data: Data) -> list[str]:
    return [NOTES("calls", where=where(data)), _beside_torch(data, ".2f", {"tilestream": "ratio"})]


def attention(data: Data) -> list[str]:
    ratios = {"tilestream": "ratio", "use_attention": "by use_attention(cpu=True), ratio"}
    return [NOTES("attention", where=where(data)), _beside_torch(data, ".0f", ratios)]


def _beside_torch(data: Data, form: str, ratios: dict[str, str]) -> str:
    """A line a call and number of threads."""
    rows = [
        row | {"call": f"{row['name']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"} for row in data["rows"]
    ]
    shown = {said: f"{{ratios[{way}]:.2f}}" for way, said in ratios.items()}
    return columns(rows, {"call": "{call}", **of("us", ("torch", "tilestream"), form, ", us"), **shown})


SECTIONS = {
    "matmul": matmul, "calls": calls, "calls_attention": attention, "stream": stream, "planning": planning,
    "first_call": first_call,
}  # fmt: skip
