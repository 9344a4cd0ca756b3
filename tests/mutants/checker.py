"""The bugs that the checker must find: one row each, and in which configurations to look.

A row edits a protocol that the checker explores (`tilestream.core.loop`, `tilestream.core.protocols.gather`, the loops
in `tilestream_tools.verify`) and names the kind of violation it must be found as. Configurations grow; the violation
found is at the smallest size that shows it. `mutants.ranks` has the rows of gathers, sums and all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from dataclasses import replace as with_fields
from functools import cached_property, partial
from itertools import product
from typing import Any

from mutants.engine import Edit, after, at, before, body, delete, move, mutated, replace, signature, swap
from tilestream.core.chunks import Chunks
from tilestream.core.loop import Poison, Poll
from tilestream_tools.verify import copies, publish
from tilestream_tools.verify import operations as ops
from tilestream_tools.verify.arrival_order import ordered
from tilestream_tools.verify.attention import AttentionCase
from tilestream_tools.verify.attention_protocol import AttentionRing
from tilestream_tools.verify.faults import KINDS
from tilestream_tools.verify.product import ProductCase
from tilestream_tools.verify.protocol import Ring
from tilestream_tools.verify.report import Result, explore
from tilestream_tools.verify.ring import RingCase
from tilestream_tools.verify.shared_attention import OPERANDS
from tilestream_tools.verify.shared_ring import SharedCase, SharedRing
from tilestream_tools.verify.sweep import LAYOUTS, UNREAD, Case, matmul

LOOP, GATE, SCHEDULE = "tilestream.core.loop", "tilestream.core.gate", "tilestream.core.schedule"
COPY_ITEMS = "tilestream.core.copy_items"
VERIFY = "tilestream_tools.verify"
RING, SHARED, ATTENTION = f"{VERIFY}.protocol", f"{VERIFY}.shared_ring", f"{VERIFY}.attention_protocol"
SHARED_ATTENTION = f"{VERIFY}.shared_attention"

EARLY, OVERWRITTEN, WRONG = "read before arrival", "overwritten while read", "wrong data"


@dataclass(frozen=True)
class Bug:
    """A mutant of a protocol, and where the checker finds it.

    Attributes
    ----------
    name
        What it is called.
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
            raise ValueError(f"Bug: kind={self.kind!r}; it is one of {', '.join(KINDS)}")

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


def seeded_bugs() -> tuple[Bug, ...]:
    """All of them."""
    from mutants import ranks

    return (
        *GATES, *PROGRAMS, *ORDERS, *DRAINS, *FIXUPS, *RINGS, *BUFFERS, *PRODUCTS, *SHARED_RINGS, *ATTENTIONS,
        *PUBLISHES, *ranks.BUGS, *COPIES,
    )  # fmt: skip


# Model 1: workers -----------------------------------------------------------------------------------------------------

UNPIVOTED = "item._replace(pm=(item.pm - schedule.raster.first) % schedule.grid.num_m)"
PIVOT_SAYS = (
    "The pivot moves the data, not the signal: the chunk is that of the unpivoted tile (composable_kernel #5776)."
)


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


def _expiring(program: Any) -> Any:
    return gated(partial(matmul, program=program))


def _ungated(program: Any, **more: Any) -> Any:
    sizes = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), (2, 3, 2), (3, 3, 2))
    return [matmul("dynamic", workers, tiles, queues=q, program=program, **more) for workers, tiles, q in sizes]


def _parts(program: Any) -> Any:
    sizes = ((2, 1, ()), (2, 2, (0,)), (2, 2, ()), (3, 3, (0, 1)), (3, 3, ()))
    return [matmul("stream_k", w, 1, k=k, running=running, program=program) for w, k, running in sizes]


def _static(program: Any) -> Any:
    return [matmul("static", n, tiles, program=program) for n, tiles in ((1, 1), (1, 2), (2, 2), (3, 3))]


def _padded(gate: Any) -> Any:
    def padded(case: Any) -> Any:
        return with_fields(case, gate=gate(*(getattr(case.gate, field.name) for field in fields(case.gate))))

    return map(padded, gated(matmul))


def _worker(
    name: str,
    kind: str,
    says: str,
    make: Any,
    *edits: tuple[Edit, ...],
    entry: str = "work",
    uses: tuple[Any, ...] = (),
) -> Bug:
    return Bug(name, kind, "workers", says, sum(edits, ()), (f"{LOOP}:{entry}",), make, uses)


GATES = (
    _worker(
        "pivot not in the signal", EARLY, PIVOT_SAYS, _expiring,
        at(f"{LOOP}:work", replace("pass_gate(gate, item, seen)", f"pass_gate(gate, {UNPIVOTED}, seen)")),
    ),
    _worker(
        "first chunk only", EARLY, "A tile over several chunks waits for the first of them only.", _expiring,
        at(f"{GATE}:pass_gate", replace("gate.needs(item)", "gate.needs(item)[:1]")),
    ),
    Bug(
        "padded rows signalled", "signal out of range", "workers",
        "The last row of a tile is taken from the tile's size, not from the rows there are: a ragged tail asks too "
        "far.",
        at(
            f"{GATE}:Gate.needs",
            replace(
                "self.rows.of_rows(base + begin, base + end)",
                "Chunks.uniform(2 * self.m, self.rows.rows_per_chunk or self.rows.bounds[1])"
                ".of_rows(begin, begin + self.block_m)",
            ),
        ),
        (f"{GATE}:Gate",), _padded, (Chunks,),
    ),
)  # fmt: skip

POLL = "if (yield Poll()):\n    return None"
COUNT = "if item.parts > 1 and (yield Count(item)) == item.parts - 1:\n    yield Reduce(item)"

