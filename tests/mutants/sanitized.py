"""The bugs of the Hopper kernels that Triton's concurrency sanitizer (ConSan) must report: one row each.

ConSan judges what happens, in the order in which it happens. So where another wait covers a missing one, it sees none
(of an empty slot of the item ring, of Q's buffer in attention), and a barrier that counts an arrival too many, or a
turn that is not handed on, hangs: those are for `mutants.checker`.
"""

from __future__ import annotations

from typing import NamedTuple

from mutants.engine import Edit, after, at, before, delete, move, replace

HOPPER = "tilestream.kernels.hopper"
MULTIPLY, MATH, CONVERT = f"{HOPPER}.multiply", f"{HOPPER}.attention_math", f"{HOPPER}.attention_convert"

#: What the sanitizer says.
READS, WRITES = "Buffer being accessed has outstanding reads", "Buffer being accessed has outstanding writes"
PENDING = "Accessing buffer with pending access"


class SanitizedBug(NamedTuple):
    """A mutant of a kernel, and what ConSan says of it: one of ``found``."""

    edits: tuple[Edit, ...]
    found: tuple[str, ...]


class SanitizedKernel(NamedTuple):
    """A kernel that is launched under ConSan.

    Attributes
    ----------
    modules
        Its modules that may be edited, each after those that it imports; the last has ``entry``.
    always
        What is edited, bug or none, so that the sanitized kernel can be compiled.
    bugs
        By name.
    """

    modules: tuple[str, ...]
    entry: str
    always: tuple[Edit, ...]
    bugs: dict[str, SanitizedBug]


RELEASE = "mbarrier.arrive(ring.empty.index(before(stage, C.STAGES)))"

GEMM = SanitizedKernel(
    tuple(f"{HOPPER}.{name}" for name in ("ring", "epilogue", "multiply", "load", "gemm")),
    "gemm",
    # Each word of the item ring is a buffer that the sanitizer watches: of those, the ones that these cases use.
    at(f"{HOPPER}.ring", replace("gl.constexpr(16)", "gl.constexpr(3)")),
    {
        # The multiplication that has just been started still reads what is given back.
        "a stage is released too early": SanitizedBug(
            at(
                f"{MULTIPLY}:multiply",
                after(
                    "accs = wait_mma(start_mma(x, ring.y, stage, accs, 0, False, ...), PARTS)",
                    "mbarrier.arrive(ring.empty.index(stage))",
                ),
                replace(RELEASE, "mbarrier.arrive(ring.empty.index(stage))", 2, nth=0),
                delete(RELEASE),
            ),
            (READS, PENDING),
        ),
        "no wait for an empty stage": SanitizedBug(
            at(f"{HOPPER}.load:load_steps", delete("mbarrier.wait(ring.empty.index(stage), ...)")),
            (READS, WRITES, PENDING),
        ),
        "no wait for a full stage": SanitizedBug(
            at(f"{MULTIPLY}:multiply", delete("mbarrier.wait(ring.full.index(stage), phase)", 2, nth=1)), (WRITES,)
        ),
        "an item is read without a wait": SanitizedBug(
            at(f"{HOPPER}.gemm", delete("mbarrier.wait(items.full.index(...), ...)")), (READS, WRITES, PENDING)
        ),
        "no wait for the store before": SanitizedBug(
            at(f"{HOPPER}.epilogue", delete("tma.store_wait(PENDING)")), (PENDING,)
        ),
    },
)

#: The item ring's words, 16 a slot, would be most of the sanitizer's buffers, and a kernel whose assembler wants more
#: than 12 GB. They lie in global memory instead, where nothing is watched; the barriers between them are as they were.
#: That ring, in shared memory, goes through the sanitizer with the GEMM.
_SLOTS_IN_GLOBAL_MEMORY = (
    *at(
        f"{HOPPER}.ring",
        replace("slots.index(slot * FIELDS + field).store(...)", "gl.store(slots + slot * FIELDS + field, value)"),
        replace(
            "gl.max(slots.index(slot * FIELDS + field).load(layout), 0)",
            "gl.load(slots + slot * FIELDS + field, volatile=True)",
        ),
    ),
    *at(
        f"{HOPPER}.attention",
        before(
            "from tilestream.kernels.hopper.attention_convert import convert_loop",
            f"from {HOPPER}.ring import FIELDS",
        ),
        replace("slots = make_slots()", "slots = starts"),
        replace("scales = make_slots()", "scales = starts + ITEMS * FIELDS"),
    ),
)

ATTENTION = SanitizedKernel(
    tuple(f"{HOPPER}.{n}" for n in ("ring", "attention_load", "attention_convert", "attention_math", "attention")),
    "attend",
    _SLOTS_IN_GLOBAL_MEMORY,
    {
        # Before the multiplication that reads it: just before its end the next copy may come too late to be seen.
        "K's stage is given back too early": SanitizedBug(
            at(
                f"{MATH}:math_step",
                move("mbarrier.arrive(ring.k_empty.index(...))", before="__scores = start_scores(...)"),
            ),
            (READS, WRITES, PENDING),
        ),
        # The multiplication that has just been started still reads what is given back.
        "V's stage is given back too early": SanitizedBug(
            at(
                f"{MATH}:math_step",
                move(
                    "mbarrier.arrive(ring.v_empty.index(...))",
                    before="__scores = warpgroup_mma_wait(1, (__scores,))",
                ),
            ),
            (READS, PENDING),
        ),
        "no wait for K": SanitizedBug(
            at(f"{MATH}:math_step", delete("mbarrier.wait(ring.k_full.index(...), ...)")), (WRITES, PENDING)
        ),
        "V is read behind K's barrier": SanitizedBug(
            at(f"{MATH}:math_step", delete("mbarrier.wait(ring.v_full.index(...), ...)")), (WRITES, PENDING)
        ),
        "no wait for the store before": SanitizedBug(
            at(f"{MATH}:store_strip", delete("tma.store_wait(PENDING)")), (PENDING,)
        ),
        # As they were copied: the next ones are copied over them.
        "values are given back before they are converted": SanitizedBug(
            at(
                f"{CONVERT}:convert_loop",
                move(
                    "mbarrier.arrive(loaded.v_empty.index(stage))",
                    after="mbarrier.wait(loaded.v_full.index(stage), phase)",
                ),
            ),
            (WRITES, READS, PENDING),
        ),
        "values are converted over those that are multiplied": SanitizedBug(
            at(f"{CONVERT}:convert_loop", delete("mbarrier.wait(ring.v_empty.index(...), ...)")), (READS, PENDING)
        ),
    },
)  # fmt: skip
