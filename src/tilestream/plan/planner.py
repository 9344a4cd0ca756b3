"""`plan_problem`: candidates of the backends, of which the best becomes the plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar, get_args

from tilestream.core.device import DeviceProperties, cpu_properties
from tilestream.core.schedule import Kind
from tilestream.core.stream_k import remainder_tiles
from tilestream.plan import experimental, invariance, linked, realign, tuned
from tilestream.plan.additions import MMA, additions
from tilestream.plan.arrival_order import in_arrival_order
from tilestream.plan.candidate import FREE, ONE_TILE, Asked, Candidate, Forced, Refusal
from tilestream.plan.explain import log, number
from tilestream.plan.limit import is_invariant, workers_in, workers_of
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy import cdna_tiles, cpu, hopper, one_tile, portable
from tilestream.plan.problem import Problem

Found = TypeVar("Found")

#: The fast backends, as messages call them.
NAMES = {"hopper": "Hopper", "cdna": "CDNA"}
#: The share that a queue may cost on an idle device before a static grid is taken: a static grid loses 40 % where a
#: neighbour holds a few SMs.
QUEUE_MAY_COST = 0.01
_GIVEN = f"variant={ONE_TILE!r} given"
_NO_FASTER = "no faster than {} here, and a late worker would hold up its tiles"
NO_STATIC = _NO_FASTER.format("a queue")


@functools.lru_cache(maxsize=1024)
def plan_problem(problem: Problem, *asked: Any, **more: Any) -> Plan:
    """`plan` for a `Problem`; equal arguments give the same object.

    ``asked`` and ``more`` are the fields of `Asked`, in their order or by name.
    """
    how = Asked(*asked, **more)
    device = how.device or cpu_properties()
    if how.named_order == "arrival" and how.schedule == "auto":
        how = how._replace(schedule="dynamic")
    auto, on_cpu, arriving = how.schedule == "auto", device.backend == "cpu", bool(problem.arriving)
    promises = is_invariant(how.limit)
    kinds, refused = _kinds(how)
    arrives = "an operand arrives: a CU of each shader engine is its producers'" if arriving else ""
    count, limited, fewer = workers_of(device, how.workers, how.default_workers, how.limit, arrives)
    refused += fewer
    given = _given(how, limited)
    forced = how.backend or how.variant or how.stages or how.registers
    entry = None
    if how.consult and not (on_cpu or given or arriving or forced):
        entry = tuned.lookup(problem, device)
    if on_cpu:
        inline = not arriving and problem.publishes is None and not given
        forced_here = how.forced._replace(tile=cpu.promised_tile(how.tile, problem)) if promises else how.forced
        found = list(cpu.candidates(problem, device, count, kinds=kinds, inline=inline, forced=forced_here))
        name, elsewhere = "cpu", Refusal("GPU backends", "the operands are on the CPU")
    else:
        promised = _promised(problem, device) if promises else None
        if promised is not None and how.backend is None and (promised.additions.unit != MMA or problem.promoted):
            how = how._replace(backend=promised.backend if promised.backend != "hopper" else None)
        name, found, elsewhere = _on_gpu(problem, device, count, how, kinds, Wanted(promised, entry))
        if promised is not None:
            found, others = _keeping(problem, device, name, found, promised)
            refused += others
    ranking, why = ranked(found), f"least of {len(found)} candidates in the cost model"
    choice = Choice(problem, name, ranking, fastest(ranking))
    if not on_cpu and ranking and (incoming := linked.linked(problem)) is not None:
        best = fastest(linked.first_to_end(problem, incoming, ranking))
        if best is not choice.best:
            choice, why = replace(choice, best=best), f"of {len(found)} candidates the first to end behind the link"
    if entry is not None:
        choice, why, other = choice.as_measured(entry, why)
        refused += other
    if auto and (name == "hopper" or portable.by_model(problem, device)):
        refused = tuple(choice.static_or_queue() if r.what == "static" else r for r in refused)
    refused += choice.other_variant(given) if on_cpu else choice.other_tiles()
    if name == "hopper":
        refused += hopper.crossing(realign.realigned(problem, choice.best.realigned))
    if name == "portable" and not problem.aligned:
        vectors = "a stride, an extent or an address is no multiple of 16"
        if portable.in_vectors(problem, device):
            vectors += f"; copies are of {problem.vector} elements"
        refused += (Refusal("vector loads", vectors),)
    if name == "portable" and (converted := portable.converted(problem, device)):
        refused += (Refusal("8-bit matrix units", converted),)
    if problem.publishes is not None and name not in ("hopper", "cpu"):
        raise NotImplementedError(
            f"publishes: the {name} kernel signals no chunk of its output ({elsewhere.why}): launch them one by one"
        )
    best = choice.best
    if best.ctas > 1:
        why += "; pairs of CTAs, which on an H100 are slower than single ones"
    if best.variant == "triple":
        why += "; three consumers, which on an H200 gain nothing over two"
    if "stream_k" in kinds and best.kind != "stream_k" and best.variant != "inline":
        refused += (Refusal("stream_k", choice.why_no_stream_k()),)
    refused += (elsewhere,)
    if arriving:
        best, why_not = in_arrival_order(
            problem, name, best, how.forced.order is not None, how.named_order, how.queues
        )  # fmt: skip
        if why_not:
            refused += (Refusal("arrival order", why_not),)
    made = of_candidate(problem, device, name, best, why, refused)
    if promises:
        free = plan_problem(problem, *how._replace(limit=workers_in(how.limit)))
        made = replace(made, promise=invariance.cost(made.label, made.predicted, free.label, free.predicted))
    log(made)
    return made


def _promised(problem: Problem, device: DeviceProperties) -> Plan | None:
    """The plan whose order of additions is promised for a problem; None if there is at most one order."""
    if problem.is_empty or problem.k == 1:
        return None
    return plan_problem(invariance.plain(problem), schedule="dynamic", device=device, consult=False)


def _keeping(
    problem: Problem, device: DeviceProperties, name: str, found: list[Candidate], promised: Plan
) -> tuple[list[Candidate], tuple[Refusal, ...]]:
    """The candidates that add in the promised order, and the reasons against the others."""
    orders = [additions(problem, device, name, one) for one in found]
    why = problem.no_tma or ("" if problem.aligned else "a stride, an extent or an address is no multiple of 16")
    way_out = f"{why}: copy them (contiguous()), or pad K" if why else "leave tile=, variant= and backend= away"
    kept = invariance.keeping(found, orders, promised.additions, way_out)
    return kept, invariance.refused(orders, promised.additions)


def search_space(problem: Problem, device: DeviceProperties, workers: int | None = None) -> Iterator[Plan]:
    """The plans among which a GPU's cost model chooses. The model is fitted to them, and measured on them.

    Raises
    ------
    NotImplementedError
        If no kernel does such a problem.
    """
    count = workers or device.workers
    kinds: tuple[Kind, ...] = ("dynamic", "stream_k")
    if not realign.refusal(problem, device):
        for candidate in _of_hopper(problem, device, count, kinds, Forced(), auto=True):
            yield of_candidate(problem, device, "hopper", candidate, "one of the search space")
    if hopper.refusal(problem, device):
        for candidate in portable.candidates(problem, device, count, kinds=kinds):
            yield of_candidate(problem, device, "portable", candidate, "one of the search space")
    for candidate in one_tile.candidates(problem, device, count):
        yield of_candidate(problem, device, "portable", candidate, "one of the search space")


def _given(how: Asked, limited: bool) -> list[str]:
    """The caller's forced choices, by their names in messages."""
    given = {
        "workers": how.workers, "a limit of workers": limited and not how.workers, "schedule": how.schedule != "auto",
        "tile": how.tile, "order": how.order is not None, "queues": how.queues, "shares": how.shares,
        "invariance": is_invariant(how.limit),
    }  # fmt: skip
    return [name for name, value in given.items() if value]


