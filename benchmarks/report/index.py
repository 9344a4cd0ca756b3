"""The first page: what is gained, and where a peer is ahead. Figures are those of the other pages' records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.core.records import Data, records
from benchmarks.distributed.dispatch_table import taken
from benchmarks.distributed.floors import judged
from benchmarks.report import attention, contention, gemm, grouped, rank_calls, tables
from benchmarks.report.notes import Notes
from benchmarks.report.tables import geomean, table, verdict

NOTES = Notes("index")
OPS = {"all_gather_matmul": "all-gather + matmul", "matmul_reduce_scatter": "matmul + reduce-scatter"}
AS_CALLED = {"gather": OPS["all_gather_matmul"], "sum": OPS["matmul_reduce_scatter"]}
#: What is gained: what, beside whom, on which device, the ratios, and the page.
Gain = tuple[str, str, str, list[float], str]


def page(results: Path) -> list[str]:
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for what, peer, device, ratios, page in gains(results):
        if ratios:
            means = rows.setdefault((f"[{what}]({page}.md)", peer), {})
            means[device] = f"{geomean(ratios):.3f} ({min(ratios):.3f})"
    devices = sorted({device for means in rows.values() for device in means}, key=lambda name: (" x " in name, name))
    lines = [[*row, *(means.get(device, "") for device in devices)] for row, means in rows.items()]
    compared = [NOTES("pictures"), NOTES("table"), table(["", "beside", *devices], lines)] if lines else []
    gained = "\n".join(short(results))
    behind_peers = "\n".join([*behind(results), NOTES("not amd")])
    head = [NOTES("page"), *([gained] if gained else []), NOTES("when not"), behind_peers]
    return [*head, *compared, NOTES("reading"), NOTES("pages")]


def short(results: Path) -> Iterator[str]:
    """The gains, a line each: the least and the most of the devices' means. A line needs its records."""
    means: dict[str, list[str]] = {}
    for what, _, _, ratios, _ in gains(results):
        if ratios:
            means.setdefault(what, []).append(f"{geomean(ratios):.2f}")
    figures = {what: " to ".join(sorted({min(found), max(found)})) for what, found in means.items()}
    for part in ("arriving", "shared", "collective", "attention", "alone"):
        with contextlib.suppress(KeyError):
            yield NOTES(f"gain {part}", **figures)


def device_of(data: Data) -> str:
    """The GPU's model, with the number of ranks where there are several."""
    return tables.device_of(data).partition(" 80GB")[0]


def gains(results: Path) -> Iterator[Gain]:
    """A row a record and class."""
    for data in records(results, "gemm_suite"):
        for what, least, most in (("M of 1024 and more", 1024, 1 << 30), ("M of 65 to 1023", 65, 1023),
                                  ("M of 1 to 64", 1, 64)):  # fmt: skip
            ratios = [row["ratio"] for row in data["rows"]
                      if least <= int(row["shape"].split("x")[0]) <= most and row["group"] != "odd"]  # fmt: skip
            yield f"GEMM, {what}", "cuBLAS", device_of(data), ratios, "gemm"
    for data in records(results, "gemm_fp8"):
        for scales in ("row", "tensor"):
            ratios = [row["ratio"] for row in data["rows"] if row["scales"] == scales]
            yield f"fp8, a scale a {scales}", "`torch._scaled_mm`", device_of(data), ratios, "gemm"
    for data in records(results, "gemm_random_*"):
        for what, name in (("random GEMM, 16 bits", "16-bit"), ("random GEMM, fp8", "fp8")):
            ratios = [row["ratio"] for row in data["rows"] if name in row["classes"]]
            yield f"{what}, seed {data['seed']}", "torch", device_of(data), ratios, "gemm_random"
    for data in records(results, "gemm_grouped"):
        for kind, rows in grouped.by_kind(data).items():
            yield (
                f"grouped matmul, {kind}",
                "`torch._grouped_mm`",
                device_of(data),
                [r["ratio"] for r in rows],
                "grouped",
            )
    for data in records(results, "gemm_experts"):
        ratios = [row["ratio"] for row in data["rows"] if row["kind"] == "swiglu"]
        yield "grouped matmul with SwiGLU", "`torch._grouped_mm`, SwiGLU", device_of(data), ratios, "grouped"
    for data in records(results, "gemm_epilogue"):
        yield "bias and GELU", "`torch.compile`", device_of(data), [row["ratio"] for row in data["rows"]], "gemm"
    for device, ratios in beside_neighbour(results):
        yield "GEMM beside a kernel on 4 to 64 SMs", "cuBLAS", device, ratios, "contention"
    for data in records(results, "attention"):
        ratios = [attention.ratio(row) for row in attention.dense_calls(data)]
        yield "attention prefill", "the faster of cuDNN and FA4", device_of(data), ratios, "attention"
    for data in records(results, "stream"):
        if data["folder"] != "cpu":
            ratios = [1 / row["of_in_turn"] for row in data["rows"]]
            yield "input copied while multiplied", "a copy, then cuBLAS", device_of(data), ratios, "arrival"
    for data in records(results, "all_gather_x*"):
        for op, what in OPS.items():
            ratios = [told.ratio for row in data["rows"] if row["op"] == op and (told := judged(row)) is not None]
            yield f"{what}, the host ahead", "the best of NCCL and torch", device_of(data), ratios, "distributed"
    for data in records(results, "calls_x*"):
        called = rank_calls.as_called(data)
        for op, what in AS_CALLED.items():
            ratios = [ratio for name, ratio in called.items() if name.startswith(f"{op} ")]
            yield f"{what}, as called", "the best of NCCL and torch", device_of(data), ratios, "distributed"


