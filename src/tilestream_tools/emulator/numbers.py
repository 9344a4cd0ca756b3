"""Arithmetic of the vector instructions, on arrays with one element a lane.

What AMD's documents define exactly is exact here: integers, conversions, additions, products, fused multiply-adds,
divisions' helpers. The transcendental functions, which hardware computes to an ulp, are rounded correctly from float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LANES = 64
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I16, I32, I64 = np.int16, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64
MASK32, MASK64 = 0xFFFFFFFF, (1 << 64) - 1


@functools.lru_cache(1 << 12)
def uniform(value: int, dtype: Any = U32) -> Array:
    """A number that all lanes share, as an array of stride 0: numpy is several times slower where sizes differ.

    Not to be written to: equal numbers give the same array.
    """
    return np.broadcast_to(np.array(value, dtype), LANES)


FIVE_BITS = uniform(31)


def signed(x: int, bits: int = 32) -> int:
    """An unsigned number's bits, read as two's complement."""
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


@functools.lru_cache(1 << 12)
def to_lanes(value: int) -> Array:
    """The bits of a 64-bit mask, a boolean a lane. Not to be written to: equal masks give the same array."""
    lanes = np.unpackbits(np.frombuffer(value.to_bytes(8, "little"), U8), bitorder="little").view(np.bool_)
    lanes.flags.writeable = False
    return lanes


def to_mask(lanes: Array) -> int:
    """A boolean a lane, as a 64-bit mask."""
    return _mask_of(lanes.tobytes())


@functools.lru_cache(1 << 12)
def _mask_of(lanes: bytes) -> int:
    return int.from_bytes(np.packbits(np.frombuffer(lanes, np.bool_), bitorder="little").tobytes(), "little")


# Integers -------------------------------------------------------------------------------------------------------------


def wide(x: Array) -> Array:
    """32 bits in 64."""
    return x.astype(U64)


def low24(x: Array) -> Array:
    """The lower 24 bits, as the 24-bit multiplications read them."""
    return x & U32(0xFFFFFF)


def low24_signed(x: Array) -> Array:
    """The lower 24 bits, sign-extended."""
    return extended(low24(x), 24)


def extended(x: Array, bits: int) -> Array:
    """The lower ``bits`` of unsigned numbers that have no more, sign-extended to 32."""
    top = U32(1 << (bits - 1))
    return (x ^ top) - top


#: By n: a mask of the n lowest bits.
_LOW_BITS = (U32(1) << np.arange(32, dtype=U32)) - U32(1)


def extract(x: Array, offset: Array, width: Array) -> Array:
    """A field of bits, zero-extended."""
    return (x >> (offset & FIVE_BITS)) & _LOW_BITS[width & FIVE_BITS]


def extract_signed(x: Array, offset: Array, width: Array) -> Array:
    """A field of bits, sign-extended."""
    width = width & FIVE_BITS
    top = np.where(width > 0, U32(1) << ((width - U32(1)) & FIVE_BITS), U32(0))
    return (extract(x, offset, width) ^ top) - top


def reversed_bits(x: Array) -> Array:
    """Bit 0 becomes bit 31."""
    octets = np.unpackbits(np.ascontiguousarray(x).view(U8), bitorder="little").reshape(-1, 32)
    return np.packbits(octets[:, ::-1], axis=1, bitorder="little").view(U32)[:, 0]


def leading_zeros(x: Array) -> Array:
    """Zeros above the highest 1; all ones where there is none."""
    return np.where(x == 0, U32(MASK32), U32(32) - np.frexp(x.astype(F64))[1].astype(U32))


def trailing_zeros(x: Array) -> Array:
    """Zeros below the lowest 1; all ones where there is none."""
    return np.where(x == 0, U32(MASK32), np.bitwise_count((x & (~x + U32(1))) - U32(1)).astype(U32))


@functools.lru_cache(1 << 10)
def _pieces(select: int) -> tuple[tuple[bool, Array, Array, Array], ...]:
    """Bytes that come from one register by one shift, as V_PERM_B32 selects them: which, left, right, what is kept.

    Nothing where a selector is of no byte.
    """
    keep: dict[tuple[bool, int], int] = {}
    for to, which in enumerate(select.to_bytes(4, "little")):
        if which > 7:
            return ()
        place = which > 3, 8 * (to - which % 4)
        keep[place] = keep.get(place, 0) | 0xFF << 8 * to
    shifts = ((is_high, max(left, 0), max(-left, 0), mask) for (is_high, left), mask in keep.items())
    return tuple((is_high, uniform(left), uniform(right), uniform(mask)) for is_high, left, right, mask in shifts)


def permuted_bytes(high: Array, low: Array, select: Array) -> Array:
    """V_PERM_B32: each byte of ``select`` names a byte of ``high:low``, a sign, 0x00 (12) or 0xFF (above 12)."""
    if not any(select.strides):  # the same bytes in all lanes
        pieces = _pieces(int(select[0]))
        if pieces:
            found = [((high if is_high else low) << left >> right) & keep for is_high, left, right, keep in pieces]
            return functools.reduce(np.bitwise_or, found)
    both = np.empty((LANES, 2), U32)
    both[:, 0], both[:, 1] = low, high
    which = np.ascontiguousarray(select).view(U8).reshape(-1, 4)
    choice = np.full((LANES, 14), 0xFF, U8)  # 0 to 7: bytes; 8 to 11: signs of the halves; 12: zero; 13: ones
    choice[:, :8] = both.view(U8)
    choice[:, 8:12] = U16(0) - (both.view(U16) >> U16(15))
    choice[:, 12] = 0
    return np.take_along_axis(choice, np.minimum(which, 13).astype(np.intp), 1).view(U32)[:, 0]


def truth_table(table: int) -> Callable[[Array, Array, Array], Array]:
    """V_BITOP3: bit ``4a + 2b + c`` of the table is the result of the bits a, b, c."""

    def of(a: Array, b: Array, c: Array) -> Array:
        out = np.zeros(np.broadcast(a, b, c).shape, a.dtype)
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return out

    return of


# Floating point -------------------------------------------------------------------------------------------------------


def to_odd(exact: Array, error: Array) -> Array:
    """Sums in float64, rounded to odd: rounding them once more gives what one rounding would have."""
    inexact = (error != 0) & np.isfinite(exact)
    if not inexact.any():
        return exact
    raw = np.atleast_1d(exact).view(I64)
    step = np.where((error > 0) == (exact > 0), 1, -1)
    return np.where(inexact & (raw & 1 == 0), raw + step, raw).view(F64)


#: The bits of a float64 that float32 has not, and the highest of them; float32's least normal number, without a sign.
_BELOW_F32, _HALF_OF_F32 = uniform((1 << 29) - 1, U64), uniform(1 << 28, U64)
_NORMAL_F32, _ONE = uniform(0x381 << 53, U64), uniform(1, U64)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add of float32, rounded once: products are exact in float64.

    Rounding the sum in float64 first harms only where that lies halfway between two numbers of float32.
    """
    product, c = a.astype(F64) * b.astype(F64), c.astype(F64)
    total = product + c
    found = total.astype(F32)
    raw = total.view(U64)
    is_tie, is_subnormal = raw & _BELOW_F32 == _HALF_OF_F32, (raw << _ONE) - _ONE < _NORMAL_F32  # a zero is large there
    if not np.count_nonzero(is_tie | is_subnormal):
        return found
    rest = total - product
    return to_odd(total, (product - (total - rest)) + (c - rest)).astype(F32)


