"""What `tilestream isa` says of a compiled kernel: plain numbers, as JSON and as tables.

A report is made in a process of its own (`of`), so that compiling for a GPU that is not present changes nothing here.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilestream.core.errors import TilestreamError
from tilestream.plan.problem import ITEMSIZE, Problem
from tilestream_tools.isa import amdgcn, sass
from tilestream_tools.isa.kernels import CompileRequest, Source, source
from tilestream_tools.isa.model import estimate, occupancy
from tilestream_tools.isa.rates import MEMORY_CYCLES

if TYPE_CHECKING:
    from tilestream.plan.attention_plan import AttentionPlan
    from tilestream.plan.plan import Plan

#: Seconds that a compilation may take.
TIMEOUT = 600
_ERRORS = {"ValueError": ValueError, "TypeError": TypeError, "NotImplementedError": NotImplementedError}
#: Instructions that multiply, by what PTX calls them: a warp group's, a warp's, and tensor memory's, whose name has no
#: extents.
_PRODUCTS = {
    "wgmma": r"\b[HQ]GMMA\.(\d+)x(\d+)x(\d+)", "mma": r"\b[HQ]MMA\.(16)(8)(\d+)\b", "tcgen05": r"\bUTC[HQ]MMA()()()\b",
}  # fmt: skip
#: Bytes of K of an instruction of tensor memory.
_TCGEN05_K = 32


@dataclass(frozen=True)
class Report:
    """A compiled kernel.

    Attributes
    ----------
    kernel, arch, triton
        Its name, what it was compiled for, and by which version.
    plan
        In a line; empty where the text came from a file.
    warps, stages, tile
        Of a worker, of its ring, of the output; empty where the text came from a file.
    registers
        ``vgpr`` (accumulators among them), ``agpr``, ``sgpr``, and of these how many more are kept in lanes of vector
        registers, ``sgpr_in_lanes``; ``registers`` of a thread on NVIDIA.
    spilled
        What went to memory: 0 everywhere where nothing did.
    shared
        Bytes of LDS, or of shared memory.
    occupancy
        AMD: waves of a SIMD, and what each resource alone would allow; workers of a compute unit.
    loop
        The main loop: ``instructions``, ``mfma`` by shape, ``counts`` by kind and width, ``waits`` in order.
    cycles
        Of an iteration: ``floor`` by unit, ``binds``, ``estimate``, ``share`` of the peak at the same clock, ``busy``.
        On NVIDIA the floor only.
    sleeps
        ``s_sleep`` in the whole kernel: what its polling loops do meanwhile.
    """

    kernel: str
    arch: str
    triton: str
    plan: str
    warps: int
    registers: dict[str, int]
    spilled: dict[str, int]
    shared: int
    stages: int = 0
    tile: tuple[int, ...] = ()
    occupancy: dict[str, int] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)
    cycles: dict[str, Any] = field(default_factory=dict)
    sleeps: int = 0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def of(name: str, request: CompileRequest, memory_cycles: float = MEMORY_CYCLES, timeout: float = TIMEOUT) -> Report:
    """Compile the kernel ``name`` in a process of its own, and report on it.

    Parameters
    ----------
    name
        One of `tilestream_tools.isa.kernels.KERNELS`.
    memory_cycles
        From a load of global memory to its data: see `tilestream_tools.isa.rates`.
    timeout
        Seconds it may take.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        If there is no such kernel, or it does not do what is asked.
    TilestreamError
        If it does not compile, or not in time.
    """
    asked = json.dumps({"name": name, "memory_cycles": memory_cycles, "request": asdict(request)})
    # Compiled, not interpreted, and by the package that asks.
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        run = subprocess.run(
            [sys.executable, "-m", "tilestream_tools.isa", asked],
            env={**inherited, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TilestreamError(f"{name} for {request.arch} did not compile within {timeout:g} s") from None
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or not lines:
        last = (run.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise TilestreamError(f"{name} for {request.arch} did not compile (status {run.returncode}): {last}")
    said = json.loads(lines[-1])
    if "error" in said:
        raise _ERRORS.get(said["error"], TilestreamError)(said["message"])
    return Report(**{**said, "tile": tuple(said["tile"])})


def answer(asked: str) -> str:
    """What the process of `of` prints: a report, or an error, as a line of JSON."""
    given = json.loads(asked)
    request = given["request"]
    tile = request.pop("tile")
    try:
        made = compiled(
            given["name"], CompileRequest(**request, tile=tuple(tile) if tile else None), given["memory_cycles"]
        )
    except Exception as error:
        kind = type(error).__name__
        message = str(error) if kind in _ERRORS else f"{given['name']} did not compile: {kind}: {error}"[-2000:]
        return json.dumps({"error": kind, "message": message})
    return made.to_json()


def compiled(name: str, request: CompileRequest, memory_cycles: float = MEMORY_CYCLES) -> Report:
    """As `of`, in this process, which can launch nothing from then on."""
    import triton

    from tilestream_tools.isa.build import build

    asked = source(name, request)
    kernel, said = build(asked.kernel, asked.filled, asked.options, request.arch)
    if "amdgcn" in kernel.asm:
        made = of_amdgcn(
            kernel.asm["amdgcn"], name=name, triton=triton.__version__, warps=asked.warps,
            shared=kernel.metadata.shared, plan=asked.plan, memory_cycles=memory_cycles,
        )  # fmt: skip
    else:
        made = _of_cubin(kernel, said, name, triton.__version__, asked, request)
    return made


def of_amdgcn(
    text: str, *, name: str = "", triton: str = "", warps: int | None = None, shared: int | None = None,
    plan: Plan | AttentionPlan | None = None, memory_cycles: float = MEMORY_CYCLES,
) -> Report:  # fmt: skip
    """The report of an assembly text.

    Parameters
    ----------
    text
        As `tilestream_tools.isa.amdgcn.parse` takes it.
    warps
        Waves of a worker; None: as many as the kernel's largest work group has.
    shared
        Bytes of LDS; None: what the text itself reserves (Triton's kernels are given theirs at launch).
    plan
        What it was compiled for: gives the problem whose bytes are a floor, too.

    Raises
    ------
    ValueError
        If there is no kernel in the text, or no rate is known of its arch or of one of its instructions.
    """
    kernel = amdgcn.parse(text)
    warps = warps or max(1, kernel.fields.get("max_flat_workgroup_size", 256) // amdgcn.WAVE)
    shared = kernel.fields.get("group_segment_fixed_size", 0) if shared is None else shared
    bytes_an_operation = bandwidth = 0.0
    if plan is not None and plan.problem.operations and plan.device.clock:
        bytes_an_operation = plan.problem.bytes / plan.problem.operations
        bandwidth = plan.device.bandwidth / plan.device.clock / plan.device.workers
    found = estimate(kernel, warps, memory_cycles, bytes_an_operation, bandwidth)
    loop, cycles = kernel.main_loop, {}
    if found is not None:
        cycles = {
            "floor": {key: round(value, 1) for key, value in asdict(found.floors).items()},
            "binds": found.floors.binds,
            "estimate": round(found.cycles, 1),
            "operations": found.operations,
            "share": round(found.share, 4),
            "busy": round(found.busy, 4),
        }
    return Report(
        kernel=name or kernel.name, arch=kernel.arch, triton=triton, plan=plan.label if plan else "", warps=warps,
        registers={
            "vgpr": kernel.vgprs, "agpr": kernel.agprs, "sgpr": kernel.sgprs, "sgpr_in_lanes": kernel.in_lanes
        },
        spilled=kernel.spilled, shared=shared, stages=plan.stages if plan else 0, tile=plan.block if plan else (),
        occupancy=asdict(occupancy(kernel, warps, shared)),
        loop={} if loop is None else {
            "instructions": len(loop.instructions), "mfma": dict(loop.mfma), "waits": loop.waits,
            "counts": dict(sorted(loop.counts.items())),
        },
        cycles=cycles, sleeps=sum(one.kind == "sleep" for one in kernel.instructions),
    )  # fmt: skip


def _of_cubin(kernel: Any, said: str, name: str, triton: str, asked: Source, request: CompileRequest) -> Report:
    """The report of a kernel for NVIDIA: its loops, and the tensor cores' floor of them together."""
    text, usage = sass.disassembled(kernel.asm["cubin"])
    by_unit = {unit: sass.loop_texts(text, form) for unit, form in _PRODUCTS.items()}
    unit, loops = next(((unit, found) for unit, found in by_unit.items() if found), ("", []))
    plan, device = asked.plan, request.device
    shapes: Counter[str] = Counter()
    operations = 0
    for one in (one for body in loops for one in body):
        if found := re.search(_PRODUCTS[unit], one):
            extents = [int(extent) for extent in found.groups() if extent] or _of_tensor_memory(plan)
            shapes["".join(map("{}{}".format, "mnk", extents)) or unit] += 1
            operations += 2 * math.prod(extents) * (asked.warps if unit == "mma" else 1) if extents else 0
    cycles: dict[str, Any] = {}
    if operations and plan is not None:
        kind = plan.problem.kind if isinstance(plan.problem, Problem) else plan.problem.dtype
        rate = device.peak("fp8" if kind.startswith("float8") else kind, 1) / device.clock
        cycles = {"floor": {unit: operations / rate}, "operations": operations}
    return Report(
        kernel=name, arch=request.arch, triton=triton, plan=plan.label if plan else "", warps=asked.warps,
        registers={"registers": sass.registers(usage)},
        spilled={"bytes": sass.spilled_bytes(said), "stack": sass.stack_bytes(usage)},
        shared=kernel.metadata.shared, stages=plan.stages if plan else 0, tile=plan.block if plan else (),
        loop={
            "instructions": sum(map(len, loops)), "mfma": dict(shapes),
            "counts": [sass.loop_counts(body) for body in loops],
        },
        cycles=cycles,
    )  # fmt: skip


def _of_tensor_memory(plan: Plan | AttentionPlan | None) -> list[int]:
    """Extents of an instruction of tensor memory: a product's tile. Attention has two kinds; none is told apart."""
    if plan is None or not isinstance(plan.problem, Problem):
        return []
    return [*plan.block[:2], _TCGEN05_K // ITEMSIZE[plan.problem.dtype]]
