"""The bugs that the checker must find: read from the tables, explored in configurations that grow.

A row of a table edits a protocol that the checker explores (`tilestream.core.loop`, `tilestream.core.protocols`, the
loops in `tilestream_tools.verify`) and names the kind of violation it must be found as. The family in its section's
title says which functions are replaced, and in which configurations they are explored. The violation found is at the
smallest size that shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from dataclasses import replace as with_fields
from functools import cache, cached_property, partial
from itertools import product
from typing import Any, NamedTuple

from mutants import table
from mutants.engine import Edit, mutated
from tilestream.core.chunks import Chunks
from tilestream.core.loop import Count, Poll, Reduce
from tilestream.core.protocols.replay import Taken
from tilestream_tools.verify import copies, publish
from tilestream_tools.verify import operations as ops
from tilestream_tools.verify.arrival_order import ordered
from tilestream_tools.verify.attention import AttentionCase
from tilestream_tools.verify.attention_protocol import AttentionRing
from tilestream_tools.verify.cluster import Cluster, ClusterCase
from tilestream_tools.verify.dispatch import DispatchCase
from tilestream_tools.verify.experts import ExpertsCase
from tilestream_tools.verify.faults import KINDS
from tilestream_tools.verify.gather import GatherCase
from tilestream_tools.verify.gpu_loop import Add, Poison
from tilestream_tools.verify.one_shot import OneShotCase
from tilestream_tools.verify.pair import PairCase
from tilestream_tools.verify.product import ProductCase
from tilestream_tools.verify.protocol import Ring
from tilestream_tools.verify.replay import ReplayCase
from tilestream_tools.verify.report import Result, explore
from tilestream_tools.verify.ring import RingCase
from tilestream_tools.verify.shared_attention import OPERANDS
from tilestream_tools.verify.shared_ring import SharedCase, SharedRing
from tilestream_tools.verify.sources import SourcesCase
from tilestream_tools.verify.sums import SumCase
from tilestream_tools.verify.sweep import LAYOUTS, UNREAD, Case, matmul

CORE, VERIFY = "tilestream.core", "tilestream_tools.verify"
MODULES = {
    **{name: f"{CORE}.{name}" for name in ("gate", "loop", "schedule", "sources")},
    **{name: f"{CORE}.protocols.{name}" for name in ("dispatch", "experts", "gather", "one_shot", "replay")},
    "reduce_scatter": f"{CORE}.protocols.reduce_scatter",
    **{name: f"{VERIFY}.{name}" for name in ("attention_protocol", "copies", "gpu_loop", "product", "protocol")},
    **{name: f"{VERIFY}.{name}" for name in ("cluster", "pair", "shared_attention", "shared_ring")},
    "sources_model": f"{VERIFY}.sources",
}


@dataclass(frozen=True)
class Bug:
    """A mutant of a protocol, and where the checker finds it.

    Attributes
    ----------
    kind
        The kind of violation it must be found as: a key of `tilestream_tools.verify.faults.KINDS`.
    model
        The model that finds it.
    says
        What is wrong.
    edits
        What is edited. None: the configurations themselves are wrong.
    entries
        The functions, ``"module:name"``, that ``make`` is given in their edited form.
    make
        Those functions to configurations, in growing order.
    uses
        What the edited text names beside what its module has.
    """

    name: str
    kind: str
    model: str
    says: str
    edits: tuple[Edit, ...]
    entries: tuple[str, ...]
    make: Callable[..., Iterable[Case]]
    uses: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Bug: kind={self.kind!r}; it must be one of {', '.join(KINDS)}")

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Configurations with the bug."""
        return tuple(self.make(*(mutated(entry, self.edits, self.uses, self.name) for entry in self.entries)))

    def find(self) -> Result:
        """Explore growing sizes until the bug shows; the last result, with no violation, if it never does."""
        states, seconds = 0, 0.0
        for case in self.cases:
            result = explore(self.model, case)
            states, seconds = states + result.states, seconds + result.seconds
            if result.violation is not None:
                break
        return with_fields(result, states=states, seconds=seconds)


