"""Programs: sequences and launches in turn, over a driver that records what it is asked."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import TICKETS, Launch, Matmul, call, kernel, remember, tried
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tilestream.launch import native_program
from tilestream.launch.launcher import VARIES, Launcher
from tilestream.launch.native_program import Launched, NativeProgram, Patch, ProgramError, keeping
from tilestream.runtime import sequence
from tilestream.runtime.sequence import Record, Sequence, Slot, Write
from tilestream_tools import native_build

WRITE, RECORD, LAUNCH = 2, 4, 6
STREAM, EPOCH, A, B, OUT = map(Slot, range(5))
ILLEGAL = 700
NEEDS = TICKETS, 8, 4, 16, 0


@pytest.fixture
def library(extension, libraries, driver, monkeypatch):
    """The extension's library, for sequences and programs, over the fake driver."""
    found = ctypes.CDLL(str(libraries[0]))
    for module in (sequence, native_program):
        monkeypatch.setattr(module, "library", lambda: found)
    monkeypatch.setattr(native_program, "error_name", str)
    return found


class Prepared:
    """A program: a write, a product that the extension has launched before, and a record."""

    def __init__(self, extension: Any, driver: Any, needs: tuple[int, ...] = (0, 0, 0, 0, 0)) -> None:
        self.x = call()
        self.launch = Launch(driver, self.x, needs)
        assert remember(extension, self.launch, self.x)
        with keeping() as launches:
            out, _ = tried(extension, self.x)
        assert out is not None
        (launched,) = launches
        patches = [Patch("a", A), Patch("b", B), Patch("out", OUT)]
        self.before, self.behind = Sequence(2, [Write(STREAM, 0xF0, EPOCH)]), Sequence(1, [Record(STREAM, 0xE0)])
        self.program = NativeProgram(5, [self.before, (launched, patches), self.behind])

    def issue(self, stream: int, epoch: int, x: Matmul, out: torch.Tensor, device: int = -1) -> bool:
        return self.program.issue(device, stream, epoch, x.a.data_ptr(), x.b.data_ptr(), out.data_ptr())


def test_operations_and_launches_are_issued_in_order_with_the_values_of_the_issue(extension, driver, library):
    made = Prepared(extension, driver)
    other, out = call(), torch.zeros(16, 32, dtype=torch.bfloat16)
    driver.forget()
    assert made.issue(0x51, 9, other, out)
    (natively,) = driver.launches()
    assert [one[:3] for one in driver.operations()] == [
        (WRITE, 0x51, 0xF0), (LAUNCH, 0x51, made.launch._launcher._function.value), (RECORD, 0x51, 0xE0)
    ]  # fmt: skip
    assert driver.operations()[0][3] == 9
    driver.forget()
    made.launch.issue(other, out, stream=0x51)
    assert driver.launches() == [natively], "the bytes that Python would give the driver"


def test_a_kernel_that_python_has_issued_is_issued_with_other_addresses_and_words(extension, driver, library):
    signature = {"whole": "*bf16", "parts": "*bf16", "out": "*bf16", "epoch": "i32", "rows": "i32", "divisor": "fp32"}
    launcher = Launcher(kernel(driver, signature, {}, []), (3, 2, 1), [VARIES] * 4 + [77, 2.0])
    launcher(0x50, 0x1000, 0x2000, 0x3000, 5)
    launched = Launched.of_kernel((launcher, (0x1000, 0x2000, 0x3000, 5)))
    program = NativeProgram(3, [(launched, [Patch("out", Slot(2)), Patch("epoch", EPOCH + 1)])])
    driver.forget()
    assert program.issue(-1, 0x51, 8, 0x4000)
    natively = driver.launches()
    driver.forget()
    launcher(0x51, 0x1000, 0x2000, 0x4000, 9)
    assert driver.launches() == natively


def test_a_kernel_with_a_varying_number_that_is_no_integer_is_refused(driver, library):
    launcher = Launcher(kernel(driver, {"x": "*bf16", "alpha": "fp32"}, {}, []), (1, 1, 1), [VARIES, VARIES])
    with pytest.raises(ValueError, match="alpha is no address and no integer"):
        Launched.of_kernel((launcher, (0x1000, 0.5)))


@pytest.mark.parametrize(
    "why", ["captured", "no context", "another device", "no words on the stream"]
)  # fmt: skip
def test_nothing_is_issued_of_a_program_that_is_pythons(extension, driver, library, why):
    made = Prepared(extension, driver, NEEDS)
    out, stream, device = torch.zeros(16, 32, dtype=torch.bfloat16), 0, -1
    driver.forget()
    if why == "captured":
        driver.state(capturing=True)
    elif why == "no context":
        driver.thread(context=None)
    elif why == "another device":
        device = 3
    else:
        stream = 0x99
    assert not made.issue(stream, 9, made.x, out, device)
    assert driver.operations() == driver.launches() == []


def test_launches_of_a_program_take_tickets_as_others_do(extension, driver, library):
    made = Prepared(extension, driver, NEEDS)
    out = torch.zeros(16, 32, dtype=torch.bfloat16)
    driver.forget()
    for _ in range(2):
        assert made.issue(0, 9, made.x, out)
    first, second = driver.launches()
    assert first != second, "the counters' base has grown"
    other = torch.zeros(16, 32, dtype=torch.bfloat16)
    assert tried(extension, made.x)[0] is not None
    assert made.issue(0, 9, made.x, other)
    addresses = [x.data_ptr().to_bytes(8, "little") for x in (out, other)]
    *_, fourth = [launch.replace(addresses[1], addresses[0]) for launch in driver.launches()]
    assert len({first, second, fourth}) == 3, "the launch beside the program has taken tickets, too"


