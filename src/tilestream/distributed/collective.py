"""Unfused fallback: the group's own collectives, before or after the matmul; and the handshake of each new call.

This module calls the methods of the process group, because the functions of `torch.distributed` change from version to
version.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.distributed import AllreduceOptions, ReduceScatterOptions

from tilestream.core.protocols.handshake import HANDSHAKE_BYTES, difference
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import Call
from tilestream.distributed.shards import ScaledRows
from tilestream.runtime.streams import is_capturing


def agree(state: GroupState, call: Call, device: torch.device) -> None:
    """Compare the ranks' calls, once for each kind of call (invariant 11).

    Raises
    ------
    ValueError
        On every rank, if the calls differ.
    """
    mine = call.handshake
    if mine in state.agreed or (device.type == "cuda" and is_capturing(device)):
        return  # a capture cannot wait for peers: the warm-up call has compared
    for peer, theirs in enumerate(exchange_bytes(state, mine, device)):
        error = difference(call.op, mine.rstrip(), state.rank, theirs, peer)
        if error is not None:
            raise error
    state.agreed.add(mine)


def exchange_bytes(state: GroupState, mine: bytes, device: torch.device) -> list[bytes]:
    """All-gather at most `HANDSHAKE_BYTES` bytes, without trailing blanks. Blocks the host until all ranks call.

    If the group has gloo, this runs on the CPU and does not wait for a GPU.
    """
    device = torch.device("cpu") if state.backend("cpu") == "gloo" else device
    sent = torch.frombuffer(bytearray(mine.ljust(HANDSHAKE_BYTES)), dtype=torch.uint8).to(device)
    received = torch.empty(state.world * HANDSHAKE_BYTES, dtype=torch.uint8, device=device)
    try:
        state.group._allgather_base(received, sent).wait()
    except RuntimeError as error:
        raise state.break_(f"ranks could not compare their calls: {first_line(error)}") from error
    data = bytes(received.tolist())
    return [data[i * HANDSHAKE_BYTES : (i + 1) * HANDSHAKE_BYTES].rstrip() for i in range(state.world)]


def barrier(state: GroupState, device: torch.device) -> None:
    """Wait until all ranks have called it."""
    exchange_bytes(state, b"here", device)


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().split("\n")[0]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes: some backends lack 8-bit dtypes."""
    return x.view(-1).view(torch.uint8)


def all_gather(state: GroupState, shard: ScaledRows, gathered: ScaledRows) -> None:
    """Fill ``gathered`` from all ranks' shards."""
    for mine, all_ in zip(shard, gathered, strict=True):
        if mine is None or all_ is None or not all_.numel():
            continue
        batches, world, rows, width = all_.shape
        into = all_ if batches == 1 else all_.new_empty(world, batches, rows, width)
        sent, received = as_bytes(mine.contiguous()), as_bytes(into)
        if _via_cpu(state, mine):
            staged = torch.empty(received.shape, dtype=received.dtype)
            state.group._allgather_base(staged, sent.cpu()).wait()
            received.copy_(staged)
        else:
            on_this_stream(state.group._allgather_base, received, sent, options=AllgatherOptions())
        if batches != 1:
            all_.copy_(into.transpose(0, 1))


def all_reduce(state: GroupState, x: torch.Tensor) -> torch.Tensor:
    """The sum of ``x`` over all ranks; in place if ``x`` is contiguous and not staged on the CPU."""
    x = x.contiguous()
    if not x.numel() or state.world == 1:
        return x
    sent = x.to("cpu", torch.promote_types(x.dtype, torch.float32)) if _via_cpu(state, x) else x
    on_this_stream(state.group.allreduce, [sent], options=AllreduceOptions())
    return sent.to(x)


def reduce_scatter(state: GroupState, parts: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks of this rank's part of their ``parts``, ``[world, ...]``."""
    if not parts.numel():
        return parts.new_empty(parts.shape[1:])
    sent = parts.cpu() if _via_cpu(state, parts) else parts
    out = sent.new_empty(parts.shape[1:])
    on_this_stream(state.group._reduce_scatter_base, out.view(-1), sent.view(-1), options=ReduceScatterOptions())
    return out.to(parts.device)


def all_to_all(state: GroupState, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """Send the first ``sent[0]`` rows to rank 0, and so on; ``received[q]`` rows of rank ``q``, in order of ``q``."""
    into = rows.new_empty((sum(received), *rows.shape[1:]))
    width = math.prod(rows.shape[1:]) * rows.element_size()
    mine, theirs = (as_bytes(x.contiguous()).view(-1, width) for x in (rows, into))
    if _via_cpu(state, rows):
        mine, theirs = mine.cpu(), torch.empty(theirs.shape, dtype=theirs.dtype)
    work = state.group.alltoall_base(theirs, mine, received, sent, AllToAllOptions())
    if work is not None:
        work.wait()
    return theirs.to(rows.device).view(-1).view(rows.dtype).view(into.shape)


def on_this_stream(collective: Callable[..., Any], *operands: Any, options: Any) -> None:
    """Issue a collective of the group behind the current stream's work; later work of the stream follows it."""
    # With asyncOp NCCL runs on its own stream, and two events connect the streams: 4 us a call on an H200.
    options.asyncOp = False
    work = collective(*operands, options)
    if work is not None:  # NCCL returns None
        work.wait()


def _via_cpu(state: GroupState, x: torch.Tensor) -> bool:
    """Whether a GPU tensor is staged on the CPU: gloo lacks these collectives on GPUs."""
    return x.is_cuda and state.backend("cuda") == "gloo"