PROGRAMS = (
    _worker(
        "pool nobody visits", "missing work", "No worker steals: a pool that is no worker's own is visited by none.",
        _ungated, at(f"{SCHEDULE}:take", replace("while True:\n    ...", "return None, cursor")), entry="work_through",
    ),
    _worker(
        "ticket read then written", "double work", "A ticket is taken by a read and a write, not by one atomic add.",
        _ungated,
        at(
            f"{SCHEDULE}:take",
            replace("ticket = yield Take(__q)", "ticket = yield Peek(__q)\nyield SetCounter(__q, ticket + 1)", 2),
        ),
        entry="work_through", uses=(ops.SetCounter,),
    ),
    _worker(
        "void tickets without end", "counter out of bounds",
        "A worker forgets that its own queue is empty, and draws a void ticket from it before each item it steals.",
        _ungated, at(f"{SCHEDULE}:take", replace("behind._replace(source=victim + 1)", "behind")), entry="work_through",
    ),
    _worker(
        "first out resets counters", "double work",
        "The first worker that leaves resets the counters; others have yet to draw their void tickets.",
        lambda program: _ungated(through(program, reset=True), drain="reset"),
        at(f"{LOOP}:leave", replace("(yield Leave()) < schedule.workers - 1", "(yield Leave()) > 0")),
        entry="work_through",
    ),
    _worker(
        "stream-K owner waits", "deadlock",
        "Stream-K as in the paper: the owner of a tile's first part spins until the other contributors are done.",
        _parts,
        at(f"{LOOP}:hand_in", replace(COUNT, """
            if item.parts > 1:
                yield Add(item)
                if item.part == 0:
                    yield AwaitCount(item, item.parts)
                    yield Reduce(item)
        """)),
        entry="work_through", uses=(ops.AwaitCount,),
    ),
    _worker(
        "workers wait in a circle", "deadlock", "A static schedule in which each waits for the first tile of the next.",
        _static,
        at(f"{LOOP}:work", before("yield from hand_in(Compute(item))", """
            neighbour, _ = schedule.ticket(0, (worker + 1) % schedule.workers)
            if neighbour.tile != item.tile:
                yield AwaitTile(neighbour.tile)
        """)),
        uses=(ops.AwaitTile,),
    ),
    _worker(
        "count not restored", "count not restored", "The last contributor leaves the count as it is.", _parts,
        at(f"{LOOP}:hand_in", replace("Count(item)", "Add(item)")), entry="work_through",
    ),
    _worker(
        "counted before written", "partial not visible", "A contributor counts before its partial is written.", _parts,
        at(
            f"{LOOP}:hand_in",
            delete("yield done"),
            replace(COUNT, """
                last = item.parts > 1 and (yield Count(item)) == item.parts - 1
                yield done
                if last:
                    yield Reduce(item)
            """),
        ),
        entry="work_through",
    ),
    _worker(
        "one slot a tile", OVERWRITTEN, "All contributors to a tile write to one slot.", _parts,
        at(
            f"{LOOP}:work_through",
            replace("Compute(item)", "Compute(item._replace(slot=0 if item.parts > 1 else -1))"),
        ),
        entry="work_through",
    ),
    _worker(
        "wait without abort", "not drained",
        "Worker 0 waits as it should; the others neither for a deadline nor for the abort word.", _expiring,
        at(f"{LOOP}:work", replace("arrived, seen = yield from pass_gate(gate, item, seen)", """
            if worker > 0:
                for need in gate.needs(item):
                    yield WaitForever(need.operand, need.chunk)
                arrived = True
            else:
                arrived, seen = yield from pass_gate(gate, item, seen)
        """)),
        uses=(ops.WaitForever,),
    ),
    _worker(
        "abort not polled", "not drained",
        "The abort word is watched at gates only: a worker whose chunks are there goes on after the expiry.", _expiring,
        at(f"{LOOP}:work", delete(POLL)),
    ),
    _worker(
        "abort polled in vain", "not drained", "The abort word is read, and an item taken all the same.", _expiring,
        at(f"{LOOP}:work", replace(POLL, "yield Poll()")),
    ),
    _worker(
        "done though its gate failed", "gate ignored",
        "The gate says that the launch is over, and the item is done all the same.", _expiring,
        at(f"{LOOP}:work", delete("if not arrived:\n    return None")),
    ),
)  # fmt: skip


def _order(name: str, kind: str, says: str, *edits: tuple[Edit, ...]) -> Bug:
    def make(program: Any) -> Any:
        sizes = ((1, 1, (0, 2)), (1, 2, (0, 2, 4)), (1, 2, (0, 1, 4)), (2, 2, (0, 2, 4)), (2, 3, (0, 2, 4, 6)))
        return [ordered(workers, num_m, bounds=bounds, program=program) for workers, num_m, bounds in sizes]

    return _worker(name, kind, says, make, *edits)


TAKE_READY = f"{SCHEDULE}:take_ready"
FIND_READY = "queue = yield Ready(every & ~empty)"
NONE_READY = "if queue < 0:\n    queue = first_of(every & ~empty)"
FOUND_EMPTY = "queue, empty = -1, empty | 1 << queue"

ORDERS = (
    _order(
        "ticket drawn unseen", "idle beside work",
        "A ticket is drawn from the first queue that is not empty, whether its chunks were seen or not.",
        at(TAKE_READY, replace(f"{FIND_READY}\n{NONE_READY}", "queue = first_of(every & ~empty)")),
    ),
    _order(
        "waits for one queue", "idle beside work",
        "A worker waits for the first queue that it has not found empty, not for any of them.",
        at(TAKE_READY, replace("Ready(every & ~empty)", "Ready(every & ~empty & -(every & ~empty))")),
    ),
    _order(
        "queue passed for good", "missing work",
        "Queues before the one that is ready first are passed, and not looked at again when their chunks come.",
        at(TAKE_READY, replace(
            "behind._replace(queue=queue, empty=empty)",
            "behind._replace(queue=queue, empty=empty | ((1 << queue) - 1))",
        )),
    ),
    _order(
        "empty queue forgotten", "counter out of bounds",
        "A worker forgets which queues it has found empty, and draws from them for ever.",
        at(TAKE_READY, replace(FOUND_EMPTY, "queue = -1")),
    ),
    _order(
        "stops with its queue", "missing work",
        "A worker that finds its queue empty leaves; no other may come to take the items of the other queues.",
        at(TAKE_READY, replace(FOUND_EMPTY, "return None, Cursor(empty=every)")),
    ),
    _order(
        "waits after the end", "livelock",
        "A worker that is told that the launch is over, or its deadline has passed, waits on for a queue to be ready.",
        at(TAKE_READY, replace(NONE_READY, "if queue < 0:\n    return None, cursor")),
        at(
            f"{LOOP}:work",
            delete(POLL),
            replace(
                "if item is None:\n    return None",
                "if item is None:\n    return None if cursor.empty == (1 << schedule.queues) - 1 else state",
            ),
        ),
    ),
    _order(
        "ready is enough", EARLY,
        "The gate is left out: but a worker whose deadline has passed takes items whose chunks it has not seen.",
        at(f"{LOOP}:work", delete("if gate is not None:\n    ...")),
    ),
)  # fmt: skip


def _drain(
    name: str, kind: str, says: str, *edits: tuple[Edit, ...], parts: bool = False, unread: bool = True,
    quarantined: bool = False, uses: tuple[Any, ...] = (),
) -> Bug:  # fmt: skip
    def make(text: Any) -> Any:
        program = through(text, reset=True)
        if parts:
            sizes = ((2, 1, 2, (0, 2)), (2, 1, 2, (0, 1, 2)), (2, 3, 2, (0, 2, 4, 6)), (3, 1, 3, (0, 1, 2)))
            return [
                matmul("stream_k", workers, num_m, k=k, bounds=bounds, drain="reset", program=program)
                for workers, num_m, k, bounds in sizes
            ]
        case = partial(matmul, drain="reset", program=program, quarantined=quarantined)
        return gated(case, ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (2, 3)), unread)

    return _worker(name, kind, says, make, *edits, entry="work_through", uses=uses)


RESET_OR_MARK = 'yield Reset("signals") if arrived else Quarantine()'
LEAVE = "yield from leave(schedule, gate)"

