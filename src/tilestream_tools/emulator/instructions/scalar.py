"""Scalar instructions: arithmetic, masks, branches, waits, the clock, loads through the scalar cache."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tilestream_tools.emulator.instructions.table import Decoded, instruction
from tilestream_tools.emulator.machine import Act, Pending, Wave
from tilestream_tools.emulator.numbers import I64, MASK32, MASK64, U32, signed
from tilestream_tools.emulator.operands import Operand, Unknown, scalar, scalar_target
from tilestream_tools.emulator.order import words_of
from tilestream_tools.emulator.registers import SCALARS, VCC

#: Of unsigned numbers, and the flag SCC, which stays if the second result is None.
Arithmetic = Callable[[int, int, int], "tuple[int, bool | None]"]

_LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b), "andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b,
}  # fmt: skip
_RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip
_names = "|".join


def _overflows(x: int) -> bool:
    return not -(1 << 31) <= x < 1 << 31


def _of_signed(function: Callable[[int, int], int]) -> Arithmetic:
    def of(a: int, b: int, scc: int) -> tuple[int, bool]:
        found = function(signed(a), signed(b))
        return found, _overflows(found)

    return of


def _with_carry(found: int) -> tuple[int, bool]:
    return found, not 0 <= found <= MASK32


def _and_not_zero(found: int, bits: int = 32) -> tuple[int, bool]:
    return found, found & ((1 << bits) - 1) != 0


def _field(x: int, control: int, bits: int, is_signed: bool) -> tuple[int, bool]:
    width = control >> 16 & 0x7F
    found = x >> (control & (bits - 1)) & ((1 << width) - 1)
    return (signed(found, width) if is_signed and width else found), found != 0


#: By name: the widths of the result and of each source in bits, and what is computed.
_ARITHMETIC: dict[str, tuple[tuple[int, ...], Arithmetic]] = {
    "s_add_i32": ((32, 32, 32), _of_signed(lambda a, b: a + b)),
    "s_sub_i32": ((32, 32, 32), _of_signed(lambda a, b: a - b)),
    "s_add_u32": ((32, 32, 32), lambda a, b, c: _with_carry(a + b)),
    "s_addc_u32": ((32, 32, 32), lambda a, b, c: _with_carry(a + b + c)),
    "s_sub_u32": ((32, 32, 32), lambda a, b, c: _with_carry(a - b)),
    "s_subb_u32": ((32, 32, 32), lambda a, b, c: _with_carry(a - b - c)),
    "s_mul_i32": ((32, 32, 32), lambda a, b, c: (a * b, None)),
    "s_mul_hi_u32": ((32, 32, 32), lambda a, b, c: (a * b >> 32, None)),
    "s_mul_hi_i32": ((32, 32, 32), lambda a, b, c: (signed(a) * signed(b) >> 32, None)),
    "s_min_i32": ((32, 32, 32), lambda a, b, c: (min(signed(a), signed(b)), signed(a) < signed(b))),
    "s_max_i32": ((32, 32, 32), lambda a, b, c: (max(signed(a), signed(b)), signed(a) > signed(b))),
    "s_min_u32": ((32, 32, 32), lambda a, b, c: (min(a, b), a < b)),
    "s_max_u32": ((32, 32, 32), lambda a, b, c: (max(a, b), a > b)),
    "s_absdiff_i32": ((32, 32, 32), lambda a, b, c: _and_not_zero(abs(signed(a - b & MASK32)))),
    "s_lshl_b32": ((32, 32, 32), lambda a, b, c: _and_not_zero(a << (b & 31))),
    "s_lshr_b32": ((32, 32, 32), lambda a, b, c: _and_not_zero(a >> (b & 31))),
    "s_ashr_i32": ((32, 32, 32), lambda a, b, c: _and_not_zero(signed(a) >> (b & 31))),
    "s_lshl_b64": ((64, 64, 32), lambda a, b, c: _and_not_zero(a << (b & 63), 64)),
    "s_lshr_b64": ((64, 64, 32), lambda a, b, c: _and_not_zero(a >> (b & 63), 64)),
    "s_ashr_i64": ((64, 64, 32), lambda a, b, c: _and_not_zero(signed(a, 64) >> (b & 63), 64)),
    "s_bfe_u32": ((32, 32, 32), lambda a, b, c: _field(a, b, 32, False)),
    "s_bfe_i32": ((32, 32, 32), lambda a, b, c: _field(a, b, 32, True)),
    "s_bfe_u64": ((64, 64, 32), lambda a, b, c: _field(a, b, 64, False)),
    "s_bfe_i64": ((64, 64, 32), lambda a, b, c: _field(a, b, 64, True)),
    "s_bfm_b32": ((32, 32, 32), lambda a, b, c: (((1 << (a & 31)) - 1) << (b & 31), None)),
    "s_pack_ll_b32_b16": ((32, 32, 32), lambda a, b, c: (a & 0xFFFF | (b & 0xFFFF) << 16, None)),
    "s_pack_lh_b32_b16": ((32, 32, 32), lambda a, b, c: (a & 0xFFFF | b & 0xFFFF0000, None)),
    "s_pack_hh_b32_b16": ((32, 32, 32), lambda a, b, c: (a >> 16 | b & 0xFFFF0000, None)),
    "s_abs_i32": ((32, 32), lambda a, b, c: _and_not_zero(abs(signed(a)))),
    "s_not_b32": ((32, 32), lambda a, b, c: _and_not_zero(~a)),
    "s_not_b64": ((64, 64), lambda a, b, c: _and_not_zero(~a, 64)),
    "s_bcnt1_i32_b32": ((32, 32), lambda a, b, c: _and_not_zero(a.bit_count())),
    "s_bcnt1_i32_b64": ((32, 64), lambda a, b, c: _and_not_zero(a.bit_count())),
    "s_ff1_i32_b32": ((32, 32), lambda a, b, c: ((a & -a).bit_length() - 1, None)),
    "s_ff1_i32_b64": ((32, 64), lambda a, b, c: ((a & -a).bit_length() - 1, None)),
    "s_flbit_i32_b32": ((32, 32), lambda a, b, c: (32 - a.bit_length() if a else -1, None)),
    "s_flbit_i32_b64": ((32, 64), lambda a, b, c: (64 - a.bit_length() if a else -1, None)),
    "s_brev_b32": ((32, 32), lambda a, b, c: (int(f"{a:032b}"[::-1], 2), None)),
    "s_sext_i32_i8": ((32, 32), lambda a, b, c: (signed(a & 0xFF, 8), None)),
    "s_sext_i32_i16": ((32, 32), lambda a, b, c: (signed(a & 0xFFFF, 16), None)),
    **{
        f"s_lshl{n}_add_u32": ((32, 32, 32), lambda a, b, c, n=n: _with_carry((a << n) + b))  # type: ignore[misc]
        for n in (1, 2, 3, 4)
    },
}


@instruction(_names(_ARITHMETIC))
def _arithmetic(one: Decoded, _: re.Match[str]) -> Act:
    widths, compute = _ARITHMETIC[one.name]
    put = scalar_target(one.operands[0], widths[0] == 64)
    first = scalar(one.operands[1], widths[1] == 64)
    second = scalar(one.operands[2], widths[2] == 64) if len(widths) > 2 else lambda w: 0
    if one.name in ("s_add_i32", "s_sub_i32"):
        return _sum(one.operands[0], first, second, one.name == "s_sub_i32")

    def act(w: Wave) -> None:
        found, flag = compute(first(w), second(w), w.scc)
        put(w, found)
        if flag is not None:
            w.scc = int(flag)

    return act


def _sum(to: Operand, first: Callable[[Wave], int], second: Callable[[Wave], int], is_difference: bool) -> Act:
    """The most frequent ones: SCC is the overflow of two's complement."""
    put = scalar_target(to)

    def add(w: Wave) -> None:
        a, b = first(w), second(w)
        found = a + b
        put(w, found)
        w.scc = ((a ^ found) & (b ^ found)) >> 31 & 1

    def subtract(w: Wave) -> None:
        a, b = first(w), second(w)
        found = a - b
        put(w, found)
        w.scc = ((a ^ b) & (a ^ found)) >> 31 & 1

    return subtract if is_difference else add


