"""Equal calls between ranks, each issued by one native call: what the driver is asked, on a fake GPU."""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from stand_ins import Launch, Matmul, kernel, on_fake_gpu, remember, tried
from test_native_gated import python_calls  # noqa: F401 -- a fixture
from test_native_program import LAUNCH

import tilestream as ts
from fake_cuda import DEVICE, fake_cuda
from tilestream.core.error_record import FIELDS
from tilestream.core.protocols import gather
from tilestream.distributed import call_queue, copy_engines, slots
from tilestream.distributed.copy_engines import GatherQueue, GatherRepeat
from tilestream.distributed.gpu_reduce_scatter import ReduceScatterQueue, SumRepeat, matmul_scatter
from tilestream.distributed.one_shot import AllReduceQueue
from tilestream.distributed.repeats import NO_EXTRAS, Extras, PlainCall
from tilestream.distributed.request import one_a_row
from tilestream.distributed.shards import ScaledRows, Shards
from tilestream.launch import native_program
from tilestream.launch.launcher import VARIES, Launcher
from tilestream.launch.native_program import ProgramError
from tilestream.launch.observe import observation
from tilestream.runtime import sequence
from tilestream.runtime.channel import channel

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from fake_ranks import GroupState, Memory, patch_driver

BF16 = torch.bfloat16
COPY_ACROSS, WRITE, WAIT, RECORD, WAIT_EVENT = range(1, 6)
#: A copy by torch out of a slot.
TAKE_OUT = 77


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16)


def note_copies(driver, monkeypatch) -> None:
    """Have what the usual way copies by torch be noted as the operation of a program."""

    def copied(to: torch.Tensor, source: torch.Tensor) -> None:
        driver.library.fake_note(COPY_ACROSS, 0, to.data_ptr(), source.data_ptr(), source.nbytes)

    monkeypatch.setattr(slots, "copy", copied)


@pytest.fixture
def cuda(extension, libraries, monkeypatch):
    """A fake GPU; sequences and programs are native, over the fake driver."""
    found = ctypes.CDLL(str(libraries[0]))
    with fake_cuda() as made:
        made.clock = patch_driver(made, monkeypatch)
        for module in (sequence, native_program):
            monkeypatch.setattr(module, "library", lambda: found)
        monkeypatch.setattr(native_program, "error_name", str)
        monkeypatch.setattr(call_queue.Watchdog, "wake", lambda self: None)
        on_fake_gpu(monkeypatch, extension)
        yield made


@pytest.fixture
def state() -> Any:
    made = GroupState(0, 2)
    made.lock, made.timeout = threading.Lock(), lambda kind: 7.0
    return made


def plain(state: Any, a: torch.Tensor, *bs: torch.Tensor, key: object = "key", extras: Extras = NO_EXTRAS) -> PlainCall:
    return PlainCall(state, (key,), a, bs, 0, None, extras)


