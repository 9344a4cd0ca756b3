"""HIP's runtime, asked through the interface that CUDA's driver is asked through; a stub library stands in for it."""

# ruff: noqa: E501  (tables of messages: each in one piece, so that it can be searched for)

from __future__ import annotations

import contextlib
import ctypes
import inspect
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tilestream.runtime import driver
from tilestream.runtime.driver import hip
from tilestream.runtime.driver.cuda import Cuda
from tilestream.runtime.driver.hip import Hip, loaded

CREATE, WRITE, WAIT, COPY_IN, COPY_ACROSS, EVENT, DESTROY, RECORD, HOLD, QUERY, AWAIT, COPY_OUT = range(12)


class _Call(ctypes.Structure):
    _fields_ = [
        ("what", ctypes.c_int), ("stream", ctypes.c_uint64), ("address", ctypes.c_uint64), ("value", ctypes.c_uint32),
        ("flags", ctypes.c_uint32), ("mask", ctypes.c_uint32),
    ]  # fmt: skip


class Stub:
    """The library, and what it was asked."""

    def __init__(self, file: Path) -> None:
        self.library = ctypes.CDLL(str(file))

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value

    @property
    def calls(self) -> list[tuple[int, ...]]:
        count = ctypes.c_int.in_dll(self.library, "count").value
        made = (_Call * 64).in_dll(self.library, "calls")[:count]
        return [(c.what, c.stream, c.address, c.value, c.flags, c.mask) for c in made]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    to = tmp_path_factory.mktemp("hip") / "libamdhip64.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", to, Path(__file__).with_name("hip_stub.c")], check=True)
    return to


