"""Faults seeded into machine code, one at a time: what share of them does the emulator find?

A fault is a change of one instruction that the kernel executes. It is found if an order of `ORDERS` ends in a fault of
the emulator, in wrong numbers, or in no end: of the case that it was drawn for, or of another one with the same machine
code. `HARMLESS` names changes that alter nothing that a program may rely on, and says why; in place of one that was
drawn and not found another is drawn.
"""

from __future__ import annotations

import ast
import functools
import gc
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from executed.cases import cases
from tilestream_tools.emulator import Fault, decode

#: Landing and seed.
ORDERS = (("late", 1), ("random", 2), ("random", 3), ("late", 4), ("early", 5), ("random", 6))
#: What faults are seeded into, as architecture, kernel and case; then the other cases with the same machine code.
BASES = (
    ("gfx942 portable GEMM, gated: chunks out of order", "a chunk is lost", "a producer fails"),
    ("gfx950 portable GEMM, stream-K: two dies",),
    ("gfx950 portable GEMM, gated: a chunk is lost", "chunks out of order", "a producer fails"),
    ("gfx942 portable GEMM, copied: arrival order, two dies", "the deadline passes"),
    ("gfx950 cdna GEMM, stream-K: 128x128, two dies",),
    ("gfx942 cdna attention: causal, bfloat16",),
    ("gfx950 portable attention: causal, bfloat16", "causal, more keys, bfloat16"),
)
#: Likewise, with the one of several kernels in front that is changed. Of these there are fewer faults.
RANKS = (
    ("push_rows @ gfx942 mixture over ranks: more experts than lanes",),
    (
        "take_rows @ gfx950 mixture over ranks: two calls, late peers", "a head is lost", "rows are lost",
        "a peer gives up", "a peer gives up behind its head",
    ),
    ("push_results @ gfx950 mixture over ranks: two calls, late peers", "rows are lost"),
)  # fmt: skip


class Harmless(NamedTuple):
    """Changes that alter nothing. ``where``: a pattern of the base, the instruction and the functions it comes from."""

    kind: str
    where: str
    why: str


#: Looked up for a fault that was not found. `tilestream.kernels.device` has the functions.
HARMLESS = (
    Harmless(
        "an invalidation is deleted",
        "buffer_inv .* in poll_signal, chunks_state",
        "a queue is picked by it; the gate polls the same chunk again, and invalidates, before the tile is loaded",
    ),
    Harmless(
        "an invalidation is deleted",
        "buffer_inv sc1 in count_in, copy_items",
        "the last copier of a chunk reads nothing that the others have stored, and publishes what is in memory",
    ),
    Harmless(
        "a scope is narrowed",
        "buffer_inv .* in (poll_signal, chunks_state|count_in, copy_items)",
        "deleted it is harmless, too: see there",
    ),
    Harmless(
        "a write-back is deleted",
        "copied.*buffer_wbl2 sc0 sc1",
        "each piece was written back before it was counted; what is left is the count's reset, for the next launch",
    ),
    Harmless("a scope is narrowed", "copied.*buffer_wbl2 sc0 sc1", "deleted it is harmless, too: see there"),
    Harmless(
        "a scope is narrowed",
        "copied.*global_atomic_swap",
        "the kernel itself has copied the chunk: no other device polls",
    ),
    Harmless(
        "an atomic is deleted",
        "arrival order.*global_atomic_smax.* in enter",
        "in arrival order each look at a queue raises its counter, by the same atomic maximum",
    ),
    Harmless(
        "an atomic is deleted",
        "global_atomic_smax.* in latest, present",
        "the clock is as old as the last poll of any worker, by its contract; only the record's time waited shows it",
    ),
    Harmless(
        "a wait is weakened by one",
        "push_rows.*vmcnt.* in _drain_on_device, count_landed",
        "behind its rows each wave has loaded an expert's end, and waited for it",
    ),
    Harmless(
        "a write-back is deleted",
        "push_.*buffer_wbl2 sc0 sc1 in (count_rows|push_results)",
        "each worker has written back before it counted; what is left is the count's reset, for the next launch",
    ),
    Harmless(
        "an invalidation is deleted",
        "push_.*buffer_inv.* in (count_landed|word_at)",
        "behind it nothing is read that others have written since the launch began",
    ),
    Harmless(
        "an invalidation is deleted",
        "take_rows.*buffer_inv sc0 sc1 in (await_all|word_at|look)",
        "signals and the mark are looked at one behind the other, and each look invalidates; own rows are an earlier "
        "launch's",
    ),
    Harmless(
        "a scope is narrowed",
        "(take_rows.*buffer_inv.* in (await_all|word_at|look)|push_.*buffer_inv.* in (count_landed|word_at))",
        "deleted it is harmless, too: see there",
    ),
)


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
    """A fault that was seeded.

    Attributes
    ----------
    line, place
        The instruction; the functions that it comes from, innermost first.
    how
        It was found: by a check, by numbers, by no end; empty if it was missed.
    why
        Why it is harmless; empty if it is not.
    """

    kind: str
    base: str
    line: str
    place: str
    how: str
    why: str = ""