TABLES = (
    "workers.txt", "rings.txt", "warps.txt", "attention.txt", "copies.txt", "ranks.txt", "replays.txt",
    "dispatches.txt", "experts.txt", "sources.txt", "clusters.txt", "pairs.txt",
)  # fmt: skip


@cache
def seeded_bugs() -> tuple[Bug, ...]:
    """All of them."""
    return tuple(_bug(row) for file in TABLES for row in table.read(file, MODULES))


class Family(NamedTuple):
    """Bugs of one model: the functions replaced, and the configurations as a function of their edited forms."""

    model: str
    entries: tuple[str, ...]
    make: Callable[..., Iterable[Case]]
    uses: tuple[Any, ...] = ()
    prefix: str = ""


def _bug(row: table.Row) -> Bug:
    kind, _, role = row.section.partition(": ")
    family = FAMILIES[kind](role)
    make = partial(family.make, **row.options)
    return Bug(
        family.prefix + row.name, row.found, family.model, row.says, row.edits, family.entries, make, family.uses
    )


# Model 1: workers -----------------------------------------------------------------------------------------------------

OPERATIONS = (
    ops.AwaitCount, ops.AwaitTile, ops.PollAbort, ops.ReduceNumbers, ops.SetCounter, ops.WaitAlone, ops.WaitForever,
    Add, Chunks, Poison,
)  # fmt: skip


def _work(entry: str, role: str) -> Family:
    makes = {"arriving": _arriving, "not arriving": _not_arriving, "parts": _parts, "static": _static}
    makes |= {"reset": _reset, "queues of chunks": _queues, "drained": _drained, "one order": _one_order}
    home = f"{VERIFY}.gpu_loop" if entry == "work_through" else f"{CORE}.loop"
    return Family("workers", (f"{home}:{entry}",), makes[role], OPERATIONS)


def gated(
    make: Callable[..., Case], sizes: Any = ((1, 1), (1, 2), (2, 2), (1, 3), (2, 3)), unread: bool = False
) -> Any:
    """Rows that arrive: every layout and pivot; ``unread``: chunks without rows, too."""
    return [
        make("dynamic", workers, num_m, bounds=bounds, pivot=pivot)
        for workers, num_m in sizes
        for bounds in (*LAYOUTS[num_m], *(UNREAD[num_m] if unread else ()))
        for pivot in range(len(bounds) - 1)
    ]


def through(program: Any, **more: Any) -> Any:
    """A program with some of its arguments given."""
    made = partial(program, **more)
    made.__name__ = program.__name__  # type: ignore[attr-defined]
    return made


def _arriving(program: Any) -> Any:
    return gated(partial(matmul, program=program))


def _not_arriving(program: Any, **more: Any) -> Any:
    sizes = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), (2, 3, 2), (3, 3, 2))
    return [matmul("dynamic", workers, tiles, queues=q, program=program, **more) for workers, tiles, q in sizes]


def _reset(program: Any) -> Any:
    return _not_arriving(through(program, reset=True), drain="reset")


def _parts(program: Any) -> Any:
    sizes = ((2, 1, ()), (2, 2, (0,)), (2, 2, ()), (3, 3, (0, 1)), (3, 3, ()))
    return [matmul("stream_k", w, 1, k=k, running=running, program=program) for w, k, running in sizes]


def _static(program: Any) -> Any:
    return [matmul("static", n, tiles, program=program) for n, tiles in ((1, 1), (1, 2), (2, 2), (3, 3))]


def _one_order(program: Any) -> Any:
    """Tiles that no schedule, number of workers or rows, nor arrival may cut."""
    sizes = (("static", 1, 1), ("dynamic", 1, 2), ("dynamic", 2, 2), ("static", 2, 3))
    whole = [matmul(kind, workers, num_m, k=2, program=program) for kind, workers, num_m in sizes]
    return [*whole, *(matmul("dynamic", 1, 2, k=2, bounds=bounds, program=program) for bounds in ((0, 4), (0, 2, 4)))]


def _queues(program: Any) -> Any:
    sizes = ((1, 1, (0, 2)), (1, 2, (0, 2, 4)), (1, 2, (0, 1, 4)), (2, 2, (0, 2, 4)), (2, 3, (0, 2, 4, 6)))
    return [ordered(workers, num_m, bounds=bounds, program=program) for workers, num_m, bounds in sizes]


