"""The constants of the Hopper kernel's cost model, fitted to a sweep: ``run.py gemm fit RECORD...``. Needs no GPU.

::

    residuals:  log(expected / measured) of each candidate, those near a problem's best above all
    first:      Gauss-Newton in the logarithms of the constants, held near where they begin
    then:       each constant up and down by a few per cent, while what is lost by the model's choices falls
    printed:    the constants, as `tilestream.plan.policy.hopper_costs` has them; and what the choices cost, before and
                after, on the sweep and (by the records behind ``--beside``) on one that was not fitted to
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.core.records import Data, load
from benchmarks.gemm.draw import Draw
from benchmarks.gemm.plans import key_of, planned
from tilestream.core.device import DeviceProperties
from tilestream.core.gpu_specs import named
from tilestream.plan import realign
from tilestream.plan.candidate import FREE, Candidate, Forced
from tilestream.plan.policy import hopper
from tilestream.plan.policy.hopper_costs import Costs, Cut, Model, TileFacts, costs_of
from tilestream.plan.problem import Problem

#: Constants that a sweep does not show: the rate of pairs of CTAs, a number of lines, what a queue costs an item,
#: promoted sums, groups of K, and the launch of a copy, as its copies are long; the share of memory's rate, which
#: ``overlap`` would take over; and vectors of scales, which the problems of sweeps do not have. (Kernels until
#: 2026-11-30 read a scale a tensor as such.)
HELD = (
    "paired", "triple", "lines", "ticket", "promoted_loss", "feed_along_k", "memory", "copy", "scaled", "scaled_column",
)  # fmt: skip
#: Seconds that an empty kernel takes by the clock where the constants' launches were measured. Another machine's clock
#: may add more: what its record says of an empty kernel beyond this is taken off.
EMPTY = 3.1e-6
#: How much a candidate's residual counts that is so many times as slow as its problem's best: that to this power.
NEAR = -2.0
#: What holds a constant where it begins that the sweep does not show: a residual of this times the logarithm of its
#: change.
RIDGE = 0.03
#: Steps of Gauss-Newton at most; and the steps of each constant after that.
ROUNDS, STEPS = 25, (0.15, 0.05, 0.02)
#: What a constant's step must gain, of the mean logarithm: less is noise.
GAIN = 1e-4
#: Candidates that the model puts so near one another are as good as drawn by lot.
LOT = 0.01
KINDS = ("static", "dynamic", "stream_k")


class Way(NamedTuple):
    """What the model needs of a candidate; ``realigned``: the operands that are copied before."""

    realigned: str
    facts: TileFacts
    swap_ab: bool
    cut: Cut


class Measured(NamedTuple):
    """The candidates of a problem: what the model needs of each, and seconds."""

    problem: Problem
    device: DeviceProperties
    candidates: list[Way]
    seconds: np.ndarray

    def expected(self, costs: Costs) -> np.ndarray:
        """Seconds by the model."""
        models = {
            operands: (Model(realign.realigned(self.problem, operands), self.device, costs),
                       realign.seconds(self.problem, self.device, operands, costs))
            for operands in {way.realigned for way in self.candidates}
        }  # fmt: skip
        found = []
        for operands, *way in self.candidates:
            model, before = models[operands]
            found.append(before + model.seconds(*way))
        return np.array(found)


def device_of(data: Data) -> DeviceProperties | None:
    """The device of a record; None: one whose kernels the model does not cost."""
    return next((named(name) for name in ("h100", "h200") if name.upper() in data["device"]), None)


def of_problem(drawn: Draw, device: DeviceProperties, seconds: dict[str, float] | None = None) -> Measured:
    """A problem's candidates, those of ``seconds`` by their keys, or all."""
    problem = planned(drawn, device).problem

    def make(left: Problem, forced: Forced, operands: str, before: float) -> Iterator[Candidate]:
        return hopper.candidates(
            left, device, device.workers, kinds=KINDS, forced=forced, realigned=operands, before=before
        )

    found, taken = [], []
    may = not realign.refusal(problem, device)
    for one in realign.candidates(problem, device, FREE, make) if may else ():
        rows, columns = one.block[1::-1] if one.swap_ab else one.block[:2]
        tile = next(row for row in hopper.TILES if row[:3] == (one.variant, rows, columns))
        if seconds is None or (key := key_of(one)) in seconds:
            found.append(Way(one.realigned, hopper.facts_of(problem, device, tile), one.swap_ab, Cut.of(one.schedule)))
            taken.append(math.nan if seconds is None else seconds[key])
    return Measured(problem, device, found, np.array(taken))


