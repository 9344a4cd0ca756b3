"""Which ranks can reach each other, and the layout of the memory that they share. No GPU here."""

from __future__ import annotations

import contextlib
import itertools
import types

import pytest
import torch

from tilestream.distributed import collective, host_flags, symmetric
from tilestream.distributed.counting import NONE_COUNTED
from tilestream.distributed.group_state import GroupState

BF16 = torch.empty(2, 2, dtype=torch.bfloat16)
GPU = torch.device("cuda", 0)


def state(world=2, unreachable="", backend="nccl"):
    return types.SimpleNamespace(
        world=world, rank=0, unreachable=unreachable, host_flags=None, backend=lambda device: backend
    )


@pytest.fixture
def machine(monkeypatch):
    """A machine whose other ranks report what the test gives, and agree with this rank's verdict."""
    said = []

    def exchange(state, mine, device):
        if b"\n" in mine:
            return [mine, *(x.encode() for x in said)]
        return [mine] * state.world

    monkeypatch.setattr(symmetric, "exchange_bytes", exchange)
    monkeypatch.setattr(host_flags, "map_host_memory", lambda address, size: address)
    monkeypatch.setattr(symmetric, "_made", lambda size, device: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(symmetric.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="gpu-a"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda x, y: True)
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return said


@pytest.mark.parametrize(
    ("other", "shares", "reaches", "why"),
    [
        ("here\n1\ngpu-b", "0", True, ""),
        ("there\n0\ngpu-b", "0", True, "rank 0: 2 hosts: shards travel inside one"),
        ("here\n0\ngpu-a", "0", True, "rank 0: several ranks share a GPU"),
        ("here\n0\ngpu-a", "1", True, ""),
        ("here\n1\ngpu-b", "0", False, "rank 0: no peer access from GPU 0 to 1"),
    ],
)
def test_why_ranks_cannot_reach_each_other_is_reported_and_kept(machine, monkeypatch, other, shares, reaches, why):
    machine.append(other)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", shares)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda x, y: reaches)
    of = state()
    assert symmetric.connect(of, GPU) == why
    assert symmetric.why_not(of, BF16) == why
    assert why or of.host_flags.of("all_gather_matmul").peer_flags() == [0, 0]


def test_one_rank_that_cannot_connect_stops_all(machine, monkeypatch):
    machine.append("here\n1\ngpu-b")
    before = symmetric.exchange_bytes
    monkeypatch.setattr(
        symmetric, "exchange_bytes",
        lambda state, mine, device: before(state, mine, device) if b"\n" in mine else [mine, b"no peer access"],
    )  # fmt: skip
    assert symmetric.connect(state(), GPU) == "rank 1: no peer access"


@pytest.mark.parametrize(
    ("name", "error"),
    [("offer", OSError("no space")), ("GroupFlags", OSError("no file")), ("GroupFlags", RuntimeError("code 1"))],
)
def test_ranks_without_shared_host_memory_are_not_connected(machine, monkeypatch, name, error):
    machine.append("here\n1\ngpu-b")
    monkeypatch.setattr(host_flags, name, lambda *_: (_ for _ in ()).throw(error))
    assert symmetric.connect(state(), GPU) == f"rank 0: no memory of the host that processes share: {error}"


def test_ranks_without_symmetric_memory_are_not_connected(machine, monkeypatch):
    """They call unfused, as far as their plans have one; no call of theirs fails at the memory."""
    machine.append("here\n1\ngpu-b")

    def made(size, device):
        raise RuntimeError("CUDA driver error: operation not supported\nmore of it")

    monkeypatch.setattr(symmetric, "_made", made)
    of = state()
    assert symmetric.connect(of, GPU) == "rank 0: no symmetric memory: CUDA driver error: operation not supported"
    assert "no symmetric memory" in symmetric.why_not(of, BF16)


def test_reasons_that_are_known_without_messages(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert "torch.float32: operands of 16 and 8 bits" in symmetric.why_not(state(), BF16.float())
    assert symmetric.why_not(state(unreachable="2 hosts"), BF16) == "2 hosts"
    assert "has no other ranks" in symmetric.why_not(state(backend="fake"), BF16), "it would wait for them"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not symmetric.why_not(state(), BF16)
    said = symmetric.why_not(state(), BF16, NONE_COUNTED)
    assert "a CUDA graph is being captured" in said
    assert said.endswith("the device counts no calls, because TILESTREAM_GRAPH_RANKS is 0")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "on ROCm" in symmetric.why_not(state(), BF16)


@pytest.mark.parametrize("captured", [0, 1])
def test_a_capture_is_asked_for_on_the_operands_device(monkeypatch, captured):
    """Which need not be the current one: a call took an eager one for captured, or the other way round."""
    here = [0]

    @contextlib.contextmanager
    def on(device):
        here.append(device.index)
        yield
        here.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: here[-1])
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here[-1] == captured)
    x = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), dtype=torch.bfloat16)
    of = state(world=1)
    of.agreed, of.prepared = {b"a call"}, set()
    assert GroupState.capture(of, x) == 2 * captured
    assert ("is being captured" in symmetric.why_not(of, x, "a reason")) == bool(captured)
    compared = []
    monkeypatch.setattr(collective, "exchange_bytes", lambda state, mine, device: compared.append(mine) or [mine])
    collective.agree(of, types.SimpleNamespace(handshake=b"another", op="all_gather_matmul"), x.device)
    assert compared == [b"another"] * (not captured)
    assert here == [0]


