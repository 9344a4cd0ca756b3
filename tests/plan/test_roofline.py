"""The floor, the problem and the device: computed by hand."""

# ruff: noqa: E501  (tables of messages: each in one piece, so that it can be searched for)

from __future__ import annotations

import pytest
import torch
from made_up import refused

from tilestream.arrival import Chunks
from tilestream.plan import DeviceProperties, Floor, Incoming, Problem, cpu_properties, dtype_name, plan
from tilestream.plan.problem import ITEMSIZE

device_of = DeviceProperties("x", "cpu", 4, 100e9, 10e9, "")


@pytest.mark.parametrize(
    ("problem", "workers", "operations", "nbytes", "seconds", "binds"),
    [
        # 2 * 1000^3 operations on 4 x 100 GFLOP/s; 3 matrices of 4 MB at 10 GB/s.
        (Problem(1000, 1000, 1000), 4, 2_000_000_000, 12_000_000, 5e-3, "operations"),
        (Problem(1000, 1000, 1000), 1, 2_000_000_000, 12_000_000, 20e-3, "operations"),
        # float64 at half the rate, twice the bytes.
        (Problem(1000, 1000, 1000, dtype="float64", out_dtype="float64"), 4, 2_000_000_000, 24_000_000, 10e-3, "operations"),
        # 16-bit in, fp32 out: 2 + 2 + 4 MB.
        (Problem(1000, 1000, 1000, dtype="bfloat16"), 4, 2_000_000_000, 8_000_000, 5e-3, "operations"),
        # A vector times a matrix: the matrix's 4 MB.
        (Problem(1, 1000, 1000), 4, 2_000_000, 4_008_000, 0.4008e-3, "bytes"),
        # Three batches, each with its own A; and with one that they share.
        (Problem(10, 100, 1000, 3), 4, 6_000_000, 4 * (30_000 + 300_000 + 3_000), 133.2e-6, "bytes"),
        (Problem(10, 100, 1000, 3, shared_rows=True), 4, 6_000_000, 4 * (10_000 + 300_000 + 3_000), 125.2e-6, "bytes"),
        (Problem(100, 100, 0), 4, 0, 40_000, 4e-6, "bytes"),
        (Problem(0, 0, 0), 4, 0, 0, 0.0, "operations"),
    ],
)  # fmt: skip
def test_by_hand(problem, workers, operations, nbytes, seconds, binds):
    floor = Floor.of(problem, device_of, workers)
    assert (floor.operations, floor.bytes, floor.binds) == (operations, nbytes, binds)
    assert floor.seconds == pytest.approx(seconds)
    assert floor.intensity == pytest.approx(operations / nbytes if nbytes else 0.0)


def test_a_plan_s_floor_counts_the_workers_it_uses_and_inline_all(device):
    assert plan(1000, 1000, 1000, workers=2).floor == Floor.of(Problem(1000, 1000, 1000), device, 2)
    inline = plan(16, 16, 16)
    assert (inline.variant, inline.floor) == ("inline", Floor.of(Problem(16, 16, 16), device, 4))


NEGATIVE = [({name: -1}, f"{name}=-1; an extent is not negative") for name in ("m", "n", "k", "batch")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *NEGATIVE,
        ({"rows": Incoming(Chunks((0, 10)))}, "arrival: its chunks bring 10 rows, the operand has 24"),
        ({"rows": Incoming(Chunks((0, 24))), "shared_rows": True}, "arrival: its chunks bring 24 rows, the operand has 12"),
        ({"columns": Incoming(Chunks((0, 24)))}, "weight_arrival: its chunks bring 24 rows, the operand has 7"),
    ],
)  # fmt: skip
def test_a_problem_refuses(arguments, message):
    with refused(ValueError, message):
        Problem(**{"m": 12, "n": 7, "k": 5, "batch": 2, **arguments})


def test_row_of_batch():
    found = [
        Problem(m, 7, 5, batch, shared_rows=shared).row_of_batch
        for m, batch, shared in ((12, 1, False), (12, 3, False), (12, 3, True), (0, 3, False), (12, 0, False))
    ]
    assert found == [(), (0, 12, 24), (), (), ()]


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_dtype_name(dtype):
    assert dtype_name(dtype) == dtype_name(getattr(torch, dtype)) == dtype_name(f"torch.{dtype}") == dtype


@pytest.mark.parametrize("dtype", ["int8", torch.int64, torch.bool, torch.complex64, "float8_e8m0fnu", None, "f4"])
def test_dtype_name_refuses(dtype):
    with refused(
        TypeError, f"dtype: {dtype}; tilestream multiplies {', '.join(ITEMSIZE)}: convert first, or use torch.matmul"
    ):
        dtype_name(dtype)


def test_this_machine_s_cpu():
    cpu = cpu_properties()
    assert cpu is cpu_properties(), "asked for once"
    assert (cpu.backend, cpu.workers >= 1) == ("cpu", True)
    assert 1e9 < cpu.flops < 1e13
    assert 1e9 < cpu.bandwidth <= 400e9
    assert cpu.source.startswith("nominal: ")
    assert cpu.peak("float64", 3) == pytest.approx(1.5 * cpu.flops)
    assert cpu.peak("bfloat16", 3) == pytest.approx(3 * cpu.flops)


def test_a_machine_that_says_nothing_of_itself(monkeypatch):
    from tilestream.core import device

    monkeypatch.setattr(device, "_cpuinfo", dict)
    monkeypatch.setattr(device.Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError()))
    silent = cpu_properties.__wrapped__()
    assert silent.workers >= 1
    assert silent.flops == 8 * 4.0e9
    assert "scalar, 8 fp32 operations a cycle at 4.0 GHz" in silent.source


@pytest.mark.parametrize(
    ("flags", "lanes", "operations"),  # of two pipes: each multiplies and adds, or one adds and the other multiplies
    [
        ("sse2 avx avx2 fma avx512f", 16, 4), ("sse2 avx avx2 fma", 8, 4), ("sse2 avx", 8, 2), ("fp asimd", 4, 4),
        ("fp", 2, 4),
    ],
    ids=["avx512f", "avx2", "avx", "asimd", "scalar"],
)  # fmt: skip
def test_a_cores_peak_is_that_of_its_widest_vectors(monkeypatch, flags, lanes, operations):
    from tilestream.core import device

    name = "Features" if "fp" in flags.split() else "flags"
    monkeypatch.setattr(device, "_cpuinfo", lambda: {name: flags})
    monkeypatch.setattr(device, "_clock", lambda info: 5e9)
    assert cpu_properties.__wrapped__().flops == lanes * operations * 5e9