def _drained(text: Any, parts: bool = False, unread: bool = True, quarantined: bool = False) -> Any:
    program = through(text, reset=True)
    if parts:
        sizes = ((2, 1, 2, (0, 2)), (2, 1, 2, (0, 1, 2)), (2, 3, 2, (0, 2, 4, 6)), (3, 1, 3, (0, 1, 2)))
        return [
            matmul("stream_k", workers, num_m, k=k, bounds=bounds, drain="reset", program=program)
            for workers, num_m, k, bounds in sizes
        ]
    case = partial(matmul, drain="reset", program=program, quarantined=quarantined)
    return gated(case, ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (2, 3)), unread)


def _gate(_: str) -> Family:
    def make(gate: Any) -> Any:
        for case in gated(matmul):
            own = case.gate
            yield with_fields(case, gate=gate(*(getattr(own, field.name) for field in fields(own))))

    return Family("workers", (f"{CORE}.gate:Gate",), make, OPERATIONS)


def _fixup(_: str) -> Family:
    def make(text: Any, fixup: Any) -> Any:
        program = through(text, finish=fixup)
        sizes = ((2, 1, 2, 0), (3, 1, 3, 0), (2, 3, 2, 0), (3, 2, 3, 0), (4, 3, 2, 2))
        return [
            matmul("stream_k", workers, num_m, k=k, shares=shares, drain="poison", program=program, fixup=True)
            for workers, num_m, k, shares in sizes
        ]

    return Family("workers", (f"{VERIFY}.gpu_loop:work_through", f"{VERIFY}.gpu_loop:fixup"), make, (Count, Reduce))


# Models 2 to 5: rings -------------------------------------------------------------------------------------------------

#: From the roles of a ring's texts to their functions.
TEXTS = {"load": "load_turn", "math": "math_turn", "source": "gated", "finish": "epilogue"}
CONSUMERS = ("single", "cooperative", "ping_pong")


def _ring_family(make: Callable[..., Any], role: str) -> Family:
    """``role``: a text, or the class `Ring`; none where the configurations themselves are wrong."""

    def given(text: Any = None, **options: Any) -> Any:
        return make(Ring, {role: text}, **options) if role in TEXTS else make(text or Ring, {}, **options)

    return Family("ring", (f"{VERIFY}.protocol:{TEXTS.get(role, role)}",) if role else (), given)


def _ring(
    ring: Any, programs: Any, consumers: Any = CONSUMERS, depths: Any = (1, 2, 3), promoted: bool = False,
    counts: Any = ((1,), (1, 2), (2, 3)), **more: Any,
) -> Any:  # fmt: skip
    return [
        RingCase(ring(depth, items, who, promoted=depth == 1 or promoted), ks, **programs, **more)
        for depth, items, who, ks in product(depths, (1, 2), consumers, counts)
    ]


def _buffers(
    ring: Any, programs: Any, strips: Any = (1, 2), consumers: Any = CONSUMERS, split: bool = False
) -> Any:  # fmt: skip
    return [
        RingCase(ring(depth, 2, who, strips=count), (1,), split=split, **programs)
        for depth, who, count in product((2, 3), consumers, strips)
    ]


def _product(_: str) -> Family:
    def make(handing: Any) -> Any:
        sizes = gated(partial(matmul, k=2, drain="reset"), ((1, 1), (1, 2), (2, 2)))
        return [ProductCase(case, Ring(2, 2), handing) for case in sizes]

    return Family("product", (f"{VERIFY}.product:handed_on",), make, prefix="product: ")


def _shared(entry: str) -> Family:
    def make(text: Any, depth: int = 3, exact: bool = True) -> Any:
        sizes = (((1, False),), ((4, False),), ((2, False), (1, False)), ((4, True),), ((2, True), (1, False)))
        return [SharedCase(SharedRing(depth, 2), items, text, exact) for items in sizes]

    return Family("shared", (f"{VERIFY}.shared_ring:{entry}",), make)