class Asked(NamedTuple):
    """What the driver was asked: operations, launches by their bytes."""

    operations: list[tuple[int, ...]]
    launches: list[bytes]

    @classmethod
    def of(cls, driver: Any) -> Asked:
        """Since the last time."""
        found = cls(driver.operations(), driver.launches())
        driver.forget()
        return found

    def with_outputs(self, outs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Asked:
        """With the addresses of ``others`` in place of those of ``outs``."""
        launches = self.launches
        for out, other in zip(outs, others, strict=True):
            old, new = (struct.pack("=Q", x.data_ptr()) for x in (out, other))
            assert any(old in launch for launch in launches)
            launches = [launch.replace(old, new) for launch in launches]
        return Asked(self.operations, launches)


class Gathers:
    """Gathers of rank 0 of two in the usual way, with native launches."""

    shards = Shards(1, 2, 8, 64, parts=2)

    def __init__(self, state: Any, way: str = "push") -> None:
        self.state, self.queue = state, GatherQueue(state, DEVICE, Memory(2, 16 * 64 * 2 + 256, 16).of(0))
        self.way, self.brings, self.return_a = way, False, False
        #: All ranks' rows of the last call, with `return_a`.
        self.gathered: torch.Tensor | None = None

    def usual(self, a: torch.Tensor, *bs: torch.Tensor, extras: Extras = NO_EXTRAS) -> list[torch.Tensor]:
        of_call = self.queue, self.shards, self.way, self.return_a, extras
        repeat = GatherRepeat.of(plain(self.state, a, *bs, extras=extras), *of_call)
        self.gathered = zeros(*self.shards.shape) if self.return_a else None

        def compute(slot: ScaledRows, arrival: ts.Arrival) -> list[torch.Tensor]:
            if self.brings:
                arrival._signals.local_rows.bring()
            scales = None if slot.scales is None else slot.scales.view(16, 1)
            return [
                ts.matmul(
                    slot.data.view(16, 64), b, bias=bias, activation=activation, scale_a=scales, scale_b=scale_b,
                    arrival=arrival, deadline=7.0,
                )
                for b, bias, activation, scale_b in zip(bs, *extras[:2], extras.scales_b, strict=False)
            ]  # fmt: skip

        scale = extras.scale_a
        shard = ScaledRows(a.view(1, 8, 64), None if scale is None else one_a_row(scale, (8, 1)).view(1, 8, 1))
        return self.queue.issue(self.shards, shard, self.gathered, compute, 7.0, self.way, repeat)


@pytest.mark.parametrize("way", ["push", "pull"])
@pytest.mark.parametrize("count", [1, 2], ids=["one product", "two products"])
def test_a_repeated_gather_asks_for_what_the_usual_way_asks_for(
    state, python_calls, driver, monkeypatch, count, way  # noqa: F811
):  # fmt: skip
    note_copies(driver, monkeypatch)
    gathers, bs, others = Gathers(state, way), *([zeros(64, 32 + 8 * i) for i in range(count)] for _ in range(2))
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), *bs)
    made = len(python_calls)
    for i in range(2 * gather.SLOTS):
        other = zeros(8, 64)
        Asked.of(driver)
        gathered, outs = plain(state, other, *others).repeated()
        assert gathered is None
        assert [out.shape for out in outs] == [(16, 32 + 8 * j) for j in range(count)]
        repeated = Asked.of(driver)
        gathers.queue.take_back(1 + gather.SLOTS + i + 1)  # the usual way, of the same epoch
        usual = gathers.usual(other, *others)
        assert repeated == Asked.of(driver).with_outputs(usual, outs)
        assert len(repeated.launches) == count
        waits = {WAIT} if way == "pull" else set()
        assert {one[0] for one in repeated.operations} == {COPY_ACROSS, WRITE, RECORD, WAIT_EVENT, LAUNCH} | waits
        assert gathers.queue._pending is None
    assert len(python_calls) == made, "no launch was Python's"
    assert state.repeated == 2 * gather.SLOTS


def extras_of(what: str, scale_a: torch.Tensor) -> Extras:
    """New biases and scales of two products, the first of which has them all."""
    bias = zeros(32) if "bias" in what else None
    scale_b = torch.ones(1, 32) if "scales" in what else None
    given = scale_a.clone() if "scales" in what else None
    return Extras((bias, None), ("relu" if "activation" in what else None, None), given, (scale_b, None))


@pytest.mark.parametrize("way", ["push", "pull"])
@pytest.mark.parametrize("what", ["bias", "activation", "scales", "bias, activation, scales"])
def test_a_repeated_gather_has_the_biases_and_scales_of_its_call(
    state, python_calls, driver, monkeypatch, what, way  # noqa: F811
):  # fmt: skip
    note_copies(driver, monkeypatch)
    gathers, scale = Gathers(state, way), torch.ones(8, 1)
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), zeros(64, 32), zeros(64, 40), extras=extras_of(what, scale))
    made = len(python_calls)
    for i in range(2 * gather.SLOTS):
        other, bs, extras = zeros(8, 64), [zeros(64, 32), zeros(64, 40)], extras_of(what, scale)
        Asked.of(driver)
        _, outs = plain(state, other, *bs, extras=extras).repeated()
        repeated = Asked.of(driver)
        gathers.queue.take_back(1 + gather.SLOTS + i + 1)  # the usual way, of the same epoch
        usual = gathers.usual(other, *bs, extras=extras)
        assert repeated == Asked.of(driver).with_outputs(usual, outs)
        first = repeated.launches[0]
        for x in (extras.biases[0], extras.scales_b[0]):
            assert x is None or struct.pack("=Q", x.data_ptr()) in first
        copies = [one for one in repeated.operations if one[0] == COPY_ACROSS]
        if extras.scale_a is not None:
            assert [one[3] for one in copies].count(extras.scale_a.data_ptr()) == (2 if way == "push" else 1)
    assert len(python_calls) == made, "no launch was Python's"
    assert state.repeated == 2 * gather.SLOTS


