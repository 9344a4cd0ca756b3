"""What the hardware counts in a GEMM of ours and in cuBLAS's: bytes from memory and through L2, units busy, by ``ncu``.

Of the shapes where cuBLAS is ahead. The section runs itself under Nsight Compute, clocks as they are; of each call the
largest kernel counts, and the time of all kernels that it launched.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import tilestream as ts
from benchmarks.core.paths import command as command_of
from benchmarks.core.session import Session
from benchmarks.gemm.bench import operands
from benchmarks.gemm.shapes import parse

SHAPES = "256x4096x14336,64x10240x8192,256x10240x8192,256x57344x8192,1x28672x4096,16x28672x4096"
#: ncu's metrics, by their names in the record. Percentages are of the sustained peak.
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram read": "dram__bytes_read.sum",
    "dram written": "dram__bytes_write.sum",
    "dram %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2 read": "lts__t_sectors_op_read.sum",
    "l2 hit %": "lts__t_sector_hit_rate.pct",
    "l2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    "sm active %": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue %": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
}
_SECTOR = 32
#: ncu's units, in the record's.
_SCALES = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3,
           "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}  # fmt: skip


def under_ncu(arguments: list[str]) -> None:
    """The process that ncu watches: each shape by ours and by cuBLAS, operands out of L2, a range each."""
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    for shape in parse(arguments[0]):
        a, w = operands(shape, "cuda")
        b = w.t()
        for name, call in (("ours", lambda: ts.mm(a, b)), ("cublas", lambda: torch.mm(a, b))):  # noqa: B023
            for _ in range(3):
                call()
            flush.zero_()
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_push(f"{shape.m}x{shape.n}x{shape.k} {name}")
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            torch.cuda.nvtx.range_pop()


def counted(text: str) -> list[dict[str, Any]]:
    """The rows of ncu's CSV, a launch each: kernel, and what `METRICS` names."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise RuntimeError(f"ncu says nothing: {text[-500:]}")
    names = {metric: name for name, metric in METRICS.items()}
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[begin:]))):
        if not row["ID"].isdigit():
            continue
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"][:120]})
        if row["Metric Name"] in names:
            try:
                value = float(row["Metric Value"].replace(",", ""))
            except ValueError:  # a counter that this device or driver does not give
                continue
            launch[names[row["Metric Name"]]] = value * _SCALES.get(row["Metric Unit"], 1.0)
    return list(launches.values())


def profiled(shape: str, folder: Path) -> list[dict[str, Any]]:
    """Each launch of one shape, ours first."""
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    command = [
        ncu, "--csv", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none",
        "--metrics", ",".join(METRICS.values()),
        *command_of("gemm", "_ncu", shape),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=dict(os.environ))
    (folder / f"ncu_{shape}.log").write_text(run.stdout + run.stderr, encoding="utf-8")
    return counted(run.stdout)


def is_ours(kernel: str) -> bool:
    """Whether a kernel of that name is ours: cuBLAS's have longer names, and a reduction's behind split K."""
    return kernel.split("(")[0].strip() in ("gemm", "portable_gemm")


def row_of(shape: str, launches: list[dict[str, Any]]) -> dict[str, Any]:
    """A shape's row: of each side the largest launch, and the microseconds of all."""
    row: dict[str, Any] = {"shape": shape}
    for name, mine in (("ours", True), ("cublas", False)):
        of = [launch for launch in launches if is_ours(launch["kernel"]) == mine]
        if not of:
            raise RuntimeError(f"{shape}: no launch of {name} among {[launch['kernel'] for launch in launches]}")
        largest = dict(max(of, key=lambda launch: launch.get("us", 0.0)))
        largest["l2 read"] = largest.get("l2 read", 0.0) * _SECTOR
        largest["launches"] = len(of)
        largest["us of all"] = sum(launch.get("us", 0.0) for launch in of)
        row[name] = {key: round(x, 3) if isinstance(x, float) else x for key, x in largest.items()}
    return row


def counters(session: Session) -> None:
    record = session.record("gemm_counters", metrics=METRICS)
    for shape in (session.options.shapes or SHAPES).split(","):
        try:
            record.rows.append(row_of(shape, profiled(shape, record.path.parent)))
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            record.fail(f"{shape}: {error}")
        record.write()
