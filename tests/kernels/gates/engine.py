"""What all compile gates share: cases, compiling them in several processes, rules, the command line.

A gate is a module of this package with

* ``cases(is_wanted)``: every `Case` for which ``is_wanted(arch, name)``; what is not wanted costs no plan;
* ``QUICK``: the names of a sample, one of each kind; an architecture before a name restricts it to that one;
* ``source(case, trace=False)``: ``(kernel, arguments, options)``, as its launch has them, of no address;
* ``rules(case, kernel, said)``: what was found and what is wanted, by rule. ``said`` is the assembler's output;
* ``again(case, kernel)``, if it has it: more options, with which a compiled kernel is compiled once more.

A gate may have ``rules_of(case)`` instead of the last two.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import triton

from gates import held
from releases import release
from tilestream.core.gpu_specs import named
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.plan import Plan
from tilestream_tools.isa import amdgcn
from tilestream_tools.isa.build import Pointer, build
from tilestream_tools.isa.kernels import DEVICES as NAMES
from tilestream_tools.isa.kernels import gate_arguments, operands

VERSION = triton.__version__.partition("+")[0]
RELEASE = release(triton.__version__)
DEVICES = {arch: named(name) for arch, name in NAMES.items()}
#: Bytes of shared memory that a worker can have.
SHARED = {
    "sm_90a": 232448, "gfx942": 65536, "gfx950": 163840, "sm_80": 166912, "sm_89": 101376, "sm_100": 232448,
    "sm_103": 232448, "sm_110": 232448, "sm_120": 101376,
}  # fmt: skip
#: NVIDIA's architectures on which no kernel has run. Of a case's name, a sample has these where it names them.
NOT_RUN = tuple(arch for arch in NAMES if arch.startswith("sm_") and arch != "sm_90a")
#: Of these, the ones that Triton compiles as it does sm_100: a few cases show that it knows them.
AS_SM_100 = ("sm_103", "sm_110")
#: Bytes of shared memory beside a kernel's stages: barriers, the item ring, an atomic's answer on its way to all lanes.
SLACK = 1024

#: ``(arch, name) -> bool``.
IsWanted = Callable[[str, str], bool]
#: What was found and what is wanted, by rule: a value, or a range or a frozenset that has it.
Rules = dict[str, tuple[Any, Any]]


class Case(NamedTuple):
    """A kernel to compile. ``how``: what its gate knows of it beside the plan and the operands' layout."""

    arch: str
    name: str
    plan: Any
    layout: Any = None
    how: Any = None


# Rules ----------------------------------------------------------------------------------------------------------------


def is_kept(found: Any, wanted: Any) -> bool:
    return found in wanted if isinstance(wanted, range | frozenset) else found == wanted


def faults(rules: Rules) -> dict[str, list[Any]]:
    """What was found and what is wanted, of the rules that are not kept."""
    broken = ((rule, found, wanted) for rule, (found, wanted) in rules.items() if not is_kept(found, wanted))
    return {
        rule: [sorted(found) if isinstance(found, set) else found, repr(wanted)] for rule, found, wanted in broken
    }  # fmt: skip


def shared_memory(kernel: Any, arch: str, stages: int) -> tuple[int, range]:
    """A rule: what a kernel has, and ``stages`` bytes or a little more."""
    return kernel.metadata.shared, range(stages, min(stages + SLACK, SHARED[arch]) + 1)


# Compiling ------------------------------------------------------------------------------------------------------------


def load(name: str) -> ModuleType:
    """A gate by name: ``"hopper gemm"``."""
    return importlib.import_module(f"gates.{name.replace(' ', '_')}")


def cases(gate: ModuleType, what: str, *more: str, arch: str = "") -> Iterator[Case]:
    """Those of ``"all"``, of ``"quick"``, or of these names; all architectures, or one."""
    asked = {"all": None, "quick": set(gate.QUICK)}.get(what, {what, *more})
    met = set()

    def is_wanted(its_arch: str, name: str) -> bool:
        names = {f"{its_arch} {name}"} if what == "quick" and its_arch in NOT_RUN else {name, f"{its_arch} {name}"}
        return arch in ("", its_arch) and (asked is None or not asked.isdisjoint(names))

    for case in gate.cases(is_wanted):
        met |= {case.name, f"{case.arch} {case.name}"}
        yield case
    assert arch or not asked or asked <= met, f"the gate has no {asked - met}"


def compiled(gate: ModuleType, case: Case, **how: Any) -> tuple[Any, str]:
    """The kernel, and what the assembler said."""
    return _built(gate, case, *gate.source(case, **how))


def _built(gate: ModuleType, case: Case, kernel: Any, filled: Any, options: dict[str, Any]) -> tuple[Any, str]:
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True  # of a kernel from Triton's cache, the assembler says nothing
        made, said = build(kernel, filled, options, case.arch)
        more = gate.again(case, made) if hasattr(gate, "again") else {}
        return build(kernel, filled, options | more, case.arch) if more else (made, said)