DRAINS = (
    _drain(
        "drained by leaving", "missing work",
        "A worker that finds the launch over leaves, as on the CPU: no worker hands in the rest.",
        at(f"{LOOP}:work_through", replace("item is None", "item is None or not arrived")),
    ),
    _drain(
        "poisoned and not counted in", "missing work",
        "A poisoned part is not counted: there is no last contributor, and its tile is never stored.",
        at(f"{LOOP}:work_through", replace("yield from finish(done)", """
            if arrived:
                yield from finish(done)
            else:
                yield done
        """)),
        parts=True,
    ),
    _drain(
        "counted in and not poisoned", "partial not visible",
        "A part that cannot be computed is counted in, and its slot left as some launch before has left it.",
        at(f"{LOOP}:hand_in", replace(
            "yield done", "if not (isinstance(done, Poison) and done.item.parts > 1):\n    yield done"
        )),
        parts=True, uses=(Poison,),
    ),
    _drain(
        "poison taken for a number", "poison lost",
        "The epilogue of a tile makes a number of NaN: a poisoned part looks computed.",
        at(f"{LOOP}:hand_in", replace("Reduce(item)", "ReduceNumbers(item)")), parts=True, uses=(ops.ReduceNumbers,),
    ),
    _drain(
        "computed after the end", "gate ignored",
        "The abort word is read only where there is a chunk to wait for; other items are computed after the end.",
        at(f"{LOOP}:take_and_pass", replace("arrived = not (yield Poll())", "arrived = True")),
    ),
    _drain(
        "poisoned though seen", "poisoned in vain",
        'An item passes its gate by a wait that is answered "arrived": where all was seen before, it does not pass.',
        at(f"{LOOP}:take_and_pass", replace(
            "return item, arrived, __after", "return item, arrived and seen != state.seen, __after"
        )),
    ),
    _drain(
        "expiry not told", "gate ignored", "A worker whose wait expires poisons its item, and sets no abort word.",
        at(f"{GATE}:pass_gate", replace("yield need", "yield WaitAlone(need.operand, need.chunk)")),
        uses=(ops.WaitAlone,),
    ),
    _drain(
        "quarantine not read", EARLY, "A launch believes signals that the one before has left in quarantine.",
        at(f"{LOOP}:take_and_pass, leave", replace("Poll()", "PollAbort()", 2)), quarantined=True,
        uses=(ops.PollAbort,),
    ),
    _drain(
        "chunk without rows forgotten", "reset too early",
        "The last worker out zeroes the signals of a launch that is not over, with chunks that no item waited for.",
        at(f"{LOOP}:leave", delete("for see in gate.every():\n    ...")),
    ),
    _drain(
        "over asked too early", "reset too early",
        "Whether the launch is over is asked before counting out: others may yet find the deadline expired.",
        at(
            f"{LOOP}:leave",
            before("if (yield Leave()) < schedule.workers - 1:\n    ...", "over = yield Poll()"),
            replace("not (yield Poll())", "not over"),
            delete("for see in gate.every():\n    ..."),
        ),
        unread=False,
    ),
    _drain(
        "signals zeroed after an expiry", "reset too early",
        "The last worker out zeroes the signals after an expiry, too, though chunks are on their way.",
        at(f"{LOOP}:leave", replace(RESET_OR_MARK, 'yield Reset("signals")')),
    ),
    _drain(
        "signals left unmarked", "not reset",
        "The last worker out leaves the signals alone after an expiry, and marks nothing.",
        at(f"{LOOP}:leave", replace(RESET_OR_MARK, 'if arrived:\n    yield Reset("signals")')),
    ),
    _drain(
        "abort word taken back", "reset too early",
        "A worker that leaves a launch that is over resets the abort word; others have yet to read it.",
        at(f"{LOOP}:work_through", before(LEAVE, 'if (yield Poll()):\n    yield Reset("abort")')),
    ),
    _drain(
        "counters left after an expiry", "not reset",
        "After an expiry the last worker out marks the signals and leaves, and the counters are as they were.",
        at(f"{LOOP}:leave", replace(RESET_OR_MARK, """
            if not arrived:
                yield Quarantine()
                return
            yield Reset("signals")
        """)),
    ),
    _drain(
        "drained and not counted out", "not reset",
        "A worker that leaves a launch that is over does not count itself out: there is no last worker.",
        at(f"{LOOP}:work_through", replace(LEAVE, f"if not (yield Poll()):\n    {LEAVE}")),
    ),
)  # fmt: skip


def _fixup(name: str, kind: str, says: str, *edits: Edit) -> Bug:
    def make(text: Any, fixup: Any) -> Any:
        program = through(text, finish=fixup)
        sizes = ((2, 1, 2, 0), (3, 1, 3, 0), (2, 3, 2, 0), (3, 2, 3, 0), (4, 3, 2, 2))
        return [
            matmul("stream_k", workers, num_m, k=k, shares=shares, drain="poison", program=program, fixup=True)
            for workers, num_m, k, shares in sizes
        ]

    entries = (f"{LOOP}:work_through", f"{LOOP}:fixup")
    return Bug(name, kind, "workers", says, at(entries[1], *edits), entries, make)


LOOKED = "last = (yield Look(item)) == item.parts - 1"
COUNTED = "last = (yield Add(item)) == item.parts - 1"
LAST = "if last:\n    yield Restore(item)\n    yield ReducePartials(item)"

FIXUPS = (
    _fixup(
        "the last one too early", "partial not visible",
        "A contributor that finds all but one of the others counted takes itself for the last.",
        replace("(yield Look(item)) == item.parts - 1", "(yield Look(item)) >= item.parts - 2"),
    ),
    _fixup(
        "counted and not written", "partial not visible",
        "A contributor looks, skips the write, and counts all the same.",
        delete("yield Write(item)"),
    ),
    _fixup(
        "two are the last", "double work",
        "A contributor counts, then reads whether it is the last: two may both find that all have counted.",
        replace(f"{LOOKED}\nif not last:\n    ...\n{LAST}", """
            yield Write(item)
            yield Add(item)
            if (yield Look(item)) == item.parts:
                yield ReducePartials(item)
                yield Restore(item)
        """),
    ),
    _fixup(
        "nobody is the last", "missing work",
        "Only the look says who is the last: where all look before any counts, there is none.",
        replace(COUNTED, "yield Add(item)"),
    ),
    _fixup(
        "counted after restoring", "count not restored",
        "A contributor that looks and is the last counts all the same, behind the count it has restored.",
        delete("yield Restore(item)"),
        replace("if not last:\n    ...", f"""
            if last:
                yield Restore(item)
                yield Add(item)
            else:
                yield Write(item)
                {COUNTED}
                if last:
                    yield Restore(item)
        """),
    ),
    _fixup(
        "not restored after a look", "count not restored",
        "A contributor that looks and is the last leaves the count as it is.",
        delete("yield Restore(item)"), after(COUNTED, "if last:\n    yield Restore(item)"),
    ),
    _fixup(
        "restored by everybody", "missing work",
        "A contributor that is not the last takes its count back when it leaves: the last never comes.",
        replace(LAST, "yield Restore(item)\nif last:\n    yield ReducePartials(item)"),
    ),
    _fixup(
        "own part from its slot", "partial not visible",
        "The last adds its own part from its slot, too, where it may not have written it.",
        replace("ReducePartials(item)", "Reduce(item)"),
    ),
)  # fmt: skip


# Model 2: the loops of the Hopper GEMM --------------------------------------------------------------------------------

EVERY, TOGETHER, TURNS = ("single", "cooperative", "ping_pong"), ("single", "cooperative"), ("ping_pong",)


