"""Exact conversion of 8-bit operands to float16, for matrix units without their kind of 8-bit numbers.

Each kind has an exponent bias and its own encodings of NaN and infinity:

===============  ====  =======================  ============================
kind             bias  not a number             infinity
===============  ====  =======================  ============================
float8_e4m3fn    7     ``S.1111.111``           none
float8_e5m2      15    ``S.11111.01`` and more  ``S.11111.00``
float8_e4m3fnuz  8     ``1.0000.000``           none
float8_e5m2fnuz  16    ``1.00000.00``           none
===============  ====  =======================  ============================

(OCP, *8-bit floating point specification*, 1.0; Noune et al., *8-bit numerical formats for deep neural networks*, 2022,
for the fnuz kinds.) float16 has five bits of exponent, with bias 15, and ten of mantissa. So a kind's bits in float16's
places, times a power of two, are the value, also for subnormal numbers. The matrix units must not flush those to zero.
MI200's do (ROCm, *MI200 MFMA behavior specifics*) and get none; for CDNA 3 and 4 the compile gate checks the mode in
which the kernel starts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_float16(x, KIND: tl.constexpr):
    """``x``, an 8-bit number of ``KIND``, in float16."""
    bits = x.to(tl.int8, bitcast=True).to(tl.int16)  # the sign in each bit of the upper half
    if KIND == "float8_e5m2":
        half = as_float16(bits << 8)
    elif KIND == "float8_e4m3fn":
        half = as_float16((bits << 7) & -0x4001) * 256.0
        half = tl.where(tl.abs(half) == 480.0, float("nan"), half)  # the number after 448 encodes NaN
    elif KIND == "float8_e4m3fnuz":
        half = as_float16((bits << 7) & -0x4001) * 128.0
        half = tl.where(bits == -0x80, float("nan"), half)
    else:
        tl.static_assert(KIND == "float8_e5m2fnuz", "of 8 bits there are four kinds")
        # The largest exponent would be float16's infinity. An exponent less 1 halves all numbers but the smallest.
        large = (bits & 0x7C) == 0x7C
        half = tl.where(large, as_float16((bits << 8) - 0x400), as_float16(bits << 8) * 0.5)
        half = tl.where(bits == -0x80, float("nan"), half)
    return half.to(tl.float16)


@triton.jit
def as_float16(bits):
    """The float16 of these 16 bits."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True)
