"""Single operations of LLVM, compiled for AMD, executed, and compared with LLVM's own constant folding.

An operation is a few lines of IR (`executed.operations`). Its operands are loaded, a lane each, by `lanes`. They are
the same for all lanes in `scalar`, for which LLVM takes scalar instructions. In `folded` they are constants, and of the
operation LLVM leaves the results alone, which are moved into registers and stored. What the first two compute has to be
what the third one stores, bit by bit; every NaN is the same.
"""

from __future__ import annotations

import functools
import itertools
import re
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from triton._C.libtriton import llvm

from executed.operations import TYPES, Kind, Operation, operations
from executed.problems import MNEMONICS
from tilestream_tools.emulator import Machine, Memory, decode
from tilestream_tools.emulator.kernel import grid_of

TRIPLE = "amdgcn-amd-amdhsa"
#: Values of each operand; of the scalar form the first ones.
COUNT, FEW = 64, 10
_ATTRIBUTES = (
    '"amdgpu-flat-work-group-size"="1,64" "uniform-work-group-size"="true" "denormal-fp-math-f32"="ieee" '
    '"amdgpu-agpr-alloc"="0" '
) + " ".join(f'"amdgpu-no-{what}"' for what in (
    "cluster-id-x", "cluster-id-y", "cluster-id-z", "completion-action", "default-queue", "dispatch-id",
    "dispatch-ptr", "flat-scratch-init", "heap-ptr", "hostcall-ptr", "implicitarg-ptr", "lds-kernel-id",
    "multigrid-sync-arg", "queue-ptr", "workgroup-id-x", "workgroup-id-y", "workgroup-id-z", "workitem-id-y",
    "workitem-id-z",
))  # fmt: skip


# Values ---------------------------------------------------------------------------------------------------------------


@functools.cache
def values(kind: str, which: int) -> np.ndarray:
    """Of an operand: edges, and random numbers of all sizes."""
    numbers, count = TYPES[kind], COUNT * (2 if kind.startswith("2") else 1)
    generator = np.random.default_rng([which, *kind.encode()])
    if np.issubdtype(numbers, np.floating):
        size = {2: 12, 4: 40, 8: 200}[np.dtype(numbers).itemsize]
        made = generator.standard_normal(count) * np.exp2(generator.integers(-size, size, count))
        made[::3] = generator.integers(-40, 40, made[::3].size) / 4
        with np.errstate(over="ignore"):
            found = made.astype(numbers)
        tiny, most = np.finfo(numbers).smallest_subnormal, np.finfo(numbers).max
        edges = np.array([0.0, -0.0, 1.0, -1.0, tiny, most, -most, np.inf, -np.inf, np.nan, 0.5, 2.5], numbers)
        found[: edges.size] = np.roll(edges, which * 5)
        return found
    bits = 8 * np.dtype(numbers).itemsize
    found = generator.integers(0, 1 << bits, count, dtype=np.uint64, endpoint=False) if bits < 64 else (
        generator.integers(0, 1 << 63, count, dtype=np.uint64) << np.uint64(1)
    )  # fmt: skip
    found[::5] >>= np.uint64(bits - 5)
    edges = np.array([0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 31], np.uint64)
    found[: edges.size] = np.roll(edges, which * 2)
    if "bfloat" in kind:
        found = found[:count] & np.uint64(0xBFFF)
    return found.astype(numbers)


def _constant(kind: str, which: int) -> str:
    element = kind.lstrip("2")

    def one(x: Any) -> str:
        if element in ("float", "double"):
            return f"{element} 0x{struct.unpack('<Q', struct.pack('<d', float(x)))[0]:016X}"
        if element == "half":
            return f"half 0xH{int(x.view(np.uint16)):04X}"
        return f"bfloat 0xR{int(x):04X}" if element == "bfloat" else f"{element} {int(x)}"

    return "<" + ", ".join(map(one, values(kind, which))) + ">"


# Kernels --------------------------------------------------------------------------------------------------------------


def _renamed(text: str, number: int, given: dict[str, str]) -> str:
    """An operation's text with names of its own, and these operands."""
    return re.sub(r"%(\w+)", lambda m: given.get(m[1], f"%{m[1]}.{number}"), text)


def _block(number: int, *lines: str) -> list[str]:
    """A block of its own, which no other one's results reach: what two share is in no instruction of several."""
    return [f"br i1 %go, label %b{number}, label %j{number}\nb{number}:", *lines, f"br label %j{number}\nj{number}:"]


