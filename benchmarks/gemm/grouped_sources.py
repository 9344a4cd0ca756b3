"""Rows by source: the Hopper kernel beside the portable one, and beside one product of all rows, sorted by group.

Each of `SOURCES` brings an equal part of a layer's rows, by skew as in `grouped`, to a place that has room for all of
them: as if every rank's tokens went to as many ranks. *Signalled*: the launch looks at the signals of an arrival, all
of which are set before: what waiting costs where nothing is late.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import tilestream as ts
from benchmarks.core.compiling import compile_ahead
from benchmarks.core.records import Row
from benchmarks.core.timing import Call, gpu_peak, refuse_impossible
from benchmarks.gemm.bench import Bench, rounded
from benchmarks.gemm.grouped import LAYERS, SEED, Answers, Layer, sizes, small
from tilestream.arrival.flat import Awaited, FlatArrival
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import Epilogue, GroupedOperands
from tilestream.ops import gpu, grouped_library
from tilestream.plan.api import device_properties
from tilestream.plan.grouped import plan_groups
from tilestream.plan.plan import Plan

SOURCES = 8
SKEWS = ("uniform", "zipf")
BACKENDS = ("hopper", "portable")


def plan_of(x: GroupedOperands, device: DeviceProperties, backend: str, arrives: bool) -> Plan:
    """The plan of one of the kernels."""
    return plan_groups(replace(grouped_library.problem_of(x), arrives=arrives), device=device, backend=backend)


def operands(layer: Layer, sources: int, device: str) -> GroupedOperands:
    """Places of sources, the experts' weights, and an output; on a device with memory drawn by the seed, but counts."""
    _, rows, n, k, experts = layer
    shapes = (sources * rows, k), (experts, n, k), (sources * rows, n)
    counts = torch.zeros(sources, experts, dtype=torch.int32, device=device)
    if device == "meta":
        a, b, out = (torch.empty(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    else:
        generator = torch.Generator(device).manual_seed(SEED)
        a, b, out = (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes)
    return GroupedOperands(a, b.mT, out, Epilogue(), counts)


def by_group(given: list[int], sources: int, capacity: int) -> torch.Tensor:
    """The rows that are there in the order of the groups; each source has ``given`` rows in a place of ``capacity``."""
    group = torch.arange(len(given)).repeat_interleave(torch.tensor(given))
    rows = torch.arange(sources)[:, None] * capacity + torch.arange(len(group))
    return rows.flatten()[group.repeat(sources).argsort(stable=True)]


def ways(x: GroupedOperands, bench: Bench, awaited: Awaited) -> tuple[dict[str, Call], dict[str, Plan]]:
    """The launches of each kernel, and their plans; the CPU has one."""
    if bench.dry:
        return {"hopper": functools.partial(ts.grouped_mm, x.a, x.b, counts=x.offsets, out=x.out)}, {}
    device = device_properties(bench.device)
    plans = {
        backend + (", signalled" if arrives else ""): plan_of(x, device, backend, arrives)
        for backend, arrives in itertools.product(BACKENDS, (False, True))
    }
    calls: dict[str, Call] = {
        name: functools.partial(grouped_library.launch_of(plan, x), x, awaited if "signalled" in name else None)
        for name, plan in plans.items()
    }
    return calls, plans


def row(bench: Bench, layer: Layer, skew: str) -> Row:
    """A layer: the kernels with all there, and with signals."""
    sources = 2 if bench.dry else SOURCES
    x = operands(layer, sources, bench.device)
    given = sizes(layer.rows // sources, layer.experts, skew)
    x.offsets.copy_(torch.tensor(given, dtype=torch.int32))
    order = by_group(given, sources, layer.rows).to(bench.device)
    merged, total = x.a[order], [size * sources for size in given]
    ends = torch.tensor(total, device=bench.device).cumsum(0).to(torch.int32)
    arrival = ts.SourceArrival(x.offsets, layer.rows)
    for source in range(sources):
        arrival.signal_counts(source)
        arrival.signal_rows(source)
    awaited = Awaited.of(FlatArrival.of(arrival), None, 30.0, "grouped_mm", x.out.device)
    assert awaited is not None
    calls, plans = ways(x, bench, awaited)
    right = Answers(merged, x.b, total, torch._grouped_mm(merged, x.b, ends))
    figures = {}
    for name, call in calls.items():
        x.out.fill_(float("nan"))
        call()
        figures[name] = right.check(x.out[order])
    calls["sorted"] = lambda: ts.grouped_mm(merged, x.b, ends)
    timing = bench.clock.interleave(calls, rounds=5 if bench.dry else 11)
    ts.check()
    medians, operations = timing.medians(), 2 * layer.rows * layer.n * layer.k
    tflops = {name: round(operations / seconds * 1e-12, 1) for name, seconds in medians.items()}
    if not bench.dry:
        refuse_impossible(layer.name, tflops, gpu_peak())
    made: Row = {
        "layer": layer.name, "shape": f"{layer.rows}x{layer.n}x{layer.k}, {layer.experts} experts", "skew": skew,
        "sources": sources, "us": rounded(medians), "tflops": tflops, "errors": figures,
        "plans": {name: plan.label for name, plan in plans.items()},
    }  # fmt: skip
    for how in ("", ", signalled"):
        if f"portable{how}" in medians:
            fast, other = f"hopper{how}", f"portable{how}"
            made |= {
                f"ratio{how}": round(medians[other] / medians[fast], 4),
                f"band{how}": [round(one, 4) for one in timing.band(fast, other)],
            }
    return made


def launches(device: DeviceProperties) -> Iterator[Call]:
    """What the section launches, on the meta device."""
    for layer in LAYERS:
        x = operands(layer, SOURCES, "meta")
        ahead: Any = gpu.awaited_ahead(FlatArrival.of(ts.SourceArrival(x.offsets, layer.rows)))
        for backend, arrives in itertools.product(BACKENDS, (False, True)):
            launch = grouped_library.launch_of(plan_of(x, device, backend, arrives), x)
            yield functools.partial(launch, x, ahead if arrives else None)


def grouped_sources(bench: Bench) -> None:
    """All layers, evenly and by Zipf's law."""
    layers = [small(layer) for layer in LAYERS[:2]] if bench.dry else LAYERS
    if not bench.dry:
        compile_ahead("gemm", "grouped_sources", "", str(bench.options.within), limit=90)
    bench.measure("grouped_sources", list(itertools.product(layers, SKEWS)), lambda item: row(bench, *item))
