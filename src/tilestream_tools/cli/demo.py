"""``tilestream demo``: the options of ``examples/demo.py``, which is installed with the package and runs here."""

import contextlib
import sys
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
            help="cpu: from the disk to the CPU. cuda: from pinned memory to the GPU. auto: cuda where there is a GPU "
            "(and Triton), and neither --input nor --cache-dir names a file."
        ),
    ] = "auto",
    input: Annotated[
        Path | None,
        typer.Option(
            "--input",
            "-i",
            help="Your own .safetensors or .npy file, which is only read; for a GPU into pinned memory first.",
        ),
    ] = None,
    tensor: Annotated[str | None, typer.Option(help="The tensor in it, where there are several matrices.")] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", min=1, help="Columns of the weight; default: calibrated to the disk's speed, GPU: 8192."),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="GPU: rows of the input; default: 16384.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="GPU: columns of the input; default: 8192.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds; medians are shown.")] = 5,
    rows_per_chunk: Annotated[int | None, typer.Option(min=1, help="Rows of a chunk; default: about 8 MiB.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers; default: one for each of torch's threads, or each SM.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="auto, static, dynamic or stream_k.")] = "auto",
    out_dir: Annotated[Path, typer.Option(help="CPU: where timeline.png and trace.json go.")] = Path("demo-out"),
    cache_dir: Annotated[
        Path | None, typer.Option(help="CPU: where the demonstration's own file is kept; default: ~/.cache/tilestream.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all figures here; -: to standard output, all else to stderr.")
    ] = None,
) -> None:
    """Multiply a matrix while it is still on its way: from the disk, or from the host's memory to a GPU.

    Measures reading (or copying) alone, multiplying alone, both in turn, and both at once; checks the answer against
    float64; on a CPU, draws which worker did which tile when. The default input has 256 MiB; for a CPU it is a file,
    written once.
    """
    options = (device, input, tensor, n, rows, k, repeats, rows_per_chunk, workers, schedule, out_dir, cache_dir)
    if json_path != Path("-"):
        right = example("demo").demo(*options, json_path)
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figures.json"
            with contextlib.redirect_stdout(sys.stderr):
                right = example("demo").demo(*options, file)
            typer.echo(file.read_text(encoding="utf-8"), nl=False)
    if not right:
        ui.fail("the streamed answer is wrong", ui.FAILED)
