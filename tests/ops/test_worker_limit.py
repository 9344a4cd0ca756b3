"""`tilestream.worker_limit` as users meet it: in every op, in threads, compiled, in the backward pass."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
import torch
import torch._dynamo

import tilestream as ts
from tilestream.ops import attention_execute, execute
from tilestream.plan import limit
from tilestream.trace import record


@pytest.fixture(autouse=True)
def _small(small_tiles, monkeypatch):
    """Many small tiles; more threads than this machine may have, so that there is something to limit."""
    monkeypatch.delenv(limit.ENVIRONMENT, raising=False)
    limit._of_environment.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)
    limit._of_environment.cache_clear()


def operands():
    return torch.randn(100, 40), torch.randn(40, 90)


def workers_of(call) -> list[int]:
    """Workers of each launch that ``call`` makes; the result is checked."""
    a, b = operands()
    with record() as recorder:
        torch.testing.assert_close(call(a, b), a @ b)
    return [launch.workers for launch in recorder.launches]


@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
@pytest.mark.parametrize("asked", [None, 1, 2, 3, 9])
def test_launches_have_no_more_workers_than_the_limit(schedule, asked):
    def call(a, b):
        return ts.mm(a, b, schedule=schedule, workers=asked)

    for bound in (1, 2, 3, 8):
        with ts.worker_limit(bound):
            assert workers_of(call) == [min(bound, asked or 4)]
    assert workers_of(call) == [asked or 4]


def test_without_workers_torchs_own_threads_are_not_taken():
    """The plan that runs in the calling thread uses all of torch's."""
    with ts.worker_limit(2):
        made = ts.plan(8, 8, 8)
    assert (made.variant, made.workers) == ("workers", 2)
    assert "the limit is 2" in made.explain()
    with ts.worker_limit(4):
        assert ts.plan(8, 8, 8).variant == "inline"


def test_blocks_nest_and_the_tightest_counts():
    limit = ts.worker_limit(3)
    with limit:
        with ts.worker_limit(2), limit:
            assert workers_of(ts.matmul) == [2]
        with ts.worker_limit(100):
            assert workers_of(ts.matmul) == [3], "what the block around has set aside is not given away"
    with pytest.raises(ZeroDivisionError), ts.worker_limit(1):
        raise ZeroDivisionError
    assert ts.plan(8, 8, 8).variant == "inline"


@pytest.mark.parametrize("block", [ts.worker_limit(3), ts.invariant()], ids=["workers", "invariance"])
def test_one_object_stands_in_blocks_of_several_tasks_at_once(block):
    async def task(begun: asyncio.Event, others: asyncio.Event) -> tuple[int, int]:
        with block:
            begun.set()
            await others.wait()
            inside = limit.limit()
        await asyncio.sleep(0)
        return inside, limit.limit()

    async def both() -> list[tuple[int, int]]:
        one, other = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(task(one, other), task(other, one))

    assert asyncio.run(both()) == [(block._bound, 0)] * 2
    assert limit.limit() == 0


@pytest.mark.parametrize("count", [0, -1, 1.5, "4", None, True])
def test_a_limit_is_a_positive_whole_number(count):
    with pytest.raises(ValueError, match=r"worker_limit\(.*\): the number of workers is a positive whole number"):
        ts.worker_limit(count)


def test_other_threads_have_their_own():
    seen = []
    with ts.worker_limit(1):
        other = threading.Thread(target=lambda: seen.append(ts.plan(64, 64, 64, schedule="dynamic").workers))
        other.start()
        other.join(300)
    assert seen == [4]


def test_a_frozen_plan_is_refused_where_it_would_break_the_limit():
    a, b = operands()
    made = ts.plan(100, 90, 40, workers=3)
    with ts.worker_limit(2), pytest.raises(ValueError, match="the plan has 3 workers, and the limit is 2"):
        made.run(a, b)
    with ts.worker_limit(3):
        torch.testing.assert_close(made.run(a, b), a @ b)
    inline = ts.plan(8, 8, 8)
    with ts.worker_limit(3), pytest.raises(ValueError, match="the plan has 4 workers"):
        inline.run(torch.ones(8, 8), torch.ones(8, 8))


def test_the_environment(tmp_path):
    program = (
        "import torch, tilestream as ts; torch.set_num_threads(4)\n"
        "print(ts.plan(64, 64, 64, workers=3).workers, ts.plan(64, 64, 64).workers)\n"
        "print(torch.equal(ts.mm(torch.eye(9), torch.eye(9)), torch.eye(9)))"
    )

    def run(value):
        import os

        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False,
            env={**os.environ, "TILESTREAM_WORKERS": value},
        )  # fmt: skip

    assert run("2").stdout.split() == ["2", "2", "True"]
    assert "TILESTREAM_WORKERS='none': it must be a positive whole number" in run("none").stderr


