"""Calls that wait for what arrives, or publish, over the extension, on a fake GPU whose driver records launches."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stand_ins import TICKETS, Attention, AttentionLaunch, Launch, Matmul, on_fake_gpu, remember

import tilestream as ts
from fake_cuda import DEVICE, FakeCuda, fake_cuda
from tilestream.arrival.device import DeviceSignals, LocalRows
from tilestream.core.error_record import op_number
from tilestream.launch.observe import WORDS, observation
from tilestream.ops import attention_request, gated, native, publish, request

BF16 = torch.bfloat16
NEEDS = (TICKETS, 8, 4, 16, 0)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16)


A, B, W, BIAS, OUT = zeros(16, 64), zeros(64, 32), zeros(32, 64), zeros(32), zeros(16, 32)
Q, K, V, ATTENDED = zeros(2, 8, 4, 16), zeros(2, 8, 2, 16), zeros(2, 8, 2, 16), zeros(2, 8, 4, 16)


@pytest.fixture
def cuda():
    with fake_cuda() as made:
        yield made


@pytest.fixture
def python_calls(extension, driver, cuda, monkeypatch) -> list[Any]:
    """The calls that were made Python's way: each a function that launches it once more, as Python would."""
    made: list[Any] = []

    def words(r: Any, arrivals: dict[str, Any], publish: Any = None) -> dict[str, int]:
        found = {}
        for operand, arrival in arrivals.items():
            if arrival is not None:
                gate = arrival._signals.use()
                found[f"{operand}_signals"], found[f"{operand}_quarantine"] = (
                    gate.words.data_ptr(), gate.quarantine.data_ptr()
                )  # fmt: skip
                found[f"{operand}_epoch"], found[f"{operand}_key"] = gate.epoch, gate.key
        if found:
            found |= {"allowed": int(1e9 * (r.deadline or 30)), "op": op_number(getattr(r, "op", "attention"))}
        if publish is not None:
            published = publish._signals.publish()
            found["out_signals"], found["out_counts"] = published.signals.data_ptr(), published.counts.data_ptr()
            found["out_epoch"] = published.epoch
        return found

    def launched(launch: Any, issue: Callable[..., None]) -> None:
        issue()
        if (seen := observation()) is not None:
            seen.launches.append(launch)
        made.append(issue)

    def multiplied(r: request.Request) -> torch.Tensor:
        b = r.b.contiguous()
        out = torch.zeros(*r.a.shape[:-1], b.shape[-1], dtype=BF16) if r.out is None else r.out
        x = Matmul(0, r.a.reshape(-1, r.a.shape[-1]), r.b, r.bias, None, r.scale_a, r.scale_b)
        extra = words(r, {"row": r.arrival, "column": r.weight_arrival}, r.publish)
        local = None if r.arrival is None else r.arrival._signals.local_rows
        launch = Launch(driver, x, extra=extra, local=None if local is None else local.rows)

        def issue(out: torch.Tensor = out, **moved: int) -> None:
            place = {} if local is None else {"local": local.rows.data_ptr()}
            launch.issue(x, out, **place | moved)

        launched(launch, issue)
        if r.publish is not None:
            r.publish._signals.published(r.publish.pivot)
        return out

    def attended(r: attention_request.AttentionRequest) -> Any:
        out = torch.zeros_like(r.q) if r.out is None else r.out
        x = Attention(**{name: getattr(r, name) for name in r._fields[:11]})
        of_rows = words(r, {"row": r.arrival})
        launch = AttentionLaunch(driver, x, extra={name.removeprefix("row_"): word for name, word in of_rows.items()})

        def issue(out: torch.Tensor = out, **moved: int) -> None:
            launch.issue(x, out, **{name.removeprefix("row_"): word for name, word in moved.items()})

        launched(launch, issue)
        return out

    monkeypatch.setattr(request, "_multiply", multiplied)
    monkeypatch.setattr(attention_request, "_attend", attended)
    on_fake_gpu(monkeypatch, extension)
    return made


def arriving(rows: int = 4, count: int = 4, pivot: int = 0, bounds: tuple[int, ...] = (), **more: Any) -> ts.Arrival:
    """An arrival whose signals are on the fake GPU."""
    made = ts.Arrival(count, rows_per_chunk=0 if bounds else rows, bounds=bounds, pivot=pivot)
    made._signals = DeviceSignals(count, DEVICE, **more)
    return made


