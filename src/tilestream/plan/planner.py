"""`plan_problem`: candidates of the backends, of which the best becomes the plan."""

from __future__ import annotations

import functools
import logging
import math
from typing import get_args

from tilestream.core.device import DeviceProperties, cpu_properties
from tilestream.core.order import TileOrder
from tilestream.core.schedule import Kind
from tilestream.plan import experimental, tuned
from tilestream.plan.arrival_order import OrderName, in_arrival_order
from tilestream.plan.candidate import Candidate, Forced, Refusal
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy import cdna_tiles, cpu, hopper, portable
from tilestream.plan.problem import Problem
from tilestream.plan.workers import workers_of

logger = logging.getLogger(__name__)

#: The fast backends, as messages call them.
NAMES = {"hopper": "Hopper", "cdna": "CDNA"}
#: The share that a queue may cost on an idle device before a static grid is taken: a static grid loses 40 % where a
#: neighbour holds a few SMs.
QUEUE_MAY_COST = 0.01
_NO_FASTER = "no faster than {} here, and a late worker would hold up its tiles"
NO_STATIC = _NO_FASTER.format("a queue")


@functools.lru_cache(maxsize=1024)
def plan_problem(
    problem: Problem,
    workers: int | None = None,
    schedule: str = "auto",
    tile: tuple[int, int] | None = None,
    order: TileOrder | OrderName | None = None,
    queues: int | None = None,
    shares: int | None = None,
    default_workers: int | None = None,
    device: DeviceProperties | None = None,
    backend: str | None = None,
    variant: str | None = None,
    stages: int | None = None,
    registers: tuple[int, int] | None = None,
    limit: int = 0,
    consult: bool = True,
) -> Plan:
    """`plan` for a `Problem`; equal arguments give the same object.

    ``limit``: see `tilestream.plan.limit`; ``consult``: whether measurements count, see `tilestream.plan.tuned`.
    """
    device = device or cpu_properties()
    named, order = (order, None) if isinstance(order, str) else (None, order)
    if named == "arrival" and schedule == "auto":
        schedule = "dynamic"
    kinds, refused = _kinds(schedule, queues, shares)
    arriving = bool(problem.arriving)
    arrives = "an operand arrives: a CU of each shader engine is its producers'" if arriving else ""
    count, limited, fewer = workers_of(device, workers, default_workers, limit, arrives)
    refused += fewer
    forced = Forced(tile, order, queues, shares, variant, stages, registers)
    given = [
        name
        for name, is_given in (
            ("workers", workers), ("a limit of workers", limited and not workers), ("schedule", schedule != "auto"),
            ("tile", tile), ("order", order is not None or named is not None), ("queues", queues), ("shares", shares),
        )
        if is_given
    ]  # fmt: skip
    auto, on_cpu = schedule == "auto", device.backend == "cpu"
    if on_cpu:
        inline = not arriving and problem.publishes is None and not given
        found = list(cpu.candidates(problem, device, count, kinds=kinds, inline=inline, forced=forced))
        name, elsewhere = "cpu", Refusal("GPU backends", "the operands are on the CPU")
    else:
        name, found, elsewhere = _on_gpu(problem, device, count, backend, kinds, auto, forced)
    best, why = _best(found), f"least of {len(found)} candidates in the cost model"
    if consult and not (on_cpu or given or arriving or backend or variant or stages or registers):
        best, why, other = _as_measured(problem, device, best, found, why)
        refused += other
    if auto and (name == "hopper" or portable.by_model(problem, device)):
        refused = tuple(_static_or_queue(best, found) if r.what == "static" else r for r in refused)
    refused += _alternatives(problem, device, name, best, found, given)
    if problem.publishes is not None and name not in ("hopper", "cpu"):
        raise NotImplementedError(
            f"publishes: the {name} kernel signals no chunk of its output ({elsewhere.why}): launch them one by one"
        )
    if "stream_k" in kinds and best.schedule.kind != "stream_k" and best.variant != "inline":
        refused += (_no_stream_k(problem, name, best, found),)
    refused += (elsewhere,)
    if arriving:
        best, why_not = in_arrival_order(problem, name, best, order is not None, named, queues)
        if why_not:
            refused += (Refusal("arrival order", why_not),)
    made = of_candidate(problem, device, name, best, why, refused)
    # Once per problem, since plans are cached: what runs, and what does not and why (invariant 12).
    logger.info("%s: %s; refused: %s", problem, made.label, "; ".join(f"{r.what}: {r.why}" for r in refused))
    return made