def _kinds(count: int) -> dict[str, Kind]:
    return {name: Kind(name, count) for name in (*TYPES, "i1")}


def _declared(body: str) -> str:
    """The intrinsics that are called."""
    found = {}
    for result, name, given in re.findall(r"= call (.+?) (@llvm\.[\w.]+)\((.*)\)", body):
        given = re.sub(r"<(\d+) x (\w+)>", r"\1_x_\2", given)  # types have no spaces, and constants no commas
        given = re.sub(r"<[^>]*>|splat \([^)]*\)", "0", given)
        types = [re.sub(r"(\d+)_x_(\w+)", r"<\1 x \2>", one.split()[0]) for one in given.split(", ") if one]
        found[name] = f"declare {result} {name}({', '.join(types)})"
    return "\n".join(found.values())


def _module(body: str) -> str:
    return f"""target triple = "{TRIPLE}"
{_declared(body)}
define amdgpu_kernel void @kernel(ptr addrspace(1) noalias %in, ptr addrspace(1) noalias %out) #0 {{
%go = icmp ne ptr addrspace(1) %in, null
{body}
ret void
}}
attributes #0 = {{ {_ATTRIBUTES} }}
"""


def _places() -> tuple[dict[tuple[str, int], int], bytes]:
    """Where each operand's values lie, and all of them."""
    places, data = {}, b""
    for kind, which in itertools.product(TYPES, range(3)):
        places[kind, which] = len(data)
        data += values(kind, which).tobytes()
    return places, data


def _stored(kinds: dict[str, Kind], one: Operation, number: int, at: str) -> str:
    return (
        f"%at.{number} = getelementptr i8, ptr addrspace(1) %out, i64 {at}\n"
        f"store {kinds[one.result]} %r.{number}, ptr addrspace(1) %at.{number}"
    )


#: Bytes of results of an operation, and operations in a kernel of constants: of more the compiler takes long.
SLOT, AT_ONCE = 8 * COUNT, 4


def folded(begin: int) -> str:
    """Operations from one on, `AT_ONCE`: all operands are constants."""
    kinds, lines = _kinds(COUNT), []
    for number, one in enumerate(operations()[begin : begin + AT_ONCE], begin):
        given = dict(zip("abc", (_constant(kind, i) for i, kind in enumerate(one.operands)), strict=False))
        lines += [_renamed(one.text.format(**kinds), number, given), _stored(kinds, one, number, str(number * SLOT))]
    return _module("\n".join(lines))


def lanes() -> str:
    """A value a lane."""
    kinds, (places, _), lines, loaded = _kinds(1), _places(), list[str](), dict[tuple[str, int], str]()
    before = ["%i = call i32 @llvm.amdgcn.workitem.id.x()"]
    for number, one in enumerate(operations()):
        for which, kind in enumerate(one.operands):
            if (kind, which) not in loaded:
                name, size = f"%in.{kind}.{which}", values(kind, which).nbytes // COUNT
                before += [
                    f"{name}.o = mul i32 %i, {size}", f"{name}.w = zext i32 {name}.o to i64",
                    f"{name}.b = getelementptr i8, ptr addrspace(1) %in, i64 {places[kind, which]}",
                    f"{name}.p = getelementptr i8, ptr addrspace(1) {name}.b, i64 {name}.w",
                    f"{name} = load {kinds[kind]}, ptr addrspace(1) {name}.p",
                ]  # fmt: skip
                loaded[kind, which] = name
        given = dict(zip("abc", (loaded[kind, i] for i, kind in enumerate(one.operands)), strict=False))
        size = np.dtype(TYPES[one.result]).itemsize * (2 if one.result.startswith("2") else 1)
        lines += _block(
            number, _renamed(one.text.format(**kinds), number, given),
            f"%at.{number}.s = mul i32 %i, {size}", f"%at.{number}.w = zext i32 %at.{number}.s to i64",
            f"%at.{number}.q = getelementptr i8, ptr addrspace(1) %out, i64 {number * SLOT}",
            f"%at.{number} = getelementptr i8, ptr addrspace(1) %at.{number}.q, i64 %at.{number}.w",
            f"store {kinds[one.result]} %r.{number}, ptr addrspace(1) %at.{number}",
        )  # fmt: skip
    return _module("\n".join(before + lines))