CALLS = {
    "rows": lambda arrival: ts.matmul(A, B, arrival=arrival),
    "rows, bias, deadline": lambda arrival: ts.mm(A, B, bias=BIAS, arrival=arrival, deadline=7),
    "rows, out=": lambda arrival: ts.matmul(A, B, out=OUT, arrival=arrival),
    "columns": lambda arrival: ts.linear(A, W, weight_arrival=arrival),
    "both": lambda arrival: ts.linear(A, W, arrival=arrival, weight_arrival=arrival),
    "published": lambda arrival: ts.matmul(A, B, publish=arrival),
    "published, out=": lambda arrival: ts.linear(A, W, publish=arrival, out=OUT),
    "keys": lambda arrival: ts.attention(Q, K, V, arrival=arrival),
    "keys, out=": lambda arrival: ts.attention(Q, K, V, out=ATTENDED, arrival=arrival),
}


@pytest.mark.parametrize("own", [False, True], ids=["epochs", "own words"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_second_equal_call_is_launched_natively(python_calls, driver, call, own):
    """The driver is given what Python would give it: the signals and the epoch of the second call's own arrival."""
    first, other = (arriving(words=torch.zeros(4, dtype=torch.int32) if own else None) for _ in range(2))
    for arrival in (first, other, other, other):
        arrival.advance()
    call(first)
    result = call(other)
    assert len(python_calls) == 1
    natively = driver.launches()[-1]
    driver.forget()
    python_calls[0](result, **words_of(other))
    assert driver.launches() == [natively]


def words_of(arrival: ts.Arrival) -> dict[str, int]:
    """What a launch is told of signals, whatever it waits for or publishes."""
    signals = arrival._signals

    def told(*of: DeviceSignals | None) -> dict[str, int]:
        return dict(zip(WORDS, gated.Gate(*of, [0] * 4, 0, 30.0, "matmul").words(), strict=True))

    waits = told(signals, signals, None)
    words = {name: word for name, word in waits.items() if name not in ("allowed", "op")}
    if signals._counts is not None:
        published = told(None, None, signals)
        words |= {name: word for name, word in published.items() if name.startswith("out_")}
    return words


def test_ragged_chunks_and_rows_that_are_here_already(python_calls, driver):
    def call(base: int) -> torch.Tensor:
        rows = zeros(8 * 4 * 64 + base)[base:].view(32, 64)[:8]
        arrival = arriving(count=3, bounds=(0, 7, 7, 16))
        arrival._signals.local_rows = LocalRows(rows, 4, 8, 16, lambda: brought.append(base))
        arrivals.append(arrival)
        return ts.matmul(A, B, arrival=arrival)

    brought: list[int] = []
    arrivals: list[ts.Arrival] = []
    call(0)
    result = call(64)
    assert len(python_calls) == 1
    natively = driver.launches()[-1]
    assert brought == [0], "the stand-in for Python reads them where the others are, the extension in their tensor"
    driver.forget()
    there = arrivals[1]._signals.local_rows.rows.data_ptr()
    python_calls[0](result, **words_of(arrivals[1]), local=there)
    assert driver.launches() == [natively]


def test_local_rows_of_another_place_are_another_call(python_calls):
    for first, height, period in ((4, 8, 16), (0, 8, 16), (4, 4, 16), (4, 8, 8)):
        arrival = arriving()
        arrival._signals.local_rows = LocalRows(zeros(8, 64), first, height, period, lambda: None)
        ts.matmul(A, B, arrival=arrival)
    assert len(python_calls) == 4


@pytest.mark.parametrize(
    "other",
    [
        {"pivot": 1}, {"rows": 5}, {"count": 5}, {"bounds": (0, 4, 8, 12, 16)},
    ],
    ids=str,
)  # fmt: skip
def test_another_chunking_is_another_call(python_calls, other):
    for how in ({}, other):
        ts.matmul(A, B, arrival=arriving(**how))
        ts.linear(A, W, weight_arrival=arriving(**how))
        ts.linear(A, W, publish=arriving(**how))
        ts.attention(Q, K, V, arrival=arriving(**how))
    assert len(python_calls) == 8


def test_what_arrives_is_a_part_of_the_key(python_calls):
    arrival = arriving()
    ts.linear(A, W, arrival=arrival)
    ts.linear(A, W, weight_arrival=arrival)
    ts.linear(A, W, arrival=arrival, weight_arrival=arrival)
    ts.linear(A, W, publish=arriving())
    ts.linear(A, W)
    assert len(python_calls) == 5


def test_a_deadline_is_none(python_calls, driver):
    for deadline in (3.0, 5.0):
        ts.matmul(A, B, arrival=arriving(), deadline=deadline)
    assert len(python_calls) == 1
    assert (5 * 10**9).to_bytes(8, "little") in driver.launches()[-1]


# What comes before a launch, and behind it ----------------------------------------------------------------------------


def test_a_call_that_the_extension_does_not_know_has_not_begun(python_calls, monkeypatch):
    """Else a stream would be said to wait for chunks that no launch waits for, and their signals would be refused."""
    arrival = arriving()
    monkeypatch.setattr(request, "_multiply", lambda r: A)
    ts.matmul(A, B, arrival=arrival)
    ts.matmul(A, B, publish=arrival)
    assert not arrival._signals._users
    assert not arrival._signals._waiting
    arrival.signal(0)


def test_a_reader_comes_behind_the_beginning_of_the_matmul_that_publishes(python_calls, cuda: FakeCuda):
    ts.matmul(A, B, arrival=arriving())
    arrival, other = arriving(), cuda.stream()
    ts.matmul(A, B, publish=arriving())
    ts.matmul(A, B, publish=arrival)
    cuda.run()
    with cuda.on(other):
        ts.matmul(A, B, arrival=arrival)
    assert len(python_calls) == 2
    assert other.issued > other.run(), "no signal was written: the kernels here do nothing"
    assert cuda.records(A, other)


def test_signals_behind_a_launch_that_waits_for_them_are_refused(python_calls, cuda: FakeCuda):
    ts.matmul(A, B, arrival=arriving())
    arrival, other = arriving(), cuda.stream()
    ts.matmul(A, B, arrival=arrival)
    cuda.current.give((other, 1))  # the launch, which waits: kernels do nothing here
    with pytest.raises(RuntimeError, match="on which a launch already waits for it"):
        arrival.signal(0)
    other.give(lambda: None)
    cuda.run()  # it has ended: its deadline has expired
    arrival.signal(0)


def test_an_epoch_is_published_once(python_calls):
    for _ in range(2):
        ts.matmul(A, B, publish=(arrival := arriving()))
        with pytest.raises(ValueError, match="epoch 1 is signalled already"):
            ts.matmul(A, B, publish=arrival)
    arrival.advance()
    ts.matmul(A, B, publish=arrival)
    assert len(python_calls) == 1


def test_a_publication_that_the_driver_refuses_is_made_by_python(python_calls, driver):
    ts.matmul(A, B, publish=arriving())
    driver.state(launch=700)
    arrival = arriving()
    with pytest.raises(RuntimeError, match="did not launch"):
        ts.matmul(A, B, publish=arrival)
    driver.state()
    arrival._signals.stopped()  # what `tilestream.ops.publish` does where a launch fails
    ts.matmul(A, B, publish=arrival)
    assert arrival._signals.by_matmul


def test_an_earlier_launch_that_failed_is_raised_first(python_calls, monkeypatch):
    ts.matmul(A, B, arrival=arriving())

    def failed(index):
        raise ts.ArrivalTimeout("mm", 0, 0, (0, 0), 1.0, 1.0)

    monkeypatch.setattr(gated, "check_device", failed)
    arrival = arriving()
    with pytest.raises(ts.ArrivalTimeout):
        ts.matmul(A, B, arrival=arrival)
    assert not arrival._signals._users


def test_a_written_output_is_another_version(python_calls):
    out = zeros(16, 32)
    for _ in range(2):
        before = out._version
        ts.matmul(A, B, arrival=arriving(), out=out)
    assert len(python_calls) == 1
    assert out._version > before


# Calls that are Python's ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CALLS if name != "both"])  # a graph's signals serve one operand
def test_a_captured_call_is_pythons(python_calls, cuda: FakeCuda, name):
    call = CALLS[name]
    call(arriving())
    first, second = arriving(), arriving()
    with cuda.capture():
        call(first)
        call(second)
    assert len(python_calls) == 3


def test_copies_of_the_kernels_own_are_pythons(python_calls):
    ts.matmul(A, B, arrival=arriving())
    arrival = arriving()
    assert gated.Gate.of("matmul", -1, arrival, None, None, None) is not None
    arrival._signals.copies = object()
    assert gated.Gate.of("matmul", -1, arrival, None, None, None) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: ts.matmul(A, B, arrival=arriving(), deadline=0),
        lambda: ts.matmul(A, B, arrival=arriving(), deadline=float("inf")),
        lambda: ts.matmul(A, B, arrival=arriving(), deadline=True),
        lambda: ts.matmul(A, B, publish=arriving(), deadline=3.0),
        lambda: ts.linear(A, W, arrival=arriving(), publish=arriving()),
        lambda: ts.matmul(A, B, arrival="now"),
        lambda: ts.matmul(A, B, arrival=ts.Arrival.uniform(4, 4)),
        lambda: ts.matmul(A.clone().requires_grad_(), B, arrival=arriving()),
        lambda: ts.matmul(A, B, arrival=arriving(), activation="other"),
        lambda: ts.matmul(A, B, arrival=arriving(), workers=2**70),
    ],
)
def test_a_call_that_may_be_wrong_is_checked_by_python(python_calls, monkeypatch, call):
    ts.matmul(A, B, arrival=arriving())
    ts.matmul(A, B, publish=arriving())
    seen: list[request.Request] = []
    monkeypatch.setattr(request, "_multiply", seen.append)
    call()
    assert len(seen) == 1