def fma16(a: Array, b: Array, c: Array) -> Array:
    """The same of float16; in float64 the sum is exact but for ties that lie 2**-30 away."""
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F16)


def in_float64(function: Callable[..., Any]) -> Callable[..., Array]:
    """A function of float32 numbers, rounded from float64."""
    return lambda *x: function(*(one.astype(F64) for one in x)).astype(F32)


def exponent(x: Array) -> Array:
    """The biased exponent of float32."""
    return (x.view(U32) >> _MANTISSA & _BYTE).view(I32)


_MANTISSA, _BYTE = uniform(23), uniform(0xFF)
_LEAST, _RANGE, _FAR = uniform(24, I32), uniform(206), uniform(95, I32)


def _divides_plainly(b: Array, c: Array) -> bool:
    """Whether no lane's division ``c / b`` needs the care that `div_scale` and `div_fixup` are for."""
    of_b, of_c = exponent(b), exponent(c)
    is_extreme = ((of_b - _LEAST).view(U32) > _RANGE) | ((of_c - _LEAST).view(U32) > _RANGE)
    return not np.count_nonzero(is_extreme | (np.abs(of_c - of_b) > _FAR))


def mantissa(x: Array) -> Array:
    """Of 0.5 to 1, with the sign; what is infinite or NaN stays."""
    return np.where(np.isfinite(x), np.frexp(x)[0], x).astype(F32)