class Seed(NamedTuple):
    """What is changed in a case: fields of its config, options of the compiler, its text as a mutant has it."""

    change: dict[str, Any]
    options: dict[str, Any]
    mutant: str


def row(name: str, seed: Seed, case: Case) -> dict[str, Any]:
    """A case compiled: how many rules there are, its faults by rule, and on AMD the instructions that it has."""
    gate, start = load(name), time.perf_counter()
    instructions: list[list[str]] = []
    try:
        if hasattr(gate, "rules_of"):
            rules = gate.rules_of(case)
        else:
            kernel, said = seeded(gate, seed, case)
            rules, instructions = gate.rules(case, kernel, said), forms(kernel)
        count, found = len(rules), faults(rules)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        count, found = 0, {"error": [f"{type(error).__name__}: {error}"[-1500:], "none"]}
    seconds = round(time.perf_counter() - start, 1)
    fields = {"name": case.name, "arch": case.arch, "triton": VERSION}
    return {**fields, "rules": count, "faults": found, "seconds": seconds, "instructions": instructions}


def forms(kernel: Any) -> list[list[str]]:
    """A mnemonic and operands of each form of AMD's instructions: registers and numbers make no difference."""
    if "amdgcn" not in kernel.asm:
        return []
    found = {}
    for one in amdgcn.parse(kernel.asm["amdgcn"]).instructions:
        if one.kind != "branch":  # whose operand is a label
            found[one.mnemonic, re.sub(r"[vsa]?(\d+|\[[\d:]+\])", "", one.operands)] = [one.mnemonic, one.operands]
    return [*found.values()]


def seeded(gate: ModuleType, seed: Seed, case: Case) -> tuple[Any, str]:
    """`compiled`, with what the seed changes."""
    kernel, (*numbers, config), options = gate.source(case)
    if seed.mutant:
        from mutants import engine, kernel_text

        kernel = engine.load(kernel_text.HOPPER_MODULES, kernel_text.COMPILED[seed.mutant])[kernel_text.GEMM].gemm
    if seed.change:
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in seed.change.items()}
        config = dataclasses.replace(config, **fields)
    return _built(gate, case, kernel, (*numbers, config), options | seed.options)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the cases of a gate, and print their faults.")
    parser.add_argument("gate", help="such as 'hopper gemm'")
    parser.add_argument(
        "what", nargs="+",
        help="all, quick, names of cases; names, keys: compile nothing, and print the names or the keys of all",
    )  # fmt: skip
    parser.add_argument("--arch", default="", choices=("", *DEVICES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--change", type=json.loads, default={}, help="other fields of the case's config")
    parser.add_argument("--options", type=json.loads, default={}, help="other options of the compiler")
    parser.add_argument("--mutant", default="", help="of tests/mutants/kernel_text.py")
    given = parser.parse_args()
    what = ["all"] if given.what in (["names"], ["keys"]) else given.what
    chosen = cases(load(given.gate), *what, arch=given.arch)
    make_row = functools.partial(row, given.gate, Seed(given.change, given.options, given.mutant))
    if given.what == ["names"]:
        rows: Any = ({"name": case.name, "arch": case.arch} for case in chosen)
    elif given.what == ["keys"]:
        rows = held.keys(given.gate, given.arch)
    elif given.processes == 1:
        rows = map(make_row, chosen)
    else:
        rows = multiprocessing.get_context("spawn").Pool(given.processes).imap_unordered(make_row, chosen, 1)
    for one in rows:
        print(json.dumps(one), flush=True)


# Arguments of no address ----------------------------------------------------------------------------------------------


def fill_gemm(
    arguments: Any, plan: Plan, layout: Any, maps: Sequence[Any] = (), *, address: int = 0, out_address: int = 0,
    log: Pointer | None = None, **more: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of a product. ``maps``: of A, B and the output; else pointers, the operands at ``address``."""
    inputs = maps or [Pointer(dtype, address) for dtype in plan.problem.dtypes]
    given = operands(plan, layout, inputs, scale_address=0 if maps else 4, out_address=out_address, log=log)
    return tuple(arguments.fill(given, gate=gate_arguments(plan), **more))


def attention_layout(p: AttentionProblem, table: int = 64) -> AttentionLayout:
    """Of contiguous operands; rows of an odd number of elements where they are not aligned."""

    def strides(rows: int, heads: int, columns: int) -> tuple[int, int, int]:
        row = heads * columns + (not p.aligned)
        return rows * row, row, columns

    rows_q = 0 if p.varlen else p.seqlen_q
    rows_k = p.page_size or (0 if p.tokens_k else p.seqlen_k)
    lse = (0, p.heads_q, 1) if p.varlen else (p.heads_q * p.seqlen_q, 1, p.seqlen_q)
    return AttentionLayout(
        strides(rows_q, p.heads_q, p.head_dim), strides(rows_k, p.heads_kv, p.head_dim),
        strides(rows_k, p.heads_kv, p.head_dim_v), strides(rows_q, p.heads_q, p.head_dim_v),
        lse if p.return_lse else None, table if p.page_size else 0,
    )  # fmt: skip