def _on_gpu(
    problem: Problem, device: DeviceProperties, workers: int, backend: str | None, kinds: tuple[Kind, ...], auto: bool,
    forced: Forced,
) -> tuple[str, list[Candidate], Refusal]:  # fmt: skip
    """The backend, its candidates, and why not the other backend."""
    fast = "cdna" if device.arch.startswith("gfx") else "hopper"
    why = cdna_tiles.refusal(problem, device) if fast == "cdna" else hopper.refusal(problem, device)
    if backend not in (None, fast, "portable"):
        why = f"it is not for {device.arch}"
    why = why or experimental.refusal(fast, backend)
    if backend != "portable" and not why:
        if fast == "cdna":
            found = list(cdna_tiles.candidates(problem, device, workers, kinds=kinds, forced=forced))
        else:
            every = ("static", *kinds) if auto and len(kinds) > 1 else kinds
            found = list(hopper.candidates(problem, device, workers, kinds=every, forced=forced, auto=auto))
        if found:
            return fast, found, Refusal("portable", f"the {NAMES[fast]} kernel does this")
        why = _no_candidate(problem, fast, kinds, forced)
    if backend in ("hopper", "cdna"):
        more = ", registers=" if forced.registers else ""
        raise NotImplementedError(
            f"backend={backend!r}: {why}; leave what is forced of backend=, variant=, stages={more}, tile= and "
            "schedule= away"
        )
    if auto and len(kinds) > 1 and portable.by_model(problem, device):
        kinds = ("static", *kinds)
    found = list(portable.candidates(problem, device, workers, kinds=kinds, forced=forced))
    return "portable", found, Refusal(fast, why or "backend='portable' given")


def _no_candidate(problem: Problem, backend: str, kinds: tuple[Kind, ...], forced: Forced) -> str:
    """Why a fast backend has no way to do what is forced."""
    variant, stages, registers = forced.variant, forced.stages, forced.registers
    why = hopper.no_parts(problem) or _no_parts_of(problem, forced) if kinds == ("stream_k",) else ""
    if not why:
        why = _no_tile(backend, kinds, forced)
        if variant or stages:
            why += f" with variant={variant}, stages={stages}"
    if registers:
        no = {
            hopper.no_registers(problem, registers, kind, forced.queues, row)
            for kind in kinds
            for row in hopper.TILES
            if variant in (None, row.variant)
        }
        why = min(no) or f"{why} with registers={registers}"
    return why


def _no_parts_of(problem: Problem, forced: Forced) -> str:
    """Why the Hopper kernel cuts no forced tile along K; empty where it does, or has no such tile."""
    rows = [
        row for row in hopper.TILES
        if forced.variant in (None, row.variant)
        and forced.tile in (None, (row.rows, row.columns), (row.columns, row.rows))
    ]  # fmt: skip
    reasons = [hopper.no_parts(problem, row) for row in rows]
    return reasons[0] if reasons and all(reasons) else ""


def _no_tile(backend: str, kinds: tuple[Kind, ...], forced: Forced) -> str:
    """Why a fast backend has no tile for what is forced."""
    tile = forced.tile
    if tile is None:
        return "no tile of it fits"
    name = "x".join(map(str, tile))
    ring_forced = forced.variant or forced.stages or forced.registers
    known = {(row.rows, row.columns) for row in hopper.TILES} if backend == "hopper" and not ring_forced else set()
    if tile in known or tile[::-1] in known:
        return f"a tile of {name} does not fit with {' or '.join(kinds)} here: registers, or shared memory"
    return f"it has no {name} tile here"


def _as_measured(
    problem: Problem, device: DeviceProperties, best: Candidate, found: list[Candidate], why: str
) -> tuple[Candidate, str, tuple[Refusal, ...]]:
    """The fastest candidate by `tilestream tune`, if it was run; why; and what it replaces."""
    entry = tuned.lookup(problem, device)
    if entry is None:
        return best, why, ()
    measured = tuned.matching(entry, found)
    if measured is None:
        return (
            best,
            why,
            (Refusal("what was measured", "tilestream tune kept a plan that no longer exists: tune again"),),
        )
    why = f"fastest of {entry['plans']} plans that tilestream tune measured here on {entry['date']}"
    if measured is best:
        return best, why, ()
    times = f"{entry['model_us']:.4g} us, this {entry['us']:.4g} us"
    return measured, why, (Refusal("the cost model's choice", f"measured: {times}"),)


def _alternatives(
    problem: Problem, device: DeviceProperties, backend: str, best: Candidate, found: list[Candidate], given: list[str]
) -> tuple[Refusal, ...]:  # fmt: skip
    """The next best variant or tile, and what the portable kernel does without."""
    if backend == "cpu":
        return (_other_variant(best, found, problem, given),)
    refused = _other_tiles(best, found)
    if backend == "portable" and not problem.aligned:
        refused += (Refusal("vector loads", "a stride, an extent or an address is no multiple of 16"),)
    if backend == "portable" and (converted := portable.converted(problem, device)):
        refused += (Refusal("8-bit matrix units", converted),)
    return refused


