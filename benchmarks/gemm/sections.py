"""Sections that time one call beside another: suite, fp8, epilogue; and what `quack` needs for the same."""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

import tilestream as ts
from benchmarks.core.timing import Call, Timing
from benchmarks.gemm.bench import FP8_WAYS, Bench, Row, fp8_operands, label, operands, rates, rounded
from benchmarks.gemm.draw import Draw
from benchmarks.gemm.shapes import EPILOGUE, FP8, Shape, refuse_impossible, rounds_for
from benchmarks.gemm.shapes import suite as all_shapes
from tilestream_tools.sweep.check import Check, poison

#: Seconds of samples of a shape; they set the width of the band.
SAMPLING = 1.0
#: Calls whose floor is below this are replayed from graphs.
GRAPH_BELOW = 50e-6


def timed(
    bench: Bench, shape: Shape | Draw, functions: dict[str, Call], check: Check, itemsize: int = 2, *,
    graphs: bool = True, sampling: float = SAMPLING,
) -> Timing:  # fmt: skip
    """Each function's times; ``ours`` is checked once more after them, impossible figures are refused."""
    floor = bench.peaks.floor(shape, itemsize)[0]
    rounds = rounds_for(1.5 * floor, len(functions), sampling)
    timing = bench.clock.interleave(functions, rounds=rounds, graphs=graphs and floor < GRAPH_BELOW)
    if "ours" in timing.results:
        check(timing.results.pop("ours"))
    else:
        poison(shape.outputs, shape.n, torch.bfloat16, bench.device)
        check(functions["ours"]())
    timing.results.clear()
    refuse_impossible(shape, bench.peaks, timing.medians(), itemsize)
    return timing


def compared(bench: Bench, shape: Shape | Draw, timing: Timing, peer: str, itemsize: int = 2) -> Row:
    """The figures of every row: times, rates, the floor, the ratio to ``peer`` and its band."""
    floor, binds = bench.peaks.floor(shape, itemsize)
    ours = timing.median("ours")
    return {
        "shape": str(shape),
        "timed": timing.mode,
        "rounds": timing.rounds,
        "us": rounded(timing.medians()),
        "ratio": round(timing.median(peer) / ours, 4),
        "band": [round(x, 4) for x in timing.band("ours", peer)],
        **rates(shape, timing, itemsize),
        "operations": shape.operations,
        "bytes": shape.bytes(itemsize),
        "floor_us": round(1e6 * floor, 2),
        "binds": binds,
        "of_floor": round(floor / ours, 3),
    }


def checked(a: torch.Tensor, b: torch.Tensor) -> tuple[Check, dict[str, float]]:
    """torch.mm's answer as the peer, and the errors of ours into an output that was NaN."""
    check = Check.of_product(a, b, torch.mm(a, b))
    out = torch.full_like(check.peer, float("nan"))
    ts.mm(a, b, out=out)
    return check, check(out)


def suite(bench: Bench) -> None:
    """`tilestream.mm` beside `torch.mm`, both allocating their output."""
    known = {bench.shape(shape)[:3]: bench.shape(shape) for shape in all_shapes()}
    shapes = [known.get(shape[:3], shape) for shape in bench.shapes(all_shapes())]
    compiled = bench.compile_ahead("mm", shapes)
    bench.measure("suite", shapes, lambda shape: suite_row(bench, shape), compile_seconds=round(compiled, 1))


def suite_row(bench: Bench, shape: Shape) -> Row:
    """One shape; decoding has the yardstick beside it."""
    a, w = operands(shape, bench.device)
    b = w.t()
    check, errors = checked(a, b)
    timing = timed(bench, shape, {"cublas": lambda: torch.mm(a, b), "ours": lambda: ts.mm(a, b)}, check)
    row = {"name": shape.name, "group": shape.group, "plan": label(shape)}
    row |= compared(bench, shape, timing, "cublas") | {"errors": errors}
    if shape.group == "decode" and not bench.dry:
        row["weight_read"] = yardstick(bench, w, timing)
    return row


