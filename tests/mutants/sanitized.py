"""The bugs of the Hopper kernels that Triton's concurrency sanitizer (ConSan) must report.

ConSan judges what happens, in the order in which it happens. So where another wait covers a missing one, it sees none
(of an empty slot of the item ring, of Q's buffer in attention), and a barrier that counts an arrival too many, or a
turn that is not handed on, hangs: those are for `mutants.checker`. Its books are of one CTA: of a pair it sees what the
CTA's own warps do, and not that the other's loads write into this one's stages, which is for
`tilestream_tools.verify.pair`.
"""

from __future__ import annotations

from typing import NamedTuple

from mutants.engine import Edit
from mutants.kernel_text import HOPPER, MODULES
from mutants.table import read

CONVERT = f"{HOPPER}.attention_convert"

#: What the sanitizer says, by the table's word.
SAYS = {
    "reads": "Buffer being accessed has outstanding reads",
    "writes": "Buffer being accessed has outstanding writes",
    "pending": "Accessing buffer with pending access",
    "underflow": "Barrier arrive underflow",
    "has not ended": "the launch has not ended",  # of the programs that launch, not of ConSan
}


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


def _kernel(entry: str, *modules: str) -> SanitizedKernel:
    rows = [row for row in read("sanitized.txt", MODULES) if row.section == entry]
    bugs = {row.name: SanitizedBug(row.edits, tuple(SAYS[word] for word in row.found.split(", "))) for row in rows[1:]}
    return SanitizedKernel(tuple(f"{HOPPER}.{name}" for name in modules), entry, rows[0].edits, bugs)


GEMM = _kernel("gemm", "ring", "epilogue", "multiply", "load", "gemm")
GROUPED = _kernel("grouped_gemm", "ring", "epilogue", "multiply", "load", "gemm", "grouped")
BY_SOURCE = _kernel(
    "grouped_gemm_by_source", "ring", "epilogue", "multiply", "load", "gemm", "grouped", "grouped_sources"
)  # fmt: skip
ATTENTION = _kernel("attend", "ring", "attention_load", "attention_convert", "attention_math", "attention")
