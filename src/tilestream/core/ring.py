"""Where a loop stands in a ring: a stage, and the phase of the round it is in.

A loop that steps through a ring of ``depth`` stages is at one of them, in an even or an odd round. A barrier is waited
for by the parity of its phase, which flips once a round, so the two of them are all a loop must carry.

Leaves in the sense of `tilestream.core.integers`: run by the Hopper kernels, and by `tilestream_tools.verify`, which
checks the protocol that is built on them.
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
    """The place ``count`` stages on: a consumer steps over what another reads.

    ``stage + count + 1`` stays in 31 bits.
    """
    ahead = stage + count
    return ahead % depth, (phase + ahead // depth) % 2


def before(stage: int, depth: int) -> int:
    """The stage before this one."""
    return (stage + depth - 1) % depth


def after(stage: int, depth: int) -> int:
    """The stage after this one."""
    return (stage + 1) % depth
