"""``tilestream sweep``: throughput while another program holds a part of the device."""

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tilestream.core.dtypes import SHORT
from tilestream_tools.cli import ui
from tilestream_tools.units import one_line

_BY = (
    "neighbour: a kernel holds SMs; green: green contexts; cu_mask: AMD's CU masks, as many units of each die; "
    "nccl: beside a real collective; busy: cores (cpu)."
)


def sweep(
    plot: Annotated[
        list[Path] | None, typer.Argument(metavar="RECORD", help="With --plot: the records to draw into one picture.")
    ] = None,
    only_plot: Annotated[bool, typer.Option("--plot", help="Only draw the named records.")] = False,
    suite: Annotated[
        str | None, typer.Option(help="A suite of the package, or your own .yaml file; default: 8k, on the CPU cpu.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="MxNxK, instead of a suite; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of --shape: bfloat16, float16 or float32.")] = "bfloat16",
    ways: Annotated[
        str,
        typer.Option(
            help="Any of auto, static, dynamic, stream_k, told (it knows the free SMs), torch, quack, quack-dynamic; "
            "with commas."
        ),
    ] = "static,dynamic,stream_k,torch,quack,quack-dynamic",
    queues: Annotated[str, typer.Option(help="How many queues dynamic has: numbers, with commas.")] = "1",
    by: Annotated[str | None, typer.Option(help=_BY)] = None,
    taken: Annotated[str, typer.Option(help="SMs (or cores) that are taken away: 4,8,16 or FIRST:LAST:STEP.")] = "",
    rounds: Annotated[
        int | None, typer.Option(min=3, help="Samples of each; default: as many as fit the time.")
    ] = None,
    backend: Annotated[str, typer.Option(help="gpu or cpu.")] = "gpu",
    collective: Annotated[str, typer.Option(help="With nccl: all_reduce or all_gather.")] = "all_reduce",
    megabytes: Annotated[int, typer.Option(min=1, help="With nccl: size of its tensor in MiB.")] = 256,
    head_start: Annotated[
        float, typer.Option(min=0, help="With nccl: microseconds that the collective is ahead of the matmul.")
    ] = 20.0,
    out: Annotated[Path, typer.Option(help="The record (.json); CSV and PNG lie beside it.")] = Path("sweep.json"),
    as_json: ui.Json = False,
) -> None:
    """Measure schedules while a neighbour holds SMs or cores.

    Peers such as torch are measured beside them. Every answer is checked, and a figure above the peak of the SMs that
    are left is an error. Writes JSON, CSV and, where matplotlib is installed, a picture.
    """
    from tilestream_tools.sweep import record

    out = out.with_suffix(".json")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if only_plot:
        if not plot:
            raise ValueError("--plot: name the records to draw")
        _draw([(path.stem, record.read(path)) for path in plot], out.with_suffix(".png"))
        ui.found(picture=str(out.with_suffix(".png")))
        return
    if plot:
        raise ValueError(f"{plot[0]}: records are named for --plot")
    from tilestream_tools.sweep import run
    from tilestream_tools.sweep import suite as suites

    if backend not in ("gpu", "cpu"):
        raise ValueError(f"--backend {backend}: it is gpu or cpu")
    by = by or ("neighbour" if backend == "gpu" else "busy")
    known = ("neighbour", "green", "cu_mask", "nccl") if backend == "gpu" else ("busy",)
    if by not in known:
        raise ValueError(f"--by {by}: with --backend {backend} it is one of {', '.join(known)}")
    dtype = SHORT.get(dtype, dtype)
    if dtype not in suites.DTYPES:
        raise ValueError(f"--dtype {dtype}: it must be one of {', '.join(suites.DTYPES)}")
    if shape:
        given = suites.Suite("shapes", dtype, tuple(map(suites.Shape.parse, shape)))
    else:
        given = suites.load(suite or {"gpu": "8k", "cpu": "cpu"}[backend])
    named = ways.split(",")
    missing = [name for name in named if not run.installed(name)]
    todo = run.ways([name for name in named if name not in missing], numbers("--queues", queues))
    if not todo:
        raise ValueError(f"--ways {ways}: not installed here")
    try:
        device = run.device_of(backend)
    except NotImplementedError:
        raise ValueError("there is no GPU here: sweep on one, draw records with --plot, or try --backend cpu") from None
    counts = numbers("--taken", taken or ("0,4,8,16,32,64" if backend == "gpu" else f"0:{device.workers - 1}:1"))
    for count in counts:
        if count >= device.workers:
            raise ValueError(f"--taken {count}: the device has {device.workers}, and one must be left")
    show = functools.partial(ui.console().print, markup=False)
    if missing:
        show(f"not installed here, and left out: {', '.join(missing)}")
    made = record.Sweep({**run.about(device), "suite": given.name, "by": by})
    try:
        if by == "nccl":
            from tilestream_tools.sweep.collective_overlap import sweep_beside

            made = sweep_beside(
                given, counts, todo, collective=collective, megabytes=megabytes, head_start=1e-6 * head_start,
                rounds=rounds or 15,
            )  # fmt: skip
            made.write(out)
        else:
            from tilestream_tools.sweep.contention import taker

            runner = run.Runner(taker(by, device), device, rounds, show)
            runner.run(made, given, counts, todo, lambda: made.write(out))
    except RuntimeError as error:  # the GPU is not idle, or a rank failed
        if ui.state.debug:
            raise
        ui.fail(one_line(error), ui.FAILED)
    ui.found(record=str(out), about=made.about, points=[asdict(point) for point in made.points], refused=made.refused)
    for refused in made.refused:
        show(f"refused: {refused}")
    if not made.points:
        ui.fail("no point was measured: see what was refused", ui.FAILED)
    show(f"record: {out}, {out.with_suffix('.csv')}")
    _draw([(out.stem, made)], out.with_suffix(".png"), optional=True)
    if made.refused:
        ui.fail(f"{len(made.refused)} points were refused", ui.FAILED)


def _draw(sweeps: list, path: Path, optional: bool = False) -> None:  # type: ignore[type-arg]
    from tilestream_tools.sweep.plot import draw

    try:
        draw(sweeps, path)
    except ImportError as error:
        if not optional:
            raise
        ui.console().print(f"no picture: {error}", markup=False)
    else:
        ui.console().print(f"picture: {path}", markup=False)


def numbers(option: str, text: str) -> list[int]:
    """``"4,8,16"``, or ``"FIRST:LAST:STEP"`` with both ends in."""
    try:
        if ":" in text:
            first, last, step = map(int, text.split(":"))
            found = list(range(first, last + 1, step))
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise ValueError(f"{option} {text}: give numbers as 4,8,16, or FIRST:LAST:STEP with a positive step")
    return found