def test_one_scale_of_a_gather_is_expanded_at_each_call(state, python_calls, driver, monkeypatch):  # noqa: F811
    monkeypatch.setattr(slots, "copy", lambda to, source: None)
    gathers, scale, b = Gathers(state), torch.tensor(0.5), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b, extras=extras_of("scales", scale))
    issued: list[torch.Tensor] = []
    (repeat,) = state.repeats.values()
    program = repeat.programs[gathers.queue.next_slot]
    monkeypatch.setattr(program, "issue", lambda *values: issued.append(values) or True)
    call = plain(state, zeros(8, 64), b, extras=extras_of("scales", torch.tensor(0.25)))
    assert call.repeated() is not None
    assert call.scales_of_rows().equal(torch.full((8, 1), 0.25))
    assert issued[0][4] not in (0, call.extras.scale_a.data_ptr())


@pytest.mark.parametrize("way", ["push", "pull"])
def test_a_repeated_gather_takes_the_rows_out_behind_its_kernels(
    state, python_calls, driver, monkeypatch, way  # noqa: F811
):  # fmt: skip
    gathers, b = Gathers(state, way), zeros(64, 32)
    gathers.return_a, take_out, memory = True, copy_engines.take_out, gathers.queue.memory

    def noted(what: int, to: torch.Tensor, source: torch.Tensor) -> None:
        """The result of a call may lie anywhere; it is noted as 0."""
        begin = memory.address(0, 0)
        there = to.data_ptr() if begin <= to.data_ptr() < begin + gather.SLOTS * memory.slot_bytes else 0
        driver.library.fake_note(what, 0, there, source.data_ptr(), source.nbytes)

    def copied(to: torch.Tensor, source: torch.Tensor) -> None:
        noted(COPY_ACROSS, to, source)
        to.copy_(source)

    def taken(into: torch.Tensor, gathered: torch.Tensor, *others: Any) -> None:
        noted(TAKE_OUT, into, gathered)
        take_out(into, gathered, *others)

    monkeypatch.setattr(slots, "copy", copied)
    monkeypatch.setattr(copy_engines, "take_out", taken)
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    for i in range(2 * gather.SLOTS):
        other, epoch = torch.randn(8, 64).to(BF16), 1 + gather.SLOTS + i + 1
        rows = memory.slot(0, epoch % gather.SLOTS)[: 16 * 64 * 2].view(BF16).view(1, 2, 8, 64)
        rows.copy_(torch.randn(1, 2, 8, 64))
        memory.signals(epoch % gather.SLOTS)[:4] = torch.tensor([1 << 20, 1 << 20, 1 << 20, 0])
        Asked.of(driver)
        whole, outs = plain(state, other, b).repeated()
        assert whole.shape == (16, 64)
        first, second = whole.view(2, 8, 64)
        assert first.equal(other if way == "push" else rows[0, 0]), "the fake driver copies nothing into the slot"
        assert second[:4].equal(rows[0, 1, :4])
        assert second[4:].isnan().all(), "what has not come"
        repeated = Asked.of(driver)
        names = [one[0] for one in repeated.operations]
        assert names.index(LAUNCH) < names.index(TAKE_OUT) < len(names) - 1 - names[::-1].index(RECORD)
        gathers.queue.take_back(epoch)  # the usual way, of the same epoch
        usual = gathers.usual(other, b)
        assert repeated == Asked.of(driver).with_outputs(usual, outs)
    assert state.repeated == 2 * gather.SLOTS


def test_a_gather_whose_rows_cannot_be_taken_out_ends(state, driver, python_calls, monkeypatch):  # noqa: F811
    gathers, b = Gathers(state), zeros(64, 32)
    gathers.return_a = True
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    Asked.of(driver)
    gathers.usual(zeros(8, 64), b)
    whole, tracked = [one[0] for one in Asked.of(driver).operations], list[int]()

    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(copy_engines, "take_out", fails)
    monkeypatch.setattr(gathers.queue, "track", lambda call: tracked.append(call.epoch))
    with pytest.raises(MemoryError, match="no room"):
        plain(state, zeros(8, 64), b).repeated()
    assert [one[0] for one in Asked.of(driver).operations] == whole
    assert tracked == [gathers.queue._epoch], "it is watched"
    assert not state.broken, "the peers have all that they wait for"


def test_rows_that_a_kernel_reads_in_the_slot_are_copied_there(state, python_calls, driver, monkeypatch):  # noqa: F811
    gathers, b, copies = Gathers(state), zeros(64, 32), []
    gathers.brings = True
    monkeypatch.setattr(slots, "copy", lambda to, source: copies.append((to.data_ptr(), source.data_ptr())))
    a, other = zeros(8, 64), zeros(8, 64)
    for _ in range(1 + gather.SLOTS):
        gathers.usual(a, b)
    there = [to for to, source in copies if source == a.data_ptr()]
    assert len(there) == 1 + gather.SLOTS
    driver.forget()
    assert plain(state, other, b).repeated() is not None
    asked = Asked.of(driver).operations
    copy = asked.index((COPY_ACROSS, 0, there[1], other.data_ptr(), other.nbytes))
    assert asked[copy + 1][0] == LAUNCH


