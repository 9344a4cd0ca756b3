"""`stream_experts` behind a router: the native thread over a driver that records, whose work a fake GPU then does."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import weakref

import pytest
import torch
from test_native_producer import COPY_IN, ILLEGAL, RECORD, WAIT_EVENT, WRITE, Asked

import tilestream as ts
from error_rule import rand
from fake_cuda import DEVICE, FakeCuda, fake_cuda
from forked import forks, in_a_child
from grouped_cases import offsets_of
from tilestream.arrival import experts, lanes, routed
from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import DeviceSignals
from tilestream.arrival.filling import Filling
from tilestream.arrival.landing import DeviceLanding
from tilestream.arrival.sources import Source, ignore
from tilestream.arrival.stream import Stream
from tilestream.core.error_record import FAILED, Record
from tilestream.core.errors import ProducerStopped, TilestreamError
from tilestream.core.groups import by_load
from tilestream.runtime import channel as channels
from tilestream.runtime import producer, shutdown
from tilestream.runtime.channel import Channel
from tilestream.runtime.extension import open_library

LONG, K, N = 60.0, 8, 6
SIZES = (1, 0, 5, 2)  # 2, 3, 0 are copied


class Route(experts._Route):
    """Takes offsets for a GPU's."""

    def __call__(self, source, offsets, weights):
        super().__call__(source, offsets.clamp(min=0).cummax(0).values.int(), weights)
        self.ends, source.readers = None, 1
        return self._behind_the_router(offsets)


class Gpu:
    """The fake GPU, and the driver of the native thread: what that was asked becomes the GPU's work."""

    def __init__(self, cuda: FakeCuda, asked: Asked) -> None:
        self.cuda, self.asked = cuda, asked

    def stream(self, w: torch.Tensor, ends: torch.Tensor) -> Stream:
        route, source = Route(self.cuda.pin(w), torch.device("cuda")), Source(w, lambda: "", lambda begin, end: ignore)
        order = route(source, ends, None)
        lane = lanes.take(4, DEVICE, torch.cuda.current_stream().cuda_stream)
        arrival = Arrival.uniform(K, 4).with_signals(DeviceSignals(4, DEVICE, lane=lane))
        made = DeviceLanding(w, DEVICE, lane)
        made.tensor.fill_(float("nan"))
        return Stream(arrival, source, made, order=order, route=route)

    def route(self, stream: Stream) -> None:
        """The router has ended."""
        self.asked.come(stream._landing._lane.ready.handle)

    def take(self) -> list[str]:
        """Take over what the native thread has issued; says what."""
        driver, names = self.cuda.driver, []
        do = {
            COPY_IN: driver.copy_in, WRITE: driver.stream_write,
            RECORD: lambda stream, event, *_: driver.record_event(stream, event),
            WAIT_EVENT: lambda stream, event, *_: driver.wait_event(stream, ctypes.c_int64(event).value),
        }  # fmt: skip
        for kind, stream, *operands in self.asked.operations:
            names.append(do[kind].__name__)
            if kind == WRITE:
                driver.stream_write(stream, operands[0], ctypes.c_int32(operands[1]).value)
            else:
                do[kind](stream, *operands)
        self.asked.forget()
        return names

    def finish(self, stream: Stream) -> None:
        """All is issued, and done."""
        self.route(stream)
        assert stream._filling._producer.wait(LONG)
        self.take()
        self.cuda.run()


@pytest.fixture
def gpu(libraries, driver, monkeypatch):
    path, fake, _ = libraries
    library = open_library(path, str(fake), str(fake))
    asked = Asked(driver)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *how, pin_memory=False, **more: empty(*how, **more))
    with fake_cuda() as cuda:
        monkeypatch.setattr(producer, "library", lambda: library)
        yield Gpu(cuda, asked)
        for filling in list(routed._under_way):  # of a test that has failed
            filling._producer.stop()
            filling._producer.wait(LONG)
        routed.hear_all()
        asked.forget()
    monkeypatch.undo()


def weights(seed: int = 0) -> torch.Tensor:
    return rand(4, K, N, seed=seed)


