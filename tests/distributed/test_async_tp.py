"""The form of torch's fused ops in CUDA graphs: those that a caller captures, and those of torch's compiler."""

from __future__ import annotations

import contextlib
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tilestream.distributed.counting import VARIABLE, counting

module = importlib.import_module("tilestream.distributed.async_tp")  # the package has the function by that name
X = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
THEIRS, OURS = "theirs", "ours"


@pytest.fixture
def machine(monkeypatch):
    """A GPU on which a stream is captured, that of torch's compiler or another, with compilers' graphs or without."""

    def made(counts="captured", capturing=True, stream=THEIRS, managed=True, imported=True):
        monkeypatch.setenv(VARIABLE, counts)
        counting.cache_clear()
        monkeypatch.setattr(module, "is_capturing", lambda device: capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        trees = SimpleNamespace(
            get_manager=lambda index, create_if_none_exists: SimpleNamespace(stream=THEIRS) if managed else None
        )
        monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees if imported else None)

    yield made
    counting.cache_clear()


@pytest.mark.parametrize(
    ("how", "form"),
    [
        ({}, "unfused"), ({"counts": ""}, "unfused"), ({"stream": OURS}, "auto"), ({"capturing": False}, "auto"),
        ({"managed": False}, "auto"), ({"imported": False}, "auto"), ({"counts": "1"}, "auto"),
    ],
    ids=str,
)  # fmt: skip
def test_torchs_ops_are_unfused_in_the_graphs_of_its_compiler_alone(machine, how, form):
    machine(**how)
    assert module._form(X) == form


def test_a_thread_without_graphs_of_torchs_compiler_captures_by_hand(machine, monkeypatch):
    """Torch 2.11 keeps their managers by thread, and asserts that a thread has some."""
    import torch._inductor.cudagraph_trees as trees

    machine()
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(module._form, X).result() == "auto"


def test_nothing_is_asked_of_graphs_on_the_cpu(machine, monkeypatch):
    machine()
    monkeypatch.setattr(module, "is_capturing", lambda device: pytest.fail("there is no graph"))
    assert module._form(SimpleNamespace(is_cuda=False)) == "auto"


def test_torchs_compiler_cuts_its_graphs_at_its_fused_ops(monkeypatch):
    """And at their results, each of which the graph behind gets by itself; with a handle, and not without one."""
    if not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("this torch does not cut its graphs")
    from torch._inductor import ir
    from torch._inductor.utils import is_cudagraph_unsafe_op
    from torch.distributed import _symmetric_memory as symmetric

    monkeypatch.setattr(module, "_open", {})
    monkeypatch.setattr(module, "state_of", lambda op, group: SimpleNamespace(name="tp"))
    monkeypatch.setattr(symmetric, "enable_symm_mem_for_group", lambda name: None)
    graph = torch.fx.Graph()
    nodes = [graph.call_function(getattr(torch.ops.symm_mem, op).default) for op in module._IMPLEMENTATIONS]

    def left_out() -> set[bool]:
        found = set()
        for kind in (ir.FallbackKernel, ir.MultiOutput):
            for node in nodes:
                kernel = object.__new__(kind)
                object.__setattr__(kernel, "fx_node", node)
                found.add(is_cudagraph_unsafe_op(kernel))
        return found

    before = left_out()
    with contextlib.closing(module.async_tp()):
        assert left_out() == {True}
    assert left_out() == before == {False}
