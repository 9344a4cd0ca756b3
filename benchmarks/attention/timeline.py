"""The timeline of one causal call of attention: who did which tile when, as a trace for https://ui.perfetto.dev.

The call is traced `CALLS` times, and the trace of median length is kept. The answer is compared with that of the same
call without a trace, bit by bit, and each tile must be there once.
"""

from __future__ import annotations

import torch

import tilestream as ts
from benchmarks.attention.bench import Run, Shape, operands_of

#: 16k tokens in one sequence, as a chunk of a prefill has them: 32 query heads on 8 heads of keys.
SHAPE = Shape(128, 32, 16384, True, 8)
CALLS = 5


def recorded(run: Run) -> ts.trace.LaunchTrace:
    """The trace of a call of median length.

    Raises
    ------
    AssertionError
        If an answer is another than without a trace, or a tile was not done once.
    """
    q, k, v = operands_of(SHAPE)
    plan = ts.attention_plan(
        SHAPE.length, heads_q=SHAPE.heads, heads_kv=SHAPE.heads_kv, head_dim=SHAPE.dim, causal=True, device="cuda"
    )
    right = ts.attention(q, k, v, causal=True)
    with ts.trace.record():  # compiled
        ts.attention(q, k, v, causal=True)
    with ts.trace.record() as recorder:
        answers = [ts.attention(q, k, v, causal=True) for _ in range(CALLS)]
    ts.check()
    again = ts.attention(q, k, v, causal=True)
    assert torch.equal(again, right), f"the same call, without a trace: {different(again, right)}"
    for at, (launch, out) in enumerate(zip(recorder.launches, answers, strict=True)):
        assert torch.equal(out, right), f"call {at}, traced: {different(out, right)}"
        assert not (wrong := ts.trace.faults(launch, plan.schedule)), wrong
    whole = run.time({"": lambda: ts.attention(q, k, v, causal=True)})[""]
    found = sorted(recorder.launches, key=lambda launch: launch.end - launch.begin)[CALLS // 2]
    found.label = (
        f"causal, {SHAPE.length} tokens, D {SHAPE.dim}, heads {SHAPE.heads}/{SHAPE.heads_kv}, "
        f"{torch.cuda.get_device_name()}: {plan.label}"
    )
    print(f"{found.label}: {1e3 * (found.end - found.begin):.3f} ms, {whole:.3f} without a trace")
    return found


def different(x: torch.Tensor, y: torch.Tensor) -> str:
    """Where ``[B, S, H, D]`` differ, and by how much."""
    where = (x != y).nonzero()
    (_, first, *_), (_, last, *_) = where[where[:, 1].argmin()].tolist(), where[where[:, 1].argmax()].tolist()
    heads, most = sorted(set(where[:, 2].tolist())), (x.float() - y.float()).abs().max().item()
    return (
        f"{len(where)} of {x.numel()} elements differ, by {most:.3g} at most, of rows {first} to {last}, heads {heads}"
        f"; {int(x.isnan().sum())} and {int(y.isnan().sum())} are NaN"
    )


def timeline(run: Run) -> None:
    run.export(recorded(run), "trace_attention")
