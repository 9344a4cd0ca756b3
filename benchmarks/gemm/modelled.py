"""The cost models of GEMM, as a fit sees them: constants, and the candidates that each expects times of.

========== ================================================ =============================================
model      its constants                                    candidates
========== ================================================ =============================================
hopper     `tilestream.plan.policy.hopper_costs.Costs`      the Hopper kernel's, realigned or not
persistent `tilestream.plan.policy.portable.Costs`          the portable kernel's, of persistent workers
one_tile   `tilestream.plan.policy.one_tile.Costs`          the portable kernel's, of a program a tile
========== ================================================ =============================================

The plan takes the candidate of which the least is expected, whichever model expects it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.gemm.draw import Draw
from benchmarks.gemm.plans import key_of, planned
from tilestream.core.device import DeviceProperties
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind
from tilestream.plan import realign
from tilestream.plan.candidate import FREE, Candidate, Forced
from tilestream.plan.planner import fastest, ranked
from tilestream.plan.policy import hopper, hopper_costs, one_tile, portable
from tilestream.plan.problem import Problem

KINDS: tuple[Kind, ...] = ("static", "dynamic", "stream_k")


class Constants(NamedTuple):
    """The constants of all models, by the models' names. Of equal candidates the first model's is taken."""

    hopper: hopper_costs.Costs
    persistent: portable.Costs
    one_tile: one_tile.Costs


def constants_of(device: DeviceProperties) -> Constants:
    """Those of today."""
    return Constants(hopper_costs.costs_of(device), portable.COSTS, one_tile.COSTS)


class Model(Protocol):
    """What a fit needs of a model and a problem: ``seconds`` of candidates, and what constants expect of these.

    ``best``: seconds of the problem's fastest candidate, of whichever model.
    """

    seconds: np.ndarray
    best: float

    def expected(self, costs: Any) -> np.ndarray:
        """Seconds by the model with these constants."""


@dataclass
class OfModel:
    """The measured candidates of a problem of one model; see `Model`."""

    problem: Problem
    device: DeviceProperties
    candidates: list[Candidate]
    seconds: np.ndarray
    best: float

    def expected(self, costs: Any) -> np.ndarray:
        """See `Model`."""
        raise NotImplementedError


class OfHopper(OfModel):
    """Those of the Hopper kernel."""

    @functools.cached_property
    def ways(self) -> list[tuple[str, hopper_costs.TileFacts, bool, hopper_costs.Cut]]:
        """What the model goes by, of each candidate, with the operands that are realigned first."""
        found = []
        for one in self.candidates:
            rows, columns = one.block[1::-1] if one.swap_ab else one.block[:2]
            tile = next(row for row in hopper.TILES if row[:3] == (one.variant, rows, columns))
            facts = hopper.facts_of(self.problem, self.device, tile)
            found.append((one.realigned, facts, one.swap_ab, hopper_costs.Cut.of(one.schedule)))
        return found

    def expected(self, costs: hopper_costs.Costs) -> np.ndarray:
        """See `Model`."""
        models = {
            operands: (hopper_costs.Model(realign.realigned(self.problem, operands), self.device, costs),
                       realign.seconds(self.problem, self.device, operands, costs))
            for operands in {realigned for realigned, *_ in self.ways}
        }  # fmt: skip
        found = []
        for operands, *way in self.ways:
            model, before = models[operands]
            found.append(before + model.seconds(*way))
        return np.array(found)


class OfPersistent(OfModel):
    """Those of the portable kernel of persistent workers."""

    @functools.cached_property
    def tiles(self) -> list[portable.Tile]:
        """Of each candidate."""
        rows = {(*row[:4], row.stages): row for row in portable.tiles(self.problem, self.device)}
        return [rows[(*one.block, one.warps, one.stages)] for one in self.candidates]

    def expected(self, costs: portable.Costs) -> np.ndarray:
        """See `Model`."""
        return np.array([
            portable.seconds(self.problem, self.device, one.schedule, tile, costs)
            for one, tile in zip(self.candidates, self.tiles, strict=True)
        ])  # fmt: skip


class OfOneTile(OfModel):
    """Those of the portable kernel whose programs have a tile each, or a part of one."""

    def expected(self, costs: one_tile.Costs) -> np.ndarray:
        """See `Model`."""
        ways: dict[one_tile.Tile, one_tile.Way] = {}
        rates, found = one_tile.rates_of(self.problem, self.device, costs), []
        for one in self.candidates:
            tile, parts = one_tile.Tile(*one.block, one.warps, one.stages), one.workers // one.tiles
            if tile not in ways:
                ways[tile] = one_tile.Way(self.problem, self.device, tile, rates, costs)
            found.append(ways[tile].seconds(cdiv(ways[tile].steps, parts), parts))
        return np.array(found)


#: By the names of `Constants`.
MODELS: dict[str, type[OfModel]] = {"hopper": OfHopper, "persistent": OfPersistent, "one_tile": OfOneTile}


class Ranked(NamedTuple):
    """What the planner goes by; and the candidate's seconds."""

    predicted: float
    kind: Kind
    tiles: int
    workers: int
    seconds: float


