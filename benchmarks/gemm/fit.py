"""The constants of GEMM's cost models, fitted to sweeps: ``run.py gemm fit RECORD...``. Needs no GPU.

::

    of each model, by the times of its own candidates:
        residuals:  log(expected / measured) of each candidate, those near a problem's best above all
        first:      Gauss-Newton in the logarithms of the constants, held near where they begin
        then:       each constant up and down by a few per cent, while what is lost by the model's choices falls
    printed:    the constants, as the policies have them; and what the choice among the candidates of all models
                costs, before and after, on the sweeps and (by the records behind ``--beside``) on others

`benchmarks.gemm.modelled` has the models. The Hopper kernel's are fitted to ``gemm sweep``, the portable ones' to
``gemm sweep --small``; a model without candidates in the records keeps its constants.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.core.records import Data, load
from benchmarks.gemm.draw import Draw
from benchmarks.gemm.modelled import Constants, Measured, Model, by_keys, constants_of, of_problem
from tilestream.core.device import DeviceProperties
from tilestream.core.gpu_specs import named
from tilestream.plan.policy import hopper_costs, one_tile, portable

Costs = TypeVar("Costs", hopper_costs.Costs, portable.Costs, one_tile.Costs)

#: Constants that a sweep does not show. Of the Hopper kernel's the rate of pairs of CTAs, a number of lines, what a
#: queue costs an item, promoted sums, groups of K, and the launch of a copy, as its copies are long; the share of
#: memory's rate, which ``overlap`` would take over; and vectors of scales, which the problems of sweeps do not have.
#: (Kernels until 2026-11-30 read a scale a tensor as such.) Of the portable ones' 8 bits that lie across K, and what
#: follows from the device.
HELD: dict[type, tuple[str, ...]] = {
    hopper_costs.Costs: (
        "paired", "triple", "lines", "ticket", "promoted_loss", "feed_along_k", "memory", "copy", "scaled",
        "scaled_column",
    ),
    portable.Costs: ("across_loss", "beside_memory"),
    one_tile.Costs: ("clusters_of_4", "clusters_of_8", "memory"),
}  # fmt: skip
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


def device_of(data: Data) -> DeviceProperties | None:
    """The device of a record; None: one whose kernels the model does not cost."""
    return next((named(name) for name in ("h100", "h200") if name.upper() in data["device"]), None)


def sweeps(records: Iterable[Data]) -> list[Measured]:
    """The problems of sweeps, those with two candidates at least that are there still."""
    found = []
    for data in records:
        device = device_of(data)
        late = 1e-6 * data["empty_us"]["eager"] - EMPTY
        for row in () if device is None else data["rows"]:
            seconds = {key: 1e-6 * us - late for key, _, us in row["plans"]}
            found.append(of_problem(Draw(*row["problem"]), device, by_keys(seconds)))
    return [one for one in found if one.count > 1]


def of_model(problems: Iterable[Measured], name: str) -> list[Model]:
    """The candidates of one model, of the problems with two at least."""
    found = (one.models[name] for one in problems if name in one.models)
    return [one for one in found if len(one.seconds) > 1]


# What is minimised ----------------------------------------------------------------------------------------------------


def weight(one: Model) -> float:
    """What a problem counts: the less, the slower the model's own best is beside another model's."""
    return float((one.seconds.min() / one.best) ** NEAR)


def residuals(costs: Any, problems: Sequence[Model]) -> np.ndarray:
    """Of each candidate of each problem, weighted; but for `weight` each problem counts the same."""
    parts = []
    for one in problems:
        weights = (one.seconds / one.seconds.min()) ** NEAR
        share = weight(one) * weights / np.sqrt((weights**2).sum())
        parts.append(share * np.log(one.expected(costs) / one.seconds))
    return np.concatenate(parts)


def error(costs: Any, problems: Sequence[Model]) -> float:
    """How far a model is off: the root mean square of the logarithm."""
    counted = sum(weight(one) ** 2 for one in problems)
    return float(np.sqrt((residuals(costs, problems) ** 2).sum() / counted))


def shares(constants: Constants, problems: Sequence[Measured]) -> np.ndarray:
    """Of each problem: the best candidate's time / that of the choice among the candidates of all models."""
    return np.array([one.best / one.chosen(constants) for one in problems])


def lost(costs: Any, problems: Sequence[Model]) -> float:
    """The mean logarithm of what choices lose, where candidates within `LOT` are drawn by lot; and of the residuals."""
    found = []
    for one in problems:
        expected = np.log(one.expected(costs))
        chances = np.exp(-(expected - expected.min()) / LOT)
        found.append(weight(one) * (chances / chances.sum()) @ np.log(one.seconds / one.seconds.min()))
    return float(np.sum(found)) / sum(map(weight, problems)) + 0.05 * error(costs, problems)


def fit(problems: Sequence[Model], start: Costs, names: Sequence[str] = ()) -> Costs:
    """The constants that suit some problems best, from ``start`` on; those of ``names``, or all but `HELD`."""
    names = names or [field.name for field in dataclasses.fields(start) if field.name not in HELD[type(start)]]

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


def told(constants: Constants, problems: Sequence[Measured]) -> str:
    """What the choices reach of the best, and how far each model is off, in a line."""
    found = shares(constants, problems)
    of_models = {name: some for name in Constants._fields if (some := of_model(problems, name))}
    off = ", ".join(f"{name} {error(getattr(constants, name), some):.1%}" for name, some in of_models.items())
    return (
        f"{len(problems)} problems: {np.exp(np.log(found).mean()):.4f} of the best candidates, "
        f"the worst {found.min():.3f}; off by {off}"
    )


def text_of(costs: Costs, start: Costs) -> str:
    """The constants that are not those of ``start``, as source."""
    changed = [
        f"{field.name}={getattr(costs, field.name):.4g}" for field in dataclasses.fields(start)
        if getattr(costs, field.name) != getattr(start, field.name)
    ]  # fmt: skip
    return f"{type(costs).__module__.rpartition('.')[2]}.Costs({', '.join(changed)})"


def main(arguments: list[str]) -> None:
    """Fit to the records that are named, of one device."""
    fitted, _, beside = " ".join(arguments).partition("--beside")
    data = [load(Path(name)) for name in fitted.split()]
    device = device_of(data[0]) if len({one["device"] for one in data}) == 1 else None
    if device is None:
        raise SystemExit("name sweeps of one device, an H100 or H200: python benchmarks/run.py gemm fit RECORD...")
    others = sweeps(load(Path(name)) for name in beside.split())
    problems, start = sweeps(data), constants_of(device)
    some = {name: of_model(problems, name) for name in Constants._fields}
    found = start._replace(**{name: fit(of, getattr(start, name)) for name, of in some.items() if of})
    for what, constants in (("as it was", start), ("fitted", found)):
        print(f"{what}, {told(constants, problems)}")
        if others:
            print(f"{what}, not fitted to, {told(constants, others)}")
    for name, of in some.items():
        if of:
            print(text_of(getattr(found, name), getattr(start, name)))
