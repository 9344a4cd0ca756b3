"""What nothing overlaps: a collective of the group's own backend, then the matmul; or the other way round.

By the group's own methods: what `torch.distributed` calls them changes from version to version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import AllreduceOptions, ReduceScatterOptions

from tilestream.distributed.gathered import Whole
from tilestream.distributed.group_state import Member
from tilestream.distributed.handshake import GREETING_BYTES, differ
from tilestream.distributed.plan import DistributedPlan


def agree(member: Member, plan: DistributedPlan, device: torch.device) -> None:
    """Compare what the ranks call, once for each sort of call (invariant 11).

    Raises
    ------
    ValueError
        On every rank, where they differ.
    """
    mine = plan.greeting
    if mine in member.agreed or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return  # under capture nothing can be heard: whoever warms up before has compared
    for peer, theirs in enumerate(exchange_bytes(member, mine, device)):
        error = differ(plan.case.op, mine.rstrip(), member.rank, theirs, peer)
        if error is not None:
            raise error
    member.agreed.add(mine)


def exchange_bytes(member: Member, mine: bytes, device: torch.device) -> list[bytes]:
    """What each rank has said, at most `GREETING_BYTES`, without the blanks at its end. Waits for all.

    By the CPU where the group has gloo: then no GPU is waited for.
    """
    device = torch.device("cpu") if member.backend("cpu") == "gloo" else device
    said = torch.frombuffer(bytearray(mine.ljust(GREETING_BYTES)), dtype=torch.uint8).to(device)
    heard = torch.empty(member.world * GREETING_BYTES, dtype=torch.uint8, device=device)
    try:
        member.group._allgather_base(heard, said).wait()
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        raise member.break_(f"ranks could not compare their calls: {reason}") from error
    everybody = bytes(heard.tolist())
    return [everybody[i * GREETING_BYTES : (i + 1) * GREETING_BYTES].rstrip() for i in range(member.world)]


def meet(member: Member, device: torch.device) -> None:
    """Wait until all ranks are here."""
    exchange_bytes(member, b"here", device)


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
    if _by_the_cpu(member, mine):
        through = torch.empty(got.shape, dtype=got.dtype)
        member.group._allgather_base(through, sent.cpu()).wait()
        got.copy_(through)
    else:
        _on_this_stream(member.group._allgather_base, got, sent, options=AllgatherOptions())


def _on_this_stream(collective: Callable[..., Any], *operands: Any, options: Any) -> None:
    # Else NCCL takes a stream of its own, and two events between it and ours: 4 us of a call, on an H200.
    options.asyncOp = False
    work = collective(*operands, options)
    if work is not None:  # NCCL has none then
        work.wait()


def _by_the_cpu(member: Member, x: torch.Tensor) -> bool:
    """Whether a GPU's tensor goes through the CPU: gloo has no such collectives for it."""
    return x.is_cuda and member.backend("cuda") == "gloo"


def reduce_parts(member: Member, plan: DistributedPlan, parts: torch.Tensor) -> torch.Tensor:
    """``[world, ...]`` on each rank to the sum over all ranks of this rank's part, by the group's reduce-scatter."""
    agree(member, plan, parts.device)
    return sum_of_parts(member, parts)


def all_reduce(member: Member, plan: DistributedPlan, x: torch.Tensor) -> torch.Tensor:
    """The sum of ``x`` over all ranks, by the group's all-reduce, into ``x`` where that can be."""
    agree(member, plan, x.device)
    return reduced(member, x.contiguous())


def reduced(member: Member, x: torch.Tensor) -> torch.Tensor:
    """As `all_reduce`, between ranks that know that they agree."""
    if not x.numel() or member.world == 1:
        return x
    sent = x.to("cpu", torch.promote_types(x.dtype, torch.float32)) if _by_the_cpu(member, x) else x
    _on_this_stream(member.group.allreduce, [sent], options=AllreduceOptions())
    return sent.to(x)


def sum_of_parts(member: Member, parts: torch.Tensor) -> torch.Tensor:
    """As `reduce_parts`, between ranks that know that they agree."""
    if not parts.numel():
        return parts.new_empty(parts.shape[1:])
    sent = parts.cpu() if _by_the_cpu(member, parts) else parts
    out = sent.new_empty(parts.shape[1:])
    _on_this_stream(member.group._reduce_scatter_base, out.view(-1), sent.view(-1), options=ReduceScatterOptions())
    return out.to(parts.device)
