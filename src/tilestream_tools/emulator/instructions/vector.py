"""Vector instructions of one value a lane: arithmetic, comparisons, conversions, moves between lanes.

`_PLAIN` has those that are a function of their sources. DPP and SDWA, which move lanes or select parts of a source,
work with each of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tilestream_tools.emulator import numbers as n_
from tilestream_tools.emulator.fault import Fault
from tilestream_tools.emulator.instructions.table import DPP, SDWA, Decoded, instruction
from tilestream_tools.emulator.machine import Act, Wave
from tilestream_tools.emulator.numbers import (
    F16,
    F32,
    F64,
    FIVE_BITS,
    I16,
    I32,
    I64,
    LANES,
    MASK32,
    U16,
    U32,
    U64,
    Array,
    in_float64,
    to_lanes,
    uniform,
    wide,
)  # fmt: skip
from tilestream_tools.emulator.operands import (
    Operand,
    Read,
    Unknown,
    Write,
    bits_of,
    lanes_of,
    mask_target,
    scalar,
    scalar_target,
    source,
    target,
)  # fmt: skip
from tilestream_tools.emulator.registers import VCC

Function = Callable[..., Array]
_FIFTEEN = uniform(15, U16)
_SIX_BITS = uniform(63)
_LANE = np.arange(LANES, dtype=U32)
_ENCODED = " ".join(sorted(DPP | SDWA))


def _identity(x: Array) -> Array:
    return x


def _shift16_signed(by: Array, x: Array) -> Array:
    found: Array = x >> (by & _FIFTEEN).view(I16)
    return found


#: By name: the kind of the result, those of the sources (see `operands`), and the function.
_PLAIN: dict[str, tuple[str, str, Function]] = {
    "v_mov_b32": ("u", "u", _identity), "v_mov_b64": ("q", "q", _identity), "v_not_b32": ("u", "u", np.invert),
    "v_accvgpr_read_b32": ("u", "u", _identity), "v_accvgpr_write_b32": ("u", "u", _identity),
    "v_accvgpr_mov_b32": ("u", "u", _identity),
    # Integers
    "v_add_u32": ("u", "uu", np.add), "v_sub_u32": ("u", "uu", np.subtract),
    "v_subrev_u32": ("u", "uu", lambda a, b: b - a), "v_add3_u32": ("u", "uuu", lambda a, b, c: a + b + c),
    "v_add_lshl_u32": ("u", "uuu", lambda a, b, c: (a + b) << (c & FIVE_BITS)),
    "v_lshl_add_u32": ("u", "uuu", lambda a, b, c: (a << (b & FIVE_BITS)) + c),
    "v_lshl_or_b32": ("u", "uuu", lambda a, b, c: (a << (b & FIVE_BITS)) | c),
    "v_lshl_add_u64": ("q", "quq", lambda a, b, c: (a << wide(b & U32(7))) + c),
    "v_xad_u32": ("u", "uuu", lambda a, b, c: (a ^ b) + c),
    "v_mul_lo_u32": ("u", "uu", np.multiply),
    "v_mul_hi_u32": ("u", "uu", lambda a, b: (wide(a) * wide(b) >> U64(32)).astype(U32)),
    "v_mul_hi_i32": ("u", "ii", lambda a, b: (a.astype(I64) * b.astype(I64) >> 32).astype(U32)),
    "v_mul_u32_u24": ("u", "uu", lambda a, b: n_.low24(a) * n_.low24(b)),
    "v_mul_i32_i24": ("u", "uu", lambda a, b: n_.low24_signed(a) * n_.low24_signed(b)),
    "v_mad_u32_u24": ("u", "uuu", lambda a, b, c: n_.low24(a) * n_.low24(b) + c),
    "v_mad_i32_i24": ("u", "uuu", lambda a, b, c: n_.low24_signed(a) * n_.low24_signed(b) + c),
    "v_sad_u32": ("u", "uuu", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c),
    "v_min_u32": ("u", "uu", np.minimum), "v_max_u32": ("u", "uu", np.maximum),
    "v_min_i32": ("i", "ii", np.minimum), "v_max_i32": ("i", "ii", np.maximum),
    "v_min3_u32": ("u", "uuu", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": ("u", "uuu", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_i32": ("i", "iii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("i", "iii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    # Bits
    "v_and_b32": ("u", "uu", np.bitwise_and), "v_or_b32": ("u", "uu", np.bitwise_or),
    "v_xor_b32": ("u", "uu", np.bitwise_xor), "v_xnor_b32": ("u", "uu", lambda a, b: ~(a ^ b)),
    "v_or3_b32": ("u", "uuu", lambda a, b, c: a | b | c),
    "v_and_or_b32": ("u", "uuu", lambda a, b, c: (a & b) | c),
    "v_bfi_b32": ("u", "uuu", lambda a, b, c: (a & b) | (~a & c)),
    "v_bfe_u32": ("u", "uuu", n_.extract), "v_bfe_i32": ("u", "uuu", n_.extract_signed),
    "v_bfrev_b32": ("u", "u", n_.reversed_bits), "v_ffbh_u32": ("u", "u", n_.leading_zeros),
    "v_ffbl_b32": ("u", "u", n_.trailing_zeros), "v_perm_b32": ("u", "uuu", n_.permuted_bytes),
    "v_bcnt_u32_b32": ("u", "uu", lambda a, b: np.bitwise_count(a).astype(U32) + b),
    "v_lshlrev_b32": ("u", "uu", lambda a, b: b << (a & FIVE_BITS)),
    "v_lshrrev_b32": ("u", "uu", lambda a, b: b >> (a & FIVE_BITS)),
    "v_ashrrev_i32": ("i", "ui", lambda a, b: b >> (a & FIVE_BITS).view(I32)),
    "v_lshlrev_b64": ("q", "uq", lambda a, b: b << wide(a & _SIX_BITS)),
    "v_lshrrev_b64": ("q", "uq", lambda a, b: b >> wide(a & _SIX_BITS)),
    "v_ashrrev_i64": ("Q", "uQ", lambda a, b: b >> (a & _SIX_BITS).astype(I64)),
    "v_alignbit_b32": ("u", "uuu", lambda a, b, c: ((wide(a) << U64(32) | wide(b)) >> wide(c & FIVE_BITS)).astype(U32)),
    "v_alignbyte_b32": (
        "u", "uuu", lambda a, b, c: ((wide(a) << U64(32) | wide(b)) >> wide((c & U32(3)) << U32(3))).astype(U32)
    ),
    # 16 bits
    "v_add_u16": ("H", "HH", np.add), "v_sub_u16": ("H", "HH", np.subtract),
    "v_mul_lo_u16": ("H", "HH", np.multiply), "v_min_u16": ("H", "HH", np.minimum),
    "v_max_u16": ("H", "HH", np.maximum), "v_min_i16": ("I", "II", np.minimum), "v_max_i16": ("I", "II", np.maximum),
    "v_lshlrev_b16": ("H", "HH", lambda a, b: b << (a & _FIFTEEN)),
    "v_lshrrev_b16": ("H", "HH", lambda a, b: b >> (a & _FIFTEEN)),
    "v_ashrrev_i16": ("I", "HI", _shift16_signed),
    "v_add_f16": ("h", "hh", np.add), "v_sub_f16": ("h", "hh", np.subtract),
    "v_mul_f16": ("h", "hh", np.multiply), "v_fma_f16": ("h", "hhh", n_.fma16),
    "v_max_f16": ("h", "hh", np.fmax), "v_min_f16": ("h", "hh", np.fmin),
    "v_pack_b32_f16": ("u", "HH", lambda a, b: a.astype(U32) | b.astype(U32) << U32(16)),
    # Floating point
    "v_add_f32": ("f", "ff", np.add), "v_sub_f32": ("f", "ff", np.subtract),
    "v_subrev_f32": ("f", "ff", lambda a, b: b - a), "v_mul_f32": ("f", "ff", np.multiply),
    "v_mul_legacy_f32": ("f", "ff", lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b)),
    "v_fma_f32": ("f", "fff", n_.fma), "v_fmaak_f32": ("f", "fff", n_.fma), "v_fmamk_f32": ("f", "fff", n_.fma),
    "v_min_f32": ("f", "ff", np.fmin), "v_max_f32": ("f", "ff", np.fmax), "v_med3_f32": ("f", "fff", n_.median),
    "v_min3_f32": ("f", "fff", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "v_max3_f32": ("f", "fff", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "v_minimum3_f32": ("f", "fff", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_maximum3_f32": ("f", "fff", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_rcp_f32": ("f", "f", in_float64(np.reciprocal)), "v_rcp_iflag_f32": ("f", "f", in_float64(np.reciprocal)),
    "v_rsq_f32": ("f", "f", in_float64(lambda a: 1.0 / np.sqrt(a))), "v_sqrt_f32": ("f", "f", in_float64(np.sqrt)),
    "v_exp_f32": ("f", "f", in_float64(np.exp2)), "v_log_f32": ("f", "f", in_float64(np.log2)),
    "v_ldexp_f32": ("f", "fi", n_.scaled), "v_floor_f32": ("f", "f", np.floor), "v_ceil_f32": ("f", "f", np.ceil),
    "v_trunc_f32": ("f", "f", np.trunc), "v_rndne_f32": ("f", "f", np.rint),
    "v_fract_f32": ("f", "f", lambda a: a - np.floor(a)),
    "v_frexp_mant_f32": ("f", "f", n_.mantissa),
    "v_frexp_exp_i32_f32": ("i", "f", n_.power),
    "v_div_fixup_f32": ("f", "fff", n_.div_fixup),
    "v_add_f64": ("d", "dd", np.add), "v_mul_f64": ("d", "dd", np.multiply),
    # Conversions
    "v_cvt_f32_u32": ("f", "u", lambda a: a.astype(F32)), "v_cvt_f32_i32": ("f", "i", lambda a: a.astype(F32)),
    "v_cvt_u32_f32": ("u", "f", n_.to_u32), "v_cvt_i32_f32": ("i", "f", n_.to_i32),
    **{
        f"v_cvt_f32_ubyte{i}": ("f", "u", lambda a, i=i: (a >> uniform(8 * i) & uniform(255)).astype(F32))
        for i in range(4)
    },
    "v_cvt_f16_f32": ("h", "f", lambda a: a.astype(F16)), "v_cvt_f32_f16": ("f", "h", lambda a: a.astype(F32)),
    "v_cvt_f64_i32": ("d", "i", lambda a: a.astype(F64)), "v_cvt_f64_u32": ("d", "u", lambda a: a.astype(F64)),
    "v_cvt_f64_f32": ("d", "f", lambda a: a.astype(F64)), "v_cvt_f32_f64": ("f", "d", lambda a: a.astype(F32)),
    "v_cvt_i32_f64": ("i", "d", n_.to_i32), "v_cvt_u32_f64": ("u", "d", n_.to_u32),
    "v_cvt_pkrtz_f16_f32": ("u", "ff", lambda a, b: n_.to_f16_down(a) | n_.to_f16_down(b) << U32(16)),
    "v_cvt_pk_bf16_f32": ("u", "ff", lambda a, b: n_.to_bf16(a) | n_.to_bf16(b) << U32(16)),
    "v_cvt_pk_f16_f32": (
        "u", "ff",
        lambda a, b: a.astype(F16).view(U16).astype(U32) | b.astype(F16).view(U16).astype(U32) << U32(16),
    ),
}  # fmt: skip
#: What a saturating integer addition does with ``clamp``.
_SATURATING: dict[str, Function] = {
    "v_add_u32": lambda a, b: np.where(a + b < a, U32(MASK32), a + b),
    "v_sub_u32": lambda a, b: np.where(a >= b, a - b, U32(0)),
    "v_sub_u16": lambda a, b: np.where(a >= b, a - b, U16(0)),
}
_PARTS = {
    "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8), "WORD_0": (0, 16), "WORD_1": (16, 16),
    "DWORD": (0, 32),
}  # fmt: skip


# The encodings --------------------------------------------------------------------------------------------------------


def sources_of(one: Decoded, kinds: str, first: int = 1) -> list[Read]:
    """The sources, read as their kinds are, from the operand ``first`` on; SDWA's and op_sel's selections apply."""
    operands, halves = one.operands[first:], one.numbers("op_sel")
    found = []
    for i, (operand, kind) in enumerate(zip(operands, kinds, strict=True)):
        if one.is_sdwa:
            found.append(source(operand, kind, _PARTS[one.modifiers.get(f"src{i}_sel", "DWORD")]))
        elif kind in "HIh":
            found.append(source(operand, kind, (16 * halves[i], 16)))
        else:
            found.append(source(operand, kind))
    return found


def target_of(one: Decoded, kind: str) -> Write:
    """The result's place; SDWA's and op_sel's selections apply."""
    to = one.operands[0]
    if one.is_sdwa:
        part, unused = _PARTS[one.modifiers.get("dst_sel", "DWORD")], one.modifiers.get("dst_unused", "UNUSED_PAD")
        if unused == "UNUSED_SEXT" or (unused == "UNUSED_PRESERVE" and part[1] == 32):
            raise Unknown(f"{one.name} {unused}")
        return target(to, kind, None if part == (0, 32) and kind in "uif" else part, unused == "UNUSED_PRESERVE")
    if kind in "HIh" and "op_sel" in one.modifiers:
        return target(to, kind, (16 * one.numbers("op_sel")[-1], 16))
    return target(to, kind)


