"""What the processes of `selfcheck` answer: machine, what its compiler made of the kernels, speeds beside torch's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import tilestream as ts
from benchmarks.core.records import about
from benchmarks.core.timing import GpuClock, host_microseconds, medians, rates
from tilestream.plan.api import device_properties
from tilestream_tools.sweep.check import errors

#: Problems whose plans the report has.
PLANNED = (("bfloat16", 4096, 4096, 4096), ("bfloat16", 8192, 8192, 8192), ("bfloat16", 4096, 4864, 8256))


def main(arguments: list[str]) -> None:
    answers: dict[str, Callable[..., dict[str, Any]]] = {
        "machine": machine, "isa": isa, "speed": speed, "attend": attend
    }  # fmt: skip
    print(json.dumps(answers[arguments[0]](*arguments[1:])), flush=True)


def machine() -> dict[str, Any]:
    """The machine, its versions, and the plans of a few shapes."""
    from tilestream_tools.cli.doctor import BACKENDS, backend

    if not torch.cuda.is_available():
        return {"error": "torch sees no GPU here: nothing to check"}
    found = torch.cuda.get_device_properties(0)
    device = device_properties("cuda")
    plans = {
        f"{dtype} {m}x{n}x{k}": ts.plan(m, n, k, dtype=dtype, device="cuda", layout="nt").explain()
        for dtype, m, n, k in PLANNED
    }
    return {
        **{key: value for key, value in about("selfcheck").items() if key not in ("name", "dtype")},
        "devices": torch.cuda.device_count(),
        "arch": device.arch,
        "units": device.workers,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": driver(),
        "properties": {"clock_ghz": device.clock / 1e9, "bandwidth_tb": device.bandwidth / 1e12, "xcds": device.xcds},
        "backends": {name: backend(name) for name in BACKENDS},
        "plans": plans,
    }


def driver() -> str:
    """The kernel driver's version, as the system has it."""
    for file in ("/sys/module/amdgpu/version", "/sys/module/nvidia/version", "/opt/rocm/.info/version"):
        if Path(file).is_file():
            return f"{file}: {Path(file).read_text(encoding='utf-8').strip()}"
    return "unknown"


def isa() -> dict[str, Any]:
    """What the compiler made of the kernels of this device's arch."""
    from tilestream_tools.isa import report
    from tilestream_tools.isa.kernels import KERNELS, CompileRequest

    arch = device_properties("cuda").arch
    arch = "sm_90a" if arch == "sm_90" else arch
    fit = [name for name, entry in KERNELS.items() if arch in entry.archs]
    made: dict[str, Any] = {"arch": arch}
    for name in fit:
        found = asdict(report.of(name, CompileRequest(arch)))
        made[name] = {key: found[key] for key in ("plan", "registers", "spilled", "shared", "loop", "cycles", "triton")}
    return made


def speed(dtype: str, m: str, n: str, k: str, backend: str = "") -> dict[str, Any]:
    """Ours beside torch.mm, B as a Linear weight lies; by ``backend``, or by the one that the plan takes."""
    rows, columns, depth = int(m), int(n), int(k)
    kind = getattr(torch, dtype)
    a = torch.randn(rows, depth, device="cuda", dtype=kind)
    b = torch.randn(columns, depth, device="cuda", dtype=kind).t()
    out = torch.empty(rows, columns, device="cuda", dtype=kind)
    try:
        plan = ts.plan(rows, columns, depth, dtype=kind, device="cuda", layout="nt", backend=backend or None)
    except NotImplementedError as error:
        if not backend:
            raise
        return {"refused": str(error)}
    some = min(rows, 512)
    figures = errors(plan.run(a, b)[:some], torch.mm(a, b)[:some], a[:some].double() @ b.double())
    operations = 2.0 * rows * columns * depth
    return timed(plan, operations, lambda: plan.run(a, b, out=out), lambda: torch.mm(a, b, out=out), figures)


def attend(
    batch: str, heads: str, heads_kv: str, length: str, dim: str, causal: str, backend: str = ""
) -> dict[str, Any]:
    """`tilestream.attention` beside torch's; by ``backend``, or by the one that the plan takes."""
    os.environ["TILESTREAM_CDNA"] = "1" if backend == "cdna" else "0"
    sequences, rows, columns, masked = int(batch), int(length), int(dim), causal == "True"
    shape = {"batch": sequences, "heads_q": int(heads), "heads_kv": int(heads_kv), "head_dim": columns}
    try:
        plan = ts.attention_plan(rows, **shape, causal=masked, device="cuda", backend=backend or None)
    except NotImplementedError as error:
        if not backend:
            raise
        return {"refused": str(error)}
    q, k, v = (
        torch.randn(sequences, rows, int(of), columns, device="cuda", dtype=torch.bfloat16)
        for of in (heads, heads_kv, heads_kv)
    )
    turned = [x.transpose(1, 2) for x in (q, k, v)]

    def theirs() -> Any:
        return functional.scaled_dot_product_attention(*turned, is_causal=masked, enable_gqa=heads != heads_kv)

    # The last queries of one head: they see the most keys.
    some = slice(max(rows - 512, 0), rows)
    scores = q[0, some, 0].double() @ k[0, :, 0].double().t() * columns**-0.5
    if masked:
        position = torch.arange(rows, device=q.device)
        seen = position[None] <= position[some, None]
        scores = scores.masked_fill(~seen, float("-inf"))
    figures = errors(
        ts.attention(q, k, v, causal=masked)[0, some, 0], theirs()[0, 0, some], scores.softmax(1) @ v[0, :, 0].double()
    )
    operations = 4.0 * sequences * int(heads) * rows * rows * columns * (0.5 if masked else 1.0)
    return timed(plan, operations, lambda: ts.attention(q, k, v, causal=masked), theirs, figures)


def timed(
    plan: Any, operations: float, ours: Callable[[], object], theirs: Callable[[], object], figures: Any
) -> dict[str, Any]:
    ms = medians(GpuClock().interleave({"ours": ours, "torch": theirs}, rounds=15).seconds, 4)
    found = rates(operations, ms)
    kind = getattr(plan.problem, "kind", plan.problem.dtype)
    peak = plan.device.peak(kind, plan.device.workers) / 1e12
    if max(found.values()) > 1.1 * peak:
        return {"error": f"{found} TFLOP/s are above the peak of {peak:.0f}: the answer or the timing is wrong"}
    return {
        "plan": plan.label,
        "ms": ms,
        "tflops": found,
        "of_torch": round(ms["torch"] / ms["ours"], 3),
        "expected_ms": round(plan.predicted * 1e3, 4),
        "host_us": round(host_microseconds({"ours": ours})[0]["ours"], 1),
        "errors": figures,
    }