def test_slots_that_were_not_made_are_no_larger_ones(monkeypatch):
    """The next call would else take the old slots for new ones, and write behind them."""
    memory = torch.zeros(8 << 20, dtype=torch.uint8)
    monkeypatch.setattr(symmetric.PeerMemory, "_shared", lambda self, size: (memory[:size], [memory[:size]] * 2))
    of = types.SimpleNamespace(name="tp", rank=0, world=2, host_flags=types.SimpleNamespace(of=lambda op: None))
    own = symmetric.PeerMemory(of, torch.device("cpu"), "all_gather_matmul")
    own.grow(1 << 20, 8)
    before = own.slot_bytes, own.chunks, own.address(0, 1), own.signal(0, 1, 3)

    def no_memory(self, size):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(symmetric.PeerMemory, "_shared", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        own.grow(64 << 20, 5000)
    assert (own.slot_bytes, own.chunks, own.address(0, 1), own.signal(0, 1, 3)) == before


def test_memory_of_one_slot(monkeypatch):
    memory = torch.zeros(8 << 20, dtype=torch.uint8)
    monkeypatch.setattr(symmetric.PeerMemory, "_shared", lambda self, size: (memory[:size], [memory[:size]] * 2))
    of = types.SimpleNamespace(name="tp", rank=0, world=2, host_flags=types.SimpleNamespace(of=lambda op: None))
    own = symmetric.PeerMemory(of, torch.device("cpu"), "all_gather_matmul", slots=1)
    own.grow(3 << 20, 8)
    assert own.signals(0).data_ptr() == own.signal(0, 0, 0) == own.address(0, 0) + own.slot_bytes
    slots, peers, _ = own.kept()
    assert slots.numel() == own.slot_bytes + 4 * own.chunks
    assert len(peers) == 2


def test_signals_lie_behind_all_slots_one_set_a_slot(monkeypatch):
    def shared(self, size):
        return memory[0][:size], [x[:size] for x in memory]

    memory = [torch.zeros(64 << 20, dtype=torch.uint8) for _ in range(2)]
    monkeypatch.setattr(symmetric.PeerMemory, "_shared", shared)
    of = types.SimpleNamespace(name="tp", rank=0, world=2, host_flags=types.SimpleNamespace(of=lambda op: None))
    own = symmetric.PeerMemory(of, torch.device("cpu"), "all_gather_matmul")
    own.grow(3 << 20, 1500)
    assert own.slot_bytes >= 3 << 20
    assert own.chunks >= 1500
    places = {}
    for rank in range(2):
        begin = memory[rank].data_ptr()
        for slot in range(symmetric.SLOTS):
            places[rank, "slot", slot] = range(
                own.address(rank, slot) - begin, own.address(rank, slot) - begin + own.slot_bytes
            )
            first, last = (own.signal(rank, slot, chunk) - begin for chunk in (0, own.chunks - 1))
            places[rank, "signals", slot] = range(first, last + 4)
    for rank in range(2):
        ordered = sorted((x for (of, *_), x in places.items() if of == rank), key=lambda x: x.start)
        assert all(x.stop <= y.start for x, y in itertools.pairwise(ordered)), "they do not overlap"
        assert ordered[-1].stop <= symmetric.SLOTS * (own.slot_bytes + 4 * own.chunks)
    words = own.signals(2)
    assert words.dtype == torch.int32
    assert (words.data_ptr(), len(words)) == (own.signal(0, 2, 0), own.chunks)
    assert own.slot(0, 1).data_ptr() == own.address(0, 1)