@pytest.mark.parametrize("strided", [False, True])
def test_a_shard_that_is_copied_to_be_flat_is_never_repeated(state, driver, python_calls, monkeypatch, strided):  # noqa: F811
    gathers, b = Gathers(state), zeros(64, 32)
    monkeypatch.setattr(copy_engines.GatherQueue, "of", lambda *_: gathers.queue)
    plan: Any = SimpleNamespace(decision=SimpleNamespace(way="push"))
    a = zeros(4, 2, 64).transpose(0, 1) if strided else zeros(2, 4, 64)

    def product(rows: torch.Tensor, scales: None, arrival: ts.Arrival, seconds: float) -> torch.Tensor:
        return ts.matmul(rows, b, arrival=arrival, deadline=seconds)

    for _ in range(1 + gather.SLOTS):
        shard = ScaledRows(a.reshape(1, 8, 64), None)
        copy_engines.gather_matmul(state, plan, gathers.shards, shard, [product], 7.0, False, plain(state, a, b))
    assert (plain(state, a, b).repeated() is None) == strided


class Sums:
    """Sums, or all-reduces, of rank 0 of two in the usual way, with native launches."""

    shards = Shards(1, 2, 8, 32, parts=2)

    def __init__(self, state: Any, extension: Any, driver: Any, one_shot: bool) -> None:
        self.state, self.extension, self.driver, self.one_shot = state, extension, driver, one_shot
        kind = AllReduceQueue if one_shot else ReduceScatterQueue
        self.queue = kind(state, DEVICE, Memory(2, 16 * 32 * 2, 16).of(0))
        self.received, self.launches = zeros(2, 1, 8, 32), {}
        signature = {"parts": "*bf16", "out": "*bf16", "bias": "*bf16", "epoch": "i32", "rank": "i32"}
        self.adds = Launcher(kernel(driver, signature, {}, []), (3, 1, 1), [VARIES, VARIES, VARIES, VARIES, 0])

    def multiply(self, a: torch.Tensor, b: torch.Tensor, into: torch.Tensor, extras: Extras = NO_EXTRAS) -> None:
        """A product into a slot, native from the second time on."""
        x = Matmul(0, a, b, None, None, extras.scale_a, extras.scales_b[0])
        if tried(self.extension, x, into)[0] is None or not self.launches:
            launch = self.launches.setdefault(0, Launch(self.driver, x))
            assert remember(self.extension, launch, x, into)

    def add(self, out: torch.Tensor, epoch: int, bias: torch.Tensor | None = None) -> None:
        varying = self.received.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr(), epoch
        self.adds(0, *varying)
        if (seen := observation()) is not None:
            assert seen.issued[-1] == (self.adds, varying)

    def usual(self, a: torch.Tensor, b: torch.Tensor, extras: Extras = NO_EXTRAS) -> torch.Tensor:
        out = zeros(16 if self.one_shot else 8, 32)
        given = (0, None) if self.one_shot else (2, lambda state: self.received)
        of_call = self.queue, *given, tuple(out.shape), BF16, extras
        repeat = SumRepeat.of(plain(self.state, a, b, extras=extras), *of_call)

        def product(into: torch.Tensor, *_: Any) -> None:
            self.multiply(a, b, into, extras)

        def add(operand: torch.Tensor, void: torch.Tensor, epoch: int) -> None:
            self.add(out, epoch, extras.biases[0])

        if self.one_shot:
            self.queue.reduce((16, 32), BF16, product, add, 7.0, repeat)
        else:
            self.queue.issue(self.shards, BF16, self.received, product, add, 7.0, repeat)
        return out


@pytest.mark.parametrize("one_shot", [False, True], ids=["sum", "all-reduce"])
def test_a_repeated_sum_asks_for_what_the_usual_way_asks_for(state, extension, driver, cuda, one_shot):
    sums, a, b = Sums(state, extension, driver, one_shot), zeros(16, 64), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        sums.usual(a, b)
    for i in range(2 * gather.SLOTS):
        Asked.of(driver)
        flags, other, another = sums.queue._flag_value, zeros(16, 64), zeros(64, 32)
        out = plain(state, other, another).repeated()
        assert out is not None
        repeated, raised = Asked.of(driver), sums.queue._flag_value
        sums.queue.take_back(1 + gather.SLOTS + i + 1)  # the usual way, of the same epoch
        sums.queue._flag_value = flags
        usual = sums.usual(other, another)
        assert sums.queue._flag_value == raised
        recorded = [one for one in repeated.operations if one[0] != RECORD]
        asked = Asked.of(driver).with_outputs([usual], [out])
        assert recorded == [one for one in asked.operations if one[0] != RECORD]
        assert repeated.launches == asked.launches
        assert len(asked.launches) == 2
    assert state.repeated == 2 * gather.SLOTS