def sweeps(records: Iterable[Data]) -> list[Measured]:
    """The problems of sweeps, those with two candidates at least that are there still."""
    found = []
    for data in records:
        device = device_of(data)
        late = 1e-6 * data["empty_us"]["eager"] - EMPTY
        for row in () if device is None else data["rows"]:
            seconds = {key: 1e-6 * us - late for key, _, us in row["plans"]}
            found.append(of_problem(Draw(*row["problem"]), device, seconds))
    return [one for one in found if len(one.candidates) > 1]


# What is minimised ----------------------------------------------------------------------------------------------------


def residuals(costs: Costs, problems: Sequence[Measured]) -> np.ndarray:
    """Of each candidate of each problem, weighted; each problem counts the same."""
    parts = []
    for one in problems:
        weights = (one.seconds / one.seconds.min()) ** NEAR
        parts.append(weights / np.sqrt((weights**2).sum()) * np.log(one.expected(costs) / one.seconds))
    return np.concatenate(parts)


def shares(costs: Costs, problems: Sequence[Measured]) -> np.ndarray:
    """Of each problem: the best candidate's time / that of the model's choice."""
    return np.array([one.seconds.min() / one.seconds[one.expected(costs).argmin()] for one in problems])


def lost(costs: Costs, problems: Sequence[Measured]) -> float:
    """The mean logarithm of what choices lose, where candidates within `LOT` are drawn by lot; and of the residuals."""
    found = []
    for one in problems:
        expected = np.log(one.expected(costs))
        chances = np.exp(-(expected - expected.min()) / LOT)
        found.append((chances / chances.sum()) @ np.log(one.seconds / one.seconds.min()))
    return float(np.mean(found)) + 0.05 * float(np.sqrt((residuals(costs, problems) ** 2).sum() / len(problems)))


def fit(problems: Sequence[Measured], start: Costs, names: Sequence[str] = ()) -> Costs:
    """The constants that suit some problems best, from ``start`` on; those of ``names``, or all but `HELD`."""
    names = names or [field.name for field in dataclasses.fields(Costs) if field.name not in HELD]

    def at(logs: np.ndarray) -> Costs:
        changed = {name: getattr(start, name) * math.exp(log) for name, log in zip(names, logs, strict=True)}
        return dataclasses.replace(start, **changed)

    def all_residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([residuals(at(logs), problems), RIDGE * logs])

    logs, damping = np.zeros(len(names)), 1e-2
    now = all_residuals(logs)
    for _ in range(ROUNDS):
        slopes = np.stack([(all_residuals(logs + 1e-4 * unit) - now) / 1e-4 for unit in np.eye(len(names))], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(names)), -slopes.T @ now)
        tried = all_residuals(logs + step)
        if tried @ tried < now @ now:
            gained, logs, now, damping = now @ now - tried @ tried, logs + step, tried, damping / 5
            if gained < 1e-6 * (now @ now):
                break
        else:
            damping *= 10
    least = lost(at(logs), problems)
    for size in STEPS:
        for unit in np.eye(len(names)):
            for sign in (size, -size):
                value = lost(at(logs + sign * unit), problems)
                if value < least - GAIN:
                    least, logs = value, logs + sign * unit
                    break
    return at(logs)


# Told -----------------------------------------------------------------------------------------------------------------


def told(costs: Costs, problems: Sequence[Measured]) -> str:
    """What the model's choices reach of the best, in a line."""
    found, far = shares(costs, problems), residuals(costs, problems)
    mean, error = float(np.exp(np.log(found).mean())), float(np.sqrt((far**2).sum() / len(problems)))
    return (
        f"{len(problems)} problems: {mean:.4f} of the best candidates, the worst {found.min():.3f}; off by {error:.1%}"
    )


def text_of(costs: Costs, start: Costs) -> str:
    """The constants that are not those of ``start``, as source."""
    changed = [
        f"{field.name}={getattr(costs, field.name):.4g}" for field in dataclasses.fields(Costs)
        if getattr(costs, field.name) != getattr(start, field.name)
    ]  # fmt: skip
    return f"Costs({', '.join(changed)})"


def main(arguments: list[str]) -> None:
    """Fit to the records that are named, of one device."""
    fitted, _, beside = " ".join(arguments).partition("--beside")
    data = [load(Path(name)) for name in fitted.split()]
    device = device_of(data[0]) if len({one["device"] for one in data}) == 1 else None
    if device is None:
        raise SystemExit("name sweeps of one device, an H100 or H200: python benchmarks/run.py gemm fit RECORD...")
    others = sweeps(load(Path(name)) for name in beside.split())
    problems, start = sweeps(data), costs_of(device)
    found = fit(problems, start)
    for what, costs in (("as it was", start), ("fitted", found)):
        print(f"{what}, {told(costs, problems)}")
        if others:
            print(f"{what}, not fitted to, {told(costs, others)}")
    print(text_of(found, start))
