"""``tilestream verify``: explore every interleaving of the protocols."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tilestream_tools.cli import ui

#: Reports progress: what was just done, how many are done, and how many there are.
Tell = Callable[[str, int, int], None]
PLAIN_SECONDS = 10.0  # between two lines where there is no terminal


def verify(
    quick: Annotated[
        bool, typer.Option("--quick", help="Check a subset, in three to four minutes of CPU time.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: one a core.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this model: workers, ring, product, shared, attention, gather, publish, sums, copies, reduce, "
            "replay, dispatch, experts, sources, cluster or pair; may be repeated."
        ),
    ] = None,
    as_json: ui.Json = False,
) -> None:
    """Check the protocols in every interleaving.

    Schedules, gates, rings and the ranks of a gather are explored in growing sizes. This takes minutes, with --quick
    less. A violation is printed with the shortest path to it, and the status is 1. Ctrl-C ends the command and its
    processes, with status 130.
    """
    console = ui.console()
    if not _sweep(console, quick, jobs or _cores(), model):
        ui.fail("a property does not hold", ui.FAILED)


def _sweep(console: Console, quick: bool, jobs: int, models: list[str] | None) -> bool:
    from tilestream_tools import verify as checker

    level: checker.Level = "quick" if quick else "full"
    with _bar(console) as tell:
        report = checker.run(
            level,
            lambda result, done, total: tell(f"{result.model}: {result.states:,} states", done, total),
            models=models or checker.MODELS,
            jobs=jobs,
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "configurations", "states", "CPU s", "every property holds", "largest"):
        number = name in ("configurations", "states", "CPU s")
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for name in dict.fromkeys(result.model for result in report.results):
        own = [result for result in report.results if result.model == name]
        largest = max(own, key=lambda result: result.states)
        states, seconds = sum(result.states for result in own), sum(result.seconds for result in own)
        holds = all(result.violation is None for result in own)
        table.add_row(
            name, str(len(own)), f"{states:,}", f"{seconds:.1f}",
            "[green]yes[/green]" if holds else "[bold red]NO[/bold red]",
            f"{largest.states:,} states: {largest.configuration}",
        )  # fmt: skip
    console.print(table)
    ui.found(
        level=level, holds=report.ok, states=report.states, seconds=report.seconds,
        configurations=[
            {"model": one.model, "configuration": one.configuration, "states": one.states, "seconds": one.seconds,
             "violation": None if one.violation is None else str(one.violation)} for one in report.results
        ],
    )  # fmt: skip
    for violation in report.violations:
        console.print(str(violation), markup=False, soft_wrap=True)
        console.print()
    verdict = "[green]every property holds[/green]" if report.ok else f"[red]{len(report.violations)} violated[/red]"
    console.print(f"{level}: {report.states:,} states in {report.seconds:.1f} s: {verdict}")
    return report.ok


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Tell]:
    if not console.is_terminal:
        yield _lines(console)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


def _lines(console: Console) -> Tell:
    shown = [time.perf_counter()]

    def tell(what: str, done: int, total: int) -> None:
        if time.perf_counter() - shown[0] >= PLAIN_SECONDS:
            shown[0] = time.perf_counter()
            console.print(f"- {done} of {total}: {what}", markup=False)

    return tell


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
