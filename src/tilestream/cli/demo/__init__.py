"""``tilestream demo``: a matmul on an input that is still on its way, measured, checked, drawn.

`source` has the file, `bench` the ways to run, `file_bench` and `gpu_bench` what differs by device, `measure` the
rounds, `check` the error rule, `report` the words; here are the options and what moves on the screen.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tilestream.cli import ui
from tilestream.cli.demo.settings import Settings, is_gpu

if TYPE_CHECKING:
    from tilestream.cli.demo.bench import Bench

Tell = Callable[[str], None]
Watcher = Callable[[int, int, int, int], None]


def demo(
    device: Annotated[
        str,
        typer.Option(
            help="cpu: from the disk to the CPU. cuda: from pinned memory to the GPU. auto: cuda where there is a GPU "
            "(and Triton), and no file is asked for by --input or --cache-dir."
        ),
    ] = "auto",
    input: Annotated[
        Path | None,
        typer.Option(
            "--input",
            "-i",
            help="Your own .safetensors or .npy file; it is only read. With --device cuda: into pinned memory first.",
        ),
    ] = None,
    tensor: Annotated[str | None, typer.Option(help="The tensor in it, where there are several matrices.")] = None,
    n: Annotated[
        int | None,
        typer.Option(
            "--n", min=1, help="Columns of the weight; default: calibrated to the disk's speed, on a GPU 8192."
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="GPU: rows of the input; default: 16384.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="GPU: columns of the input; default: 8192.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds; medians are shown.")] = 5,
    rows_per_chunk: Annotated[int | None, typer.Option(min=1, help="Rows of a chunk; default: about 8 MiB.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers; default: one for each of torch's threads, or each SM.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="auto, static, dynamic or stream_k.")] = "auto",
    out_dir: Annotated[Path, typer.Option(help="Where timeline.png and trace.json go (CPU).")] = Path("demo-out"),
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Where the demonstration's own file is kept (CPU); default: ~/.cache/tilestream."),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Multiply a matrix while it is still on its way: from the disk, or from the host's memory to a GPU.

    Measures reading (or copying) alone, multiplying alone, one after the other, and both at once; checks the answer
    against float64; on a CPU, draws who did which tile when. The default input has 256 MiB; for a CPU it is a file of
    its own, written once.
    """
    if input is None and tensor is not None:
        raise ValueError(f"--tensor {tensor}: give the file that holds it with --input")
    on_gpu = is_gpu(device, file=input is not None or cache_dir is not None)
    for option, value in (("--rows", rows), ("--k", k)):
        if value is not None and (not on_gpu or input is not None):
            raise ValueError(f"{option} {value}: the input is a file's; --device cuda without --input makes one")
    if on_gpu and cache_dir is not None:
        raise ValueError(
            f"--cache-dir {cache_dir}: on a GPU the demonstration has no file of its own; on the CPU it has"
        )
    # What cannot be written shall be known before minutes were spent.
    if not on_gpu:
        out_dir.mkdir(parents=True, exist_ok=True)
    if json_path is not None and not json_path.parent.is_dir():
        raise ValueError(f"--json {json_path}: there is no folder {json_path.parent}")
    console = ui.console()
    with _screen(console) as (tell, watcher):
        settings = Settings(n, repeats, workers, schedule, rows_per_chunk)
        if on_gpu:
            bench = _gpu_bench(input, tensor, rows, k, settings, tell)
        else:
            bench = _file_bench(input, tensor, cache_dir, settings, tell)
        from tilestream.cli.demo import measure, report  # they import torch: bad input is refused without it

        result = measure.run(bench, tell, watcher)
        if result.trace is not None:
            tell("drawing")
            files = _write_trace(result.trace, out_dir)
        else:
            files = {"timeline": "none: the demo draws one on the CPU only (--device cpu)"}
    report.show(console, result, files)
    if json_path is not None:
        json_path.write_text(json.dumps(report.figures(result), indent=1) + "\n", encoding="utf-8")
    if not result.verdict.right:
        ui.fail("the streamed answer is wrong", ui.FAILED)


def _file_bench(
    input: Path | None, tensor: str | None, cache_dir: Path | None, settings: Settings, tell: Tell
) -> "Bench":
    from tilestream.cli.demo import source as sources

    if input is None:
        path, written = sources.demo_file(cache_dir or sources.default_folder(), tell)
        tensor = sources.TENSOR
    else:
        path, written = input, "yours"
    source = sources.open_source(path, tensor)

    from tilestream.cli.demo.file_bench import FileBench

    return FileBench(source, settings, written)


def _gpu_bench(
    input: Path | None, tensor: str | None, rows: int | None, k: int | None, settings: Settings, tell: Tell
) -> "Bench":
    from tilestream.cli.demo import gpu_bench
    from tilestream.cli.demo import source as sources

    if input is None:
        return gpu_bench.made(rows, k, settings, tell)
    return gpu_bench.from_file(sources.open_source(input, tensor), settings, tell)


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
