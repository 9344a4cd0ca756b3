"""Which way a mixture of experts on GPUs goes: kernels that push rows, or all-to-alls. No GPU."""

from __future__ import annotations

import contextlib
import importlib
import types

import pytest
import torch

from tilestream.distributed import graph_experts

#: The module; the package has the op by that name.
moe = importlib.import_module("tilestream.distributed.moe")
X = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))


@pytest.fixture
def seen(monkeypatch):
    """What a call does, in order; ranks reach each other where ``reach`` is empty."""
    found = types.SimpleNamespace(steps=[], fused=True, reach="", connected=False)

    def planned(op, *args):
        state = types.SimpleNamespace(connected=found.connected, call=contextlib.nullcontext)
        found.state = state
        return state, types.SimpleNamespace(fused=found.fused), 7.0

    def connect(state, device):
        found.steps.append("connect")
        return found.reach

    monkeypatch.setattr(moe, "_planned", planned)
    monkeypatch.setattr(moe, "agree", lambda state, plan, device: found.steps.append("agree"))
    monkeypatch.setattr(moe, "connect", connect)
    monkeypatch.setattr(graph_experts, "mix", lambda *args: found.steps.append(("mix", args[-2])) or "result")
    return found


def pushed():
    return moe._pushed(X, None, None, None, ("a group", "auto", -1.0, 0, 4096))


def test_ranks_compare_their_calls_and_connect_once(seen):
    assert pushed() == "result"
    assert seen.steps == ["agree", "connect", ("mix", 7.0)]
    assert seen.state.connected
    seen.steps.clear()
    seen.connected = True
    assert pushed() == "result"
    assert seen.steps == [("mix", 7.0)]


def test_ranks_that_do_not_reach_each_other_go_by_all_to_all(seen):
    seen.reach = "no peer access from GPU 0 to 1"
    assert pushed() is None
    assert seen.steps == ["agree", "connect"]


def test_unfused_calls_and_those_on_the_cpu_are_not_pushed(seen):
    seen.fused = False
    assert pushed() is None
    assert moe._pushed(torch.empty(1, 1), None, None, None, ()) is None
    assert not seen.steps


def test_one_kernel_performs_an_operation_of_every_rank_once():
    made = []
    first = graph_experts._once(lambda op: made.append(op) or 1)
    assert [first(rank) for rank in range(3)] == [1, 1, 1]
    assert made == [0]


def test_own_rows_have_as_many_workers_as_the_others_and_all_are_within_the_limit():
    for bound, want in ((132, (24, 132)), (64, (24, 64)), (25, (12, 25)), (16, (8, 16)), (3, (1, 3)), (1, (1, 2))):
        pushers, alone = graph_experts.workers_under(bound, 24, 132)
        assert (pushers, alone) == want
        assert 1 <= pushers <= alone - pushers
    assert graph_experts.workers_under(1, 1, 1) == (1, 2), "a rank's own rows have a worker of their own"


def test_a_layout_is_prepared_outside_a_capture(monkeypatch):
    pytest.importorskip("triton")

    class Reached(Exception):
        pass

    def prepared(*_):
        raise Reached

    queue = types.SimpleNamespace(check=lambda: None, _prepared={}, op="moe", prepared=prepared, _prepare=None)
    for capturing, ends in ((False, Reached), (True, RuntimeError)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda found=capturing: found)
        with pytest.raises(ends):
            graph_experts.GraphExperts.mix(queue, "a layout", 1, 2, X, None, None, None, 1.0, 1)
