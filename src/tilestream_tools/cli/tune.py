"""``tilestream tune``: measure the likely plans of some shapes here, for later plans to use."""

import functools
from typing import Annotated

import typer

from tilestream_tools.cli import ui


def tune(
    shape: Annotated[list[str], typer.Argument(help="MxNxK; several may be named.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    layout: Annotated[str, typer.Option(help="How A and B lie: nn, nt, tn or tt; nt is a Linear layer's.")] = "nt",
    within: Annotated[
        float, typer.Option(min=1.0, help="Only plans expected to take no more than so many times the best.")
    ] = 1.2,
) -> None:
    """Measure the plans that the cost model thinks likely, and keep the fastest.

    Optional: without it the cost model chooses. Each plan's answer is checked. The fastest are kept in a file in your
    cache folder, by device and versions; TILESTREAM_TUNED names another file, and 0 none.
    """
    import torch

    from tilestream.plan import tuned
    from tilestream_tools.sweep import run
    from tilestream_tools.sweep.clock import GpuClock
    from tilestream_tools.sweep.suite import Shape
    from tilestream_tools.sweep.tune import tune as measure

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
    clock, wrong = GpuClock(), 0
    show = functools.partial(ui.console().print, markup=False)
    for one in shapes:
        found = measure(one.m, one.n, one.k, getattr(torch, dtype), layout, device, clock, within, show)
        wrong += len(found.wrong)
        gain = found.model_seconds / found.seconds
        verdict = "the cost model's choice" if found.plan is found.model else f"{gain:.3f} x the cost model's choice"
        show(f"{one}: {1e6 * found.seconds:.4g} us, {verdict}, of {found.plans} plans: {found.plan.label}")
    show(f"kept in {path}")
    if wrong:
        ui.fail(f"{wrong} plans gave no right answer, and were left out", ui.FAILED)
