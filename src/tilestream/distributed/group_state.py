"""`GroupState`: this process's state of each process group: buffers, plans, call queues, whether it is broken.

States refer weakly to their groups, so that a state is freed with its group.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilestream.core.error_record import Told
from tilestream.core.errors import GroupBroken, kind_of
from tilestream.core.forks import free_in_child
from tilestream.distributed.host_flags import GroupFlags
from tilestream.distributed.plan import DistributedPlan
from tilestream.runtime.streams import is_capturing

Q = TypeVar("Q")
D = TypeVar("D")
#: The ops' ``group``: a group (None: the default group), or a mesh, which has two dimensions for several nodes.
Group = dist.ProcessGroup | DeviceMesh | None
#: Joins the names of a mesh's two groups.
_NODE_SEPARATOR = " in each of "
#: The most calls whose decisions a group keeps.
_MOST_DECIDED = 1024
#: The most views of its buffers that a group keeps.
_MOST_VIEWS = 64
#: The largest group that the ops take. Larger groups exceed one NVLink domain, or one host.
MOST_RANKS = 8


class GroupState:
    """The state of one group in this process.

    Attributes
    ----------
    name
        The group's name.
    rank, world
        This process's rank, and the number of ranks.
    lock
        Held during a call: the calls of a group are serialised, like collectives.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.name = group.group_name
        self.rank, self.world = group.rank(), group.size()
        self.lock = threading.Lock()
        #: The reason why the ranks' GPUs cannot reach each other; empty if they can, or before they are connected.
        self.unreachable = ""
        self.connected = False
        #: Flags that the ranks share, once they are connected.
        self.host_flags: GroupFlags | None = None
        #: The group's call queue of each op on the GPU, by its class.
        self.queues: dict[object, Any] = {}
        #: Handshakes that are known to be equal on all ranks.
        self.agreed: set[bytes] = set()
        #: Those of eager calls that the device has counted: a capture finds all that it needs.
        self.prepared: set[bytes] = set()
        #: What has been raised of the group's failure.
        self.told = Told()
        #: Plans made so far, by all values that they depend on.
        self.plans: dict[object, DistributedPlan] = {}
        self._decided: dict[object, Any] = {}
        #: By the key of plain calls: see `tilestream.distributed.repeats`.
        self.repeats: dict[object, Any] = {}
        #: Calls that were repeated.
        self.repeated = 0
        self._backends: dict[str, str] = {}
        self._options: dict[str, Any] = {}
        self._broken: str | None = None
        #: 1 once the group is broken, for native code.
        self.broken_word = ctypes.c_int64(0)
        self._buffers: dict[str, torch.Tensor] = {}
        #: By what a caller asks for: the buffer, and the view of it.
        self._views: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; raises if it has been destroyed."""
        found = self._group()
        if found is None:
            raise RuntimeError(f"process group {self.name!r} has been destroyed")
        return found

    def capture(self, x: torch.Tensor) -> int:
        """0 outside of a capture of a CUDA graph; else a number that changes with the calls that a capture may hold."""
        return 1 + len(self.agreed) + len(self.prepared) if x.is_cuda and is_capturing(x.device) else 0

    def decided(self, key: object) -> Any:
        """The decision of an earlier equal call; None without one. See `tilestream.distributed.request.Request.key`."""
        return self._decided.get(key)

    def decide(self, key: object, decision: D) -> D:
        """Keep the decision of a call for equal calls; returns it."""
        if len(self._decided) >= _MOST_DECIDED:
            self._decided.clear()
        self._decided[key] = decision
        return decision

    def unprepare(self) -> None:
        """Have the next eager call of each kind make again what a capture needs."""
        self.prepared.clear()
        self.repeats.clear()  # a repeated call prepares nothing, and peers that repeat none make a first call
        # Plans of captures are kept by a number that would come again.
        self.plans.clear()
        self._decided.clear()

    def queue(self, kind: Callable[[GroupState, torch.device], Q], device: torch.device) -> Q:
        """The group's call queue of this class, made at the first call."""
        found: Q | None = self.queues.get(kind)
        if found is None:
            found = self.queues[kind] = kind(self, device)
        return found

    def backend(self, device: str) -> str:
        """The backend for tensors on ``device``: ``"gloo"``, ``"nccl"``; empty if there is none."""
        found = self._backends.get(device)
        if found is None:
            try:
                found = self._backends[device] = str(self.group._get_backend(torch.device(device)).name())
            except RuntimeError:
                return ""
        return found

    def timeout(self, device: str) -> float:
        """Seconds after which the group's own collectives on ``device`` give up: the default deadline."""
        options = self._options.get(device)
        if options is None:  # the backend's own object: it has the present timeout
            options = getattr(self.group._get_backend(torch.device(device)), "options", None)
            self._options[device] = options
        timeout = getattr(options, "_timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else math.inf
        # Every wait is bounded (invariant 5), also in a group with an infinite timeout.
        return seconds if 0 < seconds < 1e6 else dist.default_pg_timeout.total_seconds()

    def check(self) -> None:
        """Raise `GroupBroken` if the group is broken.

        Each call raises a new exception, because a raised exception keeps the frames that it passed through alive.
        """
        if self._broken is not None:
            raise GroupBroken(self.name, self._broken)

    @property
    def broken(self) -> bool:
        """Whether the group is broken."""
        return self._broken is not None

    def break_(self, reason: str) -> GroupBroken:
        """Make every later call with this group raise; the first reason is kept. Returns the exception to raise."""
        if self._broken is None:
            self._broken = reason
            self.broken_word.value = 1
        # Calls in flight may still write to the buffers, so these are not reused (invariant 6).
        self._buffers.clear()
        self._views.clear()
        return GroupBroken(self.name, self._broken)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A named buffer, kept between calls, that grows with the largest problem. Hold `lock`."""
        found, key = self._buffers.get(name), (name, shape, dtype, device)
        seen = self._views.get(key)
        if found is not None and seen is not None and seen[0] is found:
            return seen[1]
        size = math.prod(shape) * dtype.itemsize
        if found is None or found.numel() < size or found.device != device:
            with torch.inference_mode(False):
                found = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
            self._buffers[name] = found
            self._views.clear()
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
            view = found[:size].view(dtype).view(shape)
        self._views[key] = found, view
        return view

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Serialise a call with this group; raise if the group is broken."""
        with self.lock:
            self.check()
            yield


_lock = free_in_child(threading.Lock())
_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()


def state_of(op: str, group: dist.ProcessGroup | None, most: int = MOST_RANKS) -> GroupState:
    """The state of ``group`` (None: the default group) in this process; ``most``: the op's limit of ranks.

    Raises
    ------
    ValueError
        If there is no process group, this process is not in the group, or the group has too many ranks.
    TypeError
        If ``group`` is not a process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{op}: group={group}; there is no process group: call torch.distributed.init_process_group")
    found: object = dist.group.WORLD if group is None else group
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{op}: group: this process is not in it; call it on the group's own ranks")
    if not isinstance(found, dist.ProcessGroup):
        raise TypeError(f"{op}: group is {kind_of(found)}; it must be a torch.distributed.ProcessGroup or None")
    if found.size() > most:
        raise ValueError(
            f"{op}: group: {found.size()} ranks; 1 to {most} overlap: use torch.distributed's own collective and "
            "tilestream.matmul there"
        )
    with _lock:
        state = _states.get(found)
        if state is None:
            state = _states[found] = GroupState(found)
    return state


def known_state(group: Group) -> GroupState | None:
    """The state of a group that `state_of` has seen; None for other groups, and for several nodes."""
    if group is None:
        world = dist.group.WORLD
        return None if world is None else _states.get(world)
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    return _states.get(group) if isinstance(group, dist.ProcessGroup) and dist.is_initialized() else None


def states_of(op: str, name: str, most: int = MOST_RANKS) -> list[GroupState]:
    """The states of the groups in a name that `name_of` made: one group, or the internode and the intranode group."""
    return [state_of(op, resolve(part), most) for part in name.split(_NODE_SEPARATOR)]


def resolve(name: str) -> dist.ProcessGroup:
    """The group of that name."""
    found: dist.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return found


def group_of(name: str) -> dist.ProcessGroup | None:
    """The group in a name that `name_of` made; None for several nodes."""
    return None if _NODE_SEPARATOR in name else resolve(name)


def name_of(op: str, group: Group, most: int = MOST_RANKS) -> str:
    """The name of ``group`` for a registered op; a mesh of two dimensions gives the names of both its groups.

    The group is checked here, except while torch's compiler traces.
    """
    names = []
    for x in groups_of(op, group):
        if torch.compiler.is_compiling():
            found = dist.group.WORLD if x is None else x
            assert found is not None, "torch.distributed is not initialised"
            names.append(str(found.group_name))
        else:
            names.append(state_of(op, x, most).name)
    return _NODE_SEPARATOR.join(names)


def groups_of(op: str, group: Group) -> tuple[dist.ProcessGroup | None, ...]:
    """The group; for several nodes two groups: this rank's internode group, and the group of its node.

    Raises
    ------
    ValueError
        If a mesh has more than two dimensions.
    """
    if not isinstance(group, DeviceMesh):
        return (group,)
    if group.ndim > 2:
        raise ValueError(
            f"{op}: group: a mesh of {group.ndim} dimensions; it has one, or two for nodes and the ranks of each: give "
            "a part of it, mesh['node', 'tp']"
        )
    several = [dim for dim in range(group.ndim) if group.size(dim) > 1]
    return tuple(group.get_group(dim) for dim in several or [group.ndim - 1])


def place_of(op: str, group: Group) -> tuple[int, int]:
    """The rank of this process among all ranks of ``group``, and their number."""
    rank, world = 0, 1
    for x in groups_of(op, group):
        state = state_of(op, x)
        rank, world = rank * state.world + state.rank, world * state.world
    return rank, world


def world_of(name: str) -> int:
    """The number of ranks in a name that `name_of` made, over all nodes."""
    return math.prod(resolve(part).size() for part in name.split(_NODE_SEPARATOR))
