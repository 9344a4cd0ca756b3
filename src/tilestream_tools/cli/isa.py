"""``tilestream isa``: compile a kernel for a GPU that need not be here, and report on its machine code."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilestream_tools.cli import ui
from tilestream_tools.units import size

if TYPE_CHECKING:
    from tilestream_tools.isa.report import Report

Row = tuple[Any, ...]


def isa(
    kernel: Annotated[
        str | None,
        typer.Argument(
            metavar="KERNEL", help="A kernel's name, or a file of AMDGCN assembly. Without it, the kernels are listed."
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="An architecture, such as sm_100; default: the first that the list has for this kernel."),
    ] = None,
    m: Annotated[int, typer.Option(min=1, help="Rows of A; for attention, queries.")] = 8192,
    n: Annotated[int, typer.Option(min=1, help="Columns of B; for attention, keys.")] = 8192,
    k: Annotated[
        int | None, typer.Option(min=1, help="Columns of A, rows of B (8192); for attention, the head dim (128).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the operands.")] = "bfloat16",
    layout: Annotated[
        str, typer.Option(help="Layouts of A and B: nn, nt, tn or tt; t is transposed in memory.")
    ] = "nt",
    tile: Annotated[
        str | None, typer.Option(help="Rows and columns of a tile, such as 128x256; default: the plan's.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="auto, static, dynamic or stream_k.")] = "auto",
    stages: Annotated[int | None, typer.Option(min=1, help="Stages of the ring; default: the plan's.")] = None,
    memory_cycles: Annotated[
        int | None, typer.Option(min=1, help="Assumed cycles from a load to its data; no vendor publishes them.")
    ] = None,
    warps: Annotated[int | None, typer.Option(min=1, help="For a file: waves of a work group.")] = None,
    lds: Annotated[int | None, typer.Option(min=0, help="For a file: bytes of LDS given at launch.")] = None,
    as_json: ui.Json = False,
) -> None:
    """Compile a kernel without a GPU, and report on its machine code.

    The report has registers, spills, LDS and occupancy; the main loop's instructions and waits; and the time of an
    iteration by published rates, beside its floor. The kernel is compiled and read, not run.
    """
    from tilestream_tools.cli.plan import parsed_tile
    from tilestream_tools.isa import kernels, report
    from tilestream_tools.isa.rates import MEMORY_CYCLES

    if kernel is None:
        for name, entry in kernels.KERNELS.items():
            typer.echo(f"{name:<18} {', '.join(entry.archs):<72} {entry.what}")
        ui.found(kernels={name: {"archs": entry.archs, "what": entry.what} for name, entry in kernels.KERNELS.items()})
        return
    latency = memory_cycles or MEMORY_CYCLES
    if kernel not in kernels.KERNELS and Path(kernel).is_file():
        text = Path(kernel).read_text(encoding="utf-8")
        made = report.of_amdgcn(text, warps=warps, shared=lds, memory_cycles=latency)
    else:
        known = kernels.KERNELS.get(kernel)
        deep = k or (known.k if known else kernels.CompileRequest.k)
        request = kernels.CompileRequest(
            arch or (known.archs[0] if known else ""),
            m,
            n,
            deep,
            dtype,
            layout,
            parsed_tile(tile),
            schedule,
            stages,
        )
        made = report.of(kernel, request, latency)
    ui.found(**asdict(made))
    show(made)


def show(made: "Report") -> None:
    """The report as tables."""
    from rich.table import Table

    console = ui.console()
    version = f", Triton {made.triton}" if made.triton else ""
    console.print(f"{made.kernel} for {made.arch}{version}: compiled and read, not run", style="bold", markup=False)
    if made.plan:
        console.print(f"  {made.plan}", markup=False)
    for title, rows in _sections(made):
        table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
        for row in rows:
            table.add_row(*map(str, row))
        console.print(table)


#: Names for NVIDIA's; those of AMD are the assembler's own.
_SPILLED = {"bytes": "spilled bytes a thread", "stack": "stack bytes a thread"}


def _sections(made: "Report") -> Iterator[tuple[str, list[Row]]]:
    on_amd, by = bool(made.occupancy), made.occupancy or {}
    resources: list[Row] = [(key.upper() if on_amd else key, x) for key, x in made.registers.items()]
    resources += [(_SPILLED.get(key, key.replace("_", " ")), x) for key, x in made.spilled.items()]
    resources += [("LDS" if on_amd else "shared memory", size(made.shared)), ("warps", made.warps)]
    yield "resources", [*resources, *([("stages", made.stages)] if made.stages else [])]
    if on_amd:
        bounds = ", ".join(f"{by['by_' + name]} by {name}" for name in ("registers", "lds", "sgprs"))
        yield "occupancy", [("waves a SIMD", f"{by['waves']} ({bounds})"), ("workers", by["workers"])]
    if made.loop:
        yield "main loop, instructions an iteration", list(_loop(made))
    if cycles := made.cycles:
        rows: list[Row] = [(f"floor: {name}", f"{x:.0f}") for name, x in cycles["floor"].items() if x]
        if "estimate" in cycles:
            rows += [
                ("bound by", cycles["binds"]),
                ("estimate", f"{cycles['estimate']:.0f}"),
                ("matrix units busy", f"{cycles['busy']:.0%}"),
                ("share of the peak", f"{cycles['share']:.0%}, main loop only, at the same clock"),
            ]
        yield "cycles an iteration, of one compute unit", rows


def _loop(made: "Report") -> Iterator[Row]:
    loop = made.loop
    yield "all", loop["instructions"]
    for shape, count in loop["mfma"].items():
        yield f"matrix {shape}", count
    each = loop["counts"] if isinstance(loop["counts"], list) else [loop["counts"]]
    for i, counts in enumerate(each):
        which = f"loop {i}: " if len(each) > 1 else ""
        for kind, n in counts.items():
            if kind not in ("mfma", "instructions"):
                yield which + kind.replace("_", " "), n
    if "waits" in loop:
        waits = [" ".join(f"{name}({left})" for name, left in wait.items()) for wait in loop["waits"]]
        yield "s_waitcnt, in order", ", ".join(waits) or "none"
        yield "s_sleep, whole kernel", made.sleeps