def _kinds(how: Asked) -> tuple[tuple[Kind, ...], tuple[Refusal, ...]]:
    """The kinds of schedule that are tried, and the reasons against the others."""
    if is_invariant(how.limit):
        invariance.refuse_splits(how)
    if how.queues is not None and how.shares is not None:
        raise ValueError(
            f"queues={how.queues}, shares={how.shares}; queues are dynamic's, shares are stream_k's: force one of them"
        )
    owners: tuple[tuple[str, int | None, Kind], ...] = (
        ("queues", how.queues, "dynamic"), ("shares", how.shares, "stream_k"),
    )  # fmt: skip
    for name, value, kind in owners:
        if value is not None and how.schedule not in ("auto", kind):
            raise ValueError(f"{name}={value} with schedule={how.schedule!r}; it belongs to schedule={kind!r}")
        if value is not None:
            return (kind,), ()
    forced = tuple(kind for kind in get_args(Kind) if kind == how.schedule)
    if forced:
        return forced, ()
    if is_invariant(how.limit):
        return ("dynamic",), (Refusal("static", NO_STATIC), invariance.NO_STREAM_K)
    return ("dynamic", "stream_k"), (Refusal("static", NO_STATIC),)


# Backends ------------------------------------------------------------------------------------------------------------


def fast_or_portable(
    fast: str, backend: str | None, why_not: str, candidates: tuple[Callable[[], Iterable[Found]], ...],
    none_fits: Callable[[], str], leave: str,
) -> tuple[str, list[Found], Refusal]:  # fmt: skip
    """The device's ``fast`` backend, or else the portable one; its candidates; and the reason against the other one.

    ``why_not`` is the reason why the fast kernel cannot compute the problem, ``none_fits`` the reason why it has no
    candidate for the forced choices. If ``backend`` forces it in vain, the error says which argument to ``leave`` away.
    """
    why = why_not or experimental.refusal(fast, backend)
    of_fast, of_portable = candidates
    if backend != "portable" and not why:
        found = list(of_fast())
        if found:
            return fast, found, Refusal("portable", f"the {NAMES[fast]} kernel does this")
        why = none_fits()
    if backend in NAMES:
        raise NotImplementedError(f"backend={backend!r}: {why}; {leave}")
    return "portable", list(of_portable()), Refusal(fast, why or "backend='portable' given")


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a plan of any backend: the ``promised`` order of additions, or the measured plan."""

    promised: Plan | None = None
    entry: tuned.Entry | None = None

    @property
    def text(self) -> str:
        """The reason why another plan is not wanted."""
        measured = self.entry is not None
        return "tilestream tune measured it slower" if measured else "it adds in another order than is promised"

    def among(
        self, problem: Problem, device: DeviceProperties, backend: str, found: list[Candidate]
    ) -> list[Candidate]:  # fmt: skip
        """The wanted ones of a backend's candidates."""
        if self.entry is not None:
            measured = tuned.matching(self.entry, found)
            return [] if measured is None else [measured]
        if self.promised is None:
            return found
        order = self.promised.additions
        return [one for one in found if additions(problem, device, backend, one) == order]