def _ring(
    entry: str, name: str, kind: str, says: str, *edits: tuple[Edit, ...], consumers: Any = EVERY,
    depths: Any = (1, 2, 3),
    promoted: bool = False, **more: Any,
) -> Bug:  # fmt: skip
    role = {"load_turn": "load", "math_turn": "math", "gated": "source"}.get(entry)

    def make(text: Any) -> Any:
        ring, programs = (Ring, {role: text}) if role else (text, {})
        return [
            RingCase(ring(depth, items, who, promoted=depth == 1 or promoted), ks, **programs, **more)
            for depth, items, who, ks in product(depths, (1, 2), consumers, ((1,), (1, 2), (2, 3)))
        ]

    return Bug(name, kind, "ring", says, sum(edits, ()), (f"{RING}:{entry}",), make)


_load, _math, _source = partial(_ring, "load_turn"), partial(_ring, "math_turn"), partial(_ring, "gated")


def _no_steps(name: str, kind: str, says: str) -> Bug:
    def make() -> Any:
        return [RingCase(Ring(2, items, who), ks) for items, who, ks in product((1, 2), EVERY, ((0,), (0, 1)))]

    return Bug(name, kind, "ring", says, (), (), make)


MULTIPLY = f"{RING}:multiply"
PRODUCT = f"{RING}:multiply, multiply_promoted"
LOAD, MATH, POISON = f"{RING}:load_turn", f"{RING}:math_turn", f"{RING}:poison"
NEXT_ITEM = "item, carried = yield from source(state.source)"
RELEASE = 'yield Arrive(Barrier("empty", before(stage.at, ring.depth)))'
STEP = "stage = stage.next(ring.depth)"

RINGS = (
    _load(
        "wrong phase at empty", "deadlock",
        "The load loop waits for `empty` with the phase of `full`: a new ring looks full.",
        at(LOAD, replace("stage.phase ^ 1", "stage.phase")),
    ),
    _math(
        "wrong phase at full", WRONG,
        "The math loop waits for `full` with the phase of `empty`: it passes before anything has landed.",
        at(PRODUCT, replace("stage.phase", "stage.phase ^ 1", 3)),
    ),
    _math(
        "phase never flips", WRONG, "The math loop's phase does not flip when it comes round the ring.",
        at(PRODUCT, replace("stage.phase", "0", 3)),
    ),
    _load(
        "phase starts anew", "barrier broken",
        "The load loop begins every item at stage 0 in phase 0: loop-carried state that was not carried.",
        at(LOAD, replace("stage = state.stage", "stage = Place()")),
    ),
    _math(
        "arrive forgotten", "deadlock", "The math loop never gives a stage back.",
        at(PRODUCT, delete('yield Arrive(Barrier("empty", ...))', 3)), ends_clean=False,
    ),
    _math(
        "slot not returned", "deadlock", "The math loop never gives a slot of the item ring back.",
        at(MATH, delete('yield Arrive(Barrier("item_empty", slot))')), ends_clean=False,
    ),
    _load(
        "bytes not expected", "barrier broken",
        "The load loop arrives at `full` without telling it to wait for the bytes.",
        at(LOAD, replace("Expect(__barrier)", "Arrive(__barrier)")),
    ),
    _load(
        "empty not awaited", "barrier broken", "The load loop does not wait until a stage is empty.",
        at(LOAD, delete('yield WaitBarrier(Barrier("empty", ...), ...)')),
    ),
    _load(
        "slot not awaited", "deadlock", "The load loop does not wait until a slot of the item ring has been read.",
        at(LOAD, delete('yield WaitBarrier(Barrier("item_empty", ...), ...)')),
    ),
    _ring(
        "Ring", "one reader counted", OVERWRITTEN,
        "A cooperative ring whose `empty` barriers count one consumer, as if there were one.",
        at(f"{RING}:Ring.barriers", replace('2 if self.consumers == "cooperative" else 1', "1")),
        consumers=("cooperative",),
    ),
    _math(
        "stage given back too early", OVERWRITTEN,
        "After ``Retire(1)`` the stage of the mma still in flight is given back, not the one before it.",
        at(
            MULTIPLY,
            replace(f"yield Retire(1)\n{STEP}", f'yield Retire(1)\nyield Arrive(Barrier("empty", stage.at))\n{STEP}'),
            replace(f"{RELEASE}\n{STEP}", f'yield Arrive(Barrier("empty", stage.at))\n{STEP}'),
            delete(RELEASE),
        ),
        depths=(2,), consumers=TOGETHER,
    ),
    _math(
        "depth 1 in the deep form", "deadlock",
        "A ring of one stage runs the form that gives a stage back after the next mma has been started.",
        at(f"{RING}:k_loop", replace("multiply_promoted if ring.promoted else multiply", "multiply")), depths=(1,),
    ),
    _math(
        "product not waited for", WRONG,
        "In the promoted form a stage is given back, and its product added, while the mma is still at it.",
        at(f"{RING}:multiply_promoted", replace("Retire(0)", "Retire(1)")), promoted=True,
    ),
    _no_steps(
        "item of no K steps", "missing work",
        "An item of no K steps is handed on: the math loops take it for STOP, and leave.",
    ),
    _math(
        "epilogue too early", WRONG,
        "The last ``Retire(0)`` is left out: the epilogue takes an accumulator that an mma still writes.",
        at(PRODUCT, delete("yield Retire(0)", 2)),
    ),
    _load(
        "load skips an item", "deadlock",
        "Load and math disagree on items: the load loop hands an item of one K step on, and does not load it.",
        at(LOAD, after("stage = state.stage", """
            if k_steps(item) == 1:
                return LoadState(carried, stage, state.slot.next(ring.items))
        """)),
    ),
    _math(
        "item not awaited", WRONG,
        "Load and math disagree on items: the math loop reads the slot without waiting, and may find the item before.",
        at(MATH, delete('yield WaitBarrier(Barrier("item_full", ...), ...)')),
    ),
    _math(
        "both take the even items", WRONG, "Ping-pong, where both consumers take the even items.",
        at(MATH, before("slot, phase = state.slot", "consumer = 0")), consumers=TURNS,
    ),
    _math(
        "other items not stepped over", WRONG,
        "Ping-pong, where a consumer forgets that the other's items use stages too.",
        at(MATH, delete("stage = stage.plus(...)")), consumers=TURNS,
    ),
    _math(
        "nobody may begin", "deadlock", "Ping-pong, where neither consumer may begin.",
        at(MATH, replace("(number // 2) ^ (1 - consumer)", "number // 2")), consumers=TURNS,
    ),
    _math(
        "K count taken from the problem", "deadlock",
        "Load and math disagree on K counts: the math loop takes the K count of the whole problem, 2, for every item.",
        at(MATH, replace("k_steps(item)", "2 if item is not None else 0")), consumers=TOGETHER,
    ),
    _load(
        "K count rounded down", "deadlock",
        "Load and math disagree on K counts: the load loop leaves out the last K step of an odd count (a ragged tail).",
        at(LOAD, replace(
            "yield Load(__s, __i, __k, __b)",
            "if k_steps(item) % 2 == 0 or k != item.k_end - 1:\n    yield Load(__s, __i, __k, __b)",
        )),
    ),
    _load(
        "handed on before its gate", "deadlock",
        "The item is handed on, then its gate is asked: after an expiry the math loop waits for stages in vain.",
        at(
            LOAD,
            replace(NEXT_ITEM, "item = yield Next()"),
            after("stage = state.stage", """
                carried = not (yield Pass(item))
                yield Acquired()
                if carried:
                    return LoadState(carried, stage, state.slot.next(ring.items))
            """),
        ),
        expires=True,
    ),
    _load(
        "STOP not handed on", "deadlock", "The load loop leaves without handing STOP on.",
        at(LOAD, after(NEXT_ITEM, "if item is None:\n    return None")),
    ),
    _load(
        "void item loaded", "ring in use",
        "A void item is handed on, and loaded all the same: no consumer multiplies its stages and gives them back.",
        at(LOAD, replace(
            "range(item.k_begin, item.k_end)",
            "range(min(item.k_begin, item.k_end), max(item.k_begin, item.k_end))",
        )),
        expires=True,
    ),
    _load(
        "STOP lost after an expiry", "deadlock",
        "The load loop of a launch that is over leaves without handing STOP on.",
        at(LOAD, after(NEXT_ITEM, "if item is None and state.source:\n    return None")), expires=True,
    ),
    _source(
        "over, and not marked", "gate ignored",
        "An item of a launch that is over is handed on as it is, and loaded: from rows that are not there.",
        at(f"{RING}:gated", replace("voided(item) if over else item", "item")), expires=True,
    ),
    _source(
        "fence before the gate", EARLY,
        "The load loop fences before its gate: what it sees there, copies need not see.",
        at(f"{RING}:gated", swap("over = over or not (yield Pass(item))", "yield Acquired()")), expires=True,
    ),
    _math(
        "void item awaited", "deadlock",
        "The math loop multiplies a void item as any other: it waits for stages that never come.",
        at(MATH, replace("k_steps(item)", "abs(k_steps(item))")), expires=True,
    ),
    _math(
        "void item taken for STOP", "missing work",
        "The math loop takes fewer than no K steps for none, and leaves: what comes after the void item is not done.",
        at(MATH, replace("not steps", "steps <= 0")), expires=True,
    ),
    _math(
        "void item not poisoned", "gate ignored", "The result of a void item is what the accumulator happens to hold.",
        at(POISON, delete("yield Poisoned(item)")), expires=True,
    ),
    _math(
        "order kept by a void item", "deadlock",
        "Ping-pong, where a consumer that has a void item does not hand the tensor cores over.",
        at(POISON, delete('if ring.consumers == "ping_pong":\n    ...')), consumers=TURNS, expires=True,
    ),
)  # fmt: skip