def moved(one: Decoded) -> tuple[Array, Array, Array]:
    """DPP's map: of each lane the one that it reads, whether there is one, and whether the lane is written at all."""
    lane, said = np.arange(LANES), one.modifiers
    row, exists = lane & ~15, np.ones(LANES, np.bool_)
    if "quad_perm" in said:
        origin = (lane & ~3) + np.array(one.numbers("quad_perm"))[lane & 3]
    elif "row_shr" in said:
        origin = lane - int(said["row_shr"])
        exists = origin >= row
    elif "row_shl" in said:
        origin = lane + int(said["row_shl"])
        exists = origin < row + 16
    elif "row_ror" in said:
        origin = row + ((lane - int(said["row_ror"])) & 15)
    elif "row_newbcast" in said:
        origin = row + int(said["row_newbcast"])
    elif "row_bcast" in said:  # the last lane of the 16, or of the 32, before
        width = int(said["row_bcast"]) + 1
        origin = lane // width * width - 1
        exists = origin >= 0
    elif "row_mirror" in said:
        origin = row + 15 - (lane & 15)
    elif "row_half_mirror" in said:
        origin = (lane & ~7) + 7 - (lane & 7)
    else:
        raise Unknown(one.text)
    rows, banks = (int(said.get(name, "0xf"), 0) for name in ("row_mask", "bank_mask"))
    written = (rows >> (lane // 16) & 1).astype(np.bool_) & (banks >> (lane // 4 % 4) & 1).astype(np.bool_)
    return np.where(exists, origin, 0), exists, written


def with_dpp(one: Decoded, kinds: tuple[str, str], compute: Function) -> Act:
    """As `_PLAIN` says, with the first source's lanes moved.

    A lane whose origin does not exist, or is off, reads 0 where ``bound_ctrl`` is given; else it is not written.
    """
    result, of = kinds
    if result not in "uif" or any(kind not in "uif" for kind in of):
        raise Unknown(f"{one.text}: DPP of other than 32 bits")
    origin, exists, written = moved(one)
    zeros = "bound_ctrl" in one.modifiers
    first, *rest = sources_of(one, of)
    n = one.operands[0].index

    def act(w: Wave) -> None:
        readable = exists & w.lanes[origin]
        x = np.where(readable, first(w)[origin], 0).astype(n_.F32 if of[0] == "f" else first(w).dtype)
        found = compute(x, *(get(w) for get in rest))
        on = w.lanes & written if zeros else w.lanes & written & readable
        np.copyto(w.v[n], np.broadcast_to(found.view(U32), LANES), where=on)

    return act


@instruction("|".join(_PLAIN), f"clamp op_sel {_ENCODED}")
def _plain(one: Decoded, _: re.Match[str]) -> Act:
    result, kinds, compute = _PLAIN[one.name]
    if "clamp" in one.modifiers:
        plain = compute
        if result == "f":
            compute = lambda *x: np.clip(plain(*x), F32(0), F32(1))  # noqa: E731
        elif one.name in _SATURATING:
            compute = _SATURATING[one.name]
        else:
            raise Unknown(f"{one.name} with clamp")
    if one.is_dpp:
        return with_dpp(one, (result, kinds), compute)
    put, get = target_of(one, result), sources_of(one, kinds)
    if isinstance(compute, np.ufunc) and kinds == 2 * result and result in "uf" and not one.is_sdwa:
        return _in_place(one.operands[0].index, result == "f", compute, put, *get)
    if one.name == "v_bfe_u32" and all(o.file == "k" for o in one.operands[2:]):
        offset, width = (o.bits(32) & 31 for o in one.operands[2:])
        down, keep, field = uniform(offset), uniform((1 << width) - 1), get[0]
        return lambda w: put(w, field(w) >> down & keep)
    if len(get) == 1:
        (a,) = get
        return lambda w: put(w, compute(a(w)))
    if len(get) == 2:
        a, b = get
        return lambda w: put(w, compute(a(w), b(w)))
    a, b, c = get
    return lambda w: put(w, compute(a(w), b(w), c(w)))


def _in_place(n: int, is_float: bool, compute: np.ufunc, put: Write, a: Read, b: Read) -> Act:
    """Where all lanes are on, numpy writes the register itself."""

    def act(w: Wave) -> None:
        if w.on is None:
            compute(a(w), b(w), (w.floats if is_float else w.rows)[n])
        else:
            put(w, compute(a(w), b(w)))

    return act


@instruction("v_(?:fmac|mac)_f32")
def _accumulate(one: Decoded, _: re.Match[str]) -> Act:
    put, (a, b), c = target_of(one, "f"), sources_of(one, "ff"), source(one.operands[0], "f")
    return lambda w: put(w, n_.fma(a(w), b(w), c(w)))


@instruction(r"v_bitop3_b(32|16)", "bitop3")
def _truth_table(one: Decoded, found: re.Match[str]) -> Act:
    kind = "u" if found[1] == "32" else "H"
    put, (a, b, c) = target_of(one, kind), sources_of(one, 3 * kind)
    compute = n_.truth_table(int(one.modifiers.get("bitop3", "0"), 0))
    return lambda w: put(w, compute(a(w), b(w), c(w)))


# Comparisons and carries ----------------------------------------------------------------------------------------------

_RELATIONS: dict[str, Function] = {
    "lt": lambda a, b: a < b, "gt": lambda a, b: a > b, "le": lambda a, b: a <= b, "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "neq": lambda a, b: a != b,
    "lg": lambda a, b: (a < b) | (a > b), "o": lambda a, b: (a == a) & (b == b), "u": lambda a, b: (a != a) | (b != b),
    "nlt": lambda a, b: ~(a < b), "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b),
    "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)),
}  # fmt: skip
_COMPARED = {"u32": "u", "i32": "i", "f32": "f", "u64": "q", "i64": "Q", "f64": "d", "f16": "h", "u16": "H", "i16": "I"}


@instruction(rf"v_cmp_({'|'.join(_RELATIONS)})_({'|'.join(_COMPARED)})", " ".join(SDWA))
def _compare(one: Decoded, found: re.Match[str]) -> Act:
    relation, put = _RELATIONS[found[1]], mask_target(one.operands[0])
    a, b = sources_of(one, 2 * _COMPARED[found[2]])
    return lambda w: put(w, relation(a(w), b(w)))


@instruction("v_cmp_class_f32")
def _classify(one: Decoded, _: re.Match[str]) -> Act:
    put, (a, wanted) = mask_target(one.operands[0]), sources_of(one, "fu")
    return lambda w: put(w, wanted(w) >> n_.float_class(a(w)) & U32(1) != 0)


@instruction("v_cndmask_b32", " ".join(SDWA))
def _choose(one: Decoded, _: re.Match[str]) -> Act:
    *rest, chooser = one.operands
    kind = "f" if any(o.negated or o.absolute for o in rest) else "u"
    put, choice = target_of(one, kind), lanes_of(chooser)
    a, b = sources_of(Decoded(one.name, tuple(rest), one.modifiers, one.text), 2 * kind)

    def act(w: Wave) -> None:
        found = a(w).copy()
        np.copyto(found, b(w), where=choice(w))
        put(w, found)

    return act


@instruction("v_(add|sub|subrev)(?:c|b|brev)?_co_u32|v_(sub)brev_co_u32")
def _carry(one: Decoded, _: re.Match[str]) -> Act:
    name = one.name
    adds, swapped = name.startswith("v_add"), "rev" in name
    put, flag = target(one.operands[0], "u"), mask_target(one.operands[1])
    a, b = (source(o, "u") for o in one.operands[2:4])
    carry = lanes_of(one.operands[4]) if len(one.operands) > 4 else None

    def act(w: Wave) -> None:
        x, y = wide(a(w)), wide(b(w))
        x, y = (y, x) if swapped else (x, y)
        c = U64(0) if carry is None else carry(w).astype(U64)
        total = x + y + c if adds else x - y - c
        put(w, total.astype(U32))
        flag(w, total >> U64(32) != 0)

    return act


@instruction("v_mad_(u64_u32|i64_i32)")
def _multiply_add_64(one: Decoded, found: re.Match[str]) -> Act:
    put, flag = target(one.operands[0], "q"), mask_target(one.operands[1])
    kind, as_wide = ("u", U64) if found[1] == "u64_u32" else ("i", I64)
    a, b, c = source(one.operands[2], kind), source(one.operands[3], kind), source(one.operands[4], "q")

    def act(w: Wave) -> None:
        product = (a(w).astype(as_wide) * b(w).astype(as_wide)).view(U64)
        total = product + c(w)
        put(w, total)
        flag(w, total < product)

    return act


# Division -------------------------------------------------------------------------------------------------------------


@instruction("v_div_scale_f32")
def _div_scale(one: Decoded, _: re.Match[str]) -> Act:
    put, flag = target(one.operands[0], "f"), mask_target(one.operands[1])
    a, b, c = (source(o, "f") for o in one.operands[2:])

    def act(w: Wave) -> None:
        value, is_scaled = n_.div_scale(a(w), b(w), c(w))
        put(w, value)
        flag(w, is_scaled)

    return act


@instruction("v_div_fmas_f32")
def _div_fmas(one: Decoded, _: re.Match[str]) -> Act:
    put, (a, b, c) = target_of(one, "f"), sources_of(one, "fff")
    return lambda w: put(w, n_.div_fmas(a(w), b(w), c(w), to_lanes(w.s[VCC] | w.s[VCC + 1] << 32)))


# Lanes ----------------------------------------------------------------------------------------------------------------


@instruction("v_read(first)?lane_b32")
def _read_lane(one: Decoded, found: re.Match[str]) -> Act:
    put, get = scalar_target(one.operands[0]), bits_of(one.operands[1], 32)
    which = None if found[1] else scalar(one.operands[2])

    def act(w: Wave) -> None:
        lane = max((w.exec & -w.exec).bit_length() - 1, 0) if which is None else which(w) & 63
        values = get(w)
        put(w, int(values[lane]))

    return act


@instruction("v_writelane_b32")
def _write_lane(one: Decoded, _: re.Match[str]) -> Act:
    n, get, which = one.operands[0].index, scalar(one.operands[1]), scalar(one.operands[2])

    def act(w: Wave) -> None:
        w.v[n, which(w) & 63] = get(w)

    return act


@instruction("v_mbcnt_(lo|hi)_u32_b32")
def _count_below(one: Decoded, found: re.Match[str]) -> Act:
    put, (a, b) = target_of(one, "u"), sources_of(one, "uu")
    below = (U32(1) << (_LANE & FIVE_BITS)) - U32(1)
    other = U32(MASK32) if found[1] == "lo" else U32(0)  # of the lanes in the other half of the wave
    mask = np.where((_LANE >= 32) == (found[1] == "hi"), below, other).astype(U32)
    return lambda w: put(w, np.bitwise_count(a(w) & mask).astype(U32) + b(w))


@instruction("v_permlane(16|32)_swap_b32")
def _swap_lanes(one: Decoded, found: re.Match[str]) -> Act:
    x, y = (o.index for o in one.operands)
    upper = _LANE // int(found[1]) % 2 == 1

    def act(w: Wave) -> None:
        if w.on is not None:
            raise Fault("lanes are swapped while some are off")
        a, b = w.v[x].copy(), w.v[y].copy()
        w.v[x][upper], w.v[y][~upper] = b[~upper], a[upper]

    return act


@instruction("v_swap_b32")
def _swap(one: Decoded, _: re.Match[str]) -> Act:
    x, y = (o.index for o in one.operands)

    def act(w: Wave) -> None:
        a, b = w.v[x].copy(), w.v[y].copy()
        w.put(x, b)
        w.put(y, a)

    return act


# 8 bits ---------------------------------------------------------------------------------------------------------------


@instruction("v_cvt_pk_(fp8|bf8)_f32", "op_sel")
def _to_fp8(one: Decoded, found: re.Match[str]) -> Act:
    half, kind, fnuz = one.numbers("op_sel")[-1], found[1], one.fnuz
    put, (a, b) = target(one.operands[0], "u", (16 * half, 16)), (source(o, "f") for o in one.operands[1:])
    return lambda w: put(w, n_.to_fp8(a(w), kind, fnuz) | n_.to_fp8(b(w), kind, fnuz) << U32(8))


@instruction("v_cvt_(pk_)?f32_(fp8|bf8)", f"op_sel {_ENCODED}")
def _from_fp8(one: Decoded, found: re.Match[str]) -> Act:
    values, is_pair = n_.fp8_values(found[2], one.fnuz).view(U32), bool(found[1])
    if "op_sel" in one.modifiers and (is_pair is False or one.is_sdwa):
        raise Unknown(one.text)
    part = one.modifiers.get("src0_sel", "WORD_1" if one.numbers("op_sel")[0] else "WORD_0" if is_pair else "BYTE_0")
    shift, put = U32(_PARTS[part][0]), target(one.operands[0], "q" if is_pair else "u")
    get = source(one.operands[1], "u")

    def act(w: Wave) -> None:
        x = get(w) >> shift
        low = values[x & U32(255)]
        put(w, wide(low) | wide(values[x >> U32(8) & U32(255)]) << U64(32) if is_pair else low)

    return act


@instruction("v_cvt_scalef32_pk_(f16|bf16|f32)_(fp8|bf8)", "op_sel")
def _from_scaled_fp8(one: Decoded, found: re.Match[str]) -> Act:
    scale: Operand = one.operands[2]
    if scale.file != "k" or scale.value != 1.0:
        raise Unknown(f"{one.text}: a scale other than 1")
    values = n_.fp8_values(found[2], one.fnuz)
    bits = {
        "f16": values.astype(F16).view(U16).astype(U32), "f32": values.view(U32),
        "bf16": n_.to_bf16(values.reshape(-1, LANES)).ravel(),
    }[found[1]]  # fmt: skip
    width = 32 if found[1] == "f32" else 16
    put, get = target(one.operands[0], "q" if width == 32 else "u"), source(one.operands[1], "u")
    shift = U32(16 * one.numbers("op_sel")[0])

    def act(w: Wave) -> None:
        x = get(w) >> shift
        low, high = bits[x & U32(255)], bits[x >> U32(8) & U32(255)]
        put(w, wide(low) | wide(high) << U64(32) if width == 32 else low | high << U32(16))

    return act
