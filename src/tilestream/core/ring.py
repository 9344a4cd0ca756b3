"""A loop's place in a ring: a stage, and the phase of its round.

A loop that steps through a ring of ``depth`` stages is at one stage, in an even or an odd round. A wait for a barrier
takes the parity of its phase, which flips once a round. So stage and phase are all that a loop has to keep.

The functions are leaves in the sense of `tilestream.core.integers`. The Hopper kernels run them, and so does
`tilestream_tools.verify`, which checks the protocol built on them.
"""

from __future__ import annotations


def step(stage: int, phase: int, depth: int) -> tuple[int, int]:
    """The next place in the ring."""
    stage = stage + 1
    if stage == depth:
        stage = 0
        phase = 1 - phase
    return stage, phase


def skip(stage: int, phase: int, count: int, depth: int) -> tuple[int, int]:
    """The place ``count`` stages further: a consumer skips the stages that another consumer reads.

    ``stage + count + 1`` must stay in 31 bits.
    """
    ahead = stage + count
    return ahead % depth, (phase + ahead // depth) % 2


def before(stage: int, depth: int) -> int:
    """The stage before this one."""
    return (stage + depth - 1) % depth


def after(stage: int, depth: int) -> int:
    """The stage after this one."""
    return (stage + 1) % depth
