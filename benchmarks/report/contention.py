"""What ``docs/performance.md`` says of a GPU that is not all ours: the records of `gpu_neighbours` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.gemm.shapes import geomean
from benchmarks.report.gemm import table
from tilestream.sweep.plot import draw
from tilestream.sweep.record import Point, Sweep, read

#: By whom points are shown, in this order.
WAYS = ("torch", "quack", "quack-dynamic", "static", "dynamic", "stream_k")


def where(sweep: Sweep) -> str:
    """On what the record was made."""
    about = sweep.about
    return (
        f"{about['device']}, torch {about['torch']}, Triton {about.get('triton', 'none')}, commit `{about['commit']}`, "
        f"{about['date']}"
    )


def refused(sweep: Sweep) -> list[str]:
    """A sentence on what was refused or left out, if something was."""
    parts = [f"{one['shape']}, {one['taken']} taken, {one['way']} ({one['why']})" for one in sweep.refused]
    missing = sweep.about.get("missing") or []
    found = [f"Refused: {'; '.join(parts)}."] if parts else []
    found += [f"Not measured, for want of time: {', '.join(missing)}."] if missing else []
    return [" ".join(found).replace("|", "/").replace("\n", " ")] if found else []


def by_shape(sweep: Sweep) -> dict[str, dict[int, dict[str, Point]]]:
    """Points by shape, SMs taken and way."""
    found: dict[str, dict[int, dict[str, Point]]] = {}
    for point in sweep.points:
        found.setdefault(point.shape, {}).setdefault(point.taken, {})[point.label] = point
    return found


def best_idle(points: Iterable[Point]) -> float:
    """The better throughput of ours and torch's on all of the GPU."""
    return max((point.tflops for point in points if point.implementation in ("torch", *WAYS[3:])), default=0.0)