_ANY = Wanted()


def _on_gpu(
    problem: Problem, device: DeviceProperties, workers: int, how: Asked, kinds: tuple[Kind, ...],
    wanted: Wanted = _ANY,
) -> tuple[str, list[Candidate], Refusal]:  # fmt: skip
    fast = "cdna" if device.arch.startswith("gfx") else "hopper"
    free = how.schedule == "auto" and how.queues is None and how.shares is None
    every: tuple[Kind, ...] = ("static", *kinds) if free else kinds
    of_portable = every if portable.by_model(problem, device) else kinds
    forced = how.forced

    def by_fast_kernel() -> Iterable[Candidate]:
        if fast == "cdna":
            return cdna_tiles.candidates(problem, device, workers, kinds=kinds, forced=forced)
        return _of_hopper(problem, device, workers, every, forced, auto=how.schedule == "auto")

    def by_portable_kernel() -> Iterable[Candidate]:
        return portable.candidates(problem, device, workers, kinds=of_portable, forced=forced)

    def of_one_tile(kinds: tuple[Kind, ...]) -> list[Candidate]:
        return list(one_tile.candidates(problem, device, workers, forced, kinds))

    if how.variant == ONE_TILE:
        found = of_one_tile(every) if how.queues is None and how.shares is None else []
        return "portable", _forced_to_one_tile(problem, device, found), Refusal(fast, _GIVEN)
    why = cdna_tiles.refusal(problem, device) if fast == "cdna" else realign.refusal(problem, device)
    if how.variant == "paired":
        why = why or hopper.no_pairs(problem, every, workers)
    if how.backend not in (None, fast, "portable"):
        why = f"it is not for {device.arch}"
    more = ", registers=" if forced.registers else ""
    name, found, elsewhere = fast_or_portable(
        fast, how.backend, why, (by_fast_kernel, by_portable_kernel),
        lambda: _no_candidate(problem, fast, kinds, forced),
        f"leave what is forced of backend=, variant=, stages={more}, tile= and schedule= away",
    )  # fmt: skip
    if how.backend is not None or not free or forced != FREE:
        return name, found, elsewhere
    if name == "hopper" and problem.not_by_tma:
        name, found, elsewhere = _copied_or_as_it_lies(problem, device, found, list(by_portable_kernel()), wanted)
    small = of_one_tile(("static",) if is_invariant(how.limit) else one_tile.KINDS)  # the promise cuts no K
    if name == "portable":
        return name, [*found, *small], elsewhere
    return _or_one_tile(problem, device, (name, found, elsewhere), small, wanted)


