"""The page on GEMM while other kernels hold SMs: the records of `contention` as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.core.records import paths
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cells, device_of, geomean, table, where
from tilestream_tools.sweep.plot import draw
from tilestream_tools.sweep.record import Point, Sweep, read

NOTES = Notes("contention")
#: Implementations, in the order in which they are shown.
WAYS = ("torch", "quack", "quack-dynamic", "static", "dynamic", "stream_k")
OURS = WAYS[3:]


def page(results: Path) -> list[str]:
    parts = [NOTES("page")]
    for name, section in SECTIONS.items():
        made = [part for sweep in sweeps(results, name) for part in section(sweep)]
        parts += [NOTES(name), *made] if made else []
    return parts


def plots(results: Path, images: Path) -> None:
    found = [(device_of(sweep.about), sweep) for sweep in sweeps(results, "held")]
    if found:
        images.mkdir(parents=True, exist_ok=True)
        draw(found, images / "neighbours.png")


def sweeps(results: Path, name: str) -> list[Sweep]:
    return [read(path) for path in paths(results, f"neighbours_{name}.json")]


def head(sweep: Sweep, part: str, **figures: object) -> list[str]:
    """The note on a record, and a sentence on what was refused or left out, if something was."""
    refused = [f"{one['shape']}, {one['taken']} taken, {one['way']} ({one['why']})" for one in sweep.refused]
    missing = sweep.about.get("missing") or []
    found = [f"Refused: {'; '.join(refused)}."] if refused else []
    found += [f"Not measured, for want of time: {', '.join(missing)}."] if missing else []
    said = NOTES(part, device=sweep.about["device"], where=where(sweep.about), **figures)
    return [said, *([" ".join(found).replace("|", "/").replace("\n", " ")] if found else [])]


def by_shape(sweep: Sweep) -> dict[str, dict[int, dict[str, Point]]]:
    """Points by shape, SMs taken and way."""
    found: dict[str, dict[int, dict[str, Point]]] = {}
    for point in sweep.points:
        found.setdefault(point.shape, {}).setdefault(point.taken, {})[point.label] = point
    return found


def whole(sweep: Sweep, *needed: str) -> Iterable[tuple[str, dict[str, Point]]]:
    """Shapes with all of the ways that are needed, and those ways, as many SMs taken as there are."""
    for shape, by_taken in by_shape(sweep).items():
        for ways in by_taken.values():
            if set(needed) <= set(ways):
                yield shape, ways


def rate(ways: dict[str, Point], names: Iterable[str]) -> list[str]:
    """TFLOP/s by name."""
    return cells({name: point.tflops for name, point in ways.items()}, names, ".0f")


def best_idle(points: Iterable[Point]) -> float:
    """The better throughput of ours and torch's on all of the GPU."""
    return max((point.tflops for point in points if point.implementation in ("torch", *OURS)), default=0.0)


def whole_waves(idle: Point, point: Point) -> float:
    """TFLOP/s that a kernel of so many tiles can have on what is left, if waves are whole there, too."""
    tiles = point.more.get("tiles", 0)
    if not tiles:
        return 0.0
    before, after = (-(-tiles // units) for units in (idle.left, point.left))
    return idle.tflops * before / after


def held(sweep: Sweep) -> list[str]:
    names = [name for name in WAYS if any(point.implementation == name for point in sweep.points)]
    ratios: dict[str, list[float]] = {name: [] for name in names if name not in OURS}
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
                str(taken), *rate(ways, names), f"{ours.tflops / ways['torch'].tflops:.3f}" if "torch" in ways else "-",
                f"{share:.3f}" if share else "-", f"{ours.tflops / waves:.3f}" if waves else "-",
            ])  # fmt: skip
        name = next(iter(next(iter(by_taken.values())).values())).name
        heads = ["SMs held", *names, "dynamic / torch", "of proportion", "of whole waves"]
        parts += [f"**{shape}{f' {name}' if name else ''}**, TFLOP/s", table(heads, rows)]
    means = ", ".join(f"{geomean(found):.3f} x {name}" for name, found in ratios.items() if found)
    return [*head(sweep, "held record", means=means), *parts]


def idle(sweep: Sweep) -> list[str]:
    rows, ratios = [], []
    for shape, ways in whole(sweep, "static", "dynamic", "torch"):
        ratios.append(ways["static"].seconds / ways["dynamic"].seconds)
        tiles = f"{ways['dynamic'].more.get('tiles', 0):.0f}"
        rows.append([shape, tiles, *rate(ways, ("torch", "static", "dynamic")), f"{ratios[-1]:.3f}"])
    heads = ["M x N x K", "tiles", "torch", "static", "dynamic, TFLOP/s", "dynamic / static"]
    return [*head(sweep, "idle record", mean=geomean(ratios)), table(heads, rows)]


def split(sweep: Sweep) -> list[str]:
    """What stream-K gains where the last wave is hardly filled."""
    rows = []
    for shape, ways in whole(sweep, "static", "dynamic", "stream_k", "torch"):
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
    heads = ["M x N x K", "waves", "torch", "static", "dynamic", "stream_k, us", "gained", "could gain", "share"]
    return [*head(sweep, "split record"), table(heads, rows)]


def green(sweep: Sweep) -> list[str]:
    rows = []
    for shape, ways in whole(sweep, "dynamic", "told", "torch"):
        point = ways["dynamic"]
        beside = (f"{point.tflops / ways[name].tflops:.3f}" for name in ("told", "torch"))
        rows.append([shape, str(point.left), *rate(ways, ("torch", "told", "dynamic")), *beside])
    heads = ["M x N x K", "SMs", "torch", "told", "dynamic, TFLOP/s", "dynamic / told", "dynamic / torch"]
    return [*head(sweep, "green record"), table(heads, rows)]


def queues(sweep: Sweep) -> list[str]:
    labels = list(dict.fromkeys(point.label for point in sweep.points))
    rows = [
        [shape, str(taken), *rate(ways, labels)]
        for shape, by_taken in by_shape(sweep).items()
        for taken, ways in by_taken.items()
    ]
    return [*head(sweep, "queues record"), table(["M x N x K", "SMs held", *labels], rows)]


def nccl(sweep: Sweep) -> list[str]:
    rows = [
        [
            point.shape, str(point.taken), point.label,
            *(f"{1e3 * seconds:.3f}" for seconds in (point.more["comm"], point.more["matmul"], point.seconds)),
            f"{point.seconds / point.more['floor']:.3f}",
        ]
        for point in sweep.points
    ]  # fmt: skip
    about, start = sweep.about, sweep.about.get("head_start_us", 0.0)
    said = head(
        sweep, "nccl record" if start else "together record", world=about["world"], megabytes=about["megabytes"],
        collective=about["collective"].replace("_", "-"), head_start=start,
    )  # fmt: skip
    heads = ["M x N x K", "SMs of NCCL", "matmul by", "collective, ms", "matmul", "both", "of the least"]
    return [*said, table(heads, rows)]


SECTIONS: dict[str, Callable[[Sweep], list[str]]] = {
    "held": held, "idle": idle, "split": split, "green": green, "queues": queues, "nccl": nccl, "together": nccl,
}  # fmt: skip
