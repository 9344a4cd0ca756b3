"""``tilestream trace``: a saved trace as a table, as a picture, and as a page for a browser."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tilestream_tools.cli import ui
from tilestream_tools.units import milliseconds

PICTURES = (".png", ".svg", ".pdf")


def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace that tilestream wrote: .json or .json.gz.")],
    html: Annotated[Path | None, typer.Option(help="Write the timelines here as a page (.html) to zoom into.")] = None,
    show: Annotated[
        bool, typer.Option("--open", help="Open that page in the browser; without --html it is a temporary file.")
    ] = False,
    png: Annotated[Path | None, typer.Option(help="Draw the timeline here (.png, .svg or .pdf).")] = None,
    launch: Annotated[
        int | None, typer.Option(min=0, help="Number of one launch, from 0; default: all, with --png the last.")
    ] = None,
    width: Annotated[int, typer.Option(min=400, help="Width of the picture in pixels.")] = 1600,
    height: Annotated[int | None, typer.Option(min=250, help="Pixels; default: from the number of workers.")] = None,
    as_json: ui.Json = False,
) -> None:
    """Print or draw what each worker did in a saved trace.

    With --html or --open the timelines are a page to zoom into.
    """
    from rich import box
    from rich.table import Table

    from tilestream_tools.trace import page
    from tilestream_tools.trace.perfetto import load

    launches = load(file)
    if launch is not None and launch >= len(launches):
        raise ValueError(f"--launch {launch}: the trace has {len(launches)}, counted from 0")
    if not launches:
        raise ValueError(f"{file}: the trace holds no launch")
    if html is not None and html.suffix != ".html":
        raise ValueError(f"--html {html}: a page ends with .html")
    if png is not None and png.suffix not in PICTURES:
        raise ValueError(f"--png {png}: a picture ends with {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    console, told = ui.console(), page.table(launches)
    for index, (one, row) in enumerate(zip(launches, told, strict=True)):
        console.print(f"launch {index}: {one.op}, {one.label}: {one.tiles_done} of {one.tiles} tiles", markup=False)
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("worker", "tiles", "parts", "busy ms", "waited ms", "busy"):
            table.add_column(name, justify="right")
        for worker, did in enumerate(row["workers"]):
            share = f"{did['busy_seconds'] / row['seconds']:.0%}" if row["seconds"] else "-"
            times = (milliseconds(did["busy_seconds"]), milliseconds(did["waited_seconds"]))
            table.add_row(str(worker), str(did["tiles"]), str(did["parts"]), *times, share)
        console.print(table)
    ui.found(launches=told)
    if html is not None or show:
        chosen = launches if launch is None else [launches[launch]]
        if html is None:
            html = Path(tempfile.mkdtemp(prefix="tilestream-")) / f"{file.name.partition('.')[0]}.html"
        page.write(chosen, html, title=f"Timelines of {file.name}")
        console.print(f"page: {html}", markup=False)
        ui.found(page=str(html))
        if show:
            ui.open_page(html)
    if png is not None:
        from tilestream_tools.trace.draw import default_size, draw

        one = launches[-1 if launch is None else launch]
        draw(one, png, size=(width, height or default_size(one)[1]))
        console.print(f"timeline: {png}", markup=False)