def tried(per_kind: int, seed: int = 1, only: str = "") -> Iterator[Tried]:
    """So many faults of each kind that are not harmless, spread over `BASES`; of the kinds with this in their names.

    A quarter as many of `RANKS`.
    """
    yield from _tried([Base(*names) for names in BASES], per_kind, seed, only)
    yield from _tried([Base(*names) for names in RANKS], -(-per_kind // 4), seed, only)


def _tried(bases: list[Base], per_kind: int, seed: int, only: str) -> Iterator[Tried]:
    for kind in KINDS:
        chance, left = random.Random(f"{seed} {kind.name}"), per_kind
        sites = [(base, line) for base in bases for line in base.sites(kind)]
        for base, line in chance.sample(sites, len(sites)) if only in kind.name else ():
            one = Tried(kind.name, base.name, base.texts[line], base.place(line), base.finds(kind, line))
            if not one.how:
                one = one._replace(why=why_harmless(one))
            left -= not one.why
            yield one
            if not left:
                break


def why_harmless(one: Tried) -> str:
    """Empty if it is not."""
    said = f"{one.base}: {one.line} in {one.place}"
    return next((known.why for known in HARMLESS if known.kind == one.kind and re.search(known.where, said)), "")


class Base:
    """A case that is right, the lines that it executes, and other cases with the same machine code."""

    def __init__(self, name: str, *others: str) -> None:
        self.name, kernel = name, name.partition(":")[0]
        self._problems = [_problem(name), *(_problem(f"{kernel}: {other}") for other in others)]
        self._limits = []
        for problem in self._problems:
            machines = [problem.run(landing=landing, seed=number) for landing, number in ORDERS[:2]]
            self._limits.append(4 * max(one.executed for one in machines) + 100_000)
            if problem is self._problems[0]:
                visited = set.intersection(*(one.visited for one in machines))
                waited = set.intersection(*(one.waited for one in machines))
        self.text = self._problems[0].built.text
        assert all(problem.built.text == self.text for problem in self._problems), f"{name}: another machine code"
        program = decode(self.text)
        steps, loops = program.steps, [loop for loop in program.kernel.loops if loop.counts["sleep"]]
        self._polls = {one.line for one in min(loops, key=lambda loop: len(loop.body)).instructions} if loops else set()
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

    def place(self, line: int) -> str:
        """The functions that an instruction comes from, innermost first."""
        lines = self.text.split("\n")
        files = {
            Path(name).name: Path(folder, name) for folder, name in re.findall(r'\.file\s+\d+ "(.*)" "(.*)"', self.text)
        }
        for said in reversed(lines[:line]):
            found = re.findall(r"([\w.]+\.py):(\d+):\d+", said) if ".loc" in said else []
            if found and all(int(number) for _, number in found):
                return ", ".join(_function(files[name], int(number)) for name, number in found)
        return ""

    def finds(self, kind: Seeded, line: int) -> str:
        """How the fault is found; empty if it is not."""
        lines = self.text.split("\n")
        lines[line - 1] = kind.change(lines[line - 1])
        for problem, limit in zip(self._problems, self._limits, strict=True):
            for landing, seed in ORDERS:
                try:
                    problem.run(landing=landing, seed=seed, text="\n".join(lines), limit=limit)
                except Fault as fault:
                    return "no end" if "no end" in str(fault) or "no wave can go on" in str(fault) else "a check"
                except AssertionError:
                    return "numbers"
                finally:
                    gc.collect()  # which nothing else does: see `executed.engine`
        return ""


def _problem(name: str) -> Any:
    kernel, _, wanted = name.rpartition(" @ ")
    (case,) = (one for one in cases() if f"{one.arch} {one.kernel}: {one.name}" == wanted)
    problem = case.make()
    if kernel:
        problem.seeded = kernel
    return problem


@functools.cache
def _functions(file: Path) -> list[tuple[int, int, str]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [(n.lineno, n.end_lineno or n.lineno, n.name) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]


def _function(file: Path, line: int) -> str:
    around = [(end - begin, name) for begin, end, name in _functions(file) if begin <= line <= end]
    return min(around, default=(0, file.stem))[1]


def _site(one: Tried) -> dict[str, str]:
    return {"base": one.base, "line": one.line, "place": one.place}


def table(found: list[Tried]) -> list[dict[str, Any]]:
    """By kind: how many were tried and how many found, and how; those that were missed, and the harmless ones."""
    rows = []
    for kind in dict.fromkeys(one.kind for one in found):
        of_kind = [one for one in found if one.kind == kind]
        real = [one for one in of_kind if not one.why]
        hows = Counter(one.how for one in real)
        rows.append({
            "fault": kind, "tried": len(real), "found": len(real) - hows[""], "by a check": hows["a check"],
            "by numbers": hows["numbers"], "by no end": hows["no end"],
            "missed": [_site(one) for one in real if not one.how],
            "harmless": [{**_site(one), "why": one.why} for one in of_kind if one.why],
        })  # fmt: skip
    return rows


# Hand-overs without their drain ---------------------------------------------------------------------------------------

#: Case by case: those in which one lane publishes what all waves stored.
HAND_OVERS = (
    ("gfx942", "portable GEMM, stream-K", "two dies"), ("gfx950", "portable GEMM, stream-K", "two dies"),
    ("gfx942", "portable GEMM, copied", "one piece a chunk"), ("gfx950", "cdna GEMM, stream-K", "128x128, two dies"),
    ("gfx950", "mixture over ranks", "more experts than lanes", "push_rows @ "),
)  # fmt: skip


def undrained(arch: str, kernel: str, name: str, changed: str = "") -> dict[str, Any]:
    """How many of some seeds are right as compiled, and wrong without the drain, where stores land late.

    A seed may be right without it: the workgroup that publishes last may find the others' stores landed.
    """
    problem, right, wrong, seeds = _problem(f"{changed}{arch} {kernel}: {name}"), 0, 0, range(5)
    for seed in seeds:
        problem.run(landing="late", seed=seed)
        right += 1
        text = re.sub(r"(#ASMSTART\n)\ts_waitcnt vmcnt\(0\)\n", r"\1", problem.built.text)
        assert text != problem.built.text, "no drain was found"
        try:
            problem.run(landing="late", seed=seed, text=text)
        except (AssertionError, Fault):
            wrong += 1
    return {
        "kernel": kernel, "name": name, "arch": arch, "orders": len(seeds), "right": right, "undrained wrong": wrong
    }  # fmt: skip
