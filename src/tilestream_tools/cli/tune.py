"""``tilestream tune``: measure the likely plans of some shapes here, for later plans to use."""

import functools
from typing import Annotated

import typer

from tilestream.core.dtypes import SHORT
from tilestream_tools.cli import ui


def tune(
    shape: Annotated[list[str], typer.Argument(metavar="MxNxK", help="Shapes, such as 4096x8192x28672.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    layout: Annotated[str, typer.Option(help="Layouts of A and B: nn, nt, tn or tt; nt is a linear layer's.")] = "nt",
    within: Annotated[
        float, typer.Option(min=1.0, help="Measure plans whose expected time is at most this many times the best.")
    ] = 1.2,
    as_json: ui.Json = False,
) -> None:
    """Measure the plans that the cost model expects to be fast.

    Tuning is optional: without it the cost model chooses. Each plan's answer is checked. The fastest plans are kept in
    a file in your cache folder, by device and versions; TILESTREAM_TUNED names another file, and 0 none.
    """
    import torch

    from tilestream.plan import tuned
    from tilestream_tools.sweep import run
    from tilestream_tools.sweep.clock import GpuClock
    from tilestream_tools.sweep.suite import Shape
    from tilestream_tools.sweep.tune import tune as measure

    dtype = SHORT.get(dtype, dtype)
    if dtype not in ("bfloat16", "float16"):
        raise ValueError(f"--dtype {dtype}: it is bfloat16 or float16")
    if layout not in ("nn", "nt", "tn", "tt"):
        raise ValueError(f"--layout {layout}: it is nn, nt, tn or tt")
    shapes = [Shape.parse(text) for text in shape]
    path = tuned.tuned_path()
    if path is None:
        raise ValueError(f"{tuned.ENVIRONMENT}=0: plans look at no file, so there is nothing to tune; unset it")
    try:
        device = run.device_of("gpu")
    except NotImplementedError:
        raise ValueError("there is no GPU here: tune where the plans will run") from None
    clock, wrong, told = GpuClock(), 0, {}
    show = functools.partial(ui.console().print, markup=False)
    for one in shapes:
        found = measure(one.m, one.n, one.k, getattr(torch, dtype), layout, device, clock, within, show)
        wrong += len(found.wrong)
        gain = found.model_seconds / found.seconds
        verdict = "the cost model's choice" if found.plan is found.model else f"{gain:.3f} x the cost model's choice"
        told[str(one)] = {**found.entry(), "plan": found.plan.label, "wrong": found.wrong}
        show(f"{one}: {1e6 * found.seconds:.4g} us, {verdict}, of {found.plans} plans: {found.plan.label}")
    show(f"kept in {path}")
    ui.found(kept=str(path), tuned=told)
    if wrong:
        ui.fail(f"{wrong} plans gave no right answer, and were left out", ui.FAILED)
