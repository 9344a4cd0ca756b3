"""``tilestream demo``: a matmul on a file that is still being read, measured, checked, drawn.

`source` has the file, `measure` the runs, `check` the error rule, `report` the words; here are the options and what
moves on the screen.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tilestream.cli import ui

Tell = Callable[[str], None]
Watcher = Callable[[int, int, int, int], None]


def demo(
    input: Annotated[
        Path | None, typer.Option("--input", "-i", help="Your own .safetensors or .npy file; it is only read.")
    ] = None,
    tensor: Annotated[str | None, typer.Option(help="The tensor in it, where there are several matrices.")] = None,
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="Columns of the weight; default: calibrated to the disk's speed.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds; medians are shown.")] = 5,
    rows_per_chunk: Annotated[int | None, typer.Option(min=1, help="Rows of a chunk; default: about 8 MiB.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers; default: as many as torch has threads.")] = None,
    schedule: Annotated[str, typer.Option(help="auto, static, dynamic or stream_k.")] = "auto",
    out_dir: Annotated[Path, typer.Option(help="Where timeline.png and trace.json go.")] = Path("demo-out"),
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where the demonstration's own file is kept; default: ~/.cache/tilestream.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Multiply a matrix while it is still being read from disk.

    Measures reading, multiplying, one after the other, and both at once; checks the answer against float64; draws who
    did which tile when. Default: a file of 256 MiB of its own, written once.
    """
    from tilestream.cli.demo import source as sources

    console = ui.console()
    # What cannot be written shall be known before minutes were spent.
    out_dir.mkdir(parents=True, exist_ok=True)
    if json_path is not None and not json_path.parent.is_dir():
        raise ValueError(f"--json {json_path}: there is no folder {json_path.parent}")
    with _screen(console) as (tell, watcher):
        if input is None:
            if tensor is not None:
                raise ValueError(f"--tensor {tensor}: give the file that holds it with --input")
            path, written = sources.demo_file(cache_dir or sources.default_folder(), tell)
            tensor = sources.TENSOR
        else:
            path, written = input, "yours"
        source = sources.open_source(path, tensor)

        from tilestream.cli.demo import measure, report  # they import torch: bad input is refused without it

        settings = measure.Settings(n, repeats, workers, schedule, rows_per_chunk)
        result = measure.run(source, settings, tell, watcher)
        tell("drawing")
        files = _write_trace(result.trace, out_dir)
    report.show(console, result, written, files)
    if json_path is not None:
        json_path.write_text(json.dumps(report.figures(result), indent=1) + "\n", encoding="utf-8")
    if not result.verdict.right:
        ui.fail("the streamed answer is wrong", ui.FAILED)


def _write_trace(launch: Any, folder: Path) -> dict[str, Path | str]:
    from tilestream.trace import draw, export

    files: dict[str, Path | str] = {}
    try:
        files["timeline"] = draw(launch, folder / "timeline.png")
    except ImportError as error:
        files["timeline"] = f"none: {ui.one_line(error)}"
    path = export(launch, folder / "trace.json")
    files["trace"] = f"{path}, the median streamed run: open it at https://ui.perfetto.dev"
    return files


@contextlib.contextmanager
def _screen(console: Console) -> Iterator[tuple[Tell, Watcher]]:
    """What shows how far it is: a moving line and two bars in a terminal, a line a step elsewhere."""
    if not console.is_terminal:
        yield _plain(console)
        return
    from rich.console import Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.text import Text

    bars = Progress(TextColumn("{task.description:<15}"), BarColumn(), MofNCompleteColumn())
    chunks, tiles = bars.add_task("chunks arrived", total=None), bars.add_task("tiles done", total=None)
    # Drawn only when told to: a thread that redraws would take time from what is measured.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        shown = [Text("starting", style="bold")]

        def tell(what: str) -> None:
            shown[0] = Text(what, style="bold")
            live.update(shown[0], refresh=True)

        def watch(arrived: int, all_chunks: int, done: int, all_tiles: int) -> None:
            bars.update(chunks, completed=arrived, total=all_chunks)
            bars.update(tiles, completed=done, total=all_tiles or None)
            live.update(Group(shown[0], bars), refresh=True)

        yield tell, watch


def _plain(console: Console) -> tuple[Tell, Watcher]:
    shown = [float("-inf")]

    def tell(what: str) -> None:
        console.print(f"- {what}", markup=False)

    def watch(arrived: int, all_chunks: int, done: int, all_tiles: int) -> None:
        # A line every few seconds, and the last one.
        now = time.monotonic()
        if now - shown[0] >= 5 or (arrived == all_chunks and done == all_tiles):
            shown[0] = now
            console.print(f"  {arrived} of {all_chunks} chunks arrived, {done} of {all_tiles} tiles done", markup=False)

    return tell, watch