@instruction("s_(add|mul)k_i32")
def _with_literal(one: Decoded, found: re.Match[str]) -> Act:
    get, put, literal = scalar(one.operands[0]), scalar_target(one.operands[0]), _literal16(one.operands[1])
    adds = found[1] == "add"

    def act(w: Wave) -> None:
        if adds:
            total = signed(get(w)) + literal
            w.scc = int(_overflows(total))
            put(w, total)
        else:
            put(w, signed(get(w)) * literal)

    return act


def _literal16(o: Operand) -> int:
    return signed(int(o.value) & 0xFFFF, 16)


@instruction(rf"s_({_names(_LOGIC)})_b(32|64)")
def _logic(one: Decoded, found: re.Match[str]) -> Act:
    is_wide = found[2] == "64"
    full, compute = (MASK64 if is_wide else MASK32), _LOGIC[found[1]]
    put = scalar_target(one.operands[0], is_wide)
    a, b = (scalar(o, is_wide) for o in one.operands[1:])

    def act(w: Wave) -> None:
        bits = compute(a(w), b(w)) & full
        put(w, bits)
        w.scc = int(bits != 0)

    return act


@instruction(rf"s_({_names(_LOGIC)})_saveexec_b64")
def _save_exec(one: Decoded, found: re.Match[str]) -> Act:
    put, get, compute = scalar_target(one.operands[0], True), scalar(one.operands[1], True), _LOGIC[found[1]]
    put_exec = scalar_target(Operand.parse("exec"), True)

    def act(w: Wave) -> None:
        before = w.exec
        bits = compute(get(w), before) & MASK64
        put(w, before)
        put_exec(w, bits)
        w.scc = int(bits != 0)

    return act