@pytest.mark.parametrize("one_shot", [False, True], ids=["sum", "all-reduce"])
@pytest.mark.parametrize("what", ["bias", "scales", "bias, scales"])
def test_a_repeated_sum_has_the_bias_and_the_scales_of_its_call(state, extension, driver, cuda, one_shot, what):
    sums = Sums(state, extension, driver, one_shot)

    def given() -> tuple[torch.Tensor, torch.Tensor, Extras]:
        return zeros(16, 64), zeros(64, 32), extras_of(what, torch.ones(16, 1))

    for _ in range(1 + gather.SLOTS):
        sums.usual(*given())
    for i in range(2 * gather.SLOTS):
        Asked.of(driver)
        a, b, extras = given()
        flags, out = sums.queue._flag_value, plain(state, a, b, extras=extras).repeated()
        repeated = Asked.of(driver)
        sums.queue.take_back(1 + gather.SLOTS + i + 1)  # the usual way, of the same epoch
        sums.queue._flag_value = flags
        usual = sums.usual(a, b, extras)
        asked = Asked.of(driver).with_outputs([usual], [out])
        assert repeated.launches == asked.launches
        multiply, add = repeated.launches
        for x, launch in ((extras.scale_a, multiply), (extras.scales_b[0], multiply), (extras.biases[0], add)):
            assert x is None or struct.pack("=Q", x.data_ptr()) in launch
    assert state.repeated == 2 * gather.SLOTS


def test_a_repeated_sum_does_not_keep_its_group(extension, driver, cuda, monkeypatch):
    class State(GroupState):
        lock = threading.Lock()

        def timeout(self, kind: str) -> float:
            return 7.0

        def buffer(self, name: str, shape: tuple[int, ...], *_: Any) -> torch.Tensor:
            return zeros(*shape)

    gc.disable()
    try:
        state: Any = State(0, 2)
        sums, a, b = Sums(state, extension, driver, False), zeros(16, 64), zeros(64, 32)
        sums.state = None
        monkeypatch.setattr(ReduceScatterQueue, "of", lambda *_: sums.queue)
        monkeypatch.setattr("tilestream.launch.portable.add.add_parts", lambda *given: sums.add(given[2], given[6]))
        request: Any = SimpleNamespace(a=a, bias=None, divisor=float)
        for _ in range(1 + gather.SLOTS):
            call = plain(state, a, b)
            matmul_scatter(state, None, sums.shards, request, BF16, lambda out, *_: sums.multiply(a, b, out), 7.0, call)
        assert plain(state, a, b).repeated() is not None
        found = weakref.ref(state)
        del state, call
        assert found() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("one_shot", [False, True], ids=["sum", "all-reduce"])
def test_a_repeated_sum_begins_behind_the_end_of_the_last_call(state, extension, driver, cuda, one_shot):
    """Which follows its other streams: they are not waited for once more."""
    sums, a, b = Sums(state, extension, driver, one_shot), zeros(16, 64), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        sums.usual(a, b)
    for _ in range(gather.SLOTS):
        last = sums.queue.events(sums.queue._epoch)
        driver.forget()
        assert plain(state, a, b).repeated() is not None
        first, *others = driver.operations()
        assert first[:3] == (WAIT_EVENT, 0, last.end.cuda_event)
        assert last.side.cuda_event not in [one[2] for one in others if one[0] == WAIT_EVENT]


@pytest.mark.parametrize("way", ["push", "pull"])
@pytest.mark.parametrize("return_a", [False, True])
def test_an_interrupt_behind_an_issued_gather_issues_nothing_again(
    state, driver, python_calls, monkeypatch, way, return_a  # noqa: F811
):  # fmt: skip
    """Ctrl-C comes when the native call returns. What ends a call comes once, behind the interrupt, too."""
    monkeypatch.setattr(slots, "copy", lambda to, source: None)
    monkeypatch.setattr(copy_engines, "take_out", lambda *_: None)
    gathers, b, tracked = Gathers(state, way), zeros(64, 32), list[Any]()
    gathers.return_a = return_a
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    for _ in range(gather.SLOTS):
        driver.forget()
        assert plain(state, zeros(8, 64), b).repeated() is not None
    whole = [one[:2] for one in driver.operations()]
    (repeat,) = state.repeats.values()
    program = repeat.programs[gathers.queue.next_slot]
    native = program._issue

    def interrupted(*given: Any) -> int:
        native(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "_issue", interrupted)
    monkeypatch.setattr(gathers.queue, "track", tracked.append)
    driver.forget()
    with pytest.raises(KeyboardInterrupt):
        plain(state, zeros(8, 64), b).repeated()
    assert [one[:2] for one in driver.operations()] == whole
    assert [call.epoch for call in tracked] == [gathers.queue._epoch]
    assert not state.broken, "the peers have all that they wait for"
    assert gathers.queue._pending is None


