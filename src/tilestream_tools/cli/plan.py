"""``tilestream plan``: the plan of a matmul for this machine, or for a GPU that is not here, and its reasons."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilestream.core.gpu_specs import GPU_SPECS
from tilestream_tools.cli import ui

if TYPE_CHECKING:
    from tilestream.plan import Plan


def plan(
    m: Annotated[int, typer.Argument(metavar="M", min=0, help="Rows of A.")],
    n: Annotated[int, typer.Argument(metavar="N", min=0, help="Columns of B.")],
    k: Annotated[int, typer.Argument(metavar="K", min=0, help="Columns of A, rows of B.")],
    batch: Annotated[int, typer.Option(min=0, help="Number of such matmuls.")] = 1,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, float64, bfloat16, float16, float8_e4m3fn or float8_e5m2; on AMD also float8_e4m3fnuz or "
            "float8_e5m2fnuz. Short names, such as bf16, are understood."
        ),
    ] = "float32",
    device: Annotated[
        str, typer.Option(help=f"cpu, cuda, or a GPU that is planned for without being here: {', '.join(GPU_SPECS)}.")
    ] = "cpu",
    layout: Annotated[
        str | None, typer.Option(help="Layouts of A and B: nn, nt, tn or tt; t is transposed in memory.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers; default: as many as the device holds.")] = None,
    schedule: Annotated[str, typer.Option(help="auto, static, dynamic or stream_k.")] = "auto",
    tile: Annotated[
        str | None, typer.Option(help="Rows and columns of a tile, such as 256x512; default: the plan chooses.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Force a backend: hopper, cdna or portable.")] = None,
    variant: Annotated[str | None, typer.Option(help="Force a variant of that backend.")] = None,
    stages: Annotated[int | None, typer.Option(min=2, help="Force the number of stages of the ring.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="A's rows arrive in this many chunks.")] = None,
    rows_per_chunk: Annotated[int | None, typer.Option(min=1, help="A's rows arrive in chunks of this many.")] = None,
    pivot: Annotated[int, typer.Option(min=0, help="The chunk that is expected first.")] = 0,
    as_json: ui.Json = False,
) -> None:
    """Print the plan of a matmul.

    A is [M, K] and B is [K, N]. The plan says what was chosen, what was refused and why, and the least time
    that operations and bytes allow.
    """
    import tilestream as ts

    arrival = None
    if chunks is not None or rows_per_chunk is not None:
        rows = batch * m
        if rows < 1:
            raise ValueError("--chunks, --rows-per-chunk: there are no rows that could arrive")
        if rows_per_chunk is None:
            rows_per_chunk = -(-rows // (chunks or 1))
        arrival = ts.Arrival.uniform(rows_per_chunk, chunks or -(-rows // rows_per_chunk), pivot)
    elif pivot:
        raise ValueError(f"--pivot {pivot}: give --chunks or --rows-per-chunk too")
    made = ts.plan(
        m, n, k, batch=batch, dtype=dtype, device=device, layout=layout, workers=workers, schedule=schedule,
        tile=parsed_tile(tile), arrival=arrival, backend=backend, variant=variant, stages=stages,
    )  # fmt: skip
    ui.found(**facts(made))
    typer.echo(made.explain())


def facts(plan: "Plan") -> dict[str, Any]:
    """A plan as JSON has it: times in seconds, rates and extents as they are."""
    problem, schedule, floor = plan.problem, plan.schedule, plan.floor
    return {
        "problem": {name: getattr(problem, name) for name in ("m", "n", "k", "batch", "dtype", "out_dtype")},
        "device": plan.device.name, "backend": plan.backend, "variant": plan.variant, "why": plan.why,
        "tile": list(plan.tile), "schedule": schedule.kind, "workers": plan.workers, "queues": schedule.queues,
        "raster": {"order": schedule.raster.order, "group": schedule.raster.group},
        "floor": {**asdict(floor), "seconds": floor.seconds, "binds": floor.binds},
        "predicted_seconds": plan.predicted,
        "refused": [{"what": one.what, "why": one.why} for one in plan.refused],
    }  # fmt: skip


def parsed_tile(text: str | None) -> tuple[int, int] | None:
    """``"256x512"`` -> ``(256, 512)``."""
    if text is None:
        return None
    rows, by, columns = text.lower().partition("x")
    if not (by and rows.isdecimal() and columns.isdecimal()):
        raise ValueError(f"--tile {text}: give rows and columns, as 256x512")
    return int(rows), int(columns)