@instruction(rf"s_cmp(k?)_({_names(_RELATIONS)})_([ui])(32|64)")
def _compare(one: Decoded, found: re.Match[str]) -> Act:
    relation, bits = _RELATIONS[found[2]], int(found[4])
    a, b = (scalar(o, bits == 64) for o in one.operands)
    if found[1] and found[3] == "i":
        literal = _literal16(one.operands[1]) & MASK32
        b = lambda w: literal  # noqa: E731

    def act_signed(w: Wave) -> None:
        w.scc = int(relation(signed(a(w), bits), signed(b(w), bits)))

    def act(w: Wave) -> None:
        w.scc = int(relation(a(w), b(w)))

    return act_signed if found[3] == "i" else act


@instruction("s_bitcmp([01])_b(32|64)")
def _bit_compare(one: Decoded, found: re.Match[str]) -> Act:
    wanted, bits = int(found[1]), int(found[2])
    get, which = scalar(one.operands[0], bits == 64), scalar(one.operands[1])

    def act(w: Wave) -> None:
        w.scc = int(get(w) >> (which(w) & (bits - 1)) & 1 == wanted)

    return act


@instruction("s_bitset([01])_b32")
def _bit_set(one: Decoded, found: re.Match[str]) -> Act:
    get, put, which = scalar(one.operands[0]), scalar_target(one.operands[0]), scalar(one.operands[1])

    def act(w: Wave) -> None:
        bit = 1 << (which(w) & 31)
        put(w, get(w) | bit if found[1] == "1" else get(w) & ~bit)

    return act


@instruction("s_mov_b(32|64)")
def _move(one: Decoded, found: re.Match[str]) -> Act:
    is_wide = found[1] == "64"
    put, get = scalar_target(one.operands[0], is_wide), scalar(one.operands[1], is_wide)
    return lambda w: put(w, get(w))


@instruction("s_movk_i32")
def _move_literal(one: Decoded, _: re.Match[str]) -> Act:
    put, literal = scalar_target(one.operands[0]), _literal16(one.operands[1])
    return lambda w: put(w, literal)


