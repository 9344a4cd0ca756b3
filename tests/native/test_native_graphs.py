"""Programs issued by graphs: the very operations of the driver, in an order that streams and events allow."""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from stand_ins import Launch, call, remember, tried
from test_native_gated import python_calls  # noqa: F401 -- a fixture
from test_native_program import ILLEGAL, LAUNCH, NEEDS, library  # noqa: F401 -- a fixture
from test_native_repeats import (  # noqa: F401 -- fixtures
    RECORD,
    WAIT,
    WAIT_EVENT,
    WRITE,
    Asked,
    Gathers,
    Sums,
    cuda,
    extras_of,
    plain,
    state,
    zeros,
)

from tilestream.core.protocols import gather
from tilestream.distributed import call_queue, copy_engines, slots
from tilestream.distributed.call_queue import Marked
from tilestream.distributed.repeats import NO_EXTRAS
from tilestream.launch import native_program
from tilestream.launch.native_program import NativeProgram, Patch, ProgramError, keeping
from tilestream.runtime.sequence import AwaitEvent, Check, CopyAcross, Record, Sequence, Slot, Wait, WaitEvent, Write
from tilestream_tools import native_build

#: Functions of graphs, by their numbers in fake_graphs.h.
(
    CREATE, ADD_KERNEL, SET_ATTRIBUTE, ADD_COPY, ADD_BATCH, INSTANTIATE, UPDATE_KERNEL, UPDATE_COPY, UPDATE_BATCH,
    LAUNCH_GRAPH, DESTROY_EXECUTABLE, DESTROY_GRAPH,
) = range(12)  # fmt: skip
PROGRAMMATIC, COOPERATIVE = 6, 2
#: Issues of a program before its graph.
BEFORE = 2
CALLING, SIDE, EPOCH, TO, FROM = Slot(0), 0x5D, Slot(1), Slot(2), Slot(3)


class Graphs:
    """What the fake driver knows of graphs."""

    def __init__(self, driver: Any) -> None:
        self.library = driver.library
        for name in ("fake_graph_nodes", "fake_graph_edges", "fake_graph_calls", "fake_graphs_alive"):
            getattr(self.library, name).restype = ctypes.c_int64
        self.fails()

    def fails(self, function: int = -1, after: int = 0, newest_first: bool = False) -> None:
        """Have a function fail after so many calls; forgets the calls so far."""
        self.library.fake_graphs(newest_first, function, after, ILLEGAL)

    def calls(self, function: int) -> int:
        return int(self.library.fake_graph_calls(function))

    @property
    def alive(self) -> int:
        """Graphs and executable ones that are not destroyed."""
        return int(self.library.fake_graphs_alive())

    @property
    def nodes(self) -> list[int]:
        """The node of each operation of the last launch."""
        found = (ctypes.c_int64 * self.library.fake_graph_nodes(None))()
        self.library.fake_graph_nodes(found)
        return list(found)

    @property
    def behind(self) -> dict[int, set[int]]:
        """Of each node of the last launch, all nodes that come before it."""
        found = (ctypes.c_int64 * 2 * self.library.fake_graph_edges(None))()
        self.library.fake_graph_edges(found)
        direct: dict[int, set[int]] = {}
        for node, one in found:
            direct.setdefault(node, set()).add(one)
        whole: dict[int, set[int]] = {}
        for node in sorted(direct):  # a node is made behind those that it is behind
            whole[node] = set().union(direct[node], *(whole.get(one, set()) for one in direct[node]))
        return whole


@pytest.fixture
def graphs(driver) -> Iterator[Graphs]:
    gc.collect()
    made = Graphs(driver)
    yield made
    made.fails()


@pytest.fixture
def by_graphs(monkeypatch, graphs) -> Graphs:
    """Repeated calls are graphs."""
    monkeypatch.setattr(call_queue, "by_graphs", lambda: True)
    return graphs


def without_events(asked: Asked) -> list[tuple[int, ...]]:
    """The operations but for events and the handles of streams."""
    return [(kind, *operands) for kind, _, *operands in asked.operations if kind not in (RECORD, WAIT_EVENT)]


def without_streams(launches: list[bytes]) -> list[bytes]:
    """Launches but for their streams, and for the attribute that no node has."""
    made = []
    for one in launches:
        count = int.from_bytes(one[36:40], "little")
        attributes = [one[40 + 72 * i : 112 + 72 * i] for i in range(count)]
        kept = [x for x in attributes if int.from_bytes(x[:4], "little") != PROGRAMMATIC]
        made.append(b"".join([one[:28], *kept, one[40 + 72 * count :]]))
    return made


