"""``tilestream report``: this machine, measured, as a page for a browser."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from tilestream_tools.cli import ui
from tilestream_tools.report.command import OPTIONS, make


def report(
    gemm: Annotated[list[str] | None, typer.Option(help=OPTIONS["gemm"])] = None,
    attention: Annotated[list[str] | None, typer.Option(help=OPTIONS["attention"])] = None,
    shapes: Annotated[Path | None, typer.Option(help=OPTIONS["shapes"])] = None,
    device: Annotated[str, typer.Option(help=OPTIONS["device"])] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help=OPTIONS["quick"])] = False,
    seconds: Annotated[float | None, typer.Option(help=OPTIONS["seconds"])] = None,
    out: Annotated[Path, typer.Option(help=OPTIONS["out"])] = Path("report.html"),
    source: Annotated[Path | None, typer.Option("--from", help=OPTIONS["source"])] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: ui.Json = False,
) -> None:
    """Measure this machine, and write one HTML page.

    It has doctor's findings; each call beside torch's, with its answer checked; the roofline; the overlap that
    streaming wins; a timeline to zoom into; which kernels are warm; plans, and what they refuse. Without calls a
    default set is measured. A JSON file with the same figures lies beside the page.
    """
    with _bar() as tell:
        data, page, beside = make(
            gemm=gemm or (), attention=attention or (), shapes=shapes, device=device, quick=quick, seconds=seconds,
            out=out, source=source, tell=tell,
        )  # fmt: skip
    ui.found(**data)
    typer.echo(f"report: {page}, {beside}")
    if show:
        ui.open_page(page)


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[float, str], object]]:
    """Progress on stderr: a bar on a terminal, else a line a step."""
    console = ui.console(stderr=True)
    if not console.is_terminal:
        yield lambda share, what: console.print(f"{share:4.0%}  {what}", markup=False)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        yield lambda share, what: progress.update(task, description=what, completed=share)
