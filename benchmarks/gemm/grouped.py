"""`tilestream.grouped_mm` beside `torch._grouped_mm` and a loop of `torch.mm`: layers of mixtures of experts, by skew.

``grouped`` has products and the gradients of weights. ``experts`` has the layers' first products with SwiGLU, and of 8
bits with blocks' scales. The loop knows the groups' sizes, which the others read on the device. Beside the products
stand the peers of `grouped_peers`, where they can be imported: each by its fastest configuration.

Tokens go to experts uniformly, mildly unevenly (each expert's weight is drawn from [0.5, 1.5]), or by Zipf's law
(weight 1 / rank**1.2, experts in random order). Group sizes follow from the seed of the skew.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

import tilestream as ts
from benchmarks.core.compiling import compile_ahead
from benchmarks.core.records import Row
from benchmarks.core.timing import Call, Timing, gpu_peak, host_microseconds, refuse_impossible
from benchmarks.gemm import grouped_peers
from benchmarks.gemm.bench import Bench, rounded
from benchmarks.gemm.deepgemm import refusal
from benchmarks.gemm.grouped_peers import Peer, Ways
from tilestream_tools.sweep.check import errors, sampled_rows

SEED = 0
#: By skew, the seed that group sizes are drawn by. Operands are drawn by `SEED`.
SKEWS = {"uniform": SEED, "mild": SEED, "zipf": SEED}
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


def sizes(rows: int, experts: int, skew: str) -> list[int]:
    """Rows of each expert, of ``rows`` in all."""
    generator = torch.Generator().manual_seed(SKEWS[skew])
    weights = {
        "uniform": torch.ones(experts), "mild": torch.rand(experts, generator=generator) + 0.5,
        "zipf": torch.arange(1, experts + 1).float() ** -ZIPF,
    }[skew]  # fmt: skip
    weights = weights[torch.randperm(experts, generator=generator)].double()
    ends = (weights.cumsum(0) / weights.sum() * rows).round().long()
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def operands(layer: Layer, gradient: bool, make: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a product, or of the gradient of the weights."""
    _, rows, n, k, experts = layer
    a, b = make(rows, k), make(rows, n) if gradient else make(experts, n, k).mT
    return a.t() if gradient else a, b


