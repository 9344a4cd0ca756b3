"""What nothing overlaps: a collective of the group's own backend, then the matmul; or the other way round."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from tilestream.distributed.gloo import Whole
from tilestream.distributed.greeting import GREETING_BYTES, differ, greeting
from tilestream.distributed.members import Member
from tilestream.distributed.plan import DistributedPlan

#: What the ranks of a group have found that they call alike.
_agreed: weakref.WeakKeyDictionary[Member, set[bytes]] = weakref.WeakKeyDictionary()


def agree(member: Member, plan: DistributedPlan, device: torch.device) -> None:
    """Compare what the ranks call, once for each sort of call (invariant 11).

    Raises
    ------
    ValueError
        On every rank, where they differ.
    """
    mine = greeting(plan.agreed)
    known = _agreed.setdefault(member, set())
    if mine in known:
        return
    said = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    heard = torch.empty(member.world * GREETING_BYTES, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(heard, said, group=member.group)
    everybody = bytes(heard.tolist())
    for peer in range(member.world):
        theirs = everybody[peer * GREETING_BYTES : (peer + 1) * GREETING_BYTES]
        error = differ(plan.case.op, mine, member.rank, theirs, peer)
        if error is not None:
            raise error
    known.add(mine)


def gather_whole(member: Member, plan: DistributedPlan, shard: Whole, whole: Whole) -> None:
    """Fill ``whole`` by the group's all-gather."""
    agree(member, plan, shard.data.device)
    for mine, all_ in zip(shard, whole, strict=True):
        if mine is None or all_ is None or not all_.numel():
            continue
        batches, world, rows, width = all_.shape
        into = all_ if batches == 1 else all_.new_empty(world, batches, rows, width)
        _gather(into, mine.contiguous(), member)
        if batches != 1:
            all_.copy_(into.transpose(0, 1))


def _gather(into: torch.Tensor, mine: torch.Tensor, member: Member) -> None:
    # As bytes: not every backend knows dtypes of 8 bits.
    sent, got = (x.view(-1).view(torch.uint8) for x in (mine, into))
    dist.all_gather_into_tensor(got, sent, group=member.group)


def reduce_parts(member: Member, plan: DistributedPlan, parts: torch.Tensor) -> torch.Tensor:
    """``[world, ...]`` on each rank to the sum over all ranks of this rank's part, by the group's reduce-scatter."""
    agree(member, plan, parts.device)
    out = parts.new_empty(parts.shape[1:])
    if out.numel():
        dist.reduce_scatter_tensor(out.view(-1), parts.view(-1), group=member.group)
    return out
