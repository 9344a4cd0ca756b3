"""The compile gate: every configuration the plan can pick, compiled with no GPU, and what came out of it.

Run by `test_portable_compiles`, in a process of its own and by whatever Python has the Triton that is meant: needs
Triton, no torch. ``python gate.py quick|sample|all sm_90a|gfx942|gfx950 [...]`` prints one JSON object a line.

What is compiled of each tile of `tilestream.plan.policy.portable.TILES`, for each device that picks it:

* ``worst``: stream_k, K uneven, 64-bit offsets, fp32 out, alpha, a scale a row and column, bias, residual, exact gelu.
  The other schedules are parts of it, as are the other epilogues: what it does not spill, they do not;
* ``plain``: a queue, even K, no epilogue, or of 8-bit operands a scale each: what runs most;
* ``static`` and ``stealing``: the rest of the schedules;
* ``arriving``: ``worst``, with A's rows in uniform chunks and B's columns in ragged ones;
* ``ordered``: ``worst`` of a queue, with A's rows in ragged chunks, in arrival order;
* ``copied``: ``ordered``, with copies of those rows that the kernel makes itself;

each in the four layouts of the operands (the last four in one).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "src"))

with contextlib.suppress(ImportError):
    import torch  # noqa: F401
if "torch" not in sys.modules:  # Triton's AMD backend asks whether an argument is a tensor
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]

import triton

from polling import polling_faults
from tilestream.core.chunks import Chunks
from tilestream.core.gate import arrival_order
from tilestream.core.gpu_specs import named
from tilestream.core.schedule import Schedule
from tilestream.kernels.portable.gemm import gemm
from tilestream.launch.gemm_arguments import Layout
from tilestream.plan.plan import Plan
from tilestream.plan.planner import plan_problem
from tilestream.plan.policy.portable import tiles
from tilestream.plan.problem import FP8, Incoming, Problem, gate_of, result_name
from tilestream_tools.isa import amdgcn, sass
from tilestream_tools.isa.build import TARGETS, Pointer  # noqa: F401
from tilestream_tools.isa.build import NoGpu as _NoGpu  # noqa: F401
from tilestream_tools.isa.build import build as compiled
from tilestream_tools.isa.build import caught as _caught  # noqa: F401
from tilestream_tools.isa.kernels import DEVICES as NAMES
from tilestream_tools.isa.kernels import gate_arguments, portable_arguments  # noqa: F401

DEVICES = {arch: named(name) for arch, name in NAMES.items()}
LAYOUTS = ("nn", "nt", "tn", "tt")
HOWS = ("worst", "plain", "static", "stealing", "arriving", "ordered", "copied")
#: What a sample has of each tile: how, layout, aligned. Of 8-bit operands, both kinds of scales.
SAMPLE = (
    ("worst", "nt", True), ("static", "nt", True), ("arriving", "nt", True), ("ordered", "nt", True),
    ("copied", "nt", True), ("worst", "nn", False),
)  # fmt: skip
SAMPLE_8_BIT = (("worst", "nt", True), ("plain", "nt", True), ("worst", "nn", False))
#: The tiles of the quick one.
QUICK = ((128, 256), (16, 128), (64, 64))
QUICK_8_BIT = {"float8": (128, 256), "float8 precise": (128, 128), "float8 fnuz": (64, 128)}
FULL = {"bias": 1, "scaled": True, "activation": "gelu", "scale_a": (0, 1), "scale_b": (0, 1)}
#: Inputs: A's dtype, B's, whether float32 is rounded to tf32, whether 8-bit products may stay in the tensor cores.
INPUTS = {
    "bfloat16": ("bfloat16", "", False, True),
    "float16": ("float16", "", False, True),
    "float32": ("float32", "", False, True),
    "float32 tf32": ("float32", "", True, True),
    "float8": ("float8_e4m3fn", "", False, True),
    "float8 precise": ("float8_e4m3fn", "", False, False),
    "float8 mixed": ("float8_e4m3fn", "float8_e5m2", False, True),
    "float8 fnuz": ("float8_e4m3fnuz", "", False, True),
    "float8 fnuz mixed": ("float8_e4m3fnuz", "float8_e5m2fnuz", False, True),
}
#: Of these inputs, what differs from the others' in an instruction is compiled in one way.
ALIKE = ("float16", "float8 mixed", "float8 fnuz mixed")
TAKES = {
    "sm_90a": tuple(name for name in INPUTS if "fnuz" not in name),
    # Of 8 bits, one kind for the matrix units, and one that is converted.
    "gfx942": tuple(name for name in INPUTS if name not in ("float32 tf32", "float8 precise")),
    "gfx950": tuple(name for name in INPUTS if name not in ("float32 tf32", "float8 precise")),
}


def configurations(target: str, what: str) -> Iterator[tuple[str, Plan, Layout, bool]]:
    """``(name, plan, layout, aligned)``."""
    device = DEVICES[target]
    for inputs, aligned in itertools.product(TAKES[target], (True, False)):
        dtype, other, rounded, fast = INPUTS[inputs]
        extent = 4096 if aligned else 4097
        problem = Problem(
            extent, extent, extent, 1, dtype, result_name(dtype, None), tf32=rounded, aligned=aligned, b_dtype=other,
            scales="tensor" if dtype in FP8 else "none", fast_accum=fast,
        )  # fmt: skip
        for row, how in itertools.product(tiles(problem, device), HOWS):
            block = (row.block_m, row.block_n)
            kind = {"worst": "stream_k", "arriving": "stream_k", "static": "static"}.get(how, "dynamic")
            queues = 2 if how == "stealing" else None
            plan = plan_problem(problem, None, kind, block, queues=queues, device=device, backend="portable")
            layouts = LAYOUTS if how in ("worst", "plain") else ("nt",)
            for layout in layouts:
                name = f"{inputs}{'' if aligned else ' unaligned'} {block[0]}x{block[1]} {how} {layout}"
                if inputs in ALIKE and (how, layout) != ("worst", "nt"):
                    continue
                if what != "all" and not _is_sampled(what, inputs, block, how, layout, aligned):
                    continue
                yield name, *_make(plan, how, layout, aligned), aligned


def _is_sampled(what: str, inputs: str, block: tuple[int, int], how: str, layout: str, aligned: bool) -> bool:
    narrow = inputs in QUICK_8_BIT
    if inputs in ALIKE or (how, layout, aligned) not in (SAMPLE_8_BIT if narrow else SAMPLE):
        return False
    if what == "quick" and how in ("arriving", "ordered", "copied", "static"):
        return inputs == "bfloat16" and block == QUICK[-1]
    if what == "quick":
        if "fnuz" in inputs and how != "worst":
            return False
        return aligned and (block == QUICK_8_BIT[inputs] if narrow else block in QUICK)
    return True


def _make(plan: Plan, how: str, layout: str, aligned: bool) -> tuple[Plan, Layout]:
    size = 4096 + (0 if aligned else 1)
    strides = {"n": (0, size, 1), "t": (0, 1, size)}
    a, b, out = strides[layout[0]], strides[layout[1]], (0, 4096, 1)
    if how not in ("worst", "arriving", "ordered", "copied"):
        return plan, Layout(a, b, out)
    # Uneven K, and an offset past 31 bits: rows of 2**20, as in a view of something wider. A schedule with a remainder.
    problem = replace(plan.problem, k=plan.problem.k + 16, out_dtype="float32", scales="row")
    if how == "arriving":
        rows, columns = Incoming(Chunks.uniform(problem.m, 512)), Incoming(Chunks((0, 5, 5, problem.n)))
        problem = replace(problem, rows=rows, columns=columns)
    wide = (0, 2**20, 1)
    old = plan.schedule
    if how in ("ordered", "copied"):
        word = 0 if how == "ordered" else 16 if aligned else 2
        problem = replace(problem, rows=Incoming(Chunks((0, 5, 5, problem.m)), 0, word))
        made = Schedule("dynamic", replace(old.grid, k_steps=old.grid.k_steps + 1), old.raster, old.workers)
        gate = gate_of(problem, plan.tile)
        assert gate is not None
        ends = arrival_order(made, gate)
        made = replace(made, split="chunks", queues=len(ends), ends=ends)
        plan = replace(plan, problem=problem, schedule=made, copiers=int(how == "copied"))
        return plan, Layout(a, b, wide, residual=wide, **FULL)
    schedule = Schedule("stream_k", replace(old.grid, k_steps=old.grid.k_steps + 1), old.raster, old.workers - 1)
    return replace(plan, problem=problem, schedule=schedule), Layout(a, b, wide, residual=wide, **FULL)


def build(plan: Plan, layout: Layout, aligned: bool, target: str) -> tuple[Any, str]:
    """Compile, by way of the kernel's own launch path: the kernel, and what the assembler said."""
    return compiled(gemm, *portable_arguments(plan, layout, aligned), target)


