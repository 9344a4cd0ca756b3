"""`Member`: what this process keeps of a process group that it has called an op with.

Nothing here keeps a group alive: members are found by their group, weakly, and go with it. A member holds its buffers,
the number of its calls, and whether the group is broken.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilestream.core.errors import GroupBroken

if TYPE_CHECKING:
    from tilestream.distributed.copy_engines import Gatherer
    from tilestream.distributed.gpu_reduce_scatter import Scatterer
    from tilestream.distributed.host_flags import GroupWords
    from tilestream.distributed.one_shot import Reducer
    from tilestream.distributed.plan import DistributedPlan

#: What ops take: a group (None: the default one), or a mesh, of two dimensions where ranks are on several nodes.
Group = dist.ProcessGroup | DeviceMesh | None
#: Between the names of a mesh's groups.
_BETWEEN = " in each of "
#: Worlds that the ops are for: more ranks than this are not in one NVLink domain, or on one host.
MOST_RANKS = 8


class Member:
    """A rank of a group: this process.

    Attributes
    ----------
    name
        The group's name.
    rank, world
        Of this process in the group, and the group's size.
    lock
        Held for the length of a call: a group's calls come one after the other, as collectives do.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.name = group.group_name
        self.rank, self.world = group.rank(), group.size()
        self.lock = threading.Lock()
        #: Why its GPUs cannot reach each other; empty where they can, or nobody has asked yet.
        self.unreachable = ""
        self.reached = False
        #: Words that its ranks share, once they have met.
        self.words: GroupWords | None = None
        #: Its calls on a GPU: a `tilestream.distributed.copy_engines.Gatherer`, once there was one.
        self.gatherer: Gatherer | None = None
        #: As `gatherer`, a `tilestream.distributed.gpu_reduce_scatter.Scatterer`.
        self.scatterer: Scatterer | None = None
        #: As `gatherer`, a `tilestream.distributed.one_shot.Reducer`.
        self.reducer: Reducer | None = None
        #: Greetings of calls that all ranks are known to make alike.
        self.agreed: set[bytes] = set()
        #: Plans made so far, by all that they depend on.
        self.plans: dict[object, DistributedPlan] = {}
        self._broken: str | None = None
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, while it lives."""
        found = self._group()
        if found is None:
            raise RuntimeError(f"process group {self.name!r} has been destroyed")
        return found

    def backend(self, device: str) -> str:
        """What carries tensors on ``device``: ``"gloo"``, ``"nccl"``; empty where nothing does."""
        try:
            return str(self.group._get_backend(torch.device(device)).name())
        except RuntimeError:
            return ""

    def timeout(self, device: str) -> float:
        """Seconds after which the group's own collectives on ``device`` give up: the default deadline."""
        options = getattr(self.group._get_backend(torch.device(device)), "options", None)
        timeout = getattr(options, "_timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else math.inf
        # A wait has a bound (invariant 5), also in a group that was told to wait for ever.
        return seconds if 0 < seconds < 1e6 else dist.default_pg_timeout.total_seconds()

    def check(self) -> None:
        """Raise if the group is broken.

        Raises
        ------
        GroupBroken
            Always a new one: an exception that was raised holds the frames it went through.
        """
        if self._broken is not None:
            raise GroupBroken(self.name, self._broken)

    @property
    def broken(self) -> bool:
        """Whether the group is broken."""
        return self._broken is not None

    def break_(self, reason: str) -> GroupBroken:
        """From now on every call with this group raises; the first reason is kept. Returns what to raise."""
        if self._broken is None:
            self._broken = reason
        # What is under way may still write to them: they are not used again (invariant 6), and freed with the last use.
        self._buffers.clear()
        return GroupBroken(self.name, self._broken)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that is kept from call to call, and grows when a larger problem comes. Hold `lock`."""
        size = math.prod(shape) * dtype.itemsize
        found = self._buffers.get(name)
        if found is None or found.numel() < size or found.device != device:
            with torch.inference_mode(False):
                found = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
            self._buffers[name] = found
        return found[:size].view(dtype).view(shape)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call with this group: one at a time, and none once it is broken."""
        with self.lock:
            self.check()
            yield


_lock = threading.Lock()
_members: weakref.WeakKeyDictionary[dist.ProcessGroup, Member] = weakref.WeakKeyDictionary()


def member_of(op: str, group: dist.ProcessGroup | None) -> Member:
    """The member that this process is of ``group`` (None: the default group).

    Raises
    ------
    ValueError
        If there is no such group, this process is not in it, or it has too many ranks.
    TypeError
        If it is no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{op}: group={group}; there is no process group: call torch.distributed.init_process_group")
    found: object = dist.group.WORLD if group is None else group
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{op}: group: this process is not in it; call it on the group's own ranks")
    if not isinstance(found, dist.ProcessGroup):
        raise TypeError(f"{op}: group is a {type(found).__name__}; it is a torch.distributed.ProcessGroup or None")
    with _lock:
        member = _members.get(found)
        if member is None:
            if found.size() > MOST_RANKS:
                raise ValueError(
                    f"{op}: group: {found.size()} ranks; 1 to {MOST_RANKS} overlap: use torch.distributed's own "
                    "collective and tilestream.matmul there"
                )
            member = _members[found] = Member(found)
    return member


def member_by_name(op: str, name: str) -> Member:
    """As `member_of`, by the group's name, as registered ops have it."""
    return member_of(op, resolve(name))


def resolve(name: str) -> dist.ProcessGroup:
    """The group of that name."""
    found: dist.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return found


def name_of(op: str, group: Group) -> str:
    """The name of ``group`` (None: of the default group), checked; while a compiler looks on, as it is.

    Of a mesh of two dimensions both: of the group between nodes, and of that inside the node.
    """
    return _BETWEEN.join(_name(op, x) for x in groups_of(op, group))


def _name(op: str, group: dist.ProcessGroup | None) -> str:
    if not torch.compiler.is_compiling():
        return member_of(op, group).name
    found = dist.group.WORLD if group is None else group
    assert found is not None, "torch.distributed is not initialised"
    return str(found.group_name)


def groups_of(op: str, group: Group) -> tuple[dist.ProcessGroup | None, ...]:
    """One group; or of several nodes two: that of this rank's like in all nodes, and that of this node.

    Raises
    ------
    ValueError
        If a mesh has more dimensions than two.
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
    """Of this process the rank among all of ``group``, and how many they are."""
    rank, world = 0, 1
    for x in groups_of(op, group):
        member = member_of(op, x)
        rank, world = rank * member.world + member.rank, world * member.world
    return rank, world


def member_names(name: str) -> tuple[str, ...]:
    """What `name_of` has made one name of."""
    return tuple(name.split(_BETWEEN))


def world_of(name: str) -> int:
    """Ranks of a group, or of all nodes together."""
    return math.prod(resolve(x).size() for x in member_names(name))