@pytest.fixture
def stub(built, monkeypatch):
    """A build of torch for HIP, whose runtime is the stub."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(driver, "library", lambda: str(built))
    driver._function.cache_clear()
    made = Stub(built)
    for name in ("count", "fails", "capturing", "pending"):
        made.set(name, 0)
    yield made
    driver._function.cache_clear()


WORD, SOURCE = ctypes.c_uint32(0), ctypes.create_string_buffer(b"chunks")
AT, FROM = ctypes.addressof(WORD), ctypes.addressof(SOURCE)


@pytest.mark.parametrize(
    ("call", "answer", "noted"),
    [
        (lambda: driver.stream_write(0xABC0, AT, -1), None, (WRITE, 0xABC0, AT, 0xFFFFFFFF, 0, 0)),
        (lambda: driver.stream_wait(3, AT, 7), None, (WAIT, 3, AT, 7, 0, 0xFFFFFFFF)),
        (lambda: driver.copy_in(5, AT, FROM, 4), None, (COPY_IN, 5, AT, 4, 0, 0)),
        (lambda: driver.copy_across(5, AT, FROM, 4), None, (COPY_ACROSS, 5, AT, 4, 0, 0)),
        (lambda: driver.copy_out(5, AT, FROM, 4), None, (COPY_OUT, 5, AT, 4, 0, 0)),
        # One that the default stream does not wait for.
        (lambda: driver.create_stream(), 0xB0B0, (CREATE, 0, 0, 0, 1, 0)),
        # One that records no time.
        (lambda: driver.create_event(), 0xE0E0, (EVENT, 0, 0, 0, 2, 0)),
        (lambda: driver.destroy_event(0xE0), None, (DESTROY, 0, 0xE0, 0, 0, 0)),
        (lambda: driver.record_event(5, 0xE0), None, (RECORD, 5, 0xE0, 0, 0, 0)),
        (lambda: driver.wait_event(5, 0xE0), None, (HOLD, 5, 0xE0, 0, 0, 0)),
        (lambda: driver.has_come(0xE0), True, (QUERY, 0, 0xE0, 0, 0, 0)),
        (lambda: driver.await_event(0xE0), None, (AWAIT, 0, 0xE0, 0, 0, 0)),
        (lambda: driver.bind_context(), None, None),
        (lambda: (driver.context_id(), driver.context_sms()), (0, 0), None),
    ],
)
def test_what_the_runtime_is_asked(stub, call, answer, noted):
    WORD.value = 0
    assert call() == answer
    assert stub.calls == [noted] * (noted is not None)
    if noted is not None and noted[0] in (WRITE, COPY_IN, COPY_ACROSS, COPY_OUT):
        assert WORD.value == (0xFFFFFFFF if noted[0] == WRITE else int.from_bytes(b"chun", "little"))


def test_captures_have_numbers(stub):
    assert driver.capture_id(1) == 0
    stub.set("capturing", 42)
    assert driver.capture_id(1) == 42


def test_an_event_is_waited_for_or_looked_at(stub):
    stub.set("pending", 1)
    assert not driver.has_come(0xE0)


def test_nothing_is_written_at_once_that_was_to_be_captured(stub):
    stub.set("capturing", 42)
    for ask in (driver.stream_write, driver.stream_wait):
        with pytest.raises(RuntimeError, match="is not captured: HIP makes it at once"):
            ask(5, AT, 1)
    assert stub.calls == []


def test_a_graph_has_no_branches_of_this_package(stub):
    for ask in (
        lambda: driver.captured_nodes(5), lambda: driver.follow_nodes(5, (1,), True),
        lambda: driver.call_when_gone(5, 64, 64),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match="in a HIP graph the kernel makes the copies: copies='kernel'"):
            ask()
    assert stub.calls == []


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: driver.stream_write(0, 64, 1), "refused the stream write: NAME; signal the chunks from a kernel of your own"),
        (lambda: driver.stream_wait(0, 64, 1), "refused the stream wait: NAME"),
        (lambda: driver.copy_in(0, 64, 64, 1), "refused the copy to the device: NAME"),
        (lambda: driver.copy_across(0, 64, 64, 1), "refused the copy between devices: NAME"),
        (lambda: driver.copy_out(0, 64, 64, 1), "refused the copy from the device: NAME"),
        (lambda: driver.create_stream(), "made no stream: NAME"),
        (lambda: driver.capture_id(0), "does not say what is captured: NAME"),
        (lambda: driver.create_event(), "made no event: NAME"),
        (lambda: driver.record_event(0, 64), "recorded no event: NAME"),
        (lambda: driver.wait_event(0, 64), "refused the wait for an event: NAME"),
        (lambda: driver.has_come(64), "does not say whether an event has come: NAME"),
        (lambda: driver.await_event(64), "did not wait for an event: NAME"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("code", "name"), [(1, r"hipErrorInvalidValue \(invalid argument\)"), (999, "code 999")])
def test_what_the_runtime_refuses(stub, ask, message, code, name):
    stub.set("fails", code)
    with pytest.raises(RuntimeError, match=message.replace("NAME", name)):
        ask()


def test_nothing_is_loaded_before_it_is_asked(stub, monkeypatch):
    def none() -> str:
        raise AssertionError("looked up")

    monkeypatch.setattr(driver, "library", none)
    assert isinstance(driver.current(), Hip)
    monkeypatch.setattr(torch.version, "hip", None)
    assert isinstance(driver.current(), Cuda)


def test_the_library_is_the_one_that_torch_loaded(monkeypatch, tmp_path):
    lines = [
        "7f10-7f20 r-xp 00000000 08:01 11 /usr/lib/libc.so.6",
        "7f20-7f30 r--p 00000000 08:01 12 /a place/torch/lib/libamdhip64.so.7",
        "7f30-7f40 rw-p 00000000 00:00 0 ",
    ]
    theirs = "/a place/torch/lib/libamdhip64.so.7"
    assert (loaded(lines), loaded(lines[:1])) == (theirs, "")
    for text, found in (("\n".join(lines), theirs), ("", "libamdhip64.so"), (None, "libamdhip64.so")):
        file = tmp_path / f"maps{text is None}"
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr(hip, "_MAPS", file)
        hip.library.cache_clear()
        assert hip.library() == found
    hip.library.cache_clear()


def test_both_do_all_that_the_module_offers():
    """Each function of `Driver` with the same arguments, and as a function of the module."""
    asked = {name: f for name, f in inspect.getmembers(driver.Driver, inspect.isfunction) if name[0] != "_"}
    assert len(asked) == 23
    for name, function in asked.items():
        parameters = list(inspect.signature(function).parameters)
        for made in (Cuda, Hip):
            assert list(inspect.signature(getattr(made, name)).parameters) == parameters
        assert list(inspect.signature(getattr(driver, name)).parameters) == parameters[1:]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Cuda, "cuThreadExchangeStreamCaptureMode"), (Hip, "hipThreadExchangeStreamCaptureMode")],
    ids=["cuda", "hip"],
)
def test_a_thread_that_asks_about_events_is_relaxed_about_captures(kind, name, monkeypatch):
    asked, codes = [], [0, 1]

    def find(function, arguments):
        def call(address):
            asked.append((function, ctypes.c_int.from_address(address).value))
            return codes.pop(0)

        return call

    monkeypatch.setattr(kind, "error_name", lambda self, code: f"code {code}")
    made = kind(find)
    made.relax_captures()
    assert asked == [(name, 2)]  # cudaStreamCaptureModeRelaxed
    with pytest.raises(RuntimeError, match="the driver keeps this thread from asking about events: code 1"):
        made.relax_captures()


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_that_is_relaxed_about_captures_sets_the_threads_mode_back(fails, monkeypatch):
    modes = [1]  # cudaStreamCaptureModeThreadLocal

    def exchange(address):
        word = ctypes.c_int.from_address(address)
        modes.append(word.value)
        word.value = modes[-2]
        return 0

    monkeypatch.setattr(driver, "current", lambda: Cuda(lambda function, arguments: exchange))
    with contextlib.suppress(ZeroDivisionError), driver.captures_relaxed():
        assert modes == [1, 2]
        assert not fails or 1 // 0
    assert modes == [1, 2, 1]
