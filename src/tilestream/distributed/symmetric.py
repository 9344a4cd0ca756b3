"""Memory of a group's GPUs that each of them can reach: slots, signals and flags (torch's symmetric memory).

What is in it, of each rank: `SLOTS` slots, into which peers push, or out of which they pull; and for each slot signals,
which whoever copies into it writes. Beside it are words in the host's memory (`tilestream.distributed.host_flags`):
a flag a peer, which that peer writes; and an abort word, which any peer may write. What it is for, and in which order:
`tilestream.distributed.protocol`.

No barrier of symmetric memory's own is used (a kernel that spins without a bound), and no multicast.
"""

from __future__ import annotations

import os
import socket
import warnings
from typing import TYPE_CHECKING

import torch

from tilestream.core.errors import TilestreamError
from tilestream.distributed import host_flags as words
from tilestream.distributed.collective import agree, exchange_bytes
from tilestream.distributed.group_state import Member
from tilestream.distributed.host_flags import RankWords
from tilestream.distributed.protocol import SLOTS

if TYPE_CHECKING:
    from tilestream.distributed.plan import DistributedPlan

#: Slots grow by this much at a time.
_PAGE = 2 << 20
#: And so many signals.
_WORDS = 1024
#: Dtypes whose shards overlap on GPUs.
_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def refuse(member: Member, x: torch.Tensor) -> str:
    """Why shards like ``x`` do not travel over symmetric memory; empty where they do. Nothing is sent.

    Whether the GPUs of a group can reach each other is only known once they have told each other (`set_up`).
    """
    if torch.version.hip is not None:
        return "symmetric memory's stream waits are CUDA's; on ROCm the group's own collective is used"
    if x.dtype not in _DTYPES:
        return f"{x.dtype}: operands of 16 and 8 bits overlap on GPUs"
    if torch.cuda.is_current_stream_capturing():
        return (
            "a CUDA graph is being captured: an epoch would be the same at each replay, and under capture a stream's "
            "write becomes a node that needs an SM"
        )
    return member.unreachable


def set_up(member: Member, device: torch.device) -> str:
    """Tell the peers where this rank is, and find out whether all can reach each other: once a group, on all ranks.

    Returns
    -------
    str
        Why not, the same on each rank; empty where they can. Kept as the member's ``unreachable``.
    """
    here = f"{socket.gethostname()}\n{device.index}\n{torch.cuda.get_device_properties(device).uuid}"
    said = [x.decode().split("\n") for x in exchange_bytes(member, here.encode(), device)]
    hosts, _, gpus = zip(*said, strict=True)
    verdict = ""
    if len(set(hosts)) > 1:
        verdict = f"{len(set(hosts))} hosts: shards travel inside one"
    elif len(set(gpus)) < member.world and os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") != "1":
        verdict = "several ranks share a GPU"
    own, offered = verdict or _peer_access(device), ""
    if not verdict and member.rank == 0:
        try:
            offered = words.offer(member.world)
        except OSError as error:
            own = own or f"no memory of the host that processes share: {error}"
    try:
        found = exchange_bytes(member, offered.encode(), device)[0].decode()
        if found and not own:
            try:
                member.words = words.GroupWords(found, member.rank, member.world)
            except (OSError, RuntimeError) as error:
                own = f"no memory of the host that processes share: {error}"
        # What one rank cannot do, none does (invariant 11).
        verdicts = [x.decode() for x in exchange_bytes(member, own.encode()[:200], device)]
    finally:
        if offered:
            words.withdraw(offered)
    member.unreachable = next((f"rank {i}: {x}" for i, x in enumerate(verdicts) if x), "")
    return member.unreachable


def reach(member: Member, plan: DistributedPlan, device: torch.device) -> bool:
    """Before the first call that would overlap: whether it turns out that it cannot. All ranks ask, and wait."""
    if member.reached or plan.transport != "symmetric memory" or not plan.fused:
        return False
    agree(member, plan, device)
    member.reached = True
    return bool(set_up(member, device))


def _peer_access(device: torch.device) -> str:
    # Ranks may each see other GPUs only (CUDA_VISIBLE_DEVICES): those that are seen are asked; rendezvous has the rest.
    for other in range(torch.cuda.device_count()):
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            return f"no peer access from GPU {device.index} to {other}"
    return ""


class PeerMemory:
    """A rank's part of the group's symmetric memory, and the peers' parts as it sees them.

    `grow` is collective: each rank does it at the same call.
    """

    def __init__(self, member: Member, device: torch.device, op: str) -> None:
        assert member.words is not None, "ranks have met (`set_up`)"
        self._group_name, self._rank, self._world, self._device = member.name, member.rank, member.world, device
        self._handles: list[object] = []  # what the peers' buffers are views of
        #: What ranks tell each other beside data and signals.
        self.words: RankWords = member.words.of(op)
        self._slots: torch.Tensor | None = None
        self._peer_slots: list[torch.Tensor] = []
        self.slot_bytes = self.chunks = 0

    def _shared(self, size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        import torch.distributed._symmetric_memory as symmetric

        with torch.inference_mode(False):
            own = symmetric.empty(size, dtype=torch.uint8, device=self._device)
            own.zero_()
        torch.cuda.current_stream(self._device).synchronize()  # zeroed before a peer writes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            try:
                handle = symmetric.rendezvous(own, self._group_name)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                reason = str(error).strip().split("\n")[0]
                raise TilestreamError(
                    f"group {self._group_name!r}: its ranks did not meet to share memory: {reason}. If all made this "
                    "call: torch counts a process's rendezvous of symmetric memory over all groups, and ranks that "
                    "counted otherwise (one was in a group more, or before destroy_process_group) do not find each "
                    'other. Make such groups in fresh processes, or call with form="unfused"'
                ) from error
        self._handles.append(handle)
        return own, [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self._world)]

    def grow(self, size: int, chunks: int = 0) -> None:
        """Make slots of at least ``size`` bytes, with ``chunks`` signals each. Nobody may still be at the old ones.

        The new signals are 0, less than any epoch.
        """
        self.slot_bytes = -(-size // _PAGE) * _PAGE
        self.chunks = -(-chunks // _WORDS) * _WORDS
        self._slots, self._peer_slots = self._shared(SLOTS * (self.slot_bytes + 4 * self.chunks))

    def _of(self, rank: int) -> torch.Tensor:
        memory = self._slots if rank == self._rank else self._peer_slots[rank]
        assert memory is not None, "slots are made before they are used"
        return memory

    def slot(self, rank: int, slot: int) -> torch.Tensor:
        """A slot of a rank, as bytes."""
        return self._of(rank)[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def address(self, rank: int, slot: int) -> int:
        """Of a slot of a rank."""
        return self._of(rank).data_ptr() + slot * self.slot_bytes

    def signals(self, slot: int) -> torch.Tensor:
        """The signals of a slot, of this rank: ``int32[chunks]``. They stand behind all slots, whatever is in those."""
        at = SLOTS * self.slot_bytes + 4 * self.chunks * slot
        return self._of(self._rank)[at : at + 4 * self.chunks].view(torch.int32)

    def signal(self, rank: int, slot: int, chunk: int) -> int:
        """Address of a signal of a rank's."""
        return self._of(rank).data_ptr() + SLOTS * self.slot_bytes + 4 * (self.chunks * slot + chunk)