def test_steps_of_random_skew_bring_what_has_rows_in_the_order_of_load(gpu):
    choices, w = random.Random(0), weights()
    stream = gpu.stream(w, offsets_of(SIZES))
    for step in range(40):
        sizes = SIZES if not step else tuple(choices.choice((0, 0, 1, 2, 9)) for _ in range(4))
        if step:
            w = weights(step) if step % 3 == 0 else w
            gpu.cuda.pin(w)
            stream.restart(offsets_of(sizes), w)
        launch = stream.arrival._signals.use()
        assert isinstance(stream._filling, routed.Routed)
        assert not stream._filling.issued
        assert not stream.is_filled_here
        stream.tensor.detach().fill_(float("nan"))
        gpu.route(stream)
        stream._filling.finish_issuing()
        order, wanted = by_load(offsets_of(sizes).tolist())
        assert gpu.take() == ["copy_in", "stream_write"] * wanted + ["<lambda>"]
        assert stream._filling.left_out == order[wanted:]
        assert stream.done == (not wanted)
        copies = stream._landing.stream
        while copies.done < copies.issued - 1 and copies.run(1):
            here = [word >= launch.epoch for word in launch.words.tolist()]
            assert sorted(order[: sum(here)]) == [expert for expert in range(4) if here[expert]], "in order"
        gpu.cuda.run()
        assert stream.done
        assert stream.wait(LONG) is stream.tensor
        assert stream.is_filled_here
        for expert in range(4):
            assert (
                stream.tensor[expert].equal(w[expert])
                if expert in order[:wanted]
                else stream.tensor[expert].isnan().all()
            )
    assert stream._filling.cpu_seconds > 0


def test_nothing_of_torchs_and_no_python_thread_is_asked_for(gpu):
    before = threading.active_count()
    stream = gpu.stream(weights(), offsets_of(SIZES))
    gpu.cuda.driver.calls.clear()
    gpu.finish(stream)
    stream.restart(offsets_of(SIZES))
    assert threading.active_count() == before
    assert gpu.cuda.driver.calls[-1] == "record_event", "the event that the thread waits for"
    gpu.finish(stream)
    assert stream.wait(LONG)[2].equal(weights()[2])


def test_the_lane_is_left_when_what_the_thread_did_is_known_and_not_before(gpu):
    stream = gpu.stream(weights(), ends := offsets_of((1, 1, 5, 2)))
    lane, source = stream._landing._lane, weakref.ref(stream._source.tensor)
    gpu.cuda._pinned.clear()
    del stream
    gc.collect()
    assert source() is not None
    assert lane in lanes._lent
    gpu.asked.come(lane.ready.handle)
    assert lane.producer.wait(LONG)
    gpu.take()
    gpu.cuda.run()
    again = gpu.stream(weights(1), ends)
    assert source() is None, "the next filling drops it"
    assert lane not in lanes._lent
    gpu.finish(again)
    third = gpu.stream(weights(2), ends)
    assert third._landing._lane is lane
    gpu.finish(third)
    assert third.wait(LONG).equal(weights(2))


@pytest.mark.parametrize("sizes", [(1, 1, 5, 2), SIZES], ids=str)
def test_a_lane_whose_launches_are_of_other_streams_is_lent_again_if_no_expert_was_left_out(gpu, sizes):
    """A launch on another stream may still wait for one that was."""
    stream, reader = gpu.stream(weights(), offsets_of(sizes)), gpu.cuda.stream()
    lane = stream._landing._lane
    with gpu.cuda.on(reader):
        stream.arrival._signals.use()
    gpu.finish(stream)
    stream.wait(LONG)
    del stream
    gc.collect()
    again = gpu.stream(weights(1), offsets_of(sizes))
    assert (again._landing._lane is lane) == (0 not in sizes)
    gpu.finish(again)


def test_closed_before_the_router_is_done(gpu):
    stream = gpu.stream(weights(), ends := offsets_of(SIZES))
    launch = stream.arrival._signals.use()
    first = stream._order.ends
    assert stream.close()
    gpu.take()
    gpu.cuda.run()
    assert launch.words.tolist() == [-1] * 4
    with pytest.raises(ProducerStopped, match="stream_experts: closed before all experts were delivered; 0 were"):
        stream.wait(LONG)
    gpu.asked.come(0)
    stream.restart(ends)
    assert stream._order.ends is not first, "the earlier copy may still write there"
    gpu.finish(stream)
    assert stream.wait(LONG)[2].equal(weights()[2])