def scalar() -> str:
    """The same value for all lanes, one after the other; of integers alone, which the scalar instructions compute."""
    kinds, (places, _) = _kinds(1), _places()
    before, lines, number = ["%c = addrspacecast ptr addrspace(1) %in to ptr addrspace(4)"], list[str](), 0
    loaded: dict[tuple[str, int, int], str] = {}
    for place, one in enumerate(operations()):
        if not one.is_of_integers:
            continue
        for value in range(FEW):
            given = {}
            for which, (letter, kind) in enumerate(zip("abc", one.operands, strict=False)):
                size, name = values(kind, which).nbytes // COUNT, f"%in.{kind}.{which}.{value}"
                if (kind, which, value) not in loaded:
                    at = places[kind, which] + value * size
                    before += [
                        f"{name}.p = getelementptr i8, ptr addrspace(4) %c, i64 {at}",
                        f"{name} = load {kinds[kind]}, ptr addrspace(4) {name}.p",
                    ]  # fmt: skip
                    loaded[kind, which, value] = name
                given[letter] = name
            size = np.dtype(TYPES[one.result]).itemsize * (2 if one.result.startswith("2") else 1)
            lines += _block(
                number, _renamed(one.text.format(**kinds), number, given),
                _stored(kinds, one, number, str(place * SLOT + value * size)),
            )  # fmt: skip
            number += 1
    return _module("\n".join(before + lines))


def execute(texts: Iterable[str], arch: str) -> tuple[np.ndarray, set[str]]:
    """The bytes that kernels have stored, one behind the other, and the mnemonics that they executed."""
    llvm.init_targets()
    memory, (_, data) = Memory(), _places()
    given = memory.allocate(np.frombuffer(data, np.uint8), "the operands")
    like, executed = np.zeros(len(operations()) * SLOT, np.uint8), set()
    out = memory.allocate(like, "the results")
    for text in texts:
        program = decode(llvm.translate_to_asm(text, TRIPLE, arch, "", [], False, False))
        assert not program.unknown, program.unknown
        packed = struct.pack("<QQ", given, out).ljust(program.argument_bytes, b"\0")
        machine = Machine(memory, seed=1)
        machine.execute(program.steps, grid_of(program, memory, packed, 1, 1, 0))
        executed |= {program.steps[pc].text.partition(" ")[0] for pc in machine.visited}
    return memory.read(out, like), executed


#: What a kernel of constants executes: it moves them, and stores.
MOVES = re.compile(
    r"(v_mov|v_not|v_accvgpr|s_mov|v_bfrev|v_pk_mov)\w*|(global_store|s_load)\w*|s_(add_u32|addc_u32|brev_b32|waitcnt|nop|endpgm)"
)


@functools.cache
def wanted() -> np.ndarray:
    """What LLVM says of constants, whatever the architecture."""
    found, executed = execute(map(folded, range(0, len(operations()), AT_ONCE)), "gfx942")
    left = sorted(one for one in executed if not MOVES.fullmatch(one))
    assert not left, f"LLVM has not folded {left}"
    return found


def rows(arch: str) -> list[dict[str, Any]]:
    """Operation by operation and form: how many results are not LLVM's."""
    made = []
    for form, text, few in (("lanes", lanes(), COUNT), ("scalar", scalar(), FEW)):
        found, mnemonics = execute([text], arch)
        MNEMONICS.update(mnemonics)
        for number, one in enumerate(operations()):
            if few == COUNT or one.is_of_integers:
                made.append(
                    {"arch": arch, "operation": f"{one.name}, {form}"} | _compared(one, number, few, found, wanted())
                )
    return made


def _compared(one: Operation, number: int, few: int, *given: np.ndarray) -> dict[str, Any]:
    numbers = TYPES[one.result]
    count = few * (2 if one.result.startswith("2") else 1)
    found, wanted = (x[number * SLOT :][:SLOT].view(numbers)[:count] for x in given)
    is_float = np.issubdtype(numbers, np.floating)
    wrong = found.view(f"u{found.itemsize}") != wanted.view(f"u{found.itemsize}")
    if is_float:
        wrong &= ~(np.isnan(found) & np.isnan(wanted))
    elif "bfloat" in one.result:
        wrong &= ~((found & 0x7FFF > 0x7F80) & (wanted & 0x7FFF > 0x7F80))
    where = int(np.flatnonzero(wrong)[0]) if wrong.any() else -1
    at = (
        ""
        if where < 0
        else f"{[values(k, i)[where].item() for i, k in enumerate(one.operands)]}: {found[where]}, LLVM {wanted[where]}"
    )
    return {"wrong": int(wrong.sum()), "at": at}