@instruction("s_(cselect|cmov)_b(32|64)")
def _select(one: Decoded, found: re.Match[str]) -> Act:
    is_wide = found[2] == "64"
    put, a = scalar_target(one.operands[0], is_wide), scalar(one.operands[1], is_wide)
    b = scalar(one.operands[2 if found[1] == "cselect" else 0], is_wide)
    return lambda w: put(w, a(w) if w.scc else b(w))


@instruction("s_getreg_b32", "of")
def _hardware_register(one: Decoded, _: re.Match[str]) -> Act:
    found = re.fullmatch(r"(\w+), hwreg\((\w+)(?:, *(\d+), *(\d+))?\)", one.modifiers["of"])
    if found is None or found[2] != "HW_REG_XCC_ID":
        raise Unknown(one.text)
    put, shift, width = scalar_target(Operand.parse(found[1])), int(found[3] or 0), int(found[4] or 32)
    return lambda w: put(w, w.group.xcc >> shift & ((1 << width) - 1))


# Control ------------------------------------------------------------------------------------------------------------


@instruction("s_branch|s_cbranch_(scc0|scc1|vccz|vccnz|execz|execnz)")
def _branch(one: Decoded, found: re.Match[str]) -> Act:
    tests: dict[str | None, Callable[[Wave], object]] = {
        None: lambda w: True, "scc0": lambda w: not w.scc, "scc1": lambda w: w.scc,
        "vccz": lambda w: not (w.s[VCC] | w.s[VCC + 1]), "vccnz": lambda w: w.s[VCC] | w.s[VCC + 1],
        "execz": lambda w: not w.exec, "execnz": lambda w: w.exec,
    }  # fmt: skip
    taken, target = tests[found[1]], one.target

    def act(w: Wave) -> None:
        if taken(w):
            w.pc = target

    return act


@instruction("s_waitcnt", "of")
def _wait(one: Decoded, _: re.Match[str]) -> Act:
    left = {name: int(count) for name, count in re.findall(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", one.modifiers["of"])}
    if not left:
        raise Unknown(one.text)
    vector, other = left.get("vmcnt"), left.get("lgkmcnt")

    def act(w: Wave) -> None:
        if vector is not None:
            w.wait(w.vector, vector)
        if other is not None:
            w.wait(w.other, other)

    return act


@instruction("s_barrier")
def _barrier(one: Decoded, _: re.Match[str]) -> Act:
    def act(w: Wave) -> bool:
        w.state = "barrier"
        return True

    return act


@instruction("s_endpgm")
def _end(one: Decoded, _: re.Match[str]) -> Act:
    def act(w: Wave) -> bool:
        w.finish()
        return True

    return act


@instruction("s_sleep")
def _sleep(one: Decoded, _: re.Match[str]) -> Act:
    return lambda w: True


@instruction("s_nop|s_setprio|s_dcache_wb|s_icache_inv")
def _nothing(one: Decoded, _: re.Match[str]) -> Act:
    return lambda w: None


# Loads and the clock ------------------------------------------------------------------------------------------------


@instruction("s_mem(?:real)?time")
def _clock(one: Decoded, _: re.Match[str]) -> Act:
    put, registers = scalar_target(one.operands[0], True), one.operands[0].registers

    def act(w: Wave) -> None:
        now = w.machine.clock
        w.issue(w.other, Pending(lambda: put(w, now), registers, one.text, is_scalar=True))

    return act


@instruction(r"s_load_dword(?:x(2|4|8|16))?", "offset")
def _load(one: Decoded, found: re.Match[str]) -> Act:
    count, to, base = int(found[1] or 1), one.operands[0], scalar(one.operands[1], True)
    offset, more, n = scalar(one.operands[2]), one.offset, to.index
    registers = frozenset(range(SCALARS + n, SCALARS + n + count))

    def act(w: Wave) -> None:
        memory = w.machine.memory
        address = base(w) + offset(w) + more & ~3
        at = memory.offsets(np.array([address], I64), 4 * count)
        words = words_of(at, 4 * count)
        w.machine.order.load(w.known, words)

        def land() -> None:
            w.s[n : n + count] = memory.load(at, 4 * count, words).view(U32)[0].tolist()

        w.issue(w.other, Pending(land, registers, one.text, is_scalar=True))

    return act
