"""A skewed mixture of experts as a record of what each GPU did, on the ranks' common time axis.

As `timelines.mlp_timeline`: kernels as torch's profiler saw them, of the call of median length of `CALLS`. The host is
ahead: the ranks meet on their streams behind a pause in which the hosts issue the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.distributed.moe import SKEWS, WIDTHS, Mixture
from benchmarks.distributed.ranks import Activity, pause, profiled, record_of
from benchmarks.distributed.timelines import CALLS, PAUSE, begin_of, behind_meeting, end_of, microseconds

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
        if (
            "take_rows" in one.name
        ):  # what follows are the products of the source that it has waited for, own rows first
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
    meet = torch.zeros(1, device="cuda")

    def together() -> torch.Tensor:
        pause(PAUSE)
        dist.all_reduce(meet)
        return mixture.ours()

    right = together()
    profiled(together)  # compiled, and the profiler begun
    calls = []
    for _ in range(CALLS):
        out, found = profiled(together)
        assert torch.equal(out, right), "a profile changed the answer"
        calls.append(lanes(behind_meeting(found), rank, world))
    lengths = torch.tensor([end_of(call) - begin_of(call) for call in calls], dtype=torch.float64)
    kept = torch.tensor(int(lengths.argsort()[CALLS // 2]), device="cuda")
    dist.broadcast(kept, 0)
    everybody: list[dict[str, list[Activity]]] = [{} for _ in range(world)]
    dist.all_gather_object(everybody, calls[int(kept.item())])
    own = (mixture.chosen // len(mixture.w1)).flatten().bincount(minlength=world)
    dist.all_reduce(own)
    ts.check()
    if record is None:
        return
    zero = min(map(begin_of, everybody))
    for other, call in enumerate(everybody):
        for lane, of in call.items():
            record.rows.append({"rank": other, "lane": lane, "spans": [microseconds(one, zero) for one in of]})
    record.data |= {
        "of": name, "tokens": TOKENS, "skew": SKEW, "experts": shape[2], "top_k": shape[3],
        "rows_received": own.tolist(),
        "plan": mixture.plan(), "ms": round((max(map(end_of, everybody)) - zero) / 1e6, 4),
    }  # fmt: skip
    record.write()
    print(record.path, record.data["ms"], "ms", flush=True)
