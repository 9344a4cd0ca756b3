"""What a math loop does with an item: its multiplications on the stages of the ring, or NaN in their place."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tilestream.kernels.hopper.epilogue import mma_layout
from tilestream.kernels.hopper.ring import before, step
from tilestream.plan import hopper

narrow = gluon.constexpr_function(hopper.narrow)


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


@gluon.constexpr_function
def fragment(width, bits):
    """How x lies in registers for an instruction of so many columns, of operands of so many bits."""
    return gl.DotOperandLayout(0, mma_layout(width, 256 // bits), 32 // bits)


@gluon.jit
def start_mma(x, y_stages, stage, accs, FIRST: gl.constexpr, MORE: gl.constexpr, Y_K_MAJOR: gl.constexpr):
    """Start the multiplications of a stage, of as many of its parts from ``FIRST`` on as there are accumulators.

    Into the accumulators, or with ``MORE`` on top of what is there.
    """
    out = ()
    for i in gl.static_range(len(accs)):
        y = operand(y_stages[FIRST + i], stage, Y_K_MAJOR, True)
        out = out + (warpgroup_mma(x, y, accs[i], is_async=True, use_acc=MORE),)
    return out


@gluon.jit
def wait_mma(values, GROUPS: gl.constexpr):
    """Wait until no more than ``GROUPS`` of the multiplications started have not finished.

    ``values``: their accumulators, and what they have in registers beside these.
    """
    if len(values) == 1:
        return (warpgroup_mma_wait(GROUPS, values),)
    else:
        return warpgroup_mma_wait(GROUPS, values)


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
    PARTS: gl.constexpr = len(WIDTHS)
    accs = zeros(HALF_ROWS, WIDTHS, x_stages.dtype.primitive_bitwidth)
    mbarrier.wait(full.index(stage), phase)
    x = operand(x_stages, stage * HALVES + HALF, X_K_MAJOR, False)
    accs = wait_mma(start_mma(x, y_stages, stage, accs, 0, False, Y_K_MAJOR), PARTS)
    stage, phase = step(stage, phase, STAGES)
    for _ in range(1, steps):
        mbarrier.wait(full.index(stage), phase)
        x = operand(x_stages, stage * HALVES + HALF, X_K_MAJOR, False)
        accs = wait_mma(start_mma(x, y_stages, stage, accs, 0, True, Y_K_MAJOR), PARTS)
        mbarrier.arrive(empty.index(before(stage, STAGES)))
        stage, phase = step(stage, phase, STAGES)
    if CONSUMERS == "ping_pong":
        mbarrier.arrive(order.index(1 - WHO))
    accs = wait_mma(accs, 0)
    mbarrier.arrive(empty.index(before(stage, STAGES)))
    return accs, stage, phase


@gluon.jit
def multiply_narrow(
    x_stages, y_stages, full, empty, stage, phase, steps, order, WHO: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, HALF_ROWS: gl.constexpr, WIDTHS: gl.constexpr, X_K_MAJOR: gl.constexpr,
    Y_K_MAJOR: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """`multiply` for a tile whose last part is narrow: that one's multiplication takes x from registers.

    With x in shared memory an instruction of 64 rows reads it anew, and below 64 columns that takes longer than the
    tensor cores do. x is read into registers under the wide parts of its own stage, after the narrow part of the stage
    before, whose registers it takes (two sets of them are more than ptxas keeps without waiting in between).
    """
    HALF: gl.constexpr = WHO if HALVES == 2 else 0
    BITS: gl.constexpr = x_stages.dtype.primitive_bitwidth
    WIDE: gl.constexpr = len(WIDTHS) - 1
    accs = zeros(HALF_ROWS, WIDTHS, BITS)
    mbarrier.wait(full.index(stage), phase)
    x = operand(x_stages, stage * HALVES + HALF, X_K_MAJOR, False)
    wide = start_mma(x, y_stages, stage, accs[:WIDE], 0, False, Y_K_MAJOR)
    held = x.load(fragment(WIDTHS[WIDE], BITS))
    last = start_mma(held, y_stages, stage, accs[WIDE:], WIDE, False, Y_K_MAJOR)
    stage, phase = step(stage, phase, STAGES)
    for _ in range(1, steps):
        mbarrier.wait(full.index(stage), phase)
        x = operand(x_stages, stage * HALVES + HALF, X_K_MAJOR, False)
        wide = start_mma(x, y_stages, stage, wide, 0, True, Y_K_MAJOR)
        done = wait_mma(wide + last + (held,), WIDE)
        mbarrier.arrive(empty.index(before(stage, STAGES)))
        wide = done[:WIDE]
        held = x.load(fragment(WIDTHS[WIDE], BITS))
        last = start_mma(held, y_stages, stage, done[WIDE:-1], WIDE, True, Y_K_MAJOR)
        stage, phase = step(stage, phase, STAGES)
    if CONSUMERS == "ping_pong":
        mbarrier.arrive(order.index(1 - WHO))
    accs = wait_mma(wide + last + (held,), 0)[:-1]
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
    elif narrow(WIDTHS, x_stages.dtype.primitive_bitwidth):
        accs, stage, phase = multiply_narrow(
            x_stages, y_stages, full, empty, stage, phase, steps, order, WHO, STAGES, HALVES, HALF_ROWS,
            WIDTHS, X_K_MAJOR, Y_K_MAJOR, CONSUMERS,
        )  # fmt: skip
    else:
        accs, stage, phase = multiply(
            x_stages, y_stages, full, empty, stage, phase, steps, order, WHO, STAGES, HALVES, HALF_ROWS,
            WIDTHS, X_K_MAJOR, Y_K_MAJOR, CONSUMERS,
        )  # fmt: skip
    return accs, stage, phase
