"""The seeded bugs: protocols that are wrong in one place, each of which the checker must find.

A bug is a gate, a program or a ring put in the place of the real one. Nothing in the models knows of them. Each is
looked for in growing sizes; the violation found is at the smallest size that shows it, by the shortest way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

from tilestream_tools.verify import seeded_attention as a
from tilestream_tools.verify import seeded_buffers as c
from tilestream_tools.verify import seeded_copies as x
from tilestream_tools.verify import seeded_drain as d
from tilestream_tools.verify import seeded_order as o
from tilestream_tools.verify import seeded_publish as p
from tilestream_tools.verify import seeded_ranks
from tilestream_tools.verify import seeded_ring as r
from tilestream_tools.verify import seeded_settle as s
from tilestream_tools.verify import seeded_shared_attention as k
from tilestream_tools.verify import seeded_shared_ring as h
from tilestream_tools.verify import seeded_workers as w
from tilestream_tools.verify.arrival_order import ordered
from tilestream_tools.verify.attention import AttentionCase
from tilestream_tools.verify.attention_protocol import AttentionRing
from tilestream_tools.verify.attention_protocol import LoadTurn as LoadLoop
from tilestream_tools.verify.attention_protocol import MathTurn as MathLoop
from tilestream_tools.verify.copies import CopyCase
from tilestream_tools.verify.copies import Text as Copying
from tilestream_tools.verify.product import Handing, ProductCase
from tilestream_tools.verify.protocol import Consumers, Finish, Ring, Source, multiply
from tilestream_tools.verify.publish import PublishCase
from tilestream_tools.verify.ring import LoadTurn, MathTurn, RingCase
from tilestream_tools.verify.seeded_bug import SeededBug, says
from tilestream_tools.verify.shared_attention import OPERANDS
from tilestream_tools.verify.shared_ring import SharedCase, SharedRing, Text
from tilestream_tools.verify.sweep import LAYOUTS, UNREAD, matmul
from tilestream_tools.verify.workers import Program, WorkersCase


def seeded_bugs() -> tuple[SeededBug, ...]:
    """All of them."""
    return (
        *_gates(), *_programs(), *_orders(), *_drains(), *_settlings(), *_rings(), *_buffers(), *_products(),
        *_shared(), *_attentions(), *_publishes(), *seeded_ranks.bugs(), *_copies(),
    )  # fmt: skip


def _gated(change: Callable[[WorkersCase], WorkersCase]) -> tuple[WorkersCase, ...]:
    """Rows that arrive, 1 to 3 tiles, every layout and pivot."""
    return tuple(
        change(matmul("dynamic", workers, num_m, bounds=bounds, pivot=pivot))
        for workers, num_m in ((1, 1), (1, 2), (2, 2), (1, 3), (2, 3))
        for bounds in LAYOUTS[num_m]
        for pivot in range(len(bounds) - 1)
    )


def _with_gate(kind: type) -> Callable[[WorkersCase], WorkersCase]:
    def change(case: WorkersCase) -> WorkersCase:
        gate = case.gate
        assert gate is not None
        more = (
            {"first": case.schedule.raster.first, "num_m": case.schedule.grid.num_m} if kind is w.PositionGate else {}
        )
        return replace(case, gate=kind(gate.m, gate.n, gate.block_m, gate.block_n, gate.rows, **more))

    return change


def _gates() -> tuple[SeededBug, ...]:
    rows = (
        ("pivot not in the signal", "read before arrival", w.PositionGate),
        ("first chunk only", "read before arrival", w.FirstChunkGate),
        ("padded rows signalled", "signal out of range", w.PaddedGate),
    )
    return tuple(SeededBug(name, kind, "workers", says(gate), _gated(_with_gate(gate))) for name, kind, gate in rows)


def _programs() -> tuple[SeededBug, ...]:
    def ungated(program: Program, **more: Any) -> tuple[WorkersCase, ...]:
        return tuple(
            matmul("dynamic", workers, tiles, queues=queues, program=program, **more)
            for workers, tiles, queues in (
                (1, 1, 1),
                (1, 2, 1),
                (2, 1, 1),
                (2, 2, 1),
                (1, 2, 2),
                (2, 2, 2),
                (2, 3, 2),
                (3, 3, 2),
            )
        )

    def partials(program: Program) -> tuple[WorkersCase, ...]:
        return tuple(
            matmul("stream_k", workers, 1, k=k, running=running, program=program)
            for workers, k, running in ((2, 1, ()), (2, 2, (0,)), (2, 2, ()), (3, 3, (0, 1)), (3, 3, ()))
        )

    def expiring(program: Program) -> tuple[WorkersCase, ...]:
        return _gated(lambda case: replace(case, program=program))

    static = tuple(
        matmul("static", n, tiles, program=w.waits_for_neighbour) for n, tiles in ((1, 1), (1, 2), (2, 2), (3, 3))
    )
    rows: tuple[tuple[str, str, Program, tuple[WorkersCase, ...]], ...] = (
        ("pool nobody visits", "missing work", w.own_queue_only, ungated(w.own_queue_only)),
        ("ticket read then written", "double work", w.read_then_write, ungated(w.read_then_write)),
        ("void tickets without end", "counter out of bounds", w.asks_own_queue_again, ungated(w.asks_own_queue_again)),
        ("first out resets counters", "double work", w.first_out_resets, ungated(w.first_out_resets, drain="reset")),
        ("stream-K owner waits", "deadlock", w.owner_waits, partials(w.owner_waits)),
        ("workers wait in a circle", "deadlock", w.waits_for_neighbour, static),
        ("count not restored", "count not restored", w.count_not_restored, partials(w.count_not_restored)),
        ("counted before written", "partial not visible", w.counts_before_writing, partials(w.counts_before_writing)),
        ("one slot a tile", "overwritten while read", w.one_slot_a_tile, partials(w.one_slot_a_tile)),
        ("wait without abort", "not drained", w.waits_without_abort, expiring(w.waits_without_abort)),
        ("abort not polled", "not drained", w.never_polls, expiring(w.never_polls)),
        ("abort polled in vain", "not drained", w.polls_in_vain, expiring(w.polls_in_vain)),
        ("done though its gate failed", "gate ignored", w.computes_all_the_same, expiring(w.computes_all_the_same)),
    )  # fmt: skip
    return tuple(SeededBug(name, kind, "workers", says(program), cases) for name, kind, program, cases in rows)


def _orders() -> tuple[SeededBug, ...]:
    def chunked(program: Program) -> tuple[WorkersCase, ...]:
        return tuple(
            ordered(workers, num_m, bounds=bounds, program=program)
            for workers, num_m, bounds in (
                (1, 1, (0, 2)), (1, 2, (0, 2, 4)), (1, 2, (0, 1, 4)), (2, 2, (0, 2, 4)), (2, 3, (0, 2, 4, 6)),
            )
        )  # fmt: skip

    rows: tuple[tuple[str, str, Program], ...] = (
        ("ticket drawn unseen", "idle beside work", o.drawn_unseen),
        ("waits for one queue", "idle beside work", o.waits_for_one_queue),
        ("queue passed for good", "missing work", o.passed_for_good),
        ("empty queue forgotten", "counter out of bounds", o.empty_queue_forgotten),
        ("stops with its queue", "missing work", o.stops_with_its_queue),
        ("waits after the end", "livelock", o.waits_after_the_end),
        ("ready is enough", "read before arrival", o.ready_is_enough),
    )
    return tuple(SeededBug(name, kind, "workers", says(program), chunked(program)) for name, kind, program in rows)


def _drains() -> tuple[SeededBug, ...]:
    def gated(program: Program, unread: bool = True, **more: Any) -> tuple[WorkersCase, ...]:
        """As `_gated`; ``unread``: chunks without rows, too."""
        return tuple(
            matmul("dynamic", workers, num_m, bounds=bounds, pivot=pivot, drain="reset", program=program, **more)
            for workers, num_m in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (2, 3))
            for bounds in (*LAYOUTS[num_m], *(UNREAD[num_m] if unread else ()))
            for pivot in range(len(bounds) - 1)
        )

    def partials(program: Program) -> tuple[WorkersCase, ...]:
        sizes = ((2, 1, 2, (0, 2)), (2, 1, 2, (0, 1, 2)), (2, 3, 2, (0, 2, 4, 6)), (3, 1, 3, (0, 1, 2)))
        return tuple(
            matmul("stream_k", workers, num_m, k=k, bounds=bounds, drain="reset", program=program)
            for workers, num_m, k, bounds in sizes
        )

    rows: tuple[tuple[str, str, Program, tuple[WorkersCase, ...]], ...] = (
        ("drained by leaving", "missing work", d.leaves_the_rest, gated(d.leaves_the_rest)),
        ("poisoned and not counted in", "missing work", d.poisons_uncounted, partials(d.poisons_uncounted)),
        ("counted in and not poisoned", "partial not visible", d.counts_what_is_not_there,
         partials(d.counts_what_is_not_there)),
        ("poison taken for a number", "poison lost", d.poison_lost, partials(d.poison_lost)),
        ("computed after the end", "gate ignored", d.polls_at_new_chunks, gated(d.polls_at_new_chunks)),
        ("poisoned though seen", "poisoned in vain", d.poisons_what_was_seen, gated(d.poisons_what_was_seen)),
        ("expiry not told", "gate ignored", d.expires_alone, gated(d.expires_alone)),
        ("quarantine not read", "read before arrival", d.mark_not_read, gated(d.mark_not_read, quarantined=True)),
        ("chunk without rows forgotten", "reset too early", d.unread_chunk_forgotten, gated(d.unread_chunk_forgotten)),
        ("over asked too early", "reset too early", d.asks_before_leaving, gated(d.asks_before_leaving, unread=False)),
        ("signals zeroed after an expiry", "reset too early", d.zeroes_signals_always, gated(d.zeroes_signals_always)),
        ("signals left unmarked", "not reset", d.not_in_quarantine, gated(d.not_in_quarantine)),
        ("abort word taken back", "reset too early", d.takes_abort_back, gated(d.takes_abort_back)),
        ("counters left after an expiry", "not reset", d.restores_only_what_went_well,
         gated(d.restores_only_what_went_well)),
        ("drained and not counted out", "not reset", d.drained_not_counted, gated(d.drained_not_counted)),
    )  # fmt: skip
    return tuple(SeededBug(name, kind, "workers", says(program), cases) for name, kind, program, cases in rows)


def _settlings() -> tuple[SeededBug, ...]:
    def parts(program: Program) -> tuple[WorkersCase, ...]:
        sizes = ((2, 1, 2, 0), (3, 1, 3, 0), (2, 3, 2, 0), (3, 2, 3, 0), (4, 3, 2, 2))
        return tuple(
            matmul("stream_k", workers, num_m, k=k, shares=shares, drain="poison", program=program, settled=True)
            for workers, num_m, k, shares in sizes
        )

    rows: tuple[tuple[str, str, Program], ...] = (
        ("the last one too early", "partial not visible", s.last_too_early),
        ("counted and not written", "partial not visible", s.counts_without_writing),
        ("two are the last", "double work", s.two_are_the_last),
        ("nobody is the last", "missing work", s.nobody_is_the_last),
        ("counted after restoring", "count not restored", s.counts_after_restoring),
        ("not restored after a look", "count not restored", s.restores_only_what_it_counted),
        ("restored by everybody", "missing work", s.restores_while_others_count),
        ("own part from its slot", "partial not visible", s.adds_its_own_from_its_slot),
    )
    return tuple(SeededBug(name, kind, "workers", says(program), parts(program)) for name, kind, program in rows)


def _rings() -> tuple[SeededBug, ...]:
    every: tuple[Consumers, ...] = ("single", "cooperative", "ping_pong")
    together: tuple[Consumers, ...] = ("single", "cooperative")
    turns: tuple[Consumers, ...] = ("ping_pong",)

    def cases(
        *,
        consumers: tuple[Consumers, ...] = every,
        depths: tuple[int, ...] = (1, 2, 3),
        ring: type[Ring] = Ring,
        precise: bool = False,
        **programs: Any,
    ) -> tuple[RingCase, ...]:
        sizes = product(depths, (1, 2), consumers, ((1,), (1, 2), (2, 3)))
        return tuple(
            RingCase(ring(depth, items, who, precise=depth == 1 or precise), ks, **programs)
            for depth, items, who, ks in sizes
        )

    def load(name: str, kind: str, program: LoadTurn, **more: Any) -> SeededBug:
        return SeededBug(name, kind, "ring", says(program), cases(load=program, **more))

    def math(name: str, kind: str, program: MathTurn, **more: Any) -> SeededBug:
        return SeededBug(name, kind, "ring", says(program), cases(math=program, **more))

    def source(name: str, kind: str, program: Source, **more: Any) -> SeededBug:
        return SeededBug(name, kind, "ring", says(program), cases(source=program, **more))

    overwritten = "overwritten while read"
    one_reader = cases(consumers=("cooperative",), ring=r.OneReaderRing)
    shallow = tuple(
        RingCase(Ring(1, items, who), ks) for items, who, ks in product((1, 2), every, ((1,), (1, 2), (2,)))
    )
    nothing = tuple(RingCase(Ring(2, items, who), ks) for items, who, ks in product((1, 2), every, ((0,), (0, 1))))
    return (
        load("wrong phase at empty", "deadlock", r.load_phase_wrong),
        math("wrong phase at full", "wrong data", r.math_phase_wrong),
        math("phase never flips", "wrong data", r.phase_never_flips),
        load("phase starts anew", "barrier broken", r.phase_restarts),
        math("arrive forgotten", "deadlock", r.arrive_forgotten, ends_clean=False),
        math("slot not returned", "deadlock", r.slot_not_returned, ends_clean=False),
        load("bytes not expected", "barrier broken", r.bytes_not_expected),
        load("empty not awaited", "barrier broken", r.empty_not_awaited),
        load("slot not awaited", "deadlock", r.slot_not_awaited),
        SeededBug("one reader counted", overwritten, "ring", says(r.OneReaderRing), one_reader),
        math("stage given back too early", overwritten, r.released_too_early, depths=(2,), consumers=together),
        SeededBug("depth 1 in the deep form", "deadlock", "ring", says(multiply), shallow),
        math("product not waited for", "wrong data", r.product_not_waited_for, precise=True),
        SeededBug(
            "item of no K steps", "missing work", "ring",
            "An item of no K steps is handed on: the math loops take it for STOP, and leave.", nothing,
        ),
        math("epilogue too early", "wrong data", r.epilogue_too_early),
        load("load skips an item", "deadlock", r.load_skips_items),
        math("item not awaited", "wrong data", r.item_not_awaited),
        math("both take the even items", "wrong data", r.both_take_even, consumers=turns),
        math("other items not stepped over", "wrong data", r.other_items_not_stepped_over, consumers=turns),
        math("nobody may begin", "deadlock", r.order_phase_wrong, consumers=turns),
        math("K count taken from the problem", "deadlock", r.fixed_k_count, consumers=together),
        load("K count rounded down", "deadlock", r.load_rounds_down),
        load("handed on before its gate", "deadlock", r.handed_on_before_gate, expires=True),
        load("STOP not handed on", "deadlock", r.stop_not_handed_on),
        load("void item loaded", "ring in use", r.void_item_loaded, expires=True),
        load("STOP lost after an expiry", "deadlock", r.stop_lost_after_expiry, expires=True),
        source("over, and not marked", "gate ignored", r.unmarked, expires=True),
        source("fence before the gate", "read before arrival", r.unfenced, expires=True),
        math("void item awaited", "deadlock", r.void_item_awaited, expires=True),
        math("void item taken for STOP", "missing work", r.void_item_taken_for_stop, expires=True),
        math("void item not poisoned", "gate ignored", r.not_poisoned, expires=True),
        math("order kept by a void item", "deadlock", r.order_kept_by_a_void_item, consumers=turns, expires=True),
    )  # fmt: skip


def _buffers() -> tuple[SeededBug, ...]:
    every: tuple[Consumers, ...] = ("single", "cooperative", "ping_pong")

    def cases(
        strips: tuple[int, ...] = (1, 2), ring: type[Ring] = Ring, consumers: tuple[Consumers, ...] = every,
        split: bool = False, **programs: Any,
    ) -> tuple[RingCase, ...]:  # fmt: skip
        return tuple(
            RingCase(ring(depth, 2, who, strips=count), (1,), split=split, **programs)
            for depth, who, count in product((2, 3), consumers, strips)
        )

    def finish(name: str, kind: str, program: Finish, *how: Any, **more: Any) -> SeededBug:
        return SeededBug(name, kind, "ring", says(program), cases(*how, finish=program, **more))

    def ring(name: str, kind: str, of: type[Ring], *how: Any) -> SeededBug:
        return SeededBug(name, kind, "ring", says(of), cases(*how))

    overwritten = "overwritten while read"
    return (
        finish("one store too many left", overwritten, c.one_store_too_many),
        finish("odd strips not waited for", overwritten, c.odd_strips_not_waited_for, (2, 1, 3)),
        ring("C buffers shared", overwritten, c.SharedBuffers, (1, 2), c.SharedBuffers, ("ping_pong",)),
        finish("stored before it is filled", "wrong data", c.stored_before_filled),
        finish("fence forgotten", "read before arrival", c.fence_forgotten),
        finish("every part stored", "wrong data", c.stores_every_part, split=True),
        finish("last strip forgotten", "missing work", c.last_strip_forgotten, (2, 1, 3)),
        SeededBug(
            "left while stores read", "left too early", "ring", says(c.leaves_while_stores_read),
            cases((2,), math=c.leaves_while_stores_read),
        ),
    )  # fmt: skip


def _products() -> tuple[SeededBug, ...]:
    sizes = [
        matmul("dynamic", workers, num_m, bounds=bounds, pivot=pivot, k=2, drain="reset")
        for workers, num_m in ((1, 1), (1, 2), (2, 2))
        for bounds in LAYOUTS[num_m]
        for pivot in range(len(bounds) - 1)
    ]
    ring = Ring(2, 2)
    pivoted = tuple(ProductCase(_with_gate(w.PositionGate)(case), ring) for case in sizes)
    rows: tuple[tuple[str, str, Handing], ...] = (
        ("product: loaded without a gate", "read before arrival", r.handed_on_ungated),
        ("product: loaded without a fence", "read before arrival", r.handed_on_unfenced),
        ("product: STOP in place of void items", "missing work", r.left_void_on_the_way),
    )
    return (
        SeededBug("product: pivot not in the signal", "read before arrival", "product", says(w.PositionGate), pivoted),
        *(
            SeededBug(name, kind, "product", says(of), tuple(ProductCase(case, ring, of) for case in sizes))
            for name, kind, of in rows
        ),
    )


def _shared() -> tuple[SeededBug, ...]:
    sizes = (((1, False),), ((4, False),), ((2, False), (1, False)), ((4, True),), ((2, True), (1, False)))

    def bug(name: str, kind: str, text: Text, depth: int = 3, exact: bool = True) -> SeededBug:
        cases = tuple(SharedCase(SharedRing(depth, 2), items, text, exact) for items in sizes)
        return SeededBug(name, kind, "shared", says(text), cases)

    def attends(name: str, kind: str, text: Text, depth: int = 3, exact: bool = True) -> SeededBug:
        ring, blocks = SharedRing(depth, 2, operands=OPERANDS), ((1,), (4,), (1, 1))
        cases = tuple(SharedCase(ring, tuple((n, False) for n in items), text, exact) for items in blocks)
        return SeededBug(f"keys and values: {name}", kind, "shared", says(text), cases)

    early, overwritten, wrong = "read before arrival", "overwritten while read", "wrong data"
    return (
        bug("one buffer, no barrier after the read", overwritten, h.one_buffer_without_barrier, 1),
        bug("wait counts groups", "drained in vain", h.waits_count_groups),
        bug("wait a group short", early, h.waits_a_group_short),
        bug("own copies waited for only", wrong, h.no_barrier_after_the_wait),
        bug("copies before the barrier", overwritten, h.copies_before_the_barrier, exact=False),
        bug("short items commit less", early, h.short_items_commit_less),
        bug("no barrier between items", overwritten, h.no_barrier_between_items),
        bug("no barrier after the rest", overwritten, h.no_barrier_after_the_rest),
        bug("barrier passes reads", overwritten, h.barrier_passes_reads),
        bug("put without a barrier", overwritten, h.put_without_barrier, 2),
        bug("read without a barrier", wrong, h.read_without_barrier, 2),
        bug("put before it has come", early, h.puts_what_has_not_come, 2),
        bug("drained for each put", "drained in vain", h.drains_for_each_put, 2),
        bug("fetched in the other order", early, h.fetched_in_the_other_order, 2),
        bug("rest put without a barrier", overwritten, h.rest_without_barrier),
        attends("one buffer, no barrier after the read", overwritten, k.one_buffer_without_barrier, 1),
        attends("wait counts groups", "drained in vain", k.waits_count_groups),
        attends("values not waited for", early, k.waits_leave_values_out),
        attends("values overwritten", overwritten, k.values_overwritten, exact=False),
        attends("copies before the barrier", overwritten, k.copies_before_the_barrier, exact=False),
        attends("no barrier behind the queries", overwritten, k.no_barrier_behind_queries),
        attends("no barrier between items", overwritten, k.no_barrier_between_items),
        attends("values put without a barrier", wrong, k.values_put_without_barrier, 1, exact=False),
        attends("keys put without a barrier", wrong, k.keys_put_without_barrier, 1, exact=False),
    )


def _attentions() -> tuple[SeededBug, ...]:
    one, two = AttentionRing(1, consumers=1), AttentionRing(1)
    sizes = ((one, (1,)), (one, (0, 1)), (one, (2,)), (two, (2,)))
    arriving = tuple((AttentionRing(1, consumers=1, arriving=True), counts) for counts in ((1,), (2,)))
    deep = tuple((AttentionRing(2, consumers=n), counts) for n, counts in ((1, (1,)), (1, (2,)), (2, (1,))))
    narrow = tuple((AttentionRing(depth, consumers=1, converting=True), (2,)) for depth in (1, 2))
    turns = tuple((AttentionRing(2, consumers=n, ordered=True), counts) for n, counts in product((1, 2), ((2,), (3,))))
    own = tuple((AttentionRing(depth, own="both"), (2,)) for depth in (1, 2))
    own_turns = tuple((AttentionRing(depth, ordered=True, own="both"), (2,)) for depth in (1, 2))

    def bug(
        name: str, kind: str, of: object, sizes: tuple[tuple[AttentionRing, tuple[int, ...]], ...] = sizes, **text: Any
    ) -> SeededBug:
        cases = tuple(AttentionCase(ring, counts, **text) for ring, counts in sizes)
        return SeededBug(f"attention: {name}", kind, "attention", says(of), cases)

    def math(name: str, kind: str, text: MathLoop, *more: Any) -> SeededBug:
        return bug(name, kind, text, *more, math=text)

    def load(name: str, kind: str, text: LoadLoop, *more: Any) -> SeededBug:
        return bug(name, kind, text, *more, load=text)

    def convert(name: str, kind: str, text: Any) -> SeededBug:
        return bug(name, kind, text, narrow, convert=text)

    overwritten, wrong = "overwritten while read", "wrong data"
    return (
        math("keys not awaited", wrong, a.keys_not_awaited),
        math("queries not awaited", wrong, a.queries_not_awaited),
        math("keys given back too early", overwritten, a.keys_released_too_early),
        math("values given back too early", overwritten, a.values_released_too_early),
        math("queries given back too early", wrong, a.queries_released_too_early),
        math("slot given back too early", wrong, a.slot_released_too_early),
        math("queries without blocks kept", "deadlock", a.queries_without_blocks_kept),
        math("turn not handed on", "deadlock", a.turn_not_handed_on, turns),
        math("values left out before they are there", "barrier broken", a.left_out_not_awaited, own),
        math("keys left out before they are there", "deadlock", a.keys_left_out_not_awaited, own),
        math("turn lost where left out", "deadlock", a.turn_lost_where_left_out, own_turns),
        math("item not finished", wrong, a.item_not_finished),
        load("keys awaited in the other phase", "deadlock", a.keys_awaited_in_the_other_phase),
        load("values in one stage", "barrier broken", a.values_in_one_stage, deep),
        load("last values not loaded", "deadlock", a.last_values_not_loaded),
        load("stages left when over", "deadlock", a.stages_left_when_over, arriving),
        load("void item not marked", wrong, a.void_item_not_marked, arriving),
        load("void item marked too late", wrong, a.void_item_marked_too_late, arriving),
        load("gate asked once an item", "read before arrival", a.gate_asked_once, arriving),
        load("arrived, and not fenced", "read before arrival", a.arrived_not_fenced, arriving),
        math("mark not looked at", wrong, a.mark_not_looked_at, arriving),
        convert("raw values not awaited", wrong, a.raw_values_not_awaited),
        convert("values converted over others", overwritten, a.values_converted_over_others),
        convert("values converted too late", wrong, a.converted_too_late),
        convert("values converted, and not fenced", "read before arrival", a.converted_not_fenced),
    )


def _publishes() -> tuple[SeededBug, ...]:
    def bug(name: str, kind: str, text: Any) -> SeededBug:
        sizes = ((1, 1, 1, 1), (1, 1, 1, 2), (2, 1, 2, 1), (2, 2, 1, 1), (2, 1, 2, 2), (3, 2, 2, 1))
        cases = tuple(PublishCase(*size, workers=n, text=text) for size in sizes for n in (1, 2))
        return SeededBug(name, kind, "publish", says(text), cases)

    early = "read before arrival"
    return (
        bug("signal before the stores landed", early, p.signals_before_landed),
        bug("count lost", "count not restored", p.loses_counts),
        bug("rows of the next chunk not counted", "deadlock", p.first_chunk_only),
        bug("item published with the next one", "deadlock", p.waits_for_the_next_item),
        bug("count of a chunk not restored", "count not restored", p.restores_nothing),
        bug("signalled by its first tile", early, p.signals_each_item),
    )


def _copies() -> tuple[SeededBug, ...]:
    how: tuple[dict[str, Any], ...] = ({"launches": 1}, {"expires": True}, {})
    sizes = [(w, c, more) for w in (1, 2, 3) for c in range(1, min(w, 2) + 1) for more in how]
    sizes += [(w, c, {"launches": 1, "running": (1,)}) for w, c in ((2, 1), (2, 2))]

    def cases(text: Copying) -> tuple[CopyCase, ...]:
        return tuple(CopyCase(w, c, **more, text=text) for w, c, more in sizes)

    return tuple(SeededBug(name, kind, "copies", says(text), cases(text)) for name, kind, text in x.SEEDS)