def spilled(kernel: Any, said: str) -> dict[str, int]:
    """Registers that went to memory, and bytes of stack."""
    if "cubin" in kernel.asm:
        _, usage = sass.disassembled(kernel.asm["cubin"])
        return {"bytes": sass.spilled_bytes(said), "stack": sass.stack_bytes(usage)}
    return amdgcn.parse(kernel.asm["amdgcn"]).spilled


def main_loop(kernel: Any) -> dict[str, Any]:
    """AMD: matrix instructions, exchanges between lanes, phases that read in the main loop; what else is counted."""
    parsed = amdgcn.parse(kernel.asm["amdgcn"])
    loop = parsed.main_loop
    return {
        "mfma": dict(loop.mfma) if loop else {},
        "shuffles": sum(n for kind, n in loop.counts.items() if kind.startswith("shuffle")) if loop else 0,
        "reading": phases_that_read(loop.instructions) if loop else 0,
        "sleeps": sum(one.kind == "sleep" for one in parsed.instructions),
        "in_lanes": parsed.in_lanes,
        "small_halves": parsed.fields.get("float_denorm_mode_16_64"),
        "polling": polling_faults(parsed),
    }


def phases_that_read(instructions: Sequence[amdgcn.Instruction]) -> int:
    """Of a loop's phases, from barrier to barrier, round and round, those in which shared memory is read."""
    phases = [False]
    for one in instructions:
        if one.kind == "barrier":
            phases.append(False)
        phases[-1] |= one.kind == "lds_read"
    if len(phases) > 1:  # the first goes on where the last ended
        phases[0] |= phases.pop()
    return sum(phases)


def report(target: str, name: str, make: Callable[[], tuple[Any, str]]) -> None:
    """Compile one configuration, and print what came out of it."""
    found: dict[str, Any] = {"target": target, "name": name, "triton": triton.__version__}
    try:
        kernel, said = make()
        found |= {"spilled": spilled(kernel, said), "shared": kernel.metadata.shared}
        if "amdgcn" in kernel.asm:
            found |= main_loop(kernel)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[-600:]
    print(json.dumps(found), flush=True)


def main() -> None:
    what, *targets = sys.argv[1:]
    for target in targets:
        for name, plan, layout, aligned in configurations(target, what):
            report(target, name, functools.partial(build, plan, layout, aligned, target))


if __name__ == "__main__":
    main()
