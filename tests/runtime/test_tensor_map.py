"""Tensor maps: what the driver is asked for, and what is refused before it is asked."""

from __future__ import annotations

import struct

import pytest

from tilestream.launch import tensor_map as module
from tilestream.launch.tensor_map import SIZE, TFLOAT32, TensorMap

BF16, FP32 = 9, 7
ADDRESS = 0x7F0000000010


def encode(address: int, *tensor, **how) -> bytes:
    return TensorMap(*tensor, **how).at(address)


def told(map_: bytes) -> dict:
    """What the stub was asked for, innermost dimension first."""
    words = struct.unpack("<16Q", map_)
    rank = words[2]
    assert all(word >> 32 == 1 for word in words[8 : 8 + min(rank, 3)]), "element strides are 1"
    return {
        "address": words[0], "type": words[1] & 0xFFFF, "bit": words[1] >> 21, "shape": words[3 : 3 + rank],
        "box": tuple(word & 0xFFFFFFFF for word in words[8 : 8 + rank]), "strides": words[11 : 10 + rank],
        "swizzle": words[15] >> 16, "promotion": words[15] >> 8 & 255, "fill": words[15] & 255,
    }  # fmt: skip


def test_a_matrix(stub):
    map_ = encode(ADDRESS, BF16, 2, (1000, 4096), (5000, 1), (64, 32), 2)
    assert len(map_) == SIZE
    assert told(map_) == {
        "address": ADDRESS, "type": BF16, "bit": 1, "shape": (4096, 1000), "box": (32, 64), "strides": (10000,),
        "swizzle": 2, "promotion": 2, "fill": 0,
    }  # fmt: skip


def test_a_batch_rounded_to_tf32(stub):
    found = told(encode(ADDRESS, TFLOAT32, 4, (3, 1000, 4096), (2**23, 4096, 1), (1, 64, 32), 3, nan=True))
    assert (found["type"], found["fill"], found["swizzle"]) == (TFLOAT32, 1, 3)
    assert (found["shape"], found["box"], found["strides"]) == ((4096, 1000, 3), (32, 64, 1), (16384, 2**25))


@pytest.mark.parametrize(
    ("shape", "strides", "steps"),
    [
        ((1, 1000, 4096), (0, 4096, 1), (8192, 8192000)),
        ((1, 1000, 4096), (7, 4096, 1), (8192, 8192000)),
        ((1, 1000, 4096), (2**60, 4096, 1), (8192, 8192000)),
        ((1, 1, 100), (3, 3, 1), (208, 208)),
        ((1, 100), (1, 1), (208,)),
        ((5, 1, 100), (104, 1, 1), (208, 208)),
        ((5, 1000, 4096), (0, 4096, 1), (8192, 0)),
        ((8, 1), (8, 3), (16,)),
    ],
)
def test_a_stride_that_is_never_taken_may_be_anything(stub, shape, strides, steps):
    assert told(encode(ADDRESS, BF16, 2, shape, strides, (1,) * (len(shape) - 1) + (64,), 3))["strides"] == steps


@pytest.mark.parametrize(
    ("rows", "version", "bit"), [(15, 13010, 0), (16, 13010, 1), (15, 13020, 1), (2**24, 12040, 1)]
)
def test_small_tensors_on_older_drivers(stub, rows, version, bit):
    stub.set("version", version)
    # The last byte that is counted is the first of the last element: row 15's is past 128 KiB.
    found = told(encode(ADDRESS, BF16, 2, (rows, 4097), (4104, 1), (64, 64), 3))
    assert found["bit"] == bit


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shape": (), "strides": (), "box": ()}, "1 to 5 dimensions"),
        ({"shape": (1,) * 6, "strides": (1,) * 6, "box": (8,) * 6}, "1 to 5 dimensions"),
        ({"strides": (1,)}, "as many strides"),
        ({"box": (64,)}, "as many of the box"),
        ({"shape": (0, 4096)}, "extents from 1"),
        ({"shape": (2**32 + 1, 4096)}, "extents from 1"),
        ({"strides": (4096, 2)}, "innermost stride of 1"),
        ({"strides": (4097, 1)}, "multiples of 16 bytes"),
        ({"strides": (2**39, 1)}, "multiples of 16 bytes, from 0 to 2"),
        ({"box": (512, 64)}, "box extents from 1 to 256"),
        ({"box": (64, 0)}, "box extents from 1 to 256"),
        ({"box": (64, 4)}, "rows of the box that are multiples of 16 bytes"),
        ({"box": (64, 128)}, r"no longer than the swizzle \(128 bytes\)"),
    ],
)
def test_the_rules(stub, changed, message):
    given = {"shape": (1000, 4096), "strides": (4096, 1), "box": (64, 64), **changed}
    with pytest.raises(ValueError, match=message) as caught:
        TensorMap(BF16, 2, **given, swizzle=3)
    assert str(given["shape"]) in str(caught.value)
    assert not stub.get("encoded")


def test_an_address_between_16_bytes(stub):
    with pytest.raises(ValueError, match="multiple of 16 bytes, not 0x7f0000000018"):
        encode(ADDRESS + 8, BF16, 2, (1000, 4096), (4096, 1), (64, 64), 3)


def test_what_the_driver_refuses(stub):
    stub.set("fails", 1)
    with pytest.raises(ValueError, match=r"CUDA_ERROR_INVALID_VALUE \(invalid argument\).*\(1000, 4096\).*swizzle 3"):
        encode(ADDRESS, BF16, 2, (1000, 4096), (4096, 1), (64, 64), 3)


def test_a_fresh_thread_is_given_the_devices_context(stub, monkeypatch):
    stub.set("fails", 201)
    monkeypatch.setattr(module, "bind_context", lambda: stub.set("fails", 0))
    assert told(encode(ADDRESS, BF16, 2, (64, 64), (64, 1), (64, 64), 3))["address"] == ADDRESS
