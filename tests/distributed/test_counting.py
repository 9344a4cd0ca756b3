"""The calls that the device counts: captured ones, and the first eager one of a kind, which makes what they need."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from tilestream.distributed import all_gather, all_reduce, copy_engines, gpu_reduce_scatter, graph_calls, one_shot
from tilestream.distributed import reduce_scatter as sums
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.repeats import PlainCall, Repeat
from tilestream.distributed.request import Request

A, B = torch.zeros(8, 4, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.bfloat16)
#: By op: its module, and the functions that issue a call which the device, or the host, counts.
OPS = {
    "all_gather_matmul": (
        all_gather, (graph_calls, "gather_matmul"), (copy_engines, "gather_matmul"), (A, [torch.zeros(16, 2)])
    ),
    "matmul_reduce_scatter": (
        sums, (graph_calls, "matmul_scatter"), (gpu_reduce_scatter, "matmul_scatter"), torch.zeros(4, 2)
    ),
    "matmul_all_reduce": (all_reduce, (graph_calls, "matmul_reduce"), (one_shot, "matmul_reduce"), torch.zeros(8, 2)),
}  # fmt: skip


def plan(handshake: bytes, counted: bool, first=None):
    return types.SimpleNamespace(
        transport="symmetric memory", fused=True, counted=counted, first=first, handshake=handshake, chunks=1,
        decision=types.SimpleNamespace(library=False),
    )  # fmt: skip


@pytest.fixture
def state():
    decided: dict[object, object] = {}

    @contextlib.contextmanager
    def call():
        yield

    return types.SimpleNamespace(
        rank=0, world=2, agreed=set(), prepared=set(), unreachable="", capture=lambda x: 0, timeout=lambda kind: 1.0,
        check=lambda: None, call=call, decided=decided.get, decide=lambda key, found: decided.setdefault(key, found),
        backend=lambda kind: "nccl",
    )  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_the_first_eager_call_of_a_kind_is_made_by_the_device_before(monkeypatch, state, op):
    """For captures. Its result is the host's, as that of all others, whose kernels it has loaded, too."""
    module, by_device, by_host, made = OPS[op]
    issued: list[tuple[str, object]] = []
    learns: list[object] = []

    def recorder(how: str):
        def issue(state, plan, *args):
            issued.append((how, plan))
            learns.append(args[-1])
            state.prepared.add(plan.handshake)
            return made

        return issue

    first = plan(b"counted", True)
    eager = plan(b"by the host", False, first)
    monkeypatch.setattr(*by_device, recorder("device"))
    monkeypatch.setattr(*by_host, recorder("host"))
    monkeypatch.setattr(module, "plan_of", lambda state, request, *args, **more: eager)
    monkeypatch.setattr(module, "connected_plan", lambda state, plan, *args: plan)
    request = Request(op, A, [B], [None], ["none"], None, [None], deadline=1.0)
    if op == "matmul_all_reduce":
        monkeypatch.setattr(module, "_decide", lambda *args: module._Decided((eager,), A.dtype, A.dtype, False))
    call = PlainCall(state, (), A, (B,), 0, 1.0)
    for _ in range(3):
        module.run([state] if op == "matmul_all_reduce" else state, request, plain=call)
    assert issued == [("device", first), *[("host", eager)] * 3]
    assert learns[1:] == [call] * 3, "the first, too"


def test_kinds_that_are_made_again_are_not_repeated():
    """A repeat would make nothing for a capture, and peers without one make a first call."""
    state = object.__new__(GroupState)
    state.prepared, state.repeats, state.plans, state._decided = {b"kind"}, {"key": object()}, {"key": 1}, {"key": 1}
    state.unprepare()
    assert not any((state.prepared, state.repeats, state.plans, state._decided))


@pytest.mark.parametrize("op", OPS)
def test_a_capture_prepares_no_repeat(monkeypatch, state, op):
    """Else the eager calls behind an unfused capture would repeat it, and never make what a capture needs."""
    module, by_device, by_host, _ = OPS[op]
    kept: list[object] = []
    for where in (by_device, by_host):
        monkeypatch.setattr(*where, lambda *args: pytest.fail("it is unfused"))
    monkeypatch.setattr(Repeat, "of", lambda call, *args: kept.append(call))
    unfused = plan(b"unfused", False)
    unfused.transport, unfused.fused = "collective", False
    monkeypatch.setattr(module, "plan_of", lambda state, request, *args, **more: unfused)
    monkeypatch.setattr(module, "connected_plan", lambda state, plan, *args: plan)
    monkeypatch.setattr(module, "agree", lambda *args: None)
    monkeypatch.setattr(all_gather, "all_gather", lambda *args: None)
    monkeypatch.setattr(sums, "reduce_scatter", lambda state, parts: parts[0])
    monkeypatch.setattr(all_reduce.collective, "all_reduce", lambda state, x: x)
    if op == "matmul_all_reduce":
        monkeypatch.setattr(module, "_decide", lambda *args: module._Decided((unfused,), A.dtype, A.dtype, False))
    state.buffer = lambda name, shape, dtype, device: torch.zeros(shape, dtype=dtype)
    request = Request(op, A, [B], [None], ["none"], None, [None], deadline=1.0)
    asked, plain = [], PlainCall(state, (), A, (B,), 0, 1.0)
    for capture in (0, 1):
        state.capture = lambda x, capture=capture: capture
        kept.clear()
        module.run([state] if op == "matmul_all_reduce" else state, request, plain=plain)
        asked.append(list(kept))
    assert asked == [[plain], []]