def whole_waves(idle: Point, point: Point) -> float:
    """TFLOP/s that a kernel of so many tiles can have on what is left: its idle waves are whole ones there, too."""
    tiles = point.more.get("tiles", 0)
    if not tiles:
        return 0.0
    before, after = (-(-tiles // units) for units in (idle.left, point.left))
    return idle.tflops * before / after


def held(sweep: Sweep) -> str:
    """A neighbour on some SMs."""
    names = [name for name in WAYS if any(point.implementation == name for point in sweep.points)]
    ratios: dict[str, list[float]] = {name: [] for name in names if name not in WAYS[3:]}
    parts = []
    for shape, by_taken in by_shape(sweep).items():
        idle = by_taken.get(0, {})
        rows = []
        for taken, ways in by_taken.items():
            ours = ways.get("dynamic")
            if ours is None:
                continue
            share = ours.tflops / (best_idle(idle.values()) * ours.left / ours.units) if idle else 0.0
            waves = whole_waves(idle["dynamic"], ours) if "dynamic" in idle else 0.0
            if taken:
                for name in ratios:
                    if name in ways:
                        ratios[name].append(ours.tflops / ways[name].tflops)
            rows.append([
                str(taken), *(f"{ways[name].tflops:.0f}" if name in ways else "-" for name in names),
                f"{ours.tflops / ways['torch'].tflops:.3f}" if "torch" in ways else "-",
                f"{share:.3f}" if share else "-", f"{ours.tflops / waves:.3f}" if waves else "-",
            ])  # fmt: skip
        head = ["SMs held", *names, "dynamic / torch", "of proportion", "of whole waves"]
        name = next(iter(next(iter(by_taken.values())).values())).name
        parts += [f"**{shape}{f' {name}' if name else ''}**, TFLOP/s", table(head, rows)]
    means = ", ".join(f"{geomean(found):.3f} x {name}" for name, found in ratios.items() if found)
    return "\n\n".join(
        [
            f"### Beside a neighbour, {sweep.about['device']}",
            f"Another kernel holds SMs with all of their shared memory ({where(sweep)}); nobody is told. *Of "
            "proportion*: dynamic's throughput beside the better idle one of ours and torch's, times the share of the "
            "SMs that is left. *Of whole waves*: beside what its number of tiles allows, if an item is never split. "
            f"Geometric mean over all points with a neighbour: dynamic is {means}.",
            *refused(sweep), *parts,
            "![Throughput against the SMs that are left](images/gpu_neighbours.png)",
        ]
    )  # fmt: skip


def idle(sweep: Sweep) -> str:
    """What a queue costs."""
    rows, ratios = [], []
    for shape, by_taken in by_shape(sweep).items():
        ways = by_taken[0]
        if not {"static", "dynamic", "torch"} <= set(ways):
            continue
        ratios.append(ways["static"].seconds / ways["dynamic"].seconds)
        rows.append([
            shape, f"{ways['dynamic'].more.get('tiles', 0):.0f}",
            *(f"{ways[name].tflops:.0f}" for name in ("torch", "static", "dynamic")), f"{ratios[-1]:.3f}",
        ])  # fmt: skip
    return "\n\n".join(
        [
            f"### What a queue costs on an idle GPU, {sweep.about['device']}",
            f"Shapes of several waves ({where(sweep)}). Geometric mean of dynamic / static: {geomean(ratios):.3f}.",
            *refused(sweep),
            table(["M x N x K", "tiles", "torch", "static", "dynamic, TFLOP/s", "dynamic / static"], rows),
        ]
    )


def split(sweep: Sweep) -> str:
    """What stream-K gains where the last wave is hardly filled."""
    rows = []
    for shape, by_taken in by_shape(sweep).items():
        ways = by_taken[0]
        if not {"static", "dynamic", "stream_k", "torch"} <= set(ways):
            continue
        better = min((ways["static"], ways["dynamic"]), key=lambda point: point.seconds)
        full, filled = divmod(better.more["tiles"], better.units)
        filled /= better.units
        gain = better.seconds / ways["stream_k"].seconds - 1
        most = (full + 1) / (full + filled) - 1 if filled else 0.0
        rows.append([
            shape, f"{full + filled:.2f}",
            *(f"{1e6 * ways[name].seconds:.1f}" for name in ("torch", "static", "dynamic", "stream_k")),
            f"{gain:+.1%}", f"{most:+.1%}", f"{gain / most:.2f}" if most > 0 else "-",
        ])  # fmt: skip
    head = ["M x N x K", "waves", "torch", "static", "dynamic", "stream_k, us", "gained", "could gain", "share"]
    return "\n\n".join(
        [
            f"### What stream-K gains, {sweep.about['device']}",
            f"Shapes of fewer than four waves ({where(sweep)}). *Gained*: beside the better of static and dynamic, "
            "whose waves are counted. *Could gain*: with k full waves and a last one filled to f, (k + 1) / (k + f) - "
            "1. The plans differ in their tiles.",
            *refused(sweep), table(head, rows),
        ]
    )  # fmt: skip


def green(sweep: Sweep) -> str:
    """Green contexts."""
    rows = []
    for shape, by_taken in by_shape(sweep).items():
        for ways in by_taken.values():
            if {"dynamic", "told", "torch"} <= set(ways):
                point = ways["dynamic"]
                rows.append([
                    shape, str(point.left), *(f"{ways[name].tflops:.0f}" for name in ("torch", "told", "dynamic")),
                    f"{point.tflops / ways['told'].tflops:.3f}", f"{point.tflops / ways['torch'].tflops:.3f}",
                ])  # fmt: skip
    head = ["M x N x K", "SMs", "torch", "told", "dynamic, TFLOP/s", "dynamic / told", "dynamic / torch"]
    return "\n\n".join(
        [
            f"### Green contexts, {sweep.about['device']}",
            f"A context with fewer SMs ({where(sweep)}). *Told*: the same kernel, with that many workers asked for.",
            *refused(sweep), table(head, rows),
        ]
    )  # fmt: skip


def queues(sweep: Sweep) -> str:
    """Several queues."""
    labels = list(dict.fromkeys(point.label for point in sweep.points))
    rows = [
        [shape, str(taken), *(f"{ways[label].tflops:.0f}" if label in ways else "-" for label in labels)]
        for shape, by_taken in by_shape(sweep).items() for taken, ways in by_taken.items()
    ]  # fmt: skip
    return "\n\n".join(
        [
            f"### Several queues, {sweep.about['device']}",
            f"Own queue first, then the fullest ({where(sweep)}). TFLOP/s.",
            *refused(sweep), table(["M x N x K", "SMs held", *labels], rows),
        ]
    )  # fmt: skip


def nccl(sweep: Sweep) -> str:
    """Beside a collective."""
    rows = [
        [
            point.shape, str(point.taken), point.label,
            *(f"{1e3 * seconds:.3f}" for seconds in (point.more["comm"], point.more["matmul"], point.seconds)),
            f"{point.seconds / point.more['floor']:.3f}",
        ]
        for point in sweep.points
    ]  # fmt: skip
    about = sweep.about
    together = not about.get("head_start_us", 0.0)
    order = (
        "Both become possible at once: whoever was not told leaves no SM to the collective, which begins after the "
        "matmul's first worker, or first wave, has left."
        if together
        else f"The collective is under way: the matmul comes {about['head_start_us']:g} us later, which are in *both*."
    )
    return "\n\n".join(
        [
            f"### Beside a collective{', both at once' if together else ''}, {about['world']} x {about['device']}",
            f"{about['collective'].replace('_', '-')} of {about['megabytes']} MiB on a stream of its own, and a "
            f"matmul ({where(sweep)}). {order} *Told*: as many workers as there are SMs left. *Of the least*: both, "
            "beside the larger of the collective alone and the matmul with what it loses of the SMs while the "
            "collective runs.",
            *refused(sweep),
            table(["M x N x K", "SMs of NCCL", "matmul by", "collective, ms", "matmul", "both", "of the least"], rows),
        ]
    )  # fmt: skip


SECTIONS = {
    "held": held, "idle": idle, "split": split, "green": green, "queues": queues, "nccl": nccl, "together": nccl,
}  # fmt: skip


def _records(results: Path, name: str) -> list[Sweep]:
    return [read(path) for path in sorted(results.glob(f"gpu_neighbours_{name}*.json"))]


def sections(results: Path) -> list[str]:
    """The sections for the records that there are; none without any."""
    found = [section(sweep) for name, section in SECTIONS.items() for sweep in _records(results, name)]
    return ["## When the GPU is not all ours", *found] if found else []


def plots(results: Path, images: Path) -> None:
    """The records of neighbours, laid over one another."""
    sweeps: Sequence[tuple[str, Sweep]] = [
        (sweep.about["device"].removeprefix("NVIDIA "), sweep) for sweep in _records(results, "held")
    ]
    if sweeps:
        images.mkdir(parents=True, exist_ok=True)
        draw(sweeps, images / "gpu_neighbours.png")
