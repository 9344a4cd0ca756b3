"""SASS as ``cuobjdump`` writes it, and PTX: loops that multiply, registers, stack, places in shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


def disassembled(cubin: bytes) -> tuple[str, str]:
    """A cubin's SASS and its resource usage, by the ``cuobjdump`` that comes with Triton.

    Raises
    ------
    RuntimeError
        If that is older than the architecture: Triton 3.6's does not read sm_103.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        runs = [
            subprocess.run([tool, how, file.name], capture_output=True, text=True, check=False)
            for how in ("-sass", "-res-usage")
        ]
    for run in runs:
        if run.returncode:
            raise RuntimeError(f"the cuobjdump of Triton {triton.__version__} cannot read it: {run.stderr.strip()}")
    return runs[0].stdout, runs[1].stdout


def stack_bytes(usage: str) -> int:
    """Bytes of stack, of ``cuobjdump -res-usage``; -1 where it does not say."""
    return max((int(x) for x in re.findall(r"STACK:(\d+)", usage)), default=-1)


def registers(usage: str) -> int:
    """Registers of a thread at launch."""
    return max((int(x) for x in re.findall(r"REG:(\d+)", usage)), default=0)


def spilled_bytes(said: str) -> int:
    """Bytes that ptxas says it spilled, stores and loads."""
    return sum(int(x) for x in re.findall(r"(\d+) bytes spill", said))


def stack_by_ptxas(said: str) -> int:
    """Bytes of stack that ptxas says it took; -1 where it does not say."""
    return max((int(x) for x in re.findall(r"(\d+) bytes stack frame", said)), default=-1)


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
        "gmma": r"\b[HQ]GMMA", "mma": r"\b[HQIDF]?MMA\b", "tcgen05": r"\bUTC[HQ]MMA\b", "tma_loads": r"\bUTMALDG",
        "async_copies": r"\bLDGSTS", "loads": r"\bLDG\b", "lds_reads": r"\bLDSM?\b", "lds_writes": r"\bSTSM?\b",
        "barriers": r"\bBAR\.SYNC", "mbarrier": r"\bSYNCS\b", "local": r"\b(?:LDL|STL)\b",
    }  # fmt: skip
    counts = {name: sum(bool(re.search(pattern, text)) for text in body) for name, pattern in patterns.items()}
    return {"instructions": len(body), **{name: count for name, count in counts.items() if count}}


# Looks at signals, as PTX has them -----------------------------------------------------------------------------------

#: A load, or an atomic operation, that acquires at system scope, with the predicate that it stands under.
_LOOK = re.compile(r"(?:@(%p\d+)\s+)?\b(?:ld|atom)\.(?=\S*\bsys\b)(?=\S*\bacquire\b)")
#: A thread's number among its warp's, or its group's of four warps.
_LANE = r"\band\.b32\s+({register}),\s*%r\d+,\s*(?:31|127);"


def looks(ptx: str) -> tuple[int, int]:
    """How often signals are looked at (acquired at system scope): by one lane, and by more than one.

    One lane: under a predicate that is true of one thread of a warp, or of four, or that asks for that and more.
    """
    under = [found[1] for found in _LOOK.finditer(ptx)]
    alone = sum(predicate is not None and _of_one_lane(ptx, predicate) for predicate in under)
    return alone, len(under) - alone


def _of_one_lane(ptx: str, predicate: str) -> bool:
    name = re.escape(predicate)
    if re.search(rf"\belect\.sync\s+\S+\|{name}\b", ptx):
        return True
    if both := re.search(rf"\band\.pred\s+{name},\s*(%p\d+),\s*(%p\d+);", ptx):
        return any(_of_one_lane(ptx, one) for one in both.groups())
    found = re.search(rf"\bsetp\.eq\.[bsu]32\s+{name},\s*(%r\d+),\s*0;", ptx)
    return found is not None and re.search(_LANE.format(register=re.escape(found[1])), ptx) is not None


# Barriers in shared memory, as PTX has them ------------------------------------------------------------------------


class Place(NamedTuple):
    """Where something lies in shared memory: ``at`` bytes, and as many more as a register says where ``indexed``."""

    at: int
    indexed: bool


_BARRIER_BYTES = 8
#: What addresses a thread's share of shared memory by itself; `stmatrix` and `ldmatrix` a row of 16 bytes.
_ACCESS = re.compile(r"\b((?:ld|st|atom|red|stmatrix|ldmatrix|cp\.async)\b[\w.:]*\.shared[\w.:]*)\s+([^;]*);")
_DEFINED = re.compile(r"(?m)^\s*(@\S+\s+)?([a-z][\w.:]*)\s+(%\w+|\{[^}]*\})\s*,\s*([^;]*);")


def made_barriers(ptx: str) -> list[tuple[Place | None, int]]:
    """Barriers in the order they are made: where, None if it cannot be told, and how many arrivals a phase takes."""
    places = _Places(ptx)
    made = re.findall(r"mbarrier\.init[\w.:]*\s+\[([^\]]*)\],\s*(\d+)", ptx)
    return [(places.of(address), int(count)) for address, count in made]