def test_another_device_is_checked_by_python(cuda):
    arrival = arriving()
    assert gated.Gate.of("matmul", 1, arrival, None, None, None) is None


@pytest.mark.parametrize("around", [lambda: torch.autocast("cpu", BF16), torch.autograd.forward_ad.dual_level])
def test_a_block_that_has_to_see_a_call_sees_it(python_calls, around):
    ts.matmul(A, B, arrival=arriving())
    with around():
        ts.matmul(A, B, arrival=arriving())
    assert len(python_calls) == 2


def test_a_ticket_is_of_the_call_that_was_found_last(python_calls, extension):
    """A signal's handler may have made a call of its own between looking a call up and launching it."""
    ts.matmul(A, B, arrival=arriving())
    gate = gated.Gate.of("matmul", -1, arriving(), None, None, None)
    arguments = native.wanted("matmul", A, B, *[None] * 3, 1.0, 1.0, *[None] * 4, True, "auto", None)
    first, second = (extension.find_gated_matmul(None, gate.chunking, *arguments) for _ in range(2))
    words = [*gate.words(), 0]
    assert extension.launch_found(A, first, words) == (False, None, None)
    assert extension.launch_found(A, second, words) == (False, None, None), "once looked up, launched once"
    third = extension.find_gated_matmul(None, gate.chunking, *arguments)
    assert extension.launch_found(A, third, words)[1].shape == (16, 32)
    assert extension.launch_found(A, third, words)[0] is False
    with pytest.raises(ValueError, match="another number of words"):
        extension.launch_found(A, extension.find_gated_matmul(None, gate.chunking, *arguments), words[1:])


