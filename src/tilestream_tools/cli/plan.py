"""``tilestream plan``: the plan of a matmul for this machine, or for a GPU that is not here, and its reasons."""

from typing import Annotated

import typer


def plan(
    m: Annotated[int, typer.Argument(min=0, help="Rows of A.")],
    n: Annotated[int, typer.Argument(min=0, help="Columns of B.")],
    k: Annotated[int, typer.Argument(min=0, help="Columns of A, rows of B.")],
    batch: Annotated[int, typer.Option(min=0, help="Number of such matmuls.")] = 1,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, float64, bfloat16, float16, float8_e4m3fn or float8_e5m2; on AMD also float8_e4m3fnuz or "
            "float8_e5m2fnuz."
        ),
    ] = "float32",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or a GPU that need not be here: h100, h200, mi300x, mi325x, mi350x, mi355x.")
    ] = "cpu",
    layout: Annotated[str | None, typer.Option(help="How A and B lie: nn, nt, tn or tt.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers; default: as many as the device holds.")] = None,
    schedule: Annotated[str, typer.Option(help="auto, static, dynamic or stream_k.")] = "auto",
    tile: Annotated[str | None, typer.Option(help="Rows and columns of a tile, as 256x512.")] = None,
    backend: Annotated[str | None, typer.Option(help="Forced: hopper, cdna or portable.")] = None,
    variant: Annotated[str | None, typer.Option(help="Forced: a variant of that backend.")] = None,
    stages: Annotated[int | None, typer.Option(min=2, help="Forced: stages of the ring.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="A's rows arrive in so many chunks.")] = None,
    rows_per_chunk: Annotated[int | None, typer.Option(min=1, help="A's rows arrive in chunks of so many.")] = None,
    pivot: Annotated[int, typer.Option(min=0, help="The chunk that arrives first.")] = 0,
) -> None:
    """Print the plan of a matmul, A [M, K] @ B [K, N]: what was chosen, what was refused and why, and the floor."""
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
    found = ts.plan(
        m, n, k, batch=batch, dtype=dtype, device=device, layout=layout, workers=workers, schedule=schedule,
        tile=parsed_tile(tile), arrival=arrival, backend=backend, variant=variant, stages=stages,
    )  # fmt: skip
    typer.echo(found.explain())


def parsed_tile(text: str | None) -> tuple[int, int] | None:
    """``"256x512"`` -> ``(256, 512)``."""
    if text is None:
        return None
    rows, by, columns = text.lower().partition("x")
    if not (by and rows.isdecimal() and columns.isdecimal()):
        raise ValueError(f"--tile {text}: give rows and columns, as 256x512")
    return int(rows), int(columns)
