"""The softmax of attention, online and in base 2, on scores in registers: caps, maxima, weights, sinks.

Scores are multiplied by ``scale``, which includes the factor of base 2, in the instruction that subtracts the row's
maximum. A row without keys so far has a maximum of -inf and a sum of 0::

    for each key block:
        scores = softcap(scores)                                  # if there is a cap
        row_max, shift, rescale = update_max(scores, row_max, scale)
        weights = exp_scores(scores, scale, shift)
        row_sum, o = row_sum * rescale + sum of weights, o * rescale + weights V[block]
    factor, lse = finalize(row_max, row_sum)
    out = o * factor

*Lazily.* The number that is subtracted need not be the exact maximum: it only keeps weights from being huge or all
tiny. So the maximum is replaced only when it is more than a factor of ``2 ** LAZY`` too small, which happens in a row's
first blocks and seldom later, and only then the sums are rescaled. Weights and sums are at most that factor larger, and
the output is their ratio. Each row decides by its own scores. (FlashAttention-4 does this on Blackwell.)

*The same bits.* Multiply-adds are written as such. Where a compiler may choose what it fuses, of two products or of one
that it has from the block before, it chooses otherwise in kernels of another mask or packing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.kernels.device.epilogue import power_of_2, sigmoid

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
#: The largest power of 2 of weights if sums are rescaled lazily. 16-bit weights are as exact there as below 1.
LAZY: tl.constexpr = tl.constexpr(8.0)


@triton.jit
def softcap(scores, softcap_scale):
    """``tanh(softcap_scale * scores)``, exact to a bit or two of float32. ``scale`` has the cap as a factor."""
    return 2.0 * sigmoid(2.0 * softcap_scale * scores) - 1.0


@triton.jit
def update_max(scores, row_max, scale, MASKED: tl.constexpr, LAZILY: tl.constexpr, KEEPS: tl.constexpr):
    """``(row_max, shift, rescale)`` with a key block's scores.

    Parameters
    ----------
    MASKED
        Whether a row may be without keys so far: then nothing is subtracted from -inf.
    LAZILY
        Whether to keep a maximum that is not too small: see the module.
    KEEPS
        Whether the factor of a maximum that stays is exactly 1. Else it has the rounding error of ``shift``, since
        ``row_max * scale - shift`` is rounded once. Where a row may meet blocks of which it sees no key after its own,
        because of the tile's other rows, its bits would depend on these.

    Returns
    -------
    shift
        ``scale * row_max``, to be subtracted from scaled scores.
    rescale
        The factor of earlier sums.
    """
    row_max_now = tl.maximum(row_max, tl.max(scores, 1))
    if LAZILY:
        row_max_now = tl.where((row_max_now - row_max) * scale > LAZY, row_max_now, row_max)  # NaN from -inf: keep
    shift = row_max_now * scale
    if MASKED:
        shift = tl.where(row_max_now == float("-inf"), 0.0, shift)
    rescale = power_of_2(tl.fma(row_max, scale, -shift))
    if LAZILY or KEEPS:  # lazily, so that the product can be skipped
        rescale = tl.where(row_max_now == row_max, 1.0, rescale)
    return row_max_now, shift, rescale


@triton.jit
def update_scaled_max(scores, scaled_max, scale):
    """`update_max` for a maximum that is kept scaled: ``(scaled_max, shift, rescale)``.

    ``scaled_max`` is rounded once, so a maximum that stays rescales by exactly 1. In `update_max` the one rounding of
    ``row_max * scale - shift`` leaves ``shift``'s rounding error: too much for float32.
    """
    scaled_max_now = tl.maximum(scaled_max, tl.max(scores, 1) * scale)
    shift = tl.where(scaled_max_now == float("-inf"), 0.0, scaled_max_now)
    return scaled_max_now, shift, power_of_2(scaled_max - shift)


@triton.jit
def exp_scores(scores, scale, shift):
    """Weights of a key block, with the ``shift`` of `update_max`."""
    return power_of_2(tl.fma(scores, scale, -shift[:, None]))


@triton.jit
def finalize(row_max, row_sum, sinks, head, row, scale, PACK: tl.constexpr):
    """``(factor, lse)`` of each row; ``factor`` multiplies its sum of weighted values.

    A sink adds to the sum and has no value. NaN stays NaN.
    """
    if sinks is not None:
        sink = tl.load(sinks + head + row % PACK).to(row_sum.dtype)
        highest = tl.maximum(row_max * scale, sink * LOG2_E)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        factor = power_of_2(tl.fma(row_max, scale, -shift))
        row_sum = tl.fma(row_sum, factor, power_of_2(tl.fma(sink, LOG2_E, -shift)))
        factor = tl.where(row_sum == 0.0, 0.0, factor / row_sum)
        lse = highest + tl.log2(row_sum)
    else:
        factor = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
        lse = tl.fma(row_max, scale, tl.log2(row_sum))
    return factor, lse * LN_2