def power(x: Array) -> Array:
    """That of two which `mantissa` leaves; 0 of what is infinite or NaN."""
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I32)


def scaled(x: Array, by: Array | int) -> Array:
    """``x * 2 ** by``, rounded once."""
    return np.ldexp(x.astype(F64), np.clip(by, -400, 400)).astype(F32)


def div_scale(x: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """V_DIV_SCALE_F32: ``x``, one of the two, scaled so that the division's steps stay normal; and the flag for it.

    Where the quotient and the denominator's inverse are both below the normal numbers, AMD's document scales the
    denominator up, to infinity. It is scaled down here: with the flag, only that gives the quotient.
    """
    b, c = denominator, numerator
    if _divides_plainly(b, c):
        return x, np.zeros(LANES, np.bool_)
    up, down = scaled(x, 64), scaled(x, -64)
    quotient, inverse = c.astype(F64) / b.astype(F64), 1.0 / b.astype(F64)
    small, tiny_inverse = (np.abs(quotient) < 2.0**-126) & (quotient != 0), np.abs(inverse) < 2.0**-126
    is_b, is_c = (x.view(U32) == one.view(U32) for one in (b, c))
    if_b, if_c = np.where(is_b, up, x), np.where(is_c, up, x)
    cases = [
        ((c == 0) | (b == 0), np.full(LANES, np.nan, F32), False), (exponent(c) - exponent(b) >= 96, if_b, True),
        ((exponent(b) == 0) & (b != 0), up, False), (tiny_inverse & small, np.where(is_b, down, x), True),
        (tiny_inverse, down, False),
        (small, if_c, True), (exponent(c) <= 23, up, False),
    ]  # fmt: skip
    conditions = [condition for condition, _, _ in cases]
    value = np.select(conditions, [value for _, value, _ in cases], x)
    return value.astype(F32), np.select(conditions, [flag for _, _, flag in cases], False)


def div_fmas(a: Array, b: Array, c: Array, flag: Array) -> Array:
    """V_DIV_FMAS_F32: a fused multiply-add, and the scale of `div_scale` undone where it was flagged."""
    found = fma(a, b, c)
    if not np.count_nonzero(flag):
        return found
    return np.where(flag, scaled(found, np.where(exponent(c) > 127, 64, -64)), found)


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """V_DIV_FIXUP_F32: a quotient, put right where an operand is 0, infinite or NaN."""
    b, c, nan = denominator, numerator, F32(np.nan)
    if _divides_plainly(b, c):
        return np.copysign(quotient, b * c)
    sign = np.signbit(b) ^ np.signbit(c)

    def with_sign(x: Any) -> Array:
        return np.where(sign, -x, x).astype(F32)

    infinite, zero = with_sign(F32(np.inf)), with_sign(F32(0))
    cases: list[tuple[Array, Any]] = [
        (np.isnan(c), c), (np.isnan(b), b), ((b == 0) & (c == 0), nan), (np.isinf(b) & np.isinf(c), nan),
        ((b == 0) | np.isinf(c), infinite), (np.isinf(b) | (c == 0), zero), (exponent(c) - exponent(b) < -150, zero),
    ]  # fmt: skip
    conditions = [condition for condition, _ in cases]
    return np.select(conditions, [value for _, value in cases], with_sign(np.abs(quotient))).astype(F32)


def float_class(x: Array) -> Array:
    """V_CMP_CLASS_F32: the number of each value's class, the bit that a mask has for it."""
    negative, fraction, top = np.signbit(x), x.view(U32) & U32(0x7FFFFF), exponent(x)
    nan = (top == 255) & (fraction != 0)
    cases: list[Array] = [nan & (fraction >> U32(22) == 0), nan, top == 255, (top == 0) & (fraction == 0), top == 0]
    values: list[Any] = [0, 1, np.where(negative, 2, 9), np.where(negative, 5, 6), np.where(negative, 4, 7)]
    return np.select(cases, values, np.where(negative, 3, 8)).astype(U32)


def median(a: Array, b: Array, c: Array) -> Array:
    """The middle one of three."""
    return np.fmax(np.fmin(np.fmax(a, b), c), np.fmin(a, b))


# Conversions ----------------------------------------------------------------------------------------------------------


def to_u32(x: Array) -> Array:
    """Truncated, saturated; NaN becomes 0."""
    return np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(F64)), 0, 4294967295.0)).astype(U64).astype(U32)


