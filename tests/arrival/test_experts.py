"""`stream_experts`: which experts are brought, in which order, and the grouped products that wait for them."""

from __future__ import annotations

import gc
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import tilestream as ts
from error_rule import ACTIVATIONS, rand
from fake_cuda import DEVICE, fake_cuda
from grouped_cases import offsets_of
from tilestream.arrival import experts, lanes
from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import DeviceSignals
from tilestream.arrival.flat import Awaited
from tilestream.arrival.landing import DeviceLanding
from tilestream.arrival.sources import Source, ignore
from tilestream.arrival.stream import Stream
from tilestream.core.chunks import Chunks
from tilestream.core.errors import ArrivalTimeout, ProducerStopped
from tilestream.core.groups import by_load
from tilestream.runtime.producer import Job

LONG, K, N = 300.0, 8, 6
#: Rows of each of four experts, and the order in which they come.
SIZES = {(1, 0, 5, 2): [2, 3, 0], (3, 3, 0, 3): [0, 1, 3], (0, 0, 0, 0): [], (0, 9, 0, 0): [1]}


def weights(turned: bool = False, seed: int = 0) -> torch.Tensor:
    w = rand(4, K, N, seed=seed)
    return w.mT.contiguous().mT if turned else w


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_order_is_by_load(sizes):
    order, used = by_load(offsets_of(sizes).tolist())
    assert order[:used] == SIZES[sizes]
    assert sorted(order) == [0, 1, 2, 3]


@pytest.mark.parametrize("turned", [False, True])
def test_experts_without_rows_are_not_brought(turned):
    w = weights(turned)
    with ts.stream_experts(w, offsets_of((0, 0, 0, 0))) as stream:
        stream.wait(LONG)
        assert stream.tensor.stride() == w.stride()
        stream.tensor.fill_(float("nan"))
        for sizes, order in SIZES.items():
            stream.restart(offsets_of(sizes))
            stream.wait(LONG)
            for expert in range(4):
                if expert in order:
                    assert stream.tensor[expert].equal(w[expert])
            times = [stream.arrival.times[expert] for expert in order]
            assert times == sorted(times)
            stream.tensor.fill_(float("nan"))
        assert "those with rows alone, most rows first" in stream.explain()
        stream.restart(offsets_of((0, 1, 0, 0)))
        stream.wait(LONG)
        assert stream.tensor[[0, 2, 3]].isnan().all()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_those_of_weights_that_are_there(sizes, turned):
    x, ends, bias = rand(11, K), offsets_of(sizes), rand(4, N)
    scale = rand(11).abs()
    with ts.stream_experts(weights(turned), ends) as stream:
        for seed in range(3):  # the same buffer for each layer
            w = weights(turned, seed)
            if seed:
                stream.restart(ends, w)
            for more in ({}, {"bias": bias, "activation": "silu", "scale_a": scale}, {"out_dtype": torch.bfloat16}):
                out = torch.full((11, N), float("nan"), dtype=more.get("out_dtype", x.dtype))
                assert ts.grouped_mm(x, stream, ends, out=out, **more) is out
                assert out.equal(ts.grouped_mm(x, w, ends, **more))
                assert ts.grouped_mm(x, stream, ends, deadline=LONG, **more).equal(out)


def test_gradients():
    x, ends = rand(11, K).requires_grad_(), offsets_of((1, 0, 5, 2))
    with ts.stream_experts(weights(), ends) as stream:
        found = torch.autograd.grad(ts.grouped_mm(x, stream, ends, activation="silu").sum(), x)
        wanted = torch.autograd.grad(ts.grouped_mm(x, weights(), ends, activation="silu").sum(), x)
    assert torch.equal(*found, *wanted)


def test_an_expert_that_comes_behind_a_product_without_its_rows_is_no_modification(monkeypatch):
    held, x = Held(monkeypatch, 0, 3), rand(5, K).requires_grad_()
    with ts.stream_experts(weights(), offsets_of((1, 0, 5, 2))) as stream:
        out = ts.grouped_mm(x, stream, ends := offsets_of((0, 0, 5, 0)), deadline=LONG)
        held.release()
        stream.wait(LONG)
        found = torch.autograd.grad(out.sum(), x)
    assert torch.equal(*found, *torch.autograd.grad(ts.grouped_mm(x, weights(), ends).sum(), x))


