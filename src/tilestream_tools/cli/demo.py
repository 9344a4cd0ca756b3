"""``tilestream demo``: the options of ``examples/demo.py``, which is installed with the package and runs here."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from tilestream_tools.cli import ui

_PACKAGE = Path(__file__).resolve().parents[1]
#: Where the example lies: in an installed package, and in a checkout.
_PLACES = (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples")


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
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Multiply a matrix while it is still on its way: from the disk, or from the host's memory to a GPU.

    Measures reading (or copying) alone, multiplying alone, both in turn, and both at once; checks the answer against
    float64; on a CPU, draws which worker did which tile when. The default input has 256 MiB; for a CPU it is a file,
    written once.
    """
    right = example("demo").demo(
        device, input, tensor, n, rows, k, repeats, rows_per_chunk, workers, schedule, out_dir, cache_dir, json_path
    )
    if not right:
        ui.fail("the streamed answer is wrong", ui.FAILED)


def example(name: str) -> ModuleType:
    """The module of an example that is installed with the package."""
    module = f"tilestream_tools.examples.{name}"
    if module not in sys.modules:
        path = next((place / f"{name}.py" for place in _PLACES if (place / f"{name}.py").is_file()), None)
        if path is None:
            raise ImportError(f"examples/{name}.py is not installed: install tilestream again, or run it in a checkout")
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules[module] = found
        spec.loader.exec_module(found)
    return sys.modules[module]