# The registered ops' argument -----------------------------------------------------------------------------------------


class Products:
    """`tilestream.mm`, and how its registered op is called: with what it needs, and a limit."""

    module, planner = execute, "plan_problem"

    def __init__(self) -> None:
        self.tensors = operands()

    def public(self, **how):
        return ts.mm(*self.tensors, **how)

    def registered(self, *limit):
        end = (None, None, 1.0, 1.0, "none", None, "dynamic", 0, None, None, True)
        return torch.ops.tilestream.gemm(*self.tensors, *end, *limit)


class Attentions:
    """The same of `tilestream.attention`."""

    module, planner = attention_execute, "plan_attention"

    def __init__(self) -> None:
        self.tensors = tuple(torch.randn(1, 600, 4, 8) for _ in range(3))

    def public(self, **how):
        return ts.attention(*self.tensors, schedule="dynamic", **how)

    def registered(self, *limit):
        end = (False, "bottom_right", -1, -1, 0.0, 0.3, 0, 0, "bshd", False, "dynamic", 0, 0)
        return torch.ops.tilestream.attention(*self.tensors, *[None] * 8, *end, *limit)[0]


@pytest.fixture(params=[Products, Attentions], ids=lambda kind: kind.__name__)
def op(request):
    return request.param()


@pytest.fixture
def seen(op, monkeypatch):
    """The limits that launches were planned with, and the workers that they got."""
    found, plan = [], getattr(op.module, op.planner)

    def spy(*args, limit=0, **how):
        made = plan(*args, limit=limit, **how)
        found.append((limit, made.schedule.workers))
        return made

    monkeypatch.setattr(op.module, op.planner, spy)
    return found


def limits(seen) -> list[int]:
    return [limit for limit, _ in seen]


def test_it_is_an_argument_of_the_op(op, seen):
    op.registered(2)
    op.registered()
    with ts.worker_limit(3):
        op.registered(2)
        op.registered(7)
    assert limits(seen) == [2, 0, 2, 3]


def test_the_backward_pass_keeps_to_the_forwards_limit(op, seen):
    for x in op.tensors:
        x.requires_grad_()
    if isinstance(op, Products):
        with ts.worker_limit(2):
            y = ts.matmul(*op.tensors, activation="gelu")
    else:
        y = op.registered(2)  # whose backward pass launches nothing
    y.sum().backward()
    # The product, the activation's input once more, and both gradients.
    assert seen == [(2, 2)] * (4 if isinstance(op, Products) else 1)


def test_compiled(op, seen):
    torch._dynamo.reset()

    def inside(bound):
        with ts.worker_limit(bound), ts.worker_limit(7):
            x = op.public()
        return x + op.public()

    compiled = torch.compile(inside, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(3), 2 * op.public())
    assert limits(seen) == [3, 0, 0]
    seen.clear()
    with ts.worker_limit(2):  # around it: nothing is compiled anew
        compiled(3)
    assert limits(seen) == [2, 2]
    torch._dynamo.reset()


def test_one_object_stands_in_nested_blocks_of_a_compiled_function():
    torch._dynamo.reset()
    asked: list[list[int]] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        asked.append([node.args[-1] for node in graph.graph.nodes if node.op == "call_function" and node.args[3:]])
        return graph

    @torch.compile(backend=keep, fullgraph=True)
    def products(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        limit = ts.worker_limit(3)
        with limit:
            with ts.worker_limit(2), limit:
                inner = ts.mm(a, b)
            outer = ts.mm(a, b)
        return inner, outer, ts.mm(a, b)

    for _ in range(2):
        products(*operands())
    assert asked == [[2, 3, 0]], "and nothing is compiled anew"


@pytest.mark.parametrize("op", [Attentions], indirect=True)
def test_attention_keeps_to_it(op, seen):
    q, k, v = op.tensors
    with ts.worker_limit(2):
        out = op.public()
        op.public(workers=3, out=torch.empty_like(q))
        arrival = ts.Arrival.uniform(300, 2)
        arrival.signal(0)
        arrival.signal(1)
        ts.attention(q, k, v, arrival=arrival)
    torch.testing.assert_close(out, op.public())
    assert seen == [(2, 2)] * 3 + [(0, 4)]


def test_attentions_plan_says_so():
    with ts.worker_limit(2):
        made = ts.attention_plan(600, heads_q=4, head_dim=8, workers=3)
        on_gpu = ts.attention_plan(4096, heads_q=4, device="h100")
        assert ts.attention_plan(1, head_dim=8).variant == "workers", "in the calling thread torch uses all its threads"
    assert (made.schedule.workers, on_gpu.schedule.workers) == (2, 2)
    assert "3 workers: the limit is 2: worker_limit, or TILESTREAM_WORKERS" in made.explain()
    assert "132 workers: the limit is 2" in on_gpu.explain()
