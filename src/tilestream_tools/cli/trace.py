"""``tilestream trace``: a saved trace as a table, and as a picture."""

from pathlib import Path
from typing import Annotated

import typer

from tilestream_tools.cli import ui


def trace(
    file: Annotated[Path, typer.Argument(help="A trace that tilestream wrote: .json or .json.gz.")],
    png: Annotated[Path | None, typer.Option(help="Draw the timeline here (.png, .svg or .pdf).")] = None,
    launch: Annotated[int | None, typer.Option(min=0, help="Which launch to draw, from 0; default: the last.")] = None,
    width: Annotated[int, typer.Option(min=400, help="Pixels.")] = 1600,
    height: Annotated[int | None, typer.Option(min=250, help="Pixels; default: by the number of rows.")] = None,
) -> None:
    """Print what each worker did in a saved trace, and with --png draw the timeline."""
    from rich import box
    from rich.table import Table

    from tilestream_tools.trace.perfetto import load

    launches = load(file)
    if launch is not None and launch >= len(launches):
        raise ValueError(f"--launch {launch}: the trace has {len(launches)}, counted from 0")
    if not launches:
        raise ValueError(f"{file}: the trace holds no launch")
    console = ui.console()
    for index, one in enumerate(launches):
        total = max(one.end - one.begin, 0.0)
        console.print(f"launch {index}: {one.op}, {one.label}: {one.tiles_done} of {one.tiles} tiles", markup=False)
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("worker", "tiles", "parts", "busy ms", "waited ms", "busy"):
            table.add_column(name, justify="right")
        for worker, spans in enumerate(one.by_worker):
            busy = sum(span.end - span.begin for span in spans if span.kind != "wait")
            waited = sum(span.end - span.begin for span in spans if span.kind == "wait")
            counts = [sum(span.kind == kind for span in spans) for kind in ("tile", "part")]
            share = f"{busy / total:.0%}" if total else "-"
            times = (ui.milliseconds(busy), ui.milliseconds(waited))
            table.add_row(str(worker), *map(str, counts), *times, share)
        console.print(table)
    if png is not None:
        from tilestream_tools.trace.draw import default_size, draw

        chosen = launches[-1 if launch is None else launch]
        draw(chosen, png, size=(width, height or default_size(chosen)[1]))
        console.print(f"timeline: {png}", markup=False)
