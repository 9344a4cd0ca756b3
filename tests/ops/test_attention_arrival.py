"""Keys and values that arrive while attention is under way, on the CPU: late, in any order, and never."""

from __future__ import annotations

import math
import threading

import pytest
import torch

import tilestream as ts
from attention_maths import Call, Case, call_of
from tilestream.plan.policy import cpu_attention


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    from tilestream.plan.attention_planner import plan_attention

    monkeypatch.setattr(cpu_attention, "BLOCK", (16, 16))
    plan_attention.cache_clear()
    yield
    plan_attention.cache_clear()


ARRIVALS = {
    "uniform": lambda: ts.Arrival.uniform(16, 5),
    "odd": lambda: ts.Arrival.uniform(7, 10),
    "ragged": lambda: ts.Arrival.ragged([0, 5, 5, 34, 35, 66]),
}
CASES = {
    "dense": Case((20,), (33, 33), (2, 1), features="causal"),
    "packed": Case((20, 17), (40, 26), (2, 1), features="window", how="packed"),
}


class Producer:
    """Keys and values that are NaN until they are brought, chunk by chunk, by another thread."""

    def __init__(self, call: Call, arrival: ts.Arrival) -> None:
        self.arrival = arrival
        self.rows = [call.tensors[name].reshape(-1, *call.tensors[name].shape[-2:]) for name in ("k", "v")]
        self.source = [x.clone() for x in self.rows]
        for x in self.rows:
            x.fill_(math.nan)

    def bring(self, chunk: int) -> None:
        begin, end = self.arrival.chunks(len(self.rows[0])).range_of(chunk)
        for into, source in zip(self.rows, self.source, strict=True):
            into[begin:end] = source[begin:end]
        self.arrival.signal(chunk)

    def run(self, chunks: list[int]) -> threading.Thread:
        thread = threading.Thread(target=lambda: [self.bring(chunk) for chunk in chunks])
        thread.start()
        return thread


def run(call: Call, arrival: ts.Arrival, **how) -> tuple[torch.Tensor, torch.Tensor]:
    return ts.attention(**call.tensors, **call.options, arrival=arrival, return_lse=True, **how)


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("name", ARRIVALS)
@pytest.mark.parametrize("case", CASES)
def test_chunks_that_come_while_it_computes(case, name, order):
    call, arrival = call_of(CASES[case]), ARRIVALS[name]()
    for epoch in range(2):
        if epoch:
            arrival.advance()
            call = call_of(CASES[case], seed=1)
        producer = Producer(call, arrival)
        chunks = list(range(arrival.num_chunks))
        thread = producer.run(chunks if order == "forward" else chunks[::-1])
        call.check(*run(call, arrival, workers=2, deadline=600))
        thread.join()


def test_the_layout_of_heads_first():
    call, arrival = call_of(CASES["dense"]), ARRIVALS["uniform"]()
    thread = Producer(call, arrival).run(list(range(5)))
    swapped = {name: x.transpose(1, 2) for name, x in call.tensors.items()}
    out, lse = ts.attention(**swapped, causal=True, layout="bhsd", arrival=arrival, return_lse=True)
    call.check(out.transpose(1, 2), lse)
    thread.join()


def test_out_and_words_of_the_callers_own():
    call, words = call_of(CASES["dense"]), torch.ones(5, dtype=torch.int32)
    out = torch.full((2, 20, 2, 16), math.nan)
    for _ in range(2):
        words.fill_(1)
        assert (
            ts.attention(**call.tensors, causal=True, arrival=ts.Arrival.uniform(16, 5, signals=words), out=out) is out
        )
        call.check(out, None)
        assert not words.any(), "zeroed by the call"


def test_a_chunk_that_does_not_come():
    call, arrival = call_of(CASES["dense"]), ARRIVALS["uniform"]()
    producer = Producer(call, arrival)
    for chunk in (0, 1, 3, 4):
        producer.bring(chunk)
    out = torch.full((2, 20, 2, 16), math.nan)
    with pytest.raises(ts.ArrivalTimeout, match="attention: arrival's chunk 2 did not arrive within the deadline"):
        ts.attention(**call.tensors, causal=True, arrival=arrival, out=out, deadline=0.2, workers=2)
    assert out.isnan().any(), "the tiles that read chunk 2"


def test_what_no_query_sees_is_not_waited_for():
    """Top left, more keys than queries: no row reads the last chunks."""
    call, arrival = call_of(Case((16,), (66,), (2, 1), features="top left")), ARRIVALS["uniform"]()
    producer = Producer(call, arrival)
    producer.bring(0)
    call.check(*run(call, arrival, deadline=600))


def test_a_plan_knows_of_it():
    text = ts.attention_plan(20, 33, batch=2, head_dim=16, arrival=ARRIVALS["odd"](), workers=2).explain()
    assert "keys and values in 10 chunks of 7 rows; a tile waits for the chunks it reads" in text
