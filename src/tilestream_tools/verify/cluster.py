"""Model 14: the CTAs of a cluster that add up a tile's shares of K in each other's shared memory.

The text is `add_shares`, which is what `tilestream.kernels.portable.one_tile` does with ``C.CLUSTER`` CTAs, by
`tilestream.kernels.portable.cluster`. `tests/kernels/test_cluster_protocol.py` runs the kernel's own text, its
instructions included, and compares the operations.

A tile's rows are cut into as many pieces as the cluster has CTAs; CTA i owns piece i. Its room has a place for each
share of K. Shares may be past the end of K, and pieces past the end of the output: their CTAs do what all do.

*Memory order.* Each warp has a vector clock. `Arrive` with ``release`` adds it to the clocks of its round, and `Await`
with ``acquire`` takes those. Of two accesses to a place, one of them a write, the earlier must be in the clock of the
later. When a CTA ends, all accesses to its room by others must be in the clocks of its warps. So a write is not seen
by a read that no release and acquire order behind it, though it came before. A warp that has ended counts as arrived,
as on the device.

Properties: no warp is ever stuck. Nothing is done to the memory of a CTA that may not have begun, or may have ended. A
sum has each K step once, in K order, of the rows that it is stored to, and reads places after their writes. A place is
not written while it may be read for an earlier tile (``tiles``). Each piece inside the output is stored once.

Reductions, and why they hide no fault:

- *Begin* is delayed to the first arrival: beginning late shows all accesses to a CTA that has not begun.
- *Product*, *Write*, *Fetch* and *Store* are eager. Their faults depend on clocks, which only Arrive and Await move,
  and on which CTAs have begun or ended. Two accesses without an order between them are a fault whichever comes first.
  An access to a CTA that has not begun is one the sooner it comes. One that could come after the end of its CTA is
  missing from the clocks of that one, so its end is the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory, Model
from tilestream_tools.verify.processes import Process

Turn = Generator[Any, Any, Any]


class Begin(NamedTuple):
    """The warp begins: its CTA has memory."""


class Arrive(NamedTuple):
    """``barrier.cluster.arrive``, with ``.release`` or ``.relaxed``."""

    release: bool


class Await(NamedTuple):
    """``barrier.cluster.wait``, with ``.acquire`` or without: until all warps have arrived or ended."""

    acquire: bool


class Product(NamedTuple):
    """Multiply K steps of a tile: all rows, in registers."""

    tile: int
    begin: int
    end: int


class Write(NamedTuple):
    """Store a piece of the product into a place of a CTA's room."""

    owner: int
    place: int
    piece: int


class Accumulate(NamedTuple):
    """Add a piece of the product to what a place has (``red.shared::cluster.add``), which only a faulty text does."""

    owner: int
    place: int
    piece: int


class Fetch(NamedTuple):
    """Add what a place of a CTA's room has to the sum in registers."""

    owner: int
    place: int


class Store(NamedTuple):
    """Store the sum to a piece of the output; past the end of the output, nothing."""

    tile: int
    piece: int


class Exit(NamedTuple):
    """The warp ends. With its last warp a CTA's memory goes."""


@dataclass(frozen=True)
class Cluster:
    """A cluster and its tile.

    Attributes
    ----------
    size, warps
        CTAs, and warps of a CTA.
    steps
        K steps of a share, of which some may be past the end of K.
    k
        K steps of a tile; 0: all of the shares.
    pieces
        Pieces with rows inside the output; 0: all.
    """

    size: int = 2
    steps: int = 1
    k: int = 0
    pieces: int = 0
    warps: int = 1

    @property
    def k_steps(self) -> int:
        """K steps of a tile."""
        return self.k or self.size * self.steps

    @property
    def stored(self) -> int:
        """Pieces with rows inside the output."""
        return self.pieces or self.size

    @property
    def arrivals(self) -> int:
        """Warps that a round of the cluster's barrier waits for."""
        return self.size * self.warps


# The text -------------------------------------------------------------------------------------------------------------


def announce() -> Turn:
    """Say that this CTA runs."""
    yield Arrive(release=False)


def await_all() -> Turn:
    """Wait until all CTAs run."""
    yield Await(acquire=True)