def _buffer(
    entry: str, name: str, kind: str, says: str, *edits: tuple[Edit, ...], strips: Any = (1, 2), consumers: Any = EVERY,
    split: bool = False,
) -> Bug:  # fmt: skip
    role = {"epilogue": "finish", "math_turn": "math"}.get(entry)

    def make(text: Any) -> Any:
        ring, programs = (Ring, {role: text}) if role else (text, {})
        return [
            RingCase(ring(depth, 2, who, strips=count), (1,), split=split, **programs)
            for depth, who, count in product((2, 3), consumers, strips)
        ]

    return Bug(name, kind, "ring", says, sum(edits, ()), (f"{RING}:{entry}",), make)


STORE = f"{RING}:store"

BUFFERS = (
    _buffer(
        "epilogue", "one store too many left", OVERWRITTEN,
        "Before a buffer is filled as many stores may read as there are buffers: this one's, too.",
        at(STORE, replace("ring.pending(strip)", "ring.buffers")),
    ),
    _buffer(
        "epilogue", "odd strips not waited for", OVERWRITTEN,
        "One store may always read: also where a tile begins with the buffer that the one before ended with.",
        at(STORE, replace("ring.pending(strip)", "ring.buffers - 1")), strips=(2, 1, 3),
    ),
    _buffer(
        "Ring", "C buffers shared", OVERWRITTEN, "Both consumers write to the C buffers of the first.",
        at(f"{RING}:Ring.owner", replace("return consumer", "return 0")), consumers=TURNS,
    ),
    _buffer(
        "epilogue", "stored before it is filled", WRONG, "A strip's store is started, then its buffer is filled.",
        at(STORE, move("yield Store(...)", before="yield Fill(...)")),
    ),
    _buffer(
        "epilogue", "fence forgotten", EARLY,
        "A buffer is filled and stored with no fence between the two: the store may read what was there before.",
        at(STORE, delete("yield Fence()")),
    ),
    _buffer(
        "epilogue", "every part stored", WRONG, "A part of a tile is stored whether it is the last or not.",
        at(f"{RING}:epilogue", replace("if item.parts == 1 or (yield Fixup(item)):\n    ...", """
            if item.parts > 1:
                yield Fixup(item)
            yield from store(ring, item)
        """)),
        split=True,
    ),
    _buffer(
        "epilogue", "last strip forgotten", "missing work",
        "The strips are counted by pairs, and a last one without a second is left out.",
        at(STORE, replace("range(ring.strips)", "range(ring.strips // 2 * 2)")), strips=(2, 1, 3),
    ),
    _buffer(
        "math_turn", "left while stores read", "left too early",
        "At STOP the consumer leaves, and the kernel ends, before its stores have read their buffers.",
        at(MATH, delete("yield Drain(0)")), strips=(2,),
    ),
)  # fmt: skip


def _product(name: str, kind: str, says: str, *edits: Edit, where: str = f"{VERIFY}.product:handed_on") -> Bug:
    def make(handing: Any) -> Any:
        sizes = gated(partial(matmul, k=2, drain="reset"), ((1, 1), (1, 2), (2, 2)))
        return [ProductCase(case, Ring(2, 2), handing) for case in sizes]

    return Bug(f"product: {name}", kind, "product", says, at(where, *edits), (f"{VERIFY}.product:handed_on",), make)


PRODUCTS = (
    _product(
        "pivot not in the signal", EARLY, PIVOT_SAYS,
        replace("pass_gate(gate, item, seen)", f"pass_gate(gate, {UNPIVOTED}, seen)"), where=f"{LOOP}:take_and_pass",
    ),
    _product(
        "loaded without a gate", EARLY, "Items are handed on, and loaded, with no gate at all.",
        replace("take_and_pass(schedule, gate, worker, state)", "take_and_pass(schedule, None, worker, state)"),
        delete("if item is not None and gate is not None:\n    ..."),
    ),
    _product(
        "loaded without a fence", EARLY, "What the load loop sees at its gate it does not fence.",
        delete("yield Acquired()"),
    ),
    _product(
        "STOP in place of void items", "missing work",
        "A load loop that is told that the launch is over hands STOP on: untaken items stay untaken.",
        replace("voided(item)", "None"),
    ),
)  # fmt: skip


# Model 3: the warps of CDNA's kernels ---------------------------------------------------------------------------------


