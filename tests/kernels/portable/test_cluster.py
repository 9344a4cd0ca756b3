"""The exchange of a cluster's sums in Triton's interpreter, with its instructions by hand.

CTAs run one after the other. So all run once to write to each other, and then once more for each that reads.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tilestream.core.exchange import CLUSTERS, PAD, room
from tilestream.kernels.portable import cluster


@triton.jit
def rows_of_sum(accs, out, C: tl.constexpr):
    ROWS: tl.constexpr = C.BLOCK_M // C.CLUSTER
    part, columns = tl.program_id(0), tl.arange(0, C.BLOCK_N)[None, :]
    at = (part * C.BLOCK_M + tl.arange(0, C.BLOCK_M)[:, None]) * C.BLOCK_N + columns
    x = cluster.summed(tl.load(accs + at), part, C)
    tl.store(out + (part * ROWS + tl.arange(0, ROWS)[:, None]) * C.BLOCK_N + columns, x)


class Memories:
    """The shared memories of a cluster's CTAs, by address; and who reads."""

    def __init__(self, begins: int) -> None:
        self.begins, self.of, self.reader = begins, {}, 0

    def send(self, acc, at, owner) -> None:
        values, places, owners = np.broadcast_arrays(*(x.handle.data for x in (acc, at, owner)))
        for value, place, one in zip(values.flat, places.flat, owners.flat, strict=True):
            before = self.of.setdefault((int(one), int(place)), value)
            assert before == value, "two CTAs write to one place"

    def fetch(self, at, fetched):
        places = at.handle.data
        found = [self.of.get((self.reader, int(place)), np.nan) for place in places.flat]
        data = np.array(found, np.float32).reshape(places.shape)
        return tl.tensor(TensorHandle(data, tl.float32), tl.block_type(tl.float32, list(places.shape)))


@pytest.mark.parametrize("size", CLUSTERS)
@pytest.mark.parametrize("tile", [(16, 32), (64, 16), (64, 128)], ids=str)
def test_each_cta_has_its_rows_of_the_sum_in_the_order_of_k(tile, size, monkeypatch):
    rows, columns = tile
    memories, config = Memories(4096), SimpleNamespace(BLOCK_M=rows, BLOCK_N=columns, CLUSTER=size, FETCHED=4)
    for name in ("await_all", "meet"):
        monkeypatch.setattr(cluster, name, lambda: None)
    begins = tl.tensor(TensorHandle(np.array([memories.begins], np.int32), tl.int32), tl.int32)
    monkeypatch.setattr(cluster, "own_room", lambda size: begins)
    monkeypatch.setattr(cluster, "send", memories.send)
    monkeypatch.setattr(cluster, "fetch", memories.fetch)
    accs, out = torch.randn(size, rows, columns), torch.full((rows, columns), float("nan"))
    whole, each = out.clone(), rows // size
    for reader in (0, *range(size)):
        memories.reader = reader
        rows_of_sum[(size,)](accs, out, config)
        whole[reader * each : (reader + 1) * each] = out[reader * each : (reader + 1) * each]
    places = [place for _, place in memories.of]
    assert len(memories.of) == size * rows * columns
    assert memories.begins <= min(places)
    assert max(places) + 4 <= memories.begins + 4 * rows * (columns + PAD) <= memories.begins + room(rows, columns)
    want = accs[0].clone()
    for acc in accs[1:]:
        want += acc
    assert torch.equal(whole, want)