def drawn(
    layer: Layer, given: list[int], gradient: bool, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`operands` drawn by the seed, and where each of the ``given`` runs ends."""
    generator = torch.Generator(device).manual_seed(SEED)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    return *operands(layer, gradient, make), torch.tensor(given, device=device).cumsum(0).to(torch.int32)


def loop(a: torch.Tensor, b: torch.Tensor, given: list[int]) -> torch.Tensor:
    """A `torch.mm` a group."""
    along_k = b.dim() == 2
    out = a.new_empty(len(given), a.shape[0], b.shape[1]) if along_k else a.new_empty(a.shape[0], b.shape[2])
    for group, (end, size) in enumerate(zip(itertools.accumulate(given), given, strict=True)):
        run = slice(end - size, end)
        if along_k:
            torch.mm(a[:, run], b[run], out=out[group])
        else:
            torch.mm(a[run], b[group], out=out[run])
    return out


class Answers:
    """What answers are checked against: the error rule's reference for rows of the largest group, torch's for all."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, given: list[int], theirs: torch.Tensor) -> None:
        largest = max(range(len(given)), key=given.__getitem__)
        begin = sum(given[:largest])
        run = slice(begin, begin + given[largest])
        along_k = b.dim() == 2
        left, right = (a[:, run], b[run]) if along_k else (a[run], b[largest])
        self.part: int | slice = largest if along_k else run
        self.picked = sampled_rows(left.shape[0]).to(left.device)
        self.reference = left[self.picked].double() @ right.double()
        self.theirs = theirs

    def check(self, out: torch.Tensor) -> dict[str, float]:
        """The errors of an answer.

        Raises
        ------
        AssertionError
            If it is wrong.
        """
        figures = errors(out[self.part][self.picked], self.theirs[self.part][self.picked], self.reference)
        apart = (out.float() - self.theirs.float()).abs().max()
        if not apart <= 0.02 * self.reference.abs().max():
            raise AssertionError("another group than the largest differs from torch's")
        return figures


def row(bench: Bench, layer: Layer, skew: str, gradient: bool, peers: Sequence[Peer] = ()) -> Row:
    """One product; of a gradient, that of the weights. ``peers`` have products alone."""
    _, rows, n, k, experts = layer
    given = sizes(rows, experts, skew)
    a, b, ends = drawn(layer, given, gradient, bench.device)
    functions: dict[str, Call] = {
        "torch": lambda: torch._grouped_mm(a, b, ends), "ours": lambda: ts.grouped_mm(a, b, ends),
        "loop": lambda: loop(a, b, given),
    }  # fmt: skip
    right = Answers(a, b, given, functions["torch"]())
    figures, beside, refused = right.check(functions["ours"]()), {}, {}
    for peer in () if gradient else peers:
        try:
            functions[peer.name], beside[peer.name] = fastest(bench, peer.ways(a, b, given), right)
        except Exception as error:
            refused[peer.name] = refusal(error)
    host, _ = host_microseconds(functions, batch=8, batches=3) if not bench.dry else ({}, {})
    timing = bench.clock.interleave(functions, rounds=5 if bench.dry else 11)
    medians, operations = timing.medians(), 2 * rows * n * k
    tflops = {name: round(operations / seconds * 1e-12, 1) for name, seconds in medians.items()}
    if not bench.dry:
        refuse_impossible(layer.name, tflops, gpu_peak())
    made = ts.grouped_plan(
        k if gradient else rows, n, rows if gradient else k, experts, along="k" if gradient else "rows",
        device=bench.device,
    )  # fmt: skip
    return {
        "layer": layer.name, "shape": f"{rows}x{n}x{k}, {experts} experts", "skew": skew, "seed": SKEWS[skew],
        "kind": "gradient of weights" if gradient else "product", "largest_group": max(given),
        "empty_groups": given.count(0), "us": rounded(medians), "tflops": tflops, "host_us": host,
        "ratio": round(timing.median("torch") / timing.median("ours"), 4),
        "band": [round(x, 4) for x in timing.band("ours", "torch")],
        "to_loop": round(timing.median("loop") / timing.median("ours"), 4), "plan": made.label, "errors": figures,
        **({"peers": {name: about | to_peer(timing, name) for name, about in beside.items()}} if beside else {}),
        **({"refused": refused} if refused else {}),
    }  # fmt: skip


def fastest(bench: Bench, ways: Ways, right: Answers) -> tuple[Call, Row]:
    """The fastest of a peer's configurations whose answer is right, and what the record is told of it.

    Raises
    ------
    Exception
        What the last configuration raised, if none is right.
    """
    figures, works, refused = {}, {}, {}
    failed: Exception | None = None
    for name, call in ways.calls.items():
        try:
            figures[name] = right.check(ways.rows(call()))
            works[name] = call
        except Exception as error:
            failed, refused[name] = error, refusal(error)
    if not works:
        raise failed or ValueError("no configuration")
    name = next(iter(works))
    if len(works) > 1:
        medians = bench.clock.interleave(works, rounds=3).medians()
        name = min(medians, key=lambda one: medians[one])
    about: Row = {"config": name, "errors": figures[name], **ways.about}
    return works[name], about | ({"refused": refused} if refused else {})


def to_peer(timing: Timing, peer: str) -> Row:
    """A peer's time by ours."""
    ratio = timing.median(peer) / timing.median("ours")
    return {"ratio": round(ratio, 4), "band": [round(x, 4) for x in timing.band("ours", peer)]}


def unfused(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """SwiGLU as users write it: of torch's product."""
    gate, up = torch._grouped_mm(x, w, ends).chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def expert_row(bench: Bench, layer: Layer, skew: str, blocks: bool) -> Row:
    """SwiGLU of a product, or the product of 8 bits with scales of blocks; beside torch's of bfloat16."""
    _, rows, n, k, experts = layer
    given = sizes(rows, experts, skew)
    a, b, ends = drawn(layer, given, False, bench.device)
    most = max(range(experts), key=given.__getitem__)
    run = slice(sum(given[:most]), sum(given[: most + 1]))
    picked = sampled_rows(given[most]).to(a.device)
    functions: dict[str, Call]
    if blocks:
        a8, b8 = a.to(torch.float8_e4m3fn), b.mT.to(torch.float8_e4m3fn).mT
        scale_a = torch.rand(rows, -(-k // 128), device=a.device) + 0.5
        scale_b = torch.rand(experts, -(-n // 128), -(-k // 128), device=a.device).mT + 0.5
        wide = a8[run][picked].double() * scale_a[run][picked].double().repeat_interleave(128, 1)[:, :k]
        factor = scale_b[most].double().repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
        reference = wide @ (b8[most].double() * factor)
        functions = {
            "torch": lambda: torch._grouped_mm(a, b, ends),
            "ours": lambda: ts.grouped_mm(a8, b8, ends, scale_a=scale_a, scale_b=scale_b),
        }  # fmt: skip
    else:
        gate, up = (a[run][picked].double() @ b[most].double()).chunk(2, 1)
        reference = torch.nn.functional.silu(gate) * up
        functions = {
            "torch": lambda: unfused(a, b, ends), "ours": lambda: ts.grouped_mm(a, b, ends, activation="swiglu"),
        }  # fmt: skip
    answer = functions["ours"]()[run][picked].double()
    worst = ((answer - reference).abs().max() / reference.abs().max()).item()
    if not worst <= 0.02:
        raise AssertionError(f"{layer.name}: an error of {worst:.3g} of the largest element")
    host, _ = host_microseconds(functions, batch=8, batches=3) if not bench.dry else ({}, {})
    timing = bench.clock.interleave(functions, rounds=5 if bench.dry else 11)
    medians = timing.medians()
    made = ts.grouped_plan(
        rows, n, k, experts, dtype="float8_e4m3fn" if blocks else "bfloat16", scales="block" if blocks else "none",
        activation=None if blocks else "swiglu", device=bench.device,
    )  # fmt: skip
    return {
        "layer": layer.name, "shape": f"{rows}x{n}x{k}, {experts} experts", "skew": skew, "seed": SKEWS[skew],
        "kind": "blocks' scales" if blocks else "swiglu", "us": rounded(medians), "host_us": host,
        "tflops": {name: round(2 * rows * n * k / seconds * 1e-12, 1) for name, seconds in medians.items()},
        "ratio": round(timing.median("torch") / timing.median("ours"), 4),
        "band": [round(x, 4) for x in timing.band("ours", "torch")], "plan": made.label, "error": worst,
    }  # fmt: skip


def launches() -> dict[str, Callable[[], object]]:
    """What the section ``grouped`` launches, by name: a call of each product, of operands that nobody has written."""

    def made(layer: Layer, gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return operands(layer, gradient, functools.partial(torch.empty, device="cuda", dtype=torch.bfloat16))

    def call(layer: Layer, gradient: bool) -> None:
        a, b = made(layer, gradient)
        ts.grouped_mm(a, b, torch.zeros(layer.experts, device="cuda", dtype=torch.int32))

    def call_peer(peer: Peer, layer: Layer, name: str) -> None:
        peer.build(name)
        a, b = made(layer, False)
        for skew in SKEWS:  # its kernel may depend on how many rows there are with their padding
            peer.ways(a, b, sizes(layer.rows, layer.experts, skew)).calls[name]()

    found: dict[str, Callable[[], object]] = {
        f"{layer.name} {gradient}": functools.partial(call, layer, gradient)
        for layer in LAYERS
        for gradient in (False, True)
    }
    for peer in grouped_peers.found()[0]:
        found |= {
            f"{peer.name} {layer.name} {name}": functools.partial(call_peer, peer, layer, name)
            for layer in (LAYERS if peer.by_shape else LAYERS[2:3])
            for name in peer.configs
        }
    return found


def small(layer: Layer) -> Layer:
    """A layer of a dry run."""
    return layer._replace(
        rows=max(32, layer.rows // 128), n=layer.n // 64 // 16 * 16, k=layer.k // 64 // 16 * 16, experts=4
    )


def grouped(bench: Bench) -> None:
    """Products, then the gradients of weights."""
    layers = [small(layer) for layer in LAYERS[:2]] if bench.dry else LAYERS
    peers, absent = grouped_peers.found()
    for name, why in absent.items():
        print(f"without {name}: {why}", flush=True)
    if not bench.dry:
        limit = 150 if peers else 45  # nvcc takes longer than Triton
        compile_ahead("gemm", "grouped", "", str(bench.options.within), limit=limit)
    items = [(layer, skew, gradient) for gradient, layer, skew in itertools.product((False, True), layers, SKEWS)]
    about = {"peers": {peer.name: peer.version for peer in peers}, "absent": absent, "zipf": ZIPF, "seeds": SKEWS}
    bench.measure("grouped", items, lambda item: row(bench, *item, peers), **about)


def experts(bench: Bench) -> None:
    """SwiGLU, then blocks' scales, of the layers' first products."""
    layers = [layer for layer in LAYERS if "gate+up" in layer.name]
    layers = [small(layer) for layer in layers[:1]] if bench.dry else layers
    skews = ("uniform", "zipf")
    items = [(layer, skew, blocks) for blocks, layer, skew in itertools.product((False, True), layers, skews)]
    bench.measure("experts", items, lambda item: expert_row(bench, *item), zipf=ZIPF, seeds=SKEWS)