def yardstick(bench: Bench, w: torch.Tensor, timing: Timing) -> Row:
    """How long a kernel takes that only reads the weight: the best of a few, timed as the row was."""
    from benchmarks.gemm import weight_read  # a Triton kernel

    for variant in weight_read.VARIANTS:
        weight_read.check(w, variant)
    functions: dict[str, Call] = {
        str(variant): lambda variant=variant: weight_read.read(w, variant) for variant in weight_read.VARIANTS
    }
    reading = bench.clock.interleave(functions, rounds=timing.rounds, graphs=timing.mode == "graph")
    best = min(reading.seconds, key=reading.median)
    seconds = reading.median(best)
    if w.nbytes / seconds > bench.peaks.bandwidth:
        raise AssertionError(f"weights read at {w.nbytes / seconds / 1e12:.2f} TB/s, above the peak")
    return {
        "us": round(1e6 * seconds, 2),
        "gbps": round(w.nbytes / seconds * 1e-9),
        "variant": best,
        "of_ours": round(seconds / timing.median("ours"), 4),
        "of_cublas": round(seconds / timing.median("cublas"), 4),
    }


def fp8(bench: Bench) -> None:
    """`tilestream.matmul` with float8_e4m3fn operands beside `torch._scaled_mm`."""
    shapes = bench.shapes(FP8)
    bench.compile_ahead("fp8", shapes)
    items = [(shape, *way) for shape in shapes for way in FP8_WAYS]
    bench.measure("fp8", items, lambda item: fp8_row(bench, *item), dtype="float8_e4m3fn, output bfloat16")


def fp8_row(bench: Bench, shape: Shape, scales: str, fast: bool) -> Row:
    a, b, given = fp8_operands(shape, bench.device, scales, fast)
    functions: dict[str, Call] = {
        "scaled_mm": lambda: torch._scaled_mm(a, b, **given),
        "ours": lambda: ts.matmul(a, b, **given),
    }
    check = Check.of_product(
        a.float(), b.float(), functions["scaled_mm"](),
        lambda x, rows: (
            x * given["scale_b"].double() * given["scale_a"][rows if scales == "row" else slice(None)].double()
        ),
    )  # fmt: skip
    poison(shape.m, shape.n, torch.bfloat16, bench.device)
    errors = check(functions["ours"]())
    timing = timed(bench, shape, functions, check, itemsize=1)
    row = {"scales": scales, "fast_accum": fast, "plan": label(shape, "float8_e4m3fn")}
    return row | compared(bench, shape, timing, "scaled_mm", itemsize=1) | {"errors": errors}


def epilogue(bench: Bench) -> None:
    """`tilestream.linear` with bias and activation beside torch.compile, each in its best mode."""
    items = [(bench.shape(shape), activation) for shape, activation in EPILOGUE]
    bench.compile_ahead("linear", dict.fromkeys(shape for shape, _ in items))
    bench.measure("epilogue", items, lambda item: epilogue_row(bench, *item))


def epilogue_row(bench: Bench, shape: Shape, activation: str) -> Row:
    x, w = operands(shape, bench.device)
    bias = torch.randn(shape.n, device=bench.device, dtype=x.dtype)
    approximate = "tanh" if activation == "gelu_tanh" else "none"

    def by_torch(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, bias), approximate=approximate)

    # Scaled so that the activation's inputs lie on both sides of zero.
    w.mul_(shape.k**-0.5)
    functions: dict[str, Call] = {
        "torch": lambda: by_torch(x, w, bias),
        "ours": lambda: ts.linear(x, w, bias, activation=activation),
        "ours, no epilogue": lambda: ts.linear(x, w),
    }
    refused: dict[str, str] = {}
    if not bench.dry:
        torch._dynamo.reset()
    for mode in () if bench.dry else ("default", "max-autotune-no-cudagraphs"):
        compiled = torch.compile(by_torch, mode=mode, dynamic=False)
        try:
            compiled(x, w, bias)
            functions[f"compile, {mode}"] = lambda compiled=compiled: compiled(x, w, bias)
        except Exception as error:
            refused[mode] = f"{type(error).__name__}: {error}"[:300]
    check = Check.of_product(
        x, w.t(), by_torch(x, w, bias), lambda y, _: F.gelu(y + bias.double(), approximate=approximate)
    )
    poison(shape.m, shape.n, x.dtype, bench.device)
    errors = check(functions["ours"]())
    timing = timed(bench, shape, functions, check, graphs=False)
    peers = [name for name in functions if name.startswith("compile")] or ["torch"]
    best = min(peers, key=timing.median)
    row = {"activation": activation, "plan": label(shape)}
    return row | compared(bench, shape, timing, best) | {"best": best, "errors": errors, "refused": refused}
