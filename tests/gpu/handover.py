"""A warp hands numbers to four others through the item ring, and nothing else: for `test_gpu_sanitize`.

``python tests/gpu/handover.py`` prints that all is right if every number arrives once, in order.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilestream.kernels.hopper.ring import ITEMS, get, make_barriers, make_slots, put, step

NUMBERS = 37


@gluon.jit
def giver(slots, full, empty, count):
    slot, phase = 0, 0
    for number in range(count):
        mbarrier.wait(empty.index(slot), phase ^ 1)
        put(slots, slot, 0, number + 1, 1)
        mbarrier.arrive(full.index(slot))
        slot, phase = step(slot, phase, ITEMS)


@gluon.jit
def taker(slots, full, empty, count, out):
    slot, phase = 0, 0
    for number in range(count):
        mbarrier.wait(full.index(slot), phase)
        taken = get(slots, slot, 0, 4)
        mbarrier.arrive(empty.index(slot))
        gl.store(out + number, taken)
        slot, phase = step(slot, phase, ITEMS)


@gluon.jit
def handed(out, count):
    slots = make_slots()
    full = make_barriers(ITEMS, 1)
    empty = make_barriers(ITEMS, 1)
    gl.warp_specialize([(taker, (slots, full, empty, count, out)), (giver, (slots, full, empty, count))], [1], [24])


def main() -> None:
    import torch

    out = torch.full((NUMBERS,), -1, dtype=torch.int32)
    there = out.cuda()  # a copy: nothing else is launched
    handed[(1,)](there, NUMBERS, num_warps=4)
    assert there.cpu().tolist() == list(range(1, NUMBERS + 1))
    print("all right")


if __name__ == "__main__":
    main()
