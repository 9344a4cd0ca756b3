"""Unfused collectives on the caller's stream: NCCL then returns no work to wait for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tilestream.distributed import collective
from tilestream.distributed.shards import ScaledRows


class Work:
    def __init__(self):
        self.waited = 0

    def wait(self):
        self.waited += 1


class Group:
    """Two ranks with the same data: like NCCL on the caller's stream, or with ``work``."""

    def __init__(self, work):
        self.work, self.asked = work, []

    def _allgather_base(self, got, sent, options):
        got.view(2, -1).copy_(sent)
        return self._done(options)

    def allreduce(self, tensors, options):
        tensors[0].mul_(2)
        return self._done(options)

    def _reduce_scatter_base(self, got, sent, options):
        got.copy_(sent.view(2, -1)[0] * 2)
        return self._done(options)

    def _done(self, options):
        self.asked.append(options.asyncOp)
        return self.work


@pytest.mark.parametrize("work", [None, Work()], ids=["no work", "work"])
def test_collectives_run_on_the_callers_stream(monkeypatch, work):
    monkeypatch.setattr(collective, "agree", lambda *_: None)
    state = SimpleNamespace(group=Group(work), world=2)
    x = torch.arange(12.0).view(1, 3, 4)
    whole = ScaledRows(torch.zeros(1, 2, 3, 4), None)
    collective.all_gather(state, ScaledRows(x, None), whole)
    assert torch.equal(whole.data, torch.stack([x, x], 1))
    assert torch.equal(collective.reduce_scatter(state, torch.stack([x, x + 1])), x * 2)
    assert torch.equal(collective.all_reduce(state, x.clone()), x * 2)
    assert state.group.asked == [False] * 3
    assert work is None or work.waited == 3
