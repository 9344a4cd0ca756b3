"""``tilestream demo``: the options of ``examples/demo.py``, which is installed with the package and runs here."""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tilestream_tools.cli import ui
from tilestream_tools.installed import example


def demo(
    device: Annotated[
        str,
        typer.Option(
            help="cpu: from the disk to the CPU. cuda: from pinned memory to the GPU. auto: cuda where there are a GPU "
            "and Triton, unless --input or --cache-dir names a file."
        ),
    ] = "auto",
    input: Annotated[
        Path | None,
        typer.Option(
            "--input",
            "-i",
            help="Your own .safetensors or .npy file. It is only read; for a GPU into pinned memory first.",
        ),
    ] = None,
    tensor: Annotated[
        str | None, typer.Option(help="The tensor in that file; needed if it holds several matrices.")
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(
            "--n", min=1, help="Columns of the weight; default: calibrated to the disk's speed; on a GPU 8192."
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="On a GPU: rows of the input; default: 16384.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="On a GPU: columns of the input; default: 8192.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds; medians are shown.")] = 5,
    rows_per_chunk: Annotated[
        int | None, typer.Option(min=1, help="Rows of a chunk; default: chunks of about 8 MiB.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of workers; default: one for each of torch's threads, or for each SM."),
    ] = None,
    schedule: Annotated[str, typer.Option(help="auto, static, dynamic or stream_k.")] = "auto",
    out_dir: Annotated[Path, typer.Option(help="On the CPU: the folder of timeline.png and trace.json.")] = Path(
        "demo-out"
    ),
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="On the CPU: the folder of the demonstration's file; default: ~/.cache/tilestream."),
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Write all figures to this file, as JSON.")] = None,
    as_json: ui.Json = False,
) -> None:
    """Multiply a matrix while it is still arriving.

    It comes from the disk, or from the host's memory to a GPU. The demonstration measures reading (or copying) alone,
    multiplying alone, both in turn, and both at once. It checks the answer against float64; on a CPU it also draws
    which worker did which tile when. The default input has 256 MiB; for a CPU it is a file, written once.
    """
    options = (device, input, tensor, n, rows, k, repeats, rows_per_chunk, workers, schedule, out_dir, cache_dir)
    with tempfile.TemporaryDirectory() as folder:
        file = figures or (Path(folder) / "figures.json" if as_json else None)
        right = example("demo").demo(*options, file)
        if as_json and file is not None:
            ui.found(**json.loads(file.read_text(encoding="utf-8")))
    if not right:
        ui.fail("the streamed answer is wrong", ui.FAILED)