def _shared(
    entry: str, name: str, kind: str, says: str, *edits: tuple[Edit, ...], depth: int = 3, exact: bool = True
) -> Bug:
    def make(text: Any) -> Any:
        sizes = (((1, False),), ((4, False),), ((2, False), (1, False)), ((4, True),), ((2, True), (1, False)))
        return [SharedCase(SharedRing(depth, 2), items, text, exact) for items in sizes]

    return Bug(name, kind, "shared", says, sum(edits, ()), (f"{SHARED}:{entry}",), make)


def _attends(entry: str, name: str, kind: str, says: str, *edits: Edit, depth: int = 3, exact: bool = True) -> Bug:
    def make(text: Any) -> Any:
        ring, blocks = SharedRing(depth, 2, operands=OPERANDS), ((1,), (4,), (1, 1))
        return [SharedCase(ring, tuple((n, False) for n in items), text, exact) for items in blocks]

    entry = f"{SHARED_ATTENTION}:{entry}"
    return Bug(f"keys and values: {name}", kind, "shared", says, at(entry, *edits), (entry,), make)


DIRECT, STAGED, REST = f"{SHARED}:direct", f"{SHARED}:staged", f"{SHARED}:rest"
MEET = "yield from meet()"
REST_OR_NOT = f"{MEET}\nif item.rest:\n    ..."
COPY_AHEAD = "yield from copy_block(before(stage, ring.depth), item, min(block + ring.depth - 1, last))"

SHARED_RINGS = (
    _shared(
        "direct", "one buffer, no barrier after the read", OVERWRITTEN,
        "One stage, read past the compiler's own waits: nothing keeps a warp's next copy from others' reads.",
        at(DIRECT, body("""
            for step in range(item.steps):
                yield Copy(0, item, step)
                yield WaitLoads(0)
                yield from meet()
                yield Read(0, item, step)
                yield Have()
        """)),
        depth=1,
    ),
    _shared(
        "direct", "wait counts groups", "drained in vain",
        "A wait is told how many groups may be in flight, where the hardware counts instructions.",
        at(DIRECT, replace("ring.loads * __groups", "__groups", 2)),
    ),
    _shared(
        "direct", "wait a group short", EARLY,
        "A wait leaves as many groups in flight as there are: the step's own is among them.",
        at(DIRECT, replace("ring.loads * __groups", "ring.loads * (__groups + 1)", 2)),
    ),
    _shared(
        "direct", "own copies waited for only", WRONG,
        "A warp has waited for its own copies, and reads others' shares.",
        at(f"{SHARED}:meet", body("yield from ()")),
    ),
    _shared(
        "direct", "copies before the barrier", OVERWRITTEN,
        "The copies of the step ahead are started between the wait and the barrier that comes with the read.",
        at(
            DIRECT,
            move("yield Copy(before(stage, ring.depth), ..., ...)", before=f"{MEET}\nyield Read(stage, item, step)"),
        ),
        exact=False,
    ),
    _shared(
        "direct", "short items commit less", EARLY,
        "An item of few steps starts no copies for those that it does not have; its waits count on them.",
        at(DIRECT, replace("yield Copy(i, item, __step)", "if i < item.steps:\n    yield Copy(i, item, __step)")),
    ),
    _shared(
        "direct", "no barrier between items", OVERWRITTEN,
        "A warp begins the next item while others read the last stages of this one.",
        at(DIRECT, replace(REST_OR_NOT, "if item.rest:\n    yield from meet()\n    yield from rest(ring, item)")),
    ),
    _shared(
        "direct", "no barrier after the rest", OVERWRITTEN,
        "The same behind an item's rest of K, which lies in the first stage.",
        at(DIRECT, replace(f"yield from rest(ring, item)\n{MEET}", "yield from rest(ring, item)")),
    ),
    _shared(
        "direct", "barrier passes reads", OVERWRITTEN,
        "A warp comes to the barrier with reads in flight: the copies that the others then start overwrite them.",
        at(DIRECT, delete("yield Have()", 2), replace(MEET, f"{MEET}\nyield Have()", 4)),
    ),
    _shared(
        "staged", "put without a barrier", OVERWRITTEN,
        "Through registers: a step is written while others read the one before it.",
        at(STAGED, delete(MEET, 2, nth=0)), depth=2,
    ),
    _shared(
        "staged", "read without a barrier", WRONG,
        "Through registers: a step is read before others have written their shares.",
        at(STAGED, delete(MEET, 2, nth=1)), depth=2,
    ),
    _shared(
        "staged", "put before it has come", EARLY,
        "Through registers: a wait leaves both operands in flight, that which is put among them.",
        at(STAGED, replace("WaitLoads(ring.loads)", "WaitLoads(2 * ring.loads)")), depth=2,
    ),
    _shared(
        "staged", "drained for each put", "drained in vain",
        "Through registers: each wait is for all that is in flight, the other operand's next step too.",
        at(STAGED, replace("WaitLoads(ring.loads)", "WaitLoads(0)")), depth=2,
    ),
    _shared(
        "staged", "fetched in the other order", EARLY,
        "Through registers: B's first loads are started before A's, and waits count as if they were behind them.",
        at(STAGED, replace("yield from fetch_both(item, 0)", "yield Fetch(item, 0, 1)\nyield Fetch(item, 0, 0)")),
        depth=2,
    ),
    _shared(
        "direct", "rest put without a barrier", OVERWRITTEN,
        "The rest of K is written to the first stage while others read it.",
        at(DIRECT, replace(f"{MEET}\nif item.rest:\n    ...", """
            if item.rest:
                yield from rest(ring, item)
            yield from meet()
        """)),
        at(REST, delete(MEET, 2, nth=0)),
    ),
    _attends(
        "attend_direct", "one buffer, no barrier after the read", OVERWRITTEN,
        "One stage, read past the compiler's own waits: nothing keeps the next block's copies from others' reads.",
        body("""
            for block in range(item.steps):
                yield from copy_block(0, item, block)
                yield WaitLoads(0)
                yield from meet()
                yield from read(0, KEYS, item, 1 + block)
                yield from read(0, VALUES, item, 1 + block)
        """),
        depth=1,
    ),
    _attends(
        "attend_direct", "wait counts groups", "drained in vain",
        "A wait is told how many blocks may be in flight, where the hardware counts instructions.",
        replace("a_block * __blocks", "__blocks", 2),
    ),
    _attends(
        "attend_direct", "values not waited for", EARLY,
        "A wait lets a block's values be in flight: by the time they are read, no wait has covered them.",
        replace("a_block * (ring.depth - 2)", "a_block * (ring.depth - 2) + ring.loads"),
    ),
    _attends(
        "attend_direct", "values overwritten", OVERWRITTEN,
        "The block ahead is copied to the stage that is at work: its keys have been read, its values are being read.",
        replace(
            f"yield Read(__slot, item, __step)\n{COPY_AHEAD}\nyield Have()\nyield from read(stage, VALUES, ..., ...)",
            """
            yield from read(stage, KEYS, item, 1 + block)
            yield Read(stage * OPERANDS + VALUES, item, 1 + block)
            yield from copy_block(stage, item, min(block + ring.depth - 1, last))
            yield Have()
            """,
        ),
        exact=False,
    ),
    _attends(
        "attend_direct", "copies before the barrier", OVERWRITTEN,
        "The copies ahead are started before the block's barrier: others still read the values of the block before.",
        move(COPY_AHEAD, before=f"{MEET}\nyield Read(...)"), exact=False,
    ),
    _attends(
        "attend_direct", "no barrier behind the queries", OVERWRITTEN,
        "A warp has its queries, and starts copies to where others still read theirs.", delete(MEET, 4, nth=1),
    ),
    _attends(
        "attend_direct", "no barrier between items", OVERWRITTEN,
        "A warp brings the next item's queries while others read the last blocks of this one.", delete(MEET, 4, nth=3),
    ),
    *(
        _attends(
            "attend_staged", f"{operand.lower()} put without a barrier", WRONG,
            f"Through registers: a warp reads {operand.lower()} of which others have not put their shares.",
            replace(
                f"{MEET}\nyield from read(0, operand, item, 1 + block)",
                f"if operand != {operand}:\n    {MEET}\nyield from read(0, operand, item, 1 + block)",
            ),
            depth=1, exact=False,
        )
        for operand in ("VALUES", "KEYS")
    ),
)  # fmt: skip