def test_a_gradient_behind_a_restart_is_refused_before_anything_is_copied(monkeypatch):
    x, ends = rand(8, K).requires_grad_(), offsets_of((1, 0, 5, 2))
    with ts.stream_experts(weights(), ends) as stream:
        out = ts.grouped_mm(x, stream, ends, deadline=LONG)
        stream.wait(LONG)
        held = Held(monkeypatch, 2)
        stream.restart(ends, weights(seed=1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), x)
        held.release()
        stream.wait(LONG)


class Held:
    """Experts whose copies wait, each until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *held: int) -> None:
        self.go = {expert: threading.Event() for expert in held}
        made = experts._copies

        def copies(host, into):
            claim = made(host, into)

            def claimed(begin, end):
                job, expert = claim(begin, end), begin // host.shape[1]

                def wait():
                    if expert in self.go:
                        assert self.go[expert].wait(LONG)
                    job()

                return wait

            return claimed

        monkeypatch.setattr(experts, "_copies", copies)

    def release(self) -> None:
        for event in self.go.values():
            event.set()


def test_a_product_begins_when_its_expert_is_there(monkeypatch):
    held, sizes = Held(monkeypatch, 0, 3), (1, 0, 5, 2)
    x, ends, out = rand(8, K), offsets_of(sizes), torch.full((8, N), float("nan"))
    with ts.stream_experts(weights(), ends) as stream:
        thread = threading.Thread(target=lambda: ts.grouped_mm(x, stream, ends, out=out, deadline=LONG))
        thread.start()
        while out[1:6].isnan().any():  # the pool's time limit bounds it
            thread.join(0.001)
            assert thread.is_alive()
        assert out[[0, 6, 7]].isnan().all()
        held.release()
        thread.join(LONG)
    assert out.equal(ts.grouped_mm(x, weights(), ends))


def test_an_expert_that_does_not_come_is_named_and_nan(monkeypatch):
    held, sizes = Held(monkeypatch, 3), (1, 0, 5, 2)
    x, ends, out = rand(10, K), offsets_of(sizes), torch.zeros(10, N)
    with ts.stream_experts(weights(), ends) as stream:
        with pytest.raises(ArrivalTimeout, match="grouped_mm: weight_arrival's chunk 3 did not arrive") as caught:
            ts.grouped_mm(x, stream, ends, out=out, deadline=0.3)
        assert (caught.value.chunk, caught.value.item) == (3, "group 3")
        assert out[1:6].equal(ts.grouped_mm(x, weights(), ends)[1:6])
        assert out[[0, 6, 7]].isnan().all(), "expert 0 comes behind expert 3"
        held.release()
        assert ts.grouped_mm(x, stream, ends, deadline=LONG).equal(ts.grouped_mm(x, weights(), ends))


def test_an_error_of_the_producer_is_raised_and_nan(monkeypatch):
    def copies(host, into):
        def claim(begin, end):
            raise OSError("the disk is gone")

        return claim

    monkeypatch.setattr(experts, "_copies", copies)
    x, ends, out = rand(8, K), offsets_of((1, 0, 5, 2)), torch.zeros(8, N)
    with ts.stream_experts(weights(), ends) as stream, pytest.raises(OSError, match="the disk is gone"):
        ts.grouped_mm(x, stream, ends, out=out)
    assert out.isnan().all()


def test_a_closed_stream_is_no_operand(monkeypatch):
    held, ends = Held(monkeypatch, 2), offsets_of((1, 0, 5, 2))
    with ts.stream_experts(weights(), ends) as stream:
        threading.Timer(0.05, held.release).start()
    with pytest.raises(ProducerStopped, match="closed before chunk"):
        ts.grouped_mm(rand(8, K), stream, ends, deadline=LONG)


def refused(error, message):
    return pytest.raises(error, match=re.escape(message))


@pytest.mark.parametrize(
    ("w", "ends", "error", "message"),
    [
        (3, None, TypeError, "stream_experts: weights is an int; it must be a torch.Tensor [G, K, N]"),
        (torch.ones(4, 8), None, ValueError, "weights has shape [4, 8]; it must be [G, K, N], none of them 0"),
        (torch.ones(4, 0, 8), None, ValueError, "weights has shape [4, 0, 8]; it must be [G, K, N]"),
        (torch.ones(4, 8, 12)[..., ::2], None, ValueError, "weights has strides (96, 12, 2); experts lie in one piece"),
        (torch.ones(4, 8, 6, device="meta"), None, ValueError, "weights is on meta; what is streamed is on the CPU"),
        (torch.ones(4, 8, 6).to_sparse(), None, TypeError, "weights has layout torch.sparse_coo"),
        (weights(), [1, 2, 3, 4], ValueError, "offsets is a list; it must be torch.int32 [4]"),
        (weights(), torch.tensor([1, 2, 3]).int(), ValueError, "offsets is [3] torch.int32; it must be torch.int32"),
        (weights(), torch.tensor([1, 2, 3, 4]), ValueError, "offsets is [4] torch.int64; it must be torch.int32 [4]"),
        (weights(), torch.tensor([3, 2, 3, 4]).int(), ValueError, "offsets=[3, 2, 3, 4]; they do not fall"),
        (weights(), torch.tensor([-1, 2, 3, 4]).int(), ValueError, "offsets=[-1, 2, 3, 4]; they do not fall"),
        (weights(), torch.ones(4, dtype=torch.int32, device="meta"), ValueError, "on meta; it must be on the CPU"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused(w, ends, error, message):
    with refused(error, message):
        ts.stream_experts(w, offsets_of((1, 0, 5, 2)) if ends is None else ends)


NESTED = [torch.tensor([1, 1]), torch.tensor([6, 8])]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nested.nested_tensor(NESTED, dtype=torch.int32), "offsets is nested"),
        (lambda: torch.nested.nested_tensor(NESTED, dtype=torch.int32, layout=torch.jagged), "offsets is nested"),
        (lambda: torch.tensor([1, 1, 6, 8]).int().to_sparse(), "offsets has layout torch.sparse_coo"),
    ],
    ids=["nested", "jagged", "sparse"],
)
def test_offsets_that_are_not_dense_are_refused(make, message):
    offsets, whole = make(), f"stream_experts: {message}; it must be a dense tensor torch.int32 [4]: "
    with refused(TypeError, whole):
        ts.stream_experts(weights(), offsets)
    with ts.stream_experts(weights(), offsets_of((1, 0, 5, 2))) as stream:
        stream.wait(LONG)
        with refused(TypeError, whole):
            stream.restart(offsets)
        with refused(TypeError, f"grouped_mm: {message}; dense tensors are multiplied"):
            ts.grouped_mm(rand(8, K), stream, offsets)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_weights_are_refused(layout):
    w = torch.nested.nested_tensor([torch.ones(8, 6)] * 4, layout=layout)
    with refused(TypeError, "weights is nested; dense tensors are streamed: torch.stack(weights.unbind())"):
        ts.stream_experts(w, offsets_of((1, 0, 5, 2)))


def test_what_does_not_fit_a_restart_or_a_product_is_refused():
    ends, x = offsets_of((1, 0, 5, 2)), rand(8, K)
    with ts.stream_experts(weights(), ends) as stream:
        stream.wait(LONG)
        with refused(TypeError, "stream_experts: restart() without offsets; they say which experts this step needs"):
            stream.restart()
        with refused(ValueError, "weights [4, 8, 6] torch.float32, strides (48, 1, 8); those of the stream are"):
            stream.restart(ends, weights(turned=True))
        with refused(ValueError, "b is a Stream, and a has shape [2, 8, 8]; groups of rows arrive: [M, K]"):
            ts.grouped_mm(torch.ones(2, 8, 8), stream)
        with refused(ValueError, "offsets has 3 elements, b 4 groups"):
            ts.grouped_mm(x, stream, ends[:3])
        with torch.autocast("cpu", torch.bfloat16), refused(ValueError, "autocast would convert an operand that has"):
            ts.grouped_mm(x, stream, ends)
    with refused(ValueError, "grouped_mm: deadline=1.0 without arrival=; nothing is waited for"):
        ts.grouped_mm(x, weights(), ends, deadline=1.0)
    with ts.stream_in(weights()) as other:
        with refused(TypeError, "one whose chunks are the groups' matrices is made by ts.stream_experts"):
            ts.grouped_mm(x, other, ends)
        with refused(TypeError, "restart(offsets, weights) is of ts.stream_experts; this stream has none"):
            other.restart(ends)
        other.wait(LONG)


def test_rows_of_an_expert_that_is_not_brought_are_refused():
    x = rand(8, K)
    with ts.stream_experts(weights(), offsets_of((1, 0, 5, 2))) as stream:
        with refused(ValueError, "grouped_mm: offsets=[1, 2, 6, 8] give rows to expert 1, which the stream of offsets=[1, 1, 6, 8] does not bring; give both the same: stream.restart(offsets)"):  # fmt: skip  # noqa: E501
            ts.grouped_mm(x, stream, offsets_of((1, 1, 4, 2)))
        fewer = ts.grouped_mm(x, stream, offsets_of((0, 0, 6, 2)))
        assert torch.equal(fewer, ts.grouped_mm(x, weights(), offsets_of((0, 0, 6, 2))))
        stream.wait(LONG)
        stream.restart(offsets_of((1, 1, 4, 2)))
        ts.grouped_mm(x, stream, offsets_of((1, 1, 4, 2)))


def test_a_refused_restart_changes_nothing():
    first, ends = weights(), offsets_of((1, 0, 5, 2))
    with ts.stream_experts(first, ends) as stream:
        stream.wait(LONG)
        with refused(ValueError, "stream_experts: offsets=[3, 1, 5, 8]; they do not fall"):
            stream.restart(torch.tensor([3, 1, 5, 8], dtype=torch.int32), weights(seed=1))
        stream.restart(ends)
        assert torch.equal(stream.wait(LONG)[2], first[2])


def test_a_capture_is_refused_by_the_name_of_the_function(monkeypatch):
    with fake_cuda() as cuda:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with cuda.capture(), refused(RuntimeError, "stream_experts: a CUDA graph is being captured; make the Stream before the capture, and call its restart() outside of the capture, too"):  # fmt: skip  # noqa: E501
            ts.stream_experts(weights(), offsets_of((1, 0, 5, 2)), device="cuda")
    with refused(NotImplementedError, "stream_experts: device='xpu'; tensors stream to the CPU and to GPUs"):
        ts.stream_experts(weights(), offsets_of((1, 0, 5, 2)), device="xpu")


def test_a_capture_is_refused_without_waiting_for_the_router(monkeypatch):
    routed = threading.Event()
    with fake_cuda() as cuda:
        w, ends = cuda.pin(weights()), offsets_of((1, 0, 5, 2))
        source = Source(w, lambda: "", lambda begin, end: ignore, readers=1)
        lane = lanes.take(4, DEVICE, torch.cuda.current_stream().cuda_stream)
        arrival = Arrival.uniform(K, 4).with_signals(DeviceSignals(4, DEVICE, lane=lane))

        def order():
            routed.wait(LONG)
            return by_load(ends.tolist())

        route = experts._Route(w, torch.device("cpu"))
        stream = Stream(arrival, source, DeviceLanding(w, DEVICE, lane), order=order, route=route)
        with cuda.capture(), refused(RuntimeError, "stream_experts: restart() while a CUDA graph is captured"):
            stream.restart(ends)
        assert not stream._filling.issued
        routed.set()
        stream._filling.finish_issuing()


def test_a_tensor_that_is_not_filled_yet_is_refused(monkeypatch):
    held, ends = Held(monkeypatch, 2), offsets_of((1, 0, 5, 2))
    with ts.stream_experts(weights(), ends) as stream:
        with refused(ValueError, "b is a tensor that ts.stream_in has not filled yet"):
            ts.grouped_mm(rand(8, K), stream.tensor, ends)
        held.release()
        stream.wait(LONG)
        assert not ts.grouped_mm(rand(8, K), stream.tensor, ends).isnan().any()


def on_fake_gpu(cuda, w, ends, land=None):
    """A stream of pinned experts to a fake GPU; ``land``: what is called in place of a copy."""
    cuda.pin(w)
    route = experts._Route(w, torch.device("cpu"))
    source = Source(w, lambda: "", lambda begin, end: ignore)
    order = route(source, ends, None)
    source.readers = 0
    lane = lanes.take(4, DEVICE, torch.cuda.current_stream().cuda_stream)
    arrival = Arrival.uniform(K, 4).with_signals(DeviceSignals(4, DEVICE, lane=lane))
    landing = DeviceLanding(w, DEVICE, lane)
    landing.tensor.fill_(float("nan"))
    landing.tensor = landing.tensor.detach().data  # its version is 0
    landing.land = land or landing.land
    return Stream(arrival, source, landing, order=order, route=route)


def test_the_native_thread_is_told_the_bytes_of_an_expert():
    jobs: list[Job] = []
    with fake_cuda() as cuda:
        w, lane = cuda.pin(weights()), lanes.take(4, DEVICE, 0)
        landing, signals = DeviceLanding(w, DEVICE, lane), DeviceSignals(4, DEVICE, lane=lane)
        thread = SimpleNamespace(start=jobs.append)
        landing.hand_over(thread, offsets_of((1, 0, 5, 2)), Chunks.uniform(4 * K, K), signals)
        (job,) = jobs
        assert (job.experts, job.size) == (4, w[0].nbytes)
        assert (job.source, job.to) == (w.data_ptr(), landing.tensor.data_ptr())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_copies_to_a_gpu_are_issued_in_that_order_and_signalled_behind(monkeypatch, sizes):
    """From pinned memory, offsets on the host: all is issued at once, and lands as the stream's work is done."""
    with fake_cuda() as cuda:
        w = cuda.pin(weights())
        route = experts._Route(w, torch.device("cpu"))
        source = Source(w, lambda: "", lambda begin, end: ignore)
        order = route(source, offsets_of(sizes), None)
        lane = lanes.take(4, DEVICE, torch.cuda.current_stream().cuda_stream)
        arrival = Arrival.uniform(K, 4).with_signals(DeviceSignals(4, DEVICE, lane=lane))
        landing = DeviceLanding(w, DEVICE, lane)
        landing.tensor.fill_(float("nan"))
        landed = []
        monkeypatch.setattr(landing, "land", lambda begin, end: landed.append(begin // K))
        source.readers = 0
        stream = Stream(arrival, source, landing, order=order, route=route)
        assert landed == SIZES[sizes]
        assert stream._filling.issued
        while landing.stream.run():
            pass
        assert arrival._signals.state() == [expert in SIZES[sizes] for expert in range(4)], "a GPU waits for others"
        assert stream.done
        del stream, arrival
        gc.collect()
        # A launch may still wait for an expert that was left out: only what is behind it may have the lane.
        other = lanes.take(4, DEVICE, 7)
        assert (other is lane) == (len(SIZES[sizes]) == 4)
        if other is not lane:
            assert lanes.take(4, DEVICE, 0) is lane, "it is whole: none was left that should come"


def test_a_launch_of_experts_fills_nothing_for_what_is_behind_it(monkeypatch):
    """It may have waited for some of them alone: the device has its offsets."""
    with fake_cuda() as cuda:
        stream = on_fake_gpu(cuda, weights(), offsets_of((1, 0, 5, 2)))
        stream.arrival._signals.use()
        assert stream.arrival._signals.awaited_here
        assert not stream.is_filled_here
        cuda.run()
        assert stream.is_filled_here


def test_the_gradient_of_a_gpu_looks_at_experts_with_rows_alone(monkeypatch):
    seen = []

    class Late:
        def void_if_late(self, change, needs):
            seen.append(needs.tolist())
            return change * float("nan") if len(seen) == 2 else change

    monkeypatch.setattr(Awaited, "for_gradient", lambda *_: Late())
    x, ends = rand(11, K).requires_grad_(), offsets_of((1, 0, 5, 2))
    with ts.stream_experts(weights(), ends) as stream:
        for activation in (None, "swiglu"):
            (found,) = torch.autograd.grad(ts.grouped_mm(x, stream, ends, activation=activation).sum(), x)
            assert bool(found[:8].isnan().all()) == (activation == "swiglu")
        with forward_ad.dual_level():
            ts.grouped_mm(forward_ad.make_dual(x, x), stream, ends)
    assert seen == [[True, False, True, True]] * 3


def test_what_lands_on_a_gpu_is_no_modification_but_a_restart_is(monkeypatch):
    with fake_cuda() as cuda:
        stream = on_fake_gpu(cuda, weights(), offsets_of((1, 0, 5, 2)))
        assert stream.tensor._version == 0
        assert torch.equal(stream.tensor[2], weights()[2])
        stream.restart(offsets_of((1, 0, 5, 2)))
        stream._filling.finish_issuing()
        assert stream.tensor._version == 1


def test_activations_are_those_of_a_plain_product():
    x, ends = rand(8, K), offsets_of((1, 0, 5, 2))
    with ts.stream_experts(weights(), ends) as stream:
        for activation in ACTIVATIONS:
            wanted = ts.grouped_mm(x, weights(), ends, activation=activation)
            assert ts.grouped_mm(x, stream, ends, activation=activation).equal(wanted)