class Measured(NamedTuple):
    """A problem's candidates, by the names of `Constants`; without the models that have none."""

    models: dict[str, OfModel]

    @property
    def best(self) -> float:
        """Seconds of the fastest candidate."""
        return min(float(one.seconds.min()) for one in self.models.values())

    @property
    def count(self) -> int:
        """How many candidates there are."""
        return sum(len(one.candidates) for one in self.models.values())

    def chosen(self, constants: Constants) -> float:
        """Seconds of the candidate that is planned with these constants: of each model's choice the least expected."""
        found: list[Any] = []
        for name, one in self.models.items():
            expected = one.expected(getattr(constants, name))
            ways = zip(expected, one.candidates, one.seconds, strict=True)
            found.append(fastest(ranked([Ranked(us, c.kind, c.tiles, c.workers, took) for us, c, took in ways])))
        return float(ranked(found)[0].seconds)


def candidates_of(problem: Problem, device: DeviceProperties) -> Iterator[tuple[str, Candidate]]:
    """Each candidate with its model's name, of the space that `tilestream.plan.search_space` has, and static grids."""

    def make(left: Problem, forced: Forced, operands: str, before: float) -> Iterator[Candidate]:
        return hopper.candidates(
            left, device, device.workers, kinds=KINDS, forced=forced, realigned=operands, before=before
        )

    if not realign.refusal(problem, device):
        yield from (("hopper", one) for one in realign.candidates(problem, device, FREE, make))
    if hopper.refusal(problem, device):
        yield from (("persistent", one) for one in portable.candidates(problem, device, device.workers, kinds=KINDS))
    yield from (("one_tile", one) for one in one_tile.candidates(problem, device, device.workers))


def of_problem(drawn: Draw, device: DeviceProperties, took: Callable[[str, Candidate], float | None]) -> Measured:
    """A problem's candidates with what they took, by model and candidate; None: it was not measured."""
    problem = planned(drawn, device).problem
    found: dict[str, list[tuple[Candidate, float]]] = {name: [] for name in MODELS}
    for name, one in candidates_of(problem, device):
        if (seconds := took(name, one)) is not None:
            found[name].append((one, seconds))
    best = min((seconds for some in found.values() for _, seconds in some), default=0.0)
    return Measured({
        name: MODELS[name](problem, device, [one for one, _ in some], np.array([took for _, took in some]), best)
        for name, some in found.items() if some
    })  # fmt: skip


def by_keys(seconds: dict[str, float]) -> Callable[[str, Candidate], float | None]:
    """What candidates took by their keys, for `of_problem`."""
    return lambda _, one: seconds.get(key_of(one))
