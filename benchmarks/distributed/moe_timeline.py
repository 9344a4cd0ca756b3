"""A skewed mixture of experts as a record of what each GPU did, on the ranks' common time axis.

As `timelines.mlp_timeline`: kernels as torch's profiler saw them, of the call that `timelines.typical_call` keeps. The
host is ahead: the ranks meet on their streams behind a pause in which the hosts issue the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.distributed.moe import SKEWS, WIDTHS, Mixture
from benchmarks.distributed.ranks import Activity, record_of
from benchmarks.distributed.timelines import behind_meeting, typical_call, write_call

#: What is drawn: a layer of `moe.WIDTHS`, its tokens a rank, and its skew.
OF, TOKENS, SKEW = "Qwen3-30B-A3B", 4096, "Zipf"
#: Lanes by a kernel's name; the others' are those of the calling stream.
_NAMED = {
    "push_rows": "push rows", "push_results": "push results", "take_rows": "wait", "take_results": "wait",
    "begin_call": "sort, add", "end_call": "sort, add", "add_results": "sort, add",
}  # fmt: skip
LANES = ("sort, add", "push rows", "wait", "own rows", "rows of others", "push results")


def lanes(found: Sequence[Activity], rank: int, world: int) -> dict[str, list[Activity]]:
    """A GPU's activities of one call by purpose, in order.

    Raises
    ------
    RuntimeError
        If it is no such call: what is missing, and what was seen.
    """
    kernels = [one for one in found if not one.size]
    made: dict[str, list[Activity]] = {lane: [] for lane in LANES}
    sources, lane = 0, "sort, add"
    for one in kernels:
        known = next((lane for name, lane in _NAMED.items() if name in one.name), None)
        made[known or lane].append(one)
        if "take_rows" in one.name:
            # What follows are the products of the source that it has waited for, own rows first.
            sources, lane = sources + 1, "rows of others" if sources else "own rows"
        elif "take_results" in one.name:
            lane = "sort, add"
    pushed = len(made["push rows"]), len(made["push results"])
    if pushed != (1, world) or sources != world or not made["own rows"]:
        names = sorted({one.name[:60] for one in kernels})
        raise RuntimeError(
            f"rank {rank}: {pushed[0]} kernels push rows, {pushed[1]} results, and {sources} wait for rows; of a fused "
            f"call over {world} ranks 1, {world} and {world}. Kernels: {names}"
        )
    return made


def moe_timeline(rank: int, world: int, session: Session) -> None:
    """Of one block; rank 0 writes the record."""
    name, *shape = next(one for one in WIDTHS if one[0] == OF)
    mixture = Mixture(rank, world, TOKENS, SKEWS[SKEW], tuple(shape))  # type: ignore[arg-type]
    record = record_of(session, rank, "moe_timeline")
    everybody = typical_call(
        mixture.ours, lambda found: lanes(behind_meeting(found), rank, world), rank, world
    )  # fmt: skip
    own = (mixture.chosen // len(mixture.w1)).flatten().bincount(minlength=world)
    dist.all_reduce(own)
    ts.check()
    if record is not None:
        write_call(
            record, everybody, of=name, tokens=TOKENS, skew=SKEW, experts=shape[2], top_k=shape[3],
            rows_received=own.tolist(), plan=mixture.plan(),
        )  # fmt: skip
