"""What the hardware counts in a GEMM of ours and in torch's: bytes from memory and through L2, units busy, by ``ncu``.

By default of the suite's shapes where cuBLAS is ahead; with ``--shapes board`` of the worst problems of the published
boards, by their records; or of problems by name, as `named` knows them. The section runs itself under Nsight Compute,
clocks as they are; of each call the largest kernel counts, and the time of all kernels that it launched.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import tilestream as ts
from benchmarks.core.paths import RESULTS
from benchmarks.core.paths import command as command_of
from benchmarks.core.records import folder_of, load
from benchmarks.core.session import Session
from benchmarks.core.timing import Call
from benchmarks.gemm.board import COUNT, operands, peer
from benchmarks.gemm.draw import PUBLISHED, Draw, draws, one_named

SHAPES = "256x4096x14336,64x10240x8192,256x10240x8192,256x57344x8192,1x28672x4096,16x28672x4096"
#: What ``--shapes`` is for the worst problems of the boards; how many of each these are, and below which ratio.
BOARD, WORST, BELOW = "board", 8, 0.9
#: The kernels that a product of ours launches. cuBLAS's have longer names, and a reduction's behind split K.
OURS = frozenset({"gemm", "one_tile", "realign"})
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


def named(name: str) -> Draw:
    """A problem by name: ``"MxNxK"``, a Linear's in bfloat16; or a board's: seed, how many, and which: "1:200:17"."""
    return one_named(name, draws)


def worst(folders: Iterable[Path]) -> list[str]:
    """The names of the worst problems of the published boards, by their records in the first folder that has any."""
    for folder in folders:
        found = []
        for path in (folder / f"gemm_random_{seed}.json" for seed in PUBLISHED):
            if not path.exists():
                continue
            data = load(path)
            count = data.get("planned") or COUNT
            numbers = {str(problem): number for number, problem in enumerate(draws(data["seed"], count))}
            behind = sorted((row for row in data["rows"] if row["ratio"] < BELOW), key=lambda row: row["ratio"])
            found += [f"{data['seed']}:{count}:{numbers[row['shape']]}" for row in behind[:WORST]]
        if found:
            return found
    raise FileNotFoundError(
        f"--shapes {BOARD}: no gemm_random_{{1,2}}.json of this device with a ratio below {BELOW}: run gemm random"
    )


def calls_of(problem: Draw, device: str) -> dict[str, Call]:
    """Our call and torch's, on the same operands."""
    a, b, given = operands(problem, device)
    return {"ours": lambda: ts.matmul(a, b, **given), "cublas": peer(a, b, given)}


def under_ncu(arguments: list[str]) -> None:
    """The process that ncu watches: a problem by ours and by torch, operands out of L2, a range each."""
    torch.set_grad_enabled(False)
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    problem = named(arguments[0])
    for name, call in calls_of(problem, "cuda").items():
        for _ in range(3):
            call()
        flush.zero_()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push(f"{problem} {name}")
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


def profiled(name: str, folder: Path) -> list[dict[str, Any]]:
    """Each launch of a problem, ours first."""
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    command = [
        ncu, "--csv", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none",
        "--metrics", ",".join(METRICS.values()),
        *command_of("gemm", "_ncu", name),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=dict(os.environ))
    (folder / f"ncu_{name.replace(':', '_')}.log").write_text(run.stdout + run.stderr, encoding="utf-8")
    return counted(run.stdout)


def is_ours(kernel: str) -> bool:
    """Whether a kernel of that name is one of `OURS`."""
    return kernel.split("(")[0].strip() in OURS


def row_of(shape: str, launches: list[dict[str, Any]]) -> dict[str, Any]:
    """A problem's row: of each side the largest launch, and the microseconds of all."""
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
    """The problems of ``--shapes``; a board's have a record of their own."""
    given = session.options.shapes or SHAPES
    if given == BOARD:
        folder = folder_of(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")
        names = worst(results / folder for results in (session.out, RESULTS))
    else:
        names = given.split(",")
    of_board = any(":" in name for name in names)
    record = session.record(
        "gemm_counters_board" if of_board else "gemm_counters", metrics=METRICS, planned=len(names),
        **({"dtype": "as drawn"} if of_board else {}),
    )  # fmt: skip

    def measure(name: str) -> dict[str, Any]:
        shape = str(named(name)) if ":" in name else name
        return row_of(shape, profiled(name, record.path.parent))

    session.rows(record, names, measure)
