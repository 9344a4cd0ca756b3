"""A way to run a matmul: what policies make and compare, and what a caller can ask of a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.core.order import TileOrder
from tilestream.core.schedule import Kind, Schedule

#: A variant, see `Candidate.variant`.
ONE_TILE = "one_tile"


class Forced(NamedTuple):
    """What the caller forces of a kernel, as arguments of `tilestream.plan`; None: the plan's choice."""

    tile: tuple[int, int] | None = None
    order: TileOrder | None = None
    queues: int | None = None
    shares: int | None = None
    variant: str | None = None
    stages: int | None = None
    registers: tuple[int, int] | None = None


#: Nothing is forced.
FREE = Forced()


class Asked(NamedTuple):
    """What the caller asks of a plan beside its problem, as arguments of `tilestream.plan`; None: the plan's choice."""

    workers: int | None = None
    schedule: str = "auto"
    tile: tuple[int, int] | None = None
    #: An order of tiles, or the name of one: see `tilestream.plan.arrival_order.OrderName`.
    order: TileOrder | str | None = None
    queues: int | None = None
    shares: int | None = None
    default_workers: int | None = None  # the device's own number of workers, where it differs from its properties'
    device: DeviceProperties | None = None  # None: this machine's CPU
    backend: str | None = None
    variant: str | None = None
    stages: int | None = None
    registers: tuple[int, int] | None = None
    limit: int = 0  # on the workers, 0 for none: see `tilestream.plan.limit`
    consult: bool = True  # whether measurements count: see `tilestream.plan.tuned`

    @property
    def named_order(self) -> str | None:
        """The order's name, where it is given by name."""
        return self.order if isinstance(self.order, str) else None

    @property
    def forced(self) -> Forced:
        """What policies know of it."""
        order = None if isinstance(self.order, str) else self.order
        return Forced(self.tile, order, self.queues, self.shares, self.variant, self.stages, self.registers)


@dataclass(frozen=True)
class Refusal:
    """An alternative that was considered and not taken, and why."""

    what: str
    why: str


def require(why_not: str) -> None:
    """Raise `NotImplementedError` with the reason why a kernel does not do a problem, unless that is empty."""
    if why_not:
        raise NotImplementedError(why_not)


def ctas_of(variant: str) -> int:
    """CTAs of a worker of this variant, each of which has an SM and as large a part of a tile's rows."""
    return 2 if variant == "paired" else 1


@dataclass(frozen=True)
class Candidate:
    """A way to run a problem, and what the device's cost model expects of it."""

    #: ``workers``: persistent workers, one intra-op thread each. ``inline``: one tile, in the calling thread with
    #: torch's own threads, where starting workers would cost more than it gains. ``persistent``: on a GPU, resident
    #: programs, one a worker; ``one_tile``: programs that have a tile each, see `tilestream.kernels.portable.one_tile`.
    #: Hopper: ``cooperative``, ``triple``, ``ping_pong``, ``single`` and ``paired``, see
    #: `tilestream.kernels.hopper.gemm`. CDNA: ``direct`` and ``staged``, see `tilestream.kernels.cdna.ring`.
    variant: str
    #: ``(block_m, block_n, block_k)``: a tile's rows and columns, and the length of a K step.
    block: tuple[int, int, int]
    schedule: Schedule
    predicted: float  # seconds that the cost model expects, with everything arrived
    #: warps, stages: GPUs: warps of a worker (Hopper: of a math loop), stages of its ring.
    warps: int = 0
    stages: int = 0
    swap_ab: bool = False  # Hopper: whether the tensor cores' rows are B's columns, and their columns A's rows
    strip: int = 0  # Hopper: columns of the accumulator that go through a C buffer at a time
    buffers: int = 0  # Hopper: C buffers of a math loop
    registers: tuple[int, int] = (0, 0)  # Hopper: of a thread of the load warp, and of the math warps
    #: Hopper: the operands that are copied first: ``"a"``, ``"b"``, ``"ab"`` or none. See `tilestream.plan.realign`.
    realigned: str = ""

    @functools.cached_property
    def kind(self) -> Kind:
        """Its schedule's."""
        return self.schedule.kind

    @functools.cached_property
    def tiles(self) -> int:
        """The number of tiles of its schedule."""
        return self.schedule.grid.tiles

    @functools.cached_property
    def workers(self) -> int:
        """The number of workers of its schedule."""
        return self.schedule.workers

    def with_schedule(self, schedule: Schedule) -> Candidate:
        """The same candidate with another schedule."""
        known = {field.name: getattr(self, field.name) for field in fields(Candidate)}
        return Candidate(**known | {"schedule": schedule})

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.block[:2]

    @property
    def ctas(self) -> int:
        """CTAs of a worker."""
        return ctas_of(self.variant)


class Deferred(Candidate):
    """A candidate whose schedule is made when it is first asked for, as of few of a hundred.

    Parameters
    ----------
    alike
        The fields of `Candidate` that follow from the tile.
    kind, tiles, workers
        Those of the schedule.
    make
        Makes the schedule.
    """

    def __init__(
        self, alike: Mapping[str, object], kind: Kind, predicted: float, tiles: int, workers: int, realigned: str,
        make: Callable[[], Schedule],
    ) -> None:  # fmt: skip
        found = vars(self)  # of a frozen class
        found.update(alike)
        found["kind"], found["predicted"], found["realigned"] = kind, predicted, realigned
        found["tiles"], found["workers"], found["_make"] = tiles, workers, make

    @functools.cached_property
    def schedule(self) -> Schedule:
        """As `Candidate` has it."""
        made: Schedule = vars(self)["_make"]()
        return made