def _forced_to_one_tile(problem: Problem, device: DeviceProperties, found: list[Candidate]) -> list[Candidate]:
    """The candidates of the forced variant; `NotImplementedError` if there is none."""
    if found:
        return found
    why = one_tile.refusal(problem, device) or "it has no such tile or schedule here, and no queues"
    raise NotImplementedError(f"variant={ONE_TILE!r}: {why}; leave variant=, tile=, order=, schedule=, shares= away")


def _or_one_tile(
    problem: Problem, device: DeviceProperties, chosen: tuple[str, list[Candidate], Refusal], small: list[Candidate],
    wanted: Wanted,
) -> tuple[str, list[Candidate], Refusal]:  # fmt: skip
    """The Hopper kernel as ``chosen``, or a program a tile, whichever the cost model expects to be faster."""
    name, found, elsewhere = chosen
    of_small, of_found = wanted.among(problem, device, "portable", small), wanted.among(problem, device, name, found)
    if wanted.entry is not None and not of_small and not of_found:  # what was measured is gone
        of_small, of_found = small, found
    if not of_small:
        return chosen
    best, other = fastest(ranked(of_small)), fastest(ranked(of_found or found))
    here, with_one = f"{number(other.predicted * 1e3)} ms", f"{number(best.predicted * 1e3)} ms"
    if of_found and other.predicted <= best.predicted:
        why = f"{elsewhere.why}; with a program a tile the cost model expects {with_one}, {here} here"
        return name, found, Refusal(elsewhere.what, why)
    times = f"{here}, {with_one} with a program a tile"
    return "portable", small, Refusal(name, f"the cost model expects {times}" if of_found else wanted.text)


def _of_hopper(
    problem: Problem, device: DeviceProperties, workers: int, kinds: tuple[Kind, ...], forced: Forced, auto: bool
) -> Iterator[Candidate]:
    """Candidates of the Hopper kernel, with operands that are realigned first."""

    def make(left: Problem, how: Forced, operands: str, before: float) -> Iterator[Candidate]:
        return hopper.candidates(
            left, device, workers, kinds=kinds, forced=how, auto=auto, realigned=operands, before=before
        )

    return realign.candidates(problem, device, forced, make)


