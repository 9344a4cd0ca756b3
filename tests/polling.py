"""The machine code of a loop in which a worker on AMD waits for a chunk: what it must have."""

from __future__ import annotations

from collections.abc import Sequence

from tilestream_tools.isa import amdgcn


def polling_faults(parsed: amdgcn.Kernel) -> list[str]:
    """What a loop that waits for a chunk on AMD must have, and has not; "no polling loop" where there is none.

    One lane polls at the system's scope and drops what its caches have before any lane reads on. Then it pauses, and
    reads the time, which bounds the wait.
    """
    waiting = [loop for loop in parsed.loops if loop.counts["sleep"]]
    inner = [loop for loop in waiting if not any(other.body < loop.body for other in waiting)]
    faults = [] if inner else ["no polling loop"]
    for loop in inner:
        code = sorted(loop.instructions, key=lambda one: one.line)
        looks = [one for one in code if one.kind in ("load", "atomic")]
        signals = [one for one in looks if {"sc0", "sc1"} <= set(one.operands.split())]
        if len(signals) != 1:
            faults.append(f"{len(signals)} looks at the system's scope")
        for one in signals:
            behind = [other for other in code if other.line > one.line][:3]
            said = [f"{other.mnemonic} {other.operands}".strip() for other in behind]
            if said[:2] != ["s_waitcnt vmcnt(0)", "buffer_inv sc0 sc1"]:
                faults.append(f"no acquire behind the look: {'; '.join(said)}")
        # In arrival order the loop reads a table of chunks, too, and draws tickets: that is no polling.
        faults += [f"many lanes: {one.mnemonic}" for one in signals if not _by_one_lane(one, code, parsed)]
        if not any(one.mnemonic == "s_memrealtime" for one in code):
            faults.append("no time in the loop")
    return sorted(set(faults))


def _by_one_lane(look: amdgcn.Instruction, code: Sequence[amdgcn.Instruction], parsed: amdgcn.Kernel) -> bool:
    """Whether the lanes that an instruction runs for were last cut down to one.

    To the first of those that ran before, or to the worker's first thread: by a mask that is made once.
    """
    before = [one for one in code if one.line < look.line]
    masks = [i for i, one in enumerate(before) if one.mnemonic == "s_and_saveexec_b64"]
    if not masks:
        return False
    since = before[masks[-2] if len(masks) > 1 else 0 : masks[-1]]
    counted = any(one.mnemonic.startswith("v_mbcnt_hi") for one in since)
    mask = before[masks[-1]].operands.split(",")[-1].strip()
    # The mask is what it was made last before the loops around the look, unless they make another: before that, and
    # behind them, the register may have other uses.
    around = [one.line for loop in parsed.loops if look in loop.instructions for one in loop.instructions]
    every = [one for one in parsed.instructions if one.operands.split(",")[0].strip() == mask]
    made = [one for one in every if one.line < min(around)][-1:]
    made += [one for one in every if min(around) <= one.line <= max(around)]
    first = (
        len(made) == 1 and made[0].mnemonic.startswith("v_cmp_eq_u32") and made[0].operands.split(",")[1].strip() == "0"
    )
    ended = any(one.mnemonic.startswith("s_or_b64") and one.operands.startswith("exec") for one in before[masks[-1] :])
    return (counted or first) and not ended
