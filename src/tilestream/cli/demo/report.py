"""What the demonstration found, for people and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from tilestream.cli import ui
from tilestream.cli.demo.machine import load_average, versions
from tilestream.core.device import cpu_properties

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from tilestream.cli.demo.check import Verdict
    from tilestream.cli.demo.measure import Result, Timings

_NAMES = {
    "read": "read alone",
    "copy": "copy alone",
    "multiply": "multiply alone",
    "torch": "torch.mm alone, for comparison",
    "sequential": "one after the other",
    "streamed": "streamed",
}
_DOING = {"read": "reading", "copy": "copying"}
_N_IS = {
    "given": "as asked for",
    "default": "the default",
    "calibrated": "chosen so that reading and multiplying take about as long",
}
_BUSY = 0.6  # processes a core that other programs keep running, from which on times are to be doubted


def show(console: Console, result: Result, files: dict[str, Path | str]) -> None:
    """Print the report.

    Parameters
    ----------
    files
        What was written: a name for people, and the path, or why there is none.
    """
    timings, plan, problem = result.timings, result.plan, result.plan.problem

    def line(name: str, text: str) -> None:
        console.print(f"[bold]{name:<10}[/bold]", end="")
        console.print(text, markup=False, soft_wrap=True)

    console.print()
    for name, text in result.about:
        line(name, text)
    shapes = f"[{problem.m}, {problem.k}] @ [{problem.k}, {problem.n}], {problem.dtype}"
    line("multiply", f"{shapes}; {problem.n} columns: {_N_IS[result.n_is]}")
    console.print(_table(result))
    console.print(_overlap(timings))
    console.print(
        f"streamed takes {timings.over_larger:.2f} times the larger of {_DOING[timings.bring]} and multiplying, which "
        "no overlap can go below"
    )
    _noise(console, plan.workers)
    console.print()
    _verdict(console, result.verdict)
    console.print()
    console.print(plan.explain(), markup=False, soft_wrap=True)
    console.print()
    for name, path in files.items():
        line(name, str(path))


def _noise(console: Console, workers: int) -> None:
    busy, cores = load_average(), cpu_properties().workers
    if busy is not None and busy > min(workers, cores) * (1 + _BUSY):
        console.print(f"[yellow]times are noisy:[/yellow] the load average is {busy:.1f} on {cores} cores")


def _rates(result: Result) -> dict[str, float]:
    """Bytes a second of the input's way, operations a second of those that only multiply."""
    timings, operations = result.timings, result.plan.floor.operations
    rates = {timings.bring: result.nbytes / timings.median(timings.bring)}
    return rates | {way: operations / timings.median(way) for way in ("multiply", "torch")}


def _table(result: Result) -> Table:
    timings = result.timings
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("median ms", "least", "most", "rate"):
        table.add_column(name, justify="right")
    rates = _rates(result)
    words = {way: _operations(rate) for way, rate in rates.items()}
    words[timings.bring] = f"{rates[timings.bring] / 1e9:.2f} GB/s"
    for way, samples in timings.samples.items():
        style = "bold" if way == "streamed" else ""
        times = (ui.milliseconds(x) for x in (timings.median(way), min(samples), max(samples)))
        table.add_row(_NAMES[way], *times, words.get(way, ""), style=style)
    return table


def _operations(rate: float) -> str:
    return f"{rate / 1e12:.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:.0f} GFLOP/s"


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
    timings, verdict, plan, problem = result.timings, result.verdict, result.plan, result.plan.problem
    bring, rates = timings.bring, _rates(result)
    return {
        "device": plan.device.name,
        "backend": plan.backend,
        "workers": plan.workers,
        "load_average": load_average(),
        "versions": versions(gpu=plan.backend != "cpu"),
        **result.facts,
        "problem": {
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "dtype": problem.dtype,
            "n_calibrated": result.n_is == "calibrated",
            **_chunks(result),
        },
        "plan": {
            "label": plan.label,
            "predicted_ms": 1e3 * plan.predicted,
            "floor_ms": 1e3 * plan.floor.seconds,
            "explain": plan.explain().splitlines(),
        },
        "median_ms": {way: 1e3 * timings.median(way) for way in timings.samples},
        "samples_ms": {way: [1e3 * seconds for seconds in samples] for way, samples in timings.samples.items()},
        f"{bring}_cpu_ms": 1e3 * result.bring_cpu,
        "gb_per_s": {bring: rates[bring] / 1e9},
        "tflop_per_s": {way: rate / 1e12 for way, rate in rates.items() if way != bring},
        "overlap_won_ms": 1e3 * timings.won,
        "overlap_won_share": timings.won / timings.hideable,
        "streamed_over_larger": timings.over_larger,
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


def _chunks(result: Result) -> dict[str, int]:
    rows = result.plan.problem.rows
    assert rows is not None  # it is the streamed matmul's plan
    return {"chunks": rows.chunks.count, "rows_per_chunk": rows.chunks.rows_per_chunk}
