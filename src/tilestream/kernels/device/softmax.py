"""The softmax of attention, online and in base 2, on scores in registers: caps, maxima, weights, sinks.

Scores are multiplied by ``scale`` where the exponent is formed, in the instruction that subtracts the row's maximum:
``scale`` holds the factor of base 2 too. A row that has seen no key has a maximum of -inf, and a sum of 0::

    for each key block:
        scores = softcap(scores)                                  # where there is a cap
        row_max, shift, rescale = update_max(scores, row_max, scale)
        weights = exp_scores(scores, scale, shift)
        row_sum, o = row_sum * rescale + sum of weights, o * rescale + weights V[block]
    factor, lse = finalize(row_max, row_sum)
    out = o * factor

*Lazily.* What is subtracted of a row's scores need not be their maximum; it keeps weights from being huge or all tiny.
So the maximum is replaced when it is more than a factor of ``2 ** LAZY`` too small, which is in a row's first blocks
and seldom after them, and only then sums have to be rescaled. Weights and sums are that factor larger at most, and the
output is their ratio; each row decides by its own scores. (FlashAttention-4 does it on Blackwell.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.kernels.device.epilogue import power_of_2, sigmoid

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
#: Powers of 2 that weights may have where sums are rescaled lazily: in 16 bits they are as exact as below 1.
LAZY: tl.constexpr = tl.constexpr(8.0)


@triton.jit
def softcap(scores, softcap_scale):
    """``tanh(softcap_scale * scores)``; the cap itself is in the scale. Exact to a bit or two of float32."""
    return 2.0 * sigmoid(2.0 * softcap_scale * scores) - 1.0


@triton.jit
def update_max(scores, row_max, scale, MASKED: tl.constexpr, LAZILY: tl.constexpr):
    """``(row_max, shift, rescale)`` with a key block's scores.

    Parameters
    ----------
    MASKED
        Whether a row may have seen no key yet: nothing is subtracted from -inf then.
    LAZILY
        Whether the maximum stays while it is not too small: see the module.

    Returns
    -------
    shift
        ``scale * row_max``, to be subtracted of scaled scores.
    rescale
        What earlier sums are multiplied by.
    """
    row_max_now = tl.maximum(row_max, tl.max(scores, 1))
    if LAZILY:
        row_max_now = tl.where((row_max_now - row_max) * scale > LAZY, row_max_now, row_max)  # NaN of -inf: stays
    shift = row_max_now * scale
    if MASKED:
        shift = tl.where(row_max_now == float("-inf"), 0.0, shift)
    rescale = power_of_2(row_max * scale - shift)
    if LAZILY:
        rescale = tl.where(row_max_now == row_max, 1.0, rescale)  # exactly 1, so that the product can be skipped
    return row_max_now, shift, rescale


@triton.jit
def update_scaled_max(scores, scaled_max, scale):
    """`update_max`, of a maximum that is kept scaled: ``(scaled_max, shift, rescale)``.

    ``scaled_max`` is rounded once, so a maximum that stays rescales by exactly 1. In `update_max` the compiler fuses
    ``row_max * scale - shift`` into one multiply-add, which leaves ``shift``'s rounding error: too much for float32.
    """
    scaled_max_now = tl.maximum(scaled_max, tl.max(scores, 1) * scale)
    shift = tl.where(scaled_max_now == float("-inf"), 0.0, scaled_max_now)
    return scaled_max_now, shift, power_of_2(scaled_max - shift)


@triton.jit
def exp_scores(scores, scale, shift):
    """Weights of a key block, by the ``shift`` of `update_max`."""
    return power_of_2(scores * scale - shift[:, None])


@triton.jit
def finalize(row_max, row_sum, sinks, head, row, scale, PACK: tl.constexpr):
    """``(factor, lse)`` of each row: its sum of weighted values is to be multiplied by ``factor``.

    A sink takes part in the sum, and has no value. NaN stays NaN.
    """
    top = row_max * scale
    if sinks is not None:
        sink = tl.load(sinks + head + row % PACK) * LOG2_E
        highest = tl.maximum(top, sink)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        factor = power_of_2(top - shift)
        row_sum = row_sum * factor + power_of_2(sink - shift)
        top = highest
        factor = tl.where(row_sum == 0.0, 0.0, factor / row_sum)
    else:
        factor = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    return factor, (top + tl.log2(row_sum)) * LN_2