def _shared_attention(entry: str) -> Family:
    def make(text: Any, depth: int = 3, exact: bool = True) -> Any:
        ring, blocks = SharedRing(depth, 2, operands=OPERANDS), ((1,), (4,), (1, 1))
        return [SharedCase(ring, tuple((n, False) for n in items), text, exact) for items in blocks]

    return Family("shared", (f"{VERIFY}.shared_attention:{entry}",), make, prefix="keys and values: ")


ONE, TWO = AttentionRing(1, consumers=1), AttentionRing(1)
ATTENTION_SIZES = {
    "": ((ONE, (1,)), (ONE, (0, 1)), (ONE, (2,)), (TWO, (2,))),
    "arriving": tuple((AttentionRing(1, consumers=1, arriving=True), counts) for counts in ((1,), (2,))),
    "deep": tuple((AttentionRing(2, consumers=n), counts) for n, counts in ((1, (1,)), (1, (2,)), (2, (1,)))),
    "converting": tuple((AttentionRing(depth, consumers=1, converting=True), (2,)) for depth in (1, 2)),
    "ordered": tuple((AttentionRing(2, consumers=n, ordered=True), ks) for n, ks in product((1, 2), ((2,), (3,)))),
    "own": tuple((AttentionRing(depth, own="both"), (2,)) for depth in (1, 2)),
    "own, ordered": tuple((AttentionRing(depth, ordered=True, own="both"), (2,)) for depth in (1, 2)),
}


def _attention(role: str) -> Family:
    def make(text: Any, sizes: str = "converting" if role == "convert" else "") -> Any:
        return [AttentionCase(ring, counts, **{role: text}) for ring, counts in ATTENTION_SIZES[sizes]]

    return Family("attention", (f"{VERIFY}.attention_protocol:{role}_turn",), make, prefix="attention: ")


# Models 6 and 8: published chunks, copied pieces ----------------------------------------------------------------------


def _publish(_: str) -> Family:
    def make(text: Any) -> Any:
        sizes = ((1, 1, 1, 1), (1, 1, 1, 2), (2, 1, 2, 1), (2, 2, 1, 1), (2, 1, 2, 2), (3, 2, 2, 1))
        return [publish.PublishCase(*size, workers=n, text=text) for size in sizes for n in (1, 2)]

    return Family(
        "publish", (f"{CORE}.loop:publish",), make, (publish.ReadCount, publish.WriteCount, publish.AwaitTaken)
    )


def _copy_items(_: str) -> Family:
    def make(text: Any) -> Any:
        how: tuple[dict[str, Any], ...] = ({"launches": 1}, {"expires": True}, {})
        sizes = [(w, c, more) for w in (1, 2, 3) for c in range(1, min(w, 2) + 1) for more in how]
        sizes += [(w, c, {"launches": 1, "running": (1,)}) for w, c in ((2, 1), (2, 2))]
        return [copies.CopyCase(w, c, **more, text=text) for w, c, more in sizes]

    return Family("copies", (f"{VERIFY}.copies:text",), make, (copies.Peek, copies.Put, Poll))


# Model 7: ranks -------------------------------------------------------------------------------------------------------


def _gather(ways: tuple[str, ...], roles: str) -> Family:
    """``roles``: what is replaced of a case. A bug that needs many states is not looked for at smaller sizes."""

    def make(*texts: Any, calls: int = 1, expires: Any = (), **more: Any) -> Any:
        given = dict(zip(roles.split(", "), texts, strict=True))
        least = calls if expires or ways == ("pull",) or {"streams", "world"} & more.keys() else 1
        how: dict[str, Any] = {"ways": ways} if ways else {}
        return [GatherCase(epochs=n, expires=expires, **how, **given, **more) for n in range(least, calls + 1)]

    return Family("gather", tuple(f"{CORE}.protocols.gather:{role}" for role in roles.split(", ")), make)


def _reduction(model: str, case: Any, homes: dict[str, str], roles: str) -> Family:
    """Sums and all-reduces: ``homes`` has the module of each role's text."""

    def make(*texts: Any, calls: int = 1, **more: Any) -> Any:
        given = dict(zip(roles.split(", "), texts, strict=True))
        least = more.get("streams", 1) if model == "sums" else (calls if "expires" in more else 1)
        return [case(epochs=n, **given, **more) for n in range(least, calls + 1)]

    return Family(model, tuple(f"{CORE}.protocols.{homes[role]}" for role in roles.split(", ")), make)


