"""Operands of 8 bits in float16, exactly, for matrix units that take another kind of them, or none.

A kind has one exponent bias and one set of values that are not numbers:

===============  ====  =======================  ============================
kind             bias  not a number             infinity
===============  ====  =======================  ============================
float8_e4m3fn    7     ``S.1111.111``           none
float8_e5m2      15    ``S.11111.01`` and more  ``S.11111.00``
float8_e4m3fnuz  8     ``1.0000.000``           none
float8_e5m2fnuz  16    ``1.00000.00``           none
===============  ====  =======================  ============================

(OCP, *8-bit floating point specification*, 1.0; Noune et al., *8-bit numerical formats for deep neural networks*, 2022,
for the fnuz kinds.) float16 has five bits of exponent, too, of bias 15, and ten of mantissa: a kind's bits in their
places, times a power of two, are the value, those below the normal numbers too. Each is a number of float16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_float16(x, KIND: tl.constexpr):
    """``x``, of the 8 bits of ``KIND``, in float16."""
    bits = x.to(tl.uint8, bitcast=True).to(tl.int16)
    low = bits & 0x7F
    if KIND == "float8_e5m2":
        half = low << 8
    elif KIND == "float8_e4m3fn":
        half = times(low << 7, 256.0)
        half = tl.where(low == 0x7F, 0x7E00, half)
    elif KIND == "float8_e4m3fnuz":
        half = times(low << 7, 128.0)
        half = tl.where(bits == 0x80, 0x7E00, half)
    else:
        tl.static_assert(KIND == "float8_e5m2fnuz", "of 8 bits there are four kinds")
        # The largest exponent would be float16's infinity. One less is half of it, as of all but the smallest.
        half = tl.where(low < 0x7C, times(low << 8, 0.5), (low << 8) - 0x400)
        half = tl.where(bits == 0x80, 0x7E00, half)
    return (half | ((bits & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def times(bits, factor):
    """The bits of a float16, times ``factor``."""
    return (bits.to(tl.float16, bitcast=True) * factor).to(tl.float16).to(tl.int16, bitcast=True)
