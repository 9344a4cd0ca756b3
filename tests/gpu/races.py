"""Racecheck's reports, less those of what is no race: for `test_gpu_sanitize`. Needs Triton, no GPU.

Racecheck does not follow two kinds of hand-over, and reports them in every kernel that has them:

- Triton's own, by which a kernel's first warps tell the others what to run. It is read and written where a kernel
  begins, and written where its warps part.
- The item ring's words: a warp stores them, ``bar.warp.sync``, one of its lanes arrives at an mbarrier for which all
  readers have waited. In PTX's memory model the store happens before the reads. ConSan, which knows mbarriers, judges
  these words (`test_gpu_consan`), and so does `tilestream_tools.verify`. They are written in `ring.put` alone. They
  are read in `ring.get`; the compiler moves reads and gives them the line of what they then stand beside: in the loops
  that call it, in attention's steps, but not at lines of these that load something else. Where a step stands in another
  file than its kernel, such a read has the line of the kernel's ``def``. A race of another read there with the store
  of a word would be let pass, too: the table has places, not what lies there.

A report is let pass that has a read on one side and writes on the other, all of them at such lines.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

Place = tuple[str, int]
_SIDE = re.compile(r"(Read|Write) access(?:.*? in (\S+\.py):(\d+))?")


class HandOver(NamedTuple):
    """Where racecheck sees a race that is none: who reads, and who writes."""

    reads: frozenset[Place]
    writes: frozenset[Place]


def readers() -> tuple[Any, ...]:
    """What reads the item ring's words: in the loops of the math warps, and of those that convert."""
    import handover

    from tilestream.kernels.hopper import attention, attention_convert, gemm, grouped
    from tilestream.kernels.hopper import attention_math as math

    return (
        gemm.receive, attention.math_loop, math.rows_of_consumer, math.softcap_scale_of_item, math.attend_blocks,
        math.store_tile, attention_convert.convert_loop, grouped.math_loop, handover.taker,
    )  # fmt: skip


def steps() -> tuple[Any, ...]:
    """What else is a part of such a loop."""
    from tilestream.kernels.hopper import attention_math as math
    from tilestream.kernels.hopper import gemm

    return (
        gemm.math_loop, math.math_step, math.start_scores, math.scaled_product, math.last_product, math.own_blocks,
        math.leave_out, math.start_softmax, math.store_strip,
    )  # fmt: skip


def handed_over() -> tuple[HandOver, ...]:
    """The item ring's words; of each kernel, what its first warps tell the others to run."""
    import handover

    from tilestream.kernels.hopper import attention, gemm, grouped, grouped_sources, ring

    moved = {at for one in (*readers(), *steps()) for at, line in _lines(one) if ".load(" not in line}
    moved |= _head(attention.attend)
    found = [HandOver(_where(ring.get, ".load(") | moved, _where(ring.put, ".store("))]
    entries = gemm.gemm, grouped.grouped_gemm, grouped_sources.grouped_gemm_by_source, attention.attend
    for entry in (*entries, handover.handed):
        head = _head(entry)
        # The line before is that of the branch that a kernel's warps may part in alone, or of the first branch.
        parts = _where(entry, "gl.warp_specialize(", 1) | _where(entry, "    if C.CTAS > 1:")
        found.append(HandOver(head, head | parts))
    return tuple(found)


def _head(function: Any) -> frozenset[Place]:
    """Where its ``def`` is."""
    return frozenset(at for at, line in _lines(function) if line.startswith("def "))


def _lines(function: Any) -> list[tuple[Place, str]]:
    text, first = inspect.getsourcelines(function.fn)
    file = Path(inspect.getsourcefile(function.fn) or "").name
    return [((file, first + at), line) for at, line in enumerate(text)]


def _where(function: Any, text: str, before: int = 0) -> frozenset[Place]:
    return frozenset(
        (file, at - back) for (file, at), line in _lines(function) if text in line for back in range(before + 1)
    )


def races(said: str) -> tuple[list[str], int]:
    """Racecheck's reports that are none of `handed_over`, and how many there are in all."""
    reports = re.findall(r"Race reported between .*?\n=+ *\n", said, re.S)
    known = handed_over()
    return [one for one in reports if not any(_is(one, of) for of in known)], len(reports)


def _is(report: str, of: HandOver) -> bool:
    """A read and the writes before or behind it, or the other way round, all of them where ``of`` says."""
    (first, *place), *others = _SIDE.findall(report)
    kinds = {kind for kind, *_ in others}
    return kinds == {"Write" if first == "Read" else "Read"} and all(
        file and (file, int(line)) in (of.reads if kind == "Read" else of.writes)
        for kind, file, line in ((first, *place), *others)
    )
