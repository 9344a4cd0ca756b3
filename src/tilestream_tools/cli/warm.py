"""``tilestream warm``: compile ahead what a model, or calls of some shapes, will launch; carry it to other machines."""

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilestream.core.device import DeviceProperties, cpu_properties
from tilestream_tools.cli import ui

if TYPE_CHECKING:
    from tilestream_tools.warm.calls import Call


def warm(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help="A model: Hugging Face's config.json, or the folder that holds it."),
    ] = None,
    gemm: Annotated[
        list[str] | None,
        typer.Option(
            help="M,N,K, then any of a dtype, linear|nn|nt|tn|tt, bias, an activation, scales=tensor|row, backward, "
            "chunk=N (rows that arrive at a time); repeatable."
        ),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(help="B,S,H,Hkv,D, then any of a dtype, causal, lse, bhsd, keys=N, chunk=N; repeatable."),
    ] = None,
    grouped: Annotated[
        list[str] | None,
        typer.Option(
            help="M,N,K,G, then any of a dtype, bias, an activation, sources=N (rows by source), arrives; repeatable."
        ),
    ] = None,
    shapes: Annotated[
        Path | None,
        typer.Option(
            help="A file with a line a call: 'gemm M,N,K...', 'attention B,S,H,Hkv,D...', 'grouped M,N,K,G...'."
        ),
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="For a model: rows of its linear layers, and lengths of prompts.")
    ] = "1,16,512,4096",
    keys: Annotated[str, typer.Option(help="For a model: keys that one query sees in decoding.")] = "",
    dtype: Annotated[str | None, typer.Option(help="For a model: its dtype; default: its configuration's.")] = None,
    backward: Annotated[
        bool, typer.Option(help="For a model: also the gradients of its linear layers. Those of attention are torch's.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="cuda; a GPU by name, such as h100; or a file of --save-device.")
    ] = "cuda",
    jobs: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: one a core.")] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="Also copy the kernels into a new folder, .tar or .tar.gz, for --from on another machine."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Copy the kernels of such a folder or archive into this machine's cache."),
    ] = None,
    save_device: Annotated[
        Path | None, typer.Option(help="Write what the driver says of this machine's GPU to a JSON file.")
    ] = None,
    as_json: ui.Json = False,
) -> None:
    """Compile kernels ahead, into Triton's cache.

    First calls then find their kernels. No GPU is needed: --device names one. A named GPU is planned for with its data
    sheet's clocks; a file that --save-device wrote on the machine itself has that machine's clocks.
    """
    if save_device is not None:
        save_device.write_text(json.dumps(dataclasses.asdict(gpu("cuda")), indent=1) + "\n", encoding="utf-8")
    if source is not None:
        from tilestream_tools.warm import kernel_cache

        new, count = kernel_cache.unpack(source)
        ui.found(brought={"kernels": count, "new": new})
        typer.echo(f"{source}: {count} kernels, {new} of them new in {kernel_cache.folder()}")
    from tilestream_tools.warm.calls import described

    calls = described(model, gemm or (), attention or (), shapes, tokens, keys, dtype, backward, grouped or ())
    if calls:
        compile_all(calls, gpu(device), jobs or cpu_properties().workers, to)
    elif to is not None or (source is None and save_device is None):
        raise ValueError("nothing to compile: give a model, --gemm, --attention, --grouped or --shapes")


def gpu(device: str) -> DeviceProperties:
    """The GPU's properties: of this machine, by name, or from a file.

    Raises
    ------
    ValueError, NotImplementedError
        If it is no GPU, or there is none.
    """
    from tilestream.plan.api import device_properties

    if not device.endswith(".json"):
        found = device_properties(device)
        if found.backend == "cpu":
            raise ValueError(f"--device {device}: nothing is compiled for a CPU; name a GPU")
        return found
    text = Path(device).read_bytes()
    try:
        saved = json.loads(text)
        pairs = {name: tuple((kind, rate) for kind, rate in saved[name]) for name in ("tensor", "sustained")}
        return DeviceProperties(**{**saved, **pairs})
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"--device {device}: no file of --save-device") from None


def compile_all(calls: "list[Call]", device: DeviceProperties, jobs: int, to: Path | None) -> None:
    """Compile what the calls launch and is not cached, in ``jobs`` processes; copy all of it to ``to``."""
    from rich.progress import Progress

    from tilestream_tools.warm import ahead, kernel_cache

    if to is not None and to.exists():
        raise FileExistsError(f"--to {to}: it exists already")
    begin = time.perf_counter()
    keys = ahead.kernels_of(calls, device)
    missing = [key for key in keys if not kernel_cache.is_cached(key)]
    waiting = list(dict.fromkeys(keys[key] for key in missing))  # a call may launch several kernels
    with Progress(console=ui.console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=len(waiting))
        ahead.compile_calls(waiting, device, jobs, lambda: progress.advance(task))
    seconds = time.perf_counter() - begin
    left = [key for key in keys if not kernel_cache.is_cached(key)]
    if left:
        ui.fail(f"{len(left)} of {len(keys)} kernels are not in {kernel_cache.folder()} after they were compiled", 1)
    ui.found(
        device=device.name, calls=len(calls), kernels=len(keys), compiled=len(missing), seconds=seconds,
        cache=str(kernel_cache.folder()),
    )  # fmt: skip
    typer.echo(
        f"{device.name}: {len(calls)} calls launch {len(keys)} kernels, of which {len(missing)} were compiled in "
        f"{seconds:.1f} s, and {len(keys) - len(missing)} found in {kernel_cache.folder()}"
    )
    if to is not None:
        homes = {kernel_cache.home(key) for key in keys}
        count = kernel_cache.pack(to, [kernel for kernel in kernel_cache.kernels() if kernel.folder in homes])
        ui.found(packed={"to": str(to), "kernels": count})
        typer.echo(f"{to}: {count} kernels; there: tilestream warm --from {to.name}")