def _copied_or_as_it_lies(
    problem: Problem, device: DeviceProperties, copied: list[Candidate], as_it_lies: list[Candidate], wanted: Wanted
) -> tuple[str, list[Candidate], Refusal]:
    """The Hopper kernel on copies of operands that TMA cannot address, or the portable kernel on them as they lie."""
    of_copied = wanted.among(problem, device, "hopper", copied)
    of_others = wanted.among(problem, device, "portable", as_it_lies)
    if of_copied and not of_others:
        return "hopper", copied, Refusal("portable", wanted.text)
    if of_others and not of_copied:
        return "portable", as_it_lies, Refusal("hopper", f"{problem.no_tma}; with copies {wanted.text}")
    best, other = fastest(ranked(of_copied or copied)), fastest(ranked(of_others or as_it_lies))
    names = " and ".join(best.realigned.upper())
    first = f"{number(best.predicted * 1e3)} ms with {names} copied first"
    here = f"{number(other.predicted * 1e3)} ms on operands as they lie"
    if best.predicted <= other.predicted:
        return "hopper", copied, Refusal("portable", f"the cost model expects {here}, {first}")
    return "portable", as_it_lies, Refusal("hopper", f"{problem.no_tma}; the cost model expects {first}, {here}")


def _no_candidate(problem: Problem, backend: str, kinds: tuple[Kind, ...], forced: Forced) -> str:
    """The reason why a fast backend has no candidate for the forced choices."""
    tile, variant, stages, registers = forced.tile, forced.variant, forced.stages, forced.registers
    every = hopper.TILES if variant is None else (*hopper.TILES, *hopper.TRIPLE, *hopper.PAIRED)
    rows = [row for row in every if variant in (None, row.variant)]
    if registers:
        reasons = {hopper.no_registers(problem, registers, kind, forced.queues, row) for kind in kinds for row in rows}
        if why := min(reasons):
            return why
    why = ""
    if kinds == ("stream_k",):
        fit = [row for row in rows if tile in (None, (row.rows, row.columns), (row.columns, row.rows))]
        uncut = [hopper.no_parts(problem, row) for row in fit]
        why = hopper.no_parts(problem) or (uncut[0] if uncut and all(uncut) else "")
    if not why:
        why = _no_tile(backend, kinds, forced)
        if variant or stages:
            why += f" with variant={variant}, stages={stages}"
    return f"{why} with registers={registers}" if registers else why


def _no_tile(backend: str, kinds: tuple[Kind, ...], forced: Forced) -> str:
    if forced.tile is None:
        return "no tile of it fits"
    name = "x".join(map(str, forced.tile))
    ring_forced = forced.variant or forced.stages or forced.registers
    known = {(row.rows, row.columns) for row in hopper.TILES} if backend == "hopper" and not ring_forced else set()
    if forced.tile in known or forced.tile[::-1] in known:
        return f"a tile of {name} does not fit with {' or '.join(kinds)} here: registers, or shared memory"
    return f"it has no {name} tile here"


# The choice ----------------------------------------------------------------------------------------------------------


def ranked(found: Iterable[Candidate]) -> list[Candidate]:
    """Candidates by their predicted seconds; of equals the first stays the first."""
    return sorted(found, key=attrgetter("predicted"))


def fastest(ranking: Sequence[Candidate]) -> Candidate:
    """The first of ranked candidates; or a queue in place of a static grid of several waves, if that costs little."""
    best = ranking[0]
    if best.kind != "static" or best.tiles <= best.workers:
        return best
    queue = next((c for c in ranking if c.kind != "static"), best)
    return queue if queue.predicted <= (1 + QUEUE_MAY_COST) * best.predicted else best