# Tables ---------------------------------------------------------------------------------------------------------------


def test_a_table_is_kept_until_its_recipes_are_long_forgotten(extension, driver, cuda: FakeCuda, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    table = torch.zeros(8, dtype=torch.int32)
    before = sys.getrefcount(table)
    x = Matmul(0, A, B)
    launch = Launch(driver, x, NEEDS, extra={"row_table": table.data_ptr()})
    launch.tables = [table]
    assert remember(extension, launch, x)
    assert extension.try_matmul(*x) is not None
    assert table.data_ptr().to_bytes(8, "little") in driver.launches()[-1]
    extension.clear()
    assert sys.getrefcount(table) > before + 1, "a thread may have looked its recipe up"
    extension.clear()
    launch.tables = []
    assert sys.getrefcount(table) == before
    assert cuda.records(table, cuda.streams[0])


def test_a_table_is_kept_once_however_often_its_recipe_is_made(extension, driver, cuda: FakeCuda, monkeypatch):
    """A full table of recipes is emptied, and they are made anew: what is kept must not grow with that."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    table, x = torch.zeros(8, dtype=torch.int32), Matmul(0, A, B)
    launch = Launch(driver, x, NEEDS, extra={"row_table": table.data_ptr()})
    launch.tables = [table]
    before = sys.getrefcount(table)
    for _ in range(3):
        assert remember(extension, launch, x)
    assert sys.getrefcount(table) == before + 1


@pytest.mark.parametrize("own", [False, True], ids=["torch's stream", "a caller's"])
def test_a_callers_stream_may_be_gone_when_a_table_is_freed(extension, driver, cuda: FakeCuda, monkeypatch, own):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(extension, "_readers", {})
    stream, table, x = cuda.stream(), torch.zeros(8, dtype=torch.int32), Matmul(0, A, B)
    stream.stream_id = stream.cuda_stream if own else 35
    launch = Launch(driver, x, NEEDS, extra={"row_table": table.data_ptr()})
    launch.tables = [table]
    with cuda.on(stream):
        assert remember(extension, launch, x, stream=stream.cuda_stream)
    before = sys.getrefcount(table)
    launch.tables = []
    extension.clear()
    extension.clear()
    extension.clear()
    assert cuda.records(table, stream) is not own
    assert (sys.getrefcount(table) == before - 1) is own, "kept, where torch is not told who may read it"


def test_a_stream_that_has_words_may_read_every_table(extension, driver, cuda: FakeCuda, monkeypatch):
    """A recipe is launched on any stream with words, whichever launch gave them."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(extension, "_readers", {})
    stream, table, x, y = cuda.stream(), torch.zeros(8, dtype=torch.int32), Matmul(0, A, B), Matmul(0, B, A[:, :32].t())
    with cuda.on(stream):
        assert remember(extension, Launch(driver, y, NEEDS), y, stream=stream.cuda_stream)
    launch = Launch(driver, x, NEEDS, extra={"row_table": table.data_ptr()})
    launch.tables = [table]
    assert remember(extension, launch, x)
    extension.clear()
    extension.clear()
    assert cuda.records(table, stream)


def test_a_publication_that_is_interrupted_is_under_way_no_more(python_calls, extension, monkeypatch):
    ts.matmul(A, B, publish=arriving())
    interrupted = arriving()

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(extension, "launch_found", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ts.matmul(A, B, publish=interrupted)
    ts.matmul(A, B, publish=interrupted)


def test_an_address_that_is_no_tables_is_none_of_a_recipe(extension, driver):
    x = Matmul(0, A, B)
    launch = Launch(driver, x, NEEDS, extra={"row_table": 0x5000})
    assert not remember(extension, launch, x)
    without_words = Launch(driver, x, extra={"row_table": (table := torch.zeros(8)).data_ptr()})
    without_words.tables = [table]
    assert not remember(extension, without_words, x), "its streams are not known"


def test_a_chunkings_number_is_never_another_ones(monkeypatch):
    monkeypatch.setattr(gated, "_MOST_NUMBERS", 4)
    monkeypatch.setattr(gated, "_numbers", {})
    seen = [gated.number(i) for i in range(10)] + [gated.number(0)]
    assert len(set(seen)) == len(seen)
    assert gated.number(0) == seen[-1]
    assert len(gated._numbers) <= 4


def test_a_sums_product_is_launched_natively_with_its_epoch(python_calls, driver, monkeypatch):
    """Whatever the device has reported: its call has begun, and peers wait for it. Another limit is another launch."""
    publication, issued, out = publish.Publication(4, DEVICE), [], zeros(16, 32)

    def issue(x, publishes, how, publication, epoch, op):
        signals, counts, _ = publication.at(epoch)
        extra = {"out_signals": signals.data_ptr(), "out_counts": counts.data_ptr(), "out_epoch": epoch}
        launch = Launch(driver, Matmul(0, x.a, x.b), extra=extra)
        launch.issue(Matmul(0, x.a, x.b), x.out)
        if (seen := observation()) is not None:
            seen.launches.append(launch)
        issued.append(functools.partial(launch.issue, Matmul(0, x.a, x.b), x.out))
        return ""

    monkeypatch.setattr(publish, "_issue", issue)
    monkeypatch.setattr(gated, "check_device", lambda index: pytest.fail("the call has begun"))
    for epoch in (1, 2):
        publish.matmul_published(A, B, out, publication, epoch, 4, 1)
    assert len(issued) == 1
    natively = driver.launches()[-1]
    driver.forget()
    issued[0](out_epoch=2)
    assert driver.launches() == [natively]
    publish.matmul_published(A, B, out, publication, 3, 4, 2)
    publish.matmul_published(A, B, out, publication, 4, 4, 1, limit=8)
    assert len(issued) == 3, "another pivot, and a limit that no block around this call has"