def reused_barriers(ptx: str) -> list[int]:
    """Places in shared memory, in bytes, where a barrier is made and where something else lies.

    An unused barrier is dead to the compiler, which gives its place away, without an ``mbarrier.inval``. See
    `tilestream.kernels.hopper.ring` for what becomes of what lies there.

    Seen are loads, stores, atomics, matrix stores and asynchronous copies of any width, at a place that is a constant.
    Where it is a constant and an index, seen is what begins where a barrier does: indices need not begin with 0 (the
    warps that others tell what to run are numbered from 4 on). Not seen are other places of what is indexed, addresses
    that registers say without a constant (of what is swizzled), and what TMA reads and writes.

    Raises
    ------
    ValueError
        If there are barriers, and not one's place can be told: nothing could be found then.
    """
    places = _Places(ptx)
    barriers = {place.at for place, _ in made_barriers(ptx) if place is not None}
    if not barriers and "mbarrier" in ptx:
        raise ValueError("reused_barriers: there are barriers in this PTX, and no place where one is made can be read")
    found = set()
    for name, operands in _ACCESS.findall(ptx):
        if ".bulk" in name:
            continue
        place = places.of(operands.partition("[")[2].partition("]")[0])
        if place is not None:
            begin, end = place.at, place.at + (1 if place.indexed else _bytes(name, operands))
            room = 1 if place.indexed else _BARRIER_BYTES
            found |= {at for at in barriers if at < end and begin < at + room}
    return sorted(found)


def idle_barriers(ptx: str, sizes: Sequence[int]) -> list[int]:
    """Of arrays of so many barriers each, made one behind the other: the numbers of the unused ones.

    To be used is to be waited for, and to be arrived at. Barriers beyond those arrays are one each. Of an array that is
    indexed by a register one element is as good as all.
    """
    places, made = _Places(ptx), [place for place, _ in made_barriers(ptx)]
    arrays, begin = [], 0
    for size in (*sizes, *[1] * (len(made) - sum(sizes))):
        arrays.append(made[begin : begin + size])
        begin += size
    uses = [
        [places.of(address) for address in re.findall(rf"mbarrier\.{how}[\w.:]*\s+[^;\[]*\[([^\]]*)\]", ptx)]
        for how in ("(?:try_|test_)wait", "arrive")
    ]
    return [i for i, array in enumerate(arrays) if not all(_covers(use, array) for use in uses)]


def _covers(uses: Sequence[Place | None], array: Sequence[Place | None]) -> bool:
    """Whether each barrier of an array is among the uses."""
    known = {use for use in uses if use is not None}
    indexed = any(Place(one.at, True) in known for one in array if one is not None)
    return bool(array) and None not in array and (indexed or known.issuperset(one for one in array if one))


def _bytes(name: str, operands: str) -> int:
    """What one thread accesses, or names a row of."""
    if "matrix" in name:
        return 16
    if name.startswith("cp.async"):
        said = re.search(r"\],\s*\[[^\]]*\],\s*(\d+)", operands)
        return int(said[1]) if said else 16
    vector, bits = re.search(r"\.v(\d)", name), re.search(r"\.[bsuf](\d+)", name)
    return (int(vector[1]) if vector else 1) * (int(bits[1]) // 8 if bits else _BARRIER_BYTES)


class _Places:
    """Addresses of PTX as sums of ``global_smem``, a constant, and what registers say.

    Of a register that is written once; what is not added, shifted or multiplied by a constant is an index.
    """

    def __init__(self, ptx: str) -> None:
        self._written: dict[str, list[tuple[str, list[str]]]] = {}
        for condition, name, targets, operands in _DEFINED.findall(ptx):
            for target in re.findall(r"%\w+", targets):
                known = not condition and not targets.startswith("{")
                operation = (name.partition(".")[0], re.split(r"\s*,\s*", operands.strip())) if known else ("", [])
                self._written.setdefault(target, []).append(operation)
        self._sums: dict[str, tuple[int, int, bool]] = {}

    def of(self, address: str) -> Place | None:
        """Of what stands in an instruction's brackets."""
        smem, constant, indexed = 0, 0, False
        for part in address.replace(" ", "").replace("+-", "-").replace("-", "+-").split("+"):
            more = self._sum(part)
            smem, constant, indexed = smem + more[0], constant + more[1], indexed or more[2]
        return Place(constant, indexed) if smem == 1 else None

    def _sum(self, name: str) -> tuple[int, int, bool]:
        """How often ``global_smem``, what constant, and whether more, is in a register, a number, or that itself."""
        if name == "global_smem":
            return 1, 0, False
        if re.fullmatch(r"-?\d+", name):
            return 0, int(name), False
        if name not in self._sums:
            self._sums[name] = 0, 0, True  # what goes round in a circle
            self._sums[name] = self._made(name)
        return self._sums[name]

    def _made(self, name: str) -> tuple[int, int, bool]:
        ways = self._written.get(name, [])
        if len(ways) != 1:
            return 0, 0, True
        operation, operands = ways[0]
        if operation == "mov" and len(operands) == 1:
            place = [self._sum(part) for part in operands[0].split("+")]
        elif operation == "add" and len(operands) == 2:
            place = [self._sum(operand) for operand in operands]
        elif operation == "mad" and len(operands) == 3:
            place = [self._times(*map(self._sum, operands[:2])), self._sum(operands[2])]
        elif operation == "mul" and len(operands) == 2:
            place = [self._times(*map(self._sum, operands))]
        elif operation == "shl" and len(operands) == 2 and operands[1].isdecimal():
            place = [self._times(self._sum(operands[0]), (0, 1 << int(operands[1]), False))]
        else:
            return 0, 0, True
        return sum(one[0] for one in place), sum(one[1] for one in place), any(one[2] for one in place)

    @staticmethod
    def _times(one: tuple[int, int, bool], other: tuple[int, int, bool]) -> tuple[int, int, bool]:
        if (one[2] and other[2]) or one[0] or other[0]:
            return 0, 0, True
        return 0, one[1] * other[1], one[2] or other[2]
