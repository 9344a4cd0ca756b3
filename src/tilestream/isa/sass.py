"""SASS as ``cuobjdump`` writes it, and PTX: loops that multiply, registers, stack, places in shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def disassembled(cubin: bytes) -> tuple[str, str]:
    """A cubin's SASS and its resource usage, by the ``cuobjdump`` that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, usage = (
            subprocess.run([tool, how, file.name], capture_output=True, text=True, check=True).stdout
            for how in ("-sass", "-res-usage")
        )
    return sass, usage


def stack_bytes(usage: str) -> int:
    """Bytes of stack, of ``cuobjdump -res-usage``; -1 where it does not say."""
    return max((int(x) for x in re.findall(r"STACK:(\d+)", usage)), default=-1)


def registers(usage: str) -> int:
    """Registers of a thread at launch."""
    return max((int(x) for x in re.findall(r"REG:(\d+)", usage)), default=0)


def spilled_bytes(said: str) -> int:
    """Bytes that ptxas says it spilled, stores and loads."""
    return sum(int(x) for x in re.findall(r"(\d+) bytes spill", said))


def k_loops(sass: str) -> list[dict[str, int]]:
    """The innermost loops that multiply: multiplications, barriers of warps, and how many are left in flight."""
    return [
        {
            "gmma": sum(bool(re.search(r"\b[HQ]GMMA", text)) for text in body),
            "barriers": sum("BAR.SYNC" in text for text in body),
            "in_flight": max((int(x, 16) for x in re.findall(r"gsb0, 0x(\w+)", "\n".join(body))), default=-1),
        }
        for body in loop_texts(sass)
    ]


def loop_texts(sass: str, multiply: str = r"\b[HQ]GMMA") -> list[list[str]]:
    """The instructions of the innermost loops around what matches ``multiply``, in the code's order."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    multiplies = [at for at, text in code if re.search(multiply, text)]
    loops = [
        (at - int(to, 16), int(to, 16), at)
        for at, text in code
        for to in re.findall(r"\bBRA (?:\S+, )?0x([0-9a-f]+)", text)
        if int(to, 16) < at
    ]
    # A wait that does not pass at once spins at the function's end, and comes back: that is a "loop" around much else.
    enclosing = [[loop for loop in loops if loop[1] <= one <= loop[2]] for one in multiplies]
    around = {min(each) for each in enclosing if each}
    inner = [
        (low, high)
        for length, low, high in around
        if not any(other < length and first <= high and low <= last for other, first, last in around)
    ]
    return [[text for at, text in code if low <= at <= high] for low, high in sorted(inner)]


def wgmma_shapes(ptx: str) -> dict[str, int]:
    """Warp-group multiplications of the PTX by shape and types: ``m64n256k16.f32.bf16.bf16``."""
    found: dict[str, int] = {}
    for name in re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx):
        found[name] = found.get(name, 0) + 1
    return found


def loop_counts(body: list[str]) -> dict[str, Any]:
    """Of a loop's instructions, how many there are of what a report names."""
    patterns = {
        "gmma": r"\b[HQ]GMMA", "mma": r"\b[HQIDF]?MMA\b", "tma_loads": r"\bUTMALDG", "async_copies": r"\bLDGSTS",
        "loads": r"\bLDG\b", "lds_reads": r"\bLDSM?\b", "lds_writes": r"\bSTSM?\b", "barriers": r"\bBAR\.SYNC",
        "mbarrier": r"\bSYNCS\b", "local": r"\b(?:LDL|STL)\b",
    }  # fmt: skip
    counts = {name: sum(bool(re.search(pattern, text)) for text in body) for name, pattern in patterns.items()}
    return {"instructions": len(body), **{name: count for name, count in counts.items() if count}}


def reused_barriers(ptx: str) -> list[int]:
    """Places in shared memory, in bytes, where a barrier is made and where something else lies later.

    A barrier that nobody uses is dead to the compiler, which gives its place away, without an ``mbarrier.inval``. See
    `tilestream.kernels.hopper.ring` for what becomes of what lies there.
    """
    where = {name: int(at) for name, at in re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx)}
    made = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)
    barriers = {where[name] for name in made if name in where}
    plain = re.findall(r"(?:ld|st)\.shared\S*\s[^;\n]*\[ ?(?:global_smem\+(\d+)|(%r\d+)(?: \+ 0)? ?)\]", ptx)
    others = {int(at) if at else where.get(name, -1) for at, name in plain}
    return sorted(barriers & others)
