"""The compile gate of the portable GEMM: each tile of `tilestream.plan.policy.portable.TILES`, for each device with it.

* ``worst``: stream_k, K uneven, 64-bit offsets, fp32 out, alpha, a scale a row and column, bias, residual, exact gelu.
  The other schedules are parts of it, as are the other epilogues: what it does not spill, they do not;
* ``plain``: a queue, even K, no epilogue, or of 8-bit operands a scale each: what runs most;
* ``static`` and ``stealing``: the rest of the schedules;
* ``arriving``: ``worst``, with A's rows in uniform chunks and B's columns in ragged ones;
* ``ordered``: ``worst`` of a queue, with A's rows in ragged chunks, in arrival order;
* ``copied``: ``ordered``, with copies of those rows that the kernel makes itself;
* ``near``: ``worst`` with offsets within 31 bits, of 128x256 on gfx942, where it needs more registers (Triton 3.7);

``worst``, ``near`` and ``plain`` in the four layouts of the operands.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from gates.engine import AS_SM_100, DEVICES, NOT_RUN, RELEASE, SHARED, Case, IsWanted, Rules, fill_gemm
from polling import polling_faults
from tilestream.core.chunks import Chunks
from tilestream.core.gate import arrival_order
from tilestream.core.schedule import Schedule
from tilestream.kernels.portable.gemm import gemm
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.portable.arguments import Arguments
from tilestream.plan.plan import Plan
from tilestream.plan.planner import plan_problem
from tilestream.plan.policy.portable import sums_lose_bits, tiles
from tilestream.plan.problem import FP8, VECTORS, Incoming, Problem, gate_of, result_name
from tilestream_tools.isa import amdgcn, sass
from tilestream_tools.isa.kernels import copy_arguments, pointer

LAYOUTS = ("nn", "nt", "tn", "tt")
#: Kinds of schedules.
HOWS = {
    "worst": "stream_k", "plain": "dynamic", "static": "static", "stealing": "dynamic", "arriving": "stream_k",
    "ordered": "dynamic", "copied": "dynamic", "near": "stream_k",
}  # fmt: skip
_WAITS = ("arriving", "ordered", "copied")
_SIZE = 4096
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
#: Inputs that an architecture does not take. Of 8 bits AMD's have one kind for the matrix units, and convert the other.
REFUSED = {
    **dict.fromkeys(("sm_90a", *NOT_RUN), ("float8 fnuz", "float8 fnuz mixed")),
    "sm_80": tuple(inputs for inputs in INPUTS if inputs.startswith("float8")),
    "gfx942": ("float32 tf32", "float8 precise"),
    "gfx950": ("float32 tf32", "float8 precise"),
}
#: Where operands are copied in a few elements at a time.
_OF_VECTORS = ("sm_90a",)
QUICK = (
    "sm_90a bfloat16 in vectors of 2 128x128 worst nt", "bfloat16 128x256 worst nt",
    "bfloat16 16x128 worst nt", "bfloat16 64x64 worst nt", "bfloat16 64x64 arriving nt",
    "bfloat16 64x64 ordered nt", "bfloat16 64x64 copied nt", "bfloat16 64x64 static nt", "float32 64x64 worst nt",
    "float32 tf32 64x64 worst nt", "float8 128x256 worst nt", "float8 128x256 plain nt",
    "float8 precise 128x128 worst nt", "float8 precise 128x128 plain nt", "float8 fnuz 64x128 worst nt",
    "sm_80 bfloat16 128x128 worst nt", "sm_89 float8 precise 128x128 worst nt", "sm_100 bfloat16 128x128 worst nt",
    "sm_103 bfloat16 64x128 worst nt", "sm_110 bfloat16 64x128 worst nt", "sm_120 bfloat16 128x128 worst nt",
)  # fmt: skip
#: AMD: scalar registers that are kept in lanes of vector ones, at most, by what is in the kernel: the recorded ceiling,
#: the most of all cases on Triton 3.6, 3.7 and 3.9 (188 on 3.9), and a little. What runs most has none; a gate's two
#: operands have the most, outside the main loop. Of vector registers none goes to memory.
IN_LANES = {"plain": 0, "static": 0, "stealing": 0, "worst": 64, "arriving": 192, "ordered": 192, "copied": 192,
            "near": 64}  # fmt: skip
#: The same for ``plain`` on gfx950 where operands are not aligned and none is converted: masks of elements past an end,
#: and multiples of strides. They are written before the loop over tiles, and a tile reads them back once, outside the
#: main loop. Triton 3.6 has 15 where A is column-major, 3.7 has 36 and 3.9 has 18 where B is row-major. gfx942: none.
UNALIGNED = 40
#: The same where operands of 8 bits are converted: each comparison is a mask in two of them.
CONVERTING = {"plain": 80, "static": 80, "stealing": 80, "worst": 112, "arriving": 224, "ordered": 224, "copied": 224,
              "near": 112}  # fmt: skip


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    lie = [(True, 1), (False, 1), *((False, width) for width in VECTORS)]
    for (arch, device), inputs, (aligned, vector) in itertools.product(DEVICES.items(), INPUTS, lie):
        if inputs in REFUSED[arch] or (vector > 1 and (inputs != "bfloat16" or arch not in _OF_VECTORS)):
            continue
        dtype, other, rounded, fast = INPUTS[inputs]
        extent = _SIZE if aligned else _SIZE + vector
        problem = Problem(
            extent, extent, extent, 1, dtype, result_name(dtype, None), tf32=rounded, aligned=aligned, b_dtype=other,
            scales="tensor" if dtype in FP8 else "none", fast_accum=fast, vectors=(vector, vector),
        )  # fmt: skip
        of_vectors = f" in vectors of {vector}" * (vector > 1)
        waiting = tiles(replace(problem, rows=Incoming(Chunks.uniform(extent, 512))), device)
        for tile, how in itertools.product(tiles(problem, device), HOWS):
            block = (tile.block_m, tile.block_n)
            if how in _WAITS and tile not in waiting:
                continue
            if how == "near" and (arch, block) != ("gfx942", (128, 256)):
                continue
            if vector > 1 and how not in ("worst", "plain", "arriving"):
                continue
            for layout in LAYOUTS if how in ("worst", "near", "plain") and vector <= 2 else ("nt",):
                name = f"{inputs}{of_vectors or ('' if aligned else ' unaligned')} {block[0]}x{block[1]} {how} {layout}"
                is_alike = inputs in ALIKE and (how, layout) != ("worst", "nt")
                is_left_out = arch in NOT_RUN and not needs_most(arch, inputs, aligned, how, layout)
                if not (is_alike or is_left_out) and is_wanted(arch, name):
                    plan = plan_problem(
                        problem, None, HOWS[how], block, queues=2 if how == "stealing" else None, device=device,
                        backend="portable",
                    )  # fmt: skip
                    yield Case(arch, name, *_made(plan, how, layout), (inputs, how))


def needs_most(arch: str, inputs: str, aligned: bool, how: str, layout: str) -> bool:
    """Whether a case is compiled for an architecture on which nothing has run: what needs most of it.

    Each tile's worst; of the operands that models have also with B row-major, at a gate, with copies, and what runs
    most.
    """
    often = inputs in ("bfloat16", "float8") and aligned
    if arch in AS_SM_100:
        return often and (how, layout) == ("worst", "nt")
    if how == "worst" and layout == "nt":  # where no sums lose bits, precise products are the others
        return inputs not in ALIKE and (inputs != "float8 precise" or sums_lose_bits(arch))
    return often and (how, layout) in (("worst", "nn"), ("plain", "nt"), ("arriving", "nt"), ("copied", "nt"))


def _made(plan: Plan, how: str, layout: str) -> tuple[Plan, Layout]:
    problem, old = plan.problem, plan.schedule
    strides = {"n": (0, problem.m, 1), "t": (0, 1, problem.m)}
    made = Layout(strides[layout[0]], strides[layout[1]], (0, _SIZE, 1))
    if how in ("plain", "static", "stealing"):
        return plan, made
    # Uneven K, and an offset past 31 bits: rows of 2**20, as in a view of something wider. A schedule with a remainder.
    wide = (0, _SIZE if how == "near" else 2**20, 1)
    made = made._replace(
        out=wide, residual=wide, bias=1, scaled=True, activation="gelu", scale_a=(0, 1), scale_b=(0, 1)
    )
    problem = replace(
        problem, k=problem.k + (problem.vector if problem.vector > 1 else 16), out_dtype="float32", scales="row"
    )
    grid = replace(old.grid, k_steps=old.grid.k_steps + 1)
    if how == "arriving":
        rows, columns = Incoming(Chunks.uniform(problem.m, 512)), Incoming(Chunks((0, 5, 5, problem.n)))
        problem = replace(problem, rows=rows, columns=columns)
    if how in ("worst", "near", "arriving"):
        some = (Schedule("stream_k", grid, old.raster, old.workers - less) for less in (1, 2))
        schedule = next(one for one in some if one.slots)  # tiles are split
        return replace(plan, problem=problem, schedule=schedule), made
    word = 0 if how == "ordered" else 16 if problem.aligned or problem.vector > 1 else 2
    problem = replace(problem, rows=Incoming(Chunks((0, 5, 5, problem.m)), 0, word))
    schedule = Schedule("dynamic", grid, old.raster, old.workers)
    gate = gate_of(problem, plan.tile)
    assert gate is not None
    ends = arrival_order(schedule, gate)
    schedule = replace(schedule, split="chunks", queues=len(ends), ends=ends)
    return replace(plan, problem=problem, schedule=schedule, copiers=int(how == "copied")), made


def source(case: Case, trace: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    plan, arguments = case.plan, Arguments(case.plan, case.layout, trace=trace)
    address = 0 if plan.problem.aligned or plan.problem.vector > 1 else 2
    log = pointer("int64", trace)
    filled = fill_gemm(arguments, plan, case.layout, address=address, log=log, copies=copy_arguments(plan))
    return gemm, filled, arguments.options


# What must be true of it ----------------------------------------------------------------------------------------------


def rules(case: Case, kernel: Any, said: str) -> Rules:
    inputs, how = case.how
    found = common_rules(case, kernel, said, {})
    if (width := case.plan.problem.vector) > 1:
        copies = set(re.findall(r"\bcp\.async\.c[ag]\.shared\.global [^;]*?, (0x\w+),", kernel.asm["ptx"]))
        found["bytes of a copy"] = (copies, {hex(2 * width)})
    if how == "stealing":
        # A wave of 64 lanes would hold the counters of all queues, keep its own answer, and part from the next wave.
        found["counters that lanes read at once"] = (
            "tensor<64xi64" in kernel.asm["ttgir"],
            case.arch.startswith("sm_"),
        )
    if case.arch in NOT_RUN:
        by_itself = inputs == "float8 precise" and case.arch in ("sm_89", "sm_120")
        found["sums that the kernel adds to its accumulator"] = (adds_products(kernel.asm["ttgir"]), by_itself)
    if case.arch.startswith("sm_"):
        if HOWS[how] == "stream_k":
            found["what stands before the count of a tile's parts"] = (before_counts(kernel.asm["ptx"]), {"bar"})
        return found
    parsed = amdgcn.parse(kernel.asm["amdgcn"])
    loop = parsed.main_loop
    assert loop is not None
    converts = inputs.startswith("float8") and ("fnuz" in inputs) == (case.arch == "gfx950")
    is_unaligned = how == "plain" and case.arch == "gfx950" and not case.plan.problem.aligned
    most = CONVERTING[how] if converts else UNALIGNED if is_unaligned else IN_LANES[how]
    sleeps = sum(one.kind == "sleep" for one in parsed.instructions)
    found |= {
        "kinds of matrix instructions": (len(loop.mfma), 1),
        "a pause between looks": (bool(sleeps), how in _WAITS),
        "a polling loop": (polling_faults(parsed), [] if how in _WAITS else ["no polling loop"]),
        "what is below float16's normal numbers": (parsed.fields.get("float_denorm_mode_16_64"), 3),  # is not zero
        "scalar registers in lanes": (parsed.in_lanes, range(most + 1)),
    }
    if how in ("plain", "static", "stealing") and not converts:
        lanes = [one.mnemonic for one in loop.instructions if one.mnemonic.startswith(("v_readlane", "v_writelane"))]
        found["lanes in the main loop"] = (lanes, [])
    # The loop has two stages or more on gfx950; Triton 3.9 orders it by rules of its own.
    if case.arch == "gfx950" and RELEASE < (3, 9):
        found["phases of A's and B's reads"] = (phases_that_read(loop.instructions), 1)
    return found


def before_counts(ptx: str) -> set[str]:
    """The stores and barriers of PTX that come last before an add that acquires and releases a 32-bit word.

    One thread's add speaks for the stores of all: between it and them is a barrier.
    """
    found = re.findall(r"\b(bar)\.sync|\b(st)\.global|\batom\.global\.gpu\.(acq_rel)\.add\.[us]32", ptx)
    order = ["".join(one) for one in found]
    return {before for before, one in itertools.pairwise(order) if one == "acq_rel"}


def adds_products(ttgir: str) -> bool:
    """Whether a product of the matrix units is added to something by another instruction."""
    products = re.findall(r"(%\w+) = tt\.dot ", ttgir)
    added = set(re.findall(r"%\w+", " ".join(re.findall(r"arith\.addf (.*?):", ttgir))))
    return any(product in added for product in products)


def common_rules(case: Case, kernel: Any, said: str, most_spills: dict[str, int]) -> Rules:
    """Rules of both portable kernels. ``most_spills``: that are known, by kind."""
    if case.arch == "sm_90a":
        _, usage = sass.disassembled(kernel.asm["cubin"])
        spilled = {"bytes": sass.spilled_bytes(said), "stack": sass.stack_bytes(usage)}
    elif case.arch in NOT_RUN:
        spilled = {"bytes": sass.spilled_bytes(said), "stack": sass.stack_by_ptxas(said)}
    else:
        spilled = amdgcn.parse(kernel.asm["amdgcn"]).spilled
    return {
        **{f"spills: {kind}": (count, range(most_spills.get(kind, 0) + 1)) for kind, count in spilled.items()},
        "shared memory": (kernel.metadata.shared, range(SHARED[case.arch] + 1)),
    }


def phases_that_read(instructions: Sequence[amdgcn.Instruction]) -> int:
    """Of a loop's phases, from barrier to barrier, round and round, those in which shared memory is read.

    With one, no barrier parts the reads of A from those of B: see the kernel's `product`.
    """
    phases = [False]
    for one in instructions:
        if one.kind == "barrier":
            phases.append(False)
        phases[-1] |= one.kind == "lds_read"
    if len(phases) > 1:  # the first goes on where the last ended
        phases[0] |= phases.pop()
    return sum(phases)
