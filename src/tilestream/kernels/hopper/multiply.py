"""What a math loop does with an item: its multiplications on the stages of the ring, or NaN in their place."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tilestream.kernels.hopper.epilogue import mma_layout
from tilestream.kernels.hopper.ring import before, step


@gluon.jit
def operand(stages, at, K_MAJOR: gl.constexpr, TRANSPOSED: gl.constexpr):
    """A stage's part as the multiplication takes it: ``[rows, K]``, or ``[K, columns]`` where ``TRANSPOSED``."""
    buffer = stages.index(at)
    if K_MAJOR == TRANSPOSED:
        return buffer.permute((1, 0))
    else:
        return buffer


@gluon.jit
def zero(ROWS: gl.constexpr, WIDTH: gl.constexpr, BITS: gl.constexpr):
    """An accumulator of operands of so many bits."""
    return gl.zeros((ROWS, WIDTH), gl.float32, mma_layout(WIDTH, 256 // BITS))


@gluon.jit
def zeros(ROWS: gl.constexpr, WIDTHS: gl.constexpr, BITS: gl.constexpr):
    """An accumulator for each part of a tile."""
    accs = ()
    for i in gl.static_range(len(WIDTHS)):
        accs = accs + (zero(ROWS, WIDTHS[i], BITS),)
    return accs


@gluon.jit
def start_mma(x, y_stages, stage, accs, MORE: gl.constexpr, Y_K_MAJOR: gl.constexpr):
    """Start the multiplications of a stage: into the accumulators, or with ``MORE`` on top of what is there."""
    out = ()
    for i in gl.static_range(len(accs)):
        y = operand(y_stages[i], stage, Y_K_MAJOR, True)
        out = out + (warpgroup_mma(x, y, accs[i], is_async=True, use_acc=MORE),)
    return out


@gluon.jit
def wait_mma(accs, STAGES: gl.constexpr):
    """Wait until the multiplications of no more than ``STAGES`` stages have not finished."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(STAGES, accs),)
    else:
        return warpgroup_mma_wait(STAGES * len(accs), accs)


@gluon.jit
def multiply(
    x_stages, y_stages, full, empty, stage, phase, steps, order, WHO: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, HALF_ROWS: gl.constexpr, WIDTHS: gl.constexpr, X_K_MAJOR: gl.constexpr,
    Y_K_MAJOR: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """The K loop of one item: ``(accumulators, stage, phase)``.

    A stage is given back when the multiplication after it has been started and the one on it is done: so a ring has two
    stages at least.
    """
    HALF: gl.constexpr = WHO if HALVES == 2 else 0
    accs = zeros(HALF_ROWS, WIDTHS, x_stages.dtype.primitive_bitwidth)
    mbarrier.wait(full.index(stage), phase)
    x = operand(x_stages, stage * HALVES + HALF, X_K_MAJOR, False)
    accs = wait_mma(start_mma(x, y_stages, stage, accs, False, Y_K_MAJOR), 1)
    stage, phase = step(stage, phase, STAGES)
    for _ in range(1, steps):
        mbarrier.wait(full.index(stage), phase)
        x = operand(x_stages, stage * HALVES + HALF, X_K_MAJOR, False)
        accs = wait_mma(start_mma(x, y_stages, stage, accs, True, Y_K_MAJOR), 1)
        mbarrier.arrive(empty.index(before(stage, STAGES)))
        stage, phase = step(stage, phase, STAGES)
    if CONSUMERS == "ping_pong":
        mbarrier.arrive(order.index(1 - WHO))
    accs = wait_mma(accs, 0)
    mbarrier.arrive(empty.index(before(stage, STAGES)))
    return accs, stage, phase


@gluon.jit
def multiply_precisely(
    x_stages, y_stages, full, empty, stage, phase, steps, order, WHO: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, HALF_ROWS: gl.constexpr, WIDTHS: gl.constexpr, X_K_MAJOR: gl.constexpr,
    Y_K_MAJOR: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """`multiply` for fp8 without fast accumulation: a step's product is added to the accumulators in fp32.

    The tensor core adds products of fp8 with about 14 bits; over a step of K that is harmless, over all of it it shows.
    Parts one after the other: there are registers for the product of one of them.
    """
    HALF: gl.constexpr = WHO if HALVES == 2 else 0
    accs = zeros(HALF_ROWS, WIDTHS, x_stages.dtype.primitive_bitwidth)
    for k in range(steps):
        mbarrier.wait(full.index(stage), phase)
        x = operand(x_stages, stage * HALVES + HALF, X_K_MAJOR, False)
        sums = ()
        for i in gl.static_range(len(WIDTHS)):
            part = zero(HALF_ROWS, WIDTHS[i], x_stages.dtype.primitive_bitwidth)
            y = operand(y_stages[i], stage, Y_K_MAJOR, True)
            part = warpgroup_mma(x, y, part, is_async=True, use_acc=False)
            if CONSUMERS == "ping_pong" and i == len(WIDTHS) - 1:
                if k == steps - 1:
                    mbarrier.arrive(order.index(1 - WHO))
            sums = sums + (accs[i] + warpgroup_mma_wait(0, (part,)),)
        mbarrier.arrive(empty.index(stage))
        accs = sums
        stage, phase = step(stage, phase, STAGES)
    return accs, stage, phase


@gluon.jit
def poison(
    order, WHO: gl.constexpr, HALF_ROWS: gl.constexpr, WIDTHS: gl.constexpr, BITS: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """NaN in place of the product of a void item: no stage is waited for, and none is given back."""
    if CONSUMERS == "ping_pong":
        mbarrier.arrive(order.index(1 - WHO))
    accs = ()
    for i in gl.static_range(len(WIDTHS)):
        accs = accs + (zero(HALF_ROWS, WIDTHS[i], BITS) + float("nan"),)
    return accs


@gluon.jit
def product(
    x_stages, y_stages, full, empty, stage, phase, steps, order, WHO: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, HALF_ROWS: gl.constexpr, WIDTHS: gl.constexpr, X_K_MAJOR: gl.constexpr,
    Y_K_MAJOR: gl.constexpr, CONSUMERS: gl.constexpr, PROMOTE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """What an item of so many K steps comes to: ``(accumulators, stage, phase)``. Void, it has fewer than none."""
    if GATED:
        if steps < 0:
            accs = poison(order, WHO, HALF_ROWS, WIDTHS, x_stages.dtype.primitive_bitwidth, CONSUMERS)
        else:
            accs, stage, phase = product(
                x_stages, y_stages, full, empty, stage, phase, steps, order, WHO, STAGES, HALVES, HALF_ROWS,
                WIDTHS, X_K_MAJOR, Y_K_MAJOR, CONSUMERS, PROMOTE, False,
            )  # fmt: skip
    elif PROMOTE:
        accs, stage, phase = multiply_precisely(
            x_stages, y_stages, full, empty, stage, phase, steps, order, WHO, STAGES, HALVES, HALF_ROWS,
            WIDTHS, X_K_MAJOR, Y_K_MAJOR, CONSUMERS,
        )  # fmt: skip
    else:
        accs, stage, phase = multiply(
            x_stages, y_stages, full, empty, stage, phase, steps, order, WHO, STAGES, HALVES, HALF_ROWS,
            WIDTHS, X_K_MAJOR, Y_K_MAJOR, CONSUMERS,
        )  # fmt: skip
    return accs, stage, phase
