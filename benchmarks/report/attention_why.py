"""Where attention is behind its fastest peer, in classes, with what is known of why. For `render_attention`.

The words are written by hand; which rows they are of, and by how much, is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Row = dict[str, Any]
#: Ratios below this are explained.
EXPLAINED = 0.98


class Why(NamedTuple):
    """A class of rows, and words on what they lose by; the first class that has a row explains it."""

    what: str
    holds: Callable[[Row], bool]
    words: str


WHY = (
    Why("few keys", lambda row: row["length"] <= 1024, (
        "an item has few blocks of keys, so its beginning and end (queries, first scores, output) are much of it, and "
        "with 256 columns, causal, at 512, a launch moves 2.3 of an H100's 3.35 TB/s meanwhile. Tried since: an item's "
        "first scores started before the output of the one before is stored; 1 to 2.5 % faster with 64 columns, full, "
        "no faster causal (64 and 128). Next: a timeline of such a call"
    )),
    Why("64 columns", lambda row: row["dim"] == 64, (
        "exponentials take as long as the tensor cores do (docs/attention.md counts both), so that what does not "
        "overlap of the two is lost; tried since, and no faster: a row's largest score found by halves, its sums "
        "scaled only when it has grown, the product waited for behind the exponentials. What FA4 does otherwise was "
        "not looked into"
    )),
    Why("128 columns", lambda row: row["dim"] == 128, (
        "the tensor cores wait for little, and the GPU for power: with half of each block's copies left out, and "
        "nothing else, an H200 was 8 % faster (739 and 797 at S 16384, full). Next: two CTAs that are sent the same "
        "keys at once (multicast, from Triton 3.7 on), and more keys a block"
    )),
    Why("others", lambda row: True, "not looked into"),
)  # fmt: skip


def behind(rows: list[tuple[Row, float, str]]) -> list[str]:
    """Of rows with their ratio to the fastest peer, and its name: those below `EXPLAINED`, class by class."""
    lines = []
    left = [one for one in rows if one[1] < EXPLAINED]
    for why in WHY:
        found = [one for one in left if why.holds(one[0])]
        left = [one for one in left if not why.holds(one[0])]
        if found:
            worst, ratio, peer = min(found, key=lambda one: one[1])
            mask = "causal" if worst["causal"] else "full"
            lines.append(
                f"- {why.what}: {len(found)} of {sum(why.holds(row) for row, *_ in rows)}, down to {ratio:.3f} (D "
                f"{worst['dim']}, {mask}, S {worst['length']}, {peer}): {why.words}."
            )
    return [f"**Behind the faster peer**, below {EXPLAINED}:", "\n".join(lines)] if lines else []