def test_closed_between_two_experts(gpu):
    stream = gpu.stream(weights(), offsets_of(SIZES))
    launch = stream.arrival._signals.use()
    gpu.asked.hold_behind(1)
    gpu.route(stream)
    while len(gpu.asked.operations) < 1:
        pass
    assert not stream.close(0.02)
    gpu.asked.hold_behind(-1)
    stream._filling.finish_issuing()
    gpu.take()
    gpu.cuda.run()
    assert launch.words.tolist() == [-1, -1, 1, -1]
    with pytest.raises(ProducerStopped, match="1 were"):
        stream.wait(LONG)


@pytest.mark.parametrize("first", ["waited for", "reported"])
def test_offsets_that_fall_are_raised_by_what_waits(gpu, monkeypatch, first):
    made = Channel(DEVICE)
    monkeypatch.setattr(channels, "_channels", {None: made})
    stream = gpu.stream(weights(), torch.tensor([3, 2, 3, 8], dtype=torch.int32))
    launch = stream.arrival._signals.use()
    gpu.route(stream)
    assert stream._filling._producer.wait(LONG)
    gpu.take()
    gpu.cuda.run()
    assert launch.words.tolist() == [-1] * 4, "the launch ends at once"
    if first == "reported":
        record = Record(FAILED, 0, 0, 0, 0, stream.arrival.key, 1, 0, -1, 0, 0, 10**6, 10**9)
        made.records[1 : 1 + len(record)] = torch.tensor(record)
        made.records[0] = 1
        with pytest.raises(ValueError, match=r"stream_experts: offsets=\[3, 2, 3, 8\]; they do not fall"):
            ts.check()
    with pytest.raises(ValueError, match=r"stream_experts: offsets=\[3, 2, 3, 8\]; they do not fall"):
        stream.wait(LONG)
    stream.restart(offsets_of(SIZES))
    gpu.finish(stream)
    assert stream.wait(LONG)[2].equal(weights()[2])


