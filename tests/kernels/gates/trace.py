"""The compile gate of the trace: free where it is off, and within the registers where it is on.

"Free" is asked of the machine code: a kernel that is compiled without its trace, and one from whose text every
``if C.TRACE:`` was struck out, are the same instruction for instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gates import engine
from gates.engine import Case, IsWanted, Rules
from mutants.engine import at, delete, load, replace
from tilestream_tools.isa.build import build
from tilestream_tools.isa.sass import disassembled

KERNELS = "tilestream.kernels"
TRACED = "if C.TRACE:\n    ..."
_ELSE = "places: gl.constexpr = None"
_ITEMS = at(f"{KERNELS}.device.items", delete(TRACED, count=2))
_EDITS = {
    "portable gemm": (*_ITEMS, *at(f"{KERNELS}.portable.gemm", delete(TRACED))),
    "portable attention": at(f"{KERNELS}.portable.attention", delete(TRACED, count=3)),
    "hopper gemm": (*_ITEMS, *at(f"{KERNELS}.hopper.gemm", delete(TRACED, count=3))),
    "portable grouped sources": at(f"{KERNELS}.portable.grouped_sources", delete(TRACED, count=3)),
    "hopper grouped sources": (
        *at(f"{KERNELS}.hopper.gemm", delete(TRACED, count=3)),
        *at(f"{KERNELS}.hopper.grouped", delete(TRACED)),
        *at(f"{KERNELS}.hopper.grouped_sources", delete(TRACED, count=2)),
    ),
    "hopper attention": (
        *at(f"{KERNELS}.hopper.attention_load", delete(TRACED, count=2)),
        *at(f"{KERNELS}.hopper.attention_math", delete(TRACED)),
        *at(f"{KERNELS}.hopper.attention", delete(TRACED), replace(f"{TRACED}\nelse:\n    {_ELSE}", _ELSE)),
    ),
}
#: Gates, and cases of theirs.
CASES = {
    "portable gemm": (
        "bfloat16 64x64 plain nt", "bfloat16 128x256 worst nt", "bfloat16 128x128 arriving nt",
        "float32 128x128 worst nt",
    ),
    "portable attention": ("bfloat16 128 128x64 causal", "bfloat16 128 128x32 arriving"),
    "hopper gemm": (
        "single 64x64 bfloat16 worst nt", "single 64x32 bfloat16 arriving nt", "ping_pong 64x128 bfloat16 plain nn",
        "cooperative 128x128 bfloat16 rows nt", "cooperative 128x256 bfloat16 plain nt",
        "cooperative 128x128 fp8 precise plain nt", "cooperative 256x128 bfloat16 across nt",
        "cooperative 128x128 bfloat16 worst nt",
    ),
    "portable grouped sources": ("bfloat16 128x128 arrives", "bfloat16 64x64 there"),
    "hopper grouped sources": ("cooperative 128x256 bfloat16 arrives", "ping_pong 64x128 bfloat16 there"),
    "hopper attention": (
        "128-128 causal unordered 2x128", "64-64 full ordered 3x128", "128-128 arriving ordered 2x128",
        "256-256 worst ordered 2x32",
    ),
}  # fmt: skip
QUICK = (
    "portable gemm bfloat16 64x64 plain nt", "portable attention bfloat16 128 128x64 causal",
    "hopper gemm single 64x64 bfloat16 worst nt", "hopper gemm single 64x32 bfloat16 arriving nt",
    "hopper attention 128-128 causal unordered 2x128",
)  # fmt: skip


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    for name, chosen in CASES.items():
        for one in chosen:
            if is_wanted("sm_90a", f"{name} {one}"):
                for case in engine.cases(engine.load(name), one, arch="sm_90a"):
                    yield case._replace(name=f"{name} {one}", how=(name, case))


def rules_of(case: Case) -> Rules:
    """The case is compiled three times: without its trace, without the text of the trace, and with its trace."""
    name, of_gate = case.how
    gate = engine.load(name)
    kernel, *source = gate.source(of_gate)
    off, _ = build(kernel, *source, case.arch)
    struck, _ = build(without_trace(name, kernel), *source, case.arch)
    on, said = engine.compiled(gate, of_gate, trace=True)
    found = gate.rules(of_gate, on, said)
    times = [one.asm["ptx"].count("globaltimer") - struck.asm["ptx"].count("globaltimer") for one in (off, on)]
    wanted: Rules = {
        "machine code where it is off": (is_same(off, struck), True),
        "looks at the clock where it is off": (times[0], 0),
        "looks at the clock where it is on": (times[1], range(1, 1000)),
    }
    if "registers" in found:
        split, planned = found["registers"]
        wanted["registers"] = (sorted(set(planned) - set(split)), [])
    # With all that an epilogue has, no register is to spare: a trace costs a few spills there, and some time.
    is_full = "worst" in case.name or "arriving" in case.name
    kept = ("the assembler's notes", "barriers whose place something else takes")
    kept += () if is_full else tuple(rule for rule in found if rule.startswith("spills"))
    return wanted | {f"{rule} where it is on": found[rule] for rule in kept if rule in found}


def without_trace(name: str, kernel: Any) -> Any:
    """The kernel from whose text every ``if C.TRACE:`` was struck out."""
    edits = _EDITS[name]
    modules = list(dict.fromkeys(edit.module for edit in edits))
    return getattr(load(modules, edits)[modules[-1]], kernel.fn.__name__)


def is_same(off: Any, struck: Any) -> bool:
    """Whether they are the same machine code, or made by the assembler of the same program.

    Where a kernel is large, the assembler orders the same instructions by what debug information there is: the name of
    the file, which is another one where the text was changed.
    """
    one, other = (disassembled(kernel.asm["cubin"]) for kernel in (off, struck))
    return one == other or program(off.asm["ptx"]) == program(struck.asm["ptx"])


def program(ptx: str) -> Sequence[str]:
    """Its lines, without debug information."""
    lines = (line.partition("//")[0].strip() for line in ptx.partition(".section")[0].splitlines())
    return [line for line in lines if line and not line.startswith((".loc", ".file"))]
