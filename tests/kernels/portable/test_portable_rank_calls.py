"""The kernels around a call between ranks, in Triton's interpreter: two and three ranks' words, step by step."""

from __future__ import annotations

import pytest
import torch

from tilestream.core.error_record import EXPIRED, QUARANTINED, Record
from tilestream.core.protocols.replay import BROKEN, COUNT, MARKS, VOID, control_words, form_number, stamp
from tilestream.launch.portable import rank_calls as launch
from tilestream.runtime.channel import Channel

CHUNKS = 12


class Ranks:
    """The words of all ranks, each rank with an error channel of its own."""

    def __init__(self, world: int, patch: pytest.MonkeyPatch) -> None:
        self.world, self._patch = world, patch
        self.signals = [torch.zeros(CHUNKS, dtype=torch.int32) for _ in range(world)]
        self.control = [torch.zeros(control_words(world), dtype=torch.int32) for _ in range(world)]
        self.channels = [Channel(torch.device("cpu")) for _ in range(world)]
        self.places = torch.tensor(
            [*(x.data_ptr() for x in self.control), *(x[BROKEN:].data_ptr() for x in self.control)]
        )

    def of(self, rank: int) -> launch.SlotWords:
        channel = self.channels[rank]
        self._patch.setattr(launch, "records_of", lambda device: (channel.records, channel.claims))
        return launch.SlotWords(
            self.signals[rank], self.control[rank], self.places, rank, self.world, "all_gather_matmul", 40 + rank
        )

    def broken(self) -> list[int]:
        return [int(x[BROKEN]) for x in self.control]

    def marks(self, rank: int, call: int) -> None:
        self.control[rank][MARKS : MARKS + self.world] = call

    def records(self, rank: int) -> list[Record]:
        found = []
        while (taken := self.channels[rank].take()) is not None:
            found.append(taken[1])
        return found


@pytest.fixture(params=[2, 3])
def ranks(request, monkeypatch):
    return Ranks(request.param, monkeypatch)


def test_a_call_is_counted_and_its_own_chunks_are_signalled(ranks):
    world = ranks.world
    for call in (1, 2, 3):
        launch.begin_call(ranks.of(1), 20.0, 2, 2)
        assert int(ranks.control[1][COUNT]) == call
        own = [(batch * world + 1) * 2 + part for batch in range(2) for part in range(2)]
        assert ranks.signals[1].nonzero().flatten().tolist() == own
        ranks.signals[1].zero_()
        ranks.control[1][MARKS + world :] = call  # every peer has read the rows of this call
    assert ranks.broken() == [0] * world
    assert not ranks.records(1)


def test_counts_are_compared_cyclically(ranks):
    last = 2**31 - 1
    ranks.control[0][COUNT] = last
    ranks.control[0][MARKS + ranks.world :] = last
    launch.begin_call(ranks.of(0), 20.0, 0, 1)
    assert int(ranks.control[0][COUNT]) == -(2**31)
    ranks.control[0][MARKS + ranks.world :] = -(2**31)
    launch.begin_call(ranks.of(0), 20.0, 0, 1)
    assert ranks.broken() == [0] * ranks.world


def test_a_peer_that_does_not_read_breaks_the_group_on_every_rank(ranks):
    launch.begin_call(ranks.of(0), 20.0, 1, 1)
    ranks.control[0][MARKS + ranks.world : MARKS + 2 * ranks.world - 1] = 1  # all but the last
    launch.begin_call(ranks.of(0), 1e-3, 1, 2)
    assert ranks.broken() == [1] * ranks.world
    (record,) = ranks.records(0)
    assert (record.why, record.key, record.chunk // 2, record.tile) == (EXPIRED, 40, ranks.world - 1, -1)
    assert record.waited > record.allowed == 10**6
    assert int(ranks.control[0][COUNT]) == 2, "the graph's copies say so, whatever the kernels do"


def test_a_wait_ends_in_a_broken_group_and_is_no_expiry(ranks):
    ranks.control[0][BROKEN] = 1
    ranks.control[0][COUNT] = 5
    launch.begin_call(ranks.of(0), 1e6, 1, 1)
    assert not ranks.records(0), "the call's reader says so"
    launch.await_parts(ranks.of(0), 1e6, 1)
    (record,) = ranks.records(0)
    assert record.why == QUARANTINED
    assert int(ranks.control[0][VOID]) == 1


def test_parts_are_awaited_and_their_signals_cleared(ranks):
    launch.begin_call(ranks.of(0), 20.0, 0, 2)
    ranks.signals[0][2 : 2 * ranks.world] = 1
    launch.await_parts(ranks.of(0), 20.0, 2)
    assert not ranks.signals[0].any()
    assert int(ranks.control[0][VOID]) == 0
    ranks.marks(0, 1)
    launch.end_call(ranks.of(0))
    assert int(ranks.control[0][VOID]) == 0
    assert [int(x[MARKS + ranks.world]) for x in ranks.control[1:]] == [1] * (ranks.world - 1), "rank 0 has read"
    assert not ranks.records(0)


def test_parts_that_do_not_come_void_the_call(ranks):
    launch.begin_call(ranks.of(0), 20.0, 0, 2)
    ranks.signals[0][2 : 2 * ranks.world - 1] = 1
    launch.await_parts(ranks.of(0), 1e-3, 2)
    (record,) = ranks.records(0)
    assert (record.why, record.chunk) == (EXPIRED, 2 * ranks.world - 1)
    assert ranks.broken() == [1] * ranks.world
    assert ranks.signals[0].any(), "signals stay as they are in a broken group"
    assert int(ranks.control[0][VOID]) == 1


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("why", ["", "mark", "form", "broken"])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_result_is_nan_where_a_mark_is_of_another_call_or_the_group_is_broken(ranks, dtype, why, at_once):
    last = ranks.world - 1
    form = form_number(b"a call")
    launch.begin_call(ranks.of(0)._replace(form=form), 20.0, 1, 1)
    ranks.marks(0, stamp(1, form))
    if why == "mark":
        ranks.control[0][MARKS + last] = stamp(2, form)
    elif why == "form":
        ranks.control[0][MARKS + last] = stamp(1, form_number(b"another call"))
    elif why == "broken":
        ranks.control[0][BROKEN] = 1
    around = torch.ones(3 * 4097 + 2).to(dtype)
    out = around[1:-1].view(3, 4097)
    launch.end_call(ranks.of(0), out if at_once else None)
    if not at_once:
        launch.void_out(ranks.of(0), out)
    assert out.float().isnan().all() if why else out.float().eq(1).all()
    assert around[[0, -1]].float().eq(1).all(), "and nothing else"
    assert int(ranks.control[0][VOID]) == bool(why)
    assert ranks.broken() == [int(bool(why))] * ranks.world, "every rank is told"
    assert [record.why for record in ranks.records(0)] == [QUARANTINED] * bool(why)
    assert int(ranks.control[last][MARKS + ranks.world]) == 1, "its rows are read, come what may"


def test_nothing_to_void(ranks):
    launch.void_out(None, torch.empty(0, 4))
    launch.begin_call(ranks.of(0), 20.0, 1, 1)
    ranks.marks(0, 1)
    launch.end_call(ranks.of(0), torch.empty(0, 4))
    assert int(ranks.control[1][MARKS + ranks.world]) == 1