@pytest.mark.parametrize("one_shot", [False, True], ids=["sum", "all-reduce"])
def test_an_interrupt_behind_an_issued_sum_records_no_event_that_waits_for_a_peer(
    state, extension, driver, cuda, monkeypatch, one_shot
):
    """Ctrl-C comes when the native call returns. The watchdog releases a stream once the kernel has ended."""
    sums, a, b = Sums(state, extension, driver, one_shot), zeros(16, 64), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        sums.usual(a, b)
    for _ in range(gather.SLOTS):
        assert plain(state, a, b).repeated() is not None
    events = sums.queue.events_in(sums.queue.next_slot)
    issue, record = native_program.NativeProgram.issue, type(events.kernel).record
    recorded: list[tuple[int, int]] = []

    def interrupted(self: Any, *values: int) -> bool:
        assert issue(self, *values)
        raise KeyboardInterrupt

    def noted(self: Any, stream: Any = None) -> None:
        recorded.append((self.cuda_event, stream.cuda_stream))
        record(self, stream)

    monkeypatch.setattr(native_program.NativeProgram, "issue", interrupted)
    monkeypatch.setattr(type(events.kernel), "record", noted)
    with pytest.raises(KeyboardInterrupt):
        plain(state, a, b).repeated()
    assert sums.queue._calls[-1].epoch == sums.queue._epoch, "it is watched"
    assert not state.broken
    assert recorded == [], "it would be behind the waits for the peers"


def test_torchs_allocator_is_told_once_who_uses_the_memory_of_parts(state, extension, driver, cuda, monkeypatch):
    sums, a, b = Sums(state, extension, driver, False), zeros(16, 64), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        sums.usual(a, b)
    calling = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr("tilestream.distributed.gpu_reduce_scatter.current_stream", lambda device: calling)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: calling.cuda_stream, raising=False)
    told: list[tuple[int, int]] = []
    told_of = lambda x, stream: told.append((x.data_ptr(), stream.cuda_stream))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", told_of)
    side = sums.queue._side.cuda_stream

    def call(stream: int) -> list[tuple[int, int]]:
        told.clear()
        calling.cuda_stream = stream
        assert plain(state, a, b).repeated() is not None
        return list(told)

    def both(stream: int) -> list[tuple[int, int]]:
        return [(sums.received.data_ptr(), one) for one in (side, stream)]

    assert call(0) == both(0)
    assert call(0) == []
    assert call(9) == both(9), "another stream"
    sums.received = zeros(2, 1, 8, 32)
    assert call(9) == both(9), "other memory"
    assert call(9) == []


def test_a_call_that_nothing_was_issued_of_takes_the_usual_way(state, extension, driver, cuda, python_calls):  # noqa: F811
    gathers, b = Gathers(state), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    epoch = gathers.queue._epoch
    driver.forget()
    driver.state(capturing=True)
    assert plain(state, zeros(8, 64), b).repeated() is None
    assert Asked.of(driver) == ([], [])
    driver.state()
    assert gathers.queue._epoch == epoch, "the call of the usual way has this epoch"
    state.break_("a peer is lost")
    assert plain(state, zeros(8, 64), b).repeated() is None, "the usual way raises"


def test_new_slots_and_another_arrival_are_no_repeat(state, driver, python_calls):  # noqa: F811
    gathers, b = Gathers(state), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    gathers.queue._arrivals, gathers.queue._keys = {}, set()
    driver.forget()
    assert plain(state, zeros(8, 64), b).repeated() is None
    assert Asked.of(driver) == ([], [])
    gathers.queue.forget_programs()
    assert not state.repeats