def meet() -> Turn:
    """Wait until all CTAs are here, and see what they have written before."""
    yield Arrive(release=True)
    yield Await(acquire=True)


def add_shares(cluster: Cluster, cta: int, tile: int) -> Turn:
    """A CTA's share of a tile, and its piece of the sum."""
    yield from announce()
    begin = cta * cluster.steps
    yield Product(tile, begin, begin + cluster.steps)
    yield from await_all()
    for owner in range(cluster.size):
        yield Write(owner, cta, owner)
    yield from meet()
    for place in range(cluster.size):
        yield Fetch(cta, place)
    yield Store(tile, cta)


# The model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterCase:
    """One configuration of model 14: the cluster, the tiles that it does one after the other, and the text.

    The kernel's programs do one tile.
    """

    cluster: Cluster
    tiles: int = 1
    text: Callable[[Cluster, int, int], Turn] = add_shares

    def build(self, reduce: bool = True, symmetry: bool = True) -> ClusterModel:
        """The model of this configuration."""
        return ClusterModel(self, reduce)

    def __str__(self) -> str:
        own, shares = self.cluster, self.cluster.size * self.cluster.steps
        words = [f"a cluster of {own.size} CTAs of {own.warps} warps, {shares} K steps in shares"]
        words += [f"{own.k} of them inside K"] if own.k else []
        words += [f"{own.pieces} pieces inside the output"] if own.pieces else []
        words += [f"{self.tiles} tiles"] if self.tiles > 1 else []
        words += [self.text.__name__] if self.text is not add_shares else []
        return ", ".join(words)


def configurations(full: bool) -> Iterator[ClusterCase]:
    """Clusters of 2, 4 and 8; shares and pieces that end inside, or are past the end. Full: more of 8, more warps."""
    for cluster in (
        Cluster(2), Cluster(2, 2, 3), Cluster(2, 1, 1, 1), Cluster(2, warps=2), Cluster(2, 2, 2, 1, warps=2),
        Cluster(4), Cluster(4, 2, 5, 3), Cluster(4, 1, 1, 1), Cluster(8),
    ):  # fmt: skip
        yield ClusterCase(cluster)
    if full:
        for cluster in (
            Cluster(2, warps=4), Cluster(4, 2, 3, 2, warps=2), Cluster(8, 2, 13, 5), Cluster(8, 1, 1, 1)
        ):  # fmt: skip
            yield ClusterCase(cluster)


class Part(NamedTuple):
    """A piece of a product, as a place has it; and the warp that wrote it, in which period of its clock."""

    piece: int
    tile: int
    begin: int
    end: int
    warp: int = 0
    period: int = 0