def test_a_refused_launch_says_how_far_the_program_came(extension, driver, library):
    made = Prepared(extension, driver)
    out = torch.zeros(16, 32, dtype=torch.bfloat16)
    driver.state(launch=ILLEGAL)
    driver.forget()
    with pytest.raises(ProgramError, match="launch 1 of 3 parts was not issued") as raised:
        made.issue(0x51, 9, made.x, out)
    assert raised.value.parts == 1
    assert [one[0] for one in driver.operations()] == [WRITE], "what stands behind it is not issued"


def test_a_refused_operation_is_tried_once_more_by_python_and_the_rest_follows(extension, driver, library, monkeypatch):
    made = Prepared(extension, driver)
    out, by_python = torch.zeros(16, 32, dtype=torch.bfloat16), []
    monkeypatch.setattr(sequence.driver, "stream_write", lambda *operands: by_python.append(operands))
    driver.forget()
    driver.library.fake_refuse_operations(0, 201)

    def write(*operands: int) -> None:
        by_python.append(operands)
        driver.library.fake_refuse_operations(-1, 0)

    monkeypatch.setattr(sequence.driver, "stream_write", write)
    assert made.issue(0x51, 9, made.x, out)
    assert by_python == [(0x51, 0xF0, 9)]
    assert [one[0] for one in driver.operations()] == [LAUNCH, RECORD]


@pytest.mark.parametrize(("refused", "parts"), [(False, 3), (True, 1)])
def test_an_interrupt_behind_the_native_call_does_not_lose_how_far_it_came(
    extension, driver, library, monkeypatch, refused, parts
):
    made, out = Prepared(extension, driver), torch.zeros(16, 32, dtype=torch.bfloat16)
    native, error = made.program._issue, KeyboardInterrupt()
    assert made.issue(0x51, 8, made.x, out)
    made.program.progress = None
    assert made.program.recover(error) == 0, "the issue has not begun"

    def interrupted(*given: Any) -> int:
        native(*given)
        raise error

    monkeypatch.setattr(made.program, "_issue", interrupted)
    if refused:
        driver.state(launch=ILLEGAL)
    with pytest.raises(KeyboardInterrupt):
        made.issue(0x51, 9, made.x, out)
    driver.forget()
    assert made.program.recover(error) == parts
    assert driver.operations() == []
    assert made.program.recover(ProgramError("refused", 2)) == 2


def test_launches_are_kept_in_the_block_alone_and_in_order(extension, driver, library):
    pairs = [call(), call(m=24)]
    made = [Launch(driver, x) for x in pairs]
    for launch, x in zip(made, pairs, strict=True):
        remember(extension, launch, x)
        tried(extension, x)
    with keeping() as launches:
        for x in pairs:
            tried(extension, x)
    assert len(launches) == 2
    with keeping() as none:
        pass
    assert not none
    driver.forget()
    program = NativeProgram(3, [(one, [Patch("out", Slot(1 + i))]) for i, one in enumerate(launches)])
    outs = [x.results[0] for x in pairs]
    assert program.issue(-1, 0, *[out.data_ptr() for out in outs])
    natively = driver.launches()
    driver.forget()
    for launch, x, out in zip(made, pairs, outs, strict=True):
        launch.issue(x, out)
    assert driver.launches() == natively


@pytest.mark.parametrize(
    ("values", "patch", "why"),
    [
        (5, Patch("a", Slot(5)), "a value that is not there"), (0, Patch("a", 1), "no stream"),
        (1, Patch("a", 1), "more slots"),
    ],
)  # fmt: skip
def test_a_program_that_cannot_be_issued_is_refused(extension, driver, library, values, patch, why):
    x = call()
    remember(extension, Launch(driver, x), x)
    with keeping() as launches:
        tried(extension, x)
    with pytest.raises(ValueError, match=why):
        NativeProgram(values, [Sequence(2, [Write(STREAM, 0xF0, EPOCH)]), (launches[0], [patch])])


def test_layouts_have_numbers(extension):
    a, b = torch.zeros(16, 64), torch.zeros(64, 32)
    number = extension.number_layouts(a, b)
    assert number == extension.number_layouts(torch.ones(16, 64), torch.ones(64, 32)) > 0
    others = [
        (a, torch.zeros(32, 64).t()), (a[:8], b), (a.half(), b), (a, b, b), (torch.zeros(1025)[1:].view(16, 64), b),
        (b, a), (a.view(1, 16, 64), b),
    ]  # fmt: skip
    numbers = [extension.number_layouts(*one) for one in others]
    assert len({number, *numbers}) == 1 + len(others)
    assert extension.number_layouts(torch._neg_view(a), b) == 0, "torch has to resolve it first"
    for block in (torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False), FakeTensorMode()):
        with block:
            assert extension.number_layouts(a, b) == 0, "torch's dispatcher has to see the call"
    numbers.clear()
    torch.func.vmap(lambda x: numbers.append(extension.number_layouts(a, b)) or x)(a)
    torch.func.functionalize(lambda x: numbers.append(extension.number_layouts(a, b)) or x)(a)
    assert numbers == [0, 0]
    assert extension.number_layouts(a, b) == number
    assert extension.number_layouts(torch.zeros([1] * 70), torch.zeros([1] * 70)) == 0, "too long for a key"


def test_structs_are_those_of_cudas_header():
    """Triton has the header."""
    folder = Path(importlib.import_module("triton").__file__).parent / "backends" / "nvidia" / "include"
    if not (folder / "cuda.h").exists():
        pytest.skip("this Triton has no header of CUDA's driver")
    flags = "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", f"-I{folder}"
    done = subprocess.run(
        [*native_build.compiler(), *flags, Path(__file__).with_name("abi.cpp")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
