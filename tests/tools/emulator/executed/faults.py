"""Faults seeded into machine code, one at a time: what share of them does the emulator find?

A fault is a change of one instruction that the kernel executes. It is found if one of `ORDERS` ends in a fault of the
emulator, in wrong numbers, or in no end. Some changes alter nothing that a program may rely on, such as a wait that
another one follows; they count as missed like all others.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from executed.cases import cases
from tilestream_tools.emulator import Fault, decode

#: Landing and seed.
ORDERS = (("late", 1), ("random", 2), ("random", 3), ("late", 4), ("early", 5), ("random", 6))
#: What faults are seeded into: the architecture, and kernels and names of cases.
BASES = (
    "gfx942 portable GEMM, gated: chunks out of order", "gfx950 portable GEMM, stream-K: two dies",
    "gfx950 portable GEMM, gated: a chunk is lost", "gfx942 portable GEMM, copied: arrival order, two dies",
    "gfx950 cdna GEMM, stream-K: 128x128, two dies", "gfx942 cdna attention: causal, bfloat16",
    "gfx950 portable attention: causal, bfloat16",
)  # fmt: skip


class Seeded(NamedTuple):
    """A kind of fault.

    Attributes
    ----------
    pattern, change
        The instructions that can have it; of such a line, the faulty one.
    in_poll
        Whether only loops that wait for a chunk can: those that sleep.
    """

    name: str
    pattern: str
    change: Callable[[str], str]
    in_poll: bool = False


def _deleted(line: str) -> str:
    return ""


def _weakened(line: str) -> str:
    return re.sub(r"(vmcnt|lgkmcnt)\((\d+)\)", lambda m: f"{m[1]}({int(m[2]) + 1})", line)


def _farther(line: str) -> str:
    """16 bytes on."""
    if "offset:" in line:
        return re.sub(r"offset:(\d+)", lambda m: f"offset:{int(m[1]) + 16}", line)
    return f"{line.partition(';')[0].rstrip()} offset:16"


def _swapped(line: str) -> str:
    return re.sub(r"(v_mfma\S+ [^ ]+), (v\[[^]]+\]), (v\[[^]]+\])", r"\1, \3, \2", line)


def _other_swizzle(line: str) -> str:
    """Another bit of the address is flipped."""
    return re.sub(r"(v_xor_b32_e32 v\d+, )(0x[0-9a-f]+|\d+)", lambda m: f"{m[1]}{int(m[2], 0) ^ 0x30:#x}", line)


KINDS = (
    Seeded("a wait is weakened by one", r"s_waitcnt", _weakened),
    Seeded("a wait is deleted", r"s_waitcnt", _deleted),
    Seeded("a barrier is deleted", r"s_barrier", _deleted),
    Seeded("a scope is narrowed", r".* sc1", lambda line: line.replace(" sc1", "")),
    Seeded("an invalidation is deleted", r"buffer_inv", _deleted),
    Seeded("a write-back is deleted", r"buffer_wbl2", _deleted),
    Seeded("a poll never looks", r"global_load_dword .* sc0 sc1", _deleted, in_poll=True),
    Seeded("an atomic is deleted", r"global_atomic", _deleted),
    Seeded("an LDS offset is off", r"ds_(read|write)_(b|u)", _farther),
    Seeded("an LDS access is deleted", r"ds_(read|write)", _deleted),
    Seeded("a load's or store's offset is off", r"(buffer|global)_(load|store)_.*dword", _farther),
    Seeded("a store is deleted", r"(buffer|global)_store", _deleted),
    Seeded("a swizzle is another", r"v_xor_b32_e32 v\d+, (0x[0-9a-f]+|\d+)", _other_swizzle),
    Seeded("a matrix instruction is deleted", r"v_mfma", _deleted),
    Seeded("matrix operands are swapped", r"v_mfma.*v\[\d+:\d+\], v\[\d+:\d+\], v", _swapped),
    Seeded("a branch is inverted", r"s_cbranch_(scc|vcc|exec)", lambda line: _inverted(line)),
)


def _inverted(line: str) -> str:
    pairs = {"scc0": "scc1", "scc1": "scc0", "vccz": "vccnz", "vccnz": "vccz", "execz": "execnz", "execnz": "execz"}
    return re.sub("|".join(sorted(pairs, key=len, reverse=True)), lambda m: pairs[m[0]], line)


class Tried(NamedTuple):
    """A fault that was seeded. ``how``: it was found: by a check, by numbers, by no end; empty if it was missed."""

    kind: str
    base: str
    line: str
    how: str


def tried(per_kind: int, seed: int = 1) -> Iterator[Tried]:
    """So many faults of each kind, spread over `BASES`."""
    chance, bases = random.Random(seed), [Base(name) for name in BASES]
    for kind in KINDS:
        sites = [(base, line) for base in bases for line in base.sites(kind)]
        for base, line in chance.sample(sites, min(per_kind, len(sites))):
            yield Tried(kind.name, base.name, base.texts[line], base.finds(kind, line))


class Base:
    """A case that is right, and the lines that it executes."""

    def __init__(self, name: str) -> None:
        self.name = name
        (case,) = (one for one in cases() if f"{one.arch} {one.kernel}: {one.name}" == name)
        self.problem: Any = case.make()
        machines = [self.problem.run(landing=landing, seed=number) for landing, number in ORDERS[:2]]
        self.text = self.problem.built.text
        self._limit = 4 * max(one.executed for one in machines) + 100_000
        program = decode(self.text)
        steps, loops = program.steps, [loop for loop in program.kernel.loops if loop.counts["sleep"]]
        self._polls = {one.line for one in min(loops, key=lambda loop: len(loop.body)).instructions} if loops else set()
        visited = set.intersection(*(one.visited for one in machines))
        waited = set.intersection(*(one.waited for one in machines))
        self.texts = {
            steps[pc].line: steps[pc].text for pc in sorted(visited)
            if pc in waited or not steps[pc].text.startswith("s_waitcnt")
        }  # fmt: skip

    def sites(self, kind: Seeded) -> list[int]:
        """Lines that can have the fault."""
        return [
            line for line, text in self.texts.items()
            if re.match(kind.pattern, text) and kind.change(text) != text and (line in self._polls or not kind.in_poll)
        ]  # fmt: skip

    def finds(self, kind: Seeded, line: int) -> str:
        """How the fault is found; empty if it is not."""
        lines = self.text.split("\n")
        lines[line - 1] = kind.change(lines[line - 1])
        for landing, seed in ORDERS:
            try:
                self.problem.run(landing=landing, seed=seed, text="\n".join(lines), limit=self._limit)
            except Fault as fault:
                return "no end" if "no end" in str(fault) or "no wave can go on" in str(fault) else "a check"
            except AssertionError:
                return "numbers"
        return ""


def table(found: list[Tried]) -> list[dict[str, Any]]:
    """By kind: how many were tried and how many found, and how."""
    rows = []
    for kind in dict.fromkeys(one.kind for one in found):
        of_kind = [one for one in found if one.kind == kind]
        hows = Counter(one.how for one in of_kind)
        missed = [f"{one.base}: {one.line}" for one in of_kind if not one.how]
        rows.append({
            "fault": kind, "tried": len(of_kind), "found": len(of_kind) - hows[""], "by a check": hows["a check"],
            "by numbers": hows["numbers"], "by no end": hows["no end"], "missed": missed,
        })  # fmt: skip
    return rows


# Hand-overs without their drain ---------------------------------------------------------------------------------------

#: Case by case: those in which one lane publishes what all waves stored.
HAND_OVERS = (
    ("gfx942", "portable GEMM, stream-K", "two dies"), ("gfx950", "portable GEMM, stream-K", "two dies"),
    ("gfx942", "portable GEMM, copied", "one piece a chunk"), ("gfx950", "cdna GEMM, stream-K", "128x128, two dies"),
)  # fmt: skip


def undrained(arch: str, kernel: str, name: str) -> dict[str, Any]:
    """How many of some seeds are right as compiled, and wrong without the drain, where stores land late.

    A seed may be right without it: the workgroup that publishes last may find the others' stores landed.
    """
    (case,) = (one for one in cases() if (one.arch, one.kernel, one.name) == (arch, kernel, name))
    problem, right, wrong, seeds = case.make(), 0, 0, range(5)
    for seed in seeds:
        problem.run(landing="late", seed=seed)
        right += 1
        text = re.sub(r"(#ASMSTART\n)\ts_waitcnt vmcnt\(0\)\n", r"\1", problem.built.text)
        assert text != problem.built.text, "no drain was found"
        try:
            problem.run(landing="late", seed=seed, text=text)
        except AssertionError:
            wrong += 1
    return {
        "kernel": kernel, "name": name, "arch": arch, "orders": len(seeds), "right": right, "undrained wrong": wrong
    }  # fmt: skip