def test_the_arrival_of_a_repeated_call_outlives_older_ones(state, driver, python_calls, monkeypatch):  # noqa: F811
    gathers, b = Gathers(state), zeros(64, 32)
    monkeypatch.setattr(copy_engines, "_MOST_ARRIVALS", 2 * gather.SLOTS)
    for _ in range(2 * gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    others = [Shards(1, 2, 4, 64), Shards(1, 2, 6, 64)]
    for i in range(gather.SLOTS):
        gathers.queue.arrival(others[0], gathers.queue._epoch + i)
    for _ in range(gather.SLOTS):
        assert plain(state, zeros(8, 64), b).repeated() is not None
    arrivals = state.repeats["key",]._arrivals
    gathers.queue.arrival(others[1], gathers.queue._epoch + 1)
    assert all(one.key in gathers.queue._keys for one in arrivals), "a report of them is known for this group's"


def test_a_call_in_the_slot_of_an_earlier_one_is_watched_alone(state, driver, python_calls):  # noqa: F811
    gathers, b = Gathers(state), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    queue = gathers.queue
    (repeat,) = state.repeats.values()
    program, watched, before = repeat.programs[queue.next_slot], list[int](), queue._issued(queue._epoch)
    issue = program.issue

    def seen(*values: int) -> bool:
        watched.extend(call.epoch for call in queue._issued(queue._epoch))
        return issue(*values)

    program.issue = seen
    assert plain(state, zeros(8, 64), b).repeated() is not None
    epochs = [call.epoch for call in before]
    assert epochs == [queue._epoch - 3, queue._epoch - 2, queue._epoch - 1]
    assert watched == epochs[1:], "its events are recorded again"
    assert [call.epoch for call in queue._issued(queue._epoch)] == [*epochs[1:], queue._epoch]


@pytest.mark.parametrize("one_shot", [False, True], ids=["sum", "all-reduce"])
def test_the_peers_of_a_repeated_sum_have_its_deadline_or_the_groups_present_timeout(
    state, extension, driver, cuda, one_shot
):
    sums, a, b = Sums(state, extension, driver, one_shot), zeros(16, 64), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        sums.usual(a, b)
    asked: list[str] = []
    state.timeout = lambda kind: asked.append(kind) or 9.0
    assert plain(state, a, b).repeated() is not None
    assert not asked, "which costs the host more than the rest of a call's deadline"
    assert sums.queue._seconds(sums.queue._issued(sums.queue._epoch)[-1]) == 9.0
    assert asked == ["cuda"]
    assert plain(state, a, b)._replace(deadline=2.0).repeated() is not None
    assert sums.queue._seconds(sums.queue._issued(sums.queue._epoch)[-1]) == 2.0
    assert asked == ["cuda"]


@pytest.mark.parametrize("return_a", [False, True])
def test_a_refused_launch_of_a_gather_still_sends_the_rows(state, driver, python_calls, return_a):  # noqa: F811
    gathers, b = Gathers(state), zeros(64, 32)
    gathers.return_a = return_a
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    Asked.of(driver)
    gathers.usual(zeros(8, 64), b)
    whole = [one[0] for one in Asked.of(driver).operations if one[0] != LAUNCH]
    driver.library.fake_refuse_after(0)
    try:
        with pytest.raises(ProgramError, match=f"launch 2 of {4 - return_a} parts"):
            plain(state, zeros(8, 64), b).repeated()
    finally:
        driver.library.fake_refuse_after(-1)
    assert [one[0] for one in Asked.of(driver).operations] == whole
    assert not state.broken
    assert list(gathers.queue._without_kernel) == [gathers.queue._epoch], "the next call waits for the rows"


@pytest.mark.parametrize("part", range(6))
def test_a_pulled_gather_without_its_flags_breaks_the_group(state, driver, python_calls, monkeypatch, part):  # noqa: F811
    monkeypatch.setattr(slots, "copy", lambda to, source: None)
    gathers, b, tracked = Gathers(state, "pull"), zeros(64, 32), []
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    (repeat,) = state.repeats.values()
    program = repeat.programs[gathers.queue.next_slot]
    assert program.first_launch == 5, "the host's part; the last call; the shard; its signals; the side stream"

    def refused(*values: int) -> bool:
        raise ProgramError("refused", part)

    monkeypatch.setattr(program, "issue", refused)
    monkeypatch.setattr(gathers.queue, "track", lambda call: tracked.append(call.epoch))
    with pytest.raises(ProgramError, match="refused"):
        plain(state, zeros(8, 64), b).repeated()
    assert state.broken == (part < 5), "a peer would wait for this rank's flag"
    assert tracked == [gathers.queue._epoch]
    assert gathers.queue._pending is None


@pytest.mark.parametrize("way", ["push", "pull"])
def test_an_interrupted_gather_is_watched(state, driver, python_calls, monkeypatch, way):  # noqa: F811
    monkeypatch.setattr(slots, "copy", lambda to, source: None)
    gathers, b, tracked = Gathers(state, way), zeros(64, 32), []
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    (repeat,) = state.repeats.values()
    program, epoch = repeat.programs[gathers.queue.next_slot], gathers.queue._epoch

    def interrupted(*values: int) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "issue", interrupted)
    monkeypatch.setattr(gathers.queue, "track", lambda call: tracked.append(call.epoch))
    with pytest.raises(KeyboardInterrupt):
        plain(state, zeros(8, 64), b).repeated()
    assert tracked == [epoch + 1]
    assert gathers.queue._pending is None
    assert state.broken, "what the peers have is not known"


