"""Memory of a group's GPUs that all its ranks can reach: slots and signals (torch's symmetric memory).

Each rank has slots, which peers write or read, and signals for each slot, which the rank that copies into the slot
writes. The flags with which ranks wait for each other are in host memory (`tilestream.distributed.host_flags`).
`tilestream.core.protocols.gather` defines their use and its order.

Symmetric memory's own barriers, which are kernels that spin without a bound, and multicast are not used.
"""

from __future__ import annotations

import os
import socket
import warnings

import torch

from tilestream.core.errors import TilestreamError
from tilestream.core.protocols.gather import SLOTS
from tilestream.distributed import host_flags
from tilestream.distributed.collective import exchange_bytes, first_line
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.host_flags import RankFlags
from tilestream.runtime.streams import is_capturing

#: Slots grow by multiples of this many bytes.
_PAGE = 2 << 20
#: Signals grow by multiples of this number.
_SIGNALS = 1024
#: Dtypes whose shards overlap on GPUs.
_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def why_not(state: GroupState, x: torch.Tensor, uncounted: str = "") -> str:
    """The reason why shards like ``x`` do not travel over symmetric memory; empty if they do. Nothing is sent.

    ``uncounted``: the reason why the device does not count such calls, so that no graph may hold them.
    Whether the GPUs can reach each other is known only after `connect`.
    """
    if torch.version.hip is not None:
        return "symmetric memory's stream waits are CUDA's; on ROCm the group's own collective is used"
    if state.backend(x.device.type) == "fake":
        return "a fake group has no other ranks: its collectives are called, which move nothing"
    if x.dtype not in _DTYPES:
        return f"{x.dtype}: operands of 16 and 8 bits overlap on GPUs"
    if uncounted and is_capturing(x.device):
        return f"a CUDA graph is being captured: an epoch of the host's would be the same at each replay; {uncounted}"
    return state.unreachable


def connect(state: GroupState, device: torch.device) -> str:
    """Test whether all ranks can reach each other, and map their shared flags. Collective; once a group.

    Returns
    -------
    str
        The reason why they cannot, the same on each rank; empty if they can. Kept as the state's ``unreachable``.
    """
    here = f"{socket.gethostname()}\n{device.index}\n{torch.cuda.get_device_properties(device).uuid}"
    places = [x.decode().split("\n") for x in exchange_bytes(state, here.encode(), device)]
    hosts, _, gpus = zip(*places, strict=True)
    verdict = ""
    if len(set(hosts)) > 1:
        verdict = f"{len(set(hosts))} hosts: shards travel inside one"
    elif len(set(gpus)) < state.world and os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") != "1":
        verdict = "several ranks share a GPU"
    own, offered = verdict or _peer_access(device) or _no_memory(device), ""
    if not verdict and state.rank == 0:
        try:
            offered = host_flags.offer(state.world)
        except OSError as error:
            own = own or f"no memory of the host that processes share: {error}"
    try:
        found = exchange_bytes(state, offered.encode(), device)[0].decode()
        if found and not own:
            try:
                state.host_flags = host_flags.GroupFlags(found, state.rank, state.world)
            except (OSError, RuntimeError) as error:
                own = f"no memory of the host that processes share: {error}"
        # If one rank cannot, no rank does (invariant 11).
        verdicts = [x.decode() for x in exchange_bytes(state, own.encode()[:200], device)]
    finally:
        if offered:
            host_flags.withdraw(offered)
    state.unreachable = next((f"rank {i}: {x}" for i, x in enumerate(verdicts) if x), "")
    return state.unreachable


def _peer_access(device: torch.device) -> str:
    # A rank may see some GPUs only (CUDA_VISIBLE_DEVICES). These are checked here, the others at rendezvous.
    for other in range(torch.cuda.device_count()):
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            return f"no peer access from GPU {device.index} to {other}"
    return ""


def _no_memory(device: torch.device) -> str:
    """The reason why this process cannot make memory that peers map; empty if it can. So such ranks call unfused."""
    try:
        _made(1, device)
    except (ImportError, RuntimeError) as error:
        return f"no symmetric memory: {first_line(error)}"
    return ""


def _made(size: int, device: torch.device) -> torch.Tensor:
    """Memory that peers may map, ``uint8[size]``."""
    import torch.distributed._symmetric_memory as symmetric

    with torch.inference_mode(False):
        return symmetric.empty(size, dtype=torch.uint8, device=device)


class PeerMemory:
    """A rank's part of the group's symmetric memory, with ``slots`` slots, and its mappings of the peers' parts.

    `grow` is collective: each rank calls it in the same call.
    """

    def __init__(self, state: GroupState, device: torch.device, op: str, slots: int = SLOTS) -> None:
        assert state.host_flags is not None, "the ranks are connected"
        self._group_name, self._rank, self._world, self._device = state.name, state.rank, state.world, device
        self._handles: list[object] = []  # the peers' buffers are views of these
        #: The flags of the op.
        self.flags: RankFlags = state.host_flags.of(op)
        self.slots = slots
        self._slots: torch.Tensor | None = None
        self._peer_slots: list[torch.Tensor] = []
        self.slot_bytes = self.chunks = 0

    def _shared(self, size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        import torch.distributed._symmetric_memory as symmetric

        own = _made(size, self._device)
        own.zero_()
        torch.cuda.current_stream(self._device).synchronize()  # so that it is zeroed before a peer writes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            try:
                handle = symmetric.rendezvous(own, self._group_name)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise TilestreamError(
                    f"group {self._group_name!r}: its ranks did not meet to share memory: {first_line(error)}. If all "
                    "made this call: torch counts a process's rendezvous of symmetric memory over all groups, and "
                    "ranks that counted otherwise (one was in a group more, or before destroy_process_group) do not "
                    'find each other. Make such groups in fresh processes, or call with form="unfused"'
                ) from error
        self._handles.append(handle)
        return own, [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self._world)]

    def grow(self, size: int, chunks: int = 0) -> None:
        """Make slots of at least ``size`` bytes, with ``chunks`` signals each. The old slots must be out of use.

        The new signals are 0, less than any epoch.
        """
        slot_bytes, chunks = -(-size // _PAGE) * _PAGE, -(-chunks // _SIGNALS) * _SIGNALS
        self._slots, self._peer_slots = self._shared(self.slots * (slot_bytes + 4 * chunks))
        self.slot_bytes, self.chunks = slot_bytes, chunks  # last, so that a failure keeps the old slots

    def kept(self) -> object:
        """The objects to keep while the addresses of the present slots are in use."""
        return self._slots, tuple(self._peer_slots), tuple(self._handles)

    def _of(self, rank: int) -> torch.Tensor:
        memory = self._slots if rank == self._rank else self._peer_slots[rank]
        assert memory is not None, "slots are made before they are used"
        return memory

    def slot(self, rank: int, slot: int) -> torch.Tensor:
        """A slot of a rank, as bytes."""
        return self._of(rank)[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def address(self, rank: int, slot: int) -> int:
        """Address of a slot of a rank."""
        return self._of(rank).data_ptr() + slot * self.slot_bytes

    def signals(self, slot: int) -> torch.Tensor:
        """The own signals of a slot, ``int32[chunks]``; they follow all slots in memory."""
        at = self.slots * self.slot_bytes + 4 * self.chunks * slot
        return self._of(self._rank)[at : at + 4 * self.chunks].view(torch.int32)

    def signal(self, rank: int, slot: int, chunk: int) -> int:
        """Address of a signal of a rank."""
        return self._of(rank).data_ptr() + self.slots * self.slot_bytes + 4 * (self.chunks * slot + chunk)
