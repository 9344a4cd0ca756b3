"""`tilestream.grouped_mm` beside `torch._grouped_mm`: layers of mixtures of experts, by skew; products and gradients.

Tokens go to experts uniformly, mildly unevenly (each expert's weight is drawn from [0.5, 1.5]), or by Zipf's law
(weight 1 / rank**1.2, experts in random order). Group sizes follow from the row's seed.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

import tilestream as ts
from benchmarks.core.records import Row
from benchmarks.core.timing import Call, gpu_peak, host_microseconds, refuse_impossible
from benchmarks.gemm.bench import Bench, rounded
from tilestream_tools.sweep.check import errors, sampled_rows

SKEWS = ("uniform", "mild", "zipf")
SEED = 0
#: The exponent of Zipf's law.
ZIPF = 1.2


class Layer(NamedTuple):
    """``[rows, k] @ [experts, k, n]``: rows are tokens times experts a token."""

    name: str
    rows: int
    n: int
    k: int
    experts: int


LAYERS = (
    Layer("Mixtral 8x7B gate+up", 8192, 28672, 4096, 8),
    Layer("Mixtral 8x7B down", 8192, 4096, 14336, 8),
    Layer("Qwen3-30B-A3B gate+up", 16384, 1536, 2048, 128),
    Layer("Qwen3-30B-A3B down", 16384, 2048, 768, 128),
    Layer("DeepSeek-V3 gate+up, 32 of 256", 16384, 4096, 7168, 32),
    Layer("DeepSeek-V3 down, 32 of 256", 16384, 7168, 2048, 32),
    Layer("gpt-oss-120b gate+up", 16384, 5760, 2880, 128),
    Layer("gpt-oss-120b down", 16384, 2880, 2880, 128),
    Layer("Mixtral 8x7B gate+up, decode", 128, 28672, 4096, 8),
    Layer("Qwen3-30B-A3B gate+up, decode", 512, 1536, 2048, 128),
    Layer("DeepSeek-V3 gate+up, decode", 512, 4096, 7168, 32),
    Layer("gpt-oss-120b gate+up, decode", 256, 5760, 2880, 128),
)


def sizes(rows: int, experts: int, skew: str, seed: int = SEED) -> list[int]:
    """Rows of each expert, of ``rows`` in all."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "uniform": torch.ones(experts), "mild": torch.rand(experts, generator=generator) + 0.5,
        "zipf": torch.arange(1, experts + 1).float() ** -ZIPF,
    }[skew]  # fmt: skip
    weights = weights[torch.randperm(experts, generator=generator)].double()
    ends = (weights.cumsum(0) / weights.sum() * rows).round().long()
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def row(bench: Bench, layer: Layer, skew: str, gradient: bool) -> Row:
    """One product; of a gradient, that of the weights."""
    _, rows, n, k, experts = layer
    generator = torch.Generator(bench.device).manual_seed(SEED)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=bench.device, dtype=torch.bfloat16)

    given = sizes(rows, experts, skew)
    ends = torch.tensor(given, device=bench.device).cumsum(0).to(torch.int32)
    a, b = make(rows, k), make(rows, n) if gradient else make(experts, n, k).mT
    a = a.t() if gradient else a
    functions: dict[str, Call] = {
        "torch": lambda: torch._grouped_mm(a, b, ends), "ours": lambda: ts.grouped_mm(a, b, ends),
    }  # fmt: skip
    largest = max(range(experts), key=given.__getitem__)
    begin = sum(given[:largest])
    run = slice(begin, begin + given[largest])
    answers = {name: call() for name, call in functions.items()}
    parts = {name: out[largest] if gradient else out[run] for name, out in answers.items()}
    left, right = (a[:, run], b[run]) if gradient else (a[run], b[largest])
    picked = sampled_rows(left.shape[0]).to(left.device)
    reference = left[picked].double() @ right.double()
    figures = errors(parts["ours"][picked], parts["torch"][picked], reference)
    if (answers["ours"].float() - answers["torch"].float()).abs().max() > 0.02 * reference.abs().max():
        raise AssertionError("another group than the largest differs from torch's")
    host, _ = host_microseconds(functions, batch=8, batches=5) if not bench.dry else ({}, {})
    timing = bench.clock.interleave(functions, rounds=5 if bench.dry else 15)
    medians, operations = timing.medians(), 2 * rows * n * k
    tflops = {name: round(operations / seconds * 1e-12, 1) for name, seconds in medians.items()}
    if not bench.dry:
        refuse_impossible(layer.name, tflops, gpu_peak())
    made = ts.grouped_plan(
        k if gradient else rows, n, rows if gradient else k, experts, along="k" if gradient else "rows",
        device=bench.device,
    )  # fmt: skip
    return {
        "layer": layer.name, "shape": f"{rows}x{n}x{k}, {experts} experts", "skew": skew, "seed": SEED,
        "kind": "gradient of weights" if gradient else "product", "largest_group": max(given),
        "empty_groups": given.count(0), "us": rounded(medians), "tflops": tflops, "host_us": host,
        "ratio": round(timing.median("torch") / timing.median("ours"), 4),
        "band": [round(x, 4) for x in timing.band("ours", "torch")], "plan": made.label, "errors": figures,
    }  # fmt: skip


def small(layer: Layer) -> Layer:
    """A layer of a dry run."""
    return layer._replace(
        rows=max(32, layer.rows // 128), n=layer.n // 64 // 16 * 16, k=layer.k // 64 // 16 * 16, experts=4
    )


def grouped(bench: Bench) -> None:
    """Products, then the gradients of weights."""
    layers = [small(layer) for layer in LAYERS[:2]] if bench.dry else LAYERS
    items = [(layer, skew, gradient) for gradient, layer, skew in itertools.product((False, True), layers, SKEWS)]
    bench.measure("grouped", items, lambda item: row(bench, *item), zipf=ZIPF)