def order_of(asked: Asked) -> set[tuple[int, int]]:
    """Pairs of operations by their numbers in `without_events`: by streams and events the first comes first."""
    last: dict[int, set[int]] = {}
    recorded: dict[int, set[int]] = {}
    pairs, number = set(), 0
    for kind, stream, operand, *_ in asked.operations:
        if kind == RECORD:
            recorded[operand] = set(last.get(stream, ()))
        elif kind == WAIT_EVENT:
            last[stream] = last.get(stream, set()) | recorded.get(operand, set())
        else:
            pairs |= {(one, number) for one in last.get(stream, ())}
            last[stream] = last.get(stream, set()) | {number}
            number += 1
    return pairs


class Issued(NamedTuple):
    """A program's issue: its device and values."""

    program: NativeProgram
    values: tuple[int, ...]

    def twin(self) -> NativeProgram:
        """The same program, without a graph."""
        return NativeProgram(len(self.values) - 1, self.program._parts)


@pytest.fixture
def issued(monkeypatch) -> list[Issued]:
    """The issues of all programs."""
    made, issue = [], NativeProgram.issue

    def seen(program: NativeProgram, *values: int) -> bool:
        made.append(Issued(program, values))
        return issue(program, *values)

    monkeypatch.setattr(NativeProgram, "issue", seen)
    return made


def checked_alike(driver: Any, graphs: Graphs, one: Issued, newest_first: bool = False) -> None:
    """The last issue was one launch of a graph, which asked for what its twin asks for."""
    by_graph, nodes, behind = Asked.of(driver), graphs.nodes, graphs.behind
    launched = graphs.calls(LAUNCH_GRAPH)
    assert one.twin().issue(*one.values)
    by_operations = Asked.of(driver)
    assert graphs.calls(LAUNCH_GRAPH) == launched == 1
    mine, theirs = without_events(by_graph), without_events(by_operations)
    launches = [without_streams(asked.launches) for asked in (by_graph, by_operations)]
    if newest_first:
        assert sorted(mine) == sorted(theirs)
        assert sorted(launches[0]) == sorted(launches[1])
        return
    assert mine == theirs, "in the order of the issue, which the edges allow"
    assert launches[0] == launches[1]
    assert all(one[1] == by_graph.operations[-1][1] for one in by_graph.operations), "on the calling stream"
    for first, second in order_of(by_operations):
        before, after = nodes[first], nodes[second]
        assert before == after or before in behind.get(after, ()), (theirs[first], theirs[second])


class Kind(NamedTuple):
    """Equal calls of one kind: made in the usual way, and repeated; both with new tensors."""

    usual: Callable[[], Any]
    repeated: Callable[[], Any]
    queue: Any


KINDS = [
    "push", "pull", "push, two products", "pull, bias, activation, scales", "push, bias, activation, scales",
    "push, all rows", "pull, all rows", "sum", "all-reduce", "sum, bias, scales", "all-reduce, bias, scales",
]  # fmt: skip