@pytest.mark.parametrize("done", range(7))
def test_what_the_driver_refuses_reaches_what_waits(gpu, done):
    stream = gpu.stream(weights(), offsets_of(SIZES))
    launch = stream.arrival._signals.use()
    gpu.asked.refuse_one(done)
    gpu.route(stream)
    assert stream._filling._producer.wait(LONG)
    if done == 6:  # the event behind them
        gpu.cuda.driver.record_event(stream._landing.stream.cuda_stream, stream._landing._lane.landed.handle)
    gpu.take()
    gpu.cuda.run()
    here = [2, 3, 0][: done // 2]
    with pytest.raises(RuntimeError, match=r"stream_experts: the driver .*: code 700"):
        stream.wait(LONG)
    gpu.cuda.run()
    assert launch.words.tolist() == [1 if expert in here else -1 for expert in range(4)]
    for expert in here:
        assert stream.tensor[expert].equal(weights()[expert])
    gpu.asked.refuse_one(-1)
    stream.restart(offsets_of(SIZES))
    gpu.finish(stream)
    assert stream.wait(LONG)[0].equal(weights()[0])


def test_a_driver_that_records_no_event_is_the_arrivals_error(gpu, monkeypatch):
    stream = gpu.stream(weights(), offsets_of(SIZES))
    gpu.finish(stream)

    def refuse(stream, event):
        raise RuntimeError("the driver recorded no event")

    with monkeypatch.context() as patch:
        patch.setattr(gpu.cuda.driver, "record_event", refuse)
        stream.restart(offsets_of(SIZES))
    assert not routed._under_way
    with pytest.raises(RuntimeError, match="the driver recorded no event"):
        stream.wait(LONG)
    stream.restart(offsets_of(SIZES))
    gpu.finish(stream)
    assert stream.wait(LONG)[2].equal(weights()[2])


def test_words_are_lowered_behind_launches_of_earlier_epochs(gpu):
    """On other streams, which have not read the words yet."""
    stream, reader, found = gpu.stream(weights(), ends := offsets_of((1, 1, 5, 2))), gpu.cuda.stream(), []
    gpu.finish(stream)
    with gpu.cuda.on(reader):
        launch = stream.arrival._signals.use()
        reader.give(lambda: found.extend(launch.words.tolist()))
    stream.restart(ends)
    gpu.asked.come(stream._landing._lane.ready.handle, ILLEGAL)
    assert stream._filling._producer.wait(LONG)
    gpu.take()
    stream._landing.stream.run()
    assert launch.words.tolist() == [1] * 4, "the lane's stream waits for the reader"
    with pytest.raises(RuntimeError, match="does not say whether an event has come"):
        stream.wait(LONG)
    gpu.cuda.run()
    assert found == [1] * 4
    assert launch.words.tolist() == [-2] * 4


def test_a_restart_waits_for_the_router_of_the_step_before(gpu):
    stream = gpu.stream(weights(), offsets_of(SIZES))
    lane = stream._landing._lane
    threading.Timer(0.1, lambda: gpu.asked.come(lane.ready.handle)).start()
    stream.restart(offsets_of((0, 9, 0, 0)))
    assert stream._filling._producer.wait(LONG)
    assert gpu.take().count("copy_in") == 3 + 1
    gpu.cuda.run()
    assert stream.wait(LONG)[1].equal(weights()[1])


def test_weights_that_are_replaced_are_kept_until_they_are_copied(gpu):
    first = gpu.cuda.pin(weights())
    stream, kept = gpu.stream(first, ends := offsets_of(SIZES)), weakref.ref(first)
    gpu.route(stream)
    stream._filling.finish_issuing()
    gpu.take()
    second = gpu.cuda.pin(weights(1))
    stream.restart(ends, second)
    gpu.cuda._pinned = [second]
    del first
    gc.collect()
    assert kept() is not None
    gpu.finish(stream)
    stream.restart(ends, second)
    assert kept() is None
    gpu.finish(stream)


def test_the_garbage_collector_hears_nothing_of_a_filling_that_is_being_handed_over(gpu, monkeypatch):
    """Of its thread only the job before has ended."""
    stream = gpu.stream(weights(), ends := offsets_of(SIZES))
    gpu.finish(stream)
    assert stream.wait(LONG)[2].equal(weights()[2])
    start = producer.Producer.start

    def collected(self, job):
        routed.hear_all()
        start(self, job)

    monkeypatch.setattr(producer.Producer, "start", collected)
    stream.restart(ends)
    assert not stream._filling.issued
    gpu.finish(stream)
    assert stream.wait(LONG)[2].equal(weights()[2])


def test_the_garbage_collector_waits_for_no_lock(gpu):
    stream, held, go = gpu.stream(weights(), offsets_of(SIZES)), threading.Event(), threading.Event()

    def hold() -> None:
        with stream.arrival._signals._bell:
            held.set()
            go.wait(LONG)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    gpu.route(stream)
    assert stream._filling._producer.wait(LONG)
    routed.hear_all()
    assert routed._under_way
    go.set()
    thread.join()
    routed.hear_all()
    assert not routed._under_way


@forks
def test_a_forked_child_does_not_hang(gpu):
    stream = gpu.stream(weights(), offsets_of(SIZES))

    def child() -> None:
        assert stream._filling.issued
        stream._filling.finish_issuing()
        stream._filling.halt()
        stream.close(0.1)
        shutdown._stop_all()

    assert in_a_child(child) == 0
    assert not stream._filling.issued
    gpu.finish(stream)
    assert stream.wait(LONG)[2].equal(weights()[2])


def test_the_interpreters_exit_stops_it(gpu, monkeypatch):
    stream = gpu.stream(weights(), offsets_of(SIZES))
    stream._filling.stop_at_exit(LONG)
    assert isinstance(stream.arrival.error, ProducerStopped)
    monkeypatch.setattr(shutdown, "_exiting", threading.Event())
    shutdown._exiting.set()
    with pytest.raises(TilestreamError, match="the interpreter exits"):
        stream.restart(offsets_of(SIZES))
    assert not routed._under_way


def test_without_the_extension_a_python_thread_does_the_same(gpu, monkeypatch):
    monkeypatch.setattr(producer, "library", lambda: None)
    stream = gpu.stream(weights(), ends := offsets_of(SIZES))
    for step in range(3):
        assert isinstance(stream._filling, Filling)
        assert stream.wait()[2].equal(weights(step)[2])
        assert stream.arrival._signals.state() == [True, False, True, True]
        stream.restart(ends, gpu.cuda.pin(weights(step + 1)))
    stream.wait()
    assert gpu.asked.operations == []