def _best(found: list[Candidate]) -> Candidate:
    """The fastest; but a queue instead of a static grid of several waves, where that costs next to nothing."""
    best = min(found, key=lambda candidate: candidate.predicted)
    if best.schedule.kind != "static" or best.schedule.grid.tiles <= best.schedule.workers:
        return best
    queues = [c for c in found if c.schedule.kind != "static"]
    queue = min(queues, key=lambda candidate: candidate.predicted, default=best)
    return queue if queue.predicted <= (1 + QUEUE_MAY_COST) * best.predicted else best


def _static_or_queue(best: Candidate, found: list[Candidate]) -> Refusal:
    """Why not the other of the two."""
    other = "dynamic" if best.schedule.kind == "static" else "static"
    seconds = min((c.predicted for c in found if c.schedule.kind == other and c.block == best.block), default=math.inf)
    if other == "dynamic":
        if best.schedule.grid.tiles <= best.schedule.workers:
            return Refusal(other, "a worker has one tile at most: there is nothing for a queue to even out")
        return Refusal(
            other, f"{seconds / best.predicted - 1:.1%} slower by the cost model, more than {QUEUE_MAY_COST:.0%}"
        )
    if seconds >= best.predicted:
        return Refusal(other, _NO_FASTER.format("stream_k") if best.schedule.kind == "stream_k" else NO_STATIC)
    gain = best.predicted / seconds - 1
    return Refusal(
        other, f"{gain:.1%} faster by the cost model on an idle device, and a late worker holds up its tiles"
    )


def _other_variant(best: Candidate, found: list[Candidate], problem: Problem, forced: list[str]) -> Refusal:
    if problem.arriving:
        return Refusal("inline", "chunks are waited for by workers, not by the calling thread")
    if problem.publishes is not None:
        return Refusal("inline", "chunks are signalled by workers, which complete one after the other")
    if forced:
        return Refusal("inline", f"{', '.join(forced)} given")
    other = _best([c for c in found if c.variant != best.variant])
    return Refusal(other.variant, _costs(other, best))


def _other_tiles(best: Candidate, found: list[Candidate]) -> tuple[Refusal, ...]:
    """The next best tile, if there was a choice."""
    others = [c for c in found if c.block != best.block]
    if not others:
        return ()
    other = _best(others)
    # The same rows and columns with another K of a stage is another tile, too.
    shown = other.block if other.block[:2] == best.block[:2] else other.block[:2]
    return (Refusal(f"{'x'.join(map(str, shown))} tiles", _costs(other, best)),)


def _costs(other: Candidate, best: Candidate) -> str:
    name = best.variant if best.variant != other.variant else f"{best.block[0]}x{best.block[1]}"
    return f"the cost model expects {other.predicted * 1e3:.3g} ms, {name} {best.predicted * 1e3:.3g} ms"


def _kinds(schedule: str, queues: int | None, shares: int | None) -> tuple[tuple[Kind, ...], tuple[Refusal, ...]]:
    if queues is not None and shares is not None:
        raise ValueError(
            f"queues={queues}, shares={shares}; queues are dynamic's, shares are stream_k's: force one of them"
        )
    for name, value, kind in (("queues", queues, "dynamic"), ("shares", shares, "stream_k")):
        if value is not None and schedule not in ("auto", kind):
            raise ValueError(f"{name}={value} with schedule={schedule!r}; it belongs to schedule={kind!r}")
    for kind in get_args(Kind):
        if (
            schedule == kind
            or (kind == "dynamic" and queues is not None)
            or (kind == "stream_k" and shares is not None)
        ):
            return (kind,), ()
    return ("dynamic", "stream_k"), (Refusal("static", NO_STATIC),)


def _no_stream_k(problem: Problem, backend: str, best: Candidate, found: list[Candidate]) -> Refusal:
    if backend == "hopper" and (why := hopper.no_parts(problem)):
        return Refusal("stream_k", why)
    same = next((c for c in found if c.schedule.kind == "stream_k" and c.block == best.block), None)
    if same is not None and not same.schedule.remainder:
        return Refusal(
            "stream_k", f"{best.schedule.grid.tiles} tiles on {best.schedule.workers} workers leave no remainder"
        )
    others = [c for c in found if c.schedule.kind == "stream_k"]
    if not others:
        return Refusal("stream_k", f"no registers for it beside a tile of {best.block[0]}x{best.block[1]}")
    other = _best(others)
    return Refusal(
        "stream_k",
        f"the cost model expects {other.predicted * 1e3:.3g} ms, {best.schedule.kind} {best.predicted * 1e3:.3g} ms",
    )