def test_a_pulled_gather_counts_its_peers_time_from_its_own_issue(state, driver, python_calls, cuda, monkeypatch):  # noqa: F811
    monkeypatch.setattr(slots, "copy", lambda to, source: None)
    gathers, b, waits = Gathers(state, "pull"), zeros(64, 32), []
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    kernel = gathers.queue._events[(gathers.queue._epoch - gather.AHEAD) % gather.SLOTS].kernel

    def long() -> None:
        assert gathers.queue._pending is None
        cuda.clock.now += 3600.0
        waits.append(gathers.queue._epoch)

    monkeypatch.setattr(kernel, "synchronize", long)
    (repeat,) = state.repeats.values()
    program, begun, epoch = repeat.programs[gathers.queue.next_slot], [], gathers.queue._epoch
    issue = program.issue

    def issued(*values: int) -> bool:
        begun.append(gathers.queue._pending.begun)
        return issue(*values)

    monkeypatch.setattr(program, "issue", issued)
    assert plain(state, zeros(8, 64), b).repeated() is not None
    assert waits == [epoch], "before the call is counted"
    assert begun == [cuda.clock.now]


def test_a_sum_that_is_half_issued_breaks_the_group(state, extension, driver, cuda, monkeypatch):
    sums, a, b = Sums(state, extension, driver, False), zeros(16, 64), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        sums.usual(a, b)
    tracked: list[int] = []
    monkeypatch.setattr(sums.queue, "track", lambda call: tracked.append(call.epoch))
    driver.library.fake_refuse_after(1)
    try:
        with pytest.raises(ProgramError, match="launch"):
            plain(state, a, b).repeated()
    finally:
        driver.library.fake_refuse_after(-1)
    assert state.broken
    assert tracked == [sums.queue._epoch], "it is watched"


def test_a_repeated_call_waits_for_the_call_before_the_last(state, extension, driver, cuda, python_calls):  # noqa: F811
    gathers, b = Gathers(state), zeros(64, 32)
    sums, x, w = Sums(state, extension, driver, False), zeros(16, 64), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    repeats = dict(state.repeats)
    state.repeats.clear()
    for _ in range(1 + gather.SLOTS):
        sums.usual(x, w)
    for _ in range(2 * gather.SLOTS):
        for queue, call in ((gathers.queue, plain(state, zeros(8, 64), b)), (sums.queue, plain(state, x, w))):
            if queue is gathers.queue:
                call = call._replace(state=state, key="gather")
                state.repeats["gather"] = repeats["key",]
            driver.forget()
            assert call.repeated() is not None
            events = queue._events[(queue._epoch - 2) % gather.SLOTS]
            found = (ctypes.c_uint64 * 8)()
            waited = list(found[: driver.library.fake_waited(found, 8)])
            assert waited == [(events.kernel if queue is gathers.queue else events.side).cuda_event]


def test_a_kernel_that_reported_is_the_usual_ways(state, driver, cuda, python_calls):  # noqa: F811
    gathers, b = Gathers(state), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    records = channel(DEVICE).records
    driver.forget()
    epoch = gathers.queue._epoch
    before = int(records[3 * FIELDS])
    records[3 * FIELDS] = gathers.queue._heard + 1
    try:
        made = plain(state, zeros(8, 64), b)
        assert state.repeats["key",].issue(made) is None
    finally:
        records[3 * FIELDS] = before
    assert Asked.of(driver) == ([], [])
    assert gathers.queue._epoch == epoch
    assert plain(state, zeros(8, 64), b).repeated() is not None


def test_a_group_that_breaks_while_the_host_waits_issues_nothing(state, driver, cuda, python_calls):  # noqa: F811
    gathers, b = Gathers(state), zeros(64, 32)
    for _ in range(1 + gather.SLOTS):
        gathers.usual(zeros(8, 64), b)
    state.broken_word.value = 1  # as another thread has it, after this one has looked
    driver.forget()
    assert plain(state, zeros(8, 64), b).repeated() is None
    assert Asked.of(driver) == ([], [])
