"""What the gates of CDNA's GEMM and attention share: the devices, and rules on the order of a ring's instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gates import engine
from gates.engine import RELEASE, Rules
from tilestream_tools.isa import amdgcn

DEVICES = {arch: replace(engine.DEVICES[arch], backend="cdna") for arch in ("gfx942", "gfx950")}
#: What an operand is never moved by: whole words, and more where it can be, go into vector registers and LDS.
_NARROW = ("load 8", "load 16", "lds_write 8", "lds_write 16")


def spills(parsed: amdgcn.Kernel) -> tuple[int, int]:
    """Bytes in memory, and vector registers that went there.

    What 3.9 moves to an accumulation register it counts as spilled, too: it is not in memory.
    """
    return parsed.spilled["private_segment_fixed_size"], 0 if parsed.agprs else parsed.spilled["vgpr_spill_count"]


def loop_rules(loop: Any, copies: dict[str, int], waits: list[int] | None, least: int, steps: int = 1) -> Rules:
    """Rules of a loop that multiplies.

    ``copies``: what goes past the registers to LDS in a step, by width; none where operands go through registers.
    ``waits``: what each wait leaves in flight. ``least``: of the other operand. ``steps``: of an iteration.
    """
    counts, left = loop.counts, [wait["vmcnt"] for wait in loop.waits if "vmcnt" in wait]
    # 3.9 puts a barrier of its own between a step's reads and its copies.
    barriers = 1 + (RELEASE >= (3, 9)) if waits else 2
    found: Rules = {
        "copies past the registers": (
            {key: count for key, count in counts.items() if key.startswith("load_to_lds")},
            {key: steps * count for key, count in copies.items()},
        ),
        "moves of less than 32 bits": ([key for key in _NARROW if counts.get(key)], []),
        "scratch": ([key for key in counts if key.startswith("scratch")], []),
        "a full drain": (left.count(0), 0),
        "what waits leave of the other operand": (min(left, default=least), range(least, 64)),
        "barriers": (counts.get("barrier", 0), steps * barriers),
        "order": (ring_order(loop.instructions), []),
        "branches": (counts["branch"], 1),  # a second one would be a loop over lanes
    }
    if waits is not None:
        found["what waits leave in flight"] = (left, steps * waits)
    return found


def waits_then_barriers(code: Sequence[amdgcn.Instruction]) -> list[str]:
    """Whether anything of shared memory is touched between a wait for copies and the barrier that comes with it.

    Of a kernel that copies: a wait for loads into registers comes with no barrier.
    """
    found, ready = [], True
    for one in code:
        if "vmcnt" in one.waits:
            ready = False
        elif one.kind in ("barrier", "lds_write", "store", "valu", "load"):  # the last four wait for loads
            ready = True
        elif one.kind in ("lds_read", "load_to_lds") and not ready:
            found.append(f"{one.mnemonic} at once behind a wait for copies")
    return sorted(set(found))


def ring_order(code: Sequence[amdgcn.Instruction]) -> list[str]:
    """What of a loop's order breaks the ring's protocol: see `tilestream.kernels.cdna.ring`."""
    kinds = [one.kind for one in code]
    copies = [i for i, kind in enumerate(kinds) if kind == "load_to_lds"]
    reads = [i for i, kind in enumerate(kinds) if kind == "lds_read"]
    barriers = [i for i, kind in enumerate(kinds) if kind == "barrier"]
    waits = [i for i, one in enumerate(code) if "vmcnt" in one.waits]
    found = []
    if copies:
        # From a wait on: a barrier, and only then reads and copies.
        ready = False
        for one, kind in zip(code, kinds, strict=True):
            if "vmcnt" in one.waits:
                ready = False
            elif kind == "barrier":
                ready = True
            elif kind in ("lds_read", "load_to_lds") and not ready:
                found.append("reads or copies between a wait for copies and its barrier")
        if not waits or not barriers or min(reads[0], copies[0]) < waits[0]:
            found.append("a step begins without a wait")
    # What a warp has read is in its registers before it tells the others that they may overwrite it.
    for i in barriers:
        past = [j for j in reads if j < i] or [j - len(code) for j in reads]
        if not any(code[j].waits.get("lgkmcnt") == 0 for j in range(past[-1] + 1, i + 1)):
            found.append("a barrier that reads of shared memory may pass")
    return sorted(set(found))