# Model 5: the loops of the Hopper attention ---------------------------------------------------------------------------

ONE, TWO = AttentionRing(1, consumers=1), AttentionRing(1)
SIZES = ((ONE, (1,)), (ONE, (0, 1)), (ONE, (2,)), (TWO, (2,)))
ARRIVING = tuple((AttentionRing(1, consumers=1, arriving=True), counts) for counts in ((1,), (2,)))
DEEP = tuple((AttentionRing(2, consumers=n), counts) for n, counts in ((1, (1,)), (1, (2,)), (2, (1,))))
CONVERTING = tuple((AttentionRing(depth, consumers=1, converting=True), (2,)) for depth in (1, 2))
ORDERED = tuple((AttentionRing(2, consumers=n, ordered=True), ks) for n, ks in product((1, 2), ((2,), (3,))))
OWN = tuple((AttentionRing(depth, own="both"), (2,)) for depth in (1, 2))
OWN_ORDERED = tuple((AttentionRing(depth, ordered=True, own="both"), (2,)) for depth in (1, 2))


def _attention(role: str, name: str, kind: str, says: str, *edits: Edit, sizes: Any = SIZES, where: str = "") -> Bug:
    def make(text: Any) -> Any:
        return [AttentionCase(ring, counts, **{role: text}) for ring, counts in sizes]

    entry = f"{ATTENTION}:{role}_turn"
    edited = at(f"{ATTENTION}:{where}" if where else entry, *edits)
    return Bug(f"attention: {name}", kind, "attention", says, edited, (entry,), make)


_attend, _bring = partial(_attention, "math"), partial(_attention, "load")
_convert = partial(_attention, "convert", sizes=CONVERTING)


def _wait(name: str) -> str:
    return f'yield WaitBarrier(Barrier("{name}", ...), ...)'


def _arrive(name: str, at: str = "...") -> str:
    return f'yield Arrive(Barrier("{name}", {at}))'


BOTH = "math_turn, _left_out"

ATTENTIONS = (
    _attend(
        "keys not awaited", WRONG, "Keys are multiplied without a wait for their copy.", delete(_wait("k_full"), 3),
        where=BOTH,
    ),
    _attend(
        "queries not awaited", WRONG, "Queries are multiplied without a wait for their copy.", delete(_wait("q_full"))
    ),
    _attend(
        "keys given back too early", OVERWRITTEN,
        "A stage of keys is given back before the multiplication that reads it is done.",
        replace(
            f"yield Retire(__n)\n{_arrive('k_empty', '__stage')}",
            f"{_arrive('k_empty', '__stage')}\nyield Retire(__n)", 2
        ),
    ),
    _attend(
        "values given back too early", OVERWRITTEN,
        "A stage of values is given back before the multiplication that reads it is done.",
        replace(
            f"yield Retire(__n)\n{_arrive('v_empty', '__stage')}",
            f"{_arrive('v_empty', '__stage')}\nyield Retire(__n)", 2
        ),
    ),
    _attend(
        "queries given back too early", WRONG,
        "The room for queries is given back when they have come, and not when they have been read.",
        move(_arrive("q_empty"), after=_wait("q_full")),
    ),
    _attend(
        "slot given back too early", WRONG, "A slot is given back when the item has begun, and read again after that.",
        replace(f"yield Done(item, void)\n{_arrive('item_empty')}", "yield Done(item, void)"),
        after(_wait("q_full"), _arrive("item_empty", "slot.at")),
    ),
    _attend(
        "queries without blocks kept", "deadlock", "The queries of an item without blocks are not given back.",
        replace(_arrive("q_empty", "__at"), f"if blocks:\n    {_arrive('q_empty', '__at')}"),
    ),
    _attend(
        "turn not handed on", "deadlock", "A consumer does not hand the turn to the next.", delete(_arrive("order"), 2),
        sizes=ORDERED, where=BOTH,
    ),
    _attend(
        "values left out before they are there", "barrier broken",
        "A stage of values that are left out is given back before it is filled.", delete(_wait("v_full")), sizes=OWN,
        where="_left_out",
    ),
    _attend(
        "keys left out before they are there", "deadlock",
        "A stage of keys that are left out is given back before it is filled.", delete(_wait("k_full")), sizes=OWN,
        where="_left_out",
    ),
    _attend(
        "turn lost where left out", "deadlock",
        "A consumer that leaves out a block does not wait for its turn at it, which it hands on.",
        delete(_wait("order")),
        sizes=OWN_ORDERED, where="_left_out",
    ),
    _attend(
        "item not finished", WRONG, "The accumulator is not taken as the item's result.",
        delete("yield Done(item, void)")
    ),
    _bring(
        "keys awaited in the other phase", "deadlock", "The load loop waits for a stage of keys in the other phase.",
        replace("k.phase", "k.phase ^ 1"),
    ),
    _bring(
        "values in one stage", "barrier broken", "The load loop does not go on to the next stage of values.",
        delete("v = v.next(ring.depth)"), sizes=DEEP,
    ),
    _bring(
        "last values not loaded", "deadlock",
        "The load loop ends with an item's last keys: their values come one step later, and do not come.",
        replace("range(blocks + 1)", "range(blocks)"),
    ),
    _bring(
        "stages left when over", "deadlock",
        "Told at the gate that the launch is over, the load loop leaves the item's remaining stages as they are.",
        delete("yield Empty(...)"), sizes=ARRIVING, where="_fill",
    ),
    _bring(
        "void item not marked", WRONG, "An item that the launch's end finds under way is not marked.",
        replace("Mark(slot.at, over)", "Mark(slot.at, over and state.over)", 2), sizes=ARRIVING,
    ),
    _bring(
        "void item marked too late", WRONG, "An item is marked when all its stages are filled.",
        before("for block in range(blocks + 1):\n    ...", "late = 0"),
        replace("yield Mark(slot.at, over)", "late = over", 2, nth=1),
        before("return LoadPlaces(...)", "if late:\n    yield Mark(slot.at, late)"), sizes=ARRIVING,
    ),
    _bring(
        "gate asked once an item", EARLY, "The gate is asked for an item's first block only.",
        replace("over = yield Pass(item, block)", "over = 0 if block else (yield Pass(item, block))"), sizes=ARRIVING,
    ),
    _bring(
        "arrived, and not fenced", EARLY, "A chunk is seen to be there, and no fence is between that and its copy.",
        delete("yield Fence()"), sizes=ARRIVING,
    ),
    _attend(
        "mark not looked at", WRONG, "A void item is stored as a valid one.",
        replace("Done(item, void)", "Done(item, 0)"),
        sizes=ARRIVING,
    ),
    _convert(
        "raw values not awaited", WRONG, "Values are converted that may not have come.", delete(_wait("raw_full"))
    ),
    _convert(
        "values converted over others", OVERWRITTEN, "Values are converted to a buffer that a consumer may be at.",
        delete(_wait("v_empty")),
    ),
    _convert(
        "values converted too late", WRONG, "Values are given to the consumers before they are converted.",
        move("yield Convert(...)", after=_arrive("v_full")),
    ),
    _convert(
        "values converted, and not fenced", EARLY,
        "Values are converted, and no fence is between that and their multiplication.", delete("yield Fence()"),
    ),
)  # fmt: skip