def beside_neighbour(results: Path) -> Iterator[tuple[str, list[float]]]:
    """Dynamic's rate by torch's, wherever SMs are held."""
    for sweep in contention.sweeps(results, "held"):
        points = contention.by_shape(sweep).values()
        pairs = [ways for by_taken in points for taken, ways in by_taken.items() if taken]
        ratios = [ways["dynamic"].tflops / ways["torch"].tflops for ways in pairs if {"dynamic", "torch"} <= set(ways)]
        yield device_of(sweep.about), ratios


def behind(results: Path) -> Iterator[str]:
    """Where a peer is ahead, or a call costs the host much."""
    if drawn := list(lost_of_random(results)):
        yield NOTES("not random", figures=", ".join(drawn))
    fp8 = {
        device_of(data): geomean(row["ratio"] for row in data["rows"] if row["scales"] == "tensor")
        for data in records(results, "gemm_fp8")
    }
    yield from _note("not fp8", fp8)
    sums = {device_of(data): two_shot(data) for data in records(results, "all_reduce_x*")}
    yield from _note("not all_reduce", sums)
    blocks = {
        device_of(data): data["rows"][-1]["ms"]["forward"]["torch"] / data["rows"][-1]["ms"]["forward"]["ours"]
        for data in records(results, "mlp_x*")
    }
    yield from _note("not mlp", blocks)
    for data in records(results, "calls_x*"):
        lost = [f"{name} {ratio:.2f}" for name, ratio in rank_calls.as_called(data).items() if ratio < 1]
        if lost:
            yield NOTES("not calls", figures=", ".join(lost), rows=len(data["rows"]), device=device_of(data))
    calls = [
        f"{row['us']['ts.mm']:.1f} and {row['us']['torch.mm']:.1f} ({device_of(data)})"
        for data in records(results, "gemm_host")
        for row in data["rows"][:1]
        if "ts.mm" in row.get("us", {})
    ]
    if calls:
        yield NOTES("not small", figures=", ".join(calls))
    natives = {device_of(data): [row["ratio"]["warm"] for row in data["rows"]] for data in gemm.native_calls(results)}
    slower = {device: [ratio for ratio in ratios if ratio > 1] for device, ratios in natives.items()}
    if any(slower.values()):
        found = [f"{len(its)} ({device}, at most {max(its):.2f} times)" for device, its in slower.items() if its]
        yield NOTES("not native", calls=max(map(len, natives.values())), figures=" and ".join(found))


def lost_of_random(results: Path) -> Iterator[str]:
    """How many random problems of 16 bits are faster by torch, of each record in which that is more than a half."""
    for data in records(results, "gemm_random_*"):
        rows = [row for row in data["rows"] if "16-bit" in row["classes"]]
        lost = [verdict(row["ratio"], row["band"]) for row in rows].count("lost")
        if 2 * lost > len(rows):
            yield f"{lost} of {len(rows)} ({device_of(data)}, seed {data['seed']})"


def two_shot(data: Data) -> float:
    """Torch's two shots by what the table decides: the geometric mean."""
    name = "torch two shot + mm"
    return geomean(row["ms"][name] / taken(row["op"], row["ms"]) for row in data["rows"] if name in row["ms"])


def _note(part: str, ratios: dict[str, float]) -> Iterator[str]:
    if found := [f"{ratio:.3f} ({device})" for device, ratio in ratios.items() if ratio < 1]:
        yield NOTES(part, figures=", ".join(found))
