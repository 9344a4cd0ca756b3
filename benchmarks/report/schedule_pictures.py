"""The pictures of docs/scheduling.md.

One product on eight SMs of which a neighbour holds two, by each schedule: simulated. And two launches as an H100 ran
them, from a trace. The simulation shows the schedules and no machine: a K step takes as long on every SM. A worker
takes what `tilestream.core.schedule.take` gives it, as in every backend. A worker whose SM is held begins when another
has left.
"""

from __future__ import annotations

import heapq
from pathlib import Path

from benchmarks.core.paths import IMAGES, RESULTS
from tilestream.core.schedule import Cursor, Grid, Kind, Raster, Schedule, Take, WorkItem, take
from tilestream.trace.record import LaunchTrace, Span
from tilestream_tools.trace.draw import draw
from tilestream_tools.trace.perfetto import load

#: static, then dynamic: [4096, 4096] @ [4096, 4096], bfloat16, while a neighbour held 16 of 132 SMs; commit 1a43393.
TRACE = RESULTS / "h100" / "trace_beside.json.gz"
UNITS, HELD = 8, 2
#: Seconds of a K step; K steps of an epilogue, and of adding up a tile's parts.
STEP, EPILOGUE, ADD = 1e-5, 2, 1
GRID = Grid.of(5 * 128, 5 * 128, 24 * 64, 128, 128, 64)


def simulate(schedule: Schedule, units: int = UNITS, held: int = HELD) -> LaunchTrace:
    """The launch of ``schedule`` on ``units`` SMs, of which another kernel holds ``held`` from start to end."""
    launch = LaunchTrace("simulated", schedule.kind, schedule.workers, schedule.grid.tiles, 0.0)
    counters, counted = [0] * schedule.queues, dict.fromkeys(range(schedule.slots), 0)
    waiting = list(range(schedule.workers))
    # When each SM that is left is free, and for whom: a new worker, or one that goes on.
    free: list[tuple[float, int, int, Cursor]] = [(0.0, at, -1, Cursor()) for at in range(units - held)]
    while free:
        now, order, worker, cursor = heapq.heappop(free)
        if worker < 0:
            if not waiting:
                continue
            worker = waiting.pop(0)
        item, cursor = _next(schedule, worker, cursor, counters)
        if item is None:
            heapq.heappush(free, (now, order, -1, Cursor()))
            continue
        for kind, steps in _work(item, counted):
            span = Span(worker, kind, now, now + steps * STEP, item.batch, item.pm, item.pn, item.k_begin, item.k_end)
            launch.by_worker[worker].append(span)
            now = span.end
        launch.end = max(launch.end, now)
        heapq.heappush(free, (now, order, worker, cursor))
    return launch


def _next(schedule: Schedule, worker: int, cursor: Cursor, counters: list[int]) -> tuple[WorkItem | None, Cursor]:
    turn, answer = take(schedule, worker, cursor), None
    try:
        while True:
            asked = turn.send(answer)  # type: ignore[arg-type]
            answer = counters[asked.queue]
            counters[asked.queue] += isinstance(asked, Take)
    except StopIteration as end:
        return end.value


def _work(item: WorkItem, counted: dict[int, int]) -> list[tuple[str, int]]:
    """What a worker does with an item: spans, and their K steps."""
    steps = item.k_end - item.k_begin
    if item.parts == 1:
        return [("tile", steps + EPILOGUE)]
    first = item.slot - item.part
    counted[first] += 1
    if counted[first] < item.parts:
        return [("part", steps + 1)]
    return [("part", steps), ("reduce", ADD * item.parts + EPILOGUE)]


def schedule_of(kind: Kind) -> Schedule:
    """25 tiles for eight workers: three full waves, and one tile of a fourth."""
    return Schedule(kind, GRID, Raster("grouped", group=5), UNITS)


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0]) if arguments else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("static", "dynamic", "stream_k"):
        for held in (0, HELD):
            launch = simulate(schedule_of(kind), held=held)
            title = f"{kind}, {'all SMs' if not held else f'a neighbour on {held} of {UNITS} SMs'} (simulated)"
            path = folder / f"schedule_{kind}{'_beside' if held else ''}.png"
            draw(launch, path, title=title, size=(1600, 580))
            print(f"{path.name}: {1e3 * launch.end:.2f} ms")
    for kind, launch in zip(("static", "dynamic"), load(TRACE), strict=True):
        title = f"{kind}, 4096 x 4096 x 4096 on an H100, a neighbour on 16 of 132 SMs"
        draw(launch, folder / f"trace_{kind}_beside.png", title=title, size=(1600, 2 * (140 + 3 * launch.workers)))
        print(f"trace_{kind}_beside.png: {1e3 * (launch.end - launch.begin):.3f} ms")
