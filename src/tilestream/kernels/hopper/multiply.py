"""What a math loop makes of an item: its multiplications on the stages of the ring, or NaN in their place."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tilestream.core.structs import Place
from tilestream.kernels.hopper.epilogue import mma_layout
from tilestream.kernels.hopper.ring import before, step


@gluon.jit
def mma_operand(stages, at, K_MAJOR: gl.constexpr, TRANSPOSED: gl.constexpr):
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
        y = mma_operand(y_stages[FIRST + i], stage, Y_K_MAJOR, True)
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
def multiply(ring, order, place, steps, WHO: gl.constexpr, C: gl.constexpr):
    """The K loop of one item: ``(accumulators, place)``, the `Place` behind it.

    A stage is given back when the multiplication after it has been started and the one on it is done: so a ring has two
    stages at least.
    """
    WIDTHS: gl.constexpr = C.WIDTHS
    HALF: gl.constexpr = WHO if C.HALVES > 1 else 0
    stage, phase = place
    PARTS: gl.constexpr = len(C.WIDTHS)
    accs = zeros(C.HALF_ROWS, WIDTHS, ring.x.dtype.primitive_bitwidth)
    mbarrier.wait(ring.full.index(stage), phase)
    x = mma_operand(ring.x, stage * C.HALVES + HALF, C.X_K_MAJOR, False)
    accs = wait_mma(start_mma(x, ring.y, stage, accs, 0, False, C.Y_K_MAJOR), PARTS)
    stage, phase = step(stage, phase, C.STAGES)
    for _ in range(1, steps):
        mbarrier.wait(ring.full.index(stage), phase)
        x = mma_operand(ring.x, stage * C.HALVES + HALF, C.X_K_MAJOR, False)
        accs = wait_mma(start_mma(x, ring.y, stage, accs, 0, True, C.Y_K_MAJOR), PARTS)
        mbarrier.arrive(ring.empty.index(before(stage, C.STAGES)), count=C.CTAS)
        stage, phase = step(stage, phase, C.STAGES)
    if C.CONSUMERS == "ping_pong":
        mbarrier.arrive(order.index(1 - WHO))
    accs = wait_mma(accs, 0)
    mbarrier.arrive(ring.empty.index(before(stage, C.STAGES)), count=C.CTAS)
    return accs, Place(stage, phase)


@gluon.jit
def multiply_rs_tail(ring, order, place, steps, WHO: gl.constexpr, C: gl.constexpr):
    """`multiply` for a tile whose last part is narrow: that part's multiplication takes x from registers.

    With x in shared memory an instruction of 64 rows reads it anew, and below 64 columns that takes longer than the
    tensor cores do. x is read into registers under the wide parts of its own stage, after the narrow part of the stage
    before, whose registers it takes (two sets of them are more than ptxas keeps without waiting in between).
    """
    WIDTHS: gl.constexpr = C.WIDTHS
    HALF: gl.constexpr = WHO if C.HALVES > 1 else 0
    stage, phase = place
    BITS: gl.constexpr = ring.x.dtype.primitive_bitwidth
    WIDE: gl.constexpr = len(C.WIDTHS) - 1
    LAYOUT: gl.constexpr = fragment(C.WIDTHS[WIDE], BITS)
    accs = zeros(C.HALF_ROWS, WIDTHS, BITS)
    mbarrier.wait(ring.full.index(stage), phase)
    x = mma_operand(ring.x, stage * C.HALVES + HALF, C.X_K_MAJOR, False)
    wide = start_mma(x, ring.y, stage, accs[:WIDE], 0, False, C.Y_K_MAJOR)
    held = x.load(LAYOUT)
    last = start_mma(held, ring.y, stage, accs[WIDE:], WIDE, False, C.Y_K_MAJOR)
    stage, phase = step(stage, phase, C.STAGES)
    for _ in range(1, steps):
        mbarrier.wait(ring.full.index(stage), phase)
        x = mma_operand(ring.x, stage * C.HALVES + HALF, C.X_K_MAJOR, False)
        wide = start_mma(x, ring.y, stage, wide, 0, True, C.Y_K_MAJOR)
        done = wait_mma(wide + last + (held,), WIDE)
        mbarrier.arrive(ring.empty.index(before(stage, C.STAGES)), count=C.CTAS)
        wide = done[:WIDE]
        held = x.load(LAYOUT)
        last = start_mma(held, ring.y, stage, done[WIDE:-1], WIDE, True, C.Y_K_MAJOR)
        stage, phase = step(stage, phase, C.STAGES)
    if C.CONSUMERS == "ping_pong":
        mbarrier.arrive(order.index(1 - WHO))
    accs = wait_mma(wide + last + (held,), 0)[:-1]
    mbarrier.arrive(ring.empty.index(before(stage, C.STAGES)), count=C.CTAS)
    return accs, Place(stage, phase)


@gluon.jit
def multiply_promoted(ring, order, place, steps, WHO: gl.constexpr, C: gl.constexpr):
    """`multiply` with two-level accumulation, for fp8: a step's product is added to the accumulators in fp32.

    The tensor core adds products of fp8 with about 14 bits, which is enough for one K step but not for all of K.
    Parts one after the other: there are registers for the product of one of them.
    """
    WIDTHS: gl.constexpr = C.WIDTHS
    HALF: gl.constexpr = WHO if C.HALVES > 1 else 0
    stage, phase = place
    BITS: gl.constexpr = ring.x.dtype.primitive_bitwidth
    accs = zeros(C.HALF_ROWS, WIDTHS, BITS)
    for k in range(steps):
        mbarrier.wait(ring.full.index(stage), phase)
        x = mma_operand(ring.x, stage * C.HALVES + HALF, C.X_K_MAJOR, False)
        sums = ()
        for i in gl.static_range(len(C.WIDTHS)):
            part = zero(C.HALF_ROWS, C.WIDTHS[i], BITS)
            y = mma_operand(ring.y[i], stage, C.Y_K_MAJOR, True)
            part = warpgroup_mma(x, y, part, is_async=True, use_acc=False)
            if C.CONSUMERS == "ping_pong" and i == len(C.WIDTHS) - 1:
                if k == steps - 1:
                    mbarrier.arrive(order.index(1 - WHO))
            sums = sums + (accs[i] + warpgroup_mma_wait(0, (part,)),)
        mbarrier.arrive(ring.empty.index(stage), count=C.CTAS)
        accs = sums
        stage, phase = step(stage, phase, C.STAGES)
    return accs, Place(stage, phase)


@gluon.jit
def poison(order, WHO: gl.constexpr, BITS: gl.constexpr, C: gl.constexpr):
    """NaN in place of the product of a void item: no stage is waited for, and none is given back."""
    if C.CONSUMERS == "ping_pong":
        mbarrier.arrive(order.index(1 - WHO))
    accs = ()
    for i in gl.static_range(len(C.WIDTHS)):
        accs = accs + (zero(C.HALF_ROWS, C.WIDTHS[i], BITS) + float("nan"),)
    return accs


@gluon.jit
def product(ring, order, place, steps, WHO: gl.constexpr, C: gl.constexpr):
    """What an item of so many K steps comes to: ``(accumulators, place)``. Void, it has fewer than none."""
    MULTIPLY: gl.constexpr = multiply_promoted if C.PROMOTED else multiply_rs_tail if C.RS_TAIL else multiply
    if C.VOIDS:
        if steps < 0:
            accs = poison(order, WHO, ring.x.dtype.primitive_bitwidth, C)
        else:
            accs, place = MULTIPLY(ring, order, place, steps, WHO, C)
    else:
        accs, place = MULTIPLY(ring, order, place, steps, WHO, C)
    return accs, place