@dataclass(frozen=True)
class Choice:
    """A backend's `ranked` candidates for a problem, the best of them, and the reasons against the others."""

    problem: Problem
    backend: str
    found: list[Candidate]
    best: Candidate

    def as_measured(self, entry: tuned.Entry, why: str) -> tuple[Choice, str, tuple[Refusal, ...]]:
        """The fastest candidate by `tilestream tune`, if it still exists; the reason; and the candidate it replaces."""
        measured = tuned.matching(entry, self.found)
        if measured is None:
            gone = "tilestream tune kept a plan that no longer exists: tune again"
            return self, why, (Refusal("what was measured", gone),)
        why = f"fastest of {entry['plans']} plans that tilestream tune measured here on {entry['date']}"
        if measured is self.best:
            return self, why, ()
        times = f"{entry['model_us']:.4g} us, this {entry['us']:.4g} us"
        refused = Refusal("the cost model's choice", f"measured: {times}")
        return Choice(self.problem, self.backend, self.found, measured), why, (refused,)

    def static_or_queue(self) -> Refusal:
        """The reason against a queue, or against a static grid."""
        best = self.best
        other: Kind = "dynamic" if best.kind == "static" else "static"
        alike = (c.predicted for c in self.found if c.kind == other and c.block == best.block)
        seconds = next(alike, math.inf)
        if best.ctas > 1:
            why = hopper.no_pairs(self.problem, (other,), best.ctas)
        elif best.variant == ONE_TILE and other == "static":
            whole = next((c for c in self.found if c.kind == other), None)
            why = "no program has so many K steps" if whole is None else self._costs(whole, "with shares of K")
        elif other == "dynamic" and best.tiles <= best.workers:
            why = "a worker has one tile at most: there is nothing for a queue to even out"
        elif other == "dynamic":
            slower = f"{seconds / best.predicted - 1:.1%}"
            why = f"{slower} slower by the cost model, more than {QUEUE_MAY_COST:.0%}"
        elif seconds >= best.predicted:
            why = _NO_FASTER.format("stream_k") if best.kind == "stream_k" else NO_STATIC
        else:
            faster = f"{best.predicted / seconds - 1:.1%}"
            why = f"{faster} faster by the cost model on an idle device, and a late worker holds up its tiles"
        return Refusal(other, why)

    def other_variant(self, given: list[str]) -> tuple[Refusal, ...]:
        """The reason against the calling thread, or against workers."""
        if self.problem.arriving:
            return (Refusal("inline", "chunks are waited for by workers, not by the calling thread"),)
        if self.problem.publishes is not None:
            return (Refusal("inline", "chunks are signalled by workers, which complete one after the other"),)
        if given:
            return (Refusal("inline", f"{', '.join(given)} given"),)
        other = fastest([c for c in self.found if c.variant != self.best.variant])
        return (Refusal(other.variant, self._costs(other, self.best.variant)),)

    def other_tiles(self) -> tuple[Refusal, ...]:
        """The reason against the next best tile, if there is a choice."""
        best, others = self.best, [c for c in self.found if c.block != self.best.block]
        if not others:
            return ()
        other = fastest(others)
        # The same rows and columns with another K of a stage is another tile, too.
        shown = other.block if other.tile == best.tile else other.tile
        name = best.variant if best.variant != other.variant else f"{best.block[0]}x{best.block[1]}"
        return (Refusal(f"{'x'.join(map(str, shown))} tiles", self._costs(other, name)),)

    def why_no_stream_k(self) -> str:
        """The reason why the last wave's tiles are not split along K."""
        best, ways = self.best, [c for c in self.found if c.kind == "stream_k"]
        if best.variant == ONE_TILE:
            return "a program has a tile, with all of its K: the cost model expects no gain of shares"
        if best.ctas > 1:
            return hopper.no_pairs(self.problem, ("stream_k",), best.ctas)
        if self.backend == "hopper" and (why := hopper.no_parts(self.problem)):
            return why
        same = next((c for c in ways if c.block == best.block), None)
        if same is not None and not remainder_tiles(same.tiles, same.workers):
            return f"{best.tiles} tiles on {best.workers} workers leave no remainder"
        if not ways:
            return f"no registers for it beside a tile of {best.block[0]}x{best.block[1]}"
        return self._costs(fastest(ways), best.kind)

    def _costs(self, other: Candidate, name: str) -> str:
        theirs, best = number(other.predicted * 1e3), number(self.best.predicted * 1e3)
        late = ""
        if other.predicted < self.best.predicted and linked.linked(self.problem) is not None:
            late = ", without the link; its last tiles end later"
        return f"the cost model expects {theirs} ms, {name} {best} ms{late}"
