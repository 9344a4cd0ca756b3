"""What of racecheck's reports is let pass (`tests/gpu/races.py`), without a GPU: reports that are made up."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tilestream.kernels.device import schedule
from tilestream.kernels.hopper import attention, attention_convert, attention_load, attention_math, epilogue, gemm, ring


@pytest.fixture
def reports(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "gpu"))
    import races

    return races


def at(function, text, more=0):
    """Where such a line stands: ``ring.py:78``."""
    lines, first = inspect.getsourcelines(function.fn)
    found = next(i for i, line in enumerate(lines) if text in line)
    return f"{Path(inspect.getsourcefile(function.fn)).name}:{first + found + more}"


def report(*sides):
    """As racecheck writes one."""
    kinds = [
        f"{kind} access at kernel+0x{i}f0" + (f" in {place}" if place else "") for i, (kind, place) in enumerate(sides)
    ]
    rest = "".join(f"=========     and {one} [128 hazards]\n" for one in kinds[1:])
    return f"========= Error: Race reported between {kinds[0]}\n{rest}========= \n"


PUT = ("Write", at(ring.put, ".store("))
GET = ("Read", at(ring.get, ".load("))
#: Where the compiler puts reads of the words of attention in 8 bits (Triton 3.7.1).
MOVED = ("Read", at(attention_math.attend_blocks, "mbarrier.wait(ring.k_full.index(at.stage), at.phase)"))
#: And on an H100 (Triton 3.6.0), where it is known only now which query buffer an item's is.
STEP = ("Read", at(attention_math.start_scores, "warpgroup_mma("))
#: And on an H200, of a loop that stands in another file than its kernel.
HOME = ("Read", at(attention.attend, "def attend("))
HEAD = ("Read", at(gemm.gemm, "def gemm("))
PARTS = ("Write", at(gemm.gemm, "gl.warp_specialize("))

KNOWN = {
    "a word": (GET, PUT),
    "a word, the other way round": (PUT, GET),
    "several words": (GET, PUT, PUT),
    "a word whose read was moved": (MOVED, PUT),
    "a word whose read was moved into a step": (PUT, STEP, STEP),
    "a word whose read was moved to the kernel's head": (PUT, STEP, HOME),
    "a word that the warps that convert read": (("Read", at(attention_convert.convert_loop, "get(items.slots")), PUT),
    "what warps are told to run": (HEAD, PARTS),
    "the same, by a line before": (HEAD, ("Write", at(gemm.gemm, "gl.warp_specialize(", -1))),
}  # fmt: skip
RACES = {
    "a reader elsewhere": (("Read", at(epilogue.fixup, "gl.atomic_add(count, 1")), PUT),
    "a reader that draws tickets": (("Read", at(schedule.add, "def ")), PUT),
    "a load warp that reads": (("Read", at(gemm.hand_on, "mbarrier.arrive(items.full")), PUT),
    "attention's load warp": (("Read", at(attention_load.hand_on, "mbarrier.")), PUT),
    "values, by the warps that convert": (("Read", at(attention_convert.convert_loop, ".load(layout)")), PUT),
    "a reader who knows where": (("Read", ""), PUT),
    "a line behind the loop": (("Read", at(gemm.math_loop, "tma.store_wait(0)", 3)), PUT),
    "the same line of another file": (("Read", "other.py:" + GET[1].partition(":")[2]), PUT),
    "a line behind the kernel's head": (("Read", at(attention.attend, "def attend(", 1)), PUT),
    "what is to be run, and a word, at once": (HOME, PUT, ("Write", at(attention.attend, "gl.warp_specialize("))),
    "a word that somebody else writes": (GET, ("Write", at(epilogue.store_strip, "buffer.store("))),
    "a word that somebody else writes, too": (GET, PUT, ("Write", at(epilogue.store_strip, "buffer.store("))),
    "two who write a word": (PUT, PUT),
    "a word that is written to be read to be run": (HEAD, PUT),
    "a word read, and what is to be run": (GET, PARTS),
    "one side of a race": (GET,),
}


@pytest.mark.parametrize("sides", KNOWN.values(), ids=KNOWN)
def test_a_hand_over_is_let_pass(reports, sides):
    assert reports.races(report(*sides)) == ([], 1)


@pytest.mark.parametrize("sides", RACES.values(), ids=RACES)
def test_any_other_race_is_kept(reports, sides):
    kept, count = reports.races(
        report(*KNOWN["a word"]) + report(*sides) + report(*KNOWN["what warps are told to run"])
    )
    assert count == 3
    assert [one.count(" access") for one in kept] == [len(sides)]


def test_readers_are_all_that_call_get(reports):
    import handover

    texts = {Path(inspect.getsourcefile(one.fn)) for one in (gemm.gemm, ring.get, handover.handed)}
    calling = set()
    for path in {file for text in texts for file in text.parent.glob("*.py")}:
        name = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("def "):
                name = line.partition(" ")[2].partition("(")[0]
            elif " get(" in line and "def get(" not in line:
                calling.add((path.name, name))
    assert calling == {(Path(inspect.getsourcefile(one.fn)).name, one.fn.__name__) for one in reports.readers()}
