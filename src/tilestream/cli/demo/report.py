"""What the demonstration found, for people and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from tilestream.cli import ui
from tilestream.cli.demo.machine import load_average, versions
from tilestream.cli.demo.measure import WAYS, Result, Timings

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from tilestream.cli.demo.check import Verdict

_NAMES = {
    "read": "read alone",
    "multiply": "multiply alone",
    "torch": "torch.mm alone, for comparison",
    "sequential": "one after the other",
    "streamed": "streamed",
}
_BUSY = 0.6  # processes a core that other programs keep running, from which on times are to be doubted


def show(console: Console, result: Result, written: str, files: dict[str, Path | str]) -> None:
    """Print the report.

    Parameters
    ----------
    written
        Where the file comes from.
    files
        What was written: a name for people, and the path, or why there is none.
    """
    source, timings, plan = result.source, result.timings, result.plan
    matrix = source.matrix

    def line(name: str, text: str) -> None:
        console.print(f"[bold]{name:<10}[/bold]", end="")
        console.print(text, markup=False, soft_wrap=True)

    console.print()
    line("file", f"{source.path} ({ui.size(matrix.nbytes)}, {written})")
    line("read", result.how)
    line("", source.how)
    chosen = "chosen so that reading and multiplying take about as long" if result.calibrated else "as asked for"
    shapes = f"[{source.rows}, {source.columns}] @ [{source.columns}, {result.n}], {matrix.dtype}"
    line("multiply", f"{shapes}; {result.n} columns: {chosen}")
    console.print(_table(result))
    console.print(_overlap(timings))
    ratio = timings.median("streamed") / timings.larger
    console.print(
        f"streamed takes {ratio:.2f} times the larger of reading and multiplying, which no overlap can go below"
    )
    busy = load_average()
    if busy is not None and busy > plan.workers * (1 + _BUSY):
        console.print(
            f"[yellow]times are noisy:[/yellow] the load average is {busy:.1f} on {plan.device.workers} cores"
        )
    console.print()
    _verdict(console, result.verdict)
    console.print()
    console.print(plan.explain(), markup=False, soft_wrap=True)
    console.print()
    for name, path in files.items():
        line(name, str(path))


def _table(result: Result) -> Table:
    timings, floor = result.timings, result.plan.floor
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("median ms", "least", "most", "rate"):
        table.add_column(name, justify="right")
    for way in WAYS:
        median = timings.median(way)
        if way == "read":
            rate = f"{result.source.matrix.nbytes / median / 1e9:.2f} GB/s"
        elif way in ("multiply", "torch"):
            rate = f"{floor.operations / median / 1e9:.0f} GFLOP/s"
        else:
            rate = ""
        samples = timings.samples[way]
        style = "bold" if way == "streamed" else ""
        times = (ui.milliseconds(median), ui.milliseconds(min(samples)), ui.milliseconds(max(samples)))
        table.add_row(_NAMES[way], *times, rate, style=style)
    return table


def _overlap(timings: Timings) -> str:
    won = ui.milliseconds(abs(timings.won))
    if timings.won <= 0:
        return f"[bold yellow]no overlap won[/bold yellow]: streamed took {won} ms longer than one after the other"
    hideable = ui.milliseconds(timings.hideable)
    share = timings.won / timings.hideable
    return f"[bold green]overlap won {won} ms[/bold green]: {share:.0%} of the {hideable} ms that could be hidden"


def _verdict(console: Console, verdict: Verdict) -> None:
    word = "[bold green]answer right[/bold green]" if verdict.right else "[bold red]ANSWER WRONG[/bold red]"
    sampled = f"{verdict.tiles} sampled tiles ({verdict.elements} elements)"
    console.print(f"{word}, in every streamed run, by the error rule against float64 on {sampled}:")
    for name, ours, theirs, allowed in (
        ("maximum", verdict.maximum, verdict.maximum_torch, verdict.maximum_allowed),
        ("Frobenius", verdict.frobenius, verdict.frobenius_torch, verdict.frobenius_allowed),
    ):
        console.print(f"  {name + ' error':<17}{ours:.3g} (torch.mm {theirs:.3g}, allowed {allowed:.3g})")
    console.print(f"  left NaN         {verdict.missing} of all elements")


def figures(result: Result) -> dict[str, Any]:
    """Everything that was measured, and on what, for `json`."""
    source, timings, verdict, plan = result.source, result.timings, result.verdict, result.plan
    return {
        "device": plan.device.name,
        "workers": plan.workers,
        "load_average": load_average(),
        "versions": versions(),
        "file": {
            "path": str(source.path),
            "tensor": source.matrix.name,
            "shape": list(source.matrix.shape),
            "dtype": source.matrix.dtype,
            "bytes": source.matrix.nbytes,
            "how": result.how,
            "cold": source.cold,
            "coldness": source.how,
        },
        "problem": {
            "m": source.rows,
            "n": result.n,
            "k": source.columns,
            "n_calibrated": result.calibrated,
            "chunks": result.chunks,
            "rows_per_chunk": result.rows_per_chunk,
        },
        "plan": {
            "label": plan.label,
            "predicted_ms": 1e3 * plan.predicted,
            "floor_ms": 1e3 * plan.floor.seconds,
            "explain": plan.explain().splitlines(),
        },
        "median_ms": {way: 1e3 * timings.median(way) for way in WAYS},
        "samples_ms": {way: [1e3 * seconds for seconds in timings.samples[way]] for way in WAYS},
        "read_cpu_ms": 1e3 * result.read_cpu,
        "overlap_won_ms": 1e3 * timings.won,
        "overlap_won_share": timings.won / timings.hideable,
        "streamed_over_larger": timings.median("streamed") / timings.larger,
        "answer": {
            "right": verdict.right,
            "tiles": verdict.tiles,
            "elements": verdict.elements,
            "missing": verdict.missing,
            "maximum": [verdict.maximum, verdict.maximum_torch, verdict.maximum_allowed],
            "frobenius": [verdict.frobenius, verdict.frobenius_torch, verdict.frobenius_allowed],
            "each": ["ours", "torch.mm", "allowed"],
        },
    }