def to_i32(x: Array) -> Array:
    """Truncated, saturated; NaN becomes 0."""
    return (
        np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(F64)), -2147483648.0, 2147483647.0)).astype(I64).astype(I32)
    )


def to_bf16(x: Array) -> Array:
    """bfloat16's bits of ``[..., lanes]``, to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, F32).view(U32)
    up, lowest = uniform(16), uniform(1)
    rounded: Array = bits + uniform(0x7FFF) + (bits >> up & lowest) >> up
    nan = np.isnan(x)
    return np.where(nan, bits >> up | uniform(0x40), rounded) if np.count_nonzero(nan) else rounded


def from_bf16(bits: Array) -> Array:
    """The float32 numbers of bfloat16's bits."""
    return (bits.astype(U32) << U32(16)).view(F32)


def to_f16_down(x: Array) -> Array:
    """float16's bits, towards zero."""
    near = x.astype(F16)
    away = np.abs(near.astype(F64)) > np.abs(x.astype(F64))
    return np.where(away, near.view(U16) - U16(1), near.view(U16)).astype(U32)


@functools.cache
def fp8_values(kind: str, fnuz: bool) -> Array:
    """The float32 numbers of all 256 bytes.

    Parameters
    ----------
    kind
        ``"fp8"``: e4m3; ``"bf8"``: e5m2.
    fnuz
        gfx942's kinds, with one NaN and no infinity; else OCP's.
    """
    exponents = 4 if kind == "fp8" else 5
    mantissas = 7 - exponents
    code = np.arange(256)
    exponent_, fraction = code >> mantissas & ((1 << exponents) - 1), code & ((1 << mantissas) - 1)
    bias = (1 << (exponents - 1)) - (0 if fnuz else 1)
    normal = np.ldexp(1 + fraction / (1 << mantissas), exponent_ - bias)
    value = np.where(exponent_ == 0, np.ldexp(fraction / (1 << mantissas), 1 - bias), normal)
    value = np.where(code >> 7 == 1, -value, value)
    if fnuz:
        value[0x80] = np.nan
    elif kind == "fp8":
        value[[0x7F, 0xFF]] = np.nan
    else:
        value[[0x7C, 0xFC]] = np.inf, -np.inf
        value[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return value.astype(F32)


def to_fp8(x: Array, kind: str, fnuz: bool) -> Array:
    """The bytes of float32 numbers, to nearest, ties to even; beyond the largest NaN, or e5m2's infinity."""
    values = fp8_values(kind, fnuz)[:128]
    codes = np.flatnonzero(np.isfinite(values))
    finite, size = values[codes].astype(F64), np.abs(x.astype(F64))
    i = np.clip(np.searchsorted(finite, size), 1, len(finite) - 1)
    below, above = size - finite[i - 1], finite[i] - size
    up = (below > above) | ((below == above) & (codes[i] % 2 == 0))
    code = np.where(up, codes[i], codes[i - 1])
    halfway = finite[-1] + (finite[-1] - finite[-2]) / 2
    too_large = (size > halfway) | ((size == halfway) & (codes[-1] % 2 == 1))
    beyond = 0x80 if fnuz else 0x7C if kind == "bf8" else 0x7F
    code = np.where(np.isnan(x), 0x80 if fnuz else 0x7F, np.where(too_large, beyond, code))
    unsigned = fnuz & ((code == 0) | (code == 0x80))  # of a zero and of NaN there is one each
    return (code | np.where(np.signbit(x) & ~unsigned, 0x80, 0)).astype(U32)