def _replay(role: str) -> Family:
    def make(text: Any, replays: int = 1, **more: Any) -> Any:
        least, given = replays if "expires" in more else 1, role if role in ("side", "prepare") else "calling"
        return [ReplayCase(replays=n, **{given: text}, **more) for n in range(least, replays + 1)]

    return Family("replay", (f"{CORE}.protocols.replay:{role}",), make, prefix="replay: ")


def _experts(role: str) -> Family:
    def make(text: Any, replays: int = 1, **more: Any) -> Any:
        least = replays if "expires" in more else 1
        return [ExpertsCase(replays=n, **{role: text}, **more) for n in range(least, replays + 1)]

    return Family("experts", (f"{CORE}.protocols.experts:{role}",), make, (Taken,), prefix="experts: ")


def _dispatch(role: str) -> Family:
    def make(made: Any, parts: Any = ((1,), (1,)), **more: Any) -> Any:
        return [DispatchCase(parts, **{role: made}, **more)]

    return Family("dispatch", (f"{CORE}.protocols.dispatch:{role}",), make, prefix="dispatch: ")


def _sources(role: str) -> Family:
    def make(made: Any, counts: Any = None, **more: Any) -> Any:
        given = (counts,) if counts else (((1,),), ((2,),), ((1,), (1,)))
        workers = (more.pop("workers"),) if "workers" in more else (1, 2)
        return [SourcesCase(one, count, program=made, **more) for one in given for count in workers]

    return Family("sources", (f"{VERIFY}.sources:work_by_source",), make, prefix="sources: ")


# Models 14 and 15: clusters and pairs ---------------------------------------------------------------------------------


def _cluster(role: str) -> Family:
    """``role``: the text, or the class `Cluster`, whose last fields are options."""

    def make(edited: Any, k: int = 0, pieces: int = 0, warps: int = 1, **more: Any) -> Any:
        made, given = (Cluster, {"text": edited}) if role == "add_shares" else (edited, {})
        return [ClusterCase(made(size, 1 if k else 2, k, pieces, warps), **given, **more) for size in (2, 4)]

    return Family("cluster", (f"{VERIFY}.cluster:{role}",), make, prefix="cluster: ")


def _pair(role: str) -> Family:
    """``role``: a field of `PairCase`."""

    def make(edited: Any) -> Any:
        for depth, items in ((2, (1,)), (2, (3, 1))):
            ring = (edited if role == "ring" else Ring)(depth, 2, ctas=2)
            yield PairCase(ring, items, **({} if role == "ring" else {role: edited}))

    home = "pair:paired" if role == "around" else f"protocol:{TEXTS.get(role, 'Ring')}"
    return Family("pair", (f"{VERIFY}.{home}",), make, prefix="pair: ")


_SUM = {"watch": "gather:watch", **{role: f"reduce_scatter:{role}" for role in ("produce", "scatter", "add_up")}}
_REDUCE = {"watch": "gather:watch", "reduce": "one_shot:reduce", "begin": "reduce_scatter:begin_sum"}

#: From the family in a section's title, and the role behind it, to a `Family`.
FAMILIES: dict[str, Callable[[str], Family]] = {
    "work": partial(_work, "work"),
    "work_through": partial(_work, "work_through"),
    "gate": _gate,
    "fixup": _fixup,
    "ring": partial(_ring_family, _ring),
    "buffers": partial(_ring_family, _buffers),
    "product": _product,
    "shared": _shared,
    "shared attention": _shared_attention,
    "attention": _attention,
    "publish": _publish,
    "copy items": _copy_items,
    "gather": partial(_gather, ()),
    "gather by pulling": partial(_gather, ("pull",)),
    "reduce-scatter": partial(_reduction, "sums", SumCase, _SUM),
    "replay": _replay,
    "dispatch": _dispatch,
    "experts": _experts,
    "sources": _sources,
    "cluster": _cluster,
    "pair": _pair,
    "all-reduce": partial(_reduction, "reduce", OneShotCase, _REDUCE),
}
