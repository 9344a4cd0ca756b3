"""What CUDA's driver is asked about a graph under capture, and what it refuses."""

# ruff: noqa: E501, N802, N815  (messages in one piece, to be searched for; the driver's own names)

from __future__ import annotations

import ctypes
import functools

import pytest

from tilestream.runtime import driver, graphs
from tilestream.runtime.driver.cuda import Cuda

STREAM, GRAPH, OBJECT = 0x51, 0x6A, 0x0B


class Library:
    """A library of CUDA's driver: one graph, whose nodes behind the stream are ``nodes``."""

    def __init__(self) -> None:
        self.nodes = (0xA0, 0xB0)
        self.calls: list[tuple[object, ...]] = []
        self.fails: dict[str, int] = {}

    def find(self, name: str, arguments: tuple[type, ...]):
        def function(*given) -> int:
            assert len(given) == len(arguments)
            return self.fails.get(name) or getattr(self, name)(*given)

        return function

    def cuStreamGetCaptureInfo_v2(self, stream, status, number, graph, nodes, count) -> int:
        assert (stream, number) == (STREAM, None)
        self.held = (ctypes.c_void_p * len(self.nodes))(*self.nodes)  # the driver's own, valid until its next call
        ctypes.c_void_p.from_address(graph).value = GRAPH if self.nodes else None
        ctypes.c_void_p.from_address(nodes).value = ctypes.addressof(self.held)
        ctypes.c_size_t.from_address(count).value = len(self.nodes)
        return 0

    def cuStreamUpdateCaptureDependencies(self, stream, nodes, count, flags) -> int:
        self.calls.append(("follow", stream, tuple(nodes[i] for i in range(count)), flags))
        return 0

    def cuUserObjectCreate(self, made, argument, function, references, flags) -> int:
        made._obj.value = OBJECT
        self.calls.append(("create", argument, function, references, flags))
        return 0

    def cuGraphRetainUserObject(self, graph, held, references, flags) -> int:
        self.calls.append(("retain", graph, held.value, references, flags))
        return 0

    @staticmethod
    def name(code, text) -> int:
        text._obj.value = b"CUDA_ERROR_NOT_SUPPORTED"
        return 0

    cuGetErrorName = cuGetErrorString = name


@pytest.fixture
def library(monkeypatch):
    made = Library()
    found = Cuda(made.find)
    monkeypatch.setattr(driver, "current", lambda: found)
    monkeypatch.setattr(graphs, "_kept", {})
    return made


def test_a_branch_goes_back_to_where_it_began(library):
    with graphs.Branch(STREAM, behind=(0xC0, 0xC0)) as branch:
        library.nodes = (0xD0,)
    assert (branch.begin, branch.end) == ((0xA0, 0xB0), (0xD0,))
    assert library.calls == [("follow", STREAM, (0xC0,), 0), ("follow", STREAM, (0xA0, 0xB0), 1)]


@pytest.mark.parametrize("lost", [False, True])
def test_a_branch_that_fails_goes_back_too_and_says_why_it_failed(library, lost):
    def copy() -> None:
        library.fails = {"cuStreamGetCaptureInfo_v2": 901} if lost else {}
        raise RuntimeError("the driver refused the copy")

    with pytest.raises(RuntimeError, match="the copy"), graphs.Branch(STREAM):
        copy()
    assert library.calls == ([] if lost else [("follow", STREAM, (0xA0, 0xB0), 1)])


def test_a_graph_keeps_what_it_is_given_until_it_is_gone(library):
    graphs.keep(STREAM, held := [1])
    create, retain = library.calls
    assert retain == ("retain", GRAPH, OBJECT, 1, 1)
    _, argument, function, references, flags = create
    assert (references, flags, argument) == (1, 1, *graphs._kept)
    graphs.let_go()
    assert list(graphs._kept.values()) == [(held,)]
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)  # as the driver does it, in a thread of its own
    graphs.let_go()
    assert not graphs._kept


@pytest.mark.parametrize("what", ["cuUserObjectCreate", "cuGraphRetainUserObject"])
def test_without_the_drivers_word_it_is_kept_for_ever(library, what):
    library.fails = {what: 801}
    graphs.keep(STREAM, [1])
    graphs.let_go()
    assert len(graphs._kept) == 1


@pytest.mark.parametrize(
    ("what", "ask", "message"),
    [
        ("cuStreamGetCaptureInfo_v2", driver.captured_nodes, "does not say what is captured"),
        ("cuStreamUpdateCaptureDependencies", functools.partial(driver.follow_nodes, nodes=(1,), alone=False), "refused another order in the graph that is captured"),
        ("cuUserObjectCreate", functools.partial(driver.call_when_gone, function=0, argument=0), "does not say when a graph is gone"),
    ],
)  # fmt: skip
def test_what_the_driver_refuses(library, what, ask, message):
    library.fails = {what: 801}
    with pytest.raises(RuntimeError, match=f"^the driver {message}: CUDA_ERROR_NOT_SUPPORTED"):
        ask(STREAM)


def test_a_stream_that_is_not_captured_has_no_nodes(library):
    library.nodes = ()
    with pytest.raises(RuntimeError, match="does not say what is captured"):
        driver.captured_nodes(STREAM)