# Models 6 and 8: published chunks, copied pieces ----------------------------------------------------------------------


def _publish(name: str, kind: str, says: str, *edits: Edit) -> Bug:
    def make(text: Any) -> Any:
        sizes = ((1, 1, 1, 1), (1, 1, 1, 2), (2, 1, 2, 1), (2, 2, 1, 1), (2, 1, 2, 2), (3, 2, 2, 1))
        return [publish.PublishCase(*size, workers=n, text=text) for size in sizes for n in (1, 2)]

    entry = f"{LOOP}:publish"
    uses = (publish.ReadCount, publish.WriteCount, publish.AwaitTaken)
    return Bug(name, kind, "publish", says, at(entry, *edits), (entry,), make, uses)


COMPLETE = "if (yield CountRows(chunk, rows)) + rows == due:\n    ..."

PUBLISHES = (
    _publish(
        "signal before the stores landed", EARLY,
        "What is stored has left shared memory, and is not waited for until it is written.",
        move("yield Landed(item)", after="for chunk, rows, due in shares:\n    ..."),
    ),
    _publish(
        "count lost", "count not restored",
        "The count is read and written, not added to: of two workers' rows one's are lost.",
        before(COMPLETE, "before = yield ReadCount(chunk)\nyield WriteCount(chunk, before + rows)"),
        replace("(yield CountRows(chunk, rows))", "before"),
    ),
    _publish(
        "rows of the next chunk not counted", "deadlock",
        "A tile is counted for the chunk of its first row alone: the next one's count never comes to its end.",
        replace("shares", "list(shares)[:1]"),
    ),
    _publish(
        "item published with the next one", "deadlock",
        "An item is published when the next one has been begun: the last never is.",
        after("yield Landed(item)", "yield AwaitTaken(item + 1, 1)"),
    ),
    _publish(
        "count of a chunk not restored", "count not restored",
        "The count is left as it is, for the next launch to find.",
        delete("yield RestoreRows(chunk)"),
    ),
    _publish(
        "signalled by its first tile", EARLY,
        "Each worker that counts signals: the chunk is there when its first tile is.",
        replace(COMPLETE, """
            before = yield CountRows(chunk, rows)
            yield Announce(chunk)
            if before + rows == due:
                yield RestoreRows(chunk)
        """),
    ),
)  # fmt: skip


def _copy(name: str, kind: str, says: str, *edits: Edit, more: tuple[Edit, ...] = ()) -> Bug:
    def make(text: Any) -> Any:
        how: tuple[dict[str, Any], ...] = ({"launches": 1}, {"expires": True}, {})
        sizes = [(w, c, more) for w in (1, 2, 3) for c in range(1, min(w, 2) + 1) for more in how]
        sizes += [(w, c, {"launches": 1, "running": (1,)}) for w, c in ((2, 1), (2, 2))]
        return [copies.CopyCase(w, c, **more, text=text) for w, c, more in sizes]

    uses = (copies.Peek, copies.Put, Poll)
    return Bug(
        name,
        kind,
        "copies",
        says,
        at(f"{COPY_ITEMS}:copy_items", *edits) + more,
        (f"{VERIFY}.copies:text",),
        make,
        uses,
    )


DRAW = 'ticket = yield Draw("pieces")'
LAST_PIECE = "if (yield CountPiece(chunk)) == pieces.per_chunk - 1:\n    ..."
LAST_COPIER = "ticket == pieces.count + copiers - 1"

COPIES = (
    _copy(
        "piece counted before it is copied", EARLY,
        "A piece is counted when it is taken: the chunk is signalled before its last piece is there.",
        move("yield Copy(ticket)", after=LAST_PIECE),
    ),
    _copy(
        "signalled by its first piece", EARLY,
        "Each worker that has copied a piece signals: the chunk is there when its first piece is.",
        replace(LAST_PIECE, """
            before = yield CountPiece(chunk)
            yield Signal(chunk)
            if before == pieces.per_chunk - 1:
                yield RestorePieces(chunk)
        """),
    ),
    _copy(
        "copiers by name", "deadlock",
        "The workers with the first numbers copy: where they never run, a tile waits for pieces that no worker takes.",
        signature("pieces, copiers, workers, worker"), replace('number = yield Draw("items")', "number = worker"),
        delete("if number == workers - 1:\n    ..."),
        more=at(f"{VERIFY}.copies:text", replace("copy_items(__p, __c, __w)", "copy_items(__p, __c, __w, worker)")),
    ),
    _copy(
        "pieces shared out beforehand", "deadlock",
        "Each copier has a share of the pieces of its own, and the last of them may come too late, or never.",
        replace(DRAW, "ticket = number", 2, nth=0), replace(DRAW, "ticket += copiers"),
        delete(f"if {LAST_COPIER}:\n    ..."),
    ),
    _copy(
        "piece taken by a read and a write", "double work",
        "A piece is taken by a read and a write, not by one atomic add: two workers copy it.",
        replace(DRAW, "ticket = yield Peek()\nyield Put(ticket + 1)", 2),
    ),
    _copy(
        "last piece left", "deadlock", "The last piece is taken for a void ticket and not copied.",
        replace("ticket < pieces.count", "ticket < pieces.count - 1"),
        replace(LAST_COPIER, "ticket == pieces.count + copiers - 2"),
    ),
    _copy(
        "count of pieces not restored", "count not restored",
        "A chunk's count is left as it is, for the next epoch to find.", delete("yield RestorePieces(chunk)"),
    ),
    _copy(
        "pieces begun anew", "double work",
        "The first copier to find no piece left restores the count, and another begins anew.",
        replace(LAST_COPIER, "ticket == pieces.count"),
    ),
    _copy(
        "copier that stops with the launch", "missing work",
        "A copier that finds the launch over takes no more: the operand stays half copied, with pieces counted.",
        replace("ticket < pieces.count", "ticket < pieces.count and not (yield Poll())"),
    ),
    _copy(
        "copy items taken without end", "double work",
        "The first to take a copy item restores their count: each later worker is a copier, too.",
        replace("number == workers - 1", "number == 0"),
    ),
)  # fmt: skip