@pytest.fixture
def kind(request, state, extension, driver, cuda, python_calls, monkeypatch) -> Kind:  # noqa: F811
    what = request.param
    monkeypatch.setattr(slots, "copy", lambda to, source: None)
    monkeypatch.setattr(copy_engines, "take_out", lambda *_: None)
    if what.startswith(("sum", "all-reduce")):
        sums = Sums(state, extension, driver, what.startswith("all"))

        def of_sum() -> tuple[Any, ...]:
            return zeros(16, 64), zeros(64, 32), extras_of(what, torch.ones(16, 1)) if "," in what else NO_EXTRAS

        def usual() -> Any:
            return sums.usual(*of_sum())

        def repeated() -> Any:
            a, b, extras = of_sum()
            return plain(state, a, b, extras=extras).repeated()

        return Kind(usual, repeated, sums.queue)
    gathers = Gathers(state, what[:4])
    gathers.return_a = "rows" in what
    extras = extras_of(what, torch.ones(8, 1)) if "bias" in what else NO_EXTRAS
    count = 2 if "two" in what or "bias" in what else 1

    def operands() -> list[torch.Tensor]:
        return [zeros(8, 64), *[zeros(64, 32 + 8 * i) for i in range(count)]]

    return Kind(
        lambda: gathers.usual(*operands(), extras=extras),
        lambda: plain(state, *operands(), extras=extras).repeated(),
        gathers.queue,
    )


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("newest_first", [False, True])
def test_a_graph_asks_for_what_the_operations_ask_for(by_graphs, driver, issued, kind, newest_first):
    for _ in range(1 + gather.SLOTS):
        kind.usual()
    for i in range((BEFORE + 3) * gather.SLOTS):
        issued.clear()
        driver.forget()
        by_graphs.fails(newest_first=newest_first)
        assert kind.repeated() is not None
        (one,) = issued
        launches, why = one.program.graph
        assert not why
        assert (launches > 0) == (i // gather.SLOTS >= BEFORE)
        if launches:
            if not one.program._events:  # all ranks' rows are taken out behind it, and the events are of that
                driver.forget()
                by_graphs.fails(newest_first=newest_first)
                assert one.program.issue(*one.values)
            checked_alike(driver, by_graphs, one, newest_first)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_thousands_of_calls_on_any_stream_update_what_differs(by_graphs, driver, issued, kind):
    """Epochs, streams and addresses of each call are its own."""
    for _ in range(1 + gather.SLOTS):
        kind.usual()
    for _ in range(gather.SLOTS):
        assert kind.repeated() is not None
    chosen = random.Random(7)
    programs = {one.program: one for one in issued}
    assert len(programs) == gather.SLOTS
    for one in programs.values():
        twin, known = one.twin(), [value for value in one.values[1:] if value > 1 << 32]
        del twin
        for i in range(400):
            device, _, epoch, *others = one.values
            moved = [value + 512 * chosen.randrange(4) if value in known else value for value in others]
            now = Issued(one.program, (device, 64 * chosen.randrange(3), epoch + i, *moved))
            driver.forget()
            by_graphs.fails()
            assert now.program.issue(*now.values)
            if i > BEFORE and i % 16 == 0:
                checked_alike(driver, by_graphs, now)
        assert one.program.graph[0] >= 400 - BEFORE


@pytest.mark.parametrize("kind", ["push", "sum"], indirect=True)
def test_a_call_that_differs_in_nothing_but_its_epoch_updates_no_address(by_graphs, driver, issued, kind):
    for _ in range(1 + gather.SLOTS):
        kind.usual()
    kind.repeated()
    (one,) = issued[-1:]
    for _ in range(BEFORE + 1):
        assert one.program.issue(*one.values)
    by_graphs.fails()
    assert one.program.issue(*one.values)
    assert [by_graphs.calls(f) for f in range(LAUNCH_GRAPH)] == [0] * LAUNCH_GRAPH
    device, stream, epoch, *others = one.values
    assert one.program.issue(device, stream, epoch + 3, *others)
    assert by_graphs.calls(UPDATE_COPY) == 0
    assert by_graphs.calls(UPDATE_KERNEL) > 0
    assert by_graphs.calls(UPDATE_BATCH) > 0
    assert by_graphs.calls(INSTANTIATE) == 0


@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("function", range(LAUNCH_GRAPH + 1))
@pytest.mark.parametrize("kind", ["pull", "sum"], indirect=True)
def test_what_the_driver_refuses_is_issued_by_operations_from_then_on(
    by_graphs, driver, issued, kind, function, after, caplog
):  # fmt: skip
    for _ in range(1 + gather.SLOTS):
        kind.usual()
    by_graphs.fails(function, after)
    for _ in range((BEFORE + 4) * gather.SLOTS):
        driver.forget()
        assert kind.repeated() is not None
        asked, one = Asked.of(driver), issued[-1]
        assert one.twin().issue(*one.values)
        assert without_events(asked) == without_events(Asked.of(driver)), "no operation twice, and none left out"
    refused = {one.program: one.program.graph[1] for one in issued if one.program.graph[1]}
    told = [record.getMessage() for record in caplog.records if "not by a graph" in record.getMessage()]
    assert len(told) == len(refused), "once"
    assert all(why.endswith(f"the driver's code {ILLEGAL}") for why in refused.values())
    if refused:
        assert by_graphs.calls(LAUNCH_GRAPH) < (BEFORE + 4) * gather.SLOTS
    else:
        assert by_graphs.calls(function) <= after, "it is called seldom, or never"


@pytest.mark.parametrize("function", [DESTROY_EXECUTABLE, DESTROY_GRAPH])
def test_graphs_go_with_their_repeats(by_graphs, driver, state, python_calls, issued, monkeypatch, function):  # noqa: F811
    monkeypatch.setattr(slots, "copy", lambda to, source: None)
    gathers, b, before = Gathers(state), zeros(64, 32), by_graphs.alive
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    for _ in range((BEFORE + 1) * gather.SLOTS):
        assert plain(state, zeros(8, 64), b).repeated() is not None
    assert by_graphs.alive == before + 2 * gather.SLOTS
    by_graphs.fails()
    gathers.queue.forget_programs()
    issued.clear()
    gc.collect()
    assert by_graphs.alive == before
    assert by_graphs.calls(function) == gather.SLOTS


def program_of(*parts: Any, values: int = 4, events: tuple[int, ...] = (0xEE,)) -> NativeProgram:
    return NativeProgram(values, parts, events)


def launched(extension: Any, driver: Any, needs: tuple[int, ...] = (0, 0, 0, 0, 0)) -> Any:
    """A launch that the extension has issued."""
    x = call()
    assert remember(extension, Launch(driver, x, needs), x)
    with keeping() as launches:
        assert tried(extension, x)[0] is not None
    return launches[0]


def of_graph(program: NativeProgram, driver: Any, graphs: Graphs, *values: int) -> Asked:
    """What a program asks for once it is a graph."""
    for _ in range(BEFORE):
        assert program.issue(-1, *values)
    driver.forget()
    graphs.fails()
    assert program.issue(-1, *values)
    return Asked.of(driver)


def test_what_waits_for_a_word_is_behind_the_launches_before_it(extension, driver, library, graphs):  # noqa: F811
    """One of them may write it, and nothing says that branches run at the same time."""
    side = Sequence(4, [Wait(SIDE, 0x10, EPOCH), CopyAcross(SIDE, TO, FROM, 8)])
    other = Sequence(4, [Write(0x5E, 0x30, EPOCH), Write(0x5E, 0x34, 1), Wait(0x5E, 0x38, 2), Write(CALLING, 0x20, 1)])
    program = program_of((launched(extension, driver), []), side, other)
    of_graph(program, driver, graphs, 0, 9, 0x1000, 0x2000)
    launch, wait, copy, write, *_ = graphs.nodes
    assert (launch, wait, copy, write) == (0, 1, 2, 3)
    assert graphs.behind == {wait: {launch}, copy: {launch, wait}, write: {launch}, 4: {launch}}
    assert graphs.nodes == [0, 1, 2, 3, 3, 3, 4], "writes and waits that follow each other are one node"


def test_branches_that_no_event_joins_are_not_ordered(extension, driver, library, graphs):  # noqa: F811
    """The kernel of a gather begins beside the copies that bring what it waits for."""
    before = Sequence(4, [WaitEvent(CALLING, 0xE0), Record(CALLING, 0xE1), WaitEvent(SIDE, 0xE1)])
    side = Sequence(4, [CopyAcross(SIDE, TO, FROM, 8), Record(SIDE, 0xE2)])
    behind = Sequence(4, [WaitEvent(CALLING, 0xE2), Write(CALLING, 0x20, 1)])
    program = program_of(before, side, (launched(extension, driver), []), behind, events=(0xE1, 0xE2))
    asked = of_graph(program, driver, graphs, 0x51, 9, 0x1000, 0x2000)
    copy, launch, write = graphs.nodes
    assert graphs.behind == {write: {copy, launch}}
    assert asked.operations[0][:3] == (WAIT_EVENT, 0x51, 0xE0), "the event of another call is waited for before"
    assert [one[:3] for one in asked.operations[-2:]] == [(RECORD, 0x51, 0xE1), (RECORD, 0x51, 0xE2)]


def test_attributes_are_those_of_the_launch_but_for_one(extension, driver, library, graphs):  # noqa: F811
    made = launched(extension, driver)
    asked = of_graph(program_of((made, []), values=1), driver, graphs, 0x51)
    assert graphs.calls(SET_ATTRIBUTE) == 0, "a programmatic launch is an edge between kernels"
    (one,) = asked.launches
    assert int.from_bytes(one[28:36], "little") == 0x51


def test_a_cooperative_launch_of_clusters_is_a_node_with_these_attributes(driver, library, graphs):  # noqa: F811
    from stand_ins import kernel

    from tilestream.launch.launcher import VARIES, Launcher
    from tilestream.launch.native_program import Launched

    compiled = kernel(driver, {"out": "*bf16", "epoch": "i32"}, {}, [])
    compiled.metadata.launch_cooperative_grid, compiled.metadata.num_ctas = True, 2
    launcher = Launcher(compiled, (4, 1, 1), [VARIES, VARIES])
    launcher(0, 0x1000, 5)
    part = Launched.of_kernel((launcher, (0x1000, 5))), [Patch("epoch", EPOCH)]
    for program in (program_of(part), NativeProgram(4, [part])):
        asked = of_graph(program, driver, graphs, 0x51, 9, 0, 0)
        (one,) = asked.launches
        count = int.from_bytes(one[36:40], "little")
        ids = [int.from_bytes(one[40 + 72 * i : 44 + 72 * i], "little") for i in range(count)]
        if program._events:
            assert graphs.calls(LAUNCH_GRAPH) == 1
            kept, bare = ids, without_streams([one])
    assert PROGRAMMATIC in ids
    assert kept == [x for x in ids if x != PROGRAMMATIC]
    assert COOPERATIVE in kept
    assert bare == without_streams([one])


@pytest.mark.parametrize(
    ("operations", "why"),
    [
        ([Write(CALLING, 8, 1), AwaitEvent(0xE0)], "the host waits or looks behind an operation"),
        ([Write(CALLING, 8, 1), Check(0, 8, 0, 0)], "the host waits or looks behind an operation"),
        ([Write(CALLING, 8, 1), WaitEvent(CALLING, 0xE0)], "it waits for an event of another call"),
        ([WaitEvent(SIDE, 0xE0), Write(SIDE, 8, 1)], "it waits for an event of another call"),
        ([Record(CALLING, Slot(2)), Write(CALLING, 8, 1)], "an event is another one at each issue"),
        ([Record(CALLING, 0xE0)], "it would have no node"),
        ([CopyAcross(CALLING, 8, 16, 1 << 31)], "a graph was not made: the driver's code 1"),
    ],
)  # fmt: skip
def test_what_is_no_graph_is_issued_by_operations(driver, library, graphs, operations, why):  # noqa: F811
    program = program_of(Sequence(4, operations))
    asked = []
    for _ in range(BEFORE + 2):
        driver.forget()
        assert program.issue(-1, 0x51, 9, 0xE5, 0)
        asked.append(driver.operations())
    assert asked == [asked[0]] * (BEFORE + 2)
    launches, refused = program.graph
    assert launches == 0
    assert refused.startswith(why)


def test_a_check_stops_a_graph_before_anything_is_issued(driver, library, graphs):  # noqa: F811
    words = (ctypes.c_int64 * 1)(0)
    waits = Sequence(4, [AwaitEvent(0xE0), Check(ctypes.addressof(words), 8, 1, 0)])
    program = program_of(waits, Sequence(4, [Write(CALLING, 8, 1)]))
    of_graph(program, driver, graphs, 0x51, 9, 0, 0)
    words[0] = 1
    driver.forget()
    assert not program.issue(-1, 0x51, 9, 0, 0)
    assert driver.operations() == []
    words[0] = 0
    assert program.issue(-1, 0x51, 9, 0, 0)
    assert graphs.calls(LAUNCH_GRAPH) == 2


@pytest.mark.parametrize("refuses", ["once", "always"])
def test_events_that_were_not_recorded_behind_a_graph_are_python_s(driver, library, graphs, monkeypatch, refuses):  # noqa: F811
    program = program_of(Sequence(4, [Write(CALLING, 8, EPOCH)]), events=(0xE1, 0xE2))
    of_graph(program, driver, graphs, 0x51, 9, 0, 0)
    recorded: list[tuple[int, int]] = []

    def record(stream: int, event: int) -> None:
        if refuses == "always":
            raise RuntimeError("the driver refuses")
        recorded.append((stream, event))

    monkeypatch.setattr(native_program.driver, "record_event", record)
    driver.library.fake_refuse_operations(1, ILLEGAL)
    if refuses == "always":
        with pytest.raises(ProgramError, match="the driver refuses; this is an event behind a graph") as raised:
            program.issue(-1, 0x51, 10, 0, 0)
        assert raised.value.parts == len(program) - 1
    else:
        assert program.issue(-1, 0x51, 10, 0, 0)
        assert recorded == [(0x51, 0xE1), (0x51, 0xE2)]
    assert graphs.calls(LAUNCH_GRAPH) == 2
    assert not program.graph[1]


def test_launches_of_a_graph_take_tickets_as_others_do(extension, driver, library, graphs):  # noqa: F811
    first, second = launched(extension, driver, NEEDS), launched(extension, driver, NEEDS)
    parts = [(one, []) for one in (first, second)]
    program, twin = program_of(*parts, values=1), NativeProgram(1, parts)
    seen = []
    for i in range(12):
        driver.forget()
        assert (twin if i % 3 == 2 else program).issue(-1, 0)
        seen += without_streams(driver.launches())
    assert program.graph == (8 - BEFORE, "")
    assert len(set(seen)) == len(seen) == 24, "each begins where the last one, in either way, has ended"
    driver.forget()
    graphs.fails(LAUNCH_GRAPH)
    assert program.issue(-1, 0)
    refused = without_streams(driver.launches())
    assert len({*seen, *refused}) == 26, "a graph that was not launched takes none"
    assert "was not launched" in program.graph[1]


@pytest.mark.parametrize("why", ["captured", "no context", "another device", "no words on the stream"])
def test_nothing_is_issued_of_a_graph_that_is_pythons(extension, driver, library, graphs, why):  # noqa: F811
    program = program_of((launched(extension, driver, NEEDS), []), Sequence(1, [Write(CALLING, 8, 1)]), values=1)
    of_graph(program, driver, graphs, 0)
    stream, device = 0, -1
    if why == "captured":
        driver.state(capturing=True)
    elif why == "no context":
        driver.thread(context=None)
    elif why == "another device":
        device = 3
    else:
        stream = 0x99
    assert not program.issue(device, stream)
    assert Asked.of(driver) == ([], [])
    driver.state()
    driver.thread()
    assert program.issue(-1, 0)
    assert program.graph == (2, "")


def test_a_process_has_a_bounded_number_of_graphs(driver, library, graphs):  # noqa: F811
    programs = [program_of(Sequence(4, [Write(CALLING, 8, EPOCH)])) for _ in range(260)]
    for program, _ in itertools.product(programs, range(BEFORE + 1)):
        assert program.issue(-1, 0x51, 9, 0, 0)
    refused = [program for program in programs if program.graph[1]]
    assert refused
    assert all("as many graphs as it may have" in program.graph[1] for program in refused)
    assert graphs.alive == 2 * (len(programs) - len(refused)) == 2 * 256
    del programs[0], program
    gc.collect()
    another = program_of(Sequence(4, [Write(CALLING, 8, EPOCH)]))
    of_graph(another, driver, graphs, 0x51, 9, 0, 0)
    assert another.graph == (1, "")


def test_a_forked_process_neither_launches_nor_frees_a_graph(driver, library, graphs):  # noqa: F811
    program = program_of(Sequence(4, [Write(CALLING, 8, EPOCH)]))
    of_graph(program, driver, graphs, 0x51, 9, 0, 0)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            declined = not program.issue(-1, 0x51, 9, 0, 0)
            del program
            gc.collect()
            answer = declined, graphs.calls(LAUNCH_GRAPH), graphs.calls(DESTROY_EXECUTABLE), graphs.calls(DESTROY_GRAPH)
            os.write(write, repr(answer).encode())
        finally:
            os._exit(0)
    os.close(write)
    answer = os.read(read, 64).decode()
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    assert answer == "(True, 1, 0, 0)"


def test_threads_issue_graphs_at_once(extension, driver, library, graphs):  # noqa: F811
    """Of launches that share the words of a stream."""
    launches = [launched(extension, driver, NEEDS) for _ in range(4)]
    programs = [program_of((one, []), Sequence(1, [Write(CALLING, 8, 1)]), values=1) for one in launches]
    shared, failed = program_of(Sequence(4, [Write(CALLING, 8, EPOCH)])), []
    driver.forget()

    def work(program: NativeProgram) -> None:
        driver.thread()
        failed.extend(i for i in range(100) if not (program.issue(-1, 0) and shared.issue(-1, 0, i, 0, 0)))

    threads = [threading.Thread(target=work, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [program.graph for program in programs] == [(100 - BEFORE, "")] * 4
    assert shared.graph[0] == 400 - BEFORE
    mine = without_streams(driver.launches())
    assert len(set(mine)) == len(mine) == 400, "no ticket twice"


@pytest.mark.parametrize("kind", ["push", "pull", "sum", "all-reduce"], indirect=True)
def test_the_end_of_a_kernel_is_marked_in_host_memory(by_graphs, driver, issued, kind):
    """An event in a graph would not say so, and one behind it comes only when peers have come."""
    for _ in range(1 + gather.SLOTS):
        kind.usual()
    queue, place = kind.queue, kind.queue.flags.flag(0, 0)
    for _ in range((BEFORE + 1) * gather.SLOTS):
        driver.forget()
        assert kind.repeated() is not None
        tracked = queue._calls[-1]
        names = [one[0] for one in driver.operations()]
        marks = [i for i, one in enumerate(driver.operations()) if one[0] == WRITE and one[2] == place]
        assert [driver.operations()[i][3] for i in marks] == [queue._epoch]
        assert names.index(LAUNCH) < marks[0]
        if names.count(LAUNCH) == 2:
            assert marks[0] < len(names) - 1 - names[::-1].index(LAUNCH), "before the sum, which peers hold up"
        assert isinstance(tracked.kernel, Marked)
        assert not tracked.kernel.query()
        ctypes.c_int32.from_address(place).value = queue._epoch
        assert tracked.kernel.query()
    assert issued[-1].program.graph[0] == 1
    assert (WAIT in names) == (kind.queue.op != "all_gather_matmul" or queue.flags.flag(0, 1) in
                               [one[2] for one in driver.operations() if one[0] == WAIT])  # fmt: skip


def interrupt_behind_the_native_call(program: NativeProgram, monkeypatch: Any) -> None:
    """As Python raises Ctrl-C: when the call has ended, whose result is lost."""
    native = program._issue

    def interrupted(*given: Any) -> int:
        native(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "_issue", interrupted)


@pytest.mark.parametrize("use", [False, True], ids=["operations", "graphs"])
@pytest.mark.parametrize(
    "kind", ["push", "pull", "push, all rows", "pull, all rows", "sum", "all-reduce"], indirect=True
)
def test_an_interrupt_behind_an_issued_call_issues_nothing_again(graphs, driver, state, issued, kind, monkeypatch, use):  # noqa: F811
    """An event that is recorded again would wait for the peers, and what releases the stream waits for the event."""
    kind.queue.use_graphs(use)
    for _ in range(1 + gather.SLOTS):
        kind.usual()
    for _ in range((BEFORE + 1) * gather.SLOTS):
        driver.forget()
        graphs.fails()
        assert kind.repeated() is not None
    whole, tracked = [one[:2] for one in driver.operations()], list[Any]()
    interrupt_behind_the_native_call(issued[-gather.SLOTS].program, monkeypatch)
    monkeypatch.setattr(kind.queue, "track", tracked.append)
    driver.forget()
    graphs.fails()
    with pytest.raises(KeyboardInterrupt):
        kind.repeated()
    assert [one[:2] for one in driver.operations()] == whole
    assert graphs.calls(LAUNCH_GRAPH) == use
    (call,) = tracked
    assert (call.epoch, call.kernel) == (kind.queue._epoch, kind.queue.kernel_of(kind.queue._epoch))
    assert not state.broken, "the peers have all that they wait for"
    assert getattr(kind.queue, "_pending", None) is None


@pytest.mark.parametrize("refused", ["interrupt", "once more"])
@pytest.mark.parametrize("kind", ["push", "pull", "sum", "all-reduce"], indirect=True)
def test_a_call_by_a_graph_without_its_events_gets_them_and_is_watched(
    by_graphs, driver, state, issued, kind, monkeypatch, refused  # noqa: F811
):  # fmt: skip
    for _ in range(1 + gather.SLOTS):
        kind.usual()
    for _ in range((BEFORE + 1) * gather.SLOTS):
        driver.forget()
        assert kind.repeated() is not None
    program, before = issued[-gather.SLOTS].program, [one for one in driver.operations() if one[0] != LAUNCH]
    assert [one[0] for one in before[-2:]] == [RECORD, RECORD]
    assert len(program._events) == 2
    tracked, recorded, errors = list[Any](), list[tuple[int, int]](), [RuntimeError("the driver refuses")]

    def record(stream: int, event: int) -> None:
        if errors:
            raise errors.pop()
        recorded.append((stream, event))

    if refused == "interrupt":
        errors.clear()
        interrupt_behind_the_native_call(program, monkeypatch)
    monkeypatch.setattr(native_program.driver, "record_event", record)
    monkeypatch.setattr(kind.queue, "track", tracked.append)
    driver.forget()
    by_graphs.fails()
    driver.library.fake_refuse_operations(len(before) - 2, ILLEGAL)
    try:
        with pytest.raises(KeyboardInterrupt if refused == "interrupt" else ProgramError):
            kind.repeated()
    finally:
        driver.library.fake_refuse_operations(-1, 0)
    assert by_graphs.calls(LAUNCH_GRAPH) == 1
    assert len([one for one in driver.operations() if one[0] != LAUNCH]) == len(before) - 2, "no event by another way"
    events = kind.queue._events[kind.queue._epoch % gather.SLOTS]
    assert recorded == [(before[-1][1], event) for event in program._events]
    assert program._events[-1] == events.end.cuda_event
    (call,) = tracked
    assert call.epoch == kind.queue._epoch
    assert isinstance(call.kernel, Marked)
    assert not state.broken
    assert getattr(kind.queue, "_pending", None) is None


def test_an_event_of_the_call_before_the_last_is_recorded_behind_its_graph(by_graphs, driver, state, extension, cuda):  # noqa: F811
    """What the next calls and the usual way wait for."""
    sums, x, w = Sums(state, extension, driver, False), zeros(16, 64), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        sums.usual(x, w)
    for _ in range((BEFORE + 1) * gather.SLOTS):
        driver.forget()
        assert plain(state, x, w).repeated() is not None
    events = sums.queue.events(sums.queue._epoch)
    asked = [one[:3] for one in driver.operations()]
    assert asked[-2:] == [(RECORD, 0, events.side.cuda_event), (RECORD, 0, events.end.cuda_event)]
    assert asked[0] == (WAIT_EVENT, 0, sums.queue.events(sums.queue._epoch - 1).end.cuda_event)
    found = (ctypes.c_uint64 * 8)()
    waited = list(found[: driver.library.fake_waited(found, 8)])
    assert waited == [sums.queue.events(sums.queue._epoch - 2).side.cuda_event]


def test_a_group_that_breaks_launches_no_graph(by_graphs, driver, state, python_calls, monkeypatch):  # noqa: F811
    monkeypatch.setattr(slots, "copy", lambda to, source: None)
    gathers, b = Gathers(state), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    for _ in range((BEFORE + 1) * gather.SLOTS):
        assert plain(state, zeros(8, 64), b).repeated() is not None
    state.broken_word.value = 1  # as another thread has it, after this one has looked
    driver.forget()
    by_graphs.fails()
    assert plain(state, zeros(8, 64), b).repeated() is None
    assert Asked.of(driver) == ([], [])
    assert by_graphs.calls(LAUNCH_GRAPH) == 0


def test_a_queue_goes_over_to_graphs_and_back(driver, state, python_calls, graphs, monkeypatch):  # noqa: F811
    monkeypatch.setattr(slots, "copy", lambda to, source: None)
    gathers, b = Gathers(state), zeros(64, 32)
    place, launched = gathers.queue.flags.flag(0, 0), []
    for use in (False, True, False):
        gathers.queue.use_graphs(use)
        assert not state.repeats
        for _ in range(1 + gather.SLOTS):
            gathers.usual(zeros(8, 64), b)
        graphs.fails()
        driver.forget()
        for _ in range((BEFORE + 1) * gather.SLOTS):
            assert plain(state, zeros(8, 64), b).repeated() is not None
        launched.append(graphs.calls(LAUNCH_GRAPH))
        assert any(one[2] == place for one in driver.operations()) == use
        assert isinstance(gathers.queue._calls[-1].kernel, Marked) == use
    assert launched == [0, gather.SLOTS, 0]


def test_structs_are_those_of_cudas_header():
    """Triton has the header."""
    folder = Path(importlib.import_module("triton").__file__).parent / "backends" / "nvidia" / "include"
    if not (folder / "cuda.h").exists():
        pytest.skip("this Triton has no header of CUDA's driver")
    flags = "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", f"-I{folder}"
    done = subprocess.run(
        [*native_build.compiler(), *flags, Path(__file__).with_name("abi.cpp")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