class ClusterModel(Model):
    """See the module.

    Memory: bits of the warps that have arrived in this round, and of those that have ended; bits of the CTAs that have
    begun; the clocks released in this round; bits of what is stored. For each warp its clock, the clocks that its
    `Await` may take, its product and its sum. For each place, by the warp that has written there: its parts, and the
    reads since, as warp and period.
    """

    eager: ClassVar[frozenset[type]] = frozenset({Product, Write, Fetch, Store})
    delayed: frozenset[type] = frozenset({Begin})
    progress: ClassVar[frozenset[type]] = frozenset({Product})

    def __init__(self, case: ClusterCase, reduce: bool = True) -> None:
        self.case, own = case, case.cluster
        self.warps = own.size * own.warps
        names = [f"CTA {cta}" if own.warps == 1 else f"warp {w} of CTA {cta}" for cta, w in _each(own)]
        turns = [
            Process(name, lambda tile, cta=cta: self._turn(cta, tile), 0, ("CTA", cta))  # type: ignore[misc]
            for name, (cta, _) in zip(names, _each(own), strict=True)
        ]
        self.arrived, self.ended, self.begun, self.released, self.stored = range(self.warps, self.warps + 5)
        self.clock = self.stored + 1
        self.offered, self.product, self.sum = (self.clock + self.warps * i for i in (1, 2, 3))
        self.places = self.clock + 4 * self.warps
        super().__init__(turns, reduce)

    def _turn(self, cta: int, tile: int) -> Turn:
        if tile == 0:
            yield Begin()
        yield from self.case.text(self.case.cluster, cta, tile)
        if tile + 1 < self.case.tiles:
            return tile + 1
        yield Exit()
        return None

    def memory(self) -> Memory:
        """See `Model.memory`."""
        clocks = [tuple(int(i == j) for i in range(self.warps)) for j in range(self.warps)]
        nothing: list[Any] = [None] * (2 * self.warps)
        own = self.case.cluster
        rooms = [((), ())] * own.size**2 * own.warps
        return [0, 0, 0, (0,) * self.warps, 0, *clocks, *nothing, *[()] * self.warps, *rooms]

    # The cluster's barrier ------------------------------------------------------------------------------------------

    def _complete(self, m: Memory) -> None:
        """End the round if all have arrived or ended."""
        here = m[self.arrived]
        if not here or (here | m[self.ended]).bit_count() < self.case.cluster.arrivals:
            return
        for warp in range(self.warps):
            if here >> warp & 1:
                m[self.offered + warp] = m[self.released]
        m[self.arrived], m[self.released] = 0, (0,) * self.warps

    def _begin(self, pid: int, op: Begin, answer: int, m: Memory) -> None:
        m[self.begun] |= 1 << pid // self.case.cluster.warps

    def _arrive(self, pid: int, op: Arrive, answer: int, m: Memory) -> None:
        if m[self.arrived] >> pid & 1 or m[self.offered + pid] is not None:
            raise Fault("barrier broken", f"{self.processes[pid].name} arrives twice, and has not waited in between")
        if op.release:
            clock = m[self.clock + pid]
            m[self.released] = _joined(m[self.released], clock)
            m[self.clock + pid] = (*clock[:pid], clock[pid] + 1, *clock[pid + 1 :])
        m[self.arrived] |= 1 << pid
        self._complete(m)

    def _await(self, pid: int, op: Await, answer: int, m: Memory) -> None:
        offered = m[self.offered + pid]
        if offered is None:
            raise Fault("barrier broken", f"{self.processes[pid].name} waits, and has not arrived")
        if op.acquire:
            m[self.clock + pid] = _joined(m[self.clock + pid], offered)
        m[self.offered + pid] = None

    def _exit(self, pid: int, op: Exit, answer: int, m: Memory) -> None:
        each, own = self.case.cluster.warps, pid // self.case.cluster.warps
        m[self.ended] |= 1 << pid
        self._complete(m)
        if not self._has_ended(own, m):
            return
        known = m[self.clock + own * each]
        for warp in range(own * each + 1, (own + 1) * each):
            known = _joined(known, m[self.clock + warp])
        for at in range(self._place(own, 0), self._place(own + 1, 0)):
            parts, reads = m[at]
            for warp, period in (*((part.warp, part.period) for part in parts), *reads):
                if warp // each != own and known[warp] < period:
                    what = f"CTA {own} ends, and {self.processes[warp].name} may still write to its memory, or read it"
                    raise Fault("freed memory", what)

    # Rooms ----------------------------------------------------------------------------------------------------------

    def _place(self, owner: int, place: int) -> int:
        return self.places + (owner * self.case.cluster.size + place) * self.case.cluster.warps

    def _has_ended(self, cta: int, m: Memory) -> bool:
        every = (1 << self.case.cluster.warps) - 1
        return bool(m[self.ended] >> cta * self.case.cluster.warps & every == every)

    def _reach(self, pid: int, what: str, owner: int, m: Memory) -> None:
        """Raise `Fault` unless a CTA has memory."""
        if not m[self.begun] >> owner & 1:
            raise Fault("freed memory", f"{self.processes[pid].name} {what} CTA {owner}, which may not have begun")
        if self._has_ended(owner, m):
            raise Fault("freed memory", f"{self.processes[pid].name} {what} CTA {owner}, which has ended")

    def _part(self, pid: int, op: Write | Accumulate, m: Memory) -> Part:
        """What a warp sends."""
        self._reach(pid, "writes to", op.owner, m)
        if m[self.product + pid] is None:
            raise Fault("wrong data", f"{self.processes[pid].name} sends a piece before it has multiplied")
        tile, begin, end = m[self.product + pid]
        return Part(op.piece, tile, begin, end, pid, m[self.clock + pid][pid])

    def _multiply(self, pid: int, op: Product, answer: int, m: Memory) -> None:
        m[self.product + pid] = tuple(op)

    def _write(self, pid: int, op: Write, answer: int, m: Memory) -> None:
        part, clock = self._part(pid, op, m), m[self.clock + pid]
        at = self._place(op.owner, op.place) + pid % self.case.cluster.warps
        parts, reads = m[at]
        if any(clock[warp] < period for warp, period in (*((old.warp, old.period) for old in parts), *reads)):
            where = f"place {op.place} of CTA {op.owner}"
            what = f"{self.processes[pid].name} writes to {where}, and what it had may not be read, or written, yet"
            raise Fault("overwritten while read", what)
        m[at] = (part,), ()

    def _accumulate(self, pid: int, op: Accumulate, answer: int, m: Memory) -> None:
        part, at = self._part(pid, op, m), self._place(op.owner, op.place) + pid % self.case.cluster.warps
        m[at] = (*m[at][0], part), m[at][1]

    def _fetch(self, pid: int, op: Fetch, answer: int, m: Memory) -> None:
        self._reach(pid, "reads from", op.owner, m)
        clock, first = m[self.clock + pid], self._place(op.owner, op.place)
        for at in range(first, first + self.case.cluster.warps):
            parts, reads = m[at]
            if not parts or any(clock[part.warp] < part.period for part in parts):
                what = f"{self.processes[pid].name} reads place {op.place} of CTA {op.owner}"
                raise Fault("read before arrival", f"{what}, and may not see what is, or is to be, written there")
            m[at] = parts, tuple(sorted({*reads, (pid, clock[pid])}))
        found = {tuple(part[:4] for part in m[at][0]) for at in range(first, first + self.case.cluster.warps)}
        if len(found) > 1:
            what = f"{self.processes[pid].name} reads place {op.place} of CTA {op.owner}, whose warps sent"
            raise Fault("wrong data", f"{what} different products, or in different orders")
        m[self.sum + pid] += found.pop()

    def _store(self, pid: int, op: Store, answer: int, m: Memory) -> None:
        own, parts, name = self.case.cluster, m[self.sum + pid], self.processes[pid].name
        m[self.sum + pid] = ()
        if any((piece, tile) != (op.piece, op.tile) for piece, tile, *_ in parts):
            held = ", ".join(f"{piece} of tile {tile}" for piece, tile, *_ in parts)
            raise Fault("wrong data", f"{name} stores piece {op.piece} of tile {op.tile}; its sum has pieces {held}")
        steps = [k for *_, begin, end in parts for k in range(begin, min(end, own.k_steps))]
        if steps != list(range(own.k_steps)):
            kind = "double work" if len({*steps}) < len(steps) else "wrong data"
            kind = "other order" if sorted(steps) == list(range(own.k_steps)) else kind
            raise Fault(kind, f"{name} stores piece {op.piece}; its sum has the K steps {steps} of {own.k_steps}")
        bit = 1 << (op.tile * own.size + op.piece) * own.warps + pid % own.warps
        if op.piece < own.stored:
            if m[self.stored] & bit:
                raise Fault("double work", f"{name} stores piece {op.piece}, which is stored")
            m[self.stored] |= bit

    asked: ClassVar[dict[type, Callable[..., Sequence[Any]]]] = {
        Await: lambda self, pid, op, m: () if m[self.arrived] >> pid & 1 else (0,),
    }
    performed: ClassVar[dict[type, Callable[..., None]]] = {
        Begin: _begin, Arrive: _arrive, Await: _await, Exit: _exit, Product: _multiply, Write: _write,
        Accumulate: _accumulate, Fetch: _fetch, Store: _store,
    }  # fmt: skip

    def at_end(self, m: Memory) -> None:
        """See `Model.at_end`."""
        own = self.case.cluster
        for tile in range(self.case.tiles):
            for piece in range(own.stored):
                bits = m[self.stored] >> (tile * own.size + piece) * own.warps & (1 << own.warps) - 1
                if bits != (1 << own.warps) - 1:
                    raise Fault("missing work", f"piece {piece} of tile {tile} is not stored")


def _each(cluster: Cluster) -> list[tuple[int, int]]:
    """The warps, by CTA."""
    return [(cta, warp) for cta in range(cluster.size) for warp in range(cluster.warps)]


def _joined(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """A clock that knows what either knows."""
    return tuple(map(max, a, b))
